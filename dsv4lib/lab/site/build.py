"""Build the static site: one page a notebook or document, a tour, one style sheet, one script, one search index.

It shares the report's renderer, so every text is escaped and scrubbed, formulas are pictures in the page and HTML of
cells passes the allow-list. Raster pictures are files of their own. A content security policy lets a page load only
what lies beside it.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import nbformat
from markupsafe import Markup, escape

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.report import cells
from dsv4lib.lab.report.build import ORDER, TEMPLATES, Shown, environment
from dsv4lib.lab.report.links import Heading, Links, connect, take_title
from dsv4lib.lab.report.scrub import scrub
from dsv4lib.lab.report.tables import plain
from dsv4lib.lab.run.files import read_own
from dsv4lib.lab.site import search
from dsv4lib.lab.site.sources import TOUR, Executed, Source, executed, sources, stages_by_notebook
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import LOOKS

OWN = Path(__file__).parent / "templates"
MARK = ".dsv4-site"  # in a folder that this command made and may replace
DOCUMENT_BYTES = 4 << 20
PAGE_BYTES = 2_000_000
FIGURE = re.compile(r"^<!-- figure: (\w+) -->$", re.M)  # a line of a document
DRAWN = "drawn:"  # begins the address of such a figure
TOUR_FILE = "tour.html"


class Made(NamedTuple):
    """What was built: its first page, how many pages and notebooks, and (source, link) of links that lead nowhere."""

    index: Path
    pages: int
    notebooks: int
    executed: int
    broken: list[tuple[str, str]]


@dataclass
class Page:
    """A page of the site.

    ``status`` says in words whether a notebook was executed; ``shown`` is its record, if it was.
    """

    source: Source
    title: Markup
    blocks: list[cells.Block]
    headings: list[Heading] = field(default_factory=list)
    thumbnail: Markup | None = None
    stage: Stage | None = None
    shown: Shown | None = None
    status: str = ""

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.source.file

    @property
    def plain_title(self) -> str:
        """Title without markup."""
        return plain(self.title)


class Files:
    """Pictures of one page as files in ``pictures/``. Those that a text names are copied from the workspace."""

    limit = 8_000_000

    def __init__(self, out: Path, source: Source, root: Path):
        self.folder, self.source, self.root, self.number = out / "pictures", source, root.resolve(), 0
        self.drawn: set[str] = set()

    def keep(self, data: bytes, mime: str) -> str:
        """Write a picture and return its address."""
        self.number += 1
        name = f"{Path(self.source.file).stem}-{self.number:02d}.{'jpg' if mime == 'image/jpeg' else 'png'}"
        (self.folder / name).write_bytes(data)
        return f"pictures/{name}"

    def draw(self, name: str) -> str:
        """Draw a figure of the workspace's tables as Markdown, or say that it cannot be drawn."""
        from dsv4lib.pages.common import drawn  # matplotlib: where a figure is wanted only

        try:
            data, alt = drawn.draw(name)
        except Exception as error:  # an unknown name, a table that is missing: one figure must not cost the page
            return f"*The figure {name} cannot be drawn ({type(error).__name__}).*"
        address = self.keep(data, "image/png")
        self.drawn.add(address)
        return f"![{re.sub(r'[][]', ' ', alt)}]({DRAWN}{address})"

    def find(self, address: str) -> str | None:
        """Copy a PNG or JPEG of the workspace; None for anything else or elsewhere."""
        if address.startswith(DRAWN) and address.removeprefix(DRAWN) in self.drawn:
            return address.removeprefix(DRAWN)
        try:
            path = (self.root / self.source.path).parent.joinpath(address).resolve()
        except (OSError, ValueError):  # no name of a file
            return None
        kinds = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
        if path.suffix.lower() not in kinds or not path.is_relative_to(self.root):
            return None
        try:
            return self.keep(read_own(path, DOCUMENT_BYTES, anybody=True), kinds[path.suffix.lower()])
        except (OSError, ValueError):
            return None


def write_site(out: Path, root: Path, run: str | None = None) -> Made:
    """Write the site of the workspace ``root`` to the folder ``out``.

    Args:
        out: a new or empty folder, or one that this function has made, which is replaced.
        root: the workspace.
        run: see `sources.executed`.

    Raises:
        ArgumentError: ``out`` holds something else, or there is no such run.
        DSV4Error: the workspace has nothing to show.
    """
    out = out.absolute()
    _check_free(out)
    listed, stages, chosen = sources(root), stages_by_notebook(root), executed(root, run)
    links = Links(root, {source.path: source.file for source in listed})
    clean = functools.partial(scrub, root=root)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=out.parent) as temporary:
        folder = Path(temporary) / "site"
        (folder / "pictures").mkdir(parents=True)
        pages = []
        for source in listed:
            pictures = Files(folder, source, root)
            if source.is_notebook:
                page = _notebook(
                    source, root, stages.get(source.path), chosen.notebooks.get(source.path), clean, pictures
                )
            else:
                page = _document(source, root, clean, pictures)
            page.headings = connect(page.blocks, links, source.path, page.file)
            page.title = Markup(links.rewrite(page.title, source.path))
            pages.append(page)
        _write(folder, pages, chosen.name)
        _replace(folder, out)
    notebooks = [page for page in pages if page.source.is_notebook]
    ran = sum(page.shown is not None for page in notebooks)
    return Made(out / pages[0].file, len(pages) + bool(notebooks), len(notebooks), ran, links.unresolved())


