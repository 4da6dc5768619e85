"""Operations under their upstream import paths."""
