"""flash_attn.modules: MHA and its parts, and the MLPs, against plain PyTorch in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import device_fixture
from helpers import cu_seqlens, int32
from torch import Tensor, nn

from flash_attn.modules import mha
from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp

device = device_fixture("cpu-tiled", "cuda-default")

DIM, HEADS, HEADDIM = 24, 4, 6


def visible_keys(
    seqlen_q: int, seqlen_k: int, causal: bool = False, window: tuple[int, int] = (-1, -1)
) -> Tensor:
    """(seqlen_q, seqlen_k), the last query aligned to the last key."""
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    left, right = window
    right = 0 if causal else right
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None, slopes: Tensor | None
) -> Tensor:
    """Softmax attention head by head; (batch, seqlen, heads, headdim)."""
    seqlen_q, seqlen_k, heads = q.shape[1], k.shape[1], q.shape[2]
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    outs = []
    for head in range(heads):
        of_group = head // (heads // k.shape[2])
        scores = q[:, :, head] @ k[:, :, of_group].mT * (scale or q.shape[-1] ** -0.5)
        if slopes is not None:
            scores = scores - slopes[head] * distance.abs().to(scores)
        probs = scores.masked_fill(~visible.to(q.device), float("-inf")).softmax(-1).nan_to_num(0.0)
        outs.append(probs @ v[:, :, of_group])
    return torch.stack(outs, 2)


def rotated(x: Tensor, dim: int, interleaved: bool) -> Tensor:
    """x (batch, seqlen, heads, headdim) as complex numbers, turned by position."""
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None].to(x.device)
    head, rest = x[..., :dim], x[..., dim:]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).mT
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    head = (pairs if interleaved else pairs.mT).flatten(-2)
    return torch.cat([head, rest], -1)


def convolved(layer: nn.Conv1d | None, x: Tensor) -> Tensor:
    """Channel c at t: the sum of w[c, i] * x[t - 2 + i, c], and its bias."""
    if layer is None:
        return x
    past = F.pad(x, (0, 0, 2, 0))
    taps = layer.weight[:, 0].T
    return sum(taps[i] * past[:, i : i + x.shape[1]] for i in range(3)) + layer.bias


def reference(
    layer: MHA,
    x: Tensor,
    x_kv: Tensor | None = None,
    visible: Tensor | None = None,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    alibi: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """The layer's result, from its parameters."""
    if layer.cross_attn:
        q, kv = layer.Wq(x), layer.Wkv(x if x_kv is None else x_kv)
    else:
        qkv = convolved(getattr(layer, "dwconv_qkv", None), layer.Wqkv(x))
        q, kv = qkv[..., :DIM], qkv[..., DIM:]
    q = convolved(getattr(layer, "dwconv_q", None), q)
    kv = convolved(getattr(layer, "dwconv_kv", None), kv)
    q = q.reshape(*q.shape[:2], HEADS, HEADDIM)
    k, v = kv.reshape(*kv.shape[:2], 2, -1, HEADDIM).unbind(2)
    if layer.rotary_emb_dim:
        q, k = (rotated(t, layer.rotary_emb_dim, interleaved) for t in (q, k))
    if visible is None:
        visible = visible_keys(q.shape[1], k.shape[1], layer.causal, window)
    slopes = torch.tensor([2 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)]) if alibi else None
    out = attention(q, k, v, visible, scale, slopes)
    return F.linear(out.flatten(-2), layer.out_proj.weight, layer.out_proj.bias)


def assert_same(
    layer: nn.Module, got: Tensor, expected: Tensor, *inputs: Tensor, tolerance: float = 1e-10
) -> None:
    """Equal results, and gradients of the parameters and inputs."""
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    used = [*(p for p in layer.parameters() if p.requires_grad), *inputs]
    direction = torch.randn_like(expected)
    grads, expected_grads = (
        torch.autograd.grad(out, used, direction, retain_graph=True, allow_unused=True)
        for out in (got, expected)
    )
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=tolerance, atol=10 * tolerance)


