"""Plots of the benchmarks' records, as PNG files beside them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import OURS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Name in the legend and colour, in the order drawn.
STYLES = {
    "sm90": ("flash_attn sm90", "#1f4e9c"),
    "sm80": ("flash_attn sm80", "#5b8bd0"),
    "sm80_ordered": ("flash_attn sm80, deterministic", "#8fb2e0"),
    "tiled": ("flash_attn tiled", "#bcd2ee"),
    "math": ("standard attention (PyTorch math)", "#8c8c8c"),
    "efficient": ("PyTorch memory-efficient", "#e3b23c"),
    "flash": ("PyTorch flash (FA2 on a GPU)", "#d1603d"),
    "flash_op": ("PyTorch flash, the operator alone", "#f0a58f"),
    "cudnn": ("cuDNN", "#4f9d69"),
    "fa3": ("FlashAttention-3", "#7a4e9f"),
}

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


def speed(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Bars of TFLOP/s by seqlen: a figure for each direction, dtype and set of options."""
    by_figure: dict[tuple[str, ...], list[Row]] = {}
    for row in data["rows"]:
        by_figure.setdefault(case_words(row), []).append(row)
    for words, rows in by_figure.items():
        names = [name for name in STYLES if any(name in row["tflops"] for row in rows)]
        if not names:  # all skipped
            continue
        headdims = sorted({row["headdim"] for row in rows})
        causals = sorted({row["causal"] for row in rows})
        seqlens = sorted({row["seqlen"] for row in rows})
        panel_width = 1.5 + 0.26 * len(names) * len(seqlens)
        figure = new_figure(panel_width * len(causals), 2.9 * len(headdims))
        panels = figure.subplots(len(headdims), len(causals), squeeze=False, sharey="row")
        for i, headdim in enumerate(headdims):
            for j, causal in enumerate(causals):
                shown = [r for r in rows if (r["headdim"], r["causal"]) == (headdim, causal)]
                by_seqlen = {row["seqlen"]: row["tflops"] for row in shown}
                draw_bars(panels[i][j], by_seqlen, names)
                mask = "causal" if causal else "not causal"
                panels[i][j].set_title(f"head dim {headdim}, {mask}", fontsize=10)
            panels[i][0].set_ylabel("TFLOP/s")
        for panel in panels[-1]:
            panel.set_xlabel("sequence length")
        device, row = data["environment"]["device"], rows[0]
        title = f"Attention {' '.join(words)} on {device}"
        heads = f"{row['width']} / head dim query heads"
        if any(other["width"] != row["width"] for other in rows):
            heads = f"{row['nheads']} query and {row['nheads_kv']} key heads"
        sizes = f"{row['tokens']} tokens, {heads}"
        finish(figure, f"{title}\n{sizes}", names)
        yield "-" + "-".join(words).replace(" ", ""), figure


def case_words(row: Row) -> tuple[str, ...]:
    """What the cases of one figure have in common: all but head dim, causal and seqlen."""
    left = f"window {row['window']}" if row["window"] >= 0 else ""
    group = f"group {row['group']}" if row["group"] > 1 else ""
    row = {"shortest": 64, "softcap": 0.0, "alibi": False, **row}  # older records lack them
    shortest = "" if row["shortest"] == 64 else f" from {row['shortest']}"
    varlen = f"varlen{shortest}" if row["varlen"] else ""
    dropout = f"dropout {row['dropout_p']:g}" if row["dropout_p"] > 0 else ""
    softcap = f"softcap {row['softcap']:g}" if row["softcap"] > 0 else ""
    flags = (name if row[name] else "" for name in ("alibi", "deterministic"))
    words = (row["direction"], row["dtype"], left, group, varlen, dropout, softcap, *flags)
    return tuple(word for word in words if word)


def draw_bars(axes: Axes, by_seqlen: dict[int, dict[str, float]], names: Sequence[str]) -> None:
    seqlens = sorted(by_seqlen)
    width = 0.86 / len(names)
    for k, name in enumerate(names):
        places = [i for i, seqlen in enumerate(seqlens) if name in by_seqlen[seqlen]]
        heights = [by_seqlen[seqlens[i]][name] for i in places]
        x = [i + (k - (len(names) - 1) / 2) * width for i in places]
        bars = axes.bar(x, heights, width, color=STYLES[name][1])
        texts = [f"{height:.0f}" if height >= 10 else f"{height:.2g}" for height in heights]
        axes.bar_label(bars, texts, fontsize=6.5, rotation=90 if len(names) > 4 else 0, padding=2)
    axes.set_xticks(range(len(seqlens)), [thousands(seqlen) for seqlen in seqlens])
    axes.margins(y=0.16)


def memory(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Lines of peak memory by seqlen, both logarithmic."""
    rows = data["rows"]
    names = [name for name in STYLES if any(name in row["peak_mib"] for row in rows)]
    figure = new_figure(6.6, 4.6)
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
                    fontsize=7,
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


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def finish(figure: Figure, title: str, names: Sequence[str]) -> None:
    """Add the title, a legend of ``names``, and grids below the data."""
    from matplotlib.patches import Patch

    for each in figure.axes:
        each.grid(axis="y", alpha=0.3)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    patches = [Patch(label=STYLES[name][0], color=STYLES[name][1]) for name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def thousands(n: int) -> str:
    """512, 1k, 64k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def binary(mib: float) -> str:
    """MiB, or GiB where it is about one or more: "0.5 MiB", "12 GiB"."""
    value, unit = (mib, "MiB") if mib < 1000 else (mib / 1024, "GiB")
    return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"
