"""yunchang (Ulysses, and Ulysses with rings) on four gloo processes against whole attention."""

from __future__ import annotations

import pytest
import torch

from clients.client_helpers import (
    HEADDIM,
    HEADS,
    SEQLEN,
    assert_as_good_as_eager,
    on_processes,
    whole,
)

pytest.importorskip("yunchang")


def check(rank: int, size: int) -> None:
    import yunchang
    from yunchang.kernels import AttnType

    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, SEQLEN, HEADS, HEADDIM).bfloat16()
    eager, exact = whole(q, k, v, dout), whole(*(x.float() for x in (q, k, v, dout)))
    mine = torch.arange(SEQLEN).chunk(size)[rank]

    def compare(name: str, attend: torch.nn.Module) -> None:
        part = [x[:, mine].requires_grad_() for x in (q, k, v)]
        out = attend(*part, causal=True)
        flash = [out, *torch.autograd.grad(out, part, dout[:, mine])]
        for of, x, y, z in zip(("out", "dq", "dk", "dv"), flash, eager, exact, strict=True):
            assert_as_good_as_eager(x, y[:, mine], z[:, mine], f"{name} {of}")

    compare("ulysses", yunchang.UlyssesAttention(attn_type=AttnType.FA))
    # Two by two: a ring of one process would send to itself, which gloo cannot.
    yunchang.set_seq_parallel_pg(2, 2, rank, size)
    hybrid = yunchang.LongContextAttention(ring_impl_type="basic", attn_type=AttnType.FA)
    compare("hybrid", hybrid)


def test_four_processes() -> None:
    on_processes(4, check)
