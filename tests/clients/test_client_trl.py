"""TRL's SFTTrainer: two steps, with packing and with padding_free."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.client_helpers import DEVICE, Calls, assert_as_good_as_eager

for client in ("trl", "datasets", "transformers", "tokenizers"):
    pytest.importorskip(client)

LENGTHS = (9, 17, 5, 12)


@pytest.fixture
def tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w3"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


@pytest.mark.parametrize("way", ["packing", "padding_free"])
def test_sft(transformers: Any, calls: Calls, tokenizer: Any, tmp_path: Path, way: str) -> None:
    """The first loss is that of the sequences alone in eager attention; the next is lower."""
    import trl
    from datasets import Dataset

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )

    def made(attention: str, dtype: torch.dtype) -> Any:
        return transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, dtype=dtype
        )

    flash = made("flash_attention_2", torch.bfloat16)
    eager, exact = made("eager", torch.bfloat16), made("eager", torch.float32)
    for model in (eager, exact):
        model.load_state_dict(flash.state_dict())
    rows = [torch.randint(4, 64, (n,)) for n in LENGTHS]

    def mean_loss(model: Any) -> torch.Tensor:
        losses = [
            model(input_ids=x[None], labels=x[None]).loss.float() * (len(x) - 1) for x in rows
        ]
        return torch.stack(losses).sum() / sum(n - 1 for n in LENGTHS)

    with torch.no_grad():
        expected = [mean_loss(model) for model in (eager, exact)]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=1 if way == "packing" else len(LENGTHS),
        max_length=sum(LENGTHS) if way == "packing" else None,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=DEVICE == "cpu",
        bf16=False,
        lr_scheduler_type="constant",
        **{way: True},
    )
    trainer = trl.SFTTrainer(
        model=flash,
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": x.tolist()} for x in rows]),
        processing_class=tokenizer,
    )
    with torch.device("cpu"):  # where a loader shuffles
        trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    assert_as_good_as_eager(torch.tensor(losses[0]), *expected)
    assert losses[1] < losses[0]
    steps, layers = 2, 2
    assert calls.count("backward") == steps * layers
    assert calls.count("forward") == 2 * steps * layers  # TRL recomputes activations
