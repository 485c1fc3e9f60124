"""Compress KV as a torch op, `dsv4::compressor`. Rows go in, packed entries and the state come out, in place."""

from dsv4lib.ops.compressor.op import Batch, Pages, Ring, Running, Weights, compressor, cut, streamed

__all__ = ["Batch", "Pages", "Ring", "Running", "Weights", "compressor", "cut", "streamed"]
