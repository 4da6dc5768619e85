"""Attention problems, and those who compute them: this library, PyTorch, FlashAttention-3."""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
from benchmarks.report import OURS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MATMULS = {"forward": 2, "backward": 5, "both": 7}
STANDARD_MATRICES = 4  # about what standard attention holds at once, each of N x N elements

P = ParamSpec("P")
T = TypeVar("T")
Result = Tensor | tuple[Tensor, ...]


class Case(NamedTuple):
    """Self-attention of ``tokens`` tokens and ``width`` columns."""

    direction: str  # of MATMULS; backward is that alone
    dtype: str  # of DTYPES
    headdim: int
    causal: bool
    seqlen: int  # the longest, if varlen
    window: int = -1  # keys that a query sees to its left and, unless causal, to its right
    group: int = 1  # query heads of a key head
    varlen: bool = False  # sequences of random lengths, packed
    shortest: int = 64  # of the random lengths
    dropout_p: float = 0.0
    softcap: float = 0.0
    alibi: bool = False
    deterministic: bool = False
    tokens: int = 16384
    width: int = 2048

    @property
    def nheads(self) -> int:
        """A multiple of the group."""
        return self.width // self.headdim // self.group * self.group

    @property
    def nheads_kv(self) -> int:
        return self.nheads // self.group

    @property
    def window_size(self) -> tuple[int, int]:
        return self.window, 0 if self.causal else self.window

    @property
    def lengths(self) -> list[int]:
        """Of the sequences; the same for every run."""
        if not self.varlen:
            return [self.seqlen] * max(1, self.tokens // self.seqlen)
        draw = random.Random(0)
        lengths = [self.seqlen]
        while (rest := self.tokens - sum(lengths)) > 0:
            lengths.append(min(rest, draw.randint(min(self.shortest, self.seqlen), self.seqlen)))
        return lengths

    @property
    def flops(self) -> float:
        """Of the matrix products, over the visible pairs of a query and a key.

        As in the FlashAttention papers, a causal mask alone over equal lengths hides half of them.
        """
        if self.window < 0 and not self.varlen:
            pairs = sum(n**2 for n in self.lengths) * (0.5 if self.causal else 1.0)
        else:
            pairs = sum(visible_pairs(n, *self.window_size) for n in self.lengths)
        return MATMULS[self.direction] * 2.0 * self.nheads * self.headdim * pairs


def visible_pairs(seqlen: int, left: int, right: int) -> int:
    """Pairs (query, key) inside a window; -1 is unbounded."""
    hidden_diagonals = [max(seqlen - 1 - bound, 0) for bound in (left, right) if bound >= 0]
    return seqlen**2 - sum(n * (n + 1) // 2 for n in hidden_diagonals)


class Inputs(NamedTuple):
    """(batch, seqlen, heads, headdim), or (total, heads, headdim) with cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor | None
    alibi_slopes: Tensor | None  # (heads,)


def make_inputs(case: Case, device: str) -> Inputs:
    lengths = case.lengths
    rows = (sum(lengths),) if case.varlen else (len(lengths), case.seqlen)

    def random_heads(nheads: int, leaf: bool = True) -> Tensor:
        x = torch.randn(*rows, nheads, case.headdim, device=device, dtype=DTYPES[case.dtype])
        return x.requires_grad_(leaf and case.direction != "forward")

    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    slopes = 2.0 ** (-8 * torch.arange(1, case.nheads + 1, device=device) / case.nheads)
    return Inputs(
        q=random_heads(case.nheads),
        k=random_heads(case.nheads_kv),
        v=random_heads(case.nheads_kv),
        dout=random_heads(case.nheads, leaf=False),
        cu_seqlens=cu_seqlens if case.varlen else None,
        alibi_slopes=slopes if case.alibi else None,
    )


@dataclass(frozen=True)
class Provider:
    """Who computes attention.

    ``forward`` returns the output in the layout of the inputs, differentiable, and raises where it
    cannot run the case. Forward and backward both run inside ``context``.
    """

    forward: Callable[[Case, Inputs], Tensor]
    context: Callable[[Case], AbstractContextManager[object]]


def bind(provider: Provider, case: Case, inputs: Inputs) -> Callable[[], Result]:
    """Return the function whose time or memory is that of the case; the backward has its graph."""
    leaves = inputs.q, inputs.k, inputs.v
    run: Callable[[], Result]
    if case.direction == "backward":
        with provider.context(case):
            out = provider.forward(case, inputs)
        run = partial(torch.autograd.grad, out, leaves, inputs.dout, retain_graph=True)
    elif case.direction == "both":

        def run() -> Result:
            return torch.autograd.grad(provider.forward(case, inputs), leaves, inputs.dout)
    else:
        run = partial(provider.forward, case, inputs)

    def call() -> Result:
        with provider.context(case):
            return run()

    return call


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
        # Counts as a peer: the ratio to it is what determinism costs.
        "sm80_ordered": _ours("sm80", deterministic=True),
        "math": _standard(math_gib),
        "efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "flash": _flash(),
        "flash_op": Provider(_flash_operator, _torch_context),
        "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
        "fa3": Provider(partial(_fa3, library=fa3_library), lambda case: nullcontext()),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``chosen_providers``; the caller sets the defaults."""
    add = parser.add_argument
    add("--providers", nargs="+", choices=list(find_providers()), help="in the order of the table")
    add("--fa3-library", metavar="PATH", help="adds fa3: registers flash_attn_3's fwd and bwd")
    add("--math-gib", type=float, help="math is skipped where its matrices take more")


def chosen_providers(arguments: argparse.Namespace) -> dict[str, Provider]:
    everyone = find_providers(arguments.math_gib, arguments.fa3_library)
    names = [*arguments.providers, *(["fa3"] if arguments.fa3_library else [])]
    return {name: everyone[name] for name in names}


def _ours(backend: str, deterministic: bool = False) -> Provider:
    def forward(case: Case, x: Inputs) -> Tensor:
        options: dict[str, Any] = {
            "dropout_p": case.dropout_p,
            "causal": case.causal,
            "window_size": case.window_size,
            "softcap": case.softcap,
            "alibi_slopes": x.alibi_slopes,
            "deterministic": case.deterministic or deterministic,
        }
        if x.cu_seqlens is None:
            return flash_attn.flash_attn_func(x.q, x.k, x.v, **options)
        lengths = (x.cu_seqlens, x.cu_seqlens, case.seqlen, case.seqlen)
        return flash_attn.flash_attn_varlen_func(x.q, x.k, x.v, *lengths, **options)

    return Provider(forward, lambda case: flash_attn.use_backend(backend))


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
    def forward(case: Case, x: Inputs) -> Tensor:
        _refuse(case, "window", "varlen", "softcap", "alibi")
        out = scaled_dot_product_attention(
            x.q.transpose(1, 2),
            x.k.transpose(1, 2),
            x.v.transpose(1, 2),
            dropout_p=case.dropout_p,
            is_causal=case.causal,
            enable_gqa=case.group > 1,
        )
        return out.transpose(1, 2)

    return Provider(forward, lambda case: _torch_context(case, backend))


def _standard(limit_gib: float) -> Provider:
    """PyTorch's attention that forms the N x N matrices."""
    sdpa = _sdpa(SDPBackend.MATH)

    def forward(case: Case, x: Inputs) -> Tensor:
        matrix = sum(n**2 for n in case.lengths) * case.nheads * x.q.itemsize
        if STANDARD_MATRICES * matrix > limit_gib * 2**30:
            raise NotImplementedError(f"N x N matrices of more than {limit_gib:g} GiB")
        return sdpa.forward(case, x)

    return Provider(forward, sdpa.context)


def _flash() -> Provider:
    """PyTorch's FlashAttention-2: windows and packed sequences only through its operator."""
    sdpa = _sdpa(SDPBackend.FLASH_ATTENTION)

    def forward(case: Case, x: Inputs) -> Tensor:
        through_operator = case.window >= 0 or case.varlen
        return (_flash_operator if through_operator else sdpa.forward)(case, x)

    return Provider(forward, sdpa.context)


def _flash_operator(case: Case, x: Inputs) -> Tensor:
    _refuse(case, "softcap", "alibi")
    left, right = case.window_size
    return torch.ops.aten._flash_attention_forward(
        x.q,
        x.k,
        x.v,
        x.cu_seqlens,
        x.cu_seqlens,
        case.seqlen,
        case.seqlen,
        case.dropout_p,
        case.causal,
        False,  # return_debug_mask
        window_size_left=left,
        window_size_right=right,
    )[0]


@cache
def _load_library(path: str) -> None:
    torch.ops.load_library(path)


def _fa3(case: Case, x: Inputs, library: str | None) -> Tensor:
    if library is None:
        raise NotImplementedError("no library given (--fa3-library)")
    _refuse(case, "dropout_p", "alibi")
    _load_library(library)
    left, right = case.window_size
    longest = None if x.cu_seqlens is None else case.seqlen
    options = {
        "cu_seqlens_q": x.cu_seqlens,
        "cu_seqlens_k": x.cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "is_causal": case.causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": case.softcap,  # refused by builds without it
    }
    return _FlashAttention3.apply(x.q, x.k, x.v, options, case.deterministic)


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
