"""Injected faults that the end-to-end check cannot see, or in operators outside its path, one operator at a time.

Each check compares one operator with an oracle that is not ours: a module of transformers' DeepseekV4, or arithmetic on
Python fractions. It holds as the library is, and fails by a wide margin once the fault is injected.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dsv4lib.formats import fp8_block, kv_entry, mxfp4, paged, ue8m0
from dsv4lib.reference import fmha, mhc
from dsv4lib.reference import transformers_parity as tp

MARGIN = 3  # an injected fault must exceed the bound by this factor


@dataclass(frozen=True)
class Check:
    """An operator's deviation from its oracle, and how much of it rounding explains."""

    error: Callable[[], float]
    bound: float
    reason: str


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------------
# mHC coefficients: transformers' hyper-connection


@functools.cache
def sharp_site():
    """A site whose mixing matrix is sharp, so that 20 Sinkhorn steps have not converged and their order matters."""
    site = copy.deepcopy(tp.build_peer("tiny").model.model.layers[0].attn_hc)
    with torch.no_grad():
        site.scale[2] = 6.0
    return site


@torch.no_grad()
def mixing_error() -> float:
    site, streams = sharp_site(), normal(2, 37, 4, 72)
    post, comb, collapsed = site(streams)
    pre_w, post_w, c = mhc.coefficients(streams, site.fn, site.scale, site.base, iters=20, hc_eps=1e-6, rms_eps=1e-6)
    pairs = ((c, comb), (post_w, post), (mhc.pre(streams, pre_w), collapsed))
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def columns_first(original, logits, iters, eps):
    return original(logits.mT, iters, eps).mT


def five_iterations(original, logits, iters, eps):
    return original(logits, 5, eps)


def one_pair_more(original, logits, iters, eps):
    return original(logits, iters + 1, eps)


def rows_last(original, logits, iters, eps):
    c = original(logits, iters, eps)
    return c / (c.sum(-1, keepdim=True) + eps)


# ---------------------------------------------------------------------------------------------------------------------
# Attention as kernels compute it: index lists, and two branches merged; transformers' eager attention over the union


