"""Derivatives of every order and mode, and torch.func's transforms, of the tiled algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    OPTIONS,
    dense,
    in_pages,
    int32,
    layout_of,
    poisoned_outside_keys,
    since_torch,
    varlen,
)
from oracle import Attention, Storage
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, linearize, vjp, vmap

from flash_attn import _arguments
from flash_attn._backends import tiled
from flash_attn._backends.philox import dropout_keep_mask

pytestmark = since_torch(2, 5, "the oracle runs in transforms")
RNG_STATE = torch.tensor([3, 4])
FLOAT64 = {"dtype": torch.float64}
Inputs = tuple[Tensor, ...]  # q, k, v and, where there are any, sinks
Forward = Callable[..., tuple[Tensor, Tensor]]


def narrowed() -> Attention:
    """Keys from a row to another of each sequence: the second of three has none, the third one."""
    problem = varlen([3, 2, 2], [9, 6, 7], 2, 1, 4, causal=True, **FLOAT64)
    storage = replace(problem.storage, seqused=int32([8, 3, 1]), leftpad=int32([3, 3, 0]))
    return poisoned_outside_keys(replace(problem, storage=storage))


def slots() -> Attention:
    """Keys in slots 2 and 0 of a dense cache."""
    problem = dense(2, 2, 6, 2, 1, 4, causal=True, **FLOAT64)
    k, v = (torch.cat([x, x[:1]]) for x in (problem.k, problem.v))
    storage = Storage(seqused=int32([5, 1]), cache_batch_idx=int32([2, 0]))
    return poisoned_outside_keys(replace(problem, k=k, v=v, storage=storage))


def pages() -> Attention:
    problem = varlen([3, 2], [7, 4], 2, 1, 4, causal=True, **FLOAT64)
    return in_pages(problem, page_size=3)


PROBLEMS: dict[str, Callable[[], Attention]] = {
    **{
        # The first two queries of a causal problem see no key.
        f"dense-{name}": lambda make=make: dense(
            1, 5, 3, 2, 1, 4, 3, **FLOAT64, **make(1, 2, "cpu")
        )
        for name, make in OPTIONS.items()
    },
    "varlen": lambda: varlen([3, 0, 2, 1], [2, 3, 4, 0], 2, 1, 4, causal=True, **FLOAT64),
    "varlen-everything": lambda: varlen(
        [3, 2], [2, 4], 2, 1, 4, **FLOAT64, **OPTIONS["everything"](2, 2, "cpu")
    ),
    "lengths-within": narrowed,
    "slots": slots,
    "pages": pages,
    # Several tiles, of which the first rows' see nothing and are constant.
    "tiles": lambda: dense(1, 300, 150, 1, 1, 2, causal=True, **FLOAT64),
    "varlen-tiles": lambda: varlen([300, 3], [150, 140], 1, 1, 2, window_size=(200, 0), **FLOAT64),
}
SMALL = [name for name in PROBLEMS if "tiles" not in name]


def inputs_of(problem: Attention) -> Inputs:
    sinks = () if problem.s_aux is None else (problem.s_aux.double(),)
    return problem.q, problem.k, problem.v, *sinks


def forward_of(problem: Attention) -> Callable[..., tuple[Tensor, Tensor]]:
    """The library's (out, lse) of the inputs and, if given, another ``rng_state``."""
    storage = problem.storage
    left, right = problem.window_size
    numbers = problem.dropout_p, problem.scale, problem.causal, left, right, problem.softcap, False
    options = _arguments.options(*numbers)
    layout = () if problem.cu_seqlens_q is None else layout_of(problem)

    def forward(*inputs: Tensor, rng_state: Tensor = RNG_STATE) -> tuple[Tensor, Tensor]:
        q, k, v, *sinks = inputs
        more: dict[str, Any] = {"s_aux": sinks[0] if sinks else None}
        if layout:
            more |= {"seqused_k": storage.seqused, "leftpad_k": storage.leftpad}
            more |= {"block_table": storage.block_table}
            given = _arguments.varlen(q, k, v, *layout, options, problem.alibi_slopes, **more)
        else:
            # What the keys' slots need is no part of the dense functions.
            batch = problem.q.shape[0]
            given = _arguments.dense(q, k[:batch], v[:batch], options, problem.alibi_slopes, **more)
            given = given._replace(
                k=k, v=v, seqused_k=storage.seqused, cache_batch_idx=storage.cache_batch_idx
            )
        state = rng_state if problem.dropout_p else None
        return tiled.differentiable_forward(given, state, False)[:2]

    return forward


