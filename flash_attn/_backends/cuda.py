"""The compiled kernels: what they cover, and calls of them through flash_attn._C."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from flash_attn._arguments import (
    FP8,
    FP8_LEVELS,
    SCALE_BLOCK,
    Attention,
    CacheAppend,
    Options,
    Place,
    Rotary,
)
from flash_attn._backends import tiled


class Kernel(NamedTuple):
    """A row of ``_C.kernels()``: what a compiled kernel says of itself."""

    operation: str
    backend: str
    dtype: str  # of q
    kv_dtype: str  # of k and v
    out_dtype: str
    headdim: int  # the largest that it takes, of q and k
    headdim_v: int  # and of v
    feature_set: str
    takes: frozenset[str]  # features that a call may have: see Attention.features
    tiles: int  # tile shapes, of which the setting "tile" forces one


try:
    import flash_attn._C as _C

    _KERNELS = tuple(Kernel(*row[:8], frozenset(row[8]), *row[9:]) for row in _C.kernels())
    call_key = _C.call_key
except ModuleNotFoundError as error:  # not built; an extension that is there but broken is an error
    if error.name != "flash_attn._C":
        raise
    _KERNELS = ()

    def call_key(arguments: tuple[Any, ...], settings: int) -> bytes | None:
        """Without the extension nothing is launched again."""
        return None


# Tensors of (..., heads, headdim) beside q, k and v.
_OPERANDS = {"out", "dout", "dq", "dk", "dv"}
_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    FP8: "e4m3",
    torch.int8: "int8",
}
_WORKSPACE_ALIGNMENT = 512  # in bytes, as of a tensor of its own

# Rows, pairs of a query and a head of the group that reads the same keys, that the decode kernels
# always take. More are tiles that read the same keys: _decodes_more.
_DECODE_ROWS = 32
_MORE_DECODE_ROWS = {"sm80": 512, "sm90": 256}
_MORE_DECODE_KEYS = 1024  # of a sequence, at least
# Rows from which, and bytes up to which a cache in FP8 is copied to 16 bits.
_WIDENED_ROWS = 256
_WIDENED_BYTES = 2**30

# The kernels' tanh is right to 2e-7, in absolute terms, and a score to that times the softcap.
_MOST_SOFTCAP = 1e4

# Features of a call, as messages name them where their name will not do.
_DESCRIPTIONS = {
    "any_alignment": "tensors that cannot be moved 16 bytes at a time",
    "pages": "a paged cache (block_table)",
    "cache_slots": "cache_batch_idx",
    "place": "ALiBi or dropout of a part of a larger problem",
    "odd_place": "dropout of a part of a larger problem that begins at no multiple of 16, or parts "
    "of unequal sequences",
}

# What, beside a call itself, decides its launch: the backend that is forced; the shared memory of a
# thread block in bytes (0: what the device has); the kernel's tile shape, counted from 0 (-1: the
# kernel chooses), and into how many parts a forward divides the keys (0: likewise); whether the
# decode kernels run forwards (None: those of few rows that they take); who wants to see all
# choices, as if calls were the first ones. Each state that occurs gets a number.
_DEFAULTS: dict[str, Any] = {
    "backend": None,
    "shared_memory": 0,
    "tile": -1,
    "num_splits": 0,
    "decode": None,
    "observer": None,
}
_settings = dict(_DEFAULTS)
_changes: list[tuple[str, Any]] = []  # in the order in which their blocks began
_lock = threading.Lock()
_states: dict[tuple[Any, ...], int] = {}
state = 0


@contextmanager
def changed_setting(name: str, value: Any) -> Iterator[None]:
    """Change a setting inside a ``with`` block; process-wide: the last block that began counts."""
    change = (name, value)
    _update(lambda: _changes.append(change))
    try:
        yield
    finally:
        # Blocks of other threads may have begun in this one, and end after it.
        _update(lambda: _changes.pop([x is change for x in _changes].index(True)))


def _update(change: Callable[[], Any]) -> None:
    global state
    with _lock:
        change()
        _settings.update({**_DEFAULTS, **dict(_changes)})
        state = _states.setdefault(tuple(_settings.values()), len(_states))


_update(lambda: None)


def forced_backend() -> str | None:
    """Return the backend that ``use_backend`` forces."""
    return _settings["backend"]


# ---- which kernel --------------------------------------------------------------------------------


def available() -> bool:
    """Whether the extension was built."""
    return bool(_KERNELS)


def backends(operation: str | None = None) -> tuple[str, ...]:
    """Return the kernel backends of this build, whatever the GPU; those with an operation."""
    return tuple(sorted({x.backend for x in _KERNELS if operation in (None, x.operation)}))


def unsupported(problem: Attention, backend: str, operation: str) -> str | None:
    """Return why ``backend`` cannot run this ("has no ..."), or None.

    ``operation`` is "forward" or "backward".
    """
    if problem.softcap > _MOST_SOFTCAP:
        return f"has no softcap above {_MOST_SOFTCAP:g}"
    if problem.is_fp8 and operation == "forward":
        return _unsupported_in_fp8(problem, backend)
    if problem.is_quantised and not problem.is_fp8:
        operation = "decode"  # also of many queries, for which the cache is copied: _widens_keys
    found = _kernel(problem, backend, operation, _are_aligned(problem))
    return found if isinstance(found, str) else None


def _kernel(problem: Attention, backend: str, operation: str, aligned: bool) -> int | str:
    """The place of the smallest kernel that takes the problem, or why there is none."""
    dtypes = problem.q.dtype, problem.k.dtype, problem.out_dtype
    headdims = problem.headdim, problem.headdim_v
    features = problem.features if aligned else problem.features | {"any_alignment"}
    return _smallest_kernel(backend, operation, dtypes, headdims, features)


@cache
def _smallest_kernel(
    backend: str,
    operation: str,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    headdims: tuple[int, int],
    features: frozenset[str],
) -> int | str:
    built = [(x, i) for i, x in enumerate(_KERNELS) if x[:2] == (operation, backend)]
    names = tuple(map(_DTYPES.get, dtypes))
    large_enough = [
        (x, i)
        for x, i in built
        if x[2:5] == names and x.headdim >= headdims[0] and x.headdim_v >= headdims[1]
    ]
    if not large_enough:
        kinds = (x for x, _ in built if (x.kv_dtype == x.dtype) == (dtypes[0] == dtypes[1]))
        known = sorted({(x.dtype, x.headdim, x.headdim_v) for x in kinds})
        cache = "" if dtypes[0] == dtypes[1] else f" beside a cache of {dtypes[1]}"
        listed = ", ".join(f"{dtype} {most}/{most_v}" for dtype, most, most_v in known)
        return (
            f"has no {operation} kernel for {dtypes[0]}{cache} and head dimensions {headdims[0]} "
            f"of q and k, {headdims[1]} of v (this build takes up to {listed or 'none'})"
        )
    if fitting := [
        (x.headdim + x.headdim_v, len(x.takes), i) for x, i in large_enough if features <= x.takes
    ]:
        return min(fitting)[-1]
    described = {name: _DESCRIPTIONS.get(name, name) for name in sorted(features)}
    for name, description in described.items():
        if not any(name in x.takes for x, _ in built):
            return f"has no {operation} with {description}"
    wanted = " and ".join(described.values())
    return f"was built without the {operation} kernel that this call needs, with {wanted}"


# ---- calls ---------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """A prepared call for arguments of one layout; it allocates results and workspaces."""

    call: Any  # _C.Call
    like: int  # the place among the arguments of a tensor of the results' device and dtype
    # Of each result its shape and dtype (None: as above), or the place of the argument it is like.
    results: tuple[tuple[tuple[int, ...], torch.dtype | None, int | None], ...]
    scratch: int  # bytes of all workspaces together; 0: it takes none
    kept_zero: bool  # whether it takes _kept_zero, behind the others

    def __call__(self, arguments: tuple[Any, ...]) -> list[Tensor]:
        """Return the results."""
        given = arguments[self.like]
        results = [
            torch.empty_like(arguments[like])
            if like is not None
            else given.new_empty(*shape)
            if dtype is None
            else given.new_empty(*shape, dtype=dtype)
            for shape, dtype, like in self.results
        ]
        self.run(arguments, results)
        return results

    def run(self, arguments: tuple[Any, ...], results: Sequence[Tensor]) -> None:
        """Write the results."""
        given = arguments[self.like]
        device = given.get_device()
        stream = torch._C._cuda_getCurrentRawStream(device)
        behind = [*results]
        if self.scratch:
            behind.append(given.new_empty(self.scratch, dtype=torch.uint8))
        if self.kept_zero:
            behind.append(_kept_zero(device, stream))
        self.call.launch(arguments, tuple(behind), stream)


class LaunchPair(NamedTuple):
    """Two launches, of which the second takes the results of the first behind the arguments."""

    first: Launch
    second: "AnyLaunch"
    written: tuple[int, ...]  # places of the arguments that the first writes to

    def __call__(self, arguments: tuple[Any, ...]) -> list[Tensor]:
        count_writes(arguments[place] for place in self.written)
        return self.second((*arguments, *self.first(arguments)))


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Let autograd know that the tensors are written to, as PyTorch's operations do."""
    for x in tensors:
        if not x.is_inference():  # which count none
            increment_version(x)


