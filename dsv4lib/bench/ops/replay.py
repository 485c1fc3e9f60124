"""Launch kernels of a pack, compiled elsewhere, on a GPU here. By the driver alone, without the CuTe DSL.

A pack (`export` writes it) is a folder with `index.json`, a file for each cubin, and files for memory with contents.
For each row it has the launches of our op as the op itself made them: kernel, grid, parameters, and where among the
parameters are addresses of inputs, outputs or other memory. A provider of a pack is checked and timed like any other.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from dsv4lib.bench.ops.case import Absent, Call, Given, Provider, Row, tensors
from dsv4lib.bench.ops.results import OURS
from dsv4lib.errors import DSV4Error

FORMAT = 1
PORTABLE_CLUSTER = 8  # CTAs; a larger one must be allowed explicitly


class ReplayError(DSV4Error, RuntimeError):
    """A pack that cannot be read, or a launch that the driver refuses."""


@dataclass(frozen=True)
class Launch:
    """One kernel of a call.

    Attributes:
        cubin: name of its file. kernel: symbol in there.
        grid, block, cluster: x first. smem: bytes of dynamic shared memory. programmatic: it may start early.
        params: parameter block; pointers: (offset in there, whose address, bytes from its start).
    """

    cubin: str
    kernel: str
    grid: Sequence[int]
    block: Sequence[int]
    cluster: Sequence[int]
    smem: int
    programmatic: bool
    params: bytes
    pointers: Sequence[tuple[int, str, int]]

    def filled(self, memory: Mapping[str, torch.Tensor]) -> bytes:
        """Return the parameters with addresses of this memory."""
        block = bytearray(self.params)
        for offset, name, start in self.pointers:
            block[offset : offset + 8] = (memory[name].data_ptr() + start).to_bytes(8, "little")
        return bytes(block)


class Launcher(Protocol):
    """What runs kernels: `Driver`, or a test's own."""

    def prepare(self, launch: Launch, cubin: bytes, params: bytes) -> Call:
        """Return a call that queues it on the current stream."""


