"""Pack our kernels of the bench's rows without a GPU. The pack is for a machine without the CuTe DSL.

    python -m dsv4lib.bench.ops.export ops.zip [--arch sm_90a] [--only rmsnorm,router] [--shape "T 4096"]

Every row's own call is recorded, on an emulated device that records launches instead of running them (as a CUDA graph
does): what is packed is what the op launches on a GPU of that architecture and size. A call that does anything but
launch the lab's kernels cannot be packed (a GEMM of cuBLAS), nor can one with TMA descriptors or with memory that was
computed from the inputs when it was bound; the index and a line of the output say so, and the exit code is 0 all the
same. Beside cubins and launches, the archive has the lab's sources, so that there

    unzip ops.zip && python -m dsv4lib.bench.ops.harness --pack .

runs the bench with torch alone, and `python -m dsv4lib.bench.ops.host_pack .` takes the host's time of calls. Ops find
out once where they are: this needs a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dsv4lib import backends, emulator, env
from dsv4lib.bench.ops import harness, host_pack
from dsv4lib.bench.ops.case import Row, tensors
from dsv4lib.bench.ops.replay import FORMAT
from dsv4lib.bench.ops.timing import first_line
from dsv4lib.emulator.ptx.ir import Kernel, Memory, Symbol
from dsv4lib.errors import DSV4Error

SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}  # SMs of the GPU of each architecture (H200, B200, B300)
MOST = 32 << 20  # bytes of memory with contents that a row may need
TENSOR_MAP = 128  # bytes of a TMA descriptor among the parameters


class NotPacked(DSV4Error):
    """A row's call cannot be packed; the message says why."""


def write(path: Path, rows: Iterable[Row], gpu: Any) -> dict[str, Any]:
    """Pack rows into a zip archive; ``gpu`` is that of `recording`.

    Returns:
        its index: ``rows`` that are in it, ``refused``: the reason for each that is not.
    """
    facts = {"arch": gpu.arch.name, "sms": gpu.settings.sm_count}
    index: dict[str, Any] = {"format": FORMAT, **facts, "rows": {}, "refused": {}}
    index["kernels"] = env.kernel_fingerprint()
    index["host"] = host_pack.code()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        files: dict[str, bytes] = {}
        for row in rows:
            name = f"{row.op} {row.shape}"
            try:
                index["rows"][name] = entry(row, gpu, files)
            except Exception as error:  # an op's own; others can still be packed
                index["refused"][name] = str(error) if isinstance(error, NotPacked) else first_line(error)
        for file, content in files.items():
            archive.writestr(file, content)
        for source in sorted(env.package().rglob("*.py")):
            archive.write(source, source.relative_to(env.package().parent))
        archive.write(env.root() / "data" / "bench" / "rates.csv", "data/bench/rates.csv")
        archive.writestr("index.json", json.dumps(index, indent=1))
    return index


@contextmanager
def recording(arch: str) -> Iterator[Any]:
    """Make `native` an emulated device of ``arch`` that runs nothing, and yield it. Import ops inside."""
    with emulator.device(arch, sm_count=SMS[arch], default_device="cpu") as gpu, backends.recorded(arch):
        gpu.launch = lambda request, stream=0: None
        yield gpu


def entry(row: Row, gpu: Any, files: dict[str, bytes]) -> dict[str, Any]:
    """Return what the index says of a row; cubins and contents go into ``files``.

    The call is recorded three times, over other memory: words of the parameters that the kernel loads and that differ
    are addresses. What is allocated without contents is filled with another byte each time, so memory that differs was
    not initialised. The third time has other inputs: memory that differs only then was computed from them.

    Raises:
        NotPacked: see the module.
    """
    one, two, other = _Recorded(row, gpu, fill=1), _Recorded(row, gpu, fill=2), _Recorded(row, gpu, fill=3, seed=1)
    shapes = [[launch.shape for launch in recorded.launches] for recorded in (one, two, other)]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        raise NotPacked("two calls launch different kernels")
    launches = []
    for a, b, c in zip(one.launches, two.launches, other.launches, strict=True):
        params, pointers = _addresses(a.params, b.params, one, two)
        if _addresses(a.params, c.params, one, other) != (params, pointers):
            raise NotPacked("its parameters depend on its inputs")
        cubin = _stored(files, "cubins", a.cubin)
        launches.append({**a.shape, "cubin": cubin, "params": params.hex(), "pointers": pointers})
    memory = {}
    for name, (start, size, layout) in one.memory.items():
        content, again = _content(start, size), _content(*two.memory[name][:2])
        kept = torch.equal(content, again) and bool(content.any())
        source = _source(content, tensors(one.given)) if kept else None
        if kept and source is None and not torch.equal(content, _content(*other.memory[name][:2])):
            raise NotPacked(f"{name} is made of its inputs")
        if kept and source is None and size > MOST:
            raise NotPacked(f"{name}: {size >> 20} MiB of memory with contents")
        file = _stored(files, "memory", content.numpy().tobytes()) if kept and source is None else None
        memory[name] = {"bytes": size, "as": source, "file": file, **layout}
    used = {name for launch in launches for _, name, _ in launch["pointers"]}
    known = tensors(one.given).items()
    shapes = {name: [list(x.shape), list(x.stride())] for name, x in known if f"given {name}" in used}
    return {"given": shapes, "memory": memory, "launches": launches}


