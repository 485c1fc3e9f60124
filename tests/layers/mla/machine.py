"""A small server of MLA: a map of token slots, caches of two layers, decode steps, and what attention should return."""

import torch

from dsv4lib.layers.mla import ForwardBatch, ForwardMode, MLABackend, MLAConfig, MLAPool
from dsv4lib.pages.mla.page_table import slots_of
from dsv4lib.reference.mla_decode import mla_decode as oracle

CONTEXT = 700


class Server:
    """Requests with so many tokens each, rows of the map in that order; a page more than they need is the first.

    Caches hold NaN where no token is.
    """

    def __init__(self, lengths, *, page=32, heads=5, spare=40, backend="reference", seed=0, layers=2, **options):
        names = {"delegate", "check"} & set(options)
        own = {name: options.pop(name) for name in names}
        self.config = MLAConfig(num_heads=heads, page_size=page, max_context_len=CONTEXT, **options)
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths = list(lengths)
        self.slots = slots_of([length + spare for length in lengths], page, CONTEXT, seed, first_page=1)
        pages = int(self.slots.max()) // page + 1
        self.pool = MLAPool(self.config, max(2, pages), layers)
        for layer in range(layers):
            rows = self.pool.rows[layer]
            rows.view(torch.uint8).fill_(0xFF)
            for request, length in enumerate(lengths):
                where = self.slots[request, :length].long()
                self.pool.set_kv_buffer(self.config.layer(layer), where, self.normal(length, 576))
        self.mla = MLABackend(self.config, self.pool, self.slots, backend, **own)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def step(self, requests, mode=ForwardMode.DECODE, **options):
        """A decode step: each request gets a token."""
        for request in requests:
            self.lengths[request] += 1
        lengths = torch.tensor([self.lengths[r] for r in requests], dtype=torch.int64)
        loc = self.slots[list(requests), (lengths - 1).tolist()] if requests else torch.zeros(0).int()
        return ForwardBatch(mode, len(requests), torch.tensor(requests, dtype=torch.int64), lengths, loc, **options)

    def want(self, q, layer, rows):
        """Output in fp64 of queries [T, H, 576] of (request, tokens), read by slot, not by page."""
        q = q.to(self.config.dtype) if self.config.q_scale == 1 else (q / self.config.q_scale).to(self.config.dtype)
        q = q.double() * self.config.q_scale
        cache = self.pool.get_key_buffer(layer).double() * self.config.kv_scale
        found = []
        for i, (request, count) in enumerate(rows):
            entries = cache[self.slots[request, :count].long()]
            table, sizes = torch.zeros(1, 1).int(), torch.tensor([count]).int()
            one = q[i : i + 1]
            given = one[..., :512], one[..., 512:], entries[None], sizes, table
            found.append(oracle(*given, self.config.sm_scale).out.flatten(1))
        return torch.cat(found)


def close(found, want, bound=4e-3):
    """Whether the RMS error is below ``bound`` of the RMS."""
    assert found.shape == want.shape
    return float((found.double() - want).square().mean().sqrt() / want.square().mean().sqrt()) < bound
