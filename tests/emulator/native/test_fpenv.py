"""The thread's floating-point settings do not reach kernels, and come back after a launch."""

import numpy as np
import pytest
import torch

from dsv4lib import emulator
from dsv4lib.emulator.errors import MemoryFault
from tests.emulator.launching import aligned, entry, launch

# f32 arithmetic that is subnormal in native code, and in numpy: a multimem sum.
_NATIVE = """
    ld.param.u64 %rd1, [x]; ld.global.f32 %f1, [%rd1]; mul.rn.f32 %f2, %f1, 0f3F000000; st.global.f32 [%rd1+4], %f2;
    add.rn.f32 %f3, %f1, %f1; st.global.f32 [%rd1+8], %f3;
"""
_SUM = """
    ld.param.u64 %rd1, [all]; ld.param.u64 %rd2, [out];
    multimem.ld_reduce.weak.global.add.f32 %f1, [%rd1]; st.global.f32 [%rd2], %f1;
"""
_CODE = 0x00012346  # a subnormal


@pytest.fixture(params=[False, True], ids=["kept", "flushed"])
def flush(request):
    """torch's switch for this thread."""
    torch.set_flush_denormal(request.param)
    yield request.param
    torch.set_flush_denormal(False)


def _flushes():
    return float(torch.tensor([_CODE], dtype=torch.int32).view(torch.float32) * 0.5) == 0


def test_native_code_keeps_subnormals(flush):
    words = aligned(4, np.uint32)
    words[0] = _CODE
    launch(entry("u64 x", _NATIVE), words)
    assert words.tolist() == [_CODE, _CODE // 2, 2 * _CODE, 0]
    assert _flushes() == flush


def test_services_keep_subnormals(flush):
    from tests.emulator.driver.test_devices import request

    with emulator.devices(2, shims=False) as gpus:
        buffer = gpus.symmetric(4, np.uint32)
        buffer[0][:] = buffer[1][:] = _CODE
        out = gpus[0].copy(np.zeros(1, np.uint32))
        gpus[0].launch(request(entry("u64 all, u64 out", _SUM), buffer.multicast, out))
    assert out[0] == 2 * _CODE
    assert _flushes() == flush


def test_the_settings_come_back_after_an_error(flush):
    with pytest.raises(MemoryFault):
        launch(entry("u64 x", _NATIVE), 0)
    assert _flushes() == flush
