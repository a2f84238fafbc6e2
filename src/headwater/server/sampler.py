"""Samples the totals of a server for its history. One worker of a server runs it.

A sample that fails, because the engine is busy or being replaced, is left out: the charts then
have a gap.
"""

import asyncio
import contextlib

from headwater.errors import HeadwaterError
from headwater.metrics.history import INTERVAL_S, HistoryPoint
from headwater.metrics.rates import Answer, rates_between
from headwater.server.service import Service
from headwater.server.stats import counters


class HistorySampler:
    """Adds a point to the history of `service` at each interval."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._before: Answer | None = None

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            with contextlib.suppress(HeadwaterError):
                await self.sample()
            await asyncio.sleep(INTERVAL_S)

    async def sample(self) -> None:
        """Add the point from the last sample to now; the first sample adds none."""
        service = self._service
        before, now = self._before, await counters(service)
        self._before = now
        rates = None if before is None else rates_between(before, now)
        if before is None or rates is None:
            return
        cache = now["cache"]
        point = HistoryPoint(
            unix_s=service.unix_s(),
            elapsed_s=now["uptime_s"] - before["uptime_s"],
            rates=rates,
            running=cache["num_running"],
            waiting=cache["num_waiting"],
            duplicates=cache["num_duplicates"],
            unwritten=cache["num_unwritten"],
        )
        service.last_point = point
        service.shared.add_point(point)
