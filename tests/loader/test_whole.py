"""Whole checkpoints: names and bytes of the released ones, values, faults, conversions and interruptions."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dsv4lib.config import FLASH, PRO, TINY
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, mxfp4, nvfp4, weight_modes
from dsv4lib.lab import cli
from dsv4lib.loader import experts, moe, names, operands
from dsv4lib.loader.checkpoint import INDEX, Checkpoint
from dsv4lib.loader.convert import convert, save
from dsv4lib.loader.safetensors import CheckpointError
from dsv4lib.loader.settings import read_config, write_config
from dsv4lib.loader.whole import Listed, TensorFaults, load_into
from dsv4lib.loader.writer import Writer
from dsv4lib.reference.model import ReferenceModel

# Small, and no size is a multiple of the 128 tile: 3 layers of all kinds, one by hash.
SMALL = replace(
    TINY, n_layers=3, compress_ratios=(0, 4, 8, 0), n_hash_layers=1, n_experts=4, expert_width=96, hidden=160
)
GIB = 2**30


@pytest.fixture(scope="module")
def model():
    found = ReferenceModel(SMALL).randomize_(7)
    with torch.no_grad():  # gate and up of one expert have other sizes, and a block of 32 is small
        found.layers[1].ffn.experts[2].w3.weight.mul_(40)
        found.layers[1].ffn.experts[2].w1.weight[3, 32:64].mul_(1e-2)
    return found


@pytest.fixture(scope="module")
def released(model, tmp_path_factory):
    """The model in DeepSeek's format."""
    folder = tmp_path_factory.mktemp("released") / "mxfp4"
    save(model.state_dict(), SMALL, folder, "mxfp4")
    return folder


@pytest.fixture(scope="module")
def nvidia(released):
    convert(released, released.parent / "nvfp4", "nvfp4", shard_bytes=300_000)
    return released.parent / "nvfp4"


def loaded(folder):
    listed = Listed.of(Checkpoint(folder))
    found = ReferenceModel(listed.config)
    load_into(found, listed)
    return found


def logits(model):
    tokens = torch.arange(40)[None] * 7 % SMALL.vocab
    capture = {}
    with torch.no_grad():
        return model(tokens, capture=capture, mtp=tokens.roll(-1, 1)), capture["mtp_logits"]


def rounded(model):
    """The model's state after the released formats, by the codecs alone."""
    out = {}
    for name, value in model.state_dict().items():
        linear = any(part in name for part in ("attn.w", "indexer.wq_b", "shared_experts", "_proj.weight"))
        linear &= "weights_proj" not in name and "norm" not in name
        if ".ffn.experts." in name:
            out[name] = mxfp4.dequantize(mxfp4.quantize(value))
        elif linear:
            out[name] = fp8_block.dequantize(fp8_block.quantize(value))
        elif name.endswith(("ape", "attn_sink", "bias", "tid2eid")) or "hc_" in name:
            out[name] = value
        else:
            out[name] = value.to(torch.bfloat16).float()
    return out


@pytest.mark.parametrize(
    "config, tensors, gib",
    [(FLASH, None, 148.66), (PRO, 145_116, None)],
    ids=["flash", "pro"],
)
def test_listing_is_the_published_checkpoint(config, tensors, gib):
    """Published: Flash is 148.66 GiB of files (as engines log it), Pro has 145,116 tensors."""
    listing = names.listing(config, "mxfp4")
    size = sum(spec.nbytes for spec in listing.values())
    header = sum(len(name) + 75 for name in listing)  # about what the JSON of 46 headers takes
    print(f"{len(listing)} tensors, {size} bytes, {size / GIB:.2f} GiB")
    assert tensors in (None, len(listing))
    if gib:
        assert abs((size + header) / GIB - gib) < 0.01
    per_expert = config.n_layers * config.n_experts * 3
    assert len(names.listing(config, "nvfp4")) == len(listing) + 2 * per_expert
    counted = [weight for weight in names.weights(config) if weight.role != "table"]
    total = sum(torch.Size(weight.shape).numel() for weight in counted)
    assert total == config.total_params + config.mtp_params


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_names_and_shapes_are_the_reference_models(config):
    """The full schedule and all real sizes on the meta device, eight experts a layer."""
    config = replace(config, n_experts=8)
    with torch.device("meta"):
        state = ReferenceModel(config).state_dict()
    wanted = {weight.name: weight.shape for weight in names.weights(config)}
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == wanted
    for weight in names.weights(config):
        assert (weight.role == "table") == (state[weight.name].dtype == torch.int64)


