"""The pieces of the launch side on their own: binaries, launch structs, memory registration, patches."""

import ctypes
import gc
import os
import struct

import numpy as np
import pytest
import torch

from dsv4lib.emulator.driver import binary, config, symbols
from dsv4lib.emulator.driver.arch import ARCHITECTURES, architecture
from dsv4lib.emulator.driver.device import active, make
from dsv4lib.emulator.driver.memory import Tracker, extent
from dsv4lib.emulator.driver.patching import patches
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.machine.request import LaunchRequest
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.ptx.parse import parse
from dsv4lib.errors import ArgumentError

MODULE = parse(""".version 9.0
.target sm_100a
.address_size 64
.shared .b8 table[4096];
.entry k(.param .u32 a, .param .align 64 .b8 b[128], .param .u64 c) { ret; }
""")


def address_of(data):
    """The address of a copy of ``data``, and the copy."""
    buffer = ctypes.create_string_buffer(data, len(data))
    return ctypes.addressof(buffer), buffer


def elf(body):
    """A minimal ELF file: header, body, two section headers (the body; one without space), no programs."""
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    sections = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 64, len(body), 0, 0, 0, 0)
    nobits = struct.pack("<IIQQQQIIQQ", 0, 8, 0, 0, 64, 1 << 30, 0, 0, 0, 0)
    struct.pack_into("<QQ", header, 0x20, 0, 64 + len(body))
    struct.pack_into("<HHHH", header, 0x36, 56, 0, 64, 2)
    return bytes(header) + body + sections + nobits


def fatbin(*entries):
    """A fat binary of (kind, content)."""
    body = b"".join(struct.pack("<HHIQ", kind, 1, 64, len(x)) + bytes(48) + x for kind, x in entries)
    return struct.pack("<IHHQ", binary.FATBIN_MAGIC, 1, 16, len(body)) + body


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: fatbin((2, x)), lambda x: fatbin((1, b"ptx....."), (2, x))])
def test_cubins_are_found(wrap):
    cubin = elf(b"machine code 123")
    address, _keep = address_of(wrap(cubin) + b"what follows")
    assert binary.cubin_at(address) == cubin


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nonsense" * 4, "neither a cubin nor"),
        (fatbin((1, b"ptx.")), "0 cubins"),
        (fatbin((2, elf(b"a")), (2, elf(b"b"))), "2 cubins"),
        (fatbin((2, b"not an elf file")), "1 cubins"),
        (struct.pack("<IHHQ", binary.FATBIN_MAGIC, 1, 16, 16) + bytes(32), "damaged"),
    ],
)
def test_bad_binaries(data, message):
    address, _keep = address_of(data)
    with pytest.raises(LaunchError, match=message):
        binary.cubin_at(address)


def test_the_ptx_belongs_to_the_bytes():
    text = ".version 9.0\n.target sm_100a\n.address_size 64\n.entry k() { ret; }\n"
    cubin = elf(os.urandom(16))
    binary.remember(cubin, text + "\0")
    address, _keep = address_of(fatbin((2, cubin)))
    assert list(binary.module_at(address).kernels) == ["k"]
    other, _other = address_of(fatbin((2, elf(os.urandom(16)))))
    with pytest.raises(LaunchError, match="not known"):
        binary.module_at(other)


def launch_config(*attributes):
    table = (config.Attribute * max(len(attributes), 1))()
    for slot, (number, value) in zip(table, attributes, strict=False):
        slot.id = number
        slot.value[: len(value)] = value
    return config.Config(config.Dimensions(8, 3, 2), config.Dimensions(32, 2, 1), 1000, None, table, len(attributes))


def arguments(*values):
    buffers = [ctypes.create_string_buffer(v, len(v)) for v in values]
    array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(b) for b in buffers))
    return ctypes.addressof(array), (array, buffers)


def test_decode():
    at, _keep = arguments(struct.pack("<I", 7), bytes(range(128)), struct.pack("<Q", 2**40))
    settings = launch_config((4, struct.pack("<3I", 2, 3, 1)), (2, struct.pack("<i", 1)), (8, b"\1"))
    request = config.decode(settings, MODULE, "k", at, frozenset({(0, 0, 0)}))
    assert (request.grid, request.block, request.cluster) == ((8, 3, 2), (32, 2, 1), (2, 3, 1))
    assert request.dynamic_smem == 1000 and request.attributes == {"cooperative": True, "cluster": True}
    assert request.ctas == {(0, 0, 0)}
    assert struct.unpack_from("<I", request.params)[0] == 7
    assert request.params[64:192] == bytes(range(128)) and struct.unpack_from("<Q", request.params, 192)[0] == 2**40
    events = ((12, struct.pack("<Qi", 0x1230, 0)), (7, struct.pack("<Qii", 0x4560, 0, 1)))
    assert config.decode(launch_config(*events), MODULE, "k", at).attributes == {"events": (0x1230, 0x4560)}


