"""Faults of an append, injected one at a time. Every class is the kernel with one thing replaced, and compiles.

`FAULTS` holds them by name.
"""

from __future__ import annotations

from cutlass import Boolean, Int32

from dsv4lib.ops.kv_append import kernel as kv_append_kernel


class OneSlotLate(kv_append_kernel.KvAppend):
    """Counts positions from 1: every key is one slot too far on."""

    def slot_of(self, start: Int32, number: Int32) -> Int32:
        """The next slot."""
        return (start + number + 1) % self.window


class SlotOfTheRow(kv_append_kernel.KvAppend):
    """Counts slots from the first row of the call: right as long as every call starts at a multiple of the window."""

    def slot_of(self, start: Int32, number: Int32) -> Int32:
        """Without the position."""
        return number % self.window


class OlderRowsToo(kv_append_kernel.KvAppend):
    """Stores rows that newer ones of the same call replace: the last one decides."""

    def __init__(self, window: int = 128, by_slot: bool = False, warps: int = 4):
        super().__init__(window, False, warps)  # a warp a row: by slot no other row is looked at

    def kept(self, left: Int32) -> Boolean:
        """Every row."""
        return left > 0


FAULTS = {kernel.__name__: kernel for kernel in (OneSlotLate, SlotOfTheRow, OlderRowsToo)}
