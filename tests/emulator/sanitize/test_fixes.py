"""Fixes in the language of the source: every kind has one or none on purpose, and every name exists in its language."""

from __future__ import annotations

import importlib
import operator
import re
from dataclasses import fields

import pytest

from dsv4lib import nvrtc
from dsv4lib.emulator.checks import KINDS, Hazard
from dsv4lib.emulator.errors import Place
from dsv4lib.emulator.sanitize.findings import group
from dsv4lib.emulator.sanitize.fixes import FIXES, LANGUAGES, UNNAMED, Names, language_of
from dsv4lib.errors import BackendUnavailable

SOURCES = {
    "cuda": ("k.cu", "__global__ void k() {}\n"),
    "cute": ("cute_kernel.py", "import cutlass\nimport cutlass.cute as cute  # beside triton in other files\nnop\n"),
    "triton": ("triton_kernel.py", "import triton\nimport triton.language as tl\nnop\n"),
    "gluon": ("gluon_kernel.py", "import triton\nfrom triton.experimental import gluon\nnop\n"),
}


def fix_of(kind, folder, language):
    """The fix of a report on a source in a language, "" for PTX without one."""
    file = ""
    if language:
        name, text = SOURCES[language]
        (folder / name).write_text(text)
        file = f"{folder / name}:3"
    (one,) = group([Hazard(kind, "seen", Place("k", 3, "nop", file))])
    return one.fix


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_report_names_the_fix_in_the_language_of_its_source(tmp_path, kind, language):
    plain, fix = KINDS[kind].fix, fix_of(kind, tmp_path, language)
    name = getattr(FIXES.get(kind, Names()), language)
    assert fix == (f"{plain} (here: {name})" if name else plain)
    assert fix_of(kind, tmp_path, "") == plain


def test_every_kind_is_named_or_has_no_name_on_purpose():
    assert set(FIXES) | UNNAMED == set(KINDS) and not set(FIXES) & UNNAMED
    assert tuple(sorted(field.name for field in fields(Names))) == LANGUAGES
    for kind, names in FIXES.items():
        assert any(getattr(names, language) for language in LANGUAGES), kind


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_is_told_by_name_and_imports(language):
    name, text = SOURCES[language]
    assert language_of(name, text.splitlines()) == language


def test_other_files_have_no_language():
    assert language_of("k.ptx", ["import triton"]) == language_of("", []) == ""
    assert language_of("k.py", ["# import triton", "x = 'gluon'"]) == ""
    assert language_of("k.py", ["import numpy as np  # not cutlass", "from numba import cuda"]) == ""
    assert language_of("k.cuh", ["import triton"]) == "cuda"
    assert language_of("k.py", ["    from triton import language as tl"]) == "triton"
    assert language_of("k.py", ["import os, cutlass.cute as cute"]) == "cute"


def test_an_import_over_several_lines_is_read():
    assert language_of("k.py", ["from triton.experimental import (", "    gluon,  # the language", ")"]) == "gluon"


def named_in(language):
    return {kind: getattr(one, language) for kind, one in FIXES.items() if getattr(one, language)}


def test_names_of_the_cute_dsl_exist():
    cute, pipeline = pytest.importorskip("cutlass.cute"), pytest.importorskip("cutlass.pipeline")
    checked = 0
    for kind, text in named_in("cute").items():
        for name in re.findall(r"\bcute\.([a-zA-Z_][\w.]*\w)", text):
            operator.attrgetter(name)(cute)
            checked += 1
        for name in re.findall(r"\b(consumer_\w+)\(", text):
            assert hasattr(pipeline.PipelineTmaAsync, name), kind
    assert checked >= 30


def test_names_of_triton_and_gluon_exist():
    pytest.importorskip("triton")
    tl = importlib.import_module("triton.language")
    gl = importlib.import_module("triton.experimental.gluon.language")
    importlib.import_module("triton.language.extra.cuda")
    parts = [importlib.import_module(f"{gl.__name__}.nvidia.{name}") for name in ("ampere", "hopper", "blackwell")]
    for text in (*named_in("triton").values(), *named_in("gluon").values()):
        for name in re.findall(r"\btl\.([\w.]*\w)", text):
            operator.attrgetter(name)(tl)
        for name in re.findall(r"\bgl\.([\w.]*\w)", text):
            operator.attrgetter(name)(gl)
        for name in re.findall(
            r"(?<![\w.])((?:mbarrier|tma|async_copy|cluster|clc)\.\w+|\w+_async_shared|tcgen05_\w+|\w+_mma_wait)", text
        ):
            assert any(_has(part, name) for part in parts), name


def _has(module, name):
    try:
        operator.attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def test_names_of_libcu_exist():
    """cuda::ptx functions in the headers that NVRTC's wheels bring."""
    try:
        _, toolkit = nvrtc.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    folder = None if toolkit is None else toolkit / "include" / "cccl" / "cuda" / "__ptx" / "instructions"
    if folder is None or not folder.is_dir():
        pytest.skip("NVRTC is there without the headers of libcu++ (pip install nvidia-cuda-cccl)")
    check_libcu("\n".join(path.read_text() for path in folder.rglob("*.h")))


def check_libcu(text):
    names = {name for one in named_in("cuda").values() for name in re.findall(r"\bcuda::ptx::([a-z]\w+)", one)}
    names -= {"space_shared", "space_global", "n32_t"}
    assert len(names) >= 15 and [name for name in sorted(names) if not re.search(rf"\b{name}\(", text)] == []
