"""Backends that the tests run on, and hypothesis' settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, Verbosity, settings

import flash_attn

# Small tensors gain nothing from a second thread, and where cores are shared, threads that wait for
# each other made tests up to 50 times slower.
torch.set_num_threads(1)

# `pytest --hypothesis-profile=thorough`, or FLASH_ATTN_EXAMPLES=n for another number of examples.
COMMON = {
    "deadline": None,
    "print_blob": True,
    "verbosity": Verbosity.normal,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
EXAMPLES = int(os.environ.get("FLASH_ATTN_EXAMPLES", "100"))
settings.register_profile("ci", max_examples=EXAMPLES, derandomize=True, **COMMON)
settings.register_profile("dev", max_examples=EXAMPLES, **COMMON)
settings.register_profile("thorough", max_examples=1000, **COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def without_gpu() -> str | None:
    """Why the GPU tests can't run here; None if they can."""
    return None if torch.cuda.is_available() else "no CUDA GPU"


def without_sm80() -> str | None:
    """Why the sm80 kernels can't run here; None if they can."""
    if reason := without_gpu():
        return reason
    available = flash_attn.available_backends("cuda")
    return None if "sm80" in available else f"backends on this GPU: {', '.join(available)}"


# What the id of a test says that it ran on. cuda-default is what users get: sm80 where it covers
# the problem, else tiled. Tests of test_sm80.py force sm80.
BACKENDS = {
    "cpu-tiled": ("cpu", "tiled", lambda: None),
    "cuda-tiled": ("cuda", "tiled", without_gpu),
    "cuda-default": ("cuda", None, without_sm80),
}


def backend_params(*names: str) -> list:
    gpu = pytest.mark.gpu
    return [pytest.param(name, id=name, marks=[gpu] * name.startswith("cuda")) for name in names]


@pytest.fixture(params=backend_params(*BACKENDS))
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device to run on, with its backend chosen."""
    name, forced, reason = BACKENDS[request.param]
    if reason := reason():
        pytest.skip(reason)
    with nullcontext() if forced is None else flash_attn.use_backend(forced):
        yield name


@pytest.fixture
def sm80() -> Iterator[str]:
    """The device to run on, with the sm80 kernels forced."""
    if reason := without_sm80():
        pytest.skip(reason)
    with flash_attn.use_backend("sm80"):
        yield "cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu skip, visibly, where there is none."""
    if reason := without_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
