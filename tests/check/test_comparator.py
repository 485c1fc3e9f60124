"""The record itself: every criterion can fail alone, every field says what it promises, bad input is refused."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rounding import rows_of_different_scale

from dsv4lib import check
from dsv4lib.check import TOLERANCES, Tolerance, tolerances
from dsv4lib.errors import ArgumentError

LOOSE = Tolerance("loose", abs=1e9, rel=1e9, cosine=1e9, tile=1e9, reason="lets everything pass")


def only(record) -> str:
    assert len(record.reasons) == 1, record.reasons
    return record.reasons[0].split(":")[0]


def with_bounds(**bounds) -> Tolerance:
    return Tolerance("t", **{"abs": 1e9, "rel": 1e9, "cosine": 1e9, "tile": 1e9, "reason": "one bound", **bounds})


class TestCriteria:
    x = rows_of_different_scale((130, 70), 0)

    def test_equal_arrays_have_an_all_zero_record(self):
        record = check.compare(self.x, self.x.clone())
        assert record.passed and record.reasons == ()
        assert (record.max_abs, record.max_ulp, record.cosine, record.rel_l2, record.worst_tile_relative) == (0,) * 5

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_nonfinite_alone(self, value):
        y = self.x.clone()
        y[7, 11] = value
        record = check.compare(y, self.x, tol=LOOSE)
        assert only(record) == "nonfinite" and record.worst_index == (7, 11) and record.nonfinite_mismatches == 1
        assert check.compare(y, y.clone()).passed

    @pytest.mark.parametrize("one,other", [(math.nan, math.inf), (math.inf, -math.inf), (math.nan, -math.inf)])
    def test_kinds_of_nonfinite_are_different(self, one, other):
        y, z = self.x.clone(), self.x.clone()
        y[0, 0], z[0, 0] = one, other
        assert not check.compare(y, z, tol=LOOSE).passed

    def test_elements_alone(self):
        y = self.x.clone()
        y[100, 69] *= 1.5
        record = check.compare(y, self.x, tol=with_bounds(abs=1e-6, rel=0.1))
        assert only(record) == "elements" and record.mismatches == 1 and record.worst_index == (100, 69)

    def test_abs_or_rel_needs_both_to_fail(self):
        e = torch.tensor([[1000.0, 1.0, 0.001, 1000.0]], dtype=torch.float64)  # row RMS 707
        a = e + torch.tensor([[100.0, 0.5, 0.5, 0.0]], dtype=torch.float64)
        assert check.compare(a, e, tol=with_bounds(abs=1e-3, rel=0.0)).mismatches == 1  # 0.5 < 0.707 passes by abs
        assert check.compare(a, e, tol=with_bounds(abs=1e-3, rel=0.1)).mismatches == 0  # 100 <= 0.1 * 1100 by rel
        assert check.compare(a, e, tol=with_bounds(abs=0.0, rel=0.1)).mismatches == 2

    def test_abs_and_rel_do_not_add_up(self):
        e = torch.ones(1, 64, dtype=torch.float64)
        a = e.clone()
        a[0, 0] = 1.15
        assert check.compare(a, e, tol=with_bounds(abs=0.1, rel=0.1)).mismatches == 1

    def test_absolute_bound_follows_the_scale_of_the_row(self):
        e = torch.ones(2, 64, dtype=torch.float64)
        e[1] *= 1e-6
        a = e.clone()
        a[1, 5] += 0.5e-6  # tiny against the array, half of its own row's scale
        assert check.compare(a, e, tol=with_bounds(abs=0.1, rel=0.0)).worst_index == (1, 5)

    def test_cosine_alone(self):
        assert only(check.compare(self.x * 1.01, self.x, tol=with_bounds(cosine=1e-5))) == "cosine"

    def test_a_fine_cosine_is_not_a_pass(self):
        """Rows of small scale taken from elsewhere, one element of noise, one NaN: the cosine says all is well."""
        x = rows_of_different_scale((512, 64), 0)
        order = x.norm(dim=1).argsort()
        stale, spot, missing = x.clone(), x.clone(), x.clone()
        stale[order[:64]] = x[order[64:128]]
        spot[3, 5] += 0.1 * x[3].abs().max()
        missing[0, 0] = float("nan")
        for wrong in (stale, spot, missing):
            there = wrong.isfinite()
            assert torch.nn.functional.cosine_similarity(wrong[there], x[there], dim=0) > 0.97
            assert not check.compare(wrong, x).passed

    def test_cosine_is_the_symmetric_formula(self):
        y = self.x + 0.1 * rows_of_different_scale((130, 70), 1)
        dot, xx, yy = (float((p * q).sum()) for p, q in ((self.x, y), (self.x, self.x), (y, y)))
        assert check.compare(y, self.x).cosine == pytest.approx(1 - 2 * dot / (xx + yy), rel=1e-9)

    def test_tile_alone_and_its_coordinates(self):
        y = torch.ones(2, 100, 90, dtype=torch.float64)
        z = y.clone()
        z[1, 70, 40] = 1.5
        record = check.compare(z, y, tol=with_bounds(tile=0.01), tile=(32, 16))
        assert only(record) == "tile"
        assert record.worst_tile == (1, 2, 2) and record.worst_tile_origin == (1, 64, 32)
        # 100 rows in tiles of 32: the last 4 join the third tile, which then has 36 rows
        assert record.worst_tile_relative == pytest.approx(0.5 / math.sqrt(36 * 16), rel=1e-9)

    def test_drift_inside_the_element_bound_is_caught_by_tile_and_cosine(self):
        record = check.compare((self.x * 1.008).bfloat16(), self.x)
        assert record.mismatches == 0 and not record.passed
        assert {r.split(":")[0] for r in record.reasons} == {"cosine", "tile"}


class TestRecord:
    def test_ulp_counts_steps_of_the_format(self):
        for dtype, step in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10), (torch.float32, 2.0**-23)):
            e = torch.full((4, 4), 1.0, dtype=dtype)
            a = e.clone()
            a[2, 3] += 3 * step
            assert check.compare(a, e, tol=LOOSE).max_ulp == 3.0
        tiny = torch.full((2, 2), 2.0**-24, dtype=torch.float16)
        assert check.compare(2 * tiny, tiny, tol=LOOSE).max_ulp == 1.0  # subnormals keep the smallest step
        assert check.compare(tiny, tiny, dtype="nvfp4").max_ulp is None

    def test_ulp_agrees_with_the_integer_distance_of_fp32_codes(self):
        e = torch.randn(50, 31, generator=torch.Generator().manual_seed(4))
        a = (e.view(torch.int32) + 5).view(torch.float32)
        assert 2.5 <= check.compare(a, e, tol=LOOSE).max_ulp <= 5.0  # crossing a power of two halves a distance

    def test_to_dict_is_json_and_str_is_one_line(self):
        y = torch.ones(3, 5)
        y[1, 2] = math.nan
        record = check.compare(y, torch.ones(3, 5))
        plain = json.loads(json.dumps(record.to_dict(), allow_nan=False))
        assert plain["passed"] is False and plain["worst_actual"] == "nan" and plain["worst_index"] == [1, 2]
        assert plain["tol"]["reason"] == TOLERANCES["fp32"].reason
        assert "\n" not in str(record) and "FAILED" in str(record) and "[1, 2]" in str(record)

    def test_record_is_frozen(self):
        with pytest.raises(AttributeError):
            check.compare(torch.ones(2), torch.ones(2)).passed = False

    @pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 1), (1, 1, 5), (2, 3, 4, 5), (200, 1, 300)])
    def test_any_rank(self, shape):
        e = torch.ones(shape, dtype=torch.float64)
        assert check.compare(e.clone(), e).passed
        a = e.clone()
        a.view(-1)[-1] = 3.0
        record = check.compare(a, e)
        assert not record.passed and record.worst_index == tuple(n - 1 for n in shape)
        assert len(record.worst_tile_origin) == len(shape)

    def test_column_vector_is_one_row(self):
        """Elements of [T, 1] that cancelled are judged by the vector's scale, not each by its own."""
        e = torch.randn(500, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        e[17] = 1e-9
        assert check.compare((e + 1e-6).float(), e).passed

    def test_judged_as_the_coarser_format(self):
        x = torch.randn(9, 33)
        assert check.compare(x.bfloat16(), x).dtype == "bf16"
        assert check.compare(x, x.bfloat16().double()).dtype == "fp32"
        assert check.compare(x.to(torch.float8_e4m3fn), x.double()).dtype == "e4m3"

    def test_numpy_and_ml_dtypes(self):
        x = np.linspace(-2, 2, 12).reshape(3, 4)
        assert check.compare(x.astype(ml_dtypes.bfloat16), x).dtype == "bf16"
        assert check.compare(x.astype(np.float32), torch.from_numpy(x)).passed

    def test_integers_are_exact(self):
        e = torch.arange(35).reshape(5, 7)
        assert check.compare(e.clone(), e).passed
        a = e.clone()
        a[4, 6] += 1
        record = check.compare(a, e)
        assert not record.passed and record.dtype == "int" and record.max_ulp == 1

    def test_extremes_of_fp64_do_not_overflow_the_record(self):
        e = torch.full((4, 70), 1e300, dtype=torch.float64)
        e[1] = 1e-300
        assert check.compare(e.clone(), e).passed
        a = e.clone()
        a[1, 3] = 2e-300
        assert check.compare(a, e).worst_index == (1, 3)


@pytest.mark.parametrize(
    "actual,expected,options,named",
    [
        (torch.ones(2, 3), torch.ones(3, 2), {}, "actual.shape"),
        (torch.ones(2, 3), torch.ones(3), {}, "actual.shape"),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), {}, "actual.dtype"),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2), {}, "dtype"),
        (torch.ones(0, 3), torch.ones(0, 3), {}, "actual.shape"),
        ([1.0], torch.ones(1), {}, "actual"),
        (np.array(["a"]), np.array(["a"]), {}, "actual"),
        (torch.ones(2), torch.ones(2), {"dtype": "fp12"}, "dtype"),
        (torch.ones(2), torch.ones(2), {"dtype": "int"}, "dtype"),
        (torch.ones(2), torch.ones(2), {"tol": "loose"}, "dtype"),
        (torch.ones(2), torch.ones(2), {"tol": 0.1}, "tol"),
        (torch.ones(2), torch.ones(2), {"tile": (0, 4)}, "tile"),
        (torch.ones(2), torch.ones(2), {"tile": 128}, "tile"),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), {}, "actual"),
    ],
)
def test_bad_input_names_the_argument(actual, expected, options, named):
    with pytest.raises(ArgumentError) as caught:
        check.compare(actual, expected, **options)
    assert caught.value.name == named


