"""Encode chats as DeepSeek-V4 does. Conversations to prompts, and replies back to reasoning, text and tool calls.

The format (DeepSeek's released ``encoding/``, checked against vLLM's port of it):

* BOS opens the conversation; in thinking mode the words of the effort level come next. A system message has no mark.
* ``<User>`` before a user's message, ``<Assistant>`` before a reply, EOS after it. ``<latest_reminder>`` before one.
* After ``<Assistant>`` stands ``<think>`` where reasoning follows, else ``</think>``: in chat mode always, in thinking
  mode before replies whose reasoning was dropped.
* Reasoning before the last user message is dropped, and developer messages there with it, unless a message declares
  tools: then all of it stays.
* A tool's result is part of a user message, ``<tool_result>...</tool_result>``. Results and user texts that follow
  one another are one message, parts two newlines apart; results stand in the order of the calls they answer.
* A reply's tool calls are DSML: an ``invoke`` each, with ``parameter``s that are text as it is (string="true") or JSON.

Three texts that the model was trained with are words of DeepSeek's and not part of this lab: effort levels, the
introduction of tools, and of a response format. `Wording.read` takes them from a checkpoint's own encoding file, as
data; the default is this lab's wording, good for models trained here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.model import strict_json

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
MODES, EFFORTS = ("chat", "thinking"), ("low", "high", "max")
UNNAMEABLE = ('"', "<", "\n")  # in no name of a tool or parameter: they would end the tag that holds it
UNICODE = "text without lone surrogates, which UTF-8 does not have"
MARKS = (BOS, EOS, USER, ASSISTANT, REMINDER, DSML)
ENCODING = Path("encoding") / "encoding_dsv4.py"  # where a released checkpoint has its texts

KEYS = {
    "system": {"content", "tools", "response_format"},
    "developer": {"content", "tools", "response_format"},
    "user": {"content"},
    "latest_reminder": {"content"},
    "tool": {"content", "tool_call_id", "name"},
    "assistant": {"content", "reasoning", "tool_calls"},
}
"""Role -> what its messages may hold besides ``role``."""


@dataclass(frozen=True)
class Wording:
    """Texts around the structure.

    Attributes:
        efforts: by effort level; written before the first message in thinking mode.
        tools: introduces tools; ``{tool_schemas}`` stands for one JSON schema a line, ``{dsml_token}``,
            ``{thinking_start_token}`` and ``{thinking_end_token}`` for the marks.
        response_format: introduces a schema that replies must follow, ``{schema}``.
    """

    efforts: Mapping[str, str] = field(
        default_factory=lambda: {
            "low": "",
            "high": "Effort: high. Think the question through before answering.\n\n",
            "max": "Effort: max. Think the question through, check each step, and test the answer.\n\n",
        }
    )
    tools: str = (
        "## Tools\n\nCall a tool like this:\n\n<{dsml_token}tool_calls>\n"
        '<{dsml_token}invoke name="TOOL">\n<{dsml_token}parameter name="NAME" string="true|false">VALUE'
        "</{dsml_token}parameter>\n</{dsml_token}invoke>\n</{dsml_token}tool_calls>\n\n"
        'Text is written as it is with string="true", anything else as JSON with string="false".\n\n'
        "Tools, one schema a line:\n\n{tool_schemas}\n"
    )
    response_format: str = "## Reply format\n\nReplies follow this schema:\n{schema}"

    def __post_init__(self) -> None:
        if set(self.efforts) != set(EFFORTS):
            raise ArgumentError("efforts", sorted(self.efforts), "texts for " + ", ".join(EFFORTS))
        for name, mark in (("tools", "{tool_schemas}"), ("response_format", "{schema}")):
            if getattr(self, name).count(mark) != 1:
                raise ArgumentError(name, getattr(self, name), f"a text with {mark} once")

    @classmethod
    def read(cls, file: Path | str) -> Wording:
        """Read the texts of a released encoding file without running it.

        The file is ``encoding/encoding_dsv4.py``.

        Read are assignments of literals at its top level: TOOLS_TEMPLATE, ``response_format_template``, and
        REASONING_EFFORT_PROMPTS or, in the first release, which has ``max`` alone, REASONING_EFFORT_MAX.

        Raises:
            ArgumentError: not such a file.
        """
        try:
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError) as error:
            raise ArgumentError("file", str(file), f"a released encoding file ({error})") from error
        found: dict[str, Any] = {}
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(targets[0], ast.Name) and node.value:
                try:
                    found[targets[0].id] = ast.literal_eval(node.value)
                except (ValueError, TypeError, RecursionError):
                    continue
        efforts = found.get("REASONING_EFFORT_PROMPTS")
        if efforts is None and "REASONING_EFFORT_MAX" in found:
            efforts = {"low": "", "high": "", "max": found["REASONING_EFFORT_MAX"]}
        texts = (found.get("TOOLS_TEMPLATE"), found.get("response_format_template"))
        if not isinstance(efforts, dict) or not all(isinstance(t, str) for t in (*texts, *efforts.values())):
            wanted = "one with TOOLS_TEMPLATE, response_format_template and REASONING_EFFORT_PROMPTS"
            raise ArgumentError("file", str(file), wanted)
        return cls(efforts, *texts)


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Replace the named marks, each once and nothing inside what was put in; other braces stay."""
    pattern = "|".join(re.escape("{" + name + "}") for name in values)
    return re.sub(pattern, lambda m: values[m[0][1:-1]], template)


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is encoded.

    Attributes:
        mode: ``chat`` or ``thinking``. effort: ``low``, ``high`` or ``max``; of thinking mode only.
        keep_reasoning: keep what was thought before the last user message even without tools.
        wording: texts around the structure.
    """

    mode: str = "thinking"
    effort: str = "low"
    keep_reasoning: bool = False
    wording: Wording = field(default_factory=Wording)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ArgumentError("mode", self.mode, "one of " + ", ".join(MODES))
        if self.effort not in EFFORTS:
            raise ArgumentError("effort", self.effort, "one of " + ", ".join(EFFORTS))
        if self.mode == "chat" and self.effort != "low":
            raise ArgumentError("effort", self.effort, "low in chat mode, which has no reasoning")


def encode_chat(messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None) -> str:
    """Encode a conversation as the prompt of its next reply.

    Args:
        messages: OpenAI's form: ``role`` and the keys of `KEYS`; ``tool_calls`` are
            {"id", "type": "function", "function": {"name", "arguments": JSON text or object}}.
        options: mode, effort, wording.

    Raises:
        ArgumentError: an unknown role or key, a content that is no text, marks of the format inside a content or a
            tool's schema, a schema that does not encode to UTF-8, a tool without a name, a tool result that answers no
            call or one twice, arguments that are no JSON object.
    """
    options = ChatOptions() if options is None else options
    turns = _merged([_checked(i, message) for i, message in enumerate(messages)])
    if not turns:
        raise ArgumentError("messages", messages, "at least one message")
    thinking = options.mode == "thinking"
    keep = options.keep_reasoning or any(turn.get("tools") for turn in turns)
    last = max((i for i, turn in enumerate(turns) if turn["role"] in ("user", "developer")), default=-1)
    if thinking and not keep:
        turns = [t for i, t in enumerate(turns) if t["role"] != "developer" or i >= last]
        last = max((i for i, turn in enumerate(turns) if turn["role"] in ("user", "developer")), default=-1)
    out = [BOS, options.wording.efforts[options.effort] if thinking else ""]
    for i, turn in enumerate(turns):
        reasons = thinking and (keep or i >= last)
        out.append(_turn(turn, options.wording, reasons and i > last or thinking and keep))
        follows = turns[i + 1]["role"] if i + 1 < len(turns) else "assistant"
        if turn["role"] in ("user", "developer") and follows in ("assistant", "latest_reminder"):
            out.append(ASSISTANT + (THINK if reasons else END_THINK))
    return "".join(out)


def _turn(turn: Mapping[str, Any], wording: Wording, reasons: bool) -> str:
    role, content = turn["role"], turn.get("content") or ""
    if role == "user":
        return USER + "\n\n".join(turn["parts"])
    if role == "latest_reminder":
        return REMINDER + content
    if role == "assistant":
        thought = (turn.get("reasoning") or "") + END_THINK if reasons else ""
        return thought + content + _calls(turn.get("tool_calls") or ()) + EOS
    marks = {"dsml_token": DSML, "thinking_start_token": THINK, "thinking_end_token": END_THINK}
    if turn.get("tools"):
        schemas = "\n".join(strict_json.write(tool["function"]) for tool in turn["tools"])
        content += "\n\n" + _filled(wording.tools, marks | {"tool_schemas": schemas})
    if turn.get("response_format"):
        content += "\n\n" + _filled(wording.response_format, {"schema": strict_json.write(turn["response_format"])})
    return (USER if role == "developer" else "") + content


def _json(where: str, value: Any) -> str:
    """Write an argument as JSON."""
    try:
        return strict_json.write(value)
    except ValueError as error:
        raise ArgumentError(where, value, f"values of JSON ({error})") from error


def _encodes(text: str) -> bool:
    """Say whether a text is UTF-8; JSON may have halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    if not calls:
        return ""
    blocks = []
    for call in calls:
        lines = [
            f'<{DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{value if isinstance(value, str) else strict_json.write(value)}</{DSML}parameter>"
            for name, value in call["arguments"].items()
        ]
        blocks.append("\n".join((f'<{DSML}invoke name="{call["name"]}">', "\n".join(lines), f"</{DSML}invoke>")))
    return "\n\n" + "\n".join((f"<{DSML}tool_calls>", *blocks, f"</{DSML}tool_calls>"))


