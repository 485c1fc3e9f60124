"""Models on several ranks: the bits of one where nothing is added up across ranks, else bounds; tokens everywhere."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from dsv4lib.formats import fp8_block
from dsv4lib.layers.communicator import Communicator, Groups
from dsv4lib.layers.dense import Dense
from dsv4lib.loader import experts, names
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.convert import convert
from dsv4lib.loader.experts import largest_input_scale
from dsv4lib.loader.model import model_bytes, transformer
from dsv4lib.loader.moe import moe_layer
from dsv4lib.loader.safetensors import Cut
from dsv4lib.loader.whole import Listed
from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.pages.full_model import run_case
from dsv4lib.parallel import serving
from dsv4lib.parallel.plan import Plan, PlanError
from dsv4lib.parallel.serving import RankScheduler, RanksDiffer, Request, divided, serve
from tests.cases import cases
from tests.parallel.ranks import GROUPED, alone, bits, grouped, returned, run

GREEDY = SamplingParams(temperature=0.0)


def ids(count, seed, vocab=GROUPED.vocab):
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    return grouped(tmp_path_factory.mktemp("grouped") / "mxfp4")


def logits(listed, ranks, tokens):
    """Of all tokens of a prefill and of a decode step beside padding."""
    model = divided(listed, ranks, backend="reference", places=2, capacity=256)
    first = model([tokens], [0], [0], all_logits=True, rows=len(tokens) + 3)[: len(tokens)]
    return torch.cat((first, model([[5], []], [0, -1], [len(tokens), 0], rows=3)[:1]))


def test_experts_on_other_ranks_change_no_bit(listed, tmp_path):
    """Requests differ between the ranks, which have the same number of steps: 139 tokens beside 3."""
    texts = [ids(139, 1), ids(3, 2)]
    found = returned(run(Plan.of(GROUPED, data=2), lambda r: bits(logits(listed, r, texts[r.rank])), tmp_path))
    for text, one in zip(texts, found, strict=True):
        assert one == bits(logits(listed, alone(GROUPED), text))


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_calibrated_scales_are_those_of_all_experts(listed, tmp_path, form):
    """NVFP4: tokens are quantised by the largest scale of all experts, which a rank may not have."""
    if form == "nvfp4":
        convert(listed.checkpoint.folder, tmp_path / form, form)
        listed = Listed.of(Checkpoint(tmp_path / form))
        scale = largest_input_scale(listed.checkpoint, "layers.1", GROUPED.n_experts)
        entry = next(n for n in listed.checkpoint if ".experts.4.w1.input_scale" in n and n.startswith("layers.1."))
        with open(listed.checkpoint.entry(entry).file, "r+b") as file:  # w1 and w3 have the same
            for name in (entry, entry.replace(".w1.", ".w3.")):
                file.seek(listed.checkpoint.entry(name).offset)
                file.write((5.3 * scale).numpy().tobytes())
    x = torch.randn(9, GROUPED.hidden, generator=torch.Generator().manual_seed(4)).bfloat16()

    def work(ranks):
        share = ranks.plan.share(ranks.rank)
        given = {"share": share, "groups": ranks.groups, "backend": "reference"}
        layer = moe_layer(listed.checkpoint, "layers.1", GROUPED, **given)
        return bits(layer(x[: 9 - ranks.rank]))

    found = returned(run(Plan.of(GROUPED, data=2), work, tmp_path))
    want = moe_layer(listed.checkpoint, "layers.1", GROUPED, backend="reference")
    assert found == [bits(want(x)), bits(want(x[:8]))]


@pytest.mark.parametrize("tensor", cases(4, full=[2]))
def test_heads_and_columns_on_other_ranks_stay_within_rounding(listed, tmp_path, tensor):
    """Every rank has the same bits; they are off one rank's by the order of sums alone, far less than FP8 rounds."""
    text = ids(70, 3)
    found = returned(run(Plan.of(GROUPED, tensor=tensor), lambda r: bits(logits(listed, r, text)), tmp_path))
    assert all(one == found[0] for one in found[1:])
    want = logits(listed, alone(GROUPED), text)
    ours = torch.tensor(found[0], dtype=torch.int32).view(torch.float32).view_as(want)
    error = (ours - want).square().mean(-1).sqrt()
    assert 0.3 < float(want.std()) and float(error.median()) < 0.02  # rounding to bf16 is 0.015, FP8 0.12
    assert float((ours.argmax(-1) == want.argmax(-1)).float().mean()) > 0.9


