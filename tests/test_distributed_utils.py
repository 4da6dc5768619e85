"""Collectives, their gradients and cross-entropy of a split vocabulary, on two processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.utils import distributed

WORLD_SIZE = 2
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def of_all_ranks(*shape: int) -> Tensor:
    """What each rank has: the same numbers on every rank."""
    return torch.randn(WORLD_SIZE, *shape, generator=torch.Generator().manual_seed(3))


def all_gather(rank: int, group: dist.ProcessGroup) -> None:
    inputs, douts = of_all_ranks(3, 4), of_all_ranks(WORLD_SIZE * 3, 4)
    x = inputs[rank].clone().requires_grad_()
    out = distributed.all_gather(x, group)
    assert torch.equal(out, inputs.flatten(0, 1))
    out.backward(douts[rank])
    # The sum of all losses has this gradient.
    torch.testing.assert_close(x.grad, douts.sum(0)[3 * rank : 3 * rank + 3])

    out, handle = distributed.all_gather_raw(inputs[rank].t(), None, async_op=True)
    assert handle is not None
    handle.wait()
    assert torch.equal(out, torch.cat([x.t() for x in inputs]))
    out, handle = distributed.all_gather_raw(torch.tensor([rank]), group)
    assert handle is None and out.tolist() == [0, 1] and out.dtype == torch.int64


def reduce_scatter(rank: int, group: dist.ProcessGroup) -> None:
    inputs, douts = of_all_ranks(6, 2), of_all_ranks(3, 2)
    x = inputs[rank].clone().requires_grad_()
    out = distributed.reduce_scatter(x, group)
    torch.testing.assert_close(out, inputs.sum(0)[3 * rank : 3 * rank + 3])
    out.backward(douts[rank])
    assert torch.equal(x.grad, douts.flatten(0, 1))

    out, handle = distributed.reduce_scatter_raw(inputs[rank], group, async_op=True)
    assert handle is not None
    handle.wait()
    torch.testing.assert_close(out, inputs.sum(0)[3 * rank : 3 * rank + 3])
    with pytest.raises(ValueError, match=r"input_ must have a multiple of 2 .*got shape \(5, 2\)"):
        distributed.reduce_scatter_raw(inputs[rank][:5], group)


def all_reduce(rank: int, group: dist.ProcessGroup) -> None:
    inputs, dout = of_all_ranks(4), torch.randn(4)
    x = inputs[rank].clone().requires_grad_()
    squares = x.exp()  # exp keeps its result, which must stay
    out = distributed.all_reduce(squares, group)
    torch.testing.assert_close(out, inputs.exp().sum(0))
    out.backward(dout)
    torch.testing.assert_close(x.grad, dout * inputs[rank].exp())

    x = inputs[rank].clone()
    out, handle = distributed.all_reduce_raw(x, group, async_op=True)
    assert handle is not None
    handle.wait()
    torch.testing.assert_close(x, inputs.sum(0))
    assert out.data_ptr() == x.data_ptr()


def parameters(rank: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(rank)
    model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("b", "a", "own")})
    for p in [*model["a"].parameters(), model["b"].weight]:
        p._shared_params = p._sequence_parallel = True
    own = model["own"].weight.clone()
    distributed.sync_shared_params(model, group)
    first, _ = distributed.all_gather_raw(model["a"].weight.detach()[None], group)
    assert torch.equal(first[0], first[1])
    different, _ = distributed.all_gather_raw(model["own"].weight.detach()[None], group)
    assert not torch.equal(different[0], different[1]) and torch.equal(own, model["own"].weight)

    with pytest.raises(ValueError, match="parameter a.bias must have a gradient"):
        distributed.allreduce_sequence_parallel_grad(model, group)
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    distributed.allreduce_sequence_parallel_grad(model, group)
    for p in model.parameters():
        expected = 3.0 if hasattr(p, "_sequence_parallel") else rank + 1.0
        assert p.grad is not None and (p.grad == expected).all()
    distributed.allreduce_sequence_parallel_grad(nn.Linear(2, 2), group)  # nothing is marked


def split_vocabulary(rank: int, group: dist.ProcessGroup) -> None:
    rows, classes = 7, 10
    logits = of_all_ranks(rows, classes // 2).transpose(0, 1).flatten(1)
    labels = torch.tensor([0, 4, 5, 9, -100, 2, 7])
    dlosses = torch.randn(rows, generator=torch.Generator().manual_seed(4))
    mine = slice(rank * classes // 2, (rank + 1) * classes // 2)
    for scale, smoothing, z, inplace in (
        (1.0, 0.0, 0.0, False),
        (0.7, 0.1, 0.0, True),
        (1.3, 0.2, 0.1, False),
    ):
        exact = logits.double().requires_grad_()
        expected = F.cross_entropy(
            exact * scale, labels, reduction="none", label_smoothing=smoothing
        )
        expected_z = z * (exact * scale).logsumexp(1).square() * (labels != -100)
        (expected + expected_z).backward(dlosses.double())
        x = logits[:, mine].clone().requires_grad_()
        losses, z_losses = cross_entropy_loss(
            x, labels, None, smoothing, scale, z, -100, inplace, group
        )
        torch.testing.assert_close(losses, (expected + expected_z).float())
        torch.testing.assert_close(z_losses, expected_z.float())
        losses.backward(dlosses)
        assert exact.grad is not None
        torch.testing.assert_close(x.grad, exact.grad[:, mine].float())

    x = logits[:, mine].clone()
    lse = x.logsumexp(1)
    torch.testing.assert_close(
        cross_entropy_loss(x, labels, lse, process_group=group)[0],
        F.cross_entropy(logits, labels, reduction="none"),
    )
    loss = CrossEntropyLoss(process_group=group)(x, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))
    with pytest.raises(ValueError, match=r"labels must be in \[0, 10\).*got 12"):
        cross_entropy_loss(x, labels + 3, process_group=group)


CHECKS: dict[str, Callable[[int, dist.ProcessGroup], None]] = {
    check.__name__: check
    for check in (all_gather, reduce_scatter, all_reduce, parameters, split_vocabulary)
}


def work(rank: int, folder: str) -> None:
    """One process: all checks, each of which leaves a file if it passes."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(minutes=1),
    )
    group = dist.new_group()
    for name, check in CHECKS.items():
        check(rank, group)
        Path(folder, f"{name}-{rank}").touch()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Exception | None]:
    """Where passed checks are noted, and what stopped the processes."""
    folder = tmp_path_factory.mktemp("ranks")
    try:
        torch.multiprocessing.spawn(work, (str(folder),), nprocs=WORLD_SIZE)
    except Exception as error:
        return folder, error
    return folder, None


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_processes(name: str, processes: tuple[Path, Exception | None]) -> None:
    folder, error = processes
    if not all((folder / f"{name}-{rank}").exists() for rank in range(WORLD_SIZE)):
        pytest.fail(f"not passed on every rank: {error}")


@pytest.mark.parametrize("arguments", [(10, 3), (12, 4), (64, 3, 8), (3, 4), (24, 5, 4)], ids=str)
def test_dim_for_local_rank(arguments: tuple[int, ...]) -> None:
    dim, world_size, multiple_of = (*arguments, 1)[:3]
    parts = [
        distributed.get_dim_for_local_rank(dim, world_size, rank, *arguments[2:])
        for rank in range(world_size)
    ]
    assert sum(parts) == dim and parts == sorted(parts, reverse=True)
    assert parts[0] - parts[-1] in (0, multiple_of)
