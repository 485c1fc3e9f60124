"""Faults around arrivals and waits that are relaxed, or whose scope ends before the other thread."""

from __future__ import annotations

from tests.emulator.suite.common import BULK, CLUSTER, INIT, PEER
from tests.emulator.suite.harness import Case

USE = "st.global.b32 [%rd5], %r20;\n"
PUT = "st.shared.b32 [%r1], %r0; //!\n"
GET = "ld.shared.b32 %r20, [%r4]; //!\n" + USE
FENCE = "fence.acq_rel.{};\n"


def arrive(order: str, op: str = "arrive") -> str:
    """Arrive at the first barrier."""
    return f"mbarrier.{op}.{order}.shared.b64 _, [%r8];\n"


def wait(order: str = "acquire.cta", parity: int = 0, label: str = "W", op: str = "try_wait") -> str:
    """Wait for a phase of the first barrier."""
    return f"{label}: mbarrier.{op}.parity.{order}.shared.b64 %p9, [%r8], {parity};\n@!%p9 bra {label};\n"


# CTA 0 writes into its peer and arrives there; the peer waits and reads.
PEERS = {"threads": 32, "grid": 2, "cluster": 2}
SENT = (
    INIT.format(32, 1) + "fence.mbarrier_init.release.cluster;\n" + CLUSTER + PEER.format("%r8") + "@!%p4 bra OTHER;\n"
    "mapa.shared::cluster.u32 %r14, %r1, %r12;\nst.shared::cluster.b32 [%r14], %r0; //!\n{}bra END;\nOTHER:\n"
    + wait("acquire.cluster") + "ld.shared.b32 %r20, [%r1]; //!\n" + USE + "END:\n" + CLUSTER
)  # fmt: skip
REMOTE = "mbarrier.arrive.{}.shared::cluster.b64 _, [%r13];\n"
# Warp 1 reads what a copy has brought and gives the buffer back, warp 0 lets the next copy fill it.
RETURNED = (
    "@%p2 mbarrier.init.shared.b64 [%r8], 1;\n@%p2 mbarrier.init.shared.b64 [%r9], 32;\nbar.sync 0;\n@!%p1 bra OTHER;\n"
    "@!%p2 bra END;\nmbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [%r8], 256;\n"
    f"{BULK} [%r2], [%rd1], 256, [%r8];\n"
    "V: mbarrier.try_wait.parity.{}.shared.b64 %p9, [%r9], 0;\n@!%p9 bra V;\n{}"
    "mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [%r8], 256;\n"
    f"{BULK} [%r2], [%rd1], 256, [%r8]; //!\n" + wait(parity=1, label="W1") + "bra END;\nOTHER:\n"
    + wait(label="W2") + "ld.shared.b32 %r20, [%r1]; //!\n" + USE
    + "{}mbarrier.arrive.{}.shared.b64 _, [%r9];\nEND:\n"
)  # fmt: skip
# Warp 1 stores and passes a barrier with warp 0, which arrives for both; warp 2 waits and reads.
GATHERED = (
    INIT.format(32, 1) + "setp.eq.u32 %p5, %r3, 2;\n@%p5 bra OTHER;\n" + PUT + "{}bar.sync 1, 64;\n@!%p1 bra END;\n{}"
    + arrive("relaxed.cta") + "bra END;\nOTHER:\n" + wait() + "ld.shared.b32 %r20, [%r1-128]; //!\n" + USE + "END:\n"
)  # fmt: skip
# Warp 0 of CTA 1 stores, its warp 1 waits relaxed and tells the peer, which reads.
TOLD = (
    INIT.format(32, 32) + "fence.mbarrier_init.release.cluster;\n" + CLUSTER + PEER.format("%r9") + "@%p4 bra TOLD;\n"
    "@!%p1 bra READ;\n" + PUT + arrive("release.cta") + "bra END;\nREAD:\n" + wait("relaxed.cta")
    + REMOTE.format("release.cluster") + "bra END;\nTOLD:\n@!%p1 bra END;\n"
    + wait("acquire.cluster", label="V").replace("%r8", "%r9") + "fence.acq_rel.<<cta||cluster>>;\n"
    "mapa.shared::cluster.u32 %r14, %r1, %r12;\nld.shared::cluster.b32 %r20, [%r14]; //!\n" + USE + "END:\n" + CLUSTER
)  # fmt: skip
# Warp 0 stores, warp 1 waits relaxed and makes a copy, warp 2 waits for the copy and fences.
HEARD = (
    INIT.format(32, 1) + "setp.eq.u32 %p5, %r3, 1;\nsetp.eq.u32 %p6, %r3, 2;\n@%p5 bra READ;\n@%p6 bra HEARD;\n"
    + PUT + arrive("release.cta") + "bra END;\nREAD:\n" + wait("relaxed.cta")
    + "@!%p3 bra END;\nmbarrier.arrive.expect_tx.<<relaxed||release>>.cta.shared.b64 _, [%r9], 256;\n"
    f"{BULK} [%r2+1024], [%rd1], 256, [%r9];\nbra END;\nHEARD:\n" + wait(label="V").replace("%r8", "%r9")
    + FENCE.format("cta") + "ld.shared.b32 %r20, [%r1-256]; //!\n" + USE + "END:\n"
)  # fmt: skip

