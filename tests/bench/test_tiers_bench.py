"""`headwater bench tiers` prints the documented figures."""

import json
import sys
import threading
from types import SimpleNamespace

import pytest

from headwater.bench._tier_engine import TierRun, _cpu_by_thread, _used_since, thread_ms
from headwater.bench.tiers import _compute
from headwater.cli import main


@pytest.mark.slow
def test_json_has_the_promised_keys(capsys):
    """The command prints one JSON object on standard output with every tier and every
    direction."""
    assert main(["bench", "tiers", "--quick", "--pairs", "1", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    for name in ("all_miss_loss", "all_miss_loss_write_through"):
        assert result[f"{name}_ci95"]["low"] <= result[name] <= result[f"{name}_ci95"]["high"]
    assert result["thread_ms"]["none"]["MainThread"] > 0
    assert result["convoy_ratio"] > 0
    assert set(result["recompute_ttft_ms"]) == {"256", "512"}
    assert {"host", "file"} <= set(result["hit_ttft_ms"])
    for tier in result["hit_ttft_ms"].values():
        assert all(tier[length] > 0 for length in ("256", "512"))
    assert {"memory", "file"} <= set(result["backend_ratio"])
    for ways in result["backend_ratio"].values():
        assert set(ways) == {"write", "read"}
    for ways in result["backend_ratio_turns"].values():
        assert all(low <= middle <= high for low, middle, high in ways.values())
    assert set(result["hung_ttft_ratio"]) == {"control", "memory contains", "memory write"}
    assert set(result["live_pricing_ratio"]["file/256/idle/slow"]) == {"p50", "p95"}
    assert result["hung_lost_slots"] == {"memory contains": 0, "memory write": 0}
    assert result["hung_breakers"]["memory contains"] == "open / closed"
    assert result["hung_breakers"]["memory write"] in ("closed / open", "closed / half_open")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the time of a thread")
def test_processor_time_is_told_by_thread():
    """A thread that computed is named with its time; one that waited all the time is not."""
    go, computed, end = threading.Event(), threading.Event(), threading.Event()

    def compute():
        go.wait()
        sum(range(300_000))
        computed.set()
        end.wait()

    threads = [
        threading.Thread(target=compute, name="busy"),
        threading.Thread(target=end.wait, name="idle"),
    ]
    for thread in threads:
        thread.start()
    while not all(thread.native_id for thread in threads):
        pass
    before = _cpu_by_thread()
    go.set()
    computed.wait()
    used = _used_since(before)
    end.set()
    for thread in threads:
        thread.join()

    assert used["busy"] > 0.001
    assert used.get("idle", 0.0) < 0.001


def test_the_time_of_a_thread_is_the_median_of_all_runs():
    """A thread that a run does not name used no time in it."""
    times: list[dict[str, float]] = [{"a": 0.002}, {"a": 0.004, "b": 0.5}, {}]
    runs = [TierRun(seconds=1.0, first_s=1.0, thread_s=each) for each in times]

    assert thread_ms(runs) == {"a": 2.0, "b": 0.0}


class ScriptedEngine:
    """Serves prompts in given times, and keeps those since the last reset."""

    def __init__(self, seconds: list[float]) -> None:
        self.core = self
        self.kept: list[int] = []
        self._seconds = iter(seconds)

    def reset_cache(self, tiers: tuple[str, ...]) -> None:
        assert set(tiers) == {"device", "host", "storage"}
        self.kept.clear()

    def make_prompt(self, num_tokens: int, seed: int) -> int:
        return seed

    def serve(self, prompts: list[int], max_tokens: int) -> SimpleNamespace:
        assert not self.kept, "an earlier prompt could be found"
        self.kept += prompts
        return SimpleNamespace(first_s=next(self._seconds))

    def drain(self) -> None:
        """Nothing to wait for."""


def test_the_time_to_compute_is_a_median_after_a_first_prompt_that_warms_up():
    """Hits are medians in a warm engine, so the time to compute must be one, too: a single cold
    sample would make hits look better than they are. The last prompt stays cached, so that hits
    can find it."""
    engine = ScriptedEngine([9.0, 3.0, 1.0, 2.0])

    prompt, seconds = _compute(engine, 1024, 3)  # type: ignore[arg-type]

    assert seconds == 2.0
    assert engine.kept == [prompt]
