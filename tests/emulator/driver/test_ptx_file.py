"""A kernel of a PTX file on numpy arrays: parameters by position, arrays back in place, refusals by name."""

import subprocess
import sys

import numpy as np
import pytest

from dsv4lib import emulator
from dsv4lib.emulator.driver import device, ptx_file, script
from dsv4lib.emulator.errors import EmulatorError, MemoryFault, PtxSyntaxError
from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.lab import cli

# y[i] = a x[i] + i for i < n
AXPY = """.version 8.7
.target TARGET
.address_size 64
.visible .entry axpy(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n)
{
.reg .pred %p; .reg .b32 %r<6>; .reg .b64 %rd<6>; .reg .f32 %f<5>;
ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.f32 %f1, [a]; ld.param.u32 %r1, [n];
mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
mad.lo.u32 %r5, %r2, %r3, %r4;
setp.ge.u32 %p, %r5, %r1; @%p bra DONE;
mul.wide.u32 %rd3, %r5, 4; add.u64 %rd4, %rd1, %rd3; add.u64 %rd5, %rd2, %rd3;
ld.global.f32 %f2, [%rd4]; cvt.rn.f32.u32 %f3, %r5; fma.rn.f32 %f4, %f1, %f2, %f3;
st.global.f32 [%rd5], %f4;
DONE: ret;
}
"""
TEXT = AXPY.replace("TARGET", "sm_100a")
SHAPE = ptx_file.Shape(grid=(3, 1, 1), block=(64, 1, 1))


def wanted(x, a):
    return (np.float32(a) * x.astype(np.float64) + np.arange(x.size)).astype(np.float32)


def test_arrays_are_changed_in_place():
    x, y = np.random.default_rng(0).standard_normal(150).astype(np.float32), np.full(163, 7, np.float32)
    before = x.copy()
    result = emulator.run_ptx(TEXT, [x, y, 2.5, 150], SHAPE)
    assert result.hazards == [] and result.instructions > 0
    np.testing.assert_allclose(y[:150], wanted(x, 2.5), rtol=1e-6)
    assert (y[150:] == 7).all() and (x == before).all()


@pytest.mark.parametrize(
    ("target", "arch"), [("sm_90a", "sm_90a"), ("sm_80", "sm_80"), ("sm_100f", "sm_100a"), ("sm_52", "sm_80")]
)
def test_the_device_is_what_the_target_runs_on(target, arch, monkeypatch):
    made = []
    make = ptx_file.make
    monkeypatch.setattr(ptx_file, "make", lambda name, **given: made.append(name) or make(name, **given))
    y = np.zeros(3, np.float32)
    ptx_file.run_ptx(AXPY.replace("TARGET", target), [y, y.copy(), 1.0, 3])
    assert made == [arch]


@pytest.mark.parametrize(
    ("values", "change", "error", "says"),
    [
        ([1, 2], {}, ArgumentError, "x (8 bytes)"),
        ([1, 2, 0.5, 2**32], {}, ArgumentError, "n=4294967296"),
        ([1, 2, "a", 3], {}, ArgumentError, "a='a'"),
        ([1, 2, True, 3], {}, ArgumentError, "a=True"),
        ([1, 2, 0.5, 3], {"entry": "axpi"}, ArgumentError, "axpy"),
        ([1, 2, 0.5, 3], {"arch": "sm_90a"}, EmulatorError, "compiled for sm_100a"),
        ([np.zeros(3, "f4"), np.zeros(2, "f4"), 0.5, 300], {"shape": SHAPE}, MemoryFault, ""),
        ([1, 2, 0.5, 3], {"text": TEXT.replace("sm_100a", "sm_999")}, ArgumentError, "target='sm_999'"),
        ([1, 2, 0.5, 3], {"text": TEXT.replace("sm_100a", "texmode")}, ArgumentError, "target='texmode'"),
        ([1, 2, 0.5, 3], {"text": "x"}, PtxSyntaxError, ""),
    ],
)
def test_refusals_name_what_is_wrong(values, change, error, says):
    given = {"text": TEXT, **change}
    with pytest.raises(error) as caught:
        ptx_file.run_ptx(values=values, **given)
    assert says in str(caught.value)


def test_words_of_the_command_line(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6, dtype=np.int16).reshape(2, 3).T)
    array = ptx_file.value(str(tmp_path / "x.npy"))
    assert array.flags.c_contiguous and array.shape == (3, 2) and array.dtype == np.int16
    assert ptx_file.value("float16[2,5]").shape == (2, 5) and ptx_file.value("-3") == -3
    (tmp_path / "bad.npy").write_bytes(b"no array")
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    for word in ("none.npy", tmp_path / "bad.npy", tmp_path / "object.npy", "float99[2]", "float32[99999999999]", "x"):
        with pytest.raises(ArgumentError):
            ptx_file.value(str(word))
    for text in ("", "0", "1,2,3,4", "-1", "1,,2", "a"):
        with pytest.raises(ArgumentError):
            ptx_file.dimensions("grid", text)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["dsv4", "emulate", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def test_the_command(tmp_path, monkeypatch, capsys):
    path, x = tmp_path / "k.ptx", np.linspace(-1, 1, 130, dtype=np.float32)
    path.write_text(TEXT)
    np.save(tmp_path / "x.npy", x)
    options = ("--grid", "3", "--block", "64", "--save", tmp_path)
    assert run(monkeypatch, *options, path, tmp_path / "x.npy", "float32[150]", "0.5", "130") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("0 hazards") and said[1].startswith("argument 0: float32[130]")
    assert said[1].endswith("as it was") and said[2].endswith(", changed") and len(said) == 3
    np.testing.assert_allclose(np.load(tmp_path / "argument_1.npy")[:130], wanted(x, 0.5), rtol=1e-6)
    assert run(monkeypatch, *options, path, tmp_path / "x.npy", "float32[10]", "0.5", "130") == script.FAILED
    assert capsys.readouterr().err.startswith("MemoryFault: ")
    assert run(monkeypatch, path, "1") == 2 and "one for each parameter" in capsys.readouterr().err
    assert run(monkeypatch, "--save", tmp_path / "none", path, "1") == 2


@pytest.mark.parametrize("lacking", ["torch", "cutlass"])
def test_a_script_without_torch_or_the_dsl_is_refused(lacking, tmp_path, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text("print(1)")
    find = device.importlib.util.find_spec
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None if name == lacking else find(name))
    monkeypatch.setattr(subprocess, "Popen", None)  # it is refused before a process starts
    package = {"torch": "torch", "cutlass": "nvidia-cutlass-dsl"}[lacking]
    with pytest.raises(BackendUnavailable, match=f"need {package}: pip install"):
        script.emulate(path)
    with pytest.raises(BackendUnavailable, match=package), emulator.device("sm_100a"):
        pass
