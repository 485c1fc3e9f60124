"""Small caches that the tests share."""

from dsv4lib.cache.conformance import ManagerAdapter
from dsv4lib.cache.groups import Shape, ValueBytes, arrange
from dsv4lib.config import LayerKind

SWA, CSA, HCA = LayerKind.SWA, LayerKind.CSA, LayerKind.HCA
FLASH_LIKE = Shape((SWA, CSA, HCA), window=8, csa_rate=4, hca_rate=8, mtp=1)
PRO_LIKE = Shape((HCA, HCA, CSA), window=6, csa_rate=2, hca_rate=8)
WORDS = ValueBytes(8, 8, 8, 8, 8)


def paged(drafts=3, pages=140, **given):
    """Windows in blocks by position, with an MTP layer."""
    groups = arrange(FLASH_LIKE, WORDS, block=8, window_block=4, drafts=drafts)
    return ManagerAdapter(FLASH_LIKE, groups, drafts, pages=pages, page_bytes=160, host_pages=60, **given)


def rings(drafts=3, pages=90, **given):
    """Windows in rings, with an MTP layer, blocks of two units of entries."""
    groups = arrange(FLASH_LIKE, WORDS, block=16, drafts=drafts)
    return ManagerAdapter(FLASH_LIKE, groups, drafts, pages=pages, host_pages=60, save_every=16, **given)


def pro(drafts=2, pages=120, **given):
    """Pro's schedule: the first layers are HCA."""
    groups = arrange(PRO_LIKE, WORDS, block=8, window_block=2, drafts=drafts)
    return ManagerAdapter(PRO_LIKE, groups, drafts, pages=pages, page_bytes=128, host_pages=60, save_every=8, **given)
