"""The engine process: `python -m headwater.launch.engine ADDRESS`, started by the server."""

import logging
import sys

import msgspec

from headwater.config import EngineConfig
from headwater.engine.client import EngineInfo
from headwater.engine.collector import settle_collector
from headwater.engine.core import EngineCore
from headwater.engine.process import run_engine
from headwater.launch.core import build_core


def main(address: str) -> int:
    """Serve the process at the other end of `address`; the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    return run_engine(_build, address)


def _build(settings: bytes) -> tuple[EngineCore, EngineInfo]:
    built = build_core(msgspec.json.decode(settings, type=EngineConfig))
    settle_collector()
    return built


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
