"""KV caches in FP8 (e4m3), with a descale for each sequence and head.

The oracle attends to the caches as the library leaves them; what is appended is checked apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import KERNELS, device_fixture
from helpers import (
    NAN,
    NO_DROPOUT,
    assert_guard_intact,
    captured,
    dtype_name,
    guarded,
    int32,
    kernels_forced,
    randn,
    splits,
    without_dropout,
)
from oracle import Attention, Decode, assert_close_to_oracle, expect, on_host
from test_kernels import BEYOND, HALF, of_each_kernel
from test_kvcache import call, decode
from test_repeated_calls import prepared
from torch import Tensor

import flash_attn
from flash_attn import _ops, flash_attn_with_kvcache
from flash_attn._backends import cuda
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

FP8 = torch.float8_e4m3fn
BF16 = {"dtype": torch.bfloat16}
MOST = torch.finfo(FP8).max

on_kernels = device_fixture(*KERNELS)


@dataclass
class Appended(Decode):
    """A call whose caches after the append are known: the oracle rotates the queries alone."""

    after: tuple[Tensor, Tensor] | None = None

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Attention:
        k, v = (x.detach().to(device, dtype) for x in self.after)
        return replace(super().to(dtype, device), k=k, v=v)


def quantise(x: Tensor, descale: Tensor | None) -> Tensor:
    """(..., heads, dim) / descale, (heads,), as PyTorch rounds."""
    x = x.float() if descale is None else x.float() / descale[:, None]
    return x.clamp(-MOST, MOST).to(FP8)


def fp8_cache(*args: Any, descales: bool = True, device: str = "cpu", **more: Any) -> Decode:
    """``decode``, its caches in FP8 and NaN where not in use; the descales have odd strides."""
    more = {**BF16, **more}
    case = decode(*args, device=device, **more)
    problem = case.attention
    if descales:
        shape = problem.k.shape[2], len(case.cache_seqlens)
        k_descale, v_descale = (torch.rand(shape, device=device).T / 2 + 0.05 for _ in "kv")
        problem = replace(problem, k_descale=k_descale, v_descale=v_descale)
    caches = {name: guarded(getattr(problem, name).to(FP8)) for name in "kv"}
    return replace(case, attention=replace(problem, **caches))


def check(case: Decode, **more: Any) -> None:
    """Compare out, lse and the caches with the oracle's; nothing else in the caches may change."""
    problem = case.attention
    before = {name: on_host(getattr(problem, name)).clone() for name in "kv"}
    out, lse = call(case, **more)
    known = Appended(**{**vars(case), "after": (problem.k, problem.v)})
    expected = expect(known)
    assert_close_to_oracle(out, expected["out"], "out")
    assert_close_to_oracle(lse, expected["lse"], "lse")

    exact = case.to(torch.float64)
    for name, new in (("k", case.k_new), ("v", case.v_new)):
        cache = on_host(getattr(problem, name))
        descale = on_host(getattr(problem, f"{name}_descale"))
        kept = torch.ones(cache.shape[:2], dtype=torch.bool)
        for b, places in enumerate(case.appended()):
            factor = None if descale is None else descale[b]
            for i, place in enumerate(places):
                kept[place] = False
                if name == "v" or case.rotary_cos is None:
                    given = quantise(on_host(new)[b, i], factor)
                    assert same(cache[place], given), f"{name}_cache: not the bits appended"
                else:  # the rotation rounds, and what is near a tie may go either way
                    scale = 1.0 if factor is None else factor[:, None].double()
                    value = (exact.k[place] / scale).clamp(-MOST, MOST)
                    error = (cache[place].double() - value).abs()
                    assert (error <= value.abs() * 0.067 + 2**-10).all(), f"{name}_cache: rotated"
        assert same(cache[kept], before[name][kept]), f"{name}_cache: changed elsewhere"
        assert_guard_intact(getattr(problem, name))


def same(x: Tensor, y: Tensor) -> bool:
    """Bit by bit, but any NaN is like another."""
    x, y = x.float(), y.float()
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


