"""The `auto` link, the default: mapped memory within a machine, `tcp` between machines.

    receiver   address: auto:tcp://host:port|shm://name@machine   (on a GPU: cuda://name@machine)
    sender     same machine, and its blocks can be mapped?  yes: the second part   no: the first

The receiver listens on both links and opens each lease on both. The sender chooses one of them. If
the receiver refuses to map the sender's memory (another user, a GPU that cannot reach it), the
sender pushes the same blocks by `tcp`; nothing of them was written before.

Two instances are on one machine if they share the kernel and the network namespace: the names
of the Unix sockets that these links use belong to a network namespace.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from headwater.disagg.links.interface import Deliver, Receiver, Sender
from headwater.disagg.protocol.push import (
    BlockReceived,
    LeaseClosed,
    LinkEvent,
    Push,
    PushDone,
    PushFailed,
    PushFailure,
)

log = logging.getLogger(__name__)

Listen: TypeAlias = Callable[[str, Deliver], Receiver]
"""Makes a receiver of this kind of link."""

Connect: TypeAlias = Callable[[str, Deliver], Sender]
"""Makes a sender to an address of one link."""

_PREFIX, _SEPARATOR = "auto:", "|"
_NOT_MAPPED = (PushFailure.UNREACHABLE, PushFailure.REFUSED)
"""Failures before the first byte of a push was written."""


def machine_id() -> str:
    """An id of this kernel and network namespace; empty on systems that do not report them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return ""
    return hashlib.sha256(b"%s %d" % (boot, network)).hexdigest()[:16]


def is_auto(address: str) -> bool:
    """Whether an address has a part for each of two links."""
    return address.startswith(_PREFIX)


def remote_part(address: str) -> str:
    """The part of an address that other machines use; a plain address is returned as it is."""
    return address.removeprefix(_PREFIX).partition(_SEPARATOR)[0]


class AutoReceiver:
    """A `Receiver` on two links. A lease is closed when both links have closed it."""

    def __init__(self, listen: Listen, local_link: str, deliver: Deliver) -> None:
        self._deliver = deliver
        self._lock = Lock()
        self._receivers: tuple[Receiver, ...] = ()
        self._closed: dict[int, LeaseClosed] = {}
        """Leases that one of the two links has closed."""

        remote = listen("tcp", self._take)
        try:
            local = listen(local_link, self._take)
        except BaseException:
            remote.close()
            raise
        self._receivers = (remote, local)
        local_address = f"{local.address}@{machine_id()}"
        self.address = f"{_PREFIX}{remote.address}{_SEPARATOR}{local_address}"

    def open(self, lease: int, slots: Sequence[int]) -> None:
        for receiver in self._receivers:
            receiver.open(lease, slots)

    def fence(self, lease: int) -> None:
        for receiver in self._receivers:
            receiver.fence(lease)

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        self._receivers = ()  # they refer to this object; the cycle would keep their memory

    def _take(self, event: LinkEvent) -> None:
        if isinstance(event, BlockReceived):
            self._deliver(event)
        elif isinstance(event, LeaseClosed):
            self._close_lease(event)

    def _close_lease(self, event: LeaseClosed) -> None:
        with self._lock:
            first = self._closed.pop(event.lease, None)
            if first is None:
                self._closed[event.lease] = event
        if first is None:
            # A link may also close a lease by itself, when it cannot store a block.
            self.fence(event.lease)
            return
        num_bytes = first.num_bytes + event.num_bytes
        self._deliver(LeaseClosed(event.lease, num_bytes, first.blocks | event.blocks))


class AutoSender:
    """A `Sender` to one receiver, over the better link that works."""

    def __init__(
        self, address: str, connect: Connect, can_map: Callable[[str], bool], deliver: Deliver
    ) -> None:
        """`can_map` tells for a kind of link whether peers can map the blocks of this instance
        by it."""
        self._remote_address = remote_part(address)
        local_address, _, machine = address.partition(_SEPARATOR)[2].rpartition("@")
        self._connect = connect
        self._deliver = deliver
        self._lock = Lock()
        self._tcp_lock = Lock()
        """Held while the sender over `tcp` is made, which may take a while."""

        self._remote: Sender | None = None
        self._local: Sender | None = None
        self._mapped: dict[int, Push] = {}
        """Pushes of the local link that have not ended, by job."""

        self._is_closed = False
        self._is_refused = False
        """Whether the receiver refused to map the memory of this instance."""

        if machine and machine == machine_id() and can_map(local_address.partition("://")[0]):
            self._local = connect(local_address, self._take)

    def push(self, push: Push) -> None:
        local = self._local
        if local is None or self._is_refused:
            self._push_by_tcp(push)
            return
        with self._lock:
            self._mapped[push.job] = push
        local.push(push)

    def extend(self, lease: int, deadline_s: float) -> None:
        for sender in self._senders():
            sender.extend(lease, deadline_s)

    def cancel(self, lease: int) -> None:
        for sender in self._senders():
            sender.cancel(lease)

    def close(self) -> None:
        with self._tcp_lock:
            self._is_closed = True
        for sender in self._senders():
            sender.close()
        self._local = None  # it refers to this object; the cycle would keep its memory

    def _senders(self) -> list[Sender]:
        return [sender for sender in (self._local, self._remote) if sender is not None]

    def _push_by_tcp(self, push: Push) -> None:
        """Push by `tcp`. Its sender is made when it is needed, because it may have buffers of
        its own."""
        with self._tcp_lock:
            if self._remote is None and not self._is_closed:
                self._remote = self._connect(self._remote_address, self._deliver)
        if self._remote is None:
            self._deliver(PushFailed(push.job, PushFailure.CLOSED))
        else:
            self._remote.push(push)

    def _take(self, event: LinkEvent) -> None:
        """Process an outcome of the local link."""
        assert isinstance(event, PushDone | PushFailed), "a sender reports outcomes only"
        with self._lock:
            push = self._mapped.pop(event.job)
        if isinstance(event, PushDone) or event.reason not in _NOT_MAPPED:
            self._deliver(event)
            return
        if event.reason is PushFailure.REFUSED and not self._is_refused:
            self._is_refused = True
            log.warning(
                "the peer cannot map this instance's blocks; they are sent by tcp: address=%s",
                self._remote_address,
            )
        self._push_by_tcp(push)
