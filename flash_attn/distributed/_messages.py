"""Point-to-point messages between the ranks of a group, several at a time.

NCCL runs those of one ``Messages`` on a stream of its own: they wait for what was launched before
them, and the host for nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Clocks. From the moment that kernels are ready to that when they run, it is some microseconds.
_HEAD_START = 20_000


def give_way(device: torch.device) -> None:
    """Let messages begin that are ready as well: an attention that follows would fill the GPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(_HEAD_START)


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

    @property
    def are_under_way(self) -> bool:
        return bool(self._works)

    def wait(self) -> None:
        """Let what is launched next wait for the messages."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Wait in the end, also of an error: what nobody waits for, the next call would meet."""
        try:
            yield
        finally:
            self.wait()
