"""Judge instruction variants by NVIDIA's assembler: does any architecture take this instruction?

Only the verdict on the text counts, so nothing is assembled to the end: every file has a line that is wrong on purpose.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

ARCHITECTURES = ("sm_100a", "sm_90a", "sm_103a", "sm_120a", "sm_80")
VERSION, RELEASE = "9.4", (13, 4)  # of the PTX ISA, and of the CUDA that brought it
BATCH = 4000
_REGISTERS = {"p": "pred", "c": "b8", "h": "b16", "r": "b32", "d": "b64", "q": "b128"}
_MESSAGE = re.compile(r"line (\d+); (error|fatal) *: (.*)")


def find() -> str | None:
    """The first ptxas of $PTXAS, triton and the path that is new enough for `VERSION`."""
    found = [os.environ.get("PTXAS", "")]
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin:
        found.append(str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"))
    found += [shutil.which("ptxas") or "", "/usr/local/cuda/bin/ptxas"]
    return next((path for path in found if path and os.access(path, os.X_OK) and release(path) >= RELEASE), None)


def release(ptxas: str) -> tuple[int, ...]:
    """Its CUDA release, ``(13, 4)``."""
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=900, check=False).stdout
    match = re.search(r"release (\d+)\.(\d+)", said)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def module(lines: list[str], arch: str) -> str:
    """A kernel of the lines, with registers of every width and some memory."""
    registers = " ".join(f".reg .{kind} %{letter}<520>;" for letter, kind in _REGISTERS.items())
    head = f".version {VERSION}\n.target {arch}\n.address_size 64\n.visible .entry k(.param .b64 argument)\n"
    memory = ".shared .align 128 .b8 smem[1024]; .local .align 16 .b8 mem[64];"
    return "\n".join([head + "{" + registers + memory, "table: .branchtargets $end;", *lines, "$end: ret;", "}"])


def errors(ptxas: str, lines: list[str], arch: str) -> dict[int, str]:
    """First complaint by index of the line; lines without one are fine on this architecture."""
    out: dict[int, str] = {}
    for start in range(0, len(lines), BATCH):
        part = lines[start : start + BATCH]
        while True:  # a syntax error ends the file: without that line, again
            found, end = _complaints(ptxas, part, arch)
            if end is None:
                break
            out[start + end] = found[end]
            part = [*part[:end], "", *part[end + 1 :]]
        for index, text in found.items():
            out.setdefault(start + index, text)
    return out


def _complaints(ptxas: str, lines: list[str], arch: str) -> tuple[dict[int, str], int | None]:
    """First complaint by line, and the line of a syntax error."""
    text = module([*lines, "wrong;"], arch)
    first = text.split("\n").index("wrong;") + 1 - len(lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.ptx"
        path.write_text(text, encoding="utf-8")
        command = [ptxas, f"-arch={arch}", str(path), "-o", str(Path(folder) / "k.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    out: dict[int, str] = {}
    end = None
    messages = [(int(line) - first, kind, said) for line, kind, said in _MESSAGE.findall(done.stderr)]
    for index, kind, said in messages:
        out.setdefault(index, said)
        end = index if kind == "fatal" else end
    if (end is None and len(lines) not in out) or (end is not None and not 0 <= end < len(lines)):
        raise RuntimeError(f"{ptxas} stopped early: {done.stderr[-500:]}")
    return {index: said for index, said in out.items() if index < len(lines)}, end


def refused(ptxas: str, candidates: Iterable[tuple[str, list[str]]]) -> dict[str, str]:
    """Find variants that no architecture takes with any of their operands, and what ptxas said of the first."""
    open_ = {opcode: [f"{opcode} {operands};" for operands in choices] for opcode, choices in candidates}
    said: dict[str, str] = {}
    for arch in ARCHITECTURES:
        lines = [(opcode, line) for opcode, choices in open_.items() for line in choices]
        complaints = errors(ptxas, [line for _, line in lines], arch)
        fine = {opcode for i, (opcode, _) in enumerate(lines) if i not in complaints}
        for i, (opcode, line) in enumerate(lines):
            if i in complaints:
                said.setdefault(opcode, f"{line} {complaints[i]}")
        open_ = {opcode: choices for opcode, choices in open_.items() if opcode not in fine}
        if not open_:
            break
    return {opcode: said[opcode] for opcode in open_}
