"""The build's table and settings, and what the built extension is linked with."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_attn._backends import cuda

ROOT = Path(__file__).resolve().parent.parent

built = pytest.mark.skipif(not cuda.available(), reason="the extension is not built")


def names(build_support: ModuleType, **environ: str) -> list[str]:
    return [row.name for row in build_support.selected_kernels(environ)]


def test_table(build_support: ModuleType) -> None:
    table = [row.name for row in build_support.KERNELS]
    assert len(set(table)) == len(table)
    assert {"sm80_forward_bf16_d128_plain", "sm90_forward_fp16_d192v128_full"} <= set(table)
    backends = set(build_support.ARCHITECTURES.values())
    assert {row.backend for row in build_support.KERNELS} == backends
    assert names(build_support) == table
    assert names(build_support, FLASH_ATTN_CUDA_ARCHS="", FLASH_ATTN_ONLY="") == table


def test_filter(build_support: ModuleType) -> None:
    for arch, prefix in (("80", "sm80_"), ("100;120", "sm80_"), ("90a", "sm90_")):
        every = names(build_support, FLASH_ATTN_CUDA_ARCHS=arch)
        assert every and all(name.startswith(prefix) for name in every)
    assert names(build_support, FLASH_ATTN_ONLY="sm80_forward_bf16_d64") == [
        "sm80_forward_bf16_d64_plain",
        "sm80_forward_bf16_d64_full",
    ]
    assert names(build_support, FLASH_ATTN_ONLY="80_forw*fp16*d192v128_p, backw*bf16*d128_f") == [
        "sm80_forward_fp16_d192v128_plain",
        "sm80_backward_bf16_d128_full",
        "sm90_backward_bf16_d128_full",
    ]


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"FLASH_ATTN_CUDA_ARCHS": "80,90a"}, r"'80,90a'.*accepted are 80, .*, 90a, separated"),
        ({"FLASH_ATTN_CUDA_ARCHS": "80;70"}, r"unknown \['70'\]"),
        ({"FLASH_ATTN_ONLY": "d99"}, "'d99' matches none of .*sm80_forward_bf16_d128_plain"),
    ],
)
def test_bad_selection(build_support: ModuleType, environ: dict[str, str], message: str) -> None:
    with pytest.raises(build_support.BuildError, match=message):
        build_support.selected_kernels(environ)


def test_job_count(build_support: ModuleType) -> None:
    assert build_support.job_count({"MAX_JOBS": "3"}) == 3
    assert 1 <= build_support.job_count({}) <= len(os.sched_getaffinity(0))
    for bad in ("0", "-1", "two", "1.5"):
        with pytest.raises(build_support.BuildError, match="MAX_JOBS"):
            build_support.job_count({"MAX_JOBS": bad})


def key(row: Any) -> tuple[Any, ...]:
    """A row of KERNELS as _C.kernels() has it, but for the features."""
    return dataclasses.astuple(row)


def compiled() -> list[tuple[Any, ...]]:
    return [row[:8] for row in cuda._C.kernels()]


def fake_nvcc(folder: Path, release: str) -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"""\
#!/bin/sh
echo 'Cuda compilation tools, release {release}, V{release}.1'
echo '#$ INCLUDES="-I{folder}/include"' >&2
""")
    nvcc.chmod(0o755)
    return nvcc


def test_nvcc(build_support: ModuleType, tmp_path: Path) -> None:
    old, new = fake_nvcc(tmp_path / "old", "12.4"), fake_nvcc(tmp_path / "new", "12.5")
    on_path = {"PATH": str(old.parent)}
    assert build_support.find_nvcc({}) is None
    assert build_support.find_nvcc({"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}) is None
    assert build_support.find_nvcc(on_path) == old
    assert build_support.find_nvcc({**on_path, "CUDA_HOME": str(tmp_path / "new")}) == new
    with pytest.raises(build_support.BuildError, match=r"is CUDA 12\.4; accepted are 12\.5 and"):
        build_support.read_toolkit(old)
    toolkit = build_support.CudaToolkit(new, (12, 5), tmp_path / "new" / "include")
    assert build_support.read_toolkit(new) == toolkit


def test_cuda_can_be_skipped_or_required(build_support: ModuleType, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "12.5")
    here, nowhere = {"CUDA_HOME": str(tmp_path)}, {"PATH": ""}

    def chosen(environ: dict[str, str], skip: str = "", require: str = "") -> tuple[Any, str]:
        switches = {"FLASH_ATTN_SKIP_CUDA": skip, "FLASH_ATTN_REQUIRE_CUDA": require}
        return build_support.choose_nvcc({**environ, **switches})

    assert build_support.choose_nvcc(here)[0] == nvcc
    assert chosen(here)[0] == chosen(here, "0", "0")[0] == chosen(here, "0", "1")[0] == nvcc
    assert chosen(here, skip="1") == (None, "FLASH_ATTN_SKIP_CUDA=1")
    assert chosen(nowhere) == (None, "no nvcc in CUDA_HOME or PATH")
    with pytest.raises(build_support.BuildError, match="REQUIRE_CUDA=1, but no nvcc in CUDA_HOME"):
        chosen(nowhere, require="1")
    with pytest.raises(build_support.BuildError, match="contradict each other"):
        chosen(here, "1", "1")
    with pytest.raises(build_support.BuildError, match="FLASH_ATTN_SKIP_CUDA='yes'"):
        chosen(here, skip="yes")
    with pytest.raises(build_support.BuildError, match="FLASH_ATTN_REQUIRE_CUDA='yes'"):
        chosen(here, require="yes")


def test_kernels_need_a_global_interpreter_lock(
    build_support: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path, "12.5")
    free = {"Py_GIL_DISABLED": 1}
    monkeypatch.setattr(build_support.sysconfig, "get_config_var", free.get)
    why = "the kernels need a Python with a global interpreter lock"
    assert build_support.choose_nvcc({"CUDA_HOME": str(tmp_path)}) == (None, why)


def test_another_package_called_ninja(
    build_support: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ninja", ModuleType("ninja"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build_support.BuildError, match="ninja was not found"):
        build_support.find_ninja()
    (tmp_path / "ninja").touch(mode=0o755)
    assert build_support.find_ninja() == str(tmp_path / "ninja")


def test_what_a_build_may_remove(build_support: ModuleType, tmp_path: Path) -> None:
    root = build_support.ROOT
    assert build_support.is_product(root / "build" / "lib")
    for kept in (root, root / "flash_attn", root / "build" / "..", tmp_path):
        assert not build_support.is_product(kept)


def test_kernels_are_for_linux(
    build_support: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"CUDA_HOME": str(tmp_path)}
    fake_nvcc(tmp_path, "12.5")
    monkeypatch.setattr(sys, "platform", "win32")
    why = "the kernels need Linux, and this is win32"
    assert build_support.choose_nvcc(environ) == (None, why)
    with pytest.raises(build_support.BuildError, match=f"REQUIRE_CUDA=1, but {why}"):
        build_support.choose_nvcc({**environ, "FLASH_ATTN_REQUIRE_CUDA": "1"})


def test_nvcc_that_is_no_program(build_support: ModuleType, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("no program")
    nvcc.chmod(0o755)
    with pytest.raises(build_support.BuildError, match="--version printed no release"):
        build_support.read_toolkit(nvcc)


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


def test_slow_kernels_are_compiled_first(build_support: ModuleType) -> None:
    manifest = build_support.ninja_manifest(list(build_support.KERNELS), ["80", "90a"])
    order = re.findall(r"kernel build/generated/(\w+)\.cu", manifest)
    assert sorted(order) == sorted({row.unit for row in build_support.KERNELS})
    assert order[0].endswith("d256_full") and "backward" in order[0]
    assert "merge" in order[-1]


def test_compiler_targets(build_support: ModuleType) -> None:
    archs = build_support.selected_architectures({"FLASH_ATTN_CUDA_ARCHS": "120; 90a;"})
    assert archs == ["120", "90a"]
    assert build_support.compiler_targets("sm90", archs) == "-gencode=arch=compute_90a,code=sm_90a"
    assert build_support.compiler_targets("sm80", archs) == (
        "-gencode=arch=compute_120,code=sm_120 -gencode=arch=compute_80,code=compute_80"
    )


def test_ptxas_reports(build_support: ModuleType, tmp_path: Path) -> None:
    part = """\
