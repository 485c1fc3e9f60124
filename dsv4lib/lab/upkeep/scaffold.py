"""Write a working op or stage to start from. `./dsv4 new op NAME`, `./dsv4 new stage NAME`.

The templates are real files in data/templates, checked by ruff as all code is: an op that gates rows, with its oracle,
tests, bench rows, injected fault, stage and notebook. A new one is a copy with another name. All files are written, or
none.
"""

from __future__ import annotations

import keyword
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dsv4lib.errors import ArgumentError, DSV4Error

KINDS = ("op", "stage")
NAME, CLASS, NUMBER = "template_op", "TemplateOp", "99"


def write(kind: str, name: str, root: Path) -> list[Path]:
    """Write the files of a new op or stage.

    Args:
        kind: "op" or "stage". name: of it, in lower case with underscores. root: of the workspace.

    Returns:
        the new files.

    Raises:
        ArgumentError: an unknown kind, a name that is none or is taken.
    """
    if kind not in KINDS:
        raise ArgumentError("kind", kind, "one of " + ", ".join(KINDS))
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or name == NAME:
        raise ArgumentError("name", name, "lower-case words joined by underscores, for example swiglu")
    made = _texts(kind, name, root)
    taken = [place for place in made if (root / place).exists()]
    if taken:
        raise ArgumentError("name", name, f"a new one: {taken[0]} exists")
    with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as folder:
        for place, text in made.items():
            target = Path(folder) / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        _formatted(Path(folder), root)
        return _moved(Path(folder), root, list(made))


def _texts(kind: str, name: str, root: Path) -> dict[Path, str]:
    """Contents by place in the workspace."""
    template = root / "data" / "templates" / kind
    if not template.is_dir():
        raise DSV4Error(f"{template}: no templates; run this in the workspace")
    number = _free_number(root)
    found = {}
    for path in sorted(template.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            place = str(path.relative_to(template)).replace(f"{NUMBER}_{NAME}", f"{number}_{name}").replace(NAME, name)
            text = path.read_text(encoding="utf-8").replace(f"{NUMBER}_{NAME}", f"{number}_{name}")
            found[Path(place)] = text.replace(NAME, name).replace(CLASS, _class_of(name))
    return found


def _formatted(folder: Path, root: Path) -> None:
    """Sort imports and wrap lines, which depend on the name.

    Raises:
        DSV4Error: ruff is missing or refuses a file.
    """
    config = ["--config", str(root / "pyproject.toml"), "--quiet", str(folder)]
    for step in (["check", "--fix", "--select", "I"], ["format"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *step, *config], capture_output=True, text=True)
        if done.returncode:
            raise DSV4Error(f"ruff {step[0]}: {done.stdout}{done.stderr}".strip())


def _class_of(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _free_number(root: Path) -> int:
    """Choose the notebook's number: the first that is free from 91 on."""
    used = {path.name[:2] for path in (root / "notebooks").glob("*.ipynb")}
    return next((n for n in range(91, 99) if str(n) not in used), 98)


def _moved(source: Path, root: Path, places: list[Path]) -> list[Path]:
    """Move finished files to their places; take back what was moved if one cannot be."""
    done: list[Path] = []
    try:
        for place in places:
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source / place, root / place)
            done.append(root / place)
    except BaseException:
        for path in done:
            path.unlink(missing_ok=True)
        raise
    return done
