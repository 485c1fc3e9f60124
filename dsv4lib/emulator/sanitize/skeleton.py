"""Write the skeleton of a launch description from what PTX says of its kernels.

PTX gives sizes and types of parameters; what is in a struct, and which 64-bit number is a pointer, follows from how the
kernel uses it: which bytes it loads in which types, and which of them serve as global addresses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsv4lib.emulator.gpu import Kernel, Module
from dsv4lib.emulator.gpu.names import shortened
from dsv4lib.emulator.ptx.ir import Instr, Memory, Param, Reg, Symbol, Vector
from dsv4lib.emulator.ptx.operands import TYPE_BITS

_MAP_BYTES, _MAP_ALIGN = 128, 64
_ELEMENTS = {name: name for name in ("f64", "f32", "f16", "bf16", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")}
_ELEMENTS |= {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64"}
_GUESSES = _ELEMENTS | {"b32": "f32"}  # of what a pointer points to: 32 bits are mostly floats
# Of the pointers in a C++ signature.
_CXX = {
    "float": "f32", "double": "f64", "__half": "f16", "__nv_bfloat16": "bf16", "__nv_fp8_e4m3": "e4m3",
    "__nv_fp8_e5m2": "e5m2", "int": "s32", "unsigned int": "u32", "long": "s64", "unsigned long": "u64",
    "long long": "s64", "unsigned long long": "u64", "short": "s16", "unsigned short": "u16", "unsigned char": "u8",
    "signed char": "s8", "char": "s8", "bool": "u8", "float2": "f32", "float4": "f32", "int4": "s32", "__half2": "f16",
    "__nv_bfloat162": "bf16",
}  # fmt: skip
_MOVES = frozenset(("cvta", "add", "mov", "sub", "mad", "selp"))
_GLOBAL = frozenset(("ld", "st", "red", "atom"))

Key = tuple[str, int]  # parameter and offset in it


@dataclass
class Uses:
    """How a kernel uses its parameters: the type of each load, and what its pointers point to."""

    loads: dict[Key, str] = field(default_factory=dict)
    pointers: dict[Key, str] = field(default_factory=dict)


def describe(module: Module, source: str) -> str:
    """Write a description of one launch of every kernel, to be filled in.

    Args:
        source: name of the file of the kernels, relative to the description's.
    """
    tensors: dict[str, str] = {}
    maps: list[str] = []
    launches: list[str] = []
    for number, kernel in enumerate(module.kernels.values()):
        prefix = "" if len(module.kernels) == 1 else f"k{number}_"
        launches += _launch(kernel, prefix, tensors, maps)
    lines = [f"source = {json.dumps(source)}", ""]
    for name, dtype in tensors.items():
        lines += [f"[tensors.{name}]", "shape = [1024]", f'dtype = "{dtype}"', 'fill = "normal"', "seed = 0", ""]
    for name in maps:
        lines += [f"[maps.{name}]", f'tensor = "{name}_data"', "box = [64]  # dimension 0, the contiguous one, first"]
        lines += ["swizzle = 0  # 32, 64 or 128 bytes", ""]
    return "\n".join([*lines, *launches])


def _launch(kernel: Kernel, prefix: str, tensors: dict[str, str], maps: list[str]) -> list[str]:
    """The lines of a launch; adds the tensors and maps that it names."""
    uses, said = uses_of(kernel), _signature(kernel)
    rows = []
    for i, param in enumerate(kernel.params):
        name = _name(param, i, kernel)
        own = prefix + name
        note = f"{name}: .{param.type}" + (f"[{param.size}]" if param.type == "b8" and param.size > 1 else "")
        if (param.name, 0) in uses.pointers and param.size == 8:
            tensors[own] = said.get(i, uses.pointers[param.name, 0])
            text = json.dumps(own)
        elif param.size == _MAP_BYTES and param.align >= _MAP_ALIGN:
            tensors[f"{own}_data"] = "bf16"
            maps.append(own)
            text = json.dumps(own)
        elif param.type == "b8" and param.size > 1:
            text = _struct(param, own, uses, tensors)
        else:
            text = "1.0" if param.type.startswith("f") else "1"
        rows.append(f"  {text},  # {note}")
    block = kernel.ir.reqntid or kernel.ir.maxntid or (128,)
    cluster = [] if kernel.ir.cluster is None else [f"cluster = {list(kernel.ir.cluster)}"]
    head = ["[[launch]]", f"kernel = {json.dumps(kernel.name)}"]
    if shortened(kernel.name) != kernel.name:
        head[1] += f"  # {shortened(kernel.name)}"
    head += [
        "grid = [1]",
        f"block = {list(block)}",
        *cluster,
        "shared = 0  # bytes of dynamic shared memory",
        "args = [",
    ]
    return [*head, *rows, "]", ""]


def _signature(kernel: Kernel) -> dict[int, str]:
    """Element types of the parameters that a C++ signature declares as pointers to a known type."""
    title, depth, start = kernel.title, 0, len(kernel.title)
    for i in reversed(range(len(title))):  # template arguments before the list may have parentheses, too
        depth += (title[i] == ")") - (title[i] == "(")
        if depth == 0:
            start = i + 1
            break
    inner = title[start:].removesuffix(")")
    depth, parts = 0, [""]
    for char in inner:
        depth += (char in "<([") - (char in ">)]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if len(parts) != len(kernel.params):
        return {}
    names = [part.removesuffix("*").replace("const", "").strip() if part.endswith("*") else "" for part in parts]
    return {i: _CXX[name] for i, name in enumerate(names) if name in _CXX}


def _struct(param: Param, own: str, uses: Uses, tensors: dict[str, str]) -> str:
    """A struct by the fields that the kernel reads."""
    fields = []
    for (name, at), kind in sorted(uses.loads.items()):
        if name != param.name:
            continue
        if (name, at) in uses.pointers:
            tensors[f"{own}_at_{at}"] = uses.pointers[name, at]
            fields.append(f'{{at = {at}, tensor = "{own}_at_{at}"}}')
        else:
            fields.append(f'{{at = {at}, value = 0, dtype = "{_ELEMENTS.get(kind, "u8")}"}}')
    return f"{{fields = [{', '.join(fields)}]}}"


def _name(param: Param, i: int, kernel: Kernel) -> str:
    """A short name for a parameter: compilers number them after the kernel's name."""
    short = param.name.removeprefix(kernel.name).strip("_$%")
    return short if short.isidentifier() and short.isascii() and len(short) <= 40 else f"p{i}"


