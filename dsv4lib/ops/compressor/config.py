"""Sizes of the compressor kernel, derived and checked, without the DSL."""

from __future__ import annotations

from dsv4lib.errors import ConfigError
from dsv4lib.formats import indexer_key, kv_entry
from dsv4lib.formats.paged import PageLayout

LANES, CHANNELS = 32, 4  # of a thread: 16 bytes of fp32
ROPE = 64  # last dims of an entry
PIECE = 64  # channels whose squares are added up before those of others
MAX_DEPTH, MAX_THREADS = 8, 512
# Layout of a page by format; None: dense rows.
LAYOUTS: dict[str, PageLayout | None] = {
    "kv": kv_entry.LAYOUT,
    "fp8": indexer_key.FP8_LAYOUT,
    "fp4": indexer_key.FP4_LAYOUT,
    "bf16": None,
    "fp32": None,
}
DIMS = {"kv": (kv_entry.HEAD_DIM,), "fp8": (indexer_key.DIM,), "fp4": (indexer_key.DIM,)}


class Sizes:
    """Hold what a compressor is and how its work is cut.

    Args:
        rate: tokens of a window, a power of two.
        overlap: pool the window before as well, through its own half of the columns.
        dim: of an entry: 128 or 512.
        form: of an entry: "kv" (584 bytes), "fp8" (132), "fp4" (68), or "bf16" and "fp32", dense rows.
        rotate: apply the Hadamard rotation after RoPE; 128 dims only.
        single: every request has exactly one row.
        running: the state is a running softmax of the open window instead of its rows; without overlap.
        rows: of a request's ring, a power of two from those of an entry on; 0: those.
        slices: CTAs (a cluster) that share an entry's channels; streamed: its rows.
        split: threads that share the rows of a channel; streamed: groups of its rows, a partial softmax each.
        stages: groups of rows under way in shared memory (`stream.StreamedCompressor`); 0: rows go to registers.
        teams: of 128 threads that have groups of their own when streamed: 1 or 2.
        fp4_conversion: as in `quantize.kernel.Quantize`.

    Raises:
        ConfigError: a value that is not one of these, or does not fit the others.
    """

    def __init__(
        self,
        rate: int = 4,
        overlap: bool = True,
        dim: int = 512,
        form: str = "kv",
        rotate: bool = False,
        single: bool = False,
        running: bool = False,
        slices: int = 1,
        split: int = 1,
        stages: int = 0,
        teams: int = 1,
        fp4_conversion: bool = True,
        rows: int = 0,
    ):
        if rate < 1 or rate & (rate - 1):
            raise ConfigError("rate", rate, "a power of two")
        if dim not in (128, 512):
            raise ConfigError("dim", dim, "128 or 512")
        if form not in LAYOUTS or dim not in DIMS.get(form, (128, 512)):
            fits = [name for name in LAYOUTS if dim in DIMS.get(name, (128, 512))]
            raise ConfigError("form", form, f"one of {', '.join(fits)} for {dim} dims")
        if rotate and dim != indexer_key.DIM:
            raise ConfigError("rotate", rotate, f"False for {dim} dims")
        self.rate, self.overlap, self.dim, self.form = rate, overlap, dim, form
        self.rotate, self.single, self.running = rotate, single, running
        self.slices, self.split, self.fp4_conversion = slices, split, fp4_conversion
        self.layout = LAYOUTS[form]
        if running and overlap:
            raise ConfigError("running", running, "False with overlap")
        self.pooled = rate * (1 + overlap)  # rows of an entry
        self.rows = rows or self.pooled
        if self.rows < self.pooled or self.rows & (self.rows - 1) or (running and rows):
            raise ConfigError("rows", rows, f"0 if running, else a power of two from {self.pooled} on")
        self.fetched = 1 if running and single else self.pooled  # rows that an item looks at
        self.width = dim * (1 + overlap)  # of a row
        if slices not in ((1, 2, 4, 8) if dim == 512 else (1,)):
            raise ConfigError("slices", slices, "1, 2, 4 or 8 for 512 dims, else 1")
        self.quads = dim // CHANNELS // slices  # threads across the channels of a CTA
        if split < 1 or self.fetched % split or self.fetched // split > MAX_DEPTH:
            raise ConfigError("split", split, f"a divisor of {self.fetched}, at least {self.fetched // MAX_DEPTH}")
        if overlap and split > 1:
            raise ConfigError("split", split, "1 with overlap")
        self.depth = self.fetched // split  # rows of a thread
        self.stages, self.teams = stages, teams
        self.once = dim == 512 and not single  # rows leave L2 first (`access.evict_first`)
        if stages:
            self._stream()
            return
        self.team = self.quads * split  # threads of an entry in a CTA
        if not LANES <= self.team <= MAX_THREADS or (split > 1 and self.quads > LANES):
            raise ConfigError(
                "split", split, f"{LANES} to {MAX_THREADS} threads, at most {LANES} across if rows are split"
            )
        self.items = 4 if self.team == LANES and split == slices == 1 else 1  # entries of a CTA
        self.threads = self.team * self.items
        self.warps = self.threads // LANES
        self.finishers = max(LANES, self.quads)  # threads that end an entry; lanes past the quads repeat

    def _stream(self) -> None:
        """Size the streamed variant."""
        if not self.single or self.running or self.overlap:
            raise ConfigError("stages", self.stages, "0 but for a decode step with a state of rows, without overlap")
        self.quads = self.dim // CHANNELS
        most = self.split // self.slices  # groups of a CTA
        if not most:
            raise ConfigError("slices", self.slices, f"at most split, {self.split}, when streamed")
        if self.teams not in (1, 2) or self.teams > most:
            raise ConfigError("teams", self.teams, f"1 or 2, at most {most}")
        if self.stages < 0 or self.stages > most or self.stages % self.teams:
            raise ConfigError("stages", self.stages, f"0 to {most}, a multiple of {self.teams} teams")
        self.groups_of_team = most // self.teams  # groups of a team
        self.others = self.teams - 1 + self.slices - 1  # partial softmaxes that the first team merges
        self.team, self.items = self.quads * self.teams, 1
        self.threads = self.team + LANES  # and the fetcher
        self.warps, self.finishers = self.team // LANES, self.quads

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = [name for name in ("overlap", "rotate", "single", "running", "fp4_conversion") if vars(self)[name]]
        cut = f"{self.slices}x{self.split}" + f" {self.stages} stages {self.teams} teams" * (self.stages > 0)
        ring = [f"{self.rows} rows"] if self.rows > self.pooled else []
        return f"Compressor({', '.join([f'{self.rate}, {self.dim}, {self.form}, {cut}', *ring, *flags])})"
