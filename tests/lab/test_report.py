"""The report: opens offline, escapes every text, describes every figure, hides private detail, stays small."""

from __future__ import annotations

import base64
import functools
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from dsv4lib import env
from dsv4lib.lab.records import Record
from dsv4lib.lab.report import build as report
from dsv4lib.lab.report import cells
from dsv4lib.lab.report.scrub import scrub
from dsv4lib.lab.report.stamp import stamp
from dsv4lib.lab.verdicts import LOOKS, GateResult, Verdict

EVIL = "<img src=x onerror=alert(1)>"
SECRET = "hf_" + "a1B2" * 8

RECORD = Record(
    run_id="20260101T000000.000000Z-abcd", job="one-00", attempt=0, stage="one", title=f"Stage {EVIL}", set="quick",
    kind="run", negative="", expect_fail="", overrides={}, parameters={"name": EVIL}, backend="reference", arch="",
    fingerprint="0123456789ab", stage_fingerprint="ba9876543210", versions={"python": "3.11"}, machine={"cores": "2"},
    verdict=Verdict.PASSED, reason=f"fine {EVIL}", started=datetime(2026, 1, 1, tzinfo=UTC), seconds=1.5,
    time_limit_s=60.0, notebook="one-00/notebook.ipynb", metrics={"wrong": 0.0, "kv_bytes": 584.0},
    skipped={f"native {EVIL}": "no GPU here"},
    gates=[GateResult("wrong", "==", 0.0, 0.0, f"reason {EVIL}", 0.0, "passed")],
)  # fmt: skip


class Page(HTMLParser):
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


def png(size: int = 8, seed: int = 0) -> str:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def display(data: dict[str, Any], metadata: dict[str, Any] | None = None) -> Any:
    return nbformat.v4.new_output("display_data", data=data, metadata=metadata or {})


def built(
    tmp_path: Path, markdown: str = "# Title", outputs: list[Any] | None = None, **changes: Any
) -> dict[str, str]:
    record = replace(RECORD, **changes)
    code = nbformat.v4.new_code_cell(f"x = '{EVIL}'  # /home/alice/x", outputs=outputs or [])
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(markdown), code])
    (tmp_path / "one-00").mkdir(exist_ok=True)
    nbformat.write(notebook, tmp_path / "one-00" / "notebook.ipynb")
    index = report.write_report(tmp_path, [record], tmp_path / "workspace", missing=[f"lost {EVIL}"], interrupted=True)
    return {path.name: path.read_text() for path in index.parent.glob("*.html")}


HTML_OUTPUT = f"""<table onclick="alert(1)" style="color:red;background:url(https://evil.example/x)"><tr><td>cell</td></tr>
</table><script>alert(2)</script><iframe src="https://evil.example"></iframe>{EVIL}
<a href="javascript:alert(3)">a</a><style>@import url(https://evil.example)</style><link href="https://evil.example">
<svg onload="alert(4)"></svg><form action="https://evil.example"><input></form>"""


@pytest.fixture
def everything(tmp_path: Path) -> dict[str, str]:
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(5)</script></svg>'
    outputs = [
        display({"text/html": HTML_OUTPUT, "text/plain": "x"}),
        display({"image/png": png()}, {"image/png": {"alt": f'A raster "{EVIL}'}}),
        display({"image/png": png()}),
        display({"image/svg+xml": svg}, {"image/svg+xml": {"alt": "A drawing"}}),
        display({"text/markdown": f"**bold** {EVIL} ![pic](https://evil.example/p.png)"}),
        display({"application/vnd.jupyter.widget-view+json": {}, "text/plain": "IntSlider()"}),
        display({"application/javascript": "alert(6)", "text/plain": EVIL}),
        nbformat.v4.new_output("stream", name="stdout", text=f"\x1b[31mred {EVIL}\x1b[0m at /home/alice/secret.txt"),
        nbformat.v4.new_output("error", ename="E", evalue=EVIL, traceback=[f"File /root/x.py {EVIL} {SECRET}"]),
    ]
    markdown = (
        f"# Title {EVIL}\n\n$x_1 < y$ and [paper](https://example.org/p) [bad](javascript:alert(7))\n\n![p](x.png)"
    )
    return built(tmp_path, markdown, outputs)


