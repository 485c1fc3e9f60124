"""Hold a parsed PTX module as data.

Between the parser and what executes, checks or draws it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Register:
    """A virtual register. ``bits`` is 1 for predicates; ``name`` is unique in the kernel (scopes are renamed)."""

    index: int
    name: str
    bits: int


@dataclass(frozen=True)
class Reg:
    """Operand: a register; ``negated`` only for predicates (``!p``)."""

    index: int
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    """Operand: an immediate as raw bits, two's complement in 64 bits. Floats (0f..., 0d...) are their bit pattern."""

    bits: int


@dataclass(frozen=True)
class Special:
    """Operand: a special register without the percent sign, such as ``tid.x`` or ``cluster_ctarank``."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """Operand: a variable (with ``offset`` in an address expression ``table+16``), label or function name."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Sink:
    """Operand ``_``: the result is not wanted."""


@dataclass(frozen=True)
class Vector:
    """Operand ``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Operand ``d|p``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Memory:
    """Hold operand ``[base + offset]``, or a tensor's coordinates.

    For tensors ``[base, {c0, c1}, ...]`` with the further parts in ``rest``.
    """

    base: Reg | Imm | Symbol | Special
    offset: int = 0
    rest: tuple[Operand, ...] = ()


Operand = Reg | Imm | Special | Symbol | Sink | Vector | Pair | Memory


@dataclass(frozen=True)
class Location:
    """A source position from ``.loc``. ``inlined_at`` is the caller's position where the compiler inlined."""

    file: str
    line: int
    inlined_at: Location | None = None

    def outermost(self) -> Location:
        """Find the position in the function that was not inlined: the user's own line."""
        return self if self.inlined_at is None else self.inlined_at.outermost()


@dataclass(frozen=True)
class Instr:
    """One instruction: ``@guard opcode operands``."""

    index: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: Reg | None
    line: int  # of the PTX text, 1-based
    text: str
    location: Location | None = None


class Pointer(NamedTuple):
    """``size`` bytes at ``offset`` of an initialiser. They are those of an address from bit ``shift`` on."""

    offset: int
    size: int
    name: str
    addend: int
    shift: int


@dataclass(frozen=True)
class Variable:
    """A ``.shared``, ``.local``, ``.global`` or ``.const`` variable. ``size`` in bytes, 0 for an extern array.

    ``pointers``: what of its initialiser depends on where variables lie; ``data`` has zeros there.
    """

    name: str
    space: str
    size: int
    align: int
    extern: bool = False
    data: bytes | None = None
    pointers: tuple[Pointer, ...] = ()


@dataclass(frozen=True)
class Param:
    """A kernel parameter: where it lies in the parameter block, and what its declaration says of it.

    ``type``: of one element, without the dot. ``pointer``: it is declared as one (``.ptr``).
    """

    name: str
    offset: int
    size: int
    align: int
    type: str = "b8"
    pointer: bool = False


@dataclass
class Kernel:
    """One ``.entry``. ``labels`` maps a (scoped) label to the index of the instruction it stands before, ``tables`` the
    label of a ``.branchtargets`` list to the labels in it.

    What it says about its launches, None if nothing: ``reqntid``, ``maxntid``, ``cluster`` (.reqnctapercluster),
    ``max_cluster`` (.maxclusterrank).
    """

    name: str
    params: list[Param] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    instructions: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    reqntid: tuple[int, int, int] | None = None
    maxntid: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    max_cluster: int | None = None

    @property
    def param_bytes(self) -> int:
        """Compute the size of the parameter block."""
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass(frozen=True)
class Function:
    """A ``.func``: its lists of results and parameters as they are written. Also where the body starts in the file.

    ``address``: what a pointer to it holds; no memory lies there.
    """

    name: str
    results: str
    params: str
    body: int
    address: int = 0


@dataclass
class Module:
    """A PTX file. ``programs``: its kernels as the machine runs them (`program.lower`), by name, once there are any."""

    version: str
    target: str
    kernels: dict[str, Kernel]
    variables: list[Variable] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    programs: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
