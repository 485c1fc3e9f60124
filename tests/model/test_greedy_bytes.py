"""The trained model continues a text: the same greedy bytes from SM100 kernels in the emulator and from oracles."""

import pytest
import torch

from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.model.tokenizer import decode
from dsv4lib.pages.full_model import run_case


class Gaps(Scheduler):
    """A scheduler that notes the gap of the two largest logits of each choice."""

    gaps: list[float]

    def _of(self, part, logits: torch.Tensor) -> list[int]:
        self.gaps += [float(top[0] - top[1]) for top in logits.topk(2).values]
        return super()._of(part, logits)


def continued(backend: str, prompt: list[int], count: int, chunk: int) -> tuple[list[int], list[float]]:
    """(bytes that were drawn, gap of the two largest logits at each)."""
    model = run_case.model(run_case.listed(), backend)
    one = Gaps(model, PagedCaches(model, requests=1, tokens=chunk, positions=256))
    one.gaps = []
    one.add("text", prompt, SamplingParams(temperature=0.0, seed=0), count)
    return [token for _, token, _ in one.run()], one.gaps


@pytest.mark.full
@pytest.mark.parametrize(
    "length, chunk, count",
    [(8, 5, 2), pytest.param(131, 66, 4, marks=(pytest.mark.full, pytest.mark.slow))],
    ids=["in windows of 4", "past an entry of HCA"],
)
def test_kernels_write_the_bytes_of_their_oracles(length, chunk, count):
    """Prompts in chunks; no choice is so close that rounding could make it."""
    prompt = run_case.text(length)[:length].tolist()
    found, want = (continued(backend, prompt, count, chunk) for backend in ("emulator", "reference"))
    print(repr(decode(run_case.ByteTokenizer(), want[0])), "gaps", [f"{gap:.2f}" for gap in want[1]])
    assert found[0] == want[0] and len(want[0]) == count == len(want[1])
    assert min(want[1]) > 0.02
