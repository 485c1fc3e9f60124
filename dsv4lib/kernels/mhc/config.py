"""Sizes of the mHC kernel, derived from its settings and checked."""

from __future__ import annotations

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.common.budget import SMEM_LIMIT, BudgetRow, whole_atoms

N = 4  # streams
TILE = 16  # tokens of an MMA
LANES = 32
COLUMNS = 8  # of a lane: 16 bytes of a row
UNIT = 32  # columns of a warp: 4 lanes side by side
ROWS_N = 8  # outputs of an MMA
OWNED = N + N * N  # sums that only the CTA that owns the token needs: post and comb
COEFFICIENTS = N + N * N  # of the site before, a token
MAX_WARPS = 15  # that stream; with one more, 512 threads of at most 128 registers
MAX_THREADS = 640  # of at most 96 registers
PARTS = 4  # threads that send to all CTAs
FOURS = 4  # of 16 bytes that `gram` sends to all CTAs, a token: pre, products of streams, squares


class Config:
    """Settings of `Mhc`, and what follows from them.

    Args:
        d: columns of a stream, a multiple of 32 ``cluster``.
        cluster: CTAs that share a token: 4, 8 or 16.
        post: write the sublayer's output back first; else the streams are taken as they are.
        head: collapse before the head: 4 coefficients, no post, no comb.
        keep: the streams written back are stored; needed unless ``head``, without a meaning unless ``post``.
        iters: Sinkhorn row/column pairs.
        gram: the norm of the mixture follows from the products of the streams with each other, which travel with the
            sums of the projection; else its squares are added up in an exchange of their own.
        groups: 2: two groups of worker warps take the tiles of a cluster in turn; needs ``gram``.
        depth: tiles whose sums may be on their way or wait to be read: 2, or 1 with ``gram`` and one group; None: 2 if
            shared memory holds them.

    Raises:
        ConfigError: a value that is not allowed, or too much shared memory.
    """

    def __init__(
        self,
        d: int = 4096,
        cluster: int = 16,
        post: bool = True,
        head: bool = False,
        keep: bool = True,
        iters: int = 20,
        gram: bool = False,
        groups: int = 1,
        depth: int | None = None,
    ):
        if cluster not in (4, 8, 16):
            raise ConfigError("cluster", cluster, "4, 8 or 16")
        if d <= 0 or d % (UNIT * cluster) or d > UNIT * cluster * MAX_WARPS:
            raise ConfigError("d", d, f"a multiple of {UNIT * cluster}, at most {UNIT * cluster * MAX_WARPS}")
        if iters < 1:
            raise ConfigError("iters", iters, "at least 1")
        if groups not in (1, 2) or (groups == 2 and not gram):
            raise ConfigError("groups", groups, "1, or 2 with gram")
        if not (keep or head):
            raise ConfigError("keep", keep, "True unless head: the next site needs the streams")
        self.d, self.cluster, self.post, self.head, self.iters = d, cluster, post, head, iters
        self.keep, self.gram, self.groups = keep and post, gram, groups

        # Work of a CTA: a slice of the columns, a warp 32 of them
        self.columns = d // cluster
        self.warps = self.columns // UNIT
        self.workers = LANES * self.warps  # of a group
        self.threads = groups * self.workers + LANES
        if self.threads > MAX_THREADS:
            raise ConfigError("groups", groups, f"at most {MAX_THREADS} threads, not {self.threads}")
        self.values = N if head else N + OWNED
        self.tiles = -(-self.values // ROWS_N)  # MMAs side by side
        self.slots = TILE // cluster  # tokens of a tile that a CTA owns

        # Pitches in floats that keep 16-byte reads of 8 lanes in different banks
        self.fn_pitch = N * self.columns + 4
        self.sum_pitch = ROWS_N * self.tiles + 4  # the squares behind the products
        if gram:
            self.sum_pitch = 4 * FOURS + (4 if head else OWNED)
        self.all_pitch = 4 * (FOURS * cluster + FOURS)
        self.pre_pitch = N * cluster + 4
        self.square_pitch = cluster + 4

        # Shared memory in floats
        self.fn_floats = self.values * self.fn_pitch
        self.sum_floats = groups * self.warps * TILE * self.sum_pitch
        self.pre_floats = 0 if gram else 2 * TILE * self.pre_pitch  # two tiles each
        self.square_floats = 0 if gram else 2 * TILE * self.square_pitch
        self.mixed_floats = 0 if gram else 2 * cluster * TILE
        self.mine_floats = 0 if gram else self.warps * TILE
        self.owned_floats = 2 * self.slots * cluster * OWNED
        self.coefficient_floats = 2 * TILE * COEFFICIENTS
        if depth not in ((None, 1, 2) if gram and groups == 1 else (None, 2)):
            raise ConfigError("depth", depth, "2, or 1 with gram and one group")
        self.depth = depth or 2
        self.all_floats = self.depth * TILE * self.all_pitch if gram else 0
        if gram and groups == 1 and depth is None and self.smem_bytes > SMEM_LIMIT:
            self.depth, self.all_floats = 1, self.all_floats // 2
        if self.smem_bytes > SMEM_LIMIT:
            raise ConfigError(
                "cluster", cluster, f"more CTAs: {self.smem_bytes} of {SMEM_LIMIT} bytes of SMEM at d={d}"
            )

    @property
    def smem_bytes(self) -> int:
        """Shared memory that the launch asks for."""
        return whole_atoms(sum(row.used for row in self.budget()))

    def budget(self) -> list[BudgetRow]:
        """What lies in shared memory."""
        rows = (
            ("fn", self.fn_floats, f"{self.values} rows of {self.fn_pitch}"),
            ("sums of warps", self.sum_floats, f"{self.groups * self.warps} warps, {TILE} tokens, {self.sum_pitch}"),
            ("pre for all", self.pre_floats, f"2 tiles of {TILE} tokens, {N} sums of {self.cluster} CTAs"),
            ("squares for all", self.square_floats, f"2 tiles of {TILE} tokens, of {self.cluster} CTAs"),
            (
                "sums of owned tokens",
                self.owned_floats,
                f"2 tiles of {self.slots} tokens, {OWNED} sums of {self.cluster} CTAs",
            ),
            (
                "squares of x",
                self.mixed_floats + self.mine_floats,
                f"2 tiles of {TILE} tokens of {self.cluster} CTAs, {self.warps} warps",
            ),
            (
                "sums for all",
                self.all_floats,
                f"{self.depth} tiles of {TILE} tokens, {4 * FOURS} sums of {self.cluster} CTAs",
            ),
            ("coefficients", self.coefficient_floats, f"2 tiles of {TILE} tokens, {COEFFICIENTS}"),
        )
        return [BudgetRow(name, 4 * floats, SMEM_LIMIT, "B", why) for name, floats, why in rows if floats]

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        options = [name for name in ("post", "head", "keep", "gram") if vars(self)[name]]
        options += [f"{self.groups} groups"] * (self.groups > 1) + ["1 buffer"] * (self.depth == 1)
        return f"Mhc({', '.join([str(self.d), f'{self.cluster}x', *options])})"
