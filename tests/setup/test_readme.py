"""The README is true: its ladder is the one in stages/, its commands, files and picture exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4lib.errors import DSV4Error
from dsv4lib.lab import ladder, stage

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
    commands = re.findall(r"^\| `\./dsv4 (\w+)`", README, re.M)
    assert len(commands) >= 6
    out = subprocess.run([sys.executable, "-m", "dsv4lib.lab.cli", "--help"], capture_output=True, text=True).stdout
    assert [c for c in commands if not re.search(rf"\b{c}\b", out)] == []
