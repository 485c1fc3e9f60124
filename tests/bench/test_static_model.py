"""The static model on cases computed by hand: schedule, resources, whole launches, floors, and its error on Hopper."""

import csv
import dataclasses
from collections import Counter

import pytest

from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.common.splits import TILES
from dsv4lib.ops.fmha.op import choose_splits
from dsv4lib.predict import calibration, fmha, rates, schedule, static_model
from dsv4lib.predict.rates import Gpu, Rate
from dsv4lib.predict.schedule import Task
from dsv4lib.predict.static_model import Kernel
from dsv4lib.predict.work import Form, Work

QK = Form("f16", 64, 128, 16, ws=True, a="tmem")
PV = Form("f16", 64, 256, 16, ws=True)


def toy(**changes):
    """A GPU of round numbers: 2 SMs at 1 GHz."""
    values = {name: 1.0 for name in rates.gpu("B200").rates} | {"sms": 2, "tma_in_bytes": 8, "l2_bytes_sm": 4}
    values |= {
        "first_byte_clk": 100,
        "first_byte_pdl_clk": 40,
        "switch_clk": 10,
        "hbm_bytes_s": 1e9,
        "load_latency_clk": 5,
    } | changes
    return Gpu("toy", {name: Rate("toy", name, value, "", "assumed", "-", "-") for name, value in values.items()})


# --- rates


def test_every_rate_has_a_source_and_every_assumption_a_consequence():
    for rate in rates.table():
        assert rate.source and rate.unit, rate
        assert rate.status != "assumed" or rate.note or rate.source.startswith(("as H200", "B200's")), rate
    shared = {r.name for r in rates.table() if r.gpu == "H200"} & {r.name for r in rates.table() if r.gpu == "B200"}
    assert {"sms", "clock", "smem_bytes", "exp", "convert", "issue", "launch_us", "hbm_bytes_s"} <= shared


def test_the_peak_of_each_gpu_is_the_floors():
    for name, flops, peak in (("B200", "mma_flops", 2.25e15), ("H200", "wgmma_flops", 0.989e15)):
        card = rates.gpu(name)
        assert card["sms"] * card[flops] * card["clock"] * 1e9 == pytest.approx(peak, rel=2e-3)


def test_bad_tables_and_names_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="warp_drive"):
        rates.gpu("B200")["warp_drive"]
    with pytest.raises(ArgumentError, match="A100"):
        rates.gpu("A100")
    lines = rates.TABLE.read_text().splitlines()
    for broken in (
        lines[1],
        "B200,x,-1,B,measured,somewhere,",
        "B200,x,1,B,guessed,somewhere,",
        "B200,x,1,B,measured,,",
    ):
        path = tmp_path / "rates.csv"
        path.write_text("\n".join([*lines, broken]))
        with pytest.raises(ConfigError):
            rates.table(path)


# --- forms


@pytest.mark.parametrize(
    ("form", "operand", "clocks"),
    [  # bytes of shared memory; clocks measured in SemiAnalysisAI/microbench-blackwell, umma_throughput (none for .ws)
        (Form("f16", 128, 128, 16), 8192, 64.6),
        (Form("f16", 128, 256, 16), 12288, 128.6),
        (Form("f16", 64, 256, 16), 10240, 128.6),
        (Form("f16", 128, 64, 16, a="tmem"), 2048, 32.5),
        (Form("f16", 128, 128, 16, 2), 4096, 32.7),
        (Form("f16", 128, 256, 16, 2, a="tmem"), 4096, 64.6),
        (Form("f16", 256, 64, 16, 2, a="tmem"), 1024, 32.6),
    ],
)
def test_clocks_of_an_mma_are_those_measured_on_a_b200(form, operand, clocks):
    card = rates.gpu("B200")
    assert form.operand_bytes() == operand
    # A is 2 bytes an element and row, B is shared by a pair: whichever takes longer, tensor core or operands
    modelled = max(static_model.mma_clocks(form, card), operand / card["smem_bytes"])
    assert modelled == pytest.approx(clocks, rel=0.03)


