"""Attention over a sequence that several ranks share; see ``flash_attn.distributed``."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn import _arguments
from flash_attn._arguments import Options, Place, dropout_threshold
from flash_attn._backends.cuda import forced_backend
from flash_attn._backends.philox import draw_rng_state
from flash_attn._numbers import integer
from flash_attn._ops import not_compiled
from flash_attn.distributed import _agreement
from flash_attn.distributed._heads import Division, HeadsAttention, Row
from flash_attn.distributed._layout import Grid, Group, Layout, Order, grid_of, host_values
from flash_attn.distributed._plan import Mask, Plan
from flash_attn.distributed._ring import Call, RingAttention
from flash_attn.flash_attn_interface import read_window

Bounds = Tensor | Sequence[int]
_MOST_KINDS = 256  # of calls that are remembered of a group


def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    group: Group = None,
    order: Order = "zigzag",
    seqlen: int | None = None,
    cu_seqlens: Bounds | None = None,
) -> Any:
    """Attention of this rank's queries to the keys of all ranks, which come to it in turn.

    Any number of ranks will do, whatever the number of heads. K and V travel with ``nheads_kv``
    heads, and only to ranks that see them. On a mesh of two dimensions, rings go along the first,
    and heads are divided along the second as in ``ulysses_flash_attn_func``: the ranks of a node
    are next to each other in the second, ``init_device_mesh("cuda", (nodes, gpus_of_a_node))``.

    Parameters
    ----------
    q : (batch, tokens, nheads, headdim), or (tokens, nheads, headdim) with cu_seqlens
        This rank's tokens, as ``shard`` gives them.
    k : (batch, tokens, nheads_kv, headdim)
    v : (batch, tokens, nheads_kv, headdim_v)
    dropout_p, ..., deterministic, s_aux
        As of ``flash_attn_func``, of the whole sequence. The dropout mask is the one that rank 0
        of the group would draw if it were alone. The gradient of ``s_aux`` is of this rank's
        tokens: as of every parameter that ranks share, the sum over them is the whole.
    return_attn_probs : bool
        Also return the log-sum-exp, and None.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that share the sequence. Default: all. Of a mesh of two dimensions, ``nheads`` is
        a multiple of the second size.
    order : {"zigzag", "contiguous"}
        How ``shard`` has divided the tokens. Under a causal mask, zigzag gives all ranks as much
        to do.
    seqlen : int, optional
        Tokens of the whole sequence, needed where ranks do not have the same number of them.
    cu_seqlens : (documents + 1,) int32 or sequence of ints, optional
        Where the documents begin in the whole sequence, and where the last ends: a token sees
        those of its document. Documents may reach over ranks. Keep it on the CPU: one on a GPU is
        read, once, for which the host waits. ``alibi_slopes`` may be (documents, nheads).

    Returns
    -------
    out : (batch, tokens, nheads, headdim_v), or (tokens, nheads, headdim_v) with cu_seqlens
    softmax_lse : (batch, nheads, tokens), or (nheads, tokens); with return_attn_probs
        Natural logarithm, of all keys, float32 (float64 for float64 inputs); differentiable.
    None : with return_attn_probs

    Raises
    ------
    TypeError, ValueError
        As ``flash_attn_func``; and ValueError, on every rank, if ranks differ in an option, or in
        tokens from what ``shard`` gives.
    RuntimeError
        If another rank has wrong arguments, or does not make this call.

    Ranks compare their calls before the first of each kind: those of the same shapes, dtypes and
    options. If a rank goes on to a call of a new kind alone, it waits for the others for five
    minutes, and they for it until the timeout of the process group. So it is where ranks need
    ``seqlen`` and leave it out: give it if it may be needed.

    References
    ----------
    Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context"
    (2023), without forwarding: see flash_attn/distributed/_ring.py. The mesh: Fang and Zhao, "USP:
    A Unified Sequence Parallelism Approach for Long Context Generative AI" (2024).
    """
    grid = grid_of(group)
    numbers = dropout_p, softmax_scale, causal, window_size, softcap, deterministic
    tensors = q, k, v, alibi_slopes, s_aux
    return _attention(grid, tensors, numbers, order, seqlen, cu_seqlens, return_attn_probs)


def ulysses_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    group: Group = None,
    seqlen: int | None = None,
    cu_seqlens: Bounds | None = None,
) -> Any:
    """The same, each rank attending with some of the heads to the whole sequence.

    Two all-to-all exchanges move q, k and v there and the output back. ``nheads`` must be a
    multiple of the number of ranks. A key head that several ranks need is sent to each of them.
    Tokens are in contiguous order. Arguments, results and errors are else those of
    ``ring_flash_attn_func``.

    References
    ----------
    Jacobs et al., "DeepSpeed Ulysses" (2023).
    """
    grid = grid_of(group)
    if grid.heads is not None:
        raise ValueError("group must be a mesh of 1 dimension, got 2: use ring_flash_attn_func")
    numbers = dropout_p, softmax_scale, causal, window_size, softcap, deterministic
    tensors = q, k, v, alibi_slopes, s_aux
    grid = Grid(None, grid.ring)
    return _attention(grid, tensors, numbers, "contiguous", seqlen, cu_seqlens, return_attn_probs)


# ---- all of them ---------------------------------------------------------------------------------


@dataclass
class _Kind:
    """What all calls of one kind share."""

    plan: Plan
    options: Options
    division: Division | None


@not_compiled
def _attention(
    grid: Grid,
    tensors: Sequence[Any],
    numbers: tuple[Any, ...],
    order: Order,
    seqlen: int | None,
    cu_seqlens: Bounds | None,
    return_attn_probs: bool,
) -> Any:
    kind = _kind(grid, tensors, numbers, order, seqlen, cu_seqlens, return_attn_probs)
    q, k, v, slopes, s_aux = tensors
    if cu_seqlens is not None:
        q, k, v = q[None], k[None], v[None]
    rng_state = None
    if kind.options.dropout_p > 0:
        rng_state = draw_rng_state(q.device)  # on all ranks, so that their generators stay alike
        for members in grid:
            if members is not None:
                dist.broadcast(rng_state, dist.get_global_rank(members, 0), members)
    call = Call(kind.plan, grid.ring, kind.options, Place(q.shape[2]), slopes, rng_state)
    if kind.division is None or grid.heads is None:
        out, lse = RingAttention.apply(q, k, v, s_aux, call)
    else:
        row = Row(grid.heads, kind.division)
        out, lse = HeadsAttention.apply(q, k, v, s_aux, call, row, return_attn_probs)
    if cu_seqlens is not None:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse, None) if return_attn_probs else out


# Of a group, kinds of calls that its ranks have agreed on.
_agreed: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[Any, _Kind]] = WeakKeyDictionary()


def _kind(
    grid: Grid,
    tensors: Sequence[Any],
    numbers: tuple[Any, ...],
    order: Order,
    seqlen: int | None,
    cu_seqlens: Bounds | None,
    return_attn_probs: bool,
) -> _Kind:
    """What this call shares with others; before the first of them, all ranks have to agree."""
    group = grid.ring or grid.heads
    assert group is not None
    known = _agreed.setdefault(group, OrderedDict())
    wants_gradient = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in tensors
    )
    error: Exception | None = None
    try:
        bounds = None if cu_seqlens is None else host_values(cu_seqlens)
        options = _options(*numbers)
        seqlen = None if seqlen is None else integer("seqlen", seqlen)
        kinds = [
            (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in tensors
        ]
        for_slopes = isinstance(tensors[3], Tensor) and tensors[3].requires_grad
        # What travels in a row, and what runs, are not only the arguments' to say.
        heads = None if grid.heads is None else (grid.heads.group_name, bool(return_attn_probs))
        rest = options, str(order), seqlen, bounds, wants_gradient, for_slopes, forced_backend()
        key = heads, *kinds, *rest
        if (kind := known.get(key)) is not None:
            known.move_to_end(key)
            return kind
        layout = _layout(grid, tensors, order, seqlen, bounds)
        description = _description(grid, layout, tensors, options, bounds)
        description["requires_grad"] = wants_gradient
        description["use_backend"] = forced_backend()
        if grid.heads is not None:
            description["return_attn_probs"] = bool(return_attn_probs)
    except Exception as raised:  # which the other ranks are told of first
        error, description = raised, {"error": f"{type(raised).__name__}: {raised}"}
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise error or RuntimeError("make a call like this one before a CUDA graph is captured")
    descriptions = _agreement.gather(description, grid, _agreement.device_of(group, tensors[0]))
    if error is not None:
        raise error
    _agreement.check(descriptions)
    kind = known[key] = _new_kind(grid, layout, tensors, options, bounds)
    if len(known) > _MOST_KINDS:
        known.popitem(last=False)
    return kind


def _new_kind(
    grid: Grid,
    layout: Layout,
    tensors: Sequence[Any],
    options: Options,
    bounds: tuple[int, ...] | None,
) -> _Kind:
    q, k, _, slopes, _ = tensors
    place, column = grid.ranks
    drops = dropout_threshold(options.dropout_p) > 0
    mask = Mask(options.window_left, options.window_right, bounds, slopes is not None, drops)
    plan = Plan(layout, mask, place)
    plan.copy_lengths(q.device)
    division = None
    if grid.heads is not None:
        row = layout.lengths()[place * grid.sizes[1] :][: grid.sizes[1]]
        division = Division(column, tuple(row), q.shape[-2], k.shape[-2])
    return _Kind(plan, options, division)


def _options(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    deterministic: Any,
) -> Options:
    left, right = read_window(window_size)
    options = _arguments.options(
        dropout_p, softmax_scale, causal, left, right, softcap, deterministic
    )
    # What drops nothing has no mask, and needs to know of no place.
    return options if dropout_threshold(options.dropout_p) > 0 else replace(options, dropout_p=0.0)


def _layout(
    grid: Grid,
    tensors: Sequence[Any],
    order: Order,
    seqlen: int | None,
    bounds: tuple[int, ...] | None,
) -> Layout:
    """Where all tokens are: every rank knows, without a message, if none has made a mistake."""
    q = tensors[0]
    rank = 4 if bounds is None else 3
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a torch.Tensor, got {type(q).__name__}")
    _arguments.check_strided("q", q)
    if q.dim() != rank:
        raise ValueError(f"q must have {rank} dimensions, got shape {tuple(q.shape)}")
    tokens, ranks = q.shape[-3], math.prod(grid.sizes)
    total = tokens * ranks if seqlen is None else seqlen
    if total < 0:
        raise ValueError(f"seqlen must be at least 0, got {total}")
    layout = Layout(total, *grid.sizes, order)
    place, column = grid.ranks
    expected = layout.lengths()[place * grid.sizes[1] + column]
    if expected != tokens:
        raise ValueError(
            f"q must have the tokens that shard() gives this rank, {expected} of {total} in {order}"
            f" order, got {tokens}; pass seqlen where ranks have different numbers of tokens"
        )
    if bounds is not None and bounds[-1] > total:
        raise ValueError(
            f"cu_seqlens must end within the {total} tokens of all ranks, got {bounds[-1]}"
        )
    return layout


def _description(
    grid: Grid,
    layout: Layout,
    tensors: Sequence[Any],
    options: Options,
    bounds: tuple[int, ...] | None,
) -> dict[str, Any]:
    """Check a rank's own arguments; return what has to be the same on all ranks."""
    q, k, v, slopes, s_aux = tensors
    rank = 4 if bounds is None else 3
    q, k, v, sizes = _arguments.check_qkv(q, k, v, rank, rank)
    if q.is_meta or q.dtype == _arguments.FP8:
        raise TypeError(
            "q must have one of the dtypes torch.float16, torch.bfloat16, torch.float32, "
            f"torch.float64, and data, got a {q.dtype} tensor on {q.device}"
        )
    if sizes.rows_q != sizes.rows_k:
        raise ValueError(f"k must have the tokens of q, {sizes.rows_q}, got {sizes.rows_k}")
    batch = q.shape[0] if bounds is None else len(bounds) - 1
    _arguments.check_per_head(q, batch, slopes, s_aux)
    if bounds is not None:
        _arguments.lengths_between("cu_seqlens", bounds, "q", None)
    columns = grid.sizes[1]
    if grid.heads is not None and (sizes.nheads == 0 or sizes.nheads % columns):
        raise ValueError(
            f"q must have a number of heads that is a multiple of the ranks that divide them, "
            f"{columns}, got {sizes.nheads}; ring_flash_attn_func takes any number"
        )
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("alibi_slopes has no gradient: pass alibi_slopes.detach()")
    digest = hashlib.blake2b(repr(bounds).encode(), digest_size=8).hexdigest()
    return {
        "seqlen": layout.total,
        "batch": None if bounds is not None else batch,
        "dtype": str(q.dtype),
        "nheads": sizes.nheads,
        "nheads_kv": sizes.nheads_kv,
        "headdim": [sizes.headdim, sizes.headdim_v],
        "softmax_scale": options.softmax_scale,
        "causal": options.window_right == 0,
        "window_size": [options.window_left, options.window_right],
        "softcap": options.softcap,
        "dropout_p": options.dropout_p,
        "deterministic": options.deterministic,
        "order": layout.order,
        "ranks": [layout.ring, layout.heads],
        "cu_seqlens": None if bounds is None else f"{batch} documents, digest {digest}",
        "alibi_slopes": None if slopes is None else list(slopes.shape),
        "s_aux": None if s_aux is None else str(s_aux.dtype),
    }
