"""Ring attention: every rank keeps its queries; keys and values come to it.

In step s a rank attends to the keys of the rank s before it, which that rank sends itself: what
step s + 1 needs is on its way while step s computes. Nobody forwards, so a rank sends what the
other one sees, and nothing to those that see none of it. In the backward the gradients of keys go
straight back the same way, one step later, and are added up where the keys live, in a fixed order.
(Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; the
zigzag order of tokens is in _layout.py.)

    forward     messages   K, V of 1 | K, V of 2 | K, V of 3 |
                compute    own keys  | keys of 1 | keys of 2 | keys of 3

    backward    messages   K, V of 1 | K, V of 2 | K, V of 3 |           |
                                     |           | dK, dV 1  | dK, dV 2  | dK, dV 3
                compute    own keys  | keys of 1 | keys of 2 | keys of 3 | own keys

The messages of a step are one group: see _messages.py.
"""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn import _arguments, _backends, _ops
from flash_attn._arguments import Attention, Options, Place
from flash_attn._differentiation import differentiable_once
from flash_attn.distributed._layout import as_slice, overlap, size_of, without
from flash_attn.distributed._messages import Messages, give_way
from flash_attn.distributed._plan import Block, Plan, Step


@dataclass(frozen=True)
class Call:
    """What all blocks of a call share."""

    plan: Plan
    ring: dist.ProcessGroup | None
    options: Options
    place: Place  # of this rank's heads among all
    alibi_slopes: Tensor | None  # of these heads
    rng_state: Tensor | None


class RingAttention(torch.autograd.Function):
    """Attention of (batch, tokens, heads, headdim) to the keys of all ranks: out, log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(call, q, k, v, s_aux)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, s_aux, out, lse)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, s_aux, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, delta = backward(ctx.call, q, k, v, out, lse, dout, dlse)
        ds_aux = None
        if s_aux is not None and ctx.needs_input_grad[3]:
            ds_aux = _ops._sink_gradient(s_aux, lse, delta)
        return dq, dk, dv, ds_aux, None


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None
) -> tuple[Tensor, Tensor]:
    steps = call.plan.steps
    result = _Result(q, v, sum(len(step.blocks) for step in steps))
    keys = [k, v]
    for distance, step in enumerate(steps):
        messages = _Messages(call.ring)
        following = messages.exchange_keys(distance + 1, steps, k, v)
        messages.start()
        if messages.are_under_way:
            give_way(q.device)
        with messages.under_way():
            for block in step.blocks:
                result.add(block.rows, *attend(call, block, q, keys, s_aux))
        keys = following
    return result.whole()


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and delta."""
    steps = call.plan.steps
    first, *others, last = call.plan.backward
    own = len(first) + len(last)
    sum_of = partial(_Sum, dtype=lse.dtype)
    dq = sum_of(q, q.shape[1], parts=own + sum(map(len, others)))
    dk, dv = (sum_of(x, x.shape[1], parts=own + len(others)) for x in (k, v))
    delta = torch.zeros_like(lse)
    keys, gradients = [k, v], [dk, dv]
    for distance, blocks in enumerate(call.plan.backward):
        messages = _Messages(call.ring)
        following = messages.exchange_keys(distance + 1, steps, k, v)
        returning = messages.exchange_gradients(distance - 1, steps, gradients)
        messages.start()
        if distance == len(steps):
            keys, gradients = [k, v], [dk, dv]
        elif distance > 0:
            gradients = [sum_of(x, steps[distance].rows, parts=len(blocks)) for x in keys]
        with messages.under_way():
            for block in blocks:
                part_dq, part_dk, part_dv, part_delta = attend_backward(
                    call, block, dout, q, out, lse, dlse, keys
                )
                dq.add(block.rows, part_dq)
                gradients[0].add(block.cols, part_dk)
                gradients[1].add(block.cols, part_dv)
                if block.is_diagonal:
                    delta[:, :, as_slice(block.rows)] += part_delta
        keys = following
        for total, returned in zip((dk, dv), returning, strict=False):
            start = 0
            for rows in steps[distance - 1].sends:
                total.add(rows, returned[:, start : start + len(rows)])
                start += len(rows)
    return dq.whole(), dk.whole(), dv.whole(), delta


# ---- one block -----------------------------------------------------------------------------------


