"""The fused MoE by FlashInfer's names: order of weights, factors, numbers against fp64, what is refused."""

import pytest
import torch

from dsv4lib import emulator
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import nvfp4, scale_swizzle
from dsv4lib.layers.flashinfer_mega_moe import get_symm_buffer_for_mega_moe, nvfp4_mega_moe, operands_of
from dsv4lib.ops.mega_moe import SymmetricBuffer
from dsv4lib.reference import mega_moe as oracle
from tests.cases import cases

EXPERTS, TOKENS, TOPK, HIDDEN, WIDTH = 4, 24, 2, 512, 256
SIZES = EXPERTS, TOKENS, TOPK, HIDDEN, 2 * WIDTH
NORM = torch.tensor([32.0, 64.0, 16.0, 32.0])  # powers of two: their inverses are exact
LIMIT = 6.0


def weights(seed=0):
    """Gate, up and down of all experts as NVFP4 with its own global scale: quantised and, without that, as numbers."""
    generator, found = torch.Generator().manual_seed(seed), []
    for rows, k in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        q = [nvfp4.quantize(torch.randn(rows, k, generator=generator), 0.002) for _ in range(EXPERTS)]
        numbers = torch.stack([nvfp4.dequantize(one, torch.float64) for one in q]) / float(q[0].global_scale)
        found.append((torch.stack([one.packed for one in q]), torch.stack([one.scales for one in q]), numbers))
    return found


def their_order(gate, up):
    """Rows as FlashInfer's kernel has them: 16 of gate, 16 of up, and so on, one by one."""
    out = torch.empty(EXPERTS, 2 * WIDTH, *gate.shape[2:], dtype=gate.dtype)
    for row in range(WIDTH):
        place = row // 16 * 32 + row % 16
        out[:, place], out[:, place + 16] = gate[:, row], up[:, row]
    return out


def transformed(made, own=slice(None)):
    """What FlashInfer's preprocessing hands to its kernel, of some experts."""
    (gate, gate_scales, _), (up, up_scales, _), (down, down_scales, _) = made
    fp4, layers = torch.float4_e2m1fn_x2, []
    both = (their_order(gate, up), their_order(gate_scales, up_scales)), (down, down_scales)
    for codes, scales in both:
        image = scale_swizzle.swizzle(scales[own].view(torch.float8_e4m3fn))
        layers.append((codes[own].contiguous().view(fp4).transpose(1, 2), image))
    return layers


def alphas():
    return torch.tensor([0.8, 1.0, 1.2, 0.9]) * 1.6e-3, torch.tensor([1.0, 0.7, 0.9, 1.1]) * 2e-3 / NORM


def tokens(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    q = nvfp4.quantize(torch.randn(count, HIDDEN, generator=generator), 1.0)
    ids = torch.rand(count, EXPERTS, generator=generator).topk(TOPK).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.15] = -1
    return q, ids, torch.rand(count, TOPK, generator=generator) + 0.1


def fill(buffer, given):
    q, ids, topk_weights = given
    buffer.x[: len(ids)].copy_(q.packed.view(torch.float4_e2m1fn_x2))
    buffer.x_sf[: len(ids)].copy_(q.scales.view(torch.float8_e4m3fn))
    buffer.topk_idx[: len(ids)].copy_(ids)
    buffer.topk_weights[: len(ids)].copy_(topk_weights)


def want(given, limit=LIMIT, weighted="l1"):
    q, ids, topk_weights = given
    gate, up, down = (numbers for *_, numbers in weights())
    first, second = (alpha.double()[:, None, None] for alpha in alphas())
    rounding = oracle.Rounding(1 / NORM, weighted)
    routes = [(nvfp4.dequantize(q, torch.float64), ids, topk_weights.double())]
    # down has the inverse of the scale of h beside it: factors are of codes times block scales
    return oracle.mega_moe(
        routes, gate * first, down * second * NORM.double()[:, None, None], up * first, limit, rounding
    )[0]


def near(found, truth):
    return 0 < float((found.double() - truth).norm() / truth.norm()) < 2**-8


