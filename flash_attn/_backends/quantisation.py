"""Quantisation of q, k and v of 16 bits, in PyTorch operations: the pass before attention in FP8.

q and k are rotated by a random orthogonal matrix, which spreads outliers over all columns and
leaves their products as they are (Ashkboos et al., "QuaRot", 2024; Shah et al.,
"FlashAttention-3", 2024), then rounded to int8 or e4m3: q with a scale for each row, k with one for
each block of SCALE_BLOCK keys. v stays as it is, or becomes e4m3 with a power of two for each
block. Every scale comes from the rows that it belongs to: one pass over the inputs is enough.
e4m3 has a wide range, so that few scales of v are enough and most blocks have the same: where one
differs from the last, a kernel multiplies its sums by the quotient.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from flash_attn._arguments import FP8, FP8_LEVELS, SCALE_BLOCK, Attention, Scales

HEADDIMS = (64, 96, 128, 192, 256)  # that q and k are rotated in, zeros behind their columns
LEAST_V_EXPONENT = -48  # of v_scale: sums in units of a smaller one could overflow
V_EXPONENT_STEP = 12  # exponents of v_scale are multiples of it

# Bits of the fraction of pi, that of column i in bit i % 32 of word i // 32: 1 is the sign -1.
_SIGNS = (
    0x243F6A88,
    0x85A308D3,
    0x13198A2E,
    0x03707344,
    0xA4093822,
    0x299F31D0,
    0x082EFA98,
    0xEC4E6C89,
)


def quantised(a: Attention) -> Attention:
    """Return the problem with q, k and v quantised, as its ``fp8_level`` says.

    In int8 Q K^T is several times as exact as in e4m3, at the same rate. At level ``accurate`` v
    stays in 16 bits, so that P V has the error and the rate of 16 bits.
    """
    level = FP8_LEVELS[a.fp8_level - 1]
    dtype = FP8 if level == "fast" else torch.int8
    headdim = next(x for x in HEADDIMS if x >= a.headdim)
    q, k = _rotated(a.q, headdim), _rotated(a.k, headdim)
    block, count = _blocks_of_keys(a)
    outside, block = (block < 0)[..., None, None], block.clamp(min=0)

    def largest(x: Tensor) -> Tensor:
        """Of each block; NaN in the rows of no sequence is no maximum."""
        return largest_of(x.masked_fill(outside, 0.0) if a.is_varlen else x, block, count)

    def of_blocks(scale: Tensor) -> Tensor:
        """(count, nheads_kv) as ``Scales`` has them."""
        return (
            scale.T if a.is_varlen else scale.unflatten(0, (a.batch, count // max(1, a.batch))).mT
        )

    q_scale = step(q.abs().amax(-1), dtype)
    k_scale = step(largest(k), dtype)
    v, v_scale = a.v, None
    if level != "accurate":
        power = _power_of_two(largest(v.float()))
        v, v_scale = to_fp8(v.float() / power[block][..., None]), of_blocks(power)
    scales = Scales(q_scale.mT, of_blocks(k_scale), v_scale, a.q.dtype)
    return a._replace(
        q=_rounded(q / q_scale[..., None], dtype),
        k=_rounded(k / k_scale[block][..., None], dtype),
        v=v,
        sizes=a.sizes._replace(headdim=headdim),
        options=replace(a.options, softmax_scale=a.softmax_scale),
        fp8_level=0,
        scales=scales,
    )


def to_fp8(x: Tensor) -> Tensor:
    """Round to e4m3: to nearest, ties to even, at most 448 in magnitude."""
    most = torch.finfo(FP8).max  # beyond it PyTorch's conversion gives NaN
    return x.float().clamp(-most, most).to(FP8)


def first_scale_blocks(cu_seqlens_k: Tensor) -> Tensor:
    """Return (batch,) int64: where the blocks of each packed sequence begin, see ``Scales``."""
    starts = cu_seqlens_k[:-1].long()
    return starts // SCALE_BLOCK + torch.arange(len(starts), device=starts.device)


def _blocks_of_keys(a: Attention) -> tuple[Tensor, int]:
    """Return the block of each row of k, -1 outside of all sequences, and how many there are."""
    rows = torch.arange(a.sizes.rows_k[-1], device=a.k.device)
    if a.cu_seqlens_k is None:
        blocks = -(-len(rows) // SCALE_BLOCK)
        first = blocks * torch.arange(a.batch, device=rows.device)[:, None]
        return first + rows // SCALE_BLOCK, a.batch * blocks
    count = len(rows) // SCALE_BLOCK + max(1, a.batch)
    sequence = sequence_of_rows(a.cu_seqlens_k, len(rows))
    if a.batch == 0:
        return sequence, count
    bounds = a.cu_seqlens_k.long().clamp(0, len(rows))
    row = rows - bounds[sequence.clamp(min=0)]
    block = first_scale_blocks(bounds)[sequence.clamp(min=0)] + row // SCALE_BLOCK
    return block.clamp(0, count - 1).masked_fill(sequence < 0, -1), count


def sequence_of_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return (total,) int64: which packed sequence each row is of, -1 for none."""
    row = torch.arange(total, device=cu_seqlens.device)
    bounds = cu_seqlens.long()
    sequence = torch.searchsorted(bounds[1:], row, right=True)
    outside = (row < bounds[0]) | (sequence >= len(bounds) - 1)
    return sequence.masked_fill(outside, -1)