def test_operands_are_the_limit_where_they_were_measured_to_be():
    card = rates.gpu("B200")
    for form, clocks in ((Form("f16", 128, 64, 16), 48.6), (Form("f16", 128, 64, 16, 2), 25.7)):
        assert static_model.mma_clocks(form, card) < form.operand_bytes() / card["smem_bytes"]
        assert form.operand_bytes() / card["smem_bytes"] == pytest.approx(clocks, rel=0.07)


def test_forms_of_another_gpu_are_refused():
    with pytest.raises(ArgumentError, match="H200"):
        static_model.mma_clocks(QK, rates.gpu("H200"))


# --- work and resources


def test_work_adds_and_scales():
    a = Work(Counter({QK: 3}), exp=2, load_bytes=10)
    both = a + Work(Counter({QK: 1, PV: 2}), exp=5)
    assert both.mma == {QK: 4, PV: 2} and both.exp == 7 and both.load_bytes == 10
    assert (both - a) * 2 == Work(Counter({QK: 2, PV: 4}), exp=10)
    assert (both - both).mma == {}
    assert a.flops == 3 * 2 * 64 * 128 * 16


def test_resources_by_hand():
    card = rates.gpu("B200")
    work = Work(
        Counter({QK: 16, PV: 8}), load_bytes=61000, l2_bytes=48000, smem_mma_bytes=12800, exp=10, instructions=8
    )
    found = static_model.resources(work, card)
    assert found["tensor core"] == 16 * 32 + 8 * 64
    assert found["SMEM"] == 100 and found["TMA in"] == 500 and found["L2"] == 1000
    assert found["exp"] == 20 and found["issue"] == 2
    assert static_model.resources(work, card, 480)["L2"] == 100
    assert static_model.longest(found) == ("tensor core", 1024)
    plain = Work(Counter({Form("f16", 64, 256, 16): 8}))
    assert static_model.resources(plain, card)["tensor core"] == 8 * 128  # half of the lanes idle


def test_softmax_chain_is_one_warps_issue_and_its_waits():
    card = rates.gpu("B200").changed(warp_ipc=0.5, sync_clk=40)
    work = Work(instructions=400, syncs=8)
    assert static_model.chain(work, card, 4) == 400 / 4 / 0.5 + 8 / 4 * 40
    assert static_model.chain(Work(instructions=400, exp=1000), card, 4) == 2000  # the pipe is longer


# --- schedule

LOAD = Task("load", "TMA", 10, 5, (("mma", 2),), 2)
MMA = Task("mma", "core", 4, 1, (("load", 0),))


def test_a_schedule_by_hand():
    done = schedule.run([MMA, LOAD], 4)
    # two stages: loads 0 and 1 back to back, load 2 when mma 0 has freed its stage (19 + 1) and the unit is free (20)
    assert done["load"] == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert done["mma"] == [(15, 19), (25, 29), (35, 39), (45, 49)]
    assert schedule.end([MMA, LOAD], 4) == 50
    # a core that is ready at 100 frees the first stage at 105: load 2 there, load 3 after it, used at 130
    assert schedule.end([MMA, LOAD], 4, {"core": 100}) == 105 + 10 + 10 + 5 + 4 + 1
    assert schedule.end([MMA, LOAD], 0) == 0


def test_one_stage_exposes_the_latency():
    one = Task("load", "TMA", 10, 5, (("mma", 1),), 1)
    done = schedule.run([MMA, one], 3)
    assert done["mma"] == [(15, 19), (35, 39), (55, 59)]  # 10 + 5 to load, 4 + 1 to use


def test_an_order_that_waits_for_what_comes_later_is_refused():
    with pytest.raises(ArgumentError, match="order of mma"):
        schedule.run([MMA, Task("load", "TMA", 10)], 2)


