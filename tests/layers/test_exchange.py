"""Experts that two ranks divide, as threads of one process: `expected` of the GEMMs of each, and the layer's bits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dsv4lib.layers import experts
from dsv4lib.layers.communicator import Communicator, Groups
from dsv4lib.layers.moe import Moe
from tests.layers.test_moe import FACTOR, LIMIT, D, E, K, operands, router_weights, stored, tokens

RANKS = 2
TABLE = torch.tensor([[0, 1], [0, 4], [1, 0], [2, 3]])  # experts of a token's id; rank 0 has 0 and 1, rank 1 the rest
PADDING = len(TABLE)  # an id outside the table


class Thread(Communicator):
    """A rank of a group of threads; ``board`` holds what each has to say.

    Attributes:
        expected: `expected` of the grouped GEMMs of this rank.
    """

    size = RANKS

    def __init__(self, rank, board, barrier):
        self.rank, self.board, self.barrier, self.expected = rank, board, barrier, []

    def told(self, given):
        """What all ranks give, when all have given it."""
        self.board[self.rank] = given
        self.barrier.wait(60)
        found = list(self.board)
        self.barrier.wait(60)
        return found

    def counts(self, *send):
        return [[one[i][self.rank] for one in self.told(send)] for i in range(len(send))]

    def exchange(self, x, send, receive):
        rows = [x.split(list(send))[self.rank] for x, send in self.told((x, send))]
        assert [len(one) for one in rows] == list(receive)
        return torch.cat(rows)


def layer(group=None):
    """A layer that a table routes; of ``group``, with the experts of its rank."""
    gate, _ = router_weights()
    held = operands("mxfp4", stored(E, 1))
    if group is not None:
        own = slice(group.own(E).start, group.own(E).stop)
        parts = [
            experts.Weights(tuple((codes[own], scales[own]) for codes, scales in w.planes), w.alphas[own])
            for w in (held.first, held.second)
        ]
        held = experts.Experts(*parts, held.input_scales[own])
    groups = Groups() if group is None else Groups(experts=group)
    settings = {"k": K, "factor": FACTOR, "limit": LIMIT, "table": TABLE, "backend": "reference", "groups": groups}
    return Moe(gate, None, held, "mxfp4", **settings)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        # 8 routes to the two experts of rank 0 and 10 to the three of rank 1; 7 and 5 without those of padding
        (([1, 1, 3, 3, 1, 1], [3, 0, 0]), (4, 4)),
        (([1, PADDING, 3, PADDING, 1, 1], [PADDING, 0, 0]), (4, 2)),
        (([0, 2, 2, 0, 2, 0], [0, 2, 0]), (9, None)),
    ],
    ids=["all", "padded", "one_rank_alone"],
)
def test_tiles_are_chosen_for_the_routes_of_a_rank(monkeypatch, ids, expected):
    """Valid routes to its own experts, over their number, up; a rank that gets none multiplies nothing."""
    board, barrier, here = [None] * RANKS, threading.Barrier(RANKS), threading.local()
    multiply = experts.moe_gemm

    def spy(*given, **options):
        here.rank.expected.append(options["expected"])
        return multiply(*given, **options)

    monkeypatch.setattr(experts, "moe_gemm", spy)
    xs = [tokens(len(one), seed) for seed, one in enumerate(ids)]

    def work(rank):
        here.rank = group = Thread(rank, board, barrier)
        return layer(group)(xs[rank], torch.tensor(ids[rank])), group.expected

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(work, range(RANKS)))
    here.rank = alone = Thread(0, board, barrier)
    whole = layer()(torch.cat(xs), torch.tensor(sum(ids, [])))
    assert alone.expected == [-(-len(whole) * K // E)] * 2
    assert torch.equal(torch.cat([y for y, _ in found]), whole) and whole.shape == (len(sum(ids, [])), D)
    for (_, told), wanted in zip(found, expected, strict=True):
        assert told == ([] if wanted is None else [wanted] * 2)
