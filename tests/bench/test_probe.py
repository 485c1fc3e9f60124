"""What the probes share: the program that measures, prints and records."""

import sys

from dsv4lib.bench.probes import common as probes
from dsv4lib.bench.probes import issue_probe
from dsv4lib.predict import table


def test_main_records_the_rows_that_run_gives(tmp_path, monkeypatch, capsys):
    given = []

    def run(processes):
        given.append(processes)
        return [issue_probe.Rate("elected", 2, "ahead", 132, 31.25, 1830.5, 35.8)]

    path = tmp_path / "times.csv"
    monkeypatch.setattr(sys, "argv", ["probe", "--record", str(path), "--processes", "3"])
    probes.main(issue_probe.__doc__, issue_probe.Rate, run)
    assert given == [3]
    (row,) = table.recorded(issue_probe.Rate, path)
    assert (row.variant, row.warps, row.ctas, row.issue_clk) == ("elected", 2, 132, 31.25)
    assert capsys.readouterr().out.split() == ["variant", "warps", "lists", "ctas", "issue_cl", "tile_clk", "bytes_cl"]


def test_a_line_stands_under_its_heads():
    row = issue_probe.Rate("elected", 2, "in line", 1, 31.257, 1830.0, 35.8)
    assert probes.line(row).split() == ["elected", "2", "in", "line", "1", "31.26", "1830.00", "35.80"]
    assert len(probes.line(row)) == len(probes.heads(issue_probe.Rate))
