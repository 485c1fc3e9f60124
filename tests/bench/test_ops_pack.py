"""Packs of compiled kernels: what is recorded is what the op launches, replayed over other memory; what is refused."""

import ctypes
import json
import subprocess
import sys
import zipfile

import pytest
import torch

from dsv4lib.bench.ops import export, replay
from dsv4lib.bench.ops.case import Absent, Provider, Row
from dsv4lib.bench.ops.replay import Launch, Pack, ReplayError
from dsv4lib.emulator.driver import binary

# Everything that needs a process of its own: pack three rows, replay them in the emulator over new memory and inputs.
ROUND_TRIP = """
import json, sys
from pathlib import Path

import torch

from dsv4lib.bench.ops import export, harness, replay
from dsv4lib.bench.ops.case import Row, Provider
from dsv4lib.bench.ops.timing import Cold
from dsv4lib.emulator.driver import binary
from dsv4lib.emulator.machine.request import LaunchRequest

folder = Path(sys.argv[1])


class Clock:
    def cold(self, calls):
        return [Cold((1.0,), 1) for _ in calls]

    def warm(self, calls):
        return [1.0 for _ in calls]

    host = warm


class Emulated:
    def prepare(self, launch, cubin, params):
        from dsv4lib.ops.common import compile_cache

        code = next(code for code in compile_cache.default().kernels() if code.cubin == cubin)
        shape = tuple(launch.grid), tuple(launch.block), tuple(launch.cluster), launch.smem
        request = LaunchRequest(launch.kernel, binary.parsed(code.ptx.rstrip("\\0")), *shape, params)
        return lambda: type(gpu).launch(gpu, request)


def odd(name, bind):
    def given(generator):
        return {"x": torch.randn(4, 4, generator=generator, device=generator.device)}

    return Row("odd", name, 1, 0, given, None, (Provider("ours", bind),))


def states(folder):
    found = {}
    for row in rows:
        provider = replay.Pack(folder).provider(row, Emulated())
        result = harness.measure(Row(**{**vars(row), "providers": (provider,)}), Clock(), "cuda")
        found[row.op] = [result.found[0].state, result.found[0].detail]
    return found


with export.recording("sm_90a") as gpu:
    rows = harness.chosen(["rmsnorm", "moe_dispatch", "quantize"], "Flash T 8")[0]
    rows += [row for row in harness.chosen(["compressor"], "CSA decode T 1")[0] if row.shape.endswith("T 1")]
    strange = [
        odd("torch", lambda g: (lambda: g["x"].add_(1), {})),
        odd("nothing", lambda g: (lambda: None, {})),
        odd("alias", lambda g: (rows[0].providers[0].bind(harness.inputs(rows[0], "cuda"))[0], {"y": g["x"]})),
    ]
    norm = next(row for row in rows if row.op == "rmsnorm").providers[0]

    def derived(g):  # it normalises numbers that are made of its input when it is bound
        x = (2 * g["x"]).bfloat16().repeat(2, 1024)
        return norm.bind({"x": x, "weight": torch.ones(4096, device="cuda"), "eps": 1e-6})

    strange.append(odd("derived", derived))
    product = lambda g: torch.mm(g["x"].bfloat16(), g["x"].bfloat16(), out_dtype=torch.float32)
    strange.append(odd("gemm", lambda g: (lambda: product(g), {})))
    torch.manual_seed(0)
    x = torch.empty(0)
    with export._Filled(5):
        fresh = [torch.empty(3), x.new_empty(2, 2), torch.empty_like(torch.zeros(4)), torch.empty_strided((2,), (3,))]
    filled = all((y.contiguous().view(torch.uint8) == 5).all() for y in fresh)
    index = export.write(folder / "ops.zip", rows + strange, gpu)
    import zipfile

    zipfile.ZipFile(folder / "ops.zip").extractall(folder)
    good = states(folder)
    changed = json.loads((folder / "index.json").read_text())
    for entry in changed["rows"].values():
        pointers = entry["launches"][0]["pointers"]
        pointers[0][1:], pointers[-1][1:] = pointers[-1][1:], pointers[0][1:]
    (folder / "index.json").write_text(json.dumps(changed))
    bad = states(folder)
print(json.dumps({"refused": index["refused"], "good": good, "bad": bad, "filled": bool(filled)}))
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack")
    command = [sys.executable, "-c", ROUND_TRIP, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_a_packed_call_computes_what_the_op_does(packed):
    _, said = packed
    assert {op: state for op, (state, _) in said["good"].items()} == dict.fromkeys(
        ("rmsnorm", "moe_dispatch", "quantize", "compressor"), "timed"
    ), said["good"]


def test_a_pack_with_two_addresses_swapped_is_not_timed(packed):
    _, said = packed
    assert {state for state, _ in said["bad"].values()} <= {"wrong", "failed"}, said["bad"]


def test_calls_that_do_other_work_are_refused(packed):
    _, said = packed
    assert set(said["refused"]) == {"odd torch", "odd nothing", "odd alias", "odd derived", "odd gemm"}
    assert said["refused"]["odd gemm"] == "it calls aten::mm, whose GPU kernel is not ours"
    assert "is made of its inputs" in said["refused"]["odd derived"]
    assert "only kernel launches" in said["refused"]["odd torch"]
    assert "launches nothing" in said["refused"]["odd nothing"]
    assert "memory of an input" in said["refused"]["odd alias"]


HOST = """
import ctypes, json, sys
from pathlib import Path
from unittest.mock import patch

