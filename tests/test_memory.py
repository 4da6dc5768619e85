"""Memory of forward and backward grows with the number of tokens, not with its square."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BACKENDS, KERNELS, backend_params
from measure_memory import peak_mib

MARGIN_MIB = 4.0  # page-sized noise of the allocator
# Long enough for what grows to show beside the tiles, which are larger on a GPU.
SEQLENS = {"cpu": (4096, 8192), "cuda": (16384, 32768)}


@pytest.mark.slow
@pytest.mark.parametrize("name", backend_params("cpu-tiled", "cuda-tiled", *KERNELS))
def test_peak_memory_is_linear(name):
    device, backend, reason = BACKENDS[name]
    if reason := reason():
        pytest.skip(reason)
    if device == "cpu" and not Path("/proc/self/clear_refs").exists():
        pytest.skip("reads the memory of a process from Linux's /proc")
    short, long = (peak_mib(seqlen, device, backend) for seqlen in SEQLENS[device])
    assert long <= 2 * short + MARGIN_MIB
    matrix_mib = SEQLENS[device][1] ** 2 * 4 / 2**20
    assert long < matrix_mib / 8, "more than an eighth of one N x N matrix"
