"""The scheduler's side of the connector: decides what is in the host tier, and what to move.

The host tier is a `TieredCache` whose blocks are vLLM's block hashes (`key_path`), with any of
Headwater's eviction policies. It is pure bookkeeping: it starts no copy and waits for none.

A request holds a lease on its leading blocks in the host tier, from its first step to its end.
So these blocks stay while the request saves the blocks after them. A job (load, write) keeps
the slots it uses until every rank has reported its end.
"""

from dataclasses import dataclass, field

import numpy as np

from headwater.cache import CacheConfig, FinishedRequest, TieredCache
from headwater.cache.keys import TokenPath
from headwater.cache.plan import Lease
from headwater.clock import Clock
from headwater.plugins.identity import key_path, storage_keys
from headwater.plugins.settings import WRITE_BLOCKS
from headwater.plugins.vllm.messages import (
    LoadOrder,
    LookupOrder,
    OrderEnd,
    RankReport,
    SaveOrder,
    StepOrders,
    StoreOrder,
)
from headwater.plugins.write_order import PrefixUses, WriteOrder, WriteRank
from headwater.types import EMPTY, BlockKey, RequestId, Slots

_MAX_STORES = 4
"""Store orders in flight; each keeps the host slots of its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierConfig:
    """Size and rules of the host tier."""

    num_slots: int
    block_tokens: int
    identity: bytes
    num_ranks: int = 1
    eviction: str = "session"
    has_storage: bool = True
    lookup_timeout_s: float = 1.0
    max_waiting_writes: int = 4096


@dataclass(slots=True)
class _Save:
    """Slots to which KV blocks are being copied, and the path they belong to."""

    path: TokenPath
    slots: Slots
    hashes: list[bytes]


@dataclass(slots=True, eq=False)
class _Running:
    """A request that vLLM has not finished, or whose orders have not ended."""

    name: str
    keys: list[BlockKey] = field(default_factory=list)
    lease: Lease | None = None
    found: int | None = None
    """Blocks that storage has from `asked_at` on, once it has answered."""

    asked_at: int = 0
    asked_s: float = 0.0
    lookup: int | None = None
    loading: int | None = None
    saving: dict[int, _Save] = field(default_factory=dict)
    num_saved: int = 0
    """Blocks that are in the host tier or being copied to it."""

    finished: FinishedRequest | None = None


@dataclass(slots=True, eq=False)
class _Load:
    request: _Running
    path: TokenPath
    slots: Slots
    """Slots for blocks that are read from storage."""

    start: int
    """Index in the path of the first of them."""

    has_ended: bool = False


class HostTier:
    """Decides which blocks the host tier has. One thread calls it: vLLM's scheduler."""

    def __init__(self, config: HostTierConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._cache = TieredCache(
            CacheConfig(
                device_blocks=config.num_slots,
                block_tokens=config.block_tokens,
                eviction=config.eviction,
                max_ghosts=0,
            )
        )
        self._requests: dict[str, _Running] = {}
        self._orders = StepOrders()
        self._last = 0
        self._lookups: dict[int, _Running] = {}
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Running] = {}
        self._stores: dict[int, Lease] = {}
        self._lost: set[int] = set()
        """Stores in flight that have passed their deadline."""
        self._reports: dict[int, list[OrderEnd]] = {}
        """Reports so far of orders that not every rank has reported."""
        self._uses = PrefixUses()
        self.waiting: WriteOrder[tuple[TokenPath, int, list[bytes]]] = WriteOrder(
            config.max_waiting_writes
        )
        """Blocks to write to storage: a path, the first block, and the hashes from there on."""

    @property
    def has_work(self) -> bool:
        """Whether a report is due, or something can be written. vLLM makes steps as long as this is
        true, so calls that have passed their deadline do not count: they may never return."""
        if self._saves or len(self._stores) > len(self._lost):
            return True
        can_write = len(self.waiting) and len(self._stores) < _MAX_STORES
        return bool(can_write or any(not load.has_ended for load in self._loads.values()))

    def match(self, name: str, hashes: list[bytes], start: int) -> int | None:
        """Blocks that can be loaded after the first `start`; None while that is not known
        yet."""
        request = self._request(name)
        if request.saving or request.loading is not None or self._is_asking(request):
            return None
        match = self._cache.match(self._path(request, hashes))
        in_host = match.device_blocks
        base = max(in_host, start)
        if base >= len(hashes) or not self._config.has_storage:
            return max(in_host - start, 0)
        if request.found is None:
            if request.lookup is None:
                self._ask(request, hashes, base)
            if self._is_asking(request):
                return None
            request.found = 0
        # Storage was asked about blocks from a certain position on; earlier ones may have left
        # the host.
        end = request.asked_at + request.found if request.asked_at <= base else base
        room = max(self._cache.available_beside(match), 0)
        return max(min(max(end, base), base + room), in_host) - start

    def load(self, name: str, hashes: list[bytes], start: int, block_ids: list[int]) -> None:
        """Order to fill `block_ids`, which vLLM has for the blocks of `hashes` from `start`
        on."""
        request = self._request(name)
        path = self._path(request, hashes)
        self._release(request)
        lease = self._lease(request, path)
        in_host = max(lease.num_blocks - start, 0)
        first, missing = start + in_host, len(block_ids) - in_host
        slots = self._cache.take(missing, now=self._clock.now())
        if slots is None:
            # The tier is full of leased blocks: the worker reports these blocks as failed.
            slots = EMPTY
        number = self._next()
        self._loads[number] = _Load(request, path, slots, first)
        request.loading = number
        held = lease.slots[start:first].tolist()
        self._orders.loads.append(
            LoadOrder(
                number=number,
                request=name,
                block_ids=block_ids,
                slots=[*held, *slots.tolist()],
                num_host=in_host,
                hashes=hashes[first : first + len(slots)],
            )
        )

    def save(self, name: str, hashes: list[bytes], block_ids: list[int]) -> None:
        """Order to save new blocks: after this step those of `hashes` are computed, in
        `block_ids`."""
        request = self._request(name)
        if request.loading is not None or len(hashes) <= request.num_saved:
            return
        path = self._path(request, hashes)
        lease = self._lease(request, path)
        start = request.num_saved = max(request.num_saved, lease.num_blocks)
        count = min(len(hashes) - start, self._cache.num_available)
        slots = self._cache.take(count, now=self._clock.now()) if count > 0 else None
        if slots is None:
            return  # the tier is full of leased blocks; the next step tries again
        end = start + count
        request.num_saved = end
        number = self._next()
        request.saving[number] = _Save(path, slots, hashes[:end])
        self._saves[number] = request
        self._orders.saves.append(SaveOrder(number, block_ids[start:end], slots.tolist()))

    def num_saved(self, name: str) -> int:
        """Leading blocks of the request that are in the host tier or on their way there."""
        request = self._requests.get(name)
        return 0 if request is None else request.num_saved

    def finish(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        """Note that vLLM has finished or aborted the request."""
        request = self._requests.get(name)
        if request is not None:
            request.finished = FinishedRequest(prompt_tokens, output_tokens)
            self._uses.record(request.keys)
            self._settle(request)

    def take_orders(self) -> StepOrders:
        """The orders that the workers start with this step."""
        self._start_stores()
        orders, self._orders = self._orders, StepOrders()
        return orders

    def receive(self, report: RankReport) -> None:
        """Apply a report of the ranks about orders that ended."""
        for number, ends in report.ended.items():
            known = self._reports.setdefault(number, [])
            known += ends
            if sum(one.is_quiet for one in known) == self._config.num_ranks:
                del self._reports[number]
                self._end(number, min(one.num_blocks for one in known), quiet=True)
            elif not all(one.is_quiet for one in ends):
                self._end(number, 0, quiet=False)

    def reset(self) -> None:
        """Forget all blocks of the host tier; storage keeps its blocks."""
        self.waiting.clear()
        self._cache.reset()

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self._cache.check()
        self.waiting.check()
        assert len(self._stores) <= _MAX_STORES
        assert self._lost <= set(self._stores)
        assert set(self._loads) >= {r.loading for r in self._requests.values() if r.loading}

    def _request(self, name: str) -> _Running:
        return self._requests.setdefault(name, _Running(name))

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _path(self, request: _Running, hashes: list[bytes]) -> TokenPath:
        keys = request.keys
        keys += storage_keys(self._config.identity, hashes[len(keys) :])
        return key_path(keys[: len(hashes)], self._config.block_tokens)

    def _ask(self, request: _Running, hashes: list[bytes], start: int) -> None:
        request.lookup = self._next()
        request.asked_at, request.asked_s = start, self._clock.now()
        self._lookups[request.lookup] = request
        self._orders.lookups.append(LookupOrder(request.lookup, hashes[start:]))

    def _is_asking(self, request: _Running) -> bool:
        """Whether storage may still answer. vLLM asks in every step, so this is cheap."""
        waits = request.lookup is not None and request.found is None
        return waits and self._clock.now() - request.asked_s < self._config.lookup_timeout_s

    def _lease(self, request: _Running, path: TokenPath) -> Lease:
        """A lease on the blocks of `path` in the host tier; the request's own lease, if it has
        one."""
        if request.lease is None:
            now, match = self._clock.now(), self._cache.match(path)
            request.lease = self._cache.lease(match, owner=RequestId(request.name), now=now)
        return request.lease

    def _release(self, request: _Running) -> None:
        lease, request.lease = request.lease, None
        request.num_saved = 0
        if lease is not None:
            self._cache.release(lease, now=self._clock.now(), finished=request.finished)

    def _end(self, number: int, num_blocks: int, *, quiet: bool) -> None:
        if number in self._lookups:
            request = self._lookups.pop(number)
            request.found, request.lookup = num_blocks, None
        elif number in self._loads:
            self._end_load(number, num_blocks, quiet=quiet)
        elif number in self._saves:
            self._end_save(number)
        elif number in self._stores and quiet:
            self._lost.discard(number)
            self._cache.release(self._stores.pop(number), now=self._clock.now())
        elif number in self._stores:
            self._lost.add(number)

    def _end_load(self, number: int, num_blocks: int, *, quiet: bool) -> None:
        load = self._loads[number]
        if not load.has_ended:
            load.has_ended = True
            load.request.loading = None
            if num_blocks < len(load.slots):
                load.request.found = 0  # a block that could not be read is not tried again
            self._commit_loaded(load, num_blocks)
        if quiet:
            del self._loads[number]
            self._cache.free(load.slots)
        self._settle(load.request)

    def _commit_loaded(self, load: _Load, num_blocks: int) -> None:
        """Make the blocks that were read findable; the load keeps the other slots."""
        lease = load.request.lease
        if not num_blocks or lease is None or lease.num_blocks != load.start:
            return
        read, rest = load.slots[:num_blocks], load.slots[num_blocks:]
        surplus = self._cache.commit(lease, load.path, read, now=self._clock.now())
        load.slots = np.concatenate((surplus, rest))
        load.request.num_saved = lease.num_blocks

    def _end_save(self, number: int) -> None:
        request = self._saves.pop(number)
        save, lease = request.saving.pop(number), request.lease
        assert lease is not None, "a request that saves has a lease"
        start = lease.num_blocks
        surplus = self._cache.commit(lease, save.path, save.slots, now=self._clock.now())
        self._cache.free(surplus)
        if self._config.has_storage:
            self._queue_stores(save, start, request.keys)
        self._settle(request)

    def _queue_stores(self, save: _Save, start: int, keys: list[BlockKey]) -> None:
        end = len(save.hashes)
        starts = range(start, end, WRITE_BLOCKS)
        slices = [(at, min(at + WRITE_BLOCKS, end)) for at in starts]
        ranks = self._uses.rank(keys, slices)
        for (at, until), (level, uses) in zip(slices, ranks, strict=True):
            self.waiting.add(
                (save.path, at, save.hashes[at:until]),
                count=until - at,
                rank=WriteRank(level, uses, end, at),
            )

    def _start_stores(self) -> None:
        while len(self._stores) < _MAX_STORES:
            item = self.waiting.pop()
            if item is None:
                return
            path, start, hashes = item
            now, match = self._clock.now(), self._cache.match(path, start + len(hashes))
            lease = self._cache.lease(match, owner=RequestId(""), now=now, counted=False)
            slots = lease.slots[start:].tolist()
            if not slots:  # evicted before it was written
                self._cache.release(lease, now=now)
                continue
            number = self._next()
            self._stores[number] = lease
            self._orders.stores.append(StoreOrder(number, slots, hashes[: len(slots)]))

    def _settle(self, request: _Running) -> None:
        """Forget a finished request when none of its orders runs."""
        if request.finished is None or request.loading is not None or request.saving:
            return
        self._requests.pop(request.name, None)
        if request.lookup is not None:
            self._lookups.pop(request.lookup, None)
        self._release(request)
