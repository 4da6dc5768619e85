"""Sequences of different lengths in one batch: packed one behind the other instead of padded.

    python examples/packing.py            # how long both take, and how far results are apart
    python examples/packing.py --check    # an error if they differ

Padding computes on tokens that nobody wants. Packed, the tokens of all sequences are one long row,
and cu_seqlens says where each begins; a token sees its own sequence alone. Linear layers, norms and
losses take the packed row as it is.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Padding stands behind a sequence, where the causal mask hides it from the tokens."""
    return flash_attn_func(q, k, v, causal=True)


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)


def timed(run: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    """The result, and the milliseconds of the best of three."""
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        out = run()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return out, best * 1000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Packed sequences beside padded ones.")
    add = parser.add_argument
    add("--batch", type=int, default=16)
    add("--longest", type=int, default=2048, help="tokens; lengths are random, from 1 on")
    add("--heads", type=int, default=8)
    add("--headdim", type=int, default=64)
    add("--check", action="store_true", help="raise an error if results differ")
    a = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    torch.manual_seed(0)
    lengths = torch.randint(1, a.longest + 1, (a.batch,), device=device)
    lengths[0] = a.longest
    mask = torch.arange(a.longest, device=device) < lengths[:, None]
    shape = a.batch, a.longest, 3, a.heads, a.headdim
    qkv = torch.randn(shape, device=device, dtype=dtype)
    q, k, v = qkv.unbind(2)
    tokens, indices, cu_seqlens, longest, _ = unpad_input(qkv, mask)  # (total, 3, heads, headdim)
    qt, kt, vt = tokens.unbind(1)

    expected, padded_ms = timed(lambda: padded(q, k, v), device)
    out, packed_ms = timed(lambda: packed(qt, kt, vt, cu_seqlens, longest), device)
    found = pad_input(out, indices, a.batch, a.longest)
    difference = (found - expected)[mask].abs().max().item()
    share = len(tokens) / mask.numel()
    print(f"{a.batch} sequences of up to {a.longest} tokens: {share:.0%} of the batch are tokens")
    print(f"padded {padded_ms:.2f} ms, packed {packed_ms:.2f} ms")
    print(f"largest difference of the results {difference:.1e}")
    if a.check and difference > (1e-5 if dtype == torch.float32 else 2e-2):
        raise SystemExit("packed and padded attention differ")


if __name__ == "__main__":
    main()
