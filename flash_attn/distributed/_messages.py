"""Point-to-point messages between the ranks of a group, several at a time.

NCCL runs those of one ``Messages`` on a stream of its own: they wait for what was launched before
them, and the host for nothing.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_with_priority: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def messenger(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """Return the group that sends the messages of ``group``. The first time all ranks ask.

    With NCCL it is one of the same ranks, whose stream has a high priority. Messages and an
    attention are often ready at the same moment. Without priority the attention would fill the GPU
    and the messages begin when it ends.
    """
    if group is None or "cuda:nccl" not in dist.get_backend_config(group) or device.type != "cuda":
        return group
    if group not in _with_priority:
        _with_priority[group] = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="nccl",
            pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True),
            use_local_synchronization=True,
        )
    return _with_priority[group]


class Messages:
    """What one rank sends and receives at a time. Tensors are contiguous, and may be empty."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []

    def send(self, x: Tensor, rank: int) -> None:
        self._add(dist.isend, x, rank)

    def receive(self, x: Tensor, rank: int) -> None:
        self._add(dist.irecv, x, rank)

    def _add(self, operation: Callable[..., Any], x: Tensor, rank: int) -> None:
        if x.numel():
            assert self._group is not None
            peer = dist.get_global_rank(self._group, rank)
            self._operations.append(dist.P2POp(operation, x, peer, self._group))

    def start(self) -> None:
        if self._operations:
            self._works = dist.batch_isend_irecv(self._operations)

    def wait(self) -> None:
        """Let what is launched next wait for the messages."""
        for work in self._works:
            work.wait()