def attend(
    call: Call, block: Block, q: Tensor, keys: Sequence[Tensor], s_aux: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of a block: out (batch, rows, nheads, headdim_v), lse (batch, nheads, rows).

    Each query has one block with its own token among the keys: that counts the attention sink.
    """
    rows, cols = as_slice(block.rows), as_slice(block.cols)
    q, k, v = q[:, rows], *(x[:, cols] for x in keys)
    sinks = s_aux if block.is_diagonal else None
    slopes = _slopes(call, block)
    if (a := _placed(call, block, q, k, v, sinks)) is not None:
        out, lse, _ = _backends.forward(a, call.rng_state, False)
    else:
        x = call.options
        numbers = x.dropout_p, x.softmax_scale, False, *block.window, x.softcap, slopes, False
        in_16_bits = None, None, None, 0
        last = sinks, x.deterministic, *in_16_bits, call.rng_state
        if block.bounds is None:
            return _ops.flash_attn_forward(q, k, v, *numbers, *last)[:2]
        lengths = call.plan.lengths(block)
        unused = None, None, None, False, 0
        qkv = q[0], k[0], v[0]
        out, lse, *_ = _ops.flash_attn_varlen_forward(*qkv, *lengths, *numbers, *unused, *last)
    return (out, lse) if block.bounds is None else (out[None], lse[None])


def attend_backward(
    call: Call,
    block: Block,
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    keys: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A block's part of dq, dk and dv, from ``out`` and ``lse`` of all keys; and delta."""
    rows, cols = as_slice(block.rows), as_slice(block.cols)
    dout, q, out = (x[:, rows] for x in (dout, q, out))
    k, v = (x[:, cols] for x in keys)
    lse = lse[:, :, rows].contiguous()  # kernels would copy it, and not remember the launch
    dlse = None if dlse is None else dlse[:, :, rows]
    tensors = [dout, q, k, v, out, lse]
    if block.bounds is not None:
        tensors, dlse = [x[0] for x in tensors], None if dlse is None else dlse[0]
    if (a := _placed(call, block, q, k, v, None)) is not None:
        dout, q, k, v, out, lse = tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        delta = _backends.backward(a, dout, out, lse, dlse, dq, dk, dv, call.rng_state)
        results = dq, dk, dv, delta
    else:
        x = call.options
        numbers = x.dropout_p, x.softmax_scale, False, *block.window, x.softcap
        last = _slopes(call, block), x.deterministic, call.rng_state
        new = None, None, None
        if block.bounds is None:
            results = _ops.flash_attn_backward(*tensors, *new, *numbers, *last, dlse)[:4]
        else:
            lengths = call.plan.lengths(block)
            results = _ops.flash_attn_varlen_backward(
                *tensors, *new, *lengths, *numbers, *last, False, dlse
            )[:4]
    dq, dk, dv, delta = results if block.bounds is None else (x[None] for x in results)
    return dq, dk, dv, delta


def _placed(
    call: Call, block: Block, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None
) -> Attention | None:
    """The block as a part of the whole problem, if it has to know that it is one."""
    if block.place is None:
        return None
    row, column = block.place
    sequence = block.documents.start if block.documents is not None else 0
    place = call.place._replace(batch=sequence, row=row, column=column)
    if place == Place(q.shape[2]):
        return None
    left, right = block.window
    options = replace(call.options, window_left=left, window_right=right)
    slopes = _slopes(call, block)
    if block.bounds is None:
        a = _arguments.dense(q, k, v, options, slopes, s_aux)
    else:
        cu, _, longest, _ = call.plan.lengths(block)
        a = _arguments.varlen(q[0], k[0], v[0], cu, cu, longest, longest, options, slopes, s_aux)
    a = a._replace(place=place)
    if q.is_cuda and "odd_place" in a.features:
        _warn_of_slow_blocks()
    return a


@functools.cache
def _warn_of_slow_blocks() -> None:
    warnings.warn(
        "parts of a sequence that begin at no multiple of 16 have no CUDA kernel with dropout: "
        "they run in PyTorch operations, which is slow. Choose a length that is a multiple of 16 "
        "times the pieces that it is cut into; or silence this with use_backend('tiled').",
        UserWarning,
        stacklevel=2,
    )


def _slopes(call: Call, block: Block) -> Tensor | None:
    slopes = call.alibi_slopes
    if slopes is None or slopes.dim() == 1 or block.documents is None:
        return slopes
    return slopes[as_slice(block.documents)]


# ---- sums of blocks ------------------------------------------------------------------------------


class _Result:
    """out and log-sum-exp of all rows, from those of blocks; more than two add up in float32."""

    def __init__(self, q: Tensor, v: Tensor, parts: int) -> None:
        self._shape = *q.shape[:-1], v.shape[-1]
        self._like, self._parts = q, parts
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: range, part: Tensor, part_lse: Tensor) -> None:
        """Merge attention to more keys into that of some rows."""
        if self._out is None and len(rows) == self._shape[1]:
            self._out, self._lse = part, part_lse
            return
        out, lse = self._sums(part_lse.dtype)
        of_rows = out[:, as_slice(rows)], lse[:, :, as_slice(rows)]
        _backends.merge_into(*of_rows, part, part_lse)

    def _sums(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        batch, tokens, nheads, _ = self._shape
        out_dtype = self._like.dtype if self._parts <= 2 else dtype
        if self._out is None or self._lse is None:
            self._out = self._like.new_zeros(self._shape, dtype=out_dtype)
            self._lse = self._like.new_full((batch, nheads, tokens), -torch.inf, dtype=dtype)
        self._out = self._out.to(out_dtype)
        return self._out, self._lse

    def whole(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            self._sums(torch.promote_types(self._like.dtype, torch.float32))
        assert self._out is not None and self._lse is not None
        return self._out.to(self._like.dtype), self._lse


class _Sum:
    """The sum of what blocks add to some of a tensor's rows; of more than three, in ``dtype``."""

    def __init__(self, like: Tensor, rows: int, dtype: torch.dtype, parts: int) -> None:
        self._like, self._dtype = like, like.dtype if parts <= 3 else dtype
        self._shape = like.shape[0], rows, *like.shape[2:]
        self._value: Tensor | None = None
        self._missing = [range(rows)]  # no block has added to these

    def add(self, rows: range, part: Tensor) -> None:
        is_first = any(overlap(x, rows) == rows for x in self._missing)
        if self._value is None and len(rows) == self._shape[1]:
            self._value = part
        elif is_first:
            self._sums()[:, as_slice(rows)] = part
        else:
            self._clear(rows)
            self._sums()[:, as_slice(rows)] += part
        self._missing = [y for x in self._missing for y in without(x, rows)]

    def _sums(self) -> Tensor:
        if self._value is None:
            self._value = self._like.new_empty(self._shape, dtype=self._dtype)
        self._value = self._value.to(self._dtype)
        return self._value

    def _clear(self, rows: range) -> None:
        for x in self._missing:
            self._sums()[:, as_slice(overlap(x, rows))] = 0

    def whole(self) -> Tensor:
        self._clear(range(self._shape[1]))
        self._missing = []
        return self._sums().to(self._like.dtype)


# ---- messages ------------------------------------------------------------------------------------


class _Messages(Messages):
    """Keys and their gradients; places are distances on the ring."""

    def __init__(self, ring: dist.ProcessGroup | None) -> None:
        super().__init__(ring)
        self._rank, self._size = (0, 1) if ring is None else (dist.get_rank(ring), size_of(ring))

    def exchange_keys(self, distance: int, steps: list[Step], k: Tensor, v: Tensor) -> list[Tensor]:
        """Send what the rank ``distance`` behind sees; return what this one sees of that before."""
        if distance >= len(steps):
            return []
        step = steps[distance]
        for x in (k, v):
            self._send(distance, [x[:, as_slice(rows)] for rows in step.sends])
        return [self._receive(-distance, step.rows, x) for x in (k, v)]

    def exchange_gradients(
        self, distance: int, steps: list[Step], gradients: list[_Sum]
    ) -> list[Tensor]:
        """The gradients of such keys go back."""
        if distance < 1:
            return []
        step = steps[distance]
        for x in gradients:
            self._send(-distance, [x.whole()] if step.rows else [])
        rows = sum(map(len, step.sends))
        return [self._receive(distance, rows, x._like) for x in gradients]

    def _send(self, distance: int, pieces: list[Tensor]) -> None:
        if pieces:
            x = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, 1)
            self.send(x, (self._rank + distance) % self._size)

    def _receive(self, distance: int, rows: int, like: Tensor) -> Tensor:
        x = like.new_empty(like.shape[0], rows, *like.shape[2:])
        self.receive(x, (self._rank + distance) % self._size)
        return x
