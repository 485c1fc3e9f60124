"""Kernels in CUDA C++ are compiled once, kept on disk, launched by the driver and in the emulator."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4lib import emulator, nvrtc
from dsv4lib.dsl import cpp as dsl_cpp
from dsv4lib.dsl.cpp import CppKernel, Float32, Int32
from dsv4lib.emulator.driver import binary
from dsv4lib.errors import ArgumentError
from dsv4lib.nvrtc import Output
from dsv4lib.ops.common import cpp, cpp_native
from dsv4lib.ops.common.native import LaunchFailed

SOURCE = """#include "dsv4.cuh"
extern "C" __global__ void scale(const float* x, float* y, int n, float factor) {
  extern __shared__ float buffer[];
  const int i = blockIdx.x * THREADS + threadIdx.x;
  wait_for_predecessor();
  launch_successor();
  if (i < n) buffer[threadIdx.x] = x[i];
  __syncthreads();
  if (i < n) y[i] = factor * buffer[threadIdx.x];
}
"""


class Scale(NamedTuple):
    x: Tensor
    y: Tensor
    n: Int32
    factor: Float32


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    (tmp_path / "scale.cu").write_text(SOURCE)
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "cache"))
    cpp.clear()
    yield CppKernel(tmp_path / "scale.cu", "scale", Scale, 64, smem_bytes=64 << 10)
    cpp.clear()


@pytest.fixture
def compilations(monkeypatch):
    done = []
    monkeypatch.setattr(cpp, "compile_cpp", lambda *args: done.append(args) or dsl_cpp.compile_cpp(*args))
    return done


def test_a_kernel_is_compiled_once_and_kept_on_disk(kernel, compilations, tmp_path):
    first = cpp.compiled(kernel, "sm_90a")
    assert cpp.compiled(kernel, "sm_90a") is first and len(compilations) == 1
    cpp.clear()
    again = cpp.compiled(kernel, "sm_90a")
    assert len(compilations) == 1 and (again.ptx, again.cubin) == (first.ptx, first.cubin)
    assert (again.registers, again.threads) == (first.registers, 64) and again.seconds == 0.0
    (path,) = (tmp_path / "cache").glob("*.kernel")
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_changes_the_code_changes_the_key(kernel, monkeypatch):
    same = cpp.key(kernel, "sm_90a")
    keys = {same, cpp.key(kernel, "sm_100a"), cpp.key(CppKernel(**{**vars(kernel), "threads": 32}), "sm_90a")}
    monkeypatch.setattr(cpp, "_nvrtc", lambda: "99.0")
    keys.add(cpp.key(kernel, "sm_90a"))
    monkeypatch.undo()
    monkeypatch.setattr(cpp, "headers", lambda kernel: [])
    keys.add(cpp.key(kernel, "sm_90a"))
    monkeypatch.undo()
    assert cpp.key(kernel, "sm_90a") == same and len(keys) == 5
    for text in (SOURCE.replace("factor *", "2 * factor *"), '#include "beside.cuh"\n' + SOURCE):
        kernel.source.write_text(text)
        assert cpp.key(kernel, "sm_90a") not in keys
        keys.add(cpp.key(kernel, "sm_90a"))
    for text in ("// one\n", '#include "next.cuh"\n'):
        (kernel.source.parent / "beside.cuh").write_text(text)
        (kernel.source.parent / "next.cuh").write_text(text)
        assert cpp.key(kernel, "sm_90a") not in keys
        keys.add(cpp.key(kernel, "sm_90a"))


def test_the_key_knows_the_headers_of_cuda_and_the_build(kernel):
    names = {path.name for path in dsl_cpp.headers(kernel)}
    assert {"dsv4.cuh", "cuda_bf16.h", "cuda_bf16.hpp"} <= names
    assert cpp._nvrtc().startswith(nvrtc.version()) and "libnvrtc-builtins.so" in cpp._nvrtc()


def test_a_source_or_header_that_is_edited_is_compiled_again(kernel, compilations):
    beside = kernel.source.parent / "beside.cuh"
    beside.write_text("#define FACTOR factor\n")
    kernel.source.write_text('#include "beside.cuh"\n' + SOURCE.replace("factor *", "FACTOR *"))
    x, y = torch.arange(100.0), torch.zeros(100)
    for text, factor in (("", 3), ("#define FACTOR (10.0f + factor)\n", 13)):
        beside.write_text(text or beside.read_text())
        for _ in range(2):
            cpp.launch("emulator", kernel, cpp.Grid(2), Scale(x, y, 100, 3.0))
        assert torch.equal(y, factor * x)
    kernel.source.write_text(kernel.source.read_text().replace("FACTOR *", "-FACTOR *"))
    cpp.launch("emulator", kernel, cpp.Grid(2), Scale(x, y, 100, 3.0))
    assert torch.equal(y, -13 * x) and len(compilations) == 3


def test_a_damaged_file_is_compiled_again(kernel, compilations, tmp_path):
    cpp.compiled(kernel, "sm_90a")
    (path,) = (tmp_path / "cache").glob("*.kernel")
    data = path.read_bytes()
    for bad in (data[:-1], data[:200] + b"x" + data[201:], b"something else"):
        path.write_bytes(bad)
        cpp.clear()
        cpp.compiled(kernel, "sm_90a")
        assert path.read_bytes() == data
    assert len(compilations) == 4
    assert cpp.from_bytes(cpp.to_bytes(Output("ptx", b"cubin"))) == ("ptx", b"cubin")


def test_nothing_is_stored_without_a_folder(kernel, compilations, tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_CACHE", "off")
    cpp.compiled(kernel, "sm_90a")
    assert len(compilations) == 1 and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_the_driver_gets_what_the_emulator_gets(kernel, arch):
    """The native path, on the emulator's CUDA driver: load, shared memory above 48 KiB, parameters, overlap."""
    x = torch.arange(100.0)
    code = cpp.compiled(kernel, arch)
    binary.remember(code.cubin, code.ptx)
    with emulator.device(arch, checks="race", default_device="cpu") as gpu:
        cpp_native._loaded.cache_clear()
        y, z = torch.zeros(2, 100)
        for target in (y, z):
            call = Scale(x, target, 100, 3.0)
            block = dsl_cpp.pack(kernel, call)
            gpu.memory.tensor(x), gpu.memory.tensor(target)
            cpp_native.launch(code, kernel, cpp.Grid(2), block, 0, torch.device("cpu"))
        cpp_native._loaded.cache_clear()
    assert torch.equal(y, 3 * x) and torch.equal(z, y) and not gpu.hazards
    for one in gpu.launches:
        request = one.request
        assert (request.grid, request.block, request.dynamic_smem) == ((2, 1, 1), (64, 1, 1), 64 << 10)
        assert request.attributes.get("programmatic")


