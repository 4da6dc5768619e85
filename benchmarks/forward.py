"""Forward speed of the compiled kernels beside PyTorch's own attention, in TFLOP/s.

Run as ``python -m benchmarks.forward`` (``--smoke``: one case) on a machine with a CUDA GPU.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
from benchmarks.timing import time_in_turn

TOKENS = 16384  # in all: batch = TOKENS / seqlen
MODEL_WIDTH = 2048  # nheads * headdim
PEERS = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


class Case(NamedTuple):
    """Self-attention of ``TOKENS`` tokens and ``MODEL_WIDTH`` columns."""

    headdim: int
    causal: bool
    seqlen: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def nheads(self) -> int:
        return MODEL_WIDTH // self.headdim

    @property
    def flops(self) -> float:
        """Of the two matrix products, counting only what a causal mask leaves."""
        pairs = TOKENS * self.seqlen * (0.5 if self.causal else 1.0)
        return 4.0 * self.nheads * self.headdim * pairs


ALL_CASES = [Case(*row) for row in itertools.product((64, 128), (False, True), (1024, 4096, 16384))]
SMOKE_CASES = [Case(128, False, 4096)]


def candidates(case: Case) -> dict[str, Callable[[], Tensor]]:
    """The functions to compare, on inputs of their own."""
    shape = (TOKENS // case.seqlen, case.seqlen, case.nheads, case.headdim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=case.dtype) for _ in range(3))
    q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, v))

    def sm80() -> Tensor:
        with flash_attn.use_backend("sm80"):
            return flash_attn.flash_attn_func(q, k, v, causal=case.causal)

    def peer(backend: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q_heads, k_heads, v_heads, is_causal=case.causal
                )

        return call

    return {"sm80": sm80, **{name: peer(backend) for name, backend in PEERS.items()}}


def measure(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Time the candidates of each case in turn.

    Returns
    -------
    list of dict
        For each case its fields, ``tflops`` by candidate, and ``ratio``: the speed of sm80 over
        that of each peer.
    """
    rows = []
    for case in cases:
        times = time_in_turn(candidates(case))
        tflops = {name: case.flops / ms / 1e9 for name, ms in times.items()}
        rows.append(
            {
                "headdim": case.headdim,
                "causal": case.causal,
                "seqlen": case.seqlen,
                "dtype": str(case.dtype).removeprefix("torch."),
                "tflops": {name: round(value, 1) for name, value in tflops.items()},
                "ratio": {name: round(tflops["sm80"] / tflops[name], 3) for name in PEERS},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one case only")
    cases = SMOKE_CASES if parser.parse_args().smoke else ALL_CASES
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.forward needs a CUDA GPU and torch sees none")
    if "sm80" not in flash_attn.available_backends("cuda"):
        raise SystemExit("benchmarks.forward needs the compiled kernels: make build")

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {TOKENS} tokens, TFLOP/s")
    names = ("sm80", *PEERS)
    print("headdim causal seqlen", *(f"{name:>7}" for name in names), " sm80 over the others")
    for case in cases:
        (row,) = measure([case])
        speeds = (f"{row['tflops'][name]:7.1f}" for name in names)
        ratios = (f"{row['ratio'][name]:.2f}" for name in PEERS)
        causal = "yes" if case.causal else "no"
        print(f"{case.headdim:7} {causal:>6} {case.seqlen:6}", *speeds, " ", *ratios, flush=True)


if __name__ == "__main__":
    main()
