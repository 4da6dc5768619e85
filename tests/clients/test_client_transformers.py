"""transformers' models with flash_attention_2 against their own eager attention."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from clients.client_helpers import SMALL, Calls, assert_as_good_as_eager, assert_gradients
from flash_attn import adapters

# Not imported yet: it looks for flash-attn's metadata then, which test_transformers.py may write.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

HEADDIM = {"head_dim": 16}
WINDOW = {"sliding_window": 8}
# All experts: which ones are chosen is a decision that rounding would flip.
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "dropout": 0.0}
NO_DROPOUT |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}

CAUSAL: dict[str, dict[str, Any]] = {
    "cohere": {},
    "falcon": NO_DROPOUT | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": HEADDIM,
    "gemma2": HEADDIM | WINDOW | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": HEADDIM | WINDOW | {"query_pre_attn_scalar": 16},
    "glm": HEADDIM,
    "gpt2": NO_DROPOUT,
    "gpt_neox": NO_DROPOUT,
    "gptj": NO_DROPOUT | {"rotary_dim": 8},
    "granite": {},
    "llama": HEADDIM,
    "llama4_text": HEADDIM | EXPERTS | {"intermediate_size_mlp": 96, "attention_chunk_size": 8},
    "mistral": HEADDIM | WINDOW,
    "mixtral": HEADDIM | EXPERTS,
    "olmo": {},
    "olmo2": {},
    "opt": NO_DROPOUT | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": NO_DROPOUT,
    "phi3": {},
    "qwen2": {},
    "qwen3": HEADDIM,
    "smollm3": {},
    "stablelm": NO_DROPOUT,
    "starcoder2": NO_DROPOUT | WINDOW,
}

Models = tuple[Any, Any, Any]


@pytest.fixture(params=["flash_attention_2", "adapter"])
def attention(request: pytest.FixtureRequest, transformers: Any) -> str:
    """Both ways to this library: transformers' own, and ``flash_attn.adapters``."""
    if request.param == "adapter":
        return adapters.register_with_transformers()
    return str(request.param)


def three(config: Any, auto: Any, attention: str) -> Models:
    """One random model three times: on this library and eager in bfloat16, eager in float32."""

    def made(attention: str, dtype: torch.dtype) -> Any:
        return auto.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=dtype)

    flash = made(attention, torch.bfloat16)
    eager, exact = made("eager", torch.bfloat16), made("eager", torch.float32)
    eager.load_state_dict(flash.state_dict())
    exact.load_state_dict(flash.state_dict())
    return flash.eval(), eager.eval(), exact.eval()


def causal(transformers: Any, name: str, attention: str) -> Models:
    if attention != "flash_attention_2" and name in ("falcon", "gptj"):
        pytest.skip("its attention is one of a fixed table of classes")
    if attention == "flash_attention_2" and name == "llama4_text":
        pytest.skip("transformers has no chunks there")
    config = transformers.AutoConfig.for_model(name, **(SMALL | CAUSAL[name]))
    return three(config, transformers.AutoModelForCausalLM, attention)


def logits(models: Models, seen: Tensor | None = None, **inputs: Any) -> list[Tensor]:
    found = [model(**inputs).logits for model in models]
    return found if seen is None else [x[seen] for x in found]


def text(batch: int = 2, seqlen: int = 21) -> Tensor:
    return torch.randint(2, SMALL["vocab_size"], (batch, seqlen))


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_model(transformers: Any, calls: Calls, attention: str, name: str) -> None:
    """Logits and gradients of whole sequences; logits of sequences padded on the left and right."""
    models = causal(transformers, name, attention)
    ids = text()
    found = logits(models, input_ids=ids)
    assert_as_good_as_eager(*found)
    direction = torch.randn_like(found[-1])
    for x in found:
        x.backward(direction.to(x.dtype))
    assert_gradients(*models)
    assert calls.count("forward") == calls.count("backward") == SMALL["num_hidden_layers"]

    for hidden in (slice(0, 6), slice(15, None)):
        mask = torch.ones_like(ids)
        mask[1, hidden] = 0
        with torch.no_grad():
            padded = logits(models, mask.bool(), input_ids=ids * mask, attention_mask=mask)
        assert_as_good_as_eager(*padded)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "qwen3", "phi3"])