def _check_free(out: Path) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not (out / MARK).is_file()):
        raise ArgumentError("--out", str(out), "a new or empty folder, or one that this command made")


def _replace(made: Path, out: Path) -> None:
    """Put ``made`` where ``out`` is; a reader meets the old site or the new one."""
    if out.exists():
        os.rename(out, made.parent / "old")
    os.rename(made, out)


def _document(source: Source, root: Path, clean: Callable[[str], str], pictures: Files) -> Page:
    try:
        text = read_own(root / source.path, DOCUMENT_BYTES, anybody=True).decode(errors="replace")
        text = FIGURE.sub(lambda found: pictures.draw(found[1]), clean(text))
        title, rest = take_title(cells.markdown(text, pictures))
    except Exception as error:  # a link, a file too large, Markdown too deep: one page must not cost the site
        return Page(
            source, escape(source.path), [cells.note(f"This document cannot be shown ({type(error).__name__}).")]
        )
    return Page(source, title or escape(source.path), [cells.Block("prose", rest)])


def _notebook(
    source: Source,
    root: Path,
    stage: Stage | None,
    ran: Executed | None,
    clean: Callable[[str], str],
    pictures: Files,
) -> Page:
    """A notebook as a run executed it; if none has, its cells alone: what it holds here may be of any sources."""
    name = stage.title if stage else Path(source.path).stem
    shown, status = None, "Not executed: this page has the notebook's text and code, no output and no number."
    if ran is not None:
        shown = Shown(ran.record, ran.folder, clean, pictures)
        rendered = shown.page
        changed = stage is not None and stage.fingerprint() != ran.record.stage_fingerprint
        status = "The notebook or its contract has changed since this run." if changed else ""
    else:
        try:
            notebook = nbformat.reads(read_own(root / source.path, 64 << 20, anybody=True).decode(), as_version=4)
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    cell.outputs = []
            rendered = cells.render_cells(notebook, name, clean, pictures)
        except Exception as error:  # one page must not cost the site
            rendered = cells.Page([cells.note(f"This notebook cannot be shown ({type(error).__name__}).")])
    blocks, title = list(rendered.blocks), escape(name)
    if blocks and blocks[0].kind == "prose":
        found, rest = take_title(blocks[0].html)
        title, blocks[0] = found or title, cells.Block("prose", rest)
    return Page(source, title, blocks, thumbnail=rendered.thumbnail, stage=stage, shown=shown, status=status)


def _write(folder: Path, pages: list[Page], run: str) -> None:
    templates = environment(OWN)
    groups: dict[str, list[Page]] = {}
    for page in pages:
        groups.setdefault(page.source.group, []).append(page)
    notebooks = [page for page in pages if page.source.is_notebook]
    ran = [page.shown.record for page in notebooks if page.shown]
    counts = Counter(record.verdict for record in ran)
    common = {
        "groups": groups,
        "tour": TOUR_FILE if notebooks else "",
        "tour_group": TOUR,
        "notebooks": notebooks,
        "run": run,
        "first": ran[0] if ran else None,
        "counts": [(LOOKS[verdict], counts[verdict]) for verdict in ORDER if counts[verdict]],
    }
    for page in pages:
        beside = groups[page.source.group]
        at = beside.index(page)
        around = {"before": beside[at - 1] if at else None, "after": beside[at + 1] if at + 1 < len(beside) else None}
        template = templates.get_template("page.html")
        text = template.render(page=page, current=page.file, **around, **common)
        if len(text.encode(errors="replace")) > PAGE_BYTES:
            page.blocks = [cells.note(f"This is too large for one page: {page.source.path} of the repository has it.")]
            text = template.render(page=page, current=page.file, **around, **common)
        _put(folder / page.file, text)
    if notebooks:
        _put(folder / TOUR_FILE, templates.get_template("tour.html").render(page=None, current=TOUR_FILE, **common))
    style = [(TEMPLATES / "style.css").read_text(), (OWN / "site.css").read_text()]
    _put(folder / "style.css", "".join(style))
    _put(folder / "site.js", (OWN / "site.js").read_text())
    index = [(page.file, page.plain_title, search.sections(page.blocks)) for page in pages]
    _put(folder / search.FILE, search.script(index))
    _put(folder / MARK, "")


def _put(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="replace"))
