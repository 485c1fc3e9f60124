"""The driver API of cuda.bindings: modules, kernels, launches, memory; as scripts of cuda-python use it."""

import ctypes
import os

import numpy as np
import pytest

from dsv4lib import emulator, nvrtc
from dsv4lib.emulator.errors import EmulatorError, LaunchError, PtxSyntaxError
from dsv4lib.emulator.sanitize import command
from dsv4lib.emulator.sanitize.command import Wish
from dsv4lib.errors import ArgumentError, BackendUnavailable
from tests.emulator.gpu.test_gpu import COPY_BOX, HEADER, SCALE

pytest.importorskip("cutlass.cute")
driver = pytest.importorskip("cuda.bindings.driver")

NAME = b"_Z5scalePKfPffj"


@pytest.fixture
def gpu():
    with emulator.device("sm_90a") as device:
        yield device


def done(result):
    status, *values = result
    assert status == driver.CUresult.CUDA_SUCCESS
    return values[0] if len(values) == 1 else tuple(values)


def allocated(array):
    address = done(driver.cuMemAlloc(array.nbytes))
    done(driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
    return address


def read(address, like):
    out = np.empty_like(like)
    done(driver.cuMemcpyDtoH(out.ctypes.data, address, out.nbytes))
    return out


def function(image=None, name=NAME):
    image = SCALE.encode() + b"\0" if image is None else image
    return done(driver.cuModuleGetFunction(done(driver.cuModuleLoadData(image)), name))


def by_types(x, y, n):
    return (x, y, 2.0, n), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_uint)


def by_objects(x, y, n):
    return (x, y, ctypes.c_float(2.0), ctypes.c_uint(n)), (None,) * 4


def by_address(x, y, n):
    values = [np.array(int(x), np.uint64), np.array(int(y), np.uint64), np.array(2, np.float32), np.array(n, np.uint32)]
    by_address.keep = values, np.array([value.ctypes.data for value in values], np.uint64)
    return by_address.keep[1].ctypes.data


@pytest.mark.parametrize("params", [by_types, by_objects, by_address])
def test_the_three_forms_of_parameters(gpu, params):
    x = np.arange(500, dtype=np.float32)
    there = allocated(x), allocated(np.zeros_like(x))
    done(driver.cuLaunchKernel(function(), 4, 1, 1, 128, 1, 1, 0, 0, params(*there, 500), 0))
    assert np.array_equal(read(there[1], x), 2 * x)
    for address in there:
        done(driver.cuMemFree(address))


def test_a_context_a_library_and_a_launch_with_attributes(gpu):
    done(driver.cuInit(0))
    device = done(driver.cuDeviceGet(0))
    assert int(done(driver.cuDevicePrimaryCtxRetain(device)))
    x = np.arange(64, dtype=np.float32)
    there = allocated(x), allocated(np.zeros_like(x))
    library = done(driver.cuLibraryLoadData(SCALE.encode(), [], [], 0, [], [], 0))
    kernel = done(driver.cuLibraryGetKernel(library, NAME))
    settings = driver.CUlaunchConfig()
    settings.gridDimX, settings.gridDimY, settings.gridDimZ = 2, 1, 1
    settings.blockDimX, settings.blockDimY, settings.blockDimZ = 32, 1, 1
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = 2, 1, 1
    settings.attrs, settings.numAttrs = [attribute], 1
    handle = done(driver.cuKernelGetFunction(kernel))
    done(driver.cuLaunchKernelEx(settings, handle, by_types(*there, 64), 0))
    assert np.array_equal(read(there[1], x), 2 * x)
    assert gpu.launches[-1].request.cluster == (2, 1, 1) and gpu.launches[-1].request.grid == (2, 1, 1)
    done(driver.cuLibraryUnload(library))
    with pytest.raises(LaunchError, match="not loaded"):
        driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, by_types(*there, 32), 0)


@pytest.mark.parametrize("name", ["launchCompletionEvent", "programmaticEvent"])
def test_a_launch_records_the_event_of_its_attribute(name):
    import torch

    attribute, x = driver.CUlaunchAttribute(), np.arange(64, dtype=np.float32)
    ids = driver.CUlaunchAttributeID
    attribute.id = {
        "launchCompletionEvent": ids.CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT,
        "programmaticEvent": ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT,
    }[name]
    with emulator.devices(2, "sm_90a") as gpus:
        event, other = torch.cuda.Event(), torch.cuda.Event()
        assert event.cuda_event == other.cuda_event == 0  # torch makes it when it is recorded
        event.record()
        other.record()
        gpus.synchronize()
        assert 0 != event.cuda_event != other.cuda_event and event.query()
        getattr(attribute.value, name).event = driver.CUevent(event.cuda_event)
        settings, there = driver.CUlaunchConfig(), (allocated(x), allocated(np.zeros_like(x)))
        settings.gridDimX, settings.gridDimY, settings.gridDimZ = 2, 1, 1
        settings.blockDimX, settings.blockDimY, settings.blockDimZ = 32, 1, 1
        settings.attrs, settings.numAttrs = [attribute], 1
        done(driver.cuLaunchKernelEx(settings, function(), by_types(*there, 64), 0))
        assert gpus.queues.pending() and not event.query() and other.query()
        gpus.synchronize()
        assert event.query() and np.array_equal(read(there[1], x), 2 * x)


