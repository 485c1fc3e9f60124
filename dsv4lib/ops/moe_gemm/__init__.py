"""Run the experts' GEMMs as a torch op. Ragged groups of tokens times quantised weights, SwiGLU and requantisation."""

from dsv4lib.ops.moe_gemm.op import (
    Operand,
    check_devices,
    check_formats,
    check_global,
    finished,
    largest,
    moe_gemm,
    new_output,
    numbers,
    tile_of,
    warm_up,
)

__all__ = [
    "Operand",
    "check_devices",
    "check_formats",
    "check_global",
    "finished",
    "largest",
    "moe_gemm",
    "new_output",
    "numbers",
    "tile_of",
    "warm_up",
]
