"""What notebook 06 calls: right and broken kernels, findings with their moments, CUDA C++ or why it is missing."""

from __future__ import annotations

import pytest

from dsv4lib import nvrtc
from dsv4lib.errors import BackendUnavailable
from dsv4lib.pages.emulator.microscope import document, hazard_chart
from dsv4lib.pages.your_kernel import run_case
from dsv4lib.viz.style import alt_text, to_png


def ran(ptx: str) -> tuple[run_case.Ran, int]:
    x, y = run_case.operands(3)
    out = run_case.run_ptx(ptx, x, y, seed=3)
    return out, run_case.wrong(y, 2 * x)


def test_a_right_kernel_is_clean():
    out, wrong = ran(run_case.TWICE)
    assert (out.bad, wrong, out.findings, out.stopped) == (0, 0, [], None)
    assert out.trace.ops["unit"].tolist() == ["tma"] and (out.trace.states["state"] == "wait").any()


def test_a_copy_without_its_wait_is_a_race_at_its_load():
    out, wrong = ran(run_case.TWICE.replace(run_case.WAIT, ""))
    assert wrong > 0 and out.bad >= 2
    assert {(kind, line.partition(" ")[0]) for kind, line, _ in out.rows()} >= {
        ("race_shared", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"),
        ("uninitialised_smem", "ld.shared.f32"),
    }
    assert run_case.moments_wrong(out) == 0
    assert run_case.moments_wrong(out, ran(run_case.TWICE)[0].trace) == len(out.findings)
    assert run_case.moments_wrong(out, lines=1) > 0
    chart = hazard_chart(out.trace)
    assert len(alt_text(chart)) > 60 and len(to_png(chart)) < 250_000
    assert len(document(out.trace, out.hazards, title="twice")) < 100_000


def test_wrong_bytes_stop_the_launch():
    out, _ = ran(run_case.TWICE.replace("_, [%r3], 512", "_, [%r3], 1024"))
    assert run_case.moments_wrong(out) == 0
    assert type(out.stopped).__name__ == "Deadlock" and out.rows()[0][0] == "deadlock" and out.trace is not None


def test_cuda_source_or_why_not(monkeypatch):
    monkeypatch.setenv("DSV4_NVRTC", "/nowhere/libnvrtc.so")
    ptx, why = run_case.cuda_to_ptx(run_case.REVERSE_CU)
    assert ptx == "" and "NVRTC" in why and "pip install" in why


def test_cuda_source_where_nvrtc_is():
    try:
        nvrtc.library()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    ptx, why = run_case.cuda_to_ptx(run_case.REVERSE_CU)
    x, y = run_case.operands(3)
    out = run_case.run_ptx(ptx, x, y)
    assert (why, out.bad, run_case.wrong(y, x[::-1].copy())) == ("", 0, 0)
