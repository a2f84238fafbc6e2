"""Two engines on one GPU: the speed of each link, and what a hand-off costs.

    links   another process pushes blocks into the pool of an engine, which idles or decodes
    first   another process prefills; this one is asked for the first token

`share` compares a link with its ceiling in the same run: `cuda` with one copy within the device
(`device_copy_gb_s`), the staged links with pinned copies. `first` compares with the same prompt
computed by the decode instance alone, whose prefill takes as long as that of its peer.
"""

import json
import os
import secrets
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from threading import Event
from typing import Any

import numpy as np
import torch

from headwater.bench._gpu_decode import blocks_for, serve_batch
from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine
from headwater.bench._gpu_handoff_ceilings import measure_copies, measure_loopback
from headwater.bench._gpu_handoff_process import Far, far_process
from headwater.clock import SystemClock
from headwater.config import EngineConfig, PeersConfig
from headwater.device.gpu.peer_blocks import CudaBlocks
from headwater.device.model import LoadedModel
from headwater.device.open import open_copier
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.staging.registry import StagedLinks
from headwater.disagg.protocol.push import BlockReceived, LeaseClosed, LinkEvent
from headwater.engine.client import EngineInfo
from headwater.errors import EngineDead
from headwater.launch.host_memory import HostMemory
from headwater.launch.peers import open_peers
from headwater.scheduler.request import Request, SamplingParams
from headwater.types import RequestId

LINKS = ("cuda", "shm", "tcp")
_PUSHED_BLOCKS = {"cuda": 512, "shm": 512, "tcp": 128}
"""Blocks of a push; fewer on a link that is a hundred times slower."""

CONFIG = LinkConfig(token=b"bench links", connect_timeout_s=10.0)
PROMPT_TOKENS = 32_768
_WARM_TOKENS = 8192
_NUM_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
_CHUNK_BLOCKS = 8192 // BLOCK_TOKENS
_PREFILL_TOKENS_S = 25_000
"""About as many tokens per second as one prefill instance of an 8B model computes: the rate of
the measurement `paced`."""

_BATCH = 32
_TIMEOUT_S = 60.0


def measure_handoff(
    make_model: Callable[[], LoadedModel], shape: str, found: dict[str, Any], *, is_quick: bool
) -> None:
    """Put the figures of each link into `found`; a link that fails does not stop the others."""
    os.environ["HEADWATER_PEER_TOKEN"] = secrets.token_hex(16)
    found["links"], found["first"] = {}, {}
    # The processes start at the same time, and before anything is timed.
    with far_process("prefill", shape) as prefill, far_process("sender") as sender:
        model = make_model()
        sender.ask(_pool_shape(model))
        prefill.listen()
        found["ceilings"] = ceilings = measure_copies() | measure_loopback(sender)
        torch.cuda.empty_cache()
        engine = GpuEngine(
            model,
            num_blocks=blocks_for(_BATCH) + _NUM_BLOCKS,
            max_num_seqs=_BATCH,
            shared=True,
        )
        serve_batch(engine, _BATCH, seed=1)
        target = _Target(engine)
        for link in LINKS:
            found["links"][link] = _attempt(
                f"links {link}",
                partial(_measure_link, target, sender, link, ceilings, is_quick=is_quick),
            )
            found["first"][link] = _attempt(
                f"first {link}",
                partial(_measure_first, model, prefill, link, rounds=1 if is_quick else 2),
            )
        engine.close()


def join_peers(engine: GpuEngine, role: str, link: str) -> str:
    """Let an engine take part in hand-offs; returns its address for peers."""
    peers = PeersConfig(role=role, link=link)  # type: ignore[arg-type] # checked by it
    info = EngineInfo(
        model_name="bench",
        model_dir="",
        max_model_len=engine.scheduler.max_model_len,
        vocab_size=0,
        block_tokens=BLOCK_TOKENS,
        num_device_blocks=0,
        max_num_seqs=0,
        fingerprint="",
        eos_token_ids=(),
    )
    config = EngineConfig(device="cuda", block_tokens=BLOCK_TOKENS, peers=peers)
    memory = HostMemory(engine.runner.pool, engine.runner, engine.clock)
    joined = open_peers(config, engine.core, engine.scheduler, memory, info, engine.clock)
    assert joined.peer_address
    return joined.peer_address


