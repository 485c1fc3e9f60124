"""`--report`: a page beside the findings, of PTX, of a launch that is stopped, of a script with several launches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dsv4lib.emulator.microscope import page
from dsv4lib.emulator.microscope.columns import decode
from dsv4lib.emulator.sanitize import command
from dsv4lib.emulator.sanitize.command import Wish
from dsv4lib.errors import ArgumentError
from tests.emulator.sanitize.kernels import DESCRIPTION, write


def report(target: Path, page: Path, **settings) -> tuple[int, list[dict]]:
    """Exit code and launches of the page."""
    wish = Wish("dsv4 sanitize", str(target), (), "auto", {"checks": "race", **settings}, page=page)
    return command.run(wish), launches(page)


def launches(page: Path) -> list[dict]:
    data = re.search(r'id="microscope-data">(.*?)</script>', page.read_text(), re.S)[1]
    return json.loads(data)["launches"]


def test_a_race_and_its_twin(tmp_path, capfd):
    for barrier, code in ((False, 90), (True, 0)):
        found, (launch,) = report(write(tmp_path, barrier), tmp_path / "out.html")
        said = capfd.readouterr().err
        assert found == code and said.rstrip().endswith(f"dsv4 sanitize: report: {tmp_path / 'out.html'}")
        assert [one["kind"] for one in launch["findings"]] == ([] if barrier else ["race_shared"])
        assert launch["checks"] == "race" and launch["arch"] == "sm_90a" and launch["block"] == [64, 1, 1]
        assert launch["kernel"] == "sum(float const*, float*)"
    (file,) = launch["files"]
    assert file["name"].endswith("sum.cu") and "threadIdx.x ^ 32" in file["text"][3]
    stands = decode(launch["tables"]["marks"]["columns"]["line"])
    assert (
        sum("bar.sync" in launch["ptx"]["text"][decode(launch["ptx"]["line"]).index(n)] for n in stands if n > 0) >= 2
    )


def test_a_launch_that_is_stopped(tmp_path, capfd):
    path = write(tmp_path, True, DESCRIPTION.replace("shape = [64]", "shape = [32]"))
    code, (launch,) = report(path, tmp_path / "out.html")
    assert code == 91 and launch["findings"][0]["kind"] == "memory_fault"
    assert launch["findings"][0]["time"] == launch["time"] > 0 and launch["cut"]["kept"] > 0
    page = tmp_path / "none.html"
    wish = Wish("dsv4 sanitize", str(path), (), "auto", {"checks": "race"}, page=tmp_path / "no" / "out.html")
    with pytest.raises(ArgumentError, match="report"):
        command.run(wish)
    assert not page.exists()


def test_a_page_that_cannot_be_written_changes_no_exit_code(tmp_path, capfd, monkeypatch):
    path = write(tmp_path, False)
    with pytest.raises(ArgumentError, match="report"):
        report(path, tmp_path)  # a folder: refused before anything runs
    full = tmp_path / "full.html"
    monkeypatch.setattr(Path, "write_text", _full)
    wish = Wish("dsv4 sanitize", str(path), (), "auto", {"checks": "race"}, page=full)
    assert command.run(wish) == 90
    assert capfd.readouterr().err.rstrip().endswith("dsv4 sanitize: no report: [Errno 28] No space left on device")


def _full(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_page_that_is_too_large_changes_no_exit_code(tmp_path, capfd, monkeypatch):
    path = write(tmp_path, False)
    monkeypatch.setattr(page.within, "__defaults__", (page.LIMIT, 1000))
    assert command.run(Wish("dsv4 sanitize", str(path), (), "auto", {"checks": "race"}, page=tmp_path / "o")) == 90
    assert "dsv4 sanitize: no report: most=1000 is not allowed: room" in capfd.readouterr().err
    assert not (tmp_path / "o").exists()


SCRIPT = """
import sys
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def count(x: cute.Tensor):
    tidx, _, _ = cute.arch.thread_idx()
    x[tidx] = cutlass.Float32(tidx)


@cute.jit
def host(x: cute.Tensor):
    count(x).launch(grid=[1, 1, 1], block=[32, 1, 1])


def main(n):
    host(from_dlpack(torch.zeros(n, device="cuda")))


if len(sys.argv) < 2:
    main(32)
    main(32)
    main(31)
"""


def test_a_script_with_several_launches(tmp_path, capfd):
    pytest.importorskip("cutlass.cute")
    path = tmp_path / "given.py"
    path.write_text(SCRIPT)
    page = tmp_path / "out.html"
    settings = {"checks": "race"}
    assert command.run(Wish("dsv4 sanitize", str(path), (), "sm_90a", settings, page=page)) == 91
    first, second, last = launches(page)
    assert [one["number"] for one in (first, second, last)] == [1, 2, 3] and not first["findings"]
    assert [one["kind"] for one in last["findings"]] == ["memory_fault"]
    assert last["findings"][0]["place"]["text"] == "x[tidx] = cutlass.Float32(tidx)"
    assert "x[tidx] = cutlass.Float32(tidx)" in "".join(last["files"][0]["text"])
    page.unlink()
    capfd.readouterr()
    assert command.run(Wish("dsv4 sanitize", str(path), ("none",), "sm_90a", settings, page=page)) == 0
    assert not page.exists() and "no report: nothing was launched" in capfd.readouterr().err
