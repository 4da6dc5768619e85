"""The decode kernels of each backend, forced: few queries, keys in all places, divided keys.

What lies in no sequence is NaN: the slack of caches, pages that are not in use, left pads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import KERNELS, decode_fixture, device_fixture
from helpers import (
    NAN,
    NO_DROPOUT,
    assert_counters_are_zero,
    check,
    check_bits,
    dense,
    dtype_name,
    in_pages,
    int32,
    kernels_forced,
    misaligned,
    randn,
    run,
    splits,
    varlen,
    without_dropout,
)
from oracle import Decode, index_of
from test_kernels import BEYOND, HALF, of_each_kernel
from test_kvcache import call as call_kvcache
from test_kvcache import check as check_kvcache
from test_kvcache import check_graph, decode
from test_repeated_calls import prepared

import flash_attn
from flash_attn import _ops
from flash_attn._backends import cuda

pytestmark = pytest.mark.gpu

device = device_fixture(*KERNELS)
decode_kernel = decode_fixture(True)

BF16 = {"dtype": torch.bfloat16}
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 129, 300]
PAGE_SIZES = [None, 1, 16, 17, 64, 256]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 1)},
    "window-0": {"window_size": (0, 0)},
}


def tile_count(headdims: tuple[int, int]) -> int:
    rows = [
        x
        for x in cuda._KERNELS
        if (x.operation, x.backend) == ("decode", kernels_forced())
        and (x.headdim, x.headdim_v) == headdims
    ]
    return rows[0].tiles


@of_each_kernel
@pytest.mark.parametrize("dtype", HALF, ids=dtype_name)
@pytest.mark.parametrize("features", ["plain", "everything"])
def test_each_kernel_for_the_sanitizer(device, features, dtype, headdims):
    """Each tile shape, whole and divided keys."""
    options = without_dropout(features, 3, 8, device) | {"dtype": dtype, "device": device}
    sizes = {"nheads": 8, "nheads_kv": 2, "headdim": headdims[0], "headdim_v": headdims[1]}
    for seqlen_q, parts in ((1, 1), (3, 3), (5, 2)):
        case = decode([0, 20, 300], seqlen_q, 0, 301, **sizes, **options)
        for tile in (-1, tile_count(headdims) - 1):
            with cuda.changed_setting("tile", tile), splits(parts):
                check_kvcache(case)


@of_each_kernel
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("options", NO_DROPOUT)
def test_options(device, options, page_size, headdims):
    sizes = {"nheads": 8, "nheads_kv": 2, "headdim": headdims[0], "headdim_v": headdims[1]}
    given = without_dropout(options, 3, 8, device) | BF16
    given |= {"page_size": page_size, "device": device}
    for parts in (0, 1, 3):
        with splits(parts):
            check_kvcache(decode([0, 33, 250], 3, 0, 260, **sizes, **given))
            check_kvcache(decode([7, 130, 0], 6, 0, 260, **sizes, **given))


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16, 32])
@pytest.mark.parametrize("options", ["causal", "window", "sinks", "everything"])
def test_rows(device, options, group, headdim):
    """Rows are pairs of a query and a head of the group: each keeps its mask, slope and sink."""
    for seqlen_q in {1, 2, 3, 32 // group}:
        given = without_dropout(options, 2, 2 * group, device) | BF16 | {"device": device}
        sizes = {"nheads": 2 * group, "nheads_kv": 2, "headdim": headdim}
        check_kvcache(decode([3, 140], seqlen_q, 0, 150, **sizes, **given))


@of_each_kernel
@pytest.mark.parametrize("mask", MASKS)
def test_more_rows_than_a_tile(device, mask, headdims):
    """Other thread blocks take them; sequences of a batch have as many tiles as the longest."""
    options = BF16 | {"device": device, **MASKS[mask]}
    for parts in (1, 4):
        with splits(parts):
            problem = dense(2, 21, 150, 15, 3, *headdims, **options)
            check(problem, backward=False)
            problem = varlen([1, 30, 0, 7], [200, 33, 5, 0], 6, 2, *headdims, **options)
            check(problem, backward=False)


@of_each_kernel
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_each_tile(device, page_size, headdims):
    """Each tile shape, whole and divided keys."""
    sizes = {"nheads": 8, "headdim": headdims[0], "headdim_v": headdims[1], "page_size": page_size}
    cases = [
        decode([0, 33, 600], seqlen_q, 0, 610, **sizes, device=device, causal=True, **BF16)
        for seqlen_q in (1, 5)
    ]
    for tile in range(tile_count(headdims)):
        for parts in (1, 3, 16, 40):
            with cuda.changed_setting("tile", tile), splits(parts):
                for case in cases:
                    check_kvcache(case)


@pytest.mark.parametrize("headdim", [32, 64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_lengths(device, page_size, mask, headdim):
    sizes = {"nheads": 8, "nheads_kv": 2, "headdim": headdim, "page_size": page_size}
    for seqlen_q in (1, 4):
        case = decode(LENGTHS, seqlen_q, 0, 301, **sizes, **BF16, device=device, **MASKS[mask])
        for parts in (1, 2, 5):
            with splits(parts):
                check_kvcache(case)


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("parts", [0, 1, 2, 3, 7, 16, 1000])
def test_splits(device, parts, page_size, headdim):
    """More parts than blocks of keys, parts that a short sequence does not have."""
    sizes = {"nheads": 8, "nheads_kv": 2, "headdim": headdim, "page_size": page_size}
    case = decode([1000, 64, 0, 513], 2, 0, 1001, causal=True, **sizes, **BF16, device=device)
    with splits(parts):
        check_kvcache(case)
    assert_counters_are_zero()


@of_each_kernel
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlen_q", [3, 8, 20])
def test_rows_behind_an_append(device, seqlen_q, page_size, headdims):
    """Loads of older keys begin before the append has ended, of queries and new keys later."""
    sizes = {"nheads": 8, "nheads_kv": 1, "headdim": headdims[0], "headdim_v": headdims[1]}
    given = {"causal": True, "rotary_dim": 16, "page_size": page_size, "device": device, **BF16}
    case = decode([0, 1990, 700, 5], seqlen_q, seqlen_q, 2040, **sizes, **given)
    for parts in (0, 1, 3):
        with splits(parts):
            check_kvcache(case)


@pytest.mark.parametrize("headdim", [96, 128, 256])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("parts", [5, 13, 15, 16, 17, 24, 40])
def test_parts_of_several_clusters(device, parts, page_size, headdim):
    """Clusters that are full, that have fewer parts, or none; 1 to 40 rows."""
    for seqlen_q, nheads in ((1, 1), (2, 10), (2, 16), (5, 40)):
        sizes = {"nheads": nheads, "nheads_kv": -(-nheads // 8), "headdim": headdim}
        lengths = [2600, 64, 0, 1100, 1500]
        given = {"causal": True, "page_size": page_size, "device": device, **BF16}
        case = decode(lengths, seqlen_q, 0, 2601, **sizes, **given)
        with splits(parts):
            check_kvcache(case)
    assert_counters_are_zero()


def test_batches_of_several_launches(device):
    """Each launch has counters for so many parts of tiles alone."""
    sizes = {"nheads": 8, "nheads_kv": 8, "headdim": 64, "causal": True}
    case = decode([1300, 5, 1200] * 15, 1, 0, 1300, **sizes, **BF16, device=device)
    with splits(20):
        check_kvcache(case)
        together = call_kvcache(case)
        few = replace(case.attention, **{x: getattr(case.attention, x)[:3] for x in "qkv"})
        alone = call_kvcache(replace(case, attention=few, cache_seqlens=case.cache_seqlens[:3]))
    for x, y in zip(alone, together, strict=True):
        assert torch.equal(x, y[:3])
    assert_counters_are_zero()


@pytest.mark.parametrize("page_size", [None, 16, 17])
def test_left_pads_and_slots(device, page_size):
    given = {"nheads": 8, "headdim": 128, "device": device, **BF16, "causal": True}
    leftpad = [0, 3, 90, 131, 40]
    for parts in (1, 3):
        with splits(parts):
            case = decode([40, 130, 90, 260, 41], 4, 0, 270, leftpad=leftpad, **given)
            check_kvcache(replace(case) if page_size is None else paged(case, given, page_size))
            check_kvcache(decode([40, 0, 260], 4, 0, 270, cache_batch_idx=[5, 0, 2], **given))


def paged(case: Decode, given: dict[str, Any], page_size: int) -> Decode:
    lengths, leftpad = case.cache_seqlens.tolist(), case.attention.storage.leftpad.tolist()
    return decode(lengths, 4, 0, 270, leftpad=leftpad, page_size=page_size, **given)


@of_each_kernel
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_packed_queries(device, options, page_size, headdims):
    """Rows of no sequence are cleared, whatever the parts."""
    given = without_dropout(options, 5, 4, device) | BF16 | {"device": device}
    problem = varlen([3, 1, 0, 8, 1], [5, 190, 70, 0, 257], 4, 2, *headdims, **given)
    problem = problem if page_size is None else in_pages(problem, page_size)
    for parts in (0, 1, 3):
        with splits(parts):
            check(problem, backward=False)


@pytest.mark.parametrize("headdims", [(8, 8), (40, 72), (80, 80), (160, 160), (200, 8)], ids=str)
@pytest.mark.parametrize("options", ["causal", "everything"])
def test_head_dims_between(device, options, headdims):
    given = without_dropout(options, 3, 8, device) | BF16 | {"device": device}
    sizes = {"nheads": 8, "nheads_kv": 2, "headdim": headdims[0], "headdim_v": headdims[1]}
    for parts in (1, 3):
        with splits(parts):
            check_kvcache(decode([0, 33, 250], 3, 0, 260, **sizes, **given))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("parts", [1, 4])
def test_keys_before_the_window_are_not_read(device, parts, page_size):
    """Servers give back the pages that a window has left."""
    case = decode(
        [300, 50],
        1,
        0,
        301,
        nheads=8,
        headdim=128,
        page_size=page_size,
        window_size=(40, 0),
        device=device,
        **BF16,
    )
    expected = call_kvcache(case)
    problem = case.attention
    storage = replace(problem.storage, seqused=case.cache_seqlens).on_host()
    for b, length in enumerate(case.cache_seqlens.tolist()):
        behind = index_of(problem.k, storage.keys(problem.k, b)[: length - 41])
        problem.k[behind] = problem.v[behind] = NAN
    with splits(parts):
        for found, result in zip(call_kvcache(case), expected, strict=True):
            assert found.isfinite().all()
            torch.testing.assert_close(found, result, rtol=1e-2, atol=1e-2)


def assert_mates_change_no_bit(case: Decode, **arguments: Any) -> None:
    """A sequence alone gives what it gives among others."""
    problem = case.attention
    together = call_kvcache(case, **arguments)
    for b in range(len(case.cache_seqlens)):
        table = problem.storage.block_table
        if table is None:
            alone = {"k": problem.k[b : b + 1], "v": problem.v[b : b + 1]}
        else:
            storage = replace(problem.storage, block_table=table[b : b + 1].contiguous())
            alone = {"storage": storage}
        one = replace(problem, q=problem.q[b : b + 1], **alone)
        lengths = case.cache_seqlens[b : b + 1]
        for x, y in zip(
            call_kvcache(replace(case, attention=one, cache_seqlens=lengths), **arguments),
            together,
            strict=True,
        ):
            assert torch.equal(x[0], y[b])


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("options", ["plain", "causal", "softcap", "alibi", "sinks"])
def test_batch_mates_change_no_bit(device, options, page_size, headdim):
    given = without_dropout(options, 4, 8, device) | BF16
    given |= {"device": device, "page_size": page_size}
    case = decode([777, 0, 1000, 65], 2, 0, 1001, nheads=8, headdim=headdim, **given)
    for parts in (1, 2, 6):
        with splits(parts):
            assert_mates_change_no_bit(case)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlen_q", [40, 300])
def test_batch_mates_of_forwards_change_no_bit(device, seqlen_q, page_size):
    """What num_splits fixes holds where rows are too many for a decode kernel."""
    given = BF16 | {"device": device, "page_size": page_size, "causal": True}
    lengths = [777, 0, 1000, 65, 130, 2, 999, 400]
    case = decode(lengths, seqlen_q, 0, 1001, nheads=8, headdim=128, **given)
    with cuda.changed_setting("decode", None):
        for parts in (1, 3, 40):
            assert_mates_change_no_bit(case, num_splits=parts)


@pytest.mark.parametrize("mask", MASKS)
def test_deterministic(device, mask):
    """Whoever is last merges, always in the same order."""
    problem = dense(2, 4, 1500, 8, 2, 128, device=device, **BF16, **MASKS[mask])
    with splits(9):
        check_bits(problem, 50)


def test_graph(device):
    """Replayed, with lengths that change in between."""
    case = decode([300, 5], 1, 0, 301, nheads=8, headdim=128, device=device, **BF16)
    with splits(4):
        check_graph(case, [300, 5], [1, 0], [64, 4])
    assert_counters_are_zero()


@pytest.mark.parametrize("page_size", [16])
@pytest.mark.parametrize("parts", [1, 3])
def test_pages_beyond_the_cache(device, parts, page_size):
    """What device memory says is clamped: nothing else is read."""
    case = decode([5, 33, 7], 3, 0, device=device, causal=True, page_size=page_size, **BF16)
    problem = case.attention
    problem.k.nan_to_num_(0.5), problem.v.nan_to_num_(0.5)
    problem.storage.block_table.copy_(int32([[BEYOND, 0, -1], [-BEYOND, 99, 8], [0, 1, 2]]))
    with splits(parts):
        out, lse = call_kvcache(case)
        assert out.isfinite().all() and lse.isfinite().all()
        call_kvcache(case, cache_seqlens=int32([BEYOND, -BEYOND, 41], device))


@pytest.mark.parametrize("parts", [1, 3])
def test_indices_beyond_the_cache(device, parts):
    case = decode([5, 33, 7], 3, 0, device=device, causal=True, **BF16)
    problem = case.attention
    problem.k.nan_to_num_(0.5), problem.v.nan_to_num_(0.5)
    with splits(parts):
        beyond = int32([BEYOND, 39, -BEYOND], device)
        for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad"):
            out, _ = call_kvcache(case, **{name: beyond})
            assert out.isfinite().all(), name


# ---- which calls run here ------------------------------------------------------------------------


def operations(seen: list[tuple[Any, dict[str, Any]]]) -> list[tuple[str, int]]:
    return [(kernel.operation, numbers["num_splits"]) for kernel, numbers in seen]


def test_few_rows_decode(device, monkeypatch):
    seen = prepared(monkeypatch, _ops.flash_attn_with_kvcache, _ops.flash_attn_forward)
    q, cache = (randn(2, n, 8, 64, device=device, **BF16) for n in (4, 70))
    with cuda.changed_setting("decode", None):
        flash_attn.flash_attn_with_kvcache(q, cache[:, :, :1], cache[:, :, :1])
        flash_attn.flash_attn_with_kvcache(q, cache[:, :, :1], cache[:, :, :1], num_splits=3)
        flash_attn.flash_attn_with_kvcache(q[:, :1], cache, cache)
        flash_attn.flash_attn_func(cache[:, :33], cache, cache)
        flash_attn.flash_attn_func(q, cache, cache, dropout_p=0.5)
    assert operations(seen[:3]) == [("decode", 0), ("decode", 3), ("decode", 0)]
    assert operations(seen[3:]) == [("forward", 0), ("forward", 0)]
    with cuda.changed_setting("decode", False):
        flash_attn.flash_attn_with_kvcache(q[:, :1], cache, cache, num_splits=3)
    assert operations(seen[-1:]) == [("forward", 3)]


def test_more_rows_decode(device, monkeypatch):
    """On sm90 while tiles are few, on sm80 where heads of a group fill them."""
    seen = prepared(monkeypatch, _ops.flash_attn_with_kvcache)
    q, cache = (randn(1, n, heads, 64, device=device, **BF16) for n, heads in ((16, 8), (33000, 1)))
    with cuda.changed_setting("decode", None):
        flash_attn.flash_attn_with_kvcache(q, cache, cache)
        flash_attn.flash_attn_with_kvcache(q, cache, cache, num_splits=1)
        flash_attn.flash_attn_with_kvcache(q, cache[:, :1000], cache[:, :1000])
        flash_attn.flash_attn_with_kvcache(torch.cat([q, q, q], 1), cache, cache)
        many = [x.expand(64, -1, -1, -1) for x in (q, cache)]
        flash_attn.flash_attn_with_kvcache(many[0], many[1], many[1])
    many_decode = "decode" if kernels_forced() == "sm80" else "forward"
    expected = ["decode", "forward", "forward", "forward", many_decode]
    assert [kernel.operation for kernel, _ in seen] == expected


def test_num_splits_of_the_caller(device):
    """It divides the keys as the setting does."""
    case = decode([300, 5], 1, 0, 301, nheads=8, headdim=128, device=device, **BF16)
    for parts in (1, 3, 2**40):
        check_kvcache(case, num_splits=parts)
    with splits(3):
        expected = call_kvcache(case)
    assert all(map(torch.equal, call_kvcache(case, num_splits=3), expected))


def test_what_it_does_not_take_is_refused(device):
    problem = dense(2, 3, 70, 4, 2, 64, device=device, dropout_p=0.5, **BF16)
    with pytest.raises(NotImplementedError, match="has no decode with dropout"):
        run(problem, backward=False)
    problem = dense(2, 3, 70, 4, 2, 64, device=device, **BF16)
    with pytest.raises(NotImplementedError, match="16 bytes"):
        run(replace(problem, k=misaligned(problem.k)), backward=False)
