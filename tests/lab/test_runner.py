"""Every class of the runner, made by a notebook that really ends that way; parallel runs; what is left over."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import psutil
import pytest

from dsv4lib.lab import records
from dsv4lib.lab.commands import doctor
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import manifest, meter, plan, processes, runner, worker
from dsv4lib.lab.stage import Gate, Stage
from dsv4lib.lab.verdicts import LOOKS, SEVERITY, Verdict, exit_code, judge

SHORT = {name: {"time_limit_s": 8, "runs": [{}]} for name in ("quick", "nightly", "b200")}
OTHER = 'from dsv4lib import lab\n\nlab.verdict("other", metrics={{"wrong": 0}})'
NAN = 'from dsv4lib import lab\n\nlab.verdict("{name}", metrics={{"wrong": float("nan")}})'
SKIP = 'from dsv4lib import lab\n\nlab.verdict("{name}", metrics={{}}, skipped={{"wrong": "no GPU here"}})'
RED = 'from dsv4lib import lab\n\nlab.verdict("{name}", metrics={{"wrong": 2}})'
NOTEBOOK_TO_FULL_DISK = """import os, pathlib
saved = pathlib.Path(os.environ["DSV4_RUN_DIR"], "notebook.ipynb")
saved.unlink()
saved.symlink_to("/dev/full")"""

# name: (class, words of the reason, cell, changes)
ENDINGS: dict[str, tuple[Verdict, str, str, dict[str, Any]]] = {
    "fine": (Verdict.PASSED, "1 gate passed", "print('hello')", {}),
    "red": (Verdict.GATE_FAILED, "wrong = 2, required == 0", "", {"verdict": RED}),
    "nan": (Verdict.GATE_FAILED, "wrong = nan", "", {"verdict": NAN}),
    "assertion": (Verdict.ASSERTION, "one is not two", "assert 1 == 2, 'one is not two'", {}),
    "error": (Verdict.ERROR, "ZeroDivisionError: division by zero", "1 / 0", {}),
    "timeout": (Verdict.TIMEOUT, "computed past its limit of 8 s", "while True: pass", {"sets": SHORT}),
    "hangs": (Verdict.TIMEOUT, "times its limit of 8 s", "import time; time.sleep(99)", {"sets": SHORT}),
    "segfault": (Verdict.CRASH, "SIGSEGV", "import ctypes; ctypes.string_at(0)", {}),
    "exits": (Verdict.CRASH, "exit code 3", "import os; os._exit(3)", {}),
    "killed": (Verdict.CRASH, "SIGKILL", "import os; os.kill(os.getpid(), 9)", {}),
    "memory": (Verdict.OOM, "MemoryError", "b'x' * (1 << 60)", {}),
    "hungry": (Verdict.OOM, "more than the limit", "x = b'1' * 1_000_000_000; import time; time.sleep(60)", {}),
    "no_kernel": (Verdict.MISSING_KERNEL, "no-such-kernel", "", {}),
    "full_disk": (Verdict.DISK_FULL, "No space left", "open('/dev/full', 'w').write('x' * 99999)", {}),
    "full_disk_save": (Verdict.DISK_FULL, "could not be saved", NOTEBOOK_TO_FULL_DISK, {}),
    "silent": (Verdict.NO_VERDICT, "without calling lab.verdict", "", {"verdict": None}),
    "other_stage": (Verdict.NO_VERDICT, "stage 'other'", "", {"verdict": OTHER}),
    "leaves_early": (Verdict.NO_VERDICT, "without calling", "raise SystemExit", {"verdict": None}),
    "skips": (Verdict.SKIPPED, "no GPU here", "", {"verdict": SKIP}),
    "kernel": (Verdict.SKIPPED, "reference", "", {"kernel": True}),
    "no_backend": (Verdict.SKIPPED, "native", "", {"kernel": True}),
    "leaves_a_child": (
        Verdict.PASSED, "passed", "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)", {},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, stage_writer: Callable[..., Stage]) -> dict[str, Any]:
    """All endings run in one command, two at a time; maps stage to record, and "" to the command's result."""
    root = tmp_path_factory.mktemp("endings")
    stages = []
    for name, (_, _, body, changes) in ENDINGS.items():
        stages.append(stage_writer(root, name, body, **changes) if name != "other_stage" else None)
    stages[list(ENDINGS).index("other_stage")] = stage_writer(root, "other_stage", "", verdict=OTHER)
    stage_writer(root, "other")
    notebook = nbformat.read(root / "notebooks/no_kernel.ipynb", as_version=4)
    notebook.metadata["kernelspec"]["name"] = "no-such-kernel"
    nbformat.write(notebook, root / "notebooks/no_kernel.ipynb")
    by_name = {stage.name: stage for stage in stages}
    jobs = []
    for name, stage in by_name.items():
        backend = {"kernel": "reference", "no_backend": "native"}.get(name)
        jobs += plan.make([stage], "quick", backend=backend)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(meter, "ASLEEP", 0.5)
        patched.setenv("FORK_SERVER", "own")  # one that other stages have filled with imports holds 800 MB by itself
        result = runner.run(jobs, root, "quick", runner.Options(workers=2, memory_mb=800))
    return {"": result, **{record.stage: record for record in result.records}}


