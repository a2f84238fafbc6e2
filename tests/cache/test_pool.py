"""SlotPool: bulk operations, exact counts, no double free."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from headwater.cache.pool import SlotPool, SlotState
from headwater.errors import CacheUseError, InvariantError

HELD, CACHED, FREE = SlotState.HELD, SlotState.CACHED, SlotState.FREE


def taken(pool, count):
    """`count` held slots, which the pool must have."""
    slots = pool.take(count)
    assert slots is not None
    return slots


def test_take_is_all_or_nothing():
    """Too large a take changes nothing and returns None."""
    pool = SlotPool(4)

    assert pool.take(5) is None
    assert pool.num_free == 4
    assert len(taken(pool, 4)) == 4
    pool.check()


def test_taken_slots_are_distinct_and_held():
    """No slot is handed out twice."""
    pool = SlotPool(10)

    slots = np.concatenate([taken(pool, 3), taken(pool, 4)])

    assert len(set(slots.tolist())) == 7
    assert pool.stats().held == 7
    pool.check()


@pytest.mark.parametrize("count", [-1, -100])
def test_negative_counts_are_refused(count):
    """Lesson 8: a negative count is the caller's error, and changes nothing."""
    pool = SlotPool(4)

    with pytest.raises(CacheUseError):
        pool.take(count)
    assert pool.num_free == 4


def test_taking_and_freeing_zero_slots_does_nothing():
    """Lesson 8: taking and freeing nothing is allowed and does nothing."""
    pool = SlotPool(0)

    pool.free(taken(pool, 0), HELD)

    assert pool.num_free == 0
    pool.check()


def test_freeing_a_free_slot_is_found():
    """Lesson 7: a double free is an invariant violation, found before anything changes."""
    pool = SlotPool(4)
    slots = taken(pool, 2)
    pool.free(slots, HELD)

    with pytest.raises(InvariantError, match="is FREE, not HELD"):
        pool.free(slots, HELD)
    assert pool.num_free == 4
    pool.check()


@pytest.mark.parametrize("times", [1, 5, 40])
def test_one_batch_naming_a_slot_twice_is_found(times: int):
    """Lesson 7: a duplicate inside one batch is a double free too, however long the batch."""
    pool = SlotPool(32)
    slots = taken(pool, 12)
    batch = np.concatenate((slots[:2], np.repeat(slots[:1], times), slots[2:]))

    with pytest.raises(InvariantError, match="twice"):
        pool.free(batch[: times + 2], HELD)
    with pytest.raises(InvariantError, match="twice"):
        pool.free(batch, HELD)
    assert pool.stats().held == 12
    pool.check()


def test_freeing_from_the_wrong_state_is_found():
    """A cached slot cannot be freed as if it were held."""
    pool = SlotPool(4)
    slots = taken(pool, 2)
    pool.move(slots[:1], HELD, CACHED)

    with pytest.raises(InvariantError, match="1 of 2 wrong"):
        pool.free(slots, HELD)
    pool.check()


@pytest.mark.parametrize("slot", [4, 9, -1, -4, -9])
def test_a_slot_outside_the_pool_is_found(slot):
    """A slot of another pool is an invariant violation, not an IndexError; and a negative one
    is not a slot counted from the end."""
    pool = SlotPool(4)
    taken(pool, 4)

    with pytest.raises(InvariantError, match="outside"):
        pool.free(np.array([slot]), HELD)
    with pytest.raises(InvariantError, match="outside"):
        pool.move(np.array([slot]), HELD, CACHED)
    pool.check()


def test_freeing_many_is_one_batch():
    """Lesson 1: freeing 100,000 slots is one call, and they can all be taken again."""
    pool = SlotPool(100_000)
    slots = taken(pool, 100_000)

    pool.free(slots, HELD)

    assert len(taken(pool, 100_000)) == 100_000
    pool.check()


def test_check_finds_a_lost_slot():
    """`check` can fail: a slot without a state is reported."""
    pool = SlotPool(4)
    pool._state[2] = CACHED

    with pytest.raises(InvariantError):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Any order of takes, moves and frees keeps all counts correct."""

    taken = Bundle("taken")
    STATES = (HELD, CACHED, SlotState.MOVING, SlotState.QUARANTINED)

    def __init__(self):
        super().__init__()
        self.pool = SlotPool(12)
        self.model = {}

    @rule(target=taken, count=st.integers(0, 8), state=st.sampled_from(STATES))
    def take(self, count, state):
        slots = self.pool.take(count, state)
        if slots is None:
            assert count > 12 - len(self.model)
            return multiple()
        for slot in slots.tolist():
            assert slot not in self.model
            self.model[slot] = state
        return (slots, state)

    @rule(target=taken, batch=consumes(taken), new=st.sampled_from(STATES))
    def move(self, batch, new):
        slots, old = batch
        self.pool.move(slots, old, new)
        self.model.update(dict.fromkeys(slots.tolist(), new))
        return (slots, new)

    @rule(batch=consumes(taken))
    def free(self, batch):
        slots, state = batch
        self.pool.free(slots, state)
        for slot in slots.tolist():
            del self.model[slot]

    @rule(batch=taken, wrong=st.sampled_from(STATES))
    def free_wrongly(self, batch, wrong):
        slots, state = batch
        if len(slots) and wrong is not state:
            with pytest.raises(InvariantError):
                self.pool.free(slots, wrong)

    @invariant()
    def books_balance(self):
        self.pool.check()
        assert self.pool.num_free == 12 - len(self.model)


TestPoolMachine = PoolMachine.TestCase
