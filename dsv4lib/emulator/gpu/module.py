"""Load PTX and launch its kernels on arrays, without torch and without a compiler."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib.emulator.checks.selection import select
from dsv4lib.emulator.driver import config
from dsv4lib.emulator.driver.arch import ARCHITECTURES
from dsv4lib.emulator.driver.arguments import is_whole
from dsv4lib.emulator.driver.binary import parsed
from dsv4lib.emulator.driver.device import Device, make
from dsv4lib.emulator.errors import LaunchError, PtxSyntaxError
from dsv4lib.emulator.gpu.arguments import Staging
from dsv4lib.emulator.gpu.names import demangled
from dsv4lib.emulator.machine.request import Dim3, LaunchRequest, LaunchResult
from dsv4lib.emulator.ptx import ir
from dsv4lib.errors import ArgumentError

MAX_BYTES = 1 << 28  # of a PTX file
_TARGET = re.compile(r"sm_\d{2,3}[af]?")


def architecture_for(target: str) -> str:
    """Choose the architecture that runs code for a ``.target``: its own, else the first that may.

    Raises:
        LaunchError: none does.
    """
    if target in ARCHITECTURES:
        return target
    if _TARGET.fullmatch(target):
        for name in ARCHITECTURES:
            if config.runs_on(target, name):
                return name
    raise LaunchError(f".target {target}: no architecture of the emulator runs it; it has {', '.join(ARCHITECTURES)}")


def read_text(source: Any) -> str:
    """Read PTX from a text with line ends, from bytes, or from a file at a path.

    Raises:
        ArgumentError: there is no such file, or it is too big.
        PtxSyntaxError: the file is no text.
    """
    if isinstance(source, str) and ("\n" in source or ".version" in source):
        return source
    if isinstance(source, bytes | bytearray):
        raw = bytes(source)
    else:
        try:
            path = Path(os.fspath(source))
            size = path.stat().st_size if path.is_file() else None
        except (TypeError, ValueError, OSError):
            size = None
        if size is None or size > MAX_BYTES:
            raise ArgumentError("source", source, f"PTX text, or the path of a file of at most {MAX_BYTES:,} bytes")
        raw = path.read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise PtxSyntaxError(f"not a text: byte {error.start} is {raw[error.start]:#04x}") from None


def load(source: Any, *, arch: str | None = None, **settings: Any) -> Module:
    """Load PTX: ``gpu.load("kernel.ptx")``, or a text.

    Args:
        source: text with line ends, bytes, or the path of a file. Zeros at the end, which NVRTC counts, are dropped.
        arch: default: what ``.target`` says.
        settings: as for `emulator.device`: ``checks``, ``schedule``, ``seed``, ``sm_count``, ``fatal``, limits.

    Raises:
        PtxSyntaxError: the text is not PTX.
        LaunchError: no architecture here runs it.
        ArgumentError: no such file, or a bad setting.
    """
    module = parsed(read_text(source))
    return Module(module, make(architecture_for(module.target) if arch is None else arch, **settings))


class Module:
    """A loaded PTX file on a device of its own.

    Attributes:
        kernels: by their names in the file.
        device: holds its variables from launch to launch, and ``launches`` with their results.
    """

    def __init__(self, module: ir.Module, device: Device):
        self.ir, self.device = module, device
        self.kernels = {name: Kernel(self, kernel) for name, kernel in module.kernels.items()}

    def __repr__(self) -> str:
        return f"<module of {len(self.kernels)} kernels for {self.ir.target} on {self.device}>"

    def kernel(self, name: str = "") -> Kernel:
        """Find a kernel by its name, mangled or as in the source, or by an unambiguous part. "" if there is one only.

        Raises:
            ArgumentError: none or several fit.
        """
        known = list(self.kernels)
        if name in self.kernels:
            return self.kernels[name]
        plain = {key: demangled(key) for key in known}
        fits = [key for key in known if plain[key] == name or plain[key].partition("(")[0] == name]
        fits = fits or [key for key in known if name in key or name in plain[key]]
        if len(fits) == 1:
            return self.kernels[fits[0]]
        near = fits or difflib.get_close_matches(name, known, 3, 0.0)
        more = f" and {len(near) - 5} more" if len(near) > 5 else ""
        raise ArgumentError("kernel", name, "a kernel of the file: " + ", ".join(near[:5]) + more)

    def variable(self, name: str) -> np.ndarray:
        """View a ``.global`` or ``.const`` variable as uint8[bytes]: to read it, or to set it before a launch.

        Raises:
            ArgumentError: the file has no such variable.
        """
        sizes = {v.name: v.size for v in self.ir.variables if v.space in ("global", "const") and v.size}
        addresses = self.device.variables(self.ir)
        if name not in sizes or name not in addresses:
            raise ArgumentError("variable", name, "one of " + (", ".join(sizes) or "none: the file has no variables"))
        return self.device.gmem.view(addresses[name], sizes[name])


class Kernel:
    """One kernel of a module.

    Attributes:
        name: in the file; title: demangled. params: name, offset, size and type of each parameter.
    """

    def __init__(self, module: Module, kernel: ir.Kernel):
        self.module, self.ir = module, kernel
        self.name, self.title, self.params = kernel.name, demangled(kernel.name), kernel.params

    def __repr__(self) -> str:
        return f"<kernel {self.title}, {len(self.params)} parameters>"

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] | Mapping[str, Any] = (),
        *,
        cluster: int | Sequence[int] | None = None,
        shared: int = 0,
        cooperative: bool = False,
        checks: str | None = None,
    ) -> LaunchResult:
        """Run the kernel to its end; arrays are changed in place, also if a check stops it.

        Args:
            grid, block, cluster: x, (x, y) or (x, y, z); a cluster of None is what the kernel says.
            args: one value for each parameter, in order or by name. Arrays of numpy and CPU tensors of torch go by
                address, numbers and bytes by value; see `Struct`, `Pointer` and `TensorMap`.
            shared: bytes of dynamic shared memory.
            checks: of this launch; default: the module's.

        Returns:
            instructions, hazards, stats and the rest of a `LaunchResult`.

        Raises:
            ArgumentError: arguments that do not fit the parameters, or this machine's memory.
            LaunchError: a shape that the architecture or the kernel does not allow.
            EmulatorError: what stopped the kernel.
        """
        device = self.module.device
        if not is_whole(shared) or shared < 0:
            raise ArgumentError("shared", shared, "a whole number of bytes from 0")
        if not isinstance(cooperative, bool):
            raise ArgumentError("cooperative", cooperative, "True or False")
        shape = self.ir.cluster or (1, 1, 1) if cluster is None else triple("cluster", cluster)
        attributes = {"cooperative": cooperative, **({} if cluster is None else {"cluster": True})}
        named = self._bound(args)
        before = device.settings
        if checks is not None:
            chosen = select(checks)
            device.settings = replace(before, native_checks=chosen.bits, muted=chosen.muted)
        try:
            with Staging(device) as staging:
                staging.stage(named)
                request = LaunchRequest(
                    self.name,
                    self.module.ir,
                    triple("grid", grid),
                    triple("block", block),
                    shape,
                    shared,
                    staging.block(self.ir, named),
                    attributes,
                )
                config.check(request, device.arch, device.settings.sm_count, device.arch.smem_per_cta)
                result = device.launch(request)
        finally:
            device.settings = before
        assert result is not None  # only devices of a group queue launches
        return result

    def _bound(self, args: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
        """A value for each parameter, by name."""
        names = [param.name for param in self.params]
        wanted = f"{len(names)} values: " + ", ".join(f"{p.name} (.{p.type}, {p.size} bytes)" for p in self.params)
        if isinstance(args, Mapping):
            if set(args) != set(names):
                raise ArgumentError("args", list(args), wanted)
            return dict(args)
        if not isinstance(args, list | tuple) or len(args) != len(names):
            given = len(args) if isinstance(args, list | tuple) else type(args).__name__
            raise ArgumentError("args", given, wanted)
        return dict(zip(names, args, strict=True))


def triple(name: str, value: Any) -> Dim3:
    """Read an extent: x, (x, y) or (x, y, z).

    Raises:
        ArgumentError: it is none.
    """
    values = (value,) if is_whole(value) or isinstance(value, np.integer) else value
    allowed = "x, (x, y) or (x, y, z), whole numbers from 1 to 2^31 - 1"
    if not isinstance(values, list | tuple) or not 1 <= len(values) <= 3:
        raise ArgumentError(name, value, allowed)
    if any(isinstance(v, bool) or not isinstance(v, int | np.integer) or not 1 <= v < 2**31 for v in values):
        raise ArgumentError(name, value, allowed)
    x, y, z = (*map(int, values), 1, 1)[:3]
    return x, y, z
