"""Random problems, and calls of the library that return everything the oracle has an opinion on."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import Attention, Storage, assert_matches_oracle
from torch import Tensor

import flash_attn
from flash_attn._backends import cuda
from flash_attn._backends.philox import dropout_keep_mask
from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

NAN = float("nan")
TORCH = tuple(int(x) for x in torch.__version__.split(".")[:2])


def is_installed() -> bool:
    """Whether there is metadata of flash-attn, as transformers looks for.

    The package `flash_attn` may be another distribution's too.
    """
    try:
        importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def since_torch(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """What tests skip on an older torch: something of PyTorch's that they need."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"{why} since torch {major}.{minor}")


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DROPOUT_SEED = 7


# With num_splits of APART - n, a forward of sm90 divides keys into n parts that are no clusters:
# kApart of csrc/sm90/forward_plan.h.
APART = -64


def kernels_forced() -> str | None:
    """The backend under test, if it has kernels."""
    forced = cuda.forced_backend()
    return None if forced == "tiled" else forced


def takes(backend: str | None, feature: str) -> bool:
    """Whether the backend, if it has kernels, has a forward or backward with this feature."""
    of_all_lengths = ("forward", "backward")
    rows = (x for x in cuda._KERNELS if x.backend == backend and x.operation in of_all_lengths)
    return backend is None or any(feature in x.takes for x in rows)


