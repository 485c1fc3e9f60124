"""Into how many parts to split the keys of an attention, from shapes alone.

With few tokens most of a GPU idles: one token of 128 heads is one pair of CTAs on 148 SMs. Parts of its keys can run
beside each other; a second kernel joins them. In microseconds:

    time(s) = tile * ceil(tiles / s)  +  [s > 1] (JOIN + EACH * s + PART * blocks * s)        units * s <= slots

    units   CTAs or clusters without splitting: tokens x blocks of heads; they keep their SMs until they end
    slots   how many run at once: SMs / CTAs of a cluster
    blocks  of 64 heads, of all tokens
    tiles   of the longest list of keys that the shapes allow
    tile    of 64 keys, in a CTA or in a pair: 1,571 and 1,024 clocks of a B200 at 1.856 GHz, modelled (`bench.fmha`);
            1,992 and 1,224 of 584-byte entries
    JOIN    the second launch: it is there early but waits for the last part
    EACH    it reads the parts one behind the other, some at once
    PART    writing and reading 64 heads x 512 x 4 bytes once more

JOIN, EACH and PART are a fit, within 13 %, to medians of the join on an H200, of a form that loaded 4 parts at once
(now up to 8, not timed yet): (parts, tokens, heads) in us: (2, 8, 64) 2.1, (16, 8, 64) 4.2, (16, 1, 64) 2.8,
(32, 1, 128) 4.4, (8, 4, 128) 3.1, (2, 64, 64) 4.9, (4, 32, 64) 4.0. What is chosen is within 4 % of the best by the
model of `bench.fmha`.

What is not in it: start and end of a CTA, the same for every s as long as all run at once. The smallest s of the
shortest time is taken. So a grid that fills the GPU is never split; s never exceeds the tiles; more tokens never mean
more parts; no part is empty for the longest list. Nothing here reads data: a captured graph stays right.
"""

from __future__ import annotations

from dsv4lib.errors import ArgumentError

SM_COUNT = 148  # of a B200
TILE_US = {1: 0.85, 2: 0.55}  # by CTAs of a cluster
FP8_TILE_US = {1: 1.07, 2: 0.66}
JOIN, EACH, PART = 1.8, 0.03, 0.019


def choose(units: int, tiles: int, slots: int, blocks: int = 1, tile_us: float = TILE_US[1]) -> int:
    """Parts of the keys.

    Args:
        units: clusters (or CTAs) of the unsplit launch, >= 1.
        tiles: of 64 keys, of the longest list, >= 0.
        slots: clusters that run at once, >= 1.
        blocks: of 64 heads that a cluster works on.
        tile_us: of a tile.

    Raises:
        ArgumentError: a number that is too small.
    """
    for name, value, least in (("units", units, 1), ("tiles", tiles, 0), ("slots", slots, 1), ("blocks", blocks, 1)):
        if value < least:
            raise ArgumentError(name, value, f"at least {least}")
    most = max(1, min(tiles, slots // units))
    return min(range(1, most + 1), key=lambda s: cost(s, units * blocks, tiles, tile_us))


def cost(splits: int, head_blocks: int, tiles: int, tile_us: float = TILE_US[1]) -> float:
    """Microseconds, as in the module's formula; ``head_blocks``: blocks of 64 heads of all tokens."""
    join = JOIN + (EACH + PART * head_blocks) * splits if splits > 1 else 0.0
    return tile_us * -(-tiles // splits) + join
