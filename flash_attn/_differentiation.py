"""What the Functions of this library have in common."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _WithoutDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, followed: Tensor, *gradients: Tensor | None) -> tuple[Any, ...]:
        return tuple(x if x is None else x.detach() for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            "this function of flash_attn is differentiable once: use PyTorch's of the same meaning "
            "for derivatives of its gradients"
        )


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Arithmetic in the dtypes that it is written in."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class _Unpacked:
    """A Function's context whose saved tensors are read once, as a checkpoint wants it."""

    def __init__(self, ctx: Any) -> None:
        self.context, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)


NO_BATCHES = (
    "gradients have no batches here (is_grads_batched, vectorize): ask for one after the other"
)


def is_batch(x: Any) -> bool:
    """Whether it is a batch of gradients, of ``is_grads_batched`` or ``vectorize``."""
    return isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A Function's backward whose results raise where their own derivative is wanted.

    PyTorch's ``once_differentiable`` looks at the arriving gradients alone: where only what the
    forward has saved is followed, its results would be constants, silently.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        if any(map(is_batch, gradients)):
            raise NotImplementedError(NO_BATCHES)
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        ctx = _Unpacked(ctx)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        tensors = (*gradients, *ctx.saved_tensors)
        followed = (x for x in tensors if isinstance(x, Tensor) and x.requires_grad)
        if (anchor := next(followed, None)) is None:
            return results
        if isinstance(results, tuple):
            return _WithoutDerivative.apply(anchor, *results)
        return _WithoutDerivative.apply(anchor, results)[0]

    return run


def refuse_transforms() -> None:
    """Raise in torch.func's transforms, of which a Function that writes to memory has none."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "this function of flash_attn has no torch.func transforms: use PyTorch's of the same "
            "meaning"
        )


def returned(*results: Tensor | None) -> Any:
    """What a Function's forward returns, in compiled code too.

    The compiler of torch 2.11 has gradients of zero, silently, where a result was written by an
    operation in place or is what ``to`` left as it was (PyTorch's issue 180642).
    """
    if torch.compiler.is_compiling():
        results = tuple(None if x is None else x.detach() for x in results)
    return results[0] if len(results) == 1 else results
