"""Quantise on the GPU, with the bits of `dsv4lib.formats`. Rows to a block format, entries into a paged pool."""

from dsv4lib.ops.quantize.op import (
    Quantized,
    bytes_at_once,
    output_shapes,
    quantize,
    quantize_indexer_keys,
    quantize_kv_entries,
    workspace_size,
)

__all__ = [
    "Quantized",
    "bytes_at_once",
    "output_shapes",
    "quantize",
    "quantize_indexer_keys",
    "quantize_kv_entries",
    "workspace_size",
]
