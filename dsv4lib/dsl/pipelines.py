"""Make pipelines of a kernel with warp roles. Rings of stages between TMA, the tensor core and a group of warps.

Each takes a pointer to 2 x ``stages`` mbarriers (full, then empty); `cutlass.pipeline.pipeline_init_arrive` and `_wait`
follow when all are made.

With ``ctas`` 2 a pair of CTAs (`cta_group::2`) works on the same stages: the MMA warp of its first CTA issues for both,
so whatever it waits for is counted in the first CTA, and what its MMAs signal arrives in both.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
from cutlass import pipeline


def _group(arrivals: int) -> pipeline.CooperativeGroup:
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals)


def cluster_layout(ctas: int) -> cute.Layout:
    """Return (v, m, n, k) of a cluster of ``ctas`` that multiply together."""
    return cute.make_layout((ctas, 1, 1, 1))


def tma_to_umma(
    stages: int, stage_bytes: int, barriers: cute.Pointer, producers: int = 1, ctas: int = 1, readers: int = 0
) -> pipeline.PipelineTmaUmma:
    """Make a pipeline from TMA to MMAs.

    Full when ``stage_bytes`` have landed in each CTA, empty when the MMAs issued before the release are done.

    Full also asks for an arrival of each of ``producers`` warps; one that stores by itself goes by `wait_empty` and
    arrives at the full barrier when its stores are visible.

    Empty also asks for an arrival of each of ``readers`` warps, which read the stage by themselves (`arrive_empty`).

    With ``ctas`` 2 both producers wait for an empty stage, and only the first says how many bytes both will bring.
    """
    made = pipeline.PipelineTmaUmma.create(
        num_stages=stages,
        producer_group=_group(producers),
        consumer_group=_group(1 + readers),
        tx_count=stage_bytes * ctas,
        barrier_storage=barriers,
        cta_layout_vmnk=cluster_layout(ctas),
        defer_sync=True,
    )
    # The library takes the CTAs of a pair for neighbours along the grid's x axis.
    return made if ctas == 1 else replace(made, is_leader_cta=cute.arch.block_idx_in_cluster() == 0)


def umma_to_warps(
    stages: int, warps: int, barriers: cute.Pointer, ctas: int = 1, arrivals: int = 1
) -> pipeline.PipelineUmmaAsync:
    """Make a pipeline from MMAs to warps.

    Full when MMAs are done and the MMA warp has arrived ``arrivals`` - 1 times in each CTA, empty after one arrival of
    each of ``warps`` of each CTA.
    """
    return pipeline.PipelineUmmaAsync.create(
        num_stages=stages,
        producer_group=_group(arrivals),
        consumer_group=_group(warps * ctas),
        barrier_storage=barriers,
        cta_layout_vmnk=cluster_layout(ctas),
        defer_sync=True,
    )


def warps_to_umma(stages: int, warps: int, barriers: cute.Pointer, ctas: int = 1) -> pipeline.PipelineAsyncUmma:
    """Make a pipeline from warps to MMAs.

    Full after one arrival of each of ``warps`` of each CTA, empty when the MMAs that read the stage are done.
    """
    return pipeline.PipelineAsyncUmma.create(
        num_stages=stages,
        producer_group=_group(warps * ctas),
        consumer_group=_group(1),
        barrier_storage=barriers,
        cta_layout_vmnk=cluster_layout(ctas),
        defer_sync=True,
    )


def warps_to_warps(stages: int, producers: int, consumers: int, barriers: cute.Pointer) -> pipeline.PipelineAsync:
    """Make a pipeline between warps of one CTA.

    Full after one arrival of each of ``producers`` warps, empty after one of each of ``consumers``.
    """
    return pipeline.PipelineAsync.create(
        num_stages=stages,
        producer_group=_group(producers),
        consumer_group=_group(consumers),
        barrier_storage=barriers,
        defer_sync=True,
    )


@cute.jit
def wait_empty(ring: pipeline.PipelineTmaUmma, state: pipeline.PipelineState):
    """Wait for an empty stage, as a producer that is not TMA."""
    ring.sync_object_empty.wait(state.index, state.phase)


def arrive_empty(ring: pipeline.PipelineTmaUmma, state: pipeline.PipelineState) -> None:
    """Arrive at the empty barrier of a stage, for a warp that has read it.

    One thread calls it.
    """
    cute.arch.mbarrier_arrive(ring.sync_object_empty.get_barrier(state.index))
