"""The context of a device: what torch and the DSL believe inside, and that nothing of it is left outside."""

import math
import os
import warnings

import pytest
import torch

cute = pytest.importorskip("cutlass.cute")
import cutlass.testing  # noqa: E402
from cuda.bindings import driver, runtime  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402
from cutlass.cutlass_dsl import CuTeDSL  # noqa: E402

from dsv4lib import emulator  # noqa: E402
from dsv4lib.emulator.driver import cuda_api, device, dsl, emulated_time  # noqa: E402
from dsv4lib.emulator.driver.symbols import RUNTIME  # noqa: E402
from dsv4lib.emulator.errors import EmulatorError, LaunchError, MemoryFault  # noqa: E402
from dsv4lib.errors import ArgumentError, BackendUnavailable  # noqa: E402


def state():
    """Everything the context changes."""
    from cutlass.base_dsl.compiler import CompileOptions, Compiler
    from cutlass.base_dsl.jit_executor import JitCompiledFunction, JitExecutor, JitFunctionArtifacts
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
    from cutlass.utils import HardwareInfo

    owners = [
        *(Compiler, CompileOptions, JitExecutor, JitCompiledFunction, JitFunctionArtifacts, _Tensor, HardwareInfo),
        *(CudaDialectJitCompiledFunction, torch.cuda, torch.cuda.nvtx, torch.accelerator, torch.library),
        *(driver, runtime, cutlass.testing),
    ]
    settings = {k: v for k, v in vars(CuTeDSL._get_dsl().envar).items()}
    keep = ("jit_cache", "compile_options")
    return (
        [dict(vars(owner)) for owner in owners],
        settings,
        [id(getattr(CuTeDSL._get_dsl(), name)) for name in keep],
        dict(os.environ),
        torch.Generator,
        torch.overrides._get_current_function_mode_stack(),
        list(RUNTIME.devices),
    )


def test_everything_is_put_back():
    before = state()
    with emulator.device("sm_100a", seed=3):
        inside = state()
        assert inside[0] != before[0]
        assert all(a != b for a, b in zip(inside[2], before[2], strict=True))  # caches and options of our own
        with emulator.device("sm_90a"):
            pass
    assert state() == before


def test_everything_is_put_back_after_an_exception():
    before = state()
    with pytest.raises(ZeroDivisionError), emulator.device("sm_100a"):
        raise ZeroDivisionError
    assert state() == before


def test_an_error_never_raised_comes_out_at_the_end():
    with pytest.raises(KeyError, match="left over"), emulator.device("sm_100a"):
        RUNTIME.pending = KeyError("left over")
    assert RUNTIME.pending is None


def test_one_error_is_enough():
    with pytest.raises(ZeroDivisionError), emulator.device("sm_100a"):
        RUNTIME.pending = KeyError("left over")
        raise ZeroDivisionError
    assert RUNTIME.pending is None


def test_a_failure_while_entering_is_undone(monkeypatch):
    before = state()
    monkeypatch.setattr(dsl, "_exports", lambda patch: 1 / 0)
    with pytest.raises(ZeroDivisionError), emulator.device("sm_100a"):
        pass
    monkeypatch.undo()
    assert state() == before


def test_contexts_nest():
    with emulator.device("sm_100a") as outer:
        assert device.current() is outer and torch.cuda.get_device_capability() == (10, 0)
        with emulator.device("sm_90a") as inner:
            assert device.current() is inner and torch.cuda.get_device_capability() == (9, 0)
            assert os.environ["CUTE_DSL_ARCH"] == CuTeDSL._get_dsl().envar.arch == "sm_90a"
        assert device.current() is outer and CuTeDSL._get_dsl().envar.arch == "sm_100a"
    with pytest.raises(EmulatorError, match="no emulated device"):
        device.current()


def test_initialised_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(BackendUnavailable, match="already initialised"), emulator.device("sm_100a"):
        pass


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"arch": "sm_75"}, "arch"),
        ({"checks": "some"}, "checks"),
        ({"sm_count": 0}, "sm_count"),
        ({"schedule": "alphabetical"}, "schedule"),
        ({"seed": -1}, "seed"),
        ({"fatal": ["typo"]}, "fatal"),
        ({"time_limit": -1}, "time_limit"),
        ({"default_device": "meta"}, "default_device"),
    ],
)
def test_bad_arguments(arguments, name):
    with pytest.raises(ArgumentError, match=name), emulator.device(**arguments):
        pass


