"""Bit for bit against silicon: digests of what an H200 computed for 521 instruction variants.

``h200.json`` holds, per variant, the register widths, the set of edge values and the SHA-256 of the results for 1024
pseudo-random inputs, which are generated the same way here. Each variant ran in a kernel of its own, PTX 8.6 for
sm_90a assembled by the driver, one thread per input. Payloads of f64 NaN are left out.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from harness import prepare, unit

RECORDS = json.loads((Path(__file__).parent / "h200.json").read_text())
COUNT = 1024


def inputs(opcode: str, width: int, operand: int, edges: dict[str, list[int]], share: float) -> np.ndarray:
    """Raw source values: edge values with either sign, and (1 - share of them) random bits."""
    rng = np.random.RandomState(zlib.crc32(f"{opcode}{operand}".encode()))
    values = np.array(edges[str(width)], np.uint64)
    chosen = values[rng.randint(0, len(values), COUNT)]
    chosen |= rng.randint(0, 2, COUNT).astype(np.uint64) << np.uint64(width - 1)
    if share < 1:
        high, low = (rng.randint(0, 2**32, COUNT, dtype=np.uint64) for _ in range(2))
        noise = (high << np.uint64(32) | low) >> np.uint64(64 - width)
        chosen = np.where(rng.rand(COUNT) < share, chosen, noise)
    return chosen.astype(f"u{width // 8}")


def takes_members(record: dict) -> bool:
    """Warp instructions have a last operand: all lanes are members."""
    return ".sync." in record["opcode"] and "movmatrix" not in record["opcode"]


def shape(record: dict) -> str:
    return " ".join(map(str, [record["to"], *record["from"], *[32] * takes_members(record)]))


def digest(values: np.ndarray, is_f64: bool) -> str:
    """SHA-256 of results, f64 NaN without their payload."""
    if is_f64:
        values = np.where(np.isnan(values.view(np.float64)), np.uint64(0x7FF8 << 48), values)
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:32]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare([(r["opcode"], shape(r)) for r in RECORDS["variants"]])


@pytest.mark.parametrize("record", RECORDS["variants"], ids=lambda r: f"{r['opcode']}-{r['edges']}")
def test_same_bits_as_silicon(record):
    edges = RECORDS["edges"][record["edges"]]
    u = unit(record["opcode"], shape(record))
    sources = [inputs(record["opcode"], w, k, edges["values"], edges["share"]) for k, w in enumerate(record["from"])]
    out = np.empty(COUNT, f"u{record['to'] // 8}")
    for start in range(0, COUNT, 32):
        given = {1 + k: s[start : start + 32] for k, s in enumerate(sources)}
        if takes_members(record):
            given[1 + len(sources)] = np.full(32, 0xFFFFFFFF, np.uint32)
        u.run(given)
        out[start : start + 32] = u.register(0)
    assert digest(out, record["f64"]) == record["sha256"]
