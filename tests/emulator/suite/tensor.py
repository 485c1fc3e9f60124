"""Faults around tensor memory, tensor cores, and registers that asynchronous instructions fill."""

from __future__ import annotations

from tests.emulator.suite.common import FENCE, wait
from tests.emulator.suite.harness import Case

# %r20 the allocation, %r22 the warp's quarter of it; 256 columns.
ALLOC = (
    "mov.u32 %r14, slot;\n@!%p1 bra SKIP;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r14], 256;\n"
    "SKIP: bar.sync 0;\nld.shared.b32 %r20, [%r14];\nand.b32 %r21, %r3, 3;\nshl.b32 %r21, %r21, 21;\n"
    "add.s32 %r22, %r20, %r21;\n"
)
FREE = "bar.sync 0;\n@!%p1 bra KEEP;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 256;\nKEEP:\n"
ST, LD = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r22], {%r0};", "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r22];"
WST, WLD = "tcgen05.wait::st.sync.aligned;\n", "tcgen05.wait::ld.sync.aligned;\n"
PUT, GET = ST + "\n" + WST, LD + "\n" + WLD
USE = "st.global.b32 [%rd5], %r30;\n"
# Zeros for the operands of 128 x N x 16 products, core matrices of 8 rows of 16 bytes; %rd6 describes both.
ZEROS = (
    "mov.u32 %r15, 0;\nmad.lo.u32 %r16, %r0, 32, %r2;\nst.shared.v4.b32 [%r16], {%r15, %r15, %r15, %r15};\n"
    "st.shared.v4.b32 [%r16+16], {%r15, %r15, %r15, %r15};\n" + FENCE + "@%p2 mbarrier.init.shared.b64 [%r8], 1;\n"
    "@%p2 mbarrier.init.shared.b64 [%r9], 1;\nbar.sync 0;\nshr.u32 %r16, %r2, 4;\ncvt.u64.u32 %rd6, %r16;\n"
    "or.b64 %rd6, %rd6, 0x0000401000080000;\nmov.pred %p6, 0;\nmov.pred %p7, 1;\n"
)


def mma(column: str, width: int = 64, accumulate: str = "%p6", mark: bool = False) -> str:
    """Multiply zeros: a product of ``width`` columns from ``column`` on, f16 to f32."""
    instruction = 1 << 4 | width // 8 << 17 | 8 << 24
    d = f"add.u32 %r17, %r20, {column};\n@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r17], %rd6, %rd6, {instruction}, "
    return d + accumulate + ";" + (" //!" if mark else "") + "\n"


def load(columns: int, at: str, mark: bool = False) -> str:
    """Load columns of the warp's quarter."""
    registers = ", ".join(f"%r{100 + i}" for i in range(columns))
    shape = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32"
    return f"{shape} {{{registers}}}, [%r22+{at}];{' //!' if mark else ''}\n{WLD}"


COMMIT = "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{}];\n"
DONE, DONE2 = COMMIT.format("%r8") + wait("%r8", 0, "W"), COMMIT.format("%r9") + wait("%r9", 0, "W2")
WIDE = {"threads": 128}
# Warps 0 and 4 share a quarter of the lanes.
HANDED = (
    "setp.lt.u32 %p5, %r3, 4;\n@!%p5 bra SECOND;\n{}bar.sync 1, 160;\n{}bra DONE;\nSECOND: bar.sync 1, 160;\n{}DONE:\n"
)
WG = (
    "mad.lo.u32 %r16, %r0, 16, %r2;\nmov.u32 %r15, 0;\nst.shared.v4.b32 [%r16], {{%r15, %r15, %r15, %r15}};\n"
    + FENCE
    + "bar.sync 0;\nshr.u32 %r16, %r2, 4;\ncvt.u64.u32 %rd6, %r16;\nor.b64 %rd6, %rd6, 0x0000001000080000;\n"
    "mov.b32 %f1, 0f00000000;\nmov.b32 %f2, %f1;\nmov.b32 %f3, %f1;\nmov.b32 %f4, %f1;\nmov.pred %p6, 1;\n"
    "wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f1, %f2, %f3, %f4}}, %rd6, %rd6, "
    "%p6, 1, 1, 0, 0; //!\nwgmma.commit_group.sync.aligned;\n{}"
)
HOPPER = {"threads": 128, "arch": "sm_90a"}
ZERO = "wgmma.wait_group.sync.aligned 0;\n"

