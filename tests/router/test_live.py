"""Real processes: a router, instances with a real model, real clients, and kill -9."""

import http.client
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headwater.device.builtin import make_llama
from tests.e2e.live import LiveServer, Stream
from tests.router.live import TOKEN, LiveCommand, LiveRouter

pytestmark = pytest.mark.slow

NAME = "x-headwater-instance"


def start(router, *flags, model=None):
    place = ("--router", router.url, "--peer-token", TOKEN)
    model_flags = () if model is None else (model,)
    return LiveServer(*model_flags, *place, "--max-model-len", "4096", *flags, blocks=96)


def name(server):
    return server.url.removeprefix("http://")


def kill(server):
    """Kill both processes of an instance."""
    os.kill(server.engine_pid, signal.SIGKILL)
    server.process.kill()
    server.wait()


def broken_stream(router, servers, fields, *, after):
    """A stream whose instance is killed after some events: its name, and all events."""
    home = router.post(prompt=fields["prompt"]).headers[NAME]
    victim = next(server for server in servers if name(server) == home)
    stream = Stream(router.url, fields)
    pieces = [stream.next() for _ in range(after)]
    kill(victim)
    pieces += stream.rest()
    stream.close()
    return home, pieces


class Load:
    """Clients that send requests through a router until they are stopped."""

    def __init__(self, router, num_clients=2):
        self.router = router
        self.failures: list[str] = []
        self.served: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(number,)) for number in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self, number):
        turn = 0
        while not self._stop.is_set():
            turn += 1
            prompt = f"client {number} asks again, " * (5 + turn % 7)
            try:
                answer = self.router.post(prompt=prompt, max_tokens=8, stream=turn % 2 == 0)
            except httpx.HTTPError as exc:
                self.failures.append(repr(exc))
                continue
            if answer.status_code != 200 or '"error"' in answer.text:
                self.failures.append(answer.text)
            self.served.append(answer.headers[NAME])
            self._stop.wait(0.05)

    def until_served(self, instance, within_s=60.0):
        """Wait until `instance` has answered a request that was sent from now on."""
        self.served.clear()
        deadline = time.monotonic() + within_s
        while instance not in self.served:
            assert time.monotonic() < deadline, self.served
            time.sleep(0.05)

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def second():
    """Another router, which all instances use."""
    router = LiveRouter()
    yield router
    if router.process.poll() is None:
        assert router.stop() == 0


@pytest.fixture(scope="module")
def cluster(second):
    router = LiveRouter()
    servers = [start(router, "--router", second.url) for _ in range(2)]
    for server in servers:
        server.wait_ready()
    router.until_exact(*servers)
    yield [router, *servers]
    for server in servers:
        if server.process.poll() is None:
            assert server.stop() == 0, server.errors


def test_the_openai_client_does_not_notice(cluster):
    """Chat, streams and models work through the router as without it."""
    router = cluster[0]
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "Where does the water come from? " * 20}]
    model = client.models.list().data[0].id

    def ask(**options):
        return client.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=16, temperature=0, **options
        )

    first, second = ask(), ask()
    pieces: Any = client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, temperature=0, stream=True
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)

    assert first.headers[NAME] == second.headers[NAME]
    answer = second.parse()
    assert answer.usage.prompt_tokens_details.cached_tokens > 128
    assert text == answer.choices[0].message.content == first.parse().choices[0].message.content
    client.close()


def test_conversations_spread_and_stay(cluster):
    """Lessons 70 and 72: new conversations go to both instances and return to their own."""
    router = cluster[0]
    prompts = [f"conversation number {n}, " * 30 for n in range(6)]

    homes = [router.post(prompt=prompt).headers[NAME] for prompt in prompts]
    again = [router.post(prompt=prompt + "and on").headers[NAME] for prompt in prompts]

    assert set(homes) == {name(server) for server in cluster[1:]}
    assert again == homes


def test_a_killed_router_comes_back_knowing_everything(cluster):
    """Lesson 71: instances register again by themselves, and their caches are replayed.
    Requests of clients of the dead router have ended. The router of this test has the model's
    tokenizer."""
    router = cluster[0]
    stream = Stream(router.url, {"max_tokens": 3000})
    stream.next()

    router.process.kill()
    router.process.wait()
    stream.close()
    cached = {name(server): server.until_idle()["tiers"]["device"] for server in cluster[1:]}
    folder = cluster[1].get("/server_info").json()["engine"]["model_dir"]
    cluster[0] = router = LiveRouter("--model", folder, port=router.port)
    router.until_exact(*cluster[1:])

    known = {n: entry["known_blocks"] for n, entry in router.instances().items()}
    assert known == {n: device["cached"] for n, device in cached.items()}
    assert all(device["held"] == 0 for device in cached.values())
    home = router.post().headers[NAME]
    assert router.post().json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 128
    assert router.post().headers[NAME] == home


def test_an_instance_killed_while_idle_is_not_noticed(cluster):
    """The request goes to another instance. A restart at the same address is another instance,
    and nothing is kept of the earlier view (lesson 71)."""
    router, *servers = cluster
    home = router.post().headers[NAME]
    victim = next(server for server in servers if name(server) == home)
    epoch = router.instances()[home]["epoch"]

    kill(victim)
    answer = router.post()

    assert answer.status_code == 200
    assert answer.headers[NAME] != home
    again = start(router, "--port", home.rpartition(":")[2]).wait_ready()
    cluster[1 + servers.index(victim)] = again
    # The earlier view counts as exact until the new instance has registered.
    known = router.until(lambda known: known.get(home, {}).get("epoch", epoch) != epoch)
    assert known[home]["known_blocks"] == 0
    router.until_exact(again)


