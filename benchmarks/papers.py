"""The tables of the FlashAttention papers, on the GPU at hand: all benchmarks, and one HTML page.

Run as ``python -m benchmarks.papers``; ``--help`` lists the options. Each part is a benchmark of
its own that writes papers-PART.json, .csv and .png into ``benchmarks/results/<gpu>/``. A part that
fails does not end the others. papers.html has the tables and plots of all parts, papers.json what
became of each. A part that is done in this environment is not run again.

``--page`` measures nothing and needs no GPU: it makes the page of the records that there are.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention, hbm, memory, plots, report, tiles, training
from benchmarks.page import drawn, element, page, table
from benchmarks.report import ROOT, figure

Data = dict[str, Any]  # a record
Lines = list[dict[str, str]]  # of a table, by column
SPEED = (
    "--dtype bf16 --headdim 64 128 256 --rounds 5 --math-gib 1000 "
    "--seqlen 512 1024 2048 4096 8192 16384 --providers sm90 sm80 flash cudnn math"
)
TINY = "--tokens 128 --width 64 --rounds 1 --dtype fp32 --headdim 32 --seqlen 64 128"


@dataclass(frozen=True)
class Part:
    """A benchmark, its arguments, and how its record is shown."""

    title: str
    about: str  # which tables of the papers these are; what the figures mean
    module: str  # of this package
    gpu: str  # arguments
    cpu: str | None  # arguments of a run of seconds; None: it needs a GPU
    seconds: int  # about, on an H200: a guess, until papers.json has what it took
    older: str  # record that is shown where this part has none
    lines: Callable[[Data], Lines]
    drawing: plots.Drawing
    summary: Callable[[Data], list[str]] = lambda data: []


def speed_lines(data: Data) -> Lines:
    """By mask and head dim, the speeds of a length in columns: one line for each provider."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in data["rows"]:
        for name in row["providers"]:
            kind = (row["direction"], str(row["headdim"]), "yes" if row["causal"] else "no", name)
            line = found.setdefault(
                kind, dict(zip(("direction", "headdim", "causal", "TFLOP/s"), kind, strict=True))
            )
            line[plots.thousands(row["seqlen"])] = figure(row["tflops"].get(name), 0)
    return sorted(found.values(), key=lambda line: (int(line["headdim"]), line["causal"]))


def speed_summary(data: Data) -> list[str]:
    given = data["environment"]["arguments"]
    return attention.summary(data["rows"], given["baseline"], given["peers"])


def memory_lines(data: Data) -> Lines:
    return [
        memory.cells(row, data["environment"]["arguments"]["providers"]) for row in data["rows"]
    ]


def tile_lines(data: Data) -> Lines:
    """Microseconds of each tile that takes all keys, in the cases without a label."""
    lines = []
    for row in data["rows"]:
        if row["model"]:
            continue
        us = {name: time for name, time in row["us"].items() if "x" not in name}
        shapes = row.get("shapes", {})  # older records lack them
        names = {name: f"tile {name} {shapes.get(name, '')}".strip() for name in us}
        names[tiles.AUTO] = "the library's choice"
        sizes = report.size_cells(row)
        lines.append({**sizes, **{names[name]: figure(time) for name, time in us.items()}})
    return lines


