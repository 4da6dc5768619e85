"""PyTorch's ``scaled_dot_product_attention``: its own choice, and with this library active.

Run as ``python -m benchmarks.sdpa``; ``--help`` lists the options. Needs a CUDA GPU and torch 2.11.
A case is causal attention or all of it, forward alone or with its backward, in bfloat16; the two
take turns. ``host`` is the host's time of a call of 128 tokens and 4 heads of 64. Prints a table
and writes NAME.json and .csv into ``benchmarks/results/<gpu>/``.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import report
from benchmarks.report import Row, figure, rounded
from benchmarks.timing import host_times, milliseconds
from flash_attn import adapters

ROUNDS = 5
CALLS = 10  # of a sample of the device's time
HEAD_START = 4_000_000  # clocks before it
FIGURES = ("forward_ms", "training_ms", "host_forward_us", "host_training_us")


class Case(NamedTuple):
    headdim: int
    seqlen: int
    causal: bool
    batch: int
    nheads: int


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Within it PyTorch chooses by itself ("default"), or this library is active."""
    if name == "default":
        yield
        return
    torch.nn.attention.activate_flash_attention_impl(adapters.register_with_pytorch())
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def device_ms(call: Callable[[], Any]) -> float:
    """Of one of several calls behind each other, which the host is ahead of."""
    call()
    return milliseconds(call, CALLS, "cuda", HEAD_START) / CALLS


def host_us(call: Callable[[], Any]) -> float:
    return statistics.median(host_times(call, 100))


def measure(case: Case) -> Row:
    """Time both in turn.

    Returns
    -------
    dict
        The fields of the case, and by implementation ``forward_ms``, ``training_ms`` (forward and
        backward), ``host_forward_us`` and ``host_training_us``.
    """
    shape = (case.batch, case.nheads, case.seqlen, case.headdim)
    q, k, v, dout = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16)
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    attend = partial(scaled_dot_product_attention, is_causal=case.causal)

    def train() -> Any:
        return torch.autograd.grad(attend(*wanted), wanted, dout)

    calls: dict[str, Callable[[], Any]] = {"forward": partial(attend, q, k, v), "training": train}
    if case.seqlen < 256:
        samplers = {f"host_{name}_us": partial(host_us, call) for name, call in calls.items()}
    else:
        samplers = {f"{name}_ms": partial(device_ms, call) for name, call in calls.items()}
    row: Row = {**case._asdict(), **{name: {} for name in FIGURES}}
    times: dict[tuple[str, str], list[float]] = {}
    for _, name in itertools.product(range(ROUNDS), ("default", "exact")):
        with implementation(name):
            for figure_name, sample in samplers.items():
                times.setdefault((figure_name, name), []).append(sample())
    for (figure_name, name), samples in times.items():
        row[figure_name][name] = rounded(statistics.median(samples))
    return row


def cells(row: Row) -> dict[str, str]:
    """A line of the table: times by PyTorch's choice and by this library, and their ratio."""
    texts = {name: str(row[name]) for name in Case._fields}
    for name in ("forward", "training"):
        both = row[f"{name}_ms"] or row[f"host_{name}_us"]
        ratio = both["default"] / both["exact"]
        texts[name] = f"{figure(both['default'], 3)} {figure(both['exact'], 3)} {ratio:.2f}"
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("sdpa", __doc__)
    add = parser.add_argument
    add("--headdim", nargs="+", type=int, default=[64, 128])
    add("--seqlen", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    add("--tokens", type=int, default=16384)
    report.add_arguments(parser, "sdpa", plots=False)
    a = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.sdpa needs a CUDA GPU and torch sees none")
    cases = [Case(64, 128, True, 1, 4)]
    cases += [
        Case(headdim, seqlen, causal, a.tokens // seqlen, 2048 // headdim)
        for headdim, causal, seqlen in itertools.product(a.headdim, (False, True), a.seqlen)
    ]
    print(f"{report.device_name()}, torch {torch.__version__}: ms (host: us), default and here")
    measured = report.with_progress(measure, cases, str)
    report.print_rows(report.record(a.folder / a.output, a, measured), cells)


if __name__ == "__main__":
    main()
