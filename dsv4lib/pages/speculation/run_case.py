"""Draft with nano's MTP block, verify, go back. Runs and counts of notebook and stage `speculation`.

`serve` runs the scheduler on ops, on any back end, and overwrites what every step rejected. `held_out` drafts and
verifies on the fp32 oracle, many passages at a time. An injected fault replaces one function while a run lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from dsv4lib.cache import Work
from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.formats import kv_entry
from dsv4lib.layers.attention import KEYS, Pool, State
from dsv4lib.loader.whole import Listed
from dsv4lib.model import verify as verify_of
from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.sampler import SamplingParams, Settings
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.ops.compressor.op import Ring
from dsv4lib.pages.full_model import run_case as whole

MOST = 7  # drafts a step
ROWS = 16  # tokens of a step: one N of an MMA, so that its size changes no bit
GREEDY = SamplingParams(temperature=0.0, seed=0)
EXPERT_BYTES = 17 / 32  # of a weight in MXFP4: 4 bits, and a scale byte for 32
LEAST = 5.0  # tokens that a bin of the chi-square test must expect
NAN = 0xFF, 0xFF, math.nan  # what rejected values become: bytes of data, of scales, numbers of a state
LARGE = 0x44, 0x7F, 100.0  # numbers, so that an injected fault ends in wrong logits and not in an error


class Change(NamedTuple):
    """What one step of a request wrote.

    Attributes:
        start: position of its first token. drafts, accepted: of the step. length: committed after it.
        drafted, kept: tokens of the drafts, and those that the step gave.
        rows: changed rows by group, of all layers. expected: those that positions say.
    """

    start: int
    drafts: int
    accepted: int
    length: int
    drafted: tuple[int, ...]
    kept: tuple[int, ...]
    rows: dict[str, set[int]]
    expected: dict[str, set[int]]


class Served(NamedTuple):
    """A request that was continued greedily.

    Attributes:
        tokens: that were drawn. logits: rows that the head made, drafts' too. changes: of its steps.
        rows: tokens that all steps ran. rings: rows of the state rings by group.
    """

    tokens: list[int]
    logits: list[torch.Tensor]
    changes: list[Change]
    rows: int
    rings: dict[str, int]

    @property
    def decoding(self) -> list[Change]:
        """Steps after the prompt."""
        return [change for change in self.changes if change.kept][1:]

    @property
    def a_step(self) -> float:
        """Tokens that a step after the prompt gives."""
        return (len(self.tokens) - 1) / len(self.decoding)


class Chains(NamedTuple):
    """Drafts at the ends of held-out passages, n of them, each verified by the target.

    Attributes:
        drafts: int64 [n, K]. best: int64 [n, K + 1], the target's likeliest tokens after the text and each draft.
        chance: fp64 [n, K], the target's probability of each draft, given those before it.
        p, q: fp64 [n, V], target's and draft block's distribution of the first drafted token.
    """

    drafts: torch.Tensor
    best: torch.Tensor
    chance: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor

    @property
    def passed(self) -> torch.Tensor:
        """bool [n, K]: the draft and all before it are the target's likeliest."""
        return (self.drafts == self.best[:, :-1]).cumprod(1).bool()


# ------------------------------------------------------------------ faults


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    right = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, right)


def _rows_without_drafts(served: Scheduler) -> AbstractContextManager:
    """Keep the rows that a compressor reads and none more: drafts overwrite what a rejection still needs."""

    def least(state: State | None, rows: int) -> State | None:
        return state and state._replace(kept=Ring(*(x[:, :rows] for x in state.kept)))

    config = served.model.config
    rows = {LayerKind.SWA: 0, LayerKind.CSA: 2 * config.csa_rate, LayerKind.HCA: config.hca_rate}
    kinds = [*config.layer_kinds, config.mtp_kind]
    if not served.drafts:
        return nullcontext()
    changed = [
        one._replace(state=least(one.state, rows[kind]), key_state=least(one.key_state, rows[kind]))
        for one, kind in zip(served.model.caches, kinds, strict=True)
    ]
    return _replaced(served.model, "caches", changed)


