"""Faults around barriers, mbarriers and lanes of a warp in CuTeDSL."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr, pipeline

from tests.emulator.suite.cutedsl.common import FLAG, barriers, fault, fetch, look, shared


@fault("HazardError|Deadlock")
@cute.kernel
def a_barrier_in_a_divergent_branch(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    bound = 64 if const_expr(fixed) else 40
    if t < bound:
        cute.arch.barrier()  #!
        out[t] = 1
    else:
        cute.arch.barrier()  #!
        out[t] = 2


@fault("Deadlock")
@cute.kernel
def a_named_barrier_that_a_warp_never_reaches(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    bound = 64 if const_expr(fixed) else 32
    if t < bound:
        cute.arch.barrier(barrier_id=1, number_of_threads=64)  #!


@fault("barrier_phase_mixed", threads=128)
@cute.kernel
def a_named_barrier_of_half_the_warps(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    cute.arch.barrier(barrier_id=1, number_of_threads=128 if const_expr(fixed) else 64)  #!


@fault("barrier_phase_mixed", threads=128)
@cute.kernel
def one_named_barrier_for_two_groups(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    if t < 64:
        cute.arch.barrier(barrier_id=1, number_of_threads=64)  #!
    else:
        cute.arch.barrier(barrier_id=2 if const_expr(fixed) else 1, number_of_threads=64)  #!


@fault("barrier_double_arrive")
@cute.kernel
def a_warp_arrives_twice(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    expected = 64 if const_expr(fixed) else 96
    if t < 32:
        cute.arch.barrier_arrive(barrier_id=1, number_of_threads=expected)  #!
        if const_expr(not fixed):
            cute.arch.barrier_arrive(barrier_id=1, number_of_threads=expected)  #!
    else:
        cute.arch.barrier(barrier_id=1, number_of_threads=expected)


@fault("HazardError")
@cute.kernel
def warps_that_name_different_counts(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    if t < 32:
        cute.arch.barrier(barrier_id=1, number_of_threads=64 if const_expr(fixed) else 96)  #!
    else:
        cute.arch.barrier(barrier_id=1, number_of_threads=64)  #!


@fault("cluster_double_arrive", grid=2, cluster=2)
@cute.kernel
def two_arrivals_at_the_cluster_barrier(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    cute.arch.cluster_arrive()
    if const_expr(not fixed):
        cute.arch.cluster_arrive()  #!
    cute.arch.cluster_wait()


@fault("HazardError", grid=2, cluster=2)
@cute.kernel
def a_wait_at_the_cluster_barrier_alone(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    if const_expr(fixed):
        cute.arch.cluster_arrive()
    cute.arch.cluster_wait()  #!


# --- mbarriers


@fault("mbarrier_init_unordered|HazardError|EmulatorError", schedules=("round_robin",))
@cute.kernel
def a_barrier_that_is_used_before_it_is_there(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    ready = barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(ready, 64)  #!
    if const_expr(fixed):
        cute.arch.barrier()
    cute.arch.mbarrier_arrive(ready)  #!
    cute.arch.mbarrier_wait(ready, 0)  #!


@fault("Deadlock")
@cute.kernel
def more_arrivals_expected_than_come(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    ready = barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(ready, 64 if const_expr(fixed) else 65)
    cute.arch.barrier()
    cute.arch.mbarrier_arrive(ready)
    cute.arch.mbarrier_wait(ready, 0)  #!


@fault("barrier_phase_mixed|mbarrier_over_arrival")
@cute.kernel
def fewer_arrivals_expected_than_come(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    ready = barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(ready, 2 if const_expr(fixed) else 1)
    cute.arch.barrier()
    if t % 32 == 0:
        cute.arch.mbarrier_arrive(ready)  #!


@fault("mbarrier_over_arrival")
@cute.kernel
def one_arrival_too_many(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    ready = barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(ready, 64)
    cute.arch.barrier()
    if t == 0:
        cute.arch.mbarrier_arrive(ready, arrive_count=64 if const_expr(fixed) else 65)  #!


@fault("mbarrier_tx_leftover|Deadlock")
@cute.kernel
def bytes_that_nothing_brings(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, full = shared(64), barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.barrier()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, 256 if const_expr(fixed) else 260)
        fetch(s, x, 0, 64, full)
    cute.arch.mbarrier_wait(full, 0)  #!


@fault("mbarrier_tx_overflow")
@cute.kernel
def a_transaction_count_that_overflows(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    full = barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_expect_tx(full, 1048575)  #!
        cute.arch.mbarrier_expect_tx(full, 0 if const_expr(fixed) else 1048575)  #!
        more = 0 if const_expr(fixed) else 1048575
        for size in cutlass.range_constexpr(2):
            cute.arch.inline_ptx(
                "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [{$r0}], {$r1};",
                read_only_args=[full.toint(), Int32(more if size else 1048575)],
            )


@fault("mbarrier_overwritten")
@cute.kernel
def a_store_over_a_barrier(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    words, place = shared(4), 2 if const_expr(fixed) else 0
    ready = cute.recast_ptr(words.iterator, dtype=cutlass.Int64)
    if t == 0:
        cute.arch.mbarrier_init(ready, 64)
    cute.arch.barrier()
    if t == 0:
        words[place] = 0  #!
    cute.arch.mbarrier_arrive(ready)  #!


@fault("mbarrier_reinit")
@cute.kernel
def a_barrier_that_is_initialised_twice(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    ready = barriers(2)
    if t == 0:
        cute.arch.mbarrier_init(ready, 64)
        cute.arch.mbarrier_init(ready + (1 if const_expr(fixed) else 0), 32)  #!


@fault("mbarrier_parity_range")
@cute.kernel
def a_phase_number_for_a_parity(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    ready = barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(ready, 64)
    cute.arch.barrier()
    out[t] = Int32(cute.arch.mbarrier_test_wait(ready, x[0 if const_expr(fixed) else 2]))  #!


@fault("mbarrier_phase_unordered|mbarrier_phase_lapped|Deadlock")
@cute.kernel
def the_next_phase_without_the_waiting_warp(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    ring = barriers(2)
    if t == 0:
        cute.arch.mbarrier_init(ring, 1)
        cute.arch.mbarrier_init(ring + 1, 32)
    cute.arch.barrier()
    if t == 0:
        cute.arch.mbarrier_arrive(ring)
        if const_expr(fixed):
            cute.arch.mbarrier_wait(ring + 1, 0)
        cute.arch.mbarrier_arrive(ring)
    elif t >= 32:
        cute.arch.mbarrier_wait(ring, 0)  #!
        cute.arch.mbarrier_arrive(ring + 1)
        cute.arch.mbarrier_wait(ring, 1)


@fault("mbarrier_init_unordered", threads=32, grid=2, cluster=2)
@cute.kernel
def no_fence_before_a_peer_arrives(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
    ready = barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(ready, 1)  #!
    if const_expr(fixed):
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    if t == 0:
        cute.arch.mbarrier_arrive(ready, rank ^ 1)  #!
    cute.arch.mbarrier_wait(ready, 0)


@fault("peer_memory_after_exit", threads=32, grid=2, cluster=2)
@cute.kernel
def an_arrival_at_a_peer_that_has_exited(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
    ready = barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(ready, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if t == 0:
        cute.arch.mbarrier_arrive(ready, rank ^ 1)  #!
    if const_expr(fixed):
        cute.arch.mbarrier_wait(ready, 0)


@fault("Deadlock", schedules=("round_robin", "oldest_first"))
@cute.kernel
def a_pipeline_whose_consumer_never_releases(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, ring = shared(32), barriers(2)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread, 32)
    producer, consumer = pipeline.PipelineAsync.create(
        num_stages=1, producer_group=one, consumer_group=one, barrier_storage=ring
    ).make_participants()
    if t < 32:
        for i in cutlass.range(2, unroll=1):
            stage = producer.acquire_and_advance()  #!
            s[t] = x[t + 32 * i]
            stage.commit()
    else:
        for i in cutlass.range(2, unroll=1):
            filled = consumer.wait_and_advance()  #!
            out[32 * i + t] = s[t - 32]
            if const_expr(fixed):
                filled.release()


# --- lanes


@fault("missing_warp_sync")
@cute.kernel
def a_lane_reads_what_another_wrote(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]  #!
    if const_expr(fixed):
        cute.arch.sync_warp()
    out[t] = s[t ^ 1]  #!


@fault("missing_warp_sync")
@cute.kernel
def a_lane_overwrites_what_another_reads(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]
    cute.arch.sync_warp()
    value = s[t ^ 1]  #!
    if const_expr(fixed):
        cute.arch.sync_warp()
    s[t] = value + 1  #!
    cute.arch.sync_warp()
    out[t] = s[t]


@fault("missing_warp_sync")
@cute.kernel
def a_warp_barrier_of_half_the_lanes(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]  #!
    mask = Int32(-1)
    if const_expr(not fixed):
        mask = Int32(0xFFFF) << (t & 16)
    cute.arch.sync_warp(mask)
    out[t] = s[t ^ 16]  #!


@fault("diverged_sync")
@cute.kernel
def a_shuffle_in_a_branch(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    mask = 0xFFFF if const_expr(fixed) else 0xFFFFFFFF
    if t % 32 < 16:
        out[t] = cute.arch.shuffle_sync_bfly(x[t], offset=1, mask=mask)  #!
    if const_expr(not fixed):
        cute.arch.sync_warp()


@fault("lane_outside_mask")
@cute.kernel
def a_shuffle_outside_the_mask(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    mask = 0xFFFFFFFF if const_expr(fixed) else 0xFFFF
    out[t] = cute.arch.shuffle_sync_bfly(x[t], offset=1, mask=mask)  #!


@fault("lane_outside_mask")
@cute.kernel
def a_vote_outside_the_mask(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    mask = 0xFFFFFFFF if const_expr(fixed) else 0x7FFFFFFF
    out[t] = cute.arch.vote_ballot_sync(x[t] > 5, mask)  #!


@fault("lane_outside_mask")
@cute.kernel
def a_reduction_outside_the_mask(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    out[t] = cute.arch.warp_redux_sync(x[t], "add", 0xFFFFFFFF if const_expr(fixed) else 0xFFFF0000)  #!


@fault("lane_outside_mask|HazardError")
@cute.kernel
def a_warp_barrier_outside_the_mask(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    cute.arch.sync_warp(0xFFFFFFFF if const_expr(fixed) else 0xFFFF)  #!


@fault("Deadlock", threads=32, schedules=("round_robin",))
@cute.kernel
def a_flag_that_no_thread_raises(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    flag, awaited = Int32(2), 0 if const_expr(fixed) else 1
    while flag != awaited:  #!
        flag = look(x.iterator + FLAG, "acquire", "gpu")
