"""The static site: pages lead to each other, load nothing from elsewhere, and say what was not executed."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from PIL import Image

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.lab import cli, records
from dsv4lib.lab.records import Record
from dsv4lib.lab.report import links
from dsv4lib.lab.report.cells import Block, markdown
from dsv4lib.lab.run import manifest, plan, runner
from dsv4lib.lab.site import build, search, sources
from dsv4lib.lab.stage import Stage, load
from dsv4lib.lab.verdicts import Verdict

EVIL = "<img src=x onerror=alert(1)>"
SECRET = "hf_" + "a1B2" * 8
README = f"""# The lab {EVIL}

![A figure](data/figures/a.png) ![not of here](../outside.png) ![remote](https://evil.example/p.png)

[one](notebooks/10_one.ipynb) [part](data/emulator/findings.md#a-b--c) [lost part](CHANGELOG.md#nowhere)
[table](data/bench/rows.csv) [lost](data/none.md) [out](../secret.md) [bad](javascript:alert(7)) [web](https://example.org/p)

| a very long head of a column | another very long head | a third one of that kind | the fourth of them |
| --- | --- | --- | --- |
| averyverylongwordthatnothingbreaks | averyverylongwordthatnothingbreaks | averyverylongwordthatnothingbreaks | 4 |

## Zanzibar $x_1 < y$

`/home/alice/x` {SECRET} quokka
"""


def png(size: int = 8, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def display(data: dict[str, Any], **metadata: Any) -> Any:
    return nbformat.v4.new_output("display_data", data=data, metadata=metadata)


def outputs() -> list[Any]:
    table = f'<table onclick="alert(1)"><tr><td>cell</td></tr></table>{EVIL}<script>alert(2)</script>'
    noise = [base64.b64encode(png(410, seed)).decode() for seed in range(5)]
    return [
        display({"text/html": table + '<a href="10_one.ipynb">self</a>'}),
        *(display({"image/png": data}, **{"image/png": {"alt": f"Noise {EVIL}"}}) for data in noise),
        display({"image/svg+xml": '<svg xmlns="http://www.w3.org/2000/svg"/>'}),
        nbformat.v4.new_output("stream", name="stdout", text=f"wombat at /home/alice/secret.txt {EVIL}"),
    ]


def record(stage: Stage, run: str, **changes: Any) -> Record:
    given = {
        "run_id": run, "job": f"{stage.name}-00", "attempt": 0, "stage": stage.name, "title": stage.title,
        "set": "quick", "kind": "run", "negative": "", "expect_fail": "", "overrides": {}, "parameters": {"seed": 1},
        "backend": "reference", "arch": "", "fingerprint": "f" * 12, "stage_fingerprint": stage.fingerprint(),
        "versions": {"python": "3.11"}, "machine": {"cores": "2"}, "verdict": Verdict.GATE_FAILED,
        "reason": f"too much {EVIL}", "started": datetime(2026, 1, 2, tzinfo=UTC), "seconds": 1.0,
        "time_limit_s": 60.0, "notebook": f"{stage.name}-00/notebook.ipynb", "commit": "ab" * 20, "label": "rack 1",
    }  # fmt: skip
    return Record(**{**given, **changes})


def write_run(
    root: Path, stage: Stage, *, whole: bool = True, set_name: str = "quick", text: str = "", **changes: Any
) -> str:
    """A finished run with the notebook of one stage, as the runner leaves it."""
    runs = root / "data" / "runs"
    jobs = plan.make([stage], "quick", backend="reference")
    made = manifest.new(runs, set_name, "f" * 12, whole, jobs).save(state="complete")
    one = record(stage, made.run_id, **changes)
    notebook = nbformat.read(stage.notebook_path, as_version=4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else outputs()
    (made.folder / one.job).mkdir()
    nbformat.write(notebook, made.folder / one.notebook)
    records.write(one, made.folder)
    return made.run_id


def fill(root: Path, make: Callable[..., Stage]) -> tuple[Stage, Stage]:
    """A workspace with two stages and a document of each kind."""
    one = make(root, "one", "x = 1", notebook="notebooks/10_one.ipynb")
    two = make(root, "two", f"y = '{EVIL}'", notebook="notebooks/20_two.ipynb")
    for stage, name in ((one, "one"), (two, "two")):
        (root / "notebooks" / f"{name}.ipynb").rename(stage.root / stage.notebook)
    for name in ("figures", "bench", "emulator"):
        (root / "data" / name).mkdir(parents=True)
    (root / "README.md").write_text(README)
    (root / "CHANGELOG.md").write_text("# Changes\n\n## First\n\n[back](README.md) [own](#first)\n")
    (root / "data" / "emulator" / "findings.md").write_text("# Findings\n\n## A `b`: & c\n\n[up](../bench/ops.md)\n")
    (root / "data" / "bench" / "ops.md").write_text("# Rows\n\n![f](../figures/a.png)\n")
    (root / "data" / "bench" / "rows.csv").write_text("a,b\n")
    (root / "data" / "figures" / "a.png").write_bytes(png())
    (root.parent / "outside.png").write_bytes(png())
    (root.parent / "secret.md").write_text("# There, but not in the workspace")
    notebook = nbformat.read(two.notebook_path, as_version=4)
    text = "[one](10_one.ipynb), [its](20_two.ipynb#Narwhal) and $x^2$"
    notebook.cells[0].source = f"# Two {EVIL}\n\n{text}\n\n## Narwhal\n\ntext"
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="stale number 17")]
    nbformat.write(notebook, two.notebook_path)
    return one, two


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, stage_writer: Callable[..., Stage]) -> Path:
    """A workspace in which one of two notebooks was executed."""
    root = tmp_path_factory.mktemp("outer") / "workspace"
    one, _ = fill(root, stage_writer)
    write_run(root, one)
    return root


@pytest.fixture(scope="module")
def made(workspace: Path) -> build.Made:
    return build.write_site(workspace / "site", workspace)


@pytest.fixture(scope="module")
def pages(made: build.Made) -> dict[str, str]:
    return {path.name: path.read_text() for path in made.index.parent.glob("*.html")}


class Tags(HTMLParser):
    """All tags with their attributes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def links_of(text: str, part: str = "main") -> list[str]:
    return [a["href"] or "" for tag, a in Tags(text.split(f"<{part}")[1]).tags if tag == "a" and "href" in a]


def test_pages_and_their_order(made: build.Made, pages: dict[str, str]) -> None:
    names = ["index", "tour", "10_one", "20_two", "emulator-findings", "bench-ops", "changelog"]
    assert set(pages) == {f"{name}.html" for name in names} and made.pages == len(names)
    assert (made.notebooks, made.executed) == (2, 1)
    for text in pages.values():
        nav = re.search(r'<nav class="side".*?</nav>', text, re.S)
        assert nav and [h for h in re.findall(r'href="([^"#]+)"', nav[0])] == [f"{name}.html" for name in names]
        assert nav[0].count('aria-current="page"') == 1
    assert "20_two.html" in links_of(pages["10_one.html"])[-1]  # the next page


def test_nothing_is_loaded_from_elsewhere_and_everything_is_there(made: build.Made, pages: dict[str, str]) -> None:
    folder = made.index.parent
    for name, text in pages.items():
        assert "default-src 'none'" in text and "unsafe-eval" not in text
        for tag, attributes in Tags(text).tags:
            assert tag not in ("iframe", "object", "embed", "form", "base", "svg", "style"), (name, tag)
            assert not [key for key in attributes if key.startswith("on")], attributes
            for key in ("src", "srcset", "data", "poster", "action", "background"):
                value = attributes.get(key)
                assert value is None or value.startswith("data:image/") or (folder / value).is_file(), (name, value)
            if tag == "link":
                assert attributes["href"] == "data:," or (folder / str(attributes["href"])).is_file()
            if tag == "a" and (href := attributes.get("href", "")):
                assert href.startswith(("https://example.org", "#")) or (folder / href.split("#")[0]).is_file(), href
        assert text.count("<script") == 1 and '<script src="site.js" defer></script>' in text
    for name in ("style.css", "site.js"):
        assert not re.search(r"https?:|url\(|@import|fetch\(|innerHTML|eval\(", (folder / name).read_text()), name


def test_every_text_is_text_and_private_detail_is_gone(made: build.Made, pages: dict[str, str]) -> None:
    everything = [*pages.values(), (made.index.parent / search.FILE).read_text()]
    for text in everything:
        for private in ("/home/alice", SECRET, str(made.index.parents[1])):
            assert private not in text
        assert EVIL not in text.partition("window.")[0]  # in the index it is text of a script's string
    assert "too much &lt;img src=x onerror=alert(1)&gt;" in pages["10_one.html"]
    assert "~/secret.txt" in pages["10_one.html"]


def test_links_lead_to_pages_and_what_leads_nowhere_is_named(made: build.Made, pages: dict[str, str]) -> None:
    assert links_of(pages["index.html"])[:3] == [
        "10_one.html",
        "emulator-findings.html#a-b--c",
        "changelog.html#nowhere",
    ]
    assert 'id="a-b--c"' in pages["emulator-findings.html"]
    assert links_of(pages["emulator-findings.html"])[0] == "bench-ops.html"
    assert links_of(pages["changelog.html"])[:2] == ["index.html", "changelog.html#first"]
    assert links_of(pages["20_two.html"])[:2] == ["10_one.html", "20_two.html#narwhal"]
    assert "10_one.html" in links_of(pages["10_one.html"])  # in the output of a cell
    assert '<span class="file" title="data/bench/rows.csv of the repository">table</span>' in pages["index.html"]
    wanted = [("README.md", "../secret.md"), ("README.md", "CHANGELOG.md#nowhere"), ("README.md", "data/none.md")]
    assert made.broken == wanted


def test_pictures_are_files_of_the_workspace(made: build.Made, pages: dict[str, str]) -> None:
    folder = made.index.parent
    assert len(re.findall(r'<img src="pictures/10_one-\d+.png"', pages["10_one.html"])) == 5
    assert sum(path.stat().st_size for path in folder.rglob("10_one*.png")) > 2_000_000
    assert {path.name for path in (folder / "pictures").glob("[!1]*")} == {"index-01.png", "bench-ops-01.png"}
    assert "[not of here]" in pages["index.html"] and "[remote]" in pages["index.html"]
    for path in folder.glob("*.*"):
        assert path.stat().st_size < 2_000_000, path.name


def test_what_was_not_executed_says_so(pages: dict[str, str]) -> None:
    one, two = pages["10_one.html"], pages["20_two.html"]
    for words in ("gate failed", "too much", "commit <code>ababababab</code>", "machine rack 1", "set quick", "wombat"):
        assert words in one
    assert "Not executed" in two and "stale number" not in two and "Not executed" not in one
    assert "1 of 2 notebooks executed" in pages["index.html"] and "not executed" in pages["tour.html"]


def test_without_a_run_the_first_page_says_so(tmp_path: Path, stage_writer: Callable[..., Stage]) -> None:
    fill(tmp_path / "w", stage_writer)
    made = build.write_site(tmp_path / "w" / "site", tmp_path / "w")
    assert made.executed == 0 and "No notebook of this site was executed" in made.index.read_text()


def test_which_run_is_shown(tmp_path: Path, stage_writer: Callable[..., Stage]) -> None:
    """The newest whole run, else the newest; never one of injected faults."""
    root = tmp_path / "w"
    one, two = fill(root, stage_writer)
    assert sources.executed(root, None).name == ""
    part = write_run(root, one, whole=False, text="a")
    assert sources.executed(root, None).name == part
    first = write_run(root, one, text="b")
    whole = write_run(root, two, text="c")
    later = write_run(root, one, whole=False, text="d")
    write_run(root, one, set_name="negatives", kind="negative", text="e")
    chosen = sources.executed(root, None)
    assert chosen.name == whole and list(chosen.notebooks) == ["notebooks/20_two.ipynb"]
    assert sources.executed(root, later).notebooks["notebooks/10_one.ipynb"].folder.name == later
    assert first < whole
    gathered = manifest.new(root / "data" / "runs", "quick", "f", True, [], parts=[first, whole, "gone", "../.."])
    gathered.save(state="complete")
    chosen = sources.executed(root, None)
    folders = {path: one.folder.name for path, one in chosen.notebooks.items()}
    assert (chosen.name, folders) == (
        gathered.run_id, {"notebooks/10_one.ipynb": first, "notebooks/20_two.ipynb": whole}
    )  # fmt: skip
    for bad in ("../x", "nothing"):
        with pytest.raises(DSV4Error, match="--runs"):
            sources.executed(root, bad)
    empty = manifest.new(root / "data" / "runs", "quick", "f", False, plan.make([one], "quick", backend="reference"))
    with pytest.raises(DSV4Error, match="executed a notebook"):
        sources.executed(root, empty.run_id)


def test_a_notebook_that_changed_after_its_run_says_so(tmp_path: Path, stage_writer: Callable[..., Stage]) -> None:
    root = tmp_path / "w"
    one, _ = fill(root, stage_writer)
    write_run(root, one, text="a", stage_fingerprint="0" * 12)
    made = build.write_site(root / "site", root)
    assert "has changed since this run" in (made.index.parent / "10_one.html").read_text()


def test_a_document_that_cannot_be_shown_costs_its_page(tmp_path: Path) -> None:
    (tmp_path / "secret.md").write_text("# Secret of others")
    root = tmp_path / "w"
    (root / "data" / "bench").mkdir(parents=True)
    (root / "README.md").write_text("# Fine\n\nplatypus")
    (root / "CHANGELOG.md").symlink_to(tmp_path / "secret.md")
    (root / "data" / "bench" / "deep.md").write_text(">" * 5000 + "x")
    (root / "data" / "bench" / "large.md").write_text("# Large\n\n    " + "x" * (build.PAGE_BYTES + 1))
    (root / "data" / "bench" / "larger.md").write_text("x" * (build.DOCUMENT_BYTES + 1))
    made = build.write_site(root / "site", root)
    pages = {path.stem: path.read_text() for path in made.index.parent.glob("*.html")}
    assert "platypus" in pages["index"] and "tour" not in pages
    assert "cannot be shown" in pages["changelog"] and "cannot be shown" in pages["bench-larger"]
    assert "too large for one page" in pages["bench-large"] and "bench-deep" in pages
    for path in made.index.parent.iterdir():
        assert path.is_dir() or (b"Secret of others" not in path.read_bytes() and path.stat().st_size < 2_000_000)


def test_templates_travel_with_the_wheel() -> None:
    listed = tomllib.loads((env.root() / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for folder in (build.TEMPLATES, build.OWN):
        package = ".".join(folder.parent.relative_to(env.root()).parts)
        assert {path.name for path in folder.iterdir() if path.is_file()} == {
            path.name for pattern in listed[package] for path in folder.parent.glob(pattern)
        }


def test_only_an_own_folder_is_replaced(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert build.write_site(out, workspace).index == out / "index.html"
    (out / "old.html").write_text("left from before")
    build.write_site(out, workspace)
    assert not (out / "old.html").exists()
    with monkeypatch.context() as patch:
        patch.setattr(build.search, "script", lambda pages: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build.write_site(out, workspace)
    assert (out / "index.html").is_file() and [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(out)
    for name in ("full", "link", "full/mine.txt"):
        with pytest.raises(DSV4Error, match="--out"):
            build.write_site(tmp_path / name, workspace)
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_cells_of_many_words_are_wide() -> None:
    row = f"| {'word ' * 12} | {'word ' * 5} | short | {'**b** ' * 9} |"
    text = markdown(f"| a | b | c | d |\n| --- | ---: | --- | --- |\n{row}")
    assert re.findall(r"<td([^>]*)>", text) == [
        ' class="text"', ' class="words" style="text-align:right;"', "", ""
    ]  # fmt: skip
    assert text.count('<div class="wide"') == 1


def test_a_list_begins_with_its_own_number() -> None:
    assert '<ol start="3">' in markdown("3. The third answer.\n4. The fourth.")


def test_numbers_in_cells_do_not_break() -> None:
    row = "| <= 1.8e-05 | [a](b-2e-07.html) 2.6e-07 | 1 x | 12 a token | -0.5 / 3 % |"
    text = markdown(f"| a | b | c | d | e |\n| --- | --- | --- | --- | --- |\n{row}")
    assert re.findall(r"<td([^>]*)>", text) == [' class="value"', "", ' class="value"', "", ' class="value"']
    assert '<a href="b-2e-07.html">a</a> <span class="value">2.6e-07</span>' in text


def test_tables_in_lists_pipes_in_cells_and_code_of_unknown_languages() -> None:
    text = markdown("1. a\n\n   | x | `a\\|b` |\n   | --- | --- |\n   | 1 | c \\| d |\n\n```cron\n0 1 * * *\n```\n")
    assert "<code>a|b</code>" in text and "<td>c | d</td>" in text and text.index("</table>") < text.index("</li>")
    assert "<pre><code>0 1 * * *\n</code></pre>" in text
    assert '<span class="k">def</span>' in markdown("```python\ndef f(): ...\n```")


def test_a_figure_is_drawn_on_a_line_of_its_own_only() -> None:
    assert build.FIGURE.findall("<!-- figure: ops -->\n`<!-- figure: NAME -->` marks it\n<!-- figure: two -->\n") == [
        "ops", "two"
    ]  # fmt: skip


def test_names_of_pages(tmp_path: Path) -> None:
    names = {
        "README.md": "index.html", "notebooks/30_fmha_a.ipynb": "30_fmha_a.html", "CHANGELOG.md": "changelog.html",
        "data/bench/ops.md": "bench-ops.html", "dsv4lib/cache/README.md": "cache.html",
        "data/nano/README.md": "nano.html",
        'notebooks/a "b&<c>.ipynb': "a-b-c.html",
    }  # fmt: skip
    assert {path: sources.file_name(path) for path in names} == names
    (tmp_path / "notebooks").mkdir()
    for name in ("a b.ipynb", "a-b.ipynb"):
        (tmp_path / "notebooks" / name).write_text("{}")
    with pytest.raises(DSV4Error, match=r"a-b\.html.*rename"):
        sources.sources(tmp_path)
    with pytest.raises(DSV4Error, match="nothing to publish"):
        sources.sources(tmp_path / "none")


def test_anchors_are_unique_and_sections_follow_them() -> None:
    text, headings = links.with_anchors(
        markdown("before\n\n## A b\n\nfirst $x$\n\n### A b\n\n`co`de\n\n## !?\n\n## Last"), set()
    )
    assert [(h.level, h.anchor) for h in headings] == [(3, "a-b"), (4, "a-b-1"), (3, "section"), (3, "last")]
    found = search.sections([Block("prose", text), Block("picture", markdown("x"), "alt")])
    assert found == [
        ("", "", "before"), ("a-b", "A b", "first x"), ("a-b-1", "A b", "code"), ("section", "!?", ""),
        ("last", "Last", "x"),
    ]  # fmt: skip
    script = search.script([("a.html", "A \u2028 </script>", found)])
    listed = json.loads(script.removeprefix("window.DSV4_SEARCH = ").removesuffix(";\n"))
    assert listed["pages"] == [["a.html", "A \u2028 </script>"]] and listed["sections"][1][0] == 0 and script.isascii()


def test_the_command_prints_what_it_made(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSV4_WORKSPACE", str(workspace))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dsv4", "site"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert left.value.code == 0 and said.out == "site/index.html: 7 pages, 1 of 2 notebooks executed\n"
    assert "README.md: its link to data/none.md leads nowhere" in said.err and said.err.count("\n") == 3


# ---- in a browser -------------------------------------------------------------------------------------------------


def chromium() -> str:
    """Path of a Chromium, or a visible skip."""
    named = os.environ.get("DSV4_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return found or pytest.skip("no Chromium: set DSV4_CHROMIUM or put chromium on PATH")


def test_in_a_browser_it_is_quiet_fits_a_phone_and_finds_words(made: build.Made, pages: dict[str, str]) -> None:
    found, folder = chromium(), made.index.parent
    from playwright.sync_api import sync_playwright

    requests: list[str] = []
    said: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which(found), chromium_sandbox=False)
        try:
            page = browser.new_page(viewport={"width": 390, "height": 800})
            page.on("request", lambda request: requests.append(request.url.split(":")[0]))
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
            for name in pages:
                page.goto((folder / name).as_uri())
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
                broken = page.evaluate(
                    "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.alt)"
                )
                assert broken in ([], ["A figure of A throwaway stage that carries no description"]), (name, broken)
            papers = []
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                papers.append(page.evaluate("getComputedStyle(document.querySelector('main')).backgroundColor"))
            assert papers[0] != papers[1]
            page.goto((folder / "index.html").as_uri())
            boxes = page.evaluate("[...document.querySelectorAll('.wide')].map(b => b.scrollWidth > b.clientWidth)")
            assert boxes == [True]  # the table is read by scrolling it, not letter by letter
            page.goto((folder / "changelog.html").as_uri())
            page.get_by_role("searchbox").fill("quokka wombat")  # each stands on a page, both on none
            page.get_by_text("Nothing found.").wait_for()
            page.get_by_role("searchbox").fill("Quokka zanz")
            page.get_by_text("1 section").wait_for()
            hit = page.locator("#found a")
            assert hit.locator("mark").all_inner_texts() == ["Zanz", "quokka"]
            hit.click()
            assert page.url.partition("index.html#zanzibar")[1] and page.locator("h3:target, h2:target").count() == 1
            page.get_by_role("searchbox").fill("onerror")
            page.locator("#found a").first.wait_for()
            assert page.locator("#found img").count() == 0
            page.keyboard.press("Escape")
            page.get_by_text("Pages", exact=True).click()
            page.locator(".menu").get_by_role("link", name="Findings").click()
            assert page.url.endswith("emulator-findings.html")
        finally:
            browser.close()
    assert said == [] and set(requests) <= {"file", "data"}


# What a page shows that is wrong with it, apart from messages: it scrolls sideways, a picture is not there, text has
# little contrast with its background (WCAG 2.1: 4.5), a cell of many words is narrow.
WRONG = """(contrast) => {
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push(`${document.documentElement.scrollWidth} wide`);
  const lost = [...document.images].filter((image) => !image.complete || !image.naturalWidth);
  found.push(...lost.map((image) => `no picture ${image.alt}`));
  const cells = [...document.querySelectorAll("main td")].filter((cell) => cell.innerText.trim().length >= 50);
  const narrow = cells.filter((cell) => cell.clientWidth && cell.clientWidth < 130);
  found.push(...narrow.map((cell) => `${cell.clientWidth} for ${cell.innerText.slice(0, 40)}`));
  if (!contrast) return found;
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const known = new Map();
  for (const element of document.querySelectorAll("main *, .side a, .top a")) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    const style = getComputedStyle(element);
    let ground = element;
    while (ground && rgb(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
    const paper = ground ? getComputedStyle(ground).backgroundColor : "white";
    const key = `${style.color} on ${paper}`;
    if (known.has(key) || !element.getClientRects().length) continue;
    const [a, b] = [light(rgb(style.color)), light(rgb(paper))];
    known.set(key, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
    if (known.get(key) < 4.5) found.push(`${key}: ${element.textContent.trim().slice(0, 40)}`);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> build.Made:
    """The site of this workspace after a real run of its cheapest notebook."""
    folder = tmp_path_factory.mktemp("own")
    (record,) = runner.run_stage(load("hopper"), "quick", runner.Options(out=folder / "runs", workers=1))
    assert record.finished, record.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "runs_folder", lambda root: folder / "runs")
        return build.write_site(folder / "site", env.root())


def test_the_lab_s_own_site_has_no_broken_link_and_no_large_file(own: build.Made) -> None:
    assert own.broken == [] and own.notebooks >= 25 and own.executed == 1
    for path in own.index.parent.rglob("*.*"):
        assert path.stat().st_size < 2_000_000, path.name
    ops = (own.index.parent / "bench-ops.html").read_text()
    assert re.search(r'<img src="pictures/bench-ops-01.png" alt="[^"]{40}', ops)  # drawn from its table


@pytest.mark.full
def test_every_page_of_it_in_a_browser(own: build.Made) -> None:
    """From file://: on a phone and a wide screen, light and dark; no message, no request elsewhere."""
    found, folder = chromium(), own.index.parent
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    wrong: list[tuple[str, int, str, list[str]]] = []
    requests: set[str] = set()
    names = sorted(path.name for path in folder.glob("*.html"))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which(found), chromium_sandbox=False)
        try:
            page = browser.new_page()
            page.on("request", lambda request: requests.add(request.url.split(":")[0]))
            page.on("console", lambda message: said.append(f"{page.url}: {message.text}"))
            page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
            for name in names:
                page.goto((folder / name).as_uri())
                for width, scheme in ((400, "light"), (1280, "dark"), (1280, "light"), (400, "dark")):
                    page.set_viewport_size({"width": width, "height": 800})
                    page.emulate_media(color_scheme=scheme)
                    if lines := page.evaluate(WRONG, width > 400):
                        wrong.append((name, width, scheme, lines))
            page.goto((folder / "index.html").as_uri())
            page.get_by_role("searchbox").fill("swizzle TMA")
            page.locator("#found a").first.click()
            assert not page.url.endswith("index.html")
        finally:
            browser.close()
    assert len(names) == own.pages and wrong == [] and said == [] and requests <= {"file", "data"}
