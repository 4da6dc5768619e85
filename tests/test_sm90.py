"""What the sm90 kernels alone have: packed heads, thread blocks that take several tiles.

Their tensors are loaded by TMA, whose boxes reach over the ends of sequences: what lies beyond, in
other sequences, is NaN here.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import backend_params, decode_fixture, device_fixture
from helpers import (
    APART,
    NAN,
    OPTIONS,
    assert_counters_are_zero,
    assert_guard_intact,
    call,
    captured,
    check,
    check_bits,
    dense,
    dtype_name,
    in_pages,
    layout_of,
    misaligned,
    private_backward,
    private_forward,
    run,
    varlen,
)
from oracle import Attention, assert_matches_oracle
from test_divided_keys import check_caches, check_options, check_order, check_replays
from test_kernels import HALF, of_each_kernel
from torch import Tensor

import flash_attn
from flash_attn._backends import cuda

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent

device = device_fixture("cuda-sm90")
decode_kernel = decode_fixture(False)  # that kernel has test_decode.py


MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (40, 10)}}


# ---- what lies beside a sequence -----------------------------------------------------------------


@of_each_kernel
@pytest.mark.parametrize("mask", MASKS)
def test_neighbours_that_hold_nan(device, mask, headdims):
    """NaN in q, k or v of one sequence, or of one head, is not seen in another.

    (The oracle is NaN too where it has to be, which compares with nothing.)
    """
    options = {"dtype": torch.bfloat16, "device": device, **MASKS[mask]}
    packed = varlen([30, 5, 130, 9, 64], [70, 9, 130, 33, 100], 4, 2, *headdims, **options)
    start_q, start_k = packed.cu_seqlens_q.tolist(), packed.storage.cu_seqlens.tolist()
    for b, x, start in ((1, packed.k, start_k), (3, packed.v, start_k), (3, packed.q, start_q)):
        x[start[b] : start[b + 1]] = NAN
    check(packed, backward=False)

    problem = dense(3, 70, 150, 4, 2, *headdims, **options)
    problem.q[2, 33], problem.k[0, :, 1], problem.v[1, :, 0] = NAN, NAN, NAN
    check(problem, backward=False)


@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("longest", [128, 300])
def test_gradients_beside_nan(device, longest, headdim):
    """NaN in sequences 1 and 3 and behind the last is in no gradient of the others.

    Up to 128 keys tiles write dQ themselves, beyond they add to it.
    """
    lengths = [61, longest, 5, longest - 1, 100]
    bounds = torch.tensor([3, *lengths], dtype=torch.int32, device=device).cumsum(0).int()
    rows = int(bounds[-1]) + 70
    qkvd = [
        torch.randn(rows, heads, headdim, dtype=torch.bfloat16, device=device)
        for heads in (4, 2, 2, 4)
    ]
    sequence = torch.bucketize(torch.arange(rows, device=device), bounds, right=True) - 1
    clean = (sequence == 0) | (sequence == 2) | (sequence == 4)

    def gradients() -> tuple[Tensor, ...]:
        q, k, v = (x.clone().requires_grad_() for x in qkvd[:3])
        out = flash_attn.flash_attn_varlen_func(
            q, k, v, bounds, bounds, longest, longest, causal=True, deterministic=True
        )
        return torch.autograd.grad(out, (q, k, v), qkvd[3])

    expected = gradients()
    for x in qkvd:
        x[~clean] = NAN
    outside = (sequence < 0) | (sequence == 5)
    for got, want in zip(gradients(), expected, strict=True):
        assert torch.equal(got[clean], want[clean]) and (got[outside] == 0).all()
        assert want.isfinite().all() and got[sequence == 1].isnan().any()


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("device", backend_params("cuda-default"), indirect=True)
def test_misaligned_tensors_run_elsewhere(device, which):
    problem = dense(2, 70, 140, 4, 2, 64, dtype=torch.bfloat16, device=device, causal=True)
    check(replace(problem, **{which: misaligned(getattr(problem, which))}))


def test_misaligned_tensors_are_refused(device):
    problem = dense(2, 70, 140, 4, 2, 64, dtype=torch.bfloat16, device=device)
    words = r"sm90 backend has no .*16 bytes.*use_backend\('sm80'\)"
    with pytest.raises(NotImplementedError, match=words):
        call(replace(problem, k=misaligned(problem.k)))


def test_misaligned_out(device):
    """It is stored 16 bytes at a time."""
    problem = dense(2, 70, 140, 4, 2, 64, dtype=torch.bfloat16, device=device, causal=True)
    out = misaligned(torch.full_like(problem.q, NAN))
    assert call(problem, out=out).data_ptr() == out.data_ptr()
    assert_matches_oracle({"out": out}, problem)
    assert_guard_intact(out)


# ---- which rows are a tile, which tiles a thread block's -----------------------------------------


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 7, 8, 16, 32])
@pytest.mark.parametrize("options", ["causal", "window", "sinks", "everything"])
def test_few_queries_of_grouped_heads(device, options, group, headdim):
    """Query heads that share a key head may share a tile; each row keeps its head's options."""
    nheads = 2 * group
    shape = (nheads, 2, headdim)
    options = OPTIONS[options](2, nheads, device) | {"dtype": torch.bfloat16, "device": device}
    for seqlen_q in range(1, 10):
        check(dense(2, seqlen_q, 150, *shape, **options), backward=False)
    for seqlens_q in ([1, 4], [9, 0], [5, 7]):
        check(varlen(seqlens_q, [190, 33], *shape, **options), backward=False)


