"""Dynamo's KV router beside Headwater's, each before two equal workers: share of prompts found.

    VENV/bin/python benchmarks/dynamo_router.py

Runs under the Python of a Dynamo environment, without etcd and NATS. Two Headwater workers are behind
Dynamo's frontend, and two servers with the same flags behind `headwater route`. The same multi-turn load
goes through both, in turns. Conversations take turns, so a prefix must be found again after many others.
One engine has not enough blocks for all conversations: a router that ignores prefixes loses many.

--frontend-flags may be given several times. Each has a frontend of its own before the same two workers, and
all take turns with loads of their own. With --mocker each load also goes through a frontend with the same
flags before two of Dynamo's own simulated engines: what Dynamo's router does with workers that are not ours.

"known" is what Dynamo's router expected to be found where it sent the prompts, and at best elsewhere, by its
own metrics. If it knew of more than it chose, the loss is a decision and not a missing KV event.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

SOURCE = Path(__file__).resolve().parent.parent / "src"
sys.path.insert(0, str(SOURCE))

from headwater.device import builtin  # noqa: E402 - found through SOURCE
from headwater.testing.ports import free_port  # noqa: E402 - found through SOURCE

RECOMMENDED = "--router-prefill-load-scale 16"
"""The flags of docs/plugins.md."""

BLOCK = 16
_READY_S = 240
_MODEL = "m"


_PLANES = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]


class Cluster:
    """The processes: a router of each kind, with two workers each. Ends them all."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._blocks = options.blocks
        self._variants = options.frontend_flags
        self._verbose = options.verbose
        self._running: list[subprocess.Popen[bytes]] = []
        kinds = ["dynamo", *(["mocker"] if options.mocker else [])]
        self.kinds = [*kinds, "headwater"]
        places = [("headwater", 0)]
        places += [(kind, at) for kind in kinds for at in range(len(self._variants))]
        self.urls = {place: f"http://127.0.0.1:{free_port()}" for place in places}
        """The URL of each kind of router, for each set of flags."""

    def start(self) -> None:
        environ = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "HEADWATER_PEER_TOKEN": "of-the-benchmark-only",
            "OMP_NUM_THREADS": "1",
            # Dynamo takes a worker out that does not accept a request within 5 s. On a busy
            # machine that is no failure.
            "DYN_TCP_REQUEST_TIMEOUT": "60",
        }
        model = str(builtin.ensure())
        flags = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(self._blocks)]
        router = self.urls["headwater", 0]
        self._run(["headwater", "route", "--port", _port(router)], environ)
        name = ["--served-model-name", _MODEL]
        discovery = {**environ, "DYN_FILE_KV": str(self._folder / "discovery")}
        for _ in range(2):
            self._run(["headwater.plugins.dynamo", model, *name, "--", *flags], discovery)
            place = ["--port", "0", "--router", router]
            self._run(["headwater", "serve", model, *name, *flags, *place], environ)
        self._start_frontends("dynamo", discovery)
        if "mocker" in self.kinds:
            discovery = {**environ, "DYN_FILE_KV": str(self._folder / "mocker")}
            command = ["dynamo.mocker", "--model-path", model, "--model-name", _MODEL, *flags]
            for _ in range(2):
                self._run([*command, *_PLANES], discovery)
            self._start_frontends("mocker", discovery)

    def url(self, kind: str, variant: int) -> str:
        return self.urls[kind, 0 if kind == "headwater" else variant]

    def _start_frontends(self, kind: str, environ: dict[str, str]) -> None:
        for number, flags in enumerate(self._variants):
            port = _port(self.urls[kind, number])
            place = ["--http-host", "127.0.0.1", "--http-port", port]
            mode = ["--router-mode", "kv", *flags.split()]
            self._run(["dynamo.frontend", *_PLANES, *place, *mode], environ)

    def stop(self) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check(self) -> None:
        """Raise SystemExit when a process has ended."""
        for process in self._running:
            if process.poll() is not None:
                raise SystemExit(
                    f"{process.args!r} ended with {process.returncode}\n{self._output(process)}"
                )

    def _run(self, module: list[str], environ: dict[str, str]) -> None:
        command = [sys.executable, "-m", *module]
        if self._verbose:
            self._running.append(subprocess.Popen(command, env=environ))
            return
        with self._log(len(self._running)).open("wb") as file:
            self._running.append(
                subprocess.Popen(command, env=environ, stdout=file, stderr=subprocess.STDOUT)
            )

    def _output(self, process: subprocess.Popen[bytes]) -> str:
        """The last lines that a process wrote."""
        path = self._log(self._running.index(process))
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-20:])

    def _log(self, number: int) -> Path:
        return self._folder / f"{number}.log"


