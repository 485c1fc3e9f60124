"""Ranks as forked processes of a test: what they return, how they ended, what they wrote to stderr."""

import datetime
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from typing import NamedTuple

import psutil
import torch

from dsv4lib.config import schedule
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.convert import save
from dsv4lib.loader.whole import Listed
from dsv4lib.parallel.group import joined
from dsv4lib.parallel.place import Place, served
from dsv4lib.parallel.plan import Plan
from dsv4lib.reference.model import ReferenceModel
from dsv4lib.reference.randomize import randomize_
from tests.whole_model import SMALL

# Four groups of heads whose scales ranks divide whole, five experts, one layer of each kind.
GROUPED = replace(
    SMALL,
    n_layers=3,
    compress_ratios=schedule(3, (0,), 4, 128),
    n_heads=8,
    o_groups=4,
    o_lora_rank=128,
    n_hash_layers=1,
)


def grouped(folder):
    """A checkpoint of `GROUPED` with random weights, MXFP4 and FP8."""
    model = ReferenceModel(GROUPED)
    randomize_(model, GROUPED, 1)
    save(model.state_dict(), GROUPED, folder, "mxfp4")
    return Listed.of(Checkpoint(folder))


class Ended(NamedTuple):
    """How ranks ended: exit codes (negative: a signal), results of those that returned, stderr of all, seconds."""

    codes: list
    found: list
    err: str
    seconds: float


def run(plan, work, tmp_path, *, timeout=60.0, meddle=None, lifeline=None):
    """Fork the ranks of a plan and call ``work(ranks)`` on each; what it returns must be JSON or tensors' lists.

    ``meddle`` is called with the process ids once all are at work; seconds count from then on.
    """
    store = served(Place(), datetime.timedelta(seconds=timeout))
    pids = []
    for rank in range(plan.world):
        sys.stdout.flush()
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        torch.set_num_threads(1)  # a fork has none of the threads that its parent's pool waits for
        try:
            with open(tmp_path / f"err{rank}", "wb", buffering=0) as err:
                os.dup2(err.fileno(), 2)
            place = Place(rank, plan.world, rank, plan.world, port=store.port, agent=True, lifeline=lifeline)
            with joined(plan, place, "cpu", timeout) as ranks:
                (tmp_path / f"at_work{rank}").touch()
                found = work(ranks)
            (tmp_path / f"found{rank}").write_text(json.dumps(found))
            code = 0
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    codes, start = {}, time.monotonic()
    try:
        if meddle is not None:
            wait(lambda: all((tmp_path / f"at_work{rank}").exists() for rank in range(plan.world)))
            meddle(pids)
            start = time.monotonic()
        wait(lambda: all(reaped(pid, codes) or (meddle is not None and stopped(pid)) for pid in pids))
        seconds = time.monotonic() - start
    finally:
        for pid in set(pids) - codes.keys():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    files = [tmp_path / f"found{rank}" for rank in range(plan.world)]
    found = [json.loads(file.read_text()) if file.exists() else None for file in files]
    err = "".join((tmp_path / f"err{rank}").read_text() for rank in range(plan.world))
    return Ended([codes.get(pid) for pid in pids], found, err, seconds)


def wait(done, seconds=120):
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "the ranks are still at work"
        time.sleep(0.01)


def reaped(pid, codes):
    """Whether a process has ended; then its exit code is in ``codes``."""
    if pid not in codes:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return pid in codes


def stopped(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED


def returned(ended):
    """What the ranks returned; all of them must have."""
    assert set(ended.codes) == {0}, (ended.codes, ended.err)
    return ended.found


def alone(config):
    """The ranks of one: no process, no group."""
    from dsv4lib.parallel.group import Ranks

    return Ranks(Plan(config))


def bits(x):
    """A tensor's bits as a list of numbers."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16).flatten().tolist()