def test_packed(
    transformers: Any, calls: Calls, attention: str, name: str, use_cache: bool
) -> None:
    """Sequences joined by DataCollatorWithFlattening: logits and gradients of each alone."""
    models = causal(transformers, name, attention)
    flash, eager, exact = models
    lengths = (7, 1, 13)
    rows = [{"input_ids": text(1, n)[0].tolist()} for n in lengths]
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt")
    packed = collator(rows)
    assert packed["position_ids"].shape == (1, 21)
    given = {name: packed[name] for name in ("input_ids", "position_ids")}
    together = flash(**given, use_cache=use_cache).logits[0]
    alone = [
        torch.cat([model(input_ids=torch.tensor([x["input_ids"]])).logits[0] for x in rows])
        for model in (eager, exact)
    ]
    assert_as_good_as_eager(together, *alone)
    direction = torch.randn_like(alone[-1])
    for x in (together, *alone):
        x.backward(direction.to(x.dtype))
    assert_gradients(*models)
    # One call a layer: the sequences were not padded apart.
    assert calls.count("forward") == SMALL["num_hidden_layers"]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi3"])
@torch.no_grad()
def test_generate(transformers: Any, calls: Calls, attention: str, name: str, cache: str) -> None:
    """Logits of each step, with a padded prompt, are those of one pass over the finished text."""
    models = causal(transformers, name, attention)
    prompt = text(2, 12)
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    made = models[0].generate(
        prompt * mask,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        cache_implementation=cache,
        disable_compile=True,
    )
    assert calls.count("forward") == 6 * SMALL["num_hidden_layers"]
    mask = torch.cat([mask, mask.new_ones(2, 6)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    more = {"attention_mask": mask, "position_ids": positions}
    whole = [x[:, 11:-1] for x in logits(models[1:], input_ids=made.sequences, **more)]
    assert_as_good_as_eager(torch.stack(made.logits, 1), *whole)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
@torch.no_grad()
def test_continuous_batching(transformers: Any, calls: Calls, name: str) -> None:
    """Requests that share pages and batches get the tokens that each gets alone."""
    model = causal(transformers, name, "flash_attention_2")[0]
    prompts = [text(1, n)[0].tolist() for n in (5, 17, 9)]
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    answers = model.generate_batch(prompts, config, progress_bar=False)
    assert len(answers) == len(prompts)
    together = [answers[x].generated_tokens for x in sorted(answers)]
    assert len(calls) > 0
    for prompt, tokens in zip(prompts, together, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert tokens == alone[0, len(prompt) :].tolist()


def test_modernbert(transformers: Any, calls: Calls, attention: str) -> None:
    """Bidirectional, with a sliding window, on padded sequences."""
    more = {
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    more |= {"embedding_dropout": 0.0, "mlp_dropout": 0.0, "eos_token_id": 2}
    config = transformers.ModernBertConfig(**(SMALL | more))
    models = three(config, transformers.AutoModelForMaskedLM, attention)
    ids = text()
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    found = logits(models, mask.bool(), input_ids=ids * mask, attention_mask=mask)
    assert_as_good_as_eager(*found)
    direction = torch.randn_like(found[-1])
    for x in found:
        x.backward(direction.to(x.dtype))
    assert_gradients(*models)
    assert calls.count("backward") == SMALL["num_hidden_layers"]


def test_whisper(transformers: Any, calls: Calls, attention: str) -> None:
    """An encoder, a causal decoder, and attention from one to the other."""
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=8,
        max_source_positions=24,
        max_target_positions=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    models = three(config, transformers.AutoModelForSpeechSeq2Seq, attention)
    sound, ids = torch.randn(2, 8, 48), text(2, 9)
    found = [x(input_features=sound.to(x.dtype), decoder_input_ids=ids).logits for x in models]
    assert_as_good_as_eager(*found)
    direction = torch.randn_like(found[-1])
    for x in found:
        x.backward(direction.to(x.dtype))
    assert_gradients(*models)
    assert calls.count("backward") == 3


def test_vit(transformers: Any, calls: Calls, attention: str) -> None:
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    models = three(config, transformers.AutoModelForImageClassification, attention)
    image = torch.randn(2, 3, 32, 32)
    found = [model(pixel_values=image.to(model.dtype)).logits for model in models]
    assert_as_good_as_eager(*found)
    direction = torch.randn_like(found[-1])
    for x in found:
        x.backward(direction.to(x.dtype))
    assert_gradients(*models)
    assert calls.count("backward") == 2
