"""Figures and tables of the page on the 4-bit KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.formats import turbo4
from dsv4lib.formats.kv_dtype import KVDtype, latent_bytes, token_bytes
from dsv4lib.ops.turbo4_decode import dequant
from dsv4lib.pages.turbo4 import run_case
from dsv4lib.pages.turbo4.run_case import Found
from dsv4lib.reference.turbo4_encode import variant
from dsv4lib.viz.bars import Panel, side_by_side
from dsv4lib.viz.table import show_table

KINDS = ("codes of even entries", "codes of odd entries", "norms", "padding")
CODES_EVEN, CODES_ODD, NORMS, PADDING = range(4)
SHOWN = 6  # entries of the two maps of bytes

CLAIMS = (  # what the text says, what is right, where this page shows it
    ("keys and queries are used as they come", "both must be rotated, and O rotated back", "section 2"),
    ("records of 66 bytes, loaded 8 bytes at a time", "66 t is even and no more: such loads fault", "section 3"),
    ("16 halves go through one 16-byte store", "32 bytes: half of the dims would be lost", "section 4"),
    ("about 128 more operations a token", "19 for 8 codes: 608 for the 256 of K and V", "section 4"),
    ("a table in constant memory is fastest", "lanes look different codes up: one after the other", "section 4"),
    ("fp16 products are as fast as FP8", "half as fast on Hopper and Blackwell", "section 5"),
    ("the name PolarQuant", "norm, rotation, Lloyd-Max: TurboQuant without QJL", "section 1"),
    ("48 % fewer bytes than FP8", "right: 132 instead of 256 for K and V", "section 6"),
    ("70 to 100 us where FP8 takes 48", "that is slower than FP8, by its own estimate", "section 6"),
)


def bytes_of(dim: int, page: bool) -> Figure:
    """Draw the bytes of a few entries: as records one after the other, or as a page."""
    half, size = dim // 2, turbo4.record_bytes(dim)
    own = [torch.full((half,), CODES_ODD if i % 2 else CODES_EVEN) for i in range(SHOWN)]
    norm = torch.full((turbo4.NORM_BYTES,), NORMS)
    if page:
        rest = turbo4.layout(dim).page_bytes(SHOWN) - SHOWN * size
        parts = [*own, *[norm] * SHOWN, torch.full((rest,), PADDING)]
        title = f"a page of {SHOWN} entries of {dim} dims: every row of codes starts on 16 bytes"
    else:
        parts = [x for one in own for x in (one, norm)]
        title = f"{SHOWN} records of {dim} dims, {size} bytes each"
    return viz.grids.byte_map(torch.cat(parts).numpy(), KINDS, title)


def coordinates(dim: int, seed: int) -> Figure:
    """Draw the coordinates of vectors with two large channels before and after the rotation, over the centroids."""
    x = run_case.distributions(dim, seed)["two channels x 20"]
    panels = {}
    for name, y in (("as they come", x), ("rotated", turbo4.rotate(x, seed))):
        panels[name] = {"coordinates": (y / y.norm(dim=1, keepdim=True) * dim**0.5).clamp(-4, 4).numpy()}
    largest = turbo4.levels()[-1]
    title = "coordinates in units of norm / sqrt(d), cut at 4"
    return viz.grids.histograms(panels, "coordinate", title, 64, (largest, "largest centroid"))


def rotation_errors(dim: int, seed: int, fault: str = "none") -> tuple[Figure, dict[str, tuple[float, float]]]:
    """Draw signal over error with and without the rotation; returns both in dB by distribution.

    ``fault``: "NeverRotated" or "AlwaysRotated", both codes.
    """
    found, applied = {}, {"NeverRotated": (False, False), "AlwaysRotated": (True, True)}.get(fault, (True, False))
    for name, x in run_case.distributions(dim, seed).items():
        backs = (turbo4.fake_quantize(x, seed, rotated) for rotated in applied)
        found[name] = tuple(run_case.decibels(x, back) for back in backs)
    titles = "rotated, dB", "not rotated, dB"
    panels = [Panel(title, [pair[i] for pair in found.values()], "{:.1f}") for i, title in enumerate(titles)]
    marked = [name != "normals" for name in found]
    return side_by_side(list(found), panels, marked, "what the rotation saves"), found


def variants(dim: int, seed: int, fault: str = "none") -> dict[str, float]:
    """Show what other codes would lose; returns relative squared errors by name.

    ``fault``: "ThreeBits" has half of the levels where 4 bits are said.
    """
    x = run_case.distributions(dim, seed)["normals"]
    names = {
        "4 bits (turbo4)": ({"bits": 3} if fault == "ThreeBits" else {}, 4, 2),
        "4 bits, norm corrected": ({"corrected": True}, 4, 2),
        "3 bits": ({"bits": 3}, 3, 2),
        "3 bits and QJL (legacy)": ({"legacy_qjl": True}, 4, 4),
    }
    rows, errors = [], {}
    for name, (options, bits, extra) in names.items():
        back = variant(x, seed, **options)
        errors[name] = float((back - x).square().sum() / x.square().sum())
        size = dim * bits // 8 + extra
        rows.append((name, size, f"{errors[name]:.4f}", f"{run_case.decibels(x, back):.1f}"))
    show_table(("code", "bytes a vector", "relative squared error", "dB"), rows)
    return errors


def lookups() -> None:
    """Show how eight codes of a word become fp16: the selector's nibbles, two bytes and a sign."""
    gain, bits = dequant.levels()
    exact = turbo4.centroids(1)
    rows = []
    for code in (0, 3, 7, 8, 12, 15):
        index, negative = (7 - code, True) if code < turbo4.HALF else (code - turbo4.HALF, False)
        low, high = bits[index] & 0xFF, bits[index] >> 8 | (0x80 if negative else 0)
        value = torch.tensor([high << 8 | low], dtype=torch.int32).to(torch.int16).view(torch.float16)
        found = float(value) / gain
        cells = (code, index, "-" if negative else "+", f"{low:02x}", f"{high:02x}", f"{found:.6f}")
        rows.append((*cells, f"{float(exact[code]):.6f}"))
    show_table(("code", "magnitude", "sign", "low byte", "high byte", "value", "centroid"), rows)


