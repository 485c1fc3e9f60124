"""`moe_gemm` with tiled weights: both GEMMs of a layer in the emulator and by the oracle, refusals, torch's view."""

import inspect
import warnings

import pytest
import torch

from dsv4lib import backends, emulator
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import mxfp4
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.moe_dispatch.op import moe_dispatch
from dsv4lib.ops.moe_gemm.op import Operand, moe_gemm
from dsv4lib.ops.moe_gemm.sm90 import op
from dsv4lib.ops.moe_gemm.sm90.config import ROW_STEP
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from dsv4lib.ops.moe_gemm.sm90.layout import tile_weights
from dsv4lib.ops.quantize.op import quantize

EXPERTS, HIDDEN, WIDTH, TOKENS, TOP = 5, 384, 128, 7, 2
MODES = "w4a8", "w4a16", "w4a8_row"


def weights(rows, k, mode, seed):
    generator = torch.Generator().manual_seed(seed)
    q = mxfp4.quantize(torch.randn(EXPERTS, rows, k, generator=generator))
    return Operand(tile_weights(q.packed, q.scales, mode))


def routes():
    """Tokens sorted by expert; expert 3 has none."""
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(TOKENS, EXPERTS - 1, generator=generator).argsort(-1)[:, :TOP].int()
    experts += experts >= 3
    scores = torch.rand(TOKENS, TOP, generator=generator) + 0.1
    return moe_dispatch(experts, scores, count=EXPERTS, align=ROW_STEP, backend="emulator")


