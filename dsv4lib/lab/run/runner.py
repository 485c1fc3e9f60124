"""Run stages. Notebooks have processes of their own; this is the only place that decides what became of them.

One supervisor, single-threaded: it starts workers (`worker.py`), watches time, memory and signals, ends everything
that belongs to a run, judges the reported metrics, stamps the notebook and appends the record. CPU runs share the
cores there are; runs on one GPU follow each other. There is no retry: a second try would buy a label, not a pass.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from dsv4lib import backends, env
from dsv4lib.lab import records
from dsv4lib.lab.commands.doctor import chromium_version
from dsv4lib.lab.notebook import slices
from dsv4lib.lab.records import Record
from dsv4lib.lab.report.scrub import scrub, scrub_all
from dsv4lib.lab.report.stamp import stamp
from dsv4lib.lab.run import devices, forkserver, kernel, manifest, network, processes
from dsv4lib.lab.run.files import own_folders, read_own
from dsv4lib.lab.run.meter import Meter
from dsv4lib.lab.run.plan import Job, for_negative, make
from dsv4lib.lab.run.progress import Progress
from dsv4lib.lab.stage import Stage, load, runs_folder, workspace
from dsv4lib.lab.verdicts import Verdict, judge, overall

POLL_S = 0.05
METER_EVERY_S = 0.5
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)  # by JSON that says nothing usable
LOG_CHARACTERS = 20_000  # kept of what a failed run printed outside of cells


@dataclass
class Options:
    """How to run.

    Attributes:
        out: folder of the runs; default `stage.runs_folder`.
        workers: notebooks at the same time; default the number of usable cores.
        memory_mb: a run whose processes hold more than this is ended as out of memory; default 90 % of the machine.
        figures: draw them; without, a page shows their alt texts.
        fork: fork runs from a process with their imports (`forkserver`); without, each starts processes of its own.
        slices: of an injected fault run only the cells that its gate depends on (`slices`), and judge no other gate.
            Its record says how many cells were left out, its notebook which. A gate left green has failed.
        deadline: monotonic time after which no job starts; those that run go on.
        stop: asked all the time; the number of a signal has the effect of that signal, 0 has none.
    """

    out: Path | None = None
    workers: int | None = None
    memory_mb: float | None = None
    figures: bool = True
    slices: bool = False
    fork: bool = True
    deadline: float | None = None
    stop: Callable[[], int] | None = None


@dataclass
class Result:
    """What one command did. It has its manifest, the last record of each job, and whether a signal ended it."""

    manifest: manifest.Manifest
    records: list[Record]
    interrupted: bool


@dataclass
class Active:
    """A run in progress."""

    job: Job
    stage: Stage
    attempt: int
    worker: processes.Worker
    token: str
    folder: Path
    private: Path
    began: float
    started: datetime
    lock: FileLock | None
    oom_before: int
    meter: Meter
    part: slices.Slice | None = None

    def cell(self) -> tuple[int, int] | None:
        """Return the index of the running cell and number of cells, once known."""
        try:
            stored = json.loads(read_own(self.private / "progress.json"))
            return int(stored["cell"]), int(stored["cells"])
        except UNREADABLE:
            return None


def run_stage(stage: Stage, set_name: str = "quick", options: Options | None = None, **texts: str) -> list[Record]:
    """Run a set of one stage (used by the tests). ``texts`` are parameters as on a command line."""
    return run(make([stage], set_name, texts=texts), stage.root, set_name, options).records


def run_negative(stage: Stage, name: str, options: Options | None = None) -> Record:
    """Run one injected fault. The record is `passed` only if the named gate turned red."""
    return run([for_negative(stage, name)], stage.root, "negatives", options).records[0]


def run(
    jobs: Sequence[Job],
    root: Path | None = None,
    set_name: str = "quick",
    options: Options | None = None,
    *,
    whole: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    described: Mapping[str, Any] | None = None,
) -> Result:
    """Run ``jobs`` and record each.

    Args:
        jobs: from `plan.make`.
        root: the workspace they belong to.
        set_name: written to the manifest.
        whole: every stage of the workspace, nothing changed by hand.
        resume: continue the last interrupted command with the same jobs instead of starting a new one.
        progress: where to show how it goes; silent by default.
        described: further fields of a new manifest.

    Raises:
        DSV4Error: nothing to resume, or the run is still going on.
    """
    root, options = root or workspace(), options or Options()
    runs = options.out or runs_folder(root)
    fingerprint, own = env.source_fingerprint(), facts(root)
    if resume:
        night = str((described or {}).get("night", ""))
        plan = manifest.to_resume(runs, set_name, fingerprint, jobs, night)
    else:
        plan = manifest.new(runs, set_name, fingerprint, whole, jobs, **own, **(described or {}))
    with manifest.hold(plan.folder):
        plan = plan.save(state="running", **own)  # a resumed command may be of another commit with the same sources
        supervisor = Supervisor(root, plan, options, progress or Progress())
        supervisor.run(jobs)
        return finished(plan, jobs, supervisor.stopped is not None)


def finished(plan: manifest.Manifest, jobs: Sequence[Job], interrupted: bool) -> Result:
    """Close the manifest of a command that is over, for now, and return its result."""
    found = records.latest(records.load(plan.folder))
    ordered = [found[job.name] for job in jobs if job.name in found]
    over = not interrupted and len(ordered) == len(jobs) and all(record.finished for record in ordered)
    plan = plan.save(state="complete" if over else "interrupted", executed=manifest.executed(ordered))
    return Result(plan, ordered, interrupted)


def facts(root: Path) -> dict[str, Any]:
    """Return what each record and the plan say of sources and machine."""
    commit, dirty = env.revision()
    return {
        "commit": commit,
        "dirty": dirty,
        "label": scrub(env.machine_label(), root),
        "machine": env.machine(),
        "versions": {**env.versions(), "browser": chromium_version() or "none"},
    }


class Supervisor:
    """Runs the jobs of one command. ``stopped`` is the signal that ended it early, if one did."""

    def __init__(self, root: Path, plan: manifest.Manifest, options: Options, progress: Progress):
        self.root, self.plan, self.progress = root, plan, progress
        self.cores = len(os.sched_getaffinity(0))
        self.workers = options.workers or self.cores
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6
        self.memory_mb = options.memory_mb or 0.9 * total
        self.figures, self.slices, self.fork = options.figures, options.slices, options.fork
        self.deadline, self.stop = options.deadline, options.stop
        self.gpus = devices.gpus()
        self.stopped: int | None = None
        self.active: list[Active] = []

    def run(self, jobs: Sequence[Job]) -> None:
        """Run what has no finished record yet. On a signal end everything and record it as interrupted."""
        self._clean_up_after_a_killed_runner()
        waiting, attempts = self.left(jobs)
        done = len(jobs) - len(waiting)
        self.workers = max(1, min(self.workers, len(waiting)))  # fewer notebooks than cores: more threads for each
        with self.signals(), self.progress.showing(len(jobs), done):
            try:
                while (waiting or self.active) and self.stopped is None:
                    if waiting and self.deadline is not None and time.monotonic() > self.deadline:
                        self.progress.note(f"the time budget is spent: {len(waiting)} jobs are not started")
                        waiting = []
                    waiting = [job for job in waiting if not self._try_start(job, attempts[job.name])]
                    for run in list(self.active):
                        self._watch(run)
                    if self.stop is not None and self.stopped is None:
                        self.stopped = self.stop() or None
                    self.progress.update([(a.job.name, a.cell(), time.monotonic() - a.began) for a in self.active])
                    time.sleep(POLL_S)
            finally:
                self._end_all()

    def left(self, jobs: Sequence[Job]) -> tuple[list[Job], dict[str, int]]:
        """Return the jobs that have no finished record yet, and the number of the next attempt of each job."""
        before = records.latest(records.load(self.plan.folder))
        attempts = {job.name: before[job.name].attempt + 1 if job.name in before else 0 for job in jobs}
        for job in jobs:
            while self._is_taken(job.name, attempts[job.name]):
                attempts[job.name] += 1
        return [job for job in jobs if job.name not in before or not before[job.name].finished], attempts

    def give_up(self, job: Job, attempt: int, verdict: Verdict, reason: str, started: datetime | None = None) -> None:
        """Record a job that left nothing to judge, such as one whose machine was lost."""
        now = datetime.now(UTC)
        seconds = (now - (started or now)).total_seconds()
        self._record(job, load(job.stage, self.root), attempt, verdict, reason, started or now, seconds)

    def _end_all(self) -> None:
        """End what is still active. Every run is ended even if the record of one cannot be written."""
        name = signal.Signals(self.stopped).name if self.stopped else "an error of the runner"
        troubles: list[OSError] = []
        for run in list(self.active):
            try:
                self._finish(run, Verdict.INTERRUPTED, f"stopped by {name}")
            except OSError as trouble:
                troubles.append(trouble)
        if troubles:
            raise troubles[0]

    def _clean_up_after_a_killed_runner(self) -> None:
        """End processes and remove private folders that an earlier attempt of this command left."""
        for folder in self.plan.folder.glob("*/"):
            processes.end(self._token(folder))
        for folder in own_folders(Path(_short_temporary()), "dsv4-"):
            with contextlib.suppress(*UNREADABLE):
                if Path(json.loads(read_own(folder / "job.json"))["output"]).parent.parent == self.plan.folder:
                    shutil.rmtree(folder)

    def _is_taken(self, job: str, attempt: int) -> bool:
        return self.folder(job, attempt).exists() or records.path(self.plan.folder, job, attempt).exists()

    def folder(self, job: str, attempt: int) -> Path:
        """Return the folder of this attempt's notebook."""
        return self.plan.folder / (job if attempt == 0 else f"{job}-{attempt}")

    def _token(self, folder: Path) -> str:
        """The mark of the processes of one attempt; unique because the command's name is."""
        return f"{self.plan.run_id}/{folder.name}"

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Have signals that ask to end leave their number in ``stopped``, inside."""

        def stop(number: int, frame: Any) -> None:
            self.stopped = number

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if threading.current_thread() is not threading.main_thread():
            numbers = ()  # Python lets only the main thread set handlers
        previous = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _try_start(self, job: Job, attempt: int) -> bool:
        """Start ``job`` if there is room for it; a job that no back end can run is recorded as skipped."""
        stage = load(job.stage, self.root)
        if job.unavailable:
            self._record(job, stage, attempt, Verdict.SKIPPED, job.unavailable, datetime.now(UTC), 0.0)
            return True
        if len(self.active) >= self.workers:
            return False
        device, lock = "", None
        if job.backend == "native":
            taken = devices.try_take(self.gpus or ["0"])
            if taken is None:
                return False
            device, lock = taken
        self.active.append(self._start(job, stage, attempt, device, lock))
        return True

    def _start(self, job: Job, stage: Stage, attempt: int, device: str, lock: FileLock | None) -> Active:
        folder = self.folder(job.name, attempt)
        folder.mkdir()
        private = Path(tempfile.mkdtemp(prefix="dsv4-", dir=_short_temporary()))
        token = self._token(folder)
        task = {
            "input": str(stage.notebook_path),
            "output": str(folder / "notebook.ipynb"),
            "cwd": str(self.root),
            "parameters": job.parameters,
        }
        part = slices.of_notebook(stage.notebook_path, stage.negative(job.negative)) if self._is_sliced(job) else None
        if part is not None:
            task["slice"] = asdict(part)
        (private / "job.json").write_text(json.dumps(task))
        environment = self._environment(job, folder, private, token, device)
        environment[slices.ONLY] = ",".join(stage.negative(job.negative).metrics) if part is not None else ""
        started, began, oom = datetime.now(UTC), time.monotonic(), processes.oom_kills()
        worker = self._worker(private, environment, stage.notebook_path)
        meter = Meter(worker.pid, began)
        return Active(job, stage, attempt, worker, token, folder, private, began, started, lock, oom, meter, part)

    def _worker(self, private: Path, environment: dict[str, str], notebook: Path) -> processes.Worker:
        """Fork the process of a run, or say why not and start it."""
        log = private / "worker.log"
        if self.fork:
            try:
                imports = forkserver.imports_of(notebook)
                return forkserver.fork(private, environment, self.root, log, imports)
            except forkserver.Refused as why:
                self.fork = False
                self.progress.note(f"notebooks start slower, in processes that import everything anew: {why}")
        return processes.start(
            [sys.executable, "-m", "dsv4lib.lab.run.worker", str(private)], environment, self.root, log
        )

    def _is_sliced(self, job: Job) -> bool:
        return self.slices and job.kind == "negative"

    def _environment(self, job: Job, folder: Path, private: Path, token: str, device: str) -> dict[str, str]:
        """Everything that Jupyter, IPython and matplotlib keep goes to the private folder, kernels included."""
        kernels = private / "share" / "kernels" / "python3"
        kernels.mkdir(parents=True)
        command = [*kernel.COMMAND, "-f", "{connection_file}"]
        spec = {"argv": command, "display_name": "Python 3", "language": "python"}
        (kernels / "kernel.json").write_text(json.dumps(spec))
        paths = [str(env.package().parent), str(self.root), os.environ.get("PYTHONPATH", "")]
        threads = str(max(1, self.cores // min(self.workers, self.cores)))
        wanted = {
            processes.MARK: token,
            "DSV4_HEADLESS": "1",
            "DSV4_RUN_DIR": str(folder.resolve()),
            "DSV4_BACKEND": job.backend,
            network.CLOSED: "off",
            "DSV4_WORKSPACE": str(self.root),
            "JUPYTER_PATH": str(private / "share"),
            "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
            "JUPYTER_CONFIG_DIR": str(private / "config"),
            "JUPYTER_PLATFORM_DIRS": "1",
            "IPYTHONDIR": str(private / "ipython"),
            "MPLBACKEND": "agg",
            "DSV4_FIGURES": "" if self.figures else "off",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
        }
        if device:
            wanted["CUDA_VISIBLE_DEVICES"] = device
        few = {
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning multiplies the CPU time on a busy machine, which a limit counts
            "OPENBLAS_NUM_THREADS": "1",
        }  # numpy's threads start at its import: none can fork
        return {**few, **os.environ, **wanted}

    def _watch(self, run: Active) -> None:
        """End ``run`` if it is over or beyond a limit."""
        now = time.monotonic()
        if run.worker.poll() is not None:
            self._finish(run, *self._outcome(run))
        elif now - run.meter.at > METER_EVERY_S or not run.meter.peak_mb:
            run.meter.sample(now)
            resident = run.meter.resident_mb
            if reason := run.meter.exceeded(run.job.time_limit_s):
                self._finish(run, Verdict.TIMEOUT, reason)
            elif resident > self.memory_mb:
                reason = f"it held {resident:.0f} MB, more than the limit of {self.memory_mb:.0f} MB"
                self._finish(run, Verdict.OOM, reason)

    def _outcome(self, run: Active) -> tuple[Verdict | None, str]:
        """What the worker says; a class of None means that the notebook ran to its end."""
        try:
            stored = json.loads(read_own(run.private / "outcome.json"))
            run.meter.cpu_s = max(run.meter.cpu_s, stored["cpu_s"])  # to its very end, where samples stop before
            return (Verdict(stored["class"]) if stored["class"] else None), str(stored["reason"])
        except UNREADABLE:
            code = run.worker.returncode
            if code == -signal.SIGKILL and processes.oom_kills() > run.oom_before:
                return Verdict.OOM, "the operating system killed the run: out of memory"
            return Verdict.CRASH, f"the process that ran the notebook ended with code {code}"

    def _finish(self, run: Active, kind: Verdict | None, reason: str) -> None:
        """End every process of ``run``, judge it, stamp its notebook, write its record, remove its private folder."""
        self.active.remove(run)
        seconds = time.monotonic() - run.began
        processes.end(run.token, run.worker)
        position = run.cell()
        try:
            stopped_at = position[0] if kind is not None and position else None
            self._record(
                run.job, run.stage, run.attempt, kind, reason, run.started, seconds, run.folder, run.meter,
                stopped_at, run.part,
            )  # fmt: skip
            if kind is not None:
                self._keep_log(run)
        finally:
            shutil.rmtree(run.private, ignore_errors=True)
            if run.lock is not None:
                run.lock.release()

    def _keep_log(self, run: Active) -> None:
        """What the worker and the kernel printed outside of cells, for debugging a failure."""
        with contextlib.suppress(OSError):
            said = (run.private / "worker.log").read_text(errors="replace")[-LOG_CHARACTERS:]
            if said.strip():
                (run.folder / "worker.log").write_text(scrub(said, self.root))

    def _record(
        self,
        job: Job,
        stage: Stage,
        attempt: int,
        kind: Verdict | None,
        reason: str,
        started: datetime,
        seconds: float,
        folder: Path | None = None,
        meter: Meter | None = None,
        stopped_at: int | None = None,
        part: slices.Slice | None = None,
    ) -> None:
        record = Record(
            run_id=self.plan.run_id, job=job.name, attempt=attempt, stage=job.stage, title=stage.title, set=job.set,
            kind=job.kind, negative=job.negative, expect_fail=job.expect_fail, overrides=job.overrides,
            parameters=job.parameters, backend=job.backend, arch=_arch(job, stage), archs=[*_archs(job, stage)],
            fingerprint=self.plan.fingerprint,
            stage_fingerprint=job.stage_fingerprint, versions=self.plan.versions, machine=self.plan.machine,
            commit=self.plan.commit, dirty=self.plan.dirty, label=self.plan.label,
            verdict=kind or Verdict.PASSED, reason=reason, started=started, seconds=seconds,
            time_limit_s=job.time_limit_s,
        )  # fmt: skip
        if meter is not None:
            record = replace(record, cpu_s=meter.cpu_s, counted_s=meter.computing_s, peak_mb=meter.peak_mb)
        if folder is not None:
            record = replace(record, notebook=f"{folder.name}/notebook.ipynb")
            if kind is None:
                record = _judged(record, stage, folder / "verdict.json", part)
            if kind is None and (refused := network.refused(folder)):
                why = f"it reached for the network, which a run does not have: {'; '.join(refused[:3])}"
                record = replace(record, verdict=Verdict.ERROR, reason=why)
        clean = functools.partial(scrub, root=self.root)
        texts = ("reason", "metrics", "skipped", "overrides", "parameters")
        record = replace(
            record, **{name: scrub_all(getattr(record, name), clean) for name in texts},
            gates=[replace(gate, reason=clean(gate.reason)) for gate in record.gates],
        )  # fmt: skip
        if folder is not None:
            with _full_disk_is_a_verdict() as full:
                stamp(record, folder / "notebook.ipynb", stage.notebook_path, stopped_at, clean)
            if full:
                record = replace(record, verdict=Verdict.DISK_FULL, reason=full[0], notebook="")
        records.write(record, self.plan.folder)
        self.progress.finished(record)


def _arch(job: Job, stage: Stage) -> str:
    """The architecture whose code a job runs here; empty for a stage without a kernel."""
    if not stage.kernel:
        return ""
    return backends.runs(job.backend, _archs(job, stage)) if job.backend == "native" else stage.arch


def _archs(job: Job, stage: Stage) -> tuple[str, ...]:
    """The architectures that a job's kernels may run as; none for a stage without a kernel."""
    return stage.archs_in(job.set, bool(job.negative)) if stage.kernel else ()


