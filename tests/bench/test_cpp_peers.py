"""Compiled host code runs in the emulator: launches, clusters, errors; and FlashMLA and DeepGEMM, if given.

The first part compiles a package made here. The second skips each case whose checkout is not named by the environment.
"""

import csv
import shutil
import subprocess

import pytest
import torch

from dsv4lib import emulator
from dsv4lib.bench.cpp_peers import __main__ as command
from dsv4lib.bench.cpp_peers import build, cases
from dsv4lib.bench.cpp_peers.build import BuildError, Built, Checkout, Entry
from dsv4lib.bench.cpp_peers.library import Library, PeerError
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.errors import BackendUnavailable

HEADER = """
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdexcept>
namespace small {
struct Params { int n; float factor; const float* x; float* y; long long offset; bool twice; };
__global__ void scale(Params p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (p.n < 0) asm("trap;");
    if (i < p.n) p.y[i + p.offset] = p.x[i] * p.factor;
}
__global__ void __cluster_dims__(1) ranks(float* y) {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) y[blockIdx.x] += rank;
}
__global__ void ranks_of(float* y) {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) y[blockIdx.x] += 100 * rank;
}
inline void run(const Params& p) {
    if (p.factor == 0) throw std::runtime_error("factor must not be 0");
    scale<<<(abs(p.n) + 63) / 64, 64>>>(p);
    if (!p.twice) return;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim = {2, 1, 1};
    cudaLaunchConfig_t config = {dim3(4), dim3(32), 0, 0, cluster, 1};
    if (cudaLaunchKernelEx(&config, ranks_of, p.y) != cudaSuccess) throw std::runtime_error("not launched");
}
}
"""
FIELDS = ("n", "factor", "x", "y", "offset", "twice")
EXACT = ("operands", "errors", "lints", "schedules")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """An entry into a package of one header."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "small.cuh").write_text(HEADER)
    (tmp_path / "cutlass" / "include" / "cutlass").mkdir(parents=True)
    (tmp_path / "cutlass" / "include" / "cutlass" / "version.h").write_text("")
    monkeypatch.setenv("DSV4_SMALL", str(tmp_path))
    monkeypatch.setenv("DSV4_CUTLASS", str(tmp_path / "cutlass"))
    checkout = Checkout("small", "DSV4_SMALL", ("package",))
    return Entry(checkout, "sm_90a", ("small.cuh",), "small::Params", FIELDS, "small::run(p)")


def test_a_missing_checkout_is_named(monkeypatch, tmp_path, small):
    monkeypatch.setenv("DSV4_SMALL", str(tmp_path / "none"))
    with pytest.raises(BackendUnavailable, match=r"DSV4_SMALL: .*none has no folder package"):
        small.checkout.root()
    monkeypatch.delenv("DSV4_SMALL")
    with pytest.raises(BackendUnavailable, match="DSV4_SMALL does not name a checkout of small"):
        small.checkout.root()


def test_the_commit_is_of_the_checkout_alone(tmp_path, small):
    def git(*command):
        user = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", str(tmp_path), *user, *command], check=True, capture_output=True)

    assert small.checkout.commit() == ""
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    first = small.checkout.commit()
    assert len(first) == 9 and build.CUTLASS.commit() == ""  # a folder inside that clone
    (tmp_path / "package" / "small.cuh").write_text("")
    assert small.checkout.commit() == first + "+"


def test_the_object_depends_on_compiler_and_cutlass(tmp_path, small, monkeypatch):
    """With a stand-in for nvcc, which writes empty files."""
    compiler = tmp_path / "nvcc"
    text = """#!/bin/sh
