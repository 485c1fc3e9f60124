"""The page on paged MLA: its points, symptoms, features and figures, each fault, and the reader's solution."""

import json
import re
import tomllib

import pytest
import torch

from dsv4lib import backends, env
from dsv4lib.errors import DSV4Error
from dsv4lib.ops.common.compile_cache import CompileCache
from dsv4lib.pages.mla import arithmetic, claims, figures, rows, run_case, serving, troubleshooting
from dsv4lib.pages.mla.page_table import slots_of, text_example
from dsv4lib.viz.style import alt_text
from tests.cases import cases


def stage():
    return tomllib.loads((env.root() / "stages" / "mla" / "stage.toml").read_text())


def test_every_point_is_recomputed(capsys):
    found = claims.recomputed()
    assert len(found) == 28 and [one.text for _, one, value in found if not value.right] == []
    assert claims.table() == 0
    shown = capsys.readouterr().out
    for said in ("81,920 / 1,152 = 71.1", "256 + 44, not 150 + 150", "300 of 300 tokens", "146 GFLOP, 20.3 TFLOPS"):
        assert said in shown


def test_a_point_that_code_does_not_confirm_is_counted(monkeypatch, capsys):
    monkeypatch.setattr(claims, "text_example", lambda: (torch.arange(300).int()[None], *text_example()[1:]))
    assert claims.table() == 1 and "0 of 300 tokens" in capsys.readouterr().out


def test_roles_are_decoded_from_the_low_nibble():
    names = [[arithmetic.ROLES[role] for role in arithmetic.roles_of(word)] for word in (0x00213333, 0x42213333)]
    assert names[0] == ["compute"] * 4 + ["MMA", "load", "none", "none"]
    assert names[1] == ["compute"] * 4 + ["MMA", "load", "load", "page table"]


@pytest.mark.parametrize("one", troubleshooting.SYMPTOMS, ids=lambda one: one.symptom)
def test_every_symptom_says_what_it_should(one):
    with pytest.raises(DSV4Error) as caught:
        one.trigger()
    assert one.said in str(caught.value)


def test_a_symptom_without_its_error_is_counted(monkeypatch, capsys):
    first, second, *_ = troubleshooting.SYMPTOMS
    changed = first._replace(trigger=lambda: None), second._replace(said="something else")
    monkeypatch.setattr(troubleshooting, "SYMPTOMS", (*changed, *troubleshooting.SYMPTOMS[2:]))
    assert troubleshooting.table() == 2


def test_features_name_what_exists(tmp_path, capsys):
    found = rows.read()
    assert [one.row for one in found] == [f"3.{number}" for number in range(1, 48)]
    assert rows.missing(found) == [] and rows.table() == 0
    changed = [
        found[0]._replace(where=("dsv4lib/none.py",)),
        found[1]._replace(where=("tests/ops/mla_decode/test_op.py::test_no_such",)),
        found[2]._replace(where=()),
        found[3]._replace(where=(), verified="open"),
    ]
    assert [one.split(":")[0] for one in rows.missing(changed)] == ["3.1", "3.2", "3.3"]
    path = tmp_path / "rows.csv"
    path.write_text("row,feature,where,verified\n3.1,a,README.md,yes\n")
    with pytest.raises(DSV4Error, match="'yes'"):
        rows.read(path)


def test_figures_say_what_they_show(capsys):
    example = figures.slots_read(text_example()[0][0], 300, 128, "example")
    assert "0 read for the token that is there, 300 read for another" in alt_text(example)
    good = figures.slots_read(slots_of([300], 128, 300, 1)[0], 300, 128, "good")
    assert "300 read for the token that is there, 0 read for another" in alt_text(good)
    assert "32 splits, 2 waves" in alt_text(figures.waves()) and "16 splits, 1 waves" in alt_text(figures.waves())
    assert alt_text(figures.token_sizes()) and "128 rotated key" in alt_text(figures.row_of_a_token())
    figures.heuristics()
    figures.floors()
    shown = capsys.readouterr().out
    assert re.search(r"148\s+1\s+131,072\s+147 \(14, 2\)\s+74 \(14, 1\)", shown) and "303" in shown


@pytest.mark.parametrize("backend", cases(full=["emulator"]))
def test_every_fault_of_a_kernel_is_seen(backend, capsys):
    found = run_case.kernel_faults(backend)
    assert len(found) == 10 and all(one.seen for one in found) and figures.faults_table(found) == 0
    assert figures.faults_table([found[0]._replace(seen=False)]) == 1


def test_faults_of_the_page_are_seen():
    one = run_case.requests(70, 4, 16, 0)
    whole = run_case.attend(one, "reference")
    assert (
        run_case.combined(one, whole, "reference")
        < 0.01
        < 0.1
        < run_case.combined(one, whole, "reference", "TextsReduction")
    )
    assert figures.choice(132, *figures.EXAMPLE, by_clusters=True).steps.waves == 1
    assert figures.choice(132, *figures.EXAMPLE, by_clusters=False).steps.waves == 2
    good, stale, lost = (serving.serve("reference", 3, 16, 1, name) for name in ("none", "StaleTable", "KeysNotStored"))
    assert good.differences == 0 and good.error < 0.004 and good.stand_in
    assert stale.differences > 0 and not lost.error < 0.006
    figures.served(good)
    figures.memory(good)


def test_without_a_fault_nothing_is_seen():
    made = run_case.tables("reference", 3)
    assert (made.mismatches, made.misaligned) == (0, 300)
    one = run_case.requests(70, 4, 16, 3)
    assert run_case.error_over_torch(one, run_case.attend(one, "reference")) < 1.2


def test_the_stage_names_every_fault():
    names = {"none", *run_case.TABLE_FAULTS, *run_case.DECODE_FAULTS, *run_case.OWN_FAULTS}
    assert set(stage()["parameters"]["fault"]["choices"]) == names


def test_the_emulator_is_what_the_stage_says(monkeypatch):
    """Kernels are compiled for the stage's architecture, and a device of it runs them."""
    wanted, seen, get = stage()["arch"], set(), CompileCache.get

    def spied(self, kernel_type, settings, fake_args, arch="sm_100a"):
        seen.add((kernel_type.__name__, arch, backends.emulated().device().arch.name))
        return get(self, kernel_type, settings, fake_args, arch)

    monkeypatch.setattr(CompileCache, "get", spied)
    run_case.tables("emulator", 0)
    run_case.attend(run_case.requests(9, 4, 64, 0), "emulator")
    assert seen == {(name, wanted, wanted) for name in ("MlaPageTable", "MlaDecode")}


def test_the_folded_solution_is_right():
    cells = json.loads((env.root() / "notebooks" / "85_mla.ipynb").read_text())["cells"]
    turn = "".join(next(cell["source"] for cell in cells if cell["id"] == "turn"))
    names = {"torch": torch}
    exec(re.search(r"<details>.*```python\n(.*?)```", turn, re.S).group(1), names)
    slots = [torch.arange(first, first + 300) for first in (0, 128, 14)]
    assert [names["misaligned"](one, 128) for one in slots] == [0, 0, 300] and names["misaligned"](slots[2], 1) == 0
