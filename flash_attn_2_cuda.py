"""The module of raw functions that TransformerEngine, TGI and others import."""

from flash_attn._flash_attn_2 import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
