"""Put the caches of a model into the pool of one `cache.Manager`. It makes views for layers, arrays for steps.

    caches = PagedCaches(model, requests=8, tokens=256, positions=2048)
    caches.manager.add("a", prompt)
    step = caches.manager.begin([Work("a", len(prompt))])
    hidden, _ = model.hidden(caches.step(step))
    caches.manager.commit(step)

All pages, of all groups and layers, are one tensor. `model.scheduler` does the above for many requests at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lib.cache import Group, Manager, Shape, Storage, Tables, best_page_bytes, deepseek_v4, pool_pages
from dsv4lib.cache.request import Part
from dsv4lib.cache.request import Step as Batch
from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry
from dsv4lib.layers.attention import KEYS, MOST_DRAFTS, Caches, Pool, State
from dsv4lib.layers.step import ENTRIES, Entries, Step, Window, assembled, rows_of, window_rows
from dsv4lib.model.transformer import Transformer


def groups_of(config: ModelConfig, keys: str, mtp: bool, drafts: int) -> tuple[Group, ...]:
    """List the groups of a model's caches; without drafts HCA keeps a running softmax."""
    return deepseek_v4(config, mtp=int(mtp), keys=keys, drafts=drafts, running=not drafts)


def pool_bytes(
    config: ModelConfig, *, requests: int, tokens: int, positions: int, drafts: int = 0, keys: str = "fp4"
) -> int:
    """Count the bytes of the pool that `PagedCaches` makes by default.

    The draft block counts if the model drafts.
    """
    groups = groups_of(config, keys, drafts > 0, drafts)
    page = best_page_bytes(groups)
    return page * pool_pages(groups, page, requests=requests, positions=positions + drafts, tokens=tokens)


