"""flash_attn.adapters: errors, and what is visible against masks of single scores."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from clients.client_helpers import DEVICE, SMALL, Calls, assert_as_good_as_eager
from flash_attn import _transformers, adapters

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

BATCH, WINDOW = 3, 4
BIDIRECTIONAL = ("bidirectional", "bidirectional window")
Made = Callable[..., Any]


def visible(mask: Tensor | None, rules: _transformers._Rules, q_len: int, kv_len: int) -> Tensor:
    """Which keys each query sees, (batch, q_len, kv_len) bool, by what ``mask`` returned."""
    if mask is not None and mask.dtype == torch.bool:
        return mask.expand(BATCH, 1, q_len, kv_len)[:, 0]
    if mask is None or mask.shape[1] == 1:
        of_row = [[kv_len]] * BATCH if mask is None else mask[:, 0, 0].tolist()
        documents = [
            ((i * q_len, i * kv_len + sum(first)), ((i + 1) * q_len, i * kv_len + count))
            for i, (count, *first) in enumerate(of_row)
        ]
    else:
        documents = list(pairwise(mask[0, :, 0].tolist()))
    seen = torch.zeros(BATCH * q_len, BATCH * kv_len, dtype=torch.bool)
    for (q_begin, k_begin), (q_end, k_end) in documents:
        queries, keys = torch.arange(q_end - q_begin), torch.arange(k_end - k_begin)
        apart = queries[:, None] + len(keys) - len(queries) - keys
        part = apart >= 0 if rules.causal else torch.ones_like(apart, dtype=torch.bool)
        if rules.window:
            part &= apart < WINDOW if rules.causal else apart.abs() <= WINDOW
        seen[q_begin:q_end, k_begin:k_end] = part
    return torch.stack([x.chunk(BATCH, 1)[i] for i, x in enumerate(seen.chunk(BATCH))])


def padding_of(kind: str, total: int, random: Random) -> Tensor | None:
    """(batch, total) bool, false at padding; the first row has none."""
    if kind == "none":
        return None
    mask = torch.ones(BATCH, total, dtype=torch.bool)
    for row in mask[1:]:
        some = random.randint(1, total - 1)
        if kind in ("left", "both"):
            row[:some] = False
        if kind in ("right", "both"):
            row[-random.randint(1, total - 1) :] = False
        if kind == "hole":
            row[random.randint(1, total - 2)] = False
        if kind == "row":
            row[:] = False
    return mask


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("cache", ["none", "dynamic", "static", "static, in a tensor"])
@pytest.mark.parametrize("padding", ["none", "whole", "left", "right", "both", "hole", "row"])
@pytest.mark.parametrize("kind", ["causal", "window", "chunks", *BIDIRECTIONAL])
def test_mask(transformers: Any, kind: str, padding: str, cache: str, grad: bool) -> None:
    """Tokens that are no padding see the same keys as by a mask of single scores."""
    from transformers import masking_utils

    functions: dict[str, Callable[..., Any]] = {
        "causal": masking_utils.causal_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(WINDOW),
        "bidirectional": masking_utils.bidirectional_mask_function,
        "bidirectional window": masking_utils.sliding_window_bidirectional_mask_function(WINDOW),
    }
    if cache != "none" and kind in BIDIRECTIONAL:
        pytest.skip("only what is causal has a cache")
    random = Random(f"{kind} {padding} {cache}")
    for _ in range(20):
        past = 0 if cache == "none" else random.randint(0, 7)
        q_len = random.randint(3, 9) if past < 2 else random.randint(1, 9)
        total = past + q_len
        seen = padding_of(padding, total, random)
        if kind == "chunks":
            left = torch.zeros(BATCH) if seen is None else (seen.cumsum(1) == 0).sum(1)
            functions[kind] = masking_utils.chunked_causal_mask_function(WINDOW, left.long())
        rules = _transformers._rules(functions[kind])
        arguments: dict[str, Any] = {
            "batch_size": BATCH,
            "q_length": q_len,
            "kv_length": total + (random.randint(1, 5) if "static" in cache else 0),
            "q_offset": torch.tensor(past) if "tensor" in cache else past,
            "mask_function": functions[kind],
            "attention_mask": seen,
            "device": DEVICE,
        }
        with torch.set_grad_enabled(grad):
            found = _transformers.mask(**arguments)
        scores = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
        assert scores is not None
        of_scores = scores.expand(BATCH, 1, q_len, -1)[:, 0]
        same = visible(found, rules, *of_scores.shape[1:]) == of_scores
        real = torch.ones(BATCH, q_len, dtype=torch.bool) if seen is None else seen[:, past:]
        assert same[real].all()
        is_chunked = kind == "chunks" and arguments["kv_length"] > WINDOW
        is_first = past == 0 and "static" not in cache
        if (padding in ("none", "whole", "left", "row") or (padding != "hole" and past == 0)) and (
            not is_chunked or is_first or q_len == 1
        ):
            assert found is None or found.dtype == torch.int32, "without single scores"
        if padding in ("none", "whole") and "static" not in cache and not is_chunked:
            assert found is None


def test_packed_mask(transformers: Any) -> None:
    """Documents of several rows, as found where there is no cache."""
    from transformers import masking_utils

    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 2, 2, 2]])
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    window = masking_utils.sliding_window_causal_mask_function(WINDOW)
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # transformers 5.23
        window = masking_utils.remap_positions_for_packed_sequence(window, positions)
    of_documents = masking_utils.packed_sequence_mask_function(documents)
    function = masking_utils.and_masks(window, of_documents)
    arguments = {"batch_size": BATCH, "q_length": 5, "kv_length": 5, "device": DEVICE}
    arguments["mask_function"] = function
    found = _transformers.mask(**arguments)
    assert found is not None and found[0, :, 0, 0].tolist() == [0, 2, 5, 10, 11, 12, 15]
    scores = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert (visible(found, _transformers._rules(function), 5, 5) == scores[:, 0]).all()
    arguments["attention_mask"] = torch.arange(5).expand(BATCH, 5) > 0
    padded = _transformers.mask(**arguments)
    assert padded is not None and padded.dtype == torch.bool


def test_positions_are_looked_at_once() -> None:
    """By the first layer of a step, of a tensor that stays as it is."""
    layers = [torch.nn.Module() for _ in range(3)]
    look = _transformers._of_positions
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    found = look(positions, layers[0])
    assert found is not None and found[0, :, 0, 0].tolist() == [0, 3, 5]
    assert all(look(positions, layer) is found for layer in layers[1:])
    positions += 1
    assert look(positions, layers[1]) is None
    positions.data[0, 2] = 0  # which autograd does not count
    assert look(positions, layers[1]) is not None
    with torch.inference_mode():
        positions = torch.tensor([[0, 1, 2]])
        assert look(positions, layers[0]) is None
        positions[0, 2] = 0
        assert look(positions, layers[1]) is not None


@pytest.fixture
def llama(transformers: Any) -> Made:
    """Make models of one configuration and one set of weights."""
    auto = transformers.AutoModelForCausalLM
    weights = auto.from_config(transformers.LlamaConfig(**SMALL)).state_dict()

    def made(attention: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
        config_of = transformers.LlamaConfig(**SMALL | more)
        model = auto.from_config(config_of, attn_implementation=attention, dtype=dtype)
        model.load_state_dict(weights)
        return model.eval()

    return made


def test_hole(llama: Made, calls: Calls) -> None:
    """Keys with padding between them: PyTorch's attention on a mask, and its gradients."""
    name = adapters.register_with_transformers()
    models = [llama(name), llama("eager"), llama("eager", torch.float32)]
    ids, mask = torch.randint(64, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 3:5] = 0
    found = [x(input_ids=ids, attention_mask=mask).logits[mask.bool()] for x in models]
    assert_as_good_as_eager(*found)
    assert not calls


