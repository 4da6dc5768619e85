"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864): the one implementation."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta

from flash_attn import _backends, _ops
from flash_attn._arguments import (
    _kind,
    check_longest,
    check_not_expanded,
    is_readable,
    lengths_of,
)
from flash_attn._backends import Remember, cuda
from flash_attn._backends.rotary import rotate
from flash_attn._numbers import flag, integer


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the tokens of a batch by their positions, by a kernel where there is one.

    Differentiable.

    Parameters
    ----------
    x : (batch, seqlen, nheads, headdim), or (total, nheads, headdim) with ``cu_seqlens``
    cos, sin : (seqlen_ro, rotary_dim / 2)
        Table over positions; rotary_dim <= headdim.
    seqlen_offsets : int or (batch,) int32 or int64
        Position of the first token of each sequence.
    cu_seqlens : (batch + 1,) int32 or int64, optional
        Where each sequence starts in ``x``. Tokens that belong to no sequence are not rotated.
    max_seqlen : int, required with ``cu_seqlens``
        Length of the longest sequence.
    interleaved : bool
        See :func:`rotate`.
    inplace : bool
        Write the result to ``x`` and return :func:`in_place`'s tensor on the memory of ``x``.
    conjugate : bool
        Rotate by the negative angle.

    Returns
    -------
    Tensor
        Shape and dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was given and what is accepted.

    Notes
    -----
    Offsets and ``cu_seqlens`` on the CPU are read and checked. Elsewhere, as reading them would
    wait for the device, positions outside the table are clamped into it.
    """
    interleaved, inplace = flag("interleaved", interleaved), flag("inplace", inplace)
    tables = (cos, sin)
    rest = (*tables, seqlen_offsets, cu_seqlens, max_seqlen, interleaved)
    if isinstance(x, Tensor) and x.is_cuda and not _ops.is_seen((x, *rest)):
        if not _ops.wants_gradient((x, *tables)):
            results = _run_kernel(x, *rest, inplace, conjugate)
            if results is not None:
                if inplace:
                    cuda.count_writes((x,))
                return x if inplace else results[0]
        elif not _ops.wants_gradient(tables):
            check_arguments(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
            if _backends.rotates(x, cos, sin, cu_seqlens):
                if not inplace:
                    return _Turn.apply(x, *rest, conjugate)
                return in_place(x, (), lambda x: x.copy_(_Turn.apply(x, *rest, conjugate)))
    seqlen_offsets = check_arguments(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    if inplace:
        check_not_expanded("x", x)
    if cu_seqlens is not None:
        cos, sin = _gather_packed(x.shape[0], cos, sin, seqlen_offsets, cu_seqlens)
    elif isinstance(seqlen_offsets, Tensor):
        positions = seqlen_offsets.unsqueeze(1) + torch.arange(x.shape[1], device=x.device)
        positions = positions.clamp(0, cos.shape[0] - 1)
        cos, sin = cos[positions], sin[positions]
    else:
        positions_in_table = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
        cos, sin = cos[positions_in_table], sin[positions_in_table]
    sin = -sin if conjugate else sin
    if not inplace:
        return rotate(x, cos, sin, interleaved)

    def write(x: Tensor) -> None:
        # The gradients of cos and sin need x as it was.
        keep = cos.requires_grad or sin.requires_grad
        x.copy_(rotate(x.clone() if keep else x, cos, sin, interleaved))

    return in_place(x, (cos, sin), write)


def _rotate_by_kernel(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | Tensor | None,
    interleaved: bool,
    inplace: bool,
    conjugate: bool,
    *,
    remember: Remember | None = None,
) -> tuple[Tensor, ...] | None:
    """Return the rotated tensor, none of them if ``inplace``; None: no kernel takes this."""
    offsets = check_arguments(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    if inplace:
        check_not_expanded("x", x)
    if not _backends.rotates(x, cos, sin, cu_seqlens):
        return None
    return _backends.rotate(
        x, cos, sin, offsets, cu_seqlens, interleaved, conjugate, inplace, remember
    )


_run_kernel = _ops.remembering(
    _rotate_by_kernel,
    inspect.signature(_rotate_by_kernel),
    rotary_cos="cos",
    rotary_sin="sin",
    offsets="seqlen_offsets",
)


class _Turn(torch.autograd.Function):
    """Rotation by a kernel; its gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *rest_of_call, conjugate = rest
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in rest))
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in rest]
        results = _run_kernel(x, *rest_of_call, False, conjugate)
        assert results is not None
        return results[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        saved = zip(ctx.saved_tensors, ctx.numbers, strict=True)
        cos, sin, offsets, cu_seqlens, longest, interleaved, conjugate = (
            number if tensor is None else tensor for tensor, number in saved
        )
        dx = apply_rotary(
            dout, cos, sin, offsets, cu_seqlens, longest, interleaved, conjugate=not conjugate
        )
        return dx, *[None] * len(ctx.numbers)


def in_place(x: Tensor, tables: tuple[Tensor, ...], write: Callable[[Tensor], Any]) -> Tensor:
    """Let ``write`` change ``x``, and return the tensor that carries the gradient of the change.

    That is ``x`` itself where PyTorch lets autograd follow a write to it. It refuses leaves that
    require a gradient, views of those, and what split, chunk and unbind return. They are written
    through an alias: a tensor on the same memory that autograd takes for a result computed from
    ``x``. Then the gradients of ``x`` and of other views of its memory do not know of the write:
    go on with the returned tensor.

    Parameters
    ----------
    x : Tensor
    tables : tuple of Tensor
        What ``write`` reads beside ``x``.
    write : callable
        Given ``x`` or its alias, writes to it by ordinary differentiable operations.

    Notes
    -----
    The outputs of split, chunk and unbind share one version counter, and PyTorch refuses any use of
    them once it has moved. So that the others stay usable, the write to one does not move it: there
    alone, nothing notices if this memory had been saved for a backward pass before. For the same
    reason a compiled function can split and rotate, but not rotate what was split outside.
    """
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *tables))
    compiling = torch.compiler.is_compiling()
    if compiling:
        from flash_attn import _in_graph  # which imports the compiler
    if not tracked or not (_in_graph.refusal(x).numel() if compiling else refuses_writes(x)):
        write(x)
        return x
    if not compiling:
        alias: Tensor = _Alias.apply(x)
        write(alias)
        return alias
    # A compiled graph loses the gradient of an output that aliases its input: two tensors here.
    out = x.clone()
    write(out)
    return _in_graph.stored(x, out)


