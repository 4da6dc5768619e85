"""The operators behind the public functions: torch.library ops with fakes and autograd.

Each operator has one plain implementation. An eager call on ordinary tensors runs it directly
(through an autograd.Function if a gradient is wanted): the dispatcher costs more than a small
kernel. Whenever something must see the operator (torch.compile, a dispatch mode, a tensor
subclass), the call goes through ``torch.ops.flash_attn`` instead. Both ways share one setup and one
backward.

What the kernels have is the first derivative, in reverse mode. Where the tiled backend runs, all
others are those of its PyTorch operations; elsewhere asking for one raises NotImplementedError.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn import _arguments, _backends, _numbers
from flash_attn._arguments import FP8, Attention
from flash_attn._backends import Remember, cuda, tiled
from flash_attn._backends.philox import draw_rng_state
from flash_attn._differentiation import NO_BATCHES, is_batch, without_autocast

_unwrap_if_dead = torch._C._functorch.unwrap_if_dead

# Types of arguments that hide nothing: kernels may read these tensors where they lie.
_ORDINARY = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float))

# out, softmax_lse and S_dmask, which is None unless it was asked for and there is dropout.
Forward = tuple[Tensor, Tensor, Tensor | None]

_MOST_LAUNCHES = 1024  # that are remembered of an operator


# ---- arguments of the operators ------------------------------------------------------------------


def _dense_problem(
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
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    fp8_level: int = 0,
    rng_state: Tensor | None = None,
    out: Tensor | None = None,
) -> Attention:
    """Forward over dense sequences.

    ``rng_state``, (2,) int64, is the seed and offset of the dropout mask; None: drawn from
    PyTorch's generator. With an ``fp8_level`` (1, 2 or 3 of FP8_LEVELS) q, k and v are quantised
    first; the gradients are those of 16 bits, from this out and softmax_lse.

    Returns
    -------
    out : (batch, seqlen_q, nheads, headdim_v)
    softmax_lse : (batch, nheads, seqlen_q) float32, natural log
    S_dmask : (batch, nheads, seqlen_q, seqlen_k) with both lengths rounded up to 128; empty unless
        ``return_softmax`` and ``dropout_p > 0``
    rng_state : (2,) int64, seed and offset of the dropout mask; of no meaning without dropout
    """
    numbers = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    options = _arguments.options(*numbers, deterministic)
    descales = (q_descale, k_descale, v_descale)
    return _arguments.dense(q, k, v, options, alibi_slopes, s_aux, descales, fp8_level)


def _varlen_problem(
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
    num_splits: int = 0,
    s_aux: Tensor | None = None,
    deterministic: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    fp8_level: int = 0,
    rng_state: Tensor | None = None,
    out: Tensor | None = None,
) -> Attention:
    """Forward over packed sequences; results as over dense ones, softmax_lse (nheads, total_q).

    ``zero_tensors`` is accepted for compatibility: rows outside every sequence are always zero.
    """
    if _numbers.integer("num_splits", num_splits) > 1:
        raise RuntimeError(f"num_splits > 1 is not supported, got {num_splits}")
    numbers = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    options = _arguments.options(*numbers, deterministic)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    descales = (q_descale, k_descale, v_descale)
    keys = {"block_table": block_table, "leftpad_k": leftpad_k, "seqused_k": seqused_k}
    return _arguments.varlen(
        q, k, v, *lengths, options, alibi_slopes, s_aux, descales, fp8_level, **keys
    )


# ---- plain implementations -----------------------------------------------------------------------


def _dense_forward(*arguments: Any, remember: Remember | None = None) -> Forward:
    return_softmax, *_, rng_state, out = arguments[10:]
    return _run_forward(_dense_problem(*arguments), rng_state, return_softmax, out, remember)


def _varlen_forward(*arguments: Any, remember: Remember | None = None) -> Forward:
    return_softmax, *_, rng_state, out = arguments[14:]
    return _run_forward(_varlen_problem(*arguments), rng_state, return_softmax, out, remember)


def _dense_backward(
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
    *,
    remember: Remember | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write dq, dk and dv (any strides) from the caller's ``out`` and ``softmax_lse``.

    Returns
    -------
    dq, dk, dv : shapes of q, k, v
        Those given, or new ones where None.
    softmax_d : shape of ``softmax_lse``
        rowsum(dout * out), less ``dlse`` (the gradient that arrives through the log-sum-exp) if
        given.
    """
    numbers = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    options = _arguments.options(*numbers, deterministic)
    problem = _arguments.dense(q, k, v, options, alibi_slopes)
    return _run_backward(problem, dout, out, softmax_lse, (dq, dk, dv), rng_state, dlse, remember)


