"""The model on the pool of the cache manager: the logits of places of their own, whatever the scheduler does."""

import pytest
import torch

from dsv4lib.cache import PoolExhausted, RequestExists, UnknownRequest, Work, request_bytes
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry
from dsv4lib.loader.model import transformer
from dsv4lib.model.paged import PagedCaches, pool_bytes
from dsv4lib.model.sampler import History, NoDistribution, SamplingParams, Settings, sample
from dsv4lib.model.scheduler import Scheduler
from tests.model.test_transformer import GREEDY, ids
from tests.whole_model import SMALL, listed, peer  # noqa: F401  fixtures

PROMPTS = {"a": ids(132, 2), "b": ids(9, 3), "c": ids(21, 4)}
TOKENS, FULL = 6, pytest.mark.full


def model(listed, backend="reference", mtp=False):  # noqa: F811
    return transformer(listed, capacity=1024, mtp=mtp, backend=backend)


def served(one, prompts, *, caches=None, params=GREEDY, tokens=TOKENS, **options):
    """(tokens by request, scheduler) of requests that are added one after the other, two steps apart."""
    seen = record(one)
    sizes = {"requests": 3, "tokens": 64, "positions": 1024, "drafts": options.get("drafts", 0)}
    scheduler = Scheduler(one, PagedCaches(one, **{**sizes, **(caches or {})}), **options)
    found = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        scheduler.add(name, prompt, params, tokens)
        for _ in range(2):
            for name_of, token, _ in scheduler.step():
                found[name_of].append(token)
    for name, token, last in scheduler.run():
        found[name].append(token)
        assert last == (len(found[name]) == tokens)
    scheduler.logits = seen
    return found, scheduler


def record(one):
    """List the logits that are drawn from, of all requests in turn: every row that the head makes from then on."""
    seen, right = [], one.head.forward

    def forward(x):
        out = right(x)
        seen.extend(out[0][:, : SMALL.vocab].clone())
        return out

    one.head.forward = forward
    return seen


def by_places(one, prompt, params=GREEDY, tokens=TOKENS):
    """Tokens of a request at a place of its own, without manager or scheduler: the prompt at once, then one by one."""
    sequence, history = list(prompt), History.empty(1, SMALL.vocab)
    settings, given = Settings.of([params], SMALL.vocab), prompt
    history.start(0, torch.tensor(prompt))
    while len(sequence) < len(prompt) + tokens:
        logits = one([given], [0], [len(sequence) - len(given)])[:, : SMALL.vocab]
        found = sample(logits, settings, torch.tensor([len(sequence)]), history).check().tokens
        history.add(found)
        sequence, given = [*sequence, int(found)], [int(found)]
    return sequence[len(prompt) :]


@torch.no_grad()
def drafts_by_places(one, sequence, count):
    """Drafts after a sequence whose last token has not run, at a place of its own."""
    _, streams = one.hidden(one.step([sequence[:-1]], [0], [0]), keep_streams=True)
    hidden, streams = one.draft(streams, one.step([sequence[1:]], [0], [0]))
    found = []
    while True:
        found.append(int(one.head(hidden[-1:].contiguous())[0][0, : SMALL.vocab].argmax()))
        if len(found) == count:
            return found
        hidden, streams = one.draft(streams[-1:], one.step([found[-1:]], [0], [len(sequence) - 2 + len(found)]))


def found_in(rows, seen):
    """Whether each of some logits is, bit by bit, among those that were seen."""
    return all(any(torch.equal(row, one) for one in seen) for row in rows)


@pytest.fixture(scope="module")
def alone(listed):  # noqa: F811
    """(tokens of each request alone, at a place of its own; logits of all of them)."""
    found, logits = {}, []
    for name, prompt in PROMPTS.items():
        one = model(listed)
        seen = record(one)
        found[name] = by_places(one, prompt)
        logits += seen
    return found, logits


def test_a_chunk_on_the_pool_has_the_bits_of_a_place(listed):  # noqa: F811
    """Three chunks across pages of a window, windows of 4 and 128, and blocks of 256 tokens."""
    tokens, paged = ids(300, 6), model(listed)
    caches = PagedCaches(paged, requests=2, tokens=200, positions=512)
    caches.manager.add("other", tokens[:70])
    caches.manager.add("one", tokens)
    want, found, place = model(listed), [], 0
    for count in (3, 130, 167):
        step = caches.manager.begin([Work("one", count), *([Work("other", 70)] if count == 3 else [])])
        hidden, _ = paged.hidden(caches.step(step, rows=200 if count == 130 else None))
        caches.manager.commit(step)
        found.append(paged.head(hidden[:count].contiguous())[0])
        place += count
    assert torch.equal(torch.cat(found), want([tokens], [0], [0], all_logits=True))


