"""The microscope in a real browser: any moment is the trace's, findings jump, a second report opens, no request.

Needs a Chromium: `DSV4_CHROMIUM=<executable>`, or one on PATH; without, the browser's part is skipped and says so.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4lib.emulator import gpu
from dsv4lib.emulator.errors import Deadlock
from dsv4lib.emulator.microscope import page as pages
from dsv4lib.emulator.microscope.collect import Collector
from dsv4lib.emulator.microscope.page import ASSETS, MAX_BYTES, page, within
from dsv4lib.emulator.microscope.stream import LIMIT, stream
from dsv4lib.emulator.trace.trace import TMEM_KINDS, Trace
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.gemm_tile import faults, sm100
from dsv4lib.pages.common.run_gemm import run_gemm
from dsv4lib.pages.emulator.microscope import document
from dsv4lib.viz import kinds
from dsv4lib.viz.widgets import frame_html

SETTINGS = ("bf16", "fp32", 128, 2)
EVIL = "</script><img src=x onerror=\"document.title='taken'\"><!--<script>"


@pytest.fixture(scope="module")
def broken() -> Any:
    return run_gemm(faults.FAULTS["early_release"], (200, 136, 456), SETTINGS)


@pytest.fixture(scope="module")
def right() -> Any:
    return run_gemm(sm100.GemmTile, (100, 100, 200), SETTINGS)


@pytest.fixture(scope="module")
def written(broken: Any, right: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a broken and of a right kernel."""
    folder = tmp_path_factory.mktemp("reports")
    out = {}
    for name, run in (("broken", broken), ("right", right)):
        facts = {"arch": "sm_100a", "schedule": "round_robin", "seed": 0}
        text = page([stream(run.trace, run.hazards, **facts)], f"{name} {EVIL}", f"{name}.py {EVIL}")
        out[name] = folder / f"{name}.html"
        out[name].write_text(text)
    return out


# ---- without a browser -----------------------------------------------------------------------------------------------


def test_colours_are_those_of_the_table_of_kinds() -> None:
    found = re.findall(r"--k-[\w-]+: (#[0-9a-f]{6}); /\* (.+?) \*/", (ASSETS / "style.css").read_text())
    assert len(found) == len(re.findall(r"--k-[\w-]+:", (ASSETS / "style.css").read_text())) >= 20
    assert [(kind, kinds.colour(kind).lower()) for _, kind in found] == [(kind, colour) for colour, kind in found]


def test_a_page_holds_its_bytes_and_its_policy(written: dict[str, Path]) -> None:
    text = written["broken"].read_text()
    assert len(text) < 250_000
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert EVIL not in text and text.count("</script>") == 2
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)", text), "it refers to no file"
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|WebSocket", text)


def many(trace: Trace, times: int) -> Trace:
    """The same launch with its CTAs ``times`` times over."""
    from dataclasses import replace

    tables = {}
    for name in ("ops", "boxes", "mmas", "tmem", "smem", "mbarriers", "named", "states", "fences", "peers", "marks"):
        table = getattr(trace, name)
        copies = [table.copy() for _ in range(times)]
        for i, copy in enumerate(copies):
            copy["cta"] += i * 64
            if "op" in (copy.dtype.names or ()):
                copy["op"] = np.where(copy["op"] < 0, -1, copy["op"] + i * len(trace.ops))
        tables[name] = np.concatenate(copies)
    return replace(trace, **tables, labels=trace.labels * times, chunks=trace.chunks * times)


def test_twenty_thousand_events_are_below_five_megabytes(broken: Any) -> None:
    big = many(broken.trace, 12)
    made = stream(big, broken.hazards)
    assert made["cut"]["kept"] > 0.95 * LIMIT and made["cut"]["events"] > LIMIT
    assert len(page([made], "big", "big.py").encode()) < MAX_BYTES


def test_a_page_too_large_is_made_with_fewer_events() -> None:
    asked: list[int] = []

    def make(limit: int) -> str:
        asked.append(limit)
        return "x" * 100 * limit

    assert len(within(make, 2000, 60_000)) == 50_000 and asked == [2000, 1000, 500]
    with pytest.raises(ArgumentError, match="most"):
        within(lambda limit: "x" * 10_000, 2000, 5_000)
    with pytest.raises(ArgumentError, match="launches"):
        page([], "none")


