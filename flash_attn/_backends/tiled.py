"""Exact attention in plain PyTorch, tile by tile: runs anywhere, and specifies the kernels.

Forward (Dao et al., "FlashAttention", 2022; rescaling as in Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018) and backward visit the scores one (row block, column
block) tile at a time and keep only per-row statistics in between, so memory is linear in the
sequence length in both directions.

Nothing here reads a value back from a GPU: loop bounds come from shapes, per-sequence lengths act
through masks. The same code therefore runs under CUDA graph capture. On a CPU, where lengths cost
nothing to read, sequences are visited one by one, and cpu.py takes those that PyTorch's own
operator can do.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_attn._arguments import (
    FP8,
    SCALE_BLOCK,
    Attention,
    CacheAppend,
    Place,
    dense,
    is_readable,
)
from flash_attn._backends import cpu
from flash_attn._backends.philox import dropout_keep_mask
from flash_attn._backends.quantisation import first_scale_blocks, quantised, to_fp8
from flash_attn._backends.rotary import rotate
from flash_attn._differentiation import without_autocast

BLOCK = 128  # rows and columns of a tile are multiples of this
MAX_SCORES = 2**22  # of one tile on a GPU, over all batches and heads: enough work for each launch
MAX_KEY_ELEMENTS = 2**24  # of one tile of K where there are few queries
LOG2_E = math.log2(math.e)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _plain_arithmetic(function: _Function) -> _Function:
    """Record no graph (the backward is written out below), and round no more than asked."""

    @functools.wraps(function)
    def wrapper(problem: Attention, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast(problem.q.device.type):
            return function(problem, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


@_plain_arithmetic
def forward(
    problem: Attention, rng_state: Tensor | None, return_probs: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, log-sum-exp and (if asked for) the signed dropped-out probabilities."""
    a = _without_slack(problem)
    if not _goes_by_sequence(a):
        result, lse = _attend(a, rng_state)
    else:
        result = a.q.new_zeros(a.out_shape)
        lse = a.q.new_full(a.lse_shape, -torch.inf, dtype=a.compute_dtype)
        for one in _each_sequence(a):
            part_out, part_lse = _attend(one.problem, rng_state)
            one.rows(result).copy_(part_out)
            one.statistic(lse).copy_(part_lse)
    probs = signed_probabilities(a, lse, rng_state) if return_probs else None
    if out is not None:
        result = out.copy_(result)
    return result, lse, probs


