"""The one place that checks user arguments: anything in, an ``Attention`` or an error out.

Every error names the argument, what was given and what is accepted. Of CUDA tensors only metadata
is looked at, so that a call neither synchronises nor breaks CUDA graph capture; indices that lie on
the CPU are read and checked.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flash_attn._numbers import flag, integer, real
from flash_attn._numbers import scale as read_scale

PLAIN_NUMBERS = frozenset((int, float, bool, type(None)))
_STRIDED = torch.strided
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = torch.float8_e4m3fn  # of q, k and v; or of a cache, beside q of any of _DTYPES but float64
FP8_LEVELS = ("fast", "balanced", "accurate")  # fp8_level 1, 2, 3: see fp8.py
_MOST_HEADDIM = 256  # that is quantised inside
MOST_LENGTH = 2**31 - 1  # of int32
_MOST, _LEAST_SOFTCAP = 1e30, 1e-30  # scores are in float32


@dataclass(frozen=True, slots=True)
class Options:
    """The options that are plain numbers."""

    softmax_scale: float | None  # None: 1 / sqrt(headdim)
    window_left: int = -1  # -1 is unbounded
    window_right: int = -1  # 0 when causal
    softcap: float = 0.0  # 0 is off
    dropout_p: float = 0.0
    deterministic: bool = False

    @property
    def masked(self) -> bool:
        """Whether keys may be hidden: each query of a cache stands at a row of its own then.

        Else all of them stand at the row of the next key.
        """
        return self.window_left >= 0 or self.window_right >= 0


def options(*numbers: Any) -> Options:
    """Check (dropout_p, softmax_scale, causal, window left, right, softcap, deterministic)."""
    if PLAIN_NUMBERS.issuperset(map(type, numbers)):  # the value of a tensor may change
        return _remembered_options(*numbers)
    return _check_options(*numbers)


class Sizes(NamedTuple):
    """What the shapes of q, k and v say, once they are found to fit."""

    rows_q: tuple[int, ...]  # all before the heads
    rows_k: tuple[int, ...]
    nheads: int
    nheads_kv: int
    headdim: int
    headdim_v: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


def dropout_threshold(dropout_p: float) -> int:
    """How many of 2^39 equally likely numbers drop an element; 0: dropout drops nothing."""
    return round(dropout_p * 2**39)


class Place(NamedTuple):
    """Where a problem lies in a larger one, whose ALiBi and dropout mask it has."""

    nheads: int  # of the larger problem
    batch: int = 0  # the first sequence, head, query and key
    head: int = 0
    row: int = 0
    column: int = 0


class Attention(NamedTuple):  # a third of a frozen dataclass's time to make, on every call's path
    """One validated attention problem, whatever public function it came from.

    Sequences lie in ``q``, ``k`` and ``v`` in one of three layouts: dense (batch, seqlen, nheads,
    headdim); varlen (total, nheads, headdim), delimited by ``cu_seqlens``; paged (num_pages,
    page_size, nheads_kv, headdim), where ``block_table`` names the pages of each sequence (keys and
    values only).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sizes: Sizes
    batch: int
    max_seqlen_q: int
    max_seqlen_k: int
    options: Options
    cu_seqlens_q: Tensor | None = None  # (batch + 1,) int32
    cu_seqlens_k: Tensor | None = None  # (batch + 1,) int32
    seqused_k: Tensor | None = None  # (batch,) int32: rows in use, from row 0 of the storage
    leftpad_k: Tensor | None = None  # (batch,) int32: the first of them that is a key
    block_table: Tensor | None = None  # (batch, pages of a sequence) int32
    cache_batch_idx: Tensor | None = None  # (batch,) int32: which row of a dense k and v
    alibi_slopes: Tensor | None = None  # (nheads,) or (batch, nheads) float32
    s_aux: Tensor | None = None  # (nheads,): the logit of each head's attention sink
    num_splits: int = 0  # thread blocks that share a sequence's keys; 0: the kernel chooses
    # (batch, nheads_kv) float32, of tensors in FP8: what their elements are multiplied by; None: 1
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    q_descale: Tensor | None = None
    fp8_level: int = 0  # of FP8_LEVELS, from 1: q, k and v are to be quantised; 0: they are not
    scales: "Scales | None" = None  # of what has been quantised so
    # Of an append that the stream's last kernel makes: seqused_k of before, and how many rows.
    seqused_before: Tensor | None = None
    seqlen_new: int = 0
    place: Place | None = None  # None: a problem of its own. Windows do not look at it.
    rotary: "Rotary | None" = None  # q and k are to be rotated before they are quantised

    @property
    def is_quantised(self) -> bool:
        """Whether k and v are in FP8: a cache, or with q."""
        return self.k.dtype == FP8

    @property
    def is_fp8(self) -> bool:
        """Whether the operands of the products are of 8 bits, those of the first at least."""
        return self.fp8_level > 0 or self.q.dtype == FP8 or self.scales is not None

    @property
    def softmax_scale(self) -> float:
        scale = self.options.softmax_scale
        return self.sizes.headdim**-0.5 if scale is None else scale

    @property
    def window_left(self) -> int:
        return self.options.window_left

    @property
    def window_right(self) -> int:
        return self.options.window_right

    @property
    def softcap(self) -> float:
        return self.options.softcap

    @property
    def dropout_p(self) -> float:
        return self.options.dropout_p

    @property
    def drops(self) -> bool:
        """Whether dropout drops anything: 39 random bits decide, so p up to 2^-40 is none."""
        return dropout_threshold(self.options.dropout_p) > 0

    @property
    def features(self) -> frozenset[str]:
        """What the problem asks for that not every implementation has."""
        asked = {
            "softcap": self.softcap > 0,
            "alibi": self.alibi_slopes is not None,
            "dropout": self.drops,
            "pages": self.block_table is not None,
            "cache_slots": self.cache_batch_idx is not None,
            "place": self.place is not None,
            "odd_place": self._has_odd_place,
        }
        return frozenset(feature for feature, is_asked in asked.items() if is_asked)

    @property
    def _has_odd_place(self) -> bool:
        """Whether kernels do not have the place.

        Random numbers are of 16 x 16 scores, and all sequences are equally far from the diagonal.
        """
        if self.place is None:
            return False
        begins_within = self.place.row % 16 > 0 or self.place.column % 16 > 0
        same_lengths = self.cu_seqlens_q is self.cu_seqlens_k and self.seqused_k is None
        return (self.drops and begins_within) or not same_lengths

    @property
    def is_varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def nheads(self) -> int:
        return self.sizes.nheads

    @property
    def nheads_kv(self) -> int:
        return self.sizes.nheads_kv

    @property
    def headdim(self) -> int:
        return self.sizes.headdim

    @property
    def headdim_v(self) -> int:
        return self.sizes.headdim_v

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.sizes.out_shape

    @property
    def out_dtype(self) -> torch.dtype:
        return _out_dtype(self.q) if self.scales is None else self.scales.out_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The precision of scores, sums and log-sum-exp."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.sizes.lse_shape


