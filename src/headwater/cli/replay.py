"""`headwater replay`: what a cache would have found in a recorded trace."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter, _SubParsersAction
from pathlib import Path

from headwater.config import EVICTIONS
from headwater.errors import ConfigError

_ABOUT = """\
Send the requests of a trace (JSON lines in the Mooncake format) through the cache alone, one
after the other: every hash id is one whole block of 512 tokens, and no output is appended.

  headwater replay trace.jsonl --cache-only --capacity-blocks 10000 --eviction session
"""


def add_replay(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = commands.add_parser(
        "replay",
        usage="headwater replay TRACE --cache-only [flags]",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="trace file")
    parser.add_argument(
        "--cache-only", action="store_true", help="the cache alone: no time, no engine"
    )
    parser.add_argument(
        "--capacity-blocks",
        type=int,
        metavar="N",
        help="blocks that the cache holds (default: as many as there are)",
    )
    parser.add_argument(
        "--eviction",
        choices=(*EVICTIONS, "opt"),
        default="lru",
        help="which blocks go first; opt knows the future (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(flags=flags)


def run_replay(options: Namespace) -> int:
    """Replay and print; the exit code."""
    from headwater.replay.cache_only import replay_cache, replay_optimum
    from headwater.replay.trace import read_trace

    if not options.cache_only:
        raise ConfigError("replay with an engine is not in this release; try --cache-only")
    requests = read_trace(options.trace)
    start = time.perf_counter()
    if options.eviction == "opt":
        replayed = replay_optimum(requests, options.capacity_blocks)
    else:
        replayed = replay_cache(requests, options.capacity_blocks, eviction=options.eviction)
    result = {
        "requests": replayed.requests,
        "block_hit": replayed.block_hit,
        "token_hit": replayed.token_hit,
        "misses_by_reason": replayed.misses_by_reason,
        "wall_s": time.perf_counter() - start,
    }
    sys.stdout.write(json.dumps(result) + "\n" if options.json else _table(result))
    return 0


def _table(result: dict[str, object]) -> str:
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            lines += [f"  {name} {reason:<22} {count:>10,}" for reason, count in value.items()]
        elif isinstance(value, float):
            lines.append(f"  {name:<39} {value:>10.4f}")
        else:
            lines.append(f"  {name:<39} {value:>10,}")
    return "\n".join(["headwater replay --cache-only", *lines, ""])
