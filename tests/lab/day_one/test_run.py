"""Whole runs on a fake device: what fails is said and ends nothing else, and a killed run goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dsv4lib import env
from dsv4lib.errors import ArgumentError
from dsv4lib.lab import cli, stage
from dsv4lib.lab.day_one import archive, differences, forms, gpu, plan, reading, runner, worker
from dsv4lib.lab.day_one.plan import Step
from dsv4lib.ops.moe_dispatch import bench as moe_dispatch
from dsv4lib.ops.router import bench as router

PATH = str(env.package().parent)


def dsv4(*arguments: str) -> tuple[int, str]:
    """Exit code and output of `./dsv4 day-one`; a DSV4Error's code as `main` would give it."""
    done = CliRunner().invoke(cli.app, ["day-one", *arguments], env={"COLUMNS": "200"})
    code = getattr(done.exception, "exit_code", done.exit_code) if done.exception else done.exit_code
    if done.exception and not isinstance(done.exception, SystemExit):
        return getattr(done.exception, "exit_code", 2), f"{done.output}{done.exception}"
    return code, done.output


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find", lambda: None)


def verdicts(folder: Path) -> dict[str, reading.Compared]:
    return {one.name: one for one in reading.compare(archive.read(folder / "day_one.tar.gz"))}


def test_without_a_gpu_it_says_what_is_missing() -> None:
    code, said = dsv4()
    assert code == 22 and "no GPU" in said and "B200" in said and "--fake" in said


