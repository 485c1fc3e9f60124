"""The embedding kernel on both architectures, byte by byte: ids of both types, padding, ends, schedules, faults."""

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.embedding.arguments import fake_args, launch_args
from dsv4lib.ops.embedding.faults import FAULTS
from dsv4lib.ops.embedding.kernel import Embedding
from dsv4lib.ops.embedding.op import Call, Embedded
from dsv4lib.reference.embedding import embedding, init_streams
from tests.budget import built, small

ARCHS = ("sm_100a", "sm_90a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")


def compiled(arch, *settings, kind=Embedding):
    kernel, code = built(kind, fake_args, arch, *settings)
    assert code.local_bytes == 0 and code.smem_bytes == 0 and code.registers <= 40 and small(code)
    return kernel, code


def case(count, vocab, d, dtype=torch.int64, seed=0):
    """(tokens, weight): ids with both ends of the table, a negative one and two past the end; NaN as others."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (count,), generator=generator)
    hard = torch.tensor([0, vocab - 1, -1, vocab, torch.iinfo(dtype).min, torch.iinfo(dtype).max])
    tokens[: len(hard)] = hard[:count]
    weight = torch.randn(vocab, d, generator=generator).bfloat16()
    weight[0, 0] = float("nan")
    return tokens[torch.randperm(count, generator=generator)].to(dtype), weight


def wanted(tokens, weight, copies):
    """(streams, rows) of the oracle, zeros where there is no row."""
    inside = (tokens >= 0) & (tokens < len(weight))
    rows = torch.where(inside[:, None], embedding(tokens.where(inside, 0), weight), 0)
    return init_streams(rows, copies).contiguous(), rows


def run(tokens, weight, arch="sm_90a", copies=4, keep=True, kind=Embedding, **device):
    """(streams or None, rows or None) of a launch; they begin as 7."""
    kernel, code = compiled(arch, copies, keep, tokens.dtype == torch.int64, kind=kind)
    shape = len(tokens), weight.shape[1]
    streams = torch.full((shape[0], copies, shape[1]), 7.0).bfloat16() if copies else None
    rows = torch.full(shape, 7.0).bfloat16() if keep else None
    gpu = make(arch, **{"checks": "race", **device})
    launch(code, *launch_args(kernel, Call(tokens, weight, Embedded(streams, rows), "emulator")), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return streams, rows


def same(found, want):
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("count", "vocab", "d", "dtype"), [(1, 5, 8, torch.int64), (9, 40, 1032, torch.int64), (7, 11, 4096, torch.int32)]
)
def test_rows_and_streams(arch, count, vocab, d, dtype):
    tokens, weight = case(count, vocab, d, dtype, seed=d)
    assert same(run(tokens, weight, arch), wanted(tokens, weight, 4))


@pytest.mark.parametrize(("copies", "keep"), [(4, False), (0, True), (1, True)])
def test_outputs_that_are_wanted(copies, keep):
    tokens, weight = case(7, 30, 264)
    streams, rows = run(tokens, weight, copies=copies, keep=keep)
    want = wanted(tokens, weight, copies)
    assert (streams is None) == (copies == 0) and (rows is None) == (not keep)
    assert streams is None or same([streams], want[:1])
    assert rows is None or same([rows], want[1:])


def test_a_wide_table_and_outputs_of_larger_rows():
    """Rows of table and outputs at any distance; what lies between stays."""
    tokens, weight = case(8, 30, 264)
    wide, out = torch.full((30, 512), 7.0).bfloat16(), torch.full((8, 6, 512), 7.0).bfloat16()
    wide[:, :264] = weight
    kernel, code = compiled("sm_90a", 4, False, True)
    call = Call(tokens, wide[:, :264], Embedded(out[:, 1:5, :264]), "emulator")
    launch(code, *launch_args(kernel, call), gpu=make("sm_90a"))
    assert same([out[:, 1:5, :264].contiguous()], wanted(tokens, weight, 4)[:1])
    assert bool((out[:, [0, 5]] == 7).all()) and bool((out[..., 264:] == 7).all())


@pytest.mark.parametrize("arch", ARCHS)
def test_all_schedules_give_the_same_bits(arch):
    tokens, weight = case(9, 40, 1032)
    for schedule in SCHEDULES:
        assert same(run(tokens, weight, arch, schedule=schedule, seed=3), wanted(tokens, weight, 4))


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name):
    tokens, weight = case(9, 40, 64)
    assert not same(run(tokens, weight, kind=FAULTS[name]), wanted(tokens, weight, 4))


def test_bad_arguments_are_named():
    for bad, name in (({"copies": 9}, "copies"), ({"copies": 0}, "keep")):
        with pytest.raises(ConfigError, match=name):
            Embedding(**bad)
    tokens, weight = case(3, 9, 64)
    out = Embedded(torch.zeros(3, 4, 64).bfloat16())
    good = Call(tokens, weight, out, "emulator")
    for bad, name in (
        ({"tokens": tokens.int()}, "tokens"),
        ({"tokens": tokens[None]}, "tokens"),
        ({"weight": weight.float()}, "weight"),
        ({"weight": weight[:, :60]}, "weight"),
        ({"out": Embedded(None)}, r"out\.streams"),
        ({"out": Embedded(out.streams[:, :3])}, r"out\.streams"),
        ({"out": out._replace(rows=weight[:3])}, r"out\.rows"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(Embedding(), good._replace(**bad))