def test_table_is_ordered_and_reasoned():
    assert list(TOLERANCES) == ["int", "fp64", "fp32", "fp16", "bf16", "e4m3", "e5m2", "nvfp4", "e2m1"]
    floats = list(TOLERANCES.values())[1:]
    for finer, wider in zip(floats, floats[1:], strict=False):
        assert finer.abs <= wider.abs and finer.rel <= wider.rel and finer.cosine <= wider.cosine
    assert all(len(t.reason) > 30 for t in TOLERANCES.values())
    with pytest.raises(ArgumentError):
        Tolerance("bad", abs=math.nan, rel=0, cosine=0, tile=0, reason="")


def test_spacing_matches_nextafter():
    x = torch.tensor([1e-45, 1e-39, 0.75, 1.0, 1.5, 2.0, 3e38])
    above = torch.nextafter(x.float(), torch.tensor(math.inf))
    below = x.float() - torch.nextafter(x.float(), torch.tensor(-math.inf))
    step = tolerances.spacing(x.double(), "fp32")
    up = above.double() - x.float().double()
    assert torch.equal(torch.where(torch.isinf(up), below.double(), up), step)


finite = st.floats(-1e6, 1e6, allow_subnormal=False, width=32)
arrays = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=finite)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(arrays)
def test_property_reflexive(x):
    assert check.compare(x.copy(), x).passed


