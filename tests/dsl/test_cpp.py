"""CUDA C++ kernels: compiled for every architecture, records packed as C++ lays them out, mistakes named."""

import struct
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4lib import backends, nvrtc
from dsv4lib.dsl.compile import ARCHS
from dsv4lib.dsl.cpp import CppKernel, Edit, Float32, Int32, Int64, Uint32, compile_cpp, pack, places, tensors
from dsv4lib.errors import ArgumentError
from tests.emulated import emulated

SOURCE = """#include "dsv4.cuh"
extern "C" __global__ void mixed(int a, float* out, unsigned b, long long c, float d, const float* none) {
  extern __shared__ float buffer[];
  buffer[threadIdx.x] = a + d;
  wait_for_predecessor();
  if (threadIdx.x < N) out[threadIdx.x] = buffer[threadIdx.x] + b + c + (none != nullptr);
}
"""


class Mixed(NamedTuple):
    a: Int32
    out: Tensor
    b: Uint32
    c: Int64
    d: Float32
    none: Tensor | None


@pytest.fixture
def kernel(tmp_path):
    path = tmp_path / "mixed.cu"
    path.write_text(SOURCE)
    return CppKernel(path, "mixed", Mixed, 64, smem_bytes=256, defines=(("N", 40),))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_is_compiled_for_every_architecture(kernel, arch):
    code = compile_cpp(kernel, arch)
    assert f".target {arch}" in code.ptx and code.cubin[:4] == b"\x7fELF" and code.name == "mixed"
    assert code.local_bytes == 0 and 0 < code.registers <= 32 and 0 < code.instructions < 100
    assert (code.threads, code.smem_bytes) == (64, 256)


def test_records_lie_as_the_kernel_reads_them(kernel):
    out = torch.zeros(64)
    call = Mixed(-3, out, 2**32 - 1, 1 << 40, 0.5, None)
    block = pack(kernel, call)
    assert places(kernel) == [0, 8, 16, 24, 32, 40] and tensors(call) == [out]
    assert block == struct.pack("<i4xQI4xqf4xQ", -3, out.data_ptr(), 2**32 - 1, 1 << 40, 0.5, 0)
    code = compile_cpp(kernel, "sm_90a")
    with emulated("sm_90a"):
        small = Mixed(-3, out, 7, 100, 0.5, out)
        backends.enqueue_ptx(
            code.ptx, code.name, (1, 1, 1), (64, 1, 1), pack(kernel, small), tensors(small), dynamic_smem=256
        )
    assert out.tolist() == [-3 + 0.5 + 7 + 100 + 1] * 40 + [0] * 24


def test_values_that_a_record_cannot_hold_are_named(kernel):
    out = torch.zeros(64)
    good = Mixed(1, out, 2, 3, 0.5, None)
    for bad, name in (
        ({"a": 1 << 31}, "a"),
        ({"a": 0.5}, "a"),
        ({"b": -1}, "b"),
        ({"out": 5}, "out"),
        ({"d": "x"}, "d"),
        ({"d": 1e39}, "d"),
        ({"d": torch.tensor(0.5)}, "d"),
        ({"c": torch.tensor(3)}, "c"),
    ):
        with pytest.raises(ArgumentError, match=f"{name}="):
            pack(kernel, good._replace(**bad))
    with pytest.raises(ArgumentError, match="call"):
        pack(kernel, tuple(good))


def test_a_record_that_is_not_the_kernels_is_refused(kernel):
    class Shorter(NamedTuple):
        a: Int32
        out: Tensor

    class Wider(NamedTuple):
        a: Int64
        out: Tensor
        b: Uint32
        c: Int64
        d: Float32
        none: Tensor | None

    class Unknown(NamedTuple):
        a: int

    for record, words in ((Shorter, "Shorter"), (Wider, "Wider"), (Unknown, "a=")):
        with pytest.raises(ArgumentError, match=words):
            compile_cpp(CppKernel(kernel.source, "mixed", record, 64, defines=kernel.defines), "sm_90a")


def test_mistakes_are_named(kernel, tmp_path):
    def with_(**changes):
        return CppKernel(**{**vars(kernel), **changes})

    for changes, words in (
        ({"source": tmp_path / "none.cu"}, "source"),
        ({"entry": "other"}, "entry"),
        ({"edits": (Edit("nowhere", ""),)}, "edits"),
        ({"edits": (Edit("threadIdx.x", ""),)}, "edits"),
    ):
        with pytest.raises(ArgumentError, match=words):
            compile_cpp(with_(**changes), "sm_90a")
    for changes, words in (({"threads": 48}, "threads"), ({"defines": (("n", 1),)}, "defines")):
        with pytest.raises(ArgumentError, match=words):
            with_(**changes)
    with pytest.raises(ArgumentError, match="arch"):
        compile_cpp(kernel, "sm_70")
    with pytest.raises(nvrtc.CompileError, match=r"(?s)mixed.cu.*mixed\.cu\(4\): error"):
        compile_cpp(with_(edits=(Edit("a + d", "a +"),)), "sm_90a")


def test_a_file_with_host_code_is_one_for_nvcc(kernel, tmp_path):
    """The advice is for headers of the C++ library alone: another one may be a wrong folder."""
    path = tmp_path / "program.cu"
    for header, advice in (("iostream", True), ("kittens.cuh", False)):
        path.write_text(f"#include <{header}>\n__global__ void kernel() {{}}\n")
        with pytest.raises(nvrtc.CompileError, match=f'source file "{header}"') as refused:
            nvrtc.compile_file(path, "sm_90a")
        assert ("nvcc -ptx -lineinfo -arch=sm_90a -o program.ptx program.cu" in str(refused.value)) == advice


def test_an_injected_fault_changes_the_code(kernel):
    broken = CppKernel(**{**vars(kernel), "edits": (Edit("  wait_for_predecessor();\n", ""),)})
    whole, less = (compile_cpp(one, "sm_90a").ptx for one in (kernel, broken))
    assert "griddepcontrol.wait" in whole and "griddepcontrol.wait" not in less
