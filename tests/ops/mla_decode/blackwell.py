"""Run MLA decode's SM100 kernel in the emulator: any class in its place, splits, CTAs and schedule."""

from typing import NamedTuple

import torch

from dsv4lib.check import Tolerance, compare
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.ops.fmha import arguments as combining
from dsv4lib.ops.fmha.combine import Combine, loads_at_once
from dsv4lib.ops.mla_decode.arguments import ANY_NUMBER, fake_args, launch_args
from dsv4lib.ops.mla_decode.config import DTYPES, HEADS, LATENT
from dsv4lib.ops.mla_decode.op import BF16, E4M3, SM_SCALE, Call, MlaOutput
from dsv4lib.ops.mla_decode.sm100 import MlaDecode
from dsv4lib.reference import mla_decode as oracle
from tests.budget import built

ARCH = "sm_100a"
LSE_ERROR = 1e-4
GUARDS = 2  # heads after those of a request
FP8 = Tolerance(
    "P in e4m3",
    abs=1.0,
    rel=2.0**-3,
    cosine=1e-3,
    tile=5e-2,
    reason="P has 4 significant bits: at most 2^-4 of an element, 2.6 % RMS; cosine and tile as for e4m3. Elements are "
    "held to the sum of the largest errors of their P, see `over_bound`, not to their row",
)


class Found(NamedTuple):
    """What a run left: outputs, the oracle's, the comparison of O, largest error of the LSE, hazards, leaked rows.

    Attributes:
        over_bound: of FP8 queries, the largest error of an element over what roundings of P can make; else 0.
    """

    out: torch.Tensor
    lse: torch.Tensor
    want: MlaOutput
    record: object
    lse_error: float
    hazards: list
    leaked: int
    over_bound: float

    def reports(self):
        """By what a fault is found, in the words of `faults.CAUGHT_BY`."""
        found = {hazard.kind for hazard in self.hazards}
        if not self.record.passed or not self.lse_error < LSE_ERROR or self.over_bound > 1:
            found.add("wrong numbers")
        return found


def bound_of_fp8(one, scale, kv_scale):
    """Sum of P |V|, by the half of a step that E4M3 rounds P by at most, and the rounding of out to bf16."""
    bound = torch.zeros(*one.q_nope.shape, dtype=torch.float64)
    for b, length in enumerate(one.seq_lens.tolist()):
        if length > 0:
            kv = oracle.entries(one.kv_cache, one.page_table[b], length)
            q = torch.cat((one.q_nope[b].double(), one.q_pe[b].double()), -1)
            weights = (scale * q @ kv.T).softmax(-1)
            bound[b] = (2.0**-4 + 2.0**-8) * kv_scale * (weights @ kv[:, :LATENT].abs())
    return bound


def attend(
    one,
    kernel_type=MlaDecode,
    *,
    splits=1,
    ctas=ANY_NUMBER,
    combine_type=Combine,
    cluster=None,
    q_scale=1.0,
    kv_scale=1.0,
    schedule="round_robin",
):
    """Launch on outputs that lie between guard rows: a head before, `GUARDS` after those of each request."""
    batch, heads, _ = one.q_nope.shape
    dtype = one.q_nope.dtype
    wide = torch.full((batch, heads + 1 + GUARDS, LATENT), float("nan"), dtype=BF16 if dtype == E4M3 else dtype)
    wide_lse = torch.full((batch, heads + 1 + GUARDS), float("nan"))
    out, lse = wide[:, 1 : heads + 1], wide_lse[:, 1 : heads + 1]
    call = Call(*one, out, lse, None, SM_SCALE, q_scale, kv_scale, splits, "emulator")
    settings = {
        "dtype": DTYPES[one.kv_cache.dtype],
        "q_dtype": DTYPES[dtype],
        "out_dtype": DTYPES[out.dtype],
        "page_size": call.page_size,
    }
    settings |= {"cluster": 1 + (heads > HEADS) if cluster is None else cluster}
    gpu = device(ARCH, checks="race", schedule=schedule, seed=1)
    kernel, code = built(kernel_type, fake_args, ARCH, **settings, partial=splits > 1)
    written = MlaOutput(out, lse)
    if splits > 1:
        shape = splits, batch, heads
        written = MlaOutput(torch.full((*shape, LATENT), float("nan")), torch.full(shape, float("nan")))
    launch(code, *launch_args(kernel, call, *written, splits, ctas), gpu=gpu)
    if splits > 1:
        ends = {"head_dim": LATENT, "dtype": settings["out_dtype"], "sink": False}
        ends["at_once"] = loads_at_once(splits, batch * heads)
        kernel, code = built(combine_type, combining.fake_args, ARCH, **ends)
        launch(code, *combining.combine_args(kernel, *written, None, None, out, lse), gpu=gpu)
    want = oracle.mla_decode(*one, SM_SCALE, q_scale, kv_scale)
    record = compare(out, want.out, FP8 if dtype == E4M3 else None)
    apart = torch.where(want.lse == lse, 0.0, (want.lse - lse).abs())  # -inf is -inf
    guards = [0, *range(heads + 1, heads + 1 + GUARDS)]
    leaked = sum(int((~x[:, guards].isnan()).sum()) for x in (wide, wide_lse))
    over = 0.0
    if dtype == E4M3:
        bound = bound_of_fp8(one, call.logit_scale, kv_scale)
        over = float(((out.double() - want.out).abs() / bound).nan_to_num(nan=0.0, posinf=torch.inf).max())
    return Found(out, lse, want, record, float(apart.nan_to_num(torch.inf).max()), gpu.hazards, leaked, over)
