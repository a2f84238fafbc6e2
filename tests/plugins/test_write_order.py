"""The order of writes to storage, and what is dropped."""

import pytest

from headwater.cache.storage_queue import WriteLevel
from headwater.plugins.write_order import PrefixUses, WriteOrder, WriteRank


def rank(uses=1, end=32, start=0, level=WriteLevel.OTHER):
    return WriteRank(level, -uses, end, start)


def test_shared_prefixes_come_first_then_the_most_used_then_short_prompts_from_their_start():
    """The order is that of Headwater's own engine."""
    order: WriteOrder[str] = WriteOrder(100)
    order.add("long start", count=1, rank=rank(end=64))
    order.add("end", count=1, rank=rank(start=16))
    order.add("start", count=1, rank=rank())
    order.add("later start", count=1, rank=rank())
    order.add("used", count=1, rank=rank(uses=3, end=64))
    order.add("shared", count=1, rank=rank(uses=2, end=64, level=WriteLevel.SHARED))

    written = [order.pop() for _ in range(6)]

    assert written == ["shared", "used", "start", "later start", "end", "long start"]
    assert order.pop() is None


def test_the_entries_least_likely_to_return_are_dropped_at_the_bound():
    """The bound holds, and every dropped block is counted."""
    order: WriteOrder[str] = WriteOrder(4)
    assert order.add("returned", count=2, rank=rank(uses=2)) == []
    assert order.add("new", count=2, rank=rank()) == []

    dropped = order.add("returned too", count=2, rank=rank(uses=2, start=4))

    assert (dropped, order.num_dropped, order.num_blocks) == (["new"], 2, 4)
    order.check()


def test_an_item_that_is_the_least_valuable_is_dropped_itself():
    """A full queue of better blocks is not changed."""
    order: WriteOrder[str] = WriteOrder(2)
    order.add("returned", count=2, rank=rank(uses=2))

    assert order.add("new", count=1, rank=rank()) == ["new"]


def test_a_prefix_is_shared_once_two_prompts_went_on_differently():
    """Blocks of the prefix are counted, and those before the branch get the rank of the
    branch."""
    uses = PrefixUses()
    uses.record(["system", "alice"])
    continued = uses.rank(["system", "alice", "more"], [(0, 1), (1, 2), (2, 3)])
    uses.record(["system", "bob"])
    again = uses.rank(["system", "carol"], [(0, 1), (1, 2)])

    other, shared = WriteLevel.OTHER, WriteLevel.SHARED
    assert continued == [(other, -2), (other, -2), (other, -1)]
    assert again == [(shared, -3), (other, -1)]


def test_a_request_that_branches_now_makes_its_prefix_shared_at_once():
    """The blocks of the new request show where it differs from the prompt before."""
    uses = PrefixUses()
    uses.record(["a", "b", "c"])

    assert uses.rank(["a", "b", "d"], [(0, 2), (2, 3)]) == [
        (WriteLevel.SHARED, -2),
        (WriteLevel.OTHER, -1),
    ]


@pytest.mark.parametrize("max_keys", [1, 8])
def test_uses_are_remembered_for_a_bounded_number_of_keys(max_keys):
    """The oldest keys are forgotten first."""
    uses = PrefixUses(max_keys)
    for key in range(20):
        uses.record([key])
    uses.record([19])

    assert len(uses) == max_keys
    assert uses.rank([19], [(0, 1)]) == [(WriteLevel.OTHER, -3)]
    assert uses.rank([0], [(0, 1)]) == [(WriteLevel.OTHER, -1)]
