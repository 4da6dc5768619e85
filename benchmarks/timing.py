"""Time of several functions, measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# Clocks that the GPU waits before a sample, so that the host is ahead of it from the first call on:
# what is measured is the device's time, not that of preparing a launch (benchmarks/host_time.py).
HEAD_START = 1_000_000


def time_in_turn(
    functions: Mapping[str, Callable[[], object]],
    device: str = "cuda",
    rounds: int = 10,
    sample_ms: float = 5.0,
    l2_buffer: Tensor | None = None,
) -> dict[str, float]:
    """Median time of each function.

    The functions take turns, so that clock and temperature changes meet all of them alike, and the
    order is rotated from round to round. One sample is as many back-to-back calls as fill
    ``sample_ms``, between two CUDA events.

    Parameters
    ----------
    functions
        Name to function; a function launches its work on the current CUDA stream.
    device : {"cuda", "cpu"}
        Time of the device; on the CPU that of the call.
    rounds
        Samples taken of each function.
    sample_ms
        Least length of a sample in milliseconds; longer samples hide launch gaps.
    l2_buffer
        Written before each call, which is then timed alone: larger than the L2 cache, it leaves
        nothing of a call's inputs there. Without it they stay there where they fit, as the results
        of the layer before do in a model.

    Returns
    -------
    dict
        Name to the median time of one call in milliseconds.
    """
    calls = {}
    for name, function in functions.items():
        function()  # loads the kernels
        once = _sample(function, 3, device, l2_buffer)
        calls[name] = max(1, round(sample_ms / max(once, 1e-3)))

    samples: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(_sample(functions[name], calls[name], device, l2_buffer))
    return {name: statistics.median(times) for name, times in samples.items()}


def larger_than_l2() -> Tensor:
    """A tensor on the GPU of twice the size of its L2 cache."""
    size = 2 * torch.cuda.get_device_properties().L2_cache_size
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _sample(
    function: Callable[[], object], calls: int, device: str, l2_buffer: Tensor | None
) -> float:
    """Milliseconds of one call, averaged over ``calls`` calls."""
    if l2_buffer is None:
        return _launch(function, calls, device)() / calls
    spans = []
    for _ in range(calls):
        l2_buffer.zero_()
        spans.append(_launch(function, 1, device))
    return sum(span() for span in spans) / calls


def _launch(function: Callable[[], object], calls: int, device: str) -> Callable[[], float]:
    """Call ``calls`` times; return what waits for the end and gives the milliseconds between."""
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(calls):
            function()
        elapsed = (time.perf_counter() - started) * 1e3
        return lambda: elapsed
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(calls):
        function()
    end.record()

    def wait() -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return wait
