"""Verifies the scheduler's invariants. Slow: for tests, and while the engine is idle."""

from collections.abc import Iterable

from headwater.errors import InvariantError
from headwater.scheduler.batch import InFlightStep
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState


def audit(table: SequenceTable, in_flight: Iterable[InFlightStep], block_tokens: int) -> None:
    """Raise InvariantError if a sequence contradicts the list it is in."""
    for sequence in table.waiting:
        _audit_waiting(sequence, SequenceState.WAITING)
    for sequence in table.invited.values():
        _require(
            sequence.state is SequenceState.WAITING,
            sequence,
            "is invited but not in state WAITING",
        )
    for sequence in table.remote:
        _audit_waiting(sequence, SequenceState.REMOTE)
    for sequence in table.running():
        _audit_running(sequence, block_tokens)
        rows = sum(step.has(sequence) for step in in_flight)
        _require(
            sequence.num_in_flight == rows, sequence, "has a wrong count of steps in flight"
        )
    for sequence in table.departing:
        _require(
            sequence.state is SequenceState.FINISHED,
            sequence,
            "is in the departing list but has not finished",
        )
        _require(
            sequence.is_kept, sequence, "is in the departing list but nothing uses its slots"
        )
    places = [*table.waiting, *table.remote, *table.running()]
    if len(places) != len(table.alive) or set(places) != set(table.alive.values()):
        raise InvariantError("a sequence is in no list, or in two")
    if not table.rows.agrees_with(table.decoding):
        raise InvariantError("the decode rows are not those of the decoding sequences")


def _audit_waiting(sequence: Sequence, state: SequenceState) -> None:
    _require(
        sequence.state is state,
        sequence,
        f"is in the list of {state.name} but in state {sequence.state.name}",
    )
    _require(sequence.num_blocks == 0, sequence, "waits but has slots")
    _require(sequence.lease is None, sequence, "waits but has a lease")
    _require(sequence.num_in_flight == 0, sequence, "waits but has a step in flight")


def _audit_running(sequence: Sequence, block_tokens: int) -> None:
    lease = sequence.lease
    num_leased = 0 if lease is None else lease.num_blocks
    covered = sequence.num_blocks * block_tokens
    committed = sequence.num_committed * block_tokens
    _require(
        sequence.is_running,
        sequence,
        f"is in a running list but in state {sequence.state.name}",
    )
    _require(
        committed <= sequence.num_computed,
        sequence,
        "has committed blocks that are not computed",
    )
    _require(
        sequence.num_computed <= sequence.num_scheduled,
        sequence,
        "has computed more than was scheduled",
    )
    _require(sequence.num_scheduled <= covered, sequence, "is scheduled beyond its slots")
    _require(
        sequence.num_scheduled <= sequence.num_tokens,
        sequence,
        "is scheduled beyond its known tokens",
    )
    _require(
        sequence.num_committed == num_leased,
        sequence,
        "has another number of committed blocks than its lease",
    )


def _require(holds: bool, sequence: Sequence, complaint: str) -> None:
    if not holds:
        raise InvariantError(f"{sequence.request_id} {complaint}")
