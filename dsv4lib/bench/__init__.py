"""Measure: how fast the emulator is here and, on GPUs, how fast the kernels are."""
