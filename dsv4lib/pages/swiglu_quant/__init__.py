"""What the notebook of `swiglu_quant` calls."""
