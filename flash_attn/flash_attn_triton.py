"""Upstream's Triton kernels by name, run by this library's.

GPT-NeoX and savanna import this module wherever they use flash attention. They call it for ALiBi
with versions of flash-attn that have no ``alibi_slopes``.
"""

from typing import Any

from torch import Tensor

from flash_attn import flash_attn_interface as _interface
from flash_attn._arguments import _kind

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """``flash_attn.flash_attn_func`` without its other options.

    Raises
    ------
    NotImplementedError
        With a ``bias``; and with ``causal`` where q and k are not equally long, as upstream's mask
        begins in the top left corner.
    """
    if bias is not None:
        raise NotImplementedError(
            f"bias must be None, got {_kind(bias)}: pass alibi_slopes to flash_attn.flash_attn_func"
        )
    lengths: Any = [x.shape[1] for x in (q, k) if isinstance(x, Tensor) and x.dim() > 1]
    if causal and len(set(lengths)) > 1:
        raise NotImplementedError(
            f"q and k must be equally long with causal, got {lengths[0]} and {lengths[1]} rows: "
            "flash_attn.flash_attn_func has a mask that ends in the bottom right corner"
        )
    return _interface.flash_attn_func(q, k, v, 0.0, softmax_scale, causal)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """The same with k and v in one tensor (batch, seqlen_k, 2, nheads_kv, headdim)."""
    k, v = _interface._unpack("kv", kv, 5, 2)
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """The same with all three in one tensor (batch, seqlen, 3, nheads, headdim)."""
    q, k, v = _interface._unpack("qkv", qkv, 5, 3)
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)
