"""Sessions named by clients: where each one ends in the tree, and its hints.

A hint is optional and a wrong one costs a miss at most. Everything is bounded: the number of
remembered sessions, and the blocks that one tenant may ask to keep. A tenant is a namespace of
the cache, so a client can only refer to sessions of its own tenant. An entry refers to a node
that is in the tree: when the node is removed, the entry moves to its parent.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, TypeAlias

from headwater.cache.keys import Namespace
from headwater.cache.node import Node
from headwater.cache.plan import Lease
from headwater.cache.policy import FinishedRequest, Hint

MAX_SESSIONS = 16_384
MAX_OF_TENANT = 4_096
"""Limits of remembered sessions; the least recently used is forgotten first."""

_MIN_OUTDATED_TIMERS = 1_024

_PENDING_S = 300.0
"""How long a pending session counts towards the budget of its tenant."""

_GRACE_S = 30.0
"""A session with a return time counts for twice the announced time plus this."""


class SessionStats(NamedTuple):
    """How many sessions are remembered, and what happened to hints since the start."""

    num_sessions: int = 0
    promised_blocks: int = 0
    hints: Mapping[str, int] = {}
    """Number of hints by outcome: `closed`, `granted`, `over_budget`."""


class SessionEntry:
    """One session: the node with which its last request ended, and its granted hint."""

    __slots__ = (
        "due_s",
        "hint",
        "name",
        "namespace",
        "node",
        "num_shared",
        "promised",
        "until_s",
    )

    def __init__(self, namespace: Namespace, name: str, node: Node, num_shared: int) -> None:
        self.namespace = namespace
        self.name = name
        self.node = node
        self.num_shared = num_shared
        """Leading blocks that were cached when the session began. `close` does not affect them."""
        self.hint: Hint | None = None
        """The hint of its last request; None if there was none or it was not granted."""
        self.promised = 0
        """Blocks of the tenant's budget that the session uses until `until_s`."""
        self.until_s = 0.0
        self.due_s: float | None = None
        """When its next request is expected, if the client said so."""


class _Tenant:
    __slots__ = ("names", "promised")

    def __init__(self) -> None:
        self.names: OrderedDict[str, None] = OrderedDict()
        self.promised = 0


_Timer: TypeAlias = tuple[float, int, SessionEntry]


