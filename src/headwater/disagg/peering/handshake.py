"""Handshake of a connection: both ends prove that they have the token, and neither sends it.

    receiver ── challenge: magic, version, nonce ──────────────────────▶ sender
    sender   ── answer: magic, version, link, block bytes, nonce, proof ─▶ receiver
    receiver ── result, proof, grant ───────────────────────────────────▶ sender

A proof is an HMAC-SHA-256 with the token over the role and all bytes so far, compared in constant
time. The receiver sends nothing that depends on the token before the sender has proved it. Payloads
are neither signed nor encrypted: use TLS (`tls`) where the network is not trusted.
"""

import hashlib
import hmac
import secrets
import struct
from enum import IntEnum
from typing import NamedTuple, NoReturn

from headwater.clock import Clock
from headwater.disagg.peering.stream import Stream, WaitCheck
from headwater.disagg.protocol.errors import LinkBroken, Malformed
from headwater.disagg.protocol.push import PushFailure

VERSION = 2
"""Increased with each change of what follows the handshake: frames, payloads, grants."""

_MAX_GRANT_BYTES = 1024

_MAGIC = b"HWLINK\0\0"
_CHALLENGE = struct.Struct("<8sHH32s")
_ANSWER = struct.Struct("<8sH6sQ32s32s")
_WELCOME = struct.Struct("<HH32s")
_PROOF_BYTES = 32


class HandshakeResult(IntEnum):
    """The receiver's answer to a sender."""

    WELCOME = 0
    VERSION = 1
    LINK = 2
    BLOCK_BYTES = 3
    TOKEN = 4
    BUSY = 5


_SENTENCES = {
    HandshakeResult.VERSION: "it has another protocol version",
    HandshakeResult.LINK: "it is the receiver of another link",
    HandshakeResult.BLOCK_BYTES: "its block size is another one",
    HandshakeResult.TOKEN: "the token is another one",
    HandshakeResult.BUSY: "it has reached its limit of connections",
}


class HandshakeTerms(NamedTuple):
    """What both ends must agree on."""

    link: str
    """`tcp`, `shm`, `cuda`, `mooncake`, or `peer` for control connections."""

    token: bytes
    block_bytes: int


class LinkSession(NamedTuple):
    """Result of a successful handshake."""

    key: bytes
    """Key for the MACs of this connection only."""

    grant: bytes
    """Further data for the sender; its link knows the format."""


def timeout_check(clock: Clock, timeout_s: float) -> WaitCheck:
    """Ends a wait after `timeout_s`, counted from now."""
    end_s = clock.now() + timeout_s

    def check_wait() -> None:
        if clock.now() > end_s:
            raise LinkBroken(f"no handshake within {timeout_s:g} s", PushFailure.UNREACHABLE)

    return check_wait


def client_handshake(
    stream: Stream, mine: HandshakeTerms, check_wait: WaitCheck
) -> LinkSession:
    """Run the sender's part; raises LinkBroken when the receiver refuses."""
    challenge = _take(stream, _CHALLENGE.size, check_wait)
    magic, version, _, _ = _CHALLENGE.unpack(challenge)
    if magic != _MAGIC or version != VERSION:
        raise LinkBroken(
            f"the peer does not speak protocol version {VERSION}", PushFailure.REFUSED
        )
    unsigned = _answer(mine, secrets.token_bytes(32), b"")
    proof = _prove(mine.token, b"sender", challenge, unsigned)
    answer = unsigned[:-_PROOF_BYTES] + proof
    stream.send([answer], check_wait)
    code, grant_bytes, theirs = _WELCOME.unpack(_take(stream, _WELCOME.size, check_wait))
    if code != HandshakeResult.WELCOME:
        why = _SENTENCES[HandshakeResult(code)] if code in _SENTENCES else "no reason given"
        raise LinkBroken(f"the receiver refused the connection: {why}", PushFailure.REFUSED)
    if grant_bytes > _MAX_GRANT_BYTES:
        raise Malformed(
            f"the receiver announced {grant_bytes} bytes of link data, more than {_MAX_GRANT_BYTES}",
            PushFailure.REFUSED,
        )
    grant = _take(stream, grant_bytes, check_wait) if grant_bytes else b""
    if not hmac.compare_digest(
        theirs, _prove(mine.token, b"receiver", challenge, answer, grant)
    ):
        raise LinkBroken("the receiver has another token", PushFailure.REFUSED)
    return LinkSession(_session_key(mine.token, challenge, answer), grant)


class ServerHandshake:
    """The receiver's part, in two steps: verify the sender, then accept or refuse it."""

    def __init__(self, stream: Stream, mine: HandshakeTerms, check_wait: WaitCheck) -> None:
        """Raises Malformed if the sender does not qualify, after telling it why."""
        self._stream = stream
        self._mine = mine
        self._wait_check = check_wait
        self._challenge = _CHALLENGE.pack(_MAGIC, VERSION, 0, secrets.token_bytes(32))
        stream.send([self._challenge], check_wait)
        self._answer = _take(stream, _ANSWER.size, check_wait)
        result = self._check()
        if result is not HandshakeResult.WELCOME:
            self.refuse(result)

    def accept(self, grant: bytes = b"") -> LinkSession:
        """Accept the sender: send it the receiver's proof and `grant`."""
        token = self._mine.token
        proof = _prove(token, b"receiver", self._challenge, self._answer, grant)
        self._stream.send(
            [_WELCOME.pack(HandshakeResult.WELCOME, len(grant), proof), grant], self._wait_check
        )
        return LinkSession(_session_key(token, self._challenge, self._answer), grant)

    def refuse(self, result: HandshakeResult) -> NoReturn:
        """Tell the sender why it is refused, and raise Malformed."""
        self._stream.send([_WELCOME.pack(result, 0, bytes(_PROOF_BYTES))], self._wait_check)
        raise Malformed(f"connection refused: reason={result.name.lower()}")

    def _check(self) -> HandshakeResult:
        magic, version, link, block_bytes, _, proof = _ANSWER.unpack(self._answer)
        if magic != _MAGIC:
            raise Malformed("not a handshake of this protocol")
        if version != VERSION:
            return HandshakeResult.VERSION
        unsigned = self._answer[:-_PROOF_BYTES] + bytes(_PROOF_BYTES)
        expected = _prove(self._mine.token, b"sender", self._challenge, unsigned)
        if not hmac.compare_digest(proof, expected):
            return HandshakeResult.TOKEN
        if link != _short(self._mine.link):
            return HandshakeResult.LINK
        if block_bytes != self._mine.block_bytes:
            return HandshakeResult.BLOCK_BYTES
        return HandshakeResult.WELCOME


def _answer(mine: HandshakeTerms, nonce: bytes, proof: bytes) -> bytes:
    return _ANSWER.pack(_MAGIC, VERSION, _short(mine.link), mine.block_bytes, nonce, proof)


def _short(link: str) -> bytes:
    return link.encode()[:6].ljust(6, b"\0")


def _prove(token: bytes, role: bytes, *unsigned: bytes) -> bytes:
    return hmac.digest(
        token, b"headwater link, " + role + b"\0" + b"".join(unsigned), hashlib.sha256
    )


def _session_key(token: bytes, challenge: bytes, answer: bytes) -> bytes:
    return _prove(token, b"session", challenge, answer)


def _take(stream: Stream, num_bytes: int, check_wait: WaitCheck) -> bytes:
    buffer = bytearray(num_bytes)
    stream.fill(memoryview(buffer), check_wait)
    return bytes(buffer)