class Rotary(NamedTuple):
    """The rotary embedding of q and k, whose row i is at position i of the tables."""

    cos: Tensor  # (positions, rotary_dim / 2)
    sin: Tensor
    interleaved: bool


class Scales(NamedTuple):
    """What turns q, k and v, quantised inside, into numbers. Blocks are of SCALE_BLOCK keys.

    The blocks of packed sequence i begin at cu_seqlens_k[i] // SCALE_BLOCK + i.
    """

    q: Tensor  # (batch, nheads, seqlen_q) or (nheads, total_q) float32
    k: Tensor  # (batch, nheads_kv, blocks) or (nheads_kv, blocks) float32
    v: Tensor | None  # likewise, powers of two; None: v stays in 16 bits
    out_dtype: torch.dtype


SCALE_BLOCK = 128


@dataclass(frozen=True, slots=True)
class CacheAppend:
    """New keys and values for a cache, and the rotary embedding for them and the queries."""

    cache_seqlens: Tensor  # (batch,) int32: storage row of the first new key; negative: append none
    k: Tensor  # (batch, seqlen_new, nheads_kv, headdim)
    v: Tensor  # (batch, seqlen_new, nheads_kv, headdim_v)
    rotary_cos: Tensor | None = None  # (seqlen_rotary, rotary_dim / 2)
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True


def dense(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    descales: tuple[Any, Any, Any] = (None, None, None),
    fp8_level: int = 0,
) -> Attention:
    """Check q (batch, seqlen_q, nheads, headdim) and k, v (batch, seqlen_k, nheads_kv, headdim)."""
    q, k, v, sizes = check_qkv(q, k, v, rank_q=4, rank_k=4)
    (batch, seqlen_q), (batch_k, seqlen_k) = sizes.rows_q, sizes.rows_k
    if batch_k != batch:
        raise ValueError(f"k must have the batch size of q, {batch}, got shape {_shape(k)}")
    check_per_head(q, batch, alibi_slopes, s_aux)
    q_descale, k_descale, v_descale = descales
    problem = Attention(
        q,
        k,
        v,
        sizes,
        batch,
        seqlen_q,
        seqlen_k,
        options,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        k_descale=k_descale,
        v_descale=v_descale,
        q_descale=q_descale,
        fp8_level=fp8_level,
    )
    _check_fp8(problem)
    return problem


def varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    options: Options,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    descales: tuple[Any, Any, Any] = (None, None, None),
    fp8_level: int = 0,
    *,
    seqused_k: Any = None,
    leftpad_k: Any = None,
    block_table: Any = None,
) -> Attention:
    """Check q (total_q, nheads, headdim) and k, v (total_k, nheads_kv, headdim) or pages."""
    check_optional_tensors(block_table=block_table)
    q, k, v, sizes = check_qkv(q, k, v, rank_q=3, rank_k=3 if block_table is None else 4)
    _check_index("cu_seqlens_q", cu_seqlens_q, q)
    if _is_below_zero(cu_seqlens_q.shape[0] - 1):
        raise ValueError("cu_seqlens_q must have shape (batch + 1,), got shape (0,)")
    batch = cu_seqlens_q.shape[0] - 1
    _check_index("cu_seqlens_k", cu_seqlens_k, q, (batch + 1,), "(batch + 1,)")
    if block_table is not None and seqused_k is not None:
        cu_seqlens_k = None  # of pages seqused_k has the lengths: clients give any memory here
    max_seqlen_q = _max_seqlen("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = _max_seqlen("max_seqlen_k", max_seqlen_k)
    _check_keys_of_batch(q, k, batch, seqused_k, leftpad_k, block_table)
    check_per_head(q, batch, alibi_slopes, s_aux)
    q_descale, k_descale, v_descale = descales
    problem = Attention(
        q,
        k,
        v,
        sizes,
        batch,
        max_seqlen_q,
        max_seqlen_k,
        options,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        leftpad_k,
        block_table,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        k_descale=k_descale,
        v_descale=v_descale,
        q_descale=q_descale,
        fp8_level=fp8_level,
    )
    _check_fp8(problem)
    if q.is_cpu:
        _check_values_of_varlen(problem)
    return problem


def with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    options: Options,
    alibi_slopes: Any,
    s_aux: Any,
    *,
    rotary_cos: Any,
    rotary_sin: Any,
    rotary_interleaved: Any,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    block_table: Any,
    descales: tuple[Any, Any, Any],
) -> tuple[Attention, CacheAppend | None]:
    """Check a decoding call; the problem's ``seqused_k`` does not count the new keys yet."""
    names = ("q", "k_cache", "v_cache")
    q, k_cache, v_cache, sizes = check_qkv(q, k_cache, v_cache, rank_q=4, rank_k=4, names=names)
    batch = q.shape[0]
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError(
            "cache_batch_idx must be None when block_table is given: the table names the pages"
        )
    if block_table is None and cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache must have the batch size of q, {batch}, got shape {_shape(k_cache)}; "
            "pass cache_batch_idx to use some of its rows"
        )
    _check_keys_of_batch(q, k_cache, batch, None, cache_leftpad, block_table, "cache_leftpad")
    if cache_batch_idx is not None:
        _check_index("cache_batch_idx", cache_batch_idx, q, (batch,), "(batch,)")
    check_per_head(q, batch, alibi_slopes, s_aux)
    capacity = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]

    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} must be given with {given}, got None")
    seqlen_new = 0
    if k is not None:
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            _check_tensor(name, new, like=q, rank=4)
            expected = (batch, k.shape[1], cache.shape[2], cache.shape[3])
            if tuple(new.shape) != expected:
                raise ValueError(
                    f"{name} must have shape (batch, seqlen_new, nheads_kv, headdim) = {expected}, "
                    f"got {_shape(new)}"
                )
        seqlen_new = k.shape[1]
        if seqlen_new > 0:
            check_writable("k_cache", k_cache)
            check_writable("v_cache", v_cache)
        if cache_seqlens is None:
            raise ValueError("cache_seqlens must be given with k (where to append), got None")

    used, known = _cache_seqlens(cache_seqlens, q, batch, capacity, seqlen_new)
    if rotary_cos is not None and q.dtype == FP8:
        raise NotImplementedError(
            f"rotary_cos must be None where q has {FP8}: rotate before q and k are quantised"
        )
    # A table for every place in the cache is enough where the host does not know the lengths.
    positions = capacity
    if known is not None:
        queries = q.shape[1] if options.masked else min(q.shape[1], 1)
        positions = max(known, 0) + max(seqlen_new, queries)
    _check_rotary(rotary_cos, rotary_sin, q, k, cache_seqlens, positions)

    append = None
    if k is not None and used is not None:
        interleaved = flag("rotary_interleaved", rotary_interleaved)
        append = CacheAppend(used, k, v, rotary_cos, rotary_sin, interleaved)
    q_descale, k_descale, v_descale = descales
    problem = Attention(
        q,
        k_cache,
        v_cache,
        sizes,
        batch,
        q.shape[1],
        capacity,
        options,
        seqused_k=used,
        leftpad_k=cache_leftpad,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        k_descale=k_descale,
        v_descale=v_descale,
        q_descale=q_descale,
    )
    _check_fp8(problem, names)
    if is_readable(q):
        _check_values_of_cache(problem, seqlen_new)
    return problem, append


