"""Multiply the fragments of mma.sync in native code: 16-bit floats and tf32, float32 accumulators, M = 16, N = 8.

A function ``i64 (context*, int64 offsets[])`` per type and K. The offsets are those of the registers of A, B, C and D
in the register file, in this order; all lanes execute. Products are exact in float64. Those of even and those of odd k
are added apart, in every eight the last first; then both sums, then C, and the total is rounded once to float32. So an
element has the same bits wherever it stands, on every processor; of a NaN, sign and payload are not defined.

A register of A is a matrix of 8 rows by 16 bytes along K in row-major order, one of B the same by columns (see
units/fragments.py).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir

from dsv4lib.emulator.native.abi import CONTEXT
from dsv4lib.emulator.native.race_log import Code

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_ROWS, _COLUMNS, _ROW_BYTES = 16, 8, 16
_ACCUMULATORS = 4  # registers of C and of D
_TF32 = 0xFFFFE000  # the bits of a register that count


class _Multiply(Code):
    """Builds the function of one type and K."""

    def __init__(self, kind: str, k: int):
        self.kind, self.k = kind, k
        self.each = 4 if kind == "tf32" else 8  # elements of K in a register
        self.blocks = k // self.each
        super().__init__("multiply", [_I64] * 2)
        context, self.offsets = self.args
        self.registers = self.load(context, CONTEXT.fields["regs"][1] // 8)
        place = self.b.alloca(ir.VectorType(_F32, 32), size=_ACCUMULATORS)
        place.align = 128
        self.result = self.b.ptrtoint(place, _I64)

    def build(self) -> None:
        """Write the whole function."""
        b, registers = self.b, [self._register(i) for i in range(3 * self.blocks + 2 * _ACCUMULATORS)]
        a, registers = registers[: 2 * self.blocks], registers[2 * self.blocks :]
        columns = self._columns(registers[: self.blocks])
        c, d = registers[self.blocks : self.blocks + _ACCUMULATORS], registers[self.blocks + _ACCUMULATORS :]
        before, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
        b.branch(loop)
        b.position_at_end(loop)
        row = b.phi(_I64)
        row.add_incoming(_I64(0), before)
        for half in range(2):
            self._row(row, a[half::2], columns, c[2 * half : 2 * half + 2], 2 * half)
        following = b.add(row, _I64(1))
        row.add_incoming(following, loop)
        b.cbranch(b.icmp_unsigned("<", following, _I64(8)), loop, after)
        b.position_at_end(after)
        for i, register in enumerate(d):  # only now: registers of D may be those of A, B or C
            self._put(register, 0, self._vector(self.result, 128 * i, _I32, 32))
        b.ret(_I64(0))

    def _columns(self, registers: list[Any]) -> list[Any]:
        """float64[8] of every k: a row of B^T."""
        columns = []
        for register in registers:
            whole = self._vector(register, 0, self._element, 8 * self.each)
            for k in range(self.each):
                columns.append(self._widen(self._pick(whole, range(k, 8 * self.each, self.each)), _COLUMNS))
        return columns

    def _row(self, row: Any, a: list[Any], columns: list[Any], c: list[Any], first: int) -> None:
        """Compute a row of D. Its even columns are in register ``first`` of the result, the odd ones in the next."""
        b, at = self.b, self.b.mul(row, _I64(_ROW_BYTES))
        values = [self._widen(self._vector(x, at, self._element, self.each), self.each) for x in a]
        sums = [ir.Constant(ir.VectorType(_F64, _COLUMNS), [0.0] * _COLUMNS)] * 2
        for base in range(0, self.k, 8):
            for k in sorted(range(base, min(base + 8, self.k)), key=lambda k: (-(k // 2), k)):
                factor = self._pick(values[k // self.each], [k % self.each] * _COLUMNS)
                sums[k % 2] = b.fadd(b.fmul(factor, columns[k]), sums[k % 2])
        even, odd = (self._vector(x, at, _F32, 4) for x in c)
        old = b.shuffle_vector(even, odd, _indices([i // 2 + i % 2 * 4 for i in range(_COLUMNS)]))
        total = b.fadd(b.fadd(*sums), b.fpext(old, ir.VectorType(_F64, _COLUMNS)))
        rounded = b.fptrunc(total, ir.VectorType(_F32, _COLUMNS))
        for odd_ones in range(2):
            to = b.add(at, _I64(128 * (first + odd_ones)))
            self._put(self.result, to, self._pick(rounded, range(odd_ones, _COLUMNS, 2)))

    @property
    def _element(self) -> Any:
        return _I32 if self.kind == "tf32" else _I16

    def _widen(self, raw: Any, n: int) -> Any:
        """float64[n] of the bits of n elements."""
        b = self.b
        if self.kind == "f16" and not converts_halves():
            return self._widen_half(b.zext(raw, ir.VectorType(_I64, n)), n)
        if self.kind == "f16":
            return b.fpext(b.bitcast(raw, ir.VectorType(_F16, n)), ir.VectorType(_F64, n))
        if self.kind == "bf16":
            wide = b.shl(b.zext(raw, ir.VectorType(_I32, n)), ir.Constant(ir.VectorType(_I32, n), [16] * n))
        else:
            wide = b.and_(raw, ir.Constant(ir.VectorType(_I32, n), [_TF32] * n))
        return b.fpext(b.bitcast(wide, ir.VectorType(_F32, n)), ir.VectorType(_F64, n))

    def _widen_half(self, bits: Any, n: int) -> Any:
        """float64[n] of halves without the processor's help; what is subnormal becomes so by a product, exactly."""
        b, kind = self.b, ir.VectorType(_F64, n)

        def every(value: int) -> Any:
            return ir.Constant(bits.type, [value] * n)

        magnitude = b.shl(b.and_(bits, every(0x7FFF)), every(42))
        scaled = b.fmul(b.bitcast(magnitude, kind), ir.Constant(kind, [2.0**1008] * n))
        endless = b.icmp_unsigned(">=", magnitude, every(0x7C00 << 42))  # infinities and NaN
        value = b.select(endless, b.or_(magnitude, every(0x7FF << 52)), b.bitcast(scaled, bits.type))
        sign = b.shl(b.and_(bits, every(0x8000)), every(48))
        return b.bitcast(b.or_(value, sign), kind)

    def _register(self, i: int) -> Any:
        return self.b.add(self.registers, self.load(self.offsets, i))

    def _vector(self, base: Any, offset: Any, kind: Any, n: int) -> Any:
        whole = ir.VectorType(kind, n)
        return self.b.load(self._place(base, offset), align=_ROW_BYTES // 2, typ=whole)

    def _put(self, base: Any, offset: Any, value: Any) -> None:
        self.b.store(value, self._place(base, offset), align=_ROW_BYTES // 2)

    def _place(self, base: Any, offset: Any) -> Any:
        return self.b.inttoptr(self.b.add(base, self.number(offset)), ir.PointerType())

    def _pick(self, vector: Any, lanes: Any) -> Any:
        return self.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), _indices(lanes))


@functools.cache
def converts_halves() -> bool:
    """Tell whether the processor widens halves. Else LLVM calls a function that may not be there (x86 before F16C)."""
    return binding.get_host_cpu_features().get("f16c", True)


def _indices(lanes: Any) -> Any:
    lanes = list(lanes)
    return ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)


@functools.cache
def multiply(kind: str, k: int) -> Callable[[int, int], int]:
    """Compile the function of ``kind`` (f16, bf16, tf32) and K.

    Returns:
        a function of two addresses: of the warp's context, and of the offsets, int64[3 K blocks + 8].
    """
    code = _Multiply(kind, k)
    code.build()
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(code.compile())
