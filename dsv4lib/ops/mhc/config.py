"""Derive the sizes of the mHC kernels from their settings and check them."""

from __future__ import annotations

from dsv4lib.dsl.budget import SMEM_LIMIT, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError
from dsv4lib.ops.quantize.config import RECIPES

N = 4  # streams
LANES = 32
COLUMNS = 8  # of a lane: 16 bytes of a row
WORDS = COLUMNS // 2
UNIT = 32  # columns of a warp: 4 lanes side by side
ROWS_N = 8  # N of an MMA: outputs, or tokens
COEFFICIENTS = N + N * N  # a token's post and comb
FP8_RECIPES = "fp8", "mxfp8"  # of y: scales of 128 columns, of 32

# few_tokens
MAX_WARPS = 14  # columns of a CTA over 32: d 7168 on 16 CTAs
GROUPS, GROUP_WARPS = 3, 24  # groups of eight tokens; their warps: with one more, 72 registers a thread

# many_tokens
TILE = 16  # tokens: M of an MMA
MANY_WARPS = 8  # workers; with four more warps, 168 registers a thread
IN_FLIGHT = 4  # tiles whose sums or pre may be on their way
RING = 8  # tiles that have slots in the workspace
MIX_FOURS = 4  # of 16 bytes a token: sums of pre, of products of streams, of squares
INPUTS = N + 1  # of a write-back: four streams and f
LIMBS = 3  # bf16 that add up to fp32
ROW_BYTES = 2 * UNIT  # of a token's stream, or of f, in a warp's stage
COEFFICIENT_WORDS = 16 * N  # a token: three limbs (and nothing), pairs of 8 inputs, streams


