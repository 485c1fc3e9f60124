"""Figures of documents: each has its place, is drawn from a committed table, and what is committed is drawn anew."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from dsv4lib import env
from dsv4lib.errors import ArgumentError
from dsv4lib.pages.common import drawn, overview
from tests.cases import cases

ROOT = env.root()
MOST = 60 << 10  # bytes of a committed figure


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), np.int16)


def test_the_only_committed_figure_is_on_the_first_screen_and_small():
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    shown = re.findall(r"!\[[^]]+\]\((data/figures/[^)]+)\)", first)
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "data" / "figures").iterdir()} == set(shown)
    for name in shown:
        assert (ROOT / name).stat().st_size <= MOST, name


def test_the_committed_figure_is_what_is_drawn():
    committed = pixels((ROOT / "data" / "figures" / "overview.png").read_bytes())
    new = pixels(overview.picture())
    assert new.shape == committed.shape
    assert (np.abs(new - committed).max(-1) > 48).mean() < 0.005  # releases of a font draw letters otherwise


def test_every_figure_of_a_document_is_drawn_and_every_drawn_one_is_shown():
    names = [
        name
        for path in (ROOT / "data").rglob("*.md")
        for name in re.findall(r"<!-- figure: (\w+) -->", path.read_text())
    ]
    assert sorted(names) == sorted(drawn.DRAWN)


@pytest.mark.parametrize("name", cases("fmha_roofline", full=["fmha_peers", "moe_peers", "ops"]))
def test_a_figure_says_what_it_shows(name):
    png, alt = drawn.draw(name)
    assert len(png) < 300_000 and len(alt) > 40
    assert pixels(png).std() > 10 and png == drawn.draw(name)[0]


def test_another_name_is_refused():
    with pytest.raises(ArgumentError, match="fmha_peers"):
        drawn.draw("none")
    with pytest.raises(ArgumentError, match="one folder"):
        drawn.main([])
