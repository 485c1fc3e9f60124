"""How the ops are registered: a first call imports no compiler, and a compiler that is there does not look inside."""

import subprocess
import sys

CALLS = """
import sys
import torch
from dsv4lib.ops import launching

def body(x, y):
    hooks.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
    y.copy_(x + 1)

hooks = []
launching.custom_op("dsv4::a_test", body, mutates_args=("y",), schema="(Tensor x, Tensor(a!) y) -> ()")
def called():
    y = torch.zeros(3)
    torch.ops.dsv4.a_test(torch.ones(3), y)
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


def test_the_first_call_imports_no_compiler():
    ran = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
