"""Every wrong argument of the public interface is refused with its name, its value and what is allowed."""

import math

import pytest
import torch

cute = pytest.importorskip("cutlass.cute")
from cutlass.cute.runtime import from_dlpack  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from dsv4lib import emulator  # noqa: E402
from dsv4lib.dsl.compile import compile_for  # noqa: E402
from dsv4lib.emulator.driver.symbols import RUNTIME  # noqa: E402
from dsv4lib.errors import ArgumentError  # noqa: E402
from dsv4lib.lab import cli  # noqa: E402

BAD_SETTINGS = {
    "arch": ["sm_75", "", None, 100, ["sm_100a"], "SM_100A"],
    "seed": [-1, 1.0, "0", True, None],
    "schedule": ["fifo", None, 0, ["random"], "hold:", "hold:x", "hold:3@-1", "hold:3,", "3@1"],
    "checks": ["everything", None, 1, True, ["race"], ""],
    "fatal": ["nonsense", ["error", "nonsense"], 5, None, [1], {"error": 1}],
    "padding": [-1, 3, 1.0, True, "512", None],
    "sm_count": [0, -1, 1.5, True, "148"],
    "ctas": [[], "000", 5, [(0, 0)], [(0, 0, -1)], [(0, 0, 0.5)], [0], [(0, 0, True)], {(0, 0, 0): 1}],
    "trace": [1, None, "yes"],
    "instruction_limit": [0, -5, 1.5, True, "10", math.inf],
    "memory_limit": [0, -5, 1.5, True, "10", math.inf],
    "time_limit": [0, -1.0, math.nan, True, "10"],
    "cores": [0, -1, 1.5, True, "2"],
    "shims": [1, None],
    "default_device": ["meta", None, 0, ["cuda"]],
}
CASES = [(name, value) for name, values in BAD_SETTINGS.items() for value in values]


def refused(error, name):
    """The error names the argument, and says what is allowed."""
    assert error.value.name == name and str(error.value).startswith(f"{name}=")
    assert len(error.value.allowed) > 3
    assert not RUNTIME.devices


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{n}={v!r}" for n, v in CASES])
def test_device_and_devices(name, value):
    arguments = {name: value}
    with pytest.raises(ArgumentError) as error, emulator.device(**arguments):
        pass
    refused(error, name)
    with pytest.raises(ArgumentError) as error, emulator.devices(2, **arguments):
        pass
    refused(error, name)


@pytest.mark.parametrize("call", [emulator.device, lambda **k: emulator.devices(2, **k)])
def test_unknown_arguments(call):
    with pytest.raises(TypeError, match="sms"), call(sms=3):
        pass


@cute.kernel
def _fill(a: cute.Tensor, value: cute.Float32):
    a[cute.arch.thread_idx()[0]] = value


@cute.jit
def _host(a: cute.Tensor, value: cute.Float32, more: list[cute.Tensor]):
    _fill(a, value).launch(grid=[1, 1, 1], block=[32, 1, 1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    a = from_dlpack(torch.zeros(32))
    options = f"--keep-ptx --keep-cubin --gpu-arch sm_100a --dump-dir={tmp_path_factory.mktemp('compiled')}"
    return cute.compile(_host, a, 1.0, [a, a], options=options)


def tensor():
    return from_dlpack(torch.zeros(32))


def test_right_arguments_run(compiled):
    data = torch.zeros(32)
    emulator.launch(compiled, from_dlpack(data), 2.5, [tensor(), tensor()])
    assert (data == 2.5).all()
    emulator.launch(compiled, from_dlpack(data), more=[tensor(), tensor()], value=3)
    assert (data == 3).all()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1.0,), {}),
        ((None, 1.0, []), {}),
        (("x", 1.0, []), {}),
        (("tensor", "x", ["tensor", "tensor"]), {}),
        (("tensor", None, ["tensor", "tensor"]), {}),
        (("tensor", "tensor", ["tensor", "tensor"]), {}),
        ((1.0, "tensor", ["tensor", "tensor"]), {}),
        (("tensor", 1.0, ["tensor"]), {}),
        (("tensor", 1.0, ["tensor", "tensor", "tensor"]), {}),
        (("tensor", 1.0, ["tensor", 2.0]), {}),
        (("tensor", 1.0, ["tensor", "tensor"], 4), {}),
        (("tensor", 1.0, ["tensor", "tensor"]), {"unknown": 1}),
        (("tensor", 1.0, ["tensor", "tensor"]), {"value": 1.0}),
    ],
)
def test_launch_arguments(compiled, args, kwargs):
    def real(value):
        if isinstance(value, list | tuple):
            return type(value)(map(real, value))
        return tensor() if value == "tensor" else value

    with pytest.raises(ArgumentError, match="takes") as error:
        emulator.launch(compiled, *real(args), **kwargs)
    refused(error, "args")


LAYOUTS = {
    "static": lambda t: t,
    "dynamic": lambda t: t.mark_layout_dynamic(),
    "rows": lambda t: t.mark_compact_shape_dynamic(0),
    "columns": lambda t: t.mark_compact_shape_dynamic(1),
}