def layer(mode, backend, expected=3, listed=False):
    """(rows of h, rows of y) of the tokens' rows, as numbers; ``listed``: the first GEMM has a list of them."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = routes()
    fp8 = mode == "w4a8_row" or (mode == "w4a8" and not op.many(expected))
    if fp8:
        recipe = "fp8" if op.scale_block(expected, mode) == 128 else "mxfp8"
        q = quantize(x, recipe, rows=None if listed else found.rows, swizzled=True, backend="emulator")
        given = Operand(q.codes, q.scales)
    else:
        given = Operand(x if listed else x[found.rows.clamp(min=0).long()])
    groups = found.offsets[:-1], found.counts
    ones = torch.linspace(0.5, 1.5, EXPERTS)
    common = {"mode": mode, "expected": expected, "groups_ready": mode != "w4a16", "backend": backend}
    first = {"alpha": ones, "alpha_up": ones.flip(0), "routing": found.row_weight, "swiglu": True}
    second = weights(HIDDEN, WIDTH, mode, 3)
    if listed:
        first["rows"] = found.rows
    h = moe_gemm(
        given,
        weights(2 * WIDTH, HIDDEN, mode, 2),
        *groups,
        out_format="mxfp8" if fp8 else "bf16",
        **first,
        **common,
    )
    y = moe_gemm(h, second, *groups, **common).codes
    rows = found.row_of.flatten().long()
    return h, y[rows].float(), rows


@pytest.mark.one_in(3)
@pytest.mark.parametrize("expected", [3, 40], ids=["few", "many"])
@pytest.mark.parametrize("mode", MODES)
def test_both_gemms_of_a_layer(mode, expected):
    """The kernels' h and y against the oracle's; h of the one is what the other reads, scales too.

    Groups begin at any multiple of 8 rows.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # hazards
        h, y, rows = layer(mode, "emulator", expected)
    want_h, want_y, _ = layer(mode, "reference", expected)
    if h.scales is not None:
        assert float((h.codes[rows] != want_h.codes[rows]).float().mean()) < 0.01
    else:
        torch.testing.assert_close(h.codes[rows], want_h.codes[rows], rtol=2.0**-7, atol=1e-3)
    assert float((y - want_y).norm() / want_y.norm()) < 2.0**-7 and float(want_y.norm()) > 1


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize("mode", ["w4a8", "w4a16"])
def test_a_list_of_rows_changes_no_bit(mode, backend):
    """Tokens are cast once, not once a route; the oracle's and the kernel's, each with itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # hazards
        (h, y, rows), (listed_h, listed_y, _) = (layer(mode, backend, listed=listed) for listed in (False, True))
    assert torch.equal(h.codes[rows], listed_h.codes[rows]) and torch.equal(y, listed_y) and y.any()


@pytest.mark.parametrize(
    "rows", [torch.tensor(0, dtype=torch.int32), torch.zeros(16), torch.zeros(2, 8, dtype=torch.int32)]
)
def test_a_list_of_rows_of_another_kind_is_refused(rows):
    x = Operand(torch.zeros(16, 128, dtype=torch.uint8), torch.full((512,), 127, dtype=torch.uint8))
    w = Operand(torch.zeros(2, 1, 1, 4352, dtype=torch.uint8))
    groups = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="rows.*torch.int32"):
        moe_gemm(x, w, *groups, mode="w4a8", rows=rows, backend="reference")


def test_rows_that_name_no_token_are_zeros():
    """The oracle's, as the kernel's: -1, and past the last token."""
    x = Operand(torch.full((4, 128), 0x38, dtype=torch.uint8), torch.full((512,), 127, dtype=torch.uint8))
    w = Operand(torch.full((1, 1, 1, 4352), 120, dtype=torch.uint8))
    groups = torch.zeros(1, dtype=torch.int32), torch.full((1,), 4, dtype=torch.int32)
    rows = torch.tensor([-1, 0, 4, 3], dtype=torch.int32)
    found = moe_gemm(x, w, *groups, mode="w4a8", rows=rows, expected=4, backend="reference").codes
    assert [bool(row.any()) for row in found] == [False, True, False, True]


class HastyTokens(TiledMoeGemm):
    """Its load warp does not wait for the launch before, which writes the tokens."""

    def wait_for_tokens(self) -> None:
        """Do not wait."""


@pytest.mark.parametrize("kind", [TiledMoeGemm, HastyTokens])
def test_tokens_wait_for_the_launch_before(kind, monkeypatch):
    monkeypatch.setattr(op, "TiledMoeGemm", kind)
    with backends.emulating("sm_90a"), emulator.device("sm_90a", checks="race", shims=False) as gpu:
        layer("w4a8", "emulator")
    assert {h.kind for h in gpu.hazards} == ({"dependent_launch_early"} if kind is HastyTokens else set())


def test_groups_of_the_launch_before_are_reported():
    """They are read ahead of the wait for it."""
    experts = torch.tensor([[0], [1]], dtype=torch.int32)
    x = Operand(torch.zeros(16, 128, dtype=torch.uint8), torch.full((512,), 127, dtype=torch.uint8))
    w = Operand(torch.zeros(2, 1, 1, 4352, dtype=torch.uint8))
    for ready in (False, True):
        with backends.emulating("sm_90a"), emulator.device("sm_90a", checks="race", shims=False) as gpu:
            found = moe_dispatch(experts, count=2, align=ROW_STEP, backend="emulator")
            groups = found.offsets[:-1], found.counts
            moe_gemm(x, w, *groups, mode="w4a8", groups_ready=ready, backend="emulator")
        assert {h.kind for h in gpu.hazards} == ({"dependent_launch_early"} if ready else set())


def call(**changes):
    x = torch.zeros(256, 128, dtype=torch.uint8)
    scales = torch.full((1024,), 127, dtype=torch.uint8)
    w = Operand(torch.zeros(2, 1, 1, 4352, dtype=torch.uint8))
    groups = torch.tensor([0, 128], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    given = {"x": Operand(x, scales), "w": w, "offsets": groups[0], "counts": groups[1], "mode": "w4a8"}
    return moe_gemm(**{**given, "backend": "reference", **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mode", {"mode": "nvfp4"}),
        ("x", {"x": Operand(torch.zeros(256, 128)), "mode": "w4a8"}),
        (
            "x",
            {
                "x": Operand(torch.zeros(256, 128).half()),
                "mode": "w4a16",
                "w": Operand(torch.zeros(2, 1, 1, 4368).byte()),
            },
        ),
        ("out_format", {"out_format": "nvfp4", "swiglu": True}),
        ("out_global", {"out_global": torch.ones(2)}),
        ("w.scales", {"w": Operand(torch.zeros(2, 1, 1, 4352, dtype=torch.uint8), torch.zeros(4))}),
        ("w", {"mode": "w4a16"}),
        ("counts", {"counts": torch.tensor([3, -1], dtype=torch.int32)}),
        ("offsets", {"offsets": torch.tensor([4, 128], dtype=torch.int32)}),
        ("offsets", {"offsets": torch.tensor([0, 0], dtype=torch.int32), "counts": torch.ones(2, dtype=torch.int32)}),
        ("expected", {"expected": -1}),
        (
            "rows",
            {
                "rows": torch.zeros(256, dtype=torch.int32),
                "expected": 40,
                "mode": "w4a8_row",
                "w": Operand(torch.zeros(2, 1, 1, 4416).byte()),
            },
        ),
        ("rows", {"rows": torch.zeros(256, dtype=torch.int64)}),
        ("rows", {"rows": torch.zeros(256, dtype=torch.int32), "w": Operand(torch.zeros(2, 64, 128).byte())}),
        ("offsets", {"rows": torch.zeros(128, dtype=torch.int32), "counts": torch.ones(2, dtype=torch.int32)}),
    ],
)
def test_what_is_refused(name, changes):
    assert call().codes.shape == (256, 64)
    with pytest.raises(ArgumentError) as caught:
        call(**changes)
    assert caught.value.name == name


def test_scales_of_many_tokens_are_alike_in_128_of_k():
    """Few may have MXFP8's."""
    x, scales = torch.zeros(256, 128, dtype=torch.uint8), torch.full((1024,), 127, dtype=torch.uint8)
    scales[17] = 126  # row 1, second block
    given = {"x": Operand(x, scales), "mode": "w4a8_row", "w": Operand(torch.zeros(2, 1, 1, 4416).byte())}
    assert call(**given, expected=4).codes.shape == (256, 64)
    with pytest.raises(ArgumentError) as caught:
        call(**given, expected=40)
    assert caught.value.name == "x.scales"
    with pytest.raises(ArgumentError) as caught:
        call(**{**given, "x": Operand(torch.zeros(256, 128).bfloat16())})
    assert caught.value.name == "x"


