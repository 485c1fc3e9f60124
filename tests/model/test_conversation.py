"""A conversation's prompts: the ids that were run, one after the other, and the text of the encoding."""

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.model.chat import (
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