def test_instances_are_upgraded_one_after_the_other_under_load(cluster, second, tmp_path):
    """In a rolling upgrade to other weights no request fails, new ones move with the instances,
    and a stream that began on old weights ends on them. The new instances use a second
    router."""
    router, *servers = cluster
    weights = str(make_llama(tmp_path / "step-200", seed=1))
    flags = ["--served-model-name", router.instances()[name(servers[0])]["model"]]
    flags += ["--router", second.url]
    fields = {"prompt": "a stream across the upgrade, " * 9, "max_tokens": 400}
    fields |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    home = router.post(prompt=fields["prompt"]).headers[NAME]
    servers.sort(key=lambda server: name(server) != home)
    expected = servers[0].complete(**fields).json()["choices"][0]["token_ids"]
    upgraded, pieces, load = [], [], Load(router)
    for old in servers:
        new = start(router, *flags, model=weights).wait_ready()
        upgraded.append(new)
        load.until_served(name(new))
        if old is servers[0]:
            stream = Stream(router.url, fields)
            assert stream.header(NAME) == home
            pieces.append(stream.next())
        old.process.send_signal(signal.SIGTERM)
        assert old.wait() == 0, old.errors
    load.until_served(name(upgraded[0]))
    load.stop()
    pieces += stream.rest()
    stream.close()
    cluster[1:] = upgraded

    assert load.failures == []
    assert [t for piece in pieces for t in piece["choices"][0]["token_ids"]] == expected
    after = router.post(**fields | {"max_tokens": 40}).json()["choices"][0]["token_ids"]
    assert after != expected[:40]
    text = httpx.get(f"{router.url}/metrics").text
    assert len(re.findall(r"^headwater:router_prompt_tokens_total\{", text, re.M)) == 2


def test_a_router_can_be_killed_and_clients_go_on_at_the_other(cluster, second):
    """One of two routers gets kill -9 in the middle of a stream; the same request is answered
    by the other one, from the cache that both know."""
    router, *servers = cluster
    for entry in (router, second):
        entry.until_exact(*servers)
    fields = {"prompt": "asked at two routers, " * 20, "max_tokens": 300}
    fields |= {"return_token_ids": True}
    stream = Stream(second.url, fields)
    home, first = stream.header(NAME), stream.next()

    second.process.kill()
    second.process.wait()
    with pytest.raises((OSError, http.client.HTTPException)):
        stream.rest()
    stream.close()
    again = Stream(router.url, fields)

    assert again.header(NAME) == home
    begun, repeated = (event["choices"][0]["token_ids"] for event in (first, again.next()))
    both = min(len(begun), len(repeated))  # an event may have several tokens
    assert both
    assert begun[:both] == repeated[:both]
    assert again.rest()[-1]["choices"][0]["finish_reason"] == "length"
    again.close()
    usage = router.post(prompt=fields["prompt"]).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 128
    shown = servers[0].get("/health").json()["routers"]
    assert {entry["url"]: entry["registered"] for entry in shown}[router.url]


def test_an_instance_killed_while_streaming_is_not_noticed(cluster):
    """The stream continues elsewhere within a bound, token by token: both choices, sampled,
    with penalties that depend on all earlier output, and log-probabilities."""
    router, *servers = cluster
    fields = {
        "prompt": "a stream that breaks, " * 20,
        "max_tokens": 400,
        "ignore_eos": True,
        "n": 2,
        "seed": 11,
        "temperature": 0.9,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
        "logprobs": 1,
        "return_token_ids": True,
    }
    home, pieces = broken_stream(router, servers, fields, after=9)

    whole = router.post(**fields).json()["choices"]
    for choice in whole:
        parts = [part for piece in pieces for part in piece["choices"]]
        parts = [part for part in parts if part["index"] == choice["index"]]
        assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
        offsets = [at for part in parts for at in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        values = [v for part in parts for v in part["logprobs"]["token_logprobs"]]
        assert values == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)
    # Lost, and removed some time later: the stream may have taken longer.
    router.until(lambda known: home not in known or known[home]["state"] == "lost")


def test_a_stopped_instance_drains(cluster):
    """Lesson 59: a stopped instance finishes its requests, new ones go elsewhere; without any
    instance there is a 503."""
    router, *servers = cluster
    server = next(server for server in servers if server.process.poll() is None)
    stream = Stream(router.url, {"prompt": "drains", "max_tokens": 300})
    stream.next()

    server.process.send_signal(signal.SIGTERM)

    assert stream.rest()[-1]["choices"][0]["finish_reason"] == "length"
    stream.close()
    assert server.wait() == 0
    answer = router.post()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_instance"
    assert httpx.get(f"{router.url}/health").status_code == 503
    assert router.stop() == 0


def test_up_refuses_impossible_clusters_with_a_message():
    """A cluster without instances, or with only one role of a pair, is refused with a
    message."""
    for arguments, sentence in [
        ([], "say how many instances"),
        (["--prefill", "1"], "need --decode instances"),
    ]:
        command = LiveCommand("up", *arguments)
        assert command.process.wait(timeout=30) == 1
        command._reader.join()
        assert sentence in "".join(command.lines)


def test_up_can_be_stopped_while_it_loads():
    """Ctrl-C at any time leaves nothing behind."""
    command = LiveCommand("up", "--mixed", "1", "--port", "0")
    command.until_printed("loading 1")
    pid = command.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    assert command.stop(signal.SIGINT) == 0, command.lines
    assert len(children) == 2
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
