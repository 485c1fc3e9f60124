"""Prepare values from outside to draw. Arrays of any library in, short numbers for cells out."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from dsv4lib.errors import ArgumentError
from dsv4lib.viz.panels import ink_on


def as_array(name: str, value: Any, dtype: Any = np.float64) -> np.ndarray:
    """Convert ``value`` to a numpy array of ``dtype``. It is a torch tensor, numpy array or nested sequence."""
    if hasattr(value, "detach"):  # a torch tensor; bf16 and FP8 have no numpy dtype, so floats go through fp64
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    try:
        return np.asarray(value).astype(dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentError(name, value, "an array of real numbers") from error


def compact(value: float) -> str:
    """Write at most five characters for a cell: 0, .25, -1.6, 3e-4, -2e1, nan, inf."""
    if value == 0:
        return "0"
    if not np.isfinite(value):
        return str(value)
    if 0.995 <= abs(value) < 9.95:
        return f"{value:.1f}"
    if 0.095 <= abs(value) < 0.995:
        return f"{value:.2f}".replace("0.", ".")
    mantissa, exponent = f"{value:.0e}".split("e")
    return mantissa if int(exponent) == 0 else f"{mantissa}e{int(exponent)}"


def cell_texts(ax: Axes, texts: np.ndarray, colours: np.ndarray, size: float) -> None:
    """Write ``texts[i, j]`` into the cells of a raster, in readable ink. Their colours are ``colours[i, j]`` (RGB)."""
    for (row, column), text in np.ndenumerate(texts):
        ink = ink_on(colours[row, column])
        label = ax.text(column, row, str(text), ha="center", va="center", fontsize=size, color=ink)
        label.set_in_layout(False)  # cells never leave the axes, and measuring hundreds of labels takes a second
