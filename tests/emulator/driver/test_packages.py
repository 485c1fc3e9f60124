"""What is done for optional packages without having them: hooks on imports, patches, refusals of other versions."""

import ctypes
import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from dsv4lib.emulator.driver import libnvrtc, script_packages, triton_driver
from dsv4lib.emulator.driver.device import active, make
from dsv4lib.emulator.driver.on_import import before_import, when_imported
from dsv4lib.emulator.driver.patching import patches
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import LaunchError, MemoryFault
from dsv4lib.errors import BackendUnavailable


def test_hooks_act_on_an_import_not_on_a_search(tmp_path, monkeypatch):
    (tmp_path / "dsv4_hooked.py").write_text("import dsv4_calls\ndsv4_calls.made.append('run')")
    (tmp_path / "dsv4_calls.py").write_text("made = []")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = importlib.import_module("dsv4_calls").made
    before = {"dsv4_hooked": lambda: calls.append("before"), "dsv4_absent": lambda: calls.append("never")}
    with when_imported({"dsv4_hooked": lambda module: calls.append("after")}), before_import(before):
        assert importlib.util.find_spec("dsv4_hooked") and importlib.util.find_spec("dsv4_absent") is None
        assert calls == []
        importlib.import_module("dsv4_hooked")
    assert calls == ["before", "run", "after"]
    for name in ("dsv4_hooked", "dsv4_calls"):
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def nvidia(monkeypatch):
    """The module of Triton's driver, empty, in packages of its names."""
    names = ["triton", "triton.backends", "triton.backends.nvidia", "triton.backends.nvidia.driver"]
    made = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    made["triton"].__version__ = "3.2.1"
    return made[names[-1]]


def test_a_triton_that_launches_in_another_way_is_refused(nvidia):
    config = ModuleType(triton_driver._DRIVER)
    config.driver = config._create_driver = ModuleType("config")
    config.driver._default = config.driver._active = None
    nvidia.CudaDriver = nvidia.CudaLauncher = object
    with patches() as patch:
        triton_driver._drive(patch, config)
        with pytest.raises(BackendUnavailable, match=r"Triton 3.2.1 .* 3.9, .* no annotate_arguments\): pip install"):
            config._create_driver()
    assert not hasattr(nvidia, "PyKernelArg")


def test_what_triton_takes_from_its_c_module_goes_with_the_device(nvidia):
    before = {name: object for name in triton_driver._NEEDED} | {"ARG_TUPLE": "theirs"}
    vars(nvidia).update(before)
    known = dict(vars(nvidia))
    with patches() as patch:
        triton_driver._driver(patch)
        assert nvidia.PyKernelArg is triton_driver.KernelArgument and nvidia.ARG_TUPLE == triton_driver.TUPLE
    assert vars(nvidia) == known


def test_what_warp_is_told_holds_as_long_as_the_device():
    module = ModuleType("context")
    module.Runtime = type("Runtime", (), {"load_dll": lambda self, path: path})
    with patches() as patch:
        script_packages._warp(patch, module)
        assert script_packages.MEMORY_POOLS in RUNTIME.hidden
    assert script_packages.MEMORY_POOLS not in RUNTIME.hidden


@pytest.mark.parametrize("over", ["target", "source"])
def test_copies_of_warp_stay_inside_an_allocation(over):
    device, host = make("sm_90a"), np.zeros(65, np.uint8)
    with active(device):
        there = device.copy(np.full(64, 7, np.uint8))
        addresses = {"target": there.ctypes.data, "source": host.ctypes.data}
        if over == "source":
            addresses = {"target": host.ctypes.data, "source": there.ctypes.data}
        script_packages._copy(None, None, *addresses.values(), 64)
        assert host[0] == there[0] and not host[64]
        with pytest.raises(MemoryFault, match="runs 1 bytes over the end"):
            script_packages._copy(None, None, *addresses.values(), 65)


@pytest.mark.parametrize("fault", ["", "stride", "index", "kind", "empty"])
def test_strided_copies_of_warp_stay_inside_an_allocation(fault):
    """Rows 0 and 2 of a view of 3 x 4 fp32, every second element of a row; real copies are Warp's own."""
    device, done = make("sm_90a"), []
    real = SimpleNamespace(wp_array_copy_host=lambda *args: done.append(args) or True)
    with active(device):
        target = device.copy(np.zeros(64, np.uint8)).ctypes.data
        rows = device.copy(np.array([0, 3 if fault == "index" else 2], np.int32)).ctypes.data
        source = device.copy(np.zeros(24, np.float32)).ctypes.data
        view = script_packages.Array(source, 0, (3, 4), (36 if fault == "stride" else 32, 8), 2, 0)
        view.shape[1] = 0 if fault == "empty" else 4
        picked = script_packages.IndexedArray(view, (rows, None), (2, view.shape[1]))
        plain = script_packages.Array(target, 0, (2, 4), (16, 4), 2, 0)
        at = [ctypes.addressof(one) for one in (plain, view if fault == "stride" else picked)]
        kinds = (0, 2 if fault == "kind" else 0 if fault == "stride" else 1)
        expected = {"stride": (MemoryFault, "over the end"), "index": (MemoryFault, "no allocation|over the end")}
        expected["kind"] = LaunchError, "kind 2"
        if fault in expected:
            with pytest.raises(expected[fault][0], match=expected[fault][1]):
                script_packages._copy_array(real, None, *at, *kinds, 4)
            assert not done
        else:
            assert script_packages._copy_array(real, None, *at, *kinds, 4) and len(done) == 1
            length = 0 if fault else 2 * 32 + 3 * 8 + 4
            assert script_packages.extent(at[1], 1, 4) == (source, length)


@pytest.mark.parametrize("installed", [True, False])
def test_the_bindings_find_the_stand_in_whoever_asks_first(monkeypatch, installed):
    bindings, kept = ModuleType("nvrtc"), []
    bindings.load_nvidia_dynamic_lib = original = lambda name: f"their {name}"
    monkeypatch.setattr(libnvrtc, "_KEPT", kept)
    monkeypatch.setattr(
        libnvrtc, "load", lambda folder: kept.append(SimpleNamespace(_handle=folder)) if installed else None
    )
    with patches() as patch:
        libnvrtc.lead(patch, bindings, "folder")
        found = bindings.load_nvidia_dynamic_lib("nvrtc")
        assert found._handle_uint == "folder" if installed else found == "their nvrtc"
    assert bindings.load_nvidia_dynamic_lib is original
