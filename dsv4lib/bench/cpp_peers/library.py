"""Load a package's compiled host code and let its launches run on the active device of the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsv4lib.bench.cpp_peers.build import BuildError, Built, Entry, words
from dsv4lib.emulator.driver import binary, config, symbols
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.errors import DSV4Error

FAILED = 999  # cudaErrorUnknown


class PeerError(DSV4Error):
    """The package's own host code refuses a call; the message is its."""


class Library:
    """A compiled entry point.

    Attributes:
        entry: what was compiled. module: its kernels.
    """

    def __init__(self, entry: Entry, built: Built):
        self.entry, self.module = entry, binary.parsed(built.ptx)
        try:
            self._library = ctypes.CDLL(str(built.library))
        except OSError as error:
            raise BuildError(f"{entry.checkout.name} does not load: {error}") from error
        self._error: BaseException | None = None
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(self._launched)
        encoders = symbols.tensor_map_encoders()
        self._encoders = [
            ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._guarded(function))
            for function, types in (encoders["cuTensorMapEncodeTiled"], encoders["cuTensorMapEncodeIm2col"])
        ]
        self._library.dsv4_run.restype = ctypes.c_char_p

    def _guarded(self, function: Any) -> Any:
        def call(*args: Any) -> int:
            try:
                function(*args)
            except BaseException as error:
                self._error = self._error or error
                return FAILED
            return 0

        return call

    def _launched(self, settings: int, name: bytes, arguments: int) -> int:
        """Run a kernel. An error waits until the host code has returned."""
        try:
            gpu = RUNTIME.device()
            given = ctypes.cast(settings, ctypes.POINTER(config.Config))[0]
            request = config.decode(given, self.module, name.decode(), arguments, gpu.ctas)
            config.check(request, gpu.arch, gpu.settings.sm_count, request.dynamic_smem)
            gpu.launch(request, given.stream or 0)
        except BaseException as error:
            self._error = self._error or error
            return FAILED
        return 0

    def __call__(
        self, values: Mapping[str, int | float | torch.Tensor | None], also: Sequence[torch.Tensor] = ()
    ) -> None:
        """Call the entry point on the active device.

        Args:
            values: of the record, by field: numbers, tensors of the CPU, None for a null pointer.
            also: tensors that kernels reach by tensor maps alone.

        Raises:
            PeerError: the package refuses.
            EmulatorError: what stopped a kernel.
        """
        gpu, flat = RUNTIME.device(), {}
        for tensor in (*also, *(value for value in values.values() if isinstance(value, torch.Tensor))):
            RUNTIME.track(tensor)
            gpu.memory.tensor(tensor)
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                flat[name] = value.data_ptr()
            else:
                flat[name] = 0 if value is None else value
        raw = words(self.entry.fields, flat)
        tiled, im2col = (ctypes.cast(one, ctypes.c_void_p) for one in self._encoders)
        self._library.dsv4_connect(self._launch, tiled, im2col, gpu.settings.sm_count)
        self._error = None
        said = self._library.dsv4_run((ctypes.c_uint64 * len(raw))(*raw))
        error, self._error = self._error, None
        if error is not None:
            raise error
        if said is not None:
            raise PeerError(f"{self.entry.checkout.name}: {said.decode(errors='replace')}")
