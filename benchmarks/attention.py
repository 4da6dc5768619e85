"""Speed of attention, in TFLOP/s, beside its peers: every combination of the options given.

Run as ``python -m benchmarks.attention``; ``--help`` lists the options. Prints a table, writes
NAME.json, NAME.csv and a NAME-*.png for each direction into ``benchmarks/results/<gpu>/``. Without
a GPU the sizes are small.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import plots, report
from benchmarks.providers import (
    DTYPES,
    MATMULS,
    Case,
    Inputs,
    Provider,
    add_arguments,
    attempt,
    bind,
    chosen_providers,
    make_inputs,
)
from benchmarks.report import OURS, Row
from benchmarks.timing import larger_than_l2, time_in_turn

DEFAULTS = {
    "cuda": {
        "dtype": ["bf16"],
        "headdim": [64, 128, 256],
        "seqlen": [1024, 4096, 16384],
        "tokens": 16384,
        "width": 2048,
        "math_gib": 40.0,
        "rounds": 10,
        "providers": ["sm90", "sm80", "tiled", "math", "efficient", "flash", "cudnn"],
    },
    "cpu": {
        "dtype": ["fp32"],
        "headdim": [64],
        "seqlen": [128, 256],
        "tokens": 512,
        "width": 256,
        "math_gib": 4.0,
        "rounds": 5,
        "providers": ["tiled", "math", "flash"],
    },
}
SMOKE = {
    "cuda": [Case(direction, "bf16", 128, False, 4096) for direction in ("forward", "backward")],
    "cpu": [
        Case(direction, "fp32", 64, True, 128, tokens=256, width=128)
        for direction in ("forward", "backward")
    ],
}
SMOKE_PROVIDERS = ("sm90", "sm80", "flash", "cudnn")  # of gpu_check
OPTIONS = (
    "window",
    "group",
    "varlen",
    "shortest",
    "dropout_p",
    "softcap",
    "alibi",
    "deterministic",
)


def combinations(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of the fields' values; the last varies fastest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


class Preset(NamedTuple):
    """Cases, by their fields but direction and dtype, and whom they compare."""

    cases: list[dict[str, Any]]
    providers: tuple[str, ...] = ("sm90", "fa3", "cudnn")
    baseline: str = "fa3"


MASKS = (False, True)
PRESETS = {
    "lengths": Preset(
        combinations(
            headdim=(64, 96, 128, 192, 256), causal=MASKS, seqlen=[2**n for n in range(10, 15)]
        )
    ),
    "short": Preset(combinations(headdim=(64, 128, 256), causal=MASKS, seqlen=(128, 256, 512))),
    "window": Preset(
        combinations(window=(256, 1024, 4096), headdim=(64, 128), causal=[True], seqlen=[16384])
    ),
    "varlen": Preset(
        [
            {**lengths, **fields}
            for lengths in ({"shortest": 64, "seqlen": 4096}, {"shortest": 1, "seqlen": 512})
            for fields in combinations(
                varlen=[True], headdim=(64, 128, 256), causal=MASKS, tokens=[65536]
            )
        ]
    ),
    "gqa": Preset(
        [
            {"group": nheads // 8, "width": nheads * fields["headdim"], **fields}
            for nheads in (32, 64)
            for fields in combinations(headdim=(64, 128), causal=MASKS, seqlen=(1024, 4096, 16384))
        ]
    ),
    # No peer has these with instructions of Hopper.
    "options": Preset(
        [
            {**option, **fields}
            for option in ({"alibi": True}, {"dropout_p": 0.1}, {"softcap": 30.0})
            for fields in combinations(
                headdim=(64, 128, 256), causal=MASKS, seqlen=(1024, 4096, 16384)
            )
        ],
        providers=("sm90", "sm80"),
        baseline="sm80",
    ),
}


def measure(
    case: Case,
    providers: Mapping[str, Provider],
    device: str = "cuda",
    rounds: int = 10,
    l2_buffer: Tensor | None = None,
) -> Row:
    """Time the providers in turn.

    Returns
    -------
    dict
        The fields of the case, ``ms`` and ``tflops`` by provider, ``ratio``: the speed of ours (the
        best backend of this library that ran) over that of each other, and ``skipped``: the reason
        by provider.
    """
    inputs = make_inputs(case, device)
    calls, skipped = {}, {}
    for name, provider in providers.items():
        call, reason = attempt(prepare, provider, case, inputs)
        if call is None:
            skipped[name] = reason
        else:
            calls[name] = call
    ms = time_in_turn(calls, device, rounds, l2_buffer=l2_buffer) if calls else {}
    tflops = {name: case.flops / time / 1e9 for name, time in ms.items()}
    ours = next((name for name in OURS if name in tflops), None)
    return {
        **case._asdict(),
        "nheads": case.nheads,
        "nheads_kv": case.nheads_kv,
        "batch": len(case.lengths),
        "ours": ours,
        "ms": {name: round(time, 4) for name, time in ms.items()},
        "tflops": {name: float(f"{value:.4g}") for name, value in tflops.items()},
        "ratio": {
            name: round(tflops[ours] / value, 3)
            for name, value in tflops.items()
            if ours is not None and name != ours
        },
        "skipped": skipped,
    }


def prepare(provider: Provider, case: Case, inputs: Inputs) -> Callable[[], object]:
    """Return what to time, once it has run."""
    call = bind(provider, case, inputs)
    call()
    return call


def cells(row: Row, names: Sequence[str], options: Sequence[str], baseline: str) -> dict[str, str]:
    """A line of the table, by column."""
    tflops, ratio = row["tflops"], row["ratio"]
    return {
        "direction": row["direction"],
        "dtype": row["dtype"],
        "headdim": str(row["headdim"]),
        "causal": "yes" if row["causal"] else "no",
        "seqlen": str(row["seqlen"]),
        **{option: str(row[option]) for option in options},
        **{name: figure(tflops.get(name)) for name in names},
        f"to {baseline}": figure(ratio.get(baseline), 2),
        "to best peer": figure(to_best_peer(ratio), 2),
    }


def figure(value: float | None, decimals: int = 1) -> str:
    """The number, a small speed with three digits; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" if value >= 10 or decimals > 1 else f"{value:.3g}"