def test_it_opens_offline_and_runs_nothing(everything: dict[str, str]) -> None:
    assert set(everything) == {"index.html", "one-00.html"}
    for text in everything.values():
        page = Page(text)
        for tag, attributes in page.tags:
            assert tag not in ("script", "iframe", "object", "embed", "form", "input", "base", "svg"), tag
            assert not [name for name in attributes if name.startswith("on")], attributes
            for name in ("src", "srcset", "data", "poster", "action", "background"):
                value = attributes.get(name)
                assert value is None or value.startswith("data:"), (tag, value)
            if tag == "link":
                assert attributes["href"] == "data:,"
            elif "href" in attributes:
                assert re.match(r"https?://|[\w-]+\.html$|#only-\w+$|#all$", attributes["href"] or ""), attributes
            assert "url(" not in (attributes.get("style") or "")
        style = "".join(re.findall(r"<style>(.*?)</style>", text, re.S))
        assert "url(" not in style and "@import" not in style and "http" not in style
        assert "default-src 'none'" in text


def test_links_lead_to_pages_of_the_report_and_the_rest_is_named(
    tmp_path: Path, stage_writer: Callable[..., Any]
) -> None:
    """A notebook's links are relative to its folder, where the report is not."""
    root = tmp_path / "workspace"
    for name in ("one", "two", "unrun"):
        stage_writer(root, name)
    text = "# Title\n\n## Glossary\n\n[t](two.ipynb#Glossary) [o](#Glossary) [u](unrun.ipynb) [d](../data/x.md) [w](https://w.org)"
    records = [replace(RECORD, job=f"{name}-00", stage=name, notebook=f"{name}-00/n.ipynb") for name in ("one", "two")]
    for record in records:
        (tmp_path / record.notebook).parent.mkdir()
        nbformat.write(
            nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)]), tmp_path / record.notebook
        )
    index = report.write_report(tmp_path, records, root)
    article = (index.parent / "one-00.html").read_text().partition("<article>")[2]
    assert re.findall(r'href="([^"]*)"', article) == ["two-00.html#glossary", "one-00.html#glossary", "https://w.org"]
    assert '<h3 id="glossary">' in (index.parent / "two-00.html").read_text()
    assert '<span class="file" title="notebooks/unrun.ipynb of the repository">u</span>' in article


@pytest.mark.parametrize("first", ["run", "negative"])
def test_links_to_a_notebook_lead_to_its_run(tmp_path: Path, stage_writer: Callable[..., Any], first: str) -> None:
    """Not to an injected fault; a notebook that was run with faults alone is named."""
    root = tmp_path / "workspace"
    for name in ("one", "two", "broken"):
        stage_writer(root, name)
    text = "# Title\n\n[t](two.ipynb) [b](broken.ipynb)"
    kinds = [("one-00", "one", "run"), ("two-negative-x", "two", "negative"), ("two-00", "two", "run")]
    kinds = [
        *(kinds if first == "negative" else [kinds[0], kinds[2], kinds[1]]),
        ("broken-negative-x", "broken", "negative"),
    ]
    records = [
        replace(RECORD, job=job, stage=name, kind=kind, notebook=f"{job}/n.ipynb", negative=kind[:3])
        for job, name, kind in kinds
    ]
    for record in records:
        (tmp_path / record.notebook).parent.mkdir()
        cells_of = [nbformat.v4.new_markdown_cell(text)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells_of), tmp_path / record.notebook)
    index = report.write_report(tmp_path, records, root)
    article = (index.parent / "one-00.html").read_text().partition("<article>")[2]
    assert re.findall(r'href="([^"]*)"', article) == ["two-00.html"]
    assert '<span class="file" title="notebooks/broken.ipynb of the repository">b</span>' in article
    own = (index.parent / "two-negative-x.html").read_text().partition("<article>")[2]
    assert re.findall(r'href="([^"]*)"', own) == ["two-negative-x.html"]


def test_every_text_is_escaped(everything: dict[str, str]) -> None:
    for text in everything.values():
        assert "<img src=x" not in text and "&lt;img src=x onerror" in text
        assert "alert(1)" in Page(text).text  # it is there, as text
    assert Page(everything["index.html"]).text.count(EVIL) >= 4  # title, reason, gate, skipped check, missing


def test_every_picture_has_a_description(everything: dict[str, str]) -> None:
    for text in everything.values():
        pictures = [attributes for tag, attributes in Page(text).tags if tag == "img"]
        assert pictures and all((attributes.get("alt") or "").strip() for attributes in pictures)
    alts = [attributes["alt"] for tag, attributes in Page(everything["one-00.html"]).tags if tag == "img"]
    assert f'A raster "{EVIL}' in alts and "A drawing" in alts and "x_1 < y" in alts
    assert "1 figures carry no description" in everything["index.html"].replace("1 figure ", "1 figures ")


