"""All tiers at once, over simulated memory: no order of events serves a wrong block."""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.cache import CacheConfig, Hint, JobStatus, Namespace, TokenPath
from headwater.cache.policy import POLICIES, Shape
from headwater.cache.shadow_comparison import make_orders as session_orders
from headwater.types import WritePolicy
from tests.cache.harness import CacheHarness
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
        record_events=True,
    )
    # Prompts are short here, so the session policy must distinguish each of their blocks.
    orders = session_orders(Shape(device, host, 2), piece_tokens=2)
    return CacheHarness(config, orders if eviction == "session" else None)


def make_path(blocks, tail, namespace, media):
    """Few different blocks, so that prompts share prefixes, diverge inside runs and return."""
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
    """Operations, faults and late completions in any order, shrunk to the smallest failing
    case."""

    harness: CacheHarness

    @initialize(
        eviction=st.sampled_from(sorted(POLICIES)),
        policy=st.sampled_from(WritePolicy),
        device=st.sampled_from([4, 6, 9]),
        host=st.sampled_from([8, 5, 3, 12, 0]),
        storage=st.sampled_from([True, False]),
        stored_nodes=st.sampled_from([4, 1, 0]),
    )
    def open(self, eviction, policy, device, host, storage, stored_nodes):
        self.harness = make_rig(eviction, policy, device, host, storage, stored_nodes)

    @rule(path=paths)
    def start(self, path):
        self.harness.start(path)

    @rule(path=paths)
    def serve(self, path):
        self.harness.serve(path)

    @precondition(lambda self: self.harness.sequences)
    @rule(data=st.data())
    def compute(self, data):
        sequence = data.draw(st.sampled_from(self.harness.sequences))
        settled = sequence.lease.num_blocks
        self.harness.publish(sequence, data.draw(st.integers(settled, len(sequence.table))))

    @precondition(lambda self: self.harness.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=5))
    def grow(self, data, tokens):
        self.harness.grow(data.draw(st.sampled_from(self.harness.sequences)), tokens)

    @precondition(lambda self: self.harness.sequences)
    @rule(data=st.data(), save=st.booleans(), session=sessions, hint=hints)
    def finish(self, data, save, session, hint):
        sequence = data.draw(st.sampled_from(self.harness.sequences))
        self.harness.end(sequence, save, session, hint if session else None)

    @rule(namespace=st.sampled_from(NAMESPACES), session=sessions)
    def close_session(self, namespace, session):
        self.harness.close_session(namespace, session)

    @rule()
    def find_due(self):
        self.harness.find_due()

    @rule(limit=st.integers(0, 6))
    def plan_offloads(self, limit):
        self.harness.plan_offloads(limit)

    @rule(path=paths)
    def lease_old_match(self, path):
        self.harness.lease_old_match(path)

    @rule(data=st.data(), limit=st.sampled_from([6, 3, 1, 0]))
    def plan_load(self, data, limit):
        self.harness.plan_load(data.draw(st.sampled_from(self.harness.asked)), limit)

    @precondition(lambda self: self.harness.jobs)
    @rule(data=st.data())
    def finish_copy(self, data):
        plan = data.draw(st.sampled_from(self.harness.jobs))
        self.harness.finish_copy(plan, data.draw(st.integers(0, plan.num_blocks)))

    @rule(limit=st.integers(1, 20))
    def work_off(self, limit):
        self.harness.work_off(limit)

    @precondition(lambda self: self.harness.jobs)
    @rule(data=st.data())
    def time_out(self, data):
        self.harness.time_out(data.draw(st.sampled_from(self.harness.jobs)))

    @precondition(lambda self: self.harness.zombies)
    @rule(data=st.data())
    def late_write(self, data):
        self.harness.scribble(data.draw(st.sampled_from(self.harness.zombies)))

    @precondition(lambda self: self.harness.zombies)
    @rule(data=st.data(), ending=st.sampled_from(LATE))
    def quiet(self, data, ending):
        self.harness.quiet(data.draw(st.sampled_from(self.harness.zombies)), ending)

    @precondition(lambda self: self.harness.ended)
    @rule(data=st.data())
    def tell_twice(self, data):
        self.harness.tell_twice(data.draw(st.sampled_from(self.harness.ended)))

    @rule(data=st.data())
    def look_up(self, data):
        self.harness.look_up(data.draw(st.sampled_from(self.harness.asked)))

    @precondition(lambda self: self.harness.storage)
    @rule(data=st.data())
    def storage_loses(self, data):
        del self.harness.storage[data.draw(st.sampled_from(sorted(self.harness.storage)))]

    @rule()
    def reset(self):
        self.harness.reset()

    @invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "harness"):
            self.harness.nothing_is_wrong()

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.close()