# ---- every backend -------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_descales_of_any_sign(device, softcap):
    """Zero gives all keys equal weight. NaN is NaN, in its own heads alone."""
    case = fp8_cache([20, 33, 7], 3, device=device, causal=True, softcap=softcap)
    k_descale = torch.tensor([[-0.3, 0.2], [0.0, -0.1], [0.4, NAN]], device=device)
    problem = replace(case.attention, k_descale=k_descale)
    out, _ = map(on_host, call(replace(case, attention=problem)))
    of_nan = torch.zeros(out.shape, dtype=torch.bool)
    of_nan[2, :, problem.group :] = True
    assert out[of_nan].isnan().all() and out[~of_nan].isfinite().all()
    problem = replace(problem, k_descale=k_descale.nan_to_num(1.0))
    known = Appended(**{**vars(case), "attention": problem, "after": (problem.k, problem.v)})
    expected = expect(known)["out"]
    error = (out.double() - expected.exact)[~of_nan].abs().max()
    assert error <= expected.tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("options", NO_DROPOUT)
@pytest.mark.parametrize("page_size", [None, 16])
def test_options(device, options, dtype, page_size):
    options = without_dropout(options, 3, 4, device) | {"page_size": page_size}
    check(fp8_cache([0, 7, 33], seqlen_q=5, seqlen_new=5, dtype=dtype, device=device, **options))


@pytest.mark.parametrize("descales", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_new", [(1, 0), (1, 1), (4, 4), (2, 7), (7, 2), (70, 3)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_append(device, seqlen_q, seqlen_new, causal, descales):
    options = {"causal": causal, "descales": descales, "device": device}
    check(fp8_cache([0, 1, -1, 13, 33], seqlen_q, seqlen_new, **options))


@pytest.mark.parametrize("rotary_dim", [16, 32])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("dtype", HALF, ids=dtype_name)
@pytest.mark.parametrize("page_size", [None, 3])
def test_rotary(device, rotary_dim, interleaved, dtype, page_size):
    rotary = {"rotary_dim": rotary_dim, "rotary_interleaved": interleaved}
    given = {"page_size": page_size, "dtype": dtype, "device": device, "causal": True}
    check(fp8_cache([0, 9, 36], 3, 4, **rotary, **given))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_pages(device, page_size):
    check(fp8_cache([0, 5, 77, 128], 3, 3, 131, page_size=page_size, device=device, causal=True))


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("seqlen_new", [0, 1, 3])
def test_padded_rows(device, page_size, seqlen_new):
    given = {"page_size": page_size, "causal": True, "device": device}
    check(fp8_cache([5, -1, 30, -1], 2, seqlen_new, **given))
    check(fp8_cache([-1, -1], 2, seqlen_new, **given))


@pytest.mark.parametrize("seqlen_new", [0, 2])
def test_slots_and_left_pads(device, seqlen_new):
    """A descale belongs to the row of the batch, not to the slot of the cache."""
    given = {"device": device, "causal": True}
    check(fp8_cache([4, 11, 0], 2, seqlen_new, cache_batch_idx=[5, 0, 2], **given))
    check(fp8_cache([4, 11, 9], 2, seqlen_new, leftpad=[0, 3, 9], **given))


def test_head_dim_of_v(device):
    check(fp8_cache([5, 33], 2, 2, headdim=16, headdim_v=48, device=device, causal=True))


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.7])
def test_append_rounds_to_nearest_and_saturates(device, scale):
    """Every number of bfloat16 but NaN."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    numbers = numbers.nan_to_num(1.0).view(1, 64, 4, 256).to(device)
    cache = torch.zeros(1, 64, 4, 256, device=device).to(FP8)
    descale = torch.full((1, 1), scale, device=device).expand(1, 4)
    q = torch.ones(1, 1, 4, 256, device=device, **BF16)
    v_cache = cache.clone()
    flash_attn_with_kvcache(q, cache, v_cache, numbers, numbers, cache_seqlens=0, k_descale=descale)
    assert same(on_host(cache), quantise(on_host(numbers), on_host(descale)[0]))
    assert same(on_host(v_cache), quantise(on_host(numbers), None))


def test_every_number_of_the_format(device):
    """One key with each: a softmax over equal scores gives their mean, one over them picks one."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # without NaN
    values = codes.view(FP8).float()
    cache = torch.zeros(1, len(codes), 1, 32, device=device)
    for d in range(32):  # each in every column, beside other ones
        cache[0, :, 0, d] = values.roll(7 * d).to(device)
    v = cache.to(FP8)
    for dtype in HALF:
        for index in (0, 1, 2, 9, 31, 130, 253):
            keys = torch.zeros(1, len(codes), 1, 32, device=device)
            keys[0, index] = 64.0
            q = torch.full((1, 1, 1, 32), 8.0, dtype=dtype, device=device)
            out = flash_attn_with_kvcache(q, keys.to(FP8), v)
            assert torch.equal(out[0, 0, 0].float(), v[0, index, 0].to(dtype).float())
    q = torch.zeros(1, 1, 1, 32, **BF16, device=device)
    k = cache.to(FP8)
    for d in range(32):
        unit = q.clone()
        unit[..., d] = 1.0
        for index in (1, 5, 60, 200):
            one = k[:, index : index + 1]
            _, lse = flash_attn_with_kvcache(
                unit, one, one, softmax_scale=1.0, return_softmax_lse=True
            )
            assert abs(lse.item() - one[0, 0, 0, d].item()) <= 1e-5 * abs(lse.item()) + 1e-6