def check_destination(name: str, given: Any, like: Tensor, shape: tuple[int, ...]) -> None:
    """Check a tensor that a result is written to: the shape, the dtype and device of ``like``.

    (Where that is q in FP8, the dtype of its results.)
    """
    _check_like_output(name, given, like, shape)
    check_writable(name, given)


def _check_like_output(name: str, given: Any, like: Tensor, shape: tuple[int, ...]) -> None:
    _check_tensor(name, given, like, rank=len(shape), dtype=_out_dtype(like))
    if _shape(given) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {_shape(given)}")


def check_writable(name: str, x: Tensor) -> None:
    """Refuse what PyTorch or a kernel could not write to: before anything is written."""
    check_not_expanded(name, x)
    check_no_leaf(name, x)
    if torch.compiler.is_compiling():  # which does not trace is_inference
        return
    if x.is_inference() and not torch.is_inference_mode_enabled() and not x.is_cuda:
        raise ValueError(
            f"{name} is written to and was made in torch.inference_mode: call in it, too"
        )


def check_not_expanded(name: str, x: Tensor) -> None:
    # Strides first: sizes may be symbols of which nothing is known.
    places = zip(x.shape, x.stride(), strict=True)
    expanded = any(type(stride) is int and stride == 0 and n > 1 for n, stride in places)
    if expanded and x.numel() > 0:
        raise ValueError(f"{name} is written to and must not be expanded, got strides {x.stride()}")


def check_no_leaf(name: str, x: Any) -> None:
    if isinstance(x, Tensor) and torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        raise ValueError(f"{name} is written to and must not require a gradient as a leaf")


def check_backward(
    problem: Attention,
    dout: Any,
    out: Any,
    softmax_lse: Any,
    gradients: tuple[Any, Any, Any],
    rng_state: Any,
    dlse: Any,
) -> None:
    """Check what a backward takes beside the problem itself."""
    if problem.dropout_p > 0 and rng_state is None:
        raise ValueError("rng_state must be the forward's when dropout_p > 0, got None")
    check_rng_state(problem, rng_state)
    for name, tensor in (("dout", dout), ("out", out)):
        _check_like_output(name, tensor, problem.q, problem.out_shape)
    inputs = (problem.q, problem.k, problem.v)
    for name, tensor, x in zip(("dq", "dk", "dv"), gradients, inputs, strict=True):
        check_destination(name, tensor, problem.q, x.shape)
    for name, tensor in (("softmax_lse", softmax_lse), ("dlse", dlse)):
        if tensor is None and name == "dlse":
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype != problem.compute_dtype:
            raise TypeError(f"{name} must be a {problem.compute_dtype} tensor, got {_kind(tensor)}")
        if tuple(tensor.shape) != tuple(problem.lse_shape):
            raise ValueError(
                f"{name} must have shape {tuple(problem.lse_shape)}, got {_shape(tensor)}"
            )