def _judged(record: Record, stage: Stage, path: Path, part: slices.Slice | None = None) -> Record:
    """``record`` with the notebook's report read from ``path`` and judged by the stage's gates.

    Of a slice only the gates on its metrics are judged: it says nothing about the others.
    """
    try:
        stored = json.loads(read_own(path))
        metrics = {str(k): float(v) for k, v in stored["metrics"].items()}
        skipped = {str(k): str(v) for k, v in stored["skipped"].items()}
    except FileNotFoundError:
        return replace(record, verdict=Verdict.NO_VERDICT, reason="the notebook ended without calling lab.verdict")
    except (*UNREADABLE, AttributeError) as error:
        return replace(record, verdict=Verdict.NO_VERDICT, reason=f"its verdict cannot be read: {error}")
    if stored.get("stage") != stage.name:
        reason = f"its verdict is that of stage {stored.get('stage')!r}"
        return replace(record, verdict=Verdict.NO_VERDICT, reason=reason)
    expected = stage.negative(record.negative).metrics if record.negative else ()
    wanted = [gate for gate in stage.gates if part is None or gate.metric in expected]
    gates = judge(wanted, metrics, skipped)
    verdict, reason = overall(gates)
    if record.kind == "negative":
        verdict, reason = _negative(record, expected, gates, reason)
    elif verdict is Verdict.PASSED and stage.kernel and record.backend == "reference":
        verdict, reason = Verdict.SKIPPED, "the reference back end does not run the kernel, so it verifies nothing"
    if part is not None and part.left_out:
        reason += f"; {len(part.left_out)} cells were left out, which "
        reason += "this gate does not depend on" if len(expected) == 1 else "these gates do not depend on"
    return replace(record, verdict=verdict, reason=reason, metrics=metrics, skipped=skipped, gates=gates)


