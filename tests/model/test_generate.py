"""The command that continues a text: its bytes, its refusals, its estimate, ctrl-C."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dsv4lib import backends, env
from dsv4lib.errors import ArgumentError, BackendUnavailable, DSV4Error
from dsv4lib.lab import cli
from dsv4lib.layers.dense import target
from dsv4lib.loader.model import key_format, model_bytes, reading_bytes, transformer
from dsv4lib.model.paged import PagedCaches, pool_bytes
from dsv4lib.model.sampler import NoDistribution
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.ops.common import launching
from dsv4lib.pages.full_model import run_case
from dsv4lib.pages.generation import command, serving
from dsv4lib.pages.generation.command import Drawn
from tests.whole_model import listed, peer  # noqa: F401  fixtures

REFERENCE = "--backend", "reference"


def run(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def folder(listed):  # noqa: F811
    return str(listed.checkpoint.folder)


def test_drafts_change_no_byte(folder):
    found = {}
    for drafts in ("0", "3"):
        done = run("generate", "Ab", "--model", folder, "--tokens", "9", *REFERENCE, "--speculate", drafts)
        assert done.exit_code == 0 and done.stdout.startswith("Ab"), done.exception
        assert "every op ran as its" in done.stderr and "to go" in done.stderr
        assert ("drafts: " in done.stderr) == (drafts == "3")
        found[drafts] = done.stdout
    assert found["0"] == found["3"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (["--tokens", "0"], ArgumentError, "tokens=0 .*at least 1"),
        (["--speculate", "8"], ArgumentError, "speculate=8 .*0 to 7"),
        (["--speculate", "-1"], ArgumentError, "speculate=-1 .*0 to 7"),
        (["--backend", "gpu"], ArgumentError, "backend='gpu'"),
        (["--temperature", "-1"], ArgumentError, "temperature"),
        (["--tokens", "2040"], ArgumentError, "9 tokens.*at most 8 fit before the 2040 .*2048 positions"),
        (["--tokens", "9999"], ArgumentError, "9 tokens.*at most 0 fit"),
    ],
)
def test_numbers_are_refused_in_one_line(folder, options, error, text):
    done = run("generate", "12345678", "--model", folder, *options)
    assert done.exit_code and isinstance(done.exception, error)
    with pytest.raises(error, match=text):
        raise done.exception
    assert "\n" not in str(done.exception)


def test_an_empty_text_is_refused(folder):
    assert "text=''" in str(run("generate", "", "--model", folder).exception)


def test_what_is_no_checkpoint_is_refused_in_one_line(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    file = next(copy.glob("*.safetensors"))
    for name, break_it, text in (
        ("none", lambda: None, "no folder"),
        ("copy/config.json", lambda: None, "no folder"),
        ("empty", lambda: (tmp_path / "empty").mkdir(), "no safetensors file"),
        ("copy", lambda: (copy / "tokenizer.json").write_text("{"), "tokenizer.json"),
        ("copy", lambda: os.truncate(file, 1000), file.name),
        ("copy", lambda: (copy / "config.json").write_text("{"), "config.json"),
    ):
        break_it()
        done = run("generate", "Ab", "--model", str(tmp_path / name), *REFERENCE)
        assert isinstance(done.exception, DSV4Error) and text in str(done.exception), done.exception
        assert "\n" not in str(done.exception)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_memory_is_counted_before_it_is_taken(listed, folder, monkeypatch, arch):  # noqa: F811
    """The bytes of weights and caches are those that are then there; one byte less is refused, with both numbers."""
    asked, keys = [], set()

    def counted_pool(*given, **sizes):
        keys.add(sizes["keys"])  # a pool of nano has the same pages for either format
        return pool_bytes(*given, **sizes)

    monkeypatch.setattr(serving, "pool_bytes", counted_pool)
    monkeypatch.setattr(backends, "_emulating", arch)
    if arch == "sm_90a":  # which has no operands for groups of heads as small as those of the other model
        listed = run_case.listed()
    for drafts in (0, 3):
        options = serving.Options(listed.checkpoint.folder, 8, backend="reference", speculate=drafts)
        monkeypatch.setattr(env, "free_memory", lambda: 0)
        with pytest.raises(serving.NotEnoughMemory) as refused:
            serving.require_memory(listed, 512, options, "reference")
        monkeypatch.setattr(env, "free_memory", lambda wanted=refused.value.wanted: wanted)
        serving.require_memory(listed, 512, options, "reference")
        monkeypatch.setattr(env, "free_memory", lambda wanted=refused.value.wanted: wanted - 1)
        with pytest.raises(
            serving.NotEnoughMemory, match=f"{refused.value.wanted:,} bytes.*{refused.value.wanted - 1:,}"
        ):
            serving.require_memory(listed, 512, options, "reference")
        model = transformer(listed, capacity=512, mtp=drafts > 0, backend="reference")
        held = sum(x.numel() * x.element_size() for x in model.buffers())
        counted = model_bytes(listed, 512, drafts > 0, arch)
        assert abs(counted - held) <= 0.01 * held  # rows that GEMMs and scales are padded to, of very small weights
        caches = PagedCaches(model, requests=1, tokens=serving.CHUNK, positions=512, drafts=drafts)
        pool = caches.storage.pages.numel()
        assert refused.value.wanted == counted + pool + reading_bytes(listed, drafts > 0)
        asked.append(refused.value.wanted)
    assert asked[1] > asked[0] and keys == {key_format(arch)}
    monkeypatch.setattr(env, "free_memory", lambda: 10**6)
    monkeypatch.setattr(serving, "transformer", lambda *_, **__: pytest.fail("weights were read"))
    done = run("generate", "Ab", "--model", folder, *REFERENCE)
    assert isinstance(done.exception, serving.NotEnoughMemory) and "caches" in str(done.exception)


@pytest.mark.parametrize("here, arch", [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((8, 0), None)])
def test_a_gpu_runs_the_kernels_that_are_made_for_it(monkeypatch, here, arch):
    """Native on a Blackwell and on a Hopper; refused on another GPU, where auto is the emulator."""

    def native(wanted):
        fits = here == backends.CAPABILITY[wanted]
        return backends.Status("native", fits, f"a GPU of {here}", "another GPU")

    monkeypatch.setattr(backends, "_native", native)
    launching._native_arch.cache_clear()
    try:
        if arch is None:
            assert serving.chosen("auto") == "emulator" and target(None, "auto") == "sm_100a"
            with pytest.raises(BackendUnavailable, match="native cannot run here: a GPU of"):
                serving.chosen("native")
        else:
            assert [serving.chosen(name) for name in ("auto", "native")] == ["native"] * 2
            assert target(None, "native") == arch
    finally:
        launching._native_arch.cache_clear()


def test_free_memory_is_that_of_the_machine():
    line = next(x for x in open("/proc/meminfo").read().splitlines() if x.startswith("MemTotal"))
    assert 0 < env.free_memory() <= int(line.split()[1]) * 1024


@pytest.mark.parametrize("drafts", ["0", "2"])
def test_logits_that_are_no_numbers_end_the_command(folder, monkeypatch, drafts):
    right = Scheduler._draw

    def draw(self, batch, hidden):
        return right(self, batch, hidden * (float("nan") if batch.parts[0].start else 1.0))

    monkeypatch.setattr(Scheduler, "_draw", draw)
    done = run("generate", "Ab", "--model", folder, "--tokens", "4", *REFERENCE, "--speculate", drafts)
    assert isinstance(done.exception, NoDistribution)


def test_the_estimate_counts_the_tokens_of_a_step():
    """12 tokens a second without drafts; with them 2 tokens in steps of 2 s: the first step is not warm."""
    one = [Drawn(0, 0.0), Drawn(1, 5.0), Drawn(2, 9.0), Drawn(3, 9.5)]
    assert command.estimate(one, 23) == "0.5 s a token on this CPU: about 10 s to go"
    more = [Drawn(0, 0.0), Drawn(1, 5.0), Drawn(3, 30.0), Drawn(4, 32.0), Drawn(7, 34.0), Drawn(9, 36.0)]
    assert command.estimate(more, 49) == "2 s a step of 2.0 tokens on this CPU: about 40 s to go"


def test_ctrl_c_leaves_a_line_and_its_exit_code(folder):
    arguments = ["generate", "Ab", "--model", folder, "--tokens", "900", *REFERENCE]
    process = subprocess.Popen(
        [sys.executable, "-m", "dsv4lib.lab.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(env.root()), *sys.path])},
    )  # fmt: skip
    assert process.stdout.read(2) == b"Ab"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and out.endswith(b"\n") and b"Traceback" not in err
