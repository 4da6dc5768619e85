"""The import path of upstream's Triton rotary kernel.

No Triton is needed: :func:`apply_rotary` is the PyTorch implementation of ``flash_attn._rotary``,
with the same signature.
"""

from flash_attn._rotary import apply_rotary

__all__ = ["apply_rotary"]
