"""The KV compressor as a torch op, `dsv4::compressor`: rows in, packed entries and the state out, in place."""

from dsv4lib.ops.compressor.op import Batch, Pages, Ring, Running, Weights, compressor, cut, streamed

__all__ = ["Batch", "Pages", "Ring", "Running", "Weights", "compressor", "cut", "streamed"]
