"""The top-k kernel on both architectures: the oracle's picks to the last tie, in every form, under every schedule."""

from functools import cache

import pytest
import torch

from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import HazardError, MemoryFault
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.topk.arguments import all_args, fake_all_args, fake_args, launch_args
from dsv4lib.ops.topk.cluster import LIST, ClusterTopK
from dsv4lib.ops.topk.faults import DropsItsBound, NoRowBarrier, TiesAnyhow
from dsv4lib.ops.topk.kernel import TopK
from dsv4lib.ops.topk.op import Call
from dsv4lib.ops.topk.take_all import TakeAll
from dsv4lib.reference.topk import topk as reference
from tests.budget import built, small
from tests.cases import cases

ARCHS = ("sm_100a", "sm_90a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
CHIP = {"threads": 128, "vectors": 4, "bins": 1024}
MAXIMA = {"threads": 128, "vectors": 4, "bins": 1024, "maxima": 2, "keep": 640}
CLUSTER = {"threads": 64, "vectors": 2, "ctas": 4}
STREAM = {"threads": 64, "vectors": 2, "bins": 1024, "maxima": 1, "stream": True, "capacity": 2048, "keep": 640}
BOTH = {
    "threads": 64,
    "vectors": 2,
    "ctas": 2,
    "bins": 4096,
    "maxima": 1,
    "stream": True,
    "capacity": 4096,
    "keep": 640,
}
FORMS = (
    ("sm_100a", CHIP),
    ("sm_90a", MAXIMA),
    ("sm_90a", CLUSTER),
    ("sm_100a", STREAM),
    ("sm_90a", BOTH),
    ("sm_100a", CLUSTER),
    ("sm_100a", BOTH),
)
NAMES = ("chip", "maxima", "cluster", "stream", "both", "cluster on Blackwell", "both on Blackwell")
EVERY_FORM = cases(*FORMS[:5], full=FORMS[5:])  # the last two: forms that are there, on the other architecture
SIZE = 2000  # the most that each form takes is 2,048 or 4,096
ROOMY = {"keep": 2560}  # of lists, where k is more than a list of 640 takes


def roomy(settings):
    """The form with a list for any k here: it never overflows."""
    return {**settings, **ROOMY} if "maxima" in settings else settings


@cache
def compiled(arch, settings):
    kernel, code = built((ClusterTopK if "ctas" in dict(settings) else TopK), fake_args, arch, **dict(settings))
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


def call_of(scores, lengths, picks):
    return Call(scores, lengths, picks, None, None, 0, False, "emulator")


def run(arch, settings, scores, lengths, k, **device):
    """Picks of a launch without hazards."""
    kernel, code = compiled(arch, tuple(settings.items()))
    gpu = make(arch, **{"checks": "race", **device})
    picks = torch.full((len(scores), k), -7, dtype=torch.int32)
    launch(code, *launch_args(kernel, call_of(scores, lengths, picks)), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return picks


def expected(scores, lengths, k):
    """The oracle's picks in the order of their indices."""
    best = reference(scores, k, lengths.long())
    ranked = torch.where(best < 0, SIZE * 9, best).sort(-1).values
    return torch.where(ranked == SIZE * 9, -1, ranked).int()


def full(scores):
    return torch.full((len(scores),), scores.shape[1], dtype=torch.int32)


def kinds(size=SIZE, seed=0):
    """Rows that are hard in different ways, by name."""
    generator = torch.Generator().manual_seed(seed)
    x, rising = torch.randn(size, generator=generator), torch.arange(size).float()
    return {
        "normal": x,
        "equal": torch.full((size,), 0.5),
        "zeros of either sign": torch.where(x > 0, 0.0, -0.0),
        "three values": x.sign() * (x.abs() > 0.5),
        "rising": rising,  # every list overflows
        "falling": -rising,
        "one octave": 10 + 1e-3 * x,
        "denormal": x * 1e-40,
        "huge": x * 1e30,
        "infinite": torch.where(x > 1, torch.inf, torch.where(x < 0, -torch.inf, x)),
        "negative": -x.abs(),
        "mostly zero": x.clamp_min(1.5) - 1.5,
        "few above zero": x.clamp_min(2.5) - 2.5,
        "close to 1": 1 + 1e-5 * x,
        "eight values": torch.randint(8, (size,), generator=generator).float(),
        "rising again and again": rising % 500,
        "outliers": torch.where(x > 3, x * 1e6, x),
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("arch", "settings"), EVERY_FORM, ids=NAMES)
def test_rows_of_every_kind(arch, settings):
    rows = kinds()
    scores = torch.stack(list(rows.values()))
    lengths = full(scores)
    lengths[0] = SIZE - 1
    for k in (1, 300):
        want, found = expected(scores, lengths, k), run(arch, settings, scores, lengths, k)
        wrong = [name for name, a, b in zip(rows, found, want, strict=True) if not torch.equal(a, b)]
        assert not wrong, (k, wrong)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("arch", "settings"), EVERY_FORM, ids=NAMES)
@pytest.mark.parametrize("k", cases(192, 1024, 2048, full=[512, 1152]))
def test_lengths_around_k(arch, settings, k):
    """Rows of all lengths from none to all, of scores of which many are equal; more than L means L."""
    generator = torch.Generator().manual_seed(k)
    scores = (torch.randn(7, SIZE, generator=generator) * 20).round()
    lengths = torch.tensor([-3, 1, k - 1, k, k + 1, SIZE - 3, SIZE + 5]).int()
    found = run(arch, settings if k == 192 else roomy(settings), scores, lengths, k)
    assert torch.equal(found, expected(scores, lengths.clamp(0, SIZE), k))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("arch", "settings"), EVERY_FORM, ids=NAMES)
