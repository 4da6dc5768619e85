"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864): the one implementation."""

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
    return torch.cat((rotated.to(x.dtype), passed_through), dim=-1)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the tokens of a batch by their positions. Plain PyTorch, differentiable.

    Parameters
    ----------
    x : (batch, seqlen, nheads, headdim), or (total, nheads, headdim) with ``cu_seqlens``
    cos, sin : (seqlen_ro, rotary_dim / 2)
        Table over positions; rotary_dim <= headdim.
    seqlen_offsets : int or (batch,) int32 or int64
        Position of the first token of each sequence. Positions that a tensor puts outside the
        table are clamped into it (an int is checked).
    cu_seqlens : (batch + 1,) int32 or int64, optional
        Where each sequence starts in ``x``. Tokens that belong to no sequence are not rotated.
    max_seqlen : int, required with ``cu_seqlens``
        Length of the longest sequence.
    interleaved : bool
        See :func:`rotate`.
    inplace : bool
        Write the result to ``x`` and return ``x``. As for every in-place operation of PyTorch,
        ``x`` must not be a leaf that requires a gradient.
    conjugate : bool
        Rotate by the negative angle.

    Returns
    -------
    Tensor
        Shape and dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was given and what is accepted.
    """
    _check_arguments(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    if cu_seqlens is not None:
        cos, sin = _gather_packed(x.shape[0], cos, sin, seqlen_offsets, cu_seqlens)
    elif isinstance(seqlen_offsets, Tensor):
        positions = seqlen_offsets.unsqueeze(1) + torch.arange(x.shape[1], device=x.device)
        positions = positions.clamp(0, cos.shape[0] - 1)
        cos, sin = cos[positions], sin[positions]
    else:
        positions_in_table = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
        cos, sin = cos[positions_in_table], sin[positions_in_table]
    out = rotate(x, cos, -sin if conjugate else sin, interleaved)
    return x.copy_(out) if inplace else out


def _gather_packed(
    total: int, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of the tables for packed tokens, each (total, rotary_dim / 2)."""
    batch = cu_seqlens.shape[0] - 1
    if total == 0 or batch == 0:
        return cos.new_ones(total, cos.shape[1]), sin.new_zeros(total, sin.shape[1])
    token = torch.arange(total, device=cos.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    in_a_sequence = ((sequence < batch) & (token >= cu_seqlens[0])).unsqueeze(1)
    sequence = sequence.clamp(max=batch - 1)
    offset = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    positions = (token - cu_seqlens[sequence] + offset).clamp(0, cos.shape[0] - 1)
    return (
        torch.where(in_a_sequence, cos[positions], 1.0),
        torch.where(in_a_sequence, sin[positions], 0.0),
    )


def _check_arguments(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | Tensor | None,
) -> None:
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {given}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    layout = (
        "(batch, seqlen, nheads, headdim)" if cu_seqlens is None else "(total, nheads, headdim)"
    )
    if x.ndim != (4 if cu_seqlens is None else 3):
        raise ValueError(f"x must have shape {layout}, got {tuple(x.shape)}")
    if cos.ndim != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos must have shape (seqlen_ro, rotary_dim / 2) with rotary_dim <= headdim = "
            f"{x.shape[-1]}, got {tuple(cos.shape)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(
            f"sin must have the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}"
        )

    longest: int | Tensor | None = x.shape[1]
    if cu_seqlens is not None:
        _check_indices("cu_seqlens", cu_seqlens, x, "(batch + 1,)")
        if max_seqlen is None:
            raise ValueError("max_seqlen must be given with cu_seqlens, got None")
        longest = max_seqlen
    if isinstance(seqlen_offsets, Tensor):
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        _check_indices("seqlen_offsets", seqlen_offsets, x, f"(batch,) = ({batch},)", batch)
        first = 0
    elif isinstance(seqlen_offsets, int):
        first = seqlen_offsets
    else:
        raise TypeError(
            f"seqlen_offsets must be an int or a tensor, got {type(seqlen_offsets).__name__}"
        )
    # A max_seqlen on the device is left there: reading it would wait for the device.
    if isinstance(longest, int) and not 0 <= first <= cos.shape[0] - longest:
        raise ValueError(
            f"seqlen_offsets must be >= 0, and cos must have a row for each position up to "
            f"seqlen_offsets + seqlen, got seqlen_offsets {first}, seqlen {longest} and cos "
            f"{tuple(cos.shape)}"
        )


def _check_indices(
    name: str, tensor: Tensor, x: Tensor, expected: str, length: int | None = None
) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must have dtype torch.int32 or torch.int64, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    wrong_length = tensor.numel() == 0 if length is None else tensor.numel() != length
    if tensor.ndim != 1 or wrong_length:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