def check_rng_state(problem: Attention, rng_state: Any) -> None:
    if problem.dropout_p > 0:
        _check_tensor("rng_state", rng_state, problem.q, rank=1, dtype=torch.int64)
        if _shape(rng_state) != (2,):
            raise ValueError(f"rng_state must have shape (2,), got {_shape(rng_state)}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _kind(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__


def check_strided(name: str, value: Tensor) -> None:
    """Refuse tensors whose elements do not lie in memory at strides."""
    if value.layout is not _STRIDED or value.is_nested:
        kind = "nested tensor" if value.is_nested else f"tensor with the layout {value.layout}"
        raise TypeError(f"{name} must be a dense tensor (torch.strided), got a {kind}")


def _out_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == FP8 else q.dtype


def _no_tensor(name: str, value: Any) -> TypeError:
    return TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def check_tensors(**values: Any) -> None:
    """Raise TypeError unless all of these, by name, are tensors."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise _no_tensor(name, value)


def check_optional_tensors(**values: Any) -> None:
    """The same of tensors or None."""
    check_tensors(**{name: value for name, value in values.items() if value is not None})


def _check_tensor(
    name: str,
    value: Any,
    like: Tensor,
    rank: int,
    of: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """``value`` must be a tensor of this rank, on the device of q, ``like``.

    Its dtype must be that of q, or of k_cache, ``of``, or ``dtype``.
    """
    if not isinstance(value, Tensor):
        raise _no_tensor(name, value)
    if value.layout is not _STRIDED or value.is_nested:
        check_strided(name, value)
    expected, owner = (like.dtype, "q") if of is None else (of.dtype, "k_cache")
    if dtype is not None and dtype != expected:
        if value.dtype != dtype:
            raise TypeError(f"{name} must have the dtype {dtype}, got {value.dtype}")
    elif value.dtype != expected:
        raise TypeError(f"{name} must have the dtype of {owner}, {expected}, got {value.dtype}")
    if value.device != like.device:
        raise ValueError(f"{name} must be on the device of q, {like.device}, got {value.device}")
    if value.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got shape {_shape(value)}")


def _whole_rows(name: str, x: Tensor) -> Tensor:
    if x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0:
        return x
    if name.endswith("cache"):
        raise ValueError(
            f"{name}, which is updated in place, must be contiguous in its last dimension, "
            f"got strides {x.stride()}"
        )
    return x.contiguous()


def check_qkv(
    q: Any, k: Any, v: Any, rank_q: int, rank_k: int, names: tuple[str, str, str] = ("q", "k", "v")
) -> tuple[Tensor, Tensor, Tensor, Sizes]:
    """Check q, k and v; return them, each copied if its last dimension is not contiguous."""
    if not isinstance(q, Tensor):
        raise _no_tensor("q", q)
    if q.dtype not in _DTYPES and q.dtype != FP8:
        accepted = ", ".join(str(dtype) for dtype in (*_DTYPES, FP8))
        raise TypeError(f"q must have one of the dtypes {accepted}, got {q.dtype}")
    _check_tensor(names[0], q, q, rank_q)
    if names[1] == "k_cache" and isinstance(k, Tensor) and k.dtype == FP8:
        _check_quantised(q, k, v, rank_k)
    else:
        _check_tensor(names[1], k, q, rank_k)
        _check_tensor(names[2], v, q, rank_k)
    try:
        sizes = _remembered_sizes(q.shape, k.shape, v.shape, names)
    except TypeError:  # symbolic sizes cannot be hashed
        sizes = _check_sizes(q.shape, k.shape, v.shape, names)
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = (_whole_rows(name, x) for name, x in zip(names, (q, k, v), strict=True))
    return q, k, v, sizes


def _check_quantised(q: Tensor, k_cache: Tensor, v_cache: Any, rank: int) -> None:
    if q.dtype == torch.float64:
        raise TypeError(
            f"q must have one of the dtypes torch.float16, torch.bfloat16, torch.float32 where "
            f"k_cache has {FP8}, got {q.dtype}"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_tensor(name, cache, q, rank, of=k_cache)


def _check_fp8(a: Attention, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Check descales, and what products of 8-bit operands do not have."""
    if not a.is_fp8 and a.q_descale is a.k_descale is a.v_descale is None:
        return
    descales = (a.q_descale, a.k_descale, a.v_descale)
    for letter, name, x, descale in zip("qkv", names, (a.q, a.k, a.v), descales, strict=True):
        _check_descale(f"{letter}_descale", descale, a, x, name)
    if not a.is_fp8:
        return
    if a.dropout_p > 0:
        raise NotImplementedError(
            f"dropout_p must be 0 where attention is computed in FP8, got {a.dropout_p}"
        )
    if a.fp8_level == 0:
        return
    if not 1 <= a.fp8_level <= len(FP8_LEVELS):
        raise ValueError(f"fp8_level must be 0 .. {len(FP8_LEVELS)}, got {a.fp8_level}")
    if a.q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"q must have one of the dtypes torch.float16, torch.bfloat16 to be quantised, "
            f"got {a.q.dtype}"
        )
    if a.headdim > _MOST_HEADDIM:
        raise ValueError(
            f"q must have a head dimension of at most {_MOST_HEADDIM} to be quantised, "
            f"got {a.headdim}"
        )
    for name in ("seqused_k", "leftpad_k", "block_table"):
        if getattr(a, name) is not None:
            raise NotImplementedError(f"{name} must be None where keys are quantised inside")


def _check_descale(name: str, descale: Any, a: Attention, x: Tensor, owner: str) -> None:
    if descale is None:
        return
    if x.dtype != FP8:
        raise ValueError(f"{name} must be None unless {owner} has {FP8}, got {x.dtype}")
    if not isinstance(descale, Tensor) or descale.dtype != torch.float32:
        raise TypeError(f"{name} must be a torch.float32 tensor, got {_kind(descale)}")
    check_strided(name, descale)
    if descale.device != x.device:
        raise ValueError(f"{name} must be on the device of q, {x.device}, got {descale.device}")
    expected = (a.batch, a.nheads_kv)
    if _shape(descale) != expected:
        raise ValueError(
            f"{name} must have shape (batch, nheads_kv) = {expected}, got {_shape(descale)}"
        )


