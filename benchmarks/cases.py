"""Attention problems: their sizes, what they count for, their tensors."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MATMULS = {"forward": 2, "backward": 5, "both": 7}


class Case(NamedTuple):
    """Self-attention of ``tokens`` tokens and ``width`` columns, or queries against a KV cache."""

    direction: str  # of MATMULS; backward is that alone
    dtype: str  # of DTYPES
    headdim: int
    causal: bool
    seqlen: int  # the longest, if varlen
    window: int = -1  # keys that a query sees to its left and, unless causal, to its right
    group: int = 1  # query heads of a key head
    varlen: bool = False  # sequences of random lengths, packed; of a KV cache the lengths alone
    shortest: int = 64  # of the random lengths
    dropout_p: float = 0.0
    softcap: float = 0.0
    alibi: bool = False
    deterministic: bool = False
    tokens: int = 16384
    width: int = 2048
    queries: int = 0  # of each sequence, whose keys are a KV cache; 0: self-attention
    page_size: int = 0  # of the KV cache; 0: the keys of a sequence lie together

    @property
    def nheads(self) -> int:
        """A multiple of the group."""
        return self.width // self.headdim // self.group * self.group

    @property
    def nheads_kv(self) -> int:
        return self.nheads // self.group

    @property
    def window_size(self) -> tuple[int, int]:
        return self.window, 0 if self.causal else self.window

    @property
    def lengths(self) -> list[int]:
        """Keys of the sequences; the same for every run."""
        if not self.varlen:
            return [self.seqlen] * max(1, self.tokens // self.seqlen)
        draw = random.Random(0)
        lengths = [self.seqlen]
        while (rest := self.tokens - sum(lengths)) > 0:
            lengths.append(min(rest, draw.randint(min(self.shortest, self.seqlen), self.seqlen)))
        return lengths

    def visible(self, query: int, seqlen: int) -> range:
        """Keys that a query sees in a sequence of ``seqlen`` keys; the last query is the newest."""
        left, right = self.window_size
        same = query + seqlen - (self.queries or seqlen)  # the key at the query's own place
        return range(
            max(0, same - left) if left >= 0 else 0,
            min(seqlen, same + right + 1) if right >= 0 else seqlen,
        )

    @property
    def flops(self) -> float:
        """Of the matrix products, over the visible pairs of a query and a key.

        As in the FlashAttention papers, a causal mask alone over equal lengths hides half of them.
        """
        if self.window < 0 and not self.varlen and not self.queries:
            pairs = sum(n**2 for n in self.lengths) * (0.5 if self.causal else 1.0)
        else:
            pairs = sum(
                len(self.visible(i, n)) for n in self.lengths for i in range(self.queries or n)
            )
        return MATMULS[self.direction] * 2.0 * self.nheads * self.headdim * pairs

    @property
    def bytes(self) -> int:
        """The least that is read and written: each tensor of the definition, once.

        The forward reads q and the keys and values that some query sees, and writes out. The
        backward reads q, k, v and the gradient of out, and writes the gradients of q, k and v.
        """
        queries, keys = 0, 0
        for seqlen in self.lengths:
            of_sequence = self.queries or seqlen
            first, last = self.visible(0, seqlen), self.visible(of_sequence - 1, seqlen)
            queries += of_sequence
            keys += max(0, last.stop - first.start)
        q, k = queries * self.nheads, keys * self.nheads_kv
        rows = {"forward": 2 * q + 2 * k, "backward": 3 * q + 4 * k, "both": 5 * q + 6 * k}
        return rows[self.direction] * self.headdim * DTYPES[self.dtype].itemsize


class Inputs(NamedTuple):
    """(batch, seqlen, heads, headdim), or (total, heads, headdim) with cu_seqlens.

    With queries, k and v are a KV cache: (batch, seqlen, heads, headdim), or (pages, page_size,
    heads, headdim) with block_table.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor | None  # (batch + 1,)
    alibi_slopes: Tensor | None  # (heads,)
    cache_seqlens: Tensor | None  # (batch,)
    block_table: Tensor | None  # (batch, pages of a sequence); the pages lie in random order


def make_inputs(case: Case, device: str) -> Inputs:
    lengths = case.lengths
    batch = len(lengths)
    # Its own: a failed capture of a CUDA graph leaves the default one unusable.
    draw = torch.Generator(device).manual_seed(0)

    def random_heads(rows: tuple[int, ...], nheads: int, leaf: bool = True) -> Tensor:
        shape, dtype = (*rows, nheads, case.headdim), DTYPES[case.dtype]
        x = torch.randn(shape, device=device, dtype=dtype, generator=draw)
        return x.requires_grad_(leaf and case.direction != "forward")

    rows_q = rows_k = (sum(lengths),) if case.varlen else (batch, case.seqlen)
    cu_seqlens = cache_seqlens = block_table = None
    if case.queries:
        rows_q, rows_k = (batch, case.queries), (batch, case.seqlen)
        cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
        if case.page_size:
            pages = -(-case.seqlen // case.page_size)  # of a sequence
            rows_k = (batch * pages, case.page_size)
            order = torch.randperm(batch * pages, device=device, generator=draw)
            block_table = order.int().view(batch, pages)
    elif case.varlen:
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    slopes = 2.0 ** (-8 * torch.arange(1, case.nheads + 1, device=device) / case.nheads)
    return Inputs(
        q=random_heads(rows_q, case.nheads),
        k=random_heads(rows_k, case.nheads_kv),
        v=random_heads(rows_k, case.nheads_kv),
        dout=random_heads(rows_q, case.nheads, leaf=False),
        cu_seqlens=cu_seqlens,
        alibi_slopes=slopes if case.alibi else None,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
    )
