"""The offline engine: prompts in, texts out, nothing left running."""

import io
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from headwater.cache import CacheConfig, TieredCache
from headwater.clock import SystemClock
from headwater.engine.core import EngineCore
from headwater.engine.llm import OfflineEngine
from headwater.engine.progress import LineProgress, show_progress
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import PromptTooLong, RequestError
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.request import SamplingParams
from headwater.scheduler.scheduler import Scheduler
from headwater.testing.engines import VOCAB_SIZE, make_echo_core, make_tokenizer_folder
from headwater.testing.runners import EchoRunner

MAX_MODEL_LEN = 40


@pytest.fixture
def llm(tmp_path):
    core = make_echo_core()
    tokenizer = Tokenizer(make_tokenizer_folder(tmp_path))
    yield OfflineEngine(
        core, tokenizer, SystemClock(), vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN
    )
    assert not core.has_work
    core.check()


def test_answers_come_in_the_order_of_the_prompts(llm):
    """Each prompt gets its answer, alone or in a batch, and the same one both times."""
    prompts = ["one", "two two", "three three three"]
    params = SamplingParams(max_tokens=5)

    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]

    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert [answer.finish_reason for answer in together] == ["length"] * 3
    assert [len(answer.prompt_tokens) for answer in together] == [3, 7, 17]


def test_token_ids_are_prompts_too(llm):
    """A flat list of ids is one prompt, a list of lists several; arrays work too."""
    assert len(llm.generate([1, 2, 3])) == 1
    assert len(llm.generate([[1, 2, 3], [4]])) == 2
    assert len(llm.generate(np.array([1, 2, 3]))) == 1
    assert len(llm.generate([np.int64(1), np.int64(2)])) == 1
    assert len(llm.generate(["text", [4], np.array([1, 2, 3])])) == 3
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "prompt",
    [[VOCAB_SIZE], [-1], [1 << 40], [1 << 70], [1.5], [None], [[[1]]], [[1, [2]]], ["a", [-1]]],
)
def test_a_token_that_the_model_does_not_have_is_refused(llm, prompt):
    """Lesson 68: an id beyond the vocabulary is an error of the caller and does not end the
    engine."""
    with pytest.raises(RequestError, match="token id"):
        llm.generate(prompt)

    assert llm.generate([1])[0].finish_reason == "length"


def test_a_repeated_prompt_is_found_in_the_cache(llm):
    """Lesson 64: `cached_tokens` says what was not computed again; salts keep tenants apart."""
    prompt = list(range(100))

    params = SamplingParams(seed=1)

    first, second = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
    other = llm.generate(prompt, params, cache_salt="another tenant")[0]

    assert (first.cached_tokens, second.cached_tokens, other.cached_tokens) == (0, 96, 0)
    assert first.tokens == second.tokens == other.tokens


def test_a_stop_string_ends_an_answer(llm):
    """The text is cut at the stop string, and the engine stops computing it."""
    whole = llm.generate([7, 8, 9], SamplingParams(max_tokens=200))[0]
    stop = next(char for char in whole.text if char.isascii() and char.isprintable())

    cut = llm.generate([7, 8, 9], SamplingParams(max_tokens=200), stop=[stop])[0]

    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert len(cut.tokens) < len(whole.tokens)


def test_a_stop_string_may_be_alone(llm):
    """One string is one stop string, not one per letter; an empty one is refused."""
    params = SamplingParams(max_tokens=30)
    whole = llm.generate([7, 8, 9], params)[0]

    assert llm.generate([7, 8, 9], params, stop="no such text")[0].text == whole.text
    with pytest.raises(RequestError, match="stop string is empty"):
        llm.generate([7, 8, 9], params, stop=[""])


@pytest.mark.parametrize(
    "conversations", ["hi", ["hi"], [{"content": "hi"}], [[{"role": "user"}]]]
)
def test_a_value_that_is_not_a_conversation_is_refused(llm, conversations):
    """A template would make a prompt of almost anything."""
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat(conversations)


def test_chat_takes_one_conversation_or_several(llm):
    """A conversation goes through the model's template."""
    messages = [{"role": "user", "content": "hi"}]

    assert len(llm.chat(messages)) == 1
    assert [len(a.prompt_tokens) for a in llm.chat([messages, messages])] == [5, 5]


def test_a_refused_prompt_ends_the_batch_and_leaves_nothing_running(llm):
    """The error names the reason; requests that were added before are aborted."""
    with pytest.raises(PromptTooLong):
        llm.generate([[1, 2], list(range(2)) * 400])
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[1, 2], []])
    with pytest.raises(RequestError, match="2 entries for 1"):
        llm.generate([[1, 2]], [SamplingParams(), SamplingParams()])


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("the prompt", lambda llm, text: llm.generate(["good", text])),
        ("the prompt", lambda llm, text: llm.chat([{"role": "user", "content": text}])),
        ("cache_salt", lambda llm, text: llm.generate("a" * 20, cache_salt=text)),
        ("stop", lambda llm, text: llm.generate("good", stop=text)),
    ],
)
def test_a_lone_surrogate_is_refused_as_over_http(llm, field, ask):
    """A lone surrogate has no UTF-8 encoding. The error names field and position, and the
    engine continues."""
    with pytest.raises(RequestError, match=f"{field} has a lone surrogate, U.D800, at char"):
        ask(llm, "so\ud800")

    assert llm.generate("good", SamplingParams(max_tokens=2))[0].finish_reason == "length"


