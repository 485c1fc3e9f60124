"""Run an MoE layer over several devices, one kernel a device: dispatch, both GEMMs and combine fused."""

from dsv4lib.ops.mega_moe.buffer import SymmetricBuffer
from dsv4lib.ops.mega_moe.layout import Layout
from dsv4lib.ops.mega_moe.op import Operand, mega_moe

__all__ = ["Layout", "Operand", "SymmetricBuffer", "mega_moe"]
