"""What runs in which step: batching, chunks, order, ends, pausing."""

import numpy as np
import pytest

from headwater.cache import Namespace, TokenPath
from headwater.errors import InvariantError, PromptTooLong, RequestError
from headwater.scheduler.batch import StepResult
from headwater.types import RequestId
from tests.scheduler.harness import Harness, expected_tokens, make_prompt, make_request


def test_decodes_run_before_chunks_and_chunks_before_newcomers() -> None:
    """Running sequences come first: a decode never waits for a prompt, nor a prompt for a newer
    one."""
    harness = Harness(settings={"max_num_seqs": 4, "max_batched_tokens": 10})
    harness.add(make_request("a", make_prompt(4)))
    harness.step()
    harness.add(
        make_request("b", make_prompt(12, family=1)),
        make_request("c", make_prompt(4, family=2)),
    )
    harness.step()
    harness.step()

    assert [harness.names(step) for step in range(3)] == [["a"], ["a", "b"], ["a", "b", "c"]]
    assert np.diff(harness.batches[1].query_start).tolist() == [1, 9]
    assert np.diff(harness.batches[2].query_start).tolist() == [1, 3, 4]
    assert harness.batches[2].sampled.tolist() == [0, 1, 2]


def test_no_step_computes_more_than_its_tokens_and_sequences() -> None:
    """The two limits hold in every step."""
    harness = Harness(settings={"max_num_seqs": 3, "max_batched_tokens": 7})

    harness.run(*(make_request(f"r{n}", make_prompt(5 + 3 * n, family=n)) for n in range(7)))

    assert max(len(batch.tokens) for batch in harness.batches) == 7
    assert max(batch.num_rows for batch in harness.batches) == 3


def test_a_long_prompt_leaves_tokens_for_a_short_one() -> None:
    """With a longest chunk, a short prompt after a long one starts in the same step."""
    harness = Harness(
        settings={"max_batched_tokens": 64, "max_num_seqs": 8, "long_prefill_tokens": 16}
    )
    harness.add(
        make_request("long", make_prompt(60)), make_request("short", make_prompt(5, family=1))
    )

    harness.step()

    assert np.diff(harness.batches[0].query_start).tolist() == [16, 5]
    assert harness.outputs.keys() == {"short"}


def test_the_batch_says_where_everything_is() -> None:
    """A batch has the positions, context, tables and histories of a chunk and of a decode."""
    harness = Harness(settings={"max_num_seqs": 2, "max_batched_tokens": 6})
    harness.add(make_request("a", make_prompt(9)))
    harness.steps(3)
    first, second, third = harness.batches

    assert first.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert (second.positions.tolist(), second.context_lens.tolist()) == ([6, 7, 8], [9])
    assert first.sampled.tolist() == []
    assert second.sampled.tolist() == [0]
    assert third.positions.tolist() == [9]
    assert third.tokens.tolist() == harness.outputs["a"][:1]
    assert third.carry.tolist() == [-1]
    tokens, prompt_tokens = third.histories[0]
    assert (tokens.tolist(), prompt_tokens) == ([*make_prompt(9), *harness.outputs["a"][:1]], 9)
    assert len(third.block_tables[0]) * harness.block_tokens >= 10


def test_a_second_step_in_flight_carries_the_token() -> None:
    """At depth 2 an unknown input of a decode is given by its row in the previous batch."""
    harness = Harness(depth=2, settings={"max_num_seqs": 2, "max_batched_tokens": 30})
    harness.add(make_request("a", make_prompt(5)), make_request("b", make_prompt(7, family=1)))

    harness.steps(3)

    assert harness.batches[0].carry.tolist() == [-1, -1]
    assert [batch.carry.tolist() for batch in harness.batches[1:]] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_known_length_schedules_no_useless_row(depth: int) -> None:
    """`max_tokens` is known in advance: exactly prompt + n - 1 tokens are computed, with one
    step in flight or two."""
    harness = Harness(depth=depth)

    harness.run(make_request("a", make_prompt(6), max_tokens=5))

    assert harness.runner.num_tokens == 6 + 4
    assert harness.reasons == {"a": "length"}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_token_ends_the_output_and_drops_what_was_in_flight(depth: int) -> None:
    """The sequence may have a row in the next step already: that row gives no token, and its
    slots are returned."""
    free = make_request("a", make_prompt(6), max_tokens=30)
    stop = expected_tokens(free)[4]
    first = expected_tokens(free).index(stop)
    harness = Harness(depth=depth)

    harness.run(make_request("a", make_prompt(6), max_tokens=30, stop_token_ids=(stop,)))

    assert harness.outputs["a"] == expected_tokens(free)[: first + 1]
    assert harness.reasons == {"a": "stop"}
    assert harness.history[-1].stop_token == stop
    assert harness.runner.num_tokens == 6 + first + (depth - 1)
    harness.check_empty()