PARTS = {
    "forward": Part(
        title="Speed of the forward by sequence length",
        about="FlashAttention-2, figure 5, and FlashAttention-3, figure 5: TFLOP/s. "
        "A sequence length times the batch is 16384 tokens; heads times head dim is 2048.",
        module="attention",
        gpu=f"--direction forward {SPEED}",
        cpu=f"--direction forward --providers tiled math flash {TINY}",
        seconds=70,
        older="attention-lengths",
        lines=speed_lines,
        drawing=plots.speed,
        summary=speed_summary,
    ),
    "backward": Part(
        title="Speed of the backward by sequence length",
        about="FlashAttention-2, figure 6, and FlashAttention-3, figure 6: TFLOP/s of the backward "
        "alone. The cases are those of the forward.",
        module="attention",
        gpu=f"--direction backward {SPEED}",
        cpu=f"--direction backward --providers tiled math flash {TINY}",
        seconds=100,
        older="backward-lengths",
        lines=speed_lines,
        drawing=plots.speed,
        summary=speed_summary,
    ),
    "memory": Part(
        title="Peak memory by sequence length",
        about="FlashAttention, figure 3: MiB that a forward and its backward allocate at most "
        "beside their inputs. The math column is standard attention.",
        module="memory",
        gpu="--math-gib 1000 --providers sm90 sm80 tiled math efficient flash cudnn",
        cpu="--seqlen 64 128 --headdim 32 --providers tiled math",
        seconds=40,
        older="memory",
        lines=memory_lines,
        drawing=plots.memory,
    ),
    "hbm": Part(
        title="Bytes that HBM reads and writes",
        about="FlashAttention, figure 2: GB by ncu's counters dram__bytes_read.sum and "
        "dram__bytes_write.sum. The formulas count the accesses of the paper's algorithms to "
        "memory beyond one SM's SRAM of M elements: Theta(N d + N^2) for standard attention, "
        "Theta(N^2 d^2 / M) for FlashAttention. They know no L2 cache, which the GPU has. The "
        "least is each tensor once. The case of 1024 tokens and 16 heads of 64 is the paper's: it "
        "gives 40.3 GB for standard attention and 4.4 GB for FlashAttention, forward and backward "
        "together, on an A100.",
        module="hbm",
        gpu="",
        cpu=None,
        seconds=120,
        older="hbm",
        lines=lambda data: [hbm.cells(row) for row in data["rows"]],
        drawing=plots.hbm,
    ),
    "tiles": Part(
        title="Block sizes of sm90",
        about="FlashAttention, figure 2 (middle): microseconds of the forward with each of the "
        "compiled tiles, queries x keys, and with the tile that the library chooses. Where a tile "
        "has a number alone, csrc/sm90/forward_tile.h of the record's commit has its sizes.",
        module="tiles",
        gpu="--presets lengths --random 0 --split-below 0",
        cpu=None,
        seconds=40,
        older="tiles",
        lines=tile_lines,
        drawing=plots.tiles,
        summary=lambda data: tiles.summary(data["rows"]),
    ),
    "tiles-sm80": Part(
        title="Block sizes of sm80",
        about="As above, of the kernels for Ampere. Where a tile has a number alone, "
        "csrc/sm80/forward_config.cuh of the record's commit has its sizes.",
        module="tiles",
        gpu="--backend sm80 --presets lengths --random 0 --split-below 0",
        cpu=None,
        seconds=40,
        older="tiles-sm80",
        lines=tile_lines,
        drawing=plots.tiles,
        summary=lambda data: tiles.summary(data["rows"]),
    ),
    "training": Part(
        title="Training of GPT-2 and BERT-large",
        about="FlashAttention, tables 1 and 2, and FlashAttention-2, table 1: the speed of "
        "training steps (forward, backward, AdamW) with random weights. No model is trained to an "
        "accuracy. The ratio is the speed of this library over that of the line.",
        module="training",
        gpu="--models gpt2-small gpt2-medium gpt-1.3b bert-large --rounds 3",
        cpu="--models gpt bert --tokens 64 --rounds 1 --sample-ms 1 --providers tiled math",
        seconds=90,
        older="training",
        lines=lambda data: [line for row in data["rows"] for line in training.lines(row)],
        drawing=plots.training,
    ),
}


def arguments_of(part: Part, a: argparse.Namespace) -> list[str]:
    """What a part's benchmark is given."""
    given = shlex.split(part.gpu if a.device == "cuda" else part.cpu or "")
    if a.fa3_library and part.module == "attention":
        given += ["--fa3-library", a.fa3_library]
    return given


def command_of(module: str, output: str, arguments: Mapping[str, Any]) -> str:
    """The command that has a record's arguments, all of them."""
    words = ["python", "-m", f"benchmarks.{module}"]
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if name == "seed" and not arguments.get("random"):
            continue  # was drawn, and nothing was drawn from it
        if isinstance(value, list) and value:
            words += [option, *map(str, value)]
        elif value is True:
            words.append(option)
        elif not (value is None or value is False or value == []):
            words += [option, str(value)]
    return shlex.join([*words, "--output", output])


def run(command: Sequence[str], device: str, label: str, timeout: float | None) -> str:
    """Run a benchmark, its stderr shown as progress; return why it failed, or "".

    It is ended ``timeout`` seconds after its start.
    """
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that what it started ends with it
    )

    def end() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            ended.set()

    ended, last = threading.Event(), ""
    timer = threading.Timer(timeout or threading.TIMEOUT_MAX, end)
    timer.daemon = True
    timer.start()
    try:
        assert process.stderr is not None
        for line in filter(None, map(str.strip, process.stderr)):
            report.show(f"{label}: {line}")
            last = line
        status = process.wait()
    finally:
        timer.cancel()
        end()
    if ended.is_set():
        return f"ended after {timeout:.0f} s, when no time was left"
    return f"exit status {status}: {last}" if status else ""


