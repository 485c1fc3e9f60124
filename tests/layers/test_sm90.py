"""Layers with a Hopper's operands: FP8 as it is stored, one SWA layer whole, and what has no kernel there by name."""

from dataclasses import replace

import pytest
import torch

from dsv4lib import backends
from dsv4lib.config import schedule
from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.formats import fp8_block
from dsv4lib.layers import attention, experts, moe
from dsv4lib.layers.dense import Dense, GroupedDense, normed
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.convert import save
from dsv4lib.loader.model import model_bytes, transformer
from dsv4lib.loader.whole import Listed
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.moe_gemm.sm90.layout import tiled_shape
from dsv4lib.ops.moe_gemm.sm90.op import many
from dsv4lib.ops.rmsnorm.op import rmsnorm
from dsv4lib.pages.full_model.run_case import oracle
from dsv4lib.reference.model import ReferenceModel
from dsv4lib.reference.randomize import randomize_
from tests.layers.test_dense import inputs, value, weight
from tests.whole_model import SMALL

ARCH = "sm_90a"
SWA = replace(
    SMALL,
    n_layers=1,
    compress_ratios=schedule(1, (0,), 4, 128),
    n_heads=2,
    o_lora_rank=128,
    n_experts=3,
    n_hash_layers=0,
)
LIMIT = 0.1  # of streams of 1.6: FP8 activations
pytestmark = pytest.mark.filterwarnings("error:the emulator reports")  # hazards


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """One SWA layer in DeepSeek's format."""
    folder, model = tmp_path_factory.mktemp("swa") / "mxfp4", ReferenceModel(SWA)
    randomize_(model, SWA, 1)
    save(model.state_dict(), SWA, folder, "mxfp4")
    return Listed.of(Checkpoint(folder))


def test_scales_as_they_are_stored():
    """Joined weights whose rows end inside a tile; the second has fp32 scales that are no powers of two."""
    weights, x = [weight(40, 256, 1), weight(200, 256, 2)], inputs(5, 256)
    weights[1] = fp8_block.FP8Tensor(weights[1].codes, torch.tensor([[0.3, 0.02], [1.7, 0.11]]), (128, 128))
    layer = Dense(weights, backend="emulator", arch=ARCH)
    assert layer.mode == "fp8_block" and tuple(layer.scales.shape) == (3, 2)
    with backends.emulating(ARCH):
        found = layer(x)
    given = fp8_block.fake_quantize(x.float()).double()
    for one, w in zip(found, weights, strict=True):
        want = given @ value(w).T
        assert one.shape == want.shape and torch.allclose(one.double(), want, rtol=2**-7, atol=2**-9 * want.abs().max())


def test_a_norm_writes_what_the_layer_reads():
    layer, x, gain = Dense([weight(40, 256, 1)], backend="reference", arch=ARCH), inputs(5, 256), torch.rand(256)
    found = normed(x, gain, 1e-6, layer)
    assert isinstance(found, Operand) and tuple(found.scales.shape) == (5, 2)
    assert torch.equal(layer(found)[0], layer(rmsnorm(x, gain, 1e-6, backend="reference"))[0])


@pytest.mark.parametrize("groups, rows", [(2, 128), (1, 64)])  # a group alone may have rows of half a scale
def test_groups(groups, rows):
    w = weight(groups * rows, 256, 4)
    layer, o = GroupedDense(w, groups, backend="reference", arch=ARCH), inputs(4, groups * 256)
    q = fp8_block.quantize_activation(o.float())
    x = fp8_block.dequantize(q, torch.float64).view(4, groups, 256)
    want = torch.einsum("tgk,grk->tgr", x, value(w).unflatten(0, (groups, rows)))
    found = layer(Operand(q.codes.view(torch.uint8).view(4, groups, 256), q.scales.view(4, groups, 2)))
    assert torch.allclose(found.double(), want.flatten(1), rtol=2**-8, atol=1e-3)


def test_what_a_hopper_has_no_operands_for_is_named():
    with pytest.raises(ArgumentError, match="weight='3 groups of 48 rows'.*one group, or .*128 rows on sm_90a"):
        GroupedDense(weight(3 * 48, 256, 4), 3, arch=ARCH)
    with pytest.raises(ArgumentError, match="arch='sm_80'"):
        Dense([weight(128, 256, 4)], arch="sm_80")


@torch.no_grad()
def test_an_swa_layer(listed, monkeypatch):
    """On an emulated Hopper, `fmha` by its oracle where that lacks it: as far from fp32 as all ops by their oracles."""
    refused, op = set(), attention.fmha

    def fmha(*args, **options):
        try:
            return op(*args, **options)
        except BackendUnavailable as error:
            refused.add(str(error).partition(":")[0])
            return op(*args, **options | {"backend": "reference"})

    monkeypatch.setattr(attention, "fmha", fmha)
    text, errors, capture = [3, 1, 4, 5], {}, {}
    oracle(listed)(torch.tensor([text]), capture=capture)
    for backend in ("emulator", "reference"):
        model = transformer(listed, backend=backend, arch=ARCH)
        assert (model.layers[0].attn.inputs.mode, model.layers[0].ffn.experts.product) == ("fp8_block", "w4a8")
        with backends.emulating(ARCH):
            _, streams = model.hidden(model.step([text], [0], [0]), keep_streams=True)
        difference = streams.float() - capture["layers.0.streams"][0]
        errors[backend] = float(difference.square().mean((1, 2)).sqrt().median())
    assert errors["emulator"] <= 1.2 * errors["reference"] < LIMIT, errors
    assert refused <= {"op fmha"}
    held = sum(x.numel() * x.element_size() for x in model.buffers())
    padding = 8 * SWA.hidden * 2 + 4 * 3 * SWA.n_experts  # rows of the head up to a multiple of 16; alphas
    assert held == model_bytes(listed, model.layout.capacity, arch=ARCH) + padding


