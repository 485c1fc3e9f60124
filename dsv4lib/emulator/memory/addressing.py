"""Compute addresses of the state spaces. 32-bit shared addresses, generic windows, cluster ranks.

A shared address is ``rank << 24 | offset`` everywhere (as on hardware, where kernels clear bit 24 to reach the even CTA
of a pair), also for the CTA's own variables; ``shared::cta`` and ``shared::cluster`` addresses are therefore the same
numbers and ``mapa`` only replaces the rank. A generic address of shared memory carries SHARED_WINDOW in its top byte.
Source: PTX ISA, sections "State Spaces", "Generic Addressing" and "mapa".
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator.native.abi import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_MASK

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
LOW_32 = 0xFFFFFFFF


def shared_address(rank: int, offset: int) -> int:
    """Make the 32-bit shared address of byte ``offset`` in the CTA of rank ``rank``."""
    return rank << RANK_SHIFT | offset


def is_shared(addresses: np.ndarray) -> np.ndarray:
    """Tell which generic addresses lie in the shared window, bool of the same shape."""
    return (addresses.astype(np.uint64) & np.uint64(WINDOW_MASK)) == np.uint64(SHARED_WINDOW)


def is_local(addresses: np.ndarray) -> np.ndarray:
    """Tell which generic addresses lie in the local window, bool of the same shape."""
    return (addresses.astype(np.uint64) & np.uint64(WINDOW_MASK)) == np.uint64(LOCAL_WINDOW)


def to_shared(addresses: np.ndarray) -> np.ndarray:
    """Convert generic or 32-bit shared addresses to uint32 shared ones, no window.

    The caller has checked the space where both spaces are allowed (``is_shared``).
    """
    return (addresses.astype(np.uint64) & np.uint64(LOW_32)).astype(np.uint32)


def ranks(addresses: np.ndarray) -> np.ndarray:
    """Get the cluster rank of each shared address (int64)."""
    return (to_shared(addresses) >> np.uint32(RANK_SHIFT)).astype(np.int64)


def offsets(addresses: np.ndarray) -> np.ndarray:
    """Get the byte offset in its CTA's shared memory of each shared address (int64)."""
    return (to_shared(addresses) & np.uint32(OFFSET_MASK)).astype(np.int64)
