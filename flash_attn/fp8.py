"""Attention whose products have operands of 8 bits, of inputs of 16 bits: quantised inside.

q, k and v are quantised with scales of their own rows and blocks of keys, k and v in a pass before
the attention; no calibration is needed. The levels say into what:

=============  ============  ==================  =======
level          q and k       v                   error
=============  ============  ==================  =======
``fast``       e4m3          e4m3                8.3e-3
``balanced``   int8          e4m3                5.9e-3
``accurate``   int8          16 bits, as it is   2.1e-3
=============  ============  ==================  =======

Root mean square error on normal inputs with outliers, head dim 128 (``benchmarks/fp8.py`` on a
CPU), where attention in bfloat16 has 1.2e-3 and e4m3 with one scale a head 1.8e-2. At every
level q and k are multiplied by the same random orthogonal matrix first, which leaves q k^T as it is
and spreads outliers over the columns; the probabilities become what v is; sums are float32. The
product of the norms of q and k and ``softmax_scale``, the most that a score may be, shall stay
below 9e4: beyond, a row may become NaN.

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision",
2024, has the rotation and scales of blocks in FP8. Hopper GPUs have kernels for it; elsewhere it
runs in PyTorch operations (the tiled backend), which is slower than attention in 16 bits.

The gradients are straight-through: the backward is that of the inputs in 16 bits, from the out and
log-sum-exp of this forward (P = exp(S - lse) with S of 16 bits). They have no derivative, and there
is no forward mode: both raise NotImplementedError. The error of a score grows with that product of
norms, and gradients with its exponential: they are of use up to about 150 at level ``fast`` and 500
at the others, and overflow beyond.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from flash_attn import _arguments, _backends, _ops
from flash_attn._arguments import FP8_LEVELS, Rotary, _kind
from flash_attn._backends import Remember, quantisation
from flash_attn._numbers import flag, integer
from flash_attn._rotary import apply_rotary
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
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
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
    rotary_cos, rotary_sin : (seqlen_rotary, rotary_dim / 2), optional
        Rotate q and k first, by these tables of the dtype of q or float32: the same bits as
        ``apply_rotary_emb`` of both. Row i is at position i; seqlen_q must be seqlen_k. Without a
        gradient, with a head dimension up to 128, tables of the dtype of q and a rotary_dim that is
        a multiple of 16 the pass that quantises does it; else it is a pass of its own.
    rotary_interleaved : bool
        True rotates pairs (2i, 2i + 1) (GPT-J), False pairs (i, i + rotary_dim / 2) (GPT-NeoX).

    Returns
    -------
    out : (batch, seqlen_q, nheads, headdim_v), the dtype of q
    softmax_lse : (batch, nheads, seqlen_q) float32, with return_softmax_lse

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As ``flash_attn_func``; for a dtype other than those above; for another level; for tables
        that do not fit.
    """
    left, right = read_window(window_size)
    given: Any = (softmax_scale, causal, left, right, softcap, alibi_slopes, s_aux, deterministic)
    given = (*given, _number(level))
    if rotary_cos is None and rotary_sin is None:
        result = _ops.flash_attn_forward(q, k, v, *_dense(*given), out=out)
    else:
        interleaved = flag("rotary_interleaved", rotary_interleaved)
        tables: Any = (rotary_cos, rotary_sin)
        everything = (q, k, v, *given, *tables, interleaved, out)
        seen = isinstance(softmax_scale, Tensor) or _ops.is_seen(everything)
        if _is_narrow(q) and not seen and not _ops.wants_gradient(everything):
            result = _run_rotated(*everything)
        else:
            if not torch.compiler.is_compiling():
                # The scale, which may want a gradient, is the operator's to check.
                problem = _ops._dense_problem(q, k, v, *_dense(None, *given[1:]))
                _check_dense_tables(problem, *tables)
            how: Any = (*tables, 0, None, None, interleaved)
            q, k = apply_rotary(q, *how), apply_rotary(k, *how)
            result = _ops.flash_attn_forward(q, k, v, *_dense(*given), out=out)
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
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    out: Tensor | None = None,
) -> Any:
    """The same over packed sequences, as ``flash_attn_varlen_func``, but without pages.

    Parameters
    ----------
    q : (total_q, nheads, headdim) float16 or bfloat16
    k : (total_k, nheads_kv, headdim)
    v : (total_k, nheads_kv, headdim_v)
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32
    max_seqlen_q, max_seqlen_k : int
    level : {"fast", "balanced", "accurate"}
    rotary_cos, rotary_sin, rotary_interleaved
        As above; row i of each sequence is at position i, of q and of k. It is a pass of its own.

    Returns
    -------
    out : (total_q, nheads, headdim_v), the dtype of q
    softmax_lse : (nheads, total_q) float32, with return_softmax_lse
    """
    left, right = read_window(window_size)
    bounds: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    given: Any = (0.0, softmax_scale, causal, left, right, softcap, alibi_slopes)
    named: Any = {"s_aux": s_aux, "deterministic": deterministic, "fp8_level": _number(level)}
    if rotary_cos is not None or rotary_sin is not None:
        if not torch.compiler.is_compiling():
            # The scale, which may want a gradient, is the operator's to check.
            without_scale: Any = (0.0, None, *given[2:])
            problem = _ops._varlen_problem(q, k, v, *bounds, *without_scale, **named)
            rows = max(problem.max_seqlen_q, problem.max_seqlen_k)
            _check_tables(problem, rotary_cos, rotary_sin, rows)
        tables: Any = (rotary_cos, rotary_sin, 0)
        interleaved = flag("rotary_interleaved", rotary_interleaved)
        for_q: Any = (*tables, cu_seqlens_q, max_seqlen_q, interleaved)
        for_k: Any = (*tables, cu_seqlens_k, max_seqlen_k, interleaved)
        q, k = apply_rotary(q, *for_q), apply_rotary(k, *for_k)
    result = _ops.flash_attn_varlen_forward(q, k, v, *bounds, *given, **named, out=out)
    return result[:2] if return_softmax_lse else result[0]


