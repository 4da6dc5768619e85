"""Layer and RMS normalisation of sums against the same in float64 and, for the bound, in a dtype.

A result may be twice as far from float64 as plain PyTorch in the same dtype, plus one unit in the
last place of its largest element. (In float64, plain PyTorch is as far from exact: 8 units.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from helpers import since_torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn import _rowwise
from flash_attn.ops import layer_norm, rms_norm
from flash_attn.ops.activations import bias_gelu_impl, swiglu
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
EPS = 1e-3
SHAPE = 3, 5, 24


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, rms: bool) -> Tensor:
    x = x if rms else x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def reference(tensors: dict[str, Tensor | None], masks: list, p: float, rms: bool) -> list[Tensor]:
    """Both outputs and the sum."""
    x, x1 = tensors["x"], tensors["x1"]
    for name, shape in (("rowscale", (*SHAPE[:-1], 1)), ("layerscale", (SHAPE[-1],))):
        if (scale := tensors.get(name)) is not None:
            x = x * scale.reshape(shape)
    total = x if masks[0] is None else x * masks[0] / (1 - p)
    if x1 is not None:
        total = total + (x1 if masks[1] is None else x1 * masks[1] / (1 - p))
    if tensors["residual"] is not None:
        total = total + tensors["residual"]
    results = [normalized(total, tensors["weight"], tensors["bias"], rms)]
    if tensors["weight1"] is not None:
        results.append(normalized(total, tensors["weight1"], tensors["bias1"], rms))
    return [*results, total]


def gradients(results: list[Tensor], douts: list[Tensor], tensors: dict) -> Iterator[Tensor]:
    inputs = [x for x in tensors.values() if x is not None and x.requires_grad]
    douts = [d.to(x.dtype) for d, x in zip(douts, results, strict=True)]
    yield from torch.autograd.grad(results, inputs, douts)


def tensors_of(device: str, **dtypes: torch.dtype | None) -> dict[str, Tensor | None]:
    channels = ("weight", "bias", "weight1", "bias1", "layerscale")
    shapes = dict.fromkeys(channels, SHAPE[-1:]) | {"rowscale": SHAPE[:-1]}
    return {
        name: None
        if (dtype := dtypes.get(name)) is None
        else torch.randn(shapes.get(name, SHAPE), device=device).to(dtype).requires_grad_()
        for name in ("x", "residual", "x1", *shapes)
    }


def check(results: list[Tensor], tensors: dict, masks: list, p: float, rms: bool) -> None:
    douts = [torch.randn_like(x) for x in results]
    ours = [*results, *gradients(results, douts, tensors)]
    both = []
    for dtype in (torch.float64, tensors["x"].dtype):
        copies = {
            k: None if x is None else x.detach().to(dtype).requires_grad_()
            for k, x in tensors.items()
        }
        outputs = reference(copies, masks, p, rms)
        both.append([*outputs, *gradients(outputs, douts, copies)])
    for x, exact, naive in zip(ours, *both, strict=True):
        assert x.shape == exact.shape
        ulp = torch.finfo(x.dtype).eps * exact.abs().max() * (8 if x.dtype == F64 else 1)
        error, allowed = (x.double() - exact).abs().max(), (naive.double() - exact).abs().max()
        assert error <= 2 * allowed + ulp


CASES: dict[str, dict[str, Any]] = {  # dtypes of x, weight, residual, x1, weight1
    "plain": {"x": F32, "weight": F32},
    "no weight": {"x": F32},
    "bf16": {"x": BF16, "weight": BF16},
    "bf16, weight float32": {"x": BF16, "weight": F32, "bias": F32},
    "residual": {"x": BF16, "weight": F32, "residual": BF16},
    "residual float32": {"x": BF16, "weight": BF16, "bias": BF16, "residual": F32},
    "parallel": {"x": F32, "weight": F32, "weight1": F32, "bias1": F32, "residual": F32},
    "two branches": {"x": BF16, "weight": F32, "x1": BF16, "weight1": F32, "residual": F32},
    "x1": {"x": F32, "weight": F32, "bias": F32, "x1": F32},
    "scales": {"x": BF16, "weight": F32, "rowscale": F32, "layerscale": F32, "residual": BF16},
    "float64": {"x": F64, "weight": F64, "bias": F64, "residual": F64},
}


@pytest.mark.parametrize(
    ("case", "rms", "p", "chunk", "device"),
    [
        *product(CASES, (False, True), (0.0, 0.3), (None, 4), ("cpu",)),
        *(  # Each is compiled, for seconds.
            pytest.param(*case, None, "cuda", marks=pytest.mark.gpu)
            for case in product(["bf16", "residual float32", "two branches"], (False, True), (0.3,))
        ),
    ],
)
def test_results_and_gradients(
    case: str, rms: bool, p: float, chunk: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk is not None:
        monkeypatch.setattr(_rowwise, "_chunk_size", lambda x: chunk)
    tensors = tensors_of(device, **CASES[case])
    options = {"is_rms_norm": rms, "eps": EPS, "dropout_p": p, "prenorm": True}
    *results, mask, mask1 = layer_norm_fn(**tensors, **options, return_dropout_mask=True)
    assert (mask is None) == (p == 0.0)
    assert (mask1 is None) == (p == 0.0 or tensors["x1"] is None)
    x, residual = tensors["x"], tensors["residual"]
    assert x is not None and len(results) == 2 + (tensors["weight1"] is not None)
    assert all(y.dtype == x.dtype for y in results[:-1])
    assert results[-1].dtype == (x.dtype if residual is None else residual.dtype)
    check(results, tensors, [mask, mask1], p, rms)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 1), (1, 2, 3), (3, 2)])
def test_shapes_of_rowscale(shape: tuple[int, ...]) -> None:
    x, scale = torch.randn(2, 3, 4), torch.rand(2, 3)
    if shape == (3, 2):
        with pytest.raises(ValueError, match="rowscale must have shape"):
            layer_norm_fn(x, None, None, rowscale=scale.view(shape))
        return
    expected = layer_norm_fn(x, None, None, rowscale=scale)
    assert torch.equal(layer_norm_fn(x, None, None, rowscale=scale.view(shape)), expected)
    flat = layer_norm_fn(x.view(6, 4), None, None, rowscale=scale)
    assert torch.equal(flat, expected.view(6, 4))


def test_rowscale_is_no_rounding() -> None:
    """Rows of 16 bits are scaled in float32: the output is that of float32, rounded once."""
    x, scale = torch.randn(SHAPE).bfloat16(), torch.randn(SHAPE[:-1])
    y, exact = (layer_norm_fn(t, None, None, rowscale=scale) for t in (x, x.float()))
    assert torch.equal(y, exact.bfloat16())


@pytest.mark.parametrize("used", ["output", "sum"])
def test_gradient_of_one_result(used: str) -> None:
    tensors = tensors_of("cpu", x=F32, weight=F32, residual=F32)
    y, total = rms_norm_fn(**drop(tensors, "layerscale"), eps=EPS, prenorm=True)
    result = [y, total][used == "sum"]
    expected = reference(tensors, [None, None], 0.0, True)[used == "sum"]
    dout = torch.randn_like(result)
    inputs = [tensors["x"], tensors["residual"]]
    for x in zip(*(torch.autograd.grad(r, inputs, dout) for r in (result, expected)), strict=True):
        torch.testing.assert_close(*x)


def drop(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: x for key, x in tensors.items() if key != name}


def test_dropout_keeps_its_share() -> None:
    x = torch.ones(200, 100)
    y, total, mask, _ = layer_norm_fn(
        x, None, None, dropout_p=0.25, prenorm=True, return_dropout_mask=True
    )
    assert mask.dtype == torch.bool and abs(mask.float().mean() - 0.75) < 0.02
    assert torch.equal(total, mask / 0.75)
    other = layer_norm_fn(x, None, None, dropout_p=0.25, return_dropout_mask=True)[1]
    assert not torch.equal(mask, other)
    torch.manual_seed(1)
    one = layer_norm_fn(x, None, None, dropout_p=0.25)
    torch.manual_seed(1)
    assert torch.equal(one, layer_norm_fn(x, None, None, dropout_p=0.25))


def test_order_of_results() -> None:
    """One tensor alone is no tuple."""
    x, w, w1 = torch.randn(2, 4), torch.randn(4), torch.randn(4)
    assert isinstance(layer_norm_fn(x, w, None), Tensor)
    y, y1 = layer_norm_fn(x, w, None, weight1=w1)
    torch.testing.assert_close(y / w, y1 / w1)
    y, mask, mask1 = layer_norm_fn(x, w, None, return_dropout_mask=True)
    assert mask is None and mask1 is None
    assert len(layer_norm_fn(x, w, None, prenorm=True, weight1=w1, return_dropout_mask=True)) == 5


def test_sum_without_terms_is_the_input() -> None:
    x = torch.randn(2, 4, dtype=BF16)
    _, total = rms_norm_fn(x, None, None, prenorm=True)
    assert total.data_ptr() == x.data_ptr()
    _, total = rms_norm_fn(x, None, None, prenorm=True, residual_in_fp32=True)
    assert total.dtype == F32 and torch.equal(total, x.float())
    residual = torch.randn(2, 4, dtype=BF16)  # whose dtype counts
    _, total = rms_norm_fn(x, None, None, residual, prenorm=True, residual_in_fp32=True)
    assert total.dtype == BF16


def test_zero_centered_weight() -> None:
    x, w = torch.randn(3, 6), torch.randn(6, requires_grad=True)
    bias = torch.randn(6)
    y = layer_norm_fn(x, w, bias, zero_centered_weight=True)
    expected = layer_norm_fn(x, 1 + w, bias)
    torch.testing.assert_close(y, expected)
    x.requires_grad_()
    for function in (rms_norm_fn, layer_norm_fn):
        y, expected = function(x, w, None, zero_centered_weight=True), function(x, 1 + w, None)
        both = (torch.autograd.grad(r.square().sum(), [x, w]) for r in (y, expected))
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)


def test_given_memory_and_dtype() -> None:
    x = torch.randn(2, 3, 4, dtype=BF16, requires_grad=True)
    residual = torch.randn(2, 3, 4)
    y = rms_norm_fn(x, None, None, residual, out_dtype=F32)
    assert y.dtype == F32
    out, residual_out = torch.empty(2, 3, 4), torch.empty(2, 3, 4)
    y1, total = rms_norm_fn(
        x, None, None, residual, prenorm=True, out=out, residual_out=residual_out
    )
    assert torch.equal(y1, y) and torch.equal(out, y)
    assert y1.data_ptr() == out.data_ptr() and total.data_ptr() == residual_out.data_ptr()
    assert torch.equal(total, x + residual) and not out.requires_grad
    dx = torch.autograd.grad([y1, total], x, [torch.ones_like(y)] * 2)[0]
    expected = torch.autograd.grad(y, x, torch.ones_like(y))[0] + 1
    torch.testing.assert_close(dx, expected)

    # The sum may take the residual's place; an output without terms need not.
    before = residual.clone()
    rms_norm_fn(x.detach(), None, None, residual, residual_out=residual)
    assert torch.equal(residual, x + before)
    rms_norm_fn(x, None, None, residual_out=residual)
    assert torch.equal(residual, x.float())


def test_output_in_the_place_of_the_input() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, requires_grad=True)
    results = []
    for out in (None, x):
        y = rms_norm_fn(x.requires_grad_(), w, None, out=out)
        results.append([y.clone(), *torch.autograd.grad(y.square().sum(), [x, w])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(x, results[0][0])


@pytest.mark.parametrize("case", ["residual", "residual float32", "bf16", "scales"])
def test_what_is_kept_for_the_backward(case: str) -> None:
    """The sum, once, in its dtype; of x and of the residual nothing, or x itself for a scale."""
    tensors = tensors_of("cpu", **CASES[case])
    if tensors["rowscale"] is not None:
        tensors["rowscale"].requires_grad_(False)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        _, total = layer_norm_fn(**tensors, prenorm=True)
    large = {x.data_ptr() for x in kept if x.numel() >= total.numel()}
    x = tensors["x"]
    assert x is not None
    assert large == {total.data_ptr()} | ({x.data_ptr()} if case == "scales" else set())


def test_module() -> None:
    module = RMSNorm(24, eps=EPS, dropout_p=0.5, dtype=BF16)
    assert list(module.state_dict()) == ["weight"] and module.weight.dtype == BF16
    x, residual = torch.randn(2, 24, dtype=BF16), torch.randn(2, 24)
    y, total = module.eval()(x, residual, prenorm=True)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm_fn(x, module.weight, None, residual, eps=EPS))
    _, total = module.train()(x, prenorm=True)
    assert ((total == 0) | (total == 2 * x)).all() and (total == 0).any()
    module = RMSNorm(24, zero_centered_weight=True)
    assert (module.weight == 0).all()
    torch.testing.assert_close(
        module(x.float()), nn.functional.rms_norm(x.float(), (24,), eps=1e-5)
    )


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_doors(rms: bool) -> None:
    """`ops.layer_norm` and `ops.rms_norm`."""
    names = ["rms_norm", "RMSNorm"] if rms else ["layer_norm", "LayerNorm"]
    doors = rms_norm if rms else layer_norm
    function = getattr(doors, f"dropout_add_{names[0]}")
    x, residual = torch.randn(3, 24, dtype=BF16), torch.randn(3, 24)
    w, b = torch.randn(24), torch.randn(24)
    fn = rms_norm_fn if rms else layer_norm_fn
    arguments = (x, w) if rms else (x, w, b)
    expected = fn(x, w, None if rms else b, eps=EPS)
    assert torch.equal(getattr(doors, names[0])(*arguments, EPS), expected)

    y, total, mask = function(x, residual, w, b, 0.0, EPS, prenorm=True, return_dropout_mask=True)
    expected = fn(x, w, b, residual, eps=EPS, prenorm=True)
    assert torch.equal(y, expected[0]) and torch.equal(total, expected[1])
    assert mask.dtype == torch.uint8 and (mask == 1).all() and mask.shape == x.shape
    assert torch.equal(function(x, residual, w, b, 0.0, EPS), y)
    assert function(x, None, w, b, 0.0, EPS, prenorm=True)[1].dtype == BF16
    torch.manual_seed(2)
    y, mask = function(x, None, w, b, 0.5, EPS, return_dropout_mask=True)
    assert torch.equal(y, fn(2 * x * mask, w, b, eps=EPS)) and (mask == 0).any()

    module = getattr(doors, f"DropoutAdd{names[1]}")(24, prenorm=True, p=0.5, eps=EPS)
    assert list(module.state_dict()) == (["weight"] if rms else ["weight", "bias"])
    nn.init.normal_(module.weight)
    bias = module.bias if rms else nn.init.normal_(module.bias)
    y, total = module.eval()(x, residual)
    expected = fn(x, module.weight, bias, residual, eps=EPS, prenorm=True)
    assert torch.equal(y, expected[0]) and torch.equal(total, expected[1])
    wide = type(module)(24, prenorm=True, residual_in_fp32=True)
    assert wide(x)[1].dtype == torch.float32
    _, total = module.train()(x)
    assert ((total == 0) | (total == 2 * x)).all() and (total == 0).any()
    module.reset_parameters()
    assert (module.weight == 1).all()


def test_rms_norm_module() -> None:
    module = rms_norm.RMSNorm(24, EPS, None, BF16)
    assert module.weight.dtype == BF16
    x = torch.randn(2, 24, dtype=BF16)
    assert torch.equal(module(x), rms_norm.rms_norm(x, module.weight, EPS))


def test_no_rows_and_one_dimension() -> None:
    x = torch.randn(0, 3, 8, requires_grad=True)
    w = torch.ones(8, requires_grad=True)
    y, total = rms_norm_fn(x, w, None, prenorm=True)
    y.sum().backward()
    assert y.shape == total.shape == x.shape and w.grad is not None and (w.grad == 0).all()
    row = torch.randn(8)
    torch.testing.assert_close(rms_norm_fn(row, w, None), rms_norm_fn(row[None], w, None)[0])


def test_strided() -> None:
    x = torch.randn(4, 6, 16)
    w, b = torch.randn(8), torch.randn(8)
    for view in (x[..., ::2], x.transpose(0, 1)[..., :8]):
        expected = nn.functional.layer_norm(view, (8,), w, b, 1e-6)
        torch.testing.assert_close(layer_norm_fn(view, w, b), expected)


@since_torch(2, 5, "the compiler takes such functions")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_compile(device: str) -> None:
    torch._dynamo.reset()
    tensors = tensors_of(device, x=BF16, weight=BF16, residual=F32)
    arguments = [tensors[name] for name in ("x", "weight", "bias", "residual")]

    def function(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm_fn(*arguments, eps=EPS, prenorm=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results, expected = compiled(*arguments), function(*arguments)
    douts = [torch.randn_like(x) for x in expected]
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y)
    both = (gradients(r, douts, tensors) for r in (results, expected))
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y)


@since_torch(2, 5, "the compiler takes such functions")
@pytest.mark.parametrize("names", [["out"], ["residual_out"], ["out", "residual_out"]], ids=str)
def test_compiled_into_given_memory(names: list[str]) -> None:
    """A compiled graph would lose the gradient of what lies in the memory of an argument."""
    tensors = tensors_of("cpu", x=F32, weight=F32, residual=F32)
    arguments = [tensors[name] for name in ("x", "weight", "bias", "residual")]
    memory = {name: torch.empty_like(tensors["x"]) for name in names}

    def function(*arguments: Tensor, **memory: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm_fn(*arguments, eps=EPS, prenorm=True, **memory)

    results = torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments, **memory)
    expected = function(*arguments)
    written = {"out": results[0], "residual_out": results[1]}
    for name, x in memory.items():
        torch.testing.assert_close(x, written[name])
    douts = [torch.randn_like(x) for x in expected]
    both = (gradients(r, douts, tensors) for r in (results, expected))
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y)


def test_gradients_of_leaves_are_two_tensors() -> None:
    """Without dropout they are equal; what is added to one must not be added to the other."""
    x, residual = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    weight = torch.ones(4)
    for _ in range(2):
        layer_norm_fn(x, weight, None, residual).square().sum().backward()
    alone = torch.autograd.grad(layer_norm_fn(x, weight, None, residual).square().sum(), x)[0]
    for leaf in (x, residual):
        torch.testing.assert_close(leaf.grad, 2 * alone)


@pytest.mark.parametrize("name", ["x", "weight", "residual", "rowscale", "layerscale"])
def test_lists_are_refused(name: str) -> None:
    given: dict[str, Any] = {"x": torch.ones(2, 4), "weight": None, "bias": None, name: [1.0]}
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
        layer_norm_fn(**given)


def test_whole_numbers_are_refused() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(TypeError, match=r"x must be .*got torch\.int64"):
        layer_norm_fn(x.long(), None, None)
    with pytest.raises(TypeError, match=r"out_dtype must be .*got torch\.int32"):
        layer_norm_fn(x, None, None, out_dtype=torch.int32)
    with pytest.raises(TypeError, match="out_dtype must be a torch.dtype, got str"):
        layer_norm_fn(x, None, None, out_dtype="float16")
    with pytest.raises(TypeError, match="x must be a torch.Tensor, got NoneType"):
        layer_norm_fn(None, None, None)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: rms_norm_fn(x, None, None),
        lambda x: cross_entropy_loss(x, torch.zeros(3).long())[0],
        lambda x: swiglu(x, x),
        lambda x: bias_gelu_impl(x, x[0]),
    ],
)
def test_transforms_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 4)
    for transformed in (torch.func.vmap(function), torch.func.grad(lambda x: function(x[0]).sum())):
        with pytest.raises(NotImplementedError, match="no torch.func transforms"):
            transformed(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": torch.ones(5)}, r"weight must have shape \(4,\).*got \(5,\)"),
        ({"residual": torch.ones(4)}, r"residual must have shape \(2, 4\).*got \(4,\)"),
        ({"x1": torch.ones(1, 4)}, "x1 must have shape"),
        ({"layerscale": torch.ones(1)}, r"layerscale must have shape \(4,\).*got \(1,\)"),
        ({"bias": torch.ones(4, device="meta")}, "bias must .*on cpu.*on meta"),
        ({"rowscale": torch.ones(3)}, r"rowscale must have shape \(2,\)"),
        ({"bias1": torch.ones(4)}, "weight1 must be given with bias1"),
        ({"out": torch.ones(4, 2).t()}, "out must be contiguous"),
        ({"eps": float("nan")}, "eps must be at least 0 and finite, got nan"),
        ({"eps": -1e-6}, "eps must be at least 0 and finite, got -1e-06"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_norm_fn(**{"x": torch.ones(2, 4), "weight": None, "bias": None, **arguments})


def test_derivatives_of_higher_order_are_refused() -> None:
    """Also where nothing but what the forward has saved is followed."""
    x = torch.randn(2, 4, requires_grad=True)
    y = rms_norm_fn(x, None, None)
    for result in (y.square().sum(), (y * torch.randn(2, 4)).sum()):
        (dx,) = torch.autograd.grad(result, x, create_graph=True, retain_graph=True)
        assert dx.requires_grad
        with pytest.raises(NotImplementedError, match="differentiable once"):
            dx.sum().backward()
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert not dx.requires_grad
    with pytest.raises(NotImplementedError, match="gradients have no batches"):
        torch.autograd.grad(y, x, torch.randn(3, 2, 4), is_grads_batched=True)


def test_graph_of_gradients_within_a_checkpoint():
    """Which gives what was saved once."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = checkpoint(rms_norm_fn, x, weight, None, use_reentrant=False)
    found = torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
    expected = torch.autograd.grad(rms_norm_fn(x, weight, None).sum(), (x, weight))
    torch.testing.assert_close(found, expected)
