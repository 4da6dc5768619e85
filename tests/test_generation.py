"""flash_attn.utils.generation: a small model of MHA layers that generates."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from flash_attn.modules.mha import MHA
from flash_attn.utils.generation import GenerationMixin, InferenceParams, sample

VOCABULARY, PADDED = 50, 64


class Model(nn.Module, GenerationMixin):
    """As clients have it: layers that share inference_params, logits of the last tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(PADDED, 32)
        self.layers = nn.ModuleList(
            MHA(32, 4, causal=True, rotary_emb_dim=8, layer_idx=i) for i in range(2)
        )
        self.head = nn.Linear(32, PADDED)
        self.calls: list[tuple[int, Tensor | None]] = []

    def forward(self, input_ids, position_ids=None, inference_params=None, num_last_tokens=0):
        self.calls.append((input_ids.shape[1], position_ids))
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x, inference_params=inference_params)
        return SimpleNamespace(logits=self.head(x[:, -num_last_tokens:]))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def prompt(batch: int = 2, seqlen: int = 5) -> Tensor:
    return torch.randint(VOCABULARY, (batch, seqlen), generator=torch.manual_seed(1))


def recomputed(model: Model, tokens: Tensor, max_length: int) -> tuple[Tensor, list[Tensor]]:
    """Without a cache, each token from all before it."""
    scores = []
    while tokens.shape[1] < max_length:
        scores.append(model(tokens, num_last_tokens=1).logits[:, 0, :VOCABULARY])
        tokens = torch.cat([tokens, scores[-1].argmax(-1, keepdim=True)], dim=1)
    return tokens, scores


def test_greedy(model):
    expected, scores = recomputed(model, prompt(), 12)
    model.calls.clear()
    found = model.generate(
        prompt(), 12, vocab_size=VOCABULARY, return_dict_in_generate=True, output_scores=True
    )
    assert torch.equal(found.sequences, expected)
    torch.testing.assert_close(list(found.scores), scores)
    assert [n for n, _ in model.calls] == [5, *[1] * 6]  # the prompt, and each token but the last
    assert model.calls[0][1] is None
    assert [p.tolist() for _, p in model.calls[1:]] == [[[i]] * 2 for i in range(5, 11)]
    assert torch.equal(model.generate(prompt(), 12, vocab_size=VOCABULARY), expected)
    without = model.generate(prompt(), 12, return_dict_in_generate=True)
    assert without.scores is None
    assert torch.equal(model.generate(prompt(), 5), prompt())


def test_end_of_sequence(model):
    """A sequence that has ended goes on with that token, and others with theirs."""
    expected, _ = recomputed(model, prompt(), 12)
    eos = int(expected[0, 7])
    found = model.generate(prompt(), 12, vocab_size=VOCABULARY, eos_token_id=eos)
    for row, tokens in zip(found.tolist(), expected.tolist(), strict=True):
        new = tokens[5:]
        end = 5 + new.index(eos) + 1 if eos in new else 12
        assert row[:end] == tokens[:end] and set(row[end:]) <= {eos}
    alone = model.generate(prompt()[:1], 12, vocab_size=VOCABULARY, eos_token_id=eos)
    first = expected[0, 5:].tolist().index(eos)
    assert torch.equal(alone, expected[:1, : 5 + first + 1])


def test_teacher(model):
    teacher = torch.randint(VOCABULARY, (2, 9))
    found = model.generate(prompt(), 12, teacher_outputs=teacher, vocab_size=VOCABULARY)
    assert torch.equal(found[:, :5], prompt()) and torch.equal(found[:, 5:9], teacher[:, 5:])
    assert torch.equal(found, recomputed(model, found[:, :9], 12)[0])
    eos = int(teacher[0, 5])  # also behind the end of a sequence
    stopped = model.generate(prompt(), 9, teacher_outputs=teacher, eos_token_id=eos)
    assert torch.equal(stopped, found[:, : stopped.shape[1]])
    assert stopped.shape[1] == 9 or bool((stopped == eos).any(1).all())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_k": 0, "top_p": 0.5}, {0, 1}),  # 0.4 and 0.3 are the fewest that reach it
        ({"top_k": 0, "top_p": 0.3}, {0}),
        ({"top_k": 0, "top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_k": 1, "temperature": 9.0}, {0}),
        ({"top_k": 1, "temperature": 0.0}, {0}),
        ({"top_k": 0, "temperature": 0.01}, {0}),
    ],
)
def test_sample(options, kept):
    torch.manual_seed(0)
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    likely = logits.argsort(descending=True)
    drawn = sample(logits.expand(2000, -1), **options)
    assert drawn.shape == (2000,) and {*drawn.tolist()} == {int(likely[i]) for i in kept}


def test_sample_frequencies():
    torch.manual_seed(0)
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    drawn = sample(logits.expand(20000, -1), top_k=3, temperature=0.5)
    expected = torch.tensor([0.0, 0.16, 0.04, 0.09]) / 0.29
    found = drawn.bincount(minlength=4) / 20000
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def test_shared_state():
    state = InferenceParams(8, 2, 3, lengths_per_sample=torch.tensor([3, 3]))
    state.reset(16, 4)
    assert (state.max_seqlen, state.max_batch_size, state.seqlen_offset) == (16, 4, 0)
    assert not state.lengths_per_sample.any()
    assert InferenceParams(8, 2).key_value_memory_dict is not state.key_value_memory_dict


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("input_ids", lambda m: m.generate(prompt()[0], 8)),
        ("input_ids", lambda m: m.generate(prompt()[:, :0], 8)),
        ("max_length", lambda m: m.generate(prompt(), 4)),
        ("top_k", lambda m: m.generate(prompt(), 8, top_k=-1)),
        ("top_p", lambda m: m.generate(prompt(), 8, top_k=0, top_p=1.5)),
        ("temperature", lambda m: m.generate(prompt(), 8, top_k=0, temperature=0.0)),
    ],
)
def test_bad_arguments(model, name, call):
    with pytest.raises(ValueError, match=name):
        call(model)


def test_keywords_of_upstream(model):
    expected = model.generate(prompt(), 8)
    defaults = {"cg": False, "enable_timing": False, "tensor_parallel": 1}
    assert torch.equal(model.generate(prompt(), 8, **defaults), expected)
    for name, given in (("cg", True), ("enable_timing", True), ("tensor_parallel", 2)):
        with pytest.raises(NotImplementedError, match=f"{name} must be"):
            model.generate(prompt(), 8, **{name: given})
