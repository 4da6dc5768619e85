"""Who computes attention: this library, PyTorch, FlashAttention-3, FlashInfer."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
from benchmarks.cases import FP8, Case, Inputs, sums
from benchmarks.report import OURS
from benchmarks.timing import Call
from flash_attn import _backends, fp8
from flash_attn._arguments import FP8_LEVELS
from flash_attn._backends import cuda

STANDARD_MATRICES = 4  # about what standard attention holds at once, each of N x N elements

P = ParamSpec("P")
T = TypeVar("T")
Forward = Callable[[], Tensor]


def _no_settings(case: Case) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Provider:
    """Who computes attention.

    ``prepare`` makes all that does not depend on the numbers (views, masks, plans), raises where
    the provider cannot run the case, and returns the call alone: its output has the layout of q and
    is differentiable. Everything runs inside ``context``.
    """

    prepare: Callable[[Case, Inputs], Forward]
    context: Callable[[Case], AbstractContextManager[object]] = _no_settings


def bind(provider: Provider, case: Case, inputs: Inputs) -> Call:
    """Return the call whose time or memory is that of the case; the backward has its graph."""
    leaves = inputs.q, inputs.k, inputs.v
    context = partial(provider.context, case)
    with context():
        forward = provider.prepare(case, inputs)
        if case.direction == "forward":
            return Call(forward, context)
        if case.queries:
            raise NotImplementedError("a KV cache has no backward")
        if case.direction == "both":
            return Call(lambda: torch.autograd.grad(forward(), leaves, inputs.dout), context)
        grad = partial(torch.autograd.grad, forward(), leaves, inputs.dout, retain_graph=True)
        return Call(grad, context)


@contextmanager
def recorded_backends() -> Iterator[dict[str, str]]:
    """By direction, the backend that this library chooses meanwhile."""
    choose, chosen = _backends.choose, {}

    def recorded(problem: Any, operation: str = "forward") -> str:
        chosen[operation] = choose(problem, operation)
        return chosen[operation]

    with (
        mock.patch.object(_backends, "choose", recorded),
        cuda.changed_setting("observer", object()),
    ):
        yield chosen


def attempt(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T | None, str]:
    """Return the result, or None and in one line why there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return function(*args, **kwargs), ""
        except Exception as error:
            name = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
            lines = str(error).splitlines() or [""]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # scaled_dot_product_attention warns why, and also of the backends that were not asked for.
    said = (str(warning.message).split(" (Triggered")[0] for warning in caught)
    why = [line for line in said if "disabled" not in line and not line.endswith("because:")]
    return None, (name + " ".join([lines[0], *why[:1]]))[:200]


def find_providers(math_gib: float = 40.0, fa3_library: str | None = None) -> dict[str, Provider]:
    """All providers by name.

    Parameters
    ----------
    math_gib
        What the matrices of standard attention may take.
    fa3_library
        Path of the library that registers the operators ``flash_attn_3::fwd`` and ``bwd``.
    """
    return {
        **{backend: _ours(backend) for backend in OURS},
        # Count as peers: the ratio to them is what determinism costs.
        "sm90_ordered": _ours("sm90", deterministic=True),
        "sm80_ordered": _ours("sm80", deterministic=True),
        "math": _standard(math_gib),
        "efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "flash": _flash(),
        "flash_op": Provider(_flash_operator, _torch_context),
        "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
        "fa3": Provider(partial(_fa3, library=fa3_library)),
        "flashinfer": Provider(_flashinfer),
    }


def fp8_providers(
    backend: str | None = None, fa3_library: str | None = None
) -> dict[str, Provider]:
    """Who computes attention in FP8, by name: none of them has the numbers of the others.

    The levels of ``flash_attn.fp8`` quantise within the call. Of ``e4m3`` and ``fa3_e4m3`` the
    inputs are quantised before, without descales. ``backend`` is forced; None: chosen.
    """
    ours = _ours(backend)
    return {
        **{level: Provider(partial(_level, level=level), ours.context) for level in FP8_LEVELS},
        "e4m3": _in_e4m3(ours),
        "fa3_e4m3": _in_e4m3(Provider(partial(_fa3, library=fa3_library))),
    }


