"""Scripts of CuPy, helion, Gluon and torch.compile, most with a mistake, too; the runtime inside a module."""

import ctypes
import importlib.util
import os
import struct
import sys
from collections import Counter

import pytest

pytest.importorskip("cutlass.cute")

from dsv4lib import emulator
from dsv4lib.emulator.driver import emulated_time, libcudart, static_runtime, torch_compile
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import EmulatorError, LaunchError
from dsv4lib.emulator.machine.request import LaunchResult
from dsv4lib.emulator.sanitize import command
from dsv4lib.emulator.sanitize.command import Wish
from dsv4lib.errors import ArgumentError, BackendUnavailable
from tests.cases import cases

INVALID, NOT_SUPPORTED = 1, 801


def needs(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: ./dsv4 test --corpus installs and runs this")


def sanitized(tmp_path, capfd, text, arch="sm_90a"):
    script = tmp_path / "given.py"
    site = os.environ.get("DSV4_CORPUS_SITE")  # the script's process knows the lab's packages alone
    script.write_text(f"import site; site.addsitedir({site!r}); {text}" if site else text)
    code = command.run(Wish("dsv4 sanitize", str(script), [], arch, {"checks": "sanitize"}))
    return code, *capfd.readouterr()


CUPY = """
import cupy as cp, numpy as np
module = cp.RawModule(code=r'''
extern "C" __global__ void turn(const float* x, float* y, int n) {
  __shared__ float s[128];
  int t = threadIdx.x;
  if (t < n) s[t] = x[t];
  BARRIER
  if (t < n) y[t] = s[n - 1 - t];
}''')
x, y = cp.arange(100, dtype=np.float32), cp.zeros(100, np.float32)
module.get_function("turn")((1,), (128,), (x, y, np.int32(100)))
square = cp.ElementwiseKernel("T x", "T z", "z = x * x", "square")
total = cp.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
print("out", y[:2], square(x)[3], total(x), (2 * x).reshape(10, 10).sum(axis=0)[1], cp.asnumpy(x[::50]))
ENDING
"""

CUB = (
    "for set_them in cp._core.set_reduction_accelerators, cp._core.set_routine_accelerators: set_them(['cub'])\nx.sum()"
)
PAST = "module.get_function('turn')((1,), (128,), (x[:50], y, np.int32(101)))"


@pytest.mark.parametrize(
    ("barrier", "ending", "code", "said"),
    [
        pytest.param("__syncthreads();", "", 0, "", marks=pytest.mark.full),
        ("", "", 90, "ERROR race_shared"),
        ("__syncthreads();", CUB, 91, "package's own binary"),
        pytest.param("__syncthreads();", PAST, 91, "load of", marks=pytest.mark.full),
    ],
    ids=["right", "no barrier", "a kernel of CUB", "past the end"],
)
def test_a_script_of_cupy(tmp_path, capfd, barrier, ending, code, said):
    needs("cupy")
    found, printed, error = sanitized(tmp_path, capfd, CUPY.replace("BARRIER", barrier).replace("ENDING", ending))
    assert found == code and said in error, error
    assert ("out [99. 98.] 9.0 4950.0 920.0 [ 0. 50.]" in printed) == bool(barrier)


HELION = """
import torch, helion, helion.language as hl

@helion.kernel(config=helion.Config(block_sizes=[16]), static_shapes=True)
def sums(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros([1], dtype=x.dtype, device=x.device)
    for tile in hl.tile(x.size(0)):
        ADD
    return out

x = torch.arange(100, dtype=torch.float32, device="cuda")
print("sum", sums(x).item())
"""


@pytest.mark.parametrize(
    ("add", "code"),
    cases(("out[0] = out[0] + x[tile].sum()", 90), full=[("hl.atomic_add(out, [0], x[tile].sum())", 0)]),
)
def test_a_script_of_helion(tmp_path, capfd, add, code):
    needs("helion")
    found, printed, error = sanitized(tmp_path, capfd, HELION.replace("ADD", add))
    assert found == code and ("ERROR race_global" in error) == (code == 90), error
    assert ("sum 4950.0" in printed) or code


GLUON = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

@gluon.jit
def double(x, y):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    tile = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * x.block_shape[0]
    mbarrier.expect(full, x.nbytes_per_cta)
    tma.async_load(x, [row, 0], full, tile)
    WAIT
    value = tile.load(layout)
    columns = gl.arange(0, x.block_shape[1], gl.SliceLayout(0, layout))
    rows = row + gl.arange(0, x.block_shape[0], gl.SliceLayout(1, layout))
    gl.store(y + rows[:, None] * x.block_shape[1] + columns[None, :], value * 2)

x, y = torch.arange(2048, dtype=torch.float32, device="cuda").reshape(64, 32), torch.zeros(64, 32, device="cuda")
layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
double[(2,)](TensorDescriptor.from_tensor(x, [32, 32], layout), y)
print("equal", torch.equal(y, 2 * x))
"""


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.full)])
@pytest.mark.parametrize(("wait", "code"), cases(("pass", 90), full=[("mbarrier.wait(full, 0)", 0)]))
def test_a_script_of_gluon(tmp_path, capfd, arch, wait, code):
    needs("triton")
    text = GLUON.replace("WAIT", wait)
    line = 1 + text[: text.index("tile.load")].count("\n")
    found, printed, error = sanitized(tmp_path, capfd, text, arch)
    assert found == code and ("ERROR race_shared" in error) == (code == 90), error
    assert (f"given.py:{line}" in error) == (code == 90) and ("equal True" in printed or code)


COMPILED = """
import torch
from dsv4lib.emulator.driver.device import current

@torch.compile
def f(x, y):
    z = torch.nn.functional.gelu(x + y[:, :1]) * torch.arange(70, device="cuda")
    return z.sum(1), torch.softmax(z, 1)

x, y = torch.randn(33, 70, device="cuda"), torch.randn(33, 70, device="cuda")
z = torch.nn.functional.gelu(x + y[:, :1]) * torch.arange(70)
for got, want in zip(f(x, y), (z.sum(1), torch.softmax(z, 1))):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
launches = current().launches
print("fused", len(launches), launches[0].request.kernel_name)
"""


@pytest.mark.full
def test_a_script_of_torch_compile(tmp_path, capfd, monkeypatch):
    needs("triton")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    code, printed, error = sanitized(tmp_path, capfd, COMPILED)
    assert code == 0 and "fused" in printed and "gelu" in printed and "is off" not in error, error


EAGER = """
import torch

double = torch.compile(lambda x: 2 * x)
print("out", torch.compile(double)(torch.arange(3, device="cuda")).tolist())
"""


@pytest.mark.full  # torch's compiler takes seconds to load
def test_a_script_is_told_that_torch_compile_is_off(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    code, printed, error = sanitized(tmp_path, capfd, EAGER)
    assert code == 0 and "out [0, 2, 4]" in printed, error
    assert error.count("torch.compile is off") == 1, error


@pytest.mark.parametrize(("switch", "name", "times"), [("1", "__main__", 1), ("0", "__main__", 0), ("1", "package", 0)])
def test_scripts_are_told_once_that_torch_compile_is_off_packages_never(monkeypatch, capfd, switch, name, times):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", switch)
    monkeypatch.delitem(sys.modules, "torch._dynamo.config", raising=False)
    monkeypatch.setattr(torch_compile, "_SAID", [])
    scope = {"compile": torch_compile.told(lambda function: function), "__name__": name}
    exec("assert compile(compile)(max) is max", scope)
    assert capfd.readouterr().err.count("torch.compile is off") == times


def elf(symbols):
    """An ELF file of 64 bits with nothing but sections of symbols and strings."""
    strings, table = b"\0", struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    for name, kind, section, value, size in symbols:
        table += struct.pack("<IBBHQQ", len(strings), kind, 0, section, value, size)
        strings += name.encode() + b"\0"
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, 3, 0)
    at = 64 + 3 * 64
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, at, len(table), 2, 0, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, at + len(table), len(strings), 0, 0, 1, 0)
    return header + sections + table + strings


def test_the_runtime_inside_a_module_is_found_by_its_symbols():
    known = [("cudaMalloc", 2, 1, 0x100, 64), ("cudart_helper", 2, 1, 0x200, 64), ("cudaTable", 1, 1, 0x300, 8)]
    image = elf([*known, ("cudaImported", 2, 0, 0, 0)])
    assert list(static_runtime.functions(image)) == [("cudaMalloc", 0x100, 64)]
    with pytest.raises(BackendUnavailable, match="without symbols"):
        list(static_runtime.functions(image[:60] + struct.pack("<HH", 1, 0) + image[64:]))
    with pytest.raises(BackendUnavailable, match="no ELF"):
        list(static_runtime.functions(b"MZ" + bytes(64)))


def test_another_machine_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(static_runtime.platform, "machine", lambda: "aarch64")
    with pytest.raises(BackendUnavailable, match=r"inside ctypes needs x86_64: of aarch64 no caches of instructions"):
        static_runtime.lead(ctypes, str(tmp_path))


def call(name, *args):
    return libcudart.ENTRIES[name](*args)


def out(name, *args, kind=ctypes.c_uint64):
    value = kind()
    assert call(name, ctypes.addressof(value), *args) == 0, (name, RUNTIME.refused)
    return value.value


def test_functions_of_the_runtime():
    with emulator.device("sm_90a") as gpu:
        assert out("cudaGetDeviceCount", kind=ctypes.c_int) == 1 and call("cudaSetDevice", 0) == 0
        assert out("cudaDeviceGetAttribute", 75, 0, kind=ctypes.c_int) == 9
        data, back = ctypes.create_string_buffer(bytes(range(64)), 64), ctypes.create_string_buffer(64)
        there = out("cudaMalloc", 64)
        assert call("cudaMemcpyAsync", there, ctypes.addressof(data), 64, libcudart.HOST_TO_DEVICE, 0) == 0
        assert call("cudaMemset", there + 60, 0x1FF, 4) == 0
        assert call("cudaMemcpy2D", ctypes.addressof(back), 8, there, 16, 8, 4, libcudart.DEVICE_TO_HOST) == 0
        assert back.raw[:32] == b"".join(bytes(range(i, i + 8)) for i in (0, 16, 32, 48))
        assert gpu.gmem.view(there, 64)[59:].tolist() == [59, 255, 255, 255, 255]
        for pitches in ((7, 16), (8, 7)):
            assert call("cudaMemcpy2D", ctypes.addressof(back), pitches[0], there, pitches[1], 8, 4, 2) == INVALID
            assert "pitch" in str(RUNTIME.refused) and "at least the width, 8" in str(RUNTIME.refused)
            RUNTIME.refused = None
        kinds = [libcudart.PointerAttributes() for _ in range(4)]
        pinned = out("cudaHostAlloc", 16, 0)
        for made, address in zip(kinds, (there, pinned, pinned + 15, ctypes.addressof(data)), strict=True):
            assert call("cudaPointerGetAttributes", ctypes.addressof(made), address) == 0
        assert [made.type for made in kinds] == [libcudart.DEVICE_MEMORY, *[libcudart.HOST_MEMORY] * 2, 0]
        for target, count in ((there, 65), (ctypes.addressof(back), 8)):  # past the end; no device memory
            assert call("cudaMemcpy", target, ctypes.addressof(data), count, libcudart.HOST_TO_DEVICE) != 0
            RUNTIME.refused = None
        assert call("cudaPeekAtLastError") == call("cudaGetLastError") != call("cudaGetLastError") == 0
        assert call("cudaMemcpy", there, there, 8, 9) == INVALID and "cudaMemcpyKind" in str(RUNTIME.refused)
        assert ctypes.string_at(call("cudaGetErrorName", INVALID)) == b"cudaErrorInvalidValue"
        assert call("cudaFree", there) == 0 and call("cudaFree", there) == INVALID
        RUNTIME.refused = None


def test_a_failure_is_not_remembered_beyond_its_device():
    with emulator.device("sm_90a"):
        assert call("cudaFree", 64) == call("cudaPeekAtLastError") == INVALID
        RUNTIME.refused = None
    with emulator.device("sm_90a"):
        assert call("cudaGetLastError") == 0


@pytest.mark.parametrize("name", [b"0000:zz:00.0", b"", b"0:1:2:3", b"0000:-1:00.0", b"0000:00:00.0", b"0000:02:00.0"])
def test_a_device_is_found_by_its_address_on_the_bus(name):
    with emulator.device("sm_90a"):
        assert out("cudaDeviceGetByPCIBusId", b"0000:01:00.0", kind=ctypes.c_int) == 0
        found = ctypes.c_int(7)
        assert call("cudaDeviceGetByPCIBusId", ctypes.addressof(found), name) != 0 and found.value == 7
        assert isinstance(RUNTIME.refused, ArgumentError | LaunchError), RUNTIME.refused
        RUNTIME.refused = None


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [("cudaLaunchKernel", EmulatorError, "own binary"), ("cudaMalloc3DArray", LaunchError, "no cudaMalloc3DArray")],
)
def test_what_the_runtime_does_not_have_is_refused_by_name(name, kind, said):
    with emulator.device("sm_90a"):
        assert libcudart.refused(name)() == NOT_SUPPORTED
        assert type(RUNTIME.refused) is kind and said in str(RUNTIME.refused)
        RUNTIME.refused = None
    assert call("cudaMalloc", 0, 8) != 0  # without a device


def test_emulated_time_keeps_order():
    def time(instructions=1000, sms=4, resident=1, **stats):
        stats = Counter({"ctas": 8, "warps": 32, **stats})
        return emulated_time.milliseconds(LaunchResult(instructions, 0.0, 0, 0, stats, []), sms, resident)

    assert time() == time() < time(2000)
    assert time(resident=2) < time() and time(sms=8) < time()
    assert time() < time(tma_read_bytes=1000) < time(global_sectors=1000) and time() < time(mma_flops=1 << 16)
    assert time(0) == pytest.approx(emulated_time.LAUNCH_MS)
