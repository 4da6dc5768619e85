"""Time of several calls, measured side by side: launched one by one, or replayed as CUDA graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

# Clocks that the GPU waits before a sample, so that the host is ahead of it from the first call on:
# what is measured is the device's time, not that of preparing a launch (benchmarks/host_time.py).
HEAD_START = 1_000_000
MOST_CAPTURED = 200  # calls in a CUDA graph

Sampler = Callable[[], float]  # milliseconds of one call, averaged over many


@dataclass(frozen=True)
class Call:
    """What is timed, and the settings that it runs under: many runs share one entry into them."""

    run: Callable[[], Any]
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self) -> Any:
        with self.context():
            return self.run()


def time_in_turn(
    samplers: Mapping[str, Sampler], rounds: int = 10, settle_s: float = 0.0
) -> dict[str, float]:
    """Name to the median of ``rounds`` samples.

    The samplers take turns, so that clock and temperature changes meet all of them alike, and the
    order is rotated from round to round. Samples of the first ``settle_s`` seconds do not count.
    """
    end = time.perf_counter() + settle_s
    while time.perf_counter() < end:
        for sample in samplers.values():
            sample()
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    names = list(samplers)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(samplers[name]())
    return {name: statistics.median(times) for name, times in samples.items()}


def sampler(
    call: Call,
    device: str = "cuda",
    graph: bool = False,
    l2_buffer: Tensor | None = None,
    sample_ms: float = 5.0,
) -> Sampler:
    """Run the call a few times; return what takes a sample of its time.

    A sample is as many back-to-back calls as fill ``sample_ms``, between two CUDA events. It counts
    what the GPU does from the start of a call to the start of the next: kernels, memsets and the
    gaps between them. Calls shorter than their host time have to be captured: launched one by one,
    they would leave the GPU waiting.

    Parameters
    ----------
    call
        Launches its work on the current CUDA stream.
    device : {"cuda", "cpu"}
        Time of the device; on the CPU that of the call.
    graph
        Capture the calls, at most MOST_CAPTURED, into one CUDA graph; a sample is one replay.
        Everything that the call needs must have been made within ``capture_stream``. Inputs stay
        alive with the call, outputs in the memory of the graph.
    sample_ms
        Least length of a sample in milliseconds; longer samples hide launch gaps.
    l2_buffer
        A matrix larger than the L2 cache. Before each call it is multiplied by a vector, as the
        weights of a model are when it decodes, which leaves nothing of a call's inputs there. (Had
        it been written, the call would share the memory with what the cache writes back.) The time
        of the products alone is measured in the same sample and taken off. Without it inputs stay
        in the L2 cache where they fit, as the results of the layer before do in a model.

    Raises
    ------
    RuntimeError
        If the call cannot be captured.
    """
    bodies = [call.run]
    if l2_buffer is not None:
        flush = partial(torch.mv, l2_buffer, l2_buffer[0])
        bodies = [lambda: (flush(), call.run()), flush]
    with call.context():
        bodies[0]()  # loads the kernels
        once = milliseconds(bodies[0], 3, device) / 3
        calls = max(1, round(sample_ms / max(once, 1e-3)))
        if graph:
            calls = min(calls, MOST_CAPTURED)
            bodies = [_captured(body, calls) for body in bodies]

    def sample() -> float:
        with nullcontext() if graph else call.context():
            both, *alone = [milliseconds(body, 1 if graph else calls, device) for body in bodies]
        return (both - sum(alone)) / calls

    return sample


@contextmanager
def capture_stream() -> Iterator[None]:
    """Make a stream that can be captured the current one; a backward runs on its forward's."""
    stream = _side_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        yield
        torch.cuda.synchronize()


def larger_than_l2() -> Tensor:
    """A matrix on the GPU of twice the size of its L2 cache."""
    columns = 4096
    rows = torch.cuda.get_device_properties().L2_cache_size // columns  # of 2 bytes an element
    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")


@cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # one for all: PyTorch keeps freed memory apart for each stream


def _captured(body: Callable[[], object], calls: int) -> Callable[[], object]:
    """Return what replays ``calls`` calls and returns the result of the last."""
    graph = torch.cuda.CUDAGraph()
    result: object = None
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                result = body()
    except Exception as error:
        raise RuntimeError(f"cannot be captured into a CUDA graph: {error}") from error

    def replay() -> object:
        graph.replay()
        return result

    replay()  # the first replay also uploads the graph
    return replay


def host_times(call: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of the host for each of the calls, of which none waits for the GPU."""
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        started = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - started) / 1e3)
    torch.cuda.synchronize()
    return times


def milliseconds(
    function: Callable[[], object], calls: int, device: str, head_start: int = HEAD_START
) -> float:
    """From the start of the first of the calls to the end of the last; ``head_start`` in clocks."""
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - started) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(head_start)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