def recording(event):
    """Settings of a launch that records an event, by its handle."""
    attribute, settings = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT
    attribute.value.launchCompletionEvent.event = driver.CUevent(event)
    settings.gridDimX, settings.gridDimY, settings.gridDimZ = 2, 1, 1
    settings.blockDimX, settings.blockDimY, settings.blockDimZ = 32, 1, 1
    settings.attrs, settings.numAttrs = [attribute], 1
    return settings


def test_an_event_that_a_launch_records_has_its_time(gpu):
    start, end = done(driver.cuEventCreate(0)), done(driver.cuEventCreate(0))
    x = np.arange(64, dtype=np.float32)
    there = allocated(x), allocated(np.zeros_like(x))
    for event in (start, end):
        done(driver.cuLaunchKernelEx(recording(int(event)), function(), by_types(*there, 64), 0))
    first = done(driver.cuEventElapsedTime(start, end))
    done(driver.cuLaunchKernelEx(recording(int(end)), function(), by_types(*there, 64), 0))
    assert 0 < first < done(driver.cuEventElapsedTime(start, end))


@pytest.mark.parametrize("handle", [0, 0x1230])
def test_a_launch_cannot_record_what_is_no_event(gpu, handle):
    x = np.arange(64, dtype=np.float32)
    there = allocated(x), allocated(np.zeros_like(x))
    with pytest.raises(ArgumentError, match="event"):
        driver.cuLaunchKernelEx(recording(handle), function(), by_types(*there, 64), 0)
    assert not gpu.launches and not read(there[1], x).any()


def test_a_launch_that_is_captured_records_no_event(gpu):
    import torch

    event = done(driver.cuEventCreate(0))
    x = np.arange(64, dtype=np.float32)
    there, kernel = (allocated(x), allocated(np.zeros_like(x))), function()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(LaunchError, match="event.*captured"):
        driver.cuLaunchKernelEx(recording(int(event)), kernel, by_types(*there, 64), 0)


COUNT = (
    HEADER
    + ".global .align 4 .u32 count = 5;\n.visible .entry add() { .reg .b32 %r<4>; ld.global.u32 %r1, [count]; "
    + "add.u32 %r1, %r1, 1; st.global.u32 [count], %r1; ret; }\n"
)


