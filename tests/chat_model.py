"""A checkpoint that can talk: the small model of `whole_model`, with a tokenizer that has marks of a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from dsv4lib.model.chat import ASSISTANT, BOS, DSML, ENCODING, END_THINK, EOS, REMINDER, THINK, USER
from dsv4lib.model.tokenizer import TOKENIZER, FastTokenizer

SPECIAL, TEXT = (BOS, EOS, USER, ASSISTANT, REMINDER), (THINK, END_THINK, DSML)
WORDS = """REASONING_EFFORT_PROMPTS = {"low": "", "high": "Think hard. ", "max": "Think harder. "}
TOOLS_TEMPLATE = "Tools: {tool_schemas}"
response_format_template = "Schema: {schema}"
"""


def write_tokenizer(folder: Path, marks: bool = True) -> FastTokenizer:
    """Write a tokenizer.json: a token a byte, a merge, and the marks if wanted; BOS and EOS are always there."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = {"th": 256}
    inner = HFTokenizer(models.BPE({letter: n for n, letter in enumerate(letters)} | merged, [("t", "h")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(mark, special=True) for mark in (SPECIAL if marks else SPECIAL[:2])])
    inner.add_tokens([AddedToken(mark, special=False) for mark in TEXT if marks])
    inner.save(str(folder / TOKENIZER))
    return FastTokenizer(folder / TOKENIZER, 328)


@pytest.fixture(scope="session")
def talking(tmp_path_factory, listed):
    """Folder of the checkpoint, with the texts of its encoding."""
    folder = tmp_path_factory.mktemp("talking") / "model"
    folder.mkdir()
    for file in listed.checkpoint.folder.iterdir():
        (folder / file.name).symlink_to(file)
    write_tokenizer(folder)
    (folder / ENCODING).parent.mkdir()
    (folder / ENCODING).write_text(WORDS)
    return folder