def test_end_of_sequence_stops_unless_ignored() -> None:
    """The model's own end ids are stop ids of every request that does not ignore them."""
    eos = expected_tokens(make_request("a", make_prompt(6)))[2]
    harness = Harness(settings={"eos_token_ids": (eos,)})

    harness.run(
        make_request("a", make_prompt(6), ignore_eos=False),
        make_request("b", make_prompt(6), ignore_eos=True),
    )

    assert harness.reasons == {"a": "stop", "b": "length"}
    assert len(harness.outputs["b"]) == 8


def test_no_stop_before_min_tokens() -> None:
    """An end id that a wrong runner samples too early does not end the output."""
    eos = tuple(range(40))
    harness = Harness(settings={"eos_token_ids": eos})

    harness.run(make_request("a", make_prompt(6), ignore_eos=False, min_tokens=3))

    assert len(harness.outputs["a"]) == 3
    assert harness.reasons == {"a": "stop"}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_model_length_ends_the_output(depth: int) -> None:
    """Prompt and output together never exceed the model's length."""
    harness = Harness(depth=depth, settings={"max_model_len": 20})

    harness.run(make_request("a", make_prompt(15), max_tokens=100))

    assert len(harness.outputs["a"]) == 5
    assert harness.reasons == {"a": "length"}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_pool_ends_an_output_that_fills_it(depth: int) -> None:
    """A sequence that alone fills every block ends by length, and never needs a victim."""
    harness = Harness(num_blocks=5, depth=depth)

    harness.run(make_request("a", make_prompt(7), max_tokens=100))

    assert harness.scheduler.max_model_len == 21
    assert len(harness.outputs["a"]) == 14
    assert harness.scheduler.stats().num_preemptions == 0


def test_requests_that_can_never_be_served_are_refused_at_once() -> None:
    """Such requests are too long, empty, without output, or have the id of a running request;
    nothing of them is kept."""
    harness = Harness(num_blocks=4, settings={"max_model_len": 100})
    harness.add(make_request("a", make_prompt(16)))

    with pytest.raises(PromptTooLong, match=r"17 tokens; the limit is 17 including"):
        harness.add(make_request("b", make_prompt(17)))
    with pytest.raises(RequestError, match="empty"):
        harness.add(make_request("b", []))
    with pytest.raises(RequestError, match="max_tokens"):
        harness.add(make_request("b", [1], max_tokens=0))
    with pytest.raises(RequestError, match="'a' is already running"):
        harness.add(make_request("a", [1]))
    assert harness.run().keys() == {"a"}


def test_the_request_is_never_changed() -> None:
    """Lesson 30: neither running nor being preempted and resumed changes the request; its
    prompt cannot grow."""
    requests = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40) for n in range(4)
    ]
    before = [request.tokens.copy() for request in requests]
    for request in requests:
        request.tokens.flags.writeable = False
    harness = Harness(num_blocks=20)

    harness.run(*requests)

    assert harness.scheduler.stats().num_preemptions > 0
    assert all(map(np.array_equal, before, (request.tokens for request in requests)))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_is_found_only_after_its_step_was_collected(depth: int) -> None:
    """Commit is in `advance`: what a step in flight writes cannot be matched."""
    harness = Harness(depth=depth)
    path = TokenPath(np.array(make_prompt(12), dtype=np.int32))
    harness.add(make_request("a", make_prompt(12)))

    harness.scheduler.schedule(now=0.0)

    assert harness.cache.match(path).device_blocks == 0


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_the_token_chosen_last_is_never_published(max_tokens: int) -> None:
    """Lesson 41: the KV of the last token is not written, so a block that it would fill is not
    published."""
    harness = Harness()
    harness.run(make_request("a", make_prompt(7), max_tokens=max_tokens))
    tokens = np.array([*make_prompt(7), *harness.outputs["a"]], dtype=np.int32)

    found = harness.cache.match(TokenPath(tokens)).device_blocks

    assert found == (len(tokens) - 1) // 4