def test_unknown_attributes_and_null_arguments():
    with pytest.raises(LaunchError, match="attribute 77"):
        config.attributes_of(launch_config((77, b"")))
    array = (ctypes.c_void_p * 3)()
    with pytest.raises(LaunchError, match="argument 0 is a null pointer"):
        config.parameter_block(MODULE.kernels["k"], ctypes.addressof(array))


@pytest.mark.parametrize(
    ("target", "arch", "fits"),
    [
        ("sm_100a", "sm_100a", True),
        ("sm_100a", "sm_103a", False),
        ("sm_100f", "sm_103a", True),
        ("sm_103f", "sm_100a", False),
        ("sm_90", "sm_100a", True),
        ("sm_90a", "sm_100a", False),
        ("sm_80", "sm_90a", True),
        ("sm_90", "sm_80", False),
    ],
)
def test_targets(target, arch, fits):
    assert config.runs_on(target, arch) is fits


def request(**changes):
    base = {"grid": (4, 1, 1), "block": (128, 1, 1), "params": bytes(200)}
    return LaunchRequest("k", MODULE, **{**base, **changes})


def test_shared_memory_needs_an_opt_in():
    arch = architecture("sm_100a")
    config.check(request(dynamic_smem=48 << 10), arch, 148, 0)
    with pytest.raises(config.LaunchRefused, match="did not raise the limit") as caught:
        config.check(request(dynamic_smem=(48 << 10) + 1), arch, 148, 0)
    assert caught.value.code == config.INVALID_VALUE
    config.check(request(dynamic_smem=100_000), arch, 148, 100_000)


def test_ctas_per_sm():
    arch = architecture("sm_100a")
    assert config.ctas_per_sm(request(block=(1024, 1, 1)), arch) == 2
    assert config.ctas_per_sm(request(block=(33, 1, 1)), arch) == 32  # 64 threads each, but at most 32 CTAs
    assert config.ctas_per_sm(request(block=(32, 1, 1), dynamic_smem=100_000), arch) == 2


def test_architectures():
    assert architecture("sm_103a").capability == (10, 3)
    assert {a.attributes(9)[16] for a in ARCHITECTURES.values()} == {9}
    with pytest.raises(ArgumentError, match="sm_75"):
        architecture("sm_75")


def test_storages_are_registered_once_and_swept():
    gmem = GlobalMemory()
    tracker = Tracker(gmem)
    x = torch.zeros(100)
    tracker.tensor(x)
    tracker.tensor(x[10:20])
    assert len(gmem) == 1 and gmem.find(x.data_ptr(), 400).nbytes == 400
    start = x.data_ptr()
    tracker.sweep()
    assert gmem.find(start)
    del x
    gc.collect()
    tracker.sweep()
    assert len(gmem) == 0


def test_device_memory_may_have_been_a_tensor():
    """Memory that an allocator gives out again is not refused because its former owner is still registered."""
    gpu = make("sm_100a")
    x = torch.zeros(100)
    gpu.memory.tensor(x)
    start = x.data_ptr()
    del x
    gc.collect()
    assert gpu.gmem.find(start)
    gpu.empty(16, "other")
    assert gpu.gmem.find(start) is None or gpu.gmem.find(start).label == "other"


def test_a_span_gives_way_to_the_whole_buffer():
    gmem = GlobalMemory()
    tracker = Tracker(gmem)
    x = torch.zeros(100)
    tracker.span(x.data_ptr() + 40, 80, tracker, "a part")
    tracker.tensor(x)
    assert len(gmem) == 1 and gmem.find(x.data_ptr(), 400)
    tracker.span(x.data_ptr() + 40, 80, tracker, "a part")
    assert len(gmem) == 1


def test_two_views_of_one_buffer_that_share_a_part_are_both_there():
    """Columns of a matrix, each handed over by itself: the second must not put the first out."""
    gmem = GlobalMemory()
    tracker = Tracker(gmem)
    x = torch.zeros(100)
    left, right = ({1}, {2})
    tracker.span(x.data_ptr(), 320, left, "columns on the left")
    tracker.span(x.data_ptr() + 80, 320, right, "columns on the right")
    assert len(gmem) == 1 and gmem.find(x.data_ptr(), 400)
    del right
    gc.collect()
    tracker.sweep()
    assert gmem.find(x.data_ptr(), 320)
    del left
    gc.collect()
    tracker.sweep()
    assert len(gmem) == 0


