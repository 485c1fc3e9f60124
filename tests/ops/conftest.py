"""A cache of compiled kernels that lives as long as a test process."""

import pytest

from dsv4lib.ops import compile_cache


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("DSV4_CACHE", str(folder))
    compile_cache.default.cache_clear()
    yield folder
    patch.undo()
    compile_cache.default.cache_clear()
