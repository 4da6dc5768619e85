"""Hugging Face transformers runs on this library: "flash_attention_2", and the adapter."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import is_installed
from torch import Tensor

from flash_attn import adapters

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCABULARY = 128


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module, which looks for flash-attn's metadata, once, when it is imported.

    Where the library is used from the source tree, setuptools writes that metadata here.
    """
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    if not is_installed():
        metadata = tmp_path_factory.mktemp("metadata")
        command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(metadata)]
        root = Path(__file__).parent.parent
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        sys.path.append(str(metadata))
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    assert transformers.utils.is_flash_attn_2_available()
    return transformers


@pytest.fixture(params=["flash_attention_2", "adapter"])
def models(transformers: ModuleType, request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """One small random Llama three times: eager in float32, eager and flash in bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.05,
        pad_token_id=0,
        eos_token_id=None,
    )

    def model(attention: str, dtype: torch.dtype) -> Any:
        made = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, dtype=dtype
        )
        return made.to(DEVICE).eval()

    name = request.param
    if name == "adapter":
        adapters.register_with_transformers(name)
    flash, eager = (model(x, torch.bfloat16) for x in (name, "eager"))
    exact = model("eager", torch.float32)
    eager.load_state_dict(flash.state_dict())
    exact.load_state_dict(flash.state_dict())
    assert flash.config._attn_implementation == name
    return exact, eager, flash


@pytest.fixture(params=[False, True], ids=["whole", "padded"])
def batch(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    """Three prompts, all 37 tokens long or padded on the left, as generate() wants them."""
    ids = torch.randint(1, VOCABULARY, (3, 37), device=DEVICE)
    mask = torch.ones_like(ids)
    if request.param:
        mask[1, :20] = mask[2, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def assert_as_good_as_eager(flash: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Twice eager attention's own bfloat16 error, and the same direction."""
    error, eager_error = ((x.float() - exact).abs().max() for x in (flash, eager))
    assert error <= 2 * eager_error, f"error {error:.3g}, eager attention's {eager_error:.3g}"
    similarity = torch.cosine_similarity(flash.float().flatten(), exact.flatten(), dim=0)
    assert similarity >= 0.999


@torch.no_grad()
def test_logits(models, batch):
    seen = batch["attention_mask"].bool()
    exact, eager, flash = (model(**batch).logits[seen] for model in models)
    assert_as_good_as_eager(flash, eager, exact)


@pytest.mark.parametrize("cache", ["dynamic", "static", "compiled"])
@torch.no_grad()
def test_generate(models, batch, cache):
    """Each step's logits are those of one pass over the finished text."""
    exact, eager, flash = models
    if cache == "compiled" and flash.config._attn_implementation == "flash_attention_2":
        pytest.skip("its layers are not compiled as a whole")
    generated = flash.generate(
        **batch,
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        cache_implementation="dynamic" if cache == "dynamic" else "static",
        disable_compile=cache != "compiled",
    )
    assert generated.sequences.shape == (3, 57)
    steps = torch.stack(generated.logits, 1)
    text, prompt = generated.sequences, batch["attention_mask"]
    mask = torch.cat([prompt, prompt.new_ones(3, 20)], 1)
    one_pass = (model(text, attention_mask=mask).logits[:, 36:-1] for model in (eager, exact))
    assert_as_good_as_eager(steps, *one_pass)


def test_gradients(models, batch):
    """Training: the gradient of every parameter points where eager attention's does."""
    seen = batch["attention_mask"].bool()
    # No loss where padding would predict the first token: what padding attends to is not defined.
    labels = batch["input_ids"].masked_fill(~(seen & seen.roll(1, 1)), -100)
    for model in models:
        model.train()
        model(**batch, labels=labels).loss.backward()
    exact, eager, flash = (dict(model.named_parameters()) for model in models)
    for name in exact:
        assert_as_good_as_eager(flash[name].grad, eager[name].grad, exact[name].grad)


def test_generation_benchmark(transformers, tmp_path, monkeypatch):
    """Of a tiny model: tokens of each implementation, with each cache."""
    from benchmarks import generation

    llama = generation.llama
    monkeypatch.setattr(generation, "llama", lambda _, longest: llama(False, longest).to(DEVICE))
    sizes = ["--batch", "2", "--prompt", "40", "--new", "3", "--rounds", "1"]
    generation.main([*sizes, "--folder", str(tmp_path)])
    rows = json.loads((tmp_path / "generation.json").read_text())["rows"]
    assert [row["cache"] for row in rows] == ["dynamic", "static", "compiled"]
    for row in rows:
        wanted = {"adapter", "sdpa"}
        if row["cache"] != "compiled":
            wanted.add("flash_attention_2")
        assert set(row["tokens_per_s"]) == wanted, row["skipped"]
        assert all(x > 0 for x in row["tokens_per_s"].values())