def test_tokens_do_not_depend_on_who_else_is_served(listed, alone):  # noqa: F811
    found, scheduler = served(model(listed), PROMPTS)
    assert found == alone[0] and not scheduler.manager.requests and not scheduler.known
    assert found_in(alone[1], scheduler.logits) and len(scheduler.logits) == len(alone[1])


@pytest.mark.parametrize("drafts", [3, pytest.param(1, marks=FULL)])
def test_drafts_change_no_token(listed, alone, drafts):  # noqa: F811
    found, scheduler = served(model(listed, mtp=True), PROMPTS, drafts=drafts)
    assert found == alone[0] and found_in(alone[1], scheduler.logits)


def test_drafts_are_those_of_a_request_alone(listed):  # noqa: F811
    """After a prompt in chunks and after decode steps, beside another request."""
    one, other = model(listed, mtp=True), model(listed, mtp=True)
    caches = PagedCaches(one, requests=2, tokens=16, positions=128, drafts=3)
    scheduler = Scheduler(one, caches, drafts=3)
    scheduler.add("b", PROMPTS["b"], GREEDY, 40)
    scheduler.add("c", PROMPTS["c"], GREEDY, 20)
    while not scheduler.known["c"].guesses:
        scheduler.step()
    for _ in range(3):
        guesses = scheduler.known["c"].guesses
        assert len(guesses) == 3 and guesses == drafts_by_places(other, caches.manager.get("c").tokens, 3)
        scheduler.step()


