"""CudaRunner in float32 gives the tokens of the CPU reference, however a sequence is
computed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.clock import SystemClock
from headwater.device.model import LoadedModel, load
from headwater.scheduler.request import SamplingParams
from tests.device.driver import Driver
from tests.device.families import Reference, assert_same_tokens, prompt, save_family
from tests.device.gpu import pytestmark, require_gpu

require_gpu()

from headwater.device.gpu.runner import CudaRunner  # noqa: E402 - it imports Triton
from headwater.device.kernels.prefill import has_hopper_kernel  # noqa: E402

__all__ = ["pytestmark"]

COUNT = 16
LAUNCH = "headwater.device.kernels.prefill_hopper.attend_chunks"


def make_driver(model: LoadedModel, **settings: Any) -> Driver:
    return Driver(model, runner_class=CudaRunner, **settings)


@pytest.fixture(scope="module")
def on_gpu(family: Callable[[str], Path]) -> LoadedModel:
    return load(family("llama"), device="cuda")


@pytest.mark.parametrize("block_tokens", [1, 16, 64])
def test_chunks_prefixes_and_neighbours_change_nothing(
    on_gpu: LoadedModel, llama_reference: Reference, block_tokens: int
) -> None:
    """Cached equals uncached and chunked equals whole, in mixed batches with rows in any
    order."""
    driver = make_driver(on_gpu, block_tokens=block_tokens, num_blocks=512)
    old = driver.add(prompt(70), name="old")
    driver.step((old, 70))
    full = 69 // block_tokens
    again = driver.add(prompt(70), name="again", shared=old.slots[:full])
    late = driver.add(prompt(50, seed=50), name="late")

    driver.step((late, 30), (old, 1))
    driver.step((old, 1), (again, 70 - full * block_tokens), (late, 20))
    driver.finish(late, old, again, count=COUNT)

    truth = llama_reference.generate(prompt(70), COUNT)
    assert_same_tokens(old.output, *truth)
    assert_same_tokens(again.output, *truth)
    assert_same_tokens(late.output, *llama_reference.generate(prompt(50, seed=50), COUNT))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_short_chunks_run_as_decode_rows_and_change_nothing(
    name: str, family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached equals uncached and chunked equals whole when every token of a chunk is a row of a
    graph: alone, beside decodes, unfinished, and with the next step carried from it."""
    reference, model = Reference(family(name)), load(family(name), device="cuda")
    driver = make_driver(model, block_tokens=16, num_blocks=512, max_num_seqs=128)
    monkeypatch.setattr(driver.runner, "_run_packed", None)
    old = driver.add(prompt(70), name="old")
    driver.step((old, 70))
    again = driver.add(prompt(70), name="again", shared=old.slots[:3])
    late = driver.add(prompt(50, seed=50), name="late")

    driver.step((old, 1), (late, 30))
    driver.submit((old, 1), (again, 22), (late, 20))
    driver.submit((late, 1), (old, 1), (again, 1))
    driver.collect()
    driver.collect()
    driver.finish(late, old, again, count=COUNT)

    truth = reference.generate(prompt(70), COUNT)
    assert_same_tokens(old.output, *truth)
    assert_same_tokens(again.output, *truth)
    assert_same_tokens(late.output, *reference.generate(prompt(50, seed=50), COUNT))


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_two_steps_in_flight_equal_one(on_gpu: LoadedModel, num_rows: int) -> None:
    """The next input is carried on the device from the previous step, although the order of the
    rows has changed."""
    one, two = make_driver(on_gpu), make_driver(on_gpu)
    prompts = [prompt(9 + i, seed=i) for i in range(num_rows)]
    plain = [one.add(tokens, name=str(i)) for i, tokens in enumerate(prompts)]

    one.finish(*plain, count=COUNT)
    carried = two.run_two_ahead(prompts, count=COUNT)

    assert [row.output for row in carried] == [row.output for row in plain]


def test_a_step_has_the_time_of_the_device(on_gpu: LoadedModel) -> None:
    """A result that is collected late does not make its step longer: its time ends when the
    device has finished it."""
    driver, clock = make_driver(on_gpu), SystemClock()
    row = driver.add(prompt(9), name="row")
    driver.finish(row, count=2)
    began_s = clock.now()
    driver.submit((row, 1))
    torch.cuda.synchronize()
    done_s = clock.now()
    driver.submit((row, 1))
    first, second = driver.collect(), driver.collect()

    assert 0 < first.seconds <= done_s - began_s
    assert 0 < second.seconds <= clock.now() - done_s


