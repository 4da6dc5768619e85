"""The public functions: signature, docstring, one call down.

All of them compute softmax(scale * Q K^T + bias, masked) V exactly, in the tiled form of Dao,
"FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023).

Options that every function shares:

dropout_p : float in [0, 1)
    Probability of dropping an entry of the normalised attention matrix; 0 outside training.
softmax_scale : float, optional
    Factor on Q K^T. Default 1 / sqrt(headdim). A tensor that requires a gradient gets it.
causal : bool
    Query i sees key j only if j <= i + seqlen_k - seqlen_q: the mask ends in the bottom right
    corner.
window_size : (left, right)
    Query i sees keys i + seqlen_k - seqlen_q - left .. i + seqlen_k - seqlen_q + right; -1 is
    unbounded, and ``causal`` sets right to 0.
softcap : float
    If positive, scores become softcap * tanh(scores / softcap) (Gemma 2).
alibi_slopes : (nheads,) or (batch, nheads) float32, optional
    Adds ``-slope * |i + seqlen_k - seqlen_q - j|`` to the scores (Press et al., "Train Short,
    Test Long", 2022). They have no gradient.
deterministic : bool
    Bit-identical gradients from run to run.
return_attn_probs : bool
    Also return the log-sum-exp and, for tests of dropout, S_dmask.
s_aux : (nheads,) floating point, optional
    Attention sinks: one learnable logit per head that takes part in the softmax and has no value
    (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024). The log-sum-exp
    includes it.
q_descale, k_descale, v_descale : (batch, nheads_kv) float32, optional
    Of q, k and v in float8_e4m3fn alone: what their elements are multiplied by, those of q by the
    descale of the key head that they read; None means 1.
out : Tensor, optional
    Where to write the result; not where a gradient is wanted.

Tensors are float16, bfloat16, float32, float64 or float8_e4m3fn, all of one dtype and device, with
any strides. In float8_e4m3fn the probabilities, too, are in it (up to head dim 128 with an error of
3.1 %, else 2.6 %); the result is bfloat16, and there is no dropout and no gradient
(``flash_attn.fp8`` quantises inside and has one). q, k and v that are not contiguous in the last
dimension are copied. Numbers may be NumPy's, or tensors of one element, which are read (one on a
GPU synchronises; in ``torch.compile(fullgraph=True)`` numbers have to be Python's). ``nheads`` must
be a multiple of ``nheads_kv``: query head h reads key head h // (nheads / nheads_kv). The head
dimension of v may differ from that of q and k. Wrong types and dtypes raise TypeError, other wrong
arguments ValueError. Options that a forced backend lacks, and dropout or a gradient in FP8, raise
NotImplementedError. Indices that lie on the CPU are checked, those on a GPU are clamped into the
tensors. A query without a visible key gives 0, gradient 0 and, as its log-sum-exp, -inf or with
``s_aux`` the sink. A log-sum-exp is float32, of float64 tensors float64.

The kernels have the first derivative, in reverse mode. On the tiled backend derivatives of every
order and mode are right, as are torch.func's transforms; where kernels run, forward mode and second
derivatives raise NotImplementedError, and vmap makes one call after the other.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn import _arguments, _flash_attn_2, _numbers, _ops

_WINDOW = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Attention over sequences of equal length.

    The docstring of ``flash_attn.flash_attn_interface`` has the options and errors.

    Parameters
    ----------
    q : (batch, seqlen_q, nheads, headdim)
    k : (batch, seqlen_k, nheads_kv, headdim)
    v : (batch, seqlen_k, nheads_kv, headdim_v)

    Returns
    -------
    out : (batch, seqlen_q, nheads, headdim_v)
    softmax_lse : (batch, nheads, seqlen_q), with return_attn_probs
        Natural logarithm, float32 (float64 for float64 inputs); differentiable.
    S_dmask : (batch, nheads, seqlen_q, seqlen_k), with return_attn_probs
        Attention probabilities, negative where dropout removed them; empty without dropout. Lengths
        are rounded up to 128.
    """
    left, right = read_window(window_size)
    return_attn_probs = _numbers.flag("return_attn_probs", return_attn_probs)
    result = _ops.flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        left,
        right,
        softcap,
        alibi_slopes,
        return_attn_probs,
        s_aux,
        deterministic,
        q_descale,
        k_descale,
        v_descale,
        0,
        None,
        out,
    )
    return _ops.complete(*result)[:3] if return_attn_probs else result[0]


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """``flash_attn_func`` with kv (batch, seqlen_k, 2, nheads_kv, headdim), read in place."""
    k, v = _unpack("kv", kv, 5, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out=out,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """``flash_attn_func`` with qkv (batch, seqlen, 3, nheads, headdim), read in place."""
    q, k, v = _unpack("qkv", qkv, 5, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out=out,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Attention over packed sequences of different lengths, without padding.

    The other options, and the errors, are in the docstring of ``flash_attn.flash_attn_interface``.

    Parameters
    ----------
    q : (total_q, nheads, headdim)
    k, v : (total_k, nheads_kv, headdim), v with headdim_v
        With block_table pages, (num_pages, page_size, nheads_kv, headdim).
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32
        Cumulative lengths: sequence b is rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1. Lengths may
        be zero. Rows outside every sequence are ignored, and zero in the results.
    max_seqlen_q, max_seqlen_k : int
        At least the longest length.
    block_table : (batch, pages of a sequence) int32, optional
        The pages of each sequence, in order; any page size. Not differentiable.

    Returns
    -------
    out : (total_q, nheads, headdim_v)
    softmax_lse : (nheads, total_q), with return_attn_probs
    S_dmask : (batch, nheads, max_seqlen_q, max_seqlen_k), with return_attn_probs
        Lengths are rounded up to 128.
    """
    left, right = read_window(window_size)
    return_attn_probs = _numbers.flag("return_attn_probs", return_attn_probs)
    result = _ops.flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        left,
        right,
        softcap,
        alibi_slopes,
        return_attn_probs,
        block_table,
        None,
        None,
        False,
        0,
        s_aux,
        deterministic,
        q_descale,
        k_descale,
        v_descale,
        0,
        None,
        out,
    )
    return _ops.complete(*result)[:3] if return_attn_probs else result[0]


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """``flash_attn_varlen_func`` with kv (total_k, 2, nheads_kv, headdim), read in place."""
    k, v = _unpack("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out=out,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """``flash_attn_varlen_func`` with qkv (total, 3, nheads, headdim), read in place."""
    q, k, v = _unpack("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out=out,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Decoding: append keys and values to a cache in place, then attend to it. No gradient.

    The other options, and the errors, are in the docstring of ``flash_attn.flash_attn_interface``.

    Parameters
    ----------
    q : (batch, seqlen_q, nheads, headdim)
    k_cache, v_cache : (batch_cache, capacity, nheads_kv, headdim), v_cache with headdim_v
        With block_table pages, (num_pages, page_size, nheads_kv, headdim). Any strides but of the
        last dimension, which is contiguous; updated in place. Of the dtype of q, or both of
        torch.float8_e4m3fn, which halves their memory and what a step reads; q then is of 16 bits
        (or of float32, where PyTorch operations attend), or in float8_e4m3fn as well. What lies
        behind the last key of a sequence may be read, so its memory has to be there; it never
        reaches a result, whatever it is.
    k, v : (batch, seqlen_new, nheads_kv, headdim), v with headdim_v, optional
        Written to rows cache_seqlens .. cache_seqlens + seqlen_new - 1 of the cache before
        attending.
    rotary_cos, rotary_sin : (seqlen_rotary, rotary_dim / 2), optional
        Rotate k at rows cache_seqlens, cache_seqlens + 1, ... and q at the same rows if causal or
        windowed, otherwise all of q at row cache_seqlens (Su et al., "RoFormer", 2021).
    cache_seqlens : int or (batch,) int32, optional
        Keys in the cache before the append; None, where nothing is appended, means all rows of the
        cache. A negative length means that the batch row is not in
        use: nothing is appended and its output is 0.
    cache_batch_idx : (batch,) int32, optional
        The row of the cache that each batch row uses. Rows must differ if k is given.
    cache_leftpad : (batch,) int32, optional
        The first row of the cache that is a key.
    block_table : (batch, pages of a sequence) int32, optional
        The pages of each sequence, in order; any page size.
    rotary_interleaved : bool
        True rotates pairs (2i, 2i + 1) (GPT-J), False pairs (i, i + rotary_dim / 2) (GPT-NeoX).
    num_splits : int
        Thread blocks that share one sequence's cache; 0 lets the library choose. If it is given, a
        sequence's result has the same bits in the CUDA kernels, whatever else is in the batch.
    q_descale, k_descale, v_descale : (batch, nheads_kv) float32, optional
        Of tensors in float8_e4m3fn: an element stands for itself times the descale of the batch row
        that reads it, and of its head; None means 1. What is appended is divided by it and rounded
        to nearest, at most +-448; with q in float8_e4m3fn, k and v are too, and are copied. Any
        strides: ``scale.expand(batch, nheads_kv)`` will do. Many queries (256 and more, counting
        the heads that share a key head) have such a cache copied to 16 bits, in at most 1 GiB.

    Returns
    -------
    out : (batch, seqlen_q, nheads, headdim_v)
    softmax_lse : (batch, nheads, seqlen_q), with return_softmax_lse
    """
    left, right = read_window(window_size)
    return_softmax_lse = _numbers.flag("return_softmax_lse", return_softmax_lse)
    result = _ops.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        softmax_scale,
        causal,
        left,
        right,
        softcap,
        rotary_interleaved,
        alibi_slopes,
        num_splits,
        s_aux,
        q_descale,
        k_descale,
        v_descale,
        out,
    )
    return result if return_softmax_lse else result[0]


# ---- what clients of the upstream package import beside the functions ----------------------------

_flash_attn_forward = _wrapped_flash_attn_forward = _flash_attn_2.forward
_flash_attn_varlen_forward = _wrapped_flash_attn_varlen_forward = _flash_attn_2.varlen_forward
_flash_attn_backward = _wrapped_flash_attn_backward = _flash_attn_2.backward
_flash_attn_varlen_backward = _wrapped_flash_attn_varlen_backward = _flash_attn_2.varlen_backward

flash_attn_gpu = _flash_attn_2


def _autograd_class(name: str, function: Callable[..., Any]) -> Any:
    """A class whose ``apply`` is ``function`` by position, with upstream's is_grad_enabled last."""
    parameters = inspect.signature(function).parameters.values()
    count = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    def apply(*args: Any) -> Any:
        is_grad_enabled = torch.is_grad_enabled() and all(args[count:])
        with torch.set_grad_enabled(is_grad_enabled):
            return function(*args[:count])

    return type(name, (), {"apply": staticmethod(apply), "__doc__": _autograd_class.__doc__})


FlashAttnFunc = _autograd_class("FlashAttnFunc", flash_attn_func)
FlashAttnKVPackedFunc = _autograd_class("FlashAttnKVPackedFunc", flash_attn_kvpacked_func)
FlashAttnQKVPackedFunc = _autograd_class("FlashAttnQKVPackedFunc", flash_attn_qkvpacked_func)
FlashAttnVarlenFunc = _autograd_class("FlashAttnVarlenFunc", flash_attn_varlen_func)
FlashAttnVarlenKVPackedFunc = _autograd_class(
    "FlashAttnVarlenKVPackedFunc", flash_attn_varlen_kvpacked_func
)
FlashAttnVarlenQKVPackedFunc = _autograd_class(
    "FlashAttnVarlenQKVPackedFunc", flash_attn_varlen_qkvpacked_func
)


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Return the columns of a block of S_dmask: both its lengths are multiples of them."""
    return 128


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """Return x, copied if its last dimension is not contiguous."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """Return x rounded up to a multiple of m."""
    return (x + m - 1) // m * m


def read_window(window_size: Any) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be a pair (left, right), got {window_size!r}") from None
    return left, right


def _unpack(name: str, packed: Any, rank: int, count: int) -> tuple[Tensor, ...]:
    """Split (..., count, nheads, headdim) into views."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(packed).__name__}")
    _arguments.check_strided(name, packed)
    if packed.dim() != rank or packed.shape[-3] != count:
        raise ValueError(
            f"{name} must have {rank} dimensions, the third last of size {count}, "
            f"got shape {tuple(packed.shape)}"
        )
    return torch.unbind(packed, dim=-3)
