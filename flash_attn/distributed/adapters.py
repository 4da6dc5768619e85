"""Context parallelism for models that call attention by themselves.

- ``register_with_transformers``: an ``attn_implementation`` of Hugging Face transformers.
- ``context_parallel``: in the place of PyTorch's experimental context manager of that name.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from flash_attn._transformers import asks_for_no_more_than_a_window, check_name, options
from flash_attn.distributed._layout import Group, Order, grid_of, shard, unshard
from flash_attn.distributed.functions import ring_flash_attn_func, ulysses_flash_attn_func

Method = Literal["ring", "ulysses"]


def _attention(group: Group, method: Method, order: Order) -> Callable[..., Tensor]:
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    grid_of(group)
    if order not in get_args(Order):
        raise ValueError(f"order must be one of {', '.join(get_args(Order))}, got {order!r}")
    if method == "ulysses":
        return partial(ulysses_flash_attn_func, group=group)
    return partial(ring_flash_attn_func, group=group, order=order)


def register_with_transformers(
    name: str = "context_parallel",
    *,
    group: Group = None,
    method: Method = "ring",
    order: Order = "zigzag",
) -> str:
    """Register an attention with transformers; return ``name``, for ``attn_implementation``.

    The model then takes this rank's tokens: ``input_ids`` from ``shard`` and ``position_ids`` from
    ``position_ids``, both also with a batch dimension. Two keyword arguments of the model's forward
    reach the attention: ``cu_seq_lens_q``, where the documents of the whole sequence begin and the
    last ends (batch 1), and ``seqlen``, as of ``ring_flash_attn_func``. ``labels`` are the model's
    own shift by one token, which is wrong at the ends of a rank's pieces: compute the loss from the
    logits and from targets that ``shard`` has divided.

    Parameters
    ----------
    name : str
        Without "flash", by which transformers knows implementations that it loads itself.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that share a sequence.
    method : {"ring", "ulysses"}
        Which attention. "ulysses" wants contiguous order.
    """
    check_name(name)
    from transformers import AttentionInterface, AttentionMaskInterface

    attend = _attention(group, method, order)

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        indices: Any = None,
        block_indices: Any = None,
        cu_seq_lens_q: Any = None,
        seqlen: int | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Of (batch, nheads, tokens, headdim), to (batch, tokens, nheads, headdim)."""
        if attention_mask is not None:
            _refuse_mask()
        if any(x is not None for x in (position_bias, indices, block_indices)):
            raise ValueError(
                "position_bias, indices and block_indices must be None, as no ranks share them, "
                f"got one of {type(module).__name__}"
            )
        qkv = [x.transpose(1, 2) for x in (query, key, value)]
        asked = options(module, dropout, scaling, sliding_window, softcap, is_causal, s_aux)
        if cu_seq_lens_q is not None:
            if query.shape[0] != 1:
                raise ValueError(f"cu_seq_lens_q wants a batch of 1, got {query.shape[0]}")
            qkv = [x[0] for x in qkv]
            asked["cu_seqlens"] = cu_seq_lens_q
        out = attend(*qkv, seqlen=seqlen, **asked)
        return out if cu_seq_lens_q is None else out[None], None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _no_mask)
    return name


def _refuse_mask() -> None:
    raise ValueError(
        "attention_mask must be None, got a tensor: pack sequences without padding, and pass "
        "cu_seq_lens_q"
    )


@torch.compiler.disable
def _no_mask(
    *unused: Any,
    mask_function: Callable[..., Any],
    kv_length: int,
    attention_mask: Tensor | None = None,
    **more: Any,
) -> None:
    """What transformers asks of a mask the attention knows: causal masks and windows."""
    if attention_mask is not None and not attention_mask.all():
        _refuse_mask()
    if not asks_for_no_more_than_a_window(mask_function):
        raise ValueError(
            "the model must ask for causal masks and windows alone, where ranks share a sequence, "
            f"got {getattr(mask_function, '__qualname__', mask_function)}"
        )


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    method: Method = "ring",
) -> Generator[None, None, None]:
    """Within it, ``scaled_dot_product_attention`` attends over the ranks of ``mesh``.

    As ``torch.distributed.tensor.experimental.context_parallel``: the ``buffers``, which every rank
    has whole, become this rank's tokens along ``buffer_seq_dims`` in place, in zigzag order (with
    "ulysses", contiguous), and are themselves again in the end but for ``no_restore_buffers``. The
    mesh may have 2 dimensions with "ring". What is patched is ``torch.nn.functional``'s name: call
    it as ``F.scaled_dot_product_attention``. An ``attn_mask`` raises ValueError, as do buffers that
    require a gradient, another number of dimensions than of buffers, and ``no_restore_buffers``
    that are no buffers; what is no tensor raises TypeError.
    """
    buffers, dims = buffers or [], buffer_seq_dims or []
    if len(buffers) != len(dims):
        raise ValueError(
            f"buffer_seq_dims must have one dimension for each of {len(buffers)} buffers, "
            f"got {len(dims)}"
        )
    order = _order(method)
    kept = {id(x) for x in no_restore_buffers or ()}
    for x in buffers:
        if not isinstance(x, Tensor):
            raise TypeError(f"buffers must be tensors, got {type(x).__name__}")
        if x.requires_grad:
            raise ValueError("buffers are changed in place and must not require a gradient")
    if not kept <= {id(x) for x in buffers}:
        raise ValueError("no_restore_buffers must be among buffers")
    # A buffer gets memory of its own: its memory may be that of others, too.
    whole = [None if id(x) in kept else x.detach() for x in buffers]
    seqlen = buffers[0].shape[dims[0]] if buffers else None
    attend = _attention(mesh, method, order)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError("attn_mask must be None in context_parallel, got a tensor")
        if not enable_gqa and query.shape[-3] != key.shape[-3]:
            raise ValueError("key must have the heads of query unless enable_gqa is given")
        qkv = [x.transpose(1, 2) for x in (query, key, value)]
        out = attend(*qkv, dropout_p, scale, is_causal, seqlen=seqlen)
        return out.transpose(1, 2)

    before = functional.scaled_dot_product_attention
    try:
        with torch.no_grad():
            for x, dim in zip(buffers, dims, strict=True):
                x.set_(shard(x, dim, mesh, order).contiguous())  # type: ignore[call-overload]
        functional.scaled_dot_product_attention = attention
        yield
    finally:
        functional.scaled_dot_product_attention = before
        with torch.no_grad():
            for x, original in zip(buffers, whole, strict=True):
                if original is not None:
                    x.set_(original)  # type: ignore[call-overload]


def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    method: Method = "ring",
) -> list[Tensor]:
    """Return the whole tensors from what each rank has of them in ``context_parallel``.

    ``seq_dims`` are the dimensions of the tokens, ``method`` is that of ``context_parallel``.
    """
    order = _order(method)
    with torch.no_grad():
        return [unshard(x, dim, mesh, order) for x, dim in zip(buffers, seq_dims, strict=True)]


def _order(method: Method) -> Order:
    return "contiguous" if method == "ulysses" else "zigzag"
