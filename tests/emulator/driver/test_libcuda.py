"""The driver library: its functions one by one, the file that exports them, and scripts of compiled packages."""

import ctypes
import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cutlass.cute")

from dsv4lib import emulator, nvrtc
from dsv4lib.emulator.driver import (
    cubin,
    emulated_time,
    libcuda,
    libcuda_calls,
    libcuda_contexts,
    libcuda_modules,  # noqa: F401
    script_packages,
    shared_object,
)
from dsv4lib.emulator.driver.modules import CONTEXT
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import LaunchError, MemoryFault
from dsv4lib.emulator.sanitize import command
from dsv4lib.emulator.sanitize.command import Wish
from dsv4lib.errors import BackendUnavailable
from tests.emulator.driver.test_driver_api import COUNT, NAME, SHIFT
from tests.emulator.gpu.test_gpu import SCALE

ROOT = Path(__file__).resolve().parents[3]
INVALID, INVALID_PTX, NOT_FOUND, FAILED, NO_DEVICE, INVALID_CONTEXT = 1, 218, 500, 719, 100, 201


@pytest.fixture
def gpu():
    with emulator.device("sm_90a") as device:
        yield device


def call(name, *args, status=0):
    assert libcuda.ENTRIES[name](*args) == status, (name, RUNTIME.refused)


def out(name, *args, kind=ctypes.c_uint64):
    """Call a function whose first parameter is where the result goes."""
    value = kind()
    call(name, ctypes.addressof(value), *args)
    return value.value


def allocated(array):
    address = out("cuMemAlloc", array.nbytes)
    call("cuMemcpyHtoD", address, array.ctypes.data, array.nbytes)
    return address


def read(address, like):
    found = np.empty_like(like)
    call("cuMemcpyDtoHAsync", found.ctypes.data, address, found.nbytes, 0)
    return found


def params(*values):
    """The array of pointers to parameters, and what keeps it alive."""
    array = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    return ctypes.addressof(array), (array, values)


def scale_args(x, y, n=500):
    return params(ctypes.c_uint64(x), ctypes.c_uint64(y), ctypes.c_float(3), ctypes.c_uint32(n))


def loaded(text=SCALE, name=NAME):
    image = ctypes.create_string_buffer(text.encode())
    library = out("cuLibraryLoadData", ctypes.addressof(image), None, None, 0, None, None, 0)
    return library, out("cuLibraryGetKernel", library, name)


def test_kernels_are_loaded_and_launched_in_each_way(gpu):
    x = np.arange(500, dtype=np.float32)
    library, kernel = loaded()
    assert out("cuLibraryGetKernelCount", library, kind=ctypes.c_uint32) == 1
    address, keep = scale_args(*(there := (allocated(x), allocated(np.zeros_like(x)))))
    call("cuLaunchKernel", kernel, 4, 1, 1, 128, 1, 1, 0, 2, address, None)
    assert np.array_equal(read(there[1], x), 3 * x)
    call("cuMemsetD8", there[1], 0xFF, x.nbytes)
    call("cuLaunchCooperativeKernel", kernel, 4, 1, 1, 128, 1, 1, 0, None, address)
    assert np.array_equal(read(there[1], x), 3 * x) and gpu.launches[-1].request.attributes["cooperative"]
    # CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, their number.
    cluster = struct.pack("<iI3I52x", 4, 0, 2, 1, 1)
    attribute = ctypes.create_string_buffer(cluster, 72)
    settings = struct.pack("<7I4xQQI4x", 4, 1, 1, 128, 1, 1, 0, 0, ctypes.addressof(attribute), 1)
    call("cuMemsetD32Async", there[1], 1, x.size, 0)
    buffer = ctypes.create_string_buffer(settings, 56)
    call("cuLaunchKernelEx", ctypes.addressof(buffer), kernel, address, None)
    assert np.array_equal(read(there[1], x), 3 * x) and gpu.launches[-1].request.cluster == (2, 1, 1)
    call("cuLibraryUnload", library)
    call("cuLaunchKernel", kernel, 4, 1, 1, 128, 1, 1, 0, 0, address, None, status=INVALID)
    del keep, attribute


