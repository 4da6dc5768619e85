"""Random problems, and calls of the library that return everything the oracle has an opinion on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import Attention, Storage, assert_matches_oracle
from torch import Tensor

import flash_attn
from flash_attn._backends.philox import dropout_keep_mask
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward

NAN = float("nan")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DROPOUT_SEED = 7


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
    around = x.new_full([size + 2 * margin for size in x.shape[:-1]] + [x.shape[-1]], NAN)
    inside = around[tuple(slice(margin, margin + size) for size in x.shape[:-1])]
    inside.copy_(x)
    return inside


def assert_guard_intact(x: Tensor) -> None:
    """Fail if anything around a view from `guarded` was written."""
    around = x._base.clone()
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
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> Attention:
    """A random dense problem."""
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


def beyond_int32(far: str, device: str) -> Attention:
    """q, k and v whose last batch row, sequence row or head is over 2^31 elements from the first.

    Skips the test where the 5 GiB for each of the three are not free.
    """
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    sizes = {"batch": 2, "rows": 70, "heads": 2}
    strides = {"batch": 2 * 70 * 64, "rows": 2 * 64, "heads": 64}
    strides[far] = -(-(2**31 + 64) // (sizes[far] - 1) // 64) * 64
    if far == "rows":  # heads and batches lie within the long way from row to row
        strides |= {"heads": 64, "batch": 2 * 64}

    def spread() -> Tensor:
        shape, stride = (*sizes.values(), 64), (*strides.values(), 1)
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        x = torch.empty(reach, dtype=torch.bfloat16, device=device).as_strided(shape, stride)
        return x.copy_(torch.randn(shape, device=device))

    return Attention(spread(), spread(), spread(), causal=True)


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
    "alibi-batch": lambda b, h, device: {"alibi_slopes": torch.rand(b, h, device=device)},
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


# --------------------------------------------------------------------------------------------------
# The library
# --------------------------------------------------------------------------------------------------


def options_of(problem: Attention) -> dict[str, Any]:
    names = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "dropout_p")
    return {name: getattr(problem, name) for name in names} | {"s_aux": problem.s_aux}


def max_seqlen(cu_seqlens: Tensor) -> int:
    return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0


def layout_of(problem: Attention) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k of a varlen problem."""
    bounds = problem.cu_seqlens_q, problem.storage.cu_seqlens
    return *bounds, *map(max_seqlen, bounds)


def call(problem: Attention, **more: Any) -> Any:
    """The public function for the problem's layout, on its q, k, v and options."""
    q, k, v, options = problem.q, problem.k, problem.v, options_of(problem) | more
    if problem.cu_seqlens_q is None:
        return flash_attn.flash_attn_func(q, k, v, **options)
    layout = layout_of(problem)
    table = problem.storage.block_table
    return flash_attn.flash_attn_varlen_func(q, k, v, *layout, block_table=table, **options)


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of the call, and its results. (What a first call sets up is not captured.)"""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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


def check(problem: Attention, backward: bool = True) -> None:
    """Run forward and backward through the public function and compare with the oracle."""
    problem = with_dropout_mask(problem)
    results, upstream = run(problem, backward)
    assert results["out"].dtype == problem.q.dtype
    assert_matches_oracle(results, problem, **upstream)
