"""Every diagnosis of `dsv4 doctor`, from made-up facts, and one look at the real machine."""

import os
import shutil
import subprocess
from dataclasses import replace

import pytest

from dsv4lib import backends, env
from dsv4lib.lab.commands import doctor

GOOD = doctor.Facts(
    python=(3, 11),
    platform="Linux x86_64",
    free_gib=80.0,
    installed={"torch": "2.13.0+cu130", "nvidia-cutlass-dsl": "4.8.1"},
    locked={"torch": "2.13.0", "nvidia-cutlass-dsl": "4.8.1"},
    driver_cuda=(13, 0),
    torch_cuda=(13, 0),
    torch_sees_gpu=True,
    dsl_flavors=(12, 13),
    gpus=("NVIDIA B200",),
    chromium="Chromium 150.0.1.2",
    kernel_backends={"sm_100a": (backends.Status("native", True, "runs"),), "sm_90a": ()},
)


def problems(**changes):
    return [f for f in doctor.diagnose(replace(GOOD, **changes)) if f.level == "problem"]


def test_a_good_gpu_machine_has_no_problem():
    assert problems() == []


def test_a_machine_without_a_gpu_has_no_problem():
    assert problems(driver_cuda=None, torch_cuda=None, torch_sees_gpu=False, gpus=()) == []


@pytest.mark.parametrize(
    ("changes", "topic", "detail", "fix"),
    [
        ({"torch_cuda": None, "torch_sees_gpu": False}, "gpu", "CPU build", "torch==2.13.0"),
        ({"driver_cuda": (12, 9)}, "gpu", "supports CUDA 12.9", "580"),
        ({"dsl_flavors": (12,)}, "cutlass-dsl", "cu12", "nvidia-cutlass-dsl[cu13]==4.8.1"),
        ({"torch_cuda": (12, 9)}, "cutlass-dsl", "cu13", "nvidia-cutlass-dsl[cu12]"),
        ({"dsl_flavors": ()}, "cutlass-dsl", "none", "requirements.lock"),
        ({"torch_sees_gpu": False}, "gpu", "sees no GPU", "nvidia-smi"),
        ({"free_gib": 0.5}, "disk", "0.5 GiB", "free 2 GiB"),
        ({"installed": {"torch": "2.13.0"}}, "packages", "missing: nvidia-cutlass-dsl", "requirements.lock"),
        (
            {"installed": GOOD.installed | {"torch": "2.12.0"}},
            "packages",
            "torch 2.12.0 (lock: 2.13.0)",
            "requirements",
        ),
        ({"python": (3, 10)}, "python", "3.10", "3.11"),
    ],
)
def test_each_problem_names_its_fix(changes, topic, detail, fix):
    found = problems(**changes)
    assert len(found) == 1, found
    assert (found[0].what, detail in found[0].detail, fix in found[0].fix) == (topic, True, True), found


def test_cuda_torch_without_a_driver_is_a_note():
    found = doctor.diagnose(replace(GOOD, driver_cuda=None, torch_sees_gpu=False))
    (note,) = [f for f in found if f.what == "gpu"]
    assert note.level == "note" and "580" in note.fix


@pytest.mark.parametrize(
    ("extras", "says"),
    [
        ({}, "`dsv4 run` is ready."),
        ({"": (), "ops": (), "lab": ()}, "`dsv4 run` is ready."),
        ({"": (), "ops": (), "lab": ("jinja2",)}, "`dsv4 emulate` are ready; `dsv4 run` needs the extra lab."),
        ({"": (), "ops": ("torch",), "lab": ("torch",)}, "runs PTX files; `dsv4 run` needs the extra lab."),
    ],
)
def test_what_a_wheel_can_do_now(extras, says, monkeypatch):
    monkeypatch.setattr(env, "is_installed", lambda: True)
    assert doctor.ending(replace(GOOD, extras=extras), 0).endswith(says)
    assert "wait" in doctor.ending(replace(GOOD, extras=extras), 1)


def test_this_machine(capsys):
    code = doctor.main()
    out = capsys.readouterr().out
    assert "nvidia-cutlass-dsl" in out and "torch" in out
    assert (doctor.chromium_version() or "no Chromium") in out
    assert code == (0 if "0 problem(s)" in out else 1)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo Chromium 150.0.1.2 built on Debian", "Chromium 150.0.1.2"),
        ("echo 'Google Chrome 151.0 '", "Google Chrome 151.0"),
        ("echo /root/secret", "browser does not run"),
        ("exit 1", "browser does not run"),
        ("", "browser does not run"),
    ],
)
def test_the_browser_says_its_version(tmp_path, monkeypatch, script, says):
    """No lock pins it, so doctor, CI and the report say which one there was."""
    path = tmp_path / "browser"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("DSV4_CHROMIUM", str(path))
    assert doctor.chromium_version() == says
    monkeypatch.setenv("DSV4_CHROMIUM", str(tmp_path / "none"))
    assert doctor.chromium_version() is None
    (found,) = [f for f in doctor.diagnose(GOOD) if f.what == "browser tests"]
    assert found.detail == "Chromium 150.0.1.2"


def test_ci_prints_the_browser_before_the_tests(tmp_path):
    from dsv4lib import env

    (tmp_path / ".ci").mkdir()
    shutil.copy(env.root() / ".ci/run", tmp_path / ".ci/run")
    for name, text in {"dsv4": "echo dsv4 $*; exit 3", "browser": "echo Chromium 150.0.1.2"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command, variables = [tmp_path / ".ci/run"], {**os.environ, "DSV4_CHROMIUM": str(tmp_path / "browser")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "browser: Chromium 150.0.1.2" and "dsv4 test --corpus" in done.stdout
    assert done.returncode == 3
