"""Ulysses: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

(Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models", 2023.) One all-to-all moves q, k and v together, one moves the output.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn.distributed._layout import as_slice

Heads = Sequence[Sequence[range]]


@dataclass(frozen=True)
class Division:
    """Who has which tokens and heads, in a row of ranks."""

    rank: int
    tokens: tuple[int, ...]  # of each rank
    nheads: int
    nheads_kv: int

    def heads(self, rank: int) -> range:
        """The query heads of a rank."""
        share = self.nheads // len(self.tokens)
        return range(rank * share, (rank + 1) * share)

    def heads_kv(self, rank: int) -> range:
        """The key heads that they read: ranks whose heads share one get it each."""
        group, heads = self.nheads // self.nheads_kv, self.heads(rank)
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    def key_of_each(self) -> list[int] | None:
        """Of each query head its key head among those here; None if all share with as many."""
        group, heads = self.nheads // self.nheads_kv, self.heads(self.rank)
        first, *_ = heads_kv = self.heads_kv(self.rank)
        keys = [head // group - first for head in heads]
        share, rest = divmod(len(heads), len(heads_kv))
        even = [i // share for i in range(len(heads))]
        return None if rest == 0 and keys == even else keys


class ToHeads(torch.autograd.Function):
    """Tensors (batch, tokens, heads, dim) of a rank's tokens to those of its heads.

    ``heads`` has, for each tensor, the heads of each rank. Ranks may have heads in common.
    """

    @staticmethod
    def forward(
        ctx: Any, members: dist.ProcessGroup, division: Division, heads: Heads, *given: Tensor
    ) -> Any:
        ctx.members, ctx.division, ctx.heads = members, division, heads
        return tuple(_to_heads(members, division, heads, given))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_to_tokens(ctx.members, ctx.division, ctx.heads, gradients)


class ToTokens(torch.autograd.Function):
    """Back again; what ranks have of the same head is added up."""

    @staticmethod
    def forward(
        ctx: Any, members: dist.ProcessGroup, division: Division, heads: Heads, *given: Tensor
    ) -> Any:
        ctx.members, ctx.division, ctx.heads = members, division, heads
        return tuple(_to_tokens(members, division, heads, given))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_to_heads(ctx.members, ctx.division, ctx.heads, gradients)


def _to_heads(
    members: dist.ProcessGroup, division: Division, heads: Heads, given: Sequence[Tensor]
) -> list[Tensor]:
    outgoing = [
        [x[:, :, as_slice(part)] for x, part in zip(given, parts, strict=True)]
        for parts in zip(*heads, strict=True)  # for each rank
    ]
    own = outgoing[division.rank]
    shapes = [[(x.shape[0], tokens, *x.shape[2:]) for x in own] for tokens in division.tokens]
    incoming = _exchange(members, outgoing, shapes)
    return [torch.cat(parts, 1) for parts in zip(*incoming, strict=True)]


def _to_tokens(
    members: dist.ProcessGroup, division: Division, heads: Heads, given: Sequence[Tensor]
) -> list[Tensor]:
    by_rank = [x.split(division.tokens, 1) for x in given]
    outgoing = list(zip(*by_rank, strict=True))
    own = outgoing[division.rank]
    shapes = [
        [(*x.shape[:2], len(part), x.shape[3]) for x, part in zip(own, parts, strict=True)]
        for parts in zip(*heads, strict=True)
    ]
    incoming = _exchange(members, outgoing, shapes)
    results = []
    for parts, x in zip(heads, zip(*incoming, strict=True), strict=True):
        if parts[-1].stop == sum(map(len, parts)):  # nothing in common
            results.append(torch.cat(x, 2))
            continue
        batch, tokens, _, dim = x[0].shape
        sums = torch.promote_types(x[0].dtype, torch.float32)
        total = x[0].new_zeros(batch, tokens, parts[-1].stop, dim, dtype=sums)
        for part, values in zip(parts, x, strict=True):
            total[:, :, as_slice(part)] += values
        results.append(total.to(x[0].dtype))
    return results


def _exchange(
    members: dist.ProcessGroup,
    outgoing: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
) -> list[list[Tensor]]:
    """Send each rank its tensors, of one dtype; return what comes from each, of these shapes."""
    sent = torch.cat([x.flatten() for tensors in outgoing for x in tensors])
    sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    received = sent.new_empty(sum(map(sum, sizes)))
    width = sent.element_size()  # as bytes: not every backend knows every dtype
    dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [width * sum(of_rank) for of_rank in sizes],
        [width * sum(x.numel() for x in tensors) for tensors in outgoing],
        group=members,
    )
    pieces = iter(received.split([size for of_rank in sizes for size in of_rank]))
    return [[next(pieces).view(*shape) for shape in of_rank] for of_rank in shapes]
