"""The runner of the papers' tables, its page, and what ncu's counters are made into."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_benchmarks import DRAWS
from test_headers import COMPILER, output_of

from benchmarks import attention, hbm, memory, page, papers, plots, report, tiles, training
from benchmarks.cases import Case, make_inputs
from benchmarks.providers import find_providers

RECORDS = report.results_folder("NVIDIA H200")
MODULES = {"attention": attention, "memory": memory, "training": training, "tiles": tiles}

# ---- bytes of HBM --------------------------------------------------------------------------------

HEADER = ",".join(
    f'"{name}"'
    for name in (
        *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"),
        *("Block Size", "Grid Size", "Device", "CC", "Section Name"),
        *("Metric Name", "Metric Unit", "Metric Value"),
    )
)
MARK = "at::cuda::<unnamed>::spin_kernel(long)"
FILL = "void at::vectorized_elementwise_kernel<4, FillFunctor<unsigned char>, char *>(int, T2)"


def ncu_log(kernels: list[tuple[str, int, int]], unit: str = "byte", passes: int = 1) -> str:
    """What ncu --csv prints of kernels: their name, the bytes read and written."""
    lines = ["==PROF== Connected to process 77 (/usr/bin/python3.12)"]
    for i, (name, *_) in enumerate(kernels):
        plural = "pass" if passes == 1 else "passes"
        lines.append(f'==PROF== Profiling "{name}" - {i}: 0%....50%....100% - {passes} {plural}')
    lines += ["==PROF== Disconnected from process 77", HEADER]
    for i, (name, *moved) in enumerate(kernels):
        for metric, value in zip(hbm.METRICS, moved, strict=True):
            shape = '"1","7","(256, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics"'
            kernel = f'"{i}","77","python3.12","127.0.0.1","{name}"'
            lines.append(f'{kernel},{shape},"{metric}","{unit}","{value:,}"')
    return "\n".join(lines) + "\n"


KERNELS = [
    (MARK, 0, 0),
    (FILL, 1_000_000, 100_000_000),  # alone
    (MARK, 0, 0),
    ("forward<64, 128>(Params)", 400_000_000, 1_000),
    (FILL, 3_000_000, 220_000_000),
    (MARK, 0, 0),
    ("gemm", 5_000_000_000, 4_000_000_000),
    ("softmax", 4_000_000_000, 4_000_000_000),
    (FILL, 1_000_000, 100_000_000),
]


def called() -> list[report.Row]:
    case = Case("forward", "bf16", 64, False, 1024, tokens=65536, width=1024)
    ran = {**case.described(), "called": ["sm90", "math"], "skipped": {"sm80": "why"}}
    other = {**case._replace(seqlen=512).described(), "called": [], "skipped": {"math": "too much"}}
    return [ran, other]


def test_what_ncu_counts_is_given_to_the_calls():
    found = hbm.launches(ncu_log(KERNELS))
    assert [launch.kernel for launch in found] == [name for name, *_ in KERNELS]
    first, second = hbm.counted(called(), found, hbm.SRAM)
    assert first["read_gb"] == {"sm90": 0.402, "math": 9.0}
    assert first["written_gb"] == {"sm90": 0.12, "math": 8.0}
    assert first["moved_gb"] == {"sm90": 0.522, "math": 17.0}
    assert first["kernels"] == {"sm90": 1, "math": 2} and "called" not in first
    assert first["formula_gb"]["least"] == 0.5369 and not second["moved_gb"]
    cells = hbm.cells(first)
    assert cells["math / ours"] == "32.6" and cells["sm80"] == "-" and cells["math"] == "17.00"


@pytest.mark.parametrize(
    "text, message",
    [
        (ncu_log(KERNELS, passes=2), "2 passes"),
        (ncu_log(KERNELS, passes=12), "12 passes"),
        (ncu_log(KERNELS, unit="Mbyte"), "in 'Mbyte'"),
        (ncu_log(KERNELS).replace("5,000,000,000", "n/a"), "is 'n/a'"),
        (ncu_log(KERNELS).replace("dram__bytes_write.sum", "other"), "has no .*write"),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "No kernels were profiled"),
    ],
)
def test_figures_that_are_not_there_are_not_made_up(text, message):
    with pytest.raises(RuntimeError, match=message):
        hbm.launches(text)


def test_calls_that_are_not_those_of_ncu_are_refused():
    with pytest.raises(RuntimeError, match="before the first mark"):
        hbm.segments(hbm.launches(ncu_log(KERNELS[1:])))
    with pytest.raises(RuntimeError, match="counted 1 calls"):
        hbm.counted(called(), hbm.launches(ncu_log(KERNELS[:-4])), hbm.SRAM)


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("n, d, elements", [(96, 16, 512), (100, 16, 1024), (64, 32, 4096 * 9)])
def test_formulas_are_the_accesses_of_the_papers_loops(n, d, elements, direction):
    case = Case(direction, "bf16", d, False, n, tokens=3 * n, width=2 * d)  # 3 sequences, 2 heads
    block = -(-elements // (4 * d))
    bounds = [(i, min(n, i + block)) for i in range(0, n, block)]
    flash = {"forward": 0, "backward": 0}
    for start, stop in bounds:  # of keys
        flash["forward"] += 2 * (stop - start) * d  # K, V
        flash["backward"] += 4 * (stop - start) * d  # K, V, dK, dV
        for _ in range(n):  # queries
            flash["forward"] += 3 * d + 2 + 2  # Q, O in, O out; l and m in and out
            flash["backward"] += 5 * d + 2  # Q, O, dO, dQ in, dQ out; l and m
    x, s = n * d, n * n  # a tensor, a matrix of scores
    forward = (x + x + s) + (s + s) + (s + x + x)  # S = Q K^T, P = softmax(S), O = P V
    products = (s + x + x) + (x + x + s)  # dV = P^T dO, dP = dO V^T
    products += (s + s + s) + (s + x + x) + (s + x + x)  # dS of P and dP; dQ = dS K, dK = dS^T Q
    standard = {"forward": forward, "backward": products}
    found = hbm.formulas(case, 2 * elements)
    directions = list(flash) if direction == "both" else [direction]
    assert found["formula"] == 2 * 6 * sum(flash[each] for each in directions)
    assert found["standard_formula"] == 2 * 6 * sum(standard[each] for each in directions)
    assert found["least"] == case.bytes


def test_the_papers_own_case():
    """40.3 GB and 4.4 GB were measured on an A100, whose SM has 192 KB."""
    case = Case("both", "fp16", 64, False, 1024, tokens=64 * 1024, width=1024)
    found = hbm.formulas(case, 192 * 2**10)
    assert 3.5e9 < found["formula"] < 4.4e9 and 20e9 < found["standard_formula"] < 40.3e9


def test_calls_are_made_between_a_mark_and_a_flush(tmp_path, monkeypatch):
    seen: list[str] = []
    buffer = SimpleNamespace(fill_=lambda value: seen.append(f"fill {value}"))
    profiler = SimpleNamespace(start=lambda: seen.append("on"), stop=lambda: seen.append("off"))
    monkeypatch.setattr(hbm, "larger_than_l2", lambda: buffer)
    monkeypatch.setattr(hbm, "make_inputs", lambda case, device: make_inputs(case, "cpu"))
    monkeypatch.setattr(torch.cuda, "profiler", profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: seen.append("mark"))
    everyone = find_providers()
    tiled = everyone["tiled"]

    def prepare(case, inputs):
        forward = tiled.prepare(case, inputs)
        return lambda: (seen.append("call"), forward())[1]

    case = Case("forward", "fp32", 32, False, 16, tokens=32, width=32)
    providers = {"tiled": replace(tiled, prepare=prepare), "fa3": everyone["fa3"]}
    hbm.call_all([case, case._replace(seqlen=8)], providers, tmp_path / "called.json")
    nothing = ["fill 1", "on", "mark", "fill 2", "off"]
    one = ["call", *nothing[:3], "call", *nothing[3:]]  # the first is not counted
    assert seen == [*nothing, *one, *one]
    first, second = json.loads((tmp_path / "called.json").read_text())
    assert first["called"] == ["tiled"] and list(first["skipped"]) == ["fa3"]
    assert (first["seqlen"], second["seqlen"]) == (16, 8)


FAKE_NCU = f"""#!{sys.executable}
import os, sys
options = dict(zip(sys.argv, sys.argv[1:]))
assert options["--cache-control"] == "none" and options["--profile-from-start"] == "off"
assert "dram__bytes_read.sum,dram__bytes_write.sum" == options["--metrics"], options
assert sys.argv[sys.argv.index("-m") + 1] == "benchmarks.hbm" and options["--seqlen"] == "1024"
if "FAIL" in os.environ:
    open(options["--log-file"], "w").write("==ERROR== ERR_NVGPUCTRPERM - no permission\\n")
    sys.exit(1)
