"""mamba_ssm.modules.mha: decoding with our cache and rotary against a pass over the whole text."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from clients.client_helpers import assert_as_good_as_eager, assert_gradients

pytest.importorskip("einops")
if importlib.util.find_spec("mamba_ssm") is None:
    pytest.skip("mamba_ssm is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def mha() -> ModuleType:
    """The module by its file: the package's __init__ imports Triton and compiled scans."""
    package = importlib.util.find_spec("mamba_ssm")
    assert package is not None and package.submodule_search_locations
    file = f"{package.submodule_search_locations[0]}/modules/mha.py"
    spec = importlib.util.spec_from_file_location("mamba_ssm_mha", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert module.flash_attn_with_kvcache is not None and module.RotaryEmbedding is not None
    return module


def modules(mha: ModuleType, rotary: int) -> list[Any]:
    flash = mha.MHA(64, 4, num_heads_kv=2, causal=True, layer_idx=0, rotary_emb_dim=rotary)
    found = [
        mha.MHA(64, 4, num_heads_kv=2, causal=True, layer_idx=0, rotary_emb_dim=rotary)
        for _ in range(2)
    ]
    flash = flash.bfloat16()
    for other in found:
        other.load_state_dict({name: x.float() for name, x in flash.state_dict().items()})
    return [flash, found[0].bfloat16(), found[1]]


@pytest.mark.parametrize("rotary", [0, 8, 16])
@torch.no_grad()
def test_decode(mha: ModuleType, rotary: int) -> None:
    """A prompt, then token by token. Rotary dimension 16 is fused into the append, 8 is not."""
    flash, eager, exact = modules(mha, rotary)
    x = torch.randn(2, 13, 64, dtype=torch.bfloat16)
    state = SimpleNamespace(
        max_seqlen=16,
        seqlen_offset=0,
        batch_size_offset=0,
        lengths_per_sample=None,
        key_value_memory_dict={},
    )
    steps = []
    for step in (x[:, :9], *x[:, 9:].split(1, 1)):
        steps.append(flash(step, inference_params=state))
        state.seqlen_offset += step.shape[1]
    decoded = torch.cat(steps[1:], 1)  # the prompt's attention is PyTorch's own
    assert_as_good_as_eager(decoded, eager(x)[:, 9:], exact(x.float())[:, 9:])


def test_rotary_gradients(mha: ModuleType) -> None:
    """Our rotary in a training pass against rotation by its definition."""
    flash, eager, exact = modules(mha, 16)
    # The reference rotates by definition, in PyTorch.
    for module in (eager, exact):
        module.rotary_emb = Rotation()
    x = torch.randn(2, 13, 64, dtype=torch.bfloat16)
    out = [module(x.to(module.out_proj.weight.dtype)) for module in (flash, eager, exact)]
    assert_as_good_as_eager(*out)
    direction = torch.randn(2, 13, 64)
    for found in out:
        found.backward(direction.to(found.dtype))
    assert_gradients(flash, eager, exact)


class Rotation(torch.nn.Module):
    """Rotary embedding of queries and packed keys as a product of complex numbers."""

    def forward(
        self, q: torch.Tensor, kv: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seqlen, headdim = q.shape[1], q.shape[-1]
        frequencies = 10000 ** (-torch.arange(0, headdim, 2) / headdim)
        angles = torch.outer(torch.arange(seqlen), frequencies)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]

        def turned(x: torch.Tensor) -> torch.Tensor:
            product = torch.complex(*x.float().chunk(2, -1)) * turns
            return torch.cat([product.real, product.imag], -1).to(x.dtype)

        k, v = kv.unbind(2)
        return turned(q), torch.stack([turned(k), v], 2)
