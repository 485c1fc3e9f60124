"""The compile cache: what compiles, what does not, what is refused, and that nothing breaks it."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsv4lib import env
from dsv4lib.dsl import binary
from dsv4lib.dsl.compile import compile_for
from dsv4lib.errors import ArgumentError
from dsv4lib.folders import CacheError
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.common.compile_cache import CompileCache, Counts
from dsv4lib.ops.fmha.arguments import fake_args
from dsv4lib.ops.fmha.combine import Combine
from tests.ops.common.cache_process import SETTINGS, joined

PROCESS = Path(__file__).with_name("cache_process.py")


@pytest.fixture(scope="module")
def code():
    kernel = Combine(**SETTINGS)
    return kernel, compile_for(kernel, fake_args(kernel))


@pytest.fixture
def compiles(monkeypatch, code):
    """The kernels that were compiled, in order; the compiler runs once in this file, its result is given again."""
    calls = []

    def again(kernel, args, arch):
        calls.append(kernel)
        return code[1]

    monkeypatch.setattr(compile_cache, "compile_for", again)
    return calls


def want(cache, **settings):
    return cache.get(Combine, {**SETTINGS, **settings}, fake_args)


def files(folder, pattern="*.kernel"):
    return sorted(path.name for path in folder.glob(pattern))


def test_a_second_call_compiles_nothing(tmp_path, compiles):
    cache = CompileCache(tmp_path)
    first, second = want(cache), want(cache)
    assert first[1] is second[1] and len(compiles) == 1
    assert cache.counts == Counts(compiled=1, from_memory=1)
    cache.clear()
    assert want(cache)[1] is not first[1] and len(compiles) == 1
    assert cache.counts == Counts(compiled=1, from_memory=1, from_disk=1)


def test_defaults_written_out_are_the_same_kernel(tmp_path, compiles):
    want(CompileCache(tmp_path))
    cache = CompileCache(tmp_path)
    found = [want(cache, dtype="bf16", inverse_rope=False), want(cache), want(cache)]
    assert len(compiles) == 1 and found[0] is found[1] is found[2]
    assert cache.counts == Counts(from_disk=1, from_memory=2), "the same in memory too"


def test_what_comes_back_is_what_was_compiled(code):
    kernel, done = code
    again = binary.from_bytes(binary.to_bytes(done), kernel, fake_args(kernel), runs_here=True)
    for name in ("name", "arch", "ptx", "cubin", "seconds", "registers", "local_bytes", "threads", "smem_bytes"):
        assert getattr(again, name) == getattr(done, name)
    assert again.function.engine is not None and again.function.capi_func is not None  # machine code for a GPU's host
    assert joined(kernel, again) == joined(kernel, done)
    without = binary.from_bytes(binary.to_bytes(done), kernel, fake_args(kernel), runs_here=False)
    assert without.function.engine is None and joined(kernel, without) == joined(kernel, done)


def start(folder):
    command = [sys.executable, str(PROCESS), str(folder)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(env.root())},
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_other_processes_read_it_and_two_at_once_compile_once(tmp_path, code):
    both = [start(tmp_path), start(tmp_path)]
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate(timeout=900)[0]) for process in both]
    assert sorted(answer["compiled"] for answer in answers) == [0, 1]
    assert sorted(answer["from_disk"] for answer in answers) == [0, 1]
    assert {answer["digest"] for answer in answers} == {joined(*code)}
    assert len(files(tmp_path)) == 1 and files(tmp_path, "*.part") == []


def test_threads_compile_once(tmp_path, compiles):
    cache = CompileCache(tmp_path)
    threads = [threading.Thread(target=want, args=(cache,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiles) == 1 and cache.counts == Counts(compiled=1, from_memory=7)


@pytest.mark.parametrize(
    ("file", "is_source"),
    [
        ("dsl/exchange.py", True),
        ("formats/turbo4.py", True),
        ("ops/fmha/softmax.py", True),
        ("ops/fmha/sm90/attend.py", True),
        ("ops/moe_gemm/sm90/wide/load.py", True),
        ("ops/fmha/op.py", False),
        ("ops/linear/sm90/op.py", False),
        ("ops/mhc/bench_mhc_fp8.py", False),
        ("ops/common/splits.py", False),
        ("layers/moe.py", False),
    ],
)
def test_sources_of_kernels_are_in_the_key(monkeypatch, file, is_source):
    """Also those of rooms in an op's room: a stale kernel would otherwise come from the disk after an edit there."""
    path, read = env.root() / "dsv4lib" / file, Path.read_bytes
    assert path.is_file() and env.is_kernel_source(path) is is_source
    before = env.kernel_fingerprint()
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + (b"#" if self == path else b""))
    assert (env.kernel_fingerprint() != before) is is_source


