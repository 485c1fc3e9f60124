"""DeepGEMM's names: packing, layouts with their inverses, the transform in every mode, buffer sizes."""

from __future__ import annotations

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import nvfp4, weight_modes
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.loader import mega_moe
from dsv4lib.loader.operands import deinterleave, plane_bytes

E, H, I = 2, 256, 128


def layer(seed: int, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes, E4M3 scales and global scales of E experts."""
    generator = torch.Generator().manual_seed(seed)
    parts = [nvfp4.quantize(0.02 * torch.randn(rows, cols, generator=generator)) for _ in range(E)]
    stacked = (torch.stack([getattr(q, name) for q in parts]) for name in ("packed", "scales", "global_scale"))
    w, s, g = stacked
    return w, s.view(torch.float8_e4m3fn), g


W13, S13, G1 = layer(1, 2 * I, H)
W2, S2, G2 = layer(2, H, I)


def transform(mode="nvfp4", policy="any", **changes):
    arguments = {"l1": (W13, S13), "l2": (W2, S2), "g1": G1, "g2": G2} | changes
    return mega_moe.transform_nvfp4_weights_for_mega_moe(
        arguments["l1"],
        arguments["l2"],
        l1_weight_scale_2=arguments["g1"],
        l2_weight_scale_2=arguments["g2"],
        precision=mode,
        weight_policy=policy,
    )


def test_pack_by_hand_and_back():
    raw = torch.tensor([[0x01, 0x02, 0x03, 0x84]], dtype=torch.uint8)
    packed = mega_moe.pack_sf(raw)
    assert packed.dtype == torch.int32 and packed.tolist() == [[0x84030201 - 2**32]]
    every = torch.arange(256).to(torch.uint8).repeat(3, 5)
    assert torch.equal(mega_moe.unpack_sf(mega_moe.pack_sf(every)), every)
    assert torch.equal(mega_moe.pack_sf(every).view(torch.uint8), every), "little endian: the bytes stay where they are"


def test_utccp_layout_is_the_index_formula_and_has_an_inverse():
    rows = torch.arange(384, dtype=torch.int32)[:, None].expand(384, 3).contiguous()
    moved = mega_moe.to_utccp_layout(rows[None])[0]
    assert sorted(map(mega_moe.utccp_row, range(384))) == list(range(384))
    for r in range(384):
        assert moved[mega_moe.utccp_row(r)].tolist() == [r] * 3
    assert torch.equal(mega_moe.from_utccp_layout(moved), rows)
    assert torch.equal(mega_moe.to_utccp_layout(mega_moe.from_utccp_layout(rows)), rows)
    assert [mega_moe.utccp_row(r) for r in (0, 1, 32, 96, 127, 128, 161)] == [0, 4, 1, 3, 127, 128, 133]


def test_utccp_and_the_128x4_swizzle_are_one_layout():
    """Four packed scales a row: the words of a 128 x 4 block in UTCCP order are its swizzled image."""
    from dsv4lib.formats import scale_swizzle

    raw = torch.randint(256, (128, 4), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    words = mega_moe.to_utccp_layout(mega_moe.pack_sf(raw))
    assert torch.equal(words.view(torch.uint8).flatten(), scale_swizzle.swizzle(raw))


def test_mn_major_is_a_view_with_aligned_columns():
    x = torch.arange(2 * 6 * 3, dtype=torch.int32).reshape(2, 6, 3)
    got = mega_moe.mn_major(x)
    assert torch.equal(got, x) and got.stride() == (24, 1, 8)


@pytest.mark.parametrize("mode", weight_modes.MODES)
def test_transform_of_every_mode_turns_back(mode):
    done = transform(mode)
    l1, l2 = done
    assert l1 is done.l1 and l2 is done.l2
    per_plane = 1 if mode == "bf16" else 2
    assert len(l1) == len(l2) == per_plane * weight_modes.MODES[mode].planes
    assert (done.l1_alphas.shape, done.l2_alphas.shape) == ((E, 2), (E,))
    for e in range(E):
        gate, up = (
            weight_modes.convert(NVFP4Tensor(w, s, G1[e]), mode)
            for w, s in zip(W13[e].chunk(2), S13[e].chunk(2), strict=True)
        )
        down = weight_modes.convert(NVFP4Tensor(W2[e], S2[e], G2[e]), mode)
        assert done.l1_alphas[e].tolist() == [gate.alpha, up.alpha] and done.l2_alphas[e] == down.alpha
        for i in range(weight_modes.MODES[mode].planes):
            for found, wanted in ((l1, (gate, up)), (l2, (down,))):
                codes, *scales = (t[e] for t in found[per_plane * i : per_plane * (i + 1)])
                halves = deinterleave(codes) if len(wanted) == 2 else (codes,)
                for half, weight in zip(halves, wanted, strict=True):
                    assert torch.equal(half.view(torch.uint8), plane_bytes(weight.planes[i])[0].view(torch.uint8))
                for sf in scales:
                    back = mega_moe.unpack_sf(mega_moe.from_utccp_layout(sf))
                    halves = deinterleave(back) if len(wanted) == 2 else (back,)
                    for half, weight in zip(halves, wanted, strict=True):
                        assert torch.equal(half, plane_bytes(weight.planes[i])[1])


def test_dtypes_and_strides_that_deepgemm_asserts():
    (w13, s13), (w2, s2) = transform("nvfp4")
    assert (w13.dtype, s13.dtype) == (torch.int8, torch.int32) and w13.is_contiguous()
    assert s13.shape == (E, 2 * I, H // 64) and s13.stride() == (2 * I * (H // 64), 1, 2 * I)
    (_, sf32), _ = transform("ue8m0_naive")
    assert sf32.shape == (E, 2 * I, H // 128), "one scale per 32: half as many words"


def test_deepgemms_own_transform():
    """MXFP4 scales packed beforehand: the same rows as ours in the mode without a new conversion."""
    ours = transform("nvfp4")
    packed13, packed2 = (mega_moe.pack_sf(s) for s in (S13, S2))
    (w13, s13), (w2, s2) = mega_moe.transform_weights_for_mega_moe((W13, packed13), (W2, packed2))
    for got, wanted in ((w13, ours.l1[0]), (w2, ours.l2[0])):
        assert torch.equal(got, wanted.view(torch.uint8))
    assert torch.equal(s13, ours.l1[1]) and torch.equal(s2, ours.l2[1])


def test_gate_and_up_may_have_their_own_scales():
    both = torch.stack([G1, 2 * G1], dim=1)
    assert transform(g1=both).l1_alphas.tolist() == both.tolist()


@pytest.mark.parametrize("mode", [m.name for m in weight_modes.MODES.values() if not m.exact])
def test_the_policy_refuses_what_changes_a_weight(mode):
    with pytest.raises(ArgumentError, match='precision=.*weight_policy="any"'):
        transform(mode, "nvfp4-only")
    assert transform(mode, "any").l1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: transform(policy="lossless"), "weight_policy='lossless'"),
        (lambda: transform("fp8"), "precision='fp8'"),
        (lambda: transform(l1=(W13.float(), S13)), r"l1_weights\[0\].dtype"),
        (lambda: transform(l1=(W13, S13.float())), r"l1_weights\[1\].dtype"),
        (lambda: transform(l1=(W13, S13[..., :3])), r"l1_weights\[1\].shape"),
        (lambda: transform(l1=(W13[:, :200], S13[:, :200])), r"l1_weights\[0\].shape"),
        (lambda: transform(l2=(W2[:1], S2[:1])), "l2_weights="),
        (lambda: transform(g1=G1.double()), "l1_weight_scale_2"),
        (lambda: transform(g1=G1[:1]), "l1_weight_scale_2"),
        (lambda: transform(g2=-G2), "l2_weight_scale_2"),
        (lambda: mega_moe.pack_sf(torch.zeros(4, 6, dtype=torch.uint8)), "multiple of 4"),
        (lambda: mega_moe.unpack_sf(torch.zeros(4, 6)), "packed.dtype"),
        (lambda: mega_moe.to_utccp_layout(torch.zeros(100, 1)), "multiple of 128"),
        (lambda: size(activations="fp8"), "activations='fp8'"),
        (lambda: size(experts=63), "experts=63"),
        (lambda: size(hidden=7168 + 128, activations="nvfp4"), "hidden=7296"),
        (lambda: size(topk=0), "topk=0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def size(**changes):
    settings = {"ranks": 8, "experts": 384, "tokens_per_rank": 8192, "topk": 6, "hidden": 7168, "width": 3072}
    return mega_moe.get_symm_buffer_size_for_mega_moe(**(settings | changes))


def test_buffer_sizes_by_hand():
    """Pro on 8 ranks. 8192 tokens round up to 8448 = 22 x 384; a ring of 768 Ki tokens is a multiple of 384 already."""
    assert mega_moe.token_alignment() == 384
    got, ring = size(ring_tokens=768 * 1024), 768 * 1024
    assert got["x"] == 8448 * 7168 and got["x_sf"] == 8448 * 7168 // 32
    assert got["topk_idx"] == 8448 * 6 * 8 and got["topk_weights"] == 8448 * 6 * 4
    assert got["l1_acts"] == ring * 7168 and got["l2_acts"] == ring * 3072
    assert got["l1_acts_sf"] == ring // 8 * 128 * 224, "tiles of 8 tokens are padded to 128 rows of scales"
    assert got["combine"] == 6 * 8448 * 7168 * 2
    assert round((got["l1_acts"] + got["l2_acts"]) / 1e9, 1) == 8.1
    four = size(activations="nvfp4", ring_tokens=768 * 1024)
    assert four["x"] == got["x"] // 2 and four["x_sf"] == 2 * got["x_sf"] and four["l1_topk_weights"] == 0
    plain = size(activations="bf16", ring_tokens=768 * 1024)
    assert plain["x"] == 2 * got["x"] and plain["x_sf"] == plain["l1_acts_sf"] == 0


def test_the_default_ring_holds_every_token():
    worst = 8 * 8448 * 6 + 48 * 191
    assert mega_moe.ring_limit(8, 384, 8448, 6) == -(-worst // 384) * 384
    assert size()["l1_acts"] == mega_moe.ring_limit(8, 384, 8448, 6) * 7168
    assert mega_moe.ring_limit(64, 64, 384, 6) == -(-(64 * 384 + 191) // 384) * 384, "one expert a rank: once at most"
