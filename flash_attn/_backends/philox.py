"""Philox and the dropout mask that every backend shares.

The generators are the counter-based ones of Salmon et al., "Parallel Random Numbers: As Easy as 1,
2, 3" (SC 2011). A dropout decision is a pure function of (seed, offset, batch, head, row, column):
it does not depend on tile sizes, on the backend, or on whether the forward or the backward asks.

Philox4x32-10 makes a key for each head of each sequence; Philox2x32-7 under this key draws 64 bits
for eight elements: those of rows i and i + 8 and columns j, j + 1, j + 8 and j + 9 of a 16 x 16
block, i below 8, j 0, 2, 4 or 6. One thread of an ``mma`` accumulator holds all eight where rows
are queries (S); where rows are keys (the transposed scores of a backward), two 8 x 8 transpositions
in a warp bring them to the threads that do.

Each element has a byte of the two words x and y. Its number has 39 bits: the complement of the
byte's lower seven, and the 32 of y * 0x9E3779B9 + x, which the eight elements share. A number below
2^39 p drops the element. Whatever two elements have of their own, what they share is evenly
distributed; so the decisions of a draw have a covariance of 2^-16 at most.
"""

import torch
from torch import Tensor

from flash_attn._arguments import dropout_threshold

_MASK32 = 0xFFFFFFFF
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10: four output words for four counter and two key words (int64 in [0, 2^32))."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2^64, so the bits of the unsigned 64-bit product survive.
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK32) ^ c1 ^ k0,
            p1 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0 = (k0 + _WEYL[0]) & _MASK32
        k1 = (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def philox_2x32(counter: tuple[Tensor, Tensor], key: Tensor) -> tuple[Tensor, Tensor]:
    """Philox2x32-7: two output words for two counter words and a key (int64 in [0, 2^32))."""
    c0, c1 = counter
    for _ in range(7):
        product = c0 * 0xD256D193
        c0, c1 = ((product >> 32) & _MASK32) ^ c1 ^ key, product & _MASK32
        key = (key + _WEYL[0]) & _MASK32
    return c0, c1


def draw_rng_state(device: torch.device) -> Tensor:
    """Draw the (2,) int64 state (seed, offset) from PyTorch's default generator of ``device``."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def dropout_keep_mask(
    rng_state: Tensor,
    dropout_p: float,
    batch: int,
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    row_start: int = 0,
    col_start: int = 0,
    head_start: int = 0,
    heads_of_sequence: int | None = None,
) -> Tensor:
    """Return which probabilities dropout keeps, (batch, nheads, seqlen_q, seqlen_k) bool.

    An element is kept iff its number is at least dropout_threshold(dropout_p). ``row_start`` and
    ``col_start`` select a tile of a larger mask, ``head_start`` its first head, counted over all
    sequences, of ``heads_of_sequence`` each. Only the low 32 bits of the offset ``rng_state[1]``
    take part.
    """
    device = rng_state.device
    row_skip, col_skip = row_start % 16, col_start % 16
    row_tiles, col_tiles = -(-(row_skip + seqlen_q) // 16), -(-(col_skip + seqlen_k) // 16)
    row_group = torch.arange(row_tiles * 8, device=device) + (row_start - row_skip) // 2
    col_group = torch.arange(col_tiles * 4, device=device) + (col_start - col_skip) // 4
    sequence = torch.arange(batch, device=device)[:, None] * (heads_of_sequence or nheads)
    batch_head = (sequence + torch.arange(nheads, device=device) + head_start).flatten()
    seed, offset = rng_state[0], rng_state[1]
    zero = torch.zeros_like(batch_head)
    head_key, *_ = philox_4x32(
        (batch_head, zero, zero, offset & _MASK32), (seed & _MASK32, (seed >> 32) & _MASK32)
    )
    words = philox_2x32((col_group, row_group[:, None]), head_key[:, None, None])
    x, y = words
    shared = (y * _WEYL[0] + x) & _MASK32
    place = 8 * torch.arange(4, device=device)  # of a byte in its word
    own = ~(torch.stack(words, -1)[..., None] >> place) & 0x7F
    numbers = own << 32 | shared[..., None, None]
    # (batch * nheads, row tile, row in 8, col tile, pair of columns in 8, upper or lower row, left
    # or right pair, column of the pair)
    tiles = numbers.view(batch * nheads, row_tiles, 8, col_tiles, 4, 2, 2, 2)
    by_element = tiles.permute(0, 1, 5, 2, 3, 6, 4, 7).reshape(
        batch, nheads, row_tiles * 16, col_tiles * 16
    )
    rows, cols = slice(row_skip, row_skip + seqlen_q), slice(col_skip, col_skip + seqlen_k)
    return by_element[:, :, rows, cols] >= dropout_threshold(dropout_p)
