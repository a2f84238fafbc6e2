"""Loads in flight, layer by layer: the copier tells the runner which layers have arrived.

A load is copied in a few groups of layers, with an event after each. The runner makes the
device wait for a group's event before it attends in the first layer of the group. An event has
an effect only after it is recorded, so the runner's thread waits for that, in C. This wait is
short: events are recorded when the copies are queued, long before they run.
"""

from collections.abc import Iterable
from threading import Condition

import torch

from headwater.types import JobId


class Arrival:
    """One load: an event for each group of layers, recorded one after another."""

    def __init__(self, num_layers: int, num_groups: int) -> None:
        self.group_layers = -(-num_layers // num_groups)
        self._events: list[torch.cuda.Event] = []
        self._changed = Condition()
        self._ended = False

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record that the next group is queued on `stream`. Called by the copier."""
        event = torch.cuda.Event()
        event.record(stream)
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def end(self) -> None:
        """Record that no more layers follow: the copy is complete or has failed."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def order(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for `layer`; layers that are not copied need no wait."""
        if layer % self.group_layers:
            return
        group = layer // self.group_layers
        with self._changed:
            while len(self._events) <= group and not self._ended:
                self._changed.wait()
            event = self._events[group] if group < len(self._events) else None
        if event is not None:
            stream.wait_event(event)


class Arrivals:
    """The loads that a step may read before they have ended, by job."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._by_job: dict[JobId, Arrival] = {}

    def expect(self, job: JobId, num_groups: int) -> Arrival:
        """Register a load that begins. Called by the loop's thread."""
        arrival = Arrival(self._num_layers, num_groups)
        self._by_job[job] = arrival
        return arrival

    def forget(self, job: JobId) -> None:
        """Forget a load that has ended: streams do not wait for it any more."""
        self._by_job.pop(job, None)

    def of(self, jobs: Iterable[JobId]) -> list[Arrival]:
        """Those of `jobs` that have not ended."""
        found = (self._by_job.get(job) for job in jobs)
        return [arrival for arrival in found if arrival is not None]
