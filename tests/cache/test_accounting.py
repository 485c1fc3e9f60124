"""Pools for so many requests: every step of every request finds its pages, and little is left over."""

import random

import pytest

from dsv4lib.cache import Manager, Work, best_page_bytes, deepseek_v4, held_blocks, pool_pages, request_bytes
from dsv4lib.cache.accounting import most_blocks
from dsv4lib.config import FLASH


def groups(drafts):
    return deepseek_v4(FLASH, mtp=int(drafts > 0), drafts=drafts, running=not drafts)


def held(manager, name):
    """Blocks of each group that a request holds."""
    return {g: sum(b is not None for b in manager.get(name).held[g.name]) for g in manager.groups}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_pool_for_requests_holds_them_and_their_points(drafts, seed):
    """Two requests to their last position in steps of any size, with rejected drafts; then both prompts hit."""
    rng, own = random.Random(seed), groups(drafts)
    most, tokens, end = {g: 0 for g in own}, rng.choice([1, 64, 200, 256]), 1100
    sizes = {"requests": 2, "positions": end + drafts, "tokens": tokens}
    manager = Manager(own, pool_pages(own, best_page_bytes(own), **sizes))
    for name in "ab":
        manager.add(name, [rng.randrange(9) for _ in range(800)])
    while any(len(manager.get(name).tokens) < end for name in "ab"):
        works = []
        for name in "ab":
            one = manager.get(name)
            left = len(one.tokens) - one.length
            if len(one.tokens) < end and left == 1:
                works.append(Work(name, 1, [1] * min(drafts, tokens - 1, end - len(one.tokens) - 1)))
            elif len(one.tokens) < end:
                works.append(Work(name, manager.cut(name, min(left, rng.randint(1, tokens)))))
        step = manager.begin(works)
        for name in "ab":
            most = {g: max(most[g], count) for g, count in held(manager, name).items()}
        accepted = [rng.randint(0, len(work.drafts)) for work in works]
        manager.commit(step, accepted)
        for part in step.parts:
            if part.request.length == len(part.request.tokens):
                manager.append(part.request.id, [rng.randrange(9)])
    assert manager.metrics.saves_skipped == 0 < manager.metrics.saves
    for g in own:
        bound = most_blocks(g, end + drafts, tokens)
        assert bound - 2 <= most[g] <= bound, g.name
    prompts = {name: manager.get(name).tokens[:800] for name in "ab"}
    for name, prompt in prompts.items():
        manager.finish(name)
        assert manager.add(name, prompt) == 768


def test_blocks_between_steps_are_those_of_the_bytes():
    own = groups(0)
    manager = Manager(own, 4000)
    for length in (0, 1, 127, 128, 300, 1000):
        pages = sum(held_blocks(g, length) * g.pages(manager.pool.page_bytes) for g in own)
        assert pages * manager.pool.page_bytes == request_bytes(manager, length)
    assert held_blocks(own[0], 1000) == 3 and own[0].name == "window"
