"""What clients of upstream call below the public functions, with its signatures.

``forward``, ``backward`` and their varlen siblings are ``_flash_attn_forward`` ... of the
interface. ``fwd``, ``bwd`` ... are those of ``flash_attn_2_cuda``, whose arguments are positional.
Random state comes from PyTorch's default generator: a ``gen`` (torch.Generator) other than None is
refused.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn import _ops

Forward = tuple[Tensor, Tensor, Tensor, Tensor]
_INTERFACE = "flash_attn.flash_attn_interface"  # where they are found, also by pickle


def _completed(name: str, routed: Callable[..., Any]) -> Callable[..., Any]:
    """``routed`` with a tensor for each of out, softmax_lse, S_dmask and rng_state."""

    @functools.wraps(routed)
    def private(*args: Any, **kwargs: Any) -> Any:
        return _ops.complete(*routed(*args, **kwargs))

    private.__name__ = private.__qualname__ = name
    private.__module__ = _INTERFACE
    return private


def _softmax_d_of(name: str, routed: Callable[..., Any]) -> Callable[..., Tensor]:
    """``routed``, which writes dq, dk and dv, returning softmax_d alone."""

    i_lse = list(inspect.signature(routed).parameters).index("softmax_lse")

    @functools.wraps(routed)
    def private(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > i_lse:
            args = (*args[:i_lse], _as_stored(args[i_lse]), *args[i_lse + 1 :])
        elif "softmax_lse" in kwargs:
            kwargs["softmax_lse"] = _as_stored(kwargs["softmax_lse"])
        return routed(*args, **kwargs)[3]

    private.__name__ = private.__qualname__ = name
    private.__module__ = _INTERFACE
    return private


def _as_stored(softmax_lse: Any) -> Any:
    """diffusers gives the log-sum-exp with tokens before heads, a view of the forward's.

    Upstream reads its memory, whatever the strides are.
    """
    if isinstance(softmax_lse, Tensor) and softmax_lse.dim() > 1:
        if not softmax_lse.is_contiguous() and softmax_lse.mT.is_contiguous():
            return softmax_lse.mT
    return softmax_lse


forward = _completed("_flash_attn_forward", _ops.flash_attn_forward)
varlen_forward = _completed("_flash_attn_varlen_forward", _ops.flash_attn_varlen_forward)
backward = _softmax_d_of("_flash_attn_backward", _ops.flash_attn_backward)
varlen_backward = _softmax_d_of("_flash_attn_varlen_backward", _ops.flash_attn_varlen_backward)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any = None,
) -> Forward:
    """Return out, softmax_lse, S_dmask and rng_state; see ``flash_attn_func``."""
    _check_generator(gen)
    with torch.no_grad():
        return forward(
            q,
            k,
            v,
            p_dropout,
            softmax_scale,
            is_causal,
            window_size_left,
            window_size_right,
            softcap,
            alibi_slopes,
            return_softmax,
            out=out,
        )


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any = None,
) -> Forward:
    """Return out, softmax_lse, S_dmask and rng_state; see ``flash_attn_varlen_func``."""
    _check_generator(gen)
    with torch.no_grad():
        return varlen_forward(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            p_dropout,
            softmax_scale,
            is_causal,
            window_size_left,
            window_size_right,
            softcap,
            alibi_slopes,
            return_softmax,
            block_table,
            leftpad_k,
            seqused_k,
            zero_tensors,
            out=out,
        )


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: Any = None,
    rng_state: Tensor | None = None,
) -> Forward:
    """Return dq, dk, dv (written in place where given) and softmax_d."""
    _check_generator(gen)
    with torch.no_grad():
        return _ops.flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            _as_stored(softmax_lse),
            dq,
            dk,
            dv,
            p_dropout,
            softmax_scale,
            is_causal,
            window_size_left,
            window_size_right,
            softcap,
            alibi_slopes,
            deterministic,
            rng_state,
        )


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: Any = None,
    rng_state: Tensor | None = None,
) -> Forward:
    """Return dq, dk, dv (written in place where given) and softmax_d."""
    _check_generator(gen)
    with torch.no_grad():
        return _ops.flash_attn_varlen_backward(
            dout,
            q,
            k,
            v,
            out,
            _as_stored(softmax_lse),
            dq,
            dk,
            dv,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            p_dropout,
            softmax_scale,
            is_causal,
            window_size_left,
            window_size_right,
            softcap,
            alibi_slopes,
            deterministic,
            rng_state,
            zero_tensors,
        )


def fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Return out and softmax_lse; see ``flash_attn_with_kvcache``."""
    with torch.no_grad():
        return _ops.flash_attn_with_kvcache(
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
            is_causal,
            window_size_left,
            window_size_right,
            softcap,
            rotary_interleaved,
            alibi_slopes,
            num_splits,
            out=out,
        )


def _check_generator(gen: Any) -> None:
    if gen is not None:
        raise RuntimeError(
            f"the `generator` argument is no longer supported, got {type(gen).__name__}: seed "
            "PyTorch's default generator"
        )
