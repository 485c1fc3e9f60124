"""A whole model on a Hopper, SWA, CSA and HCA layers: beside its oracle, captured decode steps beside eager ones."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from dsv4lib import backends
from dsv4lib.config import TINY, YarnConfig
from dsv4lib.lab import cli
from dsv4lib.layers import moe
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.convert import save
from dsv4lib.loader.model import transformer
from dsv4lib.loader.whole import Listed
from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.model.tokenizer import ByteTokenizer
from dsv4lib.pages.full_model import run_case
from dsv4lib.reference.model import ReferenceModel
from tests.model.test_greedy_bytes import Gaps

ARCH = "sm_90a"
NATIVE = backends.status("native", ARCH)
CONFIG = replace(
    TINY,
    n_layers=3,
    compress_ratios=(0, 4, 128, 0),
    hidden=256,
    n_heads=8,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    window=128,
    csa_rate=4,
    index_heads=64,
    index_dim=128,
    index_topk=24,
    hca_rate=128,
    n_experts=5,
    experts_per_token=2,
    expert_width=128,
    vocab=328,
    n_hash_layers=1,
    max_positions=2048,
    yarn=YarnConfig(),
)
GREEDY = SamplingParams(temperature=0.0, seed=0)
needs_hopper = pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """The model with random weights in DeepSeek's format."""
    folder = tmp_path_factory.mktemp("hopper") / "mxfp4"
    save(ReferenceModel(CONFIG).randomize_(1).state_dict(), CONFIG, folder, "mxfp4")
    return Listed.of(Checkpoint(folder))


def ids(count, seed):
    return torch.randint(CONFIG.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


KEYS = pytest.mark.parametrize("keys", ["fp8", "fp4"])


def serve(listed, backend, prompts, tokens, keys="fp8", **options):
    """(tokens by request, logits that they were drawn from) of requests served together."""
    made = transformer(listed, capacity=1024, backend=backend, arch=ARCH, keys=keys).to(backends.device(backend))
    caches = PagedCaches(made, requests=3, tokens=64, positions=512)
    scheduler, seen, right = Scheduler(made, caches, **options), [], made.head.forward
    made.head.forward = lambda x: (seen.append(right(x)), seen[-1])[1]
    for name, prompt in prompts.items():
        scheduler.add(name, prompt, GREEDY, tokens)
    found = {name: [] for name in prompts}
    for name, token, _ in scheduler.run():
        found[name].append(token)
    return found, [logits[0].float().cpu() for logits in seen]


@KEYS
@pytest.mark.full
def test_an_emulated_hopper_draws_what_its_oracles_draw(listed, keys):
    """Every kernel that a step launches there; logits as near as two roundings of FP8 activations are."""
    found = {}
    for backend in ("emulator", "reference"):
        with backends.emulating(ARCH):
            found[backend] = serve(listed, backend, {"a": ids(3, 1)}, 2, keys)
    (tokens, logits), (want, near) = found["emulator"], found["reference"]
    assert tokens["a"][:1] == want["a"][:1]
    assert float((logits[0] - near[0]).norm() / near[0].norm()) < 0.1


def generated(text, backend, drafts, tokens):
    """What `./dsv4 generate` writes with nano."""
    given = "--backend", backend, "--tokens", str(tokens), "--speculate", str(drafts)
    done = CliRunner().invoke(cli.app, ["generate", text, *given])
    assert done.exit_code == 0, done.exception
    return done


@pytest.mark.full
@pytest.mark.slow
def test_nano_with_drafts_on_an_emulated_hopper():
    """Its one group of 64 rows in the output projection, wq_b in bf16, FP8 keys, and the draft block."""
    with backends.emulating(ARCH):
        found, want = (generated("The st", backend, 2, 3) for backend in ("emulator", "reference"))
    assert found.stdout == want.stdout and "drafts: " in found.stderr


def held_out():
    """118 bytes: a window of 128 closes while 24 more are written."""
    return (run_case.folder() / "heldout.txt").read_bytes()[20_000:20_118].decode("ascii")


@pytest.mark.sm90
@needs_hopper
@pytest.mark.parametrize("drafts", [0, 3])
def test_nano_writes_the_bytes_of_its_oracles(drafts):
    """On the GPU without and with drafts, beside the reference back end without."""
    found = generated(held_out(), "native", drafts, 24)
    with backends.emulating(ARCH):
        want = generated(held_out(), "reference", 0, 24)
    assert found.stdout == want.stdout and "back end native" in found.stderr
    assert ("drafts: " in found.stderr) == (drafts > 0)


def test_no_choice_of_the_text_is_close():
    """The likeliest byte leads by more than kernels round: the comparison of bytes rests on it."""
    with backends.emulating(ARCH):
        model = run_case.model(run_case.listed(), "reference")
        one = Gaps(model, PagedCaches(model, requests=1, tokens=128, positions=256))
        one.gaps = []
        one.add("text", ByteTokenizer().encode(held_out()), GREEDY, 24)
        list(one.run())
    assert len(one.gaps) == 24 and min(one.gaps) > 0.1  # 0.27 and 0.19 with two builds of torch


@pytest.fixture
def picks(monkeypatch):
    """Experts of every call of the router, sorted: [T, k] each."""
    seen, right = [], moe.router

    def watched(*given, **options):
        experts, weights = right(*given, **options)
        seen.append(experts.sort(1).values.cpu())
        return experts, weights

    monkeypatch.setattr(moe, "router", watched)
    return seen


@KEYS
@pytest.mark.sm90
@needs_hopper
def test_logits_are_as_near_the_oracle_as_its_roundings(listed, keys, picks):
    """A prompt of 300 tokens in chunks of 64, over two closed windows of 128, and 8 tokens more.

    A token for which a near tie gave other experts is counted, not judged: another expert is no rounding.
    """
    prompt, drawn, errors, experts = ids(300, 3), 8, {}, {}
    for backend in ("native", "reference"):
        picks.clear()
        tokens, logits = serve(listed, backend, {"a": prompt}, drawn, keys)
        layers = [torch.cat(picks[layer :: CONFIG.n_layers]) for layer in range(CONFIG.n_layers)]
        experts[backend] = torch.stack(layers, 1)[len(prompt) - 1 :]
        sequence = prompt + tokens["a"]
        with torch.no_grad():
            truth = run_case.oracle(listed)(torch.tensor([sequence]))[0, len(prompt) - 1 :]
        found = torch.cat(logits)[:, : CONFIG.vocab]
        truth = truth[: len(found)]
        errors[backend] = (found - truth).norm(dim=1) / truth.norm(dim=1)
    same = (experts["native"] == experts["reference"]).flatten(1).all(1)
    assert len(same) == drawn and int(same.sum()) >= 6, same
    native, reference = (float(errors[backend][same].norm()) for backend in ("native", "reference"))
    assert native <= 1.2 * reference < 1, errors


@KEYS
@pytest.mark.sm90
@needs_hopper
def test_a_captured_step_has_the_bits_of_an_eager_one(listed, keys):
    """Requests of three lengths, steps padded to 1 and 3, windows of 128 that close on the way."""
    prompts = {"long": ids(380, 1), "short": ids(2, 2), "closes": ids(125, 3)}
    eager, graphs = (serve(listed, "native", prompts, 8, keys, decode_sizes=[1, 3], graphs=g) for g in (False, True))
    assert eager[0] == graphs[0] and all(len(tokens) == 8 for tokens in eager[0].values())
    assert all(torch.equal(a, b) for a, b in zip(eager[1], graphs[1], strict=True))
