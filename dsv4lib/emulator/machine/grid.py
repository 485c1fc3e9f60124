"""Build the grid. CTAs and warps with register files, special registers, shared and local memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsv4lib.emulator.machine import request as limits
from dsv4lib.emulator.machine.cta import Cluster, Cta, aligned_zeros
from dsv4lib.emulator.machine.program import Program
from dsv4lib.emulator.machine.request import Dim3
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.memory.addressing import shared_address
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.driver_ir import NEVER

_LANE = np.arange(abi.LANES, dtype=np.uint32)
# Special registers that differ between CTAs; all others are the same for warp i of every CTA.
_PER_CTA = frozenset(
    [f"{n}.{c}" for n in ("ctaid", "clusterid", "cluster_ctaid") for c in "xyz"] + ["cluster_ctarank", "smid"]
)
_LANEMASK = {
    "lanemask_eq": np.uint32(1) << _LANE,
    "lanemask_lt": (np.uint32(1) << _LANE) - np.uint32(1),
    "lanemask_le": (np.uint32(2) << _LANE) - np.uint32(1),
    "lanemask_gt": ~((np.uint32(2) << _LANE) - np.uint32(1)),
    "lanemask_ge": ~((np.uint32(1) << _LANE) - np.uint32(1)),
}


def product(shape: Dim3) -> int:
    """Count the elements of a three-dimensional shape."""
    return shape[0] * shape[1] * shape[2]


def unflatten(index: int, shape: Dim3) -> Dim3:
    """Convert a linear index to (x, y, z), x fastest."""
    return index % shape[0], index // shape[0] % shape[1], index // (shape[0] * shape[1])


class GridBuilder:
    """Creates the clusters of one launch.

    Register files start as an image of constants and special registers; images are kept per rank and only the
    slots that differ between CTAs are filled anew.
    """

    def __init__(self, machine: Any):
        self.machine = machine
        self.program: Program = machine.program
        self.threads = product(machine.block)
        self.warps = -(-self.threads // abi.LANES)
        self._images: dict[int, np.ndarray] = {}
        self._varying = [entry for entry in self.program.specials if entry.name in _PER_CTA]
        self._clusters = 0

    def resident_clusters(self) -> int:
        """Count the clusters that the SMs hold at once."""
        m = self.machine
        per_sm = min(
            limits.SMEM_PER_SM // m.smem_bytes,
            limits.MAX_THREADS_PER_SM // (self.warps * abi.LANES),
            limits.MAX_CTAS_PER_SM,
        )
        return max(1, m.settings.sm_count * max(1, per_sm) // product(m.cluster_shape))

    def skip(self, clusters: int) -> int:
        """Number the next cluster as if so many more had been made; return how many warps those have."""
        self._clusters += clusters
        return clusters * product(self.machine.cluster_shape) * self.warps

    def cluster(self, origin: Dim3, first_agent: int) -> Cluster:
        """Create the cluster whose first CTA is ``origin``. Its warps are numbered from ``first_agent``."""
        m = self.machine
        clusterid = tuple(o // c for o, c in zip(origin, m.cluster_shape, strict=True))
        cluster = Cluster(m, self._clusters, clusterid, m.cluster_shape)
        self._clusters += 1
        for rank in range(product(m.cluster_shape)):
            x, y, z = unflatten(rank, m.cluster_shape)
            cta = Cta(cluster, rank, (origin[0] + x, origin[1] + y, origin[2] + z), m.smem_bytes)
            cta.threads = self.threads
            if "reserved_smem_offset_1" in self.program.special:  # cooperative groups count on zeros there
                cta.smem.init[limits.SMEM_OF_GROUPS : limits.SMEM_RESERVED] = 1
            cluster.ctas.append(cta)
        for cta in cluster.ctas:
            self._add_warps(cta, first_agent + cta.rank * self.warps)
        return cluster

    def _add_warps(self, cta: Cta, first_agent: int) -> None:
        """Register files, local memory and contexts of a CTA's warps, and the warps."""
        program, m, n = self.program, self.machine, self.warps
        size = program.register_bytes
        files = aligned_zeros(size * n, 64).reshape(n, size)
        local_bytes = abi.aligned(program.local_bytes, 16)
        local = aligned_zeros(max(local_bytes * abi.LANES * n, 1), 64)
        contexts = aligned_zeros(abi.CONTEXT.itemsize * n, 64).view(abi.CONTEXT)
        table = m.gmem.native_table
        self._common_context(contexts, cta, table)
        cta.storage = (files, local, contexts, table)  # native code has their addresses
        index = np.arange(n, dtype=np.uint64)
        contexts["regs"] = np.uint64(files.ctypes.data) + index * np.uint64(size)
        contexts["local"] = np.uint64(local.ctypes.data) + index * np.uint64(local_bytes * abi.LANES)
        contexts["local_bytes"] = local_bytes
        contexts["warp"], contexts["agent"] = index, index + np.uint64(first_agent)
        contexts["live"] = [(1 << min(abi.LANES, self.threads - i * abi.LANES)) - 1 for i in range(n)]
        contexts["group"] = contexts["mask"] = contexts["live"]
        contexts["watch"] = NEVER
        cta.warps = [Warp(cta, i, program, first_agent + i, contexts[i : i + 1], files[i]) for i in range(n)]
        self._fill(cta, files)
        m.stats["warps"] += n

    def _common_context(self, contexts: np.ndarray, cta: Cta, table: np.ndarray) -> None:
        """Fields that all warps of a CTA share. ``table``: of the allocations."""
        m = self.machine
        for rank, other in enumerate(cta.cluster.ctas):
            contexts["smem"][:, rank] = other.smem.data.ctypes.data
            contexts["smem_init"][:, rank] = other.smem.init.ctypes.data
            contexts["smem_dirty"][:, rank] = other.smem.dirty.ctypes.data
        contexts["smem_bytes"], contexts["rank"] = m.smem_bytes, cta.rank
        contexts["param"], contexts["param_bytes"] = m.param_address, m.param_bytes
        contexts["alloc"], contexts["alloc_count"] = table.ctypes.data, len(table)
        marks = m.marks if m.marks is not None and m.marks.fit(table) else None
        contexts["checks"] = m.settings.native_checks | (0 if marks is None else abi.CHECK_MARK)
        contexts["marks"] = 0 if marks is None else marks.address
        reported = m.settings.native_checks and "global_read_past_end" not in m.settings.muted
        contexts["padding"] = m.settings.padding if reported else 0  # never pass over in silence
        contexts["race"] = 0 if m.race is None else m.race.address

    def _fill(self, cta: Cta, files: np.ndarray) -> None:
        """Initialise the register files, uint8[warps, register_bytes]."""
        image = self._images.get(cta.rank)
        if image is None:
            for warp in cta.warps:
                self.program.fill(warp.regs, lambda name, warp=warp: self._special(name, warp), warp.symbol)
            self._images[cta.rank] = files.copy()
            return
        files[:] = image
        for entry in self._varying:
            slot = files[:, entry.offset : entry.offset + abi.register_bytes(entry.bits)]
            slot.view(f"<u{entry.bits // 8}")[:] = self._special(entry.name, cta.warps[0])

    def _special(self, name: str, warp: Warp) -> Any:
        """Value of a special register: one number or 32. Source: PTX ISA, chapter "Special Registers"."""
        m, cta = self.machine, warp.cta
        base, _, axis = name.partition(".")
        if axis:
            if base == "ctaid":
                return cta.ctaid["xyz".index(axis)]
            thread = warp.warp_id * abi.LANES + _LANE.astype(np.int64)
            triples = {
                "tid": unflatten(thread, m.block),
                "ntid": m.block,
                "nctaid": m.grid,
                "clusterid": cta.cluster.clusterid,
                "nclusterid": tuple(g // c for g, c in zip(m.grid, m.cluster_shape, strict=True)),
                "cluster_ctaid": unflatten(cta.rank, m.cluster_shape),
                "cluster_nctaid": m.cluster_shape,
            }
            return triples[base]["xyz".index(axis)]
        if name in _LANEMASK:
            return _LANEMASK[name]
        if name.startswith("envreg"):  # 1 and 2: the barrier of a cooperative grid
            return {"envreg1": m.grid_workspace >> 32, "envreg2": m.grid_workspace & 0xFFFFFFFF}.get(name, 0)
        reserved = limits.SMEM_RESERVED
        values = {
            "laneid": _LANE,
            "warpid": warp.warp_id,
            "nwarpid": self.warps,
            "smid": (cta.cluster.index * product(m.cluster_shape) + cta.rank) % m.settings.sm_count,
            "nsmid": m.settings.sm_count,
            "cluster_ctarank": cta.rank,
            "cluster_nctarank": product(m.cluster_shape),
            "gridid": 1,
            "is_explicit_cluster": int(m.request.attributes.get("cluster", product(m.cluster_shape) > 1)),
            "total_smem_size": m.smem_bytes - reserved,
            "aggr_smem_size": m.smem_bytes,
            "dynamic_smem_size": m.request.dynamic_smem,
            "reserved_smem_offset_begin": shared_address(cta.rank, 0),
            "reserved_smem_offset_end": shared_address(cta.rank, reserved),
            "reserved_smem_offset_cap": reserved,
            "reserved_smem_offset_0": shared_address(cta.rank, 0),
            "reserved_smem_offset_1": shared_address(cta.rank, limits.SMEM_OF_GROUPS),
        }
        return values[name]
