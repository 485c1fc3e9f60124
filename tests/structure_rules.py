"""What an op's folder must have beside its kernel, and when a stage counts as one of a kernel."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

KERNEL = re.compile(r"^\s*@cute\.kernel", re.MULTILINE)
MATRIX, BUDGET = re.compile(r"mark\.parametrize\("), re.compile(r"\bsmall\(|local_bytes")


def rules(folder: Path, root: Path) -> list[str]:
    """Name what an op lacks: "tests", "matrix", "budget", "bench" or "stage"; nothing of one without a kernel."""
    if not any(KERNEL.search(path.read_text()) for path in folder.glob("*.py")):
        return []
    name = folder.name
    tests = "".join(path.read_text() for path in (root / "tests" / "ops" / name).glob("test_*.py"))
    use = re.compile(rf"dsv4lib\.ops\.{name}\b|dsv4lib\.ops import (?:\w+, )*{name}\b")
    shown = [*(root / "dsv4lib" / "pages").rglob("*.py"), *(root / "notebooks").glob("*.ipynb")]
    found = {
        "tests": bool(tests),
        "matrix": bool(MATRIX.search(tests)),
        "budget": bool(BUDGET.search(tests)),
        "bench": any(folder.glob("bench*.py")),
        "stage": any(use.search(path.read_text()) for path in shown),
    }
    return [what for what, there in found.items() if not there]


def cpp_rules(source: Path, root: Path) -> list[str]:
    """Name what a kernel in CUDA C++ lacks: "host", "faults", "tests", "matrix", "budget", "schedules", "comment"."""
    folder = source.parent
    host = folder / "cpp.py"
    text = host.read_text() if host.is_file() else ""
    use = re.compile(rf"dsv4lib\.ops\.{folder.name}(?:\.cpp| import (?:\w+, )*cpp)\b")
    files = [path.read_text() for path in (root / "tests" / "ops" / folder.name).glob("test_*.py")]
    tests = "".join(one for one in files if use.search(one))
    found = {
        "host": bool(text),
        "faults": "FAULTS = {" in text and "cpp.FAULTS" in tests,
        "tests": bool(tests),
        "matrix": bool(MATRIX.search(tests)),
        "budget": bool(BUDGET.search(tests)),
        "schedules": "SCHEDULES" in tests,
        "comment": source.read_text().startswith("// "),
    }
    return [what for what, there in found.items() if not there]


def runs_kernels(stage: Path, root: Path) -> bool:
    """Tell whether a stage's notebook, or the page that it imports, runs an op of dsv4lib."""
    text = (root / tomllib.loads(stage.read_text())["notebook"]).read_text()
    pages = set(re.findall(r"from dsv4lib\.pages\.(\w+)", text)) - {"common"}
    texts = [text, *(path.read_text() for page in pages for path in (root / "dsv4lib/pages" / page).glob("*.py"))]
    return any(re.search(r"from dsv4lib\.ops\.(?!common\b)\w+", one) for one in texts)
