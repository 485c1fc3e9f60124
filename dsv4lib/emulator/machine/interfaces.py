"""Declare what CTAs, units and checks know of the machine and of a warp.

Neither is imported.

A machine owns clusters of CTAs, a CTA its warps, and each of them leads back to the machine. These protocols name what
the way back is used for; `machine.Machine` and `warp.Warp` are what runs.
"""

from __future__ import annotations

from typing import Any, Protocol


class MachineView(Protocol):
    """One launch as its parts see it.

    Attributes:
        time: warp-instructions executed; ahead: by other launches that run at the same time.
        device: number of the device, None where there is only one.
        gmem: global memory. program: the lowered kernel. scheduler: of its warps. clusters: resident ones.
        race: the race detector, or None. trace: the recorder, or None. marks: of accessed words, or None.
        stats: counters by name.
        grid: CTAs in x, y, z. smem_bytes: of a CTA. param_address: of the kernel's parameters.
    """

    time: int
    ahead: int
    device: int | None
    gmem: Any
    program: Any
    scheduler: Any
    clusters: Any
    race: Any
    trace: Any
    marks: Any
    stats: Any
    grid: tuple[int, int, int]
    smem_bytes: int
    param_address: int

    def report(self, kind: str, message: str, place: Any, **facts: Any) -> None:
        """Add a hazard to the launch's result."""

    def changed(self, lasting: bool = True) -> None:
        """Signal to the scheduler an event that a warp may wait for."""

    def variable_address(self, name: str) -> int:
        """Get the address of a module's variable."""


class WarpView(Protocol):
    """A warp as services of instructions see it.

    Attributes:
        cta: its CTA. program: the lowered kernel. ctx: its context as native code has it.
    """

    cta: Any
    program: Any
    ctx: Any

    def lanes(self) -> Any:
        """List the active lanes, ascending."""

    def place(self, instr: Any = None) -> Any:
        """Say where the warp stands: kernel, CTA, PTX line, Python line."""

    def read(self, operand: Any, dtype: Any) -> Any:
        """Read an operand in all lanes."""
