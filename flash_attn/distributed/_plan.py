"""What a rank of a ring computes and sends: decided on the host, from lengths and options alone.

A mask that depends on positions is one of the kernels' masks on any two ranges of tokens, once the
queries that see no key and the keys that no query sees are cut off: see ``_rectangle``. So the
kernels need not know where in the sequence a block of queries or keys is. ALiBi and the dropout
mask do depend on it: where they are asked for, blocks say their place.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.distributed._layout import Layout, joined

UNBOUNDED = (-1, -1)


class Block(NamedTuple):
    """Attention of some of a rank's queries to some of the keys of one rank."""

    rows: range  # of this rank's queries
    cols: range  # of the keys that came
    window: tuple[int, int]  # ends in the bottom right corner, as everywhere
    is_diagonal: bool = False  # the queries' own keys; every token of a document has one such block
    # Documents, which lie in rows and cols alike: where each begins and the last ends, counted
    # from the first row; and which they are.
    bounds: tuple[int, ...] | None = None
    documents: range | None = None
    # Where the first query and the first key are in their sequence, if the block needs to know.
    place: tuple[int, int] | None = None


@dataclass
class Step:
    """What happens at one distance: a rank has the keys of the rank so far before it."""

    blocks: list[Block]
    receives: list[range]  # rows of the keys of the rank before, in the order they come
    sends: list[range]  # rows of this rank's keys to the rank as far behind

    def __post_init__(self) -> None:
        self.rows = sum(map(len, self.receives))


@dataclass(frozen=True)
class Mask:
    """Who sees whom."""

    left: int
    right: int
    bounds: tuple[int, ...] | None = None  # cu_seqlens of documents
    has_alibi: bool = False
    drops: bool = False

    @property
    def is_simple(self) -> bool:
        """Whether blocks may be joined: nothing depends on positions, and no document ends."""
        return self.bounds is None and not (self.has_alibi or self.drops)


class Plan:
    """The steps of one rank of a ring; step 0 is its own keys.

    `backward` has the blocks of each step of the backward. It has a step more: some blocks of the
    rank's own keys are computed last, while the last gradients of other ranks' keys go back.
    """

    def __init__(self, layout: Layout, mask: Mask, rank: int) -> None:
        ring = layout.ring
        chunks = [layout.chunks_of_place(place) for place in range(ring)]
        self.tokens = sum(map(len, chunks[rank]))
        self.steps = []
        for distance in range(ring):
            source, target = chunks[rank - distance], chunks[(rank + distance) % ring]
            blocks = list(_blocks(chunks[rank], source, mask))
            receives = joined(block.cols for block in blocks)
            if distance == 0:
                receives, sends = [range(self.tokens)], []
            else:
                sends = joined(block.cols for block in _blocks(target, chunks[rank], mask))
            packed = [block._replace(cols=_packed(block.cols, receives)) for block in blocks]
            self.steps.append(Step(packed, receives, sends))
        own, *others = [step.blocks for step in self.steps]
        early, late = _divided(chunks[rank], own, mask) if ring > 1 else (own, [])
        self.backward = [early, *others, late]
        self._lengths: dict[Block, tuple[Tensor, Tensor, int, int]] = {}

    def copy_lengths(self, device: torch.device) -> None:
        """Have the ``lengths`` of all blocks on a device; the host waits until they are there."""
        for block in itertools.chain(*(step.blocks for step in self.steps)):
            if block.bounds is not None:
                cu_seqlens = torch.tensor(block.bounds, dtype=torch.int32).to(device)
                longest = max((b - a for a, b in pairwise(block.bounds)), default=0)
                self._lengths[block] = cu_seqlens, cu_seqlens, longest, longest

    def lengths(self, block: Block) -> tuple[Tensor, Tensor, int, int]:
        """cu_seqlens and the longest document of a block, both twice: for calls on any stream."""
        return self._lengths[block]


def _divided(
    chunks: Sequence[range], own: list[Block], mask: Mask
) -> tuple[list[Block], list[Block]]:
    """A rank's blocks of its own keys: all but those of its last chunk's keys, and those."""
    length = sum(map(len, chunks))
    last = length - len(chunks[-1]) if len(chunks) > 1 else length // 2
    if mask.is_simple and (mask.left, mask.right) == (-1, 0) and last > 0:
        # One block otherwise. The window ends in the bottom right corner of the keys before.
        before = Block(range(length), range(last), (-1, length - last), True)
        return [before], [Block(range(last, length), range(last, length), (-1, 0))]
    late = [block for block in own if block.cols.start >= last]
    return [block for block in own if block not in late], late


def _packed(cols: range, pieces: Sequence[range]) -> range:
    """Where the rows are in a tensor that has these pieces one behind the other."""
    start = 0
    for piece in pieces:
        if cols.start in piece:
            start += cols.start - piece.start
            break
        start += len(piece)
    return range(start, start + len(cols))


