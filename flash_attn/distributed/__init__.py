"""Attention over a sequence that does not fit one GPU, by torch.distributed.

Each rank holds some of the tokens (``shard``) and calls the same function, with the options of
``flash_attn_func``; forward and backward are those of one process with all tokens.

- ``ring_flash_attn_func``: keys and values come to each rank. Any number of ranks. On a mesh of two
  dimensions: heads within a node, rings between nodes.
- ``ulysses_flash_attn_func``: each rank takes some heads, whose number must be a multiple of
  the number of ranks.

docs/scale-out.md says when to use which.
"""

from flash_attn.distributed._layout import position_ids, shard, unshard
from flash_attn.distributed.functions import ring_flash_attn_func, ulysses_flash_attn_func

__all__ = [
    "position_ids",
    "ring_flash_attn_func",
    "shard",
    "ulysses_flash_attn_func",
    "unshard",
]
