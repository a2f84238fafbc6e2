"""Rank 0's view of the other ranks: sends messages to all, receives from each, and detects lost
ranks.

One thread per rank receives. All messages to ranks go through `tell`, under one lock, so all
ranks get the same messages in the same order.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from headwater.clock import Clock
from headwater.device.parallel.channel import RankChannel, RankFrame, RankMessage, close_files
from headwater.errors import ConfigError, EngineDead

log = logging.getLogger(__name__)

_BLAME_WITHIN_S = 2.0
"""Longest wait to find out which rank is lost, after a collective or a message has failed."""

OnCopied = Callable[[int, RankFrame], None]
"""Called at the end of a copy with the rank's number, from a receiving thread."""


class RankProcess(Protocol):
    """The process behind a rank."""

    def describe_end(self) -> str:
        """How the process ended, in a few words; waits a short time for the end."""

    def kill(self) -> None:
        """Kill the process, in any state. Calling it twice is safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of the other ranks."""

    number: int
    channel: RankChannel
    process: RankProcess


class Ranks:
    """All ranks except rank 0. Closing it ends them."""

    def __init__(self, ranks: Sequence[Rank], clock: Clock) -> None:
        self._ranks = tuple(ranks)
        self._clock = clock
        self.size = len(ranks) + 1
        self._telling = threading.Lock()
        self._heard: list[SimpleQueue[RankFrame | None]] = [SimpleQueue() for _ in ranks]
        """Answers by rank, for `hear`; None when the rank is lost."""
        self._failure: str | None = None
        self._lost = threading.Event()
        self._on_lost: Callable[[str], None] = _ignore
        self._on_copied: OnCopied = _drop_copied
        self._is_closing = False
        for at, rank in enumerate(self._ranks):
            threading.Thread(
                target=self._receive, args=(at, rank), name=f"rank-{rank.number}", daemon=True
            ).start()

    @property
    def failure(self) -> str | None:
        """Why the ranks cannot continue; None while all live."""
        return self._failure

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell` once with the reason, from any thread, when a rank is lost."""
        self._on_lost = tell
        if self._failure is not None:
            tell(self._failure)

    def on_copied(self, tell: OnCopied) -> None:
        """Call `tell` for every copy that ended."""
        self._on_copied = tell

    def tell(
        self, kind: RankMessage, payload: bytes | memoryview = b"", files: Sequence[int] = ()
    ) -> None:
        """Send the same message to every rank. Raises EngineDead if one is lost."""
        self.tell_each(kind, [payload] * len(self._ranks), files)

    def tell_each(
        self,
        kind: RankMessage,
        payloads: Sequence[bytes | memoryview],
        files: Sequence[int] = (),
    ) -> None:
        """Send each rank its own payload, in the order of ranks."""
        with self._telling:
            for rank, payload in zip(self._ranks, payloads, strict=True):
                try:
                    rank.channel.send(kind, payload, files)
                except OSError as exc:
                    raise self._untold(rank, exc) from exc

    def hear(self, kind: RankMessage, *, timeout_s: float) -> list[memoryview]:
        """One answer of this kind from every rank. Raises ConfigError with the reason if a rank
        failed or did not answer in time."""
        end_s = self._clock.now() + timeout_s
        payloads = []
        for rank, heard in zip(self._ranks, self._heard, strict=True):
            try:
                frame = heard.get(timeout=max(end_s - self._clock.now(), 0.01))
            except Empty:
                raise ConfigError(
                    f"rank {rank.number} of {self.size} did not answer {kind.name} within "
                    f"{timeout_s:g} s; its log shows its last step"
                ) from None
            if frame is None:
                raise ConfigError(f"{self._failure}")
            if frame.kind is not kind:
                raise ConfigError(
                    f"rank {rank.number} answered {frame.kind.name} instead of {kind.name}; "
                    f"its log may say why"
                )
            payloads.append(frame.payload)
        return payloads

    def cause_of(self, error: Exception) -> Exception:
        """The error to raise after a collective or a message failed: EngineDead with the reason
        of the lost rank, or `error` itself if all ranks live."""
        # This rank's call may fail before the thread has noticed the lost rank.
        self._lost.wait(_BLAME_WITHIN_S)
        return error if self._failure is None else EngineDead(self._failure)

    def close(self) -> None:
        """Kill every rank: they hold nothing that must be saved. Calling it twice is safe."""
        self._is_closing = True
        for rank in self._ranks:
            rank.channel.close()
        for rank in self._ranks:
            rank.process.kill()

    def _untold(self, rank: Rank, error: OSError) -> Exception:
        cause = self.cause_of(error)
        if cause is not error:
            return cause
        return EngineDead(f"rank {rank.number} of {self.size} takes no messages: {error}")

    def _receive(self, at: int, rank: Rank) -> None:
        """Receive until the rank is gone."""
        sentence = ""
        try:
            while True:
                frame = rank.channel.receive()
                close_files(frame.files)  # ranks send none
                if frame.kind is RankMessage.COPIED:
                    self._on_copied(rank.number, frame)
                elif frame.kind is RankMessage.FAILED:
                    sentence = bytes(frame.payload).decode(errors="replace")
                    break
                else:
                    self._heard[at].put(frame)
        except (OSError, ValueError) as exc:
            log.debug("rank %d: %s", rank.number, exc)
        if not self._is_closing:
            self._lose(rank, sentence)
        self._heard[at].put(None)

    def _lose(self, rank: Rank, sentence: str) -> None:
        if not sentence:
            sentence = f"its process {rank.process.describe_end()}"
        failure = f"rank {rank.number} of {self.size} failed: {sentence}"
        with self._telling:
            if self._failure is not None:
                return  # the first lost rank is the cause; the others follow
            self._failure = failure
        log.critical("a rank is lost: rank=%d size=%d: %s", rank.number, self.size, sentence)
        # The engine first: a step that waits for the event then finds that the engine has
        # failed.
        self._on_lost(failure)
        self._lost.set()


def _ignore(sentence: str) -> None:
    """Ignore a lost rank; used before the engine is connected."""


def _drop_copied(rank: int, frame: RankFrame) -> None:
    """Ignore the end of a copy; used before a copier exists and can start one."""
