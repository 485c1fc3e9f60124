"""Apply linear layers over quantised weights, as a torch op. Dense NVFP4, MXFP8 (DSV4's FP8), W4A8 and bf16 ones."""

from dsv4lib.ops.linear.op import launch, linear, mxfp8_of, warm_up

__all__ = ["launch", "linear", "mxfp8_of", "warm_up"]
