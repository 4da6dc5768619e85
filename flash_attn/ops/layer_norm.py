"""Layer normalisation, with dropout and a residual if asked for."""

from typing import Any

import torch
from torch import Tensor, nn

from flash_attn.ops.triton.layer_norm import layer_norm_fn


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Layer normalisation of (..., hidden_size), in the dtype of ``x``."""
    return layer_norm_fn(x, weight, bias, eps=epsilon)


def dropout_add_layer_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    is_rms_norm: bool = False,
) -> Any:
    """Normalise dropout(rowscale * layerscale * x0) + residual.

    Arguments are those of :func:`flash_attn.ops.triton.layer_norm.layer_norm_fn`, and so are the
    results, but for the mask: there is one, uint8, all ones without dropout.
    """
    y, total, mask, _ = layer_norm_fn(
        x0,
        weight,
        bias,
        residual,
        eps=epsilon,
        dropout_p=dropout_p,
        rowscale=rowscale,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=True,
        layerscale=layerscale,
    )
    results = [y, total] if prenorm else [y]
    if return_dropout_mask:
        mask = torch.ones_like(x0, dtype=torch.uint8) if mask is None else mask.to(torch.uint8)
        results.append(mask)
    return tuple(results) if len(results) > 1 else y


class DropoutAddLayerNorm(nn.Module):
    """:func:`dropout_add_layer_norm` with learnable weight and bias. Dropout in training alone."""

    is_rms_norm = False
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm, self.p, self.eps = prenorm, p, eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        bias = None if self.is_rms_norm else nn.Parameter(torch.zeros_like(self.weight))
        self.register_parameter("bias", bias)

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        """Return the output and, with ``prenorm``, the sum."""
        return dropout_add_layer_norm(
            x0,
            residual,
            self.weight,
            self.bias,
            self.p if self.training else 0.0,
            self.eps,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
            is_rms_norm=self.is_rms_norm,
        )
