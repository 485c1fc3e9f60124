"""The MoE layer, op by op in the emulator: against the same ops by PyTorch, and against the exact layer."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import nvfp4, weight_modes
from dsv4lib.layers.experts import FORMS
from dsv4lib.layers.moe import Moe
from dsv4lib.loader.experts import Experts as Stored
from dsv4lib.loader.moe import layer_experts
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.reference.moe_gemm import expert, moe_gemm
from dsv4lib.reference.router import hash_route, score_route

E, D, I, K, FACTOR, LIMIT = 5, 256, 128, 2, 1.5, 1.0
TOKENS = 37
pytestmark = pytest.mark.filterwarnings("error:the emulator reports")  # hazards


def stored(count, seed):
    """Experts in NVFP4, each matrix with a global scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((I, D), 0.08), ((I, D), 0.14), ((D, I), 0.08)
    raw = [[torch.randn(*shape, generator=generator) * std for _ in range(count)] for shape, std in shapes]
    gate, up, down = (tuple(map(nvfp4.quantize, part)) for part in raw)
    return Stored("nvfp4", gate, up, down, None)


def operands(mode, source):
    """Stored experts for a layer, with calibrated scales of their activations."""
    inputs = (torch.tensor([5.0, 2.0]) / nvfp4.RANGE).expand(len(source.gate), 2)
    return layer_experts(source, mode)._replace(input_scales=inputs)


def layer(mode, backend, shared=True, table=None, shared_mode=None):
    gate, bias = router_weights()
    common = operands(shared_mode or mode, stored(1, 9)) if shared else None
    settings = {"k": K, "factor": FACTOR, "limit": LIMIT, "backend": backend, "table": table}
    settings |= {"shared": common, "shared_precision": shared_mode}
    return Moe(gate, bias if table is None else None, operands(mode, stored(E, 1)), mode, **settings)


def router_weights():
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(E, generator=generator) * 0.1
    bias[3] = -50  # never chosen: an expert without a token
    return (torch.randn(E, D, generator=generator) * D**-0.5).bfloat16(), bias


def tokens(count=TOKENS, seed=3):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(x, mode, hashed=None):
    """The layer in fp64, with the weights that the mode's operands stand for and activations as they come.

    hashed: (table, token ids) that select the experts.
    """

    def numbers(part):
        return [weight_modes.dequantize(weight_modes.convert(q, mode), torch.float64) for q in part]

    routed, shared = stored(E, 1), stored(1, 9)
    gate, bias = router_weights()
    if hashed is None:
        picks, weights = score_route(x.float(), gate.float(), bias, K, FACTOR)
    else:
        picks, weights = hash_route(x.float(), gate.float(), *hashed, FACTOR)
    w1, w3, w2 = numbers(routed.gate), numbers(routed.up), numbers(routed.down)
    x = x.double()
    y = moe_gemm(x, picks.long(), weights.double(), w1, w2, w3, LIMIT)
    s1, s3, s2 = (numbers(part)[0] for part in (shared.gate, shared.up, shared.down))
    return y + expert(x, s1, s2, s3, LIMIT)


