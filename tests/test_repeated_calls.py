"""A call like an earlier one skips checks and choice: it must differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn import _backends, _ops, flash_attn_func, use_backend
from flash_attn._backends import cuda

Inputs = tuple[Tensor, Tensor, Tensor]


def test_key_of_what_is_not_plain():
    x = torch.zeros(2, 3, 1, 8)
    assert cuda.call_key((x, x, x), 0) is None  # on the CPU
    assert cuda.call_key((object(),), 0) is None


def inputs(rows: int = 70, headdim: int = 64) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(rows)
    q, k, v = (
        torch.randn(2, rows, 4, headdim, device="cuda", generator=generator).bfloat16()
        for _ in range(3)
    )
    return q, k, v


def another_layout(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def shifted(x: Tensor) -> Tensor:
    """x at an address that is no multiple of 16."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)


CHANGES: dict[str, tuple[Callable[[Inputs], Any], dict[str, Any]]] = {
    "nothing": (lambda x: x, {}),
    "rows with gaps": (lambda x: (x[0], x[1].mT.contiguous().mT, x[2]), {}),
    "strides": (lambda x: (x[0], another_layout(x[1]), x[2]), {}),
    "address": (lambda x: tuple(map(shifted, x)), {}),
    "fewer keys": (lambda x: (x[0], x[1][:, :33], x[2][:, :33]), {}),
    "fewer heads": (lambda x: (x[0], x[1][:, :, :2], x[2][:, :, :2]), {}),
    "head dimension": (lambda x: tuple(y[..., :32] for y in x), {}),
    "dtype": (lambda x: tuple(y.half() for y in x), {}),
    "float32": (lambda x: tuple(y.float() for y in x), {}),
    "parameter": (lambda x: (torch.nn.Parameter(x[0]), *x[1:]), {}),
    "causal": (lambda x: x, {"causal": True}),
    "scale": (lambda x: x, {"softmax_scale": 1.0}),
    "scale of another type": (lambda x: x, {"softmax_scale": 1}),
    "scale on the GPU": (lambda x: x, {"softmax_scale": torch.tensor(1.0)}),
    "window": (lambda x: x, {"window_size": (3, 4)}),
    "softcap": (lambda x: x, {"softcap": 5.0}),
    "alibi": (lambda x: x, {"alibi_slopes": torch.ones(4)}),
    "sinks": (lambda x: x, {"s_aux": torch.ones(4)}),
}


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {n: x.cuda() if isinstance(x, Tensor) else x for n, x in options.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_changed_call(change, monkeypatch):
    """Between two equal calls one that differs gives what the tiled backend does."""
    changed, options = CHANGES[change]
    x = inputs()
    others = changed(x)
    with use_backend("tiled"):
        expected = flash_attn_func(*others, **on_gpu(options), return_attn_probs=True)[:2]
    monkeypatch.setattr(_ops, "_launches", {})
    first = flash_attn_func(*x)
    for _ in range(2):
        results = flash_attn_func(*others, **on_gpu(options), return_attn_probs=True)[:2]
        torch.testing.assert_close(results, expected, atol=2e-2, rtol=2e-2)
        assert results[0].requires_grad == (change == "parameter")
    torch.testing.assert_close(flash_attn_func(*x), first, atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("error", "change", "options"),
    [
        (TypeError, lambda q, k, v: (q, k.half(), v), {}),
        (ValueError, lambda q, k, v: (q, k, v.cpu()), {}),
        (ValueError, lambda q, k, v: (q, k[:1], v[:1]), {}),
        (ValueError, lambda q, k, v: (q, k, v[:, 1:]), {}),
        (TypeError, lambda q, k, v: (q, None, v), {}),
        (TypeError, lambda q, k, v: (q, k, v), {"causal": 0.0}),
        (TypeError, lambda q, k, v: (q, k, v), {"softmax_scale": False}),
        (ValueError, lambda q, k, v: (q, k, v), {"softmax_scale": float("nan")}),
        (ValueError, lambda q, k, v: (q, k, v), {"dropout_p": 1.0}),
        (TypeError, lambda q, k, v: (q, k, v), {"window_size": (-1.0, -1)}),
    ],
)
def test_mistake_after_a_good_call(error, change, options):
    x = inputs()
    flash_attn_func(*x)
    for _ in range(2):
        with pytest.raises(error):
            flash_attn_func(*change(*x), **options)


@pytest.mark.gpu
def test_changed_value_of_a_tensor():
    """Of an option that is a tensor the value counts, not where it lies."""
    x, scale = inputs(), torch.tensor(1.0, device="cuda")
    for value in (1.0, 0.1, 1.0):
        scale.fill_(value)
        results = [flash_attn_func(*x, softmax_scale=given) for given in (scale, scale.item())]
        assert torch.equal(*results)


@pytest.mark.gpu
def test_known_launches(monkeypatch):
    """The second of two equal calls is not checked again; settings change which calls are equal."""
    monkeypatch.setattr(_ops, "_launches", {})
    monkeypatch.setattr(_ops, "_MOST_LAUNCHES", 2)
    x = inputs()
    if cuda.call_key(*x) is None:
        pytest.skip("no extension, or a torch without DLPack's interface in C")
    chosen = []
    choose = _backends.choose
    monkeypatch.setattr(_backends, "choose", lambda *a: chosen.append(choose(*a)) or chosen[-1])
    flash_attn_func(*x)
    first = len(chosen)
    flash_attn_func(*x)
    assert len(chosen) == first and len(_ops._launches) == 1
    with use_backend("tiled"):
        flash_attn_func(*x)
        assert chosen[-1] == "tiled"
    with cuda.shared_memory_limit(100 * 1024):
        flash_attn_func(*x)
    assert len(chosen) > first + 1
    assert len(_ops._launches) <= 2
