"""Continuous batching: requests of any lengths join and leave a batch over one paged KV cache.

    python examples/serve.py                # tokens/s
    python examples/serve.py --check        # and whether the tokens are right
    python examples/serve.py --contiguous   # a cache with room for the longest request in each slot
    python examples/serve.py --eager        # no CUDA graph

A small Llama with random weights decodes greedily. A request takes a free slot of the batch and
pages for all its tokens; its prompt is one call of flash_attn_with_kvcache, then it gets a token in
each step of the batch. That one call rotates, appends and attends, for prompts and steps alike.

The step always has the shape of the full batch: slots that are not in use have length -1. So on a
GPU all steps are one CUDA graph, which reads lengths and pages where they are replaced. It also
makes the check exact: kernels are chosen by shapes alone, and compute each row of the batch from
that row alone, so a request gets the same bits beside others as by itself, and the first token that
differs is an error and no rounding.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb

HEADDIM = 64
VOCABULARY = 1000
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k and v before the rotary embedding


class Layer(nn.Module):
    def __init__(self, hidden: int, group: int) -> None:
        super().__init__()
        self.heads = hidden // HEADDIM, hidden // HEADDIM // group
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-6) for _ in range(2))
        self.qkv = nn.Linear(hidden, HEADDIM * (self.heads[0] + 2 * self.heads[1]), bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        nheads, nheads_kv = self.heads
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEADDIM))
        x = x + self.out(attend(*qkv.split([nheads, nheads_kv, nheads_kv], dim=2)).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers: int, hidden: int, group: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Layer(hidden, group) for _ in range(layers))
        self.kv_shape = hidden // HEADDIM // group, HEADDIM  # of a token in each layer's K and V
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        for module in self.modules():  # weights with which each layer changes what comes out
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(self, tokens: Tensor, attend_in: Callable[..., Tensor]) -> Tensor:
        """Tokens (batch, seqlen) -> what `head` turns into logits, (batch, seqlen, hidden)."""
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, partial(attend_in, i))
        return self.norm(x)


@dataclass
class Request:
    prompt: list[int]
    new_tokens: int
    tokens: list[int] = field(default_factory=list)  # generated

    def __len__(self) -> int:
        return len(self.prompt) + self.new_tokens

    def again(self) -> "Request":
        return Request(self.prompt, self.new_tokens)


class Cache:
    """Pages, which requests take when they join and give back when they leave.

    In a contiguous cache a page holds the longest request, and is found by cache_batch_idx.
    """

    def __init__(self, batch: int, longest: int, page_size: int | None) -> None:
        self.page_size = page_size or longest
        each = -(-longest // self.page_size)
        # With small pages, less than all slots could want: requests wait for pages, too.
        self.free = list(range(batch if each == 1 else max(each, batch * each * 3 // 4)))
        self.shape = len(self.free), self.page_size
        self.paged = page_size is not None
        self.table = torch.full((batch, each), -1, dtype=torch.int32)

    def take(self, slot: int, length: int) -> bool:
        """Pages for so many tokens, if there are enough."""
        wanted = -(-length // self.page_size)
        if wanted > len(self.free):
            return False
        for i in range(wanted):
            self.table[slot, i] = self.free.pop()
        return True

    def give_back(self, slot: int) -> None:
        self.free += [page for page in self.table[slot].tolist() if page >= 0]
        self.table[slot] = -1

    def where(self, table: Tensor) -> dict[str, Any]:
        return {"block_table": table} if self.paged else {"cache_batch_idx": table[:, 0]}


def captured(
    function: Callable[..., Tensor], device: torch.device, *inputs: Tensor
) -> Callable[..., Tensor]:
    """The function as one CUDA graph, of tensors of the shapes and dtypes of ``inputs``."""
    places = [x.to(device) for x in inputs]  # where the graph finds its inputs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        function(*places)  # what first calls set up is not captured
        with torch.cuda.graph(graph):
            result = function(*places)

    def replay(*inputs: Tensor) -> Tensor:
        for place, x in zip(places, inputs, strict=True):
            place.copy_(x)
        graph.replay()
        return result

    return replay


class Server:
    def __init__(self, model: Llama, cache: Cache, batch: int, graph: bool) -> None:
        weight = model.head.weight
        self.model, self.cache, self.device = model, cache, weight.device
        self.k, self.v = weight.new_empty(2, len(model.layers), *cache.shape, *model.kv_shape)
        frequencies = 10000 ** (-torch.arange(0, HEADDIM, 2) / HEADDIM)
        rows = cache.page_size * cache.table.shape[1]  # that a sequence may have
        angles = torch.outer(torch.arange(rows), frequencies).to(weight.device)
        self.rotary = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
        self.lengths = torch.full((batch,), -1, dtype=torch.int32)  # in the cache, -1: not in use
        self.step: Callable[..., Tensor] = self.next_tokens
        if graph:
            inputs = torch.zeros(batch, 1, dtype=torch.long), self.lengths, cache.table
            self.step = captured(self.next_tokens, self.device, *inputs)

    @torch.inference_mode()
    def next_tokens(self, *inputs: Tensor) -> Tensor:
        """Append tokens (slots, seqlen) and attend to all there are. The next token of each slot.

        The slots' lengths and rows of the page table are the other inputs.
        """
        tokens, lengths, table = (x.to(self.device) for x in inputs)
        where = self.cache.where(table)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_with_kvcache(
                *(q, self.k[layer], self.v[layer], k, v, *self.rotary, lengths),
                **where,
                causal=True,
                rotary_interleaved=False,
            )

        return self.model.head(self.model(tokens, attend)[:, -1]).argmax(-1)

    def feed(self, run: Callable[..., Tensor], tokens: Tensor, slots: slice) -> list[int]:
        lengths = self.lengths[slots]
        result = run(tokens, lengths, self.cache.table[slots]).tolist()
        lengths += (lengths >= 0) * tokens.shape[1]
        return result

    def serve(self, requests: Sequence[Request]) -> None:
        """Fill in the requests' tokens."""
        waiting, running = deque(requests), dict[int, Request]()
        free = list(range(len(self.lengths)))
        while waiting or running:
            while waiting and free and self.cache.take(free[-1], len(waiting[0])):
                slot = free.pop()
                running[slot] = waiting.popleft()
                self.lengths[slot] = 0
                prompt = torch.tensor([running[slot].prompt])
                running[slot].tokens += self.feed(self.next_tokens, prompt, slice(slot, slot + 1))
            last = torch.zeros(len(self.lengths), 1, dtype=torch.long)
            for slot, request in running.items():
                last[slot] = request.tokens[-1]
            tokens = self.feed(self.step, last, slice(None))
            for slot, request in list(running.items()):
                if len(request.tokens) < request.new_tokens:
                    request.tokens.append(tokens[slot])
                if len(request.tokens) == request.new_tokens:
                    del running[slot]
                    self.lengths[slot] = -1
                    self.cache.give_back(slot)
                    free.append(slot)

    @torch.inference_mode()
    def lead(self, request: Request) -> float:
        """By how much another token than the request's was ever likelier, without any cache.

        In standard deviations of the logits. 0 but for rounding: this is the model's whole pass
        over prompt and tokens at once, whose sums have another order.
        """
        cos, sin = self.rotary

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = (apply_rotary_emb(x, cos, sin) for x in (q, k))
            return flash_attn_func(q, k, v, causal=True)

        tokens = torch.tensor([request.prompt + request.tokens], device=self.device)
        hidden = self.model(tokens[:, :-1], attend)[0, len(request.prompt) - 1 :]
        logits = self.model.head(hidden).float()
        chosen = logits.gather(1, tokens[0, len(request.prompt) :, None])
        return ((logits.amax(1, keepdim=True) - chosen) / logits.std(1, keepdim=True)).max().item()


