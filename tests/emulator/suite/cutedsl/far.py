"""Faults around global memory in CuTeDSL: races, scopes, ends of tensors, dependent launches, devices."""

import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tests.emulator.suite.cutedsl.common import (
    FLAG,
    WORDS,
    barriers,
    count,
    fault,
    fetch,
    look,
    raise_flag,
    send,
    shared,
)


@fault("race_global", grid=2)
@cute.kernel
def two_ctas_write_a_word(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    step = 64 if const_expr(fixed) else 0
    out[step * cta + t] = cta + 1  #!


@fault("race_global_same_value", grid=2)
@cute.kernel
def two_ctas_write_the_same_value(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    step = 64 if const_expr(fixed) else 0
    out[step * cta + t] = 7  #!


@fault("race_global")
@cute.kernel
def a_word_of_another_warp(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    out[t] = x[t]  #!
    if const_expr(fixed):
        cute.arch.barrier()
    out[t + 64] = out[t ^ 32]  #!


@fault("race_global", grid=2)
@cute.kernel
def a_flag_that_does_not_release(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if cta == 0:
        out[t] = t  #!
        cute.arch.barrier()
        if t == 0:
            raise_flag(x.iterator + FLAG, "release" if const_expr(fixed) else "relaxed", "gpu")
    else:
        flag = Int32(0)
        while flag == 0:
            flag = look(x.iterator + FLAG, "acquire", "gpu")
        out[t + 64] = out[t ^ 32]  #!


@fault("race_global", grid=2)
@cute.kernel
def a_flag_that_is_not_acquired(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if cta == 0:
        out[t] = t  #!
        cute.arch.barrier()
        if t == 0:
            raise_flag(x.iterator + FLAG, "release", "gpu")
    else:
        flag = Int32(0)
        while flag == 0:
            flag = look(x.iterator + FLAG, "acquire" if const_expr(fixed) else "relaxed", "gpu")
        out[t + 64] = out[t ^ 32]  #!


@fault("race_global", grid=2)
@cute.kernel
def a_release_whose_scope_is_the_cta(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if cta == 0:
        out[t] = t  #!
        cute.arch.barrier()
        if t == 0:
            raise_flag(x.iterator + FLAG, "release", "gpu" if const_expr(fixed) else "cta")
    else:
        flag = Int32(0)
        while flag == 0:
            flag = look(x.iterator + FLAG, "acquire", "gpu")
        out[t + 64] = out[t ^ 32]  #!


@fault("race_global", grid=2)
@cute.kernel
def a_fence_whose_scope_is_the_cta(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if cta == 0:
        out[t] = t  #!
        if const_expr(fixed):
            cute.arch.fence_acq_rel_gpu()
        else:
            cute.arch.fence_acq_rel_cta()
        cute.arch.barrier()
        if t == 0:
            cute.arch.atomic_exch(x.iterator + FLAG, Int32(1), sem="relaxed", scope="gpu")
    else:
        flag = Int32(0)
        while flag == 0:
            flag = look(x.iterator + FLAG, "acquire", "gpu")
        out[t + 64] = out[t ^ 32]  #!


@fault("race_global", grid=2)
@cute.kernel
def one_thread_looks_at_the_flag(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if cta == 0:
        out[t] = t  #!
        cute.arch.barrier()
        if t == 0:
            raise_flag(x.iterator + FLAG, "release", "gpu")
    else:
        if t == 0:
            flag = Int32(0)
            while flag == 0:
                flag = look(x.iterator + FLAG, "acquire", "gpu")
        if const_expr(fixed):
            cute.arch.barrier()
        out[t + 64] = out[t ^ 32]  #!


@fault("race_global", grid=2)
@cute.kernel
def a_store_beside_an_atomic(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if t == 0:
        if cta == 0:
            if const_expr(fixed):
                count(out)
            else:
                out[0] = 5  #!
        else:
            count(out)  #!


@fault("race_global")
@cute.kernel
def a_bulk_store_of_which_only_the_reading_is_complete(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s = shared(64)
    s[t] = x[t]
    cute.arch.fence_view_async_shared()
    cute.arch.barrier()
    if t == 0:
        send(out, s, 0, 64)  #!
        cute.arch.cp_async_bulk_wait_group(0, read=not fixed)
        out[64] = out[4]  #!
        cute.arch.cp_async_bulk_wait_group(0)


@fault("race_global")
@cute.kernel
def a_bulk_copy_of_what_is_being_stored(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, full = shared(64), barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.barrier()
    out[t] = t  #!
    cute.arch.fence_proxy("async.global")
    if const_expr(fixed):
        cute.arch.barrier()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, 256)
        fetch(s, out, 0, 64, full)  #!
    cute.arch.mbarrier_wait(full, 0)


@fault("missing_proxy_fence_global")
@cute.kernel
def a_bulk_copy_of_what_threads_wrote(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    s, full = shared(64), barriers(1)
    if t == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.barrier()
    out[t] = t  #!
    if const_expr(fixed):
        cute.arch.fence_proxy("async.global")
    cute.arch.barrier()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, 256)
        fetch(s, out, 0, 64, full)  #!
    cute.arch.mbarrier_wait(full, 0)


@fault("global_read_past_end|MemoryFault")
@cute.kernel
def a_load_past_the_end(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    first = WORDS - 64 if const_expr(fixed) else WORDS - 32
    out[t] = x[t + first]  #!


@fault("MemoryFault")
@cute.kernel
def a_store_past_the_end(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    first = WORDS - 64 if const_expr(fixed) else WORDS + 2048
    out[t + first] = t  #!


@fault("MemoryFault")
@cute.kernel
def a_vector_that_is_not_aligned(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    """The pointer is declared to be aligned to 16 bytes, and is not."""
    t = cute.arch.thread_idx()[0]
    start = x.iterator + (4 if const_expr(fixed) else 2)
    row = cute.make_tensor(
        cute.make_ptr(Int32, start.toint(), cute.AddressSpace.gmem, assumed_align=16), cute.make_layout(4)
    )
    mine = cute.make_rmem_tensor(4, Int32)
    cute.autovec_copy(row, mine)  #!
    out[t] = mine[0] + mine[3]


# --- dependent launches


@cute.kernel
def a_load_before_the_wait_after(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    if const_expr(fixed):
        cute.arch.griddepcontrol_wait()
    value = out[t]  #!
    if const_expr(not fixed):
        cute.arch.griddepcontrol_wait()
    out[t + 64] = value


@fault("dependent_launch_early", after=a_load_before_the_wait_after)
@cute.kernel
def a_load_before_the_wait(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    out[t] = x[t]  #!


@cute.kernel
def another_warp_waits_after(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    if t < 32:
        cute.arch.griddepcontrol_wait()
    if const_expr(fixed):
        cute.arch.barrier()
    out[t + 64] = out[t]  #!


@fault("dependent_launch_early", after=another_warp_waits_after)
@cute.kernel
def another_warp_waits(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    out[t] = x[t]  #!


# --- two devices


@cute.kernel
def take_after_the_flag(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    if t == 0:
        flag = Int32(0)
        while flag == 0:  #!
            flag = look(x.iterator + FLAG, "acquire", "sys")
        out[1] = out[0]  #!


@fault("race_between_devices", other=take_after_the_flag)
@cute.kernel
def a_fence_that_ends_at_the_device(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    if t == 0:
        out[0] = 7  #!
        if const_expr(fixed):
            cute.arch.fence_acq_rel_sys()
        else:
            cute.arch.fence_acq_rel_gpu()
        raise_flag(x.iterator + FLAG, "relaxed", "sys")


@fault("scope_between_devices", other=take_after_the_flag)
@cute.kernel
def a_flag_that_ends_at_the_device(x: cute.Tensor, out: cute.Tensor, fixed: Constexpr):
    t = cute.arch.thread_idx()[0]
    if t == 0:
        out[0] = 7
        raise_flag(x.iterator + FLAG, "release", "sys" if const_expr(fixed) else "gpu")  #!


@fault("tma_store_padding", tma="store", columns=13)
@cute.kernel
def rows_that_do_not_end_at_16_bytes(
    x: cute.Tensor, out: cute.Tensor, fixed: Constexpr, atom: cute.CopyAtom, tensor: cute.Tensor
):
    t = cute.arch.thread_idx()[0]
    s = shared(8, 8)
    s[t % 8, t // 8] = x[t]
    cute.arch.fence_view_async_shared()
    cute.arch.barrier()
    tiles = cute.local_tile(tensor, (8, 8), (0 if const_expr(fixed) else 1, 0))
    sB, gB = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    if t < 32:
        cute.copy(atom, sB, gB)  #!
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)
