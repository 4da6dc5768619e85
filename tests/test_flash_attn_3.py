"""interfaces/: FlashAttention-3's functions on this library, and transformers running on them."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, device_fixture
from helpers import (
    dense,
    int32,
    is_installed,
    layout_of,
    randn,
    random_pages,
    since_torch,
    varlen,
)
from oracle import Attention, Decode, Storage, assert_matches_oracle
from torch import Tensor

import flash_attn

device = device_fixture("cpu-tiled", "cuda-default")

MODULES = (
    "flash_attn_interface",
    "flash_attn_3",
    "flash_attn_3._packed",
    "flash_attn_3.flash_attn_interface",
)


@pytest.fixture(scope="module")
def fa3() -> Iterator[ModuleType]:
    """The module, which the rest of the suite must not see: clients switch when they find it."""
    assert all(name not in sys.modules for name in MODULES)
    sys.path.insert(0, str(ROOT / "interfaces"))
    try:
        yield importlib.import_module("flash_attn_interface")
    finally:
        sys.path.remove(str(ROOT / "interfaces"))
        for name in MODULES:
            sys.modules.pop(name, None)


# --------------------------------------------------------------------------------------------------
# The functions
# --------------------------------------------------------------------------------------------------

# As in hopper/flash_attn_interface.py of flash-attention's main branch.
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
WINDOW = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALES}, {WINDOW}, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {DESCALES}, {WINDOW}, "
    "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, {DESCALES}, "
    f"{WINDOW}, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    "return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    "page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, "
    f"rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, {WINDOW}, "
    "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
    "return_softmax_lse=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, "
    "headdim, cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
    "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, "
    "sm_margin=0",
    "_flash_attn_forward": "q, k, v, k_new=None, v_new=None, qv=None, out_=None, "
    "cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, "
    f"rotary_cos=None, rotary_sin=None, seqlens_rotary=None, {DESCALES}, softmax_scale=None, "
    "causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, "
    "rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, "
    "cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, "
    "window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(fa3, name):
    given = inspect.signature(getattr(fa3, name)).parameters.values()
    upstream = [p.replace(annotation=p.empty) for p in given if p.kind is not p.KEYWORD_ONLY]
    assert ", ".join(map(str, upstream)) == SIGNATURES[name]
    inside = importlib.import_module("flash_attn_3.flash_attn_interface")
    assert getattr(inside, name) is getattr(fa3, name)


def check(problem: Attention, function: Any, *args: Any, **options: Any) -> None:
    """Results and gradients of the function on the problem's q, k and v."""
    leaves = {"q": problem.q, "k": problem.k, "v": problem.v}
    if problem.s_aux is not None:
        leaves["s_aux"] = options["s_aux"] = problem.s_aux
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    inputs = [leaves.pop(name) for name in ("q", "k", "v")]
    out, lse = function(*inputs, *args, return_attn_probs=True, **options | leaves)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    used = {"q": inputs[0], "k": inputs[1], "v": inputs[2]} | leaves
    grads = torch.autograd.grad((out, lse), list(used.values()), (dout, dlse))
    results = {f"d{name}": grad for name, grad in zip(used, grads, strict=True)}
    assert_matches_oracle(results | {"out": out, "lse": lse}, problem, dout, dlse)
    with torch.no_grad():
        alone = function(*inputs, *args, **options | leaves)
    assert isinstance(alone, Tensor) and torch.equal(alone, out)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"window_size": (7, 3)},
    "softcap": {"softcap": 2.0, "causal": True},
    "sinks": {"s_aux": True, "causal": True, "window_size": (9, 9)},
}


def of_options(name: str, nheads: int, device: str) -> dict[str, Any]:
    sinks = {"s_aux": torch.randn(nheads, device=device)} if "s_aux" in OPTIONS[name] else {}
    return OPTIONS[name] | sinks


@pytest.mark.parametrize("options", OPTIONS)
def test_dense(fa3, device, options):
    given = of_options(options, 4, device)
    problem = dense(2, 21, 33, 4, 2, 32, 64, dtype=torch.bfloat16, device=device, **given)
    speed_only = {"num_splits": 1, "pack_gqa": True, "sm_margin": 8, "deterministic": True}
    check(problem, fa3.flash_attn_func, **given, **speed_only)


@pytest.mark.parametrize("options", OPTIONS)
def test_varlen(fa3, device, options):
    given = of_options(options, 4, device)
    problem = varlen(
        [9, 0, 30], [12, 5, 30], 4, 2, 32, dtype=torch.bfloat16, device=device, slack=0, **given
    )
    check(problem, fa3.flash_attn_varlen_func, *layout_of(problem), **given)


