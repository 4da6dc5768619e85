"""Collectives along the first dimension, with gradients, for tensor and sequence parallelism.

A ``process_group`` of None is the default group. The raw forms have no gradient and return
(result, handle); with ``async_op`` the result is there after ``handle.wait()``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def all_gather_raw(
    input_: Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Concatenate the tensors (n, ...) of all ranks: (world_size * n, ...)."""
    length = dist.get_world_size(process_group) * input_.shape[0]
    output = input_.new_empty((length, *input_.shape[1:]))
    input_ = input_.contiguous()
    return output, dist.all_gather_into_tensor(output, input_, process_group, async_op)


def reduce_scatter_raw(
    input_: Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Sum the tensors (world_size * n, ...) of all ranks and return this rank's part: (n, ...).

    ValueError if their rows are no multiple of the ranks.
    """
    ranks = dist.get_world_size(process_group)
    if input_.shape[0] % ranks:
        shape = tuple(input_.shape)
        raise ValueError(f"input_ must have a multiple of {ranks} (ranks) rows, got shape {shape}")
    output = input_.new_empty((input_.shape[0] // ranks, *input_.shape[1:]))
    input_ = input_.contiguous()
    work = dist.reduce_scatter_tensor(output, input_, group=process_group, async_op=async_op)
    return output, work


def all_reduce_raw(
    input_: Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Sum the tensors of all ranks, in place if ``input_`` is contiguous."""
    output = input_.contiguous()
    return output, dist.all_reduce(output, group=process_group, async_op=async_op)


class AllGatherFunc(torch.autograd.Function):
    """:func:`all_gather_raw`, whose gradient is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_raw(grad_output, ctx.process_group)[0], None


class ReduceScatterFunc(torch.autograd.Function):
    """:func:`reduce_scatter_raw`, whose gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_gather_raw(grad_output, ctx.process_group)[0], None


class AllReduceFunc(torch.autograd.Function):
    """Sum over ranks, out of place; its gradient, which every rank computes, passes unchanged."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
        # A copy: another function may have saved input_ for its backward.
        copy = input_.clone(memory_format=torch.contiguous_format)
        return all_reduce_raw(copy, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def all_gather(input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate the tensors (n, ...) of all ranks: (world_size * n, ...). With a gradient."""
    return AllGatherFunc.apply(input_, process_group)


def reduce_scatter(input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """Sum the tensors (world_size * n, ...) of all ranks, return this rank's part (n, ...). With a
    gradient. ValueError if their rows are no multiple of the ranks.
    """
    return ReduceScatterFunc.apply(input_, process_group)


def all_reduce(input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """Sum the tensors of all ranks, out of place. With a gradient."""
    return AllReduceFunc.apply(input_, process_group)


def _marked(model: nn.Module, mark: str) -> list[tuple[str, nn.Parameter]]:
    """Parameters with a true attribute ``mark``, in an order that all ranks have."""
    return sorted((name, p) for name, p in model.named_parameters() if getattr(p, mark, False))


@torch.no_grad()
def sync_shared_params(model: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Give parameters with ``_shared_params = True`` the values of the group's first rank."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    for _, p in _marked(model, "_shared_params"):
        dist.broadcast(p, src=dist.get_global_rank(group, 0), group=group)


@torch.no_grad()
def allreduce_sequence_parallel_grad(
    model: nn.Module, process_group: dist.ProcessGroup | None
) -> None:
    """Sum the gradients of parameters with ``_sequence_parallel = True``, all in one call."""
    grads = []
    for name, p in _marked(model, "_sequence_parallel"):
        if p.grad is None:
            raise ValueError(
                f"parameter {name} must have a gradient, got None: call backward first"
            )
        grads.append(p.grad)
    if grads:
        total, _ = all_reduce_raw(torch.cat([grad.flatten() for grad in grads]), process_group)
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """Return a rank's share of ``dim``, dealt out in units; the first ranks take what is left."""
    units, left = divmod(dim // multiple_of, world_size)
    return (units + (local_rank < left)) * multiple_of