class _Alias(torch.autograd.Function):
    """The same memory, with the identity as its gradient; no view, to autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        # Both are the same memory; x.data has a version counter of its own.
        if _origin(x) != CreationMeta.MULTI_OUTPUT_NODE:
            return x.detach()
        with torch._C.DisableTorchFunctionSubclass():  # a subclass would have a view of it
            return x.data

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        return dout

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent


def refuses_writes(x: Tensor) -> bool:
    """Whether PyTorch raises an error if autograd is to follow a write to ``x``."""
    memory = x if x._base is None else x._base
    return (memory.is_leaf and memory.requires_grad) or _origin(x) != CreationMeta.DEFAULT


def _origin(x: Tensor) -> CreationMeta:
    """What PyTorch notes of a view when it is made: MULTI_OUTPUT_NODE for split and the like."""
    return CreationMeta.DEFAULT if x._base is None else _get_creation_meta(x)


def _gather_packed(
    total: int, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of the tables for packed tokens, each (total, rotary_dim / 2)."""
    batch = cu_seqlens.shape[0] - 1
    if total == 0 or batch == 0:
        return cos.new_ones(total, cos.shape[1]), sin.new_zeros(total, sin.shape[1])
    token = torch.arange(total, device=cos.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    in_a_sequence = ((sequence < batch) & (token >= cu_seqlens[0])).unsqueeze(1)
    sequence = sequence.clamp(max=batch - 1)
    offset = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    positions = (token - cu_seqlens[sequence] + offset).clamp(0, cos.shape[0] - 1)
    return (
        torch.where(in_a_sequence, cos[positions], 1.0),
        torch.where(in_a_sequence, sin[positions], 0.0),
    )


def check_arguments(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | Tensor | None,
) -> int | Tensor:
    """Return ``seqlen_offsets`` as an int or a (batch,) tensor."""
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {_kind(tensor)}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    layout = (
        "(batch, seqlen, nheads, headdim)" if cu_seqlens is None else "(total, nheads, headdim)"
    )
    if x.ndim != (4 if cu_seqlens is None else 3):
        raise ValueError(f"x must have shape {layout}, got {tuple(x.shape)}")
    if cos.ndim != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos must have shape (seqlen_ro, rotary_dim / 2) with rotary_dim <= headdim = "
            f"{x.shape[-1]}, got {tuple(cos.shape)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(
            f"sin must have the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}"
        )

    batch: int = x.shape[0]
    longest: int | Tensor = x.shape[1]
    if cu_seqlens is not None:
        _check_indices("cu_seqlens", cu_seqlens, x, "(batch + 1,)")
        if max_seqlen is None:
            raise ValueError("max_seqlen must be given with cu_seqlens, got None")
        batch, longest = cu_seqlens.shape[0] - 1, int_if_known("max_seqlen", max_seqlen)
        if isinstance(longest, Tensor) and longest.ndim > 0:
            longest = integer("max_seqlen", longest)
    seqlen_offsets = int_if_known("seqlen_offsets", seqlen_offsets)
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.ndim == 0:
            seqlen_offsets = seqlen_offsets.expand(batch)
        _check_indices("seqlen_offsets", seqlen_offsets, x, "(batch,)", batch)
    first = 0 if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    _check_positions(first, 0 if isinstance(longest, Tensor) else longest, cos)
    if not torch.compiler.is_compiling():
        _check_values(x, cos, seqlen_offsets, cu_seqlens, longest)
    return seqlen_offsets


