"""flash_attn.adapters.register_with_pytorch: PyTorch's flash attention runs on this library."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import since_torch
from torch import Tensor

from flash_attn import _ops, adapters, flash_attn_func, flash_attn_varlen_func
from flash_attn._backends.cuda import Prepared
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

pytestmark = since_torch(2, 11, "PyTorch takes implementations of flash attention")

Inputs = tuple[Tensor, Tensor, Tensor]
CALLS = ["heads_first_forward", "heads_first_backward"]  # of a training step
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that reach this library while it is active."""
    from flash_attn import _sdpa

    calls: list[str] = []
    prefixes = {"heads_first": (_sdpa, "_heads_first"), "varlen": (_ops, "flash_attn_varlen")}
    for kind, direction in itertools.product(prefixes, ("forward", "backward")):
        module, prefix = prefixes[kind]
        original = getattr(module, f"{prefix}_{direction}")

        def counted(
            *args: Any, original: Any = original, name: str = f"{kind}_{direction}", **more: Any
        ) -> Any:
            calls.append(name)
            return original(*args, **more)

        monkeypatch.setattr(module, f"{prefix}_{direction}", counted)
    torch.nn.attention.activate_flash_attention_impl(adapters.register_with_pytorch())
    yield calls
    torch.nn.attention.restore_flash_attention_impl()


def inputs(
    heads: int, heads_kv: int, seqlen: int, headdim: int, device: str, dtype: torch.dtype
) -> Inputs:
    """(batch, nheads, seqlen, headdim), of which k is a view of another order."""
    torch.manual_seed(0)
    q = torch.randn(2, heads, seqlen, headdim, device=device, dtype=dtype)
    k = torch.randn(2, seqlen, heads_kv, headdim, device=device, dtype=dtype).transpose(1, 2)
    v = torch.randn(2, heads_kv, seqlen, headdim, device=device, dtype=dtype)
    return q, k, v


def direction(out: Tensor) -> Tensor:
    """A gradient of the output that every dtype has exactly."""
    numbers = torch.arange(out.numel(), device=out.device) % 17 - 8
    return (numbers / 8).to(out.dtype).view(out.shape)


def with_gradients(attend: Callable[..., Tensor], tensors: Inputs, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, direction(out))]


def exact(tensors: Inputs, **options: Any) -> list[Tensor]:
    """By definition, in float64 on the CPU, where no implementation is active."""
    doubles = tuple(x.double().cpu() for x in tensors)
    return with_gradients(F.scaled_dot_product_attention, doubles, **options)


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert (x.double().cpu() - y).abs().max() <= 2**-7 * y.abs().max()


@pytest.mark.parametrize("causal", [False, True])
def test_operators_on_a_cpu(causal: bool) -> None:
    """What is registered for CUDA tensors, called with others: results, gradients and layouts."""
    from flash_attn._sdpa import _OPERATORS

    q, k, v = inputs(4, 2, 37, 16, "cpu", torch.float64)
    forward = _OPERATORS["_scaled_dot_product_flash_attention"]
    backward = _OPERATORS["_scaled_dot_product_flash_attention_backward"]
    out, lse, _, _, *lengths, state, unused, mask = forward(q, k, v, 0.0, causal)
    assert lengths == [37, 37] and mask.numel() == 0 and out.stride() == q.stride()
    assert state.dtype == unused.dtype == torch.uint64 and state.shape == (2,)
    saved = (out, lse, None, None, *lengths, 0.0, causal, state, unused)
    gradients = backward(direction(out), q, k, v, *saved)
    assert [x.stride() for x in gradients] == [torch.empty_like(x).stride() for x in (q, k, v)]
    expected = exact((q, k, v), is_causal=causal, enable_gqa=True)
    torch.testing.assert_close([out, *gradients], expected)


