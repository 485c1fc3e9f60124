"""The README names every folder and keeps its tables narrow."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_every_folder_is_named():
    tree = TEXT[TEXT.index("## Where things are") :]
    named = set(re.findall(r"^ +([a-z0-9_]+)/", tree, re.MULTILINE))
    top = {
        p.name for p in ROOT.iterdir() if p.is_dir() and p.name in ("notebooks", "stages", "dsv4lib", "data", "tests")
    }
    rooms = {p.parent.name for p in (ROOT / "dsv4lib").glob("*/__init__.py")}
    assert named == top | rooms


def test_cells_of_the_ladder_are_narrow():
    ladder = TEXT[TEXT.index("<!-- ladder") : TEXT.index("<!-- /ladder")]
    cells = [row.split(" | ")[1] for row in ladder.splitlines() if row.startswith("| [")]
    assert len(cells) == len(list((ROOT / "stages").glob("*/stage.toml"))) and max(map(len, cells)) <= 90
