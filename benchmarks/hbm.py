"""Bytes that HBM moves for attention, counted by ncu, beside FlashAttention's IO complexity.

Run as ``python -m benchmarks.hbm`` on a machine with a CUDA GPU and Nsight Compute; ``--help``
lists the options. Prints a table, writes NAME.json, NAME.csv and NAME.png into
``benchmarks/results/<gpu>/``.

Each call starts with an L2 cache that has none of its inputs, and what it leaves there is written
out: after the call a buffer of twice the size of the cache is written, and what that moves alone is
taken off. ncu counts while kernels run: what a memset writes counts where a kernel evicts it.

The formulas count the accesses of the paper's algorithms (Dao et al. 2022, algorithms 0, 1, 3 and
4) to a memory below M elements of SRAM, that of one SM: Theta(N d + N^2) of standard attention,
Theta(N^2 d^2 / M) of FlashAttention. They know no L2 cache: what blocks read again mostly hits it.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import plots, report
from benchmarks.cases import DTYPES, MATMULS, Case, Inputs, make_inputs
from benchmarks.presets import combinations
from benchmarks.providers import Provider, add_arguments, attempt, bind, chosen_providers
from benchmarks.report import OURS, ROOT, Row, figure, rounded
from benchmarks.timing import Call, larger_than_l2

METRICS = {"dram__bytes_read.sum": "read_gb", "dram__bytes_write.sum": "written_gb"}
MARK = "spin_kernel"  # of torch.cuda._sleep: a call begins
SRAM = 228 * 2**10  # bytes of an SM of an H100 or H200


class Launch(NamedTuple):
    """A kernel that ran, and the bytes by metric."""

    kernel: str
    moved: dict[str, float]


def formulas(case: Case, sram: int) -> dict[str, float]:
    """Bytes of all heads: each tensor once, and what the paper's two algorithms access.

    Parameters
    ----------
    case
        Without a mask: the paper's algorithms skip nothing.
    sram
        Bytes of fast memory; the paper's M elements.
    """
    n, d, size = case.seqlen, case.headdim, DTYPES[case.dtype].itemsize
    keys = -(-(sram // size) // (4 * d))  # of a block
    passes = -(-n // keys)  # over all queries
    standard = {"forward": 4 * n * d + 4 * n**2, "backward": 8 * n * d + 7 * n**2}
    flash = {
        "forward": 2 * n * d + passes * (3 * n * d + 4 * n),
        "backward": 4 * n * d + passes * (5 * n * d + 2 * n),
    }
    directions = [case.direction] if case.direction in flash else list(flash)
    heads = case.nheads * len(case.rows)
    by_name = {"formula": flash, "standard_formula": standard}
    counted = {
        name: float(heads * size * sum(elements[each] for each in directions))
        for name, elements in by_name.items()
    }
    return {"least": float(case.bytes), **counted}


def ncu_command(ncu: str, log: Path, program: Sequence[str]) -> list[str]:
    """Count what the program's kernels move between cudaProfilerStart and cudaProfilerStop."""
    options = {
        "--metrics": ",".join(METRICS),
        "--profile-from-start": "off",
        "--cache-control": "none",  # the L2 cache is that of the calls, not emptied between kernels
        "--clock-control": "none",
        "--print-units": "base",
        "--log-file": str(log),
    }
    return [ncu, "--csv", *(text for pair in options.items() for text in pair), *program]