@pytest.mark.parametrize("name", ENDINGS)
def test_each_ending_has_its_class(finished: dict[str, Any], name: str) -> None:
    verdict, words, _, _ = ENDINGS[name]
    record: Record = finished[name]
    assert (record.verdict, words in record.reason) == (verdict, True), f"{record.verdict}: {record.reason}"


@pytest.mark.parametrize("name", [name for name in ENDINGS if name != "no_backend"])
def test_the_saved_notebook_says_what_happened(finished: dict[str, Any], name: str) -> None:
    record: Record = finished[name]
    notebook = nbformat.read(finished[""].manifest.folder / record.notebook, as_version=4)
    assert notebook.metadata["dsv4"]["verdict"] == record.verdict == ENDINGS[name][0]
    assert LOOKS[record.verdict].label in notebook.cells[0].source
    assert "dsv4-banner" in notebook.cells[0].metadata["tags"]
    states = [cell.metadata.get("papermill", {}).get("status") for cell in notebook.cells[1:]]
    stopped_early = record.verdict in (Verdict.TIMEOUT, Verdict.CRASH, Verdict.ASSERTION, Verdict.ERROR, Verdict.OOM)
    assert notebook.metadata["papermill"]["exception"] is (True if stopped_early or record.verdict in (
        Verdict.MISSING_KERNEL, Verdict.DISK_FULL) else None)  # fmt: skip
    if stopped_early:
        # prose, parameters, injected parameters, the cell that ended it, the verdict that never ran
        assert states == ["completed", "completed", "completed", "failed", "pending"]
    text = (finished[""].manifest.folder / record.notebook).read_text()
    assert "papermill-error-cell" not in text


def test_each_class_has_its_own_exit_code_and_look() -> None:
    codes = [look.code for look in LOOKS.values()]
    assert len(set(codes)) == len(codes) == len(Verdict)
    assert len({look.label for look in LOOKS.values()}) == len(Verdict)
    assert len({(look.ink, look.paper) for look in LOOKS.values()}) == len(Verdict)
    assert set(SEVERITY) | {Verdict.PASSED, Verdict.SKIPPED} == set(Verdict)
    for verdict in SEVERITY:
        assert exit_code([Verdict.PASSED, verdict, Verdict.SKIPPED]) == LOOKS[verdict].code
    assert exit_code([Verdict.PASSED, Verdict.SKIPPED]) == 0
    assert exit_code([Verdict.SKIPPED]) == 20
    assert exit_code([Verdict.PASSED], shrank=True) == 19


def test_exit_code_of_the_whole_command(finished: dict[str, Any]) -> None:
    assert exit_code(record.verdict for record in finished[""].records) == LOOKS[Verdict.DISK_FULL].code


def test_nothing_is_left_behind(finished: dict[str, Any]) -> None:
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "600"]]
    assert left == []
    mine = [path for path in Path(tempfile.gettempdir()).glob("dsv4-????????") if path.is_dir()]
    assert [path for path in mine if (path / "job.json").exists() and _ours(path, finished)] == []


def _ours(path: Path, finished: dict[str, Any]) -> bool:
    return str(finished[""].manifest.folder) in (path / "job.json").read_text()


def test_records_are_one_file_each_and_readable(finished: dict[str, Any]) -> None:
    folder = finished[""].manifest.folder
    assert len(list((folder / "records").glob("*.parquet"))) == len(ENDINGS)
    table = records.read(folder)
    assert table.num_rows == len(ENDINGS) and table.schema.equals(records.schema())
    row = next(row for row in table.to_pylist() if row["stage"] == "red")
    assert row["verdict"] == "gate_failed" and dict(row["metrics"]) == {"wrong": 2.0}
    assert row["gates"][0] | {"reason": ""} == {
        "metric": "wrong", "op": "==", "bound": 0.0, "last_seen": 0.0, "reason": "", "value": 2.0, "state": "failed",
    }  # fmt: skip
    assert json.loads(row["parameters"]) == {"backend": "auto", "fault": "none", "seed": 0}
    assert json.loads(row["versions"])["browser"] == (doctor.chromium_version() or "none")
    assert json.loads(row["versions"])["papermill"] and row["fingerprint"] == finished[""].manifest.fingerprint
    assert 0 < row["seconds"] < 60 and row["peak_mb"] > 0 and 0 < row["cpu_s"] and row["counted_s"] <= row["cpu_s"]
    with pytest.raises(FileExistsError):
        records.write(finished["red"], folder)


