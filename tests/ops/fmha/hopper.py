"""Run Hopper's attention in the emulator, or on a GPU, and compare with fp64 of what the entries hold."""

import torch

from dsv4lib import backends
from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.ops.fmha.inputs import Case, guards_written
from dsv4lib.ops.fmha.sm90.arguments import fake_args, launch_args
from dsv4lib.ops.fmha.sm90.kernel import DecodeFmha
from dsv4lib.ops.fmha.sm90.prefill.kernel import PrefillFmha
from dsv4lib.ops.fmha.work import KeyRows
from dsv4lib.pages.fmha.run_case import Native, judge, oracle, score_size
from tests.budget import built

ARCH = "sm_90a"
PLAIN = {"entries": "index", "window": True, "window_index": False, "sink": True}


def run(options: dict, one: Case, kind: type = DecodeFmha, native: bool = False, splits: int = 1, ctas: int = 1, **gpu):
    """An `Outcome`; of several splits what they add up to is judged."""
    options = PLAIN | options
    if kind in (DecodeFmha, PrefillFmha):
        made = kernel, code = built(kind, fake_args, ARCH, **options)
    else:
        kernel = kind(**options)
        made = kernel, code = kernel, compile_for(kernel, fake_args(kernel), ARCH)
    there = one.to("cuda" if native else "cpu")
    o, lse = there.outputs(splits if kernel.partial else None)
    entries = window = None
    if kernel.entries != "none":
        by_index = kernel.entries == "index"
        place = (there.index, None) if by_index else (None, there.first)
        entries = KeyRows(there.pool_pages, *place, there.count)
    if kernel.window:
        place = None, there.window_first
        if kernel.window_index:
            numbers = torch.arange(int(one.window_count.max()), device=there.q.device)
            place = (there.window_first[:, None] + numbers).int().contiguous(), None
        window = KeyRows(there.span_pages, *place, there.window_count)
    sink = there.sink if kernel.sink else None
    rope = (there.cos, there.sin) if kernel.inverse_rope else None
    args = launch_args(kernel, there.q, entries, window, sink, rope, o, lse, one.scale, splits, ctas=ctas)
    device, error = Native(), None
    if native:
        backends.launch("native", code.function, *args)
        torch.cuda.synchronize()
    else:
        device = make(ARCH, **{"checks": "race", **gpu})
        try:
            launch(code, *args, gpu=device)
        except EmulatorError as caught:
            error = caught
    ends = kernel.entries, kernel.window, kernel.sink, kernel.inverse_rope
    truth, peer = oracle(one, *ends), oracle(one, *ends, dtype=one.q.dtype)[0]
    if kernel.partial:
        o, lse = o.cpu(), lse.cpu()
        weights = torch.softmax(lse.double().nan_to_num(neginf=-1e30), 0)[..., None]
        whole = (o.double() * weights).sum(0).to(one.q.dtype), torch.logsumexp(lse.double(), 0).float()
        return judge(made, device, error, whole, peer, truth, (one,), score_size(one))
    outcome = judge(made, device, error, (o, lse), peer, truth, (one,), score_size(one))
    outcome.guards_written = guards_written(o, lse)
    return outcome
