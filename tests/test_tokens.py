"""Kernels that move tokens: rotary and append give PyTorch's bits, merging nearly does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import NAN, captured, dtype_name, int32, randn, random_pages
from test_kvcache import rotary_tables
from test_repeated_calls import launches_of
from torch import Tensor

import flash_attn
from flash_attn import _backends, _ops, _rotary
from flash_attn.layers.rotary import apply_rotary_emb_qkv_

DEVICE = "cuda"
DTYPES = [torch.float16, torch.bfloat16]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available() or flash_attn.available_backends(DEVICE) == ["tiled"]:
        pytest.skip("no kernels here")


# ---- rotary embedding ----------------------------------------------------------------------------

# (pairs, head dim): whole heads, parts of them, and pairs that are not moved 16 bytes at a time.
PAIRS = [(32, 64), (64, 128), (16, 64), (40, 80), (10, 64), (9, 18), (128, 256), (48, 96), (1, 2)]
PLACES = {
    "dense": {},
    "offset": {"seqlen_offsets": 7},
    "offsets": {"seqlen_offsets": int32([0, 30, 1000])},  # the last is outside of the tables
    "long": {"seqlen_offsets": torch.tensor([3, 4, 5])},
    "packed": {"cu_seqlens": int32([2, 9, 9, 30]), "max_seqlen": 21},
    "packed offsets": {
        "cu_seqlens": int32([0, 20, 33, 33]),
        "max_seqlen": 20,
        "seqlen_offsets": int32([5, 0, 2]),
    },
}


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}


def tokens(options: dict[str, Any], headdim: int, dtype: torch.dtype, nheads: int = 5) -> Tensor:
    shape = (36,) if "cu_seqlens" in options else (3, 12)
    return randn(*shape, nheads, headdim, dtype=dtype, device=DEVICE)


def both(function: Any, *tensors: Tensor) -> tuple[Any, Any]:
    """What the function returns by a kernel and by PyTorch, each from copies."""
    ours = function(*(x.clone() for x in tensors))
    with flash_attn.use_backend("tiled"):
        return ours, function(*(x.clone() for x in tensors))


@pytest.mark.parametrize("float_tables", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("pairs, headdim", PAIRS)
def test_rotary_bits(pairs, headdim, places, dtype, interleaved, float_tables):
    if float_tables and dtype == torch.float32:
        pytest.skip("they are")
    options = {"interleaved": interleaved, **on_gpu(places)}
    cos, sin = rotary_tables(50, 2 * pairs, torch.float32 if float_tables else dtype, DEVICE)
    x = tokens(options, headdim, dtype)
    for conjugate in (False, True):
        for inplace in (False, True):

            def rotated(x: Tensor, conjugate: bool = conjugate, inplace: bool = inplace) -> Tensor:
                out = _rotary.apply_rotary(
                    x, cos, sin, **options, conjugate=conjugate, inplace=inplace
                )
                assert (out is x) == inplace
                return out

            ours, expected = both(rotated, x)
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
def test_rotary_runs_by_a_kernel(dtype):
    x, (cos, sin) = tokens({}, 64, dtype), rotary_tables(50, 64, torch.float32, DEVICE)
    known = vars(_rotary._run_kernel)["launches"]
    known.clear()
    for _ in range(2):
        _rotary.apply_rotary(x, cos, sin)
    assert len(known) == 1


def test_writes_are_counted():
    """What autograd has saved must not change unnoticed: in place, and in the cache."""
    cos, sin = rotary_tables(50, 64, torch.bfloat16, DEVICE)
    x = tokens({}, 64, torch.bfloat16)
    step = Step([5, 40, 0])
    for _ in range(2):
        before = [y._version for y in (x, *step.caches)]
        _rotary.apply_rotary(x, cos, sin, inplace=True)
        step(*step.caches)
        assert [y._version for y in (x, *step.caches)] == [version + 1 for version in before]
    with torch.inference_mode():
        _rotary.apply_rotary(x.clone(), cos, sin, inplace=True)
        step(*(y.clone() for y in step.caches))


def test_rotary_in_place_again():
    """A call like an earlier one writes to its own tensor."""
    cos, sin = rotary_tables(50, 64, torch.bfloat16, DEVICE)
    for _ in range(3):
        x = tokens({}, 64, torch.bfloat16)
        before, expected = x.clone(), _rotary.apply_rotary(x, cos, sin)
        other = _rotary.apply_rotary(before, cos, sin, inplace=True)
        assert other is before and torch.equal(other, expected)


@pytest.mark.parametrize("nheads", [1, 3, 4, 17, 40])
def test_rotary_of_strided_tokens(nheads):
    """Views of a packed tensor and of transposed heads; what is around them stays."""
    cos, sin = rotary_tables(50, 64, torch.bfloat16, DEVICE)
    qkv = randn(2, 30, 3, nheads, 64, dtype=torch.bfloat16, device=DEVICE)
    ours, expected = both(lambda x: apply_rotary_emb_qkv_(x, cos, sin), qkv)
    assert torch.equal(ours, expected)
    heads_first = randn(2, nheads, 30, 64, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
    odd = randn(2, 30, nheads, 65, dtype=torch.bfloat16, device=DEVICE)[..., 1:]
    for x in (heads_first, odd):
        ours, expected = (
            _rotary.apply_rotary(x, cos, sin),
            _rotary.rotate(x, cos[:30], sin[:30], False),
        )
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("places", ["offsets", "packed"])
def test_rotary_gradient(places, inplace):
    options = on_gpu(PLACES[places])
    cos, sin = rotary_tables(50, 32, torch.bfloat16, DEVICE)
    x, dout = (tokens(options, 64, torch.bfloat16) for _ in range(2))

    def gradient(x: Tensor, dout: Tensor) -> Tensor:
        x.requires_grad_()
        out = _rotary.apply_rotary(x * 1, cos, sin, **options, inplace=inplace)
        return torch.autograd.grad(out, x, dout)[0]

    ours, expected = both(gradient, x, dout)
    assert torch.equal(ours, expected)


# ---- append --------------------------------------------------------------------------------------

CACHES = {
    "dense": {},
    "batch index": {"cache_batch_idx": [5, 0, 3]},
    "hostile index": {"cache_batch_idx": [5, -1, 7]},
    "pages of 1": {"page_size": 1},
    "pages of 16": {"page_size": 16},
    "pages of 17": {"page_size": 17},
    "hostile pages": {"page_size": 16, "hostile": True},
}


class Step:
    """A call that appends, with tensors of its own."""

    def __init__(
        self,
        lengths: list[int],
        seqlen_q: int = 2,
        seqlen_new: int = 2,
        headdim: int = 64,
        headdim_v: int | None = None,
        rotary_dim: int = 64,
        cache_batch_idx: list[int] | None = None,
        page_size: int | None = None,
        hostile: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        batch, nheads, nheads_kv, capacity = len(lengths), 8, 2, 96
        headdim_v = headdim_v or headdim

        def random(*shape: int) -> Tensor:
            return randn(*shape, dtype=dtype, device=DEVICE)

        self.table = None
        rows = (6, capacity)
        if page_size is not None:
            pages = -(-capacity // page_size)
            self.table = random_pages(batch, pages, DEVICE)
            rows = (int(self.table.max()) + 1, page_size)
            if hostile:
                self.table[1, 1:] = 2**31 - 1
                self.table[2, :1] = -5
        self.q = random(batch, seqlen_q, nheads, headdim)
        self.new = (
            random(batch, seqlen_new, nheads_kv, headdim),
            random(batch, seqlen_new, nheads_kv, headdim_v),
        )
        self.caches = random(*rows, nheads_kv, headdim), random(*rows, nheads_kv, headdim_v)
        self.lengths = int32(lengths, DEVICE)
        self.slots = None if cache_batch_idx is None else int32(cache_batch_idx, DEVICE)
        if self.slots is None and page_size is None:
            self.caches = self.caches[0][:batch], self.caches[1][:batch]
        self.tables = rotary_tables(capacity + 8, rotary_dim, dtype, DEVICE) if rotary_dim else ()
        self.options = options

    def __call__(self, *caches: Tensor) -> tuple[Tensor, ...]:
        out = flash_attn.flash_attn_with_kvcache(
            self.q,
            *caches,
            *self.new,
            *(self.tables or (None, None)),
            cache_seqlens=self.lengths,
            cache_batch_idx=self.slots,
            block_table=self.table,
            **{"causal": True, **self.options},
        )
        return out, *caches


def assert_same(
    ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], hostile: bool = False
) -> None:
    """What is attended to where an index is outside of the cache is nowhere promised."""
    out, *caches = ours
    expected_out, *expected_caches = expected
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        assert torch.equal(cache, expected_cache)
    if not hostile:
        torch.testing.assert_close(out, expected_out, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"rotary_interleaved": False},
        {"rotary_dim": 32, "seqlen_new": 1},
        {"rotary_dim": 20, "dtype": torch.float16},
        {"rotary_dim": 0, "headdim_v": 32},
        {"window_size": (20, 5), "causal": False, "seqlen_q": 9, "seqlen_new": 5},
        {"headdim": 128, "rotary_dim": 128, "seqlen_q": 1, "seqlen_new": 30},
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_append_bits(cache, options):
    """Of three sequences one is not in use, and one has no room for all of its new keys."""
    for lengths in ([11, -1, 0], [90, 30, 95], [2**31 - 1, 5, -(2**31)]):
        step = Step(lengths, **cache, **options)
        hostile = "hostile" in cache or -1 in cache.get("cache_batch_idx", ())
        assert_same(*both(step, *step.caches), hostile)


def test_append_is_one_more_launch():
    """A step like an earlier one is launched again, with the lengths as they are now."""
    step = Step([5, 40, 0])
    launches = launches_of(_ops.flash_attn_with_kvcache)
    launches.clear()
    ours, expected = step.caches, tuple(x.clone() for x in step.caches)
    for _ in range(4):
        result = step(*ours)
        with flash_attn.use_backend("tiled"):
            reference = step(*expected)
        assert_same(result, reference)
        step.lengths += 2
        step.q.normal_()
        for x in step.new:
            x.normal_()
    assert [type(x).__name__ for x in launches.values()] == ["LaunchPair"]


@pytest.mark.parametrize("batch", [1, 4, 5])
@pytest.mark.parametrize("page_size", [None, 16])
def test_attention_that_starts_while_the_append_runs(batch, page_size):
    """It reads what the kernels before the append wrote, and what the append writes."""
    capacity, nheads_kv, headdim, new = 2048, 2, 128, 3
    table = None if page_size is None else random_pages(batch, capacity // page_size, DEVICE)
    rows = (batch, capacity) if table is None else (int(table.max()) + 1, page_size)
    caches = randn(2, *rows, nheads_kv, headdim, dtype=torch.bfloat16, device=DEVICE)
    tables = rotary_tables(capacity, headdim, torch.bfloat16, DEVICE)
    lengths = int32([0] * batch, DEVICE)
    calls = []
    for i in range(60):
        caches.normal_()  # the next call starts before this has ended
        q = randn(batch, new, 8, headdim, dtype=torch.bfloat16, device=DEVICE)
        k, v = randn(2, batch, new, nheads_kv, headdim, dtype=torch.bfloat16, device=DEVICE)
        before = caches.clone(), lengths.clone()
        options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
        out = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, *tables, **options)
        calls.append((out, caches.clone(), before, (q, k, v)))
        lengths.random_(-1, capacity - i)
    for out, after, (old, used), (q, k, v) in calls:
        with flash_attn.use_backend("tiled"):
            options = {"cache_seqlens": used, "block_table": table, "causal": True}
            expected = flash_attn.flash_attn_with_kvcache(q, *old, k, v, *tables, **options)
        assert_same((out, *after), (expected, *old))


def test_append_in_a_graph():
    step = Step([5, 40, 0], page_size=16)
    ours, expected = step.caches, tuple(x.clone() for x in step.caches)
    step(*(x.clone() for x in ours))
    graph, (out, *_) = captured(lambda: step(*ours))
    for x, y in zip(ours, expected, strict=True):
        x.copy_(y)
    for _ in range(3):
        graph.replay()
        with flash_attn.use_backend("tiled"):
            reference = step(*expected)
        assert_same((out, *ours), reference)
        step.lengths += 3
        step.table.copy_(step.table.flip(0))
        step.q.normal_()


def test_nan_in_the_cache_stays_there():
    step = Step([5, 40, 0])
    for x in step.caches:
        x[0, 7:], x[1, 42:], x[2, 2:] = NAN, NAN, NAN
    out, *_ = step(*step.caches)
    assert out.isfinite().all()


# ---- merge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("in_float32", [False, True], ids=["16 bits", "float32"])
@pytest.mark.parametrize("nheads, headdim", [(1, 8), (5, 64), (16, 128), (37, 72), (3, 33)])
def test_merge(nheads: int, headdim: int, in_float32: bool, dtype: torch.dtype) -> None:
    """Into some rows of a result; the others stay as they are."""
    shape, rows = (2, 50, nheads, headdim), slice(7, 40)
    out = randn(*shape, dtype=torch.float32 if in_float32 else dtype, device=DEVICE)
    part = randn(2, 33, nheads, headdim, dtype=dtype, device=DEVICE)
    lse, part_lse = (8 * randn(2, nheads, n, dtype=torch.float32, device=DEVICE) for n in (50, 33))
    lse[0, 0, 10], part_lse[1, 0, 5] = -torch.inf, -torch.inf  # no key of the one, of the other
    lse[1, 0, 20], part_lse[1, 0, 13] = -torch.inf, -torch.inf  # of both
    part_lse[0, 0, 2] = NAN

    def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        _backends.merge_into(out[:, rows], lse[:, :, rows], part, part_lse)
        return out, lse

    backend = flash_attn.available_backends(DEVICE)[0]
    assert _backends.cuda.merges(out[:, rows], lse[:, :, rows], part, part_lse, backend)
    ours, theirs = both(merged, out, lse)
    tolerances = {"rtol": 1e-5 if in_float32 else 1e-2, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(ours, theirs, **tolerances)
    assert ours[1][0, 0, 9].isnan() and ours[1][1, 0, 20] == -torch.inf
    assert ours[0][1, 20, 0].eq(0).all()
