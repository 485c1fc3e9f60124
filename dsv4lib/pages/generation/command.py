"""Continue a text with a checkpoint on a back end: streamed text, its rate, and which kernels ran."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.model import transformer
from dsv4lib.loader.whole import Listed
from dsv4lib.model.generate import Request
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.tokenizer import StreamDecoder, tokenizer_of
from dsv4lib.model.transformer import Transformer
from dsv4lib.ops.common import compile_cache

TIMED = 3  # times of a run, its start among them, from which a rate follows: the second token's is warm
PAGE_TOKENS = 128  # a place's capacity is a multiple: fewer shapes to compile for


class Options(NamedTuple):
    """Options of the command: see `./dsv4 generate --help`."""

    model: Path
    tokens: int
    temperature: float
    top_p: float
    seed: int
    backend: str
    speculate: int


def command(text: str, options: Options, console: Console) -> None:
    """Print ``text`` and its continuation to stdout as it comes; everything else goes to ``console``.

    Raises:
        CheckpointError: no checkpoint there, or one that cannot be read.
        ArgumentError: a number out of range, or a text that is too long.
        BackendUnavailable: the back end cannot run here.
    """
    if options.tokens < 1:
        raise ArgumentError("tokens", options.tokens, "at least 1")
    params = SamplingParams(temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    backend = backends.resolve(options.backend, "sm_100a")
    listed = Listed.of(Checkpoint(options.model))
    tokenizer = tokenizer_of(options.model, listed.config.vocab)
    prompt = tokenizer.encode(text)
    most = listed.config.max_positions
    if len(prompt) + options.tokens > most:
        allowed = f"at most {most} tokens with the {options.tokens} that follow: the model's positions"
        raise ArgumentError("text", f"{len(prompt)} tokens", allowed)
    capacity = min(most, -(-(len(prompt) + options.tokens) // PAGE_TOKENS) * PAGE_TOKENS)
    model = load(listed, capacity, options.speculate > 0, backend, console)
    request = Request(model, prompt, params, drafts=options.speculate)
    console.print(f"{len(prompt)} tokens of prompt, {options.tokens} to come, back end {backend}")
    times, decoder, held = [time.perf_counter()], StreamDecoder(tokenizer), text
    for token in request.tokens(options.tokens):
        held += decoder.push(token)
        times.append(time.perf_counter())
        if len(times) == TIMED:
            estimate(times, options.tokens, backend, console)
        if len(times) >= TIMED or backend == "native":
            held = shown(held)
        if token == tokenizer.eos:
            break
    shown(held + decoder.finish() + "\n")
    console.print(summary(times, request, backend), soft_wrap=True)


def shown(text: str) -> str:
    """Write to stdout at once; return what is left, nothing."""
    sys.stdout.write(text)
    sys.stdout.flush()
    return ""


def estimate(times: list[float], tokens: int, backend: str, console: Console) -> None:
    """Say how long the rest will take on a CPU, before any text is shown."""
    each = times[-1] - times[-2]
    if backend != "native":
        left = each * (tokens + 1 - len(times))
        console.print(f"{each:.2g} s a token on this CPU: about {left:.0f} s to go", soft_wrap=True)


def load(listed: Listed, capacity: int, mtp: bool, backend: str, console: Console) -> Transformer:
    """Read the checkpoint, with a line of progress on a terminal."""
    size = listed.nbytes / 1e6
    with console.status(f"reading {size:,.0f} MB"):
        found = transformer(listed, capacity=capacity, mtp=mtp, backend=backend)
    return found.to("cuda") if backend == "native" else found


def summary(times: list[float], request: Request, backend: str) -> str:
    """Times, drafts and kernels of a run."""
    count = len(times) - 1
    lines = [f"first token {times[1] - times[0]:.2f} s"]
    if count > 1:
        lines[0] += f", then {(count - 1) / (times[-1] - times[1]):.3g} tokens/s"
    if backend == "emulator":
        lines[0] += " in the emulator, which says nothing of a GPU's speed"
    if request.drafted:
        share = request.accepted / request.drafted
        lines.append(f"drafts: {request.accepted} of {request.drafted} accepted ({share:.0%})")
    if backend == "reference":
        lines.append("kernels: none; every op ran as its PyTorch oracle")
    else:
        names = compile_cache.default().loaded()
        lines.append(f"kernels ({len(names)}): " + ", ".join(names))
        lines.append("in PyTorch: embedding, copies of streams, sampling")
    return "\n".join(lines)