def many_tiles(device: str, headdim: int = 128, **options: Any) -> Attention:
    """More tiles than an H200 has SMs, at least twice as many."""
    sizes = (4, 513, 390, 16, 4, headdim)
    return dense(*sizes, dtype=torch.bfloat16, device=device, **options)


def many_tiles_of_sequences(device: str, headdim: int = 128, **options: Any) -> Attention:
    seqlens_q, seqlens_k = [1, 700, 0, 30, 257, 128, 5, 300], [400, 500, 9, 0, 257, 1, 90, 300]
    sizes = (16, 4, headdim)
    return varlen(seqlens_q, seqlens_k, *sizes, dtype=torch.bfloat16, device=device, **options)


BACKWARD_HEADDIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


# Lengths of queries and of keys.
BACKWARD_LENGTHS = {
    # A thread block takes several tiles of keys.
    "several-dense": ([260] * 3, [1000] * 3),
    "several-varlen": ([300, 0, 1, 129, 64] * 2, [700, 128, 0, 500, 65] * 2),
    # At most 128 keys: one tile sees all queries that see any; the others' dQ is 0.
    "lone-dense": ([300] * 5, [128] * 5),
    "lone-varlen": ([300, 0, 1, 129, 64], [77, 128, 0, 1, 65]),
}


def several_tiles(
    device: str, lengths: str, headdims: tuple[int, int], options: str = "plain"
) -> Attention:
    seqlens_q, seqlens_k = BACKWARD_LENGTHS[lengths]
    batch, heads = len(seqlens_q), (24, 12, *headdims)
    given = OPTIONS[options](batch, 24, device) | {"dtype": torch.bfloat16, "device": device}
    if lengths.endswith("dense"):
        return dense(batch, seqlens_q[0], seqlens_k[0], *heads, **given)
    return varlen(seqlens_q, seqlens_k, *heads, **given)


@pytest.mark.parametrize("headdims", BACKWARD_HEADDIMS)
@pytest.mark.parametrize("options", ["plain", "causal", "window", "everything"])
@pytest.mark.parametrize("lengths", BACKWARD_LENGTHS)
def test_backward_of_tiles(device, lengths, options, headdims):
    """Right; and if dQ is added to in turns, twice the same bits."""
    problem = several_tiles(device, lengths, headdims, options)
    check(problem)
    assert_twice_the_same(problem)


def gradients_of(problem: Attention, deterministic: bool = True) -> Callable[[], dict[str, Tensor]]:
    """What it returns does one backward a call, in the thread that calls it."""
    out, lse, _, _ = private_forward(problem)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    options: dict[str, Any] = {"place": torch.clone, "deterministic": deterministic}
    return lambda: private_backward(problem, dout, out, lse, **options)


def fill_memory_with_nan(device: str) -> None:
    """So that workspaces of the next call lie where there was NaN."""
    torch.cuda.empty_cache()
    torch.full((256 << 20,), NAN, device=device)


