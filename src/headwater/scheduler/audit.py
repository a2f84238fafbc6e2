"""The scheduler's invariants, verified. O(everything): for tests, and for idle moments."""

from collections.abc import Iterable

from headwater.errors import InvariantError
from headwater.scheduler.batch import InFlightStep
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState


def audit(table: SequenceTable, in_flight: Iterable[InFlightStep], block_tokens: int) -> None:
    """Raise InvariantError if a sequence is not what its place says it is."""
    for sequence in table.waiting:
        _audit_waiting(sequence, SequenceState.WAITING)
    for sequence in table.invited.values():
        _require(
            sequence.state is SequenceState.WAITING, sequence, "is invited, and does not wait"
        )
    for sequence in table.remote:
        _audit_waiting(sequence, SequenceState.REMOTE)
    for sequence in table.running():
        _audit_running(sequence, block_tokens)
        rows = sum(step.has(sequence) for step in in_flight)
        _require(sequence.num_in_flight == rows, sequence, "miscounts its steps in flight")
    for sequence in table.departing:
        _require(sequence.state is SequenceState.FINISHED, sequence, "departs alive")
        _require(sequence.is_kept, sequence, "departs for ever")
    places = [*table.waiting, *table.remote, *table.running()]
    if len(places) != len(table.alive) or set(places) != set(table.alive.values()):
        raise InvariantError("a sequence is lost, or in two places")


def _audit_waiting(sequence: Sequence, state: SequenceState) -> None:
    _require(sequence.state is state, sequence, "waits in another state")
    _require(sequence.num_blocks == 0, sequence, "waits with slots")
    _require(sequence.lease is None, sequence, "waits with a lease")
    _require(sequence.num_in_flight == 0, sequence, "waits with a step in flight")


def _audit_running(sequence: Sequence, block_tokens: int) -> None:
    lease = sequence.lease
    num_leased = 0 if lease is None else lease.num_blocks
    covered = sequence.num_blocks * block_tokens
    committed = sequence.num_committed * block_tokens
    _require(sequence.is_running, sequence, "runs in another state")
    _require(committed <= sequence.num_computed, sequence, "committed what is not computed")
    _require(sequence.num_computed <= sequence.num_scheduled, sequence, "computed too much")
    _require(sequence.num_scheduled <= covered, sequence, "computes beyond its slots")
    _require(sequence.num_scheduled <= sequence.num_tokens, sequence, "computes the unknown")
    _require(sequence.num_committed == num_leased, sequence, "disagrees with its lease")


def _require(holds: bool, sequence: Sequence, complaint: str) -> None:
    if not holds:
        raise InvariantError(f"{sequence.request_id} {complaint}")