open(options["--log-file"], "w").write(os.environ["LOG"])
open(options["--called"], "w").write(os.environ["CALLED"])
"""


def test_hbm_from_command_to_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        hbm.main(["--folder", str(tmp_path)])
    fake = tmp_path / "ncu"
    fake.write_text(FAKE_NCU)
    fake.chmod(0o755)
    monkeypatch.setenv("LOG", ncu_log(KERNELS))
    monkeypatch.setenv("CALLED", json.dumps(called()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "device_name", lambda: "a GPU")
    arguments = ["--folder", str(tmp_path), "--seqlen", "1024", "--ncu"]
    hbm.main([*arguments, str(fake)])
    data = json.loads((tmp_path / "hbm.json").read_text())
    assert data["environment"]["arguments"]["sram"] == hbm.SRAM and len(data["rows"]) == 2
    assert data["rows"][0]["moved_gb"] == {"sm90": 0.522, "math": 17.0}
    assert (tmp_path / "hbm.png").exists() == DRAWS
    printed = capsys.readouterr().out
    assert "32.6" in printed and "skipped math in 1 cases: too much" in printed

    content = papers.section("hbm", papers.PARTS["hbm"], tmp_path, None)
    assert "device a GPU" in content and "<td>32.6</td>" in content and "no record" not in content
    with pytest.raises(SystemExit, match="no nowhere/ncu: Nsight Compute"):
        hbm.main([*arguments, "nowhere/ncu"])
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(SystemExit, match=r"exit status 1.*ERR_NVGPUCTRPERM"):
        hbm.main([*arguments, str(fake)])


# ---- tiles ---------------------------------------------------------------------------------------


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_tile_shapes_are_those_of_the_source(tmp_path):
    status, printed = output_of("forward_tiles", tmp_path, [], ())
    expected: dict[tuple[int, int], dict[str, str]] = {}
    for line in printed.splitlines():
        headdim, headdim_v, number, shape = line.split()
        expected.setdefault((int(headdim), int(headdim_v)), {})[number] = shape
    assert status == 0 and len(expected) == 6
    for headdims, shapes in expected.items():
        assert tiles.tile_shapes("sm90", *headdims) == shapes
    for headdim in (32, 72, 128, 160, 192, 256):
        shapes = tiles.tile_shapes("sm80", headdim, headdim)
        assert list(shapes) == [str(i) for i in range(len(shapes))] and shapes


# ---- the runner ----------------------------------------------------------------------------------


def test_a_run_on_a_cpu(tmp_path, monkeypatch, capsys):
    """One part runs, one fails, one needs a GPU; the second run repeats what is not done."""
    parts = {name: papers.PARTS[name] for name in ("memory", "hbm")}
    parts["broken"] = replace(papers.PARTS["memory"], module="absent", older="absent")
    monkeypatch.setattr(papers, "PARTS", parts)
    arguments = ["--device", "cpu", "--folder", str(tmp_path), "--parts", *parts]
    assert papers.main(arguments) == 1
    printed = capsys.readouterr()
    assert "[....................] 0/3  memory: [##########..........] 1/2  128" in printed.err
    assert re.search(
        r"broken +failed, exit status 1: .*No module named benchmarks.absent", printed.out
    )
    assert "hbm          left out, it needs a CUDA GPU" in printed.out
    text = (tmp_path / "papers.html").read_text()
    assert "In the run of" in text and "this part failed. exit status 1" in text
    assert text.count("There is no record of this part") == 2
    assert f"Record papers-memory.json: 2 cases; device CPU, date {report.today()}" in text
    assert "python -m benchmarks.memory --dtype fp32 --seqlen 64 128" in text

    record = tmp_path / "papers-memory.json"
    written = record.stat().st_mtime_ns
    assert papers.main([*arguments, "--budget", "0.1"]) == 0
    printed = capsys.readouterr()
    assert "memory: done before" in printed.err and record.stat().st_mtime_ns == written
    assert "broken       left out, it takes about 10 s, and 6 s were left" in printed.out
    states = json.loads((tmp_path / "papers.json").read_text())
    assert {name: state["state"] for name, state in states.items()} == {
        "memory": "done",
        "hbm": "left out",
        "broken": "left out",
    }

    def never(*arguments):
        raise AssertionError("measures")

    monkeypatch.setattr(papers, "run", never)
    assert papers.main([*arguments, "--page"]) == 0
    with pytest.raises(AssertionError, match="measures"):
        papers.main([*arguments, "--again"])
    assert json.loads((tmp_path / "papers.json").read_text())["memory"]["state"] == "begun"
    assert "this part did not end" in papers.make_page(tmp_path)


def test_a_part_ends_with_all_that_it_started_when_no_time_is_left():
    started = time.monotonic()
    reason = papers.run(["sh", "-c", "sleep 60 & echo step >&2; sleep 60"], "cpu", "part", 0.5)
    assert reason == "ended after 0 s, when no time was left" and time.monotonic() - started < 10


def test_parts_that_do_not_take_the_gpu_are_given_none():
    show = "import os, sys; sys.exit(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    assert papers.run([sys.executable, "-c", show], "cpu", "part", None) == "exit status 1: ''"


@pytest.mark.parametrize("name", papers.PARTS)
def test_arguments_of_parts_are_those_of_their_benchmarks(name):
    part = papers.PARTS[name]
    a = argparse.Namespace(device="cuda", fa3_library="fa3.so")
    given = papers.arguments_of(part, a)
    assert ("fa3.so" in given) == (part.module == "attention")
    if part.module == "hbm":
        assert hbm.parse(given).nheads == 16
    elif part.module == "tiles":
        assert len(tiles.sweep(tiles.parse(given))) == 50
    elif part.module == "attention":
        cases = attention.grid(attention.parse(given, "cuda"))
        assert len(cases) == 3 * 2 * 6 and {case.direction for case in cases} == {name}
        tiny = attention.grid(attention.parse(shlex.split(part.cpu or ""), "cpu"))
        assert len(tiny) == 4 and all(case.nheads == 2 for case in tiny)
    else:
        assert MODULES[part.module].parse(given, "cuda").math_gib >= 80
    assert sum(each.seconds for each in papers.PARTS.values()) <= 600


# ---- the page ------------------------------------------------------------------------------------


@pytest.mark.skipif(not RECORDS.exists(), reason="no records here")
def test_the_page_of_the_h200s_records(tmp_path):
    text = papers.make_page(RECORDS)
    committed = (RECORDS / "papers.html").read_text()
    assert len(committed) < 2**20
    for name, part in papers.PARTS.items():
        outputs = [x for x in (f"papers-{name}", part.older) if (RECORDS / f"{x}.json").exists()]
        section = text.split(f'<h2 id="{name}">')[1].split("<h2")[0]
        assert ("no record of this part" in section) == (not outputs)
        if outputs:
            environment = json.loads((RECORDS / f"{outputs[0]}.json").read_text())["environment"]
            for key in ("device", "date", "torch", "driver", "commit"):
                assert f"{key} {environment[key]}" in section
            assert f"python -m benchmarks.{part.module} " in section and "<td>" in section
            assert ("<svg" in section) == DRAWS
            assert f"date {environment['date']}" in committed.split(f'<h2 id="{name}">')[1]
    for each in (text, committed):  # one file
        assert not re.search(r"<(script|link|img|iframe)|@import|src=", each)
    assert "There is no record" in papers.make_page(tmp_path)


@pytest.mark.skipif(not RECORDS.exists(), reason="no records here")
@pytest.mark.parametrize("output", ["attention-lengths", "memory", "tiles", "training"])
def test_the_command_of_a_record_has_its_arguments(output):
    given = json.loads((RECORDS / f"{output}.json").read_text())["environment"]["arguments"]
    module = output.split("-")[0]
    command = papers.command_of(module, output, given)
    python, dash_m, name, *words = shlex.split(command)
    assert (python, dash_m, name) == ("python", "-m", f"benchmarks.{module}")
    device = [] if module == "tiles" else ["cuda"]
    parsed = vars(MODULES[module].parse(words, *device))
    assert parsed.pop("output") == output
    drawn = {"seed"} if not given.get("random") else set()
    assert {key: parsed[key] for key in given.keys() - drawn} == {
        key: given[key] for key in given.keys() - drawn
    }


def test_tables_have_a_header_where_the_columns_change_and_no_markup_of_values():
    lines = [{"a": "1", "b": "<x>"}, {"a": "2", "b": "&"}, {"a": "3"}]
    text = page.table(lines)
    assert text.count("<table>") == 2 and text.count("<th>") == 3 and text.count("<td>") == 5
    assert "&lt;x&gt;" in text and "<x>" not in text


def test_the_page_without_matplotlib(monkeypatch):
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    assert "No plots" in page.drawn(plots.memory, {})
