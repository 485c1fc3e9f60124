"""Errors of the cache. Each has a type, names what it is about, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Hashable

from dsv4lib.errors import DSV4Error


class CacheError(DSV4Error):
    """The cache was used wrongly, or is full."""


class PoolExhausted(CacheError):
    """Too few pages; nothing was changed. Preempt or finish a request and try again.

    Attributes:
        wanted, free: pages that are needed, and that are unused or can be evicted.
        page_bytes: bytes of a page.
        space: "device" or "host".
    """

    def __init__(self, wanted: int, free: int, page_bytes: int, space: str = "device"):
        self.wanted, self.free, self.page_bytes, self.space = wanted, free, page_bytes, space
        super().__init__(
            f"{wanted} pages ({wanted * page_bytes} bytes) of the {space} are needed, {free} ({free * page_bytes} "
            "bytes) are unused or can be evicted; preempt or finish a request"
        )


class DoubleFree(CacheError):
    """A reference was given back that did not exist."""


class UnknownRequest(CacheError):
    """No request has this id."""

    def __init__(self, request: Hashable, known: int):
        self.request = request
        super().__init__(f"request {request!r} is not known; there are {known}")


class RequestExists(CacheError):
    """A request of this id exists already."""

    def __init__(self, request: Hashable):
        self.request = request
        super().__init__(f"request {request!r} exists already; finish it first")


class WrongState(CacheError):
    """A request is not in the state that a call needs.

    Attributes:
        request, state, wanted: its id, the state it is in and the one that would do.
    """

    def __init__(self, request: Hashable, state: str, wanted: str):
        self.request, self.state, self.wanted = request, state, wanted
        super().__init__(f"request {request!r} is {state}; it must be {wanted}")
