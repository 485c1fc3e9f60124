"""Describe micro-kernels: raw PTX, inputs from a seed, bytes out, and run them in the emulator.

A probe's kernel takes two addresses: its input image and its output. Of a pair of CTAs each has its own image. The
driver compiles the PTX where there is a GPU, so a probe needs neither the CUDA toolkit nor the CuTe DSL there.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, field

import numpy as np

THREADS = 128
HEADER = ".version {version}\n.target {arch}\n.address_size 64\n"
# Finite codes of small integers: sums of their products are exact in float32, in any order.
SMALL = {
    "e4m3": (0x00, 0x38, 0xB8, 0x40, 0xC0, 0x44, 0xC4, 0x48),
    "e5m2": (0x00, 0x3C, 0xBC, 0x40, 0xC0, 0x42, 0xC2, 0x44),
}
POISON = 0xA5  # what outputs hold before a launch


@dataclass(frozen=True)
class Probe:
    """One micro-kernel.

    Attributes:
        name: unique, of letters, digits, "_", "." and "-".
        form: the question of unconfirmed.csv that it asks.
        arch: target of the PTX. version: of the PTX ISA.
        body: PTX of the kernel after its parameters.
        image: uint8 (CTAs, bytes) of inputs.
        out_bytes: of outputs, of all CTAs.
        row_bytes: of a row of the output, for messages and figures; element: "u32", "f32" or "f16", how to print it.
        exact: all sums are exact, so any difference is one of meaning, not of rounding.
        hazards: kinds that the emulator reports of it, on purpose.
    """

    name: str
    form: str
    arch: str
    body: str
    image: np.ndarray = field(repr=False)
    out_bytes: int
    row_bytes: int = 512
    element: str = "u32"
    exact: bool = True
    hazards: frozenset[str] = frozenset()
    version: str = "8.8"

    @property
    def ctas(self) -> int:
        """CTAs of the one cluster."""
        return len(self.image)

    @property
    def ptx(self) -> str:
        """The module; its kernel is `k`."""
        head = HEADER.format(version=self.version, arch=self.arch)
        cluster = f".reqnctapercluster {self.ctas}, 1, 1\n" if self.ctas > 1 else ""
        return (
            f"{head}.visible .entry k(.param .u64 image, .param .u64 out)\n.reqntid {THREADS}, 1, 1\n"
            f"{cluster}{{\n{self.body}\nret;\n}}\n"
        )

    @property
    def digest(self) -> str:
        """What determines its result: code and inputs, 32 hex digits."""
        found = hashlib.sha256(self.ptx.encode())
        found.update(self.image.tobytes())
        return found.hexdigest()[:32]


def digest(data: bytes) -> str:
    """32 hex digits of what a probe gave."""
    return hashlib.sha256(data).hexdigest()[:32]


def generator(name: str) -> np.random.Generator:
    """The random numbers of a probe: its name is the seed, so a new probe changes no other."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def codes(rng: np.random.Generator, fmt: str, nbytes: int, style: str = "small") -> np.ndarray:
    """Bytes full of values of a type, wherever an operand's address points.

    Args:
        fmt: "f16", "bf16", "tf32", "f32", "e4m3", "e5m2", "s32"; any other: all bytes are values of it.
        style: "small" integers, or "normal" numbers, whose sums round.
    """
    width = {"f16": 2, "bf16": 2, "tf32": 4, "f32": 4, "s32": 4}.get(fmt, 1)
    count = nbytes // width
    if fmt == "s32":
        return rng.integers(-1000, 1000, count).astype("<i4").view(np.uint8)
    if fmt in SMALL:
        if style == "small":
            return rng.choice(np.array(SMALL[fmt], np.uint8), count)
        low, high = (0x20, 0x48) if fmt == "e4m3" else (0x30, 0x44)
        return (rng.integers(low, high, count) | rng.integers(0, 2, count) << 7).astype(np.uint8)
    if width == 1:
        return rng.integers(0, 256, count).astype(np.uint8)
    numbers = rng.integers(-4, 5, count) if style == "small" else rng.standard_normal(count)
    if fmt == "f16":
        return numbers.astype("<f2").view(np.uint8)
    words = numbers.astype("<f4").view(np.uint32)
    if fmt == "bf16":
        return (words >> 16).astype("<u2").view(np.uint8)
    return (words & np.uint32(0xFFFFE000) if fmt == "tf32" else words).view(np.uint8)


class Emulated:
    """A probe's result in the emulator.

    Attributes:
        out: bytes. hazards: kinds that were reported. opcodes: of the kernel's instructions.
    """

    def __init__(self, probe: Probe, schedule: str = "round_robin", seed: int = 0):
        from dsv4lib.emulator.machine import program
        from dsv4lib.emulator.machine.machine import GlobalMemory, Machine
        from dsv4lib.emulator.machine.request import LaunchRequest, Settings
        from dsv4lib.emulator.ptx import parse

        module = parse.parse(probe.ptx)
        kernel = module.kernels["k"]
        lowered = program.lower(kernel, module)
        gmem = GlobalMemory()
        image, out = _aligned(probe.image.nbytes), _aligned(probe.out_bytes)
        image[:], out[:] = probe.image.reshape(-1), POISON
        gmem.register_array(image, "image")
        gmem.register_array(out, "out")
        params = b"".join(array.ctypes.data.to_bytes(8, "little") for array in (image, out))
        shape = (probe.ctas, 1, 1)
        attributes = {"cluster": 1} if probe.ctas > 1 else {}
        request = LaunchRequest(
            "k", module, shape, (THREADS, 1, 1), cluster=shape, params=params, attributes=attributes
        )
        settings = Settings(arch=probe.arch, schedule=schedule, seed=seed)
        result = Machine(lowered, request, gmem, settings).run()
        self.out = out.tobytes()
        self.hazards = sorted({hazard.kind for hazard in result.hazards})
        self.opcodes = sorted({instr.opcode for instr in kernel.instructions})


def opcodes(probe: Probe) -> list[str]:
    """Opcodes of a probe's kernel."""
    from dsv4lib.emulator.ptx import parse

    return sorted({instr.opcode for instr in parse.parse(probe.ptx).kernels["k"].instructions})


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + 1024, np.uint8)
    start = -raw.ctypes.data % 1024
    return raw[start : start + nbytes]
