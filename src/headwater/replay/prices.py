"""The price of a deployment, in the unit of the given prices."""

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.errors import ConfigError
from headwater.replay.cost import GIB
from headwater.replay.settings import SimConfig

_PRICED = ("instance", "device", "host", "storage")

DEFAULT_PRICES = {"instance": 500.0, "device": 12.0, "host": 3.0, "storage": 0.1}
"""Example prices per month: a server, and a GiB of accelerator memory, host memory and disk.
They only put deployments in order. Give your own."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Price of an instance, and of a GiB of each tier."""

    by_name: Mapping[str, float]

    def of(self, config: SimConfig) -> float:
        """The price of `config`: the tiers of every instance, and storage once."""
        cache, count = config.cache(), config.num_instances
        gib = config.block_bytes / GIB
        return (
            self.by_name["instance"] * count
            + self.by_name["device"] * cache.device_blocks * gib * count
            + self.by_name["host"] * cache.host_blocks * gib * count
            + self.by_name["storage"] * config.storage_blocks * gib
        )


def parse_prices(terms: list[str]) -> Prices:
    """Parses `host=3`, `storage=0.1,instance=1800` …; missing prices are the defaults. Raises
    ConfigError."""
    prices = dict(DEFAULT_PRICES)
    for term in (part for text in terms for part in text.split(",") if part):
        name, _, number = term.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in _PRICED or not 0 <= value < float("inf"):
            raise ConfigError(
                f"--price {term!r} is not NAME=NUMBER; write for example host=3,storage=0.1. Names are "
                f"{', '.join(_PRICED)}: the price of an instance, and of a GiB of each tier"
            )
        prices[name] = value
    return Prices(prices)
