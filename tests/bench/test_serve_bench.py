"""`headwater bench serve`: the documented figures, and parsing of streamed answers."""

import json
from itertools import pairwise

import pytest

from headwater.bench._client import Answer
from headwater.bench._conversations import WORKLOADS, make_workload
from headwater.bench.serve import ratios, summarise
from headwater.cli import main

KEYS = {
    "workload",
    "model",
    "engine",
    "concurrency",
    "cache",
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "itl_p50_ms",
    "cached_share",
    "decide_share",
    "waited_share",
    "tokens_per_cpu_s",
}


@pytest.mark.slow
def test_json_has_the_promised_keys(capsys):
    """The command prints one JSON object; a shared prefix hits with a cache, and not without
    one."""
    flags = ["--quick", "--json", "--concurrency", "2", "--workloads", "shared-prefix"]
    assert main(["bench", "serve", *flags, "--output-tokens", "4"]) == 0

    with_cache, without = json.loads(capsys.readouterr().out)["rows"]
    assert set(with_cache) == set(without) == KEYS
    assert (with_cache["cache"], without["cache"]) == (True, False)
    assert with_cache["cached_share"] > 0.5
    assert without["cached_share"] == 0
    assert 0 < with_cache["decide_share"] < 1
    assert with_cache["output_tokens_per_s"] > 0


def chunked(*events: object) -> list[bytes]:
    """Each event as a server sends it, in its own chunk."""
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    lines.append(b"data: [DONE]\n\n")
    return [b"%x\r\n%s\r\n" % (len(line), line) for line in lines]


def token(number: int) -> dict[str, object]:
    return {"choices": [{"text": "x", "token_ids": [number]}]}


def answer_of(cuts: list[int]) -> Answer:
    """An answer of two tokens, whose bytes arrive in pieces that end at `cuts`."""
    usage = {"prompt_tokens": 8, "completion_tokens": 2}
    usage_event = {
        "choices": [],
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": 6}},
    }
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = head + b"".join(chunked(token(3), token(4), usage_event)) + b"0\r\n\r\n"
    ends = [0, *cuts, len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(ends)]
    return Answer(began_s=1.0, reads=[(2.0 + n, piece) for n, piece in enumerate(pieces)])


@pytest.mark.parametrize("cut", range(40, 130, 7))
def test_a_reply_is_read_wherever_the_network_splits_it(cut):
    """Events, tokens and usage do not depend on how the bytes are divided."""
    answer = answer_of([cut])

    assert len(answer.event_times_s()) == 2
    assert answer.token_ids() == [3, 4]
    assert answer.usage()["completion_tokens"] == 2


def test_figures_are_what_the_clients_saw():
    """The report has the times to the first token, gaps between tokens and shares of the
    prompt."""
    row = summarise([answer_of([100])], seconds=4.0)

    assert row["output_tokens_per_s"] == 0.5
    assert row["ttft_p50_ms"] == 1000
    assert row["itl_p50_ms"] in (0, 1000)
    assert row["cached_share"] == 0.75


@pytest.mark.parametrize("engine", ["vllm-compiled", "baseline"])
def test_ratios_are_ours_over_theirs(engine):
    """Each case that both servers ran gives one line; a ratio above 1 is better for tokens/s
    and worse for times."""
    case = {"workload": "full-hit", "model": "tiny", "concurrency": 1, "cache": True}
    figures = dict.fromkeys(
        ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "tokens_per_cpu_s"), 2.0
    )
    ours = case | figures | {"engine": "headwater", "output_tokens_per_s": 30.0}
    theirs = case | figures | {"engine": engine, "output_tokens_per_s": 20.0}

    (ratio,) = ratios([ours, theirs])

    assert ratio["against"] == engine
    assert ratio["output_tokens_per_s"] == 1.5
    assert ratio["ttft_p50_ms"] == 1.0


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_workload(name):
    """A seed gives one workload; another seed shares no prefix with it."""
    first, again, other = (
        make_workload(name, concurrency=2, vocab=32_000, seed=seed, output_tokens=4)
        for seed in (1, 1, 2)
    )

    assert first == again
    openings = [work.conversations[0].opening[:32] for work in (first, other)]
    assert openings[0] != openings[1]
    assert len({tuple(talk.opening) for talk in first.conversations}) == 1
