"""Hopper's MLA decode: fp64, page sizes, tails, splits, schedules, the op, faults, budget."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.errors import ConfigError
from dsv4lib.ops.mla_decode import bench
from dsv4lib.ops.mla_decode.inputs import NOWHERE, case
from dsv4lib.ops.mla_decode.op import E4M3, SM_SCALE, mla_decode
from dsv4lib.ops.mla_decode.sm90.faults import CAUGHT_BY, FAULTS
from dsv4lib.ops.mla_decode.sm90.kernel import MlaDecode
from dsv4lib.ops.mla_decode.sm90.launch import choose_splits
from dsv4lib.ops.mla_decode.splits import mla_workspace_size
from tests.budget import small
from tests.cases import cases
from tests.ops.mla_decode.hopper import ARCH, errors, run, scales_of

BF16, FP16 = torch.bfloat16, torch.float16
RUNS = {  # lengths, heads, page
    "padded rows": (([100, 0, -1, 300, 64], 5, 16), {}),
    "two head blocks": (([130], 70, 64), {}),
    "FP8 cache": (([129, 0, 300], 16, 64), {"kv_dtype": E4M3}),
    "fp16, large logits": (([193, 1], 16, 128), {"dtype": FP16, "spread": 100.0}),
}
LONG = {
    "FP8": (([200, 77], 70, 16), {"dtype": E4M3, "kv_dtype": E4M3, "spread": 4.0}),
    "FP8 cache, pages of 128": (([65, -1, 257], 5, 128), {"kv_dtype": E4M3}),
    "128 heads": (([257, 64, 129], 128, 128), {}),
    "pages of 32": (([96, 95, 33], 3, 32), {}),
    "one head, one token": (([1], 1, 64), {"dtype": FP16}),
    "many tiles": (([1030], 16, 64), {"spread": 10.0}),
    "fp16, pages of 16": (([65, 127], 37, 16), {"dtype": FP16}),
}
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
pytestmark = pytest.mark.filterwarnings("error:the emulator reports")  # hazards


def made(name):
    given, options = (RUNS | LONG)[name]
    return case(*given, past=NOWHERE, seed=3, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", cases(*RUNS, full=LONG))
def test_numbers(name):
    """Against fp64; no report, nothing written past the outputs, nothing spilled, sizes as budgeted."""
    outcome = run(made(name))
    assert outcome.clean, outcome.findings()
    done, rows = outcome.compiled, {row.resource: row for row in outcome.kernel.budget()}
    assert (done.local_bytes, done.spills) == (0, 0) and small(done) and "setmaxnreg.inc" in done.ptx
    assert (done.smem_bytes, done.threads) == (rows["SMEM: total"].used, rows["threads"].used)
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())


@pytest.mark.parametrize("splits", cases(3, full=(2, 7)))
def test_splits_combine_to_the_whole(splits):
    """More splits than some requests have tiles."""
    outcome = run(case([330, 0, 70], 5, 16, past=NOWHERE, spread=10.0), splits=splits)
    assert outcome.clean, outcome.findings()


def test_every_schedule_gives_the_same_bits():
    one = case([270], 9, 64, spread=10.0)
    outcomes = [run(one, schedule=schedule) for schedule in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({(o.out.view(torch.int16).numpy().tobytes(), o.lse.numpy().tobytes()) for o in outcomes}) == 1


def test_pages_anywhere_give_the_same_bits():
    """Four page sizes, pages in order and shuffled, memory apart: the same tokens, the same result."""
    outputs = []
    plain = case([150], 4, 16, shuffled=False)
    tokens = plain.kv_cache[plain.page_table[0, :10].long()].flatten(0, 1)
    for page, shuffle in ((16, True), (64, False), (128, True)):
        pages = -(-150 // page)
        order = torch.arange(pages).flip(0) if shuffle else torch.arange(pages)
        wide = torch.full((pages + 1, page, 640), float("nan"), dtype=BF16)
        cache = wide[:, :, :576]
        for i in range(pages):
            part = tokens[i * page : (i + 1) * page]
            cache[order[i], : len(part)] = part
        table = torch.full((1, 128 // page * 2), -1, dtype=torch.int32)
        table[0, :pages] = order.int()
        outcome = run(plain._replace(kv_cache=cache, page_table=table))
        assert outcome.clean, outcome.findings()
        outputs.append(outcome.out)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", cases(1, 2, full=(-1,)))
def test_the_op(splits):
    """Through torch: padded rows, a workspace, and splits by a second launch."""
    one = case([140, 0, 9], 6, 64, past=NOWHERE)
    space = torch.empty(mla_workspace_size(256, 3, 132, max(splits, 2)), dtype=torch.uint8)
    with backends.emulating(ARCH):
        out, lse = mla_decode(*one, workspace=space, num_kv_splits=splits, backend="emulator")
    wrong, peer, of_lse = errors(one, out, lse, SM_SCALE)
    assert wrong <= 2 * peer and of_lse < 1e-4


@pytest.mark.parametrize("dtype", cases(E4M3, full=(BF16,)))
def test_the_op_with_an_fp8_cache(dtype):
    """Queries of FP8 or bf16, both scales, two splits."""
    one = case([140, 0, 9], 6, 64, dtype=dtype, kv_dtype=E4M3, past=NOWHERE)
    q_scale, kv_scale = scales_of(one)
    with backends.emulating(ARCH):
        given = {"q_scale": q_scale, "kv_scale": kv_scale, "num_kv_splits": 2}
        out, lse = mla_decode(*one, **given, backend="emulator")
    wrong, peer, of_lse = errors(one, out, lse, SM_SCALE)
    assert out.dtype == BF16 and wrong <= 2 * peer and of_lse < 1e-4


def test_splits_follow_from_shapes():
    """A CTA is an item: 16 heads of 32 requests fill 128 of 132 SMs with 4 splits, 128 heads with 2."""
    assert [choose_splits(32, heads, 4096, 132) for heads in (16, 64, 65, 128)] == [4, 4, 2, 2]
    assert choose_splits(128, 16, 4096, 132) == choose_splits(128, 128, 65536, 132) == 1
    assert choose_splits(1, 128, 32768, 132) == 64 and choose_splits(1, 16, 64, 132) == 1


DEFAULT = ("NoProxyFence", "WrongHalf", "OwnMaximum", "TailNotCleared", "ConvertedUnseen")
OF_FP8 = ("ConvertedUnseen", "TailConverted")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", cases(*DEFAULT, full=sorted(set(FAULTS) - set(DEFAULT))))
def test_faults_are_found(name):
    one = case([270], 9, 64, spread=30.0, kv_dtype=E4M3 if name in OF_FP8 else None)
    outcome = run(one, FAULTS[name])
    kinds = {hazard.kind for hazard in outcome.hazards}
    assert CAUGHT_BY[name] in kinds | ({"wrong numbers"} if not outcome.right else set()), outcome.findings()
    assert run(one).clean


def test_every_fault_has_its_finder():
    assert set(FAULTS) == set(CAUGHT_BY)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dtype": "fp8"}, "dtype"),
        ({"page": 48}, "page"),
        ({"queries": "fp8"}, "queries"),
        ({"out": "fp32"}, "out"),
    ],
)
def test_options_that_do_not_exist(options, name):
    with pytest.raises(ConfigError) as error:
        MlaDecode(**options)
    assert error.value.name == name


def test_the_check_of_the_bench_takes_rounding_and_refuses_one_wrong_head():
    given = bench.given_of(3, 100, 2, torch.Generator().manual_seed(1))
    q, out = given["q"], bench.new(given)
    cache = given["cache"], given["lengths"], given["table"]
    mla_decode(q[..., :512], q[..., 512:], *cache, out=out["o"], lse=out["lse"], backend="reference")
    bench.check(given, out)
    out["o"][1, 2] *= 1.05
    with pytest.raises(AssertionError, match="request 1"):
        bench.check(given, out)
