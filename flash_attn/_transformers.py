"""What transformers calls: a mask once a step, an attention in each layer.

See ``flash_attn.adapters.register_with_transformers``.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)


def check_name(name: str) -> None:
    """Raise ValueError if transformers would take the name for an implementation of its own."""
    if "flash" in name:
        raise ValueError(f"name must not have 'flash' in it, got {name!r}")


def options(
    module: torch.nn.Module,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    is_causal: bool | None,
    s_aux: Tensor | None,
) -> dict[str, Any]:
    """Return what a layer of transformers asks for, as arguments of ``flash_attn_func``."""
    return {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": getattr(module, "is_causal", True) if is_causal is None else is_causal,
        "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1,) * 2,
        "softcap": softcap or 0.0,
        "s_aux": s_aux,
    }


# ---- what is visible: once a step ----------------------------------------------------------------
#
# A model hands its mask on to all layers, and takes one of 4 dimensions as it is. So what is
# visible travels as an int32 tensor of 4 dimensions:
#
# - of a cache, (batch, 1, 1, 1 or 2): how many keys each row has; with padding, the first of them
# - of documents, (1, n + 1, 1, 2): where each begins, and the last ends, in all queries and keys
#
# Where nothing is causal, the third dimension is 2. (Layers say so too, but not all of them as
# their model makes its masks.) The window is the layer's. None leaves both to the layer. A bool is
# a mask of single scores.


class _SingleScoresError(Exception):
    """What is visible takes a mask of single scores."""


class _Step(NamedTuple):
    """What transformers tells of a step. Positions of keys begin at kv_offset."""

    batch: int
    q_length: int
    kv_length: int
    kv_offset: int
    keys: int | Tensor  # up to that of the last query
    device: Any
    may_be_none: bool  # what is visible: not where the step is compiled


class _Chunk(NamedTuple):
    """Tokens see those of their own chunk alone; the first begins behind the padding."""

    size: int
    left_padding: Tensor  # (batch,), tokens


class _Rules(NamedTuple):
    """What a mask function of transformers lets be seen."""

    causal: bool = False
    window: bool = False
    chunk: _Chunk | None = None
    documents: Tensor | None = None  # (batch, seqlen): of each token


class _Padding(NamedTuple):
    """Where the keys of each row begin and end, (batch,) int32."""

    begin: Tensor
    end: Tensor
    is_run: bool  # no padding is between them
    from_first: bool  # all rows have the first key
    to_last: bool


def _leaves(mask_function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the variables of each function whose intersection a mask function is."""
    if not inspect.isfunction(mask_function) or (
        mask_function.__module__ != "transformers.masking_utils"
    ):
        yield "", {}
        return
    name = mask_function.__qualname__.partition(".")[0]
    variables = dict(inspect.getclosurevars(mask_function).nonlocals)
    if name == "and_masks":
        for function in variables["mask_functions"]:
            yield from _leaves(function)
    elif name == "remap_positions_for_packed_sequence":  # in a document they ascend by 1
        yield from _leaves(variables["mask_function"])
    else:
        yield name, variables


def _rules(mask_function: Callable[..., Any]) -> _Rules:
    rules, names = _Rules(), set()
    for name, variables in _leaves(mask_function):
        names.add(name)
        if name == "causal_mask_function":
            rules = rules._replace(causal=True)
        elif name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            rules = rules._replace(window=True)
        elif name == "chunked_overlay":
            chunk = _Chunk(variables["chunk_size"], variables["left_padding"])
            rules = rules._replace(chunk=chunk)
        elif name == "packed_sequence_mask_function" and rules.documents is None:
            rules = rules._replace(documents=variables["packed_sequence_mask"])
        elif name != "bidirectional_mask_function":
            raise _SingleScoresError
    if "sliding_window_overlay" in names and not rules.causal:  # which bounds one side alone
        raise _SingleScoresError
    return rules