def test_files_are_what_the_library_reads(released, nvidia):
    for folder, form in ((released, "mxfp4"), (nvidia, "nvfp4")):
        index = json.loads((folder / INDEX).read_text())
        found = {}
        for file in sorted(set(index["weight_map"].values())):
            with safe_open(folder / file, "pt") as stream:
                found |= {name: stream.get_tensor(name) for name in stream.keys()}
        listing = names.listing(SMALL, form)
        assert {n: (t.dtype, tuple(t.shape)) for n, t in found.items()} == {
            n: (spec.dtypes[0], spec.shape) for n, spec in listing.items()
        }
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        assert read_config(json.loads((folder / "config.json").read_text())) == SMALL
    assert len({*json.loads((nvidia / INDEX).read_text())["weight_map"].values()}) > 2


def test_the_released_format_loads_to_the_bit(model, released):
    wanted, found = rounded(model), loaded(released)
    for name, value in found.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    other = ReferenceModel(SMALL)
    other.load_state_dict(wanted)
    assert all(torch.equal(a, b) for a, b in zip(logits(found), logits(other), strict=True))


def test_bf16_loads_to_the_bit(model, tmp_path):
    save(model.state_dict(), SMALL, tmp_path / "bf16", "bf16")
    exact = ("ape", "attn_sink", "bias", "tid2eid")
    for name, value in loaded(tmp_path / "bf16").state_dict().items():
        source = model.state_dict()[name]
        kept = name.endswith(exact) or "hc_" in name
        assert torch.equal(value, source if kept else source.to(torch.bfloat16).float()), name


def test_nvfp4_from_mxfp4_loses_nothing(released, nvidia):
    before, after = loaded(released), loaded(nvidia)
    for name, value in after.state_dict().items():
        assert torch.equal(value, before.state_dict()[name]), name
    assert all(torch.equal(a, b) for a, b in zip(logits(before), logits(after), strict=True))
    checkpoint = Checkpoint(nvidia)
    for expert in range(SMALL.n_experts):
        stem = f"layers.1.ffn.experts.{expert}"
        scales = [checkpoint.entry(f"{stem}.{p}.weight_scale_2").read() for p in ("w1", "w3", "w2")]
        assert scales[0] == scales[1]
        assert all(torch.frexp(s)[0] == 0.5 for s in scales)
        assert checkpoint.entry(f"{stem}.w1.input_scale").read() == checkpoint.entry(f"{stem}.w3.input_scale").read()
    assert checkpoint.entry("mtp.0.ffn.experts.0.w1.weight").dtype == torch.int8


def test_no_activation_passes_the_written_input_scale(nvidia):
    """Inputs that reach the bounds: all of a norm's energy in one channel, SwiGLU at its clamp."""
    checkpoint = Checkpoint(nvidia)
    gain = checkpoint.entry("layers.2.ffn_norm.weight").read().float().abs()
    x = torch.zeros(SMALL.hidden)
    x[gain.argmax()] = 1.0
    largest = (x / x.square().mean().sqrt() * gain).abs().max()
    written = checkpoint.entry("layers.2.ffn.experts.0.w1.input_scale").read() * nvfp4.RANGE
    assert 1.0 <= written / largest < 1.001
    limit = torch.tensor(SMALL.swiglu_limit)
    written = checkpoint.entry("layers.2.ffn.experts.0.w2.input_scale").read() * nvfp4.RANGE
    assert 1.0 <= written / (torch.nn.functional.silu(limit) * limit) < 1.001


