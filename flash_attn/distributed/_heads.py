"""Ulysses: a rank has some tokens of all heads, and attends with some heads of all tokens.

(Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models", 2023.) A rank's heads are two parts, so that most messages travel
while the other part is computed:

    forward     messages   q, k, v of 1 | q, k, v of 2 | out of 1 | out of 2
                compute                 | part 1       | part 2   |

    backward    messages   dout of 2 | dout of 1 | dq, dk, dv of 2 | dq, dk, dv of 1
                compute              | part 2    | part 1          |

Computing waits for three tensors of part 1, and for one of part 2: part 1 is the smaller one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_attn import _ops
from flash_attn.distributed import _ring
from flash_attn.distributed._layout import as_slice
from flash_attn.distributed._messages import Messages
from flash_attn.distributed._ring import Call

# Tokens times heads of a part, at least: fewer would not keep a GPU busy.
LEAST_PART = 2**16


class Part(NamedTuple):
    """Of each rank the heads that are exchanged and computed at a time."""

    heads: tuple[range, ...]
    heads_kv: tuple[range, ...]


@dataclass(frozen=True)
class Division:
    """Who has which tokens and heads, in a row of ranks."""

    rank: int
    tokens: tuple[int, ...]  # of each rank
    nheads: int
    nheads_kv: int

    @property
    def rows(self) -> Iterator[tuple[int, slice]]:
        """The ranks, and where their tokens are among all."""
        start = 0
        for rank, tokens in enumerate(self.tokens):
            yield rank, slice(start, start + tokens)
            start += tokens

    @cached_property
    def parts(self) -> list[Part]:
        """The first has a quarter of a rank's heads; all are one where heads or tokens are few."""
        ranks, group = len(self.tokens), self.nheads // self.nheads_kv
        share, share_kv = self.nheads // ranks, self.nheads_kv // ranks
        first = max(1, share_kv // 4)
        if self.nheads_kv % ranks or share_kv < 2 or first * group * sum(self.tokens) < LEAST_PART:
            # Ranks whose query heads share a key head get it each.
            heads = [range(rank * share, (rank + 1) * share) for rank in range(ranks)]
            heads_kv = [range(x.start // group, (x.stop - 1) // group + 1) for x in heads]
            return [Part(tuple(heads), tuple(heads_kv))]
        parts = []
        for start, stop in pairwise([0, first, share_kv]):
            heads_kv = [range(r * share_kv + start, r * share_kv + stop) for r in range(ranks)]
            heads = [range(x.start * group, x.stop * group) for x in heads_kv]
            parts.append(Part(tuple(heads), tuple(heads_kv)))
        return parts

    @cached_property
    def shares_keys(self) -> bool:
        """Whether ranks have key heads in common."""
        return sum(len(x) for part in self.parts for x in part.heads_kv) > self.nheads_kv

    def key_of_each(self, part: Part) -> list[int] | None:
        """Of each query head its key head among those here; None if all share with as many."""
        heads, heads_kv = part.heads[self.rank], part.heads_kv[self.rank]
        keys = [head // (self.nheads // self.nheads_kv) - heads_kv.start for head in heads]
        share, rest = divmod(len(heads), len(heads_kv))
        even = [i // share for i in range(len(heads))]
        return None if rest == 0 and keys == even else keys


class Row(NamedTuple):
    """The ranks that divide heads."""

    members: dist.ProcessGroup
    division: Division


class HeadsAttention(torch.autograd.Function):
    """Attention of (batch, tokens, heads, headdim) to the keys of all ranks: out, log-sum-exp.

    The second is None unless it is asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        s_aux: Tensor | None,
        call: Call,
        row: Row,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        division = row.division
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse: Tensor | None = None
        if wants_lse:
            lse = q.new_empty(*q.shape[:-1], 1, dtype=torch.promote_types(q.dtype, torch.float32))
        saved: list[Tensor] = []
        leaving = []
        for part, qkv in _arriving(row, division.parts, [q], [k, v]):
            of_part, sinks = _of_part(call, division, part, s_aux)
            results = _ring.forward(of_part, *_with_own_keys(division, part, *qkv), sinks)
            leaving.append(exchange := _Exchange(row))
            exchange.to_tokens(results[0], part.heads, out)
            if lse is not None:
                exchange.to_tokens(_by_token(results[1]), part.heads, lse)
            exchange.start()
            saved += [*qkv, *results]
        for exchange in leaving:
            exchange.wait()
        ctx.call, ctx.row = call, row
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(s_aux, *saved)
        return out, None if lse is None else _by_head(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        row: Row = ctx.row
        division = row.division
        s_aux, *saved = ctx.saved_tensors
        saved_parts = [saved[i : i + 5] for i in range(0, len(saved), 5)]
        q, k, v, out, lse = saved_parts[0]
        dq = _of_all_heads(division, q, division.nheads)
        dkv = [_of_all_heads(division, x, division.nheads_kv) for x in (k, v)]
        if division.shares_keys:  # what ranks have of the same head is added up
            dkv = [torch.zeros_like(x, dtype=lse.dtype) for x in dkv]
        ds_aux = torch.zeros_like(s_aux) if ctx.needs_input_grad[3] else None
        if dout is None:
            dout = _of_all_heads(division, out, division.nheads).zero_()
        upstream = [dout] if dlse is None else [dout, _by_token(dlse)]
        leaving = []
        # In the forward the larger part was the last one. Here it is the first one: of its tensors
        # one is waited for, of the other's three.
        for part, arrived in _arriving(row, division.parts[::-1], upstream, []):
            q, k, v, out, lse = saved_parts.pop()
            of_part, sinks = _of_part(ctx.call, division, part, s_aux)
            part_dlse = None if dlse is None else _by_head(arrived[1]).contiguous()
            part_dq, *part_dkv, delta = _ring.backward(
                of_part, *_with_own_keys(division, part, q, k, v), out, lse, arrived[0], part_dlse
            )
            leaving.append(exchange := _Exchange(row))
            exchange.to_tokens(part_dq, part.heads, dq)
            for total, x, keys in zip(dkv, part_dkv, (k, v), strict=True):
                x = _summed_by_key(division, part, x, keys)
                exchange.to_tokens(x, part.heads_kv, total, adds=division.shares_keys)
            exchange.start()
            if ds_aux is not None and sinks is not None:
                own = as_slice(part.heads[division.rank])
                ds_aux[own] = _ops._sink_gradient(sinks, lse, delta)
        for exchange in leaving:
            exchange.wait()
        dk, dv = (x.to(k.dtype) for x in dkv)
        return dq, dk, dv, ds_aux, None, None, None


def _arriving(
    row: Row, parts: Sequence[Part], queries: list[Tensor], keys: list[Tensor]
) -> Iterator[tuple[Part, list[Tensor]]]:
    """The parts in turn, with their heads of these tensors; those of the next are under way."""

    def start(part: Part) -> tuple[_Exchange, list[Tensor]]:
        exchange = _Exchange(row)
        tensors = [exchange.to_heads(x, part.heads) for x in queries]
        tensors += [exchange.to_heads(x, part.heads_kv) for x in keys]
        exchange.start()
        return exchange, tensors

    starts = map(start, parts)
    following = next(starts)
    for part in parts:
        exchange, tensors = following
        following = next(starts, following)
        exchange.wait()
        yield part, tensors


def _of_part(
    call: Call, division: Division, part: Part, s_aux: Tensor | None
) -> tuple[Call, Tensor | None]:
    """The call for a part's heads of this rank, and their attention sinks."""
    own = as_slice(part.heads[division.rank])
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[..., own]
    place = call.place._replace(head=own.start)
    return replace(call, place=place, alibi_slopes=slopes), None if s_aux is None else s_aux[own]


def _with_own_keys(
    division: Division, part: Part, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A key head for each query head, where these do not come in equal groups."""
    if (keys := division.key_of_each(part)) is not None:
        k, v = (torch.stack([x[:, :, i] for i in keys], 2) for x in (k, v))
    return q, k, v


def _summed_by_key(division: Division, part: Part, x: Tensor, like: Tensor) -> Tensor:
    """Gradients of such keys, back to those that they are of."""
    if (keys := division.key_of_each(part)) is None:
        return x
    total = torch.zeros_like(like, dtype=torch.promote_types(x.dtype, torch.float32))
    for i, key in enumerate(keys):
        total[:, :, key] += x[:, :, i]
    return total.to(x.dtype)


def _of_all_heads(division: Division, x: Tensor, nheads: int) -> Tensor:
    """Memory for this rank's tokens of a tensor, of which some heads are here."""
    tokens = division.tokens[division.rank]
    return x.new_empty(x.shape[0], tokens, nheads, x.shape[3])


def _by_token(lse: Tensor) -> Tensor:
    """(batch, heads, tokens) to (batch, tokens, heads, 1)."""
    return lse.mT[..., None]


def _by_head(lse: Tensor) -> Tensor:
    return lse[..., 0].mT


class _Exchange:
    """Tensors on their way from tokens to heads, or back."""

    def __init__(self, row: Row) -> None:
        self._division = row.division
        self._messages = Messages(row.members)
        self._own: list[tuple[Tensor, Tensor, bool]] = []
        self._arriving: list[tuple[Tensor, Tensor, bool]] = []

    def to_heads(self, x: Tensor, heads: Sequence[range]) -> Tensor:
        """Return (batch, all tokens, heads of this rank, dim), of what each has of its tokens."""
        division = self._division
        shape = x.shape[0], sum(division.tokens), len(heads[division.rank]), x.shape[3]
        result = x.new_empty(shape)
        for rank, rows in division.rows:
            self._swap(rank, x[:, :, as_slice(heads[rank])], result[:, rows])
        return result

    def to_tokens(
        self, x: Tensor, heads: Sequence[range], result: Tensor, adds: bool = False
    ) -> None:
        """Back again, to the heads' places in (batch, tokens of this rank, all heads, dim)."""
        for rank, rows in self._division.rows:
            self._swap(rank, x[:, rows], result[:, :, as_slice(heads[rank])], adds)

    def _swap(self, rank: int, x: Tensor, target: Tensor, adds: bool = False) -> None:
        """Send a rank a tensor; have in ``target`` the one that comes from there."""
        if rank == self._division.rank:
            self._own.append((target, x, adds))
            return
        direct = target.is_contiguous() and target.dtype == x.dtype and not adds
        arrived = target if direct else x.new_empty(target.shape)
        self._messages.send(x.contiguous(), rank)
        self._messages.receive(arrived, rank)
        if not direct:
            self._arriving.append((target, arrived, adds))

    def start(self) -> None:
        self._messages.start()
        for target, x, adds in self._own:
            _put(target, x, adds)

    def wait(self) -> None:
        """Let what is launched next wait for the tensors."""
        self._messages.wait()
        for target, arrived, adds in self._arriving:
            _put(target, arrived, adds)


def _put(target: Tensor, x: Tensor, adds: bool) -> None:
    if adds:
        target += x
    else:
        target.copy_(x)
