"""Random weights under which every mechanism of the model matters.

Default initialisations leave sinks, position biases, router biases and mHC offsets at zero, which hides faults there.
Here every tensor is drawn, with scales that keep the logits near a standard deviation of 1.
"""

from __future__ import annotations

import torch
from torch import nn

from dsv4lib.config import ModelConfig


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("attn_sink"):
        return noise
    if name.endswith("ape"):
        return 0.5 * noise
    if name.endswith("gate.bias"):
        return 0.2 * noise
    if name.endswith("_base"):
        return 0.5 * noise
    if name.endswith("_scale"):
        return 0.75 + 0.25 * noise.tanh()
    if name == "embed.weight":
        return noise
    return noise * shape[-1] ** -0.5


@torch.no_grad()
def randomize_(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Draw all parameters and all ``tid2eid`` tables in place.

    In fp32, then cast to the model's dtype.

    Tensors are drawn in the order of their names from one CPU generator. A token's hash experts are distinct.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.copy_(_draw(name, parameter.shape, generator))
    for _, table in sorted(model.named_buffers()):
        order = torch.rand(config.vocab, config.n_experts, generator=generator).argsort(-1)
        table.copy_(order[:, : config.experts_per_token])