def test_untiled_weights_have_no_such_mode():
    with pytest.raises(ArgumentError, match="nvfp4, w4a8, mxfp8, bf16"):
        call(w=Operand(torch.zeros(2, 64, 64, dtype=torch.uint8)), mode="w4a16")


def test_tokens_choose_a_tile():
    assert [op.tile_of(n, "w4a8", False) for n in (0, 1, 4, 5, 8, 9, 1000)] == [8, 8, 8, 16, 16, 32, 32]
    assert [op.tile_of(n, "w4a8_row", False) for n in (1, 8, 9, 21, 33, 1000)] == [8, 16, 32, 64, 64, 112]
    assert [op.scale_block(n, "w4a8_row") for n in (1, 8, 9, 1000)] == [32, 32, 128, 128]
    assert op.scale_block(1000, "w4a8") == 32


def test_torch_sees_what_is_written():
    """torch's own check of schema and fake implementation."""
    schema = torch.ops.dsv4.moe_gemm_tiled.default._schema
    assert [x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write] == ["out", "out_scales"]
    x, w = torch.zeros(128, 128, dtype=torch.uint8), torch.zeros(1, 1, 1, 4352, dtype=torch.uint8)
    out, group = torch.zeros(128, 64).bfloat16(), torch.tensor([0], dtype=torch.int32)
    given = {"x": x, "w": w, "out": out, "offsets": group, "counts": group + 2, "limit": 10.0, "formats": "w4a8"}
    given |= {"x_scales": torch.full((512,), 127, dtype=torch.uint8), "out_format": "bf16", "swiglu": False}
    names = inspect.signature(op.Call).parameters
    given |= {"groups_ready": False}
    flat = tuple({**dict.fromkeys(names), **given, "expected": 1, "backend": "reference"}[name] for name in names)
    with torch.no_grad():
        found = torch.library.opcheck(torch.ops.dsv4.moe_gemm_tiled.default, flat)
    assert set(found.values()) == {"SUCCESS"}, found


@pytest.mark.skipif(torch.cuda.is_available(), reason="warms up for the GPU, not for the emulator")
def test_a_warmed_up_call_compiles_nothing():
    wanted = {"K": HIDDEN, "swiglu": True, "routed": True, "out_format": "mxfp8"}, {"K": WIDTH, "alpha": False}
    assert len(op.warm_up(wanted, (3,))) == 2
    groups, counts = routes(), compile_cache.default().counts
    before = counts.compiled, counts.from_disk
    mine = [groups.offsets[:-1], groups.counts]
    x = quantize(torch.randn(TOKENS, WIDTH).bfloat16(), "mxfp8", rows=groups.rows, swizzled=True, backend="reference")
    moe_gemm((x.codes, x.scales), weights(64, WIDTH, "w4a8", 4), *mine, mode="w4a8", expected=3, backend="emulator")
    assert (counts.compiled, counts.from_disk) == before
