"""Functions that a compiled graph calls, untraced. Importing them imports the compiler.

That takes as long as importing all of torch, so only compiled code does it.
"""

import torch
from torch import Tensor

from flash_attn._rotary import refuses_writes


@torch.compiler.allow_in_graph
def refusal(x: Tensor) -> Tensor:
    """:func:`refuses_writes` as a size: of what it does not trace, Dynamo takes only tensors."""
    return x.new_empty(int(refuses_writes(x)))


@torch.compiler.allow_in_graph
def stored(x: Tensor, value: Tensor) -> Tensor:
    """Copy ``value`` to ``x`` behind autograd's back.

    Traced, ``x.data`` would become ``x.detach()`` in older releases, which moves the version.
    """
    with torch.no_grad():
        x.data.copy_(value)
    return value
