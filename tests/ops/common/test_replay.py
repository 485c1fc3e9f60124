"""Warm calls in one C function: they get there, and whatever does not fit goes through Python."""

import ctypes
import gc
import sys
import weakref
from typing import NamedTuple
from unittest.mock import patch

import cutlass
import pytest
import torch

from dsv4lib.bench.ops import host
from dsv4lib.dsl.tensors import DeviceTensor
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import native, plans, replay, schema

CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
needs_replay = pytest.mark.skipif(replay.function() is None, reason="this Python and torch cannot replay calls")


class Pair(NamedTuple):
    """Two tensors of a call."""

    a: torch.Tensor
    b: torch.Tensor | None


class Driver:
    """In place of a kernel's host code: what it reads, and the error that it answers."""

    def __init__(self):
        self.seen, self.error, self.during = [], 0, lambda: None

    def __call__(self, address):
        words = (ctypes.c_uint64 * 4).from_address(address)
        self.seen.append(tuple(ctypes.c_uint64.from_address(words[i]).value for i in range(3)))
        ctypes.c_int32.from_address(words[3]).value = self.error
        self.during()


@pytest.fixture
def driver():
    """The driver, and an op ``y, x, pair, factor`` of one launch over y, x and pair.a."""
    made = Driver()
    function = CALL(made)
    code = host.Uncompiled("kernel", ())

    @schema.op("test_replay", mutates=("y",))
    class Replayed(NamedTuple):
        y: torch.Tensor
        x: torch.Tensor
        pair: Pair
        factor: float
        backend: str

        def check(self):
            pass

        def run(self, backend):
            given = self.y, self.x, self.pair.a
            if self.factor == 3:
                given = self.y, self.x, plans.scratch(8, dtype=torch.float32, like=self.y)
            values = [DeviceTensor(one, cutlass.Float32) for one in given]
            plans.note(code.function, values)
            native.launch(code.function, values)

    made.op = Replayed.op
    with torch.no_grad(), host.without_gpu(lambda function_: function):
        yield made
    plans._OPS.remove(Replayed.op)


MEMORY = torch.zeros(64, 64)


def given(*rows, factor=1.0):
    """Arguments in rows of one buffer, all aligned alike."""
    y, x, a = (MEMORY[row] for row in rows)
    return y, x, Pair(a, None), factor, "native"


def warm(op, *fields):
    """Make a plan and its record."""
    for _ in range(3):
        op(*fields)


def replayed(op, *fields):
    """Whether a call is done without Python."""
    with patch.object(plans.Op, "_by_signature", side_effect=AssertionError):
        try:
            op(*fields)
        except AssertionError:
            return False
    return True


def pointers(fields):
    return fields[0].data_ptr(), fields[1].data_ptr(), fields[2].a.data_ptr()


@needs_replay
def test_a_third_call_is_the_last_one_in_python(driver):
    one, other = given(1, 2, 3), given(4, 5, 6)
    assert not replayed(driver.op, *one)
    warm(driver.op, *one)
    driver.seen = []
    before = other[0]._version
    assert replayed(driver.op, *one) and replayed(driver.op, *other)
    assert driver.seen == [pointers(one), pointers(other)]
    assert other[0]._version > before


@needs_replay
def test_what_is_not_as_recorded_goes_through_python(driver):
    """Types, extents, strides, numbers, places in memory, and groups; afterwards calls as before are replayed."""
    y, x, pair, factor, backend = good = given(1, 2, 3)
    warm(driver.op, *good)
    wide = torch.zeros(64, 128)
    others = {
        "extent": (y, x[:32], pair, factor, backend),
        "no tensor": (y, 3.0, pair, factor, backend),
        "rank": (y, x.view(1, 64), pair, factor, backend),
        "stride": (y, wide[0, ::2], pair, factor, backend),
        "type": (y, x.int(), pair, factor, backend),
        "number": (y, x, pair, 2.0, backend),
        "type of a number": (y, x, pair, 1, backend),
        "subclass": (y, torch.nn.Parameter(x, requires_grad=False), pair, factor, backend),
        "member": (y, x, Pair(pair.a, x), factor, backend),
        "group": (y, x, (pair.a, None), factor, backend),
        "text": (y, x, pair, factor, "auto"),
        "alignment": (y, MEMORY.view(-1)[129:193], pair, factor, backend),
        "output over an input": (y, MEMORY.view(-1)[96:160], pair, factor, backend),
    }
    for name, fields in others.items():
        assert not replayed(driver.op, *fields), name
        assert replayed(driver.op, *good), name
    assert replayed(driver.op, y, x, Pair(*pair), float("1.0"), "".join(["nat", "ive"]))


@needs_replay
def test_two_arguments_that_were_one_memory(driver):
    """A word that may come of two tensors is written only where both still are there."""
    y, x, _, factor, backend = given(1, 2, 3)
    warm(driver.op, y, x, Pair(x[:32], None), factor, backend)
    assert replayed(driver.op, y, MEMORY[7], Pair(MEMORY[7, :32], None), factor, backend)
    assert not replayed(driver.op, y, MEMORY[7], Pair(MEMORY[8, :32], None), factor, backend)


