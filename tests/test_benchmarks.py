"""The benchmarks run on tiny sizes, count what they should and write what they say."""

from __future__ import annotations

import csv
import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import since_torch

import flash_attn
from benchmarks import (
    attention,
    builds,
    cpu,
    decode,
    memory,
    plots,
    presets,
    providers,
    report,
    rotary,
    tiles,
    timing,
)
from benchmarks.cases import MATMULS, Case, make_inputs
from benchmarks.providers import OURS, Provider, attempt, bind, find_providers
from benchmarks.timing import Call
from flash_attn import fp8
from flash_attn._backends import cuda

pytestmark = since_torch(2, 5, "scaled_dot_product_attention has enable_gqa")

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


def pairs_of(case: Case) -> list[tuple[int, int, int]]:
    """(sequence, query, key) that the definition of the mask lets see each other."""
    left, right = case.window_size
    return [
        (b, i, j)
        for b, (queries, keys) in enumerate(case.rows)
        for i in range(queries)
        for j in range(keys)
        for distance in [j - (i + keys - queries)]
        if (left < 0 or distance >= -left) and (right < 0 or distance <= right)
    ]


@pytest.mark.parametrize("direction", MATMULS)
@pytest.mark.parametrize("queries", [0, 1, 4])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("window", [-1, 0, 5, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_flops_and_bytes_are_those_of_what_is_visible(causal, window, varlen, queries, direction):
    sizes = {"tokens": 300, "width": 128, "group": 2, "queries": queries}
    case = Case(direction, "fp16", 32, causal, 100, window, varlen=varlen, **sizes)
    assert sum(case.lengths) == 300 and max(case.lengths) == 100
    seen = pairs_of(case)
    pairs: float = len(seen)
    if causal and window < 0 and not varlen and not queries:
        pairs -= 0.5 * 300  # half of all: without half the diagonal
    times = {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]
    assert case.flops == times * 4 * 4 * 32 * pairs

    q = sum(queries or n for n in case.lengths) * 4 * 32 * 2  # 4 heads of 32 elements of 2 bytes
    k = len({(b, j) for b, _, j in seen}) * 2 * 32 * 2
    forward, backward = q + k + k + q, (q + k + k + q) + (q + k + k)
    assert case.bytes == {"forward": forward, "backward": backward}.get(
        direction, forward + backward
    )


@pytest.mark.parametrize("direction", MATMULS)
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("keys", [0, 30, 170])
@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_flops_and_bytes_of_cross_attention_and_other_columns_of_v(
    causal, window, keys, varlen, direction
):
    sizes = {"tokens": 300, "width": 192, "group": 2, "keys": keys, "headdim_v": 32}
    case = Case(direction, "bf16", 48, causal, 100, window, varlen=varlen, **sizes)
    queries = sum(n for n, _ in case.rows)
    assert queries == 300 and {m for _, m in case.rows} == ({keys} if keys else set(case.lengths))
    seen = pairs_of(case)
    pairs: float = len(seen)
    if causal and window < 0 and not varlen and not keys:
        pairs -= 0.5 * 300
    columns = {"forward": 48 + 32, "backward": 3 * 48 + 2 * 32, "both": 4 * 48 + 3 * 32}
    assert case.flops == 2 * 4 * columns[direction] * pairs

    q, out = (queries * 4 * d * 2 for d in (48, 32))
    k, v = (len({(b, j) for b, _, j in seen}) * 2 * d * 2 for d in (48, 32))
    read_and_written = {"forward": q + k + v + out, "backward": 2 * q + out + 2 * k + 2 * v}
    assert case.bytes == read_and_written.get(direction, sum(read_and_written.values()))


def test_bytes_of_an_append_and_of_a_mixed_batch():
    case = Case("forward", "bf16", 64, True, 128, tokens=256, width=256, group=2, queries=3)
    new = 2 * 3 * 2 * (64 + 64) * 2  # sequences, tokens, heads, columns of K and V, bytes
    assert case._replace(append=True).bytes == case.bytes + 2 * new
    mixed = case._replace(prefills=5, prefill=40)
    assert mixed.rows == [(40, 40)] * 5 + [(3, 128)] * 2 and mixed.longest == (40, 128)
    assert mixed.described()["batch"] == 7
    prefill = case._replace(queries=0, varlen=True, seqlen=40, shortest=40, tokens=200)
    assert mixed.flops == case.flops + prefill.flops
    assert mixed.bytes == case.bytes + prefill.bytes
    with pytest.raises(ValueError, match="pages"):
        make_inputs(mixed, "cpu")


def test_log_uniform_lengths():
    """Half of them are below the geometric mean of the shortest and the longest."""
    case = Case("forward", "bf16", 64, True, 4096, varlen=True, shortest=16, tokens=2**18)
    uniform, lengths = case.lengths[1:-1], case._replace(log_uniform=True).lengths[1:-1]
    assert len(lengths) > 2 * len(uniform) and 16 <= min(lengths) < 32 and max(lengths) <= 4096
    assert 0.4 < sum(n < 256 for n in lengths) / len(lengths) < 0.6


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
        {"queries": 1, "causal": True, "group": 2},
        {"queries": 4, "causal": True, "group": 2},
        {"queries": 4, "window": 40},
        {"queries": 4, "causal": True, "varlen": True, "shortest": 8},
        {"queries": 1, "causal": True, "varlen": True, "page_size": 16},
        {"queries": 4, "causal": True, "page_size": 48},
        {"queries": 1, "causal": True, "append": True},
        {"queries": 3, "causal": True, "append": True, "page_size": 16, "group": 2},
        {"queries": 1, "causal": True, "page_size": 16, "prefills": 2, "prefill": 40},
        {"queries": 1, "causal": True, "fp8_cache": True, "group": 2},
        {"queries": 2, "causal": True, "fp8_cache": True, "page_size": 16, "append": True},
        {"keys": 77},
        {"keys": 200, "causal": True, "group": 2},
        {"keys": 77, "varlen": True, "window": 40},
        {"headdim_v": 32},
        {"headdim_v": 32, "keys": 77, "group": 2},
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
    if case.queries and direction == "both":
        assert not results and reason  # that of the last provider
        return
    not_through = {"alibi", "softcap", "page_size", "append", "fp8_cache"}
    through_operator = not not_through & set(options)
    through_sdpa = through_operator and not {"varlen", "window"} & set(options)
    through_sdpa = through_sdpa and not (case.keys and case.causal)
    through_operator = through_operator and not case.headdim_v
    if case.queries:
        through_operator = through_operator and not case.varlen
    if device == "cuda":
        ours = {*flash_attn.available_backends("cuda"), "sm80"}
        assert ours | ({"flash", "flash_op"} if through_operator else set()) <= set(results)
    else:
        peers = {"math", "flash"} if through_sdpa else set()
        peers -= {"flash"} if case.queries > 1 or case.headdim_v else set()
        assert set(results) == {"tiled"} | peers
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
        assert row["timing"] == "launch" and row["l2"] == "warm"
        case = Case(**{field: row[field] for field in Case._fields})
        assert row["gbs"]["tiled"] == pytest.approx(case.bytes / row["ms"]["tiled"] / 1e6, rel=0.01)
        assert row["backend"] == {"tiled": "tiled"} and row["ours"] == "tiled"
    printed = capsys.readouterr()
    assert "skipped fa3 in 24 cases: no library given (--fa3-library)" in printed.out
    assert "geometric mean" in printed.out and "23/24  both fp32 group 2 varlen" in printed.err


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets(name):
    arguments = ["--preset", name, "--direction", "forward", "--dtype", "bf16", "fp16"]
    a = attention.parse([*arguments, "--providers", "sm90", "tiled"], "cuda")
    assert a.providers == ["sm90", "tiled"] and a.output == f"attention-{name}"
    a = attention.parse(arguments, "cuda")
    assert a.providers[0] == "sm90" and a.baseline in a.providers[1:]
    in_graphs = ("short", "few-tiles", "few-waves", "decode", "models")
    assert a.timing == ("graph" if name in in_graphs else "launch")
    a = attention.parse([*arguments, "--timing", "launch", "--no-flush-l2"], "cuda")
    assert a.timing == "launch" and not a.flush_l2
    cases = attention.grid(a)
    assert len(cases) == len(set(cases)) == 2 * len(presets.PRESETS[name].cases)
    for case in cases:
        assert case.direction == "forward" and sum(case.lengths) == case.tokens
        assert max(case.lengths) == case.seqlen and case.flops > 0
        assert (case.queries > 0) == (name in ("few-tiles", "few-waves", "decode"))
        assert min(case.lengths[:-1], default=case.seqlen) >= case.shortest
    heads = {(case.nheads, case.nheads_kv) for case in cases}
    if name == "gqa":
        assert heads == {(32, 8), (64, 8)}
    elif name == "decode":
        assert heads == {(32, 8), (32, 32), (128, 1)} and len(cases) <= 2 * 18
        assert {case.queries for case in cases} == {1, 4}
        assert {case.page_size for case in cases} == {0, 16, 64, 256}
        assert max(case.bytes for case in cases) < 4 * 2**30  # of any GPU
        assert attention.parse(["--preset", "decode"], "cuda").direction == ["forward"]
    elif name == "models":
        assert all(case.model for case in cases) and a.peers == ["fa3", "cudnn"]
        assert {(71, 1), (128, 128), (14, 2)} <= heads
        assert {case.headdims for case in cases} >= {(192, 128), (40, 40)}
    elif name == "few-waves":
        tiles = {case.nheads * case.queries / presets.BLOCK for case in cases}
        assert 66 < min(tiles) and max(tiles) < 264
    elif name == "few-tiles":
        assert heads == {(nheads, nheads // 4) for nheads in (4, 8, 16, 32)}
    else:
        assert heads == {(2048 // case.headdim,) * 2 for case in cases}


def test_random_cases_are_of_all_kinds():
    cases = [Case("forward", "bf16", **fields) for fields in presets.random_cases(4000, 1)]
    for case in cases:
        assert 64 <= case.seqlen <= 4096 and case.nheads % case.group == 0 and case.flops >= 0
        assert case.nheads * case.headdim == case.width and len(case.lengths) >= 1
        assert not (case.keys and case.varlen) and case.keys <= 8192

    def share(matches: Any) -> float:
        return sum(map(matches, cases)) / len(cases)

    assert {case.headdims for case in cases} >= {(192, 192), (192, 128), (72, 72), (256, 256)}
    assert {case.group for case in cases} >= {1, 2, 4, 8}
    assert share(lambda c: c.nheads > 8 and c.nheads_kv == 1) > 0.01
    assert share(lambda c: c.causal) == pytest.approx(0.5, abs=0.05)
    assert share(lambda c: c.keys > 0) == pytest.approx(0.2, abs=0.03)
    assert share(lambda c: c.varlen) == pytest.approx(0.1, abs=0.03)
    assert share(lambda c: c.seqlen % 64 == 0) == pytest.approx(0.5, abs=0.05)
    work = [-(-case.seqlen // 128) * case.nheads * case.tokens // case.seqlen for case in cases]
    assert min(work) == 1 and max(work) < 600
    for least, most in ((1, 7), (8, 54), (55, 400)):
        assert 0.2 < sum(least <= n <= most for n in work) / len(work) < 0.5


def test_random_run(tmp_path, capsys, monkeypatch):
    drawn = {attention.parse(["--random", "3"], "cuda").seed for _ in range(3)}
    assert len(drawn) == 3
    a = attention.parse(["--random", "30", "--seed", "5"], "cuda")
    assert a.output == "attention-random" and a.timing == "graph" and a.peers == ["fa3", "cudnn"]
    assert attention.grid(a) == attention.grid(a) and len(attention.grid(a)) == 2 * 30
    a.seed = 6
    assert attention.grid(a)[0] != attention.grid(attention.parse(["--random", "1"], "cuda"))[0]

    tiny = [presets.sized(2, 1, 32, 16, keys=n, model=f"#{n}") for n in (0, 7, 40)]
    monkeypatch.setattr(attention, "random_cases", lambda count, seed: tiny[:count])
    arguments = ("--random", "3", "--seed", "9", "--direction", "forward", "--rounds", "1")
    rows = run(attention.main, tmp_path, "tiny", *arguments, "--providers", "tiled", "math")
    assert [row["model"] for row in rows] == ["#0", "#7", "#40"]
    assert "random cases of --seed 9" in capsys.readouterr().out


def test_preset_run_and_summary(tmp_path, capsys, monkeypatch):
    size = {"headdim": 32, "causal": True, "tokens": 64, "width": 64}
    cases = [{**size, "seqlen": n, **option} for n in (32, 64) for option in ({}, {"alibi": True})]
    preset = presets.Preset(cases, providers=("sm90", "tiled", "math"), baseline="math")
    monkeypatch.setitem(presets.PRESETS, "tiny", preset)
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


def test_summary_of_models():
    """The best peer is of those that are named; many cases have a percentile; one line for all."""
    base = {**Case("forward", "bf16", 64, True, 32, model="one")._asdict(), "ours": "sm90"}
    ms = {"sm90": 1.0, "sm80": 2.0, "flash": 1.0, "fa3": 1.0}
    rows = [
        {**base, "headdim": 8 * n, "ms": ms, "ratio": {"flash": 0.1, "sm80": 2.0, "fa3": n}}
        for n in range(1, 22)
    ]
    assert attention.to_best_peer(rows[0]["ratio"]) == 0.1
    first, second = attention.summary(rows, "cudnn", ["fa3", "cudnn"])
    assert first.endswith("(worst 1.000, 5th percentile 2.000, 21 cases) to the best peer")
    assert second.split() == [
        *("forward", "sm80", "0.500", "(worst", "0.500,"),
        *("5th", "percentile", "0.500,", "21", "cases)", "to", "flash"),
    ]


@pytest.mark.parametrize("k", [16, 1024])
def test_grids_of_caches(k):
    found = {
        name: [Case("forward", "bf16", **x) for x in g.cases] for name, g in decode.grids(k).items()
    }
    for name, cases in found.items():
        assert len(cases) == len(set(cases)) <= 36
        for case in cases:
            assert case.queries <= case.seqlen and case.flops > 0
            assert case.bytes <= 33 * 2**30 and case.longest[1] == case.seqlen
        rows = [c.described() for c in cases]
        assert all(decode.grids(k)[name].axis in plots.cache_axes(row) for row in rows)
    heads = {(c.nheads, c.nheads_kv) for c in found["heads"]}
    assert heads == {(32, 32), (32, 8), (64, 8), (16, 1)}
    assert {c.page_size for c in found["pages"]} == {0, 1, 16, 64, 256}
    assert {c.queries for c in found["queries"]} == {1, 4, 8}
    assert {c.queries for c in found["chunks"]} == {k // 4, k // 2, 2 * k}
    assert {c.seqlen for c in found["chunks"]} == {2 * k, 8 * k, 32 * k, 64 * k}
    for mixed in found["mixed"]:
        assert mixed.rows == [(2 * k, 2 * k)] * 8 + [(1, 8 * k)] * 56
    assert [c.append for c in found["append"]] == [False, True] * (len(found["append"]) // 2)
    for name in ("fp8", "fp8-chunks"):
        for whole, half in zip(found[name][::2], found[name][1::2], strict=True):
            assert half.fp8_cache and whole == half._replace(fp8_cache=False)
    whole, half = found["fp8"][:2]
    assert 1.9 < whole.bytes / half.bytes < 2


def test_caches(tmp_path, capsys, monkeypatch):
    whole = decode.grids(1024)

    def tiny(k):
        few = {name: grid.cases[:1] + grid.cases[-1:] for name, grid in whole.items()}
        shrunk = {
            name: [
                presets.decoding(2, 64, 4, 2, 32, **{**more, "queries": min(c["queries"], 4)})
                for c in cases
                for more in [
                    {x: c[x] for x in ("page_size", "append", "queries", "fp8_cache") if x in c}
                ]
            ]
            for name, cases in few.items()
        }
        shrunk["mixed"] = [{**c, "prefills": 2, "prefill": 9} for c in shrunk["mixed"]]
        return {name: whole[name]._replace(cases=cases) for name, cases in shrunk.items()}

    monkeypatch.setattr(decode, "grids", tiny)
    arguments = ["--folder", str(tmp_path), "--dtype", "fp32", "--rounds", "1"]
    decode.main([*arguments, "--providers", "tiled", "math", "--baseline", "math"])
    printed = capsys.readouterr().out
    for name, grid in whole.items():
        rows = json.loads((tmp_path / f"decode-{name}.json").read_text())["rows"]
        assert len(rows) == 2 and (tmp_path / f"decode-{name}.csv").exists()
        for row in rows:
            assert row["grid"] == name and row["axis"] == grid.axis and row["unit"] == grid.unit
            assert row["ours"] == "tiled" and row["ms"]["tiled"] > 0
            refused = row["page_size"] or row["append"] or row["fp8_cache"]
            assert ("math" in row["ms"]) == (not refused)
        assert (tmp_path / f"decode-{name}.png").exists() == DRAWS
        assert f"{name} on CPU, fp32: us and {grid.unit}" in printed
    assert "append us" in printed and "faster" in printed and "2x9" in printed
    if DRAWS:
        (tmp_path / "decode-mixed.png").unlink()
        decode.main(["--replot", str(tmp_path / "decode-mixed.json")])
        assert (tmp_path / "decode-mixed.png").exists()


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


def test_rotary(tmp_path, capsys):
    """The peer is a file, whose function has to compute the same."""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text("from flash_attn.layers.rotary import apply_rotary_emb as apply_rotary\n")
    options = ["--folder", str(tmp_path), "--shapes", "1x8x2x32", "--rounds", "1"]
    rotary.main([*options, "--sample-ms", "0.1", "--triton", str(stand_in)])
    rows = json.loads((tmp_path / "rotary.json").read_text())["rows"]
    assert [row["rotary_dim"] for row in rows] == [32, 32, 16, 16]
    assert [row["interleaved"] for row in rows] == [False, True] * 2
    for row in rows:
        assert [*row["ms"]] == ["out", "inplace", "copy", "triton", "triton_inplace"]
        moved = 2 * 8 * 2 * 32 * (2 if row["dtype"] == "bf16" else 4)
        assert row["gbs"]["copy"] == pytest.approx(moved / row["ms"]["copy"] / 1e6, rel=1e-2)
    assert "triton / out" in capsys.readouterr().out
    stand_in.write_text("def apply_rotary(x, *_, **__):\n    return x\n")
    with pytest.raises(AssertionError, match="not close"):
        rotary.main([*options, "--triton", str(stand_in)])
    with pytest.raises(SystemExit, match="no Python file"):
        rotary.main([*options, "--triton", str(tmp_path / "absent.py")])


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


def test_builds(tmp_path, capfd):
    own, broken = f"own={report.ROOT}", tmp_path / "broken"
    (broken / "flash_attn").mkdir(parents=True)
    (broken / "flash_attn" / "__init__.py").write_text("raise SystemExit(7)")
    tiny = ("--headdim", "32", "--seqlen", "32", "64", "--tokens", "64", "--width", "32")
    once = ("--dtype", "fp32", "--causal", "yes", "--rounds", "2", "--direction", "backward")
    builds.main(["--build", own, f"same={report.ROOT}", *tiny, *once, "--backend", "tiled"])
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines[0][-3:] == ["of", "own", "same"] and len(lines) == 4
    assert float(lines[1][-2]) > 0 and float(lines[1][-1]) > 0
    assert lines[-1][:3] == ["speed", "of", "same:"] and lines[-1][-4:] == [
        "2",
        "cases)",
        "to",
        "own",
    ]

    builds.main(["--build", own, f"same={report.ROOT}", *tiny, *once, "--backend", "sm80"])
    assert "skipped same in 2 cases: " in capfd.readouterr().out
    with pytest.raises(RuntimeError, match="ended with status 7"):
        builds.main(["--build", own, f"broken={broken}", *tiny, *once])
    for wrong, message in (
        (f"absent={tmp_path}", f"absent={tmp_path} has no package flash_attn"),
        ("own", "got own; give NAME=FOLDER"),
        (own, "got two builds own; give each a name of its own"),
    ):
        with pytest.raises(SystemExit):
            builds.main(["--build", own, wrong])
        assert message in capfd.readouterr().err


def test_ratios_of_builds_are_those_within_a_round():
    rows = [
        {"samples": {"a": [1.0, 2.0], "b": [2.0, 2.0], "c": [1.0, 1.0]}, "skipped": {}},
        {"samples": {"a": [9.0], "b": [3.0]}, "skipped": {"c": "no"}},
    ]
    row = builds.merged(rows)
    assert row["skipped"] == {"c": "no"} and list(row["samples"]) == ["a", "b"]
    assert builds.ratios(row["samples"], "a") == {"b": 1.0}
    assert builds.ratios(row["samples"], "c") == {}


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


# ---- what providers are asked for, with fakes of those that are not here -------------------------


def attend(q, k, v, causal, window_left=-1):
    """(queries, heads, headdim) against (keys, heads_kv, headdim), by the definition."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    i = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    j = torch.arange(k.shape[0])
    visible = (j <= i) | (not causal)
    if window_left >= 0:
        visible = visible & (j >= i - window_left)
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hij,jhd->ihd", probabilities, v)


class FakeFlashInfer:
    """FlashInfer's wrappers as its documentation has them: arguments, layouts, who plans."""

    def __init__(self):
        self.plans = 0

        class Wrapper:
            def __init__(wrapper, workspace, kv_layout="NHD"):
                assert workspace.dtype == torch.uint8 and kv_layout == "NHD"

            def planned(wrapper, qo_heads, kv_heads, headdim, causal, window_left, soft_cap):
                self.plans += 1
                wrapper.heads, wrapper.headdim = (qo_heads, kv_heads), headdim
                wrapper.mask = {"causal": causal, "window_left": window_left}
                assert soft_cap == 0

            def check(wrapper, q, k, v):
                assert q.dim() == 3 and q.shape[1:] == (wrapper.heads[0], wrapper.headdim)
                assert k.shape == v.shape and k.shape[-2:] == (wrapper.heads[1], wrapper.headdim)

        class Ragged(Wrapper):
            def plan(
                wrapper,
                qo_indptr,
                kv_indptr,
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                head_dim_vo=None,
                *,
                causal=False,
                window_left=-1,
                logits_soft_cap=None,
                q_data_type="float16",
                kv_data_type=None,
            ):
                heads = (num_qo_heads, num_kv_heads, head_dim_qk)
                wrapper.planned(*heads, causal, window_left, logits_soft_cap)
                wrapper.bounds = qo_indptr.tolist(), kv_indptr.tolist()

            def run(wrapper, q, k, v):
                wrapper.check(q, k, v)
                parts = (
                    x.split(torch.tensor(b).diff().tolist())
                    for x, b in zip((q, k, v), (*wrapper.bounds, wrapper.bounds[1]), strict=True)
                )
                return torch.cat(
                    [attend(*part, **wrapper.mask) for part in zip(*parts, strict=True)]
                )

        class Paged(Wrapper):
            def gather(wrapper, indptr, indices, last_page_len, page_size):
                assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
                assert indices.shape == (indptr[-1],) and last_page_len.min() >= 1
                wrapper.page_size = page_size
                wrapper.pages = indices.split(indptr.diff().tolist())
                wrapper.last = last_page_len.tolist()

            def run(wrapper, q, paged_kv_cache):
                wrapper.check(q, *paged_kv_cache)
                assert paged_kv_cache[0].shape[1] == wrapper.page_size
                outs = []
                for rows, pages, last in zip(
                    q.split(wrapper.queries), wrapper.pages, wrapper.last, strict=True
                ):
                    length = (len(pages) - 1) * wrapper.page_size + last
                    k, v = (x[pages.long()].flatten(0, 1)[:length] for x in paged_kv_cache)
                    outs.append(attend(rows, k, v, **wrapper.mask))
                return torch.cat(outs)

        class Decode(Paged):
            def __init__(wrapper, workspace, kv_layout="NHD", *, use_tensor_cores=False):
                super().__init__(workspace, kv_layout)
                wrapper.tensor_cores = use_tensor_cores

            def plan(
                wrapper,
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                *,
                window_left=-1,
                logits_soft_cap=None,
                q_data_type="float16",
                kv_data_type=None,
            ):
                heads = (num_qo_heads, num_kv_heads, head_dim)
                wrapper.planned(*heads, True, window_left, logits_soft_cap)
                wrapper.gather(indptr, indices, last_page_len, page_size)
                wrapper.queries = 1
                assert wrapper.tensor_cores == (num_qo_heads > num_kv_heads)

        class Prefill(Paged):
            def plan(
                wrapper,
                qo_indptr,
                paged_kv_indptr,
                paged_kv_indices,
                paged_kv_last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                page_size,
                *,
                causal=False,
                window_left=-1,
                logits_soft_cap=None,
                q_data_type="float16",
                kv_data_type=None,
            ):
                heads = (num_qo_heads, num_kv_heads, head_dim_qk)
                wrapper.planned(*heads, causal, window_left, logits_soft_cap)
                pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
                wrapper.gather(*pages, page_size)
                wrapper.queries = qo_indptr.diff().tolist()

        self.BatchPrefillWithRaggedKVCacheWrapper = Ragged
        self.BatchDecodeWithPagedKVCacheWrapper = Decode
        self.BatchPrefillWithPagedKVCacheWrapper = Prefill


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "group": 2},
        {"varlen": True, "causal": True, "window": 20},
        {"queries": 1, "causal": True},
        {"queries": 1, "causal": True, "group": 2, "page_size": 16, "varlen": True},
        {"queries": 4, "causal": True, "group": 2},
        {"queries": 4, "causal": False, "page_size": 48, "varlen": True},
        {"queries": 1, "causal": True, "page_size": 16, "prefills": 2, "prefill": 40},
    ],
    ids=str,
)
def test_flashinfer_is_planned_once_and_given_its_own_layout(monkeypatch, options):
    fake = FakeFlashInfer()
    monkeypatch.setattr(providers, "_has_flashinfer", lambda: True)
    monkeypatch.setattr(providers, "FLASHINFER_WORKSPACE", 16)
    monkeypatch.setattr(providers.importlib, "import_module", lambda name: fake)
    case = Case(
        "forward", "fp32", 32, **{"causal": False, **options}, seqlen=96, tokens=288, width=128
    )
    x = make_inputs(case, "cpu")
    call = bind(find_providers()["flashinfer"], case, x)
    assert fake.plans == 1
    expected = bind(find_providers()["tiled"], case, x)()
    for _ in range(2):
        torch.testing.assert_close(call(), expected, atol=1e-5, rtol=1e-5)
    assert fake.plans == 1
    for refused in ({"direction": "both"}, {"dropout_p": 0.1}, {"alibi": True}):
        with pytest.raises(NotImplementedError):
            bind(find_providers()["flashinfer"], case._replace(**refused), x)


def test_flashinfer_that_is_absent_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(providers, "_has_flashinfer", lambda: False)
    arguments = attention.parse(["--providers", "tiled", "flashinfer"], "cpu")
    assert list(providers.chosen_providers(arguments)) == ["tiled"]
    assert capsys.readouterr().out == "left out flashinfer, which is not installed\n"


@pytest.mark.parametrize("page_size", [0, 16])
def test_fa3_is_given_the_cache(monkeypatch, page_size):
    calls = []

    def fwd(q, k, v, **options):
        calls.append((q, k, v, options))
        return torch.empty_like(q), torch.empty(0)

    monkeypatch.setattr(providers, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=fwd), raising=False)
    case = Case("forward", "fp16", 32, True, 64, tokens=128, width=64, queries=2)
    case = case._replace(page_size=page_size)
    x = make_inputs(case, "cpu")
    fa3 = find_providers(fa3_library="here")["fa3"]
    assert bind(fa3, case, x)().shape == x.q.shape
    q, k, v, options = calls.pop()
    assert (q is x.q) and (k is x.k) and (v is x.v)
    assert options["seqused_k"] is x.cache_seqlens and options["page_table"] is x.block_table
    assert (x.block_table is None) == (page_size == 0)
    assert options["is_causal"] and options["num_splits"] == 0

    case = case._replace(append=True)
    x = make_inputs(case, "cpu")
    bind(fa3, case, x)()
    options = calls.pop()[3]
    assert options["k_new"] is x.new["k"] and options["v_new"] is x.new["v"]
    assert options["rotary_cos"].shape == (64, 16) and options["seqused_k"].tolist() == [62, 62]

    if page_size:
        case = case._replace(append=False, prefills=1, prefill=30)
        x = make_inputs(case, "cpu")
        assert bind(fa3, case, x)().shape == (30 + 2 + 2, 2, 32)
        options = calls.pop()[3]
        assert options["cu_seqlens_q"].tolist() == [0, 30, 32, 34]
        assert options["cu_seqlens_k"] is None and options["seqused_k"].tolist() == [30, 64, 64]
        assert options["max_seqlen_q"] == 30 and options["max_seqlen_k"] == 64

    case = case._replace(queries=0, page_size=0, append=False, prefills=0)
    bind(fa3, case, make_inputs(case, "cpu"))()
    assert calls.pop()[3]["num_splits"] == 0


@pytest.mark.parametrize(
    "options", [{}, {"varlen": True}, {"queries": 1, "page_size": 16}], ids=str
)
def test_calls_of_a_sample_are_equal_and_share_the_settings(monkeypatch, options):
    """Else this library would check each call as if it were the first."""
    seen = []

    def record(q, *arguments, **options):
        given = (q, *arguments, *options.values())
        tensors = [id(x) for x in given if isinstance(x, torch.Tensor)]
        seen.append((cuda.forced_backend(), cuda.state, tensors))
        return q

    for name in ("func", "varlen_func", "with_kvcache"):
        monkeypatch.setattr(flash_attn, f"flash_attn_{name}", record)
    case = Case("forward", "fp32", 32, True, 32, tokens=64, width=64, **options)
    call = bind(find_providers()["tiled"], case, make_inputs(case, "cpu"))
    sample = timing.sampler(call, "cpu", sample_ms=1.0)  # many, also on a busy machine
    seen.clear()
    sample()
    assert len(seen) > 2 and all(one == seen[0] for one in seen) and seen[0][0] == "tiled"


# ---- tiles ---------------------------------------------------------------------------------------


@pytest.fixture
def tiled_kernel(monkeypatch):
    """Stands in for the kernels: two tiles, of which the second cannot split keys four times.

    The library's choice, 6 us, has 4 us more than the fastest: the second tile with two splits.
    """
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    us = {(-1, 0): 6, (0, 1): 5, (0, 2): 4, (0, 4): 3, (1, 1): 8, (1, 2): 2}

    def kernel(q, k, v, **options):
        tile, splits = cuda._settings["tile"], cuda._settings["num_splits"]
        if tile > 1:
            raise ValueError(f"tile: got {tile}")
        if (tile, splits) not in us:
            raise ValueError(f"num_splits: got {splits}")
        clock.now += us[tile, splits] / 1e6
        return q

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(flash_attn, "flash_attn_func", kernel)
    monkeypatch.setattr(fp8, "flash_attn_fp8_func", kernel)
    monkeypatch.setitem(cuda._settings, "tile", -1)
    monkeypatch.setitem(cuda._settings, "num_splits", 0)


def test_tiles(tmp_path, capsys, monkeypatch, tiled_kernel):
    few, many = presets.sized(2, 1, 32, 128), presets.sized(4, 4, 64, 256, keys=77)
    no_kernel = presets.sized(2, 2, 64, 64, varlen=True)  # the extension was not built
    monkeypatch.setitem(presets.PRESETS, "short", presets.Preset([few, many, few, no_kernel]))
    arguments = ["--folder", str(tmp_path), "--dtype", "fp32", "--splits", "1", "2", "4"]
    arguments += ["--presets", "short", "--random", "0", "--split-below", "3"]
    tiles.main([*arguments, "--sample-ms", "0.1"])
    data = json.loads((tmp_path / "tiles.json").read_text())
    assert data["environment"]["arguments"]["splits"] == [1, 2, 4]
    first, second, skipped = data["rows"]
    assert first["us"] == {"auto": 6, "0": 5, "0x2": 4, "0x4": 3, "1": 8, "1x2": 2}
    assert first["best"] == "1x2" and first["regret"] == 2.0 and not first["skipped"]
    assert first["shapes"].keys() == first["us"].keys() - {"auto"}
    assert first["shapes"]["0x2"] == first["shapes"]["0"] and "x" in first["shapes"]["0"]
    assert second["us"] == {"auto": 6, "0": 5, "1": 8} and second["best"] == "0"
    assert second["regret"] == pytest.approx(0.2) and (second["nheads"], second["keys"]) == (4, 77)
    assert skipped["us"] == {} and skipped["best"] is skipped["regret"] is None
    printed = capsys.readouterr().out
    assert "auto 6, 0 5, 0x2 4, 0x4 3, 1 8, 1x2 2" in printed
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "all mean 110.0%, worst 200.0%, 2 shapes" in lines
    assert "head dim 64 mean 20.0%, worst 20.0%, 1 shapes" in lines
    assert "skipped auto in 1 cases" in printed
    assert (tmp_path / "tiles.csv").read_text().count("\n") == 1 + 6 + 3 + 1


def test_tiles_of_the_forward_in_fp8(tmp_path, capsys, monkeypatch, tiled_kernel):
    few = presets.Preset([presets.sized(2, 1, 32, 128)])
    monkeypatch.setitem(presets.PRESETS, "short", few)
    arguments = ["--folder", str(tmp_path), "--fp8", "balanced", "--splits", "1", "2"]
    tiles.main([*arguments, "--presets", "short", "--random", "0", "--sample-ms", "0.1"])
    (row,) = json.loads((tmp_path / "tiles.json").read_text())["rows"]
    assert row["us"] == {"auto": 6, "0": 5, "0x2": 4, "1": 8, "1x2": 2}
    assert set(row["shapes"].values()) == {""}
    assert "sm90, balanced, us" in capsys.readouterr().out


def test_tiles_end_and_other_errors_are_not_hidden(monkeypatch, tiled_kernel):
    def run(message):
        def fail():
            if cuda._settings["tile"] >= 0 and message:
                raise ValueError(message)

        return Call(fail)

    with pytest.raises(ValueError, match="causal"):
        tiles.candidates(run("causal: no"), [1])
    with pytest.raises(RuntimeError, match="does not know the setting"):
        tiles.candidates(run(""), [1])
    assert list(tiles.candidates(run("tile: got 0"), [1])) == ["auto"]


def test_the_sweep_of_tiles_has_about_150_shapes():
    cases = tiles.sweep(tiles.parse([]))
    assert 140 <= len(cases) <= 160 and all(case.direction == "forward" for case in cases)
    assert cases == tiles.sweep(tiles.parse([])) != tiles.sweep(tiles.parse(["--seed", "1"]))


# ---- timing --------------------------------------------------------------------------------------


def test_time_of_the_flush_is_taken_off(monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(timing, "time", clock)

    def passes(ms):
        clock.now += ms / 1e3

    monkeypatch.setattr(timing.torch, "mv", lambda matrix, vector: passes(3.0))
    buffer = torch.ones(2, 2)
    sample = timing.sampler(Call(lambda: passes(0.25)), "cpu", l2_buffer=buffer, sample_ms=20)
    assert sample() == pytest.approx(0.25)
    warm = timing.sampler(Call(lambda: passes(0.25)), "cpu")
    times = timing.time_in_turn({"flushed": sample, "warm": warm}, rounds=3)
    assert times == pytest.approx({"flushed": 0.25, "warm": 0.25})


class FakeGraph:
    """Counts what is called while it captures; a replay takes a microsecond for each."""

    current: Any = None

    def __init__(self):
        self.calls = 0

    def replay(self):
        FakeGraph.replayed = self.calls


def fake_graphs(monkeypatch, us_each):
    class Capture:
        def __init__(self, graph, stream):
            self.graph = graph

        def __enter__(self):
            FakeGraph.current = self.graph

        def __exit__(self, *_):
            FakeGraph.current = None

    def milliseconds(function, calls, device):
        FakeGraph.replayed = 0
        for _ in range(calls):
            function()
        return (FakeGraph.replayed or calls) * us_each / 1e3

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(timing, "milliseconds", milliseconds)


@pytest.mark.parametrize(("us", "captured"), [(8.0, timing.MOST_CAPTURED), (500.0, 10), (9e3, 1)])
def test_a_sample_of_a_graph_is_one_replay(monkeypatch, us, captured):
    fake_graphs(monkeypatch, us)
    graphs = []

    def run():
        if FakeGraph.current is not None:
            FakeGraph.current.calls += 1
            graphs.append(FakeGraph.current)

    sample = timing.sampler(Call(run), graph=True)
    assert sample() == pytest.approx(us / 1e3)
    assert len(set(graphs)) == 1 and len(graphs) == captured  # and none while sampling


def test_what_cannot_be_captured_is_skipped(monkeypatch):
    fake_graphs(monkeypatch, 10.0)
    monkeypatch.setattr(attention, "capture_stream", nullcontext)
    monkeypatch.setattr(attention, "make_inputs", lambda case, device: make_inputs(case, "cpu"))

    def counts(case, x):
        def forward():
            if FakeGraph.current is not None:
                FakeGraph.current.calls += 1
            return x.q

        return forward

    def waits(case, x):
        def forward():
            if FakeGraph.current is not None:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            return x.q

        return forward

    case = Case("forward", "fp32", 32, True, 32, tokens=64, width=64, queries=1)
    compared = {"flash": Provider(counts), "math": Provider(waits)}
    row = attention.measure(case, compared, "cuda", 2, "graph")
    assert row["timing"] == "graph" and row["ms"] == {"flash": 0.01}
    why = "cannot be captured into a CUDA graph: operation not permitted when stream is capturing"
    assert row["skipped"] == {"math": f"RuntimeError: {why}"}
    assert row["providers"] == ["flash", "math"]


@pytest.mark.gpu
@pytest.mark.parametrize("l2", ["warm", "cold"])
@pytest.mark.parametrize("direction", MATMULS)
def test_kernels_can_be_captured(direction, l2):
    """Times are not compared: other tests may share the GPU."""
    case = Case(direction, "bf16", 128, True, 512, tokens=1024, width=256)
    everyone = find_providers()
    compared = {name: everyone[name] for name in ("sm80", "flash", "cudnn")}
    buffer = timing.larger_than_l2() if l2 == "cold" else None
    row = attention.measure(case, compared, "cuda", 2, "graph", buffer)
    assert (row["timing"], row["l2"]) == ("graph", l2)
    assert row["ms"].keys() == row["tflops"].keys() >= {"sm80", "flash"}, row["skipped"]


@pytest.mark.gpu
def test_replays_compute_and_a_failed_capture_harms_nothing():
    case = Case("forward", "bf16", 64, True, 256, tokens=512, width=128)
    everyone = find_providers()

    def waits(case, x):
        return lambda: x.q * x.q.sum().item()

    compared = {"math": Provider(waits), "flash": everyone["flash"], "sm80": everyone["sm80"]}
    for _ in range(2):
        row = attention.measure(case, compared, "cuda", 2, "graph")
        assert "cannot be captured" in row["skipped"]["math"]
        assert {"flash", "sm80"} == row["ms"].keys(), row["skipped"]
    with timing.capture_stream():
        x = make_inputs(case, "cuda")
        call = bind(everyone["sm80"], case, x)
        expected = call()
        replay = timing._captured(call, 3)
        assert torch.equal(replay(), expected)
        x.q.zero_()
        assert not torch.equal(replay(), expected) and torch.equal(replay(), call())


# ---- records -------------------------------------------------------------------------------------


def test_a_row_has_the_name_of_the_backend_that_ran():
    """Whatever it was asked for: the backward of sm90 may be another's."""
    stand_in = find_providers()["tiled"]
    case = Case("backward", "fp32", 32, True, 32, tokens=64, width=64)
    rows = {}
    for direction in MATMULS:
        row = attention.measure(case._replace(direction=direction), {"sm90": stand_in}, "cpu", 1)
        assert row["ours"] in row["ms"] and row["ms"].keys() == row["gbs"].keys()
        rows[direction] = row["providers"], row["backend"]
    assert rows["forward"] == rows["backward"] == (["tiled"], {"tiled": "tiled"})
    assert rows["both"] == (["sm90"], {"sm90": "tiled"})


def test_a_case_that_nobody_can_run_has_a_row():
    case = Case("forward", "fp32", 32, True, 32, tokens=64, width=64)
    row = attention.measure(case, {"fa3": find_providers()["fa3"]}, "cpu", 1)
    assert row["ours"] is None and row["ms"] == {} and row["skipped"].keys() == {"fa3"}


def test_columns_follow_the_backend(capsys):
    base = {**Case("forward", "bf16", 64, True, 32)._asdict(), "nheads": 1, "nheads_kv": 1}
    base |= {"batch": 1, "ours": "sm90", "providers": ["sm90", "fa3"]}
    figures = {"sm90": 8.0, "fa3": 4.0}
    base |= {"ms": figures, "tflops": figures, "gbs": figures, "ratio": {"fa3": 2.0}}
    other = {**base, "ours": "sm80", "providers": ["sm80", "fa3"]}
    decode = {**base, "queries": 1, "gbs": {"sm90": 2400.0, "fa3": 1200.0}}
    report.print_rows(
        [base, base, other, decode], lambda row: attention.cells(row, [], "fa3", 4800.0, [])
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    heads = [line for line in lines if line[0] == "direction"]
    assert len(lines) == 4 + 3 and [line[5] for line in heads[:2]] == ["sm90", "sm80"]
    assert "GB/s" in heads[0] and "TFLOP/s" in heads[2] and heads[2][5:7] == ["batch", "heads"]
    assert lines[-1][5:] == ["1", "1/1", "2400.0", "1200.0", "8000.0", "50.0", "8", "2.00", "2.00"]

    sizes = {"headdim": 192, "headdim_v": 128, "keys": 77, "model": "a model"}
    report.print_cells(attention.cells({**base, **sizes}, [], "fa3", None, []), head=True)
    head, line = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[5:7] == ["batch", "heads"] and head[-1] == "model"
    assert line[2:7] == ["192/128", "yes", "32x77", "1", "1/1"] and line[-2:] == ["a", "model"]


@pytest.mark.skipif(not DRAWS, reason="needs matplotlib")
@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_can_be_drawn(name):
    path = report.ROOT / "benchmarks" / "results" / "nvidia-h200" / f"attention-{name}.json"
    if path.exists():
        data = json.loads(path.read_text())
        if name == "decode":
            assert all("gbs" in row for row in data["rows"])
    else:
        cases = [Case("forward", "bf16", **fields) for fields in presets.PRESETS[name].cases]
        figures = {"tflops": {"sm90": 1.0}, "gbs": {"sm90": 900.0, "flash": 90.0}}
        rows = [
            {**c._asdict(), "nheads": c.nheads, "nheads_kv": c.nheads_kv, "batch": 2, **figures}
            for c in cases
        ]
        environment = {"device": "no GPU", "arguments": {"bandwidth": 4800.0}}
        data = {"environment": environment, "rows": rows}
    figures = dict(plots.speed(data))
    assert bool(figures) == (name != "models")
    assert all(figure.get_figwidth() == plots.WIDTH for figure in figures.values())
    if name == "decode":
        assert list(figures) == ["-bf16"]
