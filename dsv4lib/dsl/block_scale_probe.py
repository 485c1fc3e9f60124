"""Find which variants of a block-scaled MMA an architecture's assembler takes.

The size of a scale's block can be written in two ways, ``.scale_vec::4X`` (scales per instruction) or ``.block16``
(elements per scale). PTX ISA lists both; which target takes which is settled by assembling one instruction, with the
ptxas that the DSL carries, for that target. Nothing runs. ``python -m dsv4lib.dsl.block_scale_probe`` writes the
answers to data/formats/block_scale_targets.csv, which a test compares with the assembler.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute

from dsv4lib.dsl.compile import CompileError, compile_for

TABLE = Path(__file__).resolve().parents[2] / "data" / "formats" / "block_scale_targets.csv"
TARGETS = ("sm_100a", "sm_100f", "sm_103a")
TAKEN = "takes it"
KINDS = {  # kind -> variants of the block of a scale
    "mxf8f6f4": ("scale_vec::1X", "block32"),
    "mxf4": ("scale_vec::2X", "block32"),
    "mxf4nvf4": ("scale_vec::2X", "scale_vec::4X", "block32", "block16"),
}


class BlockScaleProbe:
    """A kernel of one block-scaled MMA that is assembled and never launched."""

    def __init__(self, kind: str, block: str, ctas: int = 1):
        self.opcode = f"tcgen05.mma.cta_group::{ctas}.kind::{kind}.block_scale.{block}"

    def __repr__(self) -> str:
        return self.opcode

    @cute.jit
    def __call__(self, word: cutlass.Int32, descriptor: cutlass.Int64):
        """Host side."""
        self.kernel(word, descriptor).launch(grid=[1, 1, 1], block=[32, 1, 1])

    @cute.kernel
    def kernel(self, word: cutlass.Int32, descriptor: cutlass.Int64):
        """Run one MMA, every operand an argument. D, A, B, instruction descriptor, scales of A and of B, accumulate."""
        text = (
            "{ .reg .pred accumulate; setp.ne.b32 accumulate, {$r2}, 0; "
            f"{self.opcode} [{{$r0}}], {{$r1}}, {{$r1}}, {{$r2}}, [{{$r0}}], [{{$r0}}], accumulate; }}"
        )
        cute.arch.inline_ptx(text, read_only_args=[word, descriptor, word + 1])


def refusal(kind: str, block: str, arch: str, ctas: int = 1) -> str | None:
    """Return the assembler's error for the instruction on ``arch``, or None.

    None: it takes the instruction.

    Args:
        kind, block: as in `KINDS`.
        arch: a target of `compile_for`.
        ctas: 1, or 2 for a pair.

    Raises:
        CompileError: the compiler failed before the assembler saw the instruction.
    """
    arguments: tuple[Any, ...] = (cutlass.Int32(0), cutlass.Int64(0))
    probe = BlockScaleProbe(kind, block, ctas)
    try:
        compiled = compile_for(probe, arguments, arch)
    except CompileError as error:
        _, found, said = str(error).partition("PTX assembly failed: ")
        if not found:
            raise
        return said.rpartition(" (")[0] or said  # without the Python line, which is that of the probe
    if probe.opcode not in compiled.ptx or f".target {arch}" not in compiled.ptx:
        raise CompileError(f"{probe!r} is not in what was compiled for {arch}")
    return None


def recorded() -> dict[tuple[str, str, str], str]:
    """Read the committed answers: (kind, block, target) -> `TAKEN`, or what the assembler says."""
    with TABLE.open() as file:
        rows = list(csv.DictReader(file))
    return {(row["kind"], row["block"], target): row[target] for row in rows for target in TARGETS}


def write() -> None:
    """Ask the assembler everything and write the table."""
    with TABLE.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("kind", "block", *TARGETS))
        for kind, blocks in KINDS.items():
            for block in blocks:
                out.writerow((kind, block, *(refusal(kind, block, target) or TAKEN for target in TARGETS)))


if __name__ == "__main__":
    write()