@pytest.mark.parametrize("headdims", BACKWARD_HEADDIMS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_nothing_is_added_to_what_was_in_memory(device, deterministic, headdims):
    """In order the first tile stores dQ, else it is cleared. 300 of 900 queries see no key."""
    problem = dense(3, 900, 600, 4, 2, *headdims, dtype=torch.bfloat16, device=device, causal=True)
    fill_memory_with_nan(device)
    check(problem, deterministic=deterministic)


@pytest.mark.parametrize("headdims", BACKWARD_HEADDIMS)
@pytest.mark.parametrize("lengths", ["several-dense", "several-varlen"])
def test_backward_ends(device, lengths, headdims):
    """Tiles that wait for each other are different thread blocks' (else a call in 300 hangs)."""
    gradients = gradients_of(several_tiles(device, lengths, headdims))
    first = gradients()
    for _ in range(300):
        last = gradients()
    for name, grad in last.items():
        assert torch.equal(grad, first[name]), name


def gradients_of_entries(problem: Attention) -> Callable[[slice], dict[str, Tensor]]:
    """Of some batch entries, by one forward of all."""
    out, lse, _, _ = private_forward(problem)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)

    def gradients(entries: slice) -> dict[str, Tensor]:
        q, k, v = (x[entries].contiguous() for x in (problem.q, problem.k, problem.v))
        given = (x[entries].contiguous() for x in (dout, out, lse))
        return private_backward(replace(problem, q=q, k=k, v=v), *given, place=torch.clone)

    return gradients


# Batch, queries, keys, heads, heads of keys, options: at least 6 tiles of keys for each SM, and 8
# of them see the queries of a block.
MANY_TILES = {
    "full": (14, 600, 1000, 8, 8, {}),
    "causal": (7, 2000, 2000, 8, 8, {"causal": True}),
    "unseen-queries": (6, 2800, 2600, 8, 8, {"causal": True}),
    "unseen-keys": (4, 300, 4000, 8, 8, {"window_size": (1500, 0)}),
    "group": (17, 600, 1500, 8, 4, {"window_size": (1400, 100)}),
}


