"""setmaxnreg takes from what the launch gave the CTA: what is there can be had, and more never comes."""

import subprocess

import numpy as np
import pytest

from dsv4lib.emulator.errors import Deadlock, HazardError
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.ptx import parse
from dsv4lib.emulator.units.register_pool import registers_at_entry
from tests.emulator.launching import HEADER, aligned, entry, launch
from tests.emulator.variants import ptxas

OLDER = HEADER.replace("9.1", "8.0").replace("sm_100a", "sm_90a")
ONE_CTA = ".maxntid 384 .minnctapersm 1"


def kernel(counts, directives=ONE_CTA):
    """Warpgroup i sets its registers to the i-th count, a positive one by inc, a negative one by dec; out: 1."""
    groups = "".join(
        f"G{i}: setp.ne.u32 %p1, %r2, {i}; @%p1 bra G{i + 1};"
        f"setmaxnreg.{'inc' if count > 0 else 'dec'}.sync.aligned.u32 {abs(count)};"
        for i, count in enumerate(counts)
    )
    body = f"""
    ld.param.b64 %rd1, [out]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 7; mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd1, %rd1, %rd3; {groups} G{len(counts)}: bar.sync 0; st.global.b32 [%rd1], 1;
    """
    return entry("u64 out", body).replace("\n{", f"\n{directives}\n{{", 1)


def run(counts, directives=ONE_CTA, threads=384, **options):
    out = aligned(threads, np.int32)
    launch(kernel(counts, directives), out, block=threads, **options)
    return bool((out == 1).all())


@pytest.mark.parametrize("schedule", POLICIES)
@pytest.mark.parametrize("counts", [(-24, 240, 240), (240, 240, -24), (224, -56, 224)])
def test_what_the_launch_gave_can_be_had(counts, schedule):
    assert run(counts, settings=Settings(schedule=schedule))


@pytest.mark.parametrize("schedule", POLICIES)
@pytest.mark.parametrize("counts", [(-32, 240, 240), (224, 224, -80), (176, -168, -168)])
def test_more_never_comes(counts, schedule):
    """A kernel wants 512 of an SM's registers a lane and has 504: so a GPU hangs, too."""
    with pytest.raises(Deadlock, match=r"setmaxnreg.inc \d+: \d+ more wanted; the launch gave 168 a thread"):
        run(counts, settings=Settings(schedule=schedule))


ENTRIES = [
    (ONE_CTA, (240,), 168),
    (".reqntid 32, 4, 3 .minnctapersm 1", (240, -24), 168),
    (ONE_CTA, (-24, 160), 160),  # no more than the largest count in the code
    (ONE_CTA, (160, 200), 168),
    (ONE_CTA, (-40,), 168),
    (".reqntid 256, 1, 1 .minnctapersm 2", (240,), 128),
    (".maxntid 480 .minnctapersm 1", (240,), 128),  # not 136: four warps of 15 lie in one quarter
    (".maxntid 160 .minnctapersm 2", (240,), 168),
    (".maxntid 100 .minnctapersm 5", (240,), 96),
    (".maxntid 128 .minnctapersm 1", (232,), 232),
    (".maxntid 384 .maxnreg 128", (240,), 128),
    (".maxnreg 128", (240,), 128),
    (".maxntid 384 .maxnreg 200 .minnctapersm 1", (240,), 168),
    (".maxntid 384", (240,), None),
    (".minnctapersm 1", (240,), None),
]


@pytest.mark.parametrize(("directives", "counts", "want"), ENTRIES)
def test_registers_at_entry(directives, counts, want):
    assert registers_at_entry(parse.parse(kernel(counts, directives)).kernels["k"]) == want


PTXAS = ptxas.find((12, 0))


@pytest.mark.skipif(PTXAS is None, reason="no ptxas of CUDA 12 or newer: in $PTXAS, with triton, or on the path")
@pytest.mark.parametrize(("directives", "counts", "want"), ENTRIES)
def test_registers_at_entry_are_those_of_ptxas(directives, counts, want, tmp_path):
    (tmp_path / "k.ptx").write_text(kernel(counts, directives).replace(HEADER, OLDER))
    command = [PTXAS, "-v", "-arch=sm_90a", str(tmp_path / "k.ptx"), "-o", str(tmp_path / "k.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True).stderr
    assert ("'setmaxnreg' ignored" in said) == (want is None)
    assert want is None or f"Used {want} registers" in said, said


def test_ptxas_ignores_it_where_the_count_at_entry_is_unknown():
    assert run((256, 256, 256), ".maxntid 384")


def test_a_count_above_what_the_warp_has_is_no_release():
    with pytest.raises(HazardError, match="setmaxnreg.dec 176: the warp has 168 registers a thread"):
        run((-176,))


def test_less_than_there_is_asks_for_nothing():
    assert run((160, 176, -160), ".maxntid 384 .maxnreg 168")
