"""Loads past the end of a tensor: reported in the padding of a CUDA allocator, an error further out and for stores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import HazardError, LaunchError, MemoryFault
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.errors import ArgumentError
from tests.emulator.launching import aligned, entry, prepare

LANES = np.arange(32)
# Lane i reads word i of `a`, at a distance, and stores it as word i of `b`.
BODY = """
ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
"""


def run(body: str, words: int = 20, padded: bool = True, settings: Settings | None = None) -> tuple:
    """(hazards, b): ``a`` holds 1, 2, ... and has ``words`` words; ``b`` begins as zeros."""
    a, b = aligned(words, np.uint32), aligned(64, np.uint32)
    a[:] = np.arange(words) + 1
    machine = prepare(entry("u64 a, u64 b", BODY + body), a, b, settings=settings)
    gmem = machine.gmem = GlobalMemory()
    gmem.register(a.ctypes.data, a.nbytes, "a", owner=a, padded=padded)
    gmem.register_array(b, "b")
    return machine.run().hazards, b


@pytest.mark.parametrize("load", ["ld.global.b32", "ld.b32", "ld.global.nc.b32", "ld.relaxed.gpu.global.b32"])
def test_a_load_in_the_padding_is_reported_and_reads_ones(load):
    hazards, b = run(f"{load} %r2, [%rd1]; st.global.b32 [%rd2], %r2;")
    assert [(h.kind, h.severity, h.facts["lane"], h.facts["nbytes"]) for h in hazards] == [
        ("global_read_past_end", "error", 20, 4)
    ]
    assert "1 bytes past the last byte of a" in hazards[0].message and load in str(hazards[0].place)
    np.testing.assert_array_equal(b[:32], np.where(LANES < 20, LANES + 1, 0xFFFFFFFF))


def test_a_load_within_the_tensor_is_silent():
    hazards, b = run("ld.global.b32 %r2, [%rd1]; st.global.b32 [%rd2], %r2;", words=32)
    assert hazards == []
    np.testing.assert_array_equal(b[:32], LANES + 1)


def test_the_bytes_that_exist_are_read():
    """A vector of four words of which two are past the end; the same address for all lanes."""
    body = "ld.param.b64 %rd4, [a]; ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd4+64]; add.s32 %r6, %r2, %r3;"
    hazards, b = run(body + "add.s32 %r6, %r6, %r4; st.global.b32 [%rd2], %r6;", words=18)
    assert [h.kind for h in hazards] == ["global_read_past_end"]
    np.testing.assert_array_equal(b[:32], 17 + 18 - 1)  # the word past the end is -1


@pytest.mark.parametrize(
    ("body", "padded", "settings"),
    [
        ("st.global.b32 [%rd1], %r1;", True, Settings()),  # a store
        ("atom.global.add.u32 %r2, [%rd1], 1;", True, Settings()),
        ("ld.global.b32 %r2, [%rd1+512];", True, Settings()),  # past the end of the padding
        ("ld.global.b32 %r2, [%rd1-4];", True, Settings()),
        ("mov.b64 %rd4, -4; ld.global.b32 %r2, [%rd4];", True, Settings()),  # its end wraps to 0
        ("ld.global.b32 %r2, [%rd1];", False, Settings()),  # memory that is not a tensor's
        ("ld.global.b32 %r2, [%rd1];", True, Settings(padding=0)),
        ("ld.global.b32 %r2, [%rd1];", True, Settings(padding=16)),  # 80 bytes are 5 * 16: no padding
        ("ld.global.b32 %r2, [%rd1];", True, Settings(native_checks=0)),  # no report would be made
        ("ld.global.b32 %r2, [%rd1];", True, Settings(muted=frozenset(["global_read_past_end"]))),
    ],
)
def test_everything_else_stops(body, padded, settings):
    with pytest.raises(MemoryFault):
        run(body, padded=padded, settings=settings)


def test_it_can_be_fatal():
    with pytest.raises(HazardError, match="global_read_past_end"):
        run("ld.global.b32 %r2, [%rd1];", settings=Settings(fatal=frozenset(["error"])))


def test_the_option_of_a_device():
    assert make(padding=0).settings == replace(make().settings, padding=0)
    for bad in (-512, 3, 2.0):
        with pytest.raises(ArgumentError, match="power of two"):
            make(padding=bad)


def test_overlap_is_still_refused():
    a = aligned(8, np.uint32)
    gmem = GlobalMemory()
    gmem.register(a.ctypes.data, 16, "a", padded=True)
    gmem.register(a.ctypes.data + 16, 16, "b")  # inside the padding: host memory is packed tighter
    with pytest.raises(LaunchError, match="overlaps"):
        gmem.register(a.ctypes.data + 8, 4, "c")
    assert gmem.find(a.ctypes.data + 16, 16).label == "b" and gmem.find(a.ctypes.data, 20) is None