CHANGES = {
    "a setting": lambda m: {"inverse_rope": True},
    "the architecture": lambda m: {"arch": "sm_103a"},
    "a source": lambda m: m.setattr(env, "kernel_fingerprint", lambda: "0" * 12),
    "the options": lambda m: m.setattr(compile_cache, "OPTIONS", "--other"),
    "the DSL": lambda m: m.setattr(compile_cache.metadata, "version", lambda name: "0.0"),
    "the environment": lambda m: m.setenv("CUTE_DSL_SOMETHING", "1"),
    "the place": lambda m: m.setattr(env, "root", lambda: Path("/elsewhere")),
    "the format": lambda m: m.setattr(binary, "MAGIC", b"other\n"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_compiles_again(tmp_path, compiles, monkeypatch, what):
    want(CompileCache(tmp_path))
    changed = CHANGES[what](monkeypatch) or {}
    arch = changed.pop("arch", "sm_100a")
    CompileCache(tmp_path).get(Combine, {**SETTINGS, **changed}, fake_args, arch)
    assert len(compiles) == 2 and len(files(tmp_path)) == 2


def test_a_class_outside_the_lab_counts_with_its_own_file(tmp_path):
    def loaded(text):
        (tmp_path / "mine.py").write_text(f"from dsv4lib.ops.fmha.combine import Combine\n{text}")
        spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["mine"] = module
        spec.loader.exec_module(module)
        return module.Mine

    try:
        keys = {
            compile_cache.key(loaded(f"class Mine(Combine):\n    x = {x}\n"), SETTINGS, "sm_100a") for x in (1, 2, 1)
        }
    finally:
        sys.modules.pop("mine")
    assert len(keys) == 2 and None not in keys


def test_a_class_without_a_file_stays_in_memory(tmp_path, compiles):
    made = type("Mine", (Combine,), {"__module__": "written_in_a_cell"})
    cache = CompileCache(tmp_path / "cache")
    for _ in range(2):
        cache.get(made, SETTINGS, fake_args)
    assert len(compiles) == 1 and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "damage", [lambda d: b"", lambda d: d[:-1], lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: b"x" + d]
)
def test_damage_is_found_and_replaced(tmp_path, compiles, damage):
    want(CompileCache(tmp_path))
    path = tmp_path / files(tmp_path)[0]
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    cache = CompileCache(tmp_path)
    want(cache)
    assert cache.counts == Counts(compiled=1, damaged=1) and path.read_bytes() == whole
    want(CompileCache(tmp_path))
    assert len(compiles) == 2


def test_an_interrupted_write_leaves_nothing(tmp_path, compiles, monkeypatch):
    def stopped(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compile_cache.os, "replace", stopped)
        want(CompileCache(tmp_path))
    assert files(tmp_path) == files(tmp_path, "*.part") == []
    want(CompileCache(tmp_path))
    assert len(files(tmp_path)) == 1


def test_what_a_killed_writer_left_is_removed_in_time(tmp_path, compiles):
    old, young = tmp_path / "old.part", tmp_path / "young.part"
    for path in (old, young):
        path.write_bytes(b"half")
    past = time.time() - compile_cache.STALE_SECONDS - 60
    os.utime(old, (past, past))
    want(CompileCache(tmp_path))
    assert files(tmp_path, "*.part") == ["young.part"]


def test_the_folder_is_made_for_its_user_alone(tmp_path, compiles):
    folder = tmp_path / "a" / "cache"
    cache = CompileCache(folder)
    assert not folder.exists()
    want(cache)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_is_refused_each_time(tmp_path, compiles):
    cache = CompileCache(tmp_path / "cache")
    want(cache)
    tmp_path.chmod(0o777)  # the folder above
    with pytest.raises(CacheError, match=f"others may write .*{tmp_path.name}, mode drwx"):
        want(cache, sink=True)
    assert len(compiles) == 1


def test_memory_alone(compiles):
    cache = CompileCache(None)
    want(cache)
    want(cache)
    assert cache.counts == Counts(compiled=1, from_memory=1)


def test_warm_up_says_how_long_it_took(tmp_path, compiles):
    cache = CompileCache(tmp_path)
    wanted = [(Combine, SETTINGS, fake_args), (Combine, {**SETTINGS, "sink": True}, fake_args)]
    seconds = cache.warm_up(wanted)
    assert list(seconds) == [repr(Combine(**settings)) for _, settings, _ in wanted] and len(compiles) == 2
    assert all(value >= 0 for value in seconds.values())
    cache.warm_up(wanted)
    assert len(compiles) == 2


@pytest.mark.parametrize(
    ("name", "settings", "arch"),
    [
        (r"settings\['head_dim'\]", {"head_dim": [64]}, "sm_100a"),
        (r"settings\['dtype'\]", {"dtype": object()}, "sm_100a"),
        ("settings=", {"heads": 3}, "sm_100a"),
        ("arch=", {}, "sm_10"),
    ],
)
def test_bad_arguments_are_named(tmp_path, compiles, name, settings, arch):
    with pytest.raises(ArgumentError, match=name):
        CompileCache(tmp_path).get(Combine, settings, fake_args, arch)
    assert compiles == [] and files(tmp_path) == []


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    made = compile_cache.default.__wrapped__
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path))
    assert made().folder == tmp_path
    monkeypatch.setenv("DSV4_CACHE", "off")
    assert made().folder is None
