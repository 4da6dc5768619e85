"""Tokens per second of a small Llama in transformers, with each implementation of attention.

Run as ``python -m benchmarks.generation``; ``--help`` lists the options. Weights and prompts are
random. A case is a batch of prompts of one length and a kind of cache of transformers: ``dynamic``
grows, ``static`` has its full size from the start, and ``compiled`` is static with a step compiled
into a CUDA graph. ``generate`` makes ``--new`` tokens greedily. The time of its first token, which
reads the prompt, is reported apart; of the others the median counts. Prints a table and writes
NAME.json and .csv into ``benchmarks/results/<gpu>/``. Without a GPU the model is tiny.

A paged cache has a serving loop of its own: ``python examples/serve.py``.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.report import Row, figure, rounded
from flash_attn import adapters
from flash_attn.demo import now

# The first two run on this library.
IMPLEMENTATIONS = ("adapter", "flash_attention_2", "sdpa")
CACHES = ("dynamic", "static", "compiled")


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


def seconds(model: Any, case: Case, new: int) -> list[float]:
    """How long ``generate`` takes for each token."""
    device = model.device
    times: list[float] = []
    prompt = torch.randint(1, model.config.vocab_size, (case.batch, case.prompt), device=device)

    def after_token(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        times.append(now(device))
        return torch.zeros(len(tokens), dtype=torch.bool, device=device)  # no sequence ends

    times.append(now(device))
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        cache_implementation="dynamic" if case.cache == "dynamic" else "static",
        disable_compile=case.cache != "compiled",
        stopping_criteria=[after_token],
    )
    assert out.shape[1] == case.prompt + new
    return [end - start for start, end in itertools.pairwise(times)]


def measure(case: Case, model: Any, new: int, rounds: int) -> Row:
    """Time the implementations in turn.

    Returns
    -------
    dict
        The fields of the case and, by implementation, ``first_ms`` (until the first token of each
        sequence), ``tokens_per_s`` by the median step behind it, and ``skipped``: the reason.
    """
    torch._dynamo.reset()  # what is kept of one function is bounded
    row: Row = {**case._asdict(), "new": new, "providers": list(IMPLEMENTATIONS)}
    figures: dict[str, dict[str, Any]] = {"tokens_per_s": {}, "first_ms": {}, "skipped": {}}
    if case.cache == "compiled":
        figures["skipped"]["flash_attention_2"] = "its layers are not compiled as a whole"
    times: dict[str, list[list[float]]] = {}
    for round_, name in itertools.product(range(rounds + 1), IMPLEMENTATIONS):
        if name in figures["skipped"]:
            continue
        try:
            if name == "adapter":
                adapters.register_with_transformers(name)
            model.set_attn_implementation(name)
            of_tokens = seconds(model, case, new)
        except (torch.cuda.OutOfMemoryError, ImportError, ValueError) as error:
            figures["skipped"][name] = str(error).splitlines()[0]
            continue
        if round_ > 0:
            times.setdefault(name, []).append(of_tokens)
    for name, rounds_of_name in times.items():
        first, *others = zip(*rounds_of_name, strict=True)
        figures["first_ms"][name] = rounded(statistics.median(first) * 1e3)
        step = statistics.median(itertools.chain(*others))
        figures["tokens_per_s"][name] = rounded(case.batch / step)
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
    add("--cache", nargs="+", choices=CACHES, default=CACHES)
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
    measured = report.with_progress(
        partial(measure, model=model, new=a.new, rounds=a.rounds), cases, str
    )
    rows = report.print_rows(report.record(a.folder / a.output, a, measured), cells)
    report.print_skipped(rows)


if __name__ == "__main__":
    main()
