"""The operators: gradcheck in float64, torch.library.opcheck, torch.compile, fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import OPTIONS, call, dense, int32, layout_of, randn, run, since_torch, varlen
from oracle import Attention
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb

OPS = torch.ops.flash_attn

PROBLEMS: dict[str, Callable[..., Attention]] = {
    "dense": lambda **kw: dense(2, 7, 9, **kw),
    "varlen": lambda **kw: varlen([7, 3], [9, 3], slack=0, **kw),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", PROBLEMS)
def test_gradcheck(layout, options):
    options = OPTIONS[options](2, 4, "cpu")
    sizes = {"nheads": 4, "nheads_kv": 2, "headdim": 4, "headdim_v": 6}
    problem = PROBLEMS[layout](**sizes, dtype=torch.float64, **options)
    leaves = {"q": problem.q, "k": problem.k, "v": problem.v}
    if problem.s_aux is not None:
        leaves["s_aux"] = problem.s_aux.double()

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        given = replace(problem, **dict(zip(leaves, inputs, strict=True)))
        out, lse, _ = call(given, return_attn_probs=True)
        return out, lse.nan_to_num(neginf=0.0)

    inputs = [x.requires_grad_() for x in leaves.values()]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def forward_arguments(problem: Attention) -> tuple[Any, ...]:
    """Arguments of the forward operator for the problem's layout."""
    layout = () if problem.cu_seqlens_q is None else layout_of(problem)
    q, k, v = map(leaf, (problem.q, problem.k, problem.v))
    options = (problem.dropout_p, problem.scale, problem.causal, *problem.window_size)
    return q, k, v, *layout, *options, problem.softcap, problem.alibi_slopes, False


@pytest.mark.parametrize("options", ["plain", "window-causal", "softcap", "alibi-batch"])
@pytest.mark.parametrize("layout", PROBLEMS)
def test_opcheck_forward(device, layout, options):
    problem = PROBLEMS[layout](device=device, **OPTIONS[options](2, 2, device))
    op = getattr(OPS, f"flash_attn_{layout}_forward")
    torch.library.opcheck(op, forward_arguments(problem))
    sinks = {"s_aux": leaf(randn(2, device=device))}
    torch.library.opcheck(op, forward_arguments(problem), sinks)


@pytest.mark.parametrize("layout", PROBLEMS)
def test_opcheck_forward_with_dropout(device, layout):
    problem = PROBLEMS[layout](device=device, dropout_p=0.3)
    op = getattr(OPS, f"flash_attn_{layout}_forward")
    *arguments, _ = forward_arguments(problem)
    state = torch.tensor([3, 4], device=device)
    for return_softmax in (False, True):
        torch.library.opcheck(op, (*arguments, return_softmax), {"rng_state": state})
    with pytest.raises(ValueError, match="rng_state must be given"):
        op(*arguments, False)


@pytest.mark.parametrize("layout", PROBLEMS)
def test_opcheck_backward(device, layout):
    problem = PROBLEMS[layout](device=device, causal=True)
    op = getattr(OPS, f"flash_attn_{layout}_backward")
    bounds = () if layout == "dense" else layout_of(problem)
    out, lse, _ = call(problem, return_attn_probs=True)
    inputs = problem.q, problem.k, problem.v
    options = (0.0, problem.scale, True, -1, -1, 0.0, None, False)
    arguments = (torch.randn_like(out), *inputs, out, lse, *bounds, *options)
    torch.library.opcheck(op, arguments)
    torch.library.opcheck(op, arguments, {"dlse": torch.randn_like(lse)})


def kvcache_arguments(device: str) -> tuple[Any, ...]:
    problem, new = dense(2, 1, 12, device=device), dense(2, 1, 1, device=device)
    angles = torch.rand(12, 8, device=device).to(problem.q.dtype)
    cache = (problem.k, problem.v, new.k, new.v, angles.cos(), angles.sin(), int32([3, 7], device))
    options = (None, None, None, problem.scale, True, -1, -1, 0.0, True, None, 0)
    return problem.q, *cache, *options


def test_opcheck_kvcache(device):
    torch.library.opcheck(OPS.flash_attn_with_kvcache, kvcache_arguments(device))


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def compiler(request: pytest.FixtureRequest, device: str) -> Callable[..., Any]:
    if request.param == "inductor" and device == "cpu":
        pytest.skip("inductor is tried on the GPU")
    torch._dynamo.reset()
    return lambda function: torch.compile(function, fullgraph=True, backend=request.param)


