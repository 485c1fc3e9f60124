"""What protects by default: a huge grid costs nothing before it runs, endless launches end, memory has a limit."""

import math
import resource
import time
from collections import deque

import numpy as np
import pytest
from typer.testing import CliRunner

from dsv4lib import emulator
from dsv4lib.emulator.driver import device
from dsv4lib.emulator.errors import LimitExceeded
from dsv4lib.emulator.machine import limits, scheduler
from dsv4lib.emulator.machine.limits import ClusterQueue
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.sanitize import command
from dsv4lib.errors import ArgumentError
from dsv4lib.lab import cli
from tests.emulator.launching import launch, prepare

EMPTY = ".visible .entry k(.param .u64 a) { ret; }"
SPIN = (
    ".visible .entry k(.param .u64 a) { .reg .b32 %r1; .reg .pred %p1; mov.u32 %r1, 0;"
    "L: add.s32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L; ret; }"
)


@pytest.mark.parametrize(
    ("grid", "cluster", "chosen"),
    [
        ((5, 3, 2), (1, 1, 1), None),
        ((6, 4, 3), (2, 1, 3), None),
        ((4, 4, 2), (2, 2, 1), {(2, 0, 1), (0, 2, 0), (2, 2, 0), (0, 0, 1)}),
    ],
)
def test_clusters_come_in_order(grid, cluster, chosen):
    (gx, gy, gz), (cx, cy, cz) = grid, cluster
    expected = [(x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx)]
    expected = deque(place for place in expected if chosen is None or place in chosen)
    queue = ClusterQueue(grid, cluster, chosen)
    while expected:
        assert len(queue) == len(expected) and queue
        assert queue.popleft() == expected.popleft()
    assert not queue
    with pytest.raises(IndexError):
        queue.popleft()


def test_a_grid_of_all_that_is_allowed_starts_at_once():
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    machine = prepare(EMPTY, 0, grid=(2**31 - 1, 65535, 65535), settings=Settings(instruction_limit=1000))
    assert len(machine.queue) == (2**31 - 1) * 65535**2
    with pytest.raises(LimitExceeded, match="instruction limit of 1,000 reached"):
        machine.run()
    assert 1000 <= machine.stats["ctas"] < 2000
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_every_launch_has_limits_and_errors_say_how_to_raise_them(monkeypatch):
    settings = device.make().settings
    assert (
        (settings.instruction_limit, settings.time_limit)
        == (10**10, 1800)
        == tuple(getattr(Settings(), name) for name in ("instruction_limit", "time_limit"))
    )
    how = r"raise it with instruction_limit=, dsv4 emulate --instruction-limit, or DSV4_EMULATOR_INSTRUCTIONS"
    with pytest.raises(LimitExceeded, match=how):
        launch(SPIN, 0, settings=Settings(instruction_limit=1000))
    how = (
        r"time limit of 0.1 s reached \(raise it with time_limit=, dsv4 emulate --time-limit, or DSV4_EMULATOR_SECONDS"
    )
    with pytest.raises(LimitExceeded, match=how):
        launch(SPIN, 0, settings=Settings(time_limit=0.1))


def test_the_environment_sets_and_arguments_win(monkeypatch):
    for name, value in {"INSTRUCTIONS": "77", "SECONDS": "inf", "BYTES": "4096", "CORES": "3"}.items():
        monkeypatch.setenv(f"DSV4_EMULATOR_{name}", value)
    settings = device.make().settings
    assert (settings.instruction_limit, settings.time_limit, settings.memory_limit) == (77, math.inf, 4096)
    assert settings.cores == 3 and device.make(cores=2).settings.cores == 2
    settings = device.make(instruction_limit=5, time_limit=6.0, memory_limit=7).settings
    assert (settings.instruction_limit, settings.time_limit, settings.memory_limit) == (5, 6.0, 7)
    wrongs = ((limits.INSTRUCTIONS, "1e9"), (limits.SECONDS, "nan"), (limits.BYTES, "-1"), (limits.CORES, "0"))
    for limit, wrong in wrongs:
        with monkeypatch.context() as patch:
            patch.setenv(limit.variable, wrong)
            with pytest.raises(ArgumentError, match=f"{limit.variable}='{wrong}' .*a positive number of"):
                device.make()


