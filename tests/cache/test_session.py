"""The parts of the session policy: history, learning, densities; and its guard."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache import CacheConfig, FinishedRequest, Namespace, TieredCache, TokenPath
from headwater.cache.node import Node, RetentionMark
from headwater.cache.plan import Lease
from headwater.cache.policy import MarkedRun
from headwater.cache.policy.fingerprint import Fingerprints
from headwater.cache.policy.hazard import EDGES, NUM_BINS, ROW, HazardModel
from headwater.cache.policy.history import History
from headwater.cache.policy.retention import Retention, Visit
from headwater.cache.policy.samples import HazardSamples
from headwater.cache.policy.session import SessionPolicy
from headwater.cache.policy.traits import Relation, Traits, features_of
from headwater.cache.shadow_comparison import ShadowComparison
from headwater.types import RequestId, Tier, WritePolicy
from tests.cache.make import make_cache, make_path, serve
from tests.search import search

BLOCK = 2


def make_lease(tokens, now=0.0, namespace=None):
    path = TokenPath(tokens, namespace or Namespace())
    node = Node(None, b"", 0, 1)
    return Lease(RequestId("r"), node, len(tokens) // BLOCK, path, now, None)


def see(history, tokens, output=10, now=0.0):
    seen = history.see(make_lease(tokens), FinishedRequest(len(tokens), output), now)
    assert seen is not None
    return seen


def traits(turn, relation, growth, times, output=10):
    return Traits(turn, relation, growth, output).used(times)


tokens = st.lists(st.integers(0, 1), max_size=12)


@search(examples=300)
@given(first=tokens, second=tokens)
def test_prefixes_have_the_same_number_exactly_when_they_are_equal(first, second):
    """Equal prefixes have equal numbers and different ones do not, also for tokens that are all
    zero, and for paths of different length."""
    numbers = Fingerprints(BLOCK, 1)
    mine = numbers.of(TokenPath(first), len(first) // BLOCK) if len(first) >= BLOCK else []
    theirs = numbers.of(TokenPath(second), len(second) // BLOCK) if len(second) >= BLOCK else []
    for end, (a, b) in enumerate(zip(mine, theirs, strict=False), start=1):
        assert (a == b) == (first[: end * BLOCK] == second[: end * BLOCK])
    assert len(set(mine)) == len(mine)


def test_namespaces_and_media_have_different_pasts():
    """A session is never confused with another tenant's, nor one image with another."""
    numbers = Fingerprints(BLOCK, 1)
    paths = [
        TokenPath([1, 2, 3, 4]),
        TokenPath([1, 2, 3, 4], Namespace(salt="tenant")),
        TokenPath([1, 2, 3, 4], media={0: b"cat"}),
        TokenPath([1, 2, 3, 4], media={0: b"dog"}),
    ]

    assert len({tuple(numbers.of(path, 2)) for path in paths}) == 4


def test_a_session_is_known_again_by_its_prompt():
    """Turn, relation and growth come from the last request with the same prefix."""
    history = History(BLOCK, 1)
    opening = see(history, [1, 1, 2, 2])
    turn = see(history, [1, 1, 2, 2, 3, 3])
    branch = see(history, [1, 1, 9, 9])

    assert [run.traits for run in opening.runs] == [traits(1, Relation.FIRST, None, 1)]
    assert [(run.end, run.traits) for run in turn.runs] == [
        (2, traits(2, Relation.CONTINUES, 2, 2)),
        (3, traits(2, Relation.CONTINUES, 2, 1)),
    ]
    assert [(run.end, run.traits) for run in branch.runs] == [
        (1, traits(3, Relation.BRANCHES, -2, 3)),
        (2, traits(3, Relation.BRANCHES, -2, 1)),
    ]
    assert opening.session == turn.session == branch.session


def test_a_prefix_of_many_sessions_belongs_to_no_session():
    """After 16 different continuations a shared system prompt is a trunk."""
    history = History(BLOCK, 1)
    for session in range(2, 20):
        see(history, [1, 1, session, session])
    first = see(history, [1, 1, 50, 50])
    again = see(history, [1, 1, 50, 50, 7, 7])
    other = see(history, [1, 1, 51, 51])

    assert first.runs[0].traits == Traits(1, Relation.FIRST, None, 10).trunk()
    assert first.runs[1].traits == traits(1, Relation.FIRST, None, 1)
    assert first.session == again.session != other.session


def test_the_past_is_bounded_in_time():
    """Two hours later a session that did not return is forgotten."""
    history = History(BLOCK, 1)
    see(history, [1, 1], now=0.0)
    see(history, [5, 5], now=3_601.0)
    see(history, [6, 6], now=7_203.0)

    assert see(history, [1, 1], now=7_204.0).runs[0].uses == 1


