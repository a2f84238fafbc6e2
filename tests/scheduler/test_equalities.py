"""Token for token: cached = uncached, chunked = whole, preempted = undisturbed."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.scheduler.request import Request
from headwater.types import RequestId
from tests.scheduler.harness import Harness, expected_tokens, make_prompt, make_request
from tests.search import search

EOS = (7,)


@dataclass
class Case:
    """One random workload on one random engine."""

    harness: Harness
    arrivals: list[tuple[int, Request]]
    """Requests, each with a step: the request arrives before that step."""

    aborts: dict[int, RequestId]
    """Which request is aborted before which step."""

    resets: set[int]
    """Before which steps the cache is reset."""

    def run(self) -> None:
        """Run until nothing is left to do."""
        step = 0
        pending = sorted(self.arrivals, key=lambda arrival: arrival[0])
        while pending or self.harness.core.has_work:
            while pending and pending[0][0] <= step:
                self.harness.core.add(pending.pop(0)[1])
            if step in self.aborts:
                self.harness.core.abort(self.aborts[step])
            if step in self.resets:
                self.harness.core.reset_cache()
            self.harness.step()
            step += 1
            assert step < 20_000, "no end"


@st.composite
def cases(draw, *, with_aborts: bool = False, late_share: float = 0.0) -> Case:
    """Few blocks, shared prefixes, outputs of all lengths: preemptions never stop."""
    block_tokens = draw(st.sampled_from([1, 2, 4]))
    specs = draw(
        st.lists(
            st.tuples(
                st.integers(0, 20),  # arrives before this step
                st.integers(0, 2),  # family
                st.integers(1, 24),  # prompt tokens
                st.integers(1, 48),  # max_tokens
                st.integers(0, 2),  # priority
                st.sampled_from(["", "", "tenant"]),  # salt
                st.booleans(),  # ignore_eos
            ),
            min_size=2,
            max_size=10,
        )
    )
    requests = [
        make_request(
            f"r{number}",
            make_prompt(length, family=family),
            max_tokens=most,
            priority=priority,
            cache_salt=salt,
            ignore_eos=ignores,
            seed=number % 2,
            grammar="any" if late_share and number % 3 else "",
        )
        for number, (_, family, length, most, priority, salt, ignores) in enumerate(specs)
    ]
    longest = max(len(r.tokens) + r.params.max_tokens - 1 for r in requests)
    least = -(-longest // block_tokens)
    max_num_seqs = draw(st.sampled_from([1, 3, 8, 8]))
    harness = Harness(
        num_blocks=least + draw(st.integers(0, 4)),
        block_tokens=block_tokens,
        depth=draw(st.sampled_from([1, 2])),
        rows_from=draw(st.sampled_from([1, 1, 3, 99])),
        settings={
            "max_num_seqs": max_num_seqs,
            "max_batched_tokens": max_num_seqs + draw(st.integers(0, 24)),
            "long_prefill_tokens": draw(st.sampled_from([None, 1, 5])),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
            "prefix_caching": draw(st.sampled_from([True, True, True, False])),
            "output_caching": draw(st.booleans()),
            "expected_output_tokens": draw(st.sampled_from([1, 1, 1, 20])),
            "max_passes": draw(st.integers(0, 3)),
            "lookahead": draw(st.integers(1, 3)),
            "prefix_wait_timeout_s": draw(st.sampled_from([0.0, 0.03, 10.0])),
            "eos_token_ids": EOS,
        },
    )
    if late_share:
        chance = Random(draw(st.integers(0, 999)))
        harness.runner.is_late = lambda: chance.random() < late_share
    steps = st.integers(0, 60)
    names = st.sampled_from([r.request_id for r in requests])
    aborts = draw(st.dictionaries(steps, names, max_size=6)) if with_aborts else {}
    return Case(
        harness=harness,
        arrivals=[(spec[0], request) for spec, request in zip(specs, requests, strict=True)],
        aborts=aborts,
        resets=draw(st.sets(steps, max_size=2)),
    )


@pytest.mark.slow
@search(examples=150)
@given(case=cases())
def test_every_request_ends_with_the_tokens_it_yields_alone(case: Case) -> None:
    """Every request ends, and the three equalities hold at once, at both depths, for any pool
    that can hold one request: cache, chunks, preemption and other rows change no token, and
    nothing leaks."""
    case.run()

    for _, request in case.arrivals:
        assert case.harness.outputs[request.request_id] == expected_tokens(request, eos=EOS)
        assert case.harness.reasons[request.request_id] in ("stop", "length")
    case.harness.check_empty()


def check_tokens(case: Case) -> None:
    """Each request has the tokens that it gives alone, an aborted one the first of them, and
    nothing is held any more."""
    for _, request in case.arrivals:
        tokens = case.harness.outputs[request.request_id]
        whole = expected_tokens(request, eos=EOS)
        if case.harness.reasons[request.request_id] == "abort":
            assert tokens == whole[: len(tokens)]
        else:
            assert tokens == whole
    case.harness.check_empty()


@pytest.mark.slow
@search(examples=150)
@given(case=cases(with_aborts=True, late_share=0.4))
def test_a_late_mask_changes_no_token_and_delays_only_its_row(case: Case) -> None:
    """Rows with a grammar often get no token, at both depths, with preemptions and aborts. Each
    request gives the tokens that it gives alone, and nothing leaks."""
    case.run()

    check_tokens(case)


@pytest.mark.slow
@search(examples=100)
@given(case=cases(with_aborts=True))
def test_an_abort_at_any_step_returns_every_slot_and_disturbs_no_other_request(
    case: Case,
) -> None:
    """Lesson 58: after any abort at any time, the tokens of the others are exact and no slot is
    lost."""
    case.run()

    check_tokens(case)


@pytest.mark.parametrize("depth", [1, 2])
def test_cached_equals_uncached(depth: int) -> None:
    """The same prompts give the same tokens again, and with prefix caching off."""
    prompts = [make_prompt(21), make_prompt(33), make_prompt(21, family=1)]
    answers = []
    for caching in (True, False):
        harness = Harness(depth=depth, settings={"prefix_caching": caching})
        for turn in range(3):
            harness.run(*(make_request(f"{turn}-{at}", p) for at, p in enumerate(prompts)))
        answers.append(harness.outputs)
        hits = sum(usage.cached_tokens for usage in harness.usages.values())
        assert (hits > 0) == caching

    assert answers[0] == answers[1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_batched_tokens", [1, 2, 3, 7, 64])
def test_chunked_equals_whole(depth: int, max_batched_tokens: int) -> None:
    """However a prompt is divided into steps, the tokens are the same."""
    harness = Harness(
        depth=depth, settings={"max_num_seqs": 1, "max_batched_tokens": max_batched_tokens}
    )
    request = make_request("a", make_prompt(50))

    harness.run(request)

    assert harness.outputs["a"] == expected_tokens(request)
    assert harness.runner.num_tokens == 50 + 7


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_equals_undisturbed(depth: int, caching: bool) -> None:
    """Lesson 37: a resumed sequence continues exactly where it was, and ends once."""
    requests = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40) for n in range(4)
    ]
    harness = Harness(num_blocks=20, depth=depth, settings={"prefix_caching": caching})

    harness.run(*requests)

    assert harness.scheduler.stats().num_preemptions > 0
    for request in requests:
        assert harness.outputs[request.request_id] == expected_tokens(request)
    assert harness.scheduler.stats().finished == {"length": 4}
    harness.check_empty()
