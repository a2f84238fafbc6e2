"""Sessions of several turns through a device that holds a quarter of them, and a host tier.

The number of busy clients is constant: when one ends, the next begins. `possible` is what each
turn could find without evictions: everything before its new tokens, in full blocks. All rounds
run on one engine, so the host tier is full from the second round on.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.bench._tier_engine import TierEngine
from headwater.transfer.slab import slot_bytes
from headwater.types import Tokens

if TYPE_CHECKING:
    from headwater.device.model import LoadedModel

_SESSIONS, _TURNS, _CLIENTS = 64, 4, 16
_FIRST, _ADDED, _OUTPUT = 250, 32, 4
_BLOCK_TOKENS = 16
_DEVICE_BLOCKS, _HOST_BLOCKS = 400, 1600
"""Room for about 20 sessions on the device and 80 on the host; there are 64, which grow from 16
to 22 blocks. Blocks are small so that the built-in model computes few tokens per block."""


def measure_sessions(
    model: "LoadedModel",
    folder: str,
    *,
    eviction: str,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """`sessions_found`: cached tokens over possible ones, by round and turn."""
    block_bytes = slot_bytes(model.token_bytes * _BLOCK_TOKENS)
    engine = TierEngine(
        model,
        model=folder,
        num_blocks_override=_DEVICE_BLOCKS,
        swap_space_gib=_HOST_BLOCKS * block_bytes / (1 << 30),
        num_threads=1,
        block_tokens=_BLOCK_TOKENS,
        eviction=eviction,
    )
    found = []
    for number in range(rounds):
        found.append(_serve_round(engine, seed=1000 * number))
        say(f"sessions: round {number + 1} of {rounds}: {found[-1]}")
    stats = engine.core.stats()
    engine.close()
    return {
        "sessions_found": found,
        "sessions_found_least": min(min(turns) for turns in found),
        "sessions_lost_blocks": stats.lost_blocks,
    }


def _serve_round(engine: TierEngine, *, seed: int) -> list[float]:
    """Serve all turns of all sessions. Returns, for each turn from the second on, the share of
    the possible tokens that was found."""
    prompts = [engine.make_prompt(_FIRST, seed=seed + n) for n in range(_SESSIONS)]
    rng = np.random.default_rng(seed)
    shares = []
    for turn in range(_TURNS):
        order = rng.permutation(_SESSIONS).tolist()
        before = [len(prompt) for prompt in prompts]
        cached, answers = engine.serve_in_turn(
            [prompts[n] for n in order], clients=_CLIENTS, max_tokens=_OUTPUT
        )
        if turn:
            known = sum(_whole(length - _ADDED) for length in before)
            shares.append(sum(cached) / known)
        for n, answer in zip(order, answers, strict=True):
            added = engine.make_prompt(_ADDED, seed=seed + 500 + 100 * turn + n)
            prompts[n] = _joined(prompts[n], answer, added)
    return shares


def _whole(num_tokens: int) -> int:
    """How many of these tokens are in full blocks. The last sampled token has no KV yet."""
    return (num_tokens - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS


def _joined(*parts: Tokens) -> Tokens:
    return np.concatenate(parts).astype(np.int32)
