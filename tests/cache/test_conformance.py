"""Our manager under its own kit, in three arrangements; a naive manager fails there."""

import caches
import pytest

from dsv4lib.cache import Work
from dsv4lib.cache.conformance import Conformance, check_edges, check_hits, run_machine


class TestPaged(Conformance):
    factory = staticmethod(caches.paged)


class TestRings(Conformance):
    factory = staticmethod(caches.rings)


class TestPro(Conformance):
    factory = staticmethod(caches.pro)


class Naive:
    """A manager that shares entries alone, and gives out the window ring of an earlier request (as ATOM #1417)."""

    shape, drafts, shortest_hit, full, can = caches.FLASH_LIKE, 0, 9, MemoryError, frozenset()

    def __init__(self):
        self.requests, self.done, self.rings = {}, [], {}

    def add(self, request, tokens):
        hit, entries = 0, {}
        for old, values in self.done:
            for point in range(8, min(len(old), len(tokens) - 1) + 1, 8):
                if old[:point] == tokens[:point] and point > hit:
                    hit, entries = point, dict(values)
        self.requests[request] = (list(tokens), entries)
        return hit

    def append(self, request, tokens):
        self.requests[request][0].extend(tokens)

    def cut(self, request, count):
        return count

    def begin(self, batch):
        pass

    def commit(self, accepted):
        pass

    def _of(self, request, group):
        return self.requests[request][1] if group in ("csa", "keys", "hca") else self.rings

    def get(self, request, group, layer, index):
        return self._of(request, group).get((group, layer, index), 0)

    def put(self, request, group, layer, index, value):
        self._of(request, group)[group, layer, index] = value

    def finish(self, request):
        self.done.append(self.requests.pop(request))

    def check(self):
        pass


@pytest.mark.parametrize("check", (check_edges, check_hits, run_machine))
def test_a_naive_manager_fails(check):
    with pytest.raises(AssertionError):
        check(Naive)


@pytest.mark.parametrize("factory", (caches.paged, caches.rings, caches.pro))
def test_a_finished_request_gives_up_late_tokens_first_and_states_before_entries(factory):
    """Longer prefixes need the entries of a point, so its windows and states are evicted before them."""
    manager = factory(drafts=0).manager
    manager.add("a", list(range(40)))
    while (length := manager.get("a").length) < 40:
        manager.commit(manager.begin([Work("a", manager.cut("a", 40 - length))]), [0])
    manager.finish("a")
    order = [(block.key[1], block.group.kind != "entries") for block in manager.pool.cached]
    assert order == sorted(order, reverse=True)
    assert len({end for end, state in order if state} & {end for end, state in order if not state}) > 1


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("factory", (caches.paged, caches.rings, caches.pro))
def test_thousands_of_calls_equal_recomputing(factory):
    run_machine(factory, runs=300, calls=50)