def buffer_of(own=slice(None), rank=0, world=1, **options):
    first, second = alphas()
    factors = {"fc1_alpha": first[own], "fc2_alpha": second[own], "fc1_norm_const": NORM[own]}
    given = {"gate_up_clamp": LIMIT, **factors, **options}
    return get_symm_buffer_for_mega_moe(*SIZES, rank, world, **given)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_a_rank_alone(backend):
    """Clamp, no clamp from a call on, tokens that are left out, all that there is room for."""
    l1, l2 = operands_of(*transformed(weights()))
    buffer, given = buffer_of(backend=backend), tokens(17)
    buffer.topk_idx.fill_(-1)
    fill(buffer, given)
    y = torch.empty(17, HIDDEN).bfloat16()
    nvfp4_mega_moe(y, l1, l2, buffer, num_tokens=17)
    assert near(y, want(given))
    whole = torch.empty(TOKENS, HIDDEN).bfloat16()
    nvfp4_mega_moe(whole, l1, l2, buffer, activation_clamp=0.5)
    assert near(whole[:17], want(given, 0.5)) and not whole[17:].any() and buffer.gate_up_clamp == 0.5
    nvfp4_mega_moe(y[:0], l1, l2, buffer, num_tokens=0)
    new = nvfp4_mega_moe(None, l1, l2, buffer, num_tokens=17, swiglu_alpha=1.0, swiglu_beta=0.0, sync=True)
    assert torch.equal(new, whole[:17])
    after = buffer_of(backend=backend, apply_topk_in_fc1=False, gate_up_clamp=None)
    fill(after, given)
    nvfp4_mega_moe(y, l1, l2, after, num_tokens=17)
    truth = want(given, float("inf"), "l2")
    assert near(y, truth) and not near(y, want(given, float("inf"))) and not near(y, want(given, LIMIT, "l2"))


@pytest.mark.parametrize("counts", cases(full=[[3, 17]]), ids=str)
def test_two_ranks(counts):
    """Ranks' own memory and experts, factors of both."""
    given, outs = [tokens(count, seed=count) for count in counts], []
    with emulator.devices(2, shims=False) as gpus:
        storages = []

        def make(rank):
            def over(layout):
                if not storages:
                    parts = gpus.symmetric(layout.bytes, torch.uint8)
                    storages.extend(parts.tensor(r) for r in range(2))
                return SymmetricBuffer.over(layout, rank, storages[rank], [x.data_ptr() for x in storages])

            return over

        for rank in range(2):
            own = slice(2 * rank, 2 * rank + 2)
            buffer = buffer_of(own, rank, 2, make_buffer=make(rank), backend="emulator")
            assert buffer.num_experts_per_rank == 2
            fill(buffer, given[rank])
            outs.append(torch.empty(counts[rank], HIDDEN).bfloat16())
            with gpus.on(rank):
                operands = operands_of(*transformed(weights(), own))
                nvfp4_mega_moe(outs[-1], *operands, buffer, num_tokens=counts[rank])
        gpus.synchronize()
        assert not gpus.hazards
    assert all(near(out, want(one)) for out, one in zip(outs, given, strict=True))


