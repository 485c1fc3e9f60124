"""Describe the architectures that can be emulated, as the CUDA runtime does.

Sources: CUDA C++ programming guide, technical specifications per compute capability; data sheets for SM counts, cache
and clocks. Attribute numbers are those of cudaDeviceAttr.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.errors import ArgumentError


@dataclass(frozen=True)
class Architecture:
    """One GPU target.

    Attributes:
        name: as compilers spell it.
        device: name that torch.cuda reports.
        capability: (major, minor).
        sm_count: multiprocessors of the full product.
        smem_per_cta, smem_per_sm: bytes.
        l2_bytes, memory_bytes: sizes.
        clusters, tmem: which features the architecture has.
    """

    name: str
    device: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_cta: int
    smem_per_sm: int
    l2_bytes: int
    memory_bytes: int
    clusters: bool
    tmem: bool

    @property
    def max_cluster(self) -> int:
        """Get the CTAs of the largest cluster. 16 needs the non-portable attribute, which CuTeDSL always sets."""
        return 16 if self.clusters else 1

    def attributes(self, sm_count: int) -> dict[int, int]:
        """Make the device attributes by cudaDeviceAttr number."""
        return {
            **{1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535},  # threads, block and grid extents
            **{8: 48 << 10, 9: 64 << 10, 10: 32, 11: 2**31 - 1, 12: 65536},  # shared, constant, warp, pitch, registers
            **{13: 1_000_000, 14: 512, 15: 1, 16: sm_count, 17: 0, 18: 0, 19: 1, 20: 0},
            **{31: 1, 33: 0, 34: 0, 35: 0, 36: 1_000_000, 37: 8192, 38: self.l2_bytes, 39: 2048, 41: 1},
            **{75: self.capability[0], 76: self.capability[1], 81: self.smem_per_sm, 82: 65536, 83: 1, 90: 1, 95: 1},
            **{97: self.smem_per_cta, 106: 32, 111: 1024, 115: 1, 120: int(self.clusters)},
        }


_KIB, _GIB = 1 << 10, 1 << 30
ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("sm_80", "NVIDIA A100", (8, 0), 108, 163 * _KIB, 164 * _KIB, 40 << 20, 80 * _GIB, False, False),
        Architecture("sm_90a", "NVIDIA H200", (9, 0), 132, 227 * _KIB, 228 * _KIB, 50 << 20, 141 * _GIB, True, False),
        Architecture("sm_100a", "NVIDIA B200", (10, 0), 148, 227 * _KIB, 228 * _KIB, 126 << 20, 180 * _GIB, True, True),
        Architecture("sm_103a", "NVIDIA B300", (10, 3), 148, 227 * _KIB, 228 * _KIB, 126 << 20, 270 * _GIB, True, True),
    )
}


def architecture(name: str) -> Architecture:
    """Look up the architecture ``name``.

    Raises:
        ArgumentError: it is not one of `ARCHITECTURES`.
    """
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ArgumentError("arch", name, "one of " + ", ".join(ARCHITECTURES))
    return ARCHITECTURES[name]
