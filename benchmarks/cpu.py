"""Time on a CPU beside PyTorch's scaled_dot_product_attention.

Run as ``python -m benchmarks.cpu``; it prints a line for each case. Where PyTorch's function has no
such problem (packed sequences, lengths that differ), it is called for one sequence after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
from benchmarks import report
from benchmarks.cases import DTYPES, sums
from benchmarks.timing import Call, sampler, time_in_turn

NHEADS, HEADDIM = 8, 64

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """One problem, solved by this library and by PyTorch's function."""

    name: str
    inputs: tuple[Tensor, Tensor, Tensor]  # q, k, v
    ours: Attend
    peer: Attend


def dense(seqlen: int, nheads_kv: int, dtype: torch.dtype) -> Case:
    inputs = _random((1, seqlen), (1, seqlen), nheads_kv, dtype)
    name = f"dense causal, {seqlen} tokens, {nheads_kv} key heads"
    return Case(name, inputs, _ours_causal, lambda q, k, v: _peer(q, k, v, causal=True))


def packed(lengths: Sequence[int], dtype: torch.dtype, window: int = -1) -> Case:
    """Causal sequences one after another in one tensor; ``window`` keys before each query's own."""
    bounds = sums(lengths, "cpu")
    longest = max(lengths)
    columns = torch.arange(longest)
    distance = columns[:, None] - columns
    visible = (distance >= 0) & (distance <= window)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layout = (bounds, bounds, longest, longest)
        window_size = (window, -1)
        return flash_attn.flash_attn_varlen_func(
            q, k, v, *layout, causal=True, window_size=window_size
        )

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        parts = (x[None].split(list(lengths), 1) for x in (q, k, v))
        for n, one_q, one_k, one_v in zip(lengths, *parts, strict=True):
            mask = visible[:n, :n] if window >= 0 else None
            outs.append(_peer(one_q, one_k, one_v, causal=mask is None, mask=mask))
        return torch.cat(outs, 1)[0]

    total = (sum(lengths),)
    name = f"packed causal, {len(lengths)} sequences of {min(lengths)} .. {longest} tokens"
    name += f", window {window}" if window >= 0 else ""
    return Case(name, _random(total, total, NHEADS, dtype), ours, peer)


def cache(lengths: Sequence[int], nheads_kv: int, dtype: torch.dtype) -> Case:
    """One query for each sequence, whose keys are the first rows of its part of a cache."""
    batch, capacity = len(lengths), max(lengths)
    used = torch.tensor(lengths, dtype=torch.int32)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used)

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if min(lengths) == capacity:
            return _peer(q, k, v)
        slots = zip(q.split(1), k.split(1), v.split(1), lengths, strict=True)
        return torch.cat([_peer(q, k[:, :n], v[:, :n]) for q, k, v, n in slots])

    inputs = _random((batch, 1), (batch, capacity), nheads_kv, dtype)
    name = f"1 query, caches of {min(lengths)} .. {capacity} keys, {nheads_kv} key heads"
    return Case(name, inputs, ours, peer)


def cases(seqlen: int, dtype: torch.dtype) -> Iterator[tuple[Case, bool]]:
    """Yield each case and whether its backward is to be timed too, sizes in proportion."""
    for nheads_kv in (NHEADS, 2):
        yield dense(seqlen, nheads_kv, dtype), True
    spread = torch.linspace(seqlen // 128, seqlen // 4, 32).int()
    lengths = spread[torch.randperm(32)].tolist()
    yield packed(lengths, dtype), True
    yield packed(lengths, dtype, window=seqlen // 16), True
    for nheads_kv in (NHEADS, 2):
        yield cache([2 * seqlen] * 4, nheads_kv, dtype), False
        yield cache([2 * seqlen // n for n in (1, 2, 3, 4)], nheads_kv, dtype), False


def measure(case: Case, backward: bool, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of ours and of PyTorch's, taken in turn."""
    leaves = [x.clone().requires_grad_(backward) for x in case.inputs]
    with torch.no_grad():
        dout = torch.randn_like(case.ours(*case.inputs))

    def call(attend: Attend) -> object:
        out = attend(*leaves)
        return torch.autograd.grad(out, leaves, dout) if backward else out

    calls = {"ours": Call(lambda: call(case.ours)), "PyTorch": Call(lambda: call(case.peer))}
    return time_in_turn({name: sampler(each, "cpu") for name, each in calls.items()}, rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("cpu", __doc__)
    add = parser.add_argument
    add("--seqlen", type=int, default=2048, help="of the dense case; the others are in proportion")
    add("--dtype", choices=DTYPES, default="fp32")
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=15, help="samples of each")
    a = parser.parse_args(arguments)
    if a.seqlen < 128:
        parser.error(f"--seqlen must be at least 128, got {a.seqlen}")
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {a.threads} threads, {a.dtype}, {NHEADS} heads of {HEADDIM}")
    print(f"{'ms, median':76} {'ours':>9} {'PyTorch':>9} {'ratio':>6}")
    for case, has_backward in cases(a.seqlen, DTYPES[a.dtype]):
        for backward in (False, True)[: 1 + has_backward]:
            name = case.name + ", with backward" * backward
            ms = measure(case, backward, a.rounds)
            ratio = ms["ours"] / ms["PyTorch"]
            print(f"{name:76} {ms['ours']:9.3f} {ms['PyTorch']:9.3f} {ratio:6.2f}", flush=True)


def _random(
    rows_q: tuple[int, ...], rows_k: tuple[int, ...], nheads_kv: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(*rows_q, NHEADS, HEADDIM, dtype=dtype)
    k, v = (torch.randn(*rows_k, nheads_kv, HEADDIM, dtype=dtype) for _ in range(2))
    return q, k, v


def _ours_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn.flash_attn_func(q, k, v, causal=True)


def _peer(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """PyTorch's function on (batch, seqlen, nheads, headdim)."""
    shared = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)
    return out.transpose(1, 2)


if __name__ == "__main__":
    main()