def test_only_commands_use_every_core(monkeypatch):
    monkeypatch.delenv("DSV4_EMULATOR_CORES", raising=False)
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: set(range(7)))
    assert device.make().settings.cores == Settings().cores == 1
    asked = []
    monkeypatch.setattr(command, "run", lambda wish: asked.append(wish.settings["cores"]) or 0)
    for name in ("emulate", "sanitize"):
        for options in ([], ["--cores", "3"]):
            assert CliRunner().invoke(cli.app, [name, *options, "k.ptx"]).exit_code == 0
    monkeypatch.setenv("DSV4_EMULATOR_CORES", "2")
    assert CliRunner().invoke(cli.app, ["emulate", "k.ptx"]).exit_code == 0
    assert asked == [7, 3, 7, 3, 2]


def test_time_that_others_had_does_not_count(monkeypatch):
    """On a busy machine the clock on the wall runs ahead: the limit is of the processor time that the launch had."""
    ahead = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: next(ahead))
    machine = prepare(SPIN, 0, settings=Settings(time_limit=0.2))
    began = time.process_time()
    with pytest.raises(LimitExceeded, match="time limit of 0.2 s"):
        machine.run()
    assert time.process_time() - began >= 0.2


@pytest.mark.parametrize("size", [2**40, 2**62, 2**70])
def test_memory_that_cannot_be_is_refused(size):
    gpu = device.make(memory_limit=10**6)
    message = rf"nbytes={size} is not allowed: at most 1,000,000 bytes, of which 0 .*DSV4_EMULATOR_BYTES"
    with pytest.raises(ArgumentError, match=message):
        gpu.empty(size, "much")
    with pytest.raises(ArgumentError, match=r"nbytes=\d+ is not allowed: at most [\d,]+ bytes"):
        device.make().empty(size, "more than this machine has")
    with pytest.raises(ArgumentError, match="what this machine's memory has room for"):
        device.make(memory_limit=2**80).empty(2**62, "much")
    for bad in (-1, 1.5, None):
        with pytest.raises(ArgumentError, match="nbytes="):
            gpu.empty(bad, "none")


def test_allocations_add_up_and_free_gives_back():
    gpu = device.make(memory_limit=1000)
    first = gpu.empty(600, "a")
    with pytest.raises(ArgumentError, match="of which 600 are allocated"):
        gpu.empty(401, "b")
    gpu.free(first.ctypes.data)
    gpu.copy(np.zeros(250, np.float32))
    with pytest.raises(ArgumentError, match="of which 1,000 are allocated"):
        gpu.copy(np.zeros(1, np.uint8))


def test_symmetric_memory_counts():
    with emulator.devices(2, shims=False, memory_limit=10_000) as gpus:
        gpus.symmetric(1000, np.uint8)
        with pytest.raises(ArgumentError, match=r"nbytes=9000 is not allowed: at most 10,000 .*3,000 are allocated"):
            gpus.symmetric(3000, np.uint8)
        with pytest.raises(ArgumentError, match="at most 10,000 bytes"):
            gpus.symmetric(2**45, np.float32)


def test_the_command_line_states_the_limits_and_whose_rights_a_script_has():
    from typer.testing import CliRunner

    from dsv4lib.lab import cli

    text = " ".join(CliRunner().invoke(cli.app, ["emulate", "--help"], env={"COLUMNS": "300"}).stdout.split())
    assert "with your rights" in text
    for limit, default in ((limits.INSTRUCTIONS, "10^10"), (limits.SECONDS, "1800"), (limits.BYTES, "memory")):
        assert limit.option in text and f"{default}]" in text and limit.variable.rpartition("_")[2] in text
    assert limits.INSTRUCTIONS.default == 10**10 and limits.SECONDS.default == 1800