def differentiable_forward(
    problem: Attention, rng_state: Tensor | None, return_probs: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``forward`` for derivatives of any order and mode, and for ``torch.func``'s transforms.

    What records keeps every tile, so memory grows with the product of the sequence lengths. The
    signed probabilities have no derivative.
    """
    with without_autocast(problem.q.device.type):
        out, lse = _attend_by_tiles(problem, rng_state, recorded=True)
    if not return_probs:
        return out, lse, None
    inputs = {name: getattr(problem, name).detach() for name in "qkv"}
    return out, lse, signed_probabilities(problem._replace(**inputs), lse.detach(), rng_state)


def _attend(a: Attention, rng_state: Tensor | None) -> tuple[Tensor, Tensor]:
    if a.is_fp8:
        return _attend_in_fp8(quantised(a) if a.fp8_level > 0 else a)
    return cpu.forward(a) if cpu.covers(a) else _attend_by_tiles(a, rng_state)


def _attend_by_tiles(
    a: Attention, rng_state: Tensor | None, recorded: bool = False
) -> tuple[Tensor, Tensor]:
    """Return out and log-sum-exp; ``recorded`` if something differentiates or batches this code.

    To derivatives the running maximum is a constant, as out and log-sum-exp do not depend on it. A
    row with no visible key gets its results from constants, so its derivatives are 0 and not NaN.
    """
    queries, keys = _Sequences.of_queries(a), _Sequences.of_keys(a)
    sizes, in_place = (a.nheads, a.headdim_v), not recorded
    all_out = _RowBuffer(queries, sizes, a.q.dtype, 0.0, in_place)
    all_lse = _RowBuffer(queries, (a.nheads, 1), a.compute_dtype, -torch.inf, in_place)
    for rows in _blocks(queries.max_length, _block(a)):
        q = queries.read(a.q, rows)  # (batch, nheads, m, headdim)
        row_max, row_sum = _initial_statistics(a, q)
        acc = q.new_zeros(*q.shape[:-1], a.headdim_v)
        for cols in _visible_blocks(a, queries, keys, rows):
            k, v = keys.read(a.k, cols, a.k_descale), keys.read(a.v, cols, a.v_descale)
            scores = _scores(a, queries, keys, q, k, rows, cols).masked
            new_max = torch.maximum(row_max, scores.detach().amax(-1, keepdim=True))
            finite_max = _finite(new_max)  # no visible key yet
            p = torch.exp(scores - finite_max)
            rescale = torch.exp(row_max - finite_max)
            row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
            dropout = _dropout_factor(a, rng_state, rows, cols)
            acc = acc * rescale + _matmul(p if dropout is None else p * dropout, v)
            row_max = new_max
        row_sum = row_sum.masked_fill(row_sum == 0.0, 1.0)  # no visible key: 0 / 1, -inf + log(1)
        all_out.write(rows, acc / row_sum)
        all_lse.write(rows, row_max + row_sum.log())
    return all_out.rows.view(a.out_shape), _lse_layout(a, all_lse.rows)


LINEAR_HEADDIM = 128  # the largest with linear probabilities, if operands come in e4m3


class _Probabilities(NamedTuple):
    """P as an operand, times ``scale``, and the numbers that the row sum adds."""

    scale: float
    encoded: Callable[[Tensor], Tensor]  # of exponents of 2, at most 0
    summed: Callable[[Tensor], Tensor]


def _probabilities(a: Attention) -> _Probabilities:
    """Of the dtype of v: rounded, or in e4m3 linear where that is faster in a kernel.

    The row sum adds what is encoded of linear ones, since nothing else is computed.
    """
    if a.v.dtype != FP8:
        return _Probabilities(1.0, lambda x: x.exp2().to(a.v.dtype).float(), torch.exp2)
    if a.scales is None and max(a.headdim, a.headdim_v) > LINEAR_HEADDIM:
        scale = 2.0**8  # makes the most of e4m3, which ends at 448
        return _Probabilities(scale, lambda x: to_fp8(x.exp2() * scale).float(), torch.exp2)
    scale = 2.0**6
    return _Probabilities(scale, _linear, lambda x: _linear(x) / scale)


def _linear(exponent: Tensor) -> Tensor:
    """2^(exponent + 6), roughly: the number of e4m3 whose code is 8 times the exponent.

    Between powers of two numbers of e4m3 are 2^n (1 + m / 8), and 2^(m / 8) is nearly as much. The
    0.46 makes the mean right. Below 2^-6 a line of another slope is nearer to codes of m 2^-9.
    """
    code = (8 * (exponent + 13) - 0.46).round()
    code = torch.maximum(code, (0.24 * code + 4.625).round()).clamp(min=0)
    number = code.nan_to_num().to(torch.uint8).view(FP8).float()
    return number.masked_fill(code.isnan(), torch.nan)


def _attend_in_fp8(a: Attention) -> tuple[Tensor, Tensor]:
    """The same with operands of 8 bits: P, too, is in e4m3, as V is. Exponents are of 2.

    The attention sink joins last, as no reference.
    """
    probabilities = _probabilities(a)
    queries, keys = _Sequences.of_queries(a), _Sequences.of_keys(a)
    group = a.nheads // max(1, a.nheads_kv)
    all_out = _RowBuffer(queries, (a.nheads, a.headdim_v), a.out_dtype, 0.0)
    all_lse = _RowBuffer(queries, (a.nheads, 1), torch.float32, -torch.inf)
    for rows in _blocks(queries.max_length, _block(a)):
        q = queries.read(a.q, rows, _per_query_head(a.q_descale, group))
        if a.scales is not None:
            q = q * queries.read(_query_layout(a.scales.q), rows)
        reference = q.new_full((*q.shape[:-1], 1), -torch.inf)
        row_sum, acc = torch.zeros_like(reference), q.new_zeros(*q.shape[:-1], a.headdim_v)
        for cols in _visible_blocks(a, queries, keys, rows):
            k, v = keys.read(a.k, cols, a.k_descale), keys.read(a.v, cols)
            if a.scales is not None:
                k = k * _scales_of_keys(a, a.scales.k, cols)
                if a.scales.v is not None:
                    v = v * _scales_of_keys(a, a.scales.v, cols)
            exponent = _scores(a, queries, keys, q, k, rows, cols).masked * LOG2_E
            new_reference = torch.maximum(reference, exponent.amax(-1, keepdim=True))
            finite = _finite(new_reference)
            rescale = torch.exp2(reference - finite)
            summed = probabilities.summed(exponent - finite)
            row_sum = row_sum * rescale + summed.sum(-1, keepdim=True)
            acc = acc * rescale + _matmul(probabilities.encoded(exponent - finite), v)
            reference = new_reference
        log2_sum = reference + row_sum.log2()  # -inf for no visible key
        if a.s_aux is not None:
            log2_sum = torch.logaddexp2(log2_sum, LOG2_E * a.s_aux.float()[:, None, None])
        out = acc * torch.exp2(reference - _finite(log2_sum)) / probabilities.scale
        if a.v_descale is not None:
            out = out * _per_query_head(a.v_descale, group)[:, :, None, None]
        all_out.write(rows, out)
        all_lse.write(rows, log2_sum / LOG2_E)
    return all_out.rows.view(a.out_shape), _lse_layout(a, all_lse.rows)


def _per_query_head(x: Any, group: int) -> Any:
    """(batch, nheads_kv, ...) to (batch, nheads, ...)."""
    return x if x is None or group == 1 else x.repeat_interleave(group, dim=1)


def _scales_of_keys(a: Attention, scale: Tensor, cols: range) -> Tensor:
    """Return the scale of each of these keys, (batch, nheads_kv, n, 1)."""
    block = torch.arange(cols.start, cols.stop, device=scale.device) // SCALE_BLOCK
    if a.cu_seqlens_k is None:
        return scale[:, :, block, None]
    block = first_scale_blocks(a.cu_seqlens_k)[:, None] + block
    return scale[:, block.clamp(0, scale.shape[1] - 1)].transpose(0, 1)[..., None]


@_plain_arithmetic
def backward(
    problem: Attention,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    rng_state: Tensor | None,
) -> Tensor:
    """Write dq, dk and dv; return delta = rowsum(dout * out) - dlse, shaped like lse.

    P is recomputed from the log-sum-exp: P = exp(S - lse), dP = dO V^T, dS = P * (dP - delta).
    """
    a = problem
    if not _goes_by_sequence(a):
        return _gradients(a, dout, out, lse, dlse, dq, dk, dv, rng_state).contiguous()
    for gradient in (dq, dk, dv):
        gradient.zero_()
    delta = torch.zeros_like(lse, memory_format=torch.contiguous_format)
    for one in _each_sequence(a):
        part_delta = _gradients(
            one.problem,
            one.rows(dout),
            one.rows(out),
            one.statistic(lse),
            None if dlse is None else one.statistic(dlse),
            one.rows(dq),
            one.keys(dk),
            one.keys(dv),
            rng_state,
        )
        one.statistic(delta).copy_(part_delta)
    return delta


def _gradients(
    a: Attention,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    rng_state: Tensor | None,
) -> Tensor:
    if dlse is None and cpu.covers_backward(a):
        return cpu.backward(a, dout, out, lse, dq, dk, dv)
    queries, keys = _Sequences.of_queries(a), _Sequences.of_keys(a)
    all_dq = _RowBuffer(queries, (a.nheads, a.headdim), a.q.dtype, 0.0)
    all_delta = _RowBuffer(queries, (a.nheads, 1), a.compute_dtype, 0.0)
    all_dk = _RowBuffer(keys, (a.nheads_kv, a.headdim), a.compute_dtype, 0.0)
    all_dv = _RowBuffer(keys, (a.nheads_kv, a.headdim_v), a.compute_dtype, 0.0)
    row_lse = _query_layout(lse)
    row_dlse = None if dlse is None else _query_layout(dlse)

    for rows in _blocks(queries.max_length, _block(a)):
        q, do = queries.read(a.q, rows), queries.read(dout, rows)
        tile_lse = queries.read(row_lse, rows)
        delta = (do * queries.read(out, rows)).sum(-1, keepdim=True)
        if row_dlse is not None:  # where no key is visible, whatever it is
            delta -= queries.read(row_dlse, rows).masked_fill(tile_lse == -torch.inf, 0.0)
        tile_lse = _finite(tile_lse)
        tile_dq = torch.zeros_like(q)
        for cols in _visible_blocks(a, queries, keys, rows):
            k, v = keys.read(a.k, cols), keys.read(a.v, cols)
            scores = _scores(a, queries, keys, q, k, rows, cols)
            p = dropped_p = torch.exp(scores.masked - tile_lse)
            dp = _matmul(do, v.mT)
            dropout = _dropout_factor(a, rng_state, rows, cols)
            if dropout is not None:
                dropped_p, dp = p * dropout, dp * dropout
            ds = (dp - delta).mul_(p)
            if scores.softcap_gate is not None:
                ds = ds * scores.softcap_gate
            tile_dq += _matmul(ds, k)  # without the scale, as dK
            all_dk.add(cols, _matmul_over_group(ds, q, a.nheads_kv))
            all_dv.add(cols, _matmul_over_group(dropped_p, do, a.nheads_kv))
        all_dq.write(rows, a.softmax_scale * tile_dq)
        all_delta.write(rows, delta)

    dq.copy_(all_dq.rows.view(dq.shape))
    dk.copy_(a.softmax_scale * all_dk.rows.view(dk.shape))
    dv.copy_(all_dv.rows.view(dv.shape))
    return _lse_layout(a, all_delta.rows)


@_plain_arithmetic
def signed_probabilities(problem: Attention, lse: Tensor, rng_state: Tensor | None) -> Tensor:
    """Return S_dmask: P (batch, nheads, seqlen_q, seqlen_k rounded up), negative where dropped."""
    a = problem
    queries, keys = _Sequences.of_queries(a), _Sequences.of_keys(a)
    shape = (a.batch, a.nheads, *probs_seqlens(a))
    probs = None
    row_lse = _query_layout(lse)
    for rows in _blocks(queries.max_length, _block(a)):
        q = queries.read(a.q, rows)
        tile_lse = _finite(queries.read(row_lse, rows))
        for cols in _visible_blocks(a, queries, keys, rows):
            scores = _scores(a, queries, keys, q, keys.read(a.k, cols), rows, cols).masked
            p = torch.exp(scores - tile_lse)
            if rng_state is not None:
                p = torch.where(_keep(a, rng_state, rows, cols), p, -p)
            if probs is None:  # of p, since vmap writes a batch only to what is one
                probs = p.new_zeros(shape, dtype=a.q.dtype)
            probs[:, :, rows.start : rows.stop, cols.start : cols.stop] = p
    return a.q.new_zeros(shape) if probs is None else probs


def probs_seqlens(a: Attention) -> tuple[int, int]:
    """Return the last two sizes of S_dmask: the sequence lengths, rounded up to 128."""
    return -(-a.max_seqlen_q // 128) * 128, -(-a.max_seqlen_k // 128) * 128


@_plain_arithmetic
def append(problem: Attention, new: CacheAppend) -> Attention:
    """Write new keys and values into the cache in place; return the problem with these keys.

    Its queries are rotated, its ``seqused_k`` counts the new keys.
    """
    used = new.cache_seqlens
    a = problem._replace(seqused_k=torch.where(used < 0, used, used + new.k.shape[1]))
    q = a.q
    if new.rotary_cos is not None:
        steps = torch.arange(q.shape[1], device=q.device)
        start = used[:, None].clamp(min=0)
        q = _rotate_at(new, q, start + steps if a.options.masked else start)
    cache = _Sequences.of_cache(a)
    if new.k.numel() == 0 or cache.total == 0 or cache.max_length == 0:
        return a._replace(q=q)

    k = new.k
    steps = torch.arange(k.shape[1], device=q.device)
    storage_row = used[:, None] + steps  # (batch, seqlen_new)
    if new.rotary_cos is not None:
        k = _rotate_at(new, k, storage_row.clamp(min=0))
    writable = (used[:, None] >= 0) & cache.holds(storage_row)
    index = cache.locate(storage_row)
    _write_rows(a.k, index, k, writable, a.k_descale)
    _write_rows(a.v, index, new.v, writable, a.v_descale)
    return a._replace(q=q)


# ---- one sequence after another ------------------------------------------------------------------


class _One(NamedTuple):
    """One sequence as a dense problem of its own, and what finds its rows in other tensors."""

    problem: Attention
    rows: Callable[[Tensor], Tensor]  # of a tensor like q: (1, seqlen_q, nheads, dim)
    keys: Callable[[Tensor], Tensor]  # of a tensor like k: (1, seqlen_k, nheads_kv, dim)

    def statistic(self, x: Tensor) -> Tensor:
        """Its rows of a tensor like the log-sum-exp: (1, nheads, seqlen_q)."""
        return self.rows(_query_layout(x))[..., 0].mT


def _goes_by_sequence(a: Attention) -> bool:
    """Whether to visit sequences one by one, each without padding and without a copy of its keys.

    The lengths must be known to the host, which they are on a CPU. Short sequences fill a tile
    together. (The dropout mask counts the sequences of the batch, so they stay together; so do
    those of a cache in FP8.)
    """
    if a.q.device.type != "cpu" or a.drops or a.is_quantised or a.is_fp8:
        return False
    if _is_contiguous(a) and a.seqused_k is None:
        return not cpu.takes_whole(a) and cpu.covers(a)
    lengths = torch.cat([_Sequences.of_queries(a).length, _Sequences.of_keys(a).length])
    return cpu.covers(a) or bool((lengths > BLOCK).any())


def _is_contiguous(a: Attention) -> bool:
    """Whether the keys of sequence b, whose number the host may not know, begin where k[b] does."""
    lie_elsewhere = a.cu_seqlens_k, a.leftpad_k, a.block_table, a.cache_batch_idx
    return all(x is None for x in lie_elsewhere)


def _without_slack(a: Attention) -> Attention:
    """A cache of which all sequences use as many rows, without the others: a dense problem."""
    used = a.seqused_k
    if used is None or used.device.type != "cpu" or not _is_contiguous(a):
        return a
    lengths = set(used.tolist())
    if len(lengths) != 1:
        return a
    seqlen_k = max(0, lengths.pop())
    k, v = a.k[:, :seqlen_k], a.v[:, :seqlen_k]
    return a._replace(k=k, v=v, max_seqlen_k=k.shape[1], seqused_k=None)


def _each_sequence(a: Attention) -> Iterator[_One]:
    queries, keys = _Sequences.of_queries(a), _Sequences.of_keys(a)
    for b in range(a.batch):
        rows, cols = (functools.partial(x.rows_of, b) for x in (queries, keys))
        slopes = a.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        yield _One(dense(rows(a.q), cols(a.k), cols(a.v), a.options, slopes, a.s_aux), rows, cols)


# ---- where rows lie ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sequences:
    """Where row i of sequence b lies in a dense, packed or paged tensor, in rows of it."""

    total: int  # rows of the tensor
    max_length: int  # host-known bound of ``length``
    length: Tensor  # (batch,) int64
    first: Tensor  # (batch,) int64: where row 0 is; with pages, in rows of the sequence
    seqlen: int = 0  # rows of a dense sequence or of a page; 0 for a packed tensor
    block_table: Tensor | None = None
    contiguous: bool = False  # dense, and sequence b begins where tensor[b] does
    whole: bool = False  # and ends where it does: the host knows all about its rows

    @classmethod
    def of_queries(cls, a: Attention) -> "_Sequences":
        if a.cu_seqlens_q is not None:
            return cls._packed(a.q.shape[0], a.cu_seqlens_q, a.max_seqlen_q)
        batch, seqlen = a.q.shape[:2]
        slot = torch.arange(batch, device=a.q.device)
        length = torch.full_like(slot, seqlen)
        return cls(
            batch * seqlen, seqlen, length, slot * seqlen, seqlen, contiguous=True, whole=True
        )

    @classmethod
    def of_cache(cls, a: Attention) -> "_Sequences":
        """Dense or paged keys with all the rows of their storage, whatever is in use."""
        if a.block_table is not None:
            num_pages, page_size = a.k.shape[:2]
            capacity = a.block_table.shape[1] * page_size if num_pages > 0 else 0
            first = torch.zeros(a.batch, dtype=torch.int64, device=a.q.device)
            length = torch.full_like(first, capacity)
            return cls(num_pages * page_size, capacity, length, first, page_size, a.block_table)
        slots, capacity = a.k.shape[:2]
        if a.cache_batch_idx is None:
            slot = torch.arange(a.batch, device=a.q.device)
        else:
            slot = a.cache_batch_idx.long()
        max_length = capacity if slots > 0 else 0
        length = torch.full_like(slot, max_length)
        return cls(slots * capacity, max_length, length, slot * capacity, capacity)

    @classmethod
    def of_keys(cls, a: Attention) -> "_Sequences":
        """The keys that take part: ``leftpad_k <= storage row < seqused_k``."""
        if a.cu_seqlens_k is None:
            storage = cls.of_cache(a)
            length = storage.length
        elif a.block_table is None:
            storage = cls._packed(a.k.shape[0], a.cu_seqlens_k, a.max_seqlen_k)
            length = storage.length
        else:
            storage = cls.of_cache(a)
            length = torch.minimum(a.cu_seqlens_k.diff().long(), storage.length)
        first = storage.first
        if a.seqused_k is not None:
            length = torch.minimum(length, a.seqused_k.long())
        if a.leftpad_k is not None:
            leftpad = torch.minimum(a.leftpad_k.long().clamp(min=0), storage.length)
            first, length = first + leftpad, length - leftpad
        length = length.clamp(min=0, max=a.max_seqlen_k)
        contiguous = _is_contiguous(a)
        longest = min(storage.max_length, a.max_seqlen_k)
        if a.batch > 0 and is_readable(length):  # a cache may have room for many more
            longest = min(longest, int(length.max()))
        return replace(
            storage,
            max_length=longest,
            length=length,
            first=first,
            contiguous=contiguous,
            whole=contiguous and a.seqused_k is None,
        )

    @classmethod
    def _packed(cls, total: int, cu_seqlens: Tensor, max_seqlen: int) -> "_Sequences":
        bounds = cu_seqlens.long().clamp(0, total)
        length = bounds.diff().clamp(0, max_seqlen)
        return cls(total, min(max_seqlen, total), length, bounds[:-1])

    def holds(self, row: Tensor) -> Tensor:
        """Whether each row (batch, n) lies in the tensor at all, before any clamping."""
        inside = (row >= 0) & (row < self.max_length)
        if self.block_table is None:
            slot = self.first // self.seqlen
            return inside & ((slot >= 0) & (slot < self.total // self.seqlen))[:, None]
        page = self.block_table.gather(1, self._page_of_sequence(row))
        return inside & (page >= 0) & (page < self.total // self.seqlen)

    def locate(self, row: Tensor) -> Tensor:
        """Map rows of sequences to rows of the tensor, (batch, n) to (batch, n); clamped."""
        row = row + self.first[:, None]
        if self.block_table is not None:
            page = self.block_table.long().gather(1, self._page_of_sequence(row))
            page = page.clamp(0, self.total // self.seqlen - 1)
            row = page * self.seqlen + row % self.seqlen
        return row.clamp(0, self.total - 1)

    def _page_of_sequence(self, row: Tensor) -> Tensor:
        assert self.block_table is not None
        return (row // self.seqlen).clamp(0, self.block_table.shape[1] - 1)

    @functools.cached_property
    def _extents(self) -> list[tuple[int, int]]:
        """First row and length of each sequence, which the host waits for on a GPU."""
        return list(zip(self.first.tolist(), self.length.tolist(), strict=True))

    def rows_of(self, b: int, tensor: Tensor) -> Tensor:
        """Sequence b, (1, length, heads, dim): a view, or a copy of its pages."""
        first, length = self._extents[b]
        if length == 0:
            return tensor.new_empty(1, 0, *tensor.shape[-2:])
        if self.block_table is not None:
            pages = self.block_table[b, : -(-(first + length) // self.seqlen)].long()
            rows = tensor[pages.clamp(0, tensor.shape[0] - 1)].flatten(0, 1)
            return rows[None, first : first + length]
        if self.seqlen == 0:
            return tensor[None, first : first + length]
        slot = min(max(first // self.seqlen, 0), tensor.shape[0] - 1)
        start = first % self.seqlen
        return tensor[slot : slot + 1, start : start + length]

    def rows(self, block: range) -> tuple[Tensor, Tensor]:
        """Return the tensor's rows of a block of each sequence, and which exist: (batch, n)."""
        row = torch.arange(block.start, block.stop, device=self.length.device)
        exists = row < self.length[:, None]
        return self.locate(row.expand(exists.shape)), exists

    def read(self, tensor: Tensor, block: range, descale: Tensor | None = None) -> Tensor:
        """Return a block as (batch, heads, n, dim) in the precision of the arithmetic.

        Rows that do not exist are zero: whatever memory holds there (0 * NaN is NaN) must not take
        part. The others are multiplied by ``descale`` (batch, heads).
        """
        index, exists = self.rows(block)
        is_fp8 = tensor.dtype == FP8
        if is_fp8:  # PyTorch moves bytes everywhere
            tensor = tensor.view(torch.uint8)
        if self.contiguous:
            tile = tensor[:, block.start : block.stop]
        elif tensor.dim() == 4:
            tile = tensor[index // self.seqlen, index % self.seqlen]
        else:
            tile = tensor[index]
        if is_fp8:
            tile = tile.view(FP8).float()
        if not self.whole:
            tile = tile.masked_fill(~exists[:, :, None, None], 0.0)
        tile = tile.transpose(1, 2)
        tile = tile if tile.dtype == torch.float64 else tile.float()
        return tile if descale is None else tile * descale[:, :, None, None]


class _RowBuffer:
    """A row of results for each row of a tensor, and a last one for what belongs nowhere."""

    def __init__(
        self,
        sequences: _Sequences,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        fill: float,
        in_place: bool = True,
    ) -> None:
        self._sequences = sequences
        self._in_place = in_place
        shape, device = (sequences.total + 1, *row_shape), sequences.length.device
        self._buffer = torch.full(shape, fill, dtype=dtype, device=device)

    @property
    def rows(self) -> Tensor:
        return self._buffer[:-1]

    def _index(self, block: range) -> Tensor:
        index, exists = self._sequences.rows(block)
        return index.masked_fill(~exists, self._sequences.total)

    def write(self, block: range, tile: Tensor) -> None:
        """Store a (batch, heads, n, dim) tile."""
        put = self._buffer.index_put_ if self._in_place else self._buffer.index_put
        self._buffer = put((self._index(block),), tile.transpose(1, 2).to(self._buffer.dtype))

    def add(self, block: range, tile: Tensor) -> None:
        """Add a (batch, heads, n, dim) tile: one addend a row, so no order can matter."""
        if self._sequences.whole:
            dense = self.rows.unflatten(0, (-1, self._sequences.seqlen))
            dense[:, block.start : block.stop] += tile.transpose(1, 2)
        else:
            self._buffer[self._index(block)] += tile.transpose(1, 2)


def _write_rows(
    cache: Tensor, index: Tensor, rows: Tensor, writable: Tensor, descale: Tensor | None
) -> None:
    """Set ``cache`` (flat row ``index``) to ``rows`` where ``writable``, known to the device only.

    A row that must not be written repeats the write of the first one that may, so that no two
    writes to one place differ; if there is none, it writes back what the cache holds.
    """
    if cache.dtype == FP8:  # PyTorch moves bytes everywhere
        if rows.dtype != FP8:
            rows = to_fp8(rows if descale is None else rows.float() / descale[:, None, :, None])
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    seqlen = cache.shape[1]
    index, writable, rows = index.flatten(), writable.flatten(), rows.flatten(0, 1)
    first = writable.int().argmax(dim=0, keepdim=True)
    target = torch.where(writable, index, index[first])
    values = torch.where(writable[:, None, None], rows, rows[first])
    place = (target // seqlen, target % seqlen)
    cache[place] = torch.where(writable.any(), values, cache[place])


# ---- tiles of scores -----------------------------------------------------------------------------


class _Scores(NamedTuple):
    masked: Tensor  # (batch, nheads, m, n): -inf where the key is not visible
    softcap_gate: Tensor | None  # derivative of the soft cap at each score


def _scores(
    a: Attention,
    queries: _Sequences,
    keys: _Sequences,
    q: Tensor,
    k: Tensor,
    rows: range,
    cols: range,
) -> _Scores:
    """scale * Q K^T, soft-capped, biased by ALiBi, masked: in this order."""
    scores = a.softmax_scale * _matmul(q, k.mT)
    gate = None
    if a.softcap > 0:
        capped = torch.tanh(scores / a.softcap)
        scores, gate = a.softcap * capped, 1 - capped * capped
    all_visible = _all_visible(a, queries, keys, rows, cols)
    if all_visible and a.alibi_slopes is None:
        return _Scores(scores, gate)

    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    j = torch.arange(cols.start, cols.stop, device=q.device)
    seqlen_q, seqlen_k = queries.length[:, None, None], keys.length[:, None, None]
    # (batch, m, n): 0 on the diagonal that ends bottom right
    distance = j - (i + seqlen_k - seqlen_q)
    if a.alibi_slopes is not None:
        slopes = a.alibi_slopes.expand(a.batch, a.nheads)[:, :, None, None].to(scores.dtype)
        apart = distance if a.place is None else j + a.place.column - (i + a.place.row)
        scores = scores - slopes * apart.abs().expand_as(distance)[:, None]
    if all_visible:
        return _Scores(scores, gate)
    visible = (i < seqlen_q) & (j < seqlen_k)
    if a.window_left >= 0:
        visible = visible & (distance >= -a.window_left)
    if a.window_right >= 0:
        visible = visible & (distance <= a.window_right)
    return _Scores(scores.masked_fill(~visible[:, None], -torch.inf), gate)


def _all_visible(
    a: Attention, queries: _Sequences, keys: _Sequences, rows: range, cols: range
) -> bool:
    """Whether the host knows that the mask hides nothing of a tile."""
    if not (queries.whole and keys.whole):
        return False
    diagonal = keys.max_length - queries.max_length
    least, most = cols.start - (rows.stop - 1 + diagonal), cols.stop - 1 - (rows.start + diagonal)
    return (a.window_left < 0 or least >= -a.window_left) and (
        a.window_right < 0 or most <= a.window_right
    )


def _dropout_factor(
    a: Attention, rng_state: Tensor | None, rows: range, cols: range
) -> Tensor | None:
    """What each probability is multiplied by: 0 where dropped, 1 / (1 - dropout_p) where kept."""
    if a.dropout_p == 0 or rng_state is None:
        return None
    return _keep(a, rng_state, rows, cols).to(a.compute_dtype) / (1 - a.dropout_p)


def _keep(a: Attention, rng_state: Tensor, rows: range, cols: range) -> Tensor:
    nheads, batch, head, row, column = a.place or Place(a.nheads)
    return dropout_keep_mask(
        rng_state,
        a.dropout_p,
        a.batch,
        a.nheads,
        len(rows),
        len(cols),
        rows.start + row,
        cols.start + column,
        batch * nheads + head,
        nheads,
    )


def _initial_statistics(a: Attention, q: Tensor) -> tuple[Tensor, Tensor]:
    """Row maximum and row sum before the first key: nothing, or the attention sink alone."""
    shape = (*q.shape[:-1], 1)
    if a.s_aux is None:
        return q.new_full(shape, -torch.inf), q.new_zeros(shape)
    sink = a.s_aux.to(q.dtype)[:, None, None].expand(shape)
    return sink.detach(), torch.exp(sink - _finite(sink.detach()))


# ---- which tiles ---------------------------------------------------------------------------------


def _block(a: Attention) -> int:
    """Rows and columns of a tile: what fits a CPU's cache, or what keeps a GPU busy."""
    if a.q.device.type == "cpu":
        return BLOCK
    side = math.isqrt(MAX_SCORES // max(1, a.batch * a.nheads))
    return max(BLOCK, side // BLOCK * BLOCK)


def _blocks(length: int, block: int, start: int = 0) -> Iterator[range]:
    for first in range(start - start % block, length, block):
        yield range(first, min(first + block, length))


def _visible_blocks(
    a: Attention, queries: _Sequences, keys: _Sequences, rows: range
) -> Iterator[range]:
    """Column blocks that the mask leaves visible to some row of ``rows`` in some sequence."""
    if keys.total == 0:
        return
    least, most = -queries.max_length, keys.max_length  # bounds of seqlen_k - seqlen_q
    if queries.whole and keys.whole:
        least = most = keys.max_length - queries.max_length
    start = 0 if a.window_left < 0 else max(0, rows.start + least - a.window_left)
    stop = keys.max_length
    if a.window_right >= 0:
        stop = min(stop, rows.stop + most + a.window_right)
    block = _block(a)
    if len(rows) < block:  # decoding: as many scores in a tile of fewer rows
        most_keys = MAX_KEY_ELEMENTS // max(1, a.batch * a.nheads_kv * a.headdim)
        block = max(block, min(block * block // len(rows), most_keys) // BLOCK * BLOCK)
    yield from _blocks(stop, block, start)


# ---- small things --------------------------------------------------------------------------------


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """(batch, nheads, m, d) @ (batch, nheads_kv, d, e): the heads of a group share one y."""
    nheads, nheads_kv = x.shape[1], y.shape[1]
    if nheads == nheads_kv:
        return x @ y
    return (_stack_group(x, nheads_kv) @ y).unflatten(2, (nheads // nheads_kv, -1)).flatten(1, 2)


def _matmul_over_group(x: Tensor, y: Tensor, nheads_kv: int) -> Tensor:
    """Return x^T y, (batch, nheads, m, n) and (batch, nheads, m, d), summed over each group."""
    return _stack_group(x, nheads_kv).mT @ _stack_group(y, nheads_kv)


def _stack_group(x: Tensor, nheads_kv: int) -> Tensor:
    """(batch, nheads, m, d) to (batch, nheads_kv, group * m, d)."""
    if x.shape[1] == nheads_kv:
        return x
    return x.unflatten(1, (nheads_kv, -1)).flatten(2, 3)


def _finite(reference: Tensor) -> Tensor:
    """A row with no visible key has scores of -inf only: exp(-inf - 0) is 0, as it should be."""
    return reference.masked_fill(reference == -torch.inf, 0.0)


def _query_layout(lse: Tensor) -> Tensor:
    """(batch, nheads, seqlen_q) or (nheads, total_q) to the layout of q with headdim 1."""
    return lse.mT.unsqueeze(-1)


def _lse_layout(a: Attention, rows: Tensor) -> Tensor:
    """The inverse, from a buffer of rows."""
    return rows.view(a.q.shape[:-1]).mT.contiguous()


def _rotate_at(new: CacheAppend, x: Tensor, position: Tensor) -> Tensor:
    assert new.rotary_cos is not None and new.rotary_sin is not None
    position = position.long().clamp(max=new.rotary_cos.shape[0] - 1)
    return rotate(x, new.rotary_cos[position], new.rotary_sin[position], new.rotary_interleaved)
