"""Attention in FP8: inputs in e4m3, and inputs of 16 bits that are quantised inside.

What the library quantises is compared with attention in float64 to what a quantisation written out
here gives. Between the two stands the encoding of P alone: `assert_rounded` bounds it.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from conftest import device_fixture
from helpers import (
    LAYOUTS,
    NAN,
    NO_DROPOUT,
    call,
    cu_seqlens,
    dense,
    guarded,
    in_pages,
    int32,
    layout_of,
    options_of,
    private_backward,
    randn,
    since_torch,
    varlen,
    without_dropout,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Attention, on_host
from test_differential import LENGTH, SEED, heads, with_values
from test_differential import OPTIONS as CHOSEN
from test_kvcache import decode
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn
from benchmarks import fp8 as fp8_benchmark
from flash_attn import flash_attn_func
from flash_attn._backends import cuda, quantisation
from flash_attn.fp8 import flash_attn_fp8_func, flash_attn_fp8_varlen_func, quantize
from flash_attn.layers.rotary import apply_rotary_emb

FP8 = torch.float8_e4m3fn
BF16 = {"dtype": torch.bfloat16}
MOST = 448.0
LEVELS = ("fast", "balanced", "accurate")
HEADDIMS = (64, 96, 128, 192, 256)

device = device_fixture("cpu-tiled", "cuda-tiled", "cuda-default")


class Rounding(NamedTuple):
    """What encoding P changes."""

    relative: float  # at most, of P
    absolute: float  # or of the row's largest P
    rms: float  # root mean square, relative to a P spread evenly over [1, 2)
    lse: float  # most


# To nearest with 3 bits behind the point, of wide e4m3 inputs: 2^-4 of P, in root mean square at
# most 2^-4 / sqrt(3) at 1 and half of that at 2. Below 2^-6 steps are 2^-9, and the largest P is at
# least 2^3 there (2^8 on `tiled`; a kernel's reference may lag). The row's sum adds what is not
# rounded.
NEAREST = Rounding(2.0**-4, 2.0**-10 / 2**3, 0.028, 0.0)
# By the code of the exponent, where 2^x is taken for linear between powers of two; below 2^-6 it is
# up to one and a half steps off. The row's sum adds what is encoded.
LINEAR = Rounding(0.085, 1.5 * 2.0**-9 / 2**6, 0.034, 0.09)
# To nearest in the 16 bits of v: 2^-9 of P in bfloat16, less in float16.
OF_16_BITS = Rounding(2.0**-9, 2.0**-20, 2.0**-9 / 3**0.5, 0.0)


def rounding_of(problem: Attention, level: str) -> Rounding:
    wide = max(problem.q.shape[-1], problem.v.shape[-1]) > 128
    if level == "accurate":
        return OF_16_BITS
    return NEAREST if wide and level == "e4m3" else LINEAR


MANY = 500  # elements, of which a root mean square says something


def assert_rounded(
    out: Tensor,
    lse: Tensor,
    problem: Attention,
    level: str = "e4m3",
    unsure: Tensor | None = None,
) -> None:
    """out and lse are those of the problem in float64, but for P's encoding and sums.

    Tensor cores add products of e4m3 with about 14 bits.

    Each error is within the bound of that encoding; many together are as small as independent ones.
    What is quantised inside, by a level, may here and there lie a step off: it was near a tie.

    unsure : of the shape of lse, bool: rows that may lie a step off, see ``near_ties``
    """
    inside = level != "e4m3"
    encoding = rounding_of(problem, level)
    exact = problem.to(torch.float64)
    lse_is_short = lse.is_cuda and not inside
    out, lse, eps = on_host(out), on_host(lse).double(), torch.finfo(out.dtype).eps
    expected_lse = exact.forward()[1]
    specified = ~expected_lse.isnan()
    lse, expected_lse = lse[specified], expected_lse[specified]
    finite = expected_lse.isfinite()
    assert torch.equal(lse[~finite], expected_lse[~finite])
    gap = (lse - expected_lse)[finite].abs() / (1 + expected_lse[finite].abs())
    if len(gap):
        most, rms = (0.03, 3e-4) if inside else (2e-3, 3e-4) if lse_is_short else (1e-5, 1e-5)
        assert gap.max() <= most + encoding.lse, f"lse: {gap.max()}"
        rms += encoding.lse / 4  # of rows with few keys
        if unsure is not None:
            gap = gap[~on_host(unsure)[specified][finite]]
        assert inside and len(gap) < MANY or gap.square().mean().sqrt() <= rms
    errors, bounds, variances = [out.new_zeros(0)], [out.new_zeros(0)], [out.new_zeros(0)]
    for b, rows, keys in exact.sequences():
        if len(rows[0]) == 0 or len(keys[0]) == 0:
            assert (out[rows] == 0).all()
            continue
        k, v = exact.keys_and_values(b, keys)
        expected, _, p = exact.attend(b, exact.q[rows], k, v)
        v = v[:, exact.kv_head]
        largest = p.amax(-1, keepdim=True)
        step = encoding.relative * p + (encoding.absolute * largest).minimum(p)
        bound = torch.einsum("hij,jhd->ihd", step, v.abs())
        variance = torch.einsum("hij,jhd->ihd", (encoding.rms * p) ** 2, v**2)
        rounding = eps * expected.abs()
        if encoding.lse > 0:  # the sum, that out is divided by, has the same error
            bound = 1.1 * (bound + step.sum(-1).mT[..., None] * expected.abs())
            variance += ((encoding.rms * p) ** 2).sum(-1).mT[..., None] * expected**2
        errors.append((out[rows].double() - expected).abs().flatten())
        bounds.append((bound + rounding + 1e-6).flatten())
        variances.append((variance + rounding**2).flatten())
    error, bound, variance = map(torch.cat, (errors, bounds, variances))
    beyond = (error > bound).sum()
    assert beyond <= 0.01 * len(error) * inside, f"out: {beyond} beyond {(error - bound).max()}"
    if len(error) >= MANY:
        found, allowed = (x.mean().sqrt().item() for x in (error**2, variance))
        assert found <= 1.3 * allowed + 1e-4, f"out: rms {found:.3g}, allowed {allowed:.3g}"


# ---- inputs in e4m3 ------------------------------------------------------------------------------


def in_e4m3(problem: Attention, descales: bool = True) -> tuple[Attention, dict[str, Any]]:
    """The problem with q, k and v in e4m3, as the oracle reads it, and what the library takes."""
    batch = len(problem.queries())
    shape = problem.k.shape[-2], batch
    device = problem.q.device
    q, k, v = (guarded(x.to(FP8)) for x in (problem.q, problem.k, problem.v))
    given: dict[str, Any] = {"q": q, "k": k, "v": v}
    scales = dict.fromkeys("qkv")
    if descales:  # of odd strides and any sign; that of V may be anything
        for name in "qk":
            size, sign = torch.rand(2, *shape, device=device)
            scales[name] = ((size + 0.5) * torch.where(sign < 0.25, -1.0, 1.0)).T
        scales["v"] = torch.randn(shape, device=device).T
        given |= {f"{name}_descale": x for name, x in scales.items()}
    read = q.float()
    for b, rows, _ in problem.sequences() if descales else ():
        factor = scales["q"][b].repeat_interleave(problem.group)
        read[rows] = read[rows] * factor[:, None]
    known = {"k_descale": scales["k"], "v_descale": scales["v"]}
    return replace(problem, q=read, k=k.float(), v=v.float(), **known), given


def check_e4m3(problem: Attention, descales: bool = True) -> None:
    known, given = in_e4m3(problem, descales)
    case = replace(problem, **{name: given.pop(name) for name in "qkv"})
    out, lse, _ = call(case, return_attn_probs=True, **given)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert_rounded(out, lse, known)


@pytest.mark.parametrize("options", NO_DROPOUT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_options(device, layout, options):
    options = without_dropout(options, 2, 4, device)
    check_e4m3(LAYOUTS[layout](nheads=4, nheads_kv=2, device=device, **options))


@pytest.mark.parametrize("headdim, headdim_v", [(64, 64), (128, 128), (256, 256), (40, 24), (1, 3)])
def test_head_dims(device, headdim, headdim_v):
    check_e4m3(dense(2, 60, 150, headdim=headdim, headdim_v=headdim_v, causal=True, device=device))


@pytest.mark.parametrize("descales", [False, True])
@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (1, 300), (300, 1), (130, 257)], ids=str)
def test_lengths(device, seqlens, descales):
    sizes = {"nheads": 3, "nheads_kv": 1, "device": device, "causal": True}
    check_e4m3(dense(2, *seqlens, **sizes), descales)
    check_e4m3(varlen([seqlens[0], 0, 7], [seqlens[1], 4, 9], **sizes), descales)


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_pages(device, page_size):
    check_e4m3(in_pages(varlen([20, 130], [140, 13], causal=True, device=device), page_size))


@pytest.mark.parametrize("headdim", [64, 192])
def test_the_specification_encodes_p(headdim):
    """With unit vectors for V, out is P. In wide heads it is rounded, relative to 2^8 as the
    largest, and its sum is not; else its codes are its exponents, relative to 2^6."""
    scores = torch.cat([torch.zeros(1), -6 * torch.rand(63)]).to(FP8)
    q, k = torch.zeros(1, 1, 1, headdim), torch.zeros(1, 64, 1, headdim)
    q[..., 0], k[0, :, 0, 0] = 1.0, scores.float()
    given = (q.to(FP8), k.to(FP8), torch.eye(64)[None, :, None].to(FP8))
    with flash_attn.use_backend("tiled"):
        out = flash_attn_func(*given, softmax_scale=1.3)[0, 0, 0].float()
    p = torch.exp(1.3 * scores.double())
    if headdim > 128:
        encoded, total = (256 * p).to(FP8).double() / 256, p.sum()
    else:
        codes = 8 * (p.log2() + 6 + 7) - 0.46
        assert codes.min() >= 8  # normal numbers
        encoded = codes.round().to(torch.uint8).view(FP8).double() / 64
        total = encoded.sum()
    assert (encoded / p - 1).abs().max() > 0.04
    torch.testing.assert_close(out.double(), encoded / total, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlen_new", [0, 3])
def test_cache(device, page_size, seqlen_new):
    """With q in e4m3 too; new keys and values, in e4m3, are copied as they are."""
    case = decode([0, 5, 33], 3, seqlen_new, page_size=page_size, device=device, **BF16)
    known, given = in_e4m3(replace(case.attention, causal=True, s_aux=randn(4, device=device)))
    new = {}
    if seqlen_new:
        new = {name: x.to(FP8) for name, x in (("k", case.k_new), ("v", case.v_new))}
    storage = case.attention.storage
    out, lse = flash_attn.flash_attn_with_kvcache(
        given["q"],
        given["k"],
        given["v"],
        **new,
        cache_seqlens=case.cache_seqlens,
        block_table=storage.block_table,
        causal=True,
        s_aux=known.s_aux,
        return_softmax_lse=True,
        **{name: x for name, x in given.items() if "descale" in name},
    )
    for name, x in new.items():
        for b, places in enumerate(case.appended()):
            for i, place in enumerate(places):
                assert torch.equal(given[name][place].float(), x[b, i].float())
    storage = replace(storage, seqused=case.cache_seqlens + seqlen_new)
    caches = {name: given[name].float() for name in "kv"}
    assert_rounded(out, lse, replace(known, storage=storage, **caches))


@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_packed_functions(device, packed):
    qkv = randn(2, 30, 3, 2, 32, device=device).to(FP8)
    q, k, v = qkv.unbind(2)
    scales = {f"{name}_descale": torch.rand(2, 2, device=device) for name in "qkv"}
    expected = flash_attn_func(q, k, v, causal=True, **scales)
    given = (qkv,) if packed == "qkv" else (q, qkv[:, :, 1:])
    function = getattr(flash_attn, f"flash_attn_{packed}packed_func")
    assert torch.equal(function(*given, causal=True, **scales), expected)


def test_out_and_fake_tensors(device):
    q, k, v = (randn(2, 30, 2, 32, device=device).to(FP8) for _ in "qkv")
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    given = torch.full_like(out, NAN)
    assert flash_attn_func(q, k, v, out=given) is given and torch.equal(given, out)
    with pytest.raises(TypeError, match="out must have the dtype torch.bfloat16, got .*float8"):
        flash_attn_func(q, k, v, out=torch.empty_like(q))
    with FakeTensorMode() as mode:
        fakes = flash_attn_func(*map(mode.from_tensor, (q, k, v)), return_attn_probs=True)
    for x, fake in zip((out, lse), fakes, strict=False):
        assert (x.shape, x.dtype, x.stride()) == (fake.shape, fake.dtype, fake.stride())


def arguments(**changed: Any) -> dict[str, Any]:
    return {name: randn(2, 8, 2, 32).to(FP8) for name in "qkv"} | changed


@pytest.mark.parametrize(
    "changed, error, words",
    [
        ({"k": randn(2, 8, 2, 32)}, TypeError, ["k", "dtype of q", "float32"]),
        ({"q": randn(2, 8, 2, 32)}, TypeError, ["k", "dtype of q", "float8_e4m3fn"]),
        ({"q_descale": torch.ones(2)}, ValueError, ["q_descale", "(2, 2)", "(2,)"]),
        ({"v_descale": torch.ones(2, 2, **BF16)}, TypeError, ["v_descale", "float32", "bfloat16"]),
        ({"k_descale": 1.0}, TypeError, ["k_descale", "float32", "float"]),
        ({"dropout_p": 0.1}, NotImplementedError, ["dropout_p", "0.1"]),
    ],
    ids=str,
)
def test_errors(changed, error, words):
    with pytest.raises(error) as raised:
        flash_attn_func(**arguments(**changed))
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_descale_is_for_e4m3(name):
    x = randn(2, 8, 2, 32)
    with pytest.raises(ValueError, match=f"{name} must be None unless {name[0]} has .*float8"):
        flash_attn_func(x, x, x, **{name: torch.ones(2, 2)})


def test_rotary_of_e4m3_is_refused():
    q, k, v = arguments().values()
    cache = randn(2, 40, 2, 32).to(FP8)
    table = torch.zeros(40, 16).to(FP8)
    with pytest.raises(NotImplementedError, match="rotary_cos must be None where q has"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, k, v, table, table, 0)


@pytest.mark.parametrize("of", ["q", "s_aux", "softmax_scale"])
def test_e4m3_has_no_gradient(of):
    given = arguments(s_aux=torch.zeros(2), softmax_scale=torch.tensor(0.2))
    given[of].requires_grad_()
    with pytest.raises(NotImplementedError, match="no derivative.*flash_attn_fp8_func"):
        flash_attn_func(**given)
    with torch.no_grad():
        flash_attn_func(**given)


@pytest.mark.parametrize("backend", ["sm80"])  # of sm90: test_fp8_kernels.py
def test_kernels_refuse(backend):
    """No kernel says that it has this: a forced one raises, unforced `tiled` runs."""
    many = dict.fromkeys("qkv", randn(2, 40, 2, 32).to(FP8))  # queries: few are widened
    problem = flash_attn._arguments.dense(*many.values(), flash_attn._arguments.Options(None))
    quantises = problem._replace(
        **{name: randn(2, 8, 2, 32, **BF16) for name in "qkv"}, fp8_level=1
    )
    for asked in (problem, quantises):
        assert cuda.unsupported(asked, backend, "forward").startswith("has no ")
        assert flash_attn._backends.choose(asked) == "tiled"
    with flash_attn.use_backend(backend), pytest.raises(NotImplementedError, match="tiled"):
        flash_attn_func(**many)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sm80"])  # of sm90: test_fp8_kernels.py
def test_forced_kernels_refuse_on_a_gpu(backend):
    if backend not in flash_attn.available_backends("cuda"):
        pytest.skip(f"no {backend}")
    given = dict.fromkeys("qkv", randn(2, 40, 2, 32, device="cuda").to(FP8))
    halves = [x.bfloat16() for x in given.values()]
    with flash_attn.use_backend(backend):
        with pytest.raises(NotImplementedError, match="use_backend"):
            flash_attn_func(**given)
        with pytest.raises(NotImplementedError, match="use_backend"):
            flash_attn_fp8_func(*halves)


# ---- quantised inside ----------------------------------------------------------------------------


def fake_quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """To nearest multiples of scale, or numbers of e4m3 times it."""
    x = x / scale
    x = x.round().clamp(-127, 127) if dtype == torch.int8 else x.clamp(-MOST, MOST).to(FP8)
    return x.float() * scale


def encoding_of(level: str) -> tuple[torch.dtype, float]:
    """Of q and k, and its largest number."""
    return (FP8, MOST) if level == "fast" else (torch.int8, 127.0)


def rotated(x: Tensor) -> Tensor:
    headdim = next(size for size in HEADDIMS if size >= x.shape[-1])
    matrix = quantisation.rotation(headdim, x.device)
    return torch.nn.functional.pad(x.float(), (0, headdim - x.shape[-1])) @ matrix


def near_ties(problem: Attention, level: str) -> Tensor:
    """Of the shape of lse: rows of q with a number that float32 may round either way, near a tie.

    Of 960000 random rows, 8 to 256 columns, 343 became other numbers of int8 where the products
    with signs were added first and norm and scale were one factor. All of them are near a tie.
    """
    dtype, most = encoding_of(level)
    q = rotated(problem.q)
    largest = q.abs().amax(-1, keepdim=True)
    scale = (largest / most).masked_fill(largest == 0, 1.0)
    below, above = (fake_quantised(q + x * largest, scale, dtype) for x in (-(2.0**-20), 2.0**-20))
    return (below != above).any(-1).mT


def read_back(problem: Attention, level: str) -> Attention:
    """The problem with q, k and v as the level rounds them; q and k rotated, which changes nothing.

    Written out a sequence, a head and a block of keys at a time.
    """
    dtype, most = encoding_of(level)
    q, k = rotated(problem.q), rotated(problem.k)
    v = problem.v.float().clone()
    for _, rows, keys in problem.sequences():
        of_rows = q[rows]
        scale = of_rows.abs().amax(-1, keepdim=True) / most
        q[rows] = fake_quantised(of_rows, scale.masked_fill(scale == 0, 1.0), dtype)
        for first in range(0, len(keys[0]), 128):
            block = tuple(index[first : first + 128] for index in keys)
            for h in range(k.shape[-2]):
                place = (*block, h)
                part, value = k[place], v[place]
                k[place] = fake_quantised(part, part.abs().max() / most, dtype)
                if level == "accurate":
                    continue
                exponent = math.log2(value.abs().max().item() / MOST)
                power = 2.0 ** max(math.ceil(exponent / 12) * 12, -48)
                v[place] = fake_quantised(value, torch.tensor(power), FP8)
    return replace(problem, q=q, k=k, v=v, softmax_scale=problem.scale)


def call_fp8(problem: Attention, level: str, **more: Any) -> tuple[Tensor, Tensor]:
    options = {**options_of(problem), "return_softmax_lse": True, "level": level, **more}
    del options["dropout_p"]
    q, k, v = problem.q, problem.k, problem.v
    if problem.cu_seqlens_q is None:
        return flash_attn_fp8_func(q, k, v, **options)
    return flash_attn_fp8_varlen_func(q, k, v, *layout_of(problem), **options)


def check_level(problem: Attention, level: str) -> None:
    out, lse = call_fp8(problem, level)
    assert out.dtype == problem.q.dtype and lse.dtype == torch.float32
    assert_rounded(out, lse, read_back(problem, level), level, near_ties(problem, level))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [name for name in NO_DROPOUT if name != "everything"])
def test_levels_with_options(device, options, level):
    options = without_dropout(options, 2, 4, device)
    sizes = {"nheads": 4, "nheads_kv": 2, "headdim": 64, "device": device, **BF16}
    check_level(dense(2, 33, 150, **sizes, **options), level)
    check_level(varlen([20, 130], [140, 13], **sizes, **options), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("headdim", [*HEADDIMS, 8, 72, 100])
def test_levels_with_head_dims(device, headdim, level):
    sizes = {"headdim": headdim, "headdim_v": min(headdim, 80), "dtype": torch.float16}
    check_level(dense(1, 40, 200, device=device, causal=True, **sizes), level)


@pytest.mark.parametrize("level", LEVELS)
def test_levels_with_lengths(device, level):
    """Blocks of 128 keys begin anew with each sequence, wherever it lies."""
    given = {"nheads": 3, "nheads_kv": 1, "headdim": 64, "causal": True, "device": device, **BF16}
    check_level(varlen([5, 0, 128, 1, 130], [127, 3, 128, 257, 129], **given), level)
    for seqlen_q, seqlen_k in ((0, 5), (5, 0), (1, 129), (129, 1)):
        check_level(dense(2, seqlen_q, seqlen_k, **given), level)
    check_level(varlen([], [], **given), level)


@pytest.mark.parametrize("level", LEVELS)
def test_blocks_of_values_of_all_sizes(device, level):
    """Scales of V from block to block: 0, tiny, large; the keys of none of them are lost."""
    problem = dense(1, 20, 128 * 6, headdim=64, device=device, **BF16)
    sizes = torch.tensor([1.0, 0.0, 1e-12, 300.0, 1e-30, 1e-3], device=device)
    v = (problem.v * sizes.repeat_interleave(128)[:, None, None]).bfloat16()
    out, lse = call_fp8(replace(problem, v=v), level)
    exact, expected = replace(problem, v=v).to(torch.float64).forward()
    assert (on_host(lse) - expected).abs().max() < 0.1
    # Next to nothing comes from the small blocks, so that this is 128 keys of the same size.
    error = (on_host(out).double() - exact).square().mean().sqrt()
    assert error < 0.1 * exact.square().mean().sqrt()
    small = replace(problem, v=problem.v * 1e-10)
    exact = small.to(torch.float64).forward()[0]
    error = (on_host(call_fp8(small, level)[0]).double() - exact).square().mean().sqrt()
    assert error < 0.1 * exact.square().mean().sqrt()


@pytest.mark.parametrize("level", LEVELS)
def test_next_to_nothing_is_nothing(device, level):
    """Keys and queries for which 1 over the scale would be infinite."""
    q, k, v = (randn(1, 300, 2, 64, **BF16, device=device) for _ in "qkv")
    q[:, :5], k[:, :130] = 1e-37, 1e-37
    found, expected = (
        flash_attn_fp8_func(q.masked_fill(q == x, 0), k.masked_fill(k == x, 0), v, level=level)
        for x in (7.0, q[0, 0, 0, 0].item())
    )
    assert not found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_what_is_not_finite_is_seen(device):
    """NaN and Inf in q, k or v come out as NaN, not as a number."""
    for name in "qkv":
        for value in (NAN, math.inf):
            problem = dense(1, 5, 7, headdim=64, device=device, **BF16)
            getattr(problem, name)[0, 2, 0, 3] = value
            out, _ = call_fp8(problem, "balanced")
            rows = out[0, 2, 0] if name == "q" else out[0, :, 0, 3]
            assert rows.isnan().all()
            assert out[0, :, 1].isfinite().all()


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_rotation_is_hadamard(headdim):
    matrix = quantisation.rotation(headdim, torch.device("cpu")).double()
    assert (matrix @ matrix.T - torch.eye(headdim)).abs().max() < 1e-6
    assert (matrix.abs() - headdim**-0.5).abs().max() < 1e-7
    negative = (matrix[:, 0] < 0).double().mean()  # the signs, or Williamson's column with them
    assert 0.3 < negative < 0.7


@pytest.mark.parametrize("headdim", [64, 96])
def test_rotation_whatever_the_default_dtype_is(headdim):
    expected = quantisation.rotation(headdim, torch.device("cpu"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = quantisation.rotation(headdim, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_quantize_no_sequence():
    found, descale = quantize(torch.randn(3, 4, 8), 2, int32([0]))
    assert found.dtype == torch.float8_e4m3fn and (found.float() == 0).all()
    assert descale.shape == (0, 2)


def test_level_errors():
    q, k, v = (randn(2, 8, 2, 32, **BF16) for _ in "qkv")
    with pytest.raises(ValueError, match="level must be one of fast, balanced, accurate, got 'f'"):
        flash_attn_fp8_func(q, k, v, level="f")
    with pytest.raises(TypeError, match="q must have one of the dtypes .* got torch.float32"):
        flash_attn_fp8_func(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="at most 256 to be quantised, got 264"):
        flash_attn_fp8_func(*(randn(1, 2, 1, 264, **BF16) for _ in "qkv"))
    table = torch.zeros(1, 1, dtype=torch.int32)
    bounds = int32([0, 8])
    with pytest.raises(NotImplementedError, match="block_table must be None"):
        flash_attn._ops.flash_attn_varlen_forward(
            *(q[0], k, v, bounds, bounds, 8, 8, 0.0, None, False), block_table=table, fp8_level=1
        )


# ---- rotary embedding ----------------------------------------------------------------------------


def angle_tables(rows: int, pairs: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = randn(rows, pairs, device=device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [32, 12])
def test_rotary(device, pairs, interleaved, dtype):
    """The same bits as of q and k that were rotated before, and gradients of unrotated ones."""
    q, k, v = (randn(2, 90, heads, 64, device=device, **BF16) for heads in (4, 2, 2))
    cos, sin = angle_tables(100, pairs, device, dtype)
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (apply_rotary_emb(x, cos, sin, interleaved=interleaved) for x in (q, k))
        return flash_attn_fp8_func(q, k, v, causal=True)

    expected = apart(q, k, v)
    out = torch.empty_like(q)
    assert torch.equal(flash_attn_fp8_func(q, k, v, causal=True, **rotary), expected)
    assert flash_attn_fp8_func(q, k, v, causal=True, out=out, **rotary) is out
    assert torch.equal(out, expected)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = flash_attn_fp8_func(*leaves, causal=True, **rotary)
    assert torch.equal(found, expected)
    dout = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, dout)
    for grad, same in zip(grads, torch.autograd.grad(apart(*leaves), leaves, dout), strict=True):
        assert torch.equal(grad, same)


def test_rotary_of_packed_sequences(device):
    """Each sequence begins at position 0."""
    lengths = [3, 130, 0, 40]
    q, k, v = (randn(sum(lengths), 2, 64, device=device, **BF16) for _ in "qkv")
    cos, sin = angle_tables(130, 16, device, torch.bfloat16)
    tables = {"rotary_cos": cos, "rotary_sin": sin}
    bounds = cu_seqlens(lengths).to(device)
    out = flash_attn_fp8_varlen_func(q, k, v, bounds, bounds, 130, 130, **tables)
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        part = [x[None, begin:end] for x in (q, k, v)]
        alone = flash_attn_fp8_func(*part, **tables)
        assert torch.equal(out[begin:end], alone[0])


def test_rotary_compiled(device):
    q, k, v = (randn(1, 30, 2, 64, device=device, **BF16) for _ in "qkv")
    cos, sin = angle_tables(30, 32, device, torch.bfloat16)
    call = partial(flash_attn_fp8_func, rotary_cos=cos, rotary_sin=sin)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), call(q, k, v))


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"rotary_sin": None}, ValueError, "rotary_sin must be given with rotary_cos, got None"),
        ({"rotary_cos": None}, ValueError, "rotary_cos must be given with rotary_sin, got None"),
        ({"rotary_cos": torch.zeros(9, 16).half()}, TypeError, "rotary_cos must have the dtype of"),
        ({"rotary_cos": torch.zeros(9, 16)}, TypeError, "rotary_sin must have the dtype"),
        ({"q": torch.zeros(1, 7, 2, 32, **BF16)}, ValueError, "equally long with rotary_cos, got"),
        ({"rotary_interleaved": 0.5}, TypeError, "rotary_interleaved"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tracked", [False, True])
def test_rotary_errors(given, error, words, tracked):
    q, k, v = (randn(1, 9, 2, 32, **BF16) for _ in "qkv")
    tables = {name: torch.zeros(9, 16, **BF16) for name in ("rotary_cos", "rotary_sin")}
    v.requires_grad_(tracked)
    with pytest.raises(error, match=words):
        flash_attn_fp8_func(**{"q": q, "k": k, "v": v, **tables, **given})


@pytest.mark.parametrize("given, missing", [("cos", "sin"), ("sin", "cos")])
def test_one_rotary_table_for_packed_sequences(given, missing):
    x, bounds = randn(9, 2, 32, **BF16), int32([0, 9])
    table = {f"rotary_{given}": torch.zeros(9, 16, **BF16)}
    with pytest.raises(ValueError, match=f"rotary_{missing} must be given with rotary_{given}"):
        flash_attn_fp8_varlen_func(x, x, x, bounds, bounds, 9, 9, **table)


@pytest.mark.parametrize("tracked", [False, True])
def test_short_rotary_tables(tracked):
    q, k, v = (randn(1, 9, 2, 32, **BF16) for _ in "qkv")
    v.requires_grad_(tracked)
    short = {name: torch.zeros(8, 16, **BF16) for name in ("rotary_cos", "rotary_sin")}
    words = "rotary_cos must have a row for each of 9 positions"
    with pytest.raises(ValueError, match=words):
        flash_attn_fp8_func(q, k, v, **short)
    bounds = int32([0, 9])
    with pytest.raises(ValueError, match=words):
        flash_attn_fp8_varlen_func(q[0], k[0], v[0], bounds, bounds, 9, 9, **short)


# ---- random problems -----------------------------------------------------------------------------


def random_problem(
    lengths: list[tuple[int, int]], packed: bool, shape: Any, chosen: Any, seed: int, device: str
) -> Attention:
    torch.manual_seed(seed)
    chosen = {name: value for name, value in chosen.items() if name != "dropout_p"}
    options = with_values(chosen, len(lengths) if packed else 2, shape["nheads"], device)
    sizes = {**shape, **BF16, "device": device}
    if not packed:
        return dense(2, *lengths[0], **sizes, **options)
    return varlen(*zip(*lengths, strict=True), **sizes, **options)


RANDOM = {
    "lengths": st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=3),
    "packed": st.booleans(),
    "shape": heads(),
    "chosen": CHOSEN,
    "seed": SEED,
}


@settings(max_examples=50)
@given(**RANDOM, page_size=st.sampled_from([None, 5, 16]), descales=st.booleans())
def test_random_e4m3(device, page_size, descales, **given):
    problem = random_problem(**given, device=device)
    paged = page_size and given["packed"] and max(problem.storage.cu_seqlens.diff()) > 0
    check_e4m3(in_pages(problem, page_size) if paged else problem, descales)


@settings(max_examples=50)
@given(**RANDOM, level=st.sampled_from(LEVELS))
def test_random_levels(device, level, **given):
    check_level(random_problem(**given, device=device), level)


# ---- accuracy ------------------------------------------------------------------------------------


def rms(x: Tensor, exact: Tensor) -> float:
    return (on_host(x).double() - on_host(exact)).square().mean().sqrt().item()


def results_of_formats(x: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """out and lse of the levels from float16, and with one scale for each head in e4m3."""
    halves = [tensor.half() for tensor in x]
    results = {
        level: flash_attn_fp8_func(*halves, level=level, return_softmax_lse=True)
        for level in LEVELS
    }
    q, k, v = map(quantize, x)
    descales = {"q_descale": q[1], "k_descale": k[1], "v_descale": v[1]}
    given = (q[0], k[0], v[0])
    results["e4m3"] = flash_attn_func(*given, **descales, return_attn_probs=True)[:2]
    return results


def test_outliers_of_the_paper(device):
    """Shah et al., 2024, have 9.1e-3 for FP8 with rotation and 2.4e-2 with one scale a tensor.

    The bounds of the levels are those of issue 16. Much of the error comes from the few rows with
    the largest scores: one head's differs from the mean (of 24 heads, all rows: 8.5e-3, 5.8e-3 and
    1.7e-3) by a fifth, and sixteen heads even that out.
    """
    q, k, v = (fp8_benchmark.with_outliers(1, 4096, 16, 128).to(device) for _ in "qkv")
    x = [q[:, ::32], k, v]
    exact, exact_lse = Attention(*x).to(torch.float64).forward()
    results = results_of_formats(x)
    errors = {name: rms(out, exact) for name, (out, _) in results.items()}
    assert errors["fast"] <= 8.5e-3, errors
    assert errors["balanced"] <= 6e-3, errors
    assert errors["accurate"] <= 2.2e-3, errors
    assert 1.5e-2 <= errors["e4m3"] <= 2.1e-2, errors  # FA3's kernel: 2.07e-2
    assert rms(results["balanced"][1], exact_lse) < 0.02


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_normal_inputs(device, headdim):
    """Of rows that average about 1500 of 4096 keys, whose P the rounding to e4m3 changes by 2.6%.

    e^(s^2), s normal, is 2.7 times the square of e^s on average, so out is about sqrt(2.7 / 4096);
    P's rounding alone makes an error of 2.6% of that, 6.7e-4, and V's as much.
    Bounds are 1.2 times the sums of squares.
    """
    q, k, v = (torch.randn(1, 4096, 1, headdim, device=device) for _ in "qkv")
    x = [q[:, ::32], k, v]
    exact, exact_lse = Attention(*x).to(torch.float64).forward()
    for name, (out, lse) in results_of_formats(x).items():
        bound = {"accurate": 3.8e-4, "balanced": 1.2e-3}.get(name, 1.65e-3)
        assert rms(out, exact) <= bound, name
        # q k^T / sqrt(d) of errors of 2.6% each is off by 3.7%, whose average over keys is small.
        assert rms(lse, exact_lse) <= (2e-3 if name in ("accurate", "balanced") else 1.2e-2), name


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_straight_through(device, layout, level):
    """Those of 16 bits from this forward's out and log-sum-exp, bit by bit; and near the exact."""
    sizes = {"nheads": 4, "nheads_kv": 2, "headdim": 64, "device": device, **BF16}
    problem = LAYOUTS[layout](**sizes, causal=True, softcap=5.0)
    leaves = {name: getattr(problem, name).detach().requires_grad_() for name in "qkv"}
    out, lse = call_fp8(replace(problem, **leaves), level)
    plain = call_fp8(problem, level)
    assert torch.equal(out.detach(), plain[0])
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    expected = private_backward(problem, dout, out.detach(), lse.detach())
    for name, grad in zip("qkv", grads, strict=True):
        assert torch.equal(grad, expected[f"d{name}"])
    exact = torch.autograd.grad(call(replace(problem, **leaves)), list(leaves.values()), dout)
    for grad, near in zip(grads, exact, strict=True):
        assert torch.cosine_similarity(grad.flatten(), near.flatten(), 0) > 0.98


