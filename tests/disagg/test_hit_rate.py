"""Lesson 48: a pair of instances finds as much of its prompts as one mixed instance."""

import random

import pytest

from headwater.clock import VirtualClock
from headwater.disagg.protocol.config import HandoffConfig
from headwater.scheduler.request import Request
from headwater.storage.base import StorageBackend
from headwater.testing.fabric import HeldFabric
from headwater.testing.peers import EchoPair, EchoPeer
from headwater.testing.tiers import make_echo_request, uncached_tokens
from tests.disagg.requests import make_handoff, make_prompt, make_storage

SYSTEM = make_prompt(24, family=5)


def conversations(seed: int) -> list[Request]:
    """Turns of ten conversations with one system prompt, in the order they arrive."""
    chance = random.Random(seed)
    history: dict[int, list[int]] = {}
    requests = []
    for number in range(60):
        who = chance.randrange(10)
        tokens = history.get(who, SYSTEM + [who] * 4)[:300]
        tokens = tokens + [chance.randrange(50) for _ in range(chance.randrange(1, 20))]
        request = make_echo_request(f"r{number}", tokens, max_tokens=chance.randrange(8, 30))
        history[who] = tokens + uncached_tokens(request)
        requests.append(request)
    return requests


def mixed_hits(requests: list[Request], *, num_blocks: int, output_caching: bool) -> int:
    """Prompt tokens that one instance serves from its cache."""
    peer = EchoPeer(
        fabric=HeldFabric(),
        clock=VirtualClock(),
        name="m",
        num_blocks=num_blocks,
        settings={"output_caching": output_caching},
    )
    for request in requests:
        peer.add(request)
        while request.request_id not in peer.reasons:
            peer.step()
    return sum(usage.cached_tokens for usage in peer.usages.values())


def split_hits(
    requests: list[Request],
    *,
    num_blocks: int,
    config: HandoffConfig,
    storage: StorageBackend | None = None,
) -> int:
    """Prompt tokens that a pair finds. Its prefill instance is as large as the mixed
    instance."""
    pair = EchoPair(
        p_num_blocks=num_blocks,
        d_num_blocks=2000,
        host_blocks=2000 if storage else 0,
        storage=storage,
        config=config,
        settings={"load_policy": "wait"},
    )
    for request in requests:
        handoff = make_handoff(
            request.request_id, request.tokens.tolist(), max_tokens=request.params.max_tokens
        )
        pair.decode.add(handoff)
        pair.run(request.request_id)
        if storage is not None:
            pair.drain(within_s=1.0, step_s=0.1)  # everything is written
    for request in requests:
        assert pair.decode.outputs[request.request_id] == uncached_tokens(request)
    return sum(usage.cached_tokens for usage in pair.decode.usages.values())


@pytest.mark.parametrize("seed", [1, 2])
def test_without_pull_hits_on_computed_prompts_are_those_of_a_mixed_instance(seed):
    """P finds everything that it computed, as a mixed instance that does not cache output does."""
    requests = conversations(seed)
    alone = HandoffConfig(pull_min_blocks=10_000)

    mixed = mixed_hits(requests, num_blocks=2000, output_caching=False)
    assert mixed > 0
    assert split_hits(requests, num_blocks=2000, config=alone) == mixed


@pytest.mark.parametrize("seed", [1, 2])
def test_under_pressure_p_finds_at_least_as_much_as_a_mixed_instance(seed):
    """P's cache holds prompts only: decoding takes no room in it."""
    requests = conversations(seed)
    alone = HandoffConfig(pull_min_blocks=10_000)

    mixed = mixed_hits(requests, num_blocks=200, output_caching=False)
    assert split_hits(requests, num_blocks=200, config=alone) >= mixed


@pytest.mark.parametrize("seed", [1, 2])
def test_with_pull_all_hits_are_those_of_a_mixed_instance(seed):
    """Hits are equal within one percent: before P computes, it reads from D what D
    generated."""
    requests = conversations(seed)
    pulling = HandoffConfig(pull_min_blocks=1)

    mixed = mixed_hits(requests, num_blocks=2000, output_caching=True)
    split = split_hits(requests, num_blocks=2000, config=pulling)
    assert split == pytest.approx(mixed, rel=0.01)


@pytest.mark.parametrize("seed", [1, 2])
def test_with_shared_storage_all_hits_are_those_of_a_mixed_instance(seed):
    """Hits are equal within one percent: P finds in storage what D generated, without asking
    D."""
    requests = conversations(seed)
    alone = HandoffConfig(pull_min_blocks=10_000)

    mixed = mixed_hits(requests, num_blocks=2000, output_caching=True)
    split = split_hits(requests, num_blocks=2000, config=alone, storage=make_storage())
    assert split == pytest.approx(mixed, rel=0.01)
