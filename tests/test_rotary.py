"""Rotary position embedding, against multiplication by complex numbers token by token."""

import cmath
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import since_torch
from torch import Tensor, func
from torch.fx.experimental.proxy_tensor import make_fx

from flash_attn.layers.rotary import (
    ApplyRotaryEmb,
    ApplyRotaryEmbKV_,
    ApplyRotaryEmbQKV_,
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)
from flash_attn.ops.triton.rotary import apply_rotary

INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def skip_without(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


def tables(
    seqlen: int, rotary_dim: int, dtype=torch.float64, device="cpu"
) -> tuple[Tensor, Tensor]:
    """Random angles, so that no position or channel can stand in for another."""
    angle = torch.rand(seqlen, rotary_dim // 2, dtype=torch.float64) * 2 * cmath.pi
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def reference(
    x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], interleaved: bool
) -> Tensor:
    """Rotate token t of x (seqlen, nheads, headdim) by row positions[t] of the tables."""
    out = x.double().cpu().clone()
    half = cos.shape[1]
    for token, position in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            turn = complex(cos[position, i], sin[position, i])
            pair = torch.complex(out[token, :, a], out[token, :, b]) * turn
            out[token, :, a], out[token, :, b] = pair.real, pair.imag
    return out


def batch_reference(x: Tensor, cos: Tensor, sin: Tensor, offsets, interleaved: bool) -> Tensor:
    return torch.stack(
        [
            reference(x[b], cos, sin, range(offset, offset + x.shape[1]), interleaved)
            for b, offset in enumerate(offsets)
        ]
    )


@DEVICE
@INTERLEAVED
@pytest.mark.parametrize("rotary_dim", [0, 2, 6, 10])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rotation(dtype: torch.dtype, rotary_dim: int, interleaved: bool, device: str) -> None:
    skip_without(device)
    x = torch.randn(2, 5, 3, 10, dtype=dtype, device=device)
    cos, sin = tables(8, rotary_dim, dtype, device)
    expected = batch_reference(x, cos, sin, [0, 0], interleaved)
    before = x.clone()

    out = apply_rotary_emb(x, cos, sin, interleaved)
    assert out.dtype == dtype and torch.equal(x, before)
    # Computed in float32 at least and rounded once: half a unit in the last place of the result,
    # and the rounding of float32 arithmetic on terms of magnitude up to 4.
    eps = torch.finfo(dtype).eps
    rounding = expected.abs() * eps / 2 + 16 * min(eps, torch.finfo(torch.float32).eps)
    assert ((out.double().cpu() - expected).abs() <= rounding).all()
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])

    in_place = apply_rotary_emb(x, cos, sin, interleaved, inplace=True)
    assert in_place is x and torch.equal(x, out)


@DEVICE
@INTERLEAVED
@pytest.mark.parametrize("offsets", [3, torch.tensor([4, 0]), torch.tensor([1, 3]).int()], ids=str)
def test_offsets(offsets: int | Tensor, interleaved: bool, device: str) -> None:
    skip_without(device)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, device=device)
    cos, sin = tables(9, 6, device=device)
    per_sequence = offsets.tolist() if isinstance(offsets, Tensor) else [offsets] * 2
    given = offsets.to(device) if isinstance(offsets, Tensor) else offsets
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
    expected = batch_reference(x, cos, sin, per_sequence, interleaved)
    torch.testing.assert_close(out.cpu(), expected)