CASES = {
    "a relaxed arrival after the store": Case(
        "race_shared", INIT.format(64, 1) + PUT + arrive("<<relaxed||release>>.cta") + wait() + GET
    ),
    "a relaxed arrival that leaves": Case(
        "race_shared", INIT.format(64, 1) + PUT + arrive("<<relaxed||release>>.cta", "arrive_drop") + wait() + GET
    ),
    "no fence before a relaxed arrival": Case(
        "race_shared",
        INIT.format(64, 1) + PUT + f"<<||{FENCE.format('cta')}>>" + arrive("relaxed.cta") + wait() + GET,
    ),
    "a fence after the relaxed arrival": Case(
        "race_shared",
        INIT.format(64, 1)
        + PUT
        + f"<<||{FENCE.format('cta')}>>"
        + arrive("relaxed.cta")
        + f"<<{FENCE.format('cta')}||>>"
        + wait()
        + GET,
    ),
    "a fence before the store that it is for": Case(
        "race_shared",
        INIT.format(64, 1)
        + f"<<{FENCE.format('cta')}||>>"
        + PUT
        + f"<<||{FENCE.format('cta')}>>"
        + arrive("relaxed.cta")
        + wait()
        + GET,
    ),
    "a relaxed wait": Case(
        "race_shared", INIT.format(64, 1) + PUT + arrive("release.cta") + wait("<<relaxed||acquire>>.cta") + GET
    ),
    "a relaxed look": Case(
        "race_shared",
        INIT.format(64, 1) + PUT + arrive("release.cta") + wait("<<relaxed||acquire>>.cta", op="test_wait") + GET,
    ),
    "no fence after a relaxed wait": Case(
        "race_shared",
        INIT.format(64, 1) + PUT + arrive("release.cta") + wait("relaxed.cta") + f"<<||{FENCE.format('cta')}>>" + GET,
    ),
    "a copy that a relaxed wait has waited for": Case(
        "race_shared",
        INIT.format(1, 1) + "@%p2 mbarrier.arrive.expect_tx.release.cta.shared.b64 _, [%r8], 256;\n"
        f"@%p2 {BULK} [%r2], [%rd1], 256, [%r8]; //!\n" + wait("<<relaxed||acquire>>.cta") + GET,
    ),
    "a word that a relaxed expect_tx hands over": Case(
        "race_through_completion",
        INIT.format(1, 1) + "@%p2 st.shared.b32 [%r2+512], %r0; //!\n"
        "@%p2 mbarrier.arrive.expect_tx.<<relaxed||release>>.cta.shared.b64 _, [%r8], 256;\n"
        f"@%p2 {BULK} [%r2], [%rd1], 256, [%r8];\n" + wait() + "ld.shared.b32 %r20, [%r2+512]; //!\n" + USE,
    ),
    "a buffer that a relaxed arrival gives back": Case(
        "race_shared", RETURNED.format("acquire.cta", "", "", "<<relaxed||release>>.cta")
    ),
    "a buffer that is taken back by a relaxed wait": Case(
        "race_shared",
        RETURNED.format("relaxed.cta", f"<<||{FENCE.format('cta')}>>", FENCE.format("cta"), "relaxed.cta"),
    ),
    "a relaxed arrival at a peer": Case(
        "race_shared", SENT.format(REMOTE.format("<<relaxed||release>>.cluster")), **PEERS
    ),
    "a fence that does not reach the peer": Case(
        "race_shared", SENT.format("fence.acq_rel.<<cta||cluster>>;\n" + REMOTE.format("relaxed.cluster")), **PEERS
    ),
    "a release that does not reach the peer": Case(
        "race_shared", SENT.format(REMOTE.format("release.<<cta||cluster>>")), **PEERS
    ),
    "a fence after a relaxed wait that does not reach the peer": Case(
        "race_shared",
        SENT.replace(wait("acquire.cluster"), wait("relaxed.cluster") + "fence.acq_rel.<<cta||cluster>>;\n").format(
            REMOTE.format("release.cluster")
        ),
        **PEERS,
    ),
    "a fence that does not reach the warp that waited": Case("race_shared", TOLD, grid=2, cluster=2),
    "a fence for the wait of a warp known by a copy": Case("race_through_completion", HEARD, threads=96),
    "a barrier of two warps and no fence": Case(
        "race_shared", GATHERED.format(f"<<||{FENCE.format('cta')}>>", ""), threads=96
    ),
    "a fence before a release that does not reach the peer": Case(
        "race_shared", SENT.format(FENCE.format("cluster") + REMOTE.format("relaxed.<<cta||cluster>>")), **PEERS
    ),
}
# Relaxed arrivals that hand nothing over keep phases apart and CTAs alive.
SILENT = {
    "a barrier that only counts": Case(
        "",
        INIT.format(64, 1)
        + "".join(arrive("relaxed.cta") + wait("relaxed.cta", i % 2, f"W{i}") for i in range(4)),
    ),
    "the arrival of a producer whose copies bring the data": Case(
        "",
        INIT.format(1, 1) + "@%p2 mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [%r8], 256;\n"
        f"@%p2 {BULK} [%r2], [%rd1], 256, [%r8];\n" + wait() + "ld.shared.b32 %r20, [%r4];\n" + USE,
    ),
    "a peer that waits for the last relaxed arrival": Case(
        "",
        INIT.format(32, 1) + "fence.mbarrier_init.release.cluster;\n" + CLUSTER + PEER.format("%r8")
        + REMOTE.format("relaxed.cluster") + wait("relaxed.cluster"), **PEERS,
    ),
    "a fence for the stores of a warp before a barrier": Case("", GATHERED.format("", FENCE.format("cta")), threads=96),
    "fences before the barrier": Case("", GATHERED.format(FENCE.format("cta"), ""), threads=96),
}  # fmt: skip