def test_further_derivatives_are_refused(device):
    q = randn(1, 5, 2, 64, device=device, **BF16).requires_grad_()
    out = flash_attn_fp8_func(q, q, q)
    (grad,) = torch.autograd.grad(out.float().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no derivative.*but for flash_attn.fp8"):
        grad.float().sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="no forward mode.*but for flash_attn.fp8"):
            flash_attn_fp8_func(dual, dual, dual)
        cos, sin = angle_tables(5, 32, device, torch.bfloat16)
        with pytest.raises(NotImplementedError, match="no forward mode.*but for flash_attn.fp8"):
            flash_attn_fp8_func(dual, dual, dual, rotary_cos=cos, rotary_sin=sin)


def test_opcheck(device):
    q, k, v = (randn(2, 9, 2, 16, device=device, **BF16).requires_grad_() for _ in "qkv")
    operands = (q, k, v, 0.0, None, True, -1, -1, 0.0, None, False)
    torch.library.opcheck(torch.ops.flash_attn.flash_attn_dense_forward, operands, {"fp8_level": 2})


def test_gradients_of_sinks_lse_and_scale(device):
    leaves = [randn(2, 30, 2, 64, device=device, **BF16).requires_grad_() for _ in "qkv"]
    extra = [torch.zeros(2, device=device), torch.tensor(0.1, device=device)]
    leaves += [x.requires_grad_() for x in extra]
    q, k, v, s_aux, scale = leaves

    def loss(function: Any, **more: Any) -> Tensor:
        out, lse = function(q, k, v, softmax_scale=scale, s_aux=s_aux, **more)[:2]
        return out.float().square().sum() + lse.sin().sum()

    grads, expected = (
        torch.autograd.grad(value, leaves)
        for value in (
            loss(flash_attn_fp8_func, return_softmax_lse=True, level="accurate"),
            loss(flash_attn_func, return_attn_probs=True),
        )
    )
    for grad, near in zip(grads, expected, strict=True):
        gap = (grad - near).float().norm() / near.float().norm()
        assert gap < 0.1


