"""flash_attn._C between Python and C++, linked with calls that need no GPU (tests/cpp)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.fixture(scope="module")
def library(build_support: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    nvcc = build_support.find_nvcc(os.environ)
    if COMPILER is None or nvcc is None:
        pytest.skip("no C++ compiler, or no CUDA toolkit, whose headers it takes")
    includes = [sysconfig.get_path("include"), str(build_support.read_toolkit(nvcc).include)]
    if not Path(includes[0], "Python.h").exists():
        pytest.skip("no headers of Python")
    library = tmp_path_factory.mktemp("bindings") / "_C.abi3.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden"]
    folders = [f"-I{ROOT / 'csrc'}", *(flag for path in includes for flag in ("-isystem", path))]
    sources = [str(ROOT / "csrc/bindings.cpp"), str(ROOT / "tests/cpp/fake_calls.cpp")]
    subprocess.run([COMPILER, *flags, *folders, *sources, "-o", str(library)], check=True)
    return library


def load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake._C", library)
    assert spec is not None and spec.loader is not None
    return importlib.util.module_from_spec(spec)


@pytest.fixture(scope="module")
def module(library: Path) -> ModuleType:
    return load(library)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def test_a_launch_gets_the_addresses(module: ModuleType) -> None:
    q, k, out, scratch = bf16(2, 3), bf16(4), bf16(2, 3), bf16(8)
    call = module.prepare(0, {"q": q, "k": k, "out": out}, {"bytes": 16})
    assert call.names == ["k", "out", "q", "scratch"]
    assert call.workspaces == [("scratch", 16, True)]
    addresses = torch.zeros(4, dtype=torch.int64)
    # Numbers and None stand among the arguments of a call.
    placed = call.at([2, -1, 0, -2], range(0, 40, 10))
    given = (q, 0.5, k, None), (out, scratch), addresses.data_ptr()
    references = [sys.getrefcount(x) for x in (q, k, out, scratch, None, placed)]
    for _ in range(100):
        assert placed.launch(*given) is None
    counted = [sys.getrefcount(x) for x in (q, k, out, scratch, None, placed)]
    assert all(abs(a - b) < 50 for a, b in zip(references, counted, strict=True))
    expected = [k.data_ptr(), out.data_ptr() + 10, q.data_ptr() + 20, scratch.data_ptr() + 30]
    assert addresses.tolist() == expected
    del call  # what it placed lives on
    assert placed.names[0] == "k"


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda m, c: m.prepare(0, {"q": [1.0]}, {}), TypeError, "q: got .*list.*torch.Tensor"),
        (lambda m, c: m.prepare(0, [], {}), TypeError, "tensors: got .*list.*a dict"),
        (lambda m, c: m.prepare(0, {1: bf16(1)}, {}), TypeError, "argument"),
        (lambda m, c: m.prepare(0, {"q": torch.zeros(2)}, {}), ValueError, "^q: dtype"),
        (lambda m, c: m.prepare(0, {"q": bf16(*[1] * 6)}, {}), ValueError, "more than 5 dim"),
        (lambda m, c: m.prepare(0, {}, {"bytes": "8"}), TypeError, "str"),
        (lambda m, c: m.prepare(1, {}, {}), ValueError, "^kernel: no such row"),
        (lambda m, c: m.prepare(-1, {}, {}), ValueError, "^kernel: no such row"),
        (lambda m, c: m.prepare(0, {}), TypeError, "got 2 arguments; accepted: 3"),
        (
            lambda m, c: m.prepare(0, {f"{i}": bf16(1) for i in range(32)}, {"bytes": 8}),
            ValueError,
            "more than a launch takes",
        ),
        (lambda m, c: m.prepare(0, {}, {"bytes": 8}).launch((), (), 0), ValueError, "no places"),
        (lambda m, c: c.at([0], [0]), ValueError, "got 1 and 1; accepted: one for each of names"),
        (lambda m, c: c.at([0, "1"], [0, 0]), TypeError, "str"),
        (lambda m, c: c.at(3, [0, 0]), TypeError, "int"),
        (lambda m, c: c.launch((), (), 0), ValueError, "^launch: too few tensors"),
        (lambda m, c: c.launch([], (), 0), TypeError, "^arguments: got .*list.*a tuple"),
        (lambda m, c: c.launch((bf16(1),) * 2, (), 0), RuntimeError, "^no such stream"),
        (lambda m, c: c.launch((bf16(1),) * 2, (), None), TypeError, "int"),
        (lambda m, c: m.call_key([], 0), TypeError, "^arguments: got .*list.*a tuple"),
        (lambda m, c: type(c)(), TypeError, "cannot create"),
    ],
)
def test_errors(module: ModuleType, call: Any, error: type[Exception], message: str) -> None:
    placed = module.prepare(0, {"q": bf16(1)}, {"bytes": 8.0}).at([0, 1], [0, 0])
    with pytest.raises(error, match=message):
        call(module, placed)


def test_a_dict_that_changes(module: ModuleType) -> None:
    """A number's __float__ may drop the dict's own references to its name and itself."""

    class Clearing:
        def __float__(self) -> float:
            numbers.clear()
            taken.extend(f"{i:05}" for i in range(1000))  # in the place of the name
            return 8.0

    for _ in range(20):
        taken: list[str] = []
        numbers: dict[str, Any] = {"".join(["b", "ytes"]): Clearing()}
        assert module.prepare(0, {}, numbers).workspaces == [("scratch", 8, True)]


DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float32)
DTYPES += (torch.int32, torch.int64, torch.float64)


def test_ways_to_read_a_tensor(
    module: ModuleType, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By DLPack, and by the attributes that torch before 2.10 has."""
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    by_attributes = load(shutil.copy(library, tmp_path))
    tensors = [torch.zeros(4, 3, 6).to(dtype).transpose(0, 1)[..., 1:] for dtype in DTYPES]
    told = []
    for x in tensors:
        for reader in (module, by_attributes):
            with pytest.raises(ValueError) as error:
                reader.prepare(0, {"q": x}, {"tell": 1})
            told.append(str(error.value))
        assert told[-1] == told[-2] and "device -1, 3 by 6, 4 by 18, 5 by 1" in told[-1]
        assert int(told[-1].split(",")[0], 16) == x.data_ptr()
    assert len({text.split(",")[1] for text in told}) == len(DTYPES)

    class Broken(torch.Tensor):
        def data_ptr(self) -> Any:
            return "nowhere"

    call = by_attributes.prepare(0, {"q": bf16(1)}, {"bytes": 8}).at([0, 1], [0, 0])
    broken = bf16(1).as_subclass(Broken)
    for use in (
        lambda: by_attributes.prepare(0, {"q": broken}, {"bytes": 8}),
        lambda: call.launch((broken, broken), (), 8),
    ):
        with pytest.raises(TypeError, match="integer"):
            use()


def test_what_a_call_is_remembered_by(module: ModuleType) -> None:
    key = module.call_key((1, 2.5, True, None), 7)
    assert isinstance(key, bytes) and key == module.call_key((1, 2.5, True, None), 7)
    others = [(1, 2.5, False, None), (2, 2.5, True, None), (1, 2, True, None), (1, 2.5, 1, None)]
    assert len({key, *(module.call_key(x, 7) for x in others)}) == 5
    assert module.call_key((1, 2.5, True, None), 8) != key
    for unknown in (bf16(2), "causal", 2**63, [1]):  # on the CPU; no number
        assert module.call_key((1, unknown), 7) is None


def test_rows_and_owners(module: ModuleType) -> None:
    row = ("forward", "fake", "bf16", "bf16", "bf16", 64, 64, "plain", ["softcap"], 1)
    assert module.kernels() == [row]
    assert (module.zeros_owner(0), module.zeros_owner(3)) == (None, -3)
    assert module.GRAPH_SLOTS > 0 and module.KEPT_ZERO > 0
