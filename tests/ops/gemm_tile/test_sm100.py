"""The gemm_tile kernel: what can be known without running it, and its numbers where a back end runs it."""

import dataclasses

import pytest
import torch

from dsv4lib import backends, check
from dsv4lib.dsl import layouts
from dsv4lib.dsl.compile import compile_for
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.gemm_tile import sm100
from dsv4lib.ops.gemm_tile.inputs import SENTINEL, operands, padding_untouched
from dsv4lib.ops.gemm_tile.sm100 import GemmTile
from dsv4lib.reference.gemm_tile import gemm_tile
from dsv4lib.viz import ptx
from tests import budget
from tests.cases import cases

CONFIGS = [  # in, out, tile_n, stages: every type, an epilogue of 1, 2, 3 and more chunks, one stage, a full SMEM
    ("bf16", "fp32", 128, 4),
    ("fp16", "fp16", 256, 4),
    ("bf16", "bf16", 112, 1),
    ("fp16", "fp32", 16, 7),
    ("bf16", "fp32", 32, 11),
    ("fp16", "fp32", 48, 2),
    ("bf16", "bf16", 64, 8),
]


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda c: "-".join(map(str, c)))
def built(request):
    kernel = GemmTile(*request.param)  # compiled here: tracing writes down the layouts that a test reads
    return kernel, compile_for(kernel, kernel.fake_args())


def total(kernel, resource):
    return next(row.used for row in kernel.budget() if row.resource == resource)


def test_instructions_follow_from_the_configuration(built):
    kernel, done = built
    counts = {
        "tcgen05.mma.cta_group::1.kind::f16": kernel.tile_k // kernel.mma_k,  # one K step, not unrolled further
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier": 2,  # one box of A, one of B
        "mbarrier.init": 2 * (kernel.stages + 1),
        "mbarrier.arrive.expect_tx": 1,
        "tcgen05.commit": 2,  # hand a stage back; the accumulator is complete
        "tcgen05.alloc": 1,
        "tcgen05.relinquish_alloc_permit": 1,
        "tcgen05.dealloc": 1,
        f"tcgen05.ld.sync.aligned.32x32b.x{kernel.epilogue_n}": 1,
        "tcgen05.wait::ld": 1,
        "st.global.v4": kernel.epilogue_n * kernel.c_type.width // 128,
        "ld.local": 0,
        "st.local": 0,
    }
    assert {name: ptx.count(done.ptx, name) for name in counts} == counts


def test_compiler_and_budget_agree(built):
    kernel, done = built
    assert done.smem_bytes == kernel.smem_bytes == total(kernel, "SMEM: total")
    parts = sum(row.used for row in kernel.budget() if row.resource.startswith("SMEM") and "total" not in row.resource)
    assert parts <= kernel.smem_bytes < parts + sm100.SMEM_ALIGN
    assert done.threads == total(kernel, "threads")
    assert (done.local_bytes, done.spills) == (0, 0)
    assert done.registers * done.threads <= 65_536
    assert budget.small(done)
    for row in kernel.budget():
        assert 0 < row.used <= row.limit and row.derivation


def test_compiler_and_budget_agree_on_tensor_memory(built):
    """The columns in the PTX: tcgen05.alloc takes them from a register that was just set to that constant."""
    kernel, done = built
    lines = done.ptx.splitlines()
    at = next(i.ptx_line for i in ptx.instructions(done.ptx) if i.opcode.startswith("tcgen05.dealloc"))
    register = lines[at - 1].rstrip(" ;").split()[-1]
    setter = next(line for line in reversed(lines[:at]) if f"mov.b32 \t{register}," in line)
    assert int(setter.rstrip(";").split()[-1]) == kernel.tmem_columns == total(kernel, "TMEM: C tile")
    accumulator = layouts.tmem_accumulator(128, kernel.tile_n)
    assert int((accumulator.offsets & 0xFFFF).max()) < kernel.tmem_columns


def test_figures_of_the_layouts_are_of_this_kernel(built):
    kernel, _ = built
    assert kernel.layout_text["A"] == layouts.smem_operand(128, kernel.tile_k, kernel.in_dtype).text
    assert kernel.layout_text["C"] == layouts.tmem_accumulator(128, kernel.tile_n).text
    assert kernel.layout_text["B"].startswith("S<3,4,3>")


def test_python_lines_reach_the_ptx(built):
    _, done = built
    source = open(sm100.__file__).read().splitlines()
    found = [i for i in ptx.instructions(done.ptx) if i.opcode.startswith(("tcgen05.mma", "cp.async.bulk.tensor"))]
    assert {i.file for i in found} == {"sm100.py"}
    assert {source[i.line - 1].split("(")[0].strip() for i in found} == {"cute.gemm", "cute.copy"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ["sm_103a", "sm_100f"])
