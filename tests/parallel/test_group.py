"""The communicator of a group, against what each method says it gives; where its sockets are."""

import psutil
import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.layers.communicator import ALONE, part_of
from dsv4lib.layers.exchange import Routes
from dsv4lib.parallel.group import joined
from dsv4lib.parallel.place import Place
from dsv4lib.parallel.plan import Plan
from tests.parallel.ranks import GROUPED, bits, returned, run

NAN = float("nan")
# Sums in another order than that of the ranks are others: 1 is lost beside 1e8, and 3 is not.
ADDENDS = torch.tensor([[1.0, 1e8, NAN], [1e8, 1.0, 0.0], [-1e8, -1e8, 0.0], [3.0, 2.0**-149, 0.0]])


def every_method(ranks):
    group, rank = ranks.world, ranks.rank
    whole = torch.arange(7 * 5).reshape(7, 5).float() * 0.1
    own = group.own(7)
    mine = whole[own.start : own.stop]
    numbers = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 6, 7])
    owner = torch.tensor([0, 2, 1, -1, 3])
    sent = [(rank + r) % 3 for r in range(4)]
    rows = torch.tensor([[rank, r] for r in range(4) for _ in range(sent[r])], dtype=torch.bfloat16).reshape(-1, 2)
    came, tens = group.counts(sent, [10 * rank + r for r in range(4)])
    with pytest.raises(ArgumentError, match="torch.float32"):
        group.sum(whole.bfloat16())
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    return {
        "sum": bits(group.sum(ADDENDS[rank].reshape(1, 3))),
        "rows": bits(group.rows(mine, 7)),
        "bf16": bits(group.rows(mine.bfloat16(), 7)),
        "columns": bits(group.columns(whole.T[:, own.start : own.stop], 7)),
        "owner": group.owner(numbers, 7).tolist(),
        "pick": group.pick(torch.full((5, 2), float(rank)), owner)[:, 1].tolist(),
        "counts": came,
        "tens": tens,
        "exchange": group.exchange(rows, sent, came).tolist(),
        "nothing": list(group.exchange(rows[:0], [0] * 4, [0] * 4).shape),
        "empty": list(group.rows(whole[:0], 0).shape),
        "any": [group.any(False), group.any(rank == 2)],
        "listening": sorted(set(listening)),
        "sizes": [ranks.groups.tensor.size, ranks.groups.experts.size, ranks.groups.experts.rank],
    }


def test_every_method_gives_all_ranks_what_it_says(tmp_path):
    found = returned(run(Plan.of(GROUPED, tensor=4, experts=2), every_method, tmp_path))
    whole = torch.arange(7 * 5).reshape(7, 5).float() * 0.1
    total = ADDENDS[0].clone()
    for one in ADDENDS[1:]:
        total += one
    assert total[0] != ADDENDS.double().sum(0)[0]  # the order is seen
    for rank, one in enumerate(found):
        assert one["sum"] == bits(total) and one["rows"] == bits(whole) and one["bf16"] == bits(whole.bfloat16())
        assert one["columns"] == bits(whole.T) and one["owner"] == [-1, 0, 1, 1, 2, 2, 3, 3, -1]
        assert one["pick"] == [0, 2, 1, 0, 3] and one["any"] == [False, True]
        assert one["counts"] == [(r + rank) % 3 for r in range(4)] and one["tens"] == [10 * r + rank for r in range(4)]
        assert one["exchange"] == [[r, rank] for r in range(4) for _ in range((r + rank) % 3)]
        assert one["nothing"] == [0, 2] and one["empty"] == [0, 5] and one["sizes"] == [4, 2, rank % 2]
        assert one["listening"] == ["127.0.0.1"]


def test_one_rank_gets_what_it_gives():
    x = torch.randn(3, 4)
    for found in (ALONE.sum(x), ALONE.columns(x, 4), ALONE.rows(x, 3), ALONE.exchange(x, [3], [3])):
        assert found is x
    assert ALONE.counts([5], [6]) == [[5], [6]] and ALONE.any(True) and list(ALONE.own(3)) == [0, 1, 2]
    assert [len(part_of(7, r, 4)) for r in range(4)] == [1, 2, 2, 2]


def routed(ranks):
    """Experts that multiply by their number, on tokens that differ between ranks; one rank has none."""
    group, count, k = ranks.groups.experts, 5, 2
    tokens = [4, 0, 3, 1][ranks.rank]
    generator = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(tokens, 8, generator=generator).bfloat16()
    experts = torch.stack(
        [torch.randperm(count, generator=generator)[:k] for _ in range(tokens)] or [torch.empty(0, k)]
    )
    experts = experts.int().reshape(tokens, k)
    if tokens:
        experts[0, 1] = -1  # masked
    weights = torch.rand(tokens, k, generator=generator)
    routes = Routes(experts, count, group)
    got, mine = routes.send(x, weights), group.own(count)
    assert bool((got.experts < len(mine)).all()) and bool((got.experts >= 0).any(1).all())
    rows = got.experts.clamp(min=0).reshape(-1) + mine.start + 1
    y = got.x.float().repeat_interleave(k, 0) * rows[:, None] * got.weights.reshape(-1, 1)
    row_of = torch.where(got.experts >= 0, torch.arange(len(rows), dtype=torch.int32).view(-1, k), -1)
    back = routes.back(y, row_of)
    want = x.float()[:, None] * (experts + 1)[..., None] * weights[..., None]
    found = torch.where((routes.row_of >= 0)[..., None], back[routes.row_of.clamp(min=0).long()], -7.0)
    want = torch.where((experts >= 0)[..., None], want, -7.0)
    return [bits(found) == bits(want), sorted(routes.row_of[routes.row_of >= 0].tolist()) == list(range(len(back)))]


def test_rows_come_back_to_their_tokens_and_slots(tmp_path):
    assert returned(run(Plan.of(GROUPED, data=4), routed, tmp_path)) == [[True, True]] * 4


def test_a_place_is_read_from_the_environment():
    good = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    good |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert Place.here(good) == Place(1, 2, 1, 2, "127.0.0.1", 29500) and Place.here({}) is None
    assert Place.here({**good, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent
    for name, value in (
        ("WORLD_SIZE", ""),
        ("MASTER_PORT", "x"),
        ("MASTER_PORT", "0"),
        ("RANK", "2"),
        ("MASTER_ADDR", ""),
        ("LOCAL_RANK", "-1"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}="):
            Place.here({**good, name: value})


def test_a_plan_needs_as_many_processes_as_ranks():
    with (
        pytest.raises(ArgumentError, match="processes=2 .*4, the ranks"),
        joined(Plan.of(GROUPED, tensor=4), Place(1, 2), "cpu", 1.0),
    ):
        pass
