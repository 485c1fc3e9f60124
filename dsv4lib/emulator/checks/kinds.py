"""List every kind of hazard that an emulated launch can report. Each has its meaning, severity and remedy.

``error``: the PTX ISA leaves the result undefined, or hardware would hang or fault. ``lint``: hardware is known to
cope, or the finding is about style; worth a look, no verdict. Errors that make an access impossible (out of bounds,
misaligned, wrong barrier use, deadlock) are no hazards: they stop the launch as exceptions (errors.py).

Sources: PTX ISA, the chapters named with each instruction; which check found what: the tests of this package.
"""

from __future__ import annotations

from dataclasses import dataclass

ERROR, LINT = "error", "lint"

# Groups of checks that can be switched on and off (selection.py), and how far their reports can be trusted.
GROUPS = {
    "allocation": "exact: the state of tensor memory is kept, not inferred",
    "initialisation": "exact, byte by byte in shared and cell by cell in tensor memory; a read is reported at once, so "
    "registers loaded from unwritten memory need no check of their own",
    "pending": "exact at the moment of the exit; which copies are still in flight then depends on the schedule",
    "barrier": "exact: counts and states are kept; what a schedule does not reach is not seen",
    "proxy": "exact for stores of threads into shared memory; a fence counts for every writer it is ordered after",
    "race": "by happens-before, independent of the schedule. No false report unless warps synchronise by something "
    "that no rule of race.py names; misses races within a warp, and in global memory what global_memory.py lists",
    "code": "found in the code without running it: on some path, and reported only if the instruction is executed "
    "(tcgen05.ld), or if the value can reach a store, a branch or an address (registers that nothing sets)",
    "lanes": "exact for shared memory, by lane; any synchronisation of the warp counts for all of its lanes",
    "pedantic": "what the PTX ISA requires and shipped kernels leave out, because the assembler or the hardware copes",
}


@dataclass(frozen=True)
class Kind:
    """One kind.

    Attributes:
        name: as in `Hazard.kind`.
        severity: ERROR or LINT.
        meaning: what the kernel did.
        fix: what usually repairs it.
        check: the group it belongs to, one of `GROUPS`.
    """

    name: str
    severity: str
    check: str
    meaning: str
    fix: str