class Config:
    """Hold the settings of both kernels and what follows from them.

    Args:
        d: columns of a stream, a multiple of 32 ``cluster``.
        cluster: CTAs that share a token, one of `sizes`.
        post: write the sublayer's output back first; else the streams are taken as they are.
        head: collapse before the head: 4 coefficients, no post, no comb.
        keep: the streams written back are stored; needed unless ``head``, without a meaning unless ``post``.
        iters: Sinkhorn row/column pairs.
        recipe: y is written as E4M3 codes and UE8M0 scales, too, by one of `FP8_RECIPES`; None: it is not.
        keep_y: y is written in bf16; needed without ``recipe``.
        swizzled: scales in the 128x4 blocks of `formats.scale_swizzle`, padding included; else row-major.

    Raises:
        ConfigError: a value that is not allowed, or too much shared memory.
    """

    name = "Mhc"
    held_align = 64  # bytes
    sizes: tuple[int, ...] = (4, 8, 16)  # of a cluster

    def __init__(
        self,
        d: int = 4096,
        cluster: int = 16,
        post: bool = True,
        head: bool = False,
        keep: bool = True,
        iters: int = 20,
        recipe: str | None = None,
        keep_y: bool = True,
        swizzled: bool = True,
    ):
        if cluster not in self.sizes:
            raise ConfigError("cluster", cluster, f"one of {self.sizes}")
        most = UNIT * cluster * MAX_WARPS
        if d <= 0 or d % (UNIT * cluster) or d > most:
            raise ConfigError("d", d, f"a multiple of {UNIT * cluster}, at most {most}")
        if iters < 1:
            raise ConfigError("iters", iters, "at least 1")
        if not (keep or head):
            raise ConfigError("keep", keep, "True unless head: the next site needs the streams")
        if recipe is not None and (recipe not in FP8_RECIPES or head or d % RECIPES["fp8"].block):
            raise ConfigError("recipe", recipe, "None, or one of " + ", ".join(FP8_RECIPES) + " and no head")
        if not (keep_y or recipe):
            raise ConfigError("keep_y", keep_y, "True without a recipe")
        self.d, self.cluster, self.post, self.head, self.iters = d, cluster, post, head, iters
        self.keep = keep and post
        self.columns = d // cluster  # of a CTA
        self.warps = self.columns // UNIT
        self.coefficients = 0 if head else COEFFICIENTS  # sums that only the CTA that owns the token needs
        self.values = N + self.coefficients  # rows of fn
        self.tiles = -(-self.values // ROWS_N)  # MMAs side by side
        self.recipe, self.keep_y, self.swizzled = recipe, keep_y, swizzled
        self.format = RECIPES[recipe] if recipe else None
        self.units = self.format.block // UNIT if recipe else 0  # warps that share a scale
        self.derive()
        if self.smem_bytes > SMEM_LIMIT:
            used = f"{self.smem_bytes} of {SMEM_LIMIT} bytes of SMEM at d={d}"
            raise ConfigError("cluster", cluster, f"more CTAs: {used}")

    def derive(self) -> None:
        """Derive the sizes of a variant."""

    def floats(self) -> dict[str, tuple[int, str]]:
        """List shared memory in the order of its addresses. Each has its floats, and what they follow from."""
        return {}

    @property
    def smem_bytes(self) -> int:
        """Return the bytes of shared memory of a launch."""
        return whole_atoms(sum(row.used for row in self.budget()))

    def budget(self) -> list[BudgetRow]:
        """List what lies in shared memory, with its limit."""
        regions = self.floats().items()
        return [BudgetRow(name, 4 * floats, SMEM_LIMIT, "B", why) for name, (floats, why) in regions if floats]

    def space(self, groups: int) -> int:
        """Return the floats of a workspace for so many groups of CTAs."""
        return 0

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"{self.name}({', '.join([str(self.d), f'{self.cluster}x', *self.options()])})"

    def options(self) -> list[str]:
        """Name settings for the kernel's symbol."""
        flags = [name for name in ("post", "head", "keep") if vars(self)[name]]
        if self.recipe:
            flags += [self.recipe, *(name for name in ("keep_y", "swizzled") if vars(self)[name])]
        return flags


class FewConfig(Config):
    """Hold the settings of `few_tokens.MhcFewTokens`. They are those of `Config`, and groups and once.

    Where columns of a CTA are no multiple of a scale's 128, CTAs next to each other exchange maxima.

    Args:
        groups: of warps, each with eight tokens of a tile.
        once: a cluster has one tile, which is less code.
    """

    name = "MhcFewTokens"

    def __init__(
        self,
        d: int = 4096,
        cluster: int = 16,
        post: bool = True,
        head: bool = False,
        keep: bool = True,
        iters: int = 20,
        groups: int = 1,
        once: bool = False,
        recipe: str | None = None,
        keep_y: bool = True,
        swizzled: bool = True,
    ):
        self.groups, self.once = groups, once
        super().__init__(d, cluster, post, head, keep, iters, recipe, keep_y, swizzled)

    def derive(self) -> None:
        """Derive sizes."""
        groups = self.groups
        if not 1 <= groups <= max(1, min(GROUPS, GROUP_WARPS // self.warps)):
            raise ConfigError("groups", groups, f"at most {GROUPS}, and {GROUP_WARPS} warps")
        self.tile = ROWS_N * groups  # tokens
        self.owned_tokens = -(-self.tile // self.cluster)  # tokens of a tile that a CTA owns
        self.workers = LANES * self.warps * groups  # threads
        self.threads = self.workers + LANES
        # Pitches in floats that keep 16-byte reads of 8 lanes in different banks
        self.fn_pitch, self.sum_pitch = N * self.columns + 4, ROWS_N * self.tiles + 4
        self.pre_pitch = N * self.cluster + 4
        shared = self.units > 1 and self.warps % self.units != 0  # scales have columns of several CTAs
        self.neighbours = -(-(self.units - 1) // self.warps) if shared else 0  # CTAs of one scale, on either side

    def floats(self) -> dict[str, tuple[int, str]]:
        """List shared memory in the order of its addresses. Each has its floats, and what they follow from."""
        tile, ctas = f"{self.tile} tokens", f"{self.cluster} CTAs"
        tokens = 2 * self.tile
        return {
            "fn": (self.values * self.fn_pitch, f"{self.values} rows"),
            "held": (self.workers * (N + 1) * WORDS, f"{self.workers} lanes, 16 B of each stream and f"),
            "sums": (self.warps * self.tile * self.sum_pitch, f"{self.warps} warps, {tile}"),
            "pre": (tokens * self.pre_pitch, f"2 tiles of {tile}, {N} sums of {ctas}"),
            "squares": (tokens * self.cluster, f"2 tiles of {tile}, {ctas}: of X'"),
            "owned": (
                2 * self.owned_tokens * self.cluster * COEFFICIENTS,
                f"2 tiles of {self.owned_tokens} tokens, {ctas}",
            ),
            "x_squares": (tokens * self.cluster, f"2 tiles of {tile}, {ctas}: of x"),
            "maxima": (2 * tokens * self.neighbours, f"2 tiles of {tile}, {2 * self.neighbours} CTAs"),
            "warp_squares": (tokens * self.warps, f"{self.warps} warps, {tile}: of X', of x"),
            "coefficients": (tokens * COEFFICIENTS, f"2 tiles of {tile}"),
            "barriers": (2 * (N + 4), f"{N + 4} of 8 bytes"),
        }

    def options(self) -> list[str]:
        """Name settings for the kernel's symbol."""
        return [*super().options(), f"{self.groups} groups", *(["once"] if self.once else [])]


class ManyConfig(Config):
    """Hold the settings of `many_tokens.MhcManyTokens`. They are those of `Config`; d is at most 256 ``cluster``.

    The 4 to 32 CTAs that share a token are no cluster of the hardware.
    """

    name = "MhcManyTokens"
    held_align = 256  # bytes: places in a stage are XORed
    sizes = 4, 8, 16, 32
    once = False

    def derive(self) -> None:
        """Derive sizes."""
        if self.units > 1 and self.warps % self.units:
            raise ConfigError("recipe", self.recipe, f"mxfp8: {self.columns} columns of a CTA are no whole blocks")
        if self.warps > MANY_WARPS:
            most = MANY_WARPS * UNIT * self.cluster
            raise ConfigError("d", self.d, f"at most {most}: two parts of fn lie in registers")
        self.tile = TILE
        self.owned_tokens = -(-TILE // self.cluster)  # tokens of a tile that a CTA owns
        self.workers = LANES * self.warps
        self.threads = self.workers + 4 * LANES
        self.sum_pitch = 4 * MIX_FOURS + (4 if self.head else COEFFICIENTS)
        self.stage_bytes = TILE * N * ROW_BYTES  # of a warp, or of f of four warps
        self.half_bytes = self.stage_bytes // 2  # of eight tokens
        self.f_stages = -(-self.warps // N) if self.post else 0  # a tile
        for self.lag in (3, 2, 1):  # tiles from a projection to its mixture
            self.stages = self.lag + 2
            if self.smem_bytes <= SMEM_LIMIT:
                break

    def floats(self) -> dict[str, tuple[int, str]]:
        """List shared memory in the order of its addresses. Each has its floats, and what they follow from."""
        stages, coefficients = self.warps * self.stages + 2 * self.f_stages, 2 * TILE * COEFFICIENT_WORDS
        return {
            "fn": (self.workers * N * 4 * self.tiles, "the last of three limbs, in pairs"),
            "held": (stages * self.stage_bytes // 4, f"{stages} stages of {self.stage_bytes} B"),
            "sums": (self.warps * TILE * self.sum_pitch, f"{self.warps} warps, {TILE} tokens"),
            "pre": (IN_FLIGHT * TILE * N, f"{IN_FLIGHT} tiles of {TILE} tokens"),
            "coefficients": (coefficients, f"2 tiles of {TILE} tokens"),
            "squares": (2 * self.owned_tokens, f"2 tiles of {self.owned_tokens} tokens: of X'"),
            "maxima": (self.warps * TILE if self.units > 1 else 0, f"{self.warps} warps, {TILE} tokens"),
            "barriers": (2 * (10 + 2 * IN_FLIGHT), f"{10 + 2 * IN_FLIGHT} of 8 bytes"),
        }

    def space(self, groups: int) -> int:
        """Return the floats of a workspace for so many groups of CTAs."""
        return groups * RING * TILE * self.cluster * (self.sum_pitch + N)
