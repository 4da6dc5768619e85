"""The sm80 kernels, forced: everything that they cover, and a clear refusal of what they don't."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import (
    NAN,
    assert_guard_intact,
    beyond_int32,
    call,
    captured,
    check,
    dense,
    dtype_name,
    guarded,
    randn,
    varlen,
)
from hypothesis import given
from hypothesis import strategies as st
from oracle import Attention, assert_matches_oracle, expect
from test_differential import LENGTH, SEED, SIDE, inside_nan

import flash_attn

pytestmark = pytest.mark.gpu

HALF = [torch.float16, torch.bfloat16]
HEAD_DIMS = [64, 128]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (50, 20)},
    "window-left": {"window_size": (130, -1)},
    "window-right": {"window_size": (-1, 70)},
    "window-causal": {"window_size": (70, 0), "causal": True},
    "window-0": {"window_size": (0, 0)},
}
EDGES = [1, 7, 63, 64, 65, 127, 128, 129, 191, 193, 257]


def forward(problem: Attention) -> None:
    check(problem, backward=False)


@pytest.mark.parametrize("dtype", HALF, ids=dtype_name)
@pytest.mark.parametrize("headdim", HEAD_DIMS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlens", [(128, 128), (113, 203), (203, 113), (1, 239)], ids=str)
def test_masks(sm80, seqlens, mask, headdim, dtype):
    forward(dense(2, *seqlens, 2, 2, headdim, dtype=dtype, device=sm80, **MASKS[mask]))


@pytest.mark.parametrize("headdim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("seqlen_q", EDGES)
def test_tile_edges(sm80, seqlen_q, mask, headdim):
    for seqlen_k in EDGES:
        problem = dense(1, seqlen_q, seqlen_k, 1, 1, headdim, dtype=torch.bfloat16, device=sm80)
        forward(replace(problem, **MASKS[mask]))


@pytest.mark.parametrize("nheads, nheads_kv", [(1, 1), (5, 5), (8, 2), (6, 3), (7, 1)])
@pytest.mark.parametrize("headdim", HEAD_DIMS)
def test_head_groups(sm80, headdim, nheads, nheads_kv):
    sizes = (3, 130, 70, nheads, nheads_kv, headdim)
    forward(dense(*sizes, dtype=torch.float16, device=sm80, causal=True))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.5, 4.0])
def test_scales(sm80, scale):
    """Up to scores in the hundreds, which overflow a softmax that does not subtract the maximum."""
    forward(dense(1, 130, 260, headdim=64, dtype=torch.bfloat16, device=sm80, softmax_scale=scale))


@pytest.mark.parametrize("headdim", HEAD_DIMS)
def test_strides_and_guards(sm80, headdim):
    """Views of larger tensors, read and written in place, and nothing beside them."""
    problem = dense(2, 70, 90, 4, 2, headdim, dtype=torch.bfloat16, device=sm80, causal=True)
    q, k, v = map(guarded, (problem.q, problem.k, problem.v))
    out = guarded(torch.full_like(problem.q, NAN))
    problem = replace(problem, q=q, k=k, v=v)
    result, lse, _ = call(problem, return_attn_probs=True, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert_matches_oracle({"out": out, "lse": lse}, problem)
    assert_guard_intact(out)

    packed = randn(2, 70, 3, 4, headdim, dtype=torch.bfloat16, device=sm80)
    bhsd = randn(3, 2, 4, 70, headdim, dtype=torch.bfloat16, device=sm80).transpose(2, 3)
    one_kv_head = bhsd[1:, :, :, :1].expand(-1, -1, -1, 4, -1)
    for q, k, v in (packed.unbind(2), bhsd, [bhsd[0], *one_kv_head]):
        forward(Attention(q, k, v, causal=True))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}], ids=str)
def test_empty(sm80, sizes):
    forward(dense(**sizes, headdim=64, dtype=torch.float16, device=sm80))


@pytest.mark.parametrize("batch, nheads", [(70000, 1), (1, 70000)])
def test_many_heads_and_batches(sm80, batch, nheads):
    """More of each than a grid's y or z dimension holds. With one key, the result is its value."""
    shape = (batch, 1, nheads, 64)
    q, k, v = (randn(*shape, dtype=torch.float16, device=sm80) for _ in range(3))
    assert torch.equal(call(Attention(q, k, v)), v)


@pytest.mark.slow
@pytest.mark.parametrize("far", ["batch", "rows", "heads"])
def test_offsets_beyond_int32(sm80, far):
    forward(beyond_int32(far, sm80))


