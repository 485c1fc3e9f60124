"""Check the table of angles that ops with a rotary embedding take.

``cos_sin`` is fp32 [P, 64]: 32 cosines, then 32 sines, of position x freq_i (fp32 products). With ``positions`` int64
[T] token t has row ``positions[t]``; without, row t: a step gathers its rows once and gives them to every layer, whose
kernels then need not wait for a position before they can ask for its row. A negative position is a padded row's: no row
of the table is read, and nothing is rotated (angle 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError

WIDTH = 64  # of a row: the dims that are rotated


def wanted(tokens: int, positions: Tensor | None, cos_sin: Tensor) -> dict[str, tuple]:
    """Return what `launching.check` is to find of the table, for so many tokens."""
    rows = tokens if positions is None else None
    return {
        "positions": (positions, torch.int64, (tokens,)),
        "cos_sin": (cos_sin, torch.float32, (rows, WIDTH)),
    }


def check_values(positions: Tensor | None, cos_sin: Tensor) -> None:
    """Positions, where looking at them costs no wait.

    Raises:
        ArgumentError: one that the table does not have.
    """
    if positions is not None and bool((positions >= len(cos_sin)).any()):
        wrong = positions[positions >= len(cos_sin)]
        raise ArgumentError("positions", wrong.tolist()[:8], f"0 to {len(cos_sin) - 1}, rows of cos_sin, or negative")


def cosines_sines(positions: Tensor | None, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) [T, 1, 32] of the tokens, for the oracle on heads."""
    rows = cos_sin
    if positions is not None:
        rows = cos_sin.new_zeros(len(positions), WIDTH)
        rows[:, : WIDTH // 2] = 1.0
        rows[positions >= 0] = cos_sin[positions[positions >= 0]]
    return rows[:, None, : WIDTH // 2], rows[:, None, WIDTH // 2 :]