def test_a_run_is_a_sample_for_as_long_as_it_was_observed():
    """Nothing is learned about a bin before it is over, or after the return."""
    samples = HazardSamples()
    early, never = samples.add(7, 0.0), samples.add(8, 0.0)
    samples.came_back(early, 4.0)
    samples.came_back(early, 9.0)
    first = samples.ready(5.9)
    second = samples.ready(12.5)

    assert [list(column) for column in first] == [[7, 8], [0, 0], [False, False]]
    assert [list(column) for column in second] == [[7, 8, 8], [1, 1, 2], [True, False, False]]
    assert never == early + 1


def test_densities_are_the_best_ratio_over_all_times_to_give_up():
    """The computed densities are compared with the definition, for random hazards."""
    rng = np.random.default_rng(5)
    model = HazardModel(8, 2)
    for number in range(1, 6):
        model.add_class((number, 7), None)
    for _ in range(200):
        count = 32
        model.learn(
            rng.integers(5, size=count),
            rng.integers(NUM_BINS, size=count),
            rng.random(count) < rng.random(),
        )
    model.refresh()
    hazards = model._hazards(model._features[:5])
    table = model.densities.reshape(-1, ROW)

    for hazard, row in zip(hazards, table, strict=False):
        for begin in range(NUM_BINS):
            best = max(ratio(hazard, begin, end) for end in range(begin + 1, NUM_BINS + 1))
            assert row[begin] == pytest.approx(best, rel=1e-9)
    assert not table[:, NUM_BINS:].any()


def ratio(hazard, begin, end):
    """Hits over block-seconds when a run is kept from bin `begin` until bin `end`."""
    value = cost = 0.0
    alive = 1.0
    for b in range(begin, end):
        value += alive * hazard[b]
        cost += alive * (EDGES[b + 1] - EDGES[b]) * (1 - hazard[b] / 2)
        alive *= 1 - hazard[b]
    return value / cost


def test_hazards_are_learned():
    """A class that returns in the second bin and a class that never returns get different
    hazards."""
    model = HazardModel(3, 1)
    for number in (1, 2):
        model.add_class((number,), None)
    for _ in range(400):
        model.learn(np.array([0, 1]), np.array([1, 1]), np.array([True, False]))
    model.refresh()
    table = model.densities.reshape(-1, ROW)

    assert table[0, 1] > 10 * table[1, 1]


def test_every_trait_is_a_feature_of_its_own():
    """Different traits have different features; a trunk has only the feature of its kind."""
    seen = {
        features_of(traits(turn, relation, growth, times, output))
        for turn in (1, 2, 3, 5, 7, 20)
        for relation in Relation
        for growth in (None, -5, 50, 200, 500, 900, 1_500, 3_000, 5_000, 9_000)
        for times in (1, 2, 3, 5, 8, 30)
        for output in (0, 3, 9, 30, 70, 150, 300, 600, 1_000)
    }

    assert len(seen) == 6 * 3 * 10 * 6 * 9
    assert len(features_of(Traits(1, Relation.FIRST, None, 0).trunk())) == 1


def test_stale_entries_do_not_pile_up():
    """A node that is used again and again without eviction costs no more memory than one
    use."""
    order = SessionPolicy(Retention(BLOCK), Tier.DEVICE)
    node = Node(Node(None, b"", 0, 1), b"a", 0, 2)
    for now in range(5_000):
        node.mark = RetentionMark(float(now), 0)
        order.add(node, float(now))
        order.discard(node)

    assert sum(len(queue) for queue in order._queues.values()) <= 4_200


@pytest.mark.slow
def test_the_guard_follows_the_lru_while_that_finds_more():
    """Sessions that return at once are marked as never returning. An LRU finds them, so the
    order becomes that of an LRU; when the marks are right again, the policy's own order
    returns."""
    retention = Retention(BLOCK)
    orders = SessionPolicy(retention, Tier.DEVICE), SessionPolicy(retention, Tier.HOST)
    orders[0].resident_blocks = 40
    comparison = ShadowComparison(retention, orders)
    hated, loved = retention.unknown, retention.hazards.add_class((1,), None)
    retention.hazards.densities[loved * ROW : (loved + 1) * ROW] = 1.0
    cautious = []
    for number in range(10_000):
        # Each session comes twice in a row; at first only an LRU keeps its first run.
        wrong = number < 1_000
        old = RetentionMark(0.0, loved if wrong else hated)
        new = RetentionMark(0.0, hated if wrong else loved)
        session = number // 2
        prefixes = [(session << 8) + piece for piece in range(4)]
        mark = new if number % 2 == 0 else old
        comparison.watch(Visit(0, prefixes, [MarkedRun(4, mark)], 1, 0.0))
        cautious.append(orders[0].cautious)

    assert cautious[999]
    assert not cautious[-1]
    assert orders[1].cautious == orders[0].cautious


