"""What touches global memory ahead of `griddepcontrol.wait`, over all paths."""

import pytest

from dsv4lib.emulator.ptx.dependent import ahead_of_wait, touches_global
from dsv4lib.emulator.ptx.parse import parse

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {
    .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p<2>;
"""


def early(body):
    (kernel,) = parse(HEAD + body + "\n ret;\n}").kernels.values()
    return [instr.text.split(" ")[0] for instr in ahead_of_wait(kernel)]


def test_behind_the_wait_everything_goes():
    body = "ld.param.b64 %rd1, [p]; griddepcontrol.wait; ld.global.b32 %r1, [%rd1]; st.global.b32 [%rd1], %r1;"
    assert early(body) == []
    assert early(body.replace("griddepcontrol.wait;", "")) == ["ld.global.b32", "st.global.b32"]
    assert early(body.replace("griddepcontrol.wait", "@%p1 griddepcontrol.wait")) != []  # some lanes may not


def test_one_path_without_a_wait_is_enough():
    body = """
    @%p1 bra OTHER;
    griddepcontrol.wait;
    bra JOIN;
    OTHER: {}
    JOIN: ld.global.nc.b32 %r1, [%rd1];
    LOOP: st.global.b32 [%rd1], %r1;
    @%p1 bra LOOP;"""
    assert early(body.format("griddepcontrol.wait;")) == []
    assert early(body.format("mov.b32 %r2, 0;")) == ["ld.global.nc.b32", "st.global.b32"]


@pytest.mark.parametrize(
    ("opcode", "touches"),
    [
        ("ld.b32", True),  # generic
        ("ld.relaxed.gpu.global.b32", True),
        ("atom.global.add.u32", True),
        ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32", False),
        ("cp.async.ca.shared.global", True),
        ("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes", True),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", True),
        ("cp.async.bulk.prefetch.tensor.2d.L2.global.tile", False),
        ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", False),
        ("cp.async.wait_all", False),
        ("ld.shared::cluster.b32", False),
        ("ld.param.b64", False),
        ("ld.const.b32", False),
        ("prefetch.param.tensormap", False),
        ("tcgen05.ld.sync.aligned.32x32b.x32.b32", False),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", False),
    ],
)
def test_what_touches_global_memory(opcode, touches):
    assert touches_global(opcode) == touches
