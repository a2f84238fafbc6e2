"""All tiers at once, over simulated memory: no order of events can serve a wrong block."""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.cache import CacheConfig, Hint, JobStatus, Namespace, TokenPath
from headwater.cache.duel import make_orders as session_orders
from headwater.cache.policy import POLICIES, Shape
from headwater.types import WritePolicy
from tests.cache.rig import Rig
from tests.search import SCALE, search

NAMESPACES = [Namespace()] * 4 + [Namespace(salt="tenant")]
# The same placeholder tokens may stand for different images.
MEDIA = [None] * 6 + [{0: b"cat"}, {1: b"dog"}, {1: b"cat"}]
LATE = [JobStatus.QUIET, JobStatus.DONE, JobStatus.FAILED]


def make_rig(eviction, policy, device, host, storage, stored_nodes):
    config = CacheConfig(
        block_tokens=2,
        device_blocks=device,
        host_blocks=host,
        storage=storage and host > 0,
        write_policy=policy,
        write_ahead_blocks=3,
        eviction=eviction,
        max_ghosts=3,
        max_stored_nodes=stored_nodes,
        record_facts=True,
    )
    # Prompts are short here, so the session policy is to tell apart every block of them.
    orders = session_orders(Shape(device, host, 2), piece_tokens=2)
    return Rig(config, orders if eviction == "session" else None)


def make_path(blocks, tail, namespace, media):
    """Few different blocks, so that prompts share prefixes, diverge inside runs, come back."""
    tokens = [token for block in blocks for token in (0, block)]
    return TokenPath(tokens + tail, namespace, media)


paths = st.builds(
    make_path,
    st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=6),
    st.sampled_from([[], [7]]),
    st.sampled_from(NAMESPACES),
    st.sampled_from(MEDIA),
)


sessions = st.sampled_from(["", "a", "b"])
hints = st.sampled_from([None, Hint(closed=True), Hint(), Hint(returns_in_s=5.0)])


class TierMachine(RuleBasedStateMachine):
    """Operations, faults and late completions in any order, shrunk to the least that fails."""

    rig: Rig

    @initialize(
        eviction=st.sampled_from(sorted(POLICIES)),
        policy=st.sampled_from(WritePolicy),
        device=st.sampled_from([4, 6, 9]),
        host=st.sampled_from([8, 5, 3, 12, 0]),
        storage=st.sampled_from([True, False]),
        stored_nodes=st.sampled_from([4, 1, 0]),
    )
    def open(self, eviction, policy, device, host, storage, stored_nodes):
        self.rig = make_rig(eviction, policy, device, host, storage, stored_nodes)

    @rule(path=paths)
    def start(self, path):
        self.rig.start(path)

    @rule(path=paths)
    def serve(self, path):
        self.rig.serve(path)

    @precondition(lambda self: self.rig.sequences)
    @rule(data=st.data())
    def compute(self, data):
        sequence = data.draw(st.sampled_from(self.rig.sequences))
        settled = sequence.lease.num_blocks
        self.rig.publish(sequence, data.draw(st.integers(settled, len(sequence.table))))

    @precondition(lambda self: self.rig.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=5))
    def grow(self, data, tokens):
        self.rig.grow(data.draw(st.sampled_from(self.rig.sequences)), tokens)

    @precondition(lambda self: self.rig.sequences)
    @rule(data=st.data(), save=st.booleans(), session=sessions, hint=hints)
    def finish(self, data, save, session, hint):
        sequence = data.draw(st.sampled_from(self.rig.sequences))
        self.rig.end(sequence, save, session, hint if session else None)

    @rule(namespace=st.sampled_from(NAMESPACES), session=sessions)
    def close_session(self, namespace, session):
        self.rig.close_session(namespace, session)

    @rule()
    def find_due(self):
        self.rig.find_due()

    @rule(limit=st.integers(0, 6))
    def demote(self, limit):
        self.rig.demote(limit)

    @rule(data=st.data(), limit=st.sampled_from([6, 3, 1, 0]))
    def promote(self, data, limit):
        self.rig.promote(data.draw(st.sampled_from(self.rig.asked)), limit)

    @precondition(lambda self: self.rig.jobs)
    @rule(data=st.data())
    def land(self, data):
        plan = data.draw(st.sampled_from(self.rig.jobs))
        self.rig.land(plan, data.draw(st.integers(0, plan.num_blocks)))

    @rule(limit=st.integers(1, 20))
    def work_off(self, limit):
        self.rig.work_off(limit)

    @precondition(lambda self: self.rig.jobs)
    @rule(data=st.data())
    def time_out(self, data):
        self.rig.time_out(data.draw(st.sampled_from(self.rig.jobs)))

    @precondition(lambda self: self.rig.zombies)
    @rule(data=st.data())
    def late_write(self, data):
        self.rig.scribble(data.draw(st.sampled_from(self.rig.zombies)))

    @precondition(lambda self: self.rig.zombies)
    @rule(data=st.data(), ending=st.sampled_from(LATE))
    def quiet(self, data, ending):
        self.rig.quiet(data.draw(st.sampled_from(self.rig.zombies)), ending)

    @precondition(lambda self: self.rig.ended)
    @rule(data=st.data())
    def tell_twice(self, data):
        self.rig.tell_twice(data.draw(st.sampled_from(self.rig.ended)))

    @rule(data=st.data())
    def look_up(self, data):
        self.rig.look_up(data.draw(st.sampled_from(self.rig.asked)))

    @precondition(lambda self: self.rig.storage)
    @rule(data=st.data())
    def storage_loses(self, data):
        del self.rig.storage[data.draw(st.sampled_from(sorted(self.rig.storage)))]

    @rule()
    def reset(self):
        self.rig.reset()

    @invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "rig"):
            self.rig.nothing_is_wrong()

    def teardown(self):
        if hasattr(self, "rig"):
            self.rig.close()


