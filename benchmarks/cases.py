"""Attention problems: their sizes, what they count for, their tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Matrix products that have the head dim of q and k in them, and those that have v's: S, dQ and dK;
# O, dP and dV.
MATMULS = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}


class Case(NamedTuple):
    """Attention of ``tokens`` queries and ``width`` columns, or queries against a KV cache."""

    direction: str  # of MATMULS; backward is that alone
    dtype: str  # of DTYPES
    headdim: int
    causal: bool
    seqlen: int  # the longest, if varlen
    window: int = -1  # keys that a query sees to its left and, unless causal, to its right
    group: int = 1  # query heads of a key head
    varlen: bool = False  # sequences of random lengths, packed; of a KV cache the lengths alone
    shortest: int = 64  # of the random lengths
    log_uniform: bool = False  # their logarithms are spread evenly: many short ones, few long ones
    dropout_p: float = 0.0
    softcap: float = 0.0
    alibi: bool = False
    deterministic: bool = False
    tokens: int = 16384
    width: int = 2048
    queries: int = 0  # of each sequence, whose keys are a KV cache; 0: self-attention
    page_size: int = 0  # of the KV cache; 0: the keys of a sequence lie together
    keys: int = 0  # of each sequence in cross-attention; 0: as many as its queries
    headdim_v: int = 0  # 0: headdim
    append: bool = False  # the queries' own keys are new: rotated and appended in the same call
    fp8_cache: bool = False  # the KV cache is in e4m3, whatever the dtype
    prefills: int = 0  # sequences packed before those of the KV cache, whose queries are packed too
    prefill: int = 2048  # queries and keys of each of them
    model: str = ""  # whose attention this is; a label

    @property
    def nheads(self) -> int:
        """A multiple of the group."""
        return self.width // self.headdim // self.group * self.group

    @property
    def nheads_kv(self) -> int:
        return self.nheads // self.group

    @property
    def headdims(self) -> tuple[int, int]:
        """Of q and k, and of v."""
        return self.headdim, self.headdim_v or self.headdim

    def described(self) -> dict[str, Any]:
        """The fields and what follows from them, as records have them."""
        heads = {"nheads": self.nheads, "nheads_kv": self.nheads_kv}
        return {**self._asdict(), **heads, "batch": len(self.rows)}

    @property
    def window_size(self) -> tuple[int, int]:
        return self.window, 0 if self.causal else self.window

    @property
    def lengths(self) -> list[int]:
        """Of the sequences, the longest first; the same for every run."""
        if not self.varlen:
            return [self.seqlen] * max(1, self.tokens // self.seqlen)
        draw = random.Random(0)
        lengths = [self.seqlen]
        while (rest := self.tokens - sum(lengths)) > 0:
            lengths.append(min(rest, self._draw_length(draw)))
        return lengths

    def _draw_length(self, draw: random.Random) -> int:
        shortest = min(self.shortest, self.seqlen)
        if self.log_uniform:
            return round(math.exp(draw.uniform(math.log(shortest), math.log(self.seqlen))))
        return draw.randint(shortest, self.seqlen)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence: prefills, then the others, the longest first."""
        others = [(self.queries or n, self.keys or n) for n in self.lengths]
        return [(self.prefill, self.prefill)] * self.prefills + others

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries of a sequence, and the most keys."""
        queries, keys = zip(*self.rows, strict=True)
        return max(queries), max(keys)

    def visible(self, query: int, queries: int, keys: int) -> range:
        """Keys that one of ``queries`` sees; the last query and the last key have one place."""
        left, right = self.window_size
        same = query + keys - queries  # the key at the query's own place
        return range(
            max(0, same - left) if left >= 0 else 0,
            min(keys, same + right + 1) if right >= 0 else keys,
        )

    @property
    def flops(self) -> float:
        """Of the matrix products, over the visible pairs of a query and a key.

        As in the FlashAttention papers, a causal mask alone over equal lengths hides half of them.
        """
        if self.window < 0 and not self.varlen and not self.queries and not self.keys:
            pairs = sum(n**2 for n in self.lengths) * (0.5 if self.causal else 1.0)
        else:
            pairs = sum(len(self.visible(i, n, m)) for n, m in self.rows for i in range(n))
        columns = sum(x * y for x, y in zip(MATMULS[self.direction], self.headdims, strict=True))
        return 2.0 * self.nheads * columns * pairs

    @property
    def bytes(self) -> int:
        """The least that is read and written: each tensor of the definition, once.

        The forward reads q and the keys and values that some query sees, and writes out. The
        backward reads q, k, v and the gradient of out, and writes the gradients of q, k and v. New
        keys and values are read and written once more.
        """
        queries, keys = 0, 0
        for n, m in self.rows:
            first, last = self.visible(0, n, m), self.visible(n - 1, n, m)
            queries += n
            keys += max(0, last.stop - first.start)
        q, k = queries * self.nheads, keys * self.nheads_kv
        d, dv = self.headdims
        forward, backward = (q + k) * (d + dv), q * (2 * d + dv) + 2 * k * (d + dv)
        forward += 2 * queries * self.nheads_kv * (d + dv) * self.append
        elements = {"forward": forward, "backward": backward, "both": forward + backward}
        size = DTYPES[self.dtype].itemsize
        cached = (k + queries * self.nheads_kv * self.append) * (d + dv)
        return elements[self.direction] * size - cached * (size - 1) * self.fp8_cache


class Inputs(NamedTuple):
    """(batch, seqlen, heads, headdim), or (total, heads, headdim) with cu_seqlens_q and _k.

    With queries, k and v are a KV cache: (batch, seqlen, heads, headdim), or (pages, page_size,
    heads, headdim) with block_table. With prefills, its q is packed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens_q: Tensor | None  # (batch + 1,)
    cu_seqlens_k: Tensor | None  # (batch + 1,); the same tensor where the lengths are the same
    alibi_slopes: Tensor | None  # (heads,)
    cache_seqlens: Tensor | None  # (batch,)
    block_table: Tensor | None  # (batch, pages of a sequence); the pages lie in random order
    # k, v, rotary_cos and rotary_sin of flash_attn_with_kvcache: what is appended.
    new: dict[str, Tensor] | None = None


