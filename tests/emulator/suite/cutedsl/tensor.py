"""Faults around tensor memory, tcgen05 and wgmma in CuTeDSL. Operands are zeros in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import tcgen05, warpgroup

from dsv4lib.dsl import umma
from tests.emulator.suite.cutedsl.common import barriers, fault, shared

COLUMNS = 256
INSTRUCTION = umma.instruction_descriptor(128, 64, "fp16")
OPERAND = 128 >> 4 << 16 | 256 >> 4 << 32 | 1 << 46  # rows of 16 bytes in groups of 8, no swizzle


def allocate(threads: int = 64) -> tuple:
    """Allocate tensor memory by warp 0: the allocator and the address."""
    made = cutlass.memory.TmemAllocator(
        shared(1).iterator, barrier_for_retrieve=pipeline.NamedBarrier(3, threads), allocator_warp_id=0
    )
    made.allocate(COLUMNS)
    made.wait_for_alloc()
    return made, made.retrieve_ptr(Float32)


def release(made: cutlass.memory.TmemAllocator, address: cute.Pointer) -> None:
    """Free it when all warps are there."""
    cute.arch.barrier()
    made.relinquish_alloc_permit()
    made.free(address)


def quarter(address: cute.Pointer, t: Int32, column: int = 0) -> Int32:
    """Make the address of a column in the warp's lanes."""
    return address.toint() + column + (((t // 32) & 3) << 21)


@cute.jit
def zeros(t: Int32) -> tuple:
    """Fill 128 rows of both operands with zeros: their descriptor and two mbarriers."""
    s, done = shared(1024, align=1024), barriers(2)
    for i in cutlass.range_constexpr(8):
        s[128 * i + t] = 0
    cute.arch.fence_view_async_shared()
    if t == 0:
        cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init(done + 1, 1)
    cute.arch.barrier()
    return umma.at(OPERAND, s.iterator.toint()), done


@cutlass.cutlass_dsl.dsl_user_op
def put(address: Int32, value: Int32, *, loc=None, ip=None) -> None:
    """Store a word of each lane."""
    text = "tcgen05.st.sync.aligned.32x32b.x1.b32 [{$r0}], {{$r1}};"
    cute.arch.inline_ptx(text, read_only_args=[address, value], loc=loc, ip=ip)


@cutlass.cutlass_dsl.dsl_user_op
def take(address: Int32, *, loc=None, ip=None) -> Int32:
    """Load a word of each lane."""
    text = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{$w0}}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[address], loc=loc, ip=ip)


def copy_of(address: cute.Pointer, t: Int32, operation: object) -> tuple:
    """Make a copy of 8 columns of a thread's lane: tiled copy, tensor and coordinates by thread."""
    layout = cute.make_layout((128, 8), stride=(1 << 16, 1))
    tensor = cute.make_tensor(address, layout)
    tiled = tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), tensor)
    return tiled, tensor, tiled.get_slice(t), cute.make_identity_tensor(layout.shape)


