"""Emulate several devices with memory that all of them see, as over NVLink.

    with emulator.devices(2) as gpus:
        flags = gpus.symmetric(8, np.uint32)             # flags[0] on device 0, flags[1] on device 1; all see both
        with gpus.on(0):
            compiled(...)                                # queued
        with gpus.on(1):
            compiled(...)                                # queued: it may wait for what device 0's kernel does
        gpus.synchronize()                               # both run, interleaved; an error names its device
        gpus[1].launches[-1].result, gpus[1].hazards, gpus[1].trace

Launches are only queued, per device and stream. All that are queued run interleaved as soon as a result is needed: by
`Devices.synchronize`, torch.cuda.synchronize and the like, a torch operation that reads or writes tensors of a device
with queued launches, or the end of the context. Memory that is not symmetric belongs to one device; a kernel on another
one that touches it faults. Checks and traces are those of each device's own launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from dsv4lib.emulator.checks import Hazard
from dsv4lib.emulator.driver import arguments, device
from dsv4lib.emulator.driver.device import Device
from dsv4lib.emulator.driver.multi_device import LaunchQueues
from dsv4lib.emulator.driver.rank_faults import DROPPED, KINDS, RankFault
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.machine.cta import aligned_zeros
from dsv4lib.emulator.memory.gmem import Multicast
from dsv4lib.errors import ArgumentError

MAX_DEVICES = 64
_PAGE = 4096  # alignment of symmetric memory


class Symmetric:
    """A buffer of the same shape on every device, visible to all of them.

    ``buffer[i]`` is device i's part, a numpy array; ``buffer.tensor(i)`` the same memory as a torch tensor of that
    device. ``buffer.multicast`` (``multicast_tensor()``) stands for all parts at once: its address is for multimem
    instructions and TMA stores; it holds no data.
    """

    def __init__(self, group: Devices, shape: tuple[int, ...], dtype: Any, label: str):
        self.shape, self.dtype = shape, dtype
        self._group = group
        self._nbytes = math.prod(shape) * dtype.itemsize
        group[0].claim(self._nbytes * (len(group) + 1))
        self._parts = [aligned_zeros(self._nbytes, _PAGE) for _ in group]
        self._window = aligned_zeros(self._nbytes, _PAGE)  # an address range of its own
        targets = tuple(part.ctypes.data for part in self._parts)
        for gpu in group:
            for i, part in enumerate(self._parts):
                gpu.gmem.register(part.ctypes.data, part.nbytes, f"{label} of device {i}", owner=part, device=i)
            window = Multicast(self._window.ctypes.data, self._nbytes, label, targets, self._window)
            gpu.gmem.add_multicast(window)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> np.ndarray:
        """Get device ``index``'s part; of a dtype that numpy lacks, its bytes."""
        return self._array(self._parts[self._group.number(index)])

    @property
    def multicast(self) -> np.ndarray:
        """Get the multicast range, as an array to pass to kernels."""
        return self._array(self._window)

    def tensor(self, index: int) -> Any:
        """Get device ``index``'s part as a torch tensor of that device."""
        index = self._group.number(index)
        return self._tensor(self._parts[index], index)

    def multicast_tensor(self) -> Any:
        """Get the multicast range as a torch tensor, to pass to kernels."""
        return self._tensor(self._window, RUNTIME.device().index if RUNTIME.devices else 0)

    def _array(self, raw: np.ndarray) -> np.ndarray:
        return raw.view(self.dtype).reshape(self.shape) if isinstance(self.dtype, np.dtype) else raw

    def _tensor(self, raw: np.ndarray, index: int) -> Any:
        import torch

        tensor = torch.from_numpy(raw)
        kind = torch.from_numpy(np.zeros(0, self.dtype)).dtype if isinstance(self.dtype, np.dtype) else self.dtype
        RUNTIME.place(tensor, index)
        return tensor.view(kind).view(self.shape)


