"""The evaluation through ops: modes against the oracle, gates, the command."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsv4lib.errors import ArgumentError
from dsv4lib.lab import cli
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.whole import Listed
from dsv4lib.nano import evaluate, on_kernels
from dsv4lib.pages.common import peers
from dsv4lib.pages.nano import precision_table
from dsv4lib.pages.nano.evaluate import held_windows

LN2 = math.log(2)
SHIPPED = Path(__file__).resolve().parents[2] / "data" / "nano"


def test_modes_differ_from_the_oracle_by_what_they_round():
    wanted = [on_kernels.named(n) for n in (on_kernels.SHIPPED, "linears bf16", on_kernels.NAIVE)]
    rows = on_kernels.table(SHIPPED, held_windows(1, 96), wanted, "reference")
    assert on_kernels.gates(rows) == []
    _, shipped, linears, naive = rows
    assert 1e-5 < linears.kl < shipped.kl < 0.1 * naive.kl  # activations of the experts are left to round
    assert shipped.same > 0.95


def test_gates_refuse_what_they_should():
    row = evaluate.Row(on_kernels.SHIPPED, "emulator", 1, 96, 1.0, 0.0, 0.0, 0.0, kl=0.002, same=1.0)
    naive = replace(row, name=on_kernels.NAIVE, difference=0.2, kl=0.3)
    assert on_kernels.gates([row, naive]) == []
    assert on_kernels.gates([replace(row, kl=0.02), naive])[0].startswith("as stored: KL 0.02")
    assert on_kernels.gates([row, replace(naive, difference=0.01)])[0].startswith(on_kernels.NAIVE)


@pytest.mark.full
def test_kernels_agree_with_their_oracles():
    """No further apart than both are from fp32, and neither costs more bits than three standard errors."""
    listed, found = Listed.of(Checkpoint(SHIPPED)), held_windows(1, 24)
    own, want = (
        on_kernels.log_probabilities(listed, on_kernels.named(on_kernels.SHIPPED), found, backend)[0].double() / LN2
        for backend in ("emulator", "reference")
    )
    kl = ((want * LN2).exp() * (want - own)).sum(-1).mean()
    costs = (want - own)[:-1].gather(1, found.tokens[0, 1:, None])
    assert kl < on_kernels.SHIPPED_KL_MOST
    assert costs.mean().abs() < 3 * costs.std() / len(costs) ** 0.5


def test_command_names_what_is_wrong(tmp_path):
    with pytest.raises(ArgumentError, match="variant"):
        on_kernels.named("kv bf16")
    refused = CliRunner().invoke(cli.app, ["evaluate", "--backend", "reference", "--variant", "nothing"])
    assert isinstance(refused.exception, ArgumentError) and "as stored" in str(refused.exception)


def test_readme_has_the_table_of_the_files():
    assert peers.written(precision_table.README, precision_table.MODULE) == precision_table.markdown()