@pytest.mark.parametrize("expanded", [False, True])
def test_what_is_remembered(expanded: bool) -> None:
    """A gradient is made like its input: only where it then lies as that of the first call."""
    from flash_attn._sdpa import _by_tokens

    q = torch.randn(2, 1 if expanded else 4, 37, 16).expand(-1, 4, -1, -1)
    remembered: list[Any] = []
    (view,), remember = _by_tokens(remembered.append, q)
    assert remember is not None and view.shape == (2, 37, 4, 16)
    remember(Prepared(None, {"q": view}, {"dq": torch.empty_like(view)}, {"dq": "q"}))
    assert [prepared.tensors["q"] is q for prepared in remembered] == [True] * (not expanded)


def test_packed_operators_on_a_cpu() -> None:
    from flash_attn._sdpa import _OPERATORS

    bounds = torch.tensor([0, 5, 5, 16], dtype=torch.int32)
    q, k, v = (torch.randn(16, 2, 8, dtype=torch.float64) for _ in range(3))
    forward = _OPERATORS["_flash_attention_forward"]
    arguments = (q, k, v, bounds, bounds, 11, 11, 0.0, True, False)
    out, lse, state, unused, _ = forward(*arguments, window_size_left=3, window_size_right=0)
    parts = []
    for begin, end in ((0, 5), (5, 16)):
        apart = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        rows = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        part = F.scaled_dot_product_attention(*rows, attn_mask=(apart >= 0) & (apart <= 3))
        parts.append(part.transpose(0, 1))
    torch.testing.assert_close(out, torch.cat(parts))
    into = torch.empty_like(out)
    options = {"window_size_left": 3, "window_size_right": 0}
    lse_too = _OPERATORS["_flash_attention_forward_no_dropout_inplace"](into, *arguments, **options)
    assert torch.equal(into, out) and torch.equal(lse_too, lse)
    backward = _OPERATORS["_flash_attention_backward"]
    saved = (q, k, v, out, lse, bounds, bounds, 11, 11, 0.0, True, state, unused)
    dv = backward(out, *saved, **options)[2]
    torch.testing.assert_close((dv * v).sum(), (out * out).sum())


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_operators_on_a_cpu(packed: bool, dropout_p: float) -> None:
    """Packed or not, with a window and dropout: what the functions of this library have."""
    from flash_attn._sdpa import _OPERATORS

    shape = (16, 2, 8) if packed else (2, 11, 2, 8)
    tensors = tuple(torch.randn(shape, dtype=torch.float64) for _ in range(3))
    lengths: Any = (None, None, 11, 11)
    function: Any = flash_attn_func
    if packed:
        bounds = torch.tensor([0, 5, 16], dtype=torch.int32)
        lengths = (bounds, bounds, 11, 11)
        function = partial(flash_attn_varlen_func, **dict(zip(LENGTHS, lengths, strict=True)))
    options: Any = {"scale": 0.4, "window_size_left": 3, "window_size_right": 1}
    forward, backward = (_OPERATORS[f"_flash_attention_{x}"] for x in ("forward", "backward"))
    torch.manual_seed(1)
    drops = dropout_p > 0
    out, lse, state, unused, mask = forward(*tensors, *lengths, dropout_p, False, drops, **options)
    assert (mask.numel() > 0) == drops
    saved = (*tensors, out, lse, *lengths, dropout_p, False, state, unused)
    gradients = backward(direction(out), *saved, **options)
    torch.manual_seed(1)
    given = {"dropout_p": dropout_p, "softmax_scale": 0.4, "window_size": (3, 1)}
    torch.testing.assert_close([out, *gradients], with_gradients(function, tensors, **given))


