"""What only a GPU has: graphs and streams of the default backend, device-side lengths."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import KERNELS, backend_params
from helpers import NAN, call, captured, dense, int32, layout_of, varlen
from oracle import assert_close_to_oracle, assert_matches_oracle, expect
from test_kvcache import call as call_kvcache
from test_kvcache import decode
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn._backends import cuda

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("rotary_dim", [0, 32])
def test_graph_of_decoding(page_size, rotary_dim):
    """One captured step, replayed with other lengths on the device, among them padding (-1)."""
    sizes = {"page_size": page_size, "rotary_dim": rotary_dim, "capacity": 64}
    case = decode([3, 30, 0, 5], **sizes, dtype=torch.bfloat16, device="cuda", causal=True)
    problem = case.attention
    rest = torch.isnan(problem.k)
    # Later steps read what is slack in the first.
    problem.k[rest], problem.v[rest] = 0.5, 0.25
    graph, (out, lse) = captured(lambda: call_kvcache(case))
    for lengths in ([4, 31, 1, 6], [50, -1, 2, 63], [-1, -1, -1, -1]):
        case.cache_seqlens.copy_(int32(lengths))
        if page_size:
            keep = problem.storage.block_table.clone()
            problem.storage.block_table[case.cache_seqlens < 0] = -1
        before = replace(case, attention=replace(problem, k=problem.k.clone(), v=problem.v.clone()))
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        expected = expect(before)
        assert_close_to_oracle(out, expected["out"], "out")
        assert_close_to_oracle(lse, expected["lse"], "lse")
        if page_size:
            problem.storage.block_table.copy_(keep)


@pytest.mark.parametrize("device", backend_params("cuda-tiled", *KERNELS), indirect=True)
def test_graph_draws_another_mask_each_time(device):
    problem = dense(2, 100, 100, device=device, dropout_p=0.5)
    graph, out = captured(lambda: call(problem))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)


@pytest.mark.parametrize("device", backend_params("cuda-tiled", *KERNELS), indirect=True)
def test_graph_of_varlen_follows_the_lengths(device):
    """Lengths are read on the device, when the graph runs."""
    problem = varlen([40, 20], [40, 20], device=device, causal=True, slack=0)
    bounds = problem.cu_seqlens_q, problem.storage.cu_seqlens
    graph, out = captured(
        lambda: flash_attn_varlen_func(
            problem.q, problem.k, problem.v, *bounds, 60, 60, causal=True
        )
    )
    for lengths in ([0, 40, 60], [0, 11, 60], [0, 60, 60]):
        for bound in bounds:
            bound.copy_(int32(lengths))
        graph.replay()
        assert_matches_oracle({"out": out}, problem)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("device", backend_params("cuda-default", *KERNELS), indirect=True)
def test_graph_of_training(device, layout, deterministic):
    """Forward and backward in one graph."""
    options = {"headdim": 64, "dtype": torch.bfloat16, "device": device, "causal": True}
    more = {"causal": True, "return_attn_probs": True, "deterministic": deterministic}
    if layout == "dense":
        problem = dense(2, 300, 300, 4, 2, **options)
        function = partial(flash_attn_func, **more)
    else:
        problem = varlen([100, 200], [150, 150], 4, 2, slack=0, **options)
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        bounds = dict(zip(names, layout_of(problem), strict=True))
        function = partial(flash_attn_varlen_func, **bounds, **more)
    leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    dout = torch.randn_like(problem.q)

    def step() -> list[Tensor]:
        out, lse, _ = function(*leaves)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]

    stream = torch.cuda.Stream()  # autograd wants its warm-up on a side stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, results = captured(step)
    for _ in range(2):
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        for x in results:
            x.fill_(NAN)
        graph.replay()
        names = ("out", "lse", "dq", "dk", "dv")
        assert_matches_oracle(dict(zip(names, results, strict=True)), problem, dout)


def test_streams_have_identities():
    """Threads' own streams share a handle, and streams one after another may."""
    if not cuda.available():
        pytest.skip("no extension")
    per_thread = 2  # cudaStreamPerThread
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(cuda._C.zeros_owner, per_thread).result()
    mine = cuda._C.zeros_owner(per_thread)
    assert mine == cuda._C.zeros_owner(per_thread) != theirs
    streams = [torch.cuda.Stream() for _ in range(3)]
    owners = {cuda._C.zeros_owner(stream.cuda_stream) for stream in streams}
    assert len(owners) == 3 and min(owners) >= 0


def test_default_streams_of_green_contexts():
    """One handle, and other streams, whose kernels run at the same time: each has its zeros."""
    if not cuda.available() or not hasattr(torch.cuda, "green_contexts"):
        pytest.skip("no extension, or torch has no green contexts")
    zeros = [cuda._kept_zero(0, 0)]
    for _ in range(2):
        context = torch.cuda.green_contexts.GreenContext.create(num_sms=16, device_id=0)
        context.set_context()
        stream = torch.cuda.current_stream().cuda_stream
        zeros.append(cuda._kept_zero(0, stream))
        context.pop_context()
        assert stream == 0
    assert len({x.data_ptr() for x in zeros}) == 3


def test_graphs_have_slots():
    """One for each stream that a graph is captured from, given back when the graph goes."""
    if not cuda.available():
        pytest.skip("no extension")

    def owners() -> tuple[torch.cuda.CUDAGraph, list[int]]:
        graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream()
            found = [cuda._C.zeros_owner(stream.cuda_stream) for _ in range(2)]
            beside.wait_stream(stream)
            found.append(cuda._C.zeros_owner(beside.cuda_stream))
            stream.wait_stream(beside)
        return graph, found

    graphs = [owners() for _ in range(3)]
    slots = [owner for _, found in graphs for owner in found]
    assert all(found[0] == found[1] != found[2] for _, found in graphs)
    assert len(set(slots)) == 6 and max(slots) < 0
    del graphs
    torch.cuda.synchronize()
    seen = set()
    for _ in range(cuda._C.GRAPH_SLOTS):  # more than there are, one after the other
        seen.update(owners()[1])
    assert None not in seen