@cute.kernel
def _describe(a: cute.Tensor, out: cute.Tensor):
    if cute.arch.thread_idx()[0] == 0:
        out[0], out[1], out[2] = a.shape[0], a.shape[1], cute.Int32(a.stride[0])


@cute.jit
def _described(a: cute.Tensor, out: cute.Tensor):
    _describe(a, out).launch(grid=[1, 1, 1], block=[32, 1, 1])


def marked(layout, rows=8, columns=16, dtype=torch.float32):
    return LAYOUTS[layout](from_dlpack(torch.zeros(rows, columns, dtype=dtype)))


def integers():
    data = torch.zeros(3, dtype=torch.int32)
    return data, from_dlpack(data)


@pytest.mark.parametrize("then", LAYOUTS)
def test_dynamic_extents_are_those_of_the_compiled_function(then, tmp_path):
    """The kernel receives right extents, or the launch is refused; static where dynamic is read would be garbage."""
    options = f"--keep-ptx --keep-cubin --gpu-arch sm_100a --dump-dir={tmp_path}"
    function = cute.compile(_described, marked(then), integers()[1], options=options)
    for now in LAYOUTS:
        data, out = integers()
        if now == then or then == "static":
            emulator.launch(function, marked(now), out)
            assert data.tolist() == [8, 16, 16]
            continue
        with pytest.raises(ArgumentError, match="dynamic extents and . dynamic strides, as it was compiled") as error:
            emulator.launch(function, marked(now), out)
        refused(error, "a")


def test_element_types_and_static_extents_are_those_of_the_compiled_function():
    done = compile_for(_described, (marked("columns"), integers()[1]), "sm_100a")
    data, out = integers()
    emulator.launch(done, marked("columns", columns=24), out)
    assert data.tolist() == [8, 24, 24]
    for wrong in (marked("columns", rows=4), marked("columns", dtype=torch.int32)):
        with pytest.raises(ArgumentError, match=r"Float32 \(8, \?\):\(\?, 1\), as it was compiled") as error:
            emulator.launch(done, wrong, out)
        refused(error, "a")
    for wrong in (torch.zeros(4, dtype=torch.int32), torch.zeros(3), torch.zeros(3, 1, dtype=torch.int32)):
        with pytest.raises(ArgumentError, match=r"Int32 \(3\):\(1\), as it was compiled") as error:
            emulator.launch(done, marked("columns"), out=from_dlpack(wrong))
        refused(error, "out")


@pytest.mark.parametrize("value", [None, 3, "kernel", _host, lambda: None])
def test_launch_of_something_else(value):
    with pytest.raises(ArgumentError, match="cute.compile") as error:
        emulator.launch(value)
    refused(error, "compiled")


@pytest.mark.parametrize("value", ["sm_100a", 0, True])
def test_launch_on_something_else(compiled, value):
    with pytest.raises(ArgumentError, match="device") as error:
        emulator.launch(compiled, tensor(), 1.0, [tensor(), tensor()], gpu=value)
    refused(error, "gpu")


BAD_EMULATE = [
    *(("script", value) for value in (None, 3, "/nowhere.py", "", b"x.py")),
    *(("args", value) for value in ("--n 3", None, 3, [3], [None])),
    *(("arch", value) for value in BAD_SETTINGS["arch"]),
    *(
        (n, v)
        for n in ("seed", "schedule", "checks", "sm_count", "time_limit", "instruction_limit", "memory_limit", "cores")
        for v in BAD_SETTINGS[n]
        if v is not None
    ),
]


@pytest.mark.parametrize(("name", "value"), BAD_EMULATE, ids=[f"{n}={v!r}" for n, v in BAD_EMULATE])
def test_emulate(name, value, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it must not start')")
    arguments = {"script": script, name: value}
    with pytest.raises(ArgumentError) as error:
        emulator.emulate(**arguments)
    refused(error, name)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--arch", "sm_75"], "arch"),
        (["--seed", "-1"], "seed"),
        (["--schedule", "fifo"], "schedule"),
        (["--checks", "everything"], "checks"),
        (["--time-limit", "0"], "time_limit"),
        (["--time-limit", "nan"], "time_limit"),
        (["--instruction-limit", "0"], "instruction_limit"),
        (["--memory-limit", "-1"], "memory_limit"),
        (["--cores", "0"], "cores"),
    ],
)
def test_command_line(options, name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it must not start')")
    done = CliRunner().invoke(cli.app, ["emulate", *options, str(script)])
    assert isinstance(done.exception, ArgumentError) and done.exception.name == name


def test_command_line_without_a_script(tmp_path):
    done = CliRunner().invoke(cli.app, ["emulate", str(tmp_path / "none.py")])
    assert isinstance(done.exception, ArgumentError) and done.exception.name == "script"
    for options in ([], ["--seed", "x", "script.py"]):
        assert CliRunner().invoke(cli.app, ["emulate", *options]).exit_code == 2  # usage, on standard error
