"""The Hopper kernels of attention in FP8: what test_fp8.py asks of `tiled`, and more.

Shapes that Python hands to them are checked without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from conftest import device_fixture
from helpers import (
    APART,
    LAYOUTS,
    NAN,
    NO_DROPOUT,
    captured,
    dense,
    int32,
    randn,
    varlen,
    without_dropout,
)
from test_fp8 import BF16, FP8, HEADDIMS, LEVELS, call_fp8, check_e4m3, check_level, in_e4m3, rms
from test_repeated_calls import launches_of
from torch import Tensor

import flash_attn
from flash_attn import _backends, _ops, flash_attn_func, flash_attn_varlen_func
from flash_attn._backends import cuda, quantisation, tiled
from flash_attn.fp8 import flash_attn_fp8_func, flash_attn_fp8_varlen_func, quantize
from flash_attn.layers.rotary import apply_rotary_emb

KINDS = ("e4m3", *LEVELS)
PAGES = frozenset({"pages", "cache_slots"})

on_kernels = device_fixture("cuda-sm90")


def check(problem: Any, kind: str) -> None:
    check_e4m3(problem) if kind == "e4m3" else check_level(problem, kind)


def order_of_keys(count: int) -> Tensor:
    """The key at each place of transposed values: places 4 t + j of 16 are an operand's."""
    first = [2 * t + j % 2 + j // 2 * 8 for t in range(4) for j in range(4)]
    return torch.tensor([key + 16 * i for i in range(count // 16) for key in first])


# ---- what Python hands over ----------------------------------------------------------------------


class FakeCall:
    """Of a kernel: its tensors' names, and where they are among arguments and results."""

    workspaces = ()

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [*names]

    def at(self, places: Sequence[int], offsets: Sequence[int]) -> FakeCall:
        self.places = places
        return self

    def tensors(self, arguments: Sequence[Any], results: Sequence[Tensor]) -> dict[str, Tensor]:
        given = [arguments[i] if i >= 0 else results[-1 - i] for i in self.places]
        return dict(zip(self.names, given, strict=True))


class FakeCalls:
    """In place of the extension: remembers what kernels are asked for, and computes nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[cuda.Kernel, dict[str, Tensor], dict[str, float]]] = []

    def prepare(self, kernel: int, tensors: dict[str, Tensor], numbers: dict[str, float]) -> Any:
        self.seen.append((cuda._KERNELS[kernel], tensors, numbers))
        return FakeCall([*tensors])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCalls]:
    """Pretend that every device is a Hopper GPU with these kernels."""
    rows = [
        cuda.Kernel("quantised", "sm90", dtype, dtype, out, dim, dim, features, takes, 1)
        for dtype, out, dim, (features, takes) in product(
            ("e4m3", "int8"),
            ("bf16", "fp16"),
            HEADDIMS,
            {"plain": frozenset(), "full": frozenset({"softcap", "alibi"})}.items(),
        )
    ] + [
        cuda.Kernel("quantise", "sm90", dtype, to, "e4m3", dim, dim, "full", frozenset(), 1)
        for dtype, to, dim in product(("bf16", "fp16"), ("e4m3", "int8"), HEADDIMS)
    ]
    fake = FakeCalls()
    monkeypatch.setattr(cuda, "_KERNELS", tuple(rows))
    monkeypatch.setattr(cuda, "_C", fake, raising=False)
    monkeypatch.setattr(cuda.Prepared, "run", lambda self: None)
    monkeypatch.setattr(_backends, "_built_backends", lambda *asked: ("sm90",))
    cuda._smallest_kernel.cache_clear()
    yield fake
    cuda._smallest_kernel.cache_clear()


@pytest.mark.parametrize("level", LEVELS)
def test_calls_of_a_level(calls, level):
    q, k, v = randn(2, 9, 4, 72), randn(2, 200, 2, 72), randn(2, 200, 2, 40)
    halves = [x.bfloat16() for x in (q, k, v)]
    with flash_attn.use_backend("sm90"):
        out = flash_attn_fp8_func(*halves, level=level)
    assert out.shape == (2, 9, 4, 40) and out.dtype == torch.bfloat16
    (first, given, _), (second, taken, numbers) = calls.seen
    dtype = "e4m3" if level == "fast" else "int8"
    assert first[:7] == ("quantise", "sm90", "bf16", dtype, "e4m3", 96, 96)
    assert second[:8] == ("quantised", "sm90", dtype, dtype, "bf16", 96, 96, "plain")
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    assert shapes["k_out"] == (2, 200, 2, 96) and shapes["k_scale"] == (2, 2, 2)
    assert taken["q"] is halves[0] and "q" not in shapes  # the attention rounds it
    same = {"k": "k_out", "k_scale": "k_scale"}
    if level == "accurate":
        assert taken["v"] is halves[2] and not {"v", "v_out", "v_scale"} & {*shapes}
    else:
        assert shapes["v_out"] == (2, 2, 40, 256) and shapes["v_scale"] == (2, 2, 2)
        same |= {"v": "v_out", "v_scale": "v_scale"}
    assert all(taken[name] is given[at] for name, at in same.items())
    assert taken["out"] is out and numbers["softmax_scale"] == 72**-0.5


def test_calls_of_packed_sequences(calls):
    q, k, v = (randn(300, 2, 64, dtype=torch.float16) for _ in "qkv")
    bounds = int32([0, 7, 300])
    with flash_attn.use_backend("sm90"):
        flash_attn_fp8_varlen_func(q, k, v, bounds, bounds, 293, 293, softcap=3.0)
    (_, given, _), (second, _, _) = calls.seen
    assert second.feature_set == "full" and second.out_dtype == "fp16"
    assert given["v_out"].shape == (2, 64, (300 // 128 + 2) * 128)
    assert given["k_scale"].shape == (2, 300 // 128 + 2)
    assert given["cu_seqlens_k"] is not None and "seqused_k" not in given


def test_calls_of_e4m3(calls):
    """There is no pass that quantises; an unusual stride is copied."""
    q, v = (randn(2, 130, 2, 64).to(FP8) for _ in "qv")
    k = randn(2, 130, 2, 65).to(FP8)[..., 1:]
    descale = torch.ones(2, 2)
    with flash_attn.use_backend("sm90"):
        out = flash_attn_func(q, k, v, q_descale=descale, v_descale=descale)
    ((kernel, taken, _),) = calls.seen
    assert kernel[:5] == ("quantised", "sm90", "e4m3", "e4m3", "bf16")
    assert taken["v"] is v and out.dtype == torch.bfloat16
    assert taken["q_descale"] is descale and "k_descale" not in taken
    assert taken["k"].stride(1) % 16 == 0 and torch.equal(taken["k"].float(), k.float())


@pytest.mark.parametrize(
    "headdim, more", [(40, {}), (264, {}), (64, {"block_table": int32([[0], [1]])})], ids=str
)
def test_what_kernels_refuse(calls, headdim, more):
    q, cache = (randn(2, 4, 2, headdim).to(FP8) for _ in "qk")
    with flash_attn.use_backend("sm90"), pytest.raises(NotImplementedError, match="tiled"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, **more)
    assert not calls.seen


def test_few_queries_are_widened(calls, monkeypatch):
    """And those for a cache: the decode kernels take them in 16 bits, unforced."""
    row = cuda.Kernel("decode", "sm90", "bf16", "e4m3", "bf16", 64, 64, "plain", PAGES, 1)
    monkeypatch.setattr(cuda, "_KERNELS", (*cuda._KERNELS, row))
    cuda._smallest_kernel.cache_clear()
    q, cache = (randn(2, n, 2, 64).to(FP8) for n in (40, 64))
    descales = {f"{name}_descale": torch.full((2, 2), x) for name, x in (("q", -2.0), ("k", 3.0))}
    table = int32([[0], [1]])
    flash_attn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=3, block_table=table, **descales
    )
    flash_attn_func(q[:, :16], cache, cache, **descales)
    flash_attn_func(q, cache, cache)  # many
    (taken, given, _), (other, _, _), *of_many = calls.seen
    assert taken == other == row
    assert [kernel.operation for kernel, _, _ in of_many] == ["quantised"]
    assert torch.equal(given["q"], q.bfloat16()) and given["q"].dtype == torch.bfloat16
    assert torch.equal(given["k_descale"], torch.full((2, 2), -6.0)) and "q_descale" not in given
    assert given["k"].dtype == FP8 and given["block_table"] is table


@pytest.mark.parametrize("descales", ["q", "k", "qk", ""])
def test_widened_problem(descales):
    """Is the same problem: queries of 8 bits are numbers of 16."""
    q, k, v = (randn(2, n, h, 192).to(FP8) for n, h in ((3, 4), (50, 2), (50, 2)))
    scales = {f"{name}_descale": torch.randn(2, 2) for name in descales}
    a = flash_attn._arguments.dense(q, k, v, flash_attn._arguments.Options(None))
    a = a._replace(**scales)
    assert cuda.widens(a)
    out, lse, _ = tiled.forward(cuda.widened(a), None, False)
    expected, expected_lse, _ = tiled.forward(a, None, False)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert rms(out, expected) < 0.03 * expected.float().square().mean().sqrt()


def test_unforced_calls(calls):
    """They take the kernels too; what these refuse is `tiled`."""
    q = randn(1, 50, 1, 64)
    flash_attn_fp8_func(*[q.bfloat16()] * 3)
    flash_attn_func(*[q.to(FP8)] * 3)
    operations = [kernel.operation for kernel, _, _ in calls.seen]
    assert operations == ["quantise", "quantised", "quantised"]
    calls.seen.clear()
    flash_attn_func(*[randn(1, 50, 1, 40).to(FP8)] * 3)
    assert not calls.seen


@pytest.mark.parametrize("kind", KINDS)
def test_known_calls(calls, monkeypatch, kind):
    """The second of two equal calls is launched without asking for kernels again."""
    launched: list[dict[str, Tensor]] = []

    def run(self: cuda.Launch, arguments: Any, results: Any) -> None:
        launched.append(self.call.tensors(arguments, results))

    monkeypatch.setattr(cuda, "call_key", lambda arguments, state: b"a key of this test")
    monkeypatch.setattr(cuda.Launch, "run", run)
    bounds = int32([0, 10, 50])
    for packed in (False, True):
        calls.seen.clear()
        launched.clear()
        operator = _ops.flash_attn_varlen_forward if packed else _ops.flash_attn_forward
        launches = launches_of(operator)
        launches.clear()
        q, k, v = (randn(50, 2, 64) if packed else randn(1, 50, 2, 64) for _ in "qkv")
        q, k, v = (x.to(FP8) if kind == "e4m3" else x.bfloat16() for x in (q, k, v))
        options = {} if kind == "e4m3" else {"level": kind}
        if packed:
            function = flash_attn_varlen_func if kind == "e4m3" else flash_attn_fp8_varlen_func
            call = partial(function, q, k, v, bounds, bounds, 40, 40, **options)
        else:
            function = flash_attn_func if kind == "e4m3" else flash_attn_fp8_func
            call = partial(function, q, k, v, **options)
        try:
            call()
            out = call()
        finally:
            launches.clear()
        quantises = [] if kind == "e4m3" else ["quantise"]
        assert [kernel.operation for kernel, _, _ in calls.seen] == [*quantises, "quantised"]
        for seen, tensors in zip(calls.seen, launched, strict=True):
            described = {name: (x.shape, x.dtype) for name, x in tensors.items()}
            assert described == {name: (x.shape, x.dtype) for name, x in seen[1].items()}
        *first, second = launched
        assert second["out"] is out
        if kind == "e4m3":
            assert second["q"] is q and second["k"] is k and second["v"] is v
            continue
        (first,) = first
        between = {"k_out": "k", "v_out": "v"}
        made = {name: x for name, x in first.items() if x is not k and x is not v}
        made.pop("cu_seqlens_k", None)
        assert made and all(second[between.get(name, name)] is x for name, x in made.items())
        assert second["q"] is q and first["k"] is k
        assert (second if kind == "accurate" else first)["v"] is v


@pytest.mark.parametrize("tables", ["as q", "float32", "few"])
def test_calls_with_rotary(calls, tables):
    """The pass rotates q and k where it can; elsewhere they are rotated before."""
    q, k, v = (randn(2, 50, 2, 64, **BF16) for _ in "qkv")
    cos, sin = (randn(60, 12 if tables == "few" else 16) for _ in "cs")
    if tables != "float32":
        cos, sin = cos.bfloat16(), sin.bfloat16()
    with flash_attn.use_backend("sm90"):
        flash_attn_fp8_func(q, k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
    (_, given, numbers), (_, taken, _) = calls.seen
    if tables == "as q":
        assert given["rotary_cos"] is cos and given["rotary_sin"] is sin and given["q"] is q
        assert numbers == {"interleaved": False}
        rotated = taken["q"]
        assert rotated is given["q_out"] and (rotated.shape, rotated.dtype) == (q.shape, q.dtype)
        return
    assert "rotary_cos" not in given and "q" not in given and not numbers
    assert torch.equal(taken["q"], apply_rotary_emb(q, cos, sin))
    assert torch.equal(given["k"], apply_rotary_emb(k, cos, sin))


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Tensor]]]:
    """What kernels have been launched with, by operation."""
    seen, launch = [], cuda._launch

    def launched(kernel: int, tensors: Any, results: Any, numbers: Any) -> cuda.Prepared:
        prepared = launch(kernel, tensors, results, numbers)
        seen.append((cuda._KERNELS[kernel].operation, dict(results)))
        return prepared

    monkeypatch.setattr(cuda, "_launch", launched)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("headdim", [*HEADDIMS, 80])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_queries_rounded_by_attention(on_kernels, group, headdim, level):
    """The log-sum-exp of one key is the product of the rounded query and key."""
    q = randn(2, 150, 2 * group, headdim, device=on_kernels).bfloat16()
    q[:, ::7] *= torch.tensor([1e-3, 30.0], device=on_kernels).bfloat16()[:, None, None, None]
    q[0, 3] = 0
    k, v = (randn(2, 1, 2, headdim, device=on_kernels).bfloat16() for _ in "kv")
    found = flash_attn_fp8_func(q, k, v, level=level, return_softmax_lse=True)[1].cpu()
    with flash_attn.use_backend("tiled"):
        expected = flash_attn_fp8_func(q, k, v, level=level, return_softmax_lse=True)[1].cpu()
    lengths = k.float().norm(dim=-1).repeat_interleave(group, dim=-1)
    largest = (q.float().norm(dim=-1) * lengths * headdim**-0.5).mT.cpu()
    error = (found - expected).abs()
    zeros = torch.where(largest == 0, 5e-3, 1e-5)  # integers become floats with an offset
    # Tensor cores add e4m3 with 14 bits. In both, ties may be rounded to the other side.
    assert (error <= largest * (1e-3 if level == "fast" else 2e-5) + zeros).float().mean() > 0.97
    assert (error <= largest * 0.01 + zeros).all()


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pass_before_attention(on_kernels, passes, layout, headdim, level):
    """Against quantisation.py: scales agree, and what is rounded but for a few ties."""
    case = LAYOUTS[layout](nheads=4, nheads_kv=2, headdim=headdim, device=on_kernels)
    problem = replace(case, q=case.q.bfloat16(), k=case.k.bfloat16(), v=case.v.bfloat16())
    call_fp8(problem, level)
    (operation, found), _ = passes
    assert operation == "quantise"
    given = (problem.q, problem.k, problem.v)
    options = flash_attn._arguments.Options(None)
    number = 1 + LEVELS.index(level)
    if layout == "dense":
        a = flash_attn._arguments.dense(*given, options, fp8_level=number)
    else:
        bounds = problem.cu_seqlens_q, problem.storage.cu_seqlens
        a = flash_attn._arguments.varlen(*given, *bounds, 130, 140, options, fp8_level=number)
    expected = quantisation.quantised(a)
    inside = torch.ones(problem.k.shape[:-2], dtype=torch.bool, device=on_kernels)
    if layout != "dense":  # rows of no sequence may be anything
        inside[153:] = False
    same = found["k_out"][inside].float() == expected.k[inside].float()
    assert same.float().mean() > 0.99
    torch.testing.assert_close(found["k_scale"], expected.scales.k, rtol=1e-5, atol=0)
    if level == "accurate":
        assert "v_out" not in found and "v_scale" not in found
        return
    assert torch.equal(found["v_scale"], expected.scales.v)
    blocks = found["v_out"].float().unflatten(-1, (-1, 128))
    in_order = torch.empty_like(blocks)
    in_order[..., order_of_keys(128).to(on_kernels)] = blocks
    in_order, x = in_order.flatten(-2), expected.v.float()
    if layout == "dense":
        seqlen = x.shape[1]
        assert torch.equal(in_order[..., :seqlen], x.permute(0, 2, 3, 1))
        assert (in_order[..., seqlen:] == 0).all()
    else:  # lengths of 140 and 13: the second begins at block 140 // 128 + 1
        rows = x.permute(1, 2, 0)
        assert torch.equal(in_order[..., :140], rows[..., :140])
        assert (in_order[..., 140:256] == 0).all()
        assert torch.equal(in_order[..., 256:269], rows[..., 140:153])
        assert (in_order[..., 269:384] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_pass_with_rotary(on_kernels, passes, headdim, level):
    """Bit for bit as if q and k were rotated before, which wide heads are."""
    columns = (headdim // 2, headdim // 4 // 8 * 8, 8)
    shapes = (2, 333, 4, 2), (8, 1100, 6, 3)
    for pairs, interleaved, shape in product(columns, (False, True), shapes):
        batch, seqlen, nheads, nheads_kv = shape
        q, k, v = (
            randn(batch, seqlen, heads, headdim, dtype=torch.bfloat16, device=on_kernels)
            for heads in (nheads, nheads_kv, nheads_kv)
        )
        angles = randn(seqlen + 5, pairs, device=on_kernels)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        expected = flash_attn_fp8_func(
            *(apply_rotary_emb(x, cos, sin, interleaved=interleaved) for x in (q, k)),
            v,
            level=level,
        )
        rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        passes.clear()
        for _ in range(2):  # the second launches what the first has prepared
            assert torch.equal(flash_attn_fp8_func(q, k, v, level=level, **rotary), expected)
        if headdim > 128:
            assert all("q_out" not in results for _, results in passes)
        else:
            assert [operation for operation, _ in passes] == ["quantise", "quantised"]


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_pass_of_many_tiles(on_kernels, headdim, level):
    """Thread blocks take one tile after another; alone a sequence has fewer than there are SMs."""
    q = randn(6, 1000, 6, headdim, dtype=torch.bfloat16, device=on_kernels)
    k, v = (randn(6, 1100, 3, headdim, dtype=torch.bfloat16, device=on_kernels) for _ in "kv")
    with cuda.changed_setting("num_splits", 1):  # else the keys of one sequence are divided
        out = flash_attn_fp8_func(q, k, v, level=level)
        for i in range(len(q)):
            part = slice(i, i + 1)
            alone = flash_attn_fp8_func(q[part], k[part], v[part], level=level)
            assert torch.equal(out[part], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", NO_DROPOUT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_options_on_kernels(on_kernels, layout, options, kind):
    sizes = {"nheads": 4, "nheads_kv": 2, "headdim": 64, "device": on_kernels}
    check(LAYOUTS[layout](**sizes, **without_dropout(options, 2, 4, on_kernels)), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("options", NO_DROPOUT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_transposed_before_or_inside(on_kernels, layout, options, headdim):
    sizes = {"nheads": 4, "nheads_kv": 2, "headdim": headdim, "device": on_kernels}
    problem = LAYOUTS[layout](**sizes, **without_dropout(options, 2, 4, on_kernels))
    full = options in ("softcap", "everything") or options.startswith("alibi")
    for tile in (0,) if full else (0, 1):
        with cuda.changed_setting("tile", tile):
            check_e4m3(problem)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, APART - 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("headdim", "longest"),
    [(64, 2000), (48, 2000), (128, 2000), (256, 1024), (208, 1024), (256, 2000), (256, 3600)],
)
def test_values_transposed_inside_have_the_same_bits(on_kernels, headdim, longest, causal, parts):
    """More tiles than SMs, blocks of keys with and without an end, NaN behind sequences.

    Undivided, with more than 128 columns and 1024 keys, they are transposed before, whatever is
    asked for.
    """
    lengths = [longest, 0, 1, 77, 640, 129, 1023]
    bounds = int32([0, *accumulate(lengths)], on_kernels)
    q, k, v = (
        randn(sum(lengths) + 40, heads, headdim, device=on_kernels).to(FP8) for heads in (16, 8, 8)
    )
    for x in (k, v):
        x[sum(lengths) :] = NAN
    even = [x[: 3 * longest // 2].unflatten(0, (3, longest // 2)) for x in (q, k, v)]
    packed = (q, k, v, bounds, bounds, longest, longest)
    found = []
    for tile in (0, 1):
        with cuda.changed_setting("tile", tile), cuda.changed_setting("num_splits", parts):
            found.append(
                flash_attn_varlen_func(*packed, causal=causal, return_attn_probs=True)[:2]
                + flash_attn_func(*even, causal=causal, return_attn_probs=True)[:2]
            )
    for before, inside in zip(*found, strict=True):
        assert torch.equal(before, inside)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "headdims", [*((x, x) for x in HEADDIMS), (16, 16), (80, 48), (64, 128), (192, 128)], ids=str
)
def test_head_dims_on_kernels(on_kernels, headdims, dtype, kind):
    for causal, softcap in product((False, True), (0.0, 5.0)):
        check(
            dense(2, 200, 330, 4, 2, *headdims, dtype, on_kernels, causal=causal, softcap=softcap),
            kind,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_lengths_on_kernels(on_kernels, headdim, kind):
    """One off the edges of tiles and blocks; whole and divided keys."""
    lengths = [1, 63, 64, 65, 127, 128, 129, 191, 193, 257, 400]
    sizes = {"nheads": 2, "nheads_kv": 1, "headdim": headdim, "device": on_kernels}
    for parts, causal in product((1, 3, APART - 3), (False, True)):
        with cuda.changed_setting("num_splits", parts):
            check(varlen(lengths, lengths[::-1], **sizes, causal=causal), kind)
            check(dense(1, 129, 257, **sizes, causal=causal), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 3, APART - 3])
@pytest.mark.parametrize("level", LEVELS)
def test_nan_sink_on_kernels(on_kernels, level, parts):
    problem = dense(1, 129, 400, 2, 1, 64, dtype=torch.bfloat16, device=on_kernels)
    sinks = torch.tensor([0.5, NAN], device=on_kernels)
    with cuda.changed_setting("num_splits", parts):
        out = flash_attn_fp8_func(problem.q, problem.k, problem.v, level=level, s_aux=sinks)
    assert out[:, :, 1].isnan().all() and out[:, :, 0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_more_packed_tiles_than_sms_on_kernels(on_kernels, headdim, kind):
    lengths = [37 * i % 301 for i in range(32)]
    check(varlen(lengths, lengths, 8, 8, headdim, device=on_kernels, causal=True), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_leftover_tiles_on_kernels(on_kernels, headdim, kind):
    """When each SM has had one tile of a head, five heads are left: their keys are divided."""
    heads = torch.cuda.get_device_properties(on_kernels).multi_processor_count + 5
    with cuda.changed_setting("num_splits", -3):
        check(dense(1, 20, 400, heads, heads, headdim, device=on_kernels, causal=True), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 3, 8, 32])
@pytest.mark.parametrize("headdim", [128, 256])
def test_groups_on_kernels(on_kernels, headdim, group, kind):
    """A wide output leaves in boxes of a warp's rows, if whole groups fill them."""
    sizes = {"nheads": 2 * group, "nheads_kv": 2, "headdim": headdim, "device": on_kernels}
    for seqlen_q in (1, 5, 130):
        check(dense(2, seqlen_q, 300, **sizes, causal=True), kind)
        check(varlen([seqlen_q, 37], [300, 37], **sizes, causal=True), kind)


@pytest.mark.gpu
def test_seqused_on_kernels(on_kernels):
    """What lies behind a sequence is NaN."""
    case = dense(3, 20, 300, 4, 2, 64, device=on_kernels)
    _, given = in_e4m3(case, descales=False)
    lengths = int32([0, 129, 300], on_kernels)
    for b, length in enumerate(lengths.tolist()):
        given["k"][b, length:], given["v"][b, length:] = NAN, NAN
    results = []
    for backend in ("sm90", "tiled"):
        with flash_attn.use_backend(backend):
            results.append(
                flash_attn.flash_attn_with_kvcache(
                    given["q"], given["k"], given["v"], cache_seqlens=lengths
                ).float()
            )
    assert (results[0][0] == 0).all() and results[0].isfinite().all()
    assert rms(results[0], results[1]) < 0.03 * results[1].square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_long_rows_on_kernels(on_kernels, headdim, kind):
    """Sums of many products lose at most 0.5 % of a mean. (`tiled` adds in float32.)"""
    q, k, v = (randn(1, n, 2, headdim, device=on_kernels) for n in (256, 32768, 32768))
    v = v + 0.5  # or errors of sums would cancel as the sums do
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v))
    ).transpose(1, 2)
    if kind == "e4m3":
        quantised, descales = zip(*map(quantize, (q, k, v)), strict=True)
        names = ("q_descale", "k_descale", "v_descale")
        run = lambda: flash_attn_func(*quantised, **dict(zip(names, descales, strict=True)))  # noqa: E731
    else:
        run = lambda: flash_attn_fp8_func(*(x.bfloat16() for x in (q, k, v)), level=kind)  # noqa: E731
    found = rms(run().double(), exact)
    with flash_attn.use_backend("tiled"):
        specified = rms(run().double(), exact)
    assert found < 1.25 * specified + 0.005 * 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_growing_scores_on_kernels(on_kernels, level):
    """Keys come from the last to the first: here each block outgrows the reference."""
    case = dense(1, 64, 1024, 2, 2, 128, device=on_kernels)
    growth = torch.linspace(8, 0.1, 1024, device=on_kernels)[:, None, None]
    check_level(replace(case, k=(case.k * growth).to(case.k.dtype)), level)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_largest_scores_on_kernels(on_kernels, headdim, level):
    """Exponents of 2 are rounded where they are large. That costs no row its sum."""
    size = (9e4 / headdim**0.5) ** 0.5  # of q and k: |q| |k| / sqrt(headdim) is 9e4
    q, k, v = (randn(1, 700, 2, headdim, device=on_kernels) for _ in "qkv")
    given = [x.bfloat16() for x in (q * size, k * size, v)]
    run = partial(flash_attn_fp8_func, *given, causal=True, level=level, return_softmax_lse=True)
    out, lse = run()
    with flash_attn.use_backend("tiled"):
        expected, expected_lse = run()
    torch.testing.assert_close(lse, expected_lse, rtol=2e-2, atol=20.0)
    assert rms(out.float(), expected.float()) < 0.15  # a row may take another of two like keys


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_scales_of_values_that_change(on_kernels, headdim, level):
    """What a row has so far is multiplied by their quotient: also sums of 1024 keys, and parts."""
    case = dense(1, 150, 2500, 2, 1, headdim, device=on_kernels, **BF16)
    exponents = torch.tensor([0, -13, -13, 9, 0, -30], device=on_kernels).repeat(4)[:20]
    sizes = torch.exp2(exponents.float()).repeat_interleave(128)[:2500]
    case = replace(case, v=(case.v * sizes[:, None, None]).bfloat16())
    for parts in (1, 3, APART - 3):
        with cuda.changed_setting("num_splits", parts):
            check_level(case, level)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_operation_of_pytorch(on_kernels, passes, kind):
    q = randn(1, 70, 2, 64, device=on_kernels)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        flash_attn_func(*[q.to(FP8)] * 3) if kind == "e4m3" else flash_attn_fp8_func(
            *[q.bfloat16()] * 3, level=kind
        )
    quantises = [] if kind == "e4m3" else ["quantise"]
    assert [operation for operation, _ in passes] == [*quantises, "quantised"]
    kernels = [x.name for x in profile.events() if "sm90" in x.name and "_kernel" in x.name]
    # Beside so few keys the forward transposes values of e4m3.
    wanted = ["forward_kernel"] if kind == "e4m3" else ["quantise_kernel", "forward_kernel"]
    for name in wanted:
        assert sum(name in kernel for kernel in kernels) == 1
    assert len(kernels) == len(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_runs_are_alike_on_kernels(on_kernels, headdim, heads, kind):
    """Bit for bit, also from a CUDA graph, and whatever an earlier launch has left in rows of tiles
    that three heads do not fill."""
    q = randn(2, 300, heads[0], headdim, device=on_kernels)
    k, v = (randn(2, 300, heads[1], headdim, device=on_kernels) for _ in "kv")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kind == "e4m3":
            return flash_attn_func(q.to(FP8), k.to(FP8), v.to(FP8), causal=True)
        return flash_attn_fp8_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), level=kind)

    def run() -> Tensor:
        return attend(q, k, v)

    expected = run()
    for size in (1.0, 30.0, 400.0):
        attend(*(size * randn(4, 300, 8, headdim, device=on_kernels) for _ in "qkv"))
        assert torch.equal(run(), expected)
    graph, result = captured(run)
    result.zero_()
    graph.replay()
    assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_packed_sequences_do_not_meet(on_kernels, headdim, level):
    """A sequence has the bits that it has alone, also where its last tile has rows of the next."""
    lengths = [300, 77, 150]
    q = randn(sum(lengths), 6, headdim, device=on_kernels).bfloat16()
    k, v = (randn(sum(lengths), 2, headdim, device=on_kernels).bfloat16() for _ in "kv")

    def attend(rows: slice, lengths: list[int], size: float = 1.0) -> Tensor:
        cu_seqlens = int32([0, *accumulate(lengths)], on_kernels)
        bounds = (cu_seqlens, cu_seqlens, max(lengths), max(lengths))
        mine = q[rows].clone()
        mine[lengths[0] :] *= size
        return flash_attn_fp8_varlen_func(mine, k[rows], v[rows], *bounds, causal=True, level=level)

    with cuda.changed_setting("num_splits", 1):
        alone = attend(slice(0, 300), [300])
        for size in (1.0, 50.0):
            assert torch.equal(attend(slice(None), lengths, size)[:300], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("features", ["plain", "everything"])
def test_each_fp8_kernel_for_the_sanitizer(on_kernels, features, headdim, kind):
    options = without_dropout(features, 2, 2, on_kernels)
    for parts in (1, 2, APART - 2):
        with cuda.changed_setting("num_splits", parts):
            check(dense(2, 70, 300, 2, 1, headdim, device=on_kernels, **options), kind)
