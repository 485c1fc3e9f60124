"""List the micro-kernels whose result is in registers: wgmma and mma.sync of SM90, what SM100 adds elsewhere.

The Hopper half has recordings of an H200 already: run there, it tests the kit itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dsv4lib.lab.day_one.probe import THREADS, Probe, codes, generator

SMEM = 16384  # bytes of the image's first part, which is copied to shared memory
FIRST = 100  # register of a thread's first word
WORDS = 64  # words of a thread, in and out
SWIZZLES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}

_HEAD = """.reg .pred %p<16>; .reg .b32 %r<240>; .reg .b64 %rd<64>; .reg .b16 %h<16>; .reg .b128 %q<4>; .reg .b8 %b<4>;
.shared .align 1024 .b8 sm[{smem}]; .shared .align 16 .b8 answer[16]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x;
mov.u32 %r2, sm;
mov.u32 %r3, answer;
mov.u32 %r4, bar;
ld.param.u64 %rd1, [image];
ld.param.u64 %rd2, [out];
mul.wide.u32 %rd3, %r0, 16;
add.s64 %rd4, %rd1, %rd3;
cvt.u32.u64 %r9, %rd3;
add.s32 %r9, %r9, %r2;
mul.wide.u32 %rd5, %r0, {row};
add.s64 %rd6, %rd1, %rd5;
add.s64 %rd2, %rd2, %rd5;
{copies}
{loads}
setp.ne.u32 %p1, %r0, 0;
setp.eq.u32 %p5, 0, 0;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r8, %r2, 4;
cvt.u64.u32 %rd9, %r8;
"""


@dataclass(frozen=True)
class About:
    """What is said of a probe. See `Probe`; ``types``: of the shared memory's image and of the threads' words."""

    name: str
    form: str
    arch: str
    types: tuple[str, str] = ("u8", "u8")
    style: str = "small"
    exact: bool = True


def made(about: About, lines: list[str]) -> Probe:
    """Make a probe of instructions on the registers %r100 to %r163, which hold a thread's words before and after."""
    quads = [[f"%r{FIRST + i + k}" for k in range(4)] for i in range(0, WORDS, 4)]
    copies = "\n".join(
        f"ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%rd4+{at}];\nst.shared.v4.b32 [%r9+{at}], {{%r5, %r6, %r7, %r8}};"
        for at in range(0, SMEM, 16 * THREADS)
    )
    loads = "\n".join(f"ld.global.v4.b32 {{{', '.join(q)}}}, [%rd6+{SMEM + 16 * i}];" for i, q in enumerate(quads))
    stores = "\n".join(f"st.global.v4.b32 [%rd2+{16 * i}], {{{', '.join(q)}}};" for i, q in enumerate(quads))
    head = _HEAD.format(smem=SMEM, row=4 * WORDS, copies=copies, loads=loads)
    rng = generator(about.name)
    image = np.concatenate(
        [
            codes(rng, about.types[0], SMEM, about.style),
            codes(rng, about.types[1], 4 * WORDS * THREADS, about.style),
        ]
    )
    return Probe(
        name=about.name,
        form=about.form,
        arch=about.arch,
        body=head + "".join(f"{line};\n" for line in lines) + stores,
        image=image[None],
        out_bytes=4 * WORDS * THREADS,
        row_bytes=4 * WORDS,
        exact=about.exact,
    )


def _names(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{FIRST + first + i}" for i in range(count)) + "}"


