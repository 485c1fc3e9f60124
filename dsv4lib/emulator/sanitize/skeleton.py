"""Write the skeleton of a launch description from what PTX says of its kernels.

PTX gives sizes and types of parameters; which 64-bit number is a pointer follows from how the kernel uses it: a
register that is loaded from the parameter and serves as a global address.
"""

from __future__ import annotations

import json

from dsv4lib.emulator.gpu import Kernel, Module
from dsv4lib.emulator.ptx.ir import Imm, Instr, Memory, Param, Reg, Special, Symbol

_MAP_BYTES, _MAP_ALIGN = 128, 64
_ELEMENTS = {"f32": "f32", "f64": "f64", "f16": "f16", "bf16": "bf16", "s32": "s32", "s64": "s64"}
_ELEMENTS |= {"b8": "u8", "u8": "u8", "s8": "s8", "b16": "u16", "u16": "u16", "s16": "s16", "b32": "f32", "u32": "u32"}
_ELEMENTS |= {"b64": "u64", "u64": "u64"}


def describe(module: Module, source: str) -> str:
    """Write a description of one launch of every kernel, to be filled in.

    Args:
        source: name of the file of the kernels, relative to the description's.
    """
    lines = [f"source = {json.dumps(source)}", ""]
    tensors: dict[str, str] = {}
    maps: list[str] = []
    launches: list[str] = []
    for number, kernel in enumerate(module.kernels.values()):
        prefix = "" if len(module.kernels) == 1 else f"k{number}_"
        launches += _launch(kernel, prefix, tensors, maps)
    for name, dtype in tensors.items():
        lines += [f"[tensors.{name}]", "shape = [1024]", f'dtype = "{dtype}"', 'fill = "normal"', "seed = 0", ""]
    for name in maps:
        lines += [f"[maps.{name}]", f'tensor = "{name}_data"', "box = [64]  # dimension 0, the contiguous one, first"]
        lines += ["swizzle = 0  # 32, 64 or 128 bytes", ""]
    return "\n".join([*lines, *launches]) + "\n"


def _launch(kernel: Kernel, prefix: str, tensors: dict[str, str], maps: list[str]) -> list[str]:
    known = pointers(kernel)
    args, notes = [], []
    for i, param in enumerate(kernel.params):
        name = prefix + _name(param, i, kernel)
        if param.size == _MAP_BYTES and param.align >= _MAP_ALIGN:
            tensors[f"{name}_data"] = "bf16"
            maps.append(name)
            args.append(json.dumps(name))
        elif param.name in known:
            tensors[name] = known[param.name]
            args.append(json.dumps(name))
        elif param.size <= 8:
            args.append("1.0" if param.type.startswith("f") else "1")
        else:
            args.append(f'{{bytes = "{"00" * param.size}"}}' if param.size <= 64 else "{fields = []}")
            notes.append(f"a struct of {param.size} bytes: fields = [{{at = 0, tensor = ...}}, ...]")
        notes += [""] * (i + 1 - len(notes))
    title = "" if kernel.title == kernel.name else f"  # {kernel.title}"
    block = kernel.ir.reqntid or kernel.ir.maxntid or (128,)
    out = ["[[launch]]", f"kernel = {json.dumps(kernel.name)}{title}", "grid = [1]", f"block = {list(block)}"]
    if kernel.ir.cluster is not None:
        out.append(f"cluster = {list(kernel.ir.cluster)}")
    out += ["shared = 0  # bytes of dynamic shared memory", "args = ["]
    for param, text, note in zip(kernel.params, args, notes, strict=True):
        array = f"[{param.size}]" if param.size > 8 else ""
        out.append(f"  {text},  # {param.name}: .{param.type}{array}{', ' + note if note else ''}")
    return [*out, "]", ""]


def _name(param: Param, i: int, kernel: Kernel) -> str:
    """A short name for a parameter: compilers number them after the kernel's name."""
    short = param.name.removeprefix(kernel.name).strip("_$%")
    return short if short.isidentifier() and short.isascii() and len(short) <= 40 else f"p{i}"


def pointers(kernel: Kernel) -> dict[str, str]:
    """Find the parameters that are global addresses, each with the type of its elements as far as it is known."""
    names = {param.name: param for param in kernel.params if param.size == 8}
    holds: dict[int, set[str]] = {}  # register -> the parameters that its value may begin at
    found = {param.name: "f32" for param in names.values() if param.pointer}
    for _ in range(3):  # registers that a loop sets are read before the instruction that sets them
        for instr in kernel.ir.instructions:
            _follow(instr, names, holds, found)
    return {param.name: found[param.name] for param in kernel.params if param.name in found}


def _follow(instr: Instr, names: dict[str, Param], holds: dict[int, set[str]], found: dict[str, str]) -> None:
    parts = instr.opcode.split(".")
    for operand in instr.operands:
        if isinstance(operand, Memory) and isinstance(operand.base, Reg) and "global" in parts:
            for name in holds.get(operand.base.index, ()):
                found[name] = _ELEMENTS.get(parts[-1], "u8") if parts[0] in ("ld", "st", "red", "atom") else "u8"
    target, *sources = instr.operands or (None,)
    if not isinstance(target, Reg):
        return
    if parts[0] == "ld" and "param" in parts and sources and isinstance(sources[0], Memory):
        base = sources[0].base
        if isinstance(base, Symbol) and base.name in names and sources[0].offset == 0 and base.offset == 0:
            holds.setdefault(target.index, set()).add(base.name)
        return
    if parts[0] not in ("cvta", "add", "mov", "sub", "mad", "selp"):
        return
    origin = {name for s in sources if isinstance(s, Reg) for name in holds.get(s.index, ())}
    if parts[0] == "cvta" and "global" in parts:
        for name in origin:
            found.setdefault(name, "f32")
    if origin and not all(isinstance(s, Imm | Special) for s in sources):
        holds.setdefault(target.index, set()).update(origin)