def _check_positions(first: int, seqlen: int, cos: Tensor) -> None:
    if not 0 <= first <= cos.shape[0] - seqlen:
        raise ValueError(
            f"seqlen_offsets must be >= 0, and cos must have a row for each position up to "
            f"seqlen_offsets + seqlen, got seqlen_offsets {first}, seqlen {seqlen} and cos "
            f"{tuple(cos.shape)}"
        )


def _check_values(
    x: Tensor,
    cos: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | Tensor,
) -> None:
    """Check cu_seqlens, and the offset of each sequence, as far as they lie on the CPU."""
    lengths, seqlen = None, x.shape[1]
    if cu_seqlens is not None:
        lengths, seqlen = lengths_of("cu_seqlens", cu_seqlens, "x", x.shape[0]), 0
        if lengths is not None and not isinstance(max_seqlen, Tensor):
            check_longest("max_seqlen", max_seqlen, lengths)
    if isinstance(seqlen_offsets, Tensor) and is_readable(seqlen_offsets):
        for b, offset in enumerate(seqlen_offsets.tolist()):
            _check_positions(offset, lengths[b] if lengths else seqlen, cos)


def int_if_known(name: str, value: Any) -> int | Tensor:
    """Read an integer; a tensor of several, or one to be waited for, is returned as it is."""
    if isinstance(value, Tensor) and (
        value.ndim > 0 or torch.compiler.is_compiling() or not is_readable(value)
    ):
        return value
    return integer(name, value)


def _check_indices(
    name: str, tensor: Any, x: Tensor, expected: str, length: int | None = None
) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be a torch.int32 or torch.int64 tensor, got {_kind(tensor)}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    wrong_length = tensor.numel() == 0 if length is None else tensor.numel() != length
    if tensor.ndim != 1 or wrong_length:
        # Not given as text: a compiler would read the size for it, and compile for each anew.
        expected += "" if length is None else f" = ({length},)"
        raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
