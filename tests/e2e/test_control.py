"""Control of a live server under traffic: pause, abort, reset, other weights."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headwater.device.builtin import LlamaShape, make_llama
from tests.e2e.live import LiveServer

pytestmark = pytest.mark.slow

PROMPTS = ["".join(f"{word} {n} " for n in range(40)) for word in ("rain", "river", "sea")]
SHAPE = LlamaShape()


def body(prompt, **fields):
    return {
        "prompt": prompt,
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    } | fields


class Traffic:
    """Clients that repeat the same prompts until they are stopped."""

    def __init__(self, server, *, clients=3):
        self._server = server
        self.num_clients = clients
        self._stop = threading.Event()
        self._answered = threading.Condition()
        self.answers = []
        self._pool = ThreadPoolExecutor(clients)
        self._tasks = [self._pool.submit(self._ask, n) for n in range(clients)]

    def _ask(self, number):
        turn = number
        while not self._stop.is_set():
            prompt = PROMPTS[turn % len(PROMPTS)]
            answer = self._server.post("/v1/completions", body(prompt))
            with self._answered:
                self.answers.append((prompt, answer))
                self._answered.notify_all()
            turn += 1

    def wait_for(self, count):
        """Wait until `count` more requests were answered."""
        with self._answered:
            end = len(self.answers) + count
            assert self._answered.wait_for(lambda: len(self.answers) >= end, timeout=60)

    def stop(self):
        self._stop.set()
        for task in self._tasks:
            task.result(timeout=60)
        self._pool.shutdown()
        return self.answers


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one shape, one of another, and a folder that is not a model."""
    folder = tmp_path_factory.mktemp("models")
    make_llama(folder / "a", SHAPE, seed=1)
    make_llama(folder / "b", SHAPE, seed=2)
    make_llama(folder / "wide", LlamaShape(layers=SHAPE.layers + 1), seed=1)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    server = LiveServer(
        str(models / "a"),
        *("--swap-space", "0.02", "--write-policy", "write_through"),
        *("--kvcache-storage-backend", "file"),
        *("--kvcache-storage-config", f'{{"path": "{store}"}}'),
    ).wait_ready()
    yield server
    assert server.until_idle()["tiers"]["device"]["held"] == 0
    assert server.stop() == 0, server.errors


@pytest.fixture
def traffic(server):
    traffic = Traffic(server)
    traffic.wait_for(3)
    yield traffic
    traffic.stop()


