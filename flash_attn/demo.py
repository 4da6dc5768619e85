"""Attention at work: ``python -m flash_attn.demo``.

Trains a small character-level transformer on a text of this repository, then takes the queries,
keys and values of its last layer and runs attention over them in the ways models do: forward,
forward and backward, packed sequences, and token by token with a KV cache. Each result is compared
with a float64 reference, and timed beside standard attention, which forms the whole matrix
softmax(Q K^T). At the end the transformer writes a text with a KV cache, and without one.

The exit status is 1 if any result is wrong.
"""

import argparse
import copy
import io
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn import (
    __version__,
    available_backends,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn.layers.rotary import RotaryEmbedding

# Causal attention: q (batch, seqlen, nheads, headdim), k and v (batch, seqlen, nheads_kv, headdim)
# -> (batch, seqlen, nheads, headdim).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Setting:
    """How large everything is."""

    dtype: torch.dtype  # of attention; the linear layers are float32
    layers: int
    nheads: int
    nheads_kv: int
    headdim: int
    context: int  # characters of a training example
    batch: int
    steps: int  # of training
    seqlen: int  # characters that the measured attention runs over
    new_tokens: int  # of decoding, fewer than context
    repeats: int  # of each timing

    @property
    def width(self) -> int:
        return self.nheads * self.headdim


QUICK = Setting(torch.float32, 1, 4, 2, 16, 32, 8, 40, 256, 16, 1)
CPU = Setting(torch.float32, 2, 4, 2, 32, 128, 8, 300, 2048, 96, 3)
GPU = Setting(torch.bfloat16, 4, 8, 2, 64, 256, 32, 250, 4096, 128, 3)


# ---- Attention: standard (the reference), and the four uses of this library ----------------------


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    """Q K^T / sqrt(headdim), (batch, nheads, seqlen_q, seqlen_k); -inf where the key is later."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)  # query heads share a key head
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    seqlen_q, seqlen_k = scores.shape[-2:]
    # The last query stands at the last key; what is to the right of the diagonal is in the future.
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1 + seqlen_k - seqlen_q)
    return scores.masked_fill(future, -torch.inf)


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(headdim)) V, as the formula says. In float64, the exact reference."""
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    return torch.einsum("bhij,bjhd->bihd", causal_scores(q, k).softmax(dim=-1), v)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


def gradients(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward; q stands in for the gradient of the output, which has its shape."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attend(*leaves), leaves, grad_outputs=q)


def flash_packed(lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention inside each of several sequences that lie one after another."""
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
    longest = max(lengths)
    return flash_attn_varlen_func(
        q[0], k[0], v[0], bounds, bounds, longest, longest, causal=True
    ).unsqueeze(0)


def standard_packed(lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sequences = zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([standard_attention(*sequence) for sequence in sequences], dim=1)


class KVCache:
    """Keys and values (1, capacity, nheads_kv, headdim) of one layer.

    Calling it appends those of new tokens, in place, and attends to all.
    """

    def __init__(self, k: Tensor, v: Tensor, length: int = 0) -> None:
        self.k, self.v, self.length = k, v, length

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_with_kvcache(
            q, self.k, self.v, k, v, cache_seqlens=self.length, causal=True
        )
        self.length += k.shape[1]
        return out


def flash_decode(new: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last ``new`` tokens one after another, when the ones before them are in the cache."""
    k_cache, v_cache = k.clone(), v.clone()
    k_cache[:, -new:] = v_cache[:, -new:] = torch.nan  # not there yet: must not be read
    cache = KVCache(k_cache, v_cache, k.shape[1] - new)
    tokens = zip(*(x[:, -new:].split(1, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([cache(*token) for token in tokens], dim=1)


def standard_decode(new: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = range(q.shape[1] - new + 1, q.shape[1] + 1)
    outs = [standard_attention(q[:, end - 1 : end], k[:, :end], v[:, :end]) for end in ends]
    return torch.cat(outs, dim=1)


def standard_last(new: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same at once: of one query PyTorch adds in another order, with half of the error."""
    return standard_attention(q[:, -new:], k, v)


# ---- The transformer -----------------------------------------------------------------------------


class Block(nn.Module):
    """Attention with grouped heads and rotary positions, then a two-layer perceptron."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.heads = (setting.nheads, setting.nheads_kv, setting.nheads_kv)
        self.headdim, width = setting.headdim, setting.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in = nn.Linear(width, sum(self.heads) * self.headdim, bias=False)
        self.rotary = RotaryEmbedding(self.headdim)
        self.project_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, attend: Attend, position: int) -> Tensor:
        qkv = self.project_in(self.norm1(x)).unflatten(-1, (-1, self.headdim))
        qkv = self.rotary(qkv, seqlen_offset=position, num_heads_q=self.heads[0])
        q, k, v = qkv.split(self.heads, dim=2)
        x = x + self.project_out(attend(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Predicts the next character. Each layer is given its attention by the caller."""

    def __init__(self, setting: Setting, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, setting.width)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.layers))
        self.head = nn.Sequential(nn.LayerNorm(setting.width), nn.Linear(setting.width, vocabulary))

    def forward(self, tokens: Tensor, attends: Sequence[Attend], position: int = 0) -> Tensor:
        """Logits (batch, seqlen, vocabulary) of tokens (batch, seqlen), from ``position`` on."""
        x = self.embedding(tokens)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, attend, position)
        return self.head(x)


def in_dtype(dtype: torch.dtype, attend: Attend) -> Attend:
    """Attention computed in ``dtype`` between layers of another one."""
    return lambda q, k, v: attend(q.to(dtype), k.to(dtype), v.to(dtype)).to(q.dtype)


def train(model: Transformer, text: Tensor, setting: Setting) -> list[float]:
    """Train on random excerpts of text (characters,); return the loss of each step."""
    attends = [in_dtype(setting.dtype, flash_attention)] * setting.layers
    optimizer = torch.optim.AdamW(model.parameters())
    peak_rate = 1 / setting.width  # 0.008 is good for a width of 128
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_rate, setting.steps)
    losses = []
    for _ in progress("training", setting.steps):
        starts = torch.randint(len(text) - setting.context, (setting.batch, 1)).to(text.device)
        excerpts = text[starts + torch.arange(setting.context + 1, device=text.device)]
        logits = model(excerpts[:, :-1], attends)
        loss = F.cross_entropy(logits.flatten(0, 1), excerpts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def attention_inputs(
    model: Transformer, tokens: Tensor, setting: Setting
) -> tuple[Tensor, Tensor, Tensor]:
    """The last layer's q, k and v (1, seqlen, heads, headdim), in the dtype of attention."""
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k, v))
        return flash_attention(q, k, v)

    model(tokens, [in_dtype(setting.dtype, attend)] * setting.layers)
    return seen[-1]


@torch.no_grad()
def write_with_cache(model: Transformer, prompt: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Continue prompt (1, seqlen); return the tokens (new,) and the logits (new, vocabulary)."""
    shape = (1, prompt.shape[1] + setting.new_tokens, setting.nheads_kv, setting.headdim)
    storage = prompt.new_zeros(setting.layers, 2, *shape, dtype=setting.dtype)
    attends = [in_dtype(setting.dtype, KVCache(k, v)) for k, v in storage]
    tokens, position = prompt, 0
    all_tokens, all_logits = [], []
    for _ in progress("writing with a KV cache", setting.new_tokens):
        logits = model(tokens, attends, position)[:, -1]
        position += tokens.shape[1]
        tokens = logits.argmax(dim=-1, keepdim=True)
        all_tokens.append(tokens)
        all_logits.append(logits)
    return torch.cat(all_tokens).flatten(), torch.cat(all_logits)


@torch.no_grad()
def compute_again(model: Transformer, prompt: Tensor, written: Tensor, setting: Setting) -> Tensor:
    """The logits (new, vocabulary) without a cache: for each written token, from all before it."""
    attends = [in_dtype(setting.dtype, flash_attention)] * setting.layers
    text = torch.cat((prompt[0], written)).unsqueeze(0)
    ends = range(prompt.shape[1], text.shape[1])
    return torch.cat(
        [model(text[:, : ends[i]], attends)[:, -1] for i in progress("writing without", len(ends))]
    )


# ---- Comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One computation: by this library, by standard attention, and exactly."""

    name: str
    flash: Callable[[], Result]
    standard: Callable[[], Result]
    exact: Callable[[], Result]
    yardstick: Callable[[], Result] | None = None  # for the error, where it is not ``standard``


def attention_case(
    name: str,
    flash: Callable[..., Result],
    standard: Callable[..., Result],
    qkv: Sequence[Tensor],
    yardstick: Callable[..., Result] | None = None,
) -> Case:
    exact_qkv = [x.double() for x in qkv]
    calls = partial(flash, *qkv), partial(standard, *qkv), partial(standard, *exact_qkv)
    return Case(name, *calls, None if yardstick is None else partial(yardstick, *qkv))


def model_case(model: Transformer, tokens: Tensor, setting: Setting) -> Case:
    """The logits of the whole model."""

    def logits(attend: Attend) -> Tensor:
        with torch.no_grad():
            return model(tokens, [in_dtype(setting.dtype, attend)] * setting.layers)

    return Case(
        "whole model",
        partial(logits, flash_attention),
        partial(logits, standard_attention),
        partial(exact_logits, model, tokens),
    )


@torch.no_grad()
def exact_logits(model: Transformer, tokens: Tensor) -> Tensor:
    exact_model = copy.deepcopy(model).double()
    return exact_model(tokens, [standard_attention] * len(exact_model.blocks))


def list_cases(
    model: Transformer, tokens: Tensor, lengths: list[int], setting: Setting
) -> list[Case]:
    """What to compare, over tokens (1, seqlen) that are sequences of these lengths."""
    qkv = attention_inputs(model, tokens, setting)
    new = setting.new_tokens
    return [
        attention_case("forward", flash_attention, standard_attention, qkv),
        attention_case(
            "forward + backward",
            partial(gradients, flash_attention),
            partial(gradients, standard_attention),
            qkv,
        ),
        attention_case(
            f"varlen, {len(lengths)} paragraphs",
            partial(flash_packed, lengths),
            partial(standard_packed, lengths),
            qkv,
        ),
        attention_case(
            f"decode, {new} characters",
            partial(flash_decode, new),
            partial(standard_decode, new),
            qkv,
            partial(standard_last, new),
        ),
        model_case(model, tokens, setting),
    ]


@dataclass(frozen=True)
class Measurement:
    results: tuple[Tensor, ...]
    seconds: float
    peak_bytes: int


def compare(case: Case, device: torch.device, repeats: int) -> tuple[list[str], bool]:
    """Run a case; return its row of the table, and whether this library's results are right."""
    exact = as_tuple(case.exact())
    backend, flash = on_best_backend(device, lambda: measure(case.flash, device, repeats))
    standard = measure(case.standard, device, repeats)
    expected = standard.results if case.yardstick is None else as_tuple(case.yardstick())
    triples = zip(flash.results, expected, exact, strict=True)
    right = all(is_right(*triple) for triple in triples)
    both = (flash, standard)
    row = [case.name, backend]
    row += [f"{max(map(error, m.results, exact)):.1e}" for m in both]
    row += [f"{m.seconds * 1e3:.1f} ms" for m in both]
    row += [f"{m.peak_bytes / 2**20:.1f} MiB" for m in both]
    return [*row, "ok" if right else "WRONG"], right


def as_tuple(result: Result) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def error(result: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference, over that of the exact values."""
    return ((result.double() - exact).norm() / exact.norm()).item()


def worst_error(result: Tensor, exact: Tensor) -> float:
    """Largest difference, over the largest exact value."""
    return ((result.double() - exact).abs().max() / exact.abs().max()).item()


def is_right(flash: Tensor, standard: Tensor, exact: Tensor) -> bool:
    """At most twice the error of standard attention, and the rounding of the result itself.

    The worst of many random errors varies more than their mean does: it may be 8 times as large.
    """
    rounding = torch.finfo(flash.dtype).eps
    return (  # written so that NaN is wrong
        error(flash, exact) <= 2 * error(standard, exact) + rounding
        and worst_error(flash, exact) <= 8 * worst_error(standard, exact) + rounding
    )


def on_best_backend(
    device: torch.device, run: Callable[[], Measurement]
) -> tuple[str, Measurement]:
    """Force the backends of the device, best first, until one of them covers the whole run."""
    *kernels, tiled = available_backends(device)
    for backend in kernels:
        try:
            with use_backend(backend):
                return backend, run()
        except NotImplementedError:
            continue
    with use_backend(tiled):
        return tiled, run()


def measure(call: Callable[[], Result], device: torch.device, repeats: int) -> Measurement:
    call()  # warm up
    results, peak_bytes = with_peak_memory(call, device)
    times = []
    for _ in range(repeats):
        start = now(device)
        call()
        times.append(now(device) - start)
    return Measurement(as_tuple(results), statistics.median(times), peak_bytes)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def with_peak_memory(call: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """The result, and the peak of what PyTorch allocated meanwhile, inputs not counted."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        return result, torch.cuda.max_memory_allocated(device) - before
    # On the CPU the profiler records each allocation (positive) and release (negative).
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with native_stderr_muted():
        profiler.start()
    result = call()
    with native_stderr_muted():
        profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    return result, max(accumulate(e["args"]["Bytes"] for e in changes))


@contextmanager
def native_stderr_muted() -> Iterator[None]:
    """The profiler of torch 2.13 logs its starts and stops on stderr, whatever the log level."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


# ---- The program ---------------------------------------------------------------------------------


def progress(label: str, total: int) -> Iterator[int]:
    """range(total), drawing a bar on stderr; where that is no terminal, only the finished one."""
    for done in range(total + 1):
        if sys.stderr.isatty() or done == total:
            bar = ("#" * (20 * done // total)).ljust(20, ".")
            end = "\n" if done == total else ""
            print(f"\r{label:24} [{bar}] {done}/{total}", end=end, file=sys.stderr, flush=True)
        if done < total:
            yield done


def describe_backend(device: torch.device) -> str:
    if device.type != "cuda":
        reason = f"asked for {device}" if torch.cuda.is_available() else "no CUDA GPU found"
        return f"tiled PyTorch ({reason}), CPU threads: {torch.get_num_threads()}"
    kernels, gpu = available_backends(device)[:-1], torch.cuda.get_device_name(device)
    if not kernels:
        return f"tiled PyTorch on {gpu} (no kernel is compiled for it)"
    return f"{kernels[0]} kernels on {gpu}, tiled PyTorch for what they do not cover"


def find_text() -> tuple[str, str]:
    """The README of this repository or, where the package is installed without it, its source."""
    package = Path(__file__).parent
    readme = package.parent / "README.md"
    if readme.exists() and (package.parent / "csrc").exists():  # not the README of something else
        return readme.name, readme.read_text(encoding="utf-8")
    sources = sorted(package.glob("*.py"))
    return "the package's source", "".join(path.read_text(encoding="utf-8") for path in sources)


def report_training(model: Transformer, tokens: Tensor, setting: Setting) -> bool:
    losses = train(model, tokens, setting)
    shown = [losses[round(i * (len(losses) - 1) / 5)] for i in range(6)]
    print("loss:", " > ".join(f"{loss:.2f}" for loss in shown))
    return losses[-1] < 0.8 * losses[0]


def report_cases(cases: list[Case], device: torch.device, repeats: int) -> bool:
    rows, all_right = [], True
    for i in progress("comparing", len(cases)):
        row, right = compare(cases[i], device, repeats)
        rows.append(row)
        all_right &= right
    header = ["", "backend", "error", "standard", "time", "standard"]
    header += ["peak memory", "standard", "check"]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for name, *cells in [header, *rows]:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print(name.ljust(widths[0]), *padded, sep="  ")
    print(
        "error: root mean square of the difference from float64, relative; ok if at most twice "
        f"that of standard attention\ntime: median of {repeats} runs    peak memory: allocated by "
        "PyTorch, inputs not counted"
    )
    return all_right


def report_writing(
    model: Transformer, prompt: Tensor, vocabulary: list[str], setting: Setting
) -> bool:
    start = now(prompt.device)
    tokens, logits = write_with_cache(model, prompt, setting)
    middle = now(prompt.device)
    logits_again = compute_again(model, prompt, tokens, setting)
    end = now(prompt.device)
    text = torch.cat((prompt[0], tokens)).unsqueeze(0)
    exact = exact_logits(model, text[:, :-1])[0, -len(tokens) :]
    right = is_right(logits, logits_again, exact)
    # Where all choices agree, writing without a cache gives the same text. Where one does not, the
    # characters are equally likely but for rounding, if the logits are right.
    others = int((logits_again.argmax(dim=-1) != tokens).sum())

    def decoded(ids: Tensor) -> str:
        return "".join(vocabulary[i] for i in ids.tolist())

    print(f"\n{decoded(prompt[0])}|{decoded(tokens)}\n")
    print(
        f"{len(tokens)} characters in {middle - start:.2f} s with a KV cache and in "
        f"{end - middle:.2f} s computing all again for each:",
        "the same text." if others == 0 else f"{others} characters differ.",
    )
    print(
        f"error of the logits: {error(logits, exact):.1e} with, {error(logits_again, exact):.1e} "
        f"without a KV cache: {'ok' if right else 'WRONG'}"
    )
    return right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_attn.demo")
    parser.add_argument("--device", help="cpu, cuda, ...; a CUDA GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    setting = QUICK if options.quick else GPU if device.type == "cuda" else CPU
    start = time.perf_counter()
    torch.manual_seed(0)

    print(f"flash_attn {__version__}, torch {torch.__version__}")
    print(f"backend: {describe_backend(device)}")
    name, text = find_text()
    vocabulary = sorted(set(text))
    tokens = torch.tensor([vocabulary.index(character) for character in text], device=device)
    model = Transformer(setting, len(vocabulary)).to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"\nA transformer of {size:,} parameters learns {name}, {len(text):,} characters:")
    right = report_training(model, tokens, setting)

    tokens = tokens.repeat(1 + setting.seqlen // len(tokens))[: setting.seqlen]
    written = "".join(vocabulary[i] for i in tokens.tolist())
    lengths = [len(part) for part in re.split(r"(?<=\n\n)", written) if part]
    print(
        f"\nCausal attention over its last layer's q, k, v: {setting.seqlen} characters, "
        f"{setting.nheads} heads ({setting.nheads_kv} of k and v) of {setting.headdim}, "
        f"{setting.dtype}:"
    )
    cases = list_cases(model, tokens.unsqueeze(0), lengths, setting)
    right &= report_cases(cases, device, setting.repeats)

    print("\nIt continues the text:")
    middle = tokens[len(tokens) // 2 :]
    prompt = middle[None, : setting.context - setting.new_tokens]
    right &= report_writing(model, prompt, vocabulary, setting)
    verdict = "Everything is right" if right else "Something is WRONG"
    print(f"\n{verdict} ({time.perf_counter() - start:.0f} s).")
    return 0 if right else 1


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in order with the bars, also in a log
    torch.set_num_threads(1)  # times that do not depend on what else the machine does
    sys.exit(main())
