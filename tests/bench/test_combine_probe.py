"""The probe of the combine: what its kernels compute, in the emulator; its times mean nothing there."""

import pytest

from dsv4lib import emulator
from dsv4lib.bench.probes import combine_probe


@pytest.fixture(scope="module")
def kernels():
    return combine_probe.compiled()


@pytest.mark.parametrize("splits", [2, 5, 9])
def test_a_pair(kernels, splits):
    """`check` itself refuses an O or LSE that is not the combine of what the writer writes."""
    writer, combines = kernels
    with emulator.device("sm_90a") as gpu:
        bench = combine_probe.Bench(splits, 1, 64, spin=10)
        bench.writer(writer)()
        for at_once, code in combines.items():
            bench.combine(at_once, code)()
            bench.check()
        assert not any(launch.result.hazards for launch in gpu.launches)


def test_a_wrong_combine_is_seen(kernels):
    writer, combines = kernels
    with emulator.device("sm_90a"):
        bench = combine_probe.Bench(3, 1, 64, spin=10)
        bench.writer(writer)()
        bench.parts[1, 0, 7, 40] += 1
        bench.combine(4, combines[4])()
        with pytest.raises(RuntimeError, match="combine of 3 splits"):
            bench.check()
        bench.combine(4, combines[4])()
        bench.o.zero_()
        with pytest.raises(RuntimeError, match="O is off"):
            bench.check()
