"""Experts of the fused MoE as an engine calls them: life cycle, numbers against fp64, two emulated ranks."""

from typing import NamedTuple

import pytest
import torch

from dsv4lib import emulator
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e4m3, mxfp4, nvfp4, ue8m0
from dsv4lib.layers.mega_moe import FACTORS, FINAL, MegaMoeExperts
from dsv4lib.ops.mega_moe import Layout, SymmetricBuffer
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.reference import mega_moe as oracle
from tests.cases import cases

ONE, TWO = Layout(1, 4, 24, 2, 256, 128), Layout(2, 4, 24, 2, 512, 128)
NVFP4_ONE, NVFP4_TWO = Layout(1, 4, 24, 2, 512, 256, "nvfp4"), Layout(2, 4, 24, 2, 256, 512, "nvfp4")
X_SCALE, H_SCALES = torch.tensor(6.0 / nvfp4.RANGE), torch.tensor([8.0, 6.0, 5.0, 9.0]) / nvfp4.RANGE
LIMIT = 3.0


class Four(NamedTuple):
    """Matrices of NVFP4, as `mxfp4.MXFP4Tensor` has them, and their global scales."""

    packed: torch.Tensor
    scales: torch.Tensor
    globals: torch.Tensor
    numbers: torch.Tensor


def four_bits(w, mode):
    """Quantise [E, N, K], each matrix with a global scale of its own."""
    if mode == "w4a8":
        q = mxfp4.quantize(w)
        return Four(q.packed, q.scales, None, mxfp4.dequantize(q, torch.float64))
    found = [nvfp4.quantize(one) for one in w]
    numbers = [nvfp4.dequantize(q, torch.float64) for q in found]
    parts = ([getattr(q, name) for q in found] for name in ("packed", "scales", "global_scale"))
    return Four(*(torch.stack(list(part)) for part in (*parts, numbers)))


def weights(layout, seed=0):
    """Gate, up and down of all experts."""
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = (layout.intermediate, layout.hidden), (layout.hidden, layout.intermediate)
    sizes = torch.tensor([0.5, 1.0, 2.0, 4.0])[: layout.experts, None, None]
    return [
        four_bits(torch.randn(layout.experts, *shape, generator=generator) * sizes * 2 / shape[1] ** 0.5, layout.mode)
        for shape in (wide, wide, narrow)
    ]


def loaded(layout, rank=0, **options):
    """A layer with its rank's weights, not final."""
    layer = MegaMoeExperts(layout, rank, limit=LIMIT, **options)
    own = slice(rank * layout.local, (rank + 1) * layout.local)
    gate, up, down = weights(layout)
    factors = {}
    if layout.mode == "nvfp4":
        factors = {
            "w13_scale_2": torch.stack([gate.globals, up.globals], 1)[own],
            "w2_scale_2": down.globals[own],
            "input_scales": torch.stack([X_SCALE.expand(4), H_SCALES], 1)[own],
        }
    layer.load_state_dict(
        {
            **factors,
            "w13": torch.cat([gate.packed, up.packed], 1)[own],
            "w13_scale": torch.cat([gate.scales, up.scales], 1)[own].view(torch.uint8),
            "w2": down.packed[own],
            "w2_scale": down.scales[own].view(torch.uint8),
        }
    )
    return layer


def tokens(count, layout, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(count, layout.hidden, generator=generator) * 2).bfloat16()
    ids = torch.rand(count, layout.experts, generator=generator).topk(layout.topk).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.15] = -1
    return x, torch.rand(count, layout.topk, generator=generator) + 0.1, ids


def want(layout, x, topk_weights, ids, weighted="l1"):
    """In fp64, of the weights and of the tokens as they are quantised."""
    gate, up, down = (one.numbers for one in weights(layout))
    if layout.mode == "nvfp4":
        numbers, rounding = nvfp4.fake_quantize(x.double(), X_SCALE), oracle.Rounding(H_SCALES, weighted)
    else:
        q = quantize(x, "mxfp8", backend="reference")
        scales = ue8m0.decode(q.scales, torch.float64).repeat_interleave(32, -1)
        numbers, rounding = e4m3.decode(q.codes, torch.float64) * scales, None
    return oracle.mega_moe([(numbers, ids, topk_weights.double())], gate, down, up, LIMIT, rounding)[0]


def near(found, truth):
    return float((found.double() - truth).norm() / truth.norm()) < 2**-8


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_a_rank_alone(backend):
    """Int32 and int64 experts, a second step in the same memory, no tokens; weights are held once."""
    layer, given = loaded(ONE, backend=backend), tokens(17, ONE)
    layer.finalize_weights()
    assert near(layer(*given), want(ONE, *given)) and tuple(layer.state_dict()) == FINAL
    kept = layer.l1, layer.get_symm_buffer()
    layer.finalize_weights()
    other = tokens(5, ONE, seed=2)
    x, w, ids = other
    assert near(layer(x, w, ids.int()), want(ONE, *other))
    assert layer(x[:0], w[:0], ids[:0]).shape == (0, ONE.hidden)
    assert (layer.l1, layer.get_symm_buffer()) == kept


