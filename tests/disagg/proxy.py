"""A proxy between two instances that stops at a chosen message, for deaths at that moment."""

import contextlib
import socket
import struct
from threading import Event, Thread

from headwater.disagg.peering import handshake

_GREETINGS = {
    "to_p": (handshake._ANSWER.size,),
    "to_d": (handshake._CHALLENGE.size, handshake._WELCOME.size),
}
_HEAD = struct.Struct("<I16s")


class HoldingProxy:
    """Forwards a control connection; the frame `stop` of the direction `way` waits for `go`.

    Frames are counted from 0, which is the hello; 1 is the first message.
    """

    def __init__(self, target: str, *, way: str = "", stop: int = -1) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._way, self._stop = way, stop
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_held = Event()
        self.go = Event()
        self._sockets: list[socket.socket] = []
        self._threads = [Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """End every connection through this proxy; held frames stay held."""
        for end in self._sockets:
            with contextlib.suppress(OSError):  # the end of one may have ended the other
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End every connection, and accept no more."""
        self.go.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            for way, source, sink in (("to_p", near, far), ("to_d", far, near)):
                thread = Thread(target=self._pass, args=(way, source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        number = 0
        try:
            for num_bytes in _GREETINGS[way]:
                sink.sendall(_exactly(source, num_bytes))
            while True:
                head = _exactly(source, _HEAD.size)
                body = _exactly(source, _HEAD.unpack(head)[0])
                if (way, number) == (self._way, self._stop):
                    self.is_held.set()
                    self.go.wait()
                sink.sendall(head + body)
                number += 1
        except OSError:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def _exactly(source: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = source.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("the other end is gone")
        data += piece
    return data