# ---- errors --------------------------------------------------------------------------------------


def arguments(**changed: Any) -> dict[str, Any]:
    cache = torch.zeros(2, 8, 2, 32).to(FP8)
    given = {"q": randn(2, 1, 4, 32, **BF16), "k_cache": cache, "v_cache": cache.clone()}
    return given | changed


@pytest.mark.parametrize(
    "changed, error, words",
    [
        ({"v_cache": torch.zeros(2, 8, 2, 32, **BF16)}, TypeError, ["v_cache", "k_cache"]),
        ({"k_cache": torch.zeros(2, 8, 2, 32, **BF16)}, TypeError, ["v_cache", "bfloat16"]),
        ({"q": torch.zeros(2, 1, 4, 32, dtype=torch.float64)}, TypeError, ["q", "float64"]),
        ({"k": torch.zeros(2, 1, 2, 32).to(FP8)}, ValueError, ["v must be given"]),
        ({"k_descale": torch.ones(2, 4)}, ValueError, ["k_descale", "(2, 2)", "(2, 4)"]),
        ({"v_descale": torch.ones(2)}, ValueError, ["v_descale", "(2, 2)", "(2,)"]),
        ({"v_descale": torch.ones(2, 2, **BF16)}, TypeError, ["v_descale", "float32", "bfloat16"]),
        ({"k_descale": 2.0}, TypeError, ["k_descale", "float32", "float"]),
        ({"k_descale": torch.ones(2, 2, device="meta")}, ValueError, ["k_descale", "cpu", "meta"]),
    ],
    ids=str,
)
def test_errors(changed, error, words):
    with pytest.raises(error) as raised:
        flash_attn_with_kvcache(**arguments(**changed))
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_descale_is_for_fp8(name):
    cache = torch.zeros(2, 8, 2, 32, **BF16)
    words = f"{name} must be None unless {name[0]}_cache has .*float8_e4m3fn"
    with pytest.raises(ValueError, match=words):
        flash_attn_with_kvcache(
            **arguments(k_cache=cache, v_cache=cache, **{name: torch.ones(2, 2)})
        )


def test_new_keys_have_the_dtype_of_q():
    new = torch.zeros(2, 1, 2, 32).to(FP8)
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        flash_attn_with_kvcache(**arguments(k=new, v=new, cache_seqlens=1))


def test_dense_attention_takes_no_fp8():
    x = torch.zeros(2, 8, 2, 32)
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        flash_attn.flash_attn_func(x, x.to(FP8), x.to(FP8))


def test_compiled(device):
    case = fp8_cache([5, 33], 1, 1, device=device)
    expected, _ = call(case)
    step = torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)
    problem = case.attention
    options = {"k_descale": problem.k_descale, "v_descale": problem.v_descale}
    new = {"k": case.k_new, "v": case.v_new, "cache_seqlens": case.cache_seqlens}
    assert torch.equal(step(problem.q, problem.k, problem.v, **new, **options), expected)


