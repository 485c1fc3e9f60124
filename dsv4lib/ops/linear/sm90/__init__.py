"""Apply linear layers of few tokens on a Hopper. FP8 weights as DSV4 releases them, and bf16."""

from dsv4lib.ops.linear.sm90.op import linear_hopper

__all__ = ["linear_hopper"]
