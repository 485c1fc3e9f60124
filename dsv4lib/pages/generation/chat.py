"""Talk with a checkpoint in the terminal. One scheduler for all turns, so that each finds the ones before it cached."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console

from dsv4lib.errors import ArgumentError
from dsv4lib.model.chat import THINK, ChatOptions, ReplyError
from dsv4lib.model.conversation import Conversation, NoChatEncoding, ReplyDecoder, wording_of
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.model.tools import WithoutCalls, read_tools, shown_call
from dsv4lib.pages.generation import serving
from dsv4lib.pages.generation.serving import Options, shown

RESULT = "/result CALL TEXT"
COMMANDS = "/reset forgets the conversation, /quit or the end of the input ends it"


class ChatWish(NamedTuple):
    """Options of the chat alone.

    Attributes:
        system: first message; None: none. thinking: think before a reply. effort: of thinking.
        context: most tokens of the conversation. hits: print how many tokens of each prompt were cached.
        tools: file of schemas, see `read_tools`; None: none.
    """

    system: str | None = None
    thinking: bool = False
    effort: str = "low"
    context: int = 8192
    hits: bool = False
    tools: Path | None = None


class Interrupts:
    """Inside, the first ctrl-C sets ``wanted``; a second one is a KeyboardInterrupt."""

    def __enter__(self) -> Interrupts:
        self.wanted, self._before = False, signal.signal(signal.SIGINT, self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _seen(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


def command(options: Options, wish: ChatWish, console: Console) -> None:
    """Read messages from stdin, a line each, and write the replies to stdout. Everything else goes to ``console``.

    Ctrl-C ends a reply after the step under way; at the prompt it ends the chat.

    Raises:
        NoChatEncoding: the checkpoint continues texts and does not talk. ArgumentError: a file of tools that is wrong.
        CheckpointError, ArgumentError, BackendUnavailable, NotEnoughMemory, NoDistribution: as of `generate`.
    """
    with serving.interruptible():
        params = options.checked()
        if wish.context < 2:
            raise ArgumentError("context", wish.context, "at least 2 tokens")
        backend = serving.chosen(options.backend)
        tools = [] if wish.tools is None else read_tools(wish.tools)
        listed, tokenizer = serving.opened(options.model)
        try:
            wording = wording_of(options.model, tokenizer)
        except NoChatEncoding as error:
            raise NoChatEncoding(f"{error}; ./dsv4 generate continues a text with this checkpoint") from error
        chosen = ChatOptions("thinking" if wish.thinking else "chat", wish.effort, wording=wording)
        talk = Conversation(tokenizer, chosen, wish.system, tools)
        positions = serving.capacity(listed, wish.context)
        scheduler = serving.scheduler(listed, positions, options, backend, console)
        console.print(f"back end {backend}, {positions} tokens of context; {_commands(talk)}")
        _converse(Session(scheduler, talk, params, options.tokens, wish.hits, console))


class Session(NamedTuple):
    """What the turns of a chat share."""

    scheduler: Scheduler
    talk: Conversation
    params: SamplingParams
    tokens: int
    hits: bool
    console: Console


def _lines() -> Iterator[str]:
    """Lines of stdin until its end, after a prompt on a terminal."""
    sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are refused where they are encoded
    while True:
        if sys.stdin.isatty():
            try:
                yield input("> ").strip()
            except EOFError:
                shown("\n")
                return
        elif line := sys.stdin.readline():
            yield line.strip()
        else:
            return


def _commands(talk: Conversation) -> str:
    return f"{COMMANDS}; {RESULT} answers a call of a tool" if talk.tools else COMMANDS


def _converse(session: Session) -> None:
    for number, line in enumerate(_lines()):
        if line == "/quit":
            return
        if line == "/reset":
            session.talk.reset()
            session.console.print("the conversation is forgotten")
        elif line.split()[:1] == ["/result"]:
            _result(session, number, line)
        elif line.startswith("/"):
            session.console.print(f"{line.split()[0]} is no command; {_commands(session.talk)}", markup=False)
        elif line:
            _turn(session, number, partial(session.talk.ask, line))


def _result(session: Session, name: int, line: str) -> None:
    """Add a tool's result, which may be empty; write the reply when no call is open."""
    _, call, text, *_ = *line.split(None, 2), "", ""
    if not call:
        text = f"{RESULT}: the call's number or its tool's name, and the result, which may be empty"
        session.console.print(text, markup=False, soft_wrap=True)
        return
    add = partial(session.talk.add_result, call, text)
    if len(session.talk.open_calls) > 1:
        _said(session, add)
        _print_open(session)
    else:
        _turn(session, name, add)


def _said(session: Session, say: Callable[[], list[int]]) -> list[int] | None:
    """Return the prompt; None where what was said is refused, in one line."""
    try:
        return say()
    except ArgumentError as error:
        session.console.print(str(error), markup=False, soft_wrap=True)
        return None


def _print_open(session: Session) -> None:
    """Say which calls wait for results, if any does."""
    if not session.talk.open_calls:
        return
    waiting = ", ".join(f"{n} ({call['function']['name']})" for n, call in session.talk.open_calls.items())
    text = f"no result yet: {waiting}; {RESULT} gives one, a message goes on without"
    session.console.print(text, markup=False, soft_wrap=True)


def _turn(session: Session, name: int, say: Callable[[], list[int]]) -> None:
    """Write the reply to what ``say`` adds as it is drawn, then its calls of tools."""
    scheduler, talk, console = session.scheduler, session.talk, session.console
    most, prompt = scheduler.caches.positions, _said(session, say)
    if prompt is None:
        return
    if len(prompt) >= most:
        talk.take_back()
        text = f"the conversation would have {len(prompt)} tokens, {most - 1} fit (--context); /reset begins a new one"
        console.print(text, soft_wrap=True)
        _print_open(session)
        return
    scheduler.add(name, prompt, session.params, min(session.tokens, most - len(prompt)), stop=talk.stop)
    one, drawn, decoder = scheduler.known[name], [], ReplyDecoder(talk.tokenizer)
    outside = WithoutCalls(talk.options.mode)
    shown(f"{THINK}\n" if talk.options.mode == "thinking" else "")
    with Interrupts() as interrupts:
        while name in scheduler.known and not interrupts.wanted:
            tokens = [token.token for token in scheduler.step()]
            drawn += tokens
            shown(outside.push("".join(decoder.push(token) for token in tokens)))
        if name in scheduler.known:
            scheduler.cancel(name)
    shown(outside.push(decoder.finish()))
    _end(session, drawn, outside.held)
    if session.hits:
        run = f"{one.hit} from the cache, {len(prompt) - one.hit} run"
        console.print(f"{len(prompt)} tokens of prompt: {run}; {len(drawn)} of reply", soft_wrap=True)


def _end(session: Session, drawn: Sequence[int], held: str) -> None:
    """Keep a reply and write its calls, one a line; ``held`` is what was not written yet."""
    talk, console = session.talk, session.console
    calls: tuple[dict[str, Any], ...] = ()
    refused = None
    try:
        if drawn:
            calls = talk.answer(drawn).tool_calls
        else:
            talk.take_back()
    except ReplyError as error:
        refused = str(error)
    shown(("" if calls else held) + "\n")
    if refused:
        console.print(refused, markup=False, soft_wrap=True)
    shown("".join(f"call {n}: {shown_call(call)}\n" for n, call in enumerate(calls, 1)))
    _print_open(session)
