"""The processes of tests/test_context_parallel.py: each does what it is sent."""

from __future__ import annotations

import io
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

PATIENCE = 60  # seconds that a test waits for a process


def serve(rank: int, size: int, device: str, rendezvous: str, connection: Connection) -> None:
    """Run functions of (rank's groups, arguments) and send back what they return or raise."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
    )
    groups = Groups(size, device)
    while (received := connection.recv_bytes()) != b"stop":
        function, arguments = torch.load(io.BytesIO(received), weights_only=False)
        try:
            answer = function(groups, **arguments)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            answer = error
        connection.send_bytes(packed(answer))
    dist.destroy_process_group()


def packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Groups:
    """Subsets of the processes, by size; and meshes, by shape."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        # Of 2, the last ones, which have other numbers in the group than in the world.
        self.of = {n: dist.new_group(range(size - n, size)) for n in (1, 2, size)}
        self.meshes = {}
        for rows in (1, 2, size):
            if size % rows == 0:
                grid = torch.arange(size).view(rows, -1)
                self.meshes[rows, size // rows] = DeviceMesh(device, grid)

    def holds(self, members: int) -> bool:
        return dist.get_rank() >= self.size - members


class Pool:
    """As many processes, which stay."""

    def __init__(self, size: int, device: str, folder: Path) -> None:
        self.size, self.device = size, device
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "flash_attn.distributed"])
        self.processes, self.connections = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, device, str(folder / "rendezvous"), theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What each process returns."""
        answers = self.ask(function, **arguments)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def ask(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What each process returns, or the exception that it raised."""
        message = packed((function, arguments))
        for connection in self.connections:
            connection.send_bytes(message)
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(PATIENCE):
                answers.append(TimeoutError(f"process {rank} does not answer"))
                continue
            answers.append(torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False))
        return answers

    def stop(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            if process.is_alive():
                connection.send_bytes(b"stop")
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@contextmanager
def pool(size: int, device: str, folder: Path) -> Iterator[Pool]:
    processes = Pool(size, device, folder)
    try:
        yield processes
    finally:
        processes.stop()
