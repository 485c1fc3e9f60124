"""Tokenizers: bytes and byte-level files against the library, streams that never split a character."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from dsv4lib.errors import ArgumentError
from dsv4lib.model.tokenizer import ByteTokenizer, FastTokenizer, StreamDecoder, decode, token_texts, tokenizer_of

TEXTS = [
    "",
    "plain text, two  spaces\n\ttab",
    "Größe – 京都の夜 😀👨‍👩‍👧",
    "\u200d\ufe0f",
    "a\x00\x7f\x80ÿ",
    "\ufffd already",
    "<think>so</think> it is",
]
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A byte-level BPE with 292 tokens, so that most characters of the texts are several tokens."""
    inner = HFTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=[BOS, EOS], show_progress=False
    )
    inner.train_from_iterator(["the state of the union is strong, 京都の夜"] * 20, trainer)
    inner.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return path


@pytest.fixture(params=["bytes", "fast"])
def tokenizer(request, file):
    return ByteTokenizer() if request.param == "bytes" else FastTokenizer(file)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens[0] == tokenizer.bos and tokenizer.is_special(tokens[0])
    assert tokenizer.encode(text, bos=False) == tokens[1:]
    assert decode(tokenizer, [*tokens, tokenizer.eos]) == text


def test_the_fast_one_is_the_library(file):
    ours, library = FastTokenizer(file), HFTokenizer.from_file(str(file))
    for text in TEXTS:
        tokens = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, bos=False) == tokens
        assert decode(ours, tokens) == library.decode(tokens, skip_special_tokens=True)
    assert ours.vocab == library.get_vocab_size() and ours.bos == library.token_to_id(BOS)
    some = random.Random(0)
    for _ in range(200):  # tokens in no order: broken characters, too
        tokens = [some.randrange(2, ours.vocab) for _ in range(some.randrange(12))]
        assert decode(ours, tokens) == library.decode(tokens, skip_special_tokens=True)


def test_streams_never_split_a_character(tokenizer):
    for text in TEXTS:
        stream, pieces = StreamDecoder(tokenizer), []
        for token in tokenizer.encode(text):
            pieces.append(stream.push(token))
            assert text.startswith("".join(pieces))  # a split character would show as U+FFFD
        assert "".join(pieces) == text and stream.finish() == ""
    some = random.Random(1)
    for _ in range(200):
        tokens = [some.randrange(tokenizer.vocab) for _ in range(some.randrange(20))]
        stream = StreamDecoder(tokenizer)
        pieces = [stream.push(token) for token in tokens]
        assert "".join(pieces) + stream.finish() == decode(tokenizer, tokens)


def test_an_unfinished_character_is_held_and_then_replaced():
    stream = StreamDecoder(ByteTokenizer())
    assert [stream.push(byte) for byte in "é".encode()] == ["", "é"]
    assert stream.push(0xE4) == "" and stream.push(0xBA) == "" and stream.finish() == "\ufffd"
    assert token_texts(ByteTokenizer(), [65, 0xC3, 256]) == ["A", "\ufffd", ""]


def test_a_checkpoint_folder_decides(file, tmp_path):
    assert isinstance(tokenizer_of(file.parent, 512), FastTokenizer)
    assert isinstance(tokenizer_of(tmp_path, 320), ByteTokenizer)
    with pytest.raises(ArgumentError, match=r"tokenizer\.json"):
        tokenizer_of(tmp_path, 129280)
    assert FastTokenizer(file, 512).is_special(511) and FastTokenizer(file, 512).bytes_of(511) == b""


def test_bad_input_is_named(file, tmp_path):
    for bad in (320, -1, True, "a"):
        with pytest.raises(ArgumentError, match="token"):
            ByteTokenizer().bytes_of(bad)
    with pytest.raises(ArgumentError, match="vocab"):
        ByteTokenizer(258)
    with pytest.raises(ArgumentError, match="surrogates"):
        ByteTokenizer().encode("a\ud800")
    with pytest.raises(ArgumentError, match="file"):
        FastTokenizer(tmp_path / "none.json")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ArgumentError, match="file"):
        FastTokenizer(tmp_path / "a.json")
    with pytest.raises(ArgumentError, match="vocab=280"):
        FastTokenizer(file, 280)
    with pytest.raises(ArgumentError, match="token"):
        FastTokenizer(file, bos="<s>")
    parts = json.loads(file.read_text())
    parts["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "b.json").write_text(json.dumps(parts))
    with pytest.raises(ArgumentError, match="byte-level"):
        FastTokenizer(tmp_path / "b.json")
