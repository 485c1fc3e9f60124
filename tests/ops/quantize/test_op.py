"""The quantising ops as PyTorch sees them: schema, fakes, back ends, what is empty, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e4m3, indexer_key, kv_entry, nvfp4, scale_swizzle
from dsv4lib.ops.quantize import op

ARGUMENTS = {"backend": "emulator"}
X = torch.randn(21, 192, generator=torch.Generator().manual_seed(1)).mul(torch.logspace(-3, 3, 21)[:, None]).bfloat16()
ROWS = torch.tensor([4, -1, 0, 20, 4], dtype=torch.int32)


def same(a, b):
    """Equal bit for bit; any NaN equals any NaN."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None or y is not None]
    return all(torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def both(x, recipe, **options):
    """The emulator's answer, which must be the reference's."""
    found = op.quantize(x, recipe, backend="emulator", **options)
    assert same(found, op.quantize(x, recipe, backend="reference", **options))
    return found


# -------------------------------------------------------------------- numbers


def test_dynamic_and_calibrated():
    """Dynamic is calibrated with the scale that it finds; the result dequantises to what went in."""
    dynamic = both(X, "nvfp4")
    assert dynamic.global_scale.shape == () and same(both(X, "nvfp4", global_scale=dynamic.global_scale), dynamic)
    values = nvfp4.dequantize(nvfp4.NVFP4Tensor(*dynamic))
    assert float((values - X.float()).abs().max()) <= float(X.float().abs().max()) / 6


def test_few_bytes_a_thread_where_there_are_few():
    """The least is a piece of 8 elements of each half."""
    assert [op.bytes_at_once(8 * 4096, size) for size in (2, 4)] == [16, 32]
    assert [op.bytes_at_once(8 * 4096, size, True) for size in (2, 4)] == [32, 64]
    sizes = [op.bytes_at_once(4096 * 4096, size, two) for size in (2, 4) for two in (False, True)]
    assert sizes == [32, 32, 32, 64]


def test_rows_and_swizzle():
    found = both(X, "nvfp4", rows=ROWS, swizzled=True)
    assert found.codes.shape == (5, 96) and found.scales.shape == (scale_swizzle.swizzled_bytes(5, 12),)
    plain = both(X, "nvfp4", rows=ROWS)
    assert torch.equal(scale_swizzle.swizzle(plain.scales), found.scales) and not plain.codes[1].any()


def test_gate_and_up():
    found = both(X, "mxfp8", deinterleave=True)
    assert found.codes.shape == (2, 21, 96) and found.scales.shape == (2, 21, 3) and found.global_scale is None
    gate = X.view(21, 12, 2, 8)[:, :, 0].reshape(21, 96).contiguous()
    assert torch.equal(both(gate, "mxfp8").codes, found.codes[0])


def test_outputs_and_workspace_of_the_caller():
    shapes = op.output_shapes("nvfp4", 5, 192)
    out = op.Quantized(*(torch.full(s, 0xA5, dtype=torch.uint8) for s in shapes), torch.zeros(1))
    space = torch.full((op.workspace_size(21, 192) + 3,), -1, dtype=torch.int32)
    found = op.quantize(X, "nvfp4", rows=ROWS, out=out, workspace=space, **ARGUMENTS)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(found, out, strict=True)) and (space[-3:] == -1).all()
    assert same(found[:2], both(X, "nvfp4", rows=ROWS)[:2]) and float(out.global_scale) > 0


def test_nothing_to_quantise():
    """No tokens, no rows, no columns, rows of padding alone; a derived scale is there all the same."""
    none = ROWS[:0]
    for x, options in ((X[:0], {}), (X, {"rows": none}), (X[:, :0], {}), (X[:0], {"rows": ROWS[1:2]})):
        for swizzled in (False, True):
            found = both(x, "nvfp4", swizzled=swizzled, **options)
            assert found.global_scale == (nvfp4.shared_global_scale(x)) and not found.codes.any()
            both(x, "mxfp8", swizzled=swizzled, **options)
    pages = kv_entry.LAYOUT.allocate(2, 4)
    op.quantize_kv_entries(torch.empty(0, 512).bfloat16(), pages, 4, none, **ARGUMENTS)
    op.quantize_indexer_keys(
        torch.empty(3, 128), torch.empty(0, 272).byte(), 4, torch.full((3,), -1).int(), **ARGUMENTS
    )
    assert not pages.any()


@pytest.mark.parametrize("rotate", [None, True, False])
def test_entries(rotate):
    layout, dim = (kv_entry.LAYOUT, 512) if rotate is None else (indexer_key.FP4_LAYOUT, 128)
    x, indices = torch.randn(6, dim).bfloat16(), torch.tensor([7, 0, -1, 3, 11, 5], dtype=torch.int32)
    pools = []
    for backend in ("emulator", "reference"):
        pages = layout.allocate(3, 4)
        if rotate is None:
            op.quantize_kv_entries(x, pages, 4, indices, backend=backend)
            kept, valid = kv_entry.gather(pages, 4, indices)
            assert float((kept - x)[valid].abs().max()) <= float(x.abs().max()) / 16
        else:
            op.quantize_indexer_keys(x, pages, 4, indices, rotate=rotate, backend=backend)
        pools.append(pages)
    assert torch.equal(*pools) and pools[0].any()


