"""What the library's own choice of a tile costs: each compiled tile of a forward kernel is timed.

So is each number of parts that the keys of a tile are divided into.

Run as ``python -m benchmarks.tiles`` on a machine with a CUDA GPU; ``--help`` lists the options.
The regret of a shape is the time of the library's choice over that of the fastest tile, less one.
Prints a table, writes NAME.json, with all times, and NAME.csv into ``benchmarks/results/<gpu>/``.

``--fp8`` times the forward in FP8. A call of a level counts with the pass that quantises k and v.
The inputs of ``e4m3`` are quantised before; its tile 1 transposes values itself.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from benchmarks import report
from benchmarks.cases import DTYPES, Case, make_inputs
from benchmarks.presets import BLOCK, PRESETS, random_cases
from benchmarks.providers import Provider, attempt, bind, find_providers, fp8_providers
from benchmarks.report import ROOT, Row, figure, rounded
from benchmarks.timing import Call, Sampler, capture_stream, sampler, time_in_turn
from flash_attn._arguments import FP8_LEVELS
from flash_attn._backends import cuda

AUTO = "auto"  # the library's own choice
MOST_TILES = 32  # of a kernel


def tile_shapes(backend: str, headdim: int, headdim_v: int) -> dict[str, str]:
    """Queries x keys of a plain kernel's tiles by their number, read from the kernels' source."""
    header = {"sm90": "forward_tile.h", "sm80": "forward_config.cuh"}[backend]
    source = re.sub("//.*", "", (ROOT / "csrc" / backend / header).read_text())
    source = source[source.index("ForwardTile forward_tile(") :].replace("default:", "case 256:")
    _, *parts = re.split(r"case (\d+):", source.partition("return {};")[0])
    bodies = {int(least): body for least, body in zip(parts[::2], parts[1::2], strict=True)}
    body = bodies[min(least for least in bodies if least >= headdim)]
    narrow, _, same = body.partition("} else {")  # the head dim of v first, where it matters
    body = same if same and headdim == headdim_v else narrow
    found = re.findall(r"choice == (\d)[^{]*\{(\d+), (\d+)", body)
    return {number: f"{queries}x{keys}" for number, queries, keys in found}


@contextmanager
def forced(
    context: Callable[[], AbstractContextManager[object]], tile: int, splits: int
) -> Iterator[None]:
    """``context``, in which kernels run one of their tiles and split the keys so often."""
    with (
        context(),
        cuda.changed_setting("tile", tile),
        cuda.changed_setting("num_splits", splits),
    ):
        yield


def candidates(call: Call, splits: Sequence[int]) -> dict[str, Call]:
    """The call as it is, and with each tile that its kernel has: "2", or "2x4" with 4 splits.

    Raises
    ------
    RuntimeError
        If the kernel does not say that it has no more tiles.
    """
    found = {AUTO: call}
    for tile in range(MOST_TILES):
        for parts in splits:
            candidate = Call(call.run, partial(forced, call.context, tile, parts))
            try:
                candidate()
            except ValueError as error:
                if str(error).startswith("tile:"):
                    return found
                if not str(error).startswith("num_splits:"):
                    raise
            else:
                found[f"{tile}x{parts}".removesuffix("x1")] = candidate
    raise RuntimeError(f"the kernel has {MOST_TILES} tiles, or does not know the setting")


def measure(
    case: Case, provider: Provider, splits: Sequence[int], rounds: int, sample_ms: float
) -> Row:
    """Time the candidates in turn, captured into CUDA graphs.

    Returns
    -------
    dict
        The fields of the case; by candidate ``us``, and ``skipped``: why there is none; ``best``:
        the fastest that is forced; ``regret``.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph = device == "cuda"

    def samplers() -> dict[str, Sampler]:
        call = bind(provider, case, make_inputs(case, device))
        found = candidates(call, splits)
        return {
            name: sampler(each, device, graph, sample_ms=sample_ms) for name, each in found.items()
        }

    with capture_stream() if graph else nullcontext():
        ready, why = attempt(samplers)
        ms = time_in_turn(ready, rounds) if ready else {}
    best = min((name for name in ms if name != AUTO), key=lambda name: ms[name], default=None)
    return {
        **case.described(),
        "best": best,
        "regret": round(ms[AUTO] / ms[best] - 1, 4) if best else None,
        "us": {name: rounded(time * 1e3) for name, time in ms.items()},
        "skipped": {} if ready else {AUTO: why},
    }