def test_other_blackwell_targets(arch):
    done = compile_for(GemmTile(), GemmTile().fake_args(), arch)
    assert f"\n.target {arch}\n" in done.ptx
    assert ptx.count(done.ptx, "tcgen05.mma.cta_group::1.kind::f16") == 4
    assert done.spills == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("in_dtype", "fp32"),
        ("in_dtype", None),
        ("out_dtype", "fp16"),
        ("tile_n", 0),
        ("tile_n", 24),
        ("tile_n", 272),
        ("tile_n", 128.0),
        ("tile_n", True),
        ("stages", 0),
        ("stages", 8),
        ("stages", True),
        ("stages", "4"),
    ],
)
def test_configurations_the_hardware_does_not_have(name, value):
    with pytest.raises(ConfigError) as caught:
        GemmTile(**{name: value})
    assert caught.value.name == name
    assert repr(value) in str(caught.value)


def test_stages_end_exactly_where_shared_memory_does():
    for tile_n in range(16, 257, 16):
        with pytest.raises(ConfigError) as caught:
            GemmTile(tile_n=tile_n, stages=99)
        most = int(caught.value.allowed.split("..")[1].split()[0])
        stage = 128 * (128 + tile_n)
        assert GemmTile(tile_n=tile_n, stages=most).smem_bytes <= sm100.SMEM_LIMIT
        assert (most + 1) * (stage + 16) + 20 > sm100.SMEM_LIMIT


def wrong_operands():
    a, b, c = operands(40, 24, 56, "bf16", "fp32")
    yield "a", (a.half(), b, c)
    yield "a", (a[0], b, c)
    yield "a", (a[:, :0], b[:, :0], c)
    yield "a", (a.contiguous()[:, 1:], b[:, 1:], c)  # starts at 2 bytes
    yield "a", (torch.zeros(40, 55, dtype=torch.bfloat16), b[:, :55], c)  # 110-byte rows
    yield "b", (a, b.t().contiguous().t(), c)  # columns contiguous
    yield "c", (a, b, c.bfloat16())
    yield "a, b, c", (a, b[:, :48], c)
    yield "a, b, c", (a[:39], b, c)
    columns = 65_535 * 128 + 8  # one column tile more than a grid has; B takes no memory, all its rows are the same one
    yield "b", (a[:1], torch.zeros(1, 56, dtype=torch.bfloat16).expand(columns, 56), torch.empty(1, columns))


@pytest.mark.parametrize(("name", "args"), list(wrong_operands()))
def test_operands_tma_cannot_read(name, args):
    with pytest.raises(ArgumentError) as caught:
        GemmTile().launch_args(*args)
    assert caught.value.name == name


def test_inputs_expose_faults():
    a, b, c = operands(37, 20, 51, "fp16", "fp16", seed=3)
    assert (a.stride(), b.stride(), c.stride()) == ((56, 1), (56, 1), (24, 1))
    assert bool(torch.isnan(a.as_strided((37, 56), (56, 1))[:, 51:]).all())
    assert padding_untouched(c) and bool((c == SENTINEL).all())
    c.as_strided((37, 24), (24, 1))[36, 20] = 0
    assert not padding_untouched(c)
    assert [x.stride(0) for x in operands(8, 16, 64, "bf16", "fp32")] == [72, 72, 20]  # padded even where aligned
    rows = a.double().std(dim=1)
    assert rows[-1] / rows[0] > 50


def test_reference_is_a_product_in_fp64():
    a, b, _ = operands(5, 7, 11, "bf16", "fp32")
    c = gemm_tile(a, b)
    assert c.dtype == torch.float64
    expected = [[sum(float(a[i, k]) * float(b[j, k]) for k in range(11)) for j in range(7)] for i in range(5)]
    assert torch.allclose(c, torch.tensor(expected, dtype=torch.float64), rtol=1e-13)


SHAPES = [(200, 136, 264), (129, 515, 333), (1, 1, 1), (300, 260, 520), (257, 23, 577), (77, 225, 391)]
NATIVE, EMULATOR = backends.status("native", "sm_100a"), backends.status("emulator", "sm_100a")


@pytest.mark.one_in(2)
@pytest.mark.sm100
@pytest.mark.skipif(
    not (NATIVE.available or EMULATOR.available),
    reason=f"numbers need a back end that runs sm_100a. native: {NATIVE.reason}; emulator: {EMULATOR.reason}",
)
@pytest.mark.parametrize("shape", cases(*SHAPES[:3], full=[(one,) for one in SHAPES[3:]]), ids=str)
def test_numbers(built, shape):
    """Against fp64, for extents that are no multiples of anything and more K steps than stages."""
    kernel, done = built
    where = backends.resolve("auto", "sm_100a")
    a, b, c = operands(*shape, kernel.in_dtype, kernel.out_dtype, seed=sum(shape), device=backends.device(where))
    backends.launch(where, done, *kernel.launch_args(a, b, c))
    result = check.compare(c.cpu(), gemm_tile(a, b).cpu())
    assert result.passed, str(result)
    assert padding_untouched(c)


def test_budget_rows_are_plain_values():
    assert [dataclasses.astuple(row)[1] for row in GemmTile().budget()] == [65536, 65536, 84, 132096, 128, 192]
