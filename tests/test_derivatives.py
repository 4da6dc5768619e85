"""Derivatives of every order and mode: the right value or an error, on every backend.

Reverse mode once is what the kernels have. The tiled backend, whose operations are PyTorch's, has
all others too; where kernels run they raise NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from conftest import BACKENDS, backend_params, running_on
from helpers import default_dtype, int32, randn, since_torch
from torch import Tensor, func
from torch.autograd import functional
from torch.utils.flop_counter import FlopCounterMode

from flash_attn import (
    _arguments,
    _backends,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn._backends import tiled

Attend = Callable[[Tensor], Tensor]
SHAPE = (2, 5, 2, 16)
NO_OPTIONS = (0.0, None, False, -1, -1, 0.0, False)


@pytest.fixture(params=backend_params(*BACKENDS, "cpu-as-kernels"))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of BACKENDS, or a CPU whose tiled forward and backward are called as kernels are.

    Like kernels they take tensors by address, and neither autograd nor torch.func sees inside.
    """
    if request.param != "cpu-as-kernels":
        with running_on(request.param) as name:
            yield name
        return

    def forward(problem: Any, *rest: Any) -> Any:
        for x in (problem.q, problem.k, problem.v):
            x.data_ptr()  # raises for what has no memory of its own
        return tiled.forward(problem, *rest[:3])

    def backward(problem: Any, dout: Tensor, *rest: Any) -> Tensor:
        problem.q.data_ptr(), dout.data_ptr()
        return tiled.backward(problem, dout, *rest[:7])

    monkeypatch.setattr(_backends, "choose", lambda problem, operation="forward": "sm80")
    monkeypatch.setattr(_backends, "forward", forward)
    monkeypatch.setattr(_backends, "backward", backward)
    yield "cpu"


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def dual(attend: Attend, x: Tensor, t: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(attend(forward_ad.make_dual(x, t))).tangent


def gradient_penalty(attend: Attend, x: Tensor, with_output: bool) -> Tensor:
    """The gradient of the norm of a gradient, whose grad_output needs no gradient itself."""
    x = x.clone().requires_grad_()
    out = attend(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = grad.square().sum() + (out.square().sum() if with_output else 0)
    return torch.autograd.grad(loss, x)[0]


def square(attend: Attend) -> Attend:
    return lambda x: attend(x).square().sum()


# What is taken of a function of x, with a tangent t. First what reverse mode and vmap do.
REVERSE: dict[str, Callable[[Attend, Tensor, Tensor], Tensor | None]] = {
    "func.grad": lambda f, x, t: func.grad(square(f))(x),
    "func.vjp": lambda f, x, t: func.vjp(f, x)[1](t)[0],
    "func.jacrev": lambda f, x, t: func.jacrev(f)(x),
    "functional.vjp": lambda f, x, t: functional.vjp(f, x, t)[1],
    "func.vmap": lambda f, x, t: func.vmap(f)(torch.stack((x, t))),
    "func.vmap of grad": lambda f, x, t: func.vmap(func.grad(square(f)))(torch.stack((x, t))),
    "func.grad of vmap": lambda f, x, t: func.grad(
        lambda y: func.vmap(f, in_dims=1, out_dims=2)(y).square().sum()
    )(torch.stack((x, t), dim=1)),
}
OTHERS: dict[str, Callable[[Attend, Tensor, Tensor], Tensor | None]] = {
    "func.jvp": lambda f, x, t: func.jvp(f, (x,), (t,))[1],
    "func.jacfwd": lambda f, x, t: func.jacfwd(f)(x),
    "func.linearize": lambda f, x, t: func.linearize(f, x)[1](t),
    "func.hessian": lambda f, x, t: func.hessian(square(f))(x),
    "func.grad of grad": lambda f, x, t: func.grad(lambda y: func.grad(square(f))(y).sum())(x),
    "func.vmap of jvp": lambda f, x, t: func.vmap(lambda y: func.jvp(f, (y,), (x,))[1])(
        torch.stack((x, t))
    ),
    "functional.jvp": lambda f, x, t: functional.jvp(f, x, t)[1],
    "functional.jvp, strict": lambda f, x, t: functional.jvp(f, x, t, strict=True)[1],
    "functional.hvp": lambda f, x, t: functional.hvp(square(f), x, t)[1],
    "functional.vhp": lambda f, x, t: functional.vhp(square(f), x, t)[1],
    "functional.hessian": lambda f, x, t: functional.hessian(square(f), x),
    "make_dual": dual,
    "gradient penalty": lambda f, x, t: gradient_penalty(f, x, False),
    "gradient penalty and output": lambda f, x, t: gradient_penalty(f, x, True),
}
DERIVATIVES = REVERSE | OTHERS


def most_exact_dtype() -> torch.dtype:
    """Of the backend under test."""
    return torch.float64 if default_dtype() == torch.float32 else default_dtype()


def kernels_run(x: Tensor) -> bool:
    """Whether kernels, forced or chosen, take tensors of this dtype where x lies."""
    q = x.unflatten(0, (-1, 5)) if x.dim() == 3 else x
    return _backends.choose(_arguments.dense(q, q, q, _arguments.options(*NO_OPTIONS))) != "tiled"


def problem(device: str, argument: str) -> tuple[Attend, Attend, Tensor, Tensor]:
    """The library and the exact function of one of q, k, v (or all), a point and a tangent."""
    dtype = most_exact_dtype()
    others = {name: randn(*SHAPE, dtype=dtype, device=device) for name in "qkv"}
    x, t = (randn(*SHAPE, dtype=dtype, device=device) for _ in range(2))

    def of(attend: Callable[..., Tensor], convert: Callable[[Tensor], Tensor]) -> Attend:
        def function(y: Tensor) -> Tensor:
            if argument == "qkv":
                return attend(y, y, y)
            given = {name: convert(z) for name, z in others.items()} | {argument: y}
            return attend(**given)

        return function

    return of(flash_attn_func, lambda z: z), of(naive, lambda z: z.double()), x, t


def assert_right(result: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    assert result is not None, "no derivative, and no error"
    tolerance = 1e-9 if dtype == torch.float64 else 0.05
    most = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance * most)


@pytest.mark.parametrize("argument", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative(device, name, argument):
    if (name, argument) == ("gradient penalty", "v"):
        pytest.skip("the gradient of v does not depend on v")
    attend, exact, x, t = problem(device, argument)
    if kernels_run(x) and name in OTHERS:
        with pytest.raises(NotImplementedError, match="kernels.*; use_backend.'tiled'. has"):
            DERIVATIVES[name](attend, x, t)
    else:
        expected = DERIVATIVES[name](exact, x.double(), t.double())
        assert_right(DERIVATIVES[name](attend, x, t), expected, x.dtype)


@since_torch(2, 5, "the compiler knows derivatives of every mode")
@pytest.mark.parametrize("whole", [False, True], ids=["of-compiled", "compiled"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative_and_compiler(device, name, whole):
    """The derivative of a compiled function, and a compiled function that takes the derivative."""
    attend, exact, x, t = problem(device, "q")
    expected = DERIVATIVES[name](exact, x.double(), t.double())

    def compiled(function: Attend, x: Tensor, t: Tensor) -> Tensor | None:
        torch._dynamo.reset()
        if whole:
            taken = DERIVATIVES[name]
            return torch.compile(lambda y: taken(function, y, t), backend="aot_eager")(x)
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
        return DERIVATIVES[name](function, x, t)

    try:
        result = compiled(attend, x, t)
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException):
        return
    try:
        assert_right(result, expected, x.dtype)
    except AssertionError:  # the compiler may be wrong about PyTorch's own operations, too
        with pytest.raises((AssertionError, RuntimeError)):
            assert_right(compiled(exact, x.double(), t.double()), expected, torch.float64)


@since_torch(2, 11, "the compiler passes the error on")
def test_compiled_transforms_are_refused():
    torch._dynamo.reset()
    x = randn(*SHAPE)
    compiled = torch.compile(lambda x: func.vmap(flash_attn_func)(x, x, x), backend="eager")
    with pytest.raises(RuntimeError, match="no torch.func transforms in torch.compile"):
        compiled(x[None])


DROPOUTS = {"error": 0.5, "different": 0.5, "same": 0.5, "error without dropout": 0.0}


@pytest.mark.parametrize("randomness", DROPOUTS)
def test_vmap_respects_randomness(device, randomness):
    dtype = default_dtype()
    x = randn(1, *SHAPE, dtype=dtype, device=device).expand(2, *SHAPE)
    mapped = func.vmap(
        lambda y: flash_attn_func(y, y, y, dropout_p=DROPOUTS[randomness]),
        randomness=randomness.split()[0],
    )
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            mapped(x)
    else:
        first, second = mapped(x)
        assert torch.equal(first, second) == (randomness != "different")


@pytest.mark.parametrize("in_dims", [(0, None, None), (1, 0, None), (None, 2, 0), (0, 1, 2)])
def test_vmap_over_some(device, in_dims):
    """Whichever of q, k and v have the mapped dimension, and where."""
    inputs = [
        randn(*SHAPE, dtype=default_dtype(), device=device)
        if dim is None
        else randn(*SHAPE[:dim], 3, *SHAPE[dim:], dtype=default_dtype(), device=device)
        for dim in in_dims
    ]
    outs, lses = func.vmap(
        lambda q, k, v: flash_attn_func(q, k, v, return_attn_probs=True)[:2], in_dims=in_dims
    )(*inputs)
    for b in range(3):
        given = (x if d is None else x.select(d, b) for x, d in zip(inputs, in_dims, strict=True))
        out, lse, _ = flash_attn_func(*given, return_attn_probs=True)
        torch.testing.assert_close((outs[b], lses[b]), (out, lse))


def test_varlen_has_the_same(device):
    """Packed sequences go the same way: one of each kind."""
    dtype = most_exact_dtype()
    x, t = (randn(10, 2, 16, dtype=dtype, device=device) for _ in range(2))
    bounds = int32([0, 5, 10], device)

    def attend(y: Tensor) -> Tensor:
        return flash_attn_varlen_func(y, y, y, bounds, bounds, 5, 5)

    def exact(y: Tensor) -> Tensor:
        y = y.unflatten(0, (2, 5))
        return naive(y, y, y).flatten(0, 1)

    for name in ("func.grad", "func.vmap", "func.jvp", "make_dual", "gradient penalty"):
        if kernels_run(x) and name in OTHERS:
            with pytest.raises(NotImplementedError, match="kernels"):
                DERIVATIVES[name](attend, x, t)
        else:
            expected = DERIVATIVES[name](exact, x.double(), t.double())
            assert_right(DERIVATIVES[name](attend, x, t), expected, dtype)


def test_gradient_of_log_sum_exp_and_sinks_twice(device):
    """All that is returned and all that is learned takes part in a second derivative."""
    dtype = most_exact_dtype()
    leaves = [randn(*SHAPE, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
    leaves.append(torch.randn(2, dtype=dtype, device=device, requires_grad=True))

    def function(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        out, lse, _ = flash_attn_func(q, k, v, s_aux=s_aux, causal=True, return_attn_probs=True)
        return out.square().sum() + lse.sin().sum()

    if not kernels_run(leaves[0].detach()):
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    else:
        grads = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
        for grad in grads:
            with pytest.raises(NotImplementedError, match="kernels"):
                torch.autograd.grad(grad.square().sum(), leaves, retain_graph=True)


def test_recorded_gradients_with_autocast(device):
    """create_graph=True does not round them."""
    q, k, v = (randn(*SHAPE, dtype=default_dtype(), device=device) for _ in range(3))
    out = flash_attn_func(q.requires_grad_(), k, v + 20)
    dout = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, q, dout, retain_graph=True)
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(out, q, dout, create_graph=True)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-3, atol=1e-4)  # not 1e-1


def test_batch_of_gradients(device):
    """is_grads_batched, and jacobian(vectorize=True) which uses it."""
    dtype = most_exact_dtype()
    q, k, v = (randn(*SHAPE, dtype=dtype, device=device) for _ in range(3))
    k, v = k[:, :, :1], v[:, :, :1]
    out = flash_attn_func(q.requires_grad_(), k, v, causal=True)
    douts = torch.randn(3, *out.shape, dtype=dtype, device=device)

    def batched() -> Tensor:
        return torch.autograd.grad(out, q, douts, retain_graph=True, is_grads_batched=True)[0]

    if kernels_run(q.detach()):
        with pytest.raises(NotImplementedError, match="gradients have no batches"):
            batched()
    else:
        each = [torch.autograd.grad(out, q, x, retain_graph=True)[0] for x in douts]
        torch.testing.assert_close(batched(), torch.stack(each))
        assert not batched().requires_grad


def test_graph_of_a_batch_of_gradients(device):
    """Also where a mode watches."""
    dtype = most_exact_dtype()
    q, k, v = (randn(*SHAPE, dtype=dtype, device=device) for _ in range(3))
    q.requires_grad_()
    douts = torch.randn(3, *SHAPE, dtype=dtype, device=device)

    def penalty(batched: bool) -> Tensor:
        out = flash_attn_func(q, k, v)
        if batched:
            (dq,) = torch.autograd.grad(out, q, douts, is_grads_batched=True, create_graph=True)
        else:
            given = {"create_graph": True, "retain_graph": True}
            dq = torch.stack([torch.autograd.grad(out, q, x, **given)[0] for x in douts])
        return torch.autograd.grad(dq.square().sum() + q.square().sum(), q)[0]

    if kernels_run(q.detach()):
        with pytest.raises(NotImplementedError, match="gradients have no batches"):
            penalty(True)
        return
    expected = penalty(False)
    torch.testing.assert_close(penalty(True), expected)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(penalty(True), expected)


def test_transformed_cache(device):
    """It is no leaf, and the message is of what was asked for."""
    q, k, v = (randn(*SHAPE, dtype=default_dtype(), device=device) for _ in range(3))

    def appended(cache: Tensor) -> Tensor:
        new = {"k": k[:, :1], "v": v[:, :1], "cache_seqlens": 1}
        return flash_attn_with_kvcache(q[:, :1], cache, v, **new).sum()

    with pytest.raises(NotImplementedError, match="has no derivative"):
        func.grad(appended)(k)


def test_cache_that_is_a_leaf(device):
    """PyTorch's rule: what is changed in place is no leaf with a gradient."""
    dtype = default_dtype()
    q, k, v = (randn(*SHAPE, dtype=dtype, device=device) for _ in range(3))
    for name in ("k_cache", "v_cache"):
        cache = {"k_cache": k.clone(), "v_cache": v.clone()}
        cache[name].requires_grad_()
        new = {"k": k[:, :1], "v": v[:, :1], "cache_seqlens": 1}
        with pytest.raises(ValueError, match=f"{name} is written to and must not require"):
            flash_attn_with_kvcache(q[:, :1], **cache, **new)
        assert torch.equal(cache["k_cache"], k) and torch.equal(cache["v_cache"], v)
        flash_attn_with_kvcache(q[:, :1], **cache)
        with torch.no_grad():
            flash_attn_with_kvcache(q[:, :1], **cache, **new)


def test_cache_says_that_it_has_no_derivative(device):
    dtype = default_dtype()
    q, k, v = (randn(*SHAPE, dtype=dtype, device=device) for _ in range(3))
    words = "flash_attn_with_kvcache.* has no derivative of any kind"
    out = flash_attn_with_kvcache(q.clone().requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match=words):
        out.sum().backward()
    calls = (
        lambda: func.grad(lambda y: flash_attn_with_kvcache(y, k, v).sum())(q),
        lambda: func.jvp(lambda y: flash_attn_with_kvcache(y, k, v), (q,), (q,)),
        lambda: func.vmap(lambda y: flash_attn_with_kvcache(y, k, v))(torch.stack((q, q))),
        lambda: dual(lambda y: flash_attn_with_kvcache(y, k, v), q, q),
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match=words):
            call()


def test_gradient_of_the_scale(device):
    """A softmax_scale that is learned gets its gradient."""
    dtype = default_dtype()
    q, k, v = (randn(*SHAPE, dtype=dtype, device=device) for _ in range(3))
    scale = torch.nn.Parameter(torch.tensor([0.3], device=device))
    dout = torch.randn_like(q)
    (grad,) = torch.autograd.grad(flash_attn_func(q, k, v, softmax_scale=scale), scale, dout)
    exact = scale.detach().double().requires_grad_()
    scores = exact * torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double())
    (expected,) = torch.autograd.grad(out, exact, dout.double())
    torch.testing.assert_close(grad.double(), expected, rtol=0.1, atol=0.1)
    with torch.no_grad():
        assert torch.equal(
            flash_attn_func(q, k, v, softmax_scale=scale),
            flash_attn_func(q, k, v, softmax_scale=scale.item()),
        )
    boxed = torch.full((1, 1, 1, 1, 1), 0.3, device=device).requires_grad_()
    (grad,) = torch.autograd.grad(flash_attn_func(q, k, v, softmax_scale=boxed), boxed, dout)
    assert grad.shape == boxed.shape
    torch.testing.assert_close(grad.double().flatten(), expected, rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="softmax_scale must be one number, not 0"):
        flash_attn_func(q, k, v, softmax_scale=torch.zeros((), requires_grad=True))


def test_tangent_of_a_number(device):
    """That of the scale, alone and beside q's; others have none, and say so."""
    dtype = most_exact_dtype()
    q, k, v = (randn(*SHAPE, dtype=dtype, device=device) for _ in range(3))
    scale = torch.tensor(0.3, dtype=torch.float64, device=device)
    one = torch.ones_like(scale)

    def attend(scale: Tensor, q: Tensor = q) -> Tensor:
        return flash_attn_func(q, k, v, softmax_scale=scale)

    def defined(scale: Tensor, q: Tensor = q) -> Tensor:
        scores = scale * torch.einsum("bihd,bjhd->bhij", q, k)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    if kernels_run(q):
        with pytest.raises(NotImplementedError, match="forward mode"):
            func.jvp(attend, (scale,), (one,))
    else:
        for primals, tangents in (((scale,), (one,)), ((scale, q), (one, torch.randn_like(q)))):
            found, expected = (func.jvp(f, primals, tangents)[1] for f in (attend, defined))
            torch.testing.assert_close(found, expected)
        _, expected = func.jvp(defined, (scale,), (one,))
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(attend(forward_ad.make_dual(scale, one))).tangent
            torch.testing.assert_close(found, expected)
    for name in ("softcap", "dropout_p"):
        with pytest.raises(NotImplementedError, match=f"{name} has no derivative in forward mode"):
            func.jvp(lambda x, name=name: flash_attn_func(q, k, v, **{name: x}), (scale,), (one,))


def test_transforms_of_meta_tensors():
    q = torch.empty(2, 5, 4, 16, device="meta", requires_grad=True)
    assert func.vmap(flash_attn_func)(q[None], q[None], q[None]).shape == (1, *q.shape)
    (dq,) = torch.autograd.grad(flash_attn_func(q, q, q).sum(), q, create_graph=True)
    assert dq.shape == q.shape and dq.is_meta


def test_name_of_the_node(device):
    q = randn(*SHAPE, dtype=default_dtype(), device=device).requires_grad_()
    assert "dense_forward" in flash_attn_func(q, q, q).grad_fn.name()


def test_gradient_of_the_scale_is_no_sum_of_16_bits(device):
    q, k, v = (randn(*SHAPE, dtype=torch.bfloat16, device=device) for _ in range(3))
    scale = torch.tensor(0.3, device=device, requires_grad=True)
    out = flash_attn_func(q.requires_grad_(), k, v, softmax_scale=scale)
    dq, grad = torch.autograd.grad(out, (q, scale), torch.randn_like(out))
    expected = (dq.double() * q.detach().double()).sum() / scale.detach().double()
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(5, 0), (0, 5), (0, 0)])
def test_create_graph_of_nothing(device, seqlen_q, seqlen_k):
    dtype = default_dtype()
    q = randn(2, seqlen_q, 2, 16, dtype=dtype, device=device).requires_grad_()
    k = randn(2, seqlen_k, 2, 16, dtype=dtype, device=device).requires_grad_()
    out = flash_attn_func(q, k, k)
    grads = torch.autograd.grad(out.sum(), (q, k), create_graph=True)
    assert not any(grad.any() for grad in grads)