def _check_sizes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], names: tuple[str, str, str]
) -> Sizes:
    *rows_q, nheads, headdim = q
    *rows_k, nheads_kv, headdim_k = k
    *rows_v, nheads_v, headdim_v = v
    if headdim < 1 or headdim_v < 1:
        empty = names[0] if headdim < 1 else names[2]
        raise ValueError(f"{empty} must have a head dimension of at least 1, got 0")
    if headdim_k != headdim:
        raise ValueError(
            f"{names[1]} must have the head dimension of q, {headdim}, got shape {tuple(k)}"
        )
    if rows_v != rows_k or nheads_v != nheads_kv:
        raise ValueError(
            f"{names[2]} must have the shape of {names[1]} but for the head dimension, "
            f"got {tuple(v)} beside {tuple(k)}"
        )
    if nheads != nheads_kv and (nheads * nheads_kv == 0 or nheads % nheads_kv != 0):
        raise ValueError(
            f"{names[1]} must have a number of heads that divides that of q, {nheads}, "
            f"got {nheads_kv}"
        )
    *batch, rows = rows_q
    return Sizes(
        tuple(rows_q),
        tuple(rows_k),
        nheads,
        nheads_kv,
        headdim,
        headdim_v,
        (*rows_q, nheads, headdim_v),
        (*batch, nheads, rows),
    )


def _check_index(
    name: str, value: Any, q: Tensor, shape: tuple[int, ...] | None = None, meaning: str = ""
) -> None:
    """``value`` must be an int32 tensor on the device of q, 1-D or of the given shape."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.int32 tensor, got {type(value).__name__}")
    check_strided(name, value)
    if value.dtype != torch.int32:
        raise TypeError(f"{name} must have dtype torch.int32, got {value.dtype}")
    if value.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {value.device}")
    if shape is None:
        if value.dim() != 1:
            raise ValueError(f"{name} must have 1 dimension, got shape {_shape(value)}")
    elif tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {meaning} = {shape}, got {_shape(value)}")


def _check_keys_of_batch(
    q: Tensor,
    k: Tensor,
    batch: int,
    seqused_k: Any,
    leftpad_k: Any,
    block_table: Any,
    leftpad_name: str = "leftpad_k",
) -> None:
    if seqused_k is not None:
        _check_index("seqused_k", seqused_k, q, (batch,), "(batch,)")
    if leftpad_k is not None:
        _check_index(leftpad_name, leftpad_k, q, (batch,), "(batch,)")
    if block_table is not None:
        if isinstance(block_table, Tensor) and block_table.dim() != 2:
            raise ValueError(f"block_table must have 2 dimensions, got shape {_shape(block_table)}")
        shape = (batch, block_table.shape[1]) if isinstance(block_table, Tensor) else None
        _check_index("block_table", block_table, q, shape, "(batch, pages of a sequence)")
        if k.shape[1] < 1:
            raise ValueError(f"k must have pages of at least 1 row, got shape {_shape(k)}")


def check_per_head(q: Tensor, batch: int, alibi_slopes: Any, s_aux: Any) -> None:
    if alibi_slopes is None and s_aux is None:
        return
    nheads = q.shape[-2]
    for name, tensor in (("alibi_slopes", alibi_slopes), ("s_aux", s_aux)):
        if isinstance(tensor, Tensor):
            check_strided(name, tensor)
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, Tensor) or alibi_slopes.dtype != torch.float32:
            raise TypeError(
                f"alibi_slopes must be a torch.float32 tensor, got {_kind(alibi_slopes)}"
            )
        if tuple(alibi_slopes.shape) not in ((nheads,), (batch, nheads)):
            raise ValueError(
                f"alibi_slopes must have shape (nheads,) = {(nheads,)} or (batch, nheads) = "
                f"{(batch, nheads)}, got {_shape(alibi_slopes)}"
            )
    if s_aux is not None:
        if not isinstance(s_aux, Tensor) or not s_aux.is_floating_point():
            raise TypeError(f"s_aux must be a floating-point tensor, got {_kind(s_aux)}")
        if tuple(s_aux.shape) != (nheads,):
            raise ValueError(f"s_aux must have shape (nheads,) = {(nheads,)}, got {_shape(s_aux)}")
    for name, tensor in (("alibi_slopes", alibi_slopes), ("s_aux", s_aux)):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")


def _check_rotary(
    rotary_cos: Any, rotary_sin: Any, q: Tensor, k: Tensor | None, cache_seqlens: Any, last_row: int
) -> None:
    if rotary_cos is None and rotary_sin is None:
        return
    _check_both_tables(rotary_cos, rotary_sin)
    if cache_seqlens is None:
        raise ValueError(
            "cache_seqlens must be given with rotary_cos (the positions to rotate by), got None"
        )
    if k is None:
        raise ValueError(
            "k must be given with rotary_cos (the keys to rotate and append), got None"
        )
    check_tables(rotary_cos, rotary_sin, q, last_row)


def _check_both_tables(rotary_cos: Any, rotary_sin: Any) -> None:
    if rotary_cos is None or rotary_sin is None:
        missing, given = (
            ("rotary_cos", "rotary_sin") if rotary_cos is None else ("rotary_sin", "rotary_cos")
        )
        raise ValueError(f"{missing} must be given with {given}, got None")


def check_tables(
    rotary_cos: Any, rotary_sin: Any, q: Tensor, rows: int, dtype: torch.dtype | None = None
) -> None:
    """Check the tables of a rotary embedding: of q's dtype or ``dtype``, with ``rows`` rows."""
    _check_both_tables(rotary_cos, rotary_sin)
    _check_tensor("rotary_cos", rotary_cos, like=q, rank=2, dtype=dtype)
    _check_tensor("rotary_sin", rotary_sin, like=q, rank=2, dtype=dtype)
    if rotary_sin.shape != rotary_cos.shape:
        raise ValueError(
            f"rotary_sin must have the shape of rotary_cos, {_shape(rotary_cos)}, "
            f"got {_shape(rotary_sin)}"
        )
    if 2 * rotary_cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos must have shape (seqlen, rotary_dim / 2) with rotary_dim at most the "
            f"head dimension, {q.shape[-1]}, got {_shape(rotary_cos)}"
        )
    if rotary_cos.shape[0] < rows:
        raise ValueError(
            f"rotary_cos must have a row for each of {rows} positions, got {_shape(rotary_cos)}"
        )


