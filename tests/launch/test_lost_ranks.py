"""Ranks that are lost in each phase of a step, and what the next engine finds. This is a separate
file, because a process has one group of ranks at a time."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.cache import LoadJob, OffloadJob
from headwater.clock import SystemClock
from headwater.config import EngineConfig
from headwater.engine.llm import OfflineEngine
from headwater.engine.tokenizer import Tokenizer
from headwater.engine.watchdog import StepWatchdog
from headwater.errors import EngineDead
from headwater.launch.core import build_core
from headwater.launch.kept_host import KeptHost
from tests.launch.rank_engines import BLOCK, Open, make_params, make_prompts, rank_pids, say
from tests.storage.conftest import RedisServer
from tests.waiting import until

PHASES = (
    "idle",
    "announcing",
    "announced",
    "computing",
    "collected",
    "offloading",
    "loading",
)
"""A rank is lost before a request; before and after it gets the message of a step; in the middle
of a forward pass; after a step; and before its part of a copy to or from the host."""

SIZES = (50, 20, 61, 33)
FOUND = 48 + 16 + 56 + 32
"""Tokens of prompts of these sizes in blocks that a request may take from the cache."""


def open_kept(folder: Path, kept: KeptHost, size: int) -> OfflineEngine:
    core, info = build_core(
        EngineConfig(
            model=str(folder),
            tensor_parallel_size=size,
            block_tokens=BLOCK,
            num_blocks_override=64,
            max_batched_tokens=32,
            max_num_seqs=8,
            num_threads=1,
            load_policy="wait",
            write_policy="write_through",
            swap_space_gib=0.02,
        ),
        kept=kept,
    )
    return OfflineEngine(
        core,
        Tokenizer(info.model_dir),
        SystemClock(),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
    )


def arm(engine: OfflineEngine, phase: str, lose: Callable[[], None]) -> None:
    """Call `lose` once, when the engine is in this phase."""
    core: Any = engine.core
    runner, copier = core._runner, core._mover._copier
    if phase == "idle":
        lose()
        return
    place, name, when, kind = {
        "announcing": (runner._own, "announce", "before", object),
        "announced": (runner._own, "announce", "after", object),
        "computing": (runner._group, "sum", "after", object),
        "collected": (runner._own, "collect", "after", object),
        "offloading": (copier, "start", "before", OffloadJob),
        "loading": (copier, "start", "before", LoadJob),
    }[phase]
    call = getattr(place, name)

    def call_and_lose(*given: Any) -> Any:
        if not all(isinstance(one, kind) for one in given[:1]):
            return call(*given)
        setattr(place, name, call)
        if when == "before":
            lose()
        result = call(*given)
        if when == "after":
            lose()
        return result

    setattr(place, name, call_and_lose)


def lose_in(engine: OfflineEngine, phase: str, rank: int, number: int, *, seed: int) -> None:
    """Send known prompts and those of `seed` while a rank is lost; every request must end."""
    victim = rank_pids(engine)[rank - 1]
    reasons: list[str] = []
    errors: list[str] = []
    watchdog = StepWatchdog(engine.core, 1.0, reasons.append, SystemClock())
    watchdog.start()
    is_lost = threading.Event()
    prompts = make_prompts(0, *SIZES) + make_prompts(seed, *SIZES)

    def lose() -> None:
        os.kill(victim, number)
        is_lost.set()

    def ask() -> None:
        try:
            engine.generate(prompts, make_params() * 4)
        except EngineDead as exc:
            errors.append(str(exc))

    arm(engine, phase, lose)
    asking = threading.Thread(target=ask)
    asking.start()
    assert is_lost.wait(60.0), phase
    if number == signal.SIGSTOP:
        until(lambda: bool(reasons), within_s=60.0)
        os.kill(victim, signal.SIGKILL)  # a server would end all processes of the engine here
    asking.join(60.0)
    watchdog.stop()
    engine.core.close()
    assert not asking.is_alive(), phase
    assert [f"rank {rank} of" in error for error in errors] == [True], (phase, errors)


def check_slots(engine: OfflineEngine) -> None:
    """Without requests, every slot of both tiers is free or may be evicted."""
    engine.core.check()
    core: Any = engine.core
    stats = core._cache.stats()
    assert stats.jobs == stats.leases == 0
    for pool in (stats.device, stats.host):
        assert pool.free + pool.cached == pool.total, stats


@pytest.fixture(scope="module")
def truth(open_engine: Open) -> list[list[list[int]]]:
    """The output of one rank without a cache for the prompts of each seed."""
    engine = open_engine(prefix_caching=False, storage_backend=None, storage_config={})
    seeds = range(len(PHASES) + 1)
    found = [say(engine, make_prompts(seed, *SIZES), make_params() * 2)[0] for seed in seeds]
    engine.core.close()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("size", "rank"), [(2, 1), (4, 1), (4, 2), (4, 3)])
def test_each_rank_may_be_lost_in_each_phase_of_a_step(
    size: int,
    rank: int,
    number: int,
    folder: Path,
    kept: KeptHost,
    truth: list[list[list[int]]],
) -> None:
    """All requests end with an error that names the rank; if the rank hangs, the watchdog reports
    it first. The next engine finds the blocks that had arrived on the host, gives the tokens of
    an uncached run, also for the requests that were cut off, and lacks no slot."""
    for life in range(len(PHASES) + 1):
        engine = open_kept(folder, kept, size)
        tokens, found = say(engine, make_prompts(0, *SIZES), make_params() * 2)
        cut_off, _ = say(engine, make_prompts(life, *SIZES), make_params() * 2)
        assert [tokens, cut_off] == [truth[0], truth[life]], life
        assert found.get("host", 0) == (FOUND if life else 0), life
        check_slots(engine)
        if life == len(PHASES):
            engine.core.close()
            break
        engine.core.reset_cache(("device",))
        lose_in(engine, PHASES[life], rank, number, seed=life + 1)


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
