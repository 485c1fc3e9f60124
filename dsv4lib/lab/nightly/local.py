"""Execute a plan's jobs by processes of this machine: the runner of `./dsv4 run`, with a time budget."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4lib.lab.run import runner
from dsv4lib.lab.run.plan import Job
from dsv4lib.lab.run.progress import Progress


def run(
    jobs: Sequence[Job],
    root: Path,
    set_name: str,
    options: runner.Options,
    *,
    budget_s: float | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    described: Mapping[str, Any] | None = None,
) -> runner.Result:
    """Run ``jobs`` here and record each. No job starts once ``budget_s`` seconds have passed; those that run go on.

    Args:
        jobs: of one shard.
        root: the workspace.
        set_name: name of the plan for comparisons.
        options: workers, memory and folder.
        budget_s: seconds, or None for no budget.
        resume: continue the last interrupted night of this plan.
        progress: where to show how it goes.
        described: `whole` and further fields of a new manifest.

    Raises:
        DSV4Error: nothing to resume, or the night is still going on.
    """
    if budget_s is not None:
        options.deadline = time.monotonic() + budget_s
    facts = dict(described or {})
    whole = bool(facts.pop("whole", False))
    return runner.run(
        jobs, root, set_name, options, whole=whole, resume=resume, progress=progress, described=facts
    )  # fmt: skip
