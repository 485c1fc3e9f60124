"""Residual addition, RMSNorm and quantisation of the normed rows, as a torch op."""

from dsv4lib.ops.add_rmsnorm_quant.op import Normed, add_rmsnorm_quant

__all__ = ["Normed", "add_rmsnorm_quant"]
