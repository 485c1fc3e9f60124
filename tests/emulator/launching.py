"""Run hand-written PTX kernels: numpy arrays as arguments, results in place."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np

from dsv4lib.emulator.machine import program
from dsv4lib.emulator.machine.machine import GlobalMemory, Machine
from dsv4lib.emulator.machine.request import LaunchRequest, LaunchResult, Settings
from dsv4lib.emulator.ptx import parse

HEADER = ".version 9.1\n.target sm_100a\n.address_size 64\n"


def aligned(shape: Any, dtype: Any, alignment: int = 256) -> np.ndarray:
    """An array of zeros at an aligned address."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def copy(array: np.ndarray) -> np.ndarray:
    """The array at an aligned address."""
    out = aligned(array.shape, array.dtype)
    out[...] = array
    return out


def pack(kernel: Any, args: tuple[Any, ...]) -> bytes:
    """The parameter block: arrays by address, ints and floats by value."""
    assert len(args) == len(kernel.params), (args, kernel.params)
    out = bytearray(kernel.param_bytes)
    for param, value in zip(kernel.params, args, strict=True):
        if isinstance(value, np.ndarray):
            value = value.ctypes.data
        if isinstance(value, bytes):
            raw = value
        elif isinstance(value, float):
            raw = struct.pack("<f", value)
        else:
            raw = int(value).to_bytes(param.size, "little", signed=value < 0)
        assert len(raw) == param.size
        out[param.offset : param.offset + param.size] = raw
    return bytes(out)


def prepare(
    text: str, *args: Any, grid: Any = 1, block: Any = 32, settings: Settings | None = None, **request: Any
) -> Machine:
    """A machine ready to run the only kernel of ``text``."""
    module = parse.parse(text if ".version" in text else HEADER + text)
    (name,) = module.kernels
    kernel = module.kernels[name]
    lowered = program.lower(kernel, module)
    gmem = GlobalMemory()
    for i, value in enumerate(args):
        if isinstance(value, np.ndarray):
            gmem.register_array(value, f"argument {i}")
    shape = [(v, 1, 1) if isinstance(v, int) else tuple(v) for v in (grid, block)]
    wanted = LaunchRequest(name, module, shape[0], shape[1], params=pack(kernel, args), **request)
    return Machine(lowered, wanted, gmem, settings or Settings())


def launch(text: str, *args: Any, **options: Any) -> LaunchResult:
    """Run the only kernel of ``text``; see `prepare`."""
    return prepare(text, *args, **options).run()


def with_schedule(settings: Settings, name: str, seed: int = 0) -> Settings:
    """The same settings under another policy."""
    return replace(settings, schedule=name, seed=seed)


def entry(params: str, body: str, registers: str = "", shared: str = "") -> str:
    """A kernel ``k`` from its parts."""
    listed = ",\n".join(f"  .param .{p.split()[0]} {p.split()[1]}" for p in params.split(",") if p.strip())
    common = ".reg .b32 %r<64>; .reg .b64 %rd<64>; .reg .pred %p<16>; .reg .f32 %f<32>; .reg .b16 %h<32>;"
    return f"{HEADER}.visible .entry k(\n{listed}\n)\n{{\n{common}\n{registers}\n{shared}\n{body}\nret;\n}}\n"
