"""Choose splits of an attention's keys and dimensions, from shapes alone.

With few tokens most of a GPU idles: one token of 128 heads is one pair of CTAs on 148 SMs. Splits of its keys can run
beside each other; a second kernel combines them. And two CTAs can weigh the same keys, each for half of the dimensions
of O (``dims`` 2): nothing to combine, and the bits are the same. In microseconds:

    time(s, dims) = tile * ceil(tiles / s) - [dims = 2] SAVED + START * blocks * s * dims
                  + [s > 1] (COMBINE + EACH * s + PARTIAL * blocks * (s + 1/2))              units * s * dims <= slots

    units   CTAs or clusters without splitting: tokens x blocks of heads; they keep their SMs until they end
    slots   how many run at once: SMs / CTAs of a cluster
    blocks  of 64 heads, of all tokens
    tiles   of the longest list of keys that the shapes allow
    tile    of 64 keys, the mean of those of the list (`Tile`, `mean_tile`)
    SAVED   at the ends: half of the dimensions of the first product with values, and of O to store
    START   Q of 64 heads once more from L2, which all CTAs share
    COMBINE the second launch: it starts early but waits for the last split
    EACH    it adds the splits one after the other
    PARTIAL writing and reading 64 heads x 512 x 4 bytes once more; O itself is half as much

Where whole splits leave SMs idle that are too few for one more, a last split of another length may use them: a share
of every token's keys, worked on by fewer CTAs, which take one token after the other (`ops.fmha.work.KeySplits`). How
much follows from shapes, so a token's bits do not depend on its place among the others.

    time = max(tile * ceil((tiles - last) / (s - 1)), rounds * (tile * last + TRANSITION) - TRANSITION, HBM) + combine
    rounds = ceil(units / (slots - units * (s - 1)))                    TRANSITION  from one token to the next
    HBM     all keys at 7.26 TB/s: where they take longer, idle SMs would not help

It is taken where it saves `LEAST` of the time: only for very many tiles, 130 of 584-byte entries (HCA at 1M tokens).

Tiles are those of `predict.fmha`, clocks of a B200 at 1.856 GHz, in a CTA and in a pair (SAVED: what half of
the dimensions save of a single tile, less what they save of a tile further on):

    keys                              whole           half            SAVED
    entries by index, row by row      1,598  1,024    1,518    860    720 of both
    ranges, 64 rows a copy            1,480  1,032    1,225    869    370
    584-byte entries                  1,992  1,224    1,672  1,032    480

Half a tile of a range is 1,160 where few SMs read, 1,388 where 128 do, and SAVED then 435: what stands there chooses
best in between.

COMBINE and EACH are a fit, within 17 %, of what combining adds on an H200 after a kernel that writes the splits
(`bench.probes.combine_probe`, 26 launches; its clocks at a B200's 1.856 GHz): (splits, tokens, heads) in us: (2, 8, 64)
1.8, (16, 8, 64) 5.3, (16, 1, 64) 2.3, (44, 1, 64) 5.2, (32, 1, 128) 4.2, (8, 4, 128) 3.2, (2, 64, 64) 5.7. PARTIAL,
0.026 us there, is less by the ratio of the bytes that SMs of both get from L2. By the model what is chosen is within
3 % of the best for the shapes of its table, and within 4.5 % for 2, 4, 16, 20, 48 and 64 tokens at 4K and 32K.

What is not in it: the rest of start and end of a CTA, the same for all as long as all run at once. Of the shortest
times that of the smallest s is taken, then that of one split of the dimensions. So a grid that fills the GPU is never
split; s never exceeds the tiles; no split is empty for the longest list; and with ``dims`` 1 more tokens never mean
more splits. Nothing here reads data: a captured graph stays right.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv4lib.errors import ArgumentError

SM_COUNT = 148  # of a B200
HOPPER_SM_COUNT = 132  # of an H200
START = 0.0075
HBM_US = 64 / 7.26e6  # of a byte of each key of a tile
TRANSITION, LEAST = 0.3, 0.03
SHARES = 1 << 10  # what the last split's share is counted in
COMBINE, EACH, PARTIAL = 1.24, 0.062, 0.018


class Tile(NamedTuple):
    """Microseconds of 64 keys: with all dimensions, and with half of them. saved: what the half saves once besides."""

    whole: float
    half: float
    saved: float


TILES = {  # by where keys come from and CTAs of a cluster
    "index": {1: Tile(0.861, 0.818, 0.39), 2: Tile(0.552, 0.463, 0.39)},
    "range": {1: Tile(0.797, 0.660, 0.20), 2: Tile(0.556, 0.468, 0.20)},
    "fp8": {1: Tile(1.073, 0.901, 0.26), 2: Tile(0.659, 0.556, 0.26)},
}


def mean_tile(entries: str, ctas: int, tiles: int, of_window: int) -> Tile:
    """Average ``tiles``, of which ``of_window`` are window keys.

    Those are 16-bit rows by range, whatever the entries are.

    Args:
        entries: a key of `TILES`; ctas: of a cluster.
    """
    share = of_window / tiles if tiles else 1.0
    return Tile(*(a + (b - a) * share for a, b in zip(TILES[entries][ctas], TILES["range"][ctas], strict=True)))


class Splits(NamedTuple):
    """How a call is split: ``keys`` ranges of keys, ``dims`` of O's dimensions.

    ``tail``: how the last split of the keys differs, as `arguments.launch_args` takes it; (0, 0): it does not.
    """

    keys: int
    dims: int
    tail: tuple[int, int] = (0, 0)


def choose(
    units: int,
    tiles: int,
    slots: int,
    blocks: int = 1,
    tile: Tile = TILES["index"][1],
    halves: bool = False,
    splits: int | None = None,
    key_bytes: int | None = None,
) -> Splits:
    """Choose splits of the keys and of the dimensions.

    Args:
        units: clusters (or CTAs) of the unsplit launch, >= 1.
        tiles: of 64 keys, of the longest list, >= 0.
        slots: clusters that run at once, >= 1.
        blocks: of 64 heads that a cluster works on.
        tile: what one takes; halves: the kernel can take half of the dimensions.
        splits: of the keys, where they are given; None: any.
        key_bytes: of a key in the pool; None: all splits are equal, as with ``splits``.

    Raises:
        ArgumentError: a number that is too small.
    """
    for name, value, least in (("units", units, 1), ("tiles", tiles, 0), ("slots", slots, 1), ("blocks", blocks, 1)):
        if value < least:
            raise ArgumentError(name, value, f"at least {least}")
    most = max(1, min(tiles, slots // units))
    allowed = range(1, most + 1) if splits is None else (splits,)
    dims = (1, 2) if halves and tiles > 0 else (1,)
    choices = [Splits(s, n) for s in allowed for n in dims if n == 1 or units * s * n <= slots]
    times = [cost(one.keys, units * blocks, tiles, tile, one.dims) for one in choices]
    best = min(times)
    equal = choices[times.index(best)]
    if splits is not None or key_bytes is None:
        return equal
    hbm = units * tiles * key_bytes * HBM_US
    unequal, shorter = _unequal(units, tiles, slots, blocks, tile.whole, hbm)
    return unequal if unequal is not None and shorter < (1 - LEAST) * max(best, hbm) else equal


def _unequal(
    units: int, tiles: int, slots: int, blocks: int, tile_us: float, hbm: float
) -> tuple[Splits | None, float]:
    """Find the best splits with a last one of another length, None if no SM is idle, and their time.

    Args:
        units, tiles, slots, blocks: as of `choose`. tile_us: of a tile. hbm: no time is shorter, us, combining apart.
    """
    found: tuple[Splits | None, float] = None, float("inf")
    for s in range(2, slots // units + 2):
        idle = slots - units * (s - 1)
        if not 0 < idle < units:  # a whole split more would fit
            continue
        rounds = -(-units // idle)
        for last in range(1, tiles // s + 1):
            of_last = rounds * (tile_us * last + TRANSITION) - TRANSITION
            body = max(tile_us * -(-(tiles - last) // (s - 1)), of_last, hbm)
            time = body + cost(s, units * blocks, 0)
            if time < found[1]:
                found = Splits(s, 1, (idle, -(-last * SHARES // tiles))), time
    return found


def cost(splits: int, head_blocks: int, tiles: int, tile: Tile = TILES["index"][1], dims: int = 1) -> float:
    """Estimate microseconds by the module's formula. head_blocks: blocks of 64 heads of all tokens."""
    combine = COMBINE + EACH * splits + PARTIAL * head_blocks * (splits + 0.5) if splits > 1 else 0.0
    each = tile.whole if dims == 1 else tile.half
    return each * -(-tiles // splits) - tile.saved * (dims - 1) + START * head_blocks * splits * dims + combine