@dataclass(frozen=True)
class Pack:
    """A folder that `export` wrote."""

    folder: Path

    @cached_property
    def index(self) -> dict[str, Any]:
        """List what is in it.

        Raises:
            ReplayError: it is no pack of this version.
        """
        path = self.folder / "index.json"
        if not path.is_file():
            raise ReplayError(f"{path} is missing: unpack what ./dsv4 bench ops --export wrote, and name its folder")
        index = json.loads(path.read_text())
        if index.get("format") != FORMAT:
            raise ReplayError(f"{path} has format {index.get('format')}, not {FORMAT}: export it anew")
        return index

    def provider(self, row: Row, launcher: Launcher) -> Provider:
        """Return our provider of a row. Binding it raises `Absent` where the pack does not have the row."""

        def bind(given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
            name = f"{row.op} {row.shape}"
            entry = self.index["rows"].get(name)
            if entry is None:
                raise Absent(self.index["refused"].get(name, "not in the pack"))
            return self._bound(entry, given, launcher)

        return Provider(OURS, bind, hosted=False)

    def _bound(
        self, entry: dict[str, Any], given: Given, launcher: Launcher
    ) -> tuple[Call, Mapping[str, torch.Tensor]]:
        known = tensors(given)
        device = next(iter(known.values())).device
        for name, (shape, stride) in entry["given"].items():
            found = known[name]
            if [list(found.shape), list(found.stride())] != [shape, stride]:
                raise Absent(f"{name} is {list(found.shape)} by {list(found.stride())} here, {shape} by {stride} there")
        memory = {f"given {name}": x for name, x in known.items()}
        outputs = {}
        for name, one in entry["memory"].items():
            memory[name] = self._made(one, known, device)
            if name.startswith("out "):
                outputs[name.removeprefix("out ")] = _viewed(memory[name], one)
        calls = []
        for fields in entry["launches"]:
            launch = Launch(**{**fields, "params": bytes.fromhex(fields["params"])})
            cubin = (self.folder / launch.cubin).read_bytes()
            calls.append(launcher.prepare(launch, cubin, launch.filled(memory)))

        def call() -> None:
            for one in calls:
                one()

        call.memory = memory  # lives as long as the call
        return call, outputs

    def _made(self, one: dict[str, Any], known: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Memory of an output or of the op itself, as it was before the first launch."""
        if one["as"] is not None:  # of an input's contents
            return known[one["as"]].clone().reshape(-1).view(torch.uint8)
        if one["file"] is None:
            return torch.zeros(one["bytes"], dtype=torch.uint8, device=device)
        contents = bytearray((self.folder / one["file"]).read_bytes())
        return torch.frombuffer(contents, dtype=torch.uint8).to(device)


def _viewed(memory: torch.Tensor, one: dict[str, Any]) -> torch.Tensor:
    """An output in its memory."""
    typed = memory.view(getattr(torch, one["dtype"]))
    return typed.as_strided(one["shape"], one["stride"], one["offset"])


# ------------------------------------------------------------------- the driver


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: number and 64 bytes of value."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_CLUSTER_DIMENSION, _PROGRAMMATIC = 4, 6  # CUlaunchAttributeID
_MAX_SMEM, _ANY_CLUSTER = 8, 14  # CUfunction_attribute
_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*


class Driver:
    """The CUDA driver of this machine, in the context that torch made."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ReplayError(f"no NVIDIA driver: {error}") from error
        torch.cuda.current_stream().synchronize()  # makes the context
        self._functions: dict[tuple[str, str], ctypes.c_void_p] = {}

    def prepare(self, launch: Launch, cubin: bytes, params: bytes) -> Call:
        """Return a call that queues the kernel on torch's current stream.

        Raises:
            ReplayError: the driver refuses it; the launch itself may raise it too.
        """
        config, function, keep = self.described(launch, cubin)
        buffer, size = ctypes.create_string_buffer(params, len(params)), ctypes.c_size_t(len(params))
        extra = (ctypes.c_void_p * 5)(_BUFFER, ctypes.addressof(buffer), _SIZE, ctypes.addressof(size), _END)

        def call() -> None:
            config.stream = torch.cuda.current_stream().cuda_stream
            self._checked("cuLaunchKernelEx", ctypes.byref(config), function, None, extra)

        call.keep = buffer, size, keep  # `extra` and `config` hold their addresses
        return call

    def described(self, launch: Launch, cubin: bytes) -> tuple[Any, ctypes.c_void_p, Any]:
        """Return a launch's CUlaunchConfig on the default stream and its kernel. Also what must be kept.

        Raises:
            ReplayError: the driver refuses the kernel.
        """
        function = self._function(launch, cubin)
        values = [(_PROGRAMMATIC, (int(launch.programmatic),))]
        if math.prod(launch.cluster) > 1:
            values.append((_CLUSTER_DIMENSION, tuple(launch.cluster)))
        attributes = (_Attribute * len(values))()
        for attribute, (number, value) in zip(attributes, values, strict=True):
            attribute.id, attribute.value[: len(value)] = number, value
        config = _Config(tuple(launch.grid), tuple(launch.block), launch.smem, None, attributes, len(values))
        return config, function, attributes

    @property
    def launch_address(self) -> int:
        """Of cuLaunchKernelEx."""
        return ctypes.cast(self._cuda.cuLaunchKernelEx, ctypes.c_void_p).value

    def _function(self, launch: Launch, cubin: bytes) -> ctypes.c_void_p:
        key = launch.cubin, launch.kernel
        if key not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._checked("cuModuleLoadData", ctypes.byref(module), cubin)
            self._checked("cuModuleGetFunction", ctypes.byref(function), module, launch.kernel.encode())
            self._functions[key] = function
        function = self._functions[key]
        self._checked("cuFuncSetAttribute", function, _MAX_SMEM, ctypes.c_int(launch.smem))
        if math.prod(launch.cluster) > PORTABLE_CLUSTER:
            self._checked("cuFuncSetAttribute", function, _ANY_CLUSTER, ctypes.c_int(1))
        return function

    def _checked(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise ReplayError(f"{name}: error {code}, {(text.value or b'unknown').decode()}")