def test_items_follow_each_other():
    """Two of two tiles: loads run on as in one of four; after each a transition, on the core or beside it."""
    tasks = [MMA, LOAD]
    assert schedule.persistent_end(tasks, [], 2, 2) == schedule.end(tasks, 4) == 50
    # products 0, 1 end at 29 and are seen at 30; 3 clocks on the core delay no task, 10 delay product 2 from 35 to 40
    assert schedule.persistent_end(tasks, [Task("store", "core", 3, 0, (("mma", 0),))], 2, 2) == 50 + 3
    assert schedule.persistent_end(tasks, [Task("store", "core", 12, 0, (("mma", 0),))], 2, 2) == 51 + 12
    beside = [Task("store", "out", 20, 0, (("mma", 0),))]
    assert schedule.persistent_end(tasks, beside, 2, 2) == 30 + 20 + 20
    # an operand through the same two stages: it takes stage 0, which product 0 frees at 20, is there at 35 and placed
    # at 47, which is when load 3 has the stage; the second is requested after load 3, at 57, and placed from 72 on
    ring = [MMA, dataclasses.replace(LOAD, freed="mma")]
    operand = [Task("operand", "TMA", 10, 5, freed="placed"), Task("placed", "core", 12, 0, (("operand", 0),))]
    assert schedule.persistent_end(ring, [], 2, 2, 2) == 50
    assert schedule.persistent_end(ring, operand, 2, 2, 2) == 84
    assert schedule.persistent_end(ring, operand, 2, 2, 3) == 77  # load 3 after load 2, the second operand at 50
    with pytest.raises(ArgumentError, match="order of tasks"):
        schedule.persistent_end(tasks, [Task("store", "out", 1, 0, (("none", 0),))], 2, 2)


def test_a_turn_goes_ahead_of_the_item_before():
    """Scores of the next item before the last product of this one, an operand before them; a store that holds it."""
    score, product = Task("score", "core", 4, 1, (), 1), Task("product", "core", 6, 1, (("score", 0),))
    operand = Task("operand", "core", 3, 0, (("score", 0),), 1)  # overwrites what the last score read
    # score 0 [0, 4], score 1 [4, 8], product 0 [8, 14], operand [14, 17] (score 1 is seen at 9), score 2 [17, 21],
    # product 1 [21, 27], score 3 [27, 31], products 2 and 3 [31, 43], operand again [37, 40]
    assert schedule.persistent_end([score, product], [operand], 2, 2, across=True) == 47
    order = [(task.name, tile) for task, tile in schedule._in_items([score, product], [operand], 2, 2, True)]
    assert order == [
        *(("score", 0), ("score", 1), ("product", 0), ("operand", 1), ("score", 2), ("product", 1), ("score", 3)),
        *(("product", 2), ("operand", 3), ("product", 3)),
    ]
    # a store of 20 after product 1 (27 + 1) ends at 48, and only then product 2 may overwrite: [48, 54], operand,
    # product 3 [57, 63], the last store from 64 on
    store = Task("store", "out", 20, 0, (("product", 0),), holds="product")
    assert schedule.persistent_end([score, product], [operand, store], 2, 2, across=True) == 64 + 20
    free = dataclasses.replace(store, holds="")
    assert (
        schedule.persistent_end([score, product], [operand, free], 2, 2, across=True) == 48 + 20
    )  # one store after the other


# --- launches


def test_a_launch_by_hand():
    card = toy()
    kernel = Kernel("k", Work(load_bytes=80), Work(instructions=7), (MMA, LOAD))
    # a CTA: 4 tiles end at 50 (above), then 7 clocks once; 3 CTAs on 2 SMs: 2 waves and a switch
    time = static_model.modelled(kernel, card, 3, 4)
    assert time.waves == 2 and time.clocks == 100 + 10 + 2 * (50 + 7)
    assert time.us == pytest.approx(time.clocks / 1e3 + 1)
    assert time.exposed == time.clocks - 2 * 4 * 10  # the steady state is one load a tile
    one = static_model.modelled(kernel, card, 1, 4)
    assert one.clocks == 157 and one.bound == "set-up, fill and drain"
    assert static_model.modelled(kernel, card, 1, 4, hbm_bytes=1000).clocks == 100 + 1000
    assert static_model.modelled(kernel, card, 1, 4, hbm_bytes=1000).bound == "HBM"
    stays = static_model.modelled(kernel, card, 3, 4, persistent=True)
    assert stays.clocks == 100 + 2 * (4 * 10 + 7) + 20  # filled once: load, latency, mma


