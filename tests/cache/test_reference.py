"""The reference model on the manager's pages: logits of any mixture are those of recomputing, to the bit.

Every token is run alone, so that each product has the same shape however a request was served. Chunks of many tokens
change the order of torch's sums; for them only a bound holds.
"""

import random

import pytest
import torch

from dsv4lib.cache import Manager, PoolExhausted, Shape, Storage, ValueBytes, Work, account, arrange
from dsv4lib.cache.faults import inject
from dsv4lib.config import TINY, LayerKind
from dsv4lib.errors import ArgumentError
from dsv4lib.reference.cache import Cache
from dsv4lib.reference.compressor import State
from dsv4lib.reference.model import ReferenceModel

C = TINY
SHAPE = Shape(C.layer_kinds, C.window, C.csa_rate, C.hca_rate)
SIZE = ValueBytes(4 * C.head_dim, 4 * C.index_dim, 16 * C.head_dim, 16 * C.index_dim, 8 * C.head_dim)
TEXT = [(i * 37 + i // 3) % C.vocab for i in range(60)]


class Served:
    """Requests of the reference model, whose caches lie in a manager's pages alone."""

    def __init__(self, model, window_block, pages=900):
        groups = arrange(SHAPE, SIZE, block=8, window_block=window_block, drafts=2)
        self.model, self.manager = model, Manager(groups, pages=pages, host_pages=400, save_every=8)
        self.storage = Storage(self.manager)
        self.storage.pages.fill_(0xFF)  # NaN: what was not written is not read
        self.groups = {g.name: g for g in groups}

    def cell(self, request, name, layer, index):
        g = self.groups[name]
        part, data = self.storage.layer(g, SHAPE.index(layer)[name])
        block = self.manager.block(request, g, index * g.rate if g.kind == "entries" else index)
        row = g.row(index * g.rate if g.kind == "entries" else index)
        return data[block.pages[part]][row * g.entry_bytes : (row + 1) * g.entry_bytes].view(torch.float32)

    def cache_of(self, request, position):
        cache: Cache = self.model.new_cache(1)
        cache.position = position
        for number, layer in enumerate(cache.layers):
            for p in range(max(0, position - C.window + 1), position):
                layer.window[0, p % C.window] = self.cell(request, "window", number, p)
            pairs = {LayerKind.CSA: (("csa", "state", "entries"), ("keys", "index_state", "index_keys"))}
            for name, state, entries in pairs.get(layer.kind, (("hca", "state", "entries"),)):
                if layer.kind is LayerKind.SWA:
                    continue
                g, kept = self.groups[f"{name}_state"], getattr(layer, state)
                for p in range(position - g.needed(position), position):
                    row = self.cell(request, f"{name}_state", number, p)
                    half, slot = len(row) // 2, p % kept.k.shape[1]
                    kept.k[0, slot], kept.z[0, slot] = row[:half], row[half:]
                rate = self.groups[name].rate
                rows = [self.cell(request, name, number, s) for s in range(position // rate)]
                if rows:
                    setattr(layer, entries, torch.stack(rows)[None])
        return cache

    def store(self, request, cache, position):
        for number, layer in enumerate(cache.layers):
            self.cell(request, "window", number, position).copy_(layer.window[0, position % C.window])
            pairs = {LayerKind.CSA: (("csa", "state", "entries"), ("keys", "index_state", "index_keys"))}
            for name, state, entries in pairs.get(layer.kind, (("hca", "state", "entries"),)):
                if layer.kind is LayerKind.SWA:
                    continue
                kept: State = getattr(layer, state)
                slot = position % kept.k.shape[1]
                row = self.cell(request, f"{name}_state", number, position)
                row.copy_(torch.cat((kept.k[0, slot], kept.z[0, slot])))
                rate = self.groups[name].rate
                if (position + 1) % rate == 0:
                    self.cell(request, name, number, position // rate).copy_(getattr(layer, entries)[0, -1])

    def step(self, request, count, drafts=(), accepted=0):
        step = self.manager.begin([Work(request, count, drafts)])
        self.storage.run(self.manager.copies())
        part, logits = step.parts[0], []
        for position, token in enumerate(part.tokens, part.start):
            cache = self.cache_of(request, position)
            logits.append(self.model(torch.tensor([[token]]), cache)[0, -1])
            self.store(request, cache, position)
        self.manager.commit(step, [accepted])
        self.storage.run(self.manager.copies())
        return part.start, part.tokens, logits


class Recomputed:
    """Logits after every prefix, of a cache that is never shared."""

    def __init__(self, model):
        self.model, self.known = model, {(): (model.new_cache(1), None)}

    def after(self, tokens):
        tokens = tuple(tokens)
        if tokens not in self.known:
            cache = self.after(tokens[:-1])[0].fork()
            logits = self.model(torch.tensor([[tokens[-1]]]), cache)[0, -1]
            self.known[tokens] = cache, logits
        return self.known[tokens]


@pytest.fixture(scope="module")
def oracle():
    with torch.no_grad():
        yield Recomputed(ReferenceModel(C).randomize_(3))


def mixture(oracle, window_block, seed, calls):
    """Random calls; every token's logits are compared. Returns how many tokens hit."""
    draw, served, names, waiting = random.Random(seed), Served(oracle.model, window_block), [], []
    manager, compared = served.manager, 0
    for number in range(calls):
        what = draw.choice(("add", "step", "step", "step", "fork", "preempt", "resume", "finish"))
        try:
            if what == "add" and len(names) < 3:
                manager.add(number, TEXT[: draw.choice((9, 17, 20, 26))] + [draw.randrange(3)])
                names.append(number)
            elif what == "resume" and waiting:
                manager.resume(waiting[0])
                names.append(waiting.pop(0))
            elif names:
                name = draw.choice(names)
                one = manager.get(name)
                if what == "step":
                    if one.length == len(one.tokens):
                        manager.append(name, [draw.randrange(3)])
                    count = manager.cut(name, len(one.tokens) - one.length)
                    drafts = [draw.randrange(3) for _ in range(draw.randrange(3))]
                    drafts = drafts if one.length + count == len(one.tokens) else []
                    before = list(one.tokens)
                    start, tokens, logits = served.step(name, count, drafts, draw.randint(0, len(drafts)))
                    for i, found in enumerate(logits):
                        assert torch.equal(found, oracle.after(before[:start] + tokens[: i + 1])[1]), (
                            f"wrong logits of {name} at {start + i}"
                        )
                    compared += len(logits)
                elif what == "fork" and len(names) < 4:
                    manager.fork(name, number)
                    names.append(number)
                elif what == "preempt":
                    manager.preempt(name, draw.choice(("recompute", "swap")))
                    waiting.append(name)
                    names.remove(name)
                elif what == "finish":
                    manager.finish(name)
                    names.remove(name)
        except PoolExhausted:
            manager.evict()
        served.storage.run(manager.copies())
        account(manager).check()
    return manager.metrics.tokens_hit if compared else 0


def test_logits_of_a_mixture_are_bit_equal(oracle):
    assert mixture(oracle, 4, 1, 40) > 0
    assert sum(mixture(oracle, None, seed, 40) for seed in range(6)) > 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_logits_of_more_mixtures_are_bit_equal(oracle, seed):
    mixture(oracle, (4, None)[seed % 2], 10 + seed, 300)


def test_a_stale_ring_is_seen_in_logits(oracle):
    with inject("stale_ring"), pytest.raises((AssertionError, ArgumentError), match="wrong logits|NaN"):
        for seed in range(6):
            mixture(oracle, None, seed, 40)


def test_chunks_are_bounded(oracle):
    """Chunks of other sizes: not the same bits, but within fp32's rounding of sums."""
    cache, worst, start = oracle.model.new_cache(1), 0.0, 0
    for size in (13, 1, 9, 17):
        logits = oracle.model(torch.tensor([TEXT[start : start + size]]), cache)[0]
        for i in range(size):
            worst = max(worst, float((logits[i] - oracle.after(TEXT[: start + i + 1])[1]).abs().max()))
        start += size
    assert worst < 4e-5, worst
    print(f"largest difference of logits: {worst:.1e}")
