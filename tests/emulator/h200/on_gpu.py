"""Run a launch that `launches.py` saved on a Hopper GPU, through libcuda alone: `on_gpu.py LAUNCH.npz RESULT.npz`.

Needs Python, numpy and the driver; no CUDA toolkit, no CuTeDSL, no torch. The cubin is loaded as it is, memory is
filled with what the emulated kernel found, pointers are put in, and the result holds what the GPU left in each region
(``gpu_0``, ...). One line says how it compares with what the emulator left there.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np

COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC = 2, 4, 6  # CUlaunchAttributeID
MAX_DYNAMIC_SMEM, NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
ALIGNMENT = 256
SMEM_WITHOUT_OPT_IN = 48 << 10
PORTABLE_CLUSTER = 8
POINTER = ctypes.c_void_p


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("stream", POINTER),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint32),
    ]


class Driver:
    """The few calls that are needed, each checked."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), POINTER()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver.

        Raises:
            RuntimeError: it did not answer success.
        """
        code = getattr(self.library, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode()} ({code})")

    def upload(self, data: np.ndarray, offset: int) -> int:
        """Address of a copy of ``data`` in device memory, ``offset`` bytes past a 256-byte boundary."""
        base = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(base), ctypes.c_size_t(data.nbytes + ALIGNMENT))
        address = base.value + offset
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), POINTER(data.ctypes.data), ctypes.c_size_t(data.nbytes))
        return address

    def download(self, address: int, nbytes: int) -> np.ndarray:
        """Bytes of device memory."""
        out = np.empty(nbytes, np.uint8)
        self.call("cuMemcpyDtoH_v2", POINTER(out.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return out

    def launch(self, cubin: bytes, shape: dict[str, Any], params: np.ndarray) -> None:
        """Load a kernel, launch it and wait for its end."""
        module, function = POINTER(), POINTER()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, shape["kernel"].encode())
        if shape["smem"] > SMEM_WITHOUT_OPT_IN:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SMEM, shape["smem"])
        if np.prod(shape["cluster"]) > PORTABLE_CLUSTER:
            self.call("cuFuncSetAttribute", function, NON_PORTABLE_CLUSTER, 1)
        attributes = launch_attributes(shape)
        config = Config(
            (ctypes.c_uint32 * 3)(*shape["grid"]),
            (ctypes.c_uint32 * 3)(*shape["block"]),
            shape["smem"],
            None,
            attributes,
            len(attributes),
        )
        starts = [params.ctypes.data + at for at, _ in shape["parts"]]
        arguments = (POINTER * max(len(starts), 1))(*starts)
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None)
        self.call("cuCtxSynchronize")


def launch_attributes(shape: dict[str, Any]) -> Any:
    """Array of the attributes that a launch names."""
    chosen = []
    if shape["cluster"] != [1, 1, 1]:
        chosen.append((CLUSTER_DIMENSION, shape["cluster"]))
    for name, number in (("cooperative", COOPERATIVE), ("programmatic", PROGRAMMATIC)):
        if shape["attributes"].get(name):
            chosen.append((number, [1]))
    array = (Attribute * len(chosen))()
    for attribute, (number, words) in zip(array, chosen, strict=True):
        attribute.id = number
        attribute.value[: len(words)] = words
    return array


def main() -> None:
    """Command line."""
    saved = np.load(sys.argv[1])
    shape = json.loads(saved["shape"].tobytes())
    params = saved["params"].copy()
    driver = Driver()
    before = [saved[f"before_{i}"] for i in range(len(shape["offsets"]))]
    addresses = [driver.upload(data, offset) for data, offset in zip(before, shape["offsets"], strict=True)]
    for at, region, inside in shape["pointers"]:
        params[at : at + 8].view("<u8")[0] = addresses[region] + inside
    driver.launch(saved["cubin"].tobytes(), shape, params)
    results = {f"gpu_{i}": driver.download(a, b.nbytes) for i, (a, b) in enumerate(zip(addresses, before, strict=True))}
    np.savez_compressed(sys.argv[2], **results)
    written = {i: int((results[f"gpu_{i}"] != b).sum()) for i, b in enumerate(before)}
    differ = {i: int((results[f"gpu_{i}"] != saved[f"after_{i}"]).sum()) for i in written}
    print(f"{sys.argv[1]}: bytes changed by the GPU {written}, different from the emulator's {differ}")


if __name__ == "__main__":
    main()
