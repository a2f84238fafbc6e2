"""A cache over simulated memory, with executors that can make every mistake.

Every slot holds the bytes that were written to it. After every operation each findable block
must hold exactly its own tokens, in every tier; `nothing_is_wrong` checks that.
"""

import numpy as np

from headwater.cache import (
    FinishedRequest,
    JobEffect,
    JobOutcome,
    JobStatus,
    LoadJob,
    OffloadJob,
    TieredCache,
    TokenPath,
)
from headwater.cache.node import Node
from headwater.native import slot_pool
from headwater.types import RequestId, Tier
from tests.cache.follower import Follower, cached

GARBAGE = "garbage"

slot_pool.prepare()  # as servers do; without a compiler the pool is the one in Python


class Sequence:
    """A request, as the scheduler keeps it."""

    def __init__(self, path, lease, held):
        self.path = path
        self.lease = lease
        self.table = [*lease.slots.tolist(), *held.tolist()]
        self.computed = lease.num_blocks
        self.surplus = []

    @property
    def unpublished(self):
        return np.array(self.table[self.lease.num_blocks :] + self.surplus, dtype=np.int64)


class CacheHarness:
    """The cache, its memory, its storage, and everything in flight."""

    def __init__(self, config, orders=None):
        self.block = config.block_tokens
        self.cache = TieredCache(config, orders)
        self.follower = Follower()
        self.memory = {
            Tier.DEVICE: [GARBAGE] * config.device_blocks,
            Tier.HOST: [GARBAGE] * config.host_blocks,
        }
        self.storage = {}
        self.written = {}
        self.old_match = None
        self.sequences = []
        self.jobs = []
        self.zombies = []
        self.ended = []
        self.asked = [TokenPath([0, 0])]
        self.now = 0.0

    # -- sequences ------------------------------------------------------------------------

    def start(self, path):
        """Match, lease, take; if there is no room, undo everything."""
        self.asked = [*self.asked[-30:], path]
        before = self.cache.stats()
        match = self.cache.match(path)
        self.agree(path, match)
        beside = self.cache.available_beside(match)
        lease = self.cache.lease(match, owner=RequestId(f"r{len(self.asked)}"), now=self.now)
        assert self.cache.num_available == beside
        held = self.cache.take(path.num_blocks(self.block) - lease.num_blocks, now=self.now)
        if held is None:
            self.cache.release(lease, now=self.now)
            assert self.cache.stats().device == before.device
            return None
        self.cache.announce(lease, path)
        self.sequences.append(Sequence(path, lease, held))
        return self.sequences[-1]

    def lease_old_match(self, path):
        """Lease a match that was made before other operations: it never covers lost blocks."""
        if self.old_match is not None:
            lease = self.cache.lease(self.old_match, owner=RequestId("old"), now=self.now)
            self.cache.check()
            assert len(lease.slots) == lease.num_blocks
            self.cache.release(lease, now=self.now)
        self.old_match = self.cache.match(path)

    def publish(self, sequence, end):
        """A step wrote the blocks of `sequence` up to `end`; only then are they committed."""
        settled = sequence.lease.num_blocks
        for block in range(settled, end):
            slot = sequence.table[block]
            self.memory[Tier.DEVICE][slot] = self.identity(sequence.path, block)
        slots = np.array(sequence.table[settled:end], dtype=np.int64)
        surplus = self.cache.commit(sequence.lease, sequence.path, slots, now=self.now)
        sequence.surplus += surplus.tolist()
        sequence.computed = end

    def grow(self, sequence, tokens):
        """Append output to the prompt: more tokens, more blocks."""
        old = sequence.path
        more = np.array(tokens, dtype=np.int32)
        longer = TokenPath(np.concatenate((old.tokens, more)), old.namespace, old.media)
        missing = longer.num_blocks(self.block) - len(sequence.table)
        held = self.cache.take(missing, now=self.now)
        if held is not None:
            sequence.path = longer
            sequence.table += held.tolist()

    def end(self, sequence, save=False, session="", hint=None):
        """Finish, abort or preempt: every slot that was not published is returned."""
        self.sequences.remove(sequence)
        if save:
            self.cache.save(sequence.lease)
        details = len(sequence.path.tokens), len(self.sequences), session, hint
        finished = None if save else FinishedRequest(*details)
        self.cache.release(
            sequence.lease, now=self.now, slots=sequence.unpublished, finished=finished
        )

    def close_session(self, namespace, session):
        """The client says that no more requests will come; blocks in use stay."""
        self.cache.close_session(namespace, session)

    def find_due(self):
        """Match every expected session: the cached part of its path is found."""
        for known in self.cache.take_due_sessions(self.now + 100.0):
            match = self.cache.match_session(known)
            assert match.num_blocks == match.path.num_blocks(self.block)

    def serve(self, path):
        """Serve a whole request at once."""
        sequence = self.start(path)
        if sequence is not None:
            self.publish(sequence, len(sequence.table))
            self.end(sequence)

    # -- transfers ------------------------------------------------------------------------

    def plan_offloads(self, limit):
        plans = self.cache.plan_offloads(limit_blocks=limit, now=self.now)
        assert sum(plan.num_blocks for plan in plans) <= limit
        assert all(isinstance(plan, OffloadJob) for plan in plans)
        self.add_jobs(plans)

    def add_jobs(self, plans):
        """Record what each write to storage has to store, before anything else happens."""
        for plan in plans:
            if plan.target is Tier.STORAGE:
                slots = plan.source_slots
                self.written[plan.job] = [self.memory[Tier.HOST][slot] for slot in slots]
        self.jobs += plans

    def plan_load(self, path, limit):
        """Request earlier blocks again, in whatever tier they are now."""
        plan = self.cache.plan_load(self.cache.match(path), limit_blocks=limit, now=self.now)
        if plan is not None:
            assert isinstance(plan, LoadJob)
            assert 0 < plan.num_blocks <= limit
            self.jobs.append(plan)
            # Lesson 26: other requests for the same blocks share this load.
            again = self.cache.match(path)
            assert again.loading is plan
            assert self.cache.plan_load(again, limit_blocks=limit, now=self.now) is None

    def finish_copy(self, plan, wanted):
        """A transfer ends after `wanted` blocks; the rest of its target is half written."""
        self.jobs.remove(plan)
        copied = self.copy(plan, wanted)
        self.scribble(plan, copied)
        ending = JobStatus.DONE if copied == plan.num_blocks else JobStatus.PARTIAL
        if copied < plan.num_blocks and plan.source is Tier.STORAGE:
            ending = JobStatus.DAMAGED
        elif not copied:
            ending = JobStatus.FAILED
        outcome = JobOutcome(job=plan.job, status=ending, num_blocks=copied)
        self.tell(outcome)
        self.ended = [*self.ended[-9:], outcome]

    def work_off(self, limit):
        """Let executors do their work: all planned copies succeed, in order."""
        self.add_jobs(self.cache.plan_offloads(limit_blocks=limit, now=self.now))
        for plan in list(self.jobs):
            self.finish_copy(plan, plan.num_blocks)

    def time_out(self, plan):
        """The deadline has passed, but the executor has not returned."""
        self.jobs.remove(plan)
        self.zombies.append(plan)
        effect = self.tell(JobOutcome(job=plan.job, status=JobStatus.TIMED_OUT))
        assert effect is JobEffect.QUARANTINED

    def quiet(self, plan, ending):
        """The executor returns at last. Even if it reports success, it is too late."""
        self.zombies.remove(plan)
        self.scribble(plan, 0)
        if plan.target is Tier.STORAGE:
            self.copy(plan, plan.num_blocks)  # the lost call reads its slots only now
        outcome = JobOutcome(job=plan.job, status=ending)
        assert self.tell(outcome) is JobEffect.NOTHING
        self.ended = [*self.ended[-9:], outcome]

    def tell_twice(self, outcome):
        """A duplicate or very late outcome changes nothing."""
        assert self.tell(outcome) is JobEffect.UNKNOWN

    def scribble(self, plan, start=0):
        """Write garbage to the targets, as a failed or late executor does."""
        if plan.target is not Tier.STORAGE:
            for slot in plan.target_slots[start:]:
                self.memory[plan.target][slot] = GARBAGE

    def copy(self, plan, count):
        """Copy `count` leading blocks, as late as an executor may; return how many could be
        copied."""
        for i in range(count):
            if plan.source is not Tier.STORAGE:
                content = self.memory[plan.source][plan.source_slots[i]]
            elif plan.keys[i] in self.storage:
                content = self.storage[plan.keys[i]]
            else:
                return i
            if plan.target is Tier.STORAGE:
                assert content == self.written[plan.job][i], "stored under a wrong key"
                self.storage[plan.keys[i]] = content
            else:
                self.memory[plan.target][plan.target_slots[i]] = content
        return count

    def tell(self, outcome):
        return self.cache.finish_job(outcome, now=self.now)

    # -- storage and control --------------------------------------------------------------

    def look_up(self, path):
        """Look up which leading blocks storage has, and tell the cache."""
        keys = self.cache.keys(path, path.num_blocks(self.block))
        found = next((i for i, key in enumerate(keys) if key not in self.storage), len(keys))
        if self.cache.config.storage:
            self.cache.learn_stored(path, found, now=self.now)

    def reset(self):
        """Reset the cache under load, with leases held and transfers in flight."""
        self.cache.reset()
        assert self.cache._tree.num_nodes == 0

    def close(self):
        """Release everything, and check that every slot is free."""
        while self.sequences:
            self.end(self.sequences[-1])
        for plan in [*self.jobs, *self.zombies]:
            self.tell(JobOutcome(job=plan.job, status=JobStatus.FAILED))
        self.cache.check()
        assert self.cache.num_available == self.cache.config.device_blocks
        self.cache.reset()
        stats = self.cache.stats()
        assert stats.device.free == self.cache.config.device_blocks
        assert stats.host.free == self.cache.config.host_blocks

    # -- what must always hold ------------------------------------------------------------

    def nothing_is_wrong(self):
        self.now += 1.0
        self.cache.check()
        self.followed()
        for what, node, block in self.found():
            if block < len(node.device):
                assert self.memory[Tier.DEVICE][node.device[block]] == what
            if block < len(node.host):
                assert self.memory[Tier.HOST][node.host[block]] == what
            key = self.cache._tree.keys(node)[block]
            assert self.storage.get(key, what) == what
        for sequence in self.sequences:
            for block in range(sequence.computed):
                read = self.memory[Tier.DEVICE][sequence.table[block]]
                assert read == self.identity(sequence.path, block)

    def followed(self):
        """A consumer that got every event knows every block, and so does one that asks for a
        snapshot now."""
        if not self.cache.config.record_events:
            return
        self.follower.follow(self.cache.take_events())
        assert self.follower.tiers == cached(self.cache)
        late = Follower()
        late.follow(self.cache.snapshot_events())
        assert late.tiers == self.follower.tiers

    def agree(self, path, match):
        """A match is the leading run of a plain dict of blocks, tier by tier in order."""
        tiers = {}
        for what, node, block in self.found():
            lower = Tier.HOST if block < len(node.host) else Tier.STORAGE
            tiers[what] = Tier.DEVICE if block < len(node.device) else lower
        run = []
        for block in range(path.num_blocks(self.block)):
            tier = tiers.get(self.identity(path, block))
            if tier is None:
                break
            run.append(tier)
        assert run == sorted(run)
        counts = [match.device_blocks, match.host_blocks, match.storage_blocks]
        assert counts == [run.count(tier) for tier in Tier]
        complete = len(run) == path.num_blocks(self.block) > 0
        assert (match.reason is None) == complete

    def identity(self, path, block):
        """The identity of block `block` of `path`: all tokens up to its end."""
        marks = [(i, m) for i, m in (path.media or {}).items() if i <= block]
        tokens = path.tokens[: (block + 1) * self.block].tolist()
        return (path.namespace, tuple(sorted(marks)), tuple(tokens))

    def found(self):
        """Every block in the tree: its identity from the root, its node and its index."""
        for namespace, root in self.cache._tree.roots.items():
            pending: list[tuple[Node, list[tuple[int, bytes]], tuple[int, ...]]]
            pending = [(child, [], ()) for child in root.children.values()]
            while pending:
                node, marks, tokens = pending.pop()
                run = np.frombuffer(node.tokens, dtype=np.int32).tolist()
                for block in range(node.num_blocks):
                    tokens += tuple(run[block * self.block : (block + 1) * self.block])
                    if node.media and block in node.media:
                        marks = [*marks, (node.start + block, node.media[block])]
                    yield (namespace, tuple(marks), tokens), node, block
                pending += [(child, marks, tokens) for child in node.children.values()]