def test_a_dependent_launch_is_timed_from_the_end_of_the_kernel_before():
    kernel = Kernel("k", Work(load_bytes=80), Work(instructions=7), (MMA, LOAD))
    alone, after = (static_model.modelled(kernel, toy(), 1, 4, dependent=d) for d in (False, True))
    assert (alone.clocks, after.clocks) == (100 + 57, 40 + 57)
    assert alone.us == pytest.approx(0.157 + 1) and after.us == pytest.approx(0.097)  # a launch is 1 us


def test_ctas_that_stay_take_a_turn():
    transitions = (Task("store", "core", 3, 0, (("mma", 0),)),)
    kernel = Kernel(
        "k", Work(load_bytes=80), Work(instructions=7), (MMA, LOAD), transition=Work(), transitions=transitions
    )
    # the first of three items alone: tiles end at 30, 7 clocks once; each further one costs its two loads
    time = static_model.modelled(kernel, toy(), 6, 2)
    assert time.waves == 3 and time.clocks == 100 + (30 + 7) + 2 * 20
    slow = dataclasses.replace(kernel, transition=Work(store_bytes=200))  # 50 clocks of L2
    assert static_model.modelled(slow, toy(), 6, 2).clocks == 100 + (30 + 7) + 2 * 50
    assert static_model.modelled(kernel, toy(), 2, 2).clocks == 100 + (30 + 7)
    assert static_model.item_clocks(kernel, 0, toy(), 4) == 3


def test_a_shared_resource_bounds_the_tiles():
    kernel = Kernel("k", Work(smem_thread_bytes=30), Work(), (MMA, LOAD))
    time = static_model.modelled(kernel, toy(), 1, 4)
    assert time.resource == "SMEM" and time.clocks == 100 + 20 + 3 * 30


def test_fewer_ctas_get_more_of_l2():
    assert static_model.l2_share(toy(), 2) == 4 and static_model.l2_share(toy(), 1) == 8
    assert static_model.l2_share(toy(tma_in_bytes=6), 1) == 6


def test_combine_takes_its_parts_and_its_bytes():
    card = toy(combine_setup_clk=20, combine_part_clk=3, combine_bytes_sm=4, l2_size=1000)
    assert static_model.combine_clocks(card, 10, 80) == 20 + 30 + 10  # 8 B a clock from L2
    assert static_model.combine_clocks(card, 10, 2000) == 20 + 30 + 2000  # 1 B a clock from HBM
    assert fmha.combine_work(5, 3, 2) == (5, 3 * 2 * 512 * 22)


def test_a_short_launch_waits_for_its_loads_and_its_bytes():
    card = toy(short_setup_clk=20, load_wait_clk=3, l2_size=1000)
    assert static_model.short_clocks(card, 10, 80) == 20 + 30 + 10  # 8 B a clock from L2
    assert static_model.short_clocks(card, 10, 2000) == 20 + 30 + 2000  # 1 B a clock from HBM


# --- calibration


def test_the_model_is_within_its_stated_error_on_every_hopper_launch():
    checked = calibration.check()
    assert len(checked) >= 20 and {c.case.regime for c in checked} == set(calibration.REGIMES)
    for done in checked:
        assert abs(done.error) < (0.2 if done.case.regime == "combine" else 0.15), (done.case.case, done.error)
    assert set(calibration.FITTED) <= {c.case.case for c in checked}