def test_no_private_detail(everything: dict[str, str]) -> None:
    for text in everything.values():
        for private in ("/home/alice", "/root", SECRET, str(Path.home()) + "/"):
            assert private not in text
    assert "~/secret.txt" in everything["one-00.html"]


def test_skipped_checks_interruption_and_losses_are_shown(everything: dict[str, str]) -> None:
    index = Page(everything["index.html"]).text
    for words in ("no GPU here", "1 check skipped", "This run was interrupted", "executed less", "kv_bytes", "584"):
        assert words in index
    skipped = LOOKS[Verdict.SKIPPED]
    assert f"color:{skipped.ink};background:{skipped.paper}" in everything["index.html"]


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_class_has_its_colour_and_word(tmp_path: Path, verdict: Verdict) -> None:
    text = built(tmp_path, verdict=verdict)["index.html"]
    look = LOOKS[verdict]
    assert re.search(rf'style="color:{look.ink};background:{look.paper}">1 {look.label}<', text)
    assert re.search(rf'style="color:{look.ink};background:{look.paper}">{look.label}<', text)


def several(tmp_path: Path) -> str:
    """The index of a run with a passed, a skipped and two red notebooks, in this order."""
    verdicts = {"good": Verdict.PASSED, "left": Verdict.SKIPPED, "wrong": Verdict.GATE_FAILED, "slow": Verdict.TIMEOUT}
    records = [replace(RECORD, job=f"{name}-00", title=name, verdict=one) for name, one in verdicts.items()]
    return report.write_report(tmp_path, records, tmp_path).read_text()


