"""Hopper's linear layers of few tokens over FP8 weights as DSV4 releases them."""

from dsv4lib.ops.linear.sm90.op import linear_fp8

__all__ = ["linear_fp8"]
