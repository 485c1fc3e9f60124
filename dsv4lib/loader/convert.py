"""Convert a checkpoint from one released format to another, one weight at a time.

| to    | linear                          | routed expert from MXFP4            | from NVFP4          | from FP8, bf16 |
|-------|---------------------------------|-------------------------------------|---------------------|----------------|
| mxfp4 | FP8 as stored; bf16: quantised  | as stored                           | requantised (lossy) | quantised      |
| nvfp4 | likewise                        | exact: global scale 2^n             | as stored           | quantised      |
| bf16  | dequantised                     | exact                               | rounded once        | dequantised    |

MXFP4 to NVFP4 by the recipe's amax / (6 * 448) would round every block scale a second time; a power of two loses
nothing (`weight_modes.convert`), and experts whose scales span more than E4M3 reaches are refused, not rounded. w1 and
w3 share one global scale, as ModelOpt writes them. FP8 dequantises to bf16 without loss when its scales are powers of
two (E8M0), as do MXFP4 and NVFP4 with a power of two.

``input_scale`` needs calibration data, which a conversion does not have. Written is the scale of a proven bound, under
which no activation saturates: a normed x has |x_i| <= sqrt(d) |g_i|, and the clamped SwiGLU at most limit^2.
Its price is resolution: an NVFP4 block scale is full E4M3 down to 2^-14.8 of the bound's largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4lib.config import ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, mxfp4, nvfp4, weight_modes
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.formats.mxfp4 import MXFP4Tensor
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.loader import names
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.names import Spec, Weight
from dsv4lib.loader.settings import FIELDS, format_fields, write_config
from dsv4lib.loader.whole import Listed, Progress, Stored, dequantize
from dsv4lib.loader.writer import SHARD_BYTES, Writer

TARGETS = ("mxfp4", "nvfp4", "bf16")
BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_wording.json")


@dataclass(frozen=True)
class Summary:
    """What a conversion did.

    Attributes:
        source, target: formats. tensors, nbytes: written. weights: number by kind of treatment.
    """

    source: str
    target: str
    tensors: int
    nbytes: int
    weights: dict[str, int]


def convert(
    source: Path | str, folder: Path | str, to: str, progress: Progress | None = None, shard_bytes: int = SHARD_BYTES
) -> Summary:
    """Write the checkpoint ``source`` in format ``to`` as the new folder ``folder``.

    Args:
        source: folder of a complete checkpoint in any format of `names.FORMATS`.
        folder: to make; its parent must exist.
        to: mxfp4, nvfp4 or bf16.
        progress: called after each weight with bytes read, bytes in all, and its name.
        shard_bytes: data of a file, at most.

    Raises:
        ArgumentError: an unknown format, a folder that exists, experts that the format does not hold without loss.
        CheckpointError: a source that is not complete.
    """
    if to not in TARGETS:
        raise ArgumentError("to", to, "one of " + ", ".join(TARGETS))
    listed = Listed.of(Checkpoint(source))
    return Conversion(listed, to).run(Path(folder), progress, shard_bytes)


class Conversion:
    """One conversion: what each weight becomes."""

    def __init__(self, listed: Listed, to: str):
        self.listed, self.to = listed, to
        self.weights: dict[str, int] = {}

    def run(self, folder: Path, progress: Progress | None, shard_bytes: int) -> Summary:
        """Write the folder; see `convert`."""
        listed, listing = self.listed, self._listing()
        done, total = 0, listed.nbytes
        with Writer(folder, listing, self._config(), shard_bytes) as writer:
            for weight in names.weights(listed.config):
                for name, tensor in self.tensors(weight).items():
                    writer.add(name, tensor)
                done += sum(listed.checkpoint.entry(n).nbytes for n in listed.parts(weight))
                if progress is not None:
                    progress(done, total, weight.name)
            for name in BESIDE:
                if (listed.checkpoint.folder / name).is_file():
                    writer.copy(listed.checkpoint.folder / name)
        return Summary(listed.form, self.to, len(listing), sum(s.nbytes for s in listing.values()), self.weights)

    def _config(self) -> dict:
        """Fields of the source, with those of the format replaced."""
        found = dict(self.listed.checkpoint.config)
        if not found.keys() >= FIELDS.keys():
            return write_config(self.listed.config, self.to)
        for name in ("expert_dtype", "quantization_config"):
            found.pop(name, None)
        return found | format_fields(self.to)

    def _listing(self) -> dict[str, Spec]:
        """Tensors that will be written; FP8 scales that are copied keep their type."""
        found = {}
        for weight in names.weights(self.listed.config):
            kind = names.stored_as(weight, self.to)
            specs = names.specs(weight, kind)
            if kind == "fp8" and names.stored_as(weight, self.listed.form) == "fp8":
                specs = {n: Spec((self.listed.checkpoint.entry(n).dtype,), s.shape) for n, s in specs.items()}
            found |= specs
        return found

    def tensors(self, weight: Weight) -> dict[str, torch.Tensor]:
        """Make the tensors of one weight in the target's format, by name."""
        before, after = (names.stored_as(weight, form) for form in (self.listed.form, self.to))
        stem = weight.name.removesuffix(".weight")
        stored = self.listed.stored(weight)
        if before == after:
            self._count("as stored")
            inputs = (self.listed.checkpoint.entry(f"{stem}.input_scale").read(),) if after == "nvfp4" else ()
            return _named(weight.name, stored, *inputs)
        if after == "bf16":
            self._count("dequantised")
            return {weight.name: dequantize(stored, torch.bfloat16)}
        if after == "fp8":
            self._count("quantised")
            return _named(weight.name, fp8_block.quantize(dequantize(stored)))
        if after == "mxfp4":
            self._count("requantised" if before == "nvfp4" else "quantised")
            return _named(weight.name, _as_mxfp4(stored))
        self._count("exact" if before == "mxfp4" else "quantised")
        return _named(weight.name, self._as_nvfp4(weight, stored), self._input_scale(weight))

    def _count(self, what: str) -> None:
        self.weights[what] = self.weights.get(what, 0) + 1

    def _as_nvfp4(self, weight: Weight, stored: Stored) -> NVFP4Tensor:
        """One projection; w1 and w3 take a global scale that suits both."""
        pair = [stored]
        if not weight.name.endswith(".w2.weight"):
            swap = (".w1.", ".w3.") if ".w1." in weight.name else (".w3.", ".w1.")
            pair.append(self.listed.stored(weight._replace(name=weight.name.replace(*swap))))
        if isinstance(stored, MXFP4Tensor):
            joined = MXFP4Tensor(*(torch.cat([getattr(q, part) for q in pair]) for part in ("packed", "scales")))
            found = weight_modes.convert(joined, "nvfp4")
            (plane,), rows = found.planes, weight.shape[0]
            return NVFP4Tensor(plane.packed[:rows], plane.scales[:rows], found.alpha)
        values = [dequantize(q).to(torch.float32) for q in pair]
        return nvfp4.quantize(values[0], nvfp4.shared_global_scale(*values))

    def _input_scale(self, weight: Weight) -> torch.Tensor:
        c = self.listed.config
        if weight.name.endswith(".w2.weight"):
            bound = torch.tensor(c.swiglu_limit**2)
        else:
            norm = self.listed.checkpoint.entry(weight.name.split(".ffn.")[0] + ".ffn_norm.weight").read()
            bound = c.hidden**0.5 * norm.to(torch.float32).abs().max()
        return (bound / nvfp4.RANGE).to(torch.float32).clamp(min=nvfp4.MIN_GLOBAL_SCALE)


