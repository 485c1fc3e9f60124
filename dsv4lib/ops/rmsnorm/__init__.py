"""Normalise bf16 rows, as torch ops. `dsv4::rmsnorm`, and `dsv4::add_rmsnorm` with an addition before it."""

from dsv4lib.ops.rmsnorm.op import add_rmsnorm, rmsnorm

__all__ = ["add_rmsnorm", "rmsnorm"]