TierMachine.TestCase.settings = search(examples=100, steps=40)
TestTierMachine = TierMachine.TestCase


@pytest.mark.parametrize("eviction", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(12 * SCALE))
def test_a_long_random_walk_keeps_every_invariant(seed, eviction):
    """Hundreds of equally likely operations reach states that a search rarely does."""
    rng = random.Random(seed)
    storage = rng.random() < 0.7
    harness = make_rig(
        eviction, rng.choice(list(WritePolicy)), rng.choice([4, 6, 9]), rng.choice([0, 3, 5, 8, 12]),
        storage, rng.choice([0, 1, 4, 50]),
    )  # fmt: skip
    for _ in range(500):
        rng.choice(STEPS)(harness, rng)
        harness.nothing_is_wrong()
    harness.close()


def random_path(rng):
    blocks = [rng.choice([0, 0, 1]) for _ in range(rng.randint(1, 6))]
    return make_path(blocks, rng.choice([[], [7]]), rng.choice(NAMESPACES), rng.choice(MEDIA))


def with_one(of, act):
    """Apply `act` to one element of a list of the harness, if it has any."""

    def step(harness, rng):
        things = list(getattr(harness, of))
        if things:
            act(harness, rng, rng.choice(things))

    return step


def compute_some(harness, rng, sequence):
    harness.publish(sequence, rng.randint(sequence.lease.num_blocks, len(sequence.table)))


STEPS = [
    lambda harness, rng: (
        harness.start(random_path(rng)) if len(harness.sequences) < 4 else None
    ),
    lambda harness, rng: harness.serve(random_path(rng)),
    lambda harness, rng: harness.lease_old_match(random_path(rng)),
    lambda harness, rng: harness.serve(random_path(rng)),
    lambda harness, rng: harness.serve(random_path(rng)),
    lambda harness, rng: harness.lease_old_match(random_path(rng)),
    lambda harness, rng: harness.plan_offloads(rng.randint(0, 6)),
    lambda harness, rng: harness.work_off(rng.randint(1, 20)),
    lambda harness, rng: harness.work_off(rng.randint(1, 20)),
    lambda harness, rng: harness.reset() if rng.random() < 0.05 else None,
    with_one("sequences", compute_some),
    with_one("sequences", lambda harness, rng, s: harness.grow(s, random_path(rng).tokens[:4])),
    with_one("sequences", lambda harness, rng, s: harness.end(s, rng.random() < 0.5)),
    with_one(
        "asked", lambda harness, rng, path: harness.plan_load(path, rng.choice([6, 3, 1, 0]))
    ),
    with_one("asked", lambda harness, rng, path: harness.plan_load(path, 6)),
    with_one("asked", lambda harness, rng, path: harness.look_up(path)),
    with_one(
        "jobs",
        lambda harness, rng, plan: harness.finish_copy(plan, rng.randint(0, plan.num_blocks)),
    ),
    with_one("jobs", lambda harness, rng, plan: harness.finish_copy(plan, plan.num_blocks)),
    with_one("jobs", lambda harness, rng, plan: harness.time_out(plan)),
    with_one("zombies", lambda harness, rng, plan: harness.scribble(plan)),
    with_one("zombies", lambda harness, rng, plan: harness.quiet(plan, rng.choice(LATE))),
    with_one("ended", lambda harness, rng, outcome: harness.tell_twice(outcome)),
    with_one("storage", lambda harness, rng, key: harness.storage.pop(key)),
]