def expected_of(problem: Attention, rng_state: Tensor = RNG_STATE) -> Forward:
    """The oracle's (out, lse) of the inputs; lse is -inf where it is unspecified."""
    if problem.dropout_p:
        batch, nheads = len(problem.queries()), problem.q.shape[-2]
        rows = problem.q.shape[-3], problem.k.shape[-3]
        keep = dropout_keep_mask(rng_state, problem.dropout_p, batch, nheads, *rows)
        problem = replace(problem, keep=keep)

    def forward(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        names = "q", "k", "v", "s_aux"
        out, lse = replace(problem, **dict(zip(names, inputs, strict=False))).forward()
        return out, lse.masked_fill(lse.isnan(), -torch.inf)

    return forward


def finite(function: Forward) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function with 0 for the log-sum-exp of rows that see nothing."""

    def call(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = function(*inputs)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return call


def scalar(function: Forward) -> Callable[..., Tensor]:
    """One number that depends on all results, and not linearly."""

    def call(*inputs: Tensor) -> Tensor:
        out, lse = function(*inputs)
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        return out.square().sum() + out.sum() + seen.sin().sum()

    return call


def like(inputs: Inputs) -> Inputs:
    return tuple(torch.randn_like(x) for x in inputs)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.fixture(params=PROBLEMS)
def problem(request: pytest.FixtureRequest) -> Attention:
    return PROBLEMS[request.param]()


@pytest.fixture(params=SMALL)
def small(request: pytest.FixtureRequest) -> Attention:
    return PROBLEMS[request.param]()


def test_values_and_reverse_mode(problem):
    inputs, forward, expected = inputs_of(problem), forward_of(problem), expected_of(problem)
    assert_same(forward(*inputs), expected(*inputs))
    every = tuple(range(len(inputs)))
    gradients = grad(scalar(expected), every)(*inputs)
    assert_same(grad(scalar(forward), every)(*inputs), gradients)
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert_same(torch.autograd.grad(scalar(forward)(*leaves), leaves), gradients)


def test_forward_mode(problem):
    inputs, forward, expected = inputs_of(problem), forward_of(problem), expected_of(problem)
    tangents = like(inputs)
    result = jvp(finite(expected), inputs, tangents)
    assert_same(jvp(finite(forward), inputs, tangents), result)
    with torch.no_grad(), forward_ad.dual_level():  # tangents do not ask for grad mode
        duals = finite(forward)(*map(forward_ad.make_dual, inputs, tangents))
        parts = [forward_ad.unpack_dual(x) for x in duals]
        # A tensor that no tangent reaches has none.
        actual = [torch.zeros_like(x) if t is None else t for x, t in parts]
    assert_same(tuple(actual), result[1])


def test_finite_differences(small):
    leaves = [x.clone().requires_grad_() for x in inputs_of(small)]
    function = finite(forward_of(small))
    batched = {"check_batched_grad": True, "fast_mode": True}
    forward_mode = {"check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, leaves, **batched, **forward_mode)
    assert torch.autograd.gradgradcheck(function, leaves, **batched, check_fwd_over_rev=True)


def test_second_derivatives(small):
    """Forward over reverse mode, through vmap, against reverse over reverse mode of the oracle."""
    inputs, forward, expected = inputs_of(small), forward_of(small), expected_of(small)
    every = tuple(range(len(inputs)))
    exact = torch.autograd.functional.hessian(scalar(expected), inputs)
    assert_same(hessian(scalar(forward), every)(*inputs), exact)
    assert_same(jacrev(grad(scalar(forward), every), every)(*inputs), exact)


def test_linearize_and_vjp():
    problem = PROBLEMS["varlen-everything"]()
    inputs, forward, expected = inputs_of(problem), forward_of(problem), expected_of(problem)
    tangents = like(inputs)
    out, pushforward = linearize(finite(forward), *inputs)
    assert_same((out, pushforward(*tangents)), jvp(finite(expected), inputs, tangents))
    out, pullback = vjp(finite(forward), *inputs)
    exact, exact_pullback = vjp(finite(expected), *inputs)
    cotangents = like(out)
    assert_same((out, pullback(cotangents)), (exact, exact_pullback(cotangents)))


def test_sink_of_no_weight():
    """A sink of -inf is none, also to a row that sees nothing else."""
    problem = dense(1, 5, 3, 2, 2, 4, causal=True, **FLOAT64)
    inputs = inputs_of(problem)
    with_sinks, expected = forward_of(problem), expected_of(problem)
    sinks = torch.full((2,), -torch.inf, dtype=torch.float64)
    assert_same(with_sinks(*inputs, sinks), expected(*inputs))
    *gradients, of_sinks = grad(scalar(with_sinks), (0, 1, 2, 3))(*inputs, sinks)
    assert_same(tuple(gradients), grad(scalar(expected), (0, 1, 2))(*inputs))
    assert not of_sinks.any()


def test_no_key():
    inputs = inputs_of(dense(1, 2, 0, 1, 1, 4, **FLOAT64))
    forward = forward_of(dense(1, 2, 0, 1, 1, 4, **FLOAT64))
    out, lse = forward(*inputs)
    assert not out.any() and (lse == -torch.inf).all()
    assert not hessian(scalar(forward))(*inputs).any()
    assert not jvp(finite(forward), inputs, like(inputs))[1][0].any()


def batches(inputs: Inputs, batched: tuple[int | None, ...]) -> tuple[Inputs, list[Inputs]]:
    """Three values of the inputs whose in_dims is 0, stacked; and the three calls one by one."""
    stacked = tuple(
        x if dim is None else torch.stack([x, torch.randn_like(x).where(x.isfinite(), x), x])
        for x, dim in zip(inputs, batched, strict=True)
    )
    each = [
        tuple(x if dim is None else x[i] for x, dim in zip(stacked, batched, strict=True))
        for i in range(3)
    ]
    return stacked, each


@pytest.mark.parametrize("which", ["all", "q", "k", "v", "sinks"])
def test_vmap(problem, which):
    inputs, forward, expected = inputs_of(problem), forward_of(problem), expected_of(problem)
    names = ["q", "k", "v", "sinks"][: len(inputs)]
    if which not in ("all", *names):
        pytest.skip("no sinks")
    in_dims = tuple(0 if which in ("all", name) else None for name in names)
    stacked, each = batches(inputs, in_dims)
    assert_same(
        vmap(forward, in_dims)(*stacked),
        tuple(map(torch.stack, zip(*(expected(*one) for one in each), strict=True))),
    )
    every = tuple(range(len(inputs)))
    per_sample = vmap(grad(scalar(forward), every), in_dims)(*stacked)
    gradients = [grad(scalar(expected), every)(*one) for one in each]
    assert_same(per_sample, tuple(map(torch.stack, zip(*gradients, strict=True))))


@pytest.mark.parametrize("in_dims", [(None, None, None), (0, None, None), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("layout", ["dense-dropout", "varlen-everything"])
def test_vmap_over_dropout_masks(layout, in_dims):
    problem = PROBLEMS[layout]()
    inputs = inputs_of(problem)
    in_dims += (None,) * (len(inputs) - 3)
    stacked, each = batches(inputs, in_dims)
    states = torch.tensor([[3, 4], [5, 6], [2**40, 7]])
    forward = forward_of(problem)
    actual = vmap(lambda s, *x: forward(*x, rng_state=s), (0, *in_dims))(states, *stacked)
    expected = [expected_of(problem, state)(*one) for state, one in zip(states, each, strict=True)]
    assert_same(actual, tuple(map(torch.stack, zip(*expected, strict=True))))


def test_vmap_over_lengths():
    """Lengths that differ from example to example are not read on the host."""
    problem = PROBLEMS["lengths-within"]()
    storages = [
        replace(problem.storage, seqused=problem.storage.seqused - i, leftpad=None)
        for i in range(3)
    ]
    q, k, v = problem.q, problem.k.nan_to_num(), problem.v.nan_to_num()

    def call(seqused: Tensor) -> tuple[Tensor, Tensor]:
        storage = replace(problem.storage, seqused=seqused, leftpad=None)
        return forward_of(replace(problem, storage=storage))(q, k, v)

    actual = vmap(call)(torch.stack([storage.seqused for storage in storages]))
    expected = [expected_of(replace(problem, storage=x))(q, k, v) for x in storages]
    assert_same(actual, tuple(map(torch.stack, zip(*expected, strict=True))))


def test_probabilities_have_no_derivative():
    problem = PROBLEMS["dense-dropout"]()
    options = _arguments.options(problem.dropout_p, None, False, -1, -1, 0.0, False)

    def signed(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
        given = _arguments.dense(q, k, v, options)
        probs = tiled.differentiable_forward(given, state, True)[2]
        return torch.empty(0) if probs is None else probs

    q, k, v = inputs_of(problem)
    given = _arguments.dense(q, k, v, options)
    states = torch.tensor([[3, 4], [5, 6]])
    expected = [tiled.forward(given, state, True)[2] for state in states]
    leaf = q.clone().requires_grad_()
    assert not signed(leaf, k, v, states[0]).requires_grad
    assert_same(
        jvp(lambda q: signed(q, k, v, states[0]), (q,), (q,)), (expected[0], 0 * expected[0])
    )
    assert_same(vmap(signed, (None, None, None, 0))(q, k, v, states), torch.stack(expected))
