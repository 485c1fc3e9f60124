"""Faults around shared memory: races between warps and CTAs, copies, proxies, bytes that were never written."""

from __future__ import annotations

from dsv4lib.emulator.machine.policies import POLICIES
from tests.emulator.suite.common import BULK, CLUSTER, FENCE, FILL, INIT, PEER, STORE, wait
from tests.emulator.suite.harness import Case

USE = "st.global.b32 [%rd5], %r20;\n"
PUT, GET = "st.shared.b32 [%r1], %r0; //!\n", "ld.shared.b32 %r20, [%r4]; //!\n" + USE
WORD = "mad.lo.u64 %rd6, %rd7, 4, %rd1;\n"
TAKE = "cvt.u64.u32 %rd7, %r0;\n" + WORD + "cp.async.ca.shared.global [%r1], [%rd6], 4; //!\n"
AFTER = "@!%p2 bra END;\n"
LAST = f"{AFTER}{STORE} [%rd4], [%r2], 256; //!\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nEND:\n"
MATRIX = "and.b32 %r14, %r0, 31;\nmad.lo.u32 %r14, %r14, 16, %r2;\nshl.b32 %r15, %r3, 9;\n"
MATRIX += "add.u32 %r16, %r14, %r15;\nxor.b32 %r15, %r15, 512;\nadd.u32 %r17, %r14, %r15;\n"
ROW = "shl.b32 %r14, %r0, 4;\nadd.u32 %r14, %r14, %r2;\n"