def handoff_engine(model: LoadedModel) -> GpuEngine:
    """An engine for two prompts, with steps as long as those of a prefill instance."""
    return GpuEngine(
        model,
        num_blocks=2 * _NUM_BLOCKS + 64,
        max_num_seqs=8,
        max_batched_tokens=8192,
        shared=True,
    )


class _Target:
    """Slots of an engine's pool that another process pushes to."""

    def __init__(self, engine: GpuEngine) -> None:
        self.engine = engine
        slots = engine.cache.take(_NUM_BLOCKS, now=engine.clock.now())
        assert slots is not None, "the pool is too small"
        self.slots = slots.tolist()
        self.block_bytes = engine.block_bytes
        self._lease = 0
        self._num_left = 0
        self.all_received, self.closed = Event(), Event()
        self.ended_s = 0.0
        pool = engine.runner.pool
        self.links = StagedLinks(
            CONFIG,
            pool.block_bytes,
            lambda slab: open_copier(pool, slab, engine.clock, for_links=True),
            self._deliver,
            engine.clock,
            device=CudaBlocks(pool),
        )

    def expect(self, num_blocks: int) -> int:
        """Open a lease for this many blocks and return its number."""
        self._lease += 1
        self._num_left = num_blocks
        self.all_received.clear()
        return self._lease

    def _deliver(self, event: LinkEvent) -> None:
        if isinstance(event, BlockReceived):
            self._num_left -= 1
            if self._num_left == 0:
                self.ended_s = self.engine.clock.now()
                self.all_received.set()
        elif isinstance(event, LeaseClosed):
            self.closed.set()


def _measure_link(
    target: _Target, far: Far, link: str, ceilings: dict[str, float], *, is_quick: bool
) -> dict[str, Any]:
    """The rate of a prompt's KV, alone; and decode steps while blocks arrive."""
    receiver = target.links.listen(link)
    try:
        far.ask({"address": receiver.address})
        seconds, num_blocks = [], _PUSHED_BLOCKS[link]
        for _ in range(2 + (3 if is_quick or link == "tcp" else 15)):
            lease = target.expect(num_blocks)
            receiver.open(lease, target.slots)
            told = far.ask({"lease": lease, "num_blocks": num_blocks})
            assert told["outcome"] == "PushDone", told
            assert target.all_received.wait(_TIMEOUT_S), "blocks are missing"
            seconds.append(target.ended_s - told["began_s"])
            target.closed.clear()
            receiver.fence(lease)
            assert target.closed.wait(_TIMEOUT_S), "the lease was not closed"
        taken_s = median(seconds[2:])
        gb_s = num_blocks * target.block_bytes / taken_s / 1e9
        pinned = min(ceilings["host_to_device_gb_s"], ceilings["device_to_host_gb_s"])
        ceiling = ceilings["device_copy_gb_s"] if link == "cuda" else pinned
        found: dict[str, Any] = {"ms": taken_s * 1e3, "gb_s": gb_s, "share": gb_s / ceiling}
        found["best_ms"] = min(seconds[2:]) * 1e3
        period_s = _CHUNK_BLOCKS * BLOCK_TOKENS / _PREFILL_TOKENS_S
        for name, pace, rounds in (("paced", (100, period_s), 3), ("unpaced", (4000, 0.0), 1)):
            rounds = 1 if is_quick else rounds
            found[name] = _decode_beside(target, receiver, far, pace, rounds=rounds)
        return found
    finally:
        receiver.close()


