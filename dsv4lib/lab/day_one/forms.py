"""Read the list of instruction forms that no GPU of ours has confirmed, data/emulator/unconfirmed.csv.

A form is a question with one or more instruction variants. Each has micro-kernels, or says why it has none.
`unconfirmed` finds what the emulator implements and the list must therefore name.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.lab.day_one import copy_probes, register_probes, tensor_probes
from dsv4lib.lab.day_one.probe import Probe

TABLE = env.root() / "data" / "emulator" / "unconfirmed.csv"
COLUMNS = ("form", "arch", "opcode", "question", "instead")
# Instructions that only SM100 and later have; notes of others say that nothing has confirmed them.
FAMILIES = ("tcgen05.", "clusterlaunchcontrol.", "st.bulk")
NOTES = ("no kernel has confirmed it", "unverified", "by the PTX ISA alone")


@dataclass(frozen=True)
class Form:
    """A question.

    Attributes:
        name: of the form. arch: whose GPU can answer it. opcodes: variants that it is about.
        question: the first one's, in words. instead: why it has no micro-kernel, "" if it has.
    """

    name: str
    arch: str
    opcodes: tuple[str, ...]
    question: str
    instead: str = ""


def forms(path: Path = TABLE) -> tuple[Form, ...]:
    """Read the list, in its order.

    Raises:
        DSV4Error: other columns, or lines of a form that are apart or disagree.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise DSV4Error(f"{path.name} has the columns {reader.fieldnames}, not {', '.join(COLUMNS)}")
        lines = list(reader)
    found = []
    for name, group in groupby(lines, key=lambda line: line["form"]):
        rows = list(group)
        if name in {form.name for form in found}:
            raise DSV4Error(f"{path.name}: the lines of {name} are not side by side")
        if len({(row["arch"], row["instead"]) for row in rows}) > 1:
            raise DSV4Error(f"{path.name}: the lines of {name} name several architectures or reasons")
        first = rows[0]
        opcodes = tuple(row["opcode"] for row in rows)
        found.append(Form(name, first["arch"], opcodes, first["question"], first["instead"]))
    return tuple(found)


def probes() -> Iterator[Probe]:
    """Every micro-kernel."""
    for module in (tensor_probes, copy_probes, register_probes):
        yield from module.probes()


def of_form(name: str, among: Iterable[Probe]) -> list[Probe]:
    """Micro-kernels that ask a question."""
    return [probe for probe in among if probe.form == name]


def unconfirmed() -> dict[str, str]:
    """Patterns of the emulator's instructions that the list must name, with what its note says."""
    from dsv4lib.emulator.isa import coverage

    return {
        row.pattern: row.note
        for row in coverage.rows([])
        if row.pattern.startswith(FAMILIES) or any(note in row.note for note in NOTES)
    }


def pattern_of(opcode: str) -> str | None:
    """The pattern that an opcode matches, None if the emulator has none."""
    from dsv4lib.emulator import isa
    from dsv4lib.emulator.isa import implementations

    implementations.load()
    found = isa.find(opcode)
    return None if found is None else found[0].pattern
