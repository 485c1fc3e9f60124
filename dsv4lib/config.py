"""Hold the dimensions of DeepSeek-V4 in one place. They are checked against themselves when they are built.

Why it exists: kernels, reference model and notebooks must agree on every size, and a size that contradicts another
must stop the program instead of giving wrong numbers. FLASH and PRO hold the values of the released
``inference/config.json`` files (April 2026 preview); TINY has every mechanism of both in a model that runs in
milliseconds on a CPU. Counts and cache sizes below are derived from the dimensions, never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from dsv4lib.errors import ArgumentError, ConfigError


class LayerKind(StrEnum):
    """What a layer's queries attend to besides the sliding window. All kinds have the window.

    SWA: nothing more. CSA: the ``index_topk`` entries picked by the lightning indexer among entries of ``csa_rate``
    tokens. HCA: every entry of ``hca_rate`` tokens.
    """

    SWA = "SWA"
    CSA = "CSA"
    HCA = "HCA"


@dataclass(frozen=True)
class YarnConfig:
    """YaRN frequency interpolation (no amplitude factor in DSV4).

    ``factor``: how far the context is stretched; ``original_positions``: context of the first training stage;
    ``beta_fast``, ``beta_slow``: turns over that context between which the frequencies are blended.
    """

    factor: float = 16.0
    original_positions: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ConfigError("yarn.factor", self.factor, "a number >= 1")
        if self.original_positions < 1:
            raise ConfigError("yarn.original_positions", self.original_positions, "an integer >= 1")
        if not self.beta_fast > self.beta_slow > 0:
            raise ConfigError("yarn.beta_fast", self.beta_fast, f"greater than beta_slow={self.beta_slow}, both > 0")


def schedule(n_layers: int, first: Sequence[int], csa_rate: int, hca_rate: int) -> tuple[int, ...]:
    """Build ``compress_ratios``. The given first layers come first, then CSA and HCA in turn, then 0 for the MTP block.

    Args:
        n_layers: layers of the backbone (the MTP block not counted).
        first: ratios of the first layers, each 0 (SWA), ``csa_rate`` or ``hca_rate``; Flash ``(0, 0)``, Pro
            ``(128, 128)``.
        csa_rate, hca_rate: tokens per compressed entry.

    Returns:
        ``n_layers + 1`` ratios; the last one is the MTP block's.

    Raises:
        ConfigError: more first layers than layers, or a ratio that is none of the three.
    """
    if n_layers < 1:
        raise ConfigError("n_layers", n_layers, "an integer >= 1")
    if len(first) > n_layers:
        raise ConfigError("first", tuple(first), f"at most n_layers={n_layers} ratios")
    rest = [(csa_rate, hca_rate)[i % 2] for i in range(n_layers - len(first))]
    ratios = (*first, *rest, 0)
    kinds_of(ratios, csa_rate, hca_rate)
    return ratios


def kinds_of(ratios: Sequence[int], csa_rate: int, hca_rate: int) -> tuple[LayerKind, ...]:
    """Translate compress ratios to layer kinds. ConfigError for a ratio that is not 0, ``csa_rate`` or ``hca_rate``."""
    if csa_rate < 1:
        raise ConfigError("csa_rate", csa_rate, "an integer >= 1")
    if hca_rate < 1 or hca_rate == csa_rate:
        raise ConfigError("hca_rate", hca_rate, f"an integer >= 1 that differs from csa_rate={csa_rate}")
    table = {0: LayerKind.SWA, csa_rate: LayerKind.CSA, hca_rate: LayerKind.HCA}
    for layer, ratio in enumerate(ratios):
        if ratio not in table:
            allowed = f"0 (SWA), csa_rate={csa_rate} or hca_rate={hca_rate}"
            raise ConfigError(f"compress_ratios[{layer}]", ratio, allowed)
    return tuple(table[ratio] for ratio in ratios)


@dataclass(frozen=True)
class ModelConfig:
    """Every dimension of one DSV4 model. Building one checks it; ``dataclasses.replace`` checks again.

    ``compress_ratios`` has ``n_layers + 1`` entries (0 = SWA, ``csa_rate`` = CSA, ``hca_rate`` = HCA), the last one for
    the MTP block, which must be 0: the released MTP block has no compressor weights.

    Raises:
        ConfigError: naming the field, its value and what would be allowed.
    """

    n_layers: int
    hidden: int
    vocab: int
    n_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    csa_rate: int
    hca_rate: int
    index_heads: int
    index_dim: int
    index_topk: int
    n_experts: int
    experts_per_token: int
    n_shared_experts: int
    expert_width: int
    routed_scaling: float
    n_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    sinkhorn_iters: int
    hc_eps: float
    rms_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnConfig | None
    max_positions: int
    compress_ratios: tuple[int, ...]

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_relations()
        self._check_schedule()

    def _check_sizes(self) -> None:
        for name, kind in self.__annotations__.items():
            value = getattr(self, name)
            if kind == "int":
                least = 0 if name == "n_hash_layers" else 1
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ConfigError(name, value, f"an integer >= {least}")
            elif kind == "float" and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise ConfigError(name, value, "a finite number > 0")
        if self.yarn is not None and not isinstance(self.yarn, YarnConfig):
            raise ConfigError("yarn", self.yarn, "a YarnConfig or None")

    def _check_relations(self) -> None:
        if self.rope_dim % 2 or self.rope_dim > min(self.head_dim, self.index_dim):
            allowed = f"even and at most head_dim={self.head_dim} and index_dim={self.index_dim}"
            raise ConfigError("rope_dim", self.rope_dim, allowed)
        if self.n_heads % self.o_groups:
            raise ConfigError("o_groups", self.o_groups, f"a divisor of n_heads={self.n_heads}")
        if self.experts_per_token > self.n_experts:
            raise ConfigError("experts_per_token", self.experts_per_token, f"at most n_experts={self.n_experts}")
        if self.n_hash_layers > self.n_layers:
            raise ConfigError("n_hash_layers", self.n_hash_layers, f"at most n_layers={self.n_layers}")
        if self.hc_mult < 2:
            raise ConfigError("hc_mult", self.hc_mult, "at least 2 residual streams")
        if self.yarn is not None and self.max_positions > self.yarn.factor * self.yarn.original_positions:
            allowed = (
                f"at most yarn.factor * yarn.original_positions = {self.yarn.factor * self.yarn.original_positions:g}"
            )
            raise ConfigError("max_positions", self.max_positions, allowed)

    def _check_schedule(self) -> None:
        if not isinstance(self.compress_ratios, tuple) or len(self.compress_ratios) != self.n_layers + 1:
            allowed = f"a tuple of n_layers + 1 = {self.n_layers + 1} ratios (the last is the MTP block's)"
            raise ConfigError("compress_ratios", self.compress_ratios, allowed)
        kinds = kinds_of(self.compress_ratios, self.csa_rate, self.hca_rate)
        if kinds[-1] is not LayerKind.SWA:
            raise ConfigError("compress_ratios[-1]", self.compress_ratios[-1], "0: the MTP block has no compressor")

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of the ``n_layers`` backbone layers."""
        return kinds_of(self.compress_ratios, self.csa_rate, self.hca_rate)[:-1]

    @cached_property
    def mtp_kind(self) -> LayerKind:
        """Return the kind of the MTP block."""
        return kinds_of(self.compress_ratios, self.csa_rate, self.hca_rate)[-1]

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Return the indices of the backbone layers of one kind."""
        return tuple(i for i, k in enumerate(self.layer_kinds) if k is kind)

    def rate(self, kind: LayerKind) -> int:
        """Return the tokens per compressed entry of a kind; 0 for SWA."""
        return {LayerKind.SWA: 0, LayerKind.CSA: self.csa_rate, LayerKind.HCA: self.hca_rate}[kind]

    @property
    def nope_dim(self) -> int:
        """Return the dims of a head that are not rotated (the first ones)."""
        return self.head_dim - self.rope_dim

    @property
    def group_width(self) -> int:
        """Return the input width of one output-projection group. A group is consecutive heads, concatenated."""
        return self.n_heads * self.head_dim // self.o_groups

    @property
    def mix_width(self) -> int:
        """Count the numbers one mHC site computes per token. ``n`` pre, ``n`` post, ``n * n`` comb (24 for n = 4)."""
        return self.hc_mult * (2 + self.hc_mult)

    def is_hash_layer(self, layer: int) -> bool:
        """Tell whether experts of this backbone layer come from the token id table."""
        return layer < self.n_hash_layers

    @cached_property
    def total_params(self) -> int:
        """Count the weights of the backbone: all layers, embedding, LM head. No ``tid2eid`` tables, no MTP block."""
        layers = sum(self._layer_params(i, self.n_experts) for i in range(self.n_layers))
        return layers + self._collapse_params + self.hidden + 2 * self.vocab * self.hidden

    @cached_property
    def active_params(self) -> int:
        """Count the weights multiplied for one token. Chosen and shared experts only; the embedding is a lookup."""
        layers = sum(self._layer_params(i, self.experts_per_token) for i in range(self.n_layers))
        return layers + self._collapse_params + self.hidden + self.vocab * self.hidden

    @cached_property
    def mtp_params(self) -> int:
        """Return weights of the MTP block. Embedding and LM head are shared with the backbone and not counted again."""
        d = self.hidden
        block = self._attention_params(self.mtp_kind) + self._site_params + self._ffn_params(self.n_experts, bias=True)
        return block + 2 * d * d + 3 * d + self._collapse_params

    @property
    def _collapse_params(self) -> int:
        n = self.hc_mult
        return n * n * self.hidden + n + 1

    @property
    def _site_params(self) -> int:
        """Two mHC sites and the two norms of one layer."""
        return 2 * (self.mix_width * self.hc_mult * self.hidden + self.mix_width + 3) + 2 * self.hidden

    def _layer_params(self, layer: int, experts: int) -> int:
        ffn = self._ffn_params(experts, bias=not self.is_hash_layer(layer))
        return self._attention_params(self.layer_kinds[layer]) + self._site_params + ffn

    def _ffn_params(self, experts: int, bias: bool) -> int:
        router = self.n_experts * self.hidden + (self.n_experts if bias else 0)
        return router + (experts + self.n_shared_experts) * 3 * self.hidden * self.expert_width

    def _attention_params(self, kind: LayerKind) -> int:
        d, q_width = self.hidden, self.n_heads * self.head_dim
        query = self.q_lora_rank * (d + 1 + q_width)
        key_value = self.head_dim * (d + 1)
        output = self.o_groups * self.o_lora_rank * (self.group_width + d)
        total = query + key_value + output + self.n_heads
        if kind is LayerKind.HCA:
            total += self._compressor_params(self.head_dim, self.head_dim, self.hca_rate)
        if kind is LayerKind.CSA:
            total += self._compressor_params(self.head_dim, 2 * self.head_dim, self.csa_rate)
            total += self._compressor_params(self.index_dim, 2 * self.index_dim, self.csa_rate)
            total += self.index_heads * (self.index_dim * self.q_lora_rank + d)
        return total

    def _compressor_params(self, dim: int, width: int, rate: int) -> int:
        return 2 * width * self.hidden + rate * width + dim


def kv_row_bytes(config: ModelConfig, kv: str = "fp8") -> int:
    """Return the bytes of one KV row, a token's in the window or a compressed entry's.

    ``fp8``: nope dims E4M3, rope dims bf16, one UE8M0 scale per 64 nope dims padded to 8 bytes (584 B for 448 + 64).
    ``bf16``: all dims bf16 (1024 B for 512).
    """
    if kv == "fp8":
        scales = -(-config.nope_dim // 64)
        return config.nope_dim + 2 * config.rope_dim + 8 * -(-scales // 8)
    if kv == "bf16":
        return 2 * config.head_dim
    raise ArgumentError("kv", kv, "'fp8' or 'bf16'")


def index_key_bytes(config: ModelConfig, index: str = "fp8") -> int:
    """Return the bytes of one indexer key.

    ``fp8``: E4M3 and one fp32 scale (132 B for 128 dims); ``fp4``: E2M1 and one UE8M0 scale per 32 dims (68 B);
    ``bf16``: 256 B.
    """
    if index == "fp8":
        return config.index_dim + 4
    if index == "fp4":
        return config.index_dim // 2 + -(-config.index_dim // 32)
    if index == "bf16":
        return 2 * config.index_dim
    raise ArgumentError("index", index, "'fp8', 'fp4' or 'bf16'")


def kv_bytes_per_token(config: ModelConfig, kv: str = "fp8", index: str = "fp8") -> float:
    """Return cache bytes that each further token adds over all backbone layers. Compressed entries and indexer keys.

    An entry of rate m costs 1/m row per token; window and compressor state do not grow and are in
    :func:`fixed_cache_bytes`. Flash: 3850.25 with FP8 indexer keys, 3514.25 with FP4.
    """
    csa, hca = len(config.layers_of(LayerKind.CSA)), len(config.layers_of(LayerKind.HCA))
    row = kv_row_bytes(config, kv)
    return csa * (row + index_key_bytes(config, index)) / config.csa_rate + hca * row / config.hca_rate


def fixed_cache_bytes(config: ModelConfig, kv: str = "fp8") -> dict[str, int]:
    """Return the cache bytes a request holds whatever its length. ``window`` (MTP block included) and ``state`` (fp32).

    The state is what the compressors need to go on: for HCA ``hca_rate`` rows of (k, z), for CSA the previous and the
    current window, ``2 * csa_rate`` rows of double width, for the main compressor and the indexer's.
    """
    window = (config.n_layers + 1) * config.window * kv_row_bytes(config, kv)
    csa_row = 2 * 2 * (config.head_dim + config.index_dim)
    csa = len(config.layers_of(LayerKind.CSA)) * 2 * config.csa_rate * csa_row * 4
    hca = len(config.layers_of(LayerKind.HCA)) * config.hca_rate * 2 * config.head_dim * 4
    return {"window": window, "state": csa + hca}


FLASH = ModelConfig(
    n_layers=43,
    hidden=4096,
    vocab=129280,
    n_heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    window=128,
    csa_rate=4,
    hca_rate=128,
    index_heads=64,
    index_dim=128,
    index_topk=512,
    n_experts=256,
    experts_per_token=6,
    n_shared_experts=1,
    expert_width=2048,
    routed_scaling=1.5,
    n_hash_layers=3,
    swiglu_limit=10.0,
    hc_mult=4,
    sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn=YarnConfig(),
    max_positions=1048576,
    compress_ratios=schedule(43, (0, 0), 4, 128),
)
"""DeepSeek-V4-Flash."""

PRO = ModelConfig(
    n_layers=61,
    hidden=7168,
    vocab=129280,
    n_heads=128,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1536,
    o_groups=16,
    o_lora_rank=1024,
    window=128,
    csa_rate=4,
    hca_rate=128,
    index_heads=64,
    index_dim=128,
    index_topk=1024,
    n_experts=384,
    experts_per_token=6,
    n_shared_experts=1,
    expert_width=3072,
    routed_scaling=2.5,
    n_hash_layers=3,
    swiglu_limit=10.0,
    hc_mult=4,
    sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn=YarnConfig(),
    max_positions=1048576,
    compress_ratios=schedule(61, (128, 128), 4, 128),
)
"""DeepSeek-V4-Pro."""

TINY = ModelConfig(
    n_layers=6,
    hidden=64,
    vocab=320,
    n_heads=4,
    head_dim=32,
    rope_dim=8,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=16,
    window=8,
    csa_rate=4,
    hca_rate=8,
    # 16 heads: with few, all ReLUs of a pair are often 0, and such exact ties make top-k comparisons meaningless.
    index_heads=16,
    index_dim=16,
    index_topk=3,
    n_experts=8,
    experts_per_token=3,
    n_shared_experts=1,
    expert_width=48,
    routed_scaling=1.5,
    n_hash_layers=3,
    swiglu_limit=10.0,
    hc_mult=4,
    sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn=YarnConfig(original_positions=256),
    max_positions=4096,
    compress_ratios=schedule(6, (0, 0), 4, 8),
)
"""A model with every mechanism of the two that runs in milliseconds: for tests and notebooks."""
