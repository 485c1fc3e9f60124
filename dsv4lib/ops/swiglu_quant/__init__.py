"""SwiGLU and a cast to FP8 in one launch, as a torch op: `swiglu_quant` calls `torch.ops.dsv4.swiglu_quant`."""

from dsv4lib.ops.swiglu_quant.op import swiglu_quant

__all__ = ["swiglu_quant"]
