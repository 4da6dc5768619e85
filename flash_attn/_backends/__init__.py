"""Which implementation runs a problem: kernels where they can, tiled PyTorch elsewhere."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from flash_attn._arguments import Attention, CacheAppend, Rotary
from flash_attn._backends import cuda, tiled
from flash_attn._backends.merging import merge

BACKENDS = ("tiled", "sm80", "sm90")
MAX_HEADDIM = 256  # of any kernel
Remember = Callable[[cuda.AnyPrepared], None]


def use_backend(name: str) -> AbstractContextManager[None]:
    """Force one backend inside a ``with`` block, for tests and comparisons; process-wide.

    Parameters
    ----------
    name : {"tiled", "sm80", "sm90"}
        ``tiled`` is PyTorch on any device; ``sm80`` the Ampere-class kernels (compute capability >=
        8.0); ``sm90`` the Hopper kernels (9.0 alone). A backward without a kernel runs on the
        next lesser backend, for example that of ``flash_attn.fp8`` with q, k and v that are not
        aligned.

    Raises
    ------
    ValueError
        For a name that is no backend.
    NotImplementedError
        From calls inside the block that the forced backend cannot run.
    """
    if name not in BACKENDS:
        raise ValueError(f"name must be one of {', '.join(BACKENDS)}, got {name!r}")
    return cuda.changed_setting("backend", name)


def available_backends(device: torch.device | str | int) -> list[str]:
    """Return the backends that can run on ``device``, best first.

    Parameters
    ----------
    device : torch.device, str or int
        "cpu", "cuda", "cuda:1", ...

    Returns
    -------
    list of str
        Of "sm90", "sm80" and "tiled".
    """
    return [*_built_backends(_with_index(torch.device(device))), "tiled"]


def choose(problem: Attention, operation: str = "forward") -> str:
    """Return the backend that runs ``problem``; forward and backward may run on different ones."""
    if (forced := cuda.forced_backend()) is not None:
        return _forced_backend(problem, forced, operation)
    for backend in _built_backends(problem.q.device, operation):
        if cuda.unsupported(problem, backend, operation) is None:
            return backend
    if problem.q.device.type == "cuda" and torch.version.cuda and not cuda.available():
        _warn_of_missing_kernels()
    return "tiled"


@cache
def _warn_of_missing_kernels() -> None:
    """Once: whoever installs by pip has not seen what the build printed."""
    warnings.warn(
        "flash_attn was installed without CUDA kernels: CUDA tensors run on the tiled backend, in "
        "PyTorch operations, which is slow. Install it again where nvcc is found (PATH or "
        "CUDA_HOME), by pip with --no-cache-dir, and with FLASH_ATTN_REQUIRE_CUDA=1 to see an "
        "error if it is not; or silence this with use_backend('tiled').",
        UserWarning,
        stacklevel=2,
    )


def forward(
    problem: Attention,
    rng_state: Tensor | None,
    return_probs: bool,
    out: Tensor | None = None,
    remember: Remember | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, log-sum-exp and, if asked for, S_dmask; ``remember`` a launch that ran it."""
    backend = choose(problem)
    if backend == "tiled":
        return tiled.forward(problem, rng_state, return_probs, out)
    return cuda.forward(problem, rng_state, return_probs, out, remember, backend=backend)


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
    remember: Remember | None = None,
) -> Tensor:
    """Write the gradients to dq, dk and dv; return delta."""
    backend = choose(problem, "backward")
    if backend == "tiled":
        return tiled.backward(problem, dout, out, lse, dlse, dq, dk, dv, rng_state)
    return cuda.backward(
        problem, dout, out, lse, dlse, dq, dk, dv, rng_state, remember, backend=backend
    )


def append(
    problem: Attention, new: CacheAppend, remember: Remember | None = None
) -> tuple[Attention, Remember | None]:
    """Write new keys and values into the cache in place.

    Return the problem with these keys, queries rotated; and ``remember`` for the launch of its
    forward, given that of the append as well.
    """
    choose(problem)  # a forced backend that cannot attend refuses before the cache changes
    backend = _of_tokens(problem.q, "append")
    if backend is None or not cuda.appends(problem, new, backend):
        return tiled.append(problem, new), None
    problem, appended = cuda.append(problem, new, backend)
    if remember is None:
        return problem, None
    return problem, lambda attended: remember(cuda.PreparedPair(appended, attended, ("k", "v")))


