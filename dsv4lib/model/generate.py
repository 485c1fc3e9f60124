"""Continue one request token by token: chunked prefill, decode, drafts by the MTP block and their verification.

    for token in Request(model, prompt, SamplingParams(temperature=0.0)).tokens(32):
        ...

Without drafts a step is one token. With ``drafts`` K a step is the last token and up to K drafts; those that the model
would not have drawn are taken back. Positions do it: the next step writes its tokens over them, and no reader looks
past its own position. Rings of compressor rows have rows to spare, so what a draft overwrites nothing needs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.layers.attention import MOST_DRAFTS
from dsv4lib.model.sampler import History, SamplingParams, Settings, sample
from dsv4lib.model.transformer import Transformer
from dsv4lib.model.verify import target_probabilities, verify


class Request:
    """One request at a place of a model's caches.

    Args:
        model: runs the steps. prompt: token ids, at least one. params: of the sampler.
        drafts: K, 0 to `MOST_DRAFTS`; more than 0 needs a model with its draft block.
        chunk: tokens of a prefill step. place: of the caches.

    Attributes:
        sequence: prompt and tokens so far. drafted, accepted: counts.

    Raises:
        ArgumentError: an empty prompt, one longer than the place, or a number out of range.
    """

    def __init__(
        self,
        model: Transformer,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        drafts: int = 0,
        chunk: int = 256,
        place: int = 0,
    ) -> None:
        capacity = model.layout.capacity
        if not 1 <= len(prompt) < capacity:
            raise ArgumentError("prompt", f"{len(prompt)} tokens", f"1 to {capacity - 1}, what a place holds")
        if not 0 <= drafts <= MOST_DRAFTS or (drafts and model.mtp is None):
            allowed = f"0 to {MOST_DRAFTS}" if model.mtp is not None else "0: no draft block was loaded"
            raise ArgumentError("drafts", drafts, allowed)
        if chunk < 1:
            raise ArgumentError("chunk", chunk, "at least 1")
        self.model, self.drafts, self.chunk, self.place = model, drafts, chunk, place
        self.sequence = list(prompt)
        self.settings = Settings.of([params], model.config.vocab, model.device)
        self.history = History.empty(1, model.config.vocab, model.device)
        self.history.start(0, torch.tensor(self.sequence, device=model.device))
        self.drafted = self.accepted = 0

    def tokens(self, count: int) -> Iterator[int]:
        """Yield the next ``count`` tokens, fewer where the place is full.

        Raises:
            DSV4Error: logits without a distribution.
        """
        hidden, streams = self.prefill()
        token = self.choose(self.model.head(hidden[-1:])[0])
        left, waiting = count, [token]
        while left and waiting:
            self.sequence += waiting
            for token in waiting[:left]:
                yield token
            left -= min(left, len(waiting))
            if not left or len(self.sequence) >= self.model.layout.capacity:
                return
            guesses = self.guess(streams) if self.drafts else []
            waiting, streams = self.advance(guesses)

    def prefill(self) -> tuple[Tensor, Tensor | None]:
        """Run the prompt; (hidden, streams) of its last chunk. Earlier chunks pass the draft block, too."""
        for start in range(0, len(self.sequence), self.chunk):
            part = self.sequence[start : start + self.chunk]
            hidden, streams = self.run(part, start)
            if streams is not None and start + self.chunk < len(self.sequence):
                self.draft_step(streams, self.sequence[start + 1 : start + self.chunk + 1], start)
        return hidden, streams

    def run(self, tokens: Sequence[int], start: int) -> tuple[Tensor, Tensor | None]:
        """Run a step of this request."""
        step = self.model.step([tokens], [self.place], [start])
        return self.model.hidden(step, keep_streams=self.drafts > 0)

    def choose(self, logits: Tensor) -> int:
        """Draw the token after the sequence."""
        place = torch.tensor([len(self.sequence)], device=logits.device)
        found = sample(logits[:, : self.model.config.vocab], self.settings, place, self.history).check()
        self.history.add(found.tokens)
        return int(found.tokens)

    def draft_step(self, streams: Tensor, next_tokens: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Run the draft block at positions ``start`` and on; (hidden, streams)."""
        return self.model.draft(streams, self.model.step([next_tokens], [self.place], [start]))

    def guess(self, streams: Tensor) -> list[int]:
        """Draft the tokens after the sequence, greedily; ``streams``: of the positions that the last step ran."""
        count, size = min(self.drafts, self.model.layout.capacity - len(self.sequence)), len(streams)
        start = len(self.sequence) - 1 - size
        hidden, streams = self.draft_step(streams, self.sequence[start + 1 : start + 1 + size], start)
        found: list[int] = []
        while len(found) < count:
            found.append(int(self.model.head(hidden[-1:])[0][0, : self.model.config.vocab].argmax()))
            if len(found) < count:
                at = len(self.sequence) - 2 + len(found)
                hidden, streams = self.draft_step(streams[-1:], found[-1:], at)
        return found

    def advance(self, guesses: list[int]) -> tuple[list[int], Tensor | None]:
        """Run the last token and the drafts; (tokens that came of it, streams of the positions that stay)."""
        start = len(self.sequence) - 1
        hidden, streams = self.run([self.sequence[-1], *guesses], start)
        logits = self.model.head(hidden)[0][:, : self.model.config.vocab]
        if not self.drafts:
            return [self.choose(logits)], None
        drafts = torch.tensor([guesses], dtype=torch.int64, device=logits.device).view(1, -1)
        place = torch.tensor([start + 1], device=logits.device)
        target = target_probabilities(logits[None], drafts, self.settings, self.history)
        found = verify(drafts, target, self.settings, place)
        kept = int(found.accepted)
        tokens = found.tokens[0, : kept + 1].tolist()
        for token in tokens:
            self.history.add(torch.tensor([token], device=logits.device))
        self.drafted, self.accepted = self.drafted + len(guesses), self.accepted + kept
        return tokens, streams[: kept + 1]