def _options(case: Case, x: Inputs) -> dict[str, Any]:
    """What all functions of this library take."""
    return {
        "causal": case.causal,
        "window_size": case.window_size,
        "softcap": case.softcap,
        "alibi_slopes": x.alibi_slopes,
    }


def _by_layout(
    case: Case, x: Inputs, dense: Callable[..., Any], packed: Callable[..., Any], **options: Any
) -> Forward:
    """The call of the function for the layout of the inputs."""
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        return partial(dense, x.q, x.k, x.v, **options)
    lengths = (x.cu_seqlens_q, x.cu_seqlens_k, *case.longest)
    return partial(packed, x.q, x.k, x.v, *lengths, **options)


def _level(case: Case, x: Inputs, level: str) -> Forward:
    _refuse(case, "dropout_p", "queries", "deterministic")
    functions = fp8.flash_attn_fp8_func, fp8.flash_attn_fp8_varlen_func
    return _by_layout(case, x, *functions, **_options(case, x), level=level)


def _in_e4m3(provider: Provider) -> Provider:
    def prepare(case: Case, x: Inputs) -> Forward:
        if case.direction != "forward":
            raise NotImplementedError("no gradient")
        q, k, v = (tensor.detach().to(FP8) for tensor in (x.q, x.k, x.v))
        return provider.prepare(case, x._replace(q=q, k=k, v=v))

    return Provider(prepare, provider.context)


def add_arguments(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add the options of ``chosen_providers``; the caller sets the defaults."""
    add, names = parser.add_argument, [*find_providers(), *others]
    add("--providers", nargs="+", choices=names, help="in the order of the table")
    add("--fa3-library", metavar="PATH", help="adds fa3: registers flash_attn_3's fwd and bwd")
    add("--math-gib", type=float, help="math is skipped where its matrices take more")


def chosen_providers(
    arguments: argparse.Namespace, others: Mapping[str, Provider] | None = None
) -> dict[str, Provider]:
    """The providers by name; ``others`` are those of one script alone."""
    everyone = {**find_providers(arguments.math_gib, arguments.fa3_library), **(others or {})}
    names = [*arguments.providers, *(["fa3"] if arguments.fa3_library else [])]
    if "flashinfer" in names and not _has_flashinfer():
        names.remove("flashinfer")
        print("left out flashinfer, which is not installed")
    return {name: everyone[name] for name in names}


def _ours(backend: str | None, deterministic: bool = False) -> Provider:
    def prepare(case: Case, x: Inputs) -> Forward:
        options = _options(case, x)
        if case.queries:
            _refuse(case, "dropout_p")
            options["block_table"] = x.block_table
        if case.queries and not case.prefills:
            options |= {"cache_seqlens": x.cache_seqlens}
            if x.new is not None:
                options |= {**x.new, "rotary_interleaved": False}
            return partial(flash_attn.flash_attn_with_kvcache, x.q, x.k, x.v, **options)
        options["dropout_p"] = case.dropout_p
        options["deterministic"] = case.deterministic or deterministic
        functions = flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func
        return _by_layout(case, x, *functions, **options)

    if backend is None:
        return Provider(prepare)
    return Provider(prepare, lambda case: flash_attn.use_backend(backend))


def _refuse(case: Case, *options: str) -> None:
    """Raise where the case has one of the options."""
    for option in options:
        if getattr(case, option) != Case._field_defaults[option]:
            raise NotImplementedError(f"no {option}")


@contextmanager
def _deterministic_torch() -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    settings.fill_uninitialized_memory = False  # it costs time
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        settings.fill_uninitialized_memory = before[1]


@contextmanager
def _half_precision_math() -> Iterator[None]:
    """PyTorch's standard attention as the papers measure it: by default it computes in float32."""
    cuda = torch.backends.cuda
    before = cuda.fp16_bf16_reduction_math_sdp_allowed()
    cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(before)


@contextmanager
def _torch_context(case: Case, backend: SDPBackend | None = None) -> Iterator[None]:
    with ExitStack() as settings:
        if case.deterministic:
            settings.enter_context(_deterministic_torch())
        if backend == SDPBackend.MATH:
            settings.enter_context(_half_precision_math())
        if backend is not None:
            settings.enter_context(sdpa_kernel(backend))
        yield


def _sdpa(backend: SDPBackend) -> Provider:
    def prepare(case: Case, x: Inputs) -> Forward:
        _refuse(case, "window", "varlen", "softcap", "alibi", "page_size", "append", "fp8_cache")
        if case.keys and case.causal:  # is_causal means the first query and the first key
            raise NotImplementedError("no causal cross-attention")
        q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
        mask = None
        if case.queries > 1 and case.causal:  # likewise
            mask = q.new_full((case.queries, case.seqlen), -torch.inf)
            mask = mask.triu(case.seqlen - case.queries + 1)

        def forward() -> Tensor:
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=case.dropout_p,
                is_causal=case.causal and not case.queries,
                enable_gqa=case.group > 1,
            )
            return out.transpose(1, 2)

        return forward

    return Provider(prepare, lambda case: _torch_context(case, backend))


