"""Layer and RMS normalisation of dropout(x) + dropout(x1) + residual.

Sums and statistics of 16-bit tensors are float32. Between forward and backward the rounded sum and
the dropout masks are kept, and ``x`` itself if a ``layerscale`` needs its gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_attn._arguments import check_optional_tensors, check_tensors
from flash_attn._differentiation import differentiable_once, refuse_transforms, returned
from flash_attn._numbers import real
from flash_attn._rowwise import Sums, accumulation_dtype, as_rows, check_like, rowwise

Options = tuple[float, bool, bool, float]  # eps, RMS or layer, zero-centred weights, 1 - dropout_p


def layer_norm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    *,
    layerscale: Tensor | None = None,
) -> Any:
    """Normalise dropout(rowscale * layerscale * x) + dropout(x1) + residual. Differentiable once.

    Parameters
    ----------
    x, residual, x1 : (..., hidden_size), the last two optional
    weight, bias : (hidden_size,), optional
    weight1, bias1 : (hidden_size,), optional
        Another scale and shift of the normalised sum, for a second output.
    eps : float
        Added to the variance or, with ``is_rms_norm``, which leaves the mean, to the mean square.
    dropout_p : float in [0, 1)
    rowscale : (...), optional
        Or with all of these dimensions in one, or others of size 1.
    layerscale : (hidden_size,), optional
    prenorm : bool
        Also return the sum, in the dtype of ``residual``. Without a residual that is float32 with
        ``residual_in_fp32``, else the dtype of ``x``.
    zero_centered_weight : bool
        Scales are 1 + weight.
    return_dropout_mask : bool
        Also return what dropout kept of ``x`` and of ``x1``: bool, or None where none was applied.
    out_dtype : torch.dtype, optional
        Dtype of the outputs, by default that of ``x``.
    out, residual_out : (..., hidden_size), contiguous, optional
        Memory for the first output and the sum.

    Returns
    -------
    Tensor, or tuple of what was asked for: output, second output, sum, two masks

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was given and what is accepted.

    References
    ----------
    Ba et al., Layer Normalization, arXiv:1607.06450; Zhang and Sennrich, Root Mean Square Layer
    Normalization, arXiv:1910.07467.
    """
    dropout_p = real("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if weight1 is None and bias1 is not None:
        raise ValueError("weight1 must be given with bias1, got None")
    eps = real("eps", eps)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps must be at least 0 and finite, got {eps}")
    check_tensors(x=x)
    check_optional_tensors(rowscale=rowscale)
    refuse_transforms()
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {type(out_dtype).__name__}")
    for name, given_dtype in (("x", x.dtype), ("out_dtype", out_dtype or x.dtype)):
        if not given_dtype.is_floating_point:
            raise TypeError(f"{name} must be a floating-point dtype, got {given_dtype}")
    shape, affine = x.shape, (weight, bias, weight1, bias1)
    check_like(x, shape, residual=residual, x1=x1, out=out, residual_out=residual_out)
    check_like(x, shape[-1:], weight=weight, bias=bias, weight1=weight1, bias1=bias1)
    check_like(x, shape[-1:], layerscale=layerscale)
    for name, memory in (("out", out), ("residual_out", residual_out)):
        if memory is not None and not memory.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {memory.stride()}")
    y_dtype = x.dtype if out_dtype is None else out_dtype
    sum_dtype = torch.float32 if residual_in_fp32 else x.dtype
    sum_dtype = sum_dtype if residual is None else residual.dtype

    # The factors in float32, so that autograd keeps x as it is.
    if layerscale is not None:
        x = x * layerscale.to(accumulation_dtype(x.dtype))
    if rowscale is not None:
        sizes, rows = ([n for n in x if n != 1] for x in (rowscale.shape, shape[:-1]))
        one_is_flat = min(len(sizes), len(rows)) <= 1
        if sizes == rows or (one_is_flat and rowscale.numel() == math.prod(rows)):
            rowscale = rowscale.reshape(shape[:-1])
        check_like(x, shape[:-1], rowscale=rowscale)
        x = x * rowscale.unsqueeze(-1).to(accumulation_dtype(x.dtype))
    masks = [
        torch.empty_like(t, dtype=torch.bool).bernoulli_(1.0 - dropout_p)
        if t is not None and dropout_p > 0.0
        else None
        for t in (x, x1)
    ]
    # Detached: the results are tensors of their own, in this memory. (A compiled graph loses the
    # gradient of an output that aliases an input: there they are copied to it.)
    compiling = torch.compiler.is_compiling()
    given = [None if t is None or compiling else t.detach() for t in (out, residual_out)]
    terms = (x, residual, x1, *masks)
    options = eps, is_rms_norm, zero_centered_weight, 1.0 - dropout_p
    y, y1, total = _NormalizedSum.apply(*terms, *affine, given, (y_dtype, sum_dtype), options)
    if compiling:
        from flash_attn._in_graph import stored  # which imports the compiler

        y = y if out is None else stored(out, y)
        total = total if residual_out is None else stored(residual_out, total)
    results = [y]
    results += [] if weight1 is None else [y1]
    results += [total] if prenorm else []
    results += masks if return_dropout_mask else []
    return tuple(results) if len(results) > 1 else y


def rms_norm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """:func:`layer_norm_fn` with ``is_rms_norm=True``."""
    arguments: list[Any] = [x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale]
    arguments += [prenorm, residual_in_fp32, zero_centered_weight, True, return_dropout_mask]
    arguments += [out_dtype, out, residual_out]
    return layer_norm_fn(*arguments)


class RMSNorm(nn.Module):
    """:func:`rms_norm_fn` with a learnable weight. Dropout is applied in training alone."""

    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scales to one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Return the output and, with ``prenorm``, the sum."""
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