def test_errors_of_the_driver_are_raised():
    class Code(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    with pytest.raises(LaunchFailed, match="CUDA error 1: CUDA_ERROR_INVALID_VALUE"):
        cpp_native._done((Code(1), None))


def test_launches_in_the_emulator(kernel):
    x, y = torch.arange(100.0), torch.zeros(100)
    cpp.launch("emulator", kernel, cpp.Grid(2), Scale(x, y, 100, 3.0))
    assert torch.equal(y, 3 * x)
    broken = CppKernel(**{**vars(kernel), "edits": (dsl_cpp.Edit("  __syncthreads();\n", ""), dsl_cpp.Edit(
        "factor * buffer[threadIdx.x]", "factor * buffer[threadIdx.x ^ 32]"))})  # fmt: skip
    with emulator.device("sm_100a", checks="race", shims=False), pytest.warns(UserWarning, match="hazards"):
        cpp.launch("emulator", broken, cpp.Grid(2), Scale(x, y, 100, 3.0))


def test_launches_of_a_script_and_its_graph(kernel):
    """Tensors say that they are on a GPU; a graph launches what it has captured when it is replayed."""
    with emulator.device("sm_100a", checks="race") as gpu:
        x, y = torch.arange(100.0, device="cuda"), torch.zeros(100, device="cuda")
        graph, call = torch.cuda.CUDAGraph(), Scale(x, y, 100, 3.0)
        backend = cpp.resolve("auto", "x", x)
        with torch.cuda.graph(graph):
            cpp.launch(backend, kernel, cpp.Grid(2), call)
        assert x.is_cuda and backend == "emulator" and not y.any() and not gpu.launches
        graph.replay()
        assert torch.equal(y, 3 * x) and len(gpu.launches) == 1
        cpp.launch(backend, kernel, cpp.Grid(2), call._replace(factor=2.0))
        assert torch.equal(y, 2 * x)


def test_back_ends_that_run_no_kernel_are_refused():
    assert cpp.resolve("emulator", "x", torch.zeros(1)) == "emulator"
    for name in ("reference", "gpu"):
        with pytest.raises(ArgumentError, match="backend"):
            cpp.resolve(name, "x", torch.zeros(1))


def test_the_wheel_has_the_sources():
    """Sources and headers are data of the package: `package_data` must name every kind there is."""
    import tomllib

    root = Path(__file__).resolve().parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    found = {path for kind in ("*.cu", "*.cuh") for path in (root / "dsv4lib").rglob(kind)}
    named = {
        path
        for package, patterns in data.items()
        for folder in ([root / "dsv4lib"] if package == "*" else [root / package.replace(".", "/")])
        for pattern in patterns
        for path in (folder.rglob(pattern) if package == "*" else folder.glob(pattern))
    }
    assert len(found) >= 2 and found <= named
