"""ring-flash-attn on two gloo processes: rings of our private functions, against the whole."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from clients.client_helpers import (
    HEADDIM,
    HEADS,
    SEQLEN,
    assert_as_good_as_eager,
    on_processes,
    whole,
)

if importlib.util.find_spec("ring_flash_attn") is None:
    pytest.skip("ring_flash_attn is not installed", allow_module_level=True)

# Its adapter of transformers imports a name that transformers 5 no longer has: left out.
adapters: Any = ModuleType("ring_flash_attn.adapters")
adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
sys.modules["ring_flash_attn.adapters"] = adapters


def places(kind: str, rank: int, size: int) -> Tensor:
    """Which of the sequence's tokens this process holds."""
    tokens = torch.arange(SEQLEN)
    if kind == "zigzag":
        chunks = tokens.chunk(2 * size)
        return torch.cat([chunks[rank], chunks[-1 - rank]])
    return tokens[rank::size] if kind == "stripe" else tokens.chunk(size)[rank]


def check(rank: int, size: int) -> None:
    import ring_flash_attn

    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, SEQLEN, HEADS, HEADDIM).bfloat16()
    eager, exact = whole(q, k, v, dout), whole(*(x.float() for x in (q, k, v, dout)))
    for kind, name in {"ring": "ring", "zigzag": "zigzag_ring", "stripe": "stripe"}.items():
        mine = places(kind, rank, size)
        part = [x[:, mine].requires_grad_() for x in (q, k, v)]
        function = getattr(ring_flash_attn, f"{name}_flash_attn_func")
        out = function(*part, causal=True)
        flash = [out, *torch.autograd.grad(out, part, dout[:, mine])]
        for of, x, y, z in zip(("out", "dq", "dk", "dv"), flash, eager, exact, strict=True):
            assert_as_good_as_eager(x, y[:, mine], z[:, mine], f"{kind} {of}")

    # Llama 3's way: packed sequences, here one; keys are gathered from all processes.
    mine = places("ring", rank, size)
    lengths = torch.tensor([0, SEQLEN], dtype=torch.int32)
    prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(lengths, True, rank, size)
    part = [x[0, mine].requires_grad_() for x in (q, k, v)]
    *lengths, keys = prepared
    out = ring_flash_attn.llama3_flash_attn_varlen_func(
        *part, *lengths, heads_k_stride=1, local_k_slice=keys, causal=True
    )
    flash = [out, *torch.autograd.grad(out, part, dout[0, mine])]
    for of, x, y, z in zip(("out", "dq", "dk", "dv"), flash, eager, exact, strict=True):
        assert_as_good_as_eager(x, y[0, mine], z[0, mine], f"llama3 {of}")


def test_two_processes() -> None:
    on_processes(2, check)
