"""Decoding with a KV cache: append, rotary embedding, every cache layout, padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    NAN,
    OPTIONS,
    assert_guard_intact,
    captured,
    default_dtype,
    dtype_name,
    guarded,
    int32,
    options_of,
    randn,
    random_pages,
    since_torch,
)
from oracle import (
    Attention,
    Decode,
    Expected,
    Storage,
    assert_close_to_oracle,
    expect,
    index_of,
    on_host,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn
from flash_attn import flash_attn_with_kvcache


def rotary_tables(
    seqlen: int, rotary_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
    angles = torch.arange(seqlen, device=device)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def decode(
    cache_seqlens: list[int],
    seqlen_q: int = 1,
    seqlen_new: int = 1,
    capacity: int = 40,
    nheads: int = 4,
    nheads_kv: int = 2,
    headdim: int = 32,
    headdim_v: int | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    page_size: int | None = None,
    cache_batch_idx: list[int] | None = None,
    leftpad: list[int] | None = None,
    rotary_dim: int = 0,
    rotary_interleaved: bool = True,
    **options: Any,
) -> Decode:
    """A random decoding call; its cache is a view in a NaN tensor, and NaN where not in use."""
    batch = len(cache_seqlens)
    headdim_v = headdim_v or headdim
    dtype = dtype or default_dtype()
    storage = Storage()
    slots, rows = batch, capacity
    if page_size is not None:
        storage.block_table = random_pages(batch, -(-capacity // page_size), device)
        slots, rows = storage.block_table.numel() + 2, page_size
        storage.block_table[[length < 0 for length in cache_seqlens]] = -1
    if cache_batch_idx is not None:
        slots = max(cache_batch_idx) + 2
        storage.cache_batch_idx = int32(cache_batch_idx, device)
    if leftpad is not None:
        storage.leftpad = int32(leftpad, device)
    q = randn(batch, seqlen_q, nheads, headdim, dtype=dtype, device=device)
    k, v = (
        guarded(torch.full((slots, rows, nheads_kv, d), NAN, dtype=dtype, device=device))
        for d in (headdim, headdim_v)
    )
    lengths = int32(cache_seqlens, device)
    problem = Attention(q, k, v, storage=storage, **options)
    in_use = replace(storage, seqused=lengths).on_host()
    for b in range(batch):
        keys = index_of(k, in_use.keys(k, b))
        k[keys], v[keys] = torch.randn_like(k[keys]), torch.randn_like(v[keys])
    case = Decode(problem, lengths)
    if seqlen_new:
        case.k_new = randn(batch, seqlen_new, nheads_kv, headdim, dtype=dtype, device=device)
        case.v_new = randn(batch, seqlen_new, nheads_kv, headdim_v, dtype=dtype, device=device)
    if rotary_dim:
        # The host does not know lengths that lie on a GPU: a row for all that fits.
        whole = capacity if page_size is None else -(-capacity // page_size) * page_size
        tables = rotary_tables(whole + max(seqlen_q, seqlen_new), rotary_dim, dtype, device)
        case.rotary_cos, case.rotary_sin = tables
        case.rotary_interleaved = rotary_interleaved
    return case


def call(case: Decode, **more: Any) -> tuple[Tensor, Tensor]:
    """out and lse of the library; its caches are those of the case, updated in place."""
    problem = case.attention
    options = options_of(problem)
    del options["dropout_p"]
    storage = problem.storage
    arguments = {
        "k": case.k_new,
        "v": case.v_new,
        "rotary_cos": case.rotary_cos,
        "rotary_sin": case.rotary_sin,
        "cache_seqlens": case.cache_seqlens,
        "cache_batch_idx": storage.cache_batch_idx,
        "cache_leftpad": storage.leftpad,
        "block_table": storage.block_table,
        "rotary_interleaved": case.rotary_interleaved,
        "return_softmax_lse": True,
        "k_descale": problem.k_descale,
        "v_descale": problem.v_descale,
    }
    arguments |= options | more
    return flash_attn_with_kvcache(problem.q, problem.k, problem.v, **arguments)


def check(case: Decode, **more: Any) -> None:
    """Compare out, lse and the caches with the oracle's; nothing else in the caches may change."""
    problem = case.attention
    # Caches as they were, outside of the NaN that surrounds the caches that the library updates.
    before = replace(case, attention=replace(problem, k=problem.k.clone(), v=problem.v.clone()))
    out, lse = call(case, **more)
    expected = expect(before)
    assert_close_to_oracle(out, expected["out"], "out")
    assert_close_to_oracle(lse, expected["lse"], "lse")

    exact = before.to(torch.float64)
    naive = before.to(problem.q.dtype)
    appended = torch.zeros(problem.k.shape[:2], dtype=torch.bool)
    for places in case.appended():
        for place in places:
            appended[place] = True
    for name in ("k", "v"):
        cache, old = on_host(getattr(problem, name)), on_host(getattr(before.attention, name))
        new = [getattr(result, name)[appended] for result in (exact, naive)]
        if new[0].numel():
            ulp = new[0].abs().max().item() * torch.finfo(cache.dtype).eps
            assert_close_to_oracle(cache[appended], Expected(*new, ulp), f"{name}_cache")
        if name == "v" or case.rotary_cos is None:
            assert torch.equal(cache[appended], new[1]), f"{name}_cache: not the bits appended"
        kept, was = (x[~appended] for x in (cache, old))
        same = (kept == was) | (kept.isnan() & was.isnan())
        assert same.all(), f"{name}_cache: changed where nothing was appended"
        assert_guard_intact(getattr(problem, name))