@pytest.mark.parametrize("options", ["plain", "window-causal", "alibi", "sinks"])
@pytest.mark.parametrize("layout", PROBLEMS)
def test_compile(device, compiler, layout, options):
    problem = PROBLEMS[layout](device=device, **OPTIONS[options](2, 2, device))
    layout_arguments = () if layout == "dense" else layout_of(problem)
    function = (
        flash_attn.flash_attn_func if layout == "dense" else flash_attn.flash_attn_varlen_func
    )
    options = {
        "causal": problem.causal,
        "window_size": problem.window_size,
        "alibi_slopes": problem.alibi_slopes,
        "s_aux": problem.s_aux,
        "return_attn_probs": True,
    }

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _ = function(q, k, v, *layout_arguments, **options)
        return (out**2).sum() + lse.sin().sum()

    gradients = []
    for variant in (loss, compiler(loss)):
        leaves = list(map(leaf, (problem.q, problem.k, problem.v)))
        value = variant(*leaves)
        gradients.append([value, *torch.autograd.grad(value, leaves)])
    torch.testing.assert_close(*gradients)


def test_compile_with_dropout(device, compiler):
    """Forward and backward of one compiled call share one mask."""
    problem = dense(2, 40, 40, device=device)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)

    compiled = compiler(function)
    v = leaf(problem.v)
    out = compiled(problem.q, problem.k, v)
    # out is linear in v: <out, dout> = <v, dv>, if both passes drop the same entries.
    (dv,) = torch.autograd.grad(out, v, out.detach())
    products = ((x.double() * y.double()).sum() for x, y in ((out, out), (v, dv)))
    torch.testing.assert_close(*products, rtol=max(1e-4, torch.finfo(out.dtype).eps), atol=0)
    assert not torch.equal(out, compiled(problem.q, problem.k, v))


def test_compile_of_changing_shapes(device, compiler):
    compiled = compiler(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True))
    for seqlen in (5, 17, 33, 64):
        problem = dense(2, seqlen, seqlen + 3, device=device, causal=True)
        out = compiled(problem.q, problem.k, problem.v)
        torch.testing.assert_close(out, call(problem))


def test_compile_kvcache(device, compiler):
    """The cache that a compiled call is given is updated in place."""
    q, k_cache, v_cache, k, v, cos, sin, lengths, *_ = kvcache_arguments(device)

    def step(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True
        )

    caches = [(k_cache.clone(), v_cache.clone()) for _ in range(2)]
    outs = [step(*caches[0]), compiler(step)(*caches[1])]
    torch.testing.assert_close(outs[0], outs[1])
    for eager, compiled in zip(*caches, strict=True):
        assert torch.equal(eager, compiled) and not torch.equal(eager, k_cache)


def test_compile_of_a_cache_that_is_read(device, compiler):
    """Where nothing is appended, nothing counts as written to."""
    q, k_cache, v_cache, *_ = kvcache_arguments(device)

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=5)

    shared = [x[:1].expand(len(q), -1, -1, -1) for x in (k_cache, v_cache)]
    torch.testing.assert_close(compiler(step)(q, *shared), step(q, *shared))
    weight = torch.randn_like(k_cache).requires_grad_()
    loss = (weight * k_cache).sum()
    with torch.no_grad():
        compiler(step)(q, k_cache, v_cache)
    loss.backward()
    torch.testing.assert_close(weight.grad, k_cache)


@since_torch(2, 8, "guards of sizes that nobody knows")
def test_compilations_of_a_growing_batch():
    """One for the first size and one for all others."""
    cos = torch.randn(99, 8)

    def decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        q = apply_rotary_emb(q, cos, cos, seqlen_offsets=lengths)
        return flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)

    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(decode, backend=counter)
    for batch in range(2, 7):
        caches = torch.randn(2, batch, 32, 2, 16).unbind()
        step(torch.randn(batch, 1, 4, 16), *caches, torch.full((batch,), 3, dtype=torch.int32))
    assert counter.frame_count == 2


def test_compile_with_out(device, compiler):
    q, k_cache, v_cache, k, v, cos, sin, lengths, *_ = kvcache_arguments(device)

    def dense(out: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q, k, v, out=out)

    def decode(out: Tensor) -> Tensor:
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, out=out)

    for function in (dense, decode):
        out = torch.empty_like(q)
        assert compiler(function)(out) is out and torch.equal(out, function(torch.empty_like(q)))


