"""Memory of the tiled backend grows with the number of tokens, not with its square."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import backend_params
from measure_memory import peak_mib

MARGIN_MIB = 4.0  # page-sized noise of the allocator


@pytest.mark.slow
@pytest.mark.parametrize("backend", backend_params("cpu-tiled", "cuda-tiled"))
def test_peak_memory_is_linear(backend):
    device = backend.removesuffix("-tiled")
    if device == "cpu" and not Path("/proc/self/clear_refs").exists():
        pytest.skip("reads the memory of a process from Linux's /proc")
    short, long = (peak_mib(seqlen, device) for seqlen in (4096, 8192))
    assert long <= 2 * short + MARGIN_MIB
    assert long < 8192**2 * 4 / 2**20 / 8, "more than an eighth of one N x N matrix"
