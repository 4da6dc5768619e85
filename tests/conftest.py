"""Backends that the tests run on, and hypothesis' settings."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import takes
from hypothesis import HealthCheck, Verbosity, settings

import flash_attn
from flash_attn import _backends
from flash_attn._backends import cuda

ROOT = Path(__file__).resolve().parent.parent

# Of the GPUs that benchmarks.gpu_check counts, each worker of pytest-xdist begins with another.
if (gpus := int(os.environ.get("FLASH_ATTN_TEST_GPUS", "1"))) > 1:
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + i) % gpus) for i in range(gpus))

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

# What cuBLAS needs for deterministic algorithms, which `poisoned_memory` asks for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_configure(config: pytest.Config) -> None:
    """Fix hypothesis' seed before its own plugin and pytest-xdist's workers read it."""
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(random.getrandbits(32))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say, also with -q, how to repeat this run's random problems."""
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        seed = "derandomized" if settings().derandomize else session.config.option.hypothesis_seed
        examples = settings().max_examples
        reporter.write_line(f"FLASH_ATTN_EXAMPLES={examples} --hypothesis-seed={seed}")


def without_gpu() -> str | None:
    """Why the GPU tests can't run here; None if they can."""
    return None if torch.cuda.is_available() else "no CUDA GPU"


def without_kernels(backend: str = "sm80") -> str | None:
    """Why a backend's kernels can't run here; None if they can."""
    if reason := without_gpu():
        return reason
    available = flash_attn.available_backends("cuda")
    return None if backend in available else f"backends on this GPU: {', '.join(available)}"


# What the id of a test says that it ran on. cuda-default is what users get: the best backend that
# covers the problem.
BACKENDS: dict[str, tuple[str, str | None, Callable[[], str | None]]] = {
    "cpu-tiled": ("cpu", "tiled", lambda: None),
    "cuda-tiled": ("cuda", "tiled", without_gpu),
    "cuda-default": ("cuda", None, without_kernels),
    **{f"cuda-{x}": ("cuda", x, partial(without_kernels, x)) for x in _backends.BACKENDS[1:]},
}
# What one backend has alone is in test_<its name>.py.
KERNELS = tuple(f"cuda-{x}" for x in _backends.BACKENDS[1:])


def beyond(backend: str, params: dict[str, Any]) -> bool:
    """Whether a test's parameters ask a backend's kernels for what they do not cover.

    (Parameters only. Problems that say nothing of it are made to fit: see `helpers.covered`.)
    """
    dims = [params.get(name) or 0 for name in ("headdim", "headdim_v")]
    dims += params.get("headdims") or []
    place = getattr(params.get("place"), "__name__", None)
    unaligned = place in ("misaligned", "contiguous_but_shifted") or "unaligned" in params.values()
    return (
        params.get("dtype") in (torch.float32, torch.float64)
        or max(dims) > 256
        or (params.get("page_size") is not None and not takes(backend, "pages"))
        or ((unaligned or any(dim % 8 for dim in dims)) and not takes(backend, "any_alignment"))
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch.empty fill with NaN what nothing has written yet."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def backend_params(*names: str) -> list:
    gpu = pytest.mark.gpu
    return [pytest.param(name, id=name, marks=[gpu] * name.startswith("cuda")) for name in names]


@contextmanager
def running_on(backend: str) -> Iterator[str]:
    """The device of one of BACKENDS, with its backend chosen."""
    name, forced, reason = BACKENDS[backend]
    if reason := reason():
        pytest.skip(reason)
    with ExitStack() as stack:
        if forced is not None:
            stack.enter_context(flash_attn.use_backend(forced))
        if forced not in (None, "tiled"):
            stack.enter_context(poisoned_memory())
        yield name


def device_fixture(*backends: str) -> Callable[..., Iterator[str]]:
    """The fixture `device` of a module whose tests run on these of BACKENDS."""

    @pytest.fixture(params=backend_params(*backends))
    def device(request: pytest.FixtureRequest) -> Iterator[str]:
        with running_on(request.param) as name:
            yield name

    return device


def decode_fixture(decodes: bool) -> Callable[..., Iterator[None]]:
    """The fixture of a module in whose tests few queries run in the decode kernel, or never do."""

    @pytest.fixture(autouse=True)
    def decode_kernel() -> Iterator[None]:
        with cuda.changed_setting("decode", decodes):
            yield

    return decode_kernel


device = device_fixture(*BACKENDS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop tests of what kernels do not cover; skip those marked gpu where there is none."""
    params = [getattr(getattr(item, "callspec", None), "params", {}) for item in items]
    items[:] = [
        item
        for item, given in zip(items, params, strict=True)
        if given.get("device") not in KERNELS
        or not beyond(given["device"].removeprefix("cuda-"), given)
    ]
    if reason := without_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def build_support() -> ModuleType:
    """What setup.py runs."""
    spec = importlib.util.spec_from_file_location("build_support", ROOT / "build_support.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