@DEVICE
@INTERLEAVED
@pytest.mark.parametrize("offsets", [0, 2, torch.tensor([3, 1, 0, 2])], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_packed(offsets: int | Tensor, interleaved: bool, inplace: bool, device: str) -> None:
    """Sequences of 4, 0, 1 and 3 tokens, and 2 rows at the end that belong to none."""
    skip_without(device)
    x = torch.randn(10, 3, 8, dtype=torch.float64, device=device)
    before = x.clone()
    cu_seqlens = torch.tensor([0, 4, 4, 5, 8], dtype=torch.int32, device=device)
    cos, sin = tables(7, 6, device=device)
    per_sequence = offsets.tolist() if isinstance(offsets, Tensor) else [offsets] * 4
    given = offsets.to(device) if isinstance(offsets, Tensor) else offsets

    out = apply_rotary_emb(x, cos, sin, interleaved, inplace, given, cu_seqlens, max_seqlen=4)
    for (start, end), offset in zip(
        itertools.pairwise(cu_seqlens.tolist()), per_sequence, strict=True
    ):
        positions = range(offset, offset + end - start)
        expected = reference(before[start:end], cos, sin, positions, interleaved)
        torch.testing.assert_close(out[start:end].cpu(), expected)
    assert torch.equal(out[8:], before[8:])
    assert torch.equal(x, out if inplace else before)


@pytest.mark.parametrize("offsets", [3, torch.tensor([3, 1])], ids=["int", "tensor"])
def test_packed_tokens_of_no_sequence(offsets: int | Tensor, device: str) -> None:
    """Those before the first one and behind the last one stay as they are."""
    x = torch.randn(9, 2, 8, device=device)
    cos, sin = torch.randn(2, 12, 4, device=device)
    offsets = offsets.to(device) if isinstance(offsets, Tensor) else offsets
    cu_seqlens = torch.tensor([2, 5, 7], dtype=torch.int32, device=device)
    out = apply_rotary_emb(x, cos, sin, False, False, offsets, cu_seqlens, max_seqlen=3)
    inside = apply_rotary_emb(x[2:7], cos, sin, False, False, offsets, cu_seqlens - 2, max_seqlen=3)
    torch.testing.assert_close(out, torch.cat((x[:2], inside, x[7:])))


def test_packed_is_the_padded_result() -> None:
    x = torch.randn(4, 6, 2, 8)
    cos, sin = tables(6, 8, torch.float32)
    cu_seqlens = torch.arange(0, 25, 6, dtype=torch.int32)
    packed = ApplyRotaryEmb.apply(x.flatten(0, 1), cos, sin, False, False, 0, cu_seqlens, 6)
    assert torch.equal(packed.unflatten(0, (4, 6)), apply_rotary_emb(x, cos, sin))


@INTERLEAVED
@pytest.mark.parametrize("packed", [False, True])
def test_gradients(interleaved: bool, packed: bool) -> None:
    x = torch.randn(*((5,) if packed else (2, 5)), 2, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.requires_grad_() for table in tables(9, 6))
    varlen = (torch.tensor([0, 2, 4]).int(), 3) if packed else (None, None)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rotary_emb(x, cos, sin, interleaved, False, torch.tensor([4, 1]), *varlen)

    def in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rotary_emb(x * 1, cos, sin, interleaved, True, torch.tensor([4, 1]), *varlen)

    def split_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (x,) = x.split(len(x))
        return in_place(x, cos, sin)

    for function in (rotate, in_place, split_in_place):
        assert torch.autograd.gradcheck(function, (x, cos, sin))
        assert torch.autograd.gradgradcheck(function, (x, cos, sin))


@INTERLEAVED
def test_backward_is_the_conjugate_rotation(interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    cos, sin = tables(9, 6, torch.float32)
    offsets = torch.tensor([2, 4])
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    dout = torch.randn_like(out)
    out.backward(dout)
    conjugate = apply_rotary(dout, cos, sin, offsets, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(x.grad, conjugate)
    back = apply_rotary(out.detach(), cos, sin, offsets, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back, x.detach())


COS_5, SIN_5 = tables(5, 8)


def out_of_place(x: Tensor, heads: tuple[int, int], cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate some of the heads of x (batch, seqlen, nheads, headdim)."""
    rotated = apply_rotary_emb(x[:, :, slice(*heads)], cos, sin)
    return torch.cat((x[:, :, : heads[0]], rotated, x[:, :, heads[1] :]), dim=2)


def rotary_of_q_and_kv(x: Tensor, rotary: RotaryEmbedding) -> Tensor:
    """As mamba's attention does."""
    q, kv = x.split([2, 4], dim=2)
    q, kv = rotary(q, kv.unflatten(2, (2, 2)))
    return torch.cat((q, kv.flatten(2, 3)), dim=2)


# What rotates x (batch, 5, 6, 8) in place, and which of its 6 heads.
IN_PLACE: dict[str, tuple[Callable[..., Tensor], tuple[int, int]]] = {
    "apply_rotary_emb": (
        lambda x, rotary: apply_rotary_emb(x, rotary._cos_cached, rotary._sin_cached, inplace=True),
        (0, 6),
    ),
    "apply_rotary_emb_qkv_": (
        lambda x, rotary: apply_rotary_emb_qkv_(
            x.unflatten(2, (3, 2)), rotary._cos_cached, rotary._sin_cached
        ).flatten(2, 3),
        (0, 4),
    ),
    "apply_rotary_emb_qkv_ with num_heads_q": (
        lambda x, rotary: apply_rotary_emb_qkv_(
            x, rotary._cos_cached, rotary._sin_cached, num_heads_q=4
        ),
        (0, 5),
    ),
    "apply_rotary_emb_kv_": (
        lambda x, rotary: apply_rotary_emb_kv_(
            x.unflatten(2, (2, 3)), rotary._cos_cached, rotary._sin_cached
        ).flatten(2, 3),
        (0, 3),
    ),
    "RotaryEmbedding of qkv": (
        lambda x, rotary: rotary(x.unflatten(2, (3, 2))).flatten(2, 3),
        (0, 4),
    ),
    "RotaryEmbedding of q and kv": (rotary_of_q_and_kv, (0, 4)),
}

# Tensors made of a leaf (2, 5, 6, 8), all of them rotated.
SOURCES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "leaf": lambda leaf: [leaf],
    "views of a leaf": lambda leaf: [leaf[:1], leaf[1:]],
    "split leaf": lambda leaf: list(leaf.split(1)),
    "result": lambda leaf: [leaf * 1],
    "views of a result": lambda leaf: [x := leaf * 1, x[:1], x[1:]][1:],
    "chunked result": lambda leaf: list((leaf * 1).chunk(2)),
    "views of an unbound result": lambda leaf: [x.unsqueeze(0) for x in (leaf * 1).unbind()],
}
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def compiled_if(compiled: bool, function: Callable, device: str = "cpu") -> Callable:
    if not compiled:
        return function
    torch.compiler.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"  # no C++ compiler is needed
    return torch.compile(function, fullgraph=True, backend=backend)


@DEVICE
@COMPILED
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("way", IN_PLACE)
def test_in_place(way: str, source: str, compiled: bool, device: str) -> None:
    """The returned tensor has the gradient, whatever it was that was written to."""
    skip_without(device)
    rotary = RotaryEmbedding(8, device=device)
    rotary._update_cos_sin_cache(5, device, torch.float64)
    rotate, heads = IN_PLACE[way]
    leaf = torch.randn(2, 5, 6, 8, dtype=torch.float64, device=device, requires_grad=True)
    expected = out_of_place(leaf, heads, rotary._cos_cached, rotary._sin_cached)
    (expected_grad,) = torch.autograd.grad((expected * expected.sin()).sum(), leaf)

    def run(leaf: Tensor) -> tuple[Tensor, Tensor]:
        memory = SOURCES[source](leaf)
        out = torch.cat([rotate(x, rotary) for x in memory])
        # Inductor loses the gradient of one of two results on the same memory.
        return out * 1, torch.cat([x.detach() for x in memory]) * 1

    out, memory = compiled_if(compiled, run, device)(leaf)
    (out * out.sin()).sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(memory, expected.detach())
    torch.testing.assert_close(leaf.grad, expected_grad)


@since_torch(2, 5, "the compiler writes to views")
@pytest.mark.parametrize("source", SOURCES)
def test_compiled_in_place_on_what_was_made_outside(source: str) -> None:
    """Right, or where the compiler's own write to its input is not possible, an error."""
    leaf = torch.randn(2, 5, 6, 8, dtype=torch.float64, requires_grad=True)
    expected = apply_rotary_emb(leaf, COS_5, SIN_5)
    (expected_grad,) = torch.autograd.grad((expected * expected.sin()).sum(), leaf)
    rotate = compiled_if(True, lambda x: apply_rotary_emb(x, COS_5, SIN_5, inplace=True))
    memory = SOURCES[source](leaf)
    if source in ("split leaf", "chunked result", "views of an unbound result"):
        with pytest.raises(RuntimeError, match="view"):
            (rotate(memory[0]).sum() + memory[1].sum()).backward()
        return
    out = torch.cat([rotate(x) for x in memory])
    (out * out.sin()).sum().backward()
    torch.testing.assert_close(torch.cat(memory), expected)
    torch.testing.assert_close(leaf.grad, expected_grad)


@pytest.mark.parametrize("source", SOURCES)
def test_in_place_returns_the_same_memory(source: str) -> None:
    leaf = torch.randn(2, 5, 6, 8, dtype=torch.float64, requires_grad=True)
    for x in SOURCES[source](leaf):
        out = apply_rotary_emb(x, COS_5, SIN_5, inplace=True)
        assert (out.data_ptr(), out.stride()) == (x.data_ptr(), x.stride())
        assert (out is x) == (source in ("result", "views of a result"))


@COMPILED
@pytest.mark.parametrize("way", IN_PLACE)
def test_result_in_place_without_the_returned_tensor(way: str, compiled: bool) -> None:
    """Where PyTorch can follow the write, what was written to has the gradient too."""
    if way == "RotaryEmbedding of q and kv":
        pytest.skip("splits what it is given")
    rotary = RotaryEmbedding(8)
    rotary._update_cos_sin_cache(5, "cpu", torch.float64)
    rotate, heads = IN_PLACE[way]
    leaf = torch.randn(2, 5, 6, 8, dtype=torch.float64, requires_grad=True)
    expected = out_of_place(leaf, heads, rotary._cos_cached, rotary._sin_cached)
    (expected_grad,) = torch.autograd.grad((expected * expected.sin()).sum(), leaf)

    def run(leaf: Tensor) -> Tensor:
        x = leaf * 1
        rotate(x[:1], rotary)
        rotate(x[1:], rotary)
        return x

    out = compiled_if(compiled, run)(leaf)
    (out * out.sin()).sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(leaf.grad, expected_grad)


@pytest.mark.parametrize("source", ["leaf", "views of a leaf", "result", "views of a result"])
def test_in_place_does_not_corrupt_saved_tensors(source: str) -> None:
    leaf = torch.randn(2, 5, 6, 8, dtype=torch.float64, requires_grad=True)
    x, *_ = SOURCES[source](leaf)
    square = x * x
    apply_rotary_emb(x, COS_5, SIN_5, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_place_without_gradients(mode: Callable, source: str) -> None:
    leaf = torch.randn(2, 5, 6, 8, dtype=torch.float64, requires_grad=True)
    expected = apply_rotary_emb(leaf, COS_5, SIN_5)
    with mode():
        memory = SOURCES[source](leaf)
        assert all(apply_rotary_emb(x, COS_5, SIN_5, inplace=True) is x for x in memory)
        assert torch.equal(torch.cat(memory), expected)


@pytest.mark.parametrize("source", SOURCES)
def test_in_place_under_transforms(source: str) -> None:
    def loss(leaf: Tensor, inplace: bool) -> Tensor:
        rotated = [
            apply_rotary_emb(x, COS_5, SIN_5, inplace=inplace) for x in SOURCES[source](leaf)
        ]
        return (torch.cat(rotated) ** 3).sum()

    def second(leaf: Tensor, inplace: bool) -> Tensor:
        return (torch.func.grad(loss)(leaf, inplace) ** 2).sum()

    leaf, tangent = torch.randn(2, 2, 5, 6, 8, dtype=torch.float64)
    for function in (torch.func.grad(loss), torch.func.grad(second)):
        torch.testing.assert_close(function(leaf.clone(), True), function(leaf, False))

    def forward_mode(inplace: bool) -> Tensor:
        primal = leaf.clone()
        return torch.func.jvp(lambda x: loss(x, inplace), (primal,), (tangent.clone(),))[1]

    torch.testing.assert_close(forward_mode(True), forward_mode(False))


@pytest.mark.parametrize("device", ["traced", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_offset_that_cannot_be_read_is_clamped(device: str) -> None:
    skip_without(device)
    x = torch.randn(2, 3, 1, 4, dtype=torch.float64)
    cos, sin = tables(5, 4)
    expected = [reference(x[b], cos, sin, [row] * 3, False) for b, row in enumerate([0, 4])]
    rotate, given = apply_rotary_emb, [x, cos, sin, torch.tensor([-7, 1000])]
    if device == "traced":
        rotate = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    else:
        given = [tensor.to(device) for tensor in given]
    out = rotate(*given[:3], seqlen_offsets=given[3])
    torch.testing.assert_close(out.cpu(), torch.stack(expected))


@pytest.mark.parametrize("kind", [np.int32, np.int64, torch.tensor], ids=lambda kind: kind.__name__)
def test_integers_of_other_kinds(kind: Callable) -> None:
    x, (cos, sin) = torch.randn(2, 5, 6, 8), tables(9, 8, torch.float32)
    expected = apply_rotary_emb(x, cos, sin, seqlen_offsets=3)
    assert torch.equal(apply_rotary_emb(x, cos, sin, seqlen_offsets=kind(3)), expected)
    varlen = {"cu_seqlens": torch.tensor([0, 5]).int(), "max_seqlen": kind(5)}
    packed = apply_rotary_emb(x[0], cos, sin, seqlen_offsets=kind(3), **varlen)
    assert torch.equal(packed, expected[0])

    expected = RotaryEmbedding(8)(x.clone(), seqlen_offset=3, max_seqlen=9, num_heads_q=4)
    rotary = RotaryEmbedding(kind(8))
    assert type(rotary.dim) is int
    numbers = {"seqlen_offset": kind(3), "num_heads_q": kind(4)}
    assert torch.equal(rotary(x.clone(), **numbers), expected)
    assert torch.equal(rotary(x.clone(), **numbers, max_seqlen=kind(9)), expected)


@DEVICE
@pytest.mark.parametrize("packed", [False, True])
def test_offset_in_a_tensor_of_no_dimensions(packed: bool, device: str) -> None:
    """The same as an int, also where its value is not known on the host."""
    skip_without(device)
    x, (cos, sin) = torch.randn(2, 5, 6, 8, device=device), tables(9, 8, torch.float32, device)
    expected = apply_rotary_emb(x, cos, sin, seqlen_offsets=3)
    varlen = {}
    if packed:
        x, expected = x.flatten(0, 1), expected.flatten(0, 1)
        varlen = {"cu_seqlens": torch.tensor([0, 5, 10], device=device), "max_seqlen": 5}
    compiled = torch.compile(apply_rotary_emb, fullgraph=True, backend="aot_eager")
    for rotate in (apply_rotary_emb, compiled):
        offset = torch.tensor(3, device=device)
        assert torch.equal(rotate(x, cos, sin, seqlen_offsets=offset, **varlen), expected)


def test_strided_input() -> None:
    storage = torch.randn(2, 3, 5, 12)  # (batch, nheads, seqlen, more than headdim)
    before = storage.clone()
    x = storage.transpose(1, 2)[..., :8]
    cos, sin = tables(5, 8, torch.float32)
    expected = apply_rotary_emb(x.contiguous(), cos, sin)
    apply_rotary_emb(x, cos, sin, inplace=True)
    assert torch.equal(x, expected)
    assert torch.equal(storage[..., 8:], before[..., 8:])


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x, (cos, sin) = torch.randn(shape), tables(9, 8, torch.float32)
    assert apply_rotary_emb(x, cos, sin).shape == shape
    offsets = torch.zeros(shape[0], dtype=torch.int64)
    assert apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets).shape == shape


@pytest.mark.parametrize("total, batch", [(0, 2), (0, 0), (3, 0)])
def test_empty_packed(device, total: int, batch: int) -> None:
    x = torch.randn(total, 2, 8, device=device)
    cos, sin = tables(9, 8, torch.float32, device)
    cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    assert torch.equal(apply_rotary_emb(x, cos, sin, cu_seqlens=cu_seqlens, max_seqlen=0), x)


@INTERLEAVED
def test_qkv(interleaved: bool) -> None:
    qkv = torch.randn(2, 5, 3, 4, 8)
    q, k, v = qkv.clone().unbind(2)
    cos, sin = tables(9, 6, torch.float32)
    cos_k, sin_k = tables(9, 6, torch.float32)
    assert ApplyRotaryEmbQKV_.apply(qkv, cos, sin, cos_k, sin_k, interleaved, 2) is qkv
    assert torch.equal(qkv[:, :, 0], apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=2))
    expected_k = apply_rotary_emb(k, cos_k, sin_k, interleaved, seqlen_offsets=2)
    assert torch.equal(qkv[:, :, 1], expected_k)
    assert torch.equal(qkv[:, :, 2], v)


def test_qkv_with_grouped_heads() -> None:
    qkv = torch.randn(2, 5, 6 + 2 + 2, 8)
    q, k, v = qkv.clone().split([6, 2, 2], dim=2)
    cos, sin = tables(9, 8, torch.float32)
    apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q=6)
    expected = (apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v)
    assert torch.equal(qkv, torch.cat(expected, dim=2))


def test_packed_tensors_propagate_gradients() -> None:
    cos, sin = tables(5, 4)
    qkv = torch.randn(1, 5, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(1, 5, 2, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb_qkv_(x * 1, cos, sin), qkv)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb_kv_(x * 1, cos, sin), kv)


def test_kv() -> None:
    kv = torch.randn(2, 5, 2, 3, 8)
    k, v = kv.clone().unbind(2)
    cos, sin = tables(9, 8, torch.float32)
    assert ApplyRotaryEmbKV_.apply(kv, cos, sin, False, 1) is kv
    assert torch.equal(kv[:, :, 0], apply_rotary_emb(k, cos, sin, seqlen_offsets=1))
    assert torch.equal(kv[:, :, 1], v)


def test_torch_form_takes_tables_per_sequence() -> None:
    x = torch.randn(2, 5, 3, 8)
    cos, sin = tables(9, 8, torch.float32)
    expected = apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([1, 4]))
    rows = torch.stack([torch.arange(1, 6), torch.arange(4, 9)])
    assert torch.equal(apply_rotary_emb_torch(x, cos[rows], sin[rows]), expected)


@INTERLEAVED
def test_rotate_half(interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 8)
    quarter_turn = torch.zeros(5, 4), torch.ones(5, 4)
    assert torch.equal(rotate_half(x, interleaved), apply_rotary_emb(x, *quarter_turn, interleaved))


def test_scores_depend_on_distance_only() -> None:
    """The property that rotary embedding exists for, through the module's own tables."""
    rotary = RotaryEmbedding(16)
    q, k = torch.randn(2, 1, 1, 2, 16).expand(2, 1, 12, 2, 16)  # the same token at each position
    qkv = rotary(torch.stack((q, k, k), dim=2))
    q, k, _ = qkv.double().unbind(2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance, dim1=-2, dim2=-1)
        torch.testing.assert_close(
            diagonal, diagonal[..., :1].expand_as(diagonal), atol=1e-5, rtol=0
        )


@INTERLEAVED
def test_module(interleaved: bool) -> None:
    rotary = RotaryEmbedding(6, base=100.0, interleaved=interleaved)
    angle = torch.arange(9).unsqueeze(1) * torch.tensor([1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)])
    cos, sin = angle.cos(), angle.sin()
    qkv = torch.randn(2, 5, 3, 4, 8)

    expected = apply_rotary_emb_qkv_(qkv.clone(), cos, sin, interleaved=interleaved)
    torch.testing.assert_close(rotary(qkv.clone()), expected)
    expected = apply_rotary_emb_qkv_(qkv.clone(), cos, sin, None, None, interleaved, 4)
    torch.testing.assert_close(rotary(qkv.clone(), seqlen_offset=4), expected)
    torch.testing.assert_close(
        rotary(qkv.clone(), seqlen_offset=torch.tensor([4, 4]), max_seqlen=9), expected
    )
    torch.testing.assert_close(rotary(qkv.clone(), seqlen_offset=torch.tensor([4, 4])), expected)
    q, kv = rotary(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=4)
    torch.testing.assert_close(q, expected[:, :, 0])
    torch.testing.assert_close(kv, expected[:, :, 1:])
    heads = qkv.flatten(2, 3)[:, :, :10]
    expected = apply_rotary_emb_qkv_(
        heads.clone(), cos, sin, interleaved=interleaved, num_heads_q=6
    )
    torch.testing.assert_close(rotary(heads.clone(), num_heads_q=6), expected)


def test_module_tables() -> None:
    rotary = RotaryEmbedding(8)
    assert not rotary.state_dict()
    rotary._update_cos_sin_cache(16, torch.device("cpu"), torch.float32)
    cos = rotary._cos_cached
    assert cos.shape == (16, 4) and cos.dtype == torch.float32
    rotary._update_cos_sin_cache(12, "cpu", torch.float32)
    assert rotary._cos_cached is cos  # long enough: kept
    rotary._update_cos_sin_cache(17, "cpu", torch.float32)
    assert torch.equal(rotary._cos_cached[:16], cos) and len(rotary._cos_cached) == 17

    # A module in bfloat16 has tables of exact angles, rounded once.
    rotary.to(torch.bfloat16)._update_cos_sin_cache(4096, "cpu", torch.bfloat16)
    exact = RotaryEmbedding(8)
    exact._update_cos_sin_cache(4096, "cpu", torch.float32)
    assert torch.equal(rotary._cos_cached, exact._cos_cached.bfloat16())

    # Unless a model was trained with rounded positions and frequencies.
    coarse = RotaryEmbedding(8, pos_idx_in_fp32=False)
    coarse._update_cos_sin_cache(4096, "cpu", torch.float32)
    assert torch.equal(coarse._cos_cached, exact._cos_cached)
    coarse.to(torch.bfloat16)._update_cos_sin_cache(4096, "cpu", torch.bfloat16)
    angle = torch.arange(4096).bfloat16().unsqueeze(1) * exact.inv_freq.bfloat16()
    assert torch.equal(coarse._cos_cached, angle.cos())

    with torch.inference_mode():
        rotary._update_cos_sin_cache(8192, "cpu", torch.float32)
    rotary.train()
    qkv = torch.randn(1, 2, 3, 1, 8, requires_grad=True)
    rotary(qkv * 1).sum().backward()
    assert qkv.grad is not None


def test_xpos_scales_scores_by_distance() -> None:
    """Query scale times key scale is scale ** (distance / scale_base), whatever the position."""
    dim, base, seqlen = 8, 4.0, 12
    plain, xpos = RotaryEmbedding(dim), RotaryEmbedding(dim, scale_base=base)
    qkv = torch.randn(1, 1, 3, 1, dim).expand(1, seqlen, 3, 1, dim)
    q, k, _ = plain(qkv.clone()).double().unbind(2)
    q_xpos, k_xpos, _ = xpos(qkv.clone()).double().unbind(2)
    decay = (torch.arange(0, dim, 2).double() + 0.4 * dim) / (1.4 * dim)
    torch.testing.assert_close(xpos.scale.double(), decay)
    assert plain.scale is None and not xpos.state_dict()
    for i, j in [(0, 0), (7, 3), (11, 0), (2, 9)]:
        products = (q[0, i, 0] * k[0, j, 0]).reshape(2, dim // 2).sum(0)  # one for each pair
        expected = products * decay ** ((i - j) / base)
        products = (q_xpos[0, i, 0] * k_xpos[0, j, 0]).reshape(2, dim // 2).sum(0)
        torch.testing.assert_close(products, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_graph_break(packed: bool) -> None:
    cos, sin = tables(9, 6, torch.float32)
    offsets = torch.tensor([4, 1])

    def rotate(x: Tensor) -> Tensor:
        if packed:
            cu_seqlens = torch.tensor([0, 2, 4], dtype=torch.int32)
            return apply_rotary_emb(x.flatten(0, 1), cos, sin, False, False, offsets, cu_seqlens, 3)
        return apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)

    x = torch.randn(2, 3, 2, 8)
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), rotate(x))


@pytest.mark.parametrize("scale_base", [None, 512])
def test_compiled_module_keeps_no_tables(scale_base: int | None) -> None:
    """Each longer sequence would be compiled anew, up to a limit."""
    torch._dynamo.reset()
    compiled, eager = (RotaryEmbedding(8, scale_base=scale_base) for _ in "ab")
    compiled.compile(fullgraph=True, backend="aot_eager")
    for seqlen, offset in [(3, 0), (5, 0), (2, 7), (4, 0), *((n, 0) for n in range(10, 24))]:
        qkv = torch.randn(1, seqlen, 3, 2, 8)
        rotated = compiled(qkv.clone(), seqlen_offset=offset)
        expected = eager(qkv, seqlen_offset=offset, max_seqlen=seqlen + offset)
        if scale_base is None:  # of XPos a longer table has another centre
            torch.testing.assert_close(rotated, expected)
    assert compiled._seq_len_cached == 0
    kept = eager._seq_len_cached
    eager.compile(fullgraph=True, backend="aot_eager")
    for seqlen in range(kept - 2, kept + 10):
        eager(torch.randn(1, seqlen, 3, 2, 8))
    assert eager._seq_len_cached == kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_of_the_other_type(dtype: torch.dtype) -> None:
    cos, sin = tables(5, 8, dtype)
    x = torch.randn(2, 5, 3, 8).to(dtype)
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    with torch.autocast("cpu", other):
        assert torch.equal(apply_rotary_emb(x, cos, sin), apply_rotary_emb_torch(x, cos, sin))
        inside = apply_rotary_emb(x, cos, sin)
    assert torch.equal(inside, apply_rotary_emb(x, cos, sin))


class Slower(RotaryEmbedding):
    """As clients have it: positions interpolated, tables of its own."""

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        return super()._compute_inv_freq(device) / 4


def test_subclass_with_other_angles() -> None:
    slower, plain = Slower(8), RotaryEmbedding(8)
    for seqlen in (5, 9):
        qkv = torch.randn(1, seqlen, 3, 2, 8)
        positions = torch.arange(seqlen) / 4
        angles = torch.outer(positions, plain.inv_freq)
        expected = apply_rotary_emb_qkv_(qkv.clone(), angles.cos(), angles.sin())
        torch.testing.assert_close(slower(qkv), expected)
    assert slower._compute_scale() is None
    # In 16 bits it starts from exact ones.
    slower.bfloat16()._update_cos_sin_cache(300)
    angles = torch.outer(torch.arange(300.0), plain.inv_freq / 4)
    torch.testing.assert_close(slower._cos_cached, angles.cos().bfloat16())


def rotated_by(rotary: Callable, seqlen: int = 5) -> Tensor:
    return rotary(torch.linspace(-1, 1, seqlen * 48).view(1, seqlen, 3, 2, 8))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tables_of_a_trace_are_not_kept() -> None:
    """Nor those of a transform: calls after it have their own."""
    expected, sizes = rotated_by(RotaryEmbedding(8)), torch.ones(2, 1, 5, 3, 2, 8)
    for seen in (
        lambda m: make_fx(m, tracing_mode="fake", _allow_non_fake_inputs=True)(sizes[0]),
        lambda m: func.vmap(lambda x: m(x.clone()))(sizes),
        lambda m: func.hessian(lambda x: m(x * torch.ones(1, 2, 3, 1, 8)).sum())(torch.ones(())),
        lambda m: torch.jit.trace(m, (sizes[0],), check_trace=False),
    ):
        rotary = RotaryEmbedding(8)
        for _ in range(2):
            seen(rotary)
            torch.testing.assert_close(rotated_by(rotary), expected)


@since_torch(2, 6, "is_exporting")
def test_export_of_a_module_that_has_run() -> None:
    rotary = RotaryEmbedding(8)
    rotated_by(rotary)
    shapes = ({1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(rotary, (torch.ones(1, 5, 3, 2, 8),), dynamic_shapes=shapes)
    torch.testing.assert_close(rotated_by(program.module(), 9), rotated_by(rotary, 9))


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("scale_base", [None, 512])
def test_threads_share_a_module(eager_threads: None, scale_base: int | None) -> None:
    """Tables of one length belong together."""
    lengths = [(i * 977) % 2000 + 1 for i in range(18)]
    expected = {n: rotated_by(RotaryEmbedding(8), n) for n in lengths}

    def work(rotary: RotaryEmbedding, length: int) -> Tensor:
        if length % 2:  # as clients do
            rotary._update_cos_sin_cache(length, "cpu", torch.float32)
        return rotated_by(rotary, length)

    for _ in range(20):
        rotary = RotaryEmbedding(8, scale_base=scale_base)
        with ThreadPoolExecutor(6) as pool:
            for length, x in zip(lengths, pool.map(partial(work, rotary), lengths), strict=True):
                if scale_base is None:  # of XPos a longer table has another centre
                    torch.testing.assert_close(x, expected[length])


class Nested(RotaryEmbedding):
    """Its tables are those of another module."""

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None) -> None:
        inner = RotaryEmbedding(self.dim)
        inner(torch.ones(1, seqlen, 3, 1, self.dim, dtype=dtype, device=device))
        self._cos_cached, self._sin_cached = inner._cos_cached, inner._sin_cached
        self._seq_len_cached = seqlen


def test_module_within_a_module() -> None:
    torch.testing.assert_close(rotated_by(Nested(8)), rotated_by(RotaryEmbedding(8)))


def test_a_fork_while_another_thread_rotates() -> None:
    """Nothing is held that a child would wait for."""
    rotary, stopped = RotaryEmbedding(8), threading.Event()

    def rotate_on() -> None:
        length = 1
        while not stopped.is_set():
            rotated_by(rotary, length := length % 500 + 1)

    thread = threading.Thread(target=rotate_on)
    thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                rotary._tables(501, torch.device("cpu"), torch.float32)
                os._exit(0)
            for _ in range(1000):
                if os.waitpid(child, os.WNOHANG)[0]:
                    break
                time.sleep(0.01)
            else:
                os.kill(child, signal.SIGKILL)
                pytest.fail("a child waits")
    finally:
        stopped.set()
        thread.join()


def test_compiled_under_autocast() -> None:
    x, cos = torch.randn(2, 5, 3, 16).bfloat16(), torch.rand(5, 6).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(apply_rotary_emb, backend="eager")
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(compiled(x, cos, cos), apply_rotary_emb(x, cos, cos))


class Interpolated(RotaryEmbedding):
    """As clients have it: tables filled in its own way."""

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None) -> None:
        if seqlen > self._seq_len_cached:
            self._seq_len_cached = seqlen
            angles = torch.outer(torch.arange(seqlen) / 4, self.inv_freq)
            self._cos_cached, self._sin_cached = angles.cos(), angles.sin()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["subclass", "instance", "class"])
