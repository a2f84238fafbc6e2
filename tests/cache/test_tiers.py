"""All tiers at once, over simulated memory: no order of events can serve a wrong block.

Every slot holds what was really written to it. Executors copy as late as they may, fail,
stop half-way, write garbage after their time, and report twice. After every operation each
block that can be found must hold exactly its own tokens, in every tier.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.cache import (
    CacheConfig,
    Demotion,
    Ending,
    Landing,
    Namespace,
    Outcome,
    Promotion,
    TieredCache,
    TokenPath,
)
from headwater.types import Tier, WritePolicy
from tests.search import search

BLOCK = 2
GARBAGE = "garbage"
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
namespaces = st.sampled_from([Namespace(), Namespace(salt="tenant")])
# The same placeholder tokens may stand for different images.
media = st.sampled_from([None, None, {0: b"cat"}, {1: b"dog"}, {1: b"cat"}])


def identity(path, block):
    """What block `block` of `path` is: everything up to its end."""
    marks = tuple(sorted((i, m) for i, m in (path.media or {}).items() if i <= block))
    return (path.namespace, marks, tuple(path.tokens[: (block + 1) * BLOCK].tolist()))


class Sequence:
    """A request as the scheduler would keep it."""

    def __init__(self, path, lease, held):
        self.path = path
        self.lease = lease
        self.table = [*lease.slots.tolist(), *held.tolist()]
        self.computed = lease.num_blocks
        self.surplus = []

    @property
    def unpublished(self):
        return np.array(self.table[self.lease.num_blocks :] + self.surplus, dtype=np.int64)


class TierMachine(RuleBasedStateMachine):
    """Operations, faults and late completions in any order."""

    @initialize(
        policy=st.sampled_from(WritePolicy),
        device=st.integers(4, 9),
        host=st.integers(0, 7),
        storage=st.booleans(),
        stored_nodes=st.integers(0, 3),
    )
    def open(self, policy, device, host, storage, stored_nodes):
        self.cache = TieredCache(
            CacheConfig(
                block_tokens=BLOCK,
                device_blocks=device,
                host_blocks=host,
                storage=storage and host > 0,
                write_policy=policy,
                write_ahead_blocks=3,
                max_ghosts=3,
                max_stored_nodes=stored_nodes,
            )
        )
        self.memory = {Tier.DEVICE: [GARBAGE] * device, Tier.HOST: [GARBAGE] * host}
        self.storage = {}
        self.sequences = []
        self.jobs = []
        self.zombies = []
        self.ended = []
        self.now = 0.0

    # -- sequences ------------------------------------------------------------------------

    @rule(tokens=prompts, namespace=namespaces, images=media)
    def start(self, tokens, namespace, images):
        """Match, lease, take; when there is no room, all of it is undone."""
        path = TokenPath(tokens, namespace, images)
        before = self.cache.stats()
        match = self.cache.match(path)
        self.agree(path, match)
        lease = self.cache.lease(match, owner=f"r{len(tokens)}", now=self.now)
        held = self.cache.take(path.num_blocks(BLOCK) - lease.num_blocks, now=self.now)
        if held is None:
            self.cache.release(lease, now=self.now)
            assert self.cache.stats().device == before.device
            return
        self.cache.announce(lease, path)
        self.sequences.append(Sequence(path, lease, held))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute(self, data):
        """A step wrote some blocks; only then are they committed."""
        sequence = data.draw(st.sampled_from(self.sequences))
        settled = sequence.lease.num_blocks
        count = data.draw(st.integers(0, len(sequence.table) - settled))
        for block in range(settled, settled + count):
            slot = sequence.table[block]
            self.memory[Tier.DEVICE][slot] = identity(sequence.path, block)
        slots = np.array(sequence.table[settled : settled + count], dtype=np.int64)
        surplus = self.cache.commit(sequence.lease, sequence.path, slots, now=self.now)
        sequence.surplus += surplus.tolist()
        sequence.computed = settled + count

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=prompts)
    def grow(self, data, tokens):
        """Output follows the prompt: more tokens, more blocks."""
        sequence = data.draw(st.sampled_from(self.sequences))
        old = sequence.path
        longer = TokenPath(np.concatenate((old.tokens, tokens)), old.namespace, old.media)
        missing = longer.num_blocks(BLOCK) - len(sequence.table)
        held = self.cache.take(missing, now=self.now)
        if held is not None:
            sequence.path = longer
            sequence.table += held.tolist()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), save=st.booleans())
    def finish(self, data, save):
        """Finished, aborted or preempted: every slot that was not published goes back."""
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        if save:
            self.cache.save(sequence.lease)
        self.cache.release(sequence.lease, now=self.now, slots=sequence.unpublished)

    # -- transfers ------------------------------------------------------------------------

    @rule(limit=st.integers(0, 6))
    def demote(self, limit):
        plans = self.cache.demote(limit_blocks=limit, now=self.now)
        assert sum(plan.num_blocks for plan in plans) <= limit
        assert all(isinstance(plan, Demotion) for plan in plans)
        self.jobs += plans

    @rule(tokens=prompts, namespace=namespaces, images=media, limit=st.integers(0, 6))
    def promote(self, tokens, namespace, images, limit):
        path = TokenPath(tokens, namespace, images)
        plan = self.cache.promote(self.cache.match(path), limit_blocks=limit, now=self.now)
        if plan is not None:
            assert isinstance(plan, Promotion)
            assert 0 < plan.num_blocks <= limit
            self.jobs.append(plan)
            # Lesson 26: others who want the same blocks share this load.
            again = self.cache.match(path)
            assert again.loading == plan.job
            assert self.cache.promote(again, limit_blocks=limit, now=self.now) is None

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), done=st.booleans())
    def land(self, data, done):
        """A transfer ends: whole, in part, or not at all; its target may be half written."""
        plan = data.draw(st.sampled_from(self.jobs))
        self.jobs.remove(plan)
        total = plan.num_blocks
        copied = self.copy(plan, total if done else data.draw(st.integers(0, total)))
        self.scribble(plan, copied)
        ending = Ending.DONE if copied == total else Ending.PARTIAL
        if copied < total and plan.source is Tier.STORAGE:
            ending = Ending.DAMAGED
        if not copied and total:
            ending = data.draw(st.sampled_from([ending, Ending.FAILED]))
        self.tell(Outcome(job=plan.job, ending=ending, num_blocks=copied))
        self.ended.append(Outcome(job=plan.job, ending=ending, num_blocks=copied))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def time_out(self, data):
        """Nobody waits for it any more, but its executor has not returned."""
        plan = data.draw(st.sampled_from(self.jobs))
        self.jobs.remove(plan)
        self.zombies.append(plan)
        landing = self.tell(Outcome(job=plan.job, ending=Ending.TIMED_OUT))
        assert landing is Landing.QUARANTINED

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def late_write(self, data):
        """Lesson 50: a timed-out executor still writes; it must hit nobody's block."""
        self.scribble(data.draw(st.sampled_from(self.zombies)), 0)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def quiet(self, data):
        """The executor returns at last; even if it says it is done, it is too late."""
        plan = data.draw(st.sampled_from(self.zombies))
        self.zombies.remove(plan)
        self.scribble(plan, 0)
        ending = data.draw(st.sampled_from([Ending.QUIET, Ending.DONE, Ending.FAILED]))
        assert self.tell(Outcome(job=plan.job, ending=ending)) is Landing.NOTHING
        self.ended.append(Outcome(job=plan.job, ending=ending))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def tell_twice(self, data):
        """A duplicate or very late outcome changes nothing."""
        assert self.tell(data.draw(st.sampled_from(self.ended))) is Landing.UNKNOWN

    # -- storage and control --------------------------------------------------------------

    @rule(tokens=prompts, namespace=namespaces, images=media)
    def look_up(self, tokens, namespace, images):
        """Storage is asked which leading blocks it has, and the cache is told."""
        path = TokenPath(tokens, namespace, images)
        keys = self.cache.keys(path, path.num_blocks(BLOCK))
        found = next((i for i, key in enumerate(keys) if key not in self.storage), len(keys))
        if self.cache.config.storage:
            self.cache.learn_stored(path, found, now=self.now)

    @precondition(lambda self: self.storage)
    @rule(data=st.data())
    def storage_loses(self, data):
        del self.storage[data.draw(st.sampled_from(sorted(self.storage)))]

    @rule()
    def reset(self):
        """Works under load: with leases held and transfers in flight."""
        self.cache.reset()
        assert self.cache.tree.num_nodes == 0

    # -- what must always hold ------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self):
        if not hasattr(self, "cache"):
            return
        self.now += 1.0
        self.cache.check()
        for node in self.cache.tree.nodes():
            for block in range(node.num_blocks):
                self.holds_its_own(node, block)
        for sequence in self.sequences:
            for block in range(sequence.computed):
                found = self.memory[Tier.DEVICE][sequence.table[block]]
                assert found == identity(sequence.path, block)

    def teardown(self):
        """Liveness: when everybody has let go, every slot comes back."""
        if not hasattr(self, "cache"):
            return
        while self.sequences:
            sequence = self.sequences.pop()
            self.cache.release(sequence.lease, now=self.now, slots=sequence.unpublished)
        for plan in [*self.jobs, *self.zombies]:
            self.tell(Outcome(job=plan.job, ending=Ending.FAILED))
        self.cache.check()
        assert self.cache.num_available == self.cache.config.device_blocks
        self.cache.reset()
        stats = self.cache.stats()
        assert stats.device.free == self.cache.config.device_blocks
        assert stats.host.free == self.cache.config.host_blocks

    # -- hands ----------------------------------------------------------------------------

    def tell(self, outcome):
        return self.cache.land(outcome, now=self.now)

    def copy(self, plan, count):
        """Move `count` leading blocks for real, as late as an executor may; how many went."""
        for i in range(count):
            if plan.source is Tier.STORAGE:
                if plan.keys[i] not in self.storage:
                    return i
                content = self.storage[plan.keys[i]]
            else:
                content = self.memory[plan.source][plan.source_slots[i]]
            if plan.target is Tier.STORAGE:
                self.storage[plan.keys[i]] = content
            else:
                self.memory[plan.target][plan.target_slots[i]] = content
        return count

    def scribble(self, plan, start):
        """What an executor that failed leaves in its targets."""
        if plan.target is not Tier.STORAGE:
            for slot in plan.target_slots[start:]:
                self.memory[plan.target][slot] = GARBAGE

    def holds_its_own(self, node, block):
        what = full_identity(self.cache, node, block)
        if block < len(node.device):
            assert self.memory[Tier.DEVICE][node.device[block]] == what
        if block < len(node.host):
            assert self.memory[Tier.HOST][node.host[block]] == what
        key = self.cache.tree.keys(node)[block]
        assert self.storage.get(key, what) == what

    def agree(self, path, match):
        """A match is the leading run of a plain dict of blocks, tier by tier in order."""
        tiers = {}
        for node in self.cache.tree.nodes():
            for block in range(node.num_blocks):
                on_host = Tier.HOST if block < len(node.host) else Tier.STORAGE
                tier = Tier.DEVICE if block < len(node.device) else on_host
                tiers[full_identity(self.cache, node, block)] = tier
        run = []
        for block in range(path.num_blocks(BLOCK)):
            tier = tiers.get(identity(path, block))
            if tier is None:
                break
            run.append(tier)
        assert run == sorted(run)
        counts = [match.device_blocks, match.host_blocks, match.storage_blocks]
        assert counts == [run.count(tier) for tier in Tier]
        complete = len(run) == path.num_blocks(BLOCK) > 0
        assert (match.reason is None) == complete


def full_identity(cache, node, block):
    """The identity of a block in the tree, put together from the root down."""
    namespace = None
    tokens, marks = [], []
    at, end = node, block + 1
    while at.parent is not None:
        tokens = np.frombuffer(at.tokens, dtype=np.int32)[: end * BLOCK].tolist() + tokens
        marks += [(at.start + i, m) for i, m in (at.media or {}).items() if i < end]
        at = at.parent
        end = at.num_blocks
    namespace = next(name for name, root in cache.tree.roots.items() if root is at)
    return (namespace, tuple(sorted(marks)), tuple(tokens))


TierMachine.TestCase.settings = search(examples=150, steps=40)
TestTierMachine = TierMachine.TestCase
