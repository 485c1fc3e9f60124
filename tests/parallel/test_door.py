"""The command on several ranks: started here, or by torchrun. The bytes of one rank; rank 0 alone prints."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

from dsv4lib import env
from dsv4lib.errors import ArgumentError
from dsv4lib.lab import cli
from dsv4lib.loader.model import model_bytes, reading_bytes
from dsv4lib.model.paged import pool_bytes
from dsv4lib.pages.full_model import run_case
from dsv4lib.pages.generation import serving
from dsv4lib.parallel.group import Ranks
from dsv4lib.parallel.plan import Plan, PlanError
from dsv4lib.parallel.watch import EXIT_CODE
from tests.parallel.test_watch import SECONDS

TEXT = ["The sea ", "--tokens", "4", "--backend", "reference"]
HELD = (
    r"rank (\d) holds ([\d,]+) bytes: experts [\d,]+, attention [\d,]+, vocabulary [\d,]+, other [\d,]+, caches [\d,]+"
)


def start(*arguments, launcher=("-m", "dsv4lib.lab.cli")):
    paths = os.pathsep.join(filter(None, (str(env.root()), os.environ.get("PYTHONPATH", ""))))
    given = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "generate", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=given, bufsize=0)


def run(*arguments, **options):
    """Run to the end: its code and what it wrote."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())


@pytest.fixture(scope="module")
def want():
    done = CliRunner().invoke(cli.app, ["generate", *TEXT])
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_the_command_starts_its_ranks_and_ends_them_together(want):
    """The first bytes are those of one rank. A rank that is killed ends all within seconds; no process is left."""
    process = start(TEXT[0], "--tokens", "2000", *TEXT[3:], "--tensor-parallel", "2")
    text = want.rstrip("\n").encode()
    assert b"".join(process.stdout.read(1) for _ in text) == text
    ranks = sorted(psutil.Process(process.pid).children(), key=lambda one: int(one.environ()["RANK"]))
    assert len(ranks) == 2
    begun = time.monotonic()
    ranks[1].kill()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begun < SECONDS and process.returncode in (EXIT_CODE, 128 + signal.SIGKILL)
    *said, last = err.decode().splitlines()
    assert last == "dsv4: rank 1 ended without a word; all ranks end"
    assert re.findall(HELD, err.decode())[0][0] == "0" and len(re.findall(HELD, err.decode())) == 2
    assert sum("tokens of prompt" in line for line in said) == 1 and "Traceback" not in err.decode()
    assert not any(psutil.pid_exists(one.pid) for one in ranks)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        ["--tensor-parallel", "2"],
        ["--tensor-parallel", "2", "--data-parallel", "2"],
        ["--data-parallel", "2", "--expert-parallel", "2"],
        ["--tensor-parallel", "2", "--expert-parallel", "1", "--speculate", "2"],
    ],
    ids=" ".join,
)
def test_the_command_has_the_bytes_of_one_rank(want, sizes):
    done = run(*TEXT, *sizes)
    assert done.returncode == 0 and done.stdout == want, done.stderr
    count = 4 if sizes[2:3] == ["--data-parallel"] else 2
    assert [int(rank) for rank, _ in re.findall(HELD, done.stderr)] == list(range(count))
    assert done.stderr.count("tokens of prompt") == 1 and done.stderr.count("kernels: none") == 1


def test_memory_of_a_rank_is_counted_before_it_is_taken(monkeypatch):
    """Its part of the weights, and its part of what this machine has free; a byte less is refused."""
    listed = run_case.listed()
    ranks = Ranks(Plan.of(listed.config, tensor=4), 3, beside=4)
    options = serving.Options(listed.checkpoint.folder, 8, backend="reference")
    wanted = []
    for here in (None, ranks):
        monkeypatch.setattr(env, "free_memory", lambda: 0)
        with pytest.raises(serving.NotEnoughMemory) as refused:
            serving.require_memory(listed, 512, options, "reference", here)
        wanted.append(refused.value.wanted)
    share, pool = ranks.plan.share(3), {"requests": 1, "tokens": serving.CHUNK, "positions": 512, "drafts": 0}
    weights, reading = model_bytes(listed, 512, share=share), reading_bytes(listed, share=share)
    assert wanted[1] == weights + reading + pool_bytes(listed.config, **pool) < 0.8 * wanted[0]
    monkeypatch.setattr(env, "free_memory", lambda: 4 * wanted[1])
    serving.require_memory(listed, 512, options, "reference", ranks)
    monkeypatch.setattr(env, "free_memory", lambda: 4 * wanted[1] - 1)
    with pytest.raises(serving.NotEnoughMemory):
        serving.require_memory(listed, 512, options, "reference", ranks)


@pytest.mark.full
def test_torchrun_starts_the_ranks(want):
    """Its own store listens at every address: ours does not."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "dsv4lib.lab.cli"]
    done = run(*TEXT, "--tensor-parallel", "2", launcher=launcher)
    assert done.returncode == 0 and done.stdout == want, done.stderr
    assert len(re.findall(HELD, done.stderr)) == 2


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        (["--tensor-parallel", "3"], PlanError, "tensor=3 .*1, 2, 4, 8, divisors of n_heads=8"),
        (["--data-parallel", "2", "--speculate", "1"], PlanError, "drafts=1 .*0 with data=2"),
        (["--expert-parallel", "2"], PlanError, "experts=2 .*divisor of the 1 ranks"),
        (["--tensor-parallel", "0"], PlanError, "tensor=0 .*an integer >= 1"),
    ],
)
def test_sizes_are_refused_before_a_rank_starts(sizes, error, text):
    done = CliRunner().invoke(cli.app, ["generate", *TEXT, *sizes])
    assert isinstance(done.exception, error)
    with pytest.raises(error, match=text):
        raise done.exception


def test_processes_without_a_plan_for_them_are_refused_on_rank_0_alone(monkeypatch):
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        done = CliRunner().invoke(cli.app, ["generate", *TEXT])
        assert done.exit_code and isinstance(done.exception, SystemExit if rank == "1" else ArgumentError)
        assert not done.stdout and not done.stderr
