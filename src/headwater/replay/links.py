"""Links whose copies share the bandwidth.

The copies on a link share its bandwidth evenly at every moment: a new copy slows the others,
and a copy that ends speeds them up. The arithmetic is in bytes per copy: `_served` grows by
bandwidth / copies each second, and all bytes of a copy are carried when `_served` has grown by
the copy's bytes since the copy began. So each event costs one heap operation for any number of
copies on the link.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from headwater.replay.cost import LinkCost


@dataclass(frozen=True, slots=True)
class Delivery:
    """A copy that ended."""

    end_s: float
    busy_s: float
    """Seconds from the time at which the link began to carry it; the wait in line does not
    count."""


Arrive = Callable[[Delivery], None]
"""Called once, when the bytes of the copy have arrived."""


class SharedLink:
    """One link. The times given to it never decrease."""

    def __init__(self, cost: LinkCost) -> None:
        self.cost = cost
        self.num_bytes = 0
        """Bytes carried, or being carried, since the beginning."""
        self.busy_s = 0.0
        """Seconds in which at least one copy was on it."""
        self.busy_until_s = 0.0
        """When a copy was last on it."""
        self._now_s = 0.0
        self._served = 0.0
        """Bytes carried for a copy that has been moving since the link was last idle."""
        self._moving: list[tuple[float, int, float, Arrive]] = []
        """A heap of copies, by the value of `_served` at which all bytes of each are carried."""
        self._line: deque[tuple[int, Arrive]] = deque()
        self._arriving: deque[tuple[float, float, Arrive]] = deque()
        """Copies whose bytes have been carried; they arrive after the latency, in order of
        time."""
        self._num_begun = 0

    @property
    def is_busy(self) -> bool:
        """Whether a copy is moving."""
        return bool(self._moving)

    def start(self, num_bytes: int, arrive: Arrive, *, now: float) -> None:
        """Start to copy, or wait in line."""
        self._advance(now)
        self.num_bytes += num_bytes
        most = self.cost.max_jobs
        if most is not None and len(self._moving) >= most:
            self._line.append((num_bytes, arrive))
        else:
            self._begin(num_bytes, arrive)

    def next_s(self) -> float:
        """When the next copy ends if no other starts; infinite if there is none."""
        arrival_s = self._arriving[0][0] if self._arriving else inf
        if not self._moving:
            return arrival_s
        return min(arrival_s, self._through_s() + self.cost.latency_s)

    def deliver(self, now: float) -> None:
        """Report every copy that arrived by `now`, in order of time."""
        self._advance(now)
        while self._arriving and self._arriving[0][0] <= now:
            end_s, began_s, arrive = self._arriving.popleft()
            arrive(Delivery(end_s, end_s - began_s))

    def _begin(self, num_bytes: int, arrive: Arrive) -> None:
        self._num_begun += 1
        end = self._served + num_bytes
        heappush(self._moving, (end, self._num_begun, self._now_s, arrive))

    def _through_s(self) -> float:
        """When all bytes of the first moving copy are carried, if no other copy starts or
        ends."""
        left = max(self._moving[0][0] - self._served, 0.0)
        return self._now_s + left * len(self._moving) / self.cost.bytes_s

    def _advance(self, now: float) -> None:
        while self._moving and (through_s := self._through_s()) <= now:
            end, _, began_s, arrive = heappop(self._moving)
            self.busy_s += through_s - self._now_s
            self._now_s, self._served = through_s, end
            self.busy_until_s = through_s
            self._arriving.append((through_s + self.cost.latency_s, began_s, arrive))
            if self._line:
                self._begin(*self._line.popleft())
        if self._moving:
            self._served += (now - self._now_s) * self.cost.bytes_s / len(self._moving)
            self.busy_s += now - self._now_s
            self.busy_until_s = now
        else:
            self._served = 0.0
        self._now_s = max(self._now_s, now)
