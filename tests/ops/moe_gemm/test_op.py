"""The op dsv4::moe_gemm: the emulated kernel against the reference back end, what is chosen, what is refused."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.moe_gemm.inputs import LIMIT, case
from dsv4lib.ops.moe_gemm.op import EXPECTED, TILES, Operand, largest, moe_gemm, tile_of
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm
from dsv4lib.predict.moe import loads


def call_of(options, counts, features, k):
    kernel = MoeGemm(**options)
    call = case(kernel, counts, features, k).call
    given = Operand(call.x, call.x_scales), Operand(call.w, call.w_scales), call.offsets, call.counts
    keys = {name: getattr(call, name) for name in ("alpha", "alpha_up", "routing", "out_global")}
    return given, {**keys, "mode": kernel.mode_name, "swiglu": kernel.swiglu, "out_format": kernel.out, "limit": LIMIT}


def test_emulator_and_reference_agree():
    given, keys = call_of({"swiglu": True, "routed": True, "out": "nvfp4"}, [5, 0, 40], 128, 256)
    rows = torch.cat([torch.arange(5), torch.arange(128, 168)])
    ours, truth = (moe_gemm(*given, **keys, expected=20, backend=b).codes[rows] for b in ("emulator", "reference"))
    assert (ours != truth).double().mean() <= 1e-3


NAN_SCALES = {"nvfp4": 0x7F, "mxfp8": 255}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("out", ["nvfp4", "mxfp8", "bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(out, bad):
    """NaN in gate, in up and in a routing weight, Inf in a weight: what shares a scale with it is NaN, as in `formats`.

    An Inf of gate is clamped like every number; one that comes after the clamp is not.
    """
    given, keys = call_of({"mode": "bf16", "swiglu": True, "routed": True, "out": out}, [40], 128, 128)
    x, w = (torch.nan_to_num(one.codes) for one in given[:2])
    x[3, 5] = bad  # a row whose sums are all NaN, or all +-Inf
    w[0, 40, 7] = bad  # up of feature 16
    w[0, 19, 9] = bad  # gate of feature 11
    keys["routing"][21] = bad
    given = Operand(x), Operand(w), *given[2:]
    found, want = (moe_gemm(*given, **keys, backend=name) for name in ("emulator", "reference"))
    rows = torch.arange(40)
    if out == "bf16":
        a, b = found.codes[rows], want.codes[rows]
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()) and b.isnan().any()
        return
    assert (found.codes[rows] != want.codes[rows]).double().mean() <= 1e-3
    columns = 64 // (16 if out == "nvfp4" else 32)
    a, b = (scale_swizzle.unswizzle(one.scales, 128, columns)[rows] == NAN_SCALES[out] for one in (found, want))
    assert torch.equal(a, b) and 10 <= b.sum() and not b.all()


def test_tiles_follow_the_expected_tokens():
    """A tile holds the largest of many groups; what 128 or more tokens share, a pair takes, if it has the features."""
    assert [tile_of(n, 4096) for n in (1, 33, 65, 128, 400)] == [(64, 1), (64, 1), (128, 2), (128, 2), (192, 2)]
    assert tile_of(400, 128) == (192, 1)
    assert [largest(n) for n in (0, 1, 16, 96)] == [0, 4, 28, 126]
    for experts, count in ((256, 512), (256, 4096), (384, 4096)):
        assert sum(n > largest(-(-6 * count // experts)) for n in loads(experts, count)) <= 1
    assert {tile_of(largest(n), 256)[0] for n in EXPECTED} == set(TILES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("expected", "kernel"), [(None, "128, fp32, alpha, pair"), (20, "64, fp32, alpha")])
def test_the_kernel_is_the_one_of_the_expected_tokens(monkeypatch, expected, kernel):
    """None: the rows there are; a number: what groups have on average."""
    seen = []
    get = compile_cache.CompileCache.get
    monkeypatch.setattr(compile_cache.CompileCache, "get", lambda *a: seen.append(a[2]) or get(*a))
    given, keys = call_of({"out": "fp32"}, [5], 256, 64)
    given = Operand(given[0].codes[:64], given[0].scales), *given[1:]
    moe_gemm(*given, **keys, expected=expected, backend="emulator")
    assert repr(MoeGemm(**seen[0])) == f"MoeGemm(nvfp4, {kernel})"


def test_fake_tensors_pass():
    given, keys = call_of({"out": "fp32"}, [5], 16, 64)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = [type(g)(*map(mode.from_tensor, g)) if isinstance(g, tuple) else mode.from_tensor(g) for g in given]
        keys["alpha"] = mode.from_tensor(keys["alpha"])
        assert moe_gemm(*fake, **keys).codes.shape == (128, 16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mode", {"mode": "fp4"}),
        ("out_format", {"out_format": "fp16"}),
        ("routing", {"routing": torch.ones(128)}),
        ("counts", {"counts": torch.tensor([-1], dtype=torch.int32)}),
        ("offsets", {"offsets": torch.tensor([64], dtype=torch.int32)}),
        ("offsets", {"counts": torch.tensor([129], dtype=torch.int32)}),
        ("alpha.shape", {"alpha": torch.ones(2)}),
    ],
)
def test_what_is_refused(name, change):
    (x, w, offsets, counts), keys = call_of({"out": "fp32"}, [5], 16, 64)
    given = {"x": x, "w": w, "offsets": offsets, "counts": counts, **keys, **change}
    with pytest.raises((ArgumentError,)) as caught:
        moe_gemm(**given, backend="reference")
    assert caught.value.name == name
