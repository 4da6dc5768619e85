"""flash_attn.distributed: several processes give what one process with all tokens gives."""

from __future__ import annotations

import bisect
import contextlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import EXAMPLES
from distributed_worker import Groups, Pool, pool
from helpers import (
    DROPOUT_SEED,
    DTYPES,
    OPTIONS,
    dense,
    dtype_name,
    options_of,
    since_torch,
    varlen,
    with_dropout_mask,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Attention, Storage, assert_matches_oracle
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import flash_attn
from benchmarks import context_parallel as cost_model
from flash_attn import distributed
from flash_attn.distributed import _agreement, _heads, _ring, adapters, functions
from flash_attn.distributed._layout import Layout
from flash_attn.distributed._plan import Block, Mask, Plan

WORLD = 4
# How a sequence is divided: the ranks of a ring x those that divide heads, and the order.
RING2, RING4 = (2, 1, "zigzag"), (4, 1, "zigzag")
CONTIGUOUS4 = (4, 1, "contiguous")
ULYSSES2, ULYSSES4 = (1, 2, "contiguous"), (1, 4, "contiguous")
MESH = (2, 2, "zigzag")
DIVISIONS = [RING2, RING4, CONTIGUOUS4, ULYSSES2, ULYSSES4, MESH]
Division = tuple[int, int, str]


def division_name(value: Any) -> str | None:
    return "-".join(map(str, value)) if isinstance(value, tuple) else dtype_name(value)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(WORLD, "cpu", tmp_path_factory.mktemp("processes")) as four:
        yield four


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    size = 4 if torch.cuda.device_count() >= 4 else 2
    with pool(size, "cuda", tmp_path_factory.mktemp("processes")) as processes:
        yield processes


# ---- in the processes ----------------------------------------------------------------------------


def attend(
    groups: Groups,
    division: Division,
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    dout: Tensor,
    dlse: Tensor,
) -> dict[str, Tensor] | None:
    """A rank's part of out, lse and the gradients. Heads are exchanged in parts where they can."""
    ring, heads, order = division
    _heads.LEAST_PART = 1
    if not groups.holds(ring * heads):
        return None
    where: Any = groups.of[ring * heads] if 1 in (ring, heads) else groups.meshes[ring, heads]
    function = partial(distributed.ring_flash_attn_func, order=order, group=where)
    if heads > 1 and ring == 1:
        function = partial(distributed.ulysses_flash_attn_func, group=where)
    dim = tensors["q"].dim() - 3
    rank = torch.distributed.get_rank()
    tensors = {name: x.to(groups.device) for name, x in tensors.items()}
    options = {
        name: x.to(groups.device) if name == "alibi_slopes" and x is not None else x
        for name, x in options.items()
    }
    leaves = {
        name: (x.clone() if name == "s_aux" else distributed.shard(x, dim, where, order))
        for name, x in tensors.items()
    }
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    # Only the first rank of the group draws the mask that a single process would draw.
    torch.manual_seed(DROPOUT_SEED + rank - (groups.size - ring * heads))
    options["seqlen"] = tensors["q"].shape[dim]
    out, lse, _ = function(**leaves, **options, return_attn_probs=True)
    upstream = distributed.shard(dout, dim, where, order), distributed.shard(dlse, -1, where, order)
    upstream = [x.to(groups.device) for x in upstream]
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), upstream)
    assert out.dtype == tensors["q"].dtype
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.cpu() for name, x in results.items()}


# ---- here ----------------------------------------------------------------------------------------


