"""Peer reads, seen from the decode instance: sends cached blocks that P asked for."""

from collections.abc import Callable

from headwater.cache import Lease, TokenPath
from headwater.disagg.handoff.dependencies import HandoffDependencies
from headwater.disagg.handoff.sender_pool import SenderPool
from headwater.disagg.links.interface import Sender
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import Pull, Pulled
from headwater.disagg.protocol.push import BlockPiece, Push, PushDone, PushFailed
from headwater.errors import ConfigError
from headwater.scheduler.scheduler import Scheduler
from headwater.types import RequestId


class PeerReadServer:
    """Pins the requested blocks, pushes them, and releases them when the push has ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        dependencies: HandoffDependencies,
        config: HandoffConfig,
        new_job: Callable[[], int],
    ) -> None:
        self._cache = scheduler.cache
        self._network = dependencies.network
        self._config = config
        self._block_bytes = dependencies.memory.block_bytes
        self._new_job = new_job
        self._jobs: dict[int, Lease] = {}
        self._senders = SenderPool(dependencies.connect)

    def serve(self, peer: str, pull: Pull, path: TokenPath, now: float) -> None:
        """Push the requested blocks that are cached here, and tell P how many they are."""
        end = min(pull.start_block + pull.num_blocks, path.num_blocks(self._cache.block_tokens))
        match = self._cache.match(path, max_blocks=max(end, 0))
        count = max(match.device_blocks - pull.start_block, 0)
        sender = self._sender(peer, pull.link) if count else None
        count = 0 if sender is None else count
        self._network.send(peer, Pulled(pull.handoff, count))
        if sender is None:
            return
        owner = RequestId(f"peer-read-{pull.handoff:016x}")
        lease = self._cache.lease(match, owner=owner, now=now, counted=False)
        job = self._new_job()
        self._jobs[job] = lease
        slots = lease.slots[pull.start_block :].tolist()
        sender.push(
            Push(
                job=job,
                lease=pull.handoff,
                pieces=tuple(
                    BlockPiece(slot, at, self._block_bytes) for at, slot in enumerate(slots)
                ),
                deadline_s=now + self._config.pull_timeout_s,
            )
        )

    def finish_push(self, event: PushDone | PushFailed, now: float) -> bool:
        """A push ended. False where it was not a push of a peer read."""
        lease = self._jobs.pop(event.job, None)
        if lease is None:
            return False
        self._cache.release(lease, now=now)
        return True

    def lost(self, peer: str) -> None:
        """The connection to a prefill instance ended: close its senders."""
        self._senders.close(peer)

    def close(self) -> None:
        """Cancel every push. Calling it twice is safe."""
        self._senders.close_all()

    def _sender(self, peer: str, link: str) -> Sender | None:
        """The sender to `link`; None where that is not a valid address."""
        try:
            return self._senders.get(peer, link)
        except ConfigError:
            return None