def test_a_limit_counts_cpu_time(finished: dict[str, Any]) -> None:
    """The busy loop was stopped for what it computed, the sleeper for what it did not."""
    assert finished["timeout"].counted_s == pytest.approx(8, abs=2)
    assert finished["hangs"].counted_s < 8 and finished["hangs"].seconds > 4


def test_the_memory_limit_counts_what_is_resident(finished: dict[str, Any]) -> None:
    assert finished["hungry"].peak_mb > 800
    assert 50 < finished["fine"].peak_mb < 800


def test_negatives_pass_only_if_the_named_gate_turns_red(make: Callable[..., Stage]) -> None:
    two = [
        {"name": "injected", "parameters": {"fault": "injected"}, "expect_fail": "wrong"},
        {"name": "missed", "parameters": {"fault": "injected"}, "expect_fail": "other"},
    ]
    gates = [
        {"metric": name, "op": "==", "bound": 0, "last_seen": 0, "reason": "x"} for name in ("wrong", "other")
    ]  # fmt: skip
    cell = 'from dsv4lib import lab\n\nlab.verdict("{name}", metrics={{"wrong": int(fault != "none"), "other": 0}})'
    stage = make(negatives=two, gates=gates, verdict=cell)
    found = runner.run(plan.make([stage], "quick", negatives=True), stage.root, "negatives").records
    assert [(record.negative, record.verdict) for record in found] == [
        ("injected", Verdict.PASSED),
        ("missed", Verdict.STAYED_GREEN),
    ]


@pytest.mark.parametrize(
    ("metrics", "skipped", "verdict", "reason"),
    [
        ({"a": 1, "b": 1}, {}, Verdict.PASSED, "the gate on a, b red"),
        ({"a": 1}, {"b": "no GPU"}, Verdict.SKIPPED, "b: no GPU"),
        ({"a": 0}, {"b": "no GPU"}, Verdict.STAYED_GREEN, "left the gate on a green; skipped: b: no GPU"),
        ({"a": 0, "b": 1}, {"c": "no GPU"}, Verdict.STAYED_GREEN, "left the gate on a green"),
        ({"b": 1}, {}, Verdict.STAYED_GREEN, "left the gate on a green"),
    ],
)
def test_a_gate_that_a_fault_skips_is_neither_red_nor_green(
    metrics: dict[str, float], skipped: dict[str, str], verdict: Verdict, reason: str
) -> None:
    record = SimpleNamespace(negative="injected", expect_fail="a, b")
    gates = judge([Gate(metric=name, op="==", bound=0, last_seen=0, reason="x") for name in "abc"], metrics, skipped)
    found, why = runner._negative(record, ("a", "b"), gates, "x")  # type: ignore[arg-type]
    assert found is verdict and why.partition(" (x)")[0].removesuffix(", as it must").endswith(reason)


def test_a_negative_that_crashes_did_not_turn_its_gate_red(make: Callable[..., Stage]) -> None:
    stage = make(body="assert fault == 'none'")
    assert runner.run_negative(stage, "injected").verdict is Verdict.ASSERTION


def test_eight_parallel_runs_do_not_mix(make: Callable[..., Stage]) -> None:
    """Each run waits for all others to be there, then reports its own seed and environment."""
    body = """import os, pathlib, time
here = pathlib.Path(os.environ["DSV4_RUN_DIR"])
(here / "seed").write_text(str(seed))
deadline = time.time() + 900
while len(list(here.parent.glob("tiny-*/seed"))) < 8 and time.time() < deadline:
    time.sleep(0.2)
together = len(list(here.parent.glob("tiny-*/seed")))
private = os.environ["JUPYTER_RUNTIME_DIR"]"""
    cell = """from dsv4lib import lab
lab.verdict("{name}", metrics={{"wrong": 0, "seed": seed, "together": together, "private": hash(private)}})"""
    runs = [{"seed": number} for number in range(8)]
    stage = make(body=body, verdict=cell, sets={"quick": {"time_limit_s": 900, "runs": runs}})
    found = runner.run_stage(stage, "quick", runner.Options(workers=8))
    assert [record.verdict for record in found] == [Verdict.PASSED] * 8
    assert [record.metrics["seed"] for record in found] == list(range(8))
    assert {record.metrics["together"] for record in found} == {8}
    assert len({record.metrics["private"] for record in found}) == 8
    outputs = [(record.parameters["seed"], record.notebook) for record in found]
    assert [seed for seed, _ in outputs] == list(range(8)) and len({path for _, path in outputs}) == 8