def covered(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Those of the dtypes that the backend under test takes."""
    return [dtype for dtype in dtypes if dtype.itemsize == 2 or not kernels_forced()]


def covered_pages(*sizes: int | None) -> list[int | None]:
    """Those of the page sizes, None for keys that are not paged."""
    return [size for size in sizes if size is None or takes(kernels_forced(), "pages")]


def covered_dims(*dims: int) -> list[int]:
    """Those of the head dims that the backend under test takes."""
    anything = takes(kernels_forced(), "any_alignment")
    return [dim for dim in dims if dim % 8 == 0 or anything]


def default_dtype() -> torch.dtype:
    """The most exact dtype of the backend under test, of float32 and bfloat16."""
    return covered([torch.float32, torch.bfloat16])[0]


def dtype_name(value: Any) -> str | None:
    """Test ids: a dtype's name (pytest makes its own of anything else)."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


# --------------------------------------------------------------------------------------------------
# Tensors
# --------------------------------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def int32(values: Sequence, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def cu_seqlens(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return int32([0, *itertools.accumulate(lengths)], device)


def guarded(x: Tensor, margin: int = 3) -> Tensor:
    """A copy of x as a strided view inside a larger tensor of NaN."""
    if x.dtype == torch.float8_e4m3fn and TORCH < (2, 5):
        pytest.skip("tensors of float8 can be filled since torch 2.5")
    around = x.new_full([size + 2 * margin for size in x.shape[:-1]] + [x.shape[-1]], NAN)
    inside = around[tuple(slice(margin, margin + size) for size in x.shape[:-1])]
    inside.copy_(x)
    return inside


def misaligned(x: Tensor) -> Tensor:
    """`guarded`, with odd strides and an odd first element: nothing to move 16 bytes at a time."""
    around = guarded(torch.nn.functional.pad(x, (1, 2 + x.shape[-1] % 2), value=NAN))
    return around[..., 1 : 1 + x.shape[-1]]


def contiguous_but_shifted(x: Tensor) -> Tensor:
    """A copy of x, contiguous, whose first element is the second of its storage."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def assert_guard_intact(x: Tensor) -> None:
    """Fail if anything around a view from `guarded` was written."""
    around = x._base.clone().float()  # PyTorch does little with FP8
    around.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(NAN)
    assert around.isnan().all(), "written outside of the tensor"


# --------------------------------------------------------------------------------------------------
# Problems
# --------------------------------------------------------------------------------------------------


def dense(
    batch: int = 2,
    seqlen_q: int = 33,
    seqlen_k: int = 33,
    nheads: int = 2,
    nheads_kv: int = 2,
    headdim: int = 32,
    headdim_v: int | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    **options: Any,
) -> Attention:
    """A random dense problem."""
    dtype = dtype or default_dtype()
    q = randn(batch, seqlen_q, nheads, headdim, dtype=dtype, device=device)
    k = randn(batch, seqlen_k, nheads_kv, headdim, dtype=dtype, device=device)
    v = randn(batch, seqlen_k, nheads_kv, headdim_v or headdim, dtype=dtype, device=device)
    return Attention(q, k, v, **options)


def varlen(
    seqlens_q: Sequence[int], seqlens_k: Sequence[int], *sizes: int, slack: int = 5, **options: Any
) -> Attention:
    """A random varlen problem, with NaN in `slack` rows of q, k and v after the last sequence.

    sizes and options are those of `dense` after the sequence lengths.
    """
    total_q, total_k = sum(seqlens_q), sum(seqlens_k)
    problem = dense(1, total_q + slack, total_k + slack, *sizes, **options)
    q, k, v = problem.q[0], problem.k[0], problem.v[0]
    q[total_q:], k[total_k:], v[total_k:] = NAN, NAN, NAN
    cu_seqlens_q = cu_seqlens(seqlens_q, q.device)
    storage = Storage(cu_seqlens=cu_seqlens(seqlens_k, q.device))
    return replace(problem, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, storage=storage)


# A problem of each layout, two sequences long.
LAYOUTS: dict[str, Callable[..., Attention]] = {
    "dense": dense,
    "varlen": lambda **options: varlen([20, 130], [140, 13], **options),
}


def skip_without_memory(gibibytes: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


def beyond_int32(far: str, x: Tensor) -> Tensor:
    """A copy of x whose last batch row, sequence row or head is 2^31 elements from the first.

    It takes 4 to 5 GiB.
    """
    sizes = dict(zip(("batch", "rows", "heads"), x.shape, strict=False))
    dim = x.shape[-1]
    strides = dict(zip(sizes, x.contiguous().stride(), strict=False))
    strides[far] = -(-(2**31 + dim) // (sizes[far] - 1) // dim) * dim
    if far == "rows":  # heads and batches lie within the long way from row to row
        strides |= {"heads": dim, "batch": sizes["heads"] * dim}
    stride = (*strides.values(), 1)
    reach = 1 + sum((size - 1) * step for size, step in zip(x.shape, stride, strict=True))
    return x.new_empty(reach).as_strided(x.shape, stride).copy_(x)


def random_pages(batch: int, pages_of_sequence: int, device: str = "cpu") -> Tensor:
    """A block table of pages in random order, out of two more than it names."""
    pages = torch.randperm(batch * pages_of_sequence + 2)[: batch * pages_of_sequence]
    return pages.view(batch, pages_of_sequence).to(device, torch.int32)


def poisoned_outside_keys(problem: Attention) -> Attention:
    """The problem with NaN in the rows of k and v that are the key of no sequence."""
    unused = torch.ones(problem.k.shape[:-2], dtype=torch.bool, device=problem.k.device)
    for _, _, keys in problem.sequences():
        unused[keys] = False
    k, v = (x.masked_fill(unused[..., None, None], NAN) for x in (problem.k, problem.v))
    return replace(problem, k=k, v=v)


def in_pages(problem: Attention, page_size: int) -> Attention:
    """The varlen problem with its keys in pages, of which what is not in use is NaN."""
    lengths = problem.storage.cu_seqlens.diff().tolist()
    table = random_pages(len(lengths), -(-max(lengths) // page_size), problem.k.device)
    k, v = (
        randn(table.numel() + 2, page_size, *x.shape[1:], dtype=x.dtype, device=x.device)
        for x in (problem.k, problem.v)
    )
    storage = replace(problem.storage, block_table=table)
    return poisoned_outside_keys(replace(problem, k=k, v=v, storage=storage))


# Every option alone, and combinations. Each takes (batch, nheads, device).
OPTIONS: dict[str, Callable[[int, int, str], dict[str, Any]]] = {
    "plain": lambda b, h, device: {},
    "causal": lambda b, h, device: {"causal": True},
    "scale": lambda b, h, device: {"softmax_scale": 0.3},
    "scale-0": lambda b, h, device: {"softmax_scale": 0.0},
    "window": lambda b, h, device: {"window_size": (9, 4)},
    "window-left": lambda b, h, device: {"window_size": (9, -1)},
    "window-right": lambda b, h, device: {"window_size": (-1, 4)},
    "window-0": lambda b, h, device: {"window_size": (0, 0)},
    "window-causal": lambda b, h, device: {"window_size": (9, 4), "causal": True},
    "softcap": lambda b, h, device: {"softcap": 1.5},
    "alibi": lambda b, h, device: {"alibi_slopes": torch.rand(h, device=device)},
    "alibi-batch": lambda b, h, device: {"alibi_slopes": torch.rand(b, h, device=device) - 0.3},
    "dropout": lambda b, h, device: {"dropout_p": 0.2},
    "sinks": lambda b, h, device: {"s_aux": torch.randn(h, device=device)},
    "everything": lambda b, h, device: {
        "softmax_scale": 0.4,
        "causal": True,
        "window_size": (17, -1),
        "softcap": 2.0,
        "alibi_slopes": torch.rand(b, h, device=device),
        "dropout_p": 0.3,
        "s_aux": torch.randn(h, device=device),
    },
}


NO_DROPOUT = [name for name in OPTIONS if name != "dropout"]


def without_dropout(name: str, batch: int, nheads: int, device: str) -> dict[str, Any]:
    """Those of OPTIONS that FP8 and the decode kernels have too."""
    return OPTIONS[name](batch, nheads, device) | {"dropout_p": 0.0}


# --------------------------------------------------------------------------------------------------
# The library
# --------------------------------------------------------------------------------------------------


def splits(count: int) -> AbstractContextManager[None]:
    """Divide keys into so many parts; 0: as the kernel chooses."""
    return cuda.changed_setting("num_splits", count)


def assert_counters_are_zero() -> None:
    torch.cuda.synchronize()
    assert not any(map(torch.any, cuda._kept_zeros.values()))


def options_of(problem: Attention) -> dict[str, Any]:
    names = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "dropout_p")
    return {name: getattr(problem, name) for name in names} | {"s_aux": problem.s_aux}


def max_seqlen(cu_seqlens: Tensor) -> int:
    return max(0, int(cu_seqlens.long().diff().max())) if len(cu_seqlens) > 1 else 0


def layout_of(problem: Attention) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k of a varlen problem."""
    bounds = problem.cu_seqlens_q, problem.storage.cu_seqlens
    return *bounds, *map(max_seqlen, bounds)


def call(problem: Attention, layout: tuple[Any, ...] | None = None, **more: Any) -> Any:
    """The public function for the problem's layout, on its q, k, v and options.

    ``layout`` is layout_of(problem), which cannot be read while a CUDA graph is captured.
    """
    q, k, v, options = problem.q, problem.k, problem.v, options_of(problem) | more
    if problem.cu_seqlens_q is None:
        return flash_attn.flash_attn_func(q, k, v, **options)
    layout = layout or layout_of(problem)
    table = problem.storage.block_table
    return flash_attn.flash_attn_varlen_func(q, k, v, *layout, block_table=table, **options)


def captured(
    function: Callable[[], Any], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of the call, and its results. (What a first call sets up is not captured.)"""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = function()
    return graph, results


def private_forward(problem: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, S_dmask and rng_state from the private forward for the problem's layout."""
    scale, (left, right) = problem.scale, problem.window_size
    q, k, v = problem.q, problem.k, problem.v
    options = (problem.dropout_p, scale, problem.causal, left, right, problem.softcap)
    options += (problem.alibi_slopes, problem.dropout_p > 0)
    if problem.cu_seqlens_q is None:
        return _flash_attn_forward(q, k, v, *options)
    storage = problem.storage
    return _flash_attn_varlen_forward(
        q,
        k,
        v,
        *layout_of(problem),
        *options,
        block_table=storage.block_table,
        leftpad_k=storage.leftpad,
        seqused_k=storage.seqused,
    )


def with_dropout_mask(problem: Attention) -> Attention:
    """The problem with the mask that the library will draw after manual_seed(DROPOUT_SEED)."""
    if problem.dropout_p == 0:
        return problem
    torch.manual_seed(DROPOUT_SEED)
    rng_state = private_forward(problem)[3]
    nheads = problem.q.shape[-2]
    if problem.cu_seqlens_q is None:
        shape = problem.q.shape[0], nheads, problem.q.shape[1], problem.k.shape[1]
    else:
        _, _, max_seqlen_q, max_seqlen_k = layout_of(problem)
        shape = len(problem.cu_seqlens_q) - 1, nheads, max_seqlen_q, max_seqlen_k
    return replace(problem, keep=dropout_keep_mask(rng_state, problem.dropout_p, *shape))


def private_backward(
    problem: Attention,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    rng_state: Tensor | None = None,
    place: Callable[[Tensor], Tensor] = guarded,
    deterministic: bool = False,
) -> dict[str, Tensor]:
    """dq, dk, dv, written into what `place` makes of tensors of NaN, and delta."""
    grads = {
        f"d{name}": place(torch.full_like(x, NAN, memory_format=torch.contiguous_format))
        for name, x in (("q", problem.q), ("k", problem.k), ("v", problem.v))
    }
    arguments = [dout, problem.q, problem.k, problem.v, out, lse, *grads.values()]
    options = [problem.dropout_p, problem.scale, problem.causal, *problem.window_size]
    options += [problem.softcap, problem.alibi_slopes, deterministic, rng_state]
    if problem.cu_seqlens_q is None:
        delta = _flash_attn_backward(*arguments, *options)
    else:
        lengths = {"seqused_k": problem.storage.seqused, "leftpad_k": problem.storage.leftpad}
        delta = _flash_attn_varlen_backward(*arguments, *layout_of(problem), *options, **lengths)
    if place in (guarded, misaligned):
        for grad in grads.values():
            assert_guard_intact(grad)
    return grads | {"delta": delta}


def poisoned_outside(x: Tensor, problem: Attention) -> Tensor:
    """x, shaped like q but for the last dimension, with NaN in the rows of no sequence."""
    inside = torch.zeros(x.shape[:-2], dtype=torch.bool, device=x.device)
    for _, rows, _ in problem.sequences():
        inside[rows] = True
    return x.masked_fill(~inside[..., None, None], NAN)


def run(problem: Attention, backward: bool = True, **more: Any) -> tuple[dict[str, Tensor], ...]:
    """out, lse and the gradients, from random dout and dlse; those follow, as keyword arguments."""
    leaves = {"q": problem.q, "k": problem.k, "v": problem.v}
    if problem.s_aux is not None:
        leaves["s_aux"] = problem.s_aux
    if backward:
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    torch.manual_seed(DROPOUT_SEED)
    out, lse, _ = call(replace(problem, **leaves), return_attn_probs=True, **more)
    results = {"out": out, "lse": lse}
    if not backward:
        return results, {}
    dout = poisoned_outside(torch.randn_like(out), problem)
    dlse = poisoned_outside(torch.randn_like(lse).movedim(-2, -1)[..., None], problem)
    dlse = dlse[..., 0].movedim(-1, -2)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    results |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return results, {"dout": dout, "dlse": dlse}


def check(problem: Attention, backward: bool = True, **more: Any) -> None:
    """Run forward and backward through the public function and compare with the oracle."""
    problem = with_dropout_mask(problem)
    results, upstream = run(problem, backward, **more)
    assert results["out"].dtype == problem.q.dtype
    assert_matches_oracle(results, problem, **upstream)


def check_bits(problem: Attention, times: int) -> None:
    """A forward that is right, and so many others with the same bits; counters are left zero."""
    first, _ = run(problem, backward=False)
    assert_matches_oracle(first, problem)
    for _ in range(times):
        again, _ = run(problem, backward=False)
        assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert_counters_are_zero()


def check_lengths_within(
    problem: Attention, seqused: Sequence[int], leftpad: Sequence[int], page_size: int | None
) -> None:
    """Compare a varlen problem with narrowed keys with the oracle; the others are NaN.

    The gradients too, which pages do not have.
    """
    device = problem.q.device
    narrowed = {"seqused": int32(seqused, device), "leftpad": int32(leftpad, device)}
    problem = replace(problem, storage=replace(problem.storage, **narrowed))
    problem = in_pages(problem, page_size) if page_size else poisoned_outside_keys(problem)
    out, lse, *_ = private_forward(problem)
    results, dout = {"out": out, "lse": lse}, None
    if not page_size:
        dout = poisoned_outside(torch.randn_like(out), problem)
        results |= private_backward(problem, dout, out, lse)
        del results["delta"]
    assert_matches_oracle(results, problem, dout)
