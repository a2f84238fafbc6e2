"""Four ranks, and ranks that are lost in every phase of a step. This is a separate file,
because a process has one group of ranks at a time."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.clock import SystemClock
from headwater.engine.watchdog import StepWatchdog
from headwater.errors import EngineDead
from tests.launch.rank_engines import (
    Open,
    make_params,
    make_prompts,
    rank_pids,
    say,
)
from tests.storage.conftest import RedisServer
from tests.waiting import until


@pytest.mark.nightly
def test_four_ranks_share_two_kv_heads_and_a_store(
    open_engine: Open, stored_by_one: list[list[int]]
) -> None:
    """Each KV head is on two ranks and written by one; blocks are the same as those of one rank."""
    engine = open_engine(tensor_parallel_size=4)
    try:
        tokens, found = say(engine, make_prompts(1, 61, 45))
        assert tokens == stored_by_one
        assert found["storage"] == 56 + 40
        computed, _ = say(engine, make_prompts(12, 70, 33))
        engine.core.reset_cache(("device",))
        loaded, on_host = say(engine, make_prompts(12, 70, 33))
        assert computed == loaded
        assert on_host["host"] == 64 + 32
    finally:
        engine.core.close()


@pytest.mark.nightly
def test_ranks_read_from_redis_what_one_rank_stored(open_engine: Open, tmp_path: Path) -> None:
    """Blocks are complete in every storage backend."""
    server = RedisServer(tmp_path)
    store = {"storage_backend": "redis", "storage_config": {"url": server.url}}
    tokens, found = [], []
    for size in (1, 2):
        engine = open_engine(tensor_parallel_size=size, **store)
        answered, in_tiers = say(engine, make_prompts(1, 61, 45))
        engine.core.close()
        tokens.append(answered)
        found.append(in_tiers)
    server.stop()

    assert tokens[0] == tokens[1]
    assert [each.get("storage", 0) for each in found] == [0, 56 + 40]


@pytest.mark.nightly
@pytest.mark.parametrize("phase", ["idle", "announced", "copying", "collected"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_may_be_lost_in_every_phase_of_a_step(
    phase: str, number: int, open_engine: Open
) -> None:
    """A rank is lost while idle, after receiving a step, while copying, or after a step: the
    engine ends with an error or, if the rank hangs, the watchdog reports it; no call waits for
    ever."""
    engine = open_engine(tensor_parallel_size=2)
    core, (child,) = engine.core, rank_pids(engine)
    runner: Any = core._runner
    engine.generate(make_prompts(20, 20), make_params()[:1])
    reasons: list[str] = []
    StepWatchdog(core, 1.0, reasons.append, SystemClock()).start()

    def losing(call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes `call` and then loses the rank."""

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
            engine.generate(make_prompts(21, 50), make_params(30)[:1])
        except EngineDead as exc:
            error.append(str(exc))

    asking = threading.Thread(target=ask)
    asking.start()
    if number == signal.SIGSTOP:
        until(lambda: bool(reasons))
        os.kill(child, signal.SIGKILL)
    asking.join(30.0)
    engine.core.close()
    assert not asking.is_alive()
    assert error
    assert "rank 1 of 2 failed" in error[0]
