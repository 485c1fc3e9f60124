"""Judge precisions on the kernels of `dsv4lib.ops`. Windows and table are `evaluate`'s, through `loader.model`.

    rows = on_kernels.table(Path("data/nano"), found, MODES, "emulator")

Base is the oracle in fp32 on the checkpoint's weights. So a row shows all that the kernels round: activations, cached
entries, indexer keys and the weights of its mode.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.loader import convert
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.model import transformer
from dsv4lib.loader.whole import Listed
from dsv4lib.nano import evaluate
from dsv4lib.nano.corpus import Windows
from dsv4lib.nano.evaluate import Row

SHIPPED, NAIVE = "as stored", "experts nvfp4 as ue8m0_naive"
SHIPPED_KL_MOST = 0.01  # bits per byte; activations in FP8 alone cost 0.004 on the oracle


@dataclass(frozen=True)
class Mode:
    """One row of the evaluation on kernels.

    Attributes:
        name: as shown. linears: precision of linear layers, see `layers.dense`. experts: mode of the routed experts, a
            key of `weight_modes.MODES`; None: that of their format. keys: format of indexer keys.
        nvfp4: the experts are quantised to NVFP4 by NVIDIA's recipe first, global scales amax / (6 * 448).
    """

    name: str
    linears: str = "fp8"
    experts: str | None = None
    keys: str = "fp4"
    nvfp4: bool = False


MODES = (
    Mode(SHIPPED),
    Mode("linears bf16", linears="bf16"),
    Mode("indexer keys fp8", keys="fp8"),
    Mode("experts mxfp4 as e4m3_expand", experts="e4m3_expand"),
    Mode("experts mxfp4 as bf16", experts="bf16"),
    Mode("experts nvfp4", nvfp4=True),
    Mode("experts nvfp4 as e4m3_expand", experts="e4m3_expand", nvfp4=True),
    Mode("experts nvfp4 as e4m3_split", experts="e4m3_split", nvfp4=True),
    Mode(NAIVE, experts="ue8m0_naive", nvfp4=True),
)


def named(wanted: str) -> Mode:
    """The mode of a name; ArgumentError for any other word."""
    for mode in MODES:
        if mode.name == wanted:
            return mode
    raise ArgumentError("variant", wanted, "one of " + ", ".join(m.name for m in MODES))


@torch.no_grad()
def log_probabilities(listed: Listed, mode: Mode, found: Windows, backend: str) -> list[torch.Tensor]:
    """Return natural logarithms of the next-byte distribution. fp32 ``[T, vocab]`` for each window, on the CPU.

    A window is one step of T tokens.

    Raises:
        BackendUnavailable: the back end cannot run here.
    """
    given = {"precision": mode.linears, "experts": mode.experts, "keys": mode.keys}
    made = transformer(listed, capacity=found.tokens.shape[1], **given, backend=backend).to(backends.device(backend))
    out = []
    for tokens in found.tokens:
        logits = made([tokens.tolist()], [0], [0], all_logits=True)[:, : listed.config.vocab]
        out.append(logits.float().log_softmax(-1).cpu())
    return out


def table(
    folder: Path,
    found: Windows,
    wanted: Sequence[Mode] = MODES,
    backend: str = "auto",
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """The base, then every mode; ``progress`` receives each row when it is known.

    Args:
        folder: of a checkpoint in any released format.
        found: windows to judge.
        backend: native, emulator, or reference (the ops' oracles, which round what the kernels round).

    Raises:
        BackendUnavailable: the back end cannot run here. ArgumentError: a mode that the format does not convert to.
    """
    backend = backends.resolve(backend, "sm_100a")
    logs = evaluate.log_probabilities(*evaluate.load(folder), found)
    base = evaluate.measured(logs, logs, found)
    rows = [evaluate.row("base", "base", base, base, found)]
    progress(rows[0])
    with tempfile.TemporaryDirectory() as scratch:
        nvfp4 = Path(scratch) / "nvfp4"
        if any(mode.nvfp4 for mode in wanted):  # from values: MXFP4 to NVFP4 directly loses nothing, so shows nothing
            convert.convert(folder, Path(scratch) / "bf16", "bf16")
            convert.convert(Path(scratch) / "bf16", nvfp4, "nvfp4")
        for mode in wanted:
            listed = Listed.of(Checkpoint(nvfp4 if mode.nvfp4 else folder))
            own = evaluate.measured(log_probabilities(listed, mode, found, backend), logs, found)
            rows.append(evaluate.row(mode.name, backend, own, base, found))
            progress(rows[-1])
    return rows


def gates(rows: Sequence[Row]) -> list[str]:
    """List the faults of a table, [] if none. What is shipped stays near the oracle, the naive conversion shows."""
    found = {row.name: row for row in rows}
    faults = []
    shipped, naive = found.get(SHIPPED), found.get(NAIVE)
    if shipped and not shipped.kl < SHIPPED_KL_MOST:
        faults.append(f"{shipped.name}: KL {shipped.kl:.5f} bits per byte, not below {SHIPPED_KL_MOST}")
    if naive and not naive.difference > evaluate.NAIVE_LEAST:
        faults.append(f"{naive.name}: {naive.difference:+.4f} bits per byte, not above +{evaluate.NAIVE_LEAST}")
    return faults
