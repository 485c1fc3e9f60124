"""Make a fake device differ: what a GPU might do otherwise than the emulator, and ways to fail.

Each difference is named and changes one rule of the emulator, in the fake device's process alone; so it is known which
forms must show it. Failures happen to probes that are named: ``flip:cp.128x256b``. "fault" is one of a kernel,
"memory" one of the machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from unittest import mock

import numpy as np

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.day_one.gpu import OUT_OF_MEMORY, GpuError
from dsv4lib.lab.day_one.probe import Emulated, Probe

Patch = contextlib.AbstractContextManager


def _warp_pairs() -> Patch:
    """64x128b: the two orders of warp pairs are exchanged."""
    from dsv4lib.emulator.units import tcgen05_cp

    first, second = (f"64x128b.warpx2::{pair}" for pair in ("02_13", "01_23"))
    both = {first: tcgen05_cp._TARGETS[second], second: tcgen05_cp._TARGETS[first]}
    return mock.patch.dict(tcgen05_cp._TARGETS, both)


def _nibbles() -> Patch:
    """b4x16_p64: a 4-bit value lands in the low bits of its byte."""
    from dsv4lib.emulator.units import tcgen05_cp

    before = tcgen05_cp.unpack_4bit
    return mock.patch.object(tcgen05_cp, "unpack_4bit", lambda raw: before(raw) >> np.uint8(2))


def _scale_columns() -> Patch:
    """Scale factors begin at a multiple of four columns whatever the address says."""
    from dsv4lib.emulator.units.tcgen05_core import Mma

    before = Mma._scales

    def rounded(self: Mma, cta: object, address: int, *args: object, **options: object) -> np.ndarray:
        return before(self, cta, address & ~3, *args, **options)

    return mock.patch.object(Mma, "_scales", rounded)


def _groups() -> Patch:
    """A in tensor memory: all groups of lanes multiply the A of the first."""
    from dsv4lib.emulator.units import tcgen05_core

    before = tcgen05_core._grouped_sums

    def first(a: np.ndarray, b: np.ndarray, groups: int, *rest: object) -> np.ndarray:
        return before(np.concatenate([a[: len(a) // groups]] * groups), b, groups, *rest)

    return mock.patch.object(tcgen05_core, "_grouped_sums", first)


def _metadata() -> Patch:
    """Sparse A: the chunks of a row are in the opposite order."""
    from dsv4lib.emulator.units import tcgen05_sparse

    before = tcgen05_sparse.codes_of
    return mock.patch.object(tcgen05_sparse, "codes_of", lambda op, cta: before(op, cta)[:, ::-1].copy())


@contextlib.contextmanager
def _base_offset() -> Iterator[None]:
    """The base offset of a matrix descriptor is ignored."""
    from dsv4lib.emulator.units import descriptor

    with mock.patch.object(descriptor, "_base_offset", lambda bits, swizzle: 0):
        descriptor.smem_descriptor.cache_clear()
        yield
    descriptor.smem_descriptor.cache_clear()


def _truncated() -> Patch:
    """Sums are truncated to fewer bits, as an order of their own would."""
    from dsv4lib.emulator.units import tcgen05_core

    before = tcgen05_core.rounded_sums

    def fewer(*args: object, **options: object) -> np.ndarray:
        found = np.asarray(before(*args, **options), np.float32)
        whole = found == np.round(found * 64) / 64
        cut = (found.view(np.uint32) & np.uint32(0xFFFFFFF0)).view(np.float32)
        return np.where(whole, found, cut)

    return mock.patch.object(tcgen05_core, "rounded_sums", fewer)


RULES: dict[str, Callable[[], Patch]] = {
    "warp_pairs": _warp_pairs,
    "nibbles": _nibbles,
    "scale_columns": _scale_columns,
    "groups": _groups,
    "metadata": _metadata,
    "base_offset": _base_offset,
    "truncated_sums": _truncated,
}
FAILURES = ("crash", "hang", "refuse", "fault", "memory", "flip")


def check(wanted: str) -> str:
    """Check the name of a difference.

    Raises:
        ArgumentError: no such rule or failure, or a failure that names no probes.
    """
    kind, _, names = wanted.partition(":")
    if wanted not in RULES and not (kind in FAILURES and names):
        allowed = f"one of {', '.join(RULES)}, or {', '.join(FAILURES)} with the names of probes: flip:cp.*"
        raise ArgumentError("difference", wanted, allowed)
    return wanted


class Fake:
    """The emulator as a device that differs; the calls of `gpu.Driver` that a worker makes."""

    def __init__(self, wanted: list[str]):
        self.rules = [check(name) for name in wanted if ":" not in name]
        self.failures = [check(name).split(":", 1) for name in wanted if ":" in name]

    def open(self) -> None:
        """There is nothing to open."""

    def run(self, probe: Probe) -> bytes:
        """What a device with these differences gives."""
        for kind, names in self.failures:
            if fnmatchcase(probe.name, names):
                self._fail(kind, probe)
        with self._patched():
            out = bytearray(Emulated(probe).out)
        if any(kind == "flip" and fnmatchcase(probe.name, names) for kind, names in self.failures):
            out[len(out) // 3] ^= 0x10
        return bytes(out)

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in self.rules:
                stack.enter_context(RULES[name]())
            yield

    def _fail(self, kind: str, probe: Probe) -> None:
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(3600)
        if kind == "refuse":
            said = f"cuModuleLoadDataEx: CUDA_ERROR_INVALID_PTX (218): {probe.name} is not for this GPU"
            raise GpuError(said, "cuModuleLoadDataEx", 218)
        if kind == "fault":
            raise GpuError("cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700)", "cuCtxSynchronize", 700)
        if kind == "memory":
            raise GpuError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)", "cuMemAlloc_v2", OUT_OF_MEMORY)
