"""Attention that several GPUs share: measured, and predicted by a model of its cost.

    torchrun --nproc-per-node 4 -m benchmarks.context_parallel --tokens 32768 131072   # measures
    python -m benchmarks.context_parallel --simulate    # a table and a plot of efficiency
    python -m benchmarks.context_parallel --anchors     # the model beside measurements

Efficiency is the time of one GPU with all tokens over the GPUs' number and their time. Measured too
are PyTorch's context_parallel and, where it is installed, ring-flash-attn. Without a GPU it runs on
CPUs with gloo: to see that it runs, not for its figures. The model's formulas and assumptions are
in docs/scale-out.md. It knows the device's work only: host time, which dominates short sequences,
is not in it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks import plots, report
from benchmarks.timing import Call, Sampler, milliseconds, time_in_turn
from flash_attn import flash_attn_func
from flash_attn.demo import with_peak_memory
from flash_attn.distributed import ring_flash_attn_func, shard, ulysses_flash_attn_func
from flash_attn.distributed._heads import Division
from flash_attn.distributed._layout import Layout, Order
from flash_attn.distributed._plan import Block, Mask, Plan, Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes. Seconds, bytes and operations a second of one GPU; an element is a number."""

    forward_rate: float = 790e12  # of the sm90 kernels at head dim 128, once blocks are large
    backward_rate: float = 690e12
    memory: float = 4.2e12  # a device copy, of what it reads and writes
    forward_bytes: float = 8.0  # q and out, beside the matrix products; an element of q
    backward_bytes: float = 20.0  # delta, and dq in float32
    launch: float = 10e-6  # gaps and ends of a block's kernels
    of_node: int = 8
    node_link: float = 300e9  # a direction; NVLink's 450 less what messages reach
    network_link: float = 45e9  # one 400 Gbit/s adapter for each GPU
    node_latency: float = 20e-6  # of a group of messages
    network_latency: float = 40e-6

    def messages(self, sizes: dict[bool, float]) -> float:
        """Time of messages of so many bytes outside (False) and inside (True) of the node."""
        rates = {True: self.node_link, False: self.network_link}
        latencies = {True: self.node_latency, False: self.network_latency}
        return max((latencies[x] + n / rates[x] for x, n in sizes.items() if n), default=0.0)


@dataclass(frozen=True)
class Workload:
    """Self-attention of one sequence."""

    tokens: int
    nheads: int = 16
    nheads_kv: int = 16
    headdim: int = 128
    causal: bool = True
    window: int = -1
    itemsize: int = 2

    @property
    def mask(self) -> Mask:
        return Mask(self.window, 0 if self.causal else self.window)


@dataclass(frozen=True)
class Way:
    """How GPUs share a sequence."""

    ring: int = 1
    row: int = 1  # that divide heads
    order: Order = "zigzag"

    @property
    def gpus(self) -> int:
        return self.ring * self.row


def visible(block: Block) -> int:
    """Pairs of a query and a key that see each other."""
    rows, cols = len(block.rows), len(block.cols)
    left, right = block.window

    def triangle(longest: int) -> int:
        """1 + 2 + ... up to the longest line hidden in a corner, none longer than the block."""
        n = max(longest, 0)
        return n * (n + 1) // 2 - max(n - cols, 0) * (max(n - cols, 0) + 1) // 2

    hidden = triangle(rows - 1 - right) if right >= 0 else 0
    if left >= 0:
        hidden += triangle(cols - 1 - left) - triangle(cols - 1 - left - rows)
    return rows * cols - hidden


# Bytes that are moved for an element to merge a part of the output, or to add one of a gradient.
# The first of so many parts are kept in 16 bits; with more it is float32, converted twice.
MOST_IN_16_BITS = {"merge": 2, "add": 3}


def moved_by_sums(kind: str, parts: int) -> tuple[float, float]:
    """For each part; for all of them once."""
    return (6.0, 0.0) if parts <= MOST_IN_16_BITS[kind] else (10.0, 12.0)


@cache
def seconds(work: Workload, way: Way, machine: Machine = Machine()) -> float:
    """Forward and backward of the slowest of five places of the ring."""
    heads, heads_kv = work.nheads / way.row, max(work.nheads_kv / way.row, 1)
    layout = Layout(work.tokens, way.ring, way.row, way.order)
    places = {round(i * (way.ring - 1) / 4) for i in range(5)}
    slowest = max(
        of_place(Plan(layout, work.mask, place), place, heads, heads_kv, work, way, machine)
        for place in places
    )
    return slowest + exchange_of_heads(work, way, machine)


