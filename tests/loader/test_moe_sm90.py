"""A Hopper's MoE layer: from a file in DeepSeek's naming to its output on an emulated sm_90a, against fp64.

The simulation is that of `test_moe`, which shares nothing with the loader; it rounds the shared expert's activations as
the Hopper's operands do, in blocks of 128.
"""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.layers.moe import Moe
from dsv4lib.loader import operands
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.experts import read_experts, read_shared
from dsv4lib.loader.moe import moe_layer
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.moe_gemm.sm90.layout import untile_weights
from dsv4lib.ops.quantize.op import quantize
from tests.cases import cases
from tests.loader.test_moe import (
    CONFIG,
    D,
    E,
    I,
    K,
    V,
    as_bf16,
    difference,
    e4m3,
    simulated,
    tokens,
    write,
)

ARCH = "sm_90a"
BOUND = 4e-3  # bf16's rounding of the result; as of the other architecture
pytestmark = pytest.mark.filterwarnings("error:the emulator reports")  # hazards


def as_fp8(x):
    """Blocks of 128, a power of two each."""
    blocks = x.unflatten(-1, (-1, 128))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    step = torch.exp2((exponent - (mantissa == 0.5).int()).double())
    return (e4m3(blocks / step) * step).flatten(-2)


def made(folder, backend="emulator", **options) -> Moe:
    return moe_layer(Checkpoint(folder), "layers.1", CONFIG, backend=backend, arch=ARCH, **options)


def idle(tensors):
    """Make the router never choose expert 3."""
    tensors["gate.bias"][3] = -50


@pytest.fixture
def nan_memory():
    """New tensors are NaN (uint8: 255, a NaN of E4M3): what is read without being written shows.

    As torch.use_deterministic_algorithms does, which imports its compiler first: 3 s.
    """
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize(
    ("precision", "counts"), cases((None, (1, 17)), full=[("w4a16", (1, 3, 17)), (None, (0, 3, 9, 33))])
)
def test_from_a_file_to_the_output(tmp_path, precision, counts):
    """MXFP4 experts tiled, an FP8 one as stored, one expert without a token: bf16's rounding is all that is left."""
    folder = write(tmp_path, False, change=idle)
    layer = made(folder, precision=precision)
    assert (layer.experts.product, layer.shared.product) == ("w4a8" if precision is None else precision, "fp8_block")
    x = tokens(max(counts))
    rounded = {"routed": as_bf16} if precision == "w4a16" else {}
    want = simulated(folder, x, shared=as_fp8, **rounded)
    for count in counts:
        with backends.emulating(ARCH):
            found = layer(x[:count])
        assert found.shape == (count, D) and (count == 0 or difference(found, want[:count]) < BOUND)


def test_padding_rows_of_nan(tmp_path):
    """Three tokens by a table, and two whose ids it does not have: padding, and what NaN it holds stays its own."""
    folder, x, ids = write(tmp_path, False, hashed=True), tokens(5), torch.arange(5) % V
    x[3:], padded = torch.nan, torch.cat((ids[:3], torch.full((2,), V)))
    with backends.emulating(ARCH):
        found = made(folder)(x, padded)
    assert difference(found[:3], simulated(folder, x[:3], ids[:3], shared=as_fp8)) < BOUND


@pytest.mark.parametrize("precision", [None, "w4a16"])
def test_oracles_of_the_same_ops(tmp_path, precision):
    """The reference back end: the same layer without kernels, also where its input comes quantised."""
    folder, x = write(tmp_path, False), tokens()
    layer = made(folder, "reference", precision=precision)
    rounded = {"routed": as_bf16} if precision else {}
    found = layer(x)
    assert difference(found, simulated(folder, x, shared=as_fp8, **rounded)) < BOUND
    q = quantize(x, layer.recipe, swizzled=layer.swizzled, backend="reference")
    assert layer.recipe == "fp8" and torch.equal(layer(x, fp8=Operand(q.codes, q.scales)), found)


