"""Write hashes of what `./dsv4` installs. `python -m dsv4lib.lab.lock` after a change of pins.

Reads the pins, finds the files of exactly these versions through pip's own finder (whatever index it is configured for)
and writes requirements.hashes; hashes in requirements-corpus.lock are renewed in place. Listed are the wheels for
CPython 3.11 to 3.14 on Linux x86-64 and aarch64, the source archive where a package has no such wheel. pip's finder is
not public: this works with the pip that requirements.lock pins.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.lab.commands.doctor import normal

PINS, HASHES, CORPUS = "requirements.lock", "requirements.hashes", "requirements-corpus.lock"
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC = 39
CUDA = "# cuda: "  # what only the CUDA build of torch needs
HEADER = """\
# SHA-256 of every file that `./dsv4` may install, for CPython 3.11 to 3.14 on Linux x86-64 and aarch64; pip refuses any
# other (--require-hashes). Written from the pins in requirements.lock by: python -m dsv4lib.lab.lock
# torch is not here: the index's build for x86-64 needs CUDA, CPU builds have the same version and other hashes, and
# which one a machine takes is its owner's choice (DSV4_PIP_ARGS, pip's configuration). It comes first, by version.
# Lines after "# cuda:" are installed if the build of torch asks for CUDA.
"""


def pins(text: str) -> list[str]:
    """Return the pins of a lock, ``name==version`` without extras.

    They have "# cuda: " in front where the lock has it.
    """
    found = []
    for line in text.splitlines():
        match = re.match(rf"({CUDA})?([A-Za-z0-9._-]+)(?:\[[^]]*\])?(==[^\s;]+)", line)
        if match:
            found.append(f"{match[1] or ''}{match[2]}{match[3]}")
    return found


def hashed(lines: Iterable[str], digests: Callable[[str, str], Iterable[str]]) -> str:
    """Write one line for each pin with its hashes. ``digests(name, version)`` gives them.

    Raises:
        DSV4Error: a pin without any file.
    """
    out = []
    for line in lines:
        name, version = line.removeprefix(CUDA).split("==")
        found = sorted(set(digests(name, version)))
        if not found:
            raise DSV4Error(f"{line}: the index has no file of this version")
        out.append(" ".join([line, *(f"--hash=sha256:{digest}" for digest in found)]))
    return "\n".join(out) + "\n"


@contextmanager
def finder() -> Iterator[Callable[[str, str], list[str]]]:
    """Give what finds the SHA-256 of a version's files. It looks in the index of pip's configuration.

    Raises:
        DSV4Error: from what is given, for a version that has wheels, but none for one of the Pythons and machines.
    """
    from pip._internal.commands import create_command
    from pip._internal.models.target_python import TargetPython
    from pip._vendor.packaging.utils import parse_wheel_filename

    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-deps", "x"])
    target = TargetPython()
    machines = {(p, m): set(_tags(TargetPython, p, m)) for p in PYTHONS for m in MACHINES}
    tags = set().union(*machines.values())
    target._valid_tags, target._valid_tags_set = sorted(tags, key=str), tags

    def digests(name: str, version: str) -> list[str]:
        files = [c.link for c in found.find_all_candidates(normal(name)) if str(c.version) == version]
        # a local folder of wheels names no hashes, and is not what others install from
        files = [link for link in files if "sha256" in (link._hashes or {})]
        wheels = [link for link in files if link.is_wheel]
        for (python, machine), allowed in machines.items() if wheels else ():
            if not any(allowed & parse_wheel_filename(link.filename)[3] for link in wheels):
                raise DSV4Error(f"{name}=={version}: no wheel for CPython {python} on {machine}")
        return [link._hashes["sha256"] for link in wheels or files]

    with command.main_context():
        found = command._build_package_finder(options, command.get_default_session(options), target, True)
        yield digests


def _tags(target: Any, python: tuple[int, int], machine: str) -> Iterable[Any]:
    glibc = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, 4, -1)]
    older = [f"manylinux{name}_{machine}" for name in ("2014", "2010", "1")]
    return target([*glibc, *older, f"linux_{machine}"], python, None, "cp").get_sorted_tags()


def main() -> None:
    """Write both files."""
    root = env.root()
    lines = [line for line in pins((root / PINS).read_text()) if not line.startswith("torch==")]
    corpus = (root / CORPUS).read_text()
    comments = "".join(line + "\n" for line in corpus.splitlines() if line.startswith("#"))
    with finder() as digests:
        (root / HASHES).write_text(HEADER + hashed(lines, digests))
        (root / CORPUS).write_text(comments + hashed(pins(corpus), digests))
    for path in (Path(HASHES), Path(CORPUS)):
        print(path, f"{(root / path).stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