def make(cls: type[nn.Module], device: str, *args: Any, **options: Any) -> Any:
    return cls(*args, device=device, dtype=torch.float64, **options)


def leaf(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float64, requires_grad=True)


# Options of the layer, then of the reference alone.
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {}),
    "no-bias": ({"qkv_proj_bias": False, "out_proj_bias": False}, {}),
    "gqa": ({"num_heads_kv": 2, "causal": True}, {}),
    "mqa": ({"num_heads_kv": 1}, {}),
    "scale": ({"softmax_scale": 0.7}, {"scale": 0.7}),
    "rotary": ({"rotary_emb_dim": 4, "causal": True}, {}),
    "rotary-gqa": (
        {"rotary_emb_dim": 6, "num_heads_kv": 2, "rotary_emb_interleaved": True},
        {"interleaved": True},
    ),
    "dwconv": ({"dwconv": True, "causal": True}, {}),
    "dwconv-gqa": ({"dwconv": True, "num_heads_kv": 2}, {}),
    "checkpointing": ({"checkpointing": True, "causal": True, "fused_bias_fc": True}, {}),
}
FLASH_ONLY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alibi": ({"use_alibi": True, "causal": True}, {"alibi": True}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "window-gqa": (
        {"window_size": [2, 0], "num_heads_kv": 2, "causal": True},
        {"window": (2, 0)},
    ),
}
CASES = [(name, flash) for name in LAYERS for flash in (True, False)]
CASES += [(name, True) for name in FLASH_ONLY]