def launches(text: str) -> list[Launch]:
    """The kernels in ncu's CSV: a line for each launch and metric, among other lines.

    Raises
    ------
    RuntimeError
        If ncu ran a kernel more than once (the cache would not be that of the call), or if there
        are no figures.
    """
    if passes := re.search(r"- (?!1 )(\d+) passes", text):
        raise RuntimeError(f"ncu ran each kernel in {passes[1]} passes: one is needed")
    found: dict[str, Launch] = {}
    lines = [line for line in text.splitlines() if line.startswith('"')]
    for entry in csv.DictReader(lines):
        if entry["Metric Name"] not in METRICS:
            continue
        value, unit = entry["Metric Value"], entry["Metric Unit"]
        try:
            moved = float(value.replace(",", ""))
        except ValueError:
            raise RuntimeError(f"ncu: {entry['Metric Name']} is {value!r}") from None
        if unit != "byte":
            raise RuntimeError(f"ncu: {entry['Metric Name']} is in {unit!r}, expected 'byte'")
        launch = found.setdefault(entry["ID"], Launch(entry["Kernel Name"], {}))
        launch.moved[entry["Metric Name"]] = moved
    for launch in found.values():
        if launch.moved.keys() != METRICS.keys():
            raise RuntimeError(
                f"ncu: {launch.kernel} has no {METRICS.keys() - launch.moved.keys()}"
            )
    if not found:
        raise RuntimeError("ncu counted no kernel: " + " ".join(text.split())[-300:])
    return list(found.values())


def segments(found: Sequence[Launch]) -> list[list[Launch]]:
    """The launches of each call, without the mark before them."""
    parts: list[list[Launch]] = []
    for launch in found:
        if MARK in launch.kernel:
            parts.append([])
        elif not parts:
            raise RuntimeError(f"ncu: {launch.kernel} ran before the first mark")
        else:
            parts[-1].append(launch)
    return parts


def counted(called: Sequence[Row], found: Sequence[Launch], sram: int) -> list[Row]:
    """Rows of the record: what was called, with what ncu counted.

    Parameters
    ----------
    called
        As ``call_all`` writes them.
    found
        The launches: first those of a call of nothing, then those of each call.

    Returns
    -------
    list of dict
        The fields of the case; by provider, ``read_gb``, ``written_gb``, ``moved_gb`` (both) and
        ``kernels`` (their number); ``formula_gb``: ``formulas``; ``skipped``: the reason.
    """
    alone, *parts = segments(found)
    if len(parts) != sum(len(row["called"]) for row in called):
        raise RuntimeError(f"ncu counted {len(parts)} calls, not those that were made")
    remaining, rows = iter(parts), []
    for row in called:
        fields = {name: value for name, value in row.items() if name != "called"}
        gb: dict[str, dict[str, float]] = {name: {} for name in (*METRICS.values(), "moved_gb")}
        kernels = {}
        for provider in row["called"]:
            part = next(remaining)
            kernels[provider] = len(part) - len(alone)
            for metric, name in METRICS.items():
                both = sum(launch.moved[metric] for launch in part)
                flush = sum(launch.moved[metric] for launch in alone)
                gb[name][provider] = rounded((both - flush) / 1e9)
            gb["moved_gb"][provider] = rounded(sum(gb[name][provider] for name in METRICS.values()))
        case = Case(**{name: row[name] for name in Case._fields})
        formula_gb = {name: rounded(x / 1e9) for name, x in formulas(case, sram).items()}
        rows.append({**fields, **gb, "kernels": kernels, "formula_gb": formula_gb})
    return rows


