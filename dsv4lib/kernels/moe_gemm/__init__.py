"""Grouped GEMMs of the experts: ragged groups of tokens, block-scaled operands, SwiGLU and requantisation."""