def places(total: int, division: Division) -> list[list[int]]:
    """The tokens of each rank, written down without the library's help."""
    ring, heads, order = division
    pieces = ring if order == "contiguous" else 2 * ring
    size = -(-total // pieces)
    cut = [list(range(total))[i * size : (i + 1) * size] for i in range(pieces)]
    found = []
    for place in range(ring):
        tokens = cut[place] if order == "contiguous" else cut[place] + cut[-1 - place]
        share = -(-len(tokens) // heads)
        found += [tokens[i * share : (i + 1) * share] for i in range(heads)]
    return found


def together(parts: list[Tensor], tokens: list[list[int]], dim: int) -> Tensor:
    order = torch.tensor([i for of_rank in tokens for i in of_rank], dtype=torch.long)
    return torch.cat(parts, dim).index_select(dim, order.argsort())


def moved(problem: Attention, device: str) -> Attention:
    def to_device(x: Any) -> Any:
        return {name: y.to(device) for name, y in vars(x).items() if isinstance(y, Tensor)}

    storage = replace(problem.storage, **to_device(problem.storage))
    return replace(problem, storage=storage, **to_device(problem))


def check(
    processes: Pool, problem: Attention, division: Division, attend: Callable[..., Any] = attend
) -> None:
    """Compare what the processes make of a self-attention problem with the oracle."""
    if problem.dropout_p > 0:  # drawn from the generator of the device
        masked = with_dropout_mask(moved(problem, processes.device))
        problem = replace(problem, keep=masked.keep.cpu())
    options = options_of(problem)
    tensors = {name: getattr(problem, name) for name in "qkv"}
    if (s_aux := options.pop("s_aux")) is not None:
        tensors["s_aux"] = s_aux
    if problem.cu_seqlens_q is not None:
        options["cu_seqlens"] = problem.cu_seqlens_q
    shape = *problem.q.shape[:-1], problem.v.shape[-1]
    dout = torch.randn(shape, dtype=problem.q.dtype)
    sums = torch.promote_types(problem.q.dtype, torch.float32)
    dlse = torch.randn(shape[:-1], dtype=sums).mT.contiguous()
    answers = processes.run(
        attend, division=division, tensors=tensors, options=options, dout=dout, dlse=dlse
    )
    members = division[0] * division[1]
    answers = answers[processes.size - members :]
    tokens = places(problem.q.shape[-3], division)
    results = {}
    for name in answers[0]:
        parts = [answer[name] for answer in answers]
        dim = parts[0].dim() - (1 if name == "lse" else 3)
        sums_up = name == "ds_aux"
        results[name] = sum(parts) if sums_up else together(parts, tokens, dim)
    assert_matches_oracle(results, problem, dout=dout, dlse=dlse)


def self_attention(batch: int, seqlen: int, **options: Any) -> Attention:
    return dense(batch, seqlen, seqlen, **options)


def packed_documents(lengths: list[int], *sizes: int, **options: Any) -> Attention:
    """Documents, and tokens of no document before and behind them."""
    problem = varlen(lengths, lengths, *sizes, slack=5, **options)
    bounds = problem.cu_seqlens_q.clone()
    bounds[0] = min(3, lengths[0])  # what is no document's is NaN
    for x in (problem.q, problem.k, problem.v):
        x[: bounds[0]] = float("nan")
    return replace(problem, cu_seqlens_q=bounds, storage=Storage(cu_seqlens=bounds))


def test_unshard_has_one_derivative() -> None:
    from flash_attn.distributed._layout import Grid, Layout, _Unshard

    x = torch.randn(2, 4, requires_grad=True)
    whole = _Unshard.apply(x, 1, Grid(None, None), Layout(4, 1, 1, "zigzag"))
    (first,) = torch.autograd.grad(whole.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * x.detach() ** 2)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        first.sum().backward()


@pytest.mark.parametrize("division", DIVISIONS, ids=division_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_dtypes(processes, dtype, division):
    problem = self_attention(2, 67, nheads=4, nheads_kv=4, dtype=dtype, causal=True)
    check(processes, problem, division)


@pytest.mark.parametrize("division", DIVISIONS, ids=division_name)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(processes, option, division):
    options = OPTIONS[option](2, 4, "cpu")
    check(processes, self_attention(2, 67, nheads=4, nheads_kv=4, **options), division)


@pytest.mark.parametrize("division", [RING4, ULYSSES2, ULYSSES4, MESH], ids=division_name)
@pytest.mark.parametrize("nheads, nheads_kv", [(8, 4), (4, 2), (8, 1), (12, 3), (12, 6)])
def test_groups_of_heads(processes, nheads, nheads_kv, division):
    """Ranks that have some of a group's heads, a group each, several, or parts of two."""
    sizes = {"nheads": nheads, "nheads_kv": nheads_kv, "headdim": 16, "headdim_v": 24}
    check(processes, self_attention(1, 40, causal=True, **sizes), division)


@pytest.mark.parametrize("division", DIVISIONS, ids=division_name)
@pytest.mark.parametrize("option", OPTIONS)
def test_documents(processes, option, division):
    lengths = [9, 1, 0, 50, 3, 0, 24]
    options = OPTIONS[option](len(lengths), 4, "cpu")
    check(processes, packed_documents(lengths, 4, 2, **options), division)


@pytest.mark.parametrize("division", DIVISIONS, ids=division_name)
@pytest.mark.parametrize("seqlen", [0, 1, 3, 5, 9])
def test_ranks_without_tokens(processes, seqlen, division):
    check(processes, self_attention(2, seqlen, nheads=4, nheads_kv=4, causal=True), division)


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (0, 5), (20, 2), (40, -1), (-1, 30)])
@pytest.mark.parametrize("division", [RING4, CONTIGUOUS4, MESH], ids=division_name)
def test_windows(processes, window, division):
    """Narrower than a piece of the sequence, and wider."""
    problem = self_attention(1, 61, nheads=2, nheads_kv=2, headdim=16, window_size=window)
    check(processes, problem, division)


@settings(max_examples=min(25, EXAMPLES))
@given(st.data())
def test_random_sizes(processes, data):
    draw = data.draw
    division = draw(st.sampled_from(DIVISIONS))
    nheads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = {"nheads": division[1] * nheads_kv * group, "nheads_kv": nheads_kv}
    sizes |= {"headdim": draw(st.integers(1, 24)), "headdim_v": draw(st.integers(1, 24))}
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    width = st.integers(-1, 40)
    options["window_size"] = draw(st.tuples(width, width) | st.just((-1, -1)))
    options["softcap"] = draw(st.sampled_from([0.0, 2.0]))
    options["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 0.3]))
    if draw(st.booleans()):
        options["alibi_slopes"] = torch.rand(sizes["nheads"])
    if draw(st.booleans()):
        options["s_aux"] = torch.randn(sizes["nheads"])
    torch.manual_seed(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
        problem = varlen(lengths, lengths, slack=draw(st.integers(0, 9)), **sizes, **options)
    else:
        batch, seqlen = draw(st.integers(1, 2)), draw(st.integers(0, 90))
        problem = self_attention(batch, seqlen, **sizes, **options)
    check(processes, problem, division)


@pytest.mark.gpu
@pytest.mark.xdist_group("ranks")  # one set of processes for all
@pytest.mark.parametrize("division", DIVISIONS, ids=division_name)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", ["dense", "documents"])
def test_on_gpus(on_gpus, layout, option, division):
    """The same by NCCL, on the kernels where they have the options."""
    if division[0] * division[1] > on_gpus.size:
        pytest.skip(f"needs {division[0] * division[1]} GPUs")
    lengths = [100, 1, 0, 350, 15]
    options = OPTIONS[option](len(lengths) if layout == "documents" else 2, 8, "cpu")
    sizes = {"nheads": 8, "nheads_kv": 4, "headdim": 64, "dtype": torch.bfloat16}
    if layout == "dense":
        check(on_gpus, self_attention(2, 401, **sizes, **options), division)
    else:
        check(on_gpus, packed_documents(lengths, **sizes, **options), division)


def capture_and_replay(groups: Groups, division: Division) -> bool:
    """Whether a replay, on other values, gives what a call gives."""
    function = partial(distributed.ring_flash_attn_func, group=groups.of[2])
    if division == ULYSSES2:
        function = partial(distributed.ulysses_flash_attn_func, group=groups.of[2])
    _heads.LEAST_PART = 1
    dtype = torch.bfloat16
    q, k, v, dout = torch.randn(4, 1, 256, 8, 64, device=groups.device, dtype=dtype).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        out = function(*leaves, causal=True, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = step()
        with torch.no_grad():
            for x in leaves:
                x.normal_()
        graph.replay()
        expected = step()
        torch.cuda.synchronize()
        return all(map(torch.equal, results, expected))


@pytest.mark.gpu
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("division", [RING2, ULYSSES2], ids=division_name)
def test_cuda_graph(on_gpus, division):
    if on_gpus.size != 2:
        pytest.skip("of 2 GPUs")
    assert on_gpus.run(capture_and_replay, division=division) == [True, True]


def attend_quietly(groups: Groups, **arguments: Any) -> dict[str, Tensor] | None:
    _ring._warn_of_slow_blocks.cache_clear()  # which warns once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return attend(groups, **arguments)


@pytest.mark.gpu
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("division", [RING2, ULYSSES2, RING4, MESH], ids=division_name)
def test_everything_on_kernels(on_gpus, division):
    """Pieces and a window of multiples of 16: nothing warns that it runs in PyTorch operations."""
    if division[0] * division[1] > on_gpus.size:
        pytest.skip(f"needs {division[0] * division[1]} GPUs")
    options = OPTIONS["everything"](2, 8, "cpu") | {"window_size": (304, -1)}
    sizes = {"nheads": 8, "nheads_kv": 4, "headdim": 64, "dtype": torch.bfloat16}
    check(on_gpus, self_attention(2, 512, **sizes, **options), division, attend_quietly)


def attend_with_a_late_part(groups: Groups, **arguments: Any) -> dict[str, Tensor] | None:
    """The first part of a forward waits 50 ms, the second, on its own stream, does not."""

    def give_way(device: torch.device) -> None:
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            torch.cuda._sleep(10**8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_heads, "give_way", give_way)
        return attend(groups, **arguments)


@pytest.mark.gpu
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("layout", ["dense", "documents"])
def test_streams_of_parts(on_gpus, layout):
    """The second part needs nothing that the first one makes, as where documents begin."""
    sizes = {"nheads": 8, "nheads_kv": 4, "headdim": 64, "dtype": torch.bfloat16, "causal": True}
    if layout == "dense":
        problem = self_attention(1, 390, **sizes)
    else:
        problem = packed_documents([90, 200, 7], **sizes)
    check(on_gpus, problem, ULYSSES2, attend_with_a_late_part)


# ---- ranks that do not call alike ----------------------------------------------------------------


def attend_otherwise(groups: Groups, changes: dict[int, dict[str, Any]], kind: str) -> Any:
    """A call of all four ranks, of which some have other arguments."""
    arguments = {"seqlen": 8, "heads": 4, "dim": 16, "dtype": torch.float32, "causal": True}
    arguments |= changes.get(torch.distributed.get_rank(), {})
    names = ("seqlen", "heads", "dim", "dtype")
    seqlen, heads, dim, dtype = (arguments.pop(name) for name in names)
    if arguments.pop("is_none", False):
        q = k = v = None
    else:
        q, k, v = torch.randn(3, 1, seqlen, heads, dim).to(dtype)
    if arguments.pop("documents", False):
        arguments["cu_seqlens"] = [0, 5, 32]
        q, k, v = q[0], k[0], v[0]
    if kind == "ring":
        return distributed.ring_flash_attn_func(q, k, v, **arguments)
    if kind == "ulysses":
        return distributed.ulysses_flash_attn_func(q, k, v, **arguments)
    return distributed.ring_flash_attn_func(q, k, v, group=groups.meshes[2, 2], **arguments)


@pytest.mark.parametrize("kind", ["ring", "ulysses", "mesh"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"seqlen": 10}, "seqlen .* got 32 on rank 0 and 40 on rank 2"),
        ({"heads": 8}, "nheads .* got 4 on rank 0 and 8 on rank 2"),
        ({"dim": 8}, r"headdim .* got \[16, 16\] on rank 0 and \[8, 8\] on rank 2"),
        ({"dtype": torch.bfloat16}, "dtype .* got 'torch.float32' on rank 0"),
        ({"causal": False}, "causal .* got True on rank 0 and False on rank 2"),
        ({"window_size": (4, 0)}, r"window_size .* got \[-1, 0\] on rank 0 and \[4, 0\] on rank 2"),
        ({"softcap": 3.0}, "softcap .* got 0.0 on rank 0 and 3.0 on rank 2"),
        ({"deterministic": True}, "deterministic .* on rank 2"),
        ({"documents": True}, "batch .* got 1 on rank 0 and None on rank 2"),
        ({"s_aux": torch.zeros(4)}, "s_aux .* got None on rank 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_ranks_that_differ(processes, change, message, kind):
    """An error on every rank, which names what differs."""
    for answer in processes.ask(attend_otherwise, changes={2: change}, kind=kind):
        assert isinstance(answer, ValueError)
        assert re.search(message, str(answer)), answer


def test_a_rank_with_another_order(processes):
    for answer in processes.ask(
        attend_otherwise, changes={1: {"order": "contiguous"}}, kind="ring"
    ):
        assert isinstance(answer, ValueError) and "order must be the same" in str(answer)


@pytest.mark.parametrize(
    "change, kind, error, message",
    [
        ({"is_none": True}, "ring", TypeError, "q must be a torch.Tensor, got NoneType"),
        ({"dtype": torch.float8_e4m3fn}, "ring", TypeError, "q must have one .*float8_e4m3fn"),
        ({"window_size": "x" * 3000}, "ulysses", ValueError, "window_size must be a pair"),
        ({"alibi_slopes": [0.5] * 4}, "ring", TypeError, "alibi_slopes .* got list"),
        ({"cu_seqlens": 5}, "ring", TypeError, "cu_seqlens must be integers .* got int"),
        ({"softcap": -1.0}, "ring", ValueError, "softcap must be at least 0"),
        ({"seqlen": 9}, "ring", ValueError, r"tokens that shard\(\) gives this rank"),
        ({"order": "sideways"}, "ring", ValueError, "order must be one of zigzag, contiguous"),
        ({"heads": 6}, "ulysses", ValueError, "q must have a number of heads .* 4, got 6"),
        ({"alibi_slopes": torch.rand(3)}, "mesh", ValueError, "alibi_slopes must have shape"),
        ({"window_size": 3}, "mesh", ValueError, "window_size must be a pair"),
        ({"cu_seqlens": [0, 9]}, "ring", ValueError, "q must have 3 dimensions, got shape"),
    ],
)
def test_a_rank_with_wrong_arguments(processes, change, kind, error, message):
    """It raises what is wrong, and the others say so."""
    answers = processes.ask(attend_otherwise, changes={1: change}, kind=kind)
    assert isinstance(answers[1], error) and re.search(message, str(answers[1]))
    for answer in (answers[0], *answers[2:]):
        assert isinstance(answer, RuntimeError)
        assert re.search(f"rank 1 of the group: {error.__name__}: .*{message}", str(answer))


def attend_where_nothing_runs(groups: Groups, kind: str, ranks: list[int]) -> Any:
    """A call that some ranks force to a backend that is not there, and one that it leaves alone."""
    change = {"softcap": 5.0}
    try:
        with contextlib.ExitStack() as stack:
            if dist.get_rank() in ranks:
                stack.enter_context(flash_attn.use_backend("sm90"))
            attend_otherwise(groups, dict.fromkeys(range(WORLD), change), kind)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        attend_otherwise(groups, {}, kind)
        return error
    return None


@pytest.mark.parametrize("kind", ["ring", "ulysses", "mesh"])
@pytest.mark.parametrize("ranks", [[1], list(range(WORLD))])
def test_the_next_call_after_an_error(processes, kind, ranks):
    """No message of the call that failed is left under way."""
    for answer in processes.ask(attend_where_nothing_runs, kind=kind, ranks=ranks):
        if len(ranks) == WORLD:
            assert isinstance(answer, NotImplementedError)
        else:
            assert isinstance(answer, ValueError) and "use_backend must be" in str(answer)


def attend_with_lse(groups: Groups, ranks: list[int]) -> Any:
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    wanted = dist.get_rank() in ranks
    try:
        results = distributed.ulysses_flash_attn_func(q, q, q, return_attn_probs=wanted)
    except ValueError as error:
        return str(error)
    out, lse, _ = results
    (out.sum() + (lse.sum() if dist.get_rank() == 0 else 0)).backward()
    return q.grad is not None


def test_lse_on_some_ranks(processes):
    for answer in processes.run(attend_with_lse, ranks=[0, 1]):
        assert "return_attn_probs must be the same" in answer
    assert all(processes.run(attend_with_lse, ranks=list(range(WORLD))))  # whose loss has it or not


def one_more_call(groups: Groups) -> Any:
    """Calls of a known kind but for what no key had."""
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    slopes = torch.rand(4)
    distributed.ring_flash_attn_func(q, q, q, alibi_slopes=slopes)
    with contextlib.suppress(NotImplementedError):
        distributed.ring_flash_attn_func(q, q, q, alibi_slopes=slopes.requires_grad_())
        return "slopes without a gradient"
    group = dist.group.WORLD
    seqlen = torch.tensor(8 * WORLD)
    for _ in range(3):
        distributed.ring_flash_attn_func(q, q, q, causal=True, seqlen=seqlen.clone())
    kinds = len(functions._agreed[group])
    distributed.ring_flash_attn_func(q, q, q, causal=True, seqlen=seqlen.clone())
    if len(functions._agreed[group]) > kinds:
        return "each tensor is a kind of its own"
    # Aligned data behind an offset that is not.
    odd = torch.frombuffer(bytearray(16 * 4 * 8 * 8 + 16), dtype=torch.float32, offset=4)[3:]
    odd = odd[: 8 * 4 * 16].view(1, 8, 4, 16)
    distributed.ulysses_flash_attn_func(odd, odd, odd)
    return None


def test_known_kinds(processes):
    assert processes.run(one_more_call) == [None] * WORLD


def call_on_a_mesh(groups: Groups, ranks: list[list[int]]) -> Any:
    mesh = DeviceMesh("cpu", torch.tensor(ranks))
    whole = torch.randn(1, 32, 4, 16, generator=torch.Generator().manual_seed(0))
    try:
        local = distributed.shard(whole, group=mesh)
    except ValueError as error:
        return str(error)
    out = distributed.ring_flash_attn_func(local, local, local, causal=True, group=mesh)
    expected = flash_attn.flash_attn_func(whole, whole, whole, causal=True)
    return (distributed.unshard(out, group=mesh) - expected).abs().max().item()


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 2], [1, 0]]])
def test_meshes(processes, ranks):
    assert all(gap < 1e-5 for gap in processes.run(call_on_a_mesh, ranks=ranks))


@pytest.mark.parametrize("ranks", [[[0, 1], [3, 2]], [[1, 0], [2, 3]], [[0, 3], [2, 1]]])
def test_meshes_whose_groups_have_another_order(processes, ranks):
    for answer in processes.run(call_on_a_mesh, ranks=ranks):
        assert answer.startswith("group must be a mesh whose ranks ascend")


def unshard_otherwise(groups: Groups, change: str) -> Any:
    x = torch.randn(2, 3)
    if dist.get_rank() == 1:
        x = {"dtype": x.double(), "sizes": x[:1], "dimensions": x[None]}[change]
    return distributed.unshard(x, -1)


@pytest.mark.parametrize("change", ["dtype", "sizes", "dimensions"])
def test_unshard_of_ranks_that_differ(processes, change):
    for answer in processes.ask(unshard_otherwise, change=change):
        assert isinstance(answer, ValueError) and "on all ranks" in str(answer)


def test_bad_arguments_of_shard(processes):
    for which, error, message in (
        ("shard_list", TypeError, "x must be a torch.Tensor, got list"),
        ("shard_dim", ValueError, "dim must be one of the 2 dimensions of x, got 2"),
        ("position_total", TypeError, "total must be an int"),
        ("position_bounds", ValueError, "cu_seqlens must never fall, got 3 after 5"),
        ("group", ValueError, "group must be a ProcessGroup or DeviceMesh .* got 5"),
    ):
        for answer in processes.ask(shard_wrongly, which=which):
            assert isinstance(answer, error) and re.search(message, str(answer)), answer


def shard_wrongly(groups: Groups, which: str) -> Any:
    return {
        "shard_list": lambda: distributed.shard([1, 2]),
        "shard_dim": lambda: distributed.shard(torch.zeros(2, 4), 2),
        "position_total": lambda: distributed.position_ids(5.5),
        "position_bounds": lambda: distributed.position_ids(9, cu_seqlens=[0, 5, 3]),
        "group": lambda: distributed.shard(torch.zeros(2, 4), group=5),
    }[which]()


def call_alone(groups: Groups) -> Any:
    """The last two ranks make one call; then the last of them another, while the first is away."""
    if not groups.holds(2):
        return None
    q = torch.randn(1, 8, 2, 16)
    distributed.ring_flash_attn_func(q, q, q, group=groups.of[2])
    if groups.holds(1):
        patience, _agreement.TIMEOUT = _agreement.TIMEOUT, 0.3
        try:
            distributed.ring_flash_attn_func(q, q, q, softcap=7.0, group=groups.of[2])
        finally:
            _agreement.TIMEOUT = patience
    else:  # what ends the other one's message, for the tests that follow
        time.sleep(0.6)
        with contextlib.suppress(RuntimeError):
            distributed.ring_flash_attn_func(q, q, q, softcap=8.0, group=groups.of[2])
    return None


def test_a_call_that_others_do_not_make(processes):
    *_, error = processes.ask(call_alone)
    assert isinstance(error, RuntimeError)
    assert re.search("have not made this call after 0.3 s: .*softcap 7.0", str(error))


def attend_twice(groups: Groups) -> Any:
    """Gradients of two calls, with options whose sums have an order."""
    torch.manual_seed(0)
    q, k, v = (distributed.shard(x).requires_grad_() for x in torch.randn(3, 1, 200, 4, 16))
    gradients = []
    for _ in range(2):
        out = distributed.ring_flash_attn_func(q, k, v, causal=True, deterministic=True)
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    return all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_deterministic(processes):
    assert all(answer is True for answer in processes.run(attend_twice))


# ---- what is sent and computed -------------------------------------------------------------------


def plans(layout: Layout, mask: Mask) -> list[Plan]:
    return [Plan(layout, mask, rank) for rank in range(layout.ring)]


def work(plan: Plan) -> int:
    """Scores of a rank, a diagonal block counted as a causal one."""
    blocks = [block for step in plan.steps for block in step.blocks]
    return sum(len(x.rows) * len(x.cols) // (1 + x.is_diagonal) for x in blocks)


@pytest.mark.parametrize("ring", [2, 4, 64])
def test_zigzag_balances_causal_work(ring):
    """One kernel call a step, of the same size on all ranks."""
    ranks = plans(Layout(2 * ring * 100, ring), Mask(-1, 0))
    assert len({work(plan) for plan in ranks}) == 1
    for plan in ranks:
        assert [len(step.blocks) for step in plan.steps] == [1] * ring
    # Of the keys of ranks before, only the first piece is seen.
    assert [step.rows for step in ranks[1].steps[:3]] == [200, 100, 200 if ring > 2 else 100][
        : min(3, ring)
    ]


def test_window_reaches_few_ranks():
    """In contiguous order, those in reach; and of their rows, those in reach."""
    for rank, plan in enumerate(plans(Layout(800, 8, order="contiguous"), Mask(150, 0))):
        received = [step.rows for step in plan.steps[1:]]
        assert received == [100 if rank > 0 else 0, 50 if rank > 1 else 0, 0, 0, 0, 0, 0]
        sent = [sum(map(len, step.sends)) for step in plan.steps[1:]]
        assert sent == [100 if rank < 7 else 0, 50 if rank < 6 else 0, 0, 0, 0, 0, 0]


def test_documents_within_a_rank_send_nothing():
    mask = Mask(-1, 0, bounds=(0, 60, 100, 200, 300, 350, 400))
    for plan in plans(Layout(400, 4, order="contiguous"), mask):
        assert [step.rows for step in plan.steps] == [100, 0, 0, 0]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_the_mask(seed, direction):
    """Each visible pair of tokens is in one block, and its window lets no other pair through."""
    random = Random(seed)
    total, ring = random.randint(1, 60), random.randint(1, 5)
    layout = Layout(total, ring, order=random.choice(["zigzag", "contiguous"]))
    left, right = random.randint(-1, 20), random.randint(-1, 20)
    if random.random() < 0.3:
        left, right = -1, 0
    bounds = None
    if random.random() < 0.5:
        bounds = tuple(sorted(random.choices(range(total + 1), k=random.randint(1, 6))))
    mask = Mask(left, right, bounds, drops=random.random() < 0.3)
    tokens = [sum(map(list, layout.chunks_of_place(place)), []) for place in range(ring)]
    found = []
    for rank, plan in enumerate(plans(layout, mask)):
        for distance, step in enumerate(plan.steps):
            received = [tokens[rank - distance][i] for rows in step.receives for i in rows]
            blocks = step.blocks
            if direction == "backward" and distance == 0:
                blocks = plan.backward[0] + plan.backward[-1]
                diagonal = sorted(i for x in blocks if x.is_diagonal for i in x.rows)
                assert bounds is not None or diagonal == list(range(len(tokens[rank])))
            for block in blocks:
                queries = [tokens[rank][i] for i in block.rows]
                keys = [received[i] for i in block.cols]
                found += pairs(block, queries, keys)
    of = [bisect.bisect_right(bounds, x) if bounds else 1 for x in range(total)]
    expected = [
        (i, j)
        for i, j in itertools.product(range(total), repeat=2)
        if (left < 0 or i - j <= left) and (right < 0 or j - i <= right)
        if of[i] == of[j] and 0 < of[i] < (len(bounds) if bounds else 2)
    ]
    assert sorted(found) == expected


def pairs(block: Block, queries: list[int], keys: list[int]) -> Iterator[tuple[int, int]]:
    """Who sees whom, as the kernels read a block."""
    bounds = block.bounds or (0, None)
    for start, stop in itertools.pairwise(bounds):
        rows, cols = queries[start:stop], keys[start:stop]
        if block.place is not None and rows and block.bounds is None and block.documents is None:
            assert (rows[0], cols[0]) == block.place
        for (i, row), (j, col) in itertools.product(enumerate(rows), enumerate(cols)):
            distance = j - (i + len(cols) - len(rows))
            left, right = block.window
            if (left < 0 or distance >= -left) and (right < 0 or distance <= right):
                yield row, col


# ---- sharding ------------------------------------------------------------------------------------


def shard_and_back(groups: Groups, division: Division, total: int) -> Any:
    ring, heads, order = division
    if not groups.holds(ring * heads):
        return None
    where = groups.meshes[ring, heads] if ring > 1 and heads > 1 else groups.of[ring * heads]
    whole = torch.randn(2, total, 3, generator=torch.Generator().manual_seed(0))
    local = distributed.shard(whole, 1, where, order).requires_grad_()
    back = distributed.unshard(local, -2, where, order)
    weight = torch.arange(1.0, total + 1)[:, None].expand_as(whole)
    (gradient,) = torch.autograd.grad((back * weight).sum(), local)
    expected = ring * heads * distributed.shard(weight, 1, where, order)
    places = distributed.position_ids(total, where, order)
    in_documents = distributed.position_ids(total, where, order, cu_seqlens=[2, 2, 7, 9])
    return torch.equal(back, whole), torch.equal(gradient, expected), places, in_documents


@pytest.mark.parametrize("division", DIVISIONS, ids=division_name)
@pytest.mark.parametrize("total", [3, 16, 21])
def test_shard(processes, total, division):
    answers = processes.run(shard_and_back, division=division, total=total)
    answers = answers[WORLD - division[0] * division[1] :]
    in_documents = [0, 1, 0, 1, 2, 3, 4, 0, 1, *range(20)]
    for (is_whole, has_gradient, *of_rank), expected in zip(
        answers, places(total, division), strict=True
    ):
        assert is_whole and has_gradient
        assert [x.tolist() for x in of_rank] == [expected, [in_documents[i] for i in expected]]


# ---- adapters ------------------------------------------------------------------------------------


def attend_in_context(groups: Groups, division: Division, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """PyTorch's attention on buffers in the context, out of it again, and what they then are."""
    ring, heads, _ = division
    shape = (ring, heads) if ring > 1 and heads > 1 else (WORLD,)
    mesh = groups.meshes[shape] if len(shape) == 2 else DeviceMesh("cpu", range(WORLD))
    method = "ulysses" if ring == 1 else "ring"
    buffers, before = [q, k, v], q.clone()
    with adapters.context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], no_restore_buffers={v}, method=method
    ):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    (out,) = adapters.context_parallel_unshard(mesh, [out], [2], method)
    assert torch.equal(q, before) and v.shape[2] < k.shape[2]
    assert F.scaled_dot_product_attention(before, before, before).shape == before.shape
    return out


@since_torch(2, 5, "scaled_dot_product_attention has enable_gqa")
@pytest.mark.parametrize("division", [RING4, ULYSSES4, MESH], ids=division_name)
def test_in_the_place_of_context_parallel(processes, division):
    q = torch.randn(2, 8, 50, 16)
    k, v = torch.randn(2, 2, 4, 50, 16)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for out in processes.run(attend_in_context, division=division, q=q, k=k, v=v):
        torch.testing.assert_close(out, expected)


def attend_to_views_in_context(groups: Groups, qkv: Tensor) -> Any:
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # of one memory
    before, strides = qkv.clone(), [x.stride() for x in (q, k, v)]
    mesh = DeviceMesh("cpu", range(WORLD))
    with adapters.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(qkv, before) and [x.stride() for x in (q, k, v)] == strides
    assert q.data_ptr() == qkv.data_ptr()
    (out,) = adapters.context_parallel_unshard(mesh, [out], [2])
    return out


def test_buffers_that_share_memory(processes):
    qkv = torch.randn(2, 16, 3, 4, 8)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for out in processes.run(attend_to_views_in_context, qkv=qkv):
        torch.testing.assert_close(out, expected)


def test_bad_buffers():
    x = torch.zeros(2, 4, requires_grad=True)
    for buffers, kept, error, message in (
        ([x], (), ValueError, "must not require a gradient"),
        ([1.0], (), TypeError, "buffers must be tensors, got float"),
        ([x.detach()], [x], ValueError, "no_restore_buffers must be among buffers"),
    ):
        mesh: Any = None
        with pytest.raises(error, match=message):
            with adapters.context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[1], no_restore_buffers=kept
            ):
                pass


