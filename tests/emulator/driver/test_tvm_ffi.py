"""The tvm-ffi calling convention; needs apache-tvm-ffi, which only the corpus of other people's kernels brings."""

import pytest
import torch

cute = pytest.importorskip("cutlass.cute")
pytest.importorskip("tvm_ffi")
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor  # noqa: E402

from dsv4lib import emulator  # noqa: E402
from dsv4lib.emulator.errors import LaunchError, MemoryFault  # noqa: E402


@cute.kernel
def add_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    y[block * 32 + thread] = x[block * 32 + thread] + 2.0


@cute.jit
def add(x: cute.Tensor, y: cute.Tensor):
    add_kernel(x, y).launch(grid=[2, 1, 1], block=[32, 1, 1])


def fake():
    return make_fake_compact_tensor(cute.Float32, (cute.sym_int(),), assumed_align=16)


def test_torch_tensors_go_straight_in():
    with emulator.device("sm_100a") as gpu:
        compiled = cute.compile(add, fake(), fake(), options="--enable-tvm-ffi")
        x, y = torch.arange(64.0, device="cuda"), torch.zeros(64, device="cuda")
        for _ in range(2):
            compiled(x, y)
        assert torch.equal(y.cpu(), torch.arange(64.0) + 2) and len(gpu.launches) == 2


def test_example_tensors():
    with emulator.device("sm_100a"):
        x, y = torch.arange(64.0, device="cuda"), torch.zeros(64, device="cuda")
        wrapped = [from_dlpack(t, enable_tvm_ffi=True).mark_layout_dynamic() for t in (x, y)]
        compiled = cute.compile(add, *wrapped, options="--enable-tvm-ffi")
        compiled(*wrapped)
        assert torch.equal(y.cpu(), torch.arange(64.0) + 2)


def test_the_real_checks_stay():
    with emulator.device("sm_100a"):
        compiled = cute.compile(add, fake(), fake(), options="--enable-tvm-ffi")
        good = torch.zeros(64, device="cuda")
        for bad in (torch.zeros(64, 1, device="cuda"), torch.zeros(64, dtype=torch.float16, device="cuda")):
            with pytest.raises((TypeError, ValueError)):
                compiled(good, bad)
        with pytest.raises(ValueError, match="Misaligned"):
            compiled(good, torch.zeros(68, device="cuda")[1:65])


def test_errors_reach_the_caller():
    with emulator.device("sm_100a"):
        compiled = cute.compile(add, fake(), fake(), options="--enable-tvm-ffi")
        with pytest.raises(MemoryFault, match="outside every allocation"):
            compiled(torch.zeros(64, device="cuda"), torch.zeros(40, device="cuda"))
        x = torch.ones(64, device="cuda")
        compiled(x, x)
        assert x.cpu().eq(3).all()


def test_functions_from_outside_are_refused():
    compiled = cute.compile(add, fake(), fake(), options="--enable-tvm-ffi --gpu-arch sm_100a")
    if compiled.engine is None:
        pytest.skip("this machine's DSL built no engine for sm_100a")
    with emulator.device("sm_100a"), pytest.raises(LaunchError, match="compiled outside"):
        compiled(torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda"))


def test_what_was_compiled_here_stays_here(tmp_path):
    """It is exported to no file, and refuses to run when the device is gone."""
    with emulator.device("sm_100a"):
        compiled = cute.compile(add, fake(), fake(), options="--enable-tvm-ffi")
        x, y = torch.arange(64.0), torch.zeros(64)
        with pytest.raises(LaunchError, match="must not be exported"):
            compiled.export_to_c(object_file_path=str(tmp_path / "add.o"), function_name="add")
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(Exception, match="No such"):
            cute.runtime.load_module(str(tmp_path / "add.o"), enable_tvm_ffi=True)
        (tmp_path / "add.o").touch()
        with pytest.raises(LaunchError, match="compiled for a GPU"):
            cute.runtime.load_module(str(tmp_path / "add.o"), enable_tvm_ffi=True)
    with pytest.raises(RuntimeError, match="compiled for the emulator"):
        compiled(x, y)
