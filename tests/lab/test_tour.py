"""The tour as a whole: links that resolve, what a page needs and what comes next, the glossary, the readers' paths."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from dsv4lib import env, lab
from dsv4lib.lab.notebook import glossary, turns
from dsv4lib.lab.stage import discover

PAGES = sorted(path for path in (env.root() / "notebooks").glob("*.ipynb"))
TABLE = (
    "## Glossary\n\n| word | meaning |\n|---|---|\n| **CTA pair** | two **CTAs** |\n| **UMMA**, `tcgen05.mma` | x |\n"
)
TABLE += "| **indexer, top-k** | picks |\n| **sink** | a logit |"


def write(path: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_markdown_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_each_page_links_what_it_needs_and_the_next_one() -> None:
    for path, after in zip(PAGES, [*PAGES[1:], None], strict=True):
        needed, following = glossary.links(path, "You need"), glossary.links(path, "Next:")
        assert path == PAGES[0] or any(target.endswith(".ipynb") for target in needed), path.name
        assert after is None or after.name in following, path.name


def test_each_reader_has_a_path_and_every_page_of_it_exists() -> None:
    (where,) = (source for source in glossary.prose(PAGES[0]) if "Where to go next" in source)
    rows = [row for row in where.splitlines() if row.startswith("| a")]
    assert [reader in row for reader, row in zip(("CUDA engineer", "student", "engine dev"), rows, strict=True)] == [
        True, True, True,
    ]  # fmt: skip
    names = {path.name for path in PAGES}
    assert all(len([name for name in names if f"({name})" in row]) >= 5 for row in rows)


def compared(path: Path) -> list[bool]:
    """Whether each call of show_method on a page compares with another kernel."""
    code = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return [len(call.args) > 2 for call in calls if ast.unparse(call.func) == "show_method"]


def test_each_page_of_a_kernel_shows_its_methods_and_what_changed(tmp_path: Path) -> None:
    kernels = [path for path in PAGES if "30" <= path.stem[:2] <= "41"]
    assert len(kernels) == 11
    assert compared(kernels[0]) and all(any(compared(path)) for path in kernels[1:])
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("show_method(a)\nshow_method(a, b, c)")])
    nbformat.write(page, tmp_path / "page.ipynb")
    assert compared(tmp_path / "page.ipynb") == [False, True] and not compared(PAGES[0])


def test_each_page_has_something_to_do_and_says_what_was_learned(tmp_path: Path) -> None:
    for path in PAGES:
        assert turns.of_notebook(path), path.name
        assert any("## What you learned" in source for source in glossary.prose(path)), path.name
    assert not turns.of_notebook(write(tmp_path / "page.ipynb", "## 1. See", "Nothing to do."))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](other.ipynb#A-heading), [b](other.ipynb), [c](https://x.y/z), [d](#Here)\n\n## Here", ""),
        ("```text\n[a](nothing.md)\n```", ""),
        ("[a](nothing.ipynb)", "no such file"),
        ("[a](other.ipynb#Nothing)", "no such heading"),
        ("[a](#Nothing)", "no such heading"),
        ("see `10_other`", "without a link"),
        ("see [`10_other`](10_other.ipynb) and `10_no_page`", ""),
    ],
)
def test_links_that_lead_nowhere_are_found(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "other.ipynb", "# A heading")
    write(tmp_path / "10_other.ipynb", "# Other")
    found = list(glossary.problems(write(tmp_path / "page.ipynb", text)))
    assert (not found) if not said else len(found) == 1 and said in found[0]


def test_words_of_the_glossary_are_found_in_prose(tmp_path: Path) -> None:
    page = write(tmp_path / "10_page.ipynb", "Two CTA pairs, `tcgen05.mma` and the Indexer; umma, sinking.")
    assert glossary.meanings(tmp_path) == {} == glossary.used(page)
    write(tmp_path / glossary.PAGE, TABLE)
    assert list(glossary.meanings(tmp_path)) == ["CTA pair", "UMMA", "tcgen05.mma", "indexer", "top-k", "sink"]
    assert glossary.used(page) == {"CTA pair": "two CTAs", "tcgen05.mma": "x", "indexer": "picks"}


def test_the_card_links_the_words_of_its_page(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    shown = []
    monkeypatch.setattr("dsv4lib.lab.notebook.notebook_api._display", lambda page, text: shown.append((page, text)))
    lab.card("fmha_a", backend="emulator")
    page, text = shown[0]
    assert f'<a href="{glossary.LINK}" title="a counter in SMEM with phases' in page and "mbarrier" in text
    assert {stage.notebook_path for stage in discover()} >= set(PAGES)
