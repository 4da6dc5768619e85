"""Which tokens of a sequence each rank holds."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from flash_attn._arguments import lengths_between
from flash_attn._differentiation import differentiable_once
from flash_attn._numbers import integer

Order = Literal["zigzag", "contiguous"]
Group = dist.ProcessGroup | DeviceMesh | None


class Grid(NamedTuple):
    """The ranks that share a sequence: K and V go around a ring, heads are divided within a row.

    None stands for a group of this rank alone.
    """

    ring: dist.ProcessGroup | None
    heads: dist.ProcessGroup | None

    @property
    def sizes(self) -> tuple[int, int]:
        return size_of(self.ring), size_of(self.heads)

    @property
    def ranks(self) -> tuple[int, int]:
        """Where in the ring and in the row this rank is."""
        return tuple(0 if x is None else dist.get_rank(x) for x in self)  # type: ignore[return-value]


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def grid_of(group: Group) -> Grid:
    """A ring; or of a 2-D mesh, rings along its first dimension and rows along its second.

    Raises
    ------
    ValueError
        If this rank is not in the group, or the mesh has more than two dimensions, or ranks in an
        order that groups of them do not have.
    """
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:
            raise ValueError("group must be a mesh that this rank is in")
        if group.ndim == 2:
            _check_places(tuple(map(tuple, group.mesh.tolist())))
            return Grid(group.get_group(0), group.get_group(1))
        if group.ndim != 1:
            raise ValueError(f"group must be a mesh of 1 or 2 dimensions, got {group.ndim}")
        return Grid(group.get_group(), None)
    ring = dist.group.WORLD if group is None else group
    if ring is None:
        raise ValueError("group needs torch.distributed: call init_process_group() first")
    if not isinstance(ring, dist.ProcessGroup):  # new_group() gives others a number
        raise ValueError(
            f"group must be a ProcessGroup or DeviceMesh that this rank is in, got {ring!r}"
        )
    return Grid(ring, None)


@lru_cache
def _check_places(ranks: tuple[tuple[int, ...], ...]) -> None:
    """Groups count their ranks as the ranks ascend: those of a row need the same place in their
    columns, and those of a column in their rows.
    """
    for lines, across in (
        (ranks, tuple(zip(*ranks, strict=True))),
        (zip(*ranks, strict=True), ranks),
    ):
        for line in lines:
            places = {sorted(other).index(x) for x, other in zip(line, across, strict=True)}
            if len(places) > 1:
                raise ValueError(
                    f"group must be a mesh whose ranks ascend, or have one order in all rows and "
                    f"one in all columns, got {[list(row) for row in ranks]}"
                )


@dataclass(frozen=True)
class Layout:
    """How ``total`` tokens lie on a grid of ``ring`` x ``heads`` ranks.

    The sequence is cut into pieces of one size (the last ones may be shorter, or empty), one for
    each place in the ring, or two in zigzag order. There place r has pieces r and 2 ring - 1 - r,
    so that under a causal mask all have the same work:

        place      0   1   2   3   3   2   1   0
        piece      0   1   2   3   4   5   6   7

    The ranks of a row divide the tokens of their place among them, in order.
    """

    total: int
    ring: int = 1
    heads: int = 1
    order: Order = "zigzag"

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            accepted = ", ".join(get_args(Order))
            raise ValueError(f"order must be one of {accepted}, got {self.order!r}")

    def chunks_of_place(self, place: int) -> list[range]:
        """The tokens of all ranks of a row: ranges that ascend."""
        if self.order == "contiguous":
            return joined([_cut(self.total, self.ring)[place]])
        pieces = _cut(self.total, 2 * self.ring)
        return joined([pieces[place], pieces[2 * self.ring - 1 - place]])

    def chunks(self, place: int, column: int) -> list[range]:
        """The tokens of one rank."""
        of_place = self.chunks_of_place(place)
        part = _cut(sum(map(len, of_place)), self.heads)[column]
        return joined(of_rows(of_place, part))

    def lengths(self) -> list[int]:
        """How many tokens each rank has, row by row."""
        grid = itertools.product(range(self.ring), range(self.heads))
        return [sum(map(len, self.chunks(*ranks))) for ranks in grid]


@cache
def _cut(total: int, parts: int) -> tuple[range, ...]:
    size = -(-total // parts)
    return tuple(range(min(i * size, total), min((i + 1) * size, total)) for i in range(parts))


def joined(ranges: Iterable[range]) -> list[range]:
    """The union of ranges, which ascends if they do not."""
    result: list[range] = []
    for x in sorted((x for x in ranges if x), key=lambda x: x.start):
        if result and x.start <= result[-1].stop:
            result[-1] = range(result[-1].start, max(x.stop, result[-1].stop))
        else:
            result.append(x)
    return result


def of_rows(chunks: Sequence[range], rows: range) -> list[range]:
    """The tokens of some rows of a tensor that holds these chunks one behind the other."""
    found, start = [], 0
    for chunk in chunks:
        first = chunk.start - start
        found.append(
            range(max(chunk.start, first + rows.start), min(chunk.stop, first + rows.stop))
        )
        start += len(chunk)
    return [x for x in found if x]


def overlap(x: range, y: range) -> range:
    return range(max(x.start, y.start), min(x.stop, y.stop))


def without(x: range, y: range) -> list[range]:
    """What of ``x`` is not in ``y``."""
    pieces = range(x.start, min(x.stop, y.start)), range(max(x.start, y.stop), x.stop)
    return [piece for piece in pieces if piece]


def as_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def shard(x: Tensor, dim: int = 1, group: Group = None, order: Order = "zigzag") -> Tensor:
    """Return this rank's tokens of a tensor that every rank has whole.

    Parameters
    ----------
    x : Tensor
        Of any shape; ``dim`` counts the tokens.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that share the sequence, as of the attention. Default: all.
    order : {"zigzag", "contiguous"}
        As of the attention. ``ulysses_flash_attn_func`` takes "contiguous".

    Another group or order than the attention's gives wrong results: nothing can check that.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was given and what is accepted.
    """
    grid, dim = grid_of(group), _dimension(x, dim)
    return _own_part(x, dim, grid, Layout(x.shape[dim], *grid.sizes, order))


def _own_part(x: Tensor, dim: int, grid: Grid, layout: Layout) -> Tensor:
    """This rank's tokens of the whole."""
    parts = [x.narrow(dim, chunk.start, len(chunk)) for chunk in layout.chunks(*grid.ranks)]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def unshard(x: Tensor, dim: int = 1, group: Group = None, order: Order = "zigzag") -> Tensor:
    """Return the whole tensor, in the order of the sequence, from what ``shard`` gave each rank.

    Every rank calls it, with the arguments of ``shard``. Its gradient is that of the sum of what
    all ranks make of the result. Raises ValueError if a rank has other tokens than ``shard`` gave
    it.
    """
    grid, dim = grid_of(group), _dimension(x, dim)
    of_ranks = [(x.shape[dim], (str(x.dtype), dim, *x.shape[:dim], *x.shape[dim + 1 :]))]
    for members in reversed(grid):
        if members is not None:
            gathered: list[Any] = [None] * size_of(members)
            dist.all_gather_object(gathered, of_ranks, members)
            of_ranks = sum(gathered, [])
    lengths = [tokens for tokens, _ in of_ranks]
    if len(kinds := {kind for _, kind in of_ranks}) > 1:
        raise ValueError(
            "x must have the same dtype, dim and sizes but that of dim on all ranks, got "
            f"{' and '.join(map(str, sorted(kinds)))}"
        )
    layout = Layout(sum(lengths), *grid.sizes, order)
    if lengths != layout.lengths():
        raise ValueError(
            f"x must have what shard() gives each rank, {layout.lengths()} tokens, got {lengths}"
        )
    return _Unshard.apply(x, dim, grid, layout)