def test_conversions_back_and_to_bf16(released, nvidia, tmp_path):
    wanted = loaded(released).state_dict()
    for source, to in ((nvidia, "mxfp4"), (released, "bf16"), (nvidia, "bf16"), (released, "mxfp4")):
        folder = tmp_path / f"{source.name}-{to}"
        convert(source, folder, to)
        found = loaded(folder).state_dict()
        # bf16 holds E4M3 and E2M1 times powers of two; requantising what is on MXFP4's grid finds its own grid
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), (source.name, to)
    same = load_file(tmp_path / "mxfp4-mxfp4" / "model.safetensors")
    before = load_file(released / "model.safetensors")
    assert all(torch.equal(same[n].view(torch.uint8), before[n].view(torch.uint8)) for n in before if before[n].dim())


def test_bf16_to_nvfp4_is_within_the_format(model, tmp_path):
    save(model.state_dict(), SMALL, tmp_path / "bf16", "bf16")
    done = convert(tmp_path / "bf16", tmp_path / "nvfp4", "nvfp4")
    assert done.weights["quantised"] > 0 and "exact" not in done.weights
    found, source = loaded(tmp_path / "nvfp4").state_dict(), loaded(tmp_path / "bf16").state_dict()
    for name, least in (("layers.1.ffn.experts.2.w1", 19), ("mtp.0.ffn.experts.2.w1", 17), ("layers.1.attn.wq_a", 30)):
        value = source[f"{name}.weight"]
        noise = (found[f"{name}.weight"] - value).square().mean()
        assert least < 10 * torch.log10(value.square().mean() / noise) < least + 6, name


def test_base_checkpoints_with_fp32_scales_load(model, tmp_path):
    tensors = {}
    for weight in names.weights(SMALL):
        value = model.state_dict()[weight.name]
        if names.stored_as(weight, "fp8") != "fp8":
            kinds = {"bf16": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}
            tensors[weight.name] = value.to(kinds[names.stored_as(weight, "fp8")])
            continue
        q = fp8_block.quantize(value, scale_format="fp32")
        tensors[weight.name] = q.codes.view(torch.float8_e4m3fn)
        tensors[weight.name.removesuffix("weight") + "scale"] = q.scales
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps(write_config(SMALL, "fp8")))
    found = loaded(tmp_path / "base").state_dict()
    name = "layers.2.ffn.experts.1.w2.weight"
    wanted = fp8_block.dequantize(fp8_block.quantize(model.state_dict()[name], scale_format="fp32"))
    assert torch.equal(found[name], wanted)
    convert(tmp_path / "base", tmp_path / "out", "mxfp4")
    assert torch.equal(loaded(tmp_path / "out").state_dict()[name], mxfp4.dequantize(mxfp4.quantize(wanted)))


@pytest.mark.parametrize("precision", ["mxfp4", "nvfp4", "e4m3_expand", "e4m3_split", "bf16"])
def test_operands_of_every_mode_hold_the_loaded_values(released, nvidia, precision):
    source = nvidia if precision == "nvfp4" else released
    wanted = dict((w.name, t) for w, t in Listed.of(Checkpoint(source)).values())
    read = experts.read_experts(Checkpoint(source), "layers.1", range(4), SMALL.hidden, SMALL.expert_width)
    first, second = operands.gemm_weights(read, precision)
    found = operands.mode_weights(first, SMALL.hidden), operands.mode_weights(second, SMALL.expert_width)
    for expert in range(SMALL.n_experts):
        for name, weight in zip(("w1", "w3", "w2"), (*found[0][expert], *found[1][expert]), strict=True):
            value = weight_modes.dequantize(weight)
            assert torch.equal(value, wanted[f"layers.1.ffn.experts.{expert}.{name}.weight"])
    if precision != "e4m3_split":  # its kernel wants K in multiples of 128
        for prefix in ("layers.0", "layers.1", "mtp.0") if precision != "nvfp4" else ("layers.0", "layers.1"):
            assert moe.moe_layer(Checkpoint(source), prefix, SMALL, precision=precision, backend="reference")


