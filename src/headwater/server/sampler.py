"""Samples the totals of a server for its history. One worker of a server runs it.

A sample that fails, because the engine is busy or being replaced, is left out: the charts then
have a gap.
"""

import asyncio
import contextlib
from collections import deque

from headwater.errors import HeadwaterError
from headwater.metrics.history import INTERVAL_S, MINUTE_S, HistoryPoint
from headwater.metrics.rates import Answer, rates_between
from headwater.server.service import Service
from headwater.server.stats import counters


class HistorySampler:
    """Adds a point to the history of `service` at each interval."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._answers: deque[Answer] = deque(maxlen=int(MINUTE_S / INTERVAL_S) + 1)
        """Answers of `/stats` in the last minute, oldest first."""

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            with contextlib.suppress(HeadwaterError):
                await self.sample()
            await asyncio.sleep(INTERVAL_S)

    async def sample(self) -> None:
        """Add the point from the last sample to now; the first sample adds none."""
        service, answers = self._service, self._answers
        now = await counters(service)
        before = answers[-1] if answers else now
        answers.append(now)
        rates, minute = rates_between(before, now), rates_between(answers[0], now)
        if rates is None or minute is None:
            return
        cache = now["cache"]
        service.last_minute = minute
        service.shared.add_point(
            HistoryPoint(
                unix_s=service.unix_s(),
                elapsed_s=now["uptime_s"] - before["uptime_s"],
                rates=rates,
                minute_ttft=minute.ttft,
                minute_itl=minute.itl,
                running=cache["num_running"],
                waiting=cache["num_waiting"],
                duplicates=cache["num_duplicates"],
                unwritten=cache["num_unwritten"],
            )
        )