def test_a_span_in_memory_that_was_freed_is_registered_anew():
    """What launches keep: a tensor whose owner is gone must not stand in for one that got its memory."""
    gmem = GlobalMemory()
    tracker = Tracker(gmem)
    x = torch.zeros(100)
    first, second = ({1}, {2})  # owners; sets take weak references
    tracker.span(x.data_ptr(), 400, first, "the first")
    tracker.span(x.data_ptr() + 80, 40, second, "inside of it")
    assert len(gmem) == 1
    del first
    gc.collect()
    tracker.span(x.data_ptr() + 80, 40, second, "in its place")
    tracker.sweep()
    assert len(gmem) == 1 and gmem.find(x.data_ptr() + 80, 40) and not gmem.find(x.data_ptr(), 4)


def test_arrays_register_what_they_are_a_view_of():
    gmem = GlobalMemory()
    tracker = Tracker(gmem)
    a = np.zeros((10, 10), np.float32)
    tracker.array(a[2:4])
    assert gmem.find(a.ctypes.data, 400)
    tracker.clear()
    assert len(gmem) == 0


@pytest.mark.parametrize("shape", [(4, 3), (1, 5), (3, 1, 7)])
@pytest.mark.parametrize("steps", [(8, 1), (1, 4), (-8, 1)])
def test_extent(shape, steps):
    strides = (*steps, 2)[: len(shape)]
    offsets = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]
    assert extent(shape, strides, 16) == (2 * min(offsets), 2 * max(offsets) + 2)
    assert extent((0, *shape[1:]), strides, 16) == (0, 0)


def test_extent_of_half_bytes():
    assert extent((2, 3), (3, 1), 4) == (0, 3)


def test_patches_restore_inherited_attributes_and_the_environment():
    class Base:
        def value(self):
            return 1

    class Derived(Base):
        other = property(lambda self: 2)

    os.environ.pop("DSV4_TEST", None)
    descriptor = vars(Derived)["other"]
    with pytest.raises(ZeroDivisionError), patches() as patch:
        patch.around(Derived, "value", lambda original, self: original(self) + 10)
        patch.set(Derived, "other", property(lambda self: 3))
        patch.env("DSV4_TEST", "x")
        assert (Derived().value(), Derived().other, os.environ["DSV4_TEST"]) == (11, 3, "x")
        raise ZeroDivisionError
    assert "value" not in vars(Derived) and vars(Derived)["other"] is descriptor
    assert "DSV4_TEST" not in os.environ


# --- tensor maps through the runtime's symbols ------------------------------------------------------------------------


def _pointer(values, code):
    array = np.array(values, code)
    return array, array.ctypes.data


def test_im2col_maps_are_encoded_as_the_driver_is_asked():
    """The arguments reach the encoder in the driver's order: every value differs from every other of its kind."""
    from dsv4lib.emulator.units import tensormap

    dims, strides, steps = [64, 20, 18, 3], [128, 2560, 46080], [1, 2, 3, 1]
    lower, upper = [-1, -2], [1, 2]
    kept = [_pointer(v, c) for v, c in ((dims, "u8"), (strides, "u8"), (lower, "i4"), (upper, "i4"), (steps, "u4"))]
    at_dims, at_strides, at_lower, at_upper, at_steps = (address for _, address in kept)
    out = np.zeros(128, np.uint8)
    calls = symbols.callbacks()
    with active(make("sm_100a")):
        code = calls["_cuTensorMapEncodeIm2col"](
            out.ctypes.data, 6, 4, 4096, at_dims, at_strides, at_lower, at_upper, 32, 48, at_steps, 0, 2, 1, 0
        )  # fmt: skip
        RUNTIME.raise_pending()
        expected = tensormap.encode_im2col(6, 4096, dims, strides, lower, upper, 32, 48, steps, 0, 2, 1, 0)
        assert code == 0 and out.tobytes() == expected
        found = tensormap.decode(out.tobytes())
        assert found.im2col and (found.lower, found.upper, found.box, found.pixels) == ((-1, -2), (1, 2), (32,), 48)
        calls["_cuTensorMapEncodeIm2colWide"](
            out.ctypes.data, 6, 4, 4096, at_dims, at_strides, -3, 5, 32, 48, at_steps, 0, 1, 3, 2, 0
        )
        RUNTIME.raise_pending()
        assert out.tobytes() == tensormap.encode_im2col_wide(
            6, 4096, dims, strides, -3, 5, 32, 48, steps, 0, 1, 3, 2, 0
        )
        calls["_cuTensorMapEncodeIm2col"](
            out.ctypes.data, 6, 2, 4096, at_dims, at_strides, at_lower, at_upper, 32, 48, at_steps, 0, 2, 1, 0
        )  # fmt: skip
        with pytest.raises(ArgumentError, match="tensorRank=2"):
            RUNTIME.raise_pending()
        calls["_cuTensorMapReplaceAddress"]()
        with pytest.raises(LaunchError, match="cuTensorMapReplaceAddress is not supported"):
            RUNTIME.raise_pending()