if [ "$1" = --version ]; then echo VERSION; exit; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
: > peer.ptx
"""

    def built(version="one"):
        compiler.write_text(text.replace("VERSION", version))
        compiler.chmod(0o755)
        return build.build(small).library

    monkeypatch.setenv("DSV4_NVCC", str(compiler))
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "cache"))
    first = built()
    assert built() == first and built("two") != first
    (tmp_path / "cutlass" / "include" / "cutlass" / "more.inl").write_text("int x;")
    assert built() != first
    with pytest.raises(BuildError, match="small does not load"):
        monkeypatch.setattr("dsv4lib.bench.cpp_peers.library.binary.parsed", lambda text: None)
        Library(small, Built(first, ""))
    compiler.write_text("#!/bin/sh\nsleep 5\n")
    monkeypatch.setattr(build, "LIMIT_S", 0.1)
    with pytest.raises(BuildError, match=r"longer than 0.1 s"):
        build.build(small)


def test_a_case_that_fails_stops_no_other_and_is_not_recorded(tmp_path, monkeypatch, capsys):
    names = ["fails", "wrong", "right"]

    def row(name):
        if name == "fails":
            raise BuildError("nvcc says no")
        said = {"problems": ["y: wrong"] if name == "wrong" else [], "texts": []}
        return {**dict.fromkeys(command.COLUMNS, ""), "case": name, **said}

    monkeypatch.setattr(command, "CASES", {name: name for name in names})
    monkeypatch.setattr(command, "row", row)
    monkeypatch.setattr(command, "TABLE", tmp_path / "table.csv")
    assert command.main(["--record"]) == 1
    assert "fails: nvcc says no" in capsys.readouterr().out
    with command.TABLE.open() as file:
        assert [one["case"] for one in csv.DictReader(file)] == ["right"]


def test_words_are_those_of_the_fields():
    raw = build.words(("b", "f", "p"), {"f": 0.5, "b": -3, "p": 1 << 40})
    assert raw == [2**64 - 3, 0x3FE0000000000000, 1 << 40, 0, 1, 0]
    with pytest.raises(BuildError, match="'q'"):
        build.words(("b",), {"b": 1, "q": 2})


def test_names_of_kernels_are_cut():
    assert cases.short("_ZN4smxx6decode28flash_fwd_mla_combine_kernelIN7cutlass6half_tELi512EEEv13CombineParams") == (
        "flash_fwd_mla_combine_kernel"
    )
    assert cases.short("_Z5scalePf") == "scale" and cases.short("plain") == "plain"
    assert cases.short("kernel_cutlass_kernel_Combine512_bf16_4_sink") == "Combine512"


def test_infinities_agree_or_count():
    inf = float("inf")
    given = torch.tensor([1.0, inf, 2.0])
    assert cases.Output("o", given, torch.tensor([1.0, inf, 2.0]), 0.1, "").error() == 0
    for wrong in ([1.0, 5.0, 2.0], [1.0, -inf, 2.0], [inf, inf, 2.0], [float("nan"), inf, 2.0]):
        assert not cases.Output("o", torch.tensor(wrong), given, 0.1, "").error() < 1
    assert cases.Output("o", given[:2], given, 0.1, "").error() == inf


@pytest.mark.full  # nvcc takes several CPU-seconds
def test_host_code_of_a_package_runs(small, tmp_path, monkeypatch):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "cache"))
    library = Library(small, build.build(small))
    x, y = torch.randn(100), torch.zeros(110)
    values = {"n": 100, "factor": 3.0, "x": x, "y": y, "offset": 7, "twice": True}
    with emulator.device("sm_90a", shims=False, checks="race") as gpu:
        library(values)
        want = torch.zeros(110)
        want[7:107] = x * 3
        want[:4] += torch.tensor([0.0, 100.0, 0.0, 100.0])
        assert torch.equal(y, want) and len(gpu.launches) == 2 and not gpu.hazards
        assert [cases.short(one.request.kernel_name) for one in gpu.launches] == ["scale", "ranks_of"]
        library({**values, "factor": 2, "twice": False})  # a whole number for a float
        assert torch.equal(y[7:107], x * 2)
        with pytest.raises(PeerError, match="small: a double for a field that is none"):
            library({**values, "offset": 7.0})
        with pytest.raises(PeerError, match="small: factor must not be 0"):
            library({**values, "factor": 0.0})
        with pytest.raises(EmulatorError):
            library({**values, "n": -5})
        with pytest.raises(BuildError, match="offset"):
            library({name: value for name, value in values.items() if name != "offset"})
    kept = build.build(small).library
    (tmp_path / "package" / "small.cuh").write_text(HEADER.replace("p.factor;", "-p.factor;"))
    assert build.build(small).library.parent != kept.parent  # another header is another object
    (tmp_path / "package" / "small.cuh").write_text(HEADER.replace("long long offset", "long long first"))
    with pytest.raises(BuildError, match="offset"):
        build.build(small)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", command.CASES)
def test_a_case_is_as_it_says(name):
    """Numbers, bits under every schedule, kinds of hazards; and the committed row."""
    case = command.CASES[name]
    try:
        seen = command.row(case)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert not seen["problems"], "\n".join([*seen["problems"], *seen["texts"]])
    with command.TABLE.open() as file:
        stored = {one["case"]: one for one in csv.DictReader(file)}[name]
    assert {key: seen[key] for key in EXACT} == {key: stored[key] for key in EXACT}
