"""Masks of allowed tokens: ready, late, rebuilt, failed; and the bounds of their memory."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from llguidance import LLMatcher

from headwater.clock import SystemClock, VirtualClock
from headwater.device.builtin import ensure
from headwater.engine import masks
from headwater.engine.grammar import GrammarCompiler
from headwater.engine.masks import (
    MaskedRow,
    MaskState,
    MaskWorkers,
    StepMasks,
    num_groups_for,
)
from headwater.engine.structured import StructuredOutput
from headwater.engine.tokenizer import Tokenizer
from headwater.types import RequestId

VOCAB, EOS = 264, 257
DIGITS = StructuredOutput(regex="[0-9]{3}").to_grammar()
LETTERS = StructuredOutput(regex="[a-z]{3}").to_grammar()


class HeldCompiler(GrammarCompiler):
    """Does not return from `LETTERS` until it is released."""

    def __init__(self) -> None:
        tokenizer = Tokenizer(ensure())
        super().__init__(tokenizer.to_json, vocab_size=VOCAB, eos_token_ids=[EOS])
        self.released = threading.Event()

    def matcher(self, grammar: str, group: int = 0) -> LLMatcher:
        if grammar == LETTERS:
            assert self.released.wait(30)
        return super().matcher(grammar, group)


@pytest.fixture
def compiler() -> Iterator[HeldCompiler]:
    made = HeldCompiler()
    yield made
    made.released.set()


@pytest.fixture
def workers(compiler: HeldCompiler) -> Iterator[MaskWorkers]:
    # The clock stands still, so that no mask counts as slow on a busy machine.
    made = MaskWorkers(compiler, VirtualClock(), max_states=4)
    yield made
    made.close()


@pytest.fixture
def groups(compiler: HeldCompiler) -> Iterator[MaskWorkers]:
    """Several groups, each of which makes several masks in one call."""
    made = MaskWorkers(compiler, VirtualClock(), max_states=64, num_groups=3)
    yield made
    made.close()


def row(number: int, grammar: str, output: str, name: str = "") -> MaskedRow:
    tokens = np.frombuffer(output.encode(), dtype=np.uint8).astype(np.int32)
    return MaskedRow(number, RequestId(name or f"r{number}"), grammar, tokens)


def take(workers: MaskWorkers, *rows: MaskedRow, until: int = 1) -> StepMasks:
    """The masks, when at least `until` of them are ready."""
    clock = SystemClock()
    end_s = clock.now() + 20.0
    while True:
        found = workers.begin(rows).take(is_alone=True)
        if len(found.rows) + len(found.failed) >= until:
            return found
        assert clock.now() < end_s, f"no {until} masks: {found}"


def allowed(words: np.ndarray) -> set[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]
    return set(np.flatnonzero(bits).tolist())


def test_a_mask_follows_its_output(workers):
    """A mask allows the next token after each token, and only the end where nothing more may
    follow."""
    for output, wanted in (("", b"0123456789"), ("1", b"0123456789"), ("123", b"")):
        found = take(workers, row(0, DIGITS, output))
        assert allowed(found.words[0]) == (set(wanted) or {EOS})


def test_a_grammar_state_of_other_output_is_rebuilt(workers):
    """After a preemption, or when a name is used again, the state is rebuilt from the tokens
    alone."""
    take(workers, row(0, DIGITS, "12", name="same"))
    for output in ("1", "", "98", "987"):
        found = take(workers, row(0, DIGITS, output, name="same"))
        ended = len(output) == 3
        assert allowed(found.words[0]) == ({EOS} if ended else set(b"0123456789"))


def test_a_late_mask_delays_no_other_row(workers, compiler):
    """While a grammar is being compiled, its row is late step after step; then it gets its
    mask."""
    rows = [row(0, DIGITS, "1"), row(5, LETTERS, "")]
    for _ in range(3):
        found = take(workers, *rows)
        assert found.rows == [0]
        assert found.late == [5]
    compiler.released.set()
    found = take(workers, *rows, until=2)
    assert set(found.rows) == {0, 5}
    letters = found.words[found.rows.index(5)]
    assert allowed(letters) == set(b"abcdefghijklmnopqrstuvwxyz")


def test_many_rows_are_made_together(workers):
    """When each state is known, the next masks come together, in the order of rows."""

    def ask(output):
        rows = [row(number, DIGITS, output) for number in range(4)]
        return take(workers, *rows, until=4)

    ask("")
    ask("1")
    found = ask("12")
    assert sorted(found.rows) == [0, 1, 2, 3]
    assert all(allowed(words) == set(b"0123456789") for words in found.words)


def test_rows_of_several_groups_get_their_own_masks(groups):
    """Each row gets the mask of its own output, whatever group and portion it is in."""
    outputs = ["", "1", "12", "123"]
    wanted = {"123": {EOS}}
    for length in range(4):
        rows = [
            row(number, DIGITS, outputs[min(number % 4, length)], name=f"r{number}")
            for number in range(60)
        ]
        found = take(groups, *rows, until=60)
        assert sorted(found.rows) == list(range(60))
        assert len({state.group for state in groups._states.values()}) == 3
        for at, words in zip(found.rows, found.words, strict=True):
            output = outputs[min(at % 4, length)]
            assert allowed(words) == wanted.get(output, set(b"0123456789"))


def test_the_token_of_the_step_before_counts_as_output(groups):
    """A token that was not known when the step was scheduled is consumed like any other."""
    take(groups, row(0, DIGITS, "1"))
    found = take(groups, row(0, DIGITS, "1")._replace(carried=ord("2")))
    assert allowed(found.words[0]) == set(b"0123456789")
    found = take(groups, row(0, DIGITS, "12")._replace(carried=ord("3")))
    assert allowed(found.words[0]) == {EOS}


def test_a_request_with_a_known_grammar_needs_no_thread_of_its_own(groups):
    """The first mask of a request is made in its group if the grammar is compiled."""
    take(groups, *(row(number, DIGITS, "") for number in range(3)), until=3)
    pending = groups.begin(
        [row(number, DIGITS, "", name=f"new {number}") for number in range(9)]
    )
    assert len(pending._together) == 9
    assert sorted(pending.take(is_alone=True, grace_s=20.0).rows) == list(range(9))


def test_masks_that_cannot_be_made_together_are_made_one_by_one(groups, monkeypatch):
    """A failed call for several masks fails no request whose own mask can be made."""

    class Broken:
        def __init__(self, num_threads: int) -> None:
            pass

        def unsafe_compute_mask_ptr(self, *call: object) -> None:
            raise RuntimeError("a bug")

    monkeypatch.setattr(masks, "LLExecutor", Broken)
    for output in ("", "1"):
        rows = [row(number, DIGITS, output) for number in range(9)]
        found = take(groups, *rows, until=9)
        assert sorted(found.rows) == list(range(9))
        assert all(allowed(words) == set(b"0123456789") for words in found.words)


def test_rows_of_a_slow_call_are_made_apart_until_they_are_fast(compiler, monkeypatch):
    """It is unknown which of the masks was slow. Each is timed on its own in the next step."""
    clock = VirtualClock()
    workers = MaskWorkers(compiler, clock, max_states=64, num_groups=2)
    for output in ("", "1"):
        take(workers, *(row(number, DIGITS, output) for number in range(4)), until=4)
    compute, is_slow = workers._compute, True

    def compute_late(*call):
        made = compute(*call)
        clock.advance(0.02 if is_slow else 0.0)
        return made

    monkeypatch.setattr(workers, "_compute", compute_late)
    rows = [row(number, DIGITS, "12") for number in range(4)]
    found = take(workers, *rows, until=4)
    is_slow = False
    for output, num_together in (("123", 0), ("1234", 4)):
        pending = workers.begin([row(number, DIGITS, output) for number in range(4)])
        assert len(pending._together) == num_together
        found = pending.take(is_alone=True, grace_s=20.0)
        assert len(found.rows) + len(found.failed) == 4
    workers.close()


@pytest.mark.parametrize("compiles", [True, False])
def test_a_slow_first_mask_keeps_its_request_out_of_the_group(compiler, monkeypatch, compiles):
    """The time of compiling does not count, that of the mask does."""
    clock = VirtualClock()
    workers = MaskWorkers(compiler, clock, max_states=4)
    late, name = (compiler, "matcher") if compiles else (masks, "_compute_one")
    act = getattr(late, name)

    def act_late(*call):
        clock.advance(0.02)
        return act(*call)

    monkeypatch.setattr(late, name, act_late)
    take(workers, row(0, DIGITS, ""))
    pending = workers.begin([row(0, DIGITS, "1")])
    assert len(pending._together) == int(compiles)
    workers.close()


def test_masks_that_were_taken_are_not_kept(groups):
    """Each mask is a part of the masks of a whole step: a mask that is kept would keep the
    memory of all of them."""
    take(groups, *(row(number, DIGITS, "1") for number in range(9)), until=9)
    assert all(state.words is None for state in groups._states.values())


def test_few_cores_have_one_group():
    """Further threads would take time from the engine's loop."""
    assert [num_groups_for(cores) for cores in (1, 2, 3, 4, 8, 16, 64)] == [1, 1, 1, 2, 4, 8, 8]


