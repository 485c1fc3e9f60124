"""What the notebook of the 4-bit KV cache calls."""