def tokens(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def expected(server):
    return {prompt: tokens(server.post("/v1/completions", body(prompt))) for prompt in PROMPTS}


def test_pause_holds_traffic_and_resume_lets_it_go_on(server, traffic):
    """Lesson 58: no request is refused, none is admitted, and nothing is lost."""
    assert server.post("/v1/pause").status_code == 200
    try:
        # All requests wait, so no answer is still in transit.
        state = server.until(lambda state: state["num_waiting"] >= traffic.num_clients)
        assert state["is_paused"]
        count = len(traffic.answers)
        assert server.get("/health").status_code == 200
        assert len(traffic.answers) == count
    finally:
        assert server.post("/v1/resume").status_code == 200
    traffic.wait_for(3)

    answers = traffic.stop()

    wanted = expected(server)
    assert all(tokens(answer) == wanted[prompt] for prompt, answer in answers)


def test_abort_ends_one_request_and_leaves_the_others(server, traffic):
    """A request is aborted by the client's name for it while others run; its client gets the
    reason."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(
            server.post,
            "/v1/completions",
            body("a long one", max_tokens=4000, request_id="mine"),
        )
        while not any(
            entry["request_id"].startswith("mine-")
            for entry in server.get("/stats").json()["sequences"]
        ):
            pass
        ended = server.post("/v1/abort_requests", {"request_ids": ["mine"]})
        assert ended.json() == {"aborted": 1}
        assert long.result(timeout=60).status_code == 499
    assert server.post("/v1/abort_requests", {"request_ids": ["mine"]}).json() == {"aborted": 0}
    traffic.wait_for(3)

    assert all(answer.status_code == 200 for _, answer in traffic.stop())


def test_abort_all_under_load_returns_every_slot(server, traffic):
    """Lesson 58: every slot is returned in any state of each request."""
    server.post("/v1/abort_requests", {"abort_all": True})
    traffic.wait_for(3)
    answers = traffic.stop()

    assert {answer.status_code for _, answer in answers} <= {200, 499}
    assert server.until_idle()["tiers"]["device"]["held"] == 0


def test_reset_under_load_changes_no_token(server, traffic):
    """Lesson 59: the cache is reset repeatedly while requests run; each keeps the blocks it
    has."""
    for _ in range(5):
        assert server.post("/reset_prefix_cache").status_code == 200
        traffic.wait_for(1)
    answers = traffic.stop()

    wanted = expected(server)
    assert all(tokens(answer) == wanted[prompt] for prompt, answer in answers)


def test_other_weights_under_load_serve_everyone_and_mix_nothing(server, models, traffic):
    """Lesson 39: every answer comes completely from one of the two models; no request is
    refused; blocks of the old weights are found again, in storage, only when these weights are
    loaded again."""
    old = server.get("/server_info").json()["engine"]["fingerprint"]
    answer = server.post("/v1/reload_weights", {"model": str(models / "b")})
    assert answer.status_code == 200, answer.text
    new = answer.json()["fingerprint"]
    assert answer.json()["changed"]
    assert new != old
    assert server.get("/server_info").json()["engine"]["fingerprint"] == new
    traffic.wait_for(6)
    assert server.post("/v1/reload_weights", {"model": str(models / "a")}).json() == {
        "fingerprint": old,
        "changed": True,
    }
    traffic.wait_for(3)

    answers = traffic.stop()

    first = expected(server)
    assert server.post("/v1/reload_weights", {"model": str(models / "b")}).status_code == 200
    second = expected(server)
    assert server.post("/v1/reload_weights", {"model": str(models / "a")}).status_code == 200
    assert all(first[prompt] != second[prompt] for prompt in PROMPTS)
    for prompt, answer in answers:
        assert tokens(answer) in (first[prompt], second[prompt])
    assert {tuple(tokens(answer)) for _, answer in answers} & {
        tuple(chosen) for chosen in second.values()
    }


def test_a_refused_reload_changes_nothing(server, models, traffic):
    """A model of another shape, a folder without a model and a folder elsewhere get an error
    message, and traffic continues."""
    before = server.get("/server_info").json()["engine"]["fingerprint"]
    for model, message in (
        (models / "wide", "another shape: num_layers"),
        (models / "empty", "no config.json"),
        (models.parent, "in the same parent folder as"),
    ):
        answer = server.post("/v1/reload_weights", {"model": str(model)})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    traffic.wait_for(3)

    assert all(answer.status_code == 200 for _, answer in traffic.stop())
    assert server.get("/server_info").json()["engine"]["fingerprint"] == before
    assert server.post("/v1/reload_weights").json()["changed"] is False
    assert not server.get("/cache").json()["is_paused"]


def test_a_reload_that_cannot_drain_in_time_is_refused(server):
    """The reload is refused with the code `not_drained`; running requests continue to their
    end."""
    running = server.open_stream(max_tokens=600)
    running.next()

    answer = server.post("/v1/reload_weights", {"drain_timeout_s": 0.05})

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "not_drained"
    assert len(running.rest()) > 1
    running.close()
    assert not server.get("/cache").json()["is_paused"]


def test_weights_that_were_replaced_in_place_are_read(server, models, tmp_path):
    """A trainer usually writes new files into the same folder."""
    before = server.get("/server_info").json()["engine"]["fingerprint"]
    kept = tmp_path / "kept"
    shutil.copytree(models / "a", kept)
    try:
        shutil.copy(models / "b" / "model.safetensors", models / "a" / "model.safetensors")
        assert server.post("/v1/reload_weights").json()["changed"]
    finally:
        shutil.copy(kept / "model.safetensors", models / "a" / "model.safetensors")
    assert server.post("/v1/reload_weights").json() == {"fingerprint": before, "changed": True}
