"""The kernels' masks, score transforms and dropout, on tiles of S and of its transpose.

Their headers are compiled for the host (tests/cpp/orientation.cpp): no GPU is needed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flash_attn._backends.philox import dropout_keep_mask

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which("c++") or shutil.which("g++")

# seqlen_q, seqlen_k, window_left, window_right. As kernels get them: unbounded is the length.
CASES = [
    (70, 70, 70, 70),
    (70, 70, 70, 0),
    (33, 97, 97, 0),
    (97, 33, 33, 0),
    (130, 150, 20, 7),
    (64, 129, 0, 64),
    (1, 65, 3, 0),
    (65, 1, 1, 0),
]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_tiles_of_both_orientations(tmp_path: Path) -> None:
    program = tmp_path / "orientation"
    folders = [f"-I{ROOT / folder}" for folder in ("tests/cpp", "csrc")]
    subprocess.run(
        [str(COMPILER), "-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", *folders]
        + ["-include", "cuda_on_host.h", str(ROOT / "tests/cpp/orientation.cpp"), "-o", program],
        check=True,
    )
    rng_state, p = (0x7EDC_BA98_7654_3210, 0x0123_4567_FEDC_BA98), 0.3
    numbers: list[int] = []
    for seqlen_q, seqlen_k, *window in CASES:
        kept = dropout_keep_mask(torch.tensor(rng_state), p, 1, 1, seqlen_q, seqlen_k)
        numbers += [*rng_state, round(p * 2**16), seqlen_q, seqlen_k, *window]
        numbers += kept.int().flatten().tolist()
    result = subprocess.run(
        [program], input=" ".join(map(str, numbers)), capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, f"{len(CASES)} cases\n"), result.stdout
