"""Triton's launches in the emulator: arguments, descriptors, clusters, autotuning, scripts and their mistakes."""

import inspect
import math
import os
import sys

import pytest

from dsv4lib import emulator
from dsv4lib.emulator.checks import errors
from dsv4lib.emulator.errors import Deadlock, LaunchError, MemoryFault
from dsv4lib.emulator.sanitize import command
from dsv4lib.emulator.sanitize.command import Wish
from tests.cases import cases

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="Triton is not installed: ./dsv4 test --corpus installs and runs this")
pytest.importorskip("cutlass.cute")

from dsv4lib.emulator.driver import config, emulated_time, triton_driver  # noqa: E402
from dsv4lib.emulator.machine.policies import POLICIES  # noqa: E402
from tests.emulator.driver import triton_faults as faults  # noqa: E402
from tests.emulator.driver import triton_kernels as kernels  # noqa: E402

ARCHITECTURES = cases("sm_90a", "sm_100a", full=["sm_80"])


@pytest.fixture
def gpu(request, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with emulator.device(getattr(request, "param", "sm_90a"), checks="race", sm_count=2) as device:
        yield device


def scaled(n=500):
    x = torch.arange(n, dtype=torch.float32, device="cuda")
    out = torch.zeros_like(x)
    made = kernels.scale[(math.ceil(n / 128),)](x, out, n, 3.0, BLOCK=128)
    assert torch.equal(out, 3 * x)
    return made


@pytest.mark.parametrize("gpu", ARCHITECTURES, indirect=True)
def test_a_kernel_and_what_the_compiler_says_of_it(gpu):
    made = scaled()
    assert made.metadata.target.arch == int(gpu.arch.name.strip("sm_a"))
    assert 0 < made.n_regs <= 64 and made.n_spills == 0
    (launch,) = gpu.launches
    assert launch.request.grid == (4, 1, 1) and launch.request.block == (128, 1, 1) and not gpu.hazards


def test_devices_of_two_architectures_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for arch in ("sm_90a", "sm_100a", "sm_90a"):
        with emulator.device(arch) as device:
            scaled()
            assert device.launches[0].request.module.target == arch
    triton_driver_config = sys.modules["triton.runtime.driver"].driver
    assert triton_driver_config._active is None and triton_driver_config._default is None


def test_arguments_of_every_type(gpu):
    out = torch.zeros(11, dtype=torch.float64, device="cuda")
    seven = torch.full((1,), 7, dtype=torch.int32, device="cuda")
    one = torch.tensor(0.1, dtype=torch.float32).item()
    kernels.every_type[(1,)](out, -5, 2**31 - 3, -(2**40), 2**63 + 2048, 0.5, one, -2.25, (seven, 9), None, True)
    want = [-5, 2**31 - 3, -(2.0**40), 2.0**63 + 2048, 0.5, one, -2.25, 7, 9, 1, 1]
    assert out.tolist() == want
    assert [triton_driver.encoded(k, 1.5).hex() for k in ("fp16", "bf16", "fp64")] == [
        "003e",
        "c03f",
        "000000000000f83f",
    ]
    assert triton_driver.encoded("i8", -1) == b"\xff" and triton_driver.encoded("*i8", None) == bytes(8)
    with pytest.raises(LaunchError, match="complex"):
        triton_driver.encoded("complex", 1)
    with pytest.raises(TypeError, match="uint64 or have data_ptr"):
        triton_driver.encoded("*fp32", "x")
    with pytest.raises(TypeError, match="PyCUtensorMap"):
        triton_driver.encoded("nvTmaDesc", b"")


@pytest.mark.parametrize("gpu", cases("sm_90a", full=["sm_100a", "sm_80"]), indirect=True)
def test_descriptors_that_the_host_makes(gpu):
    """On sm_80, which has no TMA, Triton passes a descriptor taken apart."""
    x = torch.arange(50 * 72, dtype=torch.float32, device="cuda").reshape(50, 72)
    y = torch.full_like(x, -1)
    source, target = (kernels.TensorDescriptor.from_tensor(t, [16, 32]) for t in (x, y))
    kernels.copy_box[(4, 3)](source, target, M=16, N=32)
    assert torch.equal(y, 2 * x)
    kernels.copy_box[(1, 1)](*[kernels.TensorDescriptor.from_tensor(t, [128, 128]) for t in (x, y)], M=128, N=128)
    assert gpu.launches[-1].request.dynamic_smem > 48 << 10 or gpu.arch.name == "sm_80"
    assert torch.equal(y, 2 * x)


def test_a_cluster_and_a_cooperative_grid(gpu):
    x, out = torch.arange(1000, dtype=torch.float32, device="cuda"), torch.zeros(1, device="cuda")
    kernels.wide_sum[(1,)](x, out, 1000, BLOCK=1024, num_ctas=2)
    assert out.item() == x.sum().item()
    assert gpu.launches[-1].request.cluster == (2, 1, 1) and gpu.launches[-1].request.grid == (2, 1, 1)
    kernels.wide_sum[(1,)](x, out, 1000, BLOCK=1024, launch_cooperative_grid=True)
    assert gpu.launches[-1].request.attributes["cooperative"]
    kernels.wide_sum[(0,)](x, out, 1000, BLOCK=1024)
    assert len(gpu.launches) == 2


def test_autotuning_runs_each_configuration_once_and_takes_the_one_of_least_work(gpu):
    x = torch.zeros(300, device="cuda")
    kernels.tuned[lambda meta: (triton.cdiv(300, meta["BLOCK"]),)](x, 300)
    assert torch.equal(x, torch.ones_like(x))
    times = {64: [], 128: []}
    for launch in gpu.launches:
        sizes = {5: 64, 3: 128}
        time = emulated_time.milliseconds(launch.result, 2, config.ctas_per_sm(launch.request, gpu.arch))
        times[sizes[launch.request.grid[0]]].append(time)
    assert sorted(map(len, times.values())) == [1, 2] and times[64][0] != times[128][0]
    assert kernels.tuned.best_config.kwargs == {"BLOCK": min(times, key=lambda block: times[block][0])}


@pytest.mark.filterwarnings("ignore:times of the emulator")
def test_benchmarks_call_once_and_answer_emulated_time(gpu):
    calls = []
    bench, graph = triton.testing.do_bench, triton.testing.do_bench_cudagraph
    nothing = bench(lambda: calls.append(1))
    assert nothing == pytest.approx(emulated_time.EVENT_MS) == graph(lambda: calls.append(1), return_mode="min")
    several = bench(lambda: calls.append(1), quantiles=[0.5, 0.2, 0.8])
    assert several == pytest.approx([nothing] * 3) and len(calls) == 3
    assert len(bench(lambda: calls.append(1), return_mode="all")) == 1
    assert bench(scaled) > nothing + emulated_time.LAUNCH_MS


@pytest.mark.filterwarnings("ignore:times of the emulator")
def test_benchmarks_in_a_group_have_no_time():
    with emulator.devices(2, "sm_90a"):
        assert math.isnan(triton.testing.do_bench(lambda: None))
        assert all(map(math.isnan, triton.testing.do_bench(lambda: None, quantiles=[0.2, 0.8])))


def test_what_is_refused(gpu):
    x = torch.zeros(64, device="cpu")
    with pytest.raises(ValueError, match="cpu tensor"):
        kernels.scale[(1,)](x, x.cuda(), 64, 1.0, BLOCK=64)
    with pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
        kernels.copy_box[(1, 1)](
            *[kernels.TensorDescriptor(x.cuda(), [256, 256], [256, 1], [256, 256])] * 2, M=256, N=256
        )
    big = torch.zeros(64, device="cuda")
    with pytest.raises(MemoryFault, match="store of"):
        kernels.scale[(4,)](big, big, 512, 1.0, BLOCK=128)
    assert not gpu.launches


def test_a_race_between_programs(gpu):
    x, out = torch.arange(256, dtype=torch.int32, device="cuda"), torch.zeros(8, dtype=torch.int32, device="cuda")
    kernels.histogram[(2,)](x, out, 256, BLOCK=128)
    found = errors(gpu.hazards)
    assert {hazard.kind for hazard in found} == {"race_global"}
    assert "triton_kernels.py" in str(found[0])


SCRIPT = """
import torch, triton, triton.language as tl

@triton.jit
def count(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0)
    {body}

x = torch.arange(1000, dtype=torch.int32, device="cuda")
out = torch.zeros(1000, dtype=torch.int32, device="cuda")
count[(triton.cdiv(1000, 512),)](x, out, 1000, BLOCK=512)
print("out", out[:4].cpu().tolist())
"""
RACY = "tl.store(out + value % 8, tl.load(out + value % 8, mask=i < n) + 1, mask=i < n)"
ATOMIC = "tl.atomic_add(out + value % 8, 1, mask=i < n)"
UNMASKED, MASKED = "tl.store(out + i, value)", "tl.store(out + i, value, mask=i < n)"


@pytest.mark.parametrize(
    ("body", "code", "said", "printed"),
    [
        (RACY, 90, "ERROR race_global", "out"),
        (ATOMIC, 0, "", "out [125, 125, 125, 125]"),
        (UNMASKED, 91, "store of", ""),
        (MASKED, 0, "", "out [0, 1, 2, 3]"),
    ],
    ids=["race", "atomic", "no mask", "mask"],
)
def test_a_script_and_its_mistakes(monkeypatch, tmp_path, capfd, body, code, said, printed):
    script = tmp_path / "counts.py"
    script.write_text(SCRIPT.format(body=body))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # a script runs in a process of its own
    assert command.run(Wish("dsv4 sanitize", str(script), [], "sm_90a", {"checks": "race"})) == code
    out, error = capfd.readouterr()
    assert printed in out and said in error, error
    assert ("counts.py:8" in error) == (code != 0), error  # the line of the kernel


@pytest.mark.parametrize(("num_ctas", "grid"), [(1, 2), (2, 1), (2, 2)])
def test_a_wait_by_atomics_ends_or_is_a_deadlock(gpu, num_ctas, grid):
    """Its loop has barriers, which are no progress; the program that it waits for has not begun when it asks first."""
    flag, out = (torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(2))
    if grid == 2:
        kernels.ask[(grid,)](flag, out, 2, num_ctas=num_ctas)
        assert int(out[0]) == 7 and not errors(gpu.hazards)
        flag.zero_()
    with pytest.raises(Deadlock, match=r"CTA \(0, 0, 0\) warp 0: .*triton_kernels.py:\d+\): .*atom.global"):
        kernels.ask[(grid,)](flag, out, 3, num_ctas=num_ctas)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_faults_are_reported_with_their_lines_and_twins_are_silent(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = getattr(faults, name)
    source, first = inspect.getsourcelines(kernel.fn)
    marked = {number for number, line in enumerate(source, first) if "#!" in line}
    for options, kinds in zip(faults.FAULTS[name], ({"race_global"}, set()), strict=True):
        for schedule in POLICIES:
            with emulator.device("sm_90a", checks="sanitize", schedule=schedule) as device:
                x, out = (torch.zeros(1024, dtype=torch.int32, device="cuda") for _ in range(2))
                x[:512] = torch.arange(1, 513)
                kernel[(2,)](x, out, 600, BLOCK=128, **options)
                lines = {int(h.place.python.rpartition(":")[2]) for h in device.hazards}
                assert {h.kind for h in device.hazards} == kinds and lines <= marked, (schedule, device.hazards)
