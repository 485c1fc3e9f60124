"""Render cells and outputs of a notebook as safe HTML blocks, self-contained unless told otherwise.

nbconvert's own pages fetch scripts from the network and stay blank without it; here formulas become vector images,
code is coloured by style sheet, pictures are inline, and HTML that a cell wrote passes an allow-list. Nothing in the
result can run or load anything.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import io
import math
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree

from dsv4lib.lab.run.quick_nbformat import nbformat  # before nbconvert, which imports it as well

# isort: split
from markupsafe import Markup, escape
from mistune.plugins.table import render_table_cell, table_in_list
from nbconvert.filters import ansi2html
from nbconvert.filters.highlight import Highlight2HTML
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbconvert.preprocessors.sanitize import SanitizeHTML
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from dsv4lib.lab.report.stamp import BANNER
from dsv4lib.lab.report.tables import with_scrolling_tables, with_wide_cells

PICTURE_BYTES = 1_300_000  # all pictures of one page, before base64; the page then stays under 2 MB
TEXT_CHARACTERS = 12_000  # of one text output
HTML_CHARACTERS = 100_000  # of one HTML or Markdown output
PAGE_CHARACTERS = 600_000  # of all outputs of a page
CARD_SHAPE = 1.6  # width to height of a picture on the index
THUMBNAIL = "thumbnail"  # tag of a cell whose figure stands for its notebook
WIDGET = "application/vnd.jupyter.widget-view+json"

TAGS = (
    "a b blockquote br caption code col colgroup dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i kbd li mark ol p "
    "pre q s small span strong sub summary sup table tbody td tfoot th thead tr u ul var"
).split()
STYLES = (
    "background background-color border border-bottom border-collapse border-left border-radius border-right "
    "border-top color display float font-family font-size font-style font-weight height line-height list-style margin "
    "margin-bottom margin-left margin-right margin-top max-width min-width padding padding-bottom padding-left "
    "padding-right padding-top text-align text-decoration vertical-align white-space width"
).split()
# A declaration with a backslash or with any function but these: url(), image-set(), ... could name another file.
DANGEROUS_STYLE = re.compile(
    r"[\w-]+\s*:(?=[^;\"]*(?:\\|(?<!\brgb)(?<!\brgba)(?<!\bhsl)(?<!\bhsla)(?<!\bcalc)\())[^;\"]*;?"
)
ATTRIBUTES = {
    "*": ["style", "title", "class"],
    "a": ["href"],
    "ol": ["start"],
    "td": ["colspan", "rowspan"],
    "th": ["colspan", "rowspan", "scope"],
}


@dataclass
class Block:
    """One piece of a page. ``kind`` is prose, code, pending, text, error, table, picture or note."""

    kind: str
    html: Markup
    alt: str = ""


@dataclass
class Page:
    """A rendered notebook: its blocks, and one picture, small. Also how many pictures came without a description.

    ``small`` is the picture whose shape suits a card best so far (PNG and description), ``thumbnail`` its HTML. One of
    a cell with the tag `thumbnail` is taken before all others; ``chosen`` says that this is the cell at hand.
    """

    blocks: list[Block] = field(default_factory=list)
    undescribed: int = 0
    thumbnail: Markup | None = None
    small: tuple[bytes, str] | None = None
    thumbnail_fit: float = math.inf
    chosen: bool = False


class Pictures(Protocol):
    """Where the pictures of a page go. ``limit`` is the bytes that all of them may have."""

    limit: int

    def keep(self, data: bytes, mime: str) -> str:
        """Return the address of a raster picture for its page."""
        ...

    def find(self, address: str) -> str | None:
        """Return the address of a picture that a text names, or None if it may not be shown."""
        ...


class Inline:
    """Pictures stand in the page itself."""

    limit = PICTURE_BYTES

    def keep(self, data: bytes, mime: str) -> str:
        """Return the picture as a data URI."""
        return _uri(data, mime)

    def find(self, address: str) -> str | None:
        """Show no picture of another file."""
        return None


def render(path: Path, title: str, clean: Callable[[str], str], pictures: Pictures | None = None) -> Page:
    """Render the executed notebook at ``path``.

    Args:
        path: an .ipynb file.
        title: of the stage, used for pictures that carry no description.
        clean: takes private detail out of a text; applied to every text before it is rendered.
        pictures: where pictures go; default into the page.
    """
    return render_cells(nbformat.read(path, as_version=4), title, clean, pictures or Inline())


def render_cells(notebook: nbformat.NotebookNode, title: str, clean: Callable[[str], str], pictures: Pictures) -> Page:
    """Render a notebook that is read already. Arguments as of `render`."""
    page, budget = Page(), _Budget(notebook, pictures)
    for cell in notebook.cells:
        if BANNER in cell.metadata.get("tags", []):
            continue
        source = clean(cell.source)
        if cell.cell_type == "markdown":
            with _contained(page, "A text"):
                page.blocks.append(Block("prose", markdown(source, pictures)))
        elif cell.cell_type == "code" and source.strip():
            with _contained(page, "The source of a cell"):
                pending = cell.metadata.get("papermill", {}).get("status") == "pending"
                page.blocks.append(Block("pending" if pending else "code", _code(source)))
            left_out, page.chosen = 0, THUMBNAIL in cell.metadata.get("tags", [])
            for output in cell.get("outputs", []):
                with _contained(page, "An output"):
                    left_out += not _output(page, output, title, clean, budget)
            if left_out:
                outputs = "An output" if left_out == 1 else f"{left_out} outputs"
                page.blocks.append(note(f"{outputs} of this cell stand in the notebook only: the page is full."))
    if page.small is not None:
        data, alt = page.small
        page.thumbnail = Markup(f'<img src="{pictures.keep(data, "image/png")}" alt="') + alt + Markup('">')
    return page


@contextlib.contextmanager
def _contained(page: Page, what: str) -> Iterator[None]:
    """Whatever goes wrong inside costs one line of the page: outputs come from arbitrary cells."""
    try:
        yield
    except Exception as error:
        page.blocks.append(note(f"{what} cannot be shown ({type(error).__name__}); it is in the notebook."))


def note(text: str) -> Block:
    """Return a line of the lab's own, escaped."""
    return Block("note", escape(text))


