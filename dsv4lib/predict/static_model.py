"""Predict how long a kernel takes on a GPU without running it. From what it does and what the GPU can do.

    modelled time = launch + waves x (set-up + tile schedule + what a CTA does once) [+ combine], at least HBM's time
                    launch + set-up + tile schedule + what a CTA does once + further items x (tiles + transition)

The second form is of persistent CTAs: a transition is what its warps do between the tiles of two items. The schedule
yields how much of it overlaps with tiles.

Launch and set-up are those of a launch on its own (``launch_us``, ``first_byte_clk``), or of a programmatic dependent
one after another kernel (``first_byte_pdl_clk``): then the time counts from the end of that kernel, whose last
microseconds cover what of the set-up they can.

The tile schedule (schedule.py) runs the tasks of a tile on their units; a task takes the longest of its resources. A
resource that several units share (shared memory, issue slots) bounds the whole: no less than tiles x its clocks.

What it leaves out: bank conflicts, power limits (the clock is a rate of the table), contention beyond the rates, the
difference between PTX and SASS. What that is worth is not argued but measured: calibration.py runs the same model on
Hopper kernels with known times, and its error stands beside every prediction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from dsv4lib.errors import ArgumentError
from dsv4lib.predict import schedule
from dsv4lib.predict.rates import Gpu
from dsv4lib.predict.schedule import Task
from dsv4lib.predict.work import WARP, Form, Work

QUARTERS = 4  # of an SM, each with its own warps
FASTER = {"f8f6f4": 2, "mxf8f6f4": 2, "mxf4": 4, "mxf4nvf4": 4}  # kinds of MMA, beside bf16


def mma_clocks(form: Form, gpu: Gpu) -> float:
    """Return the clocks of one instruction in an SM's tensor core, operands apart.

    Raises:
        ArgumentError: the GPU has no such instruction.
    """
    names = {"wgmma": "wgmma_flops"}
    name = names.get(form.kind, "mma_flops")
    if form.kind != "wgmma" and form.m // form.group == 64 and form.group == 1:
        name = "mma_m64_ws_flops" if form.ws else "mma_m64_flops"
    if name not in gpu.rates:
        raise ArgumentError("form", str(form), f"an instruction of {gpu.name}")
    return form.flops / gpu[name] / FASTER.get(form.kind, 1)


def resources(work: Work, gpu: Gpu, l2_bytes_clk: float | None = None) -> dict[str, float]:
    """Return the clocks that each resource of an SM needs for some work. Each if it did nothing else.

    Args:
        l2_bytes_clk: B a clock that this SM gets from L2; its share when all SMs read, if not given.
    """
    l2 = gpu["l2_bytes_sm"] if l2_bytes_clk is None else l2_bytes_clk
    found = {
        "tensor core": sum(mma_clocks(form, gpu) * n for form, n in work.mma.items()),
        "SMEM": (work.smem_mma_bytes + work.smem_thread_bytes) / gpu["smem_bytes"],
        "TMA in": work.load_bytes / gpu["tma_in_bytes"],
        "issue of copies": work.copies * gpu["copy_clk"],
        "L2": (work.l2_bytes + work.plain_load_bytes + work.store_bytes + work.tma_store_bytes) / l2,
        "exp": work.exp * WARP / gpu["exp"],
        "convert": work.convert * WARP / gpu["convert"],
        "half-rate ALU": work.half_rate * WARP / gpu["half_rate"],
        "full-rate ALU": work.full_rate * WARP / gpu["full_rate"],
        "issue": work.instructions / gpu["issue"],
    }
    if "tmem_load_bytes" in gpu.rates:
        found["TMEM"] = work.tmem_load_bytes / gpu["tmem_load_bytes"] + work.tmem_store_bytes / gpu["tmem_store_bytes"]
    return found


def longest(clocks: dict[str, float]) -> tuple[str, float]:
    """Return the resource that takes longest, and its clocks."""
    return max(clocks.items(), key=lambda item: item[1])


def chain(work: Work, gpu: Gpu, warps: int) -> float:
    """Return the clocks of one tile's softmax in its warps. Pipes, or what one warp issues alone, and its waits on top.

    Args:
        work: what these warps do in a tile; warps: how many, a multiple of the quarters.
    """
    alu = Work(
        exp=work.exp,
        convert=work.convert,
        half_rate=work.half_rate,
        full_rate=work.full_rate,
        instructions=work.instructions,
    )
    alone = work.instructions / warps / gpu["warp_ipc"]
    return max(alone, longest(resources(alu, gpu))[1]) + work.syncs / warps * gpu["sync_clk"]


@dataclass(frozen=True)
class Kernel:
    """One kernel, ready to be timed.

    Attributes:
        name: of it; tile, once: work of a CTA per tile, and besides.
        tasks: of the schedule; first: unit that the set-up delays further (a staged operand), and by how much.
        cluster: CTAs that belong together; shared: neighbours read the same lines of L2 at nearly the same time.
        transition: of a persistent CTA, its work between two items; transitions: the same as tasks of the schedule;
            ring: stages that its loads share, see `schedule.persistent_end`.
    """

    name: str
    tile: Work
    once: Work
    tasks: tuple[Task, ...]
    first: tuple[str, float] = ("", 0.0)
    cluster: int = 1
    shared: bool = False
    transition: Work | None = None
    transitions: tuple[Task, ...] = ()
    ring: int = 0
    across: bool = False


@dataclass(frozen=True)
class Time:
    """A modelled time and what it is made of.

    Attributes:
        clocks: of the whole launch, without ``launch_us``; us: of all, of a dependent launch from the end of the
            kernel before.
        tiles: clocks of the tile schedule in the steady state; exposed: of set-up, fill, drain and epilogue;
            combine_us: of the kernel that combines splits; hbm: clocks that HBM needs.
        bound: what the largest part of the time is; resource: the longest resource of a tile.
        waves: how often every SM gets a CTA.
    """

    clocks: float
    us: float
    tiles: float
    exposed: float
    combine_us: float
    hbm: float
    bound: str
    resource: str
    waves: int


def l2_share(gpu: Gpu, active: int, shared: bool = False) -> float:
    """Return B a clock that each of ``active`` SMs reads from L2. It is its share, or what one SM can take."""
    all_sms = gpu["l2_shared_bytes_sm" if shared else "l2_bytes_sm"] * gpu["sms"]
    return min(gpu["tma_in_bytes"], all_sms / max(active, 1))


def cta_clocks(kernel: Kernel, tiles: int, gpu: Gpu, l2: float, persistent: bool = False) -> tuple[float, float]:
    """Return clocks of a CTA from its first load on.

    Also those in the steady state of its tiles; ``persistent``: no fill.
    """
    steady = max(longest(resources(kernel.tile, gpu, l2))[1], slope(kernel))
    once = longest(resources(kernel.once, gpu, l2))[1]
    if persistent:
        return tiles * steady + once, tiles * steady
    makespan = schedule.end(list(kernel.tasks), tiles, _ready(kernel))
    return max(makespan, fill(kernel) + max(0, tiles - 1) * steady) + once, tiles * steady


def item_clocks(kernel: Kernel, tiles: int, gpu: Gpu, l2: float, few: int = 2, many: int = 5) -> float:
    """Return the clocks that one more item of ``tiles`` tiles costs a persistent CTA.

    No less than each resource needs for the tiles and the transition together; without tiles only the transition.
    """
    work = kernel.tile * tiles + kernel.transition
    needed = longest(resources(work, gpu, l2))[1]
    if tiles == 0:
        return max(needed, sum(task.clocks + task.latency for task in kernel.transitions))
    lists, how = (list(kernel.tasks), list(kernel.transitions), tiles), (kernel.ring, kernel.across)
    more = schedule.persistent_end(*lists, many, *how) - schedule.persistent_end(*lists, few, *how)
    return max(needed, more / (many - few))


def fill(kernel: Kernel) -> float:
    """Return the clocks of the first tile alone, from its load to its last result."""
    return schedule.end(list(kernel.tasks), 1, _ready(kernel))


def _ready(kernel: Kernel) -> dict[str, float]:
    return {kernel.first[0]: kernel.first[1]} if kernel.first[0] else {}


def slope(kernel: Kernel, tiles: int = 24) -> float:
    """Return the clocks a tile of a long schedule."""
    tasks = list(kernel.tasks)
    return (schedule.end(tasks, 2 * tiles) - schedule.end(tasks, tiles)) / tiles


def modelled(
    kernel: Kernel,
    gpu: Gpu,
    ctas: int,
    tiles: Iterable[int] | int,
    hbm_bytes: float = 0,
    combine_us: float = 0,
    persistent: bool = False,
    per_sm: int = 1,
    dependent: bool = False,
    beside: tuple[int, int] | None = None,
) -> Time:
    """Predict the time of a launch.

    Args:
        ctas: of the grid; tiles: of each CTA, or of CTAs of different length in equal numbers.
        hbm_bytes: that must cross HBM once; combine_us: of a second kernel that combines the splits.
        persistent: the next row's first loads run under this row's end. A kernel with ``transitions`` is persistent.
        per_sm: CTAs that share an SM, alternating on its units.
        dependent: a programmatic dependent launch, timed from the end of the kernel before.
        beside: (tiles, items): some of the CTAs, in a single wave, take so many items of so many tiles instead.
    """
    lengths = [tiles] if isinstance(tiles, int) else list(tiles)
    sms = int(gpu["sms"]) // kernel.cluster * kernel.cluster
    waves = -(-ctas // (sms * per_sm))
    active = min(sms, ctas)
    l2 = l2_share(gpu, active, kernel.shared)
    by_length = {n: cta_clocks(kernel, n, gpu, l2, persistent) for n in set(lengths)}
    each = [by_length[n] for n in lengths]
    mean, steady = sum(total for total, _ in each) / len(each), sum(s for _, s in each) / len(each)
    # CTAs of different length fill SMs one after the other: the sum over an SM, and no less than the longest.
    rounds = ctas / sms if len(lengths) > 1 else waves * per_sm
    body = max(rounds * mean, max(total for total, _ in each))
    stays = kernel.transition is not None
    if stays:
        further = {n: item_clocks(kernel, n, gpu, l2) if rounds > 1 else 0.0 for n in by_length}
        more = sum(further[n] for n in lengths) / len(lengths)
        body = max(mean + max(0, rounds - 1) * more, max(total for total, _ in each))
    elif persistent:
        body += fill(kernel)
    if beside is not None:
        few, items = beside
        more = (items - 1) * item_clocks(kernel, few, gpu, l2) if items > 1 else 0.0
        body = max(body, cta_clocks(kernel, few, gpu, l2)[0] + more)
    switches = 0 if persistent or stays else max(0, waves - 1) * gpu["switch_clk"]
    setup, launch_us = (gpu["first_byte_pdl_clk"], 0.0) if dependent else (gpu["first_byte_clk"], gpu["launch_us"])
    hbm = hbm_bytes / gpu.hbm_clk_bytes
    clocks = setup + max(switches + body, hbm)
    tile_clocks = steady * max(rounds, 1)
    us = gpu.microseconds(clocks) + launch_us + combine_us
    resource = longest({**resources(kernel.tile, gpu, l2), "latency of the tile's chain": slope(kernel)})[0]
    parts = {
        resource: gpu.microseconds(tile_clocks),
        "set-up, fill and drain": gpu.microseconds(max(0.0, clocks - tile_clocks)) + launch_us,
        "combine": combine_us,
    }
    bound = "HBM" if hbm > switches + body else longest(parts)[0]
    return Time(clocks, us, tile_clocks, clocks - tile_clocks, combine_us, hbm, bound, resource, waves)


def gemm(name: str, tile: Work, once: Work, stages: int, gpu: Gpu) -> Kernel:
    """Model a GEMM whose tile is a K step: loads run ``stages`` ahead of the MMAs."""
    step = resources(tile, gpu, l2_share(gpu, int(gpu["sms"]), shared=True))
    tasks = (
        Task("mma", "tensor core", max(step["tensor core"], step["SMEM"]), 0, (("load", 0),)),
        Task("load", "TMA", max(step["TMA in"], step["L2"]), gpu["load_latency_clk"], (("mma", stages),), stages),
    )
    return Kernel(name, tile, once, tasks, shared=True)


def attention(
    name: str,
    tile: Work,
    once: Work,
    qk: Work,
    pv: Work,
    stages: int,
    gpu: Gpu,
    warps: int = 4,
    scores: int = 2,
    cluster: int = 1,
    groups: int = 1,
    separate: bool = False,
    ahead: bool = True,
    active: int | None = None,
    shared: bool = False,
    bring: Work | None = None,
    send: tuple[Work, Work] = (Work(), Work()),
    transition: Work | None = None,
    parts: int = 1,
    q_stages: int = 1,
    blocks: int = 1,
    q_ahead: bool = False,
    stored: tuple[Work, Work] | None = None,
) -> Kernel:
    """Model an attention kernel: loads, Q K^T, softmax, P V.

    Args:
        tile: work of a CTA a KV tile; qk, pv: the MMAs of it by role.
        stages: KV tiles in shared memory; scores: tiles of scores in flight.
        warps: of one group of softmax warps; groups: groups that take turns with their own rows (FA3's ping-pong).
        separate: K and V are loaded apart, each with ``stages``; ahead: Q K^T of a tile goes out before P V of the one
            before; active: SMs that load at the same time, all if not
            given; shared: see `Kernel`; bring: the part of ``tile`` that as many other warps do to bring the keys;
            send: instructions of the warp that issues the loads, of a tile and a transition: no work of softmax warps;
        transition: what persistent CTAs do between two items: the next Q comes through the ring of keys, in
            ``q_stages`` of its stages. It is copied after the last P V, or with ``q_ahead`` before it; the first Q K^T
            follows the copy.
            parts: that a tile is loaded in and freed in, each of as many dimensions of all keys, a stage of the ring;
            blocks: of O, a multiple of ``parts``: P V goes block after block, and waits for each until the O of the
            item before is read. `groups` is 1 then.
        stored: of a transition, what as many warps of their own as softmax warps do with O: until they hand its blocks
            back, and after that; None: the softmax warps store O, and hand it back after that.
    """
    bring = bring or Work()
    alu = replace(tile, mma=Work().mma) - bring - send[0]
    l2 = l2_share(gpu, int(gpu["sms"]) if active is None else active, shared)
    load = max(tile.load_bytes / gpu["tma_in_bytes"], (tile.l2_bytes + tile.plain_load_bytes) / l2)
    load = max(load, tile.copies * gpu["copy_clk"], chain(bring, gpu, warps))
    latency = gpu["load_latency_clk"]
    blocks = max(blocks, parts)
    last_block = _of(blocks - 1)
    tasks = []
    for g, i in product(range(groups), range(parts)):
        part = resources(qk * (1 / (groups * parts)), gpu)
        score = max(part["tensor core"], part["SMEM"])
        after = ((f"load k{_of(i)}", 0), (f"softmax {g}", scores), *(() if ahead else ((f"pv {g}", 1),)))
        tasks.append(Task(f"qk {g}{_of(i)}", "tensor core", score, gpu["mma_latency_clk"], after, int(ahead)))
    last = _of(parts - 1)
    for g in range(groups):
        clocks = chain(alu * (1 / groups), gpu, warps)
        after = ((f"qk {g}{last}", 0), (f"pv {g}{last_block}", 2))
        tasks.append(Task(f"softmax {g}", f"warps {g}", clocks, 0, after, int(ahead)))
    for g, i in product(range(groups), range(blocks)):
        block = resources(pv * (1 / (groups * blocks)), gpu)
        weigh = max(block["tensor core"], block["SMEM"])
        after = ((f"load v{_of(i * parts // blocks)}", 0), (f"softmax {g}", 0))
        tasks.append(Task(f"pv {g}{_of(i)}", "tensor core", weigh, gpu["mma_latency_clk"], after))
    for i in range(parts):
        read = _of((i + 1) * blocks // parts - 1)  # the last block that a part is read for
        share, freed = load / parts, f"qk {groups - 1}{_of(i)}" if separate else f"pv {groups - 1}{read}"
        tasks.append(Task(f"load k{_of(i)}", "TMA", share / (1 + separate), latency, ((freed, stages),), stages, freed))
        after = ((f"pv {groups - 1}{read}", stages),)
        tasks.append(Task(f"load v{_of(i)}", "TMA", share / 2 if separate else 0, latency, after, stages))
    kernel = Kernel(name, tile, once, tuple(tasks), ("tensor core", latency), cluster, shared, transition)
    if transition is None:
        return kernel
    placed = transition.smem_mma_bytes / gpu["smem_bytes"]
    wanted = max(transition.load_bytes / l2, transition.copies * gpu["copy_clk"]) / q_stages
    copied = tuple((f"load q{_of(i)}", 0) for i in range(q_stages))
    transitions = [Task(name, "TMA", wanted, latency, freed="q in place", lead=stages) for name, _ in copied]
    before = ((f"qk 0{last}", 0),) if q_ahead else ()  # reads the Q that is overwritten
    transitions.append(Task("q in place", "tensor core", placed, 0, (*copied, *before), int(q_ahead)))
    sent = transition.store_bytes / l2
    if stored is None:
        after = ((f"pv 0{last_block}", 0),)
        transitions.append(
            Task("o", "warps 0", max(sent, chain(transition - send[1], gpu, warps)), 0, after, holds="pv 0")
        )
    else:
        read = chain(stored[0], gpu, warps)
        rest = max(sent, chain(stored[0] + stored[1], gpu, warps)) - read
        for i in range(blocks):
            name = f"pv 0{_of(i)}"
            transitions.append(Task(f"o{_of(i)}", "epilogue", read / blocks, 0, ((name, 0),), holds=name))
            transitions.append(Task(f"o out{_of(i)}", "epilogue", rest / blocks, 0))
    first = "tensor core", latency + placed
    return replace(kernel, transitions=tuple(transitions), ring=stages * parts, first=first, across=q_ahead)


def _of(part: int) -> str:
    """What the name of a task says of the part of a tile it works on; nothing of the first."""
    return f" part {part}" if part else ""


def combine_clocks(gpu: Gpu, splits: int, nbytes: float) -> float:
    """Return the clocks that the combine adds after the kernel that writes the splits. They are set-up, splits, bytes.

    Args:
        splits: of the keys; nbytes: read and written, from L2 if they fit.
    """
    rate = gpu["combine_bytes_sm"] * gpu["sms"]
    if nbytes > gpu["l2_size"]:
        rate = min(rate, gpu.hbm_clk_bytes)
    return gpu["combine_setup_clk"] + splits * gpu["combine_part_clk"] + nbytes / rate


def short_clocks(gpu: Gpu, waits: int, nbytes: float) -> float:
    """Return the clocks of a short dependent launch. Set-up, loads that wait for each other, and the bytes it moves.

    Args:
        waits: loads one after the other; nbytes: read and written, from L2 if they fit.
    """
    rate = gpu.l2_clk_bytes if nbytes <= gpu["l2_size"] else gpu.hbm_clk_bytes
    return gpu["short_setup_clk"] + waits * gpu["load_wait_clk"] + nbytes / rate
