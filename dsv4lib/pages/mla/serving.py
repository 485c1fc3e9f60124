"""Serve a few decode steps with the MLA back end, eagerly and as captured steps, and compare them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.layers.mla import CudaGraphPool, ForwardBatch, ForwardMode, MLABackend, MLAConfig, MLAPool
from dsv4lib.layers.mla.graphs import GraphMemory
from dsv4lib.ops.common.graph_capture import Captured, capture
from dsv4lib.ops.mla_decode.op import SM_SCALE
from dsv4lib.pages.mla.page_table import slots_of
from dsv4lib.pages.mla.run_case import ARCH
from dsv4lib.reference import mla_decode as oracle

LENGTHS = 20, 40, 3  # tokens of the requests before the first step
STEPS = (0, 1, 2), (2, 0), (1,)  # requests of each step, in the order of the batch
SIZES = 1, 4  # that are captured
CONTEXT = 128


class Replay(NamedTuple):
    """A step: requests, their lengths, rows of the graph, elements that are not the eager step's, error of both."""

    requests: tuple[int, ...]
    lengths: tuple[int, ...]
    size: int
    differences: int
    error: float


class Served(NamedTuple):
    """What a run showed.

    Attributes:
        steps: each step. allocations: of metadata. memory: of graphs. stand_in: graphs are a stand-in on the CPU.
    """

    steps: list[Replay]
    allocations: int
    memory: list[GraphMemory]
    stand_in: bool

    @property
    def differences(self) -> int:
        """Elements of replayed steps that have other bits than those of eager ones."""
        return sum(step.differences for step in self.steps)

    @property
    def error(self) -> float:
        """Largest relative RMS error of a step against fp64."""
        return max(step.error for step in self.steps)


def stand_in(backend: MLABackend) -> Callable[[Callable[[], Tensor]], Captured]:
    """Make what captures on a CPU: a replay runs the same launches on the same memory, with the metadata of then."""

    def captured_by(run: Callable[[], Tensor]) -> Captured:
        metadata, out = backend.forward_metadata, run()

        def replay() -> None:
            now, backend.forward_metadata = backend.forward_metadata, metadata
            out.copy_(run())
            backend.forward_metadata = now

        return Captured(replay, out)

    return captured_by


class Server:
    """Three requests, one layer, static inputs of captured steps."""

    def __init__(self, backend: str, heads: int, page: int, seed: int) -> None:
        self.where, self.generator = backends.device(backend), torch.Generator().manual_seed(seed)
        self.config = MLAConfig(heads, page_size=page, max_context_len=CONTEXT, num_kv_splits=1)
        slots = slots_of([n + len(STEPS) for n in LENGTHS], page, CONTEXT, seed, first_page=1)
        self.slots, self.lengths = slots.to(self.where), list(LENGTHS)
        self.pool = MLAPool(self.config, max(2, int(slots.max()) // page + 1), device=self.where)
        self.pool.rows[0].view(torch.uint8).fill_(0xFF)  # what no token has written is NaN
        self.layer = self.config.layer(0)
        for request, length in enumerate(LENGTHS):
            self.pool.set_kv_buffer(self.layer, self.slots[request, :length], self.normals(length, 576))
        self.mla, self.eager = (MLABackend(self.config, self.pool, self.slots, backend) for _ in range(2))
        self.mla.init_cuda_graph_state(max(SIZES))
        self.q, self.k = (torch.zeros(max(SIZES), n, 576, device=self.where) for n in (heads, 1))
        self.loc = torch.full((max(SIZES),), -1, device=self.where)
        by = capture if backend == "native" else stand_in(self.mla)
        self.graphs = CudaGraphPool(self.make, SIZES, by)

    def normals(self, *shape: int) -> Tensor:
        """Draw normals."""
        return torch.randn(*shape, generator=self.generator).to(self.where)

    def make(self, size: int) -> Callable[[], Tensor]:
        """Return a decode step of ``size`` rows to capture, on padding."""
        ids = torch.zeros(size, dtype=torch.int64, device=self.where)
        lengths = torch.full_like(ids, self.mla.get_cuda_graph_seq_len_fill_value())
        self.mla.init_forward_metadata_capture_cuda_graph(size, size, ids[:0], lengths[:0])
        batch = ForwardBatch(ForwardMode.DECODE, size, ids, lengths, self.loc[:size])
        return lambda: self.mla.forward_decode(self.q[:size], self.k[:size], self.k[:size], self.layer, batch)

    def begin(self, requests: tuple[int, ...]) -> ForwardBatch:
        """Give each request a token, with queries and a key."""
        for request in requests:
            self.lengths[request] += 1
        lengths = [self.lengths[request] for request in requests]
        loc = self.slots[list(requests), [n - 1 for n in lengths]]
        count = len(requests)
        self.q[:count], self.k[:count] = self.normals(*self.q[:count].shape), self.normals(*self.k[:count].shape)
        self.loc.fill_(-1)
        self.loc[:count] = loc
        ids, sizes = (torch.tensor(x, device=self.where) for x in (requests, lengths))
        return ForwardBatch(ForwardMode.DECODE, count, ids, sizes, loc, lengths)

    def step(self, requests: tuple[int, ...], fault: str) -> Replay:
        """Run a step as a graph, then eagerly."""
        batch, count = self.begin(requests), len(requests)
        size = self.graphs.size_of(count)
        graph = self.graphs.graph(size)
        if fault != "StaleTable":
            self.mla.init_forward_metadata_replay_cuda_graph(size, batch.req_pool_indices, batch.seq_lens)
        graph.replay()
        replayed = graph.out[:count].clone()
        self.eager.init_forward_metadata(batch)
        given = self.q[:count], self.k[:count], self.k[:count], self.layer, batch, fault != "KeysNotStored"
        if fault == "KeysNotStored":
            self.pool.rows[0][batch.out_cache_loc.long()] = float("nan")
        found = self.eager.forward_decode(*given)
        want = torch.cat([self.want(i, request) for i, request in enumerate(requests)])
        error = (found.double().cpu() - want).square().mean().sqrt() / want.square().mean().sqrt()
        differing = int((replayed.view(torch.int16) != found.view(torch.int16)).sum())
        return Replay(requests, tuple(self.lengths[r] for r in requests), size, differing, float(error))

    def want(self, row: int, request: int) -> Tensor:
        """Attend in fp64 to the slots of a request, without a page table."""
        rows = self.pool.get_key_buffer(0)[self.slots[request, : self.lengths[request]].long()].double().cpu()
        q = self.q[row : row + 1].to(self.config.dtype).double().cpu()
        given = q[..., :512], q[..., 512:], rows[None], torch.tensor([len(rows)]).int(), torch.zeros(1, 1).int()
        return oracle.mla_decode(*given, SM_SCALE).out.double().flatten(1)


def serve(backend: str, heads: int, page: int, seed: int, fault: str = "none") -> Served:
    """Serve `STEPS`; ``fault``: "StaleTable" (a replay without refreshed buffers), "KeysNotStored", or "none"."""
    with backends.emulating(ARCH):
        server = Server(backend, heads, page, seed)
        steps = [server.step(requests, fault) for requests in STEPS]
    return Served(steps, server.eager.metadata_pool.allocations, server.graphs.report(), backend != "native")