def check_graph(case: Decode, *lengths: list[int]) -> None:
    """A captured call, replayed with each of these ``cache_seqlens``, has the bits of a new one."""
    graph, results = captured(lambda: call(case))
    for now in lengths:
        case.cache_seqlens.copy_(int32(now))
        for x in results:
            x.fill_(NAN)
        graph.replay()
        for found, expected in zip(results, call(case), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "dropout"])
def test_options(device, options, dtype):
    options = OPTIONS[options](3, 4, device) | {"dropout_p": 0.0}
    check(decode([0, 7, 33], seqlen_q=5, seqlen_new=5, dtype=dtype, device=device, **options))


@pytest.mark.parametrize("seqlen_q, seqlen_new", [(1, 0), (1, 1), (4, 0), (4, 4), (2, 7), (7, 2)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_append(device, seqlen_q, seqlen_new, causal):
    lengths = [0, 1, 13, 33]
    check(decode(lengths, seqlen_q, seqlen_new, device=device, causal=causal))


@pytest.mark.parametrize("rotary_dim", [16, 32])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("masked", [{}, {"causal": True}, {"window_size": (5, 2)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_name)
def test_rotary(device, rotary_dim, interleaved, masked, dtype):
    rotary = {"rotary_dim": rotary_dim, "rotary_interleaved": interleaved}
    check(decode([0, 9, 36], 3, 4, dtype=dtype, device=device, **rotary, **masked))


def test_rotary_is_interleaved_by_default(device):
    case = decode([3], rotary_dim=32, device=device)
    cache = case.attention.k
    flash_attn_with_kvcache(
        case.attention.q,
        cache,
        case.attention.v,
        case.k_new,
        case.v_new,
        case.rotary_cos,
        case.rotary_sin,
        case.cache_seqlens,
    )
    expected = case.to(torch.float64).k[0, 3].to(cache.dtype)
    torch.testing.assert_close(cache[0, 3].cpu(), expected)


def test_rotary_of_queries_alone(device):
    """New keys may be none."""
    case = decode([5, 33], 3, 0, rotary_dim=32, device=device, causal=True)
    none = case.attention.k.new_empty(2, 0, 2, 32)
    check(replace(case, k_new=none, v_new=none))


@pytest.mark.parametrize("paged", [False, True])
def test_one_row_or_page(device, paged):
    """A cache that has no more."""
    case = decode([33], 2, 2, capacity=64, leftpad=[3], device=device, causal=True)
    if paged:
        case.attention.storage.block_table = int32([[0]], device)
    check(case)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("rotary_dim", [0, 32])
def test_pages(device, page_size, rotary_dim):
    lengths = [0, 5, 77, 128]
    case = decode(
        lengths, 3, 3, 131, page_size=page_size, rotary_dim=rotary_dim, device=device, causal=True
    )
    check(case)


@pytest.mark.parametrize("page_size", [8])
def test_shared_pages(device, page_size):
    """Sequences with the same prefix share its pages."""
    case = decode([16, 16, 20], 1, 2, 24, page_size=page_size, device=device)
    table, problem = case.attention.storage.block_table, case.attention
    table[1, :2] = table[0, :2]
    check(replace(case, attention=problem))


@pytest.mark.parametrize("seqlen_new", [0, 2])
def test_cache_batch_idx(device, seqlen_new):
    check(decode([4, 11, 0], 2, seqlen_new, cache_batch_idx=[5, 0, 2], device=device, causal=True))


@pytest.mark.parametrize("page_size", [None, 8])
def test_leftpad(device, page_size):
    case = decode(
        [4, 11, 9],
        2,
        2,
        leftpad=[0, 3, 9],
        page_size=page_size,
        rotary_dim=16,
        device=device,
        causal=True,
    )
    check(case)


def test_leftpad_of_everything(device):
    """A left pad as long as the sequence leaves no key."""
    check(decode([4, 11], 2, 0, leftpad=[4, 5], device=device))


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("rotary_dim", [0, 32])
@pytest.mark.parametrize("lengths", [[5, -1, 30, -1], [-1, 30], [-1, -1]], ids=str)
@pytest.mark.parametrize("seqlen_new", [0, 1, 3])
def test_padded_rows(device, page_size, rotary_dim, lengths, seqlen_new):
    """cache_seqlens -1 (and pages -1) pads a batch: zeros come out and nothing is appended."""
    rotary_dim = rotary_dim if seqlen_new else 0
    options = {"page_size": page_size, "rotary_dim": rotary_dim, "causal": True}
    check(decode(lengths, 2, seqlen_new, device=device, **options))


@pytest.mark.parametrize("length", [0, 1, 20, 39])
def test_int_length(device, length):
    check(decode([length] * 3, rotary_dim=32, device=device), cache_seqlens=length)


def test_no_length_means_the_whole_cache(device):
    case = decode([40] * 3, 2, 0, device=device, causal=True)
    check(case, cache_seqlens=None)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_num_splits_changes_nothing(device, num_splits):
    check(decode([5, 33], device=device), num_splits=num_splits)


def test_head_dim_of_v(device):
    check(decode([5, 33], 2, 2, headdim=24, headdim_v=40, device=device, causal=True))


@pytest.mark.parametrize("seqlen_q", [0, 2])
@pytest.mark.parametrize("lengths", [[], [3, 0]], ids=str)
def test_empty(device, seqlen_q, lengths):
    check(decode(lengths, seqlen_q, 0, device=device))


def test_empty_rows_before_the_first_key(device):
    """More queries than keys: the first ones see nothing."""
    check(decode([0, 2, 5], 4, 1, device=device, causal=True))


def test_bare_tensor_by_default(device):
    case = decode([5, 33], 1, 0, device=device)
    out, lse = call(case)
    assert torch.equal(call(case, return_softmax_lse=False), out)
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 1)


def test_out_is_written_in_place(device):
    case = decode([5, 33], 3, 3, device=device, causal=True)
    out = guarded(torch.full_like(case.attention.q, NAN))
    check(case, out=out)
    exact = expect(replace(case, k_new=None, v_new=None, cache_seqlens=case.cache_seqlens + 3))
    assert_close_to_oracle(out, exact["out"], "out")
    assert_guard_intact(out)
    apart = torch.full((*out.shape, 2), NAN, dtype=out.dtype, device=device)[..., 0]
    call(case, out=apart)
    assert torch.equal(apart, out)


def failing_append(device: str, dtype: torch.dtype, **more: Any) -> None:
    """A call that appends and then cannot attend raises; its cache has to be as it was."""
    case = decode([3, 7], dtype=dtype, device=device)
    k, v = case.attention.k.clone(), case.attention.v.clone()
    with pytest.raises((ValueError, NotImplementedError)):
        call(case, **more)
    for cache, before in ((case.attention.k, k), (case.attention.v, v)):
        torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


def test_wrong_out_leaves_the_cache(device):
    dtype = default_dtype()
    failing_append(device, dtype, out=torch.empty(1, dtype=dtype, device=device))


def test_wrong_out_leaves_the_cache_where_a_gradient_is_wanted(device):
    case = decode([3, 7], dtype=default_dtype(), device=device)
    problem = replace(case.attention, q=case.attention.q.requires_grad_())
    before = problem.k.clone()
    with pytest.raises(ValueError, match="out must have shape"):
        call(replace(case, attention=problem), out=problem.q.new_empty(3, 1, 4, 32))
    torch.testing.assert_close(problem.k, before, rtol=0, atol=0, equal_nan=True)


def test_backend_that_cannot_leaves_the_cache(device):
    with flash_attn.use_backend("sm80"):
        failing_append(device, torch.float32)


@since_torch(2, 5, "the compiler takes named tuples like Options")
def test_wrong_out_is_refused_by_the_operator_too(device):
    """A larger out would otherwise be filled by broadcasting."""
    q = randn(1, 4, 2, 16, device=device)
    step = torch.compile(flash_attn.flash_attn_func, backend="eager")
    with pytest.raises(ValueError, match="out must have shape"):
        step(q, q, q, out=torch.empty(3, 4, 2, 16, device=device))


def test_decoding_token_by_token_equals_one_pass(device):
    """A whole sequence at once, causally, and one token after another through a cache."""
    seqlen, capacity = 20, 24
    case = decode([0, 0], seqlen, seqlen, capacity, rotary_dim=32, device=device, causal=True)
    problem = case.attention
    at_once = expect(case)["out"]
    for t in range(seqlen):
        step = replace(
            case,
            attention=replace(problem, q=problem.q[:, t : t + 1]),
            k_new=case.k_new[:, t : t + 1],
            v_new=case.v_new[:, t : t + 1],
            cache_seqlens=torch.full_like(case.cache_seqlens, t),
        )
        out, _ = call(step)
        row = Expected(at_once.exact[:, t : t + 1], at_once.naive[:, t : t + 1], at_once.ulp)
        assert_close_to_oracle(out, row, f"token {t}")


def test_lengths_beyond_the_cache_are_clamped(device):
    """Lengths on the device are not checked, but never lead outside the cache."""
    if device == "cpu":
        pytest.skip("lengths on the host are checked instead")
    case = decode([5, 33], 1, 1, device=device)
    out, _ = call(case, cache_seqlens=int32([100000, 39], device))
    assert out.shape == case.attention.q.shape
    assert_guard_intact(case.attention.k)
    assert_guard_intact(case.attention.v)


def test_rotary_table_for_the_cache_is_enough(device):
    """With a mask and more queries than new keys: a row for each place that is in use is asked for.

    Of lengths that the host does not know none may need more than the cache has places.
    """
    case = decode([0, 3, 33], 7, 2, 40, rotary_dim=16, device=device, window_size=(9, 0))
    tables = case.rotary_cos[:40], case.rotary_sin[:40]
    check(replace(case, rotary_cos=tables[0], rotary_sin=tables[1]))


def test_rotary_table_where_lengths_are_not_known():
    def decode_with(rows: int) -> Tensor:
        cache, new, table = randn(3, 40, 2, 32), randn(3, 2, 2, 32), randn(rows, 8)
        arguments = randn(3, 7, 4, 32), cache, cache, new, new, table, table, int32([0, 3, 33])
        with FakeTensorMode() as mode:  # which has no values, as the host has none of a GPU's
            return flash_attn_with_kvcache(*map(mode.from_tensor, arguments), window_size=(9, 0))

    assert decode_with(40).shape == (3, 7, 4, 32)
    with pytest.raises(ValueError, match="rotary_cos must have a row for each of 40 positions"):
        decode_with(39)
