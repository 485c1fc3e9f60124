"""The cache: ring slots, what grows and what does not, bytes, forks."""

import pytest
import torch

from dsv4lib.config import TINY, LayerKind, fixed_cache_bytes
from dsv4lib.reference import cache as cache_module
from dsv4lib.reference import compressor, lm_head
from dsv4lib.reference.model import ReferenceModel


@pytest.fixture(scope="module")
def model():
    return ReferenceModel(TINY).randomize_(1).requires_grad_(False)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, TINY.vocab, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunks", [[1] * 13, [5, 8], [13], [12, 1], [3, 1, 9]], ids=str)
def test_ring_holds_the_last_window(chunks):
    """Rows are their own positions, so a wrong slot or a wrong neighbour shows as a number."""
    rows = torch.arange(13.0).reshape(1, 13, 1).expand(2, 13, 3)
    ring, start = torch.full((2, 5, 3), -1.0), 0
    for size in chunks:
        keys, positions, ring = cache_module.append_window(ring, rows[:, start : start + size], start)
        assert keys[0, :, 0].tolist() == positions.tolist() == list(range(max(0, start - 4), start + size))
        start += size
        for position in range(max(0, start - 5), start):
            assert ring[1, position % 5].tolist() == [position] * 3
    assert ring[0, :, 0].tolist() == [10, 11, 12, 8, 9]


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 40])
def test_only_entries_grow(model, tokens, length):
    cache = model.new_cache(2)
    model(tokens[:, :length], cache)
    for kind, layer in zip(TINY.layer_kinds, cache.layers, strict=True):
        assert layer.window.shape == (2, 8, 32)
        if kind == LayerKind.SWA:
            assert layer.entries is layer.state is layer.index_keys is layer.index_state is None
        else:
            rate = TINY.rate(kind)
            assert layer.entries.shape == (2, length // rate, 32)
            assert layer.state.k.shape == ((2, 8, 64) if kind == LayerKind.CSA else (2, 8, 32))
        if kind == LayerKind.CSA:
            assert layer.index_keys.shape == (2, length // 4, 16)
            assert layer.index_state.z.shape == (2, 8, 32)
    assert cache.mtp.window.shape == (2, 8, 32) and cache.mtp.entries is None


def test_memory_report_is_the_sum_of_its_parts(model, tokens):
    cache, before = model.new_cache(2), 0
    for length in (0, 40):
        if length:
            model(tokens[:, :length], cache)
        report = cache.memory_report()
        assert list(report) == [f"layers.{i}" for i in range(6)] + ["mtp.0"]
        total = {part: sum(parts[part] for parts in report.values()) for part in report["mtp.0"]}
        # fp32 state is what the closed formula counts; the window here is fp32 rows of 32 dims, 7 layers of 8.
        assert total["state"] + total["index_state"] == 2 * fixed_cache_bytes(TINY)["state"]
        assert total["window"] == 2 * 7 * 8 * 32 * 4
        assert total["entries"] == 2 * 4 * 32 * (2 * (length // 4) + 2 * (length // 8))
        assert total["index_keys"] == 2 * 4 * 16 * 2 * (length // 4)
        assert cache.total_bytes() == sum(total.values()) > before
        before = cache.total_bytes()


def test_double_precision_takes_twice_the_bytes(model):
    wide = ReferenceModel(TINY, torch.float64).new_cache(3)
    assert wide.total_bytes() == 2 * model.new_cache(3).total_bytes()
    assert wide.dtype == torch.float64


@pytest.mark.parametrize("prefix", [6, 16, 19])
def test_a_fork_continues_on_its_own(model, tokens, prefix):
    """A shared prefix, a step that is thrown away, then the real one: as if the step had never been."""
    cache = model.new_cache(2)
    model(tokens[:, :prefix], cache, {}, mtp=tokens[:, 1 : prefix + 1])
    kept = cache.fork()
    model(tokens[:, :5], cache, {}, mtp=tokens[:, 1:6])  # a rejected draft
    assert (kept.position, kept.mtp_position) == (prefix, prefix)
    got, want = {}, {}
    logits = model(tokens[:, prefix:39], kept, got, mtp=tokens[:, prefix + 1 :])
    whole = model(tokens[:, :39], capture=want, mtp=tokens[:, 1:])
    assert (logits - whole[:, prefix:]).abs().max() <= 3e-5
    assert (got["mtp_logits"] - want["mtp_logits"][:, prefix:]).abs().max() <= 3e-5


@pytest.mark.parametrize("broken", ["compressor", "lm_head"])
def test_an_interrupted_forward_leaves_the_cache_as_it_was(model, tokens, monkeypatch, broken):
    whole, cache = model(tokens), model.new_cache(2)
    model(tokens[:, :9], cache)

    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        where = {"compressor": (compressor, "finish"), "lm_head": (lm_head, "lm_head")}[broken]
        patch.setattr(*where, stop)
        with pytest.raises(KeyboardInterrupt):
            model(tokens[:, 9:20], cache)
    assert cache.position == 9
    assert (model(tokens[:, 9:], cache) - whole[:, 9:]).abs().max() <= 3e-5
