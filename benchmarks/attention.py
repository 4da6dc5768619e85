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
        "providers": ["sm80", "tiled", "math", "efficient", "flash", "cudnn"],
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
SMOKE_PROVIDERS = ("sm80", "flash", "cudnn")  # of gpu_check
OPTIONS = ("window", "group", "varlen", "dropout_p", "deterministic")


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
        best backend of this library that ran) over that of each peer, and ``skipped``: the reason
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
            if ours is not None and name not in OURS
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
        "to best peer": figure(min(ratio.values(), default=None), 2),
    }


def figure(value: float | None, decimals: int = 1) -> str:
    """The number, a small speed with three digits; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" if value >= 10 or decimals > 1 else f"{value:.3g}"


def summary(rows: Sequence[Row], baseline: str) -> list[str]:
    """Geometric mean and worst of the ratios, by direction and head dim."""
    lines = []
    headdims = dict.fromkeys(row["headdim"] for row in rows)
    for direction in dict.fromkeys(row["direction"] for row in rows):
        for headdim in (None, *headdims) if len(headdims) > 1 else (None,):
            ratios = [
                row["ratio"]
                for row in rows
                if row["direction"] == direction and headdim in (None, row["headdim"])
            ]
            to = {
                baseline: [ratio[baseline] for ratio in ratios if baseline in ratio],
                "the best peer": [min(ratio.values()) for ratio in ratios if ratio],
            }
            texts = [
                f"{statistics.geometric_mean(values):.2f} (worst {min(values):.2f}) to {peer}"
                for peer, values in to.items()
                if values
            ]
            label = "all head dims" if headdim is None else f"head dim {headdim}"
            lines.append(f"{direction:9} {label:14} {', '.join(texts) or '-'}")
    return lines


def grid(arguments: argparse.Namespace) -> list[Case]:
    a, yes_no = arguments, {"no": [False], "yes": [True], "both": [False, True]}
    axes = (a.direction, a.dtype, a.window, a.group, yes_no[a.varlen], a.headdim)
    return [
        Case(
            direction=direction,
            dtype=dtype,
            headdim=headdim,
            causal=causal,
            seqlen=seqlen,
            window=window,
            group=group,
            varlen=varlen,
            dropout_p=a.dropout,
            deterministic=a.deterministic,
            tokens=a.tokens,
            width=a.width,
        )
        for direction, dtype, window, group, varlen, headdim, causal, seqlen in itertools.product(
            *axes, yes_no[a.causal], a.seqlen
        )
    ]


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
    add("--dropout", type=float, default=0.0, help="probability")
    add("--deterministic", action="store_true", help="gradients")
    add_arguments(parser)
    add("--baseline", default="flash", help="whom the first ratio is to")
    add(
        "--flush-l2", action="store_true", help="time each call with an L2 cache without its inputs"
    )
    add("--rounds", type=int, help="samples of each")
    add("--smoke", action="store_true", help="few cases; what says which is not read")
    report.add_arguments(parser, "attention")
    parser.set_defaults(**DEFAULTS[device])
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
