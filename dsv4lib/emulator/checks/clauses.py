"""Map each demand on a kernel to its kind of hazard and its twin tests.

``python -m dsv4lib.emulator.checks.clauses`` writes data/emulator/checks.md; a test fails if the file is out of date,
if a kind answers no demand, or if a test that is named does not exist.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from dsv4lib.emulator.checks.kinds import GROUPS, KINDS

PAGE = Path(__file__).parents[3] / "data" / "emulator" / "checks.md"
SUITE = PAGE.with_name("hazard_suite.csv")
LANGUAGES = ("PTX", "CUDA C++", "CuTeDSL")


@dataclass(frozen=True)
class Clause:
    """One demand.

    Attributes:
        demand: what must be found.
        kinds: hazards that report it; stops: errors that stop the launch (impossible accesses have no hazard).
        twins: tests of the broken and the repaired kernel, as file::name below tests/emulator; a name in brackets is
            the parameter.
    """

    demand: str
    kinds: tuple[str, ...]
    twins: tuple[str, ...]
    stops: tuple[str, ...] = ()


_KINDS = "checks/test_kinds.py::PAIRS[{}]"
_RACES = "checks/test_race.py::TWINS[{}]"
_GLOBAL = "checks/test_global.py::TWINS[{}]"
_PHASES = "checks/test_phases.py::TWINS[{}]"
_BETWEEN = "checks/test_between_devices.py::TWINS[{}]"
_PEDANTIC = "checks/test_pedantic.py::TWINS[{}]"
_DEPENDENT = "checks/test_dependent.py::TWINS[{}]"
_TRAPS = "checks/test_gemm_traps.py::REPORTED[{}]"


_VAIN = "suite/test_vain.py::test_a_value_that_does_not_matter_is_a_note"
_SUITE = "suite/{}.py::CASES[{}]"
_PROXIES = "units/test_proxies.py::{}"


def _pairs(*kinds: str) -> tuple[str, ...]:
    return tuple(_KINDS.format(kind) for kind in kinds)


CLAUSES = (
    Clause(
        "read of uninitialised shared memory, or registers loaded from it",
        ("uninitialised_smem", "uninitialised_smem_unused"),
        (*_pairs("uninitialised_smem"), _VAIN),
    ),
    Clause(
        "read of uninitialised tensor memory, or registers loaded from it",
        ("uninitialised_tmem", "scale_factors_not_replicated"),
        (*_pairs("uninitialised_tmem"), _TRAPS.format("accumulation on at the first MMA")),
    ),
    Clause(
        "registers that nothing has set", ("uninitialised_register",), (_PEDANTIC.format("uninitialised_register"),)
    ),
    Clause(
        "tensor memory outside the allocation or after free",
        ("tmem_outside_allocation", "tmem_after_free"),
        _pairs("tmem_outside_allocation", "tmem_after_free"),
    ),
    Clause(
        "accumulators that overlap",
        ("tmem_product_overlap",),
        (
            _SUITE.format("tensor", "two products that overlap by a few columns"),
            _SUITE.format("tensor", "a second accumulation over the first"),
        ),
    ),
    Clause("a warp outside its lane quarter", ("tmem_lane_quarter",), _pairs("tmem_lane_quarter")),
    Clause("leaked tensor memory", ("tmem_leak",), (*_pairs("tmem_leak"), _TRAPS.format("no dealloc"))),
    Clause(
        "out-of-bounds or misaligned global, shared or tensor-map access",
        ("global_read_past_end", "global_read_past_end_unused", "tma_store_padding"),
        (
            _VAIN,
            "checks/test_kinds.py::test_impossible_accesses_stop_with_their_place",
        ),
        ("MemoryFault", "HazardError"),
    ),
    Clause(
        "missing proxy fence between generic and asynchronous accesses",
        (
            "missing_proxy_fence",
            "missing_proxy_fence_cp_async",
            "missing_proxy_fence_overwrite",
            "missing_proxy_fence_global",
        ),
        (
            *_pairs("missing_proxy_fence", "missing_proxy_fence_cp_async"),
            _PEDANTIC.format("missing_proxy_fence_overwrite"),
            _GLOBAL.format("a bulk copy of what threads wrote"),
        ),
    ),
    Clause(
        "tensor maps changed without fence, or while in use",
        ("missing_tensormap_fence", "descriptor_modified"),
        (
            _PROXIES.format("test_replace_in_shared_memory_and_copy_out"),
            _PROXIES.format("test_replace_in_global_memory_needs_release_and_acquire"),
            "units/test_tma.py::test_the_descriptor_must_stay_as_it_is",
        ),
    ),
    Clause(
        "missing tcgen05 wait",
        ("missing_tcgen05_wait", "tcgen05_ld_used_early"),
        (
            *_pairs("missing_tcgen05_wait"),
            _PHASES.format("stores to tensor memory that are handed over before they are waited for"),
            _PHASES.format("loads of tensor memory that are handed over before they are waited for"),
            _PEDANTIC.format("tcgen05_ld_used_early"),
        ),
    ),
    Clause("missing tcgen05 fence", ("missing_tcgen05_fence",), (_PEDANTIC.format("missing_tcgen05_fence"),)),
    Clause(
        "missing wgmma wait or fence",
        ("missing_wgmma_wait", "missing_wgmma_fence"),
        (_PEDANTIC.format("missing_wgmma_wait"), _PEDANTIC.format("missing_wgmma_fence")),
    ),
    Clause(
        "data race between an asynchronous unit and a thread",
        ("race_shared", "race_tensor", "missing_bulk_wait", "missing_cp_async_wait"),
        (
            _RACES.format("a copy that is not waited for"),
            _RACES.format("a buffer filled again while it is read"),
            _RACES.format("a bulk store still reads"),
            _RACES.format("cp.async not waited for"),
            _GLOBAL.format("a bulk store of which only the reading is complete"),
            _GLOBAL.format("a bulk copy of what is being stored"),
            _TRAPS.format("accumulator not waited for"),
        ),
    ),
    Clause(
        "data race between warp and warp",
        ("race_shared", "race_shared_same_value", "race_tensor", "race_global", "race_global_same_value"),
        (
            _RACES.format("read before it is written"),
            _RACES.format("written while it may be read"),
            _RACES.format("two writers"),
            _RACES.format("two writers of one value"),
            *_pairs("race_tensor"),
            _GLOBAL.format("warp and warp"),
            _GLOBAL.format("the same value twice"),
        ),
    ),
    Clause(
        "an arrival or a wait at an mbarrier that is relaxed, or whose scope ends before the other thread",
        ("race_shared", "race_through_completion"),
        (
            _SUITE.format("relaxed", "no fence before a relaxed arrival"),
            _SUITE.format("relaxed", "no fence after a relaxed wait"),
            _SUITE.format("relaxed", "a word that a relaxed expect_tx hands over"),
            _SUITE.format("relaxed", "a release that does not reach the peer"),
        ),
    ),
    Clause(
        "data race between lane and lane of a warp",
        ("missing_warp_sync",),
        (
            _SUITE.format("barriers", "a lane reads what another wrote"),
            _SUITE.format("barriers", "a lane overwrites what another reads"),
            _SUITE.format("barriers", "a warp barrier of the wrong lanes"),
            _SUITE.format("barriers", "a lane arrives for others that still read"),
            _SUITE.format("shared", "cp.async of another lane"),
        ),
    ),
    Clause(
        "data race between CTA and CTA",
        ("race_shared", "race_global"),
        (
            _RACES.format("another CTA's memory"),
            _GLOBAL.format("CTA and CTA without a flag"),
            _GLOBAL.format("the flag is raised for one warp alone"),
            _GLOBAL.format("one thread looks at the flag"),
            _GLOBAL.format("a store and an atomic"),
            _GLOBAL.format("two writers"),
        ),
    ),
    Clause(
        "a flag between devices whose scope ends at the device",
        ("scope_between_devices",),
        (
            _BETWEEN.format("an atomic without scope counts arrivals of two devices"),
            _BETWEEN.format("both devices add to one counter"),
            "checks/test_between_devices.py::test_a_multicast_flag_has_a_scope",
        ),
    ),
    Clause(
        "data race between device and device",
        ("race_between_devices",),
        (
            _BETWEEN.format("a bulk copy pulls what a peer has written"),
            _BETWEEN.format("a bulk store pushes, and only its reading is complete"),
            _BETWEEN.format("the flag before the data"),
            "checks/test_between_devices.py::test_message_passing",
        ),
    ),
    Clause(
        "a read of what was written through a multicast address, without an alias fence",
        ("missing_alias_fence",),
        ("checks/test_between_devices.py::test_a_multicast_store_is_read_back_after_an_alias_fence",),
    ),
    Clause(
        "a programmatic dependent launch that does not wait for the launch before",
        ("dependent_launch_early",),
        (_DEPENDENT.format("a load"), _DEPENDENT.format("a store over what is read"), _DEPENDENT.format("a bulk copy")),
    ),
    Clause(
        "a tcgen05 completion publishes only its own effects",
        ("race_through_completion",),
        (
            _PHASES.format("a commit publishes nothing but its own"),
            _RACES.format("ordered by a completion alone"),
        ),
    ),
    Clause(
        "wrong arrival count",
        (
            "mbarrier_over_arrival",
            "mbarrier_count_overflow",
            "mbarrier_no_complete",
            "barrier_phase_mixed",
            "barrier_double_arrive",
            "cluster_double_arrive",
        ),
        (
            *_pairs(
                "mbarrier_over_arrival",
                "mbarrier_count_overflow",
                "mbarrier_no_complete",
                "barrier_double_arrive",
                "cluster_double_arrive",
            ),
            _PHASES.format("two arrivals where one is expected"),
            "checks/test_phases.py::test_a_wrong_arrival_count",
        ),
        ("Deadlock",),
    ),
    Clause(
        "transaction bytes that do not match",
        ("mbarrier_tx_overflow", "mbarrier_tx_leftover", "mbarrier_tx_unexpected"),
        (
            *_pairs("mbarrier_tx_overflow", "mbarrier_tx_leftover", "mbarrier_tx_unexpected"),
            _TRAPS.format("too few bytes expected"),
            "checks/test_phases.py::test_too_many_bytes_are_expected",
        ),
        ("Deadlock",),
    ),
    Clause(
        "phase reuse",
        ("mbarrier_phase_unordered", "mbarrier_phase_lapped", "mbarrier_parity_range"),
        (
            *_pairs("mbarrier_parity_range"),
            _PHASES.format("the next phase does not wait for the waiting warps"),
            _TRAPS.format("wrong phase of the accumulator"),
        ),
    ),
    Clause(
        "misuse of mbarrier objects",
        (
            "mbarrier_overwritten",
            "mbarrier_reinit",
            "mbarrier_reinit_waited",
            "mbarrier_inval_in_use",
            "mbarrier_init_unordered",
        ),
        (
            *_pairs("mbarrier_overwritten", "mbarrier_reinit", "mbarrier_inval_in_use"),
            _RACES.format("initialised too late"),
            _SUITE.format("barriers", "no fence.mbarrier_init before a peer arrives"),
        ),
    ),
    Clause(
        "a barrier used by the wrong number of threads",
        ("barrier_phase_mixed",),
        (
            _PHASES.format("a named barrier of half the warps"),
            _PHASES.format("one named barrier for two groups"),
            "checks/test_phases.py::test_barriers_of_the_wrong_number_of_threads_stop_the_launch",
        ),
        ("HazardError", "Deadlock"),
    ),
    Clause(
        "deadlock: which warps wait on what, with expected and arrived counts",
        (),
        ("checks/test_gemm_traps.py::test_a_trap_stops_the_launch",),
        ("Deadlock",),
    ),
    Clause(
        "copies in flight when a CTA ends",
        ("async_write_after_exit", "async_read_after_exit"),
        _pairs("async_write_after_exit", "async_read_after_exit"),
    ),
    Clause(
        "shared memory of another CTA that may have exited",
        ("peer_memory_after_exit",),
        tuple(
            _SUITE.format("shared", f"{what} a peer that has exited")
            for what in ("a load from", "a store to", "an atomic on", "an arrival at")
        ),
    ),
    Clause(
        "instructions of a whole warp without all its lanes, or by lanes that their mask does not name",
        ("diverged_sync", "lane_outside_mask"),
        (
            "test_control.py::test_an_instruction_without_lanes_that_it_needs_is_reported",
            _SUITE.format("barriers", "a shuffle by lanes outside its mask"),
        ),
    ),
    Clause("cancel requests", ("clc_failed_response",), ("units/test_async_copies.py::test_cluster_launch_control",)),
    Clause(
        "bank conflicts and uncoalesced accesses, as counters",
        (),
        ("checks/test_kinds.py::test_bank_conflicts_and_sectors_are_counted",),
    ),
)


SILENT = (
    "`tcgen05.cp` after a `tcgen05.mma` of the same CTA group that still reads what the copy overwrites: the PTX ISA "
    "promises order for listed pairs of tcgen05 instructions (cp, shift or mma before mma, mma before shift, shift "
    "before cp.4x256b, all before commit), and this pair is not among them; but block-scaled GEMMs of CUTLASS "
    "overwrite their scale factors so, and Triton's documentation calls it valid. The tensor pipe is one agent of the "
    "race detector and completes in issue order "
    "(units/test_tcgen05_memory.py::test_mma_and_cp_keep_the_order_of_issue).",
    "`.acquire.cta` of a wait for arrivals from other CTAs, and `.cta` of an arrival at a peer where it is the default "
    "and not written: CUTLASS arrives and waits so. Where an arrival at a peer names `.cta`, it orders nothing.",
    "Lanes that have not synchronised with the one that raises a flag for the warp: what one lane releases counts as "
    "released by all. Of arrivals at barriers it does not (missing_warp_sync).",
    "Lanes that a bar.warp.sync leaves out, before an arrival of others: each instruction for the whole warp in "
    "between, by its place in the code, counts for all lanes.",
    "A shuffle that takes the value of a lane outside its mask, or of one that does not execute it: reductions over "
    "part of a warp do so in lanes whose results nothing uses.",
    "Counts of setmaxnreg that ask for more registers than the CTA has: the count at the entry is not in the PTX.",
    "An initialisation that releases and acquires of the same word order under the schedule at hand, such as a counter "
    "that one CTA zeroes and all add to with acq_rel: another schedule shows it (`newest_first`).",
    "Two bulk stores of the same words in two groups of one thread that complete in the other order than they were "
    "issued, if only the first is waited for: of an agent's reads of a word the latest that completed is kept.",
    "Strong accesses to one word whose scopes do not include each other's thread (`.cta` from two CTAs): they order "
    "nothing, which is held against the data they guard, but are no race by themselves; between devices they are.",
    'Values that only a weak memory gives: the emulator is sequentially consistent (its README, "Weak memory").',
)


def _suite() -> list[str]:
    """Count the kernels of the suite (tests/emulator/suite) by kind and language."""
    with SUITE.open() as file:
        rows = list(csv.DictReader(file))
    facts = ("caught", "line right", "twin silent")
    lines = [
        "## The suite",
        "",
        f"{len(rows)} small faulty kernels, each with a twin that differs by the repair alone, under the schedules and",
        "with the checks of `sanitize` ([every kernel](hazard_suite.csv), `python -m tests.emulator.suite.table`).",
        "A line is right if every report of that kind, or the error that stops the launch, names marked lines of the",
        "source and no others. Tests also ask that nothing is reported but the fault and what follows from it.",
        "",
        f"| kind | {' | '.join(LANGUAGES)} | {' | '.join(facts)} |",
        "| --- |" + " --- |" * (len(LANGUAGES) + len(facts)),
    ]
    for kind in sorted({row["kind"] for row in rows}):
        mine = [row for row in rows if row["kind"] == kind]
        counts = [sum(row["language"] == language for row in mine) for language in LANGUAGES]
        counts += [sum(row[fact] == "yes" for row in mine) for fact in facts]
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    return lines


def page() -> str:
    """Make the table as Markdown."""
    lines = [
        "# Checks of the emulator",
        "",
        "Written by `python -m dsv4lib.emulator.checks.clauses`. A report has the instruction with its PTX and Python",
        "line, CTA, warp and lanes, for data also the instruction that wrote it. Twins are two kernels, one with the",
        "bug, which is reported, and one without, which is silent. Errors that stop the launch are in brackets.",
        "",
        "| what goes wrong | reported as | twins |",
        "| --- | --- | --- |",
    ]
    for clause in CLAUSES:
        kinds = [f"{kind} ({KINDS[kind].severity})" for kind in clause.kinds] + [f"[{name}]" for name in clause.stops]
        lines.append(f"| {clause.demand} | {', '.join(kinds) or 'counters'} | {'; '.join(clause.twins)} |")
    lines += ["", "## Not reported, and why", "", *(f"* {text}" for text in SILENT)]
    lines += ["", *_suite()]
    lines += ["", "## Groups", "", "| `checks=` | confidence | kinds |", "| --- | --- | --- |"]
    for group, confidence in GROUPS.items():
        kinds = ", ".join(kind.name for kind in KINDS.values() if kind.check == group)
        lines.append(f"| {group} | {confidence} | {kinds} |")
    lines += ["", "## Kinds", "", "| kind | severity | meaning | what repairs it |", "| --- | --- | --- | --- |"]
    lines += [f"| {kind.name} | {kind.severity} | {kind.meaning} | {kind.fix} |" for kind in KINDS.values()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
