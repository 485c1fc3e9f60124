"""Strangers' PTX on numpy arrays: loading, packing arguments, results in place, errors that name the argument."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv4lib.emulator import gpu
from dsv4lib.emulator.errors import EmulatorError, LaunchError, MemoryFault, PtxSyntaxError
from dsv4lib.emulator.gpu.module import architecture_for
from dsv4lib.errors import ArgumentError

README = Path(gpu.__file__).parents[1] / "README.md"
HEADER = ".version 8.0\n.target sm_90\n.address_size 64\n"
SCALE = (
    HEADER
    + """
.visible .entry _Z5scalePKfPffj(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n)
{
  .reg .pred %p<2>; .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.f32 %f1, [a]; ld.param.u32 %r1, [n];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p1, %r5, %r1;
  @%p1 bra DONE;
  mul.wide.u32 %rd3, %r5, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
  ld.global.f32 %f2, [%rd4]; mul.f32 %f3, %f2, %f1; st.global.f32 [%rd5], %f3;
DONE:
  ret;
}
"""
)


def echo(param: str, size: int, extra: str = "") -> str:
    """A kernel that writes the bytes of its second parameter to its first."""
    copies = "".join(f"ld.param.b8 %h1, [value+{i}]; st.global.b8 [%rd1+{i}], %h1; " for i in range(size))
    return (
        HEADER + extra + f".visible .entry echo(.param .u64 out, .param {param}) {{ .reg .b64 %rd<4>; .reg .b16 %h<4>; "
        f"ld.param.u64 %rd1, [out]; {copies} ret; }}\n"
    )


def echoed(param: str, size: int, value: object) -> bytes:
    out = np.zeros(size, np.uint8)
    gpu.load(echo(param, size)).kernel().launch(1, 1, [out, value])
    return out.tobytes()


def test_a_kernel_runs_on_arrays():
    x, y = np.arange(500, dtype=np.float32), np.zeros(500, np.float32)
    kernel = gpu.load(SCALE).kernel("scale")
    result = kernel.launch((4,), [128, 1, 1], [x, y, 2.0, 499], checks="race")
    assert np.array_equal(y[:499], 2 * x[:499]) and y[499] == 0
    assert result.hazards == [] and result.instructions > 0
    kernel.launch(4, 128, {"n": 500, "a": np.float32(-1), "x": x, "y": y})
    assert np.array_equal(y, -x)


def test_the_example_of_the_readme(tmp_path, monkeypatch):
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "gpu.load" in text]
    assert block.count("\n") <= 10
    (tmp_path / "scale.ptx").write_text(SCALE)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, "README", "exec"), names)
    assert names["result"].hazards == [] and np.array_equal(names["y"], 2 * names["x"])


def test_neither_torch_nor_the_dsl_is_imported():
    code = f"import sys; from dsv4lib import emulator; emulator.gpu.load({SCALE!r})"
    code += "; print('torch' in sys.modules, 'cutlass' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    x, y = torch.arange(64.0), torch.zeros(64)
    gpu.load(SCALE).kernel().launch(1, 64, [x, y, 3, 64])
    assert torch.equal(y, 3 * x)
    with pytest.raises(ArgumentError, match="on the CPU"):
        gpu.load(SCALE).kernel().launch(1, 64, [x.to("meta"), y, 3, 64])


@pytest.mark.parametrize("form", ["path", "text path", "bytes", "zero at the end"])
def test_where_ptx_comes_from(tmp_path, form):
    path = tmp_path / "scale.ptx"
    path.write_bytes(SCALE.encode() + b"\0")
    source = {"path": path, "text path": str(path), "bytes": SCALE.encode(), "zero at the end": SCALE + "\0"}[form]
    assert list(gpu.load(source).kernels) == ["_Z5scalePKfPffj"]


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("/no/such/file.ptx", ArgumentError, "path of a file"),
        (17, ArgumentError, "path of a file"),
        ("a\0b", ArgumentError, "path of a file"),
        (b"\xff\xfe\x00", PtxSyntaxError, "byte 0"),
        (HEADER + ".frobnicate 3;\n", PtxSyntaxError, "unknown directive"),
        (HEADER + ".visible .entry k(.param .u32 a, .param .u32 a) { ret; }\n", PtxSyntaxError, "declared twice"),
        (HEADER + "\0.visible .entry k() { ret; }\n", PtxSyntaxError, "unknown directive"),
        (HEADER + ".visible .entry k() { .frob x; ret; }\n", PtxSyntaxError, "declaration"),
        (SCALE.replace("sm_90", "sm_120"), LaunchError, "no architecture"),
        (SCALE.replace("sm_90", "compute_x"), LaunchError, "no architecture"),
    ],
)
def test_hostile_ptx(source, error, words):
    with pytest.raises(error, match=words):
        gpu.load(source)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mov.u32 %r1, %r2, %r3;", "mov.u32 takes operands of another number or form"),
        ("mov.b64 {%r1, %r2, %r3}, %rd1;", "mov.b64 takes operands"),
        ("ld.global.u32 %r1;", "ld.global.u32"),
        ("bar.warp.sync;", "member mask"),
        ("bar.warp.sync [%rd1];", "member mask"),
        ("bar.sync;", "bar.sync cannot be carried out with these operands"),
        ("mbarrier.init.shared.b64 [%r1], 1, 2;", "mbarrier.init"),
        ("frobnicate.u32 %r1;", "frobnicate"),
        ("add.u32 %r1, %r2;", "add.u32"),
    ],
)
def test_operands_that_an_instruction_does_not_take(line, words):
    """Each error is the emulator's own, with the line."""
    text = HEADER + ".visible .entry k() { .reg .b32 %r<4>; .reg .b64 %rd<4>;\n" + line + "\nret; }"
    with pytest.raises(EmulatorError, match=words) as raised:
        gpu.load(text).kernel().launch(1, 32)
    assert raised.value.place is not None and raised.value.place.ptx_line == 5


