"""One process of a cluster over all its starts, and when it is started again. Pure."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from headwater.cluster.host import RunningProcess
from headwater.cluster.processes import ProcessSpec
from headwater.cluster.spec import RestartSpec


class MemberState(Enum):
    """The state of a member."""

    WAITING = "waiting"
    """No node has room for it; it starts as soon as one has."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """It was asked to finish its requests and end."""

    RESTARTING = "restarting"
    """It died and will be started again later."""

    STOPPED = "stopped"
    """It was drained by an operator and stays down."""

    FAILED = "failed"
    """It died too often and stays down."""


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A router or an instance, by name."""

    process: ProcessSpec
    state: MemberState = MemberState.STARTING
    running: RunningProcess | None = None
    run: int = 0
    """Number of starts."""

    url: str = ""
    was_ready: bool = False
    gpus: tuple[int, ...] = ()
    extra: tuple[str, ...] = ()
    """Further command line arguments."""

    due_s: float | None = None
    """When it is started again."""

    kill_s: float | None = None
    """When it is killed if it has not ended by then."""

    leaves: bool = False
    """It is removed from the cluster when it has ended."""

    starts_again: bool = False
    """It is started again as soon as it has ended; this does not count as a death."""

    last_exit: str = ""
    deaths: deque[float] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return self.process.name

    def next_delay_s(self, policy: RestartSpec, now: float) -> float | None:
        """Count a death at `now`. Returns the seconds until the next start, or None if it died
        too often."""
        while self.deaths and self.deaths[0] < now - policy.within_s:
            self.deaths.popleft()
        self.deaths.append(now)
        if len(self.deaths) > policy.max_restarts:
            return None
        return min(policy.first_delay_s * (1 << (len(self.deaths) - 1)), policy.max_delay_s)

    def note_placement(self, *, waits: bool) -> None:
        """Record that the instance waits for a node with room, or has one again."""
        before, after = MemberState.WAITING, MemberState.STARTING
        if waits:
            before, after = after, before
        if self.state is before:
            self.state = after

    def describe(self) -> dict[str, Any]:
        """A row of `headwater status`."""
        return {
            "name": self.name,
            "role": self.process.role,
            "state": self.state.value,
            "url": self.url,
            "place": "" if self.running is None else self.running.place,
            "restarts": max(self.run - 1, 0),
            "last_exit": self.last_exit,
        }


def can_serve(members: Collection[Member]) -> bool:
    """Whether all members are ready. A member that waits for a node is not counted if another
    one with its role is ready."""
    ready = {m.process.role for m in members if m.state is MemberState.READY}
    waiting = {m.process.role for m in members if m.state is MemberState.WAITING}
    counted = (MemberState.READY, MemberState.WAITING)
    return waiting <= ready and all(m.state in counted for m in members)