def _addresses(a: bytes, b: bytes, one: _Recorded, two: _Recorded) -> tuple[bytes, list[list]]:
    """Parameters with zeros for addresses, and where those are: (offset, whose memory, bytes from its start)."""
    params, pointers = bytearray(a), []
    for offset in range(0, len(a), 8):
        words = [int.from_bytes(block[offset : offset + 8], "little") for block in (a, b)]
        if words[0] == words[1]:
            continue
        place = one.place(words[0])
        if place is None or place != two.place(words[1]):
            raise NotPacked(f"bytes {offset} to {offset + 7} of its parameters differ from call to call")
        pointers.append([offset, *place])
        params[offset : offset + 8] = bytes(8)
    return bytes(params), pointers


class _Filled(TorchFunctionMode):
    """Fill with a byte what torch allocates without contents."""

    NAMES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

    def __init__(self, byte: int):
        super().__init__()
        self.byte = byte

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in self.NAMES and made.untyped_storage().nbytes():
            torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage()).fill_(self.byte)
        return made


@dataclass(frozen=True)
class _Launch:
    """A recorded launch: all of it that must be the same in every recording, its parameters, its cubin."""

    shape: dict[str, Any]
    params: bytes
    cubin: bytes


class _Recorded:
    """One recording of a row's call.

    Attributes:
        given: the inputs. launches: of the call. memory: (start, size, layout of an output) by name, but for inputs.
    """

    def __init__(self, row: Row, gpu: Any, fill: int, seed: int = 0):
        self.given = harness.inputs(row, "cuda", seed)
        graph = torch.cuda.CUDAGraph()
        with _Filled(fill):
            call, outputs = row.providers[0].bind(self.given)
            try:
                call()  # compiles; memory that the op makes at its first call is there
            except NotImplementedError as error:  # a kernel of torch's that only a GPU has
                operator = re.search(r"'(aten::\w+)", str(error))
                raise NotPacked(
                    f"it calls {operator[1] if operator else 'torch'}, whose GPU kernel is not ours"
                ) from None
            with torch.cuda.graph(graph):
                call()
        if not graph.launches:
            raise NotPacked("the call launches nothing")
        self._keep, self._gpu = (call, outputs), gpu
        self.memory: dict[str, tuple[int, int, dict[str, Any]]] = {}
        self._ranges: list[tuple[int, int, str]] = []
        for name, x in tensors(self.given).items():
            storage = x.untyped_storage()
            self._know(f"given {name}", x.data_ptr(), storage.data_ptr() + storage.nbytes() - x.data_ptr())
        for name, x in outputs.items():
            self._output(name, x)
        self.launches = [_launch(request) for request in graph.launches]

    def place(self, address: int) -> tuple[str, int] | None:
        """Whose memory an address is in, and the offset from its start; None if it is no address."""
        for start, size, name in self._ranges:
            if start <= address < start + size:
                return name, address - start
        found = self._gpu.gmem.find(address)
        if found is None:
            return None
        name = f"memory {sum(known.startswith('memory') for _, _, known in self._ranges)}"
        self._know(name, found.start, found.nbytes)
        self.memory[name] = found.start, found.nbytes, {}
        return name, address - found.start

    def _know(self, name: str, start: int, size: int) -> None:
        if not any(start < s + n and s < start + size for s, n, _ in self._ranges):
            self._ranges.append((start, size, name))

    def _output(self, name: str, x: torch.Tensor) -> None:
        start, size = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
        if any(s <= start < s + n for s, n, known in self._ranges if known.startswith("given")):
            raise NotPacked(f"its output {name} is memory of an input")
        dtype = str(x.dtype).removeprefix("torch.")
        layout = {"dtype": dtype, "shape": list(x.shape), "stride": list(x.stride()), "offset": x.storage_offset()}
        self._know(f"out {name}", start, size)
        self.memory[f"out {name}"] = start, size, layout


