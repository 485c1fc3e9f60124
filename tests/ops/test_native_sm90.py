"""Kernels from the cache on a real GPU: the join of attention parts runs on any GPU, so a Hopper shows that path.

What a B200 will use is the same code: files of the cache turned into machine code, a launch on torch's stream, capture
in a CUDA graph. Only the attention kernel itself needs the B200.
"""

import json
import subprocess
import sys

import pytest
import torch

from dsv4lib import backends
from dsv4lib.ops.common.compile_cache import CompileCache, Counts
from dsv4lib.ops.fmha.arguments import combine_args, fake_args
from dsv4lib.ops.fmha.combine import Combine
from dsv4lib.reference import fmha as reference

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
SETTINGS = {"head_dim": 512, "sink": True}
SPLITS, TOKENS, HEADS = 5, 7, 33
TOLERANCE = 2.0**-8  # of the largest value: a rounding to bf16 is half of that


def get(folder):
    cache = CompileCache(folder)
    return cache, *cache.get(Combine, SETTINGS, fake_args, "sm_90a")


def tensors(seed):
    """(parts, lses, sink, o, lse) on the GPU; one part of token 0 is empty, all parts of token 1 are."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(SPLITS, TOKENS, HEADS, 512, generator=generator)
    lses = 3 * torch.randn(SPLITS, TOKENS, HEADS, generator=generator)
    lses[2, 0], lses[:, 1] = -float("inf"), -float("inf")
    parts[2, 0], parts[:, 1] = 0, 0
    sink = torch.randn(HEADS, generator=generator)
    o = torch.full((TOKENS, HEADS, 512), float("nan"), dtype=torch.bfloat16)
    return [x.cuda() for x in (parts, lses, sink, o, torch.full((TOKENS, HEADS), float("nan")))]


def check(parts, lses, sink, o, lse):
    """Against fp64."""
    parts, lses, sink, o, lse = (x.double().cpu() for x in (parts, lses, sink, o, lse))
    weights = reference.sink_softmax(lses.movedim(0, -1), sink).movedim(-1, 0)
    want, want_lse = (weights[..., None] * parts).sum(0), lses.logsumexp(0)
    assert float((o - want).abs().max()) <= TOLERANCE * float(want.abs().max())
    finite = want_lse.isfinite()
    assert torch.equal(lse[~finite], want_lse[~finite]) and float((lse - want_lse)[finite].abs().max()) < 1e-5


def test_compiled_and_from_disk(tmp_path):
    """The file gives the same bits as the compiler's own executable, in this process and in the next."""
    results = []
    for wanted in (Counts(compiled=1), Counts(from_disk=1)):
        cache, kernel, code = get(tmp_path)
        assert cache.counts == wanted
        given = tensors(1)
        args = combine_args(kernel, *given[:3], None, *given[3:], stream=torch.cuda.current_stream().cuda_stream)
        backends.launch("native", code, *args)
        check(*given)
        results.append(given[3].view(torch.int16).cpu())
    assert torch.equal(*results)
    script = (
        "import json, sys, pathlib, dataclasses; from tests.ops import test_native_sm90 as t; "
        "cache, kernel, code = t.get(pathlib.Path(sys.argv[1])); given = t.tensors(1); "
        "t.backends.launch('native', code, *t.combine_args(kernel, *given[:3], None, *given[3:])); t.check(*given); "
        "print(json.dumps(dataclasses.asdict(cache.counts)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {**vars(Counts()), "from_disk": 1}


def test_in_a_cuda_graph(tmp_path):
    """Captured once without a warm-up call, replayed on new numbers in the same memory."""
    _, kernel, code = get(tmp_path)
    given = tensors(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        backends.enqueue("native", code, *combine_args(kernel, *given[:3], None, *given[3:], stream=stream))
    assert bool(given[3].isnan().all())  # captured, not run
    for seed in (3, 4):
        for place, new in zip(given, tensors(seed), strict=True):
            place.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        check(*given)


def test_on_a_side_stream(tmp_path):
    """Queued after what the stream holds: numbers that arrive late on that stream are seen."""
    _, kernel, code = get(tmp_path)
    given, new = tensors(5), tensors(6)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        given[0].copy_(new[0])
        backends.enqueue("native", code, *combine_args(kernel, *given[:3], None, *given[3:], stream=side.cuda_stream))
    side.synchronize()
    check(*given)