def asks_for_no_more_than_a_window(mask_function: Callable[..., Any]) -> bool:
    """Whether a mask is none, causal or a window; documents are those of the positions."""
    try:
        return _rules(mask_function).chunk is None
    except _SingleScoresError:
        return False


def _padding(seen: Tensor) -> _Padding:
    """Of (batch, keys) bool, false at padding. Waits for the GPU.

    Where all is padding, the keys of the row begin and end behind it.
    """
    count = seen.sum(1, dtype=torch.int32)
    begin = seen.to(torch.int8).argmax(1).to(torch.int32)
    begin = begin.masked_fill(count == 0, seen.shape[1])
    end, place = begin + count, torch.arange(seen.shape[1], device=seen.device)
    run = (place >= begin[:, None]) & (place < end[:, None])
    answers = [(run == seen).all(), (begin == 0).all(), (end == seen.shape[1]).all()]
    return _Padding(begin, end, *torch.stack(answers).tolist())


def _bounds(starts: Tensor, length: int) -> Tensor:
    """Where documents begin in all rows, from where they begin in each, and where the last ends."""
    rows = torch.arange(len(starts), dtype=torch.int32, device=starts.device)[:, None] * length
    return torch.nn.functional.pad((starts + rows).flatten(), (0, 1), value=len(starts) * length)


def _of_padded(
    padding: _Padding, q_length: int, kv_length: int, is_self: bool, chunk: int | None = None
) -> Tensor:
    """Documents of padding, and between them one of each row's keys, or one of each chunk of them.

    Its queries are those of the same tokens, and those of padding see nothing; or they are all.
    """
    begin, end = padding.begin, padding.end
    zero, last = torch.zeros_like(begin), torch.full_like(begin, q_length)
    if is_self:  # padding has a document for its queries and another for its keys
        chunks = range(0, q_length, chunk or q_length)
        keys = [torch.minimum(begin + i, end) for i in chunks]
        starts = [[zero, begin, *keys, end, last], [zero, zero, *keys, end, end]]
    else:
        starts = [[zero, zero, last], [zero, begin, end]]
    bounds = [
        _bounds(torch.stack(x, 1), n) for x, n in zip(starts, (q_length, kv_length), strict=True)
    ]
    return torch.stack(bounds, 1)[None, :, None]


def _of_packed(begins: Tensor) -> Tensor:
    """Of (batch, seqlen) bool, true where a document begins. Waits for the GPU."""
    bounds = torch.nn.functional.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=begins.numel())
    return bounds.to(torch.int32)[None, :, None, None].repeat(1, 1, 1, 2)


def _causal(step: _Step, seen: Tensor | None, chunk: _Chunk | None) -> Tensor | None:
    count, q_length, kv_length = step.keys, step.q_length, step.kv_length
    is_static = isinstance(count, Tensor) or count != kv_length  # a static cache has more keys
    is_first = q_length == kv_length and not is_static  # no token came before
    if chunk is not None and step.kv_offset + kv_length <= chunk.size:
        chunk = None
    padding = None
    if seen is not None and not (seen.all() & (count == seen.shape[1])):
        count = int(count)
        padding = _padding(torch.nn.functional.pad(seen, (0, count - seen.shape[1])))
        # Behind the last key come queries of padding alone, unless there were queries before.
        if not padding.is_run or not (padding.to_last or q_length == count):
            raise _SingleScoresError
    elif chunk is not None:
        zero = torch.zeros(step.batch, dtype=torch.int32, device=step.device)
        padding = _Padding(zero, zero + kv_length, is_run=True, from_first=True, to_last=True)
    elif step.may_be_none and not is_static:
        return None
    if padding is not None and chunk is not None and not is_first:
        if q_length > 1:
            raise _SingleScoresError
        last = step.kv_offset + count - 1
        first = last - (last - chunk.left_padding) % chunk.size - step.kv_offset
        begin = torch.maximum(padding.begin, first.to(torch.int32))
        padding = padding._replace(begin=begin, from_first=False)
    if padding is not None and not is_static:
        if torch.is_grad_enabled() or (is_first and (chunk is not None or not padding.to_last)):
            size = chunk.size if chunk is not None and is_first else None
            return _of_padded(padding, q_length, kv_length, is_first, size)
    counts = torch.empty(step.batch, dtype=torch.int32, device=step.device)
    counts[:] = count
    of_cache = [counts] if padding is None or padding.from_first else [counts, padding.begin]
    return torch.stack(of_cache).T[:, None, None]