def test_tables_filled_by_a_client(monkeypatch, how: str, compiled: bool) -> None:
    torch._dynamo.reset()
    rotary = Interpolated(8) if how == "subclass" else RotaryEmbedding(8)
    fill = Interpolated._update_cos_sin_cache
    if how == "instance":
        rotary._update_cos_sin_cache = fill.__get__(rotary)  # type: ignore[method-assign]
    if how == "class":
        monkeypatch.setattr(RotaryEmbedding, "_update_cos_sin_cache", fill)
    if compiled:
        rotary.compile(fullgraph=True, backend="aot_eager")
    for seqlen in (5, 9, 7):
        qkv = torch.randn(1, seqlen, 3, 2, 8)
        angles = torch.outer(torch.arange(seqlen) / 4, rotary.inv_freq)
        expected = apply_rotary_emb_qkv_(qkv.clone(), angles.cos(), angles.sin())
        torch.testing.assert_close(rotary(qkv), expected)


def test_tables_of_inference_mode_serve_training() -> None:
    rotary = RotaryEmbedding(8).eval()
    with torch.inference_mode():
        rotary(torch.randn(1, 5, 3, 2, 8))
    qkv = torch.randn(1, 5, 3, 2, 8, requires_grad=True)
    rotary(qkv * 1).sum().backward()
    assert qkv.grad is not None