@pytest.fixture
def gpu():
    with emulator.device("sm_100a", sm_count=4, default_device="cpu") as made:
        yield made


def test_where_tensors_are(gpu):
    host, cuda = torch.zeros(3), torch.zeros(3, device="cuda")
    assert (host.device.type, cuda.device) == ("cpu", torch.device("cuda", 0))
    assert (host.is_cuda, cuda.is_cuda, cuda.is_cpu, cuda.get_device(), host.get_device()) == (
        False,
        True,
        False,
        0,
        -1,
    )
    assert cuda.cpu().device.type == cuda.to("cpu").device.type == "cpu"
    for moved in (
        host.cuda(),
        host.to("cuda"),
        host.to(torch.device("cuda:0")),
        host.to("cuda", torch.float16),
        host.to("cuda", None, False),
        host.to("cuda", torch.float16, False, True),
        host.to(cuda),
    ):
        assert moved.is_cuda
    assert (cuda + 1).is_cuda and cuda[1:].is_cuda and torch.empty_like(cuda).is_cuda and cuda.new_zeros(2).is_cuda
    assert not (host + 1).is_cuda and not torch.zeros_like(host).is_cuda and not host.clone().is_cuda
    assert torch.zeros_like(cuda, device="cpu").device.type == "cpu" and torch.empty(3, device=0).is_cuda
    values, indices = torch.topk(cuda, 2)
    assert values.is_cuda and indices.is_cuda and type(torch.topk(cuda, 2)).__name__ == "topk"
    assert torch.empty(3, device="meta").device.type == "meta"


def test_transfers_copy_and_others_do_not(gpu):
    host = torch.zeros(3)
    cuda = host.cuda()
    cuda += 1
    assert host.tolist() == [0, 0, 0]
    back = cuda.cpu()
    cuda += 1
    assert back.tolist() == [1, 1, 1]
    assert cuda.cuda() is cuda and cuda.to("cuda") is cuda and host.cpu() is host and host.to("cpu") is host
    assert cuda.to("cuda", torch.float16).dtype == torch.float16


def test_device_tensors_are_aligned_and_their_bounds_exact(gpu):
    tensors = [torch.full((n,), 7, dtype=torch.uint8, device="cuda") for n in range(1, 60)]
    assert all(t.data_ptr() % 256 == 0 for t in tensors)
    assert all(t.tolist() == [7] * (i + 1) for i, t in enumerate(tensors))
    allocations = [gpu.gmem.find(t.data_ptr()) for t in tensors]
    assert [a.nbytes for a in allocations] == list(range(1, 60))


def test_autograd_and_modules_work(gpu):
    layer = torch.nn.Linear(3, 2).cuda()
    assert layer.weight.is_cuda and isinstance(layer.weight, torch.nn.Parameter)
    x = torch.ones(1, 3, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad.cpu(), layer.weight.detach().cpu().sum(0, keepdim=True))


def test_generators_and_defaults(gpu):
    a = torch.randn(4, generator=torch.Generator(device="cuda").manual_seed(5), device="cuda")
    b = torch.randn(4, generator=torch.Generator().manual_seed(5))
    assert a.is_cuda and torch.equal(a.cpu(), b)
    assert torch.Generator("cuda").manual_seed(5).device == torch.device("cuda", 0)
    assert torch.Generator().device == torch.device("cpu")
    torch.set_default_device("cuda")
    assert torch.zeros(2).is_cuda
    torch.set_default_device("cpu")
    assert not torch.zeros(2).is_cuda