def _checked(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """One message with its tool calls parsed."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or message.get("role") not in KEYS:
        raise ArgumentError(f"{where}.role", message, "one of " + ", ".join(KEYS))
    role = message["role"]
    unknown = message.keys() - KEYS[role] - {"role"}
    if unknown:
        raise ArgumentError(where, sorted(unknown), f"keys of {role}: " + ", ".join(sorted(KEYS[role])))
    out = dict(message)
    for name in ("content", "reasoning"):
        text = message.get(name)
        if text is None and (name == "reasoning" or role in ("assistant", "system")):
            continue
        if not isinstance(text, str):
            raise ArgumentError(f"{where}.{name}", text, "text")
        found = next((mark for mark in MARKS if mark in text), None)
        if found:
            raise ArgumentError(f"{where}.{name}", found, "text without the format's own marks")
    if role == "developer" and not out["content"]:
        raise ArgumentError(f"{where}.content", out["content"], "text that is not empty")
    for tool in out.get("tools") or ():
        if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
            raise ArgumentError(f"{where}.tools", tool, '{"type": "function", "function": {...}}')
        check_function(f"{where}.tools", tool["function"])
    if out.get("response_format"):
        _json(f"{where}.response_format", out["response_format"])
    out["tool_calls"] = [_call(f"{where}.tool_calls", call) for call in out.get("tool_calls") or ()]
    return out


def check_function(where: str, function: Mapping[str, Any]) -> None:
    """Check the function of a tool's schema.

    Args:
        where: names it in an error. function: ``name``, ``description``, ``parameters``.

    Raises:
        ArgumentError: no call could name it, its text does not encode to UTF-8 or has marks of the format.
    """
    text = _json(where, function)
    if not _encodes(text):
        raise ArgumentError(where, function, UNICODE)
    name = function.get("name")
    if not isinstance(name, str) or not name or any(mark in name for mark in UNNAMEABLE):
        raise ArgumentError(f"{where}.name", name, "a name without quotes, < and line breaks")
    if not isinstance(function.get("description", ""), str):
        raise ArgumentError(f"{where}.description of {name}", function["description"], "text")
    if not isinstance(function.get("parameters", {}), Mapping):
        raise ArgumentError(f"{where}.parameters of {name}", function["parameters"], "a JSON schema, an object")
    found = next((mark for mark in MARKS if mark in text), None)
    if found:
        raise ArgumentError(f"{where} of {name}", found, "a schema without the format's own marks")


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ArgumentError(where, call, '{"id", "function": {"name", "arguments"}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = strict_json.read(arguments)
        except ValueError as error:
            raise ArgumentError(f"{where}.arguments", arguments, f"JSON ({error})") from error
    if not isinstance(arguments, Mapping):
        raise ArgumentError(f"{where}.arguments", arguments, "a JSON object")
    if not all(isinstance(name, str) for name in arguments):
        raise ArgumentError(f"{where}.arguments", arguments, "names that are texts")
    if any(mark in text for text in (function["name"], *arguments) for mark in UNNAMEABLE):
        raise ArgumentError(where, [function["name"], *arguments], "names without quotes, < and line breaks")
    if DSML in _json(f"{where}.arguments", arguments):
        raise ArgumentError(f"{where}.arguments", arguments, f"values without {DSML}")
    return {"id": call.get("id"), "name": function["name"], "arguments": arguments}


def _merged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results and user texts in a row become one user message, results in the order of their calls."""
    out: list[dict[str, Any]] = []
    order: dict[Any, int] = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            order = {call["id"]: n for n, call in enumerate(message["tool_calls"])}
        if message["role"] not in ("user", "tool"):
            out.append(message)
            continue
        if not out or out[-1]["role"] != "user":
            out.append({"role": "user", "parts": [], "answers": {}})
        turn = out[-1]
        if message["role"] == "user":
            turn["parts"].append(message["content"])
            continue
        answered = message.get("tool_call_id")
        if answered not in order or answered in turn["answers"].values():
            allowed = f"the id of a call that was not answered yet: {sorted(map(str, order))}"
            raise ArgumentError(f"messages[{i}].tool_call_id", answered, allowed)
        turn["answers"][len(turn["parts"])] = answered
        turn["parts"].append(f"<tool_result>{message['content']}</tool_result>")
        places = sorted(turn["answers"])
        ranked = sorted(places, key=lambda place: order[turn["answers"][place]])
        texts = [(turn["answers"][place], turn["parts"][place]) for place in ranked]
        for place, (name, text) in zip(places, texts, strict=True):
            turn["answers"][place], turn["parts"][place] = name, text
    return out


@dataclass(frozen=True)
class Reply:
    """What a model wrote.

    Attributes:
        reasoning: None where the reply has none. content: text.
        tool_calls: OpenAI's form without ids: {"name", "arguments": dict}.
    """

    reasoning: str | None
    content: str
    tool_calls: tuple[dict[str, Any], ...]


class ReplyError(DSV4Error, ValueError):
    """A reply that breaks the format; what a model writes is not the caller's fault."""


_BLOCK = re.compile(rf"\n*<{DSML}tool_calls>\n(.*)\n</{DSML}tool_calls>\s*\Z", re.DOTALL)
_INVOKE = re.compile(rf'<{DSML}invoke name="([^"]*)">\n(.*?)\n?</{DSML}invoke>(?:\n|\Z)', re.DOTALL)
_PARAMETER = re.compile(
    rf'<{DSML}parameter name="([^"]*)" string="(true|false)">(.*?)</{DSML}parameter>(?:\n|\Z)', re.DOTALL
)


def parse_reply(text: str, mode: str = "thinking") -> Reply:
    """Take a reply apart. It is what came after the prompt of `encode_chat`, with or without EOS.

    Raises:
        ReplyError: reasoning that does not end, DSML that is cut off or not as the format says, a value that is no
            JSON or does not encode to UTF-8.
    """
    if mode not in MODES:
        raise ArgumentError("mode", mode, "one of " + ", ".join(MODES))
    text, reasoning = text.removesuffix(EOS), None
    if mode == "thinking":
        reasoning, end, text = text.partition(END_THINK)
        if not end:
            raise ReplyError("the reply ends inside its reasoning")
    if f"<{DSML}tool_calls>" not in text:
        return Reply(reasoning, text, ())
    content, mark, block = text.partition(f"<{DSML}tool_calls>")
    found = _BLOCK.fullmatch(mark + block)
    if not found:
        raise ReplyError("the tool calls do not end, or text follows them")
    calls = []
    for name, body in _pieces(_INVOKE, found[1], "invoke"):
        arguments = {}
        for key, kind, value in _pieces(_PARAMETER, body, "parameter"):
            if key in arguments:
                raise ReplyError(f"parameter {key!r} of {name!r} occurs twice")
            arguments[key] = value if kind == "true" else _value(key, value)
        calls.append({"name": name, "arguments": arguments})
    return Reply(reasoning, content.removesuffix("\n\n"), tuple(calls))


def _pieces(pattern: re.Pattern[str], text: str, what: str) -> list[tuple[str, ...]]:
    found, at = [], 0
    while at < len(text):
        match = pattern.match(text, at)
        if not match:
            raise ReplyError(f"no {what} at {text[at : at + 40]!r}")
        found.append(match.groups())
        at = match.end()
    return found


def _value(key: str, text: str) -> Any:
    try:
        value = strict_json.read(text)
    except ValueError as error:
        raise ReplyError(f"parameter {key!r} is no JSON ({error}): {text[:40]!r}") from error
    if not _encodes(strict_json.write(value)):
        raise ReplyError(f"parameter {key!r} has a lone surrogate: {text[:40]!r}")
    return value