def _launch(request: Any) -> _Launch:
    if any(
        param.size == TENSOR_MAP and param.align >= 64 for param in request.module.kernels[request.kernel_name].params
    ):
        raise NotPacked("a TMA descriptor is among its parameters")
    if request.attributes.get("cooperative"):
        raise NotPacked("a cooperative launch")
    shape = {
        "kernel": request.kernel_name,
        "grid": list(request.grid),
        "block": list(request.block),
        "cluster": list(request.cluster),
        "smem": request.dynamic_smem,
        "programmatic": bool(request.attributes.get("programmatic")),
    }
    return _Launch(shape, _read(request.params, request.module.kernels[request.kernel_name]), _cubin(request))


def _read(params: bytes, kernel: Kernel) -> bytes:
    """The parameters with zeros for what the kernel never loads: padding of structs is whatever memory held before."""
    start = {param.name: param.offset for param in kernel.params}
    kept = bytearray(len(params))
    for instr in kernel.instructions:
        for operand in instr.operands:
            symbol = operand.base if isinstance(operand, Memory) else operand
            if not isinstance(symbol, Symbol) or symbol.name not in start:
                continue
            if operand is symbol or not instr.opcode.startswith("ld.param."):
                return params  # its address is taken
            width = re.fullmatch(r"ld\.param\.(?:v(\d)\.)?[a-z]+(\d+)", instr.opcode)
            if width is None:
                return params
            at = start[symbol.name] + symbol.offset + operand.offset
            end = at + int(width[1] or 1) * int(width[2]) // 8
            kept[at:end] = params[at:end]
    return bytes(kept)


def _content(start: int, size: int) -> torch.Tensor:
    """A copy of host memory."""
    return torch.frombuffer(bytearray(ctypes.string_at(start, size)), dtype=torch.uint8)


def _source(content: torch.Tensor, known: Mapping[str, torch.Tensor]) -> str | None:
    """The input that has these bytes, element after element."""
    for name, x in known.items():
        if x.numel() * x.element_size() == len(content):
            if torch.equal(x.cpu().contiguous().reshape(-1).view(torch.uint8), content):
                return name
    return None


def _cubin(request: Any) -> bytes:
    """Of the kernel of a launch."""
    from dsv4lib.emulator.driver import binary
    from dsv4lib.ops.common import compile_cache

    for code in compile_cache.default().kernels():
        if code.name == request.kernel_name and binary.parsed(code.ptx.rstrip("\0")) is request.module:
            return code.cubin
    raise NotPacked(f"kernel {request.kernel_name} is none of the lab's")


def _stored(files: dict[str, bytes], folder: str, content: bytes) -> str:
    """The name of the file with this content."""
    name = f"{folder}/{hashlib.sha256(content).hexdigest()[:24]}"
    files[name] = content
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where a module cannot be imported, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m dsv4lib.bench.ops.export", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the zip archive")
    parser.add_argument("--arch", default="sm_90a", choices=sorted(SMS))
    parser.add_argument("--only", default="", help="ops, with commas between them")
    parser.add_argument("--shape", default="", help="rows whose shape contains this")
    given = parser.parse_args(arguments)
    try:
        with recording(given.arch) as gpu:
            rows, broken = harness.chosen(harness.parts(given.only), given.shape)
            index = write(given.path, rows, gpu)
    except DSV4Error as error:
        print(error)
        return 2
    for name, reason in {**broken, **index["refused"]}.items():
        print(f"{name}: not packed: {reason}")
    kernels = {launch["cubin"] for row in index["rows"].values() for launch in row["launches"]}
    size = given.path.stat().st_size / 1e6
    print(f"{given.path}: {len(index['rows'])} rows, {len(kernels)} kernels for {given.arch}, {size:.1f} MB")
    print(f"there: unzip {given.path.name} && python -m dsv4lib.bench.ops.harness --pack .")
    print("  and the host's time of calls: python -m dsv4lib.bench.ops.host_pack .")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
