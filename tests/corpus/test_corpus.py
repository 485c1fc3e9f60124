"""Other people's kernels as a regression test of the emulator; see `corpus` and the `cases_*` modules.

The packages are not dependencies of the lab: a case is skipped when its package is missing. To run all of them,
install quack-kernels 0.6.5, flash-attn-4 4.0.0b36, flashinfer-python 0.7.2.post1, nvidia-cudnn-frontend 1.32.0,
triton 3.9.0, apache-tvm-ffi 0.1.15.post2, einops and nvidia-ml-py without their dependencies into a folder of your own
and put it on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util

import cases_cudnn
import cases_flash_attn
import cases_flashinfer
import cases_quack
import pytest
import torch
from corpus import Case

CASES = [case for package in (cases_quack, cases_flash_attn, cases_flashinfer, cases_cudnn) for case in package.CASES]
NEEDED_BY_ALL = ("cutlass", "tvm_ffi", "triton")


def missing(case: Case) -> str | None:
    """The first package that a case needs and that is not installed."""
    for name in (*NEEDED_BY_ALL, case.module.partition(".")[0]):
        if importlib.util.find_spec(name) is None:
            return name
    return None


def parameters() -> list:
    """The cases, slow ones marked."""
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in CASES]


@pytest.mark.parametrize("case", parameters())
def test_kernel_of_a_stranger(case: Case) -> None:
    absent = missing(case)
    if absent:
        pytest.skip(f"{absent} is not installed")
    from dsv4lib import emulator

    torch.manual_seed(0)
    with emulator.device(case.arch, sm_count=case.sm_count) as gpu:
        checks = case.run()
        failures = [text for check in checks if (text := check.failure())]
    assert gpu.launches, "the package launched nothing"
    assert not failures, "\n".join(failures)
    errors = sorted({h.kind for h in gpu.hazards if h.severity == "error"} - case.errors)
    assert not errors, "\n".join(str(h) for h in gpu.hazards)