def test_varlen_in_part(fa3, device):
    """seqused_k: what lies behind it in a sequence is not read."""
    problem = varlen([9, 30], [12, 40], 4, 2, 32, dtype=torch.bfloat16, device=device, slack=0)
    used = int32([7, 33], device)
    problem.k[7:12] = problem.v[7:12] = float("nan")
    problem = replace(problem, storage=replace(problem.storage, seqused=used), causal=True)
    check(
        problem,
        lambda *args, **more: fa3.flash_attn_varlen_func(*args, seqused_k=used, **more),
        *layout_of(problem),
        causal=True,
    )


def padded(x: Tensor, dim: int = 0) -> Tensor:
    """Two sequences of 7 and 30 rows with 2 and 3 rows of NaN behind them."""
    parts = x.split([7, 30], dim)
    filled = [
        F.pad(y, (0, 0) * (x.dim() - 1 - dim) + (0, n), value=torch.nan)
        for y, n in zip(parts, (2, 3), strict=True)
    ]
    return torch.cat(filled, dim)


def in_use(x: Tensor, dim: int = 0) -> Tensor:
    return torch.cat((x.narrow(dim, 0, 7), x.narrow(dim, 9, 30)), dim)


def unused(x: Tensor, dim: int = 0) -> Tensor:
    return torch.cat((x.narrow(dim, 7, 2), x.narrow(dim, 39, 3)), dim)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 0)}], ids=str)
def test_queries_in_part(fa3, device, options):
    """seqused_q: what lies behind it in a sequence is not read, and gets zeros."""
    problem = varlen(
        [7, 30], [12, 40], 4, 2, 32, dtype=torch.bfloat16, device=device, slack=0, **options
    )
    _, bounds_k, _, longest_k = layout_of(problem)
    used = int32([7, 30], device)

    def call(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        lengths = int32([0, 9, 42], device), bounds_k, 33, longest_k
        result = fa3.flash_attn_varlen_func(padded(q), k, v, *lengths, seqused_q=used, **more)
        out, lse = result if isinstance(result, tuple) else (result, None)
        assert (unused(out) == 0).all()
        if lse is None:
            return in_use(out)
        assert (unused(lse, 1) == -torch.inf).all()
        return in_use(out), in_use(lse, 1)

    check(problem, call, **options)


def test_private_backward_of_queries_in_part(fa3, device):
    problem = varlen(
        [7, 30], [12, 40], 4, 2, 32, dtype=torch.bfloat16, device=device, slack=0, causal=True
    )
    _, bounds_k, _, longest_k = layout_of(problem)
    layout = {"cu_seqlens_q": int32([0, 9, 42], device), "cu_seqlens_k": bounds_k}
    layout |= {"max_seqlen_q": 33, "max_seqlen_k": longest_k}
    options = {"softmax_scale": problem.scale} | layout
    used, q = int32([7, 30], device), padded(problem.q)
    given = torch.full_like(q, torch.nan)
    out, lse, *_ = fa3._flash_attn_forward(
        q, problem.k, problem.v, **options, seqused_q=used, causal=True, out_=given
    )
    assert out is given
    dout = torch.randn_like(problem.q)
    grads = {
        f"d{name}": torch.full_like(x, torch.nan)
        for name, x in (("q", q), ("k", problem.k), ("v", problem.v))
    }
    softmax_d = fa3._flash_attn_backward(
        padded(dout),
        q,
        problem.k,
        problem.v,
        out,
        lse,
        **options,
        **grads,
        sequed_q=used,
        is_causal=True,
    )
    assert (unused(grads["dq"]) == 0).all()
    results = grads | {"dq": in_use(grads["dq"]), "out": in_use(out), "lse": in_use(lse, 1)}
    assert_matches_oracle(results, problem, dout, torch.zeros_like(results["lse"]))
    delta = (dout.double() * results["out"].double()).sum(-1).mT
    torch.testing.assert_close(in_use(softmax_d, 1).double(), delta, rtol=1e-2, atol=1e-2)


def test_lengths_of_queries_in_part(fa3):
    """Lengths below 0 are 0; too long ones, and tensors of other rows, are refused."""
    q, bounds = torch.randn(5, 2, 8), int32([0, 5])
    call = fa3.flash_attn_varlen_func
    assert (call(q, q, q, bounds, bounds, 5, 5, seqused_q=int32([-1])) == 0).all()
    with pytest.raises(ValueError, match="seqused_q .* 5 for sequence 0, got 6"):
        call(q, q, q, bounds, bounds, 5, 5, seqused_q=int32([6]))
    with pytest.raises(ValueError, match=r"seqused_q must have shape \(batch,\) = \(1,\)"):
        call(q, q, q, bounds, bounds, 5, 5, seqused_q=int32([1, 2]))
    with pytest.raises(ValueError, match="q must have 3 dimensions"):
        call(q[None], q, q, bounds, bounds, 5, 5, seqused_q=int32([5]))
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 5}
    lengths |= {"max_seqlen_k": 5, "sequed_q": int32([3])}
    lse = torch.randn(2, 5)
    with pytest.raises(ValueError, match="dout"):
        fa3._flash_attn_backward(q[:4], q, q, q, q, lse, **lengths)
    with pytest.raises(ValueError, match="dq must have shape"):
        fa3._flash_attn_backward(q, q, q, q, q, lse, **lengths, dq=q[:4].clone())


CHUNKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 3), "softcap": 2.0},
}


@pytest.mark.parametrize("chunk", [1, 8, 24, 2**40])
@pytest.mark.parametrize("options", CHUNKS)
def test_chunks(fa3, device, options, chunk):
    """attention_chunk of dense and packed sequences, with queries before the first key too."""
    given = CHUNKS[options]
    of_all = {"dtype": torch.bfloat16, "device": device, "chunk": chunk}
    for seqlens in ((40, 40), (13, 43), (43, 13)):
        problem = dense(2, *seqlens, 4, 2, 32, 64, **of_all, **given)
        check(problem, fa3.flash_attn_func, attention_chunk=chunk, **given)
    problem = varlen([9, 0, 30, 40], [12, 5, 30, 21], 4, 2, 32, slack=0, **of_all, **given)
    layout = layout_of(problem)
    check(problem, fa3.flash_attn_varlen_func, *layout, attention_chunk=chunk, **given)
    bounds, _, longest, _ = layout
    k, v = (x[: len(problem.q)] for x in randn(2, 80, 2, 32, dtype=torch.bfloat16, device=device))
    problem = replace(problem, k=k, v=v, storage=Storage(cu_seqlens=bounds))
    given = {"attention_chunk": chunk, **given}
    check(problem, fa3.flash_attn_varlen_func, bounds, bounds, longest, longest, **given)


def test_chunks_of_keys_in_part(fa3, device):
    problem = varlen(
        [9, 30], [12, 40], 4, 2, 32, dtype=torch.bfloat16, device=device, slack=0, chunk=8
    )
    used = int32([7, 33], device)
    problem.k[7:12] = problem.v[7:12] = NAN
    problem = replace(problem, storage=replace(problem.storage, seqused=used), causal=True)
    given = {"seqused_k": used, "attention_chunk": 8, "causal": True}
    call = functools.partial(fa3.flash_attn_varlen_func, **given)
    check(problem, lambda *args, **more: call(*args, **more), *layout_of(problem))


@pytest.mark.parametrize("keys", ["rows", "some rows", "pages"])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("leftpad", [False, True])
def test_chunks_of_a_cache(fa3, device, keys, rotary, seqlen_q, leftpad):
    """With an append, sequences of one key and a sequence that is not there."""
    chunk, capacity, page_size, new = 8, 40, 10, 3
    lengths = int32([0, 21, 12, -1], device)
    problem = dense(4, seqlen_q, capacity, 4, 2, dtype=torch.bfloat16, device=device, chunk=chunk)
    table = random_pages(4, capacity // page_size, device) if keys == "pages" else None
    rows = int32([5, 1, 0, 3], device) if keys == "some rows" else None
    if keys != "rows":
        shape = (6, capacity) if table is None else (table.numel() + 2, page_size)
        problem.k, problem.v = randn(2, *shape, 2, 32, dtype=torch.bfloat16, device=device)
    first = int32([0, 3, 1, 0], device) if leftpad else None
    storage = Storage(block_table=table, cache_batch_idx=rows, leftpad=first)
    case = Decode(replace(problem, storage=storage, causal=True), lengths)
    case.k_new, case.v_new = randn(2, 4, new, 2, 32, dtype=torch.bfloat16, device=device)
    if rotary:
        angles = torch.rand(capacity + 5, 16, device=device)
        case.rotary_cos, case.rotary_sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    expected = copy.deepcopy(case)
    given = torch.empty_like(problem.q)
    out, lse, *_ = fa3._flash_attn_forward(
        problem.q,
        problem.k,
        problem.v,
        case.k_new,
        case.v_new,
        seqused_k=lengths,
        page_table=table,
        kv_batch_idx=rows,
        leftpad_k=first,
        rotary_cos=case.rotary_cos,
        rotary_sin=case.rotary_sin,
        seqlens_rotary=lengths,
        causal=True,
        attention_chunk=chunk,
        out_=given,
    )
    assert out is given
    assert_matches_oracle({"out": out, "lse": lse}, expected)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("leftpad", [False, True])
def test_chunks_of_a_cache_with_packed_queries(fa3, device, paged, leftpad):
    used, capacity, page_size = int32([9, 24, 5], device), 24, 8
    problem = varlen([4, 10, 7], [1, 1, 1], 4, 2, 32, dtype=torch.bfloat16, device=device, slack=0)
    table = random_pages(3, capacity // page_size, device) if paged else None
    shape = (table.numel() + 2, page_size) if paged else (3, capacity)
    k, v = randn(2, *shape, 2, 32, dtype=torch.bfloat16, device=device)
    first = int32([2, 0, 1], device) if leftpad else None
    storage = Storage(seqused=used, leftpad=first, block_table=table)
    problem = replace(problem, k=k, v=v, causal=True, chunk=5, storage=storage)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        problem.q,
        k,
        v,
        cache_seqlens=used,
        cache_leftpad=first,
        page_table=table,
        cu_seqlens_q=problem.cu_seqlens_q,
        max_seqlen_q=10,
        causal=True,
        attention_chunk=5,
        return_softmax_lse=True,
    )
    assert_matches_oracle({"out": out, "lse": lse}, problem)


@since_torch(2, 11, "the compiler takes named tuples like Options")
def test_chunks_compiled(fa3):
    q, cache = torch.randn(2, 6, 2, 8), torch.randn(2, 20, 2, 8)
    lengths = int32([13, 20])

    def step(q: Tensor) -> Tensor:
        out = fa3.flash_attn_func(q, q, q, attention_chunk=4)
        return out + fa3.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, attention_chunk=4
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), step(q))


