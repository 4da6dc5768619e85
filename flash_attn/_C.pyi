from collections.abc import Sequence
from typing import Any

from torch import Tensor

GRAPH_SLOTS: int
KEPT_ZERO: int

class Call:
    names: list[str]
    workspaces: list[tuple[str, int, bool]]
    def at(self, places: Sequence[int], offsets: Sequence[int], /) -> Call: ...
    def launch(
        self, arguments: tuple[Any, ...], results: tuple[Tensor, ...], stream: int, /
    ) -> None: ...

def prepare(
    kernel: int,
    tensors: dict[str, Tensor],
    numbers: dict[str, float],
    /,
) -> Call: ...
def call_key(arguments: tuple[Any, ...], settings: int, /) -> bytes | None: ...
def zeros_owner(stream: int, /) -> int | None: ...
def kernels() -> list[tuple[str, str, str, str, str, int, int, str, list[str], int]]: ...
