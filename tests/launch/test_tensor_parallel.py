"""An engine of several ranks: its tiers, its storage, and lost ranks."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.clock import SystemClock
from headwater.config import EngineConfig, PeersConfig
from headwater.engine.watchdog import StepWatchdog
from headwater.errors import ConfigError, EngineDead
from headwater.launch.llm import LLM
from headwater.launch.ranks import check_ranks, rank_devices
from headwater.scheduler.request import SamplingParams
from tests.launch.rank_engines import (
    Open,
    make_params,
    make_prompts,
    rank_pids,
    say,
)
from tests.waiting import until


@pytest.fixture(scope="module")
def two_ranks(open_engine: Open, stored_by_one: list[list[int]]) -> Iterator[LLM]:
    """An engine of two ranks over the store that one rank has filled."""
    engine = open_engine(tensor_parallel_size=2)
    yield engine
    engine.core.close()


@pytest.mark.slow
def test_ranks_read_what_one_rank_stored(
    two_ranks: LLM, stored_by_one: list[list[int]]
) -> None:
    """Blocks in storage are complete, so an engine with any number of ranks finds them and
    gives the same output."""
    tokens, found = say(two_ranks, make_prompts(1, 61, 45))

    assert tokens == stored_by_one
    assert found["storage"] == 56 + 40


@pytest.mark.slow
def test_every_tier_gives_back_what_the_ranks_put_there(two_ranks: LLM) -> None:
    """Tokens are the same when a prompt is computed in chunks or found on the device, on the
    host or in storage."""
    prompts = make_prompts(2, 70, 33)

    computed, _ = say(two_ranks, prompts)
    cached, on_device = say(two_ranks, prompts)
    two_ranks.core.reset_cache(("device",))
    loaded, on_host = say(two_ranks, prompts)
    two_ranks.core.reset_cache(("device", "host"))
    read, in_storage = say(two_ranks, prompts)

    assert computed == cached == loaded == read
    assert on_device["device"] == on_host["host"] == in_storage["storage"] == 64 + 32
    two_ranks.core.check()


@pytest.mark.slow
def test_sequences_that_do_not_fit_together_are_preempted_and_give_the_same_tokens(
    two_ranks: LLM, open_engine: Open
) -> None:
    """One rank has room for all sequences; two ranks do not."""
    prompts = make_prompts(4, *[60] * 6)
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
    """If a rank is stopped, the step waits until the watchdog ends it. If a rank is killed, the
    step fails with a message that names the rank. This is the last test with these ranks,
    because they are lost."""
    core = two_ranks.core
    reasons: list[str] = []
    error: list[str] = []
    (child,) = rank_pids(two_ranks)
    os.kill(child, signal.SIGSTOP)
    watchdog = StepWatchdog(core, 1.0, reasons.append, SystemClock())
    watchdog.start()

    def ask() -> None:
        try:
            two_ranks.generate(make_prompts(9, 20, 20), make_params())
        except EngineDead as exc:
            error.append(str(exc))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: bool(reasons))
    assert "did not end within 1 s" in reasons[0]
    assert asking.is_alive()

    os.kill(child, signal.SIGKILL)
    asking.join(30.0)

    assert error == ["rank 1 of 2 failed: its process was killed by SIGKILL"]
    with pytest.raises(EngineDead, match="rank 1 of 2"):
        core.step()


@pytest.mark.slow
def test_a_rank_that_cannot_start_gets_a_message(folder: Path) -> None:
    """The model's heads cannot be split by three: every rank detects it, and one error reports
    it."""
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
    """The message names the supported links."""
    config = EngineConfig(
        tensor_parallel_size=2, peers=PeersConfig(role="prefill", link="mooncake")
    )
    with pytest.raises(ConfigError, match="use tcp or shm"):
        check_ranks(config)
