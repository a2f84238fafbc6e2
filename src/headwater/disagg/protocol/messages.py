"""What two instances say to one another about one hand-off. Values; how they travel is `codec`.

    D ── Start ──────────────▶ P      D owns the request, P computes its prompt
    D ◀── Accepted | Refused ─ P
    D ◀── Ask ──────────────── P      P has reserved and begun
    D ── Grant | Refuse ─────▶ P      D has reserved what it lacks, for a term
    D ◀── First ────────────── P      the first token, and what was sent
    D ── Done ───────────────▶ P      D has committed; P lets go
       Pull, Pulled                   a prefix that only D has, if P wants it
       Renew, Renewed                 P's heartbeat and its echo, from Accepted to the end
       Cancel, Failed                 a drop, told to the other side at once

Every message names its hand-off, a random number that D chose. Any of them may be repeated,
and an answer to a question asked twice is the same answer.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from headwater.scheduler.output import TokenLogprobs, Usage
from headwater.scheduler.request import Request


class Reason(StrEnum):
    """Why a hand-off did not happen, or ended early. Words for counting and for routers."""

    BUSY = "busy"  # P has as many hand-offs in flight as it may
    DRAINING = "draining"  # the peer admits nothing new
    ROLE = "role"  # the peer computes no prompts for others
    TOO_LONG = "too_long"  # the prompt does not fit there, ever
    INVALID = "invalid"  # the peer cannot serve such a request
    NO_ROOM = "no_room"  # D found no room in time
    FINGERPRINT = "fingerprint"  # another model, layout or block size
    UNREACHABLE = "unreachable"  # no connection could be made
    DENIED = "denied"  # the shared token is not the same
    LOST = "lost"  # the connection ended
    EXPIRED = "expired"  # no heartbeat for a term
    TIMEOUT = "timeout"  # the whole took too long
    PUSH = "push"  # bytes could not be sent
    BYTE_COUNT = "account"  # other bytes landed than were sent
    ABORTED = "aborted"  # the request was aborted
    GONE = "gone"  # the hand-off is not known here, or no longer


REFUSALS = frozenset(
    {
        *(Reason.BUSY, Reason.DRAINING, Reason.ROLE, Reason.TOO_LONG, Reason.INVALID),
        *(Reason.NO_ROOM, Reason.FINGERPRINT, Reason.UNREACHABLE, Reason.DENIED),
    }
)
"""Reasons for which a hand-off does not begin: another pair may be tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went on P, in seconds."""

    queue_s: float = 0.0
    """From Start to admission."""

    ask_s: float = 0.0
    """Without a Grant, while there were blocks to send: what of asking was not hidden."""

    compute_s: float = 0.0
    """From admission to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """D to P: compute this prompt for me."""

    handoff: int
    request: Request
    """As the client asked; P computes its prompt and one token."""

    link: str
    """Where blocks are to be pushed to."""

    num_found: int
    """Leading blocks that D has already, and P may have for the asking."""

    within_s: float
    """D gives up after so long."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """P to D: it waits in my queue. Counts as a heartbeat."""

    handoff: int
    sent_s: float


@dataclass(frozen=True, slots=True)
class StartRefused:
    """P to D: not here, not now."""

    handoff: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Ask:
    """P to D: what do you lack, and where does it go?"""

    handoff: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """D to P: push blocks [start_block, start_block + num_blocks) of the prompt to this lease.

    The lease has the hand-off's number. It ends `term_s` after the last heartbeat that D got.
    """

    handoff: int
    start_block: int
    num_blocks: int
    term_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """D to P: I have no room for it; forget it."""

    handoff: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Renew:
    """P to D: still at it."""

    handoff: int
    sent_s: float
    """On P's clock; only P reads it again."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """D to P: the term runs from the heartbeat that you sent then."""

    handoff: int
    sent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """P to D: the first token, and the account of what was handed to the link."""

    handoff: int
    token: int
    logprobs: TokenLogprobs | None
    usage: Usage
    num_blocks: int
    num_bytes: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """D to P: all of it is here and committed."""

    handoff: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """D to P: I do not want it any more."""

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
    """D to P: so many of the blocks that you asked for are on their way."""

    handoff: int
    num_blocks: int


ToPrefill: TypeAlias = Start | Grant | Refuse | Renewed | HandoffDone | Cancel | Pulled
ToDecode: TypeAlias = Accepted | StartRefused | Ask | Renew | First | Failed | Pull
Message: TypeAlias = ToPrefill | ToDecode
