"""Name a fix in the language of the source: CUDA C++, the CuTe DSL, Triton, Gluon.

A compiler places most synchronisation of Triton itself: there only what a kernel's author can write is named.
Sources: libcu++'s ``cuda::ptx``, CuTe DSL 4.8 (``cute.arch``, ``cute.nvgpu``), Triton 3.9 (``tl``, ``gl``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

LANGUAGES = ("cuda", "cute", "gluon", "triton")
_CUDA = frozenset((".cu", ".cuh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".inl"))
_IMPORTS = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w., \t]+?)(?:[ \t]+import[ \t]+(\([^)]*\)|[^\n]*))?$", re.M)
_COMMENT = re.compile(r"#.*")
_MODULES = {"gluon": "gluon", "triton": "triton", "cutlass": "cute"}  # Gluon is a part of Triton


@dataclass(frozen=True)
class Names:
    """What a fix is called in each language, "" where it has no name of its own."""

    cuda: str = ""
    cute: str = ""
    gluon: str = ""
    triton: str = ""


_PROXY = Names(
    "cuda::ptx::fence_proxy_async(cuda::ptx::space_shared)",
    "cute.arch.fence_view_async_shared()",
    "fence_async_shared()",
)
_BYTES = Names(
    "cuda::ptx::mbarrier_arrive_expect_tx(.., bytes)",
    "cute.arch.mbarrier_arrive_and_expect_tx(mbar, bytes)",
    "mbarrier.expect(bar, bytes)",
)
_COUNT = Names(
    "cuda::ptx::mbarrier_init(&bar, count)", "cute.arch.mbarrier_init(mbar, count)", "mbarrier.init(bar, count=..)"
)
_BULK_READ = Names(
    "cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>())",
    "cute.arch.cp_async_bulk_wait_group(0, read=True)",
    "tma.store_wait(0)",
)
_FLAG = "tl.atomic_xchg(flag, 1, sem='release') after tl.debug_barrier(), tl.atomic_add(flag, 0, sem='acquire')"
_SYSTEM = Names(
    "cuda::atomic_ref<T, cuda::thread_scope_system>",
    "scope='sys' of cute.arch.atomic_add, load and store",
    "scope='sys' of gl.atomic_add",
    "scope='sys' of tl.atomic_add and tl.atomic_xchg",
)
_BOUNDS = ("if (i < n)", "pred= of cute.copy, or if i < n", "mask= of gl.load", "mask= of tl.load")
_BARRIER = ("__syncthreads()", "cute.arch.sync_threads()", "gl.barrier()", "tl.debug_barrier()")

FIXES: dict[str, Names] = {
    # Order between threads.
    "race_shared": Names(*_BARRIER),
    "race_global": Names(
        "__syncthreads() within a block, cuda::atomic_ref with release and acquire between blocks",
        "cute.arch.sync_threads() within a CTA, cute.arch.atomic_add(.., sem='release', scope='gpu') and an acquire "
        "between CTAs",
        "gl.barrier() within a program",
        _FLAG,
    ),
    "scope_between_devices": _SYSTEM,
    "race_between_devices": _SYSTEM,
    "missing_alias_fence": Names("cuda::ptx::fence_proxy_alias()", "cute.arch.fence_proxy('alias')"),
    "global_read_past_end": Names(*_BOUNDS),
    "diverged_sync": Names("__syncwarp()", "cute.arch.sync_warp()"),
    "missing_warp_sync": Names("__syncwarp()", "cute.arch.sync_warp()"),
    "peer_memory_after_exit": Names(
        "cluster.sync() of this_cluster()", "cute.arch.cluster_arrive(), then cute.arch.cluster_wait()"
    ),
    "cluster_double_arrive": Names(
        "cuda::ptx::barrier_cluster_wait()", "cute.arch.cluster_wait()", "cluster.barrier() for both"
    ),
    "dependent_launch_early": Names(
        "cudaGridDependencySynchronize()", "cute.arch.griddepcontrol_wait()", "", "tl.extra.cuda.gdc_wait()"
    ),
    # Copies.
    "missing_cp_async_wait": Names(
        "__pipeline_wait_prior(0)", "cute.arch.cp_async_wait_group(0)", "async_copy.wait_group(0)"
    ),
    "missing_bulk_wait": _BULK_READ,
    "async_read_after_exit": _BULK_READ,
    "async_write_after_exit": Names(
        "cuda::ptx::mbarrier_try_wait_parity in a loop", "cute.arch.mbarrier_wait(mbar, phase)",
        "mbarrier.wait(bar, phase)",
    ),
    "missing_proxy_fence": _PROXY,
    "missing_proxy_fence_cp_async": _PROXY,
    "missing_proxy_fence_overwrite": _PROXY,
    "missing_proxy_fence_global": Names(
        "cuda::ptx::fence_proxy_async(cuda::ptx::space_global)", "cute.arch.fence_proxy('async.global')"
    ),
    "missing_tensormap_fence": Names(
        "cuda::ptx::fence_proxy_tensormap_generic",
        "cute.nvgpu.cpasync.fence_tma_desc_release() and .fence_tma_desc_acquire(ptr)",
    ),
    "descriptor_modified": Names("", "cute.arch.mbarrier_wait(mbar, phase) first"),
    # Barriers in shared memory.
    "mbarrier_init_unordered": Names(
        "cuda::ptx::fence_mbarrier_init, then a barrier",
        "cute.arch.mbarrier_init_fence(), then cute.arch.sync_threads()",
    ),
    "mbarrier_over_arrival": _COUNT,
    "mbarrier_count_overflow": _COUNT,
    "mbarrier_tx_overflow": _BYTES,
    "mbarrier_tx_leftover": _BYTES,
    "mbarrier_tx_unexpected": _BYTES,
    "mbarrier_reinit": Names("cuda::ptx::mbarrier_inval(&bar)", "", "mbarrier.invalidate(bar)"),
    "mbarrier_phase_unordered": Names(
        "cuda::ptx::mbarrier_arrive by every warp that waits, counted in mbarrier_init",
        "consumer_release(state) of the pipeline by every warp that waits, counted in its consumer_group",
        "mbarrier.arrive(bar)",
    ),
    "clc_failed_response": Names(
        "cuda::ptx::clusterlaunchcontrol_query_cancel_is_canceled", "the last value of cute.arch.clc_response",
        "is_canceled() of clc.load_result",
    ),
    # Tensor cores and tensor memory.
    "uninitialised_tmem": Names(
        "enable_input_d = false of the first cuda::ptx::tcgen05_mma",
        "tiled_mma.set(cute.nvgpu.tcgen05.Field.ACCUMULATE, False) for the first MMA",
        "use_acc=False of the first tcgen05_mma",
    ),
    "scale_factors_not_replicated": Names(
        "cuda::ptx::tcgen05_cp_32x128b_warpx4", "cute.nvgpu.tcgen05.Cp4x32x128bOp"
    ),
    "race_tensor": Names(
        "cuda::ptx::tcgen05_commit, and a wait for its barrier",
        "cute.nvgpu.tcgen05.commit(mbar), then cute.arch.mbarrier_wait(mbar, phase)",
        "tcgen05_commit(bar), then mbarrier.wait(bar, phase)",
    ),
    "tmem_after_free": Names(
        "a barrier before cuda::ptx::tcgen05_dealloc", "cute.arch.sync_threads() before cute.arch.dealloc_tmem"
    ),
    "tmem_leak": Names("cuda::ptx::tcgen05_dealloc", "cute.arch.dealloc_tmem(ptr, columns)"),
    "missing_tcgen05_wait": Names(
        "cuda::ptx::tcgen05_wait_ld() or tcgen05_wait_st()",
        "cute.arch.fence_view_async_tmem_load() or cute.arch.fence_view_async_tmem_store()",
    ),
    "tcgen05_ld_used_early": Names("cuda::ptx::tcgen05_wait_ld()", "cute.arch.fence_view_async_tmem_load()"),
    "missing_tcgen05_fence": Names(
        "cuda::ptx::tcgen05_fence_before_thread_sync() and tcgen05_fence_after_thread_sync()"
    ),
    "missing_wgmma_wait": Names("", "cute.nvgpu.warpgroup.wait_group(0)", "warpgroup_mma_wait(0, deps=..)"),
    "missing_wgmma_fence": Names("", "cute.nvgpu.warpgroup.fence()"),
}  # fmt: skip

# Kinds whose fix is a change of numbers, layouts or control flow that no language has a name for.
UNNAMED = frozenset((
    "uninitialised_smem", "tmem_outside_allocation", "tmem_lane_quarter", "mbarrier_overwritten",
    "mbarrier_reinit_waited", "mbarrier_inval_in_use", "mbarrier_no_complete", "mbarrier_phase_lapped",
    "mbarrier_parity_range", "barrier_phase_mixed", "barrier_double_arrive", "tma_store_padding",
    "race_shared_same_value", "race_global_same_value", "uninitialised_register", "race_through_completion",
    "global_read_past_end_unused", "uninitialised_smem_unused", "tmem_product_overlap", "lane_outside_mask",
))  # fmt: skip


def language_of(file: str, lines: Sequence[str]) -> str:
    """Tell the language of a source by its name and its imports: one of `LANGUAGES`, "" if it has none of them."""
    suffix = PurePath(file).suffix
    if suffix in _CUDA:
        return "cuda"
    if suffix != ".py":
        return ""
    text = _COMMENT.sub("", "\n".join(lines))
    imported = [" ".join(filter(None, found.groups())) for found in _IMPORTS.finditer(text)]
    words = set(re.findall(r"\w+", " ".join(imported)))
    return next((name for word, name in _MODULES.items() if word in words), "")


def named(fix: str, kind: str, language: str) -> str:
    """Add to a fix what it is called in a language."""
    name = getattr(FIXES[kind], language) if language and kind in FIXES else ""
    return f"{fix} (here: {name})" if name else fix
