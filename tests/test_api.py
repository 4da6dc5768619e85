"""Names, argument orders and defaults that clients rely on (see ../shared/compatibility.md)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from helpers import default_dtype, dense, int32, layout_of, varlen

import flash_attn
import flash_attn_2_cuda
from flash_attn import flash_attn_interface

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LAYOUT = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
WINDOW = "window_size_left, window_size_right"

PUBLIC = {
    "flash_attn_func": f"q, k, v, {OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {LAYOUT}, {OPTIONS}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LAYOUT}, {OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}
PRIVATE = {
    "_flash_attn_forward": (
        f"q, k, v, dropout_p, softmax_scale, causal, {WINDOW}, softcap, alibi_slopes, "
        "return_softmax"
    ),
    "_flash_attn_varlen_forward": (
        f"q, k, v, {LAYOUT}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0"
    ),
    "_flash_attn_backward": (
        f"{GRADIENTS}, dropout_p, softmax_scale, causal, {WINDOW}, softcap, alibi_slopes, "
        "deterministic, rng_state=None"
    ),
    "_flash_attn_varlen_backward": (
        f"{GRADIENTS}, {LAYOUT}, dropout_p, softmax_scale, causal, {WINDOW}, softcap, "
        "alibi_slopes, deterministic, rng_state=None, zero_tensors=False"
    ),
}
RAW = {  # positional: flash_attn_2_cuda and flash_attn_gpu
    "fwd": 13,
    "varlen_fwd": 21,
    "bwd": 19,
    "varlen_bwd": 24,
    "fwd_kvcache": 20,
}
EXTENSIONS = {"q_descale", "k_descale", "v_descale", "s_aux", "out", "dlse", "deterministic"}


def parse(parameters: str) -> list[tuple[str, Any]]:
    """Names and defaults of "q, k, causal=False"."""
    return names_and_defaults(inspect.signature(eval(f"lambda {parameters}: None")))


def names_and_defaults(signature: inspect.Signature) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in signature.parameters.values()]


def assert_signature(function: Callable[..., Any], parameters: str, extensions: set[str]) -> None:
    """These come first; behind them there are extensions alone, given by keyword."""
    signature, expected = inspect.signature(function), parse(parameters)
    assert names_and_defaults(signature)[: len(expected)] == expected
    for extension in list(signature.parameters.values())[len(expected) :]:
        assert extension.kind is extension.KEYWORD_ONLY and extension.name in extensions


@pytest.mark.parametrize("name", PUBLIC)
def test_public_signature(name):
    function = getattr(flash_attn, name)
    assert function is getattr(flash_attn_interface, name)
    assert inspect.isfunction(function) and inspect.getfullargspec(function).args
    expected = parse(PUBLIC[name])
    assert inspect.getfullargspec(function).args == [parameter for parameter, _ in expected]
    assert_signature(function, PUBLIC[name], EXTENSIONS)


@pytest.mark.parametrize("name", [name for name in PUBLIC if "packed" in name])
def test_packed_functions_pass_on_all_they_are_given(name, monkeypatch):
    whole = "flash_attn_varlen_func" if "varlen" in name else "flash_attn_func"
    signature, passed = inspect.signature(getattr(flash_attn, whole)), {}

    def record(*args: Any, **kwargs: Any) -> None:
        passed.update(signature.bind(*args, **kwargs).arguments)

    monkeypatch.setattr(flash_attn_interface, whole, record)
    function = getattr(flash_attn, name)
    given = {parameter: object() for parameter in inspect.signature(function).parameters}
    packed = "qkv" if "qkv" in given else "kv"
    given[packed] = torch.rand(*[5] * (1 if "varlen" in name else 2), len(packed), 2, 8)
    function(**given)
    assert set(signature.parameters) - set(passed) <= {"block_table"}
    for letter, x in zip(packed, given.pop(packed).unbind(-3), strict=True):
        assert torch.equal(passed.pop(letter), x)
    for parameter, value in passed.items():
        assert value is given.get(parameter, given.get(parameter[:-2]))  # cu_seqlens of both


@pytest.mark.parametrize("name", PRIVATE)
def test_private_signature(name):
    function = getattr(flash_attn_interface, name)
    assert inspect.isfunction(function) and function.__name__ == name
    signature = inspect.signature(function)
    expected = parse(PRIVATE[name])
    assert names_and_defaults(signature)[: len(expected)] == expected
    for extension in list(signature.parameters.values())[len(expected) :]:
        assert extension.default is not extension.empty


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("module", ["flash_attn_2_cuda", "flash_attn_gpu"])
def test_raw_signature(name, module):
    module = {"flash_attn_2_cuda": flash_attn_2_cuda}.get(
        module, flash_attn_interface.flash_attn_gpu
    )
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert len([p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]) == RAW[name]


def test_operators_have_names_that_clients_look_for():
    """Names of their own: clients register upstream's (flash_attn::_flash_attn_forward)."""
    for layout, direction in product(("dense", "varlen"), ("forward", "backward")):
        schema = getattr(torch.ops.flash_attn, f"flash_attn_{layout}_{direction}").default._schema
        assert "window_size_left" in [argument.name for argument in schema.arguments]


