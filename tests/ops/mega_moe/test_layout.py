"""The fused MoE's memory: sizes against DeepGEMM's formula, regions, worst routing, what is refused."""

import itertools

import pytest
import torch

from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.loader.mega_moe import get_symm_buffer_size_for_mega_moe
from dsv4lib.ops.mega_moe import Layout, SymmetricBuffer
from dsv4lib.ops.mega_moe.layout import ALIGN, FORMATS, ROW_BLOCK
from dsv4lib.ops.moe_gemm.config import MODES, Config

SHAPES = [
    (1, 8, 384, 2, 512, 256),
    (2, 8, 384, 2, 512, 512),
    (8, 256, 768, 6, 4096, 2048),
    (4, 384, 1152, 6, 7168, 3072),
    (1, 8, 384, 2, 512, 256, "nvfp4"),
    (4, 384, 1152, 6, 7168, 3072, "nvfp4"),
]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_regions_are_those_of_the_formula(sizes):
    """Where DeepGEMM has the region, too, to the byte: tokens are a multiple of its tiles' least common multiple."""
    one = Layout(*sizes)
    theirs = get_symm_buffer_size_for_mega_moe(
        ranks=one.world,
        experts=one.experts,
        tokens_per_rank=one.max_tokens,
        topk=one.topk,
        hidden=one.hidden,
        width=one.intermediate,
        activations={"w4a8": "mxfp8"}.get(one.mode, one.mode),
    )
    own = one.regions()
    names = {"x": "x", "x_scales": "x_sf", "topk_idx": "topk_idx", "topk_weights": "topk_weights", "combine": "combine"}
    assert {name: own[name] for name in names} == {name: theirs[there] for name, there in names.items()}
    assert own["counts"] == 2 * one.experts * 8 and own["routes"] == 2 * one.experts * one.max_tokens * 4


def test_regions_follow_each_other_and_the_views_are_theirs():
    one = Layout(1, 4, 5, 3, 384, 128)
    offsets = one.offsets()
    starts = list(offsets.values())
    assert starts == sorted(starts) and all(start % ALIGN == 0 for start in starts) and one.bytes == starts[-1]
    for (name, size), (start, following) in zip(one.regions().items(), itertools.pairwise(starts), strict=True):
        assert start + size <= following < start + size + ALIGN, name
    buffer = SymmetricBuffer.alone(one)
    assert one.pitch == 16 and buffer.x_scales.shape == (5, 12) and buffer.x_scales.stride() == (16, 1)
    for name in ("x", "x_scales", "topk_idx", "topk_weights", "combine"):
        assert getattr(buffer, name).data_ptr() == buffer.storage.data_ptr() + offsets[name]
    assert buffer.combine.shape == (3, 5, 384) and buffer.topk_idx.dtype == torch.int64


def test_formats_are_those_of_the_gemm():
    """Bits, group and K step, as its kernel multiplies them."""
    for name, one in FORMATS.items():
        m = MODES[name]
        assert one == (m.x_bits, m.block, Config(name).step_k) and m.w_bits == 4
        assert one.step % m.k == 0 and one.step // (4 * m.block) == Config(name).scale_blocks


