"""esm's FlashMultiHeadAttention (packed sequences and rotary) against its MultiHeadAttention."""

from __future__ import annotations

import pytest
import torch

from clients.client_helpers import Calls, assert_as_good_as_eager, assert_gradients

pytest.importorskip("esm")


def test_attention(calls: Calls) -> None:
    from esm.layers.attention import FlashMultiHeadAttention, MultiHeadAttention

    flash = FlashMultiHeadAttention(64, 4).bfloat16()
    eager, exact = MultiHeadAttention(64, 4).bfloat16(), MultiHeadAttention(64, 4)
    for module in (eager, exact):
        module.load_state_dict(flash.state_dict(), strict=False)
    seen = torch.ones(3, 19, dtype=torch.bool)
    seen[1, 7:] = seen[2, 1:] = False
    x = torch.randn(3, 19, 64, dtype=torch.bfloat16)
    out = [
        flash(x[seen], seen),
        eager(x, seen)[seen],
        exact(x.float(), seen)[seen],
    ]
    assert_as_good_as_eager(*out)
    direction = torch.randn_like(out[-1])
    for found in out:
        found.backward(direction.to(found.dtype))
    assert_gradients(flash, eager, exact)
    assert calls == ["forward", "backward"]