class Sessions:
    """Remembers sessions by tenant and name, and grants hints within the budget."""

    def __init__(self, budget_blocks: int) -> None:
        self._budget = budget_blocks
        self._entries: OrderedDict[tuple[Namespace, str], SessionEntry] = OrderedDict()
        self._tenants: dict[Namespace, _Tenant] = {}
        self._numbers = count()
        self._ends: list[_Timer] = []
        self._dues: list[_Timer] = []
        """Two heaps: the times when promises end, and the times when sessions are expected. An
        entry is outdated, and skipped, when its session has another time now."""
        self._promised = 0
        self._hints: Counter[str] = Counter()

    def record(self, lease: Lease, finished: FinishedRequest, now: float) -> SessionEntry:
        """A request of a session ends with `lease`; return the session with its granted hint."""
        entry = self._find_or_add(lease, finished.session)
        self._end_promise(entry)
        _leave_node(entry)
        entry.node, entry.hint = lease.node, finished.hint
        if finished.hint is not None and finished.hint.closed:
            self._hints["closed"] += 1
            self._forget(entry)
            return entry
        _enter_node(entry)
        if finished.hint is None:
            return entry
        num_own = lease.num_blocks - entry.num_shared
        if self._grant(entry, finished.hint, num_own, now):
            self._hints["granted"] += 1
        else:
            self._hints["over_budget"] += 1
            entry.hint = None
        return entry

    def close(self, namespace: Namespace, name: str) -> SessionEntry | None:
        """Forget a session that is over, and return it; None when it is not known."""
        entry = self._entries.get((namespace, name))
        if entry is not None:
            self._hints["closed"] += 1
            self._forget(entry)
        return entry

    def take_due(self, until_s: float) -> list[SessionEntry]:
        """The sessions expected before `until_s`, earliest first; each is returned once."""
        due = []
        while self._dues and self._dues[0][0] <= until_s:
            due_s, _, entry = heappop(self._dues)
            if entry.due_s == due_s:
                due.append(entry)
        return due

    @property
    def next_due_s(self) -> float | None:
        """When the next session is expected; None when none is expected."""
        while self._dues and self._dues[0][2].due_s != self._dues[0][0]:
            heappop(self._dues)
        return self._dues[0][0] if self._dues else None

    def clear(self) -> None:
        """Forget all sessions."""
        for entry in list(self._entries.values()):
            self._forget(entry)

    def __iter__(self) -> Iterator[SessionEntry]:
        return iter(self._entries.values())

    def stats(self) -> SessionStats:
        """The counters now."""
        return SessionStats(len(self._entries), self._promised, dict(self._hints))

    def _find_or_add(self, lease: Lease, name: str) -> SessionEntry:
        """The session of this name, which becomes the most recent one; added if it is new."""
        key = lease.namespace, name
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self._tenants[lease.namespace].names.move_to_end(name)
            return entry
        tenant = self._tenants.setdefault(lease.namespace, _Tenant())
        if len(tenant.names) >= MAX_OF_TENANT:
            self._forget(self._entries[lease.namespace, next(iter(tenant.names))])
        elif len(self._entries) >= MAX_SESSIONS:
            self._forget(next(iter(self._entries.values())))
        tenant = self._tenants.setdefault(lease.namespace, tenant)
        entry = SessionEntry(lease.namespace, name, lease.node, len(lease.slots))
        self._entries[key] = entry
        tenant.names[name] = None
        return entry

    def _grant(self, entry: SessionEntry, hint: Hint, num_blocks: int, now: float) -> bool:
        """Promise to keep `num_blocks` blocks if the budget of the tenant allows it."""
        while self._ends and self._ends[0][0] <= now:
            until_s, _, over = heappop(self._ends)
            if over.until_s == until_s:
                self._end_promise(over)
        self._drop_outdated_timers()
        tenant = self._tenants[entry.namespace]
        if tenant.promised + num_blocks > self._budget:
            return False
        tenant.promised += num_blocks
        self._promised += num_blocks
        entry.promised = num_blocks
        in_s = hint.returns_in_s
        entry.until_s = now + (_PENDING_S if in_s is None else 2 * in_s + _GRACE_S)
        heappush(self._ends, (entry.until_s, next(self._numbers), entry))
        if in_s is not None:
            entry.due_s = now + in_s
            heappush(self._dues, (entry.due_s, next(self._numbers), entry))
        return True

    def _drop_outdated_timers(self) -> None:
        """Remove outdated timers when there are many."""
        if len(self._ends) > _MIN_OUTDATED_TIMERS + 2 * len(self._entries):
            self._ends = [timer for timer in self._ends if timer[2].until_s == timer[0]]
            self._dues = [timer for timer in self._dues if timer[2].due_s == timer[0]]
            heapify(self._ends)
            heapify(self._dues)

    def _end_promise(self, entry: SessionEntry) -> None:
        """Keep no blocks for this session because of a hint any more; it is not expected."""
        if entry.promised:
            self._tenants[entry.namespace].promised -= entry.promised
            self._promised -= entry.promised
        entry.promised, entry.until_s, entry.due_s = 0, 0.0, None

    def _forget(self, entry: SessionEntry) -> None:
        self._end_promise(entry)
        _leave_node(entry)
        del self._entries[entry.namespace, entry.name]
        tenant = self._tenants[entry.namespace]
        del tenant.names[entry.name]
        if not tenant.names:
            del self._tenants[entry.namespace]


def _enter_node(entry: SessionEntry) -> None:
    """Let the node know its session, so that the session moves on when the node is removed."""
    sessions = entry.node.sessions
    if sessions is None:
        entry.node.sessions = {entry}
    else:
        sessions.add(entry)


def _leave_node(entry: SessionEntry) -> None:
    sessions = entry.node.sessions
    if sessions is not None:
        sessions.discard(entry)
        if not sessions:
            entry.node.sessions = None