@functools.cache
def attention_case():
    """q [B, T, H, D], window and entries [B, S, D], picks [B, T, K] with -1, sinks [H], and transformers' output."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

    batch, length, heads, dim, window, entries = 2, 5, 6, 32, 11, 7
    q, kv = normal(batch, length, heads, dim, seed=1), normal(batch, window + entries, dim, seed=2)
    sink = normal(heads, seed=3)
    # A first row without entries, then one more pick per row: what early tokens of a sequence have.
    order = torch.rand(batch, length, entries, generator=torch.Generator().manual_seed(4)).argsort(-1)[..., :5]
    picks = torch.where(torch.arange(5) < torch.arange(length)[:, None], order, -1)
    seen = torch.cat((torch.ones(batch, length, window, dtype=torch.bool), tp.selection_mask(picks, entries)), dim=-1)
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf")).unsqueeze(1)
    module = SimpleNamespace(num_key_value_groups=heads, sinks=sink, training=False)
    keys = kv.unsqueeze(1)
    want, _ = eager_attention_forward(module, q.transpose(1, 2), keys, keys, mask, scaling=dim**-0.5)
    return q, kv, window, picks, sink, dim**-0.5, want


def sparse_error() -> float:
    q, kv, window, picks, sink, scale, want = attention_case()
    near = torch.arange(window).expand(*picks.shape[:2], window)
    indices = torch.cat((near, torch.where(picks < 0, -1, picks + window)), dim=-1)
    return (fmha.sparse(q, kv, indices, sink, scale)[0] - want).abs().max().item()


def merge_error() -> float:
    q, kv, window, picks, sink, scale, want = attention_case()
    everything = torch.ones(1, 1, window, dtype=torch.bool)
    o1, lse1 = fmha.attend(q, kv[:, :window], everything, None, scale)
    chosen = fmha.visible_from_indices(picks, kv.shape[1] - window)
    o2, lse2 = fmha.attend(q, kv[:, window:], chosen, None, scale)
    return (fmha.merge(o1, lse1, o2, lse2, sink) - want).abs().max().item()


def padding_is_row_zero(original, q, kv, indices, sink, scale):
    return original(q, kv, indices.clamp_min(0), sink, scale)


def sink_scales_window_branch(original, o1, lse1, o2, lse2, sink=None):
    return original(o1, lse1 + sink, o2, lse2, None)


def sink_in_both_branches(original, o1, lse1, o2, lse2, sink=None):
    with_sink = [torch.logaddexp(lse, sink) for lse in (lse1, lse2)]
    shrunk = [
        o * torch.exp(lse - all_)[..., None] for o, lse, all_ in zip((o1, o2), (lse1, lse2), with_sink, strict=True)
    ]
    return original(shrunk[0], with_sink[0], shrunk[1], with_sink[1], None)


def merge_without_sink(original, o1, lse1, o2, lse2, sink=None):
    return original(o1, lse1, o2, lse2, None)


# ---------------------------------------------------------------------------------------------------------------------
# Scales and pages: exact arithmetic and byte addresses


def exact_scale_byte(amax: float, floor: float, largest: int) -> int:
    """Byte of the smallest power of two >= max(amax, floor) / largest, by exact fractions."""
    target, exponent = Fraction(max(amax, floor)) / largest, -127
    while Fraction(2) ** exponent < target:
        exponent += 1
    return exponent + 127


def fp8_scale_error() -> float:
    x = normal(3, 5 * 64, seed=5) * torch.tensor([1.0, 300.0, 0.0])[:, None]
    got = fp8_block.quantize_activation(x, 64).scales
    amax = x.view(3, 5, 64).abs().amax(-1)
    # The floor as the fp32 number that the tensor is compared with.
    floor = torch.tensor(1e-4).item()
    want = [[exact_scale_byte(a, floor, 448) for a in row] for row in amax.tolist()]
    return (got.int() - torch.tensor(want)).abs().max().item()


def fp4_scale_error() -> float:
    x = normal(3, 5 * 32, seed=6) * torch.tensor([1.0, 1e-3, 0.0])[:, None]
    amax = x.view(3, 5, 32).abs().amax(-1)
    want = [[exact_scale_byte(a, 6 * 2.0**-126, 6) for a in row] for row in amax.tolist()]
    return (mxfp4.quantize(x).scales.int() - torch.tensor(want)).abs().max().item()


def nearest_power(original, x, divisor=1.0):
    return (torch.log2(x.double() / divisor).round().clamp(-127, 127) + 127).to(torch.uint8)


def bias_one_off(original, x, divisor=1.0):
    return original(x, divisor) - 1


def page_error() -> float:
    """Bytes of a page that are not where the format puts them: n * 576 data bytes, then n * 8 scale bytes."""
    size, slots = 5, torch.tensor([3, 0, 9, 6])
    pages = kv_entry.LAYOUT.allocate(2, size)
    entries = normal(len(slots), 512, seed=7)
    kv_entry.append(pages, size, slots, entries)
    data, scales = kv_entry.encode(entries)
    want = torch.zeros_like(pages)
    for i, index in enumerate(slots.tolist()):
        page, slot = divmod(index, size)
        want[page, slot * 576 : (slot + 1) * 576] = data[i]
        want[page, size * 576 + slot * 8 : size * 576 + (slot + 1) * 8] = scales[i]
    return (pages != want).sum().item()


def scales_next_to_their_token(original, self, pages, page_size):
    rows = pages[:, : page_size * self.entry_bytes].unflatten(1, (page_size, self.entry_bytes))
    return rows[..., : self.data_bytes], rows[..., self.data_bytes :]


MIXING = Check(mixing_error, 5e-6, "sums of 4 x 72 fp32 products of unit size, after a softmax")
SPARSE = Check(sparse_error, 2e-6, "fp32 softmax over 18 keys in another order")
MERGE = Check(merge_error, 2e-6, "fp32 softmax in two parts, one exponential more")
FP8_SCALE = Check(fp8_scale_error, 0.0, "bytes")
FP4_SCALE = Check(fp4_scale_error, 0.0, "bytes")
PAGE = Check(page_error, 0.0, "bytes")
CHECKS = {"mixing": MIXING, "sparse": SPARSE, "merge": MERGE, "fp8": FP8_SCALE, "fp4": FP4_SCALE, "page": PAGE}

# name, where, wrong function (the right one is its first argument) or value, who must notice
TRAPS: list[tuple[str, ModuleType | type, str, object, Check]] = [
    ("Sinkhorn: columns first", mhc, "sinkhorn", columns_first, MIXING),
    ("Sinkhorn: 5 iterations instead of 20", mhc, "sinkhorn", five_iterations, MIXING),
    ("Sinkhorn: 21 pairs", mhc, "sinkhorn", one_pair_more, MIXING),
    ("Sinkhorn: ends with rows", mhc, "sinkhorn", rows_last, MIXING),
    ("padding -1 reads row 0", fmha, "sparse", padding_is_row_zero, SPARSE),
    ("sink multiplies the window branch", fmha, "merge", sink_scales_window_branch, MERGE),
    ("sink in both branches", fmha, "merge", sink_in_both_branches, MERGE),
    ("merge without the sink", fmha, "merge", merge_without_sink, MERGE),
    ("FP8 scale: nearest power of two", ue8m0, "encode_ceil", nearest_power, FP8_SCALE),
    ("FP8 scale: exponent + 126", ue8m0, "encode_ceil", bias_one_off, FP8_SCALE),
    ("FP8 scale: no floor of 1e-4", fp8_block, "AMAX_FLOOR", 0.0, FP8_SCALE),
    ("FP4 scale: nearest power of two", ue8m0, "encode_ceil", nearest_power, FP4_SCALE),
    ("FP4 scale: the FP8 floor", mxfp4, "AMAX_FLOOR", 1e-4, FP4_SCALE),
    ("KV page: scales next to their token", paged.PageLayout, "views", scales_next_to_their_token, PAGE),
]


@pytest.mark.parametrize("name", CHECKS)
def test_without_a_fault_nothing_is_reported(name):
    assert CHECKS[name].error() <= CHECKS[name].bound, CHECKS[name].reason


@pytest.mark.parametrize(("name", "where", "attribute", "wrong", "check"), TRAPS, ids=[t[0] for t in TRAPS])
def test_fault_is_noticed(name, where, attribute, wrong, check, monkeypatch):
    if callable(wrong):
        right = getattr(where, attribute)
        # A plain function, not a partial: as an attribute of a class it has to become a method.
        injected = lambda *args, **kwargs: wrong(right, *args, **kwargs)  # noqa: E731
    else:
        injected = wrong
    monkeypatch.setattr(where, attribute, injected)
    error = check.error()
    print(f"{name:40} error {error:.1e}, bound {check.bound:.0e}")
    assert error > MARGIN * check.bound
