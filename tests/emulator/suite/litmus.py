"""Enumerate what the PTX memory model allows of small parallel programs, and run them in the emulator.

A program is a list of threads, a thread a list of events on words x and y. The oracle enumerates executions: a reading
source for every load and an order of the stores to each word, and keeps those that the axioms allow. It knows the part
of the model that these programs use, for accesses that are morally strong with each other (relaxed, release or
acquire, with scopes that include both threads):

* coherence: what program order, and release to acquire, order must agree with the order of the stores to a word;
* causality: a release and what is before it in its thread happens before an acquire that reads it, and what follows;
* no value out of thin air: a load does not read a store that depends on it;
* fence.sc: fences are in one order, which agrees with what is observed across them.

Source: PTX ISA, "Memory Consistency Model": axioms Coherence, Causality, FenceSC, No-Thin-Air.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Event(NamedTuple):
    """A store (``value`` >= 0), a load (-1) or a fence (word "")."""

    word: str = ""
    value: int = -1
    order: str = "relaxed"  # release, acquire, relaxed; of a fence: "sc" or "acq_rel"


def put(word: str, value: int = 1, order: str = "relaxed") -> Event:
    """A store."""
    return Event(word, value, order)


def get(word: str, order: str = "relaxed") -> Event:
    """A load."""
    return Event(word, -1, order)


SC, ACQ_REL = Event(order="sc"), Event(order="acq_rel")


@dataclass(frozen=True)
class Litmus:
    """A program. ``weak``: an outcome of its loads, in order, that tells strong programs from weak ones."""

    threads: tuple[tuple[Event, ...], ...]
    weak: tuple[int, ...] = ()
    final: bool = False  # outcomes are the last values of x and y instead


def outcomes(test: Litmus) -> set[tuple[int, ...]]:
    """Enumerate the outcomes that the model allows."""
    events = [(t, i, e) for t, thread in enumerate(test.threads) for i, e in enumerate(thread)]
    n = len(events)
    loads = [k for k, (_, _, e) in enumerate(events) if e.word and e.value < 0]
    stores = {w: [k for k, (_, _, e) in enumerate(events) if e.word == w and e.value >= 0] for w in "xy"}
    before = {
        (a, b) for a in range(n) for b in range(n) if events[a][0] == events[b][0] and events[a][1] < events[b][1]
    }
    found = set()
    for sources in itertools.product(*([-1, *stores[events[k][2].word]] for k in loads)):
        reads = dict(zip(loads, sources, strict=True))
        for orders in itertools.product(*(itertools.permutations(stores[w]) for w in "xy")):
            last = {w: [-1, *order] for w, order in zip("xy", orders, strict=True)}
            if any(_allowed(events, before, reads, last, fences) for fences in _fence_orders(events)):
                if test.final:
                    found.add(tuple(_value(events, last[w][-1]) for w in "xy"))
                else:
                    found.add(tuple(_value(events, reads[k]) for k in loads))
    return found


def _value(events: list, k: int) -> int:
    return 0 if k < 0 else events[k][2].value


def _fence_orders(events: list) -> Iterator[tuple[int, ...]]:
    return itertools.permutations([k for k, (_, _, e) in enumerate(events) if e.order == "sc"])


def _allowed(events: list, before: set, reads: dict, last: dict, fences: Sequence[int]) -> bool:
    """Check one execution. ``last``: stores to each word in coherence order, the initial value -1 first."""
    n = len(events)
    position = {k: i for order in last.values() for i, k in enumerate(order) if k >= 0}
    synchronises = set()
    for load, store in reads.items():
        if store < 0:
            continue
        released, acquired = _releases(events, before, store), _acquires(events, before, load)
        synchronises |= {(a, b) for a in released for b in acquired}
    synchronises |= set(zip(fences, fences[1:], strict=False))
    cause = _closure(n, synchronises | {(a, b) for a, b in before if _keeps(events, a, b, synchronises)})
    cause = _closure(n, cause | {(a, b) for a, c in before for d, b in cause if c == d})
    cause = _closure(n, cause | {(a, b) for a, c in cause for d, b in before if c == d})
    after = cause | {(a, b) for a, b in before if events[a][2].word == events[b][2].word != ""}
    if any(a == b for a, b in cause):
        return False
    for a, b in after:  # coherence: the later access of a word sees the earlier one, or something newer
        one, two = events[a][2], events[b][2]
        if not one.word or one.word != two.word:
            continue
        if _seen(events, reads, position, a) > _seen(events, reads, position, b):
            return False
        if one.value < 0 <= two.value and _seen(events, reads, position, a) == position[b]:
            return False
    return _fences_agree(events, before, reads, position, fences)


def _seen(events: list, reads: dict, position: dict, k: int) -> int:
    """Place in coherence order of the store that an access is or reads; 0 is the initial value."""
    store = k if events[k][2].value >= 0 else reads[k]
    return 0 if store < 0 else position[store]


def _releases(events: list, before: set, store: int) -> list[int]:
    """Starts of release patterns: the store, or a fence before it in its thread."""
    fences = [a for a, b in before if b == store and not events[a][2].word]
    return [store, *fences] if events[store][2].order == "release" else fences


def _acquires(events: list, before: set, load: int) -> list[int]:
    fences = [b for a, b in before if a == load and not events[b][2].word]
    return [load, *fences] if events[load][2].order == "acquire" else fences


def _keeps(events: list, a: int, b: int, synchronises: set) -> bool:
    """Program order counts for causality where it leads to a release or from an acquire."""
    return any(b == start for start, _ in synchronises) or any(a == end for _, end in synchronises)


def _closure(n: int, pairs: set) -> set:
    out = set(pairs)
    for k in range(n):
        into, outof = [a for a, b in out if b == k], [b for a, b in out if a == k]
        out |= {(a, b) for a in into for b in outof}
    return out


def _fences_agree(events: list, before: set, reads: dict, position: dict, fences: Sequence[int]) -> bool:
    """An access before a fence is not overtaken by one after a later fence: what it did is seen there."""
    for i, first in enumerate(fences):
        for second in fences[i + 1 :]:
            for a in [a for a, b in before if b == first and events[a][2].word]:
                for b in [b for f, b in before if f == second and events[b][2].word == events[a][2].word]:
                    if _seen(events, reads, position, a) > _seen(events, reads, position, b):
                        return False
    return True


def program(test: Litmus, scope: str, weak: bool = False) -> str:
    """Write the PTX: each thread is a CTA (or a warp for ``.cta``, a CTA of a cluster for ``.cluster``)."""
    lines = ["mov.u32 %r12, %ctaid.x;" if scope != "cta" else "mov.u32 %r12, %r3;", "@!%p3 bra END;"]
    number = 0
    for t, thread in enumerate(test.threads):
        lines += [f"setp.ne.u32 %p5, %r12, {t};", f"@%p5 bra T{t};"]
        for e in thread:
            at = "[%rd4]" if e.word == "x" else "[%rd4+64]"
            if not e.word:
                lines.append(f"fence.{e.order}.{scope};")
            elif e.value >= 0:
                how = "" if weak else f"{e.order}.{scope}."
                lines.append(f"st.{how}global.b32 {at}, {e.value};")
            else:
                how = "" if weak else f"{e.order}.{scope}."
                lines += [f"ld.{how}global.b32 %r20, {at};", f"st.global.b32 [%rd1+{4096 + 128 * number}], %r20;"]
                number += 1
        lines.append(f"T{t}:")
    return "\n".join([*lines, "END:", ""])


X, Y = "x", "y"
TESTS = {
    "MP": Litmus(((put(X), put(Y)), (get(Y), get(X))), (1, 0)),
    "MP+release+acquire": Litmus(((put(X), put(Y, 1, "release")), (get(Y, "acquire"), get(X))), (1, 0)),
    "MP+fences": Litmus(((put(X), ACQ_REL, put(Y)), (get(Y), ACQ_REL, get(X))), (1, 0)),
    "MP+release alone": Litmus(((put(X), put(Y, 1, "release")), (get(Y), get(X))), (1, 0)),
    "SB": Litmus(((put(X), get(Y)), (put(Y), get(X))), (0, 0)),
    "SB+acq_rel": Litmus(((put(X), ACQ_REL, get(Y)), (put(Y), ACQ_REL, get(X))), (0, 0)),
    "SB+sc": Litmus(((put(X), SC, get(Y)), (put(Y), SC, get(X))), (0, 0)),
    "LB": Litmus(((get(X), put(Y)), (get(Y), put(X))), (1, 1)),
    "LB+acquire+release": Litmus(((get(X, "acquire"), put(Y, 1, "release")), (get(Y, "acquire"), put(X))), (1, 1)),
    "IRIW": Litmus(((put(X),), (put(Y),), (get(X), get(Y)), (get(Y), get(X))), (1, 0, 1, 0)),
    "IRIW+acquire": Litmus(
        ((put(X),), (put(Y),), (get(X, "acquire"), get(Y)), (get(Y, "acquire"), get(X))), (1, 0, 1, 0)
    ),
    "IRIW+sc": Litmus(((put(X),), (put(Y),), (get(X), SC, get(Y)), (get(Y), SC, get(X))), (1, 0, 1, 0)),
    "CoRR": Litmus(((put(X),), (get(X), get(X))), (1, 0)),
    "2+2W": Litmus(((put(X, 1), put(Y, 2)), (put(Y, 1), put(X, 2))), (1, 1), final=True),
    "2+2W+sc": Litmus(((put(X, 1), SC, put(Y, 2)), (put(Y, 1), SC, put(X, 2))), (1, 1), final=True),
}
# What tells the programs apart, with the reason: may the weak outcome occur?
WEAK = {
    "MP": True, "MP+release+acquire": False, "MP+fences": False, "MP+release alone": True,
    "SB": True, "SB+acq_rel": True, "SB+sc": False,
    "LB": True, "LB+acquire+release": False,
    "IRIW": True, "IRIW+acquire": True, "IRIW+sc": False,
    "CoRR": False, "2+2W": True, "2+2W+sc": False,
}  # fmt: skip
