"""Train a small Llama on sequences that several processes share.

    torchrun --nproc-per-node 2 examples/long_context.py --tokens 131072           # a ring of GPUs
    torchrun --nproc-per-node 2 examples/long_context.py --method ulysses          # heads divided
    torchrun --nproc-per-node 4 examples/long_context.py --method mesh --row 2     # both
    torchrun --nproc-per-node 2 examples/long_context.py --tokens 512 --check      # here: CPUs

Each process has some of the tokens in all layers; only attention sees others. The rotary embedding
takes the places of the process's tokens in the sequence. A process's loss is its part of the mean
over all tokens, so the sum of all processes' gradients is the gradient of the sequence. --check
compares the first step with one process that has all tokens. Prints tokens/s of a step and the
memory of a GPU. It runs on GPUs with NCCL where there are any, else on CPUs with gloo.
"""

import argparse
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from serve import HEADDIM, VOCABULARY, Llama
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flash_attn import flash_attn_func
from flash_attn.distributed import (
    position_ids,
    ring_flash_attn_func,
    shard,
    ulysses_flash_attn_func,
)
from flash_attn.layers.rotary import apply_rotary_emb


def step(model: Llama, tokens: Tensor, targets: Tensor, places: Tensor, attend: Any) -> Tensor:
    """Return the sum of the loss over these tokens; the gradients are added to the weights'."""
    frequencies = 500_000.0 ** -(torch.arange(0, HEADDIM, 2, device=tokens.device) / HEADDIM)
    angles = torch.outer(places, frequencies)
    dtype = model.embed.weight.dtype
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def attend_in(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (apply_rotary_emb(x, cos, sin) for x in (q, k))
        return attend(q, k, v, causal=True)

    hidden = model(tokens, attend_in)
    logits = partial(checkpoint, model.head, use_reentrant=False)  # too many for all tokens at once
    losses = [
        F.cross_entropy(logits(x)[0].float(), y[0], reduction="sum")
        for x, y in zip(hidden.split(8192, 1), targets.split(8192, 1), strict=True)
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach()


def check(model: Llama, loss: Tensor, tokens: Tensor, targets: Tensor) -> None:
    """Stop if one process with all tokens has another loss or gradient."""
    ours = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    places = torch.arange(tokens.shape[1], device=tokens.device)
    expected = step(model, tokens, targets, places, flash_attn_func) / tokens.numel()
    eps = torch.finfo(model.embed.weight.dtype).eps
    worst = abs(loss / expected - 1).item()
    for x, gradient in zip(model.parameters(), ours, strict=True):
        assert x.grad is not None
        x.grad /= tokens.numel()
        worst = max(worst, ((x.grad - gradient).norm() / x.grad.norm()).item())
        x.grad = gradient
    if not worst < 16 * eps:  # each tensor's error relative to its norm
        raise SystemExit(f"one process has other gradients: relative error {worst:.2g}")
    if dist.get_rank() == 0:
        print(f"one process has the same loss and gradients, to {worst:.1g}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131072, help="of the sequence")
    parser.add_argument("--method", choices=["ring", "ulysses", "mesh"], default="ring")
    parser.add_argument("--row", type=int, default=8, help="processes of a row of the mesh")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64 times --group")
    parser.add_argument("--group", type=int, default=4, help="query heads of a key head")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare with one process")
    args = parser.parse_args(argv)

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if on_gpu else "cpu"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks, order = dist.get_world_size(), "contiguous" if args.method == "ulysses" else "zigzag"
    group: Any = dist.group.WORLD
    attend: Any = partial(ring_flash_attn_func, seqlen=args.tokens)
    if args.method == "ulysses":
        attend = partial(ulysses_flash_attn_func, seqlen=args.tokens)
    elif args.method == "mesh":
        if ranks % args.row:
            parser.error(f"--row must divide the number of processes, {ranks}, got {args.row}")
        group = init_device_mesh(device, (ranks // args.row, args.row))
        attend = partial(ring_flash_attn_func, group=group, seqlen=args.tokens)

    torch.manual_seed(0)  # the same weights and tokens everywhere
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = Llama(args.layers, args.hidden, args.group).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(VOCABULARY, (1, args.tokens + 1), device=device)
    whole = text[:, :-1], text[:, 1:]
    tokens, targets = (shard(x, 1, group, order) for x in whole)  # type: ignore[arg-type]
    places = position_ids(args.tokens, group, order, device=device)  # type: ignore[arg-type]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    times = []
    for i in range(args.steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = step(model, tokens, targets, places, attend) / args.tokens
        dist.all_reduce(loss)
        for x in model.parameters():
            if x.grad is not None:
                x.grad /= args.tokens
                dist.all_reduce(x.grad)
        if args.check and i == 0:
            check(model, loss, *whole)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {i}: loss {loss.item():.4f}")
        times.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        # The first step loads kernels, agrees on the call and connects the processes.
        best = min(times[1:] or times)
        print(
            f"{args.method} of {ranks}, {args.tokens} tokens: {args.tokens / best:.0f} tokens/s",
            f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB a GPU" if on_gpu else "",
            sep="",
        )
    if not on_gpu:
        # PyTorch 2.4 ends gloo's threads while it holds the interpreter's lock, which a thread that
        # drops the last sum's tensor wants. Here all are done with theirs.
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