def test_an_error_is_that_of_launches_nothing_was_fitted_to():
    checked = calibration.check()
    fitted = dataclasses.replace(
        checked[0], clocks=9 * checked[0].case.clocks, case=next(c.case for c in checked if c.case.case == "fa4 512")
    )
    checked = [*checked, fitted]  # whatever a fitted launch says does not count
    low, high = calibration.error("attention", checked)
    kept = [c.error for c in checked if c.case.case in ("fa4 8k", "fa4 4k", "fa4 1k", "fmha 1k")]
    assert (low, high) == (min(kept), max(kept)) and low < high < 0  # the model is too fast here
    with pytest.raises(ArgumentError, match="weather"):
        calibration.error("weather")


def test_a_wrong_rate_is_seen_by_the_calibration():
    slow = rates.gpu("H200").changed(wgmma_flops=2048)
    assert max(c.error for c in calibration.check(slow) if c.case.regime == "gemm") > 0.5


def test_the_published_b200_kernel_is_met_within_a_fifth():
    modelled, published = calibration.flashmla()
    assert published / 1.2 < modelled < published * 1.2


# --- attention


@pytest.mark.parametrize(
    ("shape", "floor"),
    [  # performance.md section 2, B200
        (("Flash", "CSA", "decode", 8, 4096), 0.50),
        (("Flash", "CSA", "decode", 128, 32768), 8.08),
        (("Flash", "HCA", "decode", 32, 131072), 3.22),
        (("Flash", "HCA", "decode", 128, 1048576), 79.8),
        (("Pro", "CSA", "decode", 1, 4096), 0.13),
        (("Pro", "CSA", "decode", 128, 4096), 17.2),
        (("Pro", "HCA", "decode", 8, 1048576), 7.75),
        (("Flash", "CSA", "prefill", 1, 4096), 122),
        (("Flash", "CSA", "prefill", 1, 32768), 1191),
        (("Flash", "HCA", "prefill", 1, 4096), 67),  # traffic of Q and O, above 34 of compute
        (("Pro", "CSA", "prefill", 1, 4096), 304),
        (("Pro", "CSA", "prefill", 1, 32768), 4153),
        (("Pro", "HCA", "prefill", 1, 32768), 1076),
    ],
)
def test_floors_are_those_of_the_facts(shape, floor):
    assert fmha.Shape(*shape).floor_us == pytest.approx(floor, rel=0.012, abs=0.006)


def test_targets_are_those_of_the_contract():
    assert fmha.Shape("Pro", "CSA", "prefill", 1, 4096).target_us[0] == pytest.approx(304.5 / 0.7, rel=1e-3)
    assert fmha.Shape("Pro", "CSA", "decode", 128, 4096).target_us[0] == pytest.approx(17.18 / 0.6, rel=1e-3)
    assert fmha.Shape("Flash", "HCA", "decode", 1, 1048576).target_us[1] == ">= 60 % of the floor"
    assert fmha.Shape("Flash", "SWA", "decode", 8, 4096).target_us[0] == pytest.approx(1.5 * (0.2055 + 3), rel=1e-3)
    with pytest.raises(ArgumentError, match="kind"):
        fmha.Shape("Pro", "MLA", "decode", 1, 4096)


def mmas(forms):
    return Work(Counter(forms), smem_mma_bytes=sum(form.operand_bytes() * n for form, n in forms.items()))


def made(load=65536.0):
    """A configuration by hand: the MMAs of 64 keys and 512 dims, no softmax to speak of."""
    qk, pv = mmas({QK: 16}), mmas({PV: 8})
    tile = qk + pv + Work(load_bytes=load, l2_bytes=load, instructions=400)
    return fmha.Counted(tile, Work(), qk, pv, 3)


