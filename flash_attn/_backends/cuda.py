"""The compiled kernels: what they cover, and the call into flash_attn._C."""

import torch
from torch import Tensor

from flash_attn._arguments import Attention

_Kernel = tuple[str, str, int, str]  # family, dtype, headdim, feature set

try:
    import flash_attn._C as _C

    _KERNELS: frozenset[_Kernel] = frozenset(_C.instantiations())
except ModuleNotFoundError as error:  # not built; an extension that is there but broken is an error
    if error.name != "flash_attn._C":
        raise
    _KERNELS = frozenset()

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def available() -> bool:
    """Whether the extension was built."""
    return bool(_KERNELS)


def families() -> tuple[str, ...]:
    """Return the kernel families of this build, whatever the GPU."""
    return tuple(sorted({family for family, *_ in _KERNELS}))


def unsupported(problem: Attention, family: str) -> str | None:
    """Return why ``family`` cannot run the forward of ``problem`` ("has no ..."), or None."""
    q, k, v = problem.q, problem.k, problem.v
    headdim = q.shape[-1]
    if (family, _DTYPES.get(q.dtype), headdim, "plain") not in _KERNELS:
        built = ", ".join(sorted(f"{d} {h}" for f, d, h, _ in _KERNELS if f == family)) or "none"
        return f"has no kernel for {q.dtype} and head dimension {headdim} (it has {built})"
    if v.shape[-1] != headdim:
        return f"has no head dimension of v ({v.shape[-1]}) that differs from that of q ({headdim})"
    if problem.cu_seqlens_q is not None or problem.cu_seqlens_k is not None:
        return "has no variable-length sequences (cu_seqlens)"
    if problem.block_table is not None:
        return "has no paged cache (block_table)"
    if problem.seqused_k is not None or problem.leftpad_k is not None:
        return "has no lengths of its own for each sequence (seqused_k, cache_seqlens, leftpad)"
    if problem.cache_batch_idx is not None:
        return "has no cache_batch_idx"
    if problem.softcap != 0.0:
        return "has no softcap"
    if problem.alibi_slopes is not None:
        return "has no alibi_slopes"
    if problem.dropout_p != 0.0:
        return "has no dropout"
    if problem.s_aux is not None:
        return "has no attention sinks (s_aux)"
    if not (_is_aligned(q) and _is_aligned(k) and _is_aligned(v)):
        return "has no q, k or v whose address or strides are not multiples of 16 bytes"
    return None


def forward(
    problem: Attention,
    rng_state: Tensor | None,
    return_probs: bool,
    out: Tensor | None = None,
    *,
    family: str,
) -> tuple[Tensor, Tensor, None]:
    """Return out and log-sum-exp of a problem that ``unsupported`` has nothing against.

    q, k and v are read in place, whatever their strides. ``rng_state`` and ``return_probs`` are of
    no use without dropout.
    """
    q, k = problem.q, problem.k
    # The kernel writes 16 bytes at a time; an out that does not allow that is filled by a copy.
    result = out
    if result is None or not _is_aligned(result):
        result = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    if result.numel() == 0 or k.shape[1] == 0:  # nothing to launch
        result.zero_()
        lse.fill_(-torch.inf)
    else:
        _C.forward(
            family=family,
            q=q,
            k=k,
            v=problem.v,
            out=result,
            lse=lse,
            softmax_scale=problem.softmax_scale,
            # Any int is a window, but the kernel's are 32 bits wide.
            window_left=min(problem.window_left, k.shape[1]),
            window_right=min(problem.window_right, q.shape[1]),
            stream=torch._C._cuda_getCurrentRawStream(q.get_device()),
        )
    if out is not None and out is not result:
        result = out.copy_(result)
    return result, lse, None


def _is_aligned(x: Tensor) -> bool:
    batch, row, head, _ = x.stride()
    return (batch | row | head) % 8 == 0 and x.data_ptr() % 16 == 0
