"""Run the experts' GEMM on Hopper. MXFP4 weights, tiled at load time, times MXFP8 or bf16 activations."""

from dsv4lib.ops.moe_gemm.sm90.layout import tile_weights, untile_weights

__all__ = ["tile_weights", "untile_weights"]
