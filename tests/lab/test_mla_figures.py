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
from dsv4lib.pages.mla.arithmetic import Work
from dsv4lib.pages.mla.evidence import Emulated, tokens_of
from dsv4lib.pages.mla.page_table import slots_of, text_example
from dsv4lib.reference import mla_decode as oracle
from dsv4lib.viz.style import alt_text
from tests.cases import cases


def stage():
    return tomllib.loads((env.root() / "stages" / "mla" / "stage.toml").read_text())


@pytest.mark.full
def test_every_point_is_checked_or_said_alone(capsys):
    found = claims.checked()
    assert len(found) == 28 and [one.text for _, one, value in found if value.right is False] == []
    assert sum(value.right is None for _, _, value in found) == 5
    assert claims.table() == 0
    shown = capsys.readouterr().out
    for said in ("81,920 / 1,152 = 71.1", "256 + 44, not 150 + 150", "300 of 300 tokens", "146 GFLOP, 20.3 TFLOPS"):
        assert said in shown
    assert "23 of 28 points are checked, 5 said alone" in shown


def test_a_point_that_code_does_not_confirm_is_counted(capsys):
    assert claims.table("AlignedExample") == 1 and "0 of 300 tokens" in capsys.readouterr().out


BROKEN = {  # name in `claims` -> what stands in its place; the point that must see it
    "work": (lambda *shape: Work(1, 1), ["561 / 7.21 = 77.8 TFLOPS"]),
    "counted": (lambda *shape: Work(1, 1), ["compute 500 us, memory 90 us; and latency-bound"]),
    "heads_bytes": (lambda *sizes: 111 * 1152, ["576 bytes a token, 111 times less"]),
    "emulated": (
        lambda *given: Emulated(1, sum(given[0]) + given[1], 12.0, ((150, 150),), 0.0),
        [
            "a split has tokens / splits tokens",
            "12 steps of Q, 128 heads in a CTA",
            "padded heads cost nothing, 128 KB",
            "more than one split hangs; set more than one",
            "grid.x is 1, so 1 x 8 x 4 = 32 blocks",
        ],
    ),
    "ptx_of": (lambda arch: "wmma.load; mbarrier.", ["SM100 is Hopper: H100", "__syncthreads and 16 x 16 WMMA"]),
    "num_kv_splits_by_sms": (lambda *given: 8, ["8,000 tokens get 8 splits"]),
    "mla_workspace_size": (lambda *given: 5 << 20, ["automatic splits by default; 5 to 10 MB"]),
    "parse": (lambda given: None, ["--enable-cutlass-mla, --cutlass-num-kv-splits"]),
    "SM_SCALE": (0.5, ["FP8 is supported and future; small pages are not, and are packed"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_points_see_what_they_rest_on(name, monkeypatch):
    """With a piece of the evidence broken, the points that rest on it are not confirmed; others are."""
    stand_in, points = BROKEN[name]
    monkeypatch.setattr(claims, name, stand_in)
    red = [one.text for _, one, value in claims.checked() if value.right is False]
    assert set(points) <= set(red) and len(red) <= 5


def test_splits_are_known_by_what_they_left():
    """LSEs of other tokens than the next ones differ from those of the next ones."""
    one = run_case.requests(70, 4, 16, 0)
    keys = oracle.entries(one.kv_cache, one.page_table[0], 70)
    logits = claims.SM_SCALE * torch.cat((one.q_nope[0], one.q_pe[0]), -1).double() @ keys.T
    parts = [logits[:, :32].logsumexp(-1), logits[:, 32:70].logsumexp(-1), torch.full((4,), -torch.inf)]
    assert tokens_of(one, 0, torch.stack(parts)) == (32, 38, 0)
    parts[1] = logits[:, 31:70].logsumexp(-1)
    assert tokens_of(one, 0, torch.stack(parts)) == (32, -1, 0)


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
    assert troubleshooting.table("NoCheck") == 1
    changed = first._replace(trigger=lambda: None), second._replace(said="something else")
    monkeypatch.setattr(troubleshooting, "SYMPTOMS", (*changed, *troubleshooting.SYMPTOMS[2:]))
    assert troubleshooting.table() == 2


def test_features_name_what_exists(tmp_path, capsys):
    found = rows.read()
    assert [one.row for one in found] == [f"3.{number}" for number in range(1, 48)]
    assert rows.missing(found) == [] and rows.table() == 0 and rows.table("LostTest") == 1
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
    assert figures.faults_table(run_case.kernel_faults(backend, "Harmless")) == 1
    assert figures.faults_table([found[0]._replace(seen=False)]) == 1


def test_faults_of_the_page_are_seen():
    errors = [run_case.absorption(3, 9, 0, fault=name).error for name in ("none", "ScaleOfLatents")]
    assert errors[0] < 1e-14 < 0.01 < errors[1]
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
    names = {"none", *run_case.TABLE_FAULTS, *run_case.DECODE_FAULTS, *run_case.RACES, *run_case.OWN_FAULTS}
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
