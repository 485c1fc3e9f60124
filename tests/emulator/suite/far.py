"""Faults around global memory: races between CTAs, scopes, devices, dependent launches, fences, ends of tensors."""

from __future__ import annotations

from tests.emulator.suite.common import BULK, FENCE, INIT, RAISE, STORE, handed_over, poll, wait
from tests.emulator.suite.harness import Case

USE = "st.global.b32 [%rd5], %r20;\n"
RELEASE, ACQUIRE = RAISE.format("release.gpu"), poll("ld.acquire.gpu.global.b32")
READ = FENCE + "bar.sync 0;\n@!%p2 bra END;\n" + STORE + " [%rd1], [%r2], 256; //!\ncp.async.bulk.commit_group;\n"
LOAD = f"@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;\n@%p2 {BULK} [%r2], [%rd1], 256, [%r8];"
# Two devices: the first stores a word and raises the flag, the second waits and reads. %rd1 is the second's on both.
ALONE = "@!%p2 bra END;\n"
SEND = ALONE + "st.global.b32 [%rd1+64], 7; //!\n{}st.{}.global.b32 [%rd4], 1;{}\nEND:\n"
TAKE = ALONE + "L: ld.{}.global.b32 %r40, [%rd4];{}\nsetp.eq.u32 %p10, %r40, 0;\n@%p10 bra L;\n{}"
TAKE += "ld.global.b32 %r20, [%rd1+64]; //!\nst.global.b32 [%rd5], %r20;\nEND:\n"
RIGHT = TAKE.format("acquire.sys", "", "")
OWN, EARLY = "st.global.b32 [%rd2], %r0; //!\n", "griddepcontrol.wait;\n"
MAP = (
    "mov.b64 %rd6, map;\ncvta.param.u64 %rd6, %rd6;\n@%p2 mbarrier.init.shared.b64 [%r8], 1;\nbar.sync 0;\n"
    "mov.u32 %r14, 0;\n"
)

