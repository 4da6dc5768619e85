"""Numbers and flags as PyTorch takes them: of Python, of NumPy, tensors of one element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import cu_seqlens, default_dtype, dense, guarded, int32, randn, varlen

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

# An option, what it is given as, and the plain number that this means.
ACCEPTED: list[tuple[str, Any, Any]] = [
    ("causal", None, False),
    ("causal", 1, True),
    ("causal", np.bool_(True), True),
    ("causal", np.int64(0), False),
    ("causal", torch.tensor(True), True),
    ("causal", torch.tensor([1]), True),
    ("deterministic", None, False),
    ("deterministic", np.bool_(True), True),
    ("deterministic", torch.tensor(0), False),
    ("softmax_scale", np.float32(0.5), 0.5),
    ("softmax_scale", np.float64(0.25), 0.25),
    ("softmax_scale", 1, 1.0),
    ("softmax_scale", torch.tensor(0.5), 0.5),
    ("softmax_scale", torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
    ("softmax_scale", torch.nn.Parameter(torch.tensor(0.5)), 0.5),
    ("softcap", np.float16(2.0), 2.0),
    ("softcap", torch.tensor(2), 2.0),
    ("softcap", False, 0.0),
    ("dropout_p", False, 0.0),
    ("dropout_p", np.float32(0.0), 0.0),
    ("dropout_p", torch.tensor(0.0), 0.0),
    ("window_size", torch.tensor([3, 4]), (3, 4)),
    ("window_size", (np.int64(3), np.int32(-1)), (3, -1)),
    ("window_size", list(np.array([2, 0])), (2, 0)),
    ("window_size", [torch.tensor([5]), 1], (5, 1)),
]


@pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])
@pytest.mark.parametrize("name, given, plain", ACCEPTED, ids=lambda value: repr(value)[:40])
def test_option(device, name, given, plain, gradient):
    if isinstance(given, torch.Tensor) and name in ("softcap", "causal"):
        given = given.to(device)  # is read, wherever it lies
    problem = dense(2, 9, 12, device=device)
    q = problem.q.requires_grad_(gradient)
    results = []
    for value in (given, plain):
        out = flash_attn_func(q, problem.k, problem.v, **{name: value})
        results.append(torch.autograd.grad(out.sum(), q)[0] if gradient else out)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "length", [np.int32(9), torch.tensor(9), torch.tensor([9]), torch.tensor(9).short()], ids=repr
)
def test_max_seqlen(device, length):
    problem = varlen([9, 4], [9, 4], device=device)
    bounds = problem.cu_seqlens_q, problem.storage.cu_seqlens
    on_device = length.to(device) if isinstance(length, torch.Tensor) else length
    q, k, v = problem.q, problem.k, problem.v
    expected = flash_attn_varlen_func(q, k, v, *bounds, 9, 9)
    assert torch.equal(flash_attn_varlen_func(q, k, v, *bounds, length, on_device), expected)


@pytest.mark.parametrize("length", [np.int64(5), torch.tensor(5)], ids=repr)
def test_cache(device, length):
    problem, new = dense(2, 1, 12, device=device), dense(2, 1, 1, device=device)
    table = torch.rand(12, 8, device=device).to(problem.q.dtype)
    results = []
    for numbers in (
        {"cache_seqlens": 5, "rotary_interleaved": False, "num_splits": 1},
        {
            "cache_seqlens": length,
            "rotary_interleaved": np.bool_(False),
            "num_splits": np.int64(1),
        },
    ):
        caches = problem.k.clone(), problem.v.clone()
        out = flash_attn_with_kvcache(problem.q, *caches, new.k, new.v, table, table, **numbers)
        results.append((out, *caches))
    assert all(map(torch.equal, *results))


def test_number_that_changes_in_place(device):
    """The value of a tensor counts, not which tensor it is."""
    problem, scale = dense(device=device), torch.tensor(1.0)
    for value in (1.0, 0.1):
        scale.fill_(value)
        results = [
            flash_attn_func(problem.q, problem.k, problem.v, softmax_scale=given)
            for given in (scale, value)
        ]
        assert torch.allclose(*results)


def test_splits_of_a_forward():
    """Upstream's argument; more than one is not supported yet."""
    arguments = (*(randn(9, 2, 8) for _ in range(3)), *[cu_seqlens([9])] * 2, 9, 9, 0.0, None, True)
    expected = _flash_attn_varlen_forward(*arguments)[0]
    for num_splits in (0, 1, np.int64(1)):
        assert torch.equal(
            _flash_attn_varlen_forward(*arguments, num_splits=num_splits)[0], expected
        )
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        _flash_attn_varlen_forward(*arguments, num_splits=2)


# ---- rows with gaps ------------------------------------------------------------------------------


def gapped(x: torch.Tensor) -> torch.Tensor:
    """A copy of x whose last dimension is not contiguous."""
    return guarded(x.mT).mT


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_rows_with_gaps_are_copied(device, which):
    problem = dense(2, 9, 12, 4, 2, device=device)
    inputs = {name: getattr(problem, name).detach() for name in "qkv"}
    results = []
    for change in (lambda x: x, gapped):
        given = {n: change(x) if n in which else x for n, x in inputs.items()}
        leaves = [x.detach().requires_grad_() for x in given.values()]
        out = flash_attn_func(*leaves, causal=True)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for plain, copied in zip(*results, strict=True):
        torch.testing.assert_close(plain, copied)


@pytest.mark.parametrize("expanded", [False, True], ids=["gaps", "one-value-a-row"])
def test_packed_rows_with_gaps_are_copied(device, expanded):
    problem = varlen([4, 5], [5, 7], slack=0, device=device)
    bounds = cu_seqlens([4, 5], device), cu_seqlens([5, 7], device)
    v = problem.v[..., :1].expand_as(problem.v) if expanded else gapped(problem.v)
    results = [
        flash_attn_varlen_func(problem.q, problem.k, x, *bounds, 5, 7) for x in (v, v.contiguous())
    ]
    assert torch.equal(*results)


def test_new_keys_with_gaps(device):
    problem, new = dense(2, 1, 12, device=device), dense(2, 3, 3, device=device)
    lengths = int32([2, 9], device)
    results = []
    for change in (lambda x: x, gapped):
        caches = problem.k.clone(), problem.v.clone()
        out = flash_attn_with_kvcache(
            change(problem.q), *caches, change(new.k), change(new.v), cache_seqlens=lengths
        )
        results.append((out, *caches))
    assert default_dtype() == problem.q.dtype and all(map(torch.equal, *results))
