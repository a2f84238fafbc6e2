"""`headwater bench pd`: prefill and decode on separate instances, compared with mixed
instances.

pd_over_mixed           one prefill and one decode instance over two mixed instances, on the same
                        two cores, with every prompt handed off: time to first token, tokens per
                        second, and the mean of the slowest hundredth of times between tokens
routed_over_mixed       the same, with only those prompts handed off that a router would hand off
handoff_ms              the time of a hand-off, by phase
second_turn_byte_share  bytes that a second turn transfers, as a share of its whole prompt
pd_hits                 the share of prompt tokens that a pair finds on a trace, and that of a
                        mixed instance as large as its prefill instance
link_ratio              the speed of each link over the simplest use of its medium
router, pool_block_hit  the blocks that each routing policy finds on a trace
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.bench._flags import read_flags
from headwater.bench._link_speed import measure_links
from headwater.bench._pd_hits import measure_hits
from headwater.bench._pd_processes import PDLoad, measure_pd
from headwater.bench._report import print_report
from headwater.bench._routed_caches import measure_router

_PARTS = ("engine", "hits", "links", "router")


def main(argv: Sequence[str]) -> int:
    """Run the chosen parts and print a table or JSON."""
    parser = ArgumentParser(
        prog="headwater bench pd",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=_PARTS,
        default=list(_PARTS),
        help="parts to measure (all)",
    )
    parser.add_argument(
        "--link",
        choices=("shm", "tcp", "mooncake"),
        default="shm",
        help="link of the hand-offs (shm)",
    )
    parser.add_argument(
        "--trace", type=Path, help="trace in the Mooncake format (default: synthetic)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="use few requests; ends within 40 s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = read_flags(parser, argv)
    result: dict[str, Any] = {}
    if "engine" in options.parts:
        _say("engine: one prefill and one decode instance, and two mixed ones")
        load = PDLoad(num_clients=8, num_rounds=4, prompt_tokens=1000, output_tokens=64)
        if options.quick:
            load = PDLoad(num_clients=2, num_rounds=1, prompt_tokens=300, output_tokens=16)
        result |= measure_pd(load, options.link, rounds=1 if options.quick else 5)
    if "hits" in options.parts:
        _say("hits: a pair and a mixed instance on a trace, scaled down")
        result |= measure_hits(options.trace, options.quick)
    if "links" in options.parts:
        _say("links: each beside its bare medium")
        result["link_ratio"] = measure_links(options.quick)
    if "router" in options.parts:
        _say("router: policies on a trace")
        result |= measure_router(options.trace, options.quick)
    print_report("headwater bench pd", result, as_json=options.json)
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
