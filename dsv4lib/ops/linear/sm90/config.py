"""Configure the Hopper kernel of linears. Sizes, buffers, budgets, and which options fit a shape."""

from __future__ import annotations

from typing import NamedTuple

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError

BLOCK = 128  # bytes of a row of the swizzle, K of a scale of FP8
OPERANDS = ("e4m3", "bf16")
TILES_N = (8, 16, 32, 64)  # tokens of a tile = N of the wgmma
ROWS_M = 64  # of a consumer warpgroup
STEPS_K = (128, 256, 512)
SPLITS = (1, 2, 4, 8)
OUTPUTS = ("bf16", "fp32")
SCALES = ("e8m0", "fp32")
LOADERS = 128  # threads that load weights; as many load tokens and scales
PIECE = 16  # bytes of a cp.async
CONSUMER_REGISTERS, LOAD_REGISTERS = 184, 72  # with two consumer warpgroups; 512 that a lane of a quarter has
MAX_STAGES = 12


class Config:
    """Options of the kernel and what follows from them.

    Args:
        tile_n: tokens of a tile, one of `TILES_N`.
        groups_m: consumer warpgroups, 1 or 2, each with 64 rows of the weights.
        split: CTAs of a cluster that share K, one of `SPLITS`.
        step_k: bytes of K of a stage, one of `STEPS_K`.
        out: "bf16" or "fp32".
        operands: "e4m3" with scales, or "bf16".
        x_scales, w_scales: "e8m0" or "fp32", of E4M3.

    Raises:
        ConfigError: a value that is not one of these, or that does not go with the others.
    """

    def __init__(
        self,
        tile_n: int = 8,
        groups_m: int = 1,
        split: int = 1,
        step_k: int = 256,
        out: str = "bf16",
        operands: str = "e4m3",
        x_scales: str = "e8m0",
        w_scales: str = "e8m0",
    ):
        for name, value, allowed in (
            ("tile_n", tile_n, TILES_N),
            ("groups_m", groups_m, (1, 2)),
            ("split", split, SPLITS),
            ("step_k", step_k, STEPS_K),
            ("out", out, OUTPUTS),
            ("operands", operands, OPERANDS),
            ("x_scales", x_scales, SCALES),
            ("w_scales", w_scales, SCALES),
        ):
            if value not in allowed:
                raise ConfigError(name, value, "one of " + ", ".join(map(str, allowed)))
        self.tile_n, self.groups_m, self.split, self.step_k, self.out = tile_n, groups_m, split, step_k, out
        self.operands, self.scaled = operands, operands == "e4m3"
        self.x_scales, self.w_scales = (x_scales, w_scales) if self.scaled else (None, None)
        # ---- threads ----
        self.consumers = 128 * groups_m
        self.threads = self.consumers + 2 * LOADERS
        self.w_warp = self.consumers // 32  # first that loads weights
        self.x_warp = self.w_warp + LOADERS // 32  # first that loads tokens
        self.moves_registers = groups_m > 1
        # ---- a stage ----
        self.tile_m = ROWS_M * groups_m
        self.chunks = step_k // BLOCK
        self.pieces = step_k // PIECE  # of a row
        self.rows_a_pass = LOADERS // self.pieces
        self.w_bytes, self.x_bytes = self.tile_m * step_k, tile_n * step_k
        self.factor_bytes = 4 * tile_n * self.chunks if self.scaled else 0
        # ---- scales: a loader of tokens holds `held` pairs, those of `ahead` steps ----
        self.held = min(8, max(1, 16 * tile_n * self.chunks // LOADERS))
        self.ahead = self.held * LOADERS // (tile_n * self.chunks)
        # ---- sums: the cluster's CTAs each finish those of `own_warps` warps or of none ----
        self.sums = tile_n // 2
        self.own_warps = -(-self.consumers // 32 // split)
        self.four_bytes = 16 * 32 * self.own_warps  # of a four of all lanes that send to a CTA
        self.slots = split * self.own_warps * 32 * self.sums if split > 1 else 0
        # ---- shared memory ----
        self.stages = next(n for n in range(MAX_STAGES, 1, -1) if self._smem_bytes(n) <= SMEM_LIMIT)

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        scales = f", {self.x_scales}, {self.w_scales}" if self.scaled else ""
        sizes = f"{self.tile_n}, {self.groups_m}, {self.split}, {self.step_k}"
        return f"{type(self).__name__}({sizes}, {self.out}, {self.operands}{scales})"

    def _sizes(self, stages: int) -> dict[str, tuple[int, str]]:
        """Return (bytes, why) of everything in shared memory, in order."""
        n = self.tile_n
        return {
            "weights": (stages * self.w_bytes, f"{stages} stages x {self.tile_m} rows x {self.step_k} B"),
            "tokens": (stages * self.x_bytes, f"{stages} stages x {n} tokens x {self.step_k} B"),
            "factors": (stages * self.factor_bytes, f"{stages} stages x {n} tokens x {self.chunks} fp32"),
            "sums": (4 * self.slots, f"{self.split} CTAs x {self.own_warps} warps x 32 lanes x {self.sums} fp32"),
            "control": (16 * stages + 16, f"2 x {stages} + 2 mbarriers x 8 B"),
        }

    def _smem_bytes(self, stages: int) -> int:
        return whole_atoms(sum(size for size, _ in self._sizes(stages).values()))

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, registers and threads of one CTA from the configuration."""
        sizes = self._sizes(self.stages)
        sizes["total"] = self._smem_bytes(self.stages), f"sum, up to a multiple of {SMEM_ALIGN} B"
        rows = [BudgetRow(f"SMEM: {name}", used, SMEM_LIMIT, "B", why) for name, (used, why) in sizes.items() if used]
        if self.moves_registers:
            used = self.groups_m * CONSUMER_REGISTERS + 2 * LOAD_REGISTERS
            why = f"{self.groups_m} consumers, 2 load warpgroups"
            rows.append(BudgetRow("registers", used, 512, "a lane of a quarter", why))
        why = f"{self.groups_m} consumer warpgroups, 2 that load"
        return [*rows, BudgetRow("threads", self.threads, 1024, "threads", why)]


class Plan(NamedTuple):
    """Options that fit a shape, and CTAs to launch."""

    tile_n: int
    groups_m: int
    split: int
    step_k: int
    grid: int


START = 6.0  # KiB: what a tile costs beside its bytes
STEP = 1.0  # KiB: what a step costs
EXCHANGE = 6.0  # KiB: what a cluster's exchange costs for each of its CTAs, beside the sums that they send
SUMS = 4.0  # what a KiB of those costs
CLUSTERS = {1: 1.0, 2: 0.5, 4: 0.212, 8: 0.091}  # that run at once, of the SMs: of 132 28 of four, 12 of eight


def plan(groups: int, tokens: int, features: int, k: int, sms: int) -> Plan:
    """Choose the options with which the busiest SM takes the fewest bytes. They come from L2 and HBM.

    Clusters that do not run at once would double the time, and GPCs lack SMs here and there; so fewer clusters of four
    and eight are launched than there are SMs for. How many run at once is assumed, not asked of the GPU.

    Args:
        groups: linears side by side. tokens: of each, at least 1. features: N. k: bytes of a row. sms: of the GPU.
    """
    tile_n = next((n for n in TILES_N if tokens <= n), TILES_N[-1])
    choices = [(s, m, step) for step in STEPS_K[:0:-1] for s in SPLITS for m in (1, 2) if step == 256 or tile_n <= 16]
    best = None
    for split, groups_m, step_k in choices:
        steps, tile_m = -(-k // step_k), ROWS_M * groups_m
        if split > steps:
            continue
        tiles = groups * -(-features // tile_m) * -(-tokens // tile_n)
        at_once = min(tiles, max(1, int(sms * CLUSTERS[split])))
        step = (tile_m + tile_n) * step_k / 1024 + STEP
        sent = tile_m * min(tokens, tile_n) * 4 / 1024 * (split - 1) / split
        exchange = EXCHANGE * split + SUMS * sent if split > 1 else 0.0
        cost = -(-tiles // at_once) * (-(-steps // split) * step + START + exchange)
        if best is None or cost < best[0]:
            best = cost, Plan(tile_n, groups_m, split, step_k, at_once * split)
    if best is None:  # never: split 1 fits any K
        raise ConfigError("K", k, "above 0")
    return best[1]
