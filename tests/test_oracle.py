"""The oracle agrees with PyTorch's own attention, and its bound refuses what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import DTYPES, OPTIONS, dense, dtype_name, randn
from oracle import assert_close_to_oracle, expect, rotate
from torch import Tensor

NOT_A_BIAS = ("softcap", "dropout", "sinks", "everything")
SDPA_OPTIONS = [name for name in OPTIONS if name not in NOT_A_BIAS]


@pytest.mark.parametrize("options", SDPA_OPTIONS)
def test_oracle_agrees_with_pytorch(options):
    """Forward and gradients, for the options that fit into a bias matrix."""
    sq, sk = 31, 40  # every query sees a key: PyTorch gives NaN where it doesn't
    problem = dense(2, sq, sk, 4, 2, dtype=torch.float64, **OPTIONS[options](2, 4, "cpu"))
    dout = torch.randn_like(problem.q)
    expected = expect(problem, dout)

    i, j = torch.arange(sq)[:, None] + (sk - sq), torch.arange(sk)
    bias = torch.zeros(2, 4, sq, sk, dtype=torch.float64)
    if problem.alibi_slopes is not None:
        slopes = problem.alibi_slopes.double().expand(2, 4)
        bias -= slopes[..., None, None] * (i - j).abs()
    left, right = problem.window_size
    if problem.causal or right >= 0:
        bias[..., j > i + (0 if problem.causal else right)] = -torch.inf
    if left >= 0:
        bias[..., j < i - left] = -torch.inf
    leaves = [x.transpose(1, 2).requires_grad_() for x in (problem.q, problem.k, problem.v)]
    q, (k, v) = leaves[0], (x.repeat_interleave(2, dim=1) for x in leaves[1:])
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, scale=problem.scale
    )
    grads = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(value.transpose(1, 2), expected[name].exact)


def test_rotation_is_complex_multiplication():
    x, angles = randn(7, 2, 10, dtype=torch.float64), torch.rand(20, 3, dtype=torch.float64)
    positions = [4, 0, 19, 7, 7, 1, 2]
    turn = torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    pairs = torch.view_as_complex(x[..., :6].unflatten(-1, (3, 2)).contiguous())
    rotated = torch.view_as_real(pairs * turn).flatten(-2)
    interleaved = rotate(x, angles.cos(), angles.sin(), positions, interleaved=True)
    torch.testing.assert_close(interleaved, torch.cat([rotated, x[..., 6:]], -1))

    order = [0, 3, 1, 4, 2, 5, 6, 7, 8, 9]  # of the halves (0 1 2) (3 4 5) as pairs
    halves = rotate(x, angles.cos(), angles.sin(), positions, interleaved=False)
    paired = rotate(x[..., order], angles.cos(), angles.sin(), positions, interleaved=True)
    torch.testing.assert_close(halves[..., order], paired)


def one_element(x: Tensor) -> Tensor:
    x[0, 3, 1, 0] += 0.2 * x.abs().max()
    return x


def one_row(x: Tensor) -> Tensor:
    x[1, 5] = x[1, 6]
    return x


def not_a_number(x: Tensor) -> Tensor:
    x[0, 0, 0, 0] = torch.nan
    return x


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": one_element,
    "one row": one_row,
    "NaN": not_a_number,
    "scaled": lambda x: x * 1.1,
    "zero": torch.zeros_like,
    "shape": lambda x: x[..., :-1],
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_bound_accepts_naive_arithmetic_and_refuses_what_is_wrong(dtype, wrong):
    problem = dense(2, 33, 40, dtype=dtype, causal=True)
    for name, expected in expect(problem, torch.randn_like(problem.q)).items():
        assert_close_to_oracle(expected.naive, expected, name)
        if name != "lse":
            with pytest.raises(AssertionError, match=name):
                assert_close_to_oracle(WRONG[wrong](expected.naive.clone()), expected, name)


def test_bound_is_the_tighter_the_finer_the_dtype():
    """Of the largest value, a few times the dtype's own precision."""
    for dtype, limit in zip(DTYPES, (5e-3, 4e-2, 3e-5, 1e-13), strict=True):
        problem = dense(2, 65, 130, 4, 2, 64, dtype=dtype)
        for name, expected in expect(problem, torch.randn_like(problem.q)).items():
            relative = expected.tolerance / expected.exact.abs().max().item()
            assert relative < limit, f"{name} in {dtype}: {relative:.2g}"