def test_chunks_in_fp8(fa3, device):
    """Each chunk of a sequence has the descales of the sequence."""
    q, k, v = (torch.randn(2, 20, n, 64, device=device).to(torch.float8_e4m3fn) for n in (4, 2, 2))
    descales = torch.rand(3, 2, 2, device=device) + 0.5
    scaled = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    out = fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=10, **scaled)
    for rows in (slice(0, 10), slice(10, 20)):
        expected = fa3.flash_attn_func(q[:, rows], k[:, rows], v[:, rows], causal=True, **scaled)
        torch.testing.assert_close(out[:, rows], expected, atol=0.02, rtol=0.02)


def test_fp8(fa3, device):
    """q, k and v in e4m3, with descales: what flash_attn gives, of each kind of call."""
    q, k, v = (torch.randn(2, 20, n, 64, device=device).to(torch.float8_e4m3fn) for n in (4, 2, 2))
    descales = torch.rand(3, 2, 2, device=device) + 0.5
    scaled = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    expected = flash_attn.flash_attn_func(q, k, v, causal=True, **scaled)
    assert not torch.equal(expected, flash_attn.flash_attn_func(q, k, v, causal=True))
    bounds = int32([0, 20, 40], device)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    varlen = fa3.flash_attn_varlen_func(*packed, bounds, bounds, 20, 20, causal=True, **scaled)
    cached = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=20, causal=True, **scaled)
    for out in (fa3.flash_attn_func(q, k, v, causal=True, **scaled), varlen.view(q.shape), cached):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("nheads_kv", [4, 2])
def test_qkvpacked(fa3, device, nheads_kv):
    problem = dense(2, 19, 19, 4, nheads_kv, dtype=torch.bfloat16, device=device, causal=True)

    def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if nheads_kv == 4:
            return fa3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True, **options)
        qkv = torch.cat((q, k, v), 2)
        return fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4, **options)

    check(problem, packed)


@pytest.mark.parametrize("older", [False, True], ids=["main", "2.8.3"])
@pytest.mark.parametrize("varlen_layout", [False, True])
def test_private_backward(fa3, device, varlen_layout, older):
    """By the names of upstream's main branch, and of its last release."""
    if varlen_layout:
        problem = varlen([9, 30], [12, 40], 4, 2, 32, dtype=torch.bfloat16, device=device, slack=0)
        bounds_q, bounds_k, longest_q, longest_k = layout_of(problem)
        layout = {"cu_seqlens_q": bounds_q, "cu_seqlens_k": bounds_k}
        layout |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    else:
        problem = dense(2, 21, 33, 4, 2, dtype=torch.bfloat16, device=device)
        layout = {}
    problem = replace(problem, causal=True, window_size=(11, 0))
    inputs = problem.q, problem.k, problem.v
    window = {"window_size_left": 11, "window_size_right": 0}
    window = {"window_size": (11, 0)} if older else window
    window["softmax_scale"] = problem.scale
    to = {"out" if older else "out_": torch.empty_like(problem.q)}
    out, lse, *empty = fa3._flash_attn_forward(*inputs, **layout, **window, **to, causal=True)
    assert [out.data_ptr()] == [x.data_ptr() for x in to.values()]
    assert [x.numel() for x in empty] == [0, 0]
    dout = torch.randn_like(out)
    grads = {f"d{name}": torch.empty_like(getattr(problem, name)) for name in "qkv"}
    causal = {"causal" if older else "is_causal": True}
    result = fa3._flash_attn_backward(
        dout, *inputs, out, lse, **layout, **grads, **window, **causal
    )
    *returned, softmax_d = result if older else (*grads.values(), result)
    assert all(map(operator.is_, returned, grads.values()))
    results = grads | {"out": out, "lse": lse}
    assert_matches_oracle(results, problem, dout, torch.zeros_like(lse))
    delta = (dout.double() * out.double()).sum(-1).movedim(-1, -2)
    torch.testing.assert_close(softmax_d.double(), delta, rtol=1e-2, atol=1e-2)


