"""Sort routes by expert, as a torch op. A grouped GEMM reads its rows by the result."""

from dsv4lib.ops.moe_dispatch.op import Dispatch, check_rows, moe_dispatch

__all__ = ["Dispatch", "check_rows", "moe_dispatch"]
