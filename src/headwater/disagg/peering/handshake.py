"""How two peers come to know each other: both prove that they have the token, neither shows it.

    receiver ── challenge: magic, version, nonce ──────────────────────▶ sender
    sender   ── answer: magic, version, link, block bytes, nonce, proof ─▶ receiver
    receiver ── welcome or refusal, proof, grant ───────────────────────▶ sender

A proof is an HMAC-SHA-256 with the token over the role and all that was said so far, compared
in constant time. The receiver says nothing that depends on the token before the sender has
proved itself. Payloads are neither signed nor encrypted: a link belongs on a trusted network.
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
"""Raised with whatever travels after the greeting: frames, payloads, what is handed over."""

MAX_GRANT_BYTES = 1024

_MAGIC = b"HWLINK\0\0"
_CHALLENGE = struct.Struct("<8sHH32s")
_ANSWER = struct.Struct("<8sH6sQ32s32s")
_WELCOME = struct.Struct("<HH32s")
_PROOF_BYTES = 32


class HandshakeResult(IntEnum):
    """What a receiver says to a sender that greets it."""

    WELCOME = 0
    VERSION = 1
    LINK = 2
    BLOCK_BYTES = 3
    TOKEN = 4
    BUSY = 5


_SENTENCES = {
    HandshakeResult.VERSION: "it speaks another version",
    HandshakeResult.LINK: "it is the receiver of another kind of link",
    HandshakeResult.BLOCK_BYTES: "its blocks have another size",
    HandshakeResult.TOKEN: "the tokens differ",
    HandshakeResult.BUSY: "it has as many senders as it serves",
}


class HandshakeTerms(NamedTuple):
    """What both peers of a link have to agree on."""

    link: str
    """`tcp`, `shm` or `mooncake`."""

    token: bytes
    block_bytes: int


class LinkSession(NamedTuple):
    """What a greeting leaves behind."""

    key: bytes
    """Seals the frames of this connection, and of no other."""

    grant: bytes
    """What the receiver gives this sender beyond the connection; its link knows what it is."""


def timeout_check(clock: Clock, timeout_s: float) -> WaitCheck:
    """Patience for one word of a greeting."""
    end_s = clock.now() + timeout_s

    def check_wait() -> None:
        if clock.now() > end_s:
            raise LinkBroken("a peer that does not greet in time", PushFailure.UNREACHABLE)

    return check_wait


def client_handshake(
    stream: Stream, mine: HandshakeTerms, check_wait: WaitCheck
) -> LinkSession:
    """The sender's part; LinkBroken where it is not let in."""
    challenge = _take(stream, _CHALLENGE.size, check_wait)
    magic, version, _, _ = _CHALLENGE.unpack(challenge)
    if magic != _MAGIC or version != VERSION:
        raise LinkBroken("the peer is no receiver of this version", PushFailure.REFUSED)
    said = _answer(mine, secrets.token_bytes(32), b"")
    proof = _prove(mine.token, b"sender", challenge, said)
    answer = said[:-_PROOF_BYTES] + proof
    stream.send([answer], check_wait)
    code, grant_bytes, theirs = _WELCOME.unpack(_take(stream, _WELCOME.size, check_wait))
    if code != HandshakeResult.WELCOME:
        why = _SENTENCES[HandshakeResult(code)] if code in _SENTENCES else "it does not say why"
        raise LinkBroken(f"the receiver refuses us: {why}", PushFailure.REFUSED)
    if grant_bytes > MAX_GRANT_BYTES:
        raise Malformed("a grant that is too large", PushFailure.REFUSED)
    grant = _take(stream, grant_bytes, check_wait) if grant_bytes else b""
    if not hmac.compare_digest(
        theirs, _prove(mine.token, b"receiver", challenge, answer, grant)
    ):
        raise LinkBroken("the receiver does not have our token", PushFailure.REFUSED)
    return LinkSession(_session_key(mine.token, challenge, answer), grant)


class ServerHandshake:
    """The receiver's part, in two steps: who is it, and then what it is granted."""

    def __init__(self, stream: Stream, mine: HandshakeTerms, check_wait: WaitCheck) -> None:
        """Raises Malformed where the peer is refused; it has been told so."""
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
        """Let it in."""
        token = self._mine.token
        proof = _prove(token, b"receiver", self._challenge, self._answer, grant)
        self._stream.send(
            [_WELCOME.pack(HandshakeResult.WELCOME, len(grant), proof), grant], self._wait_check
        )
        return LinkSession(_session_key(token, self._challenge, self._answer), grant)

    def refuse(self, result: HandshakeResult) -> NoReturn:
        """Tell it why not, and raise Malformed."""
        self._stream.send([_WELCOME.pack(result, 0, bytes(_PROOF_BYTES))], self._wait_check)
        raise Malformed(f"a peer was refused: {result.name.lower()}")

    def _check(self) -> HandshakeResult:
        magic, version, link, block_bytes, _, proof = _ANSWER.unpack(self._answer)
        if magic != _MAGIC:
            raise Malformed("bytes that are no greeting")
        if version != VERSION:
            return HandshakeResult.VERSION
        said = self._answer[:-_PROOF_BYTES] + bytes(_PROOF_BYTES)
        expected = _prove(self._mine.token, b"sender", self._challenge, said)
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


def _prove(token: bytes, role: bytes, *said: bytes) -> bytes:
    return hmac.digest(
        token, b"headwater link, " + role + b"\0" + b"".join(said), hashlib.sha256
    )


def _session_key(token: bytes, challenge: bytes, answer: bytes) -> bytes:
    return _prove(token, b"session", challenge, answer)


def _take(stream: Stream, num_bytes: int, check_wait: WaitCheck) -> bytes:
    buffer = bytearray(num_bytes)
    stream.fill(memoryview(buffer), check_wait)
    return bytes(buffer)