def _blocks(queries: Sequence[range], keys: Sequence[range], mask: Mask) -> Iterator[Block]:
    """What the tokens of one rank see of those of another, or of their own."""
    own = queries == keys
    length = sum(map(len, queries))
    if own and mask.is_simple and (mask.left, mask.right) in (UNBOUNDED, (-1, 0)):
        # The chunks ascend: one behind the other, they are as good as one.
        if length:
            yield Block(range(length), range(length), (mask.left, mask.right), True)
        return
    joint: list[Block] = []
    row = 0
    for of_queries in queries:
        col = 0
        for of_keys in keys:
            if of_queries == of_keys:
                yield from _diagonal(of_queries, row, mask)
            elif (block := _off_diagonal(of_queries, of_keys, row, col, mask)) is not None:
                joint.append(block)
            col += len(of_keys)
        row += len(of_queries)
    yield from _joined(joint) if mask.is_simple else joint


def _diagonal(chunk: range, row: int, mask: Mask) -> Iterator[Block]:
    window = mask.left, mask.right
    rows = range(row, row + len(chunk))
    if mask.bounds is None:
        place = (chunk.start, chunk.start) if mask.drops else None
        yield Block(rows, rows, window, True, place=place)
        return
    first = max(0, bisect_right(mask.bounds, chunk.start) - 1)
    runs = [range(first, min(bisect_right(mask.bounds, chunk.stop - 1), len(mask.bounds) - 1))]
    if mask.drops and mask.bounds[first] < chunk.start:  # the first document began elsewhere
        runs = [range(first, first + 1), range(first + 1, runs[0].stop)]
    for documents in runs:
        if not documents:
            continue
        ends = mask.bounds[documents.start : documents.stop + 1]
        begun = max(0, chunk.start - ends[0])
        bounds = tuple(min(max(x, chunk.start), chunk.stop) - chunk.start for x in ends)
        place = (begun, begun) if mask.drops else None
        yield Block(rows, rows, window, True, bounds, documents, place)


def _off_diagonal(queries: range, keys: range, row: int, col: int, mask: Mask) -> Block | None:
    """Chunks without a token in common, so that at most one document reaches into both."""
    documents, origin = None, 0
    q, k = queries, keys
    if mask.bounds is not None:
        document = bisect_right(mask.bounds, max(q.start, k.start)) - 1
        if not 0 <= document < len(mask.bounds) - 1:
            return None
        origin, end = mask.bounds[document : document + 2]
        q, k = (range(max(x.start, origin), min(x.stop, end)) for x in (q, k))
        documents = range(document, document + 1)
    found = _rectangle(q, k, mask.left, mask.right)
    if found is None:
        return None
    q, k, window = found
    rows, cols = (
        range(x.start - chunk.start + first, x.stop - chunk.start + first)
        for x, chunk, first in ((q, queries, row), (k, keys, col))
    )
    place = (q.start - origin, k.start - origin) if mask.has_alibi or mask.drops else None
    return Block(rows, cols, window, documents=documents, place=place)


def _rectangle(
    q: range, k: range, left: int, right: int
) -> tuple[range, range, tuple[int, int]] | None:
    """The queries and keys that see each other, and the window of the kernels that says so.

    The kernels let the last query look at the last key. With ``shift`` between those two, the
    window is wider by it on one side. No side is negative: the last query sees a key, and some
    query the last key.

                      k.start    k.stop
            q.start  | x x . . .         shift = q.stop - k.stop
                     | x x x . .         right of the diagonal that ends bottom right:
                     | x x x x .             right + shift
             q.stop  | x x x x x         left of it: left - shift
    """
    if not q or not k:
        return None
    if right >= 0:
        k = range(k.start, min(k.stop, q.stop + right))
    if left >= 0:
        k = range(max(k.start, q.start - left), k.stop)
    if not k:
        return None
    if right >= 0:
        q = range(max(q.start, k.start - right), q.stop)
    if left >= 0:
        q = range(q.start, min(q.stop, k.stop + left))
    if not q:
        return None
    shift = q.stop - k.stop
    sees_all_before = left < 0 or k.start >= q.stop - 1 - left
    sees_all_behind = right < 0 or k.stop - 1 <= q.start + right
    window = -1 if sees_all_before else left - shift, -1 if sees_all_behind else right + shift
    return q, k, window


def _joined(blocks: list[Block]) -> list[Block]:
    """Fewer blocks: those that see all of the same keys; then those of the same queries."""
    for axis in ("rows", "cols"):
        result: list[Block] = []
        for block in sorted(blocks, key=lambda x: (x.rows.start, x.cols.start)):
            for i, before in enumerate(result):
                if (both := _both(before, block, axis)) is not None:
                    result[i] = both
                    break
            else:
                result.append(block)
        blocks = result
    return blocks


def _both(x: Block, y: Block, axis: str) -> Block | None:
    """One block for two that see everything and are adjacent along one axis."""
    if not x.window == y.window == UNBOUNDED:
        return None
    if axis == "rows" and x.cols == y.cols and x.rows.stop == y.rows.start:
        return x._replace(rows=range(x.rows.start, y.rows.stop))
    if axis == "cols" and x.rows == y.rows and x.cols.stop == y.cols.start:
        return x._replace(cols=range(x.cols.start, y.cols.stop))
    return None
