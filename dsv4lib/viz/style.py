"""Style every figure alike. Palette, sizes, alt text, and how a figure reaches a notebook page.

Library functions build `matplotlib.figure.Figure` objects without pyplot (no global state, safe in any process) and
attach alt text; `show` renders one to a reproducible PNG with that text, so reports are readable without seeing them.
"""

from __future__ import annotations

import io
import os

from matplotlib.figure import Figure

# Okabe-Ito: eight colours that stay apart for every common kind of colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INK, MUTED, GRID, PAPER = "#1b1f24", "#5c6670", "#d5dae0", "#ffffff"
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
WIDTH = 9.0  # inches; every figure has this width unless it says otherwise
DPI = 110

RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "image.interpolation": "nearest",
}


def new_figure(height: float = 4.0, width: float = WIDTH, alt: str = "") -> Figure:
    """Make a blank figure in the lab's style.

    Args:
        height: inches.
        width: inches.
        alt: one or two sentences that say what the figure shows; required before `show`.
    """
    import matplotlib

    with matplotlib.rc_context(RC):
        fig = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    return set_alt(fig, alt) if alt else fig


def set_alt(fig: Figure, alt: str) -> Figure:
    """Attach alt text to ``fig`` and return it."""
    fig.dsv4_alt = alt
    return fig


def alt_text(fig: Figure) -> str:
    """Return the alt text of ``fig``; raises ValueError where there is none."""
    text = getattr(fig, "dsv4_alt", "")
    if not text:
        raise ValueError("a figure needs alt text before it is shown: viz.set_alt(fig, '...')")
    return text


def to_png(fig: Figure, dpi: int = DPI) -> bytes:
    """Return ``fig`` as PNG bytes; equal figures give equal bytes (no timestamps)."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        fig.set_dpi(dpi)
        FigureCanvasAgg(fig).print_png(buffer, metadata={"Software": None})  # savefig draws twice, for the same bytes
    return buffer.getvalue()


def show(fig: Figure) -> None:
    """Display ``fig`` in a notebook as a PNG with its alt text. The text alone where `drawn` says so."""
    from IPython.display import Image, display

    text = alt_text(fig)
    if drawn():
        display(Image(data=to_png(fig), format="png", alt=text))
    else:
        print(f"[figure: {text}]")


def drawn() -> bool:
    """Tell whether figures are drawn. They are not where only the verdict of a page counts (DSV4_FIGURES=off)."""
    return os.environ.get("DSV4_FIGURES", "") != "off"


def headless() -> bool:
    """Tell whether no person sits in front of the notebook.

    Then (the runner sets DSV4_HEADLESS=1) widgets become figures.
    """
    return os.environ.get("DSV4_HEADLESS", "") == "1"
