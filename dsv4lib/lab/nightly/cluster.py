"""Execute a plan's jobs on the workers of a dask.distributed scheduler, one job a worker thread.

The scheduler distributes; this side plans, submits, and keeps what comes back. Nothing is retried. A job whose worker
is lost is a crash, which `--resume` runs again; what that worker had not begun runs on another. Where this process is
killed, workers end what they run for it, and `--resume` goes on with what has no record.

A job that must run natively asks for the resource `GPU`: start one worker a GPU, with `--resources "GPU=1"`. A
client of a scheduler can run code on its workers: keep it on a private network, or use dask's TLS.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dsv4lib import env
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import records
from dsv4lib.lab.nightly import remote
from dsv4lib.lab.run import manifest, runner
from dsv4lib.lab.run.files import write_atomic
from dsv4lib.lab.run.plan import Job
from dsv4lib.lab.run.progress import Progress
from dsv4lib.lab.verdicts import Verdict

if TYPE_CHECKING:
    from distributed import Client, Future, Queue

ADDRESS = re.compile(r"(?:(?:tcp|tls|ws|wss)://)?[A-Za-z0-9_.\-\[\]:]+:\d{1,5}")
CONNECT_S = 30.0  # to reach the scheduler, and for its first worker
ALONE_S = 300.0  # without any worker before the night ends unfinished
POLL_S = 0.1
LOOK_EVERY_S = 2.0
NO_GPU_WORKER = f"no worker of the scheduler has the resource {remote.GPU}"


class SchedulerError(DSV4Error):
    """A scheduler that cannot be reached or used."""


@dataclass
class Submitted:
    """A job that the scheduler has."""

    job: Job
    attempt: int
    future: Future
    ticket: str
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


@contextlib.contextmanager
def connected(address: str, fingerprint: str) -> Iterator[Client]:
    """Connect with a scheduler whose workers all have these sources.

    Args:
        address: such as tcp://host:8786, or a scheduler file.
        fingerprint: of the library's sources.

    Raises:
        ArgumentError: neither an address nor a file.
        SchedulerError: dask.distributed is not installed, or the scheduler is unreachable, has no workers, or workers
            with other sources.
    """
    is_file = Path(address).is_file()
    if not is_file and not ADDRESS.fullmatch(address):
        raise ArgumentError("--scheduler", address, "an address such as tcp://host:8786, or a scheduler file")
    try:
        import distributed
    except ModuleNotFoundError as error:
        fix = "pip install 'dsv4lab[nightly]'" if env.is_installed() else "pip install -r requirements.lock"
        raise SchedulerError(f"--scheduler needs the package {error.name}: {fix}") from error

    where = {"scheduler_file": address} if is_file else {"address": address}
    try:
        client = distributed.Client(**where, timeout=CONNECT_S, set_as_default=False, name="dsv4-nightly")
    except (OSError, ValueError, KeyError) as error:  # a time-out is an OSError
        why = str(error).partition("\n")[0] or type(error).__name__
        raise SchedulerError(f"the scheduler at {address} cannot be reached: {why}") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_S)
        except TimeoutError:
            raise SchedulerError(f"the scheduler at {address} has no worker") from None
        told = client.run(remote.identity, on_error="return")
        wrong = [one for one in told.values() if not isinstance(one, dict) or one["fingerprint"] != fingerprint]
        if wrong:
            raise SchedulerError(
                f"{len(wrong)} of {len(told)} workers cannot run this plan: {_why(wrong[0], fingerprint)}"
            )
        yield client


def _why(told: Any, fingerprint: str) -> str:
    if isinstance(told, dict):
        return f"their sources are {told['fingerprint']}, those here {fingerprint}"
    return f"{type(told).__name__}: {told}"


def run(
    jobs: Sequence[Job],
    root: Path,
    set_name: str,
    options: runner.Options,
    *,
    scheduler: str,
    gpu_jobs: Collection[str] = (),
    budget_s: float | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    described: Mapping[str, Any] | None = None,
) -> runner.Result:
    """Run ``jobs`` on the workers of ``scheduler`` and record each here.

    Args:
        jobs, root, set_name, options, budget_s, resume, progress, described: as of `local.run`. Of the options folder,
            memory and figures are used.
        scheduler: its address or file.
        gpu_jobs: names of the jobs that ask for a worker with a GPU.

    Raises:
        DSV4Error: nothing to resume, the night is still going on, or see `connected`.
    """
    facts = dict(described or {})
    whole = bool(facts.pop("whole", False))
    runs, fingerprint = options.out or runner.runs_folder(root), env.source_fingerprint()
    progress = progress or Progress()
    with connected(scheduler, fingerprint) as client:
        own = runner.facts(root)
        if resume:
            plan = manifest.to_resume(runs, set_name, fingerprint, jobs, str(facts.get("night", "")))
        else:
            plan = manifest.new(runs, set_name, fingerprint, whole, jobs, **own, **facts)
        with manifest.hold(plan.folder):
            plan = plan.save(state="running", **own)
            deadline = None if budget_s is None else time.monotonic() + budget_s
            night = Night(client, root, plan, options, progress, deadline)
            night.run(jobs, gpu_jobs)
            return runner.finished(plan, jobs, night.keeper.stopped is not None)


class Night:
    """The jobs of one command on a cluster. ``keeper`` writes records where no worker did, and hears signals."""

    def __init__(
        self,
        client: Client,
        root: Path,
        plan: manifest.Manifest,
        options: runner.Options,
        progress: Progress,
        deadline: float | None,
    ):
        self.client, self.plan, self.options, self.progress = client, plan, options, progress
        self.keeper = runner.Supervisor(root, plan, options, progress)
        self.deadline = deadline
        self.pending: list[Submitted] = []
        self.tickets: list[Queue] = []
        self.alone_since: float | None = None
        self.looked = 0.0

    def run(self, jobs: Sequence[Job], gpu_jobs: Collection[str]) -> None:
        """Submit what has no finished record yet, and keep what comes back until nothing is pending."""
        waiting, attempts = self.keeper.left(jobs)
        with self.keeper.signals(), self.progress.showing(len(jobs), len(jobs) - len(waiting)):
            try:
                self._submit(waiting, attempts, gpu_jobs)
                while self.pending:
                    self._keep_what_is_done()
                    if self.keeper.stopped is not None:
                        self._end("stopped by a signal")
                    elif self.deadline is not None and time.monotonic() > self.deadline:
                        self._withdraw("the time budget is spent")
                    elif self._is_lost():
                        return
                    if self.pending:
                        time.sleep(POLL_S)
            finally:
                with contextlib.suppress(Exception):  # the scheduler may be gone
                    self.client.cancel([one.future for one in self.pending])
                    for ticket in self.tickets:
                        ticket.close()

    def _submit(self, waiting: Sequence[Job], attempts: Mapping[str, int], gpu_jobs: Collection[str]) -> None:
        from distributed import Queue

        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        has_gpu = any(worker["resources"].get(remote.GPU, 0) >= 1 for worker in workers)
        facts = {
            "set": self.plan.set, "fingerprint": self.plan.fingerprint, "memory_mb": self.options.memory_mb,
            "figures": self.options.figures,
        }  # fmt: skip
        for job in waiting:
            if job.name in gpu_jobs and not has_gpu:
                self.keeper.give_up(job, attempts[job.name], Verdict.SKIPPED, NO_GPU_WORKER)
                continue
            # Not that of an earlier client, whose tickets may still lie there if it was killed.
            key = f"dsv4-{self.plan.run_id}-{job.name}-{attempts[job.name]}-{uuid4().hex[:8]}"
            self.tickets.append(Queue(key, client=self.client, maxsize=1))
            self.tickets[-1].put(1, timeout=CONNECT_S)
            future = self.client.submit(
                remote.execute, remote.as_task(job, ticket=key, **facts), key=key, pure=False, retries=0,
                resources={remote.GPU: 1} if job.name in gpu_jobs else None,
            )  # fmt: skip
            self.pending.append(Submitted(job, attempts[job.name], future, key))

    def _keep_what_is_done(self) -> None:
        for one in [one for one in self.pending if one.future.done()]:
            self.pending.remove(one)
            status = one.future.status
            if status == "finished":
                self._keep(one, one.future.result())
            elif status == "error":
                error = one.future.exception()
                self._give_up(one, Verdict.CRASH, f"its worker could not run it: {type(error).__name__}: {error}")
            # else the scheduler has forgotten it: without a record it is not started

    def _keep(self, one: Submitted, answer: Mapping[str, Any]) -> None:
        """Write what a worker sent: the notebook first, then the record, which makes the job finished."""
        if remote.TAKEN in answer:
            self._give_up(one, Verdict.CRASH, "the worker that ran it was lost")
        elif remote.REFUSED in answer:
            self._give_up(one, Verdict.INTERRUPTED, str(answer[remote.REFUSED]))
        else:
            record = records.from_bytes(answer[remote.RECORD])
            folder = self.keeper.folder(one.job.name, one.attempt)
            if record.notebook:
                folder.mkdir()
                for name in set(remote.FILES) & set(answer["files"]):
                    write_atomic(folder / name, answer["files"][name])
            notebook = f"{folder.name}/notebook.ipynb" if "notebook.ipynb" in answer["files"] else ""
            record = replace(
                record, run_id=self.plan.run_id, job=one.job.name, attempt=one.attempt, notebook=notebook
            )  # fmt: skip
            records.write(record, self.plan.folder)
            self.progress.finished(record)

    def _give_up(self, one: Submitted, verdict: Verdict, reason: str) -> None:
        self.keeper.give_up(one.job, one.attempt, verdict, reason, one.at)

    def _withdraw(self, why: str) -> None:
        """Take back the jobs that no worker has begun: who has the ticket runs the job, and this side takes it."""
        back = [one for one in self.pending if remote.take(one.ticket, self.client)]
        if back:
            self.progress.note(f"{why}: {len(back)} jobs are not started")
            self.client.cancel([one.future for one in back])
            self.pending = [one for one in self.pending if one not in back]
        self.deadline = None

    def _end(self, why: str) -> None:
        """Take back what has not begun and end the rest, which workers notice by themselves."""
        self._withdraw(why)
        self.client.cancel([one.future for one in self.pending])
        for one in self.pending:
            self._give_up(one, Verdict.INTERRUPTED, why)
        self.pending = []

    def _is_lost(self) -> bool:
        """Look now and then for scheduler and workers; without workers for long, record what had begun as a crash."""
        now = time.monotonic()
        if now - self.looked < LOOK_EVERY_S:
            return False
        self.looked = now
        if self.client.status != "running":
            self.progress.note(f"the scheduler is gone: {len(self.pending)} jobs have no record")
            return True
        if self.client.scheduler_info(n_workers=-1)["workers"]:
            self.alone_since = None
            return False
        self.alone_since = self.alone_since or now
        if now - self.alone_since > ALONE_S:
            self._withdraw(f"the scheduler has had no worker for {ALONE_S:g} s")
            for one in self.pending:
                self._give_up(one, Verdict.CRASH, "the worker that ran it was lost")
            self.pending = []
        return False
