"""Operations that upstream writes in Triton; plain PyTorch here."""
