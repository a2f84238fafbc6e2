"""An engine process with a bug: its first step frees a slot twice.

python -m tests.engine.careless ADDRESS
"""

import sys

from headwater.cache import CacheConfig, TieredCache
from headwater.clock import SystemClock
from headwater.engine.client import EngineInfo
from headwater.engine.core import EngineCore
from headwater.engine.process import run_engine
from headwater.engine.wire import EngineStart
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.results import StepOutputs
from headwater.scheduler.scheduler import Scheduler
from headwater.testing.engines import make_echo_info
from headwater.testing.runners import EchoRunner

NUM_BLOCKS, BLOCK_TOKENS = 64, 16


class CarelessCore(EngineCore):
    """Frees slots that are not its own any more."""

    def step(self) -> StepOutputs:
        slots = self._cache.take(1, now=0.0)
        assert slots is not None, "the pool is empty"
        self._cache.free(slots)
        self._cache.free(slots)
        return super().step()


def build(start: EngineStart) -> tuple[EngineCore, EngineInfo]:
    cache = TieredCache(CacheConfig(device_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS))
    scheduler = Scheduler(SchedulerConfig(max_model_len=512), cache)
    runner = EchoRunner(num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS)
    return CarelessCore(scheduler, runner, SystemClock()), make_echo_info()


if __name__ == "__main__":
    sys.exit(run_engine(build, sys.argv[1]))