def test_a_prediction_adds_up():
    card, c = rates.gpu("B200"), made()
    errors = {regime: (-0.1, 0.1) for regime in calibration.REGIMES}
    shape = fmha.Shape("Flash", "CSA", "decode", 1, 4096)
    one = fmha.timed(shape, c, c, card, 1, 1)
    model = fmha.model_of(c, card, 1)
    clocks = card["first_byte_pdl_clk"] + static_model.cta_clocks(model, 8 + 2, card, card["tma_in_bytes"])[0]
    assert one.us == pytest.approx(card.microseconds(clocks))  # after another kernel
    more = card.microseconds(card["first_byte_clk"] - card["first_byte_pdl_clk"]) + card["launch_us"]
    assert fmha.timed(shape, c, c, card, 1, 1, alone=True).us == pytest.approx(one.us + more)
    # five parts: two tiles a CTA, 122 B a clock still for each of the five, and the combine
    five = fmha.timed(shape, c, c, card, 1, 5)
    clocks += static_model.cta_clocks(model, 2, card, card["tma_in_bytes"])[0]
    clocks -= static_model.cta_clocks(model, 10, card, card["tma_in_bytes"])[0]
    clocks += (
        card["combine_setup_clk"] + 5 * card["combine_part_clk"] + 64 * 512 * 22 / (card["combine_bytes_sm"] * 148)
    )
    assert five.us == pytest.approx(card.microseconds(clocks))
    row = fmha.predict(shape, c, c, card, errors, "what if")
    assert row.keys == 640 and row.met == "no" and row.modelled_us == row.best_us < five.us < one.us
    assert row.fraction == pytest.approx(shape.floor_us / row.modelled_us)


