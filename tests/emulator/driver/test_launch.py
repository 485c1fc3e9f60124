"""What arrives at the machine when compiled CuTeDSL code is called: shapes, parameters, descriptors, errors."""

import gc
import importlib.util
import os
import struct
from collections import Counter

import pytest
import torch

cute = pytest.importorskip("cutlass.cute")
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from dsv4lib import emulator  # noqa: E402
from dsv4lib.dsl.compile import compile_for  # noqa: E402
from dsv4lib.emulator.driver import device, host  # noqa: E402
from dsv4lib.emulator.driver.symbols import RUNTIME  # noqa: E402
from dsv4lib.emulator.errors import LaunchError, MemoryFault  # noqa: E402
from dsv4lib.emulator.machine import machine  # noqa: E402
from dsv4lib.emulator.machine.request import LaunchResult  # noqa: E402
from dsv4lib.ops.gemm_tile.inputs import operands, padding_untouched  # noqa: E402
from dsv4lib.ops.gemm_tile.sm100 import GemmTile  # noqa: E402

TVM_FFI = pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="apache-tvm-ffi is not installed")


@cute.kernel
def scale_kernel(x: cute.Tensor, factor: cute.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    x[block * 32 + thread] = x[block * 32 + thread] * factor + 1.0


@cute.jit
def scale(x: cute.Tensor, factor: cute.Float32):
    scale_kernel(x, factor).launch(grid=[4, 1, 1], block=[32, 1, 1])


@cute.jit
def scale_cluster(x: cute.Tensor, factor: cute.Float32):
    scale_kernel(x, factor).launch(grid=[4, 1, 1], block=[32, 1, 1], cluster=[2, 1, 1])


@cute.jit
def scale_twice(x: cute.Tensor, factor: cute.Float32):
    scale_kernel(x, factor).launch(grid=[4, 1, 1], block=[32, 1, 1])
    scale_kernel(x, factor).launch(grid=[4, 1, 1], block=[32, 1, 1])


@cute.jit
def scale_nested(operands: tuple, factor: cute.Float32):
    scale_kernel(operands[1][0], factor).launch(grid=[4, 1, 1], block=[32, 1, 1])


@pytest.fixture
def requests(monkeypatch):
    """Launch requests, not run."""
    seen = []

    def run(request, device):
        seen.append(request)
        return LaunchResult(0, 0.0, 0, 0, Counter(), [])

    monkeypatch.setattr(machine, "run", run)
    return seen


@pytest.fixture(scope="module")
def gemm():
    kernel = GemmTile(in_dtype="bf16", out_dtype="fp32")
    return kernel, compile_for(kernel, kernel.fake_args(), "sm_100a")


def check_gemm(kernel, request, a, b, c):
    """The request is the launch of ``kernel`` on these operands: tiles, sizes, strides and addresses."""
    m, k = a.shape
    n = b.shape[0]
    assert request.grid == (-(-m // 128), -(-n // kernel.tile_n), 1)
    assert request.block == (192, 1, 1) and request.cluster == (1, 1, 1)
    entry = request.module.kernels[request.kernel_name]
    assert len(request.params) == entry.param_bytes
    blocks = [request.params[p.offset : p.offset + p.size] for p in entry.params]
    descriptors = [block for block in blocks if len(block) == 128]
    for x, rows, block in zip((a, b), (128, kernel.tile_n), descriptors, strict=True):
        words = struct.unpack_from("<16I", block)
        assert struct.unpack_from("<Q", block)[0] == x.data_ptr()
        assert (words[2] >> 4 & 7) + 1 == 2 and words[2] >> 7 & 15 == 10 and words[2] >> 13 & 3 == 3  # 2-D, bf16, 128B
        assert words[3] * 16 == x.stride(0) * 2
        assert (words[8] + 1, words[9] + 1) == (k, x.shape[0])
        assert block[55] + 1 == 64 and block[56] + 1 == rows
    address, rows, columns, stride = struct.unpack("<QIIQ", blocks[-1])
    assert (address, rows, columns, stride) == (c.data_ptr(), m, n, c.stride(0))


def test_launch_without_patching(gemm, requests):
    kernel, compiled = gemm
    a, b, c = operands(200, 136, 72, "bf16", "fp32")
    gpu = emulator.driver.launch(compiled, *kernel.launch_args(a, b, c))
    check_gemm(kernel, requests[0], a, b, c)
    assert requests[0].dynamic_smem == compiled.smem_bytes
    assert [launch.request for launch in gpu.launches] == requests and gpu.arch.name == "sm_100a"
    assert len(gpu.gmem) == 0 and not RUNTIME.devices


def test_calls_inside_the_context(gemm, requests):
    kernel, before = gemm
    with emulator.device("sm_100a") as gpu:
        compiled = cute.compile(kernel, *kernel.fake_args())
        a, b, c = operands(200, 136, 72, "bf16", "fp32", device="cuda")
        for function in (compiled, before.function, compiled):
            function(*kernel.launch_args(a, b, c))
            check_gemm(kernel, requests[-1], a, b, c)
        assert len(requests) == 3
        for x in (a, b, c):
            allocation = gpu.gmem.find(x.data_ptr(), (x.shape[0] - 1) * x.stride(0) * x.element_size())
            assert allocation is not None and allocation.nbytes == x.untyped_storage().nbytes()


def test_clusters_scalars_and_line_info(requests):
    with emulator.device("sm_100a"):
        x = torch.zeros(128, device="cuda")
        scale_cluster(from_dlpack(x), 2.5)
        request = requests[0]
        assert (request.grid, request.block, request.cluster) == ((4, 1, 1), (32, 1, 1), (2, 1, 1))
        assert struct.unpack("<Qf", request.params) == (x.data_ptr(), 2.5)
        locations = {i.location for i in request.module.kernels[request.kernel_name].instructions}
    lines = {at.line for at in locations if at and at.file == __file__}
    source = open(__file__).read().split("\n")
    assert source.index("    x[block * 32 + thread] = x[block * 32 + thread] * factor + 1.0") + 1 in lines


def test_equal_kernel_names_keep_their_code(requests):
    """Two kernels of one name: the binary decides which PTX runs."""

    def build(constant):
        @cute.kernel
        def same(x: cute.Tensor):
            thread, _, _ = cute.arch.thread_idx()
            x[thread] = x[thread] + constant

        @cute.jit
        def host_code(x: cute.Tensor):
            same(x).launch(grid=[1, 1, 1], block=[32, 1, 1])

        return host_code

    with emulator.device("sm_100a"):
        x = from_dlpack(torch.zeros(32, device="cuda"))
        functions = [cute.compile(build(value), x) for value in (3.0, 5.0)]
        for function in functions + functions:
            function(x)
    assert len({r.kernel_name for r in requests}) == 1
    texts = [" ".join(i.text for i in r.module.kernels[r.kernel_name].instructions) for r in requests]
    assert ["0f40400000" in t for t in texts] == [True, False] * 2
    assert ["0f40A00000" in t for t in texts] == [False, True] * 2


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_90a", "sm_80"])
def test_architectures(arch, requests):
    with emulator.device(arch, sm_count=7) as gpu:
        scale(from_dlpack(torch.zeros(128, device="cuda")), 1.0)
        assert requests[0].module.target == arch
        capability = torch.cuda.get_device_capability()
        assert f"sm_{capability[0]}{capability[1]}" == arch.rstrip("a")
        assert torch.cuda.get_device_properties(0).multi_processor_count == 7
        from cutlass.utils import HardwareInfo

        assert HardwareInfo().get_max_active_clusters(2) == 3 and gpu.attribute(16) == 7


def test_tensors_inside_tuples_are_device_memory(tmp_path):
    x = torch.arange(128, dtype=torch.float32)
    nested = (None, (from_dlpack(x), None))
    options = f"--gpu-arch sm_100a --keep-ptx --keep-cubin --dump-dir={tmp_path}"
    compiled = cute.compile(scale_nested, nested, 2.0, options=options)
    emulator.launch(compiled, nested, 2.0)
    assert torch.equal(x, 2 * torch.arange(128) + 1.0)


def test_it_runs():
    with emulator.device("sm_100a") as gpu:
        x = torch.arange(128, dtype=torch.float32, device="cuda")
        scale_twice(from_dlpack(x), 2.0)
        assert torch.equal(x.cpu(), torch.arange(128) * 4.0 + 3)
        assert len(gpu.launches) == 2 and gpu.launches[0].result.instructions > 0


@pytest.mark.parametrize("schedule", ["round_robin", "adversarial"])
def test_a_tensor_core_gemm_runs(gemm, schedule):
    kernel, before = gemm
    a, b, c = operands(200, 136, 72, "bf16", "fp32")
    gpu = device.make("sm_100a", schedule=schedule, seed=1)
    emulator.driver.launch(before, *kernel.launch_args(a, b, c), gpu=gpu)
    expected = a.double() @ b.double().T
    bound = 2**-22 * (a.double().abs() @ b.double().abs().T)  # fp32 sums of exact products, in any order
    assert ((c.double() - expected).abs() <= bound).all() and padding_untouched(c)
    assert not gpu.hazards


def test_out_of_bounds_names_the_python_line():
    with emulator.device("sm_100a"), pytest.raises(MemoryFault, match="1 bytes past the last byte") as caught:
        scale(from_dlpack(torch.zeros(100, device="cuda")), 2.0)
    assert os.path.basename(caught.value.place.python).startswith("test_launch.py:")


def test_freed_memory_faults():
    with emulator.device("sm_100a") as gpu:
        x = torch.zeros(4096, device="cuda")
        view = from_dlpack(x[:128])
        scale(view, 1.0)
        start = x.data_ptr()
        assert gpu.gmem.find(start)
        del x, view
        gpu.memory.sweep()
        assert gpu.gmem.find(start) is None


def test_errors_of_a_launch_reach_the_caller(monkeypatch):
    calls = []

    def run(request, device):
        calls.append(request)
        raise KeyError("boom")

    monkeypatch.setattr(machine, "run", run)
    with emulator.device("sm_100a"):
        x = from_dlpack(torch.zeros(128, device="cuda"))
        with pytest.raises(KeyError, match="boom"):
            scale_twice(x, 1.0)
        assert len(calls) == 1  # what follows a failed launch in the same host function does not run
        assert RUNTIME.pending is None
        with pytest.raises(KeyError, match="boom"):
            scale_twice(x, 1.0)
    assert len(calls) == 2


def test_unknown_binaries_are_refused(requests, monkeypatch):
    from dsv4lib.emulator.driver import binary

    with emulator.device("sm_100a"):
        x = from_dlpack(torch.zeros(128, device="cuda"))
        compiled = cute.compile(scale, x, 1.0)
        monkeypatch.setattr(binary, "KNOWN", {})
        with pytest.raises(LaunchError, match="PTX is not known"):
            compiled(x, 1.0)
    assert not requests


def test_functions_compiled_here_fail_cleanly_outside(requests):
    with emulator.device("sm_100a"):
        x = from_dlpack(torch.zeros(128, device="cuda"))
        compiled = cute.compile(scale, x, 1.0)
        compiled(x, 1.0)
    with pytest.raises(Exception, match="cudaErrorNoDevice|error code: 100"):
        compiled(x, 1.0)
    assert len(requests) == 1
    assert RUNTIME.pending is None


def test_exports_are_refused(requests, tmp_path):
    with emulator.device("sm_100a"):
        x = from_dlpack(torch.zeros(128, device="cuda"))
        compiled = cute.compile(scale, x, 1.0)
        with pytest.raises(LaunchError, match="must not be exported"):
            compiled.export_to_c(str(tmp_path), "scale", "scale")
        with pytest.raises(LaunchError, match="must not be exported"):
            compiled.dump_to_object("scale")


def test_clusters_need_an_architecture_that_has_them(requests):
    with emulator.device("sm_80"), pytest.raises(LaunchError, match="sm_80 has at most 1 CTAs"):
        scale_cluster(from_dlpack(torch.zeros(128, device="cuda")), 1.0)
    assert not requests


def test_refused_launches_are_the_errors_that_the_dsl_documents(requests):
    from cuda.bindings.runtime import cudaError_t
    from cutlass.base_dsl.common import DSLCudaRuntimeError

    @cute.jit
    def together(x: cute.Tensor):
        scale_kernel(x, cute.Float32(1.0)).launch(grid=[5000, 1, 1], block=[1024, 1, 1], cooperative=True)

    with emulator.device("sm_100a"), pytest.raises(DSLCudaRuntimeError, match="5000 CTAs; 296 can be") as caught:
        together(from_dlpack(torch.zeros(128, device="cuda")))
    assert isinstance(caught.value, LaunchError) and not requests
    assert caught.value.error_code == cudaError_t.cudaErrorCooperativeLaunchTooLarge


def test_host_functions_are_made_once(gemm, requests):
    _, compiled = gemm
    assert host.host_function(compiled.function) is host.host_function(compiled.function)


@pytest.mark.parametrize("inside", [False, True])
def test_kernels_are_forgotten_with_the_code_that_calls_them(inside):
    """A loaded kernel holds its PTX, parsed and lowered: megabytes, which went only with the process."""

    def handles():
        gc.collect()
        return set(RUNTIME.libraries), set(RUNTIME.kernels), set(RUNTIME.members)

    def call():
        x = torch.zeros(128)
        with emulator.device("sm_100a") as gpu:
            compiled = cute.compile(scale, from_dlpack(x), 2.0, options="--keep-ptx --keep-cubin")
            if inside:
                compiled(from_dlpack(x), 2.0)
            else:
                emulator.driver.launch(compiled, from_dlpack(x), 2.0, gpu=gpu)
        assert bool((x == 1).all())
        return compiled, handles()

    before = handles()
    compiled, during = call()
    assert all(len(now - old) == 1 for old, now in zip(before, during, strict=True))
    del compiled
    assert all(now <= old for old, now in zip(before, handles(), strict=True))


def test_a_cuda_graph_records_launches_and_replays_them():
    with emulator.device("sm_100a") as gpu:
        x = torch.ones(128, device="cuda")
        compiled = cute.compile(scale, from_dlpack(x), 2.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            assert torch.cuda.is_current_stream_capturing()
            compiled(from_dlpack(x), 2.0)
            with pytest.raises(LaunchError, match="torch.add.*captured"):
                torch.add(x, 1)
            with pytest.raises(LaunchError, match="captured already"):
                torch.cuda.CUDAGraph().capture_begin()
        assert not torch.cuda.is_current_stream_capturing() and not gpu.launches and (x == 1).all()
        graph.replay()
        graph.replay()
        assert len(gpu.launches) == 2 and (x == 7).all()
        graph.reset()
        graph.replay()
        assert len(gpu.launches) == 2


@pytest.mark.parametrize("options", ["", pytest.param("--enable-tvm-ffi", marks=TVM_FFI)])
def test_compiling_in_nested_devices(options):
    """Each level compiles, calls what it and the levels around it compiled, and the outer one goes on afterwards."""
    argument = {"options": options} if options else {}

    def compiled(factor):
        x = torch.arange(128.0, device="cuda")
        function = cute.compile(scale, from_dlpack(x), cute.Float32(factor), **argument)
        call(function, factor)
        return function

    def call(function, factor):
        x = torch.arange(128.0, device="cuda")
        function(x if options else from_dlpack(x), factor)
        assert torch.equal(x.cpu(), torch.arange(128.0, device="cpu") * factor + 1)

    with emulator.device("sm_100a") as outer:
        first = compiled(2.0)
        with emulator.device("sm_100a") as inner:
            second = compiled(3.0)
            call(first, 2.0)
            with emulator.devices(2, "sm_90a") as gpus:
                third = compiled(5.0)
                assert len(gpus[0].launches) == 1
                with pytest.raises(LaunchError, match="compiled for sm_100a, this device is sm_90a"):
                    call(second, 3.0)
            assert len(inner.launches) == 2
        call(second, 3.0)
        with pytest.raises(LaunchError, match="compiled for sm_90a, this device is sm_100a"):
            call(third, 5.0)
        compiled(7.0)
        assert len(outer.launches) == 3
    with emulator.device("sm_90a"):
        call(third, 5.0)