@needs_replay
def test_grad_mode_and_gradients(driver):
    y, x, pair, factor, backend = given(1, 2, 3)
    x = torch.nn.Parameter(x.clone())
    warm(driver.op, y, x, pair, factor, backend)
    assert replayed(driver.op, y, x, pair, factor, backend)
    with torch.enable_grad():
        assert not replayed(driver.op, y, x, pair, factor, backend)
        with pytest.raises(ArgumentError, match=r"^x\.requires_grad"):
            driver.op(y, x, pair, factor, backend)
    with torch.inference_mode():
        warm(driver.op, y, x, pair, factor, backend)
        assert replayed(driver.op, y, x, pair, factor, backend)


@needs_replay
def test_stream_and_device_are_part_of_a_record(driver):
    fields = given(1, 2, 3)
    stream, device = 5, 0
    many = patch.object(torch.cuda, "is_available", lambda: True), patch.object(torch.cuda, "device_count", lambda: 2)
    current = patch.object(plans, "_device", lambda: device)
    with patch.object(plans, "asked_of", lambda index: lambda index: stream), many[0], many[1], current:
        plans.forget()
        with patch.object(torch.Tensor, "get_device", lambda x: 0):
            warm(driver.op, *fields)
        assert replayed(driver.op, *fields)
        stream = 6
        assert not replayed(driver.op, *fields)
        stream, device = 5, 1
        assert not replayed(driver.op, *fields)
        device = 0
        assert replayed(driver.op, *fields)


@needs_replay
def test_an_error_of_a_launch_is_raised_and_passes(driver):
    fields = given(1, 2, 3)
    warm(driver.op, *fields)
    driver.error = 700
    for _ in range(2):
        with pytest.raises(native.LaunchFailed, match="700"):
            driver.op(*fields)
    driver.error = 0
    assert replayed(driver.op, *fields)


@needs_replay
def test_scratch_memory_is_new_and_freed(driver):
    fields = given(1, 2, 3, factor=3.0)
    warm(driver.op, *fields)
    assert replayed(driver.op, *fields)
    assert driver.seen[-1][:2] == pointers(fields)[:2] and driver.seen[-1][2] not in (0, pointers(fields)[2])
    with patch.object(torch, "empty", side_effect=MemoryError), pytest.raises(MemoryError):
        driver.op(*fields)
    assert replayed(driver.op, *fields)
    made, empty = [], torch.empty

    def spy(*args, **kwargs):
        made.append(weakref.ref(x := empty(*args, **kwargs)))
        return x

    with patch.object(torch, "empty", spy):
        assert replayed(driver.op, *fields)
    assert [one() for one in made] == [None]


@needs_replay
def test_a_record_outlives_being_forgotten_during_its_launch(driver):
    fields = given(1, 2, 3)
    warm(driver.op, *fields)

    def forget():
        plans.forget()
        gc.collect()

    driver.during = forget
    assert replayed(driver.op, *fields) and not replayed(driver.op, *fields)


@needs_replay
def test_a_call_during_a_launch_of_the_same_record(driver):
    """Its words are in use: the inner call has others."""
    one, two = given(1, 2, 3), given(4, 5, 6)
    warm(driver.op, *one)
    driver.seen = []

    def again():
        driver.during = lambda: None
        driver.op(*two)
        words = (ctypes.c_uint64 * 4).from_address(outer[0])
        driver.seen.append(tuple(ctypes.c_uint64.from_address(words[i]).value for i in range(3)))

    outer = []
    driver.during = again
    call = type(driver).__call__

    def spy(self, address):
        outer.append(address)
        call(self, address)

    with patch.object(type(driver), "__call__", spy):
        driver.op(*one)
    assert driver.seen == [pointers(one), pointers(two), pointers(one)]


@needs_replay
def test_many_signatures_have_as_many_records_as_fit(driver):
    fields = [(MEMORY[1, : 4 + n], *given(1, 2, 3)[1:]) for n in range(replay.MOST + 4)]
    for one in fields:
        warm(driver.op, *one)
    assert len(driver.op._records._held) == replay.MOST
    assert not replayed(driver.op, *fields[0])
    for one in (fields[-1], fields[5], fields[-3], fields[5]):
        driver.seen = []
        assert replayed(driver.op, *one) and driver.seen == [pointers(one)]


@needs_replay
def test_no_reference_is_lost_or_kept(driver):
    fields = given(1, 2, 3)
    warm(driver.op, *fields)
    kept = [*fields, fields[2].a, None, True, False, type(fields[2]), driver.op._records.warm]
    objects = len(gc.get_objects())
    before = [sys.getrefcount(one) for one in kept]
    for _ in range(1000):
        driver.op(*fields)
        driver.seen = []
    after = [sys.getrefcount(one) for one in kept]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) < 100
    assert len(gc.get_objects()) - objects < 100


def test_without_the_c_function_calls_find_their_plans(driver):
    fields = given(1, 2, 3)
    with patch.object(replay, "function", lambda: None):
        for _ in range(5):
            driver.op(*fields)
    assert driver.seen[-1] == pointers(fields) and len(driver.seen) == 5
    assert driver.op._records.warm is None


def test_code_that_cannot_be_moved_is_refused():
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
    text = "@far = external global i64\ndefine i64* @replay() {\n  ret i64* @far\n}\n"
    with pytest.raises(ImportError, match="rela"):
        replay.text_of(target.emit_object(llvm.parse_assembly(text)))
    with pytest.raises(ImportError, match="ELF"):
        replay.text_of(b"MZ" + bytes(64))
