"""Gather 584-byte entries of pages as bf16 rows, as a torch op: `dsv4::kv_gather`."""

from dsv4lib.ops.kv_gather.op import kv_gather

__all__ = ["kv_gather"]
