"""Host time of one small forward call: what the CPU pays before the kernel is in the stream.

Run as ``python -m benchmarks.host_time`` on a machine with a CUDA GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
from flash_attn import _arguments
from flash_attn._backends import cuda

ROUNDS = 50
CALLS = 100  # a round, launched without waiting; far below the 1024 launches that a stream queues
SHAPE = (1, 128, 8, 64)  # batch, seqlen, nheads, headdim: the kernel ends before the next launch


def candidates() -> dict[str, Callable[[], object]]:
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q_grad = q.clone().requires_grad_()
    q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty((1, 8, 128), dtype=torch.float32)
    found: dict[str, Callable[[], object]] = {
        "flash_attn_func": lambda: flash_attn.flash_attn_func(q, k, v),
        "flash_attn_func, gradient wanted": lambda: flash_attn.flash_attn_func(q_grad, k, v),
        "scaled_dot_product_attention (flash)": lambda: scaled_dot_product_attention(
            q_heads, k_heads, v_heads
        ),
    }
    if cuda.available():
        from flash_attn import _C

        options = _arguments.options(0.0, None, False, -1, -1, 0.0, False)
        arguments = cuda.common_arguments(
            _arguments.dense(q, k, v, options, None), None, "sm80", "forward"
        )
        found["_C.forward alone"] = lambda: _C.forward(
            **arguments, out=out, lse=lse, cache_batch_idx=None, s_aux=None
        )
    return found


def measure() -> dict[str, float]:
    """Return the median host time of a call in microseconds, the candidates timed in turn."""
    times: dict[str, list[float]] = {}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        calls = candidates()
        for _ in range(ROUNDS):
            for name, call in calls.items():
                call()
                torch.cuda.synchronize()
                for _ in range(CALLS):
                    started = time.perf_counter_ns()
                    call()
                    times.setdefault(name, []).append((time.perf_counter_ns() - started) / 1e3)
                torch.cuda.synchronize()
    return {name: round(statistics.median(samples), 2) for name, samples in times.items()}


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.host_time needs a CUDA GPU and torch sees none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 {SHAPE}")
    print(f"backends: {', '.join(flash_attn.available_backends('cuda'))}")
    print(f"median of {ROUNDS * CALLS} calls")
    for name, microseconds in measure().items():
        print(f"{name:40} {microseconds:8.2f} us")


if __name__ == "__main__":
    main()
