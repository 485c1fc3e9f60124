"""Pieces of PTX that several kernels of the suite share."""

from __future__ import annotations

INIT = "@%p2 mbarrier.init.shared.b64 [%r8], {0};\n@%p2 mbarrier.init.shared.b64 [%r9], {1};\nbar.sync 0;\n"
BULK = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
FILL = f"@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;\n@%p2 {BULK} [%r2], [%rd1], 256, [%r8]; //!\n"
CLUSTER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
PEER = "xor.b32 %r12, %r7, 1;\nmapa.shared::cluster.u32 %r13, {}, %r12;\n"
RAISE = "@%p2 st.{}.global.b32 [%rd4], 1;\n"
FENCE = "fence.proxy.async.shared::cta;\n"


def wait(barrier: str, parity: int, label: str) -> str:
    """Wait for a phase of an mbarrier."""
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p9, [{barrier}], {parity};\n@!%p9 bra {label};\n"


def poll(load: str, label: str = "POLL") -> str:
    """Wait until the flag is raised."""
    return f"{label}: {load} %r40, [%rd4];\nsetp.eq.u32 %p10, %r40, 0;\n@%p10 bra {label};\n"


def handed_over(before: str, release: str, acquire: str) -> str:
    """CTA 0 stores its words and raises a flag; CTA 1 waits for it and reads."""
    return (
        f"@!%p4 bra OTHER;\nst.global.b32 [%rd2], %r0; //!\n{before}{release}bra END;\n"
        f"OTHER: {acquire}ld.global.b32 %r20, [%rd3]; //!\nst.global.b32 [%rd5], %r20;\nEND:\n"
    )
