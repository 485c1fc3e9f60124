"""No temporary folder outlives a process: normal end, exception, SIGTERM."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("cutlass.cute")

_DEVICE = """
import os, signal, sys, time
from dsv4lib import emulator
how = sys.argv[1]
with emulator.device("sm_100a"), emulator.devices(2):
    assert [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("dsv4-emulator-")]
    if how == "exception":
        raise ZeroDivisionError
    if how == "exit":
        sys.exit(3)
    if how == "sigterm":
        print("ready", flush=True)
        time.sleep(60)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
_SCRIPT = "import time; print('ready', flush=True); time.sleep(60)"


def _run(folder, code, *args):
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _left(folder):
    return [name for name in os.listdir(folder) if name.startswith("dsv4-")]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("how", "code"), [("normal", 0), ("exception", 1), ("exit", 3), ("sigterm", 143)])
def test_the_context_of_a_device_leaves_no_folder(how, code, tmp_path):
    process = _run(tmp_path, _DEVICE, how)
    if how == "sigterm":
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=900)
    assert process.returncode == code
    assert _left(tmp_path) == []


def test_emulate_ends_its_script_and_leaves_no_folder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    start = f"from dsv4lib import emulator; import sys; sys.exit(emulator.emulate({str(script)!r}))"
    process = _run(tmp_path, start)
    assert process.stdout.readline() == "ready\n"
    assert len(_left(tmp_path)) == 2  # of the parent and of the script's device
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=900)
    assert process.returncode == 143 and time.monotonic() - before < 20
    assert _left(tmp_path) == []


def test_a_handler_of_the_program_stays():
    from dsv4lib.emulator.driver.termination import unwinding

    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with unwinding():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, mine)
