"""The compressor's rows in a few lines of torch: right by the rows' own check, which refuses a changed byte."""

import pytest
import torch

from dsv4lib.ops.compressor import bench as compressor
from dsv4lib.ops.compressor import peers_torch as compressor_plain

ROWS = [
    (rate, dim, form, kind, running)
    for rate, dim, form in ((4, 512, "kv"), (128, 512, "kv"), (4, 128, "fp4"), (4, 128, "fp8"))
    for kind in ("decode", "steps", "prefill")
    for running in ((False, True) if rate == 128 else (False,))
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("rate", "dim", "form", "kind", "running"), ROWS)
def test_plain_torch_is_right_and_a_changed_value_is_not(rate, dim, form, kind, running):
    tokens = 256 if kind == "prefill" else 129 if kind == "steps" else 5
    given = compressor.given(tokens, rate, dim, form, kind, torch.Generator().manual_seed(rate + dim))
    before = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    step, out = compressor_plain.plain(given, running)
    for _ in range(2):  # as the bench does: a second call finds the state of the first
        assert step(*(given[name] for name in compressor_plain.NAMES)) == {}
        compressor.check(given, out)
    assert all(torch.equal(given[name], x) for name, x in before.items())
    assert ("state_k" in out) != running
    slot = int(given["slots"].max())
    for name, x in out.items():
        bad = {**out, name: x.clone()}
        if name == "pages":
            layout = compressor.layout(given)
            data, _ = layout.views(bad["pages"], given["page_size"])
            data[slot // given["page_size"], slot % given["page_size"], 3] ^= 0x44
        else:
            bad[name][0, 0, 7] += 1
        with pytest.raises(AssertionError, match="entries" if name == "pages" else name):
            compressor.check(given, bad)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("rate", "dim", "form", "kind", "running"), ROWS[2:5])
def test_torch_compile_takes_it_whole(rate, dim, form, kind, running):
    given = compressor.given(128, rate, dim, form, kind, torch.Generator().manual_seed(1))
    step, out = compressor_plain.plain(given, running)
    torch._dynamo.reset()
    fast = torch.compile(step, dynamic=False, fullgraph=True, backend="aot_eager")
    fast(*(given[name] for name in compressor_plain.NAMES))
    compressor.check(given, out)
