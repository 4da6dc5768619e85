"""Plots of the benchmarks' records, as PNG files beside them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.report import OURS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Name in the legend and colour, in the order drawn.
STYLES = {
    "sm90": ("flash_attn sm90", "#1f4e9c"),
    "sm80": ("flash_attn sm80", "#5b8bd0"),
    "sm90_ordered": ("flash_attn sm90, deterministic", "#7f96c8"),
    "sm80_ordered": ("flash_attn sm80, deterministic", "#8fb2e0"),
    "tiled": ("flash_attn tiled", "#bcd2ee"),
    "math": ("standard attention (PyTorch math)", "#8c8c8c"),
    "standard": ("standard attention (by hand)", "#5c5c5c"),
    "float32": ("float32 (PyTorch math)", "#1e1e1e"),
    "efficient": ("PyTorch memory-efficient", "#e3b23c"),
    "flash": ("PyTorch flash (FA2 on a GPU)", "#d1603d"),
    "flash_op": ("PyTorch flash, the operator alone", "#f0a58f"),
    "cudnn": ("cuDNN", "#4f9d69"),
    "fa3": ("FlashAttention-3", "#7a4e9f"),
    "flashinfer": ("FlashInfer", "#3aa6b9"),
    "bf16": ("bf16", "#1f4e9c"),
    "fp16": ("fp16", "#1f4e9c"),
    "fast": ("fast: e4m3", "#c9781f"),
    "balanced": ("balanced: int8, e4m3", "#e0a13c"),
    "accurate": ("accurate: int8, 16 bits", "#f0cf8a"),
    "e4m3": ("e4m3, a scale a head", "#a33b2b"),
    "fa3_e4m3": ("FlashAttention-3, e4m3", "#b79bd0"),
    # Of benchmarks/context_parallel.py.
    "ring": ("ring", "#1f4e9c"),
    "ulysses": ("ulysses", "#5b8bd0"),
    "mesh": ("ring x heads", "#7f96c8"),
    "PyTorch": ("PyTorch's context_parallel, cuDNN", "#4f9d69"),
    "ring-flash-attn": ("ring-flash-attn, ring", "#f0a58f"),
    "ring-flash-attn, zigzag": ("ring-flash-attn, zigzag", "#d1603d"),
    # Of benchmarks/hbm.py and benchmarks/tiles.py.
    "least": ("each tensor once", "#d0d0d0"),
    "formula": ("FlashAttention, formula", "#b7dfc3"),
    "standard_formula": ("standard attention, formula", "#e8c9b8"),
    "0": ("tile 0", "#5b8bd0"),
    "1": ("tile 1", "#e3b23c"),
    "2": ("tile 2", "#4f9d69"),
}

WIDTH = 8.3  # inches of a figure, that pages show at about 830 pixels: fonts keep their size there
HEADDIMS = (64, 128, 256)  # drawn where a record has more than three

Panels = dict[str, dict[str, dict[str, float]]]  # title to label to name
Drawing = Callable[[dict[str, Any]], Iterator[tuple[str, "Figure"]]]


def draw_if_possible(record: Path, drawing: Drawing) -> None:
    """``draw``, or a line that says what is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no plots without matplotlib; --replot {record} draws them where it is installed")
    else:
        draw(record, drawing)