def test_what_a_kernel_is(gpu):
    _, kernel = loaded()
    places = []
    for i in range(4):
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuKernelGetParamInfo", kernel, i, ctypes.addressof(offset), ctypes.addressof(size))
        places.append((offset.value, size.value))
    assert places == [(0, 8), (8, 8), (16, 4), (20, 4)]
    call("cuKernelGetParamInfo", kernel, 4, None, None, status=INVALID)
    assert ctypes.string_at(out("cuKernelGetName", kernel)) == NAME
    assert out("cuFuncGetAttribute", 0, kernel, kind=ctypes.c_int) == 1024
    assert out("cuFuncGetAttribute", 4, kernel, kind=ctypes.c_int) == 0  # PTX: no assembler counted registers
    call("cuFuncSetAttribute", kernel, 8, 100_000)
    assert out("cuKernelGetAttribute", 8, kernel, 0, kind=ctypes.c_int) == 100_000
    call("cuFuncGetAttribute", ctypes.addressof(ctypes.c_int()), 99, kernel, status=INVALID)
    assert out("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel, 1024, 0, kind=ctypes.c_int) == 2
    least, block = ctypes.c_int(), ctypes.c_int()
    call("cuOccupancyMaxPotentialBlockSize", ctypes.addressof(least), ctypes.addressof(block), kernel, None, 0, 256)
    assert (block.value, least.value) == (256, 8 * gpu.settings.sm_count)


def test_variables_and_names_that_are_not_there(gpu):
    library, _ = loaded(COUNT, b"add")
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    pointers = ctypes.addressof(address), ctypes.addressof(size)
    call("cuLibraryGetGlobal", *pointers, library, b"count")
    assert read(address.value, np.zeros(size.value // 4, np.uint32)).tolist() == [5]
    call("cuLibraryGetGlobal", *pointers, library, b"counts", status=NOT_FOUND)
    call("cuModuleGetFunction", pointers[0], library, b"adds", status=NOT_FOUND)
    text = ctypes.create_string_buffer(b"no PTX at all")
    call("cuModuleLoadData", pointers[0], ctypes.addressof(text), status=INVALID_PTX)


def test_memory(gpu):
    x = np.arange(16, dtype=np.uint16)
    a, b = allocated(x), out("cuMemAllocFromPoolAsync", x.nbytes, libcuda_calls.POOL, 0)
    call("cuMemcpyDtoD", b, a, x.nbytes)
    assert np.array_equal(read(b, x), x)
    call("cuMemsetD16", b, 7, 3)
    call("cuMemsetD2D8", b + 16, 8, 1, 2, 2)  # 2 rows of 2 bytes, 8 bytes apart
    assert read(b, x).tolist() == [7, 7, 7, *range(3, 8), 0x0101, 9, 10, 11, 0x0101, 13, 14, 15]
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    call("cuMemGetAddressRange", ctypes.addressof(start), ctypes.addressof(size), b + 4)
    assert (start.value, size.value) == (b, x.nbytes)
    assert out("cuPointerGetAttribute", 2, b, kind=ctypes.c_uint32) == 2  # memory of a device
    call("cuPointerGetAttribute", ctypes.addressof(size), 2, x.ctypes.data, status=INVALID)
    numbers, kind, ordinal = (ctypes.c_int * 2)(2, 9), ctypes.c_uint32(5), ctypes.c_int(5)
    places = (ctypes.c_void_p * 2)(ctypes.addressof(kind), ctypes.addressof(ordinal))
    call("cuPointerGetAttributes", 2, ctypes.addressof(numbers), ctypes.addressof(places), x.ctypes.data)
    assert (kind.value, ordinal.value) == (0, -2)
    pinned = out("cuMemHostAlloc", 64, 0)
    assert out("cuMemHostGetDevicePointer", pinned, 0) == pinned
    call("cuMemFreeHost", pinned)
    call("cuMemFreeHost", pinned, status=INVALID)
    call("cuMemFreeAsync", b, 0)
    call("cuMemFree", b, status=INVALID)


@pytest.mark.parametrize(
    "name", ["cuMemcpy", "cuMemcpyAsync", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemsetD8"]
)
def test_host_functions_that_leave_an_allocation_are_stopped(gpu, name):
    x = np.zeros(64, np.uint8)
    there, other = allocated(x), allocated(np.zeros(128, np.uint8))
    args = {
        "cuMemcpy": (x.ctypes.data, there, 65),
        "cuMemcpyAsync": (there, np.zeros(65, np.uint8).ctypes.data, 65, 0),
        "cuMemcpyHtoD": (there, x.ctypes.data, 65),
        "cuMemcpyDtoH": (x.ctypes.data, there, 65),
        "cuMemcpyDtoD": (other, there, 65),
        "cuMemsetD8": (there, 0, 65),
    }
    call(name, *args[name], status=FAILED)
    assert isinstance(RUNTIME.refused, MemoryFault)
    call("cuMemAlloc", ctypes.addressof(ctypes.c_uint64()), 64, status=FAILED)  # nothing works any more
    call("cuMemFree", there)
    RUNTIME.refused = None


def test_devices_and_contexts(gpu):
    assert out("cuDeviceGetCount", kind=ctypes.c_int) == 1
    name = ctypes.create_string_buffer(12)
    call("cuDeviceGetName", ctypes.addressof(name), 12, 0)
    assert name.value == b"NVIDIA H200"
    assert out("cuDeviceGetAttribute", 75, 0, kind=ctypes.c_int) == 9
    assert out("cuDeviceGetAttribute", 102, 0, kind=ctypes.c_int) == 0  # a feature: no
    call("cuDeviceGetAttribute", ctypes.addressof(ctypes.c_int()), 21, 0, status=INVALID)  # a limit: not known
    call("cuDeviceGet", ctypes.addressof(ctypes.c_int()), 1, status=INVALID)
    status = ctypes.c_void_p()
    call("cuGetErrorName", FAILED, ctypes.addressof(status))
    assert ctypes.string_at(status.value) == b"CUDA_ERROR_LAUNCH_FAILED"


def test_a_current_context_outlives_an_emulator(monkeypatch):
    """numba makes it current once in a process, whichever emulated GPU is there by then."""
    monkeypatch.setattr(libcuda_contexts, "_STACK", [])
    for first in (True, False):
        with emulator.devices(2, "sm_90a") as gpus, libcuda_contexts.fresh():
            context = out("cuDevicePrimaryCtxRetain", 0)
            assert out("cuCtxGetCurrent") == (0 if first else context) and RUNTIME.device() is gpus[0]
            call("cuCtxPushCurrent", out("cuDevicePrimaryCtxRetain", 1) if first else context)


def test_contexts_are_a_stack(monkeypatch):
    monkeypatch.setattr(libcuda_contexts, "_STACK", [])
    with emulator.devices(3, "sm_90a") as gpus:
        with libcuda_contexts.fresh():
            call("cuCtxPopCurrent", None, status=INVALID_CONTEXT)
            contexts = [out("cuDevicePrimaryCtxRetain", i) for i in range(3)]
            call("cuCtxSetCurrent", contexts[2])
            call("cuCtxPushCurrent", contexts[1])
            assert out("cuCtxCreate", 0, 0) == out("cuCtxGetCurrent") == contexts[0]
            call("cuCtxDestroy", contexts[0])
            assert out("cuCtxGetDevice", kind=ctypes.c_int) == RUNTIME.device().index == 1
            assert out("cuCtxPopCurrent") == contexts[1]
            assert out("cuCtxGetCurrent") == contexts[2] and RUNTIME.device() is gpus[2]
            call("cuCtxSetCurrent", contexts[0])  # in its place
            assert out("cuCtxPopCurrent") == contexts[0] and out("cuCtxGetCurrent") == 0
            call("cuCtxSetCurrent", contexts[2])
            call("cuCtxSetCurrent", None)
            assert out("cuCtxGetCurrent") == 0
            call("cuCtxPushCurrent", contexts[1])
        assert out("cuCtxGetCurrent") == contexts[0]
    RUNTIME.refused = None


def test_functions_have_the_parameters_of_their_version(gpu):
    for version, name in ((11000, "_v2"), (11040, "_v3"), (12049, "_v3"), (13000, "_v4")):
        assert libcuda.served("cuCtxCreate", version) == libcuda.served(f"cuCtxCreate{name}") == f"cuCtxCreate{name}"
    assert libcuda.served("cuCtxCreate_v9") is None
    assert libcuda.served("cuMemAlloc_v2") == libcuda.served("cuMemAlloc_ptsz", 12000) == "cuMemAlloc"
    assert libcuda.served("cuStreamGetCtx", 12040) == "cuStreamGetCtx" == libcuda.served("cuStreamGetCtx_ptsz")
    for name, middle in (("", (7,)), ("_v2", (7,)), ("_v3", (None, 0, 7)), ("_v4", (None, 7))):
        assert out(f"cuCtxCreate{name}", *middle, 0) == CONTEXT
        call(f"cuCtxCreate{name}", None, *middle, 1, status=INVALID)  # no such device
    assert out("cuCtxGetDevice_v2", CONTEXT, kind=ctypes.c_int) == 0
    context, green = ctypes.c_uint64(), ctypes.c_uint64(5)
    call("cuStreamGetCtx_v2", 0, ctypes.addressof(context), ctypes.addressof(green))
    assert (context.value, green.value) == (CONTEXT, 0)


def test_what_does_not_exist_is_refused_and_stops_nothing(gpu):
    buffer = ctypes.create_string_buffer(16)
    room = ctypes.addressof(buffer)
    call("cuDeviceGetUuid", room, -1, status=INVALID)
    call("cuDeviceGetAttribute", room, 102, 1, status=INVALID)
    call("cuDeviceGetName", room, 0, 0, status=INVALID)
    call("cuLinkAddData", 5, 1, room, 1, b"", 0, None, None, status=INVALID)
    call("cuLinkComplete", 5, room, None, status=INVALID)
    call("cuLaunchKernel", None, 1, 1, 1, 1, 1, 1, 0, None, None, None, status=INVALID)
    call("cuEventRecord", None, None, status=INVALID)
    call("cuModuleGetFunction", room, None, b"\xff", status=INVALID)
    call("cuMemcpy", 0, room, 4, status=INVALID)
    call("cuEventDestroy", None)
    assert out("cuMemAlloc", 64)


def test_memory_of_a_device_that_is_not_the_current_one():
    x = np.arange(16, dtype=np.float32)
    with emulator.devices(2, "sm_90a") as gpus:
        here = allocated(x)
        with gpus.on(1):
            there = allocated(2 * x)
        assert np.array_equal(read(there, x), 2 * x)
        call("cuMemcpyDtoD", here, there, 32)
        call("cuMemsetD8", there, 0, 4)
        assert read(here, x)[:9].tolist() == [*range(0, 16, 2), 8] and read(there, x)[0] == 0
        shared = gpus.symmetric(4)
        for address, device in ((here, 0), (there, 1), (shared[0].ctypes.data, 0), (shared[1].ctypes.data, 1)):
            assert out("cuPointerGetAttribute", 9, address, kind=ctypes.c_int) == device
            assert out("cuPointerGetAttribute", 1, address) == CONTEXT + device
        call("cuMemcpyDtoH", x.ctypes.data, there + 4, 64, status=FAILED)
        assert "runs 4 bytes over the end" in str(RUNTIME.refused)
        RUNTIME.refused = None


def test_streams_and_events(gpu):
    stream, start, end = out("cuStreamCreate", 0), out("cuEventCreate", 0), out("cuEventCreate", 0)
    call("cuEventRecord", start, stream)
    call("cuEventRecord", end, stream)
    call("cuStreamWaitEvent", stream, end, 0)
    assert out("cuEventElapsedTime", start, end, kind=ctypes.c_float) == pytest.approx(emulated_time.EVENT_MS)
    call("cuEventDestroy", start)
    call("cuEventRecord", start, stream, status=INVALID)
    seen = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    call("cuLaunchHostFunc", stream, ctypes.cast(function, ctypes.c_void_p), 7)
    call("cuStreamSynchronize", stream)
    assert seen == [7] and libcuda.queue(1) == libcuda.queue(2) == libcuda.queue(None) == 0


def test_linking_hands_one_file_of_ptx_through(gpu):
    image = SCALE.encode()
    buffer = ctypes.create_string_buffer(image)
    state, size = ctypes.c_uint64(), ctypes.c_size_t()
    for count, status in ((1, 0), (2, INVALID)):
        call("cuLinkCreate", 0, None, None, ctypes.addressof(state))
        for _ in range(count):
            call("cuLinkAddData", state.value, 1, ctypes.addressof(buffer), len(image), b"", 0, None, None)
        found = ctypes.c_uint64()
        call("cuLinkComplete", state.value, ctypes.addressof(found), ctypes.addressof(size), status=status)
        if not status:
            assert ctypes.string_at(found.value, size.value) == image + b"\0"
            out("cuModuleLoadData", found.value)
        call("cuLinkDestroy", state.value)
    assert "links one file of PTX, not 2" in str(RUNTIME.refused)
    call("cuLinkCreate", 0, None, None, ctypes.addressof(state))
    call("cuLinkAddData", state.value, 0, 0, 0, b"", 0, None, None, status=INVALID)
    RUNTIME.refused = None


def test_without_a_device_only_what_releases_succeeds():
    assert not RUNTIME.devices
    call("cuMemAlloc", ctypes.addressof(ctypes.c_uint64()), 64, status=NO_DEVICE)
    call("cuMemFree", 4096)
    call("cuModuleUnload", 4096)


def test_the_library_jumps_through_its_table(tmp_path):
    names = ["first", "second", "third"]
    library = shared_object.load("libdsv4-test.so.3", names, str(tmp_path))
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_double)
    made = {"first": function(lambda a, b: int(a + b)), "second": function(lambda a, b: int(a * b))}
    zero = shared_object.address_of(library, shared_object.ZERO)
    where = {name: ctypes.cast(made[name], ctypes.c_void_p).value for name in made} | {"third": zero}
    shared_object.fill(library, names, where)
    again = ctypes.CDLL("libdsv4-test.so.3")  # by its name alone, as packages load a driver
    for name in names:
        getattr(again, name).argtypes = [ctypes.c_int, ctypes.c_double]
    assert [getattr(again, name)(5, 4.0) for name in names] == [9, 20, 0]
    assert not hasattr(again, "fourth")
    with pytest.raises(BackendUnavailable, match="loaded in this process already"):
        shared_object.load("libdsv4-test.so.3", names, str(tmp_path))


def test_the_library_for_the_other_machine():
    """Of AArch64 only the bytes can be looked at: `ldr x16, slot; br x16`, and the slot it names."""
    image = shared_object.image("lib.so", ["first", "second"], "aarch64")
    assert struct.unpack_from("<H", image, 18) == (183,)
    symbols = 0x40 + 4 * 56
    (table,) = struct.unpack_from("<Q", image, symbols + 24 + 8)
    for i in range(2):
        (at,) = struct.unpack_from("<Q", image, symbols + 24 * (3 + i) + 8)
        load, jump = struct.unpack_from("<II", image, at)
        assert (load & 0xFF00001F, jump) == (0x58000010, 0xD61F0200)
        assert at + 4 * (load >> 5 & 0x7FFFF) == table + 8 * i


def test_a_cubin_without_the_kernel_is_refused():
    unnamed = bytearray(64 + 64)  # one section, whose name has no end
    struct.pack_into("<Q", unnamed, 0x28, 64)
    struct.pack_into("<HHH", unnamed, 0x3A, 64, 1, 0)
    unnamed[64:] = b"\1" * 64
    struct.pack_into("<I", unnamed, 64, 0)
    struct.pack_into("<Q", unnamed, 64 + 24, 120)
    undecodable = unnamed[:120] + b"\xff\xff\0"
    for image in (b"", b"\x7fELF" + bytes(60), bytes(unnamed), bytes(undecodable)):
        with pytest.raises(LaunchError, match="how many registers"):
            cubin.resources(image, "k")


CORE = """
import ctypes, numpy as np
from cuda.core import Device, LaunchConfig, ObjectCode, launch

device = Device()
device.set_current()
stream = device.create_stream()
kernel = ObjectCode.from_ptx({ptx!r}).get_kernel({name!r})
x = np.arange(64, dtype=np.float32)
there = device.allocate(x.nbytes, stream=stream)
driver = ctypes.CDLL("libcuda.so.1")
address = ctypes.c_uint64(int(there.handle))
find = ctypes.c_void_p()
assert driver.cuGetProcAddress_v2(b"cuMemcpyHtoD", ctypes.byref(find), 12000, ctypes.c_uint64(0), None) == 0
copy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)(find.value)
assert copy(address, x.ctypes.data, x.nbytes) == 0
launch(stream, LaunchConfig(grid=1, block={block}), kernel, there)
{after}
stream.sync()
print("arch", device.arch, device.name)
"""
UNKNOWN = """
assert driver.cuGetProcAddress_v2(b"cuGraphicsMapResources", ctypes.byref(find), 12000, ctypes.c_uint64(0), None) == 0
assert ctypes.CFUNCTYPE(ctypes.c_int)(find.value)() == 801
raise ValueError("theirs")
"""
IGNORED = "\n".join(("try:", "    launch(stream, LaunchConfig(grid=1, block=65), kernel, there)", "except Exception:",
                     "    raise SystemExit(0) from None"))  # fmt: skip
SAFE = SHIFT.replace("st.global.b32 [%rd3+4]", "st.global.b32 [%rd3]")


def sanitized(tmp_path, capfd, text, arch="sm_90a"):
    script = tmp_path / "given.py"
    site = os.environ.get("DSV4_CORPUS_SITE")  # the script's process knows the lab's packages alone
    script.write_text(f"import site; site.addsitedir({site!r}); {text}" if site else text)
    code = command.run(Wish("dsv4 sanitize", str(script), [], arch, {"checks": "race"}))
    return code, *capfd.readouterr()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("ptx", "block", "after", "code", "said"),
    [
        (SHIFT, 63, "", 90, "ERROR race_global"),
        (SAFE, 64, "", 0, ""),
        (SHIFT, 64, "", 91, "outside every allocation"),
        pytest.param(SAFE, 64, UNKNOWN, 1, "the emulated driver has no cuGraphicsMapResources", marks=pytest.mark.full),
        pytest.param(SAFE, 64, IGNORED, 91, "outside every allocation", marks=pytest.mark.full),
    ],
    ids=["race", "repaired", "past the end", "unknown function", "ignored"],
)
def test_a_script_of_cuda_core(tmp_path, capfd, ptx, block, after, code, said):
    pytest.importorskip("cuda.core")
    text = CORE.format(ptx=ptx.encode(), name="shift", block=block, after=after)
    found, printed, error = sanitized(tmp_path, capfd, text)
    assert found == code and said in error, error
    assert "scheduler.py" not in error  # of a stopped launch no frames of the emulator are shown
    assert ("arch 90 NVIDIA H200 (emulated)" in printed) == (code in (0, 90))


PROGRAM = '''
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
source = """
extern "C" __global__ void reverse(float *x) {
  __shared__ float s[64];
  int i = threadIdx.x;
  s[i] = x[i];
  BARRIER
  x[i] = s[63 - i];
}"""
device = Device()
device.set_current()
stream = device.create_stream()
made = Program(source, "c++", options=ProgramOptions(std="c++17", arch=f"sm_{device.arch}", name="reverse.cu"))
kernel = made.compile("cubin").get_kernel("reverse")
assert 0 < kernel.attributes.num_regs < 64
there = device.allocate(256, stream=stream)
there.fill(0, stream=stream)
launch(stream, LaunchConfig(grid=1, block=64), kernel, there)
stream.sync()
'''


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("barrier", "code"), [("", 90), ("__syncthreads();", 0)])
def test_a_script_that_compiles_by_cuda_core(tmp_path, capfd, barrier, code):
    """Also where the lab has loaded NVRTC before: its name is taken then."""
    pytest.importorskip("cuda.core")
    try:
        nvrtc.path()
        nvrtc.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    found, _, error = sanitized(tmp_path, capfd, PROGRAM.replace("BARRIER", barrier))
    assert found == code, error
    assert ("reverse.cu:7" in error) == ("ERROR race_shared" in error) == (code == 90), error


NUMBA = """
import numpy as np
from numba import cuda

@cuda.jit
def count(x, out):
    i = cuda.grid(1)
    if i < x.size:
        BODY

x, out = cuda.to_device(np.arange(400, dtype=np.int32)), cuda.to_device(np.zeros(8, np.int32))
count[4, 128](x, out)
print("out", out.copy_to_host()[:2])
"""


def needs(*modules):
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: ./dsv4 test --corpus installs and runs this")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("body", "code", "said"), [("out[x[i] % 8] += 1", 90, "given.py:9"), ("cuda.atomic.add(out, x[i] % 8, 1)", 0, "")]
)
def test_a_script_of_numba(tmp_path, capfd, body, code, said):
    needs("numba", "numba_cuda")
    found, printed, error = sanitized(tmp_path, capfd, NUMBA.replace("BODY", body))
    assert found == code and said in error, error
    assert ("out [50 50]" in printed) == (code == 0) and ("ERROR race_global" in error) == (code == 90)


