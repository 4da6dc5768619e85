"""Activation functions and their gradients against float64 and autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import since_torch
from torch import Tensor

from flash_attn.ops import activations
from flash_attn.ops.rms_norm import RMSNorm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Of the result's magnitude: PyTorch's own GELU is a few float32 roundings away from float64, a
# result in 16 bits a few of those.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float64: 1e-12}
DTYPES = list(TOLERANCE)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + (0.7978845608028654 * (x + 0.044715 * x**3)).tanh())


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return x / (1 + (-x).exp()) * y


FORWARD: dict[str, tuple[Callable[..., Tensor], int]] = {  # by arguments
    "fast_gelu_impl": (gelu, 1),
    "gelu_fwd": (gelu, 1),
    "sqrelu_fwd": (lambda x: x.clamp(min=0) ** 2, 1),
    "swiglu": (swiglu, 2),
    "swiglu_fwd": (swiglu, 2),
}
BACKWARD = {"gelu_bwd": gelu, "relu_bwd": F.relu, "sqrelu_bwd": FORWARD["sqrelu_fwd"][0]}


def randn(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def exact(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def assert_near(x: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype] * expected.detach().abs().max()
    assert x.dtype == dtype and x.shape == expected.shape
    assert (x.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORWARD)
def test_forward_and_autograd(name: str, dtype: torch.dtype, device: str) -> None:
    function, count = FORWARD[name]
    inputs = [randn(3, 5, 17, dtype=dtype, device=device) for _ in range(count)]
    inputs64 = [exact(x) for x in inputs]
    out, expected = getattr(activations, name)(*inputs), function(*inputs64)
    assert_near(out, expected, dtype)
    if name == "swiglu_fwd":  # the bare kernel, as upstream's
        return
    dout = torch.randn_like(expected).to(dtype)
    out.backward(dout)
    expected.backward(dout.double())
    for x, x64 in zip(inputs, inputs64, strict=True):
        assert x.grad is not None and x64.grad is not None
        assert_near(x.grad, x64.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str, dtype: torch.dtype) -> None:
    x, g = randn(4, 33, dtype=dtype), randn(4, 33, dtype=dtype).detach()
    x64 = exact(x)
    BACKWARD[name](x64).backward(g.double())
    assert x64.grad is not None
    for given in (g, g.double()):
        assert_near(getattr(activations, name)(given, x.detach()), x64.grad, dtype)


def test_relu_backward_at_zero() -> None:
    x = torch.tensor([-1.0, 0.0, 1.0])
    assert activations.relu_bwd(torch.full((3,), 2.0), x).tolist() == [0, 2, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_backward(dtype: torch.dtype) -> None:
    x, y = randn(6, 9, dtype=dtype), randn(6, 9, dtype=dtype)
    g = randn(6, 9, dtype=dtype).detach()
    x64, y64 = exact(x), exact(y)
    swiglu(x64, y64).backward(g.double())
    dx, dy = activations.swiglu_bwd(x.detach(), y.detach(), g)
    assert x64.grad is not None and y64.grad is not None
    assert_near(dx, x64.grad, dtype)
    assert_near(dy, y64.grad, dtype)


def test_swiglu_of_a_packed_projection() -> None:
    """Strided halves are read in place, and kept alone."""
    packed = torch.randn(2, 3, 20, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = activations.swiglu(*packed.chunk(2, dim=-1))
    torch.testing.assert_close(out, F.silu(packed[..., :10]) * packed[..., 10:])
    assert len(kept) == 2
    assert all(x.untyped_storage().data_ptr() == packed.data_ptr() for x in kept)


@pytest.mark.parametrize(
    ("dtype", "bias_dtype"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)]
)
def test_bias_gelu(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    y, bias = randn(8, 12, dtype=dtype), randn(12, dtype=bias_dtype)
    y64, bias64 = exact(y), exact(bias)
    out, expected = activations.bias_gelu_impl(y, bias), gelu(y64 + bias64)
    assert_near(out, expected, dtype)
    g = torch.randn(8, 12).to(dtype)
    out.backward(g)
    expected.backward(g.double())
    dy, dbias = activations.bias_gelu_back(g, y.detach(), bias.detach())
    for gradients, x64 in (((y.grad, dy), y64.grad), ((bias.grad, dbias), bias64.grad)):
        for gradient in gradients:
            assert gradient is not None and x64 is not None
            assert gradient.dtype == (dtype if x64.ndim == 2 else bias.dtype)
            assert_near(gradient.to(dtype), x64, dtype)


def test_bias_gelu_is_rounded_once() -> None:
    """The sum of 256 and -255.3 has no bits of 16 left if the bias is rounded first."""
    y = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    bias = torch.tensor([-255.3], requires_grad=True)
    x = torch.tensor([256.0 - 255.3], dtype=torch.float64, requires_grad=True)
    out, expected = activations.bias_gelu_impl(y, bias), gelu(x)
    assert abs(out.item() - expected.item()) < 2**-8
    out.backward(torch.ones_like(out))
    expected.backward()
    torch.testing.assert_close(bias.grad, x.grad, rtol=1e-3, atol=0.0, check_dtype=False)


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (3, 0)], ids=str)
def test_swiglu_of_any_shape(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(shape, requires_grad=True), torch.randn(shape)
    out = activations.swiglu(x, y)
    torch.testing.assert_close(out, F.silu(x) * y)
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == shape


def test_swiglu_of_unequal_shapes() -> None:
    with pytest.raises(ValueError, match=r"y must have shape \(2, 3\).*got \(2, 4\)"):
        activations.swiglu(torch.zeros(2, 3), torch.zeros(2, 4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["swiglu", "bias_gelu_impl"])
def test_torch_compile(name: str, device: str) -> None:
    """Also its gradients: the compiler of torch 2.11 had zeros for some."""
    torch._dynamo.reset()
    function = getattr(activations, name)
    x, y = (torch.randn(n, 6, device=device, requires_grad=True) for n in (4, 4))
    y = y if name == "swiglu" else y[0]
    results = []
    for variant in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        out = variant(x, y)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, y))])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["swiglu", "bias_gelu_impl"])
def test_second_derivatives_are_refused(name: str) -> None:
    """Where nothing but the inputs is followed, too."""
    x = torch.randn(3, 8, requires_grad=True)
    y = x if name == "swiglu" else x[0].detach()
    out = getattr(activations, name)(x, y)
    (dx,) = torch.autograd.grad((out * torch.randn(3, 8)).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        dx.square().sum().backward()


@since_torch(2, 6, "export keeps what it is not told")
def test_export_of_any_shape() -> None:
    from torch.export import Dim, export

    module = RMSNorm(8)
    x = torch.randn(2, 7, 8)
    shapes = ({0: Dim("batch"), 1: Dim("seqlen")},)
    exported = export(module, (x,), dynamic_shapes=shapes, strict=False).module()
    longer = torch.randn(3, 11, 8)
    torch.testing.assert_close(exported(longer), module(longer))
