"""Normalise rows and quantise them, after an addition or not, as torch ops."""

from dsv4lib.ops.rmsnorm_quant.op import AddNormed, Normed, add_rmsnorm_quant, rmsnorm_quant

__all__ = ["AddNormed", "Normed", "add_rmsnorm_quant", "rmsnorm_quant"]
