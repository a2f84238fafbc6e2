"""Sessions that clients have named: where each ends in the tree, and what was said of it.

Hints are soft. Nothing needs them, a wrong one costs a miss, and all of it is bounded: sessions
that are remembered, and the blocks that one tenant may ask to be kept for later. A tenant is a
namespace of the cache, so nobody speaks of another's sessions.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, TypeAlias

from headwater.cache.keys import Namespace
from headwater.cache.lease import Lease
from headwater.cache.node import Node
from headwater.cache.policy import FinishedRequest, Hint

MAX_SESSIONS = 16_384
MAX_OF_TENANT = 4_096
"""Sessions that are remembered; the ones not heard of for longest are forgotten first."""

_MIN_SWEEP = 1_024

_PENDING_S = 300.0
"""How long a session that is pending counts towards its tenant's budget."""

_GRACE_S = 30.0
"""And one that is expected: twice as long as it was said, and this."""


class SessionStats(NamedTuple):
    """How many sessions are remembered, and what became of hints, ever."""

    num_sessions: int = 0
    promised_blocks: int = 0
    hints: Mapping[str, int] = {}
    """By outcome: `closed`, `granted`, `over_budget`."""


class SessionEntry:
    """One session: the node its last request ended with, and what is promised to it."""

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
        """Leading blocks that others had computed when it began: not its own to close."""
        self.hint: Hint | None = None
        """Said with its last request, as far as it was granted."""
        self.promised = 0
        """Blocks it has of its tenant's budget, until `until_s`."""
        self.until_s = 0.0
        self.due_s: float | None = None
        """When it is expected back, if it said so."""


class _Tenant:
    __slots__ = ("names", "promised")

    def __init__(self) -> None:
        self.names: OrderedDict[str, None] = OrderedDict()
        self.promised = 0


_Timer: TypeAlias = tuple[float, int, SessionEntry]


class Sessions:
    """Remembers sessions by tenant and name, and grants promises within the budget."""

    def __init__(self, budget_blocks: int) -> None:
        self._budget = budget_blocks
        self._known: OrderedDict[tuple[Namespace, str], SessionEntry] = OrderedDict()
        self._tenants: dict[Namespace, _Tenant] = {}
        self._numbers = count()
        self._ends: list[_Timer] = []
        self._dues: list[_Timer] = []
        """When promises end, and when sessions are expected; some are so no longer."""
        self._promised = 0
        self._hints: Counter[str] = Counter()

    def note(self, lease: Lease, turn: FinishedRequest, now: float) -> SessionEntry:
        """A request of a session ends with `lease`; the session, with its hint as granted."""
        known = self._find(lease, turn.session)
        self._settle(known)
        known.node, known.hint = lease.node, turn.hint
        if turn.hint is None:
            return known
        if turn.hint.closed:
            self._hints["closed"] += 1
            self._forget(known)
        elif self._grant(known, turn.hint, lease.num_blocks - known.num_shared, now):
            self._hints["granted"] += 1
        else:
            self._hints["over_budget"] += 1
            known.hint = None
        return known

    def close(self, namespace: Namespace, name: str) -> SessionEntry | None:
        """The session is over: forget it. None when it is not known."""
        known = self._known.get((namespace, name))
        if known is not None:
            self._hints["closed"] += 1
            self._forget(known)
        return known

    def take_due(self, until_s: float) -> list[SessionEntry]:
        """The sessions that are expected before `until_s`, each once, earliest first."""
        due = []
        while self._dues and self._dues[0][0] <= until_s:
            due_s, _, known = heappop(self._dues)
            if known.due_s == due_s:
                due.append(known)
        return due

    @property
    def next_due_s(self) -> float | None:
        """When the next session is expected; None when none is."""
        while self._dues and self._dues[0][2].due_s != self._dues[0][0]:
            heappop(self._dues)
        return self._dues[0][0] if self._dues else None

    def clear(self) -> None:
        """Forget all of them."""
        for known in list(self._known.values()):
            self._forget(known)

    def stats(self) -> SessionStats:
        """The counts now."""
        return SessionStats(len(self._known), self._promised, dict(self._hints))

    def _find(self, lease: Lease, name: str) -> SessionEntry:
        """The session of this name, the most recent from now on; made where there is none."""
        key = lease.namespace, name
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._tenants[lease.namespace].names.move_to_end(name)
            return known
        tenant = self._tenants.setdefault(lease.namespace, _Tenant())
        if len(tenant.names) >= MAX_OF_TENANT:
            self._forget(self._known[lease.namespace, next(iter(tenant.names))])
        elif len(self._known) >= MAX_SESSIONS:
            self._forget(next(iter(self._known.values())))
        tenant = self._tenants.setdefault(lease.namespace, tenant)
        known = SessionEntry(lease.namespace, name, lease.node, len(lease.slots))
        self._known[key] = known
        tenant.names[name] = None
        return known

    def _grant(self, known: SessionEntry, hint: Hint, num_blocks: int, now: float) -> bool:
        """Promise to keep `num_blocks`, if that is within its tenant's budget."""
        while self._ends and self._ends[0][0] <= now:
            until_s, _, over = heappop(self._ends)
            if over.until_s == until_s:
                self._settle(over)
        self._sweep()
        tenant = self._tenants[known.namespace]
        if tenant.promised + num_blocks > self._budget:
            return False
        tenant.promised += num_blocks
        self._promised += num_blocks
        known.promised = num_blocks
        in_s = hint.returns_in_s
        known.until_s = now + (_PENDING_S if in_s is None else 2 * in_s + _GRACE_S)
        heappush(self._ends, (known.until_s, next(self._numbers), known))
        if in_s is not None:
            known.due_s = now + in_s
            heappush(self._dues, (known.due_s, next(self._numbers), known))
        return True

    def _sweep(self) -> None:
        """Forget timers that stand for nothing any more, when they are many."""
        if len(self._ends) > _MIN_SWEEP + 2 * len(self._known):
            self._ends = [timer for timer in self._ends if timer[2].until_s == timer[0]]
            self._dues = [timer for timer in self._dues if timer[2].due_s == timer[0]]
            heapify(self._ends)
            heapify(self._dues)

    def _settle(self, known: SessionEntry) -> None:
        """Nothing is promised to it any more, and it is not expected."""
        if known.promised:
            self._tenants[known.namespace].promised -= known.promised
            self._promised -= known.promised
        known.promised, known.until_s, known.due_s = 0, 0.0, None

    def _forget(self, known: SessionEntry) -> None:
        self._settle(known)
        del self._known[known.namespace, known.name]
        tenant = self._tenants[known.namespace]
        del tenant.names[known.name]
        if not tenant.names:
            del self._tenants[known.namespace]