class _NormalizedSum(torch.autograd.Function):
    """The outputs and the sum of terms (..., hidden_size)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        x1: Tensor | None,
        mask: Tensor | None,
        mask1: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        *affine, (y, total), (y_dtype, sum_dtype), options = rest
        terms = (x, residual, x1, mask, mask1)
        is_sum = any(t is not None for t in (residual, x1, mask)) or sum_dtype != x.dtype
        may_overwrite_x = y is not None and any(ctx.needs_input_grad)
        if total is None and (is_sum or may_overwrite_x):
            total = x.new_empty(x.shape, dtype=sum_dtype)
        y = x.new_empty(x.shape, dtype=y_dtype) if y is None else y
        y1 = None if affine[2] is None else torch.empty_like(y)
        _forward(_rows(*terms, y, y1, total), affine, options)
        total = x if total is None else total
        ctx.save_for_backward(total, mask, mask1, *affine)
        ctx.options = options
        ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, x1)]
        ctx.set_materialize_grads(False)
        return returned(y, y1, total)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mask, mask1, *affine = ctx.saved_tensors
        dx, dresidual, dx1 = (
            total.new_empty(total.shape, dtype=dtype) if needed else None
            for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
        )
        # Without dropout, one tensor is the gradient of x and of the residual.
        is_one = mask is None and dresidual is not None and ctx.dtypes[0] == ctx.dtypes[1]
        dx, written = (dresidual, None) if is_one and dx is not None else (dx, dx)
        rows = _rows(total, mask, mask1, *grads, written, dresidual, dx1)
        sums = _backward(rows, affine, ctx.options)
        # (Autograd casts these to the dtypes of the weights and biases.)
        return dx, dresidual, dx1, None, None, *sums, None, None, None


def _rows(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else as_rows(t) for t in tensors]


@rowwise
def _forward(rows: list[Any], affine: Sums, options: Options) -> Sums:
    x, residual, x1, mask, mask1, y, y1, total = rows
    weight, bias, weight1, bias1 = affine
    eps, is_rms_norm, zero_centered, keep = options
    x = _dropped(x, mask, keep)
    x = x if x1 is None else x + _dropped(x1, mask1, keep)
    x = x if residual is None else x + residual
    results = [(total, x)]
    for output, w, b in ((y, weight, bias), (y1, weight1, bias1)):
        if output is None:
            continue
        w = _scale(w, x.dtype, zero_centered)
        b = None if b is None else b.to(x.dtype)
        if not is_rms_norm:
            results.append((output, F.layer_norm(x, x.shape[1:], w, b, eps)))
        else:
            normalized = F.rms_norm(x, x.shape[1:], w, eps)
            results.append((output, normalized if b is None else normalized + b))
    for target, value in results:
        if target is not None:
            target.copy_(value)
    return ()


@rowwise
def _backward(rows: list[Any], affine: Sums, options: Options) -> Sums:
    """Write the gradients of the terms; return those of the weights and biases."""
    total, mask, mask1, dy, dy1, dtotal, dx, dresidual, dx1 = rows
    weight, bias, weight1, bias1 = affine
    eps, is_rms_norm, zero_centered, keep = options
    x = total.to(accumulation_dtype(total.dtype))
    x = x if is_rms_norm else x - x.mean(1, keepdim=True)
    rstd = (x.square().mean(1, keepdim=True) + eps).rsqrt()
    normalized = x * rstd

    dnormalized = torch.zeros_like(rstd)
    sums: list[Tensor | None] = []
    for dout, w, b in ((dy, weight, bias), (dy1, weight1, bias1)):
        used = dout is not None
        sums.append((dout * normalized).sum(0) if used and w is not None else None)
        sums.append(dout.sum(0, dtype=x.dtype) if used and b is not None else None)
        if used:
            scale = _scale(w, x.dtype, zero_centered)
            dnormalized = dnormalized + (dout if scale is None else dout * scale)
    dsum = dnormalized - normalized * (normalized * dnormalized).mean(1, keepdim=True)
    dsum = dsum if is_rms_norm else dsum - dnormalized.mean(1, keepdim=True)
    dsum = dsum * rstd if dtotal is None else dsum * rstd + dtotal
    for target, drop in ((dx, mask), (dresidual, None), (dx1, mask1)):
        if target is not None:
            target.copy_(_dropped(dsum, drop, keep))
    return tuple(sums)


def _dropped(x: Tensor, mask: Tensor | None, keep: float) -> Tensor:
    """A term of the sum; its gradient is the same function of the sum's."""
    x = x.to(accumulation_dtype(x.dtype))
    return x if mask is None else torch.where(mask, x / keep, 0.0)


def _scale(weight: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor | None:
    weight = None if weight is None else weight.to(dtype)
    return weight if weight is None or not zero_centered else weight + 1.0