def test_gradient_of_the_scale_with_rotary(device):
    """The tables are checked whatever the scale is."""
    cos, sin = angle_tables(30, 32, device, torch.bfloat16)
    packed = [randn(30, 2, 64, device=device, **BF16) for _ in "qkv"]
    bounds = int32([0, 30], device)
    grads = []
    for attention in (
        lambda scale: flash_attn_fp8_func(
            *(x[None] for x in packed), scale, rotary_cos=cos, rotary_sin=sin
        ),
        lambda scale: flash_attn_fp8_varlen_func(
            *packed, bounds, bounds, 30, 30, scale, rotary_cos=cos, rotary_sin=sin
        ),
    ):
        scale = torch.tensor(0.1, device=device, requires_grad=True)
        grads += torch.autograd.grad(attention(scale).float().square().sum(), scale)
    assert grads[0] != 0
    torch.testing.assert_close(*grads, rtol=1e-2, atol=0)


def test_compiled_and_transformed(device):
    torch._dynamo.reset()  # the compiler skips a function that has raised an error
    q, k, v = (randn(2, 30, 2, 64, device=device, **BF16) for _ in "qkv")

    def loss(q: Tensor) -> Tensor:
        return flash_attn_fp8_func(q, k, v, causal=True).float().square().sum()

    leaf = q.clone().requires_grad_()
    value = loss(leaf)
    (expected,) = torch.autograd.grad(value, leaf)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(leaf), value)
    assert torch.equal(torch.autograd.grad(compiled(leaf), leaf)[0], expected)
    assert torch.equal(torch.func.grad(loss)(q), expected)
    assert torch.equal(torch.vmap(loss)(torch.stack([q, q]))[1], value)
    x = [tensor.to(FP8) for tensor in (q, k, v)]
    step = torch.compile(flash_attn_func, backend="eager", fullgraph=True)
    assert torch.equal(step(*x), flash_attn_func(*x))