@pytest.mark.parametrize("module", [flash_attn_2_cuda, flash_attn_interface.flash_attn_gpu])
def test_raw_dense_functions_agree_with_the_public_one(device, module):
    problem = dense(2, 20, 30, 4, 2, dtype=torch.bfloat16, device=device, causal=True)
    q, k, v = (x.requires_grad_() for x in (problem.q, problem.k, problem.v))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)

    q, k, v = (x.detach() for x in (q, k, v))
    options = (0.0, problem.scale, True, -1, -1, 0.0)
    for given in (None, torch.empty_like(q)):
        raw_out, raw_lse, _, rng_state = module.fwd(q, k, v, given, None, *options, False, None)
        assert torch.equal(raw_out, out) and torch.equal(raw_lse, lse)
        assert given is None or raw_out.data_ptr() == given.data_ptr()
    for given in ((None,) * 3, tuple(map(torch.empty_like, (q, k, v)))):
        *grads, delta = module.bwd(
            dout, q, k, v, out, lse, *given, None, *options, True, None, rng_state
        )
        assert all(map(torch.equal, grads, expected)) and delta.shape == lse.shape
        assert given[0] is None or all(map(torch.equal, given, expected))


@pytest.mark.parametrize("module", [flash_attn_2_cuda, flash_attn_interface.flash_attn_gpu])
def test_raw_varlen_functions_agree_with_the_public_one(device, module):
    problem = varlen([20, 13], [20, 30], device=device, slack=0, window_size=(9, 0))
    layout = layout_of(problem)
    q, k, v = (x.requires_grad_() for x in (problem.q, problem.k, problem.v))
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, *layout, window_size=(9, 0), return_attn_probs=True
    )
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)

    q, k, v = (x.detach() for x in (q, k, v))
    bounds, sizes = layout[:2], layout[2:]
    options = (0.0, problem.scale, False, False, 9, 0, 0.0)
    raw_out, raw_lse, _, rng_state = module.varlen_fwd(
        q, k, v, None, *bounds, None, None, None, None, *sizes, *options, False, None
    )
    assert torch.equal(raw_out, out) and torch.equal(raw_lse, lse)
    *grads, _ = module.varlen_bwd(
        dout, q, k, v, out, lse, None, None, None, *bounds, None, *sizes, *options, True, None, None
    )
    assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize("module", [flash_attn_2_cuda, flash_attn_interface.flash_attn_gpu])
def test_raw_kvcache_function_agrees_with_the_public_one(device, module):
    problem = dense(2, 1, 30, device=device)
    new = dense(2, 1, 1, device=device)
    lengths = int32([3, 29], device)
    caches = [(problem.k.clone(), problem.v.clone()) for _ in range(2)]
    expected, expected_lse = flash_attn.flash_attn_with_kvcache(
        problem.q,
        *caches[0],
        new.k,
        new.v,
        cache_seqlens=lengths,
        causal=True,
        return_softmax_lse=True,
    )
    given = torch.empty_like(problem.q)
    out, lse = module.fwd_kvcache(
        problem.q,
        *caches[1],
        new.k,
        new.v,
        lengths,
        *[None] * 6,
        given,
        problem.scale,
        True,
        -1,
        -1,
        0.0,
        True,
        0,
    )
    assert torch.equal(given, expected) and out.data_ptr() == given.data_ptr()
    assert torch.equal(lse, expected_lse)
    assert torch.equal(caches[0][0], caches[1][0]) and torch.equal(caches[0][1], caches[1][1])


def generator_positions() -> list[tuple[str, int]]:
    return [("fwd", 12), ("bwd", 17), ("varlen_fwd", 20), ("varlen_bwd", 22)]


@pytest.mark.parametrize("name, position", generator_positions())
@pytest.mark.parametrize("module", [flash_attn_2_cuda, flash_attn_interface.flash_attn_gpu])
def test_raw_functions_refuse_a_generator(module, name, position):
    arguments = [None] * position
    with pytest.raises(RuntimeError, match="generator` argument is no longer supported"):
        getattr(module, name)(*arguments, torch.Generator())


