"""For code that calls attention by other names than this library's.

- ``register_with_pytorch``: ``scaled_dot_product_attention`` and what else calls PyTorch's flash
  attention.
- ``register_with_transformers``: an ``attn_implementation`` of Hugging Face transformers.

``flash_attn.distributed.adapters`` has others for sequences that are divided among GPUs.
"""

import inspect

import torch

from flash_attn import _transformers


def register_with_pytorch(name: str = "exact") -> str:
    """Register this library with PyTorch; return ``name``, for ``activate_flash_attention_impl``.

    Once that is activated, the operators of PyTorch's flash attention run here, forward and
    backward, with dropout, and flash attention is the first choice of
    ``scaled_dot_product_attention``::

        torch.nn.attention.activate_flash_attention_impl(register_with_pytorch())

    Calls that flash attention does not take, as those with a mask, run as before. A call takes the
    host longer than PyTorch's own. ``torch.compile`` chooses when it compiles: what was compiled
    before the activation runs as before. Activation uses the current GPU, so
    ``torch.cuda.set_device`` comes first; without kernels for that GPU it raises RuntimeError.
    ``torch.nn.attention.restore_flash_attention_impl()`` puts PyTorch's own back.

    Raises
    ------
    ImportError
        Where PyTorch takes no implementations, before 2.11.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise ImportError(
            f"torch is too old for register_with_pytorch: install 2.11 or newer, got "
            f"{torch.__version__}"
        ) from error
    from flash_attn._sdpa import Activation

    register_flash_attention_impl(name, register_fn=Activation)
    return name


def register_with_transformers(name: str = "exact") -> str:
    """Register this library with transformers; return ``name``, for ``attn_implementation``::

        model.set_attn_implementation(register_with_transformers())

    "flash_attention_2" reaches this library through code of transformers that, in each layer, looks
    at the positions of the tokens and waits for the GPU, and with padding or a static cache also
    copies the keys. Here what depends on the batch is found once a step, and padded keys and static
    caches are read where they are.

    It takes what "flash_attention_2" takes, in training and generation: causal, bidirectional and
    cross-attention, padding, packed sequences, sliding windows, softcap, attention sinks and all
    caches; and chunks. Padding tokens get finite outputs without a meaning. Where a model lets
    other scores be seen (image tokens that see each other, a hole in a row of keys), the layer runs
    PyTorch's ``scaled_dot_product_attention`` on a mask. That has no softcap and no sinks: they
    raise ValueError then. Models without "flash_attention_2" get such masks, as with "sdpa", or
    raise ValueError if they have no "sdpa" either, or attention code of their own.

    In a compiled model, masks are made outside of compiled code. So are the positions of a batch of
    one row looked at, which may be packed. With ``fullgraph=True`` both raise an error, but not in
    a step of ``generate`` with a static cache, which makes the mask before.

    Parameters
    ----------
    name : str
        Without "flash", by which transformers knows implementations that it loads itself.

    Raises
    ------
    ImportError
        If transformers is not installed, or is too old to tell a mask where the queries begin.
    """
    _transformers.check_name(name)
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError("transformers is too old for flash_attn.adapters: install 5.17 or newer")
    AttentionInterface.register(name, _transformers.attention)
    AttentionMaskInterface.register(name, _transformers.mask)
    return name
