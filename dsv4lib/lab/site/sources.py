"""List what the site shows: documents of the workspace, and notebooks as a run executed them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import records
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import manifest
from dsv4lib.lab.stage import Stage, discover, runs_folder

TOUR = "The tour"
# Groups in the order of the navigation: paths in the workspace, or patterns of them. What is missing is left out.
GROUPS = {
    "Start": ("README.md",),
    TOUR: ("notebooks/*.ipynb",),
    "The emulator": (
        "dsv4lib/emulator/README.md",
        *(f"data/emulator/{n}.md" for n in ("findings", "checks", "coverage")),
    ),
    "Measured": ("data/bench/*.md",),
    "Project": (
        "dsv4lib/cache/README.md",
        "dsv4lib/lab/nightly/README.md",
        "data/nano/README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ),
}


@dataclass(frozen=True)
class Source:
    """A document or notebook: its path in the workspace, the name of its page and its group in the navigation."""

    path: str
    file: str
    group: str

    @property
    def is_notebook(self) -> bool:
        """Tell whether this is a notebook and not a document."""
        return self.path.endswith(".ipynb")


@dataclass(frozen=True)
class Executed:
    """A notebook's record and the folder of its run."""

    record: Record
    folder: Path


@dataclass(frozen=True)
class Run:
    """The run whose notebooks are shown, by path of the notebook in the workspace. ``name`` is empty without one."""

    name: str
    notebooks: dict[str, Executed]


def sources(root: Path) -> list[Source]:
    """List the pages in the order of the navigation.

    Raises:
        DSV4Error: two of them would have the same name, or there is none.
    """
    found = [
        Source(path, file_name(path), group)
        for group, patterns in GROUPS.items()
        for pattern in patterns
        for path in sorted(str(one.relative_to(root)) for one in root.glob(pattern) if one.is_file())
    ]
    names = [source.file for source in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        both = ", ".join(source.path for source in found if source.file == twice)
        raise DSV4Error(f"two pages of the site would be {twice}: {both}; rename one")
    if not found:
        raise DSV4Error("there is nothing to publish: no README.md and no notebooks/ in the workspace")
    return found


def file_name(path: str) -> str:
    """Return the name of a page: notebooks keep theirs, documents are named by folder, README.md is the index.

    Example:
        "data/bench/ops.md" gives "bench-ops.html", "dsv4lib/cache/README.md" gives "cache.html".
    """
    if path == "README.md":
        return "index.html"
    words = re.sub(r"^(data|dsv4lib|notebooks)/|/README(?=\.md$)|\.(md|ipynb)$", "", path)
    words = re.sub(r"(/README)?\.md$", "", words)
    name = re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-")
    return f"{name if path.endswith('.ipynb') else name.lower()}.html"


def stages_by_notebook(root: Path) -> dict[str, Stage]:
    """Return the stage of each notebook, by the notebook's path."""
    return {stage.notebook: stage for stage in discover(root)} if (root / "stages").is_dir() else {}


def executed(root: Path, wanted: str | None) -> Run:
    """Return the notebooks of run ``wanted``; by default of the newest whole run, else of the newest one.

    Raises:
        ArgumentError: there is no such run, or it has executed no notebook.
    """
    runs, shown = runs_folder(root), stages_by_notebook(root)
    stored = manifest.stored(runs)
    if wanted is not None:
        stored = [one for one in stored if one.run_id == wanted]
        if not stored:
            raise ArgumentError("--runs", wanted, f"the name of a folder in {runs.name}/ with a plan")
    ranked = sorted(stored, key=lambda one: (one.whole and one.state == "complete", one.run_id), reverse=True)
    for one in ranked:
        notebooks: dict[str, Executed] = {}
        for folder in one.folders:
            notebooks = _notebooks(folder, shown) | notebooks
        if notebooks:
            return Run(one.run_id, notebooks)
    if wanted is not None:
        raise ArgumentError("--runs", wanted, "a run that has executed a notebook of a stage")
    return Run("", {})


def _notebooks(folder: Path, stages: dict[str, Stage]) -> dict[str, Executed]:
    """The first job of each stage that is no injected fault, in its last attempt."""
    found: dict[str, Executed] = {}
    by_stage = {stage.name: path for path, stage in stages.items()}
    for record in sorted(records.latest(records.load(folder)).values(), key=lambda record: record.job, reverse=True):
        path = by_stage.get(record.stage)
        if path is not None and record.kind == "run" and record.notebook and (folder / record.notebook).is_file():
            found[path] = Executed(record, folder)
    return found
