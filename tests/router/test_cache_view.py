"""The router's view of one instance."""

from headwater.disagg.routing import Trust
from headwater.metrics.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from headwater.server.router.cache_view import BlockView, EventBatchResult


def batch(*events):
    return EventBatch(ts=0.0, events=list(events))


def stored(*hashes, medium="GPU"):
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=[],
        block_size=4,
        medium=medium,
    )


def removed(*hashes, medium="GPU"):
    return BlockRemoved(block_hashes=list(hashes), medium=medium)


def test_a_match_is_the_leading_run_in_any_medium():
    """The match ends at the first block that is in no medium."""
    view = BlockView("life")
    view.apply(0, batch(stored(1, 2), stored(2, 3, medium="CPU"), stored(5)))

    assert view.match([1, 2, 3, 4, 5]) == 3
    view.apply(1, batch(removed(2)))
    assert view.match([1, 2, 3]) == 3
    view.apply(2, batch(removed(2, medium="CPU")))
    assert view.match([1, 2, 3]) == 1
    assert view.blocks("CPU") == {3}
    assert view.num_blocks == 3


def test_nothing_is_believed_before_the_instance_said_it():
    """Lesson 72: a new view knows nothing, and its trust shows that."""
    view = BlockView("life")

    assert view.trust is Trust.FALLBACK
    assert view.match([1]) == 0
    view.confirm()
    assert view.trust is Trust.FALLBACK


def test_a_gap_changes_nothing_but_the_trust():
    """Lesson 71: events after a gap are not applied until the gap is closed."""
    view = BlockView("life")
    view.apply(0, batch(stored(1)))

    assert view.apply(2, batch(stored(3))) is EventBatchResult.GAP
    assert (view.trust, view.match([3])) == (Trust.DEGRADED, 0)
    assert view.apply_replayed(1, batch(removed(1))) is EventBatchResult.APPLIED
    assert view.apply_replayed(2, batch(stored(3))) is EventBatchResult.APPLIED
    assert (view.trust, view.match([3]), view.match([1])) == (Trust.EXACT, 1, 0)
    assert view.apply(2, batch(stored(9))) is EventBatchResult.KNOWN


def test_a_snapshot_closes_any_gap():
    """Lesson 71: a snapshot begins with a clear event, followed by everything."""
    view = BlockView("life")
    view.apply(0, batch(stored(1)))
    view.apply(50, batch(stored(7)))

    view.apply_replayed(50, batch(AllBlocksCleared(), stored(7, 8)))

    assert (view.trust, view.next) == (Trust.EXACT, 51)
    assert view.blocks("GPU") == {7, 8}


def test_sequence_numbers_that_restart_mean_a_new_engine():
    """Lesson 71: the view of the earlier engine is degraded at once."""
    view = BlockView("life")
    view.apply(0, batch(stored(1)))

    view.apply(0, batch(AllBlocksCleared()))

    assert view.trust is Trust.DEGRADED
