"""Where clients look for FlashAttention-3 beside ``flash_attn_interface``."""
