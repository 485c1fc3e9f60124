"""The README is true: its ladder is the one in stages/, its commands, files and picture exist."""

import importlib.util
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
import typer

from dsv4lib.emulator.sanitize import catalogue
from dsv4lib.errors import DSV4Error
from dsv4lib.lab import cli, ladder, stage

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_ladder_is_up_to_date():
    assert ladder.updated(README, ladder.markdown(stage.discover())) == README, "python -m dsv4lib.lab.ladder"


def test_the_ladder_needs_its_markers():
    with pytest.raises(DSV4Error, match="ladder"):
        ladder.updated("# no markers", "table")


def test_links_and_pictures_exist():
    targets = [
        t for t in re.findall(r"\]\(([^)]+)\)", README + (ROOT / "CONTRIBUTING.md").read_text()) if "://" not in t
    ]
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_every_command_of_the_table_exists():
    commands = re.findall(r"^\| `\./dsv4 ([\w-]+)`", README, re.M)
    assert len(commands) >= 6
    out = subprocess.run([sys.executable, "-m", "dsv4lib.lab.cli", "--help"], capture_output=True, text=True).stdout
    assert [c for c in commands if not re.search(rf"\b{c}\b", out)] == []


def test_every_option_and_module_that_is_named_exists():
    """In README and CONTRIBUTING: options on lines that call a command, or in its row of the table; modules to run."""
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    commands = typer.main.get_command(cli.app).commands
    seen = 0
    for line in text.splitlines():
        calls = list(re.finditer(r"\./dsv4 ([a-z_]+(?:-[a-z]+)*)", line))
        for call, following in zip_longest(calls, calls[1:]):
            command = commands[call[1]]
            words = line[call.end() : following.start() if following else len(line)].partition("#")[0]
            row = line.startswith("| `./dsv4")
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            if call[1] != "test":  # its arguments are pytest's
                named = re.findall(r"(?<![\w-])--[a-z][\w-]*", words if row else words.partition("`")[0])
                assert set(named) <= known, (call[0], set(named) - known)
                seen += len(named)
    assert seen > 30
    modules = set(re.findall(r"python -m ([\w.]+)", text))
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_the_three_findings_are_rows_of_the_table():
    """Package, version, place, kind and consequence of each are those of findings.csv; the number is theirs, too."""
    screen = README.partition("It finds bugs that ship.")[2].partition("Begin with")[0]
    rows = catalogue.findings()
    assert screen.startswith(f" Three of the [{len(rows)} findings](data/emulator/findings.md)")
    shown = [line for line in screen.splitlines() if "(`" in line and line.startswith("|")]
    assert len(shown) == 3 and len(screen.splitlines()) <= 20
    for line in shown:
        kernel, kind = re.match(r"\| (.*?) \|", line)[1], re.search(r"\(`(\w+)`\)", line)[1]
        place = re.search(r"`([^`]+)`$", kernel)[1]
        fits = [row for row in rows if kernel.startswith(f"{row.package} {row.version}, ") and place in row.place]
        assert [row.kind for row in fits] == [kind], (line, fits)
        seen = line.rpartition(" | ")[2].removesuffix(" |").removeprefix("a ")
        told = f"{fits[0].consequence}; {fits[0].schedule}".replace(
            "every but oldest_first", "under every schedule but one"
        )
        assert all(word in told for word in seen.split()), (seen, told)
        assert (ROOT / "data/emulator/findings" / f"{fits[0].reproduction}.toml").is_file()
    known = catalogue.reproductions()["sum_over_unread_maximum"]
    assert known.description().relative_to(ROOT).as_posix() in screen and "race_shared" in known.kinds