def test_numbas_built_in_target_is_refused(tmp_path, monkeypatch):
    """Modules of its names, in a folder of its name and in one of numba-cuda's, which must not redirect them here."""
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "numba" not in type(f).__module__])
    for package in ("numba", "numba_cuda"):
        for name in ("numba.cuda.cudadrv.driver", "numba.cuda.cudadrv", "numba.cuda", "numba"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        folder = tmp_path / package / "numba" / "cuda" / "cudadrv"
        folder.mkdir(parents=True)
        for path in (folder, folder.parent, folder.parent.parent):
            (path / "__init__.py").write_text("")
        (folder / "driver.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path / package))
        with script_packages.patched():
            if package == "numba":
                with pytest.raises(BackendUnavailable, match="pip install numba-cuda"):
                    importlib.import_module("numba.cuda.cudadrv.driver")
            else:
                assert package in importlib.import_module("numba.cuda.cudadrv.driver").__file__
    for name in [name for name in sys.modules if name.partition(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)


WARP = """
import numpy as np, warp as wp

@wp.kernel
def shift(x: wp.array(dtype=float), y: wp.array(dtype=float), by: int):
    i = wp.tid()
    y[i + by] = x[i] * 2.0

x = wp.array(np.arange(400, dtype=np.float32), device="cuda:0")
y, z = wp.full(400, 7.0, dtype=float, device="cuda:0"), wp.zeros((20, 20), dtype=float, device="cuda:0")
z[:, 3:5].fill_(1.0)
y_view = wp.clone(z[:, 4])
wp.launch(shift, dim=400, inputs=[x, y, BY], device="cuda:0")
print("y", y.numpy()[:3].tolist(), z.numpy().sum(), y_view.numpy().sum(), wp.full(3, 7.5, device="cuda:0").numpy())
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("", 0, ""),
        ("BY", 91, "given.py:7"),
        pytest.param("wp.utils.array_scan(x, y)", 91, "Warp's own binary", marks=pytest.mark.full),
    ],
    ids=["right", "past the end", "a kernel without PTX"],
)
def test_a_script_of_warp(tmp_path, capfd, ending, code, said):
    needs("warp")
    text = WARP.replace("BY", "1" if ending == "BY" else "0") + (ending if ending != "BY" else "")
    found, printed, error = sanitized(tmp_path, capfd, text)
    assert found == code and said in error, error
    assert ("y [0.0, 2.0, 4.0] 40.0 20.0 [7.5 7.5 7.5]" in printed) == (ending != "BY"), printed


def test_nothing_is_loaded_unless_a_package_asks_for_it():
    text = (
        "import ctypes\nfrom dsv4lib import emulator\nfrom dsv4lib.emulator.driver import shared_object\n"
        "with emulator.device('sm_90a'):\n    import json\nprint(shared_object.loaded('libcuda.so.1'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""}
    )
    if done.stdout.strip() == "True":
        pytest.skip("this machine has a driver, and a package has loaded it")
    assert done.stdout.strip() == "False", done.stderr