def test_four_bits_halve_what_tokens_take():
    eight, four = (Layout(2, 4, 8, 2, 512, 256, mode) for mode in FORMATS)
    assert eight.regions()["x"] == 2 * four.regions()["x"] == 8 * 512 and (eight.pitch, four.pitch) == (16, 32)
    buffer = SymmetricBuffer.alone(Layout(1, 4, 8, 2, 256, 512, "nvfp4"))
    assert buffer.x.shape == (8, 128) and buffer.x_scales.shape == (8, 16)
    shapes, rows = buffer.layout.workspace(), buffer.layout.rows
    assert shapes["x_rows"] == (rows, 128) and shapes["x_row_scales"] == (rows // ROW_BLOCK * 4, 512)
    assert shapes["h_rows"] == (rows, 256) and shapes["h_row_scales"] == (rows // ROW_BLOCK * 8, 512)
    with pytest.raises(ArgumentError, match=r"x\.shape"):
        buffer.stage(*(torch.zeros(3, n, dtype=torch.uint8) for n in (256, 16)), torch.zeros(3, 2), torch.zeros(3, 2))


def test_rows_suffice_for_any_routing():
    """All ways to share out routes over two experts of a rank; blocks of 128 rows each."""
    for world, tokens, topk in ((1, 127, 1), (2, 65, 2), (3, 128, 3)):
        one = Layout(world, 2 * world, tokens, topk, 128, 128)
        most = world * tokens
        worst = max(
            sum(-(-n // ROW_BLOCK) * ROW_BLOCK for n in (a, b))
            for a in range(most + 1)
            for b in range(min(most, most * min(topk, 2) - a) + 1)
        )
        assert worst <= one.rows < worst + 2 * ROW_BLOCK
        assert one.workspace()["x_row_scales"] == (one.rows // ROW_BLOCK, 512)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("world", {"world": 0}),
        ("world", {"world": 33}),
        ("experts", {"experts": 9}),
        ("max_tokens", {"max_tokens": 0}),
        ("topk", {"topk": 17}),
        ("hidden", {"hidden": 192}),
        ("intermediate", {"intermediate": 0}),
        ("mode", {"mode": "mxfp8"}),
        ("hidden", {"hidden": 640, "mode": "nvfp4"}),
        ("intermediate", {"intermediate": 384, "mode": "nvfp4"}),
        ("max_tokens", {"max_tokens": 1 << 20, "hidden": 1 << 15}),
    ],
)
def test_layouts_that_do_not_exist(name, change):
    sizes = {"world": 2, "experts": 8, "max_tokens": 64, "topk": 8, "hidden": 512, "intermediate": 256}
    with pytest.raises(ConfigError) as caught:
        Layout(**{**sizes, **change})
    assert caught.value.name == name


def test_memory_that_is_refused():
    one = Layout(2, 4, 8, 2, 128, 128)
    storage = torch.zeros(one.bytes + ALIGN, dtype=torch.uint8)
    storage = storage[-storage.data_ptr() % ALIGN :]
    here = storage.data_ptr()
    for name, given in (
        ("rank", (one, 2, storage, [here, here])),
        ("storage", (one, 0, storage[:100], [here, here])),
        ("addresses", (one, 0, storage, [here])),
        ("addresses", (one, 1, storage, [here, here + 128])),
        ("addresses", (one, 0, storage, [here, here + 64])),
    ):
        with pytest.raises(ArgumentError) as caught:
            SymmetricBuffer.over(*given)
        assert caught.value.name == name
    with pytest.raises(ArgumentError, match=r"layout\.world"):
        SymmetricBuffer.alone(one)
    buffer = SymmetricBuffer.over(one, 0, storage, [here, here])
    good = (
        torch.zeros(3, 128, dtype=torch.uint8),
        torch.zeros(3, 4, dtype=torch.uint8),
        torch.zeros(3, 2, dtype=torch.int64),
        torch.zeros(3, 2),
    )
    for name, place, bad in (
        ("x.shape", 0, torch.zeros(9, 128, dtype=torch.uint8)),
        ("x.shape", 0, torch.zeros(3, 64, dtype=torch.uint8)),
        ("x.dtype", 0, torch.zeros(3, 128)),
        ("x_scale.shape", 1, torch.zeros(3, 8, dtype=torch.uint8)),
        ("topk_idx.shape", 2, torch.zeros(2, 2, dtype=torch.int64)),
        ("topk_idx.dtype", 2, torch.zeros(3, 2)),
        ("topk_weights.dtype", 3, torch.zeros(3, 2, dtype=torch.float64)),
    ):
        given = [*good]
        given[place] = bad
        with pytest.raises(ArgumentError) as caught:
            buffer.stage(*given)
        assert caught.value.name == name
    assert buffer.stage(*good) == 3