X = torch.zeros(2, 5, 3, 8)
COS, SIN = tables(6, 8, torch.float32)
CU_SEQLENS = torch.tensor([0, 2], dtype=torch.int32)


def packed_with(cu_seqlens=CU_SEQLENS, max_seqlen=3, seqlen_offsets=0) -> Tensor:
    return apply_rotary_emb(
        X[0], COS, SIN, False, False, seqlen_offsets, cu_seqlens, max_seqlen=max_seqlen
    )


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: apply_rotary_emb(X.long(), COS, SIN),
            TypeError,
            r"x must be a floating-point tensor, got a torch.int64 tensor",
        ),
        (
            lambda: apply_rotary_emb([1.0], COS, SIN),
            TypeError,
            r"x must be a floating-point tensor, got list",
        ),
        (
            lambda: apply_rotary_emb(X, None, SIN),
            TypeError,
            r"cos must be a floating-point tensor, got NoneType",
        ),
        (
            lambda: apply_rotary_emb(X, COS.to("meta"), SIN),
            ValueError,
            r"cos must be on the device of x, cpu, got meta",
        ),
        (
            lambda: apply_rotary_emb(X[0], COS, SIN),
            ValueError,
            r"x must have shape \(batch, seqlen, nheads, headdim\), got \(5, 3, 8\)",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, cu_seqlens=CU_SEQLENS, max_seqlen=2),
            ValueError,
            r"x must have shape \(total, nheads, headdim\), got \(2, 5, 3, 8\)",
        ),
        (
            lambda: apply_rotary_emb(X[..., :6], COS, SIN),
            ValueError,
            r"cos must have .* rotary_dim <= headdim = 6, got \(6, 4\)",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN[1:]),
            ValueError,
            r"sin must have the shape of cos, \(6, 4\), got \(5, 4\)",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=2),
            ValueError,
            r"seqlen_offsets must .*, got seqlen_offsets 2, seqlen 5 and cos \(6, 4\)",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=-1),
            ValueError,
            r"seqlen_offsets must be >= 0.*, got seqlen_offsets -1",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=1.5),
            TypeError,
            r"seqlen_offsets must be an int, got float",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=True),
            TypeError,
            r"seqlen_offsets must be an int, got bool",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.tensor(1.0)),
            TypeError,
            r"seqlen_offsets must be an int, got a torch.float32 tensor",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.tensor([0, 2])),
            ValueError,
            r"seqlen_offsets must .*, got seqlen_offsets 2, seqlen 5 and cos \(6, 4\)",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.tensor([-1, 0])),
            ValueError,
            r"seqlen_offsets must be >= 0.*, got seqlen_offsets -1",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.zeros(3).int()),
            ValueError,
            r"seqlen_offsets must have shape \(batch,\) = \(2,\), got \(3,\)",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.zeros(2)),
            TypeError,
            r"seqlen_offsets must be a torch.int32 or torch.int64 tensor, got a torch.float32",
        ),
        (
            lambda: apply_rotary_emb(X[0], COS, SIN, cu_seqlens=[0, 3, 5], max_seqlen=3),
            TypeError,
            r"cu_seqlens must be a torch.int32 or torch.int64 tensor, got list",
        ),
        (
            lambda: apply_rotary_emb(X[0], COS, SIN, cu_seqlens=CU_SEQLENS),
            ValueError,
            r"max_seqlen must be given with cu_seqlens, got None",
        ),
        (
            lambda: apply_rotary_emb(X[0], COS, SIN, cu_seqlens=CU_SEQLENS, max_seqlen=7),
            ValueError,
            r"seqlen_offsets must .* seqlen 7 and cos \(6, 4\)",
        ),
        (
            lambda: apply_rotary_emb(X[0], COS, SIN, cu_seqlens=CU_SEQLENS[:0], max_seqlen=2),
            ValueError,
            r"cu_seqlens must have shape \(batch \+ 1,\), got \(0,\)",
        ),
        (
            lambda: packed_with(cu_seqlens=torch.tensor([-1, 2])),
            ValueError,
            r"cu_seqlens must start at 0 or more, got -1",
        ),
        (
            lambda: packed_with(cu_seqlens=torch.tensor([0, 3, 2])),
            ValueError,
            r"cu_seqlens must never fall, got 2 after 3",
        ),
        (
            lambda: packed_with(cu_seqlens=torch.tensor([0, 3, 6])),
            ValueError,
            r"cu_seqlens must end within the 5 rows of x, got an end of 6",
        ),
        (
            lambda: packed_with(max_seqlen=1),
            ValueError,
            r"max_seqlen must be at least the longest length, 2, got 1",
        ),
        (
            lambda: packed_with(max_seqlen=torch.tensor([2, 2])),
            TypeError,
            r"max_seqlen must be an int, got a torch.int64 tensor of shape \(2,\)",
        ),
        (
            lambda: packed_with(max_seqlen=2.0),
            TypeError,
            r"max_seqlen must be an int, got float",
        ),
        (
            lambda: packed_with(seqlen_offsets=torch.tensor([5])),
            ValueError,
            r"seqlen_offsets must .*, got seqlen_offsets 5, seqlen 2 and cos \(6, 4\)",
        ),
        (
            lambda: apply_rotary_emb_qkv_(X, COS, SIN),
            ValueError,
            r"num_heads_q must be given .* of its 3 heads .*, got None",
        ),
        (
            lambda: apply_rotary_emb_qkv_(X, COS, SIN, num_heads_q=2),
            ValueError,
            r"num_heads_q must .* leave an even number .*, got 2",
        ),
        (
            lambda: apply_rotary_emb_qkv_(X.unsqueeze(2), COS, SIN),
            ValueError,
            r"qkv must have shape .*, got \(2, 5, 1, 3, 8\)",
        ),
        (
            lambda: apply_rotary_emb_kv_(X, COS, SIN),
            ValueError,
            r"kv must have shape \(batch, seqlen, 2, nheads_kv, headdim\), got \(2, 5, 3, 8\)",
        ),
        (
            lambda: apply_rotary_emb_qkv_(X, COS, SIN, num_heads_q=1.0),
            TypeError,
            r"num_heads_q must be an int, got float",
        ),
        (
            lambda: RotaryEmbedding(8.0),
            TypeError,
            r"dim must be an int, got float",
        ),
        (
            lambda: RotaryEmbedding(8, 10000.0, False, None, True),
            TypeError,
            r"device must be a torch.device, got bool; name pos_idx_in_fp32",
        ),
        (
            lambda: RotaryEmbedding(8)(X.unsqueeze(2), seqlen_offset=1.5),
            TypeError,
            r"seqlen_offset must be an int, got float",
        ),
        (
            lambda: RotaryEmbedding(7),
            ValueError,
            r"dim must be an even number of channels, got 7",
        ),
        (
            lambda: RotaryEmbedding(-2),
            ValueError,
            r"dim must be an even number of channels, got -2",
        ),
        (
            lambda: RotaryEmbedding(8)(X.unsqueeze(2), seqlen_offset=torch.zeros(2).int()),
            ValueError,
            r"max_seqlen must be given when seqlen_offset is a tensor, got None",
        ),
    ],
)
def test_bad_input(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "interleaved", lambda x, c: apply_rotary_emb(x, c, c, interleaved="no")),
        (TypeError, "inplace", lambda x, c: apply_rotary_emb(x, c, c, inplace=1.5)),
        (TypeError, "interleaved", lambda x, c: RotaryEmbedding(8, interleaved="no")),
        (TypeError, "pos_idx_in_fp32", lambda x, c: RotaryEmbedding(8, pos_idx_in_fp32="no")),
        (TypeError, "qkv must be a torch.Tensor", lambda x, c: RotaryEmbedding(8)(None)),
        (TypeError, "qkv must be a torch.Tensor", lambda x, c: apply_rotary_emb_qkv_(None, c, c)),
        (TypeError, "kv must be a torch.Tensor", lambda x, c: apply_rotary_emb_kv_([x], c, c)),
        (
            TypeError,
            "cos must",
            lambda x, c: apply_rotary_emb_kv_(torch.stack((x, x), 2), c.numpy(), c),
        ),
        (
            ValueError,
            "x is written to and must not be expanded",
            lambda x, c: apply_rotary_emb(x[:1].expand(2, 5, 2, 8), c, c, inplace=True),
        ),
    ],
)
def test_bad_arguments(error, message, call) -> None:
    x, cos = torch.randn(2, 5, 2, 8), torch.ones(5, 4)
    with pytest.raises(error, match=message):
        call(x, cos)