class PagedCaches:
    """The caches of a model, which reads and writes them from then on.

    Args:
        model: whose layers get the views.
        requests, tokens: most of a step. positions: most of a request, at most the model's capacity.
        pages: of the pool; None: enough for ``requests`` requests of ``positions`` tokens and their saved points.
        drafts: most of a step, 0 to `MOST_DRAFTS`. Without, HCA keeps a running softmax.
        save_every, host_pages, prefix_caching: of `Manager`.

    Raises:
        ArgumentError: a number out of range.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        requests: int,
        tokens: int,
        positions: int,
        pages: int | None = None,
        drafts: int = 0,
        save_every: int = 0,
        host_pages: int = 0,
        prefix_caching: bool = True,
    ) -> None:
        most = model.layout.capacity
        if not 1 <= positions <= most:
            raise ArgumentError("positions", positions, f"1 to {most}, the model's capacity")
        if not 0 <= drafts <= (MOST_DRAFTS if model.mtp is not None else 0):
            allowed = f"0 to {MOST_DRAFTS}" if model.mtp is not None else "0: no draft block was loaded"
            raise ArgumentError("drafts", drafts, allowed)
        config, mtp = model.config, int(model.mtp is not None)
        groups = groups_of(config, model.keys, bool(mtp), drafts)
        self.model, self.drafts, self.positions = model, drafts, positions
        self.shape = Shape(config.layer_kinds, config.window, config.csa_rate, config.hca_rate, mtp)
        self.groups = {g.name: g for g in groups}
        options = {"save_every": save_every, "host_pages": host_pages, "prefix_caching": prefix_caching}
        if pages is None:
            sizes = {"requests": requests, "positions": positions + drafts, "tokens": tokens}
            pages = pool_pages(groups, best_page_bytes(groups), **sizes)
        self.manager = Manager(groups, pages, **options)
        self.storage = Storage(self.manager, model.device)
        rows = requests, tokens, positions + drafts
        self.tables = Tables(self.manager, *rows, model.device)
        ahead = [g for g in groups if g.lookahead]
        self.draft_tables = Tables(self.manager, *rows, model.device, ahead) if ahead else None
        kinds = [*config.layer_kinds, *([config.mtp_kind] if mtp else [])]
        model.caches = [self._views(number, kind) for number, kind in enumerate(kinds)]

    def _views(self, layer: int, kind: LayerKind) -> Caches:
        at = self.shape.index(layer)
        window = next(name for name in at if name.endswith("window"))

        def pool(name: str) -> Pool:
            group = self.groups[name]
            part, data = self.storage.layer(group, at[name])
            layout = KEYS[self.model.keys] if name == "keys" else kv_entry.LAYOUT
            return Pool(data[:, : layout.page_bytes(group.entries)], group.entries, part)

        def state(name: str) -> State:
            group = self.groups[name]
            part, data = self.storage.layer(group, at[name])
            data = data[:, : group.entries * group.entry_bytes]
            return State.of(data, part, 0 if group.running else group.rows)

        if kind is LayerKind.SWA:
            return Caches(pool(window), group=window)
        if kind is LayerKind.HCA:
            return Caches(pool(window), pool("hca"), state("hca_state"), group=window)
        states = state("csa_state"), state("keys_state")
        return Caches(pool(window), pool("csa"), states[0], pool("keys"), states[1], window)

    def copy(self) -> None:
        """Make the copies that the manager listed since the last call.

        They run in stream order.
        """
        self.storage.run(self.manager.copies())

    def step(self, batch: Batch, rows: int | None = None, requests: int | None = None) -> Step:
        """Make the arrays of a step that was begun, after the copies it needs.

        Args:
            batch: from `Manager.begin`. rows, requests: pad to so many; None: as many as there are.
        """
        self.fill(batch)
        rows = batch.tokens if rows is None else rows
        requests = len(batch.parts) if requests is None else requests
        for name, value, least, most in (
            ("rows", rows, batch.tokens, self.tables.tokens),
            ("requests", requests, len(batch.parts), self.tables.requests),
        ):
            if not least <= value <= most:
                raise ArgumentError(name, value, f"{least} to {most}")
        single = rows == requests and all(part.end - part.start == 1 for part in batch.parts)
        return self._arrays(self.tables, rows, requests, single)

    def fill(self, batch: Batch) -> None:
        """Make the copies that the manager has listed, then fill the tables for a batch."""
        self.copy()
        self.tables.fill(batch)

    def decode_arrays(self, size: int) -> Step:
        """Make the arrays of a decode step from the tables alone.

        The step has ``size`` requests with a token each, padding among them.

        Nothing of the host enters: captured in a CUDA graph, the same launches serve whatever the tables hold next.
        """
        return self._arrays(self.tables, size, size, True)

    def draft_step(self, parts: list[tuple[Part, int, list[int]]]) -> Step:
        """Make the arrays of a step of the draft block alone.

        Args:
            parts: (part of a batch, first position, tokens after the positions from there on) of each request.
        """
        batch = Batch([Part(part.request, start, 0, tuple(ahead), part.known) for part, start, ahead in parts])
        self.draft_tables.fill(batch)
        single = all(part.end - part.start == 1 for part in batch.parts)
        return self._arrays(self.draft_tables, batch.tokens, len(batch.parts), single)

    def _arrays(self, tables: Tables, rows: int, requests: int, single: bool) -> Step:
        ids = tables["request_ids"][:rows]
        positions = torch.where(ids >= 0, tables["positions"][:rows], -1)
        windows: dict[str, list[Window]] = {}
        entries: dict[str, list[Entries]] = {}
        states: dict[str, list[Tensor]] = {}
        for g in tables.groups:
            if g.kind == "ring":
                states[g.name] = [one[:requests] for one in tables[f"requests.{g.name}"]]
                continue
            each = zip(tables[f"slots.{g.name}"], tables[f"blocks.{g.name}"], strict=True)
            parts = [(slots[:rows], blocks[:requests]) for slots, blocks in each]
            if g.kind == "window":
                windows[g.name] = [
                    Window(slots, window_rows(blocks, ids, positions, g.reach, g.entries)) for slots, blocks in parts
                ]
            else:
                entries[g.name] = [Entries(*part, self._all_rows(g, part[1], ids)) for part in parts]
        tables_of = {k: (getattr(self.model, f"cos_{k}"), getattr(self.model, f"sin_{k}")) for k in LayerKind}
        return assembled(
            self.model.config,
            tables_of,
            tables["tokens"][:rows].long(),
            positions,
            single=single,
            request_ids=ids,
            requests=states,
            windows=windows,
            entries=entries,
        )

    def _all_rows(self, group: Group, blocks: Tensor, ids: Tensor) -> Tensor | None:
        """Rows of all entries that a request can have, where a layer reads all of them."""
        if ENTRIES[group.name] is not LayerKind.HCA:
            return None
        every = torch.arange(-(-self.positions // group.rate), device=ids.device, dtype=torch.int32)
        return rows_of(blocks, ids, every.expand(len(ids), -1), group.entries)
