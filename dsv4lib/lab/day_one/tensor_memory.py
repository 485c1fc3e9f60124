"""Build probes of tensor memory: an image of it and of shared memory in, one action, tensor memory out.

Every CTA has 128 threads. They copy their image to shared memory and to 128 columns of tensor memory. One thread issues
the action, of a pair the even CTA's, and commits it. Then all 128 lanes of all columns are stored. So every operand
that an action reads has values wherever it looks, and a wrong address shows as wrong numbers.

| columns | what |
| --- | --- |
| 0-63 | D |
| 64-71 | A in tensor memory |
| 80-87, 88-95 | scale factors of A, of B |
| 96-97 | metadata of a sparse A |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dsv4lib.lab.day_one.probe import THREADS, Probe, codes, generator

SMEM = 32768
B_AT = 16384  # of B's operand in it
COLUMNS = 128
LANES = 128
D_AT, A_AT, SFA_AT, SFB_AT, META_AT = 0, 64, 80, 88, 96
TENSOR = LANES * COLUMNS * 4
FIRST = 100  # register of column 0


@dataclass
class Action:
    """PTX of one action, made of operands.

    Attributes:
        lines: instructions so far. every: executed by all threads instead of one.
    """

    lines: list[str] = field(default_factory=list)
    every: bool = False
    _words: int = 30
    _longs: int = 10

    def word(self, value: int) -> str:
        """A 32-bit register with a value."""
        name = f"%r{self._words}"
        self._words += 1
        self.lines.append(f"mov.b32 {name}, {value};")
        return name

    def tensor(self, column: int, lane: int = 0) -> str:
        """A register with an address of tensor memory, of this warp's lanes where all threads execute."""
        name = f"%r{self._words}"
        self._words += 1
        self.lines.append(f"add.s32 {name}, {'%r21' if self.every else '%r20'}, {lane << 16 | column};")
        return name

    def long(self, value: int) -> str:
        """A 64-bit register with a value."""
        name = f"%rd{self._longs}"
        self._longs += 1
        self.lines.append(f"mov.b64 {name}, {value};")
        return name

    def matrix(self, offset: int, constant: int) -> str:
        """A register with the descriptor of an operand ``offset`` bytes into shared memory; see `descriptor`."""
        name = f"%rd{self._longs}"
        self._longs += 1
        self.lines.append(f"add.s64 {name}, %rd9, {constant + (offset >> 4)};")
        return name

    def add(self, line: str) -> None:
        """Append an instruction."""
        self.lines.append(f"{line};")


SWIZZLES = {"none": 0, "128B_32": 1, "128B": 2, "64B": 4, "32B": 6}
WIDTHS = {"none": 16, "128B_32": 128, "128B": 128, "64B": 64, "32B": 32}