def test_assets_are_in_the_wheel() -> None:
    assert all((ASSETS / name).is_file() for name in pages.SCRIPTS)
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '"dsv4lib.emulator.microscope" = ["assets/*"]' in project


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium, or a visible skip."""
    named = os.environ.get("DSV4_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium: set DSV4_CHROMIUM or put chromium on PATH")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        one = play.chromium.launch(executable_path=shutil.which(found), chromium_sandbox=False)
        yield one
        one.close()


@pytest.fixture
def opened(browser: Any, written: dict[str, Path]) -> Iterator[Any]:
    """The report of the broken kernel, open; at the end there was no request and no failure."""
    tab = browser.new_page(viewport={"width": 1300, "height": 900})
    trouble: list[str] = []
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on("console", lambda said: trouble.append(said.text) if said.type in ("error", "warning") else None)
    tab.on("request", lambda asked: trouble.append(asked.url) if asked.url[:5] not in ("file:", "data:") else None)
    tab.goto(written["broken"].as_uri())
    yield tab
    assert trouble == [] and "taken" not in (tab.evaluate("document.title").replace(EVIL, ""))
    tab.close()


STATE = """([cta, event]) => { const launch = microscope.views[0].launch;
  const table = launch.tables.tmem, bytes = launch.tables.smem;
  return { tmem: Array.from(microscope.tmemAt(launch, cta, event), (row) => row < 0 ? "" : table.what[row]).join(","),
    smem: Array.from(microscope.smemAt(launch, cta, event), (row) => row < 0 ? "" : bytes.what[row]),
    barriers: [...microscope.barriersAt(launch, cta, event)].map(([o, b]) => [o, b.phase, b.pending, b.tx]) }; }"""


def test_any_moment_is_the_trace_s(opened: Any, broken: Any) -> None:
    trace = broken.trace
    for cta, share in ((0, 0.0), (0, 0.3), (0, 0.55), (2, 0.8), (3, 1.0)):
        event = int(trace.events_of(cta)[int(share * (len(trace.events_of(cta)) - 1))])
        found = opened.evaluate(STATE, [cta, event])
        cells, _ = trace.tmem_state(event, cta)
        assert found["tmem"] == ",".join([*TMEM_KINDS, ""][kind] for kind in cells.ravel())
        chunks, names = trace.smem_history(np.array([event]), cta)
        assert found["smem"] == [[*names, ""][kind] for kind in chunks[:, 0]]
        wanted = [
            [o, int(r["phase"]) + int(r["done"]), int(r["expected"] if r["done"] else r["pending"]), int(r["tx"])]
            for o, r in sorted(trace.mbarriers_at(event, cta).items())
        ]
        assert found["barriers"] == wanted, event


def test_warps_stand_where_the_trace_says(opened: Any, broken: Any) -> None:
    trace = broken.trace
    for time in (100, 640, 2000, trace.time - 1):
        found = opened.evaluate("(t) => microscope.warpsAt(microscope.views[0].launch, 0, t)", time)
        states = trace.states[
            (trace.states["cta"] == 0) & (trace.states["time"] <= time) & (trace.states["end"] > time)
        ]
        living = {one["warp"]: (one["state"], one["reason"]) for one in found if one["state"] in ("run", "wait")}
        assert living == {int(s["warp"]): (str(s["state"]), str(s["reason"])) for s in states}
        for one in found:
            marks = trace.marks[(trace.marks["cta"] == 0) & (trace.marks["warp"] == one["warp"])]
            marks = marks[marks["time"] <= time]
            assert one["state"] == "wait" or not len(marks) or one["line"] == marks["line"][-1]


def settle(tab: Any) -> None:
    """Wait until the latest moment is drawn."""
    tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def readout(tab: Any) -> str:
    settle(tab)
    return tab.locator("[data-part=moment]").first.inner_text()


def test_the_scrubber_moves_every_panel(opened: Any) -> None:
    scrub, last = opened.locator("[data-part=scrub]"), None
    most = int(scrub.get_attribute("max"))
    for share in (0.25, 0.5, 0.9):
        scrub.evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", int(share * most))
        now = [readout(opened), opened.locator("[data-part=smem] .words").inner_text()]
        now.append(opened.locator("[data-part=barriers]").inner_text())
        assert last is None or all(a != b for a, b in zip(now, last, strict=True)), (now, last)
        assert scrub.get_attribute("aria-valuetext") == now[0]
        last = now
    assert "written by an MMA" in opened.locator("[data-part=tmem] .words").inner_text()
    before = readout(opened)
    opened.get_by_role("button", name="next event").click()
    assert readout(opened) != before
    opened.get_by_role("button", name="previous event").click()
    assert readout(opened) == before


def test_wheel_drag_and_keys(opened: Any) -> None:
    line = opened.locator("canvas.timeline")

    def view() -> list[float]:
        settle(opened)
        return opened.evaluate("microscope.views[0].timeline.view")

    box = line.bounding_box()
    whole = view()
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    opened.mouse.move(x, y)
    opened.mouse.wheel(0, -600)
    opened.wait_for_function("microscope.views[0].timeline.view[1] - microscope.views[0].timeline.view[0] < 8000")
    near = view()
    assert near[0] > whole[0] and near[1] < whole[1]
    opened.mouse.down()
    opened.mouse.move(x - 200, y, steps=4)
    opened.mouse.up()
    moved = view()
    assert moved[0] > near[0] and abs((moved[1] - moved[0]) - (near[1] - near[0])) < 1e-6
    before = readout(opened)
    opened.mouse.click(box["x"] + 300, box["y"] + 8)  # the ruler
    assert readout(opened) != before
    line.focus()
    before = opened.evaluate("microscope.views[0].number")
    opened.keyboard.press("ArrowRight")
    assert opened.evaluate("microscope.views[0].number") == before + 1
    opened.keyboard.press("0")
    assert view() == whole
    opened.keyboard.press("End")
    assert opened.evaluate("microscope.views[0].time") == opened.evaluate("microscope.views[0].moments.at(-1)[0]")


def test_a_finding_jumps_to_its_moment_and_lines(opened: Any, broken: Any) -> None:
    first = broken.trace.hazards[0]
    opened.locator(".findings button").first.click()
    settle(opened)
    time, cta, event = opened.evaluate("(({time, cta, event}) => [time, cta, event])(microscope.views[0])")
    assert (time, cta) == (int(first["time"]), int(first["cta"])) and abs(event - int(first["event"])) <= 1
    hazard = broken.hazards[0]
    file, _, number = hazard.place.python.rpartition(":")
    assert opened.locator("[data-part=source-title]").inner_text().endswith(f"sm100.py, line {number}")
    current = opened.locator("[data-part=source] .current code").inner_text()
    assert current.strip() == Path(file).read_text().splitlines()[int(number) - 1].strip()
    assert opened.locator("[data-part=ptx] .current").first.get_attribute("value") == str(hazard.place.ptx_line)
    assert opened.locator("[data-part=source] .current").is_visible()
    opened.locator("canvas.timeline").focus()
    opened.keyboard.press("n")
    assert opened.locator(".findings button").nth(1).get_attribute("aria-current") == "true"


def centre_of(tab: Any, unit: str, number: int) -> tuple[float, float]:
    """Place on the page of an operation of a unit, in view."""
    at = """([unit, number]) => { const line = microscope.views[0].timeline;
      const track = line.tracks.findIndex((one) => one.id === unit), bar = line.tracks[track].bars[number];
      line.place(bar.from - 50, 100 + bar.to - bar.from);
      const box = line.canvas.getBoundingClientRect();
      return [box.x + line.x((bar.from + bar.to) / 2), box.y + 22 + 19 * track + 9]; }"""
    return tuple(tab.evaluate(at, [unit, number]))


def test_a_click_on_an_operation_shows_who_issued_it(opened: Any, broken: Any) -> None:
    at = """() => { const line = microscope.views[0].timeline;
      const track = line.tracks.findIndex((one) => one.id === "tma"), bar = line.tracks[track].bars[0];
      return [line.x((bar.from + bar.to) / 2), 22 + 19 * track + 9, bar.row]; }"""
    x, y, row = opened.evaluate(at)
    opened.locator("canvas.timeline").click(position={"x": x, "y": y})
    settle(opened)
    said = opened.locator("[data-part=chosen]").inner_text()
    op = broken.trace.ops[row]
    assert said.startswith(broken.trace.labels[row]) and f"issued by warp {op['warp']}" in said
    assert opened.locator("[data-part=ptx-title]").inner_text() == f"PTX, line {op['line']}"
    box = broken.trace.boxes[broken.trace.boxes["op"] == row][0]
    touched = opened.locator("[data-part=operands]").inner_text()
    assert f"written: within {int(box['first']):#x} to {int(box['end']):#x}" in touched
    assert (
        f"{int(box['nbytes']):,} bytes" in touched
        and f"signals mbarrier {int(box['barrier']) & 0xFFFFFF:#x}" in touched
    )
    seen = set()
    for number in (1, 6):
        opened.mouse.click(*centre_of(opened, "tensor", number))
        settle(opened)
        mma = broken.trace.mmas[broken.trace.mmas["op"] == opened.evaluate("microscope.views[0].selected.op")][0]
        seen.add(bool(mma["accumulate"]))
        touched = opened.locator("[data-part=operands]").inner_text()
        assert ("128 x 128 x 16, " + ("adds to D" if mma["accumulate"] else "writes D anew")) in touched
        assert "tensor memory written: columns 0 to 127" in touched
    assert seen == {True, False}


def test_two_reports_side_by_side(opened: Any, written: dict[str, Path], right: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "other.html"
    wrong.write_text("<p>no report</p><script>document.title='taken'</script>")
    opened.set_input_files("#other", wrong)
    opened.get_by_text("this file is no report").wait_for()
    assert opened.locator(".view").count() == 1
    opened.set_input_files("#other", written["right"])
    opened.locator(".view").nth(1).wait_for()
    left, other = (opened.locator(".view").nth(i).bounding_box() for i in (0, 1))
    assert abs(left["y"] - other["y"]) < 2 and other["x"] >= left["x"] + left["width"]
    assert "found nothing" in opened.locator(".view").nth(1).inner_text()
    scrub = opened.locator("[data-part=scrub]").first
    scrub.evaluate("(e) => { e.value = 300; e.dispatchEvent(new Event('input')); }")
    a, b = opened.evaluate("microscope.views.map((view) => view.time)")
    assert 0 < b <= a and b == max(t for t, _ in opened.evaluate("microscope.views[1].moments") if t <= a)
    opened.get_by_role("button", name="zoom in").first.click()
    settle(opened)
    windows = opened.evaluate("microscope.views.map((view) => view.timeline.view)")
    assert windows[0] == windows[1] != opened.evaluate("microscope.views[0].timeline.life")
    opened.locator("#link").uncheck()
    opened.get_by_role("button", name="whole").first.click()
    assert opened.evaluate("microscope.views[1].timeline.view") == windows[1]
    scrub.evaluate("(e) => { e.value = 10; e.dispatchEvent(new Event('input')); }")
    assert opened.evaluate("microscope.views[1].time") == b


def test_a_frame_in_a_notebook(browser: Any, broken: Any, tmp_path: Path) -> None:
    """The page within another, as a notebook shows it: it works, and cannot reach the page around it."""
    held = document(broken.trace, broken.hazards, {0x10400: "full 0"}, "in a notebook")
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>around</title>{frame_html(held, 'microscope', 700)}")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    inside = tab.frame_locator("iframe")
    inside.locator(".findings button").first.click()
    inside.locator("[data-part=source] .current").wait_for()
    assert "639" in inside.locator("[data-part=moment]").inner_text()
    assert inside.locator("[data-part=barriers]").get_by_text("full 0", exact=True).is_visible()
    frame = next(one for one in tab.frames if one.parent_frame)
    assert frame.evaluate("(() => { try { return parent.document.title; } catch { return 'apart'; } })()") == "apart"
    tab.close()


def test_narrow_and_dark(browser: Any, written: dict[str, Path]) -> None:
    papers = set()
    for scheme in ("light", "dark"):
        tab = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme=scheme)
        tab.goto(written["broken"].as_uri())
        tab.locator(".findings button").first.click()
        assert tab.evaluate("document.documentElement.scrollWidth") <= 400
        papers.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        tab.close()
    assert len(papers) == 2


WAITING = """.version 8.0
.target sm_90
.address_size 64
.visible .entry waiting() {
  .reg .pred %p<2>; .reg .b32 %r<2>;
  bar.sync 1, 128; bar.sync 1, 128; mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 96; @%p1 bar.sync 1, 128;
  ret;
}
"""


def test_as_many_threads_have_arrived_as_wait(browser: Any, tmp_path: Path) -> None:
    """At any moment, also where warps of a step run side by side."""
    module = gpu.load(WAITING)
    collector = Collector(module.device)
    with pytest.raises(Deadlock) as stopped:
        module.kernel("waiting").launch(1, 128)
    collector.stopped(stopped.value)
    (tmp_path / "waiting.html").write_text(page(collector.streams(), "waiting", "waiting.ptx"))
    tab = browser.new_page()
    tab.goto((tmp_path / "waiting.html").as_uri())
    seen = tab.evaluate("""() => { const { launch, moments } = microscope.views[0];
      return moments.map(([time]) => { const at = microscope.namedAt(launch, 0, time).get("named 1");
        const here = microscope.warpsAt(launch, 0, time).filter((one) => one.reason === "barrier 1");
        return [at.arrived, 32 * here.filter((one) => one.since > at.done).length, here.length]; }); }""")
    assert [0, 0, 3] in seen and [96, 96, 3] in seen  # three are released, and at the end three wait
    assert all(arrived == waiting or arrived == waiting + 32 for arrived, waiting, _ in seen), seen
    scrub = tab.locator("[data-part=scrub]")
    scrub.evaluate("(e) => { e.value = e.max; e.dispatchEvent(new Event('input')); }")
    settle(tab)
    assert "96 arrived of 128" in tab.locator("[data-part=barriers]").inner_text()
    tab.close()


def test_a_page_says_when_the_recording_was_full(browser: Any, tmp_path: Path, right: Any) -> None:
    data = stream(right.trace) | {"dropped": 1234, "time": 5678}
    (tmp_path / "full.html").write_text(page([data], "full"))
    tab = browser.new_page()
    tab.goto((tmp_path / "full.html").as_uri())
    text = tab.locator("[data-part=cut]").inner_text()
    assert "full after 5,678 warp-instructions: 1,234 later events" in text
    tab.close()