def draw(record: Path, drawing: Drawing) -> None:
    """Draw the figures of a JSON record beside it.

    Raises
    ------
    SystemExit
        Without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("plots need matplotlib: pip install matplotlib")
    for name, figure in drawing(json.loads(record.read_text())):
        path = record.with_name(f"{record.stem}{name}.png")
        figure.savefig(path, dpi=150, bbox_inches="tight")
        print(f"wrote {path}")


def names_in(figures: Iterable[Mapping[str, object]]) -> list[str]:
    """The names that some of the figures are by, in the order drawn."""
    found = set().union(*figures)
    return [name for name in STYLES if name in found]


def speed(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Bars of TFLOP/s by seqlen: a figure for each direction, dtype and set of options.

    Cases with a KV cache have one figure for each dtype; those with a label have none.
    """
    by_figure: dict[tuple[str, ...], list[Row]] = {}
    by_dtype: dict[str, list[Row]] = {}
    for row in data["rows"]:
        if row.get("model"):
            continue
        if row.get("queries"):
            by_dtype.setdefault(row["dtype"], []).append(row)
        else:
            by_figure.setdefault(case_words(row), []).append(row)
    device = data["environment"]["device"]
    for dtype, rows in by_dtype.items():
        if any(row["gbs"] for row in rows):
            bandwidth = data["environment"]["arguments"]["bandwidth"]
            yield f"-{dtype}", cache_speed(rows, f"KV cache, {dtype} on {device}", bandwidth)
    for words, rows in by_figure.items():
        speeds = [row["tflops"] for row in rows]
        names = names_in(speeds)
        if not names:  # all skipped
            continue
        headdims = sorted({row["headdim"] for row in rows})
        if len(headdims) > len(HEADDIMS):
            headdims = [headdim for headdim in headdims if headdim in HEADDIMS]
        causals = sorted({row["causal"] for row in rows})
        seqlens = {row["seqlen"] for row in rows}
        # As many panels in a row as have room for their bars.
        columns = len(causals) if len(names) * len(seqlens) * len(causals) <= 50 else 1
        panels = [(headdim, causal) for headdim in headdims for causal in causals]
        lines = len(panels) // columns
        figure = new_figure(WIDTH, 1.2 + 2.5 * lines)
        all_axes = figure.subplots(lines, columns, squeeze=False, sharey=True).flat
        for k, (axes, (headdim, causal)) in enumerate(zip(all_axes, panels, strict=True)):
            by_seqlen = {
                row["seqlen"]: speed
                for row, speed in zip(rows, speeds, strict=True)
                if (row["headdim"], row["causal"]) == (headdim, causal)
            }
            draw_bars(axes, {thousands(n): by_seqlen[n] for n in sorted(by_seqlen)}, names)
            axes.set_title(f"head dim {headdim}, {'causal' if causal else 'not causal'}")
            if k % columns == 0:
                axes.set_ylabel("TFLOP/s")
            if k >= len(panels) - columns:
                axes.set_xlabel("sequence length")
        row = rows[0]
        heads = f"{row['width']} / head dim query heads"
        if any(other["width"] != row["width"] for other in rows):
            heads = f"{row['nheads']} query and {row['nheads_kv']} key heads"
        title = f"Attention {' '.join(words)} on {device}\n{row['tokens']} tokens, {heads}"
        finish(figure, title, names)
        yield "-" + "-".join(words).replace(" ", ""), figure


def cache_speed(rows: Sequence[Row], title: str, bandwidth: float | None) -> Figure:
    """Lying bars of GB/s, a group for each case; a line at the memory's bandwidth."""
    names = names_in(row["gbs"] for row in rows)
    height = 0.17 * len(names) + 0.15  # of a group
    figure = new_figure(WIDTH, 1.4 + height * len(rows))
    axes = figure.subplots()
    for k, name in enumerate(names):
        places = [i for i, row in enumerate(rows) if name in row["gbs"]]
        y = [i * height + 0.17 * (k - (len(names) - 1) / 2) for i in places]
        bars = axes.barh(y, [rows[i]["gbs"][name] for i in places], 0.16, color=STYLES[name][1])
        axes.bar_label(bars, [f"{rows[i]['gbs'][name]:.0f}" for i in places], fontsize=8, padding=2)
    labels = []
    for row in rows:
        most = "up to " if row["varlen"] else ""
        size = f"batch {row['batch']}, {most}{thousands(row['seqlen'])}"
        heads = f"{row['nheads']}/{row['nheads_kv']} heads of {row['headdim']}"
        labels.append(f"{size}, {', '.join(cache_words(row))}\n{heads}")
    axes.set_yticks([i * height for i in range(len(rows))], labels)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("GB/s")
    if bandwidth is not None:
        axes.axvline(bandwidth, color="black", linewidth=0.8, linestyle="--")
    finish(figure, title, names, grid="x")
    return figure