def test_more_of_packed_operators_on_a_cpu() -> None:
    """Lengths in use, ALiBi and splits of the keys, which no function of this library has so."""
    from flash_attn._sdpa import _OPERATORS

    bounds = torch.tensor([0, 5, 16], dtype=torch.int32)
    q, k, v = (torch.randn(16, 2, 8) for _ in range(3))
    options: Any = {"seqused_k": torch.tensor([2, 9], dtype=torch.int32)}
    options["alibi_slopes"] = torch.tensor([0.5, 0.25])
    arguments: Any = (q, k, v, bounds, bounds, 11, 11, 0.0)
    expected = _flash_attn_varlen_forward(*arguments, None, False, **options)
    arguments = (*arguments, False, False)
    forward = _OPERATORS["_flash_attention_forward"]
    out, lse, *_ = forward(*arguments, **options)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported, got 2"):
        forward(*arguments, num_splits=2)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn import _sdpa
    from flash_attn._sdpa import _OPERATORS

    q = torch.randn(1, 5, 2, 8)
    used = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="must be None without cum_seq_q and cum_seq_k"):
        _OPERATORS["_flash_attention_forward"](
            q, q, q, None, None, 5, 5, 0.0, False, False, seqused_k=used
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(_sdpa, "available_backends", lambda device: ["tiled"])
    with pytest.raises(RuntimeError, match="no CUDA kernels for a GPU, and would be slower"):
        _sdpa.Activation()


def test_activation_ends() -> None:
    """Again and again, with PyTorch's kernels and its order of backends behind it."""

    def state() -> tuple[bool, list[int], str | None, str]:
        kernels = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")
        order = torch._C._get_sdp_priority_order()
        current = torch.nn.attention.current_flash_attention_impl()
        return "_sdpa.py" in kernels, order, current, torch.compiler.config.cache_key_tag

    if torch.cuda.is_available():  # the first call of a process sets the order
        F.scaled_dot_product_attention(*torch.zeros(3, 1, 1, 1, 8, device="cuda").bfloat16())
    name = adapters.register_with_pytorch()
    for _ in range(2):
        before = state()
        assert not before[0] and before[2] is None
        torch.nn.attention.activate_flash_attention_impl(name)
        is_here, order, current, tag = state()
        assert is_here and current == name
        assert order != before[1] and tag != before[3]
        assert order[0] == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
        torch.nn.attention.restore_flash_attention_impl()
        assert state() == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("headdim", [40, 64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_gpu(
    active: list[str],
    causal: bool,
    headdim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of head dims that PyTorch pads, too; and again, as a call that was seen."""
    tensors = inputs(4, 2, 150, headdim, "cuda", dtype)
    expected = exact(tensors, is_causal=causal, enable_gqa=True)
    for _ in range(2):
        options = {"is_causal": causal, "enable_gqa": True}
        assert_near(with_gradients(F.scaled_dot_product_attention, tensors, **options), expected)
        for checked in ("_dense_forward", "_dense_backward"):  # a call that was seen is launched
            monkeypatch.setattr(_ops, checked, None)
    assert active == CALLS * 2


LAYOUTS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "packed": lambda randn: randn(2, 90, 3, 4, 64).permute(2, 0, 3, 1, 4),
    "parts of longer sequences": lambda randn: randn(3, 2, 4, 100, 64)[:, :, :, 7:97],
    "as many heads as tokens": lambda randn: randn(3, 2, 8, 8, 64),
    "one head": lambda randn: randn(3, 2, 1, 90, 64),
    "one token": lambda randn: randn(3, 2, 4, 1, 64),
    "one key head for all": lambda randn: randn(3, 2, 1, 90, 64).expand(-1, -1, 4, -1, -1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_layouts(active: list[str], layout: str) -> None:
    """Three calls alike, which are remembered by how the tensors lie with heads before tokens."""
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v = LAYOUTS[layout](partial(torch.randn, device="cuda", dtype=torch.bfloat16))
        found = with_gradients(F.scaled_dot_product_attention, (q, k, v))
        assert_near(found, exact((q, k, v)))
    assert active == CALLS * 3


@pytest.mark.gpu
def test_gpu_with_a_mask(active: list[str]) -> None:
    """Flash attention takes none: as before."""
    tensors = inputs(2, 2, 70, 64, "cuda", torch.bfloat16)
    mask = torch.rand(70, 70, device="cuda") < 0.7
    found = with_gradients(F.scaled_dot_product_attention, tensors, attn_mask=mask)
    assert_near(found, exact(tensors, attn_mask=mask.cpu()))
    assert not active


@pytest.mark.gpu
def test_gpu_dropout(active: list[str]) -> None:
    """The output is linear in v: so dv is of the same mask. A seed gives the same again."""
    q, k, v = inputs(2, 2, 200, 64, "cuda", torch.bfloat16)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(with_gradients(F.scaled_dot_product_attention, (q, k, v), dropout_p=0.3))
    torch.testing.assert_close(found[0], found[1])
    out, *_, dv = (x.double() for x in found[0])
    given = (out * direction(out)).sum()
    torch.testing.assert_close((dv * v).sum(), given, rtol=2e-2, atol=0.5)
    assert (out - exact((q, k, v))[0].cuda()).abs().max() > 0.01
    assert active == CALLS * 2


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
def test_gpu_compiled(active: list[str], order: str) -> None:
    tensors = inputs(2, 2, 130, 64, "cuda", torch.bfloat16)
    if order == "tokens first":
        tensors = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1,
        fullgraph=True,
    )
    expected = exact((tensors[0] * 2, *tensors[1:]), is_causal=True)
    found = with_gradients(compiled, tensors)
    assert_near([found[0] - 1, found[1] / 2, *found[2:]], expected)
    assert active == CALLS


@pytest.mark.gpu
def test_gpu_compiled_into_graphs(active: list[str]) -> None:
    """Of a forward and a backward, that are warmed up, captured, and then replayed."""
    compiled = torch.compile(F.scaled_dot_product_attention, mode="reduce-overhead")
    for seed in range(5):
        torch.manual_seed(seed)
        tensors = torch.randn(3, 2, 4, 130, 64, device="cuda", dtype=torch.bfloat16).unbind()
        torch.compiler.cudagraph_mark_step_begin()
        assert_near(with_gradients(compiled, tensors), exact(tensors))
    assert active and active == CALLS * (len(active) // 2)


@pytest.mark.gpu
def test_gpu_compiled_code_on_disk(active: list[str]) -> None:
    """PyTorch's key of it does not tell the backend: code of others is not found, nor by others."""
    tensors = inputs(2, 2, 130, 64, "cuda", torch.bfloat16)

    def run() -> None:
        torch._dynamo.reset()
        with_gradients(torch.compile(lambda *x: F.scaled_dot_product_attention(*x) + 2), tensors)

    for _ in range(2):
        torch.nn.attention.restore_flash_attention_impl()
        run()
        assert not active
        torch.nn.attention.activate_flash_attention_impl(adapters.register_with_pytorch())
        run()
        assert active == CALLS
        active.clear()


@pytest.mark.gpu
def test_gpu_packed(active: list[str]) -> None:
    """torch.nn.attention.varlen, against each sequence alone."""
    from torch.nn.attention.varlen import varlen_attn

    lengths, heads, headdim = (70, 1, 130), 2, 64
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    total = sum(lengths)
    tensors = tuple(
        torch.randn(total, heads, headdim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    found = with_gradients(
        lambda q, k, v: varlen_attn(q, k, v, bounds, bounds, 130, 130, window_size=(-1, 0)), tensors
    )

    def apart(*tensors: Tensor) -> Tensor:
        rows = zip(*(x.split(lengths) for x in tensors), strict=True)
        each = [
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in row), is_causal=True)
            for row in rows
        ]
        return torch.cat([x.transpose(0, 1) for x in each])

    doubles = tuple(x.double().cpu() for x in tensors)
    assert_near(found, with_gradients(apart, doubles))
    assert active == ["varlen_forward", "varlen_backward"]


@pytest.mark.gpu
def test_benchmark(tmp_path: Path) -> None:
    from benchmarks import sdpa

    sdpa.main(["--headdim", "64", "--seqlen", "256", "--tokens", "512", "--folder", str(tmp_path)])
    host, *rows = json.loads((tmp_path / "sdpa.json").read_text())["rows"]
    assert len(rows) == 2 and set(host["host_forward_us"]) == {"default", "exact"}
    assert all(set(row["training_ms"]) == {"default", "exact"} for row in rows)
