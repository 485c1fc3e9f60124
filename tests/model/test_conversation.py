"""A conversation's prompts: the ids that were run, one after the other, and the text of the encoding."""

import json

import pytest

from dsv4lib.errors import ArgumentError
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
    ReplyError,
    Wording,
    encode_chat,
)
from dsv4lib.model.conversation import Conversation, NoChatEncoding, ReplyDecoder, wording_of
from dsv4lib.model.tokenizer import ByteTokenizer, FastTokenizer, decode
from tests.chat_model import WORDS, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def marks(tokenizer, *texts):
    return [tokenizer.id_of(text) for text in texts]


def test_a_further_prompt_begins_with_the_ids_that_were_run(tokenizer):
    """Also where the model wrote "th" as two tokens, which its text alone would not give."""
    talk = Conversation(tokenizer, ChatOptions("chat"), "be brief")
    first = talk.ask("hello")
    assert first == tokenizer.encode(encode_chat(talk.messages, talk.options), bos=False)
    drawn = [*tokenizer.encode("a", bos=False), *marks(tokenizer, "t", "h")]
    for stop in ([], [tokenizer.eos], marks(tokenizer, USER)):
        again = Conversation(tokenizer, ChatOptions("chat"), "be brief")
        assert again.ask("hello") == first
        assert again.answer([*drawn, *stop]).content == "ath"
        second = again.ask("and then?")
        text = encode_chat(again.messages, again.options)
        assert second[: len(first) + 4] == [*first, *drawn, tokenizer.eos]
        assert second != tokenizer.encode(text, bos=False)
        assert decode(tokenizer, second) == decode(tokenizer, tokenizer.encode(text, bos=False))
    again.reset()
    assert again.ask("hello") == first


def test_dropped_reasoning_is_not_in_a_further_prompt(tokenizer):
    talk = Conversation(tokenizer, ChatOptions("thinking"))
    talk.ask("q")
    reply = talk.answer(
        [*tokenizer.encode("hm", bos=False), *marks(tokenizer, END_THINK), *tokenizer.encode("a", False)]
    )
    assert (reply.reasoning, reply.content) == ("hm", "a")
    text = encode_chat(talk.messages + [{"role": "user", "content": "r"}], talk.options)
    assert talk.ask("r") == tokenizer.encode(text, bos=False) and "hm" not in text
    cut = talk.answer(tokenizer.encode("still", bos=False))
    assert (cut.reasoning, cut.content) == ("still", "")


def test_replies_that_the_format_cannot_hold_are_taken_back(tokenizer):
    talk = Conversation(tokenizer, ChatOptions("chat"))
    talk.ask("q")
    talk.answer(tokenizer.encode("fine", bos=False))
    before, next_ids = list(talk.messages), talk.ask("r")
    broken = [*tokenizer.encode("x<", bos=False), *marks(tokenizer, DSML), *tokenizer.encode("tool_calls>", bos=False)]
    with pytest.raises(ReplyError, match="not kept"):
        talk.answer(broken)
    assert talk.messages == before and talk.ask("r") == next_ids
    spelled = tokenizer.encode(USER[:1], bos=False) + tokenizer.encode(USER[1:], bos=False)  # byte by byte
    with pytest.raises(ReplyError, match="marks"):
        talk.answer(spelled)
    assert talk.messages == before and talk.ask("r") == next_ids
    call = f'<{DSML}tool_calls>\n<{DSML}invoke name="f">\n\n</{DSML}invoke>\n</{DSML}tool_calls>'
    assert talk.answer(tokenizer.encode(call, bos=False)).tool_calls == ({"name": "f", "arguments": {}},)
    assert talk.messages[-1]["tool_calls"][0]["function"]["name"] == "f"
    with pytest.raises(ArgumentError, match="marks"):
        talk.ask(f"inject {EOS}")
    assert talk.messages[-1]["role"] == "assistant"


