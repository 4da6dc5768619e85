"""Dense problems on a CPU by PyTorch's own flash attention, which is faster than tiles.

Its two operators know a scale and a causal mask that starts in the top left corner, and give the
same out and log-sum-exp as ours. They are also what PyTorch's ``scaled_dot_product_attention`` runs
on a CPU; an old PyTorch without them leaves everything to tiles.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attn._arguments import Attention
from flash_attn._backends.merging import merge

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_forward = getattr(torch.ops.aten, _NAME, None)
_backward = getattr(torch.ops.aten, f"{_NAME}_backward", None)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FEATURES = {"pages", "cache_slots"}  # where rows lie: the caller has gathered them


def covers(a: Attention) -> bool:
    """Whether the operators have the options and sizes of a problem, and are faster than tiles."""
    return (
        _forward is not None
        and _backward is not None
        and a.q.device.type == "cpu"
        and a.headdim == a.headdim_v
        and a.window_left < 0
        and a.window_right <= 0
        and a.features <= _FEATURES
        and not a.is_quantised
        and not a.is_fp8
        and a.softmax_scale > 0  # else a masked score may be 0 * -inf
        and a.q.dtype in _DTYPES
        and a.q.numel() > 0  # the operators crash where there is nothing
        and a.k.numel() > 0
        and not _overlaps(a.q)
    )


def _overlaps(q: Tensor) -> bool:
    """Whether heads or rows are windows over the same numbers.

    The operator lays out its output like q, and then takes it for contiguous.
    """
    sizes, strides = q.shape[:-1], q.stride()[:-1]
    return any(n > 1 and 0 < x < q.shape[-1] for n, x in zip(sizes, strides, strict=True))


def covers_backward(a: Attention) -> bool:
    """The same of the backward.

    Its float32 exponentials are right to 20 bits: where rows are peaked the gradients have up to
    3.5 times the error of standard attention, and those of tiles 1.2 times.
    """
    return covers(a) and a.q.dtype != torch.float32


def takes_whole(a: Attention) -> bool:
    """Whether one call does a batch: where heads share keys, strides say so of one sequence."""
    return a.nheads == a.nheads_kv or a.q.shape[1] == 1 or a.batch == 1


def forward(a: Attention) -> tuple[Tensor, Tensor]:
    """Return out and log-sum-exp of a dense problem that is covered and taken whole."""
    assert _forward is not None
    # Where a CPU has no instructions for them, products in float16, and of one query in bfloat16,
    # take longer than in float32.
    narrow = a.q.dtype == torch.float16 or (a.q.dtype == torch.bfloat16 and a.q.shape[1] == 1)
    dtype = torch.float32 if narrow else a.q.dtype
    q, k, v = _queries(a, a.q.to(dtype)), _keys(a, a.k.to(dtype)), _keys(a, a.v.to(dtype))
    parts = []
    for rows, cols, causal in _rectangles(a):
        arguments = (x[:, :, part] for x, part in ((q, rows), (k, cols), (v, cols)))
        parts.append(_forward(*arguments, 0.0, causal, scale=a.softmax_scale))
    out, lse = parts[0] if len(parts) == 1 else merge(*parts[0], *parts[1])
    if blind := q.shape[2] - out.shape[2]:
        out, lse = pad(out, (0, 0, blind, 0)), pad(lse, (blind, 0), value=-torch.inf)
    out, lse = _rows(a, out), _rows(a, lse[..., None])
    if a.s_aux is not None:
        sink = a.s_aux.to(lse.dtype)[:, None].expand_as(lse)
        out, lse = merge(out, lse, torch.zeros_like(out), sink)
    return out.to(a.q.dtype).contiguous(), lse[..., 0].mT.contiguous()


def backward(
    a: Attention,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> Tensor:
    """Write the gradients of such a problem, from any ``out`` and ``lse``; return delta."""
    assert _backward is not None
    delta = (dout.to(lse.dtype) * out).sum(-1).mT.contiguous()
    lse = _queries(a, lse.mT[..., None])[..., 0]
    # In 16 bits the operator would add up dK and dV over the queries in 16 bits.
    dtype = torch.float32 if a.q.element_size() == 2 else a.q.dtype
    # It takes the last dimension of ``out`` to be contiguous.
    q, do, o = (_queries(a, x.to(dtype)) for x in (a.q, dout.contiguous(), out.contiguous()))
    k, v = (_keys(a, x.to(dtype)) for x in (a.k, a.v))
    rows_dq = []
    for rows, cols, causal in _rectangles(a):
        part_q, part_do, part_o, part_lse = (x[:, :, rows] for x in (q, do, o, lse))
        arguments = part_do, part_q, k[:, :, cols], v[:, :, cols], part_o, part_lse
        part_dq, *keys = _backward(*arguments, 0.0, causal, scale=a.softmax_scale)
        rows_dq.append(part_dq)
        for grad, part in zip((dk, dv), keys, strict=True):
            grad[:, cols] = _key_rows(a, part)
    part_dq = rows_dq[0] if len(rows_dq) == 1 else rows_dq[0] + rows_dq[1]
    dq.copy_(_rows(a, pad(part_dq, (0, 0, q.shape[2] - part_dq.shape[2], 0))))
    return delta


def _rectangles(a: Attention) -> Iterator[tuple[slice, slice, bool]]:
    """Rows, keys and whether the mask is causal, of one or two rectangles that make the problem.

    The causal mask ends in the bottom right corner. With more keys than queries that is a rectangle
    that all queries see, left of a square; with more queries the first of them see nothing.

        seqlen_q < seqlen_k     seqlen_q > seqlen_k
        x x x | x . .           . . .
        x x x | x x .           -----
        x x x | x x x           x . .
                                x x .
                                x x x
    """
    seqlen_q, seqlen_k = a.q.shape[1], a.k.shape[1]
    if a.window_right < 0 or seqlen_q == 1:
        yield slice(None), slice(None), False
        return
    left = max(0, seqlen_k - seqlen_q)
    if left:
        yield slice(None), slice(left), False
    yield slice(max(0, seqlen_q - seqlen_k), None), slice(left, None), True


# ---- the operator's (batch, nheads, seqlen, headdim) ---------------------------------------------
#
# Heads that share keys, one query each, see the same keys: to the operator they are the rows of one
# head. With more queries, key heads stand for the batch, and a stride of 0 repeats their keys.


def _queries(a: Attention, x: Tensor) -> Tensor:
    if a.nheads == a.nheads_kv:
        return x.transpose(1, 2)
    x = x.unflatten(2, (a.nheads_kv, -1))  # (batch, seqlen_q, nheads_kv, group, headdim)
    return x[:, 0] if x.shape[1] == 1 else x[0].movedim(0, 2)


def _keys(a: Attention, x: Tensor) -> Tensor:
    if a.nheads == a.nheads_kv or a.q.shape[1] == 1:
        return x.transpose(1, 2)
    heads = x[0].transpose(0, 1)[:, None]  # (nheads_kv, 1, seqlen_k, headdim)
    return heads.expand(-1, a.nheads // a.nheads_kv, -1, -1)


def _rows(a: Attention, x: Tensor) -> Tensor:
    """The inverse of _queries."""
    if a.nheads == a.nheads_kv:
        return x.transpose(1, 2)
    x = x[:, None] if a.q.shape[1] == 1 else x.movedim(2, 0)[None]
    return x.flatten(2, 3)


def _key_rows(a: Attention, x: Tensor) -> Tensor:
    """The inverse of _keys, of gradients: their sum over a group."""
    if a.nheads == a.nheads_kv or a.q.shape[1] == 1:
        return x.transpose(1, 2)
    return x.sum(1).transpose(0, 1)[None]
