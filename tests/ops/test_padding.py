"""Padded rows of a batch: whatever a length, slot, position or id below 0 stands for is neither read nor written.

Serving engines pad batches for CUDA graphs. Each case runs an op on five rows of which the second and fourth are real;
the others hold NaN, numbers outside of every table and one of three paddings each. The real rows must have the bits of
a call without the others; the padded ones the result that the op documents, or the memory's old contents.
"""

import importlib
from pathlib import Path

import pytest
import torch

import dsv4lib.ops
from dsv4lib.formats import indexer_key, kv_entry, turbo4
from dsv4lib.ops.common.plans import Op
from dsv4lib.ops.compressor.op import Batch, Pages, compressor
from dsv4lib.ops.embedding.op import embedding
from dsv4lib.ops.fmha import op as attention
from dsv4lib.ops.fmha.inputs import case as attention_case
from dsv4lib.ops.fmha.inputs import paged
from dsv4lib.ops.indexer_logits.inputs import case as logits_case
from dsv4lib.ops.indexer_logits.op import Visible, indexer_logits
from dsv4lib.ops.indexer_q.op import IndexerQueries, indexer_q
from dsv4lib.ops.inv_rope_quant.op import inv_rope_quant
from dsv4lib.ops.kv_append.op import kv_append
from dsv4lib.ops.kv_gather.op import kv_gather
from dsv4lib.ops.mla_decode.inputs import case as latent_case
from dsv4lib.ops.mla_decode.op import MlaOutput, mla_decode
from dsv4lib.ops.mla_page_table.op import mla_page_table
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.moe_dispatch.op import moe_dispatch
from dsv4lib.ops.qnorm_rope_kv.op import qnorm_rope_kv
from dsv4lib.ops.quantize.op import quantize, quantize_indexer_keys, quantize_kv_entries
from dsv4lib.ops.router.op import Hashed, router
from dsv4lib.ops.topk.op import Paged, topk
from dsv4lib.ops.turbo4_decode.op import Attention, turbo4_decode
from dsv4lib.ops.turbo4_encode.op import turbo4_encode
from dsv4lib.pages.mla.page_table import slots_of
from dsv4lib.pages.turbo4.run_case import case as turbo4_case
from tests.ops.compressor import cases as compressor_cases
from tests.ops.router.test_op import FACTOR, TABLE, WEIGHT, E, K

pytestmark = pytest.mark.filterwarnings("error:the emulator reports")  # of hazards

T, REAL, PADDED = 5, [1, 3], [0, 2, 4]
LEAST, LEAST_64 = -(2**31), -(2**63)
LENGTHS, SLOTS, POSITIONS = (0, -1, LEAST), (-1, -7, LEAST), (-1, LEAST, LEAST_64)
NOWHERE = 1 << 30  # a row that no pool has: who reads it is stopped by the emulator
NAN = float("nan")

# Arguments of ops that say which rows, how many, or where; all others are data.
NAMES = set("entries_first entries_count index window_first window_count groups batch_requests batch_slots".split())
NAMES |= set(
    "positions requests slots_indices indices row_of experts hashed_tokens lengths rows offsets counts".split()
)
NAMES |= {"visible_requests", "visible_lengths", "tokens", "starts", "seq_lens"}
# The offsets and counts of its groups come from `moe_dispatch` and are never negative: rows there are not a batch's.
EXEMPT = {"moe_gemm": {"offsets", "counts"}}
CASES = {}


def covers(op, *arguments):
    """A case of an op, which says the arguments that it pads: (back end) -> pairs of what is found and wanted."""

    def register(function):
        CASES[function.__name__] = op, set(arguments), function
        return function

    return register


