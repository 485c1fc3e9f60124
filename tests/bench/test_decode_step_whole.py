"""Whole layers in a decode step's time: random models that run, arithmetic of layers, what overlapping kernels take."""

import pytest

from dsv4lib import backends
from dsv4lib.bench.decode_step import whole
from dsv4lib.bench.ops.timing import Work
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.errors import ArgumentError
from dsv4lib.loader import names
from tests.model.test_native_sm90 import ARCH, CONFIG


def test_drawn_tensors_are_those_of_a_checkpoint():
    """Every name, in types and shapes that the loader takes; numbers are finite."""
    drawn = whole.Drawn(CONFIG, "mxfp4", "cpu")
    assert set(drawn) == set(names.listing(CONFIG, "mxfp4")) and "layers.9.attn.wkv.weight" not in drawn
    for name, spec in drawn.specs.items():
        if ".experts." in name and not name.startswith("layers.0.ffn.experts.0."):
            continue
        found = drawn.get(name, spec.dtypes, spec.shape)
        assert found.dtype in spec.dtypes and found.shape == spec.shape
        assert drawn.entry(name).nbytes == found.numel() * found.element_size()
        if found.is_floating_point():
            assert found.float().isfinite().all()


def test_a_step_of_such_a_model_runs():
    """Two requests near the end of their context, by the oracles of a Hopper's ops."""
    with backends.emulating(ARCH):
        model = whole.model_of(CONFIG, 2, 256, "cpu", "reference")
        logits = whole.step_of(model, 2, 256)()
    assert logits.shape == (2, CONFIG.vocab) and logits.isfinite().all() and float(logits.std()) > 0.01


def test_models_of_few_layers():
    kinds = whole.cut(FLASH, 2).layer_kinds
    assert kinds == FLASH.layer_kinds[:6] and kinds[2:4] == (LayerKind.CSA, LayerKind.HCA)
    with pytest.raises(ArgumentError, match="pairs"):
        whole.cut(CONFIG, 3)


def test_the_time_of_all_layers():
    """2 SWA, 21 CSA and 20 HCA layers: 20.5 pairs."""
    found = whole.Timed(1, 32768, (1, 3), (500.0, 900.0), {})
    assert found.pair_us == 200.0 and found.step_us == 900.0 + 17.5 * 200.0


def test_overlapping_kernels_share_no_time():
    works = [Work("a", 0, 3000), Work("b", 1000, 5000), Work("a", 6000, 9000), Work("hidden", 6500, 8000)]
    found = whole.advances(works)
    assert sum(found.values()) == 9.0 and found == {"hidden": 3.0, "a": 4.0, "b": 2.0}


@pytest.mark.parametrize("arguments", [["--batch", "3"], ["--pairs", "3,1"], ["--pairs", "2"], ["--context", "5"]])
def test_bad_arguments(arguments, capsys):
    assert whole.main(arguments) == 2 and capsys.readouterr().err.strip()


def test_files(tmp_path, monkeypatch):
    monkeypatch.setattr(whole.harness, "facts", lambda command: {"run": "now"})
    whole.write([whole.Timed(8, 4096, (1, 2), (10.0, 15.0), {})], tmp_path)
    lines = (tmp_path / whole.FILE).read_text().splitlines()
    assert lines[1] == "8,4096,1 and 2,10.0,15.0,5.0,107.5,now"
    monkeypatch.setattr(whole.harness, "facts", lambda command: {"run": "later"})
    whole.write([whole.Timed(1, 32768, (1, 2), (10.0, 15.0), {})], tmp_path)  # another context: the first stays
    whole.write([whole.Timed(8, 4096, (1, 2), (10.0, 16.0), {})], tmp_path)
    after = (tmp_path / whole.FILE).read_text().splitlines()
    assert after[0] == lines[0] and [line[:7] for line in after[1:]] == ["8,4096,", "1,32768"]
    assert all(line.endswith(",later") for line in after[1:])


def test_names_of_kernels():
    name = "kernel_cutlass_kernel_TiledMoeGemmw4a8_8_512_bf16_alpha_Sourceswtensorptri8"
    assert whole.short(name) == "TiledMoeGemmw4a8_8_512_bf16_alpha" and whole.short("copy") == "copy"
