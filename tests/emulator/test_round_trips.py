"""Cells of tensor memory that another thread stores than the one that loaded them, from hand-made traces."""

from collections import Counter

import numpy as np
import pytest

from dsv4lib.emulator.trace import round_trips
from dsv4lib.emulator.trace.trace import (
    BOXES,
    FENCES,
    MBARRIERS,
    MMAS,
    NAMED,
    OPS,
    PEERS,
    SMEM,
    STATES,
    STEPS,
    TMEM,
    Trace,
    pack_lanes,
)

OPCODES = {
    1: "tcgen05.ld.sync.aligned.32x32b.x32.b32",
    2: "tcgen05.st.sync.aligned.32x32b.x32.b32",
    3: "tcgen05.st.sync.aligned.16x64b.x16.b32",
    4: "tcgen05.ld.sync.aligned.16x64b.x16.b32",
    5: "tcgen05.st.sync.aligned.32x32b.x16.unpack::16b.b32",
    9: "tcgen05.mma.cta_group::1.kind::f16",
}


def trace(*accesses):
    """A trace of (PTX line, first lane, lanes, first column, columns), all of CTA 0 and one warp."""
    rows = np.zeros(len(accesses), TMEM)
    for i, (line, lane, lanes, column, columns) in enumerate(accesses):
        what = "mma" if line == 9 else "ld" if ".ld." in OPCODES[line] else "st"
        packed = pack_lanes(range(lane, lane + lanes))
        rows[i] = (i, i, 0, 0, 0, line, what, what != "ld", column, column + columns, packed)
    empty = [np.zeros(0, kind) for kind in (OPS, BOXES, MMAS)]
    rest = [np.zeros(0, kind) for kind in (SMEM, MBARRIERS, NAMED, STATES, FENCES, PEERS, STEPS)]
    lines, texts = np.array(list(OPCODES)), np.array(list(OPCODES.values()))
    executed = np.ones(len(lines), np.int64)
    return Trace(
        "k", (1, 1, 1), 0, len(rows), 0, *empty, rows, *rest, [], [], [], lines, texts, executed, [], Counter()
    )


BACK = (2, 0, 32, 256, 32)
THERE = (1, 0, 32, 256, 32)
HALVES = (3, 0, 16, 256, 32), (3, 16, 16, 256, 32)


def test_cells_of_another_thread():
    """32 lanes x 32 columns; of 16x64b, only thread 0 of lane 0, columns 0, 1, and the like own what they loaded."""
    (moved,) = round_trips.moved(trace(THERE, *HALVES))
    assert (moved.load_line, moved.store_line, moved.lane) == (1, 3, 8)
    threads = np.arange(32)
    own = sum(int(np.sum(threads // 4 + 8 * (threads % 2) + half == threads)) for half in (0, 16)) * 16
    assert moved.cells == 1024 - own
    assert "lane 8, column 256 by thread 8, stored by thread 1" in str(moved)


@pytest.mark.parametrize(
    "accesses",
    [
        (THERE, BACK),
        ((4, 0, 16, 256, 32), (4, 16, 16, 256, 32), *HALVES),  # another map, but the same both ways
        HALVES,  # nothing was loaded
        (THERE, (9, 0, 128, 256, 32), *HALVES),  # written anew between
        (THERE, (5, 0, 32, 256, 32)),  # packed: not looked at
        (THERE, (3, 0, 16, 64, 32)),  # other columns
    ],
)
def test_nothing_moves(accesses):
    assert round_trips.moved(trace(*accesses)) == []


def test_moves_of_one_pair_of_instructions_are_one_record():
    (moved,) = round_trips.moved(trace(*(THERE, *HALVES) * 3))
    (once,) = round_trips.moved(trace(THERE, *HALVES))
    assert moved.cells == 3 * once.cells
