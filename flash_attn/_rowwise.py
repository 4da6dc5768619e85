"""Functions of rows: one kernel where torch.compile can make it, chunks of rows elsewhere."""

import functools
import importlib.util
import math
import os
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn._arguments import check_optional_tensors, check_tensors

Sums = tuple[Tensor | None, ...]


def rowwise(function: Callable[..., Sums]) -> Callable[..., Sums]:
    """Run a function of rows without temporaries of their size.

    ``function(rows, columns, options)`` reads and writes ``rows``, tensors of one first dimension
    or None, treats each row alike and returns sums over rows. ``columns`` are other tensors or
    None, ``options`` numbers. On CUDA it is compiled. Elsewhere, without Triton, or if compilation
    fails, of which a warning tells once, it gets chunks of the rows.
    """
    compiles = True

    @functools.cache
    def compiled(*kinds: Any) -> Callable[..., Sums]:
        # A code object of its own: torch.compile limits how often it compiles one.
        copy = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__
        )
        return torch.compile(copy, fullgraph=True)

    @functools.wraps(function)
    def call(
        rows: Sequence[Any], columns: Sequence[Tensor | None] = (), options: Sequence[Any] = ()
    ) -> Sums:
        nonlocal compiles
        if torch.compiler.is_compiling() or any(map(_is_special, (*rows, *columns))):
            return function(rows, columns, options)  # in the caller's own torch.compile
        if compiles and _has_compiler(rows[0].device.type):
            try:
                run = compiled(*map(_kind, (*rows, *columns, *options)))
                return run(rows, columns, options)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                compiles = False
                name = f"{function.__module__}.{function.__name__}"
                reason = f"{type(error).__name__}: {error}"
                warnings.warn(f"{name} runs slowly, torch.compile failed: {reason}", stacklevel=2)

        size = _chunk_size(rows[0])
        chunks = (
            function([None if x is None else x[i : i + size] for x in rows], columns, options)
            for i in range(0, max(1, rows[0].shape[0]), size)
        )
        return functools.reduce(lambda xs, ys: tuple(map(_add, xs, ys)), chunks)

    return call


@functools.cache
def _has_compiler(device_type: str) -> bool:
    disabled = os.environ.get("TORCH_COMPILE_DISABLE") == "1"  # PyTorch's own switch
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None and not disabled


def _is_special(x: Any) -> bool:
    """Whether it is a tensor of which a slice may be a copy, as that of a DTensor."""
    return isinstance(x, Tensor) and type(x) not in (Tensor, torch.nn.Parameter)


def _kind(x: Any) -> Any:
    """What a compiled function is specialised to."""
    return x.dtype if isinstance(x, Tensor) else type(x) if isinstance(x, float) else x


def _chunk_size(x: Tensor) -> int:
    """Rows whose temporaries fit the caches of a CPU, or occupy a GPU."""
    elements = 2**24 if x.is_cuda else 2**18
    return max(1, elements * x.shape[0] // max(1, x.numel()))


def _add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return None if x is None or y is None else x + y


def as_rows(x: Tensor) -> Tensor:
    """View or copy (..., n) as (rows, n); a number as (1, 1)."""
    x = x if x.ndim else x[None]
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float64 for float64, float32 otherwise."""
    return torch.promote_types(dtype, torch.float32)


def check_like(x: Tensor, shape: torch.Size, **tensors: Tensor | None) -> None:
    """Raise unless these are tensors, or None, that have this shape and are where ``x`` is."""
    check_tensors(x=x)
    check_optional_tensors(**tensors)
    for name, t in tensors.items():
        if t is not None and (t.shape != shape or t.device != x.device):
            raise ValueError(
                f"{name} must have shape {tuple(shape)} and be on {x.device}, to go with "
                f"{tuple(x.shape)}, got {tuple(t.shape)} on {t.device}"
            )
