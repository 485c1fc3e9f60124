"""Make synthetic windows whose end needs distant bytes. They are more than 1,000 positions back.

Natural text rewards recency: the last 64 compressed entries do nearly as well as the best 64. These windows do not:

* repeats: a passage of real text comes again, word for word, after at least 1,000 bytes;
* key-value lines: 32 lines ``abcd = 1234`` at the start, 1,000 bytes or more of real text, the same lines in another
  order. Keys and values are random, so each value costs 13.3 bits unless its first line is found again.

All is drawn from one generator, so a seed repeats the windows on one kind of device.
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.nano.corpus import IGNORED, Windows
from dsv4lib.nano.settings import BOS

GAP = 1000  # bytes between the two places, at least
PASSAGE = (200, 401)  # bytes of a repeated passage, from and below
LINES, KEY, VALUE = 32, 4, 4
LINE = KEY + 3 + VALUE + 1  # "abcd = 1234\n"
LEAD = 32  # bytes of a repeat that say which passage it is, not judged
SHORTEST = 2 * LINES * LINE + GAP + 8  # bytes of a window


def _integers(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator, device=generator.device)


def _text(stream: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Passages int64 ``[count, length]`` from random places of the stream."""
    if len(stream) <= length or length < SHORTEST:
        raise ArgumentError("length", length, f"{SHORTEST} to the length of the stream, {len(stream)}")
    at = _integers(0, len(stream) - length, (count, 1), generator)
    return stream[at + torch.arange(length, device=stream.device)].to(torch.int64)


def repeats(
    stream: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make text in which a passage is repeated.

    Args:
        stream: int16 ``[n]``, text to take passages from, on the generator's device.
        count, length: of the windows.
        generator: source of all random numbers.

    Returns:
        bytes int64 ``[count, length]``, and bool of the same shape: True on the repeat, after its first 32 bytes.
    """
    text = _text(stream, count, length, generator)
    size = _integers(*PASSAGE, (count, 1), generator)
    span = length - GAP - 2 * size  # places that a first passage can start at
    start = (torch.rand(count, 1, generator=generator, device=stream.device) * span.clamp(min=1)).long()
    room = (length - size) - (start + size + GAP)
    again = start + size + GAP + (torch.rand(count, 1, generator=generator, device=stream.device) * room).long()
    at = torch.arange(length, device=stream.device)
    inside = (at >= again) & (at < again + size)
    source = torch.where(inside, at - again + start, at.expand(count, -1))
    return text.gather(1, source), inside & (at >= again + LEAD)


def key_values(
    stream: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make text between key-value lines and the same lines in another order. Arguments and results as in `repeats`.

    Judged are the digits of the second lines.
    """
    text = _text(stream, count, length, generator)
    device = stream.device
    lines = torch.empty(count, LINES, LINE, dtype=torch.int64, device=device)
    lines[..., :KEY] = _integers(ord("a"), ord("z") + 1, (count, LINES, KEY), generator)
    lines[..., KEY : KEY + 3] = torch.tensor(list(b" = "), device=device)
    lines[..., KEY + 3 : -1] = _integers(ord("0"), ord("9") + 1, (count, LINES, VALUE), generator)
    lines[..., -1] = ord("\n")
    order = torch.rand(count, LINES, generator=generator, device=device).argsort(-1)
    block = LINES * LINE
    shift = _integers(1, 8, (count, 1), generator)  # lines start at any residue modulo the rate of CSA
    spare = length - SHORTEST
    again = shift + block + GAP + (torch.rand(count, 1, generator=generator, device=device) * (spare + 1)).long()
    at = torch.arange(block, device=device)
    second = lines.gather(1, order[..., None].expand_as(lines)).flatten(1)
    text = text.scatter(1, shift + at, lines.flatten(1)).scatter(1, again + at, second)
    digits = ((at % LINE >= KEY + 3) & (at % LINE < LINE - 1)).expand(count, -1)
    judged = torch.zeros_like(text, dtype=torch.bool).scatter(1, again + at, digits)
    return text, judged


def judged_windows(kind: str, stream: torch.Tensor, count: int, length: int, seed: int) -> Windows:
    """Make windows of one kind, ``repeats`` or ``key_values``. Only their far bytes are judged; on the CPU."""
    if kind not in ("repeats", "key_values"):
        raise ArgumentError("kind", kind, "repeats or key_values")
    generator = torch.Generator().manual_seed(seed)
    text, judged = {"repeats": repeats, "key_values": key_values}[kind](stream, count, length, generator)
    tokens = torch.cat((torch.full((count, 1), BOS), text[:, :-1]), 1)
    return Windows(tokens, text.masked_fill(~judged, IGNORED))