# ---- kernels -------------------------------------------------------------------------------------


@pytest.mark.gpu
@of_each_kernel
@pytest.mark.parametrize("dtype", HALF, ids=dtype_name)
@pytest.mark.parametrize("features", ["plain", "everything"])
def test_each_kernel_for_the_sanitizer(on_kernels, features, dtype, headdims):
    """Each tile shape, whole and divided keys."""
    options = without_dropout(features, 3, 8, on_kernels) | {"dtype": dtype}
    sizes = {"nheads": 8, "nheads_kv": 2, "headdim": headdims[0], "headdim_v": headdims[1]}
    for seqlen_q, parts in ((1, 1), (3, 3), (5, 2)):
        with splits(parts):
            check(fp8_cache([0, 20, 300], seqlen_q, 0, 301, **sizes, **options, device=on_kernels))


@pytest.mark.gpu
@pytest.mark.parametrize("headdim", [16, 32, 48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("page_size", [None, 1, 16, 17, 64])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 1)], ids=str)
def test_lengths_on_kernels(on_kernels, page_size, window, headdim):
    sizes = {"nheads": 8, "nheads_kv": 2, "headdim": headdim, "page_size": page_size}
    lengths = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]
    for seqlen_q in (1, 4):
        given = {"window_size": window, "device": on_kernels}
        case = fp8_cache(lengths, seqlen_q, 0, 301, **sizes, **given)
        for parts in (1, 2, 5, 40):
            with splits(parts):
                check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 32])
@pytest.mark.parametrize("seqlen_q", [1, 7, 130])
def test_any_number_of_rows_on_kernels(on_kernels, headdim, group, seqlen_q):
    """Also those of a prefill, which a 16-bit cache has other kernels for."""
    sizes = {"nheads": 2 * group, "nheads_kv": 2, "headdim": headdim}
    check(fp8_cache([3, 200], seqlen_q, 0, 210, **sizes, causal=True, device=on_kernels))


@pytest.mark.gpu
def test_kernels_append_and_attend(on_kernels, monkeypatch):
    """No part of a call in FP8 runs in PyTorch operations."""
    seen = prepared(monkeypatch, _ops.flash_attn_with_kvcache)
    many = [("widen", "bf16", "e4m3"), ("forward", "bf16", "bf16")]
    for seqlen, attention in ((1, [("decode", "bf16", "e4m3")]), (200, many)):
        case = fp8_cache([5, 33], seqlen, 1, device=on_kernels)
        seen.clear()
        call(case)
        rows = [(x.operation, x.dtype, x.kv_dtype) for x, _ in seen]
        assert rows == [("append", "bf16", "e4m3"), *attention]
        assert {x.backend for x, _ in seen[1:]} == {kernels_forced()}
        call(case)
        assert len(seen) == len(rows)  # the launches are remembered


