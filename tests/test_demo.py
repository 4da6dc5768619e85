"""The demo passes, and fails where attention is broken."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flash_attn import demo

CASES = ("forward", "forward + backward", "varlen", "decode", "whole model")


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors on a shared machine: more threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def checks(printed: str) -> dict[str, str]:
    """The verdict on each line of the table."""
    lines = [line.split("  ") for line in printed.splitlines() if "MiB" in line]
    return {cells[0].split(",")[0]: cells[-1].strip() for cells in lines}


def test_passes(capfd) -> None:
    assert demo.main(["--quick", "--device", "cpu"]) == 0
    out, err = capfd.readouterr()
    assert checks(out) == dict.fromkeys(CASES, "ok")
    assert "tiled PyTorch" in out and "the same text" in out and "Everything is right" in out
    assert "training" in err and "40/40" in err


@pytest.mark.gpu
def test_passes_on_the_gpu(capfd) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    assert demo.main([]) == 0
    assert checks(capfd.readouterr().out) == dict.fromkeys(CASES, "ok")


def slightly_off(function):
    """The right result but for the last row, which is one percent too large."""

    def broken(*args, **kwargs) -> Tensor:
        out = function(*args, **kwargs)
        scale = torch.ones(out.shape[-3], 1, 1, dtype=out.dtype)
        scale[-1] = 1.01
        return out * scale

    return broken


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("flash_attn_func", {"forward", "forward + backward", "whole model"}),
        ("flash_attn_varlen_func", {"varlen"}),
        ("flash_attn_with_kvcache", {"decode"}),
    ],
)
def test_broken_attention_fails(name: str, wrong: set[str], monkeypatch, capfd) -> None:
    monkeypatch.setattr(demo, name, slightly_off(getattr(demo, name)))
    assert demo.main(["--quick", "--device", "cpu"]) == 1
    out = capfd.readouterr().out
    assert checks(out) == {case: "WRONG" if case in wrong else "ok" for case in CASES}
    assert "Something is WRONG" in out


def test_nan_is_wrong() -> None:
    exact = torch.randn(4, dtype=torch.float64)
    result = exact.float()
    assert demo.is_right(result, result, exact)
    poisoned = result.clone()
    poisoned[0] = torch.nan
    assert not demo.is_right(poisoned, result, exact)


def test_reference_is_the_formula() -> None:
    """Each row of the reference, from its own definition: more queries than keys, and fewer."""
    for seqlen_q, seqlen_k in [(3, 5), (4, 4), (5, 3)]:
        q = torch.randn(1, seqlen_q, 4, 8, dtype=torch.float64)
        k, v = torch.randn(2, 1, seqlen_k, 2, 8, dtype=torch.float64)
        out = demo.standard_attention(q, k, v)
        for i in range(max(0, seqlen_q - seqlen_k), seqlen_q):
            visible = i + seqlen_k - seqlen_q + 1
            for head in range(4):
                scores = k[0, :visible, head // 2] @ q[0, i, head] / 8**0.5
                expected = scores.softmax(0) @ v[0, :visible, head // 2]
                torch.testing.assert_close(out[0, i, head], expected)


def test_peak_memory_counts_what_lives_at_once() -> None:
    def call() -> Tensor:
        first = torch.ones(1000, dtype=torch.float64)
        second = first + 1
        del first
        third = second + 1
        return third.sum()

    result, peak = demo.with_peak_memory(call, torch.device("cpu"))
    assert result == 3000
    assert 16000 <= peak <= 16100


def test_text_without_the_repository(monkeypatch, tmp_path) -> None:
    assert demo.find_text()[0] == "README.md"
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "demo.py").write_text("the source")
    (tmp_path / "README.md").write_text("of another project")
    monkeypatch.setattr(demo, "__file__", str(package / "demo.py"))
    assert demo.find_text() == ("the package's source", "the source")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("has_gpu", ["true", "false"])
def test_make_compiles_only_for_a_gpu(has_gpu: str) -> None:
    command = ["make", "--no-print-directory", "--dry-run", "demo", f"HAS_GPU={has_gpu}"]
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    compiles = "build_ext" in run.stdout
    says = any(line.startswith("PyTorch sees no CUDA GPU") for line in run.stdout.splitlines())
    assert (compiles, says) == (has_gpu == "true", has_gpu == "false")
    assert run.stdout.rstrip().endswith("-m flash_attn.demo")
