"""Convert text <-> token ids.

Bytes for nano models, a Hugging Face tokenizer.json for the released ones; streaming decode.

No code of a checkpoint is run: ``tokenizer.json`` is data that the `tokenizers` library reads. Only byte-level
vocabularies are taken, DeepSeek's among them, since each of their tokens stands for bytes; so a stream of tokens is a
stream of bytes, and a UTF-8 character that several tokens share is held back until it is whole.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as _HFTokenizer

from dsv4lib.errors import ArgumentError

TOKENIZER = "tokenizer.json"
MAX_BYTES = 1 << 28  # of a tokenizer.json; DeepSeek's has about 8 MB


class Tokenizer(Protocol):
    """What a generation loop needs.

    Attributes:
        vocab: ids are 0 to ``vocab - 1``. bos, eos: ids.
    """

    vocab: int
    bos: int
    eos: int

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a text, after BOS if wanted."""

    def bytes_of(self, token: int) -> bytes:
        """What one id stands for; nothing for a special one."""

    def is_special(self, token: int) -> bool:
        """Whether an id stands for no text."""


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Text of ids, special ones left out; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(tokenizer.bytes_of(token) for token in tokens).decode("utf-8", errors="replace")


class StreamDecoder:
    """Decode tokens as they come. The pieces of text together are `decode` of all tokens.

    No piece ends inside a character. A special token ends what came before it, as the end of the stream does.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain, often nothing."""
        return self._decoder.decode(self.tokenizer.bytes_of(token))

    def finish(self) -> str:
        """End the stream. What was held back is an unfinished character and becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _check_token(token: object, vocab: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
        raise ArgumentError("token", token, f"an integer from 0 to {vocab - 1}")
    return token


class ByteTokenizer:
    """Tokenise bytes: ids 0 to 255, then BOS, EOS and padding.

    The rest of the vocabulary is reserved.

    Args:
        vocab: size of the model's vocabulary, 320 in nano models (a multiple of 64).
    """

    BOS, EOS, PAD = 256, 257, 258

    def __init__(self, vocab: int = 320):
        if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab <= self.PAD:
            raise ArgumentError("vocab", vocab, f"an integer above {self.PAD}")
        self.vocab, self.bos, self.eos = vocab, self.BOS, self.EOS

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a text's UTF-8 bytes; ArgumentError for lone surrogates."""
        return [self.BOS] * bos + list(_utf8(text))

    def bytes_of(self, token: int) -> bytes:
        """The byte, or nothing for ids above 255."""
        return bytes([token]) if _check_token(token, self.vocab) < 256 else b""

    def is_special(self, token: int) -> bool:
        """Whether the id is no byte."""
        return _check_token(token, self.vocab) >= 256


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise ArgumentError("text", type(text).__name__, "a str")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError("text", text[error.start : error.end], "text without lone surrogates") from error


def _byte_letters() -> dict[str, int]:
    """Letter -> byte of byte-level vocabularies: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


class FastTokenizer:
    """A byte-level tokenizer.json.

    Args:
        file: of the tokenizer.
        vocab: of the model; ids of the file beyond it are refused. None: the file's.
        bos, eos: tokens of the sequence's begin and end; by default DeepSeek's.

    Raises:
        ArgumentError: no file, not a tokenizer, not byte-level, larger than the model, or without bos and eos.
    """

    def __init__(
        self,
        file: Path | str,
        vocab: int | None = None,
        bos: str = "<｜begin▁of▁sentence｜>",
        eos: str = "<｜end▁of▁sentence｜>",
    ):
        path = Path(file)
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ArgumentError("file", str(file), f"a tokenizer.json of at most {MAX_BYTES} bytes")
        try:
            text = path.read_text(encoding="utf-8")
            parts = json.loads(text)
            self._inner = _HFTokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ArgumentError("file", str(file), f"a tokenizer.json ({str(error)[:200]})") from error
        if not _is_byte_level(parts.get("decoder")):
            raise ArgumentError("file", parts.get("decoder"), "a byte-level tokenizer, whose tokens stand for bytes")
        added = self._inner.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        letters = _byte_letters()
        self._bytes: dict[int, bytes] = {}
        for token, number in self._inner.get_vocab(with_added_tokens=True).items():
            if number in self._special:
                self._bytes[number] = b""
            elif number in added or not all(letter in letters for letter in token):
                self._bytes[number] = token.encode("utf-8")
            else:
                self._bytes[number] = bytes(letters[letter] for letter in token)
        size = max(self._bytes) + 1
        self.vocab = size if vocab is None else vocab
        if size > self.vocab:
            raise ArgumentError("file", f"{size} tokens", f"at most the model's vocab={self.vocab}")
        self.bos, self.eos = (self.id_of(token) for token in (bos, eos))

    def id_of(self, token: str) -> int:
        """Id of one token by its text; ArgumentError if there is none."""
        found = self._inner.token_to_id(token)
        if found is None:
            raise ArgumentError("token", token, "a token of the vocabulary")
        return found

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Encode a text as token ids.

        Special tokens written out in it are recognised, so never pass a user's text unchecked.
        """
        _utf8(text)
        return [self.bos] * bos + self._inner.encode(text, add_special_tokens=False).ids

    def bytes_of(self, token: int) -> bytes:
        """Bytes of an id; nothing for special and reserved ones."""
        return self._bytes.get(_check_token(token, self.vocab), b"")

    def is_special(self, token: int) -> bool:
        """Whether the id is marked special in the file, or is not in it."""
        return _check_token(token, self.vocab) in self._special or token not in self._bytes


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return isinstance(inner, list) and any(isinstance(d, dict) and d.get("type") == "ByteLevel" for d in inner)


def tokenizer_of(folder: Path | str, vocab: int) -> Tokenizer:
    """Return a checkpoint's tokenizer, its tokenizer.json.

    Bytes where it has none and the vocabulary is a nano model's.

    Raises:
        ArgumentError: no tokenizer.json beside a vocabulary above 1,024.
    """
    file = Path(folder) / TOKENIZER
    if file.is_file():
        return FastTokenizer(file, vocab)
    if vocab > 1024:
        raise ArgumentError("folder", str(folder), f"a folder with {TOKENIZER}, for a vocabulary of {vocab}")
    return ByteTokenizer(vocab)


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Decode each token by itself, for tables of log-probabilities.

    U+FFFD stands where a token ends inside a character.
    """
    return [tokenizer.bytes_of(token).decode("utf-8", errors="replace") for token in tokens]
