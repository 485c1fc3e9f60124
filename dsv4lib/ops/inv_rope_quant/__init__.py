"""Rotate attention's output back and quantise it, as a torch op. E4M3 1x128 for an FP8 grouped output projection."""

from dsv4lib.ops.inv_rope_quant.op import inv_rope_quant, shape_of

__all__ = ["inv_rope_quant", "shape_of"]