def caches(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Bars of the speed along the axis of a grid (benchmarks/decode.py), a panel for each other."""
    rows = data["rows"]
    axis = rows[0]["axis"]
    speeds = [cache_speeds(row) for row in rows]
    names = names_in(speeds)
    if not names:  # all skipped
        return
    described = [cache_axes(row) for row in rows]
    same = {key for key in described[0] if len({words[key] for words in described}) == 1}
    panels: Panels = {}
    for speed, words in zip(speeds, described, strict=True):
        title = ", ".join(word for key, word in words.items() if key not in {axis, *same})
        panels.setdefault(title, {})[words[axis]] = speed
    most = max(map(len, panels.values()))
    columns = 2 if len(panels) > 1 and len(names) * most <= 18 else 1
    lines = -(-len(panels) // columns)
    figure = new_figure(WIDTH, 1.4 + 2.3 * lines)
    all_axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, groups) in zip(all_axes, panels.items(), strict=False):
        draw_bars(axes, groups, names)
        axes.set_title(title)
        axes.set_ylabel(rows[0]["unit"])
    shared = ", ".join(word for key, word in described[0].items() if key in same - {axis})
    title = f"KV caches in {rows[0]['dtype']} on {data['environment']['device']}"
    finish(figure, f"{title}\n{shared}", names)
    yield "", figure


def cache_speeds(row: Row) -> dict[str, float]:
    """By provider, in the unit of the row: TFLOP/s or TB/s."""
    if row["unit"] == "TFLOP/s":
        return dict(row["tflops"])
    return {name: gbs / 1e3 for name, gbs in row["gbs"].items()}


def cache_axes(row: Row) -> dict[str, str]:
    """What a case of a KV cache is like, by axis."""
    batch = f"{row['prefills']} + " if row["prefills"] else ""
    return {
        "batch": f"batch {batch}{row['batch'] - row['prefills']}",
        "seqlen": f"{thousands(row['seqlen'])} keys",
        "heads": f"{row['nheads']}/{row['nheads_kv']} heads",
        "queries": f"{row['queries']} {'query' if row['queries'] == 1 else 'queries'}",
        "page_size": f"pages of {row['page_size']}" if row["page_size"] else "dense",
        "append": "append" if row["append"] else "attention",
        "fp8_cache": "e4m3" if row.get("fp8_cache") else "16 bits",
    }


def cache_words(row: Row) -> list[str]:
    """What a KV cache is like, beside its size."""
    queries = row.get("queries", 0)
    if not queries:
        return []
    words = [f"{queries} {'query' if queries == 1 else 'queries'}"]
    return words + ([f"pages of {row['page_size']}"] if row["page_size"] else [])


def case_words(row: Row) -> tuple[str, ...]:
    """What the cases of one figure have in common: all but head dim, causal and seqlen."""
    left = f"window {row['window']}" if row["window"] >= 0 else ""
    group = f"group {row['group']}" if row["group"] > 1 else ""
    lacked = {"shortest": 64, "log_uniform": False, "softcap": 0.0, "alibi": False}
    row = {**lacked, **row}  # older records lack them
    shortest = "" if row["shortest"] == 64 else f" from {row['shortest']}"
    shortest += " log-uniform" if row["log_uniform"] else ""
    varlen = f"varlen{shortest}" if row["varlen"] else ""
    dropout = f"dropout {row['dropout_p']:g}" if row["dropout_p"] > 0 else ""
    softcap = f"softcap {row['softcap']:g}" if row["softcap"] > 0 else ""
    flags = (name if row[name] else "" for name in ("alibi", "deterministic"))
    words = (row["direction"], row["dtype"], left, group, varlen, dropout, softcap, *flags)
    words += tuple(cache_words(row))
    return tuple(word for word in words if word)


def draw_bars(axes: Axes, groups: dict[str, dict[str, float]], names: Sequence[str]) -> None:
    """Draw a group of bars, one a name, for each label."""
    width = 0.86 / len(names)
    for k, name in enumerate(names):
        places = [i for i, bars in enumerate(groups.values()) if name in bars]
        heights = [bars[name] for bars in groups.values() if name in bars]
        x = [i + (k - (len(names) - 1) / 2) * width for i in places]
        drawn = axes.bar(x, heights, width, color=STYLES[name][1])
        texts = [f"{height:.0f}" if height >= 10 else f"{height:.2g}" for height in heights]
        crowded = len(names) * len(groups) > 12
        axes.bar_label(drawn, texts, fontsize=8, rotation=90 if crowded else 0, padding=2)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.margins(x=0.01, y=0.16)


def draw_panels(panels: Panels, names: Sequence[str], unit: str, height: float) -> Figure:
    """A panel below the other, each with a group of bars for each label."""
    figure = new_figure(WIDTH, height)
    all_axes = figure.subplots(len(panels), squeeze=False).flat
    for axes, (title, groups) in zip(all_axes, panels.items(), strict=True):
        draw_bars(axes, groups, names)
        axes.set_title(title)
        axes.set_ylabel(unit)
    return figure


def memory(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Lines of peak memory by seqlen, both logarithmic."""
    rows = data["rows"]
    names = names_in(row["peak_mib"] for row in rows)
    figure = new_figure(WIDTH, 4.6)
    axes = figure.subplots()
    ours = next((name for name in OURS if name in names), None)
    for name in names:
        points = [(row["seqlen"], row["peak_mib"][name]) for row in rows if name in row["peak_mib"]]
        axes.plot(
            *zip(*points, strict=True),
            "o-",
            markersize=4,
            color=STYLES[name][1],
            zorder=3 if name == ours else 2,
        )
        if name in (ours, "math"):
            for point in points:
                axes.annotate(
                    binary(point[1]),
                    point,
                    xytext=(0, -12 if name == ours else 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=4)
    seqlens = sorted({row["seqlen"] for row in rows})
    axes.set_xticks(seqlens, [thousands(seqlen) for seqlen in seqlens])
    axes.set_xlabel("sequence length")
    axes.yaxis.set_major_formatter(lambda mib, _: binary(mib))
    axes.set_ylabel("peak memory beside the inputs")
    axes.margins(y=0.12)
    row = rows[0]
    title = f"Memory of attention forward + backward on {data['environment']['device']}"
    heads = f"{row['nheads']} query and {row['nheads_kv']} key heads of {row['headdim']}"
    mask = "causal" if row["causal"] else "not causal"
    finish(figure, f"{title}\n{row['dtype']}, {mask}, batch 1, {heads}", names)
    yield "", figure


def errors(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Bars of the relative errors by head dim, a panel for each kind of inputs."""
    rows = data["rows"]
    names = names_in(row["relative"] for row in rows)
    panels: Panels = {}
    for row in rows:
        percents = {name: 100 * value for name, value in row["relative"].items()}
        panels.setdefault(row["inputs"], {})[f"head dim {row['headdim']}"] = percents
    figure = draw_panels(panels, names, "% of out", 1.4 + 2.3 * len(panels))
    device = data["environment"]["device"]
    finish(figure, f"Root mean square error of attention in FP8 on {device}", names)
    yield "", figure


def hbm(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Bars of what HBM moved by seqlen, logarithmic; a panel for each head dim and direction."""
    rows = data["rows"]
    moved = [row["moved_gb"] | row["formula_gb"] for row in rows]
    names = names_in(moved)
    panels: Panels = {}
    for row, gb in zip(rows, moved, strict=True):
        title = f"{row['direction']}, {row['nheads']} heads of {row['headdim']}"
        panels.setdefault(title, {})[thousands(row["seqlen"])] = gb
    figure = draw_panels(panels, names, "GB read and written", 1.2 + 2.7 * len(panels))
    for axes in figure.axes:
        axes.set_yscale("log")
    figure.axes[-1].set_xlabel("sequence length")
    title = f"HBM traffic of attention on {data['environment']['device']}"
    finish(figure, f"{title}\n{rows[0]['dtype']}, {rows[0]['tokens']} tokens, no mask", names)
    yield "", figure


def tiles(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Bars of the speed of each tile, that of the library's choice being 100; a panel a head dim.

    Of the cases without a label, from 1024 tokens on; keys that are divided are left out.
    """
    panels: Panels = {}
    for row in data["rows"]:
        if row["us"] and not row["model"] and row["seqlen"] >= 1024:
            label = f"{thousands(row['seqlen'])}\n{'causal' if row['causal'] else 'full'}"
            panels.setdefault(f"head dim {row['headdim']}", {})[label] = {
                name: 100 * row["us"]["auto"] / us
                for name, us in row["us"].items()
                if name.isdigit()
            }
    names = names_in(bars for groups in panels.values() for bars in groups.values())
    if not names:  # all skipped
        return
    figure = draw_panels(panels, names, "% of the choice", 1.2 + 2.1 * len(panels))
    row, device = data["rows"][0], data["environment"]["device"]
    finish(figure, f"Speed of the forward by tile, {row['dtype']} on {device}", names)
    yield "", figure


def training(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Bars of the speed and of the memory of training steps, or curves of losses.

    Models of one sequence length share a panel; each other has its own.
    """
    rows, environment = data["rows"], data["environment"]
    if "loss" in rows[0]:
        yield "", losses(rows, environment["device"])
        return
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row["model"], []).append(row)
    panels: dict[str, dict[str, Row]] = {}  # title to label to row
    for model, same in by_model.items():
        for row in same:
            size = thousands(row["seqlen"])
            title, label = ("", f"{model}\n{size}") if len(same) == 1 else (f"{model}, ", size)
            panels.setdefault(f"{title}tokens a sequence", {})[label] = row
    for field, unit, name in (("tflops", "TFLOP/s", ""), ("peak_gib", "peak GiB", "-memory")):
        names = names_in(row[field] for row in rows)
        if not names:
            continue
        figure = new_figure(WIDTH, 1.2 + 2.7 * len(panels))
        all_axes = figure.subplots(len(panels), squeeze=False).flat
        for axes, (label, group) in zip(all_axes, panels.items(), strict=True):
            draw_bars(axes, {each: row[field] for each, row in group.items()}, names)
            axes.set_xlabel(label)
            axes.set_ylabel(unit)
            if field == "tflops" and (peak := environment["arguments"]["peak"]):
                share = (lambda x, p=peak: 100 * x / p, lambda x, p=peak: x * p / 100)
                axes.secondary_yaxis("right", functions=share).set_ylabel(f"% of {peak:g}")
        title = f"Training steps in {rows[0]['dtype']} on {environment['device']}"
        finish(figure, title, names)
        yield name, figure


def losses(rows: Sequence[Row], device: str) -> Figure:
    """Losses by step, and how far they are from those of float32."""
    names = names_in([rows[0]["loss"]])
    steps = [row["step"] for row in rows]
    figure = new_figure(WIDTH, 3.8)
    left, right = figure.subplots(1, 2)
    for k, name in enumerate(reversed(names)):  # the thin line of ours above the others
        style: dict[str, Any] = {"color": STYLES[name][1], "linewidth": len(names) - k}
        left.plot(steps, [row["loss"][name] for row in rows], **style)
        if name != "float32":
            gaps = [row["loss"][name] - row["loss"]["float32"] for row in rows]
            right.plot(steps, gaps, **style)
    left.set_ylabel("loss")
    right.set_ylabel("loss less that of float32")
    for axes in (left, right):
        axes.set_xlabel("step")
    finish(figure, f"A small GPT trained in bf16 and in float32 on {device}", names)
    return figure


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def finish(figure: Figure, title: str, names: Sequence[str], grid: Literal["x", "y"] = "y") -> None:
    """Add the title, a legend of ``names``, and grids below the data."""
    from matplotlib.patches import Patch

    for each in figure.axes:
        each.grid(axis=grid, alpha=0.3)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    patches = [Patch(label=STYLES[name][0], color=STYLES[name][1]) for name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)


def thousands(n: int) -> str:
    """512, 1k, 64k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def binary(mib: float) -> str:
    """MiB, or GiB where it is about one or more: "0.5 MiB", "12 GiB"."""
    value, unit = (mib, "MiB") if mib < 1000 else (mib / 1024, "GiB")
    return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"
