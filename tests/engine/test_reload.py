"""Reloading weights: only when nothing runs, with every token delivered."""

from typing import Any

import pytest

from headwater.engine.client import EngineInfo, ReloadWeights
from headwater.errors import ModelError, NotDrained, RequestError
from headwater.testing.engines import make_echo_info
from headwater.types import WritePolicy
from tests.scheduler.harness import (
    Harness,
    expected_tokens,
    make_prompt,
    make_request,
    make_storage,
)

IDLE = (0, 0, 0, 0)


class Reloading:
    """An engine whose weights can be reloaded, with what each reload saw and answered."""

    def __init__(self, **options: Any) -> None:
        self.harness = Harness(write_policy=WritePolicy.WRITE_THROUGH, **options)
        self.seen: list[tuple[int, int, int, int]] = []
        """Running and preempted sequences, steps and transfers in flight, whenever weights were
        read."""
        self.answers: list[tuple[EngineInfo | None, RequestError | None]] = []
        self.harness.core.allow_reload(self._read)
        self.error: Exception | None = None

    def ask(self, drain_timeout_s: float = 5.0) -> None:
        self.harness.core.control(
            ReloadWeights(None, drain_timeout_s),
            lambda info, refusal: self.answers.append((info, refusal)),
        )

    def run(self) -> None:
        """Run the loop like an engine process until it would sleep without limit."""
        for _ in range(2_000):
            if self.harness.core.has_work:
                self.harness.step()
            elif self.harness.core.sleep_s() is not None:
                self.harness.sleep()
            else:
                return
        raise AssertionError("still working after 2000 turns")

    def _read(self, folder: str | None) -> EngineInfo:
        scheduler = self.harness.scheduler
        sequences = scheduler.stats().num_running, scheduler.num_preempted
        self.seen.append((*sequences, scheduler.num_in_flight, scheduler.num_copies))
        if self.error is not None:
            raise self.error
        return make_echo_info()


@pytest.mark.parametrize("depth", [1, 2])
def test_running_requests_get_every_token_before_weights_are_read(depth: int) -> None:
    """Lesson 79: the loop continues while it drains; a waiting request starts with the new
    weights."""
    engine = Reloading(depth=depth, settings={"max_num_seqs": 1})
    running = make_request("running", make_prompt(9), max_tokens=12)
    waiting = make_request("waiting", make_prompt(9, family=2), max_tokens=4)
    engine.harness.add(running, waiting)
    engine.harness.steps(3)

    engine.ask()
    engine.harness.steps(2)
    assert engine.seen == []
    engine.run()

    assert engine.seen == [IDLE]
    ((info, refusal),) = engine.answers
    assert (info is not None, refusal) == (True, None)
    for request in (running, waiting):
        assert engine.harness.outputs[request.request_id] == expected_tokens(request)
    last = [output.request_id for output in engine.harness.history].index(waiting.request_id)
    assert last == 12, "no token of the waiting request comes before the reload"


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_a_preempted_request_ends_before_weights_are_read(host_blocks: int) -> None:
    """A request that waits for its blocks to be loaded back has begun with the old weights, so
    the engine is not idle although nothing runs."""
    engine = Reloading(num_blocks=12, host_blocks=host_blocks, settings={"max_num_seqs": 4})
    requests = [
        make_request("r1", make_prompt(16), max_tokens=24),
        make_request("r2", make_prompt(16, family=3), max_tokens=24),
    ]
    engine.harness.add(*requests)
    while not engine.harness.scheduler.num_preempted:
        engine.harness.step()

    engine.ask()
    engine.run()

    assert engine.seen == [IDLE]
    for request in requests:
        assert engine.harness.outputs[request.request_id] == expected_tokens(request)