class Devices:
    """A group of devices; see the module.

    Attributes:
        queues: the launches that are queued.
    """

    def __init__(self, members: list[Device]):
        self._members = members
        settings = members[0].settings
        self.queues = LaunchQueues(settings.schedule, settings.seed)
        for i, gpu in enumerate(members):
            gpu.index, gpu.count, gpu.group = i, len(members), self
            gpu.gmem.peers = {j: other.gmem for j, other in enumerate(members) if j != i}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Device]:
        return iter(self._members)

    def __getitem__(self, index: int) -> Device:
        return self._members[self.number(index)]

    def __repr__(self) -> str:
        return f"{len(self)} x {self._members[0].arch.name}, emulated"

    def number(self, index: Any) -> int:
        """Check that there is a device ``index``.

        Raises:
            ArgumentError: there is none.
        """
        return arguments.whole("index", index, 0, len(self) - 1)

    @contextmanager
    def on(self, index: int) -> Iterator[Device]:
        """Make device ``index`` the current one inside. Launches and new tensors are its own."""
        gpu = self[index]
        if not RUNTIME.devices or RUNTIME.device().group is not self:
            raise ArgumentError("index", index, "a device of the group whose context is active")
        before = RUNTIME.device().index
        RUNTIME.select(index)
        try:
            yield gpu
        finally:
            RUNTIME.select(before)

    def symmetric(self, shape: int | Sequence[int], dtype: Any = np.float32, label: str = "symmetric") -> Symmetric:
        """Make a zeroed buffer of ``shape`` on every device.

        All devices may read and write all of them.

        Args:
            dtype: of numpy, or of torch.
            label: for messages.

        Raises:
            ArgumentError: a shape that is not positive whole numbers, something that is no dtype, or more bytes than
                the limit of a device leaves.
        """
        sizes = (shape,) if isinstance(shape, int) else shape
        if not isinstance(sizes, Sequence) or any(type(n) is not int or n < 1 for n in sizes):
            raise ArgumentError("shape", shape, "positive whole numbers")
        if type(dtype).__module__.partition(".")[0] != "torch":
            try:
                dtype = np.dtype(dtype)
            except TypeError:
                raise ArgumentError("dtype", dtype, "a dtype of numpy or torch") from None
        return Symmetric(self, tuple(sizes), dtype, label)

    def synchronize(self) -> None:
        """Run what is queued on all devices, together.

        Raises:
            EmulatorError: what stopped a launch; its place names the device. Everything queued is dropped then.
        """
        self.queues.run()

    def inject(self, index: int, kind: str, after: int | None = None) -> None:
        """Inject a fault of a device into the launches from here on (rank_faults.py).

        Args:
            index: of the device.
            kind: ``late``, ``empty`` or ``dropped``; ``none`` takes the device's fault back.
            after: warp-instructions; see `rank_faults.RankFault`. ``dropped`` needs it.

        Raises:
            ArgumentError: a bad argument.
        """
        index = self.number(index)
        arguments.one_of("kind", kind, ("none", *KINDS))
        if after is not None or kind == DROPPED:
            arguments.whole("after", after, 0)
        if kind == "none":
            self.queues.faults.pop(index, None)
        else:
            self.queues.faults[index] = RankFault(kind, after)

    def hold(self) -> list[Any]:
        """Hold references to the memory that a queued launch may use."""
        return [gpu.memory.hold() for gpu in self]

    @property
    def hazards(self) -> list[Hazard]:
        """Collect the reports of the checks on all devices."""
        return [hazard for gpu in self for hazard in gpu.hazards]

    def left(self) -> None:
        """Leave the context of one of the devices; the last one drops the tensors."""
        if not any(gpu.group is self for gpu in RUNTIME.devices):
            self.queues.discard()
            for gpu in self:
                gpu.memory.clear()


@contextmanager
def devices(
    count: int,
    arch: str = "sm_100a",
    *,
    shims: bool = True,
    default_device: str = "cuda",
    faults: Mapping[int, tuple[str, int | None]] | None = None,
    **settings: Any,
) -> Iterator[Devices]:
    """Make ``count`` emulated devices of one architecture, device 0 the current one.

    Args:
        count: 1 to 64.
        arch, shims, default_device, settings: as for `device`; each device has its own random numbers.
        faults: injected ones by device: kind and ``after`` of `Devices.inject`.

    Raises:
        ArgumentError: a bad argument. BackendUnavailable: CUDA is already initialised in this process.
    """
    arguments.whole("count", count, 1, MAX_DEVICES)
    members = [device.make(arch, **settings) for _ in range(count)]
    for i, gpu in enumerate(members):
        gpu.settings = replace(gpu.settings, seed=gpu.settings.seed + i)
    group = Devices(members)
    for index, (kind, after) in (faults or {}).items():
        group.inject(index, kind, after)
    with device.entered(members[0], shims, default_device):
        yield group