def test_an_unexpected_error_of_the_library_ends_its_request_alone(workers, monkeypatch):
    """The thread and the other requests of the group continue."""
    for output in ("", "1"):
        take(workers, *(row(number, DIGITS, output) for number in range(3)), until=3)
    consume = workers._consume

    def fail_once(task):
        if task.state is broken:
            raise RuntimeError("a bug")
        consume(task)

    monkeypatch.setattr(workers, "_consume", fail_once)
    rows = [row(number, DIGITS, "12") for number in range(3)]
    broken = workers._states[rows[1].request_id]
    found = take(workers, *rows, until=3)
    assert found.failed == {1: "the mask could not be made: a bug"}
    assert found.rows == [0, 2]


def test_a_group_that_is_always_late_is_used_in_the_next_step(workers, monkeypatch):
    """Masks of a late group are not started again. Otherwise a group that takes longer than the
    wait of a step would never be in time, and its rows would never sample a token."""
    rows = [row(number, DIGITS, "") for number in range(3)]
    take(workers, *rows, until=3)
    take(workers, *(row(number, DIGITS, "1") for number in range(3)), until=3)
    begun = threading.Event()
    make_group = workers._make_group

    def make_late(*group):
        assert begun.wait(30)
        make_group(*group)

    monkeypatch.setattr(workers, "_make_group", make_late)
    later = [row(number, DIGITS, "12") for number in range(3)]
    pending = workers.begin(later)
    assert sorted(pending.take(is_alone=False, grace_s=0.0).late) == [0, 1, 2]
    begun.set()
    for task in pending._together:
        task.state.future.result(30)
    begun.clear()

    found = workers.begin(later).take(is_alone=False, grace_s=0.0)
    begun.set()
    assert sorted(found.rows) == [0, 1, 2]
    assert all(allowed(words) == set(range(48, 58)) for words in found.words)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_slow_mask_does_not_delay_those_before_it_in_its_group(
    workers, monkeypatch, is_alone
):
    """Masks that are ready are taken while the rest of the group is being made."""
    for output in ("", "9"):
        take(workers, *(row(number, DIGITS, output) for number in range(3)), until=3)
    released = threading.Event()
    consume = workers._consume

    def consume_late(task):
        if len(task.output) == 8 and task.state is last:
            assert released.wait(30)
        consume(task)

    monkeypatch.setattr(workers, "_consume", consume_late)
    rows = [row(number, DIGITS, "99") for number in range(3)]
    last = workers._states[rows[2].request_id]
    pending = workers.begin(rows)
    found = pending.take(is_alone=is_alone, grace_s=0.5)
    assert found.rows == [0, 1]
    assert found.late == [2]
    assert all(allowed(words) == set(b"0123456789") for words in found.words)

    released.set()
    assert take(workers, *rows, until=3).late == []


