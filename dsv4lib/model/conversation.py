"""Keep one conversation as messages, as text and as the token ids that were run.

    talk = Conversation(tokenizer, ChatOptions(wording=wording_of(folder, tokenizer)))
    prompt = talk.ask("Why is the sky blue?")
    reply = talk.answer(drawn)                          what the model drew after the prompt
    longer = talk.ask("And at night?")                  begins with prompt + drawn, id by id, where the text allows it

Where the reply calls tools, their results come first:

    longer = talk.add_result("weather", "12 C")         by name, or by place: "1" is the first call

The ids of earlier messages are those that were run, not those of their text encoded again: the same text has more than
one encoding, and a prefix hit needs the same ids. Where the text changes, as when reasoning is dropped, all is encoded
anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.model.chat import (
    ASSISTANT,
    BOS,
    DSML,
    ENCODING,
    END_THINK,
    EOS,
    THINK,
    USER,
    ChatOptions,
    Reply,
    ReplyError,
    Wording,
    encode_chat,
    parse_reply,
)
from dsv4lib.model.tokenizer import StreamDecoder, Tokenizer

NEEDED = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)  # marks that must be tokens
READ = (THINK, END_THINK, DSML)  # marks that are part of a reply's text


class NoChatEncoding(DSV4Error):
    """A checkpoint whose tokenizer has no marks of a conversation."""


def wording_of(folder: Path | str, tokenizer: Tokenizer) -> Wording:
    """Read the texts of a checkpoint's chat encoding.

    This lab's own where it has marks and no file of texts.

    Raises:
        NoChatEncoding: a mark is no token. ArgumentError: a file of texts that cannot be read.
    """
    missing = [mark for mark in NEEDED if _id(tokenizer, mark) is None]
    if missing:
        raise NoChatEncoding(f"the tokenizer has no chat encoding: {', '.join(missing)} are no tokens of it")
    file = Path(folder) / ENCODING
    return Wording.read(file) if file.is_file() else Wording()


def _id(tokenizer: Tokenizer, mark: str) -> int | None:
    """Id of a mark; None where it is no single token."""
    ids = tokenizer.encode(mark, bos=False)
    return ids[0] if len(ids) == 1 else None


class ReplyDecoder:
    """Decode a reply as it comes. This is a `StreamDecoder` with the marks that are part of its text."""

    def __init__(self, tokenizer: Tokenizer):
        self._stream, self._marks = StreamDecoder(tokenizer), {_id(tokenizer, mark): mark for mark in READ}

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain."""
        return self._stream.finish() + self._marks[token] if token in self._marks else self._stream.push(token)

    def finish(self) -> str:
        """End the reply; return what was held back."""
        return self._stream.finish()


class Conversation:
    """Messages of a user and of a model.

    Args:
        tokenizer: with the marks of the encoding. options: mode, effort, texts. system: first message; None: none.
        tools: schemas of `tools.read_tools`, which the system message declares.

    Attributes:
        stop: ids that end a reply. messages: so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: ChatOptions,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        self.tokenizer, self.options, self.system, self.tools = tokenizer, options, system, list(tools)
        self.stop = (tokenizer.eos, _id(tokenizer, USER))
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the system message alone."""
        self.messages: list[dict[str, Any]] = []
        if self.system is not None or self.tools:
            self.messages = [{"role": "system", "content": self.system or "", "tools": self.tools}]
        self._text, self._ids = "", []  # that were run
        self._asked: tuple[str, list[int]] = "", []  # of the last prompt

    def ask(self, content: str) -> list[int]:
        """Add a user's message; return the prompt of its reply.

        Raises:
            ArgumentError: marks of the format in the message, which is then not added.
        """
        return self._add({"role": "user", "content": content})

    @property
    def open_calls(self) -> dict[int, dict[str, Any]]:
        """Calls of the last reply that have no result, by their place in it, from 1."""
        _, calls, answered = self._last_reply()
        return {n: call for n, call in enumerate(calls, 1) if call["id"] not in answered}

    def add_result(self, call: str, content: str) -> list[int]:
        """Add the result of a tool; return the prompt of the reply to all results so far.

        Args:
            call: place of the call in the last reply, from 1; if no open call has this place, its tool's name, which
                one open call has.
            content: what the tool returned.

        Raises:
            ArgumentError: no open call of this place or name, several of this name, marks of the format in the
                result, which is then not added.
        """
        open_calls = self.open_calls
        if not open_calls:
            raise ArgumentError("call", call, "a result where a call waits for one; none does")
        places = [n for n in open_calls if call == str(n)]
        places = places or [n for n, one in open_calls.items() if call == one["function"]["name"]]
        if len(places) != 1:
            allowed = ", ".join(f"{n} ({one['function']['name']})" for n, one in open_calls.items())
            raise ArgumentError("call", call, f"the place of an open call, or a name that only one has: {allowed}")
        return self._add({"role": "tool", "tool_call_id": open_calls[places[0]]["id"], "content": content})

    def _last_reply(self) -> tuple[int, list[dict[str, Any]], set[str]]:
        """Messages up to the last reply and with it, its calls, and the ids of those that have results."""
        end = max((n for n, message in enumerate(self.messages, 1) if message["role"] == "assistant"), default=0)
        calls = self.messages[end - 1].get("tool_calls", []) if end else []
        return end, calls, {message["tool_call_id"] for message in self.messages[end:] if message["role"] == "tool"}

    def _add(self, message: dict[str, Any]) -> list[int]:
        messages = [*self.messages, message]
        text = encode_chat(messages, self.options)
        if self._text and text.startswith(self._text):
            ids = self._ids + self.tokenizer.encode(text[len(self._text) :], bos=False)
        else:
            ids = self.tokenizer.encode(text, bos=False)
        self.messages, self._asked = messages, (text, ids)
        return list(ids)

    def take_back(self) -> None:
        """Remove the user's message and the results that have no reply."""
        end, _, _ = self._last_reply()
        first = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        self.messages = self.messages[:end] or first

    def answer(self, tokens: Sequence[int]) -> Reply:
        """Add the model's reply, whether it ended or was cut off.

        Args:
            tokens: ids that were drawn after the prompt, with or without one of ``stop``.

        Raises:
            ReplyError: a reply that the format cannot hold; it is not added, and what it replies to is taken back.
        """
        body = list(tokens[:-1] if tokens and tokens[-1] in self.stop else tokens)
        decoder = ReplyDecoder(self.tokenizer)
        text = "".join(decoder.push(token) for token in body) + decoder.finish()
        ids = [*body, self.tokenizer.eos]
        if self.options.mode == "thinking" and END_THINK not in text:
            text, ids = text + END_THINK, [*body, _id(self.tokenizer, END_THINK), self.tokenizer.eos]
        try:
            reply = parse_reply(text, self.options.mode)
            messages = [*self.messages, self._message(reply)]
            encode_chat(messages, self.options)
        except (ReplyError, ArgumentError) as error:
            self.take_back()
            raise ReplyError(f"the reply is not kept: {error}") from error
        self.messages = messages
        self._text, self._ids = self._asked[0] + text + EOS, self._asked[1] + ids
        return reply

    def _message(self, reply: Reply) -> dict[str, Any]:
        calls = [
            {"id": f"call {len(self.messages)}.{n}", "function": dict(call)} for n, call in enumerate(reply.tool_calls)
        ]
        found = {"role": "assistant", "content": reply.content, "reasoning": reply.reasoning or ""}
        return found | ({"tool_calls": calls} if calls else {})
