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

from headwater.cache.pool import SlotPool, SlotState, native_class
from headwater.errors import CacheUseError, InvariantError
from headwater.native import slot_pool as native_pool

HELD, CACHED, FREE = SlotState.HELD, SlotState.CACHED, SlotState.FREE


@pytest.fixture(params=["python", "native"])
def new_pool(request):
    """The class of one form of the pool."""
    if request.param == "python":
        return SlotPool
    if not native_pool.prepare():
        pytest.skip("there is no C compiler or no header file of Python")
    return native_class(native_pool.pool_type())


def taken(pool, count):
    """`count` held slots, which the pool must have."""
    slots = pool.take(count)
    assert slots is not None
    return slots


def test_take_is_all_or_nothing(new_pool):
    """Too large a take changes nothing and returns None."""
    pool = new_pool(4)

    assert pool.take(5) is None
    assert pool.num_free == 4
    assert len(taken(pool, 4)) == 4
    pool.check()


def test_taken_slots_are_distinct_and_held(new_pool):
    """No slot is handed out twice."""
    pool = new_pool(10)

    slots = np.concatenate([taken(pool, 3), taken(pool, 4)])

    assert len(set(slots.tolist())) == 7
    assert pool.stats().held == 7
    pool.check()


@pytest.mark.parametrize("count", [-1, -100])
def test_negative_counts_are_refused(new_pool, count):
    """Lesson 8: a negative count is the caller's error, and changes nothing."""
    pool = new_pool(4)

    with pytest.raises(CacheUseError):
        pool.take(count)
    assert pool.num_free == 4


def test_taking_and_freeing_zero_slots_does_nothing(new_pool):
    """Lesson 8: taking and freeing nothing is allowed and does nothing."""
    pool = new_pool(0)

    pool.free(taken(pool, 0), HELD)

    assert pool.num_free == 0
    pool.check()


def test_freeing_a_free_slot_is_found(new_pool):
    """Lesson 7: a double free is an invariant violation, found before anything changes."""
    pool = new_pool(4)
    slots = taken(pool, 2)
    pool.free(slots, HELD)

    with pytest.raises(InvariantError, match="is FREE, not HELD"):
        pool.free(slots, HELD)
    assert pool.num_free == 4
    pool.check()


@pytest.mark.parametrize("times", [1, 5, 40])
def test_one_batch_naming_a_slot_twice_is_found(new_pool, times: int):
    """Lesson 7: a duplicate inside one batch is a double free too, however long the batch."""
    pool = new_pool(32)
    slots = taken(pool, 12)
    batch = np.concatenate((slots[:2], np.repeat(slots[:1], times), slots[2:]))

    with pytest.raises(InvariantError, match="twice"):
        pool.free(batch[: times + 2], HELD)
    with pytest.raises(InvariantError, match="twice"):
        pool.free(batch, HELD)
    assert pool.stats().held == 12
    pool.check()


def test_freeing_from_the_wrong_state_is_found(new_pool):
    """A cached slot cannot be freed as if it were held."""
    pool = new_pool(4)
    slots = taken(pool, 2)
    pool.move(slots[:1], HELD, CACHED)

    with pytest.raises(InvariantError, match="1 of 2 wrong"):
        pool.free(slots, HELD)
    pool.check()


@pytest.mark.parametrize("slot", [4, 9, -1, -4, -9])
def test_a_slot_outside_the_pool_is_found(new_pool, slot):
    """A slot of another pool is an invariant violation, not an IndexError; and a negative one
    is not a slot counted from the end."""
    pool = new_pool(4)
    taken(pool, 4)

    with pytest.raises(InvariantError, match="outside"):
        pool.free(np.array([slot]), HELD)
    with pytest.raises(InvariantError, match="outside"):
        pool.move(np.array([slot]), HELD, CACHED)
    pool.check()


def test_freeing_many_is_one_batch(new_pool):
    """Lesson 1: freeing 100,000 slots is one call, and they can all be taken again."""
    pool = new_pool(100_000)
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


def test_a_slot_that_is_read_is_not_free_before_the_read_ends(new_pool):
    """A block may be evicted during a write to storage; its slot is reused after the write."""
    pool = new_pool(4)
    slots = taken(pool, 4)
    pool.move(slots, HELD, CACHED)
    pool.begin_read(slots[:2])
    pool.begin_read(slots[:1])

    pool.free(slots, CACHED)
    assert (pool.num_free, pool.stats().quarantined) == (2, 2)
    pool.lose_read(slots[:2])
    assert pool.has_lost_read(slots[:1])
    assert not pool.has_lost_read(slots[2:])
    pool.end_read(slots[:2], True)
    assert (pool.num_free, pool.stats().quarantined) == (3, 1)
    pool.end_read(slots[:1])

    assert pool.num_free == 4
    pool.check()


