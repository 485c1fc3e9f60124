"""The calls of libcuda, against a library of the same functions whose GPU is the emulator."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from dsv4lib.lab.day_one import forms, gpu, worker
from dsv4lib.lab.day_one.probe import POISON, THREADS, Emulated

PROBES = {probe.name: probe for probe in forms.probes()}
NAMES = ("shift.lane32", "cp.4x256b.pair", "wgmma.f16-f16-f32.n64.128B")


class Library:
    """Functions of libcuda as `gpu.Driver` calls them; `refuses` names one that answers an error."""

    def __init__(self, capability: tuple[int, int] = (10, 0), refuses: str = ""):
        self.capability, self.refuses = capability, refuses
        self.memory: dict[int, Any] = {}
        self.launched: list[tuple[int, ...]] = []
        self.ptx, self.code = "", 218

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            if name == self.refuses:
                if name == "cuModuleLoadDataEx":
                    ctypes.memmove(args[4][0], b"ptxas says no\0", 14)
                return self.code
            getattr(self, f"do_{name}", lambda *args: None)(*args)
            return 0

        return call

    def do_cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = f"CUDA_ERROR_{code}".encode()

    def do_cuDeviceGetName(self, name: Any, size: int, device: Any) -> None:
        name.value = b"NVIDIA B200"[: size - 1]

    def do_cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 13010

    def do_cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:
        value._obj.value = self.capability[{75: 0, 76: 1}[attribute]]

    def do_cuModuleLoadDataEx(self, module: Any, ptx: bytes, count: int, options: Any, values: Any) -> None:
        assert ptx.endswith(b"\0") and list(options) == [5, 6] and values[1] == gpu.LOG
        self.ptx = ptx[:-1].decode()

    def do_cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> None:
        assert name == b"k"

    def do_cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> None:
        buffer = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(buffer)
        self.memory[address._obj.value] = buffer

    def do_cuMemFree_v2(self, address: ctypes.c_uint64) -> None:
        del self.memory[address.value]

    def do_cuMemcpyHtoD_v2(self, to: ctypes.c_uint64, source: ctypes.c_void_p, size: ctypes.c_size_t) -> None:
        ctypes.memmove(to.value, source.value, size.value)

    def do_cuMemcpyDtoH_v2(self, to: ctypes.c_void_p, source: ctypes.c_uint64, size: ctypes.c_size_t) -> None:
        ctypes.memmove(to.value, source.value, size.value)

    def do_cuLaunchKernel(self, function: Any, *args: Any) -> None:
        probe = next(probe for probe in PROBES.values() if probe.ptx == self.ptx)
        image, out = (ctypes.cast(args[8][i], ctypes.POINTER(ctypes.c_uint64))[0] for i in (0, 1))
        assert bytes(self.memory[image].raw) == probe.image.tobytes()
        assert set(self.memory[out].raw) == {POISON}
        ctypes.memmove(out, Emulated(probe).out, probe.out_bytes)
        self.launched.append(args[:7])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(gpu, "load", lambda: made)
    return made


def test_the_gpu_is_described(library: Library) -> None:
    assert gpu.find() == gpu.Gpu("NVIDIA B200", (10, 0), "13.1")
    assert gpu.find().arch == "sm_100a"
    library.capability = (12, 0)
    assert gpu.find().arch is None


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1")

    monkeypatch.setattr(gpu, "load", missing)
    assert gpu.find() is None
    with pytest.raises(gpu.GpuError, match="libcuda"):
        gpu.Driver()


def test_a_driver_without_a_gpu_is_none(library: Library) -> None:
    library.refuses = "cuInit"
    assert gpu.find() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_is_launched_with_its_inputs(name: str, library: Library) -> None:
    driver, probe = gpu.Driver(), PROBES[name]
    driver.open()
    assert driver.run(probe) == Emulated(probe).out
    assert library.launched == [(probe.ctas, 1, 1, THREADS, 1, 1, 0)]
    assert library.memory == {}


FAILING = {
    "cuModuleLoadDataEx": worker.REFUSED,
    "cuModuleGetFunction": worker.REFUSED,
    "cuLaunchKernel": worker.REFUSED,
    "cuCtxSynchronize": worker.CRASHED,
    "cuMemcpyDtoH_v2": worker.CRASHED,
}


@pytest.mark.parametrize("refuses", FAILING)
def test_a_failure_is_a_result_with_the_drivers_words(refuses: str, library: Library, tmp_path: Any) -> None:
    library.refuses = refuses
    worker.run(tmp_path, ["shift.lane32", "shift.lane0"], gpu.Driver())
    found = (tmp_path / "shift.lane32.json").read_text()
    assert f'"{FAILING[refuses]}"' in found and f"{refuses}: CUDA_ERROR_218 (218)" in found
    assert ("ptxas says no" in found) == (refuses == "cuModuleLoadDataEx")
    assert not (tmp_path / "shift.lane0.json").exists(), "after an error the context is not used again"


@pytest.mark.parametrize(
    ("refuses", "code"), [("cuMemAlloc_v2", 2), ("cuMemcpyHtoD_v2", 218), ("cuModuleLoadDataEx", 2)]
)
def test_a_failure_of_the_machine_blames_no_probe(refuses: str, code: int, library: Library, tmp_path: Any) -> None:
    library.refuses, library.code = refuses, code
    with pytest.raises(gpu.GpuError, match=f"{refuses}.*{code}"):
        worker.run(tmp_path, ["shift.lane32"], gpu.Driver())
    assert not (tmp_path / "shift.lane32.json").exists()
    assert worker.starts(worker.started(tmp_path, "shift.lane32"), PROBES["shift.lane32"].digest) == 0


def test_a_worker_writes_what_the_gpu_gave(library: Library, tmp_path: Any) -> None:
    worker.run(tmp_path, ["shift.lane32"], gpu.Driver())
    probe = PROBES["shift.lane32"]
    with np.load(tmp_path / "shift.lane32.npz") as found:
        assert (found["changed"] ^ worker.unchanged(probe)).tobytes() == Emulated(probe).out
    assert worker.starts(worker.started(tmp_path, probe.name), probe.digest) == 1
