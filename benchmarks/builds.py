"""Speed of builds of this library beside each other, each in a process of its own.

Run as ``python -m benchmarks.builds --build BEFORE=FOLDER AFTER=FOLDER``, where a FOLDER holds a
built ``flash_attn``: a checkout or an unpacked wheel. What says which cases, ``--dtype``,
``--rounds`` and ``--timing`` are options of ``benchmarks.attention``.

Of each case every build times one sample after the other, in random order. A ratio is the median of
those within a round, so that neither clocks nor heat favour a build.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import attention, report
from benchmarks.cases import Case, make_inputs
from benchmarks.providers import attempt, find_providers
from benchmarks.report import OURS, ROOT, Row, figure
from benchmarks.timing import Sampler, capture_stream

DEFAULT_BACKENDS = {"cuda": "sm90", "cpu": "tiled"}
# The package comes from the build's folder, the benchmarks from this one.
SERVE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import flash_attn; "
    "sys.path.insert(0, sys.argv[2]); from benchmarks.builds import serve; serve()"
)


class Work(NamedTuple):
    """What a process is to time."""

    provider: str  # of find_providers
    graph: bool
    case: dict[str, Any]  # fields of Case


class Build:
    """A process that times calls of one build."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", SERVE, str(folder), str(ROOT)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes its stdin, which ends it

    def ask(self, request: object) -> Any:
        """Send a request and return the answer; see ``serve``."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass
        if not (answer := stdout.readline()):
            raise RuntimeError(f"a build ended with status {self.process.wait()}")
        return json.loads(answer)


def serve() -> None:
    """Answer the requests on stdin.

    The first of a case is a ``Work``, answered by why it cannot run or, where it can, "". Then
    "sample" is answered by milliseconds.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what others print is no answer
    torch.set_num_threads(1)
    sample: Sampler | None = None
    answer: str | float
    for line in sys.stdin:
        request = json.loads(line)
        if request == "sample":
            assert sample is not None
            answer = sample()
        else:
            sample = None  # frees what the case before holds
            sample, answer = attempt(prepare, Work(*request))
        print(json.dumps(answer), file=answers, flush=True)


def prepare(work: Work) -> Sampler:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = Case(**work.case)
    with capture_stream() if work.graph else nullcontext():
        inputs = make_inputs(case, device)
        provider = find_providers()[work.provider]
        sample, chosen = attention.prepare(provider, case, inputs, device, work.graph, None)
    if others := {*chosen.values()} - {work.provider}:
        raise NotImplementedError(f"{', '.join(others)} would run it")
    return sample


def measure(builds: Mapping[str, Build], work: Work, rounds: int) -> Row:
    """Ask the builds in turn.

    Returns
    -------
    dict
        The fields of the case and, by build, ``samples`` (milliseconds, one a round) and
        ``skipped``: the reason.
    """
    said = {name: build.ask(work) for name, build in builds.items()}
    samples: dict[str, list[float]] = {name: [] for name, why in said.items() if not why}
    for _ in range(rounds):
        for name in random.sample(list(samples), len(samples)):
            samples[name].append(builds[name].ask("sample"))
    skipped = {name: why for name, why in said.items() if why}
    return {**Case(**work.case).described(), "samples": samples, "skipped": skipped}


def ratios(samples: Mapping[str, Sequence[float]], first: str) -> dict[str, float]:
    """By build, its speed over that of the first: the median over the rounds."""
    return {
        name: statistics.median(
            before / after for before, after in zip(samples[first], times, strict=True)
        )
        for name, times in samples.items()
        if first in samples and name != first
    }


def parse(
    arguments: Sequence[str] | None, device: str
) -> tuple[argparse.Namespace, argparse.Namespace]:
    """The options of this script, and those of ``benchmarks.attention``."""
    parser = report.parser("builds", __doc__)
    add = parser.add_argument
    add("--build", nargs="+", required=True, metavar="NAME=FOLDER", help="the first is compared to")
    add("--backend", choices=OURS, default=DEFAULT_BACKENDS[device], help="whose kernels")
    add("--processes", type=int, default=2, help="of each build, one after the other")
    own, rest = parser.parse_known_args(arguments)
    folders: dict[str, str] = {}
    for text in own.build:
        name, _, folder = text.partition("=")
        if not folder:
            parser.error(f"--build: got {name}; give NAME=FOLDER")
        if not Path(folder, "flash_attn", "__init__.py").is_file():
            parser.error(f"--build: {name}={folder} has no package flash_attn")
        if name in folders:
            parser.error(f"--build: got two builds {name}; give each a name of its own")
        folders[name] = folder
    own.build = folders
    return own, attention.parse(rest, device)


def main(arguments: Sequence[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own, a = parse(arguments, device)
    graph = a.timing == "graph" and device == "cuda"
    works = [Work(own.backend, graph, case._asdict()) for case in attention.grid(a)]
    found: list[list[Row]] = []
    for _ in range(own.processes):
        with ExitStack() as processes:
            builds = {
                name: processes.enter_context(Build(Path(folder).resolve()))
                for name, folder in own.build.items()
            }
            found.append([measure(builds, work, a.rounds) for work in works])
    print_table([merged(rows) for rows in zip(*found, strict=True)], list(own.build))


def merged(rows: Sequence[Row]) -> Row:
    """The row of a case from those of several processes; who failed in one of them is skipped."""
    skipped = {name: why for row in rows for name, why in row["skipped"].items()}
    names = [name for name in rows[0]["samples"] if name not in skipped]
    samples = {name: [ms for row in rows for ms in row["samples"][name]] for name in names}
    return {**rows[0], "samples": samples, "skipped": skipped}


def print_table(rows: Sequence[Row], names: Sequence[str]) -> None:
    """One line a case; then the geometric mean of the ratios and the worst."""
    first, *others = names
    by_build: dict[str, list[float]] = {name: [] for name in others}
    columns = None
    for row in rows:
        ratio = ratios(row["samples"], first)
        for name, value in ratio.items():
            by_build[name].append(value)
        times = row["samples"].get(first)
        cells = {
            "direction": row["direction"],
            "dtype": row["dtype"],
            **report.size_cells(row),
            **report.head_cells(row),
            f"us of {first}": figure(times and statistics.median(times) * 1e3),
            **{name: figure(ratio.get(name), 3) for name in others},
        }
        report.print_cells(cells, head=list(cells) != columns)
        columns = list(cells)
    for name, values in by_build.items():
        print(f"speed of {name}: {attention.means(values, first) or '-'}")
    report.print_skipped(rows)


if __name__ == "__main__":
    main()
