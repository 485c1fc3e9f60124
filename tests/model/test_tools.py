"""Tools of a chat: files of schemas, calls on a line, replies streamed without their calls."""

import json
import random

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.model.chat import DSML, END_THINK, EOS, encode_chat
from dsv4lib.model.tools import WithoutCalls, read_tools, shown_call

CALLS = f'<{DSML}tool_calls>\n<{DSML}invoke name="f">\n\n</{DSML}invoke>\n</{DSML}tool_calls>'
WHOLE = {"type": "function", "function": {"name": "f", "description": "京", "parameters": {"type": "object"}}}


def written(tmp_path, value):
    file = tmp_path / "tools.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return file


def test_schemas_are_read_in_both_forms(tmp_path):
    tools = read_tools(written(tmp_path, [WHOLE, {"name": "g"}]))
    assert tools == [WHOLE, {"type": "function", "function": {"name": "g"}}]
    text = encode_chat([{"role": "system", "content": "", "tools": tools}, {"role": "user", "content": "q"}])
    assert json.dumps(WHOLE["function"], ensure_ascii=False) + '\n{"name": "g"}' in text


@pytest.mark.parametrize(
    "value, message",
    [
        ("", "a file of JSON"),
        ("[" * 100_000, "a file of JSON"),
        ({}, "list"),
        ([], "list"),
        (["f"], r"tools\[0\]"),
        ([WHOLE, {"type": "retrieval", "name": "g"}], r"tools\[1\]"),
        ([{"type": "function", "function": "f"}], r"tools\[0\]"),
        ([{"description": "d"}], "name"),
        ([WHOLE, WHOLE], "'f'"),
        ([{"name": "f", "parameters": {"description": EOS}}], "marks"),
        ([WHOLE, {"name": "g", "description": 1}], r"^tools\[1\]\.description of g="),
        ([WHOLE, {"name": 'g"'}], r"^tools\[1\]\.name="),
        ([{**WHOLE, "strict": True}], r"^tools\[0\]=\['strict'\]"),
        ('[{"name": "f", "parameters": {"maximum": NaN}}]', "NaN is no JSON"),
        ('[{"name": "f", "parameters": {"maximum": -Infinity}}]', "-Infinity is no JSON"),
        ('[{"name": "f", "parameters": {"maximum": 1e999}}]', "1e999 is beyond the largest float"),
        ('[{"name": "f", "parameters": {"maximum": -1E+400}}]', r"-1E\+400 is beyond"),
        ('[{"name": "f", "parameters": ' + '{"a": ' * 99 + "1" + "}" * 99 + "}]", "nested deeper than 100"),
        ('[{"name": "f"}, {"name": "g", "description": "\\ud800"}]', r"^tools\[1\]=.*lone surrogates"),
        ('[{"name": "\\udfff", "description": 1}]', r"^tools\[0\]=.*lone surrogates"),
    ],
)
def test_files_that_are_wrong_are_named(tmp_path, value, message):
    with pytest.raises(ArgumentError, match=message) as found:
        read_tools(written(tmp_path, value))
    assert "\n" not in str(found.value) and str(found.value).encode()


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ArgumentError, match="No such file"):
        read_tools(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00[")
    with pytest.raises(ArgumentError, match="a file of JSON"):
        read_tools(tmp_path / "bytes.json")


def test_calls_are_one_line():
    call = {"name": "f", "arguments": {"city": "京\n\x1b", "n": 3, "deep": {"a": [None, True]}}}
    assert shown_call(call) == 'f(city="京\\n\\u001b", n=3, deep={"a": [null, true]})'
    assert shown_call({"name": "g", "arguments": {}}) == "g()"


@pytest.mark.parametrize(
    "mode, text, held",
    [
        ("chat", "a <b> \n\nc", ""),
        ("chat", "a\n\n", "\n\n"),
        ("chat", f"a\n<{DSML}tool", f"<{DSML}tool"),
        ("chat", f"a\n\n{CALLS}", f"\n\n{CALLS}"),
        ("chat", f"a{CALLS}b", f"{CALLS}b"),
        ("chat", f"\n\n\n{CALLS}", f"\n\n{CALLS}"),
        ("thinking", f"w\n\n{CALLS}", ""),
        ("thinking", f"w{CALLS}{END_THINK}a\n\n{CALLS}", f"\n\n{CALLS}"),
        ("thinking", f"w{END_THINK}{CALLS}", CALLS),
        ("thinking", "w</thi", "</thi"),
    ],
)
def test_calls_are_held_back_however_the_text_comes(mode, text, held):
    draw = random.Random(0)
    for most in (1, 2, 5, 40, len(text)):
        stream, shown, at = WithoutCalls(mode), "", 0
        while at < len(text):
            step = draw.randint(1, most)
            shown += stream.push(text[at : at + step])
            at += step
        assert (shown + stream.held, stream.held) == (text, held)
