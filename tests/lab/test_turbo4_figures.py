"""The page on the 4-bit KV cache: its figures and tables, each fault, and the reader's solution."""

import re
import tomllib

import pytest
import torch

from dsv4lib import backends, env
from dsv4lib.ops.common.compile_cache import CompileCache
from dsv4lib.pages.turbo4 import figures, run_case
from dsv4lib.pages.turbo4.run_case import OWN_FAULTS
from dsv4lib.viz.style import alt_text
from tests.cases import cases


def test_figures_say_what_they_show(capsys):
    assert all(alt_text(figures.bytes_of(dim, page)) for dim in (64, 128) for page in (False, True))
    figure, found = figures.rotation_errors(128, 1)
    assert alt_text(figure) and alt_text(figures.coordinates(128, 1))
    assert all(rotated > 20 for rotated, _ in found.values())
    assert found["two channels x 20"][1] < 6 < found["Student t, 3"][1] < 12 < 20 < found["normals"][1]
    figure, over_fp8 = figures.sizes()
    assert alt_text(figure) and over_fp8 == 66 / 128


def test_faults_of_the_page_are_seen():
    """Each moves its number past the gate's bound; without it the number is inside."""
    pairs = {name: figures.rotation_errors(128, 1, name)[1]["two channels x 20"] for name in ("none", *OWN_FAULTS[:2])}
    assert pairs["none"][0] > 20 > 6 > pairs["none"][1]
    assert pairs["NeverRotated"][0] < 6 and pairs["AlwaysRotated"][1] > 20
    assert (
        figures.variants(128, 1)["4 bits (turbo4)"] < 0.0098 < figures.variants(128, 1, "ThreeBits")["4 bits (turbo4)"]
    )
    assert figures.sizes()[1] <= 0.516 < figures.sizes("WideNorms")[1]
    choices = tomllib.loads((env.root() / "stages" / "turbo4" / "stage.toml").read_text())["parameters"]["fault"]
    assert set(OWN_FAULTS) <= set(choices["choices"])


def test_tables(capsys):
    errors = figures.variants(128, 1)
    assert errors["4 bits (turbo4)"] < errors["3 bits"] < errors["3 bits and QJL (legacy)"]
    figures.lookups()
    figures.claims()
    shown = capsys.readouterr().out
    values = re.findall(r"(-?\d\.\d{6})\s+(-?\d\.\d{6})", shown)
    assert len(values) == 6 and all(float(a) == pytest.approx(float(b), rel=2e-4) for a, b in values)


@pytest.mark.parametrize("backend", cases(full=["emulator"]))
def test_every_fault_is_seen(backend, capsys):
    found = run_case.faults(backend)
    assert len(found) == 9 and all(one.seen for one in found) and figures.faults_table(found) == 0
    assert figures.faults_table([found[0]._replace(seen=False)]) == 1
    assert figures.faults_table(run_case.faults(backend, "Harmless")) == 1


def test_without_a_fault_nothing_is_seen():
    indices = torch.tensor([9, -1, 30, 4, 11]).int()
    assert run_case.store(run_case.vectors(5, 2, 64, 1), 16, indices, "reference").differing == 0
    one = run_case.case([37, 100], 4, 2, 64, seed=3)
    assert run_case.error_over_torch(one, run_case.attend(one, "reference", 3), 3) < 1


def test_the_emulator_is_what_the_stage_says(monkeypatch):
    """Kernels are compiled for the stage's architecture, and a device of it runs them."""
    wanted = tomllib.loads((env.root() / "stages" / "turbo4" / "stage.toml").read_text())["arch"]
    seen, get = set(), CompileCache.get

    def spied(self, kernel_type, settings, fake_args, arch="sm_100a"):
        seen.add((kernel_type.__name__, arch, backends.emulated().device().arch.name))
        return get(self, kernel_type, settings, fake_args, arch)

    monkeypatch.setattr(CompileCache, "get", spied)
    run_case.store(run_case.vectors(2, 2, 64, 1), 16, torch.tensor([3, 4]).int(), "emulator")
    run_case.attend(run_case.case([9], 4, 2, 64), "emulator", splits=2)
    assert seen == {(name, wanted, wanted) for name in ("Turbo4Encode", "Turbo4Decode", "Turbo4Combine")}
