"""Keep private things out of reports, records, saved notebooks. Home folders, host names, addresses, secrets.

What is replaced: this workspace's folder (by "."), Python's, the temporary and every home folder; this machine's name;
IP addresses; forms of well-known tokens, private keys, JSON web tokens, user names and passwords in URLs; values of
environment variables whose name speaks of a secret.

Four numbers with dots are an address, a version (`nvidia-curand 10.4.0.35`) or a section (PTX ISA 9.7.14.16). Hidden
are private and link-local ones, those with a number above 99, and what stands after "://" or "@" or before a port.
Left alone is what cannot be an address (a number above 255), names the machine itself (127.*, 0.0.0.0) or follows `==`,
`<=`, `>=`, `~=`, `!=`, `-`, `_`, `v`, the word "version" or the name of an NVIDIA package. An IPv6 address is hidden if
it is a global or local one of more than two groups or with a letter, which slices (`[2048::16]`) are not.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|(?:^|_)KEY(?:$|_|S$)", re.I)
SECRET_TEXT = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|gl[a-z]{2,4}-[A-Za-z0-9_-]{20,}"  # glpat-, gldt-, glrt-, ...
    r"|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{40,}"
    r"|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|A[KS]IA[0-9A-Z]{16}"
    r"|xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"  # a JSON web token
    r")"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)"
    r"|(?<=://)(?!git@)[^\s/@\"'<>]+(?=@)"
    r"|(?<=[?&]token=)[^\s&\"'<>]+|(?<=Bearer )[A-Za-z0-9._~+/=-]{16,}",
    re.S,
)
HOME = re.compile(
    r"(?:/home/|/Users/)[^/\s\"'<>:,;)\\]+|(?<![\w/.])/root(?=/|\b)|[A-Za-z]:\\{1,2}Users\\{1,2}[^\\\s\"'<>:,;)]+"
)
IPV4 = re.compile(
    r"(?P<version>==|[<>~!]=|[-_]|\bv|\bversion[ :=]*|\bnvidia-[\w-]+[ :=]+)?(?P<net>://|@)?(?<![\w.])"
    r"(?P<quad>(?:\d{1,3}\.){3}\d{1,3})(?![\w]|\.\d)(?P<port>(?=:\d))?",
    re.I,
)
IPV6 = re.compile(r"(?<![\w:.])(?:[23][0-9a-f]{3}|f[c-f][0-9a-f]{2}):[0-9a-f:]*[0-9a-f:](?![\w:])", re.I)
_INSIDE = ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16")
INSIDE = [ipaddress.IPv4Network(network) for network in _INSIDE]
ANSI = re.compile(r"\x1b\[[0-9;]*m")
BORDER = "\ue000"  # stands after each colour code, whose last letter else would belong to the next word
PICTURES = ("image/png", "image/jpeg")  # base64


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
    for name in (host, host.partition(".")[0]):
        # A host called "main" looks like the word; distinctive names do not.
        if len(name) >= 8 or (len(name) >= 4 and re.search(r"[\d.-]", name)):
            pairs.append((re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])"), "<host>"))
    return tuple(pairs)


def scrub(text: str, root: Path) -> str:
    """Return ``text`` without what the module lists. Halves of surrogate pairs, which no file can hold, go too."""
    text = ANSI.sub(lambda found: found[0] + BORDER, text.encode(errors="replace").decode().replace(BORDER, "?"))
    for name, value in os.environ.items():
        if len(value) >= 8 and SECRET_NAME.search(name) and not name.startswith("DSV4_") and value in text:
            text = text.replace(value, "<secret>")
    text = SECRET_TEXT.sub("<secret>", text)
    for pattern, stand_in in _replacements(str(root)):
        text = pattern.sub(stand_in, text)
    text = HOME.sub("~", text)
    text = IPV4.sub(_address, text)
    text = IPV6.sub(lambda found: "<address>" if _is_ipv6(found[0]) else found[0], text)
    return text.replace(BORDER, "")


def scrub_all(value: Any, clean: Callable[[str], str]) -> Any:
    """Clean every text and key of ``value`` (of a notebook: dicts, lists, texts). Pictures in base64 stay."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(k)): v if k in PICTURES else scrub_all(v, clean) for k, v in value.items()}
    return [scrub_all(one, clean) for one in value] if isinstance(value, list | tuple) else value


def _address(found: re.Match[str]) -> str:
    parts = [int(part) for part in found["quad"].split(".")]
    if found["version"] or max(parts) > 255 or parts[0] == 127 or not any(parts):
        return found[0]
    inside = any(ipaddress.IPv4Address(bytes(parts)) in network for network in INSIDE)
    if inside or max(parts) > 99 or found["net"] or found["port"] is not None:
        return f"{found['net'] or ''}<address>"
    return found[0]


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return sum(map(bool, text.split(":"))) > 2 or bool(re.search(r"[a-f]", text, re.I))
