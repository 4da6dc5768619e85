"""Attention to a set of keys from attention to its parts."""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys from that to each: out (..., dim), lse (...) or (..., 1)."""
    whole = torch.logaddexp(lse, other_lse)
    finite = whole.masked_fill(whole == -torch.inf, 0.0)  # no visible key: both weights are 0
    weight, other_weight = (torch.exp(x - finite) for x in (lse, other_lse))
    if lse.dim() < out.dim():
        weight, other_weight = weight[..., None], other_weight[..., None]
    return (out * weight + other * other_weight).to(out.dtype), whole