def test_ties_at_the_last_pick(arch, settings):
    """As many scores of the same bin as are compared with each other, one less and one more, equal or not quite."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for ties in (1, 2, 255, 256, 257, 400):
        for apart in (0.0, 1e-6):
            row = torch.full((SIZE,), -1.0)
            places = torch.randperm(SIZE, generator=generator)
            row[places[:50]] = 4.0 + torch.rand(50, generator=generator)
            row[places[50 : 50 + ties]] = 1.5 + apart * torch.randperm(ties, generator=generator)
            rows.append(row)
    scores = torch.stack(rows)
    for k in (50, 51, 50 + 128, 50 + 255, 50 + 256, 50 + 257):
        assert torch.equal(run(arch, settings, scores, full(scores), k), expected(scores, full(scores), k)), k


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("arch", "settings"), [FORMS[2], FORMS[3]], ids=["cluster", "stream"])
def test_rows_that_lie_apart_and_start_anywhere(arch, settings):
    """L no multiple of 4, rows on 4 bytes, NaN around them; rows without lengths."""
    storage = torch.full((3, 1300), torch.nan)
    scores = storage[:, 1:1224]
    scores.copy_(torch.stack([x[:1223] for x in list(kinds().values())[:3]]))
    found = run(arch, {**settings, "wide": False, "ragged": False}, scores, None, 100)
    assert torch.equal(found, expected(scores, full(scores), 100))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("arch", "settings"), EVERY_FORM, ids=NAMES)
def test_nan_ranks_behind_everything(arch, settings):
    scores = torch.stack([kinds()["normal"]] * 3)
    scores[0, ::3], scores[1], scores[2, 700:] = torch.nan, torch.nan, -torch.nan
    scores[2, 5:690] = -torch.inf
    found = run(arch, roomy(settings), scores, full(scores), 800)
    ranked = torch.where(scores.isnan(), -torch.inf, scores)  # nothing else is -inf in rows 0 and 1
    assert torch.equal(found[:2], expected(ranked, full(scores), 800)[:2])
    assert torch.equal(found[2], torch.arange(800).int())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [CHIP, BOTH], ids=["chip", "both"])
def test_in_the_order_of_scores(settings):
    """As the oracle has them, also where a row is shorter than k."""
    scores = torch.stack([x for name, x in kinds().items() if name in ("normal", "equal", "three values", "rising")])
    lengths = torch.tensor([SIZE, SIZE, 777, 50]).int()
    found = run("sm_90a", {**settings, "by_score": True}, scores, lengths, 100)
    assert torch.equal(found, reference(scores, 100, lengths.long()).int())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("arch", "settings"), EVERY_FORM, ids=NAMES)
def test_all_schedules_give_the_same_bits(arch, settings):
    rows = kinds()
    scores = torch.stack([rows[name] for name in ("normal", "three values", "rising")])
    want = expected(scores, full(scores), 150)
    for schedule in SCHEDULES:
        assert torch.equal(run(arch, settings, scores, full(scores), 150, schedule=schedule, seed=3), want), schedule


def test_a_cluster_has_one_barrier():
    """Barriers of the cluster: one, where no bin is split."""
    barriers = {}
    kernel, code = compiled("sm_90a", tuple(CLUSTER.items()))
    for row in ("normal", "one octave"):
        scores, gpu = kinds()[row][None], make("sm_90a", trace=True)
        launch(code, *launch_args(kernel, call_of(scores, full(scores), torch.zeros(1, 150).int())), gpu=gpu)
        barriers[row] = int((gpu.trace.named["kind"] == "cluster").sum()) / (kernel.warps * kernel.ctas)
    assert barriers["normal"] == 1 < barriers["one octave"]


# ------------------------------------------------------------------ faults


class SentTooSoon(ClusterTopK):
    """No CTA waits until the others' mbarriers are there."""

    def ready(self):
        """No wait."""


