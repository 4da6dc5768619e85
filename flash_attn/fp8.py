"""Attention whose products have operands of 8 bits, of inputs of 16 bits: quantised inside.

q, k and v are quantised in a pass over them before the attention, with scales of their own rows and
blocks of keys; no calibration is needed. The levels say into what:

=============  ============  ==================  =======
level          q and k       v                   error
=============  ============  ==================  =======
``fast``       e4m3          e4m3                8.3e-3
``balanced``   int8          e4m3                5.9e-3
``accurate``   int8          sum of two e4m3     2.3e-3
=============  ============  ==================  =======

Root mean square error on normal inputs with outliers, head dim 128 (``benchmarks/fp8.py`` on a
CPU), where attention in bfloat16 has 1.2e-3 and e4m3 with one scale a head 1.8e-2. At every
level q and k are multiplied by the same random orthogonal matrix first, which leaves q k^T as it is
and spreads outliers over the columns; the probabilities become e4m3; sums are float32.

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision",
2024, has the rotation and scales of blocks in FP8. Hopper GPUs have kernels for it; elsewhere it
runs in PyTorch operations (the tiled backend), which is slower than attention in 16 bits.

The gradients are straight-through: the backward is that of the inputs in 16 bits, from the out and
log-sum-exp of this forward (P = exp(S - lse) with S of 16 bits). They have no derivative, and there
is no forward mode: both raise NotImplementedError.
"""

from typing import Any

import torch
from torch import Tensor

from flash_attn import _arguments, _ops
from flash_attn._arguments import FP8_LEVELS, _kind
from flash_attn._backends import quantisation
from flash_attn._numbers import integer
from flash_attn.flash_attn_interface import _WINDOW, read_window

__all__ = ["flash_attn_fp8_func", "flash_attn_fp8_varlen_func", "quantize"]


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_softmax_lse: bool = False,
    *,
    level: str = "balanced",
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Attention over sequences of equal length; options are ``flash_attn_func``'s, but no dropout.

    Parameters
    ----------
    q : (batch, seqlen_q, nheads, headdim) float16 or bfloat16
        The head dimension is at most 256; the best fits are 64, 96, 128, 192 and 256, others are
        padded to the next of them.
    k : (batch, seqlen_k, nheads_kv, headdim)
    v : (batch, seqlen_k, nheads_kv, headdim_v)
    level : {"fast", "balanced", "accurate"}
        What q, k and v are quantised into: see the module's docstring.

    Returns
    -------
    out : (batch, seqlen_q, nheads, headdim_v), the dtype of q
    softmax_lse : (batch, nheads, seqlen_q) float32, with return_softmax_lse

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As ``flash_attn_func``; for a dtype other than those above; for another level.
    """
    left, right = read_window(window_size)
    result = _ops.flash_attn_forward(
        q,
        k,
        v,
        0.0,
        softmax_scale,
        causal,
        left,
        right,
        softcap,
        alibi_slopes,
        False,
        s_aux,
        deterministic,
        fp8_level=_number(level),
        out=out,
    )
    return result[:2] if return_softmax_lse else result[0]


def flash_attn_fp8_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_softmax_lse: bool = False,
    *,
    level: str = "balanced",
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """The same over packed sequences, as ``flash_attn_varlen_func``, but without pages.

    Parameters
    ----------
    q : (total_q, nheads, headdim) float16 or bfloat16
    k, v : (total_k, nheads_kv, headdim)
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32
    max_seqlen_q, max_seqlen_k : int
    level : {"fast", "balanced", "accurate"}

    Returns
    -------
    out : (total_q, nheads, headdim_v), the dtype of q
    softmax_lse : (nheads, total_q) float32, with return_softmax_lse
    """
    left, right = read_window(window_size)
    result = _ops.flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        softmax_scale,
        causal,
        left,
        right,
        softcap,
        alibi_slopes,
        s_aux=s_aux,
        deterministic=deterministic,
        fp8_level=_number(level),
        out=out,
    )
    return result[:2] if return_softmax_lse else result[0]


@torch.no_grad()
def quantize(
    x: Tensor, nheads_kv: int | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round a tensor to float8_e4m3fn, with a scale for each sequence and head.

    The result is what ``flash_attn_func`` and the others take as q, k or v in FP8, and
    ``flash_attn_with_kvcache`` as a cache. There is no rotation: a cache has to be readable by
    queries that have none.

    Parameters
    ----------
    x : (batch, seqlen, heads, headdim), or (total, heads, headdim) with cu_seqlens
    nheads_kv : int, optional
        Of q: its scales are those of so many groups of heads. Default: all heads.
    cu_seqlens : (batch + 1,) int32, optional
        Rows outside of its sequences become zero.

    Returns
    -------
    quantized : the shape of x, float8_e4m3fn
        x / descale, to nearest, ties to even.
    descale : (batch, nheads_kv) float32
        The largest magnitude / 448; 1 where that is 0.

    Raises
    ------
    TypeError, ValueError
        If x is no floating-point tensor of such a shape, or nheads_kv does not divide its heads.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {_kind(x)}")
    rank = 4 if cu_seqlens is None else 3
    if x.dim() != rank:
        raise ValueError(f"x must have {rank} dimensions, got shape {tuple(x.shape)}")
    heads = x.shape[-2]
    groups = heads if nheads_kv is None else integer("nheads_kv", nheads_kv)
    if groups < 1 or heads % groups:
        raise ValueError(f"nheads_kv must divide the heads of x, {heads}, got {nheads_kv}")
    if cu_seqlens is None:
        batch = x.shape[0]
        sequence = torch.arange(batch, device=x.device)[:, None].expand(x.shape[:2])
    else:
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
            raise TypeError(f"cu_seqlens must be a torch.int32 tensor, got {_kind(cu_seqlens)}")
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens.device != x.device:
            raise ValueError(
                f"cu_seqlens must have shape (batch + 1,) and be on the device of x, {x.device}, "
                f"got shape {tuple(cu_seqlens.shape)} on {cu_seqlens.device}"
            )
        _arguments.lengths_of("cu_seqlens", cu_seqlens, "x", x.shape[0])
        batch = cu_seqlens.shape[0] - 1
        sequence = quantisation.sequence_of_rows(cu_seqlens, x.shape[0])
    x = x.float().masked_fill((sequence < 0)[..., None, None], 0.0)
    sequence = sequence.clamp(min=0)
    by_group = x.unflatten(-2, (groups, heads // groups)).flatten(-2)
    descale = quantisation.step(quantisation.largest_of(by_group, sequence, batch), _arguments.FP8)
    factor = descale.repeat_interleave(heads // groups, dim=1)[sequence]
    return quantisation.to_fp8(x / factor[..., None]), descale


def _number(level: str) -> int:
    if level not in FP8_LEVELS:
        raise ValueError(f"level must be one of {', '.join(FP8_LEVELS)}, got {level!r}")
    return 1 + FP8_LEVELS.index(level)