def uses_of(kernel: Kernel) -> Uses:
    """Follow the parameters of a kernel through its registers."""
    known = {param.name: param for param in kernel.params}
    out, holds = Uses(), {}
    for param in kernel.params:
        if param.pointer:
            out.pointers[param.name, 0] = "f32"
    for _ in range(3):  # a loop may set a register after the instruction that reads it
        for instr in kernel.ir.instructions:
            _follow(instr, known, holds, out)
    return out


def _follow(instr: Instr, known: dict[str, Param], holds: dict[int, set[Key]], out: Uses) -> None:
    """What one instruction says: of loads from parameters, of global addresses, of copies between registers."""
    parts = instr.opcode.split(".")
    if parts[0] == "ld" and "param" in parts:
        for register, key in _loaded(instr, parts, known):
            out.loads[key] = parts[-1]
            holds.setdefault(register, set()).add(key)
        return
    for operand in instr.operands:
        if isinstance(operand, Memory) and isinstance(operand.base, Reg) and "global" in parts:
            for key in holds.get(operand.base.index, ()):
                out.pointers[key] = _GUESSES.get(parts[-1], "u8") if parts[0] in _GLOBAL else "u8"
    target, *sources = instr.operands or (None,)
    if not isinstance(target, Reg) or parts[0] not in _MOVES:
        return
    origin = {key for s in sources if isinstance(s, Reg) for key in holds.get(s.index, ())}
    origin = {key for key in origin if TYPE_BITS.get(out.loads.get(key, "b64")) == 64}
    if len(origin) > 1 and origin & set(out.pointers):
        origin &= set(out.pointers)  # what is added to a pointer is an offset
    if parts[0] == "cvta" and "global" in parts:
        for key in origin:
            out.pointers.setdefault(key, "f32")
    holds.setdefault(target.index, set()).update(origin)


def _loaded(instr: Instr, parts: list[str], known: dict[str, Param]) -> Iterator[tuple[int, Key]]:
    """Registers that a load from a parameter fills, each with where its bytes come from."""
    if len(instr.operands) != 2 or not isinstance(instr.operands[1], Memory):
        return
    target, memory = instr.operands[0], instr.operands[1]
    if not isinstance(memory.base, Symbol) or memory.base.name not in known or parts[-1] not in TYPE_BITS:
        return
    start, size = memory.base.offset + memory.offset, TYPE_BITS[parts[-1]] // 8
    for i, item in enumerate(target.items if isinstance(target, Vector) else (target,)):
        if isinstance(item, Reg):
            yield item.index, (memory.base.name, start + i * size)
