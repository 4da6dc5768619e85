"""The build's table and settings, and what the built extension is linked with."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flash_attn._backends import cuda

ROOT = Path(__file__).resolve().parent.parent

built = pytest.mark.skipif(not cuda.available(), reason="the extension is not built")


@pytest.fixture(scope="module")
def build_support() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_support", ROOT / "build_support.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def names(build_support: ModuleType, **environ: str) -> list[str]:
    return [row.name for row in build_support.selected_instantiations(environ)]


def test_table(build_support: ModuleType) -> None:
    table = [row.name for row in build_support.INSTANTIATIONS]
    assert len(set(table)) == len(table)
    assert "sm80_forward_bf16_d128_plain" in table
    families = {family for family, _ in build_support.ARCHITECTURES.values()}
    assert {row.family for row in build_support.INSTANTIATIONS} <= families
    assert names(build_support) == table
    assert names(build_support, FLASH_ATTN_CUDA_ARCHS="", FLASH_ATTN_ONLY="") == table


def test_filter(build_support: ModuleType) -> None:
    every = names(build_support, FLASH_ATTN_CUDA_ARCHS="80")
    assert every and all(name.startswith("sm80_") for name in every)
    assert names(build_support, FLASH_ATTN_ONLY="bf16_d64") == ["sm80_forward_bf16_d64_plain"]
    assert names(build_support, FLASH_ATTN_ONLY="fp16*d64, bf16*d128") == [
        "sm80_forward_fp16_d64_plain",
        "sm80_forward_bf16_d128_plain",
    ]


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"FLASH_ATTN_CUDA_ARCHS": "80,90a"}, r"'80,90a'.*accepted are 80, 90a, separated by semi"),
        ({"FLASH_ATTN_CUDA_ARCHS": "80;70"}, r"unknown \['70'\]"),
        ({"FLASH_ATTN_CUDA_ARCHS": "90a"}, "no kernels"),
        ({"FLASH_ATTN_ONLY": "d99"}, "'d99' matches none of .*sm80_forward_bf16_d128_plain"),
    ],
)
def test_bad_selection(build_support: ModuleType, environ: dict[str, str], message: str) -> None:
    with pytest.raises(build_support.BuildError, match=message):
        build_support.selected_instantiations(environ)


def test_switches(build_support: ModuleType) -> None:
    assert build_support.skip_cuda({"FLASH_ATTN_SKIP_CUDA": "1"})
    assert not build_support.skip_cuda({"FLASH_ATTN_SKIP_CUDA": "0"})
    assert not build_support.skip_cuda({})
    with pytest.raises(build_support.BuildError, match="FLASH_ATTN_SKIP_CUDA='yes'"):
        build_support.skip_cuda({"FLASH_ATTN_SKIP_CUDA": "yes"})

    assert build_support.job_count({"MAX_JOBS": "3"}) == 3
    assert 1 <= build_support.job_count({}) <= len(os.sched_getaffinity(0))
    for bad in ("0", "-1", "two", "1.5"):
        with pytest.raises(build_support.BuildError, match="MAX_JOBS"):
            build_support.job_count({"MAX_JOBS": bad})


def fake_nvcc(folder: Path, release: str) -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return nvcc


def test_nvcc(build_support: ModuleType, tmp_path: Path) -> None:
    old, new = fake_nvcc(tmp_path / "old", "11.8"), fake_nvcc(tmp_path / "new", "13.0")
    on_path = {"PATH": str(old.parent)}
    assert build_support.find_nvcc({}) is None
    assert build_support.find_nvcc({"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}) is None
    assert build_support.find_nvcc(on_path) == old
    assert build_support.find_nvcc({**on_path, "CUDA_HOME": str(tmp_path / "new")}) == new
    with pytest.raises(build_support.BuildError, match=r"is CUDA 11\.8; accepted are 12\.0 and"):
        build_support.read_toolkit(old)


def test_times_follow_content(build_support: ModuleType, tmp_path: Path) -> None:
    """So that ninja compiles again what changed, and only that, also in a copy or a checkout."""
    source, record = tmp_path / "a.cu", tmp_path / "times.json"
    source.write_text("one")
    os.utime(source, ns=(10**18, 10**18))
    build_support.settle_times([source], record)
    source.touch()
    build_support.settle_times([source], record)
    assert source.stat().st_mtime_ns == 10**18
    source.write_text("two")
    os.utime(source, ns=(10**17, 10**17))
    build_support.settle_times([source], record)
    assert source.stat().st_mtime_ns > 10**18


@built
def test_imports_without_a_driver() -> None:
    code = "import flash_attn._C as c; print(len(c.instantiations()))"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == len(cuda._C.instantiations())


@built
def test_links_neither_torch_nor_cudart() -> None:
    run = subprocess.run(["ldd", cuda._C.__file__], capture_output=True, text=True, check=True)
    assert "libc.so" in run.stdout
    assert not re.search(r"torch|c10|cudart|libcuda", run.stdout), run.stdout


@built
def test_extension_has_the_table(build_support: ModuleType) -> None:
    table = {(r.family, r.dtype, r.headdim, r.features) for r in build_support.INSTANTIATIONS}
    rows = cuda._C.instantiations()
    assert len(set(rows)) == len(rows)
    if set(rows) != table:
        assert set(rows) < table
        pytest.skip(f"built with a filter: {len(rows)} of {len(table)} kernels")


def boundary_call(**changes: object) -> None:
    q = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16)
    k = torch.zeros(2, 7, 2, 64, dtype=torch.bfloat16)
    arguments = {"family": "sm80", "q": q, "k": k, "v": k, "out": q, "lse": torch.zeros(2, 4, 5)}
    options = {"softmax_scale": 0.1, "window_left": -1, "window_right": -1, "stream": 0}
    cuda._C.forward(**{**arguments, **options, **changes})  # type: ignore[arg-type]


@built
@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "q: on the CPU|built with FLASH_ATTN_ONLY"),
        ({"q": torch.zeros(5, 4, 64).bfloat16()}, r"^q: got shape \(5, 4, 64\)"),
        ({"k": torch.zeros(2, 7, 2, 64).half()}, "^k: .* dtype fp16.* accepted: .* dtype bf16"),
        ({"k": torch.zeros(2, 7, 2, 128).bfloat16()}, r"^k: .*accepted: shape \(2, 7, 2, 64\)"),
        ({"v": torch.zeros(2, 8, 2, 64).bfloat16()}, r"^v: .*accepted: shape \(2, 7, 2, 64\)"),
        ({"v": torch.zeros(2, 7, 64, 2).bfloat16().mT}, "^v: .*last stride 1"),
        ({"out": torch.zeros(641 * 4).bfloat16()[1:2561].view(2, 5, 4, 64)}, "^out: .*16 bytes"),
        ({"out": torch.zeros(2, 5, 4, 68).bfloat16()[..., :64]}, "^out: .*16 bytes"),
        ({"lse": torch.zeros(2, 5, 4).mT}, "^lse: .*contiguous"),
        ({"lse": torch.zeros(2, 4, 5).double()}, "^lse: .*dtype other"),
        ({"family": "sm70"}, "no sm70 forward kernel for bf16, headdim 64.* this build has sm80/"),
    ],
)
def test_boundary_checks(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boundary_call(**changes)


@built
def test_boundary_types() -> None:
    with pytest.raises(TypeError, match="q: torch.Tensor"):
        boundary_call(q=[1.0])
