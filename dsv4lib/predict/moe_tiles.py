"""Predict which tile a group of tokens should get.

It takes the time of both GEMMs with every tile, alone and as a pair.

`python -m dsv4lib.predict.moe_tiles` counts each configuration in the emulator and writes data/bench/moe_tiles.csv; the
rule of `ops.moe_gemm.tile_of` is tested against that table. Beside one group's rows nothing differs between columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.ops.moe_gemm.config import TILES_N
from dsv4lib.predict import moe, table
from dsv4lib.predict.rates import TABLE, Gpu, gpu

RESULTS = TABLE.with_name("moe_tiles.csv")
TOKENS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 14336, 16384, 32768)


@dataclass(frozen=True)
class Row:
    """us of GEMM ``gemm`` with a tile of so many tokens; ``pair``: two CTAs share it.

    ``expected`` tokens an expert on average; the rule's ``tile_n`` and ``ctas`` for them.
    """

    model: str
    mode: str
    tokens: int
    expected: int
    gemm: int
    tile_n: int
    ctas: int
    one_64: float
    one_128: float
    one_192: float
    one_256: float
    pair_64: float
    pair_128: float
    pair_192: float
    pair_256: float

    def us(self, tile_n: int, ctas: int) -> float:
        """Predict the us of a tile."""
        return getattr(self, f"{('one', 'pair')[ctas - 1]}_{tile_n}")

    @property
    def over_best(self) -> float:
        """Time of the rule's tile over that of the best."""
        best = min(self.us(tile_n, ctas) for tile_n in TILES_N for ctas in (1, 2))
        return self.us(self.tile_n, self.ctas) / best


def rows_of(shape: moe.Shape, card: Gpu) -> list[Row]:
    """Model both GEMMs of a layer with every tile."""
    experts, out = moe.MODELS[shape.model].experts, []
    counts = moe.loads(experts, shape.tokens)
    active = sum(n > 0 for n in counts)
    for number, (options, (features, k)) in enumerate(zip(moe.configurations(shape), shape.gemms(), strict=True)):
        nbytes = moe.gemm_bytes(shape, number, card, active, moe.TOP * shape.tokens)
        times = {}
        for ctas in (1, 2):
            for tile_n in TILES_N:
                counted = moe.counted(**{**options, "tile_n": tile_n, "ctas": ctas})
                times[f"{('one', 'pair')[ctas - 1]}_{tile_n}"] = moe.timed(
                    counted, counts, features, k, card, nbytes
                ).us
        expected = -(-shape.tokens * moe.TOP // experts)
        chosen = options["tile_n"], options["ctas"]
        out.append(Row(shape.model, shape.mode, shape.tokens, expected, number + 1, *chosen, **times))
    return out


def run() -> list[Row]:
    """Make every line of the table, mode by mode: a configuration is counted once."""
    card = gpu("B200")
    shapes = [moe.Shape(model, mode, n) for mode in moe.RECIPES for model in moe.MODELS for n in TOKENS]
    return [row for shape in shapes for row in rows_of(shape, card)]


def recorded() -> list[Row]:
    """Read the table as it was written."""
    return table.recorded(Row, RESULTS)


if __name__ == "__main__":
    table.record(run(), RESULTS)