WAYS = [
    SamplingParams(temperature=0.9, top_p=0.95, top_k=30, seed=7),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, logprobs=2, logit_bias={5: 3.0}),
    SamplingParams(temperature=0.0),
]


def test_sampling_is_that_of_the_cpu(on_gpu: LoadedModel, llama: LoadedModel) -> None:
    """Seeded, penalised, biased and plain rows in one batch get the tokens of the CPU sampler,
    with two steps in flight."""
    cpu, gpu = Driver(llama), make_driver(on_gpu)
    theirs = [
        cpu.add(prompt(8, seed=i), name=str(i), params=params) for i, params in enumerate(WAYS)
    ]
    ours = [
        gpu.add(prompt(8, seed=i), name=str(i), params=params) for i, params in enumerate(WAYS)
    ]

    cpu.finish(*theirs, count=COUNT)
    gpu.submit(*((row, 8) for row in ours))
    for _ in range(COUNT - 1):
        gpu.submit(*((row, 1) for row in ours))
        gpu.collect()
    gpu.collect()

    for mine, other in zip(ours, theirs, strict=True):
        assert mine.output == other.output
        for got, wanted in zip(mine.results, other.results, strict=True):
            assert (got is None) == (wanted is None)
            if got is not None and wanted is not None:
                assert got.top_ids == wanted.top_ids
                assert abs(got.chosen - wanted.chosen) < 1e-3


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_long_prompt_at_once_equals_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    """In bfloat16 a whole prompt uses torch's kernel with padding, or the Hopper kernel with 36
    tiles; three chunks use the kernel for few tiles. The last logits agree."""
    folder = save_family("llama", tmp_path, head_dim=head_dim, max_position_embeddings=8192)
    model = load(folder, device="cuda", dtype="bfloat16")
    tokens = torch.randint(1, 128, (4500,)).int().numpy()
    calls: list[int] = []
    chosen = []
    for sizes in ((4500,), (1500, 1500, 1500)):
        driver = make_driver(model, num_blocks=80, block_tokens=64)
        if not has_hopper_kernel(driver.runner.pool.data):
            pytest.skip("for Hopper, and a version of Triton it is known to work with")
        calls.append(0)
        monkeypatch.setattr(LAUNCH, counting(calls))
        row = driver.add(tokens, params=SamplingParams(temperature=0.0, logprobs=5))
        for size in sizes:
            driver.step((row, size))
        chosen.append(row.results[-1])
        monkeypatch.undo()

    assert [count > 0 for count in calls] == [head_dim == 128, False]
    assert set(chosen[0].top_ids) & set(chosen[1].top_ids)
    assert abs(chosen[0].top_values[0] - chosen[1].top_values[0]) < 0.2


def counting(calls: list[int]) -> Callable[..., None]:
    """The Hopper kernel, counting its launches in the last of `calls`."""
    from headwater.device.kernels.prefill_hopper import attend_chunks

    def launch_counted(*given: Any) -> None:
        calls[-1] += 1
        attend_chunks(*given)

    return launch_counted


def test_a_short_suffix_in_a_graph_equals_one_outside(tmp_path: Path) -> None:
    """The few tokens after a cached prefix have the same logits in bfloat16, captured and
    not."""
    folder = save_family("llama", tmp_path, head_dim=64, max_position_embeddings=2048)
    model = load(folder, device="cuda", dtype="bfloat16")
    for num_new in (2, 16, 17, 63, 64):
        found = []
        for is_captured in (True, False):
            driver = make_driver(model, num_blocks=40, block_tokens=64)
            if not is_captured:
                driver.runner._suffixes = None
            row = driver.add(
                prompt(704, seed=3)[: 640 + num_new],
                params=SamplingParams(temperature=0.0, logprobs=5),
            )
            for size in (250, 250, 140, num_new):
                driver.step((row, size))
            found.append(row.results[-1])

        assert set(found[0].top_ids) & set(found[1].top_ids)
        assert abs(found[0].top_values[0] - found[1].top_values[0]) < 0.1
