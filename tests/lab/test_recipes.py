"""The recipes for nightly runs: each is executed as it stands, and its command lines make one whole night."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4lib import env
from dsv4lib.lab import cli
from dsv4lib.lab.stage import Stage

yaml = pytest.importorskip("yaml")

TEXT = (env.root() / "dsv4lib" / "lab" / "nightly" / "README.md").read_text().partition("## Recipes")[2]
BLOCKS = dict(re.findall(r"^\*\*(\w[\w ]*)\.\*\*(.*?)(?=^\*\*|\Z)", TEXT, re.S | re.M))
FAKE = """#!/bin/sh
printf '%s\\n' "$@" > "$TOLD/$(date +%s%N)"
"""
SBATCH = """#!/bin/sh
echo 42
[ "$1" = --parsable ] || { shift; shift; exec sh -c "$1"; }
"""


def fences(name: str, language: str) -> list[str]:
    """Code blocks of a language in the recipe ``name``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", BLOCKS[name], re.S | re.M)


class Shell:
    """A home with a clone whose ``dsv4`` only writes down how it was called."""

    def __init__(self, home: Path):
        self.home, self.clone, self.told = home, home / "dsv4", home / "told"
        (self.clone / ".git").mkdir(parents=True)
        self.told.mkdir()
        for path, text in ((self.clone / "dsv4", FAKE), (home / "bin" / "sbatch", SBATCH), (home / "bin" / "git", "")):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text or "#!/bin/sh\n")
            path.chmod(0o755)

    def run(self, *command: str, **variables: str) -> None:
        """Execute a command in the clone."""
        fixed = {"HOME": str(self.home), "PATH": f"{self.home}/bin:/usr/bin:/bin", "TOLD": str(self.told)}
        done = subprocess.run(
            command, cwd=self.clone, env={**fixed, **variables}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 and not done.stderr, done.stderr

    def calls(self) -> list[list[str]]:
        """Arguments of each call, in order."""
        return [path.read_text().splitlines() for path in sorted(self.told.iterdir())]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A shell in a new home."""
    return Shell(tmp_path / "home")


@pytest.fixture
def nights(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str]], int]:
    """nights(arguments) -> exit code of `dsv4` with them, in a workspace of five small stages."""
    for name in ("one", "two", "three", "four", "five"):
        make(name)
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def call(arguments: list[str]) -> int:
        monkeypatch.setattr("sys.argv", ["dsv4", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0)

    return call


def gathered(runs: Path) -> dict[str, Any]:
    """Summary of the newest run."""
    (*_, folder) = sorted(runs.glob("*Z-????"))
    return json.loads((folder / "report" / "summary.json").read_text())


def test_every_recipe_is_here() -> None:
    assert list(BLOCKS) == ["cron", "systemd", "GitHub Actions", "Slurm", "Kubernetes"]


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock (util-linux)")
def test_cron(shell: Shell, nights: Callable[[list[str]], int]) -> None:
    (line,) = fences("cron", "cron")[0].splitlines()
    when, command = line.split(None, 5)[:5], line.split(None, 5)[5]
    assert all(re.fullmatch(r"\d+|\*", part) for part in when)
    assert "%" not in command, "cron would end the command there"
    shell.run("/bin/sh", "-c", command)
    (arguments,) = shell.calls()
    assert nights(arguments) == 0 and nights(arguments) == 0  # a finished night is not gone on with: a new one starts


def systemd_units() -> dict[str, str]:
    """Texts of the unit files by name."""
    parts = re.split(r"^# \S*/(dsv4-nightly\.\w+)\n", fences("systemd", "ini")[0], flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_systemd(shell: Shell, nights: Callable[[list[str]], int]) -> None:
    units = systemd_units()
    assert set(units) == {"dsv4-nightly.service", "dsv4-nightly.timer"}
    service = configparser.ConfigParser()
    service.read_string(units["dsv4-nightly.service"].replace("%h", str(shell.home)))
    assert Path(service["Service"]["WorkingDirectory"]) == shell.clone
    shell.run(*shlex.split(service["Service"]["ExecStart"]))
    assert [nights(arguments) for arguments in shell.calls()] == [0]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_units(shell: Shell) -> None:
    """It has nothing to say of them; units of the machine are its own."""
    with tempfile.TemporaryDirectory(prefix="d") as runtime:  # short: sockets of the machine's units lie in it
        for name, text in systemd_units().items():
            (shell.home / name).write_text(text)
            command = ("systemd-analyze", "--user", "verify", str(shell.home / name))
            given = {**os.environ, "HOME": str(shell.home), "XDG_RUNTIME_DIR": runtime}
            done = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
            assert done.returncode == 0 and "dsv4-nightly" not in done.stderr, done.stderr


def test_github_actions(shell: Shell, nights: Callable[[list[str]], int], tmp_path: Path) -> None:
    workflow = yaml.safe_load(fences("GitHub Actions", "yaml")[0])
    shard, night = workflow["jobs"]["shard"], workflow["jobs"]["night"]
    assert night["needs"] == "shard"
    numbers = shard["strategy"]["matrix"]["shard"]
    for number in [*numbers, 0]:
        (line,) = (step["run"] for step in (shard if number else night)["steps"] if "run" in step)
        for name, value in (("matrix.shard", number), ("github.run_id", 77), ("github.run_attempt", 2)):
            line = line.replace("${{ " + name + " }}", str(value))
        assert "${{" not in line
        shell.run("bash", "-ec", line)
    *parts, last = shell.calls()
    for number, arguments in enumerate(parts):
        brought = tmp_path / "shards" / f"shard-{number + 1}"  # where actions/download-artifact puts data/runs
        assert nights(arguments) == 0
        brought.parent.mkdir(exist_ok=True)
        (tmp_path / "data" / "runs").rename(brought)
    assert nights(last) == 0
    made = gathered(tmp_path / "data" / "runs")
    assert len(made["parts"]) == len(numbers) == 4 and made["whole"] and made["planned"] == 5


def test_slurm(shell: Shell, nights: Callable[[list[str]], int], tmp_path: Path) -> None:
    (script,) = fences("Slurm", "bash")
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", script).groups())  # type: ignore[union-attr]
    (shell.clone / "night.sh").write_text(script)
    for number in range(first, last + 1):
        told = {"SLURM_ARRAY_TASK_ID": number, "SLURM_ARRAY_TASK_COUNT": 1 + last - first, "SLURM_ARRAY_JOB_ID": 42}
        shell.run("bash", "night.sh", **{name: str(value) for name, value in told.items()})
    lines = [line.removeprefix("$ ") for line in fences("Slurm", "console")[0].splitlines()]
    shell.run("bash", "-ec", "\n".join(lines))
    assert [nights(arguments) for arguments in shell.calls()] == [0] * 9
    made = gathered(tmp_path / "data" / "runs")
    assert len(made["parts"]) == 8 and made["whole"] and made["night"] == "42" and made["set"] == "b200"


def test_kubernetes(shell: Shell, nights: Callable[[list[str]], int], tmp_path: Path) -> None:
    job = yaml.safe_load(fences("Kubernetes", "yaml")[0])
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in spec["template"]["spec"]["volumes"]}
    for index in range(spec["completions"]):
        shell.run(*container["command"], JOB_COMPLETION_INDEX=str(index))
    runs = tmp_path / "volume"
    for arguments in shell.calls():
        where = arguments.index("--out") + 1
        assert arguments[where] in {one["mountPath"] for one in container["volumeMounts"]}
        assert nights([*arguments[:where], str(runs), *arguments[where + 1 :]]) == 0
    assert nights(["nightly", "--gather", str(runs), "--night", "night-1", "--out", str(runs)]) == 0
    assert len(gathered(runs)["parts"]) == 4 and gathered(runs)["whole"]
