"""Test-wide settings: one thread per test process, so parallel tests do not fight for cores; garbage is collected less;
SIGTERM cleans up; what is cached of kernels in memory does not outlive its test module.

Tests marked `full` are further cases (the second architecture, more shapes, the other schedules) of what the default
run checks already. ``--all`` runs them, ``--tenth N`` runs every tenth of them, by the hash of their names; of other
people's kernels (`./dsv4 test --corpus`) three tenths. `one_in(n)` marks all cases of a test but one in n."""

import contextlib
import ctypes
import functools
import gc
import itertools
import os
import signal
import sys
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

sys.modules.setdefault("rfc3987_syntax", None)  # see dsv4lib/lab/run/quick_nbformat.py: 1 s of every test process
torch.set_num_threads(1)
# Most objects stay: torch's, the CuTe DSL's, a compiler's and an emulator's within a test. Looking at the young ones
# every 700 allocations took a tenth of the tests' time; a look every 10,000 leaves the process no larger.
gc.set_threshold(10_000, 10, 10)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: fixtures and temporary folders end properly

if packages := os.environ.get("DSV4_CORPUS_SITE"):  # set by `./dsv4 test --corpus`; last: the lab's own pins win
    sys.path.append(packages)


def pytest_addoption(parser):
    group = parser.getgroup("dsv4")
    group.addoption("--all", action="store_true", help="also run the tests marked full")
    text = "also run this tenth of them, three tenths of the corpus"
    group.addoption("--tenth", type=int, choices=range(10), metavar="0..9", help=text)


def pytest_configure(config):
    text = "one_in(n): one case in n by default, every value at least once if that suffices; the others are full"
    config.addinivalue_line("markers", text)


def pytest_report_header(config):
    chosen = config.option.tenth
    tenths = ", ".join(map(str, sorted(chosen_tenths(config))))
    some = f"of ten parts {tenths} (again: --tenth {chosen})" if tenths else "none; --all runs them"
    return f"tests marked full: {'all' if config.option.all else some}"


def tenth_of(name: str) -> int:
    """Which tenth a test belongs to: the same on every machine, whatever tests there are beside it."""
    return zlib.crc32(name.encode()) % 10


def chosen_tenths(config) -> set[int]:
    """The tenths that ``--tenth`` chooses: one, of other people's kernels three."""
    chosen = config.option.tenth
    steps = (0, 3, 6) if os.environ.get("DSV4_CORPUS_SITE") else (0,)
    return set() if chosen is None else {(chosen + step) % 10 for step in steps}


def spread(cases: list[dict], number: int) -> list[int]:
    """Choose ``number`` cases (arguments and their values), in order: each the one with most values not yet chosen."""
    waiting = {i: {(name, repr(value)) for name, value in case.items()} for i, case in enumerate(cases)}
    chosen, seen = [], set()
    for _ in range(min(number, len(cases))):
        chosen.append(max(waiting, key=lambda i: len(waiting[i] - seen)))
        seen |= waiting.pop(chosen[-1])
    return sorted(chosen)


def mark_further(items):
    """Mark `full` what `one_in` leaves out: of the cases of a test that are not full all but one in n."""
    thinned = [i for i in items if i.get_closest_marker("one_in") and not i.get_closest_marker("full")]
    if alone := [item.nodeid for item in thinned if not hasattr(item, "callspec")]:
        raise pytest.UsageError(f"one_in chooses among cases, and this test has none: {alone[0]}")
    for _, group in itertools.groupby(thinned, lambda item: (item.path, item.nodeid.partition("[")[0])):
        cases = list(group)
        (n,) = cases[0].get_closest_marker("one_in").args
        kept = set(spread([item.callspec.params for item in cases], -(-len(cases) // n)))
        for number, item in enumerate(cases):
            if number not in kept:
                item.add_marker(pytest.mark.full)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out tests marked `full` that are not selected, by an option, by name or by their mark."""
    mark_further(items)
    config.left_out = []
    option, tenths = config.option, chosen_tenths(config)
    if option.all or "full" in option.markexpr or any("::" in argument for argument in config.args):
        return
    whole = len(tenths) > 1  # other people's kernels: marked or not
    left = [i for i in items if (whole or i.get_closest_marker("full")) and tenth_of(i.nodeid) not in tenths]
    config.left_out = [item.nodeid for item in left]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_collection_finish(session):
    """Set aside what collecting has made: it stays to the end, and a look at it takes half a second.

    What a test or a module fails to give back is younger, and found as before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def kernels_in_memory(request):
    """Forget kernels after each module, and what its functions cache; give the heap's free pages back.

    Within an hour these are gigabytes: a compiled kernel has an engine, its PTX, and what that is lowered to.
    """
    yield
    for one in vars(request.module).values():
        if isinstance(one, functools._lru_cache_wrapper) and one.__module__.startswith("tests."):
            one.cache_clear()
    if compiled := sys.modules.get("dsv4lib.ops.common.compile_cache"):
        compiled.default().clear()
    if binary := sys.modules.get("dsv4lib.emulator.driver.binary"):
        binary.parsed.cache_clear()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def pytest_itemcollected(item):
    """What the ledger of flaky tests names, by test or by file::name, may fail until its entry expires."""
    if entry := known_flaky(item.config.rootpath, item.nodeid):
        reason = f"known to be flaky until {entry.expires}, issue {entry.issue}: {entry.reason}"
        item.add_marker(pytest.mark.xfail(reason=reason, strict=False))


@functools.cache
def flaky(root):
    from dsv4lib.lab import ledger

    return ledger.living(root)


def known_flaky(root, name):
    """The living entry of a test, or None."""
    return flaky(root).get(name) or flaky(root).get(name.partition("[")[0])
