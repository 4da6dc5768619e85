"""Convert between padded batches (batch, seqlen, ...) and packed tokens (total, ...).

Everything here is made of differentiable PyTorch operations, so gradients flow both ways. The
tensors may have any dtype: token ids are packed by the same functions as hidden states.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from flash_attn._arguments import check_tensors
from flash_attn._numbers import integer

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",  # imported from here by some training code
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Select rows of the first axis.

    Parameters
    ----------
    x : (rows, ...)
    indices : (nnz,) int64 or int32

    Returns
    -------
    Tensor
        (nnz, ...)

    Raises
    ------
    TypeError, ValueError
        If ``indices`` are no integers of one dimension; IndexError for a row outside, on a CPU.
    """
    check_tensors(x=x)
    _check_indices(indices)
    # index_select, not x[indices]: its gradient is one index_add, without sorting the indices.
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Inverse of :func:`index_first_axis`: scatter rows into zeros.

    Parameters
    ----------
    values : (nnz, ...)
    indices : (nnz,) int64 or int32, each row at most once
    first_axis_dim : int
        Rows of the result.

    Returns
    -------
    Tensor
        (first_axis_dim, ...), zero in the rows that ``indices`` does not name.

    Raises
    ------
    TypeError, ValueError
        If ``indices`` are no integers of one dimension; IndexError for a row outside, on a CPU.
    """
    check_tensors(values=values)
    _check_indices(indices)
    if values.ndim == 0 or values.shape[0] != indices.shape[0]:
        raise ValueError(
            f"values must have one row for each of the {indices.shape[0]} indices, "
            f"got shape {tuple(values.shape)}"
        )
    rows = _count("first_axis_dim", first_axis_dim)
    zeros = values.new_zeros((rows, *values.shape[1:]))
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`index_first_axis` together with ``x`` itself, for a residual connection.

    Returns
    -------
    tuple of Tensor
        (nnz, ...) and (rows, ...)
    """
    return index_first_axis(x, indices), x


class IndexFirstAxis:
    """:func:`index_first_axis` under the name of upstream's autograd function."""

    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """:func:`index_put_first_axis` under the name of upstream's autograd function."""

    apply = staticmethod(index_put_first_axis)


class IndexFirstAxisResidual:
    """:func:`index_first_axis_residual` under the name of upstream's autograd function."""

    apply = staticmethod(index_first_axis_residual)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Remove the padding of a batch.

    The number of tokens depends on the mask, so on a GPU this waits for the device.

    Parameters
    ----------
    hidden_states : (batch, seqlen, ...)
    attention_mask : (batch, seqlen), bool or numeric
        Non-zero where a token is real.
    unused_mask : (batch, seqlen), optional
        Non-zero where a token is allocated but unused: it is kept in the packed tokens and
        counted in ``cu_seqlens``, but not in ``seqused``.

    Returns
    -------
    hidden_states : (total, ...)
        The kept tokens, in row-major order.
    indices : (total,) int64
        Their positions in the flattened (batch * seqlen) batch, for :func:`pad_input`.
    cu_seqlens : (batch + 1,) int32
        Where each sequence starts in the packed tokens.
    max_seqlen : int
    seqused : (batch,) int32
        Real tokens of each sequence.

    Raises
    ------
    ValueError
        If a mask is not (batch, seqlen).
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    real = attention_mask.bool()
    kept = real
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = real | unused_mask.bool()
    indices = kept.flatten().nonzero().flatten()
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    seqused = real.sum(dim=-1, dtype=torch.int32)
    tokens = index_first_axis(rearrange(hidden_states, "b s ... -> (b s) ..."), indices)
    return tokens, indices, _cumulative(seqlens), _max(seqlens), seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Remove the padding of a batch whose rows each hold several sequences, one after another.

    Parameters
    ----------
    hidden_states : (batch, seqlen, ...)
    attention_mask_in_length : (batch, seqlen), int
        Each row lists the lengths of the sequences in that row, then zeros. A row
        ``[2, 3, 0, 0, 0, 0]`` is a sequence of 2 tokens, one of 3, and 1 of padding.

    Returns
    -------
    hidden_states : (total, ...)
    indices : (total,) int64
        Positions in the flattened (batch * seqlen) batch, for :func:`pad_input`.
    cu_seqlens : (sequences + 1,) int32
        Attention sees the sequences of a row as separate.
    max_seqlen : int

    Raises
    ------
    ValueError
        If the mask is not (batch, seqlen), has a negative length, or a row's lengths add up to
        more than seqlen.
    """
    name, lengths = "attention_mask_in_length", attention_mask_in_length
    _check_mask(name, lengths, hidden_states)
    seqlen = hidden_states.shape[1]
    used = torch.arange(seqlen, device=lengths.device) < lengths.sum(dim=-1, keepdim=True)
    indices = used.flatten().nonzero().flatten()
    seqlens = lengths[lengths > 0].to(torch.int32)
    if int(seqlens.sum()) != indices.shape[0]:
        raise ValueError(
            f"{name} must have lengths >= 0 that add up to at most seqlen = {seqlen} in each row, "
            f"got {lengths.tolist()}"
        )
    tokens = index_first_axis(rearrange(hidden_states, "b s ... -> (b s) ..."), indices)
    return tokens, indices, _cumulative(seqlens), _max(seqlens)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens back into a padded batch.

    Parameters
    ----------
    hidden_states : (total, ...)
    indices : (total,) int64
        From :func:`unpad_input`.
    batch, seqlen : int

    Returns
    -------
    Tensor
        (batch, seqlen, ...), zero where there is padding.
    """
    check_tensors(hidden_states=hidden_states)
    batch, seqlen = _count("batch", batch), _count("seqlen", seqlen)
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def _cumulative(seqlens: Tensor) -> Tensor:
    return F.pad(seqlens.cumsum(dim=0, dtype=torch.int32), (1, 0))


def _max(seqlens: Tensor) -> int:
    return int(seqlens.max()) if seqlens.numel() else 0


def _count(name: str, value: int) -> int:
    count = integer(name, value)
    if count < 0:
        raise ValueError(f"{name} must be at least 0, got {count}")
    return count


def _check_indices(indices: Tensor) -> None:
    check_tensors(indices=indices)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must have dtype torch.int64 or torch.int32, got {indices.dtype}")
    if indices.ndim != 1:
        raise ValueError(f"indices must have shape (nnz,), got {tuple(indices.shape)}")


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_tensors(**{"hidden_states": hidden_states, name: mask})
    if hidden_states.ndim < 2:
        raise ValueError(
            f"hidden_states must have shape (batch, seqlen, ...), got {tuple(hidden_states.shape)}"
        )
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} must have the shape (batch, seqlen) of hidden_states, "
            f"{tuple(hidden_states.shape[:2])}, got {tuple(mask.shape)}"
        )
