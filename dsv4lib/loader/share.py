"""Say which tensors of a checkpoint, and which part of each, one rank of several holds.

| weight                        | of T ranks of the tensor group each has  | in a model of one group of heads |
|-------------------------------|------------------------------------------|----------------------------------|
| ``embed``, ``head``           | rows of the vocabulary                   | the same                         |
| ``wq_b``, ``attn_sink``       | rows of its heads                        | the same                         |
| ``wo_a``                      | rows of its groups                       | columns of its heads             |
| ``wo_b``                      | columns of its groups                    | rows of the hidden size          |
| ``shared_experts.w1, w3 / w2``| rows / columns of the width              | the same                         |
| ``experts.E``                 | of the expert group: whole experts       | the same                         |
| all others                    | all of it                                | the same                         |

The shared expert is divided where its parts have whole blocks of scales (of ``unit``), else every rank has all of it.
Compressors, indexer, router, norms and mHC act on what all heads share; they are whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from dsv4lib.config import ModelConfig
from dsv4lib.layers.communicator import part_of
from dsv4lib.loader import names
from dsv4lib.loader.safetensors import Cut

UNITS = {"sm_90a": 128}  # elements of the shared expert's width that share a scale on a Hopper; else BLOCK
BLOCK = 32


class Part(NamedTuple):
    """Which of ``count`` parts, from 0."""

    index: int = 0
    count: int = 1

    def of(self, total: int) -> range:
        """Return what it has of ``total`` things in order."""
        return part_of(total, *self)


@dataclass(frozen=True)
class Share:
    """What one rank holds.

    Attributes:
        config: of the whole model. tensor, experts: its place in the groups of these names.
        unit: what a part of the shared expert's width is a multiple of.
    """

    config: ModelConfig
    tensor: Part = Part()
    experts: Part = Part()
    unit: int = BLOCK

    @property
    def one_group(self) -> bool:
        """Tell whether ranks divide the heads of the one group there is."""
        return self.tensor.count > 1 and self.config.o_groups == 1

    @cached_property
    def local(self) -> ModelConfig:
        """Return the configuration of this rank's attention: its heads in their groups."""
        heads, groups = (len(self.tensor.of(n)) for n in (self.config.n_heads, self.config.o_groups))
        return replace(self.config, n_heads=heads, o_groups=max(groups, 1)) if self.tensor.count > 1 else self.config

    @property
    def shared_width(self) -> int:
        """Return the width of the shared expert."""
        return self.config.n_shared_experts * self.config.expert_width

    @property
    def divides_shared(self) -> bool:
        """Tell whether ranks divide the shared expert."""
        return self.tensor.count > 1 and self.shared_width % (self.tensor.count * self.unit) == 0

    @property
    def shared_part(self) -> range | None:
        """Return this rank's part of the shared expert's width; None: all of it."""
        return self.tensor.of(self.shared_width) if self.divides_shared else None

    def holds(self, weight: names.Weight) -> bool:
        """Tell whether this rank has anything of a weight."""
        expert = weight.name.partition(".ffn.experts.")[2]
        return not expert or int(expert.partition(".")[0]) in self.experts.of(self.config.n_experts)

    def cut(self, weight: names.Weight) -> Cut | None:
        """Return the part of a weight that this rank has; None: all of it."""
        if self.tensor.count == 1:
            return None
        c, rows = self.config, range(weight.shape[0])
        layer, _, name = weight.name.partition(".ffn.") if ".ffn." in weight.name else weight.name.partition(".attn.")
        name = name or layer
        if name in ("embed.weight", "head.weight"):
            return Cut(self.tensor.of(c.vocab))
        if name in ("wq_b.weight", "attn_sink"):
            heads, each = self.tensor.of(c.n_heads), weight.shape[0] // c.n_heads
            return Cut(range(heads.start * each, heads.stop * each))
        if name in ("wo_a.weight", "wo_b.weight"):
            by_rows = (name == "wo_a.weight") != self.one_group
            return Cut(self.tensor.of(len(rows))) if by_rows else Cut(rows, self.tensor.of(weight.shape[1]))
        if name.startswith("shared_experts.") and self.divides_shared:
            return Cut(rows, self.shared_part) if ".w2." in name else Cut(self.shared_part)
        return None

    def part(self, weight: names.Weight) -> names.Weight:
        """Return a weight with the shape that this rank has of it."""
        cut = self.cut(weight)
        if cut is None:
            return weight
        shape = (len(cut.rows), *weight.shape[1:]) if cut.columns is None else (len(cut.rows), len(cut.columns))
        return weight._replace(shape=shape)

    def stored_bytes(self, weight: names.Weight, specs: Mapping[str, names.Spec]) -> int:
        """Count the bytes that this rank reads of a weight.

        Args:
            specs: the tensors that store it, codes first, as `names.specs` lists them.
        """
        if not self.holds(weight):
            return 0
        cut, (code, *scales) = self.cut(weight), specs.values()
        if cut is None:
            return code.nbytes + sum(spec.nbytes for spec in scales)
        parts = [cut.rows, *([] if len(weight.shape) == 1 else [cut.columns or range(weight.shape[1])])]
        tiles = math.prod(-(-p.stop // names.TILE) - p.start // names.TILE for p in parts)
        codes = math.prod(map(len, parts)) * code.dtypes[0].itemsize
        return codes + sum(tiles * spec.dtypes[0].itemsize for spec in scales)

    def nbytes(self, form: str, mtp: bool = True) -> int:
        """Count the bytes of a checkpoint in format ``form`` that this rank reads. ``mtp``: draft block included."""
        found = (w for w in names.weights(self.config) if mtp or not w.name.startswith(names.MTP))
        return sum(self.stored_bytes(w, names.specs(w, names.stored_as(w, form))) for w in found)
