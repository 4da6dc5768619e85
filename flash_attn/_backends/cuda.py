"""The compiled kernels: what they cover, and the calls into flash_attn._C."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn._arguments import Attention
from flash_attn._backends import tiled

# Family, direction, dtype, head dimension of q and k, of v, feature set.
_Row = tuple[str, str, str, int, int, str]

try:
    import flash_attn._C as _C

    _ROWS: frozenset[_Row] = frozenset(_C.instantiations())
    call_key = _C.call_key
except ModuleNotFoundError as error:  # not built; an extension that is there but broken is an error
    if error.name != "flash_attn._C":
        raise
    _ROWS = frozenset()

    def call_key(q: object, k: object, v: object, *numbers: object) -> bytes | None:
        """Without the extension nothing is launched again."""
        return None


_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_FEATURE_SETS = 2  # plain and full

settings_version = 0  # a number for every change of what, beside a call itself, decides its launch
_shared_memory = 0  # of a thread block, in bytes; 0: what the device has


def available() -> bool:
    """Whether the extension was built."""
    return bool(_ROWS)


def families(direction: str | None = None) -> tuple[str, ...]:
    """Return the kernel families of this build, whatever the GPU; those with a direction."""
    return tuple(sorted({row[0] for row in _ROWS if direction in (None, row[1])}))


@contextmanager
def shared_memory_limit(size: int) -> Iterator[None]:
    """Run the tiles of a GPU with ``size`` bytes of shared memory a thread block; process-wide."""
    global _shared_memory, settings_version
    before, _shared_memory = _shared_memory, size
    settings_version += 1
    try:
        yield
    finally:
        _shared_memory = before
        settings_version += 1


class _Kernel(NamedTuple):
    headdim: int  # the largest that it takes, of q and k
    headdim_v: int  # and of v
    features: frozenset[str]  # the feature sets of this build


@cache
def _kernel(
    family: str, direction: str, dtype: torch.dtype, headdim: int, headdim_v: int
) -> _Kernel | None:
    """The smallest kernel that takes these head dimensions."""
    wanted = (family, direction, _DTYPES.get(dtype))
    rows = [row[3:] for row in _ROWS if row[:3] == wanted]
    large_enough = {row[:2] for row in rows if row[0] >= headdim and row[1] >= headdim_v}
    if not large_enough:
        return None
    smallest = min(large_enough, key=sum)
    return _Kernel(*smallest, frozenset(row[2] for row in rows if row[:2] == smallest))


class _Common(NamedTuple):
    """The arguments that _C.forward and _C.backward share: their first, in this order."""

    family: str
    kernel_headdim: int
    kernel_headdim_v: int
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    leftpad_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    alibi_slopes: Tensor | None
    dropout_p: float
    rng_state: Tensor | None
    shared_memory: int
    stream: int


def unsupported(problem: Attention, family: str, direction: str) -> str | None:
    """Return why ``family`` cannot run this ("has no ..."), or None.

    ``direction`` is "forward" or "backward".
    """
    dtype, headdim, headdim_v = problem.q.dtype, problem.headdim, problem.headdim_v
    kernel = _kernel(family, direction, dtype, headdim, headdim_v)
    if kernel is None:
        built = {row[2:5] for row in _ROWS if row[:2] == (family, direction)}
        names = ", ".join(f"{name} {most}/{most_v}" for name, most, most_v in sorted(built))
        return (
            f"has no {direction} kernel for {dtype} and head dimensions {headdim} of q and k, "
            f"{headdim_v} of v (this build takes up to {names or 'none'})"
        )
    if family == "sm90":
        if not _are_aligned(problem):
            return "has no loads of tensors that cannot be moved 16 bytes at a time"
    elif problem.block_table is not None:
        return "has no paged cache (block_table)"
    if direction == "backward" and problem.cache_batch_idx is not None:
        return "has no backward with cache_batch_idx"
    if len(kernel.features) < _FEATURE_SETS and _feature_set(problem) not in kernel.features:
        return f"was built without the {_feature_set(problem)} kernel that this call needs"
    return None


def forward(
    problem: Attention,
    rng_state: Tensor | None,
    return_probs: bool,
    out: Tensor | None = None,
    *,
    family: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what tiled.forward does, of a problem that ``unsupported`` has nothing against.

    q, k and v are read in place, whatever their strides.
    """
    if _is_empty(problem):
        return tiled.forward(problem, rng_state, return_probs, out)
    if out is not None and family == "sm90" and not _is_aligned(out):
        result, lse, probs = forward(problem, rng_state, return_probs, family=family)
        return out.copy_(result), lse, probs
    q, s_aux, table = problem.q, problem.s_aux, problem.block_table
    common = _common_arguments(problem, rng_state, family, "forward")
    if out is None:
        out = q.new_empty(*problem.out_shape)
    lse = q.new_empty(*problem.lse_shape, dtype=torch.float32)
    if table is not None and problem.cu_seqlens_k is not None:
        common = common._replace(cu_seqlens_k=None, seqused_k=_lengths_in_pages(problem))
    _C.forward(  # by position: names take 2 us
        *common,
        out,
        lse,
        _contiguous(problem.cache_batch_idx),
        None if s_aux is None else s_aux.float().contiguous(),
        _contiguous(table),
        _tile_counter(q.device, common.stream) if family == "sm90" else None,
    )
    probs = tiled.signed_probabilities(problem, lse, rng_state) if return_probs else None
    return out, lse, probs