TierMachine.TestCase.settings = search(examples=100, steps=40)
TestTierMachine = TierMachine.TestCase


@pytest.mark.parametrize("eviction", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(12 * SCALE))
def test_a_long_random_walk_goes_nowhere_wrong(seed, eviction):
    """Hundreds of operations, all equally likely: reaches states that a search seldom does."""
    rng = random.Random(seed)
    storage = rng.random() < 0.7
    rig = make_rig(
        eviction, rng.choice(list(WritePolicy)), rng.choice([4, 6, 9]), rng.choice([0, 3, 5, 8, 12]),
        storage, rng.choice([0, 1, 4, 50]),
    )  # fmt: skip
    for _ in range(500):
        rng.choice(STEPS)(rig, rng)
        rig.nothing_is_wrong()
    rig.close()


def random_path(rng):
    blocks = [rng.choice([0, 0, 1]) for _ in range(rng.randint(1, 6))]
    return make_path(blocks, rng.choice([[], [7]]), rng.choice(NAMESPACES), rng.choice(MEDIA))


def with_one(of, act):
    """Do `act` to one of the rig's things, if it has any."""

    def step(rig, rng):
        things = list(getattr(rig, of))
        if things:
            act(rig, rng, rng.choice(things))

    return step


def compute_some(rig, rng, sequence):
    rig.publish(sequence, rng.randint(sequence.lease.num_blocks, len(sequence.table)))


STEPS = [
    lambda rig, rng: rig.start(random_path(rng)) if len(rig.sequences) < 4 else None,
    lambda rig, rng: rig.serve(random_path(rng)),
    lambda rig, rng: rig.serve(random_path(rng)),
    lambda rig, rng: rig.serve(random_path(rng)),
    lambda rig, rng: rig.demote(rng.randint(0, 6)),
    lambda rig, rng: rig.work_off(rng.randint(1, 20)),
    lambda rig, rng: rig.work_off(rng.randint(1, 20)),
    lambda rig, rng: rig.reset() if rng.random() < 0.05 else None,
    with_one("sequences", compute_some),
    with_one("sequences", lambda rig, rng, s: rig.grow(s, random_path(rng).tokens[:4])),
    with_one("sequences", lambda rig, rng, s: rig.end(s, rng.random() < 0.5)),
    with_one("asked", lambda rig, rng, path: rig.promote(path, rng.choice([6, 3, 1, 0]))),
    with_one("asked", lambda rig, rng, path: rig.promote(path, 6)),
    with_one("asked", lambda rig, rng, path: rig.look_up(path)),
    with_one("jobs", lambda rig, rng, plan: rig.land(plan, rng.randint(0, plan.num_blocks))),
    with_one("jobs", lambda rig, rng, plan: rig.land(plan, plan.num_blocks)),
    with_one("jobs", lambda rig, rng, plan: rig.time_out(plan)),
    with_one("zombies", lambda rig, rng, plan: rig.scribble(plan)),
    with_one("zombies", lambda rig, rng, plan: rig.quiet(plan, rng.choice(LATE))),
    with_one("ended", lambda rig, rng, outcome: rig.tell_twice(outcome)),
    with_one("storage", lambda rig, rng, key: rig.storage.pop(key)),
]
