"""Host time of one small call: what the CPU pays before the kernels are in the stream.

Run as ``python -m benchmarks.host_time`` on a machine with a CUDA GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
import flash_attn_2_cuda
from benchmarks import report
from benchmarks.timing import host_times
from flash_attn import _backends

ROUNDS = 50
CALLS = 100  # a round, launched without waiting; far below the 1024 launches that a stream queues
SHAPE = (1, 128, 8, 64)  # batch, seqlen, nheads, headdim: the kernel ends before the next launch

Call = Callable[[], object]


def candidates(fa3_library: str | None) -> dict[str, Call]:
    q, k, v, dout = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    wanted = q_wanted, k_wanted, v_wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn.flash_attn_func(q_wanted, k_wanted, v_wanted, return_attn_probs=True)
    result = out.detach()
    one, new = q[:, :1].contiguous(), k[:, :1].contiguous()
    k_cache, v_cache = k.clone(), v.clone()  # that are appended to
    cos, sin = torch.randn(2, SHAPE[1], SHAPE[3] // 2, device="cuda", dtype=torch.bfloat16)
    packed_q, packed_k, packed_v = (x.flatten(0, 1) for x in (q, k, v))
    lengths = torch.full((1,), 100, dtype=torch.int32, device="cuda")
    cu_seqlens = torch.tensor([0, 50, 128], dtype=torch.int32, device="cuda")
    k_pages, v_pages = (x.view(8, 16, *SHAPE[2:]) for x in (k, v))
    block_table = torch.arange(10, dtype=torch.int32, device="cuda").view(2, 5) % 8
    q_heads, k_heads, v_heads, dout_heads = (x.transpose(1, 2) for x in (q, k, v, dout))
    leaf = q.clone().requires_grad_()
    doubled = leaf * 2
    found: dict[str, Call] = {
        "flash_attn_func": lambda: flash_attn.flash_attn_func(q, k, v),
        "flash_attn_func, gradient wanted": lambda: flash_attn.flash_attn_func(
            q_wanted, k_wanted, v_wanted
        ),
        "flash_attn_func, its backward": lambda: torch.autograd.grad(
            out, wanted, dout, retain_graph=True
        ),
        # The operator below it, as model code calls it that does without autograd.
        "flash_attn_2_cuda.bwd": lambda: flash_attn_2_cuda.bwd(
            *(dout, q, k, v, result, lse, None, None, None, None),
            *(0.0, SHAPE[-1] ** -0.5, False, -1, -1, 0.0, False),
        ),
        "flash_attn_varlen_func": lambda: flash_attn.flash_attn_varlen_func(
            packed_q, packed_k, packed_v, cu_seqlens, cu_seqlens, 78, 78
        ),
        "flash_attn_varlen_func, pages": lambda: flash_attn.flash_attn_varlen_func(
            packed_q, k_pages, v_pages, cu_seqlens, cu_seqlens, 78, 78, block_table=block_table
        ),
        "flash_attn_with_kvcache": lambda: flash_attn.flash_attn_with_kvcache(
            one, k, v, cache_seqlens=lengths
        ),
        "flash_attn_with_kvcache, append": lambda: flash_attn.flash_attn_with_kvcache(
            one, k_cache, v_cache, new, new, cos, sin, cache_seqlens=lengths
        ),
        "scaled_dot_product_attention": lambda: scaled_dot_product_attention(
            q_heads, k_heads, v_heads
        ),
        # What PyTorch's autograd takes by itself.
        "a multiplication, its backward": lambda: torch.autograd.grad(
            doubled, leaf, dout, retain_graph=True
        ),
    }
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        heads_wanted = [x.detach().requires_grad_() for x in (q_heads, k_heads, v_heads)]
        sdpa_out = scaled_dot_product_attention(heads_wanted[0], heads_wanted[1], heads_wanted[2])
    found["scaled_dot_product_attention, its backward"] = lambda: torch.autograd.grad(
        sdpa_out, heads_wanted, dout_heads, retain_graph=True
    )
    if fa3_library is not None:
        torch.ops.load_library(fa3_library)
        fwd, bwd = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd
        longest = {"max_seqlen_q": 78, "max_seqlen_k": 78}
        lengths_of = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, **longest}
        found |= {
            "flash_attn_3.fwd": lambda: fwd(q, k, v, num_splits=1),
            "flash_attn_3.fwd, packed": lambda: fwd(
                packed_q, packed_k, packed_v, num_splits=1, **lengths_of
            ),
            "flash_attn_3.fwd, cache": lambda: fwd(one, k, v, seqused_k=lengths, num_splits=1),
            "flash_attn_3.fwd, append": lambda: fwd(
                *(one, k_cache, v_cache),
                **{"k_new": new, "v_new": new, "rotary_cos": cos, "rotary_sin": sin},
                **{"seqused_k": lengths, "num_splits": 1},
            ),
            "flash_attn_3.bwd": lambda: bwd(dout, q, k, v, result, lse),
        }
    return found


def measure(fa3_library: str | None = None) -> dict[str, float]:
    """Return the median host time of a call in microseconds, the candidates timed in turn."""
    calls = candidates(fa3_library)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(ROUNDS):
            for name, call in calls.items():
                call()
                times[name] += host_times(call, CALLS)
    return {name: round(statistics.median(samples), 2) for name, samples in times.items()}


def main() -> None:
    parser = report.parser("host_time", __doc__)
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
