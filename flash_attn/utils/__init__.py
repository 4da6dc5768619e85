"""Utilities under their upstream import paths."""