def spread(real, *padding):
    """[5, ..]: the rows of ``real`` in their places, one padding (or the same) in each of the others."""
    wide = real.new_empty(T, *real.shape[1:])
    wide[REAL] = real
    for row, value in zip(PADDED, padding * (3 // len(padding)), strict=True):
        wide[row] = value
    return wide


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare_attention(backend, one, arguments, padded, real=REAL):
    """``fmha`` with padded tokens against the op on the others alone; empty rows are zeros and -inf."""
    shared = {"sink": one.sink, "scale": one.scale, "backend": backend}
    wanted = attention.fmha(one.q, **arguments, **shared)
    o, lse = torch.full((T, *one.q.shape[1:]), NAN).to(one.q.dtype), torch.full((T, one.q.shape[1]), NAN)
    attention.fmha(spread(one.q, NAN), **padded, **shared, o=o, lse=lse)
    empty = [row for row in range(T) if row not in real]
    return (
        *zip((o[real], lse[real]), wanted, strict=True),
        (o[empty], torch.zeros_like(o[empty])),
        (lse[empty], torch.full_like(lse[empty], -float("inf"))),
    )


def angles(one):
    return {"rope": (one.cos, one.sin)}, {"rope": tuple(spread(x, NAN) for x in (one.cos, one.sin))}


def compare_lists(backend, one, splits):
    pool, span, count = one.pool, one.span, spread(one.count, *LENGTHS)
    count[REAL[1]] = -100  # a real token whose entries alone are padding
    holes = torch.where(one.index < 0, -77, one.index)
    if one.pool_pages is not None:
        pool, span = (attention.Fp8Pages(*x) for x in (one.pool_pages, one.span_pages))
    rope, padded_rope = angles(one)
    real = {
        "entries": attention.Selected(pool, one.index, one.count),
        "window": attention.Rows(span, one.window_first, one.window_count),
    }
    padded = {
        "entries": attention.Selected(pool, spread(holes, NOWHERE), count),
        "window": attention.Rows(span, spread(one.window_first, NOWHERE), spread(one.window_count, *LENGTHS[::-1])),
    }
    return compare_attention(
        backend, one, {**real, **rope, "splits": splits}, {**padded, **padded_rope, "splits": splits}
    )


@covers("fmha", "index", "entries_count", "window_first", "window_count")
def attention_by_index(backend):
    return compare_lists(backend, attention_case(4, [70, 0], [20, 100]), 1)


@covers("fmha", "index", "entries_count", "window_first", "window_count")
def attention_in_parts(backend):
    return compare_lists(backend, attention_case(4, [70, 0], [20, 100]), 3)


@covers("fmha", "index", "entries_count", "window_first", "window_count")
def attention_over_fp8_pages(backend):
    return compare_lists(backend, paged(attention_case(4, [70, 0], [20, 100]), 7), 1)


@covers("fmha", "entries_first", "entries_count", "window_first", "window_count", "groups")
def attention_in_groups(backend):
    """Padded tokens in a group with a real one, and in one of their own; groups without tokens."""
    one = attention_case(4, [70, 0], [20, 100])
    groups = torch.tensor([[0, 2], [NOWHERE, 0], [2, 2], [-1, -1], [4, 1], [LEAST, LEAST]]).int()
    most = 70
    real = {
        "entries": attention.Rows(one.pool, one.first, one.count, most),
        "window": attention.Rows(one.span, one.window_first, one.window_count),
        "groups": torch.tensor([[0, 1], [1, 1]]).int(),
    }
    first, count = spread(one.first, NOWHERE), spread(one.count, *LENGTHS)
    count[REAL[1]] = -100
    window = spread(one.window_first, NOWHERE), spread(one.window_count, *LENGTHS[::-1])
    window[0][[0, 2]] = one.window_first  # where their neighbours' keys are
    padded = {
        "entries": attention.Rows(one.pool, first, count, most),
        "window": attention.Rows(one.span, *window),
        "groups": groups,
    }
    rope, padded_rope = angles(one)
    return compare_attention(backend, one, {**real, **rope}, {**padded, **padded_rope})


@covers("fmha", "window_first", "window_count")
def attention_over_rings(backend):
    """Padded requests of tokens, and rings without keys."""
    one = attention_case(4, [0, 0], [0, 0])
    rings = torch.full((4, 128, 512), NAN).bfloat16()
    rings[2, :90], rings[0] = normal(90, 512).bfloat16(), normal(128, 512, seed=1).bfloat16()
    lens = torch.tensor([128, LEAST, 90, -1]).int()
    ids = torch.tensor([2, 0]).int()
    real = {"window": attention.Ring(rings, ids, lens)}
    padded = {"window": attention.Ring(rings, spread(ids, -1, 3, LEAST), lens)}
    return compare_attention(backend, one, real, padded)


def garbage(*requests):
    """A table: real requests, before, between and after them some without rows, or without a position or place."""
    none = [(NOWHERE, 0, 3, 0), (-1, -1, -1, -1), (LEAST, LEAST, LEAST, LEAST), (0, -5, NOWHERE, NOWHERE)]
    first, *others = requests
    return torch.tensor([*none, first, *none[::-1], *others, *none]).int()


def append(backend, first, second):
    """Two requests of so many rows; one without a position and one without a place have rows between, of NaN."""
    counts = torch.tensor([first, 2, 2, second])
    starts = (0, *counts.cumsum(0).tolist())
    kv = normal(starts[-1] + 3, 512).bfloat16()
    kv[first : first + 4] = NAN
    table = garbage((0, first, 7, 2), (starts[1], 2, -1, 1), (starts[2], 2, 5, -1), (starts[3], second, 3, 0))
    rings = torch.full((3, 16, 512), 7.0).bfloat16()
    wanted = rings.clone()
    kv_append(kv, rings, table, backend=backend)
    for row, count, start, place in ((0, first, 7, 2), (starts[3], second, 3, 0)):
        for i in range(count):
            wanted[place, (start + i) % 16] = kv[row + i]
    return ((rings, wanted),)


@covers("kv_append", "requests")
def append_by_row(backend):
    return append(backend, 3, 2)


@covers("kv_append", "requests")
def append_by_slot(backend):
    return append(backend, 290, 20)


@covers("kv_gather", "indices")
def gather(backend):
    pages = kv_entry.LAYOUT.allocate(3, 4).fill_(0xFF)
    kv_entry.append(pages, 4, torch.tensor([6, 1]), normal(2, 512))
    indices = torch.tensor([6, 1]).int()
    found = kv_gather(pages, 4, spread(indices, *SLOTS), out=torch.full((T, 512), NAN).bfloat16(), backend=backend)
    return ((found, spread(kv_gather(pages, 4, indices, backend=backend), 0.0)),)


def turning():
    """A table of angles whose last row is that of angle 0, and two of its positions."""
    x = 6 * torch.rand(7, 32, generator=torch.Generator().manual_seed(0))
    x[6] = 0.0
    return torch.cat((x.cos(), x.sin()), -1), torch.tensor([5, 2])


@covers("qnorm_rope_kv", "positions", "slots_indices")
def queries_and_entries(backend):
    """A negative slot drops an entry and so does a negative position; queries of padded rows are not turned."""
    table, positions = turning()
    q, kv, pages = normal(T, 3, 512).bfloat16(), spread(normal(2, 512), NAN).bfloat16(), kv_entry.LAYOUT.allocate(2, 3)
    pages.fill_(0xA5)
    wanted_pages, indices = pages.clone(), torch.tensor([4, 1]).int()
    given = spread(positions, *POSITIONS), table, pages, 3, spread(indices, 2, LEAST, -1)
    found = qnorm_rope_kv(q, kv, *given, backend=backend)
    there = spread(positions, 6), table, wanted_pages, 3, spread(indices, -1)
    wanted = qnorm_rope_kv(q, kv, *there, backend=backend)
    return (found, wanted), (pages, wanted_pages)


@covers("indexer_q", "positions")
def indexer_queries(backend):
    table, positions = turning()
    q, weights = normal(T, 3, 128).bfloat16(), normal(T, 3)
    return zip(
        *(indexer_q(q, weights, spread(positions, *fill), table, backend=backend) for fill in (POSITIONS, (6,))),
        strict=True,
    )


@covers("inv_rope_quant", "positions")
def attention_outputs(backend):
    table, positions = turning()
    o = normal(T, 3, 512).bfloat16()
    return zip(
        *(inv_rope_quant(o, spread(positions, *fill), table, backend=backend) for fill in (POSITIONS, (6,))),
        strict=True,
    )


def compress(backend, one, padded):
    """What ``padded`` leaves in entries and state against ``one``, which is the same without padding."""
    found = []
    for given in (one, padded):
        pages, state = torch.full((9, one.dim), 7.0), type(one.state)(*(x.clone() for x in one.state))
        options = {"eps": compressor_cases.EPS, "backend": backend}
        compressor(given.kv, given.gate, given.weights, given.batch, state, Pages(pages, 3, "fp32"), **options)
        found.append((pages, *state))
    return zip(*reversed(found), strict=True)


@covers("compressor", "batch_requests", "batch_slots")
def compress_chunks(backend):
    one = compressor_cases.make(4, [5, 6], [3, 5], drop=(0,))
    table, slots = one.batch.requests, one.batch.slots
    lowest = torch.where(slots < 0, LEAST, slots)
    return compress(backend, one, one._replace(batch=Batch(garbage(*table.tolist()), lowest)))


def step(backend, running):
    """A decode step of two requests, one of which closes a window, in a batch of five."""
    rate = 128 if running else 32
    one = compressor_cases.make(rate, [1, 1], [rate - 1, rate // 2], running=running, single=True)
    (a, b), slots = one.batch.requests.tolist(), one.batch.slots
    table = [(NOWHERE, 0, 3, 0), [1, *a[1:]], (LEAST,) * 4, [3, *b[1:]], (4, 1, 5, -1)]
    kv, gate = (spread(x, NAN) for x in (one.kv, one.gate))
    batch = Batch(torch.tensor(table).int(), spread(slots, *SLOTS), True)
    return compress(backend, one, one._replace(kv=kv.contiguous(), gate=gate.contiguous(), batch=batch))


@covers("compressor", "batch_requests", "batch_slots")
def compress_a_step(backend):
    return step(backend, False)


@covers("compressor", "batch_requests", "batch_slots")
def compress_a_step_of_running_state(backend):
    return step(backend, True)


def pick(backend, size, k):
    scores, lengths = normal(2, size), torch.tensor([min(size, 300), 20]).int()
    scores[1, 20:] = NAN
    out = torch.full((T, k), 77).int()
    found = topk(spread(scores, NAN), k, spread(lengths, *LENGTHS), out=out, backend=backend)
    real = topk(scores.nan_to_num(-9.0), k, lengths, backend="reference")
    return ((found, spread(real, -1)),)


def logits(backend, requests, lengths):
    """Padded by one of both; weights of padded tokens are NaN, their other argument is a real one's."""
    made = logits_case("fp8", [1, 0], [70, 33])
    wanted = torch.full((2, 128), 7.0)
    indexer_logits(*made[:3], out=wanted, backend=backend)
    codes, weights = torch.full((T, 64, 128), 0x7F, dtype=torch.uint8), torch.full((T, 64), NAN)
    codes[REAL], weights[REAL] = made.queries.codes, made.queries.weights
    seen = Visible(made.visible.table, spread(made.visible.requests, *requests), spread(made.visible.lengths, *lengths))
    found = torch.full((T, 128), 7.0)
    indexer_logits(IndexerQueries(codes, None, weights), made.keys, seen, out=found, backend=backend)
    return (found[REAL], wanted), (found[PADDED], torch.full((3, 128), 7.0))


@covers("indexer_logits", "visible_lengths")
def logits_without_entries(backend):
    return logits(backend, (0, 1, 1), LENGTHS)


@covers("indexer_logits", "visible_requests")
def logits_of_no_request(backend):
    return logits(backend, SLOTS, (128, 128, 128))


@covers("topk", "lengths")
def picks(backend):
    return pick(backend, 705, 50)


@covers("topk", "lengths")
def picks_of_short_rows(backend):
    return pick(backend, 40, 50)


@covers("topk", "lengths")
def picks_of_a_cluster(backend):
    return pick(backend, 2304, 50)


@covers("topk", "lengths")
def picks_of_a_stream(backend):
    return pick(backend, 33_000, 50)


@covers("topk", "requests")
def picks_in_pages_of_no_request(backend):
    """Rows of scores whose request has no pages, and another one's length."""
    scores, table = torch.randn(2, 70), torch.tensor([[3, 0, 9], [5, 7, 2]], dtype=torch.int32)
    requests, lengths = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([70, 33], dtype=torch.int32)
    wanted = topk(scores, 20, lengths, pages=Paged(table, requests, 32), backend=backend)
    paged = Paged(table, spread(requests, *SLOTS), 32)
    found = topk(spread(scores, 1.0), 20, spread(lengths, 0, 5, 70), pages=paged, backend=backend)
    return (found[REAL], wanted), (found[PADDED], torch.full((3, 20), -1, dtype=torch.int32))


def route(backend, *given):
    ids = torch.tensor([9, 4])
    tokens = spread(ids, -1, len(TABLE), LEAST_64)
    out = torch.full((T, K), 77).int(), torch.full((T, K), NAN)
    options = {"k": K, "factor": FACTOR, "backend": backend}
    router(spread(given[0], NAN), *given[1:], hashed=Hashed(TABLE, tokens), out=out, **options)
    experts, weights = router(*given, hashed=Hashed(TABLE, ids), **options)
    return (out[0], spread(experts, -1)), (out[1], spread(weights, 0.0))


@covers("router", "hashed_tokens")
def routes_of_logits(backend):
    return route(backend, normal(2, E))


@covers("router", "hashed_tokens")
def routes_of_x(backend):
    return route(backend, normal(2, WEIGHT.shape[1]).bfloat16(), WEIGHT)


@covers("moe_dispatch", "experts")
def rows_of_experts(backend):
    experts, weights = TABLE[[2, 8]].int(), torch.rand(2, K)
    wanted = moe_dispatch(experts, weights, count=E, align=8, backend=backend)
    rows, part = len(wanted.rows), spread(experts, -1, E, LEAST)
    found = moe_dispatch(part, spread(weights, NAN), count=E, align=8, backend=backend)
    renamed = torch.where(wanted.rows < 0, -1, torch.tensor(REAL)[wanted.rows.clamp_min(0).long()]).int()
    assert bool((found.rows[rows:] == -1).all()) and not found.row_weight[rows:].any()
    return (
        (found.counts, wanted.counts),
        (found.offsets, wanted.offsets),
        (found.rows[:rows], renamed),
        (found.row_of, spread(wanted.row_of, -1)),
        (found.row_weight[:rows], wanted.row_weight),
    )


@covers("moe_combine", "row_of")
def sums_of_experts(backend):
    y, row_of, weights = normal(8, 64).bfloat16(), torch.tensor([[3, 0], [5, -1]]).int(), torch.rand(2, 2)
    y[[1, 2, 4, 6, 7]] = NAN
    wanted = moe_combine(y, row_of, weights, backend=backend)
    found = moe_combine(y, spread(row_of, -1, 8, LEAST), spread(weights, NAN), backend=backend)
    return ((found, spread(wanted, 0.0)),)


@covers("quantize_kv_entries", "slots_indices")
def entries_into_pages(backend):
    return into_pages(backend, quantize_kv_entries, kv_entry.LAYOUT, 512)


@covers("quantize_indexer_keys", "slots_indices")
def keys_into_pages(backend):
    return into_pages(backend, quantize_indexer_keys, indexer_key.FP4_LAYOUT, 128)


def into_pages(backend, op, layout, dim):
    x, indices, found = normal(2, dim).bfloat16(), torch.tensor([7, 2]).int(), []
    for given in ((x, indices), (spread(x, NAN), spread(indices, *SLOTS))):
        found.append(layout.allocate(3, 4).fill_(0xA5))
        op(given[0], found[-1], 4, given[1], backend=backend)
    return (found[::-1],)


@covers("turbo4_encode", "indices")
def vectors_into_pages(backend):
    x, indices, found = normal(2, 3, 64).bfloat16(), torch.tensor([7, 2]).int(), []
    for given in ((x, indices), (spread(x, NAN), spread(indices, *SLOTS))):
        found.append(torch.full((3, 3, turbo4.layout(64).page_bytes(4)), 0xA5, dtype=torch.uint8))
        turbo4_encode(given[0], found[-1], 4, given[1], backend=backend)
    return (found[::-1],)


def page_tables(backend, **padding):
    """Rows of a table that are padded by one argument, the others being a real row's; counts of the check."""
    slots = slots_of([90, 40], 16, 100, seed=1)
    real = {"requests": [1, 0], "lengths": [40, 58], "starts": [0, 32]}
    real = {name: torch.tensor(x).int() for name, x in real.items()}
    padded = {name: spread(x, *padding.get(name, (int(x[1]),))) for name, x in real.items()}
    found = []
    for given, rows in ((real, 2), (padded, T)):
        out, misaligned = torch.full((rows, 7), 77).int(), torch.full((rows, 2), 77).int()
        mla_page_table(slots, page_size=16, **given, out=out, misaligned=misaligned, backend=backend)
        found.append((out, misaligned))
    (wanted, counts), (out, misaligned) = found
    nothing = torch.tensor([0, 2**31 - 1]).int()
    return (out, spread(wanted, 77)), (misaligned, spread(counts, nothing))


@covers("mla_page_table", "requests")
def page_tables_of_no_request(backend):
    return page_tables(backend, requests=SLOTS)


@covers("mla_page_table", "lengths")
def page_tables_of_no_tokens(backend):
    return page_tables(backend, lengths=LENGTHS)


@covers("mla_page_table", "starts")
def page_tables_from_nowhere(backend):
    return page_tables(backend, starts=SLOTS)


def attend_to_4_bits(backend, splits):
    """Requests of no length: their tables name no page, their queries are NaN."""
    one = turbo4_case([20, 37], 4, 2, 64, page_size=16)
    options = {"splits": splits, "backend": backend}
    wanted = turbo4_decode(one.q, *one.caches, 16, one.block_table, one.lengths, **options)
    out = Attention(torch.full((T, 4, 64), NAN).bfloat16(), torch.full((T, 4), NAN))
    given = spread(one.q, NAN), *one.caches, 16, spread(one.block_table, NOWHERE), spread(one.lengths, *LENGTHS)
    turbo4_decode(*given, **options, out=out)
    return (out.o, spread(wanted.o, 0.0)), (out.lse, spread(wanted.lse, -float("inf")))


@covers("turbo4_decode", "lengths")
def attention_to_4_bits(backend):
    return attend_to_4_bits(backend, 1)


@covers("turbo4_decode", "lengths")
def attention_to_4_bits_in_splits(backend):
    return attend_to_4_bits(backend, 2)


def attend_to_latents(backend, splits):
    """Requests of no length: their tables name no page, their queries are NaN; so are unused (ends of) pages."""
    one = latent_case([20, 150], 4, 16, past=NOWHERE)
    options = {"num_kv_splits": splits, "backend": backend}
    wanted = mla_decode(*one, **options)
    out = MlaOutput(torch.full((T, 4, 512), NAN).bfloat16(), torch.full((T, 4), NAN))
    queries = spread(one.q_nope, NAN), spread(one.q_pe, NAN)
    given = *queries, one.kv_cache, spread(one.seq_lens, *LENGTHS), spread(one.page_table, NOWHERE)
    mla_decode(*given, **options, out=out.out, lse=out.lse)
    return (out.out, spread(wanted.out, 0.0)), (out.lse, spread(wanted.lse, -float("inf")))


@covers("mla_decode", "seq_lens")
def attention_to_latents(backend):
    return attend_to_latents(backend, 1)


@covers("mla_decode", "seq_lens")
def attention_to_latents_in_splits(backend):
    return attend_to_latents(backend, 2)


@covers("embedding", "tokens")
def rows_of_the_embedding(backend):
    weight, tokens = normal(9, 64).bfloat16(), torch.tensor([8, 3])
    weight[[0, 4]] = NAN
    wanted = embedding(tokens, weight, keep=True, backend=backend)
    found = embedding(spread(tokens, -1, LEAST, LEAST_64), weight, keep=True, backend=backend)
    return [(f[REAL], w) for f, w in zip(found, wanted, strict=True)] + [
        (f[PADDED], torch.zeros_like(f[PADDED])) for f in found
    ]


@covers("quantize", "rows")
def quantized_rows(backend):
    x = normal(4, 64).bfloat16()
    x[[0, 3]] = NAN
    rows = torch.tensor([2, 1]).int()
    wanted = quantize(x, "mxfp4", rows=rows, backend=backend)
    found = quantize(x, "mxfp4", rows=spread(rows, *SLOTS), backend=backend)
    return ((found.codes[REAL], wanted.codes), (found.codes[PADDED], torch.zeros_like(found.codes[PADDED])))


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_padded_rows_are_neither_read_nor_written(name, backend):
    _, _, run = CASES[name]
    for i, (found, wanted) in enumerate(run(backend)):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype, i
        same = (found == wanted) | (found.isnan() & wanted.isnan()) if found.is_floating_point() else found == wanted
        assert bool(same.all()), (i, (~same).nonzero()[:5].tolist())


def test_every_op_that_takes_rows_or_places_has_a_case():
    """By the names of its schema: a new op with such an argument, or a new argument, needs a case above."""
    covered, needed = {}, {}
    for op, arguments, _ in CASES.values():
        covered[op] = covered.get(op, set()) | arguments
    for path in sorted(Path(dsv4lib.ops.__path__[0]).glob("*/op.py")):
        for value in vars(importlib.import_module(f"dsv4lib.ops.{path.parent.name}.op")).values():
            if isinstance(found := getattr(value, "op", None), Op):
                schema, name = found._opoverload._schema, found._name
                given = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
                needed[name] = (given & NAMES) - EXEMPT.get(name, set())
    assert {name for name, arguments in needed.items() if arguments} == set(covered)
    assert {name: needed[name] - covered[name] for name in covered if needed[name] - covered[name]} == {}