def test_custom_ops_made_inside(gpu):
    @torch.library.custom_op("dsv4test::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x + torch.zeros(3, device="cuda")

    out = twice(torch.ones(3, device="cuda"))
    assert out.is_cuda and out.tolist() == [2, 2, 2]


def test_a_capture_looks_into_custom_ops_made_inside(gpu):
    @torch.library.custom_op("dsv4test::quiet", mutates_args=("x",))
    def quiet(x: torch.Tensor) -> None:
        assert len(torch.empty_like(x).view(-1)) == 3

    @torch.library.custom_op("dsv4test::loud", mutates_args=("x",))
    def loud(x: torch.Tensor) -> None:
        x.add_(1)

    x = torch.ones(3, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ops.dsv4test.quiet(x)
        with pytest.raises(LaunchError, match=r"torch.add_ .*captured"):
            torch.ops.dsv4test.loud(x)
    assert (x == 1).all()


def test_torch_cuda_and_bindings(gpu):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    properties = torch.cuda.get_device_properties("cuda")
    assert (properties.multi_processor_count, properties.shared_memory_per_block_optin) == (4, 227 * 1024)
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        event, later, never = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        event.record()
        later.record()
        torch.cuda.synchronize()
        torch.ones(3, device="cuda").record_stream(torch.cuda.current_stream())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        emulated_time._SAID.clear()
        assert event.elapsed_time(later) == pytest.approx(emulated_time.EVENT_MS)
        assert math.isnan(event.elapsed_time(never))
    assert ["no GPU's" in str(one.message) for one in said] == [True]
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
    with torch.accelerator.device_index(0):
        torch.accelerator.synchronize()
        assert torch.accelerator.current_device_index() == 0 and torch.accelerator.device_count() == 1
    assert driver.cuInit(0) == (driver.CUresult.CUDA_SUCCESS,)
    number = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    assert driver.cuDeviceGetAttribute(number, driver.CUdevice(0))[1] == 4
    assert runtime.cudaGetDeviceCount()[1] == 1
    with pytest.raises(LaunchError, match="device attribute 9999"):
        gpu.attribute(9999)
    assert cuda_api.NO_TIME != cuda_api.NO_TIME


@pytest.mark.parametrize(("binding", "prefix"), [(driver, "cuEvent"), (runtime, "cudaEvent")])
def test_events_of_the_bindings(gpu, binding, prefix):
    def call(name, *args):
        status, *values = getattr(binding, prefix + name)(*args)
        assert int(status) == 0
        return values

    flags = [0] if binding is driver else []
    (first,), (second,) = call("Create", *flags), call("Create", *flags)
    assert int(first) != int(second)
    assert call("Record", first, 0) == call("Record", second, 0) == call("Synchronize", second) == []
    (time,) = call("ElapsedTime", first, second)
    assert time == pytest.approx(emulated_time.EVENT_MS)
    assert call("Destroy", first) == call("Destroy", second) == []
    with pytest.raises(ArgumentError, match="an event that exists"):
        call("Record", first, 0)


def test_memory_of_the_bindings(gpu):
    _, address = runtime.cudaMalloc(100)
    assert gpu.gmem.find(address, 100) and gpu.gmem.find(address, 101) is None and address % 256 == 0
    runtime.cudaMemset(address, 3, 100)
    buffer = bytearray(100)
    runtime.cudaMemcpy(buffer, address, 100, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost)
    assert bytes(buffer) == b"\3" * 100
    with pytest.raises(MemoryFault):
        runtime.cudaMemset(address, 3, 101)
    runtime.cudaFree(address)
    assert gpu.gmem.find(address) is None
    with pytest.raises(ArgumentError):
        runtime.cudaFree(address)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_device_tensors_are_global_memory_for_the_dsl(gpu):
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert "gmem" in str(from_dlpack(torch.zeros(4, device="cuda")))
    assert "gmem" not in str(from_dlpack(torch.zeros(4)))
    with FakeTensorMode():
        assert "gmem" not in str(from_dlpack(torch.zeros(4)))
        assert "gmem" in str(from_dlpack(torch.zeros(4, device="cuda") + 1))


def test_tensors_that_name_no_device_are_on_the_device_by_default():
    early = torch.zeros(4)
    with emulator.device("sm_100a"):
        assert torch.zeros(4).is_cuda and early.is_cuda and not torch.zeros(4, device="cpu").is_cuda
        assert "gmem" in str(from_dlpack(early)) and "gmem" in str(from_dlpack(torch.zeros(4)))
    with emulator.device("sm_100a", shims=False):
        assert "gmem" in str(from_dlpack(early))


@pytest.mark.parametrize("default", ["cpu", "cuda"])
def test_a_tensor_made_of_a_tensor_is_where_that_is(default):
    with emulator.device("sm_100a"):
        torch.set_default_device(default)
        for device in ("cpu", "cuda"):
            made = torch.tensor(torch.ones(3, device=device))
            assert made.device.type == device and torch.tensor([made.sum()]).device.type == default
            assert torch.tensor(made, device="cpu").device.type == "cpu"


def test_a_fake_tensor_requires_its_gradient():
    with emulator.device("sm_100a"), torch._subclasses.FakeTensorMode():
        made = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
        assert made.requires_grad and made.is_cuda and not torch.tensor([1.0], device="cuda").requires_grad


def test_without_the_dsl_and_the_bindings_torch_finds_the_device(monkeypatch):
    """As in an environment with torch and Triton alone."""
    for module in (device, cuda_api):
        monkeypatch.setattr(module, "installed", lambda name: name == "torch")
    query, benchmark = driver.cuDeviceGetCount, cutlass.testing.benchmark
    with emulator.device("sm_90a"):
        assert torch.cuda.is_available() and torch.zeros(3, device="cuda").is_cuda
        assert driver.cuDeviceGetCount is query and cutlass.testing.benchmark is benchmark and not dsl._STATE.patched
    monkeypatch.setattr(device, "installed", lambda name: False)
    with pytest.raises(BackendUnavailable, match="scripts in the emulator need torch"):
        device.need_packages()


def test_without_shims_torch_is_left_alone():
    with emulator.device("sm_100a", shims=False):
        assert not torch.cuda.is_available() and torch.zeros(1).device.type == "cpu"


def test_a_benchmark_runs_its_kernel_once_and_measures_nothing(gpu):
    from cutlass import testing

    calls = []
    arguments = testing.JitArguments(1, b=2)
    time = testing.benchmark(lambda a, b: calls.append((a, b)), kernel_arguments=arguments, iterations=3)
    assert calls == [(1, 2)] and time != time
    made = testing.benchmark(lambda a, b: calls.append(b), workspace_generator=lambda: arguments, workspace_count=4)
    assert calls == [(1, 2)] and made != made
    testing.benchmark(calls.append, kernel_arguments=testing.JitArguments(3), warmup_iterations=0, iterations=0)
    assert len(calls) == 1


def test_an_autotuner_runs_every_configuration_and_takes_the_first(gpu):
    from cutlass import testing

    calls = []

    def make(x, width):
        return lambda: calls.append((x, width))

    chosen = testing.tune(make, {"width": [3, 1, 2]}, testing.JitArguments(7))
    assert calls == [(7, 3), (7, 1), (7, 2)] and chosen == {"width": 3}


def test_profilers_see_the_host_only(gpu):
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        torch.ones(4, device="cuda") + 1
    table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=20)
    assert "aten::add" in table and "CUDA total" not in table


def test_a_module_moves_with_its_buffers():
    """`Module.to` names the device first and gives None for a type that stays."""
    module = torch.nn.Linear(3, 5)
    module.register_buffer("counts", torch.arange(4))
    with emulator.device("sm_100a"):
        for type_, kept in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
            module.to("cuda", type_)
            assert module.weight.is_cuda and module.counts.is_cuda
            assert (module.weight.dtype, module.counts.dtype) == (kept, torch.int64)
        assert module.to("cpu").weight.device.type == "cpu"


def test_backward_passes_see_the_device():
    """Torch leaves the mode while it calls ``backward``; a kernel is launched from there all the same."""
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            seen.append((dy.is_cuda, dy.device.type, torch.empty(2, device=dy.device).is_cuda))
            return 2 * dy

    with emulator.device("sm_90a"):
        x = torch.ones(3, device="cuda", requires_grad=True)
        Double.apply(x).sum().backward()
        (grad,) = torch.autograd.grad(Double.apply(x).sum(), x)
        assert x.grad.tolist() == grad.tolist() == [2.0] * 3
    assert seen == 2 * [(True, "cuda", True)]