def test_each_load_of_a_module_has_variables_of_its_own(gpu):
    first, second = (done(driver.cuModuleLoadData(COUNT.encode())) for _ in range(2))
    for module, launches in ((first, 2), (second, 1)):
        kernel = done(driver.cuModuleGetFunction(module, b"add"))
        for _ in range(launches):
            done(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    values = []
    for module in (first, second):
        address, size = done(driver.cuModuleGetGlobal(module, b"count"))
        values.append(read(address, np.zeros(size // 4, np.uint32)).tolist())
    assert values == [[7], [6]]
    with pytest.raises(LaunchError, match="no variable"):
        driver.cuModuleGetGlobal(first, b"counts")


def test_shared_memory_needs_its_opt_in(gpu):
    kernel, x = function(), allocated(np.zeros(64, np.float32))
    launch = (kernel, 1, 1, 1, 64, 1, 1, 100_000, 0, by_types(x, x, 64), 0)
    with pytest.raises(LaunchError, match="MaxDynamicSharedMemorySize"):
        driver.cuLaunchKernel(*launch)
    key = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    done(driver.cuFuncSetAttribute(kernel, key, 100_000))
    assert done(driver.cuFuncGetAttribute(key, kernel)) == 100_000
    done(driver.cuLaunchKernel(*launch))


def test_a_tensor_map_of_the_driver(gpu):
    x, out = np.arange(20 * 36, dtype=np.float32).reshape(20, 36), np.zeros((8, 8), np.float32)
    there = allocated(x), allocated(out)
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    tensor_map = done(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, there[0], [u64(36), u64(20)], [u64(144)],
            [u32(8), u32(8)], [u32(1), u32(1)], driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    kernel = function((HEADER.replace("8.0", "8.6") + COPY_BOX).encode(), b"copy")
    params = (there[1], tensor_map), (ctypes.c_void_p, None)
    done(driver.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, params, 0))
    assert np.array_equal(read(there[1], out), x[1:9, 4:12])


def test_what_is_refused(gpu, tmp_path):
    x = allocated(np.zeros(64, np.float32))
    good = by_types(x, x, 64)
    for params, words in (
        (0, "4 parameters"),
        ((good[0][:3], good[1][:3]), "4 values"),
        ("abcd", "a pair"),
        ((good[0], (*good[1][:3], ctypes.c_uint16)), "4 bytes"),
        ((good[0], (*good[1][:3], None)), "ctypes"),
    ):
        with pytest.raises(ArgumentError, match=words):
            driver.cuLaunchKernel(function(), 1, 1, 1, 64, 1, 1, 0, 0, params, 0)
    with pytest.raises(LaunchError, match="extra"):
        driver.cuLaunchKernel(function(), 1, 1, 1, 64, 1, 1, 0, 0, good, 8)
    with pytest.raises(LaunchError, match="no kernel nothing"):
        function(name=b"nothing")
    with pytest.raises(LaunchError, match="PTX is not known"):
        function(b"\x7fELF" + bytes(100))
    with pytest.raises(PtxSyntaxError):
        function(b"no PTX at all")
    with pytest.raises(ArgumentError, match="image"):
        driver.cuModuleLoadData(0)
    with pytest.raises(ArgumentError, match="path"):
        driver.cuModuleLoad(b"none.ptx")
    (tmp_path / "scale.ptx").write_text(SCALE)
    done(driver.cuModuleUnload(done(driver.cuModuleLoad(str(tmp_path / "scale.ptx").encode()))))
    with pytest.raises(EmulatorError, match="outside every allocation"):
        driver.cuLaunchKernel(function(), 1, 1, 1, 128, 1, 1, 0, 0, by_types(x, x, 65000), 0)


SCRIPT = """
import ctypes, sys
import numpy as np
from cuda.bindings import driver

def done(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]

done(driver.cuInit(0))
context = done(driver.cuCtxCreate(None, 0, done(driver.cuDeviceGet(0))))
{compile}
kernel = done(driver.cuModuleGetFunction(done(driver.cuModuleLoadData(image)), b"shift"))
x = np.arange(64, dtype=np.float32)
there = done(driver.cuMemAlloc(x.nbytes))
stream = done(driver.cuStreamCreate(0))
done(driver.cuMemcpyHtoDAsync(there, x.ctypes.data, x.nbytes, stream))
done(driver.cuLaunchKernel(kernel, 1, 1, 1, 63, 1, 1, 0, stream, ((there,), (ctypes.c_void_p,)), 0))
done(driver.cuMemcpyDtoHAsync(x.ctypes.data, there, x.nbytes, stream))
done(driver.cuStreamSynchronize(stream))
done(driver.cuMemFree(there))
done(driver.cuCtxDestroy(context))
print("last", x[63])
"""
SHIFT = (
    HEADER
    + """.visible .entry shift(.param .u64 x) { .reg .b64 %rd<4>; .reg .b32 %r<4>;
ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
ld.global.b32 %r2, [%rd3]; st.global.b32 [%rd3+4], %r2; ret; }"""
)


@pytest.mark.parametrize(("checks", "code"), [("race", 90), pytest.param("default", 0, marks=pytest.mark.full)])
def test_a_script_of_cuda_python_is_sanitized(tmp_path, capfd, checks, code):
    script = tmp_path / "given.py"
    script.write_text(SCRIPT.format(compile=f"image = {SHIFT.encode()!r}"))
    assert command.run(Wish("dsv4 sanitize", str(script), [], "sm_90a", {"checks": checks})) == code
    out, error = capfd.readouterr()
    assert out.startswith("last ") and ("ERROR race_global" in error) == (code == 90)


COMPILED = '''
from cuda.bindings import nvrtc
source = b"""extern "C" __global__ void shift(float *x) {
  x[threadIdx.x + 1] = x[threadIdx.x];
}"""
program = done(nvrtc.nvrtcCreateProgram(source, b"shift.cu", 0, [], []))
done(nvrtc.nvrtcCompileProgram(program, 2, [b"-arch=sm_90a", b"-lineinfo"]))
image = b" " * done(nvrtc.nvrtcGetCUBINSize(program))
done(nvrtc.nvrtcGetCUBIN(program, image))
assert image[:4] == b"\\x7fELF"
'''


def test_a_script_that_compiles_to_a_cubin(tmp_path, capfd):
    try:
        nvrtc.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    if os.environ.get("DSV4_NVRTC"):
        folder = os.path.dirname(os.environ["DSV4_NVRTC"])
        if folder not in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
            pytest.skip("cuda.bindings finds NVRTC by LD_LIBRARY_PATH, which lacks the folder of DSV4_NVRTC")
    script = tmp_path / "given.py"
    script.write_text(SCRIPT.format(compile=COMPILED))
    assert command.run(Wish("dsv4 sanitize", str(script), [], "sm_90a", {"checks": "race"})) == 90
    error = capfd.readouterr().err
    assert "ERROR race_global" in error and "shift.cu:2" in error