def _cache_seqlens(
    cache_seqlens: Any, q: Tensor, batch: int, capacity: int, seqlen_new: int
) -> tuple[Tensor | None, int | None]:
    """Return cache_seqlens as a (batch,) tensor, and the largest where the host knows it."""
    if cache_seqlens is None:
        return None, None
    if isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0:
        _check_index("cache_seqlens", cache_seqlens, q, (batch,), "(batch,)")
        used = cache_seqlens
        known = int(used.max()) if is_readable(used) and batch > 0 else None
    else:
        known = integer("cache_seqlens", cache_seqlens)
        length = max(-1, min(known, capacity + 1))  # more is an error below
        used = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if known is not None and known + seqlen_new > capacity:
        raise ValueError(
            f"k_cache must have room for cache_seqlens + seqlen_new = {known} + {seqlen_new} keys, "
            f"got a capacity of {capacity}"
        )
    return used, known


def has_no_data(tensor: Tensor) -> bool:
    """Only shapes are asked for: a fake implementation, or meta tensors."""
    return tensor.is_meta or (type(tensor) is not Tensor and isinstance(tensor, FakeTensor))


def is_readable(x: Tensor) -> bool:
    """Whether reading values costs nothing: they are on the CPU, and no trace or transform's."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and not has_no_data(x)
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )


def _values(x: Tensor | None) -> list[Any] | None:
    return x.tolist() if x is not None and is_readable(x) else None


def _check_values_of_varlen(a: Attention) -> None:
    """Check cu_seqlens, the longest lengths and pages, as far as they lie on the CPU."""
    lengths_q = lengths_of("cu_seqlens_q", a.cu_seqlens_q, "q", a.q.shape[0])
    if lengths_q is not None:
        check_longest("max_seqlen_q", a.max_seqlen_q, lengths_q)
    total_k = None if a.block_table is not None else a.k.shape[0]
    used = _values(a.seqused_k)
    if a.cu_seqlens_k is None:
        lengths_k = None if used is None else [max(0, length) for length in used]
    else:
        lengths_k = lengths_of("cu_seqlens_k", a.cu_seqlens_k, "k", total_k)
    if lengths_k is None:
        return
    if used is not None:
        if a.block_table is None:
            check_used("seqused_k", used, "cu_seqlens_k", lengths_k)
        lengths_k = list(map(min, used, lengths_k))
    first = _check_leftpad("leftpad_k", a.leftpad_k) or [0] * a.batch
    longest = lengths_k if a.block_table is None else list(map(operator.sub, lengths_k, first))
    check_longest("max_seqlen_k", a.max_seqlen_k, longest)
    _check_pages(a, first, lengths_k)


def check_used(name: str, used: list[int], of: str, lengths: list[int]) -> None:
    for b, (length, rows) in enumerate(zip(used, lengths, strict=True)):
        if length > rows:
            raise ValueError(
                f"{name} must be at most the length of the sequence in {of}, {rows} for sequence "
                f"{b}, got {length}"
            )


def _check_values_of_cache(a: Attention, seqlen_new: int) -> None:
    """Check where the cache of each sequence lies, as far as that is known on the CPU."""
    used = [a.max_seqlen_k] * a.batch if a.seqused_k is None else _values(a.seqused_k)
    if used is not None and seqlen_new > 0:
        used = [x if x < 0 else x + seqlen_new for x in used]
    first = _check_leftpad("cache_leftpad", a.leftpad_k) or [0] * a.batch
    slots = _values(a.cache_batch_idx)
    if used is None:
        return
    if slots is not None:
        taken = [slot for slot, length in zip(slots, used, strict=True) if length >= 0]
        if seqlen_new > 0 and len(set(taken)) < len(taken):
            raise ValueError(f"cache_batch_idx must name a row once where k is given, got {slots}")
        for slot, length in zip(slots, used, strict=True):
            if length > 0 and not 0 <= slot < a.k.shape[0]:
                raise ValueError(
                    f"cache_batch_idx must name rows 0 .. {a.k.shape[0] - 1} of k_cache, got {slot}"
                )
    _check_pages(a, first, used)


def lengths_of(name: str, cu_seqlens: Tensor | None, rows_of: str, total: int | None) -> Any:
    """The lengths that cu_seqlens delimits, of a tensor of ``total`` rows; None if not known."""
    bounds = _values(cu_seqlens)
    return None if bounds is None else lengths_between(name, bounds, rows_of, total)


def lengths_between(name: str, bounds: Sequence[int], rows_of: str, total: int | None) -> list[int]:
    """The lengths that lie between known bounds, which are checked."""
    if bounds[0] < 0:
        raise ValueError(f"{name} must start at 0 or more, got {bounds[0]}")
    lengths = list(map(operator.sub, bounds[1:], bounds))
    for b, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name} must never fall, got {bounds[b + 1]} after {bounds[b]}")
    if total is not None and bounds[-1] > total:
        raise ValueError(
            f"{name} must end within the {total} rows of {rows_of}, got an end of {bounds[-1]}"
        )
    return lengths


def check_longest(name: str, given: int, lengths: list[int]) -> None:
    longest = max(lengths, default=0)
    if given < longest:
        raise ValueError(f"{name} must be at least the longest length, {longest}, got {given}")


def _check_leftpad(name: str, leftpad: Tensor | None) -> list[int] | None:
    values = _values(leftpad)
    if values and min(values) < 0:
        raise ValueError(f"{name} must be at least 0, got {min(values)}")
    return values


def _check_pages(a: Attention, first: list[int], used: list[int]) -> None:
    """Of the pages that rows first .. used - 1 of a sequence lie in: that there are so many."""
    table = _values(a.block_table)
    if table is None:
        return
    num_pages, page_size = a.k.shape[:2]
    for pages, start, stop in zip(table, first, used, strict=True):
        if stop > len(pages) * page_size:
            raise ValueError(
                f"block_table must have pages for {stop} rows, got {len(pages)} of {page_size} rows"
            )
        for page in pages[start // page_size : -(-max(stop, 0) // page_size)]:
            if not 0 <= page < num_pages:
                raise ValueError(f"block_table must name pages 0 .. {num_pages - 1}, got {page}")


def _is_below_zero(value: int) -> bool:
    """Whether a number is known to be: nothing may be known of a symbol."""
    if not torch.compiler.is_compiling() and type(value) is int:
        return value < 0
    from torch.fx.experimental import symbolic_shapes  # which takes long to import

    known = getattr(symbolic_shapes, "guard_or_false", bool)  # not in torch before 2.8
    return known(value < 0)


def _max_seqlen(name: str, value: Any) -> int:
    value = integer(name, value)  # some clients keep it on the GPU: reading it synchronises
    if _is_below_zero(value):
        raise ValueError(f"{name} must be at least 0, got {value}")
    return min(value, MOST_LENGTH) if type(value) is int else value


def _check_options(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_left: Any,
    window_right: Any,
    softcap: Any,
    deterministic: Any,
) -> Options:
    left, right = integer("window_size", window_left), integer("window_size", window_right)
    scale = read_scale("softmax_scale", softmax_scale)
    dropout_p, softcap = real("dropout_p", dropout_p), real("softcap", softcap)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    for name, number in (("softcap", softcap), ("softmax_scale", 0 if scale is None else scale)):
        if not 0 <= number <= _MOST:
            raise ValueError(f"{name} must be at least 0 and at most {_MOST}, got {number}")
    if 0 < softcap < _LEAST_SOFTCAP:
        raise ValueError(f"softcap must be 0 or at least {_LEAST_SOFTCAP}, got {softcap}")
    if type(left) is type(right) is int:  # a symbolic one may have no bounds yet
        left, right = (max(-1, min(size, MOST_LENGTH)) for size in (left, right))
    return Options(
        scale,
        left,
        0 if flag("causal", causal) else right,
        softcap,
        dropout_p,
        flag("deterministic", deterministic),
    )


# A model calls with the same options and shapes over and over.
_remembered_options = functools.lru_cache(maxsize=256, typed=True)(_check_options)
_remembered_sizes = functools.lru_cache(maxsize=1024)(_check_sizes)
