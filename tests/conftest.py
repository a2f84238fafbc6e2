"""Settings of every property search; `tests/search.py` has their lengths."""

import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.search import SCALE

settings.register_profile(
    "headwater",
    deadline=None,
    derandomize=SCALE == 1,
    print_blob=True,
    # No explain phase: it traces every line, and a shrunk example is enough.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("headwater")

# A shell starts background jobs with Ctrl-C ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _restore_log_levels() -> Iterator[None]:
    """Benchmarks that run in this process change the levels of loggers; the next test must not
    depend on that."""
    before = {logger: logger.level for logger in _own_loggers()}
    yield
    for logger in _own_loggers():
        logger.setLevel(before.get(logger, logging.NOTSET))


def _own_loggers() -> list[logging.Logger]:
    loggers = logging.root.manager.loggerDict
    return [
        logger
        for name, logger in loggers.items()
        if name.startswith("headwater") and isinstance(logger, logging.Logger)
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip long tests, unless `-m` selects them as scripts/nightly does."""
    if "nightly" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="takes minutes; scripts/nightly runs it")
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(skip)