def sizes(fault: str = "none") -> tuple[Figure, float]:
    """Draw bytes by format, of a token of one layer and of an entry of DSV4; returns turbo4 over FP8 of the former.

    ``fault``: "WideNorms" stores norms in fp32.
    """
    names = ("auto", "fp8_e4m3", "nvfp4", "turbo4")
    tokens = {name: token_bytes(KVDtype.of(name), 128, 8) for name in names}
    if fault == "WideNorms":
        tokens["turbo4"] += 2 * 2 * 8  # bytes of a norm, keys and values of 8 heads
    entries = latent_bytes()
    rows = [f"8 heads of 128: {name}" for name in names] + [f"entry of DSV4: {name}" for name in entries]
    values = [float(x) for x in (*tokens.values(), *entries.values())]
    marked = ["turbo4" in name for name in rows]
    figure = side_by_side(rows, [Panel("bytes", values, "{:.0f}")], marked, "bytes of a token of a layer", 1)
    return figure, tokens["turbo4"] / tokens["fp8_e4m3"]


def faults_table(found: Sequence[Found]) -> int:
    """Show the injected faults and what shows each; returns how many nothing shows."""
    show_table(("op", "fault", "what shows it", "found"), [(*one[:3], "yes" if one.seen else "NO") for one in found])
    return sum(not one.seen for one in found)


def claims() -> None:
    """Show what the text on AITER's turbo4 says beside what is right."""
    show_table(("the text", "what is right", "here"), CLAIMS)
