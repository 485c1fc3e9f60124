"""An element of tcgen05.mma has the same bits whatever M, N, the other rows and columns and the variant are.

Rows and columns are chosen from one large product: slices, other orders, a pair of CTAs, .ws, A in tensor memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tc_formats
from tc_bench import Bench
from test_sparse import random_codes as sparse_codes
from test_sparse import store_metadata
from test_tcgen05_mma import (
    K_OF,
    a_words,
    allocate,
    cells_of_d,
    idesc,
    layout_of,
    store_matrix,
    store_scales,
    write_d,
)

SIZE = 256  # rows and columns of the large product


@dataclass
class Product:
    """Operands of the large product: codes (SIZE, K), accumulator (SIZE, SIZE), scale factors or metadata by row."""

    kind: str
    formats: tuple[str, str, str]
    a: np.ndarray
    b: np.ndarray
    before: np.ndarray
    vector: str = ""
    scale: str = ""
    scales: tuple[np.ndarray, ...] = ()
    metadata: np.ndarray | None = None


def finite(codes: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(tc_formats.values(codes, name)), codes, 0).astype(codes.dtype)


def codes_of(rng, values: str, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Codes of a hard distribution: "normal", "any" (all finite codes), "cancelling" (pairs x, -x), "tiny"."""
    word = {"f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32}.get(name, np.uint8)
    bits = tc_formats.BITS[name]
    codes = rng.integers(0, (1 << bits) - 1, shape, word, endpoint=True)
    if bits >= 16 and values in ("normal", "tiny"):
        codes = tc_formats.random_codes(rng, name, shape, exact=False)
        if values == "tiny":  # subnormal, and zeros of both signs
            codes &= word({"f16": 0x83FF, "bf16": 0x807F, "tf32": 0x807FE000}[name] & rng.choice([0x8000, -1]))
    codes = finite(codes, name)
    if values == "cancelling":
        half = codes.shape[1] // 2
        flip = np.where(rng.random(codes[:, half:].shape) < 0.9, 1 << bits - 1, 1).astype(word)
        codes[:, half:] = codes[:, :half] ^ flip
        codes = finite(codes, name)
    return codes


def made(rng, values, kind, a, b, d, *, vector="", count=0, scale="", sparse=False) -> Product:
    k = K_OF[kind] * (2 if sparse else 1)
    before = (rng.standard_normal((SIZE, SIZE)) * np.exp2(rng.integers(-30, 8, (SIZE, SIZE)))).astype(np.float32)
    found = Product(
        kind,
        (a, b, d),
        codes_of(rng, values, a, (SIZE, K_OF[kind])),
        codes_of(rng, values, b, (SIZE, k)),
        np.round(before * 100) if d == "s32" else before,
        vector,
        scale,
    )
    if values == "cancelling" and not sparse:
        found.b[:, k // 2 :] = found.b[:, : k // 2]
    if scale:
        low, high = {"ue8m0": (60, 190) if values == "any" else (120, 130), "ue4m3": (0, 127)}[scale]
        found.scales = tuple(rng.integers(low, high, (SIZE, count)).astype(np.uint8) for _ in range(2))
    if sparse:
        found.metadata = sparse_codes(rng, a, (SIZE, k // (2 if kind == "tf32" else 4)))
    return found


def run(whole: Product, rows, columns, group=1, ws=False, tmem=False) -> np.ndarray:
    """Cells uint32 (M, N) of D for rows of A and columns of B."""
    (fa, fb, d), kind, m, n = whole.formats, whole.kind, len(rows), len(columns)
    a, b, sparse, scaled = whole.a[rows], whole.b[columns], whole.metadata is not None, bool(whole.scale)
    text = f"tcgen05.mma{'.ws' if ws else ''}{'.sp' if sparse else ''}.cta_group::{group}.kind::{kind}"
    text += f"{'.block_scale' + whole.vector if scaled else ''} [%r1], {'[%r7]' if tmem else '%rd1'}, %rd2, "
    text += f"{'[%r3], ' if sparse else ''}%r2, {'[%r8], [%r9], ' if scaled else ''}%p1;"
    bench, layout = Bench(text, ctas=group), layout_of(m, group, ws)
    allocate(bench)
    registers: dict[str, Any] = {"r1": 0, "r3": 300, "r7": 310, "r8": 320, "r9": 340, "p1": True}
    write_d(bench, whole.before[np.ix_(rows, columns)], layout, 0, d)
    for cta in range(group):
        mine, its = (slice(cta * x // group, (cta + 1) * x // group) for x in (m, n))
        tensor = bench.ctas[cta].tmem
        if tmem:
            copies = 1 if layout in "ADF" else 128 // (m // group)
            lanes = [32 * (i // 16) + i % 16 for i in range(64)] if layout == "F" else slice(None)
            tensor.data[lanes, 310:318] = np.tile(a_words(a[mine], fa, kind), (copies, 1))
            tensor.init[lanes, 310:318] = True
        registers["rd1"] = store_matrix(bench, cta, 2048, a[mine], fa, kind, "K", "128B")
        registers["rd2"] = store_matrix(bench, cta, 40960, b[its], fb, kind, "K", "128B")
        if scaled:
            store_scales(bench, cta, 320, whole.scales[0][rows][mine], 0)
            store_scales(bench, cta, 340, whole.scales[1][columns], 0, 2 if layout == "B" else 1)
        if sparse:
            store_metadata(bench, cta, whole.metadata[rows][mine], kind, m, 0, 300, 0)
    registers["r2"] = idesc(kind, fa, fb, d, m, n, scale=whole.scale or None) | 4 * sparse
    bench.set(**{name: value for name, value in registers.items() if f"%{name}" in text})
    bench.mask(1)
    bench.run()
    assert bench.hazards == []
    cta, lane, column = cells_of_d(m, n, layout, 0, 0)
    return np.stack([x.tmem.data for x in bench.ctas])[cta, lane, column]


KINDS = {
    "f16": ("f16", "f16", "f16", "f32"),
    "f16 to f16": ("f16", "f16", "f16", "f16"),
    "bf16": ("f16", "bf16", "bf16", "f32"),
    "tf32": ("tf32", "tf32", "tf32", "f32"),
    "e4m3": ("f8f6f4", "e4m3", "e4m3", "f32"),
    "e5m2": ("f8f6f4", "e5m2", "e5m2", "f32"),
    "e2m1 e3m2": ("f8f6f4", "e2m1", "e3m2", "f32"),
    "i8": ("i8", "s8", "u8", "s32"),
    "mxf8": ("mxf8f6f4", "e4m3", "e5m2", "f32"),
    "mxf8 mxf4": ("mxf8f6f4", "e5m2", "e2m1", "f32"),
    "mxf4": ("mxf4", "e2m1", "e2m1", "f32"),
    "nvf4": ("mxf4nvf4", "e2m1", "e2m1", "f32"),
    "nvf4 ue8m0": ("mxf4nvf4", "e2m1", "e2m1", "f32"),
}
SCALES = {
    "mxf8": {"count": 1, "scale": "ue8m0"},
    "mxf8 mxf4": {"count": 1, "scale": "ue8m0"},
    "mxf4": {"count": 2, "scale": "ue8m0"},
    "nvf4": {"vector": ".block16", "count": 4, "scale": "ue4m3"},
    "nvf4 ue8m0": {"vector": ".block16", "count": 4, "scale": "ue8m0"},
}


def variants(name: str, sparse: bool) -> list[tuple[int, int, int, bool, bool]]:
    """(M, N, CTAs, .ws, A in tensor memory) of what the kind has."""
    kind, found = KINDS[name][0], [(128, n, 1, False, n == 32) for n in (8, 16, 32, 128, 256)]
    found += [(256, 32, 2, False, False), (256, 256, 2, False, True)]
    if not sparse:
        found += [(128, 64, 2, False, False), (128, 96, 2, False, True)]
    if name not in SCALES:
        found += [(64, n, 1, False, n == 24) for n in (8, 24, 128)]
        if not sparse:
            found += [(m, n, 1, True, n == 128) for m, n in ((32, 64), (32, 128), (64, 64), (128, 128))]
    return [x for x in found if kind != "i8" or x[1] % 32 == 0 or x[2] == 1]


def cases() -> list[tuple[str, str, bool]]:
    """(kind, values, sparse A): no sparse A with block scaling, subnormals alone where they are not among few codes."""
    return [
        (name, values, sparse)
        for name in KINDS
        for sparse in (False, True)
        for values in ("normal", "any", "cancelling", "tiny")
        if not (sparse and name in SCALES) and (values != "tiny" or tc_formats.BITS[KINDS[name][1]] >= 16)
    ]


@pytest.mark.parametrize(("name", "values", "sparse"), cases())
def test_an_element_depends_on_its_row_column_and_accumulator(name, values, sparse):
    rng = np.random.default_rng(7)
    whole = made(rng, values, *KINDS[name], sparse=sparse, **SCALES.get(name, {}))
    want = run(whole, np.arange(SIZE), np.arange(SIZE), group=2)
    for m, n, group, ws, tmem in variants(name, sparse):
        rows, columns = rng.permutation(SIZE)[:m], rng.permutation(SIZE)[:n]
        got = run(whole, rows, columns, group, ws, tmem)
        np.testing.assert_array_equal(got, want[np.ix_(rows, columns)], f"{m}x{n} group {group} ws {ws} tmem {tmem}")
