"""Launch descriptions: what they can say, and errors that name the key for what they must not."""

import numpy as np
import pytest

from dsv4lib.emulator import gpu
from dsv4lib.emulator.sanitize import description, skeleton
from dsv4lib.emulator.sanitize.description import argument
from dsv4lib.errors import ArgumentError
from tests.emulator.sanitize.kernels import DESCRIPTION, HEADER, racy


def read(folder, text):
    path = folder / "given.toml"
    path.write_text(text)
    return description.read(path)


def test_a_description_is_read_whole(tmp_path):
    np.save(tmp_path / "w.npy", np.arange(6, dtype=np.int16).reshape(2, 3))
    text = (
        DESCRIPTION
        + """
[tensors.w]
file = "w.npy"
expect = {tensor = "x", rtol = 1e-3, atol = 1}
[maps.m]
tensor = "x"
box = [8]
swizzle = 32
dims = [64]
"""
    )
    found = read(tmp_path, text)
    assert found.source == tmp_path / "sum.ptx" and found.arch is None and found.options == ()
    assert found.tensors["w"].shape == (2, 3) and found.tensors["w"].dtype == "s16"
    assert found.tensors["w"].expect == description.Expectation("tensor", "x", 0.0, 1e-3, 1.0)
    assert found.tensors["x"].make().view(np.float32).tolist() == list(range(64))
    assert found.maps["m"]["box"] == (8,) and found.maps["m"]["swizzle"] == 32 and found.maps["m"]["dtype"] == "f32"
    (launch,) = found.launches
    assert (launch.kernel, launch.grid, launch.block, launch.cluster) == ("sum", (1,), (64,), None)