@pytest.mark.parametrize(("is_alone", "longest_s"), [(True, 0.025), (False, 0.0021)])
def test_masks_that_never_come_hold_the_loop_for_a_bounded_time(
    compiler, monkeypatch, is_alone, longest_s
):
    """With rows of all kinds, a step waits for at most 25 ms, and for 2 ms if another row can
    choose a token."""
    waits = []
    monkeypatch.setattr(masks, "wait", lambda futures, timeout, **_: waits.append(timeout))
    workers = MaskWorkers(compiler, VirtualClock(), max_states=4)
    monkeypatch.setattr(workers, "_make", lambda *_: compiler.released.wait(30))
    rows = [row(0, DIGITS, "1"), row(1, LETTERS, ""), row(2, LETTERS, "a")]
    known = workers._state(rows[0])
    known.matcher = compiler.matcher(DIGITS)
    for _ in range(3):
        waits.clear()
        found = workers.begin(rows).take(is_alone=is_alone)
        assert sorted(found.late) == [0, 1, 2]
        assert sum(waits) <= longest_s
    compiler.released.set()
    workers.close()


def test_a_mask_that_is_begun_while_the_last_one_ends_is_not_taken_before_it_is_made(
    workers, monkeypatch
):
    """The loop may run between any two lines of a worker. It finds either the mask that is
    ready or a late one, never the words of a mask that nothing has written yet."""
    held = threading.Event()
    pending: list[StepMasks] = []

    class Interrupted(MaskState):
        """The loop begins the row again as soon as its worker has ended."""

        __slots__ = ("_busy",)

        @property
        def is_busy(self) -> bool:
            return self._busy

        @is_busy.setter
        def is_busy(self, value: bool) -> None:
            self._busy = value
            name = threading.current_thread().name
            if not value and name.startswith("masks") and not pending:
                pending.append(workers.begin([late]))

    monkeypatch.setattr(masks, "MaskState", Interrupted)
    for output in ("", "9"):
        take(workers, row(0, DIGITS, output))
    pending.clear()
    late = row(0, DIGITS, "99")
    make = workers._make

    def make_second_late(*call):
        if pending:
            assert held.wait(30)
        make(*call)

    monkeypatch.setattr(workers, "_make", make_second_late)
    first = workers.begin([late])
    workers._states[late.request_id].future.result(30)
    assert pending
    for begun in (first, *pending):
        found = begun.take(is_alone=False, grace_s=0.0)
        assert found.late == [0] or allowed(found.words[0]) == set(b"0123456789")
    held.set()


@pytest.mark.parametrize(
    ("grammar", "output", "words"),
    [
        (StructuredOutput(regex="(").to_grammar(), "", "unclosed group"),
        (DIGITS, "x", "does not fit"),
    ],
)
def test_a_request_whose_mask_cannot_be_made_fails_with_the_reason(
    workers, grammar, output, words
):
    """The request fails for a wrong grammar, and for output that does not fit its grammar;
    other rows continue."""
    found = take(workers, row(0, grammar, output), row(1, DIGITS, ""), until=2)
    assert words in found.failed[0]
    assert found.rows == [1]


def test_states_and_compiled_grammars_are_bounded(workers, compiler):
    """Memory of masks stays bounded for any number of requests and grammars. 64 grammars of
    eight groups are kept."""
    for number in range(20):
        take(workers, row(0, DIGITS, "", name=f"request {number}"))
        assert workers.num_states <= 4
    for number in range(600):
        compiler.check(StructuredOutput(choice=[f"choice {number}"]).to_grammar())
    assert compiler.num_cached == 64 * 8
