"""FlashAttention-3's functions, computed by ``flash_attn``.

Names, order and defaults of the arguments, and the results, are FlashAttention-3's. Tensors and
errors are those of ``flash_attn``'s functions of the same names. Beyond FlashAttention-3 there are
attention sinks (``s_aux``, keyword-only), every device and dtype of ``flash_attn``, derivatives of
softmax_lse, and a gradient of ``attention_chunk``. Not there, and refused with NotImplementedError:
``qv``, ``rotary_seqlens`` other than ``cache_seqlens`` where something is rotated, and
``cu_seqlens_k_new`` with new keys. ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` are
accepted and change nothing: ``flash_attn`` schedules its kernels itself.

With ``attention_chunk`` n > 0 a query sees the keys of its own chunk of n positions, where the keys
of a sequence have positions 0, 1, ..., behind ``cache_leftpad``, and its last query has that of the
last key. A causal mask and a window hold beside it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from flash_attn_3._packed import UsedRows, in_chunks, last_chunk
from torch import Tensor

import flash_attn
from flash_attn import _arguments, _numbers, _ops
from flash_attn import flash_attn_interface as _fa2
from flash_attn.layers.rotary import apply_rotary_emb

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_Result = tuple[Tensor, Tensor, Tensor, Tensor]


# fmt: off
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
) -> Any:
    """Attention over sequences of equal length: out, or (out, softmax_lse)."""
    left, right = _fa2.read_window(window_size)
    return_attn_probs = _numbers.flag("return_attn_probs", return_attn_probs)
    result = _flash_attn_forward(
        q, k, v, None, None, qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=softmax_scale, causal=causal, window_size_left=left,
        window_size_right=right, attention_chunk=attention_chunk, softcap=softcap,
        num_splits=num_splits, s_aux=s_aux, deterministic=deterministic,
    )
    return result[:2] if return_attn_probs else result[0]


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False, *,
    s_aux: Tensor | None = None,
) -> Any:
    """``flash_attn_func`` with qkv (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, nheads +
    2 * nheads_kv, headdim) with num_heads_q.
    """
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv must be a torch.Tensor, got {type(qkv).__name__}")
    nheads = 0 if num_heads_q is None else _numbers.integer("num_heads_q", num_heads_q)
    both_kv = qkv.shape[2] - nheads if qkv.dim() == 4 else 0
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif nheads > 0 and both_kv > 0 and both_kv % 2 == 0:
        q, k, v = qkv.split([nheads, both_kv // 2, both_kv // 2], dim=2)
    else:
        raise ValueError(
            "qkv must have shape (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, nheads + "
            f"2 * nheads_kv, headdim) with num_heads_q, got {tuple(qkv.shape)} and {num_heads_q}"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs, s_aux=s_aux,
    )


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
) -> Any:
    """Attention over packed sequences: out, or (out, softmax_lse).

    seqused_q and seqused_k (batch,) int32: of each sequence's queries and keys, how many are in
    use. Other queries get zeros and a log-sum-exp of -inf. With seqused_q, q and out are copied.
    """
    left, right = _fa2.read_window(window_size)
    return_attn_probs = _numbers.flag("return_attn_probs", return_attn_probs)
    result = _flash_attn_forward(
        q, k, v, None, None, qv, None, cu_seqlens_q, cu_seqlens_k, None, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=softmax_scale, causal=causal, window_size_left=left,
        window_size_right=right, attention_chunk=attention_chunk, softcap=softcap,
        num_splits=num_splits, s_aux=s_aux, deterministic=deterministic,
    )
    return result[:2] if return_attn_probs else result[0]


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False, *,
    s_aux: Tensor | None = None,
) -> Any:
    """Append to a cache, and attend to it: out, or (out, softmax_lse, empty, empty). No gradient.

    With cu_seqlens_q (batch + 1,) and max_seqlen_q, q is (total_q, nheads, headdim); nothing can be
    appended then, and a cache that has no page_table and is not contiguous is copied.
    """
    left, right = _fa2.read_window(window_size)
    return_softmax_lse = _numbers.flag("return_softmax_lse", return_softmax_lse)
    if cache_seqlens is None and k is None and page_table is None:
        if isinstance(k_cache, Tensor) and k_cache.dim() == 4:  # other tensors are refused below
            cache_seqlens = k_cache.shape[1]  # all of it
    with torch.no_grad():
        result = _flash_attn_forward(
            q, k_cache, v_cache, k, v, qv, None, cu_seqlens_q, None, cu_seqlens_k_new, None,
            cache_seqlens, max_seqlen_q, None, page_table, cache_batch_idx, cache_leftpad,
            rotary_cos, rotary_sin, rotary_seqlens, q_descale, k_descale, v_descale,
            softmax_scale, causal, left, right, attention_chunk, softcap, rotary_interleaved,
            scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux=s_aux,
        )
    return result if return_softmax_lse else result[0]


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the keys.

    out_partial (splits, batch, seqlen, nheads, headdim) and lse_partial (splits, batch, seqlen,
    nheads) float32 give out, written to ``out`` if given, and softmax_lse without ``splits``.
    """
    _check_parts(out_partial, lse_partial)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {type(out_dtype).__name__}")
    with torch.autocast(out_partial.device.type, enabled=False):
        parts = out_partial.to(torch.promote_types(out_partial.dtype, torch.float32))
        return _combine(parts, lse_partial, out, out_dtype or out_partial.dtype)