def largest_of(x: Tensor, block: Tensor, count: int) -> Tensor:
    """The largest magnitude of each block, (count, heads), of x (rows ..., heads, dim)."""
    of_rows = x.abs().amax(-1).flatten(0, -2)
    index = block.flatten()[:, None].expand_as(of_rows)
    return of_rows.new_zeros(count, of_rows.shape[1]).scatter_reduce(0, index, of_rows, "amax")


def step(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """What the largest number of ``dtype`` stands for ``largest`` with; 1 if that is about 0."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    return (largest / most).masked_fill(largest < 2.0**-100, 1.0)


def _power_of_two(largest: Tensor) -> Tensor:
    """The least power of 2^V_EXPONENT_STEP times which e4m3 reaches ``largest``; of 0 it is 1."""
    bits = (largest / torch.finfo(FP8).max).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0).int() - 127  # rounded up
    exponent = (-(-exponent // V_EXPONENT_STEP) * V_EXPONENT_STEP).clamp(LEAST_V_EXPONENT, 120)
    power = (exponent + 127 << 23).view(torch.float32) + 0 * largest  # not finite: NaN
    return power.masked_fill(largest == 0, 1.0)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return to_fp8(x) if dtype == FP8 else x.round().clamp(-127, 127).to(dtype)


def _rotated(x: Tensor, headdim: int) -> Tensor:
    """Return x (..., dim) in float32, with zeros up to ``headdim`` columns, times ``rotation``."""
    x = torch.nn.functional.pad(x.float(), (0, headdim - x.shape[-1]))
    return x @ rotation(headdim, x.device)


def rotation(headdim: int, device: torch.device) -> Tensor:
    """Return diag(sign) H / sqrt(headdim), orthogonal, (headdim, headdim) float32.

    H is a Hadamard matrix: Sylvester's, or for 96 and 192 the Kronecker product of Williamson's of
    12 and Sylvester's, with columns in the kernel's order (csrc/sm90/rotation.cuh). It is computed
    where it is used: a copy could not be captured in a CUDA graph.
    """
    column = torch.arange(headdim, device=device)
    order = 12 if headdim % 12 == 0 else 1
    i = column[: headdim // order]
    common = i[:, None] & i
    for shift in (4, 2, 1):  # the parity of their bits
        common = common ^ (common >> shift)
    hadamard = _sign(common & 1)
    if order > 1:
        place = _place_of_column(column)
        hadamard = torch.kron(_williamson(device), hadamard)[place[:, None], place]
    bit = torch.arange(32, device=device)
    negative = torch.cat([(word >> bit) & 1 for word in _SIGNS])[:headdim]
    return _sign(negative)[:, None] * hadamard / math.sqrt(headdim)


def _sign(negative: Tensor) -> Tensor:
    return 1.0 - 2.0 * negative.float()  # whatever the default dtype is


def _place_of_column(column: Tensor) -> Tensor:
    """Where the columns of 96 or 192 are in the Kronecker product.

    A column is 32 (3 h + e) + 8 t + 4 m + 2 r + p. Williamson's matrix mixes e, m, and what of h
    and r makes four groups; Sylvester's mixes the others.
    """
    h, e, t, eighth = column // 96, column // 32 % 3, column // 8 % 4, column % 8
    if len(column) == 96:
        group, rest = eighth // 2, 2 * t + eighth % 2
    else:
        group, rest = 2 * h + eighth // 4, 4 * t + eighth % 4
    return (3 * group + e) * (len(column) // 12) + rest


def _williamson(device: torch.device) -> Tensor:
    """The Hadamard matrix of order 12 in 4 x 4 blocks of 3 x 3: J is the matrix of ones.

    Blocks are J on the diagonal and J - 2 elsewhere, with signs: J^2 + 3 (J - 2)^2 = 12.
    """
    i = torch.arange(4, device=device)
    # Bits: the columns in which a row of blocks is negative.
    rows = (0b0000, 0b0101, 0b1001, 0b0011)
    signs = torch.stack([_sign((row >> i) & 1) for row in rows])
    one = torch.eye(3, device=device, dtype=torch.float32)
    outer = torch.kron(signs, torch.ones_like(one) - 2.0 * one)
    return outer + torch.kron(torch.eye(4, device=device, dtype=torch.float32), 2.0 * one)
