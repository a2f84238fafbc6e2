"""Recordings: requests of a server are repeated in a replay, without their content."""

import asyncio
import json
from contextlib import aclosing

import numpy as np
import pytest

from headwater.clock import SystemClock
from headwater.engine.record_file import RecordFile
from headwater.engine.recorded import _MAX_PENDING, Recording
from headwater.errors import ConfigError
from headwater.replay.recordings import is_recording, read_recording
from headwater.replay.simulator import Simulator
from headwater.replay.workload import at_speed
from headwater.scheduler.request import Request, SamplingParams
from headwater.types import RequestId
from tests.engine.processes import OwnedEngine
from tests.replay.traces import gib, make_config

BLOCK = 16


def make_request(name, tokens, *, salt="", max_tokens=8):
    return Request(
        request_id=RequestId(name),
        tokens=np.array(tokens, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrival_s=SystemClock().now(),
        cache_salt=salt,
    )


async def serve_turns(path, num_turns=4):
    """Two conversations of several turns on a live engine; returns what each request found."""
    file = RecordFile(path, start_s=SystemClock().now())
    engine = await OwnedEngine().start()
    engine.record(file.begin(BLOCK))
    found, histories = [], [list(range(40)), list(range(40, 75))]
    try:
        for turn in range(num_turns):
            for which, history in enumerate(histories):
                request = make_request(f"{turn}-{which}", history, max_tokens=23)
                async with aclosing(engine.generate(request)) as outputs:
                    async for output in outputs:
                        history += output.tokens
                        if output.usage is not None:
                            found.append(output.usage.cached_tokens)
                history += [7, 8, 9 + turn]
    finally:
        await engine.close()
        file.close()
    return found, histories


@pytest.mark.slow
def test_a_replay_of_a_recording_finds_what_the_live_engine_found(tmp_path):
    """Cached tokens are equal request by request, including generated blocks that returned with
    the next turn."""
    path = tmp_path / "served.jsonl"
    found, _ = asyncio.run(serve_turns(path))
    # The simulated machine is far slower than the echo: let each turn end before the next.
    requests = at_speed(read_recording(path), 1e-4)
    run = Simulator(make_config(device_gib=gib(64)), requests).run()

    assert is_recording(path)
    assert [one.usage.cached_tokens for one in run.instances[0].served if one.usage] == found
    assert found[-1] > 40  # more than its first prompt: generated blocks are found too


@pytest.mark.slow
def test_nothing_of_the_content_is_in_a_recording(tmp_path):
    """A recording has only times, lengths and keys; the same requests have other keys the next
    time."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (first, second):
        asyncio.run(serve_turns(path, num_turns=2))
    rows = [json.loads(line) for line in first.read_text().splitlines()]
    keys = [key for row in rows[1:] for key in row["keys"]]
    others = [json.loads(line) for line in second.read_text().splitlines()][1:]

    assert rows[0] == {"headwater_recording": 1, "block_tokens": BLOCK}
    assert {name for row in rows[1:] for name in row} == {
        *("timestamp", "input_length", "output_length", "keys"),
    }
    assert all(len(key) == 16 and set(key) <= set("0123456789abcdef") for key in keys)
    assert not set(keys) & {key for row in others for key in row["keys"]}
    assert first.stat().st_mode & 0o077 == 0


def write(path, requests, *, block_tokens=BLOCK):
    """Record (tokens, output, salt) without an engine."""
    file = RecordFile(path, start_s=SystemClock().now())
    recording = Recording(file.begin(block_tokens))
    recording.start()
    for number, (tokens, output, salt) in enumerate(requests):
        recording.note(make_request(str(number), tokens, salt=salt), output)
    recording.close()
    recording.close()
    file.close()
    return read_recording(path)


def test_equal_blocks_have_equal_ids_and_tenants_share_none(tmp_path):
    """A key stands for its block and everything before it; another salt gives another key
    (lesson 67)."""
    prompt = list(range(40))
    same, longer, other, tenant = write(
        tmp_path / "r.jsonl",
        [
            (prompt, [1], ""),
            ([*prompt, 1, 2, 3], [4] * 20, ""),
            ([9, *prompt[1:]], [1], ""),
            (prompt, [1], "another"),
        ],
    )

    assert same.hash_ids[:2] == longer.hash_ids[:2]
    assert same.hash_ids[2] != longer.hash_ids[2]
    assert not set(same.hash_ids) & (set(other.hash_ids) | set(tenant.hash_ids))
    assert (longer.input_length, longer.output_length, longer.block_tokens) == (43, 20, BLOCK)
    output = longer.known_output()
    assert output is not None
    assert len(output) == 20


def test_writing_never_waits_and_what_is_too_much_is_counted(tmp_path, caplog):
    """If the thread that writes is too slow, requests are missing in the recording; nothing
    else happens."""
    file = RecordFile(tmp_path / "r.jsonl", start_s=0.0)
    recording = Recording(file.begin(BLOCK))
    for number in range(_MAX_PENDING + 5):  # they are not taken before the thread starts
        recording.note(make_request(str(number), [1, 2, 3]), [4])
    assert recording.num_dropped == 5

    recording.start()
    recording.close()
    file.close()
    assert len(read_recording(tmp_path / "r.jsonl")) == _MAX_PENDING
    assert "count=5" in caplog.text


def test_a_recording_overwrites_nothing_and_leaves_nothing_empty(tmp_path):
    """An existing file is an error at start; an engine that never started leaves no file."""
    path = tmp_path / "r.jsonl"
    RecordFile(path, start_s=0.0).close()
    assert not path.exists()

    path.write_text("precious")
    with pytest.raises(ConfigError, match="is not overwritten"):
        RecordFile(path, start_s=0.0)
    with pytest.raises(ConfigError, match="cannot write"):
        RecordFile(tmp_path / "absent" / "r.jsonl", start_s=0.0)


def test_damaged_recordings_are_explained(tmp_path):
    """The message names the line and what is wrong with it."""
    path = tmp_path / "r.jsonl"
    head = '{"headwater_recording": 1, "block_tokens": 16}\n'
    for text, message in (
        ('{"headwater_recording": 2, "block_tokens": 16}\n', "version 2"),
        ('{"headwater_recording": 1}\n', "first line"),
        ('{"headwater_recording": 1, "block_tokens": 0}\n', "first line"),
        (head + "{}\n", "line 2"),
        (
            head + '{"timestamp": 0, "input_length": 40, "output_length": 1, "keys": []}\n',
            "fit",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_recording(path)
    assert not is_recording(tmp_path / "absent")