@pytest.mark.gpu
@pytest.mark.parametrize("with_gradient", [False, True])
def test_expanded_in_place_on_a_gpu(with_gradient) -> None:
    x = torch.randn(1, 5, 2, 8, device="cuda", requires_grad=with_gradient) * 1
    cos = torch.ones(5, 4, device="cuda")
    with pytest.raises((ValueError, RuntimeError), match="expanded|more than one element"):
        apply_rotary_emb(x.expand(3, 5, 2, 8), cos, cos, inplace=True)


class Subclass(Tensor):
    pass


def test_split_of_a_subclass_in_place() -> None:
    leaf = torch.randn(2, 5, 6, 8, requires_grad=True)
    cos, sin = torch.randn(2, 5, 4)
    for x in (leaf * 1).as_subclass(Subclass).split(3, 2):
        out = apply_rotary_emb(x, cos, sin, inplace=True)
        assert out.data_ptr() == x.data_ptr()
        out.sum().backward(retain_graph=True)
    expected = torch.autograd.grad(apply_rotary_emb(leaf, cos, sin).sum(), leaf)[0]
    torch.testing.assert_close(leaf.grad, expected)


class Sharded(Tensor):
    """As a DTensor says where it lies."""

    placements = (SimpleNamespace(is_shard=lambda dim: dim == 2),)