def test_results_without_dropout_are_the_callers_own():
    """S_dmask and rng_state of one call may be resized and written without harm to the next."""
    problem = dense()
    arguments = (problem.q, problem.k, problem.v, 0.0, None, False, -1, -1, 0.0, None, True)
    for _ in range(2):
        *_, probs, rng_state = flash_attn_interface._flash_attn_forward(*arguments)
        assert probs.shape == (0,) and rng_state.shape == (2,) and rng_state.dtype == torch.int64
        probs.resize_(3), rng_state.resize_(0)
        public = flash_attn.flash_attn_func(*arguments[:3], return_attn_probs=True)[2]
        assert public.shape == (0,)
        public.resize_(5)


def test_client_that_registers_upstreams_operators():
    """Evo 2's vortex registers this name with upstream's arguments; our calls still compile."""
    code = """
import torch
import flash_attn

@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: torch.Tensor | None, return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("called")

@forward.register_fake
def _(*args):
    raise AssertionError("called")

x = torch.randn(1, 4, 2, 8, requires_grad=True)
compiled = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(x, x, x), flash_attn.flash_attn_func(x, x, x))
"""
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"], check=True
    )


AUTOGRAD_CLASSES = {
    "FlashAttnFunc": flash_attn.flash_attn_func,
    "FlashAttnKVPackedFunc": flash_attn.flash_attn_kvpacked_func,
    "FlashAttnQKVPackedFunc": flash_attn.flash_attn_qkvpacked_func,
    "FlashAttnVarlenFunc": flash_attn.flash_attn_varlen_func,
    "FlashAttnVarlenKVPackedFunc": flash_attn.flash_attn_varlen_kvpacked_func,
    "FlashAttnVarlenQKVPackedFunc": flash_attn.flash_attn_varlen_qkvpacked_func,
}


@pytest.mark.parametrize("name", AUTOGRAD_CLASSES)
def test_autograd_classes(name):
    """``apply`` takes what the public function does, by position, then is_grad_enabled."""
    lengths = 2 if "QKV" not in name else 1
    tensors = 1 if "QKV" in name else 2 if "KV" in name else 3
    packed = {1: (3,), 2: (2,), 3: ()}[tensors]
    rows = (9,) if "Varlen" in name else (2, 9)
    inputs = [torch.randn(*rows, 2, 8, requires_grad=True) for _ in range(tensors)]
    if packed:
        inputs[-1] = torch.randn(*rows, *packed, 2, 8, requires_grad=True)
    if "Varlen" in name:
        inputs += [int32([0, 4, 9])] * lengths + [5] * lengths
    options = (0.0, None, True, (3, 0), 0.0, None, False, True)
    more = (None,) if name == "FlashAttnVarlenFunc" else ()
    apply = getattr(flash_attn_interface, name).apply
    expected = AUTOGRAD_CLASSES[name](*inputs, *options)
    for is_grad_enabled in (True, False):
        results = apply(*inputs, *options, *more, is_grad_enabled)
        assert all(map(torch.equal, results, expected))
        assert results[0].requires_grad == is_grad_enabled


@pytest.mark.parametrize("bounds", [[0, 0, 0], [0, 1, 2], [7, -3, 2**31 - 1]])
def test_lengths_in_use_of_pages_are_the_lengths(device, bounds):
    """Clients give any memory as cu_seqlens_k there, which upstream does not read."""
    dtype = default_dtype()
    problem = dense(2, 1, 40, 4, 2, dtype=dtype, device=device)
    lengths = int32([33, 7], device)
    k, v = (x.reshape(10, 8, *x.shape[2:]) for x in (problem.k, problem.v))
    table = torch.arange(10, dtype=torch.int32, device=device).view(2, 5)
    q, bounds_q = problem.q[:, 0], int32([0, 1, 2], device)
    expected = flash_attn.flash_attn_with_kvcache(
        problem.q, k, v, cache_seqlens=lengths, block_table=table, causal=True
    )
    lengths_and_pages = (lengths, None, table, None)
    options = (1, 40, 0.0, problem.scale, False, True, -1, -1, 0.0, False, None)
    for _ in range(2):
        out, *_ = flash_attn_2_cuda.varlen_fwd(
            q, k, v, None, bounds_q, int32(bounds, device), *lengths_and_pages, *options
        )
        torch.testing.assert_close(out, expected[:, 0])


@pytest.mark.parametrize("seqlen", [20, 4])
def test_private_backward_takes_a_transposed_lse(device, seqlen):
    """As diffusers gives it, where heads may be as many as tokens."""
    problem = dense(2, seqlen, seqlen, 4, 4, dtype=torch.bfloat16, device=device)
    q, k, v = problem.q, problem.k, problem.v
    out, lse, *_ = flash_attn_interface._wrapped_flash_attn_forward(
        q, k, v, 0.0, problem.scale, False, -1, -1, 0.0, None, False
    )
    dout, options = torch.randn_like(out), (0.0, problem.scale, False, -1, -1, 0.0, None, True)
    results = []
    for given in (lse, lse.permute(0, 2, 1)):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        tensors = (dout, q, k, v, out, given, *grads)
        flash_attn_interface._wrapped_flash_attn_backward(*tensors, *options)
        raw = flash_attn_2_cuda.bwd(*tensors, None, *options[:6], True, None, None)
        assert all(map(torch.equal, raw, grads))
        results.append(grads)
    assert all(map(torch.equal, *results))


