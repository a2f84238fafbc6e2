"""Messages on a control connection, protected against forgery, repetition and reordering.

frame   body bytes 4 · MAC 16 · body
"""

import hashlib
import hmac
import struct

from headwater.disagg.peering.stream import Stream, WaitCheck
from headwater.disagg.protocol.errors import Malformed

_HEAD = struct.Struct("<I16s")


class AuthenticatedFrames:
    """Frames with a MAC over direction, number and body.

    The key belongs to this connection. So a frame of another connection, a repeated frame, one
    out of order, and one that is sent back to its sender all fail verification.
    """

    def __init__(self, stream: Stream, key: bytes, *, is_client: bool) -> None:
        self.stream = stream
        self._key = key
        self._directions = (b"c", b"s") if is_client else (b"s", b"c")
        self._num_sent = self._num_received = 0

    def send(self, body: bytes, check_wait: WaitCheck) -> None:
        """Send one frame."""
        mac = self._mac(self._directions[0], self._num_sent, body)
        self._num_sent += 1
        self.stream.send([_HEAD.pack(len(body), mac), body], check_wait)

    def receive(self, check_wait: WaitCheck, max_bytes: int) -> bytes:
        """The body of the next frame. Malformed if it is too long or its MAC is wrong."""
        head = bytearray(_HEAD.size)
        self.stream.fill(memoryview(head), check_wait)
        num_bytes, mac = _HEAD.unpack(head)
        if num_bytes > max_bytes:
            raise Malformed(f"message of {num_bytes} bytes, at most {max_bytes} are allowed")
        body = bytearray(num_bytes)
        self.stream.fill(memoryview(body), check_wait)
        own = self._mac(self._directions[1], self._num_received, body)
        if not hmac.compare_digest(mac, own):
            raise Malformed("message with a wrong MAC")
        self._num_received += 1
        return bytes(body)

    def _mac(self, direction: bytes, number: int, body: bytes | bytearray) -> bytes:
        prefix = direction + struct.pack("<Q", number)
        digest = hashlib.blake2b(prefix, key=self._key[:64], digest_size=16)
        digest.update(body)
        return digest.digest()