@pytest.mark.parametrize("headdim", [32, 64, 96, 128])
@pytest.mark.parametrize("case", MANY_TILES)
def test_idle_warps(device, case, headdim):
    """With many tiles they clear and round dQ. Each batch entry alone has few, and no such work.

    The workspaces lie where there was NaN, so nothing is added to what is not cleared.
    """
    batch, seqlen_q, seqlen_k, nheads, nheads_kv, options = MANY_TILES[case]
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    assert batch * nheads_kv * -(-seqlen_k // 128) >= 6 * sms
    shape = (batch, seqlen_q, seqlen_k, nheads, nheads_kv, headdim)
    problem = dense(*shape, dtype=torch.bfloat16, device=device, **options)
    gradients = gradients_of_entries(problem)
    fill_memory_with_nan(device)
    together = gradients(slice(batch))
    for i in range(batch):
        for name, alone in gradients(slice(i, i + 1)).items():
            torch.testing.assert_close(together[name][i : i + 1], alone, rtol=2e-2, atol=2e-3)


# Queries, keys, query heads of a key head, options.
WHOLE_HEADS = {
    "full": (256, 256, 1, {}),
    "causal": (300, 384, 1, {"causal": True}),
    "unseen-queries": (256, 200, 1, {"causal": True}),
    "unseen-keys": (64, 256, 1, {"window_size": (60, 0)}),
    "group": (200, 256, 4, {"window_size": (150, 100)}),
    "one-block-of-queries": (60, 250, 2, {}),
    "softcap": (256, 256, 1, {"softcap": 20.0}),
}


@pytest.mark.parametrize("headdim", [32, 64, 96, 128])
@pytest.mark.parametrize("case", WHOLE_HEADS)
def test_whole_heads(device, case, headdim):
    """A head's tiles are one thread block's if that keeps all SMs busy. Each batch entry alone does
    not. The bits do not move. The workspaces lie where there was NaN.
    """
    seqlen_q, seqlen_k, group, options = WHOLE_HEADS[case]
    batch, nheads_kv = 4, torch.cuda.get_device_properties(device).multi_processor_count // 2
    shape = (batch, seqlen_q, seqlen_k, group * nheads_kv, nheads_kv, headdim)
    problem = dense(*shape, dtype=torch.bfloat16, device=device, **options)
    gradients = gradients_of_entries(problem)
    together = gradients(slice(batch))
    for _ in range(3):
        fill_memory_with_nan(device)
        for name, again in gradients(slice(batch)).items():
            assert torch.equal(again, together[name])
    for i in range(batch):
        for name, alone in gradients(slice(i, i + 1)).items():
            torch.testing.assert_close(together[name][i : i + 1], alone, rtol=2e-2, atol=2e-3)


# Lengths of queries, of keys, query heads of a key head, options.
WHOLE_PACKED_HEADS = {
    "full": ([256, 31, 0, 130, 300, 128, 7, 250], None, 1, {}),
    "causal": ([300, 1, 129, 256, 0, 64, 256, 200], None, 1, {"causal": True}),
    "other-keys": ([256, 0, 300, 5, 130, 70, 256, 9], [40, 60, 300, 0, 290, 128, 129, 256], 1, {}),
    "unseen": ([256, 100, 300, 60], [90, 200, 128, 256], 2, {"causal": True}),
    "group": ([200, 10, 0, 140, 256, 130], None, 4, {"window_size": (100, 30)}),
    "softcap": ([200, 10, 140, 256, 0, 130], None, 1, {"softcap": 20.0}),
}


def whole_packed_heads(device: str, case: str, headdim: int) -> Attention:
    """A problem whose key heads are four for each SM, or more."""
    lengths_q, lengths_k, group, options = WHOLE_PACKED_HEADS[case]
    nheads_kv = torch.cuda.get_device_properties(device).multi_processor_count
    lengths = (lengths_q, lengths_k or lengths_q)
    sizes = (group * nheads_kv, nheads_kv, headdim)
    return varlen(*lengths, *sizes, dtype=torch.bfloat16, device=device, **options)


@pytest.mark.parametrize("headdim", [32, 64, 96, 128])
@pytest.mark.parametrize("case", WHOLE_PACKED_HEADS)
def test_whole_heads_of_packed_sequences(device, case, headdim):
    """The same of packed sequences, some of them without queries or keys. The bits do not move,
    whether that is asked for or not.
    """
    problem = whole_packed_heads(device, case, headdim)
    fill_memory_with_nan(device)
    check(problem)
    fill_memory_with_nan(device)
    expected = gradients_of(problem, deterministic=False)()
    for deterministic in (False, False, True):
        fill_memory_with_nan(device)
        for name, again in gradients_of(problem, deterministic)().items():
            assert torch.equal(again, expected[name])


@pytest.mark.parametrize("headdim", [64, 128])
def test_whole_heads_of_bad_bounds(device, headdim):
    """Bounds that overlap, decrease, lie outside or are further apart than the longest length."""
    problem = whole_packed_heads(device, "causal", headdim)
    leaves = [x.nan_to_num(0.5).requires_grad_() for x in (problem.q, problem.k, problem.v)]
    problem = replace(problem, **dict(zip("qkv", leaves, strict=True)))
    rows = len(problem.q)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        bounds = torch.randint(-rows, 2 * rows, (2, 9), generator=generator)
        layout = (*bounds.int().to(device), 300, 300)
        fill_memory_with_nan(device)
        out = call(problem, layout)
        for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)):
            assert grad.isfinite().all()


# Holds an SM for each thread block until `flag`, in pinned memory, is set; at most half a minute.
HOLD = """
extern "C" __global__ void __launch_bounds__(1024) hold(volatile int* flag) {
  long long began, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
  while (threadIdx.x == 0 && *flag == 0) {
    __nanosleep(20000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - began > 30000000000ll) break;
  }
  __syncthreads();
}
"""