def test_private_backward_allocates(fa3):
    """What is not given, and of lengths of keys too."""
    q, k = torch.randn(14, 2, 8), torch.randn(20, 2, 8)
    lengths = int32([0, 6, 14], "cpu"), int32([0, 12, 20], "cpu"), 8, 12
    used = int32([5, 8], "cpu")
    leaves = [x.clone().requires_grad_() for x in (q, k, k)]
    out, lse, *_ = fa3.flash_attn_varlen_func(
        *leaves, *lengths, seqused_k=used, return_attn_probs=True
    )
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    layout = dict(zip(names, lengths, strict=True))
    out, lse = out.detach(), lse.detach()
    *found, softmax_d = fa3._flash_attn_backward(
        dout, q, k, k, out, lse, **layout, sequed_k=used, window_size=(-1, -1)
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert softmax_d.shape == lse.shape
    alone = fa3._flash_attn_backward(dout, q, k, k, out, lse, **layout, sequed_k=used)
    assert torch.equal(alone, softmax_d)
    with pytest.raises(NotImplementedError, match="sequed_k"):
        dense_q = torch.randn(1, 4, 2, 8)
        fa3._flash_attn_backward(*[dense_q] * 5, lse[None], sequed_k=used)
    with pytest.raises(ValueError, match="is_causal and causal"):
        fa3._flash_attn_backward(*[dense_q] * 5, lse[None], is_causal=True, causal=False)


def test_lengths_of_rotary(fa3):
    """Where nothing is rotated they say nothing; where they are the cache's, nothing new."""
    q, cache = torch.randn(2, 1, 2, 16), torch.randn(2, 9, 2, 16)
    used = int32([4, 9], "cpu")
    expected = fa3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used)
    call = functools.partial(fa3.flash_attn_with_kvcache, q, cache, cache)
    found = call(cache_seqlens=used, rotary_seqlens=int32([1, 2], "cpu"))
    assert torch.equal(found, expected)
    tables = dict(zip(("rotary_cos", "rotary_sin"), torch.randn(2, 12, 8), strict=True))
    new = {"k": q.clone(), "v": q.clone(), "cache_seqlens": int32([4, 8], "cpu")}
    expected = call(**new, **tables)
    found = call(**new, **tables, rotary_seqlens=new["cache_seqlens"])
    assert torch.equal(found, expected)
    with pytest.raises(NotImplementedError, match="rotary_seqlens"):
        call(**new, **tables, rotary_seqlens=used)


def test_private_names_given_twice(fa3):
    q = torch.randn(1, 4, 2, 8)
    for both in ({"out": q, "out_": q}, {"window_size": (1, 0), "window_size_left": 2}):
        with pytest.raises(ValueError, match="out_|window_size_left"):
            fa3._flash_attn_forward(q, q, q, **both)
    window = {"window_size": (1, 0), "window_size_left": 1, "window_size_right": 0}
    found, expected = (
        fa3._flash_attn_forward(q, q, q, **given)[0] for given in (window, {"window_size": (1, 0)})
    )
    assert torch.equal(found, expected)