@fault("uninitialised_tmem")
@cute.kernel
def tensor_memory_that_nothing_wrote(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate()
    place = quarter(address, t)
    if const_expr(fixed):
        put(place, t)
        cute.arch.fence_view_async_tmem_store()
    value = take(place)  #!
    cute.arch.fence_view_async_tmem_load()
    out[t] = value
    release(made, address)


@fault("tmem_outside_allocation")
@cute.kernel
def a_store_outside_the_allocation(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate()
    put(quarter(address, t, 255 if const_expr(fixed) else 256), t)  #!
    cute.arch.fence_view_async_tmem_store()
    release(made, address)


@fault("tmem_lane_quarter")
@cute.kernel
def a_quarter_of_another_warp(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate()
    put(quarter(address, t) if const_expr(fixed) else address.toint(), t)  #!
    cute.arch.fence_view_async_tmem_store()
    release(made, address)


@fault("tmem_after_free")
@cute.kernel
def a_load_after_free(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate()
    put(quarter(address, t), t)
    cute.arch.fence_view_async_tmem_store()
    if const_expr(not fixed):
        release(made, address)
        cute.arch.barrier()
    value = take(quarter(address, t))  #!
    cute.arch.fence_view_async_tmem_load()
    out[t] = value
    if const_expr(fixed):
        release(made, address)


@fault("tmem_leak", at_end=True)
@cute.kernel
def no_free(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate()
    out[t] = address.toint()
    if const_expr(fixed):
        release(made, address)


@fault("missing_tcgen05_wait")
@cute.kernel
def no_wait_for_a_store_before_a_load(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate()
    put(quarter(address, t), t)  #!
    if const_expr(fixed):
        cute.arch.fence_view_async_tmem_store()
    value = take(quarter(address, t))  #!
    cute.arch.fence_view_async_tmem_load()
    out[t] = value
    cute.arch.fence_view_async_tmem_store()
    release(made, address)


@fault("tcgen05_ld_used_early", threads=128)
@cute.kernel
def a_copy_whose_values_are_used_early(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    """Copies of the DSL, `Ld32x32bOp` and `St32x32bOp`."""
    t = cute.arch.thread_idx()[0]
    made, address = allocate(128)
    tiled, tensor, thread, coordinates = copy_of(address, t, tcgen05.St32x32bOp(tcgen05.Repetition(8)))
    mine = cute.make_rmem_tensor(thread.partition_S(coordinates).shape, Float32)
    mine.fill(Float32(1))
    cute.copy(tiled, mine, thread.partition_D(tensor))
    cute.arch.fence_view_async_tmem_store()
    tiled, tensor, thread, coordinates = copy_of(address, t, tcgen05.Ld32x32bOp(tcgen05.Repetition(8)))
    found = cute.make_rmem_tensor(thread.partition_D(coordinates).shape, Float32)
    cute.copy(tiled, thread.partition_S(tensor), found)  #!
    if const_expr(fixed):
        cute.arch.fence_view_async_tmem_load()
    out[t] = Int32(found[0] + found[5])  #!
    cute.arch.fence_view_async_tmem_load()
    release(made, address)


@fault("race_tensor", threads=160)
@cute.kernel
def two_warps_of_a_quarter(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(160)
    if t < 128:
        put(quarter(address, t), t)  #!
        cute.arch.fence_view_async_tmem_store()
        if const_expr(fixed):
            pipeline.NamedBarrier(1, 160).arrive()
    else:
        if const_expr(fixed):
            pipeline.NamedBarrier(1, 160).arrive_and_wait()
        value = take(quarter(address, t))  #!
        cute.arch.fence_view_async_tmem_load()
        out[t] = value
    release(made, address)


# --- products


@fault("race_tensor", threads=128, schedules=("oldest_first",))
@cute.kernel
def a_load_before_the_product_is_done(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(128)
    operand, done = zeros(t)
    if t == 0:
        umma.mma(address.toint(), operand, operand, INSTRUCTION, False)  #!
        tcgen05.commit(done)
    if const_expr(fixed):
        cute.arch.mbarrier_wait(done, 0)
    value = take(quarter(address, t))  #!
    cute.arch.fence_view_async_tmem_load()
    out[t] = value
    cute.arch.mbarrier_wait(done, 0)
    release(made, address)


@fault("race_tensor", threads=128)
@cute.kernel
def a_product_over_what_is_still_read(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(128)
    operand, done = zeros(t)
    if t == 0:
        umma.mma(address.toint(), operand, operand, INSTRUCTION, False)
        tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    value = take(quarter(address, t))  #!
    cute.arch.fence_view_async_tmem_load()
    out[t] = value
    if const_expr(fixed):
        cute.arch.barrier()
    if t == 0:
        umma.mma(address.toint(), operand, operand, INSTRUCTION, False)  #!
        tcgen05.commit(done + 1)
    cute.arch.mbarrier_wait(done + 1, 0)
    release(made, address)


@fault("uninitialised_tmem", threads=128)
@cute.kernel
def accumulation_from_the_first_product_on(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(128)
    operand, done = zeros(t)
    if t == 0:
        umma.mma(address.toint(), operand, operand, INSTRUCTION, not fixed)  #!
        tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    release(made, address)


@fault("tmem_outside_allocation", threads=128)
@cute.kernel
def a_product_outside_the_allocation(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(128)
    operand, done = zeros(t)
    column = 192 if const_expr(fixed) else 224
    if t == 0:
        umma.mma(address.toint() + column, operand, operand, INSTRUCTION, False)  #!
        tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    release(made, address)


@fault("race_shared", threads=128)
@cute.kernel
def operands_that_are_overwritten_early(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(128)
    operand, done = zeros(t)
    if t == 0:
        umma.mma(address.toint(), operand, operand, INSTRUCTION, False)  #!
        tcgen05.commit(done)
    if const_expr(fixed):
        cute.arch.mbarrier_wait(done, 0)
    start = cute.make_ptr(Int32, Int32(operand & 0x3FFF) << 4, cute.AddressSpace.smem, assumed_align=16)
    cute.make_tensor(start, cute.make_layout(1024))[t] = 1  #!
    cute.arch.mbarrier_wait(done, 0)
    release(made, address)


@fault("missing_proxy_fence", threads=128)
@cute.kernel
def operands_without_a_proxy_fence(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(128)
    s, done = shared(1024, align=1024), barriers(1)
    for i in cutlass.range_constexpr(8):
        s[128 * i + t] = 0  #!
    if const_expr(fixed):
        cute.arch.fence_view_async_shared()
    if t == 0:
        cute.arch.mbarrier_init(done, 1)
    cute.arch.barrier()
    operand = umma.at(OPERAND, s.iterator.toint())
    if t == 0:
        umma.mma(address.toint(), operand, operand, INSTRUCTION, False)  #!
        tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    release(made, address)


@fault("tmem_product_overlap", threads=128)
@cute.kernel
def a_second_accumulation_over_the_first(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    made, address = allocate(128)
    operand, done = zeros(t)
    column = 64 if const_expr(fixed) else 32
    if t == 0:
        umma.mma(address.toint(), operand, operand, INSTRUCTION, False)
        umma.mma(address.toint() + column, operand, operand, INSTRUCTION, False)  #!
        umma.mma(address.toint(), operand, operand, INSTRUCTION, True)  #!
        tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    release(made, address)


@fault("race_tensor", threads=128, schedules=("oldest_first",))
@cute.kernel
def a_consumer_that_does_not_wait_for_the_product(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    """`PipelineUmmaAsync` from one warp to all."""
    t = cute.arch.thread_idx()[0]
    made, address = allocate(128)
    operand, _ = zeros(t)
    producer, consumer = pipeline.PipelineUmmaAsync.create(
        num_stages=1,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 128),
        barrier_storage=barriers(2),
    ).make_participants()
    if t < 32:
        stage = producer.acquire_and_advance()
        if t == 0:
            umma.mma(address.toint(), operand, operand, INSTRUCTION, False)  #!
        stage.commit()
    if const_expr(fixed):
        consumer.wait()
    value = take(quarter(address, t))  #!
    cute.arch.fence_view_async_tmem_load()
    out[t] = value
    filled = consumer.wait_and_advance()
    filled.release()
    release(made, address)


# --- wgmma


@cutlass.cutlass_dsl.dsl_user_op
def multiply(operand: Int64, *, loc=None, ip=None) -> tuple:
    """Issue a product of 64 x 8 x 16, both operands the same, and commit it: four sums."""
    text = (
        "wgmma.fence.sync.aligned;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{$w0}, {$w1}, {$w2}, {$w3}}, {$r0}, {$r0}, 0, 1, 1, 0, 0;\n"
        "wgmma.commit_group.sync.aligned;"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[operand], loc=loc, ip=ip)


@cute.jit
def hopper_zeros(t: Int32) -> tuple:
    """Fill 128 rows of 16 bytes with zeros: the tensor and its descriptor."""
    s = shared(512, align=128)
    for i in cutlass.range_constexpr(4):
        s[128 * i + t] = 0
    return s, Int64(0x0000001000080000) | Int64((s.iterator.toint() & 0x3FFFF) >> 4)


@fault("missing_wgmma_wait", threads=128, arch="sm_90a")
@cute.kernel
def sums_that_a_product_still_writes(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    _, operand = hopper_zeros(t)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier()
    sums = multiply(operand)
    if const_expr(fixed):
        warpgroup.wait_group(0)
    out[t] = Int32(sums[0] + sums[3])  #!
    warpgroup.wait_group(0)


@fault("missing_proxy_fence", threads=128, arch="sm_90a")
@cute.kernel
def operands_of_wgmma_without_a_proxy_fence(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    _, operand = hopper_zeros(t)
    if const_expr(fixed):
        cute.arch.fence_view_async_shared()
    cute.arch.barrier()
    sums = multiply(operand)  #!
    warpgroup.wait_group(0)
    out[t] = Int32(sums[0])


@fault("race_shared|missing_proxy_fence", threads=128, arch="sm_90a")
@cute.kernel
def operands_of_wgmma_that_are_overwritten(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, operand = hopper_zeros(t)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier()
    sums = multiply(operand)  #!
    if const_expr(fixed):
        warpgroup.wait_group(0)
        cute.arch.barrier()
    s[t] = 1  #!
    warpgroup.wait_group(0)
    out[t] = Int32(sums[0])