@given(
    sizes=st.tuples(st.integers(1, 3), LENGTH, LENGTH),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    headdim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(HALF),
    causal=st.booleans(),
    window=st.tuples(SIDE, SIDE),
    scale=st.sampled_from([None, 0.05, 1.0]),
    strided=st.booleans(),
    seed=SEED,
)
def test_random_problems(sm80, sizes, heads, headdim, dtype, causal, window, scale, strided, seed):
    torch.manual_seed(seed)
    options = {"causal": causal, "window_size": window, "softmax_scale": scale}
    problem = dense(*sizes, *heads, headdim, dtype=dtype, device=sm80, **options)
    forward(inside_nan(problem) if strided else problem)


def test_same_result_every_time(sm80):
    problem = dense(4, 300, 300, 8, 8, 128, dtype=torch.bfloat16, device=sm80, causal=True)
    first = call(problem)
    assert all(torch.equal(call(problem), first) for _ in range(20))


@pytest.mark.parametrize(
    "problem, word",
    [
        (dense(headdim=64), "float32"),
        (dense(headdim=80, dtype=torch.float16), "80"),
        (dense(headdim=64, headdim_v=128, dtype=torch.float16), "head dimension"),
        (varlen([5], [5], headdim=64, dtype=torch.float16), "cu_seqlens"),
        (dense(headdim=64, dtype=torch.float16, softcap=1.0), "softcap"),
        (dense(headdim=64, dtype=torch.float16, alibi_slopes=torch.ones(2)), "alibi"),
        (dense(headdim=64, dtype=torch.float16, s_aux=torch.ones(2)), "s_aux"),
        (dense(headdim=64, dtype=torch.float16, dropout_p=0.1), "dropout"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_covered_says_what_to_do(sm80, problem, word):
    with pytest.raises(NotImplementedError, match="tiled") as error:
        call(on_gpu(problem))
    assert word in str(error.value)


def test_head_dim_beyond_the_kernels(sm80):
    with pytest.raises(ValueError, match=r"256.*264"):
        call(on_gpu(dense(headdim=264, dtype=torch.float16)))


def test_backward_is_refused_while_forced(sm80):
    problem = dense(headdim=64, dtype=torch.float16, device=sm80)
    out = call(replace(problem, q=problem.q.requires_grad_()))
    with pytest.raises(NotImplementedError, match="tiled"):
        out.sum().backward()


def on_gpu(problem: Attention) -> Attention:
    moved = {n: x.cuda() for n, x in vars(problem).items() if isinstance(x, torch.Tensor)}
    storage = problem.storage
    if storage.cu_seqlens is not None:
        storage = replace(storage, cu_seqlens=storage.cu_seqlens.cuda())
    return replace(problem, storage=storage, **moved)


# ---- streams, devices, graphs --------------------------------------------------------------------


def test_side_stream(sm80):
    """The kernel runs on the current stream: after what is queued there, and not on another."""
    problem = dense(2, 512, 512, 8, 8, 128, dtype=torch.bfloat16, device=sm80, causal=True)
    expected = call(problem)
    late = torch.full_like(problem.q, NAN)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some 30 ms, in which the default stream would overtake
        late.copy_(problem.q)
        out = call(replace(problem, q=late))
    stream.synchronize()
    assert torch.equal(out, expected)


def test_second_device(sm80):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    problem = dense(2, 130, 130, headdim=64, dtype=torch.bfloat16, device="cuda:1", causal=True)
    assert torch.cuda.current_device() == 0
    out, lse, _ = call(problem, return_attn_probs=True)
    assert torch.cuda.current_device() == 0
    assert out.device == lse.device == problem.q.device
    assert_matches_oracle({"out": out, "lse": lse}, problem)


def test_graph_of_the_forward(sm80):
    problem = dense(2, 300, 300, 4, 2, 128, dtype=torch.bfloat16, device=sm80, causal=True)
    graph, (out, lse, _) = captured(lambda: call(problem, return_attn_probs=True))
    for _ in range(3):
        problem.q.normal_(), problem.k.normal_(), problem.v.normal_()
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        assert_matches_oracle({"out": out, "lse": lse}, problem)


def test_gradient_of_a_kernel_forward():
    """Unforced, the backward of a kernel's forward runs on tiled, from the kernel's lse."""
    if "sm80" not in flash_attn.available_backends("cuda"):
        pytest.skip("sm80 is not built, or can't run here")
    for headdim in HEAD_DIMS:
        check(dense(2, 130, 200, 4, 2, headdim, dtype=torch.bfloat16, device="cuda", causal=True))


def test_oracle_is_near_in_both_dtypes(sm80):
    """The bound of a long sequence is not vacuous: naive arithmetic is good to a few percent."""
    problem = dense(1, 1024, 1024, 1, 1, 128, dtype=torch.bfloat16, device=sm80, causal=True)
    expected = expect(problem)["out"]
    assert expected.tolerance < 0.05 * expected.exact.abs().max()
    forward(problem)
