"""Every fault that engines shipped is found by the property that is named for it, and not without it."""

import caches
import pytest

from dsv4lib.cache import conformance
from dsv4lib.cache.errors import CacheError
from dsv4lib.cache.faults import FAULTS, inject


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [n for n, f in FAULTS.items() if f.found_by != "test_tables"])
def test_its_property_finds_a_fault(name):
    factories = caches.paged, caches.rings, caches.pro
    found = []
    with inject(name) as fault:
        for factory in factories:
            try:
                getattr(conformance, fault.found_by)(factory)
            except (AssertionError, CacheError, LookupError, ValueError) as error:
                found.append(error)
    assert found, f"{fault.found_by} does not find: {fault.bug}"
