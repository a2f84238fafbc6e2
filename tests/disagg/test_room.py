"""What D receives: only missing blocks, only with free blocks for them, and what follows
otherwise."""

from dataclasses import replace

from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import Reason
from headwater.scheduler.sequence import SequenceState
from headwater.testing.peers import EchoPair
from headwater.testing.tiers import make_echo_request
from tests.disagg.pairs import expected, run, until
from tests.disagg.requests import make_handoff, make_prompt

PROMPT = make_prompt(30)


def test_the_second_turn_moves_only_the_new_part():
    """Lesson 55: D keeps what it received and generated, and asks for neither again."""
    pair = EchoPair()
    first = make_handoff("a", PROMPT, max_tokens=10)
    run(pair, first)
    before = pair.fabric.num_bytes
    turn = PROMPT + pair.decode.outputs["a"] + make_prompt(8, family=3)
    run(pair, make_handoff("b", turn))

    assert before == 8 * 32
    assert pair.fabric.num_bytes - before == (12 - 9) * 32  # 48 tokens; D has 39 of them


def test_a_preempted_request_on_d_resumes_from_its_tree():
    """Lesson 55: a preempted request is neither dropped nor sent again, and yields the same
    tokens."""
    pair = EchoPair(d_num_blocks=12)
    requests = [
        make_handoff(name, make_prompt(17, family=at), max_tokens=20)
        for at, name in enumerate("ab")
    ]
    for request in requests:
        pair.decode.add(request)
    pair.run("a", "b")

    assert pair.decode.core.stats().num_preemptions > 0
    assert pair.prefill.handoffs.prefill_side.totals.num_asks == 2
    for request in requests:
        assert pair.decode.outputs[request.request_id] == expected(request)


def test_a_request_that_cannot_resume_goes_back_to_the_router():
    """Lesson 55: the request was preempted and found no free blocks for a long time; its tokens
    so far are right."""
    pair = EchoPair(d_num_blocks=12, config=HandoffConfig(return_after_s=5.0))
    requests = [
        replace(make_handoff(name, make_prompt(17, family=at), max_tokens=20), can_return=True)
        for at, name in enumerate("ab")
    ]
    for request in requests:
        pair.decode.add(request)
    pair.run("a", "b", step_s=1.0)
    pair.drain()

    assert pair.decode.core.stats().num_preemptions > 0
    assert pair.decode.reasons == {"a": "length", "b": "returned"}
    for request in requests:
        tokens = pair.decode.outputs[request.request_id]
        assert tokens == expected(request)[: len(tokens)]
    pair.decode.check_idle()


def test_a_refusal_is_typed_and_leaves_nothing_behind():
    """Lesson 56: P is full and says so; D declines, and a router can try another pair."""
    pair = EchoPair(config=HandoffConfig(max_inflight=1))
    pair.decode.add(make_handoff("a", PROMPT))
    pair.decode.add(make_handoff("b", make_prompt(9, family=1), local_fallback=False))
    pair.run("a", "b")
    pair.drain()

    assert pair.decode.reasons == {"a": "length", "b": "refused"}
    assert pair.decode.outputs["b"] == []
    assert pair.prefill.handoffs.prefill_side.totals.failures == {Reason.BUSY: 1}
    pair.decode.check_idle()


def test_a_refused_request_is_computed_where_it_is_if_it_may():
    """Lesson 56: P refuses, D computes the prompt itself, and the client gets its tokens."""
    pair = EchoPair(config=HandoffConfig(max_inflight=1))
    requests = [make_handoff(name, make_prompt(9, family=at)) for at, name in enumerate("ab")]
    for request in requests:
        pair.decode.add(request)
    pair.run("a", "b")

    for request in requests:
        assert pair.decode.outputs[request.request_id] == expected(request)


def test_a_decode_instance_receives_while_it_computes_its_own_prompts():
    """Lessons 52 and 56: receiving needs no tokens of a step, so it waits neither for a long
    prompt that is being computed nor behind prompts that wait. So nothing that P computed is
    refused for that."""
    pair = EchoPair(d_num_blocks=200, settings={"max_batched_tokens": 8, "max_num_seqs": 8})
    own = [
        make_echo_request(f"own {at}", make_prompt(90, family=at), max_tokens=1)
        for at in (1, 2)
    ]
    handed = [make_handoff(f"handed {at}", make_prompt(30, family=at)) for at in (3, 4)]
    for request in (*own, *handed):
        pair.decode.add(request)
    pair.run(*(request.request_id for request in handed))

    assert "own 2" not in pair.decode.reasons
    for request in handed:
        assert pair.decode.outputs[request.request_id] == expected(request)
    pair.run("own 1", "own 2")
    assert pair.decode.handoffs.decode_side.totals.num_done == 2


def test_a_received_sequence_does_not_pass_a_preempted_one():
    """Lesson 55: a preempted request is next, even before requests that need no computing."""
    pair = EchoPair(d_num_blocks=12, settings={"max_batched_tokens": 4, "max_num_seqs": 4})
    requests = [
        make_handoff(name, make_prompt(17, family=at), max_tokens=20)
        for at, name in enumerate("abc")
    ]
    for request in requests:
        pair.decode.add(request)
    pair.run("a", "b", "c")
    pair.drain()

    assert pair.decode.core.stats().num_preemptions > 0
    for request in requests:
        assert pair.decode.outputs[request.request_id] == expected(request)
    pair.decode.check_idle()


def test_p_takes_on_no_more_than_its_limit():
    """Lesson 57: of six prompts at once, P computes two at any time."""
    pair = EchoPair(config=HandoffConfig(max_inflight=2))
    requests = [make_handoff(f"r{at}", make_prompt(9 + at, family=at % 3)) for at in range(6)]
    for request in requests:
        pair.decode.add(request)
    most = 0
    while any(request.request_id not in pair.decode.reasons for request in requests):
        pair.turn()
        pair.clock.advance(0.01)
        most = max(most, pair.prefill.handoffs.prefill_side.num_active)

    assert most == 2
    for request in requests:
        assert pair.decode.outputs[request.request_id] == expected(request)


def test_d_keeps_room_for_what_runs():
    """Lesson 33: a request that would leave no room for growth waits, and is refused in the
    end."""
    pair = EchoPair(
        d_num_blocks=10,
        settings={"expected_output_tokens": 30},
        config=HandoffConfig(resend_s=0.5),
    )
    runner = make_echo_request("run", make_prompt(4, family=2), max_tokens=30)
    pair.decode.add(runner)
    pair.turn()
    pair.decode.add(make_handoff("a", make_prompt(17), local_fallback=False))
    for _ in range(6):  # room for its five blocks, but not for the growth of running sequences
        pair.turn()
    waiting = pair.decode.scheduler.stats().num_waiting
    for _ in range(3):
        pair.clock.advance(4.0)
        pair.turn()
    pair.run("run", "a")

    assert waiting == 1
    assert pair.decode.outputs["run"] == expected(runner)
    assert pair.decode.core.stats().num_preemptions == 0


def test_a_sequence_that_receives_has_its_slots_and_nothing_findable():
    """Slots of a receiving sequence are held: neither free nor findable, and the sequence
    counts as running."""
    pair = EchoPair()
    request = make_handoff("a", PROMPT)
    pair.decode.add(request)
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    pool = pair.decode.cache.stats().device

    assert (pool.held, pool.cached) == (8, 0)
    assert pair.decode.core.stats().num_running == 1
    (sequence,) = pair.decode.scheduler._table.receiving
    assert sequence.state is SequenceState.RECEIVING
