"""The probe of launches: what its kernels compute and note, in the emulator; its times mean nothing there."""

import pytest

from dsv4lib import emulator
from dsv4lib.bench.probes import launch_probe


@pytest.fixture(scope="module")
def kernels():
    return launch_probe.compiled()


@pytest.fixture
def small(monkeypatch):
    for name, value in (("FLUSH_BYTES", 4096), ("REPLAYS", 1), ("FIRST", 0), ("NODES", 1)):
        monkeypatch.setattr(launch_probe, name, value)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("cluster", "pdl", "prefetch", "variant"),
    [(1, True, True, "lanes"), (2, True, False, "lanes"), (2, False, True, "lanes")]
    + [(1, True, True, "elected"), (2, True, True, "whole"), (1, True, True, "three")],
)
def test_a_graph_of_pairs(small, kernels, cluster, pdl, prefetch, variant):
    """`measure` itself refuses an O that is not made of what `before` wrote."""
    before, after = kernels
    with emulator.device("sm_90a") as gpu:
        bench = launch_probe.Bench(2, cluster)
        codes, flags = (before[True, None], after[pdl, prefetch, cluster, variant]), (pdl, True, prefetch, variant, 0)
        row = bench.measure(codes, 10, False, flags)
        assert not any(launch.result.hazards for launch in gpu.launches)
        marks = bench.after.tolist()
    assert (row.l2, row.ctas, row.pdl, row.prefetch) == ("warm", 2 * cluster, pdl, prefetch)
    assert all(0 < m[0] < m[1] < m[2] < m[3] < m[4] < m[7] and m[3] < m[5] < m[7] and m[3] < m[6] for m in marks)


def test_what_the_kernel_before_did_not_write_is_seen(small, kernels):
    before, after = kernels
    with emulator.device("sm_90a"):
        bench = launch_probe.Bench(1, 1)
        bench.measure((before[True, None], after[True, True, 1, "lanes"]), 10, False, (True, True, True, "lanes", 0))
        bench._check()
        bench.o[0, 5, 7] = 3.0  # of a CTA that came too early
        with pytest.raises(RuntimeError, match="had not written"):
            bench._check()


def test_the_set_up_is_that_of_attention(kernels):
    from dsv4lib.dsl.compile import compile_for
    from dsv4lib.ops.fmha import arguments
    from dsv4lib.ops.fmha.sm100 import Fmha

    real = Fmha()
    code = compile_for(real, arguments.fake_args(real))
    probe = kernels[1][True, True, 1, "lanes"]
    assert probe.smem_bytes == code.smem_bytes and probe.threads == code.threads
    assert len(real.barriers()) == launch_probe.BARRIERS