@since_torch(2, 11, "the compiler keeps the words of an error")
def test_compile_kvcache_where_a_gradient_is_wanted(device):
    """It has none: compiled code could only say so in words that nobody understands."""
    torch._dynamo.reset()
    q, k_cache, v_cache, *_ = kvcache_arguments(device)
    q.requires_grad_()
    step = torch.compile(flash_attn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="no derivative"):
        step(q, k_cache, v_cache)
    with torch.no_grad():
        out = step(q, k_cache, v_cache)
    assert torch.equal(out, flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("wanted", [False, True])
def test_traced_for_torchscript(device, wanted):
    """The trace has the operator, which takes other inputs and other shapes."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, 0))

    first, second = dense(2, 40, 40, device=device), dense(1, 150, 170, device=device)
    traced = torch.jit.trace(attend, tuple(x.requires_grad_(wanted) for x in first_of(first)))
    for problem in (first, second):
        leaves = [x.requires_grad_(wanted) for x in first_of(problem)]
        outs = traced(*leaves), attend(*leaves)
        torch.testing.assert_close(*outs)
        if wanted:
            gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in outs)
            torch.testing.assert_close(*gradients)


def first_of(problem: Attention) -> list[Tensor]:
    return [x.detach().clone() for x in (problem.q, problem.k, problem.v)]


@since_torch(2, 8, "guards of sizes that nobody knows")
def test_compile_where_lengths_are_data(device):
    """Packing inside of a compiled function."""
    torch._dynamo.reset()
    bounds, inputs = int32([0, 5, 17, 40], device), first_of(dense(1, 40, 40, device=device))

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        longest = bounds.diff().max().item()
        return flash_attn.flash_attn_varlen_func(
            q, k, v, bounds, bounds, longest, longest, causal=True
        )

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        results = []
        for variant in (attend, compiled):
            leaves = [x[0].clone().requires_grad_() for x in inputs]
            out = variant(*leaves, bounds)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results)


@since_torch(2, 13, "sizes that nobody knows")
def test_compile_where_sizes_and_numbers_are_data():
    torch._dynamo.reset()
    q, bounds = torch.randn(20, 4, 16), torch.tensor([0, 5, 20], dtype=torch.int32)
    cache, active = torch.randn(4, 32, 2, 16), torch.tensor([1, 0, 1, 1])

    def packed(q: Tensor, bounds: Tensor, left: Tensor) -> Tensor:
        window = (left.item(), 0)
        return flash_attn.flash_attn_varlen_func(
            q, q, q, bounds, bounds, 20, 20, window_size=window
        )

    def some(q: Tensor, cache: Tensor, active: Tensor) -> Tensor:
        rows = active.nonzero().flatten().int()
        return flash_attn.flash_attn_with_kvcache(
            q[rows], cache, cache, cache_seqlens=rows * 0 + 3, cache_batch_idx=rows
        )

    given = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    unbacked = bounds.clone()
    torch._dynamo.decorators.mark_unbacked(unbacked, 0)
    with torch._dynamo.config.patch(**given):
        for function, args, plain in (
            (packed, (q, unbacked, torch.tensor(3)), (q, bounds, torch.tensor(3))),
            (some, (q[:4, None], cache, active), (q[:4, None], cache, active)),
        ):
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(*args), function(*plain))


@pytest.mark.parametrize("options", ["plain", "window-causal", "sinks"])
def test_results_may_be_changed_in_place(device, options):
    """As any tensor: also where a gradient is recorded."""
    problem = dense(2, 40, 40, device=device, **OPTIONS[options](2, 2, device))
    more = {"window_size": problem.window_size, "s_aux": problem.s_aux, "causal": problem.causal}
    leaves = list(map(leaf, first_of(problem)))
    out, lse, _ = flash_attn.flash_attn_func(*leaves, **more, return_attn_probs=True)
    lse.unsqueeze_(0)
    out.transpose_(1, 2).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("layout", PROBLEMS)
def test_fake_tensors(layout):
    """A shape-only run gives the shapes, dtypes and strides of a real one."""
    problem = PROBLEMS[layout](dtype=torch.bfloat16)
    bounds = () if layout == "dense" else layout_of(problem)
    function = flash_attn.flash_attn_func if not bounds else flash_attn.flash_attn_varlen_func
    arguments = (problem.q, problem.k, problem.v, *bounds, 0.3)
    real = function(*arguments, return_attn_probs=True)
    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        fake = function(*arguments, return_attn_probs=True)
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


class Elsewhere(Tensor):
    """A tensor whose elements are not where its address says, as those of a DTensor."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    def __init__(self, like: Tensor) -> None:
        self.like = like

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = (x.like if isinstance(x, Elsewhere) else x for x in args)
        return func(*plain, **kwargs or {})


@pytest.mark.parametrize("which", ["q", "k", "v", "alibi_slopes"])
def test_subclass_in_any_place_is_the_dispatchers(device, which):
    problem = dense(device=device)
    slopes = torch.rand(2, device=device)
    arguments = {"q": problem.q, "k": problem.k, "v": problem.v, "alibi_slopes": slopes}
    expected = flash_attn.flash_attn_func(**arguments)
    arguments[which] = Elsewhere(arguments[which])
    assert torch.equal(flash_attn.flash_attn_func(**arguments), expected)


def test_gradients_with_autocast(device):
    """Under autocast the functions keep to the dtype that they are given."""
    problem = dense(device=device)
    expected, _ = run(problem)
    with torch.autocast(device, dtype=torch.bfloat16):
        results, _ = run(problem)
    assert torch.equal(results["out"], expected["out"])
