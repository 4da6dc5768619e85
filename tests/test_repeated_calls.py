"""A call like an earlier one skips checks and choice: it must differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn import (
    _backends,
    _ops,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
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
def test_changed_call(change):
    """Between two equal calls one that differs gives what the tiled backend does."""
    changed, options = CHANGES[change]
    x = inputs()
    others = changed(x)
    with use_backend("tiled"):
        expected = flash_attn_func(*others, **on_gpu(options), return_attn_probs=True)[:2]
    launches_of(_ops.flash_attn_forward).clear()
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
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_out(kind):
    """A call that writes to a tensor is launched again, into the tensor that it is given."""
    x = inputs()
    routed = _ops.flash_attn_forward if kind == "dense" else _ops.flash_attn_varlen_forward
    if kind == "packed":
        x = tuple(y.flatten(0, 1) for y in x)
    bounds = torch.tensor([0, 60, 140], dtype=torch.int32, device="cuda")
    lengths = () if kind == "dense" else (bounds, bounds, 80, 80)
    call = flash_attn_func if kind == "dense" else flash_attn_varlen_func
    expected = call(*x, *lengths, causal=True)
    launches_of(routed).clear()
    for seen, out in enumerate(torch.empty(3, *x[0].shape, dtype=x[0].dtype, device="cuda")):
        version = out._version
        given, lse, _ = call(*x, *lengths, causal=True, out=out, return_attn_probs=True)
        assert given is out and torch.equal(out, expected) and lse.isfinite().all()
        assert out._version > version
        assert len(launches_of(routed)) == 1, seen
    other = x[0].new_empty(x[0].transpose(0, 1).shape).transpose(0, 1)
    for _ in range(2):
        assert torch.equal(call(*x, *lengths, causal=True, out=other), expected)
    assert torch.equal(call(*x, *lengths, causal=True), expected)
    assert len(launches_of(routed)) == 3


@pytest.mark.gpu
def test_changed_value_of_a_tensor():
    """Of an option that is a tensor the value counts, not where it lies."""
    x, scale = inputs(), torch.tensor(1.0, device="cuda")
    for value in (1.0, 0.1, 1.0):
        scale.fill_(value)
        results = [flash_attn_func(*x, softmax_scale=given) for given in (scale, scale.item())]
        assert torch.equal(*results)


def packed(x: Inputs, bounds: list[int], **options: Any) -> Any:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    q, k, v = (y.flatten(0, 1) for y in x)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 90, 90, **options)


def cached(x: Inputs, lengths: list[int], **options: Any) -> Any:
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return flash_attn_with_kvcache(x[0][:, :3], *x[1:], cache_seqlens=cache_seqlens, **options)


def slots(x: Inputs, rows: list[int]) -> Any:
    index = torch.tensor(rows, dtype=torch.int32, device="cuda")
    return flash_attn_with_kvcache(x[0][:, :3], *x[1:], cache_batch_idx=index, causal=True)


def paged(x: Inputs, pages: list[int]) -> Any:
    table = torch.tensor([pages, pages[::-1]], dtype=torch.int32, device="cuda")
    k, v = (y.reshape(-1, 14, 4, 64) for y in x[1:])
    return flash_attn_with_kvcache(x[0][:, :3], k, v, block_table=table)


def packed_in_pages(x: Inputs, bounds: list[int]) -> Any:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    table = torch.tensor([[9, 0, 8, 1, 7], [2, 3, 4, 5, 6]], dtype=torch.int32, device="cuda")
    k, v = (y.reshape(-1, 14, 4, 64) for y in x[1:])
    return flash_attn_varlen_func(
        x[0].flatten(0, 1), k, v, cu_seqlens, cu_seqlens, 66, 66, causal=True, block_table=table
    )


def with_slopes(x: Inputs, slopes: list[float]) -> Any:
    return flash_attn_func(*x, alibi_slopes=torch.tensor(slopes, device="cuda"))


def with_sinks(x: Inputs, sinks: list[float]) -> Any:
    return flash_attn_func(*x, s_aux=torch.tensor(sinks, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("function", "values"),
    [
        (packed, [[0, 60, 140], [0, 85, 100], [0, 0, 90]]),
        (cached, [[70, 70], [1, 40], [0, 66]]),
        (slots, [[0, 1], [1, 0], [1, 1]]),
        (paged, [[0, 1, 2, 3, 4], [9, 0, 8, 1, 7]]),
        (packed_in_pages, [[0, 60, 120], [0, 66, 70], [0, 0, 50]]),
        (with_slopes, [[0.5, 0.25, 0.1, 0.0], [0.0, 0.1, 1.0, 2.0]]),
        (with_sinks, [[0.5, 0.25, 0.1, 0.0], [-9.0, 0.1, 1.0, 9.0]]),
    ],
)
def test_values_of_tensors(function, values):
    """Calls of one layout: each has the result of its own values."""
    x = inputs()
    for _ in range(2):
        for value in values:
            with use_backend("tiled"):
                expected = function(x, value)
            torch.testing.assert_close(function(x, value), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("max_seqlen_q", [20, 70]),
        ("max_seqlen_k", [30, 70]),
        ("causal", [True, False]),
        ("softcap", [0.0, 2.0]),
        ("window_size", [3, 50]),
        ("softmax_scale", [0.1, 0.5]),
    ],
)
def test_numbers_given_as_tensors(option, values):
    """Such a number has a value that the layout of its tensor does not tell."""
    q, k, v = (y.flatten(0, 1) for y in inputs())
    cu_seqlens = torch.tensor([0, 70, 140], dtype=torch.int32, device="cuda")
    number = torch.tensor(values[0], device="cuda")
    for value in values * 2:
        number.fill_(value)
        results = []
        for given in (number, value):
            options: dict[str, Any] = {"max_seqlen_q": 70, "max_seqlen_k": 70}
            options[option] = (given, 0) if option == "window_size" else given
            results.append(
                flash_attn_varlen_func(
                    q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **options
                )
            )
        assert torch.equal(*results)


@pytest.mark.gpu
def test_one_tensor_in_three_places():
    """Of a call with one tensor as q, k and v it is the layout that is remembered."""
    x, y = inputs(), torch.randn(2, 70, 4, 64, device="cuda").bfloat16()
    flash_attn_func(y, y, y)
    with use_backend("tiled"):
        expected = flash_attn_func(*x)
    torch.testing.assert_close(flash_attn_func(*x), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_dropout_masks_differ():
    x = inputs()
    results = [flash_attn_func(*x, dropout_p=0.5) for _ in range(4)]
    assert not any(torch.equal(a, b) for a, b in combinations(results, 2))


DOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "strides": another_layout,
    "expanded": lambda x: x[:1, :1, :1].expand_as(x),
    "rows with gaps": lambda x: x.mT.contiguous().mT,
    "address": shifted,
}


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [None, [0, 60, 130]], ids=["dense", "packed"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(bounds, deterministic):
    """Backwards of several layouts of dout, each after the others."""
    x = tuple(y.requires_grad_() for y in inputs())
    dout = torch.randn(2, 70, 4, 64, device="cuda").bfloat16()

    def gradients(given: Tensor) -> Any:
        if bounds is None:
            out = flash_attn_func(*x, causal=True, deterministic=deterministic)
        else:
            out = packed(x, bounds, causal=True, deterministic=deterministic)
        return torch.autograd.grad(out, x, given.reshape(out.shape))

    for _ in range(2):
        for change in DOUTS.values():
            given = change(dout)
            with use_backend("tiled"):
                expected = gradients(given)
            torch.testing.assert_close(gradients(given), expected, atol=5e-2, rtol=5e-2)


def launches_of(routed: Callable[..., Any]) -> dict[bytes, Any]:
    """What a routed function remembers."""
    cells = dict(zip(routed.__code__.co_freevars, routed.__closure__, strict=True))
    return vars(cells["plain"].cell_contents)["launches"]


def prepared(monkeypatch: pytest.MonkeyPatch, *routed: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """What is prepared from now on, kernel and numbers, where the ``routed`` remember nothing."""
    seen, prepare = [], cuda._C.prepare

    def watched(kernel: int, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> Any:
        seen.append((cuda._KERNELS[kernel], numbers))
        return prepare(kernel, tensors, numbers)

    for function in routed:
        launches_of(function).clear()
    monkeypatch.setattr(cuda._C, "prepare", watched)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "packed", "packed in pages", "cached", "backward"])
def test_known_launches(kind, monkeypatch):
    """The second of two equal calls is not checked again; settings change which calls are equal."""
    operator = {
        "dense": _ops.flash_attn_forward,
        "packed": _ops.flash_attn_varlen_forward,
        "packed in pages": _ops.flash_attn_varlen_forward,
        "cached": _ops.flash_attn_with_kvcache,
        "backward": _ops.flash_attn_backward,
    }[kind]
    launches = launches_of(operator)
    launches.clear()
    monkeypatch.setattr(_ops, "_MOST_LAUNCHES", 2)
    x = inputs()
    if cuda.call_key(x, 0) is None:
        pytest.skip("no extension, or a torch without DLPack's interface in C")
    leaves = tuple(y.clone().requires_grad_() for y in x)
    call = {
        "dense": lambda: flash_attn_func(*x),
        "packed": lambda: packed(x, [0, 60, 140]),
        "packed in pages": lambda: packed_in_pages(x, [0, 60, 120]),
        "cached": lambda: cached(x, [70, 3]),
        "backward": lambda: torch.autograd.grad(flash_attn_func(*leaves), leaves, x[0]),
    }[kind]
    chosen = []
    choose = _backends.choose
    monkeypatch.setattr(_backends, "choose", lambda *a: chosen.append(choose(*a)) or chosen[-1])
    call()
    first = len(chosen)
    call()
    assert len(chosen) == first and len(launches) == 1
    with use_backend("tiled"):
        call()
        assert chosen[-1] == "tiled"
    call()
    assert len(launches) == 1
    with cuda.changed_setting("shared_memory", 100 * 1024):
        call()
    assert len(chosen) > first + 1 and len(launches) == 2
    with cuda.changed_setting("shared_memory", 200 * 1024):
        call()
    assert len(launches) == 1
