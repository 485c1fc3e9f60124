"""The command: exit codes, where reports go, a racy kernel and its twin in one command each, scripts as before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv4lib import nvrtc
from dsv4lib.emulator.gpu import module as gpu
from dsv4lib.emulator.sanitize import command
from dsv4lib.emulator.sanitize.command import Wish
from dsv4lib.errors import ArgumentError, BackendUnavailable
from tests.emulator.sanitize.kernels import DESCRIPTION, HEADER, SOURCE, write
from tests.emulator.sanitize.test_findings import check_sarif

ROOT = Path(__file__).resolve().parents[3]


def wish(target, checks="race", arguments=(), arch="auto", **options):
    settings = {"checks": checks, **options.pop("settings", {})}
    return Wish("dsv4 sanitize", str(target), arguments, arch, settings, **options)


def dsv4(*arguments, **environment):
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    code = "from dsv4lib.lab.cli import sanitize_main; sanitize_main()"
    program = ["-c", code] if arguments[0] == "dsv4-sanitize" else ["-m", "dsv4lib.lab.cli", arguments[0]]
    command = [sys.executable, *program, *map(str, arguments[1:])]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("barrier", "code"), [(False, 90), (True, 0)])
@pytest.mark.parametrize("name", ["sanitize", pytest.param("dsv4-sanitize", marks=pytest.mark.full)])
def test_a_racy_kernel_and_its_twin_in_one_command_each(tmp_path, barrier, code, name):
    done = dsv4(name, write(tmp_path, barrier))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert ("ERROR race_shared" in done.stderr) == ("fix     a barrier between" in done.stderr) == (not barrier)
    assert (
        "out f32 64: min 31, max 95, mean 63; first 95, 95" in done.stderr
    ) == barrier and "Traceback" not in done.stderr


def test_emulate_runs_ptx_without_the_race_detector(tmp_path):
    done = dsv4("emulate", write(tmp_path))
    assert done.returncode == 0 and "0 errors, 0 lints" in done.stderr, done.stderr


def test_describe_prints_a_description_that_runs(tmp_path):
    path = write(tmp_path, barrier=True)
    done = dsv4("sanitize", "--describe", path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (tmp_path / "sum.toml").write_text(done.stdout)
    assert command.run(wish(path)) == 0


EXPECTED = DESCRIPTION.replace('fill = "nan"', 'fill = "nan"\nexpect = {tensor = "want"}') + "[tensors.want]\n"


def test_expected_values(tmp_path, capfd, monkeypatch):
    want = np.arange(64) ^ 32
    np.save(tmp_path / "want.npy", (want + 63 - np.arange(64)).astype(np.float32))
    path = write(tmp_path, True, EXPECTED + 'file = "want.npy"\n')
    assert command.run(wish(path)) == 0
    path = write(tmp_path, True, EXPECTED + "shape = [64]\n")
    assert command.run(wish(path, form="sarif")) == command.WRONG
    log = json.loads(capfd.readouterr().out)
    check_sarif(log)
    assert [result["ruleId"] for result in log["runs"][0]["results"]] == ["unexpected_value"]
    assert command.run(wish(path)) == command.WRONG
    said = capfd.readouterr().err
    assert "out is not as expected in 64 elements, first at (0,): 95.0 instead of 0.0" in said
    assert "1 tensor not as expected" in said
    path = write(tmp_path, True, EXPECTED + "shape = [63]\n")
    monkeypatch.setattr(gpu.Kernel, "launch", lambda *given, **options: pytest.fail("it was launched"))
    with pytest.raises(ArgumentError, match="tensors.out.expect"):
        command.run(wish(path))


def test_reports_go_where_they_should(tmp_path, capfd):
    path, output, saved = write(tmp_path), tmp_path / "report", tmp_path / "out.npz"
    for form in ("text", "json", "sarif"):
        assert command.run(wish(path, form=form, output=output, save=saved)) == 90
        assert capfd.readouterr() == ("", "")
        text = output.read_text()
        assert "race_shared" in text and (form == "text") == text.startswith("dsv4 sanitize: ")
        if form == "sarif":
            check_sarif(json.loads(text))
        if form == "json":
            found = json.loads(text)
            assert (found["exit_code"], found["arch"], found["checks"]) == (90, "sm_90a", "race")
            assert found["findings"][0]["place"]["line"] in (3, 4) and found["launches"][0]["instructions"] > 0
    with np.load(saved) as arrays:
        assert set(arrays) == {"x", "out"} and np.array_equal(arrays["x"], np.arange(64))


def test_a_launch_that_is_stopped(tmp_path, capfd):
    path = write(tmp_path, True, DESCRIPTION.replace("shape = [64]", "shape = [32]"))
    assert command.run(wish(path, form="json")) == 91
    found = json.loads(capfd.readouterr().out)["findings"]
    assert found[0]["kind"] == "memory_fault" and found[0]["fix"]
    assert "past the last byte of out (32,) f32" in found[0]["message"]
    assert command.run(wish(path, settings={"instruction_limit": 5})) == 91
    assert "ERROR limit_exceeded" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ptx", "words"),
    [
        (HEADER + ".visible .entry sum(.param .u64 a, .param .u64 b) { frobnicate.u32 %r1; ret; }", "frobnicate"),
        (HEADER + ".frobnicate;", "unknown directive"),
        (HEADER.replace("sm_90", "sm_120") + ".visible .entry sum(.param .u64 a, .param .u64 b) { ret; }", "sm_120"),
    ],
)
def test_ptx_that_cannot_run_is_told_apart_from_what_is_wrong_with_it(tmp_path, capfd, ptx, words):
    path = write(tmp_path)
    path.write_text(ptx)
    assert command.run(wish(path)) == 92
    said = capfd.readouterr().err
    assert said.startswith("dsv4 sanitize: ") and words in said
    for form in ("sarif", "json"):
        assert command.run(wish(path, form=form)) == 92
        log = json.loads(capfd.readouterr().out)
        if form == "json":
            assert words in log["refusal"] and log["findings"] == []
            continue
        check_sarif(log)
        (invocation,) = log["runs"][0]["invocations"]
        assert not invocation["executionSuccessful"] and log["runs"][0]["results"] == []
        assert words in invocation["toolExecutionNotifications"][0]["message"]["text"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arguments": ["--format", "json"]}, "options stand before the file"),
        ({"form": "xml"}, "format"),
        ({"arch": "sm_75"}, "arch"),
        ({"output": Path("no/such/folder/x")}, "output"),
        ({"save": Path("no/such/folder/x")}, "save"),
        ({"launch": Path("none.toml")}, "--describe"),
        ({"checks": "some"}, "checks"),
    ],
)
def test_bad_options(tmp_path, options, words):
    with pytest.raises(ArgumentError, match=words):
        command.run(wish(write(tmp_path), **options))


def test_bad_targets(tmp_path):
    for name in ("none.ptx", "none.py", "none"):
        with pytest.raises(ArgumentError, match="target|script"):
            command.run(wish(tmp_path / name))
    for options in ({"form": "json"}, {"save": tmp_path / "x.npz"}, {"launch": tmp_path / "x.toml"}):
        with pytest.raises(ArgumentError):
            command.run(wish(tmp_path / "some.py", **options))
    with pytest.raises(ArgumentError, match="target"):
        command.describe("dsv4 sanitize", str(tmp_path / "some.py"), "auto")
    done = dsv4("sanitize", tmp_path / "none.ptx")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("dsv4: ")


def test_kernels_and_arguments_that_are_not_there(tmp_path):
    for old, new, words in (
        ('kernel = "sum"', 'kernel = "mean"', "kernel"),
        ('"x", "out"', '"x", "y"', r"launch\[0\].args\[1\]"),
        ('"x", "out"', '"x"', "2 values"),
        ("[[launch]]", "[variables.lut]\nshape = 1\n[[launch]]", "variable"),
    ):
        with pytest.raises(ArgumentError, match=words):
            command.run(wish(write(tmp_path, text=DESCRIPTION.replace(old, new))))


# --- CUDA C++ ---------------------------------------------------------------------------------------------------------


def test_without_nvrtc_the_message_says_how_to_install_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("DSV4_NVRTC", str(tmp_path / "libnvrtc.so.13"))
    path = write(tmp_path).with_suffix(".cu")
    with pytest.raises(BackendUnavailable, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.compile_file(path, "sm_90a")
    assert command.run(wish(path)) == 92
    assert "pip install nvidia-cuda-nvrtc" in capfd.readouterr().err


def test_cuda_sources_that_are_refused_before_nvrtc(tmp_path):
    with pytest.raises(ArgumentError, match="source"):
        nvrtc.compile_file(tmp_path / "none.cu", "sm_90a")
    (tmp_path / "k.cu").write_text(SOURCE)
    with pytest.raises(ArgumentError, match="arch"):
        nvrtc.compile_file(tmp_path / "k.cu", "sm_90a --option")


@pytest.fixture
def with_nvrtc():
    try:
        nvrtc.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))


def test_cuda_source(with_nvrtc, tmp_path, capfd):
    path = write(tmp_path).with_suffix(".cu")
    fixed = SOURCE.replace("= x[threadIdx.x];", "= x[threadIdx.x];\n#ifdef FIXED\n  __syncthreads();\n#endif")
    path.write_text(fixed)
    assert command.run(wish(path, arch="sm_90a")) == 90
    assert f"{path.name}:3   s[threadIdx.x] = x[threadIdx.x];" in capfd.readouterr().err
    (tmp_path / "sum.toml").write_text(
        DESCRIPTION.replace("sum.ptx", "sum.cu").replace("[t", 'options=["-DFIXED"]\n[t', 1)
    )
    assert command.run(wish(tmp_path / "sum.toml")) == 0
    path.write_text("__global__ void sum() { int x = ; }")
    assert command.run(wish(path)) == 92
    assert "expected an expression" in capfd.readouterr().err


def test_tensors_stay_on_the_device_from_launch_to_launch(tmp_path):
    """out = s(x), then x = s(out): the second launch reads what the first has written."""
    again = '[[launch]]\ngrid = 1\nblock = 64\nargs = ["out", "x"]\n'
    path = write(tmp_path, True, DESCRIPTION + again)
    assert command.run(wish(path, save=tmp_path / "out.npz")) == 0
    i = np.arange(64)
    once = (i ^ 32) + 63 - i
    with np.load(tmp_path / "out.npz") as arrays:
        assert np.array_equal(arrays["out"], once) and np.array_equal(arrays["x"], once[i ^ 32] + once[63 - i])


def test_a_load_past_the_end_of_a_tensor_is_reported(tmp_path, capfd):
    path = write(tmp_path, True, DESCRIPTION.replace("shape = [64]", "shape = [63]", 1))
    assert command.run(wish(path)) == 90
    assert "ERROR global_read_past_end" in capfd.readouterr().err


def test_a_hold_without_an_instruction_is_said(tmp_path, capfd):
    path = write(tmp_path, True)
    for schedule, idle in (("hold:9999@0", True), ("round_robin", False)):
        assert command.run(Wish("dsv4 sanitize", str(path), [], "auto", {"checks": "race", "schedule": schedule})) == 0
        assert ("dsv4 sanitize: schedule: no launch came to hold:9999@0\n" in capfd.readouterr().err) == idle