@pytest.mark.parametrize(
    ("found", "arch", "message"),
    [
        (gpu.Gpu("RTX", (12, 0), "13.0"), "", "compute capability 12.0"),
        (gpu.Gpu("H", (9, 0), "13.0"), "sm_100a", "not"),
    ],
    ids=["other GPU", "other architecture"],
)
def test_a_gpu_that_it_is_not_for(found: gpu.Gpu, arch: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find", lambda: found)
    code, said = dsv4(*([f"--arch={arch}"] if arch else []))
    assert code == 22 and message in said


@pytest.mark.parametrize("arch", plan.SETS)
def test_the_plan_is_under_half_an_hour(arch: str) -> None:
    steps = plan.steps(arch)
    assert len({step.name for step in steps}) == len(steps)
    assert 60 < plan.seconds(steps) < {"sm_90a": 8, "sm_100a": 15}[arch] * 60
    kinds = {step.name.partition(".")[0] for step in steps}
    assert kinds == {"form", "compile", "stage", "time", "counters"}
    assert all(bool(step.probes) + bool(step.command) + bool(step.skipped) == 1 for step in steps)
    assert all(0 < step.limit_s <= 300 or step.skipped for step in steps)


def test_kernels_are_compiled_before_they_are_timed_and_nothing_timed_runs_beside_others() -> None:
    steps = [step for step in plan.steps("sm_90a") if step.command]
    names = [step.name for step in steps]
    timed = [step for step in steps if step.name.startswith(("time.", "counters"))]
    assert not any(step.beside for step in timed) and all(step.beside for step in steps[: -len(timed)])
    (compile_step,) = (step for step in steps if step.name == "compile")
    assert "compile" not in {step.name for step in plan.steps("sm_90a", ["time.topk"])}
    (only,) = (word.removeprefix("--only=") for word in compile_step.command if word.startswith("--only="))
    assert only.split(",") == [name.removeprefix("time.") for name in names if name.startswith("time.")]
    assert "--first-calls" in compile_step.command and names.index("compile") < names.index(timed[0].name)
    together = [dataclasses.replace(step, seconds=40.0) for step in steps if step.beside][:3]
    assert plan.seconds(together) == 40 and plan.seconds([*together, timed[-1]]) == 40 + timed[-1].seconds


def test_stages_are_those_of_the_gpu_s_set_whose_kernels_run_on_it() -> None:
    """A stage of two architectures is in both plans; what is left out says why, a page about the emulator, too."""
    every = [{s.name: s for s in plan.steps(arch) if s.name.startswith("stage.")} for arch in ("sm_90a", "sm_100a")]
    hopper, blackwell = ({name for name, step in one.items() if not step.skipped} for one in every)
    assert set(every[0]) == set(every[1]) == {f"stage.{one.name}" for one in stage.discover() if one.kernel}
    whys = [{name: step.skipped for name, step in one.items()} for one in every]
    assert (
        whys[0]["stage.fmha_a"] == "its kernels are for sm_100a"
        and whys[1]["stage.turbo4"] == "its kernels are for sm_90a"
    )
    assert whys[1]["stage.emulator"] == whys[0]["stage.your_kernel"] == "a page about the emulator"
    assert {"stage.turbo4", "stage.indexer"} <= hopper and "stage.turbo4" not in blackwell
    assert {"stage.fmha_a", "stage.indexer"} <= blackwell and "stage.fmha_a" not in hopper
    assert "stage.your_kernel" not in hopper | blackwell


@pytest.mark.parametrize("arch", plan.SETS)
def test_a_stage_has_the_time_that_its_set_allows(arch: str) -> None:
    steps = {step.name: step for step in plan.steps(arch)}
    for one in stage.discover():
        step = steps.get(f"stage.{one.name}")
        if step is not None and not step.skipped:
            chosen = one.sets[plan.SETS[arch]]
            assert step.limit_s >= max(plan.STAGE_LIMIT_S, len(chosen.runs) * chosen.time_limit_s), step.name


def test_a_stage_without_the_set_is_a_skipped_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stage.load("indexer")
    sets = {name: chosen for name, chosen in found.sets.items() if name != "hopper"}
    monkeypatch.setattr(stage, "discover", lambda: [found.model_copy(update={"sets": sets})])
    (step,) = plan._stages("sm_90a")
    assert step.skipped == "it has no set hopper" and step.command == () and step.seconds == 0
    (step,) = plan._stages("sm_100a")
    assert step.command and not step.skipped


def test_an_op_without_kernels_for_the_gpu_is_skipped() -> None:
    skipped = {arch: {s.name: s.skipped for s in plan.steps(arch) if s.name.startswith("time.")} for arch in plan.SETS}
    assert skipped["sm_90a"]["time.mega_moe"] == "its rows are for sm_100a and sm_103a"
    assert not skipped["sm_100a"]["time.mega_moe"] and not skipped["sm_90a"]["time.mla_decode"]
    for op in ("moe_gemm", "linear"):  # kernels for both, rows of a Hopper alone
        assert skipped["sm_100a"][f"time.{op}"] == "its rows are for sm_90a" and not skipped["sm_90a"][f"time.{op}"]


def test_the_plan_is_shown_and_nothing_runs(tmp_path: Path) -> None:
    code, said = dsv4("--plan", "--arch=sm_100a", f"--out={tmp_path}", "--only=form.*")
    assert code == 0 and "an estimate; no such GPU has run it yet" in said
    assert "scale_columns" in said and "a B200 does not have it" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["--only=nothing*"], ["--fake", "--arch=sm_80"], ["--record"], ["--difference=flip:*"]]
    + [["--fake", "--difference=other"]],
)
def test_bad_arguments(arguments: list[str], tmp_path: Path) -> None:
    assert dsv4(*arguments, "--fake" if "--only" in arguments[0] else f"--out={tmp_path}")[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wanted", ["other", "warp_pairs:x", *differences.FAILURES, "hang:"])
def test_differences_that_would_do_nothing_are_refused(wanted: str) -> None:
    with pytest.raises(ArgumentError, match="difference="):
        differences.check(wanted)


def test_a_run_on_a_gpu_packs_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this code alone, those of an earlier plan too; a driver of another version is another device."""
    steps = [
        Step(name, "command", name, 1.0, 60.0, command=(sys.executable, "-c", f"import sys; sys.exit({code})"))
        for name, code in (("time.a", 0), ("time.b", 1))
    ]
    monkeypatch.setattr(plan, "steps", lambda arch, only=(): plan.chosen(steps, list(only)))
    monkeypatch.setattr(gpu, "find", lambda: gpu.Gpu("NVIDIA B200", (10, 0), "13.0"))
    path, options = tmp_path / "day_one.tar.gz", (f"--out={tmp_path}",)
    assert dsv4("--only=time.b", *options)[0] == 1 and list(archive.read(path).commands) == ["time.b"]
    assert dsv4("--only=time.a", *options)[0] == 1 and list(archive.read(path).commands) == ["time.a", "time.b"]
    steps.pop()
    assert dsv4(*options)[0] == 0 and list(archive.read(path).commands) == ["time.a"]
    monkeypatch.setattr(gpu, "find", lambda: gpu.Gpu("NVIDIA B200", (10, 0), "13.1"))
    code, said = dsv4(*options)
    assert code == 2 and "another device" in said


@pytest.mark.parametrize(
    "option",
    ["--plan", "--fake", "--fresh", "--out=x", "--difference=flip:*", "--only=shift.*", "--arch=sm_100a", "--into=x"],
)
def test_what_reading_would_ignore_is_refused(option: str, tmp_path: Path) -> None:
    """The file is no archive: an option that got past the check would say so."""
    (tmp_path / "a.tar.gz").write_bytes(b"")
    code, said = dsv4(f"--read={tmp_path / 'a.tar.gz'}", option)
    assert code == 2 and f"{option.strip('-').partition('=')[0]}=" in said and "not allowed" in said


def test_a_folder_is_of_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an emulator or another GPU gave is never a GPU's, nor one fake device's another's."""
    options = ("--only=shift.lane32", f"--out={tmp_path}")
    assert dsv4("--fake", *options)[0] == 0
    code, said = dsv4("--fake", "--difference=flip:shift.*", *options)
    assert code == 2 and "--fresh" in said and "another device" in said
    monkeypatch.setattr(gpu, "find", lambda: gpu.Gpu("NVIDIA B200", (10, 0), "13.0"))
    assert dsv4(*options)[0] == 2 and archive.read(tmp_path / "day_one.tar.gz").manifest["fake"] == []
    runner.fresh(tmp_path)
    names = {"name": "NVIDIA B200", "cuda": "13.0"}
    runner.Runner(tmp_path, gpu=names)
    runner.Runner(tmp_path, gpu=dict(names))
    for other in ({**names, "name": "NVIDIA H200"}, {**names, "cuda": "13.1"}):
        with pytest.raises(ArgumentError, match="another device"):
            runner.Runner(tmp_path, gpu=other)
    (tmp_path / runner.OUTPUTS / "x.json").write_text("{}")
    (tmp_path / runner.DEVICE).unlink()
    with pytest.raises(ArgumentError, match="does not name"):
        runner.Runner(tmp_path, gpu=names)


def test_results_are_kept_under_their_device(tmp_path: Path) -> None:
    """Were the folder's file changed, a fake's results would still not be another's."""
    probe = next(probe for probe in forms.probes() if probe.name == "shift.lane32")
    for fake, device in (([], "fake"), (["flip:shift.*"], "flips"), (None, "GPU")):
        running = runner.Runner(tmp_path / device, fake=fake)
        worker.write(tmp_path / device / runner.OUTPUTS, worker.result(probe, "ran", device=running._device))
        assert running.result(probe.name)["status"] == "ran" and running.finished("sm_100a") == [probe.name]
        assert running.finished("sm_90a") == []
    first, second = (tmp_path / device / runner.OUTPUTS / f"{probe.name}.json" for device in ("fake", "flips"))
    second.write_bytes(first.read_bytes())
    assert runner.Runner(tmp_path / "flips", fake=["flip:shift.*"]).result(probe.name) is None


@pytest.mark.full
def test_a_later_plan_does_not_narrow_the_archive(tmp_path: Path) -> None:
    for name in ("shift.lane0", "shift.lane32"):
        assert dsv4("--fake", f"--only={name}", f"--out={tmp_path}")[0] == 0
    assert {n: one.verdict for n, one in verdicts(tmp_path).items()} == dict.fromkeys(
        ("shift.lane0", "shift.lane32"), reading.SAME
    )


def test_a_fault_is_a_crash_and_want_of_memory_no_result(tmp_path: Path) -> None:
    lines: list[str] = []
    fake = ["fault:shift.lane0", "memory:shift.lane32"]
    running = runner.Runner(tmp_path, fake=fake, tell=lines.append)
    for _ in range(runner.STARTS + 1):
        running.run(plan.steps("sm_100a", ["shift.lane0", "shift.lane32"]))
    assert running.result("shift.lane0")["status"] == "crashed" and running.result("shift.lane32") is None
    assert all("OUT_OF_MEMORY" in line and "1 of them have no result, call again" in line for line in lines)


def test_a_process_that_outlives_its_kill_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are kept from the processes, as a driver that holds them would."""
    kill, left = os.killpg, []
    monkeypatch.setattr(runner.os, "killpg", lambda pid, sent: left.append(pid))
    monkeypatch.setattr(runner, "KILL_S", 0.2)
    sleeping = Step("time.x", "command", "", 1.0, 0.5, command=(sys.executable, "-c", COMMANDS["hung"]))
    lines: list[str] = []
    running = runner.Runner(tmp_path, tell=lines.append)
    hanging = runner.Runner(tmp_path / "fake", fake=["hang:shift.*"], tell=lines.append, limit_s=1.0)
    try:
        assert not running.run([sleeping, sleeping])
        assert not hanging.run(plan.steps("sm_100a", ["form.shift"]) * 2)
    finally:
        for pid in left:
            kill(pid, signal.SIGKILL)
    assert len(lines) == len(left) == 2 and all("the run stops here" in line and "SIGKILL" in line for line in lines)
    assert json.loads((tmp_path / runner.FILES / "time.x" / "result.json").read_text())["status"] == "hung"
    (name,) = hanging.finished("sm_100a")
    assert hanging.result(name)["status"] == "hung"


def test_parts_are_chosen_by_name() -> None:
    found = plan.steps("sm_100a", ["shift.lane0", "form.st_bulk"])
    assert {step.name: step.probes for step in found} == {
        "form.shift": ("shift.lane0",),
        "form.st_bulk": ("st_bulk",),
    }
    with pytest.raises(ArgumentError, match="only="):
        plan.steps("sm_100a", ["shift.lane0", "nothing"])


def test_every_kind_of_failure_is_named_and_ends_nothing_else(tmp_path: Path) -> None:
    """A crash, a refusal, a flipped bit and another rule in one run of two forms; the rest has its results."""
    failures = {"crash": "cp.4x256b", "refuse": "cp.4x256b.none", "flip": "shift.lane32"}
    options = [f"--difference={kind}:{name}" for kind, name in failures.items()]
    figure = tmp_path / "differs.png"
    only = ["--only=cp.4x256b*", "--only=cp.64x128b.warpx2_02_13", "--only=form.shift"]
    code, said = dsv4("--fake", "--difference=warp_pairs", *options, *only, f"--out={tmp_path}", f"--figure={figure}")
    assert code == 1
    found = verdicts(tmp_path)
    expected = {name: reading.SAME for name in found}
    expected |= {"cp.4x256b": "crashed", "cp.4x256b.none": "refused"}
    expected |= {"shift.lane32": reading.DIFFERS, "cp.64x128b.warpx2_02_13": reading.DIFFERS}
    assert {name: one.verdict for name, one in found.items()} == expected and len(found) > 8
    assert "SIGKILL" in found["cp.4x256b"].detail and "CUDA_ERROR_INVALID_PTX" in found["cp.4x256b.none"].detail
    for name in [*failures.values(), "cp.64x128b.warpx2_02_13"]:
        assert name in said
    flipped = found["shift.lane32"]
    # `flip` inverts bit 4 of the byte at a third of the output.
    at = 128 * 512 // 3
    assert (flipped.words, flipped.first) == (1, f"CTA 0, row {at // 512}, word {at % 512 // 4}")
    assert int(flipped.got, 16) ^ int(flipped.want, 16) == 0x10 << 8 * (at % 4)
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_hang_is_killed_and_the_rest_runs(tmp_path: Path) -> None:
    lines: list[str] = []
    running = runner.Runner(tmp_path, fake=["hang:shift.lane32"], tell=lines.append, limit_s=6.0)
    running.run(plan.steps("sm_100a", ["form.shift"]))
    found = {name: running.result(name) for name in plan.steps("sm_100a", ["form.shift"])[0].probes}
    assert found.pop("shift.lane32")["status"] == "hung"
    assert {one["status"] for one in found.values()} == {"ran"}
    assert "1 hung" in lines[0] and "3 ran" in lines[0]


def until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """The runner gets SIGKILL while a probe hangs; two such runs, and the third takes the probe to be the reason."""
    command = [sys.executable, "-m", "dsv4lib.lab.cli", "day-one", "--fake", "--only=form.shift", f"--out={tmp_path}"]
    hanging = [*command, "--difference=hang:shift.lane32"]
    place = tmp_path / runner.OUTPUTS
    mark, first = place / "shift.lane32.started", place / "shift.lane0.json"
    written = None
    for run in (1, 2):
        process = subprocess.Popen(hanging, env={**os.environ, "PYTHONPATH": PATH}, stdout=subprocess.DEVNULL)
        until(lambda run=run: mark.exists() and mark.read_text().endswith(f" {run}"))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert children
        until(lambda children=children: not any(alive(child) for child in children))
        written = written or first.stat().st_mtime_ns
        assert first.stat().st_mtime_ns == written
    code, said = dsv4("--fake", "--only=form.shift", "--difference=hang:shift.lane32", f"--out={tmp_path}")
    found = verdicts(tmp_path)
    assert code == 1 and found.pop("shift.lane32").detail == "2 runs ended while it ran"
    assert {one.verdict for one in found.values()} == {reading.SAME} and len(found) == 3
    assert "1 of them before" in said and first.stat().st_mtime_ns == written
    code, said = dsv4("--fake", "--fresh", "--only=shift.lane32", f"--out={tmp_path}")
    assert code == 0 and not first.exists()


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_that_does_not_start_blames_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    running = runner.Runner(tmp_path, fake=[], tell=lines.append)
    monkeypatch.setattr(runner.sys, "executable", "/bin/false")
    running.run(plan.steps("sm_100a", ["form.shift"]))
    assert "the worker did not start" in lines[0]
    assert list((tmp_path / runner.OUTPUTS).glob("*.json")) == []


def test_results_of_other_code_are_run_again_and_not_compared(tmp_path: Path) -> None:
    running = runner.Runner(tmp_path, fake=[], tell=lambda line: None)
    steps = plan.steps("sm_100a", ["shift.lane32"])
    running.run(steps)
    path = tmp_path / runner.OUTPUTS / "shift.lane32.json"
    path.write_text(path.read_text().replace(running.result("shift.lane32")["code"], "0" * 32))
    assert running.result("shift.lane32") is None
    manifest = {"arch": "sm_100a", "probes": ["shift.lane32", "shift.lane0"]}
    archive.pack(tmp_path, manifest, tmp_path / "day_one.tar.gz")
    assert {n: one.verdict for n, one in verdicts(tmp_path).items()} == {
        "shift.lane32": reading.OTHER,
        "shift.lane0": reading.MISSING,
    }
    running.run(steps)
    assert running.result("shift.lane32")["status"] == worker.RAN


ROWS = (
    "op,shape,floor_us,provider,state,us\nfmha,Flash CSA T 8,1.0,ours,timed,9.0\nfmha,Flash CSA T 8,1.0,peer,timed,1\n"
)
COMMANDS = {
    "ran": f"import pathlib, sys; pathlib.Path(sys.argv[1], 'rows.csv').write_text({ROWS!r})",
    "failed": "import sys; print('no such op'); sys.exit(3)",
    "absent": "import sys; print('no ncu on the path'); sys.exit(21)",
    "crashed": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hung": "import time; time.sleep(600)",
}


def test_commands_with_their_tables_and_failures(tmp_path: Path) -> None:
    steps = [
        Step(f"time.{kind}", "command", kind, 1.0, 4.0, command=(sys.executable, "-c", code, plan.OUT))
        for kind, code in COMMANDS.items()
    ]
    running = runner.Runner(tmp_path, tell=lambda line: None)
    running.run(steps)
    codes = {step.name: runner.code_of(step) for step in steps}
    manifest = {"arch": "sm_100a", "gpu": "NVIDIA B200", "probes": []}
    archive.pack(tmp_path, manifest, tmp_path / "day_one.tar.gz", codes)
    found = archive.read(tmp_path / "day_one.tar.gz")
    status = {name: json.loads(files["result.json"])["status"] for name, files in found.commands.items()}
    assert status == {f"time.{kind}": kind for kind in COMMANDS}
    (row,) = reading.times(found)
    modelled = reading.predictions()["fmha", "Flash CSA T 8"]
    assert (row.us, row.floor_us, row.modelled_us) == (9.0, 1.0, modelled) and modelled > 0
    rows = {f"{row.op} {row.shape}" for module in (router, moe_dispatch) for row in module.rows()}
    of_moe = {f"{op} {shape}": us for (op, shape), us in reading.predictions().items() if op != "fmha"}
    assert len(of_moe) == 16 and set(of_moe) <= rows and all(1 < us < 5 for us in of_moe.values())
    code, said = dsv4(f"--read={tmp_path / 'day_one.tar.gz'}")
    assert code == 1 and "time.failed: failed exit code 3: no such op" in said and f"{9.0 / modelled:.2f}" in said


def test_a_recording_has_metrics_and_times_and_a_second_archive_adds_its_own(tmp_path: Path) -> None:
    """Of a stage that failed or ran elsewhere, and of a table that is none, nothing is recorded."""

    def packed(value: float, us: float, **others: str) -> archive.Archive:
        one = {"stage": "cache", "backend": "native", "verdict": "passed", "metrics": {"leaked": value, "wall_s": 3.0}}
        files = {"stage.cache": {"records.json": json.dumps([{**one, **others}, 7]).encode()}}
        table = f"op,shape,floor_us,provider,state,us\nrouter,Pro T 8,1,ours,timed,{us}\n"
        files["time.router"] = {"rows.csv": table.encode(), "records.json": b"[[["}
        return archive.Archive({"arch": "sm_90a"}, {}, {}, files)

    reading.record_commands(packed(0.0, 5.0), tmp_path)
    modelled = reading.times_recorded(tmp_path)[0].modelled_us
    for change in ({"verdict": "gate_failed"}, {"backend": "emulator"}):
        reading.record_commands(packed(9.0, 6.0, **change), tmp_path)
    assert reading.metrics_recorded(tmp_path) == [reading.Metric("cache", "leaked", 0.0)]
    assert reading.times_recorded(tmp_path) == [reading.Timed("router", "Pro T 8", 6.0, 1.0, modelled)] and modelled > 1
    reading.record_commands(packed(2.0, 6.0), tmp_path)
    assert [one.value for one in reading.metrics_recorded(tmp_path)] == [2.0]


WAITING = """
import os, pathlib, sys, time
folder, name, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
turn = os.environ.get("DSV4_BENCH_TURN")
(folder / f"{name}.imported").touch()
while turn and not pathlib.Path(turn).exists():
    time.sleep(0.01)
others = [path.name for path in folder.glob("*.on_gpu")]
assert not others, others
(folder / f"{name}.on_gpu").touch()
pathlib.Path(sys.argv[4], "rows.csv").write_text("op")
early = time.monotonic() + 20
while sys.argv[5] and not (folder / f"{sys.argv[5]}.imported").exists():
    assert time.monotonic() < early, "the next one was not started early"
    time.sleep(0.01)
time.sleep(seconds)
(folder / f"{name}.on_gpu").unlink()
"""


def waiting(tmp_path: Path, name: str, seconds: float = 0.0, then: str = "", **given: float | bool) -> Step:
    command = (sys.executable, "-c", WAITING, str(tmp_path), name, str(seconds), plan.OUT, then)
    return Step(name, "command", name, 1.0, **{"limit_s": 60.0, "waits": True, **given}, command=command)


def statuses(folder: Path) -> dict[str, str]:
    return {p.parent.name: json.loads(p.read_text())["status"] for p in folder.glob("commands/*/result.json")}


def test_the_next_process_is_started_early_and_has_the_gpu_alone(tmp_path: Path) -> None:
    """Each waits for its turn; one that has a result is not started again."""
    steps = [waiting(tmp_path, "time.a", 0.1, "time.b"), waiting(tmp_path, "time.b", 0.1, "time.c")]
    steps += [waiting(tmp_path, "time.c")]
    assert runner.Runner(tmp_path / "r", tell=lambda line: None).run(steps)
    assert statuses(tmp_path / "r") == dict.fromkeys(("time.a", "time.b", "time.c"), "ran")
    for path in tmp_path.glob("*.imported"):
        path.unlink()
    assert runner.Runner(tmp_path / "r", tell=lambda line: None).run(steps)
    assert list(tmp_path.glob("*.imported")) == []


def test_a_run_s_time_ends_a_command_keeps_its_tables_and_goes_on(tmp_path: Path) -> None:
    """What it ended or did not reach is no failure, and runs in the next call; its process does not stay."""
    steps = [waiting(tmp_path, "time.a"), waiting(tmp_path, "time.b", 600.0), waiting(tmp_path, "time.c")]
    lines: list[str] = []
    for _ in range(runner.STARTS + 1):
        running = runner.Runner(tmp_path / "r", tell=lines.append, seconds=3.0)
        assert running.run(steps) and running.left == ["time.b", "time.c"]
        (tmp_path / "time.b.on_gpu").unlink()
    assert statuses(tmp_path / "r") == {"time.a": "ran", "time.b": "unfinished"}
    assert "no time left" in lines[-1] and (tmp_path / "r/commands/time.b/rows.csv").exists()
    running = runner.Runner(tmp_path / "r", tell=lines.append)
    assert running.run([steps[0], dataclasses.replace(steps[1], limit_s=0.5), steps[2]]) and running.left == []
    (tmp_path / "time.b.on_gpu").unlink(missing_ok=True)
    assert statuses(tmp_path / "r")["time.b"] == "hung"


def test_what_a_run_s_time_left_is_said_with_a_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is there before the run has ended, with what it has."""
    path, seen = (
        tmp_path / "r" / "day_one.tar.gz",
        f"import pathlib; pathlib.Path({str(tmp_path / 'r')!r}, 'day_one.tar.gz').stat()",
    )
    steps = [
        waiting(tmp_path, "time.a"),
        Step("time.s", "command", "", 1.0, 60.0, command=(sys.executable, "-c", seen)),
    ]
    steps += [waiting(tmp_path, "time.b", 600.0)]
    monkeypatch.setattr(plan, "steps", lambda arch, only=(): plan.chosen(steps, list(only)))
    monkeypatch.setattr(gpu, "find", lambda: gpu.Gpu("NVIDIA B200", (10, 0), "13.0"))
    code, said = dsv4(f"--out={tmp_path / 'r'}", "--minutes=0.07")
    assert code == 25 and "1 steps left after 0.07 minutes, call again: time.b" in said
    assert "time.b: unfinished" in said and sorted(archive.read(path).commands) == ["time.a", "time.b", "time.s"]


def test_steps_side_by_side_run_together_and_what_prepares_runs_for_each_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that wait for each other's file; after a bare machine took its cache along, kernels are compiled again."""
    monkeypatch.setattr(runner, "beside_at_once", lambda: 2)
    code = "import pathlib, sys, time; f = pathlib.Path(sys.argv[1]); (f / sys.argv[2]).touch()\n"
    code += "end = time.monotonic() + 20\nwhile not (f / sys.argv[3]).exists(): assert time.monotonic() < end"
    steps = [
        Step(n, "command", n, 1.0, 60.0, command=(sys.executable, "-c", code, str(tmp_path), n, m), beside=True)
        for n, m in (("compile", "stage.a"), ("stage.a", "compile"))
    ]
    steps[0] = dataclasses.replace(steps[0], prepares=True)
    first, second = waiting(tmp_path, "time.a"), waiting(tmp_path, "time.b")
    for more, again in (([first], "ran"), ([first], "ran before"), ([first, second], "ran"), ([second], "ran before")):
        lines: list[str] = []
        assert runner.Runner(tmp_path / "r", tell=lines.append).run([*steps, *more])
        (said,) = (line for line in lines if " compile: " in line)
        assert f"compile: {again} (" in said


def test_failed_commands_are_run_again_while_they_have_starts(tmp_path: Path) -> None:
    """The first call leaves a table and fails; the second's result has no table of the first beside it."""
    first = "import pathlib, sys; f = pathlib.Path(sys.argv[2]); again = f.exists(); f.touch(); "
    table = "again or pathlib.Path(sys.argv[1], 'rows.csv').write_text('op'); "
    codes = {"fails": "sys.exit(1)", "mends": "sys.exit(not again)", "absent": "sys.exit(21)"}
    steps = [
        Step(n, "command", n, 1.0, 60.0, command=(sys.executable, "-c", first + table + c, plan.OUT, f"{tmp_path}/{n}"))
        for n, c in codes.items()
    ]
    seen = []
    for _ in range(runner.STARTS + 1):
        lines: list[str] = []
        runner.Runner(tmp_path / "results", tell=lines.append).run(steps)
        seen.append([line.partition(": ")[2].partition(" (")[0] for line in lines])
        tables = sorted(path.parent.name for path in (tmp_path / "results").glob("commands/*/rows.csv"))
        assert tables == (["absent"] if len(seen) > 1 else ["absent", "fails", "mends"])
    assert seen == [
        ["failed", "failed", "absent"],
        ["failed", "ran", "absent before"],
        ["failed before", "ran before", "absent before"],
    ]


def test_a_command_with_nothing_to_do_is_shown_and_no_failure(tmp_path: Path) -> None:
    step = Step("counters", "command", "", 1.0, 60.0, command=(sys.executable, "-c", COMMANDS["absent"]))
    runner.Runner(tmp_path, tell=lambda line: None).run([step])
    codes = {step.name: runner.code_of(step)}
    archive.pack(tmp_path, {"arch": "sm_100a", "probes": []}, tmp_path / "day_one.tar.gz", codes)
    code, said = dsv4(f"--read={tmp_path / 'day_one.tar.gz'}")
    assert code == 0 and "counters: absent no ncu" in said


def test_what_a_command_says_is_scrubbed(tmp_path: Path) -> None:
    code = f"import sys; print('reads {Path.home()}/secret.txt'); sys.exit(1)"
    step = Step("time.x", "command", "", 1.0, 60.0, command=(sys.executable, "-c", code))
    runner.Runner(tmp_path, tell=lambda line: None).run([step])
    said = json.loads((tmp_path / runner.FILES / "time.x" / "result.json").read_text())["detail"]
    assert "secret.txt" in said and str(Path.home()) not in said


def test_a_fake_run_skips_commands_visibly(tmp_path: Path) -> None:
    lines: list[str] = []
    runner.Runner(tmp_path, fake=[], tell=lines.append).run([Step("time.x", "command", "", 1.0, 1.0, command=("x",))])
    assert "skipped: it needs a GPU" in lines[0]


def made(tmp_path: Path, names: list[str], rules: list[str], fake: list[str] | None) -> archive.Archive:
    """An archive of a device with other rules, made in this process."""
    running, device = runner.Runner(tmp_path), differences.Fake(rules)
    for probe in forms.probes():
        if probe.name in names:
            out = device.run(probe)
            (tmp_path / runner.OUTPUTS / f"{probe.name}.npz").write_bytes(worker.packed(probe, out))
            worker.write(running.folder / runner.OUTPUTS, worker.result(probe, "ran", out=reading.digest(out)))
    manifest = {"arch": "sm_100a", "gpu": "NVIDIA B200", "probes": names, "fake": fake}
    archive.pack(tmp_path, manifest, tmp_path / "day_one.tar.gz")
    return archive.read(tmp_path / "day_one.tar.gz")


NAMES = ["shift.lane32", "cp.64x128b.warpx2_02_13", "sums.f16.f16-f16-f32"]


def test_a_recording_is_replayed(tmp_path: Path) -> None:
    found = made(tmp_path, NAMES, ["warp_pairs", "truncated_sums"], None)
    compared = list(reading.compare(found))
    reading.record(found, compared, tmp_path / "b200")
    assert reading.folder_of(found.manifest) == "b200" and reading.recordings(tmp_path) == [tmp_path / "b200"]
    lines = {line.probe: line for line in reading.recorded(tmp_path / "b200")}
    known = {probe.name: probe for probe in forms.probes()}
    said = {name: reading.replay(lines[name], tmp_path / "b200", known[name]) for name in NAMES}
    # Sums may be as far away as they were; what differs in meaning stays an error until the emulator does the same.
    assert said["shift.lane32"] == said["sums.f16.f16-f16-f32"] == ""
    assert "words differ" in said["cp.64x128b.warpx2_02_13"]
    with differences.RULES["warp_pairs"]():
        assert reading.replay(lines[NAMES[1]], tmp_path / "b200", known[NAMES[1]]) == ""
    closer = dataclasses.replace(lines[NAMES[2]], max_ulp=0)
    assert "words differ" in reading.replay(closer, tmp_path / "b200", known[NAMES[2]])
    with np.errstate(all="ignore"):
        broken = dataclasses.replace(lines[NAMES[0]], out="0" * 32)
        assert "no longer" in reading.replay(broken, tmp_path / "b200", known[NAMES[0]])
    with pytest.raises(Exception, match="record it again"):
        reading.replay(dataclasses.replace(lines[NAMES[0]], code="0" * 32), tmp_path / "b200", known[NAMES[0]])


def test_a_fake_device_is_never_recorded(tmp_path: Path) -> None:
    found = made(tmp_path, NAMES[:1], [], [])
    with pytest.raises(archive.ArchiveError, match="fake"):
        reading.record(found, list(reading.compare(found)), tmp_path / "b200")
    path = tmp_path / "day_one.tar.gz"
    code, said = dsv4(f"--read={path}", "--record", f"--into={tmp_path / 'b200'}")
    assert code == 2 and "fake" in said and not (tmp_path / "b200").exists()
