"""An engine of several ranks: its tiers, its storage, and what happens when a rank is lost."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.clock import SystemClock
from headwater.config import EngineConfig, PeersConfig
from headwater.device.builtin import LlamaShape, make_llama
from headwater.engine.watchdog import StepWatchdog
from headwater.errors import ConfigError, EngineDead
from headwater.launch.llm import LLM
from headwater.launch.ranks import check_ranks, rank_devices
from headwater.scheduler.request import SamplingParams

SHAPE = LlamaShape(layers=2, hidden=64, ffn=96, heads=8, kv_heads=2, head_dim=16)
BLOCK = 8

Open = Callable[..., LLM]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("HEADWATER_CACHE")
    os.environ["HEADWATER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("HEADWATER_CACHE")
    if before is not None:
        os.environ["HEADWATER_CACHE"] = before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), SHAPE, seed=3)


@pytest.fixture(scope="module")
def open_engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Engines over one model and one store; one at a time."""
    store = tmp_path_factory.mktemp("store")

    def open_one(**settings: Any) -> LLM:
        return LLM(
            str(folder),
            block_tokens=BLOCK,
            max_batched_tokens=32,
            max_num_seqs=8,
            load_policy="wait",
            write_policy="write_through",
            **{
                "num_blocks_override": 64,
                "swap_space_gib": 0.02,
                "storage_backend": "file",
                "storage_config": {"path": str(store), "capacity_bytes": 50 << 20},
                **settings,
            },
        )

    return open_one


@pytest.fixture(scope="module")
def two_ranks(open_engine: Open, stored_by_one: list[list[int]]) -> Iterator[LLM]:
    """Opened over the store that one rank has filled."""
    engine = open_engine(tensor_parallel_size=2)
    yield engine
    engine.core.close()


def _prompts(seed: int, *sizes: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size).tolist() for size in sizes]


def _params(count: int = 12) -> list[SamplingParams]:
    """Greedy, and seeded."""
    return [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, max_tokens=count, ignore_eos=True),
    ]


def _say(engine: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, int]]:
    """What is answered, and from which tiers prompts were found."""
    answers = engine.generate(prompts, _params())
    found: dict[str, int] = {}
    for answer in answers:
        assert answer.usage is not None
        for tier, tokens in answer.usage.by_tier.items():
            found[tier] = found.get(tier, 0) + tokens
    engine.core.drain(10.0)
    return [answer.tokens for answer in answers], found


@pytest.fixture(scope="module")
def stored_by_one(open_engine: Open) -> list[list[int]]:
    """What one rank says to a prompt whose blocks it then leaves in storage."""
    engine = open_engine()
    tokens, _ = _say(engine, _prompts(1, 61, 45))
    engine.core.close()
    return tokens


@pytest.mark.slow
def test_ranks_read_what_one_rank_stored(
    two_ranks: LLM, stored_by_one: list[list[int]]
) -> None:
    """Blocks in storage are whole, so an engine of any size finds them; and says the same."""
    tokens, found = _say(two_ranks, _prompts(1, 61, 45))

    assert tokens == stored_by_one
    assert found["storage"] == 56 + 40


@pytest.mark.slow
def test_every_tier_gives_back_what_the_ranks_put_there(two_ranks: LLM) -> None:
    """Computed in chunks, found on the device, on the host and in storage: the same tokens."""
    prompts = _prompts(2, 70, 33)

    computed, _ = _say(two_ranks, prompts)
    cached, on_device = _say(two_ranks, prompts)
    two_ranks.core.reset_cache(("device",))
    loaded, on_host = _say(two_ranks, prompts)
    two_ranks.core.reset_cache(("device", "host"))
    read, in_storage = _say(two_ranks, prompts)

    assert computed == cached == loaded == read
    assert on_device["device"] == on_host["host"] == in_storage["storage"] == 64 + 32
    two_ranks.core.check()


@pytest.mark.slow
def test_sequences_that_do_not_fit_together_are_preempted_and_say_the_same(
    two_ranks: LLM, open_engine: Open
) -> None:
    """One rank with room for all, two ranks without."""
    prompts = _prompts(4, *[60] * 6)
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 6
    crowded = [answer.tokens for answer in two_ranks.generate(prompts, params)]
    assert two_ranks.core.stats().num_preemptions > 0

    roomy = open_engine(num_blocks_override=256, storage_backend=None, storage_config={})
    alone = [answer.tokens for answer in roomy.generate(prompts, params)]
    roomy.core.close()

    assert crowded == alone


