"""Find lanes of one warp that exchange data through shared memory without synchronising.

Since Volta the lanes of a warp need not run in step: what one has stored another may read only after bar.warp.sync of
both, or another synchronisation of the warp. What is looked at is the order of the code, so lanes that happen to run in
step are found as well. In doubt this is silent: anything that publishes or acquires for the warp counts for all of its
lanes, and of several writers of a word the last is remembered; writers are not compared with each other. What cp.async
brings counts as stored by its lane when that has waited for it. Of what a log
holds (native/lane_log.py) the first exchange is reported.

Source: PTX ISA, "bar.warp.sync"; CUDA programming guide, "Independent Thread Scheduling".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import address_of
from dsv4lib.emulator.checks.report import place_at
from dsv4lib.emulator.checks.shadow import Fields
from dsv4lib.emulator.native.abi import LANES
from dsv4lib.emulator.native.access_log import LOG, WRITE
from dsv4lib.emulator.native.lane_log import MANY, RECORD, Lanes, compare

if TYPE_CHECKING:
    from dsv4lib.emulator.checks.clocks import Clocks
    from dsv4lib.emulator.machine.cta import Cluster
    from dsv4lib.emulator.machine.warp import Warp
    from dsv4lib.emulator.units.groups import Written


class _State:
    """Words of the CTAs of one cluster, and synchronisations of its warps."""

    def __init__(self, cluster: Cluster, warps: int):
        words = 4 * len(cluster.ctas[0].smem.dirty)
        self._tables = [np.zeros((words, 2 * RECORD), np.uint32) for _ in cluster.ctas]
        self._addresses = np.array([address_of(table) for table in self._tables], np.int64)
        self.common = np.zeros((warps, LANES, LANES), np.uint32)  # the last synchronisation that had both lanes
        self.counts = np.ones(warps, np.uint32)
        self.seen = [0] * warps  # epoch of each warp when its log was looked at last
        self.block = Fields(Lanes)
        arrays = (self.common, self.counts)
        self.block.set(address_of(self._addresses), len(self._tables), words, *(address_of(a) for a in arrays))


class LaneChecks:
    """Exchanges within the warps of one launch."""

    def __init__(self, machine: Any):
        self.machine = machine
        self._compare = compare()
        self._states: dict[Cluster, _State] = {}

    def started(self, cluster: Cluster) -> None:
        """Begin a cluster; forget those that have ended."""
        self._states = {one: state for one, state in self._states.items() if one in self.machine.clusters}
        self._states[cluster] = _State(cluster, len(cluster.race.clocks.all_warps))

    def synchronised(self, warp: Warp, members: int) -> None:
        """Record bar.warp.sync of some lanes."""
        state, me = self._states[warp.cta.cluster], warp.agent - warp.cta.cluster.race.clocks.first_agent
        state.counts[me] += 1
        lanes = np.flatnonzero(members >> np.arange(LANES) & 1)
        state.common[me][np.ix_(lanes, lanes)] = state.counts[me]

    def logged(self, warp: Warp, clocks: Clocks, log: np.ndarray) -> None:
        """Compare the lanes of a warp in its log. The epoch of its clock changes with every synchronisation."""
        state, me = self._states[warp.cta.cluster], warp.agent - clocks.first_agent
        epoch = clocks.epochs[me]
        if state.seen[me] != epoch:
            state.seen[me] = epoch
            state.counts[me] += 1
            state.common[me] = state.counts[me]
        found = self._compare(state.block.address, address_of(log), len(log), me)
        if found:
            self._report(warp, log, state.block.values)

    def copied(self, warp: Warp, clocks: Clocks, written: Written, lanes: int) -> None:
        """Compare what some lanes have had copied to shared memory (cp.async), when they have waited for it."""
        log = np.zeros(1, LOG)
        log["pc"], log["mask"], log["code"] = written.instr, lanes, WRITE | written.nbytes
        log["addresses"][0, written.lanes] = written.addresses
        self.logged(warp, clocks, log)

    def _report(self, warp: Warp, log: np.ndarray, found: Any) -> None:
        entry, lane = divmod(found[Lanes.FOUND], LANES)
        other = found[Lanes.OTHER] & 0xFF
        program, cta = self.machine.program, warp.cta.ctaid
        place = dataclasses.replace(warp.place(program.instruction(int(log[entry]["pc"]))), lanes=1 << lane)
        lanes, name = (0, "others") if other == MANY else (1 << other, f"lane {other}")
        owner = place_at(program, found[Lanes.PC], cta, warp.warp_id, lanes, self.machine.device)
        text = f"lane {lane} of {warp} and {name} use a word of shared memory, and nothing synchronises them"
        self.machine.report("missing_warp_sync", text, place, owner=owner)