def test_all_faults_of_tensors_are_named_at_once(released, tmp_path):
    tensors = load_file(released / "model.safetensors")
    del tensors["layers.0.attn.wkv.weight"], tensors["mtp.0.enorm.weight"]
    tensors["vision.patch.weight"] = torch.zeros(2)
    tensors["norm.weight"] = tensors["norm.weight"][:5].clone()
    tensors["head.weight"] = tensors["head.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((released / "config.json").read_text())
    with pytest.raises(TensorFaults, match="2 missing, 1 extra, 2 of a wrong type or shape") as error:
        Listed.of(Checkpoint(tmp_path))
    assert error.value.missing == ["layers.0.attn.wkv.weight", "mtp.0.enorm.weight"]
    assert error.value.extra == ["vision.patch.weight"]
    assert [text.split(":")[0] for text in error.value.wrong] == ["head.weight", "norm.weight"]


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("layers.0.ffn.gate.tid2eid", SMALL.n_experts, "tid2eid"),
        ("norm.weight", float("nan"), r"norm.weight\[3"),
    ],
)
def test_values_that_cannot_be_are_refused(released, tmp_path, name, value, message):
    tensors = load_file(released / "model.safetensors")
    tensors[name][3] = value
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((released / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path)


def test_a_declaration_against_the_tensors_is_refused(released, tmp_path):
    os.link(released / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(write_config(SMALL, "nvfp4")))
    with pytest.raises(CheckpointError, match="declares nvfp4"):
        Listed.of(Checkpoint(tmp_path))


def test_an_interrupted_conversion_leaves_nothing(released, tmp_path):
    def interrupt(done, total, name):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(released, tmp_path / "out", "nvfp4", interrupt)
    assert list(tmp_path.iterdir()) == []
    listing = names.listing(SMALL, "mxfp4")
    first, second, *_ = listing
    zeros = {name: torch.zeros(listing[name].shape).to(listing[name].dtypes[0]) for name in (first, second)}
    for wrong in ([second], [first], [first, first]):
        with pytest.raises(ArgumentError), Writer(tmp_path / "out", listing, {}) as writer:
            for name in wrong:
                writer.add(name, zeros[name])
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(ArgumentError, match="not taken"):
        convert(released, tmp_path / "out", "nvfp4")


def test_progress_ends_at_all_bytes(released):
    seen = []
    listed = Listed.of(Checkpoint(released))
    for _ in listed.values(lambda *at: seen.append(at)):
        pass
    assert seen[-1][0] == seen[-1][1] == listed.nbytes
    assert [name for *_, name in seen] == [weight.name for weight in names.weights(SMALL)]


def test_a_module_with_other_names_is_refused(released):
    with pytest.raises(ArgumentError, match="module"):
        load_into(torch.nn.Linear(2, 2), Listed.of(Checkpoint(released)))


def test_command(released, tmp_path):
    done = CliRunner().invoke(cli.app, ["convert", str(released), str(tmp_path / "out"), "--to", "nvfp4"])
    assert done.exit_code == 0 and "mxfp4 -> nvfp4" in done.stdout and "exact" in done.stdout
    assert Listed.of(Checkpoint(tmp_path / "out")).form == "nvfp4"
    wrong = CliRunner().invoke(cli.app, ["convert", str(released), str(tmp_path / "two"), "--to", "int4"])
    assert isinstance(wrong.exception, ArgumentError) and not (tmp_path / "two").exists()
