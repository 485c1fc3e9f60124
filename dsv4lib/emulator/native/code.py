"""Write functions of the race detector in llvmlite.ir: loops, conditions, arrays and variables in few words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from dsv4lib.emulator.native import library

LEFT = 1  # what functions return that leave the rest to Python
_I32, _I64, _PTR = ir.IntType(32), ir.IntType(64), ir.PointerType()


class Code:
    """Shorthand over an IRBuilder."""

    def __init__(self, name: str, types: list[ir.Type]):
        module = ir.Module()
        self.function = ir.Function(module, ir.FunctionType(_I64, types), "NAME")
        self.args = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block(name))

    @staticmethod
    def number(value: Any) -> Any:
        """An i64."""
        return _I64(value) if isinstance(value, int) else value

    def load(self, base: Any, index: Any, kind: ir.Type = _I64) -> Any:
        """Element of an array, widened to i64; a base is an i64 too."""
        value = self.b.load(self.at(base, index, kind), typ=kind)
        return value if kind is _I64 else self.b.zext(value, _I64)

    def store(self, value: Any, base: Any, index: Any, kind: ir.Type = _I64) -> None:
        """Set an element of an array."""
        value = self.number(value)
        self.b.store(value if kind is _I64 else self.b.trunc(value, kind), self.at(base, index, kind))

    def at(self, base: Any, index: Any, kind: ir.Type) -> Any:
        """Pointer to an element."""
        return self.b.gep(self.b.inttoptr(base, _PTR), [self.number(index)], source_etype=kind)

    def test(self, how: str, one: Any, other: Any) -> Any:
        """Unsigned comparison."""
        return self.b.icmp_unsigned(how, one, self.number(other))

    def bit(self, value: Any, bits: int) -> Any:
        """Is any of these bits set?"""
        return self.test("!=", self.b.and_(value, self.number(bits)), 0)

    def variable(self, value: Any = 0) -> Any:
        """An i64 that changes."""
        with self.b.goto_entry_block():
            place = self.b.alloca(_I64)
        self.b.store(self.number(value), place)
        return place

    def get(self, variable: Any) -> Any:
        """Its value."""
        return self.b.load(variable, typ=_I64)

    def add(self, variable: Any, value: Any = 1) -> None:
        """Increase a variable."""
        self.b.store(self.b.add(self.get(variable), self.number(value)), variable)

    @contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        """if."""
        with self.b.if_then(condition):
            yield

    def give_up(self, condition: Any, value: int = LEFT) -> None:
        """Return if."""
        with self.when(condition):
            self.b.ret(_I64(value))

    @contextmanager
    def loop(self, condition: Callable[[], Any]) -> Iterator[None]:
        """while."""
        head, body, end = (self.function.append_basic_block(name) for name in ("head", "body", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(condition(), body, end)
        self.b.position_at_end(body)
        yield
        self.b.branch(head)
        self.b.position_at_end(end)

    @contextmanager
    def each(self, count: Any) -> Iterator[Any]:
        """for i in range(count)."""
        i = self.variable()
        with self.loop(lambda: self.test("<", self.get(i), count)):
            yield self.get(i)
            self.add(i)

    def compile(self) -> int:
        """Address of the function."""
        return library.default().function(str(self.function).replace('@"NAME"', "@NAME"), optimised=True)