from dsv4lib.bench.ops import standins

if sys.argv[2] == "without":
    sys.meta_path.insert(0, standins._InertFinder())
import torch

from dsv4lib.bench.ops import harness, host, host_pack, replay
from dsv4lib.ops.common import plans

KIND = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4)
seen, answer = [], [0]


@KIND
def launch(config, kernel, none, extra):
    begin, params, of_size, size, end = (ctypes.c_uint64 * 5).from_address(extra)
    count = ctypes.c_uint64.from_address(size).value
    seen.append((config, kernel, (begin, of_size, end), ctypes.string_at(params, count)))
    return answer[0]


class Driver:
    launch_address = ctypes.cast(launch, ctypes.c_void_p).value

    def described(self, launch, cubin):
        assert cubin[:4] == bytes.fromhex("7f454c46")
        self.last = (ctypes.c_uint64 * 4)()
        return self.last, ctypes.c_void_p(77), None


rows = harness.chosen(["rmsnorm", "moe_dispatch", "quantize", "compressor"], "")[0]
launches = host_pack.Launches(replay.Pack(Path(sys.argv[1])), Driver(), "cpu")
rows = [row for row in rows if f"{row.op} {row.shape}" in launches.names]
found = {}
with torch.no_grad(), patch.object(plans, "plannable", lambda x: True), launches.installed():
    for row in rows:
        call = launches.bound(row)
        given, outputs, memory = call.keep
        seen.clear()
        for _ in range(4):
            call()
        with patch.object(plans.Op, "_by_signature", side_effect=SystemExit(f"{row.op} is not replayed")):
            call()
        entry = launches.pack.index["rows"][f"{row.op} {row.shape}"]["launches"]
        fields = [replay.Launch(**{**one, "params": bytes.fromhex(one["params"])}) for one in entry]
        wanted = [one.filled(memory) for one in fields] * 5
        found[row.op] = [one[3] for one in seen] == wanted and all(one[1:3] == (77, (1, 2, 0)) for one in seen)
    times = dict(host_pack.times(rows, launches))
    answer[0] = 700
    failed = dict(host_pack.times(rows[:1], launches))
