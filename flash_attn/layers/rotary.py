"""Rotary position embedding for queries and keys, with the XPos extension."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn._arguments import check_tensors
from flash_attn._backends.rotary import rotate
from flash_attn._numbers import flag, integer
from flash_attn._ops import is_seen
from flash_attn._rotary import apply_rotary, check_arguments, in_place, int_if_known

__all__ = [
    "ApplyRotaryEmb",
    "ApplyRotaryEmbKV_",
    "ApplyRotaryEmbQKV_",
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


# Of newer torch.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
) -> Tensor:
    """Rotate queries or keys by their positions. Differentiable.

    Parameters
    ----------
    x : (batch, seqlen, nheads, headdim), or (total, nheads, headdim) with ``cu_seqlens``
    cos, sin : (seqlen_ro, rotary_dim / 2)
        Table over positions; rotary_dim <= headdim, the remaining channels are left as they are.
    interleaved : bool
        True pairs channels (2i, 2i + 1), as in GPT-J; False pairs (i, i + rotary_dim / 2), as in
        GPT-NeoX.
    inplace : bool
        Write the result to ``x``. The returned tensor is on the same memory and has the gradient;
        ``x`` itself has it unless it is a leaf, a view of one, or from split, chunk or unbind (see
        :func:`flash_attn._rotary.in_place`).
    seqlen_offsets : int or (batch,) int32 or int64
        Position of the first token of each sequence, for decoding with a KV cache.
        On a GPU, positions outside of the table are clamped into it.
    cu_seqlens : (batch + 1,) int32 or int64, optional
        Where each sequence starts in ``x``. Tokens that belong to no sequence are not rotated.
    max_seqlen : int, required with ``cu_seqlens``
        At least the length of the longest sequence.

    Returns
    -------
    Tensor
        Shape and dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was given and what is accepted.

    References
    ----------
    Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv:2104.09864.
    """
    where = seqlen_offsets, cu_seqlens, max_seqlen
    return apply_rotary(x, cos, sin, *where, interleaved=interleaved, inplace=inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Rotate by one row of cos and sin for each token, with no offsets and out of place.

    Parameters
    ----------
    x : (batch, seqlen, nheads, headdim)
    cos, sin : (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2)

    Returns
    -------
    Tensor
        Shape and dtype of ``x``.
    """
    return rotate(x, cos, sin, interleaved)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each channel pair by a right angle: (a, b) -> (-b, a).

    Parameters
    ----------
    x : (..., rotary_dim)
    interleaved : bool
        See :func:`apply_rotary_emb`.
    """
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.stack((-b, a), dim=-1 if interleaved else -2).flatten(-2)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate the queries and keys of a packed tensor, in place. Differentiable.

    Parameters
    ----------
    qkv : (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, nheads + 2 * nheads_kv, headdim)
        The second form holds the heads of Q, then K, then V, and needs ``num_heads_q``.
    cos, sin : (seqlen_ro, rotary_dim / 2)
    cos_k, sin_k : (seqlen_ro, rotary_dim / 2), optional
        Other tables for the keys (XPos).
    interleaved, seqlen_offsets
        See :func:`apply_rotary_emb`.
    num_heads_q : int, optional
        Query heads of the 4-D form.

    Returns
    -------
    Tensor
        ``qkv``, as :func:`apply_rotary_emb` returns what it writes to.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was given and what is accepted.
    """
    cos_k = cos if cos_k is None else cos_k
    sin_k = sin if sin_k is None else sin_k
    _, keys = _queries_and_keys(qkv, num_heads_q)
    check_arguments(keys, cos_k, sin_k, seqlen_offsets, None, None)  # before queries change

    def write(qkv: Tensor) -> None:
        q, k = _queries_and_keys(qkv, num_heads_q)
        apply_rotary_emb(q, cos, sin, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
        apply_rotary_emb(k, cos_k, sin_k, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)

    return in_place(qkv, (cos, sin, cos_k, sin_k), write)


def _queries_and_keys(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    """Views of Q and K in a packed tensor."""
    _check_packed("qkv", qkv)
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1]
    if qkv.ndim != 4:
        raise ValueError(
            "qkv must have shape (batch, seqlen, 3, nheads, headdim) or (batch, seqlen, nheads + "
            f"2 * nheads_kv, headdim), got {tuple(qkv.shape)}"
        )
    heads = qkv.shape[2]
    if num_heads_q is not None:
        num_heads_q = integer("num_heads_q", num_heads_q)
    if num_heads_q is None or not 0 <= num_heads_q <= heads or (heads - num_heads_q) % 2:
        raise ValueError(
            "num_heads_q must be given with a qkv of 4 dimensions and leave an even number of its "
            f"{heads} heads to K and V, got {num_heads_q}"
        )
    nheads_kv = (heads - num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + nheads_kv]


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate the keys of a packed tensor, in place. Differentiable.

    Parameters
    ----------
    kv : (batch, seqlen, 2, nheads_kv, headdim)
    cos, sin, interleaved, seqlen_offsets
        See :func:`apply_rotary_emb`.

    Returns
    -------
    Tensor
        ``kv``, as :func:`apply_rotary_emb` returns what it writes to.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was given and what is accepted.
    """
    check_arguments(_keys(kv), cos, sin, seqlen_offsets, None, None)

    def write(kv: Tensor) -> None:
        apply_rotary_emb(
            _keys(kv), cos, sin, interleaved, inplace=True, seqlen_offsets=seqlen_offsets
        )

    return in_place(kv, (cos, sin), write)


def _keys(kv: Tensor) -> Tensor:
    """A view of K in a packed tensor."""
    _check_packed("kv", kv)
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise ValueError(
            f"kv must have shape (batch, seqlen, 2, nheads_kv, headdim), got {tuple(kv.shape)}"
        )
    return kv[:, :, 0]


def _check_packed(name: str, x: Tensor) -> None:
    check_tensors(**{name: x})
    placements = () if type(x) is Tensor else getattr(x, "placements", ())  # of a DTensor
    if any(placement.is_shard(2) for placement in placements):  # a slice would be a copy
        raise ValueError(f"{name} must not be sharded along dimension 2, got {placements}")


class ApplyRotaryEmb:
    """:func:`apply_rotary_emb` under the name of upstream's autograd function."""

    apply = staticmethod(apply_rotary_emb)


class ApplyRotaryEmbQKV_:
    """:func:`apply_rotary_emb_qkv_` under the name of upstream's autograd function."""

    apply = staticmethod(apply_rotary_emb_qkv_)


class ApplyRotaryEmbKV_:
    """:func:`apply_rotary_emb_kv_` under the name of upstream's autograd function."""

    apply = staticmethod(apply_rotary_emb_kv_)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding that keeps its tables of cosines and sines.

    Parameters
    ----------
    dim : int
        rotary_dim, even and at most the head dim.
    base : float
        Channel pair i turns by base ** (-2 i / dim) radians a position.
    interleaved : bool
        See :func:`apply_rotary_emb`.
    scale_base : float, optional
        Turns on XPos: queries are scaled up and keys down with their position, by powers of
        position / scale_base, so that their product decays with distance. The exponents are centred
        on the middle of the table; when keys are cached, pass ``max_seqlen`` so that all steps use
        one table.
    device : torch.device, optional
    pos_idx_in_fp32 : bool
        True computes the tables in float32 from exact frequencies, also after the module was
        converted to another dtype. False computes them in the dtype of ``inv_freq``: after
        ``module.bfloat16()`` positions above 256 are rounded, as in models trained that way.

    Raises
    ------
    TypeError, ValueError
        If ``device`` is a bool, or ``dim`` is no even integer of at least 0.

    References
    ----------
    Su et al., RoFormer, arXiv:2104.09864; Sun et al., A Length-Extrapolatable Transformer (XPos),
    arXiv:2212.10554.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
        *,
        pos_idx_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(device, bool):
            raise TypeError("device must be a torch.device, got bool; name pos_idx_in_fp32")
        dim = integer("dim", dim)
        if dim < 0 or dim % 2:
            raise ValueError(f"dim must be an even number of channels, got {dim}")
        self.dim = dim
        self.base = float(base)
        self.interleaved = flag("interleaved", interleaved)
        self.scale_base = scale_base
        self.pos_idx_in_fp32 = flag("pos_idx_in_fp32", pos_idx_in_fp32)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", self._compute_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.inv_freq
        super()._apply(fn, recurse)
        if before.is_meta and not self.inv_freq.is_meta:  # to_empty: no state_dict has numbers
            like = self.inv_freq
            self.inv_freq = self._compute_inv_freq(like.device).to(like)
            scale = self._compute_scale(like.device)
            self.scale = None if scale is None else scale.to(like)
        return self

    # Clients' subclasses call these two, or have their own.

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        """Of each channel pair, its radians a position."""
        return self.base ** (-self._channels(device) / self.dim)

    def _compute_scale(self, device: torch.device | str | None = None) -> Tensor | None:
        """Of each channel pair, what XPos scales it by."""
        if self.scale_base is None:
            return None
        return (self._channels(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _channels(self, device: torch.device | str | None) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the tables cover positions 0 .. seqlen - 1, on this device and in this dtype.

        Without a device or dtype they take those of ``inv_freq``.
        """
        like = self.inv_freq.new_empty(0, device=device, dtype=dtype)
        if self._are_covered(seqlen, like):
            return
        # Tables made in inference mode could not be saved for a backward.
        with nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False):
            tables = self._computed(seqlen, like)
        self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = tables
        self._seq_len_cached = seqlen

    def _tables(
        self, seqlen: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """cos and sin of queries, and of keys where they have others, of positions 0 .. seqlen - 1.

        What a trace, a transform or compiled code computes is not kept: it may be no tensor of
        numbers, and each length would be compiled anew. Compiled code reads tables that are there,
        but a program for export should not depend on them. A subclass that fills the tables in its
        own way does so always.
        """
        like = self.inv_freq.new_empty(0, device=device, dtype=dtype)
        name = "_update_cos_sin_cache"
        if name in vars(self) or getattr(type(self), name) is not _fill_tables:
            self._update_cos_sin_cache(seqlen, device, dtype)
            return self._kept()
        compiling = torch.compiler.is_compiling()
        if is_seen((self.inv_freq,)) or torch._C._get_tracing_state() is not None:
            if not compiling or _is_exporting() or not self._are_covered(seqlen, like):
                return self._computed(seqlen, like)
            return self._kept()
        self._update_cos_sin_cache(seqlen, device, dtype)
        tables = self._kept()
        # Another thread may be replacing them one by one.
        kinds = {(x.shape, x.dtype, x.device) for x in tables if x is not None}
        if kinds == {(tables[0].shape, like.dtype, like.device)} and len(tables[0]) >= seqlen:
            return tables
        return self._computed(seqlen, like)

    def _kept(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        assert self._cos_cached is not None and self._sin_cached is not None
        return self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached

    def _are_covered(self, seqlen: int, like: Tensor) -> bool:
        cached = self._cos_cached
        if cached is None or (cached.device, cached.dtype) != (like.device, like.dtype):
            return False
        return seqlen <= self._seq_len_cached

    def _computed(
        self, seqlen: int, like: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        inv_freq, scale = self.inv_freq, self.scale
        # module.to(bfloat16) also rounds its buffers, which is too coarse for angles: start again.
        if self.pos_idx_in_fp32 and inv_freq.dtype != torch.float32:
            inv_freq = self._compute_inv_freq(like.device)
            scale = self._compute_scale(like.device)
        position = torch.arange(seqlen, device=like.device, dtype=inv_freq.dtype)
        angle = torch.outer(position, inv_freq.to(like.device))
        cos, sin = angle.cos(), angle.sin()
        if scale is None or self.scale_base is None:
            return cos.to(like), sin.to(like), None, None
        power = (position - seqlen // 2) / self.scale_base
        scale = scale.to(like.device) ** power.unsqueeze(1)
        tables = cos * scale, sin * scale, cos / scale, sin / scale
        cos, sin, cos_k, sin_k = (x.to(like) for x in tables)
        return cos, sin, cos_k, sin_k

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys in place.

        Parameters
        ----------
        qkv : (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, nheads + 2 * nheads_kv,
            headdim) with ``num_heads_q``; the queries (batch, seqlen, nheads, headdim) if ``kv``
            is given
        kv : (batch, seqlen, 2, nheads_kv, headdim), optional
        seqlen_offset : int or (batch,) int32 or int64
            Position of the first token, for decoding with a KV cache.
        max_seqlen : int, optional
            Length of the tables. Needed when ``seqlen_offset`` is a tensor, whose values are not
            known on the host.
        num_heads_q : int, optional

        Returns
        -------
        Tensor or tuple of Tensor
            ``qkv``, or (``qkv``, ``kv``) if ``kv`` is given, each as :func:`apply_rotary_emb`
            returns what it writes to.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what was given and what is accepted.
        """
        check_tensors(qkv=qkv)
        seqlen_offset = int_if_known("seqlen_offset", seqlen_offset)
        if max_seqlen is not None:
            seqlen = integer("max_seqlen", max_seqlen)
        elif not isinstance(seqlen_offset, Tensor):
            seqlen = qkv.shape[1] + seqlen_offset
        elif self._cos_cached is not None:
            seqlen = self._seq_len_cached
        else:
            raise ValueError("max_seqlen must be given when seqlen_offset is a tensor, got None")
        cos, sin, cos_k, sin_k = self._tables(seqlen, qkv.device, qkv.dtype)
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        check_arguments(_keys(kv), cos_k, sin_k, seqlen_offset, None, None)  # before queries change
        q = apply_rotary_emb(
            qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset
        )
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)


_fill_tables = RotaryEmbedding._update_cos_sin_cache  # a client may put its own there
