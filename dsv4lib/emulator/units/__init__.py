"""Implement the units of an SM that are more than arithmetic. Barriers, TMA, tensor memory and tensor cores."""
