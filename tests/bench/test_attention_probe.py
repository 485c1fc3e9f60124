"""The probe of attention on a Hopper: what its command line takes, and that the recorded table has its forms."""

import csv

import pytest

from dsv4lib import env
from dsv4lib.bench.probes import attention_probe as probe
from dsv4lib.config import LayerKind
from dsv4lib.errors import ArgumentError

NOT_KEPT = {("prefill", "8", "2")}  # forms of the table that the kernels no longer have (data/bench/fmha.md)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "nonsense"], "--check='nonsense'.*decode-4-0"),
        (["--check", ""], "--check=''"),
        (["--check", "prefill-8-2"], "--check='prefill-8-2'"),
        (["--forms", "decode-8-1,prefill-8-0", "--record", "x"], "--forms='prefill-8-0'.*prefill-8-1"),
        (["--forms", "decode-8-1"], "--record=None"),
        ([], "--record=None"),
    ],
)
def test_what_is_refused_before_anything_runs(arguments, words, monkeypatch):
    for name in ("check", "run", "compile_all"):
        monkeypatch.setattr(probe, name, lambda *given: pytest.fail("it runs"))
    with pytest.raises(ArgumentError, match=words):
        probe.main(arguments)


def test_all_forms_are_timed_by_default(tmp_path, monkeypatch):
    asked, recorded = [], []
    monkeypatch.setattr(probe, "run", lambda processes, forms: asked.append(forms) or [])
    monkeypatch.setattr(probe.table, "record", lambda rows, path: recorded.append(path))
    probe.main(["--record", str(tmp_path / "x.csv")])
    probe.main(["--record", str(tmp_path / "y.csv"), "--forms", "prefill-8-1"])
    assert asked == [["decode-4-0", "decode-8-0", "decode-8-1", "prefill-4-0", "prefill-8-1"], ["prefill-8-1"]]
    assert recorded == [tmp_path / "x.csv", tmp_path / "y.csv"]


def test_a_form_is_checked(monkeypatch):
    asked = []
    monkeypatch.setattr(probe, "check", asked.append)
    for name in probe.names():
        probe.main(["--check", name])
    assert asked == probe.names()


def test_the_table_has_the_rows_of_the_probe():
    """All but those of a variant that was not kept."""
    with (env.root() / "data/bench/attention_times.csv").open() as file:
        table = list(csv.DictReader(file))
    columns = ("layer", "tokens", "kernel", "warps", "early", "splits")
    found = {tuple(row[name] for name in columns) for row in table}
    wanted = set()
    for layer, tokens in probe.SPLITS:
        assert isinstance(layer, LayerKind)
        for variant in probe.variants(layer, tokens):
            wanted.add((str(layer), str(tokens), *probe.name_of(variant).split("-"), str(variant[-1])))
    assert wanted == {row for row in found if row[2:5] not in NOT_KEPT} and len(found) == len(table)
    assert {row[2:5] for row in found - wanted} == NOT_KEPT
