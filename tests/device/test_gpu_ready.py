"""After an engine on a GPU is ready, nothing is compiled, and constrained rows make progress."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from headwater.config import EngineConfig
from headwater.engine.core import EngineCore
from headwater.engine.masks import MaskedRow, PendingMasks
from headwater.launch.core import build_core
from headwater.scheduler.batch import ScheduledBatch
from headwater.scheduler.request import Request, SamplingParams
from headwater.types import RequestId
from tests.device.gpu import pytestmark, require_gpu

require_gpu()

from headwater.device.gpu.runner import CudaRunner  # noqa: E402 - it imports Triton

__all__ = ["pytestmark"]

ANY_JSON = json.dumps({"grammars": [{"json_schema": {"type": "array", "minItems": 1000}}]})
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0.7, "min_p": 0.1, "seed": 3},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.0, "presence_penalty": 0.4, "logit_bias": {5: 3.0}},
    {"temperature": 0.8, "grammar": ANY_JSON},
)


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    config = EngineConfig(
        device="cuda",
        max_num_seqs=24,
        max_batched_tokens=512,
        num_blocks_override=512,
        swap_space_gib=0.25,
    )
    made, _ = build_core(config)
    yield made
    made.close()


def serve(core: EngineCore, requests: list[Request]) -> dict[str, list[int]]:
    """Serve all at once; return the outputs."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    left = len(requests)
    for _ in range(20_000):
        if not left:
            return answers
        core.wait()
        for output in core.step():
            answers[output.request_id] += output.tokens
            left -= output.finish_reason is not None
    raise AssertionError(f"{left} requests do not end")


def make_request(name: str, tokens: list[int], **params: object) -> Request:
    return Request(
        request_id=RequestId(name),
        tokens=np.array(tokens, dtype=np.int32),
        params=SamplingParams(max_tokens=12, ignore_eos=True, **params),  # type: ignore[arg-type]
        arrival_s=0.0,
    )


def test_nothing_is_compiled_after_ready(core: EngineCore) -> None:
    """No kernel is compiled for prompts of random lengths, cached and not, alone and together,
    with every kind of sampling."""
    random = np.random.default_rng(5)
    before: list[int] = []
    for wave in range(6):
        requests = []
        for number in range(1 if wave == 0 else 24):
            tokens = random.integers(0, 250, int(random.integers(1, 700))).tolist()
            if before and random.random() < 0.5:
                tokens = before[: int(random.integers(1, len(before) + 1))] + tokens[:40]
            before = tokens
            kind = KINDS[number % len(KINDS)]
            requests.append(make_request(f"{wave}-{number}", tokens, **kind))
        answers = serve(core, requests)
        assert all(len(tokens) == 12 for tokens in answers.values())

    assert core.count_compilations is not None
    assert core.count_compilations() == 0
    assert core.stats().num_compilations == 0


def test_many_constrained_rows_make_progress_with_two_steps_in_flight(core: EngineCore) -> None:
    """Each step waits for the masks of all rows, which follow the tokens of the step before."""
    requests = [
        make_request(
            f"json-{number}", list(range(number + 1)), temperature=0.8, grammar=ANY_JSON
        )
        for number in range(24)
    ]
    steps = core.stats().num_steps
    answers = serve(core, requests)

    assert all(
        bytes(t for t in tokens if t < 256).startswith(b"[") for tokens in answers.values()
    )
    assert core.stats().num_steps - steps < 400


def test_masks_of_first_tokens_are_made_while_the_forward_pass_is_queued(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They await no token of the step before. Later masks do, and are begun when their step is
    queued."""
    runner = core._runner
    assert isinstance(runner, CudaRunner)
    assert runner._masks is not None
    serve(core, [make_request("compile", [3], temperature=0.8, grammar=ANY_JSON)])
    calls: list[str] = []
    begin, compute = runner._masks.begin, runner.compute

    def note_begin(rows: Sequence[MaskedRow]) -> PendingMasks:
        calls.append("begin")
        return begin(rows)

    def note_compute(batch: ScheduledBatch) -> Any:
        calls.append("compute")
        return compute(batch)

    monkeypatch.setattr(runner._masks, "begin", note_begin)
    monkeypatch.setattr(runner, "compute", note_compute)
    request = make_request("first", [4, 5, 6], temperature=0.8, grammar=ANY_JSON)
    serve(core, [request])

    assert calls[:4] == ["begin", "compute", "compute", "begin"]
