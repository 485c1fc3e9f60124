"""Serve notebooks, a folder a topic. `run_case` runs kernels and judges them, `figures` draws."""
