"""Serve many requests at a time. Continuous batching, chunked prefill beside decode, drafts, prefix hits, preemption.

    scheduler = Scheduler(model, PagedCaches(model, requests=8, tokens=256, positions=2048))
    scheduler.add("a", prompt, SamplingParams(temperature=0.0), 32)
    for name, token, last in scheduler.run():
        ...

A step has first a token of each request that decodes, with its drafts, then chunks of prompts, up to the tokens of a
step, oldest request first. Where the pool is exhausted the youngest request is preempted; it is resumed when another
one has finished. Tokens do not depend on what else is in a step, as far as kernels are batch-invariant: noise is a
function of the request's seed and the position.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.cache import PoolExhausted, RequestExists, UnknownRequest, Work
from dsv4lib.cache.request import Part
from dsv4lib.cache.request import Step as Batch
from dsv4lib.errors import ArgumentError
from dsv4lib.model.graphs import DecodeGraph
from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.sampler import History, NoDistribution, SamplingParams, Settings, sample
from dsv4lib.model.transformer import Transformer
from dsv4lib.model.verify import target_probabilities, verify


class Token(NamedTuple):
    """A token that was drawn: its request, its id. ``last``: it is the request's last."""

    request: Hashable
    token: int
    last: bool


@dataclass
class Served:
    """A request: how it is sampled, the length at which it ends, its counts. Also the drafts of its next step.

    ``hit``: tokens of its prompt that were found in the cache. ``preempted``: how often it was.
    """

    name: Hashable
    prompt: list[int]
    settings: Settings
    history: History
    end: int
    stop: frozenset[int]
    guesses: list[int] = field(default_factory=list)
    hit: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0


