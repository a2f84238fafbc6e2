"""Flags of `replay` and `plan` for the cost of steps and copies, and the deployment that they
describe."""

from argparse import Namespace, _ArgumentGroup
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import ConfigError

if TYPE_CHECKING:
    from headwater.replay.cost import LinkCost
    from headwater.replay.settings import SimConfig

PRESET_NAMES = (
    "h200-8b",
    "h200-8b-fp8-kv",
    "h200-30b-a3b",
    "h200-deepseek-v2-lite",
    "cpu-100m",
)


def add_machine(group: _ArgumentGroup) -> None:
    """Add the flags for the cost of steps and copies."""
    group.add_argument(
        "--preset",
        choices=PRESET_NAMES,
        default=PRESET_NAMES[0],
        help="a machine and model that were measured (default: %(default)s)",
    )
    group.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="JSON of `headwater bench serve|tiers|gpu`, whose figures replace the preset's",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        default=1,
        help="devices that the model of each instance is split over (default: %(default)s)",
    )
    group.add_argument(
        "--collective-link",
        metavar="GB/S:US",
        default="300:10",
        help="bandwidth of one device in GB/s, and microseconds that one sum over the ranks of "
        "an instance takes (default: %(default)s)",
    )
    group.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        default=64,
        help="tokens in a block (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="maximum number of sequences in a step (default: that of the machine)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens in a step (default: that of the machine)",
    )
    group.add_argument(
        "--max-itl-ms",
        type=float,
        metavar="MS",
        help="target for the time between tokens while prompts are computed, in milliseconds (default: none)",
    )


def sim_config(options: Namespace, **changes: Any) -> "SimConfig":  # noqa: ANN401 -- typed by SimConfig
    """The deployment that the flags describe."""
    from headwater.replay.presets import preset
    from headwater.replay.settings import SimConfig

    machine = preset(options.preset)
    if options.calibrate is not None:
        from headwater.replay.calibrate import calibrated

        machine = calibrated(machine, options.calibrate)
    if options.tensor_parallel_size != 1:
        from headwater.replay.ranks import split_over_ranks

        link = _collective_link(options.collective_link)
        machine = split_over_ranks(machine, options.tensor_parallel_size, link)
    settings: dict[str, Any] = {
        "machine": machine,
        "block_tokens": options.block_size,
        "max_num_seqs": options.max_num_seqs,
        "max_batched_tokens": options.max_num_batched_tokens,
        "max_itl_ms": options.max_itl_ms,
    }
    return SimConfig(**(settings | changes))


def _collective_link(text: str) -> "LinkCost":
    """Parses `300:10`: GB/s of one device, and microseconds of one sum."""
    from headwater.replay.cost import LinkCost

    bandwidth, _, latency = text.partition(":")
    try:
        return LinkCost(bytes_s=float(bandwidth) * 1e9, latency_s=float(latency or 0) * 1e-6)
    except ValueError as exc:
        raise ConfigError(
            f"--collective-link must be GB/s and microseconds, such as 300:10; got {text!r}"
        ) from exc