@pytest.mark.parametrize(("name", "flash"), CASES)
def test_self_attention(device, name, flash):
    options, of_reference = (LAYERS | FLASH_ONLY)[name]
    layer = make(MHA, device, DIM, HEADS, use_flash_attn=flash, **options)
    x = leaf(2, 13, DIM, device=device)
    tolerance = 1e-5 if layer.rotary_emb_dim else 1e-10  # the tables of angles are in float32
    expected = reference(layer, x, **of_reference)
    assert_same(layer, layer(x), expected, x, tolerance=tolerance)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("heads_kv", [None, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_cross_attention(device, flash, heads_kv, causal):
    layer = make(
        MHA, device, DIM, HEADS, heads_kv, cross_attn=True, causal=causal, use_flash_attn=flash
    )
    x, x_kv = leaf(2, 5, DIM, device=device), leaf(2, 11, DIM, device=device)
    assert_same(layer, layer(x, x_kv), reference(layer, x, x_kv), x, x_kv)
    subset = slice(1, 3)
    got = layer(x, x_kv, mixer_subset=subset)
    assert_same(layer, got, reference(layer, x[:, subset], x_kv), x, x_kv)
    assert_same(layer, layer(x), reference(layer, x), x)


def test_cross_attention_with_dwconv(device):
    layer = make(MHA, device, DIM, HEADS, cross_attn=True, dwconv=True, use_flash_attn=True)
    x, x_kv = leaf(2, 5, DIM, device=device), leaf(2, 9, DIM, device=device)
    assert_same(layer, layer(x, x_kv), reference(layer, x, x_kv), x, x_kv)


@pytest.mark.parametrize("heads_kv", [None, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_key_padding_mask(device, heads_kv, causal):
    """Padding on either side; a causal query before the first key sees nothing and gives 0."""
    layer = make(MHA, device, DIM, HEADS, heads_kv, causal=causal)
    x = leaf(3, 7, DIM, device=device)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, :3] = mask[2, 4:] = False
    visible = visible_keys(7, 7, causal) & mask[:, None]
    expected = reference(layer, x, visible=visible)
    assert_same(layer, layer(x, key_padding_mask=mask.to(device)), expected, x)


def test_key_padding_mask_of_cross_attention(device):
    """Causal: the last query is aligned to the last key of each sequence."""
    q, kv = leaf(2, 4, HEADS, HEADDIM, device=device), leaf(2, 9, 2, 2, HEADDIM, device=device)
    lengths = [9, 6]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    visible = torch.zeros(2, 4, 9, dtype=torch.bool)
    for row, length in zip(visible, lengths, strict=True):
        row[:, :length] = visible_keys(4, length, causal=True)
    layer = CrossAttention(causal=True)
    expected = attention(q, *kv.unbind(2), visible, None, None)
    assert_same(layer, layer(q, kv, key_padding_mask=mask.to(device)), expected, q, kv)


@pytest.mark.parametrize("heads_kv", [None, 2])
def test_packed_sequences(device, heads_kv):
    layer = make(MHA, device, DIM, HEADS, heads_kv, causal=True, use_flash_attn=True)
    lengths = [5, 1, 8]
    x = leaf(sum(lengths), DIM, device=device)
    parts = [reference(layer, part[None])[0] for part in x.split(lengths)]
    out = layer(x, cu_seqlens=cu_seqlens(lengths, device), max_seqlen=8)
    assert_same(layer, out, torch.cat(parts), x)


def test_packed_cross_attention(device):
    layer = make(MHA, device, DIM, HEADS, cross_attn=True, use_flash_attn=True)
    lengths_q, lengths_k = [3, 4], [6, 2]
    x, x_kv = leaf(7, DIM, device=device), leaf(8, DIM, device=device)
    pairs = zip(x.split(lengths_q), x_kv.split(lengths_k), strict=True)
    expected = torch.cat([reference(layer, a[None], b[None])[0] for a, b in pairs])
    of_keys = {"cu_seqlens_k": cu_seqlens(lengths_k, device), "max_seqlen_k": 6}
    out = layer(x, x_kv, cu_seqlens=cu_seqlens(lengths_q, device), max_seqlen=4, **of_keys)
    assert_same(layer, out, expected, x, x_kv)


def test_return_residual(device):
    layer = make(MHA, device, DIM, HEADS, return_residual=True, use_flash_attn=True)
    x = leaf(1, 4, DIM, device=device)
    out, residual = layer(x)
    assert residual is x
    assert_same(layer, out, reference(layer, x), x)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_checkpointing_attends_again_in_the_backward(flash, checkpointing):
    layer = MHA(DIM, HEADS, use_flash_attn=flash, checkpointing=checkpointing)
    calls = []
    layer.inner_attn.register_forward_pre_hook(lambda *_: calls.append(None))
    layer(torch.randn(1, 4, DIM)).sum().backward()
    assert len(calls) == 1 + checkpointing


@pytest.mark.parametrize("deterministic", [True, False])
def test_inner_attention_hands_on_whether_it_is_deterministic(monkeypatch, deterministic):
    seen = []
    for name in ("flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"):
        monkeypatch.setattr(mha, name, lambda *_, **options: seen.append(options["deterministic"]))
    qkv = torch.randn(1, 4, 3, HEADS, HEADDIM)
    FlashSelfAttention(deterministic=deterministic)(qkv)
    FlashCrossAttention(deterministic=deterministic)(qkv[:, :, 0], qkv[:, :, 1:])
    assert seen == [deterministic] * 2


@pytest.mark.parametrize("cls", [FlashSelfAttention, SelfAttention])
def test_inner_self_attention(device, cls):
    """`causal` of a call overrides the layer's; dropout is of training alone."""
    qkv = leaf(2, 9, 3, HEADS, HEADDIM, device=device)
    layer = cls(causal=True, softmax_scale=0.5, attention_dropout=0.5).eval()
    for causal in (None, True, False):
        visible = visible_keys(9, 9, causal is not False)
        expected = attention(*qkv.unbind(2), visible, 0.5, None)
        assert_same(layer, layer(qkv, causal=causal), expected, qkv)
    dropped = layer.train()(qkv)
    assert not torch.equal(dropped, layer(qkv))
    assert torch.equal(dropped == 0, (dropped == 0).all(-1, keepdim=True).expand_as(dropped))


def test_inner_attention_windows(device):
    """The two classes take the window and the slopes in the order that upstream has."""
    slopes = torch.rand(HEADS, dtype=torch.float64, device=device).float()
    qkv = leaf(2, 9, 3, HEADS, HEADDIM, device=device)
    visible = visible_keys(9, 9, False, (3, 1))
    expected = attention(*qkv.unbind(2), visible, None, slopes.cpu().double())
    own = FlashSelfAttention(False, None, 0.0, (3, 1), slopes, True)
    assert_same(own, own(qkv), expected, qkv, tolerance=1e-6)
    cross = FlashCrossAttention(False, None, 0.0, slopes, (3, 1), True)
    assert_same(cross, cross(qkv[:, :, 0], qkv[:, :, 1:]), expected, qkv, tolerance=1e-6)
    assert not own.state_dict()


def test_bfloat16(device):
    """Twice the error of PyTorch's own operations in bfloat16."""
    options = {"causal": True, "rotary_emb_dim": 16, "use_alibi": True}
    layer = MHA(128, 4, 2, use_flash_attn=True, device=device, **options).bfloat16()
    x = torch.randn(2, 70, 128, device=device, dtype=torch.bfloat16)
    got = layer(x)
    slopes = layer.inner_attn.alibi_slopes.cpu()
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        weights = {name: p.detach().to(dtype) for name, p in layer.state_dict().items()}
        qkv = F.linear(x.to(dtype), weights["Wqkv.weight"], weights["Wqkv.bias"])
        q, k, v = (t.unflatten(-1, (-1, 32)) for t in qkv.split([128, 64, 64], -1))
        q, k = (rotated(t.double(), 16, False).to(dtype) for t in (q, k))
        out = attention(q, k, v, visible_keys(70, 70, True), None, slopes).flatten(-2)
        results.append(F.linear(out, weights["out_proj.weight"], weights["out_proj.bias"]))
    exact, eager = results
    error, eager_error = ((t - exact).abs().max() for t in (got, eager))
    assert error <= 2 * eager_error


# --------------------------------------------------------------------------------------------------
# Generation
# --------------------------------------------------------------------------------------------------


def generation(batch: int = 2, capacity: int = 16, **more: Any) -> SimpleNamespace:
    state = {"seqlen_offset": 0, "batch_size_offset": 0, "lengths_per_sample": None}
    state |= {"max_seqlen": capacity, "max_batch_size": batch, "key_value_memory_dict": {}}
    return SimpleNamespace(**state | more)


GENERATORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa": {"num_heads_kv": 2},
    "rotary": {"rotary_emb_dim": 6},
    "rotary-interleaved": {"rotary_emb_dim": 4, "rotary_emb_interleaved": True, "num_heads_kv": 1},
    "xpos": {"rotary_emb_dim": 6, "rotary_emb_scale_base": 8.0},
    "window": {"window_size": (4, 0)},
    "alibi": {"use_alibi": True, "softmax_scale": 0.6},
}


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("name", GENERATORS)
@torch.no_grad()
def test_steps_equal_the_whole(device, name, flash):
    """A prompt, then single tokens and a chunk, give what the whole sequence gives at once."""
    if not flash and name in ("window", "alibi"):
        pytest.skip("needs use_flash_attn")
    layer = make(
        MHA, device, DIM, HEADS, causal=True, layer_idx=3, use_flash_attn=flash, **GENERATORS[name]
    )
    x = torch.randn(2, 12, DIM, device=device, dtype=torch.float64)
    state = generation()
    steps = []
    for part in x.split([5, 1, 3, 1, 2], dim=1):
        steps.append(layer(part, inference_params=state))
        state.seqlen_offset += part.shape[1]
    tolerance = 1e-5 if layer.rotary_emb_dim else 1e-10
    torch.testing.assert_close(torch.cat(steps, 1), layer(x), rtol=tolerance, atol=tolerance)
    assert list(state.key_value_memory_dict) == [3]


@pytest.mark.parametrize("flash", [True, False])
@torch.no_grad()
def test_rotary_of_a_step_without_a_mask(device, flash):
    """Each token of the last step sees all, from a position of its own."""
    layer = make(MHA, device, DIM, HEADS, layer_idx=0, use_flash_attn=flash, rotary_emb_dim=6)
    x = torch.randn(2, 12, DIM, device=device, dtype=torch.float64)
    state = generation()
    layer(x[:, :5], inference_params=state)
    state.seqlen_offset = 5
    step = layer(x[:, 5:], inference_params=state)
    torch.testing.assert_close(step, layer(x)[:, 5:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gqa", "rotary", "window"])
@torch.no_grad()
def test_sequences_of_different_lengths(device, name):
    """Each prompt fills its row of an allocated cache; the steps after it share a batch."""
    layer = make(
        MHA, device, DIM, HEADS, causal=True, layer_idx=0, use_flash_attn=True, **GENERATORS[name]
    )
    state = generation(batch=3)
    cache = layer.allocate_inference_cache(3, 16).fill_(float("nan"))
    assert cache.shape == (3, 16, 2, layer.num_heads_kv, HEADDIM) and cache.dtype == torch.float64
    assert layer.allocate_inference_cache(3, 16, torch.bfloat16).dtype == torch.bfloat16
    state.key_value_memory_dict[0] = cache
    texts = [torch.randn(n + 2, DIM, device=device, dtype=torch.float64) for n in (3, 9, 5)]
    for i, text in enumerate(texts):
        state.batch_size_offset = i
        layer(text[None, :-2], inference_params=state)
    state.batch_size_offset = 0
    state.lengths_per_sample = int32([len(text) - 2 for text in texts], device)
    state.seqlen_offset = 9
    for step in (-2, -1):
        tokens = torch.stack([text[step] for text in texts])[:, None]
        got = layer(tokens, inference_params=state)
        length = [len(text) + step + 1 for text in texts]
        whole = [layer(text[None, :n])[0, -1:] for text, n in zip(texts, length, strict=True)]
        torch.testing.assert_close(got, torch.stack(whole), rtol=1e-5, atol=1e-5)
        state.lengths_per_sample += 1
    state.batch_size_offset, rows = 1, state.lengths_per_sample.clone()
    rows[1:] -= 1
    state.lengths_per_sample = rows.long()  # as torch.tensor makes them
    again = layer(tokens[1:], inference_params=state)  # the last step once more, for two sequences
    torch.testing.assert_close(again, got[1:])


@torch.no_grad()
def test_update_kv_cache(device):
    state = generation(batch=4, seqlen_offset=2, batch_size_offset=1)
    kv = torch.randn(2, 3, 2, HEADS, HEADDIM, device=device)
    used = mha._update_kv_cache(kv, state, 7)
    cache = state.key_value_memory_dict[7]
    assert cache.shape == (4, 16, 2, HEADS, HEADDIM) and used.shape[:2] == (2, 5)
    assert torch.equal(used[:, 2:], kv) and torch.equal(cache[1:3, 2:5], kv)
    assert used.data_ptr() == cache[1].data_ptr()


# --------------------------------------------------------------------------------------------------
# Names, defaults and errors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"Wqkv": (DIM * 3, DIM)}),
        ({"num_heads_kv": 2, "rotary_emb_dim": 4}, {"Wqkv": (DIM * 2, DIM)}),
        ({"cross_attn": True}, {"Wq": (DIM, DIM), "Wkv": (DIM * 2, DIM)}),
        ({"dwconv": True}, {"Wqkv": (DIM * 3, DIM), "dwconv_qkv": (DIM * 3, 1, 3)}),
        (
            {"dwconv": True, "num_heads_kv": 2},
            {"Wqkv": (DIM * 2, DIM), "dwconv_q": (DIM, 1, 3), "dwconv_kv": (DIM, 1, 3)},
        ),
        ({"use_flash_attn": True, "use_alibi": True}, {"Wqkv": (DIM * 3, DIM)}),
    ],
)
def test_state_dict(options, names):
    names = names | {"out_proj": (DIM, DIM)}
    expected = {f"{name}.weight": shape for name, shape in names.items()}
    expected |= {f"{name}.bias": shape[:1] for name, shape in names.items()}
    state = MHA(DIM, HEADS, **options).state_dict()
    assert {name: tuple(p.shape) for name, p in state.items()} == expected
    without = MHA(DIM, HEADS, qkv_proj_bias=False, out_proj_bias=False, **options).state_dict()
    assert [name for name in without if name.endswith("bias") and "dwconv" not in name] == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_alibi_slopes_stay_as_they_are(dtype):
    """Of 12 heads some are no powers of two."""
    module = MHA(12 * 8, 12, causal=True, use_flash_attn=True, use_alibi=True).to(dtype)
    expected = torch.tensor(get_alibi_slopes(12))
    assert torch.equal(module.inner_attn.alibi_slopes, expected)
    assert module.to("meta").inner_attn.alibi_slopes.is_meta


def test_alibi_slopes():
    assert get_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert get_alibi_slopes(1) == [2.0**-8]
    assert get_alibi_slopes(torch.tensor(8)) == get_alibi_slopes(8)
    for nheads in (6, 12, 40):  # each second one of twice as many follows
        power = {6: 4, 12: 8, 40: 32}[nheads]
        expected = get_alibi_slopes(power) + get_alibi_slopes(2 * power)[::2][: nheads - power]
        assert get_alibi_slopes(nheads) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "embed_dim", lambda x, p: MHA(25, HEADS)),
        (ValueError, "num_heads_kv", lambda x, p: MHA(DIM, HEADS, 3)),
        (ValueError, "num_heads_kv must be at least 1", lambda x, p: MHA(DIM, HEADS, 0)),
        (ValueError, "num_heads must be at least 1", lambda x, p: MHA(DIM, 0)),
        (ValueError, "use_flash_attn", lambda x, p: MHA(DIM, HEADS, use_alibi=True)),
        (ValueError, "use_flash_attn", lambda x, p: MHA(DIM, HEADS, window_size=(3, 3))),
        (
            ValueError,
            "rotary_emb_dim",
            lambda x, p: MHA(DIM, HEADS, cross_attn=True, rotary_emb_dim=4),
        ),
        (
            ValueError,
            "unpad_input",
            lambda x, p: MHA(DIM, HEADS, use_flash_attn=True)(x, key_padding_mask=x[..., 0] > 0),
        ),
        (
            ValueError,
            "cu_seqlens",
            lambda x, p: MHA(DIM, HEADS)(x[0], cu_seqlens=int32([0, 4]), max_seqlen=4),
        ),
        (
            ValueError,
            "max_seqlen",
            lambda x, p: MHA(DIM, HEADS, use_flash_attn=True)(x[0], cu_seqlens=int32([0, 4])),
        ),
        (ValueError, "cross_attn", lambda x, p: MHA(DIM, HEADS)(x, x)),
        (ValueError, "layer_idx", lambda x, p: MHA(DIM, HEADS)(x, inference_params=p)),
        (
            ValueError,
            "dwconv",
            lambda x, p: MHA(DIM, HEADS, dwconv=True, layer_idx=0)(x, inference_params=p),
        ),
        (
            ValueError,
            "no cache of layer 0",
            lambda x, p: MHA(DIM, HEADS, layer_idx=0)(
                x, inference_params=generation(seqlen_offset=4)
            ),
        ),
        (
            ValueError,
            "room for 3 tokens",
            lambda x, p: MHA(DIM, HEADS, layer_idx=0)(x, inference_params=generation(capacity=3)),
        ),
        (
            ValueError,
            "room for 1 sequences",
            lambda x, p: MHA(DIM, HEADS, layer_idx=0)(x, inference_params=generation(batch=1)),
        ),
        (
            ValueError,
            "rotary_emb_dim must be at least 0",
            lambda x, p: MHA(8, 2, rotary_emb_dim=-2),
        ),
        (ValueError, "window_size", lambda x, p: MHA(DIM, HEADS, window_size=5)),
        (TypeError, "alibi_slopes", lambda x, p: FlashSelfAttention(alibi_slopes=[0.5, 0.25])),
        (ValueError, "nheads", lambda x, p: get_alibi_slopes(0)),
        (ValueError, "activation", lambda x, p: FusedMLP(8, activation="silu")),
        (ValueError, "checkpoint_lvl", lambda x, p: FusedMLP(8, checkpoint_lvl=3)),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call(torch.randn(2, 4, DIM), generation())


@pytest.mark.parametrize("nested", [False, True])
def test_made_on_meta(nested):
    """What no state_dict holds is computed when the module gets memory, whatever lies there."""

    def make() -> MHA:
        options = {"rotary_emb_dim": 4, "rotary_emb_scale_base": 4.0}
        return MHA(DIM, HEADS, use_alibi=True, use_flash_attn=True, **options)

    source, x = make(), torch.randn(2, 5, DIM)
    with torch.device("meta"):
        module = make()
        owner = torch.nn.Sequential(module) if nested else module
    owner.to_empty(device="cpu")
    module.load_state_dict(source.state_dict())
    torch.testing.assert_close(module(x), source(x), rtol=0.0, atol=0.0)

    slopes = torch.ones(HEADS, device="meta")
    alone = FlashSelfAttention(alibi_slopes=slopes).to_empty(device="cpu")
    assert alone.alibi_slopes.isnan().all()  # nobody knows them


# --------------------------------------------------------------------------------------------------
# MLPs
# --------------------------------------------------------------------------------------------------


def test_mlp(device):
    layer = make(Mlp, device, 6)
    assert [tuple(p.shape) for p in layer.parameters()] == [(24, 6), (24,), (6, 24), (6,)]
    assert list(layer.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    layer = make(
        Mlp, device, 6, 10, 4, activation=torch.tanh, bias1=False, bias2=False, return_residual=True
    )
    x = leaf(3, 6, device=device)
    y, residual = layer(x)
    assert residual is x
    assert_same(layer, y, torch.tanh(x @ layer.fc1.weight.T) @ layer.fc2.weight.T, x)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ({}, lambda gate: 1 / (1 + torch.exp(-gate))),
        ({"activation": F.silu}, lambda gate: gate / (1 + torch.exp(-gate))),
        ({"activation": F.gelu}, lambda gate: gate * (1 + torch.erf(gate / 2**0.5)) / 2),
    ],
)
def test_gated_mlp(device, activation, formula):
    layer = make(GatedMlp, device, 6, 10, 4, multiple_of=8, **activation)
    assert list(layer.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert layer.fc1.weight.shape == (32, 6) and layer.fc2.weight.shape == (4, 16)
    x = leaf(3, 6, device=device)
    hidden = x @ layer.fc1.weight.T + layer.fc1.bias
    expected = hidden[:, :16] * formula(hidden[:, 16:]) @ layer.fc2.weight.T + layer.fc2.bias
    assert_same(layer, layer(x), expected, x)
    assert GatedMlp(96).fc1.weight.shape == (512, 96)  # 8 / 3 of 96, twice
    assert GatedMlp(97, bias1=False, bias2=False, return_residual=True).fc2.bias is None


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        (
            "gelu_approx",
            lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        ),
        ("relu", lambda x: x.clamp(min=0)),
        ("sqrelu", lambda x: x.clamp(min=0) ** 2),
    ],
)
def test_fused_mlp(device, name, formula, level):
    layer = make(FusedMLP, device, 6, 10, activation=name, checkpoint_lvl=level, heuristic=0)
    assert list(layer.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    x = leaf(3, 6, device=device)
    hidden = formula(x @ layer.fc1.weight.T + layer.fc1.bias)
    assert_same(layer, layer(x), hidden @ layer.fc2.weight.T + layer.fc2.bias, x)


def saved(layer: FusedMLP, x: Tensor) -> int:
    """Hidden tensors that the forward keeps for the backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        layer(x)
    return kept.count((3, 10))


def test_fused_mlp_keeps_less():
    x = torch.randn(3, 6)
    kept = [saved(FusedMLP(6, 10, checkpoint_lvl=level), x) for level in (0, 1, 2)]
    assert kept == [2, 1, 0]
