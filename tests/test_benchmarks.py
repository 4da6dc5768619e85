"""The benchmarks run on tiny sizes, count what they should and write what they say."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn
from benchmarks import attention, cpu, memory
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
        {"varlen": True, "window": 40, "shortest": 1},
        {"alibi": True, "causal": True},
        {"softcap": 3.0, "group": 2},
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
    through_operator = not {"alibi", "softcap"} & set(options)
    through_sdpa = through_operator and not {"varlen", "window"} & set(options)
    if device == "cuda":
        ours = {*flash_attn.available_backends("cuda"), "sm80"}
        if direction == "both":
            ours -= {"sm90"}  # has no backward yet
        assert ours | ({"flash", "flash_op"} if through_operator else set()) <= set(results)
    else:
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


@pytest.mark.parametrize("name", attention.PRESETS)
def test_presets(name):
    arguments = ["--preset", name, "--direction", "forward", "--dtype", "bf16", "fp16"]
    a = attention.parse([*arguments, "--providers", "sm90", "tiled"], "cuda")
    assert a.providers == ["sm90", "tiled"] and a.output == f"attention-{name}"
    a = attention.parse(arguments, "cuda")
    assert a.providers[0] == "sm90" and a.baseline == a.providers[1]
    cases = attention.grid(a)
    assert len(cases) == len(set(cases)) == 2 * len(attention.PRESETS[name].cases)
    for case in cases:
        assert case.direction == "forward" and sum(case.lengths) == case.tokens
        assert max(case.lengths) == case.seqlen and case.flops > 0
        assert min(case.lengths[:-1], default=case.seqlen) >= case.shortest
    heads = {(case.nheads, case.nheads_kv) for case in cases}
    if name == "gqa":
        assert heads == {(32, 8), (64, 8)}
    else:
        assert heads == {(2048 // case.headdim,) * 2 for case in cases}


def test_preset_run_and_summary(tmp_path, capsys, monkeypatch):
    size = {"headdim": 32, "causal": True, "tokens": 64, "width": 64}
    cases = [{**size, "seqlen": n, **option} for n in (32, 64) for option in ({}, {"alibi": True})]
    preset = attention.Preset(cases, providers=("sm90", "tiled", "math"), baseline="math")
    monkeypatch.setitem(attention.PRESETS, "tiny", preset)
    arguments = ("--preset", "tiny", "--direction", "forward", "--dtype", "fp32", "--rounds", "1")
    plain, alibi, *_ = run(attention.main, tmp_path, "tiny", *arguments)
    assert {"tiled", "math"} == set(plain["tflops"]) and plain["ratio"].keys() == {"math"}
    assert alibi["skipped"]["math"] == "no alibi" and not alibi["ratio"]
    printed = capsys.readouterr().out
    assert "skipped math in 2 cases: no alibi" in printed
    assert len(list(tmp_path.glob("tiny-*.png"))) == 2 * DRAWS  # with ALiBi and without

    for row, ratio in zip((plain, alibi), ({"sm80": 1.5, "fa3": 2.0}, {"fa3": 0.5}), strict=True):
        row["ratio"] = ratio
    lines = [" ".join(line.split()) for line in attention.summary([plain, alibi], "sm80")]
    assert lines == [
        "forward all 1.500 (worst 1.500, 1 case) to sm80, "
        "1.000 (worst 0.500, 2 cases) to the best peer",
        "forward fp32 1.500 (worst 1.500, 1 case) to sm80, "
        "2.000 (worst 2.000, 1 case) to the best peer",
        "forward fp32 alibi 0.500 (worst 0.500, 1 case) to the best peer",
    ]


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


@pytest.mark.parametrize("dtype", cpu.DTYPES)
def test_cpu(capsys, monkeypatch, dtype):
    with monkeypatch.context() as patched:
        patched.setattr(torch, "set_num_threads", lambda count: None)  # for this process
        cpu.main(["--seqlen", "128", "--rounds", "1", "--dtype", dtype])
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 4 + 4 and sum("with backward" in line for line in lines) == 4
    assert all(float(figure) > 0 for line in lines for figure in line.split()[-3:-1])
    tolerance = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}[dtype]
    for case, _ in cpu.cases(256, cpu.DTYPES[dtype]):
        ours, peer = case.ours(*case.inputs).float(), case.peer(*case.inputs).float()
        assert (ours - peer).norm() / peer.norm() < tolerance, case.name


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
