"""Inject faults into the kernel, one at a time: each class replaces one thing. `FAULTS` holds them by name."""

from __future__ import annotations

from cutlass import Int32

from dsv4lib.ops.inv_rope_quant import kernel as inv_rope_quant_kernel


class WarpsOnTop(inv_rope_quant_kernel.InvRopeQuant):
    """All warps of a token store codes from its first head on: right for as many heads as a warp has."""

    def stored_from(self, first: Int32) -> Int32:
        """Forget the warp."""
        return Int32(0)


FAULTS = {WarpsOnTop.__name__: WarpsOnTop}