def to_best_peer(ratio: Mapping[str, float]) -> float | None:
    """The least of the ratios to others than this library; None where no other ran."""
    return min((value for name, value in ratio.items() if name not in OURS), default=None)


def summary(rows: Sequence[Row], baseline: str) -> list[str]:
    """Geometric mean and worst of the ratios: by direction, then by head dim and by options."""
    lines = []
    for direction in dict.fromkeys(row["direction"] for row in rows):
        chosen = [row for row in rows if row["direction"] == direction]
        by_headdim: dict[str, list[Row]] = {}
        by_options: dict[str, list[Row]] = {}
        for row in chosen:
            by_headdim.setdefault(f"head dim {row['headdim']}", []).append(row)
            by_options.setdefault(" ".join(plots.case_words(row)[1:]), []).append(row)
        groups = {"all": chosen}
        for more in (by_headdim, by_options):
            groups |= more if len(more) > 1 else {}
        for label, group in groups.items():
            to = {
                baseline: [row["ratio"].get(baseline) for row in group],
                "the best peer": [to_best_peer(row["ratio"]) for row in group],
            }
            texts = [means(values, peer) for peer, values in to.items()]
            lines.append(f"{direction:9} {label:20} {', '.join(filter(None, texts)) or '-'}")
    return lines


def means(ratios: Sequence[float | None], peer: str) -> str:
    """What the summary says of one peer, over the cases that it ran."""
    values = [value for value in ratios if value is not None]
    if not values:
        return ""
    cases = f"{len(values)} case{'s' if len(values) > 1 else ''}"
    return f"{statistics.geometric_mean(values):.3f} (worst {min(values):.3f}, {cases}) to {peer}"


def grid(arguments: argparse.Namespace) -> list[Case]:
    a, yes_no = arguments, {"no": [False], "yes": [True], "both": [False, True]}
    outer = {"direction": a.direction, "dtype": a.dtype}
    if a.preset is not None:
        return [
            Case(**first, **fields)
            for first in combinations(**outer)
            for fields in PRESETS[a.preset].cases
        ]
    axes = {"window": a.window, "group": a.group, "varlen": yes_no[a.varlen]}
    sizes = {"headdim": a.headdim, "causal": yes_no[a.causal], "seqlen": a.seqlen}
    alone = {
        "shortest": a.shortest,
        "dropout_p": a.dropout,
        "softcap": a.softcap,
        "alibi": a.alibi,
        "deterministic": a.deterministic,
        "tokens": a.tokens,
        "width": a.width,
    }
    return [Case(**fields, **alone) for fields in combinations(**outer, **axes, **sizes)]


