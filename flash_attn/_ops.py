"""The operators behind the public functions: torch.library ops with fakes and autograd.

Each operator has one plain implementation. An eager call on ordinary tensors runs it directly
(through an autograd.Function if a gradient is wanted): the dispatcher costs more than a small
kernel. Whenever something must see the operator (torch.compile, a dispatch mode, a tensor subclass,
a functorch transform), the call goes through ``torch.ops.flash_attn`` instead. Both ways share one
setup and one backward.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_attn import _arguments, _backends
from flash_attn._arguments import Attention
from flash_attn._backends import cuda
from flash_attn._backends.philox import draw_rng_state
from flash_attn._backends.tiled import probs_seqlens

_ORDINARY = (Tensor, torch.nn.Parameter)

# What ran a dense forward, by all that its checks and the choice of a kernel depend on: shapes,
# strides, alignment, dtypes, devices, options. A model makes the same call over and over.
_launches: dict[bytes | None, cuda.Launch | None] = {}
_MOST_LAUNCHES = 1024


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
    s_aux: Tensor | None = None,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward over dense sequences.

    Returns
    -------
    out : (batch, seqlen_q, nheads, headdim_v)
    softmax_lse : (batch, nheads, seqlen_q) float32, natural log
    S_dmask : (batch, nheads, seqlen_q, seqlen_k) with both lengths rounded up to 128; empty unless
        ``return_softmax`` and ``dropout_p > 0``
    rng_state : (2,) int64, seed and offset of the dropout mask; empty without dropout
    """
    key = None
    if alibi_slopes is None and s_aux is None and out is None:
        key = cuda.call_key(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
            deterministic,
            cuda.settings_version,
        )
        launch = _launches.get(key)
        if launch is not None:
            return (*launch(q, k, v), *_nothing(q.dtype, q.device))
    options = _arguments.options(
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic,
    )
    problem = _arguments.dense(
        q,
        k,
        v,
        options,
        alibi_slopes,
        s_aux,
    )
    if key is not None and key not in _launches:
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = _backends.launch(problem)
    return _run_forward(problem, return_softmax, out)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    s_aux: Tensor | None = None,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward over packed sequences; results as of ``_flash_attn_forward``, lse (nheads, total_q).

    ``zero_tensors`` is accepted for compatibility: rows outside every sequence are always zero.
    """
    options = _arguments.options(
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic,
    )
    problem = _arguments.varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        options,
        alibi_slopes,
        s_aux,
        block_table=block_table,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
    )
    return _run_forward(problem, return_softmax, out)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Tensor:
    """Write dq, dk and dv (any strides) from the caller's ``out`` and ``softmax_lse``.

    Returns
    -------
    softmax_d : shape of ``softmax_lse``
        rowsum(dout * out), less ``dlse`` (the gradient that arrives through the log-sum-exp) if
        given.
    """
    options = _arguments.options(
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic,
    )
    problem = _arguments.dense(
        q,
        k,
        v,
        options,
        alibi_slopes,
    )
    return _run_backward(problem, dout, out, softmax_lse, (dq, dk, dv), rng_state, dlse)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
    dlse: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor:
    """``_flash_attn_backward`` over packed sequences; rows outside every sequence get zero."""
    options = _arguments.options(
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic,
    )
    problem = _arguments.varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        options,
        alibi_slopes,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
    )
    return _run_backward(problem, dout, out, softmax_lse, (dq, dk, dv), rng_state, dlse)


def _flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: Tensor | None,
    num_splits: int,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Append to the cache in place, then attend to it; returns out and softmax_lse. No gradient."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(
            f"num_splits must be an int of at least 0 (0: the library chooses), got {num_splits!r}"
        )
    options = _arguments.options(
        0.0, softmax_scale, causal, window_size_left, window_size_right, softcap, False
    )
    problem, new = _arguments.with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        options,
        alibi_slopes,
        s_aux,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
    )
    if out is not None:
        _arguments.check_out(q, v_cache, out)  # before the cache changes
    if new is not None and not _arguments.has_no_data(q):
        problem = _backends.append(problem, new)
    return _run_forward(problem, return_softmax=False, out=out)[:2]


# ---- running a problem ---------------------------------------------------------------------------


def _run_forward(
    problem: Attention, return_softmax: bool, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, dropout = problem.q, problem.dropout_p > 0
    return_softmax = return_softmax and dropout
    if _arguments.has_no_data(q):
        probs_shape = (problem.batch, problem.nheads, *probs_seqlens(problem))
        return (
            q.new_empty(problem.out_shape),
            q.new_empty(problem.lse_shape, dtype=problem.compute_dtype),
            q.new_empty(probs_shape if return_softmax else 0),
            q.new_empty(2 if dropout else 0, dtype=torch.int64),
        )
    if out is not None:
        _arguments.check_out(q, problem.v, out)
    rng_state = draw_rng_state(q.device) if dropout else None
    result, lse, probs = _backends.forward(problem, rng_state, return_softmax, out)
    no_probs, no_state = _nothing(q.dtype, q.device)
    return (
        result,
        lse,
        no_probs if probs is None else probs,
        no_state if rng_state is None else rng_state,
    )


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The empty S_dmask and rng_state of a call without dropout: always the same two tensors."""
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=dtype, device=device)
        return empty, torch.empty(0, dtype=torch.int64, device=device)


