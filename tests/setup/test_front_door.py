"""`./dsv4` sets up, resumes, refuses and hands over as promised. pip and Python are stand-ins: nothing is installed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stands in for python3 and for .venv/bin/python: makes a "venv" by copying itself, logs its arguments, fails
# or hangs on the pip step whose arguments contain the word in the file `fail` or `hang`.
FAKE_PYTHON = """#!/bin/bash
here=$(dirname "$0")
case "$*" in
  "--version") echo "Python 3.12.0" ;;
  "-c import sys; from importlib.metadata"*) exit "$(cat "$DSV4_TEST_LOG/cpu_torch" 2> /dev/null || echo 0)" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*|"-m dsv4lib"*)
    echo "$*" >> "$DSV4_TEST_LOG/calls"
    hang=$(cat "$DSV4_TEST_LOG/hang" 2> /dev/null) fail=$(cat "$DSV4_TEST_LOG/fail" 2> /dev/null)
    [[ -n "$hang" && "$*" == *"$hang"* ]] && exec sleep 61
    [[ -n "$fail" && "$*" == *"$fail"* ]] && { echo "no such wheel"; exit 1; } ;;
esac
exit 0
"""


@pytest.fixture
def clone(tmp_path):
    """A copy of the files the front door needs, with stand-ins first on PATH."""
    work, tools, log = tmp_path / "a clone", tmp_path / "tools", tmp_path / "log"
    for folder in (work, tools, log):
        folder.mkdir()
    for name in ("dsv4", "requirements.lock", "requirements.hashes", "pyproject.toml", ".nbstripout"):
        shutil.copy(ROOT / name, work / name)
    tool(tools, "python3", FAKE_PYTHON)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "DSV4_TEST_LOG": str(log)}
    for name in ("DSV4_PYTHON", "DSV4_PIP_ARGS"):
        env.pop(name, None)
    return work, tools, log, env


def tool(folder, name, text):
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def run(clone, *arguments, **extra):
    work, _, _, env = clone
    done = subprocess.run([work / "dsv4", *arguments], env=env | extra, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def calls(clone):
    path = clone[2] / "calls"
    text = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return text


def test_first_use_installs_torch_first_then_hands_over(clone):
    code, out = run(clone, "stages", "--json", DSV4_PIP_ARGS="--find-links /some/wheels")
    made = calls(clone)
    assert code == 0, out
    installs = [c for c in made if "pip install" in c]
    assert all("--find-links /some/wheels" in c for c in installs)
    assert [i for i, c in enumerate(installs) if "torch==2.13.0" in c] == [1]
    assert installs[2].endswith("--no-deps --require-hashes -r " + str(clone[0] / ".venv/requirements.txt"))
    assert installs[0].endswith("--no-deps --require-hashes -r " + str(clone[0] / ".venv/first.txt"))
    assert made[-1] == "-m dsv4lib.lab.cli stages --json"
    assert "[3/6] torch" in out


def test_all_but_torch_is_installed_by_hash_and_cuda_only_with_its_torch(clone):
    run(clone, "stages")
    venv = clone[0] / ".venv"
    first, cuda = ((venv / name).read_text().splitlines() for name in ("first.txt", "requirements.txt"))
    assert [line.split("==")[0] for line in first] == ["pip", "setuptools"]
    assert all("==" in line and " --hash=sha256:" in line and "#" not in line for line in first + cuda)
    (clone[2] / "cpu_torch").write_text("1")
    (venv / ".dsv4-ready").unlink()
    run(clone, "stages")
    cpu = (venv / "requirements.txt").read_text().splitlines()
    libraries = {line.split("==")[0] for line in cuda} - {line.split("==")[0] for line in cpu}
    assert len(libraries) == 15 and {"nvidia-cudnn-cu13", "triton"} < libraries and set(cpu) < set(cuda)
    assert len(cpu) > 150 and not any(line.startswith("torch==") for line in cuda)


def test_second_use_installs_nothing_and_changed_pins_set_up_again(clone):
    run(clone, "stages")
    calls(clone)
    run(clone, "doctor")
    assert calls(clone) == ["-m dsv4lib.lab.cli doctor"]
    for name in ("requirements.lock", "requirements.hashes"):
        with (clone[0] / name).open("a") as lock:
            lock.write("# changed\n")
        run(clone, "doctor")
        assert sum("pip install" in c for c in calls(clone)) == 4, name


def test_failed_step_says_which_and_resumes(clone):
    (clone[2] / "fail").write_text("requirements.txt")
    code, out = run(clone, "stages")
    assert code == 1
    assert "all other packages: failed" in out and "no such wheel" in out and "goes on from here" in out
    assert not any("dsv4lib" in c for c in calls(clone))
    (clone[2] / "fail").unlink()
    code, out = run(clone, "stages")
    assert code == 0 and "virtual environment" not in out
    assert calls(clone)[-1] == "-m dsv4lib.lab.cli stages"


def test_interrupted_set_up_stops_pip_and_resumes(clone):
    work, _, log, env = clone
    (log / "hang").write_text("torch==")
    # A run of tests in a background job ignores SIGINT; a terminal's front door does not.
    door = subprocess.Popen(
        [work / "dsv4", "stages"],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 900
    while not (log / "calls").exists() or "torch==" not in (log / "calls").read_text():
        assert time.monotonic() < deadline, "set-up did not reach torch"
        time.sleep(0.05)
    os.killpg(door.pid, signal.SIGINT)
    # SIGINT is ignored by background jobs of a script, so the front door itself must stop pip.
    _, err = door.communicate(timeout=900)
    assert door.returncode == 130 and "run the same command to go on" in err
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if p.info["cmdline"] == ["sleep", "61"] and os.getsid(p.pid) == door.pid
    ]
    assert not left, "pip went on in the background"
    (log / "hang").unlink()
    calls(clone)
    code, _ = run(clone, "stages")
    assert code == 0 and calls(clone)[-1] == "-m dsv4lib.lab.cli stages"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("uname", "#!/bin/sh\n[ $1 = -s ] && echo Darwin || echo arm64\n", "runs on Linux x86-64 or aarch64"),
        ("df", "#!/bin/sh\necho head\necho /dev/x 100 100 1048576 1% /\n", "has 1 GiB free"),
        ("python3", "#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.1\nexit 1\n", "needs Python 3.11 to 3.14"),
    ],
)
def test_refuses_with_one_clear_sentence(clone, name, text, says):
    tool(clone[1], name, text)
    if name == "python3":
        for other in ("python3.11", "python3.12", "python3.13", "python3.14"):
            tool(clone[1], other, text)
    code, out = run(clone, "stages")
    assert code == 1 and says in out
    assert calls(clone) == [] and not (clone[0] / ".venv" / ".dsv4-ready").exists()


def test_dsv4_python_uses_an_environment_as_it_is(clone):
    code, out = run(clone, "stages", DSV4_PYTHON="/no/such/python")
    assert code == 1 and "not an interpreter" in out
    bare = clone[1] / "bare"
    tool(clone[1], "bare", f'#!/bin/sh\nexec {shutil.which("python3", path="/usr/bin")} -S "$@"\n')
    code, out = run(clone, "stages", DSV4_PYTHON=str(bare))
    assert code == 1 and "lacks:" in out and "requirements.lock" in out
    done = subprocess.run(
        [ROOT / "dsv4", "stages"], env=os.environ | {"DSV4_PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "start_here" in done.stdout.split()
    assert calls(clone) == []


def test_threads_sleep_while_they_wait_unless_told_otherwise(clone):
    text = 'case "$*" in *version_info*) echo python 3 11;; -m*) echo "waits: $OMP_WAIT_POLICY";; esac'
    tool(clone[1], "says", f"#!/bin/sh\n{text}\n")
    says = {"DSV4_PYTHON": str(clone[1] / "says")}
    assert "waits: PASSIVE" in run(clone, "stages", **says)[1]
    assert "waits: ACTIVE" in run(clone, "stages", OMP_WAIT_POLICY="ACTIVE", **says)[1]


def test_dsv4_python_that_is_no_python_or_too_old(clone):
    """The cause is named: `ls` has no version that is too old."""
    tool(clone[1], "ls2", '#!/bin/sh\necho "invalid option"; exit 2\n')
    code, out = run(clone, "stages", DSV4_PYTHON=str(clone[1] / "ls2"))
    assert code == 1 and "is not a Python interpreter" in out
    tool(clone[1], "old", "#!/bin/sh\necho python 3 9\n")
    code, out = run(clone, "stages", DSV4_PYTHON=str(clone[1] / "old"))
    assert code == 1 and "3.11 or newer" in out and "is 3 9" in out


def test_python_3_14_is_found(clone):
    """Where `python3` is too old and 3.14 the only other."""
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        tool(clone[1], name, "#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.1\nexit 1\n")
    tool(clone[1], "python3.14", FAKE_PYTHON)
    code, out = run(clone, "stages")
    assert code == 0, out


def test_the_version_needs_no_set_up(clone):
    code, out = run(clone, "--version")
    assert (code, out) == (0, "dsv4 0.1.0\n") and calls(clone) == []