@torch.no_grad()
def test_many_tokens_an_expert_stay_bf16(listed, monkeypatch):
    """Beside the same weights, without a cast; fewer tokens are cast. The kernels against the oracles."""
    casts, cast = [], experts.quantize
    monkeypatch.setattr(experts, "quantize", lambda *given, **options: casts.append(1) or cast(*given, **options))
    generator = torch.Generator().manual_seed(0)
    for tokens, quantised in ((48, False), (3, True)):
        assert many(tokens * SWA.experts_per_token // SWA.n_experts) == (not quantised)
        x, found = torch.randn(tokens, SWA.hidden, generator=generator).bfloat16(), {}
        for backend in ("emulator", "reference"):
            layer = transformer(listed, experts="mxfp4_mixed", backend=backend, arch=ARCH).layers[0].ffn
            layer.shared = None
            casts.clear()
            with backends.emulating(ARCH):
                found[backend] = layer(x).double()
            assert bool(casts) == quantised
        difference = found["emulator"] - found["reference"]
        assert difference.norm() < 2.0**-7 * found["reference"].norm()


@torch.no_grad()
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_chunks_of_experts_change_no_bit(listed, backend):
    """In the default mode, across the number of tokens from which "mxfp4_mixed" keeps them in bf16."""
    layer = transformer(listed, backend=backend, arch=ARCH).layers[0].ffn
    layer.shared = None
    x = torch.randn(36, SWA.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    with backends.emulating(ARCH):
        whole, chunks = layer(x), torch.cat([layer(one) for one in x.split(12)])
    assert many(-(-36 * SWA.experts_per_token // SWA.n_experts))
    assert torch.equal(whole, chunks) and whole.any()


@torch.no_grad()
def test_a_shared_expert_as_a_branch_changes_no_bit(listed, monkeypatch):
    """Where a graph is captured its ops come first, inside the branch, which is joined before the sum is made."""
    layer = transformer(listed, backend="reference", arch=ARCH).layers[0].ffn
    x, calls = inputs(5, SWA.hidden), []

    class Branch:
        def __init__(self, device, allowed):
            assert allowed
            self.apart = True

        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *error):
            calls.append("exit")

        def join(self):
            calls.append("join")

    def noted(name):
        op = getattr(moe, name)
        monkeypatch.setattr(moe, name, lambda *given, **options: calls.append(name) or op(*given, **options))

    want = layer(x)
    monkeypatch.setattr(moe, "Beside", Branch)
    noted("router")
    noted("moe_combine")
    layer.shared.register_forward_hook(lambda *_: calls.append("shared"))
    assert torch.equal(layer(x), want)
    assert calls == ["enter", "shared", "exit", "router", "join", "moe_combine"]


def test_weights_that_bf16_does_not_hold_are_refused(listed):
    """By mode "mxfp4_mixed" alone: E4M3 and a scale of its own in fp32 hold them."""
    stack = transformer(listed, backend="reference", arch=ARCH).layers[0].ffn.experts
    codes = [stack.first_codes.clone(), stack.second_codes]
    alphas = torch.stack((stack.alpha_gate, stack.alpha_up), 1), stack.alpha_down[:, None]
    _, _, step = tiled_shape(tuple(codes[0].shape), "w4a8")
    codes[0][1, 0, 0, 64 * step // 2] = 149 + 6  # a scale is stored as its byte + 6
    given = experts.Experts(*(experts.Weights(((c, None),), a) for c, a in zip(codes, alphas, strict=True)))
    experts.ExpertStack("experts", given, "mxfp4", SWA.hidden, ARCH)
    with pytest.raises(ArgumentError, match="byte 149") as caught:
        experts.ExpertStack("experts", given, "mxfp4_mixed", SWA.hidden, ARCH)
    assert caught.value.name == "experts.first.planes[0][0]"


@torch.no_grad()
def test_bf16_weights(listed):
    """The head, and joined weights; a group of heads. Numbers of fp64 rounded once."""
    model = transformer(listed, backend="emulator", arch=ARCH)
    weights, x = [torch.randn(40, 264), torch.randn(72, 264)], inputs(5, 264)
    layer, grouped = Dense(weights, backend="emulator", arch=ARCH), torch.randn(2 * 72, 264)
    groups = GroupedDense(grouped, 2, backend="emulator", arch=ARCH)
    with backends.emulating(ARCH):
        logits, found, both = model.head(inputs(3, SWA.hidden)), layer(x), groups(Operand(x.repeat(1, 2)))
    truth = [x.double() @ w.bfloat16().double().T for w in (*weights, grouped)]
    for one, want in zip([*found, both], truth, strict=True):
        assert torch.allclose(one.double(), want, rtol=2**-8, atol=2**-12 * float(want.abs().max()))
    assert logits[0].isfinite().all()


@torch.no_grad()
def test_what_has_no_kernel_is_named():
    """A Blackwell's FP8 GEMM on an emulated Hopper."""
    blackwell = Dense([weight(40, 256, 1)], backend="emulator", arch="sm_100a")
    with backends.emulating(ARCH), pytest.raises(BackendUnavailable, match="op linear: .*sm_90a.*sm_100a"):
        blackwell(inputs(1, 256))
