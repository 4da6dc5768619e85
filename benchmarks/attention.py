"""Speed of attention, in TFLOP/s and GB/s, beside its peers: each combination of the options.

Run as ``python -m benchmarks.attention``; ``--help`` lists the options. Prints a table, writes
NAME.json, NAME.csv and a NAME-*.png for each direction into ``benchmarks/results/<gpu>/``. Without
a GPU the sizes are small.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from benchmarks import plots, report
from benchmarks.cases import DTYPES, MATMULS, Case, Inputs, make_inputs
from benchmarks.presets import PRESETS, Preset, combinations, random_cases
from benchmarks.providers import (
    Provider,
    add_arguments,
    attempt,
    bind,
    chosen_providers,
    recorded_backends,
)
from benchmarks.report import OURS, Row, figure, rounded
from benchmarks.timing import Sampler, capture_stream, larger_than_l2, sampler, time_in_turn

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
    "log_uniform",
    "dropout_p",
    "softcap",
    "alibi",
    "deterministic",
    "queries",
    "page_size",
)
SHORT_MS = 0.03  # about the host time of a call on a slow host
MANY = 20  # cases, of which a percentile says something
SETTLING_BYTES = 1e10  # for each so many of a case it runs a second before its samples count
# GB/s that the maker of the GPU gives for its memory.
BANDWIDTHS = {"NVIDIA H200": 4800.0, "NVIDIA H100 80GB HBM3": 3350.0}


def measure(
    case: Case,
    providers: Mapping[str, Provider],
    device: str = "cuda",
    rounds: int = 10,
    timing: str = "launch",
    l2_buffer: Tensor | None = None,
) -> Row:
    """Time the providers in turn; ``timing`` is "launch" or "graph".

    Returns
    -------
    dict
        The fields of the case and, by provider, ``ms``, ``tflops``, ``gbs`` (GB/s), ``backend``
        (which ran, of this library), ``ratio``: the speed of ours (the best backend of this library
        that ran) over that of each other, and ``skipped``: the reason. A backward that another
        backend runs than the one asked for counts as that one's. ``providers`` are the names so
        found, in order.
    """
    graph = timing == "graph" and device == "cuda"
    samplers: dict[str, Sampler] = {}
    backends, skipped, names = {}, {}, []
    with capture_stream() if graph else nullcontext():
        inputs = make_inputs(case, device)
        for name, provider in providers.items():
            ready, why = attempt(prepare, provider, case, inputs, device, graph, l2_buffer)
            if ready is None:
                skipped[name] = why
            else:
                sample, chosen = ready
                if name in OURS and case.direction == "both":
                    backends[name] = "+".join(dict.fromkeys(chosen.values()))
                elif name in OURS:
                    name = chosen.get(case.direction, name)
                    backends[name] = name
                samplers[name] = sample
            names.append(name)
        # Behind the making of inputs of gigabytes the clock of a GPU is low for about a second.
        settle_s = case.bytes / SETTLING_BYTES if device == "cuda" else 0.0
        ms = time_in_turn(samplers, rounds, settle_s) if samplers else {}
    ours = next((name for name in OURS if name in ms), None)
    return {
        **case.described(),
        "timing": "graph" if graph else "launch",
        "l2": "warm" if l2_buffer is None else "cold",
        "providers": list(dict.fromkeys(names)),
        "ours": ours,
        "backend": backends,
        "ms": {name: rounded(time) for name, time in ms.items()},
        "tflops": {name: rounded(case.flops / time / 1e9) for name, time in ms.items()},
        "gbs": {name: rounded(case.bytes / time / 1e6) for name, time in ms.items()},
        "ratio": {
            name: round(time / ms[ours], 3)
            for name, time in ms.items()
            if ours is not None and name != ours
        },
        "skipped": skipped,
    }


def prepare(
    provider: Provider,
    case: Case,
    inputs: Inputs,
    device: str,
    graph: bool,
    l2_buffer: Tensor | None,
) -> tuple[Sampler, dict[str, str]]:
    """Return what times the call, once it has run, and the backends of this library that ran it."""
    with recorded_backends() as chosen:
        call = bind(provider, case, inputs)
        call()
    return sampler(call, device, graph, l2_buffer), chosen


def cells(
    row: Row,
    options: Sequence[str],
    baseline: str,
    bandwidth: float | None,
    peers: Sequence[str],
) -> dict[str, str]:
    """A line of the table, by column: TFLOP/s of all and GB/s of ours; of a KV cache GB/s first."""
    ours, decodes = row["ours"], row["queries"] > 0
    speeds, other = ("gbs", "tflops") if decodes else ("tflops", "gbs")
    ms = row["ms"].get(ours)
    more = {"us": figure(ms and ms * 1e3)}
    if decodes and bandwidth is not None:
        gbs = row["gbs"].get(ours)
        more[f"% of {bandwidth:g}"] = figure(gbs and 100 * gbs / bandwidth)
    return {
        "direction": row["direction"],
        "dtype": row["dtype"],
        **report.size_cells(row),
        **(report.head_cells(row) if decodes or row["model"] else {}),
        **{option: str(row[option]) for option in options},
        **{name: figure(row[speeds].get(name)) for name in row["providers"]},
        **(more if decodes else {}),
        "TFLOP/s" if decodes else "GB/s": figure(row[other].get(ours)),
        f"to {baseline}": figure(row["ratio"].get(baseline), 2),
        "to best peer": figure(to_best_peer(row["ratio"], peers), 2),
        **({"model": row["model"]} if row["model"] else {}),
    }


def to_best_peer(ratio: Mapping[str, float], peers: Sequence[str] = ()) -> float | None:
    """The least of the ratios to ``peers``, or else to all others; None where none of them ran."""
    others = peers or [name for name in ratio if name not in OURS]
    return min((ratio[name] for name in others if name in ratio), default=None)


def summary(rows: Sequence[Row], baseline: str, peers: Sequence[str] = ()) -> list[str]:
    """Geometric mean and worst of the ratios: by direction, then by head dim and by options.

    Of models by direction alone.
    """
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
            groups |= more if len(more) > 1 and not rows[0]["model"] else {}
        for label, group in groups.items():
            to = {
                baseline: [row["ratio"].get(baseline) for row in group],
                "the best peer": [to_best_peer(row["ratio"], peers) for row in group],
            }
            texts = [means(values, peer) for peer, values in to.items()]
            lines.append(f"{direction:9} {label:20} {', '.join(filter(None, texts)) or '-'}")
        times = [row["ms"] for row in chosen if row["ours"] != "sm80"]
        older = [ms["flash"] / ms["sm80"] for ms in times if {"flash", "sm80"} <= ms.keys()]
        if older:
            lines.append(f"{direction:9} {'sm80':20} {means(older, 'flash')}")
    return lines


def means(ratios: Sequence[float | None], peer: str) -> str:
    """What the summary says of one peer, over the cases that it ran."""
    values = [value for value in ratios if value is not None]
    if not values:
        return ""
    cases = f"{len(values)} case{'s' if len(values) > 1 else ''}"
    if len(values) >= MANY:
        percentile = statistics.quantiles(values, n=20, method="inclusive")[0]
        cases = f"5th percentile {percentile:.3f}, {cases}"
    return f"{statistics.geometric_mean(values):.3f} (worst {min(values):.3f}, {cases}) to {peer}"


def grid(arguments: argparse.Namespace) -> list[Case]:
    a, yes_no = arguments, {"no": [False], "yes": [True], "both": [False, True]}
    outer = {"direction": a.direction, "dtype": a.dtype}
    if found := named_preset(a):
        return [
            Case(**first, **fields) for first in combinations(**outer) for fields in found[1].cases
        ]
    axes = {"window": a.window, "group": a.group, "varlen": yes_no[a.varlen]}
    sizes = {"headdim": a.headdim, "causal": yes_no[a.causal], "seqlen": a.seqlen}
    alone = {
        "shortest": a.shortest,
        "log_uniform": a.log_uniform,
        "dropout_p": a.dropout,
        "softcap": a.softcap,
        "alibi": a.alibi,
        "deterministic": a.deterministic,
        "tokens": a.tokens,
        "width": a.width,
        "queries": a.queries,
        "page_size": a.page_size,
    }
    return [Case(**fields, **alone) for fields in combinations(**outer, **axes, **sizes)]


def named_preset(arguments: argparse.Namespace) -> tuple[str, Preset] | None:
    """The name and the preset that the options choose."""
    a = arguments
    if a.random:
        return "random", PRESETS["models"]._replace(cases=random_cases(a.random, a.seed))
    return (a.preset, PRESETS[a.preset]) if a.preset else None


def parse(arguments: Sequence[str] | None, device: str) -> argparse.Namespace:
    parser = report.parser("attention", __doc__)
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
    add("--log-uniform", action="store_true", help="many short lengths and few long, if varlen")
    add("--dropout", type=float, default=0.0, help="probability")
    add("--softcap", type=float, default=0.0, help="of the scores; 0: none")
    add("--alibi", action="store_true", help="slopes of ALiBi, one a head")
    add("--deterministic", action="store_true", help="gradients")
    add("--queries", type=int, default=0, help="a sequence, of a KV cache of seqlen keys; 0: none")
    add("--page-size", type=int, default=0, help="of the KV cache; 0: no pages")
    add_arguments(parser)
    add("--baseline", default="flash", help="whom the first ratio is to")
    add("--peers", nargs="+", default=[], help="whom the best peer is of; none: all others")
    add(
        "--timing",
        choices=("launch", "graph"),
        default="launch",
        help="launch: calls one after the other; graph: captured into a CUDA graph, for calls "
        "shorter than their host time",
    )
    add(
        "--flush-l2",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="time each call with an L2 cache without its inputs",
    )
    bandwidth = BANDWIDTHS.get(report.device_name())
    add("--bandwidth", type=float, default=bandwidth, help="GB/s of the memory, to compare with")
    add("--rounds", type=int, help="samples of each")
    add("--smoke", action="store_true", help="few cases; what says which is not read")
    named = parser.add_mutually_exclusive_group()
    named.add_argument(
        "--preset",
        choices=PRESETS,
        help="cases of a comparison, with its providers and timing, as attention-PRESET: of what "
        "says which cases, --direction and --dtype alone are read",
    )
    named.add_argument(
        "--random",
        type=int,
        metavar="N",
        help="N random small cases, as attention-random; the rest is as for the preset models",
    )
    add("--seed", type=int, default=random.randrange(2**32), help="of the random cases")
    report.add_arguments(parser, "attention")
    parser.set_defaults(**DEFAULTS[device])
    given = parser.parse_args(arguments)
    if given.log_uniform and given.shortest < 1:
        parser.error(f"--shortest: got {given.shortest}; with --log-uniform at least 1")
    if found := named_preset(given):
        name, preset = found
        parser.set_defaults(
            providers=list(preset.providers),
            baseline=preset.baseline,
            peers=list(preset.peers),
            output=f"attention-{name}",
            **preset.others,
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
        return measure(case, providers, device, a.rounds, a.timing, l2_buffer)

    def label(case: Case) -> str:
        mask = "causal" if case.causal else "full"
        words = filter(None, [*plots.case_words(case._asdict()), case.model])
        return " ".join([*words, f"d{case.headdim}", mask, f"{case.seqlen}"])

    def line(row: Row) -> dict[str, str]:
        return cells(row, options, a.baseline, a.bandwidth, a.peers)

    stem = a.folder / a.output
    measured = report.record(stem, a, report.with_progress(measure_case, cases, label))
    sizes = "" if cases[0].queries or cases[0].model else f"{cases[0].tokens} tokens, "
    unit = "GB/s" if cases[0].queries else "TFLOP/s"
    times = f"calls in a {'CUDA graph' if a.timing == 'graph' and device == 'cuda' else 'row'}"
    l2 = "warm" if l2_buffer is None else "cold"
    print(f"{report.device_name()}, torch {torch.__version__}, {sizes}{unit}, {times}, L2 {l2}")
    if a.random:
        print(f"random cases of --seed {a.seed}")
    rows = report.print_rows(measured, line)
    ours = ", ".join(dict.fromkeys(row["ours"] for row in rows if row["ours"]))
    print(f"\nspeed of ours ({ours or 'none ran'}), geometric mean of the ratios")
    print(*summary(rows, a.baseline, a.peers), sep="\n")
    report.print_skipped(rows)
    launched = [row for row in rows if device == "cuda" and row["timing"] == "launch"]
    if any(ms < SHORT_MS for row in launched for ms in row["ms"].values()):
        print(f"calls below {SHORT_MS} ms may be the host's time: --timing graph has the GPU's")
    plots.draw_if_possible(stem.with_suffix(".json"), plots.speed)


if __name__ == "__main__":
    torch.set_num_threads(1)  # CPU times that do not depend on what else the machine does
    main()
