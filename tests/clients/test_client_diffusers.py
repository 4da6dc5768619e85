"""diffusers' backends `flash` and `flash_varlen` in a tiny transformer, against `_native_math`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clients.client_helpers import Calls, assert_as_good_as_eager, assert_gradients

pytest.importorskip("diffusers")


@pytest.mark.parametrize("backend", ["flash", "flash_varlen"])
def test_flux(calls: Calls, backend: str) -> None:
    from diffusers import FluxTransformer2DModel

    def made() -> Any:
        return FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        )

    flash, eager, exact = made().bfloat16(), made().bfloat16(), made()
    for model in (eager, exact):
        model.load_state_dict(flash.state_dict())
        model.set_attention_backend("_native_math")
    flash.set_attention_backend(backend)

    image, text = torch.randn(2, 16, 4), torch.randn(2, 5, 32)
    pooled, time = torch.randn(2, 32), torch.tensor([0.3, 0.7])
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1)
    image_ids = torch.nn.functional.pad(places.reshape(16, 2), (1, 0))
    out = [
        model(
            hidden_states=image.to(model.dtype),
            encoder_hidden_states=text.to(model.dtype),
            pooled_projections=pooled.to(model.dtype),
            timestep=time.to(model.dtype),
            img_ids=image_ids,
            txt_ids=torch.zeros(5, 3),
        ).sample
        for model in (flash, eager, exact)
    ]
    assert_as_good_as_eager(*out)
    direction = torch.randn_like(out[-1])
    for found in out:
        found.backward(direction.to(found.dtype))
    assert_gradients(flash, eager, exact)
    assert calls == ["forward"] * 2 + ["backward"] * 2
