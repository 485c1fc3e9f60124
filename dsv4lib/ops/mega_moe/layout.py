"""Lay out the memory of the fused MoE: a symmetric buffer that peers see, and a workspace that they do not.

Importable without the CuTe DSL. All ranks have the same layout, so a peer's region is at the peer's base address plus
the same offset. W ranks, E experts of which each rank owns E / W, M most tokens of a rank, k experts a token, H hidden.

    region         bytes                 written by          read by
    combined       4 (of 128)            owners of experts   this rank: results that have arrived
    counts         2 x W x E/W x 8       sources             this rank: routes of a source to an expert, and the epoch
    routes         2 x E/W x W x M x 4   sources             this rank: numbers t k + s of those routes
    x              M x H (H / 2)         this rank           owners: codes of tokens
    x_scales       M x pitch             this rank           owners: scales of those codes, row after row
    topk_idx       M x k x 8             this rank           this rank
    topk_weights   M x k x 4             this rank           owners
    combine        k x M x H x 2         owners of experts   this rank: bf16 result of (slot, token)

counts and routes have two halves, one for even and one for odd epochs: a rank that is done with an epoch may write the
next one's while a slower peer still reads this one's. It cannot get further, because that peer's counts of the next
epoch come only after it is done.

Tokens, and what both GEMMs read, are of one of two formats (`FORMATS`); weights have E2M1 codes in both.

    mode     codes                scales of a row
    w4a8     E4M3, H bytes        UE8M0 per 32
    nvfp4    E2M1, H / 2 bytes    UE4M3 per 16; their global scales are in factors of the sums

The sizes of x, x_scales, topk and combine are those of DeepGEMM's buffer for M tokens (`loader.mega_moe`). Its other
regions are here in the workspace, because no peer touches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dsv4lib.errors import ConfigError

ALIGN = 128  # bytes, of a region
ROW_BLOCK = 128  # an expert's rows start at a multiple: so do their scales
TILE = 128  # features of a tile
WORD = 4  # scales of a row that are together
BULK = 16  # bytes: what a bulk copy moves is a multiple
MAX_RANKS, MAX_K, MAX_EXPERTS = 32, 16, 1024
HALVES = 2  # of counts and routes
LOST = 1 << 30  # added to the count of a rank's own routes to an expert: some found no room


class Format(NamedTuple):
    """A format of activations.

    Attributes:
        bits: of a code. group: codes of a scale. step: elements of a K step, what H and I are multiples of.
    """

    bits: int
    group: int
    step: int


FORMATS = {"w4a8": Format(8, 32, 128), "nvfp4": Format(4, 16, 256)}
QUANTISED = {"w4a8": "mxfp8", "nvfp4": "nvfp4"}  # what L1 writes


def ceil_to(x: int, unit: int) -> int:
    """Round ``x`` up to a multiple of ``unit``."""
    return -(-x // unit) * unit


@dataclass(frozen=True)
class Layout:
    """Sizes of a group of ranks, and where everything is.

    Attributes:
        world: ranks W. experts: E of all ranks, a multiple of W. max_tokens: M, most tokens of a rank.
        topk: k, experts a token. hidden: H. intermediate: I; both multiples of 128, with "nvfp4" of 256.
        mode: formats of weights and activations, one of `FORMATS`.

    Raises:
        ConfigError: a size that is not allowed.
    """

    world: int
    experts: int
    max_tokens: int
    topk: int
    hidden: int
    intermediate: int
    mode: str = "w4a8"

    def __post_init__(self) -> None:
        if self.mode not in FORMATS:
            raise ConfigError("mode", self.mode, "one of " + ", ".join(FORMATS))
        ranges = {"world": MAX_RANKS, "experts": MAX_EXPERTS, "topk": MAX_K, "max_tokens": 1 << 20}
        for name, most in ranges.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(name, value, f"1 to {most}")
        if self.experts % self.world:
            raise ConfigError("experts", self.experts, f"a multiple of world, {self.world}")
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            step = self.format.step
            if value < step or value % step or value > 1 << 15:
                raise ConfigError(name, value, f"a multiple of {step} up to {1 << 15}")
        if self.world * self.max_tokens * self.topk * (self.hidden // TILE) >= 1 << 31:
            raise ConfigError("max_tokens", self.max_tokens, "so small that 31 bits count all results of a rank")

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.world

    @property
    def format(self) -> Format:
        """Return the format of tokens and of what both GEMMs read."""
        return FORMATS[self.mode]

    def code_bytes(self, elements: int) -> int:
        """Count the bytes of the codes of a row."""
        return elements * self.format.bits // 8

    def scales(self, elements: int) -> int:
        """Count the scales of a row."""
        return elements // self.format.group

    @property
    def pitch(self) -> int:
        """Bytes from one row of x_scales to the next."""
        return ceil_to(self.scales(self.hidden), BULK)

    @property
    def rows(self) -> int:
        """Rows of the workspace that suffice for any routing: every token of every rank, each expert's last block."""
        routes = self.world * self.max_tokens * min(self.topk, self.local)
        active = min(self.local, routes)
        return ROW_BLOCK * (active + (routes - active) // ROW_BLOCK)

    def regions(self) -> dict[str, int]:
        """Count the bytes of each region of the symmetric buffer, in order."""
        m, k = self.max_tokens, self.topk
        return {
            "combined": 4,
            "counts": HALVES * self.world * self.local * 8,
            "routes": HALVES * self.local * self.world * m * 4,
            "x": m * self.code_bytes(self.hidden),
            "x_scales": m * self.pitch,
            "topk_idx": m * k * 8,
            "topk_weights": m * k * 4,
            "combine": k * m * self.hidden * 2,
        }

    def offsets(self) -> dict[str, int]:
        """Find the offset of each region; ``end`` is the size of the buffer."""
        found, at = {}, 0
        for name, size in self.regions().items():
            found[name], at = at, at + ceil_to(size, ALIGN)
        return {**found, "end": at}

    @property
    def bytes(self) -> int:
        """Size of the symmetric buffer of a rank."""
        return self.offsets()["end"]

    def workspace(self) -> dict[str, tuple[int, ...]]:
        """List the shapes of the workspace's tensors.

        Codes and scales of the rows that both GEMMs read are bytes, ``sources`` int32, ``row_weights`` fp32.
        """
        blocks = self.rows // ROW_BLOCK
        return {
            "x_rows": (self.rows, self.code_bytes(self.hidden)),
            "x_row_scales": (blocks * (self.scales(self.hidden) // WORD), WORD * ROW_BLOCK),
            "h_rows": (self.rows, self.code_bytes(self.intermediate)),
            "h_row_scales": (blocks * (self.scales(self.intermediate) // WORD), WORD * ROW_BLOCK),
            "sources": (self.rows,),
            "row_weights": (self.rows,),
        }

    # ---- words of the state, int32, all 0 before the first call ----

    EPOCH, FINISHED, ARRIVED = 0, 1, 2

    @property
    def done(self) -> int:
        """First of the counters of tiles of L1, by expert; those of rows that have arrived are before them."""
        return self.ARRIVED + self.local

    @property
    def sent(self) -> int:
        """First of the counts that this rank sent, 64 bits an expert."""
        return ceil_to(self.done + self.local, 2)

    @property
    def state_words(self) -> int:
        """Words of the state."""
        return self.received + self.local

    @property
    def lost(self) -> int:
        """Word that counts routes of this rank that found no room, over all calls."""
        return self.sent + 2 * self.experts

    @property
    def received(self) -> int:
        """First of the counts of routes that this rank's experts got from all ranks, over all calls."""
        return self.lost + 1