def _dimension(x: Any, dim: Any) -> int:
    """``dim``, counted from the first one of x."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    dim = integer("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be one of the {x.dim()} dimensions of x, got {dim}")
    return dim % x.dim()


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, grid: Grid, layout: Layout) -> Tensor:
        ctx.dim, ctx.grid, ctx.layout = dim, grid, layout
        whole = x.new_zeros(*x.shape[:dim], layout.total, *x.shape[dim + 1 :])
        start = 0
        for chunk in layout.chunks(*grid.ranks):
            whole.narrow(dim, chunk.start, len(chunk)).copy_(x.narrow(dim, start, len(chunk)))
            start += len(chunk)
        return _summed(whole, grid)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = _summed(gradients[0].clone(memory_format=torch.contiguous_format), ctx.grid)
        return _own_part(whole, ctx.dim, ctx.grid, ctx.layout), None, None, None


def _summed(x: Tensor, grid: Grid) -> Tensor:
    for members in grid:
        if members is not None:
            dist.all_reduce(x, group=members)
    return x


def position_ids(
    total: int,
    group: Group = None,
    order: Order = "zigzag",
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the places of this rank's tokens in the sequence, (tokens,) int64.

    With the ``cu_seqlens`` of documents packed into ``total`` tokens, the places in the documents.
    ``group`` and ``order`` are those of ``shard``.
    """
    total = integer("total", total)
    if total < 0:
        raise ValueError(f"total must be at least 0, got {total}")
    places = torch.arange(total, device=device)
    if cu_seqlens is not None:
        of_documents = host_values(cu_seqlens)
        lengths_between("cu_seqlens", of_documents, "the sequence", None)
        bounds = torch.tensor(of_documents, device=device, dtype=torch.int64)
        starts = torch.cat([bounds.new_zeros(1), bounds])
        places = places - starts[torch.searchsorted(bounds, places, right=True)]
    return shard(places, 0, group, order)


_read: WeakIdKeyDictionary = WeakIdKeyDictionary()  # cu_seqlens on a GPU: version, values


def host_values(cu_seqlens: Any) -> tuple[int, ...]:
    """The bounds of documents; a tensor on a GPU is read once, as long as nothing writes to it."""
    if not isinstance(cu_seqlens, (Tensor, Iterable)):
        raise TypeError(
            f"cu_seqlens must be integers or a 1-D torch.int32 tensor, got "
            f"{type(cu_seqlens).__name__}"
        )
    if not isinstance(cu_seqlens, Tensor):
        values = tuple(integer("cu_seqlens", x) for x in cu_seqlens)
    elif cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            "cu_seqlens must be integers or a 1-D torch.int32 tensor, got a "
            f"{cu_seqlens.dtype} tensor of shape {tuple(cu_seqlens.shape)}"
        )
    elif cu_seqlens.is_cpu or cu_seqlens.is_inference():
        values = tuple(cu_seqlens.tolist())
    else:
        version, values = _read.get(cu_seqlens, (None, ()))
        if version != cu_seqlens._version:
            values = tuple(cu_seqlens.tolist())
            _read[cu_seqlens] = cu_seqlens._version, values
    if not values:
        raise ValueError("cu_seqlens must have documents + 1 values, got none")
    return values
