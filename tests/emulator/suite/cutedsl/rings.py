"""Faults of pipelines in CuTeDSL: stages, counts of consumers, states, and accumulators that go around."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from dsv4lib.dsl import umma
from tests.emulator.suite.cutedsl.common import barriers, fault, shared
from tests.emulator.suite.cutedsl.tensor import INSTRUCTION, OPERAND, allocate, quarter, release, take

THREADS = pipeline.Agent.Thread


@fault("race_shared")
@cute.kernel
def a_ring_of_more_stages_than_buffers(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, stages = shared(32, 2), 2 if const_expr(fixed) else 3
    one = pipeline.CooperativeGroup(THREADS, 32)
    producer, consumer = pipeline.PipelineAsync.create(
        num_stages=stages, producer_group=one, consumer_group=one, barrier_storage=barriers(2 * stages)
    ).make_participants()
    if t < 32:
        for i in cutlass.range(6, unroll=1):
            stage = producer.acquire_and_advance()
            s[t, i % 2] = x[t + 32 * i]  #!
            stage.commit()
    else:
        for i in cutlass.range(6, unroll=1):
            filled = consumer.wait_and_advance()
            out[32 * i + t] = s[t - 32, i % 2]  #!
            filled.release()


@fault("barrier_phase_mixed|mbarrier_phase_lapped|mbarrier_over_arrival", threads=96)
@cute.kernel
def a_ring_whose_consumers_are_counted_too_low(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    """Two warps release a stage for which one is expected."""
    t = cute.arch.thread_idx()[0]
    s = shared(32)
    producer, consumer = pipeline.PipelineAsync.create(
        num_stages=1,
        producer_group=pipeline.CooperativeGroup(THREADS, 32),
        consumer_group=pipeline.CooperativeGroup(THREADS, 64 if const_expr(fixed) else 32),
        barrier_storage=barriers(2),
    ).make_participants()
    if t < 32:
        for i in cutlass.range(3, unroll=1):
            stage = producer.acquire_and_advance()  #!
            s[t] = x[t + 32 * i]
            stage.commit()
    else:
        for i in cutlass.range(3, unroll=1):
            filled = consumer.wait_and_advance()  #!
            out[64 * i + t] = s[t % 32]
            filled.release()  #!


@fault("race_shared|uninitialised_smem|Deadlock")
@cute.kernel
def a_consumer_in_the_phase_of_a_producer(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(32, 2)
    one = pipeline.CooperativeGroup(THREADS, 32)
    ring = pipeline.PipelineAsync.create(
        num_stages=2, producer_group=one, consumer_group=one, barrier_storage=barriers(4)
    )
    user = pipeline.PipelineUserType.Consumer if const_expr(fixed) else pipeline.PipelineUserType.Producer
    if t < 32:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 2)
        for i in cutlass.range(2, unroll=1):
            ring.producer_acquire(state)  #!
            s[t, state.index] = x[t + 32 * i]  #!
            ring.producer_commit(state)
            state.advance()
    else:
        state = pipeline.make_pipeline_state(user, 2)
        for i in cutlass.range(2, unroll=1):
            ring.consumer_wait(state)  #!
            out[32 * i + t] = s[t - 32, state.index]  #!
            ring.consumer_release(state)
            state.advance()


@fault("async_write_after_exit", tma="load")
@cute.kernel
def a_consumer_that_leaves_the_last_stage(
    x: cute.Tensor, out: cute.Tensor, fixed: Constexpr, atom: cute.CopyAtom, tensor: cute.Tensor
):
    """Two tiles are fetched, and nothing waits for the second."""
    t = cute.arch.thread_idx()[0]
    s = shared(8, 8, 2)
    one = pipeline.CooperativeGroup(THREADS)
    producer, consumer = pipeline.PipelineTmaAsync.create(
        num_stages=2, producer_group=one, consumer_group=one, tx_count=256, barrier_storage=barriers(4)
    ).make_participants()
    tiles = cute.local_tile(tensor, (8, 8), (0, 0))
    sB, gB = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    if t < 32:
        for _ in cutlass.range(2, unroll=1):
            stage = producer.acquire_and_advance()
            cute.copy(atom, gB, sB[None, stage.index], tma_bar_ptr=stage.barrier)  #!
    else:
        for i in cutlass.range(2 if const_expr(fixed) else 1, unroll=1):
            filled = consumer.wait_and_advance()
            out[32 * i + t] = s[t % 8, (t - 32) // 8, filled.index]
            filled.release()


def accumulators(stages: int) -> tuple:
    """Make a pipeline of accumulators from warp 4 to the other four."""
    return pipeline.PipelineUmmaAsync.create(
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(THREADS),
        consumer_group=pipeline.CooperativeGroup(THREADS, 128),
        barrier_storage=barriers(2 * stages),
    ).make_participants()


@cute.jit
def operands(t: Int32) -> Int64:
    """Fill 128 rows of both operands with zeros by the first four warps: their descriptor."""
    s = shared(1024, align=1024)
    if t < 128:
        for i in cutlass.range_constexpr(8):
            s[128 * i + t] = 0
    cute.arch.fence_view_async_shared()
    cute.arch.barrier()
    return umma.at(OPERAND, s.iterator.toint())


@fault("missing_tcgen05_wait|race_tensor", threads=160)
@cute.kernel
def an_epilogue_that_releases_before_its_loads_are_done(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(160)
    operand = operands(t)
    producer, consumer = accumulators(1)
    if t >= 128:
        for _ in cutlass.range(2, unroll=1):
            stage = producer.acquire_and_advance()
            if t == 128:
                umma.mma(address.toint(), operand, operand, INSTRUCTION, False)  #!
            stage.commit()
    else:
        for i in cutlass.range(2, unroll=1):
            filled = consumer.wait_and_advance()
            value = take(quarter(address, t))  #!
            if const_expr(not fixed):
                filled.release()
            cute.arch.fence_view_async_tmem_load()
            out[128 * i + t] = value
            if const_expr(fixed):
                filled.release()
    release(made, address)


@fault("race_tensor|tmem_product_overlap", threads=160)
@cute.kernel
def accumulators_of_two_stages_that_overlap(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(160)
    operand, apart = operands(t), 64 if const_expr(fixed) else 32
    producer, consumer = accumulators(2)
    if t >= 128:
        for i in cutlass.range(4, unroll=1):
            stage = producer.acquire_and_advance()
            if t == 128:
                umma.mma(address.toint() + apart * (i % 2), operand, operand, INSTRUCTION, False)  #!
            stage.commit()
    else:
        for i in cutlass.range(4, unroll=1):
            filled = consumer.wait_and_advance()
            value = take(quarter(address, t, 48) + apart * (i % 2))  #!
            cute.arch.fence_view_async_tmem_load()
            out[128 * i + t] = value
            filled.release()
    release(made, address)
