"""Layouts from the compiler against formulas written out by hand, a full evaluation, other code paths, and PTX."""

import numpy as np
import pytest
import tensor_layouts as tl
from cutlass import cute

from dsv4lib.dsl import layout_check, layouts, swizzle_probe
from dsv4lib.errors import ArgumentError
from tests.cases import cases

CHUNK = {"32B": 2, "64B": 4, "128B": 8}  # 16-byte chunks in a swizzle row


def k_major_bytes(rows: int, k: int, bits: int, swizzle: str) -> np.ndarray:
    """Byte address of every element of a K-major operand, from the hardware's rule and nothing else.

    The tile is cut into panels as wide as the swizzle, one panel after the other; inside a panel its rows follow each
    other, and a row's 16-byte chunk moves to chunk XOR (address bits 7 and up).
    """
    width = 16 if swizzle == "none" else int(swizzle[:-1])
    i, j = np.indices((rows, k))
    byte = j * bits // 8
    address = byte // width * (rows * width) + i * width + byte % width
    if swizzle == "none":
        return address
    chunk = address // 16 % CHUNK[swizzle]
    return address + 16 * ((chunk ^ (address // 128 % CHUNK[swizzle])) - chunk)


def mn_major_bytes(rows: int, k: int, bits: int, swizzle: str) -> np.ndarray:
    """The same for an MN-major operand with whole 128-byte runs: columns of k inside panels along the rows."""
    width = int(swizzle[:-1])
    i, j = np.indices((rows, k))
    byte = i * bits // 8
    address = byte // width * (k * width) + j * width + byte % width
    chunk = address // 16 % CHUNK[swizzle]
    return address + 16 * ((chunk ^ (address // 128 % CHUNK[swizzle])) - chunk)


MATRIX = [
    (rows, k, dtype, major, swizzle)
    for rows in (64, 128, 192, 256)
    for k in (32, 64, 96, 256)
    for dtype in layouts.DTYPES
    for major in ("K", "MN")
    for swizzle in layouts.SWIZZLES
    if rows * k * layouts.DTYPES[dtype].width // 8 <= layouts.SMEM_BYTES
    and k % (256 // layouts.DTYPES[dtype].width) == 0
    and not (dtype == "e2m1" and (major == "MN" or rows % 128))
    and swizzle in layouts.allowed_swizzles(rows, k, dtype, major)
]


def test_operand_matrix_against_tensor_layouts():
    cases = MATRIX[:: max(1, len(MATRIX) // 110)]
    assert len(cases) >= 100
    step = 5  # coprime to every power of two, so each residue of row and column comes up
    grids = {case: layouts.smem_operand(*case) for case in cases}
    wrong = [
        c for c, g in grids.items() if not np.array_equal(g.offsets[::step, ::step], layout_check.independent(g, step))
    ]
    assert wrong == []


@pytest.mark.parametrize("swizzle", layouts.SWIZZLES)
@pytest.mark.parametrize("dtype", list(layouts.DTYPES))
def test_k_major_is_the_hardware_rule(dtype, swizzle):
    bits = layouts.DTYPES[dtype].width
    grid = layouts.smem_operand(128, 2048 // bits, dtype, "K", swizzle)
    assert np.array_equal(grid.byte_addresses, k_major_bytes(128, 2048 // bits, bits, swizzle))


@pytest.mark.parametrize("swizzle", ["32B", "64B", "128B"])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "tf32"])
def test_mn_major_is_the_hardware_rule(dtype, swizzle):
    bits = layouts.DTYPES[dtype].width
    grid = layouts.smem_operand(256, 32, dtype, "MN", swizzle)
    assert np.array_equal(grid.byte_addresses, mn_major_bytes(256, 32, bits, swizzle))


def test_128_byte_swizzle_is_chunk_xor_row():
    grid = layouts.smem_operand(128, 64, "bf16", "K", "128B")
    i, j = np.indices((128, 64))
    assert np.array_equal(grid.offsets, i * 64 + ((j // 8) ^ (i % 8)) * 8 + j % 8)


@pytest.mark.parametrize(
    "case", [(128, 64, "bf16", "K"), (64, 64, "bf16", "MN"), (128, 32, "tf32", "MN"), (192, 32, "e4m3", "K")]
)
def test_additive_evaluation_is_the_compilers_own(case):
    """One row and one column summed, against the compiler's layout called at every coordinate."""
    rows, k, dtype, major = case
    grid = layouts.smem_operand(*case)
    kind = layouts.DTYPES[dtype]
    m, mma_k = layouts._instruction_m(rows), 256 // kind.width

    def build():
        mode = layouts.OperandMajorMode.K if major == "K" else layouts.OperandMajorMode.MN
        mma = layouts._tiled_mma(kind, m, 64, mode)
        outer = layouts.blackwell_helpers.make_smem_layout_a(mma, (rows, 64, k), kind, 1).outer
        return [[outer(((i % m, j % mma_k), i // m, j // mma_k, 0)) for j in range(k)] for i in range(rows)]

    linear = np.array(layouts._trace(build))
    assert np.array_equal(layouts.without_swizzle(grid).offsets, linear)
    bits, base, shift = grid.swizzle
    expected = layouts._trace(
        lambda: [
            [
                cute.make_composed_layout(cute.make_swizzle(bits, base, shift), 0, cute.make_layout(1 << 20))(x)
                for x in row
            ]
            for row in (linear * kind.width // 8)[:4].tolist()
        ]
    )
    assert np.array_equal(grid.byte_addresses[:4], np.array(expected))


@pytest.mark.parametrize("swizzle", ["32B", "64B", "128B"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_swizzle_is_what_the_compiled_store_does(dtype, swizzle):
    instructions = swizzle_probe.store_instructions(dtype, swizzle)
    grid = layouts.smem_operand(128, 128, dtype, "K", swizzle)
    assert swizzle_probe.swizzle_of(instructions) == grid.swizzle
    assert np.array_equal(swizzle_probe.store_addresses(grid, swizzle), grid.byte_addresses)


def test_the_printed_layout_is_not_the_hardwares():
    """What the compiler answers when its swizzled layout is called with element coordinates."""
    kind = layouts.tcgen05.SmemLayoutAtomKind.K_SW128

    def build():
        atom = layouts.tcgen05.make_smem_layout_atom(kind, layouts.cutlass.BFloat16)
        return cute.pretty_str(atom), [[atom((i, j)) for j in range(64)] for i in range(8)]

    text, called = layouts._trace(build)
    grid = layouts.smem_operand(128, 64)
    assert text == "S<3,4,3> o 0 o (8,64):(64,1)"
    assert np.array_equal(called, layouts.evaluate(text, element_bits=16).offsets)
    assert np.array_equal(grid.offsets[:8], layouts.evaluate(text, element_bits=16, byte_swizzle=True).offsets)
    assert (np.array(called) != grid.offsets[:8]).sum() == 256


def test_swizzle_of_refuses_other_code():
    with pytest.raises(ArgumentError, match="shr, and, xor"):
        swizzle_probe.swizzle_of(("add.s32 %r1, %r2, %r3;",))


@pytest.mark.parametrize(
    ("m", "n", "group", "rule"),
    [
        (128, 96, 1, lambda i, j, n: (i, j)),
        (64, 96, 1, lambda i, j, n: (32 * (i // 16) + i % 16, j)),
        (128, 96, 2, lambda i, j, n: (i + 64 * (j // (n // 2)), j % (n // 2))),
        (256, 96, 2, lambda i, j, n: (i, j)),
        (128, 512, 1, lambda i, j, n: (i, j)),
        (64, 512, 1, lambda i, j, n: (32 * (i // 16) + i % 16 + 16 * (j // 256), j % 256)),
    ],
)
def test_accumulator_addresses(m, n, group, rule):
    grid = layouts.tmem_accumulator(m, n, group)
    i, j = np.indices((m // group, n))
    lane, column = rule(i, j, n)
    assert np.array_equal(grid.offsets, lane << 16 | column)
    assert layout_check.mismatches(grid.offsets, grid) == 0
    assert np.unique(grid.offsets).size == grid.offsets.size


@pytest.mark.parametrize(("m", "group"), [(64, 1), (128, 1), (128, 2), (256, 2)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7])
def test_accumulators_of_several_mmas(m, group, count):
    if (m, group) == (64, 1) and count in (3, 7):
        with pytest.raises(ArgumentError, match="instruction_n=32"):
            layouts.tmem_accumulator(m, 32 * count, group, 32)
        return
    grid = layouts.tmem_accumulator(m, 32 * count, group, 32)
    assert layout_check.mismatches(grid.offsets, grid) == 0
    assert np.unique(grid.offsets).size == grid.offsets.size == m // group * 32 * count
    halves = 2 if m // group == 64 and (group == 2 or count > 1) else 1  # 64 rows fill all lanes with two halves of N
    assert (grid.offsets & 0xFFFF).max() + 1 == 32 * count // halves


COPIES = [
    (m, n, atom, repeat, group, store)
    for m, n, group in ((128, 64, 1), (64, 96, 1), (128, 64, 2), (256, 32, 2))
    for atom in layouts.TMEM_ATOMS
    for repeat in (None, 2)
    for store in (False, True)
    if not (atom == "32x32b" and m == 64)
]


@pytest.mark.parametrize("copy", cases(*COPIES[::3], full=[(copy,) for i, copy in enumerate(COPIES) if i % 3]), ids=str)
def test_thread_value_maps(copy):
    m, n, _, _, group, _ = copy
    tv = layouts.t2r_map(*copy)
    assert layout_check.mismatches_tv(tv) == 0
    addresses = layouts.tmem_accumulator(m, n, group).offsets[tv.rows, tv.columns]
    warp = np.arange(128)[:, None] // 32
    assert np.array_equal(addresses >> 16 >> 5, np.broadcast_to(warp, addresses.shape)), "a warp left its lane quarter"
    assert np.unique(addresses).size == addresses.size == (m // group) * n, "every element once"


def test_thread_value_maps_of_the_ptx_isa():
    """The register pictures of tcgen05.ld: 32x32b is lane by column; 16x256b is pairs of columns from rows 8 apart."""
    t, v = np.indices((128, 64))
    tv = layouts.t2r_map(128, 64, "32x32b", 8)
    assert np.array_equal(tv.rows, t) and np.array_equal(tv.columns, v)
    tv = layouts.t2r_map(64, 64, "16x256b", 4)
    t, v = np.indices((128, 32))
    assert np.array_equal(tv.rows, 16 * (t // 32) + t % 32 // 4 + 8 * (v // 2 % 2))
    assert np.array_equal(tv.columns, 8 * (v // 4) + 2 * (t % 4) + v % 2)


def test_additive_thread_value_map_is_the_compilers_own():
    tv = layouts.t2r_map(128, 64, "16x128b", 4)

    def build():
        op = layouts.tcgen05.Ld16x128bOp(layouts.tcgen05.Repetition.x4)
        tmem = layouts._accumulator(128, 64, 1, 64)[(None, None), 0, 0]
        copy = layouts.tcgen05.make_tmem_copy(cute.make_copy_atom(op, layouts.cutlass.Float32), tmem)
        parts = [copy.get_slice(t).partition_D(cute.make_identity_tensor((128, 64))) for t in (0, 37, 101, 127)]
        return [[layouts._ints(p[v]) for v in range(cute.size(p))] for p in parts]

    coords = np.array(layouts._trace(build))
    assert np.array_equal(coords[..., 0], tv.rows[[0, 37, 101, 127]])
    assert np.array_equal(coords[..., 1], tv.columns[[0, 37, 101, 127]])


@pytest.mark.parametrize(
    ("rows", "k", "tile_m", "tile_k", "dtype", "box"),
    [
        (300, 200, 128, 64, "bf16", (128, 64)),
        (130, 136, 64, 128, "bf16", (64, 64)),
        (77, 320, 128, 256, "e2m1", (128, 256)),
        (500, 48, 192, 32, "tf32", (192, 32)),
    ],
)
def test_tma_boxes_cover_the_tensor_once(rows, k, tile_m, tile_k, dtype, box):
    tiles = layouts.tma_tiles(rows, k, tile_m, tile_k, dtype)
    assert tiles.box == box
    per_tile = tile_k // box[1]
    assert tiles.coords.shape == (-(-rows // tile_m), -(-k // tile_k), per_tile, 2)
    i, j, b = np.indices(tiles.coords.shape[:3])
    assert np.array_equal(tiles.coords[..., 0], i * tile_m)
    assert np.array_equal(tiles.coords[..., 1], j * tile_k + b * box[1])


def test_free_layouts_against_tensor_layouts():
    texts = layout_check.random_texts(7, 150)
    assert any(text.startswith("S<") for text in texts) and any(text.startswith("(") for text in texts)
    for bits, byte_swizzle in ((16, False), (4, True)):
        grids = layouts.evaluate_all(texts, bits, byte_swizzle)
        assert {g.text: n for g in grids if (n := layout_check.mismatches(g.offsets, g))} == {}


def test_mismatches_finds_what_is_wrong():
    grid = layouts.smem_operand(128, 64)
    one = grid.offsets.copy()
    one[77, 13] += 1
    assert layout_check.mismatches(one, grid) == 1
    assert layout_check.mismatches(layouts.without_swizzle(grid).offsets, grid) == 7168  # all rows but each eighth
    assert layout_check.mismatches(grid.offsets.T, grid) == 128 * 128


def test_evaluate_known_layouts():
    assert layouts.evaluate("(4,8):(1,4)").offsets.tolist() == np.arange(32).reshape(8, 4).T.tolist()
    assert layouts.evaluate("(4,(2,2)):(2,(1,8))").offsets[1].tolist() == [2, 3, 10, 11]
    assert layouts.evaluate("6:2").offsets.tolist() == [[0, 2, 4, 6, 8, 10]]
    assert layouts.evaluate("((4,2),(4,2)):((4,32),(1,16))").offsets[5].tolist() == [36, 37, 38, 39, 52, 53, 54, 55]
    by_hand = np.arange(1024) ^ (np.arange(1024) >> 7 & 7) << 4
    assert np.array_equal(layouts.swizzle(3, 4, 3).offsets.ravel(), by_hand)


def test_composition():
    grid = layouts.compose("(8,8):(8,1)", "(4,4):(1,16)")
    base = np.arange(64).reshape(8, 8)
    assert np.array_equal(grid.offsets, base[:4, ::2])
    theirs = tl.compose(tl.Layout((8, 8), (8, 1)), tl.Layout((4, 4), (1, 16)))
    assert np.array_equal(grid.offsets, [[theirs(i, j) for j in range(4)] for i in range(4)])
    with pytest.raises(ArgumentError, match="b='\\(4,3\\):\\(1,4\\)'"):
        layouts.compose("(6,4):(1,8)", "(4,3):(1,4)")


NONSENSE = [
    *("", "8", "(8,8)", "(8,8):(8)", "(8,):(1,)", "a:b", "(8,8):(8,-1)", "((((8:1", "0:1", "(999999,99999):(1,1)"),
    *("8:1:1", "S<3,4> o 8:1", "S<9,4,9> o 0 o 8:1", "S<3,4,2> o 0 o 8:1", "(8 8):(1 1)", "__import__('os'):1"),
    *("(" * 300 + "8:1", None, 8, ["8:1"]),
]


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused_by_name(text):
    with pytest.raises(ArgumentError) as error:
        layouts.evaluate(text)
    assert error.value.name == "text" and error.value.value == text


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: layouts.smem_operand(100, 64), "rows"),
        (lambda: layouts.smem_operand(True, 64), "rows"),
        (lambda: layouts.smem_operand(128.0, 64), "rows"),
        (lambda: layouts.smem_operand(128, 40), "k"),
        (lambda: layouts.smem_operand(256, 512, "tf32"), "k"),
        (lambda: layouts.smem_operand(128, 32, swizzle="128B"), "swizzle"),
        (lambda: layouts.smem_operand(128, 64, "int4"), "dtype"),
        (lambda: layouts.smem_operand(128, 64, major="M"), "major"),
        (lambda: layouts.smem_operand(128, 256, "e2m1", "MN"), "major"),
        (lambda: layouts.tmem_accumulator(96, 64), "m"),
        (lambda: layouts.tmem_accumulator(128, 100), "n"),
        (lambda: layouts.tmem_accumulator(128, 1024), "n"),
        (lambda: layouts.tmem_accumulator(64, 64, 2), "m"),
        (lambda: layouts.tmem_accumulator(64, 264), "n"),
        (lambda: layouts.tmem_accumulator(64, 96, instruction_n=32), "instruction_n"),
        (lambda: layouts.tmem_accumulator(128, 128, instruction_n=512), "instruction_n"),
        (lambda: layouts.t2r_map(64, 64, "32x32b"), "atom"),
        (lambda: layouts.t2r_map(128, 64, "32x32b", 3), "repeat"),
        (lambda: layouts.t2r_map(128, 64, "32x32b", True), "repeat"),
        (lambda: layouts.t2r_map(128, 512), "n"),
        (lambda: layouts.tma_tiles(100, 7, 128, 64), "k"),
        (lambda: layouts.tma_tiles(0, 64, 128, 64), "rows"),
        (lambda: layouts.evaluate("8:1", element_bits=5), "element_bits"),
        (lambda: layouts.swizzle(3, 4, 2), "shift"),
        (lambda: layout_check.bank_conflicts(layouts.smem_operand(128, 64), lanes=64), "lanes"),
        (lambda: swizzle_probe.store_instructions("bf16", "16B"), "swizzle"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == name


@pytest.mark.parametrize("major", ["K", "MN"])
@pytest.mark.parametrize(("swizzle", "without"), [("none", 1), ("32B", 2), ("64B", 4), ("128B", 8)])
def test_bank_conflicts(swizzle, without, major):
    tile = layouts.smem_operand(128, 64, "bf16", major, swizzle)
    plain = layouts.without_swizzle(tile)
    assert layout_check.bank_conflicts(tile) == 1
    assert layout_check.bank_conflicts(plain) == without
    for grid, ways in ((tile, 1), (plain, without)):
        chunks = layout_check.chunk_accesses(grid, chunk=3)
        words = {w for address in chunks.tolist() for w in range(address // 4, address // 4 + 4)}
        assert max(np.bincount([w % 32 for w in words])) == ways


def test_bank_conflicts_of_a_row_major_tile():
    tile = layouts.evaluate("(32,64):(64,1)", element_bits=16)  # rows of 128 bytes
    assert layout_check.bank_conflicts(tile, lanes=8, chunk_bytes=16) == 8
    assert layout_check.bank_conflicts(tile, lanes=32, chunk_bytes=4) == 32
    padded = layouts.evaluate("(32,64):(72,1)", element_bits=16)  # one chunk of padding a row
    assert layout_check.bank_conflicts(padded) == 1


@pytest.mark.parametrize(
    ("text", "byte_swizzle", "ways"),
    [
        ("S<3,4,3> o 0 o (8,64):(64,1)", True, 1),  # what the hardware does
        ("S<3,4,3> o 0 o (8,64):(64,1)", False, 2),  # the printed layout called with element coordinates
        ("S<3,3,3> o 0 o (8,64):(64,1)", False, 1),  # the same XOR counted in 16-bit elements
        ("S<3,4,3> o 64 o (8,64):(64,1)", True, 1),
        ("(8,64):(64,1)", True, 8),
    ],
)
def test_bank_conflicts_in_either_unit(text, byte_swizzle, ways):
    grid = layouts.evaluate(text, 16, byte_swizzle)
    assert layout_check.bank_conflicts(grid) == ways
    chunks = layout_check.chunk_accesses(grid, chunk=2) // 16
    assert max(np.bincount(chunks % 8)) == ways


@pytest.mark.parametrize(
    ("rows", "k", "dtype", "major", "same"),
    [
        (128, 64, "bf16", "K", "128B"),
        (64, 32, "bf16", "K", "64B"),
        (192, 16, "bf16", "K", "32B"),
        (128, 96, "fp16", "MN", "128B"),
        (64, 32, "tf32", "MN", "128B/32B"),
        (128, 256, "e2m1", "K", "128B"),
    ],
)
def test_default_swizzle_is_the_compilers_choice(rows, k, dtype, major, same):
    default, named = layouts.smem_operand(rows, k, dtype, major), layouts.smem_operand(rows, k, dtype, major, same)
    assert default.text == named.text and np.array_equal(default.offsets, named.offsets)


def test_grids_cannot_be_written_and_are_cached():
    grid = layouts.smem_operand(128, 64)
    assert grid is layouts.smem_operand(128, 64)
    with pytest.raises(ValueError, match="read-only"):
        grid.offsets[0, 0] = 1
