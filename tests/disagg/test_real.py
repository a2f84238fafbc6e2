"""The tiny model on two instances: real connections, real links, the same tokens."""

import random
from dataclasses import replace
from typing import Any

import pytest

from headwater.errors import ConfigError
from headwater.launch import peers
from tests.disagg.real import BLOCK_TOKENS, TOKEN, RealPair, make_real_request

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def token(monkeypatch):
    """The peer token, which both instances share."""
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize("link", ["tcp", "shm", "mooncake"])
def test_disaggregated_equals_local_on_the_tiny_model(link, staged, monkeypatch):
    """Random conversations run several at a time; D alone computes the same without a cache.
    This holds also with staging buffers, as on a GPU."""
    if link == "mooncake":
        pytest.importorskip("mooncake")
    if staged:
        monkeypatch.setattr(peers, "_in_place", peers._staged)
    with RealPair(link) as pair, RealPair(link, prefix_caching=False) as plain:
        pair.converse(plain, random.Random(link))
        handoffs = pair.decode.stats().handoffs["decode"]

    assert handoffs.done == 9
    assert not handoffs.failures
    assert not handoffs.refusals
    parts = {"start", "queue", "ask", "compute", "push", "first_token"}
    assert set(handoffs.seconds) == parts


def test_greedy_penalties_and_logprobs_survive_the_hand_off():
    """Everything that decides the first token is sent with the request."""
    prompt = [7, 7, 9, 200, 13] * 9
    params: dict[str, Any] = {
        "temperature": 0.0,
        "repetition_penalty": 1.4,
        "logit_bias": {7: 5.0},
        "logprobs": 2,
        "min_tokens": 3,
    }
    with RealPair() as pair:
        there = pair.serve(make_real_request("there", prompt, **params))
        here = pair.serve(make_real_request("here", prompt[:], **params), handed_off=False)

    assert there == here


@pytest.mark.parametrize("handed_off", [True, False])
def test_a_resumed_response_keeps_its_penalties(handed_off):
    """Resumed tokens count as output wherever the prompt is computed: the continuation is the
    one that an undisturbed request gets, and differs if they count as prompt."""
    prompt, most = [7, 7, 9, 200, 13] * 9, 40
    params: dict[str, Any] = {
        "temperature": 0.8,
        "presence_penalty": 1.1,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.2,
        "min_tokens": 30,
        "max_tokens": most,
    }
    with RealPair() as pair:
        (whole,) = pair.serve(make_real_request("whole", prompt, **params), handed_off=False)
        requests = [
            replace(
                make_real_request(f"after {cut}", prompt + whole[:cut], **params),
                num_resumed_tokens=cut,
            )
            for cut in (1, 16, 35)
        ]
        rests = pair.serve(*requests, handed_off=handed_off)
        forgotten = make_real_request(
            "as prompt",
            prompt + whole[:16],
            **params | {"max_tokens": most - 16, "min_tokens": 0},
        )
        (other,) = pair.serve(forgotten, handed_off=False)

    assert rests == [whole[cut:] for cut in (1, 16, 35)]
    assert other != whole[16:]


def test_the_second_turn_moves_only_what_is_new():
    """Lesson 55: bytes are counted: D has the first turn and its answer already."""
    with RealPair() as pair:
        prompt = [(at * 37) % 256 for at in range(10 * BLOCK_TOKENS)]
        (answer,) = pair.serve(make_real_request("a", prompt, max_tokens=2 * BLOCK_TOKENS + 1))
        first = pair.decode.stats().handoffs["decode"].num_bytes
        turn = prompt + answer + [5] * (BLOCK_TOKENS - 1)
        pair.serve(make_real_request("b", turn))
        both = pair.decode.stats().handoffs["decode"].num_bytes
        pair.settle()
        sent = pair.prefill.stats().handoffs["prefill"].num_bytes

    assert (both - first) * 10 == first  # one block of the thirteen; the first turn had ten
    assert sent == both


def num_stored(pair):
    """Blocks that D has written to its storage."""
    link = pair.decode.stats().links.get("host_to_storage")
    return 0 if link is None else link.num_blocks


@pytest.mark.parametrize("tier", ["host", "storage"])
def test_blocks_that_d_has_below_its_device_are_not_sent(tier, tmp_path):
    """Lesson 55: D matches all its tiers, loads what is below the device, and asks for the
    rest."""
    tiers: dict[str, object] = {
        "swap_space_gib": 0.02,
        "write_policy": "write_through",
        "load_policy": "wait",
        "storage_backend": "file",
        "storage_config": {"path": str(tmp_path)},
    }
    prompt = [(at * 31) % 256 for at in range(10 * BLOCK_TOKENS)]
    request = make_real_request("there", prompt + [5] * 40)
    above = {"host": ("device",), "storage": ("device", "host")}[tier]
    with RealPair(tiers=tiers) as pair, RealPair(prefix_caching=False) as plain:
        pair.serve(make_real_request("warm", prompt, max_tokens=1), handed_off=False)
        pair.until(lambda: num_stored(pair) == 10)
        pair.decode.reset_cache(above)
        found = dict(pair.decode.stats().found_tokens)
        tokens = pair.serve(request)
        stats = pair.decode.stats()
        alone = plain.serve(request, handed_off=False)
        pair.settle()
        block_bytes = pair.block_bytes

    handoffs = stats.handoffs["decode"]
    assert tokens == alone
    assert handoffs.done == 1
    assert handoffs.num_bytes == 3 * block_bytes  # of thirteen blocks, the last half full
    assert stats.found_tokens[tier] - found.get(tier, 0) == 10 * BLOCK_TOKENS


def test_a_role_needs_a_token(monkeypatch):
    """No instance accepts peers without one."""
    monkeypatch.delenv("HEADWATER_PEER_TOKEN")

    with pytest.raises(ConfigError, match="HEADWATER_PEER_TOKEN"):
        RealPair()
