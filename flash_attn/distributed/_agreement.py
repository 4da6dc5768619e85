"""Whether all ranks make the same call: asked once for each kind of call, before anything else.

A rank that calls otherwise would leave the others waiting for messages of another size, or for
ever. So before the first call of its kind each rank sends the others a short description of it, and
all of them raise the same error.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flash_attn.distributed._layout import Grid, size_of

SIZE = 2048  # bytes of a description
TIMEOUT = 300.0  # seconds that a rank waits for the others' descriptions

Description = Mapping[str, Any]


def gather(description: Description, grid: Grid, device: torch.device) -> list[dict[str, Any]]:
    """Return the descriptions of all ranks of the grid, row by row.

    Raises
    ------
    RuntimeError
        If some rank has sent none after TIMEOUT: it makes no such call, or is lost.
    """
    if "error" in description:  # a letter is up to 6 bytes
        description = {"error": description["error"][: SIZE // 8]}
    encoded = json.dumps(description).encode().ljust(SIZE)
    table = torch.tensor(list(encoded), dtype=torch.uint8, device=device)[None]
    for members in reversed(grid):
        if members is not None:
            parts = [torch.empty_like(table) for _ in range(size_of(members))]
            work = dist.all_gather(parts, table, members, async_op=True)
            started = time.monotonic()
            while not work.is_completed():
                if time.monotonic() - started > TIMEOUT:
                    raise RuntimeError(
                        f"some ranks of the group have not made this call after {TIMEOUT} s: "
                        f"{_listed(description)}. All ranks must make the same calls; rank "
                        f"{dist.get_rank()} makes this one for the first time"
                    )
                time.sleep(1e-4)
            work.wait()
            table = torch.cat(parts)
    return [json.loads(bytes(row)) for row in table.tolist()]


def device_of(group: dist.ProcessGroup, q: Any) -> torch.device:
    """Where the ranks of a group gather: the same kind on all of them, whatever q is."""
    kinds = {x.type for x in group._device_types}
    if "cpu" in kinds:
        return torch.device("cpu")
    if isinstance(q, torch.Tensor) and q.device.type in kinds:
        return q.device
    return torch.device("cuda", torch.cuda.current_device())


def check(descriptions: list[dict[str, Any]]) -> None:
    """Raise the error of a rank that has one, or ValueError for what ranks have otherwise."""
    for rank, description in enumerate(descriptions):
        if "error" in description:
            raise RuntimeError(f"rank {rank} of the group: {description['error']}")
    for name in sorted(set().union(*descriptions)):
        values = [x.get(name) for x in descriptions]
        if any(x != values[0] for x in values):
            other = next(i for i, x in enumerate(values) if x != values[0])
            raise ValueError(
                f"{name} must be the same on all ranks of the group, got {values[0]!r} on rank 0 "
                f"and {values[other]!r} on rank {other}"
            )


def _listed(description: Description) -> str:
    return ", ".join(f"{name} {value}" for name, value in description.items())
