"""How many prompt tokens a step computes in addition to decodes, and which prompts come first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.scheduler.batch import StepBudget
from headwater.scheduler.pacing import (
    ADAPTIVE_ITL,
    AGE_FACTOR,
    GRAPH_CHUNK_TOKENS,
    MAX_SHORT_STEPS,
    MAX_UNFINISHED,
    ItlTarget,
    StepCosts,
    affordable_tokens,
    chunk_cost,
)
from tests.scheduler.harness import Harness, expected_tokens, make_prompt, make_request
from tests.search import search


def serve(num_tokens, *, depth=1, **settings):
    """An engine whose steps have this many tokens."""
    settings = {"max_batched_tokens": num_tokens, "max_num_seqs": 16, **settings}
    return Harness(num_blocks=4096, block_tokens=4, depth=depth, settings=settings)


def prompt(num_tokens, family):
    """A prompt that no other family shares blocks with."""
    return [family % 40, family // 40, *make_prompt(num_tokens - 2, family=family)]


def test_a_step_with_decodes_takes_the_prompt_tokens_that_fit_its_target():
    """Beside the decodes, a target of 40 ms has room for tokens of 20 microseconds each; a step
    takes at least 128 tokens."""
    target = ItlTarget(min_s=0.040)

    assert target.chunk_tokens(StepCosts(decode_s=0.008, token_s=20e-6)) == 1472
    assert target.chunk_tokens(StepCosts(decode_s=0.100, token_s=20e-6)) == 128
    assert target.chunk_tokens(StepCosts()) == 512


def test_the_adaptive_target_follows_the_decode_steps():
    """The target is four decode steps, and at least 30 ms, so that few rows do not make prompts
    slow."""
    assert ADAPTIVE_ITL.seconds(StepCosts(decode_s=0.004)) == 0.030
    assert ADAPTIVE_ITL.seconds(StepCosts(decode_s=0.020)) == pytest.approx(0.080)


@pytest.mark.parametrize("wrong", [{"min_s": 0.0}, {"min_s": 0.1, "decode_steps": -1.0}])
def test_a_target_that_cannot_be_met_is_refused(wrong):
    """The message has the value."""
    with pytest.raises(ConfigError):
        ItlTarget(**wrong)


@given(start=st.integers(0, 200_000), cost=st.floats(1, 50_000))
def test_affordable_tokens_cost_no_more_than_the_budget(start, cost):
    """The tokens fit into the budget, and two more tokens would not."""
    num_tokens = affordable_tokens(start, cost)

    assert num_tokens == 1 or chunk_cost(start, num_tokens) <= cost * (1 + 1e-9)
    assert chunk_cost(start, num_tokens + 2) > cost


def test_tokens_after_a_long_context_count_for_more():
    """Attention of each token reads the whole context."""
    assert affordable_tokens(0, 1000) > affordable_tokens(32768, 1000) >= 490


def test_prefills_leave_a_part_of_the_step_for_new_sequences():
    """New sequences get a quarter, and all that prefills do not need."""
    budget = StepBudget(num_tokens=1000, num_places=4)
    held = budget.hold_for_prefills(5000)
    assert budget.num_tokens == 250
    budget.release(held)
    budget.hold_for_prefills(100)
    assert budget.num_tokens == 900


def test_a_short_prompt_does_not_wait_for_a_long_one():
    """The long prompt takes 100 steps; the short one, which arrives later, a few."""
    engine = serve(16)
    engine.add(make_request("long", prompt(1600, 1), max_tokens=1))
    for _ in range(3):
        engine.step()
    engine.run_until("short", make_request("short", prompt(8, 2), max_tokens=1), max_steps=8)

    assert "long" not in engine.reasons
    engine.run()
    for name, family, length in (("long", 1, 1600), ("short", 2, 8)):
        request = make_request("again", prompt(length, family), max_tokens=1)
        assert engine.outputs[name] == expected_tokens(request)


def test_a_hit_does_not_wait_for_a_long_prompt():
    """What counts is what is left to compute, not the length of the prompt."""
    engine = serve(16)
    engine.run(make_request("first", prompt(400, 1), max_tokens=1))
    engine.add(make_request("long", prompt(1600, 2), max_tokens=1))
    engine.step()
    again = make_request("again", [*prompt(400, 1), 3, 4], max_tokens=1)
    engine.run_until("again", again, max_steps=8)

    assert "long" not in engine.reasons


def test_short_prompts_pass_many_long_ones_that_wait():
    """Only a few long prompts are computed at once; the others wait, and are passed."""
    engine = serve(16)
    for family in range(12):
        engine.add(make_request(f"long-{family}", prompt(400, family), max_tokens=1))
    for _ in range(4):
        engine.step()
    engine.run_until("short", make_request("short", prompt(8, 50), max_tokens=1), max_steps=16)

    assert not any(name.startswith("long") for name in engine.reasons)
    engine.run()
    assert len(engine.reasons) == 13


def test_few_long_prompts_hold_blocks_under_overload():
    """Under overload all prompts are old. Each prompt that has begun holds blocks for its whole
    length, so those whose turn is later wait without blocks."""
    engine = serve(32, max_num_seqs=32)
    for family in range(24):
        engine.add(make_request(f"long-{family}", prompt(400, family), max_tokens=1))
    most = 0
    while engine.core.has_work:
        engine.step()
        most = max(most, len(engine.scheduler._table.prefilling))

    assert MAX_UNFINISHED <= most <= 2 * MAX_UNFINISHED
    assert len(engine.reasons) == 24


def test_a_prefix_is_computed_once_under_overload():
    """Each long prompt comes twice, and the second finds what the first has computed, although
    all of them together take far longer than a wait for a prefix may take."""
    engine = serve(32, max_num_seqs=32, prefix_wait_timeout_s=0.5)
    for family in range(24):
        for turn in range(2):
            tokens = [*prompt(400, family), turn]
            engine.add(make_request(f"{family}-{turn}", tokens, max_tokens=1))
    engine.run()

    assert engine.runner.num_tokens <= 24 * (400 + 2 * 4)


@search(examples=25)
@given(
    long_tokens=st.integers(20, 300),
    short_tokens=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    every=st.integers(1, 3),
    step_tokens=st.sampled_from([16, 24, 64]),
    depth=st.sampled_from([1, 2]),
)
def test_no_prompt_starves_however_many_short_ones_arrive(
    long_tokens, short_tokens, every, step_tokens, depth
):
    """Short prompts arrive for ever, faster than they are computed. The long one is overtaken by
    a bounded number of tokens: twice its own, the share of new ones, and those before it."""
    engine = serve(step_tokens, depth=depth, max_num_seqs=12)
    long = make_request("long", prompt(long_tokens, 39), max_tokens=1)
    engine.add(long)
    bound = 4 * (AGE_FACTOR + 1) * long_tokens // 3 + 16 * step_tokens + 12 * 40
    spent = steps = 0
    while "long" not in engine.reasons:
        if steps % every == 0:
            size = short_tokens[steps % len(short_tokens)]
            name = f"short-{steps}"
            engine.add(make_request(name, prompt(size, 40 + steps), max_tokens=1))
        before = len(engine.batches)
        engine.step()
        spent += sum(len(batch.tokens) for batch in engine.batches[before:])
        steps += 1
        assert spent <= bound, f"{long_tokens} tokens wait for {spent}"

    assert engine.outputs["long"] == expected_tokens(long)


def test_short_prompts_are_spread_over_steps_that_stay_short():
    """Twenty-four prompts of 40 tokens arrive while four sequences decode. All would fit the
    target together; spread, no step computes more than the tokens that a graph holds, and none
    waits for more than a few steps."""
    target = ItlTarget(min_s=10.0, short_share=0.8)
    engine = serve(8192, itl=target, max_num_seqs=64)
    for number in range(4):
        engine.add(make_request(f"decoding-{number}", prompt(8, number), max_tokens=80))
    for _ in range(5):
        engine.step()
    before = len(engine.batches)
    requests = [
        make_request(f"short-{number}", prompt(40, 10 + number), max_tokens=4)
        for number in range(24)
    ]
    for request in requests:
        engine.add(request)
    engine.run()

    sizes = [len(batch.tokens) - batch.num_rows for batch in engine.batches[before:]]
    assert max(sizes) <= GRAPH_CHUNK_TOKENS
    assert 4 <= sum(size > 0 for size in sizes) <= MAX_SHORT_STEPS
    for request in requests:
        assert engine.outputs[str(request.request_id)] == expected_tokens(request)


def test_a_long_queue_of_short_prompts_is_not_spread():
    """Spreading a long queue would take more than a few steps, so the target alone decides."""
    target = ItlTarget(min_s=10.0, short_share=0.8)
    engine = serve(8192, itl=target, max_num_seqs=256)
    engine.add(make_request("decoding", prompt(8, 1), max_tokens=80))
    for _ in range(5):
        engine.step()
    before = len(engine.batches)
    for number in range(80):
        engine.add(make_request(f"short-{number}", prompt(40, 10 + number), max_tokens=1))
    engine.step()

    assert len(engine.batches[before].tokens) > GRAPH_CHUNK_TOKENS


def test_a_long_prompt_begins_in_the_step_after_the_short_ones():
    """A chunk of the long prompt would make the short prompts' step a long one; the next step
    computes it."""
    target = ItlTarget(min_s=10.0, short_share=0.8)
    engine = serve(8192, itl=target, max_num_seqs=64)
    engine.add(make_request("decoding", prompt(8, 1), max_tokens=80))
    for _ in range(5):
        engine.step()
    before = len(engine.batches)
    engine.add(make_request("short", prompt(40, 2), max_tokens=1))
    engine.add(make_request("long", prompt(2000, 3), max_tokens=1))
    engine.step()
    engine.step()

    first, second = (batch.request_ids for batch in engine.batches[before : before + 2])
    assert "short" in first
    assert "long" not in first
    assert "long" in second


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (StepCosts(), 256),
        (StepCosts(decode_s=0.006, token_s=24e-6), 200),
        (StepCosts(decode_s=0.010, token_s=24e-6), 256),
        (StepCosts(decode_s=0.0165, token_s=24e-6), float("inf")),
        (StepCosts(decode_s=0.001, token_s=24e-6), 64),
    ],
)
def test_tokens_of_short_prompts_follow_the_decode_step(costs, expected):
    """Where decode steps are longer than the launches of a step, nothing is spread."""
    assert ADAPTIVE_ITL.short_tokens(costs) == expected
    assert ItlTarget(min_s=0.03).short_tokens(costs) == float("inf")


def test_a_step_with_decodes_stays_within_its_target():
    """A long prompt arrives while a sequence decodes: once its cost is known, each step takes at
    most the target, and the tokens are the same."""
    target = ItlTarget(min_s=0.5)
    engine = serve(2048, itl=target, max_num_seqs=4)
    engine.runner.token_s = 0.001
    decoding = make_request("decoding", prompt(8, 1), max_tokens=60)
    engine.add(decoding)
    for _ in range(6):
        engine.step()
    long = make_request("long", prompt(6000, 2), max_tokens=1)
    engine.add(long)
    times = []
    while "long" not in engine.reasons:
        before = engine.clock.now()
        engine.step()
        times.append(engine.clock.now() - before)

    assert len(times) > 12
    assert max(times[2:]) <= target.min_s + 0.02  # the harness adds 10 ms to each step
    engine.run()
    assert engine.outputs["decoding"] == expected_tokens(decoding)
    assert engine.outputs["long"] == expected_tokens(long)


def test_a_long_prompt_of_a_higher_class_does_not_wait_for_lower_ones():
    """Only long prompts of the same class, and of classes before it, take places from a long
    prompt."""
    engine = serve(16, policy="priority")
    for family in range(6):
        low = make_request(f"low-{family}", prompt(400, family), max_tokens=1, priority=1)
        engine.add(low)
    engine.steps(6)
    engine.run_until("high", make_request("high", prompt(400, 9), max_tokens=1), max_steps=40)

    assert len(engine.reasons) == 1