def _standard(limit_gib: float) -> Provider:
    """PyTorch's attention that forms the N x N matrices."""
    sdpa = _sdpa(SDPBackend.MATH)

    def prepare(case: Case, x: Inputs) -> Forward:
        matrix = sum(n * m for n, m in case.rows) * case.nheads * x.q.itemsize
        if STANDARD_MATRICES * matrix > limit_gib * 2**30:
            raise NotImplementedError(f"N x N matrices of more than {limit_gib:g} GiB")
        return sdpa.prepare(case, x)

    return Provider(prepare, sdpa.context)


def _flash() -> Provider:
    """PyTorch's FlashAttention-2; what SDPA lacks runs through its operator."""
    sdpa = _sdpa(SDPBackend.FLASH_ATTENTION)

    def prepare(case: Case, x: Inputs) -> Forward:
        other_lengths = case.queries > 1 or case.keys > 0
        through_operator = case.window >= 0 or case.varlen or (other_lengths and case.causal)
        return (_flash_operator if through_operator else sdpa.prepare)(case, x)

    return Provider(prepare, sdpa.context)


def _flash_operator(case: Case, x: Inputs) -> Forward:
    _refuse(case, "softcap", "alibi", "page_size", "append", "fp8_cache")
    if case.queries:
        _refuse(case, "varlen")
    left, right = case.window_size
    longest = case.longest

    def forward() -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            x.q,
            x.k,
            x.v,
            x.cu_seqlens_q,
            x.cu_seqlens_k,
            *longest,
            case.dropout_p,
            case.causal,
            False,  # return_debug_mask
            window_size_left=left,
            window_size_right=right,
        )[0]

    return forward


@cache
def load_library(path: str) -> None:
    torch.ops.load_library(path)


def fa3_operators() -> Any:
    """Those of the library that was loaded: builds register them under one of two names."""
    spaces = (torch.ops.flash_attn_3, torch.ops.fa3_fwd)
    return next((x for x in spaces if hasattr(x, "fwd")), spaces[0])


