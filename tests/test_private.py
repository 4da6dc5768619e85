"""The private functions: what context-parallel and framework code calls directly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import (
    LAYOUTS,
    OPTIONS,
    check_lengths_within,
    dense,
    int32,
    layout_of,
    poisoned_outside,
    private_backward,
    private_forward,
    varlen,
    with_dropout_mask,
)
from oracle import Storage, assert_matches_oracle

from flash_attn import flash_attn_interface
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

NO_SINKS = [name for name in OPTIONS if name not in ("sinks", "everything")]  # private: no s_aux


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", NO_SINKS)
def test_forward_and_backward(device, layout, options):
    problem = LAYOUTS[layout](
        nheads=4, dtype=torch.bfloat16, device=device, **OPTIONS[options](2, 4, device)
    )
    problem = with_dropout_mask(problem)
    torch.manual_seed(7)
    out, lse, _, rng_state = private_forward(problem)
    assert rng_state.shape == (2,)
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
    out = (out0 * weights[0] + out1 * weights[1]).to(problem.q.dtype)
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
    out = (out0 * weights[0] + out1 * weights[1]).to(problem.q.dtype)
    dout = torch.randn_like(out)

    grads = {"dq": torch.zeros_like(problem.q)}
    grads |= {name: torch.zeros_like(problem.k) for name in ("dk", "dv")}
    for half, r in zip(halves, rows, strict=True):
        results = private_backward(half, dout, out, lse)
        grads["dq"] += results["dq"]
        grads["dk"][r], grads["dv"][r] = results["dk"], results["dv"]
    assert_matches_oracle({"out": out, "lse": lse} | grads, problem, dout)


@pytest.mark.parametrize("page_size", [None, 8])
def test_lengths_of_varlen(device, page_size):
    """seqused_k and leftpad_k narrow the keys of a sequence; what they exclude is never read.

    Its gradient is zero. (Pages have none.)
    """
    problem = varlen([5, 9, 1], [21, 9, 30], 4, 2, device=device, causal=True)
    check_lengths_within(problem, [17, 9, 0], [3, 9, 0], page_size)


def test_keywords_may_leave_others_out():
    """A keyword is not lost where parameters before it are not given."""
    problem = varlen([5, 9], [21, 9], slack=0)
    arguments = problem.q, problem.k, problem.v, *layout_of(problem), 0.0, None, False
    whole = _flash_attn_varlen_forward(*arguments)[0]
    none = _flash_attn_varlen_forward(*arguments, seqused_k=int32([0, 0]))[0]
    sinks = _flash_attn_varlen_forward(*arguments, s_aux=torch.full((2,), 50.0))[0]
    assert whole.any() and not none.any() and sinks.abs().max() < 1e-6
    with pytest.raises(TypeError, match="missing.*'causal'"):
        _flash_attn_varlen_forward(*arguments[:-1], seqused_k=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sequsedk'"):
        _flash_attn_varlen_forward(*arguments, sequsedk=None)
    with pytest.raises(TypeError, match="multiple values for argument 'q'"):
        _flash_attn_varlen_forward(*arguments, q=problem.q)


def test_wrapped_handles_are_the_functions():
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        wrapped = getattr(flash_attn_interface, f"_wrapped_flash_attn_{name}")
        assert callable(wrapped)
        assert wrapped is getattr(flash_attn_interface, f"_flash_attn_{name}")