dsl = hasattr(sys.modules["cutlass"], "__file__")
print(json.dumps({"found": found, "times": times, "failed": failed, "dsl": dsl}))
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dsl", ["without", "with"])
def test_ops_launch_kernels_of_a_pack_for_their_host_time(packed, tmp_path, dsl):
    """Words are the pack's, addresses those of the call; the warm call is replayed; the DSL changes nothing."""
    zipfile.ZipFile(packed[0] / "ops.zip").extractall(tmp_path)
    done = subprocess.run([sys.executable, "-c", HOST, str(tmp_path), dsl], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["found"] == dict.fromkeys(("rmsnorm", "moe_dispatch", "quantize", "compressor"), True)
    assert said["dsl"] == (dsl == "with")
    *each, median = said["times"].values()
    assert len(each) == 4 and all(isinstance(one, float) and 0 < one for one in each) and min(each) <= median
    assert list(said["failed"].values()) == ["DSV4Error: cuLaunchKernelEx: error 700"]


READS = """
.version 8.8
.target sm_90a
.address_size 64
.entry k(.param .align 8 .b8 a[16], .param .align 8 .b8 b[16], .param .u32 c)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<4>;
    ld.param.b64 %rd1, [a];
    ld.param.v2.b32 {%r1, %r2}, [b+4];
    OTHER
    ret;
}
"""


@pytest.mark.parametrize(
    "other, kept",
    [
        ("", (*range(8), *range(20, 28))),
        ("ld.param.b32 %r3, [c];", (*range(8), *range(20, 28), *range(32, 36))),
        ("mov.b64 %rd2, a;", range(36)),
    ],
    ids=["padding", "scalar", "address"],
)
def test_only_bytes_that_the_kernel_loads_are_compared(other, kept):
    kernel = binary.parsed(READS.replace("OTHER", other)).kernels["k"]
    assert export._read(bytes(range(1, 37)), kernel) == bytes(i + 1 if i in kept else 0 for i in range(36))


def test_memory_without_contents_differs_from_recording_to_recording(packed):
    assert packed[1]["filled"]


def test_the_archive_has_what_travels(packed):
    folder, _ = packed
    with zipfile.ZipFile(folder / "ops.zip") as archive:
        names = archive.namelist()
        index = json.loads(archive.read("index.json"))
        assert (index["arch"], index["sms"], index["format"]) == ("sm_90a", 132, replay.FORMAT)
        launches = [launch for row in index["rows"].values() for launch in row["launches"]]
        assert launches and all(archive.read(launch["cubin"])[:4] == b"\x7fELF" for launch in launches)
    assert {"dsv4lib/bench/ops/harness.py", "data/bench/rates.csv"} <= set(names)


@pytest.mark.full
def test_without_the_dsl_rows_are_there_and_ours_is_absent():
    lines = (
        "import sys; sys.modules['cutlass'] = None",
        "from dsv4lib.bench.ops import harness",
        "rows, broken = harness.chosen([], 'T 8')",
        "assert not broken, broken",
        "import torch",
        "from dsv4lib.bench.ops.case import Absent",
        "for row in rows:",
        "    if row.op in ('rmsnorm', 'quantize', 'router', 'moe_dispatch'):",
        "        given = row.given(torch.Generator().manual_seed(0))",
        "        try:",
        "            row.providers[0].bind(given)[0]()",
        "        except Absent as reason:",
        "            assert 'needs the CuTe DSL' in str(reason)",
        "        else:",
        "            raise SystemExit(f'{row.op} ran')",
        "print(len(rows))",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and int(done.stdout) >= 12, done.stdout + done.stderr[-2000:]


# ------------------------------------------------------------------- words and addresses


class Memory:
    """Stands for a recording: ranges of 100 bytes."""

    def __init__(self, **starts):
        self.starts = starts

    def place(self, address):
        return next(((name, address - s) for name, s in self.starts.items() if s <= address < s + 100), None)


def words(*values):
    return b"".join(value.to_bytes(8, "little") for value in values)


def test_words_that_move_are_addresses_and_others_are_not():
    one, two = Memory(x=1000, y=2000), Memory(x=5000, y=6000)
    params, pointers = export._addresses(words(1008, 2, 1050, 2000), words(5008, 2, 1050, 6000), one, two)
    assert pointers == [[0, "x", 8], [24, "y", 0]]
    assert params == words(0, 2, 1050, 0)  # 1050 looks like an address, but did not move
    for a, b in ((1008, 6008), (1008, 7), (3, 4), (1008, 5009)):
        with pytest.raises(export.NotPacked, match="bytes 0 to 7"):
            export._addresses(words(a), words(b), one, two)


# ------------------------------------------------------------------- replay


def pack(folder, **row):
    entry = {"given": {"x": [[2, 3], [3, 1]]}, "memory": {}, "launches": [], **row}
    index = {
        "format": replay.FORMAT,
        "arch": "sm_90a",
        "kernels": "k",
        "rows": {"op T 1": entry},
        "refused": {"op T 2": "why"},
    }
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "code").write_bytes(b"cubin")
    (folder / "content").write_bytes(bytes(range(8)))
    return Pack(folder)


def row(shape="T 1"):
    return Row("op", shape, 1, 0, None, None, (Provider("ours", None), Provider("peer", None)))


LAUNCH = {
    "cubin": "code",
    "kernel": "k",
    "grid": [7, 1, 1],
    "block": [64, 2, 1],
    "cluster": [2, 1, 1],
    "smem": 1234,
    "programmatic": True,
    "params": words(0, 77, 0, 0).hex(),
    "pointers": [[0, "given x", 4], [16, "out y", 0], [24, "memory 0", 2]],
}
OUT = {"bytes": 12, "as": None, "file": None, "dtype": "int16", "shape": [2, 3], "stride": [3, 1], "offset": 0}
OWN = {"bytes": 8, "as": None, "file": "content"}


class Seen:
    """A launcher that keeps what it is given."""

    def prepare(self, launch, cubin, params):
        self.launch, self.cubin, self.params, self.calls = launch, cubin, params, 0

        def call():
            self.calls += 1

        return call


def test_addresses_are_those_of_the_memory_here(tmp_path):
    seen, x = Seen(), torch.arange(6.0).view(2, 3)
    provider = pack(tmp_path, memory={"out y": OUT, "memory 0": OWN}, launches=[LAUNCH, LAUNCH]).provider(row(), seen)
    call, outputs = provider.bind({"x": x, "n": 3})
    y = outputs["y"]
    assert y.shape == (2, 3) and y.dtype == torch.int16 and not y.any() and seen.cubin == b"cubin"
    first, number, second, third = (int.from_bytes(seen.params[i : i + 8], "little") for i in range(0, 32, 8))
    assert (first, number, second) == (x.data_ptr() + 4, 77, y.data_ptr())
    assert ctypes.string_at(third, 6) == bytes(range(2, 8))  # memory of the op has its contents
    call()
    assert seen.calls == 2  # of two launches


def test_an_output_that_starts_as_an_input_does(tmp_path):
    x = torch.randn(2, 3)
    out = {**OUT, "bytes": 24, "as": "x", "dtype": "float32"}
    outputs = pack(tmp_path, memory={"out y": out}).provider(row(), Seen()).bind({"x": x})[1]
    assert torch.equal(outputs["y"], x) and outputs["y"].data_ptr() != x.data_ptr()


def test_what_does_not_fit_is_absent(tmp_path):
    packed = pack(tmp_path)
    with pytest.raises(Absent, match=r"x is \[3, 2\]"):
        packed.provider(row(), Seen()).bind({"x": torch.zeros(3, 2)})
    with pytest.raises(Absent, match="why"):
        packed.provider(row("T 2"), Seen()).bind({"x": torch.zeros(2, 3)})
    with pytest.raises(Absent, match="not in the pack"):
        packed.provider(row("T 3"), Seen()).bind({"x": torch.zeros(2, 3)})
    with pytest.raises(ReplayError, match="index.json is missing"):
        _ = Pack(tmp_path / "no").index
    (tmp_path / "index.json").write_text('{"format": 0}')
    with pytest.raises(ReplayError, match="format 0, not 1"):
        _ = Pack(tmp_path).index


class FakeCuda:
    """libcuda as far as `Driver` uses it; reads what it is handed as the driver would."""

    def __init__(self, fail=""):
        self.fail, self.log = fail, []

    def _answer(self, name, *said):
        self.log.append((name, *said))
        return 1 if name == self.fail else 0

    def cuModuleLoadData(self, module, cubin):
        return self._answer("cuModuleLoadData", cubin)

    def cuModuleGetFunction(self, function, module, name):
        return self._answer("cuModuleGetFunction", name)

    def cuFuncSetAttribute(self, function, attribute, value):
        return self._answer("cuFuncSetAttribute", attribute, value.value)

    def cuGetErrorString(self, code, text):
        text._obj.value = b"invalid value"

    def cuLaunchKernelEx(self, config, function, params, extra):
        config = config._obj
        buffer = ctypes.string_at(extra[1], ctypes.c_size_t.from_address(extra[3]).value)
        attributes = {config.attributes[i].id: config.attributes[i].value[:3] for i in range(config.count)}
        shape = list(config.grid), list(config.block), config.smem, config.stream
        assert params is None and (extra[0], extra[2], extra[4]) == (1, 2, None)
        return self._answer("cuLaunchKernelEx", shape, attributes, buffer)


def test_the_driver_is_told_what_was_recorded(monkeypatch):
    cuda = FakeCuda()
    stream = type("Stream", (), {"cuda_stream": 99, "synchronize": lambda self: None})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    driver = replay.Driver()
    launch = Launch(**{**LAUNCH, "params": b"p" * 20})
    for _ in range(2):
        driver.prepare(launch, b"cubin", b"p" * 20)()
    kinds = [one[0] for one in cuda.log]
    assert kinds.count("cuModuleLoadData") == 1 and kinds.count("cuLaunchKernelEx") == 2
    assert ("cuFuncSetAttribute", 8, 1234) in cuda.log and not any(
        one[:2] == ("cuFuncSetAttribute", 14) for one in cuda.log
    )
    assert cuda.log[-1] == (
        "cuLaunchKernelEx",
        ([7, 1, 1], [64, 2, 1], 1234, 99),
        {6: [1, 0, 0], 4: [2, 1, 1]},
        b"p" * 20,
    )
    driver.prepare(Launch(**{**LAUNCH, "cluster": [16, 1, 1], "params": b""}), b"cubin", b"")
    assert ("cuFuncSetAttribute", 14, 1) in cuda.log
    cuda.fail = "cuLaunchKernelEx"
    with pytest.raises(ReplayError, match="cuLaunchKernelEx: error 1, invalid value"):
        driver.prepare(launch, b"cubin", b"p")()


def test_structures_are_as_large_as_the_drivers():
    """cuda.h on a 64-bit machine: CUlaunchAttribute 72 bytes, CUlaunchConfig 56."""
    assert ctypes.sizeof(replay._Attribute) == 72 and ctypes.sizeof(replay._Config) == 56
    assert replay._Config.stream.offset == 32