ptxas info    : Compiling entry function '{0}' for '{1}'
ptxas info    : Function properties for {0}
    16 bytes stack frame, {2} bytes spill stores, {3} bytes spill loads
ptxas info    : Used {4} registers, used 1 barriers, 528 bytes cmem[0]
"""
    text = part.format("_Z1f", "sm_80", 0, 0, 255) + part.format("_Z1g", "sm_90a", 8, 12, 40)
    (tmp_path / "kernel.txt").write_text("ptxas info    : 0 bytes gmem\n" + text)
    assert build_support.read_ptxas_reports(tmp_path) == [
        build_support.PtxasReport("kernel", "_Z1f", "sm_80", 255, 0),
        build_support.PtxasReport("kernel", "_Z1g", "sm_90a", 40, 20),
    ]

    said = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine that.
ptxas info    : (C7519) warpgroup.arrive is injected in around line 55 by compiler to allow use of \
registers in GMMA in function '_Z1g'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function '_Z1g'
"""
    f, g = build_support.parse_ptxas("kernel", said + text)
    assert f.losses == ("'setmaxnreg' ignored; unable to determine that.",)
    assert len(g.losses) == 2 and "are serialized due to insufficient" in g.losses[1]
    assert "serialized" in str(g) and "serialized" not in str(f)