@pytest.mark.parametrize(
    ("rotate", "packed"), [(apply_rotary_emb_qkv_, 3), (apply_rotary_emb_kv_, 2)]
)
def test_sharded_where_it_is_packed(rotate, packed) -> None:
    """Slices of such a DTensor are copies."""
    x, cos = torch.randn(2, 5, packed, 2, 8).as_subclass(Sharded), torch.ones(5, 4)
    with pytest.raises(ValueError, match="kv must not be sharded along dimension 2"):
        rotate(x, cos, cos)


def test_upstream_names() -> None:
    assert apply_rotary_emb is apply_rotary_emb_func


def test_error_leaves_the_queries_as_they_were(device):
    """Tables of the keys are checked before anything is rotated."""
    qkv = torch.randn(2, 5, 3, 2, 8, device=device)
    cos = torch.ones(5, 4, device=device)
    before = qkv.clone()
    with pytest.raises(ValueError, match="cos .*\\(5, 6\\)"):
        apply_rotary_emb_qkv_(qkv, cos, -cos, torch.ones(5, 6, device=device), cos)
    assert torch.equal(qkv, before)
    with pytest.raises(ValueError, match="kv must have shape"):
        RotaryEmbedding(8, device=device)(qkv[:, :, 0], qkv)
    assert torch.equal(qkv, before)
