"""How functions of rows are run: compiled, in chunks, and in chunks after a failed compilation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn import _rowwise
from flash_attn._rowwise import rowwise


def scale_and_sum(rows: list[Tensor], columns: tuple[Tensor], options: tuple[float]) -> Any:
    x, out = rows
    out.copy_(x * columns[0] * options[0])
    return x.sum(0), None


ARGUMENTS = (torch.ones(4),), (2.0,)


def run(function: Callable[..., Any], rows: int = 10, dtype: torch.dtype = torch.float32) -> None:
    x, out = torch.randn(rows, 4, dtype=dtype), torch.full((rows, 4), torch.nan)
    total, nothing = function((x, out), *ARGUMENTS)
    torch.testing.assert_close(total, x.sum(0))
    assert nothing is None and torch.equal(out, 2 * x.float())


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Functions that were handed to torch.compile, which then does not need a compiler."""
    functions: list[Any] = []
    compile = partial(torch.compile, backend="aot_eager")

    def recording(function: Any, **options: Any) -> Any:
        functions.append(function)
        return compile(function, **options)

    monkeypatch.setattr(torch, "compile", recording)
    monkeypatch.setattr(_rowwise, "_has_compiler", lambda device_type: True)
    yield functions
    torch._dynamo.reset()


@pytest.mark.parametrize("rows", [0, 1, 6, 7])
def test_chunks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def counting(rows: list[Tensor], *rest: Any) -> Any:
        lengths.append(rows[0].shape[0])
        return scale_and_sum(rows, *rest)

    monkeypatch.setattr(_rowwise, "_chunk_size", lambda x: 3)
    run(rowwise(counting), rows)
    assert lengths == {0: [0], 1: [1], 6: [3, 3], 7: [3, 3, 1]}[rows]


class Copying(Tensor):
    """Slices of it are copies, as those of a DTensor may be."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.clone() if func is Tensor.__getitem__ else result


def test_slices_that_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rowwise, "_chunk_size", lambda x: 3)
    x, out = torch.randn(7, 4), torch.full((7, 4), torch.nan)
    total, _ = rowwise(scale_and_sum)([t.as_subclass(Copying) for t in (x, out)], *ARGUMENTS)
    torch.testing.assert_close(total.as_subclass(Tensor), x.sum(0))
    assert torch.equal(out, 2 * x)


def test_chunks_of_large_rows() -> None:
    assert _rowwise._chunk_size(torch.empty(10, 2**17, device="meta")) == 2
    assert _rowwise._chunk_size(torch.empty(10, 2**20, device="meta")) == 1
    assert _rowwise._chunk_size(torch.empty(0, 5)) == 1


def test_each_kind_of_arguments_is_compiled_by_itself(compilations: list[Any]) -> None:
    """So that 8 recompilations, PyTorch's limit, are 8 a kind."""
    function = rowwise(scale_and_sum)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            for rows in (10, 5, 1):
                run(function, rows, dtype)
    assert len(compilations) == 2
    # Code objects are equal by content; PyTorch counts by identity.
    assert len({id(function.__code__) for function in compilations}) == 2


def test_failed_compilation(compilations: list[Any]) -> None:
    def breaks_the_graph(rows: list[Tensor], *rest: Any) -> Any:
        torch._dynamo.graph_break()
        return scale_and_sum(rows, *rest)

    function = rowwise(breaks_the_graph)
    with pytest.warns(UserWarning, match="breaks_the_graph runs slowly, torch.compile failed"):
        run(function)
    assert len(compilations) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(function)
    assert len(compilations) == 1


def test_memory_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*arguments: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled)
    monkeypatch.setattr(_rowwise, "_has_compiler", lambda device_type: True)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        run(rowwise(scale_and_sum))


def test_in_place_when_compiled(compilations: list[Any]) -> None:
    """The gradient of logits may be one tensor with them."""

    def double(rows: list[Tensor], *rest: Any) -> tuple[()]:
        rows[1].copy_(2 * rows[0])
        return ()

    x = torch.randn(5, 3)
    expected = 2 * x
    rowwise(double)((x, x))
    assert torch.equal(x, expected) and len(compilations) == 1


def test_no_compiler_on_a_cpu() -> None:
    assert not _rowwise._has_compiler("cpu")


@pytest.mark.gpu
def test_compiled_on_a_gpu() -> None:
    function = rowwise(scale_and_sum)
    columns = (torch.ones(4, device="cuda"),)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for rows in (10, 7, 1):
            x, out = torch.randn(2, rows, 4, device="cuda")
            total, _ = function((x, out), columns, (2.0,))
            torch.testing.assert_close(total, x.sum(0))
            assert torch.equal(out, 2 * x)