def reports_of_build(build_support: ModuleType) -> list[Any]:
    """The compiler's reports of the kernels that the extension has."""
    rows = set(compiled())
    names = {row.unit for row in build_support.KERNELS if key(row) in rows}
    reports = [report for report in build_support.read_ptxas_reports() if report.file in names]
    if {report.file for report in reports} != names:
        pytest.skip("built elsewhere: build/ptxas has not every kernel's report")
    return reports


@built
def test_plain_kernels_do_not_spill(build_support: ModuleType) -> None:
    reports = reports_of_build(build_support)
    spilling = [str(x) for x in reports if x.spilled and x.file.endswith("_plain")]
    if spilling:
        pytest.fail("\n".join(["plain kernels spill:", *spilling]), pytrace=False)


@built
def test_no_kernel_is_serialised(build_support: ModuleType) -> None:
    """WGMMA that ptxas serialised, or registers that it did not move, cost half the speed."""
    if slow := [str(report) for report in reports_of_build(build_support) if report.losses]:
        pytest.fail("\n".join(["ptxas says that performance is lost:", *slow]), pytrace=False)


@built
def test_imports_without_a_driver() -> None:
    code = "import flash_attn._C as c; print(len(c.kernels()))"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == len(compiled())


@built
def test_links_neither_torch_nor_cudart() -> None:
    run = subprocess.run(["ldd", cuda._C.__file__], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in run.stdout.splitlines()]
    assert any(name.startswith("libc.so") for name in names), names
    assert not [name for name in names if re.search(r"torch|c10|cudart|libcuda", name)], names


@built
def test_extension_has_the_table(build_support: ModuleType) -> None:
    table = set(map(key, build_support.KERNELS))
    rows = compiled()
    assert len(set(rows)) == len(rows)
    if set(rows) != table:
        assert set(rows) < table
        pytest.skip(f"built with a filter: {len(rows)} of {len(table)} kernels")


NUMBERS = {
    "max_seqlen_q": 5,
    "max_seqlen_k": 7,
    "softmax_scale": 0.1,
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "dropout_p": 0.0,
    "deterministic": False,
    "shared_memory": 0,
    "tile": -1,
    "num_splits": 0,
    "seqlen_new": 0,
    **{f"place_{x}": 0 for x in ("nheads", "batch", "head", "row", "column", "shift")},
}


