"""Device time of several functions, measured side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch


def time_in_turn(
    functions: Mapping[str, Callable[[], object]],
    rounds: int = 10,
    sample_ms: float = 2.0,
) -> dict[str, float]:
    """Median device time of each function.

    The functions take turns, so that clock and temperature changes meet all of them alike, and the
    order is rotated from round to round. One sample is as many back-to-back calls as fill
    ``sample_ms``, between two CUDA events.

    Parameters
    ----------
    functions
        Name to function; a function launches its work on the current CUDA stream.
    rounds
        Samples taken of each function.
    sample_ms
        Least length of a sample in milliseconds; longer samples hide launch gaps.

    Returns
    -------
    dict
        Name to the median time of one call in milliseconds.
    """
    calls = {}
    for name, function in functions.items():
        function()  # loads the kernels
        calls[name] = max(1, round(sample_ms / max(_sample(function, calls=3), 1e-3)))

    samples: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_sample(functions[name], calls[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def _sample(function: Callable[[], object], calls: int) -> float:
    """Milliseconds of one call, averaged over ``calls`` calls in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls
