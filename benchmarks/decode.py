"""Attention to KV caches, in microseconds and TB/s, beside its peers: decoding and chunked prefill.

Run as ``python -m benchmarks.decode``; ``--grid`` chooses among the grids. Prints a table for each
and writes decode-GRID.json, .csv and .png into ``benchmarks/results/<gpu>/``. Calls are captured
into CUDA graphs, and each finds none of its inputs in the L2 cache. Without a GPU caches are small.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import plots, report
from benchmarks.attention import measure, to_best_peer
from benchmarks.cases import DTYPES, Case
from benchmarks.presets import combinations, decoding
from benchmarks.providers import add_arguments, chosen_providers
from benchmarks.report import Row, figure
from benchmarks.timing import larger_than_l2


class Grid(NamedTuple):
    cases: list[dict[str, Any]]  # fields but direction and dtype
    axis: str  # of the plots: of plots.cache_axes
    unit: str = "TB/s"


MOST_ROWS = 2**26  # of all caches and heads of a case: 32 GiB in bf16 with heads of 128


def grids(k: int) -> dict[str, Grid]:
    """The grids by name, for caches of so many tokens where the names of sizes have 1024."""

    def each(
        batches: Sequence[int],
        lengths: Sequence[int],
        heads: Sequence[tuple[int, int]] = ((32, 8),),
        **axes: Sequence[Any],
    ) -> list[dict[str, Any]]:
        return [
            decoding(b, n * k, *pair, **fields)
            for pair in heads
            for b in batches
            for n in lengths
            for fields in combinations(**axes)
            if b * n * 1024 * pair[1] <= MOST_ROWS
        ]

    many_heads = ((32, 32), (32, 8), (64, 8), (16, 1))
    return {
        "context": Grid(each((1, 4, 16, 64, 256), (1, 4, 16, 64, 128)), "seqlen"),
        "heads": Grid(each((1, 16, 64), (1, 8, 64), many_heads), "heads"),
        "pages": Grid(each((1, 16), [8], page_size=(0, 1, 16, 64, 256)), "page_size"),
        "queries": Grid(each((1, 16), [8], ((32, 8), (16, 1)), queries=(1, 4, 8)), "queries"),
        "chunks": Grid(
            each((1, 4), (2, 8, 32, 64), queries=[n * k // 1024 for n in (256, 512, 2048)]),
            "seqlen",
            "TFLOP/s",
        ),
        "mixed": Grid(
            each([56], [8], prefills=[8], prefill=[2 * k], page_size=(16, 64, 256)),
            "page_size",
            "TFLOP/s",
        ),
        "append": Grid(each((1, 64), (1, 8), page_size=(0, 16), append=(False, True)), "append"),
        "fp8": Grid(each((16, 64), (8, 64), fp8_cache=(False, True)), "fp8_cache"),
        "fp8-chunks": Grid(
            each(
                [1],
                (8, 32),
                queries=[n * k // 1024 for n in (128, 512, 2048)],
                page_size=(0, 64),
                fp8_cache=(False, True),
            ),
            "fp8_cache",
            "TFLOP/s",
        ),
    }


def cells(row: Row, before: Row | None, baseline: str) -> dict[str, str]:
    """A line of the table, by column: microseconds and speed of each provider."""
    ms, speed, ours = row["ms"], plots.cache_speeds(row), row["ours"]
    both = {
        name: f"{figure(ms[name] * 1e3)} {figure(speed[name], 2)}" if name in ms else "-"
        for name in row["providers"]
    }
    added: dict[str, str] = {}
    # Each case follows the same one without an append, or with a cache in 16 bits.
    changed = row["append"] or row["fp8_cache"]
    same = before["ms"].get(ours) if changed and before is not None and ours in ms else None
    if row["grid"] == "append":
        added = {"append us": figure(same and (ms[ours] - same) * 1e3, 2)}
    if row["grid"].startswith("fp8"):
        faster = same and same / ms[ours]
        added = {"cache": "e4m3" if row["fp8_cache"] else "16 bits", "faster": figure(faster, 2)}
    return {
        **report.head_cells(row),
        **{name: str(row[name]) for name in ("seqlen", "queries", "page_size")},
        **({"prefills": f"{row['prefills']}x{row['prefill']}"} if row["prefills"] else {}),
        **added,
        **{name: text.rjust(12) for name, text in both.items()},
        f"to {baseline}": figure(row["ratio"].get(baseline), 2),
        "to best peer": figure(to_best_peer(row["ratio"]), 2),
    }


def parse(arguments: Sequence[str] | None, on_gpu: bool) -> argparse.Namespace:
    names = list(grids(1024))
    parser = report.parser("decode", __doc__)
    add = parser.add_argument
    add("--grid", nargs="+", choices=names, default=names, help="what to measure")
    add("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32", help="of the tensors")
    add("--rounds", type=int, default=10 if on_gpu else 1, help="samples of each")
    add("--baseline", default="fa3", help="whom the first ratio is to")
    add("--flush-l2", action=argparse.BooleanOptionalAction, default=True, help="cold caches")
    add_arguments(parser)
    report.add_arguments(parser, "decode")
    everyone = ["sm90", "sm80", "fa3", "flashinfer", "cudnn", "flash"]
    parser.set_defaults(providers=everyone if on_gpu else ["tiled", "flash"], math_gib=4.0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    a = parse(arguments, on_gpu)
    if a.replot is not None:
        plots.draw(a.replot, plots.caches)
        return
    device, timing = ("cuda", "graph") if on_gpu else ("cpu", "launch")
    providers = chosen_providers(a)
    l2_buffer = larger_than_l2() if a.flush_l2 and on_gpu else None
    l2 = "warm" if l2_buffer is None else "cold"
    for name in a.grid:
        grid = grids(1024 if on_gpu else 16)[name]

        def measure_case(fields: dict[str, Any], name: str = name, grid: Grid = grid) -> Row:
            case = Case("forward", a.dtype, **fields)
            row = measure(case, providers, device, a.rounds, timing, l2_buffer)
            return {**row, "grid": name, "axis": grid.axis, "unit": grid.unit}

        def label(fields: dict[str, Any], name: str = name) -> str:
            described = Case("forward", a.dtype, **fields).described()
            return " ".join([f"{name}:", *plots.cache_axes(described).values()])

        stem = a.folder / f"{a.output}-{name}"
        print(f"\n{name} on {report.device_name()}, {a.dtype}: us and {grid.unit}, L2 {l2}")
        rows: list[Row] = []
        columns: list[str] = []
        for row in report.record(stem, a, report.with_progress(measure_case, grid.cases, label)):
            line = cells(row, rows[-1] if rows else None, a.baseline)
            report.print_cells(line, head=list(line) != columns)
            columns = list(line)
            rows.append(row)
        report.print_skipped(rows)
        plots.draw_if_possible(stem.with_suffix(".json"), plots.caches)


if __name__ == "__main__":
    torch.set_num_threads(1)  # CPU times that do not depend on what else the machine does
    main()