def place_of(
    operation: str, backend: str = "sm80", features: str = "plain", headdim: int = 64
) -> int:
    """The place of a kernel for bf16 among those of this build."""
    row = (operation, backend, "bf16", "bf16", headdim, headdim, features)
    if row not in compiled():
        pytest.skip(f"built without {row}")
    return compiled().index(row)


def prepare(operation: str, device: str, kernel: int | None = None, **changes: Any) -> Any:
    """A call with tensors of zeros, some of them not as they should be; None: left out."""
    q = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16, device=device)
    k = torch.zeros(2, 7, 2, 64, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(2, 4, 5, device=device)
    tensors: dict[str, Any] = {"q": q, "k": k, "v": k, "out": q, "lse": lse}
    if operation == "backward":
        tensors |= {"dout": q, "delta": lse, "dq": q, "dk": k, "dv": k}
    numbers = {name: changes.pop(name, number) for name, number in NUMBERS.items()}
    tensors |= {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in changes.items()}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    place = place_of(operation) if kernel is None else kernel
    return cuda._C.prepare(place, tensors, numbers)


@built
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_boundary_on_the_cpu(operation: str) -> None:
    with pytest.raises(ValueError, match="q: on the CPU; accepted: a CUDA tensor"):
        prepare(operation, "cpu")
    with pytest.raises(TypeError, match="torch.Tensor"):
        prepare(operation, "cpu", q=[1.0])
    with pytest.raises(ValueError, match="^q: missing"):
        prepare(operation, "cpu", q=None)
    with pytest.raises(ValueError, match="^kernel: no such row"):
        prepare(operation, "cpu", kernel=len(compiled()))


BF16 = torch.zeros(4000, dtype=torch.bfloat16)


@built
@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": BF16[:1280].view(5, 4, 64)}, r"^q, k, v: got shapes \(5, 4, 64\)"),
        ({"k": BF16[:1792].view(2, 7, 2, 64).half()}, "^k: .*dtype fp16.*accepted: .*dtype bf16"),
        ({"k": BF16[:3584].view(2, 7, 2, 128)}, r"^k: .*accepted: shape \(2, 7, 2, 64\)"),
        ({"v": BF16[:1792].view(2, 7, 64, 2).mT}, "^v: .*last stride 1"),
        ({"out": BF16[:2560].view(2, 5, 64, 4).mT}, "^out: .*last stride 1"),
        ({"out": None}, "^out: missing"),
        ({"lse": torch.zeros(2, 5, 4).mT}, "^lse: .*contiguous"),
        ({"lse": torch.zeros(2, 4, 5).double()}, "^lse: .*dtype other"),
        ({"cu_seqlens_q": torch.zeros(3).int()}, "^q, k, v: .*3 dimensions where packed"),
        ({"seqused_k": torch.zeros(3).int()}, r"^seqused_k: .*accepted: shape \(2\), dtype int32"),
        ({"leftpad_k": torch.zeros(2).long()}, "^leftpad_k: .*dtype int64.*dtype int32"),
        ({"alibi_slopes": torch.zeros(2, 2)}, r"^alibi_slopes: .*accepted: shape \(2, 4\)"),
        (
            {"alibi_slopes": torch.zeros(4)},
            "^kernel: got sm80 forward bf16 64/64 plain, .*no alibi",
        ),
        ({"softcap": 1.0}, "^kernel: got .*no softcap"),
        ({"block_table": torch.zeros(2, 1).int()}, "^kernel: got .*no pages"),
        ({"rng_state": torch.zeros(2).long()}, "^dropout_p .*: got 0; accepted: from 1"),
        ({"rng_state": torch.zeros(2).long(), "dropout_p": 0.5}, "^kernel: got .*no dropout"),
        ({"dout": BF16[:2560].view(2, 5, 4, 64)}, "^dout: got a tensor; accepted by .*: None"),
    ],
)
def test_boundary_checks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare("forward", "cuda", **changes)


