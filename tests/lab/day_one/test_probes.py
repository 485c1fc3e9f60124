"""Micro-kernels: each form has some, the list names all that nothing has confirmed, and each asks what it says."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.errors import DSV4Error
from dsv4lib.lab.day_one import forms, plan, worker
from dsv4lib.lab.day_one.differences import RULES, Fake
from dsv4lib.lab.day_one.probe import Emulated, Probe, opcodes
from dsv4lib.lab.day_one.reading import DIFFERS, ROUNDS, SAME, beside
from tests.cases import cases

PROBES = list(forms.probes())
FORMS = {form.name: form for form in forms.forms()}
# Rule that a device may have otherwise -> form that must show it, and every form that may.
SHOWS = {
    "warp_pairs": {"cp", "cp_decompression"},
    "nibbles": {"cp_decompression"},
    "scale_columns": {"scale_columns"},
    "groups": {"ws_a_tmem", "pair_different_a"},
    "metadata": {"sparse"},
    "base_offset": {"smem_base_offset"},
    "truncated_sums": {"accumulation"},
}
PTXAS = os.environ.get("PTXAS") or shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"


def first_of_each_form() -> list[Probe]:
    found: dict[str, Probe] = {}
    for probe in PROBES:
        found.setdefault(probe.form, probe)
    return list(found.values())


@pytest.fixture(scope="module")
def emulated() -> dict[str, Emulated]:
    return {probe.name: Emulated(probe) for probe in PROBES}


def patterns_of(probes: list[Probe]) -> set[str]:
    return {forms.pattern_of(opcode) for probe in probes for opcode in opcodes(probe)}


def test_names_are_unique_and_safe() -> None:
    names = [probe.name for probe in PROBES]
    assert len(set(names)) == len(names)
    assert [name for name in names if not name.replace(".", "").replace("_", "").replace("-", "").isalnum()] == []


def test_nothing_unconfirmed_is_forgotten() -> None:
    """Every pattern that nothing has confirmed is in a micro-kernel, or the list says why not."""
    excused = {forms.pattern_of(op) for form in FORMS.values() if form.instead for op in form.opcodes}
    forgotten = set(forms.unconfirmed()) - patterns_of(PROBES) - excused
    assert forgotten == set()


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_a_form_has_micro_kernels_of_its_instructions(form: forms.Form) -> None:
    mine = forms.of_form(form.name, PROBES)
    assert bool(mine) != bool(form.instead), "micro-kernels, or a reason why there are none"
    assert None not in map(forms.pattern_of, form.opcodes)
    if mine:
        assert {probe.arch for probe in mine} == {form.arch}
        assert {forms.pattern_of(opcode) for opcode in form.opcodes} <= patterns_of(mine)


def test_the_plan_has_every_micro_kernel_once() -> None:
    for arch in plan.SETS:
        planned = [name for step in plan.steps(arch) for name in step.probes]
        assert sorted(planned) == sorted(probe.name for probe in PROBES if probe.arch == arch)
    assert {probe.form for probe in PROBES} <= set(FORMS)


def test_the_list_is_read_strictly(tmp_path: Path) -> None:
    path, lines = tmp_path / "forms.csv", list(csv.reader(forms.TABLE.open()))

    def written(rows: list[list[str]]) -> Path:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        return path

    assert forms.forms(written(lines)) == forms.forms()
    with pytest.raises(DSV4Error, match="columns"):
        forms.forms(written([["form"], *lines[1:]]))
    with pytest.raises(DSV4Error, match="side by side"):
        forms.forms(written([*lines, lines[1]]))
    with pytest.raises(DSV4Error, match="several architectures"):
        forms.forms(written([*lines, [lines[-1][0], "sm_100a", *lines[-1][2:]]]))


def test_each_changes_something_and_reports_no_hazard_but_its_own(emulated: dict[str, Emulated]) -> None:
    idle, other = [], {}
    for probe in PROBES:
        found = emulated[probe.name]
        if np.array_equal(np.frombuffer(found.out, np.uint8), worker.unchanged(probe)):
            idle.append(probe.name)
        if set(found.hazards) != probe.hazards:
            other[probe.name] = found.hazards
    assert idle == []
    assert other == {}


def test_sums_that_are_called_exact_fit_float32(emulated: dict[str, Emulated]) -> None:
    """Each changed cell of an exact probe's float32 D has, at the fineness of the finest, less than 24 bits."""
    for probe in PROBES:
        if not probe.exact or probe.element != "f32":
            continue
        before, after = (
            x.view("<u4").reshape(-1, 128)[:, :64]
            for x in (worker.unchanged(probe), np.frombuffer(emulated[probe.name].out, np.uint8))
        )
        values = after[after != before].view("<f4").astype(np.float64)
        assert np.isfinite(values).all(), probe.name
        fine = next((g for g in range(16) if (np.ldexp(values, g) == np.round(np.ldexp(values, g))).all()), 99)
        assert np.ldexp(np.abs(values).max(), fine) < 2**24, probe.name