def _combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    lse = lse_partial.logsumexp(0)
    weights = (lse_partial - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    parts = out_partial.masked_fill(weights[..., None] == 0, 0.0)  # which may hold NaN there
    merged = torch.einsum("sbthd,sbth->bthd", parts, weights).to(dtype)
    return merged if out is None else _written("out", out, merged), lse


def _written(name: str, out: Any, result: Tensor) -> Tensor:
    if not isinstance(out, Tensor) or out.shape != result.shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"{name} must have shape {tuple(result.shape)}, got {got}")
    _arguments.check_writable(name, out)
    return out.copy_(result)


def _check_parts(out_partial: Any, lse_partial: Any) -> None:
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {_arguments._kind(x)}")
    if out_partial.dim() != 5:
        shape = tuple(out_partial.shape)
        raise ValueError(f"out_partial must have 5 dimensions, got shape {shape}")
    if lse_partial.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"lse_partial must be a torch.float32 tensor, got {lse_partial.dtype}")
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial must have shape {tuple(out_partial.shape[:-1])}, that of out_partial but "
            f"for the head dimension, got {tuple(lse_partial.shape)}"
        )


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
    headdim: int, cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
    page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor: ``flash_attn_with_kvcache`` needs no schedule computed ahead."""
    if not isinstance(cache_seqlens, Tensor):
        raise TypeError(f"cache_seqlens must be a tensor, got {type(cache_seqlens).__name__}")
    return cache_seqlens.new_empty(0, dtype=torch.int32)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Any = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 1,
    pack_gqa: bool | None = None, sm_margin: int = 0, *, s_aux: Tensor | None = None,
    deterministic: bool = False, out: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
) -> _Result:
    """What the functions above have in common: out, softmax_lse and two empty tensors.

    out and window_size are what older releases call out_, window_size_left and window_size_right.
    """
    rotates_elsewhere = rotary_cos is not None and seqlens_rotary is not seqused_k
    _refuse(
        qv=qv, cu_seqlens_k_new=None if k_new is None else cu_seqlens_k_new,
        seqused_q=seqused_q if cu_seqlens_q is None else None,
        rotary_seqlens=seqlens_rotary if rotates_elsewhere else None,
    )
    _numbers.integer("num_splits", num_splits)
    chunk = _numbers.integer("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk must be at least 0, got {chunk}")
    chunk = min(chunk, torch.iinfo(torch.int32).max)
    window = _window(window_size, window_size_left, window_size_right)
    each: Any = q_descale, k_descale, v_descale
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window, "softcap": softcap,
        "s_aux": s_aux, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
    }
    numbers = 0.0, softmax_scale, causal, *window, softcap

    def checked() -> tuple[_arguments.Options, None, Tensor | None]:
        return _arguments.options(*numbers, deterministic), None, s_aux

    if out is not None and out_ is not None:
        raise ValueError("out and out_ are two names of one argument: give one")
    out_ = out_ if out is None else out
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_q must be given with cu_seqlens_k, got None")
    of_cache: Any = (k_new, v_new, seqused_k, page_table, kv_batch_idx, leftpad_k)
    in_cache = cu_seqlens_k is None and any(
        x is not None for x in (*of_cache, rotary_cos, rotary_sin)
    )
    cache: dict[str, Any] = {
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_seqlens": seqused_k,
        "cache_batch_idx": kv_batch_idx, "cache_leftpad": leftpad_k, "block_table": page_table,
        "rotary_interleaved": rotary_interleaved,
    }
    if chunk > 0 and cu_seqlens_q is None:
        packed = None
        if not in_cache:
            _arguments.dense(q, k, v, *checked(), each)
            packed = _as_packed(q, k, v)
        else:
            problem, append = _arguments.with_kvcache(
                q, k, v, k_new, v_new, *checked(), **cache, descales=each
            )
            in_use = _used_with_new(problem, append)
            if q.shape[1] == 1:
                cache["cache_leftpad"] = last_chunk(chunk, in_use, leftpad_k)
            else:
                if append is not None:
                    q = _append(q, k, v, append, cache)
                packed = _cache_as_packed(q, k, v, in_use, cache)
        if packed is not None:
            out, lse, *empty = _flash_attn_forward(
                **packed, **options, attention_chunk=chunk, deterministic=deterministic
            )
            rows = q.shape[:2]
            out, lse = out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1).contiguous()
            return out if out_ is None else _written("out", out_, out), lse, *empty
    if cu_seqlens_q is not None:
        _refuse(
            k_new=k_new, v_new=v_new, kv_batch_idx=kv_batch_idx, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
        )
        if cu_seqlens_k is None:
            k, v, cu_seqlens_k, seqused_k, max_seqlen_k = _cache_as_varlen(
                q, k, v, cu_seqlens_q, seqused_k, page_table
            )
        used, to = None, out_
        if seqused_q is not None:
            used, to = UsedRows("seqused_q", q, cu_seqlens_q, seqused_q), None
            q, cu_seqlens_q = used.first(q), used.cu_seqlens
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        keys = {"block_table": page_table, "leftpad_k": leftpad_k, "seqused_k": seqused_k}
        if chunk > 0:
            problem = _arguments.varlen(q, k, v, *lengths, *checked(), each, **keys)
            pieces, lengths, keys = in_chunks(chunk, problem)
            each = [None if x is None else x.repeat_interleave(pieces, 0) for x in each]
        out, lse, *_ = _ops.flash_attn_varlen_forward(
            q, k, v, *lengths, *numbers, None, False, *keys.values(), False, 0, s_aux,
            deterministic, *each, 0, None, to,
        )
        if used is not None:
            out, lse = used.back(out), used.back(lse, 1)
            out = out if out_ is None else _written("out", out_, out)
    elif in_cache:
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k, v, k_new, v_new, **options, **cache, num_splits=num_splits,
            return_softmax_lse=True, out=out_,
        )
    else:
        out, lse, _ = flash_attn.flash_attn_func(
            q, k, v, **options, deterministic=deterministic, return_attn_probs=True, out=out_
        )
    return out, lse, lse.new_empty(0), lse.new_empty(0)


def _as_packed(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Dense sequences as arguments of a call of packed ones."""
    lengths = q.shape[1], k.shape[1]
    batch = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    bounds = {seqlen: batch * seqlen for seqlen in lengths}
    return {
        "q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1),
        "cu_seqlens_q": bounds[lengths[0]], "cu_seqlens_k": bounds[lengths[1]],
        "max_seqlen_q": lengths[0], "max_seqlen_k": lengths[1],
    }


