"""Compiles csrc/ into flash_attn._C with ninja: what setup.py does, kept importable for the tests.

Everything is written under build/. The module keeps to the limited API of Python, so one build
serves every version from 3.10 on. Commands hold no path of the machine: paths reach the compiler
through the environment of ninja. So build/ can be carried to another machine with the same sources
and nothing is compiled twice.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# Relative to ROOT, where ninja runs.
BUILD = Path("build")
GENERATED = BUILD / "generated"
OBJECTS = BUILD / "kernels"
MODULE = BUILD / "_C.so"
PORTABLE_MODULE = BUILD / "portable" / "_C.so"
PTXAS_REPORTS = BUILD / "ptxas"

# The first with cudaGetDriverEntryPointByVersion and with cuda::ptx::mbarrier_init.
OLDEST_CUDA = (12, 5)
# What one compiler process may need at its peak; bounds the default number of jobs.
JOB_MEMORY = 2 << 30

# Architecture as users name it -> the kernels that are compiled for it. Code for 90a runs on 9.0
# alone.
ARCHITECTURES = {"80": "sm80", "90": "sm80", "100": "sm80", "120": "sm80", "90a": "sm90"}
DEFAULT_ARCHITECTURES = ["80", "90a"]
# Of the sm80 kernels there is always PTX: other GPUs run it through the driver's compiler.
PTX_OF_SM80 = "-gencode=arch=compute_80,code=compute_80"
CPP_DTYPES = {
    "fp16": ("__half", "kFloat16"),
    "bf16": ("__nv_bfloat16", "kBFloat16"),
    "e4m3": ("__nv_fp8_e4m3", "kFloat8E4M3"),
    "int8": ("int8_t", "kInt8"),
    "fp32": ("float", "kFloat32"),
}
CPP_FEATURES = {"plain": "kPlain", "full": "kFull"}


class BuildError(SystemExit):
    """Ends the build with a message for the user and no traceback."""


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: one row of _C.kernels()."""

    operation: str
    backend: str
    dtype: str  # of q
    kv_dtype: str  # of k and v
    out_dtype: str
    headdim: int  # of q and k, the largest that it takes
    headdim_v: int
    features: str

    @property
    def name(self) -> str:
        return self._name(self.dtype, self.kv_dtype, self.out_dtype)

    @property
    def unit(self) -> str:
        """The name of its generated .cu file and object, which kernels of fp16 and bf16 share.

        The headers of a file take as long to compile as many a kernel.
        """
        dtypes = (self.dtype, self.kv_dtype, self.out_dtype)
        return self._name(*("half" if dtype in ("fp16", "bf16") else dtype for dtype in dtypes))

    def _name(self, *dtypes: str) -> str:
        types = "_".join(dict.fromkeys(dtypes))
        dim = f"d{self.headdim}" + ("" if self.headdim == self.headdim_v else f"v{self.headdim_v}")
        return f"{self.backend}_{self.operation}_{types}_{dim}_{self.features}"

    @property
    def cost(self) -> tuple[int, int, bool]:
        """Orders kernels by how long they take to compile."""
        operations = "merge widen append rotary quantise decode forward quantised backward"
        return (
            operations.split().index(self.operation),
            self.headdim + self.headdim_v,
            self.features == "full",
        )


# Smaller head dims run in the next larger kernel, which reads them in place.
HEADDIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def kv_dtypes(operation: str, dtype: str) -> tuple[str, ...]:
    """Of the kernels for q of a dtype."""
    return (dtype, "e4m3") if operation in ("decode", "append") else (dtype,)


# Of a forward whose operands have 8 bits; q and k are padded to the next one.
QUANTISED_HEADDIMS = (64, 96, 128, 192, 256)

