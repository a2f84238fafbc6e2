"""The receiving process of `bench/_link_speed.py`: receives through a link and through plain
calls.

    python -m headwater.bench._link_far LINK NUM_BLOCKS BLOCK_BYTES NUM_LEASES [CERT KEY CA]

Its first line is JSON: the link's address, the port of the bare end, and where in memory a bare
Transfer Engine may write. It ends when its input does.
"""

import json
import socket
import sys
from collections.abc import Sequence
from threading import Thread
from typing import Any

from headwater.bench._ceilings import page_memory
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.registry import Links
from headwater.disagg.protocol.push import LinkEvent
from headwater.storage.calls import address_of
from headwater.storage.codec import checksum
from headwater.transfer.shared import SharedPages

TOKEN = b"bench links"
DONE = b"."
MARK = "far end: "


class Blocks:
    """Page-aligned block memory that was used before; `shared` if a link needs it."""

    def __init__(self, num_blocks: int, block_bytes: int, *, shared: bool = False) -> None:
        self.block_bytes = block_bytes
        self._pages = SharedPages(num_blocks * block_bytes) if shared else None
        self.file = None if self._pages is None else self._pages.file
        if self._pages is None:
            self.memory = page_memory(num_blocks * block_bytes)
        else:
            self.memory = self._pages.memory
        self.views = [self.memory[at * block_bytes :][:block_bytes] for at in range(num_blocks)]

    def view(self, slot: int) -> memoryview:
        return self.views[slot]


def link_config(files: Sequence[str] = ()) -> LinkConfig:
    """Settings of both ends; `files` are certificate, key and CA of mutual TLS."""
    certfile, keyfile, ca_certs = files or (None, None, None)
    return LinkConfig(
        token=TOKEN, ssl_certfile=certfile, ssl_keyfile=keyfile, ssl_ca_certs=ca_certs
    )


def main(
    link: str, num_blocks: int, block_bytes: int, num_leases: int, files: Sequence[str]
) -> None:
    """Serve until the near end closes."""
    blocks = Blocks(num_blocks, block_bytes)
    receiver = Links(link_config(files), blocks, _ignore).listen(link)
    for lease in range(num_leases):
        receiver.open(lease, range(num_blocks))
    bare = Blocks(num_blocks, block_bytes)
    listener = socket.create_server(("127.0.0.1", 0))
    told: dict[str, Any] = {"address": receiver.address, "port": listener.getsockname()[1]}
    if link == "mooncake":
        engine = bare_engine(bare.memory)
        told |= {"engine": f"127.0.0.1:{engine.get_rpc_port()}"}
        told |= {"memory": address_of(bare.memory)}
    if link != "shm":  # the reference for shm needs no second process
        Thread(target=_serve, args=(listener, bare, link), daemon=True).start()
    print(MARK + json.dumps(told), flush=True)
    sys.stdin.read()
    receiver.close()


def bare_engine(memory: memoryview) -> Any:  # noqa: ANN401 -- untyped package
    """A Transfer Engine that has registered `memory`."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(address_of(memory), len(memory)) == 0
    return engine


def _serve(listener: socket.socket, blocks: Blocks, link: str) -> None:
    """Receive all blocks again and again: bytes or a mark come in, a mark goes out after
    verification."""
    connected, _ = listener.accept()
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        if link == "mooncake" and not connected.recv(1):
            return
        for view in blocks.views:
            if link == "tcp" and not _fill(connected, view):
                return
            checksum(view)
        connected.sendall(DONE)


def _fill(connected: socket.socket, view: memoryview) -> bool:
    while view:
        got = connected.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            return False
        view = view[got:]
    return True


def _ignore(event: LinkEvent) -> None:
    """Does nothing: the near end uses its own outcomes."""


if __name__ == "__main__":
    _sizes = [int(word) for word in sys.argv[2:5]]
    main(sys.argv[1], _sizes[0], _sizes[1], _sizes[2], sys.argv[5:8])