def _negative(record: Record, expected: Sequence[str], gates: Sequence[Any], reason: str) -> tuple[Verdict, str]:
    """Verdict and reason of an injected fault: every gate on ``expected`` must fail; skipped is neither."""
    states = {gate.metric: gate.state for gate in gates}
    skipped = [f"{gate.metric}: {gate.reason}" for gate in gates if gate.state == "skipped" and gate.metric in expected]
    green = [metric for metric in expected if states.get(metric) not in ("failed", "skipped")]
    if green:
        reason = f"the injected fault {record.negative} left the gate on {', '.join(green)} green"
        return Verdict.STAYED_GREEN, "; skipped: ".join([reason, *skipped])
    if skipped:
        return Verdict.SKIPPED, "; ".join(skipped)
    return Verdict.PASSED, f"the injected fault turned the gate on {record.expect_fail} red, as it must ({reason})"


@contextlib.contextmanager
def _full_disk_is_a_verdict() -> Iterator[list[str]]:
    """Collect a full disk as a reason instead of raising it."""
    import errno

    full: list[str] = []
    try:
        yield full
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        full.append("the executed notebook could not be saved: no space left on device")


def _short_temporary() -> str:
    """A folder for sockets: their paths may have 107 bytes at most, so a deep TMPDIR is not used."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 60 else "/tmp"
