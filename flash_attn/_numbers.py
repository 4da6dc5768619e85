"""Numbers and flags as PyTorch takes them: Python's, NumPy's, symbolic, tensors of one element."""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor


def has_tangent(x: Any) -> bool:
    """Whether forward-mode differentiation runs through it."""
    if forward_ad._current_level < 0 or not isinstance(x, Tensor):
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def integer(name: str, value: Any) -> int:
    """Return an integer of any kind: of Python or NumPy, a tensor of one element, symbolic."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if not isinstance(value, bool) and not (isinstance(value, Tensor) and _is_no_integer(value)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an int, got {_described(value)}")


def real(name: str, value: Any) -> float:
    """Return a number of any kind: of Python or NumPy, a tensor of one element, symbolic."""
    if type(value) is float or isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} has no gradient, got a tensor that requires one: pass {name}.detach()"
        )
    if has_tangent(value):
        raise NotImplementedError(f"{name} has no derivative in forward mode: pass a number")
    several = isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex())
    if hasattr(value, "__float__") and not several:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} must be finite, got {_described(value)}") from None
        except TypeError:
            pass
    raise TypeError(f"{name} must be a number, got {_described(value)}")


def flag(name: str, value: Any) -> bool:
    """Return a flag: a bool or an int of Python or NumPy, a tensor of one such element, or None."""
    if value is None or type(value) is bool:
        return bool(value)
    if isinstance(value, Tensor):
        if value.numel() == 1 and (value.dtype == torch.bool or not _is_no_integer(value)):
            return bool(value)
    elif hasattr(value, "dtype") and value.dtype == bool and value.ndim == 0:  # NumPy's
        return bool(value)
    else:
        try:
            return bool(operator.index(value))
        except TypeError:
            pass
    raise TypeError(f"{name} must be a bool, got {_described(value)}")


def scale(name: str, value: Any) -> float | None:
    """Return a number, or None; a bool is more likely a mistake than a scale."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got bool")
    return None if value is None else real(name, value)


# How an argument with this annotation is read.
READERS: dict[Any, Callable[[str, Any], Any]] = {
    int: integer,
    float: real,
    bool: flag,
    float | None: scale,
}


def _is_no_integer(x: Tensor) -> bool:
    return x.dtype == torch.bool or x.is_floating_point() or x.is_complex() or x.numel() != 1


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, int) and not isinstance(value, bool):
        return f"an {kind} of {value.bit_length()} bits"  # too large for what was asked
    return f"{kind} {value}" if isinstance(value, float) else kind