def cells(row: Row) -> dict[str, str]:
    """A line of the table, by column; the times are in microseconds."""
    us, best = row["us"], row["best"]
    return {
        **report.size_cells(row),
        **report.head_cells(row),
        "window": str(row["window"]),
        "varlen": "yes" if row["varlen"] else "no",
        AUTO: figure(us.get(AUTO)),
        "best": figure(us.get(best)),
        "tile": best or "-",
        "regret": percent(row["regret"]),
        "all": ", ".join(f"{name} {figure(time)}" for name, time in us.items()),
    }


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def summary(rows: Sequence[Row]) -> list[str]:
    """Mean and worst regret: of all shapes, then by head dim."""
    groups: dict[str, list[Row]] = {"all": []}
    for row in sorted(rows, key=lambda row: (row["headdim"], row["headdim_v"])):
        if row["regret"] is not None:
            groups["all"].append(row)
            groups.setdefault(f"head dim {report.size_cells(row)['headdim']}", []).append(row)
    return [
        f"{label:18} mean {percent(statistics.mean(row['regret'] for row in group))}, "
        f"worst {percent(max(row['regret'] for row in group))}, {len(group)} shapes"
        for label, group in groups.items()
        if group
    ]


def sweep(arguments: argparse.Namespace) -> list[Case]:
    """The shapes, each once."""
    a = arguments
    fields = [each for name in a.presets for each in PRESETS[name].cases]
    fields += random_cases(a.random, a.seed)
    return list(dict.fromkeys(Case("forward", a.dtype, **each) for each in fields))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser("tiles", __doc__)
    add = parser.add_argument
    add("--backend", choices=("sm90", "sm80"), default="sm90", help="whose tiles")
    add("--dtype", choices=DTYPES, default="bf16", help="of the tensors")
    add("--fp8", choices=(*FP8_LEVELS, "e4m3"), help="the forward in FP8, at this level")
    presets = ["models", "lengths", "short"]
    add("--presets", nargs="*", choices=PRESETS, default=presets, help="of benchmarks.attention")
    add("--random", type=int, default=50, metavar="N", help="random small shapes more")
    add("--seed", type=int, default=0, help="of the random shapes")
    add("--splits", nargs="+", type=int, default=[1, 2, 4, 8], help="of the keys of a tile")
    add(
        "--split-below",
        type=int,
        default=132,
        metavar="N",
        help=f"split the keys where there are fewer blocks of {BLOCK} queries",
    )
    add("--rounds", type=int, default=5, help="samples of each")
    add("--sample-ms", type=float, default=1.0, help="least length of a sample")
    report.add_arguments(parser, "tiles", plots=False)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    a = parse(arguments)
    provider = fp8_providers(a.backend)[a.fp8] if a.fp8 else find_providers()[a.backend]

    def measure_case(case: Case) -> Row:
        blocks = case.nheads * sum(-(-queries // BLOCK) for queries, _ in case.rows)
        splits = a.splits if blocks < a.split_below else [1]
        row = measure(case, provider, splits, a.rounds, a.sample_ms)
        shapes = {} if a.fp8 else tile_shapes(a.backend, *case.headdims)
        names = [name for name in row["us"] if name != AUTO]
        return {**row, "shapes": {name: shapes.get(name.split("x")[0], "") for name in names}}

    def label(case: Case) -> str:
        return " ".join(report.size_cells(case.described()).values())

    operands = a.fp8 or a.dtype
    print(f"{report.device_name()}, torch {torch.__version__}, {a.backend}, {operands}, us")
    print(f"random shapes of --seed {a.seed}")
    measured = report.with_progress(measure_case, sweep(a), label)
    rows = report.print_rows(report.record(a.folder / a.output, a, measured), cells)
    print("\nregret of the library's choice")
    print(*summary(rows), sep="\n")
    report.print_skipped(rows)


if __name__ == "__main__":
    main()
