"""The MLA back end: eager steps, captured steps by a fake capture, both forms of q, the pool, routing, settings."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.errors import ArgumentError, BackendUnavailable, ConfigError
from dsv4lib.layers.mla import CudaGraphPool, ForwardBatch, ForwardMode, MLABackend, MLAConfig, MLAPool
from dsv4lib.layers.mla.batch import ROUTES, Route, route
from dsv4lib.layers.mla.flags import ServerSettings, parse
from dsv4lib.layers.mla.metadata import MetadataPool, width_of
from dsv4lib.ops.common.graph_capture import Captured
from dsv4lib.ops.mla_decode.splits import num_kv_splits_by_clusters, workspace_bytes
from dsv4lib.ops.mla_page_table.op import MisalignedPage
from tests.cases import cases
from tests.layers.mla.machine import CONTEXT, Server, close

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def run(server, batch, layer=0, *, split=True, dtype=torch.float32, save=True, forward=None):
    """A step's output and what it should be; keys of the step's tokens are random."""
    rows, heads = batch.batch_size, server.config.num_heads
    q, latent, rope = server.normal(rows, heads, 576).to(dtype), server.normal(rows, 1, 512), server.normal(rows, 1, 64)
    one = server.config.layer(layer)
    forward = forward or server.mla.forward_decode
    if split:
        given = q[..., :512].reshape(rows, -1), latent, latent, one, batch, save
        found = forward(*given, q_rope=q[..., 512:].reshape(rows, -1), k_rope=rope)
    else:
        found = forward(q.flatten(1), torch.cat((latent, rope), -1), latent, one, batch, save)
    pairs = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    return found, server.want(q, layer, list(pairs))


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("split", [True, False])
def test_eager_steps(split, page):
    """Requests of mixed lengths come and go; fp32 queries are cast; layers have caches of their own."""
    server = Server([100, 600, 1, 257], page=page)
    for requests in ([0, 1, 2, 3], [3, 0], [2, 1, 3]):
        batch = server.step(requests)
        server.mla.init_forward_metadata(batch)
        for layer in (0, 1):
            found, want = run(server, batch, layer, split=split)
            assert found.shape == (len(requests), 5 * 512) and found.dtype == BF16 and close(found, want)
    table = server.mla.forward_metadata.block_kv_indices
    assert table.shape[1] % server.config.pack == 0 and int(table[0, 1]) == -1


def test_both_forms_of_queries_are_the_same():
    found = []
    for split in (True, False):
        server = Server([70, 33])
        batch = server.step([1, 0])
        server.mla.init_forward_metadata(batch)
        found.append(run(server, batch, split=split)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize(("dtype", "kv"), [(FP16, None), (BF16, E4M3), (E4M3, None)], ids=str)
def test_types(dtype, kv):
    scales = {"kv_scale": 0.02} if E4M3 in (dtype, kv) else {}
    scales |= {"q_scale": 0.03} if dtype == E4M3 else {}
    server = Server([70, 33], dtype=dtype, kv_dtype=kv, **scales)
    batch = server.step([1, 0])
    server.mla.init_forward_metadata(batch)
    found, want = run(server, batch)
    assert close(found, want) and found.dtype == (FP16 if dtype == FP16 else BF16)


def test_keys_are_stored_unless_told_otherwise():
    server = Server([70, 33])
    before = [rows.clone() for rows in server.pool.rows]
    batch = server.step([0])
    server.mla.init_forward_metadata(batch)
    slot = int(server.slots[0, 70])
    assert bool(before[0][slot].isnan().all())
    found, _ = run(server, batch, save=False)
    same = [
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, server.pool.rows, strict=True)
    ]
    assert same == [True, True] and bool(found.isnan().any())  # the token's own key is not there
    found, want = run(server, batch)
    changed = (before[0].view(torch.int16) != server.pool.rows[0].view(torch.int16)).any(1)
    assert changed.nonzero().flatten().tolist() == [slot] and close(found, want)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE])
def test_no_requests_no_launch(mode, monkeypatch):
    server = Server([70])
    for name in ("mla_decode", "mla_page_table"):
        monkeypatch.setattr(f"dsv4lib.layers.mla.backend.{name}", lambda *a, **k: pytest.fail("a launch"))
    batch = server.step([], mode)
    server.mla.init_forward_metadata(batch)
    found = server.mla.forward(torch.zeros(0, 5 * 576), None, None, server.config.layer(0), batch)
    assert found.shape == (0, 5 * 512) and found.dtype == BF16


def test_padded_requests():
    """A request of no length, or none: zeros; its key, of NaN, is stored nowhere."""
    server = Server([70, 33])
    batch = server.step([0, 1])
    batch = ForwardBatch(
        ForwardMode.DECODE,
        3,
        torch.tensor([0, -1, 1]),
        torch.tensor([71, 0, 34]),
        torch.tensor([batch.out_cache_loc[0], -1, batch.out_cache_loc[1]]),
    )
    server.mla.init_forward_metadata(batch)
    q, k = server.normal(3, 5, 576), server.normal(3, 576)
    q[1], k[1] = float("nan"), float("nan")
    before = server.pool.get_key_buffer(0).clone()
    found = server.mla.forward_decode(q, k, k, server.config.layer(0), batch)
    assert close(found[[0, 2]], server.want(q[[0, 2]], 0, [(0, 71), (1, 34)])) and not found[1].any()
    changed = (before.view(torch.int16) != server.pool.get_key_buffer(0).view(torch.int16)).any(1)
    assert sorted(changed.nonzero().flatten().tolist()) == sorted(batch.out_cache_loc[[0, 2]].tolist())


# ------------------------------------------------------------------- metadata


def test_metadata_is_allocated_once_a_bucket():
    config = MLAConfig(page_size=16, max_context_len=5000)
    pool = MetadataPool(config, torch.device("cpu"))
    assert pool.buckets == (1024, 4096, 5000)
    first = pool.take(3, 900)
    first.block_kv_indices.fill_(7)
    again = pool.take(4, 1024)
    assert pool.allocations == 1 and again.block_kv_indices.data_ptr() == first.block_kv_indices.data_ptr()
    assert bool((again.block_kv_indices == -1).all()) and again.block_kv_indices.shape == (4, 64)
    widths = [pool.take(*given).block_kv_indices.shape[1] for given in ((3, 1025), (5, 10), (1, 4097))]
    assert widths == [256, 64, width_of(config, 5000)] and pool.allocations == 4 and pool.nbytes > 0
    with pytest.raises(ArgumentError, match="max_context_len=5000"):
        pool.take(1, 5001)


@pytest.mark.parametrize("heads", [5, 100])
@pytest.mark.parametrize("splits", [-1, 1, 3])
def test_the_workspace_holds_the_splits_of_every_batch(heads, splits):
    """Of the buckets and of captured steps, whatever part of their rows a step has."""
    config = MLAConfig(heads, num_kv_splits=splits)
    server = MLABackend(config, MLAPool(config, 2), torch.full((1, 8), -1).int(), "reference")
    server.init_cuda_graph_state(9)
    taken = [server.metadata_pool.take(batch, tokens) for batch in (1, 3, 5, 8) for tokens in (900, 5000, 131072)]
    for metadata in (*taken, *(server.graph_metadata.rows(batch) for batch in range(1, 10))):
        capacity = metadata.block_kv_indices.shape[1] * config.page_size
        needed = workspace_bytes(
            metadata.batch, num_kv_splits_by_clusters(capacity, metadata.batch, 148, splits, heads), heads
        )
        assert (metadata.workspace is None and needed == 0) or metadata.workspace.numel() >= needed


def test_a_serving_run_allocates_a_few_times():
    server = Server([100, 400, 30], spare=60)
    for _ in range(50):
        batch = server.step([0, 1, 2])
        server.mla.init_forward_metadata(batch)
    assert server.mla.metadata_pool.allocations == 1


def test_metadata_in_the_emulator():
    """The index kernel writes the tables of eager and captured steps, from ids and lengths of 64 bits."""
    server = Server([100, 400, 30], page=16)
    other = MLABackend(server.config, server.pool, server.slots, "emulator", check=True)
    batch = server.step([2, 0])
    for one in (server.mla, other):
        one.init_forward_metadata(batch)
    found, want = other.forward_metadata, server.mla.forward_metadata
    assert torch.equal(found.block_kv_indices, want.block_kv_indices) and found.seq_lens.tolist() == [31, 101]
    for one in (server.mla, other):
        one.init_cuda_graph_state(4)
        one.init_forward_metadata_replay_cuda_graph(4, batch.req_pool_indices, batch.seq_lens)
    found, want = other.graph_metadata, server.mla.graph_metadata
    assert torch.equal(found.block_kv_indices, want.block_kv_indices) and found.seq_lens.tolist() == [31, 101, 1, 1]


@pytest.mark.parametrize(("arch", "kv"), cases(("sm_90a", None), full=[("sm_100a", E4M3)]), ids=str)
def test_a_step_in_the_emulator(arch, kv):
    """A decode step on a kernel, and what is traced of it."""
    server = Server([40, 70], backend="emulator", layers=1, kv_dtype=kv, kv_scale=0.02 if kv else 1.0)
    with backends.emulating(arch):
        batch = server.step([1, 0])
        server.mla.init_forward_metadata(batch)
        found, want = run(server, batch)
        assert "splits" in server.mla.describe(server.mla.forward_metadata, server.config.layer(0))
    assert close(found, want)


def test_misaligned_requests_are_named_in_debug_mode():
    server = Server([100, 40], check=True)
    server.slots[1, :40] = torch.arange(14, 54)
    with pytest.raises(MisalignedPage) as caught:
        server.mla.init_forward_metadata(server.step([0, 1]))
    assert (caught.value.request, caught.value.token, caught.value.slot) == (1, 0, 14)


# ------------------------------------------------------------------- captured steps


class FakeCapture:
    """Captures as a graph does: a replay runs the same launches on the same memory, and knows no new tensors."""

    def __init__(self, server):
        self.server, self.seen = server, []

    def addresses(self):
        graph = self.server.mla.graph_metadata
        return graph.block_kv_indices.data_ptr(), graph.seq_lens.data_ptr(), self.server.pool.rows[0].data_ptr()

    def __call__(self, run):
        metadata, addresses, out = self.server.mla.forward_metadata, self.addresses(), run()
        self.seen.append(len(out))

        def replay():
            assert self.addresses() == addresses, "a graph reads the addresses that it was captured with"
            kept, self.server.mla.forward_metadata = self.server.mla.forward_metadata, metadata
            out.copy_(run())
            self.server.mla.forward_metadata = kept

        return Captured(replay, out)


class Captures:
    """A server whose steps are captured: static queries, keys and slots, both layers in one graph."""

    def __init__(self, server, max_bs=4, sizes=(1, 2, 4)):
        self.server, heads = server, server.config.num_heads
        server.mla.init_cuda_graph_state(max_bs, max_bs)
        self.q, self.k = torch.zeros(max_bs, heads, 576), torch.zeros(max_bs, 576)
        self.loc = torch.full((max_bs,), -1)
        self.fake = FakeCapture(server)
        self.pool = CudaGraphPool(self.make, sizes, self.fake, held=lambda: 1000 * len(self.fake.seen))

    def make(self, size):
        mla, fill = self.server.mla, self.server.mla.get_cuda_graph_seq_len_fill_value()
        ids, lengths = torch.zeros(size, dtype=torch.int64), torch.full((size,), fill)
        mla.init_forward_metadata_capture_cuda_graph(size, size, ids, lengths)
        batch = ForwardBatch(ForwardMode.DECODE, size, ids, lengths, self.loc[:size])

        def run():
            q, k = self.q[:size], self.k[:size]
            layers = [self.server.config.layer(i) for i in (0, 1)]
            return torch.stack([mla.forward_decode(q, k, k, layer, batch) for layer in layers], 1)

        return run

    def step(self, batch):
        """Refresh, replay; None where no graph fits."""
        count = batch.batch_size
        if (size := self.pool.size_of(count)) is None:
            return None
        graph = self.pool.graph(size)
        self.q[:count], self.k[:count] = self.server.normal(count, 5, 576), self.server.normal(count, 576)
        self.loc.fill_(-1)
        self.loc[:count] = batch.out_cache_loc
        self.server.mla.init_forward_metadata_replay_cuda_graph(
            size, batch.req_pool_indices, batch.seq_lens, int(batch.seq_lens.sum())
        )
        graph.replay()
        return graph.out[:count].clone()


@pytest.mark.parametrize("page", [16, 128])
def test_a_replay_is_the_eager_step(page):
    """Captured once a size, replayed with other requests, lengths and batch sizes, bit by bit as eagerly."""
    server = Server([100, 600, 1, 257, 30], page=page)
    captured = Captures(server)
    for requests in ([0, 1, 2], [4], [3, 2, 1, 0], [1, 4], [2]):
        batch = server.step(requests)
        replayed = captured.step(batch)
        count = len(requests)
        eager = MLABackend(server.config, server.pool, server.slots, "reference")
        eager.init_forward_metadata(batch)
        given = captured.q[:count], captured.k[:count], captured.k[:count]
        outs = [eager.forward_decode(*given, server.config.layer(i), batch) for i in (0, 1)]
        assert torch.equal(replayed, torch.stack(outs, 1))
        rows = [(r, server.lengths[r]) for r in requests]
        assert close(replayed[:, 1], server.want(captured.q[:count], 1, rows))
    assert sorted(captured.fake.seen) == [1, 2, 4]


def test_buffers_of_captured_steps():
    """Filled with 1, cut to the step's rows, padded rows refreshed to one token of page 1."""
    server = Server([100, 600, 1], page=16)
    server.mla.init_cuda_graph_state(4, 4)
    graph = server.mla.graph_metadata
    width = width_of(server.config, CONTEXT)
    assert graph.block_kv_indices.shape == (4, width) and bool((graph.block_kv_indices == 1).all())
    assert bool((graph.seq_lens == 1).all()) and server.mla.get_cuda_graph_seq_len_fill_value() == 1
    replay = server.mla.init_forward_metadata_replay_cuda_graph
    replay(3, torch.tensor([1, 0, 2]), torch.tensor([600, 100, 1]))
    cut = server.mla.forward_metadata
    assert cut.block_kv_indices.shape == (3, width) and cut.seq_lens.tolist() == [600, 100, 1]
    assert cut.block_kv_indices.data_ptr() == graph.block_kv_indices.data_ptr()
    assert graph.block_kv_indices[0, :38].tolist() == (server.slots[1, :600:16] // 16).tolist()
    assert bool((graph.block_kv_indices[0, 38:] == 1).all()) and bool((graph.block_kv_indices[3] == 1).all())
    replay(3, torch.tensor([0]), torch.tensor([100]))
    assert graph.seq_lens.tolist() == [100, 1, 1, 1] and graph.block_kv_indices[:, 0].tolist()[1:] == [1, 1, 1]
    for given in ((5, [0], [9]), (1, [0, 1], [9, 9]), (2, [0, 1], [9])):
        with pytest.raises(ArgumentError, match="bs"):
            replay(given[0], torch.tensor(given[1]), torch.tensor(given[2]))


def test_a_table_of_the_callers_is_used():
    server = Server([100, 600, 1], page=16)
    table = torch.zeros(6, 48).int()
    server.mla.init_cuda_graph_state(4, 4, table)
    assert server.mla.graph_metadata.block_kv_indices.data_ptr() == table.data_ptr() and bool((table[:4] == 1).all())
    for wrong in (torch.zeros(3, 48).int(), torch.zeros(6, 40).int(), torch.zeros(6, 50).int(), torch.zeros(6, 48)):
        with pytest.raises(ArgumentError, match="block_kv_indices"):
            server.mla.init_cuda_graph_state(4, 4, wrong)
    with pytest.raises(ArgumentError, match="max_bs"):
        server.mla.init_cuda_graph_state(4, 3)
    one = MLABackend(server.config, MLAPool(server.config, 1), server.slots)
    with pytest.raises(ArgumentError, match="at least 2 pages"):
        one.init_cuda_graph_state(4)
    with pytest.raises(ArgumentError, match="init_cuda_graph_state"):
        one.init_forward_metadata_replay_cuda_graph(1, torch.tensor([0]), torch.tensor([1]))


def test_graph_pool():
    """The smallest size that fits, None above the largest; memory as it was counted around each capture."""
    server = Server([100, 600, 1, 257, 30], page=16)
    captured = Captures(server, sizes=(1, 2, 4))
    assert [captured.pool.size_of(n) for n in (0, 1, 2, 3, 4, 5)] == [None, 1, 2, 4, 4, None]
    assert captured.step(server.step([0, 1, 2, 3, 4])) is None
    captured.pool.graph(2)
    report = captured.pool.report()
    assert [(one.size, one.captured, one.held_bytes) for one in report] == [
        (1, False, 0),
        (2, True, 1000),
        (4, False, 0),
    ]
    assert report[1].out_bytes == 2 * 2 * 5 * 512 * 2
    captured.pool.capture_all()
    assert captured.fake.seen == [2, 4, 1] and captured.pool.replay(3).shape == (3, 2, 5 * 512)
    assert captured.pool.replay(5) is None
    assert CudaGraphPool(captured.make).sizes == (1, 2, 4, 8, 16, 32, 64)
    for sizes in ((), (2, 1), (1, 1), (0, 1)):
        with pytest.raises(ArgumentError, match="sizes"):
            CudaGraphPool(captured.make, sizes)
    with pytest.raises(ArgumentError, match="size"):
        captured.pool.graph(3)


# ------------------------------------------------------------------- routing


class Spy:
    """A delegate that notes which of its methods are called."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *given, **options: self.asked.append(name)


class Delegate:
    """A delegate that can be captured, if its buffers were made before."""

    def __init__(self):
        self.buffers = None

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.buffers = max_bs, max_num_tokens

    def init_forward_metadata_capture_cuda_graph(self, bs, num_tokens, *given):
        assert (bs, num_tokens) <= self.buffers


def test_routes():
    ours = [mode for mode in ForwardMode if ROUTES[mode] is Route.OURS]
    assert ours == [ForwardMode.DECODE, ForwardMode.IDLE]
    assert all(route(mode, object()) is Route.OTHER for mode in ForwardMode)


def test_everything_else_goes_to_the_delegate():
    spy = Spy()
    server = Server([70, 33], delegate=spy)
    tree = server.step([0], spec_info="a tree")
    extend = server.step([0], ForwardMode.EXTEND)
    q = torch.zeros(1, 5, 576)
    for batch in (tree, extend):
        server.mla.init_forward_metadata(batch)
        server.mla.forward(q, None, None, server.config.layer(0), batch)
    given = torch.tensor([0]), torch.tensor([70])
    server.mla.init_forward_metadata_capture_cuda_graph(1, 1, *given, None, ForwardMode.TARGET_VERIFY)
    server.mla.init_forward_metadata_replay_cuda_graph(1, *given, 70, None, ForwardMode.DECODE, "a tree")
    names = ["init_forward_metadata", "forward_extend"]
    graphs = [f"init_forward_metadata_{name}_cuda_graph" for name in ("capture", "replay")]
    assert spy.asked == [*names, *names, *graphs] and server.mla.forward_metadata is None


@pytest.mark.parametrize(("tokens", "wanted"), [(None, (4, 4)), (12, (4, 12))])
def test_a_delegate_makes_its_buffers_too(tokens, wanted):
    """Before a capture of steps that it serves; our own buffers are there as well, and refused calls make none."""
    delegate = Delegate()
    server = Server([70, 33], delegate=delegate)
    with pytest.raises(ArgumentError, match="max_bs"):
        server.mla.init_cuda_graph_state(4, 3)
    assert delegate.buffers is None
    server.mla.init_cuda_graph_state(4, tokens)
    assert delegate.buffers == wanted and server.mla.graph_metadata.batch == 4
    given = torch.tensor([0]), torch.tensor([70])
    server.mla.init_forward_metadata_capture_cuda_graph(1, 3, *given, None, ForwardMode.TARGET_VERIFY)
    alone = Server([70, 33])
    alone.mla.init_cuda_graph_state(4)
    assert not hasattr(alone.mla.delegate, "init_cuda_graph_state") and alone.mla.graph_metadata.batch == 4


def test_rows_of_decode_are_not_captured():
    server, given = Server([70, 33]), (torch.tensor([0]), torch.tensor([70]))
    with pytest.raises(BackendUnavailable, match="not captured"):
        server.mla.init_forward_metadata_capture_cuda_graph(1, 1, *given, None, ForwardMode.TARGET_VERIFY)
    with pytest.raises(BackendUnavailable, match="not captured"):
        server.mla.init_forward_metadata_replay_cuda_graph(1, *given, 70, None, ForwardMode.DECODE, "a tree")


def test_prefill_as_rows_of_decode():
    """Two requests, one with a prefix: each new token sees what is before it and itself."""
    server = Server([50, 1])
    counts, prefixes, heads = [3, 6], [50, 0], 5
    server.lengths = [53, 6]
    ids, lengths = torch.tensor([0, 1]), torch.tensor([53, 6])
    loc = torch.cat([server.slots[r, p : p + c] for r, p, c in zip((0, 1), prefixes, counts, strict=True)])
    batch = ForwardBatch(ForwardMode.EXTEND, 2, ids, lengths, loc, extend_prefix_lens=prefixes, extend_seq_lens=counts)
    server.mla.init_forward_metadata(batch)
    q, k = server.normal(9, heads, 576), server.normal(9, 576)
    found = server.mla.forward(q, k, k, server.config.layer(1), batch)
    rows = [(0, 51), (0, 52), (0, 53), *((1, n) for n in range(1, 7))]
    assert close(found, server.want(q, 1, rows))
    tree = server.step([0], ForwardMode.TARGET_VERIFY, spec_info="a tree")
    with pytest.raises(BackendUnavailable, match="no tree of drafts"):
        server.mla.init_forward_metadata(tree)
    with pytest.raises(ArgumentError, match="extend_seq_lens"):
        server.mla.init_forward_metadata(server.step([0], ForwardMode.EXTEND))


# ------------------------------------------------------------------- pool, settings, errors


def test_pool():
    config = MLAConfig(page_size=16)
    pool = MLAPool(config, 3, 2)
    layer, loc = config.layer(1), torch.tensor([5, -1, 47])
    latent, rope = torch.randn(3, 1, 512), torch.randn(3, 64)
    pool.set_mla_kv_buffer(layer, loc, latent, rope)
    key, value = pool.get_kv_buffer(1)
    assert key.shape == (48, 576) and value.shape == (48, 512) and value.data_ptr() == key.data_ptr()
    assert torch.equal(key[5], torch.cat((latent[0, 0], rope[0])).bfloat16()) and torch.equal(
        key[47, 512:], rope[2].bfloat16()
    )
    assert int(key.any(1).sum()) == 2 and not pool.get_key_buffer(0).any()
    assert pool.cache(1).shape == (3, 16, 576) and pool.cache(1).data_ptr() == key.data_ptr()
    assert pool.cache(1).stride() == (16 * 576, 576, 1) and pool.bytes == 2 * 49 * 1152 and "2 layers" in repr(pool)
    other = MLAPool(config, 3, 1)
    other.set_kv_buffer(config.layer(0), torch.tensor([-7, -1, -(2**31)]), torch.full((3, 576), 5.0))
    assert not other.get_key_buffer(0).any()
    with pytest.raises(ArgumentError, match="one row a token, not one a head"):
        pool.set_mla_kv_buffer(layer, loc, torch.randn(3 * 5, 512), torch.randn(3 * 5, 64))
    with pytest.raises(ArgumentError, match=r"loc=\[48\]"):
        pool.set_kv_buffer(layer, torch.tensor([48]), torch.randn(1, 576))
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(ArgumentError, match="at least 1 of each"):
            MLAPool(config, *wrong)


def test_config():
    config = MLAConfig()
    assert config.sm_scale == pytest.approx(192**-0.5) and config.kv_cache_dim == 576 and config.token_bytes == 1152
    assert MLAConfig(kv_dtype=E4M3).token_bytes == 576 and MLAConfig(page_size=32).pack == 4
    assert MLAConfig.of_rank(128, 8).num_heads == 16 and config.layer(3).scaling == config.sm_scale
    for name, value in (
        ("kv_lora_rank", 448),
        ("qk_nope_head_dim", 64),
        ("qk_rope_head_dim", 32),
        ("v_head_dim", 128),
        ("v_head_dim", 256),
        ("num_heads", 129),
        ("page_size", 100),
        ("dtype", torch.float32),
        ("kv_dtype", FP16),
        ("kv_scale", 2.0),
        ("max_context_len", 0),
        ("num_kv_splits", 257),
    ):
        with pytest.raises(ArgumentError, match=name):
            MLAConfig(**{name: value})
    with pytest.raises(ConfigError, match="tp_size"):
        MLAConfig.of_rank(128, 3)


def test_flags():
    words = ServerSettings(tp_size=8, cuda_graph_max_bs=32).arguments()
    assert " ".join(words).startswith("--attention-backend cutlass_mla --page-size 128 --tensor-parallel-size 8")
    assert parse(["--model-path", "x", *words]) == ServerSettings(tp_size=8, cuda_graph_max_bs=32)
    assert parse(["--page-size=128"]).chunked_prefill_size == 4096
    assert ServerSettings(tp_size=4).config().num_heads == 32
    for arguments, said in (
        (["--enable-cutlass-mla"], "no such flag; --attention-backend cutlass_mla"),
        (["--cutlass-num-kv-splits", "4"], "passes num_kv_splits=1"),
        (["--page-size"], "a value after it"),
        (["--page-size", "many"], "a number"),
        (["--page-size", "64"], "128 with cutlass_mla"),
        (["--attention-backend", "fa3"], "cutlass_mla"),
    ):
        with pytest.raises(ArgumentError, match=said):
            parse(arguments)


def test_the_scale_is_the_layers():
    server, found = Server([70, 33]), []
    batch = server.step([1, 0])
    q, k = server.normal(2, 5, 576), server.normal(2, 576)
    for scale in (1 / 192**0.5, 0.3):
        server.mla.init_forward_metadata(batch)
        layer = server.config.layer(0)._replace(scaling=scale)
        found.append(server.mla.forward_decode(q, k, k, layer, batch))
    assert close(found[0], server.want(q, 0, [(1, 34), (0, 71)]))
    assert not close(found[1], server.want(q, 0, [(1, 34), (0, 71)]))
    q_scaled = q.bfloat16().float() * (0.3 * 192**0.5)
    server.config.__dict__["dtype"] = torch.float32  # queries as they are
    assert close(found[1], server.want(q_scaled, 0, [(1, 34), (0, 71)]))


def test_errors_of_a_step_are_named(capfd, monkeypatch):
    server = Server([70, 33])
    batch = server.step([1, 0])
    q, layer = server.normal(2, 5, 576), server.config.layer(0)
    with pytest.raises(ArgumentError, match="init_forward_metadata"):
        server.mla.forward_decode(q, None, None, layer, batch)
    server.mla.init_forward_metadata(batch)
    with pytest.raises(ArgumentError, match="2 rows, as the step's metadata has"):
        server.mla.forward_decode(q[:1], None, None, layer, batch)
    monkeypatch.setenv("DSV4_TRACE", "1")
    server.mla.forward_decode(q, None, None, layer, batch, False)
    traced = capfd.readouterr().err
    assert "mla_decode layer 0: B 2 H 5 tokens <= " in traced and "time" not in traced  # of a CPU
    with pytest.raises(ConfigError, match="pool"):
        MLABackend(MLAConfig(), server.pool, server.slots)
    with pytest.raises(ArgumentError, match="seq_lens.shape"):
        ForwardBatch(ForwardMode.DECODE, 2, torch.zeros(2), torch.zeros(3), torch.zeros(2))
    with pytest.raises(ArgumentError, match="extend_prefix_lens"):
        ForwardBatch(ForwardMode.EXTEND, 1, *[torch.zeros(1)] * 3, extend_prefix_lens=[1])


@pytest.mark.skipif(backends.status("native", "sm_90a").available, reason="a GPU is here")
def test_memory_without_a_gpu_is_zero():
    from dsv4lib.layers.mla.graphs import held_bytes

    assert held_bytes() == 0
