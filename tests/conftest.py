"""Test-wide settings: one thread per test process, so parallel tests do not fight for cores; SIGTERM cleans up; what is
cached of kernels in memory does not outlive its test module."""

import contextlib
import ctypes
import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: fixtures and temporary folders end properly

if packages := os.environ.get("DSV4_CORPUS_SITE"):  # set by `./dsv4 test --corpus`; last: the lab's own pins win
    sys.path.append(packages)


@pytest.fixture(autouse=True, scope="module")
def kernels_in_memory():
    """Forget kernels behind each module, and give the heap's free pages back: within an hour both are gigabytes."""
    yield
    if compiled := sys.modules.get("dsv4lib.ops.compile_cache"):
        compiled.default().clear()
    if binary := sys.modules.get("dsv4lib.emulator.driver.binary"):
        binary.parsed.cache_clear()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
