"""The rotary embedding beside a copy of the tensor, and upstream's Triton kernel if it is there.

Run as ``python -m benchmarks.rotary``; ``--help`` lists the options. ``out`` is
``apply_rotary_emb``, ``inplace`` the same in place, ``copy`` copies the tensor. With ``--triton
PATH``, flash_attn/ops/triton/rotary.py of Dao-AILab/flash-attention, ``triton`` and
``triton_inplace`` are its ``apply_rotary``. GB/s count each element as read and written once.
Prints a table and writes NAME.json and NAME.csv into ``benchmarks/results/<gpu>/``. Calls are
captured into CUDA graphs. Without a GPU the sizes are small.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.cases import DTYPES
from benchmarks.report import Row, figure, rounded
from benchmarks.timing import Call, capture_stream, sampler, time_in_turn
from flash_attn.layers.rotary import apply_rotary_emb

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "dtype": "bf16",
        "shapes": [(1, 16384, 32, 128), (8, 2048, 16, 64), (4, 4096, 16, 256), (64, 1, 32, 128)],
    },
    "cpu": {"dtype": "fp32", "shapes": [(1, 64, 2, 32)]},
}

ApplyRotary = Callable[..., Tensor]


def shape_of(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: BATCHxSEQLENxNHEADSxHEADDIM")
    return tuple(map(int, sizes))


def apply_rotary_of(path: str) -> ApplyRotary:
    """The function of that name in a Python file."""
    spec = importlib.util.spec_from_file_location("upstream_rotary", path)
    if spec is None or spec.loader is None or not Path(path).exists():
        raise SystemExit(f"--triton: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: ApplyRotary = module.apply_rotary
    return found


def calls_of(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, triton: ApplyRotary | None
) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by provider. Each has a tensor of its own to write to in place."""
    ours, theirs = x.clone(), x.clone()
    found: dict[str, Callable[[], Tensor]] = {
        "out": lambda: apply_rotary_emb(x, cos, sin, interleaved),
        "inplace": lambda: apply_rotary_emb(ours, cos, sin, interleaved, inplace=True),
        "copy": x.clone,
    }
    if triton is not None:
        found["triton"] = lambda: triton(x, cos, sin, interleaved=interleaved)
        found["triton_inplace"] = lambda: triton(
            theirs, cos, sin, interleaved=interleaved, inplace=True
        )
        torch.testing.assert_close(found["out"](), found["triton"]())
    return found


def measure(
    a: argparse.Namespace,
    triton: ApplyRotary | None,
    device: str,
    shape: tuple[int, ...],
    part: float,
    interleaved: bool,
) -> Row:
    """Return the fields of the case, and ``ms`` and ``gbs`` by provider."""
    batch, seqlen, nheads, headdim = shape
    rotary_dim = int(headdim * part) // 2 * 2
    x = torch.randn(shape, dtype=DTYPES[a.dtype], device=device)
    angles = torch.rand(seqlen, rotary_dim // 2, device=device)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    samplers = {
        name: sampler(Call(run), device, graph=device == "cuda", sample_ms=a.sample_ms)
        for name, run in calls_of(x, cos, sin, interleaved, triton).items()
    }
    ms = time_in_turn(samplers, a.rounds)
    moved = 2 * x.numel() * x.itemsize
    return {
        "dtype": a.dtype,
        "batch": batch,
        "seqlen": seqlen,
        "nheads": nheads,
        "headdim": headdim,
        "rotary_dim": rotary_dim,
        "interleaved": interleaved,
        "ms": {name: rounded(time) for name, time in ms.items()},
        "gbs": {name: rounded(moved / time / 1e6) for name, time in ms.items()},
    }


def cells(row: Row) -> dict[str, str]:
    """A line of the table, by column: microseconds, and the Triton kernel's over ours."""
    ms = row["ms"]
    fields = {name: str(row[name]) for name in ("batch", "seqlen", "nheads", "headdim")}
    fields |= {
        "rotated": str(row["rotary_dim"]),
        "pairs": "interleaved" if row["interleaved"] else "halves",
    }
    times = {f"{name} us": figure(time * 1e3) for name, time in ms.items()}
    pairs = (("out", "triton"), ("inplace", "triton_inplace"))
    ratios = {
        f"{theirs} / {ours}": f"{ms[theirs] / ms[ours]:.2f}"
        for ours, theirs in pairs
        if theirs in ms
    }
    return fields | times | ratios


def parse(arguments: Sequence[str] | None, device: str) -> argparse.Namespace:
    parser = report.parser("rotary", __doc__)
    add = parser.add_argument
    add("--dtype", choices=DTYPES, help="of the tensors and tables")
    add("--shapes", nargs="+", type=shape_of, help="BATCHxSEQLENxNHEADSxHEADDIM")
    add("--parts", nargs="+", type=float, default=[1.0, 0.5], help="of the head that are rotated")
    add("--triton", metavar="PATH", help="a file with upstream's apply_rotary")
    add("--rounds", type=int, default=10, help="samples of a call")
    add("--sample-ms", type=float, default=5.0, help="least length of a sample")
    report.add_arguments(parser, "rotary", plots=False)
    parser.set_defaults(**DEFAULTS[device])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = parse(arguments, device)
    cases = [
        (shape, part, interleaved)
        for shape in a.shapes
        for part in a.parts
        for interleaved in (False, True)
    ]
    print(f"{report.device_name()}, torch {torch.__version__}, {a.dtype}")
    triton = None if a.triton is None else apply_rotary_of(a.triton)  # once: it compiles
    measured = report.with_progress(
        lambda case: measure(a, triton, device, *case), cases, lambda case: str(case[0])
    )
    with capture_stream() if device == "cuda" else torch.no_grad():
        report.print_rows(report.record(a.folder / a.output, a, measured), cells)


if __name__ == "__main__":
    main()
