"""Logits of nano on the SM100 kernels do not depend on how its prompt is cut, bit by bit: N of the MMAs 8 to 160.

Up to the first HCA entry, at 128 tokens: HCA's running softmax rounds where a chunk ends.
"""

import pytest

from dsv4lib.pages.full_model import run_case

HCA_WINDOW = 128


@pytest.mark.parametrize(
    "sizes",
    [[7, 17], [10, 30], [10] * 12],
    ids=str,
)
@pytest.mark.full  # the stage full_model has the smallest case
def test_chunks_give_the_logits_of_one(sizes):
    assert sum(sizes) < HCA_WINDOW
    assert run_case.chunk_differences(run_case.listed(), sizes, "emulator") == 0
