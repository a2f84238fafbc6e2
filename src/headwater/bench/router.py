"""`headwater bench router`: hits of each routing policy, compared with one pool of the same
size.

The policy `cache_aware` also runs on several routers side by side, which share the requests at
random."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from headwater.bench._flags import read_flags
from headwater.bench._report import print_report
from headwater.bench._routed_caches import measure_router


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table, or JSON."""
    parser = ArgumentParser(prog="headwater bench router", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, help="trace in the Mooncake format (default: synthetic)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="use the first 2,000 requests only"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--routers",
        type=int,
        default=2,
        metavar="N",
        help="routers that share the requests (default: 2)",
    )
    options = read_flags(parser, argv)
    result = measure_router(options.trace, options.quick, options.routers)
    print_report("headwater bench router", result, as_json=options.json)
    return 0
