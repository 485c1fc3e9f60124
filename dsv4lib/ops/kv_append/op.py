"""Store KV rows of new tokens in rings of the window: the op `dsv4::kv_append`.

    kv_append(kv, ring, plan(offsets, starts, places))               bf16 rings, for `ops.fmha.Ring`

One launch for any mixture of chunks, in place, nothing read by the host. Entries of 584 bytes in pages are
`ops.quantize.quantize_kv_entries`'s. The oracle is `dsv4lib.reference.cache.append_window`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.requests import check_values, used_of
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.kv_append import arguments
from dsv4lib.ops.kv_append.kernel import DIM, KvAppend


@typed
def kv_append(kv: Tensor, ring: Tensor, requests: Tensor, *, backend: str = "auto") -> None:
    """Store the last ``window`` rows of every request in its ring.

    Position p is at slot p mod window.

    Args:
        kv: bf16 ``[T, 512]``, rows on 16 bytes.
        ring: bf16 ``[S, window, 512]``, changed in place.
        requests: int32 ``[B, 4]``, as `ops.common.requests.plan` makes it. On a GPU a request whose place is no ring is
            left out; one without rows, or with a negative position or place (padding), is left out everywhere.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    Call.op(kv, ring, requests, backend)


def settings_for(tokens: int, requests: int, window: int) -> dict[str, int | bool]:
    """Choose the kernel: by slots where a batch has more rows than its rings."""
    return {"window": window, "by_slot": tokens > requests * window}


@op("kv_append", mutates=("ring",))
class Call(NamedTuple):
    """A call of `kv_append`."""

    kv: Tensor
    ring: Tensor
    requests: Tensor
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        bf16 = torch.bfloat16
        wanted = {"kv": (self.kv, bf16, (None, DIM)), "ring": (self.ring, bf16, (None, None, DIM))}
        launching.check(wanted | {"requests": (self.requests, torch.int32, (None, 4))})

    def check_values(self) -> None:
        """Check the table of requests."""
        check_values(self.requests, len(self.kv), len(self.ring))

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        kv, ring, requests, _ = self
        if 0 in (len(kv), ring.numel(), len(requests)):
            return None
        if backend != "reference":
            settings, args = settings_for(len(kv), len(requests), ring.shape[1]), arguments.launch_args
            return launching.launch(backend, KvAppend, settings, arguments.fake_args, args, self)
        for row, count, start, place in used_of(requests).tolist():
            own = slice(place, place + 1)
            oracle = backends.oracle("cache").append_window
            ring[own] = oracle(ring[own], kv[None, row : row + count], start)[2]
        return None