def test_red_stands_first(tmp_path: Path) -> None:
    text = several(tmp_path)
    shown = re.findall(r'<td><a href="(\w+)-00.html">', text)
    assert shown == ["slow", "wrong", "left", "good"]
    assert text.index("Metrics of what is red") < text.index("slow-00</small></th>") < text.index("Metrics and bounds")
    assert text.index("Metrics and bounds") < text.index("good-00</small></th>")
    assert "<h1>2 of 4 notebooks red</h1>" in text and "<title>2 of 4 notebooks red: " in text
    kept = report.write_report(tmp_path, [replace(RECORD, verdict=Verdict.PASSED)], tmp_path).read_text()
    assert "<h1>1 notebook, none red</h1>" in kept


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"commit": "ab" * 20, "dirty": False, "label": "b200 one"}, ["commit ababababab", "machine b200 one"]),
        ({"commit": "ab" * 20, "dirty": True}, ["commit ababababab with uncommitted changes"]),
        ({}, ["commit unknown"]),
    ],
)
def test_date_set_commit_and_machine_are_at_the_top(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    for page in built(tmp_path, **changes).values():
        top = Page(page.split("</header>")[0]).text
        for word in ("2026-01-01 00:00 UTC", "set quick", *words):
            assert word in top
        assert ("machine" in top) == ("label" in changes) and ("uncommitted" in top) == bool(changes.get("dirty"))


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_wcag_aa() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for look in LOOKS.values():
        assert contrast(look.ink, look.paper) >= 4.5, look
    style = (report.TEMPLATES / "style.css").read_text()
    themes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", style)]
    light, dark = themes
    assert set(light) == set(dark) and luminance(light["paper"]) > 0.9 > 0.1 > luminance(dark["paper"])
    papers = ("paper", "wash", "bad-wash")
    for theme in themes:
        for name in set(theme) - {*papers, "line", "edge", "bad-edge"}:
            assert min(contrast(theme[name], theme[paper]) for paper in papers) >= 4.5, (name, theme[name])
    for colour in re.findall(r"[ ;{]color: (#[0-9a-f]{6})", style):  # of what stays on white in both
        assert contrast(colour, "#ffffff") >= 4.5, colour


def test_a_tagged_cell_gives_the_thumbnail_and_else_the_best_shape() -> None:
    def cell(width: int, alt: str, *tags: str) -> Any:
        from PIL import Image

        buffer = io.BytesIO()
        Image.new("RGB", (width, 100)).save(buffer, "PNG")
        shown = display(
            {"image/png": base64.b64encode(buffer.getvalue()).decode()}, {"image/png": {"alt": f"A figure {alt}"}}
        )
        return nbformat.v4.new_code_cell("x", outputs=[shown], metadata={"tags": list(tags)})

    def chosen(*some: Any) -> str:
        page = cells.render_cells(nbformat.v4.new_notebook(cells=some), "t", lambda text: text, cells.Inline())
        return str(re.search(r'alt="A figure (\w+)"', str(page.thumbnail))[1])

    assert chosen(cell(300, "wide"), cell(160, "fits"), cell(90, "tall")) == "fits"
    assert chosen(cell(300, "wide", "thumbnail"), cell(160, "fits"), cell(90, "tall")) == "wide"


def test_a_notebook_stays_under_two_megabytes(tmp_path: Path) -> None:
    """Six noisy pictures of 0.5 MB each: noise hardly compresses, so the page has to shrink them."""
    outputs = [display({"image/png": png(410, seed)}, {"image/png": {"alt": f"Noise {seed}"}}) for seed in range(6)]
    outputs.append(nbformat.v4.new_output("stream", name="stdout", text="line\n" * 100_000))
    assert sum(len(output["data"]["image/png"]) for output in outputs[:6]) > 3e6
    text = built(tmp_path, outputs=outputs)["one-00.html"]
    assert len(text.encode()) < 2_000_000
    alts = [attributes["alt"] for tag, attributes in Page(text).tags if tag == "img"]
    assert alts == [f"Noise {seed}" for seed in range(6)]
    assert "characters left out" in text


@pytest.mark.parametrize(
    "tex", [r"p_i = \frac{e^{s_i}}{e^z + \sum_j e^{s_j}}", r"\hat{x} \cdot \left(1 + \alpha\right)", r"\|x\|_2 \leq 5"]
)
def test_formulas_become_described_pictures(tex: str) -> None:
    for source in (f"inline ${tex}$ here", f"$$\n{tex}\n$$"):
        pictures = [attributes for tag, attributes in Page(cells.markdown(source)).tags if tag == "img"]
        assert [attributes["alt"] for attributes in pictures] == [tex]
        assert pictures[0]["src"].startswith("data:image/svg+xml;base64,")


def test_formulas_that_cannot_be_set_stay_readable() -> None:
    assert r"\undefinedmacro{x}" in Page(cells.markdown(r"$\undefinedmacro{x}$")).text
    aligned = Page(cells.markdown(r"$$\begin{aligned} a &= b \\ c &= d \end{aligned}$$"))
    assert [attributes["alt"] for tag, attributes in aligned.tags if tag == "img"] == ["a = b", "c = d"]


def test_equal_notebooks_give_equal_pages(tmp_path: Path) -> None:
    first = built(tmp_path, "$x^2$", [display({"image/png": png()}, {"image/png": {"alt": "a"}})])
    cells._formula.cache_clear()
    assert built(tmp_path, "$x^2$", [display({"image/png": png()}, {"image/png": {"alt": "a"}})]) == first


def test_scrub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    text = f"{tmp_path}/notebooks/a.ipynb /Users/bob/x {SECRET} correct-horse-battery rooted /roots sub/root/x"
    assert scrub(text, tmp_path) == "./notebooks/a.ipynb ~/x <secret> <secret> rooted /roots sub/root/x"


FAKE = {  # put together here, so that no scanner takes this file for a leak
    "github": "ghp" + "_" + "a1B2" * 9,
    "github_pat": "github" + "_pat_" + "11ABCDEFG0" * 3 + "_x",
    "gitlab": "gl" + "pat-" + "x1Y2" * 5,
    "google": "AI" + "za" + "Sy" + "c3D4" * 9,
    "npm": "npm" + "_" + "e5F6" * 9,
    "slack": "xo" + "xb-1234567890-abcdef",
    "aws": "AK" + "IA" + "ABCDEFGH12345678",
    "openai": "s" + "k-" + "proj-" + "g7H8" * 6,
    "jwt": "ey" + "JhbGciOiJIUzI1NiJ9.ey" + "JzdWIiOiJhbGljZSJ9.c2lnbmF0dXJl-_x",
    "key": "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEabc\n-----END RSA PRIVATE" + " KEY-----",
}


@pytest.mark.parametrize("name", FAKE)
def test_scrub_hides_every_kind_of_secret(name: str, tmp_path: Path) -> None:
    """Also where a colour code, whose last letter is one, stands directly before it, as in tracebacks."""
    assert scrub("half \ud800 a pair", tmp_path) == "half ? a pair"  # no file can hold it
    for text in ("at {} end", "\x1b[38;5;28m{}\x1b[39m", "'{}'", "token={}&b", "{}"):
        shown = scrub(text.format(FAKE[name]), tmp_path)
        assert FAKE[name][8:20] not in shown and FAKE[name][-30:] not in shown and "<secret>" in shown, shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://alice:hunter2@db.example/x", "https://<secret>@db.example/x"),
        ("git+ssh://git@github.com/a/b", None),
        ("http://127.0.0.1:8888/lab?token=abcdef", "http://127.0.0.1:8888/lab?token=<secret>"),
        ("ssh 10.1.2.3, user@192.168.7.20:22.", "ssh <address>, user@<address>:22."),
        ("from 203.0.113.9 and http://8.8.8.8/dns", "from <address> and http://<address>/dns"),
        ("torch==10.4.0.35 nvidia-curand 10.4.0.35 v10.1.2.3 cublas-10.1.2.3-py3", None),
        ("PTX ISA 9.7.14.16, 999.1.1.1, 10.1.2.3.4, 0.0.0.0", None),
        ("[2001:db8::8a2e:370:7334]:443 fe80::1ff:fe23:4567", "[<address>]:443 <address>"),
        ("x[2048::16] 12:34:56 std::vector abcd::ef ::1", None),
        ("C:\\Users\\bob\\x.py", "~\\x.py"),
    ],
)
def test_scrub_tells_addresses_from_versions(text: str, shown: str | None, tmp_path: Path) -> None:
    assert scrub(text, tmp_path) == (text if shown is None else shown)