class Load:
    """Conversations that take turns; counts prompt tokens, and those found in a cache."""

    def __init__(self, url: str, seed: int, options: argparse.Namespace) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self._options = options
        self._system = self._words(options.system)
        self.prompt_tokens = 0
        self.cached_tokens = 0

    async def run(self, session: aiohttp.ClientSession) -> float:
        """All turns of all conversations; the share of prompt tokens that were found."""
        histories = [
            self._system + self._words(self._options.first)
            for _ in range(self._options.conversations)
        ]
        slots = asyncio.Semaphore(self._options.concurrency)
        for _ in range(self._options.turns):
            turns = list(range(len(histories)))
            self._rng.shuffle(turns)

            async def ask(number: int) -> None:
                async with slots:
                    answer = await self._complete(session, histories[number])
                histories[number] += answer + self._words(self._options.growth)

            await asyncio.gather(*(ask(number) for number in turns))
        return self.cached_tokens / self.prompt_tokens

    async def _complete(self, session: aiohttp.ClientSession, prompt: str) -> str:
        body = {"model": _MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            assert response.status == 200, f"{response.status}: {await response.text()}"
            answer: dict[str, Any] = await response.json()
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += details.get("cached_tokens") or 0
        return str(answer["choices"][0]["text"])

    def _words(self, count: int) -> str:
        return "".join(self._rng.choice("abcdefghijklmnop ") for _ in range(count))


async def wait_ready(cluster: Cluster, session: aiohttp.ClientSession) -> None:
    """Each router sees its two workers."""

    async def get(url: str) -> Any:  # noqa: ANN401 - JSON
        try:
            async with session.get(url) as response:
                return await response.json() if response.status == 200 else None
        except aiohttp.ClientError:
            return None

    async def has_two(kind: str, url: str) -> bool:
        if kind == "headwater":
            known = await get(f"{url}/instances") or {}
            return len(known.get("instances", ())) == 2
        health = await get(f"{url}/health") or {}
        models = await get(f"{url}/v1/models") or {}
        workers = [one for one in health.get("instances", ()) if one["endpoint"] == "generate"]
        return len(workers) == 2 and bool(models.get("data"))

    for _ in range(_READY_S * 2):
        cluster.check()
        waiting = [
            place for place, url in cluster.urls.items() if not await has_two(place[0], url)
        ]
        if not waiting:
            return
        await asyncio.sleep(0.5)
    raise SystemExit(f"not ready after {_READY_S} s: {waiting}")


async def measure(cluster: Cluster, options: argparse.Namespace) -> list[dict[str, object]]:
    """For each of the flags, the share that each kind of router found, round by round."""
    variants = options.frontend_flags
    shares: list[dict[str, list[float]]] = [{k: [] for k in cluster.kinds} for _ in variants]
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await wait_ready(cluster, session)
        for number in range(options.rounds * len(variants)):
            at = number % len(variants)
            for kind in cluster.kinds:
                load = Load(cluster.url(kind, at), number, options)
                shares[at][kind].append(await load.run(session))
        results = [summarise(*pair) for pair in zip(variants, shares, strict=True)]
        for at, result in enumerate(results):
            result["known"] = await read_known(cluster.url("dynamo", at), session)
    return results


async def read_known(url: str, session: aiohttp.ClientSession) -> dict[str, float]:
    """Shares of prompt tokens that Dynamo's router expected to be found, from its metrics."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    start = "dynamo_component_router_"
    sums: dict[str, float] = {}
    for line in lines:
        if line.startswith(start):
            name = line.removeprefix(start).split("{")[0]
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    asked = sums["input_sequence_tokens_sum"]
    chosen = sums["kv_selected_cached_prefix_tokens_total"]
    best = sums["kv_best_eligible_cached_prefix_tokens_total"]
    return {"chosen": round(chosen / asked, 4), "best": round(best / asked, 4)}


def summarise(flags: str, shares: dict[str, list[float]]) -> dict[str, object]:
    """Medians over the rounds; the ratio is the median of the rounds' ratios."""
    pairs = zip(shares["dynamo"], shares["headwater"], strict=True)
    ratios = [theirs / ours for theirs, ours in pairs]
    return {
        "flags": flags,
        **{kind: round(median(values), 4) for kind, values in shares.items()},
        "ratio": round(median(ratios), 4),
        "ratios": [round(one, 4) for one in ratios],
        "rounds": {kind: [round(v, 4) for v in values] for kind, values in shares.items()},
    }


def _port(url: str) -> str:
    return url.rsplit(":", 1)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--system", type=int, default=64, help="characters all prompts share")
    parser.add_argument(
        "--first", type=int, default=300, help="characters of the first message"
    )
    parser.add_argument(
        "--growth", type=int, default=120, help="characters of each later message"
    )
    parser.add_argument("--blocks", type=int, default=1200, help="KV blocks of each engine")
    parser.add_argument(
        "--frontend-flags",
        action="append",
        help=f"further flags of Dynamo's frontend, as one string (default: {RECOMMENDED})",
    )
    parser.add_argument(
        "--mocker", action="store_true", help="also measure Dynamo's own simulated engines"
    )
    parser.add_argument("--verbose", action="store_true", help="show messages of all processes")
    options = parser.parse_args()
    options.frontend_flags = options.frontend_flags or [RECOMMENDED]
    folder = Path(tempfile.mkdtemp(prefix="dynamo-router-"))
    cluster = Cluster(folder, options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the processes, too
    try:
        cluster.start()
        result = asyncio.run(measure(cluster, options))
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
