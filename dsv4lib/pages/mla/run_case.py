"""Run the ops of paged MLA, with a fault if wanted, and compare with fp64; for notebook and stage."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.check import Comparison, compare
from dsv4lib.ops.mla_decode import faults as decode_faults
from dsv4lib.ops.mla_decode import launch as blackwell
from dsv4lib.ops.mla_decode import op as decode_op
from dsv4lib.ops.mla_decode.inputs import Case, case
from dsv4lib.ops.mla_decode.sm100 import MlaDecode
from dsv4lib.ops.mla_decode.splits import pad_page_table
from dsv4lib.ops.mla_page_table import op as table_op
from dsv4lib.ops.mla_page_table.faults import FAULTS as TABLE_FAULTS
from dsv4lib.ops.mla_page_table.kernel import MlaPageTable
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.mla.page_table import slots_of, text_example
from dsv4lib.reference import mla_decode as oracle

ARCH = "sm_100a"  # that is emulated
DECODE_FAULTS = {
    name: decode_faults.FAULTS[name]
    for name in ("NaturalExponent", "NoRotatedKeys", "EveryTokenCounts", "AlwaysOverwrites", "ColumnOfTile")
}
RACES = {"ValuesTooEarly": decode_faults.FAULTS["ValuesTooEarly"]}  # that only the race detector sees
OWN_FAULTS = (  # of this page
    "TextsReduction",  # `combined`
    "TextsSplits",  # `figures.choice`
    "StaleTable",  # `serving.serve`
    "KeysNotStored",
    "ScaleOfLatents",  # `absorption`
    "AlignedExample",  # `claims.table`
    "NoCheck",  # `troubleshooting.table`
    "LostTest",  # `rows.table`
    "Harmless",  # `kernel_faults`
)
PAGE_OF_TABLES = 16
TOKENS = 60, 33, 1, 77  # of the requests of `tables`
IDS, STARTS = (3, -1, 0, 1), (16, 0, 0, 0)


class Tables(NamedTuple):
    """Result of `mla_page_table`.

    Attributes:
        slots: int32 [R, W], the map. table: int32 [B, N], as found. mismatches: entries that are not the definition's.
        misaligned: tokens of the text's example that its check counts. hazards: of the launches.
    """

    slots: Tensor
    table: Tensor
    mismatches: int
    misaligned: int
    hazards: int


def tables(backend: str, seed: int, fault: str = "none") -> Tables:
    """Make page tables of four rows, one padded and one from token 16 on; check the example of a public text."""
    where = backends.device(backend)
    slots = slots_of(TOKENS, PAGE_OF_TABLES, 80, seed)
    ids, starts = torch.tensor(IDS).int(), torch.tensor(STARTS).int()
    lengths = torch.tensor([TOKENS[i] if i >= 0 else 9 for i in IDS]).int() - starts
    example, found, count = text_example(), [], torch.zeros(1, 2).int().to(where)
    given = [x.to(where) for x in (slots, ids, lengths)]

    def run() -> None:
        found.append(table_op.mla_page_table(*given, PAGE_OF_TABLES, starts=starts.to(where), backend=backend))
        table_op.mla_page_table(*(x.to(where) for x in example), 128, misaligned=count, backend=backend)

    with backends.emulating(ARCH):
        kernel = TABLE_FAULTS.get(fault, MlaPageTable)
        hazards = injected.run(backend, run, (table_op, "MlaPageTable", kernel))
    want = torch.full_like(found[0].cpu(), -1)
    for row, (request, start, length) in enumerate(zip(IDS, STARTS, lengths.tolist(), strict=True)):
        for token in range(0, length if request >= 0 else 0, PAGE_OF_TABLES):
            want[row, token // PAGE_OF_TABLES] = slots[request, start + token] // PAGE_OF_TABLES
    table = found[0].cpu()
    return Tables(slots, table, int((table != want).sum()), int(count[0, 0]), hazards)


class Absorbed(NamedTuple):
    """Attention of many heads and what is left of it once W_UK and W_UV are absorbed.

    Attributes:
        error: largest difference of the two outputs, relative to the largest output. heads: H.
    """

    error: float
    heads: int


def absorption(
    heads: int, tokens: int, seed: int, nope: int = 128, latent: int = 512, rope: int = 64, fault: str = "none"
) -> Absorbed:
    """Attend once with keys and values of every head, once with latents alone, in fp64.

    ``fault``: "ScaleOfLatents" scales logits by the dims of the absorbed query, not by those of a head's.
    """
    generator = torch.Generator().manual_seed(seed)

    def normals(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    c, r, q, q_pe = normals(tokens, latent), normals(tokens, rope), normals(heads, nope), normals(heads, rope)
    w_uk, w_uv = normals(heads, nope, latent) / latent**0.5, normals(heads, nope, latent) / latent**0.5
    scale = (nope + rope) ** -0.5
    keys, values = torch.einsum("tl,hnl->htn", c, w_uk), torch.einsum("tl,hnl->htn", c, w_uv)
    logits = scale * (torch.einsum("hn,htn->ht", q, keys) + q_pe @ r.T)
    whole = torch.einsum("ht,htn->hn", logits.softmax(-1), values)
    q_nope = torch.einsum("hn,hnl->hl", q, w_uk)  # absorbed: 512 dims
    given = q_nope[None], q_pe[None], torch.cat((c, r), -1)[None]
    used = (latent + rope) ** -0.5 if fault == "ScaleOfLatents" else scale
    o = oracle.mla_decode(*given, torch.tensor([tokens]).int(), torch.zeros(1, 1).int(), used).out[0]
    back = torch.einsum("hl,hnl->hn", o.double(), w_uv)
    return Absorbed(float((back - whole).abs().max() / whole.abs().max()), heads)


class Attended(NamedTuple):
    """Output of `mla_decode`.

    Attributes:
        out, lse: found. want: of the oracle, fp64. record: comparison of out. lse_error: largest, of rows with tokens.
        hazards: of the launches.
    """

    out: Tensor
    lse: Tensor
    want: oracle.MlaOutput
    record: Comparison
    lse_error: float
    hazards: int


def requests(length: int, heads: int, page: int, seed: int) -> Case:
    """Make two requests, of ``length`` and a third of it, and a padded row between them."""
    return case([length, 0, max(1, length // 3)], heads, page, seed=seed)


def attend(one: Case, backend: str, splits: int = 1, fault: str = "none") -> Attended:
    """Run `mla_decode`; ``fault``: one of `DECODE_FAULTS` or `RACES`, or "none"."""
    found: list[Tensor] = []
    given = one.to(backends.device(backend))
    with backends.emulating(ARCH):
        hazards = injected.run(
            backend,
            lambda: found.extend(decode_op.mla_decode(*given, num_kv_splits=splits, backend=backend)),
            (blackwell, "MlaDecode", (DECODE_FAULTS | RACES).get(fault, MlaDecode)),
        )
    out, lse = (x.cpu() for x in found)
    want = oracle.mla_decode(*one, decode_op.SM_SCALE)
    apart = torch.where(want.lse == lse, 0.0, (want.lse - lse).abs())  # -inf is -inf
    return Attended(out, lse, want, compare(out, want.out), float(apart.max()), hazards)


def error_over_torch(one: Case, found: Attended) -> float:
    """RMS error of out over that of torch's attention in the same type, rows with tokens alone."""
    errors, ours = [], []
    for b, length in enumerate(one.seq_lens.tolist()):
        if length > 0:
            entries = oracle.entries(one.kv_cache, one.page_table[b], length).to(one.q_nope.dtype)
            q = torch.cat((one.q_nope[b], one.q_pe[b]), -1)
            given = q[:, None], entries.expand(len(q), -1, -1), entries[:, :512].expand(len(q), -1, -1)
            o = torch.nn.functional.scaled_dot_product_attention(*given, scale=decode_op.SM_SCALE)[:, 0]
            errors.append((o.double() - found.want.out[b]).square().mean())
            ours.append((found.out[b].double() - found.want.out[b]).square().mean())
    return float((torch.stack(ours).mean() / torch.stack(errors).mean()).sqrt())


