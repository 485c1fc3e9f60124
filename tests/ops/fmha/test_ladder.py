"""Stages A, B and C: numbers, checks, schedules and what the compiler says, for every head dimension."""

import pytest
import torch

from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.fmha.arguments import ladder_args
from dsv4lib.ops.fmha.ladder import Ladder
from dsv4lib.pages.fmha.run_case import bits, compiled, run_ladder
from dsv4lib.viz import ptx
from tests.budget import small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
# rows, keys: one tile and less, ragged on both sides, several row tiles, more than two KV tiles
SHAPES = [(1, 1), (128, 128), (130, 333), (77, 600), (300, 129)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", ["a", "b", "c"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_numbers(stage, shape):
    outcome = run_ladder(Ladder, (stage, 128, "bf16"), *shape)
    assert outcome.clean, outcome.findings()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("stage", ["a", "b", "c"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16"), (192, "bf16"), (256, "bf16")])
def test_head_dimensions_and_types(stage, head_dim, dtype):
    outcome = run_ladder(Ladder, (stage, head_dim, dtype), 130, 270)
    assert outcome.clean, outcome.findings()


@pytest.mark.parametrize("keys", [128, 256, 384, 1024, 4096])
def test_nothing_is_lost_from_tile_to_tile(keys):
    """One tolerance from 1 to 32 KV tiles: O is rescaled in place, not carried through conversions."""
    outcome = run_ladder(Ladder, ("c", 128, "bf16"), 64, keys)
    assert outcome.clean, outcome.findings()
    assert outcome.rel_l2 < 2.5e-3  # bf16 of P and O: 1.7e-3 each rounding


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", ["a", "b", "c"])
def test_every_schedule_gives_the_same_bits(stage):
    outcomes = [run_ladder(Ladder, (stage, 128, "bf16"), 130, 520, schedule=s) for s in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes)
    assert len({bits(outcome.output) for outcome in outcomes}) == 1
    assert len({outcome.result.schedule_hash for outcome in outcomes}) >= 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", ["a", "b", "c"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_what_the_compiler_says(stage, head_dim):
    kernel, code = compiled(Ladder, (stage, head_dim, "bf16"))
    assert (code.local_bytes, code.spills) == (0, 0)
    assert code.registers * code.threads <= 65_536
    budget = {row.resource: row for row in kernel.budget()}
    assert code.smem_bytes == budget["SMEM: total"].used and code.threads == budget["threads"].used
    assert all(0 < row.used <= row.limit and row.derivation for row in budget.values())
    assert small(code)
    counts = {
        "tcgen05.mma.cta_group::1.kind::f16": head_dim // 16 + (0 if stage == "a" else 8),
        "cp.async.bulk.tensor.2d": 2 * head_dim // 64,
        "tcgen05.alloc": 1,
        "tcgen05.dealloc": 1,
        "ld.local": 0,
    }
    assert {name: ptx.count(code.ptx, name) for name in counts} == counts


@pytest.mark.parametrize(("name", "value"), [("stage", "d"), ("head_dim", 512), ("head_dim", 100), ("dtype", "fp32")])
def test_bad_configurations_are_named(name, value):
    with pytest.raises(ConfigError, match=name):
        Ladder(**{name: value})


def test_bad_arguments_are_named():
    kernel = Ladder("c", 64)
    good = {
        "q": torch.zeros(5, 64, dtype=torch.bfloat16),
        "kv": torch.zeros(7, 64, dtype=torch.bfloat16),
        "out": torch.zeros(5, 64, dtype=torch.bfloat16),
        "lse": torch.zeros(5),
    }
    ladder_args(kernel, **good, scale=1.0)
    bad = {
        "q": [good["q"].float(), good["q"][:, :32], good["q"].T, torch.zeros(5, 72, dtype=torch.bfloat16)[:, 1:65]],
        "kv": [good["kv"][:0], None, good["kv"].flatten()],
        "out": [good["out"][:4], good["out"].half()],
        "lse": [None, torch.zeros(4)],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ArgumentError, match=name):
                ladder_args(kernel, **{**good, name: value}, scale=1.0)
