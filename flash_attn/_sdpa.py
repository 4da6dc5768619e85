"""The operators of PyTorch's flash attention on CUDA, run by this library.

``scaled_dot_product_attention``, ``nn.MultiheadAttention``, nested tensors and
``torch.nn.attention.varlen`` call them. See ``flash_attn.adapters.register_with_pytorch``.
"""

import atexit
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_attn import _ops
from flash_attn._backends import available_backends

Gradients = tuple[Tensor, Tensor, Tensor]


class Activation:
    """Keeps the operators of this library in the place of PyTorch's, and flash attention first."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            if available_backends("cuda") == ["tiled"]:
                raise RuntimeError(
                    f"flash_attn has no CUDA kernels for {torch.cuda.get_device_name()}, and would "
                    "be slower than PyTorch: see Install in its documentation"
                )
            # The first call of a process sets PyTorch's own order of backends: it has to be before.
            with torch.no_grad():
                first = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device="cuda")
                scaled_dot_product_attention(first, first, first)
        self._kernels: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CUDA")
        for name, function in _OPERATORS.items():
            if hasattr(torch.ops.aten, name):
                self._kernels.impl(name, function, "CUDA")
        self._order = ExitStack()
        self._order.enter_context(sdpa_kernel([*_enabled()], set_priority=True))
        atexit.register(self._order.close)  # while PyTorch is there

    def remove(self) -> None:
        """Put PyTorch's operators and their order back."""
        self._kernels = None
        self._order.close()
        atexit.unregister(self._order.close)


def _enabled() -> Iterable[SDPBackend]:
    """PyTorch's backends that are not turned off, flash attention first."""
    yield SDPBackend.FLASH_ATTENTION
    backends = torch.backends.cuda
    if backends.cudnn_sdp_enabled():
        yield SDPBackend.CUDNN_ATTENTION
    if backends.mem_efficient_sdp_enabled():
        yield SDPBackend.EFFICIENT_ATTENTION
    if backends.math_sdp_enabled():
        yield SDPBackend.MATH


def _window(size: int | None) -> int:
    return -1 if size is None else size


def _random_state(q: Tensor, rng_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """As PyTorch's operators return it: (2,) uint64, and what is of no use."""
    unused = q.new_empty((), dtype=torch.uint64)
    if rng_state is None:
        return q.new_empty(2, dtype=torch.uint64), unused
    return rng_state.view(torch.uint64), unused


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of (batch, seqlen, nheads, headdim), or packed: (total, nheads, headdim)."""
    left, right = _window(window_size_left), _window(window_size_right)
    options = (dropout_p, scale, is_causal, left, right, 0.0, alibi_slopes, return_debug_mask)
    if cum_seq_q is None or cum_seq_k is None:
        if seqused_k is not None or block_table is not None:
            raise NotImplementedError(
                "seqused_k and block_table must be None without cum_seq_q and cum_seq_k: call "
                "flash_attn.flash_attn_with_kvcache"
            )
        # All by position, which takes the host least.
        behind = (None, False, None, None, None, 0, None, out)
        results = _ops.flash_attn_forward(query, key, value, *options, *behind)
    else:
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        results = _ops.flash_attn_varlen_forward(
            query,
            key,
            value,
            *lengths,
            *options,
            block_table,
            seqused_k=seqused_k,
            num_splits=num_splits or 0,
            out=out,
        )
    out, lse, debug_mask, rng_state = results
    if debug_mask is None:
        debug_mask = query.new_empty(0)
    return out, lse, *_random_state(query, rng_state), debug_mask


def _forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return _forward(*arguments, **options, out=out)[1]


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    left, right = _window(window_size_left), _window(window_size_right)
    tensors = (grad_out, query, key, value, out, logsumexp, None, None, None)
    deterministic = torch.are_deterministic_algorithms_enabled()
    state = rng_state.view(torch.int64) if dropout_p > 0 else None
    options = (dropout_p, scale, is_causal, left, right, 0.0, None, deterministic, state)
    if cum_seq_q is None or cum_seq_k is None:
        return _ops.flash_attn_backward(*tensors, *options, None)[:3]
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    return _ops.flash_attn_varlen_backward(*tensors, *lengths, *options)[:3]


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Of (batch, nheads, seqlen, headdim), with an output of the layout of ``query``."""
    out = torch.empty_like(query)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    max_q, max_k = query.shape[2], key.shape[2]
    _, lse, rng_state, unused, debug_mask = _forward(
        q,
        k,
        v,
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
        out=out.transpose(1, 2),
    )
    return out, lse, None, None, max_q, max_k, rng_state, unused, debug_mask


def _scaled_dot_product_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *others: Any,
    scale: float | None = None,
) -> Gradients:
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    dq, dk, dv = _backward(dout, q, k, v, o, *others, scale=scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _below_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's own operators record the gradient."""

    def run(*arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            return function(*arguments, **options)

    return run


_OPERATORS = {
    "_flash_attention_forward": _below_autograd(_forward),
    "_flash_attention_forward_no_dropout_inplace": _below_autograd(_forward_into),
    "_flash_attention_backward": _below_autograd(_backward),
    "_scaled_dot_product_flash_attention": _below_autograd(_scaled_dot_product),
    "_scaled_dot_product_flash_attention_backward": _below_autograd(_scaled_dot_product_backward),
}
