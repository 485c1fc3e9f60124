"""Whole SM90 kernels against a real H200: the launches are made here again and compared with what the GPU left.

Recorded with driver 580.159 (CUDA 13.0); record.py says how. The lab's own kernels are compiled and replayed anywhere;
other people's where their package or a CUTLASS checkout (CUTLASS_CHECKOUT) is present. GEMMs of every type, fp8 sums
over many wgmma included, agree bit for bit, and so does everything else but the last bits of ex2, lg2, rcp and rsqrt.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import launches
import numpy as np
import own_cases
import pytest
import record
import strangers

from dsv4lib.dsl.compile import compile_for
from dsv4lib.lab.day_one import reading

TABLE = record.table()


def recorded(case: str, launch: int, saved: np.lib.npyio.NpzFile) -> dict[int, np.ndarray]:
    """What the GPU left in every region of a launch: as recorded, else unchanged."""
    contents = np.load(record.DATA / f"{case}.npz")
    regions = json.loads(saved["shape"].tobytes())["elements"]
    keys = [f"{launch}.{i}" for i in range(len(regions))]
    return {i: contents[key] if key in contents else saved[f"before_{i}"] for i, key in enumerate(keys)}


def compared(case: str, folder: Path) -> list[dict[str, str]]:
    """The table's lines for a case, from launches made here and the recorded contents."""
    rows = []
    for launch, path in enumerate(record.files_of(case, folder)):
        saved = np.load(path)
        rows += record.rows_of(case, launch, saved, recorded(case, launch, saved))
    return [{key: str(value) for key, value in row.items()} for row in rows]


def check(case: str, folder: Path) -> None:
    """Same code, same inputs, and outputs as close as they should be."""
    rows = compared(case, folder)
    keys = ["launch", "region", "element", "elements", "grid", "block", "cluster", "inputs"]
    seen, expected = ([[row[key] for key in keys] for row in table] for table in (rows, TABLE[case]))
    assert seen == expected, "not the launches that the H200 ran"
    for row, old in zip(rows, TABLE[case], strict=True):
        assert row["compiler"] != old["compiler"] or row["code"] == old["code"], "changed code: record it again"
        assert int(row["max_ulp"]) <= record.APPROXIMATED.get(case, 0), (
            f"{row['different']} of {row['elements']} differ"
        )


@pytest.mark.parametrize("case", own_cases.CASES)
def test_kernel_of_the_lab(case: str, tmp_path: Path) -> None:
    record.own(case, tmp_path)
    check(case, tmp_path)


@pytest.mark.parametrize("case", strangers.NAMES)
def test_kernel_of_a_stranger(case: str, tmp_path: Path) -> None:
    reason = strangers.missing(case)
    if reason:
        pytest.skip(reason)
    now, then = (record.source(case), record.compiler()), (TABLE[case][0]["source"], TABLE[case][0]["compiler"])
    if now != then:
        pytest.skip(f"recorded with {', '.join(then)}; here is {', '.join(now)}")
    record.stranger(case, tmp_path)
    check(case, tmp_path)


def test_the_record_is_complete() -> None:
    assert set(TABLE) == {*own_cases.CASES, *strangers.NAMES}
    assert {path.stem for path in record.DATA.glob("*.npz")} - {Path(reading.ARRAYS).stem} == set(TABLE)
    for case, rows in TABLE.items():
        contents = np.load(record.DATA / f"{case}.npz")
        assert set(contents) == {f"{row['launch']}.{row['region']}" for row in rows}
        for row in rows:
            assert contents[f"{row['launch']}.{row['region']}"].size % int(row["elements"]) == 0
    lines = [row for rows in TABLE.values() for row in rows]
    assert all(int(row["max_ulp"]) <= record.APPROXIMATED.get(row["case"], 0) for row in lines)
    assert {row["case"] for row in lines if int(row["max_ulp"])} == set(record.APPROXIMATED)


def test_digests_see_what_matters() -> None:
    """Line information, which holds paths, is not code; a changed instruction, a scalar and an input are seen."""
    call = own_cases.CASES["row_quant"]("cpu")
    with launches.recording() as records:
        own_cases.run(call, "emulator")
    (one,) = records
    with_lines = compile_for(call.kernel, call.arguments, own_cases.ARCH).ptx
    assert ".loc" in with_lines and with_lines != one.ptx
    code = launches.code_digest(one.ptx)
    assert launches.code_digest(with_lines) == code != launches.code_digest(one.ptx.replace("shr.u32", "shr.s32"))
    read = launches.parameter_reads(one.ptx, one.kernel, one.parts)
    assert read == [(0, 8), (16, 24), (24, 32), (40, 48), (48, 56)]  # pointers and row strides, not what lies between
    params = bytearray(one.params)
    params[12] ^= 1  # never read
    assert dataclasses.replace(one, params=bytes(params)).inputs == one.inputs
    params[16] ^= 1
    assert dataclasses.replace(one, params=bytes(params)).inputs != one.inputs
    before = one.regions[0].before.copy()
    before[7] ^= 1
    regions = (dataclasses.replace(one.regions[0], before=before), *one.regions[1:])
    assert dataclasses.replace(one, regions=regions).inputs != one.inputs


def test_one_wrong_bit_is_seen(tmp_path: Path) -> None:
    record.own("row_quant", tmp_path)
    saved = np.load(record.files_of("row_quant", tmp_path)[0])
    contents = recorded("row_quant", 0, saved)
    assert [row["different"] for row in record.rows_of("row_quant", 0, saved, contents)] == [0, 0]
    contents[0] = contents[0].copy()
    contents[0][5] ^= 1  # an input that nothing writes
    assert [row["different"] for row in record.rows_of("row_quant", 0, saved, contents)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("element", "first", "second", "distance"),
    [
        ("f32", 1.0, 1 + 2.0**-23, 1),
        ("f32", -1.0, -1 - 2.0**-22, 2),
        ("f32", 0.0, -0.0, 0),
        ("f32", 1.4e-45, -1.4e-45, 2),
        ("f16", 2048.0, 2050.0, 1),
    ],
)
def test_steps_between_numbers(element: str, first: float, second: float, distance: int) -> None:
    dtype = {"f32": np.float32, "f16": np.float16}[element]
    a, b = (np.array([x], dtype).view(np.uint8) for x in (first, second))
    assert record.ulps(a, b, element).tolist() == [distance]
