"""Compute a kernel's budget from its configuration: its use of each SM resource."""

from __future__ import annotations

from dataclasses import dataclass

SMEM_LIMIT = 232_448  # bytes one CTA may use on SM90 and SM100 (228 KiB less 1 KiB kept by the system)
TMEM_COLUMNS = 512
SMEM_ALIGN = 1024  # bytes: one 128-byte swizzle atom is 8 rows of 128 B


@dataclass(frozen=True)
class BudgetRow:
    """One line of a kernel's budget: what, how much, of how much, and why that number."""

    resource: str
    used: int
    limit: int
    unit: str
    derivation: str


def whole_atoms(used: int) -> int:
    """Round ``used`` bytes of SMEM up to units of its alignment.

    The launch asks for whole units.
    """
    return -(-used // SMEM_ALIGN) * SMEM_ALIGN
