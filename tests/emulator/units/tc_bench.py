"""A bench for services: a cluster of CTAs with warps and registers, but no scheduler and no native code.

A test writes a few PTX instructions; each runs on a warp by its line number. Asynchronous operations wait in the real
`AsyncUnits` until the test lets them complete.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import implementations
from dsv4lib.emulator.machine.async_units import AsyncUnits
from dsv4lib.emulator.machine.cta import Cluster, Cta
from dsv4lib.emulator.machine.warp import MASK, Warp
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.ptx.parse import parse

REGISTERS = ".reg .pred %p<8>;\n.reg .b32 %r<400>;\n.reg .b64 %rd<16>;\n.reg .f64 %fd<32>;\n.reg .b16 %h<8>;\n"


class Bench:
    """Args: the instructions, one per line; CTAs of the cluster; warps per CTA; target; bytes of shared memory."""

    def __init__(self, ptx: str, ctas: int = 1, warps: int = 4, arch: str = "sm_100a", smem: int = 1 << 17):
        implementations.load()
        text = f".version 9.0\n.target {arch}\n.address_size 64\n.entry k() {{\n{REGISTERS}{ptx}\n}}\n"
        self.kernel = parse(text).kernels["k"]
        self.index = {r.name: r for r in self.kernel.registers}
        offsets, top = [], 0
        for register in self.kernel.registers:
            offsets.append(top)
            top = abi.aligned(top + abi.register_bytes(register.bits))
        self.program = SimpleNamespace(
            kernel=self.kernel,
            kept={},
            offset=offsets,
            bits=[r.bits for r in self.kernel.registers],
            instruction=lambda i: self.kernel.instructions[min(i, len(self.kernel.instructions) - 1)],
            python_line=lambda instr: "",
        )
        self.hazards: list[tuple[str, str]] = []
        self.machine = SimpleNamespace(
            arch=arch,
            device=0,
            stats=Counter(),
            trace=None,
            race=None,
            time=0,
            changed=lambda: None,
            report=self._report,
        )
        self.machine.units = AsyncUnits(self.machine)
        self.cluster = Cluster(self.machine, 0, (0, 0, 0), (ctas, 1, 1))
        for rank in range(ctas):
            cta = Cta(self.cluster, rank, (rank, 0, 0), smem)
            self.cluster.ctas.append(cta)
            for w in range(warps):
                ctx, regs = np.zeros(1, abi.CONTEXT)[0:1], np.zeros(top + 64, np.uint8)
                regs = regs[-regs.ctypes.data % 64 :][:top]
                ctx["regs"] = regs.ctypes.data
                warp = Warp(cta, w, self.program, rank * warps + w, ctx, regs)
                warp.words[MASK] = abi.FULL_MASK
                cta.warps.append(warp)
        self.ctas = self.cluster.ctas
        self.cta = self.ctas[0]

    def _report(self, kind, message, place, **facts):
        self.hazards.append((kind, message))

    def kinds(self) -> list[str]:
        """Hazard kinds reported so far."""
        return sorted({kind for kind, _ in self.hazards})

    def warp(self, warp: int = 0, cta: int = 0) -> Warp:
        return self.ctas[cta].warps[warp]

    def mask(self, mask: int) -> None:
        for cta in self.ctas:
            for warp in cta.warps:
                warp.words[MASK] = mask

    def reg(self, name: str, warp: int = 0, cta: int = 0, dtype=None) -> np.ndarray:
        """Writable view of a register's 32 lanes (predicates: one uint32)."""
        register = self.index[name]
        offset, width = self.program.offset[register.index], register.bits // 8
        regs = self.warp(warp, cta).regs
        if register.bits == 1:
            return regs[offset : offset + 4].view(np.uint32)
        return regs[offset : offset + 32 * width].view(dtype or f"<u{width}")

    def set(self, warp: int = 0, cta: int = 0, **values) -> None:
        """Set registers by name without the percent sign; predicates take a bool."""
        for name, value in values.items():
            view = self.reg("%" + name, warp, cta)
            if self.index["%" + name].bits == 1:
                view[0] = abi.FULL_MASK if value is True else 0 if value is False else value
            else:
                view[:] = value

    def serve(self, line: int = 0, warp: int = 0, cta: int = 0):
        """Run the service of an instruction; returns what it returns."""
        instr = self.kernel.instructions[line]
        entry, form = isa.lookup(instr.opcode)
        assert entry.kind == "service", instr.opcode
        return entry.implementation(self.warp(warp, cta), instr, form)

    def run(self, line: int = 0, warp: int = 0, cta: int = 0) -> None:
        """Run an instruction that must not block and let everything asynchronous complete."""
        assert self.serve(line, warp, cta) is None
        self.machine.units.drain()
