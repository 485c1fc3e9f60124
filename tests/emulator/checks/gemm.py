"""Our real kernel, gemm_tile, with its PTX changed before it runs: the traps that have cost people days."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import torch

from dsv4lib.emulator.driver import host
from dsv4lib.emulator.driver.device import Device, active, make
from dsv4lib.emulator.machine.request import LaunchResult
from dsv4lib.emulator.ptx import parse
from dsv4lib.ops.gemm_tile.inputs import operands
from dsv4lib.ops.gemm_tile.sm100 import GemmTile
from tests.budget import built

SHAPE = (150, 136, 456)  # two tiles by two, more stages of K than the ring holds


@functools.cache
def compiled():
    kernel, code = built(GemmTile, GemmTile.fake_args, "sm_100a")
    return kernel, code.function


def run(edit: Callable[[str], str] | None = None, shape=SHAPE, **settings) -> tuple[torch.Tensor, LaunchResult]:
    """C and the result of a launch with edited PTX; ``settings`` are the device's."""
    kernel, function = compiled()
    a, b, c = operands(*shape, "bf16", "fp32", seed=1)
    c.zero_()
    gpu = make("sm_100a", **{"checks": "race", "instruction_limit": 3_000_000, **settings})
    requests = []
    gpu.launch = lambda request, stream=0: requests.append(request)
    arguments = kernel.launch_args(a, b, c)  # their memory stays registered as long as they live
    with active(gpu):
        host.launch(function, *arguments, gpu=gpu)
        (request,) = requests
        if edit is not None:
            request = replace(request, module=parse.parse(edit(function.__ptx__.rstrip("\0"))))
        result = Device.launch(gpu, request)
    return c, result


def sub(pattern: str, new: str, count: int = 1) -> Callable[[str], str]:
    """An edit that must hit exactly ``count`` times."""

    def edit(text: str) -> str:
        text, hits = re.subn(pattern, new, text)
        assert hits == count, (pattern, hits)
        return text

    return edit
