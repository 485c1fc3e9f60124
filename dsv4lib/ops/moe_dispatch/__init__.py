"""Routes in the order of their experts, as a torch op: what a grouped GEMM reads its rows by."""

from dsv4lib.ops.moe_dispatch.op import Dispatch, check_rows, moe_dispatch

__all__ = ["Dispatch", "check_rows", "moe_dispatch"]