def test_only_cached_slots_are_read(new_pool):
    """A write to storage cannot read a slot that has no block, or one of another pool."""
    pool = new_pool(4)
    slots = taken(pool, 2)

    with pytest.raises(InvariantError, match="is HELD, not CACHED"):
        pool.begin_read(slots)
    with pytest.raises(InvariantError, match="outside"):
        pool.begin_read(np.array([7]))
    assert pool.num_reads == 0
    pool.check()


def test_claimed_slots_are_not_taken_again(new_pool):
    """An adopted host block keeps its slot."""
    pool = new_pool(6)

    pool.claim(np.array([1, 4]), CACHED)

    assert sorted(taken(pool, 4).tolist()) == [0, 2, 3, 5]
    with pytest.raises(InvariantError, match="is CACHED, not FREE"):
        pool.claim(np.array([4]), CACHED)
    pool.check()


def test_an_eviction_passes_slots_on(new_pool):
    """Evicted slots and all free slots are taken in one batch, or nothing is changed."""
    pool = new_pool(5)
    slots = taken(pool, 4)
    pool.move(slots, HELD, CACHED)

    with pytest.raises(InvariantError, match="is CACHED, not HELD"):
        pool.reuse([slots[:2]], HELD, HELD)
    assert pool.num_free == 1
    reused = pool.reuse([slots[:1], slots[2:]], CACHED, HELD)

    assert (len(reused), pool.num_free) == (4, 0)
    assert set(reused.tolist()) == set(range(5)) - {slots[1]}
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


SLOTS = st.lists(st.integers(-1, 12), max_size=14).map(lambda s: np.array(s, dtype=np.int64))
IN_USE = st.sampled_from(list(SlotState)[1:])


class BothForms(RuleBasedStateMachine):
    """The native pool and the one in Python have the same result for any arguments."""

    reads = Bundle("reads")

    def __init__(self):
        super().__init__()
        native = native_class(native_pool.pool_type())
        self.pools = SlotPool(12), native(12)

    def both(self, name, *args):
        """Call a method of both pools, and return whether it succeeded."""
        results = []
        for pool in self.pools:
            try:
                results.append((getattr(pool, name)(*args), ""))
            except InvariantError as exc:
                results.append((None, str(exc)))
        (one, error), (other, other_error) = results
        assert error == other_error
        np.testing.assert_array_equal(one, other)
        return not error

    @rule(count=st.integers(0, 13), state=IN_USE)
    def take(self, count, state):
        self.both("take", count, state)

    @rule(slots=SLOTS, old=IN_USE, new=st.sampled_from([HELD, CACHED]))
    def move(self, slots, old, new):
        self.both("move", slots, old, new)

    @rule(slots=SLOTS, old=st.sampled_from([HELD, CACHED]))
    def free(self, slots, old):
        self.both("free", slots, old)

    @rule(slots=SLOTS, new=st.sampled_from([HELD, CACHED]))
    def claim(self, slots, new):
        self.both("claim", slots, new)

    @rule(count=st.integers(0, 6), new=st.sampled_from([HELD, CACHED]))
    def reuse(self, count, new):
        states, readers = self.pools[0].states(), self.pools[0].readers()
        slots = np.flatnonzero((states == CACHED) & (readers == 0))[:count]
        self.both("reuse", [slots[:2], slots[2:]], CACHED, new)

    @rule(parts=st.lists(SLOTS, max_size=3))
    def joined(self, parts):
        self.both("joined", parts)

    @rule(target=reads, count=st.integers(0, 6))
    def begin_read(self, count):
        slots = self.pools[0].owned(CACHED)[:count]
        self.both("begin_read", slots)
        return slots, False

    @rule(target=reads, batch=consumes(reads))
    def lose_read(self, batch):
        if not batch[1]:
            self.both("lose_read", batch[0])
        self.both("has_lost_read", batch[0])
        return batch[0], True

    @rule(batch=consumes(reads))
    def end_read(self, batch):
        self.both("end_read", *batch)

    @invariant()
    def are_equal_and_correct(self):
        for name in ("check", "counts", "free_slots", "states", "readers"):
            self.both(name)
        assert self.pools[0].num_free == self.pools[1].num_free


TestBothForms = pytest.mark.skipif(not native_pool.prepare(), reason="needs a C compiler")(
    BothForms.TestCase
)
