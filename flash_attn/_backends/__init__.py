"""Which implementation runs a problem: kernels where they can, tiled PyTorch elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from flash_attn._arguments import Attention, CacheAppend
from flash_attn._backends import cuda, tiled

BACKENDS = ("tiled", "sm80")
MAX_HEADDIM = 256  # of any kernel

_forced: str | None = None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend inside a ``with`` block, for tests and comparisons; process-wide.

    Parameters
    ----------
    name : {"tiled", "sm80"}
        ``tiled`` is PyTorch on any device; ``sm80`` the Ampere-class kernels (compute capability >=
        8.0).

    Raises
    ------
    ValueError
        For a name that is no backend.
    NotImplementedError
        From calls inside the block that the forced backend cannot run.
    """
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"name must be one of {', '.join(BACKENDS)}, got {name!r}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def available_backends(device: torch.device | str | int) -> list[str]:
    """Return the backends that can run on ``device``, best first."""
    family = _family(_with_index(torch.device(device)))
    return ["tiled"] if family is None else [family, "tiled"]


def choose(problem: Attention, direction: str = "forward") -> str:
    """Return the backend that runs ``problem``; forward and backward may run on different ones."""
    if _forced == "tiled":
        return "tiled"
    family = _family(problem.q.device)
    if _forced is None:
        if family is None or cuda.unsupported(problem, family, direction) is not None:
            return "tiled"
        return family
    _check_forced(problem, _forced, family, direction)
    return _forced


def forward(
    problem: Attention, rng_state: Tensor | None, return_probs: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, log-sum-exp and, if asked for, S_dmask."""
    backend = choose(problem)
    if backend == "tiled":
        return tiled.forward(problem, rng_state, return_probs, out)
    return cuda.forward(problem, rng_state, return_probs, out, family=backend)


def backward(
    problem: Attention,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    rng_state: Tensor | None,
) -> Tensor:
    """Write the gradients to dq, dk and dv; return delta."""
    backend = choose(problem, "backward")
    if backend == "tiled":
        return tiled.backward(problem, dout, out, lse, dlse, dq, dk, dv, rng_state)
    return cuda.backward(problem, dout, out, lse, dlse, dq, dk, dv, rng_state, family=backend)


def append(problem: Attention, new: CacheAppend) -> Attention:
    """Write new keys and values into the cache in place; return the problem, queries rotated."""
    choose(problem)  # a forced backend that cannot attend refuses before the cache changes
    return tiled.append(problem, new)


def _check_forced(problem: Attention, forced: str, family: str | None, direction: str) -> None:
    if problem.headdim > MAX_HEADDIM or problem.headdim_v > MAX_HEADDIM:
        raise ValueError(
            f"the {forced} backend takes head dimensions of q, k and v up to {MAX_HEADDIM}, "
            f"got {problem.headdim} and {problem.headdim_v}; use_backend('tiled') takes any"
        )
    if family is None:
        reason: str | None = f"cannot run on {problem.q.device}" + (
            "" if cuda.available() else " (it was not built)"
        )
    else:
        reason = cuda.unsupported(problem, forced, direction)
    if reason is not None:
        raise NotImplementedError(f"the {forced} backend {reason}; use_backend('tiled') does this")


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@cache
def _family(device: torch.device) -> str | None:
    """The best compiled kernel family that runs on ``device``."""
    if device.type != "cuda" or torch.version.cuda is None or not cuda.available():
        return None
    capability = torch.cuda.get_device_capability(device)
    return "sm80" if capability >= (8, 0) and "sm80" in cuda.families() else None
