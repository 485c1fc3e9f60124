"""Continue a text with a checkpoint on a back end. Streamed text, its rate, and which kernels ran."""

from __future__ import annotations

import time
from typing import NamedTuple

from rich.console import Console

from dsv4lib.errors import ArgumentError
from dsv4lib.loader.whole import Listed
from dsv4lib.model.scheduler import Scheduler, Served
from dsv4lib.model.tokenizer import StreamDecoder, Tokenizer
from dsv4lib.ops.common import compile_cache
from dsv4lib.pages.generation import ranks, serving
from dsv4lib.pages.generation.serving import Options, shown

TIMED = {False: 2, True: 4}  # decode steps that give a rate, without and with drafts: the first one is not warm


class Drawn(NamedTuple):
    """Tokens so far and when they were there, seconds from the start."""

    tokens: int
    seconds: float


def command(text: str, options: Options, console: Console) -> None:
    """Print ``text`` and its continuation to stdout as it comes. Everything else goes to ``console``.

    Raises:
        CheckpointError: no checkpoint there, or one that cannot be read.
        ArgumentError: a number out of range, or a text that is empty or too long.
        BackendUnavailable: the back end cannot run here. NotEnoughMemory: weights and caches do not fit.
        NoDistribution: the model's logits are no numbers.
        PlanError: sizes of groups of ranks that the model does not allow.
    """
    with ranks.speaking(console) as console, serving.interruptible():
        params = options.checked()
        if not text:
            raise ArgumentError("text", text, "at least one character")
        backend = serving.chosen(options.backend)
        listed, tokenizer = serving.opened(options.model)
        prompt = _prompt(text, options.tokens, listed, tokenizer)
        with ranks.of(listed, options, backend, ["generate"], text) as here:
            positions = serving.capacity(listed, len(prompt) + options.tokens)
            scheduler = serving.scheduler(listed, positions, options, backend, console, here)
            if here is not None:
                console.print(ranks.memory(here, scheduler), soft_wrap=True)
            if here is None or here.plan.data_index(here.rank) == 0:
                scheduler.add("text", prompt, params, options.tokens, stop=[tokenizer.eos])
            if here is not None and here.rank > 0:
                list(scheduler.run())
                return
            console.print(f"{len(prompt)} tokens of prompt, {options.tokens} to come, back end {backend}")
            _write(text, options, backend, scheduler, StreamDecoder(tokenizer), console)


def _write(
    text: str, options: Options, backend: str, scheduler: Scheduler, decoder: StreamDecoder, console: Console
) -> None:
    """Write the text and the tokens of the request "text" as they are drawn."""
    one, steps, held = scheduler.known["text"], [Drawn(0, time.perf_counter())], text
    while scheduler.going():
        tokens = scheduler.step()
        if not tokens:  # a chunk of the prompt
            continue
        held += "".join(decoder.push(token.token) for token in tokens)
        steps.append(Drawn(steps[-1].tokens + len(tokens), time.perf_counter()))
        decoded, due = len(steps) - 2, TIMED[options.speculate > 0]
        if decoded == due and scheduler.known and backend != "native":
            console.print(estimate(steps, options.tokens), soft_wrap=True)
        if decoded >= due or backend == "native":
            shown(held)
            held = ""
    shown(held + decoder.finish() + "\n")
    console.print(summary(steps, one, backend), soft_wrap=True)


def _prompt(text: str, tokens: int, listed: Listed, tokenizer: Tokenizer) -> list[int]:
    """Ids of the text, which leave room for the tokens that follow."""
    prompt, most = tokenizer.encode(text), listed.config.max_positions
    if len(prompt) + tokens > most:
        fit = f"at most {max(most - tokens, 0)} fit before the {tokens} that follow: the model has {most} positions"
        raise ArgumentError("text", f"{len(prompt)} tokens", fit)
    return prompt


def estimate(steps: list[Drawn], tokens: int) -> str:
    """Say how long the rest takes on a CPU. From the decode steps so far but the first, which is not warm."""
    first, last, count = steps[2], steps[-1], len(steps) - 3
    a_step = (last.seconds - first.seconds) / count
    drawn = (last.tokens - steps[1].tokens) / (count + 1)  # of all decode steps: this has no need to be warm
    left = (tokens - last.tokens) / drawn * a_step
    each = f"{a_step:.2g} s a token" if drawn == 1 else f"{a_step:.2g} s a step of {drawn:.1f} tokens"
    return f"{each} on this CPU: about {left:.0f} s to go"


def summary(steps: list[Drawn], one: Served, backend: str) -> str:
    """Times, drafts and kernels of a run."""
    start, first, last = steps[0], steps[1], steps[-1]
    lines = [f"first token {first.seconds - start.seconds:.2f} s"]
    if last.tokens > 1:
        lines[0] += f", then {(last.tokens - 1) / (last.seconds - first.seconds):.3g} tokens/s"
    if backend == "emulator":
        lines[0] += " in the emulator, which says nothing of a GPU's speed"
    if one.drafted:
        lines.append(f"drafts: {one.accepted} of {one.drafted} accepted ({one.accepted / one.drafted:.0%})")
    if backend == "reference":
        lines.append("kernels: none; every op ran as its PyTorch oracle")
    else:
        names = compile_cache.default().loaded()
        lines.append(f"kernels ({len(names)}): " + ", ".join(names))
        lines.append("all that is not in this list ran in PyTorch")
    return "\n".join(lines)
