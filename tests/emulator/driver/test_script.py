"""Any script under an emulated device: exit codes, arguments, architecture, environment."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

pytest.importorskip("cutlass.cute")

from dsv4lib.emulator.driver.script import FAILED, HAZARD, emulate, missing_arch, wanted_arch
from dsv4lib.errors import ArgumentError

KERNEL = """
import sys, os, torch
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = x[thread] + 1.0

@cute.jit
def host(x: cute.Tensor):
    kernel(x).launch(grid=[1, 1, 1], block=[32, 1, 1])

def main(n):
    assert __name__ == "__main__" and torch.cuda.is_available()
    x = torch.zeros(n, device="cuda")
    host(from_dlpack(x))
    print("sum", x.cpu().sum().item(), os.environ["CUTE_DSL_ARCH"], torch.cuda.get_device_capability())
"""


@pytest.fixture
def script(tmp_path):
    def write(body):
        path = tmp_path / "given.py"
        path.write_text(KERNEL + textwrap.dedent(body))
        return path

    return write


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("body", "args", "code"),
    [
        ("main(int(sys.argv[1]))", ["32"], 0),
        pytest.param("main(32); sys.exit(7)", [], 7, marks=pytest.mark.full),
        pytest.param("main(32); sys.exit('sorry')", [], 1, marks=pytest.mark.full),
        ("main(32); raise ValueError('theirs')", [], 1),
        ("main(31)", [], FAILED),
    ],
)
def test_exit_codes(script, capfd, body, args, code):
    assert emulate(script(body), args, arch="sm_100a") == code
    out, error = capfd.readouterr()
    if code in (0, 7):
        assert "sum 32.0 sm_100a (10, 0)" in out
    if code == FAILED:
        assert "outside every allocation" in error and "given.py:" in error
    # Tracebacks begin in the script, and end there if the emulator stopped a launch.
    frames = [line for line in error.splitlines() if line.startswith("  File ")]
    assert all("given.py" in frame for frame in frames) and bool(frames) == (code == FAILED or "theirs" in body)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "code"), [("uninitialised_smem", HAZARD), ("tmem_lane_quarter", 0)])
def test_errors_have_their_own_exit_code_and_lints_have_none(script, capfd, kind, code):
    body = f"""
    from dsv4lib.emulator.driver.device import current
    from dsv4lib.emulator.checks import Hazard
    main(32)
    main(32)
    for launch in current().launches:
        launch.result.hazards.append(Hazard({kind!r}, "an injected hazard", None))
    """
    assert emulate(script(body), arch="sm_100a") == code
    error = capfd.readouterr().err
    assert error.count("an injected hazard") == 1 and "(2 times)" in error


def test_auto_starts_again_with_the_architecture_asked_for(script, capfd):
    body = """
    if torch.cuda.get_device_capability()[0] != 9:
        raise RuntimeError("this kernel supports sm_90a only, not sm_100a")
    main(32)
    """
    assert emulate(script(body)) == 0
    out, error = capfd.readouterr()
    assert "sum 32.0 sm_90a (9, 0)" in out and "needs sm_90a" in error


def test_auto_does_not_retry_what_is_not_about_architectures(script, capfd):
    assert emulate(script("raise ValueError('sm_90a is a nice name')")) == 1
    assert "starting again" not in capfd.readouterr().err


def test_files_beside_the_script_can_be_imported(script, tmp_path):
    (tmp_path / "beside.py").write_text("value = 32\n")
    assert emulate(script("import beside; main(beside.value)"), arch="sm_100a") == 0


@pytest.mark.parametrize(
    ("message", "arch"),
    [
        ("OpError: expects arch to be one of [Arch.sm_90a], but got Arch.sm_100a", "sm_90a"),
        ("only sm_80 is supported by this arch", "sm_80"),
        ("requires sm_90", "sm_90a"),
        ("requires sm_120a", None),
        ("index out of range", None),
        ("target sm_100a is wrong", None),
    ],
)
def test_wanted_arch(message, arch):
    assert wanted_arch(message) == arch


def test_an_architecture_that_is_not_emulated_is_named(script, capfd):
    asks = "raise ValueError('expects arch to be one of [Arch.sm_120a, Arch.sm_121a], but got Arch.sm_100a')"
    assert emulate(script(asks)) == 1
    assert "dsv4 emulate: sm_120a is not emulated: sm_80, sm_90a" in capfd.readouterr().err
    for other in ("index 120 out of range", "requires sm_90", "expects sm_120 or sm_90a, unsupported", "arch"):
        assert missing_arch(other) is None


def test_bad_arguments(tmp_path):
    with pytest.raises(ArgumentError, match="script"):
        emulate(tmp_path / "none.py")
    (tmp_path / "some.py").write_text("")
    with pytest.raises(ArgumentError, match="arch"):
        emulate(tmp_path / "some.py", arch="sm_75")
    for name, value in {"schedule": "none", "checks": "some", "seed": -1, "time_limit": -1.0, "sm_count": 0}.items():
        with pytest.raises(ArgumentError, match=name):
            emulate(tmp_path / "some.py", **{name: value})


def started(path, flag, *command):
    """A process that runs ``path`` in the emulator, once the script has written its process id to ``flag``."""
    process = subprocess.Popen([sys.executable, *command], start_new_session=True)
    end = time.monotonic() + 100
    while (not flag.exists() or not flag.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    return process


def gone(pid):
    """Does the process end within a few seconds?"""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("group", "how"),
    [
        pytest.param(group, how, marks=() if group == (how == "function") else pytest.mark.full)
        for group in (True, False)
        for how in ("function", "command")
    ],
)
def test_ctrl_c(script, tmp_path, group, how):
    """From the keyboard the whole group gets the signal; `kill -INT` reaches the parent alone."""
    flag = tmp_path / "running"
    path = script(f"import time; open({str(flag)!r}, 'w').write(str(os.getpid())); time.sleep(120)")
    code = f"import sys; from dsv4lib.emulator import emulate; sys.exit(emulate({str(path)!r}, arch='sm_100a'))"
    command = (
        ["-c", code] if how == "function" else ["-m", "dsv4lib.lab.cli", "emulate", "--arch", "sm_100a", str(path)]
    )
    process = started(path, flag, *command)
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert gone(int(flag.read_text()))


def test_a_script_does_not_outlive_its_command(script, tmp_path):
    flag = tmp_path / "running"
    path = script(f"import time; open({str(flag)!r}, 'w').write(str(os.getpid())); time.sleep(120)")
    process = started(path, flag, "-c", f"from dsv4lib.emulator import emulate; emulate({str(path)!r}, arch='sm_100a')")
    process.kill()
    process.wait()
    assert gone(int(flag.read_text()))