_TABLE = (
    # --- initialisation
    ("uninitialised_smem", ERROR, "initialisation",
     "shared memory is read that no access has written",
     "wait for the copy that fills it, or write it first; check offsets and byte counts"),
    ("uninitialised_tmem", ERROR, "initialisation",
     "tensor memory is read, or accumulated onto, that was not written since its allocation",
     "switch accumulation off for the first MMA; wait for the MMA's commit; check columns and lanes"),
    ("scale_factors_not_replicated", ERROR, "initialisation",
     "block scale factors differ between the four lane quarters of tensor memory",
     "copy them with tcgen05.cp ...warpx4"),
    # --- allocation
    ("global_read_past_end", ERROR, "allocation",
     "a load goes past the end of a tensor, into the padding that CUDA allocators put there: no fault, but no data",
     "guard the load, or correct the index"),
    ("global_read_past_end_unused", LINT, "allocation",
     "as global_read_past_end, but no store, branch, address or unit has used the value in the lane that read it",
     "nothing, or guard the load"),
    ("uninitialised_smem_unused", LINT, "initialisation",
     "as uninitialised_smem, but no store, branch, address or unit has used the value in the lane that read it",
     "nothing, or guard the load"),
    ("tmem_outside_allocation", ERROR, "allocation",
     "tensor-memory columns are used that are not allocated",
     "allocate more columns, or correct the column offset"),
    ("tmem_after_free", ERROR, "allocation",
     "tensor-memory columns are used after tcgen05.dealloc",
     "deallocate after the last load has been waited for, after a barrier"),
    ("tmem_lane_quarter", LINT, "allocation",
     "a warp names tensor-memory lanes outside its quarter 32 * (warp % 4); hardware gives it its own",
     "add the warp's quarter to the lane part of the address"),
    ("tmem_leak", ERROR, "allocation",
     "a CTA exits with tensor memory allocated: the next CTA on that SM waits for ever",
     "tcgen05.dealloc by the allocating warp, on every path"),
    ("async_write_after_exit", ERROR, "pending",
     "a CTA exits while an asynchronous copy into its shared memory is in flight",
     "wait on the copy's mbarrier before the CTA ends"),
    ("async_read_after_exit", LINT, "pending",
     "a CTA exits while a bulk store still reads its shared memory",
     "cp.async.bulk.wait_group.read 0 before the CTA ends"),
    # --- mbarriers
    ("mbarrier_over_arrival", ERROR, "barrier",
     "more arrivals than the phase expects", "correct the count of mbarrier.init, or the arriving threads"),
    ("mbarrier_count_overflow", ERROR, "barrier", "the pending count leaves its range", "lower the count"),
    ("mbarrier_tx_overflow", ERROR, "barrier",
     "the transaction count leaves its range: bytes are expected or delivered that the other side does not know of",
     "make expect_tx equal to the bytes of the copies of one phase"),
    # No thread waits any more: harmless. FlashAttention 4 ends a pipeline by acquiring (and expecting) one more stage.
    ("mbarrier_tx_leftover", LINT, "barrier",
     "a CTA exits while a barrier still expects bytes",
     "make expect_tx equal to the bytes of the copies of one phase"),
    ("mbarrier_tx_unexpected", ERROR, "barrier",
     "a barrier has got bytes that no thread expected: a phase may complete before the data of its copies is there",
     "make expect_tx equal to the bytes of the copies of one phase"),
    ("mbarrier_overwritten", ERROR, "barrier",
     "an ordinary store hit a live mbarrier", "check the layout of shared memory"),
    ("mbarrier_reinit", ERROR, "barrier",
     "mbarrier.init of a live barrier", "mbarrier.inval first, or initialise once"),
    ("mbarrier_reinit_waited", ERROR, "barrier",
     "mbarrier.init of a barrier that warps wait on", "initialise before the first use, followed by a barrier"),
    ("mbarrier_inval_in_use", ERROR, "barrier",
     "mbarrier.inval while warps wait or bytes are outstanding", "wait for the last phase first"),
    ("mbarrier_no_complete", ERROR, "barrier",
     "arrive.noComplete would complete the phase", "use a plain arrive for the last arrival"),
    ("mbarrier_phase_lapped", ERROR, "barrier",
     "a barrier completed the next phase too while a warp still waited for the one before: its parity is ambiguous",
     "let the waiters arrive before the phase after theirs can complete; check the arrival count and the parity"),
    ("mbarrier_parity_range", LINT, "barrier",
     "a wait names a phase parity that is neither 0 nor 1: its lowest bit counts", "wait for the phase number & 1"),
    ("mbarrier_phase_unordered", ERROR, "race",
     "a phase of an mbarrier can complete before a warp that waits for the one before has looked: parities repeat",
     "let the phase depend on every warp that waits for the one before: an arrival of its own on the way to it"),
    ("barrier_phase_mixed", ERROR, "race",
     "an arrival at a barrier is not ordered after the phase before and could have been counted there",
     "correct the arrival count; use another barrier for warps that do not wait for each other"),
    ("mbarrier_init_unordered", ERROR, "race",
     "a warp uses an mbarrier whose initialisation is not ordered before",
     "fence.mbarrier_init and a barrier of all threads (of the cluster) after mbarrier.init"),
    ("peer_memory_after_exit", ERROR, "race",
     "shared memory of another CTA is used, and nothing keeps that CTA from having exited",
     "a cluster barrier before the CTA ends, or let it wait for what the others do last"),
    ("barrier_double_arrive", LINT, "barrier",
     "a warp arrives at a named barrier again in one phase: both arrivals count, one may stand for a missing warp",
     "let every warp arrive once a phase"),
    ("cluster_double_arrive", LINT, "barrier",
     "barrier.cluster.arrive again without a wait in between", "one wait per arrive"),
    ("diverged_sync", ERROR, "barrier",
     "a .sync instruction is executed without lanes that its member mask names, or an .aligned one without all lanes",
     "execute it where the whole warp is together, or name in the mask only the lanes that get there"),
    ("lane_outside_mask", ERROR, "barrier",
     "lanes execute a .sync instruction whose member mask does not name them",
     "let the mask name every lane that executes it, or branch around it"),
    ("clc_failed_response", ERROR, "barrier",
     "a warp takes the CTA id out of the response of a cancel request that failed, and never tests whether it did",
     "test is_canceled, and use the id only if it says so"),
    # --- proxies
    ("missing_proxy_fence", ERROR, "proxy",
     "TMA or a tensor core reads shared memory that was written through the generic proxy without fence.proxy.async",
     "fence.proxy.async.shared::cta after the stores, before the barrier that hands the data over"),
    ("missing_proxy_fence_cp_async", LINT, "proxy",
     "as missing_proxy_fence, but the writer was cp.async; shipped kernels do this",
     "fence.proxy.async after waiting for the copies"),
    ("missing_tensormap_fence", ERROR, "proxy",
     "a copy uses a tensor map that was changed in memory without a tensormap proxy fence",
     "fence.proxy.tensormap::generic.release by the writer, .acquire by the user"),
    ("descriptor_modified", ERROR, "proxy",
     "a tensor map changed while a copy that uses it was in flight", "wait for the copy before changing the map"),
    ("tma_store_padding", ERROR, "proxy",
     "a tensor store wrote past the end of the tensor's rows: stores clip at multiples of 16 bytes",
     "make row lengths multiples of 16 bytes, or store the edge with ordinary stores"),
    # --- races
    ("race_shared", ERROR, "race",
     "two accesses to shared memory, at least one a write, that no synchronisation orders",
     "a barrier between them: bar.sync, or an mbarrier that the first signals and the second waits on"),
    ("race_tensor", ERROR, "race",
     "two accesses to tensor memory, at least one a write, that no synchronisation orders",
     "wait for the commit of the MMA before reading; signal the MMA warp before it overwrites"),
    ("race_global", ERROR, "race",
     "two accesses to global memory, at least one a write, that no synchronisation orders",
     "a barrier within the CTA or cluster; between CTAs an atomic, release and acquire at a flag; wait_group (without "
     ".read) before handing on what a bulk store wrote"),
    ("scope_between_devices", ERROR, "race",
     "two devices synchronise by a word of memory, and one of the accesses is weak or of a scope narrower than .sys",
     ".sys scope on both sides (.gpu, the default of atom and red, ends at the device); the same for their fences"),
    ("race_between_devices", ERROR, "race",
     "two devices access a word of memory, at least one writes it, and no synchronisation orders them",
     "release and acquire at a flag with .sys scope, fences included; wait_group (without .read) before the flag"),
    ("missing_alias_fence", ERROR, "race",
     "memory that multimem wrote through a multicast address is read through an ordinary one, ordered after it by a "
     "barrier or a narrow scope alone",
     "fence.proxy.alias between the write and the barrier, or a release and an acquire of .sys scope"),
    ("tmem_product_overlap", ERROR, "race",
     "columns that one tcgen05.mma wrote are used as another's: their accumulators overlap",
     "give every accumulator that is still needed columns of its own; check N and the column offsets"),
    ("race_shared_same_value", LINT, "race",
     "two writes to shared memory that no synchronisation orders leave the same bytes",
     "let one warp write; compilers that copy a value to several warps let all of them store it"),
    ("race_global_same_value", LINT, "race",
     "two writes to global memory that no synchronisation orders leave the same bytes",
     "let one of them write"),
    ("dependent_launch_early", LINT, "race",
     "a programmatic dependent launch touches what the launch before it used, not ordered after griddepcontrol.wait",
     "griddepcontrol.wait by the warp or ahead of a barrier; harmless if other work lies in between"),
    ("missing_proxy_fence_global", LINT, "race",
     "a tensor or bulk copy reads global memory that threads of this launch wrote, without a proxy fence in between",
     "fence.proxy.async.global after the stores, before the copy is issued"),
    ("missing_wgmma_wait", ERROR, "race",
     "registers that a wgmma may still be using are accessed (found in the code, on some path)",
     "wgmma.wait_group before the registers are touched"),
    ("missing_wgmma_fence", LINT, "pedantic",
     "registers changed hands between other instructions and wgmma without wgmma.fence (found in the code)",
     "wgmma.fence before the first wgmma and after touching its registers"),
    ("missing_tcgen05_fence", LINT, "pedantic",
     "tensor memory that another thread's instruction used is used again after a barrier without tcgen05.fence",
     "tcgen05.fence::before_thread_sync before the barrier (a commit implies it), ::after_thread_sync after it"),
    ("tcgen05_ld_used_early", LINT, "code",
     "a register that tcgen05.ld fills is used before tcgen05.wait::ld (found in the code); the assembler waits",
     "tcgen05.wait::ld before the first use"),
    ("missing_proxy_fence_overwrite", LINT, "pedantic",
     "an asynchronous copy overwrites shared memory that threads wrote, without fence.proxy.async in between",
     "fence.proxy.async after the last store, before the barrier that frees the buffer"),
    ("uninitialised_register", LINT, "code",
     "a store, a branch or an address depends on a register that nothing has set on any path (found in the code)",
     "set it; compilers leave registers unset only where the value does not matter"),
    ("missing_warp_sync", LINT, "lanes",
     "lanes of a warp exchange data through shared memory without synchronising, or one arrives at an mbarrier for "
     "the others",
     "bar.warp.sync (__syncwarp) between the accesses, or before the arrival: lanes need not run in step"),
    ("race_through_completion", LINT, "race",
     "two accesses are ordered only through a tcgen05.commit or the completion of a copy, which by the PTX ISA publish "
     "nothing but their own effects; shipped kernels rely on more",
     "let the waiting warps synchronise with the writer itself"),
    ("missing_tcgen05_wait", ERROR, "race",
     "tensor memory is touched again although tcgen05.ld or .st of it has not been waited for",
     "tcgen05.wait::ld or tcgen05.wait::st before signalling or issuing the next access"),
    ("missing_bulk_wait", ERROR, "race",
     "shared memory is overwritten while a bulk store may still read it",
     "cp.async.bulk.commit_group and wait_group.read before the buffer is written again"),
    ("missing_cp_async_wait", ERROR, "race",
     "shared memory that cp.async fills is used before the copy was waited for",
     "cp.async.wait_group (and a barrier, for the data of other threads)"),
)  # fmt: skip

KINDS: dict[str, Kind] = {row[0]: Kind(*row) for row in _TABLE}


def severity(kind: str) -> str:
    """Look up ERROR or LINT; a kind that is not listed is an error."""
    return KINDS[kind].severity if kind in KINDS else ERROR
