"""Training steps of transformers, end to end, with each implementation of attention.

Run as ``python -m benchmarks.training``; ``--help`` lists the options. A step is forward, backward
and a fused AdamW, in eager mode; weights and tokens are random. The FLOPs of a step are 6 for each
parameter and token, and those of the products of attention: two in its forward, four in its
backward, half of them under a causal mask. Prints a table, writes NAME.json, NAME.csv, NAME.png
and, on a GPU, NAME-memory.png into ``benchmarks/results/<gpu>/``. Without a GPU the models are
tiny.

``--losses STEPS`` trains a small GPT on the text of this repository instead: with this library and
with PyTorch's flash attention in bf16, and in float32; ``--fp8 LEVEL ...`` adds forwards in FP8.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flash_attn
from benchmarks import plots, report
from benchmarks.cases import DTYPES, Case, Inputs
from benchmarks.providers import (
    STANDARD_MATRICES,
    Forward,
    Provider,
    add_arguments,
    attempt,
    chosen_providers,
    find_providers,
    fp8_providers,
    recorded_backends,
)
from benchmarks.report import OURS, ROOT, Row, figure, rounded
from benchmarks.timing import Call, Sampler, sampler, time_in_turn
from flash_attn._arguments import FP8_LEVELS
from flash_attn.layers.rotary import apply_rotary_emb

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (batch, seqlen, heads, headdim)


class Shape(NamedTuple):
    """Sizes of a model; it is nheads * headdim wide."""

    layers: int
    nheads: int
    headdim: int
    seqlens: tuple[int, ...]
    causal: bool = True
    group: int = 1  # query heads of a key head
    inner: int = 0  # columns inside of the MLP; 0: four times the width
    vocabulary: int = 50304
    llama: bool = False  # rotary embedding, RMSNorm, gated MLP, no biases


LONG = tuple(2**n for n in range(11, 17))  # 2k to 64k
MODELS = {
    "cuda": {
        "gpt2-small": Shape(12, 12, 64, (1024,)),
        "gpt2-medium": Shape(24, 16, 64, (1024,)),
        "gpt-1.3b": Shape(24, 16, 128, (2048,)),
        "bert-large": Shape(24, 16, 64, (512,), causal=False, vocabulary=30592),
        "llama": Shape(12, 8, 128, LONG, group=2, inner=2816, vocabulary=32000, llama=True),
    },
    "cpu": {
        "gpt": Shape(2, 2, 32, (64,), vocabulary=256),
        "bert": Shape(2, 2, 32, (32,), causal=False, vocabulary=256),
        "llama": Shape(2, 4, 32, (64, 128), group=2, inner=192, vocabulary=256, llama=True),
    },
}
LOSSES = {  # what --losses trains: a token is a byte
    "cuda": Shape(6, 6, 64, (256,), vocabulary=256),
    "cpu": Shape(2, 2, 32, (64,), vocabulary=256),
}
DEFAULTS = {
    "cuda": {"dtype": "bf16", "tokens": 16384, "math_gib": 80.0, "peak": 989.0},
    "cpu": {"dtype": "fp32", "tokens": 256, "math_gib": 4.0, "peak": None},
}
PEERS = {
    "cuda": ["flash", "cudnn", "efficient", "math", "standard"],
    "cpu": ["flash", "math", "standard"],
}
FIGURES = "ms tokens_per_s tflops mfu peak_gib ratio backend expanded skipped".split()


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width = shape, shape.nheads * shape.headdim
        inner, nheads_kv = shape.inner or 4 * width, shape.nheads // shape.group
        self.heads = (shape.nheads, nheads_kv, nheads_kv)
        norm = nn.RMSNorm if shape.llama else nn.LayerNorm
        linear = partial(nn.Linear, bias=not shape.llama)
        self.norm, self.norm_mlp = norm(width), norm(width)
        self.project_in = linear(width, sum(self.heads) * shape.headdim)
        self.project_out = linear(width, width)
        self.up, self.down = linear(width, inner * (1 + shape.llama)), linear(inner, width)

    def forward(self, x: Tensor, attend: Attend, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.project_in(self.norm(x)).unflatten(-1, (-1, self.shape.headdim))
        q, k, v = qkv.split(self.heads, dim=2)  # each (batch, seqlen, heads, headdim)
        if self.shape.llama:
            q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        x = x + self.project_out(attend(q, k, v).flatten(2))
        y = self.up(self.norm_mlp(x))
        if self.shape.llama:
            gate, y = y.chunk(2, -1)
            return x + self.down(F.silu(gate) * y)
        return x + self.down(F.gelu(y))


class Transformer(nn.Module):
    """Pre-norm blocks; the weight of the embedding is also that of the last projection."""

    def __init__(self, shape: Shape, seqlen: int) -> None:
        super().__init__()
        width = shape.nheads * shape.headdim
        self.embedding = nn.Embedding(shape.vocabulary, width)
        self.positions = None if shape.llama else nn.Parameter(torch.empty(seqlen, width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.llama else nn.LayerNorm)(width)
        frequencies = 10000.0 ** (-torch.arange(0, shape.headdim, 2) / shape.headdim)
        angles = torch.outer(torch.arange(seqlen), frequencies)
        self.register_buffer("cos", angles.cos())  # (seqlen, headdim / 2)
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor, attend: Attend) -> Tensor:
        """Return the mean cross entropy; ``tokens`` and ``targets`` are (batch, seqlen)."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x, attend, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def standard(case: Case, x: Inputs) -> Forward:
    """Attention as models wrote it by hand: product, softmax, product."""
    if case.group > 1:
        raise NotImplementedError("no grouped heads")
    q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))

    def forward() -> Tensor:
        scores = q * case.headdim**-0.5 @ k.mT
        if case.causal:
            hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return forward