def test_transfers_end_before_weights_are_read() -> None:
    """A copy in flight carries KV of the old weights; a request that waits for it continues
    after the reload."""
    engine = Reloading(num_blocks=16, host_blocks=64)
    harness = engine.harness
    harness.run(make_request("a", make_prompt(33), max_tokens=4))
    harness.run(make_request("b", make_prompt(50, family=2), max_tokens=4))
    again = make_request("again", make_prompt(33), max_tokens=6)
    harness.copier.held = True
    harness.add(again)
    harness.step()
    assert harness.scheduler.num_copies == 1

    engine.ask()
    assert not harness.core.has_work
    harness.copier.held = False
    for job in list(harness.copier.pending):
        harness.copier.finish(job)
    engine.run()

    assert engine.seen == [IDLE]
    assert harness.outputs["again"] == expected_tokens(again)


def test_new_requests_do_not_keep_the_engine_from_being_idle() -> None:
    """No lookup is sent for a request that arrives during the drain; here storage never
    answers."""
    engine = Reloading(host_blocks=64, stored=make_storage(), held=True)
    engine.harness.add(make_request("running", make_prompt(2), max_tokens=2))
    engine.harness.step()
    engine.ask()
    newcomer = make_request("newcomer", make_prompt(33), max_tokens=2)
    engine.harness.add(newcomer)

    engine.run()

    assert engine.seen == [IDLE]
    assert engine.harness.outputs["newcomer"] == expected_tokens(newcomer)


def test_a_drain_that_takes_too_long_changes_nothing() -> None:
    """The call is refused at its deadline, and waiting requests are admitted again."""
    engine = Reloading(settings={"max_num_seqs": 1})
    requests = [make_request(name, make_prompt(9), max_tokens=40) for name in "ab"]
    engine.harness.add(*requests)
    engine.harness.step()

    engine.ask(drain_timeout_s=0.1)
    engine.run()

    assert engine.seen == []
    ((info, refusal),) = engine.answers
    assert info is None
    assert isinstance(refusal, NotDrained)
    assert "1 running" in str(refusal)
    for request in requests:
        assert engine.harness.outputs[request.request_id] == expected_tokens(request)


def test_a_transfer_that_never_ends_refuses_the_reload() -> None:
    """The deadline also wakes a loop that has nothing else to do."""
    engine = Reloading(
        num_blocks=16, host_blocks=64, held=True, timeouts={"copy_timeout_s": 60.0}
    )
    engine.harness.add(make_request("a", make_prompt(33), max_tokens=1))
    engine.harness.steps(3)
    assert engine.harness.scheduler.num_copies
    engine.ask(drain_timeout_s=1.0)

    engine.harness.clock.advance(1.0)
    assert engine.harness.core.has_work
    engine.harness.step()

    ((_, refusal),) = engine.answers
    assert isinstance(refusal, NotDrained)
    assert "1 transfers" in str(refusal)


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("error", [None, ModelError("no model")])
def test_a_pause_before_a_reload_stays_a_pause_afterwards(
    is_paused: bool, error: Exception | None
) -> None:
    """A reload resumes admission only if the reload itself stopped it, whether it succeeds or
    not."""
    engine = Reloading()
    engine.error = error
    if is_paused:
        engine.harness.core.pause()
    engine.ask()
    engine.harness.add(make_request("a", make_prompt(9), max_tokens=2))
    engine.run()

    assert len(engine.answers) == 1
    assert engine.harness.scheduler.stats().is_paused == is_paused
    assert ("a" in engine.harness.reasons) == (not is_paused)
    engine.harness.core.resume()
    engine.run()
    assert engine.harness.reasons["a"] == "length"


def test_a_second_reload_is_refused_while_one_drains() -> None:
    """The first reload continues."""
    engine = Reloading()
    engine.harness.add(make_request("a", make_prompt(9), max_tokens=4))
    engine.harness.step()
    engine.ask()
    engine.ask()

    ((_, refusal),) = engine.answers
    assert "another reload" in str(refusal)
    engine.run()
    assert len(engine.answers) == 2
    assert engine.seen == [IDLE]


def test_an_engine_that_cannot_reload_says_so() -> None:
    """The engine continues to admit requests."""
    harness = Harness()
    answers: list[RequestError | None] = []
    harness.core.control(ReloadWeights(), lambda _, refusal: answers.append(refusal))

    assert "cannot reload weights" in str(answers[0])
    harness.run(make_request("a", make_prompt(9), max_tokens=2))
    assert harness.reasons == {"a": "length"}
