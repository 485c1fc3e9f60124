"""Nothing private leaves in a report or record: home and temporary folders, host names, secrets."""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL)", re.I)
SECRET_TEXT = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}|xox[abp]-[A-Za-z0-9-]{10,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
HOME = re.compile(r"(?:/home/|/Users/)[^/\s\"'<>:,;)]+|(?<![\w/.])/root(?=/|\b)")


@functools.cache
def _replacements(root: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """What to replace, longest path first, so that a workspace inside a home folder stays readable."""
    paths = {
        root: ".",
        os.path.realpath(root): ".",
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        tempfile.gettempdir(): "<temporary>",
        str(Path.home()): "~",
    }
    pairs = []
    for path in sorted(paths, key=len, reverse=True):
        if len(path) > 1:
            pairs.append((re.compile(r"(?<![\w.-])" + re.escape(path) + r"(?![\w.-])"), paths[path]))
    host = socket.gethostname()
    # A host called "main" cannot be told from the word; distinctive names can.
    if len(host) >= 8 or (len(host) >= 4 and re.search(r"[\d.-]", host)):
        pairs.append((re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])"), "<host>"))
    return tuple(pairs)


def scrub(text: str, root: Path) -> str:
    """``text`` without home paths, host names and anything that looks like a secret."""
    for pattern, stand_in in _replacements(str(root)):
        text = pattern.sub(stand_in, text)
    text = HOME.sub("~", text)
    text = SECRET_TEXT.sub("<secret>", text)
    for name, value in os.environ.items():
        if len(value) >= 8 and SECRET_NAME.search(name) and value in text:
            text = text.replace(value, "<secret>")
    return text