def _wgmma(types: tuple[str, str, str], n: int, swizzle: str, style: str = "small", rs: bool = False) -> Probe:
    """One wgmma onto the first words; A in registers from word 48 on."""
    a, b, d = types
    bits = {"f16": 16, "bf16": 16, "tf32": 32}.get(a, 8)
    width = {"none": 16, "32B": 32, "64B": 64, "128B": 128}[swizzle]
    leading, stride = (128, 256) if swizzle == "none" else (16, 8 * width)
    constant = (leading >> 4) << 16 | (stride >> 4) << 32 | SWIZZLES[swizzle] << 62
    tail = "" if d == "s32" else ", 1, 1"
    tail += (", 0" if rs else ", 0, 0") if bits == 16 else ""
    count = n // (4 if d == "f16" else 2)
    source = _names(48, 4) if rs else "%rd10"
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{256 // bits}.{d}.{a}.{b}"
    lines = [
        f"add.s64 %rd10, %rd9, {constant}",
        f"add.s64 %rd11, %rd9, {constant + (8192 >> 4)}",
        "wgmma.fence.sync.aligned",
        f"{opcode} {_names(0, count)}, {source}, %rd11, %p5{tail}",
        "wgmma.commit_group.sync.aligned",
        "wgmma.wait_group.sync.aligned 0",
    ]
    name = f"wgmma.{a}-{b}-{d}.n{n}.{swizzle}{'.rs' * rs}{'' if style == 'small' else '.' + style}"
    # A in registers is what float32 integers are as pairs of float16: few bits, too.
    about = About(name, "wgmma", "sm_90a", (a, d), style, style == "small")
    return made(about, lines)


def _hopper() -> Iterator[Probe]:
    for types in (("f16", "f16", "f32"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"), ("e4m3", "e4m3", "f32")):
        for swizzle in ("none", "32B", "64B", "128B"):
            yield _wgmma(types, 64, swizzle)
        yield _wgmma(types, 64, "128B", "normal")
    yield _wgmma(("f16", "f16", "f16"), 64, "128B")
    yield _wgmma(("s8", "s8", "s32"), 64, "128B")
    yield _wgmma(("f16", "f16", "f32"), 32, "64B", rs=True)
    for a, d, k in (("f16", "f32", 16), ("bf16", "f32", 16), ("tf32", "f32", 8), ("e4m3", "f32", 32)):
        for style in ("small", "normal"):
            opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{d}.{a}.{a}.{d}"
            line = f"{opcode} {_names(8, 4)}, {_names(0, 4)}, {_names(4, 2)}, {_names(12, 4)}"
            about = About(f"mma_sync.{a}.{style}", "mma_sync", "sm_90a", ("u8", a), style, style == "small")
            # The first product is the accumulator of the second.
            zero = [f"mov.b32 %r{FIRST + 12 + i}, 0" for i in range(4)]
            yield made(about, [*zero, line, line.replace(_names(12, 4), _names(8, 4))])


def _each(about: About, text: str, operands: int, times: int = 12) -> Probe:
    """An instruction of 32-bit registers ``times`` times: words 24 on are results, the operands words 0 to 23."""
    lines = []
    for i in range(times):
        sources = ", ".join(f"%r{FIRST + (i * operands + k) % 24}" for k in range(operands))
        lines.append(text.format(d=f"%r{FIRST + 24 + i}", s=sources))
    return made(about, lines)


def _packed(op: str, round_: str) -> Probe:
    """An f32x2 instruction on pairs of words."""
    count = 3 if op == "fma" else 2
    lines = []
    for i in range(4):
        for k in range(count):
            low = FIRST + (2 * (i * count + k)) % 24
            lines.append(f"mov.b64 %rd{20 + k}, {{%r{low}, %r{low + 1}}}")
        lines.append(f"{op}.{round_}.f32x2 %rd30, {', '.join(f'%rd{20 + k}' for k in range(count))}")
        lines.append(f"mov.b64 {{%r{FIRST + 24 + 2 * i}, %r{FIRST + 25 + 2 * i}}}, %rd30")
    about = About(f"packed.{op}.{round_}", "packed_f32", "sm_100a", ("u8", "f32"), "normal")
    return made(about, lines)


def _narrow() -> Iterator[Probe]:
    """Conversions of two float32 to 4, 6 and 8 bits, and back."""
    for fmt in ("e2m1x2", "e2m3x2", "e3m2x2"):
        for relu in ("", ".relu"):
            about = About(f"narrow.{fmt}{relu}", "narrow_conversions", "sm_100a", ("u8", "f32"), "normal")
            lines = []
            for i in range(12):
                low, high = f"%r{FIRST + 2 * i}", f"%r{FIRST + 2 * i + 1}"
                pair = f"{low}, {high}"
                if fmt == "e2m1x2":
                    lines.append(f"cvt.rn.satfinite{relu}.{fmt}.f32 %b0, {pair}")
                    lines.append(f"cvt.rn.satfinite{relu}.{fmt}.f32 %b1, {high}, {low}")
                    lines.append(f"mov.b32 %r{FIRST + 24 + i}, {{%b0, %b1, %b0, %b1}}")
                else:
                    lines.append(f"cvt.rn.satfinite{relu}.{fmt}.f32 %h1, {pair}")
                    lines.append(f"cvt.u32.u16 %r{FIRST + 24 + i}, %h1")
            yield made(about, lines)
    for round_ in ("rz", "rp"):
        about = About(f"narrow.ue8m0x2.{round_}", "narrow_conversions", "sm_100a", ("u8", "f32"), "normal")
        lines = []
        for i in range(12):
            lines.append(f"cvt.{round_}.satfinite.ue8m0x2.f32 %h1, %r{FIRST + 2 * i}, %r{FIRST + 2 * i + 1}")
            lines.append(f"cvt.u32.u16 %r{FIRST + 24 + i}, %h1")
        yield made(about, lines)


def _blackwell() -> Iterator[Probe]:
    for op in ("add", "mul", "fma"):
        for round_ in ("rn", "rz", "rm", "rp"):
            yield _packed(op, round_)
    yield from _narrow()
    for op in ("min", "max"):
        about = About(f"three.{op}", "three_operands", "sm_100a", ("u8", "f32"), "normal")
        yield _each(about, f"{op}.f32 {{d}}, {{s}}", 3)
        about = About(f"redux.{op}", "redux_f32", "sm_100a", ("u8", "f32"), "normal")
        yield _each(about, f"redux.sync.{op}.f32 {{d}}, {{s}}, 0xffffffff", 1)
    lines = [
        "@%p1 bra DONE",
        "add.s32 %r5, %r2, 64",
        "mov.b64 %rd20, 4096",
        "st.bulk.weak.shared::cta [%r5], %rd20, 0",
        "DONE:\nbar.sync 0",
    ]
    lines += [f"ld.shared.b32 %r{FIRST + i}, [%r9+{i * 512}]" for i in range(16)]
    yield made(About("st_bulk", "st_bulk", "sm_100a"), lines)
    lines = [
        "@%p1 bra DONE",
        "mbarrier.init.shared.b64 [%r4], 1",
        "fence.mbarrier_init.release.cluster",
        "mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r4], 16",
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r4]",
        "WAIT:\nmbarrier.try_wait.parity.shared.b64 %p7, [%r4], 0",
        "@!%p7 bra WAIT",
        "ld.shared.b128 %q1, [%r3]",
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p8, %q1",
        f"selp.b32 %r{FIRST}, 1, 0, %p8",
        "DONE:\nbar.sync 0",
    ]
    yield made(About("launch_control", "launch_control", "sm_100a"), lines)


def probes() -> Iterator[Probe]:
    """Every probe of this module, of both architectures."""
    yield from _hopper()
    yield from _blackwell()