def _decode_beside(
    target: _Target,
    receiver: Any,  # noqa: ANN401 -- a Receiver
    far: Far,
    pace: tuple[int, float],
    *,
    rounds: int,
) -> dict[str, float]:
    """Decode steps without and with arriving chunks of blocks, in turns. `pace` is the number
    of chunks and the seconds between two chunks. Prompts are cached, so that nearly everything
    is decoding."""
    engine = target.engine
    plain: list[float] = []
    beside: list[float] = []
    num_chunks = 0
    for _ in range(rounds):
        plain += serve_batch(engine, _BATCH, seed=1).steps_s[4:]
        leases = [target.expect(0) for _ in range(pace[0])]
        for lease in leases:
            receiver.open(lease, target.slots[:_CHUNK_BLOCKS])
        far.tell({"leases": leases, "num_blocks": _CHUNK_BLOCKS, "period_s": pace[1]})
        beside += serve_batch(engine, _BATCH, seed=1).steps_s[4:]
        told = far.ask({"stop": True})
        num_chunks += told["num_pushed"]
        rate = told["gb_s"]
        for lease in leases:
            receiver.fence(lease)
    found = {"steps": len(beside), "chunks": num_chunks, "gb_s": rate}
    for which in (50, 99):
        without, with_blocks = (float(np.percentile(s, which)) for s in (plain, beside))
        found[f"step_p{which}_ms"] = without * 1e3
        found[f"step_p{which}_ms_with_blocks"] = with_blocks * 1e3
        found[f"p{which}_ratio"] = with_blocks / without
    return found


def _measure_first(model: LoadedModel, far: Far, link: str, *, rounds: int) -> dict[str, Any]:
    """Seconds to the first token by hand-off, and by this instance alone."""
    far.tell({"link": link})
    engine = handoff_engine(model)
    try:
        address = far.listen()["peer_address"]
        join_peers(engine, "decode", link)
        for prefill in ("", address):  # warm-up: kernels of each size, the connection
            _first_s(engine, _WARM_TOKENS, prefill)
        # Cold on both instances: each prompt is new.
        pairs = [
            (_first_s(engine, PROMPT_TOKENS, ""), _first_s(engine, PROMPT_TOKENS, address))
            for _ in range(rounds)
        ]
        return {
            "local_ms": median(local for local, _ in pairs) * 1e3,
            "handed_off_ms": median(handed_off for _, handed_off in pairs) * 1e3,
            "added_ms": median(b - a for a, b in pairs) * 1e3,
            "each_added_ms": [round((b - a) * 1e3, 2) for a, b in pairs],
            "handoffs": repr(engine.core.stats().handoffs["decode"]),
        }
    finally:
        engine.close()
        far.ask({"stop": True})


def _first_s(engine: GpuEngine, num_tokens: int, prefill: str) -> float:
    """Seconds to the first of two tokens of a new prompt."""
    seed = secrets.randbits(32)
    name = RequestId(f"first-{seed}")
    began_s = engine.clock.now()
    request = Request(
        request_id=name,
        tokens=engine.prompt(num_tokens, seed=seed),
        params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        arrival_s=began_s,
    )
    engine.core.add(replace(request, prefill=prefill, local_fallback=False))
    first_s = 0.0
    while True:
        engine.core.wait()
        for output in engine.core.step():
            first_s = first_s or engine.clock.now() - began_s
            if output.finish_reason is not None:
                if not output.tokens and not first_s:
                    raise EngineDead(f"no token came: {output.finish_reason}")
                return first_s


def _pool_shape(model: LoadedModel) -> dict[str, int]:
    return {
        "num_layers": model.num_layers,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "num_blocks": _NUM_BLOCKS,
    }


def _attempt(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures, which are also printed at once; or the error as a sentence."""
    clock = SystemClock()
    began_s = clock.now()
    try:
        found = measure()
    except Exception as error:  # noqa: BLE001 -- reported, and the other links are measured
        traceback.print_exc()
        found = {"failed": repr(error)}
    seconds = clock.now() - began_s
    print(f"{name}: {seconds:.1f} s {json.dumps(found)}", file=sys.stderr, flush=True)
    return found
