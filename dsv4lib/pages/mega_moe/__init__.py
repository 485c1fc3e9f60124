"""What the notebook of the fused MoE calls."""