def markdown(source: str, pictures: Pictures | None = None) -> Markup:
    """Render Markdown with formulas as safe HTML; its headings start at level 2."""
    renderer = _Renderer(pictures or Inline(), escape=False, exclude_anchor_links=True)
    parser = MarkdownWithMath(renderer=renderer)
    table_in_list(parser)
    safe = sanitize(parser.render(source))
    return with_scrolling_tables(re.sub(rf"{renderer.mark}(\d+)x", lambda m: renderer.held[int(m[1])], safe))


def sanitize(text: str) -> Markup:
    """Reduce ``text`` to HTML with allowed tags, attributes and styles only. No scripts, images, forms or frames."""
    safe = _sanitizer().sanitize_html_tags(text)
    return Markup(re.sub(r'style="[^"]*"', lambda match: DANGEROUS_STYLE.sub("", match[0]), safe))


@functools.cache
def _sanitizer() -> SanitizeHTML:
    return SanitizeHTML(tags=TAGS, attributes=ATTRIBUTES, styles=STYLES, strip=True)


class _Renderer(IPythonRenderer):  # type: ignore[misc]
    """Keeps formulas and inline pictures aside as marks, so that the allow-list may forbid every other image."""

    def __init__(self, pictures: Pictures, **options: Any):
        super().__init__(**options)
        self.pictures = pictures
        self.held: list[str] = []
        self.mark = f"held{secrets.token_hex(8)}n"  # no text can contain it by chance or will

    def _hold(self, picture: str) -> str:
        self.held.append(picture)
        return f"{self.mark}{len(self.held) - 1}x"

    def heading(self, text: str, level: int, **attributes: Any) -> str:
        return str(super().heading(text, min(level + 1, 6), **attributes))

    def block_code(self, code: str, info: str | None = None) -> str:
        try:
            get_lexer_by_name((info or "").strip().partition(" ")[0])
        except ClassNotFound:
            info = None  # with one that pygments does not know, nbconvert writes its name into the code
        return str(super().block_code(code, info=info))

    def table_cell(self, text: str, align: str | None = None, head: bool = False) -> str:
        return str(render_table_cell(self, text.replace("\\|", "|"), align, head))  # an escaped pipe, also in code

    def inline_math(self, body: str) -> str:
        return self._hold(_formula(body, False))

    def block_math(self, body: str) -> str:
        return self._hold(_formula(body, True))

    def latex_environment(self, name: str, body: str) -> str:
        return self._hold(_formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", True))

    def image(self, text: str, url: str, title: str | None = None) -> str:
        alt = html.escape(text or "picture", quote=True)
        if re.fullmatch(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+", url):
            return self._hold(f'<img src="{url}" alt="{alt}">')
        if found := self.pictures.find(url):
            return self._hold(f'<img src="{html.escape(found, quote=True)}" alt="{alt}">')
        return f"[{alt}]"


@functools.lru_cache(maxsize=512)
def _formula(body: str, block: bool) -> str:
    """TeX as an inline vector image with the TeX as its description; as code where matplotlib cannot set it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser

    tex = " ".join(body.split())
    lines = re.fullmatch(r"\\begin\{(aligned|align|gathered|split|equation)\*?\}(.*)\\end\{\1\*?\}", tex)
    if lines:
        return "".join(_formula(line.replace("&", " "), True) for line in lines[2].split(r"\\") if line.strip())
    shown = re.sub(r"\\(?:tfrac|dfrac)\b", r"\\frac", tex)
    size = 14.0 if block else 12.5
    # The figure's rc applies to setting the text as well as to saving it, so both stay inside the context.
    try:
        with rc_context({"mathtext.fontset": "stix", "svg.fonttype": "path", "svg.hashsalt": "dsv4"}):
            font = FontProperties(size=size)
            width, height, depth, _, _ = MathTextParser("path").parse(f"${shown}$", dpi=72, prop=font)
            figure = Figure(figsize=((width + 2) / 72, (height + 2) / 72))
            figure.text(1 / (width + 2), (depth + 1) / (height + 2), f"${shown}$", fontproperties=font)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    except Exception:  # mathtext's parser raises several kinds for TeX it does not know
        return f'<code class="tex">{html.escape(tex)}</code>'
    data = base64.b64encode(buffer.getvalue()).decode()
    style = "" if block else f' style="vertical-align:{-(depth + 1):.1f}pt"'
    picture = (
        f'<img class="formula" src="data:image/svg+xml;base64,{data}" alt="{html.escape(tex, quote=True)}"'
        f' width="{(width + 2) * 4 / 3:.0f}" height="{(height + 2) * 4 / 3:.0f}"{style}>'
    )
    return f'<span class="display">{picture}</span>' if block else picture


def _code(source: str) -> Markup:
    return Markup(Highlight2HTML(pygments_lexer="python3")(source))


def _output(page: Page, output: Any, title: str, clean: Callable[[str], str], budget: _Budget) -> bool:
    """Show one output; False if the page has no room left for it."""
    if output.output_type == "stream":
        return _add(page, budget, "text", _text(clean(_joined(output.text))))
    if output.output_type == "error":
        return _add(page, budget, "error", _text(clean("\n".join(output.traceback))))
    data = output.get("data", {})
    for mime in ("image/png", "image/jpeg", "image/svg+xml"):
        if mime in data:
            _picture(page, mime, data[mime], output.get("metadata", {}), title, clean, budget)
            return True
    if WIDGET in data:
        page.blocks.append(note("An interactive control stands here when the notebook is open."))
    elif "text/html" in data:
        shown, rest = _head(clean(_joined(data["text/html"])))
        return _add(page, budget, "table", with_wide_cells(sanitize(shown)) + rest)
    elif "text/markdown" in data:
        shown, rest = _head(clean(_joined(data["text/markdown"])))
        return _add(page, budget, "prose", markdown(shown) + rest)
    elif "text/plain" in data:
        return _add(page, budget, "text", _text(clean(_joined(data["text/plain"]))))
    return True


def _add(page: Page, budget: _Budget, kind: str, content: Markup) -> bool:
    if len(content) > budget.characters:
        return False
    budget.characters -= len(content)
    page.blocks.append(Block(kind, content))
    return True


def _head(text: str) -> tuple[str, Markup]:
    """The beginning of a long output, and a line that says how much is left out."""
    left_out = len(text) - HTML_CHARACTERS
    if left_out <= 0:
        return text, Markup("")
    return text[:HTML_CHARACTERS], Markup('<p class="note">... {} characters of this output left out ...</p>').format(
        left_out
    )


def _text(text: str) -> Markup:
    left_out = len(text) - TEXT_CHARACTERS
    if left_out > 0:
        half = TEXT_CHARACTERS // 2
        text = f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"
    return Markup(ansi2html(text))


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def _picture(
    page: Page, mime: str, value: Any, metadata: Any, title: str, clean: Callable[[str], str], budget: _Budget
) -> None:
    said = metadata.get(mime, {})
    alt = clean(str(said.get("alt") or metadata.get("alt") or "")).strip()
    if not alt:
        page.undescribed += 1
        alt = f"A figure of {title} that carries no description"
    if mime == "image/svg+xml":
        raw = clean(_joined(value)).encode()
        if not ElementTree.fromstring(raw).tag.endswith("svg"):  # not a picture: an empty box on the page
            raise ValueError("no SVG")
        fitted: tuple[bytes, str] | None = (raw, mime) if budget.take_vector(len(raw)) else None
    else:
        fitted = budget.fit(base64.b64decode(_joined(value)), mime)
    if fitted is None:
        page.blocks.append(note(f"A figure too large for this page is in the notebook: {alt}"))
        return
    if fitted[1] == "image/svg+xml":  # as a file it could run scripts when it is opened by itself
        uri = _uri(*fitted)
    else:
        _offer_thumbnail(page, fitted[0], alt)
        uri = budget.pictures.keep(*fitted)
    width = said.get("width")
    size = f' width="{int(width)}"' if isinstance(width, int | float) else ""
    picture = Markup(f'<img src="{uri}"{size} alt="') + alt + Markup('">')
    page.blocks.append(Block("picture", picture, alt))


def _uri(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _offer_thumbnail(page: Page, raw: bytes, alt: str) -> None:
    """Make ``raw`` the page's small picture (560 pixels wide, few colours) if its shape suits a card best so far."""
    from PIL import Image

    with Image.open(io.BytesIO(raw)) as opened:
        image = opened.convert("RGB")
    fit = abs(math.log(image.width / image.height / CARD_SHAPE)) - (100 if page.chosen else 0)
    if fit >= page.thumbnail_fit:
        return
    height = max(1, round(image.height * 560 / image.width))
    buffer = io.BytesIO()
    image.resize((560, height), Image.Resampling.LANCZOS).quantize(64, Image.Quantize.FASTOCTREE).save(
        buffer, "PNG", optimize=True
    )
    page.thumbnail_fit = fit
    page.small = (buffer.getvalue(), alt)


class _Budget:
    """Bytes left for pictures. Where a notebook has too many, each is re-encoded with fewer colours, then smaller."""

    def __init__(self, notebook: nbformat.NotebookNode, pictures: Pictures):
        self.pictures, self.left, self.characters = pictures, pictures.limit, PAGE_CHARACTERS
        self.vectors = PICTURE_BYTES // 2  # always in the page
        total = 0
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                for mime, value in output.get("data", {}).items():
                    if mime.startswith("image/") and isinstance(value, str | list):
                        total += sum(map(len, value)) * 3 // 4
        self.share = self.left / total if total > self.left else 1.0

    def take_vector(self, size: int) -> bool:
        if size > self.vectors or not self.take(size):
            return False
        self.vectors -= size
        return True

    def take(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True

    def fit(self, raw: bytes, mime: str) -> tuple[bytes, str] | None:
        """``raw``, or a smaller version of it, with its type; None if nothing fits."""
        allowed = min(self.left, int(len(raw) * self.share)) if self.share < 1 else self.left
        if len(raw) <= allowed and self.take(len(raw)):
            return raw, mime
        from PIL import Image

        with Image.open(io.BytesIO(raw)) as opened:
            image = opened.convert("RGB")
        # Fewer colours make a picture about three times smaller: leave out sizes that are hopeless.
        for scale in (s for s in (1.0, 0.75, 0.5, 0.35, 0.25, 0.15) if s * s / 4 <= allowed / len(raw)):
            size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
            smaller = image.resize(size, Image.Resampling.LANCZOS).quantize(256, Image.Quantize.FASTOCTREE)
            buffer = io.BytesIO()
            smaller.save(buffer, "PNG", optimize=True)
            if buffer.tell() <= allowed and self.take(buffer.tell()):
                return buffer.getvalue(), "image/png"
        return None
