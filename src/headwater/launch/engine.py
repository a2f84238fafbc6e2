"""The engine process: `python -m headwater.launch.engine text|json ADDRESS`, started by the
supervisor."""

import os
import sys
from typing import cast

import msgspec

from headwater.config import EngineConfig
from headwater.engine.client import EngineInfo
from headwater.engine.collector import settle_collector
from headwater.engine.core import EngineCore
from headwater.engine.process import run_engine
from headwater.engine.wire import EngineStart
from headwater.launch.core import build_core
from headwater.launch.kept_host import KeptHost
from headwater.launch.ranks import LOG_FORMAT_VARIABLE
from headwater.metrics.logs import LogFormat, set_up_logs


def main(log_format: LogFormat, address: str) -> int:
    """Run the engine process for the supervisor at the other end of `address`; return the exit
    code."""
    set_up_logs(log_format, speaker="engine")
    os.environ[LOG_FORMAT_VARIABLE] = log_format
    return run_engine(_build, address)


def _build(start: EngineStart) -> tuple[EngineCore, EngineInfo]:
    kept = None if start.host_memory is None else KeptHost(*start.host_memory)
    config = msgspec.json.decode(start.settings, type=EngineConfig)
    built = build_core(config, kept=kept)
    settle_collector()
    return built


if __name__ == "__main__":
    exit_code = main(cast(LogFormat, sys.argv[1]), sys.argv[2])
    if exit_code:
        # The last message has been sent. An orderly end of the interpreter could abort the
        # process, because threads of collectives wait for a lost rank.
        sys.stderr.flush()
        os._exit(exit_code)