# ------------------------------------------------------------ what torch knows


def flat(backend="reference"):
    """Arguments of `torch.ops.dsv4.quantize`."""
    codes, scales = (torch.zeros(s, dtype=torch.uint8) for s in op.output_shapes("nvfp4", 5, 192))
    return X, ROWS, None, codes, scales, torch.zeros(()), None, "nvfp4", False, False, backend


def test_the_schema_says_what_is_written():
    written = [x.name for x in torch.ops.dsv4.quantize.default._schema.arguments if x.alias_info]
    assert written == ["out_codes", "out_scales", "out_global_scale", "workspace"]


def test_schema_and_fake_implementation_agree_with_the_op():
    indices = torch.arange(3, dtype=torch.int32)
    entries = torch.randn(3, 512), kv_entry.LAYOUT.allocate(1, 4), 4, indices, "reference"
    keys = torch.randn(3, 128), indexer_key.FP4_LAYOUT.allocate(1, 4), 4, indices, True, "reference"
    for name, given in (("quantize", flat()), ("quantize_kv_entries", entries), ("quantize_indexer_keys", keys)):
        with torch.no_grad():
            found = torch.library.opcheck(getattr(torch.ops.dsv4, name).default, given)
        assert set(found.values()) == {"SUCCESS"}, (name, found)


def test_fakes_of_any_size():
    with FakeTensorMode():
        x = torch.empty(65_536, 2 * 3072, dtype=torch.bfloat16)
        found = op.quantize(x, "nvfp4", deinterleave=True, swizzled=True)
        assert found.codes.shape == (2, 65_536, 1536) and found.scales.shape == (2, 65_536 * 192)
        with pytest.raises(ArgumentError, match=r"x\.shape"):
            op.quantize(x[:, :-8], "nvfp4")


# ---------------------------------------------------------------- bad arguments

OUT = op.Quantized(torch.empty(21, 95).byte(), torch.empty(21, 12).byte(), None)


@pytest.mark.parametrize(
    ("name", "x", "recipe", "options"),
    [
        ("x", X[0], "nvfp4", {}),
        ("x", X.half(), "nvfp4", {}),
        ("x.shape", X[:, :184], "nvfp4", {}),
        ("x.shape", X[:, :160], "mxfp4", {"deinterleave": True}),
        ("x.stride()", X[:, 1:177], "nvfp4", {}),
        ("recipe", X, "kv", {}),
        ("global_scale", X, "nvfp4", {"global_scale": torch.tensor(1.0, dtype=torch.float64)}),
        ("global_scale", X, "nvfp4", {"global_scale": torch.ones(2)}),
        ("global_scale", X, "nvfp4", {"global_scale": torch.tensor(0.0)}),
        ("global_scale", X, "nvfp4", {"global_scale": torch.tensor(float("inf"))}),
        ("global_scale", X, "mxfp4", {"global_scale": torch.ones(())}),
        ("rows", X, "mxfp4", {"rows": ROWS.long()}),
        ("rows", X, "mxfp4", {"rows": ROWS + 1}),
        ("out.codes", X, "nvfp4", {"out": OUT}),
        ("out.scales", X, "mxfp8", {"out": op.Quantized(torch.empty(21, 192).byte(), torch.empty(21, 6), None)}),
        ("workspace.shape", X, "nvfp4", {"workspace": torch.empty(0).int()}),
        ("backend", X, "nvfp4", {"backend": "gpu"}),
    ],
)
def test_bad_rows(name, x, recipe, options):
    with pytest.raises(ArgumentError) as caught:
        op.quantize(x, recipe, **{**ARGUMENTS, **options})
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("kv", {"x": torch.randn(3, 128)}),
        ("indices", {"indices": torch.arange(3)}),
        ("indices", {"indices": torch.tensor([0, 1, 8], dtype=torch.int32)}),
        ("indices", {"indices": torch.tensor([2, 2, 1], dtype=torch.int32)}),
        ("pages.shape", {"page_size": 3}),
        ("page_size", {"page_size": 0}),
        ("pages", {"pages": torch.zeros(2, 576 * 5)}),
        ("pages.stride()", {"pages": torch.zeros(2 * 2880 + 1, dtype=torch.uint8)[1:].view(2, -1)}),
    ],
)
def test_bad_entries(name, changed):
    given = {"x": torch.randn(3, 512), "pages": kv_entry.LAYOUT.allocate(2, 4), "page_size": 4}
    given = {**given, "indices": torch.arange(3, dtype=torch.int32), **changed}
    before = given["pages"].clone()
    with pytest.raises(ArgumentError) as caught:
        op.quantize_kv_entries(given["x"], given["pages"], given["page_size"], given["indices"], **ARGUMENTS)
    assert caught.value.name == name and torch.equal(given["pages"], before)


def test_a_nan_spoils_what_shares_its_scale():
    """Derived: everything. Calibrated: its block."""
    x = X.clone()
    x[3, 40] = float("nan")
    assert (both(x, "nvfp4").scales == e4m3.NAN).all()
    found = both(x, "nvfp4", global_scale=torch.tensor(0.01))
    assert (found.scales == e4m3.NAN).nonzero().tolist() == [[3, 2]]