class Scheduler:
    """Serve requests with one model.

    Args:
        model: runs the steps. caches: of it; their sizes bound requests and tokens of a step.
        drafts: K, at most those of the caches.
        swap: preempted requests keep their values on the host, where it has the pages; False: they are run again.
        decode_sizes: requests that a step of decoding alone is padded to, the least that is enough; without drafts
            only.
        graphs: capture a CUDA graph for each of these sizes now, and replay it in such steps.

    Raises:
        ArgumentError: a number out of range, or graphs of no size.
        BackendUnavailable: graphs of a model that is on no CUDA device.
    """

    def __init__(
        self,
        model: Transformer,
        caches: PagedCaches,
        *,
        drafts: int = 0,
        swap: bool = False,
        decode_sizes: Sequence[int] = (),
        graphs: bool = False,
    ) -> None:
        if not 0 <= drafts <= caches.drafts:
            raise ArgumentError("drafts", drafts, f"0 to {caches.drafts}, those of the caches")
        if any(not 1 <= size <= caches.tables.requests for size in decode_sizes) or (decode_sizes and drafts):
            allowed = f"1 to {caches.tables.requests}, and none with drafts"
            raise ArgumentError("decode_sizes", list(decode_sizes), allowed)
        if graphs and not decode_sizes:
            raise ArgumentError("decode_sizes", list(decode_sizes), "one size or more, for graphs")
        if drafts and caches.tables.tokens <= drafts:
            raise ArgumentError("drafts", drafts, f"fewer than the {caches.tables.tokens} tokens of a step")
        self.model, self.caches, self.manager = model, caches, caches.manager
        self.drafts, self.swap, self.sizes = drafts, swap, sorted(decode_sizes)
        self.graphs = {size: DecodeGraph(model, caches, size) for size in self.sizes if graphs}
        self.known: dict[Hashable, Served] = {}
        self.waiting: list[Hashable] = []  # not begun, or preempted, in the order of their admission
        self.running: list[Hashable] = []
        self.blocked = False  # after a preemption, until a request has finished

    def add(
        self, name: Hashable, prompt: Sequence[int], params: SamplingParams, tokens: int, stop: Sequence[int] = ()
    ) -> None:
        """Take a request.

        Args:
            name: of the request. prompt: token ids. params: of the sampler. tokens: most to draw.
            stop: ids after which it ends.

        Raises:
            RequestExists: the name is in use.
            ArgumentError: an empty prompt, an id that does not exist, or more tokens than there are positions.
        """
        vocab, most = self.model.config.vocab, self.caches.positions
        if name in self.known:
            raise RequestExists(name)
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
            raise ArgumentError("prompt", list(prompt)[:8], f"one or more ids 0..{vocab - 1}")
        if tokens < 1 or len(prompt) + tokens > most:
            raise ArgumentError(
                "tokens", tokens, f"1 to {most - len(prompt)}: {most} positions, {len(prompt)} of prompt"
            )
        device = self.model.device
        settings, history = Settings.of([params], vocab, device), History.empty(1, vocab, device)
        history.start(0, torch.tensor(list(prompt), device=device))
        self.known[name] = Served(name, list(prompt), settings, history, len(prompt) + tokens, frozenset(stop))
        self.waiting.append(name)

    def cancel(self, name: Hashable) -> None:
        """Forget a request between steps.

        Raises:
            UnknownRequest: there is none of this name.
        """
        if name not in self.known:
            raise UnknownRequest(name, len(self.known))
        self._end(name)

    def run(self) -> Iterator[Token]:
        """Yield tokens as they are drawn until no request is left."""
        while self.going():
            yield from self.step()

    def going(self) -> bool:
        """Tell whether there is a step to run."""
        return bool(self.known)

    @torch.no_grad()
    def step(self) -> list[Token]:
        """Run a step.

        Raises:
            PoolExhausted: the pool does not hold the one request that is left.
            NoDistribution: logits of no distribution; the step was taken back, its requests will be run again.
        """
        self._admit()
        batch = self._begin()
        if batch is None:
            return []
        try:
            hidden, streams = self._run(batch)
            drawn = self._draw(batch, hidden)
            if self.drafts:
                last, ahead = self._follow(batch, drawn, streams)
        except BaseException:
            self._take_back(batch)
            raise
        self.manager.commit(batch, [max(len(tokens) - 1, 0) for tokens in drawn])
        self.caches.copy()
        found = self._take(batch, drawn)
        if self.drafts:
            self._guess(batch, drawn, last, ahead)
        return found

    # What runs

    def _admit(self) -> None:
        """Start or resume requests, as far as rows of the tables and pages go."""
        most = self.caches.tables.requests
        while self.waiting and len(self.running) < most and not (self.blocked and self.running):
            name = self.waiting[0]
            try:
                if name in self.manager.requests:
                    self.manager.resume(name)
                else:
                    self.known[name].hit = self.manager.add(name, self.known[name].prompt)
            except PoolExhausted:
                if not self.running:
                    raise
                return
            self.running.append(self.waiting.pop(0))

    def _works(self) -> list[Work]:
        """List what the next step runs: decoding first, then chunks."""
        left, works = self.caches.tables.tokens, []
        of = {name: self.manager.get(name) for name in self.running}
        for name, one in of.items():
            guesses = self.known[name].guesses
            if len(one.tokens) - one.length == 1 and left > len(guesses):
                works.append(Work(name, 1, guesses))
                left -= 1 + len(guesses)
        for name, one in of.items():
            count = min(len(one.tokens) - one.length, left)
            if len(one.tokens) - one.length > 1 and count:
                works.append(Work(name, self.manager.cut(name, count)))
                left -= works[-1].count
        return works

    def _begin(self) -> Batch | None:
        """Begin a step, after as many preemptions as it takes."""
        while works := self._works():
            try:
                return self.manager.begin(works)
            except PoolExhausted:
                if len(self.running) == 1:
                    raise
                self._preempt(self.running[-1])
        return None

    def _preempt(self, name: Hashable) -> None:
        try:
            self.manager.preempt(name, "swap" if self.swap else "recompute")
        except PoolExhausted:  # of the host
            self.manager.preempt(name, "recompute")
        self.blocked = True
        self._wait(name)

    def _wait(self, name: Hashable) -> None:
        one = self.known[name]
        one.guesses, one.preempted = [], one.preempted + 1
        self.running.remove(name)
        self.waiting.insert(0, name)

    def _take_back(self, batch: Batch) -> None:
        """Abort a step that may have run: its rows are in rings over those before them, so its requests start again."""
        self.manager.abort(batch)
        self.caches.copy()
        names = {part.request.id for part in batch.parts}
        for name in [name for name in reversed(self.running) if name in names]:
            self.manager.preempt(name, "recompute")
            self._wait(name)

    def _run(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        rows = requests = None
        count = len(batch.parts)
        if self.sizes and batch.tokens == count <= self.sizes[-1]:
            rows = requests = next(size for size in self.sizes if size >= count)
            if rows in self.graphs:
                return self.graphs[rows].run(batch), None
        return self.model.hidden(self.caches.step(batch, rows, requests), keep_streams=self.drafts > 0)

    # What is drawn

    def _draw(self, batch: Batch, hidden: Tensor) -> list[list[int]]:
        """Draw the tokens that come of each part: accepted drafts and one more; none where the prompt goes on."""
        rows, start, ends = [], 0, []
        for part in batch.parts:
            size = part.end - part.start
            if part.start + part.count == part.known:
                rows += range(start + part.count - 1, start + size)
            ends.append(len(rows))
            start += size
        if not rows:
            return [[] for _ in batch.parts]
        logits = self.model.head(hidden[torch.tensor(rows, device=hidden.device)])[0][:, : self.model.config.vocab]
        firsts = [0, *ends[:-1]]
        return [self._of(part, logits[a:b]) for part, a, b in zip(batch.parts, firsts, ends, strict=True)]

    def _of(self, part: Part, logits: Tensor) -> list[int]:
        one = self.known[part.request.id]
        if not len(logits):
            return []
        place = torch.tensor([part.known], device=logits.device)
        if not part.drafts:
            return [int(sample(logits, one.settings, place, one.history).check().tokens)]
        drafts = torch.tensor([part.drafts], device=logits.device)
        target = target_probabilities(logits[None], drafts, one.settings, one.history)
        found = verify(drafts, target, one.settings, place)
        if bool(found.broken):
            text = "has no distribution to sample from: NaN, +Inf, or nothing allowed"
            raise NoDistribution(f"request {one.name!r} {text}")
        return found.tokens[0, : int(found.accepted) + 1].tolist()

    def _take(self, batch: Batch, drawn: list[list[int]]) -> list[Token]:
        """Give the tokens that were drawn to their requests; end those that are done."""
        found = []
        for part, tokens in zip(batch.parts, drawn, strict=True):
            if not tokens:
                continue
            one, name = self.known[part.request.id], part.request.id
            one.drafted, one.accepted = one.drafted + len(part.drafts), one.accepted + len(tokens) - 1
            for number, token in enumerate(tokens, part.known + 1):
                last = number >= one.end or token in one.stop
                one.history.add(torch.tensor([token], device=self.model.device))
                found.append(Token(name, token, last))
                if last:
                    break
            if last:
                self._end(name)
            else:
                self.manager.append(name, tokens[-1:])  # the accepted drafts are there
        return found

    def _end(self, name: Hashable) -> None:
        if name in self.manager.requests:
            self.manager.finish(name)
        del self.known[name]
        (self.running if name in self.running else self.waiting).remove(name)
        self.blocked = False

    # Drafts

    def _follow(self, batch: Batch, drawn: list[list[int]], streams: Tensor) -> tuple[Tensor, Tensor]:
        """Run the draft block on what the step ran and keeps; (first drafts, streams) of the last position of each."""
        parts, rows, lasts, start = [], [], [], 0
        for part, tokens in zip(batch.parts, drawn, strict=True):
            count = part.count + max(len(tokens) - 1, 0)
            known = part.request.tokens[part.start + 1 : part.start + part.count + 1]
            parts.append((part, part.start, known + tokens if tokens else known))
            rows += range(start, start + count)
            lasts.append(len(rows) - 1)
            start += part.end - part.start
        return self._drafted(parts, streams[torch.tensor(rows, device=streams.device)], lasts)

    def _drafted(self, parts: list, streams: Tensor, lasts: list[int]) -> tuple[Tensor, Tensor]:
        hidden, streams = self.model.draft(streams, self.caches.draft_step(parts))
        at = torch.tensor(lasts, device=hidden.device)
        logits = self.model.head(hidden[at])[0][:, : self.model.config.vocab]
        return logits.argmax(-1), streams[at]

    def _guess(self, batch: Batch, drawn: list[list[int]], first: Tensor, streams: Tensor) -> None:
        """Draft the tokens after those that were drawn, greedily, one by one for all requests."""
        going = [i for i, tokens in enumerate(drawn) if tokens and batch.parts[i].request.id in self.known]
        for i in going:
            one = self.known[batch.parts[i].request.id]
            one.guesses = []
        while going:
            for i in going:
                self.known[batch.parts[i].request.id].guesses.append(int(first[i]))
            still = [i for i in going if len(self._guesses(batch, i)) < self._most(batch, i)]
            if not still:
                break
            parts = []
            for i in still:
                part, guesses = batch.parts[i], self._guesses(batch, i)
                parts.append((part, len(part.request.tokens) - 2 + len(guesses), guesses[-1:]))
            at = torch.tensor(still, device=streams.device)
            found, after = self._drafted(parts, streams[at], list(range(len(still))))
            first, streams = first.index_copy(0, at, found), streams.index_copy(0, at, after)
            going = still
        for part in batch.parts:
            if part.request.id in self.known:
                one = self.known[part.request.id]
                one.guesses = one.guesses[: max(0, one.end - len(part.request.tokens) - 1)]

    def _guesses(self, batch: Batch, number: int) -> list[int]:
        return self.known[batch.parts[number].request.id].guesses

    def _most(self, batch: Batch, number: int) -> int:
        """Drafts that a request's next step can use: those before its last token."""
        part = batch.parts[number]
        return min(self.drafts, self.known[part.request.id].end - len(part.request.tokens) - 1)
