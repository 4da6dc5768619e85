"""Activation functions and their gradients, of tensors of any shape.

GELU is the tanh form of Hendrycks and Gimpel, arXiv:1606.08415. SwiGLU is silu(x) * y, Shazeer,
arXiv:2002.05202. ``g`` is the gradient of the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_attn._arguments import check_tensors
from flash_attn._differentiation import differentiable_once, refuse_transforms, returned
from flash_attn._rowwise import accumulation_dtype, as_rows, check_like, rowwise


def gelu_fwd(x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))."""
    return F.gelu(x, approximate="tanh")


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of :func:`gelu_fwd`."""
    return torch.ops.aten.gelu_backward(g.to(x.dtype), x, approximate="tanh")


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """GELU of ``y`` (..., dim) plus ``bias`` (dim,), in the dtype of ``y``, rounded once."""
    return gelu_fwd(_biased(y, bias)).to(y.dtype)


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`bias_gelu` in ``y`` (..., dim) and ``bias``."""
    x = _biased(y, bias)
    grad = gelu_bwd(g.to(x.dtype), x)
    return grad.to(y.dtype), as_rows(grad).sum(0).to(bias.dtype)


def _biased(y: Tensor, bias: Tensor) -> Tensor:
    dtype = accumulation_dtype(torch.promote_types(y.dtype, bias.dtype))
    return y.to(dtype) + bias.to(dtype)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(y, bias)
        return returned(bias_gelu(y, bias))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return bias_gelu_back(grads[0], *ctx.saved_tensors)


def bias_gelu_impl(y: Tensor, bias: Tensor) -> Tensor:
    """:func:`bias_gelu`, differentiable once, which keeps ``y`` and ``bias`` alone."""
    check_tensors(y=y, bias=bias)
    refuse_transforms()
    return _BiasGelu.apply(y, bias)


fast_gelu_impl = gelu_fwd


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of ReLU; at 0 it is ``g``."""
    return torch.where(x >= 0, g, 0.0).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """Square of the positive part."""
    return F.relu(x).square()


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of :func:`sqrelu_fwd`."""
    return (2.0 * g * F.relu(x)).to(x.dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y of two tensors of one shape, rounded once."""
    check_tensors(x=x, y=y)
    check_like(x, x.shape, y=y)
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype))
    _swiglu([as_rows(t) for t in (x, y, out)])
    return out


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`swiglu_fwd` in ``x`` and ``y``."""
    dx, dy = x.new_empty(x.shape), y.new_empty(y.shape)
    _swiglu_gradients([as_rows(t) for t in (x, y, g, dx, dy)])
    return dx, dy


class SwiGLUFunction(torch.autograd.Function):
    """:func:`swiglu_fwd`, differentiable once. Its arguments are all that it keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return returned(swiglu_fwd(x, y))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return swiglu_bwd(x, y, g)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y of two tensors of one shape, differentiable once; keeps its arguments alone."""
    refuse_transforms()
    return SwiGLUFunction.apply(x, y)


@rowwise
def _swiglu(rows: list[Tensor], columns: tuple[()], options: tuple[()]) -> tuple[()]:
    x, y, out = rows
    out.copy_(F.silu(x.to(accumulation_dtype(x.dtype))) * y)
    return ()


@rowwise
def _swiglu_gradients(rows: list[Tensor], columns: tuple[()], options: tuple[()]) -> tuple[()]:
    x, y, g, dx, dy = rows
    x = x.to(accumulation_dtype(x.dtype))
    sigmoid = x.sigmoid()
    silu = x * sigmoid
    dx.copy_((sigmoid + silu * (1.0 - sigmoid)) * y * g)
    dy.copy_(silu * g)
    return ()