def _reads_what_is_there(served: Scheduler) -> AbstractContextManager:
    """See every entry that was ever written, those of rejected drafts among them."""
    right, there = served.caches.step, {"csa": 0, "hca": 0}

    def step(batch: Any, *given: Any) -> Any:
        made, written = right(batch, *given), batch.parts[0].request.written
        config = served.model.config
        seen = dict(made.visible)
        for name, kind in (("csa", LayerKind.CSA), ("hca", LayerKind.HCA)):
            seen[kind] = seen[kind].clamp_min(there[name] // config.rate(kind))
            there[name] = written[name]
        return made._replace(visible=seen, selected=seen[LayerKind.CSA].clamp(max=config.index_topk))

    return _replaced(served.caches, "step", step)


def _verifies_a_row_late(_: Any) -> AbstractContextManager:
    """Compare a draft with the logits after it, not with those after the token before it."""
    return whole.verifies_a_row_late()


def _accepts_by_the_draft(_: Any) -> AbstractContextManager:
    """Accept with the draft block's probability, whatever the target says."""
    return _replaced(verify_of, "acceptance", lambda p, q: q)


def _draws_from_the_target(_: Any) -> AbstractContextManager:
    """Replace a rejected draft by a draw from the target, not from the residual."""
    return _replaced(verify_of, "residual", lambda p, q: p)


FAULTS: dict[str, Callable[[Any], AbstractContextManager]] = {
    "RowsWithoutDrafts": _rows_without_drafts,
    "ReadsWhatIsThere": _reads_what_is_there,
    "VerifiesARowLate": _verifies_a_row_late,
    "AcceptsByTheDraft": _accepts_by_the_draft,
    "DrawsFromTheTarget": _draws_from_the_target,
}
OF_A_DRAW = "AcceptsByTheDraft", "DrawsFromTheTarget"  # faults of verification alone: they need no scheduler
TOKEN_BEFORE = "TokenBefore"  # a fault of `held_out`: the block gets the token at a position, not the one after it


def _injected(fault: str, owner: Any) -> AbstractContextManager:
    return FAULTS[fault](owner) if fault in FAULTS else nullcontext()


# ------------------------------------------------------------------ the scheduler on ops


@torch.no_grad()
def serve(found: Listed, prompt: str, count: int, drafts: int, backend: str, fault: str = "none") -> Served:
    """Continue a prompt of at most 15 bytes greedily. A step has up to ``drafts`` drafts."""
    made = whole.model(found, backend, capacity=128, mtp=drafts > 0)
    tokens = [whole.BOS, *prompt.encode()]
    caches = PagedCaches(made, requests=1, tokens=ROWS, positions=len(tokens) + count, drafts=drafts)
    scheduler, logits, changes = Scheduler(made, caches, drafts=drafts), _recorded(made), []
    drawn, rows = [], 0
    scheduler.add("a", tokens, GREEDY, count)
    one = None
    filled = LARGE if fault in FAULTS else NAN
    with _injected(fault, scheduler):
        while "a" in scheduler.known:
            guesses, before = scheduler.known["a"].guesses, _contents(scheduler, one)
            extents = dict(one.extents) if one else {}
            found_now = [token for _, token, _ in scheduler.step()]
            one = scheduler.manager.requests.get("a", one)
            changes.append(_change(scheduler, one, guesses, found_now, before, extents))
            drawn, rows = drawn + found_now, rows + changes[-1].length - changes[-1].start
            rows += changes[-1].drafts - changes[-1].accepted
            if "a" in scheduler.known:
                _overwrite(scheduler, one, filled)
    rings = {g.name: g.rows for g in caches.manager.rings}
    return Served(drawn, logits, changes, rows, rings)


@torch.no_grad()
def differing_at_once(found: Listed, prompt: str, one: Served, backend: str) -> int:
    """Run prompt and drawn tokens as one chunk of at most 16. Count the logits that do not give a run's next token.

    A row of logits counts where it is not among the run's, bit by bit, or where another token is its largest.
    """
    made = whole.model(found, backend, capacity=128)
    tokens = [whole.BOS, *prompt.encode(), *one.tokens[:-1]]
    caches = PagedCaches(made, requests=1, tokens=ROWS, positions=ROWS)
    caches.manager.add("all", tokens)
    hidden, _ = made.hidden(caches.step(caches.manager.begin([Work("all", len(tokens))])))
    rows = made.head(hidden[len(prompt) :].contiguous())[0].cpu()
    drawn = rows[:, : found.config.vocab].argmax(-1).tolist()
    wrong = sum(a != b for a, b in zip(drawn, one.tokens, strict=True))
    return wrong + _absent(rows, one.logits)


def _recorded(made: Any) -> list[torch.Tensor]:
    """List every row of logits that the head makes from now on."""
    seen, right = [], made.head.forward

    def forward(x: torch.Tensor) -> Any:
        out = right(x)
        seen.extend(out[0].cpu().clone())
        return out

    made.head.forward = forward
    return seen


def _stores(scheduler: Scheduler) -> Iterator[tuple[int, str, Pool | State]]:
    """List what each layer keeps and drafts may write: (layer, group, where)."""
    config = scheduler.model.config
    kinds = [*config.layer_kinds, config.mtp_kind]
    for layer, (one, kind) in enumerate(zip(scheduler.model.caches, kinds, strict=False)):
        name = str(kind).lower()
        named = {one.group: one.window, name: one.entries, f"{name}_state": one.state}
        named |= {"keys": one.keys, "keys_state": one.key_state}
        for group, where in named.items():
            if isinstance(where, Pool) or (where and isinstance(where.kept, Ring)):
                yield layer, group, where


def _layout(scheduler: Scheduler, group: str) -> Any:
    return KEYS[scheduler.model.keys] if group == "keys" else kv_entry.LAYOUT


def _contents(scheduler: Scheduler, one: Any) -> dict[tuple[int, str], torch.Tensor]:
    """Copy a request's rows, uint8 [rows, bytes] by layer and group; none before its first step."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for layer, group, where in _stores(scheduler) if one is not None else ():
        blocks = one.held[group]
        if isinstance(where, State):
            page = blocks[0].pages[where.part]
            rows = torch.cat([x[page] for x in where.kept], -1)
            found[layer, group] = rows.contiguous().view(torch.uint8).cpu()
        elif blocks and None not in blocks:
            pages = torch.tensor([block.pages[where.part] for block in blocks])
            data, scales = _layout(scheduler, group).views(where.data, where.page)
            found[layer, group] = torch.cat((data[pages], scales[pages]), -1).flatten(0, 1).clone().cpu()
    return found


def _change(
    scheduler: Scheduler, one: Any, guesses: list[int], kept: list[int], before: dict, extents: dict[str, int]
) -> Change:
    rows: dict[str, set[int]] = {}
    start = extents.get("window", 0)
    accepted = max(len(kept) - 1, 0)
    held = scheduler.manager.requests.get("a") is one
    after = _contents(scheduler, one) if held else {}
    for (layer, group), old in before.items():
        new = after.get((layer, group))
        if new is not None and new.shape == old.shape:
            rows.setdefault(group, set()).update((new != old).any(-1).nonzero().flatten().tolist())
    expected: dict[str, set[int]] = {}
    for g in scheduler.caches.groups.values():
        if g.name in rows:
            positions = range(extents[g.name], one.written[g.name])
            expected[g.name] = {g.row(p) for p in positions if (p + 1) % g.rate == 0 or g.kind == "ring"}
    length = start + accepted + 1 if before and guesses else one.length
    return Change(start, len(guesses), accepted, length, tuple(guesses), tuple(kept), rows, expected)


def _overwrite(scheduler: Scheduler, one: Any, filled: tuple[int, int, float]) -> None:
    """Overwrite what is past the committed tokens: values of rejected drafts, and of drafting."""
    for _, name, where in _stores(scheduler):
        g = scheduler.caches.groups[name]
        for position in range(one.length, one.written[name]):
            if isinstance(where, State):
                for x in where.kept:
                    x[one.held[name][0].pages[where.part], position % x.shape[1]] = filled[2]
            elif (position + 1) % g.rate == 0 and position < len(one.held[name]) * g.block_tokens:
                page = one.held[name][position // g.block_tokens].pages[where.part]
                for data, byte in zip(_layout(scheduler, name).views(where.data, where.page), filled, strict=False):
                    data[page, g.row(position)] = byte


def differing(one: Served, other: Served) -> int:
    """Count tokens that differ."""
    return sum(a != b for a, b in zip(one.tokens, other.tokens, strict=True))


def missing(one: Served, other: Served) -> int:
    """Count rows of logits of a run without drafts that another run lacks. They are compared bit by bit."""
    return _absent(one.logits, other.logits)


def _absent(rows: Iterable[torch.Tensor], among: list[torch.Tensor]) -> int:
    return sum(not any(torch.equal(row, seen) for seen in among) for row in rows)


def strayed(one: Served) -> int:
    """Count the rows that steps changed although no position of theirs is kept there."""
    return sum(len(rows - change.expected[name]) for change in one.changes for name, rows in change.rows.items())


def rejecting(one: Served) -> Change:
    """Choose the step to draw.

    It accepts a draft if there is such a step, and rejects most; of these it is the last.
    """
    return max(one.decoding, key=lambda c: (bool(c.accepted), c.drafts - c.accepted, c.start))


# ------------------------------------------------------------------ held-out text, on the oracle


@torch.no_grad()
def held_out(found: Listed, passages: int, rounds: int, first: int = 48, fault: str = "none") -> Chains:
    """Draft and verify at ``rounds`` places of each passage.

    There are ``passages`` of them, of ``first`` bytes and more.
    """
    model, size = whole.oracle(found), MOST + 1
    data = (whole.folder() / "heldout.txt").read_bytes()
    length, apart = first + rounds * size + 1, len(data) // passages
    text = [[whole.BOS, *data[i * apart : i * apart + length]] for i in range(passages)]
    tokens, cache, chains = torch.tensor(text), model.new_cache(passages), []
    begin, end = 0, first
    for _ in range(rounds):
        shift = 0 if fault == TOKEN_BEFORE else 1
        seen: dict[str, torch.Tensor] = {}
        ahead = tokens[:, begin + shift : end + shift]
        model(tokens[:, begin:end], cache, seen, mtp=ahead)
        chains.append(_chain(model, cache, seen, tokens[:, end : end + 1], shift))
        begin, end = end, end + size
    return Chains(*(torch.cat(x) for x in zip(*chains, strict=True)))


def _chain(model: Any, cache: Any, seen: dict[str, torch.Tensor], last: torch.Tensor, shift: int) -> Chains:
    """Draft greedily after the last known token, run the target on it and the drafts; the cache stays as it is."""
    logits, streams, fork, drafts = seen["mtp_logits"][:, -1], seen["mtp.0.streams"][:, -1:], cache.fork(), []
    q = torch.softmax(logits.double(), -1)
    while True:
        drafts.append(logits.argmax(-1, keepdim=True))
        if len(drafts) == MOST:
            break
        ahead = drafts[-1] if shift else (last if len(drafts) == 1 else drafts[-2])
        step: dict[str, torch.Tensor] = {}
        logits = model.mtp_logits(streams, ahead, fork, step)[:, -1]
        streams = step["mtp.0.streams"]
    guesses = torch.cat(drafts, 1)
    target = torch.softmax(model(torch.cat((last, guesses), 1), cache.fork()).double(), -1)
    chance = target[:, :-1].gather(-1, guesses[..., None])[..., 0]
    return Chains(guesses, target.argmax(-1), chance, target[:, 0], q)


class Accepted(NamedTuple):
    """Acceptance by place of the draft, K places.

    Attributes:
        reached, accepted: int64 [K], greedy: chains whose drafts before it were accepted, and it, too.
        greedy, drawn: fp64 [K], mean share of chains whose first i drafts are accepted, at temperature 0 and 1.
    """

    reached: torch.Tensor
    accepted: torch.Tensor
    greedy: torch.Tensor
    drawn: torch.Tensor


def acceptance(chains: Chains) -> Accepted:
    """Count acceptance by place. At temperature 1 a greedy draft is accepted with the target's probability of it."""
    passed = chains.passed
    accepted = passed.sum(0)
    reached = torch.cat((torch.tensor([len(passed)]), accepted[:-1]))
    return Accepted(reached, accepted, accepted.double() / len(passed), chains.chance.cumprod(1).mean(0))


def a_step(shares: torch.Tensor) -> torch.Tensor:
    """Tokens that a step gives with K = 0, 1, ... drafts: one, and the drafts that are accepted; fp64 [K + 1]."""
    return torch.cat((shares.new_ones(1), 1 + shares.cumsum(0)))


# ------------------------------------------------------------------ one position, sampled


def a_position(chains: Chains) -> int:
    """Choose the position whose two distributions overlap by half, or nearly."""
    overlap = torch.minimum(chains.p, chains.q).sum(-1)
    return int((overlap - 0.5).abs().argmin())


def emitted(p: torch.Tensor, q: torch.Tensor, draws: int, fault: str = "none") -> tuple[torch.Tensor, float]:
    """Draw drafts from q [V] and verify them against p [V].

    Returns (how often each token comes out, share accepted).
    """
    vocab, generator = len(p), torch.Generator().manual_seed(0)
    settings = Settings.of([SamplingParams(seed=5)] * draws, vocab)
    drafts = torch.multinomial(q, draws, True, generator=generator)[:, None]
    target = p.expand(draws, 2, vocab)
    with _injected(fault if fault in OF_A_DRAW else "none", None):
        found = verify_of.verify(drafts, target, settings, torch.arange(draws), q.expand(draws, 1, vocab))
    return torch.bincount(found.tokens[:, 0], minlength=vocab), float((found.accepted > 0).double().mean())


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Chi-square of counts against p, over its 99.9 % point; rare tokens share a bin."""
    wanted = p * counts.sum()
    often = wanted >= LEAST
    want = torch.cat((wanted[often], wanted[~often].sum()[None]))
    have = torch.cat((counts[often], counts[~often].sum()[None])).double()
    real = want > 0
    free = int(real.sum()) - 1
    point = free * (1 - 2 / (9 * free) + 3.0902 * math.sqrt(2 / (9 * free))) ** 3  # Wilson and Hilferty
    return float(((have - want)[real] ** 2 / want[real]).sum()) / point


# ------------------------------------------------------------------ what a step costs


def weight_bytes(config: ModelConfig, tokens: int, drafts: int) -> float:
    """Return bytes of weights that a step of ``tokens`` requests reads.

    Backbone on all drafts, draft block ``drafts`` times.

    Experts are chosen independently, FP8 or MXFP4 as released; caches and products are left out.
    """
    expert, each = 3 * config.hidden * config.expert_width, config.experts_per_token
    dense = config.active_params - config.n_layers * each * expert
    own = config.mtp_params - config.n_experts * expert + config.vocab * config.hidden

    def experts(rows: int) -> float:
        return config.n_experts * (1 - (1 - each / config.n_experts) ** rows) * expert * EXPERT_BYTES

    backbone = dense + config.n_layers * experts(tokens * (drafts + 1))
    return backbone + drafts * (own + experts(tokens))


def relative_cost(config: ModelConfig, requests: int, gains: torch.Tensor) -> torch.Tensor:
    """Weight bytes a token with K = 0, 1, ... drafts, over those without; gains: tokens a step, fp64 [K + 1]."""
    cost = torch.tensor([weight_bytes(config, requests, k) for k in range(len(gains))], dtype=torch.float64)
    return cost / gains / cost[0]


def cheapest(config: ModelConfig, requests: int, share: float) -> int:
    """Return the number of drafts that reads least. Each is accepted with one probability after those before it."""
    shares = torch.full((MOST,), share, dtype=torch.float64).cumprod(0)
    return int(relative_cost(config, requests, a_step(shares)).argmin())