def test_output_caching_off_publishes_prompts_only() -> None:
    """Blocks with generated tokens stay private, and are free at the end."""
    harness = Harness(settings={"output_caching": False})
    harness.run(make_request("a", make_prompt(10), max_tokens=20))
    tokens = np.array([*make_prompt(10), *harness.outputs["a"]], dtype=np.int32)

    assert harness.cache.match(TokenPath(tokens)).device_blocks == 10 // 4
    assert harness.cache.stats().device.cached == 10 // 4


def test_prefix_caching_off_never_matches_nor_commits() -> None:
    """Nothing is cached, looked up or counted; the usage has the reason."""
    harness = Harness(settings={"prefix_caching": False})

    harness.run(make_request("a", make_prompt(20)))
    harness.run(make_request("b", make_prompt(20)))

    stats = harness.cache.stats()
    assert (stats.device.cached, stats.ledger.queries) == (0, 0)
    assert harness.usages["b"].miss_reason == "caching_off"
    assert harness.runner.num_tokens == 2 * (20 + 7)


def test_a_salt_keeps_prefixes_apart() -> None:
    """The same prompt under another salt is computed again."""
    harness = Harness()
    harness.run(make_request("a", make_prompt(20), cache_salt="x"))

    harness.run(make_request("b", make_prompt(20), cache_salt="y"))
    harness.run(make_request("c", make_prompt(20), cache_salt="x"))

    assert [harness.usages[name].cached_tokens for name in "abc"] == [0, 0, 16]
    path = TokenPath(np.array(make_prompt(20), dtype=np.int32), Namespace("z"))
    assert harness.cache.match(path).device_blocks == 0


def test_a_full_hit_computes_the_last_block_only() -> None:
    """At least one token must be computed to sample the next one, so only the block of the
    last token is computed."""
    harness = Harness()
    harness.run(make_request("a", make_prompt(20), max_tokens=1))
    before = harness.runner.num_tokens

    harness.run(make_request("b", make_prompt(20), max_tokens=1))

    assert harness.runner.num_tokens - before == 4
    assert harness.usages["b"].cached_tokens == 16
    assert harness.usages["b"].computed == 4


def test_usage_is_on_the_first_output_only() -> None:
    """Usage has prompt tokens by source, and the reason why not more were found."""
    harness = Harness()
    harness.run(make_request("a", make_prompt(20)))

    harness.run(make_request("b", [*make_prompt(12), 39, 38, 37, 36, 35], arrival_s=-1.0))

    usage = harness.usages["b"]
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed) == (17, 12, 5)
    assert usage.by_tier == {"device": 12, "host": 0, "storage": 0, "peer": 0}
    assert usage.miss_reason == "never_seen"
    assert usage.queued_s >= 1.0
    assert [output.usage for output in harness.history].count(None) == len(harness.history) - 2


def test_priority_runs_first_and_arrival_decides_among_equals() -> None:
    """Lower numbers run first, under the `priority` policy only."""
    order = {}
    for policy in ("priority", "fcfs"):
        harness = Harness(
            settings={"policy": policy, "max_num_seqs": 1, "max_batched_tokens": 64}
        )
        harness.run(
            *(
                make_request(n, make_prompt(4), priority=p)
                for n, p in zip("abcd", (2, 0, 1, 0), strict=True)
            )
        )
        order[policy] = "".join(harness.reasons)

    assert order == {"priority": "bdca", "fcfs": "abcd"}


def test_a_paused_scheduler_admits_no_sequence_and_still_aborts() -> None:
    """Lesson 58: a pause stops only admission; the loop continues and running requests end."""
    harness = Harness()
    harness.add(make_request("a", make_prompt(5)))
    harness.step()
    harness.core.pause()
    harness.add(make_request("b", make_prompt(5)), make_request("c", make_prompt(5)))

    harness.run()
    assert harness.reasons == {"a": "length"}
    assert not harness.core.has_work
    harness.core.abort(RequestId("b"))
    harness.run()
    assert harness.reasons == {"a": "length", "b": "abort"}

    harness.core.resume()
    harness.run()
    assert harness.reasons == {"a": "length", "b": "abort", "c": "length"}


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_resume_while_paused(depth: int) -> None:
    """Preempted sequences are not new: a drain ends although the pool is too small for all at
    once."""
    harness = Harness(num_blocks=20, depth=depth)
    requests = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40) for n in range(4)
    ]
    harness.add(*requests)
    harness.steps(3)
    harness.core.pause()
    harness.add(make_request("late", make_prompt(4)))

    harness.run()

    assert harness.scheduler.stats().num_preemptions > 0
    assert harness.scheduler.stats().num_waiting == 1
    running = [name for name, reason in harness.reasons.items() if reason == "length"]
    assert sorted(running) == sorted(harness.usages)