def sums(lengths: Sequence[int], device: str | torch.device) -> Tensor:
    """(batch + 1,) int32: where each sequence begins, and the end of the last."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def make_inputs(case: Case, device: str) -> Inputs:
    queries, keys = zip(*case.rows, strict=True)
    batch, longest = len(keys), max(keys)
    if case.prefills and not (case.queries and case.page_size):
        raise ValueError("prefills beside decoding are for caches in pages")
    # Its own: a failed capture of a CUDA graph leaves the default one unusable.
    draw = torch.Generator(device).manual_seed(0)

    def random_heads(rows: tuple[int, ...], nheads: int, headdim: int, leaf: bool = True) -> Tensor:
        shape, dtype = (*rows, nheads, headdim), DTYPES[case.dtype]
        x = torch.randn(shape, device=device, dtype=dtype, generator=draw)
        return x.requires_grad_(leaf and case.direction != "forward")

    rows_q: tuple[int, ...] = (batch, queries[0])
    rows_k: tuple[int, ...] = (batch, longest)
    cu_seqlens_q = cu_seqlens_k = cache_seqlens = block_table = None
    if case.queries:
        cache_seqlens = torch.tensor(keys, dtype=torch.int32, device=device)
        cache_seqlens -= case.queries * case.append
        if case.page_size:
            pages = -(-longest // case.page_size)  # of a sequence
            rows_k = (batch * pages, case.page_size)
            order = torch.randperm(batch * pages, device=device, generator=draw)
            block_table = order.int().view(batch, pages)
        if case.prefills:
            rows_q = (sum(queries),)
            cu_seqlens_q, cu_seqlens_k = sums(queries, device), sums(keys, device)
    elif case.varlen:
        rows_q, rows_k = (sum(queries),), (sum(keys),)
        cu_seqlens_q = sums(queries, device)
        cu_seqlens_k = sums(keys, device) if case.keys else cu_seqlens_q
    slopes = 2.0 ** (-8 * torch.arange(1, case.nheads + 1, device=device) / case.nheads)
    headdim, headdim_v = case.headdims
    new = None
    if case.append:
        frequencies = 10000 ** (-torch.arange(0, headdim, 2, device=device) / headdim)
        angles = torch.outer(torch.arange(longest, device=device), frequencies)
        new = {
            "k": random_heads(rows_q, case.nheads_kv, headdim),
            "v": random_heads(rows_q, case.nheads_kv, headdim_v),
            "rotary_cos": angles.cos().to(DTYPES[case.dtype]),
            "rotary_sin": angles.sin().to(DTYPES[case.dtype]),
        }
    k = random_heads(rows_k, case.nheads_kv, headdim)
    v = random_heads(rows_k, case.nheads_kv, headdim_v)
    return Inputs(
        q=random_heads(rows_q, case.nheads, headdim),
        k=k.to(FP8) if case.fp8_cache else k,
        v=v.to(FP8) if case.fp8_cache else v,
        dout=random_heads(rows_q, case.nheads, headdim_v, leaf=False),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        alibi_slopes=slopes if case.alibi else None,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        new=new,
    )
