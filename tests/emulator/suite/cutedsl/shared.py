"""Faults around shared memory in CuTeDSL: races, copies, proxies, clusters."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from tests.emulator.suite.cutedsl.common import barriers, count, fault, fetch, look, put, raise_flag, send, shared, take


@fault("race_shared")
@cute.kernel
def reads_before_the_barrier(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]  #!
    if const_expr(fixed):
        cute.arch.barrier()
    out[t] = s[t ^ 32]  #!


@fault("race_shared")
@cute.kernel
def overwrites_what_is_still_read(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    value = x[t]
    for _ in cutlass.range(3, unroll=1):
        s[t] = value  #!
        cute.arch.sync_threads()
        value = value + s[t ^ 32]  #!
        if const_expr(fixed):
            cute.arch.sync_threads()
    out[t] = value


@fault("race_shared")
@cute.kernel
def two_writers(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, step = shared(64), 1 if const_expr(fixed) else 0
    if t % 32 == 0:
        s[step * t] = t + 1  #!


@fault("race_shared_same_value")
@cute.kernel
def two_writers_of_one_value(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, step = shared(64), 1 if const_expr(fixed) else 0
    if t % 32 == 0:
        s[step * t] = 7  #!


@fault("race_shared", threads=96)
@cute.kernel
def a_named_barrier_without_one_reader(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(96)
    s[t] = x[t]  #!
    if const_expr(fixed):
        pipeline.NamedBarrier(barrier_id=1, num_threads=96).arrive_and_wait()
    elif t < 64:
        pipeline.NamedBarrier(barrier_id=1, num_threads=64).arrive_and_wait()
    out[t] = s[0]  #!


@fault("race_shared")
@cute.kernel
def vectors_that_overlap(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(256)
    mine = cute.make_rmem_tensor(4, Int32)
    mine.fill(t)
    rows = cute.zipped_divide(s, (4,))
    cute.autovec_copy(mine, rows[None, t])  #!
    if const_expr(fixed):
        cute.arch.barrier()
    out[t] = s[4 * (t ^ 32) + 3]  #!


@fault("race_shared")
@cute.kernel
def floats_are_added_without_a_barrier(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(1, kind=Float32)
    if t == 0:
        s[0] = Float32(0)
    cute.arch.barrier()
    count(s)  #!
    if const_expr(fixed):
        cute.arch.barrier()
    out[t] = Int32(s[0])  #!


@fault("race_shared")
@cute.kernel
def a_flag_that_does_not_release(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(33)
    if t == 0:
        s[32] = 0
    cute.arch.barrier()
    if t < 32:
        s[t] = t  #!
        cute.arch.sync_warp()
        if t == 0:
            raise_flag(s.iterator + 32, "release" if const_expr(fixed) else "relaxed", "cta")
    else:
        flag = Int32(0)
        while flag == 0:
            flag = look(s.iterator + 32, "acquire", "cta")
        out[t] = s[t - 32]  #!


@fault("uninitialised_smem")
@cute.kernel
def reads_what_nothing_wrote(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    if t < (64 if const_expr(fixed) else 32):
        s[t] = x[t]
    cute.arch.barrier()
    out[t] = s[t ^ 32]  #!


@fault("uninitialised_smem")
@cute.kernel
def counts_in_a_word_that_nothing_set(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(1)
    if const_expr(fixed):
        if t == 0:
            s[0] = 0
        cute.arch.barrier()
    out[t] = count(s)  #!


# --- copies


@fault("missing_cp_async_wait")
@cute.kernel
def cp_async_that_is_not_waited_for(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Int32, num_bits_per_copy=32)
    cute.copy(atom, cute.local_tile(x, (1,), (t,)), cute.local_tile(s, (1,), (t,)))  #!
    cute.arch.cp_async_commit_group()
    if const_expr(fixed):
        cute.arch.cp_async_wait_group(0)
    out[t] = s[t]  #!
    cute.arch.cp_async_wait_group(0)


@fault("missing_cp_async_wait")
@cute.kernel
def one_stage_too_many_of_cp_async(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(128)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Int32, num_bits_per_copy=32)
    for i in cutlass.range_constexpr(2):
        cute.copy(atom, cute.local_tile(x, (1,), (64 * i + t,)), cute.local_tile(s, (1,), (64 * i + t,)))  #!
        cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0 if const_expr(fixed) else 1)
    out[t] = s[64 + t]  #!
    cute.arch.cp_async_wait_group(0)


@fault("race_shared|missing_cp_async_wait")
@cute.kernel
def cp_async_of_another_warp(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Int32, num_bits_per_copy=32)
    cute.copy(atom, cute.local_tile(x, (1,), (t,)), cute.local_tile(s, (1,), (t,)))  #!
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    if const_expr(fixed):
        cute.arch.barrier()
    out[t] = s[t ^ 32]  #!


@fault("race_shared")
@cute.kernel
def a_bulk_copy_that_is_not_waited_for(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, full = shared(64), barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.barrier()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, 256)
        fetch(s, x, 0, 64, full)  #!
    if const_expr(fixed):
        cute.arch.mbarrier_wait(full, 0)
    out[t] = s[t]  #!
    cute.arch.mbarrier_wait(full, 0)


@fault("race_shared")
@cute.kernel
def a_wait_for_the_phase_before(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, full = shared(64), barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.barrier()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, 256)
        fetch(s, x, 0, 64, full)  #!
    cute.arch.mbarrier_wait(full, 0 if const_expr(fixed) else 1)
    out[t] = s[t]  #!
    cute.arch.mbarrier_wait(full, 0)


@fault("race_shared", tma="load")
@cute.kernel
def a_tensor_copy_that_is_not_waited_for(
    x: cute.Tensor, out: cute.Tensor, fixed: Constexpr, atom: cute.CopyAtom, tensor: cute.Tensor
):
    t = cute.arch.thread_idx()[0]
    s, full = shared(8, 8), barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.barrier()
    tiles = cute.local_tile(tensor, (8, 8), (0, 0))
    sB, gB = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    if t < 32:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 256)
        cute.copy(atom, gB, sB, tma_bar_ptr=full)  #!
    if const_expr(fixed):
        cute.arch.mbarrier_wait(full, 0)
    out[t] = s[t % 8, t // 8]  #!
    cute.arch.mbarrier_wait(full, 0)


@fault("race_shared", schedules=("round_robin",))
@cute.kernel
def a_stage_is_filled_before_it_is_released(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, ring = shared(64), barriers(2)
    if t == 0:
        cute.arch.mbarrier_init(ring, 1)
        cute.arch.mbarrier_init(ring + 1, 64)
    cute.arch.barrier()
    total = Int32(0)
    for i in cutlass.range_constexpr(2):
        if t == 0:
            if const_expr(fixed):
                cute.arch.mbarrier_wait(ring + 1, i ^ 1)
            cute.arch.mbarrier_arrive_and_expect_tx(ring, 256)
            fetch(s, x, 64 * i, 64, ring)  #!
        cute.arch.mbarrier_wait(ring, i)
        total = total + s[t ^ 32]  #!
        cute.arch.mbarrier_arrive(ring + 1)
    out[t] = total


@fault("race_shared", schedules=("round_robin", "oldest_first", "adversarial"))
@cute.kernel
def a_consumer_that_releases_before_it_reads(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    """A pipeline between two warps with one stage, three times."""
    t = cute.arch.thread_idx()[0]
    s, ring = shared(32), barriers(2)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread, 32)
    producer, consumer = pipeline.PipelineAsync.create(
        num_stages=1, producer_group=one, consumer_group=one, barrier_storage=ring
    ).make_participants()
    if t < 32:
        for i in cutlass.range(3, unroll=1):
            stage = producer.acquire_and_advance()
            s[t] = x[t + 32 * i]  #!
            stage.commit()
    else:
        for i in cutlass.range(3, unroll=1):
            stage = consumer.wait_and_advance()
            if const_expr(not fixed):
                stage.release()
            out[32 * i + t] = s[t - 32]  #!
            if const_expr(fixed):
                stage.release()


@fault("race_shared")
@cute.kernel
def a_producer_that_commits_before_it_stores(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, ring = shared(32), barriers(2)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread, 32)
    producer, consumer = pipeline.PipelineAsync.create(
        num_stages=1, producer_group=one, consumer_group=one, barrier_storage=ring
    ).make_participants()
    if t < 32:
        stage = producer.acquire_and_advance()
        if const_expr(not fixed):
            stage.commit()
        s[t] = x[t]  #!
        if const_expr(fixed):
            stage.commit()
    else:
        filled = consumer.wait_and_advance()
        out[t] = s[t - 32]  #!
        filled.release()


@fault("race_shared", tma="load")
@cute.kernel
def a_consumer_that_does_not_wait_for_tma(
    x: cute.Tensor, out: cute.Tensor, fixed: Constexpr, atom: cute.CopyAtom, tensor: cute.Tensor
):
    """`PipelineTmaAsync`, of which the consumer takes the stage without waiting."""
    t = cute.arch.thread_idx()[0]
    s, ring = shared(8, 8), barriers(2)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    producer, consumer = pipeline.PipelineTmaAsync.create(
        num_stages=1, producer_group=one, consumer_group=one, tx_count=256, barrier_storage=ring
    ).make_participants()
    tiles = cute.local_tile(tensor, (8, 8), (0, 0))
    sB, gB = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    if t < 32:
        stage = producer.acquire_and_advance()
        cute.copy(atom, gB, sB, tma_bar_ptr=stage.barrier)  #!
        producer.tail()
    else:
        if const_expr(fixed):
            consumer.wait()
        out[t] = s[t % 8, t // 8]  #!
        filled = consumer.wait_and_advance()
        filled.release()


@fault("missing_bulk_wait")
@cute.kernel
def a_bulk_store_still_reads(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()
    if t == 0:
        send(out, s, 0, 64)  #!
        if const_expr(fixed):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        s[0] = 5  #!
        cute.arch.cp_async_bulk_wait_group(0)


@fault("missing_bulk_wait")
@cute.kernel
def one_bulk_store_too_many_may_be_pending(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()
    if t == 0:
        send(out, s, 0, 32)
        send(out, s, 32, 32)  #!
        cute.arch.cp_async_bulk_wait_group(0 if const_expr(fixed) else 1, read=True)
        s[32] = 5  #!
        cute.arch.cp_async_bulk_wait_group(0)


@fault("missing_proxy_fence")
@cute.kernel
def no_proxy_fence_before_a_bulk_store(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]  #!
    if const_expr(fixed):
        cute.arch.fence_view_async_shared()
    cute.arch.barrier()
    if t == 0:
        send(out, s, 0, 64)  #!
        cute.arch.cp_async_bulk_wait_group(0)


@fault("missing_proxy_fence")
@cute.kernel
def a_proxy_fence_before_the_store(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    if const_expr(not fixed):
        cute.arch.fence_view_async_shared()
    s[t] = x[t]  #!
    if const_expr(fixed):
        cute.arch.fence_view_async_shared()
    cute.arch.barrier()
    if t == 0:
        send(out, s, 0, 64)  #!
        cute.arch.cp_async_bulk_wait_group(0)


@fault("missing_proxy_fence")
@cute.kernel
def a_proxy_fence_of_the_wrong_space(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]  #!
    if const_expr(fixed):
        cute.arch.fence_proxy("async.shared", space="cta")
    else:
        cute.arch.fence_proxy("async.global")
    cute.arch.barrier()
    if t == 0:
        send(out, s, 0, 64, add=True)  #!
        cute.arch.cp_async_bulk_wait_group(0)


@fault("missing_proxy_fence", tma="store")
@cute.kernel
def no_proxy_fence_before_a_tensor_store(
    x: cute.Tensor, out: cute.Tensor, fixed: Constexpr, atom: cute.CopyAtom, tensor: cute.Tensor
):
    t = cute.arch.thread_idx()[0]
    s = shared(8, 8)
    s[t % 8, t // 8] = x[t]  #!
    if const_expr(fixed):
        cute.arch.fence_proxy("async.shared", space="cta")
    else:
        cute.arch.fence_acq_rel_cta()
    cute.arch.barrier()
    tiles = cute.local_tile(tensor, (8, 8), (0, 0))
    sB, gB = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    if t < 32:
        cute.copy(atom, sB, gB)  #!
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@fault("missing_proxy_fence_cp_async")
@cute.kernel
def no_proxy_fence_after_cp_async(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Int32, num_bits_per_copy=32)
    cute.copy(atom, cute.local_tile(x, (1,), (t,)), cute.local_tile(s, (1,), (t,)))  #!
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    if const_expr(fixed):
        cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()
    if t == 0:
        send(out, s, 0, 64)  #!
        cute.arch.cp_async_bulk_wait_group(0)


@fault("async_write_after_exit")
@cute.kernel
def an_exit_while_a_copy_is_on_its_way(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, full = shared(64), barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.barrier()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, 256)
        fetch(s, x, 0, 64, full)  #!
        if const_expr(fixed):
            cute.arch.mbarrier_wait(full, 0)


@fault("async_read_after_exit", schedules=("adversarial",))
@cute.kernel
def an_exit_while_a_bulk_store_reads(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]
    cute.arch.fence_view_async_shared()
    cute.arch.barrier()
    if t == 0:
        send(out, s, 0, 64)  #!
        if const_expr(fixed):
            cute.arch.cp_async_bulk_wait_group(0, read=True)


# --- clusters


@fault("race_shared", threads=32, grid=2, cluster=2)
@cute.kernel
def a_store_to_a_peer_before_the_cluster_barrier(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
    s = shared(32)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    put(s, t, rank ^ 1, t)  #!
    if const_expr(fixed):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    out[t + 32 * rank] = s[t]  #!
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@fault("race_shared", threads=32, grid=2, cluster=2)
@cute.kernel
def a_barrier_of_the_cta_where_the_clusters_is_needed(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
    s = shared(32)
    s[t] = x[t]  #!
    if const_expr(fixed):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    out[t + 32 * rank] = take(s, t, rank ^ 1)  #!
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@fault("race_shared", threads=32, grid=2, cluster=2)
@cute.kernel
def a_cluster_barrier_that_does_not_release(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
    s = shared(32)
    s[t] = x[t]  #!
    if const_expr(fixed):
        cute.arch.cluster_arrive()
    else:
        cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    out[t + 32 * rank] = take(s, t, rank ^ 1)  #!
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@fault("race_shared", threads=32, grid=2, cluster=2)
@cute.kernel
def st_async_that_is_not_waited_for(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
    s, full = shared(1), barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, 4)
        cute.arch.store_async_dsmem(s.iterator, t, full, rank ^ 1)  #!
    if const_expr(fixed):
        cute.arch.mbarrier_wait(full, 0)
    out[t + 32 * rank] = s[0]  #!
    cute.arch.mbarrier_wait(full, 0)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@fault("peer_memory_after_exit", threads=32, grid=2, cluster=2)
@cute.kernel
def a_load_from_a_peer_that_has_exited(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
    s = shared(32)
    s[t] = x[t]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    out[t + 32 * rank] = take(s, t, rank ^ 1)  #!
    if const_expr(fixed):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
