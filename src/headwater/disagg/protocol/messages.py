"""Messages between the two instances of a hand-off. `codec` encodes them.

    D ── Start ──────────────▶ P      D owns the request, P computes its prompt
    D ◀── Accepted | Refused ─ P
    D ◀── Ask ──────────────── P      P has allocated blocks and begun to compute
    D ── Grant | Refuse ─────▶ P      D has allocated the blocks it lacks, under a lease
    D ◀── First ────────────── P      the first token, and what was sent
    D ── Done ───────────────▶ P      D has committed the blocks; P releases its own
       Pull, Pulled                   P reads a prefix that only D has
       Renew, Renewed                 P's heartbeat and its echo, from Accepted to the end
       Cancel, Failed                 one side gave up, and tells the other at once

Each message carries the number of its hand-off, a random number that D chose. Each message may
be repeated; a repeated question gets the same answer.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from headwater.scheduler.request import Request, TokenLogprobs, Usage


class Reason(StrEnum):
    """Why a hand-off did not happen, or ended early. Used in metrics and by routers."""

    BUSY = "busy"  # P has reached its limit of hand-offs in flight
    DRAINING = "draining"  # the peer admits no new requests
    ROLE = "role"  # the peer does not compute prompts for others
    TOO_LONG = "too_long"  # the prompt can never fit on the peer
    INVALID = "invalid"  # the peer cannot serve this request
    NO_ROOM = "no_room"  # D did not find free blocks in time
    FINGERPRINT = "fingerprint"  # the peer has another model, KV layout or block size
    UNREACHABLE = "unreachable"  # no connection could be made
    DENIED = "denied"  # the peer has another token
    LOST = "lost"  # the connection ended
    EXPIRED = "expired"  # no heartbeat within the lease term
    TIMEOUT = "timeout"  # the hand-off took longer than its limit
    PUSH = "push"  # a push failed
    BYTE_COUNT = "account"  # the received bytes are not those that were sent
    ABORTED = "aborted"  # the request was aborted
    GONE = "gone"  # the hand-off is unknown here, or has ended


REFUSALS = frozenset(
    {
        *(Reason.BUSY, Reason.DRAINING, Reason.ROLE, Reason.TOO_LONG, Reason.INVALID),
        *(Reason.NO_ROOM, Reason.FINGERPRINT, Reason.UNREACHABLE, Reason.DENIED),
    }
)
"""Reasons with which a hand-off ends before it began: another pair may be tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where P spent the time, in seconds."""

    queue_s: float = 0.0
    """Time from Start to admission."""

    ask_s: float = 0.0
    """Time without a Grant while blocks were ready to be sent: the part of asking that was not
    hidden by computing."""

    compute_s: float = 0.0
    """Time from admission to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """D to P: compute this prompt for me."""

    handoff: int
    request: Request
    """The client's request. P computes its prompt and one token."""

    link: str
    """Address of D's block receiver."""

    num_found: int
    """Leading blocks that D has cached, and that P may read."""

    within_s: float
    """D gives up after this time."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """P to D: the request is in my queue. Counts as a heartbeat."""

    handoff: int
    sent_s: float


@dataclass(frozen=True, slots=True)
class StartRefused:
    """P to D: I do not take this request now."""

    handoff: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Ask:
    """P to D: which blocks do you lack?"""

    handoff: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """D to P: push blocks [start_block, start_block + num_blocks) of the prompt to this lease.

    The lease has the hand-off's number. It ends `term_s` after the last heartbeat that D received.
    """

    handoff: int
    start_block: int
    num_blocks: int
    term_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """D to P: I have no free blocks for the prompt; give up."""

    handoff: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Renew:
    """P to D: P is alive and still works on the hand-off."""

    handoff: int
    sent_s: float
    """Time on P's clock. Only P reads it again."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """D to P: the lease term is counted from the heartbeat sent at this time."""

    handoff: int
    sent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """P to D: the first token, and how many blocks and bytes were given to the link."""

    handoff: int
    token: int
    logprobs: TokenLogprobs | None
    usage: Usage
    num_blocks: int
    num_bytes: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """D to P: all blocks are here and committed."""

    handoff: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """D to P: end the hand-off; I do not need its result any more."""

    handoff: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Failed:
    """P to D: there will be no first token."""

    handoff: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """P to D: push blocks [start_block, start_block + num_blocks), which you have, to me."""

    handoff: int
    link: str
    start_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """D to P: I send this many of the blocks that you asked for."""

    handoff: int
    num_blocks: int


ToPrefill: TypeAlias = Start | Grant | Refuse | Renewed | HandoffDone | Cancel | Pulled
ToDecode: TypeAlias = Accepted | StartRefused | Ask | Renew | First | Failed | Pull
Message: TypeAlias = ToPrefill | ToDecode