def test_float32_runs_in_the_dtype_of_autocast(llama: Made, calls: Calls) -> None:
    name = adapters.register_with_transformers()
    ids = torch.randint(64, (2, 9))
    models = [llama(name, torch.float32), llama("eager"), llama("eager", torch.float32)]
    with torch.autocast(ids.device.type, torch.bfloat16):
        first = models[0](input_ids=ids).logits
    assert_as_good_as_eager(first, *(x(input_ids=ids).logits for x in models[1:]))
    assert len(calls) == 2


def test_float32_without_linear_layers() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    layer = torch.nn.Module()
    layer.config = SimpleNamespace()
    out, _ = _transformers.attention(layer, q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("name", ["bloom", "mpt", "trocr", "clap_text_model"])
def test_models_with_code_of_their_own(transformers: Any, name: str) -> None:
    """They take no mask of ours, and without one would not be causal, or would be."""
    from transformers.models.clap.modeling_clap import ClapTextModel

    attention = adapters.register_with_transformers()
    sizes = {"vocab_size": 64, "hidden_size": 64, "n_layers": 1, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(name, **sizes)
    config.num_hidden_layers = 1
    auto = transformers.AutoModelForCausalLM
    make = ClapTextModel._from_config if name.startswith("clap") else auto.from_config
    model = make(config, attn_implementation=attention)
    with pytest.raises(ValueError, match="must be 'eager' or 'sdpa' of models that have code of"):
        model(input_ids=torch.randint(2, 64, (2, 9)))


def test_models_that_read_masks(transformers: Any) -> None:
    """They get masks of single scores: by Siglip 2, whose pooling is over patches that are seen."""
    config = transformers.Siglip2VisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_patches=16,
        patch_size=8,
    )
    pixels, mask = torch.randn(2, 16, 3 * 8 * 8), torch.ones(2, 16, dtype=torch.int64)
    mask[1, 12:] = 0
    shapes = torch.tensor([[4, 4], [3, 4]])
    model = transformers.Siglip2VisionModel._from_config(config).eval()
    found = []
    for attention in (adapters.register_with_transformers(), "sdpa"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            found.append(model(pixels, mask, shapes).pooler_output)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("causal", [True, False])
def test_mask_says_what_is_causal(transformers: Any, causal: bool) -> None:
    """Of a model whose layers do not, or say the contrary."""
    from transformers import masking_utils

    function = "causal_mask_function" if causal else "bidirectional_mask_function"
    seen = torch.ones(2, 7, dtype=torch.bool)
    seen[1, :3] = False
    arguments: dict[str, Any] = {"batch_size": 2, "q_length": 7, "kv_length": 7, "device": DEVICE}
    arguments |= {
        "mask_function": getattr(masking_utils, function),
        "attention_mask": seen,
    }
    q, k, v = torch.randn(3, 2, 2, 7, 16)
    layer = torch.nn.Module()
    layer.config, layer.is_causal = SimpleNamespace(), not causal
    out, _ = _transformers.attention(layer, q, k, v, _transformers.mask(**arguments))
    scores = masking_utils.sdpa_mask(**arguments)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scores)
    torch.testing.assert_close(out[seen], expected.transpose(1, 2)[seen])


@pytest.mark.parametrize("of_layer", [True, False])
@pytest.mark.parametrize("given", [True, False, None])
def test_call_says_what_is_causal(of_layer: bool, given: bool | None) -> None:
    """The layer does where the call does not."""
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    layer = torch.nn.Module()
    layer.config, layer.is_causal = SimpleNamespace(), of_layer
    out, _ = _transformers.attention(layer, q, k, v, is_causal=given)
    causal = of_layer if given is None else given
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_positions_of_queries_tell_nothing_of_other_keys() -> None:
    q, (k, v) = torch.randn(1, 2, 5, 16), torch.randn(2, 1, 2, 7, 16)
    layer = torch.nn.Module()
    layer.config = SimpleNamespace()
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    out, _ = _transformers.attention(layer, q, k, v, is_causal=False, position_ids=positions)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_bidirectional_window_of_a_padded_cache(transformers: Any) -> None:
    """Queries that are not those of all keys: single scores."""
    from transformers import masking_utils

    function = masking_utils.sliding_window_bidirectional_mask_function(WINDOW)
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 3, "kv_length": 7, "q_offset": 4}
    arguments |= {"mask_function": function, "device": DEVICE}
    arguments["attention_mask"] = torch.arange(7)[None] > 0
    mask = _transformers.mask(**arguments)
    scores = masking_utils.sdpa_mask(**arguments, allow_is_bidirectional_skip=False)
    assert mask is not None and mask.dtype == torch.bool and torch.equal(mask, scores)