NAN = float("nan")


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_kvcache(fa3, device, paged, append):
    """Rotation, append, attention with sinks; results are (out, lse, empty, empty)."""
    lengths, page_size, capacity = int32([3, 17, 20], device), 8, 24
    problem = dense(
        3, 2, capacity, 4, 2, dtype=torch.bfloat16, device=device, s_aux=randn(4, device=device)
    )
    table = random_pages(3, capacity // page_size, device) if paged else None
    if paged:
        problem.k, problem.v = randn(
            2, table.numel() + 2, page_size, 2, 32, dtype=torch.bfloat16, device=device
        )
    problem = replace(
        problem,
        causal=True,
        window_size=(12, 0),
        storage=Storage(block_table=table),
    )
    case = Decode(problem, lengths)
    if append:
        case.k_new, case.v_new = randn(2, 3, 2, 2, 32, dtype=torch.bfloat16, device=device)
        angles = torch.rand(capacity, 16, device=device)
        case.rotary_cos, case.rotary_sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        case.rotary_interleaved = False
    expected = copy.deepcopy(case)
    metadata = fa3.get_scheduler_metadata(3, 2, capacity, 4, 2, 32, lengths)
    assert metadata.dtype == torch.int32
    options = {"causal": True, "window_size": (12, 0), "s_aux": problem.s_aux}
    options |= {"page_table": table, "scheduler_metadata": metadata, "return_softmax_lse": True}
    out, lse, *empty = fa3.flash_attn_with_kvcache(
        problem.q,
        problem.k,
        problem.v,
        case.k_new,
        case.v_new,
        None,
        case.rotary_cos,
        case.rotary_sin,
        lengths,
        rotary_interleaved=False,
        **options,
    )
    assert [x.numel() for x in empty] == [0, 0]
    assert_matches_oracle({"out": out, "lse": lse}, expected)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("leftpad", [False, True])
def test_kvcache_with_packed_queries(fa3, device, paged, leftpad):
    """Prompts of different lengths against a cache that has their keys already."""
    used, capacity, page_size = int32([9, 24, 5], device), 24, 8
    problem = varlen([4, 10, 5], [1, 1, 1], 4, 2, 32, dtype=torch.bfloat16, device=device, slack=0)
    table = random_pages(3, capacity // page_size, device) if paged else None
    rows = (table.numel() + 2, page_size) if paged else (3, capacity)
    k, v = randn(2, *rows, 2, 32, dtype=torch.bfloat16, device=device)
    first = int32([2, 0, 1], device) if leftpad else None
    storage = Storage(seqused=used, leftpad=first, block_table=table)
    problem = replace(problem, k=k, v=v, causal=True, storage=storage)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        problem.q,
        k,
        v,
        cache_seqlens=used,
        cache_leftpad=first,
        page_table=table,
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k_new=problem.cu_seqlens_q
        if paged
        else None,  # as servers pass it, without keys
        max_seqlen_q=10,
        causal=True,
        return_softmax_lse=True,
    )
    assert_matches_oracle({"out": out, "lse": lse}, problem)


@pytest.mark.parametrize("paged", [False, True])
def test_lengths_with_packed_queries(fa3, device, paged):
    """As with dense queries: a length of -1 is a sequence that is not there."""
    q = randn(4, 2, 32, dtype=torch.bfloat16, device=device)
    table = random_pages(2, 3, device) if paged else None
    rows = (table.numel() + 2, 8) if paged else (2, 24)
    k, v = randn(2, *rows, 2, 32, dtype=torch.bfloat16, device=device)
    options = {"page_table": table, "causal": True}

    def attend(lengths: Any, **packed: Any) -> torch.Tensor:
        queries = q if packed else q.unflatten(0, (2, 2))
        out = fa3.flash_attn_with_kvcache(queries, k, v, cache_seqlens=lengths, **options | packed)
        return out if packed else out.flatten(0, 1)

    packed = {"cu_seqlens_q": int32([0, 2, 4], device), "max_seqlen_q": 2}
    rows_in_use = (7, int32(7, device), int32([-1, 7], device), int32([24, -1], device), None)
    for lengths in rows_in_use:
        found, expected = attend(lengths, **packed), attend(lengths)
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-7)
    for lengths in (7.9, True, torch.tensor([7, 7], device=device)):
        with pytest.raises(TypeError, match="cache_seqlens must"):
            attend(lengths, **packed)
    with pytest.raises(ValueError, match="k_cache must have room"):
        attend(40, **packed)


def test_kvcache_whole(fa3, device):
    """Without cache_seqlens every row of the cache is a key; an int is the length of each."""
    problem = dense(2, 3, 10, 4, 2, dtype=torch.bfloat16, device=device)
    inputs = problem.q, problem.k, problem.v
    assert_matches_oracle({"out": fa3.flash_attn_with_kvcache(*inputs)}, problem)
    problem = replace(problem, storage=Storage(seqused=int32([6, 6], device)))
    assert_matches_oracle({"out": fa3.flash_attn_with_kvcache(*inputs, cache_seqlens=6)}, problem)


def test_combine(fa3, device):
    """Attention over parts of the keys, one of them empty, merges to attention over all."""
    problem = dense(2, 7, 30, 4, 4, dtype=torch.float64, device=device)
    parts = []
    for keys in (slice(0, 11), slice(11, 30)):
        out, lse = fa3.flash_attn_func(
            problem.q, problem.k[:, keys], problem.v[:, keys], return_attn_probs=True
        )
        parts.append((out, lse.mT))
    nothing = torch.full_like(parts[0][0], NAN), torch.full_like(parts[0][1], -torch.inf)
    outs, lses = (torch.stack(x) for x in zip(*parts, nothing, strict=True))
    out, lse = fa3.flash_attn_combine(outs, lses)
    assert lse.shape == (2, 7, 4)
    assert_matches_oracle({"out": out, "lse": lse.mT}, problem)
    written = torch.empty_like(out, dtype=torch.float32)
    half, _ = fa3.flash_attn_combine(outs, lses, written, torch.bfloat16)
    assert half is written and torch.equal(written, out.bfloat16().float())
    alone, lse = fa3.flash_attn_combine(outs[2:], lses[2:])
    assert (alone == 0).all() and (lse == -torch.inf).all()


def ragged(fa3: ModuleType, x: Tensor, cache: Any = None, **given: Any) -> Any:
    """A call with a cache whose queries are packed."""
    arguments = {"cu_seqlens_q": int32([0, 4]), "max_seqlen_q": 4, "cache_seqlens": 3} | given
    cache = x if cache is None else cache
    return fa3.flash_attn_with_kvcache(x[0], cache, cache, **arguments)