@pytest.mark.gpu
@pytest.mark.parametrize("options", NO_DROPOUT)
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("dtype", HALF, ids=dtype_name)
def test_many_queries_on_kernels(on_kernels, dtype, page_size, options):
    """The cache is copied to 16 bits, then a forward runs."""
    options = without_dropout(options, 3, 4, on_kernels) | {"page_size": page_size}
    check(fp8_cache([0, 7, 333], 140, 140, 500, dtype=dtype, device=on_kernels, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("window", [(-1, 0), (20, 0), (300, 30)], ids=str)
def test_many_queries_of_long_caches_on_kernels(on_kernels, window, page_size):
    """Of rows that no query sees nothing is copied; what is there may be NaN."""
    given = {"window_size": window, "page_size": page_size, "device": on_kernels}
    for seqlen_q, headdim, headdim_v in ((150, 128, 128), (150, 64, 256), (128, 128, 128)):
        sizes = {"headdim": headdim, "headdim_v": headdim_v}  # 128: as many rows as decode as well
        case = fp8_cache([0, 5, 2000], seqlen_q, 3, 2100, **sizes, **given)
        junk = torch.full((4, 2**24), NAN, **BF16, device=on_kernels)  # for what is allocated next
        del junk
        check(case)


@pytest.mark.gpu
def test_many_queries_with_slots_and_left_pads_on_kernels(on_kernels):
    given = {"device": on_kernels, "causal": True}
    check(fp8_cache([40, 110, 0], 130, 2, 250, cache_batch_idx=[5, 0, 2], **given))
    check(fp8_cache([40, 110, 90], 130, 2, 250, leftpad=[0, 30, 90], **given))
    check(fp8_cache([40, -1, 90], 130, 0, 250, **given))


@pytest.mark.gpu
def test_left_pads_of_packed_queries_on_kernels(on_kernels):
    """max_seqlen_k is of the keys behind the left pad. All rows in front of them are copied too."""
    q = randn(256, 2, 64, device=on_kernels).to(FP8)
    k, v = (randn(4, 128, 1, 64, device=on_kernels).to(FP8) for _ in "kv")
    bounds = int32([0, 256], on_kernels), int32([0, 300], on_kernels)
    cache = {"block_table": int32([[2, 0, 3, 1]], on_kernels)}
    cache |= {"leftpad_k": int32([200], on_kernels), "seqused_k": int32([300], on_kernels)}
    found, expected = (
        _flash_attn_varlen_forward(q, k, v, *bounds, 256, longest, 0.0, None, False, **cache)[0]
        for longest in (100, 512)
    )
    assert torch.equal(found, expected) and found.any()


@pytest.mark.gpu
def test_more_tiles_than_counters_on_kernels(on_kernels):
    """The keys of so many tiles are divided within a cluster at most."""
    q = randn(1, 2048, 32, 256, **BF16, device=on_kernels)
    cache = randn(1, 2**15, 8, 256, device=on_kernels).to(FP8)
    expected = flash_attn_with_kvcache(q, cache, cache)
    for parts in (0, 50):
        with cuda.changed_setting("decode", True), splits(parts):
            found = flash_attn_with_kvcache(q, cache, cache)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.gpu
def test_numbers_beyond_float16_on_kernels(on_kernels):
    """Many queries: they become its largest. NaN of a descale is NaN, in its own heads alone."""
    q = torch.ones(1, 200, 4, 64, dtype=torch.float16, device=on_kernels)
    cache = torch.full((1, 9, 2, 64), 448.0, device=on_kernels).to(FP8)
    v_descale = torch.tensor([[1e6, NAN]], device=on_kernels)
    out = flash_attn_with_kvcache(q, torch.zeros_like(cache), cache, v_descale=v_descale)
    assert (out[:, :, :2] == torch.finfo(torch.float16).max).all() and out[:, :, 2:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 100])
def test_graph_on_kernels(on_kernels, seqlen_q):
    """Replayed, with lengths and descales that change in between; also the remembered call."""
    case = fp8_cache([300, 5], seqlen_q, 0, 301, nheads=8, headdim=128, device=on_kernels)
    graph, results = captured(lambda: call(case))
    for lengths, factor in (([300, 5], 1.0), ([1, 0], 2.0), ([64, 4], 0.5)):
        case.cache_seqlens.copy_(int32(lengths, on_kernels))
        case.attention.k_descale.mul_(factor), case.attention.v_descale.mul_(factor)
        for x in results:
            x.fill_(NAN)
        graph.replay()
        for found, expected in zip(results, call(case), strict=True):
            assert torch.equal(found, expected)
        check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q, parts", [(3, 1), (3, 3), (150, 0)])
def test_pages_beyond_the_cache_on_kernels(on_kernels, seqlen_q, parts):
    given = {"causal": True, "page_size": 16, "device": on_kernels}
    case = fp8_cache([5, 33, 7], seqlen_q, 0, **given)
    table = int32([[BEYOND, 0, -1], [-BEYOND, 99, 8], [0, 1, 2]])
    case.attention.storage.block_table.copy_(table)
    with splits(parts):
        out, _ = call(case)
        assert out.isfinite().all()


@pytest.mark.gpu
def test_what_kernels_do_not_take(on_kernels):
    with pytest.raises(NotImplementedError, match="float32 beside a cache of .*float8_e4m3fn"):
        call(fp8_cache([5, 33], dtype=torch.float32, device=on_kernels))
    with pytest.raises(NotImplementedError, match="16 bytes"):
        call(fp8_cache([5, 33], headdim=24, device=on_kernels))