# ---- quantize ------------------------------------------------------------------------------------


def test_quantize_rounds_and_scales(device):
    x = randn(3, 50, 4, 32, device=device, **BF16)
    x[1, :, 2:] = 0
    rounded, descale = quantize(x, nheads_kv=2)
    assert rounded.dtype == FP8 and descale.shape == (3, 2) and descale[1, 1] == 1
    largest = x.float().unflatten(2, (2, 2)).abs().amax((1, 3, 4))
    assert torch.equal(descale, (largest / MOST).masked_fill(largest == 0, 1.0))
    factor = descale.repeat_interleave(2, 1)[:, None, :, None]
    assert torch.equal(rounded.float(), (x.float() / factor).to(FP8).float())


def test_quantize_packed(device):
    lengths = [5, 0, 17]
    x = randn(25, 2, 32, device=device)
    x[22:] = NAN
    rounded, descale = quantize(x, cu_seqlens=cu_seqlens(lengths, device))
    starts = [0, 5, 5]
    for b, (first, length) in enumerate(zip(starts, lengths, strict=True)):
        one, scale = quantize(x[None, first : first + length])
        assert torch.equal(descale[b], scale[0])
        assert torch.equal(rounded[first : first + length].float(), one[0].float())
    assert (rounded[22:].float() == 0).all()


