"""Cross-entropy of logits that may be split over a process group, without a float32 copy of them.

Log-sum-exp and losses of 16-bit logits are float32. Between forward and backward only the logits
and a few numbers a row are kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._arguments import check_tensors, is_readable
from flash_attn._differentiation import differentiable_once, refuse_transforms, returned
from flash_attn._numbers import flag, integer, real
from flash_attn._rowwise import accumulation_dtype, check_like, rowwise
from flash_attn.utils.distributed import all_gather_raw, all_reduce_raw


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row of logits. Differentiable once, in the logits.

    Parameters
    ----------
    logits : (batch, vocab_size), floating point
        With ``process_group``, this rank's (batch, vocab_size / world_size) columns.
    labels : (batch,) int32 or int64
        Classes in [0, vocab_size), or ``ignore_index``. On a CPU they are checked. On a GPU a label
        outside of that range is no class: the loss of its row is the log-sum-exp.
    precomputed_lse : (batch,) float32, optional
        Log-sum-exp of each row, of this rank's columns. It is used if there is no label smoothing
        and no logit scale, and it has no gradient of its own.
    label_smoothing : float
        Share of the target that is spread evenly over all classes.
    logit_scale : float
        Factor of the logits.
    lse_square_scale : float
        Factor of the square of the log-sum-exp (z-loss), which is added to the loss.
    ignore_index : int
        Rows with this label have the loss 0, and the gradient 0.
    inplace_backward : bool
        Write the gradient to the memory of ``logits``. Then nothing else may use them, nor other
        slices of a tensor that they are one of.
    process_group : ProcessGroup, optional
        The ranks that hold the columns, the first ones first.

    Returns
    -------
    losses : (batch,) float32
    z_losses : (batch,) float32
        The z-loss in ``losses``; it has no gradient.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was given and what is accepted.
    """
    refuse_transforms()
    scales = real("logit_scale", logit_scale), real("lse_square_scale", lse_square_scale)
    for name, scale in zip(("logit_scale", "lse_square_scale"), scales, strict=True):
        if not math.isfinite(scale):
            raise ValueError(f"{name} must be finite, got {scale}")
    smoothing = real("label_smoothing", label_smoothing)
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {smoothing}")
    rest = integer("ignore_index", ignore_index), flag("inplace_backward", inplace_backward)
    return CrossEntropyLoss.apply(
        logits, labels, precomputed_lse, smoothing, *scales, *rest, process_group
    )


