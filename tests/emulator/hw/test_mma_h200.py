"""mma.sync and wgmma against a real H200: what its tensor cores gave for the kernels of h200_cases.py.

Recorded with driver 580.159 (CUDA 13.0). Fragments, operand layouts, swizzles, signs, saturation and everything whose
sums are exact agree bit for bit. Where sums round, hardware and emulator order them differently:

* f16, bf16, tf32: within a few units of the last place of the largest summand;
* f64: hardware fuses multiply and add;
* fp8 wgmma: Hopper aligns products to the largest one and keeps about 13 fraction bits, also when the exact sum would
  fit into float32. The emulator does not imitate that; mma.sync of fp8 does not show it.
"""

import h200_cases
import numpy as np
import pytest

SPECIFICATIONS = list(h200_cases.specifications())
DTYPES = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "s32": np.int32}
# Largest difference as a part of the largest result of the case.
BOUND = {"f32": 3e-7, "f16": 5e-4, "f64": 5e-16}
BOUND_FP8_WGMMA = 2.0**-12


@pytest.fixture(scope="module")
def record():
    with np.load(h200_cases.RECORD) as found:
        yield {name: found[name] for name in found.files}


@pytest.mark.parametrize("number", range(len(SPECIFICATIONS)))
def test_against_the_record(number, record):
    case = h200_cases.build(number, SPECIFICATIONS[number])
    name, _, digest = str(record["digests"][number]).rpartition(": ")
    assert name == case.name
    if case.exact:
        assert h200_cases.digest(case.emulated) == digest
        return
    kind = DTYPES[case.d]
    emulated, measured = (
        np.ascontiguousarray(w).view(kind).astype(np.float64) for w in (case.emulated, record[f"{number:03d}"])
    )
    fp8 = name.startswith("wgmma") and (".e4m3." in name or ".e5m2." in name)
    bound = max(BOUND[case.d], BOUND_FP8_WGMMA if fp8 else 0)
    assert np.abs(emulated - measured).max() <= bound * np.abs(measured).max()