def test_quantized_cache(device):
    """A cache of FP8 and its descales, read by queries of 16 bits."""
    q, k, v = (randn(2, n, 2, 64, device=device, **BF16) for n in (3, 40, 40))
    (k8, k_descale), (v8, v_descale) = quantize(k), quantize(v)
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    out = flash_attn.flash_attn_with_kvcache(q, k8, v8, **descales)
    exact = Attention(q, k, v).to(torch.float64).forward()[0]
    assert rms(out, exact) < 0.05 * exact.square().mean().sqrt()


@pytest.mark.parametrize(
    "given, error, words",
    [
        ((torch.zeros(2, 3, 4, 8, dtype=torch.int8),), TypeError, "floating-point"),
        (([1.0],), TypeError, "list"),
        ((torch.zeros(2, 3, 4),), ValueError, "4 dimensions"),
        ((torch.zeros(2, 3, 4, 8).to_sparse(),), TypeError, "x must be a dense tensor"),
        ((torch.zeros(2, 3, 4, 0),), ValueError, "the last of at least 1"),
        ((torch.zeros(2, 3, 4, 8), 3), ValueError, "divide the heads of x, 4, got 3"),
        ((torch.zeros(2, 3, 4, 8), "a"), TypeError, "nheads_kv must be an int"),
        ((torch.zeros(3, 4, 8), None, int32([0, 4])), ValueError, "within the 3 rows"),
        ((torch.zeros(3, 4, 8), None, [0, 3]), TypeError, "cu_seqlens must be .* got list"),
        ((torch.zeros(3, 4, 8), None, torch.tensor([0, 3])), TypeError, "int32 .* torch.int64"),
        ((torch.zeros(3, 4, 8), None, int32([[0, 3]])), ValueError, r"cu_seqlens .* \(1, 2\)"),
    ],
)
def test_quantize_errors(given, error, words):
    with pytest.raises(error, match=words):
        quantize(*given)