def test_what_is_built_runs_in_the_parts_that_the_op_chooses():
    card, c = rates.gpu("B200"), made()
    errors = {regime: (-0.1, 0.1) for regime in calibration.REGIMES}
    for shape in (fmha.Shape("Flash", "HCA", "decode", 1, 1048576), fmha.Shape("Pro", "CSA", "decode", 8, 4096)):
        row = fmha.predict(shape, c, c, card, errors)
        assert row.alone_us > row.modelled_us
        given = shape.tokens, shape.heads, *shape.keys(shape.context)
        assert row.splits == choose_splits(*given, by_range=shape.kind != "CSA").keys > 1
        assert row.ctas == row.splits * shape.tokens * shape.heads // 64 and row.best_us <= row.modelled_us
        # a part more or less than the best is no better
        alone = fmha.timed(shape, c, c, card, shape.tokens * shape.heads // 64, 1)
        assert row.best_us <= alone.us


def test_a_last_part_of_another_length_adds_up():
    """128 CTAs with 118 of 130 tiles, 20 (or 8) that take 12 of each of 7 (16) tokens; then the join of two parts."""
    card = rates.gpu("B200")
    transition = Work(load_bytes=65536, l2_bytes=65536, smem_mma_bytes=65536, store_bytes=131072, instructions=400)
    c = dataclasses.replace(made(), transition=transition, key_bytes=584)
    shape = fmha.Shape("Flash", "HCA", "decode", 128, 1048576)
    join = static_model.combine_clocks(card, *fmha.combine_work(2, 128, 64))
    longest = []
    for beside, transitions in ((20, 7), (8, 16)):
        model, l2 = fmha.model_of(c, card, 128 + beside), static_model.l2_share(card, 128 + beside)
        long, short = (static_model.cta_clocks(model, n, card, l2)[0] for n in (118, 12))
        both = long, short + (transitions - 1) * static_model.item_clocks(model, 12, card, l2)
        clocks = card["first_byte_pdl_clk"] + max(both) + join
        found = fmha.timed(shape, c, c, card, 128, 2, tail=(beside, 95)).us
        assert found == pytest.approx(card.microseconds(clocks))
        longest.append(both.index(max(both)))
    assert longest == [0, 1]


def test_parts_of_the_dimensions_are_lines_of_their_own():
    """Half of P V; where it is chosen, twice the CTAs, and never a time longer than the best of whole ones."""
    card, whole = rates.gpu("B200"), made()
    half = dataclasses.replace(whole, tile=whole.tile - whole.pv * 0.5, pv=whole.pv * 0.5)
    errors = {regime: (-0.1, 0.1) for regime in calibration.REGIMES}
    shape = fmha.Shape("Flash", "SWA", "decode", 8, 4096)
    row, without = (fmha.predict(shape, whole, whole, card, errors, half=h) for h in ((half, half), None))
    assert (row.splits, row.dims, row.ctas) == (1, 2, 16) and (without.dims, without.ctas) == (1, 8)
    assert row.modelled_us == row.best_us < without.modelled_us == without.best_us and row.share == 0


def test_warps_that_bring_keys_take_their_time():
    card, one = rates.gpu("B200"), made()
    bring = Work(instructions=4000, plain_load_bytes=37376)
    two = dataclasses.replace(one, tile=one.tile + bring - Work(load_bytes=65536, l2_bytes=65536), bring=bring)
    tasks = {task.name: task.clocks for task in fmha.model_of(two, card, 148).tasks}
    assert tasks["load k"] == 4000 / 4 / card["warp_ipc"]  # longer than 37,376 B at 48 B a clock
    assert tasks["softmax 0"] == fmha.model_of(one, card, 148).tasks[1].clocks  # softmax does not do it


def test_a_tile_in_two_parts_is_loaded_further_ahead():
    card, whole = rates.gpu("B200"), made()
    models = [fmha.model_of(dataclasses.replace(whole, parts=n), card, 148) for n in (1, 2)]
    busy = [
        {unit: sum(task.clocks for task in m.tasks if task.unit == unit) for unit in ("TMA", "tensor core", "warps 0")}
        for m in models
    ]
    assert busy[0] == pytest.approx(busy[1])  # as much work
    assert max(busy[1].values()) <= static_model.slope(models[1]) < static_model.slope(models[0]) - 100


def test_the_count_of_the_compiled_kernel_is_what_its_docstring_says():
    c = fmha.counted(128, 256)
    assert c.tile.mma == c.qk.mma + c.pv.mma == {QK: 16, PV: 8}
    assert c.tile.load_bytes == c.tile.l2_bytes == 64 * 1024
    assert c.tile.smem_mma_bytes == 16 * 4096 + 8 * (2048 + 8192)
    # 64 x 64 scores and the corrections of heads with large scores; two 32-column loads of a half tile by four warps
    assert 128 <= c.tile.exp <= 160 and c.tile.tmem_load_bytes >= 2 * 128 * 32 * 4
    for work in (c.once, c.transition):  # Q through the ring and on to tensor memory, O out
        assert work.mma == {} and work.load_bytes == work.smem_mma_bytes == 64 * 1024 <= work.store_bytes
    assert c.transition.instructions < c.once.instructions and c.q_stages == c.parts == 2  # no set-up


def test_a_pair_brings_each_key_once():
    c = fmha.counted(128, 256, cluster=2)
    qk, pv = Form("f16", 128, 128, 16, 2, a="tmem"), Form("f16", 128, 256, 16, 2)
    assert c.cluster == 2 and c.stages == 6 and c.tile.mma == {qk: 16, pv: 8}  # of both CTAs, for all 128 heads
    assert c.tile.load_bytes == c.tile.l2_bytes == 32 * 1024
    assert c.transition.load_bytes == c.transition.smem_mma_bytes == 64 * 1024 and (c.q_stages, c.parts) == (2, 1)


def test_a_tile_of_consecutive_rows_is_a_box_for_64_dimensions():
    """8 boxes by three warps, of each stage of 4 the busiest sends 2; 128 gathers, of which it sends 6 of 16 groups."""
    gathered, boxed = fmha.counted(128, 256), fmha.counted(128, 256, entries="range")
    assert (gathered.tile.copies, boxed.tile.copies) == (48, 4) and gathered.once.copies == boxed.once.copies == 4
    assert gathered.tile.load_bytes == boxed.tile.load_bytes and gathered.tile.mma == boxed.tile.mma
    # Beside entries in pages a stage is a whole tile, 8 boxes of which the busiest sends 3, and no warp dequantises it.
    window = fmha.fp8(boxed, short=128, long=256, of_window=True)
    assert window.tile.copies == 3 and window.tile.load_bytes == boxed.tile.load_bytes
    assert window.tile.smem_thread_bytes == boxed.tile.smem_thread_bytes


def test_the_mean_tile_of_entries_and_window():
    card, whole = rates.gpu("B200"), made()
    quick = dataclasses.replace(whole, tile=whole.tile + Work(copies=4))
    c = dataclasses.replace(whole, tile=whole.tile + Work(copies=48), window=quick)
    assert c.mixed(0) == c and c.mixed(0.25).tile.copies == pytest.approx(0.75 * 48 + 0.25 * 4)
    assert c.mixed(1).tile == quick.tile and whole.mixed(0.5) == whole
    shape = fmha.Shape("Flash", "CSA", "decode", 128, 4096)  # 8 tiles of entries, 2 of the window
    time = fmha.timed(shape, c, c, card, 128, 1)
    model = fmha.model_of(c.mixed(0.2), card, 128)
    clocks = static_model.cta_clocks(model, 10, card, static_model.l2_share(card, 128))[0]
    assert time.clocks - card["first_byte_pdl_clk"] == pytest.approx(max(clocks, time.hbm))
    # of five parts the first four are all entries, the last all window: the longer one counts
    five, alone = (fmha.timed(shape, x, x, card, 1, 5).clocks for x in (c, dataclasses.replace(c, window=None)))
    assert five == alone
    pages = dataclasses.replace(c, key_bytes=584)
    assert fmha.timed(shape, pages, pages, card, 128, 1).hbm < time.hbm  # the window stays in 16 bits
    moved = 128 * (64 * 2048 + 512 * 584 + 128 * 1024)
    assert fmha.timed(shape, pages, pages, card, 128, 1).hbm == pytest.approx(moved / card.hbm_clk_bytes)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "options"), [("index", {}), ("range", {"entries": "range"})])