def _cache_as_packed(
    q: Tensor, k: Tensor, v: Tensor, used: Tensor, cache: dict[str, Any]
) -> dict[str, Any]:
    """Dense queries and a cache likewise. A sequence that has no pages is one itself."""
    if q.dtype != k.dtype:
        raise NotImplementedError(
            f"attention_chunk must be 0 where q has more rows than one and k_cache has another "
            f"dtype, {k.dtype}, than q, {q.dtype}"
        )
    batch, seqlen_q = q.shape[:2]
    index = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    table, rows = cache["block_table"], cache["cache_batch_idx"]
    if table is None:
        table = (index[:-1] if rows is None else rows)[:, None]
    return {
        "q": q.flatten(0, 1), "k": k, "v": v, "cu_seqlens_q": index * seqlen_q, "seqused_k": used,
        "max_seqlen_q": seqlen_q, "page_table": table, "leftpad_k": cache["cache_leftpad"],
    }


def _used_with_new(problem: _arguments.Attention, append: _arguments.CacheAppend | None) -> Tensor:
    """(batch,) int32: how many rows of a cache are in use behind an append."""
    used, rows = problem.seqused_k, problem.max_seqlen_k
    if used is None:
        return torch.full((problem.batch,), rows, dtype=torch.int32, device=problem.q.device)
    return used if append is None else torch.where(used < 0, used, used + append.k.shape[1])