def of_place(
    plan: Plan,
    place: int,
    heads: float,
    heads_kv: float,
    work: Workload,
    way: Way,
    machine: Machine,
) -> float:
    """The timeline of a place, its partners being as far as it is."""
    row = heads * work.headdim  # elements of a token of q, of k
    row_kv = heads_kv * work.headdim
    alone = way.ring == 1
    first, *others, last = map(len, plan.backward)
    own = first + last
    merge, convert_out = moved_by_sums("merge", sum(len(step.blocks) for step in plan.steps))
    add_q, convert_q = moved_by_sums("add", own + sum(others))
    add_kv, convert_kv = moved_by_sums("add", own + len(others))
    places_of_node = max(1, machine.of_node // way.row)

    def size(step: Step, other: int, arrives: bool) -> tuple[bool, float]:
        rows = step.rows if arrives else sum(map(len, step.sends))
        is_near = place // places_of_node == other % way.ring // places_of_node
        return is_near, rows * row_kv * 2 * work.itemsize

    def messages(distance: int, back: int | None = None) -> float:
        """K and V of the next step, and dK and dV of the last one, in one group."""
        sizes = []
        for arriving in (True, False):  # a link works in both directions at once
            of_direction = {True: 0.0, False: 0.0}
            for step_distance, is_back in ((distance, False), (back, True)):
                if step_distance is not None and 1 <= step_distance < way.ring:
                    step = plan.steps[step_distance]
                    comes = arriving != is_back
                    near, bytes_ = size(
                        step, place + (-step_distance if comes else step_distance), comes
                    )
                    of_direction[near] += bytes_
            sizes.append(machine.messages(of_direction))
        return max(sizes)

    def block_time(block: Block, products: int, rate: float, moved: float) -> float:
        operations = products * 2 * visible(block) * row
        return machine.launch + operations / rate + len(block.rows) * row * moved / machine.memory

    time, merged = 0.0, False
    for distance, step in enumerate(plan.steps):
        compute = 0.0
        for block in step.blocks:
            compute += block_time(block, 2, machine.forward_rate, machine.forward_bytes)
            compute += merge * len(block.rows) * row / machine.memory if merged else 0.0
            merged = not alone
        time += max(compute, messages(distance + 1))
    for distance, blocks in enumerate(plan.backward):
        compute = 0.0
        for block in blocks:
            compute += block_time(block, 5, machine.backward_rate, machine.backward_bytes)
            compute += 0.0 if alone else add_q * len(block.rows) * row / machine.memory
        if distance >= 2:
            returned = sum(map(len, plan.steps[distance - 1].sends))
            compute += 2 * add_kv * row_kv * returned / machine.memory
        time += max(compute, messages(distance + 1, distance - 1))
    if alone:
        return time
    converted = (convert_out + convert_q) * row + 2 * convert_kv * row_kv
    return time + converted * plan.tokens / machine.memory


def exchange_of_heads(work: Workload, way: Way, machine: Machine) -> float:
    """What a rank's kernels wait for, of Ulysses' exchanges and their gradients."""
    if way.row == 1:
        return 0.0
    tokens = work.tokens // way.gpus
    parts = Division(0, (tokens,) * way.row, work.nheads, work.nheads_kv).parts
    queries = [sum(map(len, part.heads)) for part in parts]
    keys = [sum(map(len, part.heads_kv)) for part in parts]
    inside = min(machine.of_node, way.row)

    def exchange(heads: int) -> float:
        """Of so many heads of all ranks; they are also read, and written in another order."""
        moved = tokens * heads * work.headdim * work.itemsize
        near = moved * (inside - 1) / way.row
        far = moved * (way.row - 1) / way.row - near
        return machine.messages({True: near, False: far}) + 2 * moved / machine.memory

    of_first = queries[0] + 2 * keys[0]
    forward = exchange(of_first) + exchange(work.nheads)
    return forward + exchange(queries[-1]) + exchange(of_first)


def efficiency(work: Workload, way: Way, machine: Machine = Machine()) -> float:
    return seconds(work, Way(), machine) / (way.gpus * seconds(work, way, machine))


def ways(gpus: int, work: Workload) -> Iterator[Way]:
    """All rings of rows that the heads allow."""
    for row in (2**n for n in range(11)):
        if gpus % row == 0 and work.nheads % row == 0:
            yield Way(gpus // row, row)


def best(gpus: int, work: Workload, machine: Machine) -> Way:
    return min(ways(gpus, work), key=lambda way: seconds(work, way, machine))


# ---- what was measured, and the model ------------------------------------------------------------

# 16 heads of 128, bf16, causal, forward + backward: efficiency at 32k and 128k tokens. 2 GPUs are
# H100, 4 are H200.
ANCHORS = {
    "ring_flash_attn_func": (Way(2, 1), (0.93, 0.97)),
    "ulysses_flash_attn_func": (Way(1, 2), (0.93, 0.98)),
    "Ulysses, by hand on these kernels": (Way(1, 4), (0.88, 0.95)),
    "ring-flash-attn, ring": (Way(4, 1, "contiguous"), (0.47, 0.54)),
    "ring-flash-attn, zigzag": (Way(4, 1), (0.21, 0.78)),
    "PyTorch context_parallel, cuDNN": (Way(4, 1), (0.58, 0.92)),
}


def print_anchors() -> None:
    print("efficiency at 32k / 128k tokens: measured, and of the model of device time")
    for name, (way, measured) in ANCHORS.items():
        model = [efficiency(Workload(tokens), way) for tokens in (2**15, 2**17)]
        shown = [" / ".join(f"{x:.2f}" for x in pair) for pair in (measured, model)]
        print(f"{way.gpus} GPUs, {name:<34} measured {shown[0]}   model {shown[1]}")
    for tokens, of_table in ((2**12, (700e12, 603e12)), (2**14, (795e12, 684e12))):
        work = Workload(tokens)
        one = seconds(work, Way()) * 1e3
        products = 2 * tokens**2 / 2 * work.nheads * work.headdim
        table = sum(n * products / rate for n, rate in zip((2, 5), of_table, strict=True)) * 1e3
        times = 2**14 // tokens  # the table's batches, of 16k tokens together
        print(
            f"one GPU, {times} x {tokens} tokens: {table * times:.2f} ms, model {one * times:.2f}"
        )


def simulated(a: argparse.Namespace) -> Iterator[report.Row]:
    machine = Machine(of_node=a.of_node)
    for tokens in a.tokens:
        for gpus in a.gpus:
            work = Workload(tokens, a.nheads, a.nheads_kv, a.headdim)
            if tokens // gpus < 256:
                continue
            found: dict[str, Way] = {}
            if gpus <= a.nheads:
                found["ulysses"] = Way(1, gpus)
            found["ring"] = Way(gpus, 1)
            found["best"] = chosen = best(gpus, work, machine)
            yield {
                "tokens": tokens,
                "gpus": gpus,
                "best": f"{chosen.ring} x {chosen.row}",
                "ms": {name: seconds(work, way, machine) * 1e3 for name, way in found.items()},
                "efficiency": {
                    name: report.rounded(efficiency(work, way, machine))
                    for name, way in found.items()
                },
            }


def draw(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """What the model says, or what was measured."""
    yield "", (draw_model if "best" in data["rows"][0] else draw_measured)(data)


def draw_measured(data: dict[str, Any]) -> Figure:
    """Efficiency, a group of bars for each length."""
    rows, a = data["rows"], data["environment"]["arguments"]
    groups = {f"{plots.thousands(row['tokens'])} tokens": row["efficiency"] for row in rows}
    names = plots.names_in(groups.values())
    figure = plots.new_figure(plots.WIDTH, 3.6)
    axes = figure.subplots()
    plots.draw_bars(axes, groups, names)
    axes.set_ylabel("efficiency")
    heads = f"{a['nheads']} query and {a['nheads_kv']} key heads of {a['headdim']}, causal"
    gpus = f"{rows[0]['gpus']} x {data['environment']['device']}"
    plots.finish(figure, f"{gpus}: {heads}, forward + backward", names)
    return figure


def draw_model(data: dict[str, Any]) -> Figure:
    """Efficiency against GPUs, a panel for each way, a line for each length."""
    titles = {
        "ulysses": "heads divided (ulysses)",
        "ring": "ring",
        "best": "the best ring x heads",
    }
    figure = plots.new_figure(plots.WIDTH, 3.6)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    for each, name in zip(axes, titles, strict=True):
        for tokens in dict.fromkeys(row["tokens"] for row in data["rows"]):
            points = [
                (row["gpus"], row["efficiency"][name])
                for row in data["rows"]
                if row["tokens"] == tokens and name in row["efficiency"]
            ]
            label = f"{tokens // 2**20}M" if tokens >= 2**20 else plots.thousands(tokens)
            each.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        each.set_title(titles[name])
        each.set_xscale("log", base=2)
        ticks = sorted({row["gpus"] for row in data["rows"]})[::2]
        each.set_xticks(ticks, [str(x) for x in ticks])
        each.set_ylim(0, 1.05)
        each.grid(alpha=0.3)
    axes[0].legend(title="tokens", fontsize=8)
    figure.supxlabel("GPUs")
    figure.supylabel("efficiency")
    a = data["environment"]["arguments"]
    heads = f"{a['nheads']} query and {a['nheads_kv']} key heads of {a['headdim']}, causal"
    links = f"H200, {a['of_node']} GPUs a node, 400 Gbit/s a GPU between nodes"
    figure.suptitle(f"Model, not measured: {heads}, forward + backward\n{links}", fontsize=11)
    return figure


# ---- measured ------------------------------------------------------------------------------------


STEADY = 2**18  # tokens of the calls of a sample, together
HEAD_START = 30_000_000  # clocks before it: after a pause, a call takes the host up to 10 ms


@dataclass(frozen=True)
class Contestant:
    """An attention of several GPUs, and which tokens each has: None, all of them."""

    attend: Callable[..., Any]
    group: Any
    order: Order
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def measured(a: argparse.Namespace, device: str) -> Iterator[report.Row]:
    """A row for each length: forward + backward of one GPU and of all, in milliseconds.

    Also the memory that each of them takes at its peak, q, k, v, out and all gradients included.
    """
    ranks = dist.get_world_size()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for tokens in a.tokens:
        torch.manual_seed(0)  # alike on all ranks
        q, dout = torch.randn(2, 1, tokens, a.nheads, a.headdim, device=device, dtype=dtype)
        k, v = torch.randn(2, 1, tokens, a.nheads_kv, a.headdim, device=device, dtype=dtype)
        samplers: dict[str, Sampler] = {}
        memory: dict[str, float] = {}
        for name, x in contestants(a, ranks, device).items():
            *qkv, upstream = (
                y if x.group is None else shard(y, 1, x.group, x.order) for y in (q, k, v, dout)
            )
            leaves = [y.detach().requires_grad_() for y in qkv]
            call = Call(partial(forward_and_backward, x.attend, leaves, upstream), x.context)
            try:
                used = peak(call, device)
            except (NotImplementedError, RuntimeError, ValueError) as error:
                if dist.get_rank() == 0:
                    print(f"skipped {name}: {error}")
                continue
            memory[name] = used + sum(y.nbytes for y in (*leaves, upstream)) / 2**30
            calls = max(1, STEADY // tokens) if device == "cuda" else 1
            samplers[name] = partial(sample, call, calls, device)
        times = time_in_turn(samplers, a.rounds)
        found = torch.tensor([list(times.values()), list(memory.values())], device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)  # of the slowest rank, and of the largest
        times, memory = (dict(zip(times, x, strict=True)) for x in found.tolist())
        alone = times["one GPU"]
        yield {
            "tokens": tokens,
            "gpus": ranks,
            "ms": {name: report.rounded(x) for name, x in times.items()},
            "gib": {name: report.rounded(x) for name, x in memory.items()},
            "efficiency": {
                name: report.rounded(alone / x / ranks)
                for name, x in times.items()
                if name != "one GPU"
            },
        }


def forward_and_backward(attend: Any, leaves: list[Tensor], upstream: Tensor) -> Any:
    return torch.autograd.grad(attend(*leaves, causal=True), leaves, upstream)


def peak(call: Call, device: str) -> float:
    """GiB that a call adds at its peak; 0 on a CPU."""
    if device == "cuda":
        return with_peak_memory(call, torch.device(device))[1] / 2**30
    call()
    return 0.0


def sample(call: Call, calls: int, device: str) -> float:
    """Milliseconds of a call, of so many back to back, which all ranks begin together."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    with call.context():
        return milliseconds(call.run, calls, device, HEAD_START) / calls


def contestants(a: argparse.Namespace, ranks: int, device: str) -> dict[str, Contestant]:
    world = dist.group.WORLD
    found = {
        "one GPU": Contestant(flash_attn_func, None, "contiguous"),
        "ring": Contestant(ring_flash_attn_func, world, "zigzag"),
        "ulysses": Contestant(ulysses_flash_attn_func, world, "contiguous"),
    }
    if 1 < a.row < ranks and ranks % a.row == 0:
        mesh = init_device_mesh(device, (ranks // a.row, a.row))
        found["mesh"] = Contestant(partial(ring_flash_attn_func, group=mesh), mesh, "zigzag")
    if device == "cuda":
        from torch.distributed.tensor.experimental import context_parallel

        line = init_device_mesh(device, (ranks,))

        def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            gqa = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
            return out.transpose(1, 2)

        def within() -> AbstractContextManager[object]:
            unused = torch.empty(2 * ranks, device=device)  # it wants a buffer
            return context_parallel(line, buffers=[unused], buffer_seq_dims=[0])

        found["PyTorch"] = Contestant(sdpa, world, "zigzag", within)
    with suppress(ImportError):
        # Its adapters ask for what transformers has no more; its functions do without.
        adapters: Any = ModuleType("ring_flash_attn.adapters")
        adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
        sys.modules.setdefault("ring_flash_attn.adapters", adapters)
        from ring_flash_attn import ring_flash_attn_func as contiguous_ring
        from ring_flash_attn import zigzag_ring_flash_attn_func as zigzag_ring

        found["ring-flash-attn"] = Contestant(contiguous_ring, world, "contiguous")
        found["ring-flash-attn, zigzag"] = Contestant(zigzag_ring, world, "zigzag")
    if unknown := set(a.ways or ()) - found.keys():
        raise SystemExit(f"--ways: got {', '.join(unknown)}; there are {', '.join(found)}")
    return {name: x for name, x in found.items() if name in ("one GPU", *(a.ways or found))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("context_parallel", __doc__, argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--simulate", action="store_true", help="predict; needs no GPU")
    add("--anchors", action="store_true", help="compare the model with measurements")
    add("--tokens", nargs="+", type=int, help="of the sequence")
    add("--nheads", type=int, default=16, help="of the queries")
    add("--nheads-kv", type=int, help="of the keys; as many if not given")
    add("--headdim", type=int, default=128)
    add("--row", type=int, default=2, help="GPUs of a row of the mesh")
    add("--rounds", type=int, default=10, help="samples")
    add("--ways", nargs="+", help="what to measure beside one GPU; all if not given")
    add("--gpus", nargs="+", type=int, default=[2**n for n in range(1, 13)], help="simulated")
    add("--of-node", type=int, default=8, help="simulated: GPUs of a node")
    report.add_arguments(parser, "context-parallel")
    parser.set_defaults(folder=None)
    a = parser.parse_args(arguments)
    of_gpu = "model" if a.simulate else report.device_name()
    a.folder = a.folder or report.results_folder(of_gpu)
    a.nheads_kv = a.nheads_kv or a.nheads
    if a.replot is not None:
        plots.draw(a.replot, draw)
    elif a.anchors:
        print_anchors()
    elif a.simulate:
        a.tokens = a.tokens or [2**15, 2**17, 2**20, 2**23]
        report.print_rows(report.record(a.folder / a.output, a, simulated(a)), cells)
        plots.draw_if_possible((a.folder / a.output).with_suffix(".json"), draw)
    else:
        measure(a)


def measure(a: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    if "RANK" not in os.environ:
        raise SystemExit("measuring needs torchrun; --simulate and --anchors do not")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    a.tokens = a.tokens or ([2**15, 2**17] if on_gpu else [512])
    rows = measured(a, device)
    if dist.get_rank() == 0:
        stem = a.folder / f"{a.output}-{dist.get_world_size()}"
        print(f"{dist.get_world_size()} x {report.device_name()}, torch {torch.__version__}")
        report.print_rows(report.record(stem, a, rows), cells)
        plots.draw_if_possible(stem.with_suffix(".json"), draw)
    else:
        list(rows)
    dist.destroy_process_group()


def cells(row: report.Row) -> dict[str, str]:
    """A line of the table, by column."""
    sizes = {name: str(row[name]) for name in ("tokens", "gpus", "best") if name in row}
    by_way = row["efficiency"]
    columns = by_way if "best" not in row else ("ulysses", "ring", "best")
    return sizes | {name: report.figure(by_way.get(name), 2) for name in columns}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
