"""Random problems from the whole option space, each against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import test_kvcache
import torch
from helpers import (
    DTYPES,
    check,
    check_lengths_within,
    covered,
    covered_pages,
    dense,
    guarded,
    varlen,
)
from hypothesis import given
from hypothesis import strategies as st
from oracle import Attention

LENGTH = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 150]))


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    nheads_kv = draw(st.integers(1, 3))
    headdim = draw(st.sampled_from([8, 16, 24, 40, 64]))
    return {
        "nheads": nheads_kv * draw(st.integers(1, 3)),
        "nheads_kv": nheads_kv,
        "headdim": headdim,
        "headdim_v": draw(st.sampled_from([headdim, 8, 32])),
        "dtype": draw(st.sampled_from(covered(DTYPES))),
    }


@st.composite
def page_size(draw: st.DrawFn, *sizes: int) -> int | None:
    return draw(st.sampled_from(covered_pages(None, *sizes)))


SIDE = st.one_of(st.just(-1), st.integers(0, 20), st.sampled_from([63, 64, 128]))
# What an example may choose; True stands for random values of that option's shape.
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "causal": st.just(True),
        "window_size": st.tuples(SIDE, SIDE),
        "softmax_scale": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
        "softcap": st.sampled_from([0.5, 2.0, 30.0]),
        "alibi_slopes": st.sampled_from(["(nheads,)", "(batch, nheads)"]),
        "s_aux": st.just("(nheads,)"),
        "dropout_p": st.sampled_from([1e-30, 0.1, 0.5, 0.9]),
    },
)
SEED = st.integers(0, 2**32 - 1)


def with_values(chosen: dict[str, Any], batch: int, nheads: int, device: str) -> dict[str, Any]:
    """The options with random values for those that are tensors."""
    shapes = {"(nheads,)": (nheads,), "(batch, nheads)": (batch, nheads)}
    return {
        name: torch.rand(shapes[value], device=device) if isinstance(value, str) else value
        for name, value in chosen.items()
    }


def inside_nan(problem: Attention) -> Attention:
    q, k, v = map(guarded, (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v)


@given(
    sizes=st.tuples(st.integers(0, 3), LENGTH, LENGTH),
    shape=heads(),
    chosen=OPTIONS,
    strided=st.booleans(),
    seed=SEED,
)
def test_dense(device, sizes, shape, chosen, strided, seed):
    torch.manual_seed(seed)
    options = with_values(chosen, sizes[0], shape["nheads"], device)
    problem = dense(*sizes, **shape, device=device, **options)
    check(inside_nan(problem) if strided else problem)


SEQUENCES = st.lists(st.tuples(LENGTH, LENGTH), max_size=4)


@given(
    lengths=SEQUENCES,
    slack=st.integers(0, 3),
    shape=heads(),
    chosen=OPTIONS,
    strided=st.booleans(),
    seed=SEED,
)
def test_varlen(device, lengths, slack, shape, chosen, strided, seed):
    torch.manual_seed(seed)
    seqlens_q, seqlens_k = zip(*lengths, strict=True) if lengths else ((), ())
    options = with_values(chosen, len(lengths), shape["nheads"], device)
    problem = varlen(seqlens_q, seqlens_k, **shape, device=device, slack=slack, **options)
    check(inside_nan(problem) if strided else problem)


@given(
    lengths=st.lists(st.tuples(LENGTH, LENGTH, LENGTH), min_size=1, max_size=4),
    page_size=page_size(1, 5, 16, 64),
    shape=heads(),
    chosen=OPTIONS,
    seed=SEED,
)
def test_varlen_with_lengths_within(device, lengths, page_size, shape, chosen, seed):
    """seqused_k and leftpad_k, perhaps paged; the keys that they exclude are NaN."""
    torch.manual_seed(seed)
    options = with_values(chosen, len(lengths), shape["nheads"], device)
    options |= {"s_aux": None, "dropout_p": 0.0}  # the private forward has the other options
    seqlens_q, seqlens_k, seqused = zip(*lengths, strict=True)
    problem = varlen(seqlens_q, seqlens_k, **shape, device=device, **options)
    leftpad = [length // 3 for length in seqused]
    seqused = [min(pair) for pair in zip(seqused, seqlens_k, strict=True)]
    check_lengths_within(problem, seqused, leftpad, page_size)


@given(
    lengths=st.lists(st.integers(-1, 150), min_size=1, max_size=4),
    seqlens=st.tuples(st.integers(1, 5), st.integers(0, 4)),
    slack=st.integers(0, 20),
    where=st.one_of(st.just("slots"), page_size(1, 7, 16, 64, 256)),
    padded=st.booleans(),
    rotary=st.tuples(st.sampled_from([0, 2, 8]), st.booleans()),
    shape=heads(),
    chosen=OPTIONS,
    seed=SEED,
)
def test_kv_cache(device, lengths, seqlens, slack, where, padded, rotary, shape, chosen, seed):
    torch.manual_seed(seed)
    batch, (seqlen_q, seqlen_new) = len(lengths), seqlens
    options = with_values(chosen, batch, shape["nheads"], device) | {"dropout_p": 0.0}
    case = test_kvcache.decode(
        lengths,
        seqlen_q,
        seqlen_new,
        capacity=max(*lengths, 1) + seqlen_new + slack,
        page_size=where if isinstance(where, int) else None,
        cache_batch_idx=torch.randperm(batch + 2).tolist()[:batch] if where == "slots" else None,
        leftpad=[max(0, length // 2) for length in lengths] if padded else None,
        rotary_dim=rotary[0] if seqlen_new else 0,
        rotary_interleaved=rotary[1],
        device=device,
        **shape,
        **options,
    )
    test_kvcache.check(case)
