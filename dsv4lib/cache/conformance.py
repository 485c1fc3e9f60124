"""Check a cache manager, ours or another engine's. By an adapter protocol and the properties it must have.

    class TestMine(Conformance):                     in a pytest file
        factory = staticmethod(lambda: MyAdapter(...))

    pytest -p dsv4lib.cache.conformance --cache-adapter my.module:make --pyargs dsv4lib.cache.conformance

The kit runs random sequences of calls with `dsv4lib.cache.exact` as the model: an adapter stores 64-bit integers where
its engine stores vectors. Every token that is served must get the value that recomputing all tokens gives.
DSV4_CACHE_STEPS sets how many random runs are made (default 20), of up to 30 calls each. Needs hypothesis and pytest.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dsv4lib.cache.accounting import account
from dsv4lib.cache.errors import PoolExhausted
from dsv4lib.cache.exact import Oracle, run_draft_layer, run_token
from dsv4lib.cache.groups import Group, Shape
from dsv4lib.cache.manager import Manager
from dsv4lib.cache.request import Copy, Work

RUNS = int(os.environ.get("DSV4_CACHE_STEPS", "20"))
JUNK = 0x5EED


class Adapter(Protocol):
    """What the kit needs of a manager.

    Attributes:
        shape: of the model whose caches it manages.
        drafts: most drafts of a step.
        shortest_hit: tokens of the shortest prompt that can hit; 0: prefixes are never found.
        full: what is raised for want of memory; nothing may have changed then.
        can: optional calls that it has, of "fork", "swap", "recompute", "evict".
    """

    shape: Shape
    drafts: int
    shortest_hit: int
    full: type[Exception]
    can: frozenset[str]

    def add(self, request: Hashable, tokens: Sequence[int]) -> int:
        """Take a request; returns how many of its tokens need not be run."""

    def append(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Add sampled tokens."""

    def cut(self, request: Hashable, count: int) -> int:
        """Shorten a chunk to what the manager prefers, at least 1."""

    def begin(self, batch: Sequence[Work]) -> None:
        """Start a step."""

    def commit(self, accepted: Sequence[int]) -> None:
        """End it: accepted drafts of each request."""

    def get(self, request: Hashable, group: str, layer: int, index: int) -> int:
        """Read the value of a position; of entries ("csa", "keys", "hca") of a number."""

    def put(self, request: Hashable, group: str, layer: int, index: int, value: int) -> None:
        """Write it."""

    def fork(self, request: Hashable, new: Hashable) -> None:
        """Start a second continuation."""

    def preempt(self, request: Hashable, how: str) -> None:
        """Take a request's memory: "recompute" or "swap"."""

    def resume(self, request: Hashable) -> int:
        """Give it memory again; returns how many of its tokens need not be run."""

    def finish(self, request: Hashable) -> None:
        """Forget a request."""

    def evict(self) -> None:
        """Drop all that is cached without a request."""

    def check(self) -> None:
        """Check invariants of its own."""


