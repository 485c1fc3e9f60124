"""The GEMM ops as PyTorch sees them: schema, fake tensors, torch.compile, CUDA graphs, compilation ahead."""

import inspect

import pytest
import torch

from dsv4lib import backends
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.linear import op as linear_op
from dsv4lib.ops.moe_gemm import op
from dsv4lib.ops.moe_gemm.inputs import case
from dsv4lib.ops.moe_gemm.op import Operand, moe_gemm
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm
from dsv4lib.ops.output_proj.op import output_proj
from dsv4lib.pages.fmha.run_op import native_path

L1 = {"swiglu": True, "routed": True, "out": "nvfp4"}
K = 128
NATIVE = backends.status("native")


def call(counts=(40, 0, 3), seed=0):
    """Tensors of a first GEMM in NVFP4 by name."""
    made = case(MoeGemm(**L1), list(counts), 128, K, seed).call
    names = "x", "x_scales", "w", "w_scales", "offsets", "counts", "alpha", "alpha_up", "routing", "out_global"
    return {name: getattr(made, name) for name in names}


def first(x, x_scales, w, w_scales, offsets, counts, out=None, backend="emulator", **factors):
    """The first GEMM of experts, to NVFP4."""
    keys = {**factors, "swiglu": True, "out_format": "nvfp4", "limit": 10.0, "expected": 20, "backend": backend}
    return moe_gemm(Operand(x, x_scales), Operand(w, w_scales), offsets, counts, out=out, **keys)


def flat(given, backend="reference"):
    """Arguments of `torch.ops.dsv4.moe_gemm`."""
    out = op.new_output(given["x"], 64, "nvfp4")
    tensors = {**given, "out": torch.zeros_like(out.codes), "out_scales": out.scales}
    rest = {"limit": 10.0, "formats": "nvfp4", "out_format": "nvfp4", "swiglu": True, "expected": 20}
    made = op.Call(**tensors, **rest, backend=backend)
    return tuple(getattr(made, name) for name in inspect.signature(op.Call).parameters)


def test_schemas_say_what_is_written():
    for name in ("moe_gemm", "linear"):
        schema = getattr(torch.ops.dsv4, name).default._schema
        assert [x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write] == ["out", "out_scales"]


def test_schema_and_fake_implementation_agree_with_the_ops():
    """torch's own check: what is mutated, that fakes and reals behave alike, that tracing works."""
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(2, 16, 32).bfloat16()
    dense = w[0], torch.zeros(5, 16).bfloat16(), *(None,) * 6, 0.0
    calls = {
        "moe_gemm": flat(call()),
        "linear": (x[:, :32].contiguous(), *dense, "bf16", "bf16", False, "reference"),
        "output_proj": (x, None, w, None, torch.zeros(5, 32).bfloat16(), "bf16", "reference"),
    }
    for name, given in calls.items():
        with torch.no_grad():
            found = torch.library.opcheck(getattr(torch.ops.dsv4, name).default, given)
        assert set(found.values()) == {"SUCCESS"}, (name, found)


def test_torch_compile_takes_it_whole():
    """One graph with a GEMM, a linear over what it wrote, and the grouped projection; the same bits; nothing compiled
    for other sizes of the groups."""

    def layer(given, w, w_scales, wo):
        h = first(**given)
        y = linear_op.linear(h, Operand(w, w_scales), alpha=given["alpha"][:1], backend="emulator").codes
        return output_proj(Operand(y * 0.5), Operand(wo), backend="emulator").float() + 1

    generator = torch.Generator().manual_seed(0)
    w = torch.randint(0, 256, (64, 32), dtype=torch.uint8, generator=generator)
    wo = torch.randn(2, 16, 32, generator=generator).bfloat16()
    rest = w, torch.full((512,), 0x38, dtype=torch.uint8), wo  # E4M3: 1
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    rows = torch.tensor([*range(40), 128, 129, 130])  # others are not initialised
    given = call()
    found, want = fast(given, *rest)[rows], layer(given, *rest)[rows]
    assert torch.equal(found, want) and found.std() > 0
    counts = compile_cache.default().counts
    before = counts.compiled, counts.from_disk
    given["counts"][0] = 7
    assert torch.equal(fast(given, *rest)[:7], want[:7])
    assert (counts.compiled, counts.from_disk) == before


def test_a_warmed_up_call_compiles_nothing():
    cache = compile_cache.default()
    cache.clear()
    wanted = {"swiglu": True, "routed": True, "out_format": "nvfp4", "features": 128}
    assert len(op.warm_up([wanted], (20, 200, 300))) == 2  # 300 tokens: a pair has no 256 features here
    assert len(linear_op.warm_up([{"mode": "bf16", "alpha": False}], (1,))) == 1
    before = cache.counts.compiled, cache.counts.from_disk
    first(**call())
    x = Operand(torch.randn(3, 64).bfloat16())
    linear_op.linear(x, Operand(torch.randn(16, 64).bfloat16()), mode="bf16", backend="emulator")
    assert (cache.counts.compiled, cache.counts.from_disk) == before


def test_a_cuda_graph_holds_it(monkeypatch):
    """Captured: one launch, nothing else and no wait; a replay takes groups of other sizes."""
    monkeypatch.setattr(launching, "sm_count", lambda device: 3)
    given = call()
    first(**given)
    with native_path(op.Call.op) as gpu:
        there = {name: x.to("cuda") for name, x in given.items()}
        out = op.new_output(there["x"], 64, "nvfp4")
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.cuda.graph(graph):
            first(**there, out=out, backend="native")
        assert len(gpu.launches) == 0
        graph.replay()
        assert len(gpu.launches) == 1 and gpu.hazards == []
        assert torch.equal(out.codes[:40], first(**given).codes[:40])
        there["counts"].copy_(torch.tensor([9, 2, 0], dtype=torch.int32))
        there["offsets"].copy_(torch.tensor([0, 128, 0], dtype=torch.int32))
        out.codes.fill_(77)
        graph.replay()
        codes = out.codes.clone()
    want = first(**{**given, "counts": torch.tensor([9, 2, 0], dtype=torch.int32)})
    assert torch.equal(codes[:9], want.codes[:9]) and torch.equal(codes[128:130], want.codes[128:130])
    assert (codes[9:128] == 77).all() and (codes[130:] == 77).all()


@pytest.mark.sm100
@pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)
def test_native_and_emulator_agree():
    """On a Blackwell GPU: the same bits, called and replayed in a graph."""
    given = call()
    want = first(**given).codes
    there = {name: x.cuda() for name, x in given.items()}
    out = op.new_output(there["x"], 64, "nvfp4")
    first(**there, out=out, backend="native")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first(**there, out=out, backend="native")
    out.codes.zero_()
    graph.replay()
    rows = torch.tensor([*range(40), 256, 257, 258])
    assert torch.equal(out.codes.cpu()[rows], want[rows])
