"""Compiling without a GPU: results, honesty of the resources read from a cubin, errors, nothing left over."""

import hashlib
import os
import re
import stat
import subprocess
import sys

import cutlass
import cutlass.cute as cute
import pytest

from dsv4lib import backends, env
from dsv4lib.dsl import compile as compile_module
from dsv4lib.dsl.compile import ARCHS, CompileError, compile_for
from dsv4lib.dsl.cubin import read_cubin
from dsv4lib.errors import ArgumentError, DSV4Error


class Gather:
    """Writes and reads an array of the thread at run-time indices, which registers cannot do: it is in local memory.

    ``repeated`` additions to ``x`` stand one after the other in its code.
    """

    def __init__(self, repeated=0):
        self.repeated = repeated

    def __repr__(self):
        return "Gather"

    def fake_args(self):
        fake = cute.runtime.make_fake_compact_tensor
        return fake(cutlass.Float32, (96,)), fake(cutlass.Int32, (96,))

    @cute.jit
    def __call__(self, x: cute.Tensor, index: cute.Tensor):
        self.kernel(x, index).launch(grid=(1, 1, 1), block=(48, 2, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, index: cute.Tensor):
        t, _, _ = cute.arch.thread_idx()
        table = cute.make_rmem_tensor(64, cutlass.Float32)
        table.fill(1.0)
        for i in cutlass.range(48, unroll=1):
            table[index[i]] += x[i]
        x[t] = table[index[t]]
        for i in cutlass.range_constexpr(self.repeated):
            x[i] += 1.0


@pytest.fixture(scope="module")
def gather():
    kernel = Gather()
    return compile_for(kernel, kernel.fake_args(), "sm_90a")


def test_local_memory_is_reported_and_spills_are_then_unknown(gather):
    assert gather.local_bytes >= 64 * 4
    assert gather.spills is None
    assert gather.threads == 96
    assert gather.smem_bytes == 0
    assert 8 <= gather.registers <= 255


def test_instructions_are_counted(gather):
    """Each unrolled addition is a load, an add and a store; another reading of the text finds as many."""
    counts = [compile_for(kernel := Gather(n), kernel.fake_args(), "sm_90a").instructions for n in (20, 30)]
    assert counts[1] - counts[0] == 3 * 10
    code = re.sub(r"//.*", "", gather.ptx[gather.ptx.index(".entry") :])
    statements = (s.split(":")[-1].strip().split("\n")[-1].strip() for s in code.split(";"))
    assert gather.instructions == sum(1 for s in statements if s and s[0] not in ".{})")


def test_artifacts_are_of_the_asked_architecture(gather):
    assert gather.arch == "sm_90a"
    assert "\n.target sm_90a\n" in gather.ptx
    assert gather.cubin[:4] == b"\x7fELF"
    assert f".entry {gather.name}(" in gather.ptx
    assert "test_compile.py" in gather.ptx  # line info points here


def test_architectures_are_those_the_back_ends_know():
    assert set(ARCHS) == set(backends.CAPABILITY)


@pytest.mark.parametrize("arch", ["sm_100", "sm_10", "100a", "", None, "sm_90a --keep-sass"])
def test_unknown_architecture(arch):
    with pytest.raises(ArgumentError, match="sm_100a") as caught:
        compile_for(Gather(), Gather().fake_args(), arch)
    assert caught.value.name == "arch"


def test_a_kernel_the_compiler_refuses_gives_one_plain_line():
    from dsv4lib.ops.gemm_tile.sm100 import GemmTile

    with pytest.raises(
        CompileError, match=r"GemmTile\(bf16, fp32, 128, 4\) does not compile for sm_90a: .*sm_90a"
    ) as e:
        compile_for(GemmTile(), GemmTile().fake_args(), "sm_90a")
    message = str(e.value)
    assert "\n" not in message and "\x1b" not in message and str(env.root()) not in message
    assert isinstance(e.value, DSV4Error)


def test_missing_dsl_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
    with pytest.raises(CompileError, match=r"cannot be imported.*nvidia-cutlass-dsl\[cu13\]"):
        compile_for(None, (), "sm_100a")


def test_artifacts_pass_through_a_private_folder_that_is_gone_afterwards(monkeypatch):
    seen = {}

    def spy(kernel, *args, options):
        seen["folder"] = options.split("--dump-dir=")[1]
        seen["mode"] = stat.S_IMODE(os.stat(seen["folder"]).st_mode)
        raise ValueError("stop here")

    monkeypatch.setattr(cute, "compile", spy)
    with pytest.raises(CompileError, match="stop here"):
        compile_for(Gather(), (), "sm_100a")
    assert seen["mode"] == 0o700
    assert not os.path.exists(seen["folder"])


SCRIPT = """
import hashlib
from dsv4lib.dsl.compile import compile_for
from dsv4lib.ops.gemm_tile.sm100 import GemmTile
kernel = GemmTile()
done = compile_for(kernel, kernel.fake_args())
hashes = [hashlib.sha256(x).hexdigest() for x in (done.ptx.encode(), done.cubin)]
print(*hashes, done.smem_bytes)
"""


def compile_elsewhere(tmp_path, **extra):
    folder = tmp_path / "work"
    folder.mkdir()
    path = os.pathsep.join([str(env.root()), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), **extra}
    run = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_cold_compile_is_reproducible_and_leaves_no_file(tmp_path):
    """Two fresh processes, hash seeds and assumed machines; a GPU of another kind must not change the result."""
    from dsv4lib.ops.gemm_tile.sm100 import GemmTile

    here = compile_for(GemmTile(), GemmTile().fake_args())
    expected = [hashlib.sha256(x).hexdigest() for x in (here.ptx.encode(), here.cubin)] + [str(here.smem_bytes)]
    for seed, arch in (("1", "sm_90a"), ("2", "sm_100a")):
        home = tmp_path / seed
        home.mkdir()
        assert compile_elsewhere(home, PYTHONHASHSEED=seed, CUTE_DSL_ARCH=arch) == expected
        assert [p for p in home.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("damage", ["not elf", "cut", "no kernel"])
def test_broken_cubins_are_refused(gather, damage):
    broken = {
        "not elf": b"hello" * 100,
        "cut": gather.cubin[: len(gather.cubin) // 3],
        "no kernel": gather.cubin.replace(b".text.", b".test."),
    }[damage]
    with pytest.raises(ArgumentError) as caught:
        read_cubin(broken)
    assert caught.value.name == "cubin"


def test_every_truncation_is_refused_or_harmless(gather):
    """No crash and no other exception, wherever the file ends; the same resources if they could be read at all."""
    whole = read_cubin(gather.cubin)
    for size in range(0, len(gather.cubin), 997):
        try:
            assert read_cubin(gather.cubin[:size]) == whole
        except ArgumentError:
            pass


def test_launch_smem_is_none_where_the_host_code_is_not_understood():
    assert compile_module._launch_smem("nothing here") is None