def test_a_shared_expert_with_fp32_scales(tmp_path):
    """Any fp32 scale, not only powers of two: the kernel takes them as they are."""

    def change(tensors):
        tensors["shared_experts.w3.scale"][1, 2] = 0.003

    folder, x = write(tmp_path, False, scales=torch.float32, change=change), tokens()
    assert difference(made(folder, "reference")(x), simulated(folder, x, shared=as_fp8)) < BOUND


def test_operands_hold_the_bytes_of_the_file(tmp_path):
    """Tiled weights, back: gate and up in runs of 8; the FP8 expert's gate before its up."""
    checkpoint = Checkpoint(write(tmp_path, False))
    stored = read_experts(checkpoint, "layers.1", range(E), D, I)
    for kernel in ("w4a8", "w4a16"):
        first, second = operands.tiled_weights(stored, kernel)
        codes, scales = untile_weights(first.planes[0].codes, kernel)
        for whole, part in ((codes, "packed"), (scales, "scales")):
            gate, up = operands.deinterleave(whole)
            assert torch.equal(gate, torch.stack([getattr(q, part) for q in stored.gate]))
            assert torch.equal(up, torch.stack([getattr(q, part) for q in stored.up]))
        codes, scales = untile_weights(second.planes[0].codes, kernel)
        assert torch.equal(codes, torch.stack([q.packed for q in stored.down]))
        assert torch.equal(scales, torch.stack([q.scales for q in stored.down]))
    shared = read_shared(checkpoint, "layers.1", D, I)
    first, second = operands.stored_weights(shared)
    assert torch.equal(first.planes[0].codes[0], torch.cat([shared.gate[0].codes, shared.up[0].codes]))
    assert torch.equal(first.planes[0].scales[0], torch.cat([shared.gate[0].scales, shared.up[0].scales]))
    assert torch.equal(second.planes[0].codes[0], shared.down[0].codes)


def test_a_state_travels(tmp_path):
    """Through state_dict into a layer of other numbers; between devices, not types."""
    one = made(write(tmp_path, False), "reference")
    (tmp_path / "other").mkdir()
    other = made(write(tmp_path / "other", False, seed=5), "reference")
    x = tokens(3)
    assert list(one.parameters()) == [] and not torch.equal(one(x), other(x))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))
    assert all(b.is_meta for b in other.to("meta").buffers())
    with pytest.raises(ArgumentError, match="dtype"):
        one.half()


@pytest.mark.parametrize(
    ("nvfp4", "options", "message"),
    [
        (True, {}, "arch='sm_90a'.*nvfp4 experts"),
        (True, {"precision": "nvfp4"}, "precision='nvfp4'.*sm_90a"),
        (False, {"precision": "bf16"}, "precision='bf16'.*mxfp4, mxfp4_mixed, w4a16 on sm_90a"),
        (False, {"shared_precision": "bf16"}, "shared_precision='bf16'.*fp8_block on sm_90a"),
    ],
)
def test_what_a_hopper_lacks_is_named(tmp_path, nvfp4, options, message):
    with pytest.raises(ArgumentError, match=message):
        made(write(tmp_path, nvfp4), **options)


def test_operands_of_the_other_architecture_are_named(tmp_path):
    """Neither takes the other's; an emulated Hopper refuses a Blackwell's kernel, with the op's name."""
    checkpoint = Checkpoint(write(tmp_path, False))
    blackwell = moe_layer(checkpoint, "layers.1", CONFIG, backend="emulator")
    assert blackwell.experts.first_codes.dim() == 3 and K <= E
    with backends.emulating(ARCH):
        assert moe_layer(checkpoint, "layers.1", CONFIG).experts.first_codes.dim() == 4  # that of the back end
        with pytest.raises(BackendUnavailable, match="op moe_gemm: .*sm_90a.*sm_100a"):
            blackwell(tokens(1))
    with pytest.raises(ArgumentError, match="arch='sm_80'"):
        moe_layer(checkpoint, "layers.1", CONFIG, arch="sm_80")
