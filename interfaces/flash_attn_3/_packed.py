"""Packed sequences, written as such ones as ``flash_attn`` takes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn import _arguments

Lengths = tuple[Tensor, Tensor, int, int]  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


class UsedRows:
    """The rows that are in use, of packed sequences with unused ones at their ends.

    Attributes
    ----------
    cu_seqlens : Tensor
        (batch + 1,) int32, of the rows in use.
    """

    def __init__(self, name: str, q: Tensor, cu_seqlens_q: Tensor, used: Tensor) -> None:
        _arguments._check_tensor("q", q, q, 3)
        _arguments._check_index("cu_seqlens_q", cu_seqlens_q, q)
        batch = max(0, cu_seqlens_q.shape[0] - 1)  # fewer than one bound are refused later
        _arguments._check_index(name, used, q, (batch,), "(batch,)")
        lengths = cu_seqlens_q.diff()
        if _arguments.is_readable(used):
            _arguments.check_used(name, used.tolist(), "cu_seqlens_q", lengths.tolist())
        used = torch.minimum(used, lengths).clamp(min=0)
        self.cu_seqlens = F.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        row = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True)
        place = row - F.pad(cu_seqlens_q, (0, 1))[sequence]
        unused = (place < 0) | (place >= F.pad(used, (0, 1))[sequence])
        self._order = unused.to(torch.uint8).argsort(stable=True)
        self._inverse = self._order.argsort()

    def first(self, x: Tensor, dim: int = 0) -> Tensor:
        """x with the rows in use before all others; what has other rows is refused later."""
        fits = isinstance(x, Tensor) and x.shape[dim : dim + 1] == self._order.shape
        return _take(x, dim, self._order) if fits else x

    def back(self, x: Tensor, dim: int = 0) -> Tensor:
        """What ``first`` returned, with each row where it was."""
        return _take(x, dim, self._inverse)


def _take(x: Tensor, dim: int, rows: Tensor) -> Tensor:
    if x.dtype == torch.float8_e4m3fn:  # PyTorch cannot index these everywhere
        return x.view(torch.uint8).index_select(dim, rows).view(x.dtype)
    return x.index_select(dim, rows)


def last_chunk(size: int, used: Tensor, leftpad: Tensor | None) -> Tensor:
    """(batch,) int32: in which row the chunk of a sequence's last key begins."""
    first = torch.zeros_like(used) if leftpad is None else leftpad
    position = (used - first - 1).clamp(min=0)
    return first + position - position % size


def in_chunks(size: int, problem: _arguments.Attention) -> tuple[int, Lengths, dict[str, Any]]:
    """Packed sequences, each divided into one for every chunk of ``size`` positions.

    The keys of a sequence have positions 0, 1, ..., and its last query has that of the last key.
    Queries before the first key are in chunks of their own, which have no keys.

    Returns
    -------
    pieces : int
        Into how many each sequence is divided. Some may be empty.
    lengths : tuple
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of the pieces.
    keys : dict
        Their block_table, leftpad_k and seqused_k.
    """
    cu_seqlens_q, cu_seqlens_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    longest_q, longest_k = problem.max_seqlen_q, problem.max_seqlen_k
    used, table = problem.seqused_k, problem.block_table
    assert cu_seqlens_q is not None
    size = min(size, max(longest_q, longest_k, 1))  # so that no border overflows
    rows = cu_seqlens_q.diff()
    stored = used if cu_seqlens_k is None else cu_seqlens_k.diff()
    assert stored is not None
    first = torch.zeros_like(rows) if problem.leftpad_k is None else problem.leftpad_k
    count = ((stored if used is None else used) - first).clamp(min=0)  # of keys
    shift = count - rows  # from a query's row to its position
    if table is None:
        before = 0 if cu_seqlens_q is cu_seqlens_k and used is None else -(-longest_q // size)
        pieces, begin = max(1, before - (-longest_k // size)), torch.full_like(shift, -before)
    else:  # pieces for chunks that have queries
        pieces = max(1, (longest_q + size - 2) // size + 1)
        begin = shift.div(size, rounding_mode="floor")
    index = torch.arange(pieces + 1, dtype=torch.int32, device=rows.device)
    borders = (begin[:, None] + index) * size
    bounds_q = _bounds(cu_seqlens_q, borders - shift[:, None], rows)
    ends = borders.clamp(min=0).minimum(count[:, None])
    keys: dict[str, Any] = {"block_table": None, "leftpad_k": None, "seqused_k": None}
    if table is None:
        assert cu_seqlens_k is not None
        bounds_k = _bounds(cu_seqlens_k, borders + first[:, None] * (borders > 0), stored)
        counts = ends.diff()
        if problem.leftpad_k is not None:  # it lies in the piece of the first key
            pads = first[:, None] * (borders[:, :-1] == 0)
            keys["leftpad_k"], counts = pads.flatten(), counts + pads
        if used is not None:
            keys["seqused_k"] = counts.flatten()
    else:
        bounds_k = bounds_q  # not read where there are pages
        places = ends + first[:, None]
        keys["block_table"] = table.repeat_interleave(pieces, 0)
        keys["leftpad_k"], keys["seqused_k"] = places[:, :-1].flatten(), places[:, 1:].flatten()
    if table is not None or problem.leftpad_k is None:  # else the rows before the keys count too
        longest_k = min(size, longest_k)
    return pieces, (bounds_q, bounds_k, min(size, longest_q), longest_k), keys


def _bounds(cu_seqlens: Tensor, borders: Tensor, lengths: Tensor) -> Tensor:
    """cu_seqlens of sequences that are divided at rows ``borders`` (batch, pieces + 1)."""
    begins = cu_seqlens[:-1, None] + borders[:, :-1].clamp(min=0).minimum(lengths[:, None])
    return torch.cat((begins.flatten(), cu_seqlens[-1:]))
