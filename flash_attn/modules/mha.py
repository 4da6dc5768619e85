"""Multi-head self-attention and cross-attention with projections, rotary embedding and a KV cache.

Parameter names are upstream's, so its checkpoints load. Every layer runs on any device and dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn._arguments import check_optional_tensors
from flash_attn._numbers import integer
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    read_window,
)
from flash_attn.layers.rotary import RotaryEmbedding

__all__ = [
    "MHA",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "SelfAttention",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_alibi_slopes",
]


def get_alibi_slopes(nheads: int) -> list[float]:
    """Return the slope of each head in ALiBi (Press et al., arXiv:2108.12409).

    For a power of two they are 2 ** (-8 (i + 1) / nheads). Otherwise every second slope of twice
    the power of two below ``nheads`` follows the slopes of that power.
    """
    nheads = integer("nheads", nheads)
    if nheads < 1:
        raise ValueError(f"nheads must be at least 1, got {nheads}")
    power = 1 << (nheads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-8 * (i + 0.5) / power) for i in range(nheads - power)]
    return slopes + between


class _Attention(nn.Module):
    """Softmax attention without projections, by PyTorch operations.

    Parameters
    ----------
    causal : bool
        Whether a query sees no later key. The last query is aligned to the last key.
    softmax_scale : float, optional
        1 / sqrt(headdim) if None.
    attention_dropout : float
        Probability of dropping an attention weight in training.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)


class _FlashAttention(_Attention):
    """Softmax attention without projections, by the library's functions.

    Parameters
    ----------
    causal, softmax_scale, attention_dropout
        See :class:`SelfAttention`.
    window_size : (int, int)
        Keys to see to the left and right; -1 is unbounded.
    alibi_slopes : (nheads,) or (batch, nheads), optional
    deterministic : bool
        Whether gradients are the same bits in each run.
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout)
        check_optional_tensors(alibi_slopes=alibi_slopes)
        slopes = None if alibi_slopes is None else alibi_slopes.float()
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = self.alibi_slopes
        super()._apply(fn, recurse)
        slopes = self.alibi_slopes
        if kept is None or slopes is None:
            return self
        if not kept.is_meta:
            self.alibi_slopes = kept.to(slopes.device)  # module.half() would round them
        elif not slopes.is_meta:  # to_empty: no state_dict has the numbers
            self.alibi_slopes = torch.full_like(slopes, torch.nan)
        return self

    def _options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": self.alibi_slopes,
            "deterministic": self.deterministic,
        }


def _is_on_meta(core: _Attention) -> bool:
    slopes = getattr(core, "alibi_slopes", None)
    return slopes is not None and slopes.is_meta


class FlashSelfAttention(_FlashAttention):
    __doc__ = _FlashAttention.__doc__

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Return (batch, seqlen, nheads, headdim) of qkv (batch, seqlen, 3, nheads, headdim).

        With cu_seqlens (batch + 1,) int32 and max_seqlen, (total, nheads, headdim) of qkv
        (total, 3, nheads, headdim). ``causal`` overrides the layer's.
        """
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self._options(causal))
        max_seqlen = _given("max_seqlen", max_seqlen)
        return flash_attn_varlen_qkvpacked_func(
            qkv, cu_seqlens, max_seqlen, **self._options(causal)
        )


class FlashCrossAttention(_FlashAttention):
    __doc__ = _FlashAttention.__doc__

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(
            causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic
        )

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """Return the shape of q (batch, seqlen_q, nheads, headdim), from it and kv (batch,
        seqlen_k, 2, nheads_kv, headdim).

        With cu_seqlens and cu_seqlens_k (batch + 1,) int32 and the longest lengths, q is (total_q,
        nheads, headdim) and kv (total_k, 2, nheads_kv, headdim). ``causal`` overrides the layer's.
        """
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self._options(causal))
        return flash_attn_varlen_kvpacked_func(
            q,
            kv,
            cu_seqlens,
            _given("cu_seqlens_k", cu_seqlens_k),
            _given("max_seqlen", max_seqlen),
            _given("max_seqlen_k", max_seqlen_k),
            **self._options(causal),
        )