def seen_by(rule: str, probes: list[Probe], emulated: dict[str, Emulated]) -> dict[str, set[str]]:
    """Verdicts other than "same", by form, of a device with another rule."""
    device, seen = Fake([rule]), {}
    for probe in probes:
        out = np.frombuffer(device.run(probe), np.uint8)
        found = beside(probe, out, np.frombuffer(emulated[probe.name].out, np.uint8))
        if found.verdict != SAME:
            seen.setdefault(probe.form, set()).add(found.verdict)
    return seen


@pytest.mark.parametrize(("rule", "every"), cases(*((r, False) for r in SHOWS), full=[(r, True) for r in SHOWS]))
def test_a_device_that_differs_is_seen_in_these_forms_alone(rule: str, every: bool, emulated: dict) -> None:
    mine = [probe for form in SHOWS[rule] for probe in forms.of_form(form, PROBES)]
    some = PROBES if every else [*mine[::3], *first_of_each_form()]
    seen = seen_by(rule, [probe for probe in some if probe.arch == "sm_100a"], emulated)
    assert set(seen) == SHOWS[rule]
    assert set().union(*seen.values()) == {ROUNDS if rule == "truncated_sums" else DIFFERS}


def test_every_rule_is_tested() -> None:
    assert set(SHOWS) == set(RULES)


@pytest.mark.parametrize("probe", first_of_each_form(), ids=lambda probe: probe.name)
def test_every_schedule_gives_the_same_bits(probe: Probe, emulated: dict[str, Emulated]) -> None:
    for schedule in sorted(POLICIES):
        assert Emulated(probe, schedule, seed=5).out == emulated[probe.name].out, schedule


def assembled(probe: Probe, folder: Path) -> str:
    (folder / "k.ptx").write_text(probe.ptx)
    command = [PTXAS, "-O1", f"-arch={probe.arch}", "-v", str(folder / "k.ptx"), "-o", str(folder / "k.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if "Unsupported .version" in done.stderr or "is not defined for option 'gpu-name'" in done.stderr:
        pytest.skip(f"{PTXAS} is too old for PTX {probe.version}")
    return done.stderr if done.returncode or " 0 bytes spill stores" not in done.stderr else ""


@pytest.mark.skipif(not os.access(PTXAS, os.X_OK), reason="no ptxas (PTXAS, the path, /usr/local/cuda)")
@pytest.mark.parametrize(
    "probe",
    [probe if probe in first_of_each_form()[::6] else pytest.param(probe, marks=pytest.mark.full) for probe in PROBES],
    ids=lambda probe: probe.name,
)
def test_the_assembler_takes_it_without_spills(probe: Probe, tmp_path: Path) -> None:
    assert assembled(probe, tmp_path) == ""
