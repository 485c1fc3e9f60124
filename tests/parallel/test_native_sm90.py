"""Ranks on two Hoppers over NCCL: nano's bytes are those of one GPU, started by the command and by torchrun."""

import pytest
import torch

from dsv4lib import backends
from tests.model.test_native_sm90 import held_out
from tests.parallel.test_door import run

NATIVE = backends.status("native", "sm_90a")
pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="ranks over NCCL take two GPUs"),
]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "dsv4lib.lab.cli")


@pytest.fixture(scope="module")
def want():
    """What one GPU writes after text of which no choice is close."""
    done = run(held_out(), "--tokens", "24", "--backend", "native")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "sizes",
    [
        ["--tensor-parallel", "2"],
        ["--data-parallel", "2"],
        ["--tensor-parallel", "2", "--expert-parallel", "1"],
        ["--tensor-parallel", "2", "--speculate", "3"],
    ],
    ids=" ".join,
)
def test_two_gpus_write_the_bytes_of_one(want, sizes):
    done = run(held_out(), "--tokens", "24", "--backend", "native", *sizes)
    assert done.returncode == 0 and done.stdout == want, done.stderr
    assert "rank 1 holds" in done.stderr and "back end native" in done.stderr


def test_torchrun_starts_them_too(want):
    done = run(held_out(), "--tokens", "24", "--backend", "native", "--tensor-parallel", "2", launcher=TORCHRUN)
    assert done.returncode == 0 and done.stdout == want, done.stderr
