"""What judges a reader's correction step: how often it corrects, and each way of being wrong by its own check."""

from __future__ import annotations

import cutlass.cute as cute
import pytest

from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.softmax import rescale
from dsv4lib.pages.fmha import correction


class EveryTile(Fmha):
    @cute.jit
    def correct(self, maxima, row_sum, has_o, address, tidx, p, p_state):
        row_max, tile_max = maxima
        new_max = cute.arch.fmax(row_max, tile_max)
        acc_scale = cute.math.exp2(row_max - new_max, fastmath=True)
        if has_o:
            self.wait_for_o(p, p_state)
            rescale(address, self.q_column, tidx, acc_scale)
        return new_max, row_sum * acc_scale


class NoWait(EveryTile):
    @cute.jit
    def wait_for_o(self, p, p_state):
        pass


class NoSum(EveryTile):
    @cute.jit
    def correct(self, maxima, row_sum, has_o, address, tidx, p, p_state):
        new_max, _ = EveryTile.correct(self, maxima, row_sum, has_o, address, tidx, p, p_state)
        return new_max, row_sum


@pytest.fixture(scope="module")
def tokens():
    return correction.some_tokens()


@pytest.mark.full
def test_the_kernel_corrects_less_often_than_in_every_tile(tokens) -> None:
    lazy, eager = (correction.try_correction(kind, tokens) for kind in (Fmha, EveryTile))
    assert lazy.clean and eager.clean
    assert eager.count == 4 * 4 > lazy.count > 0  # four warps, four tiles after the first


def test_without_the_wait_checks_speak_and_without_row_sum_the_numbers(tokens) -> None:
    unordered, wrong = (correction.try_correction(kind, tokens) for kind in (NoWait, NoSum))
    assert unordered.hazards and not unordered.clean
    assert unordered.outcome.findings()[0][0] == "race_tensor"
    assert not wrong.outcome.right and not wrong.hazards
