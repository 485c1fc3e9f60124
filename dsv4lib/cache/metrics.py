"""Count what the manager does: hits above all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metrics:
    """Counts since the manager was made.

    Attributes:
        requests, requests_hit: starts (added, or resumed to be recomputed), and those that found a prefix.
        tokens, tokens_hit: their tokens, and those found.
        points_without_state: points whose entries were cached but whose window or state was not.
        saves, saves_skipped, points_lost: rings saved, not saved for want of pages, not saved because a chunk had
            overwritten rows before its commit (see `Manager.cut`).
        copies_on_write, pages_copied: blocks copied before a write; pages copied on the device for any reason.
        forks, preemptions: calls.
    """

    requests: int = 0
    requests_hit: int = 0
    tokens: int = 0
    tokens_hit: int = 0
    points_without_state: int = 0
    saves: int = 0
    saves_skipped: int = 0
    points_lost: int = 0
    copies_on_write: int = 0
    pages_copied: int = 0
    forks: int = 0
    preemptions: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of tokens that were found, 0 before the first start."""
        return self.tokens_hit / self.tokens if self.tokens else 0.0

    def count_start(self, tokens: int, hit: int) -> None:
        """Count a start."""
        self.requests += 1
        self.requests_hit += hit > 0
        self.tokens += tokens
        self.tokens_hit += hit
