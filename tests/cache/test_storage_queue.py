"""The order of writes to storage: blocks most likely to return first, paths from their root."""

import numpy as np

from headwater.cache import FinishedRequest, Hint, JobOutcome, JobStatus
from headwater.cache.node import Node
from headwater.cache.storage_queue import StorageQueue
from tests.cache.make import begin, done, make_path, make_stored, serve


def end_request(cache, path, *, session="", hint=None, now=0.0):
    """A request that computes `path` and ends with a hint."""
    lease, held = begin(cache, path)
    cache.commit(lease, path, held, now=now)
    finished = FinishedRequest(len(path.tokens), 0, session, hint)
    cache.release(lease, now=now, finished=finished)


def write_to_host(cache):
    for plan in cache.plan_offloads(limit_blocks=99, limit_stored=0, now=0.0):
        cache.finish_job(done(plan), now=0.0)


def stored_in_order(cache, limit=99):
    """The first token of each block, in the order in which storage gets them."""
    order = []
    while plans := cache.plan_offloads(limit_blocks=0, limit_stored=1, now=0.0):
        for plan in plans:
            order += plan.keys
            cache.finish_job(done(plan), now=0.0)
        if len(order) >= limit:
            break
    return order


def keys(cache, *blocks):
    path = make_path(*blocks)
    return cache.keys(path, len(blocks))


def test_a_returning_session_is_written_first_and_a_finished_one_last():
    """Hints of clients count before anything else."""
    cache = make_stored()
    end_request(cache, make_path(1), session="over", hint=Hint(closed=True))
    end_request(cache, make_path(2))
    end_request(cache, make_path(3), session="returns", hint=Hint())
    write_to_host(cache)

    order = stored_in_order(cache)

    assert order == keys(cache, 3) + keys(cache, 2) + keys(cache, 1)


def test_shared_prefixes_and_blocks_used_before_come_before_new_ones():
    """First a prefix with two continuations, then blocks that were found again, then the others
    by age."""
    cache = make_stored()
    serve(cache, make_path(1))
    serve(cache, make_path(2))
    serve(cache, make_path(2))
    serve(cache, make_path(7, 8))
    serve(cache, make_path(7, 9))
    write_to_host(cache)

    order = stored_in_order(cache)

    assert order[0] == keys(cache, 7)[0]
    assert order[1] == keys(cache, 2)[0]
    assert set(order[2:]) == {keys(cache, 1)[0], keys(cache, 7, 8)[1], keys(cache, 7, 9)[1]}


def test_a_block_is_written_after_the_blocks_before_it():
    """Storage finds only leading runs, so a popular end is not written before its beginning."""
    cache = make_stored()
    serve(cache, make_path(5))
    serve(cache, make_path(1, 2, 3))
    serve(cache, make_path(1, 2, 3))
    write_to_host(cache)

    order = stored_in_order(cache)

    assert order == keys(cache, 1, 2, 3) + keys(cache, 5)


def test_a_parent_that_only_the_device_has_is_written_to_the_host_for_its_child():
    """Without its parent, a child in storage would never be found."""
    cache = make_stored(write_ahead_blocks=1)
    serve(cache, make_path(1, 2))
    lease = cache.lease(cache.match(make_path(1)), owner="r", now=0.0)
    cache.release(lease, now=0.0)
    cache._writes.clear()
    (parent,) = cache._tree.root(make_path(1).namespace).children.values()
    (child,) = parent.children.values()
    cache._writes.add(child)
    write_to_host(cache)
    assert (len(parent.host), len(child.host)) == (0, 1)

    assert stored_in_order(cache) == []
    write_to_host(cache)

    assert stored_in_order(cache) == keys(cache, 1, 2)


def test_a_full_queue_keeps_the_better_half():
    """The queue is bounded, and dropped blocks are counted."""
    queue = StorageQueue(lambda node: None, max_nodes=8)
    root = Node(None, b"", 0, 0)
    nodes = []
    for number in range(9):
        node = Node(root, bytes([number]), 0, number + 1)
        node.num_blocks, node.host, node.hits = 1, np.array([number]), number
        nodes.append(node)
        queue.add(node, 0.0)

    assert set(queue) == set(nodes[-4:])
    assert queue.dropped == 5
    assert queue.check_bounds()


def test_a_write_that_failed_is_not_repeated_before_its_blocks_are_used():
    """Broken storage does not keep the engine busy, and a used block is tried again."""
    cache = make_stored()
    end_request(cache, make_path(1, 2))
    write_to_host(cache)
    (plan,) = cache.plan_offloads(limit_blocks=0, limit_stored=9, now=0.0)
    cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.FAILED), now=0.0)

    assert cache.plan_offloads(limit_blocks=0, limit_stored=9, now=0.0) == []
    end_request(cache, make_path(1, 2))

    assert len(cache.plan_offloads(limit_blocks=0, limit_stored=9, now=0.0)) == 1


def test_blocks_that_leave_memory_before_their_write_are_counted():
    """While storage accepts nothing, each evicted host block counts as never stored."""
    cache = make_stored(4, 4)
    for number in range(10):
        serve(cache, make_path(number))
        write_to_host(cache)
        cache.check()

    num_left = sum(cache.match(make_path(number)).num_blocks for number in range(10))
    assert num_left < 10
    assert cache.stats().unstored_blocks == 10 - num_left


def test_runs_used_equally_often_are_written_in_the_order_in_which_they_were_queued():
    """The oldest run is evicted first, so it is written first, whatever its length."""
    cache = make_stored()
    serve(cache, make_path(1, 2, 3))
    serve(cache, make_path(4))
    write_to_host(cache)

    assert stored_in_order(cache) == keys(cache, 1, 2, 3) + keys(cache, 4)


def test_uses_before_an_eviction_count():
    """A run that was evicted and computed again has been used twice, so it comes before a run
    that was used once and queued earlier."""
    cache = make_stored(4, 4)
    serve(cache, make_path(1, 2))
    cache.trim(0)
    serve(cache, make_path(3, 4))
    serve(cache, make_path(1, 2))
    write_to_host(cache)
    cache.check()

    assert stored_in_order(cache) == keys(cache, 1, 2) + keys(cache, 3, 4)