def run_parts(a: argparse.Namespace) -> dict[str, Data]:
    """Run the chosen parts one after the other; return what became of each, as papers.json has it.

    ``state`` is "done", "failed" or "left out", with a ``reason``; "begun" if nothing came after.
    """
    path = a.folder / "papers.json"
    a.folder.mkdir(parents=True, exist_ok=True)
    states: dict[str, Data] = read(path) or {}
    versions = report.versions()
    if versions["commit"]:  # a record that is written makes the tree dirty
        versions["commit"] = str(versions["commit"]).removesuffix("-dirty")
    started = time.monotonic()
    for k, name in enumerate(a.parts):
        part, before = PARTS[name], states.get(name, {})
        given = arguments_of(part, a)
        left = None if a.budget is None else a.budget * 60 - (time.monotonic() - started)
        expected = before.get("seconds", part.seconds if a.device == "cuda" else 10)
        label = f"{report.bar(k, len(a.parts))}  {name}"
        now = {"arguments": given, "versions": versions}
        same = before.get("state") == "done" and now.items() <= before.items()
        if same and (a.folder / f"papers-{name}.json").exists() and not a.again:
            report.show(f"{label}: done before")
            continue
        report.show(f"{label}: about {expected:.0f} s")
        state = states[name] = {**now, "date": report.today(), "state": "begun", "reason": ""}
        if "seconds" in before:
            state["seconds"] = before["seconds"]
        if a.device == "cpu" and part.cpu is None:
            state |= {"state": "left out", "reason": "it needs a CUDA GPU"}
        elif left is not None and left < expected:
            reason = f"it takes about {expected:.0f} s, and {max(left, 0):.0f} s were left"
            state |= {"state": "left out", "reason": reason}
        else:
            path.write_text(json.dumps(states, indent=2) + "\n")
            begun = time.monotonic()
            command = [sys.executable, "-m", f"benchmarks.{part.module}", *given]
            command += ["--folder", str(a.folder), "--output", f"papers-{name}"]
            if reason := run(command, a.device, label, left):
                state |= {"state": "failed", "reason": reason}
            else:
                state |= {"state": "done", "seconds": round(time.monotonic() - begun, 1)}
        path.write_text(json.dumps(states, indent=2) + "\n")
    report.show(f"{report.bar(len(a.parts), len(a.parts))}\n")
    return states


def read(path: Path) -> Data | None:
    return json.loads(path.read_text()) if path.exists() else None


def section(name: str, part: Part, folder: Path, state: Data | None) -> str:
    """A part of the page: its record, or that it has none."""
    content = [f'<h2 id="{name}">{part.title}</h2>', element("p", part.about)]
    if state and state["state"] != "done":
        words = {"failed": "failed", "left out": "was left out", "begun": "did not end"}
        text = f"In the run of {state['date']} this part {words[state['state']]}. {state['reason']}"
        content.append(element("p", text, "missing"))
    own = f"python -m benchmarks.papers --parts {name}"
    outputs = (f"papers-{name}", part.older)
    output = next((each for each in outputs if (folder / f"{each}.json").exists()), None)
    if output is None:
        content.append(element("p", "There is no record of this part. Command:", "missing"))
        return "\n".join([*content, element("pre", own)])
    data = read(folder / f"{output}.json") or {}
    environment = dict(data["environment"])
    given = environment.pop("arguments")
    facts = ", ".join(f"{key} {value}" for key, value in environment.items())
    other = (
        "" if output != part.older else f" It is not of this part's own cases: {own} makes that."
    )
    content += [
        element("p", f"Record {output}.json: {len(data['rows'])} cases; {facts}.{other}"),
        element("pre", command_of(part.module, output, given)),
        drawn(part.drawing, data),
        table(part.lines(data)),
    ]
    said = [*part.summary(data), *report.skipped_lines(data["rows"])]
    if said:
        content.append(element("pre", "\n".join(said)))
    return "\n".join(content)


def make_page(folder: Path) -> str:
    """The page of the records in ``folder``."""
    states = read(folder / "papers.json") or {}
    words = (
        "Speed, memory, memory traffic, block sizes and training steps of exact attention. "
        "Each section has the command, the date and the versions of its record. Figures of "
        "different records are of different runs."
    )
    links = ", ".join(f'<a href="#{name}">{part.title}</a>' for name, part in PARTS.items())
    sections = [section(name, part, folder, states.get(name)) for name, part in PARTS.items()]
    title = f"The tables of the FlashAttention papers: {folder.name}"
    return page(title, [element("p", words), f"<p>{links}</p>", *sections])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser("papers", __doc__)
    add = parser.add_argument
    here = "cuda" if torch.cuda.is_available() else "cpu"
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="in this order")
    add("--device", choices=("cuda", "cpu"), default=here, help="cpu: tiny sizes, in seconds")
    add("--budget", type=float, metavar="MINUTES", help="leave out what would take longer")
    add("--again", action="store_true", help="also run parts that are done")
    add("--page", action="store_true", help="measure nothing: write the page alone")
    add("--fa3-library", metavar="PATH", help="as of benchmarks.attention")
    add("--folder", type=Path, help="of the records and the page; none: that of the device")
    a = parser.parse_args(arguments)
    if a.device == "cuda" and here == "cpu" and not a.page:
        parser.error("--device cuda: torch sees no CUDA GPU")
    if a.folder is None:
        a.folder = report.results_folder(report.device_name() if a.device == "cuda" else "CPU")
    a.folder = a.folder.resolve()
    return a


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a part failed."""
    a = parse(arguments)
    states: dict[str, Data] = {} if a.page else run_parts(a)
    a.folder.mkdir(parents=True, exist_ok=True)
    path = a.folder / "papers.html"
    path.write_text(make_page(a.folder))
    for name in a.parts if states else ():
        state = states[name]
        seconds = f"{state['seconds']} s" if state["state"] == "done" else state["reason"]
        print(f"{name:12} {state['state']}, {seconds}")
    print(f"wrote {path}")
    return int(any(states[name]["state"] == "failed" for name in a.parts if states))


if __name__ == "__main__":
    sys.exit(main())
