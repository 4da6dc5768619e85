"""Ulysses: a rank has some tokens of all heads, and attends with some heads of all tokens.

(Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models", 2023.) A rank's heads are two parts, so that messages travel while the
other part is computed:

    forward     messages   q, k, v of 1 | q, k, v of 2   | out of 1 and 2
                compute                 | part 1, part 2 |

    backward    messages   dout of 2 | dout of 1 | dq, dk, dv of 2 | dq, dk, dv of 1
                compute              | part 2    | part 1          |

Computing waits for three tensors of part 1, and for one of part 2: part 1 is the smaller one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn import _ops
from flash_attn._differentiation import differentiable_once
from flash_attn.distributed import _ring
from flash_attn.distributed._layout import as_slice
from flash_attn.distributed._messages import Messages, give_way
from flash_attn.distributed._ring import Call

# Tokens times heads of a part, at least: fewer would not keep a GPU busy.
LEAST_PART = 2**15

Heads = tuple[range, ...]  # of each rank


class Part(NamedTuple):
    """What is exchanged and computed at a time."""

    heads: Heads
    heads_kv: Heads


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
        """The first has an eighth of a rank's heads; all are one where heads or tokens are few."""
        ranks, group = len(self.tokens), self.nheads // self.nheads_kv
        share, share_kv = self.nheads // ranks, self.nheads_kv // ranks
        first = max(1, share_kv // 8)
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
        arriving = _start_to_heads(row, division.parts, [q], [k, v])
        side = _side_stream(q.device) if len(arriving) > 1 else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(q.device))
        saved: list[Tensor] = []
        with _all_waited_for(arriving):
            for (part, exchange, qkv), stream in zip(arriving, (None, side), strict=False):
                with torch.cuda.stream(stream):  # None: where we are
                    exchange.wait()
                    if side is not None:
                        give_way(q.device)
                    of_part, sinks = _of_part(call, division, part, s_aux)
                    results = _ring.forward(of_part, *_with_own_keys(division, part, *qkv), sinks)
                saved += [*qkv, *results]
        if side is not None:
            torch.cuda.current_stream(q.device).wait_stream(side)
        leaving = _Exchange(row)
        for part, (*_, part_out, part_lse) in zip(division.parts, _in_fives(saved), strict=True):
            leaving.to_tokens(part_out, part.heads, out)
            if lse is not None:
                leaving.to_tokens(_by_token(part_lse), part.heads, lse)
        leaving.start()
        leaving.wait()
        ctx.call, ctx.row, ctx.wants_lse = call, row, wants_lse
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(s_aux, *saved)
        return out, None if lse is None else _by_head(lse)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        row: Row = ctx.row
        division = row.division
        s_aux, *saved = ctx.saved_tensors
        saved_parts = _in_fives(saved)
        q, k, v, out, lse = saved_parts[0]
        dq = _of_all_heads(division, q, division.nheads)
        dkv = [_of_all_heads(division, x, division.nheads_kv) for x in (k, v)]
        if division.shares_keys:  # what ranks have of the same head is added up
            dkv = [torch.zeros_like(x, dtype=lse.dtype) for x in dkv]
        ds_aux = torch.zeros_like(s_aux) if ctx.needs_input_grad[3] else None
        if dout is None:
            dout = _of_all_heads(division, out, division.nheads).zero_()
        if ctx.wants_lse and dlse is None:  # other ranks may have one: all send as much
            dlse = dout.new_zeros(*dout.shape[:-1], dtype=lse.dtype).mT
        upstream = [dout] if dlse is None else [dout, _by_token(dlse)]
        leaving = []
        # In the forward the larger part was the last one. Here it is the first one: of its tensors
        # one is waited for, of the other's three.
        coming = _start_to_heads(row, division.parts[::-1], upstream)
        with _all_waited_for(coming):
            for part, arriving, arrived in coming:
                arriving.wait()
                q, k, v, out, lse = saved_parts.pop()
                of_part, sinks = _of_part(ctx.call, division, part, s_aux)
                part_dlse = None if dlse is None else _by_head(arrived[1]).contiguous()
                part_dq, *part_dkv, delta = _ring.backward(
                    of_part,
                    *_with_own_keys(division, part, q, k, v),
                    out,
                    lse,
                    arrived[0],
                    part_dlse,
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


def _start_to_heads(
    row: Row, parts: Sequence[Part], queries: Sequence[Tensor], keys: Sequence[Tensor] = ()
) -> list[tuple[Part, "_Exchange", list[Tensor]]]:
    """The parts, what to wait for, and what there is then: their heads of these tensors."""
    found = []
    for part in parts:
        exchange = _Exchange(row)
        heads = [part.heads for _ in queries] + [part.heads_kv for _ in keys]
        tensors = exchange.to_heads([*queries, *keys], heads)
        exchange.start()
        exchange.put_own()
        found.append((part, exchange, tensors))
    return found


@contextmanager
def _all_waited_for(arriving: Sequence[tuple[Part, "_Exchange", list[Tensor]]]) -> Iterator[None]:
    """Also of an error: see Messages.under_way."""
    with ExitStack() as stack:
        for _, exchange, _ in arriving:
            stack.enter_context(exchange.messages.under_way())
        yield


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Where the second part of a forward fills the SMs that the first one leaves."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


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


def _in_fives(saved: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Of each part q, k, v, out and the log-sum-exp."""
    return [saved[i : i + 5] for i in range(0, len(saved), 5)]


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
        self.messages = Messages(row.members)
        self._own: list[tuple[Tensor, Tensor, bool]] = []
        self._arriving: list[tuple[Tensor, Tensor, bool]] = []

    def to_heads(self, given: Sequence[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
        """From (batch, tokens of this rank, all heads, dim) to (batch, all tokens, its heads, dim).

        heads: of each tensor those of each rank. What is of one kind travels as one tensor, in
        which the heads of one follow those of the other.
        """
        if len({(x.dtype, x.shape[-1]) for x in given}) > 1:
            return [self.to_heads([x], [y])[0] for x, y in zip(given, heads, strict=True)]
        division, x = self._division, given[0]
        counts = [[len(of_each[rank]) for of_each in heads] for rank, _ in division.rows]
        own = counts[division.rank]
        result = x.new_empty(x.shape[0], sum(division.tokens), sum(own), x.shape[3])
        for rank, rows in division.rows:
            pieces = [of[:, :, as_slice(y[rank])] for of, y in zip(given, heads, strict=True)]
            if rank == division.rank:
                targets = result[:, rows].split(own, 2)
                self._own += [(*pair, False) for pair in zip(targets, pieces, strict=True)]
                continue
            sent = x.new_empty(*x.shape[:2], sum(counts[rank]), x.shape[3])
            for target, piece in zip(sent.split(counts[rank], 2), pieces, strict=True):
                _put(target, piece)
            self.messages.send(sent, rank)
            self._receive(rank, result[:, rows])
        return list(result.split(own, 2))

    def to_tokens(self, x: Tensor, heads: Heads, result: Tensor, adds: bool = False) -> None:
        """Back again, to the heads' places in (batch, tokens of this rank, all heads, dim)."""
        for rank, rows in self._division.rows:
            target = result[:, :, as_slice(heads[rank])]
            if rank == self._division.rank:
                self._own.append((target, x[:, rows], adds))
                continue
            self.messages.send(x[:, rows].contiguous(), rank)
            self._receive(rank, target, x.dtype, adds)

    def _receive(
        self, rank: int, target: Tensor, dtype: torch.dtype | None = None, adds: bool = False
    ) -> None:
        if target.is_contiguous() and not adds:
            self.messages.receive(target, rank)
            return
        arrived = target.new_empty(target.shape, dtype=dtype)
        self.messages.receive(arrived, rank)
        self._arriving.append((target, arrived, adds))

    def start(self) -> None:
        self.messages.start()

    def put_own(self) -> None:
        """Copy what a rank sends itself, at a time when messages are waited for."""
        for put in self._own:
            _put(*put)
        self._own = []

    def wait(self) -> None:
        """Let what is launched next wait for the tensors."""
        self.put_own()
        self.messages.wait()
        for put in self._arriving:
            _put(*put)


def _put(target: Tensor, x: Tensor, adds: bool = False) -> None:
    """Copy or add. PyTorch copies pieces of tensors faster if they have fewer, wider elements."""
    if adds:
        target += x
    elif x.numel() and _is_wide(x) and _is_wide(target):
        target.view(torch.complex128).copy_(x.view(torch.complex128))
    else:
        target.copy_(x)


def _is_wide(x: Tensor) -> bool:
    """Whether its rows consist of whole 16 bytes."""
    elements = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    sizes = x.data_ptr(), *(n * x.itemsize for n in elements)
    return x.stride(-1) == 1 and all(n % 16 == 0 for n in sizes)
