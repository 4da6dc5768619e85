"""The tiled backend on a CPU: PyTorch's own operator where it can, else one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_kvcache
import torch
from helpers import (
    LAYOUTS,
    OPTIONS,
    call,
    check,
    dense,
    dtype_name,
    guarded,
    poisoned_outside,
    private_backward,
    private_forward,
    varlen,
)
from oracle import Attention, assert_matches_oracle

import flash_attn
from flash_attn import _arguments
from flash_attn._backends import cpu, tiled
from flash_attn._backends.merging import merge

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FORWARDS = {
    "full": {},
    "causal": {"causal": True},
    "scale": {"causal": True, "softmax_scale": 0.3},
    "sinks": {"causal": True, "s_aux": torch.tensor([0.5, -9.0, 3.0, 0.0])},
}


@pytest.fixture(autouse=True)
def needs_operator() -> None:
    if cpu._forward is None:
        pytest.skip("this PyTorch has no flash attention for CPUs")


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a tile is computed, but by the backward in float32 (`cpu.covers_backward`)."""
    scores = tiled._scores

    def refuse(a: _arguments.Attention, *rest: Any) -> tiled._Scores:
        assert a.q.dtype == torch.float32, "a tile of scores"
        return scores(a, *rest)

    def refuse_forward(*_: Any) -> None:
        raise AssertionError("a tile of the forward")

    monkeypatch.setattr(tiled, "_scores", refuse)
    monkeypatch.setattr(tiled, "_attend_by_tiles", refuse_forward)


@pytest.fixture
def tile_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """(batch, nheads, m, n) of every tile of scores from now on."""
    sizes: list[tuple[int, ...]] = []
    scores = tiled._scores

    def record(*arguments: Any) -> tiled._Scores:
        result = scores(*arguments)
        sizes.append(tuple(result.masked.shape))
        return result

    monkeypatch.setattr(tiled, "_scores", record)
    return sizes


def check_out(problem: Attention) -> None:
    """Compare out and its gradients alone: the operator takes none of the log-sum-exp."""
    leaves = {"q": problem.q, "k": problem.k, "v": problem.v}
    if problem.s_aux is not None:
        leaves["s_aux"] = problem.s_aux
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out = call(replace(problem, **leaves))
    assert out.is_contiguous()
    dout = poisoned_outside(torch.randn_like(out), problem)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    results = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    assert_matches_oracle({"out": out, **results}, problem, dout)


