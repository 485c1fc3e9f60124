"""The problems of the block-scaled comparison and its committed table; none of the packages is needed."""

import pytest
import torch

from dsv4lib.bench.peers import launch_counts, moe_calls, moe_run
from dsv4lib.bench.peers import moe as moe_peers
from dsv4lib.bench.peers.moe_calls import Kernel, Matrix, problem
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, mxfp4, nvfp4, scale_swizzle
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.pages.moe_gemm import peers as moe_gemm_peers
from dsv4lib.viz import style


@pytest.fixture(scope="module")
def rows():
    return moe_peers.load()


def test_values_of_a_matrix_are_those_of_the_formats():
    x = torch.randn(5, 256)
    assert torch.equal(moe_calls.quantize(x, "nvfp4").values(), nvfp4.dequantize(nvfp4.quantize(x), torch.float64))
    assert torch.equal(moe_calls.quantize(x, "mxfp4").values(), mxfp4.dequantize(mxfp4.quantize(x), torch.float64))
    want = fp8_block.dequantize(fp8_block.quantize(x, (1, 32)), torch.float64)
    assert torch.equal(moe_calls.quantize(x, "mxfp8").values(), want)
    with pytest.raises(ArgumentError, match="form"):
        moe_calls.quantize(x, "fp4")


def test_the_image_holds_the_scales_and_zero_rows_pad():
    given = problem("grouped", ("nvfp4", "nvfp4"), 256)
    place = given.place(128)
    padded = given.rows.rows(place)
    assert len(place) == 256 and place[100] == -1 and place[128] == 100 and (place >= 0).sum() == 177
    assert torch.equal(padded.values()[place >= 0], given.rows.values()) and not padded.values()[place < 0].any()
    image = padded.image.view(torch.uint8).reshape(-1)
    assert torch.equal(scale_swizzle.unswizzle(image, 256, 16), padded.scales)


@pytest.mark.parametrize("forms", [("nvfp4", "nvfp4"), ("mxfp8", "mxfp4")])
def test_products_are_of_each_row_with_its_own_expert(forms):
    given = problem("grouped", forms, 256)
    a, b = given.rows.values(), given.weights.values()
    found = given.products()
    assert given.offsets.tolist() == [0, 100, 100, 177] and found.shape == (177, 256)
    assert torch.equal(found[99], (a[99:100] @ b[0].T)[0]) or torch.allclose(found[99], b[0] @ a[99], rtol=1e-14)
    assert torch.allclose(found[100], b[2] @ a[100], rtol=1e-14)
    assert not torch.allclose(found[100], b[0] @ a[100], rtol=1e-2)
    assert 0.3 < float(found.std()) < 3


def test_swiglu_takes_gate_rows_first_and_never_reaches_the_clamp():
    given = problem("swiglu", ("nvfp4", "nvfp4"), 256)
    gate, up = given.products().chunk(2, -1)
    assert torch.equal(given.truth(), torch.nn.functional.silu(gate) * up)
    limit = moe_calls.SWIGLU_LIMIT
    assert float(gate.abs().max()) < limit and float(up.abs().max()) < limit
    for first, order in (("gate", (0, 1)), ("up", (1, 0))):
        turned = given.alternating(64, first).codes
        halves = given.weights.codes.chunk(2, 1)
        assert torch.equal(turned[:, :64], halves[order[0]][:, :64])
        assert torch.equal(turned[:, 64:128], halves[order[1]][:, :64])
    loud = Matrix("nvfp4", given.rows.codes, given.rows.scales, 100 * given.rows.global_scale)
    with pytest.raises(ArgumentError, match="less than the clamp"):
        moe_calls.Problem("swiglu", loud, given.weights, given.offsets).truth()


def test_bad_problems_are_refused():
    for case, k in (("square", 256), ("dense", 100), ("dense", 0)):
        with pytest.raises(ArgumentError, match="case, k"):
            problem(case, ("nvfp4", "nvfp4"), k)


def test_a_kernel_that_runs_is_not_refused(monkeypatch):
    kernel = Kernel("x", "", "", "few", ("nvfp4", "nvfp4"), "bf16", lambda given: None, "it does not")
    monkeypatch.setitem(moe_run.BY_NAME, "x", kernel)
    monkeypatch.setattr(moe_run, "_measured", lambda name, lengths: {})
    with pytest.raises(ValueError, match="x runs, although: it does not"):
        moe_run.run("x")


