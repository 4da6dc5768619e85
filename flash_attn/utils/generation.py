"""Generation token by token, with the KV caches that the layers of a model keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn._numbers import integer, real


@dataclass
class InferenceParams:
    """What the layers of a model share while it generates.

    ``MHA`` keeps the cache of its layer in ``key_value_memory_dict``. Of a batch, a call has the
    sequences from ``batch_size_offset`` on. ``lengths_per_sample`` (batch,) int32 are their lengths
    so far, where they are not all ``seqlen_offset``.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin with other sequences, no more or longer than the caches, which stay allocated."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


class Generated(NamedTuple):
    """What ``GenerationMixin.generate`` returns with ``return_dict_in_generate``."""

    sequences: Tensor  # (batch, seqlen), the prompt first
    scores: tuple[Tensor, ...] | None  # of each new token the logits (batch, vocabulary)


class GenerationMixin:
    """``generate`` for models with upstream's convention of a cache.

    ``model(input_ids, position_ids=, inference_params=, num_last_tokens=1)`` returns an object with
    ``logits`` (batch, 1, vocabulary).
    """

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        *,
        eos_token_id: int | None = None,
        teacher_outputs: Tensor | None = None,
        vocab_size: int | None = None,
        cg: bool = False,
        enable_timing: bool = False,
        tensor_parallel: int = 1,
    ) -> Tensor | Generated:
        """Prompts of one length, continued up to ``max_length`` tokens.

        Parameters
        ----------
        input_ids : (batch, seqlen) int64
        max_length : int
            Of the prompt and the new tokens.
        top_k : int
            1 takes the most likely token. Otherwise tokens are drawn from the most likely
            ``top_k``; 0 is all.
        top_p : float
            Of those, the fewest whose probabilities sum to at least ``top_p``; 0 is all.
        temperature : float
            Divides the logits. Above 0, but where ``top_k`` is 1.
        return_dict_in_generate, output_scores : bool
            The result is a ``Generated``, and has scores.
        eos_token_id : int, optional
            A sequence that has this token goes on with it. When all have it, generation ends.
        teacher_outputs : (batch, up to max_length) int64, optional
            Tokens to take, by their place, instead of what the model says.
        vocab_size : int, optional
            Of the logits, how many are of tokens.
        cg, enable_timing, tensor_parallel
            Upstream's. Here each has its default alone.

        Returns
        -------
        Tensor or Generated
            Of shape (batch, seqlen + new tokens).

        Raises
        ------
        ValueError
            Naming the argument, what was given and what is accepted.
        NotImplementedError
            If ``cg``, ``enable_timing`` or ``tensor_parallel`` is another than its default.
        """
        _check_prompt(input_ids, max_length)
        for name, given in (("cg", cg), ("enable_timing", enable_timing)):
            if given:
                raise NotImplementedError(f"{name} must be False: generate has no such mode")
        if tensor_parallel != 1:
            raise NotImplementedError(f"tensor_parallel must be 1, got {tensor_parallel}")
        batch, prompt = input_ids.shape
        shared = InferenceParams(max_seqlen=max_length, max_batch_size=batch)
        sequences, scores = [input_ids], []
        ended = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
        for length in range(prompt, max_length):
            start = shared.seqlen_offset
            positions = None if start == 0 else torch.full_like(sequences[-1], start)
            logits = self(  # type: ignore[operator]
                sequences[-1], position_ids=positions, inference_params=shared, num_last_tokens=1
            ).logits
            score = logits[:, -1, :vocab_size]
            if return_dict_in_generate and output_scores:
                scores.append(score)
            shared.seqlen_offset = length
            if teacher_outputs is not None and length < teacher_outputs.shape[1]:
                token = teacher_outputs[:, length]
            else:
                token = sample(score, top_k, top_p, temperature)
                if eos_token_id is not None:
                    token = token.masked_fill(ended, eos_token_id)
            if eos_token_id is not None:
                ended |= token == eos_token_id
            sequences.append(token[:, None])
            if eos_token_id is not None and ended.all():
                break
        found = torch.cat(sequences, dim=1)
        if not return_dict_in_generate:
            return found
        return Generated(found, tuple(scores) if output_scores else None)


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """A token (batch,) for each row of logits (batch, vocabulary); see ``generate``."""
    top_k, top_p = integer("top_k", top_k), real("top_p", top_p)
    temperature = real("temperature", temperature)
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {top_k}")
    if not 0.0 <= top_p <= 1.0:
        raise ValueError(f"top_p must be in [0, 1], got {top_p}")
    if top_k == 1:
        return logits.argmax(-1)
    if not temperature > 0.0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    count = logits.shape[-1]
    best, tokens = logits.float().topk(min(top_k, count) or count)
    probabilities = (best / temperature).softmax(-1)
    if top_p > 0.0:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return tokens.gather(-1, probabilities.multinomial(1)).squeeze(-1)


def _check_prompt(input_ids: Tensor, max_length: int) -> None:
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be (batch, seqlen), got shape {tuple(input_ids.shape)}")
    if integer("max_length", max_length) < input_ids.shape[1]:
        raise ValueError(
            f"max_length must be at least that of input_ids, {input_ids.shape[1]}, got {max_length}"
        )