def test_mask_function_of_ones_own(transformers: Any) -> None:
    """Which may be any callable, or bound one side of what is not causal: single scores."""
    from transformers import masking_utils

    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 3, "kv_length": 3, "device": DEVICE}

    def earlier(batch: Any, head: Any, query: Any, key: Any, by: int) -> Any:
        return key <= query - by

    mask = _transformers.mask(**arguments, mask_function=partial(earlier, by=1))
    assert mask is not None and mask.dtype == torch.bool
    assert mask[0, 0].tolist() == torch.ones(3, 3, dtype=torch.bool).tril(-1).tolist()
    one_sided = masking_utils.and_masks(
        masking_utils.sliding_window_overlay(2), masking_utils.bidirectional_mask_function
    )
    mask = _transformers.mask(**arguments, mask_function=one_sided)
    assert mask is not None and mask[0, 0].tolist() == torch.ones(3, 3).triu(-1).bool().tolist()


@pytest.mark.parametrize("causal", [True, False])
def test_bias_on_a_cache(causal: bool) -> None:
    """The last query is aligned with the last key, where PyTorch aligns the first ones."""
    q, k, v = torch.randn(1, 2, 4, 16), *torch.randn(2, 1, 2, 9, 16)
    layer = torch.nn.Module()
    layer.config, layer.is_causal = SimpleNamespace(), causal
    bias = torch.randn(1, 2, 4, 9)
    out, _ = _transformers.attention(layer, q, k, v, position_bias=bias)
    if causal:
        future = torch.ones(4, 9, dtype=torch.bool).triu(6)
        bias = bias.masked_fill(future, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_errors(llama: Made) -> None:
    with pytest.raises(ValueError, match="name must not have 'flash' in it, got 'flashy'"):
        adapters.register_with_transformers("flashy")
    name = adapters.register_with_transformers()
    ids, mask = torch.randint(64, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    model = llama(name, attention_dropout=0.5).train()
    with pytest.raises(ValueError, match="dropout must be 0 with padding"), torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    model(input_ids=ids, attention_mask=mask).logits.sum().backward()

    layer = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    scores = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    for more in ({"softcap": 3.0}, {"s_aux": torch.zeros(2)}):
        with pytest.raises(ValueError, match="softcap and s_aux must be None"):
            _transformers.attention(layer, q, k, v, scores, **more)
    with pytest.raises(ValueError, match="of layers that select keys .*, as Module does"):
        _transformers.attention(layer, q, k, v, indices=torch.zeros(1))
    with pytest.raises(RuntimeError, match="bool"):  # PyTorch's
        _transformers.attention(layer, q, k, v, scores.int())
    keys = torch.full((1, 1, 1, 1), 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="position_bias must be None"):
        _transformers.attention(layer, q, k, v, keys, position_bias=torch.zeros(1, 2, 5, 5))
