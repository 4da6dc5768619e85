"""Attention and MLP layers for transformer blocks."""