# Without a fault: products that share columns as they may. Layout F: 64 rows in 16 lanes of every 32.
NARROW = (
    "add.u32 %r17, %r20, {};\n@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r17], %rd6, %rd6, "
    + str(1 << 4 | 8 << 17 | 4 << 24)
    + ", {};\n"
)
SILENT = {
    "an accumulation onto the left half of a product": Case(
        "", ALLOC + ZEROS + mma("0", 64) + mma("0", 32, "%p7") + DONE + load(64, "0") + FREE, **WIDE
    ),
    "an accumulation onto half a product, then onto all of it": Case(
        "", ALLOC + ZEROS + mma("0", 64) + mma("32", 32, "%p7") + mma("0", 64, "%p7") + DONE + load(64, "0") + FREE,
        **WIDE,
    ),
    "two products in lanes of their own": Case(
        "", ALLOC + ZEROS + NARROW.format("0", "%p6") + NARROW.format("0x100020", "%p6") + DONE + load(32, "32") + FREE,
        **WIDE,
    ),
}  # fmt: skip

CASES = {
    "tensor memory that nothing wrote": Case(
        "uninitialised_tmem", ALLOC + "<<||" + PUT + ">>" + LD + " //!\n" + WLD + USE + FREE
    ),
    "accumulation onto what nothing wrote": Case(
        "uninitialised_tmem",
        ALLOC + ZEROS + mma("0", accumulate="<<%p7||%p6>>", mark=True) + DONE + load(64, "0") + FREE,
        **WIDE,
    ),
    "a store outside the allocation": Case(
        "tmem_outside_allocation",
        ALLOC + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r22+<<256||255>>], {%r0}; //!\n" + WST + FREE,
    ),
    "a product outside the allocation": Case(
        "tmem_outside_allocation", ALLOC + ZEROS + mma("<<224||192>>", mark=True) + DONE + FREE, **WIDE
    ),
    "a load after dealloc": Case(
        "tmem_after_free", ALLOC + PUT + "<<" + FREE + "bar.sync 0;\n||>>" + LD + " //!\n" + WLD + USE + "<<||" + FREE
        + ">>"
    ),
    "a dealloc while others still load": Case(
        "race_tensor|tmem_after_free",
        ALLOC + PUT + LD + " //!\n" + WLD + USE
        + "<<||bar.sync 0;\n>>@!%p1 bra KEEP;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 256; //!\nKEEP:\n",
    ),
    "a quarter of another warp": Case(
        "tmem_lane_quarter",
        ALLOC + "<<mov.u32 %r22, %r20;\n||>>tcgen05.st.sync.aligned.32x32b.x1.b32 [%r22], {%r0}; //!\n" + WST + FREE,
    ),
    "no dealloc": Case(
        "tmem_leak", ALLOC + PUT + GET + USE + "<<||" + FREE + ">>ret; //!\n"
    ),
    "no wait::st before the load": Case(
        "missing_tcgen05_wait", ALLOC + ST + " //!\n<<||" + WST + ">>" + LD + " //!\n" + WLD + USE + WST + FREE
    ),
    "no wait::st before the hand-over": Case(
        "missing_tcgen05_wait|race_tensor",
        ALLOC + HANDED.format(ST + " //!\n<<||" + WST + ">>", "<<" + WST + "||>>", LD + " //!\n" + WLD + USE) + FREE,
        threads=160, schedules=("round_robin",),
    ),
    "no wait::ld before the hand-over": Case(
        "missing_tcgen05_wait|race_tensor",
        ALLOC + HANDED.format(PUT + LD + " //!\n<<||" + WLD + ">>", "<<" + WLD + "||>>", ST + " //!\n" + WST) + FREE,
        threads=160, schedules=("round_robin",),
    ),
    "no wait::ld before the use": Case(
        "tcgen05_ld_used_early",
        ALLOC + PUT + LD + " //!\n<<||" + WLD + ">>add.u32 %r30, %r30, 1; //!\n<<" + WLD + "||>>" + USE + FREE,
    ),
    "no wait::ld before a store": Case(
        "tcgen05_ld_used_early",
        ALLOC + PUT + LD + " //!\n<<||" + WLD + ">>st.global.b32 [%rd5], %r30; //!\n" + FREE,
    ),
    "no wait::ld before a word that was packed is used": Case(
        "tcgen05_ld_used_early",
        ALLOC + PUT + LD + " //!\nmov.b64 %rd6, {%r40, %r30};\n<<||" + WLD
        + ">>mov.b64 {_, %r31}, %rd6; //!\n<<" + WLD + "||>>st.global.b32 [%rd5], %r31;\n" + FREE,
    ),
    "no wait::ld on one of two paths": Case(
        "tcgen05_ld_used_early",
        ALLOC + PUT + LD + " //!\n<<setp.ne.u32 %p6, %r10, 0;\n@%p6 bra ON;\n||>>" + WLD
        + "ON: cvt.rn.f32.u32 %f1, %r30; //!\nst.global.f32 [%rd5], %f1;\n" + FREE,
    ),
    "two warps and a quarter": Case(
        "race_tensor",
        ALLOC + HANDED.replace("bar.sync 1, 160;\n", "<<||bar.sync 1, 160;\n>>").format(
            ST + " //!\n" + WST, "", LD + " //!\n" + WLD + USE
        ) + FREE,
        threads=160,
    ),
    "a load before the product is done": Case(
        "race_tensor",
        ALLOC + ZEROS + mma("0", mark=True) + COMMIT.format("%r8") + "<<||" + wait("%r8", 0, "W") + ">>"
        + load(64, "0", mark=True) + wait("%r8", 0, "LATE") + FREE,
        schedules=("oldest_first",),
        **WIDE,
    ),
    "a product over what is still read": Case(
        "race_tensor",
        ALLOC + ZEROS + mma("0") + DONE + load(64, "0", mark=True) + "<<||bar.sync 0;\n>>" + mma("0", mark=True) + DONE2
        + FREE,
        **WIDE,
    ),
    "operands that are overwritten before the product is done": Case(
        "race_shared",
        ALLOC + ZEROS + mma("0", mark=True) + COMMIT.format("%r8") + "<<||" + wait("%r8", 0, "W")
        + ">>st.shared.b32 [%r1], 1; //!\n" + wait("%r8", 0, "LATE") + load(64, "0") + FREE,
        **WIDE,
    ),
    "operands without a proxy fence": Case(
        "missing_proxy_fence",
        ALLOC + ZEROS.replace(FENCE, "<<||" + FENCE + ">>").replace("%r15};\nst", "%r15}; //!\nst")
        .replace("%r15};\n<<", "%r15}; //!\n<<") + mma("0", mark=True) + DONE + load(64, "0") + FREE,
        **WIDE,
    ),
    # --- accumulators that overlap
    "two products that overlap by a few columns": Case(
        "tmem_product_overlap",
        ALLOC + ZEROS + mma("0", mark=True) + mma("<<56||64>>", mark=True) + DONE + load(64, "0", mark=True)
        + load(64, "<<56||64>>") + FREE,
        **WIDE,
    ),
    "a second accumulation over the first": Case(
        "tmem_product_overlap",
        ALLOC + ZEROS + mma("0") + mma("<<32||64>>", mark=True) + mma("0", accumulate="%p7", mark=True) + DONE
        + load(64, "0") + FREE,
        **WIDE,
    ),
    "a wider product over a narrow one": Case(
        "tmem_product_overlap",
        ALLOC + ZEROS + mma("64", 32, mark=True) + mma("0", 32) + mma("<<48||96>>", 32, mark=True) + DONE
        + load(32, "64", mark=True) + FREE,
        **WIDE,
    ),
    # --- wgmma
    "registers that a wgmma still writes": Case(
        "missing_wgmma_wait",
        WG.format("<<||" + ZERO + ">>add.f32 %f5, %f1, %f2; //!\n<<" + ZERO + "||>>st.global.f32 [%rd5], %f5;\n"),
        **HOPPER,
    ),
    "a group of wgmma that may be pending": Case(
        "missing_wgmma_wait",
        WG.format("wgmma.wait_group.sync.aligned <<1||0>>;\nst.global.f32 [%rd5], %f1; //!\n" + ZERO),
        **HOPPER,
    ),
    "operands of wgmma that are overwritten": Case(
        "race_shared|missing_proxy_fence",
        WG.format("<<||" + ZERO + "bar.sync 0;\n>>st.shared.b32 [%r1], 1; //!\n" + ZERO),
        **HOPPER,
    ),
    # --- registers
    "a register that nothing sets": Case(
        "uninitialised_register", "<<||mov.u32 %r50, 1;\n>>add.u32 %r51, %r50, %r0; //!\nst.global.b32 [%rd5], %r51;\n"
    ),
    "a predicate that nothing sets": Case(
        "uninitialised_register",
        "<<||setp.ne.u32 %p8, %r10, 0;\n>>@%p8 bra END; //!\nst.global.b32 [%rd5], %r0;\nEND:\n",
    ),
    "the half that nothing sets of a word that was packed": Case(
        "uninitialised_register",
        "mov.b64 %rd6, {%r50, %r0}; //!\nmov.b64 {<<%r51, _||_, %r51>>}, %rd6;\nst.global.b32 [%rd5], %r51;\n",
    ),
    "an address that nothing sets": Case(
        "uninitialised_register|MemoryFault",
        "<<||mov.u64 %rd20, %rd5;\n>>add.s64 %rd21, %rd20, 0; //!\nst.global.b32 [%rd21], %r0; //!\n",
    ),
    "a register that the other path sets": Case(
        "uninitialised_register",
        "<<||mov.u32 %r51, 2;\n>>@%p2 bra ON;\n<<mov.u32 %r51, 1;\n||>>bra OUT;\n"
        "ON: st.global.b32 [%rd5], %r51; //!\nOUT:\n",
    ),
}  # fmt: skip