def test_rows_are_ordered_anew_once_and_scales_with_them():
    made = weights()
    l1, l2 = operands_of(*transformed(made))
    (gate, gate_scales, _), (up, up_scales, _), (down, _, _) = made
    scales = scale_swizzle.unswizzle(l1.scales, 2 * WIDTH, HIDDEN // 16)
    for row in (0, 7, 8, 15, 16, 100, WIDTH - 1):
        place = row // 8 * 16 + row % 8
        assert torch.equal(l1.codes[:, place], gate[:, row]) and torch.equal(l1.codes[:, place + 8], up[:, row])
        assert torch.equal(scales[:, place], gate_scales[:, row]) and torch.equal(
            scales[:, place + 8], up_scales[:, row]
        )
    assert torch.equal(l2.codes, down)
    theirs = transformed(made)[1][0]
    assert operands_of(*transformed(made)[:1], (theirs, l2.scales))[1].codes.data_ptr() == theirs.data_ptr()


def test_numbers_for_all_experts():
    buffer = get_symm_buffer_for_mega_moe(*SIZES, 0, 1, fc1_alpha=2.0, fc1_norm_const=4.0)
    assert buffer.fc1_alpha.tolist() == [2.0] * 4 and buffer.fc2_alpha.tolist() == [1.0] * 4
    assert buffer.factors()["l1_alphas"].tolist() == [[2.0, 2.0]] * 4
    assert buffer.factors()["l2_act_scales"].tolist() == [0.25] * 4 and buffer.gate_up_clamp is None
    for one, number in ((buffer.fc1_alpha, 8.0), (buffer.fc2_alpha, 3.0), (buffer.fc1_norm_const, 16.0)):
        one.fill_(number)  # a later call reads it
    assert [x.flatten().tolist() for x in buffer.factors().values()] == [[8.0] * 8, [3.0] * 4, [0.0625] * 4]
    assert buffer.intermediate == 2 * WIDTH and buffer.x.shape == (TOKENS, HIDDEN // 2)
    assert buffer.x_sf.shape == (TOKENS, HIDDEN // 16)


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("hidden", (4, 24, 2, 384, 512, 0, 1), {}),
        ("intermediate", (4, 24, 2, 512, 511, 0, 1), {}),
        ("intermediate", (4, 24, 2, 512, 256, 0, 1), {}),
        ("topk", (4, 24, 17, 512, 512, 0, 1), {}),
        ("experts", (4, 24, 2, 512, 512, 0, 3), {}),
        ("rank", (4, 24, 2, 512, 512, 2, 2), {}),
        ("make_buffer", (4, 24, 2, 512, 512, 0, 2), {}),
        (
            "make_buffer",
            (*SIZES, 0, 1),
            {"make_buffer": lambda one: SymmetricBuffer.alone(type(one)(1, 8, 8, 2, 256, 256))},
        ),
        ("activation_clamp", (*SIZES, 0, 1), {"gate_up_clamp": 1.0, "activation_clamp": 2.0}),
        ("gate_up_clamp", (*SIZES, 0, 1), {"gate_up_clamp": -1.0}),
        ("fc1_alpha", (*SIZES, 0, 1), {"fc1_alpha": torch.ones(3)}),
        ("fc2_alpha", (*SIZES, 0, 1), {"fc2_alpha": torch.ones(4).double()}),
        ("fc1_norm_const", (*SIZES, 0, 1), {"fc1_norm_const": 0.0}),
        ("fc1_norm_const", (*SIZES, 0, 1), {"fc1_norm_const": 1e-40}),
        ("fc1_norm_const", (*SIZES, 0, 1), {"fc1_norm_const": torch.tensor([1.0, 1e-40, 1.0, 1.0])}),
        ("fc1_norm_const", (*SIZES, 0, 1), {"fc1_norm_const": torch.tensor([1.0, torch.nan, 1.0, 1.0])}),
        ("fc1_alpha", (*SIZES, 0, 1), {"fc1_alpha": 10**400}),
        ("fc2_alpha", (*SIZES, 0, 1), {"fc2_alpha": float("nan")}),
        ("backend", (*SIZES, 0, 1), {"backend": "xyz"}),
        ("activation", (*SIZES, 0, 1), {"activation": "situ", "situ_beta": 1.0}),
        ("swiglu_alpha", (*SIZES, 0, 1), {"swiglu_alpha": 1.702, "swiglu_beta": 1.0}),
        ("swiglu_beta", (*SIZES, 0, 1), {"swiglu_alpha": 1.0, "swiglu_beta": 1.0}),
        ("situ_beta", (*SIZES, 0, 1), {"situ_beta": 1.0}),
        ("situ_linear_beta", (*SIZES, 0, 1), {"situ_linear_beta": 1.0}),
        ("enable_in_kernel_fc2_reduce", (*SIZES, 0, 1), {"enable_in_kernel_fc2_reduce": True}),
        ("defer_topk_reduce", (*SIZES, 0, 1), {"defer_topk_reduce": True}),
        ("combine_dtype", (*SIZES, 0, 1), {"combine_dtype": "mxfp8"}),
        ("knobs", (*SIZES, 0, 1), {"knobs": {"flag_batch": 2}}),
    ],
)
def test_sizes_and_factors_that_are_refused(name, sizes, options):
    with pytest.raises((ArgumentError, ConfigError)) as caught:
        get_symm_buffer_for_mega_moe(*sizes, **options)
    assert caught.value.name == name


def test_calls_that_are_refused():
    layers = transformed(weights())
    l1, l2 = operands_of(*layers)
    buffer, y = buffer_of(backend="reference"), torch.empty(3, HIDDEN).bfloat16()
    buffer.topk_idx.fill_(-1)
    for name, given, options in (
        ("num_tokens", (y, l1, l2, buffer), {"num_tokens": 25}),
        ("y", (y, l1, l2, buffer), {"num_tokens": 4}),
        ("y", (y.float(), l1, l2, buffer), {"num_tokens": 3}),
        ("transformed_l1", (y, layers[0], l2, buffer), {"num_tokens": 3}),
        ("gate_up_clamp", (y, l1, l2, buffer), {"num_tokens": 3, "gate_up_clamp": float("nan")}),
        ("swiglu_alpha", (y, l1, l2, buffer), {"num_tokens": 3, "swiglu_alpha": 1.702}),
    ):
        with pytest.raises(ArgumentError) as caught:
            nvfp4_mega_moe(*given, **options)
        assert caught.value.name.startswith(name), caught.value
    buffer.destroy()
    with pytest.raises(ArgumentError, match=r"^symm_buffer='?destroyed"):
        nvfp4_mega_moe(y, l1, l2, buffer, num_tokens=3)


def test_weights_that_are_refused():
    (codes, scales), second = transformed(weights())
    for name, bad in (
        ("transformed_l1[0]", (codes.view(torch.uint8).contiguous(), scales)),
        ("transformed_l1[0]", (codes.view(torch.uint8).int(), scales)),
        ("transformed_l1[1].dtype", (codes, scales.view(torch.int8))),
        ("transformed_l1[1].shape", (codes, scales[:, :512])),
    ):
        with pytest.raises(ArgumentError) as caught:
            operands_of(bad, second)
        assert caught.value.name == name
    with pytest.raises(ArgumentError, match=r"^transformed_l2\[0\]\.shape"):
        operands_of((codes, scales), (second[0][..., :256], scale_swizzle.swizzle(torch.zeros(4, 256, 16).byte())))
