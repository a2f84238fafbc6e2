"""What is written to storage first, and what is dropped."""

import pytest

from headwater.plugins.write_order import UseCounts, WriteOrder


def test_prefixes_that_returned_are_written_first_and_their_start_before_their_end():
    """Uses count most, then the place in the prompt, then which is newer."""
    order: WriteOrder[str] = WriteOrder(100)
    order.add("new end", count=1, uses=0, position=16)
    order.add("old start", count=1, uses=0, position=0)
    order.add("returned end", count=1, uses=2, position=16)
    order.add("returned start", count=1, uses=2, position=0)
    order.add("new start", count=1, uses=0, position=0)

    written = [order.pop() for _ in range(5)]

    assert written == ["returned start", "returned end", "new start", "old start", "new end"]
    assert order.pop() is None


def test_what_is_least_likely_to_return_is_dropped_at_the_bound():
    """The bound holds, and every dropped block is counted."""
    order: WriteOrder[str] = WriteOrder(4)
    assert order.add("returned", count=2, uses=1, position=0) == []
    assert order.add("new", count=2, uses=0, position=0) == []

    dropped = order.add("returned too", count=2, uses=1, position=4)

    assert (dropped, order.num_dropped, order.num_blocks) == (["new"], 2, 4)
    order.check()


def test_an_item_that_is_the_least_valuable_is_dropped_itself():
    """A full queue of better blocks does not change."""
    order: WriteOrder[str] = WriteOrder(2)
    order.add("returned", count=2, uses=1, position=0)

    assert order.add("new", count=1, uses=0, position=0) == ["new"]


@pytest.mark.parametrize("max_keys", [1, 8])
def test_uses_are_remembered_for_a_bounded_number_of_keys(max_keys):
    """The oldest keys are forgotten first."""
    uses = UseCounts(max_keys)
    for key in range(20):
        uses.record([key])
    uses.record([19])

    assert (len(uses), uses.of(19), uses.of(0)) == (max_keys, 2, 0)