# The one table of what is compiled: a row for each kernel.
KERNELS = (
    *(
        Kernel(operation, backend, dtype, kv_dtype, dtype, headdims[0], headdims[1], features)
        for backend, operation, all_headdims in (
            ("sm80", "forward", HEADDIMS),
            ("sm80", "backward", HEADDIMS),
            ("sm80", "decode", HEADDIMS),
            ("sm90", "forward", HEADDIMS[1:]),
            ("sm90", "backward", HEADDIMS[1:]),
            ("sm90", "decode", HEADDIMS),
        )
        for dtype, headdims, features in product(("fp16", "bf16"), all_headdims, CPP_FEATURES)
        for kv_dtype in kv_dtypes(operation, dtype)
    ),
    *(
        Kernel(operation, backend, dtype, kv_dtype, dtype, *HEADDIMS[-1], "full")  # any head dim
        for backend, operation, dtype in product(
            ("sm80", "sm90"), ("rotary", "append"), ("fp16", "bf16")
        )
        for kv_dtype in kv_dtypes(operation, dtype)
    ),
    *(
        Kernel("rotary", backend, "fp32", "fp32", "fp32", *HEADDIMS[-1], "full")
        for backend in ("sm80", "sm90")
    ),
    *(
        Kernel("widen", backend, dtype, "e4m3", dtype, *HEADDIMS[-1], "full")
        for backend, dtype in product(("sm80", "sm90"), ("fp16", "bf16"))
    ),
    *(  # of 16 bits into the same or into float32
        Kernel("merge", backend, dtype, dtype, out_dtype, *HEADDIMS[-1], "full")
        for backend, dtype in product(("sm80", "sm90"), ("fp16", "bf16"))
        for out_dtype in (dtype, "fp32")
    ),
    *(
        Kernel("quantised", "sm90", dtype, dtype, out_dtype, headdim, headdim, features)
        for dtype, out_dtype, headdim, features in product(
            ("int8", "e4m3"), ("fp16", "bf16"), QUANTISED_HEADDIMS, CPP_FEATURES
        )
    ),
    *(  # of inputs of 16 bits, into those
        Kernel("quantise", "sm90", dtype, kv_dtype, "e4m3", headdim, headdim, "full")
        for dtype, kv_dtype in product(("fp16", "bf16"), ("int8", "e4m3"))
        for headdim in QUANTISED_HEADDIMS
    ),
)


# --- What the package index shows -----------------------------------------------------------------


