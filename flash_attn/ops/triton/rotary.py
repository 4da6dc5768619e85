"""The import path of upstream's Triton rotary kernel, whose signature this one has."""

from flash_attn._rotary import apply_rotary

__all__ = ["apply_rotary"]
