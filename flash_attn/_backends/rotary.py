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
    if not torch.compiler.is_compiling() and _is_autocast(x.device.type):
        with torch.autocast(x.device.type, enabled=False):  # cat takes no other 16-bit type in it
            return rotate(x, cos, sin, interleaved)
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
    return torch.cat((rotated.to(x.dtype), passed_through), dim=-1)


def _is_autocast(device_type: str) -> bool:
    is_available = torch.amp.is_autocast_available(device_type)
    return is_available and torch.is_autocast_enabled(device_type)
