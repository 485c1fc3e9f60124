"""Logits of nano on the SM100 kernels do not depend on how its prompt is cut, bit by bit.

Steps of 1 to 120 tokens have GEMMs with tiles of 64 and 128 tokens, and all tiles of the router.

Up to the first HCA entry, at 128 tokens: HCA's running softmax rounds where a chunk ends.
"""

import pytest

from dsv4lib.pages.full_model import run_case

HCA_WINDOW = 128


@pytest.mark.parametrize(
    "sizes",
    [[7, 17], [10, 30], [10] * 12, [65, 40, 1, 14]],
    ids=str,
)
@pytest.mark.full  # the stage full_model has the smallest case
def test_chunks_give_the_logits_of_one(sizes):
    assert sum(sizes) < HCA_WINDOW
    assert run_case.chunk_differences(run_case.listed(), sizes, "emulator") == 0