def call_all(cases: Sequence[Case], providers: Mapping[str, Provider], path: Path) -> None:
    """Make each call where ncu counts; write what was called, in this order, into ``path``."""
    l2_buffer = larger_than_l2()

    def count(call: Callable[[], Any]) -> None:
        l2_buffer.fill_(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        call()
        l2_buffer.fill_(2)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    def ready(provider: Provider, case: Case, inputs: Inputs) -> Call:
        call = bind(provider, case, inputs)
        call()  # loads the kernels
        return call

    def call_case(case: Case) -> Row:
        inputs, called, skipped = make_inputs(case, "cuda"), [], {}
        for name, provider in providers.items():
            call, why = attempt(ready, provider, case, inputs)
            if call is None:
                skipped[name] = why
            else:
                count(call)
                called.append(name)
            del call  # with the matrices of its backward
        return {**case.described(), "called": called, "skipped": skipped}

    count(lambda: None)
    label = "{0.direction} d{0.headdim} {0.seqlen}".format
    path.write_text(json.dumps(list(report.with_progress(call_case, cases, label))))


def measure(a: argparse.Namespace, arguments: Sequence[str]) -> list[Row]:
    """Run this script again below ncu; return the rows of the record."""
    if shutil.which(a.ncu) is None:
        raise SystemExit(f"no {a.ncu}: Nsight Compute comes with CUDA; --ncu PATH says where it is")
    with tempfile.TemporaryDirectory() as folder:
        log, called = Path(folder) / "ncu.csv", Path(folder) / "called.json"
        program = [sys.executable, "-m", "benchmarks.hbm", *arguments, "--called", str(called)]
        status = subprocess.run(ncu_command(a.ncu, log, program), cwd=ROOT).returncode
        text = log.read_text() if log.exists() else ""
        errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
        if status or errors or not called.exists():
            raise SystemExit(" ".join([f"ncu failed (exit status {status})", *errors])[:500])
        return counted(json.loads(called.read_text()), launches(text), a.sram)


def cells(row: Row) -> dict[str, str]:
    """A line of the table, by column: GB read and written by each provider, then the formulas."""
    moved, formula = row["moved_gb"], row["formula_gb"]
    ours = next((name for name in OURS if name in moved), None)
    saved = moved["math"] / moved[ours] if ours and "math" in moved else None
    names = dict.fromkeys([*moved, *row["skipped"]])
    return {
        "direction": row["direction"],
        **report.size_cells(row),
        **report.head_cells(row),
        **{name: figure(moved.get(name), 2) for name in names},
        **{name.replace("_", " "): figure(gb, 2) for name, gb in formula.items()},
        "math / ours": figure(saved, 1),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser("hbm", __doc__)
    add = parser.add_argument
    directions = ["forward", "backward"]
    add("--direction", nargs="+", choices=MATMULS, default=directions, help="of the calls")
    add("--dtype", choices=DTYPES, default="bf16", help="of the tensors")
    add("--headdim", nargs="+", type=int, default=[64, 128], help="of q, k and v")
    add("--seqlen", nargs="+", type=int, default=[2**n for n in range(9, 15)], help="no mask")
    add("--tokens", type=int, default=65536, help="in all: batch = tokens / seqlen")
    add("--nheads", type=int, default=16, help="of queries, keys and values")
    add("--sram", type=int, default=SRAM, help="bytes of an SM's shared memory, for the formula")
    add("--ncu", default="ncu", metavar="PATH", help="Nsight Compute's command")
    add("--called", type=Path, help=argparse.SUPPRESS)  # below ncu: make the calls
    add_arguments(parser)
    report.add_arguments(parser, "hbm")
    parser.set_defaults(providers=["sm90", "sm80", "flash", "math"], math_gib=100.0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    a = parse(given)
    if a.replot is not None:
        plots.draw(a.replot, plots.hbm)
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.hbm needs a CUDA GPU and torch sees none")
    if a.called is not None:
        axes = {"direction": a.direction, "headdim": a.headdim, "seqlen": a.seqlen}
        same = {"dtype": a.dtype, "causal": False, "tokens": a.tokens}
        cases = [
            Case(**fields, **same, width=a.nheads * fields["headdim"])
            for fields in combinations(**axes)
        ]
        call_all(cases, chosen_providers(a), a.called)
        return
    print(f"{report.device_name()}, torch {torch.__version__}, {a.dtype}, GB read and written")
    rows = measure(a, given)
    stem = a.folder / a.output
    report.print_rows(report.record(stem, a, rows), cells)
    report.print_skipped(rows)
    plots.draw_if_possible(stem.with_suffix(".json"), plots.hbm)


if __name__ == "__main__":
    main()
