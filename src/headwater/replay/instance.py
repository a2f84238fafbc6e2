"""One simulated engine: the real loop, scheduler, cache and mover, with simulated executors."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf

import numpy as np

from headwater.cache import TieredCache, TokenPath
from headwater.clock import VirtualClock
from headwater.disagg.handoff.controller import HandoffController
from headwater.engine.core import EngineCore
from headwater.errors import RequestError
from headwater.replay.devices import SimCopier, SimRunner, SimStorage, SimStore
from headwater.replay.links import SharedLink
from headwater.replay.network import SimFabric, make_handoffs
from headwater.replay.request import SimRequest, Work
from headwater.replay.settings import SimConfig
from headwater.replay.time_series import Row, Times, TimeSeries
from headwater.replay.trace import TraceRequest
from headwater.scheduler.request import Request, SamplingParams, SequenceOutput
from headwater.scheduler.scheduler import Scheduler
from headwater.transfer.mover import Mover
from headwater.types import RequestId, Tier

_MAX_WAITING = 1024
"""Maximum number of requests in the engine's own queue. Further requests wait outside the
engine, as in a server, and without their tokens: requests so far back in the queue could not be
admitted anyway."""


class SimInstance:
    """A simulated engine with its own clock, which shows the end of its last step."""

    def __init__(
        self,
        number: int,
        config: SimConfig,
        links: Mapping[str, SharedLink],
        store: SimStore | None,
        times: Times,
        fabric: SimFabric | None,
    ) -> None:
        self.role = config.role(number)
        self.name = f"{self.role}-{number}"
        self.work = Work()
        self.clock = VirtualClock()
        self.cache = TieredCache(config.cache())
        self.scheduler = Scheduler(config.scheduler(), self.cache)
        self.runner = SimRunner(config.machine.step, self.clock, links)
        self.mover = _mover(config, links, store, self.clock)
        self.core = EngineCore(self.scheduler, self.runner, self.clock, self.mover)
        self.handoffs: HandoffController | None = None
        if fabric is not None:
            fabric.enter(self.name, self.core.completions.post)
            self.handoffs = make_handoffs(
                fabric,
                self.name,
                self.scheduler,
                self.clock,
                links,
                block_bytes=config.block_bytes,
                accepts=self.role == "prefill",
            )
            self.core.join(self.handoffs)
        self.served: list[SimRequest] = []
        """All requests of this instance, in order of arrival."""
        self.samples = TimeSeries(times)
        """Samples over time: waiting, running, device blocks in use, device blocks held by
        requests, host blocks in use."""
        self._fast_forward = config.fast_forward
        self._line: deque[tuple[RequestId, TraceRequest, str]] = deque()
        self._alive: dict[RequestId, SimRequest] = {}
        self.num_turns = 0
        """Turns of the real loop, not counting fast-forwarded steps."""

    @property
    def num_alive(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._alive)

    def num_found(self, path: TokenPath) -> int:
        """Leading tokens of `path` that are cached here, on the device or the host."""
        match = self.cache.match(path)
        return (match.device_blocks + match.host_blocks) * self.cache.block_tokens

    def give(self, number: int, request: TraceRequest, now: float, served: SimRequest) -> None:
        """Accept a request that arrives at `now`. If another instance computes its prompt,
        `served.prefill` names that instance."""
        if not self.core.has_work:
            self.wake(now)
        name = RequestId(str(number))
        self.served.append(served)
        self._alive[name] = served
        self._line.append((name, request, served.prefill))
        self._fill()

    def wake(self, now: float) -> None:
        """Set the clock to `now`, the time of an event for this instance, unless the clock is
        already later."""
        if self.clock.now() < now:
            self.samples.fill(now, self._row)
            self.clock.move_to(now)

    def ready_s(self) -> float:
        """When the next turn begins if no event comes; infinite if never."""
        if self.core.has_work:
            return self.clock.now()
        return max(self._deadline_s(), self.clock.now())

    def turn(self, until_s: float) -> int:
        """Run the next turn: one step, or all steps before `until_s` that decide nothing.
        Returns the number of requests that ended."""
        if self._fast_forward and self._skip_steps(until_s):
            self.samples.fill(self.clock.now(), self._row)
            return 0
        self.num_turns += 1
        outputs = self.core.step()
        now = self.clock.now()
        self.samples.fill(now, self._row)
        ended = self._take_in(outputs, now)
        if self._line:
            self._fill()
        return ended

    def _take_in(self, outputs: Sequence[SequenceOutput], now: float) -> int:
        """Record the outputs of a step; return how many requests ended."""
        ended = 0
        for output in outputs:
            served = self._alive[output.request_id]
            if output.usage is not None:
                served.usage = output.usage
            served.note(len(output.tokens), now)
            if output.finish_reason is not None:
                served.finished = True
                del self._alive[output.request_id]
                self.runner.expected.pop(output.request_id, None)
                ended += 1
        return ended

    def _row(self) -> Row:
        stats = self.scheduler.stats()
        device = self.cache.pool_stats(Tier.DEVICE)
        host = self.cache.pool_stats(Tier.HOST)
        return (
            stats.num_waiting + len(self._line),
            stats.num_running,
            device.total - device.free,
            device.total - self.cache.num_available,
            host.total - host.free,
        )

    def _skip_steps(self, until_s: float) -> int:
        """Fast-forward steps that decide nothing, if the next one is such a step; return their
        number."""
        if self.mover.has_news(self.clock.now()):
            return 0
        num_steps, quiet_s, decoding = self.scheduler.decode_only_steps()
        if num_steps < 2:
            return 0
        until_s = min(until_s, quiet_s, self._deadline_s())
        began_s = self.clock.now()
        ends, tokens = self.runner.stretch(decoding, num_steps, until_s)
        if not len(ends):
            return 0
        if self.scheduler.config.itl is not None:
            self.core.note_decode_steps(
                len(decoding),
                [later - earlier for earlier, later in pairwise([began_s, *ends.tolist()])],
            )
        times = ends.tolist()
        gaps = np.array([later - earlier for earlier, later in pairwise(times)]).tobytes()
        self.scheduler.fast_forward(tokens)
        for sequence in decoding:
            served = self._alive[sequence.request_id]
            served.note(1, times[0])
            served.gaps_s.frombytes(gaps)
            served.num_output += len(times) - 1
            served.last_s = times[-1]
        return len(times)

    def _deadline_s(self) -> float:
        """The next deadline of a copy, a wait or a hand-off; infinite if there is none."""
        peers = None if self.handoffs is None else self.handoffs.wake_s
        ends = (self.mover.wake_s, self.scheduler.wake_s, peers)
        return min((end for end in ends if end is not None), default=inf)

    def _fill(self) -> None:
        """Give waiting requests to the engine while its own queue is short."""
        room = _MAX_WAITING - self.scheduler.stats().num_waiting
        while self._line and room > 0:
            name, request, prefill = self._line.popleft()
            served = self._alive[name]
            try:
                self.core.add(_as_request(name, request, prefill))
                known = request.known_output()
                if known is not None:
                    self.runner.expected[name] = known
                room -= 1
            except RequestError as error:
                served.refused = type(error).__name__
                del self._alive[name]


def _as_request(name: RequestId, request: TraceRequest, prefill: str) -> Request:
    return Request(
        request_id=name,
        tokens=request.prompt(),
        params=SamplingParams(max_tokens=max(request.output_length, 1), ignore_eos=True),
        arrival_s=request.arrival_s,
        prefill=prefill,
        session_id=request.session,
        cache_hint=request.hint,
    )


def _mover(
    config: SimConfig,
    links: Mapping[str, SharedLink],
    store: SimStore | None,
    clock: VirtualClock,
) -> Mover:
    if not config.host_gib:
        return Mover()
    copier = SimCopier(links, clock, config.block_bytes)
    storage = None
    if store is not None:
        storage = SimStorage(store, links, clock, config.block_bytes)
    return Mover(copier, storage, block_bytes=config.block_bytes)
