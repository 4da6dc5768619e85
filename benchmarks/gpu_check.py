"""The GPU evidence of a tree: run the GPU tests and a smoke benchmark, and record what was seen.

CI has no GPU, so what a GPU said travels with the code, in ``benchmarks/results/<gpu>/check.json``.
The record carries a hash of the sources that it was made from: ``--fresh`` compares that hash with
the tree as it stands, and needs neither a GPU nor torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, parser, results_folder, today, versions

HASHED = ("build_support.py", "csrc", "flash_attn", "setup.py", "tests")


def is_source(path: Path) -> bool:
    """Whether ``path``, relative to the root, is source rather than a build product or a cache."""
    hidden_or_cache = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return not hidden_or_cache and path.suffix not in {".so", ".pyc"}


def tree_hash(root: Path) -> str:
    """SHA-256 over path and content of the files in HASHED and of the sources in its folders."""
    found = (path for name in HASHED for path in (root / name, *(root / name).rglob("*")))
    paths = (path.relative_to(root) for path in found)
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if is_source(path) and (root / path).is_file()):
        content = (root / path).read_bytes()
        digest.update(f"{path.as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def freshness(root: Path) -> tuple[bool, str]:
    """Whether the tree at ``root`` has a record and passed in each, and one line that says so."""
    records = {
        path.parent.name: json.loads(path.read_text())
        for path in sorted((root / "benchmarks" / "results").glob("*/check.json"))
    }
    if not records:
        return False, "missing: no benchmarks/results/<gpu>/check.json; run `make gpu-check`"
    current = tree_hash(root)
    of_this_tree = {
        gpu: record for gpu, record in records.items() if record["tree_hash"] == current
    }
    if not of_this_tree:
        return False, f"stale: the record of {', '.join(records)} is of another tree"
    passed = all(record["pytest_status"] == 0 for record in of_this_tree.values())
    counts = "; ".join(
        f"{gpu}, {record['passed']} passed, {record['failed']} failed, {record['date']}"
        for gpu, record in of_this_tree.items()
    )
    return passed, f"{'fresh' if passed else 'failing'}: the record is of this tree ({counts})"


def has_failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def count_outcomes(junit_xml: Path) -> Counter[str]:
    """Number of passed, failed, skipped and xfailed tests in pytest's JUnit report."""
    outcomes: Counter[str] = Counter(passed=0, failed=0, skipped=0, xfailed=0)
    for case in ElementTree.parse(junit_xml).iter("testcase"):
        skipped = case.find("skipped")
        if has_failed(case):
            outcomes["failed"] += 1
        elif skipped is not None:
            outcomes["xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"] += 1
        else:
            outcomes["passed"] += 1
    return outcomes


def failed_tests(junit_xml: Path) -> list[str]:
    """Names of the tests that failed, or ended with an error, in pytest's JUnit report."""
    cases = ElementTree.parse(junit_xml).iter("testcase")
    return [f"{case.get('classname')}::{case.get('name')}" for case in cases if has_failed(case)]


def run_tests() -> tuple[int, Counter[str], list[str]]:
    """Run the GPU tests; pytest's exit status, the outcomes it recorded, the names of failed tests.

    The rest of the suite runs in CI. Most of a test's time is the host's: several share a GPU, and
    all GPUs are used, where pytest-xdist is installed. A test that hangs says after a minute where
    it is. It fails where pytest-timeout is installed.
    """
    import torch

    options, gpus = ["--durations", "20"], torch.cuda.device_count()
    options += ["-o", "faulthandler_timeout=60"]
    if importlib.util.find_spec("xdist"):
        options += ["-n", str(14 * gpus), "--dist", "loadgroup"]
    if importlib.util.find_spec("pytest_timeout"):
        options += ["--timeout", "90", "--timeout-method", "thread"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        command += options
        environment = os.environ | {"FLASH_ATTN_TEST_GPUS": str(gpus)}
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if not report.exists():
            raise SystemExit(f"pytest wrote no report (exit status {status}): nothing is recorded")
        return status, count_outcomes(report), failed_tests(report)


def check() -> int:
    """Run the tests and the smoke benchmark, write the record; the exit status."""
    import torch

    import flash_attn
    from benchmarks import attention, host_time, providers

    if not torch.cuda.is_available():
        raise SystemExit("gpu-check needs a CUDA device and torch sees none: nothing is recorded")
    backends = flash_attn.available_backends("cuda")
    if backends == ["tiled"]:
        raise SystemExit("gpu-check needs the compiled kernels (`make build`): nothing is recorded")

    device_name = torch.cuda.get_device_name()
    path = results_folder(device_name) / "check.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a check that dies half-way leaves no record, not an older one

    everyone = providers.find_providers()
    compared = {name: everyone[name] for name in attention.SMOKE_PROVIDERS}
    started = time.perf_counter()
    tree = tree_hash(ROOT)
    status, outcomes, failed = run_tests()
    record: dict[str, Any] = {
        "tree_hash": tree,
        "date": today(),
        "device": device_name,
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "backends": backends,
        "versions": versions(),
        "pytest_status": status,
        **outcomes,
        "failed_tests": failed,
        "attention": [attention.measure(case, compared) for case in attention.SMOKE["cuda"]],
        "host_time_us": host_time.measure(),
        "wall_time_s": round(time.perf_counter() - started, 1),
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(path.read_text())
    return status


def main(arguments: list[str]) -> int:
    command = parser("gpu_check", __doc__)
    command.add_argument("--fresh", action="store_true", help="only compare record and tree")
    if not command.parse_args(arguments).fresh:
        return check()
    fresh, line = freshness(ROOT)
    print(line)
    return 0 if fresh else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
