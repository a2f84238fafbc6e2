"""Dynamo's KV router beside Headwater's, each before two equal workers: share of prompts found.

    VENV/bin/python benchmarks/dynamo_router.py

Runs under the Python of a Dynamo environment, without etcd and NATS. Two Headwater workers are behind
Dynamo's frontend, and two servers with the same flags behind `headwater route`. The same multi-turn load
goes through both, in turns. Conversations take turns, so a prefix must be found again after many others.
One engine has not enough blocks for all conversations: a router that ignores prefixes loses many.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
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

BLOCK = 16
_READY_S = 240
_MODEL = "m"


class Cluster:
    """The processes: a router of each kind, with two workers each. Ends them all."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._blocks = options.blocks
        self._flags = options.frontend_flags.split()
        self._verbose = options.verbose
        self._running: list[subprocess.Popen[bytes]] = []
        self.dynamo_url = f"http://127.0.0.1:{_free_port()}"
        self.router_url = f"http://127.0.0.1:{_free_port()}"

    def start(self) -> None:
        environ = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "HEADWATER_PEER_TOKEN": "of-the-benchmark-only",
            "OMP_NUM_THREADS": "1",
        }
        model = str(builtin.ensure())
        flags = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(self._blocks)]
        self._run(["headwater", "route", "--port", _port(self.router_url)], environ)
        name = ["--served-model-name", _MODEL]
        for _ in range(2):
            self._run(["headwater.plugins.dynamo", model, *name, "--", *flags], environ)
            place = ["--port", "0", "--router", self.router_url]
            self._run(["headwater", "serve", model, *name, *flags, *place], environ)
        planes = [
            "--discovery-backend",
            "file",
            "--request-plane",
            "tcp",
            "--event-plane",
            "zmq",
        ]
        place = ["--http-host", "127.0.0.1", "--http-port", _port(self.dynamo_url)]
        mode = ["--router-mode", "kv", *self._flags]
        self._run(["dynamo.frontend", *planes, *place, *mode], environ)

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
                raise SystemExit(f"{process.args!r} ended with {process.returncode}")

    def _run(self, module: list[str], environ: dict[str, str]) -> None:
        output = None if self._verbose else subprocess.DEVNULL
        command = [sys.executable, "-m", *module]
        self._running.append(
            subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        )


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
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
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

    for _ in range(_READY_S * 2):
        cluster.check()
        known = await get(f"{cluster.router_url}/instances") or {}
        health = await get(f"{cluster.dynamo_url}/health") or {}
        models = await get(f"{cluster.dynamo_url}/v1/models") or {}
        workers = [one for one in health.get("instances", ()) if one["endpoint"] == "generate"]
        if len(known.get("instances", ())) == len(workers) == 2 and models.get("data"):
            return
        await asyncio.sleep(0.5)
    raise SystemExit(f"not ready after {_READY_S} s: {known} {health} {models}")


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, object]:
    shares: dict[str, list[float]] = {"dynamo": [], "headwater": []}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await wait_ready(cluster, session)
        urls = {"dynamo": cluster.dynamo_url, "headwater": cluster.router_url}
        for number in range(options.rounds):
            for name, url in urls.items():
                load = Load(url, number, options)
                shares[name].append(await load.run(session))
    found = {name: round(median(values), 4) for name, values in shares.items()}
    ratio = round(found["dynamo"] / found["headwater"], 4)
    rounds = {f"{name}_rounds": [round(v, 4) for v in all_] for name, all_ in shares.items()}
    return {**found, "ratio": ratio, **rounds}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
    parser.add_argument("--growth", type=int, default=120, help="characters of each later one")
    parser.add_argument("--blocks", type=int, default=1200, help="KV blocks of each engine")
    parser.add_argument(
        "--frontend-flags",
        default="--router-prefill-load-scale 8",
        help="further flags of Dynamo's frontend, as one string (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="show messages of all processes")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dynamo-router-"))
    cluster = Cluster(folder, options)
    try:
        cluster.start()
        result = asyncio.run(measure(cluster, options))
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