@pytest.mark.slow
def test_a_rank_that_hangs_is_found_by_the_watchdog_and_one_that_dies_at_once(
    two_ranks: LLM,
) -> None:
    """Stopped, the step waits until the watchdog says so. Killed, the step ends with a sentence
    that names the rank. The last test of this module: it uses the ranks up."""
    core = two_ranks.core
    said: list[str] = []
    error: list[str] = []
    (child,) = _ranks_of(two_ranks)
    os.kill(child, signal.SIGSTOP)
    watchdog = StepWatchdog(core, 1.0, said.append, SystemClock())
    watchdog.start()

    def ask() -> None:
        try:
            two_ranks.generate(_prompts(9, 20, 20), _params())
        except EngineDead as exc:
            error.append(str(exc))

    asking = threading.Thread(target=ask)
    asking.start()
    _until(lambda: bool(said))
    assert "did not end within 1 s" in said[0]
    assert asking.is_alive()

    os.kill(child, signal.SIGKILL)
    asking.join(30.0)

    assert error == ["rank 1 of 2 failed: its process was killed by SIGKILL"]
    with pytest.raises(EngineDead, match="rank 1 of 2"):
        core.step()


def _ranks_of(engine: LLM) -> list[int]:
    runner: Any = engine.core._runner
    return [rank.process.pid for rank in runner._ranks._ranks]


def _until(is_so: Callable[[], bool], within_s: float = 30.0) -> None:
    waiting = threading.Event()
    for _ in range(int(within_s / 0.05)):
        if is_so():
            return
        waiting.wait(0.05)
    raise AssertionError(f"not within {within_s} s")


@pytest.mark.nightly
def test_four_ranks_share_two_kv_heads_and_a_store(
    open_engine: Open, stored_by_one: list[list[int]]
) -> None:
    """Each KV head is on two ranks and written by one; blocks are the same as those of one rank."""
    engine = open_engine(tensor_parallel_size=4)
    try:
        tokens, found = _say(engine, _prompts(1, 61, 45))
        assert tokens == stored_by_one
        assert found["storage"] == 56 + 40
        computed, _ = _say(engine, _prompts(12, 70, 33))
        engine.core.reset_cache(("device",))
        loaded, on_host = _say(engine, _prompts(12, 70, 33))
        assert computed == loaded
        assert on_host["host"] == 64 + 32
    finally:
        engine.core.close()


@pytest.mark.nightly
@pytest.mark.parametrize("phase", ["idle", "announced", "copying", "collected"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_may_be_lost_in_every_phase_of_a_step(
    phase: str, number: int, open_engine: Open
) -> None:
    """Idle, told of a step, copying, after a step: the engine ends with a sentence or, where the
    rank hangs, the watchdog says so; no call waits for ever."""
    engine = open_engine(tensor_parallel_size=2)
    core, (child,) = engine.core, _ranks_of(engine)
    runner: Any = core._runner
    engine.generate(_prompts(20, 20), _params()[:1])
    said: list[str] = []
    StepWatchdog(core, 1.0, said.append, SystemClock()).start()

    def losing(call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call; the rank is lost at its end."""

        def call_and_lose(*given: Any) -> Any:
            result = call(*given)
            os.kill(child, number)
            return result

        return call_and_lose

    copier: Any = core._mover._copier
    match phase:
        case "idle":
            os.kill(child, number)
        case "announced":
            runner._own.announce = losing(runner._own.announce)
        case "copying":
            copier.start = losing(copier.start)
        case "collected":
            runner._own.collect = losing(runner._own.collect)
    error: list[str] = []

    def ask() -> None:
        try:
            engine.generate(_prompts(21, 50), _params(30)[:1])
        except EngineDead as exc:
            error.append(str(exc))

    asking = threading.Thread(target=ask)
    asking.start()
    if number == signal.SIGSTOP:
        _until(lambda: bool(said))
        os.kill(child, signal.SIGKILL)
    asking.join(30.0)
    assert not asking.is_alive()
    assert error
    assert "rank 1 of 2 failed" in error[0]
    engine.core.close()


@pytest.mark.slow
def test_a_rank_that_cannot_start_is_one_sentence(folder: Path) -> None:
    """The model's heads cannot be split by three: every rank finds out, one error says so."""
    with pytest.raises(ConfigError, match="3 does not divide the model's 8 attention heads"):
        LLM(str(folder), tensor_parallel_size=3, num_blocks_override=8)


def test_each_rank_has_a_device() -> None:
    """CPUs are shared; GPUs are the first ones, those from a number on, or those named."""
    assert rank_devices("cpu", 2) == ["cpu", "cpu"]
    assert rank_devices("cuda", 2) == ["cuda:0", "cuda:1"]
    assert rank_devices("cuda:2", 2) == ["cuda:2", "cuda:3"]
    assert rank_devices("cuda:3,cuda:1", 2) == ["cuda:3", "cuda:1"]
    with pytest.raises(ConfigError, match="names 3 devices for --tensor-parallel-size 2"):
        rank_devices("cuda:0,cuda:1,cuda:2", 2)


def test_a_link_that_ranks_do_not_have_is_refused() -> None:
    """With a sentence that names the others."""
    config = EngineConfig(
        tensor_parallel_size=2, peers=PeersConfig(role="prefill", link="mooncake")
    )
    with pytest.raises(ConfigError, match="use tcp or shm"):
        check_ranks(config)