@pytest.mark.skipif(not hasattr(torch.cuda, "_compile_kernel"), reason="torch compiles no kernels")
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [True, False])
def test_backward_beside_another_kernel(device, deterministic, headdim):
    """With a mask, nothing waits for a thread block that has no SM yet.

    In order that is a tile that adds later than others, else an idle warp.
    """
    seqlen = 1024 if deterministic else 2048  # 512 tiles, or 1024
    options = {"dtype": torch.bfloat16, "device": device, "causal": True}
    problem = dense(2, seqlen, seqlen, 32, 32, headdim, **options)
    hold = torch.cuda._compile_kernel(HOLD, "hold")
    flag = torch.zeros(1, dtype=torch.int32).pin_memory()
    gradients = gradients_of(problem, deterministic)
    expected = gradients()
    torch.cuda.synchronize()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    with torch.cuda.stream(torch.cuda.Stream()):
        hold(grid=(sms - 32, 1, 1), block=(1024, 1, 1), args=(flag,))
    try:
        grads = gradients()
        done = torch.cuda.Event()
        done.record()
        ends = time.monotonic() + 20
        while not done.query() and time.monotonic() < ends:
            time.sleep(0.001)
        assert done.query(), "it waits for SMs that another kernel has"
    finally:
        flag[0] = 1
    for name, grad in grads.items():
        rounding = 0.0 if deterministic else 2e-2
        torch.testing.assert_close(grad, expected[name], rtol=rounding, atol=rounding / 10)


