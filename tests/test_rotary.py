"""Rotary position embedding, against multiplication by complex numbers token by token."""

import cmath
import itertools

import pytest
import torch
from torch import Tensor

from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
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


def test_packed_is_the_padded_result() -> None:
    x = torch.randn(4, 6, 2, 8)
    cos, sin = tables(6, 8, torch.float32)
    packed = apply_rotary_emb(
        x.flatten(0, 1),
        cos,
        sin,
        cu_seqlens=torch.arange(0, 25, 6, dtype=torch.int32),
        max_seqlen=6,
    )
    assert torch.equal(packed.unflatten(0, (4, 6)), apply_rotary_emb(x, cos, sin))


@INTERLEAVED
@pytest.mark.parametrize("packed", [False, True])
def test_gradients(interleaved: bool, packed: bool) -> None:
    x = torch.randn(*((5,) if packed else (2, 5)), 2, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.requires_grad_() for table in tables(9, 6))
    varlen = (torch.tensor([0, 2, 4]).int(), 3) if packed else (None, None)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rotary_emb(x, cos, sin, interleaved, False, torch.tensor([4, 1]), *varlen)

    def rotate_in_place(x: Tensor) -> Tensor:
        return apply_rotary_emb(
            x * 1, cos.detach(), sin.detach(), interleaved, True, torch.tensor([4, 1]), *varlen
        )

    assert torch.autograd.gradcheck(rotate, (x, cos, sin))
    assert torch.autograd.gradcheck(rotate_in_place, x)
    assert torch.autograd.gradgradcheck(rotate_in_place, x)


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


def test_leaf_in_place_is_refused() -> None:
    x = torch.randn(1, 2, 1, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        apply_rotary_emb(x, *tables(2, 4, torch.float32), inplace=True)


def test_offset_on_the_device_is_clamped() -> None:
    x = torch.randn(2, 3, 1, 4, dtype=torch.float64)
    cos, sin = tables(5, 4)
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([-7, 1000]))
    expected = [reference(x[b], cos, sin, [row] * 3, False) for b, row in enumerate([0, 4])]
    torch.testing.assert_close(out, torch.stack(expected))


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
def test_empty_packed(total: int, batch: int) -> None:
    x, (cos, sin) = torch.randn(total, 2, 8), tables(9, 8, torch.float32)
    cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32)
    assert torch.equal(apply_rotary_emb(x, cos, sin, cu_seqlens=cu_seqlens, max_seqlen=0), x)


@INTERLEAVED
def test_qkv(interleaved: bool) -> None:
    qkv = torch.randn(2, 5, 3, 4, 8)
    q, k, v = qkv.clone().unbind(2)
    cos, sin = tables(9, 6, torch.float32)
    cos_k, sin_k = tables(9, 6, torch.float32)
    assert apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, interleaved, 2) is qkv
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
    assert apply_rotary_emb_kv_(kv, cos, sin, seqlen_offsets=1) is kv
    assert torch.equal(kv[:, :, 0], apply_rotary_emb(k, cos, sin, seqlen_offsets=1))
    assert torch.equal(kv[:, :, 1], v)


def test_torch_form_takes_tables_per_sequence() -> None:
    x = torch.randn(2, 5, 3, 8)
    cos, sin = tables(9, 8, torch.float32)
    expected = apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([1, 4]))
    rows = torch.stack([torch.arange(1, 6), torch.arange(4, 9)])
    assert torch.equal(apply_rotary_emb_torch(x, cos[rows], sin[rows]), expected)


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


X = torch.zeros(2, 5, 3, 8)
COS, SIN = tables(6, 8, torch.float32)
CU_SEQLENS = torch.tensor([0, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: apply_rotary_emb(X.long(), COS, SIN),
            TypeError,
            r"x must be a floating-point tensor, got torch.int64",
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
            r"seqlen_offsets must be an int or a tensor, got float",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.zeros(3).int()),
            ValueError,
            r"seqlen_offsets must have shape \(batch,\) = \(2,\), got \(3,\)",
        ),
        (
            lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=torch.zeros(2)),
            TypeError,
            r"seqlen_offsets must have dtype torch.int32 or torch.int64, got torch.float32",
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
            lambda: RotaryEmbedding(7),
            ValueError,
            r"dim must be an even number of channels, got 7",
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


def test_upstream_names() -> None:
    assert apply_rotary_emb is apply_rotary_emb_func
