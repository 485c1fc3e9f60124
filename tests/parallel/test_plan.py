"""Plans: what they allow, and that the shares of their ranks are the model, each byte once or on every rank."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from dsv4lib import env
from dsv4lib.config import FLASH, PRO
from dsv4lib.errors import ArgumentError
from dsv4lib.loader import names
from dsv4lib.loader.share import Part, Share
from dsv4lib.nano.settings import NANO
from dsv4lib.parallel.plan import Plan, PlanError, allowed_tensor
from tests.cases import cases
from tests.parallel.ranks import GROUPED


@pytest.mark.parametrize(
    ("config", "allowed"),
    [(FLASH, [1, 2, 4, 8]), (PRO, [1, 2, 4, 8, 16]), (NANO, [1, 2, 4, 8]), (GROUPED, [1, 2, 4])],
    ids=["flash", "pro", "nano", "grouped"],
)
def test_tensor_ranks_are_those_that_divide_groups(config, allowed):
    assert allowed_tensor(config) == allowed
    # groups whose ranks would cut a scale of 128 are not divided: their GEMM would be another
    assert allowed_tensor(replace(GROUPED, o_lora_rank=64)) == [1, 2]


@pytest.mark.parametrize(
    ("config", "sizes", "text"),
    [
        (FLASH, {"tensor": 16}, r"tensor=16 is not allowed: one of 1, 2, 4, 8, divisors of o_groups=8"),
        (PRO, {"tensor": 32}, r"tensor=32 .*1, 2, 4, 8, 16, .*o_groups=16"),
        (PRO, {"tensor": 3}, r"tensor=3 "),
        (NANO, {"tensor": 16}, r"tensor=16 .*n_heads=8, of one group"),
        (FLASH, {"tensor": 8, "experts": 3}, r"experts=3 .*a divisor of the 8 ranks"),
        (FLASH, {"experts": 2}, r"experts=2 .*a divisor of the 1 ranks"),
        (NANO, {"data": 8}, r"experts=8 .*at most n_experts=7"),
        (FLASH, {"data": 0}, r"data=0 .*an integer >= 1"),
        (FLASH, {"tensor": True}, r"tensor=True "),
        (FLASH, {"tensor": 2.0}, r"tensor=2.0 "),
    ],
)
def test_sizes_that_a_model_does_not_allow_are_refused_by_name(config, sizes, text):
    with pytest.raises(PlanError, match=text):
        Plan.of(config, **sizes)


def test_ranks_of_a_plan():
    plan = Plan.of(FLASH, tensor=4, experts=2, data=3)
    assert plan.world == 12 and list(plan.tensor_ranks(6)) == [4, 5, 6, 7] and list(plan.expert_ranks(7)) == [6, 7]
    assert [plan.data_index(r) for r in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert not plan.lockstep and Plan.of(FLASH, tensor=4, data=3).lockstep and not Plan.of(FLASH, tensor=4).lockstep
    assert plan.share(6) == Share(FLASH, Part(2, 4), Part(0, 2)) and plan.share(0, "sm_90a").unit == 128
    with pytest.raises(ArgumentError, match=r"rank=12 .*0 to 11"):
        plan.share(12)


def on_meta(weight, form):
    """The tensors that store a weight, without memory."""
    specs = names.specs(weight, names.stored_as(weight, form))
    return {name: torch.empty(spec.shape, dtype=spec.dtypes[0], device="meta") for name, spec in specs.items()}


def cut_of(x, cut, each):
    """A part of a meta tensor whose elements are for ``each`` x ``each`` values."""
    ranges = [r for r in (cut.rows, cut.columns or range(0, 1 << 40)) if r is not None][: x.dim()]
    for dim, part in enumerate(ranges):
        first, past = part.start // each, min(-(-part.stop // each), x.shape[dim])
        x = x.narrow(dim, first, past - first)
    return x.numel() * x.element_size()


@pytest.mark.parametrize(
    ("config", "sizes"),
    cases(
        (FLASH, {"tensor": 8}),
        full=[(PRO, {"tensor": 16}), (FLASH, {"tensor": 4, "data": 4}), (PRO, {"tensor": 8, "experts": 4, "data": 2})],
    ),
    ids=lambda x: str(x) if isinstance(x, dict) else str(x.n_layers),
)
def test_bytes_of_the_ranks_sum_to_the_whole(config, sizes):
    """By tensors on the meta device: what is divided is there once a group that divides it, the rest on every rank.

    A scale of 128 that a part of the shared expert's width cuts (of Pro on 16 ranks) is read by both ranks."""
    plan, form = Plan.of(config, **sizes), "mxfp4"
    shares = [plan.share(rank) for rank in range(plan.world)]
    own, times, every = Counter(), Counter(), 0
    for weight in names.weights(config):
        codes, *scales = on_meta(weight, form).values()
        held, each = 0, names.TILE
        for rank, share in enumerate(shares):
            if not share.holds(weight):
                continue
            cut = share.cut(weight)
            mine = codes.nbytes if cut is None else cut_of(codes, cut, 1)
            own[rank] += mine + sum(x.nbytes if cut is None else cut_of(x, cut, each) for x in scales)
            held += mine
        assert held % codes.nbytes == 0, weight.name
        times[held // codes.nbytes] += codes.nbytes
        every += codes.nbytes + sum(x.nbytes for x in scales)
    assert [own[r] for r in range(plan.world)] == [share.nbytes(form) for share in shares]
    experts = sum(next(iter(on_meta(w, form).values())).nbytes for w in names.weights(config) if w.role == "expert")
    copies = plan.world // plan.experts
    assert set(times) == {copies, plan.data, plan.world} and times[copies] >= experts
    assert every / plan.world < max(own.values()) < 1.6 * every / min(plan.experts, plan.tensor)


@pytest.mark.parametrize(("name", "config", "ranks"), cases(("Flash", FLASH, 8), full=[("Pro", PRO, 16)]))
def test_readme_has_the_bytes_of_a_rank(name, config, ranks):
    row = next(x for x in (env.root() / "README.md").read_text().splitlines() if x.startswith(f"| {name}, MXFP4 |"))
    plans = {}, {"tensor": ranks}, {"data": ranks}
    found = [f"{Plan.of(config, **sizes).share(0).nbytes('mxfp4', mtp=False) / 1e9:.1f}" for sizes in plans]
    assert [cell.strip() for cell in row.split("|")[2:5]] == found


def test_what_all_heads_share_is_whole_and_heads_are_once():
    plan = Plan.of(GROUPED, tensor=4)
    by_name = {w.name: w for w in names.weights(GROUPED)}

    def parts(name):
        return [plan.share(r).part(by_name[f"layers.1.{name}"]).shape for r in range(4)]

    assert parts("attn.wq_b.weight") == [(2 * 512, 128)] * 4 and parts("attn.attn_sink") == [(2,)] * 4
    assert parts("attn.wo_a.weight") == [(128, 1024)] * 4 and parts("attn.wo_b.weight") == [(256, 128)] * 4
    assert parts("ffn.shared_experts.w1.weight") == [(32, 256)] * 4 and parts("ffn.shared_experts.w2.weight")[3] == (
        256,
        32,
    )
    for name in ("attn.indexer.wq_b.weight", "attn.wkv.weight", "attn.compressor.ape", "ffn.gate.weight", "hc_attn_fn"):
        assert parts(name) == [by_name[f"layers.1.{name}"].shape] * 4
    assert sum(math.prod(plan.share(r).part(by_name["embed.weight"]).shape) for r in range(4)) == 328 * 256
    hopper = plan.share(1, "sm_90a")  # whose scales of 128 a part of 32 would cut
    assert not hopper.divides_shared and hopper.cut(by_name["layers.1.ffn.shared_experts.w1.weight"]) is None
    held = [
        [e for e in range(5) if plan.share(r).holds(by_name[f"layers.1.ffn.experts.{e}.w1.weight"])] for r in range(4)
    ]
    assert held == [[0], [1], [2], [3, 4]]


def test_one_group_is_divided_inside():
    share = Plan.of(NANO, tensor=4).share(2)
    by_name = {w.name: w for w in names.weights(NANO)}
    assert share.one_group and share.local.n_heads == 2 and share.local.o_groups == 1
    assert share.cut(by_name["layers.0.attn.wo_a.weight"]).columns == range(2048, 3072)
    assert share.cut(by_name["layers.0.attn.wo_b.weight"]).rows == range(128, 192)
