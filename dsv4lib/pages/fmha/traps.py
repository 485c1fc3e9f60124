"""List traps that cost days on attention kernels. How each looks, what catches it, where that is shown and tested.

A trap is shown in the notebook of its stage, injected where code can; a test checks that every
fault, gate and test named here exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.viz.table import show_table


@dataclass(frozen=True)
class Trap:
    """One fault.

    Attributes:
        fault: what is wrong; looks: how it looks from outside; catch: what finds it.
        stage: whose notebook shows it.
        classes: names of classes of `ops.fmha.faults` that make it; gates: metrics of the stage that turn red.
        tests: as file::name, a parameter in brackets.
    """

    fault: str
    looks: str
    catch: str
    stage: str
    tests: tuple[str, ...]
    classes: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()


_FMHA = "tests/ops/fmha/test_faults.py"


def _found(*names: str) -> tuple[str, ...]:
    return tuple(f"{_FMHA}::test_found[{name}]" for name in names)


def _refused(*names: str) -> tuple[str, ...]:
    return tuple(f"{_FMHA}::test_refused[{name}]" for name in names)


TRAPS = (
    Trap(
        "the partition of a TMA copy is sliced with the tile mode pinned",
        "every KV tile is tile 0; cosine 0.7 to 0.9, no NaN, right with one tile",
        "trace of boxes: some are loaded again, the others never",
        "fmha_a",
        _found("PinnedTile"),
        ("PinnedTile",),
        ("boxes_never_loaded",),
    ),
    Trap(
        "the product's K is the instruction's or a chunk's, not the head dimension",
        "part of every dot product; right at a head dimension of 64",
        "trace: bytes that were loaded and never read; the error map at head dimension 128",
        "fmha_a",
        (*_found("HalfProduct"), "tests/ops/fmha/test_ladder.py::test_head_dimensions_and_types"),
        ("HalfProduct",),
        ("error_over_torch",),
    ),
    Trap(
        "P is stored at a column offset that the second MMA's descriptor lacks",
        "NaN, zeros, or numbers of another launch",
        "the emulator: read of columns that were never written",
        "fmha_b",
        _found("ShiftedWeights"),
        ("ShiftedWeights",),
    ),
    Trap(
        "the first P V accumulates",
        "about 50 % error; right in a fresh process",
        "the emulator: accumulation onto uninitialised tensor memory",
        "fmha_b",
        _found("FirstAccumulates"),
        ("FirstAccumulates",),
    ),
    Trap(
        "P is handed over without waiting for the asynchronous stores",
        "NaN now and then",
        "the emulator: missing tcgen05.wait::st, with both lines",
        "fmha_b",
        _found("NoStoreWait"),
        ("NoStoreWait",),
    ),
    Trap(
        "an allocation that is no power of two, or a footprint used as a place",
        "two operands overlap",
        "the compiler refuses the first; the emulator reports the race of the second",
        "fmha_b",
        (*_refused("OddAllocation"), *_found("OverlappingO")),
        ("OddAllocation", "OverlappingO"),
    ),
    Trap(
        "a 16-bit element type on a store atom for 32-bit cells of tensor memory",
        "an illegal access",
        "the compiler refuses it with the Python line; in PTX the emulator stops at cells that do not exist",
        "fmha_b",
        (
            *_refused("NarrowStore"),
            "tests/emulator/checks/test_kinds.py::test_impossible_accesses_stop_with_their_place",
        ),
        ("NarrowStore",),
    ),
    Trap(
        "V in the memory order that DLPack reports",
        "silently transposed",
        "shapes that are not square",
        "fmha_b",
        (*_found("TransposedV"), "tests/ops/fmha/test_ladder.py::test_numbers"),
        ("TransposedV",),
        ("error_over_torch",),
    ),
    Trap(
        "a Python loop around pipeline operations",
        "the code grows with the tiles, compilation takes minutes to hours",
        "a limit on the instructions of its PTX, and code that does not depend on the number of tiles",
        "fmha_b",
        (
            f"{_FMHA}::test_unrolled_code_grows_with_the_tiles",
            "tests/ops/fmha/test_ladder.py::test_what_the_compiler_says",
        ),
        ("UnrolledTiles",),
        ("ptx_instructions",),
    ),
    Trap(
        "square test shapes",
        "transposes and swapped extents stay hidden",
        "every test matrix has extents that differ and are no multiples of a tile",
        "fmha_b",
        ("tests/lab/test_traps.py::test_shapes_of_the_tests_are_awkward",),
    ),
    Trap(
        "load and store atoms of tensor memory whose maps of threads and columns differ",
        "a round trip that should change nothing costs 3 %",
        "trace of tensor memory: a cell loaded by one thread and stored by another",
        "fmha_c",
        (*_found("CrossedAtoms"), "tests/emulator/test_round_trips.py::test_cells_of_another_thread"),
        ("CrossedAtoms",),
        ("rel_l2_all_lengths",),
    ),
    Trap(
        "a reduction over the whole fragment used as the maximum of a row",
        "wrong only when rows differ in scale",
        "rows of very different scale",
        "fmha_c",
        _found("OneMaximum"),
        ("OneMaximum",),
        ("error_over_torch",),
    ),
    Trap(
        "a variable first set inside one dynamic `if` and read in another",
        "a trace error, or garbage",
        "the compiler of this version refuses it with the Python line",
        "fmha_c",
        _refused("LateVariable"),
        ("LateVariable",),
    ),
    Trap(
        "softmax parts merged over slices of the head dimension",
        "mathematically wrong; only slices of the keys merge",
        "fp64: the merged parts against the whole",
        "fmha_d1",
        (
            "tests/reference/test_fmha.py::test_merge_equals_the_union",
            "tests/reference/test_fmha.py::test_slices_of_the_head_dimension_do_not_merge",
        ),
        (),
        ("merge_by_keys",),
    ),
    Trap(
        "cosine as the verdict",
        "0.97 looks fine and is broken",
        "the comparator: absolute or relative error of each element, NaN and Inf sets, cosine and the worst tile",
        "fmha_d3",
        ("tests/check/test_comparator.py::test_a_fine_cosine_is_not_a_pass",),
    ),
)


def show(stage: str) -> None:
    """Show the traps of a stage as a table."""
    rows = [(t.fault, t.looks, t.catch, ", ".join(t.classes)) for t in TRAPS if t.stage == stage]
    show_table(("trap", "how it looks", "what catches it", "shown as"), rows)
