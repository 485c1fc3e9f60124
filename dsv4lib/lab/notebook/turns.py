"""Find the exercises of notebooks and their folded solutions, and write each as a program that a test can run.

An exercise is a markdown cell with a heading "Your turn" and the code cell after it, which the reader edits. The
heading's cell ends with its solution:

    <details><summary>Solution</summary>

    ```python
    def best_k(share, requests): ...
    ```

    Why it is so.

    </details>

What the solution binds (functions, classes, variables) replaces what the exercise binds under the same names; the rest
of the exercise judges it with `lab.answer`. The exercise as it is written is not solved.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.notebook import slices

RIGHT, NOT_YET = "right", "not yet"  # what `lab.answer` prints
HEADING = re.compile(r"^#+ .*\bYour turn\b", re.MULTILINE)
FOLDED = re.compile(r"<details><summary>Solution</summary>\n(.*?)\n</details>", re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
JUDGED = re.compile(rf"^(.+?): (?:({RIGHT})|{NOT_YET}.*)$", re.MULTILINE)
ANSWER = "lab.answer"


@dataclass(frozen=True)
class Turn:
    """One exercise.

    Attributes:
        cells: source of each code cell of the notebook, None for any other.
        exercise: number of the cell that the reader edits.
        solution: what replaces its definitions of the same names.
    """

    cells: tuple[str | None, ...]
    exercise: int
    solution: str

    def program(self, solved: bool = True, parameters: Mapping[str, Any] | None = None) -> str:
        """Write the cells that the exercise needs and the exercise, with its solution or as it is in the notebook.

        Args:
            solved: put the solution in.
            parameters: values set after the notebook's first code cell, as in a run of the stage.
        """
        code = [number for number, source in enumerate(self.cells) if source is not None]
        own = self.cells[self.exercise]
        own = substitute(own, self.solution) if solved else own
        needed = slices.needed_by(self.cells, self.exercise, own)
        sources = []
        for number in needed:
            sources.append(self.cells[number])
            if number == code[0]:
                sources += [f"{name} = {value!r}" for name, value in (parameters or {}).items()]
        return "\n\n".join([*sources, own]) + "\n"


def of_notebook(path: Path) -> list[Turn]:
    """Find the exercises of a notebook, in order.

    Raises:
        ArgumentError: one is not of the form that the module describes.
    """
    cells = json.loads(path.read_text())["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    wrong = list(problems(found))
    if wrong:
        raise ArgumentError("path", path.name, "; ".join(wrong))
    sources = tuple(source if kind == "code" else None for kind, source in found)
    return [Turn(sources, n + 1, _solution(found[n][1])) for n in _headings(found)]


def problems(cells: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Say what is wrong with the exercises among cells, each (its type, its source)."""
    for number in _headings(cells):
        name, source = f"cell {number + 1}", cells[number][1]
        folded = FOLDED.findall(source)
        if len(folded) != 1 or not CODE.search(folded[0]):
            yield f"{name} has no folded solution with a block of Python"
            continue
        if source.count("<details>") != 1 or not source.rstrip().endswith("</details>"):
            yield f"{name} does not end with its folded solution"
        kind, exercise = cells[number + 1] if number + 1 < len(cells) else ("", "")
        if kind != "code" or ANSWER not in exercise:
            yield f"no code cell that calls {ANSWER} follows {name}"
            continue
        try:
            substitute(exercise, _solution(source))
        except (SyntaxError, ArgumentError) as error:
            yield f"the solution of {name}: {error}"


def substitute(exercise: str, solution: str) -> str:
    """Put ``solution`` where ``exercise`` first binds one of its names, in place of all statements that bind them.

    Raises:
        ArgumentError: it binds no name that the exercise binds at its top.
    """
    names = set().union(*(_bound(statement) for statement in ast.parse(solution).body))
    lines, first = exercise.splitlines(), None
    for statement in reversed(ast.parse(exercise).body):
        if _bound(statement) & names and not isinstance(statement, ast.Import | ast.ImportFrom):
            first = min((statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ())))) - 1
            del lines[first : statement.end_lineno]
    if first is None:
        raise ArgumentError("solution", ", ".join(sorted(names)), "names that the exercise binds")
    lines[first:first] = solution.strip().splitlines()
    return "\n".join(lines)


def judged(output: str) -> dict[str, bool]:
    """Read what `lab.answer` printed: label -> whether the answer was right."""
    return {label: bool(right) for label, right in JUDGED.findall(output)}


def _headings(cells: Sequence[tuple[str, str]]) -> list[int]:
    return [n for n, (kind, source) in enumerate(cells) if kind == "markdown" and HEADING.search(source)]


def _solution(source: str) -> str:
    return "\n".join(CODE.findall(FOLDED.search(source).group(1)))


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement binds at the top of its cell."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    targets = [statement.target] if isinstance(statement, ast.AnnAssign | ast.AugAssign) else []
    targets += statement.targets if isinstance(statement, ast.Assign) else []
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
