"""The fused MoE by DeepGEMM's names: its own transform of weights, numbers against fp64, counts, what is refused."""

import pytest
import torch

from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import e4m3, fp8_block, mxfp4, scale_swizzle, ue8m0
from dsv4lib.layers.deepgemm_mega_moe import fp8_fp4_mega_moe, get_symm_buffer_for_mega_moe, operands_of
from dsv4lib.loader.mega_moe import pack_sf, transform_weights_for_mega_moe
from dsv4lib.ops.mega_moe import Layout, SymmetricBuffer
from dsv4lib.reference import mega_moe as oracle

EXPERTS, TOKENS, TOPK, HIDDEN, WIDTH = 4, 24, 2, 384, 256
SIZES = EXPERTS, TOKENS, TOPK, HIDDEN, WIDTH
LIMIT = 3.0


class Alone:
    """A group of so many ranks, of which this is the first."""

    def __init__(self, ranks=1):
        self.ranks = ranks

    def size(self):
        return self.ranks

    def rank(self):
        return 0


def quantised(seed=0):
    """Gate and up joined, and down, in MXFP4."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([0.5, 1.0, 2.0, 4.0])[:, None, None]
    joined = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * sizes * 2 / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) * 2 / WIDTH**0.5
    return mxfp4.quantize(joined), mxfp4.quantize(down)


def transformed():
    """What DeepGEMM's transform hands to its kernel."""
    layers = [(q.packed.view(torch.int8), pack_sf(q.scales)) for q in quantised()]
    return transform_weights_for_mega_moe(*layers)


def tokens(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    q = fp8_block.quantize_activation(torch.randn(count, HIDDEN, generator=generator) * 2, 32)
    ids = torch.rand(count, EXPERTS, generator=generator).topk(TOPK).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.15] = -1
    return q, ids, torch.rand(count, TOPK, generator=generator) + 0.1


def want(given, limit):
    q, ids, topk_weights = given
    numbers = e4m3.decode(q.codes, torch.float64) * ue8m0.decode(q.scales, torch.float64).repeat_interleave(32, -1)
    joined, down = (mxfp4.dequantize(one, torch.float64) for one in quantised())
    gate, up = joined.chunk(2, 1)
    return oracle.mega_moe([(numbers, ids, topk_weights.double())], gate, down, up, limit)[0]


def near(found, truth):
    return 0 < float((found.double() - truth).norm() / truth.norm()) < 2**-8


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_a_rank_alone(backend):
    """With and without a clamp; counts over both calls; memory that is destroyed."""
    l1, l2 = operands_of(*transformed())
    buffer, given = get_symm_buffer_for_mega_moe(Alone(), *SIZES, backend=backend), tokens(17)
    q, ids, topk_weights = given
    assert buffer.x_sf.shape == (TOKENS, 3) and buffer.x_sf.stride() == (4, 1)  # rows of scales start on 16 bytes
    buffer.x[:17].copy_(q.codes.view(torch.float8_e4m3fn))
    buffer.x_sf[:17].copy_(pack_sf(q.scales))
    buffer.topk_idx[:17].copy_(ids)
    buffer.topk_weights[:17].copy_(topk_weights)
    y = torch.empty(17, HIDDEN).bfloat16()
    fp8_fp4_mega_moe(y, l1, l2, buffer, activation_clamp=LIMIT)
    assert near(y, want(given, LIMIT)) and not near(y, want(given, float("inf")))
    fp8_fp4_mega_moe(y, l1, l2, buffer, buffer.recv_stats, (1, 1, 32), "swiglu", None, False)
    assert near(y, want(given, float("inf")))
    assert torch.equal(buffer.recv_stats, 2 * ids[ids >= 0].bincount(minlength=EXPERTS).int())
    buffer.destroy()
    with pytest.raises(ArgumentError, match=r"^sym_buffer='?destroyed"):
        fp8_fp4_mega_moe(y, l1, l2, buffer)


def test_scales_keep_their_rows():
    """Against the swizzle of the rows themselves; codes are the same memory."""
    (codes, scales), second = transformed()
    l1, l2 = operands_of((codes, scales), second)
    joined, down = quantised()
    for one, image, rows in ((joined, l1, 2 * WIDTH), (down, l2, HIDDEN)):
        expected = one.scales
        if rows == 2 * WIDTH:
            gate, up = (part.unflatten(1, (-1, 8)) for part in expected.chunk(2, 1))
            expected = torch.stack([gate, up], 2).flatten(1, 3)
        assert torch.equal(image.scales, scale_swizzle.swizzle(expected.view(torch.uint8)))
    assert l1.codes.data_ptr() == codes.data_ptr() and l2.codes.data_ptr() == second[0].data_ptr()


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("mma_type", (Alone(), *SIZES), {"mma_type": "bf16xbf16"}),
        ("activation", (Alone(), *SIZES), {"activation": "gelu"}),
        ("use_fp8_dispatch", (Alone(), *SIZES), {"use_fp8_dispatch": False}),
        ("make_buffer", (Alone(2), *SIZES), {}),
        (
            "make_buffer",
            (Alone(), *SIZES),
            {"make_buffer": lambda one: SymmetricBuffer.alone(Layout(1, 4, 8, 2, 256, 128))},
        ),
        ("hidden", (Alone(), 4, 24, 2, 320, 256), {}),
        ("experts", (Alone(3), *SIZES), {}),
        ("group", (None, *SIZES), {}),
        ("backend", (Alone(), *SIZES), {"backend": "xyz"}),
    ],
)
def test_buffers_that_are_refused(name, given, options):
    with pytest.raises((ArgumentError, ConfigError)) as caught:
        get_symm_buffer_for_mega_moe(*given, **options)
    assert caught.value.name == name


def test_calls_and_weights_that_are_refused():
    (codes, scales), second = transformed()
    l1, l2 = operands_of((codes, scales), second)
    buffer, y = get_symm_buffer_for_mega_moe(Alone(), *SIZES, backend="reference"), torch.empty(3, HIDDEN).bfloat16()
    buffer.topk_idx.fill_(-1)
    for name, given, options in (
        ("recipe", (y, l1, l2, buffer), {"recipe": (1, 1, 16)}),
        ("activation", (y, l1, l2, buffer), {"activation": "silu"}),
        ("cumulative_local_expert_recv_stats", (y, l1, l2, buffer, torch.zeros(4).int()), {}),
        ("y", (y.float(), l1, l2, buffer), {}),
        ("y", (torch.empty(25, HIDDEN).bfloat16(), l1, l2, buffer), {}),
        ("clamp", (y, l1, l2, buffer), {"activation_clamp": -1.0}),
        ("l1_weights", (y, (codes, scales), l2, buffer), {}),
    ):
        with pytest.raises(ArgumentError) as caught:
            fp8_fp4_mega_moe(*given, **options)
        assert caught.value.name.startswith(name), caught.value
    for name, bad in (
        ("l1_weights[0]", ((codes.int(), scales), second)),
        ("l1_weights[1]", ((codes, scales[:, :, :2]), second)),
        ("l2_weights[1]", ((codes, scales), (second[0], second[1].float()))),
        ("l2_weights[0].shape", ((codes, scales), (codes, scales))),
    ):
        with pytest.raises(ArgumentError) as caught:
            operands_of(*bad)
        assert caught.value.name == name