def check(server: Server, requests: Sequence[Request], tolerance: float) -> None:
    """Raise SystemExit where a request has other tokens than alone, or than without a cache."""
    for number, request in enumerate(requests):
        alone = request.again()
        server.serve([alone])
        if alone.tokens != request.tokens:
            at = [a == b for a, b in zip(alone.tokens, request.tokens, strict=True)].index(False)
            raise SystemExit(
                f"request {number}, token {at}: {request.tokens[at]} in the batch, "
                f"{alone.tokens[at]} alone"
            )
        if (lead := server.lead(request)) > tolerance:
            raise SystemExit(
                f"request {number}: without a cache another token is likelier by {lead:.3f} "
                f"standard deviations of the logits, more than rounding explains ({tolerance})"
            )
    print(f"{len(requests)} requests: the same tokens one by one, and right without a cache")


def main(argv: Sequence[str] | None = None) -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add: Callable[..., Any] = parser.add_argument
    add("--device", default="cuda" if has_gpu else "cpu")
    add("--requests", type=int, default=64 if has_gpu else 8)
    add("--batch", type=int, default=16 if has_gpu else 3, help="requests that run at once")
    add("--prompt", type=int, default=2048 if has_gpu else 60, help="tokens of the longest prompt")
    add("--new", type=int, default=256 if has_gpu else 12, help="most tokens of an answer")
    add("--layers", type=int, default=8 if has_gpu else 2)
    add(
        "--hidden",
        type=int,
        default=2048 if has_gpu else 256,
        help="a multiple of 64 times --group",
    )
    add("--group", type=int, default=4 if has_gpu else 2, help="query heads of a key head")
    add("--page-size", type=int, default=16)
    add("--contiguous", action="store_true", help="a static cache in place of pages")
    add("--eager", action="store_true", help="steps that are no CUDA graph")
    add(
        "--check",
        action="store_true",
        help="compare with one request at a time; fail if it differs",
    )
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = Llama(args.layers, args.hidden, args.group).to(args.device, dtype)
    longest = args.prompt + args.new
    cache = Cache(args.batch, longest, None if args.contiguous else args.page_size)
    server = Server(model, cache, args.batch, args.device.startswith("cuda") and not args.eager)

    def random(most: int) -> int:
        return int(torch.randint(-(-most // 4), most + 1, ()))

    requests = [
        Request(torch.randint(VOCABULARY, (random(args.prompt),)).tolist(), random(args.new))
        for _ in range(args.requests)
    ]
    server.serve([requests[0].again()])  # what first calls set up is not timed
    started = time.perf_counter()
    server.serve(requests)
    seconds = time.perf_counter() - started
    read, made = sum(len(x.prompt) for x in requests), sum(len(x.tokens) for x in requests)
    print(
        f"{len(requests)} requests, {read} tokens read and {made} generated in {seconds:.2f} s: "
        f"{made / seconds:.0f} tokens/s"
    )
    if args.check:
        check(server, requests, 0.25 if dtype == torch.bfloat16 else 1e-3)


if __name__ == "__main__":
    main()