@settings(max_examples=120, deadline=None, derandomize=True)
@given(arrays, st.floats(1e-8, 1.0), st.integers(0, 2**31))
def test_property_elements_and_cosine_are_symmetric(x, size, seed):
    noise = np.random.default_rng(seed).standard_normal(x.shape)
    y = (x + size * noise * (1 + np.abs(x))).astype(np.float32)
    there, back = check.compare(x, y), check.compare(y, x)
    assert there.mismatches == back.mismatches and there.worst_index == back.worst_index
    assert there.cosine == back.cosine and there.max_ulp == back.max_ulp and there.max_abs == back.max_abs


@settings(max_examples=80, deadline=None, derandomize=True)
@given(arrays, st.integers(-20, 20), st.integers(0, 2**31))
def test_property_scaling_by_a_power_of_two_changes_no_verdict(x, exponent, seed):
    x = x.astype(np.float64)
    y = x + 1e-11 * np.random.default_rng(seed).standard_normal(x.shape) * np.abs(x)
    factor = 2.0**exponent
    plain, scaled = check.compare(y, x), check.compare(y * factor, x * factor)
    assert plain.passed == scaled.passed and plain.mismatches == scaled.mismatches
    assert plain.worst_tile_relative == pytest.approx(scaled.worst_tile_relative, rel=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(arrays, st.data())
def test_property_any_nan_is_found(x, data):
    place = tuple(data.draw(st.integers(0, n - 1)) for n in x.shape)
    y = x.copy()
    y[place] = np.nan
    record = check.compare(y, x)
    assert not record.passed and record.worst_index == place


class TestWithinFactor:
    generator = torch.Generator().manual_seed(0)
    a = rows_of_different_scale((33, 257), 0).bfloat16()
    b = torch.randn(257, 71, generator=generator).bfloat16()
    oracle = a.double() @ b.double()
    peer = a @ b

    def test_same_quality_passes_and_added_noise_fails(self):
        assert check.within_factor(self.oracle.bfloat16(), self.peer, self.oracle).passed
        noisy = (self.oracle * (1 + 0.02 * torch.randn(self.oracle.shape, generator=self.generator))).bfloat16()
        result = check.within_factor(noisy, self.peer, self.oracle)
        assert not result.passed and result.rms_error > 2 * result.peer_rms_error and "FAILED" in str(result)

    def test_one_wrong_element_of_the_smallest_row_fails(self):
        bad = self.oracle.bfloat16()
        row = int(self.oracle.abs().amax(dim=1).argmin())
        col = int(self.oracle[row].abs().argmax())
        bad[row, col] = 0
        assert not check.within_factor(bad, self.peer, self.oracle).passed

    def test_lucky_peer_does_not_make_the_rule_impossible(self):
        exact = torch.full((4, 8), 1.5, dtype=torch.float64)
        peer = exact.bfloat16()
        one_step = peer.clone()
        one_step[2, 5] += 2.0**-7
        assert check.within_factor(one_step, peer, exact).passed
        two_steps = peer.clone()
        two_steps[2, 5] += 2.0**-6
        assert not check.within_factor(two_steps, peer, exact).passed

    def test_nan_is_not_an_error_of_size_zero(self):
        bad = self.peer.clone()
        bad[1, 1] = math.nan
        result = check.within_factor(bad, self.peer, self.oracle)
        assert not result.passed and result.nonfinite_mismatches == 1

    def test_value_on_an_all_zero_row_fails(self):
        oracle = self.oracle.clone()
        oracle[2] = 0
        bad = oracle.bfloat16()
        bad[2, 2] = 1e-3
        assert not check.within_factor(bad, oracle.bfloat16(), oracle).passed

    @pytest.mark.parametrize(
        "change,named",
        [
            ({"actual": "x"}, "actual"),
            ({"same_dtype_peer": torch.zeros(33, 71)}, "same_dtype_peer"),
            ({"oracle": torch.zeros(33, 71)}, "oracle"),
            ({"factor": 0.5}, "factor"),
            ({"oracle": torch.zeros(33, 70, dtype=torch.float64)}, "actual.shape"),
        ],
    )
    def test_bad_input(self, change, named):
        arguments = {"actual": self.peer, "same_dtype_peer": self.peer, "oracle": self.oracle, **change}
        with pytest.raises(ArgumentError) as caught:
            check.within_factor(**arguments)
        assert caught.value.name == named


def test_check_imports_nothing_of_the_lab_but_errors():
    import ast
    from pathlib import Path

    folder = Path(check.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("dsv4lib"):
                    assert name.startswith(("dsv4lib.check", "dsv4lib.errors")), f"{path.name} imports {name}"