@pytest.mark.parametrize("numbers", [(0, 7), pytest.param((0, 1, 3), marks=FULL)], ids=str)
def test_any_number_of_drafts_gives_the_same_tokens_and_entries(listed, numbers):  # noqa: F811
    """Across windows of 4 and 128; nothing is left of drafts that were taken back, and passed windows are released."""
    prompt, outs, entries = ids(250, 8), [], []
    for drafts in numbers:
        one = model(listed, mtp=drafts > 0)
        caches = PagedCaches(one, requests=1, tokens=100, positions=320, drafts=drafts)
        scheduler, found = Scheduler(one, caches, drafts=drafts), []
        scheduler.add("a", prompt, GREEDY, 40)
        served_one = scheduler.known["a"]
        while len(found) < 12:
            found += [token for _, token, _ in scheduler.step()]
        held = scheduler.manager.get("a").held
        assert held["window"][0] is None and sum(block is not None for block in held["window"]) <= 3
        rows = []
        for layer, name in ((1, "csa"), (2, "hca")):
            pool = one.caches[layer].entries
            places = [divmod(i, pool.page) for i in range(260 // caches.groups[name].rate)]
            index = [held[name][block].pages[pool.part] * pool.page + at for block, at in places]
            rows.append(kv_entry.gather(pool.data, pool.page, torch.tensor(index))[0])
        outs.append(found[:12])
        entries.append(torch.cat(rows))
        assert (served_one.drafted > served_one.accepted >= 0) == (drafts > 0)
    assert all(tokens == outs[0] for tokens in outs)
    assert all(torch.equal(found, entries[0]) for found in entries)


def test_drawn_tokens_are_those_of_the_seed(listed):  # noqa: F811
    params, prompts = SamplingParams(temperature=1.5, seed=7, repetition=1.1), {n: PROMPTS[n] for n in "bc"}
    want = {name: by_places(model(listed), prompt, params) for name, prompt in prompts.items()}
    assert served(model(listed), prompts, params=params)[0] == want


@pytest.mark.one_in(2)
@pytest.mark.parametrize("swap", [False, True])
def test_preempted_requests_go_on_with_the_same_tokens(listed, alone, swap):  # noqa: F811
    """A pool that holds two of them whole, and of the third no more than its rings."""
    one = model(listed)
    manager = PagedCaches(one, requests=1, tokens=64, positions=256).manager
    two = sum(request_bytes(manager, len(PROMPTS[name]) + TOKENS) for name in "ab") // manager.pool.page_bytes
    caches = {"pages": two + 4, "host_pages": 64 * swap, "positions": 256}
    found, scheduler = served(one, PROMPTS, caches=caches, swap=swap)
    assert found == alone[0] and scheduler.manager.metrics.preemptions > 0
    assert found_in(alone[1], scheduler.logits)


def test_a_prompt_that_was_served_hits(listed):  # noqa: F811
    """290 tokens again, and with another end: served from a block on, with the logits of a cold cache."""
    prompt = ids(290, 8)
    other = prompt[:270] + ids(30, 9)
    cold = model(listed)
    want = cold([other], [0], [0])[0, : SMALL.vocab]
    one = model(listed)
    seen = record(one)
    scheduler = Scheduler(one, PagedCaches(one, requests=2, tokens=256, positions=1024, pages=400))
    found = {}
    for name, text in (("x", prompt), ("again", prompt), ("y", other)):
        scheduler.add(name, text, GREEDY, 3)
        served_one = scheduler.known[name]
        seen.clear()
        found[name] = [token for _, token, _ in scheduler.run()], list(seen)
        assert served_one.hit == (0 if name == "x" else 256), name
    assert found["x"][0] == found["again"][0] and torch.equal(found["y"][1][0], want)
    assert all(torch.equal(a, b) for a, b in zip(found["x"][1], found["again"][1], strict=True))


def test_decode_steps_are_padded(listed, alone):  # noqa: F811
    """To 3 requests, where 1 or 2 decode."""
    one, sizes, prompts = model(listed), [], {n: PROMPTS[n] for n in "bc"}
    right = one.hidden
    one.hidden = lambda step, **options: sizes.append(len(step.tokens)) or right(step, **options)
    found, _ = served(one, prompts, decode_sizes=[3])
    assert found == {name: alone[0][name] for name in prompts} and set(sizes[-4:]) == {3}


@pytest.mark.full
@torch.no_grad()
def test_kernels_run_on_the_pool(listed):  # noqa: F811
    """SM100 in the emulator: a chunk that closes windows, decode beside another chunk; bits of places of their own."""
    one, other = model(listed, "emulator"), model(listed, "emulator")
    caches = PagedCaches(one, requests=2, tokens=16, positions=1024)
    text = ids(12, 7)
    caches.manager.add("a", text[:7])
    caches.manager.add("b", text[7:])
    for works, given in (
        ([Work("a", 6)], ([text[:6]], [0], [0])),
        ([Work("a", 1), Work("b", 5)], ([text[6:7], text[7:]], [0, 1], [6, 0])),
    ):
        step = caches.manager.begin(works)
        hidden, _ = one.hidden(caches.step(step))
        caches.manager.commit(step)
        other.layout = other.layout._replace(places=2)
        want, _ = other.hidden(other.step(*given))
        assert torch.equal(hidden, want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_pool_of_a_request_is_as_large_as_it_says_and_holds_it(listed, drafts):  # noqa: F811
    """To the last position, and with the point that a prompt saves: the same prompt hits."""
    one, sizes = model(listed, mtp=drafts > 0), {"requests": 1, "tokens": 256, "positions": 528, "drafts": drafts}
    caches = PagedCaches(one, **sizes)
    assert caches.storage.pages.numel() == pool_bytes(SMALL, **sizes)
    scheduler, prompt = Scheduler(one, caches, drafts=drafts), ids(522, 12)
    for name in "ab":
        scheduler.add(name, prompt, GREEDY, 6)
        added = scheduler.known[name]
        assert len(list(scheduler.run())) == 6 and added.hit == (0 if name == "a" else 512)
    assert scheduler.manager.metrics.saves > 0 == scheduler.manager.metrics.saves_skipped


def test_logits_that_are_no_numbers_are_refused(listed):  # noqa: F811
    for drafts in (0, 2):
        one = model(listed, mtp=drafts > 0)
        scheduler = Scheduler(one, PagedCaches(one, requests=1, tokens=64, positions=128, drafts=drafts), drafts=drafts)
        scheduler.add("a", PROMPTS["b"], GREEDY, 5)
        scheduler.step()
        right = one.head.forward
        one.head.forward = lambda x, right=right: tuple(y.fill_(float("nan")) for y in right(x))
        with pytest.raises(NoDistribution):
            scheduler.step()
        one.head.forward = right
        assert len(list(scheduler.run())) == 4  # the step was taken back


def test_bad_requests_are_named(listed):  # noqa: F811
    one = model(listed)
    caches = PagedCaches(one, requests=1, tokens=64, positions=128)
    scheduler = Scheduler(one, caches)
    scheduler.add("a", [1, 2], GREEDY, 2)
    for error, call in (
        (RequestExists, lambda: scheduler.add("a", [1], GREEDY, 1)),
        (UnknownRequest, lambda: scheduler.cancel("b")),
        (ArgumentError, lambda: scheduler.add("b", [], GREEDY, 1)),
        (ArgumentError, lambda: scheduler.add("b", [SMALL.vocab], GREEDY, 1)),
        (ArgumentError, lambda: scheduler.add("b", [1] * 128, GREEDY, 1)),
        (ArgumentError, lambda: Scheduler(one, caches, drafts=1)),
        (ArgumentError, lambda: Scheduler(one, caches, decode_sizes=[2])),
        (ArgumentError, lambda: Scheduler(one, caches, graphs=True)),
        (ArgumentError, lambda: PagedCaches(one, requests=1, tokens=8, positions=1025)),
        (ArgumentError, lambda: PagedCaches(one, requests=1, tokens=8, positions=128, drafts=1)),
    ):
        with pytest.raises(error):
            call()
    scheduler.cancel("a")
    small = Scheduler(one, PagedCaches(one, requests=1, tokens=64, positions=128, pages=3))
    small.add("a", [1, 2], GREEDY, 2)
    with pytest.raises(PoolExhausted):
        small.step()