def _append(
    q: Tensor, k: Tensor, v: Tensor, append: _arguments.CacheAppend, cache: dict[str, Any]
) -> Tensor:
    """Append to the cache; return q, rotated."""
    least = q[:, :1]  # an append has an attention behind it
    flash_attn.flash_attn_with_kvcache(
        least, k, v, append.k, append.v, **cache, window_size=(0, 0)
    )
    if append.rotary_cos is None or append.rotary_sin is None:
        return q
    tables = append.rotary_cos, append.rotary_sin
    places = append.cache_seqlens.clamp(min=0)
    return apply_rotary_emb(q, *tables, append.rotary_interleaved, seqlen_offsets=places)


def _cache_as_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, used: Any, page_table: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
    """k, v, cu_seqlens_k, seqused_k and max_seqlen_k of a cache of which ``used`` rows are keys."""
    _arguments.check_qkv(q, k, v, 3, 4, ("q", "k_cache", "v_cache"))
    _arguments._check_index("cu_seqlens_q", cu_seqlens_q, q)
    batch = max(0, cu_seqlens_q.shape[0] - 1)  # fewer than one bound are refused later
    if q.dtype != k.dtype:
        raise NotImplementedError(
            f"k_cache must have the dtype of q, {q.dtype}, where cu_seqlens_q is given, got "
            f"{k.dtype}: give q with 4 dimensions"
        )
    if page_table is None:
        if k.shape[0] != batch:
            raise ValueError(
                f"k_cache must have a row for each of {batch} sequences, got shape {tuple(k.shape)}"
            )
    elif not isinstance(page_table, Tensor) or page_table.dim() != 2:
        raise ValueError("page_table must be a tensor (batch, pages of a sequence)")
    capacity = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    used, _ = _arguments._cache_seqlens(capacity if used is None else used, q, batch, capacity, 0)
    used = used.clamp(0, capacity)  # a sequence with a length of -1 is not there
    if page_table is not None:
        return k, v, F.pad(used.cumsum(0, dtype=torch.int32), (1, 0)), None, capacity
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * capacity
    return k.flatten(0, 1), v.flatten(0, 1), bounds, used, capacity


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None, sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0, *,
    causal: bool | None = None, window_size: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write dq, dk and dv in place; return softmax_d, the row sums of dout * out.

    causal and window_size are what older releases call is_causal, window_size_left and
    window_size_right. Those return dq, dk, dv and softmax_d, and so does a call by their names.
    """
    if cu_seqlens_q is None:
        _refuse(sequed_q=sequed_q, sequed_k=sequed_k)
    window = _window(window_size, window_size_left, window_size_right)
    is_older = causal is not None or window_size is not None
    is_causal = _numbers.flag("is_causal", is_causal)
    causal = is_causal if causal is None else _numbers.flag("causal", causal)
    if is_causal and not causal:
        raise ValueError("is_causal and causal are two names of one argument: give one")
    options = 0.0, softmax_scale, causal, *window, softcap, None, deterministic
    given = (q, dq), (k, dk), (v, dv)
    dq, dk, dv = (torch.empty_like(x) if dx is None else dx for x, dx in given)
    tensors = dout, q, k, v, out, softmax_lse, dq, dk, dv
    if cu_seqlens_q is None:
        softmax_d = _fa2._flash_attn_backward(*tensors, *options)
    else:
        used = None
        if sequed_q is not None:
            used = UsedRows("sequed_q", q, cu_seqlens_q, sequed_q)
            cu_seqlens_q, first = used.cu_seqlens, torch.empty_like(q)
            of_queries = used.first(dout), used.first(q), k, v, used.first(out)
            tensors = *of_queries, used.first(softmax_lse, 1), first, dk, dv
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        softmax_d = _fa2._flash_attn_varlen_backward(
            *tensors, *lengths, *options, seqused_k=sequed_k
        )
        if used is not None:
            _written("dq", dq, used.back(first))
            softmax_d = used.back(softmax_d, 1)
    return (dq, dk, dv, softmax_d) if is_older else softmax_d
# fmt: on


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is not supported by flash_attn, and must be left out"
            )


def _window(window_size: Any, left: int, right: int) -> tuple[int, int]:
    """Both sides, of which there are two sets of names."""
    sides = left, right
    if window_size is None:
        return sides
    given = _fa2.read_window(window_size)
    if sides not in ((-1, -1), given):
        raise ValueError(
            f"window_size must be that of window_size_left and _right, {sides}, got {given}"
        )
    return given