def descriptor(swizzle: str, leading: int, stride: int, base: int = 0) -> int:
    """Bits of a matrix descriptor of SM100, without the address; offsets in bytes."""
    return (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | base << 49 | SWIZZLES[swizzle] << 61


def strides(swizzle: str, major: str, rows: int, element: int) -> tuple[int, int]:
    """Leading and stride offsets of an operand whose atoms lie one after the other.

    Args:
        major: "K" or "MN". rows: along M or N. element: bytes of one.
    """
    width = WIDTHS[swizzle]
    atom = 8 * width
    if major == "K":
        return (128, 256) if swizzle == "none" else (16, atom)
    if swizzle == "none":
        return 128, 256
    atom = 4 * width if swizzle == "128B_32" else atom
    groups = 32 // element // (4 if swizzle == "128B_32" else 8) or 1
    return atom * groups, atom


_HEAD = """.reg .pred %p<16>; .reg .b32 %r<240>; .reg .b64 %rd<64>; .reg .b16 %h<4>;
.shared .align 1024 .b8 sm[{smem}]; .shared .align 8 .b64 bar; .shared .align 4 .b32 slot;
mov.u32 %r0, %tid.x;
mov.u32 %r1, {rank};
mov.u32 %r2, sm;
shl.b32 %r3, %r0, 4;
add.s32 %r4, %r2, %r3;
ld.param.u64 %rd1, [image];
ld.param.u64 %rd2, [out];
mul.wide.u32 %rd3, %r1, {image};
add.s64 %rd1, %rd1, %rd3;
mul.wide.u32 %rd3, %r1, {tensor};
add.s64 %rd2, %rd2, %rd3;
cvt.u64.u32 %rd3, %r3;
add.s64 %rd4, %rd1, %rd3;
mul.wide.u32 %rd5, %r0, {row};
add.s64 %rd6, %rd1, %rd5;
add.s64 %rd2, %rd2, %rd5;
{copies}
mov.u32 %r10, bar;
mov.u32 %r11, slot;
setp.ge.u32 %p1, %r0, 32;
setp.ne.u32 %p2, %r0, 0;
@%p1 bra READY;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r11], {columns};
tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
@%p2 bra READY;
mbarrier.init.shared.b64 [%r10], 1;
{init}READY:
fence.proxy.async.shared::cta;
{sync}ld.shared.b32 %r20, [%r11];
and.b32 %r13, %r0, 96;
shl.b32 %r13, %r13, 16;
add.s32 %r21, %r20, %r13;
{loads}
tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r21], {{{registers}}};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
{sync}tcgen05.fence::after_thread_sync;
shr.u32 %r12, %r2, 4;
cvt.u64.u32 %rd9, %r12;
setp.ne.u32 %p4, 0, 0;
setp.eq.u32 %p5, 0, 0;
"""
_TAIL = """tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{registers}}}, [%r21];
tcgen05.wait::ld.sync.aligned;
{stores}
tcgen05.fence::before_thread_sync;
{sync}@%p1 bra END;
tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r20, {columns};
END:"""
_CLUSTER = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"


def body(action: Action, group: int) -> str:
    """PTX of a probe. %p4 is false, %p5 true, %r20 the allocation, %r21 this warp's lanes of it."""
    registers = [f"%r{FIRST + i}" for i in range(COLUMNS)]
    quads = [registers[i : i + 4] for i in range(0, COLUMNS, 4)]
    copies = "\n".join(
        f"ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%rd4+{at}];\nst.shared.v4.b32 [%r4+{at}], {{%r5, %r6, %r7, %r8}};"
        for at in range(0, SMEM, 16 * THREADS)
    )
    loads = "\n".join(f"ld.global.v4.b32 {{{', '.join(q)}}}, [%rd6+{SMEM + 16 * i}];" for i, q in enumerate(quads))
    stores = "\n".join(f"st.global.v4.b32 [%rd2+{16 * i}], {{{', '.join(q)}}};" for i, q in enumerate(quads))
    values = {
        "smem": SMEM,
        "image": SMEM + TENSOR,
        "tensor": TENSOR,
        "row": 4 * COLUMNS,
        "columns": COLUMNS,
        "group": group,
        "rank": "%cluster_ctarank" if group > 1 else "0",
        "copies": copies,
        "loads": loads,
        "stores": stores,
        "registers": ", ".join(registers),
        "init": "fence.mbarrier_init.release.cluster;\n" if group > 1 else "",
        "sync": "bar.sync 0;\n" + (_CLUSTER if group > 1 else ""),
    }
    text = "\n".join(action.lines)
    if not action.every:
        multicast = ".multicast::cluster" if group > 1 else ""
        mask = ", %h0" if group > 1 else ""
        text = (
            "@%p2 bra WAIT;\n"
            + ("setp.ne.u32 %p6, %r1, 0;\n@%p6 bra WAIT;\nmov.b16 %h0, 3;\n" if group > 1 else "")
            + f"{text}\ntcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 "
            + f"[%r10]{mask};\nWAIT:\nmbarrier.try_wait.parity.shared.b64 %p7, [%r10], 0;\n@!%p7 bra WAIT;"
        )
    return _HEAD.format(**values) + text + "\n" + _TAIL.format(**values)


@dataclass(frozen=True)
class Contents:
    """What memory holds before the action: types by place, see `codes`.

    Attributes:
        a, b, d: of the operands. style: "small" or "normal". columns: further tensor memory, uint32 (CTAs, 128, n) by
            first column.
    """

    a: str = "u8"
    b: str = "u8"
    d: str = "f32"
    style: str = "small"
    columns: Mapping[int, np.ndarray] = field(default_factory=dict)


def image(name: str, group: int, contents: Contents) -> np.ndarray:
    """Input bytes (CTAs, bytes) of a probe: shared memory, then tensor memory lane by lane."""
    rng, out = generator(name), np.empty((group, SMEM + TENSOR), np.uint8)
    out[:, :B_AT] = codes(rng, contents.a, group * B_AT, contents.style).reshape(group, -1)
    out[:, B_AT:SMEM] = codes(rng, contents.b, group * B_AT, contents.style).reshape(group, -1)
    tensor = rng.integers(0, 2**32, (group, LANES, COLUMNS), np.uint64).astype("<u4")
    shape = (group, LANES, A_AT)
    count = int(np.prod(shape))
    if contents.d == "f16":
        tensor[..., :A_AT] = codes(rng, "f16", 2 * count, contents.style).view("<u2").reshape(shape)
    else:
        tensor[..., :A_AT] = codes(rng, contents.d, 4 * count, contents.style).view("<u4").reshape(shape)
    size = group * LANES * 16
    words = codes(rng, contents.a, 4 * size, contents.style).view("<u4")
    tensor[..., A_AT : A_AT + 16] = words.reshape(group, LANES, 16)
    for column, values in contents.columns.items():
        tensor[..., column : column + values.shape[-1]] = values
    out[:, SMEM:] = tensor.reshape(group, -1).view(np.uint8)
    return out


@dataclass(frozen=True)
class About:
    """What is said of a probe beside its action. See `Probe`."""

    name: str
    form: str
    group: int = 1
    element: str = "f32"
    exact: bool = True
    hazards: frozenset[str] = frozenset()
    arch: str = "sm_100a"
    version: str = "8.8"


def made(about: About, action: Action, contents: Contents) -> Probe:
    """Make a probe of an action."""
    return Probe(
        name=about.name,
        form=about.form,
        arch=about.arch,
        body=body(action, about.group),
        image=image(about.name, about.group, contents),
        out_bytes=about.group * TENSOR,
        row_bytes=4 * COLUMNS,
        element=about.element,
        exact=about.exact,
        hazards=about.hazards,
        version=about.version,
    )
