"""Tools of a chat: their schemas from a file, calls as text, and the stream of a reply without its calls.

    tools = read_tools("tools.json")                    [{"name": "weather", "description": ..., "parameters": {...}}]
    talk = Conversation(tokenizer, options, tools=tools)
    shown_call(reply.tool_calls[0])                     weather(city="Paris", days=3)

A tool's schema is OpenAI's: a function with ``name``, ``description`` and ``parameters``, which is a JSON schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4lib.errors import ArgumentError
from dsv4lib.model import strict_json
from dsv4lib.model.chat import DSML, END_THINK, check_function

FORM = '{"type": "function", "function": {"name": ...}}, or the function alone'
CALLS = f"<{DSML}tool_calls>"  # begins the calls of a reply
BEFORE = "\n\n"  # stands between a reply's text and its calls


def read_tools(file: Path | str) -> list[dict[str, Any]]:
    """Read the schemas of tools from a JSON file.

    Args:
        file: a list of schemas, each {"type": "function", "function": {...}} or the function alone.

    Returns:
        The schemas in the form of a message's ``tools``.

    Raises:
        ArgumentError: a file that cannot be read, no JSON, an empty list, an unknown key beside ``function``, a
            schema that `check_function` refuses, a name that occurs twice.
    """
    try:
        listed = strict_json.read(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError("tools", str(file), f"a file that can be read ({error.strerror})") from error
    except ValueError as error:
        raise ArgumentError("tools", str(file), f"a file of JSON ({error})") from error
    if not isinstance(listed, list) or not listed:
        raise ArgumentError("tools", str(file), "a JSON list of at least one schema")
    tools = [_tool(number, entry) for number, entry in enumerate(listed)]
    names = [tool["function"]["name"] for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError("tools", twice, "a name for each tool of its own")
    return tools


def _tool(number: int, entry: Any) -> dict[str, Any]:
    where, function = f"tools[{number}]", entry.get("function", entry) if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or entry.get("type", "function") != "function":
        raise ArgumentError(where, entry, FORM)
    unknown = entry.keys() - {"type", "function"} if "function" in entry else ()
    if unknown:
        raise ArgumentError(where, sorted(unknown), "no keys beside type and function; a function's keys stand in it")
    check_function(where, function)
    return {"type": "function", "function": dict(function)}


def shown_call(call: Mapping[str, Any]) -> str:
    """Write a call of `Reply.tool_calls` on one line, its values as JSON."""
    arguments = (f"{name}={strict_json.write(value)}" for name, value in call["arguments"].items())
    return f"{call['name']}({', '.join(arguments)})"


class WithoutCalls:
    """Hold the tool calls of a reply back from its streamed text.

    Args:
        mode: ``chat`` or ``thinking``; what is thought calls no tool.

    Attributes:
        held: text that is, or may become, the beginning of the calls. The caller shows it where the reply ends
            without a call.
    """

    def __init__(self, mode: str):
        self.held, self._sought, self._found = "", END_THINK if mode == "thinking" else CALLS, False

    def push(self, text: str) -> str:
        """Take the next text of the reply; return what belongs to no call."""
        self.held += text
        certain = ""
        if self._sought == END_THINK and END_THINK in self.held:
            thought, end, self.held = self.held.partition(END_THINK)
            certain, self._sought = thought + end, CALLS
        if self._found:
            return certain
        at = self.held.find(self._sought)
        if at >= 0:
            self._found = True
            at -= 2 * self.held[:at].endswith(BEFORE)
        else:
            at = len(self.held) - max(_begun(self.held, self._sought), _begun(self.held, BEFORE + self._sought))
        certain, self.held = certain + self.held[:at], self.held[at:]
        return certain


def _begun(text: str, mark: str) -> int:
    """Count the characters at the end of ``text`` that ``mark`` begins with."""
    return next(n for n in range(min(len(text), len(mark)), -1, -1) if text.endswith(mark[:n]))
