"""Attention in FP8: its error, and its speed beside bf16 and FlashAttention-3's FP8.

Run as ``python -m benchmarks.fp8``; ``--help`` lists the options. Writes fp8-accuracy and fp8-speed
(.json, .csv, .png) into ``benchmarks/results/<gpu>/``. Without a GPU the errors alone.

Errors are those of out and of the log-sum-exp against attention in float64 to the same numbers,
before they are rounded to ``--dtype``. The inputs:

outliers
    N(0, 1) + N(0, 100) * Bernoulli(0.001), 4096 keys: the test of Shah et al., "FlashAttention-3",
    2024.
normal
    N(0, 1), 4096 keys.
model
    q, k and v of each layer of a GPT with rotary embedding (2 layers, 2 heads of 64, 512 tokens),
    trained here for ``--steps`` steps on the text of this repository: on text of its last batch.

A level counts with the pass that quantises k and v. Of ``e4m3`` and ``fa3_e4m3`` the inputs are
quantised before, for the errors with a scale for each head. ``prepass`` is that pass alone,
``copy`` one of as many bytes. ``rotary`` is ``balanced`` with a rotary embedding in the pass,
``rotary_apart`` with one before it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flash_attn
from benchmarks import plots, report, training
from benchmarks.attention import measure
from benchmarks.cases import DTYPES, Case, Inputs
from benchmarks.presets import combinations
from benchmarks.providers import (
    Forward,
    Provider,
    fa3_operators,
    find_providers,
    fp8_providers,
    load_library,
)
from benchmarks.report import Row, figure
from flash_attn import _arguments, _backends, fp8
from flash_attn._arguments import FP8_LEVELS
from flash_attn._backends import cuda, quantisation
from flash_attn.layers.rotary import apply_rotary_emb

KEYS = 4096
MODEL = training.Shape(2, 2, 64, (512,), vocabulary=256, llama=True)
QKV = tuple[Tensor, Tensor, Tensor]  # float32, (batch, seqlen, heads, headdim)
OutAndLse = tuple[Tensor, Tensor]


# ---- errors --------------------------------------------------------------------------------------


def with_outliers(*shape: int) -> Tensor:
    return torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)


def random_inputs(draw: Callable[..., Tensor], headdim: int, heads: int, rows: int) -> QKV:
    """The same each time; of the queries every so many, ``rows`` of them."""
    torch.manual_seed(0)
    q, k, v = (draw(1, KEYS, heads, headdim) for _ in "qkv")
    return q[:, :: KEYS // rows], k, v


def model_inputs(steps: int, device: str) -> list[QKV]:
    """q, k and v of each layer, once a GPT has been trained."""
    network, optimizer = training.start(MODEL, MODEL.seqlens[0], "fp32", device)
    case = training.case_of("", MODEL, MODEL.seqlens[0], 2048, "fp32")
    attend = training.attention_of(find_providers()["math"], case)
    batches = training.batches(training.repository_bytes(), case, steps, device)
    for batch in batches:
        loss = training.training_step(network, optimizer, batch, attend)
    print(f"model: loss {loss:.2f} a byte after {steps} steps")
    found: list[QKV] = []

    def recorded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found.append((q, k, v))
        return attend(q, k, v)

    with torch.no_grad():
        network(*batch, recorded)
    return found


def exact(x: QKV, causal: bool) -> OutAndLse:
    """In float64, one head at a time."""
    out, lse = [], []
    for q, k, v in zip(*(t.double().transpose(1, 2).flatten(0, 1) for t in x), strict=True):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        out.append(scores.softmax(-1) @ v)
        lse.append(scores.logsumexp(-1))
    batch, heads = x[0].shape[0], x[0].shape[2]
    shaped = torch.stack(out).unflatten(0, (batch, heads)).transpose(1, 2)
    return shaped, torch.stack(lse).unflatten(0, (batch, heads))


def formats(x: QKV, causal: bool, a: argparse.Namespace) -> Iterator[tuple[str, OutAndLse]]:
    """out and log-sum-exp by name."""
    half = [tensor.to(DTYPES[a.dtype]) for tensor in x]
    halves = (half[0], half[1], half[2])
    yield a.dtype, flash_attn.flash_attn_func(*halves, causal=causal, return_attn_probs=True)[:2]
    (q, q_descale), (k, k_descale), (v, v_descale) = map(fp8.quantize, x)
    descales: dict[str, Any] = {
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    with flash_attn.use_backend(a.backend) if a.backend else nullcontext():
        for level in FP8_LEVELS:
            options: dict[str, Any] = {"level": level, "return_softmax_lse": True}
            yield level, fp8.flash_attn_fp8_func(*halves, causal=causal, **options)
        options = {**descales, "return_attn_probs": True}
        yield "e4m3", flash_attn.flash_attn_func(q, k, v, causal=causal, **options)[:2]
    if a.fa3_library:
        options = {**descales, "is_causal": causal, "num_splits": 1}
        yield "fa3_e4m3", fa3_operators().fwd(q, k, v, **options)[:2]


def errors(name: str, x: list[QKV], causal: bool, a: argparse.Namespace) -> Row:
    """The errors over all of ``x``.

    Returns
    -------
    dict
        ``inputs``, ``headdim``, ``heads`` (of all together), ``rows`` of each, ``causal`` and, by
        format, ``rmse`` of out, ``relative``: that over the root mean square of out itself, and
        ``lse``: the root mean square error of the log-sum-exp.
    """
    squares: dict[str, list[float]] = {}
    signal, count, lse_count = 0.0, 0, 0
    for each in x:
        out, lse = exact(each, causal)
        signal += out.square().sum().item()
        count, lse_count = count + out.numel(), lse_count + lse.numel()
        for label, (found, found_lse) in formats(each, causal, a):
            sums = squares.setdefault(label, [0.0, 0.0])
            sums[0] += (found.double() - out).square().sum().item()
            sums[1] += (found_lse.double() - lse).square().sum().item()
    rmse = {label: (of_out / count) ** 0.5 for label, (of_out, _) in squares.items()}
    q = x[0][0]
    return {
        "inputs": name,
        "headdim": q.shape[-1],
        "heads": sum(each[0].shape[0] * each[0].shape[2] for each in x),
        "rows": q.shape[1],
        "causal": causal,
        "providers": list(squares),
        "rmse": {label: report.rounded(value) for label, value in rmse.items()},
        "relative": {
            label: report.rounded(value / (signal / count) ** 0.5) for label, value in rmse.items()
        },
        "lse": {
            label: report.rounded((of_lse / lse_count) ** 0.5)
            for label, (_, of_lse) in squares.items()
        },
    }


def error_cells(row: Row) -> dict[str, str]:
    """A line of the table, by column: the three errors of each format."""
    texts = {
        name.rjust(21): f"{row['rmse'][name]:.2e} {100 * row['relative'][name]:.2g}% "
        f"{row['lse'][name]:.1e}"
        for name in row["providers"]
    }
    return {"inputs": row["inputs"].rjust(8), "headdim": str(row["headdim"]), **texts}


def accuracy(a: argparse.Namespace, device: str) -> None:
    draws: dict[str, Callable[..., Tensor]] = {"outliers": with_outliers, "normal": torch.randn}
    cases: list[tuple[str, int]] = [
        (name, headdim)
        for name in a.inputs
        for headdim in (a.headdim if name in draws else (MODEL.headdim,))
    ]

    def run(case: tuple[str, int]) -> Row:
        name, headdim = case
        if name == "model":
            return errors(name, model_inputs(a.steps, device), True, a)
        x = random_inputs(draws[name], headdim, a.heads, a.rows)
        q, k, v = (tensor.to(device) for tensor in x)
        return errors(name, [(q, k, v)], False, a)

    stem = a.folder / f"{a.output}-accuracy"
    print(f"errors on {report.device_name()}: RMSE of out, % of out, RMSE of the log-sum-exp")
    rows = report.with_progress(run, cases, lambda case: f"{case[0]} {case[1]}")
    report.print_rows(report.record(stem, a, rows), error_cells)
    plots.draw_if_possible(stem.with_suffix(".json"), plots.errors)


# ---- speed ---------------------------------------------------------------------------------------


def prepass(case: Case, x: Inputs, level: str, backend: str | None) -> Forward:
    options = _arguments.options(0.0, None, case.causal, -1, -1, 0.0, False)
    problem = _arguments.dense(x.q, x.k, x.v, options, fp8_level=1 + FP8_LEVELS.index(level))
    backend = backend or _backends.choose(problem)
    if backend == "tiled":
        return lambda: quantisation.quantised(problem).q
    return lambda: cuda.quantised(problem, backend).results["k_out"]


def copy(case: Case, x: Inputs) -> Forward:
    """As many bytes as ``balanced`` reads and writes: 3 for each element, so 3/4 of k and v."""
    sources = [tensor.flatten()[: tensor.numel() * 3 // 4] for tensor in (x.k, x.v)]
    targets = [torch.empty_like(tensor) for tensor in sources]

    def run() -> Tensor:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return targets[0]

    return run


def with_rotary(case: Case, x: Inputs, inside: bool) -> Forward:
    angles = torch.rand(case.seqlen, case.headdim // 2, device=x.q.device)
    cos, sin = angles.cos().to(x.q.dtype), angles.sin().to(x.q.dtype)
    attend = partial(fp8.flash_attn_fp8_func, causal=case.causal)
    if inside:
        tables: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin}
        return partial(attend, x.q, x.k, x.v, **tables, rotary_interleaved=False)

    def run() -> Tensor:
        return attend(apply_rotary_emb(x.q, cos, sin), apply_rotary_emb(x.k, cos, sin), x.v)

    return run


def speed(a: argparse.Namespace, device: str) -> None:
    of_fp8 = fp8_providers(a.backend, a.fa3_library)
    context = of_fp8["balanced"].context
    providers: dict[str, Provider] = {
        a.plain: find_providers()[a.plain],
        **of_fp8,
        "rotary": Provider(partial(with_rotary, inside=True), context),
        "rotary_apart": Provider(partial(with_rotary, inside=False), context),
        "prepass": Provider(partial(prepass, level="balanced", backend=a.backend)),
        "copy": Provider(copy),
    }
    if not a.fa3_library:
        del providers["fa3_e4m3"]
    sizes = {"headdim": a.headdim, "causal": [False, True], "seqlen": a.seqlen}
    cases = [
        Case("forward", a.dtype, **fields, tokens=a.tokens, width=a.width, group=a.group)
        for fields in combinations(**sizes)
    ]

    def run(case: Case) -> Row:
        with torch.no_grad():
            return measure(case, providers, device, a.rounds)

    stem = a.folder / f"{a.output}-speed"
    print(f"speed on {report.device_name()}, TFLOP/s; ratios: the speed over that of the other")
    rows: list[Row] = []
    label = "{0.headdim} {0.seqlen}".format
    for row in report.record(stem, a, report.with_progress(run, cases, label)):
        apart = ("prepass", "copy", "rotary", "rotary_apart")
        shown = [name for name in providers if name not in apart]
        ratios = {
            "e4m3 to fa3": ratio(row, "fa3_e4m3", "e4m3"),
            **{f"{level} to plain": ratio(row, a.plain, level) for level in FP8_LEVELS},
            "prepass to copy": ratio(row, "prepass", "copy"),
            "rotary to apart": ratio(row, "rotary_apart", "rotary"),
        }
        line = {
            **report.size_cells(row),
            **{name: figure(row["tflops"].get(name)) for name in shown},
            **{name: figure(value, 2) for name, value in ratios.items()},
        }
        report.print_cells(line, head=not rows)
        rows.append({**row, "to": ratios})
    report.print_skipped(rows)
    for name in rows[0]["to"]:
        values = [row["to"][name] for row in rows if row["to"][name] is not None]
        if values:
            mean = statistics.geometric_mean(values)
            print(f"{name}: {mean:.3f} ({min(values):.3f} to {max(values):.3f})")
    plots.draw_if_possible(stem.with_suffix(".json"), plots.speed)


def ratio(row: Row, other: str, name: str) -> float | None:
    """The time of the other over that of ``name``."""
    ms = row["ms"]
    return ms[other] / ms[name] if {name, other} <= ms.keys() else None


def parse(arguments: Sequence[str] | None, on_gpu: bool) -> argparse.Namespace:
    parser = report.parser("fp8", __doc__, argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    headdims, parts = quantisation.HEADDIMS, ["accuracy", "speed"]
    add("--parts", nargs="+", choices=parts, default=parts if on_gpu else parts[:1])
    add("--headdim", nargs="+", type=int, default=headdims, help="of all inputs but the model's")
    add("--inputs", nargs="+", choices=INPUTS, default=INPUTS, help="of the errors")
    add("--heads", type=int, default=16, help="of random inputs; default 16")
    add("--rows", type=int, default=KEYS if on_gpu else 128, help="queries of a head")
    halves = [name for name in DTYPES if name != "fp32"]
    add("--dtype", choices=halves, default="bf16", help="that is quantised inside; default bf16")
    add("--steps", type=int, default=200, help="that the model is trained for; default 200")
    add("--seqlen", nargs="+", type=int, default=[1024, 4096, 16384], help="of the speed")
    add("--tokens", type=int, default=16384, help="in all; default 16384")
    add("--width", type=int, default=2048, help="nheads = width / headdim; default 2048")
    add("--group", type=int, default=1, help="query heads of a key head; default 1")
    add("--rounds", type=int, default=10, help="samples of each; default 10")
    add("--backend", choices=report.OURS, help="forced for FP8; default: as calls choose")
    add("--plain", choices=report.OURS, default="sm90" if on_gpu else "tiled", help="in 16 bits")
    add("--fa3-library", metavar="PATH", help="adds fa3_e4m3: registers flash_attn_3's fwd")
    report.add_arguments(parser, "fp8")
    return parser.parse_args(arguments)


INPUTS = ("outliers", "normal", "model")


def main(arguments: Sequence[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    a, device = parse(arguments, on_gpu), "cuda" if on_gpu else "cpu"
    if a.replot is not None:
        drawing = plots.errors if a.replot.stem.endswith("accuracy") else plots.speed
        plots.draw(a.replot, drawing)
        return
    if a.fa3_library:
        load_library(a.fa3_library)
    if "accuracy" in a.parts:
        accuracy(a, device)
    if "speed" in a.parts:
        speed(a, device)


if __name__ == "__main__":
    main()
