"""What cannot be a file of one launch is refused: pointers in memory, and devices that run together."""

from __future__ import annotations

import dataclasses

import launches
import numpy as np
import own_cases
import pytest
import torch

from dsv4lib import emulator
from dsv4lib.emulator.driver import device
from dsv4lib.emulator.errors import LaunchError


@pytest.fixture(scope="module")
def recorded():
    with launches.recording() as records:
        own_cases.run(own_cases.CASES["row_quant"]("cpu"), "emulator")
    (record,) = records
    return record


def test_a_launch_with_pointers_in_memory_is_not_saved(recorded, tmp_path):
    launches.save(recorded, tmp_path / "good.npz")
    assert not recorded.indirect and (tmp_path / "good.npz").exists()
    with pytest.raises(LaunchError, match="pointers in memory"):
        launches.save(dataclasses.replace(recorded, indirect=True), tmp_path / "bad.npz")
    assert not (tmp_path / "bad.npz").exists()


@pytest.mark.parametrize("offset", [0, 4])
def test_pointers_are_found_by_value(offset):
    gpu, target = device.make("sm_90a"), torch.zeros(64)
    gpu.memory.tensor(target)
    memory = np.zeros(offset + 24, np.uint8)
    assert not launches.holds_pointers(gpu, 4096 - offset, memory)
    memory[offset + 8 : offset + 16] = np.frombuffer(np.uint64(target.data_ptr() + 255).tobytes(), np.uint8)
    assert launches.holds_pointers(gpu, 4096 - offset, memory)
    memory[offset + 8 : offset + 16] = np.frombuffer(np.uint64(target.data_ptr() - 1).tobytes(), np.uint8)
    assert not launches.holds_pointers(gpu, 4096 - offset, memory)


def test_devices_of_a_group_are_not_recorded():
    call = own_cases.CASES["row_quant"]("cpu")
    compiled = own_cases.compiled(call)
    with emulator.devices(2, own_cases.ARCH) as group, launches.recording(), pytest.raises(LaunchError) as error:
        emulator.launch(compiled, *call.arguments, gpu=group[0])
    assert "several devices" in str(error.value)