def parse(arguments: Sequence[str] | None, device: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--direction",
        nargs="+",
        choices=MATMULS,
        default=["forward", "backward"],
        help="both: one after the other",
    )
    add("--dtype", nargs="+", choices=DTYPES, help="of the tensors")
    add("--headdim", nargs="+", type=int, help="of q, k and v")
    add("--causal", choices=("no", "yes", "both"), default="both", help="masks")
    add("--seqlen", nargs="+", type=int, help="the longest, if varlen")
    add("--tokens", type=int, help="in all: batch = tokens / seqlen")
    add("--width", type=int, help="nheads = width / headdim")
    add("--window", nargs="+", type=int, default=[-1], help="keys seen to the left; -1: all")
    add("--group", nargs="+", type=int, default=[1], help="query heads of a key head")
    add("--varlen", choices=("no", "yes", "both"), default="no", help="packed random lengths")
    add("--shortest", type=int, default=64, help="of the lengths, if varlen")
    add("--dropout", type=float, default=0.0, help="probability")
    add("--softcap", type=float, default=0.0, help="of the scores; 0: none")
    add("--alibi", action="store_true", help="slopes of ALiBi, one a head")
    add("--deterministic", action="store_true", help="gradients")
    add_arguments(parser)
    add("--baseline", default="flash", help="whom the first ratio is to")
    add(
        "--flush-l2", action="store_true", help="time each call with an L2 cache without its inputs"
    )
    add("--rounds", type=int, help="samples of each")
    add("--smoke", action="store_true", help="few cases; what says which is not read")
    add(
        "--preset",
        choices=PRESETS,
        help="cases of a comparison, with its providers, as attention-PRESET: of what says which, "
        "--direction and --dtype alone are read",
    )
    report.add_arguments(parser, "attention")
    parser.set_defaults(**DEFAULTS[device])
    given = parser.parse_args(arguments)
    if given.preset is not None:
        preset = PRESETS[given.preset]
        parser.set_defaults(
            providers=list(preset.providers),
            baseline=preset.baseline,
            output=f"attention-{given.preset}",
        )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = parse(arguments, device)
    if a.replot is not None:
        plots.draw(a.replot, plots.speed)
        return
    cases = SMOKE[device] if a.smoke else grid(a)
    if not all(case.nheads for case in cases):
        raise SystemExit("width / headdim gives fewer heads than a group has")
    providers = chosen_providers(a)
    l2_buffer = larger_than_l2() if a.flush_l2 and device == "cuda" else None
    options = [x for x in OPTIONS if any(c._asdict()[x] != Case._field_defaults[x] for c in cases)]

    def measure_case(case: Case) -> Row:
        return measure(case, providers, device, a.rounds, l2_buffer)

    def label(case: Case) -> str:
        mask = "causal" if case.causal else "full"
        return " ".join(
            [*plots.case_words(case._asdict()), f"d{case.headdim}", mask, f"{case.seqlen}"]
        )

    torch.manual_seed(0)
    print(f"{report.device_name()}, torch {torch.__version__}, {cases[0].tokens} tokens, TFLOP/s")
    rows: list[Row] = []
    stem = a.folder / a.output
    for row in report.record(stem, a, report.with_progress(measure_case, cases, label)):
        report.print_cells(cells(row, list(providers), options, a.baseline), head=not rows)
        rows.append(row)
    ours = ", ".join(dict.fromkeys(row["ours"] for row in rows if row["ours"]))
    print(f"\nspeed of ours ({ours or 'none ran'}), geometric mean of the ratios")
    print(*summary(rows, a.baseline), sep="\n")
    report.print_skipped(rows)
    plots.draw_if_possible(stem.with_suffix(".json"), plots.speed)


if __name__ == "__main__":
    torch.set_num_threads(1)  # CPU times that do not depend on what else the machine does
    main()
