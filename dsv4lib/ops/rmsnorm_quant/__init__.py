"""RMSNorm and quantisation of the normed rows as torch ops; the second with a residual's addition before it."""

from dsv4lib.ops.rmsnorm_quant.op import AddNormed, Normed, add_rmsnorm_quant, rmsnorm_quant

__all__ = ["AddNormed", "Normed", "add_rmsnorm_quant", "rmsnorm_quant"]