CASES = {
    "a read before the barrier": Case("race_shared", PUT + "<<||bar.sync 0;\n>>" + GET),
    "a read before barrier.sync": Case("race_shared", PUT + "<<||barrier.cta.sync.aligned 0;\n>>" + GET),
    "a read before a reduction at a barrier": Case(
        "race_shared", PUT + "<<||bar.red.popc.u32 %r30, 0, %p1;\n>>" + GET
    ),
    "a store over what may still be read": Case(
        "race_shared",
        "st.shared.b32 [%r1], %r0;\nbar.sync 0;\n" + GET + "<<||bar.sync 0;\n>>st.shared.b32 [%r1], %r20; //!\n",
    ),
    "two writers": Case(
        "race_shared", "<<mov.u32 %r30, %r2;||mov.u32 %r30, %r1;>>\n@%p3 st.shared.b32 [%r30], %r3; //!\n"
    ),
    "two writers of one value": Case(
        "race_shared_same_value", "<<mov.u32 %r30, %r2;||mov.u32 %r30, %r1;>>\n@%p3 st.shared.b32 [%r30], 7; //!\n"
    ),
    "a barrier without one of the readers": Case(
        "race_shared",
        "st.shared.b32 [%r1], %r0; //!\n<<setp.lt.u32 %p5, %r3, 2;\n@%p5 bar.sync 1, 64;||bar.sync 1, 96;>>\n"
        "ld.shared.b32 %r20, [%r2]; //!\n" + USE,
        threads=96,
    ),
    "vectors that overlap": Case(
        "race_shared",
        ROW + "st.shared.v4.b32 [%r14], {%r0, %r0, %r0, %r0}; //!\n<<||bar.sync 0;\n>>xor.b32 %r15, %r0, 32;\n"
        "mad.lo.u32 %r15, %r15, 16, %r2;\nld.shared.v2.b32 {%r20, %r21}, [%r15+8]; //!\n" + USE,
    ),
    "two warps store the same half of a word": Case(
        "race_shared",
        "mad.lo.u32 %r14, %r5, 4, %r2;\n<<||mad.lo.u32 %r14, %r3, 2, %r14;\n>>cvt.u16.u32 %h1, %r0;\n"
        "st.shared.b16 [%r14], %h1; //!\n",
    ),
    "a generic address": Case(
        "race_shared",
        PUT + "<<||bar.sync 0;\n>>cvt.u64.u32 %rd6, %r4;\ncvta.shared.u64 %rd6, %rd6;\nld.b32 %r20, [%rd6]; //!\n"
        + USE,
    ),
    "a load after an atomic of another warp": Case(
        "race_shared",
        "@%p2 st.shared.b32 [%r2], 0;\nbar.sync 0;\n@%p3 red.shared.add.u32 [%r2], 1; //!\n<<||bar.sync 0;\n>>"
        "ld.shared.b32 %r20, [%r2]; //!\n" + USE,
        schedules=tuple(POLICIES),
    ),
    "a load after an atomic of its own and of other warps": Case(
        "race_shared",
        "@%p1 st.shared.b32 [%r1], 0;\nbar.sync 0;\nand.b32 %r20, %r0, 3;\nshl.b32 %r20, %r20, 2;\n"
        "add.u32 %r20, %r20, %r2;\natom.shared.add.u32 %r21, [%r20], 1; //!\n<<||bar.sync 0;\n>>@!%p1 bra END;\n"
        "ld.shared.b32 %r20, [%r1]; //!\n" + USE + "END:\n",
        threads=128, schedules=tuple(POLICIES),
    ),
    "a load after an atomic of floats of its own and of other warps": Case(
        "race_shared",
        "@%p2 st.shared.b32 [%r2], 0;\nbar.sync 0;\nmov.b32 %f1, 0f3F800000;\n"
        "atom.shared.add.f32 %f2, [%r2], %f1; //!\n<<||bar.sync 0;\n>>@!%p1 bra END;\n"
        "ld.shared.b32 %r20, [%r2]; //!\n" + USE + "END:\n",
        schedules=tuple(POLICIES),
    ),
    "the same where the output was written before": Case(
        "race_shared",
        "st.global.b32 [%rd5], %r0;\n"
"@%p2 st.shared.b32 [%r2], 0;\nbar.sync 0;\nmov.b32 %f1, 0f3F800000;\n"
        "atom.shared.add.f32 %f2, [%r2], %f1; //!\n<<||bar.sync 0;\n>>@!%p1 bra END;\n"
        "ld.shared.b32 %r20, [%r2]; //!\n" + USE + "END:\n",
        schedules=tuple(POLICIES),
    ),
    "ldmatrix of what another warp stores": Case(
        "race_shared",
        MATRIX + "st.shared.v4.b32 [%r16], {%r0, %r0, %r0, %r0}; //!\n<<||bar.sync 0;\n>>"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r17]; //!\n" + USE,
    ),
    "stmatrix over what another warp reads": Case(
        "race_shared",
        MATRIX + "st.shared.v4.b32 [%r16], {%r0, %r0, %r0, %r0};\nbar.sync 0;\n"
        "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r17]; //!\n<<||bar.sync 0;\n>>"
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r16], {%r20, %r21, %r22, %r23}; //!\n",
    ),
    "an arrival before the store": Case(
        "race_shared",
        INIT.format(32, 32) + "@!%p1 bra OTHER;\n<<mbarrier.arrive.shared.b64 _, [%r8];\n||>>st.shared.b32 [%r1], %r0; "
        "//!\n<<||mbarrier.arrive.shared.b64 _, [%r8];\n>>bra END;\nOTHER:\n" + wait("%r8", 0, "W")
        + "ld.shared.b32 %r20, [%r4]; //!\n" + USE + "END:\n",
    ),
    "a flag that does not release": Case(
        "race_shared",
        "@%p2 st.shared.b32 [%r2+4096], 0;\nbar.sync 0;\n@!%p1 bra OTHER;\nst.shared.b32 [%r1], %r0; //!\n"
        "bar.warp.sync -1;\n@%p2 st.<<relaxed||release>>.cta.shared.b32 [%r2+4096], 1;\nbra END;\n"
        "OTHER: ld.acquire.cta.shared.b32 %r30, [%r2+4096];\nsetp.eq.u32 %p5, %r30, 0;\n@%p5 bra OTHER;\n"
        "ld.shared.b32 %r20, [%r4]; //!\n" + USE + "END:\n",
    ),
    # --- copies
    "a bulk copy that is not waited for": Case(
        "race_shared",
        INIT.format(1, 1) + FILL + "<<||" + wait("%r8", 0, "W") + ">>ld.shared.b32 %r20, [%r1]; //!\n" + USE
        + wait("%r8", 0, "LATE"),
    ),
    "a tensor copy that is not waited for": Case(
        "race_shared",
        INIT.format(1, 1) + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;\nmov.u32 %r14, 0;\n"
        "mov.b64 %rd6, map;\ncvta.param.u64 %rd6, %rd6;\n@%p2 cp.async.bulk.tensor.2d.shared::cta.global.tile."
        "mbarrier::complete_tx::bytes [%r2], [%rd6, {%r14, %r14}], [%r8]; //!\n<<||" + wait("%r8", 0, "W")
        + ">>ld.shared.b32 %r20, [%r1]; //!\n" + USE + wait("%r8", 0, "LATE"),
        tensor=(16, 16, 8, 8, 64),
    ),
    "a wait for the phase before": Case(
        "race_shared",
        INIT.format(1, 1) + FILL + "W: mbarrier.try_wait.parity.shared.b64 %p9, [%r8], <<1||0>>;\n@!%p9 bra W;\n"
        "ld.shared.b32 %r20, [%r1]; //!\n" + USE + wait("%r8", 0, "LATE"),
    ),
    "a buffer that is filled while it is read": Case(
        "race_shared",
        INIT.format(1, 64) + FILL + wait("%r8", 0, "W") + "ld.shared.b32 %r20, [%r1]; //!\n" + USE
        + "mbarrier.arrive.shared.b64 _, [%r9];\n<<||" + wait("%r9", 0, "U") + ">>" + FILL + wait("%r8", 1, "V"),
        schedules=("round_robin",),
    ),
    "a bulk store that still reads": Case(
        "missing_bulk_wait",
        "st.shared.b32 [%r1], %r0;\n" + FENCE + "bar.sync 0;\n" + AFTER + STORE + " [%rd4], [%r2], 256; //!\n"
        "cp.async.bulk.commit_group;\n<<||cp.async.bulk.wait_group.read 0;\n>>st.shared.b32 [%r2], 5; //!\n"
        "cp.async.bulk.wait_group 0;\nEND:\n",
    ),
    "one group too many may be pending": Case(
        "missing_bulk_wait",
        "st.shared.b32 [%r1], %r0;\n" + FENCE + "bar.sync 0;\n" + AFTER + STORE + " [%rd4], [%r2], 128;\n"
        "cp.async.bulk.commit_group;\n" + STORE + " [%rd4+128], [%r2+128], 128; //!\ncp.async.bulk.commit_group;\n"
        "cp.async.bulk.wait_group.read <<1||0>>;\nst.shared.b32 [%r2+128], 5; //!\ncp.async.bulk.wait_group 0;\nEND:\n",
        schedules=tuple(POLICIES),
    ),
    "cp.async that is not waited for": Case(
        "missing_cp_async_wait",
        TAKE + "cp.async.commit_group;\n<<||cp.async.wait_group 0;\n>>ld.shared.b32 %r20, [%r1]; //!\n" + USE
        + "cp.async.wait_group 0;\n",
    ),
    "cp.async with one group too many": Case(
        "missing_cp_async_wait",
        TAKE.replace(" //!", "") + "cp.async.commit_group;\n" + TAKE.replace("[%r1]", "[%r1+256]")
        + "cp.async.commit_group;\ncp.async.wait_group <<1||0>>;\nld.shared.b32 %r20, [%r1+256]; //!\n"
        + USE + "cp.async.wait_all;\n",
    ),
    "cp.async of another warp": Case(
        "race_shared|missing_cp_async_wait",
        TAKE + "cp.async.wait_all;\n<<||bar.sync 0;\n>>ld.shared.b32 %r20, [%r4]; //!\n" + USE,
    ),
    "cp.async of another lane": Case(
        "missing_warp_sync",
        TAKE + "cp.async.wait_all;\n<<||bar.warp.sync -1;\n>>ld.shared.b32 %r20, [%r6]; //!\n" + USE,
    ),
    "atomics of two warps after a store of the first": Case(
        "race_shared",
        "@%p2 st.shared.b32 [%r2], 0; //!\n<<||bar.sync 0;\n>>@%p1 red.shared.add.u32 [%r2], 1;\n"
        "@!%p1 red.shared.add.u32 [%r2], 1; //!\n",
        schedules=("round_robin", "newest_first"),
    ),
    "a byte of a word that atomics of two warps take": Case(
        "race_shared",
        "@%p2 st.shared.b32 [%r2], 0;\nbar.sync 0;\n@%p2 st.shared.b8 [%r2+<<1||4>>], 7; //!\n"
        "@%p1 red.shared.max.u32 [%r2], 1;\n@!%p1 red.shared.max.u32 [%r2], 1; //!\n",
        schedules=("round_robin",),
    ),
    # --- the cluster
    "a store to a peer before the cluster barrier": Case(
        "race_shared",
        CLUSTER + PEER.format("%r1") + "st.shared::cluster.b32 [%r13], %r0; //!\n<<||" + CLUSTER
        + ">>ld.shared.b32 %r20, [%r1]; //!\n" + USE + CLUSTER,
        threads=32, grid=2, cluster=2,
    ),
    "a load from a peer before the cluster barrier": Case(
        "race_shared",
        PUT + "<<||" + CLUSTER + ">>" + PEER.format("%r1") + "ld.shared::cluster.b32 %r20, [%r13]; //!\n" + USE
        + CLUSTER,
        threads=32, grid=2, cluster=2,
    ),
    "a cluster barrier that does not release": Case(
        "race_shared",
        PUT + "barrier.cluster.arrive<<.relaxed||.release>>.aligned;\nbarrier.cluster.wait.aligned;\n"
        + PEER.format("%r1") + "ld.shared::cluster.b32 %r20, [%r13]; //!\n" + USE + CLUSTER,
        threads=32, grid=2, cluster=2,
    ),
    "a barrier of the CTA where the cluster's is needed": Case(
        "race_shared",
        PUT + "<<bar.sync 0;\n||" + CLUSTER + ">>" + PEER.format("%r1") + "ld.shared::cluster.b32 %r20, [%r13]; //!\n"
        + USE + CLUSTER,
        threads=32, grid=2, cluster=2,
    ),
    "st.async that is not waited for": Case(
        "race_shared",
        "@%p2 mbarrier.init.shared.b64 [%r8], 1;\n" + CLUSTER + PEER.format("%r2")
        + "mapa.shared::cluster.u32 %r14, %r8, %r12;\n@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 4;\n"
        "@%p2 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r13], %r10, [%r14]; //!\n<<||"
        + wait("%r8", 0, "W") + ">>ld.shared.b32 %r20, [%r2]; //!\n" + USE + wait("%r8", 0, "LATE") + CLUSTER,
        threads=32, grid=2, cluster=2,
    ),
    "a load from a peer that has exited": Case(
        "peer_memory_after_exit",
        PUT.replace(" //!", "") + CLUSTER + PEER.format("%r1") + "ld.shared::cluster.b32 %r20, [%r13]; //!\n" + USE
        + "<<||" + CLUSTER + ">>",
        threads=32, grid=2, cluster=2,
    ),
    "a store to a peer that has exited": Case(
        "peer_memory_after_exit",
        CLUSTER + PEER.format("%r1") + "st.shared::cluster.b32 [%r13], %r0; //!\n<<||" + CLUSTER + ">>",
        threads=32, grid=2, cluster=2,
    ),
    "an atomic on a peer that has exited": Case(
        "peer_memory_after_exit",
        "st.shared.b32 [%r1], 0;\n" + CLUSTER + PEER.format("%r1")
        + "red.shared::cluster.add.u32 [%r13], 1; //!\n<<||" + CLUSTER + ">>",
        threads=32, grid=2, cluster=2,
    ),
    "an arrival at a peer that has exited": Case(
        "peer_memory_after_exit",
        "@%p2 mbarrier.init.shared.b64 [%r8], 1;\nfence.mbarrier_init.release.cluster;\n" + CLUSTER + PEER.format("%r8")
        + "@%p2 mbarrier.arrive.shared::cluster.b64 _, [%r13]; //!\n<<||" + wait("%r8", 0, "W") + ">>",
        threads=32, grid=2, cluster=2,
    ),
    # --- proxies
    "no proxy fence before a bulk store": Case(
        "missing_proxy_fence", "st.shared.b32 [%r1], %r0; //!\n<<||" + FENCE + ">>bar.sync 0;\n" + LAST
    ),
    "a proxy fence before the store": Case(
        "missing_proxy_fence",
        "<<" + FENCE + "||>>st.shared.b32 [%r1], %r0; //!\n<<||" + FENCE + ">>bar.sync 0;\n" + LAST,
    ),
    "a proxy fence of the wrong space": Case(
        "missing_proxy_fence",
        "st.shared.b32 [%r1], %r0; //!\nfence.proxy.async.<<global||shared::cta>>;\nbar.sync 0;\n" + LAST,
    ),
    "an ordinary fence where a proxy fence is needed": Case(
        "missing_proxy_fence",
        "st.shared.b32 [%r1], %r0; //!\n<<fence.acq_rel.cta;\n||" + FENCE + ">>bar.sync 0;\n" + LAST,
    ),
    "no proxy fence before a tensor store": Case(
        "missing_proxy_fence",
        "st.shared.b32 [%r1], %r0; //!\n<<||" + FENCE + ">>bar.sync 0;\n" + AFTER + "mov.b64 %rd6, map;\n"
        "cvta.param.u64 %rd6, %rd6;\nmov.u32 %r14, 0;\n"
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd6, {%r14, %r14}], [%r2]; //!\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nEND:\n",
        tensor=(16, 16, 8, 8, 64),
    ),
    "no proxy fence before a bulk reduction": Case(
        "missing_proxy_fence",
        "st.shared.b32 [%r1], %r0; //!\n<<||" + FENCE + ">>bar.sync 0;\n" + AFTER
        + "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd4], [%r2], 256; //!\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nEND:\n",
    ),
    "no proxy fence before a copy to a peer": Case(
        "missing_proxy_fence",
        "@%p2 mbarrier.init.shared.b64 [%r8], 1;\nst.shared.b32 [%r1], %r0; //!\n<<||" + FENCE + ">>"
        "fence.mbarrier_init.release.cluster;\n" + CLUSTER
        + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 128;\n"
        + PEER.format("%r8") + "add.u32 %r14, %r2, 4096;\nmapa.shared::cluster.u32 %r14, %r14, %r12;\n"
        "@%p2 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r14], [%r2], 128, [%r13]; //!\n"
        + wait("%r8", 0, "W") + CLUSTER,
        threads=32, grid=2, cluster=2,
    ),
    "no proxy fence before wgmma": Case(
        "missing_proxy_fence",
        ROW + "st.shared.v4.b32 [%r14], {%r0, %r0, %r0, %r0}; //!\n<<||" + FENCE + ">>"
        "bar.sync 0;\nshr.u32 %r15, %r2, 4;\ncvt.u64.u32 %rd6, %r15;\nor.b64 %rd6, %rd6, 0x0000001000080000;\n"
        "mov.b32 %f1, 0f00000000;\nmov.b32 %f2, %f1;\nmov.b32 %f3, %f1;\nmov.b32 %f4, %f1;\n"
        "setp.eq.u32 %p5, %r2, %r2;\n"
        "wgmma.fence.sync.aligned;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd6, %rd6, "
        "%p5, 1, 1, 0, 0; //!\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n",
        threads=128, arch="sm_90a",
    ),
    "no proxy fence after cp.async": Case(
        "missing_proxy_fence_cp_async", TAKE + "cp.async.wait_all;\n<<||" + FENCE + ">>bar.sync 0;\n" + LAST
    ),
    # --- initialisation
    "shared memory that nothing wrote": Case(
        "uninitialised_smem", "<<||st.shared.b32 [%r1], 1;\n>>ld.shared.b32 %r20, [%r1]; //!\n" + USE
    ),
    "the last of four words that nothing wrote": Case(
        "uninitialised_smem",
        ROW + "st.shared.v2.b32 [%r14], {%r0, %r0};\nst.shared.b32 [%r14+8], %r0;\n"
        "<<||st.shared.b32 [%r14+12], %r0;\n>>"
        "ld.shared.v4.b32 {%r21, %r22, %r23, %r20}, [%r14]; //!\n" + USE,
    ),
    "a bulk store of what nothing wrote": Case(
        "uninitialised_smem", "<<||st.shared.b32 [%r1], %r0;\n" + FENCE + "bar.sync 0;\n>>" + LAST
    ),
    "an atomic on what nothing wrote": Case(
        "uninitialised_smem",
        "<<||@%p2 st.shared.b32 [%r2], 0;\nbar.sync 0;\n>>atom.shared.add.u32 %r20, [%r2], 1; //!\n" + USE,
    ),
    # --- copies at the end
    "an exit while a copy is on its way": Case(
        "async_write_after_exit", INIT.format(1, 1) + FILL + "<<||" + wait("%r8", 0, "W") + ">>"
    ),
    "an exit while a bulk store reads": Case(
        "async_read_after_exit",
        "st.shared.b32 [%r1], %r0;\n" + FENCE + "bar.sync 0;\n" + AFTER + STORE + " [%rd4], [%r2], 256; //!\n"
        "cp.async.bulk.commit_group;\n<<||cp.async.bulk.wait_group.read 0;\n>>END:\n",
        schedules=("adversarial",),
    ),
    "an exit of a CTA of a pair while its own bulk store reads": Case(
        "async_read_after_exit",
        "st.shared.b32 [%r1], %r0;\n" + FENCE + "bar.sync 0;\n@!%p4 bra END;\n" + AFTER + STORE
        + " [%rd4], [%r2], 256; //!\n"
        "cp.async.bulk.commit_group;\n<<||cp.async.bulk.wait_group.read 0;\n>>END:\n",
        grid=2, cluster=2, schedules=("adversarial",),
    ),
    "data ordered by the completion of a copy alone": Case(
        "race_through_completion",
        INIT.format(1, 1) + "setp.eq.u32 %p5, %r0, 32;\n@%p5 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;\n"
        "@%p2 st.shared.b32 [%r2+4096], 1; //!\n@%p2 " + BULK + " [%r2], [%rd1], 256, [%r8];\n" + wait("%r8", 0, "W")
        + "<<||bar.sync 0;\n>>@%p5 ld.shared.b32 %r20, [%r2+4096]; //!\n@%p5 " + USE,
    ),
}  # fmt: skip
