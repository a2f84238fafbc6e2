"""`headwater bench soak`: host and storage tiers under random faults, for as long as asked.

Round after round, a small engine without a model serves a random workload while copies fail,
storage calls return late or only after every request has ended, stored blocks are damaged,
requests are aborted and the cache is reset. After each round, every invariant must hold, and
every token must be that of an uncached run. With `--model tiny` the engine has the built-in
model, and real threads that fail.

Heap, resident and mapped memory are sampled after the rounds; the report has their slopes over the
second half of the time, which are zero within noise when nothing leaks.
"""

import logging
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headwater.bench._flags import read_flags
from headwater.bench._memory import MemorySamples
from headwater.bench._report import print_report
from headwater.bench._soak_round import EchoRound
from headwater.clock import SystemClock
from headwater.errors import HeadwaterError

_QUICK_MINUTES = 0.05


class SoakRound(Protocol):
    """A round of a soak."""

    def run(self) -> Counter[str]:
        """Serve, disturb, check the invariants; return what happened. Raises InvariantError if
        one is violated."""

    def close(self) -> None:
        """Release its engine and storage."""


MakeRound = Callable[[int, Path | None], SoakRound]
"""Makes the round of a seed. The round stores blocks in the folder, or in memory if that is
None."""

_FILE_EVERY = 4
"""One round in this many stores in a directory, the others in memory."""


def main(argv: Sequence[str]) -> int:
    """Run the soak and print the counts; return 1 if a round failed."""
    options = read_flags(_parser(), argv)
    minutes = _QUICK_MINUTES if options.quick else options.minutes
    logging.getLogger("headwater.transfer").setLevel(
        logging.CRITICAL
    )  # its faults cause warnings
    clock = SystemClock()
    began_s = clock.now()
    end_s = began_s + 60 * minutes
    memory = MemorySamples()
    counts: Counter[str] = Counter()
    seed = options.seed
    make = _round_maker(options.model)
    while not counts["rounds"] or clock.now() < end_s:
        counts += run_round(seed, make)
        counts["rounds"] += 1
        memory.add(clock.now() - began_s)
        if counts["wrong tokens"]:
            print(f"wrong tokens with --seed {seed}", file=sys.stderr)
            break
        seed += 1
    result: dict[str, Any] = {
        "rounds": counts.pop("rounds"),
        "wrong_tokens": counts.pop("wrong tokens", 0),
    }
    result |= {name.replace(" ", "_"): counts[name] for name in sorted(counts)}
    result["memory"] = memory.report()
    if options.json:
        result["memory"]["samples"] = memory.series()
    print_report("headwater bench soak", result, as_json=options.json)
    return 1 if result["wrong_tokens"] else 0


def run_round(seed: int, make: MakeRound = EchoRound) -> Counter[str]:
    """Run one round and return counts of what happened."""
    with tempfile.TemporaryDirectory(prefix="headwater-soak-") as folder:
        soak_round = make(seed, Path(folder) if seed % _FILE_EVERY == 0 else None)
        try:
            return soak_round.run()
        except (AssertionError, HeadwaterError):
            print(f"an invariant is violated with --seed {seed}", file=sys.stderr)
            raise
        finally:
            soak_round.close()


def _round_maker(model: str) -> MakeRound:
    """Returns the factory of rounds: for an echo engine, or for the built-in model."""
    if model == "echo":
        return EchoRound
    # Imports torch, which the other soak does not need.
    from headwater.bench._soak_model import ModelRound, RightTokens
    from headwater.device import builtin

    return partial(ModelRound, right=RightTokens(builtin.ensure()))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="headwater bench soak", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--model",
        choices=("echo", "tiny"),
        default="echo",
        help="engine without a model, or with the built-in model (echo)",
    )
    add("--minutes", type=float, default=10.0, help="duration (10)")
    add(
        "--seed",
        type=int,
        default=1,
        help="seed of the first round; each next round adds 1 (1)",
    )
    add("--quick", action="store_true", help="run for three seconds")
    add("--json", action="store_true", help="print one JSON object")
    return parser