@built
@pytest.mark.gpu
def test_boundary_of_the_kernel() -> None:
    with pytest.raises(ValueError, match="^kernel: got sm80 forward bf16 32/32 plain for head dim"):
        prepare("forward", "cuda", kernel=place_of("forward", headdim=32))
    shifted = torch.zeros(2561, dtype=torch.bfloat16)[1:].view(2, 5, 4, 64)
    with pytest.raises(ValueError, match="^kernel: got sm90 forward .*no any_alignment"):
        shifted = shifted.cuda().new_zeros(2561)[1:].view(2, 5, 4, 64)
        prepare("forward", "cuda", kernel=place_of("forward", "sm90", "full"), q=shifted)


@built
@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dout": BF16[:2560].view(2, 5, 64, 4).mT}, "^dout: .*last stride 1"),
        ({"dk": BF16[:1280].view(1, 5, 4, 64)}, r"^dk: .*accepted: shape \(2, 7, 2, 64\)"),
        ({"dlse": torch.zeros(2, 5, 4).mT}, "^dlse: .*contiguous"),
        ({"s_aux": torch.zeros(4)}, "^s_aux: got a tensor; accepted by the backward: None"),
    ],
)
def test_boundary_checks_of_the_backward(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare("backward", "cuda", **changes)


@built
@pytest.mark.gpu
def test_workspaces() -> None:
    """What kernels ask for, and that a launch wants a place for each of its tensors."""
    forward = prepare("forward", "cuda", kernel=place_of("forward", "sm90"))
    counters = ("counters", 4 * cuda._C.KEPT_ZERO, True)
    assert forward.workspaces == [counters]
    split = prepare("forward", "cuda", kernel=place_of("forward", "sm90"), num_splits=3)
    assert split.workspaces == [counters]
    assert prepare("forward", "cuda").workspaces == []
    tiles = 4 * 2  # of 16 queries: of 4 heads of 2 sequences of 5
    dq_accum = ("dq_accum", 4 * tiles * 16 * 64, False)
    of_parts = [  # a group of 2 heads, key blocks of 64
        ("partial_dkv", 4 * 2 * (2 * 2 * 64) * (64 + 64), False),
        counters,
    ]
    assert prepare("backward", "cuda").workspaces == [dq_accum, *of_parts]
    packed = prepare(
        "backward",
        "cuda",
        **{name: BF16[:2560].view(10, 4, 64) for name in ("q", "out", "dout", "dq")},
        lse=torch.zeros(4, 10),
        delta=torch.zeros(4, 10),
        cu_seqlens_q=torch.tensor([0, 1, 1]).int(),  # where most rows belong to no sequence
        max_seqlen_q=1,
    )
    dq_accum_packed = ("dq_accum", 4 * 4 * (10 // 16 + 2) * 16 * 64, False)
    assert packed.workspaces == [dq_accum_packed, *of_parts]
    ordered = prepare("backward", "cuda", deterministic=True)
    assert ordered.workspaces == [dq_accum, ("dq_turn", 4 * tiles, False), *of_parts]
    assert ordered.names[-4:] == ["dq_accum", "dq_turn", "partial_dkv", "counters"]
    with pytest.raises(ValueError, match="^places, offsets: got 1 and 1; accepted: one for each"):
        ordered.at([0], [0])
    with pytest.raises(ValueError, match="^launch: too few tensors"):
        forward.at(range(len(forward.names)), [0] * len(forward.names)).launch((), (), 0)


def test_links_of_the_description_are_absolute(build_support: ModuleType) -> None:
    text = build_support.long_description("https://example.org/repo")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links and all(link.startswith(("https://", "#")) for link in links)
    assert "https://example.org/repo/raw/main/benchmarks/results" in text  # a plot
    without = re.findall(r"\]\(([^)\s]+)\)", build_support.long_description(""))
    assert all(link.startswith(("https://", "#")) for link in without)
