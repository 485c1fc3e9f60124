"""Draw the figures of documents from the committed tables. They are built for the site, not committed.

A document has ``<!-- figure: NAME -->`` where figure NAME belongs; `dsv4 site` draws it there. `python -m
dsv4lib.pages.common.drawn FOLDER` draws all of them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import style

COLOURS = 48  # of a saved figure: flat colours and the edges of letters need no more


def _fmha_peers() -> Figure:
    from dsv4lib.pages.fmha import peers

    return peers.figure()


def _moe_peers() -> Figure:
    from dsv4lib.pages.moe_gemm import peers

    return peers.figure()


def _fmha_roofline() -> Figure:
    from dsv4lib.predict import fmha
    from dsv4lib.viz.roofline import roofline

    return roofline(fmha.points(fmha.recorded()), fmha.PEAK / 1e12, {"HBM 8 TB/s": 8.0})


def _ops() -> Figure:
    from dsv4lib.pages.hopper import ops_table

    return ops_table.figure()


DRAWN: dict[str, Callable[[], Figure]] = {
    "fmha_peers": _fmha_peers,
    "fmha_roofline": _fmha_roofline,
    "moe_peers": _moe_peers,
    "ops": _ops,
}


def draw(name: str) -> tuple[bytes, str]:
    """Draw a figure of `DRAWN`: its PNG file and its alt text.

    Raises:
        ArgumentError: there is no such figure.
    """
    if name not in DRAWN:
        raise ArgumentError("figure", name, "one of " + ", ".join(DRAWN))
    figure = DRAWN[name]()
    return small(style.to_png(figure)), style.alt_text(figure)


def small(png: bytes) -> bytes:
    """Return a PNG file with `COLOURS` colours: a fraction of the bytes, and equal pictures give equal ones."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as opened:
        image = opened.convert("RGB").quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def main(words: list[str]) -> None:
    """Write all figures into the folder that the command line names."""
    if len(words) != 1:
        raise ArgumentError("FOLDER", words, "one folder")
    folder = Path(words[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name in DRAWN:
        (folder / f"{name}.png").write_bytes(draw(name)[0])
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
