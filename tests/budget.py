"""A kernel from the compile cache, and what the compiler's report of it must say."""

import inspect

from dsv4lib.dsl.compile import MAX_INSTRUCTIONS
from dsv4lib.ops.common import compile_cache


def built(kernel_type, fake_args, arch, *settings, **named):
    """(kernel, code) of ``kernel_type(*settings, **named)`` from the cache, which keys it by all of its sources."""
    given = inspect.signature(kernel_type).bind(*settings, **named).arguments
    return compile_cache.default().get(kernel_type, given, fake_args, arch)


def small(code):
    """Whether ``code`` is as short as a kernel that unrolls only what it should; how long it took to compile varies."""
    return code.instructions <= MAX_INSTRUCTIONS