class CrossEntropyLoss(torch.autograd.Function):
    """:func:`cross_entropy_loss`, all arguments by position."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        precomputed_lse: Tensor | None = None,
        smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        ignore_index: int = -100,
        inplace_backward: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        world_size = 1 if process_group is None else dist.get_world_size(process_group)
        rank = 0 if process_group is None else dist.get_rank(process_group)
        _check(logits, labels, precomputed_lse, ignore_index, world_size)
        columns = logits.shape[1]
        first_class, classes = rank * columns, world_size * columns

        dtype = accumulation_dtype(logits.dtype)
        sums = None
        if precomputed_lse is not None and logit_scale == 1.0 and smoothing == 0.0:
            lse = precomputed_lse.to(dtype)
        else:
            lse = logits.new_empty(logits.shape[0], dtype=dtype)
            sums = torch.empty_like(lse) if smoothing > 0.0 else None
            _reduce((logits, lse, sums), (), (logit_scale,))

        index, is_here = _columns_of_labels(labels, first_class, columns)
        at_label = logits.gather(1, index).squeeze(1).to(dtype) * logit_scale
        losses = torch.where(is_here, at_label, 0.0) * (smoothing - 1.0)
        if sums is not None:
            losses -= sums * (smoothing / classes)
        if world_size > 1:
            losses, _ = all_reduce_raw(losses, process_group)
            lse = all_gather_raw(lse[None], process_group)[0].logsumexp(0)
        z_losses = lse_square_scale * lse.square() if lse_square_scale else torch.zeros_like(lse)
        ignored = labels == ignore_index
        z_losses.masked_fill_(ignored, 0.0)
        losses = (losses + lse + z_losses).masked_fill_(ignored, 0.0)
        losses, z_losses = returned(losses, z_losses)

        ctx.save_for_backward(logits, labels, lse)
        ctx.mark_non_differentiable(z_losses)
        ctx.options = smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward
        ctx.first_class, ctx.classes = first_class, classes
        return losses, z_losses

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, lse = ctx.saved_tensors
        smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward = ctx.options
        is_used = labels != ignore_index
        # With the probabilities p: dlogits = factor * p - offset, less `step` at the label.
        scaled = torch.where(is_used, grad_losses.to(lse.dtype), 0.0) * logit_scale
        factor = scaled + scaled * (2.0 * lse_square_scale) * lse if lse_square_scale else scaled
        offset = scaled * (smoothing / ctx.classes)
        step = scaled * (1.0 - smoothing)
        statistics = lse, factor, offset, is_used

        # The label's own gradient is a difference of float32 numbers. (Logits are read before
        # they are overwritten.)
        index, is_here = _columns_of_labels(labels, ctx.first_class, logits.shape[1])
        at_label = _gradient(logits.gather(1, index), *statistics, logit_scale)
        at_label -= torch.where(is_here, step, 0.0)[:, None]
        logits = logits.detach()
        dlogits = logits if inplace_backward else torch.empty_like(logits)
        _write_gradient((logits, dlogits, *statistics), (), (logit_scale,))
        dlogits.scatter_(1, index, at_label.to(dlogits.dtype))
        return dlogits, *[None] * 8


@rowwise
def _reduce(rows: list[Any], columns: tuple[()], options: tuple[float]) -> tuple[()]:
    """Log-sum-exp of each row and, if asked for, its sum."""
    logits, lse, sums = rows
    x = _scaled(logits, lse.dtype, options[0])
    lse.copy_(x.logsumexp(1))
    if sums is not None:
        sums.copy_(x.sum(1))
    return ()


@rowwise
def _write_gradient(rows: list[Tensor], columns: tuple[()], options: tuple[float]) -> tuple[()]:
    logits, dlogits, lse, factor, offset, is_used = rows
    dlogits.copy_(_gradient(logits, lse, factor, offset, is_used, options[0]))
    return ()


def _gradient(
    logits: Tensor, lse: Tensor, factor: Tensor, offset: Tensor, is_used: Tensor, scale: float
) -> Tensor:
    """Of each row that is used, factor * softmax(scale * logits) - offset."""
    p = (_scaled(logits, lse.dtype, scale) - lse[:, None]).exp()
    return torch.where(is_used[:, None], p * factor[:, None] - offset[:, None], 0.0)


def _scaled(logits: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    return logits.to(dtype) if scale == 1.0 else logits.to(dtype) * scale


def _columns_of_labels(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Of each label, a column (batch, 1) of this rank, and whether it is the label's (batch,)."""
    index = labels.long() - first
    return index.clamp(0, columns - 1)[:, None], (index >= 0) & (index < columns)


def _check(
    logits: Tensor, labels: Tensor, lse: Tensor | None, ignore_index: int, world_size: int
) -> None:
    check_tensors(logits=logits, labels=labels)
    shape = tuple(logits.shape)
    if logits.ndim != 2 or not logits.is_floating_point() or shape[1] == 0:
        raise ValueError(
            f"logits must be floating point (batch, vocab_size), got {logits.dtype} {shape}"
        )
    check_like(logits, logits.shape[:1], labels=labels, precomputed_lse=lse)
    if labels.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"labels must be int32 or int64, got {labels.dtype}")
    if is_readable(labels):
        classes = world_size * shape[1]
        wrong = labels[((labels < 0) | (labels >= classes)) & (labels != ignore_index)].tolist()
        if wrong:
            accepted = f"in [0, {classes}) or ignore_index = {ignore_index}"
            raise ValueError(f"labels must be {accepted}, got {wrong[0]}")
