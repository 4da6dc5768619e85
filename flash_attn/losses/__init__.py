"""Losses under their upstream import paths."""
