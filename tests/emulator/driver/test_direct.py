"""A kernel of a PTX text on torch tensors in place, with parameters that the caller has packed."""

import struct

import pytest
import torch

from dsv4lib import emulator
from dsv4lib.emulator.driver.device import active, make
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.errors import ArgumentError

PTX = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry add(.param .u64 x, .param .u32 n) .maxntid 64, 1, 1
{ .reg .pred %p; .reg .b64 %rd<3>; .reg .b32 %r<4>;
ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x;
griddepcontrol.wait;
mul.wide.u32 %rd2, %r2, 4; add.s64 %rd1, %rd1, %rd2;
ld.global.b32 %r3, [%rd1]; add.s32 %r3, %r3, %r1; st.global.b32 [%rd1], %r3; ret; }"""
BLOCK = (64, 1, 1)


def packed(x, n):
    return struct.pack("<QI", x.data_ptr(), n)


def test_tensors_are_changed_in_place():
    x = torch.arange(64, dtype=torch.int32)
    gpu = emulator.launch_ptx(PTX, "add", (1, 1, 1), BLOCK, packed(x, 5), [x])
    assert torch.equal(x, torch.arange(5, 69, dtype=torch.int32))
    assert gpu.arch.name == "sm_90a" and len(gpu.launches) == 1 and not gpu.launches[0].request.attributes


@pytest.mark.parametrize("programmatic", [False, True])
def test_launches_of_one_device_know_of_each_other(programmatic):
    """Without the wait in the second, only an overlapping launch is a hazard."""
    x, early = torch.zeros(64, dtype=torch.int32), PTX.replace("griddepcontrol.wait;", "")
    gpu = make("sm_90a", checks="race")
    with active(gpu):
        for text in (PTX, early):
            emulator.launch_ptx(text, "add", (1, 1, 1), BLOCK, packed(x, 1), [x], programmatic=programmatic)
    assert x.tolist() == [2] * 64
    assert {hazard.kind for hazard in gpu.hazards} == ({"dependent_launch_early"} if programmatic else set())


def test_what_is_refused():
    x = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(LaunchError, match="no kernel sub in the PTX; it has add"):
        emulator.launch_ptx(PTX, "sub", (1, 1, 1), BLOCK, packed(x, 1), [x])
    with pytest.raises(ArgumentError, match="params"):
        emulator.launch_ptx(PTX, "add", (1, 1, 1), BLOCK, packed(x, 1)[:8], [x])
    with pytest.raises(LaunchError, match="compiled for sm_90a"):
        emulator.launch_ptx(PTX, "add", (1, 1, 1), BLOCK, packed(x, 1), [x], gpu=make("sm_100a"))
    with pytest.raises(LaunchError):
        emulator.launch_ptx(PTX, "add", (1, 1, 1), (128, 1, 1), packed(x, 1), [x])
    assert not x.any()