def metadata(fa3: ModuleType, cache_seqlens: Any) -> Tensor:
    return fa3.get_scheduler_metadata(1, 1, 8, 2, 2, 8, cache_seqlens)


@since_torch(2, 11, "the compiler takes named tuples like Options")
def test_kvcache_with_packed_queries_compiled(fa3):
    x = torch.randn(1, 4, 2, 8)
    lengths, bounds = int32([3]), int32([0, 4])

    def step(q: Tensor) -> Tensor:
        return ragged(fa3, q, cache_seqlens=lengths, cu_seqlens_q=bounds)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), step(x))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (NotImplementedError, "qv", lambda m, x: m.flash_attn_func(x, x, x, qv=x)),
        (
            ValueError,
            "attention_chunk",
            lambda m, x: m.flash_attn_func(x, x, x, attention_chunk=-1),
        ),
        (
            TypeError,
            "attention_chunk",
            lambda m, x: m.flash_attn_func(x, x, x, attention_chunk=4.0),
        ),
        (
            NotImplementedError,
            "attention_chunk must be 0 where",
            lambda m, x: m.flash_attn_with_kvcache(
                x, *[x.to(torch.float8_e4m3fn)] * 2, cache_seqlens=3, attention_chunk=4
            ),
        ),
        (ValueError, "q_descale", lambda m, x: m.flash_attn_func(x, x, x, q_descale=x)),
        (ValueError, "k_descale", lambda m, x: m.flash_attn_func(x, x, x, k_descale=x)),
        (
            NotImplementedError,
            "seqused_q",
            lambda m, x: m._flash_attn_forward(x, x, x, seqused_q=int32([3])),
        ),
        (
            NotImplementedError,
            "k_new",
            lambda m, x: m.flash_attn_with_kvcache(
                x[0], x, x, x, x, cu_seqlens_q=int32([0, 4]), max_seqlen_q=4, cache_seqlens=0
            ),
        ),
        (
            NotImplementedError,
            "rotary_seqlens",
            lambda m, x: m.flash_attn_with_kvcache(
                x, x, x, rotary_cos=x[0, :, 0], rotary_sin=x[0, :, 0], rotary_seqlens=int32([3])
            ),
        ),
        (
            NotImplementedError,
            "sequed_k",
            lambda m, x: m._flash_attn_backward(x, x, x, x, x, x, sequed_k=int32([3])),
        ),
        (
            NotImplementedError,
            "sequed_q",
            lambda m, x: m._flash_attn_backward(x, x, x, x, x, x, sequed_q=int32([3])),
        ),
        (ValueError, "qkv", lambda m, x: m.flash_attn_qkvpacked_func(x)),
        (ValueError, "qkv", lambda m, x: m.flash_attn_qkvpacked_func(x[:, :, [0, 0, 1]])),
        (TypeError, "qkv", lambda m, x: m.flash_attn_qkvpacked_func(None)),
        (ValueError, "qkv", lambda m, x: m.flash_attn_qkvpacked_func(x, num_heads_q=4)),
        (TypeError, "num_heads_q", lambda m, x: m.flash_attn_qkvpacked_func(x, num_heads_q="2")),
        (ValueError, "window_size", lambda m, x: m.flash_attn_func(x, x, x, window_size=None)),
        (
            ValueError,
            "window_size",
            lambda m, x: m.flash_attn_with_kvcache(x, x, x, window_size=(1, 2, 3)),
        ),
        (TypeError, "num_splits", lambda m, x: m.flash_attn_func(x, x, x, num_splits="1")),
        (TypeError, "k must", lambda m, x: m.flash_attn_with_kvcache(x, None, x)),
        (ValueError, "k must", lambda m, x: m.flash_attn_with_kvcache(x, x[0], x)),
        (
            ValueError,
            "k must be given with v",
            lambda m, x: m._flash_attn_forward(x, x, x, v_new=x),
        ),
        (
            ValueError,
            "cu_seqlens_q must be given",
            lambda m, x: m._flash_attn_forward(x, x, x, cu_seqlens_k=int32([0, 4])),
        ),
        (NotImplementedError, "rotary_sin", lambda m, x: ragged(m, x, rotary_sin=x)),
        (TypeError, "cu_seqlens_q", lambda m, x: ragged(m, x, cu_seqlens_q=[0, 4])),
        (ValueError, "page_table", lambda m, x: ragged(m, x, page_table=[0])),
        (ValueError, "k_cache", lambda m, x: ragged(m, x, cache=torch.cat([x, x]))),
        (NotImplementedError, "k_cache", lambda m, x: ragged(m, x, x.to(torch.float8_e4m3fn))),
        (TypeError, "k_cache", lambda m, x: ragged(m, x, [x])),
        (TypeError, "cache_seqlens", lambda m, x: metadata(m, None)),
        (TypeError, "lse_partial", lambda m, x: m.flash_attn_combine(x[None], [1.0])),
        (TypeError, "lse_partial", lambda m, x: m.flash_attn_combine(x[None], x[..., 0].half())),
        (ValueError, "out_partial", lambda m, x: m.flash_attn_combine(x, x[..., 0])),
        (
            ValueError,
            "lse_partial",
            lambda m, x: m.flash_attn_combine(x[None], x[None, :, :1, :, 0]),
        ),
        (
            ValueError,
            "out is",
            lambda m, x: m.flash_attn_combine(
                x[None], x[None, ..., 0], torch.zeros(1, 1, 1, 1).expand_as(x)
            ),
        ),
        (
            TypeError,
            "out_dtype",
            lambda m, x: m.flash_attn_combine(x[None], x[None, ..., 0], out_dtype="half"),
        ),
        (TypeError, "float8", lambda m, x: m.flash_attn_func(*[x.to(torch.float8_e5m2)] * 3)),
    ],
)
def test_errors(fa3, error, message, call):
    with pytest.raises(error, match=message):
        call(fa3, torch.randn(1, 4, 2, 8))


