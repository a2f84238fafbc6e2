"""Settings of every property search; see `tests/search.py` for how long they are."""

import signal

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.search import SCALE

settings.register_profile(
    "headwater",
    deadline=None,
    derandomize=SCALE == 1,
    print_blob=True,
    # No explain phase: it traces every line, and a shrunk example explains enough.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("headwater")

# A shell starts its background jobs with Ctrl-C ignored, and all that they start inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what takes minutes, unless `-m` asks for it as scripts/nightly does."""
    if "nightly" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="takes minutes; scripts/nightly runs it")
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(skip)