def _bidirectional(step: _Step, seen: Tensor | None, has_window: bool) -> Tensor | None:
    if seen is None:
        return None
    seen = torch.nn.functional.pad(seen, (0, step.kv_length - seen.shape[1]))
    if seen.all():
        return None
    padding = _padding(seen)
    if not padding.is_run or (has_window and step.q_length != step.kv_length):
        raise _SingleScoresError
    # Without a window they may be queries of other tokens.
    return _of_padded(padding, step.q_length, step.kv_length, is_self=has_window)


def _subclasses(base: Any) -> Iterator[Any]:
    for found in base.__subclasses__():
        yield found
        yield from _subclasses(found)


@functools.cache
def _masks_of(config_class: type) -> str:
    """What its models do with a mask, as far as they say.

    "any": they hand it on. "scores": they may read it, so that it has to be one of single scores.
    "own": they call no attention that is registered, or need more of a mask than that.
    """
    from transformers import PreTrainedModel

    everyone = _subclasses(PreTrainedModel)
    models = [x for x in everyone if getattr(x, "config_class", None) is config_class]
    # Llama 4 says no for its chunks alone, which flash_attention_2 does not have.
    if not models or config_class.__name__.startswith("Llama4"):
        return "any"
    if any(x._supports_flash_attn for x in models):
        return "any"
    if any(x._supports_attention_backend and x._supports_sdpa for x in models):
        return "scores"
    return "own"


@torch.compiler.disable
def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    config: Any = None,
    device: Any = "cpu",
    **more: Any,
) -> Tensor | None:
    """Return what is visible, from what transformers knows of a step.

    attention_mask: (batch, tokens so far) bool, false at padding.
    """
    masks = "any" if config is None else _masks_of(config.__class__)
    if masks == "own":
        raise ValueError(
            f"attn_implementation must be 'eager' or 'sdpa' of models that have code of their own, "
            f"as those of {type(config).__name__} do, got {config._attn_implementation!r}"
        )
    seen = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
    try:
        if masks == "scores":
            raise _SingleScoresError
        rules = _rules(mask_function)
        if rules.documents is not None:
            if seen is not None or q_length != kv_length or rules.chunk is not None:
                raise _SingleScoresError
            before = rules.documents[:, :1] - 1
            found: Tensor | None = _of_packed(rules.documents.diff(prepend=before) != 0)
        else:
            count = q_offset + q_length - kv_offset
            may_be_none = more.get("allow_is_causal_skip", True)
            step = _Step(batch_size, q_length, kv_length, kv_offset, count, device, may_be_none)
            if rules.causal:
                found = _causal(step, seen, rules.chunk)
            else:
                found = _bidirectional(step, seen, rules.window)
        return found if found is None or rules.causal else found.expand(-1, -1, 2, -1)
    except _SingleScoresError:
        from transformers import masking_utils

        if masks == "any":
            more |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            config=config,
            device=device,
            **more,
        )


# ---- attention: in each layer --------------------------------------------------------------------


class _SeenPositions(NamedTuple):
    """The last positions that were looked at: all layers of a step have the same tensor."""

    position_ids: Callable[[], Tensor | None]
    version: int
    layer: Callable[[], torch.nn.Module | None]  # that asked: when it does again, it is a new step
    found: Tensor | None


_seen_positions = _SeenPositions(lambda: None, 0, lambda: None, None)


