"""The rotary embedding in PyTorch operations: the specification of the kernels."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate each channel pair by its position's angle: (a, b) -> (a cos - b sin, a sin + b cos).

    Parameters
    ----------
    x : (..., seqlen, nheads, headdim)
    cos, sin : (..., seqlen, rotary_dim / 2)
        Cosine and sine of the angle of each position in ``x`` (already gathered), the same for
        every head. Negate ``sin`` for the inverse rotation, which is also the gradient's.
    interleaved : bool
        True pairs channels (2i, 2i + 1), as in GPT-J; False pairs (i, i + rotary_dim / 2), as in
        GPT-NeoX.

    Returns
    -------
    Tensor
        Shape and dtype of ``x``. Channels from rotary_dim on are copied unchanged. 16-bit inputs
        are computed in float32 and rounded once.
    """
    half = cos.shape[-1]
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.unsqueeze(-2).to(compute_dtype), sin.unsqueeze(-2).to(compute_dtype)

    channels, passed_through = x[..., : 2 * half].to(compute_dtype), x[..., 2 * half :]
    if interleaved:
        a, b = channels.unflatten(-1, (half, 2)).unbind(-1)
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = channels[..., :half], channels[..., half:]
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    if (
        passed_through.shape[-1] > 0
    ):  # in this dtype: under autocast, cat takes one 16-bit type alone
        rotated = torch.cat((rotated, passed_through.to(compute_dtype)), dim=-1)
    return rotated.to(x.dtype)