@pytest.mark.parametrize("text", ["1\n2", "1, ", "99999999999", "-1"])
def test_entry_directives_that_are_no_numbers(text):
    with pytest.raises(PtxSyntaxError, match="directive"):
        gpu.load(HEADER + f".visible .entry k() .reqntid {text} {{ ret; }}")


def test_many_directives_are_read_in_linear_time():
    """Not by time: 20,000 variables once took minutes, and this would end by the limit of the whole test."""
    text = (
        HEADER
        + "".join(f".global .align 4 .b32 v{i} = {i};\n" for i in range(20000))
        + "\n.visible .entry k() { ret; }"
    )
    assert len(gpu.load(text).ir.variables) == 20000


@pytest.mark.parametrize(
    ("target", "arch"),
    [("sm_70", "sm_80"), ("sm_90", "sm_90a"), ("sm_90a", "sm_90a"), ("sm_100f", "sm_100a"), ("sm_103", "sm_103a")],
)
def test_architecture_of_a_target(target, arch):
    assert architecture_for(target) == arch
    assert gpu.load(SCALE.replace("sm_90", target)).device.arch.name == arch


@pytest.mark.parametrize(
    ("param", "size", "value", "raw"),
    [
        (".f32 value", 4, 1.5, np.float32(1.5).tobytes()),
        (".b32 value", 4, 1.5, np.float32(1.5).tobytes()),  # LLVM declares floats so
        (".f32 value", 4, 3, np.float32(3).tobytes()),
        (".f32 value", 4, np.int64(3), np.float32(3).tobytes()),
        (".f32 value", 4, np.int32(3), np.float32(3).tobytes()),
        (".f64 value", 8, 1.5, np.float64(1.5).tobytes()),
        (".u32 value", 4, -1, b"\xff" * 4),
        (".s64 value", 8, -2, (-2).to_bytes(8, "little", signed=True)),
        (".u8 value", 1, True, b"\1"),
        (".u16 value", 2, np.float16(1.5), np.float16(1.5).tobytes()),
        (".u64 value", 8, np.int32(-3), (-3).to_bytes(8, "little", signed=True)),
        (".align 8 .b8 value[12]", 12, bytes(range(12)), bytes(range(12))),
        (".align 8 .b8 value[12]", 12, gpu.Struct({4: np.int32(7)}), b"\0" * 4 + b"\7\0\0\0" + b"\0" * 4),
    ],
)
def test_scalars_and_structs(param, size, value, raw):
    assert echoed(param, size, value) == raw


def test_a_ctypes_struct():
    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_uint32), ("b", ctypes.c_float)]

    assert echoed(".align 4 .b8 value[8]", 8, Pair(3, 0.5)) == bytes(Pair(3, 0.5))