def test_weights_move_with_the_layer_and_memory_is_where_they_are():
    layer = loaded(ONE).to("meta")
    assert layer.device.type == "meta" and layer.get_symm_buffer().x.device.type == "meta"
    layer = loaded(ONE, make_buffer=lambda one: SymmetricBuffer.alone(one, "meta"))
    layer.finalize_weights()
    with pytest.raises(ArgumentError, match="make_buffer='meta'.*cpu"):
        layer.get_symm_buffer()
    layer.to("meta")
    assert layer.l1.codes.device.type == layer.l2.scales.device.type == "meta"
    assert layer.get_symm_buffer().x.device.type == "meta"


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_nvfp4_as_a_checkpoint_has_it(backend):
    """Codes and scales as they are stored; global and calibrated scales become factors; weights of routes after L2."""
    layer, given = loaded(NVFP4_ONE, backend=backend), tokens(17, NVFP4_ONE)
    layer.finalize_weights()
    assert near(layer(*given), want(NVFP4_ONE, *given)) and set(layer.state_dict()) == {*FINAL, *FACTORS}
    after = loaded(NVFP4_ONE, backend=backend, weighted="l2")
    after.finalize_weights()
    truth = want(NVFP4_ONE, *given, "l2")
    assert near(after(*given), truth) and not near(layer(*given), truth)
    with pytest.raises(ArgumentError, match=r"^weighted="):
        loaded(ONE, weighted="l3")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("input_scales", torch.tensor([[0.1, 1.0], [0.2, 1.0], [0.1, 1.0], [0.1, 1.0]]), "largest of all experts"),
        ("w2_scale_2", torch.tensor([1.0, 0.0, 1.0, 1.0]), "positive and finite"),
        ("w13_scale_2", torch.ones(4), r"float32\[4, 2\]"),
        ("w13_scale", torch.zeros(4, 512, 16, dtype=torch.uint8), r"uint8\[4, 512, 32\]"),
    ],
)
def test_scales_of_nvfp4_that_are_refused(name, value, said):
    layer = loaded(NVFP4_ONE)
    setattr(layer, name, value)
    with pytest.raises(ArgumentError, match=f"^{name}=.*{said}"):
        layer.finalize_weights()


@pytest.mark.parametrize(
    ("mode", "counts"), cases(("w4a8", [3, 17]), full=[("w4a8", [0, 9]), ("nvfp4", [3, 17])]), ids=str
)
def test_two_ranks(mode, counts):
    """The hook makes symmetric memory; each rank gets its own tokens back."""
    layout = {"w4a8": TWO, "nvfp4": NVFP4_TWO}[mode]
    made, outs, given = [], [], [tokens(count, layout, seed=count) for count in counts]
    with emulator.devices(2, shims=False) as gpus:
        parts = gpus.symmetric(layout.bytes, torch.uint8)
        storages = [parts.tensor(rank) for rank in range(2)]

        def make(rank):
            def over(layout):
                made.append(rank)
                return SymmetricBuffer.over(layout, rank, storages[rank], [x.data_ptr() for x in storages])

            return over

        layers = [loaded(layout, rank, make_buffer=make(rank), backend="emulator") for rank in range(2)]
        for rank, layer in enumerate(layers):
            layer.finalize_weights()
            with gpus.on(rank):
                outs.append(layer(*given[rank]))
        gpus.synchronize()
        assert made == [0, 1] and not gpus.hazards
    assert all(len(out) == 0 or near(out, want(layout, *one)) for out, one in zip(outs, given, strict=True))


def test_what_is_refused():
    layer, given = loaded(ONE, backend="reference"), tokens(3, ONE)
    with pytest.raises(ArgumentError, match=r"^weights=.*finalize_weights before"):
        layer(*given)
    layer.w2 = layer.w2[:, :-1]
    with pytest.raises(ArgumentError, match=r"^w2="):
        layer.finalize_weights()
    with pytest.raises(ArgumentError, match=r"^make_buffer=None .*2 ranks"):
        MegaMoeExperts(TWO)
    with pytest.raises(ArgumentError, match=r"^rank=2 "):
        MegaMoeExperts(TWO, 2, make_buffer=SymmetricBuffer.alone)
    other = loaded(ONE, make_buffer=lambda layout: SymmetricBuffer.alone(Layout(1, 4, 8, 2, 256, 128)))
    with pytest.raises(ArgumentError, match="make_buffer"):
        other.get_symm_buffer()
    fine = loaded(ONE, backend="reference")
    fine.finalize_weights()
    with pytest.raises(ArgumentError, match=r"^hidden_states=.*bfloat16\[T, 256\]"):
        fine(given[0].float(), *given[1:])
    with pytest.raises(ArgumentError, match=r"^hidden_states=.*at most 24 tokens"):
        fine(*tokens(25, ONE))
