"""Which launches a page keeps, and how they are counted."""

import numpy as np
import pytest

from dsv4lib.emulator import gpu
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.microscope import collect
from dsv4lib.emulator.microscope.collect import Collector
from dsv4lib.emulator.trace.recorder import _TABLES
from tests.emulator.gpu.test_gpu import SCALE


def test_an_error_before_a_launch_is_no_launch():
    module = gpu.load(SCALE, arch="sm_90a")
    collector = Collector(module.device)
    (name,) = module.kernels
    x = np.zeros(32, np.float32)
    module.kernel(name).launch(1, 32, [x, x, 1.0, 32])
    collector.stopped(LaunchError("of another kind"))
    assert collector.launches == len(collector.kept) == 1
    module.kernel(name).launch(1, 32, [x, x, 1.0, 32])
    assert [one.number for one in collector.kept] == [1, 2]


MANY = """.version 8.0
.target sm_90
.address_size 64
.visible .entry many(.param .u64 out) {
  .reg .pred %p<3>; .reg .b32 %r<4>; .reg .b64 %rd<2>;
  .shared .align 4 .b32 s;
  ld.param.u64 %rd1, [out]; mov.u32 %r1, 0; mov.u32 %r2, %tid.x; setp.eq.u32 %p1, %r2, 0;
L: bar.sync 0; add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 50; @%p2 bra L;
  @%p1 st.shared.b32 [s], %r1; ld.shared.b32 %r3, [s]; st.global.b32 [%rd1], %r3;
  ret;
}
"""


def traced(most, monkeypatch, text=MANY):
    monkeypatch.setattr(collect, "MAX_BYTES", most)
    module = gpu.load(text, checks="race")
    collector = Collector(module.device)
    module.kernel("many").launch(1, 64, [np.zeros(8, np.int32)])
    (stream,) = collector.streams()
    return collector.kept[0], stream


def test_a_recording_without_room_ends_without_holes_and_says_so(monkeypatch):
    (whole, all_of_it), (part, cut) = traced(1 << 24, monkeypatch), traced(20_000, monkeypatch)
    assert all_of_it["dropped"] == 0 < cut["dropped"]
    assert 0 < part.trace.time < whole.trace.time and cut["time"] == part.trace.time
    for table in ("named",):
        mine, full = getattr(part.trace, table), getattr(whole.trace, table)
        assert 0 < len(mine) < len(full) and (mine == full[: len(mine)]).all()
    assert part.trace.named["time"].max() <= part.trace.time
    # A warp that waits or runs when the room ends does so until the end of what is shown.
    for warp in range(2):
        states = part.trace.states[part.trace.states["warp"] == warp]
        assert states["end"].max() >= part.trace.time
    # What checks find is complete.
    assert [h.kind for h in part.hazards] == [h.kind for h in whole.hazards] != []
    assert len(part.trace.hazards) == len(whole.trace.hazards)
    rows = sum(len(getattr(part.trace, table)) for table in ("named", "marks", "states", "steps"))
    assert rows * 300 <= 20_000


@pytest.mark.parametrize("text", [MANY, MANY.replace("bar.sync 0;", "").replace("50", "20000")])
def test_what_there_is_no_room_for_is_counted_once(text, monkeypatch):
    """A warp that runs on, slice after slice, is one record."""
    (whole, _), (part, cut) = traced(1 << 24, monkeypatch, text), traced(300, monkeypatch, text)
    kept, full = (sum(len(getattr(t, name)) for name in (*_TABLES, "ops")) for t in (part.trace, whole.trace))
    assert cut["dropped"] == full - kept > 0
