"""The record of the GPU checks: what its hash covers and when it counts as fresh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    names = ("csrc/params.h", "flash_attn/__init__.py", "tests/test_a.py")
    for name in (*names, "build_support.py", "setup.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def write_record(tree: Path, failed: int = 0) -> None:
    path = tree / "benchmarks" / "results" / "nvidia-h200" / "check.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    outcome = {
        "pytest_status": int(failed > 0),
        "passed": 7,
        "failed": failed,
        "date": "2026-11-20",
    }
    path.write_text(json.dumps({"tree_hash": gpu_check.tree_hash(tree), **outcome}))


@pytest.mark.parametrize(
    "name",
    [
        "csrc/sm80/kernel.cuh",
        "flash_attn/ops/new.py",
        "tests/cases.json",
        "build_support.py",
        "setup.py",
    ],
)
def test_hash_follows_content_names_and_new_files(tree: Path, name: str) -> None:
    hashes = [gpu_check.tree_hash(tree)]
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("one")
    hashes.append(gpu_check.tree_hash(tree))
    path.write_text("two")
    hashes.append(gpu_check.tree_hash(tree))
    path.rename(path.with_name("renamed" + path.suffix))
    hashes.append(gpu_check.tree_hash(tree))
    assert len(set(hashes)) == 4


@pytest.mark.parametrize(
    "name",
    [
        "flash_attn/_C.cpython-311-x86_64-linux-gnu.so",
        "flash_attn/__pycache__/version.cpython-311.pyc",
        "tests/.pytest_cache/v/cache/nodeids",
        "README.md",
    ],
)
def test_hash_ignores_what_is_not_source(tree: Path, name: str) -> None:
    before = gpu_check.tree_hash(tree)
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("not source")
    assert gpu_check.tree_hash(tree) == before


def test_exit_status_and_line_of_fresh(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", tree)

    def fresh() -> tuple[int, str]:
        status = gpu_check.main(["--fresh"])
        (line,) = capsys.readouterr().out.splitlines()
        return status, line

    status, line = fresh()
    assert status == 1 and line.startswith("missing: ")
    write_record(tree)
    status, line = fresh()
    assert status == 0 and line.startswith("fresh: ") and "7 passed, 0 failed" in line
    write_record(tree, failed=2)
    status, line = fresh()
    assert status == 1 and line.startswith("failing: ") and "2 failed" in line
    (tree / "csrc" / "params.h").write_text("changed")
    status, line = fresh()
    assert status == 1 and line.startswith("stale: ") and "nvidia-h200" in line


def test_fresh_needs_no_installed_package() -> None:
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_check", "--fresh"]
    result = subprocess.run(command, cwd=gpu_check.ROOT, capture_output=True, text=True)
    assert result.returncode in (0, 1) and len(result.stdout.splitlines()) == 1, result.stderr


def test_outcomes_are_those_of_pytests_report(tmp_path: Path) -> None:
    (tmp_path / "test_outcomes.py").write_text(
        """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError

def test_passes(): pass
def test_passes_too(): pass
def test_fails(): assert False
def test_has_no_fixture(broken): pass
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
"""
    )
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    expected = {"passed": 2, "failed": 2, "skipped": 1, "xfailed": 1}
    assert gpu_check.count_outcomes(report) == expected