def difference(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


# Relative to the exact layer with the mode's own weights: what the formats of the activations cost.
ACTIVATIONS = {"nvfp4": (0.05, 0.25), "mxfp8": (0.005, 0.06), "bf16": (1e-4, 6e-3)}


@pytest.mark.parametrize("mode", ["e4m3_expand", "e4m3_split", "mxfp4"])
def test_a_quantised_input_changes_no_bit(mode):
    """The shared expert reads what another launch quantised; its planes repeat it along K."""
    one, x = layer("bf16", "reference", shared_mode=mode), tokens(5)
    q = quantize(x, one.recipe, swizzled=True, backend="reference")
    assert one.recipe == "mxfp8" and torch.equal(one(x, fp8=Operand(q.codes, q.scales)), one(x))
    other = layer("bf16", "reference", shared_mode="bf16")
    with pytest.raises(ArgumentError, match="fp8"):
        other(x, fp8=Operand(q.codes, q.scales))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", FORMS)
def test_layer(mode):
    """By the same ops in PyTorch: bf16 roundings of y, and a code of h that may fall on the other side of a tie."""
    x = tokens()
    found = layer(mode, "emulator")(x)
    assert found.shape == x.shape and found.dtype == torch.bfloat16
    assert difference(found, layer(mode, "reference")(x)) < 4e-3
    low, high = ACTIVATIONS[FORMS[mode][1]]
    assert low < difference(found, exact(x, mode)) < high


def test_weights_as_they_are_stored():
    """`e4m3_split` loses nothing of NVFP4's weights, so it stands beside bf16 but for its activations; naive does."""
    x, want = tokens(), exact(tokens(), "bf16")
    errors = {mode: difference(layer(mode, "reference")(x), want) for mode in FORMS}
    assert errors["bf16"] < errors["e4m3_split"] <= errors["e4m3_expand"] < errors["mxfp4"] < errors["ue8m0_naive"]


@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens(count):
    x = tokens(5)[:count]
    found = layer("nvfp4", "emulator")(x)
    assert found.shape == x.shape
    assert count == 0 or torch.equal(found, layer("nvfp4", "emulator")(tokens(5))[:count])


def test_all_tokens_on_one_expert():
    """With a second, superfluous one: its weight is not zero, its tokens are the same."""
    given = [layer("nvfp4", backend) for backend in ("emulator", "reference")]
    for one in given:
        one.bias = torch.tensor([-50.0, 50.0, -50.0, -50.0, 20.0])
    found, want = (one(tokens(150)) for one in given)
    assert difference(found, want) < 4e-3


@pytest.mark.full
def test_thousands_of_tokens():
    """4,096: tiles of 192 tokens, more of them than CTAs in flight."""
    x = tokens(4096)
    assert difference(layer("mxfp4", "emulator", shared=False)(x), layer("mxfp4", "reference", shared=False)(x)) < 4e-3


def test_without_a_shared_expert():
    x = tokens(9)
    assert difference(layer("bf16", "emulator", shared=False)(x), layer("bf16", "reference", shared=False)(x)) < 4e-3


def test_experts_by_a_table():
    """The model's first layers: the token's id selects, the gate weighs; experts in another order are another layer."""
    ids = torch.randint(0, 11, (9,), generator=torch.Generator().manual_seed(4))
    table = torch.tensor([[(3 * i + 1) % E, (3 * i + 2) % E] for i in range(11)])
    x = tokens(9)
    found = layer("bf16", "emulator", table=table)(x, ids)
    assert difference(found, exact(x, "bf16", (table, ids))) < 6e-3
    assert difference(found, exact(x, "bf16", (table.roll(1, 0), ids))) > 0.1


def test_torch_compile_takes_any_number_of_tokens():
    """One graph for all of them: no guard on a shape is made on the way."""
    one = layer("nvfp4", "reference", shared=False)
    torch._dynamo.reset()
    fast = torch.compile(one, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (4, 9):
        assert torch.equal(fast(tokens(count)), one(tokens(count)))


def test_buffers_travel(tmp_path):
    """A state, through a file of the safetensors library, into a layer with other numbers: the same output bits."""
    from safetensors.torch import load_file, save_file

    one, x = layer("nvfp4", "reference"), tokens(5)
    save_file(one.state_dict(), tmp_path / "state.safetensors")
    other = layer("nvfp4", "reference")
    for buffer in other.buffers():
        buffer.copy_(buffer.flip(-1))
    before = other(x)
    assert list(other.parameters()) == [] and not torch.equal(before, one(x))
    other.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert torch.equal(other(x), one(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer("bf16", "reference").load_state_dict(one.state_dict(), strict=False)


def test_it_moves_between_devices_but_not_types():
    one = layer("nvfp4", "reference")
    moved = layer("nvfp4", "reference").to("meta")
    assert {name: x.dtype for name, x in one.named_buffers()} == {n: x.dtype for n, x in moved.named_buffers()}
    assert all(x.is_meta for x in moved.buffers())
    before = {name: x.clone() for name, x in one.named_buffers()}
    for change in (lambda: one.half(), lambda: one.to(torch.float64), lambda: one.experts.bfloat16()):
        with pytest.raises(ArgumentError, match="dtype"):
            change()
    assert all(torch.equal(x, before[name]) for name, x in one.named_buffers())


def test_two_precisions():
    """Routed experts in one mode beside a shared one in another; each with what only it has."""
    x = tokens(9)
    mixed = layer("nvfp4", "reference", shared_mode="mxfp4")
    assert (mixed.experts.precision, mixed.shared.precision) == ("nvfp4", "mxfp4")
    assert mixed.shared.x_scale is None and mixed.experts.x_scale is not None
    apart = layer("nvfp4", "reference", shared=False)(x).double() + layer("mxfp4", "reference").shared(
        x, limit=LIMIT, backend="reference"
    )
    assert difference(mixed(x), apart) < 4e-3


def made(**change):
    """A layer of nvfp4 with something else than it should have."""
    gate, bias = router_weights()
    mode = change.get("precision", "nvfp4")
    good = {"gate": gate, "bias": bias, "experts": operands("nvfp4", stored(E, 1)), "precision": mode, "k": K}
    return Moe(**{**good, "backend": "reference", **change})


ROUTED, SHARED = (lambda: operands("nvfp4", stored(E, 1))), (lambda: operands("nvfp4", stored(1, 9)))


def changed(place, value):
    """Experts with another field: 'first.alphas', 'first.planes', 'input_scales'."""
    name, _, inner = place.partition(".")
    experts = ROUTED()
    old = getattr(experts, name)
    new = old._replace(**{inner: value(getattr(old, inner))}) if inner else value(old)
    return experts._replace(**{name: new})


def plane(change):
    return lambda planes: (change(*planes[0]),)


MADE_WRONG = {
    "gate.dtype": ("gate", {"gate": torch.zeros(E, D)}),
    "gate of one dimension": ("gate", {"gate": torch.zeros(D).bfloat16()}),
    "no gate": ("gate", {"gate": None}),
    "gate of no expert": ("gate", {"gate": torch.zeros(0, D).bfloat16()}),
    "gate with NaN": (
        "gate[1, 2]",
        {
            "gate": torch.zeros(E, D)
            .index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(float("nan")))
            .bfloat16()
        },
    ),
    "gate of other experts": ("experts", {"gate": torch.zeros(E + 1, D).bfloat16(), "bias": torch.zeros(E + 1)}),
    "gate of another d": ("experts.first.planes[0][0]", {"gate": torch.zeros(E, 2 * D).bfloat16()}),
    "gate elsewhere": ("bias.device", {"gate": torch.zeros(E, D, device="meta").bfloat16()}),
    "neither bias nor table": ("bias", {"bias": None}),
    "both": ("bias", {"table": torch.zeros(7, K, dtype=torch.int64)}),
    "bias.dtype": ("bias", {"bias": torch.zeros(E).bfloat16()}),
    "bias too long": ("bias", {"bias": torch.zeros(E + 1)}),
    "bias with NaN": ("bias[0]", {"bias": torch.full((E,), float("nan"))}),
    "table of another k": ("table", {"bias": None, "table": torch.zeros(7, K + 1, dtype=torch.int64)}),
    "table.dtype": ("table", {"bias": None, "table": torch.zeros(7, K, dtype=torch.int32)}),
    "table beyond": ("table[0, 0]", {"bias": None, "table": torch.full((7, K), E)}),
    "table below 0": ("table[0, 0]", {"bias": None, "table": torch.full((7, K), -1)}),
    "precision": ("precision", {"precision": "int8"}),
    "precision of another plane": ("experts.first.planes[0][1]", {"precision": "mxfp4"}),
    "precision of other codes": ("experts.first.planes[0][0]", {"precision": "bf16"}),
    "shared_precision": ("shared_precision", {"shared": SHARED(), "shared_precision": "int8"}),
    "shared_precision alone": ("shared_precision", {"shared_precision": "nvfp4"}),
    "two shared": ("shared", {"shared": ROUTED()}),
    "shared without scales": ("shared.input_scales", {"shared": SHARED()._replace(input_scales=None)}),
    "no experts": ("experts", {"experts": None}),
    "no planes": ("experts.first.planes", {"experts": changed("first.planes", lambda p: ())}),
    "planes of one thing": ("experts.first.planes[0]", {"experts": changed("first.planes", lambda p: (p[0][:1],))}),
    "a plane less": ("experts.second.planes", {"experts": changed("second.planes", lambda p: ())}),
    "codes of float": (
        "experts.first.planes[0][0]",
        {"experts": changed("first.planes", plane(lambda c, s: (c.float(), s)))},
    ),
    "codes cut": (
        "experts.second.planes[0][0]",
        {"experts": changed("second.planes", plane(lambda c, s: (c[:, :, :32], s)))},
    ),
    "no scales": ("experts.first.planes[0][1]", {"experts": changed("first.planes", plane(lambda c, s: (c, None)))}),
    "scales cut": (
        "experts.first.planes[0][1]",
        {"experts": changed("first.planes", plane(lambda c, s: (c, s[:, :512])))},
    ),
    "alphas.dtype": ("experts.first.alphas", {"experts": changed("first.alphas", torch.Tensor.double)}),
    "alphas of one": ("experts.first.alphas", {"experts": changed("first.alphas", lambda a: a[:, :1])}),
    "alphas 0": ("experts.second.alphas[0, 0]", {"experts": changed("second.alphas", torch.zeros_like)}),
    "alphas NaN": ("experts.first.alphas[0, 0]", {"experts": changed("first.alphas", lambda a: a * float("nan"))}),
    "input scales of [2]": ("experts.input_scales", {"experts": changed("input_scales", lambda s: s[0])}),
    "input scales below 0": ("experts.input_scales[0, 0]", {"experts": changed("input_scales", torch.neg)}),
    "input scales Inf": ("experts.input_scales[0, 0]", {"experts": changed("input_scales", lambda s: s / 0)}),
    "k 0": ("k", {"k": 0}),
    "k beyond E": ("k", {"k": E + 1}),
    "k as a fraction": ("k", {"k": 2.0}),
    "factor NaN": ("factor", {"factor": float("nan")}),
    "factor 0": ("factor", {"factor": 0.0}),
    "limit below 0": ("limit", {"limit": -1.0}),
    "limit as text": ("limit", {"limit": "10"}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize("name", MADE_WRONG)
def test_what_no_layer_is_made_of(name):
    argument, change = MADE_WRONG[name]
    with pytest.raises(ArgumentError) as caught:
        made(**change)
    assert caught.value.name == argument


def test_inputs_that_are_views():
    """Rows at a distance, rows upside down by index, one token: the same numbers as a tensor of its own."""
    one, x = layer("mxfp4", "emulator"), tokens(6)
    want = one(x)
    wide = torch.cat([x, x], 1)[:, :D]
    assert not wide.is_contiguous() and torch.equal(one(wide), want)
    assert torch.equal(one(x.repeat_interleave(2, 0)[::2]), want)
    assert torch.equal(one(x[3:4]), want[3:4])


def test_what_is_refused():
    given = layer("bf16", "reference")
    table = torch.zeros(7, K, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="tokens"):
        given(tokens(2), torch.zeros(2, dtype=torch.int64))
    by_table = layer("bf16", "reference", table=table)
    with pytest.raises(ArgumentError, match="tokens"):
        by_table(tokens(2))
    padded = by_table(tokens(2), torch.tensor([0, 7]))  # an id outside the table is padding: no routed expert
    assert torch.equal(padded[:1], by_table(tokens(2), torch.tensor([0, 3]))[:1]) and bool(padded.isfinite().all())
    for name, x in (("x", tokens(2).float()), ("x", tokens(2)[0]), ("x", tokens(2)[:, :64])):
        with pytest.raises(ArgumentError, match=name):
            given(x)
