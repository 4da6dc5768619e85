"""Layers built on attention: rotary position embedding."""
