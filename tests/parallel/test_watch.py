"""Ranks that die, fail or stand still: all others end within seconds, with one line that names the rank."""

import os
import re
import signal
import time

import psutil
import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.parallel import launch
from dsv4lib.parallel.group import joined
from dsv4lib.parallel.place import Place
from dsv4lib.parallel.plan import Plan
from dsv4lib.parallel.watch import EXIT_CODE, LEAVING, RankEnded
from tests.cases import cases
from tests.parallel.ranks import GROUPED, returned, run

SECONDS = 8.0  # of wall time on a busy machine; it takes a tenth of a second


def at_work(ranks):
    """Call each other without end."""
    while True:
        ranks.world.any(False)


@pytest.mark.parametrize("rank", cases(1, 0, full=[3]))
def test_a_rank_that_is_killed_ends_all(tmp_path, rank):
    plan = Plan.of(GROUPED, tensor=4)
    ended = run(plan, at_work, tmp_path, meddle=lambda pids: os.kill(pids[rank], signal.SIGKILL))
    assert ended.codes == [-signal.SIGKILL if r == rank else EXIT_CODE for r in range(4)]
    assert ended.err == f"dsv4: rank {rank} ended without a word; all ranks end\n"
    assert ended.seconds < SECONDS


def test_a_rank_that_fails_ends_all_and_is_quoted(tmp_path):
    """A refusal is one line of rank 0, an exit code of its own for the rank."""

    def work(ranks):
        if ranks.rank == 2:
            raise ArgumentError("x", 1, "two\nlines")
        at_work(ranks)

    ended = run(Plan.of(GROUPED, tensor=4), work, tmp_path)
    assert ended.codes == [EXIT_CODE, EXIT_CODE, 2, EXIT_CODE]
    assert ended.err == "dsv4: rank 2: x=1 is not allowed: two lines; all ranks end\n"


def test_a_mistake_keeps_its_traceback(tmp_path):
    def work(ranks):
        return 1 // (1 - ranks.rank) if ranks.rank < 2 else at_work(ranks)

    ended = run(Plan.of(GROUPED, tensor=4), work, tmp_path)
    assert ended.codes[1] == 1 and ended.err.count("Traceback") == 1
    assert "dsv4: rank 1: ZeroDivisionError: integer division or modulo by zero; all ranks end\n" in ended.err


def test_ranks_that_are_done_wait_for_one_that_works(tmp_path):
    """Requests of its own may take longer than a call between ranks; no call of theirs is late."""

    def work(ranks):
        if ranks.rank == 1:
            time.sleep(2.5)
        ranks.world.any(False, LEAVING)
        return "done"

    ended = run(Plan.of(GROUPED, tensor=2), work, tmp_path, timeout=0.8)
    assert (ended.codes, ended.err) == ([0, 0], "")


def test_a_rank_that_stands_still_is_named_after_the_timeout(tmp_path):
    plan = Plan.of(GROUPED, tensor=4)
    ended = run(plan, at_work, tmp_path, timeout=3.0, meddle=lambda pids: os.kill(pids[2], signal.SIGSTOP))
    assert ended.codes == [EXIT_CODE, EXIT_CODE, None, EXIT_CODE]
    line = r"dsv4: rank 2 did not reach call \d+ \(any\) of the world group within 3 s; all ranks end\n"
    assert re.fullmatch(line, ended.err), ended.err
    assert 2.5 < ended.seconds < 3 + SECONDS


def test_the_rank_that_others_wait_for_is_named_not_those_who_wait(tmp_path):
    """Rank 3 computes without end: 2 waits for it in their group, 0 and 1 for 2 and 3 in that of all."""

    def work(ranks):
        if ranks.rank == 3:
            time.sleep(600)
        ranks.groups.experts.any(False)
        ranks.world.any(False)

    plan = Plan.of(GROUPED, tensor=4, experts=2)
    ended = run(plan, work, tmp_path, timeout=2.0)
    assert ended.codes == [EXIT_CODE] * 4 and "dsv4: rank 3 did not reach call " in ended.err, ended.err
    assert ended.err.count("\n") == 1


def test_a_long_step_of_all_is_no_timeout(tmp_path):
    def work(ranks):
        for _ in range(3):
            time.sleep(1.0)
            ranks.world.any(False)

    returned(run(Plan.of(GROUPED, tensor=2), work, tmp_path, timeout=1.5))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_watch_that_breaks_ends_all(tmp_path, rank):
    def work(ranks):
        if ranks.rank == rank:
            ranks.world.watch.tell = lambda: 1 // 0
        at_work(ranks)

    ended = run(Plan.of(GROUPED, tensor=4), work, tmp_path)
    line = f"dsv4: rank {rank}: its watch broke: ZeroDivisionError: integer division or modulo by zero; all ranks end\n"
    assert ended.codes == [EXIT_CODE] * 4 and ended.err == line


def test_ranks_end_with_their_launcher(tmp_path):
    """Its end of the pipe is closed, however it ends; without a launcher no line is written."""
    theirs, ours = os.pipe()

    def work(ranks):
        os.close(ours)  # as of a process that was not forked from the launcher
        at_work(ranks)

    def end(_):
        time.sleep(0.2)
        os.close(ours)

    ended = run(Plan.of(GROUPED, tensor=2), work, tmp_path, meddle=end, lifeline=theirs)
    os.close(theirs)
    assert ended.codes == [EXIT_CODE] * 2 and ended.err == "" and ended.seconds < SECONDS


def test_the_launcher_ends_ranks_that_do_not_end_by_themselves(tmp_path, monkeypatch):
    """Rank 0 never joined, so it cannot know that rank 1 failed; SIGTERM does not end it."""
    monkeypatch.setattr(launch, "GRACE", 0.5)
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open(r'{tmp_path}/pid' + os.environ['RANK'], 'w').write(f'{{os.getpid()}}')\n"
        "sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    )
    start = time.monotonic()
    assert launch.launch([str(script)], 2) == 3 and time.monotonic() - start < SECONDS
    assert not psutil.pid_exists(int((tmp_path / "pid0").read_text()))
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert launch.launch([str(script)], 1) == 128 + signal.SIGKILL
    script.write_text(
        "import os\nassert os.environ['WORLD_SIZE'] == '3' and os.environ['MASTER_ADDR'] == '127.0.0.1'\n"
    )
    assert launch.launch([str(script)], 3) == 0


def test_a_rank_that_never_comes_is_named():
    place = Place(0, 2, 0, 2)
    with (
        pytest.raises(RankEnded, match="rank 1 did not join within 1 s"),
        joined(Plan.of(GROUPED, tensor=2), place, "cpu", 1.0),
    ):
        pass