def _fa3(case: Case, x: Inputs, library: str | None) -> Forward:
    if library is None:
        raise NotImplementedError("no library given (--fa3-library)")
    _refuse(case, "dropout_p", "alibi", *["append"] * case.fp8_cache)
    load_library(library)
    q = x.q.to(x.k.dtype)  # beside a cache in FP8 it takes queries in FP8 alone
    left, right = case.window_size
    longest_q, longest_k = (None, None) if x.cu_seqlens_q is None else case.longest
    options: dict[str, Any] = {
        "cu_seqlens_q": x.cu_seqlens_q,
        "cu_seqlens_k": None if case.prefills else x.cu_seqlens_k,  # seqused_k has them
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "is_causal": case.causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": case.softcap,  # refused by builds without it
    }
    if case.direction != "forward":
        apply = _FlashAttention3.apply
        return partial(apply, x.q, x.k, x.v, options, case.deterministic)
    options["num_splits"] = 0  # it chooses
    if case.queries:
        options |= {"seqused_k": x.cache_seqlens, "page_table": x.block_table}
    if x.new is not None:
        names = {"k": "k_new", "v": "v_new"}
        options |= {names.get(name, name): tensor for name, tensor in x.new.items()}
    fwd = partial(fa3_operators().fwd, q, x.k, x.v, **options)
    return lambda: fwd()[0]


class _FlashAttention3(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], deterministic: bool
    ) -> Tensor:
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **options, num_splits=1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {**options, "deterministic": deterministic}
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dq, dk, dv, *_ = torch.ops.flash_attn_3.bwd(*grads, *ctx.saved_tensors, **ctx.options)
        return dq, dk, dv, None, None


FLASHINFER_PAGE = 16  # rows of a page as which FlashInfer, which has pages alone, is given a cache
FLASHINFER_WORKSPACE = 512 * 2**20  # bytes


def _has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


@cache
def _flashinfer_workspace(device: torch.device) -> Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)


def _flashinfer(case: Case, x: Inputs) -> Forward:
    """FlashInfer's wrappers, planned here: what is timed is ``run`` alone."""
    if not _has_flashinfer():
        raise NotImplementedError("not installed")
    _refuse(case, "dropout_p", "alibi", "keys", "headdim_v", "append")
    if case.direction != "forward":
        raise NotImplementedError("no gradient")
    if case.window >= 0 and not case.causal:
        raise NotImplementedError("no window to the right")
    flashinfer = importlib.import_module("flashinfer")
    workspace = _flashinfer_workspace(x.q.device)
    heads = (case.nheads, case.nheads_kv, case.headdim)
    options: dict[str, Any] = {
        "window_left": case.window,
        "logits_soft_cap": case.softcap,
        "q_data_type": x.q.dtype,
        "kv_data_type": x.k.dtype,
    }
    wrapper: Any
    if not case.queries:
        q, k, v = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (x.q, x.k, x.v))
        indptr = sums(case.lengths, x.q.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(indptr, indptr, *heads, causal=case.causal, **options)
        return lambda: wrapper.run(q, k, v).view(x.q.shape)

    page_size, table = case.page_size, x.block_table
    k, v = x.k, x.v
    if table is None:
        page_size = FLASHINFER_PAGE
        if case.longest[1] % page_size:
            raise NotImplementedError(f"no cache of a length that is no multiple of {page_size}")
        k, v = (tensor.reshape(-1, page_size, *tensor.shape[-2:]) for tensor in (x.k, x.v))
        batch = len(case.rows)
        table = torch.arange(k.shape[0], dtype=torch.int32, device=k.device).view(batch, -1)
    queries, keys = zip(*case.rows, strict=True)
    counts = [-(-n // page_size) for n in keys]
    pages = (
        sums(counts, x.q.device),
        torch.cat([row[:count] for row, count in zip(table, counts, strict=True)]),
        torch.tensor([(n - 1) % page_size + 1 for n in keys]).to(table),
    )
    q = x.q.reshape(-1, *x.q.shape[-2:])  # (batch * queries, heads, headdim)
    if case.longest[0] == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=case.group > 1
        )
        wrapper.plan(*pages, *heads, page_size, **options)
    else:
        bounds = sums(queries, x.q.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(bounds, *pages, *heads, page_size, causal=case.causal, **options)
    return lambda: wrapper.run(q, (k, v)).view(x.q.shape)
