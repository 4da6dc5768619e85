"""The private functions: what context-parallel and framework code calls directly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import (
    LAYOUTS,
    NAN,
    OPTIONS,
    assert_guard_intact,
    dense,
    guarded,
    int32,
    layout_of,
    poisoned_outside,
    poisoned_outside_keys,
    private_forward,
    randn,
    random_pages,
    varlen,
    with_dropout_mask,
)
from oracle import Attention, Storage, assert_matches_oracle
from torch import Tensor

from flash_attn import flash_attn_interface
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_varlen_backward

NO_SINKS = [name for name in OPTIONS if name not in ("sinks", "everything")]  # private: no s_aux


def private_backward(
    problem: Attention, dout: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor | None = None
) -> dict[str, Tensor]:
    """dq, dk, dv, written into views inside NaN, and delta."""
    grads = {
        f"d{name}": guarded(torch.full_like(x, NAN))
        for name, x in (("q", problem.q), ("k", problem.k), ("v", problem.v))
    }
    arguments = [dout, problem.q, problem.k, problem.v, out, lse, *grads.values()]
    if problem.cu_seqlens_q is not None:
        arguments += layout_of(problem)
    arguments += [problem.dropout_p, problem.scale, problem.causal, *problem.window_size]
    arguments += [problem.softcap, problem.alibi_slopes, False, rng_state]
    backward = _flash_attn_backward if problem.cu_seqlens_q is None else _flash_attn_varlen_backward
    delta = backward(*arguments)
    for grad in grads.values():
        assert_guard_intact(grad)
    return grads | {"delta": delta}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", NO_SINKS)
def test_forward_and_backward(device, layout, options):
    problem = LAYOUTS[layout](
        nheads=4, dtype=torch.bfloat16, device=device, **OPTIONS[options](2, 4, device)
    )
    problem = with_dropout_mask(problem)
    torch.manual_seed(7)
    out, lse, _, rng_state = private_forward(problem)
    assert rng_state.shape == ((2,) if problem.dropout_p else (0,))
    assert rng_state.dtype == torch.int64 and rng_state.device == problem.q.device
    dout = poisoned_outside(torch.randn_like(out), problem)
    results = private_backward(problem, dout, out, lse, rng_state if problem.dropout_p else None)
    delta = results.pop("delta")
    assert_matches_oracle({"out": out, "lse": lse} | results, problem, dout)
    assert delta.shape == lse.shape and delta.dtype == torch.float32
    expected = (dout.float().nan_to_num() * out.float()).sum(-1).movedim(-1, -2)
    torch.testing.assert_close(delta, expected, rtol=1e-3, atol=1e-3)


def test_context_parallel_halves_sum_to_the_whole(device):
    """Ring attention: attend to half of the keys at a time, merge, and go back half by half."""
    problem = dense(2, 40, 64, 4, 2, device=device)
    halves = [
        replace(problem, k=problem.k[:, rows], v=problem.v[:, rows])
        for rows in (slice(0, 27), slice(27, 64))
    ]
    (out0, lse0, *_), (out1, lse1, *_) = map(private_forward, halves)
    lse = torch.logaddexp(lse0, lse1)
    weights = [(part - lse).exp().movedim(1, 2)[..., None] for part in (lse0, lse1)]
    out = out0 * weights[0] + out1 * weights[1]
    dout = torch.randn_like(out)

    first, second = (private_backward(half, dout, out, lse) for half in halves)
    grads = {
        "dq": first["dq"] + second["dq"],
        "dk": torch.cat([first["dk"], second["dk"]], 1),
        "dv": torch.cat([first["dv"], second["dv"]], 1),
    }
    assert_matches_oracle({"out": out, "lse": lse} | grads, problem, dout)


def test_varlen_context_parallel(device):
    problem = varlen([19, 30], [24, 30], device=device, slack=0)
    whole = problem.storage.cu_seqlens.tolist()
    middle = [start + 11 for start in whole[:2]]
    rows = [
        [row for b in range(2) for row in range(whole[b], middle[b])],
        [row for b in range(2) for row in range(middle[b], whole[b + 1])],
    ]
    bounds = [[0, 11, 22], [0, whole[1] - 11, whole[2] - 22]]
    halves = [
        replace(problem, k=problem.k[r], v=problem.v[r], storage=Storage(int32(b, device)))
        for r, b in zip(rows, bounds, strict=True)
    ]
    (out0, lse0, *_), (out1, lse1, *_) = map(private_forward, halves)
    lse = torch.logaddexp(lse0, lse1)
    weights = [(part - lse).exp().mT[..., None] for part in (lse0, lse1)]
    out = out0 * weights[0] + out1 * weights[1]
    dout = torch.randn_like(out)

    grads = {"dq": torch.zeros_like(problem.q)}
    grads |= {name: torch.zeros_like(problem.k) for name in ("dk", "dv")}
    for half, r in zip(halves, rows, strict=True):
        results = private_backward(half, dout, out, lse)
        grads["dq"] += results["dq"]
        grads["dk"][r], grads["dv"][r] = results["dk"], results["dv"]
    assert_matches_oracle({"out": out, "lse": lse} | grads, problem, dout)


@pytest.mark.parametrize("page_size", [None, 8])
def test_lengths_of_varlen_forward(device, page_size):
    """seqused_k and leftpad_k narrow the keys of a sequence; what they exclude is never read."""
    problem = varlen([5, 9, 1], [21, 9, 30], 4, 2, device=device, causal=True)
    storage = replace(
        problem.storage, seqused=int32([17, 9, 0], device), leftpad=int32([3, 9, 0], device)
    )
    if page_size:
        storage.block_table = random_pages(3, 4, device)
        problem.k, problem.v = (randn(14, page_size, 2, 32, device=device) for _ in range(2))
    problem = poisoned_outside_keys(replace(problem, storage=storage))
    out, lse, *_ = private_forward(problem)
    assert_matches_oracle({"out": out, "lse": lse}, problem)


def test_wrapped_handles_are_the_functions():
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        wrapped = getattr(flash_attn_interface, f"_wrapped_flash_attn_{name}")
        assert callable(wrapped)
        assert wrapped is getattr(flash_attn_interface, f"_flash_attn_{name}")


def test_small_helpers():
    x = torch.randn(3, 4)
    assert flash_attn_interface.maybe_contiguous(x) is x
    assert flash_attn_interface.maybe_contiguous(None) is None
    assert flash_attn_interface.maybe_contiguous(x.T).stride(-1) == 1
    assert flash_attn_interface.round_multiple(5, 4) == 8
    assert flash_attn_interface.round_multiple(8, 4) == 8