class Launch(NamedTuple):
    """A forward of dense q, k and v that has no other tensors, to be run with any of its key."""

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    kernel: tuple[Any, ...]  # the arguments of _C.forward before q, k and v
    options: tuple[Any, ...]  # and those between them and the stream

    @classmethod
    def of(cls, problem: Attention, family: str) -> "Launch | None":
        """Return what ``forward`` does for the problem; None if it is another kind of call."""
        if problem.dropout_p > 0 or _is_empty(problem):
            return None
        common = _common_arguments(problem, None, family, "forward")
        return cls(problem.out_shape, problem.lse_shape, common[:3], common[6:-1])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and log-sum-exp."""
        out = q.new_empty(*self.out_shape)
        lse = q.new_empty(*self.lse_shape, dtype=torch.float32)
        stream = torch._C._cuda_getCurrentRawStream(q.get_device())
        counter = _tile_counter(q.device, stream) if self.kernel[0] == "sm90" else None
        results = (out, lse, None, None, None, counter)
        _C.forward(*(*self.kernel, q, k, v, *self.options, stream, *results))
        return out, lse


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
    *,
    family: str,
) -> Tensor:
    """Write dq, dk and dv; return delta. As tiled.backward; q, k and v are read in place."""
    if _is_empty(problem):
        return tiled.backward(problem, dout, out, lse, dlse, dq, dk, dv, rng_state)
    q = problem.q
    common = _common_arguments(problem, rng_state, family, "backward")
    if problem.cu_seqlens_q is None:
        row_tiles = problem.batch * -(-q.shape[1] // 16)
    else:
        row_tiles = q.shape[0] // 16 + problem.batch
    dq_shape = (problem.nheads, row_tiles, 16 * common.kernel_headdim)
    dq_turn = None
    if problem.options.deterministic:
        dq_turn = q.new_zeros(dq_shape[:2], dtype=torch.int32)

    # The kernels want rows without gaps, which dq, dk, dv, dout and the caller's out may lack.
    written = [
        x if x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (dq, dk, dv)
    ]
    delta = q.new_empty(problem.lse_shape, dtype=torch.float32)
    # Kernels leave alone the rows of no sequence.
    if problem.cu_seqlens_q is not None:
        written[0].zero_()
        delta.zero_()
    if not (problem.cu_seqlens_k is problem.seqused_k is problem.leftpad_k is None):
        written[1].zero_()
        written[2].zero_()
    _C.backward(
        *common,
        dout=_with_whole_rows(dout),
        out=_with_whole_rows(out),
        lse=lse.contiguous(),
        dlse=_contiguous(dlse),
        delta=delta,
        dq=written[0],
        dk=written[1],
        dv=written[2],
        dq_accum=q.new_zeros(dq_shape, dtype=torch.float32),
        dq_turn=dq_turn,
    )
    for gradient, values in zip((dq, dk, dv), written, strict=True):
        if values is not gradient:
            gradient.copy_(values)
    return delta


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


def _common_arguments(
    problem: Attention, rng_state: Tensor | None, family: str, direction: str
) -> _Common:
    q, options = problem.q, problem.options
    kernel = _kernel(family, direction, q.dtype, problem.headdim, problem.headdim_v)
    assert kernel is not None, "unsupported() was not asked"
    # max_seqlen_q and max_seqlen_k decide how much is launched, and windows are 32 bits wide.
    max_seqlen_q, max_seqlen_k = problem.max_seqlen_q, problem.max_seqlen_k
    if problem.cu_seqlens_q is not None:
        max_seqlen_q = min(max_seqlen_q, q.shape[0])
        max_seqlen_k = min(max_seqlen_k, _rows(problem))
    return _Common(
        family,
        kernel.headdim,
        kernel.headdim_v,
        q,
        problem.k,
        problem.v,
        _contiguous(problem.cu_seqlens_q),
        _contiguous(problem.cu_seqlens_k),
        _contiguous(problem.seqused_k),
        _contiguous(problem.leftpad_k),
        max_seqlen_q,
        max_seqlen_k,
        problem.softmax_scale,
        min(options.window_left, max_seqlen_k),
        min(options.window_right, max_seqlen_q),
        options.softcap,
        _contiguous(problem.alibi_slopes),
        options.dropout_p,
        rng_state,
        _shared_memory,
        torch._C._cuda_getCurrentRawStream(q.get_device()),
    )


def _rows(problem: Attention) -> int:
    """How many keys a sequence can have at most: rows of a packed k, or of its pages."""
    k, table = problem.k, problem.block_table
    return k.shape[0] if table is None else table.shape[1] * k.shape[1]


def _lengths_in_pages(problem: Attention) -> Tensor:
    """seqused_k of pages whose sequences have the lengths of cu_seqlens_k as well.

    No more than max_seqlen_k of them are keys: those after leftpad_k.
    """
    assert problem.cu_seqlens_k is not None
    lengths, rows = problem.cu_seqlens_k.diff(), _rows(problem)
    if problem.seqused_k is not None:
        lengths = torch.minimum(lengths, problem.seqused_k)
    most = min(problem.max_seqlen_k, rows)
    if problem.leftpad_k is None:
        return lengths.clamp(max=most)
    return torch.minimum(lengths, problem.leftpad_k.clamp(0, rows) + most)


# (device, identity of a stream) -> the tile_counter of the sm90 kernels there
_tile_counters: dict[tuple[int, int], Tensor] = {}
_DEFAULT_STREAM = -1  # which needs no asking


def _tile_counter(device: torch.device, stream: int) -> Tensor:
    """(1,) int32, zero whenever no kernel runs on the stream: a kernel leaves it as it was.

    Kernels of one stream share it since they follow each other. (Its handle does not tell: it may
    be reused while a kernel of a destroyed stream still runs, or mean each thread's own stream.) A
    CUDA graph gets its own, which it sets to zero itself: it may be replayed on any stream.
    """
    identity = _DEFAULT_STREAM
    if stream != 0:  # the default stream is never captured
        if _is_capturing(device.index):
            return torch.zeros(1, dtype=torch.int32, device=device)
        identity = _C.stream_id(stream)
    counter = _tile_counters.get((device.index, identity))
    if counter is None:
        counter = _tile_counters.setdefault((device.index, identity), _lasting_zero(device))
    return counter


def _is_capturing(device_index: int) -> bool:
    """Whether the current stream of the device is captured into a CUDA graph."""
    if torch._C._cuda_getDevice() == device_index:
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(device_index):
        return torch._C._cuda_isCurrentStreamCapturing()


def _lasting_zero(device: torch.device) -> Tensor:
    """(1,) int32, zero for what comes next on the current stream.

    Another thread allocates it, for torch.compile may direct this one to the memory pool of a CUDA
    graph (mode="reduce-overhead"), where it tolerates nothing that outlives the call.
    """
    with ThreadPoolExecutor(1) as executor:
        zeros = partial(torch.zeros, 1, dtype=torch.int32, device=device)
        zero = executor.submit(zeros).result()
    torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return zero


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _with_whole_rows(x: Tensor) -> Tensor:
    """x, copied only if its last dimension is not contiguous: the gradient of a sum, for one."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _feature_set(problem: Attention) -> str:
    """Which kernels the extension will choose."""
    extra = problem.softcap > 0 or problem.drops or problem.alibi_slopes is not None
    return "full" if extra or not _are_aligned(problem) else "plain"


def _are_aligned(problem: Attention) -> bool:
    """Whether q, k and v can be moved 16 bytes at a time."""
    return (
        (problem.headdim | problem.headdim_v) % 8 == 0
        and _is_aligned(problem.q)
        and _is_aligned(problem.k)
        and _is_aligned(problem.v)
    )


def _is_aligned(x: Tensor) -> bool:
    """Whether every row of x, of 3 or 4 dimensions, begins at a multiple of 16 bytes."""
    stride = x.stride()
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # which has no address of its own
        return True
    return (x.data_ptr() >> 1 | stride[0] | stride[-3] | stride[-2]) % 8 == 0
