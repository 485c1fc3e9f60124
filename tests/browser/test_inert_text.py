"""A tensor or metric called `<img onerror=...>` stays text wherever the lab writes HTML: seen in a real browser.

Needs a Chromium: `DSV4_CHROMIUM=<executable>`, or one on PATH; without, the browser's half is skipped and says so.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dsv4lib import lab
from dsv4lib.lab import stage as contract
from dsv4lib.lab.notebook import notebook_api
from dsv4lib.lab.stage import Stage
from dsv4lib.viz.table import html_table

EVIL = "\"'><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage whose every free text is hostile."""
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    text = json.dumps(EVIL)
    (tmp_path / "stages" / "tiny").mkdir(parents=True)
    (tmp_path / "stages" / "tiny" / "stage.toml").write_text(
        f"title = {text}\nsummary = {text}\nnotebook = 'n.ipynb'\nkernel = false\nparameters = {{}}\n"
        + "".join(
            f"[[gates]]\nmetric = '{name}'\nop = '=='\nbound = 0\nlast_seen = 0\nreason = {text}\n"
            for name in ("wrong", "late", "left")
        )
    )
    return contract.load("tiny")


@pytest.fixture
def written(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a notebook's card, verdict and tables display as HTML, by name."""
    pages: dict[str, str] = {}
    name = "card"
    monkeypatch.setattr(notebook_api, "_display", lambda page, text: pages.update({name: page}))
    lab.card("tiny", **{EVIL: EVIL})
    name = "verdict"
    lab.verdict("tiny", metrics={"wrong": 0, "late": 1, EVIL: 2}, skipped={"left": EVIL, f"{EVIL}2": EVIL})
    return {**pages, "table": html_table([EVIL, "n"], [[EVIL, 1], [EVIL, 2]])}


class Tags(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


# How often the hostile text stands in each: title, name, value; three reasons of gates, a check and why, a metric.
TIMES = {"card": 3, "verdict": 6, "table": 3}


@pytest.mark.parametrize("name", TIMES)
def test_every_text_is_there_and_is_text(written: dict[str, str], name: str) -> None:
    found = Tags(written[name])
    assert found.tags <= {"table", "tr", "th", "td", "p", "b", "thead", "tbody"} and found.names <= {"style"}
    assert found.text.count(EVIL) == TIMES[name], found.text


@pytest.fixture
def chromium() -> Iterator[str]:
    """Path of a Chromium, or a visible skip."""
    named = os.environ.get("DSV4_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    yield found or pytest.skip("no Chromium: set DSV4_CHROMIUM or put chromium on PATH")


def test_in_a_browser_nothing_of_it_runs(written: dict[str, str], chromium: str, tmp_path: Path) -> None:
    """No policy in the page's head helps: a notebook's outputs stand in a page that may run scripts."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "page.html"
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which(chromium), chromium_sandbox=False)
        try:
            page = browser.new_page()
            for raw, expected in ((EVIL, "taken"), ("".join(written.values()), "quiet")):  # first: that it would run
                path.write_text(f"<!doctype html><meta charset=utf-8><title>quiet</title><body>{raw}</body>")
                page.goto(path.as_uri())
                page.wait_for_load_state("networkidle")
                page.wait_for_timeout(100)
                assert page.title() == expected
            assert page.locator("img, script").count() == 0
            assert page.locator("body").inner_text().count("<img src=x") == sum(TIMES.values())
        finally:
            browser.close()
