"""Which kernel runs a problem and which problems are left to tiled; no GPU is needed to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

import pytest
import torch

from flash_attn import _arguments, _backends
from flash_attn._backends import cuda

HEADDIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
ROWS = {
    (family, direction, dtype, *headdims, features)
    for family, direction, dtype, headdims, features in product(
        ["sm80"], ["forward", "backward"], ["fp16", "bf16"], HEADDIMS, ["plain", "full"]
    )
}
Build = Callable[[Iterable[cuda._Row]], None]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Pretend that the extension has these rows and that every device runs it."""

    def pretend(rows: Iterable[cuda._Row]) -> None:
        monkeypatch.setattr(cuda, "_ROWS", frozenset(rows))
        monkeypatch.setattr(_backends, "_family", lambda device: "sm80")
        cuda._kernel.cache_clear()

    yield pretend
    cuda._kernel.cache_clear()


def problem(
    headdim: int = 64,
    headdim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
) -> _arguments.Attention:
    q, v = (torch.zeros(1, 8, 2, d, dtype=dtype) for d in (headdim, headdim_v or headdim))
    return _arguments.dense(q, q, v, _arguments.options(0.0, None, True, -1, -1, softcap, False))


@pytest.mark.parametrize(
    "given, kernel",
    [
        ((1, 1), (32, 32)),
        ((33, 8), (64, 64)),
        ((40, 72), (96, 96)),
        ((128, 128), (128, 128)),
        ((129, 100), (192, 128)),
        ((192, 129), (192, 192)),
        ((64, 192), (192, 192)),
        ((193, 1), (256, 256)),
    ],
    ids=str,
)
def test_smallest_kernel(build, given, kernel):
    build(ROWS)
    assert cuda._kernel("sm80", "backward", torch.bfloat16, *given)[:2] == kernel
    assert _backends.choose(problem(*given)) == "sm80"


def test_each_direction_where_it_has_a_kernel(build):
    build(row for row in ROWS if row[1] == "forward" or row[3] <= 64)
    for headdim, expected in ((64, "sm80"), (65, "tiled")):
        assert _backends.choose(problem(headdim), "forward") == "sm80"
        assert _backends.choose(problem(headdim), "backward") == expected
    with _backends.use_backend("sm80"):
        with pytest.raises(NotImplementedError, match="no backward kernel.* 65 .*'tiled'"):
            _backends.choose(problem(65), "backward")
        with pytest.raises(ValueError, match="up to 256, got 300 and 64"):
            _backends.choose(problem(300, 64))


@pytest.mark.parametrize(
    "missing, call, reason",
    [
        ("full", {"softcap": 1.0}, "without the full kernel"),
        ("full", {"headdim": 60}, "without the full kernel"),
        ("plain", {}, "without the plain kernel"),
        ("fp16", {"dtype": torch.float16}, "no forward kernel for torch.float16"),
    ],
    ids=str,
)
def test_reduced_builds(build, missing, call, reason):
    build(row for row in ROWS if missing not in row)
    assert reason in cuda.unsupported(problem(**call), "sm80", "forward")
    assert _backends.choose(problem(**call)) == "tiled"
    kept = {"softcap": 1.0} if missing == "plain" else {}
    assert _backends.choose(problem(**kept)) == "sm80"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_left_to_tiled(build, dtype):
    build(ROWS)
    assert _backends.choose(problem(dtype=dtype)) == "tiled"
    assert "bf16 128/128" in cuda.unsupported(problem(dtype=dtype), "sm80", "forward")


def test_pages_and_cache_slots(build):
    """Pages are left to tiled; a cache's slots, which have no gradient, to its backward alone."""
    build(ROWS)
    index = torch.zeros(1, dtype=torch.int32)
    assert _backends.choose(problem()._replace(block_table=index[None])) == "tiled"
    slots = problem()._replace(cache_batch_idx=index)
    assert [_backends.choose(slots, d) for d in ("forward", "backward")] == ["sm80", "tiled"]