def test_triton_module_of_clients():
    from flash_attn import flash_attn_triton

    qkv = torch.randn(2, 5, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    expected = flash_attn.flash_attn_func(q, k, v, softmax_scale=0.3, causal=True)
    options = (None, True, 0.3)
    for out in (
        flash_attn_triton.flash_attn_func(q, k, v, *options),
        flash_attn_triton.flash_attn_kvpacked_func(q, qkv[:, :, 1:], *options),
        flash_attn_triton.flash_attn_qkvpacked_func(qkv, *options),
    ):
        assert torch.equal(out, expected)
    with pytest.raises(NotImplementedError, match="bias must be None"):
        flash_attn_triton.flash_attn_func(q, k, v, torch.zeros(1, 4, 5, 5))
    with pytest.raises(NotImplementedError, match="equally long with causal, got 2 and 5 rows"):
        flash_attn_triton.flash_attn_func(q[:, :2], k, v, causal=True)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_functions_can_be_pickled(name):
    function = getattr(flash_attn_interface, name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_block_size_of_probabilities():
    block = flash_attn_interface._get_block_size_n(torch.device("cpu"), 64, True, False)
    assert isinstance(block, int) and 128 % block == 0


def test_helpers_of_clients():
    x = torch.rand(3, 4)
    assert [flash_attn_interface.round_multiple(n, 32) for n in (0, 32, 33)] == [0, 32, 64]
    assert flash_attn_interface.maybe_contiguous(x) is x
    assert flash_attn_interface.maybe_contiguous(x.mT).is_contiguous()
    assert flash_attn_interface.maybe_contiguous(None) is None


def test_client_imports():
    from flash_attn.bert_padding import (  # noqa: F401
        IndexFirstAxis,
        IndexPutFirstAxis,
        index_first_axis,
        index_first_axis_residual,
        index_put_first_axis,
        pad_input,
        rearrange,
        unpad_input,
        unpad_input_for_concatenated_sequences,
    )
    from flash_attn.layers.rotary import (  # noqa: F401
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
    from flash_attn.ops.triton.rotary import apply_rotary  # noqa: F401


def test_version():
    """transformers compares versions; MSLK parses three ints."""
    parts = flash_attn.__version__.split(".")
    assert len(parts) == 3 and [int(part) for part in parts] >= [2, 3, 3]
    assert (2, 1, 1) <= tuple(map(int, parts)) < (2, 8, 4)  # TransformerEngine's range


def test_distribution():
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("running from the source tree: flash-attn is not installed")
    assert version == flash_attn.__version__
    names = importlib.metadata.packages_distributions()["flash_attn"]
    assert {name.replace("_", "-") for name in names} == {"flash-attn"}


def test_no_module_that_switches_clients_to_other_conventions():
    for name in ("flash_attn_interface", "flash_attn_3"):
        assert importlib.util.find_spec(name) is None


def test_another_distribution_may_add_to_the_package(tmp_path):
    cute = tmp_path / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute / "__init__.py").write_text("FOUND = True\n")
    code = (
        f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}; "
        "import flash_attn, flash_attn.cute; "
        "assert flash_attn.cute.FOUND; flash_attn.flash_attn_func"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_use_backend():
    assert flash_attn.available_backends("cpu") == ["tiled"]
    with pytest.raises(ValueError, match="fast"), flash_attn.use_backend("fast"):
        pass
    problem = dense(headdim=64, dtype=torch.bfloat16)
    with flash_attn.use_backend("sm80"), pytest.raises(NotImplementedError, match="tiled"):
        flash_attn.flash_attn_func(problem.q, problem.k, problem.v)
    with flash_attn.use_backend("tiled"):
        flash_attn.flash_attn_func(problem.q, problem.k, problem.v)


def test_import_takes_no_time():
    """The compiler and what it calculates with take as long to import as all of torch."""
    code = """
import torch
before = set(sys.modules)
import flash_attn.distributed, flash_attn.fp8
import flash_attn.losses.cross_entropy, flash_attn.modules.mha, flash_attn.ops.rms_norm
slow = {"torch._dynamo", "torch._inductor", "sympy"} & (set(sys.modules) - before)
assert not slow, slow
"""
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"], check=True
    )


def test_import_needs_no_gpu_and_no_driver():
    code = (
        "import flash_attn, flash_attn_2_cuda; assert not __import__('torch').cuda.is_initialized()"
    )
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"], check=True
    )