# --------------------------------------------------------------------------------------------------
# transformers
# --------------------------------------------------------------------------------------------------

VOCABULARY = 96


@pytest.fixture(scope="module")
def transformers(fa3: ModuleType) -> Iterator[ModuleType]:
    """The module, with two of its rules lifted.

    It refuses to run flash attention without a GPU, and it sends GPT-OSS to a kernel of its hub.
    """
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    if not is_installed():
        # transformers looks for it once, when it is imported; test_transformers.py provides it.
        pytest.skip("flash-attn is not installed")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from transformers import modeling_flash_attention_utils, modeling_utils
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssPreTrainedModel

    with pytest.MonkeyPatch.context() as patch:
        matrix = getattr(modeling_flash_attention_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
        if matrix:
            patch.setitem(matrix[3], "general_availability_check", lambda: True)
        else:  # before transformers 5
            for module in (modeling_flash_attention_utils, modeling_utils):
                patch.setattr(module, "is_flash_attn_3_available", lambda: True)
        patch.setattr(
            GptOssPreTrainedModel, "_compatible_flash_implementations", None, raising=False
        )
        yield transformers


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "gpt-oss": (  # attention sinks, every other layer with a window
        "GptOssConfig",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}


@pytest.fixture(params=CONFIGURATIONS)
def models(request: pytest.FixtureRequest, transformers: ModuleType) -> tuple[Any, Any]:
    """One small random model twice, in float32: eager, and on the functions above."""
    name, options = CONFIGURATIONS[request.param]
    config = getattr(transformers, name)(**SIZES, **options)

    def model(attention: str) -> Any:
        return transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32
        ).eval()

    eager, flash = model("eager"), model("flash_attention_3")
    eager.load_state_dict(flash.state_dict())
    assert flash.config._attn_implementation == "flash_attention_3"
    return eager, flash


def prompts(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (3, 21))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :13] = mask[2, :4] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def assert_equal(flash: Tensor, eager: Tensor) -> None:
    torch.testing.assert_close(flash, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_transformers(models, padded):
    """Logits, and the gradient of every parameter, sinks included, are eager attention's."""
    batch = prompts(padded)
    seen = batch["attention_mask"].bool()
    # No loss where padding would predict the first token: what padding attends to is not defined.
    labels = batch["input_ids"].masked_fill(~(seen & seen.roll(1, 1)), -100)
    logits = []
    for model in models:
        result = model(**batch, labels=labels)
        result.loss.backward()
        logits.append(result.logits[seen])
    assert_equal(logits[1], logits[0])
    eager, flash = (dict(model.named_parameters()) for model in models)
    for name, parameter in eager.items():
        assert_equal(flash[name].grad, parameter.grad)
        assert "sinks" not in name or flash[name].grad.abs().max() > 1e-5


@torch.no_grad()
def test_transformers_packed(models):
    """Two texts in one row, told apart by their positions, as two rows."""
    eager, flash = models
    texts = torch.randint(1, VOCABULARY, (2, 11))
    positions = torch.arange(11).repeat(2)[None]
    packed = flash(texts.view(1, -1), position_ids=positions).logits
    assert_equal(packed.view(2, 11, -1), eager(texts).logits)


@torch.no_grad()
def test_transformers_generate(models):
    """Each step's logits are those of eager attention over the finished text."""
    eager, flash = models
    batch = prompts(padded=True)
    generated = flash.generate(
        **batch,
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    text, mask = generated.sequences, batch["attention_mask"]
    mask = torch.cat([mask, mask.new_ones(3, 12)], 1)
    assert_equal(
        torch.stack(generated.logits, 1), eager(text, attention_mask=mask).logits[:, 20:-1]
    )