def run_transformers(groups: Groups, method: str, documents: list[int] | None) -> Any:
    """Logits of this rank's tokens, of a small model; and those of the whole sequence here."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    order = "contiguous" if method == "ulysses" else "zigzag"
    name = adapters.register_with_transformers(
        f"context_parallel_{method}", method=method, order=order
    )
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    tokens, where = torch.randint(64, (1, 40)), {"order": order}
    options = {"cu_seq_lens_q": documents} if documents else {}
    logits = model(
        distributed.shard(tokens, **where),
        position_ids=distributed.position_ids(40, cu_seqlens=documents, **where)[None],
        use_cache=False,
        **options,
    ).logits
    model.set_attn_implementation("eager")
    bounds = documents or [0, 40]
    parts = [model(tokens[:, i:j]).logits for i, j in itertools.pairwise(bounds)]
    return logits.detach(), distributed.shard(torch.cat(parts, 1), **where).detach()


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize("documents", [None, [0, 13, 40]], ids=["one", "documents"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_transformers(processes, method, documents):
    for logits, expected in processes.run(run_transformers, method=method, documents=documents):
        torch.testing.assert_close(logits, expected)


def run_what_ranks_do_not_share(groups: Groups, case: str) -> Any:
    from transformers import AutoModel, BertConfig, Llama4TextConfig, LlamaConfig, T5Config

    small = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    config: Any = {
        "padding": lambda: LlamaConfig(**small, **sizes),
        "bert": lambda: BertConfig(**small, **sizes),
        "chunks": lambda: Llama4TextConfig(
            **small,
            **sizes,
            num_key_value_heads=4,
            intermediate_size_mlp=64,
            num_local_experts=1,
            attention_chunk_size=3,
        ),
        "bias": lambda: T5Config(vocab_size=64, d_model=64, num_layers=1, num_heads=4, d_ff=64),
    }[case]()
    name = adapters.register_with_transformers("context_parallel_of_less")
    model = AutoModel.from_config(config, attn_implementation=name)
    if case == "bias":
        model = model.get_encoder()
    mask = torch.ones(1, 8, dtype=torch.long)
    if case in ("padding", "bert"):
        mask[0, :2] = 0
    model(torch.randint(64, (1, 8)), attention_mask=mask)
    return None


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize(
    "case, message",
    [
        ("padding", "attention_mask must be None"),
        ("bert", "attention_mask must be None"),
        ("chunks", "causal masks and windows alone"),
        ("bias", "position_bias, indices and block_indices must be None"),
    ],
)
def test_transformers_that_ask_for_more(processes, case, message):
    for answer in processes.ask(run_what_ranks_do_not_share, case=case):
        assert isinstance(answer, ValueError) and message in str(answer), answer


def test_model_counts_what_is_visible():
    """Of the cost model, in blocks of all masks."""
    random = Random(0)
    for _ in range(300):
        rows, cols = random.randint(1, 9), random.randint(1, 9)
        window = random.randint(-1, 12), random.randint(-1, 12)
        block = Block(range(rows), range(cols), window)
        found = list(pairs(block, list(range(rows)), list(range(cols))))
        assert cost_model.visible(block) == len(found), block


def test_model_beside_measurements(capsys):
    cost_model.print_anchors()
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(cost_model.ANCHORS)
    work, ring = cost_model.Workload(2**17), cost_model.Way(4, 1)
    contiguous = replace(ring, order="contiguous")
    # The last rank has (2 ranks - 1) / ranks^2 of the causal work.
    assert cost_model.efficiency(work, contiguous) < 4 / 7 < cost_model.efficiency(work, ring) < 1


def test_example():
    """Two processes train, and have the gradients of one."""
    example = Path(__file__).parent.parent / "examples" / "long_context.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(example), "--check", "--steps", "2"]
    command += ["--tokens", "203", "--layers", "1", "--hidden", "64", "--group", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the same loss and gradients" in done.stdout
    assert re.search(r"ring of 2, 203 tokens: \d+ tokens/s", done.stdout)
