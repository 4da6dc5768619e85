"""RMS normalisation, with dropout and a residual if asked for."""

from functools import partial

import torch
from torch import Tensor

from flash_attn.ops import layer_norm
from flash_attn.ops.triton import layer_norm as triton

dropout_add_rms_norm = partial(layer_norm.dropout_add_layer_norm, is_rms_norm=True)
dropout_add_rms_norm.__doc__ = "``dropout_add_layer_norm`` with an RMS normalisation."


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS normalisation of (..., hidden_size), in the dtype of ``x``."""
    return triton.rms_norm_fn(x, weight, None, eps=epsilon)


class RMSNorm(triton.RMSNorm):
    """RMS normalisation with a learnable scale."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, device=device, dtype=dtype)


class DropoutAddRMSNorm(layer_norm.DropoutAddLayerNorm):
    """:func:`dropout_add_rms_norm` with a learnable scale. Dropout is applied in training alone."""

    is_rms_norm = True