def pieces(ranks, listed):
    """Bits of embedding, logits of given numbers, and what this rank's groups of heads give in the first layer."""
    model, seen = divided(listed, ranks, backend="reference", capacity=256), []
    right = model.layers[0].attn.wo_a.forward
    model.layers[0].attn.wo_a.forward = lambda heads: seen.append(right(heads)) or seen[0]
    model([ids(20, 7)], [0], [0])
    tokens = torch.tensor([-1, 0, 81, 82, 163, 164, 245, 246, 327])  # ends of the parts of 328
    hidden = torch.randn(5, GROUPED.hidden, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = model.embedded(tokens, 4), model.embedded(tokens, 0), model.head(hidden)[0][:, : GROUPED.vocab]
    return [bits(x) for x in (*found, seen[0].T)]


def test_vocabulary_and_heads_on_other_ranks_change_no_bit(listed, tmp_path):
    *want, u = pieces(alone(GROUPED), listed)
    found = returned(run(Plan.of(GROUPED, tensor=4), lambda r: pieces(r, listed), tmp_path))
    assert all(one[:3] == want for one in found)
    assert sum((one[3] for one in found), []) == u  # [heads' outputs, T]: groups one after the other


def addends(ranks, x, weight):
    """The sum of a row-parallel product, rounded once."""
    mine = ranks.world.own(x.shape[1])
    part = Dense([weight[:, mine.start : mine.stop]], out="fp32", backend="reference")
    return ranks.world.sum(part(x[:, mine.start : mine.stop].contiguous())[0]).bfloat16()


@pytest.mark.parametrize("kind", ["normal", "cancelling", "zeros"])
def test_a_sum_over_ranks_is_bounded_by_fp32_rounding(tmp_path, kind):
    """Within 4 roundings of fp32 of the absolute addends, and one to bf16; of one rank's bits in normal data mostly."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(37, 192, generator=generator), torch.randn(48, 192, generator=generator)
    if kind == "cancelling":  # ranks' addends are 2^17 times their sum
        x[:, 48:96], weight[:, 48:96] = 2.0**17 * x[:, :48], weight[:, :48]
        x[:, 96:144], weight[:, 96:144] = -x[:, 48:96], weight[:, 48:96]
    if kind == "zeros":
        x[:, 100:], weight[::2] = 0.0, 0.0
    x, weight = x.bfloat16(), weight.bfloat16()
    found = returned(run(Plan.of(GROUPED, tensor=4), lambda r: bits(addends(r, x, weight)), tmp_path))
    assert all(one == found[0] for one in found[1:])
    ours = torch.tensor(found[0], dtype=torch.int16).view(torch.bfloat16).view(37, 48).double()
    exact = x.double() @ weight.double().T
    bound = 4 * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
    assert bool(((ours - exact).abs() <= bound + 2.0**-8 * (exact.abs() + bound)).all())
    one = Dense([weight], backend="reference")(x)[0]
    same = float((one == ours).float().mean())
    assert same == 1.0 if kind == "zeros" else same < 1.0 if kind == "cancelling" else same > 0.99


def prompts():
    text = run_case.text(300).tolist()
    return [text[:133], text[140:149], text[150:160], [256]]


def tokens_of(ranks, listed, drafts=0, backend="reference", count=4, requests=None, **options):
    """The tokens of the requests, served two at a time in chunks of 64."""
    model = divided(listed, ranks, backend=backend, capacity=256, mtp=drafts > 0)
    caches = PagedCaches(model, requests=2, tokens=64, positions=256, drafts=drafts)
    scheduler = RankScheduler(model, caches, ranks, drafts=drafts, **options)
    requests = [Request(one, GREEDY, count + n) for n, one in enumerate(prompts())] if requests is None else requests
    return serve(scheduler, requests)


@pytest.fixture(scope="module")
def nano():
    return run_case.listed()


@pytest.fixture(scope="module")
def want(nano):
    return tokens_of(alone(nano.config), nano)


@pytest.mark.parametrize(
    "sizes",
    cases(
        {"tensor": 2, "data": 2},
        full=[
            {"tensor": 2},
            {"tensor": 4},
            {"data": 2},
            {"data": 4},
            {"tensor": 2, "experts": 1},
            {"tensor": 4, "experts": 2},
        ],
    ),
    ids=str,
)
def test_any_plan_gives_the_tokens_of_one_rank(nano, want, tmp_path, sizes):
    found = returned(run(Plan.of(nano.config, **sizes), lambda r: tokens_of(r, nano), tmp_path))
    assert [len(one) for one in want] == [4, 5, 6, 7] and all(one == want for one in found)


@pytest.mark.full
@pytest.mark.parametrize("sizes", cases({"tensor": 2}, full=[{"tensor": 2, "data": 2, "experts": 2}]), ids=str)
def test_drafts_on_several_ranks_change_no_token(nano, want, tmp_path, sizes):
    found = returned(run(Plan.of(nano.config, **sizes), lambda r: tokens_of(r, nano, drafts=2), tmp_path))
    assert all(one == want for one in found)


def test_drafts_are_refused_where_ranks_must_keep_step(nano):
    plan = Plan.of(nano.config, data=2)
    with pytest.raises(PlanError, match="drafts=1 .*0 with data=2 and experts=2"):
        serving.require_drafts(plan, 1)
    serving.require_drafts(plan, 0)
    serving.require_drafts(Plan.of(nano.config, data=2, experts=1), 1)


@pytest.mark.parametrize("sizes", cases({"tensor": 2}, full=[{"tensor": 4}, {"data": 2}]), ids=str)
def test_operands_of_a_hopper_are_divided_too(nano, tmp_path, sizes):
    """Scales as they are stored, of 128 x 128: a shared expert whose parts would cut them is whole."""
    text = run_case.text(40).tolist()

    def work(ranks):
        model = divided(nano, ranks, backend="reference", arch="sm_90a", capacity=256)
        assert ranks.plan.world == 1 or model.layers[0].ffn.shared_out == "bf16"
        modes = model.layers[0].attn.wo_a.mode, model.layers[0].attn.inputs.mode
        return [modes, bits(model([text], [0], [0], all_logits=True))]

    found = returned(run(Plan.of(nano.config, **sizes), work, tmp_path))
    modes, want = work(alone(nano.config))
    want = torch.tensor(want, dtype=torch.int32).view(torch.float32).view(len(text), -1)
    assert tuple(modes) == ("fp8_block", "fp8_block")
    for one in found:
        ours = torch.tensor(one[1], dtype=torch.int32).view(torch.float32).view(len(text), -1)
        assert one[0] == list(modes) and one == found[0]
        assert float((ours - want).square().mean(-1).sqrt().median()) < 0.01 * float(want.std())


@pytest.mark.full
def test_kernels_on_two_ranks_give_the_tokens_of_one(nano, tmp_path):
    """Through every kernel of SM100, in the emulator."""

    def work(ranks):
        return tokens_of(ranks, nano, backend="emulator", requests=[Request(prompts()[1], GREEDY, 3)])

    found = returned(run(Plan.of(nano.config, tensor=2), work, tmp_path))
    assert all(one == work(alone(nano.config)) for one in found)


def test_ranks_whose_bits_differ_are_named(nano, tmp_path):
    """A fault in the last bits of what rank 1 gathers. No token differs: the logits are those of all ranks."""

    def work(ranks):
        if ranks.rank == 1:
            right = ranks.groups.tensor.rows
            ranks.groups.tensor.rows = lambda x, total: right(x, total) * (1 + 2.0**-7)
        try:
            tokens_of(ranks, nano, requests=[Request(prompts()[1], GREEDY, 3)])
        except RanksDiffer as error:
            return [error.ranks, str(error)]

    found = returned(run(Plan.of(nano.config, tensor=2), work, tmp_path))
    assert found == [[[1], "ranks [1] have other bits than the first rank of their tensor group"]] * 2


# What a rank reads


def spoiled(listed, share, folder):
    """A copy of a checkpoint in which every byte is 255 that a share does not have."""
    shutil.copytree(listed.checkpoint.folder, folder)
    copy = Checkpoint(folder)
    own = {}
    for weight in weights_of(listed):
        for number, name in enumerate(listed.specs(weight)):
            own[name] = (share.cut(weight), number) if share.holds(weight) else None
    kept = 0
    for name in copy:
        entry = copy.entry(name)
        with open(entry.file, "r+b") as file:
            file.seek(entry.offset)
            data = bytearray(file.read(entry.nbytes))
            mask = torch.zeros(entry.shape, dtype=torch.bool)
            if own[name] is not None:
                cut, number = own[name]
                each = 128 if number else 1
                mask[region(cut, each, mask.dim())] = True
            kept += int(mask.sum()) * entry.dtype.itemsize
            wide = mask.reshape(-1).repeat_interleave(entry.dtype.itemsize)
            raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            raw[~wide] = 255
            file.seek(entry.offset)
            file.write(data)
    return Listed.of(copy), kept


def weights_of(listed):
    """All weights of a checkpoint."""
    return list(names.weights(listed.config))


def region(cut, each, dims):
    if cut is None:
        return ...
    parts = [slice(r.start // each, -(-r.stop // each)) for r in (cut.rows, cut.columns) if r is not None]
    return tuple(parts[:dims])


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("which", ["grouped", "nano"])
def test_a_rank_reads_its_part_and_no_other_byte(listed, nano, tmp_path, which, rank):
    """All others are NaN, which the loader refuses where it sees one. What it holds are the bytes that were counted."""
    source = {"grouped": listed, "nano": nano}[which]
    share = Plan.of(source.config, tensor=4).share(rank)
    bad, kept = spoiled(source, share, tmp_path / "bad")
    done = []

    def progress(read, total, _):
        done.append((read, total))

    models = [
        transformer(one, capacity=256, mtp=True, backend="reference", share=share, groups=fake(rank), progress=note)
        for one, note in ((source, None), (bad, progress))
    ]
    for (name, x), y in zip(models[0].named_buffers(), dict(models[1].named_buffers()).values(), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name
    assert done[-1][1] == kept == sum(share.stored_bytes(w, source.specs(w)) for w in weights_of(source))
    counted, held = model_bytes(source, 256, True, share=share), sum(serving.held(models[0]).values())
    assert abs(counted - held) <= 0.02 * held
    whole = transformer(source, capacity=256, backend="reference")
    assert_slices(models[0], whole, share)


def fake(rank):
    """Groups of four ranks that are not there."""
    one = Communicator()
    one.rank, one.size = rank, 4
    return Groups(one, one)


def assert_slices(part, whole, share):
    """Weights of a rank are those of the whole model, at their place."""
    vocab = share.tensor.of(share.config.vocab)
    assert torch.equal(part.embed, whole.embed[vocab.start : vocab.stop])
    rows = len(vocab)
    assert torch.equal(part.head.codes[:rows], whole.head.codes[vocab.start : vocab.stop])
    for one, all_ in zip(part.layers, whole.layers, strict=True):
        heads = share.tensor.of(share.config.n_heads)
        assert torch.equal(one.attn.sink, all_.attn.sink[heads.start : heads.stop])
        width = share.config.head_dim
        mine = slice(heads.start * width, heads.stop * width)
        assert torch.equal(one.attn.queries.codes[: len(heads) * width], all_.attn.queries.codes[mine])
        experts = share.experts.of(share.config.n_experts)
        assert torch.equal(one.ffn.experts.first_codes, all_.ffn.experts.first_codes[experts.start : experts.stop])
        if not share.one_group:
            group = one.attn.wo_a.codes
            assert torch.equal(group, all_.attn.wo_a.codes[share.tensor.index : share.tensor.index + len(group)])
            own = share.tensor.of(all_.attn.wo_b.codes.shape[1])
            assert torch.equal(one.attn.wo_b.codes, all_.attn.wo_b.codes[:, own.start : own.stop])
        else:
            columns = share.tensor.of(all_.attn.wo_a.codes.shape[2])
            assert torch.equal(one.attn.wo_a.codes, all_.attn.wo_a.codes[:, :, columns.start : columns.stop])


def test_scales_of_a_part_are_those_of_its_place(tmp_path):
    """A part that begins inside a tile of 128 has smaller tiles, with the scales of the values that are there."""
    x = torch.randn(320, 448, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 320)[:, None]
    stored = fp8_block.quantize(x)
    tensors = {"a.weight": stored.codes.view(torch.float8_e4m3fn), "a.scale": stored.scales.view(torch.float8_e8m0fnu)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint, whole = Checkpoint(tmp_path), fp8_block.dequantize(stored)
    for rows, columns in ((range(96, 288), None), (range(320), range(64, 448)), (range(128, 256), range(32, 160))):
        found, _ = experts.read_projection(checkpoint, "fp8", "a", 320, 448, Cut(rows, columns))
        columns = columns or range(448)
        want = whole[rows.start : rows.stop, columns.start : columns.stop]
        assert torch.equal(fp8_block.dequantize(found), want), (rows, columns)
