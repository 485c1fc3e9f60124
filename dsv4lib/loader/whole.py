"""Load a whole checkpoint tensor by tensor. It is checked before anything is read; memory is bounded by the largest.

config = read_config(checkpoint.config)
listed = Listed.of(checkpoint, config)         # every name, type and shape; all faults at once
for weight, tensor in listed.values():         # dequantised, in the order of `names.weights`
    ...
load_into(ReferenceModel(config), listed)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dsv4lib.config import ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, mxfp4, nvfp4
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.formats.mxfp4 import MXFP4Tensor
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.loader import experts, names
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.safetensors import CheckpointError, Cut
from dsv4lib.loader.settings import declared_format, read_config

SHOWN = 20  # faults of a kind that a message lists
Stored = NVFP4Tensor | MXFP4Tensor | FP8Tensor | torch.Tensor
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, name of the tensor


class TensorFaults(CheckpointError):
    """A checkpoint whose tensors are not those of its configuration.

    Attributes:
        missing, extra: names. wrong: name and what is wrong with its type or shape.
    """

    def __init__(self, missing: list[str], extra: list[str], wrong: list[str]):
        self.missing, self.extra, self.wrong = missing, extra, wrong
        counts = f"{len(missing)} missing, {len(extra)} extra, {len(wrong)} of a wrong type or shape"
        super().__init__("checkpoint", counts, "exactly the tensors of its configuration")
        lines = [f"checkpoint: {counts}"]
        for kind, found in (("missing", missing), ("extra", extra), ("wrong", wrong)):
            lines += [f"  {kind}: {item}" for item in found[:SHOWN]]
            lines += [f"  {kind}: and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        self.args = ("\n".join(lines),)


def format_of(checkpoint: Checkpoint) -> str:
    """Format of a checkpoint, one of `names.FORMATS`, from the first expert. Config.json must agree.

    Raises:
        CheckpointError: no first expert, or a declaration that the tensors contradict.
    """
    stem = "layers.0.ffn.experts.0.w1"
    weight = checkpoint.entry(f"{stem}.weight")
    if weight.dtype == torch.bfloat16:
        found = "bf16"
    elif weight.dtype == torch.float8_e4m3fn:
        found = "fp8"
    else:
        found = "nvfp4" if f"{stem}.weight_scale_2" in checkpoint else "mxfp4"
    declared = declared_format(checkpoint.config)
    if declared not in (None, found):
        raise CheckpointError("config.json", f"declares {declared}, but {stem} is {found}", "the format of the tensors")
    return found


@dataclass(frozen=True)
class Listed:
    """A checkpoint whose tensors were found complete.

    Attributes:
        checkpoint: the files. config: dimensions. form: one of `names.FORMATS`.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    form: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: ModelConfig | None = None) -> Listed:
        """Compare names, types and shapes with the configuration. Nothing but headers is read.

        Raises:
            ConfigFaults, TensorFaults: with everything that is wrong.
        """
        config = read_config(checkpoint.config) if config is None else config
        form = format_of(checkpoint)
        wanted = names.listing(config, form)
        missing = [name for name in wanted if name not in checkpoint]
        extra = sorted(name for name in checkpoint if name not in wanted)
        wrong = []
        for name, spec in wanted.items():
            if name not in checkpoint:
                continue
            entry = checkpoint.entry(name)
            shapes = [spec.shape] if spec.shape else [(), (1,)]
            if entry.shape not in shapes:
                wrong.append(f"{name}: shape {entry.shape}, not {spec.shape}")
            if entry.dtype not in spec.dtypes:
                wrong.append(f"{name}: {entry.dtype}, not {' or '.join(map(str, spec.dtypes))}")
        if missing or extra or wrong:
            raise TensorFaults(missing, extra, wrong)
        return cls(checkpoint, config, form)

    def stored(self, weight: names.Weight, cut: Cut | None = None) -> Stored:
        """Read one weight as it is stored; with ``cut`` no other part of it.

        Raises:
            CheckpointError: values that cannot be: a NaN, a scale of 0, an expert past the end.
        """
        kind = names.stored_as(weight, self.form)
        if kind in ("mxfp4", "nvfp4", "fp8"):
            stem = weight.name.removesuffix(".weight")
            return experts.read_projection(self.checkpoint, kind, stem, *weight.shape, cut)[0]
        entry = self.checkpoint.entry(weight.name)
        tensor = self.checkpoint.get(weight.name, (entry.dtype,), weight.shape, cut)
        if kind == "int64":
            last = self.config.n_experts - 1
            wrong = (tensor < 0) | (tensor > last)
            experts.refuse(weight.name, tensor, wrong, lambda value: value, f"0 to {last}")
        else:
            experts.refuse(weight.name, tensor, ~tensor.isfinite(), lambda value: value, "finite numbers")
        return tensor

    def values(self, progress: Progress | None = None) -> Iterator[tuple[names.Weight, torch.Tensor]]:
        """Read and dequantise every weight.

        It is fp32, bf16 or int64 as its role and format say (quantised ones: fp32).
        """
        done, total = 0, self.nbytes
        for weight in names.weights(self.config):
            yield weight, dequantize(self.stored(weight))
            done += sum(self.checkpoint.entry(n).nbytes for n in self.parts(weight))
            if progress is not None:
                progress(done, total, weight.name)

    def parts(self, weight: names.Weight) -> list[str]:
        """Return the names of the tensors that store one weight."""
        return list(names.specs(weight, names.stored_as(weight, self.form)))

    def specs(self, weight: names.Weight) -> dict[str, names.Spec]:
        """Return types and shapes of the tensors that store one weight, as they are in the files."""
        entries = {name: self.checkpoint.entry(name) for name in self.parts(weight)}
        return {name: names.Spec((entry.dtype,), entry.shape) for name, entry in entries.items()}

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(self.checkpoint.entry(name).nbytes for name in self.checkpoint)


def dequantize(stored: Stored, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dequantise a stored weight; what is not quantised is returned as it is."""
    if isinstance(stored, NVFP4Tensor):
        return nvfp4.dequantize(stored, dtype)
    if isinstance(stored, MXFP4Tensor):
        return mxfp4.dequantize(stored, dtype)
    if isinstance(stored, FP8Tensor):
        return fp8_block.dequantize(stored, dtype)
    return stored


def load_into(module: nn.Module, listed: Listed, progress: Progress | None = None) -> None:
    """Copy every weight into the parameter or buffer of its name.

    In the module's dtype and device.

    Args:
        module: has exactly the checkpoint's names, as `reference.model.ReferenceModel` does.
        listed: the checkpoint.
        progress: called after each tensor.

    Raises:
        ArgumentError: names or shapes of the module that are not the checkpoint's.
        CheckpointError: a tensor that cannot be read; the module is then partly loaded.
    """
    targets = dict(module.named_parameters()) | dict(module.named_buffers())
    wanted = {weight.name: weight.shape for weight in names.weights(listed.config)}
    different = sorted(targets.keys() ^ wanted.keys())
    different += [n for n in targets.keys() & wanted.keys() if tuple(targets[n].shape) != wanted[n]]
    if different:
        raise ArgumentError("module", different[:SHOWN], "a module with the checkpoint's names and shapes")
    with torch.no_grad():
        for weight, tensor in listed.values(progress):
            targets[weight.name].copy_(tensor)


def largest_tensor(listed: Listed) -> int:
    """Return bytes of the largest weight once dequantised. Loading needs them beside the module, a few times over."""
    return max(math.prod(weight.shape) * 4 for weight in names.weights(listed.config))
