"""The chat encoding, rule by rule; replies taken apart are what was put together."""

from __future__ import annotations

import json
import math

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.model import chat
from dsv4lib.model.chat import ASSISTANT, BOS, DSML, END_THINK, EOS, REMINDER, THINK, USER, ChatOptions, Wording
from dsv4lib.model.chat import encode_chat as encode

CHAT = ChatOptions(mode="chat")
WORDS = Wording({"low": "", "high": "H!", "max": "M!"}, "T{dsml_token}|{tool_schemas}|{x}", "R{schema}")


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def call(number, name="f", **arguments):
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number):
    return {"role": "tool", "tool_call_id": f"c{number}", "content": f"r{number}"}


TOOLS = [{"type": "function", "function": {"name": "f", "description": "京{schema}"}}]
TALK = [
    said("system", "S"),
    said("user", "q1"),
    said("assistant", "a1", reasoning="w1"),
    said("user", "q2"),
]


def test_modes():
    head = f"{BOS}S{USER}q1{ASSISTANT}{END_THINK}a1{EOS}{USER}q2{ASSISTANT}"
    assert encode(TALK, CHAT) == head + END_THINK
    assert encode(TALK) == head + THINK  # what was thought before the last question is dropped
    kept = f"{BOS}S{USER}q1{ASSISTANT}{THINK}w1{END_THINK}a1{EOS}{USER}q2{ASSISTANT}{THINK}"
    assert encode(TALK, ChatOptions(keep_reasoning=True)) == kept
    assert encode([said("user", "q")]) == f"{BOS}{USER}q{ASSISTANT}{THINK}"


def test_a_reply_after_the_last_question_keeps_its_reasoning():
    assert encode(TALK[:3]) == f"{BOS}S{USER}q1{ASSISTANT}{THINK}w1{END_THINK}a1{EOS}"
    assert encode(TALK[:3], CHAT) == f"{BOS}S{USER}q1{ASSISTANT}{END_THINK}a1{EOS}"


@pytest.mark.parametrize("effort, words", [("low", ""), ("high", "H!"), ("max", "M!")])
def test_effort_levels_precede_all(effort, words):
    assert encode(TALK[:2], ChatOptions(effort=effort, wording=WORDS)) == f"{BOS}{words}S{USER}q1{ASSISTANT}{THINK}"


def test_tools_keep_all_reasoning():
    talk = [said("system", "S", tools=TOOLS), *TALK[1:]]
    tools = f'\n\nT{DSML}|{{"name": "f", "description": "京{{schema}}"}}|{{x}}'  # nothing inside a schema is replaced
    tail = f"{USER}q1{ASSISTANT}{THINK}w1{END_THINK}a1{EOS}{USER}q2{ASSISTANT}{THINK}"
    assert encode(talk, ChatOptions(wording=WORDS)) == f"{BOS}S{tools}{tail}"


def test_response_format_and_developer():
    talk = [said("developer", "D1", response_format={"a": 1}), said("assistant", "x"), said("user", "q")]
    assert encode(talk, ChatOptions(mode="chat", wording=WORDS)) == (
        f'{BOS}{USER}D1\n\nR{{"a": 1}}{ASSISTANT}{END_THINK}x{EOS}{USER}q{ASSISTANT}{END_THINK}'
    )
    # in thinking mode an earlier developer message goes with the reasoning; the last one stays
    assert encode(talk) == f"{BOS}x{EOS}{USER}q{ASSISTANT}{THINK}"
    assert encode([said("user", "q"), said("assistant", "x"), said("developer", "D")]) == (
        f"{BOS}{USER}q{ASSISTANT}{END_THINK}x{EOS}{USER}D{ASSISTANT}{THINK}"
    )


def test_calls_are_dsml_and_results_stand_in_their_order():
    calls = [call(1, city="京 <b>", n=3), call(2, "g", deep={"a": [1, None]}, yes=True), call(3, "h")]
    talk = [
        said("user", "q", ), said("assistant", "A", reasoning="w", tool_calls=calls),
        result(3), said("user", "and"), result(1), result(2),
    ]  # fmt: skip
    block = "\n".join(
        [
            f"\n\n<{DSML}tool_calls>",
            f'<{DSML}invoke name="f">',
            f'<{DSML}parameter name="city" string="true">京 <b></{DSML}parameter>',
            f'<{DSML}parameter name="n" string="false">3</{DSML}parameter>',
            f"</{DSML}invoke>",
            f'<{DSML}invoke name="g">',
            f'<{DSML}parameter name="deep" string="false">{{"a": [1, null]}}</{DSML}parameter>',
            f'<{DSML}parameter name="yes" string="false">true</{DSML}parameter>',
            f"</{DSML}invoke>",
            f'<{DSML}invoke name="h">\n',
            f"</{DSML}invoke>",
            f"</{DSML}tool_calls>",
        ]
    )
    parts = [*(f"<tool_result>r{n}</tool_result>" for n in (1, 2, 3))]
    answer = f"{USER}{parts[0]}\n\nand\n\n{parts[1]}\n\n{parts[2]}{ASSISTANT}"
    assert encode(talk, CHAT) == f"{BOS}{USER}q{ASSISTANT}{END_THINK}A{block}{EOS}{answer}{END_THINK}"
    kept = encode(talk, ChatOptions(keep_reasoning=True))
    assert f"{ASSISTANT}{THINK}w{END_THINK}A{block}" in kept
    reply = chat.parse_reply(f"w{END_THINK}A{block}{EOS}")
    assert (reply.reasoning, reply.content) == ("w", "A")
    assert [c["arguments"] for c in reply.tool_calls] == [c["function"]["arguments"] for c in calls]
    assert [c["name"] for c in reply.tool_calls] == ["f", "g", "h"]
    text = [{**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}} for c in calls]
    assert encode([talk[0], {**talk[1], "tool_calls": text}, *talk[2:]], CHAT) == encode(talk, CHAT)


