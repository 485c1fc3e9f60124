"""Which back end a choice means, on made-up machines: the rules that keep a skipped kernel from passing as verified."""

import pytest
import torch

from dsv4lib import backends, env
from dsv4lib.errors import ArgumentError, BackendUnavailable


@pytest.fixture
def machine(monkeypatch):
    """machine(capabilities, emulator=...) pretends to be a machine with GPUs of these compute capabilities."""

    def pretend(*capabilities, emulator=False, driver=(13, 0), cuda="13.0"):
        monkeypatch.setattr(env, "driver_cuda", lambda: driver)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object() if emulator else None)

    return pretend


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((9, 0), {"sm_90a"}),
        ((10, 0), {"sm_100a", "sm_100f"}),
        ((10, 3), {"sm_100f", "sm_103a"}),
        ((8, 6), {"sm_80"}),
        ((12, 0), set()),
    ],
)
def test_native_needs_the_matching_architecture(machine, capability, runs):
    machine(capability)
    assert {arch for arch in backends.CAPABILITY if backends.status("native", arch).available} == runs


def test_reasons_name_what_is_missing(machine):
    machine((9, 0))
    assert "9.0; sm_100a needs 10.0" in backends.status("native", "sm_100a").reason
    machine(cuda=None)
    assert "CPU build" in backends.status("native").reason
    machine(driver=None)
    assert "no NVIDIA driver" in backends.status("native").reason
    machine()
    assert "no usable" in backends.status("native").reason


def test_auto_prefers_native_then_emulator_and_never_reference_for_a_kernel(machine):
    machine((10, 0), emulator=True)
    assert backends.resolve("auto", "sm_100a") == "native"
    machine((9, 0), emulator=True)
    assert backends.resolve("auto", "sm_100a") == "emulator"
    machine((9, 0))
    with pytest.raises(BackendUnavailable, match="native: .* emulator: "):
        backends.resolve("auto", "sm_100a")
    assert backends.resolve("auto", "sm_100a", kernel=False) == "reference"


def test_any_of_several_architectures_is_native(machine):
    machine((9, 0), emulator=True)
    both = "sm_100a", "sm_90a"
    assert backends.resolve("auto", both) == backends.resolve("native", both) == "native"
    assert (backends.runs("native", both), backends.runs("emulator", both)) == ("sm_90a", "sm_100a")
    machine((8, 6), emulator=True)
    assert backends.resolve("auto", both) == "emulator"
    with pytest.raises(BackendUnavailable, match="sm_100a needs 10.0"):
        backends.resolve("native", both)


def test_an_explicit_choice_never_falls_back(machine):
    machine(emulator=True)
    with pytest.raises(BackendUnavailable, match="native"):
        backends.resolve("native", "sm_100a", kernel=False)
    assert backends.resolve("reference", "sm_100a") == "reference"


def test_unknown_names_are_refused():
    with pytest.raises(ArgumentError, match="backend='cuda'"):
        backends.resolve("cuda")
    with pytest.raises(ArgumentError, match="arch='sm_101'"):
        backends.status("native", "sm_101")


def test_only_native_and_emulator_run_kernels():
    with pytest.raises(ArgumentError, match="backend='reference'"):
        backends.launch("reference", lambda: None)
    assert (backends.device("native"), backends.device("emulator")) == ("cuda", "cpu")