def test_new_sessions_are_kept_while_old_ones_that_are_over_have_taught_too_little():
    """The cache has room for all live sessions. Sessions of the first round came back at each
    turn until they ended, so a policy that trusts so few samples would keep them and evict the
    sessions of the second round."""
    cache = TieredCache(
        CacheConfig(
            device_blocks=2_000,
            block_tokens=16,
            write_policy=WritePolicy.NONE,
            eviction="session",
        )
    )
    now, lost = 0.0, 0
    for number in range(2 * 4 * 64):
        turn, session = number // 64 % 4, number % 64 + number // 256 * 64
        now += 0.02
        prompt = np.full(256 + 32 * turn, 1_000 + session, dtype=np.int32)
        path = TokenPath(prompt)
        lease = cache.lease(cache.match(path), owner=RequestId(""), now=now)
        lost += turn > 0 and lease.num_blocks < len(prompt) // 16 - 2
        slots = cache.take(len(prompt) // 16 - lease.num_blocks, now=now)
        assert slots is not None
        cache.commit(lease, path, slots, now=now)
        cache.release(lease, now=now, finished=FinishedRequest(len(prompt), 4))
    assert lost == 0


class ExpectedNode(Node):
    """A node that its client expects to use again before 10 s. Counts how often this time is
    read."""

    num_reads = 0

    @property
    def expected_until_s(self):
        ExpectedNode.num_reads += 1
        return 10.0

    @expected_until_s.setter
    def expected_until_s(self, value):
        """Ignored: the constructor of a node sets another value."""


def test_evictions_pass_over_an_expected_node_once(monkeypatch):
    """However many nodes are expected: only the first eviction passes over them. They are last
    until their time is over, and first afterwards."""
    monkeypatch.setattr(ExpectedNode, "num_reads", 0)
    retention = Retention(BLOCK)
    policy = SessionPolicy(retention, Tier.DEVICE)
    policy.cautious = True
    expected = [ExpectedNode(None, b"", 0, 1) for _ in range(100)]
    others = [Node(None, b"", 0, 1) for _ in range(3)]
    for node in expected + others:
        policy.add(node, 0.0)

    assert next(policy.victims()) is others[0]
    assert ExpectedNode.num_reads >= 100
    ExpectedNode.num_reads = 0
    assert next(policy.victims()) is others[0]
    assert ExpectedNode.num_reads == 0

    policy.discard(others[0])
    policy.discard(expected[0])
    assert list(policy.victims()) == others[1:] + expected[1:]
    retention.now = 10.0
    assert list(policy.victims()) == expected[1:] + others[1:]


def test_a_node_that_is_expected_for_longer_is_not_set_aside_for_ever():
    """A node in the host tier may be expected for longer while it is set aside. It comes first
    when that time is over. The times that the policy remembers are bounded by its nodes."""
    retention = Retention(BLOCK)
    policy = SessionPolicy(retention, Tier.HOST)
    policy.cautious = True
    node, other = Node(None, b"", 0, 1), Node(None, b"", 0, 1)
    node.expected_until_s = 10.0
    policy.add(node, 0.0)
    policy.add(other, 0.0)
    assert list(policy.victims()) == [other, node]
    node.expected_until_s = 20.0
    retention.now = 10.0
    assert list(policy.victims()) == [other, node]
    retention.now = 20.0
    assert list(policy.victims()) == [node, other]

    retention.now = 0.0
    for _ in range(3000):
        policy.discard(node)
        policy.add(node, 0.0)
        list(policy.victims())
    assert len(policy._ends) < 1100


def test_blocks_that_a_waiting_request_will_use_are_evicted_last_for_a_while():
    """A waiting request is certain to use the node, whatever the node's class says. If the
    request does not come, the node has the place of its class again."""
    retention = Retention(BLOCK)
    policy = SessionPolicy(retention, Tier.DEVICE)
    wanted, other = Node(None, b"", 0, 1), Node(None, b"", 0, 2)
    wanted.mark = RetentionMark(0.0, retention.closed)
    for node in (wanted, other):
        node.device = np.zeros(1, dtype=np.int64)
        policy.add(node, 0.0)
    assert list(policy.victims()) == [wanted, other]

    retention.now = wanted.wanted_s = 10.0
    policy.discard(wanted)
    policy.add(wanted, 10.0)
    assert list(policy.victims()) == [other, wanted]
    retention.now = 114.0
    assert list(policy.victims()) == [other, wanted]
    retention.now = 116.0
    assert list(policy.victims()) == [wanted, other]


@pytest.mark.parametrize("eviction", ["lru", "session"])
def test_only_the_blocks_that_a_waiting_request_will_find_are_kept(eviction):
    """The rest of a longer path is evicted before blocks that were used later."""
    cache = make_cache(8, eviction=eviction)
    serve(cache, make_path(1, 2, 3, 4))
    serve(cache, make_path(5, 6, 7, 8))

    cache.refresh(cache.match(make_path(1, 2, 9)), now=1.0)
    cache.trim(3)
    cache.check()

    assert cache.match(make_path(1, 2, 3, 4)).num_blocks == 2
    assert cache.match(make_path(5, 6, 7, 8)).num_blocks == 1
