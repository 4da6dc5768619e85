"""What the tests of clients share: the bound of half precision, counted calls, processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

DEVICE = os.environ.get("FLASH_ATTN_CLIENTS_DEVICE", "cpu")  # or "cuda"

# A language model of transformers.
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}


def assert_as_good_as_eager(flash: Tensor, eager: Tensor, exact: Tensor, name: str = "") -> None:
    """At most twice the client's own rounding error, which eager attention in bfloat16 has.

    `exact` is the same computation in float32. Both 16-bit runs round to bfloat16 between layers,
    in other places, so each differs from `exact` by as much. The floor is one unit in the last
    place of bfloat16, 2^-8, of the largest element.
    """
    exact = exact.float()
    error, eager_error = ((x.float() - exact).abs().max() for x in (flash, eager))
    bound = 2 * eager_error + 2**-8 * exact.abs().max()
    assert error <= bound, f"{name}: error {error:.3g}, eager attention's {eager_error:.3g}"


def assert_gradients(flash: Any, eager: Any, exact: Any) -> None:
    """Every parameter's gradient, of three copies of one module.

    A bias of the keys shifts all scores of a row alike: its gradient is 0, and what is found is
    rounding alone.
    """
    of_eager, of_exact = (dict(x.named_parameters()) for x in (eager, exact))
    for name, parameter in flash.named_parameters():
        assert (parameter.grad is None) == (of_exact[name].grad is None), name
        if parameter.grad is not None and not name.endswith("k_proj.bias"):
            grads = (x[name].grad for x in (of_eager, of_exact))
            assert_as_good_as_eager(parameter.grad, *grads, name=name)


# Of the one sequence that processes share.
SEQLEN, HEADS, HEADDIM = 32, 4, 16


def whole(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Causal attention by its definition, and its gradients: (1, seqlen, heads, headdim)."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * HEADDIM**-0.5
    scores = scores.masked_fill(torch.ones(SEQLEN, SEQLEN).triu(1).bool(), -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


class Calls(list[str]):
    """ "forward" or "backward" for each time that attention ran."""


def _process(rank: int, size: int, port: int, function: Callable[[int, int], None]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    try:
        function(rank, size)
    finally:
        torch.distributed.destroy_process_group()


def on_processes(size: int, function: Callable[[int, int], None]) -> None:
    """Run function(rank, size) on gloo processes; an exception in any of them is raised here."""
    if DEVICE != "cpu":
        pytest.skip("its processes are on the CPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_process, (size, port, function), nprocs=size)
