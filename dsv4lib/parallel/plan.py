"""Say how many ranks divide a model, and what each of them holds.

    plan = Plan.of(FLASH, tensor=8, data=2)        16 ranks; experts are divided by all of them
    plan.share(3)                                  what rank 3 reads of a checkpoint (`loader.share`)

Rank r is number r mod T of the T ranks of its tensor group, which have the same requests and divide heads, vocabulary
and the shared expert. There are ``data`` such groups, with requests of their own. E consecutive ranks divide the routed
experts; where E is less than all ranks, the experts are there several times.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.config import ModelConfig
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.layers.dense import TILE
from dsv4lib.loader.share import BLOCK, UNITS, Part, Share


class PlanError(ConfigError):
    """Sizes of a plan that a model, or each other, do not allow."""


@dataclass(frozen=True)
class Plan:
    """Sizes of the groups of ranks.

    Attributes:
        config: of the model. tensor: ranks that divide heads. experts: ranks that divide the routed experts.
        data: groups of ranks with requests of their own.
    """

    config: ModelConfig
    tensor: int = 1
    experts: int = 1
    data: int = 1

    @classmethod
    def of(cls, config: ModelConfig, tensor: int = 1, experts: int = 0, data: int = 1) -> Plan:
        """Make a plan; ``experts`` 0: all ranks divide them.

        Raises:
            PlanError: sizes that are not allowed.
        """
        return cls(config, tensor, experts or tensor * data, data)

    def __post_init__(self) -> None:
        c = self.config
        for name in ("tensor", "data", "experts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(name, value, "an integer >= 1")
        if self.tensor not in allowed_tensor(c):
            sizes = ", ".join(map(str, allowed_tensor(c)))
            what = f"o_groups={c.o_groups}" if c.o_groups > 1 else f"n_heads={c.n_heads}, of one group"
            raise PlanError("tensor", self.tensor, f"one of {sizes}, divisors of {what}")
        if self.world % self.experts:
            raise PlanError("experts", self.experts, f"a divisor of the {self.world} ranks (tensor x data)")
        if self.experts > c.n_experts:
            raise PlanError("experts", self.experts, f"at most n_experts={c.n_experts}")

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.tensor * self.data

    @property
    def lockstep(self) -> bool:
        """Tell whether ranks with different requests share experts, so that they must run step by step together."""
        return self.data > 1 and self.experts > 1 and self.tensor % self.experts > 0

    def tensor_ranks(self, rank: int) -> range:
        """Return the ranks of a rank's tensor group."""
        first = self._checked(rank) // self.tensor * self.tensor
        return range(first, first + self.tensor)

    def expert_ranks(self, rank: int) -> range:
        """Return the ranks of a rank's expert group."""
        first = self._checked(rank) // self.experts * self.experts
        return range(first, first + self.experts)

    def data_index(self, rank: int) -> int:
        """Return which of the groups with requests of their own a rank is in."""
        return self._checked(rank) // self.tensor

    def share(self, rank: int, arch: str = "sm_100a") -> Share:
        """Return what a rank holds, in operands for ``arch``."""
        tensor, experts = Part(self._checked(rank) % self.tensor, self.tensor), Part(rank % self.experts, self.experts)
        return Share(self.config, tensor, experts, UNITS.get(arch, BLOCK))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world:
            raise ArgumentError("rank", rank, f"0 to {self.world - 1}")
        return rank


def allowed_tensor(config: ModelConfig) -> list[int]:
    """List the sizes of a tensor group that a model allows.

    Groups of heads stay whole, as scales of 128 of the projections do: up to 8 ranks for Flash, 16 for Pro. A model of
    one group has only its heads to divide, at the price of one more sum a layer.
    """
    c = config
    if c.o_groups == 1:
        return [n for n in range(1, c.n_heads + 1) if c.n_heads % n == 0 and c.hidden % n == 0]
    whole = c.o_groups * c.o_lora_rank
    return [n for n in range(1, c.o_groups + 1) if c.o_groups % n == 0 and (whole % TILE or whole // n % TILE == 0)]