def _given(name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"{name} must be given with cu_seqlens, got None")
    return value


class SelfAttention(_Attention):
    __doc__ = _Attention.__doc__

    def forward(
        self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return (batch, seqlen, nheads, headdim) of qkv (batch, seqlen, 3, nheads, headdim).

        key_padding_mask (batch, seqlen) is True for the keys to see. The scores of all pairs are in
        memory at once. A query without a visible key gives 0.
        """
        q, k, v = qkv.unbind(2)
        causal = self.causal if causal is None else causal
        return _attend(self, q, k, v, causal, key_padding_mask, q.shape[1])


class CrossAttention(_Attention):
    __doc__ = _Attention.__doc__

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the shape of q (batch, seqlen_q, nheads, headdim), from it and kv (batch,
        seqlen_k, 2, nheads_kv, headdim).

        key_padding_mask (batch, seqlen_k) is True for the keys to see, which come first: a causal
        mask aligns the last query to the last of them.
        """
        causal = self.causal if causal is None else causal
        k, v = _expanded(kv, q.shape[2]).unbind(2)
        lengths: int | Tensor = kv.shape[1]
        if key_padding_mask is not None:
            lengths = key_padding_mask.sum(-1)[:, None, None, None]
        return _attend(self, q, k, v, causal, key_padding_mask, lengths)


def _expanded(kv: Tensor, nheads: int) -> Tensor:
    """kv (batch, seqlen, 2, nheads_kv, headdim) with each head as often as queries read it."""
    return kv.repeat_interleave(nheads // kv.shape[3], dim=3)


def _attend(
    layer: _Attention,
    q: Tensor,  # (batch, seqlen_q, nheads, headdim)
    k: Tensor,  # (batch, seqlen_k, nheads, headdim), as v
    v: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,  # (batch, seqlen_k)
    lengths: int | Tensor,  # keys, for the causal mask; (batch, 1, 1, 1) or a number
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if layer.softmax_scale is None else layer.softmax_scale
    scores = torch.einsum("bthd,bshd->bhts", q, k * scale)
    hidden = None
    if key_padding_mask is not None:
        hidden = ~key_padding_mask.bool()[:, None, None]
    if causal:
        row = torch.arange(q.shape[1], device=q.device)[:, None]
        later = torch.arange(k.shape[1], device=q.device) > row + lengths - q.shape[1]
        hidden = later if hidden is None else hidden | later
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    probs = scores.softmax(-1, dtype=v.dtype)
    if hidden is not None:
        probs = probs.masked_fill(hidden, 0.0)
    return torch.einsum("bhts,bshd->bthd", layer.drop(probs), v)


def _update_kv_cache(kv: Tensor, inference_params: Any, layer_idx: int) -> Tensor:
    """Write kv (batch, seqlen, 2, nheads_kv, headdim) at ``inference_params.seqlen_offset``.

    The layer's cache is allocated if there is none. Returns the view of it that is in use:
    (batch, seqlen_offset + seqlen, 2, nheads_kv, headdim).
    """
    caches = inference_params.key_value_memory_dict
    if layer_idx not in caches:
        rows, capacity = inference_params.max_batch_size, inference_params.max_seqlen
        caches[layer_idx] = kv.new_empty(rows, capacity, *kv.shape[2:])
    start = inference_params.seqlen_offset
    end = start + kv.shape[1]
    cache = _rows_of_batch(caches[layer_idx], inference_params, kv.shape[0])
    if end > cache.shape[1]:
        raise ValueError(f"the KV cache has room for {cache.shape[1]} tokens, got {end}")
    cache[:, start:end] = kv
    return cache[:, :end]


def _rows_of_batch(x: Tensor, inference_params: Any, batch: int) -> Tensor:
    """Those of the rows of x, one a sequence, that belong to this batch."""
    first = inference_params.batch_size_offset
    if first + batch > x.shape[0]:
        raise ValueError(
            f"inference_params has room for {x.shape[0]} sequences, got {batch} from number {first}"
        )
    return x[first : first + batch]


class MHA(nn.Module):
    """Multi-head attention: projections, rotary embedding, KV cache.

    Parameters
    ----------
    embed_dim, num_heads : int
        The head dim is embed_dim / num_heads.
    num_heads_kv : int, optional
        Heads of K and V, a divisor of ``num_heads``, which is the default.
    cross_attn : bool
        K and V come from ``x_kv``; projections are Wq and Wkv instead of Wqkv.
    qkv_proj_bias, out_proj_bias : bool
        Whether the projections have a bias.
    dropout, softmax_scale, causal, window_size
        See :class:`FlashSelfAttention`. A window and ALiBi need ``use_flash_attn``.
    layer_idx : int, optional
        Key of this layer's cache, for generation.
    dwconv : bool
        Convolve Q, K and V along the sequence, each channel with 3 taps of its own, causally.
    rotary_emb_dim : int
        Channels of a head to rotate by position; 0 for none. The next three arguments are those of
        :class:`flash_attn.layers.rotary.RotaryEmbedding`.
    use_alibi : bool
        Add a bias by distance; see :func:`get_alibi_slopes`.
    fused_bias_fc : bool
        Accepted for compatibility: ``torch.nn.Linear`` adds its bias in the matrix product.
    use_flash_attn : bool
        False, the default, holds the scores of all pairs in memory, and takes ``key_padding_mask``.
    return_residual : bool
        Return (out, x), the output and the input.
    checkpointing : bool
        Compute attention again in the backward instead of keeping what it needs.
    device, dtype : optional
        Of the parameters.

    Raises
    ------
    ValueError
        Naming the argument, what was given and what is accepted.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        for name, count in (("num_heads", num_heads), ("num_heads_kv", self.num_heads_kv)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        self.head_dim = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim = integer("rotary_emb_dim", rotary_emb_dim)
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing
        window_size = read_window(window_size)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of {num_heads} heads, got {embed_dim}")
        if num_heads % self.num_heads_kv:
            raise ValueError(f"num_heads_kv must divide {num_heads} heads, got {num_heads_kv}")
        if not use_flash_attn and (use_alibi or window_size != (-1, -1)):
            raise ValueError("use_alibi and window_size need use_flash_attn=True, got False")
        if self.rotary_emb_dim < 0:
            raise ValueError(f"rotary_emb_dim must be at least 0, got {rotary_emb_dim}")
        if cross_attn and rotary_emb_dim > 0:
            raise ValueError(f"rotary_emb_dim must be 0 with cross_attn, got {rotary_emb_dim}")

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_dim = 2 * self.num_heads_kv * self.head_dim
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                rotary_emb_base,
                rotary_emb_interleaved,
                rotary_emb_scale_base,
                device,
            )
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, qkv_proj_bias, **factory)
            self.Wkv = nn.Linear(embed_dim, kv_dim, qkv_proj_bias, **factory)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, qkv_proj_bias, **factory)
        convolutions = {}
        if dwconv and self.num_heads_kv == num_heads and not cross_attn:
            convolutions = {"dwconv_qkv": embed_dim + kv_dim}
        elif dwconv:
            convolutions = {"dwconv_q": embed_dim, "dwconv_kv": kv_dim}
        for name, dim in convolutions.items():
            setattr(self, name, nn.Conv1d(dim, dim, 3, padding=2, groups=dim, **factory))
        core: dict[str, Any] = {
            "causal": causal,
            "softmax_scale": softmax_scale,
            "attention_dropout": dropout,
        }
        self.inner_attn: _Attention
        self.inner_cross_attn: _Attention
        if use_flash_attn:
            slopes = self._slopes(device) if use_alibi else None
            core |= {"window_size": window_size, "alibi_slopes": slopes}
            self.inner_attn = FlashSelfAttention(**core)
            self.inner_cross_attn = FlashCrossAttention(**core)
        else:
            self.inner_attn, self.inner_cross_attn = SelfAttention(**core), CrossAttention(**core)
        self.out_proj = nn.Linear(embed_dim, embed_dim, out_proj_bias, **factory)

    def _slopes(self, device: Any) -> Tensor:
        slopes = get_alibi_slopes(self.num_heads)
        return torch.tensor(slopes, dtype=torch.float32, device=device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        cores = [x for x in (self.inner_attn, self.inner_cross_attn) if _is_on_meta(x)]
        super()._apply(fn, recurse)
        for core in cores:
            if not _is_on_meta(core):  # to_empty
                core.alibi_slopes = self._slopes(core.alibi_slopes.device)
        return self

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return memory for (batch_size, max_seqlen, 2, num_heads_kv, head_dim) keys and values."""
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return self.out_proj.weight.new_empty(shape, dtype=dtype, requires_grad=False)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return out, of the shape of x, or (out, x) with return_residual.

        Parameters
        ----------
        x : (batch, seqlen, embed_dim), or (total, embed_dim) with ``cu_seqlens``
        x_kv : (batch, seqlen_k, embed_dim), optional
            What K and V are projected from, with ``cross_attn``; x if None.
        key_padding_mask : (batch, seqlen_k) bool, optional
            True for the keys to see. Needs ``use_flash_attn=False``.
        cu_seqlens : (batch + 1,) int32, and max_seqlen : int, optional
            Where each sequence starts in x, and the longest length. Need ``use_flash_attn=True``;
            with ``cross_attn`` also ``cu_seqlens_k`` and ``max_seqlen_k``, of x_kv.
        mixer_subset : index, optional
            Positions of x that become queries, with ``cross_attn``.
        inference_params : optional
            The state of generation: an object with ``max_seqlen``, ``max_batch_size``,
            ``seqlen_offset`` (tokens in the cache, 0 for a prompt), ``batch_size_offset``,
            ``lengths_per_sample`` (None, or the tokens of each sequence, (batch,) int32) and
            ``key_value_memory_dict`` (caches by ``layer_idx``). The caller advances the offsets.
        **kwargs
            Handed to the inner attention, for example ``causal``. As upstream, a call with
            inference_params takes none of them.
        """
        padded, packed = key_padding_mask is not None, cu_seqlens is not None
        if padded and self.use_flash_attn:
            raise ValueError(
                "key_padding_mask needs use_flash_attn=False, got True; pass what "
                "flash_attn.bert_padding.unpad_input returns as x, cu_seqlens and max_seqlen"
            )
        if packed and (not self.use_flash_attn or self.dwconv or self.rotary_emb_dim > 0):
            raise ValueError("cu_seqlens needs use_flash_attn=True, no dwconv and rotary_emb_dim=0")
        if inference_params is not None and (packed or padded or self.dwconv):
            raise ValueError("inference_params excludes cu_seqlens, key_padding_mask and dwconv")
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            raise ValueError("x_kv and mixer_subset need cross_attn=True, got False")
        if self.use_flash_attn:
            kwargs = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **kwargs}
        else:
            kwargs = {"key_padding_mask": key_padding_mask, **kwargs}

        inner: _Attention = self.inner_cross_attn
        if not self.cross_attn and self.num_heads_kv == self.num_heads:
            inner = self.inner_attn
            qkv = self._convolved("qkv", self.Wqkv(x)).unflatten(-1, (3, -1, self.head_dim))
            inputs: tuple[Tensor, ...] = (qkv,)
        else:
            if self.cross_attn:
                q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
                kv = self.Wkv(x if x_kv is None else x_kv)
            else:
                q, kv = self.Wqkv(x).tensor_split([self.embed_dim], dim=-1)
            q = self._convolved("q", q).unflatten(-1, (-1, self.head_dim))
            kv = self._convolved("kv", kv).unflatten(-1, (2, -1, self.head_dim))
            inputs = q, kv
        if inference_params is not None:
            q, kv = inputs if len(inputs) == 2 else (qkv[:, :, 0], qkv[:, :, 1:])
            context = self._attend_to_cache(q, kv, inference_params)
        else:
            if self.rotary_emb_dim > 0:
                rotated = self.rotary_emb(*inputs)
                inputs = rotated if len(inputs) == 2 else (rotated,)
            if inner is self.inner_cross_attn and not self.cross_attn:
                if self.use_flash_attn:
                    kwargs = {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen, **kwargs}
                else:  # padding may be anywhere, so keys keep their positions
                    inner = self.inner_attn
                    k, v = _expanded(inputs[1], self.num_heads).unbind(2)
                    inputs = (torch.stack([inputs[0], k, v], dim=2),)
            if self.checkpointing:
                context = checkpoint(inner, *inputs, use_reentrant=False, **kwargs)
            else:
                context = inner(*inputs, **kwargs)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _convolved(self, name: str, x: Tensor) -> Tensor:
        """x (batch, seqlen, channels) after the causal convolution of this name, if any."""
        if not self.dwconv:
            return x
        return getattr(self, f"dwconv_{name}")(x.mT)[..., :-2].mT.contiguous()

    def _attend_to_cache(self, q: Tensor, kv: Tensor, inference_params: Any) -> Tensor:
        """Add this step's keys and values to the layer's cache, and attend to all of it."""
        if self.layer_idx is None:
            raise ValueError("layer_idx must be given to the constructor for generation, got None")
        inner = self.inner_cross_attn
        prompt = inference_params.seqlen_offset == 0
        offset = inference_params.seqlen_offset
        if inference_params.lengths_per_sample is not None:
            lengths = inference_params.lengths_per_sample
            offset = _rows_of_batch(lengths, inference_params, q.shape[0]).int()
        window_size = getattr(inner, "window_size", (-1, -1))
        # flash_attn_with_kvcache rotates neither by XPos, nor queries without a mask one by one.
        masked = inner.causal or window_size != (-1, -1)
        cos = sin = None
        if self.rotary_emb_dim > 0:
            if prompt or not masked or self.rotary_emb.scale is not None:
                q, kv = self.rotary_emb(
                    q, kv, seqlen_offset=offset, max_seqlen=inference_params.max_seqlen
                )
            else:
                max_seqlen = inference_params.max_seqlen
                cos, sin, *_ = self.rotary_emb._tables(max_seqlen, q.device, q.dtype)
        if prompt:
            return inner(q, _update_kv_cache(kv, inference_params, self.layer_idx))
        if self.layer_idx not in inference_params.key_value_memory_dict:
            raise ValueError(
                f"inference_params.key_value_memory_dict has no cache of layer {self.layer_idx}, "
                f"whose prompt must come first, got seqlen_offset {offset}"
            )
        cache = inference_params.key_value_memory_dict[self.layer_idx]
        k_cache, v_cache = _rows_of_batch(cache, inference_params, q.shape[0]).unbind(2)
        slopes = getattr(inner, "alibi_slopes", None)
        return flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            kv[:, :, 0],
            kv[:, :, 1],
            cos,
            sin,
            cache_seqlens=offset,
            softmax_scale=inner.softmax_scale,
            causal=inner.causal,
            window_size=window_size,
            rotary_interleaved=self.rotary_emb_dim > 0 and self.rotary_emb.interleaved,
            alibi_slopes=slopes,
        )