def long_description(url: str) -> str:
    """The README, whose links to files of the repository lead to `url`, where that lies."""

    def absolute(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if ":" in target or target.startswith("#"):
            return link[0]
        if not url:
            return "" if image else text
        return f"{image}[{text}]({url}/{'raw' if image else 'blob'}/main/{target})"

    url, readme = url.rstrip("/"), (ROOT / "README.md").read_text()
    return re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", absolute, readme)


def project_urls(url: str) -> dict[str, str]:
    url = url.rstrip("/")
    if not url:
        return {}
    pages = {
        "Documentation": "blob/main/docs/index.md",
        "Changelog": "blob/main/CHANGELOG.md",
        "Issues": "issues",
    }
    return {"Source": url} | {name: f"{url}/{page}" for name, page in pages.items()}


# --- Settings from the environment ----------------------------------------------------------------


def switched_on(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise BuildError(f"{name}={value!r}: accepted are 1 (yes) and 0 (no)")
    return value == "1"


def selected_architectures(environ: Mapping[str, str]) -> list[str]:
    names = environ.get("FLASH_ATTN_CUDA_ARCHS", "")
    if not names:
        return DEFAULT_ARCHITECTURES
    found = [arch.strip() for arch in names.split(";") if arch.strip()]
    unknown = [arch for arch in found if arch not in ARCHITECTURES]
    if unknown:
        raise BuildError(
            f"FLASH_ATTN_CUDA_ARCHS={names!r}: unknown {unknown}; "
            f"accepted are {', '.join(ARCHITECTURES)}, separated by semicolons"
        )
    return found or DEFAULT_ARCHITECTURES


def selected_kernels(environ: Mapping[str, str]) -> list[Kernel]:
    """The rows of the table that FLASH_ATTN_CUDA_ARCHS and FLASH_ATTN_ONLY leave."""
    backends = {ARCHITECTURES[arch] for arch in selected_architectures(environ)}
    rows = [row for row in KERNELS if row.backend in backends]

    only = environ.get("FLASH_ATTN_ONLY", "")
    patterns = [pattern.strip() for pattern in only.split(",") if pattern.strip()]
    if patterns:
        names = [row.name for row in rows]
        rows = [row for row in rows if any(fnmatchcase(row.name, f"*{p}*") for p in patterns)]
        if not rows:
            raise BuildError(f"FLASH_ATTN_ONLY={only!r} matches none of {', '.join(names)}")
    return rows


def job_count(environ: Mapping[str, str]) -> int:
    value = environ.get("MAX_JOBS", "")
    if value:
        if not value.isdecimal() or int(value) == 0:
            raise BuildError(f"MAX_JOBS={value!r}: accepted is a whole number of at least 1")
        return int(value)
    cores = len(os.sched_getaffinity(0))
    available = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    if available is None:
        return cores
    return max(1, min(cores, int(available[1]) * 1024 // JOB_MEMORY))


# --- Tools ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaToolkit:
    nvcc: Path
    version: tuple[int, int]
    include: Path


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """nvcc of CUDA_HOME, else of PATH; nowhere else, so that it can be hidden."""
    home = environ.get("CUDA_HOME")
    places = [os.path.join(home, "bin")] if home else []
    places.append(environ.get("PATH", ""))
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    return Path(nvcc) if nvcc else None


def choose_nvcc(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """nvcc, or None: the Python part is installed alone; and why there is none, if so."""
    skipped = switched_on(environ, "FLASH_ATTN_SKIP_CUDA")
    required = switched_on(environ, "FLASH_ATTN_REQUIRE_CUDA")
    if skipped and required:
        raise BuildError(
            "FLASH_ATTN_SKIP_CUDA=1 and FLASH_ATTN_REQUIRE_CUDA=1 contradict each other: unset one"
        )
    if skipped:
        return None, "FLASH_ATTN_SKIP_CUDA=1"
    nvcc, missing = find_nvcc(environ), "no nvcc in CUDA_HOME or PATH"
    if sys.platform != "linux":
        nvcc, missing = None, f"the kernels need Linux, and this is {sys.platform}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        nvcc, missing = None, "the kernels need a Python with a global interpreter lock"
    if required and nvcc is None:
        raise BuildError(
            f"FLASH_ATTN_REQUIRE_CUDA=1, but {missing}: set CUDA_HOME to a CUDA toolkit"
        )
    return nvcc, missing


def read_toolkit(nvcc: Path) -> CudaToolkit:
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        printed = answer.stdout + answer.stderr
    except OSError as error:  # no program
        printed = str(error)
    release = re.search(r"release (\d+)\.(\d+)", printed)
    if release is None:
        raise BuildError(f"{nvcc} --version printed no release:\n{printed}")
    version = (int(release[1]), int(release[2]))
    if version < OLDEST_CUDA:
        raise BuildError(
            f"{nvcc} is CUDA {version[0]}.{version[1]}; accepted are {OLDEST_CUDA[0]}."
            f"{OLDEST_CUDA[1]} and newer. Set CUDA_HOME to a newer toolkit, or "
            "FLASH_ATTN_SKIP_CUDA=1 to install without the extension"
        )
    # nvcc may be a wrapper anywhere on PATH: ask it where its toolkit lies.
    dryrun = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    include = re.search(r'INCLUDES="-I(.+?)"', dryrun)
    if include is None:
        raise BuildError(f"{nvcc} --dryrun named no include folder:\n{dryrun}")
    return CudaToolkit(nvcc, version, Path(include[1]))


def find_ninja() -> str:
    """The ninja of the Python package, which an isolated build has, else the system's."""
    try:
        from ninja import BIN_DIR
    except ImportError:  # no such package, or another one of that name
        found = shutil.which("ninja")
        if found is None:
            raise BuildError("ninja was not found: pip install ninja") from None
        return found
    return os.path.join(BIN_DIR, "ninja")


# --- Generated sources ----------------------------------------------------------------------------


def units(rows: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    """The kernels of each generated file."""
    found: dict[str, list[Kernel]] = {}
    for row in rows:
        found.setdefault(row.unit, []).append(row)
    return found


def kernel_definition(row: Kernel) -> str:
    dtypes = [CPP_DTYPES[dtype] for dtype in (row.dtype, row.kv_dtype, row.out_dtype)]
    headdims = f"{row.headdim}, {row.headdim_v}"
    types = ", ".join(cpp_type for cpp_type, _ in dtypes)
    names = ", ".join(f"DType::{enumerator}" for _, enumerator in dtypes)
    row_type = f"{row.backend}::{row.operation.title()}Row"
    return f"""\
extern const Kernel {row.name} =
    make_kernel<{row_type}<{types}, {headdims}, FeatureSet::{CPP_FEATURES[row.features]}>>(
        "{row.operation}", "{row.backend}", {names}, {headdims}, "{row.features}");
"""


def unit_source(rows: Sequence[Kernel]) -> str:
    """The file of kernels of one unit."""
    definitions = "\n".join(map(kernel_definition, rows))
    return f"""\
// Written by build_support.py.
#include "{rows[0].backend}/{rows[0].operation}_launch.cuh"

namespace flash {{

{definitions}
}}  // namespace flash
"""


def kernels_header(rows: list[Kernel]) -> str:
    """What csrc/kernels.cpp lists."""
    declarations = "\n".join(f"extern const Kernel {row.name};" for row in rows)
    addresses = "\n".join(f"    &{row.name}," for row in rows)
    return f"""\
// Written by build_support.py.
#pragma once

namespace flash {{

{declarations}

inline const Kernel* const kKernels[] = {{
{addresses}
}};

}}  // namespace flash
"""


# The glibc of manylinux_2_28. The compiler's C++ library is newer than that platform's: it is
# linked statically.
PORTABLE_LINK = (
    '"$$PYTHON" -m ziglang cc -target x86_64-linux-gnu.2.28 -shared -s $in "$$CUDART" '
    f'"$$LIBSTDCXX" "$$LIBGCC" "$$LIBGCC_S" -Wl,--version-script={GENERATED}/exports.map '
    "-lm -lpthread -ldl -lrt"
)
LINK = "nvcc -shared -cudart static -nodlink -Xlinker --exclude-libs=ALL $in"


def compiler_targets(backend: str, archs: Sequence[str]) -> str:
    """The options of nvcc for the kernels of a backend."""
    targets = [
        f"-gencode=arch=compute_{arch},code=sm_{arch}"
        for arch in archs
        if ARCHITECTURES[arch] == backend
    ]
    return " ".join(targets + [PTX_OF_SM80] * (backend == "sm80"))


def ninja_manifest(rows: list[Kernel], archs: Sequence[str], portable: bool = False) -> str:
    """build.ninja. Compiler messages are shown; the statistics of ptxas go to PTXAS_REPORTS.

    What takes longest comes first, so that no core is left with it alone in the end.
    """
    lines = f"""\
builddir = {BUILD}
flags = -std=c++17 -O3 -Icsrc -I{GENERATED} -Xcompiler=-fPIC,-fvisibility=hidden,-Wall $
    -Xfatbin=-compress-all

rule kernel
  command = nvcc $flags $gencode -Xptxas -v -MMD -MF $out.d -c $in -o $out > $report 2>&1; $
      status=$$?; grep -v -e '^ptxas info' -e 'bytes stack frame' $report; exit $$status
  depfile = $out.d
  description = nvcc $in

rule host
  command = nvcc $flags -DNDEBUG -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  description = nvcc $in

rule link
  command = {PORTABLE_LINK if portable else LINK} -o $out
  description = link $out

""".splitlines()
    objects = []
    plans = ("sm90/forward_plan", "sm90/backward_plan")
    for name in ("bindings", "call", "graph_slots", "kernels", "single_threaded", *plans):
        target = OBJECTS / f"{name.replace('/', '_')}.o"
        lines.append(f"build {target}: host csrc/{name}.cpp | {OBJECTS}/toolchain.txt")
        objects.append(target)
    for unit, kernels in units(sorted(rows, key=lambda row: row.cost, reverse=True)).items():
        target, report = OBJECTS / f"{unit}.o", PTXAS_REPORTS / f"{unit}.txt"
        source = GENERATED / f"{unit}.cu"
        lines += [
            f"build {target} | {report}: kernel {source} | {OBJECTS}/toolchain.txt",
            f"  gencode = {compiler_targets(kernels[0].backend, archs)}",
            f"  report = {report}",
        ]
        objects.append(target)
    module = PORTABLE_MODULE if portable else MODULE
    lines.append(f"build {module}: link {' '.join(map(str, objects))}")
    return "\n".join([*lines, ""])


# --- The build ------------------------------------------------------------------------------------


def write_if_changed(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def is_product(folder: Path) -> bool:
    """Whether a folder is a build's own, and may be removed."""
    return folder.resolve().is_relative_to((ROOT / BUILD).resolve())


def settle_times(inputs: Iterable[Path], record: Path) -> None:
    """Make modification times follow content, since ninja compares times alone.

    A checkout or a copy gives unchanged files a new time, and a copy can give a changed file an
    old one. A file whose content is as recorded gets its recorded time back; one whose content
    changed counts as changed now.
    """
    known = json.loads(record.read_text()) if record.exists() else {}
    seen = {}
    for path in inputs:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if str(path) in known:
            old_digest, old_time = known[str(path)]
            mtime = old_time if digest == old_digest else time.time_ns()
            if mtime != path.stat().st_mtime_ns:  # only the owner may
                os.utime(path, ns=(mtime, mtime))
        seen[str(path)] = (digest, path.stat().st_mtime_ns)
    whole = record.with_suffix(".new")  # a build that is killed leaves no half of a record
    whole.write_text(json.dumps({**known, **seen}, indent=1))
    whole.replace(record)


def portable_tools(toolkit: CudaToolkit) -> dict[str, str]:
    """What PORTABLE_LINK takes from the environment."""
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError("FLASH_ATTN_PORTABLE=1 links with zig: pip install ziglang")
    tools = {"PYTHON": sys.executable, "CUDART": f"{toolkit.include.parent}/lib/libcudart_static.a"}
    for variable, library in (
        ("LIBSTDCXX", "libstdc++.a"),
        ("LIBGCC", "libgcc.a"),
        ("LIBGCC_S", "libgcc_s.so.1"),
    ):
        ask = ["g++", f"-print-file-name={library}"]
        tools[variable] = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    tools = {name: path.strip() for name, path in tools.items()}
    missing = [path for path in tools.values() if not Path(path).is_file()]
    if missing:
        raise BuildError(f"FLASH_ATTN_PORTABLE=1 links what is not here: {', '.join(missing)}")
    return tools


def build_extension(environ: Mapping[str, str], nvcc: Path) -> Path:
    """Compile and link what changed; the module's path."""
    started = time.perf_counter()
    rows, jobs, ninja = selected_kernels(environ), job_count(environ), find_ninja()
    toolkit = read_toolkit(nvcc)
    os.chdir(ROOT)
    PTXAS_REPORTS.mkdir(parents=True, exist_ok=True)

    portable = switched_on(environ, "FLASH_ATTN_PORTABLE")
    module = PORTABLE_MODULE if portable else MODULE
    cuda_version = "CUDA {}.{}\n".format(*toolkit.version)
    inputs = [
        write_if_changed(GENERATED / f"{unit}.cu", unit_source(kernels))
        for unit, kernels in units(rows).items()
    ]
    inputs += [
        write_if_changed(GENERATED / "generated_kernels.h", kernels_header(rows)),
        # No path of these tools is in a command, so a change of version would go unnoticed.
        write_if_changed(OBJECTS / "toolchain.txt", cuda_version),
    ]
    write_if_changed(GENERATED / "exports.map", "{ global: PyInit__C; local: *; };\n")
    inputs += sorted(path for path in Path("csrc").rglob("*") if path.is_file())
    settle_times(inputs, BUILD / "times.json")
    manifest = write_if_changed(
        BUILD / "build.ninja", ninja_manifest(rows, selected_architectures(environ), portable)
    )

    # Folders named in this variable count as the system's: -MMD leaves their headers out.
    includes = (
        toolkit.include,
        sysconfig.get_path("include"),
        environ.get("CPLUS_INCLUDE_PATH", ""),
    )
    tools = {
        "PATH": os.pathsep.join((str(nvcc.parent), environ.get("PATH", ""))),
        "CPLUS_INCLUDE_PATH": os.pathsep.join(str(folder) for folder in includes if str(folder)),
    }
    if portable:
        tools |= portable_tools(toolkit)
    print(f"{nvcc}, {cuda_version.strip()}: {len(rows)} kernels, {jobs} jobs", flush=True)
    command = [ninja, "-f", str(manifest), "-j", str(jobs)]
    status = subprocess.run(command, env={**environ, **tools}).returncode
    if status != 0:
        raise BuildError(
            f"The extension did not compile: ninja ended with {status}, messages are above"
        )
    print_losses(rows)

    seconds, size = time.perf_counter() - started, module.stat().st_size / 1e6
    took = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
    print(
        f"{module}: {size:.1f} MB, {len(rows)} kernels, {took} with {jobs} jobs on "
        f"{len(os.sched_getaffinity(0))} cores",
        flush=True,
    )
    return module


# --- What the compiler said -----------------------------------------------------------------------


@dataclass(frozen=True)
class PtxasReport:
    """What one kernel takes of one architecture."""

    file: str  # Kernel.unit
    function: str  # mangled
    target: str  # "sm_80"
    registers: int
    spilled: int  # bytes stored and loaded
    # WGMMA serialised, setmaxnreg ignored: what is said of this kernel, or of no kernel by name.
    losses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join(
            (
                f"{self.file:36} {self.target:8} {self.registers:4} registers "
                f"{self.spilled:6} bytes spilled   {self.function}",
                *self.losses,
            )
        )


def read_ptxas_reports(folder: Path = ROOT / PTXAS_REPORTS) -> list[PtxasReport]:
    """The reports of every kernel compiled under build/, whatever of it is still in use."""
    return [
        report
        for path in sorted(folder.glob("*.txt"))
        for report in parse_ptxas(path.stem, path.read_text())
    ]


def print_losses(rows: Iterable[Kernel]) -> None:
    """What ptxas says of lost performance is "info" to it, like its statistics: show it."""
    for unit in units(rows):
        path = PTXAS_REPORTS / f"{unit}.txt"
        for report in parse_ptxas(unit, path.read_text()):
            if report.losses:
                print(f"warning: {report}", flush=True)


def parse_ptxas(file: str, text: str) -> Iterator[PtxasReport]:
    # A part for each kernel; functions that it calls have their properties in its part.
    losses = re.findall("Potential Performance Loss: (.*)", text)
    for part in text.split("Compiling entry function ")[1:]:
        function, target = re.findall(r"'(\w+)'", part)[:2]
        registers = re.search(r"Used (\d+) registers", part)
        if registers is None:
            raise ValueError(f"no registers for {function} in the report of {file}:\n{text}")
        spills = re.findall(r"(\d+) bytes spill", part)
        own = [x for x in losses if f"function '{function}'" in x or "function '" not in x]
        yield PtxasReport(
            file, function, target, int(registers[1]), sum(map(int, spills)), tuple(own)
        )
