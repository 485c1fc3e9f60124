"""The gemm_tile kernel for SM90: what can be known without running it, and its numbers where a back end runs it."""

import pytest
import torch

from dsv4lib import backends, check
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.gemm_tile import sm90
from dsv4lib.ops.gemm_tile.inputs import operands, padding_untouched
from dsv4lib.ops.gemm_tile.sm90 import GemmTile
from dsv4lib.reference.gemm_tile import gemm_tile
from dsv4lib.viz import ptx
from tests import budget
from tests.cases import cases

CONFIGS = [  # in, out, tile_n, stages: every type, one part of C and more, one stage, a full SMEM
    ("bf16", "fp32", 128, 4),
    ("fp16", "fp16", 256, 3),
    ("bf16", "bf16", 64, 8),
    ("fp16", "fp32", 192, 1),
    ("e4m3", "fp32", 64, 2),
    ("e4m3", "bf16", 128, 5),
    ("e4m3", "fp16", 256, 2),
]


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda c: "-".join(map(str, c)))
def built(request):
    return budget.built(GemmTile, GemmTile.fake_args, "sm_90a", *request.param)


def test_instructions_follow_from_the_configuration(built):
    kernel, done = built
    parts = kernel.tile_n // kernel.store_n
    in_type = {"fp16": "f16", "bf16": "bf16", "e4m3": "e4m3"}[kernel.in_dtype]
    mma = f"wgmma.mma_async.sync.aligned.m64n{kernel.tile_n}k{256 // kernel.ab_type.width}.f32.{in_type}.{in_type}"
    wide = kernel.c_type.width == 32
    counts = {
        mma: 4,  # one K step, not unrolled further
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier": 2,  # one box of A, one of B
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group": parts,
        "mbarrier.init": 2 * kernel.stages,
        "mbarrier.arrive.expect_tx": 1,
        "wgmma.commit_group": 1,
        "stmatrix.sync.aligned.m8n8.x4": 0 if wide else 4 * parts,  # 64 x 64 elements of a warpgroup, 16 x 16 each
        "st.shared.v2": kernel.tile_n // 4 if wide else 0,  # two neighbours of a row at a time, two rows
        "st.global": 0,
        "ld.local": 0,
    }
    assert {name: ptx.count(done.ptx, name) for name in counts} == counts


def test_compiler_and_budget_agree(built):
    kernel, done = built
    rows = {row.resource: row for row in kernel.budget()}
    assert done.smem_bytes == kernel.smem_bytes == rows["SMEM: total"].used
    parts = sum(row.used for name, row in rows.items() if name.startswith("SMEM") and "total" not in name)
    assert parts <= kernel.smem_bytes < parts + sm90.SMEM_ALIGN
    assert done.threads == rows["threads"].used
    assert (done.local_bytes, done.spills) == (0, 0)
    assert done.registers * done.threads <= 65_536
    for row in rows.values():
        assert 0 < row.used <= row.limit and row.derivation


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("in_dtype", "fp32"),
        ("in_dtype", None),
        ("out_dtype", "fp16"),
        ("tile_n", 0),
        ("tile_n", 96),
        ("tile_n", 320),
        ("tile_n", 128.0),
        ("stages", 0),
        ("stages", 6),
        ("stages", True),
    ],
)
def test_configurations_the_hardware_does_not_have(name, value):
    with pytest.raises(ConfigError) as caught:
        GemmTile(**{name: value})
    assert caught.value.name == name
    assert repr(value) in str(caught.value)


def wrong_operands():
    a, b, c = operands(40, 24, 56, "bf16", "fp32")
    yield "a", (a.half(), b, c)
    yield "a", (a[0], b, c)
    yield "a", (a.contiguous()[:, 1:], b[:, 1:], c)  # starts at 2 bytes
    yield "b", (a, b.t().contiguous().t(), c)  # columns contiguous
    yield "c", (a, b, c.bfloat16())
    yield "a, b, c", (a, b[:, :48], c)
    yield "c", (a, b[:23], c[:, :23])  # rows of C end inside a 16-byte unit
    columns = 65_535 * 128 + 8  # one column tile more than a grid has; B takes no memory, all its rows are the same one
    yield "b", (a[:1], torch.zeros(1, 56, dtype=torch.bfloat16).expand(columns, 56), torch.empty(1, columns))


@pytest.mark.parametrize(("name", "args"), list(wrong_operands()))
def test_operands_tma_cannot_serve(name, args):
    with pytest.raises(ArgumentError) as caught:
        GemmTile().launch_args(*args)
    assert caught.value.name == name


# An instruction cuts 32 products and the accumulator to 13 fraction bits below the largest of them, which for normal
# operands is about 2^-13 of the row's RMS an addend; over 20 instructions single elements were seen 2e-3 off.
FP8_SUMS = check.Tolerance("fp16", abs=4e-3, rel=2.0**-9, cosine=4e-7, tile=1e-3, reason="fp8 sums of Hopper")
SHAPES = [(200, 136, 264), (1, 8, 1), (257, 24, 577), (77, 232, 391)]
NATIVE, EMULATOR = backends.status("native", "sm_90a"), backends.status("emulator", "sm_90a")


@pytest.mark.one_in(2)
@pytest.mark.sm90
@pytest.mark.skipif(
    not (NATIVE.available or EMULATOR.available),
    reason=f"numbers need a back end that runs sm_90a. native: {NATIVE.reason}; emulator: {EMULATOR.reason}",
)
@pytest.mark.parametrize("shape", cases(*SHAPES[:2], full=[(one,) for one in SHAPES[2:]]), ids=str)
def test_numbers(built, shape):
    """Against fp64, for extents that are no multiples of a tile and more K steps than stages."""
    kernel, done = built
    where = backends.resolve("auto", "sm_90a")
    a, b, c = operands(*shape, kernel.in_dtype, kernel.out_dtype, seed=sum(shape), device=backends.device(where))
    backends.launch(where, done, *kernel.launch_args(a, b, c))
    lossy = kernel.in_dtype == "e4m3" and kernel.out_dtype != "bf16"
    result = check.compare(c.cpu(), gemm_tile(a, b).cpu(), tol=FP8_SUMS if lossy else None)
    assert result.passed, str(result)
    assert padding_untouched(c)
