"""Peak memory of attention, forward + backward, beside standard attention, by sequence length.

Run as ``python -m benchmarks.memory``; ``--help`` lists the options. What PyTorch allocates at most
beside the inputs (q, k, v and the gradient of the output), in MiB. Prints a table, writes
NAME.json, NAME.csv and NAME.png into ``benchmarks/results/<gpu>/``. Without a GPU the sizes are
small.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import torch

from benchmarks import plots, report
from benchmarks.cases import DTYPES, Case, Inputs, make_inputs
from benchmarks.providers import Provider, add_arguments, attempt, bind, chosen_providers
from benchmarks.report import OURS, Row
from flash_attn.demo import with_peak_memory

DEFAULTS = {
    "cuda": {
        "dtype": "bf16",
        "seqlen": [2**n for n in range(9, 17)],
        "headdim": 128,
        "nheads": 16,
        "math_gib": 40.0,
        "providers": ["sm80", "tiled", "math", "efficient", "flash", "flash_op", "cudnn"],
    },
    "cpu": {
        "dtype": "fp32",
        "seqlen": [512, 1024, 2048],
        "headdim": 64,
        "nheads": 2,
        "math_gib": 4.0,
        "providers": ["tiled", "math", "flash"],
    },
}


def measure(case: Case, providers: Mapping[str, Provider], device: str) -> Row:
    """Return the fields of the case, ``peak_mib`` and ``skipped`` (the reason) by provider."""
    inputs = make_inputs(case, device)
    peaks, skipped = {}, {}
    for name, provider in providers.items():
        peak, reason = attempt(peak_mib, provider, case, inputs, device)
        if peak is None:
            skipped[name] = reason
        else:
            peaks[name] = round(peak, 3)
    return {**case.described(), "peak_mib": peaks, "skipped": skipped}


def peak_mib(provider: Provider, case: Case, inputs: Inputs, device: str) -> float:
    _, size = with_peak_memory(bind(provider, case, inputs), torch.device(device))
    return size / 2**20


def cells(row: Row, names: Sequence[str]) -> dict[str, str]:
    """A line of the table, by column."""
    peaks = row["peak_mib"]
    ours = next((name for name in OURS if name in peaks), None)
    saved = f"{peaks['math'] / peaks[ours]:.1f}" if ours and "math" in peaks else "-"
    figures = {name: f"{peaks[name]:.1f}" if name in peaks else "-" for name in names}
    return {"seqlen": str(row["seqlen"]), **figures, "math / ours": saved}


def parse(arguments: Sequence[str] | None, device: str) -> argparse.Namespace:
    parser = report.parser("memory", __doc__)
    add = parser.add_argument
    add("--dtype", choices=DTYPES, help="of the tensors")
    add("--seqlen", nargs="+", type=int, help="with batch 1")
    add("--headdim", type=int, help="of q, k and v")
    add("--nheads", type=int, help="of the queries")
    add("--group", type=int, default=1, help="query heads of a key head")
    add("--causal", action="store_true", help="mask")
    add_arguments(parser)
    report.add_arguments(parser, "memory")
    parser.set_defaults(**DEFAULTS[device])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = parse(arguments, device)
    if a.replot is not None:
        plots.draw(a.replot, plots.memory)
        return
    providers = chosen_providers(a)
    cases = [
        Case(
            "both",
            a.dtype,
            a.headdim,
            a.causal,
            seqlen,
            group=a.group,
            tokens=seqlen,
            width=a.nheads * a.headdim,
        )
        for seqlen in sorted(a.seqlen)
    ]
    # The workspaces that libraries allocate at their first call are not an attention's.
    measure(cases[0], providers, device)

    heads = f"{cases[0].nheads} query and {cases[0].nheads_kv} key heads of {a.headdim}"
    print(f"{report.device_name()}, torch {torch.__version__}, {a.dtype}, batch 1, {heads}, MiB")
    stem = a.folder / a.output
    measured = report.with_progress(
        lambda case: measure(case, providers, device), cases, lambda case: str(case.seqlen)
    )
    names = list(providers)
    rows = report.print_rows(report.record(stem, a, measured), lambda row: cells(row, names))
    report.print_skipped(rows)
    plots.draw_if_possible(stem.with_suffix(".json"), plots.memory)


if __name__ == "__main__":
    torch.set_num_threads(1)  # others than one would only wait for each other on small sizes
    main()
