"""Apply SwiGLU and cast to FP8 in one launch: `torch.ops.dsv4.swiglu_quant`."""

from dsv4lib.ops.swiglu_quant.op import swiglu_quant

__all__ = ["swiglu_quant"]
