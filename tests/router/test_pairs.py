"""Prefill and decode on separate instances behind the router: real processes, and kill -9 of
each kind."""

import os
import signal
from typing import Any

import httpx
import pytest

from tests.e2e.live import Stream
from tests.router.live import LiveCommand, RouterClient

pytestmark = pytest.mark.slow

NAME = "x-headwater-instance"
LONG = "the water of a mountain spring, "


class Pairs(RouterClient):
    """A cluster that one command started: a router, one prefill and two decode instances."""

    def __init__(self):
        flags = ["--threads", "1", "--num-gpu-blocks-override", "96"]
        roles = ["--prefill", "1", "--decode", "2"]
        self.command = LiveCommand("up", *roles, "--no-restart", "--port", "0", "--", *flags)
        self.command.until_printed("stop with")
        lines = [line.split() for line in self.command.lines if " pid " in line]
        self.urls = {words[0]: words[1] for words in lines}
        self.pids = {words[0]: int(words[3]) for words in lines}
        self.url = self.urls["router"]
        self.known()

    def known(self) -> dict[str, Any]:
        """What the router knows, by the names of this cluster."""
        return self.until(
            lambda known: all(entry["trust"] == "exact" for entry in known.values())
        )

    def ask(self, prompt, url=None, **fields):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        answer = httpx.post(f"{url or self.url}/v1/completions", json=body | fields, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    def kill(self, role):
        os.kill(self.pids[role], signal.SIGKILL)
        self.command.until_printed(f"{role} ended with signal 9")


@pytest.fixture(scope="module")
def pairs():
    pairs = Pairs()
    assert set(pairs.pids) == {"router", "prefill-1", "decode-1", "decode-2"}
    yield pairs
    # One Ctrl-C, and nothing is left: neither the processes nor the port.
    assert pairs.command.stop(signal.SIGINT) == 0, pairs.command.lines
    assert not [pid for pid in pairs.pids.values() if os.path.exists(f"/proc/{pid}")]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{pairs.url}/health")


def text(answer):
    return answer.json()["choices"][0]["text"]


def test_a_long_prompt_is_prefilled_apart_and_a_short_rest_is_not(pairs):
    """P and D both publish a long prompt; D serves the short next turn alone."""
    prompt = LONG * 20
    first = pairs.ask(prompt)
    known = pairs.known()
    home = first.headers[NAME]
    other = "decode-2" if home == "decode-1" else "decode-1"

    assert known["prefill-1"]["known_blocks"] >= 9
    assert known[home]["known_blocks"] >= 9
    assert known[other]["known_blocks"] == 0

    again = pairs.ask(prompt + "and so on")
    assert again.headers[NAME] == first.headers[NAME]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 576
    assert pairs.known()["prefill-1"]["recent_tokens"] <= known["prefill-1"]["recent_tokens"]
    alone = pairs.ask(prompt, pairs.urls[other])
    assert text(alone) == text(first)


def test_prompts_spread_over_decode_instances(pairs):
    """Lesson 70: a common prefix does not send everything to one decode instance."""
    homes = [pairs.ask(LONG * 12 + f"question {n}: " * 30).headers[NAME] for n in range(8)]

    assert len(set(homes)) == 2


def test_a_prefill_instance_only_prefills(pairs):
    """A prefill instance refuses direct requests of clients with the reason."""
    answer = httpx.post(
        f"{pairs.urls['prefill-1']}/v1/completions", json={"prompt": "x"}, timeout=30
    )

    assert answer.status_code == 400
    assert "only prefills" in answer.json()["error"]["message"]


def test_a_killed_decode_instance_is_not_noticed(pairs):
    """The stream continues on the other decode instance, handed off by the same prefill
    instance."""
    prompt = "a stream that is handed over, " * 20
    stream = Stream(pairs.url, {"prompt": prompt, "max_tokens": 300})
    pieces = [stream.next() for _ in range(4)]
    busy = [name for name, entry in pairs.known().items() if entry["num_alive"]]

    pairs.kill(next(name for name in busy if name.startswith("decode")))
    pieces += stream.rest()

    stream.close()
    streamed = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert streamed == text(pairs.ask(prompt, max_tokens=300))
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"


def test_a_killed_prefill_instance_is_not_noticed(pairs):
    """The decode instance computes the prompt itself, within a bound; no request waits for the
    dead one."""
    pairs.kill("prefill-1")

    for number in range(2):
        answer = pairs.ask(f"{number}: " + LONG * 15)
        alone = pairs.ask(f"{number}: " + LONG * 15, pairs.urls[answer.headers[NAME]])
        assert text(answer) == text(alone)
