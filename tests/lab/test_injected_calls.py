"""Kernels that a page injects where calls are replayed: they reach the launch, and nothing of them stays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch

from dsv4lib.bench.ops import host
from dsv4lib.ops.common import plans
from dsv4lib.ops.compressor import op as compressor_op
from dsv4lib.ops.compressor.faults import FAULTS
from dsv4lib.ops.compressor.kernel import Compressor
from dsv4lib.ops.rmsnorm import op as norm_op
from dsv4lib.ops.rmsnorm.kernel import RmsNorm
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.compressor import figures, run_case
from dsv4lib.pages.compressor.run_case import CSA, HCA

CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Wrong(RmsNorm):
    """What a page would inject."""

    def __repr__(self) -> str:
        return "wrong"


class WrongEntries(Compressor):
    """The same of the compressor."""

    def __repr__(self) -> str:
        return "wrong"


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """Names of the kernels that were launched, in order; ops take the way of a GPU, plans included.

    Plans do not look at alignment here, which differs from call to call: alike calls always meet a plan.
    """
    seen: list[str] = []
    kept = []

    def entry(function: host.Uncompiled) -> Callable:
        made = CALL(lambda address: seen.append(function.name))
        kept.append(made)
        return made

    with torch.no_grad(), host.without_gpu(entry), patch.object(plans, "ALIGN", 0):
        yield seen


def wrong(seen: list[str]) -> list[bool]:
    """Whether each was the injected one; forgets them."""
    found = [name == "wrong" for name in seen]
    seen.clear()
    return found


def test_a_fault_reaches_calls_that_were_replayed(launched: list[str]) -> None:
    """Right ones make a plan, which the fault must not meet, nor the right ones after it the fault's."""
    x, weight = torch.randn(6, 72).bfloat16(), torch.ones(72)

    def call() -> None:
        norm_op.rmsnorm(x, weight, 1e-6, backend="native")

    for _ in range(4):
        call()
    assert wrong(launched) == [False] * 4 and any(one.plans for one in plans._OPS)
    injected.run("native", lambda: [call() for _ in range(4)], (norm_op, "RmsNorm", Wrong))
    assert wrong(launched) == [True] * 4
    for _ in range(4):
        call()
    assert wrong(launched) == [False] * 4
    injected.run("native", call, (norm_op, "RmsNorm", Wrong))
    assert wrong(launched) == [True]


def test_so_does_one_of_the_compressor(launched: list[str]) -> None:
    tokens, pieces, given = run_case.draw(CSA, 12, 3), (4, 4, 4), []
    with patch.object(compressor_op, "compressor", lambda *a, **k: given.append((a, k))):
        run_case.run(tokens, "fp32", pieces, backend="native")

    def right() -> list[bool]:
        for one, options in given[1:] * 2:  # calls such as those of the page, outside of it
            compressor_op.compressor(*one, **options)
        return wrong(launched)

    assert right() == [False] * 4 and any(one.plans for one in plans._OPS)
    for _ in range(2):
        run_case.run(tokens, "fp32", pieces, kernel=WrongEntries, backend="native")
        assert wrong(launched) == [True] * 3
        assert right() == [False] * 4


def test_a_fault_that_only_the_emulator_reports_is_left_out_natively(capsys: pytest.CaptureFixture[str]) -> None:
    """And the page says so; others are not left out."""
    asked = []

    def run(tokens: run_case.Tokens, form: str, pieces: tuple[int, ...] = (), **given: object) -> run_case.Run:
        asked.append(given["kernel"])
        return right(tokens, form, pieces, backend="reference")

    right, every = run_case.run, [FAULTS["WarpsNotAwaited"], FAULTS["MaximaMixed"]]
    for backend, kernels in (("native", every[1:]), ("emulator", every)):
        asked.clear()
        with patch.object(run_case, "run", run):
            figures.show_faults(every, 19, 0, backend)
        said = capsys.readouterr().out
        assert set(asked) == set(kernels)
        assert ("WarpsNotAwaited is left out" in said) == (backend == "native")
    assert run_case.kernel_of("WarpsNotAwaited", HCA) is every[0] and compressor_op.Compressor is Compressor