def test_quantize_what_is_next_to_nothing():
    x = torch.zeros(1, 4, 2, 8)
    x[:, :, 1, 0] = 1e-44  # by 448 it is 0
    quantized, descale = quantize(x)
    assert (quantized.float() == 0).all() and (descale == 1).all()


# ---- the benchmark -------------------------------------------------------------------------------


@since_torch(2, 5, "scaled_dot_product_attention has enable_gqa")
def test_benchmark(tmp_path, capsys):
    options = ["--parts", "accuracy", "speed", "--headdim", "64", "--heads", "1", "--rows", "8"]
    options += ["--steps", "1", "--seqlen", "64", "--tokens", "64", "--width", "64"]
    fp8_benchmark.main([*options, "--rounds", "1", "--folder", str(tmp_path), "--plain", "tiled"])
    rows = json.loads((tmp_path / "fp8-accuracy.json").read_text())["rows"]
    assert [row["inputs"] for row in rows] == ["outliers", "normal", "model"]
    for row in rows:
        error = row["rmse"]
        assert list(error) == ["bf16", *LEVELS, "e4m3"] == row["providers"]
        assert 0 < error["bf16"] < error["accurate"] < error["balanced"] <= 1.2 * error["fast"]
        assert all(0 < row[x][name] < 1 for x in ("relative", "lse") for name in error)
    speeds = json.loads((tmp_path / "fp8-speed.json").read_text())["rows"]
    for row in speeds:
        others = {"prepass", "copy", "rotary", "rotary_apart"}
        assert set(row["ms"]) == {"tiled", *LEVELS, "e4m3", *others}, row["skipped"]
    assert "balanced to plain: " in capsys.readouterr().out
    drawn = {path.name for path in tmp_path.glob("*.png")}
    expected = {"fp8-accuracy.png", "fp8-speed-forward-bf16.png"}
    assert drawn == (expected if importlib.util.find_spec("matplotlib") else set())
