"""Loads, stores, atomics and matrix moves against numpy; bounds, alignment and initialisation."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dsv4lib.emulator.errors import EmulatorError, HazardError, MemoryFault, UnsupportedInstruction
from dsv4lib.emulator.machine.machine import GlobalMemory
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.native import abi
from tests.emulator.launching import aligned, copy, entry, launch, prepare

RNG = np.random.default_rng(7)
LANES = np.arange(32)


def random_bytes(n: int) -> np.ndarray:
    return copy(RNG.integers(0, 256, n, dtype=np.uint8))


# (vector, type, bits): all widths; wide ones for global memory only.
FORMS = [("", t, b) for b in (8, 16, 32, 64) for t in (f"b{b}", f"u{b}", f"s{b}")]
FORMS += [("", "f32", 32), ("", "f64", 64), ("", "b128", 128)]
FORMS += [("v2.", "b8", 8), ("v4.", "b8", 8), ("v2.", "u16", 16), ("v4.", "b16", 16), ("v2.", "f32", 32)]
FORMS += [("v4.", "b32", 32), ("v2.", "b64", 64)]
WIDE = [("v8.", "b32", 32), ("v4.", "b64", 64)]


def move_kernel(space: str, form: tuple[str, str, int], modifiers: str = "") -> str:
    """Every lane copies one access from `a` to `b` (through shared or local memory where ``space`` is one)."""
    vec, ptx, bits = form
    n = int(vec[1:-1] or 1) if vec else 1
    size = n * bits // 8
    width = max(bits, 16)
    names = ", ".join(f"%v{i}" for i in range(n))
    value = f"{{{names}}}" if n > 1 else names
    registers = f".reg .b{width} %v<{n}>;"
    head = f"""
    ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b];
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, {size};
    add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
    """
    raw = f"b{bits}"
    plain = f"{vec}{raw}"
    if space == "global":
        body = f"ld.global{modifiers}.{vec}{ptx} {value}, [%rd1]; st.global.{plain} [%rd2], {value};"
    elif space == "generic":
        body = f"ld{modifiers}.{vec}{ptx} {value}, [%rd1]; st.{plain} [%rd2], {value};"
    elif space == "shared":
        body = f"""
        mov.u32 %r2, buffer; mad.lo.s32 %r2, %r1, {size}, %r2;
        ld.global.{plain} {value}, [%rd1]; st.shared{modifiers}.{plain} [%r2+0], {value};
        bar.sync 0;
        xor.b32 %r3, %r1, 1; mov.u32 %r2, buffer; mad.lo.s32 %r2, %r3, {size}, %r2;
        ld.shared.{vec}{ptx} {value}, [%r2]; st.global.{plain} [%rd2], {value};
        """
    elif space == "generic_shared":
        body = f"""
        mov.u64 %rd4, buffer; cvta.shared.u64 %rd4, %rd4; mul.wide.u32 %rd5, %r1, {size}; add.s64 %rd6, %rd4, %rd5;
        ld.global.{plain} {value}, [%rd1]; st.{plain} [%rd6], {value};
        ld.{vec}{ptx} {value}, [%rd6]; st.global.{plain} [%rd2], {value};
        """
    else:
        body = f"""
        ld.global.{plain} {value}, [%rd1]; st.local.{plain} [scratch+16], {value};
        mov.u32 %r2, scratch; ld.local.{vec}{ptx} {value}, [%r2+16]; st.global.{plain} [%rd2], {value};
        """
    shared = ".shared .align 32 .b8 buffer[1024]; .local .align 16 .b8 scratch[64];"
    return entry("u64 a, u64 b", head + body, registers, shared)


@pytest.mark.parametrize("form", FORMS + WIDE, ids=lambda f: f[0] + f[1])
def test_global_moves(form):
    n = int(form[0][1:-1] or 1) if form[0] else 1
    size = n * form[2] // 8
    for space in ("global", "generic"):
        a, b = random_bytes(32 * size), aligned(32 * size, np.uint8)
        launch(move_kernel(space, form), a, b)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f[0] + f[1])
def test_shared_and_local_moves(form):
    n = int(form[0][1:-1] or 1) if form[0] else 1
    size = n * form[2] // 8
    a = random_bytes(32 * size)
    for space in ("shared", "generic_shared", "local"):
        b = aligned(32 * size, np.uint8)
        launch(move_kernel(space, form), a, b)
        want = a.reshape(32, size)[LANES ^ 1 if space == "shared" else LANES].ravel()
        np.testing.assert_array_equal(b, want)


@pytest.mark.parametrize(
    "modifiers",
    [
        ".ca",
        ".cg",
        ".cs",
        ".lu",
        ".cv",
        ".nc",
        ".L1::no_allocate",
        ".L1::evict_last.L2::256B",
        ".nc.L1::no_allocate.L2::128B",
    ],
)
def test_load_hints(modifiers):
    a, b = random_bytes(128), aligned(128, np.uint8)
    launch(move_kernel("global", ("", "b32", 32), modifiers), a, b)
    np.testing.assert_array_equal(a, b)


def test_second_level_priorities_exist_for_32_bytes():
    a, b = random_bytes(1024), aligned(1024, np.uint8)
    launch(move_kernel("global", ("v8.", "b32", 32), ".L1::no_allocate.L2::evict_first.L2::256B"), a, b)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sem", [".relaxed.gpu", ".acquire.sys", ".volatile", ".weak", ".relaxed.cluster"])
def test_load_semantics(sem):
    text = move_kernel("global", ("", "b32", 32)).replace("ld.global.b32", f"ld{sem}.global.b32")
    a, b = random_bytes(128), aligned(128, np.uint8)
    launch(text, a, b)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "opcode",
    ["ld.global.ca.L1::evict_last.b32", "ld.global.foo.b32", "ld.relaxed.global.b32", "ld.global.L2::evict_last.b32"],
)
def test_unknown_modifiers_are_refused(opcode):
    text = move_kernel("global", ("", "b32", 32)).replace("ld.global.b32", opcode)
    with pytest.raises(UnsupportedInstruction, match="ld"):
        launch(text, random_bytes(128), random_bytes(128))


def test_cache_policy_operand():
    text = move_kernel("global", ("", "b32", 32)).replace(
        "ld.global.b32 %v0, [%rd1];",
        "createpolicy.fractional.L2::evict_last.b64 %rd9; ld.global.L2::cache_hint.b32 %v0, [%rd1], %rd9;",
    )
    a, b = random_bytes(128), aligned(128, np.uint8)
    launch(text, a, b)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("ptx", "dtype"), [("s8", np.int8), ("u8", np.uint8), ("s16", np.int16), ("u16", np.uint16)])
@pytest.mark.parametrize("width", [32, 64])
def test_narrow_loads_extend(ptx, dtype, width):
    a = copy(RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, 32).astype(dtype))
    b = aligned(32, f"i{width // 8}")
    size = np.dtype(dtype).itemsize
    body = f"""
    ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, {size}; add.s64 %rd1, %rd1, %rd3; mul.wide.u32 %rd3, %r1, {width // 8};
    add.s64 %rd2, %rd2, %rd3; ld.global.{ptx} %v, [%rd1]; st.global.b{width} [%rd2], %v;
    """
    launch(entry("u64 a, u64 b", body, f".reg .b{width} %v;"), a, b)
    np.testing.assert_array_equal(b, a.astype(b.dtype))


def test_local_variables_by_name_are_of_the_lane():
    body = """
    ld.param.b64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 8; add.s64 %rd1, %rd1, %rd3;
    st.local.b32 [scratch], %r1; ld.local.b32 %r2, [scratch]; st.global.b32 [%rd1], %r2;
    mad.lo.u32 %r1, %r1, %r1, 7; st.local.b16 [scratch+6], %r1;
    ld.local.u16 %r3, [scratch+6]; st.global.b32 [%rd1+4], %r3;
    """
    out = aligned((32, 2), np.uint32)
    launch(entry("u64 out", body, shared=".local .align 4 .b8 scratch[8];"), out)
    np.testing.assert_array_equal(out, np.stack([LANES, LANES * LANES + 7], 1))


def test_stores_truncate_and_take_immediates():
    b = aligned(32, np.uint32)
    body = """
    ld.param.b64 %rd2, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd2, %rd3;
    mov.b64 %rd4, 0x1122334455667788; st.global.b16 [%rd2], %rd4; st.global.v2.b8 [%rd2+2], {7, %rd4};
    """
    launch(entry("u64 b", body), b)
    assert (b == 0x88077788).all()


def test_parameters():
    """Every width, vectors, negative values, and a parameter's generic address, of 64 or of 32 bits of its own."""
    out = aligned(8, np.uint32)
    body = """
    ld.param.b64 %rd1, [out]; ld.param.s16 %r1, [small]; st.global.b32 [%rd1], %r1;
    ld.param.v2.b32 {%r2, %r3}, [pair]; st.global.v2.b32 [%rd1+8], {%r3, %r2};
    ld.param.f32 %f1, [x]; st.global.f32 [%rd1+4], %f1;
    mov.b64 %rd2, pair; cvta.param.u64 %rd3, %rd2; ld.b32 %r4, [%rd3+4]; st.global.b32 [%rd1+16], %r4;
    mov.b32 %r5, pair; cvt.u64.u32 %rd4, %r5; cvta.param.u64 %rd5, %rd4; ld.b32 %r6, [%rd5+4];
    ld.param.b32 %r7, [%r5]; st.global.v2.b32 [%rd1+24], {%r6, %r7};
    """
    launch(entry("u64 out, u16 small, u64 pair, f32 x", body), out, -3, 0x0000000B_0000000A, 2.5)
    assert out.tolist() == [0xFFFFFFFD, np.float32(2.5).view(np.uint32), 0xB, 0xA, 0xB, 0, 0xB, 0xA]


def test_partial_masks_leave_other_lanes_alone():
    a, b = random_bytes(128), aligned(32, np.uint32)
    body = """
    ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3; mov.u32 %r5, 99; and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 1;
    @%p1 ld.global.b32 %r5, [%rd1]; setp.lt.u32 %p2, %r1, 20; @!%p2 bra DONE; st.global.b32 [%rd2], %r5; DONE:
    """
    launch(entry("u64 a, u64 b", body), a, b)
    want = np.where(LANES & 1, a.view(np.uint32), 99)
    np.testing.assert_array_equal(b, np.where(LANES < 20, want, 0))


# --- faults ----------------------------------------------------------------------------------------------------------

ACCESS = "ld.param.b64 %rd1, [a]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3;\n"


@pytest.mark.parametrize(
    ("access", "match"),
    [
        ("ld.global.b32 %r2, [%rd1+4];", r"lane 31: load of 4 bytes .* is outside every allocation; nearest: 1 bytes"),
        ("st.global.b32 [%rd1-8], %r1;", r"lane 0: store of 4 bytes at .* 8 bytes before argument 0"),
        ("ld.global.v2.b32 {%r2, %r3}, [%rd1];", r"lane 1: address 0x\w+ is not a multiple of 8"),
        (
            "ld.param.b64 %rd4, [a]; add.s64 %rd4, %rd4, 2; ld.global.b32 %r2, [%rd4];",
            r"lane 0: address 0x\w+ is not a",
        ),
        ("mad.lo.u32 %r3, %r1, 2, 1024; ld.shared.b32 %r2, [%r3];", r"lane 1: address 0x402 is not a multiple of 4"),
        ("mad.lo.u32 %r3, %r1, 2, 1024; st.shared.b32 [%r3], %r2;", r"lane 1: address 0x402 is not a multiple of 4"),
        ("mad.lo.u32 %r3, %r1, 2, 0; ld.local.b32 %r2, [%r3];", r"lane 1: address 0x2 is not a multiple of 4"),
        (
            "mov.b64 %rd5, a; cvta.param.u64 %rd5, %rd5; ld.global.b32 %r2, [%rd5]; st.global.b32 [%rd5], 1;",
            "hits read-only kernel parameters",
        ),
        ("mov.u32 %r4, 0x20000000; st.shared.b32 [%r4], %r1;", r"CTA rank 32, 4 bytes, is outside shared memory"),
        ("atom.global.add.u32 %r2, [%rd1+256], 1;", r"outside every allocation"),
        ("mov.b64 %rd5, 0; ld.b32 %r2, [%rd5];", r"lane 0: .* outside every allocation"),
        ("mov.u32 %r4, 0x4000000; ld.shared.b32 %r2, [%r4];", r"CTA rank 4, 4 bytes, is outside shared memory"),
        ("mov.u32 %r4, 0x40000; st.shared.b32 [%r4], %r1;", r"shared address 0x40000 .* outside shared memory"),
        ("mov.u32 %r4, 64; ld.local.b32 %r2, [%r4];", r"local offset 0x40, 4 bytes, is outside 64 bytes"),
        ("ld.param.b32 %r2, [a+8];", r"parameter offset 8, 4 bytes, is outside 8 bytes"),
        ("mov.b64 %rd5, a; cvta.param.u64 %rd5, %rd5; st.b32 [%rd5], 1;", r"hits read-only kernel parameters"),
        # The last bytes of the address space, such as index -1 of a null pointer: their end wraps to 0.
        ("mov.b64 %rd5, 0; ld.global.b32 %r2, [%rd5+-4];", r"load of 4 bytes at 0xfffffffffffffffc is outside"),
        ("mov.b64 %rd5, -16; st.v2.b64 [%rd5], {%rd1, %rd1};", r"store of 16 bytes at 0xfffffffffffffff0 is outside"),
        ("cp.async.ca.shared.global [s], [-8], 8; cp.async.wait_all;", r"load of 8 bytes at 0xfffffffffffffff8"),
    ],
)
def test_faults_name_lane_and_line(access, match):
    a = aligned(32, np.int32)
    text = entry("u64 a", ACCESS + access + "\n", shared=".shared .b8 s[64]; .local .b8 l[64];")
    with pytest.raises(MemoryFault, match=match) as error:
        launch(text, a)
    place = error.value.place
    line = next(i for i, line in enumerate(text.splitlines(), 1) if access[-8:] in line)
    assert place.ptx_line == line and place.warp == 0 and place.cta == (0, 0, 0)
    assert f"PTX line {line}" in str(error.value)


@pytest.mark.parametrize("rank", [1, 15, 16, 17, 20, 32, 33, 48, 255])
def test_no_such_cta_in_the_cluster(rank):
    text = entry("", f"mov.u32 %r4, {rank << 24 | 1024}; st.shared.b32 [%r4], %r1;", shared=".shared .b8 s[64];")
    with pytest.raises(MemoryFault, match=f"CTA rank {rank}, 4 bytes, is outside shared memory"):
        launch(text)


def test_uninitialised_shared_memory_is_reported_once_and_can_stop():
    body = """
    ld.param.b64 %rd1, [a]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mad.lo.s32 %r2, %r1, 4, %r2;
    setp.ne.u32 %p1, %r1, 5; @%p1 st.shared.b32 [%r2], %r1; bar.sync 0; mov.u32 %r9, 0;
    LOOP: ld.shared.b32 %r3, [%r2]; add.s32 %r9, %r9, 1; setp.lt.s32 %p2, %r9, 3; @%p2 bra LOOP;
    mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3; st.global.b32 [%rd1], %r3;
    """
    text = entry("u64 a", body, shared=".shared .align 4 .b8 s[128];")
    a = aligned(32, np.int32)
    result = launch(text, a)
    assert [(h.kind, h.count, h.facts["lane"]) for h in result.hazards] == [("uninitialised_smem", 3, 5)]
    np.testing.assert_array_equal(a, np.where(LANES == 5, 0, LANES))
    with pytest.raises(HazardError, match="lane 5 reads shared address 0x414"):
        launch(text, a, settings=Settings(fatal=frozenset(["uninitialised_smem"])))
    assert not launch(text, a, settings=Settings(native_checks=0)).hazards


def test_generic_stores_leave_chunks_dirty_for_the_async_proxy():
    body = "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 3; mov.u32 %r2, s; @%p1 st.shared.v4.b32 [%r2+32], {1,2,3,4};"
    machine = prepare(entry("", body, shared=".shared .align 16 .b8 s[128];"), block=64)
    clusters = []
    started = machine.cluster_started
    machine.cluster_started = lambda c: (clusters.append(c), started(c))
    machine.run()
    smem = clusters[0].ctas[0].smem
    assert np.nonzero(smem.dirty)[0].tolist() == [(1024 + 32) // 16] and smem.dirty.max() == 1
    assert np.nonzero(smem.init)[0].tolist() == list(range(1024 + 32, 1024 + 48))


def test_sector_counter():
    text = move_kernel("global", ("v4.", "b32", 32))
    result = launch(text, random_bytes(512), random_bytes(512), settings=Settings(native_checks=abi.CHECK_COUNTERS))
    assert result.stats["global_sectors"] == 32


def bank_conflicts(addresses: np.ndarray, nbytes: int) -> int:
    """Wavefronts beyond one per part of the warp, by counting."""
    part = {8: 16, 16: 8}.get(nbytes, 32)
    extra = 0
    for first in range(0, 32, part):
        words = {int(a) // 4 + w for a in addresses[first : first + part] for w in range(max(nbytes // 4, 1))}
        extra += np.bincount([w % 32 for w in words]).max() - 1
    return extra


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("pitch", [0, 4, 16, 20, 48, 128, 132])
def test_bank_conflict_counter(nbytes, pitch):
    pitch = -(-pitch // nbytes) * nbytes
    value = {16: "v4.b32 {%r4, %r5, %r6, %r7}", 8: "b64 %rd5", 4: "b32 %r5", 2: "b16 %h1", 1: "b8 %h1"}[nbytes]
    kind, _, register = value.partition(" ")
    body = (
        f"mov.u32 %r1, %tid.x; mov.u32 %r2, s; mad.lo.s32 %r3, %r1, {pitch}, %r2; st.shared.{kind} [%r3], {register};"
    )
    text = entry("", body, shared=".shared .align 128 .b8 s[8192];")
    result = launch(text, settings=Settings(native_checks=abi.CHECK_COUNTERS))
    assert result.stats["bank_conflicts"] == bank_conflicts(LANES * pitch, nbytes)


# --- atomics ---------------------------------------------------------------------------------------------------------


def atomic_kernel(opcode: str, space: str, bits: int, extra: str = "") -> str:
    """All lanes of a warp: old[lane] = atom(op, x[lane % 4], v[lane])."""
    target = "%rd4" if space != "shared" else "%r4"
    size = bits // 8
    shared = f"""
    mov.u32 %r4, s; and.b32 %r3, %r1, 3; mad.lo.s32 %r4, %r3, {size}, %r4;
    setp.lt.u32 %p1, %r1, 4; @%p1 ld.global.b{bits} %x, [%rd4]; @%p1 st.shared.b{bits} [%r4], %x;
    """
    back = f"@%p1 ld.shared.b{bits} %x, [%r4]; @%p1 st.global.b{bits} [%rd4], %x;"
    body = f"""
    ld.param.b64 %rd1, [x]; ld.param.b64 %rd2, [v]; ld.param.b64 %rd3, [old]; mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 3; mul.wide.u32 %rd5, %r2, {size}; add.s64 %rd4, %rd1, %rd5;
    mul.wide.u32 %rd5, %r1, {size}; add.s64 %rd2, %rd2, %rd5; add.s64 %rd3, %rd3, %rd5;
    {shared if space == "shared" else ""}
    ld.global.b{bits} %v, [%rd2]; {opcode} %o, [{target}], %v{extra}; st.global.b{bits} [%rd3], %o;
    {back if space == "shared" else ""}
    """
    return entry("u64 x, u64 v, u64 old", body, f".reg .b{bits} %x, %v, %o;", ".shared .align 16 .b8 s[64];")


def serial(x, v, op):
    """Lane after lane."""
    x, old = x.copy(), np.empty_like(v)
    for lane in range(32):
        old[lane] = x[lane % 4]
        x[lane % 4] = op(x[lane % 4], v[lane])
    return x, old


INTEGER = {
    "and.b32": (np.uint32, np.bitwise_and),
    "or.b64": (np.uint64, np.bitwise_or),
    "xor.b32": (np.uint32, np.bitwise_xor),
    "add.u32": (np.uint32, np.add),
    "add.s32": (np.int32, np.add),
    "add.u64": (np.uint64, np.add),
    "inc.u32": (np.uint32, lambda a, b: np.uint32(0) if a >= b else a + np.uint32(1)),
    "dec.u32": (np.uint32, lambda a, b: b if a == 0 or a > b else a - np.uint32(1)),
    "min.s32": (np.int32, np.minimum),
    "max.u32": (np.uint32, np.maximum),
    "min.u64": (np.uint64, np.minimum),
    "max.s64": (np.int64, np.maximum),
    "exch.b32": (np.uint32, lambda a, b: b),
    "exch.b64": (np.uint64, lambda a, b: b),
}


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("op", INTEGER)
def test_integer_atomics(op, space):
    dtype, function = INTEGER[op]
    bits = np.dtype(dtype).itemsize * 8
    raw = RNG.integers(0, 256, (36, bits // 8), dtype=np.uint8)
    if op[:3] in ("inc", "dec"):
        raw[:, 1:] = 0
        raw &= 7
    values = raw.reshape(-1).view(dtype)
    x, v, old = copy(values[:4]), copy(values[4:]), aligned(32, dtype)
    with np.errstate(over="ignore"):
        want_x, want_old = serial(x, v, function)
    name, _, ptx = op.partition(".")
    where = "" if space == "generic" else f".{space}"
    launch(atomic_kernel(f"atom{where}.{name}.{ptx}", space, bits), x, v, old)
    np.testing.assert_array_equal(x, want_x)
    np.testing.assert_array_equal(old, want_old)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_compare_and_swap(bits, space):
    dtype = np.dtype(f"u{bits // 8}")
    x, v, old = copy(np.array([0, 1, 2, 3], dtype)), copy((LANES % 3).astype(dtype)), aligned(32, dtype)
    want_x, want_old = serial(x, v, lambda a, b: dtype.type(2) if a == b else a)
    constant = {16: ", %c", 32: ", 2", 64: ", 2"}[bits]
    text = atomic_kernel(f"atom.acq_rel.gpu.{space}.cas.b{bits}", space, bits, constant)
    text = text.replace(".reg .b16 %x", ".reg .b16 %c, %x").replace(
        "mov.u32 %r1", "mov.b16 %c, 2; mov.u32 %r1", bits == 16
    )
    launch(text, x, v, old)
    np.testing.assert_array_equal(x, want_x)
    np.testing.assert_array_equal(old, want_old)


FLOATS = {
    "add.f32": np.float32,
    "add.f64": np.float64,
    "add.noftz.f16": np.float16,
    "add.noftz.bf16": ml_dtypes.bfloat16,
    "add.noftz.f16x2": np.float16,
    "add.noftz.bf16x2": ml_dtypes.bfloat16,
}


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("op", FLOATS)
def test_float_atomics(op, space):
    dtype = np.dtype(FLOATS[op])
    n = 2 if op.endswith("x2") else 1
    x = copy(RNG.normal(size=(4, n)).astype(dtype))
    v = copy((RNG.normal(size=(32, n)) * 2.0 ** RNG.integers(-9, 9, (32, n))).astype(dtype))
    old = aligned((32, n), dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    want_x, want_old = serial(x, v, lambda a, b: (a.astype(wide) + b.astype(wide)).astype(dtype))
    where = "" if space == "generic" else f".{space}"
    launch(atomic_kernel(f"atom{where}.{op}", space, dtype.itemsize * 8 * n), x, v, old)
    np.testing.assert_array_equal(x, want_x)
    np.testing.assert_array_equal(old, want_old)


def test_f32_sums_flush_subnormals_in_global_memory_only():
    tiny = np.float32(1e-40)
    for space, want in (("global", 0.0), ("shared", tiny), ("generic", 0.0)):
        x, v, old = copy(np.full(4, tiny)), copy(np.zeros(32, np.float32)), aligned(32, np.float32)
        where = "" if space == "generic" else f".{space}"
        launch(atomic_kernel(f"atom{where}.add.f32", space, 32), x, v, old)
        assert (x == np.float32(want)).all(), space


SIGNALING, ONE = 0x7FF4 << 48, 1023 << 52
# (operation, memory, operand, result in global memory, in shared memory), measured on an H200.
MEASURED = [
    ("add.f32", 0x000116C2, 0, 0, 0x000116C2),
    ("add.f32", 0x00800001, 0x80800000, 0, 1),
    ("add.f32", 0x3F800000, 0x000116C2, 0x3F800000, 0x3F800000),
    ("add.f32", 0x7FA00001, 0x3F800000, 0x7FFFFFFF, 0x7FFFFFFF),
    ("add.f32", 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7FFFFFFF),
    ("add.f64", 1, 1, 2, 2),
    ("add.f64", SIGNALING + 1, ONE, SIGNALING + 1, (0x7FFC << 48) + 1),
    ("add.f64", ONE, SIGNALING + 1, SIGNALING + 1, (0x7FFC << 48) + 1),
    ("add.f64", SIGNALING + 1, SIGNALING + 2, SIGNALING + 2, (0x7FFC << 48) + 2),
    ("add.f64", (0x7FF8 << 48) + 1, SIGNALING + 2, SIGNALING + 2, (0x7FFC << 48) + 2),
    ("add.f64", 0x7FF << 52, 0xFFF << 52, 0xFFF8 << 48, 0xFFF8 << 48),
    ("add.f64", (0xFFF8 << 48) + 3, ONE, (0xFFF8 << 48) + 3, (0xFFF8 << 48) + 3),
    ("add.noftz.f16", 1, 1, 2, 2),
    ("add.noftz.f16", 0x7D01, 0x3C00, 0x7FFF, 0x7FFF),
    ("add.noftz.bf16", 1, 1, 2, 2),
    ("add.noftz.bf16", 0x7FA1, 0x3F80, 0x7FFF, 0x7FFF),
    ("add.noftz.bf16x2", 0x00010001, 0x00013F80, 0x00023F80, 0x00023F80),
]


@pytest.mark.parametrize(("op", "memory", "operand", "in_global", "in_shared"), MEASURED)
def test_float_sums_as_measured(op, memory, operand, in_global, in_shared):
    bits = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16, "bf16x2": 32}[op.rpartition(".")[2]]
    for space, want in (("global", in_global), ("shared", in_shared), ("generic", in_global)):
        x, v, old = (copy(np.full(n, b, f"u{bits // 8}")) for n, b in ((4, memory), (32, operand), (32, 0)))
        where = "" if space == "generic" else f".{space}"
        text = atomic_kernel(f"@%p2 atom{where}.{op}", space, bits)
        launch(text.replace("mov.u32 %r1, %tid.x;", "mov.u32 %r1, %tid.x; setp.lt.u32 %p2, %r1, 4;"), x, v, old)
        assert [hex(b) for b in x.tolist()] == [hex(want)] * 4, space


@pytest.mark.parametrize(("ptx", "nan"), [("f16", 0x7E01), ("bf16", 0x7FC1)])
def test_vector_minimum_as_measured(ptx, nan):
    """NaN loses against a number, two NaNs are canonical, -0 is below +0."""
    pairs = [(nan, 0x3C00), (0x3C00, nan), (nan, nan + 1), (0, 0x8000), (0x8000, 0), (1, 0x8001)]
    want = {"min": [0x3C00, 0x3C00, 0x7FFF, 0x8000, 0x8000, 0x8001], "max": [0x3C00, 0x3C00, 0x7FFF, 0, 0, 1]}
    for op, results in want.items():
        for (memory, operand), result in zip(pairs, results, strict=True):
            x = copy(np.full(2, memory, np.uint16))
            body = (
                f"ld.param.b64 %rd1, [x]; mov.b16 %h1, {operand}; red.global.{op}.noftz.v2.{ptx} [%rd1], {{%h1, %h1}};"
            )
            launch(entry("u64 x", body), x, block=1)
            assert x.tolist() == [result] * 2


def test_reductions_and_the_order_of_scope_and_space():
    x = copy(np.array([5, 0, 100], np.uint32))
    body = """
    ld.param.b64 %rd1, [x]; mov.u32 %r1, %tid.x;
    red.relaxed.gpu.global.add.u32 [%rd1], 1; red.global.max.u32 [%rd1+4], %r1;
    atom.global.cta.min.u32 _, [%rd1+8], %r1;
    """
    launch(entry("u64 x", body), x, block=40)
    assert x.tolist() == [45, 39, 0]


@pytest.mark.parametrize(
    ("ptx", "dtype", "n", "op"),
    [
        ("f32", np.float32, 4, "add"),
        ("f32", np.float32, 2, "add"),
        ("bf16", ml_dtypes.bfloat16, 8, "max"),
        ("f16", np.float16, 4, "min"),
    ],
)
def test_vector_reductions(ptx, dtype, n, op):
    dtype = np.dtype(dtype)
    x, v = copy(RNG.normal(size=n).astype(dtype)), copy(RNG.normal(size=(32, n)).astype(dtype))
    bits = dtype.itemsize * 8
    names = "{" + ", ".join(f"%v{i}" for i in range(n)) + "}"
    loads = "".join(f"ld.global.b{bits} %v{i}, [%rd2+{i * dtype.itemsize}];" for i in range(n))
    noftz = "" if ptx == "f32" else ".noftz"
    body = f"""
    ld.param.b64 %rd1, [x]; ld.param.b64 %rd2, [v]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, {n * dtype.itemsize};
    add.s64 %rd2, %rd2, %rd3; {loads} red.global.{op}{noftz}.v{n}.{ptx} [%rd1], {names};
    """
    want = x.copy()
    for row in v:
        both = (want.astype(np.float32), row.astype(np.float32))
        want = {"add": np.add, "min": np.minimum, "max": np.maximum}[op](*both).astype(dtype)
    start = x.copy()
    text = entry("u64 x, u64 v", body, f".reg .b{bits} %v<{n}>;")
    launch(text, x, v)
    np.testing.assert_array_equal(x, want)
    x[...] = start
    launch(text.replace(f"{op}{noftz}.v{n}.{ptx}", f"v{n}.{ptx}.{op}{noftz}"), x, v)
    np.testing.assert_array_equal(x, want)


# --- matrices --------------------------------------------------------------------------------------------------------


def matrix_kernel(opcode: str, rows: int, registers: int) -> str:
    """`a` (rows of 16 bytes) goes to shared memory with a pitch of 48 bytes, then through ldmatrix to `out`."""
    names = ", ".join(f"%m{i}" for i in range(registers))
    stores = "".join(f"st.global.b32 [%rd2+{4 * i}], %m{i};" for i in range(registers))
    body = f"""
    ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, s;
    mad.lo.s32 %r2, %r1, 48, %r2; mul.wide.u32 %rd3, %r1, 16; add.s64 %rd1, %rd1, %rd3; setp.lt.u32 %p1, %r1, {rows};
    @%p1 ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd1]; @%p1 st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
    bar.sync 0; {opcode} {{{names}}}, [%r2]; mul.wide.u32 %rd3, %r1, {4 * registers}; add.s64 %rd2, %rd2, %rd3; {stores}
    """
    return entry("u64 a, u64 out", body, f".reg .b32 %m<{registers}>;", ".shared .align 16 .b8 s[1536];")


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(n, trans):
    a = copy(RNG.integers(0, 1 << 16, (32, 8), dtype=np.uint16))
    out = aligned((32, n, 2), np.uint16)
    opcode = f"ldmatrix.sync.aligned.m8n8.x{n}{'.trans' if trans else ''}.shared.b16"
    launch(matrix_kernel(opcode, 8 * n, n), a, out)
    for k in range(n):
        matrix = a[8 * k : 8 * k + 8]
        matrix = matrix.T if trans else matrix
        for lane in range(32):
            np.testing.assert_array_equal(out[lane, k], matrix[lane // 4, 2 * (lane % 4) :][:2])


@pytest.mark.parametrize("n", [1, 2])
def test_ldmatrix_bytes_transposed(n):
    a = copy(RNG.integers(0, 256, (32, 16), dtype=np.uint8))
    out = aligned((32, 2 * n, 4), np.uint8)
    launch(matrix_kernel(f"ldmatrix.sync.aligned.m16n16.x{n}.trans.shared.b8", 16 * n, 2 * n), a, out)
    for lane in range(32):
        for j in range(2 * n):
            matrix = a[16 * (j // 2) : 16 * (j // 2) + 16].T
            np.testing.assert_array_equal(out[lane, j], matrix[lane // 4 + 8 * (j % 2), 4 * (lane % 4) :][:4])


@pytest.mark.parametrize(("fmt", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_ldmatrix_unpacks(fmt, bits):
    values = RNG.integers(0, 1 << bits, (32, 16))
    a = random_bytes(512).reshape(32, 16)
    for r in range(32):
        packed = sum(int(v) << (bits * i) for i, v in enumerate(values[r]))
        a[r, : 2 * bits] = np.frombuffer(packed.to_bytes(2 * bits, "little"), np.uint8)
    out = aligned((32, 4, 4), np.uint8)
    launch(matrix_kernel(f"ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.{fmt}", 32, 4), a, out)
    for lane in range(32):
        for k in range(4):
            np.testing.assert_array_equal(out[lane, k], values[8 * k + lane // 4, 4 * (lane % 4) :][:4])
    out = aligned((32, 4, 4), np.uint8)
    launch(matrix_kernel(f"ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8x16.{fmt}", 32, 4), a, out)
    for lane in range(32):
        for j in range(4):
            matrix = values[16 * (j // 2) : 16 * (j // 2) + 16].T
            np.testing.assert_array_equal(out[lane, j], matrix[lane // 4 + 8 * (j % 2), 4 * (lane % 4) :][:4])


@pytest.mark.parametrize(
    ("shape", "n", "trans"),
    [("m8n8", 1, False), ("m8n8", 4, False), ("m8n8", 2, True), ("m16n8", 2, True), ("m16n8", 4, True)],
)
def test_stmatrix(shape, n, trans):
    """Fragments numbered by thread and register arrive at the documented element."""
    ptx, per_word = ("b16", 2) if shape == "m8n8" else ("b8", 4)
    dtype = np.uint16 if per_word == 2 else np.uint8
    fragments = copy(RNG.integers(0, np.iinfo(dtype).max, (32, n, per_word)).astype(dtype))
    names = ", ".join(f"%m{i}" for i in range(n))
    loads = "".join(f"ld.global.b32 %m{i}, [%rd1+{4 * i}];" for i in range(n))
    body = f"""
    ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, {4 * n};
    add.s64 %rd1, %rd1, %rd3; {loads} mov.u32 %r2, s; mad.lo.s32 %r2, %r1, 16, %r2;
    stmatrix.sync.aligned.{shape}.x{n}{".trans" if trans else ""}.shared.{ptx} [%r2], {{{names}}}; bar.sync 0;
    mul.wide.u32 %rd3, %r1, 16; add.s64 %rd2, %rd2, %rd3; setp.lt.u32 %p1, %r1, {8 * n};
    @%p1 ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2]; @%p1 st.global.v4.b32 [%rd2], {{%r4, %r5, %r6, %r7}};
    """
    out = aligned((32, 16 // dtype().itemsize), dtype)
    text = entry("u64 a, u64 out", body, f".reg .b32 %m<{n}>;", ".shared .align 16 .b8 s[512];")
    assert not launch(text, fragments, out).hazards
    for k in range(n):
        rows = out[8 * k : 8 * k + 8]
        for lane in range(32):
            for q in range(per_word):
                if per_word == 4:
                    got = rows[2 * (lane % 4) + q % 2, lane // 4 + 8 * (q // 2)]
                elif trans:
                    got = rows[2 * (lane % 4) + q, lane // 4]
                else:
                    got = rows[lane // 4, 2 * (lane % 4) + q]
                assert got == fragments[lane, k, q]


# --- the registry ----------------------------------------------------------------------------------------------------


def test_registry_views_gathers_and_explains():
    gmem = GlobalMemory()
    first, second = aligned(64, np.uint8), aligned(256, np.uint8)
    gmem.register_array(first, "first")
    gmem.register_array(second, "second", writable=False)
    start = first.ctypes.data
    gmem.view(start + 8, 4, write=True)[:] = [1, 2, 3, 4]
    assert first[8:12].tolist() == [1, 2, 3, 4]
    rows = np.array([start + 8, second.ctypes.data], np.uint64)
    second[:4] = 9
    np.testing.assert_array_equal(gmem.gather(rows, 4), [[1, 2, 3, 4], [9, 9, 9, 9]])
    gmem.scatter(rows[:1] + np.uint64(4), np.array([[7, 7]], np.uint8))
    assert first[12:14].tolist() == [7, 7]
    with pytest.raises(MemoryFault, match="read-only second"):
        gmem.view(second.ctypes.data, 4, write=True)
    with pytest.raises(MemoryFault, match="runs 4 bytes over the end of first"):
        gmem.view(start + 60, 8)
    with pytest.raises(MemoryFault, match="runs 2 bytes over the end of first"):
        gmem.gather(np.array([start, start + 62], np.uint64), 4)
    with pytest.raises(EmulatorError, match="overlaps"):
        gmem.register(start + 32, 64, "third")
    gmem.unregister(start)
    with pytest.raises(MemoryFault, match="outside every allocation"):
        gmem.view(start, 1)
