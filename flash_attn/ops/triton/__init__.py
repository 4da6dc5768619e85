"""Operations that upstream writes in Triton."""