def test_a_prompt_may_get_several_answers(llm):
    """`n` answers per prompt, one after the other; each is what its own seed gives alone."""
    params = SamplingParams(max_tokens=6, seed=40)

    answers = llm.generate([[1, 2, 3], [4, 5]], params, n=3)
    alone = [
        llm.generate([prompt], SamplingParams(max_tokens=6, seed=40 + index))[0].tokens
        for prompt in ([1, 2, 3], [4, 5])
        for index in range(3)
    ]

    assert [(a.prompt_tokens.tolist(), a.index) for a in answers] == [
        (prompt, index) for prompt in ([1, 2, 3], [4, 5]) for index in range(3)
    ]
    assert [answer.tokens for answer in answers] == alone
    assert len({tuple(answer.tokens) for answer in answers[:3]}) == 3
    assert len(llm.chat([{"role": "user", "content": "hi"}], params, n=2)) == 2


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompts": None}, "prompts"),
        ({"prompts": 5}, "prompts"),
        ({"prompts": {"a": 1}}, "prompts"),
        ({"params": {"max_tokens": 3}}, "params"),
        ({"params": ["hot"]}, "params"),
        ({"params": 0.5}, "params"),
        ({"n": "2"}, "n must be"),
        ({"n": 0}, "n must be"),
        ({"n": True}, "n must be"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_an_argument_of_another_type_is_named(llm, arguments, field):
    """Lesson 68: the caller's mistake is a RequestError that says which argument it is."""
    with pytest.raises(RequestError, match=field):
        llm.generate(**{"prompts": [[1, 2]], **arguments})


class InterruptedRunner(EchoRunner):
    """Simulates Ctrl-C during one submit or collect, the `after`-th."""

    after = -1

    def submit(self, batch: ScheduledBatch) -> None:
        self._press()
        super().submit(batch)

    def collect(self) -> StepResult:
        self._press()
        return super().collect()

    def _press(self) -> None:
        self.after -= 1
        if self.after == 0:
            signal.raise_signal(signal.SIGINT)


def make_interrupted(folder, depth):
    """An offline engine with such a runner, the runner, and the number of free slots."""
    cache = TieredCache(CacheConfig(device_blocks=16, block_tokens=4))
    config = SchedulerConfig(max_model_len=40, max_num_seqs=4, max_batched_tokens=16)
    runner = InterruptedRunner(
        num_blocks=16, block_tokens=4, depth=depth, vocab_size=VOCAB_SIZE
    )
    core = EngineCore(Scheduler(config, cache), runner, SystemClock())
    tokenizer = Tokenizer(make_tokenizer_folder(folder))
    return (
        OfflineEngine(
            core, tokenizer, SystemClock(), vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN
        ),
        runner,
        cache,
    )


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """The default handler of Ctrl-C, whatever this process has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before or signal.default_int_handler)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_inside_any_step_leaves_nothing_behind(tmp_path, depth):
    """Lesson 58: at any point, every slot is returned and the engine answers as before."""
    prompts = [[number, *range(9)] for number in range(6)]
    params = SamplingParams(max_tokens=6)
    llm, runner, cache = make_interrupted(tmp_path, depth)
    expected = [answer.tokens for answer in llm.generate(prompts, params)]
    before = signal.getsignal(signal.SIGINT)

    for after in range(1, 20):
        runner.after = after
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)

        assert not llm.core.has_work
        assert llm.core.stats().num_running == llm.core.stats().num_waiting == 0
        llm.core.check()
        assert cache.stats().leases == 0
        assert cache.stats().device.free + cache.stats().device_evictable == 16
        assert signal.getsignal(signal.SIGINT) is before
    assert [answer.tokens for answer in llm.generate(prompts, params)] == expected


def test_other_threads_generate_without_a_signal_handler(llm):
    """Only the main thread may set a handler; elsewhere none is needed."""
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate([[1, 2]])))
    thread.start()
    thread.join(30)

    assert len(answers) == 1


def test_progress_is_lines_where_there_is_no_terminal(llm, capsys):
    """There are at most ten lines, the last of which says that all is done."""
    llm.generate([[token] for token in range(25)], SamplingParams(max_tokens=1), show=True)

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "prompts: 25 of 25"


def test_progress_is_a_bar_on_a_terminal():
    """A terminal gets a bar, anything else gets lines."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    with show_progress("prompts", 2, out=terminal) as bar:
        bar.advance(2)

    assert "prompts" in terminal.getvalue()
    assert isinstance(show_progress("prompts", 2, out=io.StringIO()), LineProgress)


def test_without_params_it_samples_as_the_server_does(llm):
    """Each prompt gets a random seed; a text gets 16 tokens, a conversation as many as fit."""
    answers = llm.generate([[1, 2, 3]] * 4)
    chat = llm.chat([{"role": "user", "content": "a"}])[0]

    assert len({tuple(answer.tokens) for answer in answers}) > 1
    assert all(len(answer.tokens) <= 16 for answer in answers)
    room = MAX_MODEL_LEN - len(chat.prompt_tokens)
    assert chat.finish_reason == "stop" or len(chat.tokens) == room
