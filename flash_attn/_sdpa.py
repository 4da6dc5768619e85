"""The operators of PyTorch's flash attention on CUDA, run by this library.

``scaled_dot_product_attention``, ``nn.MultiheadAttention``, nested tensors and
``torch.nn.attention.varlen`` call them. See ``flash_attn.adapters.register_with_pytorch``.
"""

import atexit
import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_attn import _ops
from flash_attn._backends import Remember, available_backends
from flash_attn._backends.cuda import AnyPrepared, Prepared
from flash_attn._backends.philox import draw_rng_state

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
        self._settings = ExitStack()
        self._settings.enter_context(sdpa_kernel([*_enabled()], set_priority=True))
        # PyTorch keeps compiled code on disk, by a key that does not tell which backend it took.
        config: Any = torch.compiler.config
        tag = f"{config.cache_key_tag}, flash_attn"
        self._settings.enter_context(config.patch(cache_key_tag=tag))
        atexit.register(self._settings.close)  # while PyTorch is there

    def remove(self) -> None:
        """Put PyTorch's operators and their order back."""
        self._kernels = None
        self._settings.close()
        atexit.unregister(self._settings.close)


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


@functools.cache
def _empty(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Of no element. The one of uint64 makes others: without a dtype new_empty takes less time."""
    with torch.inference_mode(False):  # for any call after the first
        return torch.empty(0, device=device, dtype=dtype)


def _others(
    q: Tensor, debug_mask: Tensor | None, rng_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What PyTorch's operators return behind out and logsumexp.

    A state (2,) uint64, () uint64 that is of no use, and the mask.
    """
    device = q.device
    numbers = _empty(device, torch.uint64)
    state = numbers.new_empty(2) if rng_state is None else rng_state.view(torch.uint64)
    mask = _empty(device, q.dtype) if debug_mask is None else debug_mask
    return state, numbers.new_empty(()), mask


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
    out, lse, *others = results
    return out, lse, *_others(query, *others)


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


# ---- heads before tokens -------------------------------------------------------------------------


def _by_tokens(remember: Remember | None, *given: Tensor) -> tuple[list[Any], Remember | None]:
    """Views (batch, seqlen, nheads, headdim) of tensors (batch, nheads, seqlen, headdim).

    And what remembers a call with the views as one with the tensors, which then needs no views.
    """
    views = [x.transpose(1, 2) for x in given]
    if remember is None:
        return views, None
    tensor_of = {id(view): x for view, x in zip(views, given, strict=True)}

    def remember_given(prepared: AnyPrepared) -> None:
        if not isinstance(prepared, Prepared):
            return
        tensors = {name: tensor_of.get(id(x), x) for name, x in prepared.tensors.items()}
        for name, like in prepared.like.items():  # as a launch makes it: does it lie the same way?
            result = torch.empty_like(tensors[like]).transpose(1, 2)
            if result.stride() != prepared.results[name].stride():
                return
        remember(prepared._replace(tensors=tensors))

    return views, remember_given


@torch.no_grad()
def _checked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    causal: bool,
    return_debug_mask: bool,
    softmax_scale: float | None,
    rng_state: Tensor | None,
    out: Tensor,
    *,
    remember: Remember | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    (*views, out_view), remember = _by_tokens(remember, q, k, v, out)
    options = (dropout_p, softmax_scale, causal, -1, -1, 0.0, None, return_debug_mask)
    behind = (None, False, None, None, None, 0, rng_state, out_view)
    return out, *_ops._dense_forward(*views, *options, *behind, remember=remember)[1:]


@torch.no_grad()
def _checked_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    causal: bool,
    softmax_scale: float | None,
    deterministic: bool,
    rng_state: Tensor | None,
    *,
    remember: Remember | None = None,
) -> tuple[Tensor, ...]:
    views, remember = _by_tokens(remember, dout, q, k, v, out)
    window: Any = (-1, -1)
    options = (dropout_p, softmax_scale, causal, *window, 0.0, None, deterministic, rng_state)
    tensors: Any = (*views, lse, None, None, None)
    results = _ops._dense_backward(*tensors, *options, remember=remember)
    return *(x.transpose(1, 2) for x in results[:3]), results[3]


_heads_first_forward, _heads_first_backward = (
    _ops.remembering(checked, _ops._signature(checked), behind, destination)
    for checked, behind, destination in (
        (_checked_forward, (None,), "out"),
        (_checked_backward, (), None),
    )
)


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
    state = draw_rng_state(query.device) if dropout_p > 0 else None
    options: Any = (dropout_p, is_causal, return_debug_mask, scale, state)
    out = torch.empty_like(query)
    _, lse, debug_mask = _heads_first_forward(query, key, value, *options, out)
    lengths = (query.shape[2], key.shape[2])
    return out, lse, None, None, *lengths, *_others(query, debug_mask, state)


def _scaled_dot_product_backward(
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
) -> Gradients:
    deterministic = torch.are_deterministic_algorithms_enabled()
    state = rng_state.view(torch.int64) if dropout_p > 0 else None
    tensors = (grad_out, query, key, value, out, logsumexp)
    options = (dropout_p, is_causal, scale, deterministic, state)
    dq, dk, dv, _ = _heads_first_backward(*tensors, *options)
    return dq, dk, dv


# ---- registration --------------------------------------------------------------------------------


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
    "_scaled_dot_product_flash_attention": _scaled_dot_product,
    "_scaled_dot_product_flash_attention_backward": _scaled_dot_product_backward,
}
