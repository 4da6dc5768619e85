"""Host time of one small forward call: what the CPU pays before the kernel is in the stream.

Run as ``python -m benchmarks.host_time`` on a machine with a CUDA GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
from flash_attn import _backends
from flash_attn._backends import cuda

ROUNDS = 50
CALLS = 100  # a round, launched without waiting; far below the 1024 launches that a stream queues
SHAPE = (1, 128, 8, 64)  # batch, seqlen, nheads, headdim: the kernel ends before the next launch

Call = Callable[[], object]


def candidates(fa3_library: str | None) -> dict[str, Call]:
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q_grad = q.clone().requires_grad_()
    q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, v))
    lengths = torch.full((1,), 100, dtype=torch.int32, device="cuda")
    found: dict[str, Call] = {
        "flash_attn_func": lambda: flash_attn.flash_attn_func(q, k, v),
        "flash_attn_func, gradient wanted": lambda: flash_attn.flash_attn_func(q_grad, k, v),
        "flash_attn_with_kvcache": lambda: flash_attn.flash_attn_with_kvcache(
            q[:, :1], k, v, cache_seqlens=lengths
        ),
        "scaled_dot_product_attention (flash)": lambda: scaled_dot_product_attention(
            q_heads, k_heads, v_heads
        ),
    }
    if cuda.available():
        found["_C.forward alone"] = extension_call(found["flash_attn_func"])
    if fa3_library is not None:
        torch.ops.load_library(fa3_library)
        fwd = torch.ops.flash_attn_3.fwd
        found["flash_attn_3.fwd"] = lambda: fwd(q, k, v, num_splits=1)
    return found


def extension_call(call: Call) -> Call:
    """The call of _C.forward that ``call`` ends in."""
    from flash_attn import _C

    forward = _C.forward
    with mock.patch.object(_C, "forward") as recorder:
        call()
    return lambda: forward(*recorder.call_args.args, **recorder.call_args.kwargs)


def measure(fa3_library: str | None = None) -> dict[str, float]:
    """Return the median host time of a call in microseconds, the candidates timed in turn."""
    calls = candidates(fa3_library)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(ROUNDS):
            for name, call in calls.items():
                call()
                torch.cuda.synchronize()
                for _ in range(CALLS):
                    started = time.perf_counter_ns()
                    call()
                    times[name].append((time.perf_counter_ns() - started) / 1e3)
                torch.cuda.synchronize()
    return {name: round(statistics.median(samples), 2) for name, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--backend", choices=_backends.BACKENDS, help="in place of the default")
    add("--fa3-library", metavar="PATH", help="adds flash_attn_3.fwd, which the library registers")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.host_time needs a CUDA GPU and torch sees none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 {SHAPE}")
    backends = ", ".join(flash_attn.available_backends("cuda"))
    print(f"backends: {backends}; used: {arguments.backend or 'the first that can'}")
    print(f"median of {ROUNDS * CALLS} calls")
    backend = arguments.backend
    with nullcontext() if backend is None else flash_attn.use_backend(backend):
        times = measure(arguments.fa3_library)
    for name, microseconds in times.items():
        print(f"{name:40} {microseconds:8.2f} us")


if __name__ == "__main__":
    main()