def _varlen_backward(
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
    *,
    remember: Remember | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same over packed sequences; rows outside every sequence get zero."""
    numbers = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    options = _arguments.options(*numbers, deterministic)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    problem = _arguments.varlen(
        q, k, v, *lengths, options, alibi_slopes, leftpad_k=leftpad_k, seqused_k=seqused_k
    )
    return _run_backward(problem, dout, out, softmax_lse, (dq, dk, dv), rng_state, dlse, remember)


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
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    *,
    remember: Remember | None = None,
) -> tuple[Tensor, Tensor]:
    """Append to the cache in place, then attend to it; returns out and softmax_lse."""
    num_splits = _numbers.integer("num_splits", num_splits)
    if num_splits < 0:
        raise ValueError(
            f"num_splits must be at least 0 (0: the library chooses), got {num_splits}"
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
        descales=(q_descale, k_descale, v_descale),
    )
    if out is not None:  # before the cache changes
        _arguments.check_destination("out", out, q, problem.out_shape)
    if new is not None and not _arguments.has_no_data(q):
        problem, remember = _backends.append(problem, new, remember)
    problem = problem._replace(num_splits=num_splits)
    if out is not None:
        remember = None
    return _run_forward(problem, None, False, out, remember)[:2]


def remembering(
    checked: Callable[..., Any],
    signature: inspect.Signature,
    behind: tuple[Any, ...] = (),
    destination: str | None = None,
    **renamed: str,
) -> Callable[..., Any]:
    """``checked``, but a call like an earlier one is launched again: a model makes the same ones
    over and over.

    Alike are calls of the same shapes, strides, alignment, dtypes, devices and numbers: all that
    the checks and the choice of a kernel depend on. The arguments have the names that kernels know
    them by, or are ``renamed``; ``behind`` follows the results of a launch. Where the argument
    ``destination`` is given, it is the first result, and a launch returns the others.
    """
    places = {name: i for i, name in enumerate(signature.parameters)}
    i_destination = None if destination is None else places[destination]
    places |= {name: places[argument] for name, argument in renamed.items()}
    launches: dict[bytes | None, cuda.AnyLaunch] = {}

    def plain(*arguments: Any) -> Any:
        key = cuda.call_key(arguments, cuda.state)
        launch = launches.get(key)
        if launch is not None:
            results = launch(arguments)
            if i_destination is None or (out := arguments[i_destination]) is None:
                return (*results, *behind)
            cuda.count_writes((out,))
            return (out, *results, *behind)
        if key is None:
            return checked(*arguments)

        def remember(prepared: cuda.AnyPrepared) -> None:
            if (launch := cuda.launch_among(prepared, arguments, places)) is not None:
                if len(launches) >= _MOST_LAUNCHES:
                    launches.clear()
                launches[key] = launch

        return checked(*arguments, remember=remember)

    vars(plain)["launches"] = launches
    return plain


# ---- running a problem ---------------------------------------------------------------------------


def _run_forward(
    problem: Attention,
    rng_state: Tensor | None,
    return_softmax: Any,
    out: Tensor | None,
    remember: Remember | None = None,
) -> Forward:
    q, dropout = problem.q, problem.dropout_p > 0
    if dropout and rng_state is None:
        raise ValueError("rng_state must be given to the operator when dropout_p > 0, got None")
    _arguments.check_rng_state(problem, rng_state)
    return_softmax = return_softmax and dropout
    if out is not None:
        _arguments.check_destination("out", out, q, problem.out_shape)
        if problem.is_fp8:
            remember = None
    if _arguments.has_no_data(q):
        probs_shape = (problem.batch, problem.nheads, *tiled.probs_seqlens(problem))
        return (
            q.new_empty(problem.out_shape, dtype=problem.out_dtype) if out is None else out,
            q.new_empty(problem.lse_shape, dtype=problem.compute_dtype),
            q.new_empty(probs_shape) if return_softmax else None,
        )
    return _backends.forward(problem, rng_state, return_softmax, out, remember)


def _run_backward(
    problem: Attention,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    rng_state: Tensor | None,
    dlse: Tensor | None,
    remember: Remember | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if gradients != (None, None, None):
        remember = None
    dq, dk, dv = (
        torch.empty_like(like) if gradient is None else gradient
        for gradient, like in zip(gradients, (problem.q, problem.k, problem.v), strict=True)
    )
    _arguments.check_backward(problem, dout, out, lse, (dq, dk, dv), rng_state, dlse)
    if _arguments.has_no_data(problem.q):
        return dq, dk, dv, torch.empty_like(lse, memory_format=torch.contiguous_format)
    delta = _backends.backward(problem, dout, out, lse, dlse, dq, dk, dv, rng_state, remember)
    return dq, dk, dv, delta


def complete(
    out: Tensor, lse: Tensor, probs: Tensor | None, rng_state: Tensor | None
) -> tuple[Tensor, ...]:
    """A routed forward's results with a tensor for each: what has no meaning is a new one."""
    return (
        out,
        lse,
        out.new_empty(0) if probs is None else probs,
        lse.new_empty(2, dtype=torch.int64) if rng_state is None else rng_state,
    )


# ---- registration and routing --------------------------------------------------------------------

# torch.compiler.disable imports the compiler, which takes as long as all of torch. PyTorch's own
# code has this one, which does so when the function is called.
not_compiled: Callable[..., Any] = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """That of an operator: without what is for keywords alone."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return signature.replace(parameters=parameters)


def _operator(
    name: str,
    plain: Callable[..., Any],
    arguments: Callable[..., Any],
    results: Any,
    destinations: dict[str, Callable[[list[Any]], tuple[int, ...]]],
    backward_of: Callable[..., Any] | None = None,
    no_gradient: str = "",
    mutates: Sequence[str] = (),
) -> Callable[..., Any]:
    """Register ``plain`` as torch.ops.flash_attn.<name>; return what routes calls to it.

    The signature is that of ``arguments``; ``results`` are the types of what the operator returns.
    The ``destinations`` (name: shape, from the arguments), which the first results are written to,
    are no part of the operator, whose results must not alias its arguments. Of an attention,
    ``arguments`` makes the problem, ``backward_of`` is the routed operator of its gradients, and
    the routed function also returns the rng_state. Others say why they have no gradient.
    """
    signature = _signature(arguments)
    names = list(signature.parameters)
    defaults = [p.default for p in signature.parameters.values()]
    annotations = [p.annotation for p in signature.parameters.values()]
    tensors = [i for i, kind in enumerate(annotations) if kind in (Tensor, Tensor | None)]
    numbers = [
        (i, names[i], kind if isinstance(kind, type) else float, _numbers.READERS[kind])
        for i, kind in enumerate(annotations)
        if kind in _numbers.READERS
    ]
    numbers_of = operator.itemgetter(*(i for i, *_ in numbers))
    first_written = min(map(names.index, destinations))
    end_written = first_written + len(destinations)
    is_attention = backward_of is not None
    i_dropout, i_scale, i_softmax, i_state = (
        names.index(x) if is_attention else 0
        for x in ("dropout_p", "softmax_scale", "return_softmax", "rng_state")
    )
    i_lengths = names.index("cache_seqlens") if "cache_seqlens" in names else None

    def values_of(given: int, kwargs: dict[str, Any]) -> list[Any]:
        """The parameters after the first, given ones. (inspect's own binding takes 20 us more.)"""
        rest = range(given, len(names))
        values = [kwargs[names[i]] if names[i] in kwargs else defaults[i] for i in rest]
        unknown = [name for name in kwargs if name not in names[given:]]
        if unknown or any(x is inspect.Parameter.empty for x in values):
            signature.bind(*[None] * given, **kwargs)  # raises what says what is wrong
        return values

    def taken(args: Sequence[Any]) -> list[Any]:
        """The operator's arguments: all but the destinations."""
        return [*args[:first_written], *args[end_written:]]

    def plain_of(operands: Sequence[Any]) -> Any:
        unwritten = [None] * len(destinations)
        return plain(*operands[:first_written], *unwritten, *operands[first_written:])

    def registered(*operands: Any) -> Any:
        """The operator: its last operands may be left out, and all of its results are tensors."""
        operands = (*operands, *taken(defaults)[len(operands) :])
        first, *others = plain_of(operands)
        return first, *(first.new_empty(0) if x is None else x for x in others)

    def dispatched(*operands: Any) -> Any:
        if forward_ad._current_level >= 0:  # the tangents of a compiled call are not seen here
            raise NotImplementedError(no_gradient)
        return registered(*operands)

    vars(dispatched)["__signature__"] = signature.replace(
        parameters=taken(list(signature.parameters.values())), return_annotation=results
    )
    definition = torch.library.custom_op(f"flash_attn::{name}", dispatched, mutates_args=mutates)
    definition.register_fake(registered)
    op = getattr(torch.ops.flash_attn, name)

    setup_context: Callable[..., None] = _save_nothing
    backward: Callable[..., Any] = functools.partial(_refuse, no_gradient)
    if backward_of is not None:
        operand_names = taken(names)
        positions = [operand_names.index(names[i]) for i in tensors if names[i] in operand_names]
        setup_context = functools.partial(_save_for_backward, positions)
        gradients_of = _gradients_function(operand_names, arguments, backward_of)
        backward = functools.partial(_backward, taken(defaults), positions, gradients_of)
        definition.register_autograd(backward, setup_context=setup_context)
        no_gradient = f"{name} has no forward mode in its kernels and in torch.compile; {_OTHERS}"
    elif not mutates:
        definition.register_autograd(backward, setup_context=setup_context)
    else:  # another operator where nothing is appended, which writes to nothing
        reading = torch.library.custom_op(f"flash_attn::{name}_read", dispatched, mutates_args=())
        reading.register_fake(registered)
        reading.register_autograd(backward, setup_context=setup_context)
        read_op = getattr(torch.ops.flash_attn, f"{name}_read")
        i_new = taken(names).index("k")

    def seen(operands: Sequence[Any]) -> Any:
        """The operator, for what must see it."""
        return (read_op if mutates and operands[i_new] is None else op)(*operands)

    def run(*operands: Any) -> Any:
        return seen(operands) if _is_watched(operands) else plain_of(operands)

    function = _autograd_function(name, run, setup_context, backward, no_gradient)
    # Of its own, apply looks for functorch transforms, which `routed` has done: 2.5 us.
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    if backward_of is not None:
        apply_eager = _eager_function(name, plain, len(names), positions, gradients_of)

    def derived(args: list[Any], watched: bool) -> list[Any]:
        """A call that a derivative is wanted of, or that something must see."""
        if is_attention and isinstance(args[i_scale], Tensor):
            args[0], args[i_scale] = _carry_scale(args[0], args[i_scale])
        for i, parameter, plain_type, read in numbers:
            if type(args[i]) is not plain_type:
                args[i] = read(parameter, args[i])
        if i_lengths is not None:
            args[i_lengths] = _as_lengths(args[i_lengths], args[0])
        operands, given = taken(args), args[first_written:end_written]
        for destination, (parameter, shape_of) in zip(given, destinations.items(), strict=True):
            if destination is not None:  # copy_ would broadcast and convert
                _arguments.check_destination(parameter, destination, args[0], shape_of(args))
        if is_attention and given[0] is not None and wants_gradient(args, tensors):
            raise ValueError(
                "out must be None where a gradient is wanted, got a tensor; use torch.no_grad()"
            )
        output: Any
        if mutates and torch.compiler.is_compiling() and wants_gradient(args, tensors):
            raise NotImplementedError(f"{no_gradient}, and torch.no_grad() around a compiled call")
        functorch = _in_transform()
        if functorch and torch.compiler.is_compiling():
            torch.ops.flash_attn.refuse_transforms(torch.empty(0))
        if functorch or _has_tangent(operands):
            output = transformed(args, operands)
        else:
            # Here, since a Function's forward has no grad mode.
            for parameter in mutates if mutates and operands[i_new] is not None else ():
                _arguments.check_no_leaf(parameter, args[names.index(parameter)])
            output = seen(operands) if watched else apply(*operands)
        written: list[Any] = list(output)
        for i, destination in enumerate(given):
            if destination is not None:
                with torch.no_grad():
                    written[i] = destination.copy_(written[i])
        return written

    @not_compiled  # torch.compile would go on with the functions that this calls
    def transformed(args: list[Any], operands: list[Any]) -> Any:
        """A call under torch.func's transforms, or that forward mode runs through."""
        if mutates:
            raise NotImplementedError(no_gradient)
        if is_attention:
            problem = arguments(*args)
            if _backends.choose(problem) == "tiled" and not problem.is_fp8:
                return_softmax = args[i_softmax] and problem.dropout_p > 0
                return tiled.differentiable_forward(problem, args[i_state], return_softmax)
        return function.apply(*operands)

    @functools.wraps(arguments)
    def routed(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) < len(names):
            args = (*args, *values_of(len(args), kwargs))
        if is_attention and args[i_state] is None and _is_true(args[i_dropout]):
            if isinstance(args[0], Tensor):  # anything else is an error, which `arguments` explains
                args = (*args[:i_state], draw_rng_state(args[0].device), *args[i_state + 1 :])
        watched = (
            torch.compiler.is_compiling()
            or _is_watched(args)
            or torch._C._get_tracing_state() is not None  # torch.jit.trace records operators
        )
        special = (
            watched
            or torch._C._are_functorch_transforms_active()
            or (forward_ad._current_level >= 0 and _has_tangent(args))
            or (is_attention and isinstance(args[i_scale], Tensor))
        )
        output: Any
        if not special and not wants_gradient(args, tensors):
            output = plain(*args)
        elif not special and is_attention and args[-1] is None and _are_plain(numbers_of(args)):
            _refuse_gradient_in_fp8(args)
            output = apply_eager(args)
        else:
            if is_attention:
                _refuse_gradient_in_fp8(args)
            if watched:
                for i in tensors:
                    if isinstance(args[i], Tensor):
                        _arguments.check_strided(names[i], args[i])
            output = derived(list(args), watched)
        return (*output, args[i_state]) if is_attention else output

    vars(routed)["__signature__"] = signature
    return routed


def _are_plain(numbers: Sequence[Any]) -> bool:
    return _arguments.PLAIN_NUMBERS.issuperset(map(type, numbers))


def _is_true(value: Any) -> bool:
    """Whether it is; an array of several numbers is an error, which `arguments` explains."""
    try:
        return bool(value)
    except (RuntimeError, ValueError):
        return False


def _is_watched(args: Sequence[Any]) -> bool:
    """Whether something must see the operator: a dispatch mode, or a subclass of Tensor."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    if _ORDINARY.issuperset(map(type, args)):  # a third of the time of a loop, on every call's path
        return False
    return any(isinstance(x, Tensor) and type(x) not in _ORDINARY for x in args)


def _in_transform() -> bool:
    return torch._C._are_functorch_transforms_active()


# As torch.compiler.assume_constant_result marks it, which takes the import of the compiler, as long
# as that of torch. (The compiler guards the answer, but traces the question in newer ones only.)
vars(_in_transform)["_dynamo_marked_constant"] = True


def is_seen(args: Sequence[Any]) -> bool:
    """Whether something sees what a call does: the compiler, a dispatch mode, a transform, ..."""
    return (
        torch.compiler.is_compiling()
        or _is_watched(args)
        or torch._C._are_functorch_transforms_active()
        or _has_tangent(args)
    )


def wants_gradient(args: Sequence[Any], tensors: Sequence[int] | None = None) -> bool:
    """Whether autograd follows some of the arguments, or of those at ``tensors``."""
    if torch.is_grad_enabled():
        # Faster than any(), and None is slow to ask for its type: on every call's path.
        for i in range(len(args)) if tensors is None else tensors:
            x = args[i]
            if x is not None and isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


@torch.library.custom_op("flash_attn::refuse_transforms", mutates_args=())
def _refuse_transforms(nothing: Tensor) -> Tensor:
    """Raise what the compiler passes on: a RuntimeError of an operator.

    At any other it breaks the graph, and a graph break within torch.func's transforms gives
    gradients of zero (torch 2.11 and 2.13).
    """
    raise RuntimeError(
        "flash_attn has no torch.func transforms in torch.compile: compile what is in the transform"
    )


_refuse_transforms.register_fake(_refuse_transforms._init_fn)


def _has_tangent(given: Sequence[Any]) -> bool:
    """Whether forward-mode differentiation runs through one of them."""
    return forward_ad._current_level >= 0 and any(map(_numbers.has_tangent, given))


def _refuse_gradient_in_fp8(args: Sequence[Any]) -> None:
    q = args[0]
    if isinstance(q, Tensor) and q.dtype == FP8 and (wants_gradient(args) or _has_tangent(args)):
        raise NotImplementedError(
            f"q, k and v of {FP8} have no derivative: give flash_attn.fp8.flash_attn_fp8_func "
            "those of 16 bits, or call within torch.no_grad()"
        )


def _carry_scale(q: Tensor, scale: Any) -> tuple[Tensor, Any]:
    """q, through which a softmax_scale has its derivative, if one is wanted; the scale without."""
    if not wants_gradient((scale,)) and not _has_tangent((scale,)):
        return q, scale
    if scale.numel() != 1 or scale == 0:
        raise ValueError(
            "softmax_scale must be one number, not 0, where its gradient is wanted, got a tensor "
            f"of shape {tuple(scale.shape)}"
        )
    scale = scale.reshape(())
    value = scale.detach()
    if forward_ad._current_level >= 0:
        value = forward_ad.unpack_dual(value).primal
    return (q.to(torch.promote_types(q.dtype, torch.float32)) * (scale / value)).to(q.dtype), value


def _as_lengths(cache_seqlens: Any, q: Tensor) -> Tensor | None:
    """The plain implementation takes an int cache_seqlens, the operator's schema does not."""
    if cache_seqlens is None or (isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0):
        return cache_seqlens
    length = _numbers.integer("cache_seqlens", cache_seqlens)
    length = max(-1, min(length, _arguments.MOST_LENGTH))  # too much is an error, below 0 is -1
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _autograd_function(
    name: str,
    run: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    no_forward_mode: str,
) -> Any:
    """``run`` with a gradient, as a subclass of torch.autograd.Function."""

    function: Any

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """One call after the other: their operands need not lie at strides of one tensor."""
        calls = []
        for b in range(info.batch_size):
            slices = zip(args, in_dims, strict=True)
            calls.append(
                function.apply(*(x if dim is None else x.select(dim, b) for x, dim in slices))
            )
        columns = zip(*calls, strict=True)
        outputs = tuple(None if column[0] is None else torch.stack(column) for column in columns)
        return outputs, tuple(None if output is None else 0 for output in outputs)

    members = {
        "forward": staticmethod(run),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "jvp": staticmethod(functools.partial(_refuse, no_forward_mode)),
        "vmap": staticmethod(vmap),
    }
    function = type(name, (torch.autograd.Function,), members)
    return function


def _refuse(why: str, *_: Any) -> None:
    raise NotImplementedError(why)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _save_for_backward(
    positions: Sequence[int], ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    """Save out, log-sum-exp and the tensors among the inputs, which are at these positions."""
    out, lse, probs = output
    if probs is not None:
        ctx.mark_non_differentiable(probs)
    ctx.set_materialize_grads(False)
    ctx.options = options = list(inputs)
    given = len(options)
    saved = [out, lse]
    for i in positions:
        if i < given:  # the dispatcher leaves out the last if they equal their defaults
            saved.append(options[i])
            options[i] = None
    ctx.save_for_backward(*saved)


def _gradients_function(
    names: list[str], problem_of: Callable[..., Attention], backward_of: Callable[..., Any]
) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradients of q, k, v and s_aux of an operator whose operands have these names."""
    i_slopes, i_sinks = names.index("alibi_slopes"), names.index("s_aux")
    i_table = names.index("block_table") if "block_table" in names else None
    own = ("dout", "out", "softmax_lse", "dlse", "dq", "dk", "dv")
    sources = [
        (name, None if name in own else names.index(name))
        for name in inspect.signature(backward_of).parameters
    ]

    def gradients(
        inputs: Sequence[Any],
        needed: Sequence[bool],  # may end before the inputs do
        out: Tensor,
        lse: Tensor,
        dout: Tensor | None,
        dlse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        if i_table is not None and inputs[i_table] is not None:
            raise NotImplementedError(
                "block_table has no backward: gather the pages into k and v first"
            )
        if i_slopes < len(needed) and needed[i_slopes]:
            raise NotImplementedError("alibi_slopes has no gradient: pass alibi_slopes.detach()")

        is_batched = any(map(is_batch, (dout, dlse)))
        create_graph = torch.is_grad_enabled()
        if is_batched or (create_graph and not _is_watched(inputs)):
            problem = problem_of(*inputs)
            if _backends.choose(problem, "backward") == "tiled" and not problem.is_fp8:
                by_name = dict(zip(names, inputs, strict=True))
                wanted = {n for n, needs in zip(names, needed, strict=False) if needs}
                with torch.enable_grad():
                    recorded = _recorded_gradients(
                        problem_of, by_name, wanted, dout, dlse, create_graph
                    )
                return tuple(recorded.get(name) for name in ("q", "k", "v", "s_aux"))
        if is_batched:
            raise NotImplementedError(f"{NO_BATCHES}; {_OTHERS}")

        if dout is None:
            dout = torch.zeros_like(out)
        given = {"dout": dout, "out": out, "softmax_lse": lse, "dlse": dlse}
        dq, dk, dv, delta = backward_of(
            *[given.get(name) if i is None else inputs[i] for name, i in sources]
        )
        if i_sinks < len(needed) and needed[i_sinks]:
            return dq, dk, dv, _sink_gradient(inputs[i_sinks], lse, delta)
        return dq, dk, dv, None

    vars(gradients)["i_sinks"] = i_sinks
    return gradients


def _backward(
    defaults: list[Any],
    positions: Sequence[int],
    gradients_of: Callable[..., tuple[Tensor | None, ...]],
    ctx: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
    *_: Tensor | None,
) -> tuple[Tensor | None, ...]:
    # What torch.func.vjp returns runs when its transform has ended, as its wrappers do not say.
    saved: list[Any] = [x if x is None else _unwrap_if_dead(x) for x in ctx.saved_tensors]
    out, lse, *tensors = saved
    given = len(ctx.options)
    inputs = [*ctx.options, *defaults[given:]]
    for i, x in zip(positions, tensors, strict=False):
        inputs[i] = x
    *qkv, s_aux = gradients_of(inputs, ctx.needs_input_grad, out, lse, dout, dlse)
    results = [*qkv, *[None] * (given - 3)]
    if s_aux is not None:
        results[vars(gradients_of)["i_sinks"]] = s_aux
    return tuple(results)


def _eager_function(
    name: str,
    plain: Callable[..., Any],
    length: int,
    positions: Sequence[int],
    gradients_of: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[[tuple[Any, ...]], Any]:
    """``plain`` with a gradient, for calls that nothing must see and no transform works on.

    It takes all ``length`` arguments, of which the last is None. PyTorch sees the tensors at
    ``positions``; the others travel as one object, which takes less time than one by one.
    """
    others = [i for i in range(length) if i not in positions]
    tensors_of, options_of = operator.itemgetter(*positions), operator.itemgetter(*others)
    together = operator.itemgetter(*map([*positions, *others].index, range(length)))
    i_sinks = positions.index(vars(gradients_of)["i_sinks"]) - 3  # behind q, k and v
    nothing = (None,) * (len(positions) - 4)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor | None) -> Any:
            out, lse, probs = plain(*arguments)
            # Views of a Function with several results could not be changed in place.
            out, lse = (x.data if x._is_view() else x for x in (out, lse))
            if probs is not None:
                ctx.mark_non_differentiable(probs)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(out, lse, *tensors)
            ctx.options = options_of(arguments)
            return (out, lse) if probs is None else (out, lse, probs)

        @staticmethod
        def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
            out, lse, *tensors = ctx.saved_tensors
            needed = (*ctx.needs_input_grad[1:], *[False] * len(others))
            *qkv, s_aux = gradients_of(
                together((*tensors, *ctx.options))[:-1], together(needed), out, lse, dout, dlse
            )
            return None, *qkv, *nothing[:i_sinks], s_aux, *nothing[i_sinks:]

    Eager.__name__ = name
    vars(Eager)["_backward_cls"].__name__ = f"{name}Backward"  # of the graph's node
    apply: Callable[..., Any] = super(torch.autograd.Function, Eager).apply

    def apply_eager(arguments: tuple[Any, ...]) -> Any:
        output = apply(arguments, *tensors_of(arguments))
        return output if len(output) == 3 else (*output, None)

    return apply_eager


def _recorded_gradients(
    problem_of: Callable[..., Attention],
    inputs: dict[str, Any],
    needed: set[str],
    dout: Tensor | None,
    dlse: Tensor | None,
    create_graph: bool,
) -> dict[str, Tensor]:
    """The gradients of the needed inputs, of a recorded forward: PyTorch's operators."""
    # Views: q, k and v may be one tensor, which is to get three gradients.
    leaves = {name: inputs[name].view_as(inputs[name]) for name in sorted(needed)}
    problem = problem_of(**inputs | leaves)
    results = tiled.differentiable_forward(problem, inputs.get("rng_state"), False)[:2]
    outputs = [
        (x, dx)
        for x, dx in zip(results, (dout, dlse), strict=True)
        if dx is not None and x.requires_grad  # without a key nothing depends on the inputs
    ]
    if not outputs:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    with without_autocast(outputs[0][0].device.type):
        gradients = torch.autograd.grad(
            [x for x, _ in outputs],
            list(leaves.values()),
            [dx for _, dx in outputs],
            create_graph=create_graph,
            materialize_grads=True,
        )
    return dict(zip(leaves, gradients, strict=True))


def _sink_gradient(s_aux: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sink has P = exp(s_aux - lse) and value zero: dS = -P * delta, summed over rows."""
    head = lse.dim() - 2
    logit = s_aux.to(lse.dtype)[:, None]
    p = torch.exp(logit - lse).masked_fill(lse == -torch.inf, 0.0)  # rows outside every sequence
    rows = [dim for dim in range(lse.dim()) if dim != head]
    return -(p * delta).sum(rows).to(s_aux.dtype)


_OUT = {"out": lambda args: (*args[0].shape[:-1], args[2].shape[-1])}  # of q, and of v
_GRADIENTS = {
    "dq": lambda args: args[1].shape,
    "dk": lambda args: args[2].shape,
    "dv": lambda args: args[3].shape,
}
_OTHERS = "use_backend('tiled') has derivatives of every order and mode, but for flash_attn.fp8"
_NO_SECOND = f"the gradient of attention has no derivative in its kernels; {_OTHERS}"

flash_attn_backward, flash_attn_varlen_backward = (
    _operator(
        f"flash_attn_{layout}_backward",
        remembering(checked, _signature(checked), lse="softmax_lse"),
        checked,
        tuple[Tensor, Tensor, Tensor, Tensor],
        _GRADIENTS,
        no_gradient=_NO_SECOND,
    )
    for layout, checked in (("dense", _dense_backward), ("varlen", _varlen_backward))
)
flash_attn_forward, flash_attn_varlen_forward = (
    _operator(
        f"flash_attn_{layout}_forward",
        remembering(checked, _signature(problem_of), behind=(None,), destination="out", **renamed),
        problem_of,
        tuple[Tensor, Tensor, Tensor],
        _OUT,
        backward_of=backward_of,
    )
    for layout, checked, problem_of, backward_of, renamed in (
        ("dense", _dense_forward, _dense_problem, flash_attn_backward, {}),
        (
            "varlen",
            _varlen_forward,
            _varlen_problem,
            flash_attn_varlen_backward,
            {"lengths_k": "cu_seqlens_k"},  # of pages
        ),
    )
)
flash_attn_with_kvcache = _operator(
    "flash_attn_with_kvcache",
    remembering(
        _flash_attn_with_kvcache,
        _signature(_flash_attn_with_kvcache),
        k="k_cache",
        v="v_cache",
        seqused_k="cache_seqlens",
        seqused_before="cache_seqlens",
        leftpad_k="cache_leftpad",
        k_new="k",
        v_new="v",
    ),
    _flash_attn_with_kvcache,
    tuple[Tensor, Tensor],
    _OUT,
    no_gradient=(
        "flash_attn_with_kvcache, which updates its cache in place, has no derivative of any kind "
        "and no vmap: use flash_attn_func or flash_attn_varlen_func"
    ),
    mutates=("k_cache", "v_cache"),
)
