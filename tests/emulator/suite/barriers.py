"""Faults around mbarriers, named barriers, the cluster barrier, lanes of a warp, and loops that never end."""

from __future__ import annotations

from tests.emulator.suite.common import BULK, CLUSTER, INIT, PEER, wait
from tests.emulator.suite.harness import Case

USE = "st.global.b32 [%rd5], %r20;\n"
ONE = "@%p2 mbarrier.init.shared.b64 [%r8], {}; //!\nbar.sync 0;\n"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r8];"
EXPECT = "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {};"
LOAD = f"@%p2 {BULK} [%r2], [%rd1], 256, [%r8];"
# Thread 0 completes two phases; warp 1 waits for both.
PHASES = (
    INIT.format(1, 32) + "@!%p1 bra OTHER;\n@!%p2 bra END;\n" + ARRIVE + "\n<<||" + wait("%r9", 0, "V") + ">>" + ARRIVE
    + "\nbra END;\nOTHER:\n" + wait("%r8", 0, "W0").replace("0;", "0; //!") + "mbarrier.arrive.shared.b64 _, [%r9];\n"
    + wait("%r8", 1, "W1") + "END:\n"
)  # fmt: skip
CANCEL = (
    INIT.format(1, 1)
    + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 16;\n@%p2 clusterlaunchcontrol.try_cancel.async.shared::cta"
    ".mbarrier::complete_tx::bytes.b128 [%r2], [%r8];\n" + wait("%r8", 0, "W") + "{ .reg .b128 %h;\n"
    "ld.shared.v2.b64 {%rd6, %rd7}, [%r2];\nmov.b128 %h, {%rd6, %rd7};\n"
    "<<||clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p5, %h;\n>>"
    "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r20, %h; //!\n}\n" + USE
)
NEXT = "and.b32 %r14, %r0, 31;\nxor.b32 %r14, %r14, 1;\n"
# Thread 0 looks at the flag for all of its CTA, or of its cluster: the loop has barriers, as Triton's atomics have.
LOOK = (
    "L: @%p2 atom.acquire.gpu.global.add.u32 %r30, [%rd4], 0; //!\n@%p2 st.shared.b32 [%r2], %r30;\nbar.sync 0;\n"
    "ld.shared.b32 %r31, [%r2];\nbar.sync 0;\nsetp.ne.u32 %p10, %r31, {};\n@%p10 bra L;\n"
)
HALF = "setp.lt.u32 %p5, %r5, 16;\n"

