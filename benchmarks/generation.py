"""Tokens per second of a small Llama in transformers, with each implementation of attention.

Run as ``python -m benchmarks.generation``; ``--help`` lists the options. Weights and prompts are
random. A case is a batch of prompts of one length and a kind of cache of transformers: ``dynamic``
grows, ``static`` has its full size from the start. ``generate`` makes ``--new`` tokens greedily.
The time of its first token, which reads the prompt, is reported apart. Prints a table and writes
NAME.json and .csv into ``benchmarks/results/<gpu>/``. Without a GPU the model is tiny.

A paged cache has a serving loop of its own: ``python examples/serve.py``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.report import Row, figure, rounded

IMPLEMENTATIONS = ("flash_attention_2", "sdpa", "eager")  # the first runs on this library


class Case(NamedTuple):
    cache: str
    batch: int
    prompt: int  # tokens


def llama(on_gpu: bool, longest: int) -> Any:
    """A Llama with random weights: as large as Llama 3.2 1B, or tiny."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, nheads, nheads_kv, headdim = (16, 32, 8, 64) if on_gpu else (2, 4, 2, 32)
    config = LlamaConfig(
        vocab_size=32000 if on_gpu else 128,
        hidden_size=nheads * headdim,
        intermediate_size=4 * nheads * headdim,
        num_hidden_layers=layers,
        num_attention_heads=nheads,
        num_key_value_heads=nheads_kv,
        head_dim=headdim,
        max_position_embeddings=longest,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def now(device: torch.device) -> float:
    """The time when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(model: Any, case: Case, new: int) -> tuple[float, float]:
    """How long ``generate`` takes for the first token, and for the others."""
    device = model.device
    times: list[float] = []
    prompt = torch.randint(1, model.config.vocab_size, (case.batch, case.prompt), device=device)

    def after_token(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        if not times:
            times.append(now(device))
        return torch.zeros(len(tokens), dtype=torch.bool, device=device)  # no sequence ends

    start = now(device)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        cache_implementation=case.cache,
        disable_compile=True,
        stopping_criteria=[after_token],
    )
    end = now(device)
    assert out.shape[1] == case.prompt + new
    return times[0] - start, end - times[0]


def measure(case: Case, model: Any, new: int, rounds: int) -> Row:
    """Time the implementations in turn.

    Returns
    -------
    dict
        The fields of the case and, by implementation, ``tokens_per_s`` behind the first token of
        each sequence, ``first_ms`` (until that token), and ``skipped``: the reason.
    """
    row: Row = {**case._asdict(), "new": new, "providers": list(IMPLEMENTATIONS)}
    figures: dict[str, dict[str, Any]] = {"tokens_per_s": {}, "first_ms": {}, "skipped": {}}
    times: dict[str, list[tuple[float, float]]] = {}
    for round_, name in itertools.product(range(rounds + 1), IMPLEMENTATIONS):
        if name in figures["skipped"]:
            continue
        try:
            model.set_attn_implementation(name)
            pair = seconds(model, case, new)
        except (torch.cuda.OutOfMemoryError, ImportError, ValueError) as error:
            figures["skipped"][name] = str(error).splitlines()[0]
            continue
        if round_ > 0:
            times.setdefault(name, []).append(pair)
    for name, pairs in times.items():
        first, others = map(statistics.median, zip(*pairs, strict=True))
        figures["first_ms"][name] = rounded(first * 1e3)
        figures["tokens_per_s"][name] = rounded(case.batch * (new - 1) / others)
    return {**row, **figures}


def cells(row: Row) -> dict[str, str]:
    """A line of the table, by column: first token and tokens per second of each."""
    texts = {
        name: f"{figure(row['first_ms'].get(name))} {figure(row['tokens_per_s'].get(name), 0)}"
        for name in row["providers"]
    }
    sizes = {name: str(row[name]) for name in Case._fields}
    return {**sizes, **{name: text.rjust(14) for name, text in texts.items()}}


def main(arguments: Sequence[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = report.parser("generation", __doc__)
    add = parser.add_argument
    add("--cache", nargs="+", choices=("dynamic", "static"), default=["dynamic", "static"])
    add("--batch", nargs="+", type=int, default=[1, 16] if on_gpu else [2])
    add("--prompt", nargs="+", type=int, default=[1024, 16384] if on_gpu else [40])
    add("--new", type=int, default=64 if on_gpu else 4, help="tokens of each sequence")
    add("--rounds", type=int, default=3 if on_gpu else 1, help="samples of each")
    report.add_arguments(parser, "generation", plots=False)
    a = parser.parse_args(arguments)
    if a.new < 2:
        parser.error(f"--new must be at least 2, got {a.new}")
    model = llama(on_gpu, max(a.prompt) + a.new)
    cases = list(itertools.starmap(Case, itertools.product(a.cache, a.batch, a.prompt)))
    print(f"{report.device_name()}, torch {torch.__version__}: ms of the first token, tokens/s")
    rows: list[Row] = []
    progress = report.with_progress(
        partial(measure, model=model, new=a.new, rounds=a.rounds), cases, str
    )
    for row in report.record(a.folder / a.output, a, progress):
        report.print_cells(cells(row), head=not rows)
        rows.append(row)
    report.print_skipped(rows)


if __name__ == "__main__":
    main()
