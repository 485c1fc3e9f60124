"""Run one PTX instruction variant on 32 lanes through the compiled handler, the way the driver loop calls it."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.library import Compiled, Library, emit

FULL = 0xFFFFFFFF
PARTIAL = 0xA5F01236  # some lanes of every byte
DTYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
TESTED: set[str] = set()  # variants that some test has run


_FOLDER = tempfile.TemporaryDirectory(prefix="dsv4-native-")  # removed at the end of the process


@functools.cache
def library() -> Library:
    """One library for the test process, with a cold cache."""
    return Library(Path(_FOLDER.name))


@dataclass
class Unit:
    """A handler with a register file of its own.

    Registers are numbered by flattened operand. ``same`` maps an operand to the one whose register it shares.
    """

    opcode: str
    shape: str
    compiled: Compiled
    same: dict[int, int]

    def __post_init__(self) -> None:
        TESTED.add(self.opcode)
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self.compiled.address)
        memory = np.zeros(64 + 512 * (len(self.compiled.widths) + 1), np.uint8)
        skip = -memory.ctypes.data % 64
        self.memory, self.file = memory, memory[skip:]
        self.context = np.zeros(1, abi.CONTEXT)
        self.context["regs"] = self.file.ctypes.data
        self.record = np.zeros(1, abi.RECORD)
        for i in range(len(self.compiled.widths)):
            self.record["operand"][0, i] = 512 * self.same.get(i, i)

    def register(self, i: int) -> np.ndarray:
        """Operand ``i``: 32 lanes as unsigned integers, [lo 32, hi 32] for 128 bits, or one word for a predicate."""
        bits = self.compiled.widths[i]
        at = self.file[512 * self.same.get(i, i) :]
        if bits == 1:
            return at[:4].view(np.uint32)
        return at[:512].view(np.uint64) if bits == 128 else at[: 4 * bits].view(DTYPES[bits])

    def run(self, inputs: dict[int, np.ndarray | int], mask: int = FULL, **context: int) -> None:
        """Fill every operand with a pattern, set ``inputs``, call. Read results with ``register``."""
        self.file[:] = 0xCD
        for i, value in inputs.items():
            target = self.register(i)
            value = np.asarray(value)
            target[:] = value.view(target.dtype) if value.dtype.itemsize == target.dtype.itemsize else value
        self.context["mask"] = mask
        for name, value in context.items():
            self.context[name] = value
        self.context["fault"] = abi.FAULT_NONE
        code = self.function(self.context.ctypes.data, self.record.ctypes.data)
        # Lanes outside their member mask are reported, and get a result all the same.
        outside = code == abi.STOP_FAULT and self.context["fault"] == abi.FAULT_OUTSIDE
        assert code == abi.CONTINUE or outside, f"{self.opcode} returned {code}"


def prepare(wanted: Sequence[tuple[str, str]]) -> None:
    """Compile many variants in one batch."""
    library().handlers(wanted)


def unit(opcode: str, shape: str, same: dict[int, int] | None = None) -> Unit:
    """A handler ready to run."""
    compiled = library().handlers([(opcode, shape)])[opcode, shape]
    return Unit(opcode, shape, compiled, same or {})


def lanes(mask: int) -> np.ndarray:
    """bool[32] of a lane mask."""
    return (mask >> np.arange(32) & 1).astype(bool)


def word(flags: np.ndarray) -> int:
    """Inverse of ``lanes``."""
    return int((np.asarray(flags, np.uint64) << np.arange(32, dtype=np.uint64)).sum())


def check(
    opcode: str,
    shape: str,
    inputs: dict[int, np.ndarray],
    want: dict[int, np.ndarray],
    same: dict[int, int] | None = None,
    any_nan: bool = False,
    **context: int,
) -> None:
    """Compare a variant with its expected results on any number of rows of 32 lanes, full and partial mask.

    Args:
        inputs, want: per operand an array [rows, 32] (or [rows, 64] for 128 bits); for predicates bool [rows, 32].
        same: operand -> operand whose register it shares (aliasing).
        any_nan: results are f64, where a NaN may have any payload.
    """
    u = unit(opcode, shape, same)
    rows = len(next(iter(want.values())))
    for row in range(rows):
        given = {i: word(v[row]) if u.compiled.widths[i] == 1 else v[row] for i, v in inputs.items()}
        for mask in (FULL, PARTIAL) if row < 2 else (FULL,):
            u.run(given, mask, **context)
            _compare(u, given, {i: w[row] for i, w in want.items()}, inputs, row, mask, any_nan)


def _compare(
    u: Unit, given: dict, want: dict[int, np.ndarray], inputs: dict, row: int, mask: int, any_nan: bool
) -> None:
    """Active lanes hold the result, the others what was there before."""
    active = lanes(mask)
    for i, expected in want.items():
        got = u.register(i)
        before = given.get(next((k for k in given if u.same.get(i, i) == u.same.get(k, k)), -1))
        if u.compiled.widths[i] == 1:
            old = 0xCDCDCDCD if before is None else int(before)
            expected = (word(expected) & mask) | (old & ~mask)
            assert int(got[0]) == expected, f"{u.opcode} row {row} mask {mask:#x}: {int(got[0]):#x} != {expected:#x}"
            continue
        old = np.frombuffer(b"\xcd" * got.nbytes, got.dtype) if before is None else np.asarray(before).view(got.dtype)
        keep = np.tile(active, len(got) // 32)
        expected = np.where(keep, np.asarray(expected).astype(got.dtype, copy=False), old)
        differ = got != expected
        if any_nan:
            differ &= ~(np.isnan(got.view(np.float64)) & np.isnan(expected.view(np.float64)))
        wrong = np.flatnonzero(differ)
        if len(wrong):
            k = wrong[0]
            args = {
                j: hex(int(np.asarray(v[row]).view(f"u{v.dtype.itemsize}")[k]))
                for j, v in inputs.items()
                if v.dtype != bool
            }
            text = f"lane {k} of row {row}: {int(got[k]):#x}, expected {int(expected[k]):#x}, inputs {args}"
            raise AssertionError(f"{u.opcode} '{u.shape}' mask {mask:#x}, {text}, {len(wrong)} lanes differ")


def shapes_of(opcodes: Sequence[str], shape: str) -> list[tuple[str, str]]:
    """Pairs for ``prepare``."""
    return [(opcode, shape) for opcode in opcodes]


def emitted_widths(opcode: str, shape: str) -> tuple[int, ...]:
    """Operand widths as the handler declares them."""
    return emit(opcode, shape).widths