def _as_mxfp4(stored: Stored) -> MXFP4Tensor:
    values = dequantize(stored).to(torch.float32)
    return weight_modes.requantize_mxfp4(values) if isinstance(stored, NVFP4Tensor) else mxfp4.quantize(values)


def _named(name: str, stored: Stored, input_scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Tensors as the checkpoint stores them."""
    stem = name.removesuffix(".weight")
    if isinstance(stored, MXFP4Tensor):
        return {name: stored.packed.view(torch.int8), f"{stem}.scale": stored.scales.view(torch.float8_e8m0fnu)}
    if isinstance(stored, FP8Tensor):
        scales = stored.scales if stored.scales.dtype == torch.float32 else stored.scales.view(torch.float8_e8m0fnu)
        return {name: stored.codes.view(torch.float8_e4m3fn), f"{stem}.scale": scales}
    if isinstance(stored, NVFP4Tensor):
        return {
            name: stored.packed,
            f"{stem}.weight_scale": stored.scales.view(torch.float8_e4m3fn),
            f"{stem}.weight_scale_2": stored.global_scale.reshape(()),
            f"{stem}.input_scale": input_scale.reshape(()),
        }
    return {name: stored}


def save(values: dict[str, torch.Tensor], config: ModelConfig, folder: Path | str, form: str) -> None:
    """Write weights as a checkpoint in format ``form``.

    They are a model's state dict, quantised by the released recipes.

    Args:
        values: by name, exactly those of `names.weights`.
        config: dimensions.
        folder: to make.
        form: mxfp4 or bf16; NVFP4 is converted from one of these, since its input scales come from the whole.
    """
    if form not in ("mxfp4", "bf16"):
        raise ArgumentError("form", form, "mxfp4 or bf16; convert makes the others")
    wanted = list(names.weights(config))
    different = sorted(values.keys() ^ {weight.name for weight in wanted})
    if different:
        raise ArgumentError("values", different[:20], "exactly the names of names.weights(config)")
    with Writer(Path(folder), names.listing(config, form), write_config(config, form)) as writer:
        for weight in wanted:
            value, kind = values[weight.name].detach(), names.stored_as(weight, form)
            plain = {"bf16": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}
            stored = (
                value.to(plain[kind]) if kind in plain else {"mxfp4": mxfp4, "fp8": fp8_block}[kind].quantize(value)
            )
            for name, tensor in _named(weight.name, stored).items():
                writer.add(name, tensor)
