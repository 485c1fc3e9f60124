"""Emulated GPUs for tests of kernels in CUDA C++: one that must report nothing, one whose reports are looked at."""

import warnings
from contextlib import contextmanager

from dsv4lib import backends
from dsv4lib.emulator.driver.device import active, make
from dsv4lib.emulator.errors import EmulatorError


@contextmanager
def emulated(arch, **settings):
    """The active device, of ``arch``, with the race detector; no hazard is allowed."""
    gpu = make(arch, **{"checks": "race", **settings})
    with backends.emulating(arch), active(gpu):
        yield gpu
    assert not gpu.hazards, gpu.hazards[0].message


@contextmanager
def observed(arch, **settings):
    """A set that afterwards has the kinds of hazards, or alone the name of the error that stopped a kernel."""
    gpu, seen = make(arch, **{"checks": "race", **settings}), set()
    with backends.emulating(arch), active(gpu), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield seen
        except EmulatorError as error:
            seen.add(type(error).__name__)
            return
    seen |= {hazard.kind for hazard in gpu.hazards}
