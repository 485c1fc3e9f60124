"""Plan what one command will run. Jobs are made and checked completely before the first kernel starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dsv4lib import backends
from dsv4lib.errors import ArgumentError, BackendUnavailable, DSV4Error
from dsv4lib.lab.stage import Stage, UnknownParameter, resolve_parameters


@dataclass(frozen=True)
class Job:
    """One run of one notebook.

    Attributes:
        name: unique inside the command; also the name of its folder.
        overrides: what the set (or negative) asks for, with the command line's wishes on top.
        backend: resolved; empty if ``unavailable`` says why no back end can run it.
    """

    name: str
    stage: str
    set: str
    kind: str
    negative: str
    expect_fail: str
    overrides: dict[str, Any]
    parameters: dict[str, Any]
    backend: str
    unavailable: str
    time_limit_s: float
    stage_fingerprint: str

    def key(self) -> str:
        """Return the key of what it runs, independent of numbering. Two equal keys are the same check."""
        return json.dumps([self.stage, self.kind, self.negative, self.overrides], sort_keys=True)

    def as_dict(self) -> dict[str, Any]:
        """Convert for JSON."""
        return asdict(self)


def make(
    stages: Sequence[Stage],
    set_name: str,
    *,
    texts: Mapping[str, str] | None = None,
    backend: str | None = None,
    negatives: bool = False,
) -> list[Job]:
    """Make the jobs for a set of each stage. With ``negatives``, for the injected faults.

    Args:
        stages: what to run, in this order.
        set_name: quick, nightly or b200; negatives take its first run's parameters and the nightly
            set's time limit: they are about what turns red, not about how fast.
        texts: ``-p`` values; each must be a parameter of every chosen stage.
        backend: wins over the set's own choice; ``-p backend=`` wins over this.
        negatives: run the negative sets instead.

    Raises:
        DSV4Error: anything a stage does not allow, before anything starts.
    """
    texts = dict(texts or {})
    if backend is not None:
        if backend not in backends.NAMES:
            raise ArgumentError("backend", backend, "one of " + ", ".join(backends.NAMES))
        texts.setdefault("backend", backend)
    jobs: list[Job] = []
    for stage in stages:
        wanted = {k: v for k, v in texts.items() if k != "backend" or "backend" in stage.parameters}
        if "backend" in texts and "backend" not in wanted:
            raise UnknownParameter(f"stage {stage.name} has no parameter 'backend', so its back end cannot be chosen")
        for negative, expect_fail, overrides in _wishes(stage, set_name, negatives):
            job = _job(stage, set_name, overrides, wanted, negative, expect_fail, len(jobs))
            if all(job.key() != other.key() for other in jobs):
                jobs.append(job)
    return _named(jobs)


def for_negative(stage: Stage, name: str) -> Job:
    """Make the job of one injected fault, at the quick set's size."""
    stage.negative(name)
    return next(job for job in make([stage], "quick", negatives=True) if job.negative == name)


def _wishes(stage: Stage, set_name: str, negatives: bool) -> list[tuple[str, str, dict[str, Any]]]:
    runs = stage.parameter_set(set_name).runs
    if negatives:
        return [(n.name, ", ".join(n.metrics), {**runs[0], **n.parameters}) for n in stage.negatives]
    return [("", "", dict(run)) for run in runs]


def _job(
    stage: Stage,
    set_name: str,
    overrides: dict[str, Any],
    texts: Mapping[str, str],
    negative: str,
    expect_fail: str,
    number: int,
) -> Job:
    parameters = resolve_parameters(stage, overrides, texts)
    overrides = overrides | {name: parameters[name] for name in texts}
    resolved, why = _resolved(parameters, stage, stage.archs_in(set_name, bool(negative)))
    return Job(
        name=str(number),
        stage=stage.name,
        set=set_name,
        kind="negative" if negative else "run",
        negative=negative,
        expect_fail=expect_fail,
        overrides=overrides,
        parameters=parameters,
        backend=resolved,
        unavailable=why,
        time_limit_s=stage.parameter_set("nightly" if negative else set_name).time_limit_s,
        stage_fingerprint=stage.fingerprint(),
    )


def resolve_here(job: Job, stage: Stage) -> Job:
    """Return ``job``, planned on another machine, with the back end that this one has for it."""
    resolved, why = _resolved(job.parameters, stage, stage.archs_in(job.set, bool(job.negative)))
    return replace(job, backend=resolved, unavailable=why)


def _resolved(parameters: Mapping[str, Any], stage: Stage, archs: tuple[str, ...]) -> tuple[str, str]:
    """The back end that runs this here; or "" and why none does."""
    try:
        return backends.resolve(str(parameters.get("backend", "auto")), archs, stage.kernel), ""
    except BackendUnavailable as error:
        return "", str(error)


def _named(jobs: list[Job]) -> list[Job]:
    """Give each job its name: stage and number, or stage and injected fault."""
    count: dict[str, int] = {}
    named = []
    for job in jobs:
        if job.kind == "negative":
            name = f"{job.stage}-negative-{job.negative}"
        else:
            name = f"{job.stage}-{count.get(job.stage, 0):02d}"
            count[job.stage] = count.get(job.stage, 0) + 1
        named.append(Job(**{**job.as_dict(), "name": name}))
    if not named:
        raise DSV4Error("there is nothing to run: no stage was found for this choice")
    return named
