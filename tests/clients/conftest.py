"""Fixtures of the tests of clients: seeds, counted calls, transformers without its GPU gate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clients.client_helpers import DEVICE, Calls

# No client may look for weights: every model here is random.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def seeded_on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The module, told that a GPU is there only where it decides on flash_attention_2."""
    module = pytest.importorskip("transformers")
    if DEVICE != "cpu":
        return module
    from transformers import modeling_flash_attention_utils
    from transformers.utils import import_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
        import_utils.is_flash_attn_2_available.cache_clear()
        # The answers are kept, one for each way of asking.
        assert import_utils.is_flash_attn_2_available()
        for fallback in (False, True):
            assert import_utils.is_flash_attn_2_available(kernels_fallback_ok=fallback)
    gates = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    gates["supported_devices"] = ((lambda: True, "cpu"),)
    return module


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every call of attention: no test passes on a client that quietly took another path."""
    from flash_attn import _ops
    from flash_attn._backends import cuda

    # Calls like an earlier one would be launched again without being counted.
    monkeypatch.setattr(cuda, "call_key", lambda *arguments: None)
    made = Calls()
    for name in ("forward", "backward"):
        original = getattr(_ops, f"_run_{name}")

        def counted(*args: Any, original: Any = original, name: str = name, **more: Any) -> Any:
            made.append(name)
            return original(*args, **more)

        monkeypatch.setattr(_ops, f"_run_{name}", counted)
    return made
