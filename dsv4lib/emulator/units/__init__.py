"""Implement the units of an SM that are more than arithmetic: barriers, TMA, tensor memory and tensor cores."""