def test_streams_show_the_marks_of_a_reply(tokenizer):
    decoder, tokens = ReplyDecoder(tokenizer), tokenizer.encode(f"é{END_THINK}x", bos=False)
    assert "".join(decoder.push(token) for token in tokens) + decoder.finish() == f"é{END_THINK}x"
    cut = ReplyDecoder(tokenizer)
    parts = [cut.push(token) for token in (tokens[0], *marks(tokenizer, THINK, EOS))]
    assert parts == ["", f"\ufffd{THINK}", ""] and cut.finish() == ""


def test_texts_come_from_the_checkpoint(tmp_path):
    found = write_tokenizer(tmp_path)
    assert wording_of(tmp_path, found) == Wording()
    (tmp_path / ENCODING).parent.mkdir()
    (tmp_path / ENCODING).write_text(WORDS)
    assert wording_of(tmp_path, found).efforts["high"] == "Think hard. "
    (tmp_path / ENCODING).write_text("nothing")
    with pytest.raises(ArgumentError, match="TOOLS_TEMPLATE"):
        wording_of(tmp_path, found)
    without: list[ByteTokenizer | FastTokenizer] = [ByteTokenizer(), write_tokenizer(tmp_path, marks=False)]
    for tokenizer in without:
        with pytest.raises(NoChatEncoding, match="User"):
            wording_of(tmp_path, tokenizer)


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]


def calls_text(*names):
    """Calls of tools without arguments, as a model writes them."""
    blocks = "".join(f'<{DSML}invoke name="{name}">\n\n</{DSML}invoke>\n' for name in names)
    return f"\n\n<{DSML}tool_calls>\n{blocks}</{DSML}tool_calls>"


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_results_of_tools_are_one_message_in_the_order_of_the_calls(tokenizer, mode):
    """Prompts have the text of the encoding and begin with the ids that were run, reasoning too."""
    talk = Conversation(tokenizer, ChatOptions(mode), tools=TOOLS)
    first = talk.ask("q")
    thought = f"w{END_THINK}" if mode == "thinking" else ""
    drawn = [*tokenizer.encode(thought + "ok" + calls_text("f", "g", "f"), bos=False), tokenizer.eos]
    assert len(talk.answer(drawn).tool_calls) == 3 and list(talk.open_calls) == [1, 2, 3]
    talk.add_result("3", "r3")
    talk.add_result("g", "r2")
    assert list(talk.open_calls) == [1]
    ids = talk.add_result("f", "r1")
    assert not talk.open_calls and ids[: len(first) + len(drawn)] == [*first, *drawn]
    results = "\n\n".join(f"<tool_result>r{n}</tool_result>" for n in (1, 2, 3))
    begin = THINK if mode == "thinking" else END_THINK
    text = f"{BOS}\n\n{talk.options.wording.tools}{USER}q{ASSISTANT}{begin}{thought}ok{calls_text('f', 'g', 'f')}{EOS}"
    schemas = "\n".join(json.dumps(tool["function"]) for tool in TOOLS)
    for name, value in (("tool_schemas", schemas), ("dsml_token", DSML)):
        text = text.replace("{" + name + "}", value)
    text += f"{USER}{results}{ASSISTANT}{begin}"
    assert encode_chat(talk.messages, talk.options) == text
    assert decode(tokenizer, ids) == decode(tokenizer, tokenizer.encode(text, bos=False))
    talk.answer([*tokenizer.encode(thought + "done", bos=False), tokenizer.eos])
    assert not talk.open_calls