@pytest.mark.parametrize("depth", [1, 2])
def test_reset_under_load_empties_the_cache_and_disturbs_no_request(depth: int) -> None:
    """Lesson 59: running sequences keep their blocks; nothing old is found afterwards."""
    requests = [
        make_request(f"r{n}", make_prompt(20, family=n), max_tokens=20) for n in range(3)
    ]
    harness = Harness(depth=depth)
    harness.add(*requests)
    harness.steps(4)

    harness.core.reset_cache()
    harness.run()
    harness.run(make_request("again", make_prompt(20)))

    assert all(harness.outputs[r.request_id] == expected_tokens(r) for r in requests)
    assert harness.usages["again"].cached_tokens == 0
    harness.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step", range(12))
def test_abort_is_idempotent_and_returns_every_slot(depth: int, step: int) -> None:
    """Lesson 58: the request may wait, be in a chunk, decode, have steps in flight, be
    finished, or be unknown."""
    harness = Harness(depth=depth, settings={"max_batched_tokens": 6, "max_num_seqs": 2})
    request = make_request("a", make_prompt(16), max_tokens=5)
    harness.add(request)
    harness.steps(step)

    for _ in range(2):
        harness.core.abort(request.request_id)
        harness.core.abort(make_request("unknown", [1]).request_id)
    harness.check()
    harness.run()

    assert list(harness.reasons) == ["a"]
    harness.check_empty()


def test_a_name_can_be_used_again_at_once_after_an_abort() -> None:
    """The name is free even while a step of the aborted request is still in flight; results do
    not mix."""
    harness = Harness(depth=2)
    harness.add(make_request("a", make_prompt(9)))
    harness.step()
    second = make_request("a", make_prompt(6, family=1))
    harness.core.abort(second.request_id)
    harness.core.add(second)

    outputs = [
        output for _ in range(20) if harness.core.has_work for output in harness.core.step()
    ]

    assert outputs[0].finish_reason == "abort"
    assert [token for output in outputs for token in output.tokens] == expected_tokens(second)
    harness.check_empty()


def test_steps_are_collected_in_order() -> None:
    """A result of another step, or a third step in flight, violates an invariant."""
    harness = Harness()
    harness.add(make_request("a", make_prompt(4)))
    harness.scheduler.schedule(now=0.0)
    harness.scheduler.schedule(now=0.0)
    with pytest.raises(InvariantError, match="two steps"):
        harness.scheduler.schedule(now=0.0)

    wrong = StepResult(step=1, tokens=np.array([1], dtype=np.int32), logprobs=[None])
    with pytest.raises(InvariantError, match="step 1, expected 0"):
        harness.scheduler.advance(wrong, now=0.0)


def test_logprobs_come_with_their_tokens() -> None:
    """There is one entry per token, if requested."""
    harness = Harness()

    harness.run(
        make_request("a", make_prompt(4), logprobs=1), make_request("b", make_prompt(4))
    )

    for output in harness.history:
        (logprobs,) = output.logprobs
        assert (logprobs is not None) == (output.request_id == "a")


def test_a_sequence_that_gets_no_blocks_keeps_no_lease() -> None:
    """Either all blocks of a prompt are taken, or nothing changes."""
    harness = Harness(num_blocks=4)
    harness.run(make_request("a", make_prompt(9), max_tokens=1))
    held = harness.cache.take(2, now=0.0)
    assert held is not None
    harness.add(make_request("b", make_prompt(13), max_tokens=1))
    (sequence,) = harness.scheduler._table.waiting
    match = harness.scheduler._blocks.match(sequence)
    assert match is not None
    assert match.device_blocks == 2

    assert not harness.scheduler._blocks.begin(sequence, match, 0.0)

    assert harness.cache.num_available == 2
    harness.cache.free(held)
    harness.run()
    harness.check_empty()