class CandidatesUnawaited(ClusterTopK):
    """Ranks what it has of the candidates."""

    def wait(self, s, number):
        if number != LIST:
            ClusterTopK.wait(self, s, number)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        (NoRowBarrier, CLUSTER, "one octave"),
        (SentTooSoon, CLUSTER, "normal"),
        (CandidatesUnawaited, CLUSTER, "normal"),
        (TiesAnyhow, CHIP, "three values"),
        (DropsItsBound, STREAM, "one octave"),
    ],
)
def test_faults_are_found(kind, settings, name):
    kernel = kind(**settings)
    code = compile_for(kernel, fake_args(kernel), "sm_90a")
    # 50 scores of each value, so that ties are candidates.
    scores = (torch.arange(SIZE) % 40).float()[None] if kind is TiesAnyhow else kinds()[name][None]
    gpu = make("sm_90a", checks="race", schedule="adversarial", fatal=["error"], instruction_limit=10_000_000)
    picks = torch.full((1, 75), -7, dtype=torch.int32)
    try:
        launch(code, *launch_args(kernel, call_of(scores, full(scores), picks)), gpu=gpu)
    except (HazardError, MemoryFault):
        assert issubclass(kind, ClusterTopK)
        return
    wrong = not torch.equal(picks, expected(scores, full(scores), 75))
    assert wrong and kind in (TiesAnyhow, DropsItsBound)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("arch", "wide", "k"), [("sm_100a", True, 1152), ("sm_90a", False, 1153), ("sm_90a", True, 4)])
def test_rows_that_are_picked_whole(arch, wide, k):
    """Lengths on both sides of the scores there are; a place past the picks stays as it is."""
    kernel = TakeAll(wide)
    code = compile_for(kernel, fake_all_args(kernel), arch)
    assert code.local_bytes == 0 and small(code)
    scores, lengths = torch.zeros(5, min(k, 1100)), torch.tensor([0, 1, 3, 1030, 2000]).int()
    picks = torch.full((5, k + 4), -7, dtype=torch.int32)
    for schedule in SCHEDULES:
        gpu = make(arch, checks="race", schedule=schedule)
        launch(code, *all_args(kernel, call_of(scores, lengths, picks[:, :k])), gpu=gpu)
        assert not gpu.hazards and bool((picks[:, k:] == -7).all())
        assert torch.equal(picks[:, :k], expected(scores, lengths.clamp(max=scores.shape[1]), k))
        picks.fill_(-7)
    with pytest.raises(ArgumentError, match="scores.shape"):
        all_args(kernel, call_of(torch.zeros(5, k + 1), lengths, picks[:, :k]))
    with pytest.raises(ArgumentError, match="lengths"):
        all_args(kernel, call_of(scores, None, picks[:, :k]))


def test_bad_arguments_are_named():
    for settings, name in (
        ({"threads": 96}, "threads"),
        ({"vectors": 3}, "vectors"),
        ({"ctas": 32}, "ctas"),
        ({"bins": 512}, "bins"),
        ({"stream": True, "maxima": 0}, "maxima"),
        ({"vectors": 4, "maxima": 3}, "maxima"),
        ({"stream": True, "maxima": 1, "capacity": 1000}, "capacity"),
        ({"stream": True, "maxima": 1, "keep": 256}, "keep"),
    ):
        with pytest.raises(ConfigError, match=name):
            TopK(**settings)
    with pytest.raises(ConfigError, match="ctas"):
        ClusterTopK(**CHIP)
    short, scores = TopK(**STREAM), torch.randn(2, 1000)
    with pytest.raises(ArgumentError, match="picks.shape.*at most 384"):
        launch_args(short, call_of(scores, full(scores), torch.empty(2, 385).int()))
    kernel, scores = TopK(**CHIP), torch.randn(3, 1000)
    good = call_of(scores, full(scores), torch.empty(3, 64).int())
    for bad, name in (
        ({"scores": scores.double()}, "scores"),
        ({"scores": scores[:, 1:]}, "scores.stride"),
        ({"scores": torch.randn(3, 4096)}, "scores.shape"),
        ({"scores": torch.randn(3, 1004)[:, :1001]}, "scores.shape"),
        ({"lengths": None}, "lengths"),
        ({"lengths": full(scores).long()}, "lengths"),
        ({"out": torch.empty(2, 64).int()}, "picks"),
        ({"out": torch.empty(3, 2049).int()}, "picks.shape"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(kernel, good._replace(**bad))
