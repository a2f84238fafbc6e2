"""A link that is slow and not broken: its pushes last as long as the lease is renewed."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import numpy as np

from headwater.clock import SystemClock
from headwater.disagg.links.registry import Links
from headwater.disagg.protocol.actions import ExtendPushes, PushBlocks, Send
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import Grant, Renew, Renewed, Start
from headwater.disagg.protocol.prefill import PrefillHandoff
from headwater.disagg.protocol.push import PushDone
from headwater.testing.links import BlockArray, EventLog
from tests.disagg.requests import make_handoff, make_prompt
from tests.disagg.wire import CONFIG

BLOCK_BYTES = 256 << 10
NUM_BLOCKS = 8
BYTES_S = 1 << 20
HANDOFF = HandoffConfig(term_s=1.0, margin_s=0.1, renew_s=0.2, resend_s=0.2)


@contextmanager
def slow_proxy(port: int) -> Iterator[int]:
    """A port that forwards to `port` with `BYTES_S` bytes per second."""
    listener = socket.create_server(("127.0.0.1", 0))
    pause = Event()

    def forward(source: socket.socket, target: socket.socket, bytes_s: float) -> None:
        with suppress(OSError):
            while data := source.recv(16 << 10):
                target.sendall(data)
                pause.wait(len(data) / bytes_s)

    def serve() -> None:
        with suppress(OSError):
            near, _ = listener.accept()
            # A small buffer, so that the sender notices the speed of the link.
            near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            with near, socket.create_connection(("127.0.0.1", port)) as far:
                back = Thread(target=forward, args=(far, near, 1e12), daemon=True)
                back.start()
                forward(near, far, BYTES_S)
                far.shutdown(socket.SHUT_RDWR)
                back.join(30.0)

    thread = Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()
        pause.set()
        thread.join(30.0)


def test_a_push_over_a_slow_link_lasts_as_long_as_its_lease_is_renewed():
    """The push takes twice the lease term; each confirmed heartbeat extends its deadline
    (lesson 84)."""
    clock, sent, received = SystemClock(), EventLog(), EventLog()
    receiver = Links(CONFIG, BlockArray(NUM_BLOCKS, BLOCK_BYTES), received).listen("tcp")
    source = BlockArray(NUM_BLOCKS, BLOCK_BYTES, seed=1)
    with slow_proxy(int(receiver.address.rpartition(":")[2])) as port:
        sender = Links(CONFIG, source, sent).connect(f"tcp://127.0.0.1:{port}")
        request = make_handoff("a", make_prompt(NUM_BLOCKS * 4))
        start = Start(handoff=7, request=request, link="tcp", num_found=0, within_s=60.0)
        machine = PrefillHandoff(
            start,
            HANDOFF,
            block_tokens=4,
            block_bytes=BLOCK_BYTES,
            new_job=iter(range(99)).__next__,
        )
        receiver.open(7, range(NUM_BLOCKS))
        began_s = clock.now()
        machine.begin(began_s)
        machine.admitted(began_s)
        machine.computed(NUM_BLOCKS * 4, np.arange(NUM_BLOCKS), began_s)
        actions = machine.receive(
            Grant(handoff=7, start_block=0, num_blocks=NUM_BLOCKS, term_s=1.0), clock.now()
        )
        for action in actions:
            if isinstance(action, PushBlocks):
                sender.push(action.push)
        pause = Event()
        while not sent.events and clock.now() < began_s + 30.0:
            for action in machine.tick(clock.now()):
                if isinstance(action, Send) and isinstance(action.message, Renew):
                    renewed = Renewed(7, action.message.sent_s)
                    for extended in machine.receive(renewed, clock.now()):
                        assert isinstance(extended, ExtendPushes)
                        sender.extend(7, extended.deadline_s)
            pause.wait(0.02)
        took_s = clock.now() - began_s
        sender.close()
        receiver.close()

    assert sent.events == [PushDone(0, NUM_BLOCKS * BLOCK_BYTES)]
    assert took_s > HANDOFF.term_s, "the link is slower than one lease term"
