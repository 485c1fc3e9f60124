"""The trained model continues a text: the same greedy bytes from SM100 kernels in the emulator and from oracles."""

import pytest
import torch

from dsv4lib.model.generate import Request
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.tokenizer import decode
from dsv4lib.pages.full_model import run_case


def continued(backend: str, prompt: list[int], count: int, chunk: int) -> tuple[list[int], list[float]]:
    """(bytes that were drawn, gap of the two largest logits at each)."""
    model, gaps = run_case.model(run_case.listed(), backend), []
    request = Request(model, prompt, SamplingParams(temperature=0.0, seed=0), chunk=chunk)
    right = request.choose

    def choose(logits: torch.Tensor) -> int:
        top = logits[0].topk(2).values
        gaps.append(float(top[0] - top[1]))
        return right(logits)

    request.choose = choose
    return list(request.tokens(count)), gaps


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
    assert found[0] == want[0] and len(want[0]) == count
    assert min(want[1]) > 0.02