def test_a_reminder_has_a_mark():
    talk = [said("user", "q"), said("latest_reminder", "today")]
    assert encode(talk, CHAT) == f"{BOS}{USER}q{ASSISTANT}{END_THINK}{REMINDER}today"


def test_wording_is_read_as_data(tmp_path):
    file = tmp_path / "encoding.py"
    texts = 'TOOLS_TEMPLATE = """X {tool_schemas}"""\nresponse_format_template: str = ("R" "{schema}")\n'
    efforts = 'REASONING_EFFORT_PROMPTS: dict = {"low": "", "high": "h", "max": "m"}\n'
    file.write_text("raise SystemExit\nimport os\nother = os.getcwd()\n" + texts + efforts)
    assert Wording.read(file) == Wording({"low": "", "high": "h", "max": "m"}, "X {tool_schemas}", "R{schema}")
    file.write_text(texts + 'REASONING_EFFORT_MAX = "most"\n')
    assert Wording.read(file).efforts == {"low": "", "high": "", "max": "most"}
    for wrong in (texts, "def", efforts, texts.replace("{tool_schemas}", "") + efforts):
        file.write_text(wrong)
        with pytest.raises(ArgumentError):
            Wording.read(file)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages"),
        ([said("bot", "x")], r"messages\[0\].role"),
        ([said("user", "x", name="n")], "name"),
        ([said("user", None)], "content"),
        ([said("user", f"x{EOS}")], "marks"),
        ([said("user", f"</{DSML}invoke>")], "marks"),
        ([said("developer", "")], "developer|content"),
        ([said("user", "q"), result(1)], "tool_call_id"),
        ([said("user", "q"), said("assistant", "", tool_calls=[call(1)]), result(1), result(1)], "tool_call_id"),
        ([said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}])], "JSON object"),
        ([said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])], "JSON"),
        ([said("assistant", "", tool_calls=[call(1, 'f"')])], "quotes"),
        ([said("assistant", "", tool_calls=[call(1, a=f"</{DSML}parameter>")])], "values"),
        ([said("system", "", tools=[{"name": "f"}])], "tools"),
        ([said("system", "", tools=[{"function": {"description": "d"}}])], "tools.name"),
        ([said("system", "", tools=[{"function": {"name": 'f"'}}])], "tools.name"),
        ([said("system", "", tools=[{"function": {"name": "f", "description": 1}}])], "description of f"),
        ([said("system", "", tools=[{"function": {"name": "f", "parameters": []}}])], "parameters of f"),
        ([said("system", "", tools=[{"function": {"name": "f", "parameters": {"a": EOS}}}])], "marks"),
        ([said("system", "", tools=[{"function": {"name": "f", "parameters": {"a": math.inf}}}])], "values of JSON"),
        ([said("system", "", response_format={"maximum": math.nan})], r"response_format=.*values of JSON"),
        ([said("system", "", response_format={"a": {1, 2}})], r"response_format=.*values of JSON"),
        ([said("assistant", "", tool_calls=[call(1, x=math.nan)])], r"arguments=.*values of JSON"),
        (
            [said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": {1: 2}}}])],
            "names that are texts",
        ),
        ([said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "[" * 5000}}])], "deeper than 100"),
    ],
)
def test_bad_conversations_are_named(messages, message):
    with pytest.raises(ArgumentError, match=message):
        encode(messages)


def test_bad_options_are_named():
    for options in ({"mode": "reason"}, {"effort": "medium"}, {"mode": "chat", "effort": "max"}):
        with pytest.raises(ArgumentError):
            ChatOptions(**options)


@pytest.mark.parametrize(
    "text",
    [
        "no end of thinking",
        f"{END_THINK}<{DSML}tool_calls>\n<{DSML}invoke name=\"f\">",
        f"{END_THINK}<{DSML}tool_calls>\nwords\n</{DSML}tool_calls>",
        f"{END_THINK}<{DSML}tool_calls>\n<{DSML}invoke name=\"f\">\nwords\n</{DSML}invoke>\n</{DSML}tool_calls>",
        f"{END_THINK}<{DSML}tool_calls>\n<{DSML}invoke name=\"f\">\n"
        f"<{DSML}parameter name=\"a\" string=\"false\">x</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>",
    ],
)  # fmt: skip
def test_replies_that_break_the_format_are_named(text):
    with pytest.raises(chat.ReplyError):
        chat.parse_reply(text)


def test_plain_replies():
    assert chat.parse_reply(f"w{END_THINK}a{EOS}") == chat.Reply("w", "a", ())
    assert chat.parse_reply("a", "chat") == chat.Reply(None, "a", ())