CASES = {
    "one arrival too many": Case(
        "mbarrier_over_arrival", ONE.format(64) + "@%p2 mbarrier.arrive.shared.b64 _, [%r8], <<65||64>>; //!\n"
    ),
    "a pending count that overflows": Case(
        "mbarrier_count_overflow", ONE.format("<<1048575||1>>") + "cp.async.mbarrier.arrive.shared.b64 [%r8]; //!\n"
    ),
    "a transaction count that overflows": Case(
        "mbarrier_tx_overflow",
        ONE.format(1) + "@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 1048575; //!\n"
        "@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], <<1048575||0>>; //!\n"
        "@%p2 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], 1048575;\n"
        "@%p2 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], <<1048575||0>>;\n",
    ),
    "bytes that nothing brings": Case(
        "mbarrier_tx_leftover|Deadlock",
        ONE.format(1) + EXPECT.format("<<260||256>>") + "\n" + LOAD + "\n"
        + wait("%r8", 0, "W").replace("0;", "0; //!"),
    ),
    "a copy that no thread expects": Case(
        "mbarrier_tx_unexpected",
        ONE.format(1) + EXPECT.format("<<256||512>>") + "\n" + LOAD + "\n" + LOAD.replace("[%r2]", "[%r2+256]") + "\n"
        + "<<POLL: mbarrier.test_wait.parity.shared.b64 %p9, [%r8], 0;\nld.volatile.shared.b32 %r30, [%r2+508];\n"
        "setp.eq.u32 %p10, %r30, 0;\n@%p10 bra POLL;\n||" + wait("%r8", 0, "W") + ">>",
        threads=32, schedules=("round_robin",),
    ),
    "a store over a barrier": Case(
        "mbarrier_overwritten",
        ONE.format(64) + "@%p2 st.shared.b32 [<<%r8||%r2>>], 0; //!\n" + ARRIVE + " //!\n",
    ),
    "a barrier that is initialised twice": Case(
        "mbarrier_reinit",
        ONE.format(64) + "<<||@%p2 mbarrier.inval.shared.b64 [%r8];\n>>@%p2 mbarrier.init.shared.b64 [%r8], 32; //!\n",
    ),
    "inval while bytes are on their way": Case(
        "mbarrier_inval_in_use",
        ONE.format(1) + "<<@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 16;\n||>>"
        "@%p2 mbarrier.inval.shared.b64 [%r8]; //!\n",
    ),
    "noComplete for the last arrival": Case(
        "mbarrier_no_complete",
        ONE.format("<<1||2>>") + "@%p2 mbarrier.arrive.noComplete.shared.b64 %rd6, [%r8], 1; //!\n",
    ),
    "the next phase without the waiting warps": Case(
        "mbarrier_phase_unordered|mbarrier_phase_lapped", PHASES, schedules=("round_robin", "adversarial")
    ),
    "a phase number for a parity": Case(
        "mbarrier_parity_range", ONE.format(64) + "mbarrier.test_wait.parity.shared.b64 %p9, [%r8], <<3||1>>; //!\n"
    ),
    "a barrier that is used before it is there": Case(
        "mbarrier_init_unordered|HazardError|EmulatorError",
        "@%p2 mbarrier.init.shared.b64 [%r8], 64; //!\n<<||bar.sync 0;\n>>" + ARRIVE + " //!\n"
        + wait("%r8", 0, "W").replace("0;", "0; //!"),
        schedules=("round_robin",),
    ),
    "no fence.mbarrier_init before a peer arrives": Case(
        "mbarrier_init_unordered",
        "@%p2 mbarrier.init.shared.b64 [%r8], 1; //!\n<<||fence.mbarrier_init.release.cluster;\n>>"
        "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n" + PEER.format("%r8")
        + "@%p2 mbarrier.arrive.shared::cluster.b64 _, [%r13]; //!\n" + wait("%r8", 0, "W"),
        threads=32, grid=2, cluster=2,
    ),
    "no fence.mbarrier_init before another warp waits": Case(
        "mbarrier_init_unordered",
        "@%p2 mbarrier.init.shared.b64 [%r8], 1; //!\n<<||fence.mbarrier_init.release.cluster;\n>>"
        "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n@%p2 " + ARRIVE + "\n"
        + wait("%r8", 0, "W").replace("0;", "0; //!"),
        grid=2, cluster=2,
    ),
    "no fence.mbarrier_init before a copy of a peer": Case(
        "mbarrier_init_unordered",
        "@%p2 mbarrier.init.shared.b64 [%r8], 1; //!\n@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 128;\n"
        "st.shared.b32 [%r1], %r0;\nfence.proxy.async.shared::cta;\n<<||fence.mbarrier_init.release.cluster;\n>>"
        "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n" + PEER.format("%r8")
        + "add.u32 %r14, %r2, 4096;\nmapa.shared::cluster.u32 %r14, %r14, %r12;\n@%p2 cp.async.bulk.shared::cluster"
        ".shared::cta.mbarrier::complete_tx::bytes [%r14], [%r2], 128, [%r13]; //!\n" + wait("%r8", 0, "W") + CLUSTER,
        threads=32, grid=2, cluster=2,
    ),
    "fewer arrivals expected than come": Case(
        "barrier_phase_mixed|mbarrier_over_arrival",
        INIT.format("<<1||2>>", 1) + "@%p3 " + ARRIVE + " //!\n",
    ),
    "more arrivals expected than come": Case(
        "Deadlock", ONE.format("<<3||2>>") + "@%p3 " + ARRIVE + "\n" + wait("%r8", 0, "W").replace("0;", "0; //!")
    ),
    "a barrier of half the warps": Case("barrier_phase_mixed", "bar.sync 1, <<64||128>>; //!\n", threads=128),
    "one barrier for two groups": Case(
        "barrier_phase_mixed",
        "setp.lt.u32 %p5, %r3, 2;\n@%p5 bra FIRST;\nbar.sync <<1||2>>, 64; //!\nbra END;\nFIRST: bar.sync 1, 64; //!\n"
        "END:\n",
        threads=128,
    ),
    "a warp arrives twice": Case(
        "barrier_double_arrive",
        "@%p1 bar.arrive 1, <<96||64>>; //!\n<<@%p1 bar.arrive 1, 96; //!\n||>>@!%p1 bar.sync 1, <<96||64>>;\n",
    ),
    "a barrier that a warp never reaches": Case("Deadlock", "<<@%p1 ||>>bar.sync 1, 64; //!\n"),
    "warps that name different counts": Case(
        "HazardError", "@%p1 bar.sync 1, <<96||64>>; //!\n@!%p1 bar.sync 1, 64; //!\n"
    ),
    "two arrivals at the cluster barrier": Case(
        "cluster_double_arrive",
        "barrier.cluster.arrive.aligned;\n<<barrier.cluster.arrive.aligned; //!\nbarrier.cluster.wait.aligned;\n||>>"
        "barrier.cluster.wait.aligned;\n",
        grid=2, cluster=2,
    ),
    "a wait at the cluster barrier without an arrival": Case(
        "HazardError", "<<||barrier.cluster.arrive.aligned;\n>>barrier.cluster.wait.aligned; //!\n", grid=2, cluster=2
    ),
    "a response that failed and is used": Case("clc_failed_response", CANCEL),
    # --- lanes of a warp
    "a shuffle without half of the lanes it names": Case(
        "diverged_sync",
        HALF + NEXT + "@!%p5 bra END;\nshfl.sync.idx.b32 %r20, %r0, %r14, 31, <<0xffffffff||0xffff>>; //!\n" + USE
        + "END:\n<<bar.warp.sync -1;\n||>>",
    ),
    "a vote without lanes that it names": Case(
        "diverged_sync",
        HALF + "@!%p5 bra END;\nvote.sync.ballot.b32 %r20, %p3, <<-1||0xffff>>; //!\n" + USE
        + "END:\n<<bar.warp.sync -1;\n||>>",
    ),
    "ldmatrix by half a warp": Case(
        "diverged_sync",
        "shl.b32 %r14, %r0, 4;\nadd.u32 %r14, %r14, %r2;\nst.shared.v4.b32 [%r14], {%r0, %r0, %r0, %r0};\nbar.sync 0;\n"
        + HALF + "<<@!%p5 bra END;\n||>>"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r14]; //!\n" + USE + "END:\n<<bar.warp.sync -1;\n||>>",
    ),
    "a barrier of the CTA by half a warp": Case("HazardError|Deadlock", HALF + "<<@%p5 ||>>bar.sync 1, 64; //!\n"),
    "a shuffle by lanes outside its mask": Case(
        "lane_outside_mask", NEXT + "shfl.sync.idx.b32 %r20, %r0, %r14, 31, <<0xffff||-1>>; //!\n" + USE
    ),
    "a vote by lanes outside its mask": Case(
        "lane_outside_mask", "vote.sync.ballot.b32 %r20, %p3, <<0x7fffffff||-1>>; //!\n" + USE
    ),
    "a match by lanes outside its mask": Case(
        "lane_outside_mask", "match.any.sync.b32 %r20, %r3, <<0xfffffffe||-1>>; //!\n" + USE
    ),
    "a reduction by lanes outside its mask": Case(
        "lane_outside_mask", "redux.sync.add.u32 %r20, %r5, <<0xffff0000||-1>>; //!\n" + USE
    ),
    "elect by lanes outside its mask": Case(
        "lane_outside_mask", "elect.sync %r20|%p5, <<0xffff||-1>>; //!\n" + USE
    ),
    "a warp barrier by lanes outside its mask": Case(
        "lane_outside_mask|HazardError", "bar.warp.sync <<0xffff||-1>>; //!\n"
    ),
    "a lane reads what another wrote": Case(
        "missing_warp_sync",
        "st.shared.b32 [%r1], %r0; //!\n<<||bar.warp.sync -1;\n>>ld.shared.b32 %r20, [%r6]; //!\n" + USE,
    ),
    "a lane overwrites what another reads": Case(
        "missing_warp_sync",
        "st.shared.b32 [%r1], %r0;\nbar.warp.sync -1;\nld.shared.b32 %r20, [%r6]; //!\n<<||bar.warp.sync -1;\n>>"
        "st.shared.b32 [%r1], %r20; //!\n",
    ),
    "a lane arrives for others that still read": Case(
        "missing_warp_sync",
        INIT.format(1, 1) + "st.shared.b32 [%r1+4096], %r0;\nbar.sync 0;\n"
        "@!%p1 bra OTHER;\nld.shared.b32 %r20, [%r1+4096]; //!\n<<||bar.warp.sync -1;\n>>@%p3 "
        + ARRIVE + "\n" + USE + "bra END;\nOTHER:\n" + wait("%r8", 0, "W")
        + "st.shared.b32 [%r1+3968], %r0; //!\nEND:\n",
    ),
    "a lane arrives for others that still read a byte": Case(
        "missing_warp_sync",
        INIT.format(1, 1) + "st.shared.b32 [%r1+4096], %r0;\nbar.sync 0;\n"
        "@!%p1 bra OTHER;\nld.shared.u8 %r20, [%r1+4096]; //!\n@%p3 " + ARRIVE + "\n" + USE + "bra END;\nOTHER:\n"
        + wait("%r8", 0, "W") + "st.shared.u8 [%r1+<<3968||3970>>], %r0; //!\nEND:\n",
    ),
    "a warp that does not wait for a lane's arrival": Case(
        "race_shared",
        INIT.format(1, 1) + "st.shared.b32 [%r1+4096], %r0;\nbar.sync 0;\n@!%p1 bra OTHER;\n"
        "ld.shared.b32 %r20, [%r1+4096]; //!\n<<||bar.warp.sync -1;\n>>@%p3 " + ARRIVE + "\n" + USE
        + "bra END;\nOTHER:\n<<||" + wait("%r8", 0, "W") + ">>@!%p3 st.shared.b32 [%r1+3968], %r0; //!\nEND:\n",
        schedules=("oldest_first", "round_robin"),
    ),
    "a lane arrives for others that have written": Case(
        "missing_warp_sync",
        INIT.format(1, 1) + "@!%p1 bra OTHER;\nst.shared.b32 [%r1], %r0; //!\n<<||bar.warp.sync -1;\n>>@%p3 "
        + ARRIVE + "\nbra END;\nOTHER:\n" + wait("%r8", 0, "W") + "ld.shared.b32 %r20, [%r4]; //!\n" + USE
        + "END:\n",
    ),
    "a diverged warp exchanges words": Case(
        "missing_warp_sync",
        HALF + "@!%p5 bra ON;\nst.shared.b32 [%r1], %r0; //!\nON:\nxor.b32 %r14, %r0, 16;\n"
        "mad.lo.u32 %r14, %r14, 4, %r2;\n"
        "<<||bar.warp.sync -1;\n>>@!%p5 ld.shared.b32 %r20, [%r14]; //!\n@!%p5 " + USE,
    ),
    "a warp barrier of the wrong lanes": Case(
        "missing_warp_sync",
        HALF + "st.shared.b32 [%r1], %r0; //!\nxor.b32 %r14, %r0, 16;\nmad.lo.u32 %r14, %r14, 4, %r2;\n"
        "<<selp.b32 %r15, 0xffff, 0xffff0000, %p5;||mov.b32 %r15, -1;>>\nbar.warp.sync %r15;\n"
        "ld.shared.b32 %r20, [%r14]; //!\n" + USE,
    ),
    # --- loops that never end
    "a flag that no thread raises": Case(
        "Deadlock",
        "L: ld.acquire.gpu.global.b32 %r30, [%rd4]; //!\nsetp.ne.u32 %p10, %r30, <<1||0>>;\n@%p10 bra L;\n",
        threads=32, schedules=("round_robin",),
    ),
    "a wait that counts its turns in memory": Case(
        "Deadlock",
        "mov.u32 %r31, 0;\nL: add.u32 %r31, %r31, 1; st.global.b32 [%rd5], %r31;\nld.volatile.global.b32 %r30, [%rd4]; "
        "//!\nsetp.ne.u32 %p10, %r30, <<1||0>>;\n@%p10 bra L;\n",
        threads=32, schedules=("round_robin",),
    ),
    "a wait that swaps two words": Case(
        "Deadlock",
        "L: ld.global.b32 %r31, [%rd5]; xor.b32 %r31, %r31, 1; st.global.b32 [%rd5], %r31;\n"
        "ld.volatile.global.b32 %r30, [%rd4]; //!\nsetp.ne.u32 %p10, %r30, <<1||0>>;\n@%p10 bra L;\n",
        threads=32, schedules=("round_robin",),
    ),
    "a lock that is never given back": Case(
        "Deadlock",
        "@!%p3 bra END;\nL: atom.acquire.gpu.global.cas.b32 %r30, [%rd4], 0, 1; //!\nsetp.ne.u32 %p10, %r30, 0;\n"
        "@%p10 bra L;\n<<||st.release.gpu.global.b32 [%rd4], 0;\n>>END:\n",
        schedules=("round_robin",),
    ),
    "a wait that adds to a counter of turns": Case(
        "Deadlock",
        "L: red.relaxed.gpu.global.add.u32 [%rd4+64], 1;\nld.acquire.gpu.global.b32 %r30, [%rd4]; //!\n"
        "setp.ne.u32 %p10, %r30, <<1||0>>;\n@%p10 bra L;\n",
        threads=32, schedules=("round_robin",),
    ),
    "a wait in shared memory that writes beside it": Case(
        "Deadlock",
        "@%p2 st.shared.b32 [%r2+4096], 0;\nbar.sync 0;\nmov.u32 %r31, 0;\nL: add.u32 %r31, %r31, 3; "
        "st.shared.b32 [%r1], %r31;\nld.volatile.shared.b32 %r30, [%r2+4096]; //!\nsetp.ne.u32 %p10, %r30, <<1||0>>;\n"
        "@%p10 bra L;\n",
        threads=32, schedules=("round_robin",),
    ),
    "a thread that waits for all others": Case("Deadlock", LOOK.format("<<1||0>>"), schedules=("round_robin",)),
    "a thread that waits for all others of a cluster": Case(
        "Deadlock",
        "mapa.shared::cluster.u32 %r14, %r2, 0;\nsetp.eq.and.u32 %p5, %r7, 0, %p2;\n"
        "L: @%p5 atom.acquire.gpu.global.or.b32 %r30, [%rd4], 0; //!\n@%p5 st.shared.b32 [%r2], %r30;\n" + CLUSTER
        + "ld.shared::cluster.b32 %r31, [%r14];\n" + CLUSTER
        + "setp.ne.u32 %p10, %r31, <<1||0>>;\n@%p10 bra L;\n",
        threads=32, grid=2, cluster=2, schedules=("round_robin",),
    ),
    "a block that waits for one that does not answer": Case(
        "Deadlock",
        "@!%p4 bra OTHER;\n" + LOOK.format("1") + "bra END;\n"
        "OTHER: <<||@%p2 st.release.gpu.global.b32 [%rd4], 1;\n>>END:\n", grid=2, schedules=("round_robin",),
    ),
}  # fmt: skip
