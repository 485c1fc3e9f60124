"""NaN and Inf in a key reach the tokens that see it and no other, where tokens share the tiles that hold it."""

import dataclasses

import pytest
import torch

from dsv4lib import emulator
from dsv4lib.ops.fmha.inputs import case, paged
from dsv4lib.ops.fmha.op import Fp8Pages, Rows, fmha
from dsv4lib.ops.fmha.window import token_groups
from tests.cases import cases

NAN, INF = float("nan"), float("inf")


def attend(one, pool, span, entries, checks="default", **options):
    """(o, lse): tokens t of ``one`` see entries t .. t + 69, if ``entries``, and window rows t + 3 .. t + 102."""
    first = torch.arange(len(one.q)).int()
    rows = Rows(pool, first, torch.full_like(first, 70), 70) if entries else None
    window = Rows(span, first + 3, torch.full_like(first, 100))
    options |= {"sink": one.sink, "scale": one.scale, "backend": "emulator"}
    groups = token_groups([len(one.q)], one.q.shape[1], 2 if one.q.shape[2] > 64 else 1)
    with emulator.device("sm_100a", shims=False, checks=checks) as gpu:
        out = fmha(one.q, rows, window, groups=groups, **options)
        assert [x.message for launch in gpu.launches for x in launch.result.hazards] == []
    return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "fp8", "bad"),
    cases((64, 512, "bf16", True, NAN), (20, 64, "fp16", False, INF), full=[(32, 512, "bf16", False, NAN)]),
    ids=["584-byte entries", "one CTA", "pair"],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_bad_key_reaches_those_who_see_it(heads, head_dim, dtype, fp8, bad):
    """The last token of a group alone sees the last entry and the last window row; the others keep their bits."""
    tokens = 128 // heads if head_dim > 64 else 3
    one = case(heads, [70] * tokens, [100] * tokens, head_dim=head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    pool, span = (torch.randn(n + tokens, head_dim, generator=generator).to(one.q.dtype) for n in (69, 102))
    found = {}
    for name, entries in (("none", True), ("entry", True), ("window", True), ("window alone", False), ("alone", False)):
        keys = [pool.clone(), span.clone()]
        if name == "entry":
            keys[0][tokens + 68, 17] = bad
        elif name.startswith("window"):
            keys[1][tokens + 101, head_dim - 3] = bad
        if fp8:
            held = paged(dataclasses.replace(one, pool=keys[0], span=keys[1], index=torch.zeros_like(one.index)), 7)
            keys = [Fp8Pages(*x) for x in (held.pool_pages, held.span_pages)]
        found[name] = attend(one, *keys, entries, "race" if name == "entry" else "default")
    for name, (o, lse) in found.items():
        clean = found["alone" if "alone" in name else "none"]
        assert torch.equal(o[:-1], clean[0][:-1]) and torch.equal(lse[:-1], clean[1][:-1]), name
        assert bool(o[-1].isnan().any()) is (name not in ("none", "alone")), name
        assert bool(clean[0].isfinite().all())