def combine(outs: Tensor, lses: Tensor, texts: bool = False) -> Tensor:
    """Combine outputs of splits [S, .., D] by their LSE [S, ..].

        lse = max + ln sum_i exp(lse_i - max)          out = sum_i exp(lse_i - lse) out_i

    Args:
        outs, lses: of the splits, rows with tokens. texts: divide by exp(max) alone, as a public text says.
    """
    highest = lses.amax(0)
    total = highest if texts else highest + (lses - highest).exp().sum(0).log()
    return ((lses - total).exp()[..., None] * outs).sum(0)


def combined(one: Case, whole: Attended, backend: str, fault: str = "none") -> float:
    """Attend to each half of the pages, combine, and compare with attention to all, relative to its largest output."""
    page, pages = one.kv_cache.shape[1], int(-(-one.seq_lens.max() // one.kv_cache.shape[1]))
    half = pages // 2
    first = one._replace(seq_lens=one.seq_lens.clamp(max=half * page))
    rest = pad_page_table(one.page_table[:, half:].contiguous(), page)
    second = one._replace(seq_lens=one.seq_lens - half * page, page_table=rest)
    parts = [attend(part, backend) for part in (first, second)]
    rows = one.seq_lens > 0
    outs = torch.stack([part.out[rows].double() for part in parts])
    found = combine(outs, torch.stack([part.lse[rows].double() for part in parts]), fault == "TextsReduction")
    return float((found - whole.out[rows].double()).abs().max() / whole.out[rows].double().abs().max())


class Found(NamedTuple):
    """An injected fault: where, its name, what shows it, and whether the page's gates do."""

    place: str
    name: str
    shown: str
    seen: bool


def kernel_faults(backend: str, fault: str = "none") -> list[Found]:
    """Run every fault of the kernels on a small case; ``fault`` "Harmless": as one of them the kernel as it is."""
    found = []
    for name in TABLE_FAULTS:
        one = tables(backend, 0, name)
        seen = one.mismatches > 0 or one.misaligned != 300
        shown = f"{one.mismatches} entries differ; {one.misaligned} of 300 misaligned tokens are found"
        found.append(Found("mla_page_table", name, shown, seen))
    one = requests(70, 4, 16, 3)
    for name in (*DECODE_FAULTS, *(["Harmless"] if fault == "Harmless" else [])):
        ratio = error_over_torch(one, attend(one, backend, fault=name))
        found.append(Found("mla_decode", name, f"error {ratio:.1f} times torch's", not ratio <= 2))
    return found
