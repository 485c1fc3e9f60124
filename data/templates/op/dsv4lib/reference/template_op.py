"""Gate rows: silu(gate) * up. Source: say where the formula comes from."""

from __future__ import annotations

import torch


def template_op(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of one shape, in the dtype of the inputs."""
    return gate * torch.sigmoid(gate) * up
