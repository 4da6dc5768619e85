"""Headers of the kernels, compiled for the host (tests/cpp): no GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_attn import _arguments
from flash_attn._backends import cuda, tiled
from flash_attn._backends.philox import dropout_keep_mask
from flash_attn._backends.quantisation import HEADDIMS, first_scale_blocks, rotation

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
HOST = "cuda_on_host.h"
COMPILER = shutil.which("c++") or shutil.which("g++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# seqlen_q, seqlen_k, window_left, window_right. As kernels get them: unbounded is the length.
CASES = [
    (70, 70, 70, 70),
    (70, 70, 70, 0),
    (33, 97, 97, 0),
    (97, 33, 33, 0),
    (130, 150, 20, 7),
    (64, 129, 0, 64),
    (1, 65, 3, 0),
    (65, 1, 1, 0),
]


def output_of(
    name: str, folder: Path, numbers: Sequence[float], more: tuple[str, ...] = ("-include", HOST)
) -> tuple[int, str]:
    """Compile and run a program of tests/cpp; what it returns and prints."""
    includes = [f"-I{ROOT / include}" for include in ("tests/cpp", "csrc")]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", *more]
    source, program = str(ROOT / "tests" / "cpp" / f"{name}.cpp"), str(folder / name)
    subprocess.run([str(COMPILER), *flags, *includes, source, "-o", program], check=True)
    text = " ".join(map(str, numbers))
    result = subprocess.run([program], input=text, capture_output=True, text=True)
    return result.returncode, result.stdout


@pytest.mark.parametrize("p", [2**-40, 0.003, 0.3, 0.995, 1 - 2**-40])
def test_tiles_of_both_orientations(p: float, tmp_path: Path) -> None:
    """Mask, score transform and dropout of tiles of S and of its transpose.

    A number has seven bits of its own: below 2^-7 and above 1 - 2^-7 those that are shared decide.
    """
    rng_state = (0x7EDC_BA98_7654_3210, 0x0123_4567_FEDC_BA98)
    numbers: list[float] = []
    for seqlen_q, seqlen_k, *window in CASES:
        kept = dropout_keep_mask(torch.tensor(rng_state), p, 1, 1, seqlen_q, seqlen_k)
        numbers += [*rng_state, p, seqlen_q, seqlen_k, *window]
        numbers += kept.int().flatten().tolist()
    assert output_of("orientation", tmp_path, numbers) == (0, f"{len(CASES)} cases\n")


def test_divisor(tmp_path: Path) -> None:
    assert output_of("divisor", tmp_path, []) == (0, "")


def test_rows_of_no_sequence(tmp_path: Path) -> None:
    assert output_of("gaps", tmp_path, []) == (0, "")


@pytest.mark.parametrize("leftpad", [None, [0, 5, 40, -3]])
@pytest.mark.parametrize("seqused", [None, [3, 50, -1, 9]])
@pytest.mark.parametrize("max_seqlen_k", [6, 12, 2**40])
def test_lengths_of_pages(leftpad, seqused, max_seqlen_k, tmp_path: Path) -> None:
    """Of packed queries, whose cu_seqlens_k has them: the keys that the tiled backend has."""
    q = k = torch.zeros(10, 8, 2, 64)
    bounds = torch.tensor([0, 7, 19, 119, 128], dtype=torch.int32)
    table = torch.zeros(4, 5, dtype=torch.int32)
    options = _arguments.options(0.0, None, True, -1, -1, 0.0, False)
    valid = bounds.clamp(max=0)  # what lies on the CPU is checked, what lies on a GPU clamped
    a = _arguments.varlen(q[0], k, k, valid, valid, 8, max_seqlen_k, options, block_table=table)
    lengths = {"seqused_k": seqused, "leftpad_k": leftpad}
    given = {
        name: values if values is None else torch.tensor(values, dtype=torch.int32)
        for name, values in lengths.items()
    }
    a = a._replace(cu_seqlens_q=bounds, cu_seqlens_k=bounds, **given)
    numbers = [4, 5 * 8, cuda._numbers(a)["max_seqlen_k"], seqused is not None, leftpad is not None]
    numbers += [*bounds.tolist(), *(seqused or [0] * 4), *(leftpad or [0] * 4)]
    status, text = output_of("lengths", tmp_path, [int(x) for x in numbers])
    assert status == 0
    assert [int(x) for x in text.split()] == tiled._Sequences.of_keys(a).length.tolist()


def test_order_of_dense_tiles(tmp_path: Path) -> None:
    assert output_of("dense_tiles", tmp_path, []) == (0, "")


def regrets_of(rows: list[dict[str, Any]], printed: str) -> list[float]:
    """Of the plans that a program has printed, where their times are known."""
    plans = (plan.removesuffix("x1") for plan in printed.split())
    chosen = zip((row["us"] for row in rows), plans, strict=True)
    return [us[plan] / min(us.values()) - 1 for us, plan in chosen if plan in us]


def test_plan_of_decoding(tmp_path: Path) -> None:
    """What it chooses is about as fast as the fastest that was measured."""
    rows = json.loads((RESULTS / "decode-parts.json").read_text())["rows"]
    names = ("batch", "seqlen", "nheads", "nheads_kv", "queries")
    numbers = [x for row in rows for x in (*(row[name] for name in names), 0)]
    status, printed = output_of("decode_plan", tmp_path, numbers, ())
    regrets = regrets_of(rows, printed)
    assert status == 0 and len(regrets) >= 70
    assert sum(regrets) / len(regrets) < 0.01 and max(regrets) < 0.1


def test_given_splits_do_not_depend_on_capacity(tmp_path: Path) -> None:
    """Parts of a short sequence merge in the same order, whatever the longest of its batch is."""
    steps, step_keys = 14, 64
    given = [(splits, queries) for splits in (1, 5, 16, 17, 24, 32, 64, 300) for queries in (1, 8)]
    capacities = [steps * step_keys * i for i in (1, 2, 3, 5, 40)]
    numbers = [
        x
        for splits, queries in given
        for capacity in capacities
        for x in (4, capacity, 32, 8, queries, splits)
    ]
    status, printed = output_of("decode_plan", tmp_path, numbers, ())
    plans = [[int(x) for x in plan.split(":")] for plan in printed.split()]
    assert status == 0 and len(plans) == len(given) * len(capacities)
    merged = []  # how many parts of the sequence each cluster merges
    for _, splits, cluster in plans:
        parts = min(splits, steps)
        merged.append([min(cluster, parts - first) for first in range(0, parts, cluster)])
    for i, (splits, _) in enumerate(given):
        of_capacities = merged[i * len(capacities) : (i + 1) * len(capacities)]
        assert of_capacities == of_capacities[:1] * len(capacities)
        assert sum(of_capacities[0]) == min(splits, steps)


def toolkit_include(build_support: ModuleType) -> tuple[str, ...]:
    nvcc = build_support.find_nvcc(os.environ)
    if nvcc is None:
        pytest.skip("no CUDA toolkit")
    return "-pthread", "-isystem", str(build_support.read_toolkit(nvcc).include)


def regrets_of_sm90(
    rows: list[dict[str, Any]], folder: Path, include: tuple[str, ...]
) -> list[float]:
    """Of what the plan chooses for the shapes of a record, where its time is known."""
    levels = ("e4m3", *_arguments.FP8_LEVELS, "16 bits")
    names = ("batch", "queries", "keys", "nheads", "nheads_kv", "headdim", "causal")
    numbers = [
        x for row in rows for x in (levels.index(row["level"]), *(int(row[n]) for n in names))
    ]
    status, printed = output_of("forward_plan", folder, numbers, include)
    assert status == 0
    return regrets_of(rows, printed)


def test_plan_of_forwards_in_fp8(tmp_path: Path, build_support: ModuleType) -> None:
    """Tile and number of parts are about the fastest that were measured."""
    rows = json.loads((RESULTS / "fp8-parts.json").read_text())["rows"]
    regrets = regrets_of_sm90(rows, tmp_path, toolkit_include(build_support))
    assert len(regrets) >= 800
    assert sum(regrets) / len(regrets) < 0.01 and max(regrets) < 0.15


def test_plan_of_few_tiles(tmp_path: Path, build_support: ModuleType) -> None:
    """Parts are clusters, or not, as was measured to be about the fastest."""
    rows = [
        {
            **row,
            "level": "16 bits",
            "keys": row["seqlen"],
            "us": {name: us for name, us in row["us"].items() if name != "auto"},
        }
        for name in ("tiles-few", "tiles-few-waves")
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        if row["headdim_v"] == 0
    ]
    regrets = regrets_of_sm90(rows, tmp_path, toolkit_include(build_support))
    assert len(regrets) >= 70
    assert sum(regrets) / len(regrets) < 0.02 and max(regrets) < 0.15


def test_plan_of_forwards_of_sm80(tmp_path: Path, build_support: ModuleType) -> None:
    """Tile and number of parts are about the fastest that were measured."""
    rows = [
        row
        for name in ("tiles-sm80", "tiles-sm80-few", "tiles-sm80-few-waves")
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        if row["us"] and not row["varlen"] and row["window"] < 0
    ]
    numbers: list[int] = []
    for row in rows:
        queries, keys = row["queries"] or row["seqlen"], row["keys"] or row["seqlen"]
        numbers += [row["batch"], queries, keys, row["nheads"], row["headdim"]]
        numbers += [row["headdim_v"] or row["headdim"], int(row["causal"])]
    status, printed = output_of(
        "sm80_forward_plan", tmp_path, numbers, toolkit_include(build_support)
    )
    regrets = regrets_of(rows, printed)
    assert status == 0 and len(regrets) >= 200
    assert sum(regrets) / len(regrets) < 0.01 and max(regrets) < 0.15


def test_whole_heads(tmp_path: Path, build_support: ModuleType) -> None:
    """Short sequences, if heads keep 132 SMs busy and stay in the L2 cache, or are read twice."""
    shapes = {  # batch, seqlen, nheads, nheads_kv, causal: whether thread blocks take whole heads
        (64, 256, 16, 16, False): True,
        (64, 256, 16, 16, True): True,
        (64, 256, 64, 8, False): True,
        (33, 256, 4, 4, False): True,  # 132 heads
        (9, 256, 16, 16, False): False,  # 144
        (5, 256, 16, 16, True): False,  # 80
        (44, 384, 6, 6, True): True,  # two additions to each block of queries
        (44, 384, 6, 6, False): False,  # three, and 52 MB
        (33, 512, 16, 16, True): False,
        (64, 128, 16, 16, False): False,  # lone tiles
        (64, 256, 128, 4, False): False,  # 128 row tiles of a head
    }
    plans = backward_plans(list(shapes), tmp_path, build_support)
    for (shape, wanted), (_, plan) in zip(shapes.items(), plans, strict=True):
        assert plan[6] == wanted, shape


def test_whole_heads_of_packed_sequences(tmp_path: Path, build_support: ModuleType) -> None:
    """The same, if the longest heads do not keep the others waiting at the end."""
    shapes = {  # headdim, batch, longest, total, nheads, nheads_kv, causal
        (64, 269, 512, 65536, 32, 32, False): True,
        (64, 269, 512, 65536, 32, 32, True): True,
        (64, 128, 512, 65536, 32, 32, False): True,  # all as long as the longest
        (64, 64, 512, 16384, 32, 32, True): True,
        (64, 33, 512, 8464, 4, 4, True): False,  # a head for each SM
        (64, 3, 512, 600, 88, 88, False): False,  # one of three may be all there is
        (64, 128, 1024, 65536, 32, 32, True): False,  # 8 blocks of keys
        (128, 512, 256, 65536, 16, 16, False): True,
        (128, 99, 256, 12721, 4, 4, False): False,  # 3 for each SM
        (128, 269, 512, 65536, 16, 16, True): True,  # two additions to each block of queries
        (128, 269, 512, 65536, 16, 16, False): False,  # three, and 52 MB
        (128, 269, 512, 65536, 16, 4, True): False,
        (128, 512, 256, 65536, 16, 4, True): True,
    }
    numbers = [x for shape in shapes for x in (*map(int, shape), 0, 132)]
    status, printed = output_of("backward_plan", tmp_path, numbers, toolkit_include(build_support))
    assert status == 0
    for (shape, wanted), line in zip(shapes.items(), printed.splitlines(), strict=True):
        assert line.endswith(str(int(wanted))), shape


def backward_plans(
    shapes: list[tuple[int, int, int, int, bool]], folder: Path, build_support: ModuleType
) -> list[tuple[int, list[int]]]:
    """The steps of the heads that share K and V, and what tests/cpp/backward_plan.cpp prints."""
    numbers: list[int] = []
    head_steps = []
    for batch, seqlen, nheads, nheads_kv, causal in shapes:
        row_blocks = seqlen // 64
        seen = [row_blocks - 2 * key if causal else row_blocks for key in range(seqlen // 128)]
        head_steps.append(nheads // nheads_kv * sum(seen))
        numbers += [128, batch, seqlen, 0, nheads, nheads_kv, int(causal), head_steps[-1], 132]
    status, printed = output_of("backward_plan", folder, numbers, toolkit_include(build_support))
    assert status == 0
    plans = [list(map(int, line.split())) for line in printed.splitlines()]
    return list(zip(head_steps, plans, strict=True))


def test_long_steps(tmp_path: Path, build_support: ModuleType) -> None:
    """From 5000 queries on, without a mask."""
    shapes = {  # batch, seqlen, nheads, nheads_kv, causal: whether steps have 80 queries
        (1, 5120, 16, 16, False): True,
        (1, 32768, 64, 8, False): True,
        (1, 8192, 16, 16, True): False,
        (4, 4096, 16, 16, False): False,
    }
    plans = backward_plans(list(shapes), tmp_path, build_support)
    assert {shape: plan[5] == 1 for shape, (_, plan) in zip(shapes, plans, strict=True)} == shapes


def test_work_of_idle_warps(tmp_path: Path, build_support: ModuleType) -> None:
    """With many tiles and additions; what runs first is cleared before the main kernel."""
    shapes = {  # batch, seqlen, nheads, nheads_kv, causal: whether they work
        (16, 1024, 16, 16, False): True,
        (4, 4096, 32, 8, True): True,
        (7, 1024, 16, 16, False): True,  # 896 tiles: six for each of 132 SMs are 792
        (6, 1024, 16, 16, False): False,  # 768
        (16, 1024, 16, 16, True): True,  # 4.5 additions to each block of queries
        (16, 1024, 32, 8, True): False,  # and heads share K and V
        (32, 512, 16, 16, False): False,  # 4
    }
    planned = backward_plans(list(shapes), tmp_path, build_support)
    for ((batch, seqlen, nheads, nheads_kv, _), works), (wanted, plan) in zip(
        shapes.items(), planned, strict=True
    ):
        steps, head_tiles, tiles, cleared, ahead, *_ = plan
        assert steps == (wanted if works else 0)
        if not works:
            continue
        row_blocks = seqlen // 64
        assert head_tiles == nheads // nheads_kv * row_blocks
        assert tiles == batch * nheads * row_blocks
        assert cleared % head_tiles == 0 and ahead >= cleared
        assert cleared // head_tiles * (seqlen // 128) >= 132


def test_key_blocks_of_ampere(tmp_path: Path, build_support: ModuleType) -> None:
    """Each part of each block of keys once; if they differ much in length, the longer have more."""
    wanted = {  # batch, seqlen_q, seqlen_k, nheads, nheads_kv, causal, deterministic: parts
        (1, 1024, 1024, 16, 16, True, False): "2 2 1 1 1 1 1 1",
        (1, 512, 512, 32, 8, True, False): "6 4 3 2",
        (2, 320, 320, 45, 1, True, False): "25 15 5",
        (1, 1024, 1024, 16, 16, False, False): "1 1 1 1 1 1 1 1",
        (1, 512, 512, 32, 8, True, True): "4 4 4 4",
        (4, 1024, 1024, 16, 16, True, False): "1 1 1 1 1 1 1 1",
        (1, 700, 200, 7, 1, False, False): "7 7",
        (1, 2**18, 64, 2048, 1, False, False): "255",  # 2^23 steps: they end below 2^31
    }
    numbers = [x for shape in wanted for x in (*map(int, shape), 64, 128)]
    status, printed = output_of(
        "sm80_backward_plan", tmp_path, numbers, toolkit_include(build_support)
    )
    assert status == 0
    assert dict(zip(wanted, printed.splitlines(), strict=True)) == wanted


def test_unequal_parts(tmp_path: Path, build_support: ModuleType) -> None:
    """Where tiles are few and differ in length, most parts run at once and are about as long."""
    shapes = {  # batch, seqlen, nheads, nheads_kv, causal: whether they have such parts
        (1, 512, 32, 8, True): True,
        (2, 512, 32, 8, True): True,
        (1, 1024, 28, 4, True): True,
        (1, 1024, 16, 16, True): True,
        (1, 2048, 32, 8, True): False,  # equally many have fewer heads in use at a time
        (1, 8192, 4, 1, True): False,  # 64 blocks of keys
        (16, 1024, 16, 16, True): False,  # many tiles
        (1, 1024, 16, 16, False): False,
    }
    planned = backward_plans(list(shapes), tmp_path, build_support)
    for ((batch, seqlen, nheads, nheads_kv, _), unequal), (_, plan) in zip(
        shapes.items(), planned, strict=True
    ):
        parts = plan[7:]
        assert bool(parts) == unequal, (batch, seqlen, nheads, nheads_kv)
        if not unequal:
            continue
        row_blocks, group = seqlen // 64, nheads // nheads_kv
        steps = [group * (row_blocks - 2 * key) for key in range(seqlen // 128)]
        longest = [-(-n // k) for n, k in zip(steps, parts, strict=True)]
        assert parts == sorted(parts, reverse=True) and parts[0] > parts[-1]
        assert max(longest) < 2 * batch * nheads_kv * sum(steps) / 132
        assert sum(parts) * batch * nheads_kv < 1.25 * 132


def test_plan_without_room_for_a_cluster(tmp_path: Path, build_support: ModuleType) -> None:
    """No worker: the launch fails with an error, the plan does not end the process."""
    shapes = [
        (128, 2, 1000, 0, 8, 4, 0, 640, 0),
        (128, 2, 1000, 0, 8, 4, 1, 320, 0),
        (128, 1, 100, 0, 1, 1, 0, 2, 0),
        (64, 9, 300, 1000, 8, 8, 0, 0, 0),
    ]
    numbers = [x for shape in shapes for x in shape]
    status, printed = output_of("backward_plan", tmp_path, numbers, toolkit_include(build_support))
    assert (status, len(printed.splitlines())) == (0, len(shapes))


def test_more_tiles_than_a_launch_counts(tmp_path: Path, build_support: ModuleType) -> None:
    """One query of each head is a tile; a plan of the longest sequences takes no time."""
    shapes = {
        (4, 2**27, 1, 1, 16, 16, 64, 0): False,
        (1, 2**27, 1, 1, 16, 16, 128, 0): False,
        (4, 2**26, 1, 1, 16, 16, 64, 0): True,
        (4, 1, 2**30, 2**30, 64, 1, 128, 1): True,
    }
    numbers = [x for shape in shapes for x in shape]
    status, printed = output_of("forward_plan", tmp_path, numbers, toolkit_include(build_support))
    assert status == 0
    assert [x != "refused" for x in printed.split()] == list(shapes.values())


def test_owners_of_zeros(tmp_path: Path, build_support: ModuleType) -> None:
    more = toolkit_include(build_support)
    assert output_of("zeros_owner", tmp_path, [], more) == (0, "")


def test_operands_of_8_bits(tmp_path: Path, build_support: ModuleType) -> None:
    """Layouts of P and V, the blocks of packed keys, and the rotation of quantisation.py."""
    batches = [[0, 5], [0, 0, 128, 129, 129, 400], [3, 130, 258, 260, 600], [0, 127, 127, 383]]
    numbers = [len(batches)]
    for bounds in batches:
        batch, total = len(bounds) - 1, bounds[-1] + 7
        starts = first_scale_blocks(torch.tensor(bounds)).tolist()
        rows = {
            start + i // 128: (begin + i, min(128, end - begin - i))
            for start, begin, end in zip(starts, bounds, bounds[1:], strict=False)
            for i in range(0, end - begin, 128)
        }
        numbers += [batch, total, *bounds]
        for block in range(total // 128 + batch):
            numbers += rows.get(block, (0, 0))
    for headdim in HEADDIMS:
        signs = rotation(headdim, torch.device("cpu")) * headdim**0.5
        numbers += signs.round().int().flatten().tolist()
    assert output_of("quantised", tmp_path, numbers, toolkit_include(build_support)) == (0, "")


def test_products_in_e4m3(tmp_path: Path, build_support: ModuleType) -> None:
    """Lanes, layouts and banks; it takes the headers of a CUDA toolkit."""
    assert output_of("e4m3", tmp_path, [], toolkit_include(build_support)) == (0, "")


def test_decode_kernel(tmp_path: Path, build_support: ModuleType) -> None:
    """Threads in random order, with copies and products at random times: numbers, no deadlock."""
    cluster = ROOT / "tests" / "cpp" / "cluster"
    more = ("-I", str(cluster), *toolkit_include(build_support))
    assert output_of("decode_kernel", tmp_path, [5], more) == (0, "")