# Square, wide and tall problems: the causal mask ends in the bottom right corner.
@pytest.mark.parametrize("seqlens", [(33, 33), (5, 140), (140, 5), (1, 70), (70, 1)], ids=str)
@pytest.mark.parametrize("nheads_kv", [4, 2, 1])
@pytest.mark.parametrize("options", FORWARDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_dense(no_tiles, dtype, options, nheads_kv, seqlens):
    for batch in (1, 2):
        problem = dense(batch, *seqlens, 4, nheads_kv, 16, dtype=dtype, **FORWARDS[options])
        inside = {name: guarded(getattr(problem, name)) for name in "qkv"}
        check_out(replace(problem, **inside))


def test_sink_of_no_weight(no_tiles):
    """A sink of -inf is none, also to a row that sees nothing else."""
    problem = dense(1, 5, 3, causal=True)
    out, lse, _ = call(problem, return_attn_probs=True)
    sinks = torch.full((2,), -torch.inf)
    same, same_lse, _ = call(problem, return_attn_probs=True, s_aux=sinks)
    assert torch.equal(same, out) and torch.equal(same_lse, lse)


@pytest.mark.parametrize("options", FORWARDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_varlen(no_tiles, dtype, options):
    lengths = [19, 1, 33, 1, 140], [19, 25, 12, 2, 7]
    check_out(varlen(*lengths, 4, 2, 16, dtype=dtype, **FORWARDS[options]))


@pytest.mark.parametrize("where", ["rows", "slots", "pages"])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_cache(no_tiles, seqlen_q, where):
    test_kvcache.check(
        test_kvcache.decode(
            [5, 150, 37],
            seqlen_q,
            2,
            capacity=160,
            page_size=16 if where == "pages" else None,
            cache_batch_idx=[3, 0, 1] if where == "slots" else None,
            leftpad=[1, 0, 20],
            nheads=4,
            nheads_kv=2,
            causal=True,
        )
    )


def test_cache_in_equal_use(monkeypatch):
    """Sequences of one length are attended to in one call."""
    calls = []
    operator = cpu._forward
    record = lambda *given, **more: calls.append(given) or operator(*given, **more)  # noqa: E731
    monkeypatch.setattr(cpu, "_forward", record)
    for length in (37, 0):
        test_kvcache.check(test_kvcache.decode([length] * 3, 1, 2, capacity=50))
    assert len(calls) == 2


def test_backward_of_merged_results(no_tiles):
    """Out and log-sum-exp may be of more keys than the call has, as in context parallelism."""
    problem = dense(2, 9, 30, 4, 2, dtype=torch.float64)
    halves = [
        replace(problem, k=problem.k[:, rows], v=problem.v[:, rows])
        for rows in (slice(0, 11), slice(11, 30))
    ]
    parts = [private_forward(half)[:2] for half in halves]
    out, lse = merge(*(x for o, lse in parts for x in (o, lse.mT[..., None])))
    lse = lse[..., 0].mT
    dout = torch.randn_like(out)
    first, second = (private_backward(half, dout, out, lse) for half in halves)
    gradients = {
        "dq": first["dq"] + second["dq"],
        "dk": torch.cat([first["dk"], second["dk"]], 1),
        "dv": torch.cat([first["dv"], second["dv"]], 1),
    }
    assert_matches_oracle({"out": out, "lse": lse} | gradients, problem, dout)
    torch.testing.assert_close(first["delta"], (out * dout).sum(-1).mT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", ["plain", "causal", "scale", "sinks"])
def test_tiles_where_there_is_no_operator(monkeypatch, layout, options):
    """As with an old PyTorch."""
    monkeypatch.setattr(cpu, "_forward", None)
    options = OPTIONS[options](2, 4, "cpu")
    check(LAYOUTS[layout](nheads=4, nheads_kv=2, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (5, 5)},
        {"softcap": 2.0},
        {"alibi_slopes": torch.rand(4, 2)},
        {"headdim_v": 8},
        {"softmax_scale": 0.0, "causal": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_tiles_for_other_options(tile_sizes, options):
    """Tiles are those of each sequence alone, whose rows stand where they are."""
    lengths = [150, 2, 1, 3], [140, 1, 130, 2]
    check_out(varlen(*lengths, 2, 1, 16, **options))
    assert all(batch == 1 for batch, *_ in tile_sizes)
    forward_and_backward = 2 * 2 * sum(m * n for m, n in zip(*lengths, strict=True))
    assert 0 < sum(nheads * m * n for _, nheads, m, n in tile_sizes) <= forward_and_backward


def test_short_sequences_share_tiles(tile_sizes):
    check_out(varlen([3, 9, 1], [9, 4, 5], softcap=1.0))
    assert tile_sizes == [(3, 2, 9, 9)] * 2


def test_masks_only_where_they_cross(monkeypatch):
    """Of 3 x 3 tiles a causal mask crosses those on the diagonal; the rest see all or nothing."""
    masked = []
    fill = torch.Tensor.masked_fill

    def record(x: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
        if mask.dim() == 4 and mask.shape[-1] > 1:
            masked.append(mask.shape)
        return fill(x, mask, value)

    monkeypatch.setattr(torch.Tensor, "masked_fill", record)
    call(dense(1, 300, 300, softcap=1.0, causal=True))
    assert len(masked) == 3


def test_gradients_of_peaked_rows():
    """As exact as standard attention, which the operator's backward is not in float32."""
    problem = dense(1, 300, 300, 4, 4, 32, causal=True)
    problem.q *= 6
    dout = torch.randn_like(problem.q)

    def gradients(attend: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(attend(*leaves), leaves, dout.to(inputs[0].dtype))

    def standard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * problem.scale
        future = torch.ones(300, 300, dtype=torch.bool).triu(1)
        return torch.einsum(
            "bhij,bjhd->bihd", scores.masked_fill(future, -torch.inf).softmax(-1), v
        )

    inputs = problem.q, problem.k, problem.v
    ours = gradients(lambda q, k, v: call(replace(problem, q=q, k=k, v=v)), *inputs)
    exact = gradients(standard, *(x.double() for x in inputs))
    for x, naive, y in zip(ours, gradients(standard, *inputs), exact, strict=True):
        bound = 2 * (naive - y).norm() + torch.finfo(x.dtype).eps * y.norm()
        assert (x - y).norm() <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
def test_gradients_of_few_keys(no_tiles, dtype):
    """Sums over many queries are of more than 16 bits."""
    problem = dense(1, 20000, 3, 2, 2, 16, dtype=dtype)
    out, lse = private_forward(problem)[:2]
    found = private_backward(problem, torch.ones_like(out), out, lse)
    exact = [getattr(problem, name).double().requires_grad_() for name in "qkv"]
    q, k, v = (x.transpose(1, 2) for x in exact)
    attended = torch.softmax(q @ k.mT * problem.scale, -1) @ v
    gradients = torch.autograd.grad(attended, exact, torch.ones_like(attended))
    for name, y in zip(("dk", "dv"), gradients[1:], strict=True):
        assert (found[name] - y).norm() <= torch.finfo(dtype).eps / 2 * y.norm(), name


def test_same_gradients_every_time():
    """With several threads, and heads that share keys."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        problem = varlen([150, 40], [200, 300], 4, 2, causal=True, dtype=torch.bfloat16)
        out, lse = private_forward(problem)[:2]
        dout = torch.randn_like(out)
        runs = [private_backward(problem, dout, out, lse, deterministic=True) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x[name], runs[0][name]) for x in runs for name in runs[0])


@pytest.mark.parametrize("nheads", [2, 3])
@pytest.mark.parametrize("strides", [(50, 16, 1, 1), (50, 1, 1, 1)])
def test_heads_that_overlap(strides, nheads):
    """PyTorch's operator is wrong where heads of q are windows over the same numbers."""
    q = torch.randn(200).double().as_strided((2, 3, nheads, 16), strides)
    k, v = torch.randn(2, 2, 3, nheads, 16, dtype=torch.float64)
    out = flash_attn.flash_attn_func(q, k, v)
    torch.testing.assert_close(out, flash_attn.flash_attn_func(q.contiguous(), k, v))


def test_not_under_anything_but_a_cpu():
    q = torch.empty(1, 4, 2, 8, device="meta")
    options = _arguments.options(0.0, None, False, -1, -1, 0.0, False)
    assert not cpu.covers(_arguments.dense(q, q, q, options))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_time_goes_by_keys_in_use(cache_dtype, monkeypatch):
    """A table for the longest sequence that may come has pages without number."""
    blocks = []

    def counted(*arguments: Any) -> Any:
        found = list(whole(*arguments))
        blocks.append(len(found))
        return found

    whole = tiled._blocks
    monkeypatch.setattr(tiled, "_blocks", counted)
    q = torch.randn(2, 1, 4, 32, dtype=torch.bfloat16)
    pages = torch.randn(2, 40, 16, 2, 32).to(cache_dtype)
    table = torch.full((2, 2**16), -1, dtype=torch.int32)
    table[:, :10] = torch.arange(20).view(2, 10)
    lengths = torch.tensor([100, 90], dtype=torch.int32)
    flash_attn.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table)
    assert max(blocks, default=0) <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=dtype_name)
def test_backward_of_any_strides(no_tiles, dtype):
    """The operator's own backward reads some of them as if they were contiguous."""
    problem = dense(2, 9, 9, 2, 2, 16, dtype=dtype, causal=True)
    out, lse = private_forward(problem)[:2]
    dout = torch.randn(2, 16, 2, 9).to(dtype).permute(0, 3, 2, 1)
    strided = out.transpose(1, 3).contiguous().transpose(1, 3)
    for given in (dout, dout[..., :1].expand_as(out), out.new_ones(()).expand_as(out)):
        expected = private_backward(problem, given.contiguous(), out, lse)
        for results in (out, strided):
            for name, x in private_backward(problem, given, results, lse).items():
                torch.testing.assert_close(x, expected[name], msg=name)
        exact = (given.double() * out.double()).sum(-1).mT.to(lse.dtype)
        torch.testing.assert_close(expected["delta"], exact, rtol=1e-6, atol=1e-5)