class ManagerAdapter:
    """Adapt `Manager` to the kit.

    Pages hold 64-bit integers in place of bytes of vectors.
    """

    can = frozenset(("fork", "swap", "recompute", "evict"))
    full = PoolExhausted

    def __init__(self, shape: Shape, groups: tuple[Group, ...], drafts: int = 0, **given: Any):
        self.manager, self.shape, self.drafts = Manager(groups, **given), shape, drafts
        self.shortest_hit = self.manager.shortest_hit
        words = self.manager.pool.page_bytes // 8
        self.pages = np.full((self.manager.pool.count, words), JUNK, dtype=np.int64)
        self.host = np.full((self.manager.host_pages, words), JUNK, dtype=np.int64)
        self.groups = {g.name: g for g in groups}
        for name in ("add", "append", "cut", "fork", "preempt", "resume", "finish", "evict"):
            setattr(self, name, self._then_copies(getattr(self.manager, name)))

    def _then_copies(self, call: Callable) -> Callable:
        def done(*given: Any) -> Any:
            out = call(*given)
            self._copy(self.manager.copies())
            return out

        return done

    def _copy(self, copies: list[Copy]) -> None:
        spaces = {"device": (self.pages, self.pages), "out": (self.pages, self.host), "in": (self.host, self.pages)}
        for kind, source, target in copies:
            spaces[kind][1][target] = spaces[kind][0][source]

    def begin(self, batch: Sequence[Work]) -> None:
        """Start a step and make its copies."""
        self.step = self.manager.begin(batch)
        self._copy(self.manager.copies())

    def commit(self, accepted: Sequence[int]) -> None:
        """End the step and make the copies of what is saved."""
        self.manager.commit(self.step, accepted)
        self._copy(self.manager.copies())

    def _cell(self, request: Hashable, name: str, layer: int, index: int) -> tuple[int, int]:
        g, layer = self.groups[name], self.shape.index(layer)[name]
        position = index * g.rate if g.kind == "entries" else index
        per_page = g.layers_per_page(self.manager.pool.page_bytes)
        page = self.manager.block(request, g, position).pages[layer // per_page]
        return page, layer % per_page * g.layer_bytes // 8 + g.row(position)

    def get(self, request: Hashable, group: str, layer: int, index: int) -> int:
        """Read a word of the pool."""
        return int(self.pages[self._cell(request, group, layer, index)])

    def put(self, request: Hashable, group: str, layer: int, index: int, value: int) -> None:
        """Write a word of the pool."""
        self.pages[self._cell(request, group, layer, index)] = value

    def check(self) -> None:
        """Check that the pool's pages and references add up."""
        account(self.manager).check()


class _Live:
    """What the kit knows of a request: tokens, how many are cached, hidden values, the MTP layer's next position."""

    def __init__(self, tokens: list[int], length: int, oracle: Oracle):
        self.tokens, self.hidden, self.waiting = tokens, [], ""
        self.start(length, oracle)

    def start(self, length: int, oracle: Oracle) -> None:
        """Go on after a hit: the MTP layer's values before it are cached, too."""
        self.length = self.drafted = length
        self.hidden = oracle.run(self.tokens[:length])[0][:]

    def copy(self) -> _Live:
        """Copy for a fork."""
        other = object.__new__(_Live)
        other.tokens, other.hidden, other.waiting = list(self.tokens), list(self.hidden), ""
        other.length, other.drafted = self.length, self.drafted
        return other


class _View:
    """A request's values in an adapter, as a `Store`."""

    def __init__(self, adapter: Adapter, request: Hashable):
        self.adapter, self.request = adapter, request

    def get(self, group: str, layer: int, index: int) -> int:
        """Read a value."""
        return self.adapter.get(self.request, group, layer, index)

    def put(self, group: str, layer: int, index: int, value: int) -> None:
        """Write a value."""
        self.adapter.put(self.request, group, layer, index, value)


class Session:
    """Serve requests through an adapter, and compare every value with the oracle's."""

    def __init__(self, adapter: Adapter):
        self.adapter, self.shape = adapter, adapter.shape
        self.oracle, self.live = Oracle(adapter.shape), {}
        self.count = 0

    def tried(self, call: Callable, *given: Any) -> bool:
        """Call; False: it was full, and its own checks still hold."""
        try:
            call(*given)
        except self.adapter.full:
            self.adapter.check()
            return False
        return True

    def add(self, tokens: Sequence[int]) -> int:
        """Add a request; returns its name."""
        name, self.count = self.count, self.count + 1
        hit = self.adapter.add(name, list(tokens))
        assert 0 <= hit < len(tokens), f"{hit} of {len(tokens)} tokens need not be run; one must be left"
        self.live[name] = _Live(list(tokens), hit, self.oracle)
        return name

    def step(self, batch: Sequence[Work], accepted: Sequence[int]) -> None:
        """Run a step: every token's value is checked, drafts too."""
        self.adapter.begin(batch)
        for work in batch:
            self._run(work)
        self.adapter.commit(accepted)
        for work, count in zip(batch, accepted, strict=True):
            self._end(work, count)

    def _run(self, work: Work) -> None:
        one, view = self.live[work.request], _View(self.adapter, work.request)
        tokens = one.tokens + list(work.drafts)
        end = one.length + work.count + len(work.drafts)
        hidden, drafted = self.oracle.run(tokens)
        del one.hidden[one.length :]
        for position in range(one.length, end):
            value = run_token(self.shape, tokens[position], position, view)
            assert value == hidden[position], f"token {position} of request {work.request} read a wrong value"
            one.hidden.append(value)
        if self.shape.mtp:
            for position in range(one.drafted, min(end, len(tokens) - 1)):
                value = run_draft_layer(self.shape, one.hidden[position], tokens[position + 1], position, view)
                assert value == drafted[position], f"the MTP layer read a wrong value at {position}"

    def _end(self, work: Work, accepted: int) -> None:
        one = self.live[work.request]
        one.tokens += work.drafts[:accepted]
        one.length += work.count + accepted
        del one.hidden[one.length :]
        if self.shape.mtp:
            one.drafted = max(one.drafted, min(one.length, len(one.tokens) - 1))
            for position in range(one.drafted, one.drafted + self.adapter.drafts):  # as drafting does between steps
                self.adapter.put(work.request, "mtp_window", len(self.shape.kinds), position, JUNK + position)

    def append(self, name: int, token: int) -> None:
        """Add a sampled token."""
        self.adapter.append(name, [token])
        self.live[name].tokens.append(token)

    def prefill(self, name: int, chunk: int = 1 << 30) -> None:
        """Run all known tokens in chunks as the manager cuts them."""
        one = self.live[name]
        while one.length < len(one.tokens):
            count = self.adapter.cut(name, min(chunk, len(one.tokens) - one.length))
            self.step([Work(name, count)], [0])

    def fork(self, name: int) -> None:
        """Fork a request."""
        new = self.count
        if self.tried(self.adapter.fork, name, new):
            self.count += 1
            self.live[new] = self.live[name].copy()

    def preempt(self, name: int, how: str) -> None:
        """Preempt a request."""
        if self.tried(self.adapter.preempt, name, how):
            self.live[name].waiting = how

    def resume(self, name: int) -> None:
        """Let a request go on."""
        one = self.live[name]
        try:
            length = self.adapter.resume(name)
        except self.adapter.full:
            return self.adapter.check()
        if one.waiting == "recompute":
            one.start(length, self.oracle)
        assert length == one.length
        one.waiting = ""
        return None

    def finish(self, name: int) -> None:
        """Finish a request."""
        self.adapter.finish(name)
        del self.live[name]


TEXT = [(i * 7 + i // 5) % 3 for i in range(64)]
TOKENS = st.integers(0, 2)


def machine_of(factory: Callable[[], Adapter]) -> type[RuleBasedStateMachine]:
    """Make the state machine of an adapter. It makes random calls in random order and checks every value."""

    class Machine(RuleBasedStateMachine):
        """Calls and their arguments."""

        @initialize()
        def start(self) -> None:
            """Make a session."""
            self.session = Session(factory())

        def names(self, *states: str) -> list[int]:
            """List requests in these states."""
            return sorted(name for name, one in self.session.live.items() if one.waiting in states)

        def has(self, what: str) -> bool:
            """Say whether the adapter has a call."""
            return what in self.session.adapter.can

        @precondition(lambda self: len(self.session.live) < 4)
        @rule(length=st.integers(0, 36), suffix=st.lists(TOKENS, min_size=1, max_size=6), whole=st.booleans())
        def add(self, length: int, suffix: list[int], whole: bool) -> None:
            """Add a request, and run its prompt or not."""
            if self.session.tried(self.session.add, TEXT[:length] + suffix) and whole:
                self.session.tried(self.session.prefill, self.session.count - 1)

        @precondition(lambda self: self.names(""))
        @rule(data=st.data(), size=st.integers(1, 20), cuts=st.booleans())
        def step(self, data: st.DataObject, size: int, cuts: bool) -> None:
            """Run chunks, decode steps and drafts of some requests."""
            batch, accepted = [], []
            for name in data.draw(st.lists(st.sampled_from(self.names("")), min_size=1, max_size=4, unique=True)):
                one = self.session.live[name]
                if one.length == len(one.tokens):
                    self.session.append(name, data.draw(TOKENS))
                left = len(one.tokens) - one.length
                count = min(left, size)
                count = self.session.adapter.cut(name, count) if cuts else count
                drafts = []
                if count == left:
                    drafts = data.draw(st.lists(TOKENS, max_size=self.session.adapter.drafts))
                batch.append(Work(name, count, drafts))
                accepted.append(data.draw(st.integers(0, len(drafts))))
            self.session.tried(self.session.step, batch, accepted)

        @precondition(lambda self: self.has("fork") and self.names("") and len(self.session.live) < 5)
        @rule(data=st.data())
        def fork(self, data: st.DataObject) -> None:
            """Fork a request."""
            self.session.fork(data.draw(st.sampled_from(self.names(""))))

        @precondition(lambda self: self.names(""))
        @rule(data=st.data(), how=st.sampled_from(("recompute", "swap")))
        def preempt(self, data: st.DataObject, how: str) -> None:
            """Preempt a request."""
            if self.has(how):
                self.session.preempt(data.draw(st.sampled_from(self.names(""))), how)

        @precondition(lambda self: self.names("recompute", "swap"))
        @rule(data=st.data())
        def resume(self, data: st.DataObject) -> None:
            """Let one go on."""
            self.session.resume(data.draw(st.sampled_from(self.names("recompute", "swap"))))

        @precondition(lambda self: self.session.live)
        @rule(data=st.data())
        def finish(self, data: st.DataObject) -> None:
            """Finish one."""
            self.session.finish(data.draw(st.sampled_from(sorted(self.session.live))))

        @precondition(lambda self: self.has("evict"))
        @rule()
        def evict(self) -> None:
            """Evict all that is cached."""
            self.session.adapter.evict()

        @invariant()
        def adds_up(self) -> None:
            """Check the adapter."""
            if hasattr(self, "session"):
                self.session.adapter.check()

    return Machine


def run_machine(factory: Callable[[], Adapter], runs: int = RUNS, calls: int = 30) -> None:
    """Make random runs, the same ones each time, without shrinking what fails."""
    given = {"max_examples": runs, "stateful_step_count": calls, "deadline": None, "database": None}
    given |= {"derandomize": True, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}
    run_state_machine_as_test(machine_of(factory), settings=settings(**given))


def serve(session: Session, tokens: Sequence[int], chunk: int = 1 << 30) -> int:
    """Add a request, run its prompt, finish it; returns its hit."""
    name = session.add(tokens)
    hit = session.live[name].length
    session.prefill(name, chunk)
    session.finish(name)
    return hit


def check_hits(factory: Callable[[], Adapter]) -> None:
    """Check that a prompt sent again hits, also with another continuation.

    Lengths go from the shortest that can hit on.
    """
    shortest = factory().shortest_hit
    for length in (shortest, shortest + 1, 2 * shortest + 3):
        session = Session(factory())
        assert serve(session, TEXT[:length]) == 0, "nothing is cached yet"
        hit = serve(session, TEXT[:length])
        assert hit > 0, f"a prompt of {length} tokens sent again does not hit; documented are {shortest}"
        assert hit + shortest > length, f"{length} tokens sent again hit {hit}"
        serve(session, [5, *TEXT[: length + 9]])  # other tokens before it: no hit may come of these blocks
        assert serve(session, TEXT[: length - 1] + [5]) >= 0


def check_edges(factory: Callable[[], Adapter]) -> None:
    """Check hits for all lengths around each window, then decode.

    The windows are that of attention and a compressor's.
    """
    adapter = factory()
    longest = adapter.shortest_hit + adapter.shape.window + adapter.shape.hca_rate
    session = Session(adapter)
    for length in range(1, longest):
        name = session.add(TEXT[:length])
        session.prefill(name)
        for token in (2, 0, 1):
            session.append(name, token)
            session.prefill(name)
        session.finish(name)


def check_accepts(factory: Callable[[], Adapter]) -> None:
    """Check every number of accepted drafts from every start in a window.

    One batch mixes different numbers.
    """
    most = factory().drafts
    for start in range(1, 2 * factory().shape.hca_rate + 1):
        session = Session(factory())
        names = [session.add(TEXT[:start] + [k % 3]) for k in range(2)]
        for name in names:
            session.prefill(name)
        for k in range(most + 1):
            for name in names:
                session.append(name, (start + k) % 3)
            drafts = [(start + i) % 3 for i in range(most)]
            session.step([Work(name, 1, drafts) for name in names], [k, most - k])


def check_rejected(factory: Callable[[], Adapter]) -> None:
    """Check that no request finds values made from rejected drafts.

    The request may have just those tokens.
    """
    most = factory().drafts
    for start in range(factory().shortest_hit + 1):
        if not most or start < 2:
            continue
        session = Session(factory())
        one = session.add(TEXT[:start])
        session.prefill(one)
        session.append(one, TEXT[start])
        session.step([Work(one, 1, TEXT[start + 1 : start + 1 + most])], [0])
        for _ in range(2 * most + 2):
            session.append(one, 5)
            session.prefill(one)
        for _ in range(2):
            serve(session, TEXT[: start + 24])
        session.finish(one)
        serve(session, TEXT[: start + 24])


def check_uncut(factory: Callable[[], Adapter]) -> None:
    """Check that an uncut chunk leaves nothing wrong to be found.

    The manager would cut these chunks; they are run whole.
    """
    for length in (20, 40):
        session = Session(factory())
        name = session.add(TEXT[:length])
        session.step([Work(name, length - session.live[name].length)], [0])
        for end in range(9, length, 4):
            serve(session, [*TEXT[:end], 5])


class Conformance:
    """Properties of a manager; a subclass in a test file says which by `factory`."""

    factory: Callable[[], Adapter]

    def test_prompt_sent_again_hits(self):
        """Prompts from the documented shortest on hit."""
        if self.factory().shortest_hit:
            check_hits(self.factory)

    def test_hits_equal_recomputing(self):
        """Lengths around the windows give the values of recomputing."""
        check_edges(self.factory)

    def test_any_number_of_drafts_is_accepted(self):
        """Every number, from every start, mixed in a batch."""
        check_accepts(self.factory)

    def test_rejected_drafts_are_not_found(self):
        """Only committed tokens have names."""
        check_rejected(self.factory)

    def test_whole_chunks_leave_nothing_wrong(self):
        """Chunks run past the points at which they would be cut."""
        check_uncut(self.factory)

    def test_any_mixture_equals_recomputing(self):
        """Random calls in random order."""
        run_machine(self.factory)


def pytest_addoption(parser: Any) -> None:
    """Add --cache-adapter."""
    parser.getgroup("dsv4 cache").addoption("--cache-adapter", metavar="MODULE:FUNCTION", help="makes an Adapter")


def pytest_collection_modifyitems(config: Any, items: list) -> None:
    """Give the adapter of the command line to `TestAdapter`."""
    if given := config.getoption("--cache-adapter", None):
        module, _, name = given.partition(":")
        factory = staticmethod(getattr(importlib.import_module(module), name))
        for item in items:
            if item.cls is not None and item.cls.__name__ == "TestAdapter":
                item.cls.factory = factory


class TestAdapter(Conformance):
    """The properties for the adapter of --cache-adapter."""

    @pytest.fixture(autouse=True)
    def _given(self):
        if not hasattr(self, "factory"):
            pytest.skip("--cache-adapter is not given")