@pytest.mark.parametrize(
    ("param", "size", "value", "words"),
    [
        (".u32 value", 4, 1 << 32, "whole number from"),
        (".u32 value", 4, -(1 << 31) - 1, "whole number from"),
        (".u32 value", 4, 1.5, "what .u32 holds"),
        (".b16 value", 2, 1.5, "numpy scalar"),
        (".u32 value", 4, "3", "a number"),
        (".u32 value", 4, None, "a number"),
        (".u32 value", 4, np.zeros(3), "4 bytes"),
        (".u64 value", 8, np.array([object()]), "array of numbers"),
        (".align 8 .b8 value[12]", 12, 7, "bytes or a Struct"),
        (".align 8 .b8 value[12]", 12, b"123", "12 bytes"),
        (".align 8 .b8 value[12]", 12, gpu.Struct({10: np.int32(1)}), "12 bytes"),
        (".align 8 .b8 value[12]", 12, gpu.Struct({0: np.int32(1), 2: np.int32(1)}), "do not overlap"),
        (".align 8 .b8 value[12]", 12, gpu.Struct({0: 1}), "numpy scalar"),
        (".align 8 .b8 value[12]", 12, gpu.Struct({1 << 40: np.int32(1)}), "within the parameters"),
    ],
)
def test_values_that_do_not_fit(param, size, value, words):
    with pytest.raises(ArgumentError, match=words):
        echoed(param, size, value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"grid": 0}, "grid"), ({"grid": (1, 1, 1, 1)}, "grid"), ({"grid": 2**31}, "grid"), ({"grid": 1.0}, "grid"),
        ({"block": 1025}, "1024 threads"), ({"block": (1, 1, 65)}, "z <= 64"), ({"grid": (1, 65536)}, "65535"),
        ({"shared": -1}, "shared"), ({"shared": 1 << 20}, "shared memory"), ({"cluster": 3}, "multiple of cluster"),
        ({"args": []}, "4 values"), ({"args": {"x": 1}}, "4 values"), ({"args": "abcd"}, "4 values"),
        ({"checks": "some"}, "checks"), ({"cooperative": 1}, "cooperative"),
    ],
)  # fmt: skip
def test_launches_that_are_refused(wrong, words):
    x = np.zeros(64, np.float32)
    options = {"grid": 1, "block": 64, "args": [x, x, 1.0, 64], **wrong}
    with pytest.raises((ArgumentError, LaunchError), match=words):
        gpu.load(SCALE).kernel().launch(**options)


def test_checks_of_one_launch_are_not_those_of_the_next():
    x = np.arange(65, dtype=np.float32)
    kernel = gpu.load(SCALE).kernel()
    for checks, kinds in (("race", {"race_global"}), (None, set()), ("off", set()), ("race", {"race_global"})):
        result = kernel.launch(1, 64, [x[:-1], x[1:], 1.0, 64], checks=checks)
        assert {h.kind for h in result.hazards} == kinds


def test_a_kernel_by_name():
    module = gpu.load(SCALE + SCALE[len(HEADER) :].replace("5scale", "6scaler"))
    assert module.kernel("scale").name == "_Z5scalePKfPffj" and module.kernel("scaler").name == "_Z6scalerPKfPffj"
    for name in ("", "scal", "other"):
        with pytest.raises(ArgumentError, match="kernel"):
            module.kernel(name)


def test_stores_past_the_end_fault_and_loads_are_reported():
    kernel, x, y = gpu.load(SCALE).kernel(), np.ones(64, np.float32), np.zeros(65, np.float32)
    found = kernel.launch(1, 96, [x, y, 1.0, 65]).hazards
    assert [h.kind for h in found] == ["global_read_past_end"]
    with pytest.raises(MemoryFault, match="past the last byte of"):
        kernel.launch(1, 96, [y, np.zeros(64, np.float32), 1.0, 65])
    assert kernel.module.device._allocated == 0  # also after the fault nothing is left


def test_a_view_keeps_its_alignment_and_what_overlaps_stays_one():
    x = np.arange(65, dtype=np.float32)
    kernel = gpu.load(SCALE).kernel()
    result = kernel.launch(1, 64, [x[:-1], x[1:], 1.0, 64], checks="race")
    assert {h.kind for h in result.hazards} == {"race_global"}  # thread i writes what i + 1 reads
    vector = SCALE.replace("ld.global.f32 %f2, [%rd4]", "ld.global.v2.f32 {%f2, %f3}, [%rd1]")
    gpu.load(vector).kernel().launch(1, 32, [x[2:], np.zeros(64, np.float32), 1.0, 32])
    with pytest.raises(MemoryFault, match="not a multiple of 8"):
        gpu.load(vector).kernel().launch(1, 32, [x[1:], np.zeros(64, np.float32), 1.0, 32])


