"""The benchmarks run on tiny sizes, count what they should and write what they say."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attention, memory
from benchmarks.providers import (
    MATMULS,
    OURS,
    Case,
    attempt,
    bind,
    find_providers,
    make_inputs,
)

TINY = ["--tokens", "64", "--width", "64", "--headdim", "32", "--rounds", "1"]
DRAWS = importlib.util.find_spec("matplotlib") is not None
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run(main: Any, folder: Path, name: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a benchmark; return its rows, once its other files are what they should be."""
    main(["--folder", str(folder), "--output", name, *arguments])
    data = json.loads((folder / f"{name}.json").read_text())
    assert {"device", "date", "torch", "torch_cuda", "cudnn", "arguments"} <= set(
        data["environment"]
    )
    rows = data["rows"]
    with (folder / f"{name}.csv").open() as file:
        lines = list(csv.DictReader(file))
    measured = "tflops" if "tflops" in rows[0] else "peak_mib"
    assert len(lines) == sum(len(row[measured]) + len(row["skipped"]) for row in rows)
    assert all(bool(line[measured]) != bool(line["skipped"]) for line in lines)
    return rows


def visible(i: int, j: int, case: Case) -> bool:
    left, right = case.window_size
    return (left < 0 or j >= i - left) and (right < 0 or j <= i + right)


@pytest.mark.parametrize("direction", MATMULS)
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("window", [-1, 0, 5, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_the_visible_pairs(causal, window, varlen, direction):
    case = Case(direction, "fp32", 32, causal, 100, window, varlen=varlen, tokens=300, width=128)
    assert sum(case.lengths) == 300 and max(case.lengths) == 100
    pairs: float = sum(
        visible(i, j, case) for n in case.lengths for i in range(n) for j in range(n)
    )
    if causal and window < 0 and not varlen:
        pairs -= 0.5 * 300  # half of all: without half the diagonal
    times = {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]
    assert case.flops == times * 4 * 4 * 32 * pairs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "group": 2},
        {"window": 40},
        {"window": 40, "causal": True, "group": 2},
        {"varlen": True, "causal": True},
        {"varlen": True, "window": 40},
    ],
    ids=str,
)
def test_providers_compute_the_same(options, direction, device):
    dtype, tolerance = {"cpu": ("fp32", 1e-5), "cuda": ("bf16", 0.05)}[device]
    fields = {"causal": False, **options}
    case = Case(direction, dtype, 64, seqlen=128, tokens=256, width=256, **fields)
    inputs = make_inputs(case, device)
    results = {}
    for name, provider in find_providers().items():
        result, reason = attempt(lambda p: bind(p, case, inputs)(), provider)
        assert (result is None) == bool(reason)
        if result is not None:
            results[name] = result if isinstance(result, tuple) else (result,)
    if device == "cuda":
        assert {"sm80", "tiled", "flash", "flash_op"} <= set(results)
    else:
        through_sdpa = not {"varlen", "window"} & set(options)
        assert set(results) == ({"tiled", "math", "flash"} if through_sdpa else {"tiled"})
    for name, tensors in results.items():
        for x, expected in zip(tensors, results["tiled"], strict=True):
            error = (x - expected).float().norm() / expected.float().norm()
            assert error < tolerance, name


def test_attention(tmp_path, capsys):
    rows = run(
        *(attention.main, tmp_path, "speed", *TINY),
        *("--direction", "forward", "backward", "both", "--seqlen", "32", "64"),
        *("--group", "2", "--varlen", "both", "--dtype", "fp32"),
        *("--providers", "sm80", "tiled", "math", "fa3"),
    )
    assert len(rows) == 3 * 2 * 2 * 2  # directions, varlen, causal, seqlens
    for row in rows:
        assert "tiled" in row["tflops"] and "fa3" in row["skipped"]
        assert ("math" in row["tflops"]) == (not row["varlen"]) == ("math" in row["ratio"])
        assert row["nheads"] == 2 and row["nheads_kv"] == 1
    printed = capsys.readouterr()
    assert "skipped fa3 in 24 cases: no library given (--fa3-library)" in printed.out
    assert "geometric mean" in printed.out and "23/24  both fp32 group 2 varlen" in printed.err


def test_smoke(tmp_path):
    rows = run(attention.main, tmp_path, "smoke", "--smoke", "--rounds", "1")
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    assert all(row["ours"] in OURS and row["ratio"]["flash"] > 0 for row in rows)
    assert len(list(tmp_path.glob("smoke-*.png"))) == 2 * DRAWS


def test_memory(tmp_path):
    sizes = ("--nheads", "2", "--group", "2", "--headdim", "32", "--dtype", "fp32")
    run_here = ("--seqlen", "256", "512", "--providers", "tiled", "math", "--math-gib", "0.005")
    short, long = run(memory.main, tmp_path, "memory", *sizes, *run_here)
    matrix = 2 * 256**2 * 4 / 2**20
    assert short["peak_mib"]["math"] > 2 * matrix
    assert long["skipped"] == {"math": "N x N matrices of more than 0.005 GiB"}
    assert 0 < short["peak_mib"]["tiled"] < long["peak_mib"]["tiled"]
    assert (tmp_path / "memory.png").exists() == DRAWS


def test_plots_need_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run(attention.main, tmp_path, "speed", "--smoke", "--rounds", "1")
    assert "no plots without matplotlib" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="matplotlib"):
        attention.main(["--replot", str(tmp_path / "speed.json")])
    monkeypatch.undo()
    if DRAWS:
        attention.main(["--replot", str(tmp_path / "speed.json")])
        assert len(list(tmp_path.glob("speed-*.png"))) == 2
