"""Peak memory of a forward and backward: python tests/measure_memory.py [--device cuda] 4096 8192

Each length is measured in a process of its own: by how much the peak of its resident memory (Linux
only), or of PyTorch's allocations on a GPU, exceeds what is in use before the forward.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

import flash_attn
from flash_attn._backends import BACKENDS

NHEADS, HEADDIM = 1, 64
LENGTHS = [4096, 8192, 16384]


def resident_kib(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


def used_and_reset_peak(device: str) -> float:
    """MiB in use now; the peak starts again from here."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5")
    return resident_kib("VmRSS") / 2**10


def peak(device: str) -> float:
    """Peak MiB since used_and_reset_peak."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resident_kib("VmHWM") / 2**10


def measure_here(seqlen: int, device: str, backend: str) -> float:
    """MiB that a causal forward and backward over seqlen tokens take beside q, k, v."""

    def leaves(seqlen: int) -> list[torch.Tensor]:
        shape = (1, seqlen, NHEADS, HEADDIM)
        dtype = torch.float32 if backend == "tiled" else torch.bfloat16
        made = [torch.randn(shape, dtype=dtype, device=device) for _ in range(3)]
        return [x.requires_grad_() for x in made]

    def step(inputs: list[torch.Tensor]) -> None:
        flash_attn.flash_attn_func(*inputs, causal=True).sum().backward()

    with flash_attn.use_backend(backend):
        step(leaves(256))  # what the first call loads is not the attention's
        inputs = leaves(seqlen)
        before = used_and_reset_peak(device)
        step(inputs)
    return peak(device) - before


def peak_mib(seqlen: int, device: str, backend: str) -> float:
    """``measure_here`` in a fresh process."""
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    result = subprocess.run(
        [sys.executable, __file__, "--device", device, "--backend", backend, "--here", str(seqlen)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    return float(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", default="tiled", choices=BACKENDS)
    parser.add_argument("--here", action="store_true", help="measure one length, print a number")
    arguments = parser.parse_args()
    where = arguments.device, arguments.backend
    if arguments.here:
        print(measure_here(arguments.lengths[0], *where))
        return
    print(f"forward + backward, {' '.join(where)}, {NHEADS} x {HEADDIM}, causal")
    print("tokens   peak MiB   one N x N matrix of float32, MiB")
    for seqlen in arguments.lengths:
        matrix = seqlen**2 * 4 / 2**20
        print(f"{seqlen:6d}   {peak_mib(seqlen, *where):8.1f}   {matrix:8.0f}", flush=True)


if __name__ == "__main__":
    main()