def test_scrub_leaves_the_committed_notebooks_alone() -> None:
    """What hides secrets must not eat prose, slices, versions or sections of manuals."""
    for path in sorted((env.root() / "notebooks").glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            assert scrub(cell.source, env.root()) == cell.source, path.name


def test_the_saved_notebook_is_scrubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, tracebacks, metadata, parameters and the reason; half a surrogate pair, which no file holds, too."""
    monkeypatch.setenv("DEPLOY_KEY", "correct-horse-battery")
    private = f"/home/alice/x {FAKE['jwt']} correct-horse-battery 10.1.2.3 \ud800"
    outputs = [
        nbformat.v4.new_output("stream", name="stdout", text=private),
        nbformat.v4.new_output("error", ename="E", evalue=private, traceback=[f"\x1b[31m{private}"]),
        display({"text/html": private, "image/png": png(), "application/json": {private: [private, 1.5]}}),
    ]
    cell = nbformat.v4.new_code_cell(f"x = '{private}'", outputs=outputs, metadata={"papermill": {"note": private}})
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"papermill": {"environment_variables": private}})
    saved = tmp_path / "notebook.ipynb"
    saved.write_bytes(nbformat.writes(notebook).replace("\ud800", "\\ud800").encode())  # as JSON may spell it
    stamp(replace(RECORD, reason=private), saved, saved, None, functools.partial(scrub, root=tmp_path))
    text = saved.read_text()
    for secret in ("alice", FAKE["jwt"], "correct-horse", "10.1.2.3", "ud800"):
        assert secret not in text, secret
    again = nbformat.read(saved, as_version=4)
    nbformat.validate(again)
    assert again.cells[1].outputs[2]["data"]["image/png"] == outputs[2]["data"]["image/png"]
    assert again.cells[1].outputs[0]["text"] == "~/x <secret> <secret> <address> ?"


BAD_OUTPUTS: dict[str, dict[str, Any]] = {  # name: data; what is not a valid notebook is not made by nbformat
    "no base64": {"image/png": "%%%"},
    "no picture": {"image/png": base64.b64encode(b"nothing").decode()},
    "cut off": {"image/png": png(64)[:2000]},
    "not a text": {"image/png": 7},
    "no list": {"text/plain": [1, 2]},
    "no SVG": {"image/svg+xml": "<svg"},
    "other XML": {"image/svg+xml": "<a/>"},
    "marks": {"text/markdown": "dsv4held7x held7n7x $x$"},
    "surrogate": {"text/plain": "half \udc00 a pair"},
    "deep": {"text/markdown": ">" * 5000 + "x"},
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_a_bad_output_costs_a_line_and_not_the_report(tmp_path: Path, name: str) -> None:
    bad = {"output_type": "display_data", "data": BAD_OUTPUTS[name], "metadata": {}}
    last = {"output_type": "stream", "name": "stdout", "text": "the rest is there"}
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "execution_count": 1, "source": "x", "outputs": [bad, last]}
    (tmp_path / "one-00").mkdir()
    text = json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    (tmp_path / "one-00" / "notebook.ipynb").write_text(text)
    index = report.write_report(tmp_path, [RECORD], tmp_path)
    page = Page((index.parent / "one-00.html").read_text()).text
    assert "the rest is there" in page
    assert ("cannot be shown" in page) == (name not in ("marks", "surrogate", "deep")), page
    if name == "marks":
        assert "dsv4held7x held7n7x" in page


def test_a_notebook_that_cannot_be_read_costs_its_page(tmp_path: Path) -> None:
    (tmp_path / "one-00").mkdir()
    (tmp_path / "one-00" / "notebook.ipynb").write_text('{"cells": [')
    index = report.write_report(tmp_path, [RECORD, replace(RECORD, job="two-00", notebook="")], tmp_path)
    assert "This notebook cannot be shown" in (index.parent / "one-00.html").read_text()
    assert "two-00" in index.read_text()


def test_huge_outputs_are_cut_and_say_so(tmp_path: Path) -> None:
    rows = "<tr><td>cell</td></tr>" * 20_000
    outputs = [display({"text/html": f"<table>{rows}</table>"})] + [display({"text/html": "x" * 90_000})] * 9
    text = built(tmp_path, outputs=[*outputs, display({"image/png": png()})])["one-00.html"]
    assert len(text) < 800_000 and text.count("<table") == text.count("</table>")
    assert "340015 characters of this output left out" in text
    assert "4 outputs of this cell stand in the notebook only" in text
    assert text.count("data:image/png") == 1


def test_scrub_hides_a_distinctive_host_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dsv4lib.lab.report import scrub as module

    for host, shown in (("node-17.example", "on <host> now"), ("main", "on main now")):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        module._replacements.cache_clear()
        assert scrub(f"on {host} now", tmp_path) == shown
    module._replacements.cache_clear()


def test_a_run_without_a_notebook_has_a_page(make: Callable[..., Any], tmp_path: Path) -> None:
    record = replace(
        RECORD, notebook="", gates=[], metrics={}, skipped={}, verdict=Verdict.SKIPPED, reason="no back end"
    )
    index = report.write_report(tmp_path, [record], tmp_path)
    assert "no back end" in (index.parent / "one-00.html").read_text()


def chromium() -> str:
    """Path of a Chromium, or a visible skip."""
    named = os.environ.get("DSV4_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return found or pytest.skip("no Chromium: set DSV4_CHROMIUM or put chromium on PATH")


def test_in_a_browser_the_index_is_filtered_and_fits_a_phone(tmp_path: Path) -> None:
    found, path = chromium(), tmp_path / "report" / "index.html"
    several(tmp_path)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which(found), chromium_sandbox=False)
        try:
            page = browser.new_page(viewport={"width": 390, "height": 800})
            papers = []
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.goto(path.as_uri())
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
                boxes = "[...document.querySelectorAll('.rows')].map(t => t.scrollWidth <= t.parentNode.clientWidth)"
                assert page.evaluate(boxes) == [True] * 3
                papers.append(page.evaluate("getComputedStyle(document.querySelector('main')).backgroundColor"))
            assert papers[0] != papers[1]
            rows = page.locator(".verdicts tbody tr:visible")
            assert rows.count() == 4
            page.get_by_role("link", name="1 gate failed").click()
            assert rows.count() == 1 and "wrong" in rows.first.inner_text()
            page.get_by_role("link", name="show all").click()
            assert rows.count() == 4
        finally:
            browser.close()


def test_in_a_browser_nothing_leaves_and_nothing_runs(everything: dict[str, str], tmp_path: Path) -> None:
    """The pages with hostile texts and outputs, opened from file:// in a real browser."""
    found = chromium()
    from playwright.sync_api import sync_playwright

    requests: list[str] = []
    dialogs: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which(found), chromium_sandbox=False)
        try:
            page = browser.new_page()
            page.on("request", lambda request: requests.append(request.url))
            page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
            for name in everything:
                page.goto((tmp_path / "report" / name).as_uri())
                page.wait_for_load_state("networkidle")
                broken = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length")
                assert broken == 0
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        finally:
            browser.close()
    assert dialogs == []
    assert [url.split(":")[0] for url in requests if not url.startswith("data:")] == ["file"] * len(everything)
