"""Manage the caches of a DeepSeek-V4. It has one pool, prefixes that hit exactly, drafts, forks, preemption.

    groups = deepseek_v4(FLASH, mtp=1, drafts=1)
    manager = Manager(groups, pages=20_000, save_every=1024)
    storage, tables = Storage(manager, "cuda"), Tables(manager, 64, 8192, 65_536, "cuda")

    hit = manager.add("a", prompt)                               tokens that need not be run
    step = manager.begin([Work("a", manager.cut("a", 2048))])    PoolExhausted: preempt one and try again
    storage.run(manager.copies())
    tables.fill(step)                                            then the model runs
    manager.commit(step)                                         or commit(step, [accepted drafts of each])
    storage.run(manager.copies())
    manager.append("a", [token])
    manager.finish("a")

`dsv4lib.model.paged` puts a model on it.
README.md argues the design, `manager` states what an executor must do, `conformance` checks any manager.
"""

from dsv4lib.cache.accounting import Account, account, capacity, held_blocks, pool_pages, request_bytes
from dsv4lib.cache.errors import CacheError, DoubleFree, PoolExhausted, RequestExists, UnknownRequest, WrongState
from dsv4lib.cache.groups import Group, Shape, ValueBytes, arrange, best_page_bytes, deepseek_v4
from dsv4lib.cache.manager import Manager
from dsv4lib.cache.metrics import Metrics
from dsv4lib.cache.request import Copy, Step, Work
from dsv4lib.cache.tables import Storage, Tables, read_slots, window_positions

__all__ = [
    "Account",
    "CacheError",
    "Copy",
    "DoubleFree",
    "Group",
    "Manager",
    "Metrics",
    "PoolExhausted",
    "RequestExists",
    "Shape",
    "Step",
    "Storage",
    "Tables",
    "UnknownRequest",
    "ValueBytes",
    "Work",
    "WrongState",
    "account",
    "arrange",
    "best_page_bytes",
    "capacity",
    "deepseek_v4",
    "held_blocks",
    "pool_pages",
    "read_slots",
    "request_bytes",
    "window_positions",
]
