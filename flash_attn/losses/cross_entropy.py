"""Cross-entropy loss as a module."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(nn.Module):
    """Cross-entropy of logits and labels, with label smoothing, z-loss and split vocabularies.

    Parameters
    ----------
    ignore_index, label_smoothing, logit_scale, lse_square_scale, inplace_backward, process_group
        See :func:`flash_attn.ops.triton.cross_entropy.cross_entropy_loss`.
    reduction : {"mean", "sum", "none"}
        The mean is over the rows that are not ignored. It is NaN if there are none.
    return_z_loss : bool
        Also return the part of the loss that ``lse_square_scale`` adds, reduced likewise.

    Raises
    ------
    ValueError
        If ``reduction`` is none of these.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: dist.ProcessGroup | None = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, float32, of shape () or, without reduction, (batch,).

        Parameters
        ----------
        input : (batch, vocab_size), the logits
        target : (batch,), the labels
        precomputed_lse : (batch,), optional
        """
        scales = self.label_smoothing, self.logit_scale, self.lse_square_scale
        rest = self.ignore_index, self.inplace_backward, self.process_group
        losses = cross_entropy_loss(input, target, precomputed_lse, *scales, *rest)
        loss, z_loss = (self._reduced(x, target) for x in losses)
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduced(self, losses: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total / (target != self.ignore_index).sum() if self.reduction == "mean" else total