AnyLaunch = Launch | LaunchPair


class Prepared(NamedTuple):
    """A prepared call before it is known where among a caller's arguments its tensors are."""

    call: Any  # _C.Call
    tensors: dict[str, Tensor]  # the first is the one that Launch.like names
    results: dict[str, Tensor]
    like: dict[str, str]  # results that are made like an argument

    def run(self) -> None:
        """Write ``results`` from ``tensors``."""
        launch = self.at({name: i for i, name in enumerate(self.tensors)})
        launch.run(tuple(self.tensors.values()), tuple(self.results.values()))

    def placed(
        self, arguments: Sequence[Any], places: dict[str, int]
    ) -> tuple[Launch, set[int]] | None:
        """Return the launch for a caller's arguments, and which of them it takes.

        None if the tensors are not the arguments at the places of their names.
        """
        for name, x in self.tensors.items():
            if name not in places or arguments[places[name]] is not x:
                return None
        return self.at(places), {places[name] for name in self.tensors}

    def _recipe(
        self, name: str, x: Tensor, places: dict[str, int]
    ) -> tuple[tuple[int, ...], torch.dtype | None, int | None]:
        """How to make a result, see Launch.results; of a tensor like another it takes less."""
        main, q = next(iter(self.tensors.items()))
        if x.dtype == q.dtype and x.shape == q.shape and q.is_contiguous() and x.is_contiguous():
            return (), None, places[main]
        like = places[self.like[name]] if name in self.like else None
        return tuple(x.shape), None if x.dtype == q.dtype else x.dtype, like

    def at(self, places: dict[str, int]) -> Launch:
        """Return the launch for arguments that are at these places."""
        place_of = {**places, **{name: -1 - i for i, name in enumerate(self.results)}}
        behind = -1 - len(self.results)
        scratch, offsets, kept_zero = 0, {}, []
        for name, size, is_kept_zero in self.call.workspaces:
            if is_kept_zero:
                kept_zero.append(name)
            else:
                place_of[name], offsets[name] = behind, scratch
                scratch += -(-size // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        for name in kept_zero:
            place_of[name] = behind - (scratch > 0)
        return Launch(
            self.call.at(
                [place_of[name] for name in self.call.names],
                [offsets.get(name, 0) for name in self.call.names],
            ),
            places[next(iter(self.tensors))],
            tuple(self._recipe(name, x, places) for name, x in self.results.items()),
            scratch,
            bool(kept_zero),
        )


class PreparedPair(NamedTuple):
    """An append, or a pass over k and v, and the attention that takes its results.

    That may be a pair itself.
    """

    first: Prepared
    attention: "AnyPrepared"
    written: tuple[str, ...] = ()  # arguments that the first writes to

    def placed(
        self, arguments: Sequence[Any], places: dict[str, int]
    ) -> tuple[LaunchPair, set[int]] | None:
        """As Prepared.placed."""
        between = self.first.results
        behind = {_BETWEEN.get(name, name): len(arguments) + i for i, name in enumerate(between)}
        first = self.first.placed(arguments, places)
        second = self.attention.placed((*arguments, *between.values()), {**places, **behind})
        if first is None or second is None:
            return None
        written = tuple(places[name] for name in self.written)
        return LaunchPair(first[0], second[0], written), first[1] | second[1] - {*behind.values()}


AnyPrepared = Prepared | PreparedPair
# Results of the first of two launches, by the names that an attention has for them.
_BETWEEN = {
    "rotated_q": "q",
    "lengths": "seqused_k",
    "q_out": "q",
    "k_out": "k",
    "v_out": "v",
}


def launch_among(
    prepared: AnyPrepared, arguments: Sequence[Any], places: dict[str, int]
) -> AnyLaunch | None:
    """Return the launch for a caller's arguments; None if it needs other tensors than those.

    Or fewer: a number may be given as a tensor, whose value no key knows.
    """
    placed = prepared.placed(arguments, places)
    if placed is None or len(placed[1]) != sum(isinstance(x, Tensor) for x in arguments):
        return None
    return placed[0]


def forward(
    problem: Attention,
    rng_state: Tensor | None,
    return_probs: bool,
    out: Tensor | None = None,
    remember: Callable[[AnyPrepared], None] | None = None,
    *,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what tiled.forward does, of a problem that ``unsupported`` has nothing against.

    q, k and v are read in place, whatever their strides. ``remember`` is given what ran, if that is
    all that such calls take.
    """
    if _is_empty(problem) or (problem.is_fp8 and return_probs):
        return tiled.forward(problem, rng_state, return_probs, out)
    if out is not None and not _fits(out, "sm90" if problem.is_quantised else backend):
        result, lse, probs = forward(problem, rng_state, return_probs, backend=backend)
        return out.copy_(result), lse, probs
    if widens(problem):
        return forward(widened(problem), rng_state, return_probs, out, backend=backend)
    if problem.is_fp8:
        return (*_forward_in_fp8(problem, out, remember, backend), None)
    widening = None
    if _widens_keys(problem, backend):
        problem, widening = _with_wide_keys(problem, backend)
    q, tensors = problem.q, _tensors(problem, rng_state)
    if problem.block_table is not None and problem.cu_seqlens_k is not None:
        tensors |= {"cu_seqlens_k": None, "lengths_k": tensors["cu_seqlens_k"]}
    results = {}
    if out is None:
        results["out"] = out = q.new_empty(*problem.out_shape, dtype=problem.out_dtype)
    else:
        tensors["out"] = out
    results["lse"] = lse = q.new_empty(*problem.lse_shape, dtype=torch.float32)
    operation = "forward"
    if _decodes(problem, backend, _is_aligned(out)):
        operation = "decode"
        tensors["seqused_before"] = problem.seqused_before
    prepared = _prepare(problem, operation, backend, tensors, results)
    prepared.run()
    if "out" in tensors:
        count_writes((out,))
    if return_probs:
        return out, lse, tiled.signed_probabilities(problem, lse, rng_state)
    if remember is not None:
        remember(prepared if widening is None else PreparedPair(widening, prepared))
    return out, lse, None


# ---- caches of 8 bits ----------------------------------------------------------------------------


def _widens_keys(problem: Attention, backend: str) -> bool:
    """Whether a cache in FP8 is copied to 16 bits before the forward: for many queries.

    The decode kernels, which take such a cache, read it again for each tile of rows.
    """
    if not problem.is_quantised or problem.num_splits > 0 or problem.cu_seqlens_k is not None:
        return False
    if _settings["decode"]:
        return False
    queries = problem.max_seqlen_q
    if problem.is_varlen:  # of a sequence, in the mean
        queries = problem.q.shape[0] // problem.batch
    elements = problem.batch * _cached_rows(problem) * problem.nheads_kv
    dtypes = problem.q.dtype, problem.q.dtype, problem.out_dtype
    headdims = problem.headdim, problem.headdim_v
    features = problem.features - {"pages", "cache_slots"}
    return (
        queries * (problem.nheads // problem.nheads_kv) >= _WIDENED_ROWS
        and 2 * elements * sum(headdims) <= _WIDENED_BYTES
        and _are_aligned(problem)
        and _kernel_of_tokens("widen", backend, problem.q, problem.k) >= 0
        and isinstance(_smallest_kernel(backend, "forward", dtypes, headdims, features), int)
    )


def _with_wide_keys(problem: Attention, backend: str) -> tuple[Attention, Prepared]:
    """The problem with its keys and values in 16 bits; and the launch that copied them."""
    rows = _cached_rows(problem)
    of_tokens = problem.batch, rows, problem.nheads_kv
    tensors: dict[str, Tensor | None] = {
        "k": problem.k,
        "v": problem.v,
        "seqused_k": _contiguous(problem.seqused_k),
        "cache_batch_idx": _contiguous(problem.cache_batch_idx),
        "block_table": _contiguous(problem.block_table),
        "k_descale": problem.k_descale,
        "v_descale": problem.v_descale,
    }
    results = {
        "k_out": problem.q.new_empty(*of_tokens, problem.headdim),
        "v_out": problem.q.new_empty(*of_tokens, problem.headdim_v),
    }
    left = problem.window_left
    reach = rows if left < 0 else min(left + problem.max_seqlen_q, rows)
    kernel = _kernel_of_tokens("widen", backend, problem.q, problem.k)
    prepared = _launch(kernel, tensors, results, {"reach": reach})
    problem = problem._replace(
        k=results["k_out"],
        v=results["v_out"],
        sizes=problem.sizes._replace(rows_k=(problem.batch, rows)),
        max_seqlen_k=rows,
        block_table=None,
        cache_batch_idx=None,
        k_descale=None,
        v_descale=None,
        seqused_before=None,  # an append is no longer the launch before the attention
        seqlen_new=0,
    )
    return problem, prepared


def _cached_rows(problem: Attention) -> int:
    """How many rows of its cache a sequence can have in use."""
    rows = _rows(problem)
    return rows if problem.leftpad_k is not None else min(rows, problem.max_seqlen_k)


# ---- operands of 8 bits --------------------------------------------------------------------------


def widens(problem: Attention) -> bool:
    """Whether queries in FP8 are widened: few, or for a cache with pages, slots or left padding.

    Decode kernels are as fast with queries of 16 bits, and do not round probabilities to 8. The
    forward in FP8 does not read such a cache.
    """
    if problem.q.dtype != FP8:
        return False
    of_cache = problem.block_table, problem.leftpad_k, problem.cache_batch_idx
    rows = problem.max_seqlen_q * (problem.nheads // max(problem.nheads_kv, 1))
    return rows <= _DECODE_ROWS or any(x is not None for x in of_cache)


def widened(problem: Attention) -> Attention:
    """The problem with queries in bfloat16, which holds all e4m3; their descale joins the keys'."""
    descales = [x for x in (problem.q_descale, problem.k_descale) if x is not None]
    k_descale = descales[0] * descales[1] if len(descales) == 2 else next(iter(descales), None)
    return problem._replace(q=problem.q.bfloat16(), q_descale=None, k_descale=k_descale)


def _unsupported_in_fp8(problem: Attention, backend: str) -> str | None:
    """As ``unsupported``, of the forward whose operands have 8 bits."""
    if widens(problem):
        dtypes, operation = (torch.bfloat16, FP8, problem.out_dtype), "decode"
    else:
        dtype = torch.int8 if problem.fp8_level > 1 else FP8
        dtypes, operation = (dtype, dtype, problem.out_dtype), "quantised"
    headdims, aligned = (problem.headdim, problem.headdim_v), _rows_are_aligned(problem)
    if operation == "decode":
        aligned = aligned and _is_aligned(problem.k) and _is_aligned(problem.v)
    features = problem.features if aligned else problem.features | {"any_alignment"}
    found = _smallest_kernel(backend, operation, dtypes, headdims, features)
    return found if isinstance(found, str) else None


def _forward_in_fp8(
    problem: Attention,
    out: Tensor | None,
    remember: Callable[[AnyPrepared], None] | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Quantise k and v, if they do not come in FP8; then attend. q is rounded by the attention."""
    a = problem._replace(q=_movable(problem.q), k=_movable(problem.k), v=_movable(problem.v))
    first = quantised(a, backend) if a.fp8_level > 0 else None
    results = {} if first is None else first.results
    operands = {_BETWEEN.get(name, name): x for name, x in results.items()}
    options = replace(a.options, softmax_scale=a.softmax_scale)
    a = a._replace(q=operands.get("q", a.q), k=operands.get("k", a.k), fp8_level=0, options=options)
    dtypes = a.k.dtype, a.k.dtype, problem.out_dtype
    headdims = problem.headdim, a.headdim_v
    attention = _smallest_kernel(backend, "quantised", dtypes, headdims, a.features)
    assert isinstance(attention, int)  # unsupported() has been asked
    tensors = _tensors(a, None) | operands
    if out is None:
        out = a.q.new_empty(a.out_shape, dtype=problem.out_dtype)
    lse = a.q.new_empty(a.lse_shape, dtype=torch.float32)
    launched = _launch(attention, tensors, {"out": out, "lse": lse}, _numbers(a))
    if remember is not None:
        remember(launched if first is None else PreparedPair(first, launched))
    return out, lse


def quantised(a: Attention, backend: str) -> Prepared:
    """The pass before attention, which has been launched."""
    dtype = torch.int8 if a.fp8_level > 1 else FP8
    headdims = a.headdim, a.headdim_v
    first = _smallest_kernel(backend, "quantise", (a.q.dtype, dtype, FP8), headdims, frozenset())
    assert isinstance(first, int)  # unsupported() has been asked
    headdim = _KERNELS[first].headdim

    blocks = _scaled_blocks(a)
    of_keys = (a.nheads_kv,) if a.is_varlen else (a.batch, a.nheads_kv)
    results = {
        "k_out": a.k.new_empty(*a.k.shape[:-1], headdim, dtype=dtype),
        "k_scale": a.k.new_empty(*of_keys, blocks, dtype=torch.float32),
    }
    given = {"k": a.k, "cu_seqlens_k": _contiguous(a.cu_seqlens_k)}
    numbers: dict[str, float] = {}
    if FP8_LEVELS[a.fp8_level - 1] != "accurate":
        given["v"] = a.v
        results["v_out"] = a.v.new_empty(*of_keys, a.headdim_v, blocks * SCALE_BLOCK, dtype=FP8)
        results["v_scale"] = torch.empty_like(results["k_scale"])
    if a.rotary is not None:
        given |= {"q": a.q, "rotary_cos": a.rotary.cos, "rotary_sin": a.rotary.sin}
        results["q_out"] = a.q.new_empty(a.q.shape)
        numbers["interleaved"] = a.rotary.interleaved
    return _launch(first, given, results, numbers)


def rotates_inside(problem: Attention, rotary: Rotary) -> bool:
    """Whether the pass of a dense problem has this rotary embedding."""
    cos, sin = rotary.cos, rotary.sin
    return (
        cos.shape[1] % 8 == 0
        and cos.numel() > 0
        and cos.dtype == sin.dtype == problem.q.dtype
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (cos, sin))
    )


def _scaled_blocks(problem: Attention) -> int:
    """Blocks of keys with a scale: of a dense sequence, or of all packed ones."""
    rows = problem.sizes.rows_k[-1]
    return rows // SCALE_BLOCK + problem.batch if problem.is_varlen else -(-rows // SCALE_BLOCK)


def _rows_are_aligned(problem: Attention) -> bool:
    """Whether rows of q, k and v without gaps can be moved 16 bytes at a time."""
    return (problem.headdim | problem.headdim_v) * problem.k.itemsize % 16 == 0


def _movable(x: Tensor) -> Tensor:
    return x if _is_aligned(x) else _compact(x)


def _launch(
    kernel: int,
    tensors: Mapping[str, Tensor | None],
    results: dict[str, Tensor],
    numbers: dict[str, float],
) -> Prepared:
    given = {name: x for name, x in tensors.items() if x is not None}
    call = _C.prepare(kernel, {**given, **results}, numbers)
    prepared = Prepared(call, given, results, {})
    prepared.run()
    return prepared


def backward(
    problem: Attention,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    rng_state: Tensor | None,
    remember: Callable[[Prepared], None] | None = None,
    *,
    backend: str,
) -> Tensor:
    """Write dq, dk and dv; return delta. As tiled.backward; q, k and v are read in place."""
    if _is_empty(problem):
        return tiled.backward(problem, dout, out, lse, dlse, dq, dk, dv, rng_state)
    tensors = _tensors(problem, rng_state)
    tensors |= {
        "dout": dout if _fits(dout, backend) else _compact(dout),
        "out": out if _fits(out, backend) else _compact(out),
        "lse": lse.contiguous(),
        "dlse": _contiguous(dlse),
    }
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    written = {
        name: x if _fits(x, backend) else torch.empty_like(x, memory_format=torch.contiguous_format)
        for name, x in gradients.items()
    }
    delta = problem.q.new_empty(problem.lse_shape, dtype=torch.float32)
    like = {"dq": "q", "dk": "k", "dv": "v"}
    prepared = _prepare(problem, "backward", backend, tensors, written | {"delta": delta}, like)
    prepared.run()
    for name, gradient in gradients.items():
        if written[name] is not gradient:
            gradient.copy_(written[name])
            remember = None
    if remember is not None:
        remember(prepared)
    return delta


def appends(problem: Attention, new: CacheAppend, backend: str) -> bool:
    """Whether the kernel appends this."""
    tensors = (problem.q, problem.k, problem.v, new.k, new.v)
    return (
        _kernel_of_tokens("append", backend, problem.q, problem.k) >= 0
        and not any(x.numel() == 0 or x.stride(-1) != 1 for x in tensors)
        and (new.rotary_cos is None or new.rotary_cos.numel() > 0)
        and (problem.block_table is None or problem.block_table.numel() > 0)
    )


def append(problem: Attention, new: CacheAppend, backend: str) -> tuple[Attention, Prepared]:
    """As tiled.append, of what ``appends`` says yes to; also the launch."""
    q, used = problem.q, new.cache_seqlens.contiguous()
    tensors: dict[str, Tensor | None] = {
        "q": q,
        "k": problem.k,
        "v": problem.v,
        "k_new": new.k,
        "v_new": new.v,
        "seqused_k": used,
        "rotary_cos": _contiguous(new.rotary_cos),
        "rotary_sin": _contiguous(new.rotary_sin),
        "cache_batch_idx": _contiguous(problem.cache_batch_idx),
        "block_table": _contiguous(problem.block_table),
        "k_descale": problem.k_descale,
        "v_descale": problem.v_descale,
    }
    results = {"lengths": torch.empty_like(used)}
    if new.rotary_cos is not None:
        results["rotated_q"] = q.new_empty(q.shape)
    numbers: dict[str, float] = {
        "interleaved": new.rotary_interleaved,
        "masked": problem.options.masked,
    }
    kernel = _kernel_of_tokens("append", backend, q, problem.k)
    prepared = _launch(kernel, tensors, results, numbers)
    count_writes((problem.k, problem.v))
    problem = problem._replace(
        q=results.get("rotated_q", q),
        seqused_k=results["lengths"],
        seqused_before=used,
        seqlen_new=new.k.shape[1],
    )
    return problem, prepared


def rotates(x: Tensor, cos: Tensor, sin: Tensor, backend: str) -> bool:
    """Whether the kernel has this rotary embedding."""
    return (
        _kernel_of_tokens("rotary", backend, x, x) >= 0
        and x.stride(-1) == 1
        and x.numel() > 0
        and 0 not in x.stride()
        and cos.numel() > 0
        and cos.dtype == sin.dtype
        and cos.dtype in (x.dtype, torch.float32)
    )


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    inplace: bool,
    remember: Callable[[Prepared], None] | None = None,
    *,
    backend: str,
) -> tuple[Tensor, ...]:
    """Return what _rotary.apply_rotary does, of what ``rotates`` says yes to.

    If ``inplace``, write that to x and return nothing.
    """
    tensors: dict[str, Tensor | None] = {
        "x": x,
        "rotary_cos": cos.contiguous(),
        "rotary_sin": sin.contiguous(),
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.int().contiguous(),
        "offsets": offsets.int().contiguous() if isinstance(offsets, Tensor) else None,
    }
    results = {} if inplace else {"out": x.new_empty(x.shape)}
    numbers: dict[str, float] = {
        "interleaved": bool(interleaved),
        "conjugate": conjugate,
        "offset": 0 if isinstance(offsets, Tensor) else offsets,
    }
    kernel = _kernel_of_tokens("rotary", backend, x, x)
    prepared = _launch(kernel, tensors, results, numbers)
    if remember is not None:
        remember(prepared)
    return tuple(results.values())


def merges(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, backend: str) -> bool:
    """Whether the kernel merges these."""
    tensors = out, lse, part, part_lse
    return (
        _merge_kernel(out, part, backend) >= 0
        and lse.dtype == part_lse.dtype == torch.float32
        and out.numel() > 0
        and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in tensors)
    )


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, backend: str) -> None:
    """As _backends.merge_into, of what ``merges`` says yes to."""
    results = {"out": out, "lse": lse}
    given = {"part": part, "part_lse": part_lse}
    _launch(_merge_kernel(out, part, backend), given, results, {})


def _merge_kernel(out: Tensor, part: Tensor, backend: str) -> int:
    return _kernel_of_tokens("merge", backend, part, part, _DTYPES.get(out.dtype))


def _kernel_of_tokens(
    operation: str, backend: str, x: Tensor, cache: Tensor, out_dtype: str | None = None
) -> int:
    """The row of the kernel for tokens of these dtypes, whatever their head dim; -1: none."""
    dtype = _DTYPES.get(x.dtype)
    wanted = operation, backend, dtype, _DTYPES.get(cache.dtype), out_dtype or dtype
    return next((i for i, row in enumerate(_KERNELS) if row[:5] == wanted), -1)


def _decodes(problem: Attention, backend: str, out_aligned: bool) -> bool:
    """Whether a decode kernel runs the forward. (A tile shape that is forced is the forward's.)"""
    if problem.is_fp8:
        return False
    if problem.is_quantised:
        return True
    forced = _settings["decode"]
    if forced is not None:
        return bool(forced)
    if _settings["tile"] >= 0:
        return False
    rows = problem.max_seqlen_q * (problem.nheads // problem.nheads_kv)
    if rows > _DECODE_ROWS:
        # With a fixed num_splits the kernel must not depend on the batch.
        if problem.num_splits > 0 or not _decodes_more(problem, backend, rows):
            return False
    aligned = out_aligned and _are_aligned(problem)
    return isinstance(_kernel(problem, backend, "decode", aligned), int)


def _decodes_more(problem: Attention, backend: str, rows: int) -> bool:
    """Whether a decode kernel is faster than the forward, for more rows than it always takes.

    Its tiles have rows of all heads of a group, but each further tile reads the keys again. Both
    divide keys. By the times of both on an H200 (docs/design-notes.md, Inference).
    """
    keys = problem.max_seqlen_k
    if rows > _MORE_DECODE_ROWS[backend] or keys < _MORE_DECODE_KEYS:
        return False
    tile_rows = 64 if backend == "sm90" else 32
    tiles = -(-rows // tile_rows) * problem.batch * problem.nheads_kv
    if backend == "sm80":  # whose forward has rows of one head in a tile, at least 64
        forward_tiles = -(-problem.max_seqlen_q // 64) * problem.batch * problem.nheads
        more_rows = 64 * forward_tiles / (tile_rows * tiles)
        return more_rows >= 2 and more_rows * forward_tiles * keys >= 2**19
    if rows <= tile_rows:
        return tiles * min(keys, 2**15) <= 2**18
    return tiles * min(keys, 2**14) <= 2**17


def _is_empty(problem: Attention) -> bool:
    """Whether there is nothing to launch: no query, or no key."""
    return (
        problem.max_seqlen_q == 0
        or problem.max_seqlen_k == 0
        or problem.batch == 0
        or 0 in problem.out_shape
        or 0 in problem.sizes.rows_k
        or (problem.block_table is not None and problem.block_table.numel() == 0)
    )


def _tensors(problem: Attention, rng_state: Tensor | None) -> dict[str, Tensor | None]:
    """The arguments of a problem that are tensors, as the kernels want them."""
    s_aux = problem.s_aux
    return {
        "q": problem.q,
        "k": problem.k,
        "v": problem.v,
        "cu_seqlens_q": _contiguous(problem.cu_seqlens_q),
        "cu_seqlens_k": _contiguous(problem.cu_seqlens_k),
        "seqused_k": _contiguous(problem.seqused_k),
        "leftpad_k": _contiguous(problem.leftpad_k),
        "block_table": _contiguous(problem.block_table),
        "cache_batch_idx": _contiguous(problem.cache_batch_idx),
        "alibi_slopes": _contiguous(problem.alibi_slopes),
        "s_aux": None if s_aux is None else s_aux.float().contiguous(),
        **{f"{x}_descale": getattr(problem, f"{x}_descale") for x in "qkv"},
        "rng_state": _contiguous(rng_state) if problem.drops else None,
    }


def _prepare(
    problem: Attention,
    operation: str,
    backend: str,
    tensors: dict[str, Tensor | None],
    results: dict[str, Tensor],
    like: dict[str, str] | None = None,
) -> Prepared:
    given = {name: x for name, x in tensors.items() if x is not None}
    others = (x for name, x in {**given, **results}.items() if name in _OPERANDS)
    aligned = _are_aligned(problem) and all(map(_is_aligned, others))
    kernel = _kernel(problem, backend, operation, aligned)
    if isinstance(kernel, str):  # of q, k and v alone unsupported() has been asked
        raise NotImplementedError(f"the {backend} backend {kernel}; use_backend('tiled') does this")
    numbers = _numbers(problem)
    if problem.num_splits > 0 and operation in ("decode", "forward"):
        # What decides the bits of a result must not depend on the batch.
        if operation == "forward" and backend == "sm90" and numbers["tile"] < 0:
            numbers["tile"] = 0
        if not numbers["num_splits"]:
            numbers["num_splits"] = min(problem.num_splits, 2**16)  # more than any kernel takes
    call = _C.prepare(kernel, {**given, **results}, numbers)
    return Prepared(call, given, results, like or {})


_OPTIONS = tuple(x.name for x in fields(Options))


def _numbers(problem: Attention) -> dict[str, float]:
    """The arguments that are numbers."""
    # max_seqlen_q and max_seqlen_k decide how much is launched, and windows are 32 bits wide.
    max_seqlen_q, max_seqlen_k = problem.max_seqlen_q, problem.max_seqlen_k
    if problem.cu_seqlens_q is not None:
        max_seqlen_q = min(max_seqlen_q, problem.q.shape[0])
        max_seqlen_k = min(max_seqlen_k, _rows(problem))
    return {
        **{name: getattr(problem.options, name) for name in _OPTIONS},
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "softmax_scale": problem.softmax_scale,
        "window_left": min(problem.window_left, max_seqlen_k),
        "window_right": min(problem.window_right, max_seqlen_q),
        "seqlen_new": problem.seqlen_new,
        **{name: _settings[name] for name in ("shared_memory", "tile", "num_splits")},
        **_place(problem),
    }


def _place(problem: Attention) -> dict[str, int]:
    """Where the problem is in a larger one; to ALiBi, how far from the bottom right corner."""
    place = problem.place or Place(0)
    shift = place.row - place.column + problem.max_seqlen_q - problem.max_seqlen_k
    return {
        **{f"place_{name}": x for name, x in place._asdict().items()},
        "place_shift": 0 if problem.place is None else shift,
    }


def _rows(problem: Attention) -> int:
    """How many keys a sequence can have at most: rows of k, or of its pages."""
    rows, table = problem.k.shape[-3], problem.block_table
    return rows if table is None else table.shape[1] * rows


# (device, owner: see _C.zeros_owner) -> zeros, which the kernels of one owner leave as they were
_kept_zeros: dict[tuple[int, int | None], Tensor] = {}
_FIRST_SLOT = -1  # of CUDA graphs; the others are below


def _kept_zero(device: int, stream: int) -> Tensor:
    """Zeros, (_C.KEPT_ZERO,) int32, whenever no kernel of the stream runs, or of the CUDA graph.

    Kernels of one stream share them since they follow each other. A graph, which may be replayed on
    any stream, has its own for each stream that it was captured from. Those are made with the
    first of the device's: before there are any, a captured call makes zeros within the graph.
    """
    owner = _C.zeros_owner(stream)
    zeros = _kept_zeros.get((device, owner))
    if zeros is not None:
        return zeros
    where = torch.device("cuda", device)
    if owner is None or owner <= _FIRST_SLOT:
        return torch.zeros(_C.KEPT_ZERO, dtype=torch.int32, device=where)
    owners = [owner]
    if (device, _FIRST_SLOT) not in _kept_zeros:
        owners += [_FIRST_SLOT - slot for slot in range(_C.GRAPH_SLOTS)]
    rows = _lasting_zeros(where, (len(owners), _C.KEPT_ZERO)).unbind()
    for key, row in zip(owners, rows, strict=True):
        _kept_zeros.setdefault((device, key), row)
    return _kept_zeros[device, owner]


def _lasting_zeros(device: torch.device, shape: tuple[int, ...]) -> Tensor:
    """Zeros for any stream.

    Another thread allocates them, for torch.compile may direct this one to the memory pool of a
    CUDA graph (mode="reduce-overhead"), where it tolerates nothing that outlives the call.
    """

    def make() -> Tensor:
        zeros = torch.zeros(shape, dtype=torch.int32, device=device)
        torch.cuda.default_stream(device).synchronize()
        return zeros

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(make).result()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _compact(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _fits(x: Tensor, backend: str) -> bool:
    """Whether a backward can take dq, dk, dv, dout or the caller's out as it is.

    The kernels want rows without gaps; those of sm90 also that 16 bytes can be moved at a time.
    """
    return x.stride(-1) == 1 and (backend != "sm90" or _is_aligned(x))


def _are_aligned(problem: Attention) -> bool:
    """Whether q, k and v can be moved 16 bytes at a time."""
    return (
        _rows_are_aligned(problem)
        and _is_aligned(problem.q)
        and _is_aligned(problem.k)
        and _is_aligned(problem.v)
    )


def _is_aligned(x: Tensor) -> bool:
    """Whether every row of x, of 3 or 4 dimensions, begins at a multiple of 16 bytes."""
    stride = x.stride()
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # which has no address of its own
        return True
    strides = stride[0] | stride[-3] | stride[-2]
    return x.data_ptr() % 16 == 0 and strides * x.itemsize % 16 == 0