@torch.compiler.disable
def _of_positions(position_ids: Tensor, layer: torch.nn.Module) -> Tensor | None:
    """Documents of one row, which begin where positions are 0; None of one. Waits for the GPU."""
    global _seen_positions
    version = -1 if position_ids.is_inference() else position_ids._version
    seen = _seen_positions
    if seen.position_ids() is position_ids and seen.version == version >= 0:
        if seen.layer() is not layer:
            return seen.found
    begins = position_ids == 0
    begins[:, 0] = True
    found = _of_packed(begins) if begins[:, 1:].any() else None
    _seen_positions = _SeenPositions(weakref.ref(position_ids), version, weakref.ref(layer), found)
    return found


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Any = None,
    block_indices: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Of (batch, nheads, tokens, headdim), to (batch, tokens, nheads, headdim)."""
    if indices is not None or block_indices is not None:
        raise ValueError(
            "attn_implementation must be 'eager' or 'sdpa' of layers that select keys (indices, "
            f"block_indices), as {type(module).__name__} does"
        )
    asked = options(module, dropout, scaling, sliding_window, softcap, is_causal, s_aux)
    if position_bias is not None or not (attention_mask is None or _is_ours(attention_mask)):
        return _by_scores(module, query, key, value, attention_mask, position_bias, asked)
    if attention_mask is not None:
        asked["causal"] = attention_mask.shape[2] == 1
    dtype = _dtype(query, module)
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    bounds: Any = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if any(x is None for x in bounds):
        if attention_mask is None and position_ids is not None:
            # Masks tell of packed sequences only where there is no cache.
            if position_ids.shape == (1, q.shape[1]) and 1 < q.shape[1] == k.shape[1]:
                attention_mask = _of_positions(position_ids, module)
        if attention_mask is None:
            return flash_attn_func(q, k, v, **asked), None
        if attention_mask.shape[1] == 1:
            return _over_cache(q, k, v, attention_mask[:, 0, 0], asked), None
        bounds = (*attention_mask[0, :, 0].unbind(-1), q.shape[1], k.shape[1])
    out = flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *bounds, **asked
    )
    return out.unflatten(0, q.shape[:2]), None


def _is_ours(mask: Tensor) -> bool:
    return mask.dtype == torch.int32 and max(mask.shape[2:]) <= 2


def _dtype(query: Tensor, module: torch.nn.Module) -> torch.dtype:
    """Queries in float32 come of layers that are kept so: autocast or the weights decide."""
    from transformers.integrations.flash_attention import get_target_dtype

    try:
        return get_target_dtype(query, module) or query.dtype
    except StopIteration:  # no linear layer has weights
        return query.dtype


def _over_cache(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, asked: dict[str, Any]) -> Tensor:
    """keys: (batch, 1 or 2), how many each row has and, with padding, the first of them."""
    if asked["dropout_p"] > 0:
        raise ValueError(
            f"dropout must be 0 with padding or a static cache and without gradients, got "
            f"{asked['dropout_p']}: call model.eval() first"
        )
    counts, *first = keys.unbind(-1)
    del asked["dropout_p"]
    return flash_attn_with_kvcache(
        q, k, v, cache_seqlens=counts, cache_leftpad=first[0] if first else None, **asked
    )


def _by_scores(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    asked: dict[str, Any],
) -> tuple[Tensor, None]:
    """As transformers does with PyTorch's attention, on a mask of single scores or a bias."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is not None and _is_ours(mask):
        raise ValueError("position_bias must be None with padding: pass attn_implementation='sdpa'")
    if asked["softcap"] or asked["s_aux"] is not None:
        raise ValueError(
            "softcap and s_aux must be None where the model's mask is of single scores: "
            "pass attn_implementation='eager'"
        )
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and asked["causal"] and 1 < queries < keys:  # PyTorch aligns the first of both
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        mask = seen.tril(keys - queries)[None, None]
    out, _ = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        mask,
        dropout=asked["dropout_p"],
        scaling=asked["softmax_scale"],
        is_causal=asked["causal"],
        position_bias=position_bias,
    )
    return out, None