def on_some_sms(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Its results on 32 SMs, a green context: of a call where that is current, and of a graph."""
    if not hasattr(torch.cuda, "green_contexts"):
        pytest.skip("torch has no green contexts")
    torch.cuda.synchronize()
    context = torch.cuda.green_contexts.GreenContext.create(num_sms=32, device_id=0)

    def enter() -> Any:
        context.set_context()
        results = run()
        torch.cuda.synchronize()
        return results

    with ThreadPoolExecutor(1) as thread:
        called = thread.submit(enter).result()
    graph, replayed = captured(run, context.Stream())
    graph.replay()
    torch.cuda.synchronize()
    return called, replayed


BACKWARD_IN_A_NEW_THREAD = """
import torch
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
known, unseen = (torch.randn(1, n, 2, 64, device="cuda", dtype=torch.bfloat16) for n in (70, 71))
options = 0.0, 0.125, False, -1, -1, 0.0, None
out, lse, _, _ = _flash_attn_forward(known, known, known, *options, False)
dq, dk, dv = (torch.empty_like(known) for _ in "qkv")
_flash_attn_backward(out, known, known, known, out, lse, dq, dk, dv, *options, False)
leaf = unseen.requires_grad_()
out = flash_attn_func(leaf, leaf, leaf)
torch.autograd.grad(out, leaf, unseen.detach())
torch.cuda.synchronize()
"""


def test_thread_without_a_context(device):
    """TMA's descriptors want one. Nothing before has given one to the thread of autograd here."""
    subprocess.run([sys.executable, "-c", BACKWARD_IN_A_NEW_THREAD], check=True, cwd=ROOT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_backward_on_some_sms(device, headdim, causal):
    """In order, in a green context. Without a mask another order than on all SMs, so other bits."""
    problem = dense(2, 1024, 1024, 16, 16, headdim, dtype=torch.bfloat16, device=device)
    problem = replace(problem, causal=causal)
    gradients = gradients_of(problem)
    everywhere = gradients()
    called, replayed = on_some_sms(gradients)
    for name, expected in everywhere.items():
        assert torch.equal(called[name], replayed[name]), name
        if causal:
            assert torch.equal(called[name], expected), name
        torch.testing.assert_close(called[name], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("headdim", [64, 128])
def test_idle_warps_on_some_sms(device, headdim):
    """In a green context they end too, and leave nothing out."""
    options = {"dtype": torch.bfloat16, "device": device, "causal": True}
    gradients = gradients_of(dense(4, 2048, 2048, 16, 16, headdim, **options), deterministic=False)
    expected = gradients()
    for grads in on_some_sms(gradients):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("seqlen_q", [1, 4, 300])  # the last by the forward's kernels
@pytest.mark.parametrize("num_splits", [16, 50])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_split_keys_on_some_sms(device, headdim, num_splits, seqlen_q):
    """A green context has no room for clusters of 16 thread blocks: there are fewer parts."""
    problem = dense(1, seqlen_q, 9000, 16, 1, headdim, dtype=torch.bfloat16, device=device)
    with cuda.changed_setting("num_splits", num_splits):
        expected = call(problem)
        called, replayed = on_some_sms(lambda: call(problem))
    assert torch.equal(called, replayed)
    torch.testing.assert_close(called, expected, rtol=1e-2, atol=1e-3)


def assert_twice_the_same(problem: Attention) -> None:
    first, again = (run(problem, deterministic=True)[0] for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("headdims", BACKWARD_HEADDIMS)
@pytest.mark.parametrize("options", ["causal", "window", "dropout"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_backward_in_parts(device, layout, options, headdims):
    """Few keys, many queries: several thread blocks divide a tile's steps and sum dK and dV.

    Parts have some of the seven heads of a group, or some of the queries of one head.
    """
    heads = (7, 1, *headdims)
    options = OPTIONS[options](2, 7, device) | {"dtype": torch.bfloat16, "device": device}
    if layout == "dense":
        problem = dense(2, 700, 200, *heads, **options)
    else:
        problem = varlen([500, 0, 700], [129, 5, 200], *heads, **options)
    check(problem)
    assert_twice_the_same(problem)


@pytest.mark.parametrize("headdims", BACKWARD_HEADDIMS)
def test_backward_of_leftover_tiles(device, headdims):
    """When each SM, or each pair of them, has had equally many tiles, ten are left: divided."""
    heads = torch.cuda.get_device_properties(device).multi_processor_count // 2 + 5
    check(dense(1, 700, 200, heads, heads, *headdims, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("headdim", [104, 128])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_backward_of_long_steps(device, layout, headdim, deterministic):
    """From 5000 queries on, without a mask, steps have 80 queries, and dQ is transposed."""
    sizes = (2, 1, headdim)
    options = {"dtype": torch.bfloat16, "device": device}
    if layout == "dense":
        problem = dense(1, 5100, 700, *sizes, **options)
    else:  # some without keys, some without queries
        problem = varlen([5100, 0, 300, 90, 1], [700, 40, 0, 129, 128], *sizes, **options)
    check(problem, deterministic=deterministic)
    if deterministic:
        assert_twice_the_same(problem)


def test_backward_of_long_steps_in_fp16(device):
    """A window that hides nothing is none."""
    options = {"dtype": torch.float16, "device": device, "window_size": (512, 5000)}
    check(dense(1, 5000, 512, 1, 1, 128, **options))


def long_sequences(device: str, headdim: int = 128, **options: Any) -> Attention:
    """The last tile of each leaves warpgroups without queries."""
    sizes = (16, 4, headdim)
    seqlens = [600, 530, 770], [400, 530, 790]
    return varlen(*seqlens, *sizes, dtype=torch.bfloat16, device=device, **options)


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("problem", [many_tiles, many_tiles_of_sequences, long_sequences])
def test_thread_blocks_take_several_tiles(device, problem, mask, headdim):
    """Each tile once, whatever the order: the same bits again, and the counter is left zero."""
    problem = problem(device, headdim, **MASKS[mask])
    check_bits(problem, 20)
    assert cuda._kept_zeros


# ---- divided keys, forced tiles ------------------------------------------------------------------


def tile_count(headdims: tuple[int, int], features: str) -> int:
    """Of the smallest kernel for the head dims."""
    rows = [
        x
        for x in cuda._KERNELS
        if (x.operation, x.backend, x.feature_set) == ("forward", "sm90", features)
        and x.headdim >= headdims[0]
        and x.headdim_v >= headdims[1]
    ]
    return min(rows, key=lambda x: x.headdim + x.headdim_v).tiles


@of_each_kernel
@pytest.mark.parametrize("dtype", HALF, ids=dtype_name)
@pytest.mark.parametrize("features", ["plain", "everything"])
def test_divided_keys_for_the_sanitizer(device, features, dtype, headdims):
    """With each tile shape of the kernel; some parts of some tiles have no key."""
    options = OPTIONS[features](2, 4, device) | {"dtype": dtype, "device": device}
    problem = dense(2, 150, 290, 4, 2, *headdims, **options)
    for tile in range(tile_count(headdims, "plain" if features == "plain" else "full")):
        with cuda.changed_setting("tile", tile), cuda.changed_setting("num_splits", 3):
            check(problem, backward=False)


@of_each_kernel
@pytest.mark.parametrize("options", OPTIONS)
def test_each_tile(device, options, headdims):
    given = OPTIONS[options](3, 4, device) | {"dtype": torch.bfloat16, "device": device}
    problem = varlen([200, 0, 410], [330, 100, 401], 4, 2, *headdims, **given)
    full = options in ("softcap", "dropout", "everything") or options.startswith("alibi")
    for tile in range(tile_count(headdims, "full" if full else "plain")):
        with cuda.changed_setting("tile", tile):
            check(problem, backward=False)


@of_each_kernel
@pytest.mark.parametrize("parts", [3, 32])
@pytest.mark.parametrize("options", OPTIONS)
def test_parts_that_are_no_cluster(device, options, parts, headdims):
    """Another kernel merges them."""
    check_options(device, options, APART - parts, headdims)


@pytest.mark.parametrize("page_size", [None, 1, 16, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_parts_of_caches_that_are_no_cluster(device, mask, page_size):
    check_caches(device, mask, page_size, APART - 4)


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_parts_that_are_no_cluster_are_deterministic(device, mask, headdim):
    check_order(device, mask, headdim, APART - 6)


def test_graph_of_parts_that_are_no_cluster(device):
    check_replays(device, APART - 5)


@of_each_kernel
def test_parts_of_each_tile_that_are_no_cluster(device, headdims):
    given = {"dtype": torch.float16, "device": device, "causal": True}
    problem = dense(2, 203, 900, 8, 2, *headdims, **given)
    for tile in range(4):
        with cuda.changed_setting("tile", tile), cuda.changed_setting("num_splits", APART - 3):
            try:
                call(problem)
            except ValueError as error:
                assert tile > 0 and str(error).startswith("tile:"), error
                break
            check(problem, backward=False)


def test_few_tiles_on_many_keys_are_no_clusters(device, monkeypatch):
    """Of parts in clusters the GPU has room for fewer: these leave theirs in a workspace."""
    prepare, names = cuda._C.prepare, []

    def watched(*arguments: Any) -> Any:
        call = prepare(*arguments)
        names.extend(name for name, *_ in call.workspaces)
        return call

    monkeypatch.setattr(cuda._C, "prepare", watched)
    given = {"dtype": torch.bfloat16, "device": device, "causal": True}
    check(dense(1, 900, 20000, 1, 1, 128, **given), backward=False)
    assert "partial_out" in names


def test_many_divided_tiles(device):
    with cuda.changed_setting("num_splits", 2):
        check(many_tiles(device), backward=False)


@of_each_kernel
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_leftover_tiles_in_parts(device, mask, headdims):
    """When each SM has had one tile of a head, five heads are left: their keys are divided."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    heads = sms + 5
    problem = dense(
        1, 20, 500, heads, heads, *headdims, dtype=torch.bfloat16, device=device, **MASKS[mask]
    )
    for tile in range(tile_count(headdims, "plain")):
        with cuda.changed_setting("tile", tile):
            with cuda.changed_setting("num_splits", 1):
                whole, _ = run(problem, backward=False)
            with cuda.changed_setting("num_splits", -3):
                divided, _ = run(problem, backward=False)
        assert_matches_oracle(divided, problem)
        equal = (whole["lse"] == divided["lse"]).flatten(0, 1).all(-1)
        streams = headdims[0] <= 96 and tile == 0  # two tiles share an SM: none is divided
        assert equal[:sms].all()
        assert equal.all() == streams
    assert_counters_are_zero()


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_leftover_tiles_in_stream_order(device, headdim):
    """Parts start before the other tiles are done. Who is behind the call waits for all."""
    heads = torch.cuda.get_device_properties(device).multi_processor_count + 5
    problem = dense(1, 20, 2000, heads, heads, headdim, dtype=torch.bfloat16, device=device)
    q, k, v = problem.q, problem.k, problem.v
    given, results = q.clone(), []
    tile = int(headdim == 64)  # of tile 0 there two share an SM
    with cuda.changed_setting("tile", tile), cuda.changed_setting("num_splits", -3):
        expected = flash_attn.flash_attn_func(q, k, v)
        for _ in range(10):
            given.copy_(q)
            result = flash_attn.flash_attn_func(given, k, v)
            given.zero_()
            results.append(result.clone())
    assert all(torch.equal(x, expected) for x in results)


@of_each_kernel
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("sequences", [5, 32, 33])
def test_more_packed_tiles_than_sms(device, sequences, paged, headdims):
    """Of at most four tiles for each SM those of up to 32 sequences come last blocks first."""
    seqlens_q = [37 * i % 301 for i in range(sequences)]
    seqlens_k = [n + i % 7 for i, n in enumerate(seqlens_q)]
    nheads = 8 if sequences > 5 else 32
    options = {"dtype": torch.bfloat16, "device": device, "causal": True}
    problem = varlen(seqlens_q, seqlens_k, nheads, nheads, *headdims, **options)
    check(in_pages(problem, 16) if paged else problem, backward=False)
    assert_counters_are_zero()


# ---- at once -------------------------------------------------------------------------------------


def outputs(problems: list[Attention]) -> list[Tensor]:
    return [call(problem) for problem in problems]


def two_problems(device: str) -> list[Attention]:
    """Of different numbers of tiles, so that a counter that both used would show."""
    return [many_tiles(device, 64, causal=True), many_tiles_of_sequences(device, causal=True)]


def test_two_streams_at_once(device):
    problems = two_problems(device)
    expected = outputs(problems)
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream, problem in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                found.append(call(problem))
    torch.cuda.synchronize()
    for i, out in enumerate(found):
        assert torch.equal(out, expected[i % 2])


def test_graphs_on_two_streams_at_once(device):
    """Beside each other, and beside a call of another stream; each graph has several kernels."""
    problems = two_problems(device)
    expected = outputs(problems)
    graphs = []
    for problem in problems:
        layout = None if problem.cu_seqlens_q is None else layout_of(problem)
        graphs.append(captured(lambda x=problem, at=layout: [call(x, at) for _ in range(3)]))
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        for _, results in graphs:
            for out in results:
                out.fill_(NAN)
        torch.cuda.synchronize()
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        beside = call(problems[0])
        torch.cuda.synchronize()
        assert torch.equal(beside, expected[0])
        for (_, results), out in zip(graphs, expected, strict=True):
            assert all(torch.equal(result, out) for result in results)


def in_threads(work: Callable[..., None], *arguments: Sequence[Any]) -> None:
    """Call ``work`` with each of the arguments, in a thread of its own."""
    threads = [threading.Thread(target=work, args=row) for row in zip(*arguments, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("own_streams", [False, True], ids=["one-stream", "own-streams"])
def test_two_threads_at_once(device, own_streams):
    problems = two_problems(device)
    expected = outputs(problems)
    torch.cuda.synchronize()
    start, wrong = threading.Barrier(2), []

    def work(problem: Attention, out: Tensor) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            start.wait()
            results = [call(problem) for _ in range(50)]
        stream.synchronize()
        wrong.extend(1 for result in results if not torch.equal(result, out))

    in_threads(work, problems, expected)
    assert not wrong


def test_two_threads_and_an_ordered_backward(device):
    """A launch of another thread between the kernels of a call would draw from its tickets."""
    backward = dense(1, 1024, 1024, 8, 8, 64, dtype=torch.bfloat16, device=device)
    forward = dense(1, 640, 640, 8, 8, 128, dtype=torch.bfloat16, device=device)
    backward_inputs = [x.requires_grad_() for x in (backward.q, backward.k, backward.v)]
    forward_inputs = forward.q, forward.k, forward.v
    result = flash_attn.flash_attn_func(*backward_inputs, causal=True, deterministic=True)
    dout = torch.randn_like(result)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, backward_inputs, dout, retain_graph=True)

    calls = [gradients, lambda: (flash_attn.flash_attn_func(*forward_inputs),)]
    expected = [function() for function in calls]
    start, wrong = threading.Barrier(2), []

    def work(function: Callable[[], tuple[Tensor, ...]], tensors: tuple[Tensor, ...]) -> None:
        start.wait()
        for _ in range(10):
            results = [function() for _ in range(50)]
            wrong.extend(1 for x in results if not all(map(torch.equal, x, tensors)))

    in_threads(work, calls, expected)
    assert not wrong and not any(map(torch.any, cuda._kept_zeros.values()))


def test_first_call_in_a_compiled_graph(device, monkeypatch):
    """What lasts beyond the call is kept out of the memory of CUDA graphs of torch.compile."""
    problem = dense(2, 300, 300, 4, 2, 64, dtype=torch.bfloat16, device=device)
    inputs = problem.q, problem.k, problem.v
    expected = flash_attn.flash_attn_func(*inputs, causal=True) * 2
    monkeypatch.setattr(cuda, "_kept_zeros", {})
    torch._dynamo.reset()
    step = torch.compile(
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True) * 2,
        mode="reduce-overhead",
        fullgraph=True,
    )
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(step(*inputs), expected)
