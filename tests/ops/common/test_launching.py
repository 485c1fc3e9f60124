"""What `ops.launching` says of overlapping launches, of compiled code; how ops are registered."""

import subprocess
import sys

import pytest

from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator.ptx.dependent import ahead_of_wait
from dsv4lib.emulator.ptx.parse import parse
from dsv4lib.ops.kv_append import arguments as append_arguments
from dsv4lib.ops.kv_append.kernel import KvAppend
from dsv4lib.ops.qnorm_rope_kv import arguments as qnorm_arguments
from dsv4lib.ops.qnorm_rope_kv.kernel import QnormRopeKv
from dsv4lib.ops.topk import arguments as topk_arguments
from dsv4lib.ops.topk.cluster import ClusterTopK
from dsv4lib.ops.topk.kernel import TopK
from dsv4lib.ops.topk.take_all import TakeAll

CALLS = """
import sys
import torch
from typing import NamedTuple
from dsv4lib.ops.common.schema import op

@op("a_test", mutates=("y",))
class Call(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    backend: str

    def check(self):
        pass

    def run(self, backend):
        hooks.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
        self.y.copy_(self.x + 1)

hooks = []
def called():
    y = torch.zeros(3)
    torch.ops.dsv4.a_test(torch.ones(3), y, "reference")
    assert y.tolist() == [2, 2, 2]
    return y

assert called()._version == 1 + 1  # torch's part of a custom op is there: what it changes is known to be changed
assert "torch._dynamo" not in sys.modules, "imported by the first call"
import torch._dynamo
from torch._dynamo.eval_frame import set_eval_frame
set_eval_frame(False)  # what dynamo does with a frame that is run: here, code that is compiled already
try:
    called()
finally:
    set_eval_frame(None)
assert hooks == [None, None], hooks  # the body runs without it
print("done")
"""
BEFORE_ATTENTION = [
    (QnormRopeKv(normed=True), qnorm_arguments.fake_args),
    (KvAppend(), append_arguments.fake_args),
    (TopK(threads=64), topk_arguments.fake_args),
    (ClusterTopK(threads=64, ctas=2), topk_arguments.fake_args),
    (TakeAll(), topk_arguments.fake_all_args),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kernel", "fake_args"), BEFORE_ATTENTION, ids=lambda x: type(x).__name__)
def test_the_next_kernel_is_asked_for_right_behind_the_wait(kernel, fake_args):
    """On every path; ahead of the wait only weights are read."""
    (code,) = parse(compile_for(kernel, fake_args(kernel), "sm_90a").ptx).kernels.values()
    spoken = [instr for instr in code.instructions if instr.opcode.startswith("griddepcontrol")]
    assert spoken and all(instr.guard is None for instr in spoken)
    for wait, ask in zip(spoken[::2], spoken[1::2], strict=True):
        assert (wait.opcode, ask.opcode) == ("griddepcontrol.wait", "griddepcontrol.launch_dependents")
        assert ask.index == wait.index + 1
    early = [instr.text for instr in ahead_of_wait(code)]
    assert all(text.startswith("ld.global") for text in early) and bool(early) == isinstance(kernel, QnormRopeKv)


def test_the_first_call_imports_no_compiler():
    """And one that is there does not look inside."""
    ran = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
