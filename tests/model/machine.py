"""Random calls of a scheduler on a small pool; every logit that a token is drawn from is compared with recomputing.

`Watched` is the scheduler with eyes: it notes logits, compares when a request ends, forks, and fails on demand.
`Alone` is what it is compared with: the sequence in one step, or in steps of at most `chunk` tokens, at a place of its
own. `machine_of` makes the rules.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_as_test

from dsv4lib.cache import PoolExhausted, account
from dsv4lib.errors import DSV4Error
from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.sampler import SamplingParams, Settings
from dsv4lib.model.scheduler import Scheduler, Served
from dsv4lib.model.transformer import Transformer

REQUESTS, POSITIONS = 4, 320
PAIRS = (7, 23), (11, 40)  # of two allowed tokens a guess is right every second time
TEXT = torch.randint(64, (POSITIONS,), generator=torch.Generator().manual_seed(5)).tolist()


class Prompts(NamedTuple):
    """Prompts of random calls: tokens of the text that they share, what follows it, most tokens to draw."""

    lengths: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...] = ((7,), (7,), (23,), (50, 51, 52))
    most: int = 12


FEW = Prompts((1, 3, 4, 63, 65, 127, 129), ((7,), (7,), (23,)), 8)
ALL = Prompts((1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 254, 255, 256, 256, 257, 257))


def settings_of(pair: int, temperature: float = 0.0) -> SamplingParams:
    """Only two tokens may be drawn."""
    return SamplingParams(temperature=temperature, seed=3, bias=dict.fromkeys(PAIRS[pair], 64.0))


class Alone:
    """Logits of sequences that were served alone, fp32 [T, vocab]; a sequence is run once."""

    def __init__(self, model: Transformer, chunk: int = 1 << 30):
        self.model, self.chunk, self.known, self.tokens = model, chunk, [], 0

    def logits(self, sequence: list[int]) -> torch.Tensor:
        for known, logits in self.known:
            if known[: len(sequence)] == sequence:
                return logits[: len(sequence)]
        rows = []
        for start in range(0, len(sequence), self.chunk):
            part = sequence[start : start + self.chunk]
            rows.append(self.model([part], [0], [start], all_logits=True)[:, : self.model.config.vocab])
        self.tokens += len(sequence)
        self.known.append((list(sequence), torch.cat(rows)))
        return self.known[-1][1]


class Watched(Scheduler):
    """Note of each request what its tokens are drawn from, and compare it when the request ends."""

    def __init__(self, model: Transformer, caches: PagedCaches, alone: Alone, **options: Any):
        super().__init__(model, caches, **options)
        self.alone, self.fails, self.pattern = alone, False, 0
        self.running_state = any(g.running for g in caches.groups.values())
        self.ended: dict[Hashable, list[int]] = {}  # requests that are over, and not yet compared
        self.drawn: dict[Hashable, list[tuple[list[int], torch.Tensor]]] = {}  # tokens so far, logits of the next one
        self.given: dict[Hashable, list[int]] = {}
        self.reached: set[tuple[int, ...]] = set()  # beginnings of which a later prompt must hit a point
        self.steps = self.compared = 0
        self.differing: list[tuple[Hashable, int, float]] = []

    def step(self) -> list:
        found = super().step()
        self.steps += 1
        for name, token, _ in found:
            self.given[name].append(token)
        point = self.manager.unit + self.manager.lookahead
        for one in self.manager.requests.values():
            if one.length >= self.manager.unit and len(one.tokens) >= point:
                self.reached.add(tuple(one.tokens[:point]))
        for name in [name for name in self.ended if name not in self.known]:
            self.compare(name, self.ended.pop(name))
        return found

    def add(self, name: Hashable, prompt: Sequence[int], params: SamplingParams, tokens: int, stop=()) -> None:
        self.drawn[name], self.given[name] = [], list(prompt)
        super().add(name, prompt, params, tokens, stop)

    def cancel(self, name: Hashable) -> None:
        super().cancel(name)
        self.compare(name, self.ended.pop(name))

    def _admit(self) -> None:
        before = set(self.running)
        super()._admit()
        point, metrics = self.manager.unit + self.manager.lookahead, self.manager.metrics
        whole = not (metrics.saves_skipped or metrics.points_lost or self.manager.pool.evictions)
        for name in set(self.running) - before:
            one = self.known[name]
            if not one.preempted and whole and tuple(one.prompt[:point]) in self.reached and len(one.prompt) >= point:
                assert one.hit >= self.manager.unit, f"{name} has a prefix that was served, and hits {one.hit} tokens"

    def _draw(self, batch: Any, hidden: torch.Tensor) -> list[list[int]]:
        found = super()._draw(batch, hidden)
        if self.fails:
            self.fails = False
            raise DSV4Error("the step fails")
        return found

    def _of(self, part: Any, logits: torch.Tensor) -> list[int]:
        found = super()._of(part, logits)
        tokens = [*part.request.tokens[: part.known], *found]
        rows = enumerate(logits[: len(found)], part.known)
        self.drawn[part.request.id] += [(tokens[:count], row.clone()) for count, row in rows]
        return found

    def _guess(self, batch: Any, drawn: list[list[int]], *given: Any) -> None:
        """Guess one of two tokens where a pattern is set: half of the drafts are accepted then."""
        if not self.pattern:
            return super()._guess(batch, drawn, *given)
        for number, part in enumerate(batch.parts):
            if drawn[number] and part.request.id in self.known:
                one = self.known[part.request.id]
                pair = one.settings.bias_ids[0].tolist()
                one.guesses = [pair[self.pattern >> i & 1] for i in range(max(0, self._most(batch, number)))]
        return None

    def _end(self, name: Hashable) -> None:
        begun = name in self.manager.requests
        self.ended[name] = list(self.manager.get(name).tokens) if begun else list(self.known[name].prompt)
        super()._end(name)
        self._poison()

    def _wait(self, name: Hashable) -> None:
        super()._wait(name)
        self._poison()

    def _poison(self) -> None:
        """Let pages that are not used hold no numbers, so that their next owner reads nothing of before."""
        self.caches.copy()
        self.caches.storage.pages[self.manager.pool.unused] = 0xFF

    def fork(self, name: Hashable, new: Hashable, params: SamplingParams) -> None:
        """Start a second continuation with settings of its own."""
        self.manager.fork(name, new)
        self.caches.copy()
        one = self.known[name]
        choice = Settings.of([params], self.model.config.vocab, self.model.device)
        self.known[new] = Served(new, one.prompt, choice, one.history.copy(), one.end, one.stop)
        self.drawn[new], self.given[new] = list(self.drawn[name]), list(self.given[name])
        self.running.append(new)

    def compare(self, name: Hashable, sequence: list[int]) -> None:
        """Compare a request that has ended, bit by bit.

        A step that failed may have drawn other tokens than the one after it, which had other drafts: its logits are
        compared with those of its own tokens.
        """
        drawn, given = self.drawn.pop(name), self.given.pop(name)
        least = min(len(given), len(sequence))
        assert given[:least] == sequence[:least] and len(given) >= len(sequence), f"{name} was given other tokens"
        whole = self.alone.logits(sequence) if drawn else None
        for tokens, row in drawn:
            self.compared += 1
            position = len(tokens) - 1
            want = whole[position] if tokens == sequence[: len(tokens)] else self.alone.logits(tokens)[-1]
            if not torch.equal(row, want):
                self.differing.append((name, position, float((row - want).abs().max())))

    def check(self) -> None:
        """Check accounts, and that nothing has differed; with a running state nothing before its first entry."""
        account(self.manager).check()
        first = 127 if self.running_state else POSITIONS
        wrong = [(name, at, far) for name, at, far in self.differing if at < first or far >= 0.1]
        assert wrong == [], f"(request, position, largest difference of logits): {wrong}"


class Totals:
    """What all runs of a machine did together."""

    def __init__(self):
        self.steps = self.compared = self.hits = self.preempted = self.forks = self.accepted = self.copied = 0
        self.differing = 0

    def add(self, one: Watched, accepted: int) -> None:
        metrics = one.manager.metrics
        self.steps, self.compared = self.steps + one.steps, self.compared + one.compared
        self.accepted, self.differing = self.accepted + accepted, self.differing + len(one.differing)
        self.hits, self.preempted = self.hits + metrics.requests_hit, self.preempted + metrics.preemptions
        self.forks, self.copied = self.forks + metrics.forks, self.copied + metrics.copies_on_write

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in vars(self).items())


def watched(
    model: Transformer, alone: Alone, *, drafts: int, tokens: int, spare: int, rings: bool = True, **options: Any
) -> Watched:
    """Make a scheduler on a pool of the least pages and ``spare`` more, filled with what is no number."""
    keys = {"save_every": options.pop("save_every", 0), "host_pages": options.pop("host_pages", 40)}
    sizes = {"requests": REQUESTS, "tokens": tokens, "positions": POSITIONS, "drafts": max(drafts, int(rings))}
    least = PagedCaches(model, **{**sizes, "requests": 1}).manager.pool.count
    caches = PagedCaches(model, **sizes, **keys, pages=least + spare)
    caches.storage.pages.fill_(0xFF)
    caches.storage.host.fill_(0xFF)
    return Watched(model, caches, alone, drafts=drafts, **options)


def machine_of(
    make: Callable[..., Watched], totals: Totals, prompts: Prompts, fixed: dict[str, Any]
) -> type[RuleBasedStateMachine]:
    """Make a state machine of random calls.

    Args:
        make: makes the scheduler of an example, as `watched` without model and Alone.
        totals: are added to. prompts: that are added. fixed: arguments that examples do not vary.
    """

    class Machine(RuleBasedStateMachine):
        @initialize(
            drafts=st.sampled_from((0, 0, 1, 3, 7)),
            tokens=st.sampled_from((16, 48, 128, 300)),
            spare=st.sampled_from((0, 6, 60)),
            swap=st.booleans(),
            save_every=st.sampled_from((0, 256)),
            decode_sizes=st.sampled_from(((), (4,), (1, 3))),
        )
        def start(self, **given):
            given |= fixed
            self.one = make(**given | ({"decode_sizes": ()} if given["drafts"] else {}))
            self.count = self.accepted = 0

        def pick(self, number, names):
            return sorted(names)[number % len(names)]

        @precondition(lambda self: len(self.one.known) < REQUESTS + 1)
        @rule(
            length=st.sampled_from(prompts.lengths),
            ending=st.sampled_from(prompts.endings),
            tokens=st.integers(1, prompts.most),
            pair=st.integers(0, 1),
            heat=st.sampled_from((0.0, 0.0, 1.0)),
        )
        def add(self, length, ending, tokens, pair, heat):
            self.one.add(self.count, [*TEXT[:length], *ending], settings_of(pair, heat), tokens)
            self.count += 1

        @precondition(lambda self: self.one.known)
        @rule(count=st.integers(1, 4), pattern=st.sampled_from((0, 1, 2, 5, 127)))
        def step(self, count, pattern):
            self.one.pattern = pattern
            for _ in range(count):
                before = dict(self.one.known)
                counts = {name: one.accepted for name, one in before.items()}
                self.one.step()
                self.accepted += sum(one.accepted - counts[name] for name, one in before.items())

        @precondition(lambda self: self.one.known)
        @rule(
            what=st.sampled_from(("fork", "fork", "preempt", "preempt", "fail", "cancel", "evict")),
            number=st.integers(0, REQUESTS),
            choice=st.integers(0, 1),
        )
        def disturb(self, what, number, choice):
            one, running = self.one, self.one.running
            if what == "fork" and 0 < len(running) < REQUESTS:
                try:
                    one.fork(self.pick(number, running), self.count, settings_of(choice))
                    self.count += 1
                except PoolExhausted:
                    pass
            elif what == "preempt" and running:
                one.swap = bool(choice)
                one._preempt(self.pick(number, running))
            elif what == "cancel":
                one.cancel(self.pick(number, one.known))
            elif what == "evict":
                one.manager.evict()
            elif what == "fail":
                one.fails = True
                try:
                    one.step()
                except DSV4Error as error:
                    assert "the step fails" in str(error)
                one.fails = False

        @invariant()
        def adds_up(self):
            if hasattr(self, "one"):
                self.one.check()

        def teardown(self):
            if hasattr(self, "one"):
                finish(self.one)
                totals.add(self.one, self.accepted)

    return Machine


def finish(one: Watched) -> None:
    """Serve what is left; then nothing is held, and all pages can be had again."""
    for _ in range(1000):
        if not one.known:
            break
        one.step()
    one.check()
    manager, pool = one.manager, one.manager.pool
    assert not one.known and not one.running and not one.waiting and not manager.requests and not pool.live
    manager.evict()
    assert sorted(pool.unused) == list(range(pool.count)) and len(manager.host_unused) == manager.host_pages
    assert account(manager).total == account(manager).unused == one.caches.storage.pages.nbytes


def run_machine(make: Callable[..., Watched], runs: int, calls: int, prompts: Prompts = ALL, **fixed: Any) -> Totals:
    """Make random runs, the same ones each time, without shrinking what fails."""
    totals = Totals()
    given = {"max_examples": runs, "stateful_step_count": calls, "deadline": None, "database": None}
    given |= {"derandomize": True, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}
    given |= {"report_multiple_bugs": False}
    run_as_test(machine_of(make, totals, prompts, fixed), settings=settings(**given))
    return totals