def _run_backward(
    problem: Attention,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    rng_state: Tensor | None,
    dlse: Tensor | None,
) -> Tensor:
    dq, dk, dv = (
        torch.empty_like(like) if gradient is None else gradient
        for gradient, like in zip(gradients, (problem.q, problem.k, problem.v), strict=True)
    )
    _arguments.check_backward(problem, dout, out, lse, (dq, dk, dv), rng_state, dlse)
    if _arguments.has_no_data(problem.q):
        return torch.empty_like(lse)
    return _backends.backward(problem, dout, out, lse, dlse, dq, dk, dv, rng_state)


# ---- registration and routing --------------------------------------------------------------------


def _needs_dispatcher(q: Any) -> bool:
    return torch.compiler.is_compiling() or (
        isinstance(q, Tensor)  # anything else is an error, which the plain implementation explains
        and (
            type(q) not in _ORDINARY
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._are_functorch_transforms_active()
        )
    )


def _wants_gradient(args: Sequence[Any], tensors: Sequence[int]) -> bool:
    if torch.is_grad_enabled():
        for i in tensors:  # faster than any() and isinstance, on every call's path
            if getattr(args[i], "requires_grad", False):
                return True
    return False


def _operator(
    plain: Callable[..., Any],
    mutates: Sequence[str] = (),
    backward_of: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register ``plain`` as torch.ops.flash_attn.<its name>; return what routes calls to it.

    ``out`` is no part of the registered operator, whose results must not alias its arguments.
    ``backward_of`` is the routed operator that computes its gradients.
    """
    signature = inspect.signature(plain)
    parameters = [
        p for p in signature.parameters.values() if p.name != "out" or p.default is p.empty
    ]
    names = [p.name for p in parameters]
    tensors = [i for i, p in enumerate(parameters) if p.annotation in (Tensor, Tensor | None)]
    public_signature = signature.replace(parameters=parameters)

    @functools.wraps(plain)
    def registered(*args: Any) -> Any:
        return plain(*args)

    vars(registered)["__signature__"] = public_signature
    defaults = {p.name: p.default for p in parameters}

    def values_of(given: int, kwargs: dict[str, Any]) -> list[Any]:
        """The parameters after the first, given ones. (inspect's own binding takes 20 us more.)"""
        rest = names[given:]
        values = [kwargs[name] if name in kwargs else defaults[name] for name in rest]
        if any(x is inspect.Parameter.empty for x in values) or not kwargs.keys() <= set(rest):
            public_signature.bind(*[None] * given, **kwargs)  # raises what says what is wrong
        return values

    definition = torch.library.custom_op(
        f"flash_attn::{plain.__name__}", registered, mutates_args=mutates
    )
    definition.register_fake(plain)
    op = getattr(torch.ops.flash_attn, plain.__name__)

    with_gradient: Callable[..., Any] | None = None
    if backward_of is not None:
        setup_context = functools.partial(_setup_context, names)
        backward = functools.partial(_backward, names, backward_of)
        definition.register_autograd(backward, setup_context=setup_context)
        with_gradient = _autograd_function(plain, setup_context, backward)

    @functools.wraps(plain)
    def routed(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None) if "out" not in names else None
        if kwargs or len(args) < len(names):
            args = (*args, *values_of(len(args), kwargs))
        gradient = _wants_gradient(args, tensors)
        if out is not None and gradient:
            raise ValueError(
                "out must be None where a gradient is wanted, got a tensor; use torch.no_grad()"
            )
        if _needs_dispatcher(args[0]) or (gradient and with_gradient is None):
            # An operator without a gradient: the dispatcher makes its results refuse a backward.
            if out is not None:  # copy_ would broadcast and convert
                _arguments.check_out(args[0], args[2], out)
            result = op(*map(_as_tensor_of(args[0]), names, args))
            return result if out is None else (out.copy_(result[0]), *result[1:])
        if gradient and with_gradient is not None:
            return with_gradient(*args)
        return plain(*args) if out is None else plain(*args, out=out)

    vars(routed)["__signature__"] = public_signature
    return routed


def _autograd_function(
    plain: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """``plain`` with a gradient, as the apply of an autograd.Function."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = plain(*args)
        setup_context(ctx, args, output)
        return output

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(once_differentiable(backward)),
    }
    function = type(plain.__name__, (torch.autograd.Function,), members)
    # Its own apply looks for functorch transforms, of which _needs_dispatcher knows: 2.5 us.
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def _as_tensor_of(q: Tensor) -> Callable[[str, Any], Any]:
    """The plain implementation takes an int cache_seqlens, the operator's schema does not."""

    def convert(name: str, value: Any) -> Any:
        if name == "cache_seqlens" and isinstance(value, int):
            return torch.full((q.shape[0],), value, dtype=torch.int32, device=q.device)
        return value

    return convert


def _setup_context(
    names: list[str], ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    out, lse, probs, rng_state = output
    ctx.mark_non_differentiable(probs, rng_state)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        *(x if isinstance(x, Tensor) else None for x in inputs), out, lse, rng_state
    )
    ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]


def _backward(
    names: list[str],
    backward_of: Callable[..., Any],
    ctx: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
    *_: Tensor | None,
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, rng_state = ctx.saved_tensors
    inputs = dict(
        zip(
            names,
            (o if t is None else t for t, o in zip(tensors, ctx.options, strict=True)),
            strict=False,
        )
    )
    # The dispatcher leaves out trailing arguments that equal their defaults.
    needed = {n for n, needs in zip(names, ctx.needs_input_grad, strict=False) if needs}
    if inputs.get("block_table") is not None:
        raise NotImplementedError(
            "block_table has no backward: gather the pages into k and v first"
        )
    if "alibi_slopes" in needed:
        raise NotImplementedError("alibi_slopes has no gradient: pass alibi_slopes.detach()")

    gradients = {f"d{name}": torch.empty_like(inputs[name]) for name in "qkv"}
    taken = _parameter_names(backward_of)
    delta = backward_of(
        dout=torch.zeros_like(out) if dout is None else dout,
        out=out,
        softmax_lse=lse,
        rng_state=rng_state if inputs["dropout_p"] > 0 else None,
        dlse=dlse,
        **gradients,
        **{name: value for name, value in inputs.items() if name in taken},
    )
    s_aux = inputs.get("s_aux")
    if s_aux is not None and "s_aux" in needed:
        gradients["ds_aux"] = _sink_gradient(s_aux, lse, delta)
    return tuple(gradients.get(f"d{name}") for name in names[: len(ctx.options)])


@functools.cache
def _parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _sink_gradient(s_aux: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sink has P = exp(s_aux - lse) and value zero: dS = -P * delta, summed over rows."""
    head = lse.dim() - 2
    logit = s_aux.to(lse.dtype)[:, None]
    p = torch.exp(logit - lse).masked_fill(lse == -torch.inf, 0.0)  # rows outside every sequence
    rows = [dim for dim in range(lse.dim()) if dim != head]
    return -(p * delta).sum(rows).to(s_aux.dtype)


flash_attn_backward = _operator(_flash_attn_backward, mutates=("dq", "dk", "dv"))
flash_attn_varlen_backward = _operator(_flash_attn_varlen_backward, mutates=("dq", "dk", "dv"))
flash_attn_forward = _operator(_flash_attn_forward, backward_of=flash_attn_backward)
flash_attn_varlen_forward = _operator(
    _flash_attn_varlen_forward, backward_of=flash_attn_varlen_backward
)
flash_attn_with_kvcache = _operator(_flash_attn_with_kvcache, mutates=("k_cache", "v_cache"))