CASES = {
    "warp and warp": Case(
        "race_global", "st.global.b32 [%rd2], %r0; //!\n<<||bar.sync 0;\n>>ld.global.b32 %r20, [%rd3]; //!\n" + USE
    ),
    "halves of one word": Case(
        "race_global",
        "cvt.u16.u32 %h1, %r0;\n@%p2 st.global.b16 [%rd4], %h1; //!\nsetp.eq.u32 %p5, %r0, 32;\n"
        "@%p5 st.global.b16 [%rd4<<||+2>>], %h1; //!\n",
    ),
    "a generic address": Case(
        "race_global", "st.b32 [%rd2], %r0; //!\n<<||bar.sync 0;\n>>ld.b32 %r20, [%rd3]; //!\n" + USE
    ),
    "two CTAs write a word": Case(
        "race_global", "<<||@%p4 >>st.global.b32 [%rd2], %r10; //!\n", grid=2
    ),
    "two CTAs write the same value": Case(
        "race_global_same_value", "<<||@%p4 >>st.global.b32 [%rd2], 7; //!\n", grid=2
    ),
    "no flag": Case("race_global", handed_over("", "<<||bar.sync 0;\n" + RELEASE + ">>", "<<||" + ACQUIRE
        + ">>"), grid=2),
    "a flag for one warp alone": Case("race_global", handed_over("<<||bar.sync 0;\n>>", RELEASE, ACQUIRE), grid=2),
    "one thread looks at the flag": Case(
        "race_global",
        handed_over("bar.sync 0;\n", RELEASE, "@!%p2 bra ON;\n" + ACQUIRE + "ON:\n<<||bar.sync 0;\n>>"),
        grid=2,
    ),
    "a relaxed store of the flag": Case(
        "race_global",
        handed_over("bar.sync 0;\n", "@%p2 st.<<relaxed||release>>.gpu.global.b32 [%rd4], 1;\n", ACQUIRE),
        grid=2,
    ),
    "a volatile store of the flag": Case(
        "race_global",
        handed_over("bar.sync 0;\n", "<<||membar.gl;\n>>@%p2 st.volatile.global.b32 [%rd4], 1;\n", ACQUIRE),
        grid=2,
    ),
    "a relaxed load of the flag": Case(
        "race_global",
        handed_over("bar.sync 0;\n", RELEASE, poll("ld.<<relaxed||acquire>>.gpu.global.b32")),
        grid=2,
    ),
    "a fence before the data": Case(
        "race_global",
        "<<fence.acq_rel.gpu;\n||>>"
        + handed_over("<<||fence.acq_rel.gpu;\n>>bar.sync 0;\n", RAISE.format("relaxed.gpu"), ACQUIRE),
        grid=2,
    ),
    "the flag before the data": Case(
        "race_global",
        "@!%p4 bra OTHER;\n<<" + RELEASE + "||>>st.global.b32 [%rd2], %r0; //!\n<<||bar.sync 0;\n" + RELEASE
        + ">>bra END;\nOTHER: " + ACQUIRE + "ld.global.b32 %r20, [%rd3]; //!\n" + USE + "END:\n",
        grid=2,
    ),
    "a counter that does not release": Case(
        "race_global",
        handed_over("bar.sync 0;\n", "@%p2 red.<<||release.gpu.>>global.add.u32 [%rd4], 1;\n", ACQUIRE),
        grid=2,
    ),
    "an exchange that does not acquire": Case(
        "race_global",
        handed_over(
            "bar.sync 0;\n",
            RELEASE,
            poll("atom.<<relaxed||acquire>>.gpu.global.or.b32").replace("[%rd4]", "[%rd4], 0"),
        ),
        grid=2,
    ),
    "a fence before the barrier, by a warp that has not looked": Case(
        "race_global",
        handed_over(
            "bar.sync 0;\n",
            RELEASE,
            "@!%p2 bra ON;\n" + poll("ld.relaxed.gpu.global.b32")
            + "ON:\n<<@!%p1 fence.acq_rel.gpu;\n||>>bar.sync 0;\n<<||fence.acq_rel.gpu;\n>>",
        ),
        grid=2,
    ),
    "a fence after the barrier whose scope is the CTA": Case(
        "race_global",
        handed_over(
            "bar.sync 0;\n",
            RELEASE,
            "@!%p2 bra ON;\n" + poll("ld.relaxed.gpu.global.b32") + "ON: bar.sync 0;\nfence.acq_rel.<<cta||gpu>>;\n",
        ),
        grid=2,
    ),
    "a flag whose scope is the CTA": Case(
        "race_global", handed_over("bar.sync 0;\n", RAISE.format("release.<<cta||gpu>>"), ACQUIRE), grid=2
    ),
    "an acquire whose scope is the CTA": Case(
        "race_global", handed_over("bar.sync 0;\n", RELEASE, poll("ld.acquire.<<cta||gpu>>.global.b32")), grid=2
    ),
    "a fence whose scope is the CTA": Case(
        "race_global",
        handed_over("fence.acq_rel.<<cta||gpu>>;\nbar.sync 0;\n", RAISE.format("relaxed.gpu"), ACQUIRE), grid=2
    ),
    "a store beside an atomic": Case(
        "race_global",
        "<<@%p4 st.global.b32 [%rd4], 5; //!\n@!%p4 red.global.add.u32 [%rd4], 1; //!"
        "||@%p4 red.global.add.u32 [%rd4], 5;\n@!%p4 red.global.add.u32 [%rd4], 1;>>\n",
        grid=2,
    ),
    "atomics of two CTAs after a store of the first": Case(
        "race_global",
        "setp.eq.and.u32 %p5, %r10, 0, %p2;\n@%p5 st.global.b32 [%rd4<<||+64>>], 9; //!\n"
        "red.global.add.u32 [%rd4], 1; //!\n",
        grid=2, schedules=("round_robin",),
    ),
    "a load beside an atomic": Case(
        "race_global",
        "@%p4 red.global.add.u32 [%rd4], 1; //!\n@!%p4 ld.<<||relaxed.gpu.>>global.b32 %r20, [%rd4]; //!\n@!%p4 " + USE,
        grid=2,
    ),
    # --- bulk copies and their proxy
    "a bulk store of which only the reading is complete": Case(
        "race_global",
        "st.shared.b32 [%r1], %r0;\n" + READ + "cp.async.bulk.wait_group<<.read||>> 0;\nld.global.b32 %r20, [%rd1+16]; "
        "//!\n" + USE + "cp.async.bulk.wait_group 0;\nEND:\n",
    ),
    "a bulk store that is not waited for": Case(
        "race_global",
        "st.shared.b32 [%r1], %r0;\n" + READ + "<<||cp.async.bulk.wait_group 0;\n>>ld.global.b32 %r20, [%rd1+16]; //!\n"
        + USE + "cp.async.bulk.wait_group 0;\nEND:\n",
    ),
    "a bulk copy of what is being stored": Case(
        "race_global",
        INIT.format(1, 1) + "st.global.b32 [%rd2], %r0; //!\nfence.proxy.async.global;\n<<||bar.sync 0;\n>>" + LOAD
        + " //!\n" + wait("%r8", 0, "W"),
    ),
    "a bulk copy of what threads wrote": Case(
        "missing_proxy_fence_global",
        INIT.format(1, 1) + "st.global.b32 [%rd2], %r0; //!\n<<||fence.proxy.async.global;\n>>bar.sync 0;\n" + LOAD
        + " //!\n" + wait("%r8", 0, "W"),
    ),
    # --- tensor maps
    "a map that is changed without a fence": Case(
        "missing_tensormap_fence",
        MAP + "@!%p2 bra END;\nadd.s64 %rd7, %rd1, 8192;\n"
        + "".join(
            f"ld.param.v2.b64 {{%rd8, %rd9}}, [map+{16 * i}];\nst.global.v2.b64 [%rd7+{16 * i}], {{%rd8, %rd9}};\n"
            for i in range(8)
        )
        + "tensormap.replace.tile.global_dim.global.b1024.b32 [%rd7], 1, 12;\n"
        "<<||fence.proxy.tensormap::generic.release.gpu;\nfence.proxy.tensormap::generic.acquire.gpu [%rd7], 128;\n>>"
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;\ncp.async.bulk.tensor.2d.shared::cta.global.tile."
        "mbarrier::complete_tx::bytes [%r2], [%rd7, {%r14, %r14}], [%r8]; //!\n" + wait("%r8", 0, "W") + "END:\n",
        tensor=(16, 16, 8, 8, 64),
    ),
    "rows that do not end at 16 bytes": Case(
        "tma_store_padding",
        MAP + "st.shared.b32 [%r1], %r0;\n" + FENCE + "bar.sync 0;\nmov.u32 %r15, <<8||0>>;\n@!%p2 bra END;\n"
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd6, {%r15, %r14}], [%r2]; //!\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nEND:\n",
        tensor=(13, 8, 8, 8, 64),
    ),
    # --- the end of a tensor
    "a load past the end": Case(
        "global_read_past_end|MemoryFault", "ld.global.b32 %r20, [%rd2+<<16256||16128>>]; //!\n" + USE
    ),
    "a store past the end": Case("MemoryFault", "st.global.b32 [%rd2+<<16256||16128>>], %r0; //!\n"),
    "a bulk copy past the end": Case(
        "MemoryFault",
        INIT.format(1, 1) + "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;\n@%p2 " + BULK
        + " [%r2], [%rd1+<<16256||16128>>], 256, [%r8]; //!\n" + wait("%r8", 0, "W"),
    ),
    "an address that is not aligned": Case(
        "MemoryFault", "ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd1+<<8||16>>]; //!\n" + USE
    ),
    # --- devices
    "a flag that ends at the device": Case(
        "scope_between_devices",
        SEND.format("", "release.<<gpu||sys>>", " //!"), TAKE.format("acquire.sys", " //!", ""), "devices",
    ),
    "an acquire that ends at the device": Case(
        "scope_between_devices",
        SEND.format("", "release.sys", " //!"), TAKE.format("acquire.<<gpu||sys>>", " //!", ""), "devices",
    ),
    "an atomic without scope between devices": Case(
        "scope_between_devices",
        ALONE + "st.global.b32 [%rd1+64], 7;\natom.<<||release.sys.>>global.add.u32 %r30, [%rd4], 1; //!\nEND:\n",
        TAKE.format("acquire.sys", " //!", ""), "devices",
    ),
    "a fence that ends at the device": Case(
        "race_between_devices",
        SEND.format("fence.acq_rel.<<gpu||sys>>;\n", "relaxed.sys", ""), RIGHT, "devices",
    ),
    "a relaxed flag between devices": Case(
        "race_between_devices", SEND.format("", "<<relaxed||release>>.sys", ""), RIGHT, "devices"
    ),
    "no flag between devices": Case(
        "race_between_devices",
        SEND.format("", "release.sys", ""),
        ALONE + "<<||L: ld.acquire.sys.global.b32 %r40, [%rd4];\nsetp.eq.u32 %p10, %r40, 0;\n@%p10 bra L;\n>>"
        "ld.global.b32 %r20, [%rd1+64]; //!\nst.global.b32 [%rd5], %r20;\nEND:\n", "devices",
    ),
    "a bulk store to a device of which only the reading is complete": Case(
        "race_between_devices",
        ALONE + "st.shared.v4.b32 [%r2], {%r0, %r0, %r0, %r0};\n" + FENCE + STORE + " [%rd1+64], [%r2], 16; //!\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group<<.read||>> 0;\nst.release.sys.global.b32 [%rd4], 1;\n"
        "END:\n",
        RIGHT, "devices",
    ),
    # --- dependent launches
    "a load before griddepcontrol.wait": Case(
        "dependent_launch_early", OWN,
        "<<||" + EARLY + ">>ld.global.b32 %r20, [%rd2]; //!\n<<" + EARLY + "||>>" + USE, "dependent",
    ),
    "no griddepcontrol.wait at all": Case(
        "dependent_launch_early", OWN, "<<||" + EARLY + ">>ld.global.b32 %r20, [%rd2]; //!\n" + USE, "dependent",
    ),
    "a store before griddepcontrol.wait": Case(
        "dependent_launch_early", "ld.global.b32 %r20, [%rd2]; //!\n" + USE,
        "<<||" + EARLY + ">>st.global.b32 [%rd2], %r0; //!\n<<" + EARLY + "||>>", "dependent",
    ),
    "a bulk copy before griddepcontrol.wait": Case(
        "dependent_launch_early", OWN,
        INIT.format(1, 1) + "<<||" + EARLY + ">>fence.proxy.async.global;\n" + LOAD + " //!\n" + wait("%r8", 0, "W")
        + "<<" + EARLY + "||>>", "dependent",
    ),
    "another warp waits for the launch before": Case(
        "dependent_launch_early", OWN,
        "@%p1 bra ON;\n" + EARLY + "ON:\n<<||bar.sync 0;\n>>ld.global.b32 %r20, [%rd2]; //!\n" + USE, "dependent",
    ),
}  # fmt: skip
