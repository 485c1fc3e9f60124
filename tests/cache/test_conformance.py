"""Our manager under its own kit, in three arrangements; a naive manager fails there."""

import caches
from dsv4lib.cache.conformance import Conformance


class TestPaged(Conformance):
    factory = staticmethod(caches.paged)


class TestRings(Conformance):
    factory = staticmethod(caches.rings)


class TestPro(Conformance):
    factory = staticmethod(caches.pro)
