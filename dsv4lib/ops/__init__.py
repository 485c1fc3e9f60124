"""Torch-facing functions: they check their arguments, choose a back end, compile once and launch."""
