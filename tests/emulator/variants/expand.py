"""Expand a pattern into instruction variants, and shuffle their modifiers."""

from __future__ import annotations

import random

from dsv4lib.emulator.isa import variants


def variants_of(pattern: str, limit: int, rng: random.Random) -> list[str]:
    """List about ``limit`` variants of a pattern, with every alternative and every optional part among them."""
    every = _every(pattern)
    if len(every) <= limit:
        return every
    chosen = dict.fromkeys(rng.sample(every, limit))
    missing = {word for opcode in every for word in opcode.split(".")}
    missing -= {word for opcode in chosen for word in opcode.split(".")}
    for opcode in every:
        if missing.intersection(opcode.split(".")):
            chosen[opcode] = None
            missing -= set(opcode.split("."))
    return list(chosen)


def _every(pattern: str) -> list[str]:
    """List all variants of a pattern."""
    done, i = [""], 0
    while i < len(pattern):
        c = pattern[i]
        if c == "[":
            end = variants.closing(pattern, i)
            inner = ["", *_every(pattern[i + 1 : end])]
            done, i = [a + b for a in done for b in inner], end
        elif c == "<":
            end = pattern.index(">", i)
            options = pattern[i + 1 : end].partition(":")[2].split("|")
            done, i = [a + b for a in done for b in options], end
        else:
            done = [a + c for a in done]
        i += 1
    return done


def shuffled(opcode: str, rng: random.Random) -> str:
    """Put the modifiers after the name in another order, those of one kind among themselves in the same."""
    head = variants.name(opcode)
    words = opcode[len(head) + 1 :].split(".") if len(opcode) > len(head) else []
    keys = [variants.kind(word) for word in words]
    order = list(range(len(words)))
    rng.shuffle(order)
    for kind in {k for k in keys if k}:
        places = [i for i, j in enumerate(order) if keys[j] == kind]
        for place, j in zip(places, sorted(order[p] for p in places), strict=True):
            order[place] = j
    return ".".join([head, *(words[j] for j in order)])