def rotates(x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether a kernel rotates the tokens of ``x``."""
    if cu_seqlens is not None and len(cu_seqlens) < 2:  # no sequence
        return False
    backend = _of_tokens(x, "rotary")
    return backend is not None and cuda.rotates(x, cos, sin, backend)


def rotates_inside(problem: Attention, rotary: Rotary) -> bool:
    """Whether the pass that quantises q and k of a dense problem rotates them too."""
    return choose(problem) != "tiled" and cuda.rotates_inside(problem, rotary)


def _of_tokens(x: Tensor, operation: str) -> str | None:
    """The backend whose kernel moves tokens on the device of ``x``; None: the tiled one does."""
    backends = _built_backends(x.device, operation)
    return None if cuda.forced_backend() == "tiled" or not backends else backends[0]


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    inplace: bool,
    remember: Remember | None = None,
) -> tuple[Tensor, ...]:
    """Return what :func:`flash_attn._rotary.apply_rotary` does; nothing if ``inplace``."""
    backend = _of_tokens(x, "rotary")
    assert backend is not None
    how = offsets, cu_seqlens, interleaved, conjugate, inplace, remember
    return cuda.rotate(x, cos, sin, *how, backend=backend)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Make attention to some keys, in place, that to all: ``part`` is attention to the others.

    ``out`` and ``part`` are (batch, rows, nheads, dim), their log-sum-exps (batch, nheads, rows).
    """
    backend = _of_tokens(out, "merge")
    if backend is not None and cuda.merges(out, lse, part, part_lse, backend):
        cuda.merge_into(out, lse, part, part_lse, backend)
        return
    lse = lse.mT[..., None]
    merged = merge(out, lse, part, part_lse.mT[..., None])
    for x, value in zip((out, lse), merged, strict=True):
        x.copy_(value)


def _forced_backend(problem: Attention, forced: str, operation: str) -> str:
    """``forced``, or for a backward that it lacks the best of the lesser backends that have it."""
    if forced == "tiled":
        return forced
    if problem.headdim > MAX_HEADDIM or problem.headdim_v > MAX_HEADDIM:
        raise NotImplementedError(
            f"the {forced} backend takes head dimensions of q, k and v up to {MAX_HEADDIM}, "
            f"got {problem.headdim} and {problem.headdim_v}; use_backend('tiled') takes any"
        )
    device = problem.q.device
    if forced not in _built_backends(device):
        built = "" if forced in cuda.backends() else " (it was not built)"
        raise NotImplementedError(
            f"the {forced} backend cannot run on {device}{built}; use_backend('tiled') does this"
        )
    lesser = BACKENDS[1 : BACKENDS.index(forced) + 1]
    has_it = [x for x in _built_backends(device, operation) if x in lesser]
    backend = has_it[0] if has_it else forced
    if operation == "backward":
        backend = next((x for x in has_it if _covers(x, problem, operation)), backend)
    if reason := cuda.unsupported(problem, backend, operation):
        other = next(
            x
            for x in (*_built_backends(device, operation), "tiled")
            if x != backend and _covers(x, problem, operation)
        )
        raise NotImplementedError(
            f"the {forced} backend {reason}; use_backend({other!r}) does this"
        )
    return backend


def _covers(name: str, problem: Attention, operation: str) -> bool:
    return name == "tiled" or cuda.unsupported(problem, name, operation) is None


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return device


@cache
def _built_backends(device: torch.device, operation: str | None = None) -> tuple[str, ...]:
    """The compiled kernel backends that run on ``device``, best first; those with an operation."""
    if device.type != "cuda" or torch.version.cuda is None or not cuda.available():
        return ()
    if not torch.cuda.is_available():  # no driver: nothing runs on such a device
        return ()
    capability = torch.cuda.get_device_capability(device)
    runs = {"sm90": capability == (9, 0), "sm80": capability >= (8, 0)}
    built = cuda.backends(operation)
    return tuple(backend for backend, can in runs.items() if can and backend in built)