def test_gpu_runs_follow_each_other(
    make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two native runs and one device: the second starts after the first has ended. The device is only a name here."""
    monkeypatch.setattr(runner.devices, "gpus", lambda: ["GPU-test"])
    monkeypatch.setattr(runner.devices, "lock_folder", lambda: tmp_path)
    monkeypatch.setattr(plan.backends, "resolve", lambda name, arch, kernel: "native")
    stage = make(
        kernel=True,
        body="import os\nassert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-test'",
        sets={"quick": {"time_limit_s": 60, "runs": [{"seed": 1}, {"seed": 2}]}},
    )
    first, second = sorted(runner.run_stage(stage, options=runner.Options(workers=2)), key=lambda r: r.started)
    assert [first.verdict, second.verdict] == [Verdict.PASSED] * 2
    assert (second.started - first.started).total_seconds() >= first.seconds


def test_headless_environment_of_a_notebook(make: Callable[..., Stage]) -> None:
    body = """import os, pathlib, stat
assert os.environ["DSV4_HEADLESS"] == "1" and os.environ["MPLBACKEND"] == "agg"
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
assert os.environ["DSV4_BACKEND"] == "reference" and backend == "reference"
assert pathlib.Path.cwd() == pathlib.Path(os.environ["DSV4_WORKSPACE"])
private = pathlib.Path(os.environ["IPYTHONDIR"]).parent
assert stat.S_IMODE(private.stat().st_mode) == 0o700
from ipykernel.connect import get_connection_info
info = get_connection_info(unpack=True)
assert info["transport"] == "ipc" and info["ip"].startswith(str(private)), info"""
    record = runner.run_stage(make(body=body), backend="reference")[0]
    assert record.verdict is Verdict.PASSED, record.reason


def test_a_kernel_ends_by_its_exit_functions(make: Callable[..., Stage], tmp_path: Path) -> None:
    """They run, oldest last, before the process ends without taking its modules apart."""
    body = f"""import atexit, gc, os, sys, types
file = os.open({str(tmp_path / "said")!r}, os.O_CREAT | os.O_WRONLY)
assert gc.get_threshold()[0] >= 10_000
class Left:
    def __del__(self, write=os.write, file=file):
        write(file, b"taken apart")
sys.modules["left"] = types.ModuleType("left")  # cleared as the interpreter ends
sys.modules["left"].left = Left()
atexit.register(os.write, file, b"older ")
atexit.register(os.write, file, b"newer ")"""
    record = runner.run_stage(make(body=body))[0]
    assert record.verdict is Verdict.PASSED, record.reason
    assert (tmp_path / "said").read_text() == "newer older "


def test_a_job_whose_worker_dies_is_a_crash(make: Callable[..., Stage]) -> None:
    record = runner.run_stage(make(body="import os, signal; os.kill(os.getppid(), signal.SIGKILL)"))[0]
    assert record.verdict is Verdict.CRASH and "ended with code -9" in record.reason


def test_a_full_disk_at_the_record_leaves_nothing_running(
    make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first record cannot be written while the other notebook still sleeps; both must be gone afterwards."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records, "write", full)
    jobs = plan.make([make("ends"), make("sleeps", "import time; time.sleep(600)")], "quick", backend="reference")
    with pytest.raises(OSError, match="No space left"):
        runner.run(jobs, tmp_path, "quick", runner.Options(workers=2))
    run_id = manifest.stored(tmp_path / "data" / "runs")[0].run_id
    assert [found for job in jobs for found in processes.marked(f"{run_id}/{job.name}")] == []


def test_a_run_in_progress_holds_its_folder(tmp_path: Path) -> None:
    with manifest.hold(tmp_path), pytest.raises(Exception, match="still going on"):
        manifest.hold(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "verdict"),
    [
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", Verdict.OOM),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB", Verdict.OOM),
        ("OSError", "[Errno 12] Cannot allocate memory", Verdict.OOM),
        ("OSError", "[Errno 2] No such file", Verdict.ERROR),
        ("AssertionError", "CUDA out of memory is only a text here", Verdict.ASSERTION),
    ],
)
def test_how_libraries_say_out_of_memory(name: str, text: str, verdict: Verdict, tmp_path: Path) -> None:
    from papermill.exceptions import PapermillExecutionError

    error = PapermillExecutionError(1, 1, "", name, text, [])
    assert worker.classify(error, tmp_path, 0)[0] is verdict


def test_marks_find_only_their_own_processes() -> None:
    assert processes.marked("no-such-token") == []
    assert os.getpid() not in [process.pid for process in processes.marked("")]
