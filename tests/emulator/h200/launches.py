"""Launches as files: what a GPU needs to repeat, alone, each kernel launch that a program made in the emulator.

`recording()` listens to the emulated device. Of every launch it keeps the cubin that the PTX was assembled to, the
shape, the parameter block and the memory that the block points to, as it was before and after. Pointers in the block,
those in tensor maps included, are found by value: an aligned 64-bit word that lies in registered memory. Pointers
that lie in memory themselves (grouped GEMM, tensor maps that a kernel writes) are not followed: `save` refuses a launch
whose memory holds any. Devices in a group run together, not launch by launch: recording them is refused.

A file is one launch (numpy's npz): `on_gpu.py` runs it on a Hopper GPU with nothing but the driver.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib.emulator.driver import binary
from dsv4lib.emulator.driver.device import Device
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.machine.request import LaunchRequest

WORD = 8
MAP_BYTES = 128  # of a tensor map
# Names of element types in the labels of registered memory (torch's and CuTeDSL's) -> ours.
ELEMENTS = {
    "float16": "f16",
    "Float16": "f16",
    "bfloat16": "bf16",
    "BFloat16": "bf16",
    "float32": "f32",
    "Float32": "f32",
}


@dataclass(frozen=True)
class Region:
    """Memory that a launch can reach.

    Attributes:
        offset: of its start from a 256-byte boundary; element: "f16", "bf16", "f32" or "bytes".
        before, after: uint8 contents around the launch.
    """

    offset: int
    element: str
    before: np.ndarray
    after: np.ndarray

    @property
    def written(self) -> bool:
        """Did the launch change it?"""
        return not np.array_equal(self.before, self.after)


@dataclass(frozen=True)
class Recorded:
    """One launch.

    Attributes:
        kernel: symbol; ptx, cubin: of its module.
        grid, block, cluster: dimensions; smem: dynamic bytes; attributes: further launch attributes by name.
        params: the block, pointers zeroed; parts: (offset, bytes) of each parameter.
        pointers: (offset in params, number of the region, offset in the region).
        regions: the memory; instructions: warp-instructions that the emulator executed.
        indirect: the memory itself holds pointers.
    """

    kernel: str
    ptx: str
    cubin: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    attributes: dict[str, Any]
    params: bytes
    parts: tuple[tuple[int, int], ...]
    pointers: tuple[tuple[int, int, int], ...]
    regions: tuple[Region, ...]
    instructions: int = field(compare=False)
    indirect: bool = field(default=False, compare=False)

    @property
    def inputs(self) -> str:
        """Digest of everything besides the code that determines the result: shape, parameters, memory."""
        shape = [self.grid, self.block, self.cluster, self.smem, self.attributes, self.pointers]
        hasher = hashlib.sha256(json.dumps(shape).encode())
        for first, end in parameter_reads(self.ptx, self.kernel, self.parts):
            hasher.update(self.params[first:end])
        for region in self.regions:
            hasher.update(region.before.tobytes())
        return hasher.hexdigest()[:32]


def code_digest(ptx: str) -> str:
    """SHA-256 of PTX without comments, line information and debug sections, which hold paths of files."""
    text = ptx.partition("\n\t.section")[0].partition("\n.section")[0]
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    kept = [line for line in lines if line and not line.startswith((".loc", ".file"))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:32]


def parameter_reads(ptx: str, kernel: str, parts: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Ranges of the parameter block that a kernel reads; host code leaves the rest uninitialised.

    Of a parameter whose address is taken all counts, but of a tensor map only the half that hardware looks at.
    """
    name = re.escape(kernel) + r"_param_(\d+)"
    ranges = set()
    for count, bits, number, offset in re.findall(rf"ld\.param(?:\.v(\d))?\.[a-z](\d+)\s[^\[]*\[{name}\+?(\d*)\]", ptx):
        first = parts[int(number)][0] + int(offset or 0)
        ranges.add((first, first + int(count or 1) * int(bits) // 8))
    for number in re.findall(rf"mov\.\w+\s+%\w+, {name};", ptx):
        first, size = parts[int(number)]
        ranges.add((first, first + (size // 2 if size == MAP_BYTES else size)))
    return sorted(ranges)


def element_of(label: str) -> str:
    """The element type that a label of registered memory ends with; "bytes" if it is none that we compare as numbers.

    >>> element_of("tensor 4x8 torch.float16")
    'f16'
    """
    return ELEMENTS.get(re.split(r"[ .]", label)[-1], "bytes")


def located(gpu: Device, params: bytes) -> tuple[list[tuple[int, int, int]], list[Any]]:
    """Pointers of a parameter block and the allocations they lie in, in the order of their first use."""
    allocations: list[Any] = []
    pointers = []
    for at in range(0, len(params) - WORD + 1, WORD):
        address = int.from_bytes(params[at : at + WORD], "little")
        found = gpu.gmem.find(address)
        if found is None:
            continue
        if found not in allocations:
            allocations.append(found)
        pointers.append((at, allocations.index(found), address - found.start))
    return pointers, allocations


def holds_pointers(gpu: Device, start: int, data: np.ndarray) -> bool:
    """Does an aligned 64-bit word of memory from address ``start`` on, uint8[n], lie in registered memory?"""
    data = data[-start % WORD :]
    words = data[: len(data) // WORD * WORD].copy().view(np.uint64)
    return any(bool(((words >= a.start) & (words < a.start + a.nbytes)).any()) for a in gpu.gmem)


@contextlib.contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Record every launch on an emulated device inside the block, in order.

    Raises:
        LaunchError: of a launch on one of several devices.
    """
    records: list[Recorded] = []
    cubins: dict[int, bytes] = {}  # by id of the parsed module
    launch, module_at = Device.launch, binary.module_at

    def remembering(address: int) -> Any:
        module = module_at(address)
        cubins[id(module)] = binary.cubin_at(address)
        return module

    def recorded(gpu: Device, request: LaunchRequest, stream: int = 0) -> Any:
        if gpu.group is not None:
            raise LaunchError("a launch on one of several devices cannot be recorded")
        gpu.memory.sweep()
        pointers, allocations = located(gpu, request.params)
        before = [gpu.gmem.view(a.start, a.nbytes).copy() for a in allocations]
        result = launch(gpu, request, stream)
        cubin = cubins[id(request.module)]
        ptx = binary.ptx_of(cubin)
        after = [gpu.gmem.view(a.start, a.nbytes).copy() for a in allocations]
        regions = [
            Region(a.start % 256, element_of(a.label), b, c) for a, b, c in zip(allocations, before, after, strict=True)
        ]
        indirect = any(
            holds_pointers(gpu, a.start, data)
            for memory in (before, after)
            for a, data in zip(allocations, memory, strict=True)
        )
        records.append(_record(request, ptx, cubin, pointers, regions, result.instructions, indirect))
        return result

    Device.launch, binary.module_at = recorded, remembering
    try:
        yield records
    finally:
        Device.launch, binary.module_at = launch, module_at


def _record(
    request: LaunchRequest,
    ptx: str,
    cubin: bytes,
    pointers: list[tuple[int, int, int]],
    regions: list[Region],
    instructions: int,
    indirect: bool,
) -> Recorded:
    params = bytearray(request.params)
    for at, _, _ in pointers:
        params[at : at + WORD] = bytes(WORD)
    kernel = request.module.kernels[request.kernel_name]
    return Recorded(
        kernel=request.kernel_name,
        ptx=ptx,
        cubin=cubin,
        grid=tuple(request.grid),
        block=tuple(request.block),
        cluster=tuple(request.cluster),
        smem=request.dynamic_smem,
        attributes=dict(request.attributes),
        params=bytes(params),
        parts=tuple((p.offset, p.size) for p in kernel.params),
        pointers=tuple(pointers),
        regions=tuple(regions),
        instructions=instructions,
        indirect=indirect,
    )


def save(record: Recorded, path: Path) -> None:
    """Write the file that `on_gpu.py` reads, and `record.py`.

    Raises:
        LaunchError: memory of the launch holds pointers, which would mean nothing on a GPU.
    """
    if record.indirect:
        raise LaunchError(f"{record.kernel} reaches memory through pointers in memory: the launch cannot be a file")
    shape = {
        "kernel": record.kernel,
        "grid": record.grid,
        "block": record.block,
        "cluster": record.cluster,
        "smem": record.smem,
        "attributes": record.attributes,
        "parts": record.parts,
        "pointers": record.pointers,
        "offsets": [region.offset for region in record.regions],
        "elements": [region.element for region in record.regions],
        "code": code_digest(record.ptx),
        "inputs": record.inputs,
        "instructions": record.instructions,
    }
    arrays = {f"before_{i}": region.before for i, region in enumerate(record.regions)}
    arrays |= {f"after_{i}": region.after for i, region in enumerate(record.regions)}
    np.savez_compressed(
        path,
        shape=np.frombuffer(json.dumps(shape).encode(), np.uint8),
        cubin=np.frombuffer(record.cubin, np.uint8),
        params=np.frombuffer(record.params, np.uint8),
        **arrays,
    )
