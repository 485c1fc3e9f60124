"""Write the JSON schema and the table of keys of the stage contract. They are made of the classes of `lab/stage.py`.

    python -m dsv4lib.lab.stage_schema

`stages/stage.schema.json` serves editors (each stage.toml names it in its first line) and other tools. It knows types
and bounds; that a default fits its own bounds, and that a negative set names a gate, only `lab.stage.load` checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4lib.errors import DSV4Error
from dsv4lib.lab.stage import Gate, Negative, Parameter, ParameterSet, Stage, workspace
from dsv4lib.lab.verdicts import exit_code_table

SCHEMA, PAGE = "stage.schema.json", "README.md"
DIRECTIVE = f"#:schema ../{SCHEMA}"
TABLES = (
    ("", Stage),
    ("parameters.NAME.", Parameter),
    ("sets.NAME.", ParameterSet),
    ("gates[].", Gate),
    ("negatives[].", Negative),
)


def schema() -> dict[str, Any]:
    """Build the JSON schema (draft 2020-12) of a stage.toml."""
    found = Stage.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield key, type, default and meaning of every key, in the order of a stage.toml."""
    for prefix, model in TABLES:
        for name, field in model.model_fields.items():
            default = "required" if field.is_required() else json.dumps(field.default)
            yield f"{prefix}{name}", _kind(field.annotation, name), default, field.description or ""


def _kind(annotation: Any, name: str) -> str:
    """A type in words."""
    plain = {
        "parameters": "table of tables" if annotation is Stage.model_fields["parameters"].annotation else "table",
        "sets": "table of tables",
        "gates": "array of tables",
        "negatives": "array of tables",
        "runs": "array of tables",
        "choices": "array of str",
        "default": "bool, int, float or str",
        "expect_fail": "str or array of str",
        "min": "number",
        "max": "number",
        "multiple_of": "int",
    }
    if name in plain:
        return plain[name]
    args = getattr(annotation, "__args__", ())
    if args and all(isinstance(one, str) for one in args):
        return ", ".join(f"`{one}`" for one in args)
    return getattr(annotation, "__name__", "str")


def table() -> str:
    """Build the page's table of keys, Markdown."""
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{key}` | {kind} | {default} | {meaning} |" for key, kind, default, meaning in rows()]
    return "\n".join(lines)


def exits() -> str:
    """Build the page's table of exit codes, Markdown."""
    lines = ["| code | outcome | meaning |", "| ---: | --- | --- |"]
    return "\n".join(lines + [f"| {code} | {name} | {meaning} |" for code, name, meaning in exit_code_table()])


def page(text: str) -> str:
    """Replace what stands between the marks of a page."""
    for name, part in (("keys", table()), ("exits", exits())):
        begin, end = f"<!-- {name}: written by python -m dsv4lib.lab.stage_schema -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise DSV4Error(f"the page has no marks {begin} and {end}")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


def schema_text() -> str:
    """Return the schema as it is stored."""
    return json.dumps(schema(), indent=2) + "\n"


def write(root: Path | None = None) -> None:
    """Write both files under ``root``/stages."""
    folder = (root or workspace()) / "stages"
    (folder / SCHEMA).write_text(schema_text(), encoding="utf-8")
    (folder / PAGE).write_text(page((folder / PAGE).read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