def _is_narrow(q: Any) -> bool:
    """Whether a pass may rotate these heads. A launch of its own is faster for wider ones."""
    return isinstance(q, Tensor) and q.dim() == 4 and q.shape[-1] <= 128


def _dense(
    softmax_scale: Any,
    causal: Any,
    left: int,
    right: int,
    softcap: Any,
    alibi_slopes: Any,
    s_aux: Any,
    deterministic: Any,
    fp8_level: int,
) -> tuple[Any, ...]:
    """The arguments of the operator behind q, k and v."""
    options = (0.0, softmax_scale, causal, left, right, softcap, alibi_slopes, False)
    return *options, s_aux, deterministic, None, None, None, fp8_level


def _attend_rotated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
    deterministic: bool,
    fp8_level: int,
    rotary_cos: Tensor,
    rotary_sin: Tensor,
    interleaved: bool,
    out: Tensor | None,
    *,
    remember: Remember | None = None,
) -> _ops.Forward:
    """The operator's plain implementation, with the rotation in the pass where that has it."""
    options = (softmax_scale, causal, left, right, softcap, alibi_slopes, s_aux, deterministic)
    problem = _ops._dense_problem(q, k, v, *_dense(*options, fp8_level))
    _check_dense_tables(problem, rotary_cos, rotary_sin)
    rotary = Rotary(rotary_cos, rotary_sin, interleaved)
    if _backends.rotates_inside(problem, rotary):
        problem = problem._replace(rotary=rotary)
    else:
        remember = None  # it would remember attention alone
        q, k = (
            apply_rotary(x, rotary_cos, rotary_sin, interleaved=interleaved)
            for x in (problem.q, problem.k)
        )
        problem = problem._replace(q=q, k=k)
    return _ops._run_forward(problem, None, False, out, remember)


_run_rotated = _ops.remembering(_attend_rotated, inspect.signature(_attend_rotated))


def _check_dense_tables(problem: _arguments.Attention, rotary_cos: Any, rotary_sin: Any) -> None:
    seqlen_q, seqlen_k = problem.max_seqlen_q, problem.max_seqlen_k
    if seqlen_q != seqlen_k:
        raise ValueError(
            f"q and k must be equally long with rotary_cos, got {seqlen_q} and {seqlen_k} rows"
        )
    _check_tables(problem, rotary_cos, rotary_sin, seqlen_k)


def _check_tables(
    problem: _arguments.Attention, rotary_cos: Any, rotary_sin: Any, rows: int
) -> None:
    is_float = isinstance(rotary_cos, Tensor) and rotary_cos.dtype == torch.float32
    dtype = torch.float32 if is_float else None
    _arguments.check_tables(rotary_cos, rotary_sin, problem.q, rows, dtype)


@torch.no_grad()
def quantize(
    x: Tensor, nheads_kv: int | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round a tensor to float8_e4m3fn, with a scale for each sequence and head.

    The result is what ``flash_attn_func`` and the others take as q, k or v in FP8, and
    ``flash_attn_with_kvcache`` as a cache. x is not multiplied by the orthogonal matrix of the
    levels: a cache is read by queries that are not either.

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
        The largest magnitude / 448; 1 where that magnitude is below 2^-100, and all become 0.

    Raises
    ------
    TypeError, ValueError
        If x is no floating-point tensor of such a shape, or nheads_kv does not divide its heads.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {_kind(x)}")
    _arguments.check_strided("x", x)
    rank = 4 if cu_seqlens is None else 3
    if x.dim() != rank or x.shape[-1] == 0:
        raise ValueError(
            f"x must have {rank} dimensions, the last of at least 1, got shape {tuple(x.shape)}"
        )
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
    if batch == 0:
        return torch.zeros_like(x, dtype=_arguments.FP8), x.new_empty(
            0, groups, dtype=torch.float32
        )
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