def test_results_that_no_call_waits_for_are_named(tokenizer):
    talk = Conversation(tokenizer, ChatOptions("chat"), tools=TOOLS)
    with pytest.raises(ArgumentError, match="none does"):
        talk.add_result("f", "r")
    talk.ask("q")
    talk.answer(tokenizer.encode(calls_text("f", "g", "f"), bos=False))
    for call in ("h", "0", "4", "f"):  # the name is of two calls
        with pytest.raises(ArgumentError, match=r"1 \(f\), 2 \(g\), 3 \(f\)"):
            talk.add_result(call, "r")
    with pytest.raises(ArgumentError, match="marks"):
        talk.add_result("1", f"r{EOS}")
    assert list(talk.open_calls) == [1, 2, 3]
    talk.add_result("1", "r")
    with pytest.raises(ArgumentError, match="open call"):
        talk.add_result("1", "again")
    talk.ask("go on")  # with one result of three
    assert encode_chat(talk.messages, talk.options).endswith(
        f"{USER}<tool_result>r</tool_result>\n\ngo on{ASSISTANT}{END_THINK}"
    )


def test_a_place_goes_before_a_name(tokenizer):
    """Tools whose names are numbers: first a call's place, then a name."""
    talk = Conversation(tokenizer, ChatOptions("chat"), tools=TOOLS)
    talk.ask("q")
    talk.answer(tokenizer.encode(calls_text("2", "1", "7"), bos=False))
    talk.add_result("1", "")
    assert list(talk.open_calls) == [2, 3] and talk.messages[-1]["content"] == ""
    talk.add_result("7", "r")
    assert list(talk.open_calls) == [2]
    talk.add_result("1", "r")  # no open call has this place
    assert not talk.open_calls


def test_replies_that_do_not_encode_are_taken_back(tokenizer):
    talk = Conversation(tokenizer, ChatOptions("chat"), tools=TOOLS)
    before = talk.ask("q")
    for value in ('"\\ud800"', '{"\\udfff": 1}', '[["\\ud83d"]]'):
        lines = f'<{DSML}invoke name="f">\n<{DSML}parameter name="x" string="false">{value}</{DSML}parameter>'
        text = f"<{DSML}tool_calls>\n{lines}\n</{DSML}invoke>\n</{DSML}tool_calls>"
        with pytest.raises(ReplyError, match="'x' has a lone surrogate"):
            talk.answer(tokenizer.encode(text, bos=False))
        assert talk.ask("q") == before
    pair = text.replace(value, '"\\ud83d\\ude00"')
    assert talk.answer(tokenizer.encode(pair, bos=False)).tool_calls[0]["arguments"] == {"x": "\N{GRINNING FACE}"}


@pytest.mark.parametrize("value", ["[" * 990 + "]" * 990, "[" * 100 + "]" * 100, "1e999", "NaN", "[-Infinity]"])
def test_replies_with_values_that_no_prompt_can_hold_are_taken_back(tokenizer, value):
    """Nesting is counted with the object of arguments around it."""
    talk = Conversation(tokenizer, ChatOptions("chat"), tools=TOOLS)
    before = talk.ask("q")
    lines = f'<{DSML}invoke name="f">\n<{DSML}parameter name="x" string="false">{value}</{DSML}parameter>'
    text = f"<{DSML}tool_calls>\n{lines}\n</{DSML}invoke>\n</{DSML}tool_calls>"
    with pytest.raises(ReplyError, match="not kept"):
        talk.answer(tokenizer.encode(text, bos=False))
    assert talk.ask("q") == before


def test_what_has_no_reply_is_taken_back_whole(tokenizer):
    talk = Conversation(tokenizer, ChatOptions("chat"), "S", TOOLS)
    talk.ask("q")
    talk.take_back()
    assert [message["role"] for message in talk.messages] == ["system"]
    talk.ask("q")
    talk.answer(tokenizer.encode(calls_text("f", "g"), bos=False))
    before = list(talk.messages)
    talk.add_result("f", "r")
    talk.add_result("g", "r")
    with pytest.raises(ReplyError, match="not kept"):
        talk.answer(tokenizer.encode(f"<{DSML}tool_calls>", bos=False))
    assert talk.messages == before and list(talk.open_calls) == [1, 2]
    talk.reset()
    assert [message["role"] for message in talk.messages] == ["system"] and not talk.open_calls