HOSTILE = {
    "not TOML": ("[[", "TOML"),
    "nested without end": ("x = " + "[" * 5000 + "]" * 5000, "nested|TOML"),
    "a number of 5,000 digits": (DESCRIPTION.replace("grid = 1", "grid = " + "9" * 5000), "TOML|grid"),
    "a huge number": (DESCRIPTION.replace("grid = 1", "grid = 0x" + "f" * 9000), "grid=.a number of 36000 bits"),
    "negative": (DESCRIPTION.replace("grid = 1", "grid = [-1]"), r"launch\[0\].grid=\[-1\]"),
    "zero": (DESCRIPTION.replace("block = 64", "block = 0"), "block"),
    "four extents": (DESCRIPTION.replace("grid = 1", "grid = [1, 1, 1, 1]"), "grid"),
    "a float": (DESCRIPTION.replace("grid = 1", "grid = 1.5"), "grid"),
    "true": (DESCRIPTION.replace("grid = 1", "grid = true"), "grid"),
    "shared": (DESCRIPTION.replace("shared = 0", "shared = -1"), "shared"),
    "a wrong key": (DESCRIPTION.replace("grid = 1", "gird = 1\ngrid = 1"), "the nearest name is grid"),
    "a wrong key at the top": ("tensor = 1\n" + DESCRIPTION, "the nearest name is tensors"),
    "a missing key": (DESCRIPTION.replace("grid = 1", ""), "grid=None"),
    "no launch": ("source = 'x.ptx'", "launch"),
    "a source of another kind": (DESCRIPTION.replace("sum.ptx", "/etc/passwd"), "source='passwd'"),
    "a dtype": (DESCRIPTION.replace('fill = "nan"', 'dtype = "f31"'), "tensors.out.dtype"),
    "a fill": (DESCRIPTION.replace('"nan"', '"nnan"'), "tensors.out.fill"),
    "a rank": (DESCRIPTION.replace("shape = [64]", f"shape = {[1] * 9}", 1), "tensors.x.shape"),
    "a huge shape": (DESCRIPTION.replace("shape = [64]", "shape = [1099511627776]", 1), "tensors.x.shape"),
    "huge in all": (DESCRIPTION.replace("shape = [64]", "shape = [1000000, 1000000]", 1), "tensors=4000000000256"),
    "a negative shape": (DESCRIPTION.replace("shape = [64]", "shape = [-64]", 1), "tensors.x.shape"),
    "a seed": (DESCRIPTION.replace('"nan"', '"bits"\nseed = -1'), "seed"),
    "bounds": (DESCRIPTION.replace('"nan"', '"integers"\nlow = 3\nhigh = 2'), "low"),
    "infinite bounds": (DESCRIPTION.replace('"nan"', '"uniform"\nlow = -inf'), "low"),
    "a path as a name": (DESCRIPTION + '[tensors."../x"]\nshape = 1\n', "letters, digits and underscores"),
    "a file that is not there": (DESCRIPTION + '[tensors.w]\nfile = "none.npy"\n', "tensors.w.file"),
    "a table that is none": ("tensors = 3\n", "tensors=3"),
    "a launch that is none": ("launch = [3]\n", r"launch\[0\]=3"),
    "args": (DESCRIPTION.replace('["x", "out"]', '"x"'), "args"),
    "options": ("options = [1]\n" + DESCRIPTION, "options"),
    "expect of nothing": (DESCRIPTION.replace('"nan"', '"nan"\nexpect = {}'), "expect"),
    "expect of two things": (DESCRIPTION.replace('"nan"', '"nan"\nexpect = {value = 1, tensor = "x"}'), "expect"),
    "expect of an unknown tensor": (DESCRIPTION.replace('"nan"', '"nan"\nexpect = {tensor = "y"}'), "expect.tensor"),
    "a negative tolerance": (DESCRIPTION.replace('"nan"', '"nan"\nexpect = {value = 1, rtol = -1}'), "rtol"),
    "a map of nothing": (DESCRIPTION + '[maps.m]\ntensor = "y"\nbox = [1]\n', "maps.m.tensor"),
    "a box": (DESCRIPTION + '[maps.m]\ntensor = "x"\nbox = [0]\n', "maps.m.box"),
    "a swizzle": (DESCRIPTION + '[maps.m]\ntensor = "x"\nbox = [8]\nswizzle = true\n', "maps.m.swizzle"),
    "one name twice": (DESCRIPTION + '[maps.x]\ntensor = "x"\nbox = [8]\n', "a name that no tensor has"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_descriptions(tmp_path, case):
    text, words = HOSTILE[case]
    with pytest.raises(ArgumentError, match=words) as raised:
        read(tmp_path, text)
    assert len(str(raised.value)) < 1000


def test_no_file_and_a_file_that_is_too_big(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ArgumentError, match="TOML file"):
            description.read(path)
    with pytest.raises(ArgumentError, match="TOML file"):
        read(tmp_path, "#" * (1 << 20) + "\n")
    (tmp_path / "given.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="TOML"):
        description.read(tmp_path / "given.toml")


ARRAYS = {"x": np.arange(4, dtype=np.uint32)}
MAPS = {"m": {"tensor": "x", "box": (8,)}}


def test_arguments():
    def made(value):
        return argument("a", value, ARRAYS, MAPS)

    assert made("x") is ARRAYS["x"] and made(3) == 3 and made(2.5) == 2.5
    assert made("m") == gpu.TensorMap(ARRAYS["x"], (8,))
    assert made({"tensor": "x", "offset": 8}) == gpu.Pointer(ARRAYS["x"], 8)
    assert made({"value": 1.5, "dtype": "bf16"}) == b"\xc0\x3f"
    assert (
        made({"value": -1, "dtype": "s64"}) == b"\xff" * 8 and made({"value": 2**64 - 1, "dtype": "u64"}) == b"\xff" * 8
    )
    assert made({"bytes": "00 ff"}) == b"\0\xff"
    fields = made({"fields": [{"at": 8, "value": 7, "dtype": "u16"}, {"at": 0, "tensor": "x"}, {"at": 64, "map": "m"}]})
    assert fields.fields[8] == b"\7\0" and fields.fields[0] == gpu.Pointer(ARRAYS["x"], 0)
    assert fields.fields[64] == made("m")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("y", "a tensor or map: x, m"), (1 << 64, "64 bits"), ([1], "a name, a number or a table"),
        ({}, "one of tensor"),
        ({"tensor": "y"}, "a.tensor"), ({"tensor": "x", "offset": -1}, "a.offset"), ({"tensor": "m"}, "a.tensor"),
        ({"value": 1}, "a.dtype"), ({"value": 256, "dtype": "u8"}, "what u8 holds"), ({"bytes": "0g"}, "hexadecimal"),
        ({"value": float("nan"), "dtype": "f32"}, "a.value"), ({"value": 1, "dtype": "f32", "offset": 3}, "a.offset"),
        ({"tensor": "x", "value": 1}, "one of tensor"), ({"fields": [1]}, r"a.fields\[0\]"), ({"fields": 1}, "fields"),
        ({"fields": [{"at": 0, "tensor": "x"}, {"at": 0, "tensor": "x"}]}, "an offset of its own"),
        ({"fields": [{"at": 40000, "tensor": "x"}]}, "at"), ({"fields": [{"tensor": "x"}]}, "at"),
        ({"fields": [], "size": 3}, "size"), ({"bytes": 3}, "a text"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(value, words):
    with pytest.raises(ArgumentError, match=words):
        argument("a", value, ARRAYS, MAPS)


# --- skeletons --------------------------------------------------------------------------------------------------------


def test_a_skeleton_can_be_read_and_launched(tmp_path):
    """Pointers are found by their use; what is left to fill in has values that a launch accepts."""
    module = gpu.load(racy(tmp_path))
    found = read(tmp_path, skeleton.describe(module, "sum.ptx"))
    assert list(found.tensors) == ["param_0", "param_1"] and found.tensors["param_0"].dtype == "f32"
    (launch,) = found.launches
    assert launch.kernel == "_Z3sumPKfPf" and launch.block == (64, 1, 1) and launch.args == ["param_0", "param_1"]
    arrays = {name: one.make() for name, one in found.tensors.items()}
    args = [argument("a", value, arrays, found.maps) for value in launch.args]
    module.kernel().launch(launch.grid, launch.block, args)


MIXED = (
    HEADER
    + """
.visible .entry mixed(.param .align 8 .b8 view[24], .param .align 64 .b8 map[128], .param .f32 scale, .param .u64 count,
  .param .u64 .ptr .global .align 16 hint, .param .align 8 .b8 unused[40]) .reqnctapercluster 2, 1, 1 .maxntid 96
{
  .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .b16 %h<4>;
  ld.param.u64 %rd1, [view]; ld.param.v2.u32 {%r1, %r2}, [view+8]; ld.param.u64 %rd3, [count];
  cvta.to.global.u64 %rd2, %rd1; add.s64 %rd4, %rd2, %rd3; st.global.u16 [%rd4], %h1;
  ret;
}
.visible .entry other() { ret; }
"""
)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("_Z1kPK13__nv_bfloat16i", "bf16"),  # k(__nv_bfloat16 const*, int)
        ("_Z1kPKhi", "u8"),
        ("_Z1kILb1EEvPfi", "f32"),  # void k<true>(float*, int), or k<(bool)1>
        ("_Z1kP4Tilei", "u16"),  # a type that is not known: by the store
        ("k", "u16"),
    ],
)
def test_a_skeleton_reads_the_signature(tmp_path, name, dtype):
    text = HEADER + (
        f".visible .entry {name}(.param .u64 a, .param .u32 n) {{ .reg .b64 %rd<4>; .reg .b16 %h<4>; "
        "ld.param.u64 %rd1, [a]; st.global.u16 [%rd1], %h1; ret; }\n"
    )
    module = gpu.load(text)
    if name != "k" and module.kernel().title == name:
        pytest.skip("no C++ runtime library here demangles names")
    found = read(tmp_path, skeleton.describe(module, "sum.ptx"))
    assert [one.dtype for one in found.tensors.values()] == [dtype]


def test_a_skeleton_knows_structs_maps_and_shapes(tmp_path):
    module = gpu.load(MIXED)
    found = read(tmp_path, skeleton.describe(module, "sum.ptx"))
    assert {name: one.dtype for name, one in found.tensors.items()} == {
        "k0_view_at_0": "u16",
        "k0_map_data": "bf16",
        "k0_hint": "f32",
    }
    assert list(found.maps) == ["k0_map"]
    first, second = found.launches
    assert first.cluster == (2, 1, 1) and first.block == (96, 1, 1) and (second.kernel, second.args) == ("other", [])
    assert first.args[0]["fields"] == [
        {"at": 0, "tensor": "k0_view_at_0"},
        {"at": 8, "value": 0, "dtype": "u32"},
        {"at": 12, "value": 0, "dtype": "u32"},
    ]
    assert first.args[1:] == ["k0_map", 1.0, 1, "k0_hint", {"fields": []}]
