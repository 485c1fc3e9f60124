"""Limits count what a run does: a busy loop, a sleeping hang, a stopped and a starved process, ended children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from dsv4lib.lab.run import meter
from dsv4lib.lab.run.meter import Meter

Start = Callable[[str], int]
BUSY = "while True: pass"


@pytest.fixture
def start() -> Iterator[Start]:
    """start(code) -> pid of a Python process that executes it; killed after the test."""
    started = []

    def one(code: str) -> int:
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        return process.pid

    yield one
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout
        process.stdout.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def sampled(one: Meter, now: float) -> Meter:
    one.sample(now)
    return one


def test_a_busy_loop_ends_at_its_limit_of_cpu_time(start: Start) -> None:
    """However long the wall clock says it took."""
    one = Meter(start(BUSY), 0.0)
    until(lambda: sampled(one, one.at + 1000).cpu_s > 0.3)
    assert one.exceeded(1e6) == ""
    assert "computed past its limit of 0.25 s" in one.exceeded(0.25)
    assert one.computing_s == pytest.approx(one.cpu_s) and one.asleep_s == 0


def test_side_by_side_counts_once(start: Start) -> None:
    """Two processes compute as much as two seconds of one; in a moment they cannot compute longer than it lasts."""
    one = Meter(start(f"import os\nos.fork()\n{BUSY}"), 0.0)
    until(lambda: sampled(one, one.at + 1e-3).cpu_s > 0.2)
    assert one.computing_s <= one.at < 0.2 < one.cpu_s


def test_a_hang_that_sleeps_ends_later(start: Start) -> None:
    one = Meter(start("import time\nprint(flush=True)\ntime.sleep(600)"), 0.0)
    until(lambda: sampled(one, one.at + 10).asleep_s > 0)  # after its start
    slept = one.asleep_s
    one.sample(one.at + 100)
    assert one.asleep_s == pytest.approx(slept + 100)
    assert one.exceeded(one.asleep_s / meter.ASLEEP + 1) == ""
    assert "slept for" in one.exceeded(one.asleep_s / meter.ASLEEP - 1)


def test_what_is_kept_from_running_does_not_count(start: Start) -> None:
    """Stopped, as a run without any core to run on: neither computing nor asleep, until the last limit of all."""
    pid = start("import threading, time\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()")
    one = Meter(pid, 0.0)
    until(lambda: sampled(one, one.at + 1).cpu_s > 0.1)  # its first thread sleeps, another computes
    os.kill(pid, signal.SIGSTOP)
    until(lambda: meter.psutil.Process(pid).status() == meter.psutil.STATUS_STOPPED)
    one.sample(one.at + 1)
    counted, asleep, at = one.computing_s, one.asleep_s, one.at
    one.began = at
    one.sample(at + 290)
    assert one.asleep_s == asleep and one.computing_s == pytest.approx(counted)
    assert one.exceeded(10.0) == ""
    one.sample(at + 310)
    assert "not over after 30 times" in one.exceeded(10.0)
    os.kill(pid, signal.SIGCONT)
    until(lambda: sampled(one, one.at + 1).computing_s > counted + 0.05)


def test_a_starved_run_waits_for_a_core(start: Start) -> None:
    """A thread that is ready to run does not sleep, though the machine gives it next to nothing."""
    one = Meter(start(f"import os\nos.nice(19)\n{BUSY}"), 0.0)
    until(lambda: sampled(one, one.at + 1).cpu_s > 0.05)
    asleep = one.asleep_s
    for _ in range(3):
        one.sample(one.at + 1e6)  # of which it got next to nothing
    assert one.asleep_s == asleep


def test_ended_children_count(start: Start) -> None:
    """Once their parent has waited for them; and those that lost their parent, while they live."""
    code = """import os, signal, sys, time
if (child := os.fork()) == 0:
    if os.fork():
        time.sleep(0.5)
        os._exit(0)  # the grandchild, by now seen, loses its parent
    while time.process_time() < 0.15: pass
    time.sleep(600)
os.waitpid(child, 0)
if (child := os.fork()) == 0:
    while time.process_time() < 0.2: pass
    os._exit(0)
os.waitpid(child, 0)
print("done", flush=True)
time.sleep(600)"""
    pid = start(code)
    one = Meter(pid, 0.0)
    until(lambda: sampled(one, one.at + 1).cpu_s > 0.29)  # /proc counts in hundredths of a second
    assert one.cpu_s < 1 and one.peak_mb > 5
    total = one.cpu_s
    os.kill(pid, signal.SIGKILL)
    until(lambda: meter.psutil.Process(pid).status() == meter.psutil.STATUS_ZOMBIE)
    one.sample(one.at + 1)
    assert one.cpu_s >= total


def test_children_that_no_sample_saw_count(start: Start) -> None:
    child = "    while time.process_time() < 0.2: pass\n    os._exit(0)"
    pid = start(f"import os, time\nif not os.fork():\n{child}\nos.wait()\ntime.sleep(600)")
    one = Meter(pid, 0.0)
    until(lambda: sum(meter.psutil.Process(pid).cpu_times()[2:4]) > 0.15)  # system time counts: so does a meter
    one.sample(1.0)
    assert one.cpu_s > 0.15


def test_own_time_has_the_children_waited_for() -> None:
    before = meter.own_cpu_s()
    subprocess.run([sys.executable, "-S", "-c", "import time\nwhile time.process_time() < 0.2: pass"], check=True)
    assert 0.2 <= meter.own_cpu_s() - before < 1