def attention_of(provider: Provider, case: Case) -> Attend:
    """The provider's attention; it gets repeated keys if the model has groups and ``case`` none."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeats := q.shape[2] // k.shape[2] // case.group - 1:
            k, v = (x.repeat_interleave(1 + repeats, dim=2) for x in (k, v))
        # No provider reads the gradient of out.
        return provider.prepare(case, Inputs(q, k, v, q, *[None] * 5))()

    return attend


def start(
    shape: Shape, seqlen: int, dtype: str, device: str
) -> tuple[Transformer, torch.optim.Optimizer]:
    """A new model, the same each time, and its optimizer."""
    torch.manual_seed(0)
    with torch.device(device):
        network = Transformer(shape, seqlen).to(DTYPES[dtype])
    return network, torch.optim.AdamW(network.parameters(), lr=5e-4, fused=True)


def training_step(
    network: Transformer,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Tensor],
    attend: Attend,
    autocast: bool = False,
) -> Tensor:
    """Train on one batch (tokens, targets); return its loss. ``autocast`` is to bf16."""
    optimizer.zero_grad()
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=autocast):
        loss = network(*batch, attend)
    loss.backward()
    optimizer.step()
    return loss.detach()


def measure(
    shape: Shape, case: Case, providers: Mapping[str, Provider], a: argparse.Namespace, device: str
) -> Row:
    """Time the steps of one model, whose attention the providers compute in turn.

    All providers train the same weights, so that the GPU holds them once.

    Returns
    -------
    dict
        The fields of the case, ``layers``, ``parameters`` and ``flops`` of a step. By provider,
        ``ms`` of a step, ``tokens_per_s``, ``tflops``, ``mfu`` (share of ``--peak``), ``peak_gib``
        (peak memory, on a GPU), ``ratio`` (the speed of ours over its), ``backend`` (which ran, of
        this library), ``expanded`` (true where it got repeated keys instead of groups) and
        ``skipped``: the reason.
    """
    network, optimizer = start(shape, case.seqlen, case.dtype, device)
    tokens = sum(case.lengths)
    size = (2, len(case.lengths), case.seqlen)
    batch = torch.randint(shape.vocabulary, size, device=device).unbind()
    parameters = sum(parameter.numel() for parameter in network.parameters())
    # The gradients cost twice the forward. The embedding counts as the projection at the end.
    attention = 3 * shape.layers * case._replace(direction="forward").flops
    flops = 6 * parameters * tokens + attention

    samplers: dict[str, Sampler] = {}
    by_provider: dict[str, dict[str, Any]] = {each: {} for each in FIGURES}
    for name, provider in providers.items():
        # PyTorch's backends differ in whether they have groups, also between versions.
        trials = [case] if name in OURS or case.group == 1 else [case, case._replace(group=1)]
        limit_gib = a.math_gib if name in ("math", "standard") else None
        for trial in trials:
            step = partial(training_step, network, optimizer, batch, attention_of(provider, trial))
            call = Call(step, partial(provider.context, trial))
            ready, why = attempt(prepare, call, shape, case, device, a.sample_ms, limit_gib)
            if ready is not None:
                break
        if ready is None:
            by_provider["skipped"][name] = why
            continue
        samplers[name], backend, peak_gib = ready
        if name in OURS:
            by_provider["backend"][name] = backend
        if peak_gib is not None:
            by_provider["peak_gib"][name] = rounded(peak_gib)
        if trial != case:
            by_provider["expanded"][name] = True
    times = time_in_turn(samplers, a.rounds) if samplers else {}
    ours = next((name for name in OURS if name in times), None)
    for name, ms in times.items():
        by_provider["ms"][name] = rounded(ms)
        by_provider["tokens_per_s"][name] = rounded(tokens / ms * 1e3)
        by_provider["tflops"][name] = rounded(flops / ms / 1e9)
        if a.peak:
            by_provider["mfu"][name] = rounded(flops / ms / 1e9 / a.peak)
        if ours:
            by_provider["ratio"][name] = round(ms / times[ours], 3)
    sizes = {"layers": shape.layers, "parameters": parameters, "flops": flops}
    return {**case.described(), **sizes, "providers": list(providers), **by_provider}


def prepare(
    call: Call, shape: Shape, case: Case, device: str, sample_ms: float, limit_gib: float | None
) -> tuple[Sampler, str, float | None]:
    """Run the step; return what times it, the backends of this library that ran, its peak GiB.

    ``limit_gib`` is what N x N matrices may take. Of those the backward needs about two for each
    layer, beside the ones of the layer at work.
    """
    matrix = sum(n * m for n, m in case.rows) * case.nheads * DTYPES[case.dtype].itemsize
    all_matrices = (2 * shape.layers + STANDARD_MATRICES) * matrix
    if limit_gib is not None and all_matrices > limit_gib * 2**30:
        raise NotImplementedError(f"N x N matrices of more than {limit_gib:g} GiB")
    with recorded_backends() as chosen:
        call()  # also makes the state of the optimizer
    peak = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        call()
        peak = torch.cuda.max_memory_allocated() / 2**30
    names = "+".join(dict.fromkeys(chosen.values()))
    return sampler(call, device, sample_ms=sample_ms), names, peak


def lines(row: Row) -> Iterator[dict[str, str]]:
    """Lines of the table, by column: one for each provider."""
    for name in row["providers"]:
        mfu = row["mfu"].get(name)
        yield {
            "seqlen": str(row["seqlen"]),
            "batch": str(row["batch"]),
            "provider": name,
            "ms": figure(row["ms"].get(name)),
            "tokens/s": figure(row["tokens_per_s"].get(name), 0),
            "TFLOP/s": figure(row["tflops"].get(name)),
            "MFU %": figure(mfu and 100 * mfu),
            "GiB": figure(row["peak_gib"].get(name)),
            "ratio": figure(row["ratio"].get(name), 2),
            "model": row["model"] + (", repeated keys" if name in row["expanded"] else ""),
        }


def repository_bytes() -> Tensor:
    """The Markdown and Python files of this repository, one after the other."""
    folders = [ROOT / name for name in ("", "benchmarks", "docs", "flash_attn", "tests")]
    paths = sorted(path for folder in folders for path in folder.glob("*.*"))
    texts = [path.read_bytes() for path in paths if path.suffix in (".md", ".py")]
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


def train(
    shape: Shape, case: Case, provider: Provider, steps: int, text: Tensor, device: str
) -> list[float]:
    """Train from one start on one sequence of batches; return the loss of each step.

    Weights are float32. Of a case in bf16, products and attention are bf16 by autocast.
    """
    network, optimizer = start(shape, case.seqlen, "fp32", device)
    attend = attention_of(provider, case)
    losses = []
    with provider.context(case):
        for batch in batches(text, case, steps, device):
            half = case.dtype == "bf16"
            losses.append(training_step(network, optimizer, batch, attend, half))
    return torch.stack(losses).tolist()


def batches(text: Tensor, case: Case, steps: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches of the text, (tokens, targets), the same each time."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - case.seqlen, (len(case.lengths), 1), generator=draw)
        chunks = text[starts + torch.arange(case.seqlen + 1)].long().to(device)
        yield chunks[:, :-1], chunks[:, 1:]


def compare_losses(a: argparse.Namespace, device: str) -> None:
    """Train with ours and PyTorch's flash attention in bf16 and in float32; record, print, plot."""
    ours = flash_attn.available_backends(device)[0]
    shape, everyone = LOSSES[device], {**find_providers(), **fp8_providers()}
    # By name in the record: who computes the attention, and in what.
    runs = {ours: (ours, "bf16"), "flash": ("flash", "bf16"), "float32": ("math", "fp32")}
    runs |= {level: (level, "bf16") for level in a.fp8}
    text = repository_bytes()

    def run(name: str) -> Row:
        provider, dtype = runs[name]
        case = case_of("losses", shape, shape.seqlens[0], a.tokens, dtype)
        return {name: train(shape, case, everyone[provider], a.losses, text, device)}

    print(f"{report.device_name()}, torch {torch.__version__}, {len(text)} bytes of text, losses")
    curves: Row = {}
    for curve in report.with_progress(run, list(runs), lambda name: f"{a.losses} steps, {name}"):
        curves |= curve
    rows: list[Row] = [
        {"step": step, "loss": {name: losses[step] for name, losses in curves.items()}}
        for step in range(a.losses)
    ]
    for row in report.record(a.folder / a.output, a, rows):
        if row["step"] % -(-a.losses // 10) == 0 or row["step"] == a.losses - 1:
            losses = {name: f"{loss:.4f}" for name, loss in row["loss"].items()}
            report.print_cells({"step": str(row["step"]), **losses}, head=row["step"] == 0)
    for name in (ours, "flash"):
        gaps = [abs(row["loss"][name] - row["loss"]["float32"]) for row in rows]
        step = gaps.index(max(gaps))
        print(f"{name} in bf16: at most {max(gaps):.4f} from float32, at step {step}")
    for level in a.fp8:
        gap = max(abs(row["loss"][level] - row["loss"][ours]) for row in rows)
        print(f"{level}: at most {gap:.4f} from {ours} in bf16")


def case_of(model: str, shape: Shape, seqlen: int, tokens: int, dtype: str) -> Case:
    """The attention of one layer in a step of ``tokens``, or of one sequence if that is longer."""
    case = Case("both", dtype, shape.headdim, shape.causal, seqlen, group=shape.group, model=model)
    return case._replace(tokens=max(tokens, seqlen), width=shape.nheads * shape.headdim)


def parse(arguments: Sequence[str] | None, device: str) -> argparse.Namespace:
    parser = report.parser("training", __doc__)
    add = parser.add_argument
    models, dtypes = MODELS[device], [name for name in DTYPES if name != "fp16"]
    add("--models", nargs="+", choices=models, default=list(models), help="in this order")
    add("--seqlen", nargs="+", type=int, default=models["llama"].seqlens, help="of the llama")
    add("--dtype", choices=dtypes, help="of weights and activations")
    add("--tokens", type=int, help="a step: batch = tokens / seqlen, at least 1")
    add_arguments(parser, "standard")
    add("--peak", type=float, help="TFLOP/s of the GPU, for MFU: those of H100 and H200 in bf16")
    add("--rounds", type=int, default=5, help="samples of each")
    add("--sample-ms", type=float, default=200.0, help="least length of a sample")
    add("--losses", type=int, default=0, metavar="STEPS", help="train a small GPT; 0: do not")
    add("--fp8", nargs="+", choices=FP8_LEVELS, default=[], help="also with forwards in FP8")
    report.add_arguments(parser, "training")
    parser.set_defaults(**DEFAULTS[device])
    ours = flash_attn.available_backends(device)[0]
    parser.set_defaults(providers=[ours, *PEERS[device]])
    if parser.parse_args(arguments).losses:
        parser.set_defaults(output="training-losses")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = parse(arguments, device)
    stem = a.folder / a.output
    if a.replot is not None:
        plots.draw(a.replot, plots.training)
    elif a.losses:
        compare_losses(a, device)
        plots.draw_if_possible(stem.with_suffix(".json"), plots.training)
    else:
        providers = chosen_providers(a, {"standard": Provider(standard)})
        shapes = {name: MODELS[device][name] for name in a.models}
        if "llama" in shapes:
            shapes["llama"] = shapes["llama"]._replace(seqlens=a.seqlen)
        cases = [
            case_of(name, shape, seqlen, a.tokens, a.dtype)
            for name, shape in shapes.items()
            for seqlen in shape.seqlens
        ]

        def measure_case(case: Case) -> Row:
            return measure(shapes[case.model], case, providers, a, device)

        peak = f", use of {a.peak:g} TFLOP/s" if a.peak else ""
        print(f"{report.device_name()}, torch {torch.__version__}, training in {a.dtype}{peak}")
        print("ratio: the speed of ours over that of the line")
        rows: list[Row] = []
        label = "{0.model} {0.seqlen}".format
        for row in report.record(stem, a, report.with_progress(measure_case, cases, label)):
            for k, line in enumerate(lines(row)):
                report.print_cells(line, head=not rows and k == 0)
            rows.append(row)
        report.print_skipped(rows)
        plots.draw_if_possible(stem.with_suffix(".json"), plots.training)


if __name__ == "__main__":
    torch.set_num_threads(1)  # CPU times that do not depend on what else the machine does
    main()