def test_the_tiles_that_the_op_chooses_by_are_the_models(kind, options):
    """A tile, one with half of the dimensions, and what the half saves of the first one besides."""
    card, tile = rates.gpu("B200"), TILES[kind][1]
    counts = [fmha.counted(dim_splits=n, **options) for n in (1, 2)]
    steady, first = {}, {}
    for dims, c in enumerate(counts, 1):
        for ctas in (20, 128):
            model, l2 = fmha.model_of(c, card, ctas), static_model.l2_share(card, ctas)
            one, more = (static_model.cta_clocks(model, n, card, l2)[0] for n in (1, 5))
            steady[dims, ctas] = card.microseconds(more - one) / 4
            first[dims, ctas] = card.microseconds(one)
    assert tile.whole == pytest.approx(steady[1, 20], rel=0.01) == pytest.approx(steady[1, 128], rel=0.01)
    assert 0.99 * steady[2, 20] <= tile.half <= 1.01 * steady[2, 128]
    saved = first[1, 20] - first[2, 20] - (steady[1, 20] - steady[2, 20])
    assert tile.saved == pytest.approx(saved, abs=0.05)


def test_the_recorded_table_has_a_line_for_every_shape():
    with fmha.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    built = [r for r in rows if r["variant"] == fmha.BUILT and r["pool"] == "bf16"]
    keys = {(r["model"], r["kind"], r["phase"], int(r["batch"]), int(r["context"])) for r in built}
    assert keys == {(s.model, s.kind, s.phase, s.batch, s.context) for s in fmha.shapes()} and len(keys) == len(built)
    for row in rows:
        assert float(row["fraction"]) == pytest.approx(float(row["floor_us"]) / float(row["modelled_us"]), rel=2e-3)
        assert 0 < float(row["fraction"]) < 1 and row["bound"] and row["target"]
        hidden = float(row["alone_us"]) - float(row["modelled_us"])
        assert (hidden > 1) == (row["phase"] == "decode") and hidden >= 0  # prefill is modelled alone
        assert float(row["modelled_us"]) < 1.03 * float(row["best_us"])  # the parts that the op chooses


def test_what_was_recorded_is_read_back(tmp_path):
    rows = fmha.recorded()
    fmha.record(rows, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == fmha.RESULTS.read_text()
