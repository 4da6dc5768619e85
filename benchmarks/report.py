"""What benchmarks write: records below ``benchmarks/results/<gpu>/``, and progress on stderr.

Needs no installed package to be imported.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
OURS = ("sm90", "sm80", "tiled")  # the backends of this library, best first

# One case: plain values, dicts of figures by provider, and ``providers``, their names.
Row = dict[str, Any]
T = TypeVar("T")


def results_folder(device_name: str) -> Path:
    """Where the records of a GPU lie: "NVIDIA H200" gives ``benchmarks/results/nvidia-h200``."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / slug


def device_name() -> str:
    """Name of the current GPU; "CPU" without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def versions() -> dict[str, str | int | None]:
    """What the figures depend on; ``commit`` is None where the tree came without its history."""
    import torch

    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    nvcc = output_of("nvcc", "--version")
    return {
        "driver": driver and driver.splitlines()[0],
        "nvcc": nvcc and nvcc.splitlines()[-1],
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=12"),
    }


def output_of(*command: str) -> str | None:
    """What a command prints, stripped; None where it is missing or fails."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def parser(
    name: str,
    description: str | None,
    formatter: type[argparse.HelpFormatter] = argparse.ArgumentDefaultsHelpFormatter,
) -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks.NAME``, without arguments."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description, formatter_class=formatter
    )


def add_arguments(parser: argparse.ArgumentParser, name: str, plots: bool = True) -> None:
    """Add what says where to write."""
    folder = results_folder(device_name())
    add = parser.add_argument
    add("--output", default=name, metavar="NAME", help="of the files")
    add("--folder", type=Path, default=folder, help="where they are written")
    if plots:
        add("--replot", type=Path, metavar="JSON", help="measure nothing: draw this record again")


def record(stem: Path, arguments: argparse.Namespace, rows: Iterable[Row]) -> Iterator[Row]:
    """Pass rows on; those so far are in ``stem``.json and .csv, also if the run is cut short."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    given = {k: v for k, v in vars(arguments).items() if k not in ("output", "folder", "replot")}
    environment = {"device": device_name(), "date": today(), **versions(), "arguments": given}
    written: list[Row] = []
    for row in rows:
        written.append(row)
        text = json.dumps({"environment": environment, "rows": written}, indent=2)
        stem.with_suffix(".json").write_text(text + "\n")
        write_csv(stem.with_suffix(".csv"), written)
        yield row


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write one line for each case and provider."""
    lines = []
    for row in rows:
        values = {name: x for name, x in row.items() if not isinstance(x, (dict, list))}
        figures = {name: value for name, value in row.items() if isinstance(value, dict)}
        for provider in dict.fromkeys(
            key for by_provider in figures.values() for key in by_provider
        ):
            of_provider = {name: figures[name].get(provider, "") for name in figures}
            lines.append({**values, "provider": provider, **of_provider})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0] if lines else [])
        writer.writeheader()
        writer.writerows(lines)


def bar(done: int, total: int) -> str:
    return f"[{'#' * (20 * done // total):.<20}] {done}/{total}"


def show(line: str) -> None:
    """Print on stderr; on a terminal in place of the line before."""
    start, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    print(f"{start}{line}", end=end, file=sys.stderr, flush=True)


def with_progress(
    function: Callable[[T], Row], items: Sequence[T], label: Callable[[T], str]
) -> Iterator[Row]:
    """Yield the function's rows; a bar on stderr, or a line each where that is no terminal."""
    for done, item in enumerate(items):
        show(f"{bar(done, len(items))}  {label(item)}")
        row = function(item)
        if sys.stderr.isatty():
            show("")
        yield row


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def figure(value: float | None, decimals: int = 1) -> str:
    """The number, a small one with three digits; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" if value >= 10 or decimals > 1 else f"{value:.3g}"


def size_cells(row: Row) -> dict[str, str]:
    """What a case is like, by column."""
    return {
        "headdim": f"{row['headdim']}/{row['headdim_v']}".removesuffix("/0"),
        "causal": "yes" if row["causal"] else "no",
        "seqlen": f"{row['seqlen']}x{row['keys']}".removesuffix("x0"),
    }


def head_cells(row: Row) -> dict[str, str]:
    return {"batch": str(row["batch"]), "heads": f"{row['nheads']}/{row['nheads_kv']}"}


def print_cells(cells: dict[str, str], head: bool) -> None:
    """Print one line of a table, after its header where ``head``."""
    for texts in [list(cells), list(cells.values())] if head else [list(cells.values())]:
        line = (text.rjust(max(len(name), 7)) for name, text in zip(cells, texts, strict=True))
        print(*line, sep="  ", flush=True)


def print_rows(rows: Iterable[Row], cells: Callable[[Row], dict[str, str]]) -> list[Row]:
    """Print each row as it comes, a header where the columns change; return them all."""
    printed: list[Row] = []
    columns: list[str] = []
    for row in rows:
        line = cells(row)
        print_cells(line, head=list(line) != columns)
        columns = list(line)
        printed.append(row)
    return printed


def skipped_lines(rows: Iterable[Row]) -> list[str]:
    """Once each reason for which a provider was skipped."""
    reasons = Counter(pair for row in rows for pair in row["skipped"].items())
    return [
        f"skipped {provider} in {count} cases: {reason}"
        for (provider, reason), count in reasons.items()
    ]


def print_skipped(rows: Iterable[Row]) -> None:
    for line in skipped_lines(rows):
        print(line)