def test_read_only_arrays_and_arrays_without_elements():
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    y.flags.writeable = False
    with pytest.raises(MemoryFault, match="read-only"):
        gpu.load(SCALE).kernel().launch(1, 64, [x, y, 1.0, 64])
    empty = np.zeros(0, np.float32)
    gpu.load(SCALE).kernel().launch(1, 64, [empty, empty, 1.0, 0])
    with pytest.raises(MemoryFault):
        gpu.load(SCALE).kernel().launch(1, 64, [x, empty, 1.0, 1])


def test_results_are_there_also_when_a_launch_is_stopped():
    x, y = np.ones(128, np.float32), np.zeros(32, np.float32)
    with pytest.raises(MemoryFault):
        gpu.load(SCALE).kernel().launch(1, 64, [x, y, 5.0, 64])
    assert (y == 5).all()


def test_memory_has_a_limit():
    x = np.zeros(1000, np.float32)
    with pytest.raises(ArgumentError, match="memory_limit"):
        gpu.load(SCALE, memory_limit=3999).kernel().launch(1, 64, [x, x, 1.0, 64])
    gpu.load(SCALE, memory_limit=4000).kernel().launch(1, 64, [x, x, 1.0, 64])


def test_variables_keep_their_value_between_launches():
    text = HEADER + (
        ".global .align 4 .u32 count = 5; .const .align 4 .u32 step = 1;\n"
        ".visible .entry add() { .reg .b32 %r<4>; ld.const.u32 %r1, [step]; ld.global.u32 %r2, [count]; "
        "add.u32 %r2, %r2, %r1; st.global.u32 [count], %r2; ret; }"
    )
    module = gpu.load(text)
    module.kernel().launch(1, 1)
    module.variable("step").view(np.uint32)[0] = 10
    module.kernel().launch(1, 1)
    assert module.variable("count").view(np.uint32)[0] == 16
    with pytest.raises(ArgumentError, match="count, step"):
        module.variable("steps")


COPY_BOX = """
.visible .entry copy(.param .u64 out, .param .align 64 .b8 map[128])
{
  .reg .b64 %rd<4>; .reg .b32 %r<8>; .reg .pred %p<4>;
  .shared .align 1024 .b8 sm[1024]; .shared .align 8 .b64 bar;
  ld.param.u64 %rd1, [out]; mov.b64 %rd2, map; mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mov.u32 %r3, bar;
  setp.ne.u32 %p1, %r1, 0;
  @!%p1 mbarrier.init.shared.b64 [%r3], 1;
  bar.sync 0;
  @!%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;
  @!%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd2, {4, 1}], [%r3];
W: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
  @!%p2 bra W;
  shl.b32 %r4, %r1, 2; add.s32 %r5, %r2, %r4; ld.shared.b32 %r6, [%r5];
  cvt.u64.u32 %rd3, %r4; add.s64 %rd1, %rd1, %rd3; st.global.b32 [%rd1], %r6;
  ret;
}
"""


def test_a_tensor_map_by_description():
    x, out = np.arange(20 * 36, dtype=np.float32).reshape(20, 36), np.zeros((8, 8), np.float32)
    kernel = gpu.load(HEADER.replace("8.0", "8.6") + COPY_BOX).kernel()
    result = kernel.launch(1, 64, [out, gpu.TensorMap(x, box=(8, 8))], checks="race")
    assert np.array_equal(out, x[1:9, 4:12]) and result.hazards == []
    kernel.launch(1, 64, [out, gpu.TensorMap(x, box=(8, 8), dims=(36, 5), strides=(144,), offset=144)])
    assert np.array_equal(out[:4], x[2:6, 4:12]) and not out[4:].any()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"box": (8,)}, "boxDim"), ({"box": (8, 300)}, "boxDim"), ({"box": (8, -1)}, "box"), ({"box": "88"}, "box"),
        ({"swizzle": 48}, "swizzle"), ({"swizzle": []}, "swizzle"), ({"dtype": "f31"}, "dtype"),
        ({"strides": (100,)}, "globalStrides"), ({"strides": (16, 16)}, "strides"), ({"offset": 4}, "globalAddress"),
        ({"dims": (0, 4)}, "globalDim"), ({"traversal": (1,)}, "traversal"), ({"fill": 7}, "oobFill"),
        ({"interleave": 9}, "interleave"), ({"tensor": [1, 2]}, "tensor"),
    ],
)  # fmt: skip
def test_tensor_maps_that_are_refused(wrong, words):
    x, out = np.zeros((20, 36), np.float32), np.zeros((8, 8), np.float32)
    description = gpu.TensorMap(**{"tensor": x, "box": (8, 8), **wrong})
    with pytest.raises(ArgumentError, match=words):
        gpu.load(HEADER.replace("8.0", "8.6") + COPY_BOX).kernel().launch(1, 64, [out, description])
