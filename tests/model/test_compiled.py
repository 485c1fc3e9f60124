"""Decode steps under torch.compile: one graph of all layers, whose steps have the bits of eager ones."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dsv4lib.cache import Work
from dsv4lib.loader.model import transformer
from dsv4lib.model.paged import PagedCaches
from tests.cases import cases
from tests.whole_model import listed, peer  # noqa: F401  fixtures

PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [300, 2]}


class Counted(CompileCounterWithBackend):
    """A back end of torch.compile that counts graphs, and keeps them."""

    def ops(self) -> set[str]:
        """Names of this lab's ops in the last graph."""
        nodes = (str(node.target) for node in self.graphs[-1].graph.nodes)
        return {name.split(".")[1] for name in nodes if name.startswith("dsv4.")}


@pytest.fixture(autouse=True)
def fresh():
    """Forget graphs of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def logits_of(model, step):
    """Every token's logits."""
    return model.head(model.hidden(step)[0])[0]


class OnPages:
    """Steps of `PROMPTS` on pages of a pool, padded to three requests."""

    def __init__(self, model):
        self.caches = PagedCaches(model, requests=4, tokens=16, positions=256)
        for name, prompt in PROMPTS.items():
            self.caches.manager.add(name, prompt)

    def begin(self, tokens):
        works = [Work(name, len(own)) for name, own in zip(PROMPTS, tokens, strict=True)]
        self.batch = self.caches.manager.begin(works)
        padded = (3, 3) if len(tokens[0]) == 1 else (None, None)
        return self.caches.step(self.batch, *padded)

    def end(self, drawn):
        self.caches.manager.commit(self.batch)
        for name, token in zip(PROMPTS, drawn, strict=True):
            self.caches.manager.append(name, [token])


class AtPlaces:
    """Steps of `PROMPTS` at places of their own."""

    def __init__(self, model):
        self.model, self.starts = model, [0, 0]

    def begin(self, tokens):
        step = self.model.step(tokens, [0, 1], self.starts)
        self.starts = [start + len(own) for start, own in zip(self.starts, tokens, strict=True)]
        return step

    def end(self, drawn):
        """Nothing is kept."""


@torch.no_grad()
def decoded(listed, backend, run, kept, steps):  # noqa: F811
    """Logits of decode steps of two requests, chosen greedily."""
    model = transformer(listed, capacity=256, places=2, backend=backend)
    where, tokens, found = kept(model), list(PROMPTS.values()), []
    for number in range(steps + 1):
        step = where.begin(tokens)
        if number == 0:
            logits = logits_of(model, step)[[len(tokens[0]) - 1, len(step.tokens) - 1]]
        else:
            logits = run(model, step)[:2].clone()
            found.append(logits)
        drawn = logits.argmax(-1).tolist()
        where.end(drawn)
        tokens = [[token] for token in drawn]
    return found


def same_bits(listed, backend, compiler, kept, steps):  # noqa: F811
    """Compare compiled steps with eager ones; return the counting back end."""
    counted = Counted(compiler)
    compiled = torch.compile(logits_of, fullgraph=True, backend=counted)
    want, found = (decoded(listed, backend, run, kept, steps) for run in (logits_of, compiled))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert counted.frame_count == 1, "a step was compiled anew"
    return counted


@pytest.mark.parametrize(
    "compiler, kept",
    cases(("aot_eager", OnPages), full=[("eager", OnPages), ("eager", AtPlaces), ("aot_eager", AtPlaces)]),
)
def test_compiled_steps_have_the_bits_of_eager_ones(listed, compiler, kept):  # noqa: F811
    """Windows of 4 close on the way, a row is padding; one graph holds all layers, and no step is compiled anew."""
    counted = same_bits(listed, "reference", compiler, kept, 4)
    attention = {"qnorm_rope_kv", "fmha", "compressor", "indexer_q", "indexer_logits", "topk", "output_proj"}
    around = {"embedding", "mhc_site", "router", "moe_dispatch", "moe_gemm", "moe_combine", "linear"}
    assert attention | around <= counted.ops()


@pytest.mark.full
@pytest.mark.slow
def test_inductor_compiles_steps_on_a_pool(listed):  # noqa: F811
    """It traces mutations as "aot_eager" does, and makes code of what is no op of this lab."""
    if shutil.which("g++") is None:
        pytest.skip("inductor needs g++, which is not here")
    same_bits(listed, "reference", "inductor", OnPages, 2)


@pytest.mark.full
@pytest.mark.slow
def test_compiled_steps_launch_the_same_kernels(listed):  # noqa: F811
    """SM100 in the emulator."""
    same_bits(listed, "emulator", "eager", OnPages, 2)