def test_the_committed_table_has_every_kernel(rows):
    assert [row["kernel"] for row in rows] == [kernel.name for kernel in moe_calls.KERNELS]
    for row, kernel in zip(rows, moe_calls.KERNELS, strict=True):
        assert (row["package"], row["case"], row["out"]) == (kernel.package, kernel.case, kernel.out)
        assert row["operands"] == " x ".join(kernel.forms) and row["reason"] == kernel.refused
        assert bool(row["commit"]) != bool(kernel.package)
        if kernel.refused:
            assert row["wi"] is None and bool(row["said"]) == (kernel.call is not None)
            continue
        classes = sum(row[f"wi_{name}"] for name in launch_counts.CLASSES)
        assert 0.96 * row["wi"] <= classes <= row["wi"], row["kernel"]  # but those that no lane takes part in


def test_no_kernel_is_less_exact_than_its_output_format(rows):
    for row in moe_peers.ran(rows):
        assert row["rel_l2"] <= moe_peers.error_bound(row), row["kernel"]


def test_every_kernel_multiplies_what_was_asked_for(rows):
    for row in moe_peers.ran(rows):
        assert row["waste"] >= 1 and (row["case"] != "dense" or row["waste"] == 1), row["kernel"]
        assert row["tile_stored"] + row["tile_plain"] > 0


def test_ours_keeps_up_but_where_it_is_said_not_to(rows, monkeypatch):
    assert moe_peers.missed(rows) == []
    known = dict(moe_peers.EXPLAINED)
    first = next(iter(known))
    monkeypatch.setattr(moe_peers, "EXPLAINED", {key: why for key, why in known.items() if key != first})
    assert [text.startswith(f"{first[0]}: ") for text in moe_peers.missed(rows)] == [True]
    monkeypatch.setattr(moe_peers, "EXPLAINED", {**known, ("ours, GEMM 1", "error"): "no"})
    assert moe_peers.missed(rows) == ["ours, GEMM 1: within bounds in error, although EXPLAINED has it"]


def test_ours_that_is_missing_or_behind_is_seen(rows):
    theirs = [row for row in rows if row["package"]]
    assert moe_peers.missed(theirs) == ["no kernel of ours is in the table"]
    best = next(row for row in theirs if row["kernel"] == "cuDNN grouped")
    same = [row for row in moe_peers.ran(theirs) if (row["case"], row["operands"]) == ("dense", "nvfp4 x nvfp4")]
    ours = {**best, "kernel": "ours, dense", "package": ""}
    for key in ("wi", "tile_wi", "bytes_tma", "rel_l2"):
        ours[key] = min(row[key] for row in same)
    assert moe_peers.missed([*theirs, ours]) == []
    worse = {**ours, "wi": ours["wi"] + 1, "tile_wi": 1e6, "bytes_bulk": 1024.0, "rel_l2": 0.01}
    found = "\n".join(moe_peers.missed([*theirs, worse]))
    for text in ("warp-instructions a step", "1,000,000.0 warp-instructions a tile", "KiB loaded", "error 0.01"):
        assert text in found


def test_the_notes_and_the_figure_are_those_of_the_committed_numbers(rows):
    written = peer_pages.written(moe_gemm_peers.NOTES, moe_gemm_peers.MODULE)
    assert written == moe_gemm_peers.markdown(rows), "python -m dsv4lib.pages.moe_gemm.peers writes it"
    figure = moe_gemm_peers.figure(rows)
    assert len(figure.axes) == 6
    assert all(row["kernel"] in style.alt_text(figure) for row in moe_peers.ran(rows))


def test_recording_keeps_empty_cells_and_other_rows(rows, tmp_path):
    path, names = tmp_path / "t.csv", [kernel.name for kernel in moe_calls.KERNELS]
    moe_peers.record(rows[-1:], path, names)
    moe_peers.record([{**rows[0], "wi": 1.0}], path, names)
    found = moe_peers.load(path)
    assert [row["kernel"] for row in found] == [names[0], names[-1]]
    assert found[0]["wi"] == 1.0 and found[1] == rows[-1]
