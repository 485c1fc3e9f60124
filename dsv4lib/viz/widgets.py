"""Show one function twice: controls in a live notebook, fixed figures in a report.

`explore` calls a function of the reader's choices. With a person in front of the notebook it builds ipywidgets controls
and calls the function in the kernel on every change. Headless (the runner sets DSV4_HEADLESS=1) nothing interactive is
emitted: the default state is shown in full and the states that matter follow as small multiples, so a report needs no
JavaScript and loses nothing. `framed` does the same for a page with scripts of its own.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.viz.panels import styled
from dsv4lib.viz.style import DPI, GRID, INK, WIDTH, alt_text, drawn, headless, new_figure, set_alt, show, to_png

Draw = Callable[..., tuple[Figure, str]]


def explore(
    draw: Draw, controls: dict[str, Sequence[Any]], states: Sequence[dict[str, Any]] = (), **defaults: Any
) -> None:
    """Let the reader choose the arguments of ``draw``. Where no kernel runs, show its states.

    Args:
        draw: called with one keyword per control; returns (figure with alt text, one line that states the result). A
            `DSV4Error` is shown in place of the result: not every combination is allowed, and the reason is a lesson.
        controls: argument -> its possible values, in the order of the slider.
        states: combinations shown as small multiples when headless; missing arguments take their default.
        defaults: starting value per argument; the first possible value where none is given.
    """
    start = _start(controls, defaults)
    for state in states:
        _start(controls, state)
    if headless():
        _twin(draw, start, [{**start, **state} for state in states])
    else:
        _live(draw, controls, start)


def framed(document: str, title: str, twin: Callable[[], Sequence[Figure]], height: int = 900) -> None:
    """Show a page that draws itself in a frame. Where no reader is, show fixed figures in its place.

    The frame holds the page itself, not its address, and a sandbox keeps it from this page and from the network.

    Args:
        document: HTML of a page that needs nothing else.
        title: of the frame, for who hears it.
        twin: makes the figures that say the same; called where no reader is.
        height: of the frame, in pixels.
    """
    if headless():
        for figure in twin():
            show(figure)
        return
    from IPython.display import display

    display({"text/html": frame_html(document, title, height), "text/plain": title}, raw=True)


def frame_html(document: str, title: str, height: int) -> str:
    """Return a sandboxed frame that holds ``document``."""
    held, name = (html.escape(text, quote=True) for text in (document, title))
    style = f"width:100%;height:{height}px;border:1px solid {GRID};border-radius:6px"
    return f'<iframe title="{name}" sandbox="allow-scripts" style="{style}" srcdoc="{held}"></iframe>'


def _start(controls: dict[str, Sequence[Any]], chosen: dict[str, Any]) -> dict[str, Any]:
    """Every control's value: the chosen one, else the first."""
    for name, value in chosen.items():
        if name not in controls:
            raise ArgumentError(name, value, "one of the controls " + ", ".join(controls))
        if value not in controls[name]:
            raise ArgumentError(name, value, "one of " + ", ".join(map(repr, controls[name])))
    return {name: chosen.get(name, values[0]) for name, values in controls.items()}


def _call(draw: Draw, state: dict[str, Any]) -> tuple[Figure | None, str]:
    try:
        return draw(**state)
    except DSV4Error as error:
        return None, str(error)


def _describe(state: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in state.items())


# ---- in a report -----------------------------------------------------------------------------------------------------


def _twin(draw: Draw, start: dict[str, Any], states: list[dict[str, Any]]) -> None:
    figure, line = _call(draw, start)
    print(f"{_describe(start)}: {line}")
    if figure is not None:
        show(figure)
    if states and drawn():
        show(small_multiples([(_describe(s), *_call(draw, s)) for s in states]))


@styled
def small_multiples(panels: Sequence[tuple[str, Figure | None, str]], columns: int = 1) -> Figure:
    """Draw several figures on one page, each under its state and its result. A state without a figure shows its reason.

    Args:
        panels: (state, figure or None, result).
        columns: panels side by side. Letters of more than one are too small to read on a phone.
    """
    import matplotlib.image

    sharp = DPI if columns == 1 else 72

    pictures = [None if f is None else matplotlib.image.imread(io.BytesIO(to_png(f, dpi=sharp))) for _, f, _ in panels]
    rows = -(-len(panels) // columns)
    ratios = [0.08 if p is None else p.shape[0] / p.shape[1] for p in pictures]  # a reason is a line or two
    heights = [WIDTH / columns * max(ratios[i * columns : (i + 1) * columns]) + 0.5 for i in range(rows)]
    page = new_figure(height=sum(heights))
    axes = page.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    for ax in axes:
        ax.axis("off")
    for ax, picture, (state, _, line) in zip(axes, pictures, panels, strict=False):
        ax.set_title(f"{state}\n{line}" if picture is not None else state, fontsize=9 if columns == 1 else 7.5)
        if picture is not None:
            ax.imshow(picture, interpolation="antialiased")
        else:
            ax.text(0.02, 0.9, line, wrap=True, va="top", fontsize=8, color=INK, transform=ax.transAxes)
    return set_alt(
        page, "The same figure in other states. " + " ".join(f"{state}: {line}." for state, _, line in panels)
    )


# ---- in a live notebook ----------------------------------------------------------------------------------------------


def picture_html(figure: Figure) -> str:
    """Return ``figure`` as an HTML image with its alt text, both escaped."""
    data = base64.b64encode(to_png(figure)).decode("ascii")
    alt = html.escape(alt_text(figure), quote=True)
    return f'<img style="max-width:100%" alt="{alt}" src="data:image/png;base64,{data}">'


def _live(draw: Draw, controls: dict[str, Sequence[Any]], start: dict[str, Any]) -> None:
    """Sliders (keyboard and mouse), a one-line readout computed by this kernel, and the figure."""
    import ipywidgets
    from IPython.display import display

    sliders = {
        name: ipywidgets.SelectionSlider(options=list(values), value=start[name], description=name)
        for name, values in controls.items()
    }
    for name, slider in sliders.items():
        slider.add_class(f"dsv4-control-{name}")
    readout, picture = ipywidgets.Label(), ipywidgets.HTML()
    readout.add_class("dsv4-readout")
    picture.add_class("dsv4-figure")

    def update(_change: Any = None) -> None:
        state = {name: slider.value for name, slider in sliders.items()}
        figure, line = _call(draw, state)
        picture.value = "" if figure is None else picture_html(figure)
        readout.value = f"{_describe(state)}: {line}"

    for slider in sliders.values():
        slider.observe(update, names="value")
    update()
    display(ipywidgets.VBox([*sliders.values(), readout, picture]))
